"""Values and gradients of multi-sample objectives against quadrature, on a model with a closed form."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.objectives._drawing import Gate
from bayeskit.inference.objectives._evidence_lower_bound import STL
from bayeskit.inference.objectives._importance_weighted import DReG, Renyi
from bayeskit.inference.objectives._objective import Objective
from bayeskit.inference.objectives._objective import log_mean_weight as log_mean_exp
from bayeskit.inference.objectives._thermodynamic import TVO, LogUniform

# z ~ N(0, 1), x given z ~ N(slope z, 1), x = 1, guide N(0.2, 0.9).
LOG_MARGINAL, LOWER_BOUND = -1.515512, -1.674299
IMPORTANCE_WEIGHTED = {2: -1.5719, 5: -1.5343, 16: -1.5213}  # by simulation, standard error 0.0006
START = {"mean": 0.2, "log_sd": math.log(0.9), "slope": 1.0}


def log_normal(value: Tensor, mean: Tensor | float, sd: Tensor | float) -> Tensor:
    sd = torch.as_tensor(sd)
    return -0.5 * ((value - mean) / sd) ** 2 - sd.log() - 0.5 * math.log(2 * math.pi)


def expected_log_mean(log_weight: Tensor, probability: Tensor, count: int, power: float = 1.0) -> Tensor:
    """Return E log mean of ``count`` weights to a power, by E log S = integral of (exp(-t) - E exp(-t S)) / t."""
    log_weight, shift = power * log_weight - LOG_MARGINAL * power, LOG_MARGINAL
    step = 0.1
    u = torch.arange(-45.0, 45.0, step, dtype=torch.float64)
    parts = [(-(v.unsqueeze(1) + log_weight).exp()).exp() @ probability for v in u.split(100)]
    log_sum = ((-u.exp()).exp() - torch.cat(parts) ** count).sum() * step
    return (log_sum - math.log(count)) / power + shift


def exact_bound(leaves: dict[str, Tensor], count: int, power: float = 1.0) -> Tensor:
    eps = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    probability = (-0.5 * eps**2).exp()
    probability = probability / probability.sum()
    sd = leaves["log_sd"].exp()
    z = leaves["mean"] + sd * eps
    log_weight = log_normal(z, 0.0, 1.0) + log_normal(torch.ones(()), leaves["slope"] * z, 1.0)
    log_weight = log_weight - log_normal(z, leaves["mean"], sd)
    if count == 1 or power == 0:
        return log_weight @ probability
    return expected_log_mean(log_weight, probability, count, power)


def leaves_of(start: dict[str, float], count: int | None = None) -> dict[str, Tensor]:
    shape = () if count is None else (count,)
    return {k: torch.full(shape, v, dtype=torch.float64, requires_grad=True) for k, v in start.items()}


class Case(NamedTuple):
    model: Callable[[Tensor], None]
    guide: Callable[[Tensor], None]


def linear_gaussian(leaves: dict[str, Tensor]) -> Case:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("x", dist.Normal(leaves["slope"] * z, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(leaves["mean"], leaves["log_sd"].exp()))

    return Case(model, guide)


def gradients(objective: Objective, case: Case, leaves: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return each datum's value and gradients, maximised: independent replicates."""
    x = torch.ones(len(next(iter(leaves.values()))), dtype=torch.float64)
    seen: list[Tensor] = []
    original = objective.estimate
    objective.estimate = lambda draw: seen.append(original(draw)) or seen[-1]
    with global_stream(new_generator(seed, stream="objectives")):
        loss = objective.differentiable_loss(case.model, case.guide, x)
        grads = torch.autograd.grad(-loss, list(leaves.values()))
    return {"value": seen[0].detach(), **dict(zip(leaves, grads, strict=True))}


