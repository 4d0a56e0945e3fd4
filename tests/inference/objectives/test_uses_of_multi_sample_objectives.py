"""The ways in which objectives are used: SVI, modules, minibatches, chunks, precision, kinds of guides."""

import math

import pyro
import pyro.distributions as dist
import pyro.infer
import pyro.nn
import pyro.optim
import pytest
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.inference.objectives._evidence_lower_bound import STL
from bayeskit.inference.objectives._importance_weighted import DReG, Renyi
from bayeskit.inference.objectives._reweighted_wake_sleep import ReweightedWakeSleep
from bayeskit.inference.objectives._sumo import SUMO
from bayeskit.inference.objectives._thermodynamic import TVO, EqualMoments, LogUniform

X = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.2, 0.8])


def objectives(**settings) -> list:
    return [
        STL(3, **settings),
        DReG(5, **settings),
        Renyi(0.5, 5, **settings),
        Renyi(-math.inf, 5, **settings),
        SUMO(**settings),
        SUMO(minimum_particles=3, centre=-2.0, **settings),
        ReweightedWakeSleep(5, **settings),
        ReweightedWakeSleep(5, sleep_phi=0.5, observed={"x": 0}, **settings),
        TVO(5, **settings),
        TVO(5, LogUniform(5), **settings),
        TVO(5, EqualMoments(4), **settings),
    ]


EVERY = pytest.mark.parametrize(
    "index", range(len(objectives())), ids=lambda i: f"{type(objectives()[i]).__name__}-{i}"
)


def model(x: Tensor, size: int | None = None) -> None:
    with pyro.plate("data", size or len(x), subsample_size=len(x)):
        z1 = pyro.sample("z1", dist.Normal(x.new_zeros(()), 1.0))
        z2 = pyro.sample("z2", pair(z1.expand(torch.broadcast_shapes(z1.shape, x.shape))))
        pyro.sample("x", dist.Normal(z2.sum(-1), 1.0), obs=x)


def pair(centre: Tensor) -> dist.Distribution:
    return dist.Normal(centre[..., None].expand(*centre.shape, 2), 1.0).to_event(1)


class Guide(pyro.nn.PyroModule):
    """Two levels, each a linear layer of what comes before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 2, dtype=dtype)
        self.second = torch.nn.Linear(2, 4, dtype=dtype)

    def forward(self, x: Tensor, size: int | None = None) -> None:
        with pyro.plate("data", size or len(x), subsample_size=len(x)):
            mean, log_sd = self.first(x[..., None]).unbind(-1)
            z1 = pyro.sample("z1", dist.Normal(mean, log_sd.exp()))
            out = self.second(torch.stack(torch.broadcast_tensors(x, z1), -1))
            pyro.sample("z2", dist.Normal(out[..., :2], out[..., 2:].exp()).to_event(1))


@pytest.fixture(autouse=True)
def seeded():
    with global_stream(new_generator(0, stream="uses")):
        yield


@pytest.mark.calibration
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_svi_trains_a_hierarchical_guide(index, dtype):
    guide, objective = Guide(dtype), objectives()[index]
    before = [p.detach().clone() for p in guide.parameters()]
    svi = pyro.infer.SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 5.0}), loss=objective)
    losses = [svi.step(X.to(dtype)) for _ in range(5)]
    assert all(math.isfinite(v) for v in losses)
    for old, new in zip(before, guide.parameters(), strict=True):
        assert new.dtype == dtype and not torch.equal(old, new.detach())


@EVERY
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 2}, {"vectorize_particles": False}], ids=str)
def test_as_a_module(index, settings):
    guide, objective = Guide(torch.float32), objectives(**settings)[index]
    loss = objective(model, guide)(X)
    loss.backward()
    assert loss.shape == () and all(bool(p.grad.isfinite().all()) for p in guide.parameters())
    assert any(float(p.grad.abs().max()) > 0 for p in guide.parameters())


def exact_guide(x: Tensor, size: int | None = None) -> None:
    """Posterior of z1 and z2 = (a, b), with a, b ~ N(z1, 1) and x ~ N(a + b, 1): x given z1 is N(2 z1, 3)."""
    with pyro.plate("data", size or len(x), subsample_size=len(x)):
        z1 = pyro.sample("z1", dist.Normal(2 * x / 7, math.sqrt(3 / 7)))
        mean = z1 + (x - 2 * z1) / 3
        cov = torch.tensor([[2.0, -1.0], [-1.0, 2.0]], dtype=x.dtype) / 3
        both = torch.stack([mean, mean], -1)
        pyro.sample("z2", dist.MultivariateNormal(both, cov.expand(*mean.shape, 2, 2)))


@pytest.mark.calibration
@EVERY
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 2}, {"vectorize_particles": False}], ids=str)
def test_at_the_exact_posterior_all_are_the_log_marginal_likelihood(index, settings):
    x = X.double()
    exact = -float(dist.Normal(x.new_zeros(()), math.sqrt(7.0)).log_prob(x).sum())
    objective = objectives(**settings)[index]
    assert objective.loss(model, exact_guide, x) == pytest.approx(exact, abs=1e-9)
    # A minibatch stands for all data.
    assert objective.loss(model, exact_guide, x, 60) == pytest.approx(10 * exact, abs=1e-8)


@EVERY
def test_functions_with_parameters_of_pyro(index):
    network = torch.nn.Linear(1, 2)

    def guide(x: Tensor) -> None:
        pyro.module("network", network)
        scale = pyro.param("scale", torch.ones(()), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            mean, log_sd = network(x[..., None]).unbind(-1)
            z1 = pyro.sample("z1", dist.Normal(mean, log_sd.exp()))
            pyro.sample("z2", dist.Normal(torch.stack([z1, z1], -1), scale).to_event(1))

    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=objectives()[index])
    assert all(math.isfinite(svi.step(X)) for _ in range(3))
    assert float(pyro.param("scale").detach()) != 1.0


@EVERY
def test_the_same_seed_gives_the_same_step(index):
    def step() -> list[Tensor]:
        with global_stream(new_generator(7)):
            guide, objective = Guide(torch.float64), objectives()[index]
            objective.differentiable_loss(model, guide, X.double()).backward()
            return [p.grad for p in guide.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))
