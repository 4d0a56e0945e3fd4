"""The learning rate by bootstrap coverage, against closed forms of a location."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from torch import Tensor

from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized import calibrate as own_weights_module
from bayeskit.inference.generalized._coverage import ReplicatePosteriors, replicate_posteriors
from bayeskit.inference.generalized._minimizer import minimize
from bayeskit.inference.generalized.calibrate import bootstrap_counts, posterior_coverage, replicate_weights

N, R = 60, 300


def data(scale: float = 2.0, n: int = N) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def flat_location(x: Tensor) -> GibbsPosterior:
    return GibbsPosterior(Flat(), losses.HalfSquared(), x)


def own_weights(posterior: GibbsPosterior, x: Tensor, level: float, **settings: int) -> Tensor:
    """Return each replicate's own weight in closed form: the normal interval's end is the full-data mean."""
    means = bootstrap_counts(posterior, settings.get("num_replicates", R), seed=settings.get("seed", 0)) @ x / len(x)
    return norm.ppf(0.5 + level / 2) ** 2 / (len(x) * (means - x.mean()).square())


def quantile(values: Tensor, share: float) -> float:
    """Return the value with the expected share below it: the rank is that share of one more than there are."""
    rank = share * (len(values) + 1)
    low = math.floor(rank)
    pair = values.sort().values[low - 1 : low + 1]
    return float(pair[0] + (rank - low) * (pair[1] - pair[0]))


@pytest.mark.calibration
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
    sums, truth, z = bootstrap_counts(posterior, R, seed=0) @ x, float(x.mean()), norm.ppf(0.5 + level / 2)

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


@pytest.mark.calibration
def test_one_over_the_variance_in_the_limit(limit) -> None:
    x = data(n=2000)
    found = posterior_coverage(flat_location(x), num_replicates=1000, num_draws=64)
    # Over bootstrap replicates the mean is normal, so that the limit is one over the variance of these data.
    assert abs(found.weight * float(x.var(correction=0)) - 1) < limit() * found.standard_error / found.weight


@pytest.mark.calibration
def test_standard_error_is_the_spread_over_seeds() -> None:
    x = data()
    found = [posterior_coverage(flat_location(x), num_replicates=100, num_draws=64, seed=s) for s in range(24)]
    weight = torch.tensor([f.weight for f in found])
    error = torch.tensor([f.standard_error for f in found]).square().mean().sqrt()
    low, high = chi2.interval(1 - 1e-5, 23)
    assert low < 23 * float(weight.var()) / float(error) ** 2 < high


@pytest.mark.calibration
def test_rescaled_losses_and_other_weights() -> None:
    """Twice as large a loss gets half the weight, and the weight that a posterior has plays no part."""
    x, prior, loss = data(), dist.Normal(0.0, 10.0), losses.SmoothAbsolute(width=0.1)
    plain = posterior_coverage(GibbsPosterior(prior, loss, x, weight=0.3), num_replicates=60)
    for factor in (0.01, 3.0):
        other = GibbsPosterior(prior, lambda m, x, c=factor: c * loss.of(x, m), x, weight=7.0)
        assert posterior_coverage(other, num_replicates=60).weight * factor == pytest.approx(plain.weight, rel=1e-5)
    assert posterior_coverage(plain.posterior, num_replicates=60).weight == plain.weight


@pytest.mark.calibration
def test_the_median_by_quadrature(limit) -> None:
    """At each replicate's own weight, the region that the full-data median just enters has the mass of the level."""
    x, level, draws, num_replicates = data(), 0.9, 1024, 300
    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Absolute(), x)
    found = posterior_coverage(posterior, level, num_replicates=num_replicates, num_draws=draws)
    assert found.trusted
    own = found.diagnostics["replicate_weights"]
    near = (own / found.weight).log().abs() < 0.7
    own, counts = own[near], bootstrap_counts(posterior, num_replicates, seed=0)[near]
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


@pytest.mark.calibration
def test_intervals_of_a_functional() -> None:
    """In one dimension the two regions of a normal agree; in two, the interval of one coefficient is its own."""
    x = data()
    joint = posterior_coverage(flat_location(x), num_replicates=100)
    interval = posterior_coverage(flat_location(x), num_replicates=100, functional=lambda mean: mean)
    assert interval.weight == pytest.approx(joint.weight, rel=1e-7)
    design = torch.stack([torch.ones(N), torch.linspace(-1, 1, N)], -1).double()
    two = GibbsPosterior(Flat((2,)), losses.HalfSquared(losses.linear), (design, x))
    slope = posterior_coverage(two, num_replicates=100, functional=lambda b: b[1])
    count = bootstrap_counts(two, 100, seed=0)
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
        posterior_coverage(stubborn, 0.99, num_replicates=100)


