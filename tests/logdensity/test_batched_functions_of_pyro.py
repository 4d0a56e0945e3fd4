"""Pyro's functions that assign in place or branch on values, as they are batched: the same values and gradients."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LatentStableReparam, LinearHMMReparam, StableReparam, StudentTReparam
from pyro.ops.special import safe_log
from target_checks import F64

from bayeskit import Target
from bayeskit._core.evaluation import with_gradient_loop
from bayeskit._logdensity import pyro_distributions as batching

Y = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=F64)


def gaussian_chain(y):
    turn = pyro.sample("turn", dist.Uniform(-1.0, 1.0).expand([2, 2]).to_event(2))
    moves = pyro.sample("moves", dist.HalfNormal(1.0).expand([2]).to_event(1)) + 0.1
    noise = pyro.sample("noise", dist.HalfNormal(1.0)) + 0.1
    first, move = dist.Normal(torch.zeros(2), 1.0).to_event(1), dist.Normal(torch.zeros(2), moves).to_event(1)
    seen = dist.Normal(torch.zeros(1), noise[None]).to_event(1)
    pyro.sample("y", dist.GaussianHMM(first, turn, move, torch.ones(2, 1), seen, duration=len(y)), obs=y[:, None])


def dense_gaussian_chain(y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0)) + 0.1
    identity = torch.eye(2)
    first = dist.MultivariateNormal(torch.zeros(2), identity)
    move = dist.MultivariateNormal(torch.zeros(2), scale * identity)
    seen = dist.MultivariateNormal(torch.zeros(2), identity)
    pyro.sample("y", dist.GaussianHMM(first, identity, move, identity, seen, duration=6), obs=y.reshape(6, 2))


def gamma_chain(y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0)) + 0.1
    one = dist.MultivariateNormal(torch.zeros(1), torch.eye(1))
    move = dist.MultivariateNormal(torch.zeros(1), scale[None, None])
    mixed = dist.Gamma(torch.tensor(2.0), torch.tensor(2.0))
    chain = dist.GammaGaussianHMM(mixed, one, torch.eye(1), move, torch.eye(1), one, duration=len(y))
    pyro.sample("y", chain, obs=y[:, None])


def heavy_chain(y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0)) + 0.1
    heavy = dist.StudentT(3.0, torch.zeros(1), 1.0).to_event(1)
    move = dist.StudentT(3.0, torch.zeros(1), scale).to_event(1)
    chain = dist.LinearHMM(heavy, torch.eye(1), move, torch.eye(1), heavy, duration=len(y))
    with poutine.reparam(config={"y": LinearHMMReparam(StudentTReparam(), StudentTReparam(), StudentTReparam())}):
        pyro.sample("y", chain, obs=y[:, None])


def discrete_chain(y):
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2)).expand([2]).to_event(1))
    means = pyro.sample("means", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    chain = dist.DiscreteHMM(torch.zeros(2), rows.log(), dist.Normal(means, 1.0), duration=len(y))
    pyro.sample("y", chain, obs=y)


def logarithm(y):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    pyro.factor("y", (safe_log(share) * y.abs()).sum())


def stable(y):
    stability = pyro.sample("stability", dist.Uniform(0.5, 1.5))
    skew = pyro.sample("skew", dist.Uniform(-1.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with poutine.reparam(config={"y": StableReparam()}), pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Stable(stability, skew, scale, 0.0), obs=y)


def latent_stable(y):
    stability = pyro.sample("stability", dist.Uniform(0.5, 1.5))
    skew = pyro.sample("skew", dist.Uniform(-1.0, 1.0))
    with poutine.reparam(config={"z": LatentStableReparam()}):
        z = pyro.sample("z", dist.Stable(stability, skew, 1.0, 0.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


MODELS = [
    *(gaussian_chain, dense_gaussian_chain, gamma_chain, heavy_chain, discrete_chain, logarithm, stable, latent_stable)
]


def compared(model):
    target = Target.from_pyro(model, Y, compile=False)
    assert not target.loops
    u = 0.5 * torch.randn(5, target.dim, generator=torch.Generator().manual_seed(1), dtype=F64)
    u[0, 0] = 0.0  # a stability of one, in the middle of the hole around it
    u[1, 0] = 0.012
    found = target.value_and_grad(u)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_EXCHANGED", {})
        exact = with_gradient_loop(target.density.joint)(u, torch.ones_like(u[:, 0]))
    return found, (exact.log_density, exact.gradient)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_values_and_gradients_are_those_of_pyro(model):
    (value, gradient), (exact, slope) = compared(model)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-8, atol=1e-8)


def test_the_logarithm_of_little_and_of_nothing():
    x = torch.tensor([0.0, 1e-300, 1e-20, 1e-15, 0.5, 3.0], dtype=F64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, exact = batching._safe_logarithm(ours), safe_log(theirs)
    assert found.equal(exact)
    found.sum().backward()
    exact.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-15, atol=0)


@pytest.mark.filterwarnings("ignore:the gradient:bayeskit.errors.AccuracyWarning")  # which notices it, too
def test_slopes_that_cancel_are_noticed(monkeypatch):
    """A mutation: one over the rounding unit added and taken away leaves nothing of smaller slopes."""

    def cancelling(x):
        above = x.clamp(min=torch.finfo(x.dtype).eps)
        line = above.log() + (x - above) / torch.finfo(x.dtype).eps
        return line + (x.log() - line).detach()

    monkeypatch.setattr(batching._SafeLogarithm, "apply", staticmethod(cancelling))
    with pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_pyro(logarithm)
