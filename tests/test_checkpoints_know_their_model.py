"""Every call with a checkpoint refuses that of an edited model; a new call has to be listed here."""

import importlib
import inspect
import pkgutil

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import CheckpointError
from bayeskit.inference.evidence import adaptive_smc, generalised_stepping_stone, thermodynamic_integration
from bayeskit.inference.evidence._calibration import SMALL
from bayeskit.inference.evidence._comparison import compare
from bayeskit.inference.samplers import SGLD, MinibatchTarget, sample_stochastic_gradient, sample_with_pyro
from bayeskit.inference.samplers._ladder import sample_ladder
from bayeskit.inference.samplers._nested import sample_nested
from bayeskit.inference.samplers._smc import sample_smc
from bayeskit.models.unnormalised import fit_energy
from bayeskit.models.unnormalised._models import EnergyModel
from bayeskit.workflows import learn_likelihood

F64 = torch.float64
Y = torch.tensor([2.0, 1.5, 2.5, 0.5], dtype=F64)


def model_of(edited):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 0.7 if edited else 5.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


def simulator_of(edited):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 2.0 if edited else 1.0), obs=y)

    return model


def target(edited):
    return bk.Target.from_pyro(model_of(edited), Y)


def guide(y):
    scale = pyro.param("scale", torch.tensor(0.5, dtype=F64), constraint=dist.constraints.positive)
    pyro.sample("mean", dist.Normal(pyro.param("loc", torch.tensor(0.0, dtype=F64)), scale))


def energy(edited):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(3))
    model = EnergyModel.of_bits(lambda x: (x * weight).sum(-1) + (x[..., 0] * x[..., 1] if edited else 0.0), 3)
    model.weight = weight
    return model


def minibatches(edited):
    def log_prior(u):
        return dist.Normal(0.0, 0.7 if edited else 5.0).log_prob(u).sum(-1)

    def log_likelihood(u, rows):
        return dist.Normal(u, 1.0).log_prob(Y[rows])

    return MinibatchTarget.from_functions(log_prior, log_likelihood, 1, len(Y), batch_size=2)


SHORT = {"num_warmup": 50, "num_samples": 50, "progress": False}
CALLS = {
    "sample": lambda e, path: bk.sample(target(e), checkpoint=path, **SHORT),
    "sample_with_pyro": lambda e, path: sample_with_pyro(target(e), 2, 20, 20, checkpoint=path, progress=False),
    "sample_smc": lambda e, path: sample_smc(target(e), num_particles=64, checkpoint=path, progress=False),
    "sample_nested": lambda e, path: sample_nested(target(e), num_live=50, checkpoint=path, progress=False),
    "sample_ladder": lambda e, path: sample_ladder(
        target(e), 3, num_warmup=40, num_samples=40, checkpoint=path, progress=False
    ),
    "sample_stochastic_gradient": lambda e, path: sample_stochastic_gradient(
        minibatches(e), SGLD(0.01), 2, 10, 10, initial=torch.zeros(2, 1, dtype=F64), checkpoint=path, progress=False
    ),
    "fit": lambda e, path: bk.fit(
        model_of(e), guide, bk.objectives.ELBO(), (Y,), num_steps=5, checkpoint=path, progress=False
    ),
    "fit_energy": lambda e, path: fit_energy(energy(e), torch.eye(3), num_steps=5, checkpoint=path, progress=False),
    "amortize": lambda e, path: bk.amortize(
        simulator_of(e), (Y,), sizes=(1, 4), num_steps=3, batch_size=8, checkpoint=path, progress=False
    ),
    "adaptive_smc": lambda e, path: adaptive_smc(target(e), num_particles=64, checkpoint=path, progress=False),
    "thermodynamic_integration": lambda e, path: thermodynamic_integration(target(e), checkpoint=path, progress=False),
    "generalised_stepping_stone": lambda e, path: generalised_stepping_stone(
        target(e), bk.sample(target(e), **SHORT), checkpoint=path, progress=False
    ),
    "compare": lambda e, path: compare(target(e), ["bridge_sampling"], budget=SMALL, checkpoint=path, progress=False),
    "compare_models": lambda e, path: bk.compare_models(
        {"a": target(e), "b": target(False)}, budget=SMALL, checkpoint=path, progress=False
    ),
    "learn_likelihood": lambda e, path: learn_likelihood(
        lambda theta, generator: theta + (0.5 if e else 1.0) * torch.randn(theta.shape, generator=generator),
        dist.Normal(torch.zeros(1), 2.0).to_event(1),
        num_simulations=500,
        num_epochs=2,
        checkpoint=path,
        progress=False,
    ),
    "sbc": lambda e, path: bk.sbc(
        model_of(e), args=(Y,), num_replicates=20, num_draws=9, checkpoint=path, progress=False
    ),
}
#: Calls with tests of edited models in files of their own, and helpers that take what these calls give.
ELSEWHERE = {
    "map_tasks": "tests/test_parallel.py",
    "calibrate": "tests/inference/evidence/test_calibration.py",
    "run_generated_exam": "tests/workflows/test_generated_exam.py",
    "compare_topologies": "tests/models/phylogenetics/workflows/test_topology_comparison_inputs.py",
    "infer_topologies": "tests/models/phylogenetics/workflows/test_topology_inference.py",
    "variational_inference": "tests/models/phylogenetics/workflows/test_variational_phylogenetics_storage.py",
    "Control": "inside of all samplers",
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::bayeskit.errors.BayeskitWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_edited_model_is_refused(name, tmp_path):
    path = tmp_path / "checkpoint"
    CALLS[name](False, path)
    assert list(tmp_path.iterdir())
    CALLS[name](False, path)  # the same run again is no mistake
    with pytest.raises(CheckpointError):
        CALLS[name](True, path)


def test_every_call_with_a_checkpoint_is_listed():
    found = set()
    for module in pkgutil.walk_packages(bk.__path__, "bayeskit."):
        loaded = importlib.import_module(module.name) if not module.name.endswith("__main__") else None
        for name in getattr(loaded, "__all__", []):
            try:
                parameters = inspect.signature(getattr(loaded, name)).parameters
            except (TypeError, ValueError):
                continue
            if "checkpoint" in parameters:
                found.add(name)
    assert found == {*CALLS, *ELSEWHERE}