def location_and_scale() -> GibbsPosterior:
    def prior() -> dict[str, Tensor]:
        zero = torch.tensor(0.0, dtype=torch.float64)
        return {"m": pyro.sample("m", dist.Normal(zero, 5.0)), "s": pyro.sample("s", dist.HalfNormal(zero + 5.0))}

    return GibbsPosterior(prior, losses.NegativeLogLikelihood(lambda q: dist.Normal(q["m"], q["s"])), data(1.0, 30))


def mass_of_higher_density(posterior: GibbsPosterior, counts: Tensor, truth: Tensor, own: Tensor) -> Tensor:
    """Return, by quadrature over location and log scale, the mass of the region that the truth just enters."""
    x, (sums, squares) = posterior.data, (counts @ posterior.data, counts @ posterior.data.square())

    def log_density(m: Tensor, log_scale: Tensor) -> Tensor:
        away = squares[:, None] - 2 * m * sums[:, None] + len(x) * m.square()
        loss = 0.5 * away * (-2 * log_scale).exp() + len(x) * log_scale
        return -own[:, None] * loss - (m.square() + (2 * log_scale).exp()) / 50 + log_scale

    grid = torch.meshgrid(
        torch.linspace(-3.0, 3.0, 401, dtype=torch.float64), torch.linspace(-2.0, 2.5, 401).double(), indexing="ij"
    )
    log_mass = log_density(grid[0].reshape(1, -1), grid[1].reshape(1, -1))
    return torch.where(log_mass > log_density(truth[:1], truth[1:]), log_mass.softmax(-1), 0.0).sum(-1)


@pytest.mark.calibration
@pytest.mark.parametrize("factor", [1.0, 40.0, 1 / 40])
def test_own_weights_of_a_scale_by_quadrature(factor: float, limit) -> None:
    """Wherever draws are made first, no replicate is lost, and each region ends at the truth at its own weight."""
    posterior, level, draws = location_and_scale(), 0.95, 4096
    counts, truth = bootstrap_counts(posterior, 60, seed=0), minimize(posterior).position
    replicates = replicate_posteriors(posterior, weights=counts, weight=1.5 * factor, num_draws=draws)
    found = replicate_weights(replicates, truth, level)
    assert bool((found.weight > 0).all()) and bool(found.trusted.all())
    near = (found.weight > 0.5) & (found.weight < 5)
    assert int(near.sum()) > 15
    inside = mass_of_higher_density(posterior, counts[near], truth, found.weight[near])
    error = math.sqrt(level * (1 - level) / (0.3 * draws))
    assert float((inside - level).abs().max()) < limit(int(near.sum())) * error


@pytest.mark.calibration
def test_draws_kept_where_they_say_nothing_fail(monkeypatch, limit) -> None:
    monkeypatch.setattr(own_weights_module, "MAX_SHAPE", math.inf)
    with pytest.raises(AssertionError):
        test_own_weights_of_a_scale_by_quadrature(40.0, limit)


def test_a_likelihood_of_location_and_scale_is_selected() -> None:
    found = posterior_coverage(location_and_scale(), num_replicates=100)
    assert 0.5 < found.weight < 3 and found.trusted
    assert float(found.diagnostics["replicate_weights"].min()) > 0


@pytest.mark.parametrize(("level", "least"), [(0.999, 999), (0.01, 99)])
def test_too_few_replicates_for_a_level(level: float, least: int) -> None:
    """The order statistic would be clamped to the smallest or the largest own weight, that of another level."""
    with pytest.raises(SettingsError, match=f"at least {least} "):
        posterior_coverage(flat_location(data()), level, least - 1, num_draws=64)
    x, seed = data(), 3
    found = posterior_coverage(flat_location(x), level, least, num_draws=64, seed=seed)
    expected = own_weights(flat_location(x), x, level, num_replicates=least, seed=seed)
    end = expected.amin() if level > 0.5 else expected.amax()
    assert found.weight == pytest.approx(float(end), rel=1e-7)


def test_tied_replicates_are_said() -> None:
    """Two data have three resamples, so that the coverage of their mean jumps."""
    found = posterior_coverage(flat_location(torch.tensor([0.0, 1.0]).double()), 0.8, num_replicates=200, num_draws=64)
    assert found.standard_error < 1e-6 * found.weight
    assert any("own weight" in text for text in found.warnings)
    assert not posterior_coverage(flat_location(data()), num_replicates=100, num_draws=64).warnings


@pytest.mark.calibration
def test_messages_name_the_functional_and_the_tie() -> None:
    def quartiles(mean: Tensor) -> Tensor:
        return torch.stack([mean, mean])

    with pytest.raises(SettingsError, match="'quartiles'"):
        posterior_coverage(flat_location(data()), functional=quartiles)
    tied = torch.cat([torch.zeros(90), torch.linspace(-5, 5, 10)]).double()
    with pytest.raises(DataError, match="90 of 100 data lie on a kink"):
        posterior_coverage(GibbsPosterior(dist.Normal(0.0, 10.0), losses.Absolute(), tied), num_replicates=50)
