"""The randomly stopped sum: identities, expectations against quadrature, and its further uses."""

import math
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives._objective import log_mean_weight as log_mean_exp
from bayeskit.inference.objectives._sumo import SUMO, GeometricTail, ReciprocalTail, Tail, sumo_estimate

ONE = torch.ones(1, dtype=torch.float64)
LOG_MARGINAL = -1.515512  # z ~ N(0, 1), x given z ~ N(z, 1), x = 1, guide N(0.2, 0.9)


def stopping(tail: Tail, last: int) -> Tensor:
    """Return the probabilities of 1, ..., last, the rest of the tail put on ``last``."""
    survival = tail.survival(torch.arange(1, last + 1))
    return survival - torch.cat([survival[1:], survival.new_zeros(1)])


TAILS = [ReciprocalTail(), ReciprocalTail(switch=10, decay=0.8), GeometricTail(0.9)]


@pytest.mark.parametrize("tail", TAILS, ids=str)
@pytest.mark.parametrize("first", [1, 4])
def test_the_sum_telescopes(tail, first):
    log_weight = 3 * torch.randn(40, 5, generator=new_generator(0), dtype=torch.float64)
    index = torch.arange(1, 41 - first)
    survival, chance = tail.survival(index), stopping(tail, len(index))
    estimates = [sumo_estimate(log_weight[: first + k], survival[:k]) for k in index]
    assert float((chance @ torch.stack(estimates) - log_mean_exp(log_weight)).abs().max()) < 1e-12


@pytest.mark.parametrize("first", [1, 4])
def test_a_tail_counted_from_the_first_particle_is_noticed(first):
    log_weight = torch.randn(40, 200, generator=new_generator(0), dtype=torch.float64)
    index, tail = torch.arange(1, 41 - first), ReciprocalTail()
    wrong, chance = tail.survival(index + first), stopping(tail, len(index))
    estimates = [sumo_estimate(log_weight[: first + k], wrong[:k]) for k in index]
    assert float((chance @ torch.stack(estimates) - log_mean_exp(log_weight)).abs().mean()) > 0.1


def test_a_common_factor_of_the_weights_costs_no_digits():
    # Multiples of 2^-10, so that adding -128 is exact in single precision.
    log_weight = torch.randint(-1000, 1000, (100,), generator=new_generator(0)).float() / 1024
    survival = ReciprocalTail().survival(torch.arange(1, 100))
    change = sumo_estimate(log_weight - 128, survival) - (sumo_estimate(log_weight, survival) - 128)
    assert abs(float(change)) <= 128 * torch.finfo(torch.float32).eps


def test_means_of_tails():
    assert ReciprocalTail().mean == pytest.approx(5.0780, abs=5e-5)
    for tail in [*TAILS, ReciprocalTail(switch=1, decay=0.5), ReciprocalTail(cap=30), GeometricTail(0.7, cap=4)]:
        assert tail.mean == pytest.approx(float(tail.survival(torch.arange(1, 5000)).sum()), rel=1e-12)
        assert isinstance(tail, Tail)
        assert torch.equal(tail.survival(torch.tensor([0, 1])), torch.ones(2, dtype=torch.float64))
    assert GeometricTail.of_mean(7.0).mean == pytest.approx(7.0, abs=1e-12)
    assert [ReciprocalTail.of_mean(m).mean for m in (4.0, 5.0, 8.0)] == pytest.approx([4.0, 5.0, 8.0], abs=0.04)


@pytest.mark.parametrize(
    "tail",
    [ReciprocalTail(), ReciprocalTail(3, 0.8), ReciprocalTail(1, 0.5), ReciprocalTail(cap=7), GeometricTail(0.7),
     GeometricTail(0.7, cap=3)],
    ids=str,
)  # fmt: skip
def test_draws_reach_each_index_as_often_as_they_should(tail, limit):
    number = 20_000
    with global_stream(new_generator(3, stream="tails")):
        drawn = torch.tensor([tail.sample() for _ in range(number)])
    reached = torch.tensor([1, 2, 3, 4, 7, 8, 20, 79, 80, 81, 90])
    share = (drawn >= reached[:, None]).double().mean(1)
    survival = tail.survival(reached)
    error = (survival * (1 - survival) / number).sqrt()
    certain = error == 0
    assert torch.equal(share[certain], survival[certain])
    assert float(((share - survival) / error)[~certain].abs().max()) < limit(len(reached))


