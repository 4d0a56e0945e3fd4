"""Guide sites that count for more or less than their log density, by a scale or a mask: gradients in closed form."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import Normal, kl_divergence

from bayeskit.inference.objectives import ELBO, GECO, IWAE, TVO
from bayeskit.inference.objectives.constrained import MeanSquaredError
from bayeskit.inference.objectives.objective import Draw
from bayeskit.inference.objectives.thermodynamic import LogUniform

F64 = torch.float64
COPIES = 300
DATA = torch.tensor([0.5, -1.0, 2.0], dtype=F64).repeat(COPIES)
SEEN = torch.tensor([True, False, True]).repeat(COPIES)
WEIGHTS = {
    "plain": (nullcontext, torch.ones(3, dtype=F64)),
    "less": (lambda: poutine.scale(scale=0.3), 0.3 * torch.ones(3, dtype=F64)),
    "more": (lambda: poutine.scale(scale=2.0), 2.0 * torch.ones(3, dtype=F64)),
    "masked": (lambda: poutine.mask(mask=SEEN), torch.tensor([1.0, 0.0, 1.0], dtype=F64)),
}


def parameters():
    return [torch.tensor(value, dtype=F64, requires_grad=True) for value in (-0.2, -0.3)]


def make(around, a, b):
    def model(x):
        with pyro.plate("data", len(x)):
            with around():
                z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)), around():
            pyro.sample("z", dist.Normal(a, b.exp()))

    return model, guide


def exact_gradient(weight, a, b):
    """Of minus the lower bound, for one copy of the data."""
    posterior = Normal(a, b.exp())
    prior = Normal(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
    x = DATA[:3]
    expected = Normal(a, 0.5).log_prob(x) - (2 * b).exp() / (2 * 0.25)
    return torch.autograd.grad((weight * kl_divergence(posterior, prior) - expected).sum(), [a, b])


@pytest.mark.parametrize("name", WEIGHTS)
def test_at_one_temperature_the_thermodynamic_gradient_is_that_of_the_lower_bound(name, limit):
    (around, weight), (a, b) = WEIGHTS[name], parameters()
    exact = torch.stack(exact_gradient(weight, a, b))
    model, guide = make(around, a, b)
    pyro.set_rng_seed(0)
    objective = TVO(8, LogUniform(1))
    found = torch.stack(
        [torch.stack(torch.autograd.grad(objective.differentiable_loss(model, guide, DATA), [a, b])) for _ in range(40)]
    )
    z = (found.mean(0) / COPIES - exact) / (found.std(0) / COPIES / math.sqrt(len(found)))
    assert float(z.abs().max()) < limit(2)


def test_masks_of_distributions_count_each_for_its_own(limit):
    """The prior's mask leaves out one datum of three, the guide's none."""
    a, b = parameters()

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0).mask(SEEN))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(a, b.exp()).mask(torch.ones_like(SEEN)))

    pyro.set_rng_seed(0)
    with torch.no_grad():
        found = torch.tensor([ELBO(4).loss(model, guide, DATA) / COPIES for _ in range(30)], dtype=F64)
        posterior = Normal(a, b.exp())
        prior = -0.5 * (a.square() + (2 * b).exp()) - 0.5 * math.log(2 * math.pi)
        expected = Normal(a, 0.5).log_prob(DATA[:3]) - (2 * b).exp() / (2 * 0.25)
        exact = float(-3 * posterior.entropy() - 2 * prior - expected.sum())
    assert abs(float(found.mean()) - exact) < limit() * float(found.std()) / math.sqrt(len(found))


@pytest.mark.parametrize("scale", [0.1, 0.5, 3.0])
def test_the_mean_error_of_a_constraint_knows_no_scale(scale):
    def model(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))
            with poutine.scale(scale=scale):
                pyro.sample("x", dist.Normal(torch.zeros((), dtype=F64), 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=F64), 1.0))

    x = DATA[:3]
    particles = Draw(GECO(MeanSquaredError("x", 1.0)), model, guide, (x,), {})(2)
    torch.testing.assert_close(MeanSquaredError("x", 1.0)(particles), (x.square() - 1).expand(2, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [ELBO, IWAE])
def test_a_last_chunk_may_be_smaller(objective, limit):
    """The same value on average as in equal chunks."""
    model, guide = make(nullcontext, *parameters())
    pyro.set_rng_seed(0)
    with torch.no_grad():
        one, other = (
            torch.tensor([objective(8, chunk_size=size).loss(model, guide, DATA) for _ in range(30)]) for size in (3, 4)
        )
    error = math.hypot(float(one.std()), float(other.std())) / math.sqrt(30)
    assert abs(float(one.mean() - other.mean())) < limit() * error
