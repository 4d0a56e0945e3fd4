import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

# The mutation forgets to wrap the objective, so that gradients are not averaged. What torchrun would tell its
# processes, this script tells its own copies, so that all is imported once.
WORKER = """
import functools, os, sys, traceback
import pyro, torch
import torch._dynamo  # which optimizers import
import pyro.distributions as dist
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from safetensors.torch import save_file
from bayeskit.distributed import Ranks, process_group
from bayeskit.inference.objectives import ELBO, GECO, SUMO, VCD, DReG, MeanSquaredError, ReweightedWakeSleep
from bayeskit.inference.training import fit
from bayeskit.models.vae import LinearVAE

class Forgetful(Ranks):
    def wrap(self, objective):
        return objective

class Model(PyroModule):
    def forward(self, x):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", 64, subsample=torch.arange(len(x))):
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

class Indexed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.loc = torch.nn.Parameter(torch.zeros(1))

    def model(self, x, i):
        with pyro.plate("data", 64, subsample=i):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.expand(*z.shape[:-1], 2), 1.0).to_event(1), obs=x)

    def guide(self, x, i):
        with pyro.plate("data", 64, subsample=i):
            pyro.sample("z", dist.Normal(self.loc * x[:, :1], 1.0).to_event(1))

torch.set_default_dtype(torch.float64)
x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + 1

def train(ranks, epochs, path=None):
    model = Model()
    guide = AutoNormal(model)
    result = fit(model, guide, ELBO(), x, num_epochs=epochs, batch_size=16, ranks=ranks, validation=x[:8], patience=9,
                 optimizer=functools.partial(torch.optim.Adam, lr=0.02), checkpoint=path, progress=False)
    return guide, result

def work(ranks, rank_path, checkpoint):
    guide, result = train(ranks, 6)
    train(ranks, 3, checkpoint)
    again, resumed = train(ranks, 6, checkpoint)
    apart, _ = train(Forgetful(ranks.rank, ranks.world_size, ranks.device), 1)
    alike = []
    for objective in (DReG(3), SUMO(), ReweightedWakeSleep(3), GECO(MeanSquaredError("x", 0.5)), VCD(num_steps=1)):
        torch.manual_seed(0)
        vae = LinearVAE(2, 1)
        before = [p.detach().clone() for p in vae.parameters()]
        fit(vae.model, vae.guide, objective, x, num_epochs=2, batch_size=16, ranks=ranks, progress=False)
        moved = any(not torch.equal(a, b) for a, b in zip(before, vae.parameters()))
        alike.append(ranks.same_everywhere(vae) and moved)
    indexed, contrastive = Indexed(), VCD(num_steps=1)
    fit(indexed.model, indexed.guide, contrastive, (x, torch.arange(64)), num_epochs=1, batch_size=16, ranks=ranks,
        progress=False)
    facts = {
        "table": contrastive.state_dict()["control_variate"],
        "alike": torch.tensor(alike),
        "same": torch.tensor(ranks.same_everywhere(guide)),
        "apart": torch.tensor(not ranks.same_everywhere(apart)),
        "resumed": torch.tensor(all(map(torch.equal, guide.parameters(), again.parameters()))),
        "losses": result.losses, "validation": result.validation_losses,
    }
    save_file({k: v.detach().clone() for k, v in guide.named_parameters()} | facts, rank_path + str(ranks.rank))

def copy(folder, rank, world_size, port):
    process = os.fork()
    if process == 0:
        try:
            if world_size > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                               "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with process_group() as ranks:
                work(ranks, folder + "/rank", folder + "/checkpoint")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process

store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks find each other in the store of this process
copies = [copy(sys.argv[1], 0, 1, "")] + [copy(sys.argv[2], rank, 2, str(store.port)) for rank in range(2)]
sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) != 0 for each in copies))
"""


def launch(folder):
    """Return what one process alone says, and what each of two says."""
    one, two = folder / "one", folder / "two"
    for path in (one, two):
        path.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    # On the processor, where one process and two draw alike.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, script, one, two]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(path) for path in (one / "rank0", two / "rank0", two / "rank1")]


@pytest.mark.long
def test_two_processes_do_what_one_does(tmp_path):
    alone, first, second = launch(tmp_path)
    assert bool(first["same"]) and bool(second["same"]) and bool(first["apart"]) and bool(second["apart"])
    assert all(bool(rank["resumed"]) for rank in (first, second, alone))
    # Objectives that weigh the gradients of model and guide apart, or learn something themselves.
    assert bool(first["alike"].all()) and bool(second["alike"].all())
    # Every datum was met by one process, and both know what it found.
    assert all(rank["table"].shape == (64,) and bool(rank["table"].isfinite().all()) for rank in (first, second, alone))
    assert torch.equal(first["table"], second["table"])
    for name in set(first) - {"same", "apart", "resumed", "alike", "table"}:
        assert torch.equal(first[name], second[name]), name
        # Rounding only: 24 Adam steps, each a sum of 16 rows in another order.
        assert float((first[name] - alone[name]).abs().max()) < 1e-12, name
