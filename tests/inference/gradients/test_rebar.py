"""REBAR and RELAX: conditional relaxations by their formulas, no bias against enumeration, learned settings."""

import math
from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.gradients import Enumeration, ScoreFunction
from bayeskit.inference.gradients._estimator import WeightedPoints
from bayeskit.inference.gradients._relaxed import REBAR, RELAX, relaxed_draws
from bayeskit.inference.gradients._space import Autoregressive, space_of

REPLICATES = 20_000
DTYPE = torch.float64
SLOPES = torch.tensor([1.0, 2.0, 4.0], dtype=DTYPE)
TARGET = torch.tensor([1.0, 3.0, -2.0, 0.5, 4.0], dtype=DTYPE)


def leaf(logits, *batch):
    values = torch.tensor(logits, dtype=DTYPE)
    return values.expand((*batch, *values.shape)).clone().requires_grad_()


def bits(logits, *batch):
    return dist.Bernoulli(logits=leaf(logits, *batch)).to_event(1)


def category(logits, *batch):
    return dist.OneHotCategorical(logits=leaf(logits, *batch))


def number(logits, *batch):
    return dist.Categorical(logits=leaf(logits, *batch))


def squared(z):
    return ((z * SLOPES).sum(-1) - 3).square()


def steps(z):
    return ((z * TARGET).sum(-1) - 1).square() + 5 * z[..., 0] * z[..., 1]


def cubic(z):
    return (z**3).sum(-1) + z[..., 0]


PROBLEMS = {
    "uniform bits": (bits, [0.0, 0.0, 0.0], squared),
    "uneven bits": (bits, [4.0, -4.0, 0.5], squared),
    "categories": (category, [0.3, -0.5, 1.1, 0.0, -1.2], steps),
    "uneven categories": (category, [3.0, 0.0, -2.0, 1.0, 0.0], steps),
    "numbers": (number, [0.3, -0.5, 1.1, 0.0, -1.2], steps),
}
ESTIMATORS = [
    REBAR(),
    REBAR(0.1, 0.7),
    REBAR(2.0, torch.tensor(1.3, dtype=DTYPE), num_samples=2),
    REBAR(scale=0.0),
    RELAX(cubic),
    RELAX(cubic, temperature=1.0, scale=0.0, num_samples=3),
]


def z_scores(estimator, problem, seed=0):
    make, logits, f = PROBLEMS[problem]
    exact = Enumeration().estimate(category(logits) if make is number else make(logits), f)
    found = estimator.estimate(make(logits, REPLICATES), f, seed=seed)
    return (found.mean(0) - exact) / (found.std(0) / REPLICATES**0.5)


@pytest.mark.calibration
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: f"{type(e).__name__}-{e.temperature}")
def test_no_bias_against_enumeration(estimator, problem, limit):
    z = z_scores(estimator, problem)
    assert estimator.unbiased and float(z.abs().max()) < limit(len(z))


@dataclass(frozen=True)
class WithoutConditionalScore(REBAR):
    """A mutation: the score does not multiply the relaxation given the draw."""

    def points(self, space, generator=None):
        drawn = super().points(space, generator)
        third = len(drawn.weights) // 3
        return WeightedPoints(drawn.values, torch.cat([drawn.weights[:-third], drawn.weights[-third:].detach()]))


@dataclass(frozen=True)
class WithoutConditioning(REBAR):
    """A mutation: the free relaxation stands for the one given the draw."""

    def points(self, space, generator=None):
        drawn = super().points(space, generator)
        third = len(drawn.weights) // 3
        return WeightedPoints(torch.cat([drawn.values[:-third], drawn.values[third:-third]]), drawn.weights)


@pytest.mark.parametrize("mutation", [WithoutConditionalScore, WithoutConditioning])
@pytest.mark.parametrize("problem", ["uniform bits", "categories"])
def test_a_mutation_is_noticed(mutation, problem, limit):
    assert float(z_scores(mutation(), problem).abs().max()) > limit(3)


