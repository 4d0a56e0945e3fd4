"""Coverage over repeated data sets, against closed forms."""

import math

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.stats import binom, chi2, norm, t
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._coverage import (
    BatchSelector,
    CoverageReport,
    ReplicatePosteriors,
    binomial_band,
    coverage_report,
)

N, R = 40, 1000
PRIORS = {"flat": Flat(), "wide": dist.Normal(0.0, 1e4)}


def simulator(scale: float, n: int = N):
    return lambda generator: scale * torch.randn(n, generator=generator, dtype=torch.float64)


def location(prior: object = PRIORS["flat"], n: int = N, loss: object = None) -> GibbsPosterior:
    return GibbsPosterior(prior, loss or losses.HalfSquared(), torch.zeros(n, dtype=torch.float64))


def check(report: CoverageReport, exact: float, largest: float) -> None:
    for covered in report.coverage[:, 0].tolist():
        assert abs(covered - exact) < largest * math.sqrt(exact * (1 - exact) / report.num_replicates) + 0.5 / R


@pytest.mark.calibration
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("scale", "exact"), [(0.5, 0.99991), (2.0, 0.67290), (3.0, 0.48645)])
def test_nominal_95_percent_of_a_location(scale: float, exact: float, prior: str, limit) -> None:
    """Values of the issue; the closed form is 2 Phi(1.96 / s) - 1."""
    assert exact == pytest.approx(2 * norm.cdf(norm.ppf(0.975) / scale) - 1, abs=6e-6)
    report = coverage_report(location(PRIORS[prior]), simulator(scale), 0.0, levels=(0.95,), num_draws=64)
    check(report, exact, limit(2))
    # The mean's variance over data sets, in units of the posterior's: a chi-square of R - 1 degrees of freedom.
    assert abs(float(report.mismatch[0]) / scale**2 - 1) < limit() * math.sqrt(2 / (R - 1))


def test_every_level_by_the_normal_distribution(limit) -> None:
    levels = (0.5, 0.8, 0.9, 0.95, 0.99)
    report = coverage_report(location(), simulator(1.5), 0.0, levels=levels, num_draws=64)
    for level, covered in zip(levels, report.coverage[0].tolist(), strict=True):
        exact = 2 * norm.cdf(norm.ppf(0.5 + level / 2) / 1.5) - 1
        assert abs(covered - exact) < limit(len(levels)) * math.sqrt(exact * (1 - exact) / R)


def test_a_reversed_region_fails(monkeypatch, limit) -> None:
    original = ReplicatePosteriors.hpd_level
    monkeypatch.setattr(ReplicatePosteriors, "hpd_level", lambda *args, **kwargs: 1 - original(*args, **kwargs))
    with pytest.raises(AssertionError):
        test_nominal_95_percent_of_a_location(2.0, 0.67290, "flat", limit)


@pytest.mark.long
@pytest.mark.parametrize(("weight", "exact"), [(1.0, 0.92001), (0.797885, 0.95)])
def test_median_in_the_limit(weight: float, exact: float, limit) -> None:
    """Asymptotic; with 4,000 data what is left of the limit is below the Monte Carlo error of 400 data sets."""
    n, replicates = 4000, 400
    report = coverage_report(
        location(n=n, loss=losses.Absolute()),
        simulator(1.0, n),
        0.0,
        weight,
        levels=(0.95,),
        num_replicates=replicates,
        num_draws=128,
    )
    for covered in report.coverage[:, 0].tolist():
        assert abs(covered - exact) < limit(2) * math.sqrt(exact * (1 - exact) / replicates)


def test_a_weight_selected_anew_for_each_data_set(limit) -> None:
    """One over the estimated variance makes the interval Student's, but for its quantile: the coverage is exact."""
    batch = BatchSelector(lambda posterior, x: 1 / x.var(-1))
    report = coverage_report(location(), simulator(2.0), 0.0, batch, levels=(0.95,), num_draws=64)
    check(report, float(2 * t.cdf(norm.ppf(0.975), N - 1) - 1), limit(2))
    single = coverage_report(
        location(),
        simulator(2.0),
        0.0,
        lambda posterior: float(1 / posterior.data.var()),
        levels=(0.95,),
        num_replicates=10,
        num_draws=64,
    )
    few = coverage_report(location(), simulator(2.0), 0.0, batch, levels=(0.95,), num_replicates=10, num_draws=64)
    torch.testing.assert_close(single.weight, few.weight, rtol=1e-12, atol=0)
    torch.testing.assert_close(single.entry_levels, few.entry_levels, rtol=0, atol=1e-12)