@dataclass(frozen=True)
class Stopped:
    """A tail whose next draw is given."""

    tail: Tail
    next: int

    @property
    def mean(self) -> float:
        return self.tail.mean

    def survival(self, k: Tensor) -> Tensor:
        return self.tail.survival(k)

    def sample(self) -> int:
        return self.next


def leaf(value: float, count: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64, requires_grad=True)


class Problem:
    """The linear-Gaussian model, with one set of parameters for each replicate of the datum."""

    def __init__(self, count: int) -> None:
        self.mean, self.log_sd, self.slope = leaf(0.2, count), leaf(math.log(0.9), count), leaf(1.0, count)
        self.x = torch.ones(count, dtype=torch.float64)

    def model(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("x", dist.Normal(self.slope * z, 1.0), obs=x)

    def guide(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.mean, self.log_sd.exp()))


def exact_bound(count: int, x: Tensor = ONE, mean: Tensor = 0.2 * ONE, sd: float = 0.9) -> Tensor:
    """Return E log mean of ``count`` weights and its derivatives in slope and ``x``, ``(3, *x)``, by quadrature."""
    eps = torch.linspace(-9, 9, 601, dtype=torch.float64)
    probability = (-0.5 * eps**2).exp()
    probability = probability / probability.sum()
    slope, x = torch.ones_like(x, requires_grad=True), x.clone().requires_grad_()
    z = mean[:, None] + sd * eps
    log_weight = -0.5 * z**2 - 0.5 * (x[:, None] - slope[:, None] * z) ** 2 + 0.5 * eps**2
    u = torch.arange(-45.0, 45.0, 0.25, dtype=torch.float64)
    single = (-(u[:, None, None] + log_weight).exp()).exp() @ probability
    value = 0.25 * ((-u.exp()).exp()[:, None] - single**count).sum(0) - math.log(count)
    value = value + math.log(sd) - 0.5 * math.log(2 * math.pi)
    return torch.stack([value.detach(), *torch.autograd.grad(value.sum(), [slope, x])])


def stratified(tail: Tail, first: int, cap: int, count: int, step) -> tuple[Tensor, Tensor]:
    """Return expectation and standard error over draws, every stopping index taken with its probability."""
    means, errors = [], []
    with global_stream(new_generator(5, stream="sumo")):
        for k in range(1, cap + 1):
            found = step(SUMO(Stopped(tail, k), first), Problem(count))
            means.append(found.mean(-1))
            errors.append(found.var(-1) / count)
    chance = stopping(tail, cap)
    return chance @ torch.stack(means), (chance.square() @ torch.stack(errors)).sqrt()


def value_and_slope(objective: SUMO, problem: Problem) -> Tensor:
    value = objective.log_marginal(problem.model, problem.guide, problem.x)
    loss = objective.differentiable_loss(problem.model, problem.guide, problem.x)
    return torch.stack([value.detach(), -torch.autograd.grad(loss, problem.slope)[0]])


@pytest.mark.calibration
@pytest.mark.parametrize(("tail", "first"), [(ReciprocalTail(cap=40), 1), (GeometricTail(0.95, cap=60), 4)])
def test_value_and_model_gradient_are_those_of_the_last_bound(tail, first, limit):
    mean, error = stratified(tail, first, tail.cap, 1_000, value_and_slope)
    exact = exact_bound(first + tail.cap)[:2, 0]
    assert float(((mean - exact) / error).abs().max()) < limit(2)