@pytest.mark.parametrize("problem", ["uneven bits", "categories"])
def test_the_conditional_relaxation_is_that_of_the_paper(problem):
    """z given b, written with uniform numbers: its value and its gradient with these held fixed."""
    make, logits, _ = PROBLEMS[problem]
    space = space_of(make(logits, 200))
    drawn = relaxed_draws(space, 1.0, 1, new_generator(0), "REBAR")
    direction = torch.linspace(-1.0, 2.0, drawn.given.numel(), dtype=DTYPE).reshape(drawn.given.shape)
    ours = torch.autograd.grad((drawn.given * direction).sum(), space.parameter, retain_graph=True)[0]
    if make is bits:
        # Tucker et al., appendix: z = logit(theta) + logit(v'), v' uniform below or above 1 - theta as b says.
        theta, b, z = space.parameter.sigmoid(), drawn.corner, drawn.given.logit().detach()
        place = (z - space.parameter.detach()).sigmoid()
        edge = (1 - theta).detach()
        v = torch.where(b == 1, (place - edge) / (1 - edge), place / edge)
        place = torch.where(b == 1, v * theta + 1 - theta, v * (1 - theta))
        again = (space.parameter + place.logit()).sigmoid()
    else:
        # z_b = -log(-log v_b), z_i = -log(-log(v_i) / theta_i - log(v_b)); of z only differences can be seen.
        theta, b = space.log_probabilities.exp().squeeze(-2), drawn.corner
        arrival = 1 / drawn.free.detach()  # exp(-z) up to a factor
        first = arrival.amin(-1, keepdim=True)
        noise = theta.detach() * (arrival - first)  # -log v_i, up to that factor
        again = 1 / (first + torch.where(b == 1, 0.0, noise / theta))
        again = again / again.sum(-1, keepdim=True)
    assert torch.allclose(again, drawn.given, atol=1e-12, rtol=0)
    theirs = torch.autograd.grad((again * direction).sum(), space.parameter)[0]
    assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_both_relaxations_have_one_value_that_is_rounded_to_the_draw(problem):
    make, logits, f = PROBLEMS[problem]
    space = space_of(make(logits, 500))
    drawn = relaxed_draws(space, 0.7, 2, new_generator(3), "REBAR")
    assert torch.allclose(drawn.free, drawn.given, atol=1e-13, rtol=0)
    rounded = drawn.given > 0.5 if make is bits else drawn.given == drawn.given.amax(-1, keepdim=True)
    assert torch.equal(rounded.to(DTYPE), drawn.corner)
    value = REBAR(0.7, 2.5, 2).surrogate(space, f, new_generator(3))
    assert torch.allclose(value, f(drawn.corner).mean(0), atol=1e-11, rtol=0), "the value is the draws' own"


@pytest.mark.parametrize("make", [lambda s, t: REBAR(t, s, 2), lambda s, t: RELAX(cubic, t, s, 2)])
def test_the_variance_loss_has_the_right_gradient(make):
    """An estimate is linear in the scale, and its square's slope known; by the temperature a difference tells."""
    logits, f = PROBLEMS["categories"][1], steps

    def loss(scale, temperature):
        return make(scale, temperature).variance_loss(category(logits, 30), f, new_generator(1))

    scale, temperature = (torch.tensor(x, dtype=DTYPE, requires_grad=True) for x in (0.8, 0.6))
    found = loss(scale, temperature)
    slopes = torch.autograd.grad(found, [scale, temperature])
    with_scale = [float(loss(torch.tensor(s, dtype=DTYPE), 0.6).detach()) for s in (0.3, 0.8, 1.3)]
    assert abs(float(found.detach()) - with_scale[1]) < 1e-9 * with_scale[1]
    assert abs(float(slopes[0]) - (with_scale[2] - with_scale[0]) / 1.0) < 1e-9 * with_scale[1]  # exact for a parabola
    near = [float(loss(0.8, 0.6 + h).detach()) for h in (1e-4, -1e-4, 2e-4, -2e-4)]
    difference = (8 * (near[0] - near[1]) - (near[2] - near[3])) / 12e-4
    assert abs(float(slopes[1]) - difference) < 1e-7 * with_scale[1]


