import math

import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import InitializationError
from bayeskit.inference.samplers import sample_ladder
from bayeskit.inference.samplers.climb import Climb
from bayeskit.inference.samplers.initial import starting_points

LEVELS = torch.linspace(0, 1, 21, dtype=torch.float64)[1:] ** 3
CHAINS = 200


def new_generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def sharp():
    """Thirty coordinates, standard normal before the data and a hundred times narrower after them, far away."""
    return bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: torch.distributions.Normal(2.0, 0.01).log_prob(u).sum(-1),
        dim=30,
        sample_prior=lambda n, generator: torch.randn(n, 30, generator=generator, dtype=torch.float64),
    )


def mean_log_likelihood(target, beta):
    """Return the exact mean of the log likelihood of ``sharp`` at a temperature, and its standard deviation."""
    precision = 1 + beta * 1e4
    off, variance = 2 / precision, 1 / precision
    mean = 30 * (-0.5 * math.log(2 * math.pi) - math.log(0.01) - 0.5e4 * (off**2 + variance))
    return mean, math.sqrt(30) * 0.5e4 * math.sqrt(2 * variance**2 + 4 * off**2 * variance)


def test_chains_reach_their_temperature(sharp):
    levels = LEVELS
    points = Climb(levels).points(sharp, levels.repeat_interleave(CHAINS), new_generator())
    found = sharp.log_likelihood(points).reshape(len(levels), CHAINS)
    mean, sd = mean_log_likelihood(sharp, 1.0)
    # Not in equilibrium, but in the typical set, where the best of ten prior draws is not.
    assert abs(float(found[-1].median()) - mean) < 10 * sd
    best = starting_points(sharp, CHAINS, torch.ones(CHAINS, dtype=torch.float64), new_generator())
    assert float(sharp.log_likelihood(best).max()) < mean - 1000 * sd


def test_a_ladder_needs_little_warm_up_then(sharp):
    ladder = sample_ladder(sharp, num_chains=8, num_warmup=60, num_samples=200, beta=[0.0, *LEVELS.tolist()], seed=0)
    values = ladder.log_likelihood[-1]
    mean, _ = mean_log_likelihood(sharp, 1.0)
    error = float(values.mean(1).std() / math.sqrt(len(values)))
    assert abs(float(values.mean()) - mean) < 6 * error


def test_a_group_of_temperatures_starts_where_the_whole_ladder_does(sharp):
    part, whole = LEVELS[5:9].repeat_interleave(3), LEVELS[:9].repeat_interleave(3)
    climb = Climb(LEVELS)
    some, every = (climb.points(sharp, beta, new_generator()) for beta in (part, whole))
    assert torch.equal(some, every[-len(part) :])


def test_chains_stay_apart_in_modes_that_they_cannot_leave():
    """Two far modes of equal weight: chains end in either, so that R-hat sees them."""
    prior = torch.distributions.Normal(0.0, 10.0)

    def log_likelihood(u):
        return torch.distributions.Normal(8.0, 0.1).log_prob(u.abs()).sum(-1)

    target = bk.Target.from_functions(
        lambda u: prior.log_prob(u).sum(-1),
        log_likelihood,
        dim=1,
        sample_prior=lambda n, generator: 10 * torch.randn(n, 1, generator=generator, dtype=torch.float64),
    )
    ends = Climb(LEVELS).points(target, LEVELS.repeat_interleave(CHAINS), new_generator())[-CHAINS:, 0]
    right = float((ends > 0).double().mean())
    assert float((ends.abs() - 8).abs().max()) < 2
    assert abs(right - 0.5) < 4.5 * 0.5 / math.sqrt(CHAINS)


def test_lost_chains_do_not_hold_up_the_others():
    """Half of the prior has no likelihood; no chain may end there."""
    target = bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: torch.where(u.sum(-1) > 0, -50 * (u - 1).square().sum(-1), -torch.inf),
        dim=2,
        sample_prior=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=torch.float64),
    )
    points = Climb(LEVELS).points(target, LEVELS.repeat_interleave(50), new_generator())
    assert bool(target.log_likelihood(points).isfinite().all())


def test_an_impossible_likelihood_is_said():
    target = bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: u.sum(-1) * 0 - torch.inf,
        dim=2,
        sample_prior=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=torch.float64),
    )
    with pytest.raises(InitializationError, match="the density is zero"):
        Climb(LEVELS).points(target, LEVELS.repeat_interleave(4), new_generator())


def test_it_follows_the_prior_and_the_seed():
    target, levels = exact.get("linreg10").target(), LEVELS
    first, again = (Climb(levels).points(target, levels.repeat_interleave(4), new_generator()) for _ in range(2))
    assert torch.equal(first, again) and first.dtype == target.dtype
