"""Starting points, first scales, and warm-ups that have to come home from any metric."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size, r_hat
from bayeskit.errors import DataError, InitializationError, SamplingWarning
from bayeskit.inference.evidence._judging._chains import posterior_problems
from bayeskit.inference.samplers._adaptation import Adaptation
from bayeskit.inference.samplers._chains import RunSettings, run
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._starts import local_scale, scaled_starting_points, starting_points

DOUBLE = torch.float64
DEVIATIONS = torch.tensor([1.0, 0.1, 10.0, 3.0], dtype=DOUBLE)


def normal(deviation, prior=True):
    """Return independent normal coordinates, as a prior without data."""
    d = len(deviation)
    law = torch.distributions.Normal(torch.zeros(d, dtype=DOUBLE), deviation)

    def draw(n, generator):
        return deviation * torch.randn(n, d, generator=generator, dtype=DOUBLE)

    return bk.Target.from_functions(
        lambda u: law.log_prob(u).sum(-1), lambda u: 0 * u.sum(-1), d, sample_prior=draw if prior else None
    )


def vague_mean(y):
    precision = pyro.sample("precision", dist.Gamma(torch.tensor(0.001, dtype=DOUBLE), 0.001))
    mean = pyro.sample("mean", dist.Normal(torch.tensor(0.0, dtype=DOUBLE), (1e4 / precision).sqrt()))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y)


Y = torch.as_tensor(np.random.default_rng(9).normal(10, 3, 15))


@pytest.mark.long
@pytest.mark.parametrize("metric", ["diagonal", "dense", "low_rank"])
@pytest.mark.parametrize("where", [slice(1, 2), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("wrong", [1e-6, 1e6, 1e-100, 1e100])
def test_the_warm_up_comes_home_from_any_metric(metric, where, wrong, limit):
    target, factor = normal(DEVIATIONS), torch.ones(4, dtype=DOUBLE)
    factor[where] = wrong
    signs = torch.tensor([[1.0, 1, 1, 1], [-1, 1, -1, 1], [0, 0, 1, -1], [1, -1, 0, 0]], dtype=DOUBLE)
    adaptation = Adaptation(HMC(), 400, initial_variance=(DEVIATIONS * factor).square(), metric=metric)
    found = run(target, adaptation, RunSettings(4, 400, 300, seed=3), initial=signs * DEVIATIONS)
    x = found.position.permute(2, 1, 0)  # (d, chains, draws)
    assert float(r_hat(x).max()) < 1.05
    effective = effective_sample_size(x)
    assert bool((effective > 200).all())
    z = x.flatten(1).mean(1) / DEVIATIONS * effective.sqrt()
    assert float(z.abs().max()) < limit(4)
    spread = effective_sample_size(x.square())
    z = (x.flatten(1).square().mean(1) / DEVIATIONS.square() - 1) * (spread / 2).sqrt()
    assert float(z.abs().max()) < limit(4)


@pytest.mark.calibration
def test_directions_of_a_far_wrong_scale_are_found(limit):
    """All chains start on a line, and the first metric hardly leaves it."""
    target = normal(torch.ones(3, dtype=DOUBLE))
    along = torch.tensor([1.0, 0, 1], dtype=DOUBLE) / math.sqrt(2)
    across = torch.tensor([1.0, 0, -1], dtype=DOUBLE) / math.sqrt(2)
    covariance = torch.eye(3, dtype=DOUBLE) - (1 - 1e-10) * torch.outer(across, across)
    start = torch.linspace(-1, 1, 4, dtype=DOUBLE)[:, None] * along
    adaptation = Adaptation(HMC(), 400)

    class Begun(Adaptation):
        def init(self, target, position, *, generator, covariance=None):
            return super().init(target, position, generator=generator, covariance=first)

    first = covariance
    found = run(target, Begun(**vars(adaptation)), RunSettings(4, 400, 300, seed=1), initial=start)
    x = (found.position @ across).T
    effective = float(effective_sample_size(x.square()))
    assert abs(float(x.square().mean()) - 1) < limit() * math.sqrt(2 / effective)


def test_the_scale_at_a_point_is_that_of_the_density():
    target, columns = normal(DEVIATIONS), torch.tensor([0, 1, 3])
    scale, spent = local_scale(target, torch.zeros(2, 4, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE), columns)
    assert scale.shape == (2, 3) and spent > 0
    # Fourteen bisections of a range of 708 nats.
    near = math.exp(708 / 2**14)
    assert bool((scale / DEVIATIONS[columns]).log().abs().max() <= math.log(near) + 1e-9)


def test_candidates_lie_about_the_origin_where_prior_draws_cannot_move():
    target = bk.Target.from_pyro(vague_mean, Y)
    one = torch.ones(8, dtype=DOUBLE)
    points, scale, spent = scaled_starting_points(target, 8, one, new_generator(1))
    assert float(points.abs().max()) <= 2.0  # prior draws of the mean have magnitudes up to 1e200
    assert bool((scale > 1e-4).all() and (scale < 10).all()) and spent == 16
    assert len({tuple(row) for row in points.tolist()}) == 8  # no two chains start at one point
    of_prior = starting_points(target, 8, one, new_generator(1), of_prior=True)
    assert float(of_prior.abs().max()) > 1e3


def test_a_tight_prior_keeps_its_draws():
    target = normal(torch.full((3,), 1e-6, dtype=DOUBLE))
    points, _, _ = scaled_starting_points(target, 4, torch.ones(4, dtype=DOUBLE), new_generator(0))
    assert float(points.abs().max()) < 1e-5


def test_chains_without_a_candidate_take_different_ones_of_others():
    """The density is positive in one of thirty cubes only."""

    def inside(u):
        return torch.where((u - 1.9).abs().amax(-1) < 0.1, -u.square().sum(-1), -torch.inf)

    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), inside, 1)
    points = starting_points(target, 6, torch.ones(6, dtype=DOUBLE), new_generator(2))
    assert bool(((points - 1.9).abs() < 0.1).all()) and len(points.unique()) == 6


def test_no_candidate_is_an_error_that_says_how_many():
    nowhere = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1) * 0 - torch.inf, 2)
    with pytest.raises(InitializationError, match="zero at all 200 starting candidates"):
        starting_points(nowhere, 2, torch.ones(2, dtype=DOUBLE), new_generator(0))
    unknown = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1) * torch.nan, 2)
    with pytest.raises(DataError, match="NaN at every starting candidate"):
        starting_points(unknown, 2, torch.ones(2, dtype=DOUBLE), new_generator(0))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_the_evidence_under_a_vague_precision_is_exact(seed, limit):
    """The README's two lines on a mean with Gamma(.001, .001); the data are marginally Student's."""
    exact = scipy.stats.multivariate_t.logpdf(Y.numpy(), np.zeros(15), np.eye(15) + 1e4, df=0.002)
    draws = bk.sample(vague_mean, Y, seed=seed, progress=False)
    z = bk.evidence.bridge_sampling(draws.target, draws)
    assert z.trusted
    assert abs(z.log_evidence - exact) < limit() * z.standard_error


def still_half(u):
    """Return a likelihood that rejects every move of the first coordinate away from 1.0."""
    return torch.where(u[..., 0] == 1.0, -0.5 * u.square().sum(-1), -torch.inf)


def test_no_chain_starts_where_double_precision_cannot_move_it():
    """Eight of ten prior draws lie where a step changes nothing, and have the highest likelihood."""

    def draw(n, generator):
        far = torch.rand(n, 1, generator=generator, dtype=DOUBLE) < 0.8
        return torch.where(far, 1e20, 1.0) * torch.randn(n, 1, generator=generator, dtype=DOUBLE)

    target = bk.Target.from_functions(lambda u: 0 * u.sum(-1), lambda u: 1e-3 * u.abs().sum(-1), 1, sample_prior=draw)
    for num_chains in (4, 64):
        one = torch.ones(num_chains, dtype=DOUBLE)
        points, _, spent = scaled_starting_points(target, num_chains, one, new_generator(0))
        assert 1e-3 * float(points.abs().max()) * torch.finfo(DOUBLE).eps < 1 and spent <= 10 * num_chains


def test_a_coordinate_that_stands_still_is_said_and_never_trusted():
    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), still_half, 2)
    with pytest.warns(SamplingWarning, match=r"never moved in chains \[0, 1, 2, 3\]"):
        draws = bk.sample(target, 4, 60, 60, initial=torch.tensor([1.0, 0.0], dtype=DOUBLE), progress=False)
    table = draws.summary()
    assert math.isnan(table.loc["u[0]", "r_hat"]) and (table.loc["u[0]", ["ess_bulk", "ess_tail"]] == 0).all()
    assert table.loc["u[1]", "ess_bulk"] > 0
    problems, facts = posterior_problems(draws)
    assert "stands still in 4 of 4 chains" in problems[0]
    assert math.isnan(facts["r_hat"]) and facts["effective_draws"] == 0


@pytest.mark.calibration
def test_a_warm_up_that_ends_in_stillness_begins_again(limit):
    """The best candidate is the origin, a single point of a density that no step returns to."""

    def likelihood(u):
        return torch.where(u[..., 0] == 0.0, 100.0, -0.5 * (u[..., 0] - 3).square())

    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), likelihood, 1,
        sample_prior=lambda n, g: torch.randn(n, 1, generator=g, dtype=DOUBLE),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws = bk.sample(target, 2, 100, 400, seed=0, progress=False)
    assert draws.settings["num_restarts"] == 1
    x = draws.unconstrained[..., 0]
    assert abs(float(x.mean()) - 1.5) < limit() * math.sqrt(0.5 / float(effective_sample_size(x)))