def test_plain_backward_of_the_variance_loss_is_finite():
    batch = leaf([8.0, -8.0, 0.0], 500)
    temperature = torch.tensor(0.3, dtype=DTYPE, requires_grad=True)
    distribution = dist.Bernoulli(logits=batch).to_event(1)
    REBAR(temperature).variance_loss(distribution, squared).backward()
    assert bool(temperature.grad.isfinite()) and bool(batch.grad.isfinite().all())


def total_variance(estimator, problem="uniform bits"):
    make, logits, f = PROBLEMS[problem]
    return float(estimator.estimate(make(logits, 5000), f, seed=9).var(0).sum())


class Quadratic(torch.nn.Module):
    """All squares and products of bits, weighted."""

    def __init__(self):
        super().__init__()
        self.products = torch.nn.Parameter(torch.zeros(3, 3, dtype=DTYPE))
        self.slopes = torch.nn.Parameter(torch.zeros(3, dtype=DTYPE))

    def forward(self, z):
        return (z @ self.products * z).sum(-1) + z @ self.slopes


def test_learned_settings_lower_the_variance():
    log_temperature = torch.tensor(-1.5, dtype=DTYPE, requires_grad=True)
    scale = torch.tensor(0.2, dtype=DTYPE, requires_grad=True)
    estimator = REBAR(lambda: log_temperature.exp(), scale)
    before = total_variance(estimator)
    learn(estimator, [log_temperature, scale], squared)
    assert total_variance(estimator) < 0.85 * before
    assert total_variance(estimator) < 0.85 * total_variance(ScoreFunction())


def test_a_control_variate_is_learned_of_a_black_box(limit):
    def rounded(z):
        assert bool(((z == 0) | (z == 1)).all()), "only corners are shown to the function"
        return squared(z.detach())

    control = Quadratic()
    estimator = RELAX(control, temperature=0.5, scale=0.0)
    before = total_variance(estimator)
    assert abs(before - total_variance(REBAR(scale=0.0))) < 1e-9 * before, "an untrained one does nothing"
    learn(estimator, list(control.parameters()), rounded)
    assert total_variance(estimator) < 0.85 * before
    assert float(z_scores(estimator, "uniform bits").abs().max()) < limit(3)


def learn(estimator, settings, f, steps=120):
    optimizer, generator = torch.optim.Adam(settings, lr=0.05), new_generator(0, stream="learn")
    for _ in range(steps):
        optimizer.zero_grad()
        estimator.variance_loss(bits([0.0] * 3, 200), f, generator).backward(inputs=settings)
        optimizer.step()


def test_evaluations_are_counted():
    space = space_of(bits([0.0, 1.0, 2.0]))
    for estimator in (REBAR(), REBAR(num_samples=2), REBAR(scale=0.0), RELAX(cubic), RELAX(cubic, scale=0.0)):
        drawn = estimator.points(space, new_generator(0))
        assert len(drawn.weights) == estimator.num_evaluations(space)
        assert abs(float(drawn.weights.sum().detach()) - 1) < 1e-12


@pytest.mark.parametrize("make", [REBAR, lambda *a, **k: RELAX(cubic, *a, **k)])
def test_bad_settings(make):
    for temperature in (0.0, -0.5, math.nan, "1"):
        with pytest.raises(SettingsError, match="temperature"):
            make(temperature)
    for scale in (math.inf, math.nan, "1", torch.ones(2)):
        with pytest.raises(SettingsError, match="scale"):
            make(scale=scale)
    with pytest.raises(SettingsError, match="num_samples"):
        make(num_samples=0)
    chain = Autoregressive(lambda codes: torch.zeros(*codes.shape[:-1], 3), num_variables=2, num_categories=3)
    with pytest.raises(SettingsError, match="depend on each other"):
        make().surrogate(chain, lambda z: z.sum(-1).float())
    with pytest.raises(SettingsError, match="gradient"):
        make().variance_loss(dist.Bernoulli(logits=torch.zeros(2)).to_event(1), squared)


def test_a_control_returns_a_number_a_point():
    with pytest.raises(SettingsError, match="control"):
        RELAX(None)
    with pytest.raises(ShapeError, match="one number"):
        RELAX(lambda z: z).estimate(bits([0.0, 0.0, 0.0]), squared)
