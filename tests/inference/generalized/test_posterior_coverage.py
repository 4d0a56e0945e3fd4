"""The learning rate by bootstrap coverage, against closed forms of a location."""

import math

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized.calibrate.posterior_coverage import bootstrap_counts, posterior_coverage
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors
from bayeskit.inference.generalized.minimizer import minimize

N, R = 60, 300


def data(scale: float = 2.0, n: int = N) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def flat_location(x: Tensor) -> GibbsPosterior:
    return GibbsPosterior(Flat(), losses.HalfSquared(), x)


def own_weights(posterior: GibbsPosterior, x: Tensor, level: float, **settings: int) -> Tensor:
    """Return each replicate's own weight in closed form: the normal interval's end is the full-data mean."""
    means = bootstrap_counts(posterior, settings.get("num_replicates", R), settings.get("seed", 0)) @ x / len(x)
    return norm.ppf(0.5 + level / 2) ** 2 / (len(x) * (means - x.mean()).square())


def quantile(values: Tensor, share: float) -> float:
    """Return the value with the expected share below it: the rank is that share of one more than there are."""
    rank = share * (len(values) + 1)
    low = math.floor(rank)
    pair = values.sort().values[low - 1 : low + 1]
    return float(pair[0] + (rank - low) * (pair[1] - pair[0]))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_location_in_closed_form(level: float) -> None:
    x = data()
    found = posterior_coverage(flat_location(x), level, R)
    expected = own_weights(flat_location(x), x, level)
    near = expected < 50 * found.weight
    torch.testing.assert_close(found.diagnostics["replicate_weights"][near], expected[near], rtol=1e-8, atol=0)
    assert found.weight == pytest.approx(quantile(expected, 1 - level), rel=1e-8)
    assert found.diagnostics["coverage"] == pytest.approx(level, abs=2 / R)
    assert found.trusted
    weights, values, _, _ = found.curve
    torch.testing.assert_close(values, (expected[:, None] >= weights).double().mean(0), rtol=0, atol=1.5 / R)
    assert "coverage" in found.plot(Figure().subplots()).get_ylabel()


def test_a_dropped_draw_fails(monkeypatch) -> None:
    """Regions taken as half the mass beyond the truth are another thing."""
    original = ReplicatePosteriors.hpd_level
    monkeypatch.setattr(ReplicatePosteriors, "hpd_level", lambda *args, **kwargs: 1 - original(*args, **kwargs))
    with pytest.raises((AssertionError, DataError)):
        test_location_in_closed_form(0.95)


def test_a_proper_prior_by_root_finding() -> None:
    """The posterior is normal; at which weight its interval ends at the full-data mean is a scalar equation."""
    x, variance, level = data() + 1.0, 0.5, 0.9
    posterior = GibbsPosterior(dist.Normal(0.0, math.sqrt(variance)), losses.HalfSquared(), x)
    found = posterior_coverage(posterior, level, R)
    sums, truth, z = bootstrap_counts(posterior, R, 0) @ x, float(x.mean()), norm.ppf(0.5 + level / 2)

    def excess(log_weight: float, total: float) -> float:
        precision = 1 / variance + N * math.exp(log_weight)
        return abs(truth - math.exp(log_weight) * total / precision) * math.sqrt(precision) - z

    own = found.diagnostics["replicate_weights"]
    near = (own / found.weight).log().abs() < 1
    assert int(near.sum()) > 20
    for weight, total in zip(own[near].tolist(), sums[near].tolist(), strict=True):
        assert weight == pytest.approx(math.exp(brentq(excess, *_bracket(weight), args=(total,), xtol=1e-13)), rel=1e-7)


def _bracket(weight: float) -> tuple[float, float]:
    return math.log(weight) - 0.05, math.log(weight) + 0.05


def test_one_over_the_variance_in_the_limit(limit) -> None:
    x = data(n=2000)
    found = posterior_coverage(flat_location(x), num_replicates=1000, num_draws=64)
    # Over bootstrap replicates the mean is normal, so that the limit is one over the variance of these data.
    assert abs(found.weight * float(x.var(correction=0)) - 1) < limit() * found.standard_error / found.weight