def test_the_last_bound_is_the_log_marginal_likelihood():
    # d log p / d slope at slope 1 and x = 1: x^2 slope / (1 + slope^2)^2 - slope / (1 + slope^2)
    value, slope, x = exact_bound(200_000)[:, 0]
    assert abs(float(value) - LOG_MARGINAL) < 2e-6
    assert abs(float(slope) + 0.25) < 1e-5
    assert abs(float(x) + 0.5) < 1e-5


@pytest.mark.calibration
def test_a_long_tail_estimates_the_log_marginal_likelihood(limit):
    tail, first = GeometricTail(0.98, cap=250), 4
    last = float(exact_bound(first + 250)[0])
    assert 0 < LOG_MARGINAL - last < 5e-4

    def value(objective: SUMO, problem: Problem) -> Tensor:
        return objective.log_marginal(problem.model, problem.guide, problem.x).detach()

    mean, error = stratified(tail, first, 250, 200, value)
    assert abs(float((mean - last) / error)) < limit()
    assert abs(float(mean) - LOG_MARGINAL) < limit() * float(error) + 5e-4


@pytest.mark.parametrize("centre", [0.0, -1.5])
def test_one_backward_pass_serves_both_objectives(centre):
    def run(objective: SUMO) -> tuple[Problem, Tensor]:
        problem, seen = Problem(50), []
        original = objective.estimate
        objective.estimate = lambda draw: seen.append(original(draw)) or seen[-1]
        with global_stream(new_generator(2)):
            loss = objective.differentiable_loss(problem.model, problem.guide, problem.x)
        loss.backward()
        return problem, seen[0].detach()

    class Plain(SUMO):
        """The estimate itself, for both."""

        def estimate(self, draw):
            return sumo_estimate(draw(6).log_weight, self.tail.survival(torch.arange(1, 6)))

    tail = Stopped(ReciprocalTail(), 5)
    plain, value = run(Plain(tail))
    joint, same = run(SUMO(tail, centre=centre))
    assert torch.equal(value, same)
    assert torch.allclose(joint.slope.grad, plain.slope.grad, atol=1e-12, rtol=1e-12)
    # The loss is minus the estimate; descending the square means ascending minus it.
    factor = -2 * (value - centre)
    for name in ("mean", "log_sd"):
        wanted = factor * getattr(plain, name).grad
        assert torch.allclose(getattr(joint, name).grad, wanted, atol=1e-12, rtol=1e-12)
        assert not torch.allclose(getattr(joint, name).grad, -wanted, atol=1e-3)


