import os
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from safetensors.torch import load_file

from bayeskit.distributed import Ranks, process_group
from bayeskit.errors import SettingsError, WorkerError

EXAMPLES = Path(__file__).parents[1] / "examples" / "sampling"
EPOCHS = 2

# What each process runs. The mutation forgets to wrap the objective, so that gradients are not averaged.
WORKER = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from distributed_svi import train
from safetensors.torch import save_file
from bayeskit.distributed import Ranks, process_group

class Forgetful(Ranks):
    def wrap(self, objective):
        return objective

torch.set_default_dtype(torch.float64)
with process_group() as ranks:
    guide = train(ranks, {EPOCHS})
    same = ranks.same_everywhere(guide)
    apart = train(Forgetful(ranks.rank, ranks.world_size, ranks.device), 1)
    facts = {{"same": torch.tensor(same), "apart": torch.tensor(ranks.same_everywhere(apart))}}
    save_file({{k: v.detach().clone() for k, v in guide.named_parameters()}} | facts, sys.argv[1] + str(ranks.rank))
"""


def launch(folder, num_processes):
    script = folder / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    address = ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    run = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes), *address]
    command = [sys.executable, *run, script, folder / "rank"]
    # On the processor, where one process and two draw alike.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(folder / f"rank{rank}") for rank in range(num_processes)]


@pytest.fixture
def alone(monkeypatch):
    """Parameters after training in this process, on the processor, where one process and two draw alike."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from distributed_svi import train

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with process_group("gloo") as ranks:
            guide = train(ranks, EPOCHS)
            assert ranks.world_size == 1 and ranks.same_everywhere(guide)
    finally:
        torch.set_default_dtype(before)
    return {name: value.detach() for name, value in guide.named_parameters()}


@pytest.mark.long
def test_two_ranks_end_with_the_same_bits_and_do_what_one_process_does(tmp_path, alone):
    first, second = launch(tmp_path, 2)
    assert bool(first["same"]) and bool(second["same"])
    assert not bool(first["apart"])  # the mutation
    names = set(first) - {"same", "apart"}
    assert len(names) >= 3
    for name in names:
        assert torch.equal(first[name], second[name])
        # Rounding only: 16 Adam steps, each a sum of 128 rows in another order.
        assert float((first[name] - alone[name]).abs().max()) < 1e-12, name
    assert not any(torch.equal(first[name], torch.zeros_like(first[name])) for name in names)


def test_shares_of_a_minibatch_are_disjoint_and_complete():
    alone = list(Ranks().minibatches(10, 4, seed=3))
    shares = [list(Ranks(rank, 2).minibatches(10, 4, seed=3)) for rank in (0, 1)]
    assert [len(batch) for batch in alone] == [4, 4] and [len(batch) for batch in shares[0]] == [2, 2]
    for whole, left, right in zip(alone, *shares, strict=True):
        assert sorted(whole.tolist()) == sorted([*left.tolist(), *right.tolist()])
    assert len(torch.cat(alone).unique()) == 8
    other_epoch = list(Ranks().minibatches(10, 4, seed=3, epoch=1))
    assert not torch.equal(torch.cat(alone), torch.cat(other_epoch))


def test_noise_is_shared_or_each_ranks_own():
    def draw(rank, shared):
        return torch.randn(3, generator=Ranks(rank, 2).generator(5, shared=shared))

    assert torch.equal(draw(0, True), draw(1, True))
    assert not torch.equal(draw(0, False), draw(1, False))


class Model(PyroModule):
    def forward(self, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_alone_nothing_is_wrapped_and_the_setting_of_pyro_is_restored():
    before = pyro.settings.get("module_local_params")
    with process_group() as ranks:
        assert (ranks.rank, ranks.world_size) == (0, 1)
        model = Model()
        objective = Trace_ELBO()(model, AutoNormal(model))
        with pytest.raises(SettingsError, match="no parameters to train yet; call it once"):
            ranks.wrap(objective)
        objective(torch.zeros(2))
        assert ranks.wrap(objective) is objective
        assert not list(pyro.get_param_store().keys())
    assert pyro.settings.get("module_local_params") == before


@pytest.mark.parametrize("batch_size", [0, 3, 12])
def test_a_batch_size_that_cannot_be_shared_is_refused(batch_size):
    with pytest.raises(SettingsError, match="batch_size"):
        Ranks(0, 2).minibatches(10, batch_size, seed=0)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(SettingsError, match="rank"):
        Ranks(2, 2)


def test_processes_that_do_not_join_are_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(WorkerError, match=r"rank 1 could not join.*torchrun"), process_group(timeout=1.0):
        pass