def test_standard_error_is_the_spread_over_seeds(limit) -> None:
    x = data()
    found = [posterior_coverage(flat_location(x), num_replicates=100, num_draws=64, seed=s) for s in range(24)]
    weight = torch.tensor([f.weight for f in found])
    error = torch.tensor([f.standard_error for f in found]).square().mean().sqrt()
    # The logarithm of a sample variance has a standard error of sqrt(2 / (m - 1)).
    assert abs(math.log(float(weight.var()) / float(error) ** 2)) < limit() * math.sqrt(2 / 23)


def test_rescaled_losses_and_other_weights() -> None:
    """Twice as large a loss gets half the weight, and the weight that a posterior has plays no part."""
    x, prior, loss = data(), dist.Normal(0.0, 10.0), losses.SmoothAbsolute(width=0.1)
    plain = posterior_coverage(GibbsPosterior(prior, loss, x, weight=0.3), num_replicates=60)
    for factor in (0.01, 3.0):
        other = GibbsPosterior(prior, lambda m, x, c=factor: c * loss.of(x, m), x, weight=7.0)
        assert posterior_coverage(other, num_replicates=60).weight * factor == pytest.approx(plain.weight, rel=1e-5)
    assert posterior_coverage(plain.posterior, num_replicates=60).weight == plain.weight


def test_the_median_by_quadrature(limit) -> None:
    """At each replicate's own weight, the region that the full-data median just enters has the mass of the level."""
    x, level, draws = data(), 0.9, 1024
    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Absolute(), x)
    found = posterior_coverage(posterior, level, num_replicates=100, num_draws=draws)
    assert found.trusted
    own = found.diagnostics["replicate_weights"]
    near = (own / found.weight).log().abs() < 0.7
    own, counts = own[near], bootstrap_counts(posterior, 100, 0)[near]
    assert len(own) > 5
    truth = minimize(posterior).position
    edges = torch.linspace(-8, 8, 32_001, dtype=torch.float64)
    grid = torch.cat([0.5 * (edges[1:] + edges[:-1]), truth])
    log_density = -own[:, None] * (counts @ (grid - x[:, None]).abs()) - grid.square() / 200
    mass = torch.softmax(log_density[:, :-1], -1)
    inside = torch.where(log_density[:, :-1] > log_density[:, -1:], mass, 0.0).sum(-1)
    # No importance weights here are so uneven that fewer than 30 % of the draws count.
    error = math.sqrt(level * (1 - level) / (0.3 * draws))
    assert float((inside - level).abs().max()) < limit(len(own)) * error


def test_intervals_of_a_functional() -> None:
    """In one dimension the two regions of a normal agree; in two, the interval of one coefficient is its own."""
    x = data()
    joint = posterior_coverage(flat_location(x), num_replicates=100)
    interval = posterior_coverage(flat_location(x), num_replicates=100, functional=lambda mean: mean)
    assert interval.weight == pytest.approx(joint.weight, rel=1e-7)
    design = torch.stack([torch.ones(N), torch.linspace(-1, 1, N)], -1).double()
    two = GibbsPosterior(Flat((2,)), losses.HalfSquared(losses.linear), (design, x))
    slope = posterior_coverage(two, num_replicates=100, functional=lambda b: b[1])
    count = bootstrap_counts(two, 100, 0)
    inverse = torch.linalg.inv(torch.einsum("rn,nk,nl->rkl", count, design, design))
    fitted = torch.einsum("rkl,rn,nl,n->rk", inverse, count, design, x)
    full = torch.linalg.lstsq(design, x[:, None]).solution[1, 0]
    own = norm.ppf(0.975) ** 2 * inverse[:, 1, 1] / (fitted[:, 1] - full).square()
    assert slope.weight == pytest.approx(quantile(own, 0.05), rel=1e-7)
    assert "equal-tailed" in slope.target


def test_bad_input() -> None:
    x = data()
    with pytest.raises(SettingsError, match="level"):
        posterior_coverage(flat_location(x), 1.0)
    with pytest.raises(SettingsError, match="num_replicates"):
        posterior_coverage(flat_location(x), num_replicates=5)
    with pytest.raises(SettingsError, match="one number"):
        posterior_coverage(flat_location(x), functional=lambda mean: torch.stack([mean, mean]))
    with pytest.raises(DataError, match="without error"):
        posterior_coverage(flat_location(torch.ones_like(x)))
    stubborn = GibbsPosterior(dist.Normal(50.0, 0.01), losses.HalfSquared(), x)
    with pytest.raises(DataError, match="no learning rate"):
        posterior_coverage(stubborn, 0.99, num_replicates=50)