def test_continuous_and_discrete_sites_together():
    tail, centre = Stopped(ReciprocalTail(), 5), -1.5

    class Plain(SUMO):
        """Minus the square, with its score term written out."""

        def estimate(self, draw):
            particles = draw(6)
            value = sumo_estimate(particles.log_weight, self.tail.survival(torch.arange(1, 6)))
            square = (value - centre).square()
            return -square - square.detach() * particles.log_score.sum(0)

    def gradients(objective: SUMO) -> tuple[Tensor, ...]:
        problem, tilt = Problem(50), leaf(0.6, 50)

        def model(x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
                b = pyro.sample("b", dist.Bernoulli(x.new_tensor(0.3)))
                pyro.sample("x", dist.Normal(z + 2 * b - 1, 1.0), obs=x)

        def guide(x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(problem.mean, problem.log_sd.exp()))
                pyro.sample("b", dist.Bernoulli(logits=tilt * z))

        with global_stream(new_generator(2)):
            loss = objective.differentiable_loss(model, guide, problem.x)
        return torch.autograd.grad(loss, [problem.mean, problem.log_sd, tilt])

    for found, wanted in zip(gradients(SUMO(tail, centre=centre)), gradients(Plain(tail)), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12, rtol=1e-12)


def test_steps_of_the_guide_lower_the_second_moment():
    tail, count = Stopped(ReciprocalTail(), 5), 20_000

    def spread(problem: Problem) -> Tensor:
        objective = SUMO(tail)
        with global_stream(new_generator(9)):
            value = objective.log_marginal(problem.model, problem.guide, problem.x).detach()
        return (value - LOG_MARGINAL).square().mean()

    before, problem = Problem(count), Problem(count)
    with global_stream(new_generator(8)):
        SUMO(tail, centre=LOG_MARGINAL).differentiable_loss(problem.model, problem.guide, problem.x).backward()
    with torch.no_grad():
        for parameter in (problem.mean, problem.log_sd):
            parameter -= 0.05 * parameter.grad.mean()
    assert float(spread(problem)) < 0.95 * float(spread(before))


def score(objective: SUMO, problem: Problem) -> Tensor:
    x = problem.x.clone().requires_grad_()
    value = objective.log_marginal(problem.model, problem.guide, x)
    return torch.stack(torch.autograd.grad(value.sum(), [problem.slope, x]))


@pytest.mark.calibration
def test_score_of_the_log_marginal_likelihood(limit):
    tail = GeometricTail(0.95, cap=80)
    mean, error = stratified(tail, 8, 80, 800, score)
    exact = exact_bound(88)[1:, 0]
    assert float(((mean - exact) / error).abs().max()) < limit(2)
    assert float((exact - torch.tensor([-0.25, -0.5], dtype=torch.float64)).abs().max()) < 2e-3, "nearly the score"


def entropy_gradient(objective: SUMO, problem: Problem) -> Tensor:
    count = len(problem.x)
    x = problem.slope * torch.randn(count, dtype=torch.float64) + torch.randn(count, dtype=torch.float64)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.4 * x, 0.8))

    value = objective.log_marginal(problem.model, guide, x)
    return torch.autograd.grad(value.sum(), problem.slope)[0]


@pytest.mark.calibration
def test_reverse_divergence_averages_over_the_model(limit):
    mean, error = stratified(GeometricTail(0.9, cap=40), 8, 40, 1_500, entropy_gradient)
    x = torch.linspace(-9, 9, 61, dtype=torch.float64)
    density = (-0.25 * x**2).exp()
    _, slope, along = exact_bound(48, x, 0.4 * x, 0.8)
    # The x of the model moves with the slope by z, which given x is x / 2 on average.
    exact = (slope + along * x / 2) @ (density / density.sum())
    assert abs(float((mean - exact) / error)) < limit()
    # Minus the entropy is -log(1 + slope^2) / 2 + const.
    assert abs(float(exact) + 0.5) < 1 / 48


def test_log_marginal_leaves_the_guide_alone():
    problem = Problem(4)
    SUMO().log_marginal(problem.model, problem.guide, problem.x).sum().backward()
    assert problem.mean.grad is None or float(problem.mean.grad.abs().max()) == 0
    assert float(problem.slope.grad.abs().min()) > 0


@dataclass(frozen=True)
class Bounded(Stopped):
    """A tail that stops at 3 but claims never to pass 2."""

    def survival(self, k: Tensor) -> Tensor:
        return (k <= 2).double()


def test_a_tail_that_claims_not_to_reach_where_it_is():
    problem = Problem(2)
    with pytest.raises(SettingsError, match="k = 3"):
        SUMO(Bounded(ReciprocalTail(), 3)).loss(problem.model, problem.guide, problem.x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: GeometricTail(0.0),
        lambda: GeometricTail(1.0),
        lambda: GeometricTail(0.5, cap=0),
        lambda: GeometricTail.of_mean(1.0),
        lambda: ReciprocalTail(decay=0.0),
        lambda: ReciprocalTail(switch=0),
        lambda: ReciprocalTail(cap=0),
        lambda: ReciprocalTail.of_mean(2.0),
        lambda: ReciprocalTail.of_mean(50.0),
        lambda: SUMO(minimum_particles=0),
        lambda: SUMO(centre=math.nan),
        lambda: SUMO.of_cost(3),
    ],
)
def test_settings_outside_their_domain(call):
    with pytest.raises(SettingsError):
        call()