def test_a_regression_whose_noise_grows(limit) -> None:
    """Covariate x uniform on (0, 2), noise of standard deviation x: J and I, and so the limits, are known."""
    n = 400
    moments = torch.tensor([[1.0, 1.0], [1.0, 4 / 3]], dtype=torch.float64)  # E x^0, E x, E x^2
    gradients = torch.tensor([[4 / 3, 2.0], [2.0, 16 / 5]], dtype=torch.float64)  # E x^2, E x^3, E x^4
    small, large = torch.linalg.eigvals(torch.linalg.solve(moments, gradients)).real.sort().values.tolist()

    def simulate(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, generator=generator, dtype=torch.float64)
        noise = x * torch.randn(n, generator=generator, dtype=torch.float64)
        return torch.stack([torch.ones_like(x), x], -1), 1 + x + noise

    posterior = GibbsPosterior(Flat((2,)), losses.HalfSquared(losses.linear), simulate(torch.Generator()))
    report = coverage_report(posterior, simulate, torch.ones(2), levels=(0.95,), num_draws=64)
    assert report.names == ("joint", "theta[0]", "theta[1]")
    spread = math.sqrt(2 / (R - 1))
    for found, exact in zip(report.mismatch.tolist(), (small, large), strict=True):
        assert abs(math.log(found / exact)) < limit(5) * spread
    radius = -2 * math.log(0.05)
    end = math.sqrt(radius / large)
    joint = quad(lambda z: norm.pdf(z) * chi2.cdf((radius - large * z * z) / small, 1), -end, end)[0]
    sandwich = torch.linalg.solve(moments, torch.linalg.solve(moments, gradients).mT)
    scale = (sandwich.diagonal() / torch.linalg.inv(moments).diagonal()).sqrt().tolist()
    intervals = [2 * norm.cdf(norm.ppf(0.975) / s) - 1 for s in scale]
    for found, exact in zip(report.coverage[:, 0].tolist(), (joint, *intervals), strict=True):
        assert abs(found - exact) < limit(5) * math.sqrt(exact * (1 - exact) / R)


@pytest.mark.calibration
def test_truth_of_a_skewed_law(limit) -> None:
    """The minimiser of the expected absolute error is the median, of the squared one the mean."""

    def simulate(generator: torch.Generator) -> Tensor:
        return -torch.rand(N, generator=generator, dtype=torch.float64).log()

    for loss, truth, variance in ((losses.HalfSquared(), 1.0, 1.0), (losses.Absolute(), math.log(2), 1.0)):
        report = coverage_report(location(loss=loss), simulate, levels=(0.9,), num_replicates=2, num_draws=64)
        assert abs(float(report.truth[0]) - truth) < limit(2) * math.sqrt(variance / 500_000)


@pytest.mark.calibration
def test_constrained_parameters_and_functionals(limit) -> None:
    """A rate, by minus the log density of an exponential: nearly calibrated, and intervals do not mind transforms."""
    loss = lambda rate, x: rate * x - rate.log()  # noqa: E731
    x = torch.ones(N, dtype=torch.float64)
    posterior = GibbsPosterior(dist.Gamma(torch.tensor(1e-3, dtype=torch.float64), 1e-3), loss, x)

    def simulate(generator: torch.Generator) -> Tensor:
        return -torch.rand(N, generator=generator, dtype=torch.float64).log() / 2

    report = coverage_report(posterior, simulate, 2.0, levels=(0.9,))
    logarithm = coverage_report(posterior, simulate, {"theta": 2.0}, levels=(0.9,), functional=lambda r: r.log())
    assert report.names == ("joint", "theta")
    assert logarithm.names == ("joint", "functional")
    torch.testing.assert_close(report.entry_levels, logarithm.entry_levels, rtol=0, atol=0.02)
    # Gamma(n, sum x) is the exact posterior under the scale prior, and its intervals cover exactly.
    for covered in report.coverage[:, 0].tolist():
        assert abs(covered - 0.9) < limit(2) * math.sqrt(0.09 / R)


