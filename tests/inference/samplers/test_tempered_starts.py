import math

import pytest
import torch
from scipy.stats import t as student_t

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import InitializationError
from bayeskit.inference.samplers import sample_ladder
from bayeskit.inference.samplers._starts import TemperedStarts, starting_points

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


def mean_log_likelihood(beta):
    """Return the exact mean of the log likelihood of ``sharp`` at a temperature."""
    precision = 1 + beta * 1e4
    off, variance = 2 / precision, 1 / precision
    return 30 * (-0.5 * math.log(2 * math.pi) - math.log(0.01) - 0.5e4 * (off**2 + variance))


def test_chains_come_near_their_temperature(sharp):
    """Not to equilibrium, but further than that of half the temperature; the best of ten prior draws are lost."""
    points, _ = TemperedStarts(LEVELS).points(sharp, LEVELS.repeat_interleave(CHAINS), new_generator())
    assert float(sharp.log_likelihood(points)[-CHAINS:].mean()) > mean_log_likelihood(0.5)
    best = starting_points(sharp, CHAINS, torch.ones(CHAINS, dtype=torch.float64), new_generator())
    assert float(sharp.log_likelihood(best).max()) < mean_log_likelihood(float(LEVELS[1]))


@pytest.mark.calibration
def test_a_ladder_starts_near_and_needs_little_warm_up_then(sharp, monkeypatch):
    points, starts_made = TemperedStarts.points, []

    def recorded(self, target, beta, generator):
        start = points(self, target, beta, generator)
        starts_made.append(self.levels)
        return start

    monkeypatch.setattr(TemperedStarts, "points", recorded)
    beta = [0.0, *LEVELS.tolist()]
    ladder = sample_ladder(sharp, num_chains=64, num_warmup=60, num_samples=40, beta=beta, seed=0, progress=False)
    means = ladder.log_likelihood[-1].mean(1)  # of independent chains
    z = float((means.mean() - mean_log_likelihood(1.0)) / means.std()) * math.sqrt(len(means))
    assert abs(z) < float(student_t(len(means) - 1).ppf(1 - 0.5e-5))
    (levels,) = starts_made
    assert torch.equal(levels, LEVELS)


def test_gradients_of_the_starts_are_counted(sharp, monkeypatch):
    evaluator, rows = sharp.evaluator, []

    def counted(num_rows, planned_calls):
        evaluate = evaluator(num_rows, planned_calls)
        return lambda u, beta: (rows.append(len(u)), evaluate(u, beta))[1]

    monkeypatch.setattr(sharp, "evaluator", counted)
    _, num_gradients = TemperedStarts(LEVELS).points(sharp, LEVELS.repeat_interleave(4), new_generator())
    assert num_gradients == sum(rows)
    points = TemperedStarts.points
    short = {"num_chains": 4, "num_warmup": 20, "num_samples": 2, "beta": [0.0, *LEVELS.tolist()], "progress": False}
    ladder = sample_ladder(sharp, **short)
    monkeypatch.setattr(TemperedStarts, "points", lambda *how: (points(*how)[0], 0))
    assert ladder.num_evaluations == sample_ladder(sharp, **short).num_evaluations + num_gradients


def test_a_group_of_temperatures_starts_where_the_whole_ladder_does(sharp):
    part, whole = LEVELS[5:9].repeat_interleave(3), LEVELS[:9].repeat_interleave(3)
    starts = TemperedStarts(LEVELS)
    (some, _), (every, _) = (starts.points(sharp, beta, new_generator()) for beta in (part, whole))
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
    points, _ = TemperedStarts(LEVELS).points(target, LEVELS.repeat_interleave(CHAINS), new_generator())
    ends = points[-CHAINS:, 0]
    right = float((ends > 0).double().mean())
    assert float(ends.abs().min()) > 6  # the valley between them is twenty standard deviations away
    assert abs(right - 0.5) < 4.5 * 0.5 / math.sqrt(CHAINS)


def test_lost_chains_do_not_hold_up_the_others():
    """Half of the prior has no likelihood; no chain may end there."""
    target = bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: torch.where(u.sum(-1) > 0, -50 * (u - 1).square().sum(-1), -torch.inf),
        dim=2,
        sample_prior=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=torch.float64),
    )
    points, _ = TemperedStarts(LEVELS).points(target, LEVELS.repeat_interleave(50), new_generator())
    assert bool(target.log_likelihood(points).isfinite().all())


def test_an_impossible_likelihood_is_said():
    target = bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: u.sum(-1) * 0 - torch.inf,
        dim=2,
        sample_prior=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=torch.float64),
    )
    with pytest.raises(InitializationError, match="the density is zero"):
        TemperedStarts(LEVELS).points(target, LEVELS.repeat_interleave(4), new_generator())


def test_it_follows_the_prior_and_the_seed():
    target, levels = exact.get("linreg10").target(), LEVELS
    (first, _), (again, _) = (
        TemperedStarts(levels).points(target, levels.repeat_interleave(4), new_generator()) for _ in range(2)
    )
    assert torch.equal(first, again) and first.dtype == target.dtype