def deviations(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return z scores of means of replicates."""
    return {k: float((v.mean() - exact[k]) / (v.std() / len(v) ** 0.5)) for k, v in found.items()}


def exact_values(bound: Callable[..., Tensor], start: dict[str, float], *settings: float) -> dict[str, Tensor]:
    leaves = leaves_of(start)
    value = bound(leaves, *settings)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return {"value": value.detach(), **dict(zip(leaves, grads, strict=True))}


def test_the_importance_weighted_bound_rises_to_the_log_marginal_likelihood():
    leaves = leaves_of(START)
    values = {k: float(exact_bound(leaves, k).detach()) for k in (1, 2, 5, 16, 64, 4096)}
    assert abs(values[1] - LOWER_BOUND) < 1e-6
    assert all(abs(values[k] - v) < 5 * 0.0006 for k, v in IMPORTANCE_WEIGHTED.items())
    assert sorted(values.values()) == list(values.values())
    assert 0 < LOG_MARGINAL - values[4096] < 1e-4


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("objective", "count", "power"),
    [
        (STL(), 1, 1.0),
        (STL(3), 1, 1.0),
        (STL(3, chunk_size=1), 1, 1.0),
        (IWAE(2), 2, 1.0),
        (IWAE(5), 5, 1.0),
        (IWAE(16), 16, 1.0),
        (DReG(2), 2, 1.0),
        (DReG(5), 5, 1.0),
        (DReG(16), 16, 1.0),
        (DReG(5, chunk_size=2), 5, 1.0),
        (DReG(3, vectorize_particles=False), 3, 1.0),
        (Renyi(0.5, 4), 4, 0.5),
        (Renyi(2.0, 4), 4, -1.0),
        (Renyi(-1.0, 4), 4, 2.0),
        (Renyi(1.0, 4), 4, 0.0),
        (TVO(2, LogUniform(1)), 1, 1.0),
        (TVO(5, LogUniform(1)), 1, 1.0),
    ],
    ids=lambda v: f"{type(v).__name__}({v.num_particles})" if isinstance(v, Objective) else str(v),
)
def test_value_and_gradients_are_unbiased(objective, count, power, limit):
    leaves = leaves_of(START, 40_000)
    found = gradients(objective, linear_gaussian(leaves), leaves)
    scores = deviations(found, exact_values(exact_bound, START, count, power))
    assert all(abs(z) < limit(4) for z in scores.values()), scores


class OneWeightTooFew(DReG):
    """A mutation: the weight once instead of squared."""

    def estimate(self, draw):
        return log_mean_exp(draw(self.num_particles, path_only=True).log_weight)


def test_a_dropped_weight_is_noticed(limit):
    leaves = leaves_of(START, 40_000)
    found = gradients(OneWeightTooFew(5), linear_gaussian(leaves), leaves)
    scores = deviations(found, exact_values(exact_bound, START, 5))
    assert abs(scores["value"]) < limit(4) and abs(scores["slope"]) < limit(4)
    assert abs(scores["mean"]) > limit(4) and abs(scores["log_sd"]) > limit(4)


EXACT = {"mean": 0.5, "log_sd": 0.5 * math.log(0.5), "slope": 1.0}


@pytest.mark.parametrize("objective", [STL(), STL(4), DReG(1), DReG(4), DReG(4, chunk_size=2)])
def test_at_the_exact_posterior_every_draw_has_gradient_zero(objective):
    leaves = leaves_of(EXACT, 1_000)
    found = gradients(objective, linear_gaussian(leaves), leaves)
    # The terms that cancel are of the size of the guide's log density's derivative, a few units.
    assert float(found["mean"].abs().max()) < 1e-12
    assert float(found["log_sd"].abs().max()) < 1e-12


@pytest.mark.parametrize("objective", [ELBO(analytic_kl=False), IWAE(4)])
def test_the_plain_gradient_is_not_zero_there(objective):
    leaves = leaves_of(EXACT, 1_000)
    assert float(gradients(objective, linear_gaussian(leaves), leaves)["mean"].std()) > 0.1


# A hierarchy z1 -> z2 -> x in model and guide alike.
TWO_LEVELS = {"mean1": 0.3, "log_sd1": -0.2, "slope": 0.4, "mean2": 0.1, "log_sd2": -0.4, "weight": 0.8}


def two_levels(leaves: dict[str, Tensor]) -> Case:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z1 = pyro.sample("z1", dist.Normal(x.new_zeros(()), 1.0))
            z2 = pyro.sample("z2", dist.Normal(leaves["weight"] * z1, 1.0))
            pyro.sample("x", dist.Normal(z2, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z1 = pyro.sample("z1", dist.Normal(leaves["mean1"], leaves["log_sd1"].exp()))
            pyro.sample("z2", dist.Normal(leaves["slope"] * z1 + leaves["mean2"], leaves["log_sd2"].exp()))

    return Case(model, guide)


def exact_two_levels(leaves: dict[str, Tensor], count: int) -> Tensor:
    eps = torch.linspace(-7, 7, 101, dtype=torch.float64)
    one, two = (e.flatten() for e in torch.meshgrid(eps, eps, indexing="ij"))
    probability = (-0.5 * (one**2 + two**2)).exp()
    probability = probability / probability.sum()
    sd1, sd2 = leaves["log_sd1"].exp(), leaves["log_sd2"].exp()
    z1 = leaves["mean1"] + sd1 * one
    centre = leaves["slope"] * z1 + leaves["mean2"]
    z2 = centre + sd2 * two
    log_weight = log_normal(z1, 0.0, 1.0) + log_normal(z2, leaves["weight"] * z1, 1.0) + log_normal(1.0 - z2, 0.0, 1.0)
    log_weight = log_weight - log_normal(z1, leaves["mean1"], sd1) - log_normal(z2, centre, sd2)
    return log_weight @ probability if count == 1 else expected_log_mean(log_weight, probability, count)


@pytest.mark.parametrize(("objective", "count"), [(STL(), 1), (DReG(3), 3)])
def test_hierarchical_guides_are_unbiased(objective, count, limit):
    leaves = leaves_of(TWO_LEVELS, 40_000)
    scores = deviations(
        gradients(objective, two_levels(leaves), leaves), exact_values(exact_two_levels, TWO_LEVELS, count)
    )
    assert all(abs(z) < limit(7) for z in scores.values()), scores


class DetachedParameters(DReG):
    """A mutation: detach the parameters of the guide's distributions, and with them the path between the levels."""

    def estimate(self, draw):
        gate = Gate()
        particles = draw(self.num_particles, gate=gate)
        log_guide = sum(
            gate(log_normal(site["value"], site["fn"].loc.detach(), site["fn"].scale.detach()))
            for site in particles.guide_sites.values()
        )
        log_weight = particles.log_model - log_guide
        gate.factor = log_weight.detach().softmax(0)
        return log_mean_exp(log_weight)


def test_detaching_the_parameters_of_a_hierarchical_guide_is_noticed(limit):
    flat = leaves_of(START, 40_000)
    scores = deviations(
        gradients(DetachedParameters(3), linear_gaussian(flat), flat), exact_values(exact_bound, START, 3)
    )
    assert all(abs(z) < limit(4) for z in scores.values()), "with one level it makes no difference"
    leaves = leaves_of(TWO_LEVELS, 40_000)
    scores = deviations(
        gradients(DetachedParameters(3), two_levels(leaves), leaves), exact_values(exact_two_levels, TWO_LEVELS, 3)
    )
    assert abs(scores["value"]) < limit(7)
    assert max(abs(scores[k]) for k in ("mean1", "slope", "log_sd1")) > limit(7)
    leaves = leaves_of(EXACT_TWO_LEVELS, 1_000)
    assert float(gradients(DetachedParameters(1), two_levels(leaves), leaves)["mean1"].std()) > 0.1


# Given z1 = z and x = 1: z2 ~ N((weight z + 1) / 2, 1/2); z1 ~ N(weight v, 2 v) with v = 1 / (2 + weight^2).
_VARIANCE = 1 / (2 + 0.8**2)
EXACT_TWO_LEVELS = {
    "mean1": 0.8 * _VARIANCE,
    "log_sd1": 0.5 * math.log(2 * _VARIANCE),
    "slope": 0.4,
    "mean2": 0.5,
    "log_sd2": 0.5 * math.log(0.5),
    "weight": 0.8,
}


@pytest.mark.parametrize("objective", [STL(), DReG(3)])
def test_hierarchical_guides_have_gradient_zero_at_the_exact_posterior(objective):
    leaves = leaves_of(EXACT_TWO_LEVELS, 1_000)
    found = gradients(objective, two_levels(leaves), leaves)
    assert all(float(found[k].abs().max()) < 1e-12 for k in leaves if k != "weight")


# A continuous site, then a discrete one whose probability depends on it; model: switch, then x.
MIXED = {"mean": 0.2, "log_sd": -0.3, "logit": 0.3, "tilt": 0.6}


def mixed(leaves: dict[str, Tensor]) -> Case:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            b = pyro.sample("b", dist.Bernoulli(x.new_tensor(0.3)))
            pyro.sample("x", dist.Normal(z + 2 * b - 1, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(leaves["mean"], leaves["log_sd"].exp()))
            pyro.sample("b", dist.Bernoulli(logits=leaves["logit"] + leaves["tilt"] * z))

    return Case(model, guide)


def exact_mixed(leaves: dict[str, Tensor]) -> Tensor:
    eps = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    probability = (-0.5 * eps**2).exp()
    probability = probability / probability.sum()
    sd = leaves["log_sd"].exp()
    z = leaves["mean"] + sd * eps
    total = torch.zeros((), dtype=torch.float64)
    for b in (0.0, 1.0):
        log_q = torch.nn.functional.logsigmoid((2 * b - 1) * (leaves["logit"] + leaves["tilt"] * z))
        log_p = log_normal(z, 0.0, 1.0) + math.log(0.3 if b else 0.7) + log_normal(2.0 - 2 * b - z, 0.0, 1.0)
        total = total + (log_q.exp() * (log_p - log_q - log_normal(z, leaves["mean"], sd))) @ probability
    return total


@pytest.mark.parametrize("objective", [STL(), STL(3), Renyi(1.0, 3)])
def test_continuous_and_discrete_sites_together(objective, limit):
    leaves = leaves_of(MIXED, 40_000)
    scores = deviations(gradients(objective, mixed(leaves), leaves), exact_values(exact_mixed, MIXED))
    assert all(abs(z) < limit(5) for z in scores.values()), scores


def test_dreg_names_a_site_that_is_not_reparameterised():
    leaves = leaves_of(MIXED, 3)
    with pytest.raises(GuideError, match="'b'.*Bernoulli.*IWAE"):
        gradients(DReG(2), mixed(leaves), leaves)