def test_table_plot_and_text() -> None:
    report = coverage_report(location(), simulator(2.0), 0.0, num_replicates=50, num_draws=64)
    table = report.to_pandas()
    assert list(table.columns) == ["region", "level", "coverage", "standard_error", "lower", "upper"]
    assert len(table) == 2 * 5
    assert bool(((table["lower"] <= table["coverage"]) & (table["coverage"] <= table["upper"])).all())
    axes = report.plot(Figure().subplots())
    assert axes.get_xlabel() == "nominal level"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["joint", "theta"]
    assert report.plot() is not axes
    assert "coverage over 50 data sets, weight 1" in repr(report)


@pytest.mark.parametrize("successes", [0, 1, 47, 50])
def test_band_by_its_definition(successes: int) -> None:
    lower, upper = binomial_band(successes, 50)
    assert lower == 0.0 if successes == 0 else binom.sf(successes - 1, 50, lower) == pytest.approx(0.025, rel=1e-9)
    assert upper == 1.0 if successes == 50 else binom.cdf(successes, 50, upper) == pytest.approx(0.025, rel=1e-9)


def test_untrusted_replicates_are_said() -> None:
    one = torch.ones(10, dtype=torch.float64)
    bad = CoverageReport(("joint",), one[:, None] / 2, (0.5,), one[:1], one, torch.arange(10) > 2, one[:1])
    assert "30.0 %" in repr(bad)
    assert len(bad.warnings) == 1


@pytest.mark.parametrize("lost", [1, 2])
def test_one_of_a_hundred_is_not_more_than_one_per_cent(lost: int) -> None:
    one = torch.ones(100, dtype=torch.float64)
    report = CoverageReport(("joint",), one[:, None] / 2, (0.5,), one[:1], one, torch.arange(100) >= lost, one[:1])
    assert len(report.warnings) == lost - 1


def test_bad_input() -> None:
    with pytest.raises(SettingsError, match="level"):
        coverage_report(location(), simulator(1.0), 0.0, levels=(1.5,))
    with pytest.raises(ShapeError, match="simulate"):
        coverage_report(location(), simulator(1.0, N + 1), 0.0)
    with pytest.raises(SettingsError, match="weight"):
        coverage_report(location(), simulator(1.0), 0.0, -1.0, num_replicates=5)
    with pytest.raises(SettingsError, match="num_replicates"):
        coverage_report(location(), simulator(1.0), 0.0, num_replicates=1)
    with pytest.raises(SettingsError, match=r"levels must be .* not 0\.95"):
        coverage_report(location(), simulator(1.0), 0.0, levels=0.95)


def test_the_truth_has_the_shape_of_its_site() -> None:
    for truth in (torch.zeros(3), {"theta": [0.0]}):
        with pytest.raises(ShapeError, match=r"'theta' must be \(\)"):
            coverage_report(location(), simulator(1.0), truth, num_replicates=5)
    two = GibbsPosterior(Flat((2,)), losses.HalfSquared(), torch.zeros(N, 2, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"'theta' must be \(2,\)"):
        coverage_report(two, lambda g: torch.randn(N, 2, generator=g, dtype=torch.float64), 0.0, num_replicates=5)


def test_losses_of_all_data_at_once_need_a_truth() -> None:
    """Half a million data would be paired with one another."""
    stein = losses.KernelSteinDiscrepancy(lambda mean, x: mean - x)
    with pytest.raises(SettingsError, match="give truth="):
        coverage_report(location(loss=stein), simulator(1.0), num_replicates=5)


def test_a_rule_that_returns_nothing_is_named() -> None:
    with pytest.raises(SettingsError, match="weight returned NoneType for a replicate"):
        coverage_report(location(), simulator(1.0), 0.0, lambda posterior: None, num_replicates=4, num_draws=8)
