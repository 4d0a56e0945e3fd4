import sys
from dataclasses import dataclass

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized.calibrate import (
    Selection,
    all_resamples,
    bootstrap_score_matching,
    converged_rows,
    held_out_predictive,
    holmes_walker,
    information_matching,
    on_kinks,
    resampled,
    safe_bayes,
    weighted_likelihood_bootstrap_matching,
)
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._loss import PointwiseLoss

FOUR = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
GRID = [0.05, 0.1, 0.2, 0.4, 0.8]


@dataclass(frozen=True)
class Scaled(PointwiseLoss):
    """A multiple of a loss."""

    inner: PointwiseLoss
    factor: float

    def pointwise(self, parameter, data):
        return self.factor * self.inner.pointwise(parameter, data)

    def smoothed(self, width):
        smooth = self.inner.smoothed(width)
        return self if smooth is self.inner else Scaled(smooth, self.factor)


def normal_quantiles(num_data, spread=1.0):
    return spread * torch.special.ndtri((torch.arange(num_data, dtype=torch.float64) + 0.5) / num_data)


def of_variance(spread, num_data=40):
    """Return data of mean zero and exactly this standard deviation."""
    return spread * torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(num_data // 2)


def unit_normal(mean):
    return dist.Normal(mean, 1.0)


def squared(data=None, prior=None, weight=1.0, factor=1.0):
    data = normal_quantiles(30, 2.0) if data is None else data
    loss = losses.HalfSquared() if factor == 1.0 else Scaled(losses.HalfSquared(), factor)
    return GibbsPosterior(dist.Normal(0.0, 3.0) if prior is None else prior, loss, data, weight=weight)


SELECTORS = {
    "information_matching": lambda p, c: information_matching(p),
    "holmes_walker": lambda p, c: holmes_walker(p, model=unit_normal, num_draws=200),
    "bootstrap_score_matching": lambda p, c: bootstrap_score_matching(p, num_replicates=100),
    "weighted_likelihood_bootstrap_matching": lambda p, c: weighted_likelihood_bootstrap_matching(
        p, num_replicates=100
    ),
    "held_out_predictive": lambda p, c: held_out_predictive(
        p, grid=[x / c for x in GRID], model=unit_normal, num_folds=3, num_draws=64
    ),
    "held_out_predictive_default_grid": lambda p, c: held_out_predictive(
        p, model=unit_normal, num_folds=3, num_draws=64
    ),
    "safe_bayes": lambda p, c: safe_bayes(p, [x / c for x in GRID], first=10, num_draws=64),
}


@pytest.mark.calibration
@pytest.mark.parametrize("name", SELECTORS)
def test_a_rescaled_loss_gets_an_inversely_rescaled_weight(name):
    select = SELECTORS[name]
    assert select(squared(factor=4.0), 4.0).weight == pytest.approx(select(squared(), 1.0).weight / 4, rel=1e-9)


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["information_matching", "bootstrap_score_matching"])
def test_a_rescaled_loss_with_kinks_gets_an_inversely_rescaled_weight(name):
    x = normal_quantiles(31)

    def weight(factor):
        prior = dist.Normal(0.0, 3.0)
        return SELECTORS[name](GibbsPosterior(prior, Scaled(losses.Absolute(), factor), x), factor).weight

    # Minimisers of kinked losses are known to the last smoothing width, of 1e-6 of the spread.
    assert weight(4.0) == pytest.approx(weight(1.0) / 4, rel=1e-5)


@pytest.mark.calibration
@pytest.mark.parametrize("name", SELECTORS)
def test_the_current_weight_plays_no_part(name):
    select = SELECTORS[name]
    one, other = select(squared(), 1.0), select(squared(weight=0.03), 1.0)
    assert one.weight == pytest.approx(other.weight, rel=1e-12)
    assert one.posterior.weight == one.weight


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selection_says_what_it_aims_at(name):
    chosen = SELECTORS[name](squared(), 1.0)
    assert isinstance(chosen, Selection) and chosen.target.endswith(".") and chosen.target in repr(chosen)
    assert name.startswith(chosen.method)
    with pytest.raises(AttributeError):
        chosen.weight = 2.0


@pytest.mark.parametrize(
    "name", ["holmes_walker", "bootstrap_score_matching", "weighted_likelihood_bootstrap_matching"]
)
def test_seeds_are_explicit(name):
    calls = {
        "holmes_walker": lambda seed: holmes_walker(squared(), model=unit_normal, num_draws=50, seed=seed),
        "bootstrap_score_matching": lambda seed: bootstrap_score_matching(squared(), num_replicates=50, seed=seed),
        "weighted_likelihood_bootstrap_matching": lambda seed: weighted_likelihood_bootstrap_matching(
            squared(), num_replicates=50, seed=seed
        ),
    }
    state = torch.get_rng_state()
    assert calls[name](1).weight == calls[name](1).weight != calls[name](2).weight
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("spread", [0.5, 2.0, 3.0])
def test_information_matching_of_a_normal_location_is_the_inverse_variance(spread):
    assert information_matching(squared(of_variance(spread))).weight == pytest.approx(spread**-2, rel=1e-12)


def test_information_matching_of_several_unknowns_is_the_ratio_of_traces():
    draw = torch.Generator().manual_seed(0)
    covariates = torch.randn(80, 2, generator=draw, dtype=torch.float64)
    outcomes = torch.randn(80, generator=draw, dtype=torch.float64) * (1 + covariates[:, 0].abs())
    posterior = GibbsPosterior(Flat((2,)), losses.HalfSquared(losses.linear), (covariates, outcomes))
    fitted = covariates @ torch.linalg.lstsq(covariates, outcomes[:, None]).solution[:, 0]
    hessian = covariates.mT @ covariates / 80
    covariance = (covariates.mT * (outcomes - fitted).square()) @ covariates / 80
    exact = torch.trace(hessian @ torch.linalg.inv(covariance) @ hessian) / torch.trace(hessian)
    assert information_matching(posterior).weight == pytest.approx(float(exact), rel=1e-9)
    # Without the inverse it is another weight.
    assert abs(float(torch.trace(hessian) / torch.trace(covariance) / exact) - 1) > 0.01


@pytest.mark.parametrize(
    ("law", "exact", "bias"),
    [(dist.Normal, (2 / np.pi) ** 0.5, 0.022), (lambda zero, one: dist.Laplace(zero, 2 * one), 0.5, 1 / 7)],
    ids=["normal: twice the density", "laplace of scale two: one half"],
)
def test_information_matching_of_the_median(law, exact, bias):
    # At quantiles nothing is left but the bias towards what is near: 2.1 %, and a seventh where the density has a kink.
    p = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    x = law(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)).icdf(p)
    found = information_matching(GibbsPosterior(Flat(), losses.Absolute(), x, compile=False)).weight
    assert 1 - bias < found / exact < 1


@pytest.mark.calibration
def test_holmes_walker_of_a_normal_location(limit):
    for spread, prior in ((2.0, 1.0), (3.0, 0.5), (0.5, 2.0)):
        chosen = holmes_walker(squared(of_variance(spread), dist.Normal(0.0, prior)), model=unit_normal, num_draws=1500)
        exact = ((1 + prior**2) / (spread**2 + prior**2)) ** 0.5
        assert abs(chosen.weight - exact) < limit(3) * chosen.standard_error
        # Neither forgetting the root nor matching information comes near.
        assert abs(exact**2 - exact) > limit(3) * chosen.standard_error < abs(spread**-2 - exact)


@pytest.mark.calibration
def test_holmes_walker_takes_the_model_of_a_likelihood_and_covariates(limit):
    draw = torch.Generator().manual_seed(0)
    covariates = torch.randn(50, 1, generator=draw, dtype=torch.float64)
    outcomes = covariates[:, 0] + 2 * torch.randn(50, generator=draw, dtype=torch.float64)
    loss = NegativeLogLikelihood(lambda b, x: dist.Normal(x @ b, 1.0))
    posterior = GibbsPosterior(dist.Normal(torch.zeros(1), 1.0).to_event(1), loss, (covariates, outcomes))
    chosen = holmes_walker(posterior, num_draws=2000)
    x, best = covariates[:, 0], (covariates[:, 0] @ outcomes) / covariates[:, 0].square().sum()
    gain = (x.square() * ((outcomes).square() + x.square())).mean()  # E (y - x b)^2 = y^2 + x^2, times x^2
    expected = (x.square() * (1 + x.square() * best.square() + x.square())).mean()
    assert abs(chosen.weight - float(expected / gain) ** 0.5) < limit() * chosen.standard_error


def test_holmes_walker_refuses_what_it_cannot_compare():
    with pytest.raises(SettingsError, match="model="):
        holmes_walker(squared())
    with pytest.raises(SettingsError, match="improper"):
        holmes_walker(squared(prior=Flat()), model=unit_normal)


def test_all_resamples_are_the_bootstrap():
    counts = all_resamples(4)
    assert counts.shape == (256, 4) and bool((counts.sum(1) == 4).all())
    means = counts @ FOUR / 4
    assert float(means.mean()) == pytest.approx(4.0) and float(means.var(correction=0)) == pytest.approx(9.5 / 4)
    with pytest.raises(SettingsError):
        all_resamples(8)
    assert bool((resampled(7, 50, torch.Generator().manual_seed(0)).sum(1) == 7).all())


def test_bootstrap_score_matching_by_enumeration_is_exact():
    chosen = bootstrap_score_matching(squared(FOUR, Flat()), resamples=all_resamples(4))
    assert chosen.weight == pytest.approx(1 / 9.5, abs=1e-12) and round(chosen.weight, 6) == 0.105263
    assert chosen.standard_error == 0


def test_bootstrap_score_matching_takes_the_prior_into_account():
    # Normal prior of variance t^2: the score along the prior's is n (theta - mean) (m - theta) / t^2.
    chosen = bootstrap_score_matching(squared(FOUR, dist.Normal(1.0, 5.0)), resamples=all_resamples(4))
    variance = 9.5 / 4
    assert chosen.weight == pytest.approx((4 - 4 * variance / 25) / (16 * variance), abs=1e-12)


def test_bootstrap_score_matching_by_simulation_is_within_its_error(limit):
    chosen = bootstrap_score_matching(squared(FOUR, Flat()), num_replicates=5000, seed=3)
    assert chosen.standard_error < 0.005
    assert abs(chosen.weight - 1 / 9.5) < limit() * chosen.standard_error


def test_bootstrap_score_matching_without_the_laplacian_would_be_noticed(monkeypatch):
    module = sys.modules[bootstrap_score_matching.__module__]
    original = module._derivatives
    monkeypatch.setattr(module, "_derivatives", lambda *args: (0.5 * original(*args)[0], *original(*args)[1:]))
    chosen = bootstrap_score_matching(squared(FOUR, Flat()), num_replicates=5000, seed=3)
    assert abs(chosen.weight - 1 / 9.5) > 10 * chosen.standard_error


def test_a_prior_sharper_than_the_bootstrap_is_refused():
    with pytest.raises(DataError, match="prior"):
        bootstrap_score_matching(squared(FOUR, dist.Normal(4.0, 0.1)), resamples=all_resamples(4))
    with pytest.raises(ShapeError):
        bootstrap_score_matching(squared(FOUR), resamples=torch.ones(3, 5))


@pytest.mark.parametrize("criterion", ["trace", "determinant"])
def test_weighted_likelihood_bootstrap_has_the_exact_variance(criterion, limit):
    chosen = weighted_likelihood_bootstrap_matching(
        squared(FOUR, Flat()), criterion=criterion, num_replicates=4000, seed=1
    )
    # Mean under Dirichlet weights: variance 9.5 / (n + 1) = 1.9.
    assert abs(chosen.weight - 0.25 / 1.9) < limit() * chosen.standard_error
    assert chosen.standard_error < 0.004
    assert abs(9.5**-1 - 0.25 / 1.9) > limit() * chosen.standard_error  # the multinomial bootstrap is another


def test_weighted_likelihood_bootstrap_of_two_unknowns(limit):
    x = torch.stack(
        [of_variance(1.0), of_variance(1.0)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]], 1
    )
    x = x * torch.tensor([1.0, 3.0], dtype=torch.float64)
    posterior = GibbsPosterior(Flat((2,)), losses.HalfSquared(), x)
    scatter = x.mT @ x / 40 / 41
    trace = weighted_likelihood_bootstrap_matching(posterior, num_replicates=3000)
    assert abs(trace.weight - 2 / 40 / float(torch.trace(scatter))) < limit(2) * trace.standard_error
    determinant = weighted_likelihood_bootstrap_matching(posterior, criterion="determinant", num_replicates=3000)
    exact = float(torch.det(scatter)) ** -0.5 / 40
    assert abs(determinant.weight - exact) < limit(2) * determinant.standard_error
    with pytest.raises(SettingsError, match="criterion"):
        weighted_likelihood_bootstrap_matching(posterior, criterion="median")


def test_few_data_and_lost_minimisations_are_said():
    assert "few" in information_matching(squared(FOUR)).warnings[0]
    assert not information_matching(squared(FOUR)).trusted
    assert information_matching(squared()).trusted
    rows, warnings = converged_rows(torch.tensor([True, False, True, True]))
    assert rows.tolist() == [0, 2, 3] and "1 of 4" in warnings[0]
    with pytest.raises(DataError, match="3 of 4"):
        converged_rows(torch.tensor([True, False, False, False]))


@pytest.mark.parametrize("name", SELECTORS)
def test_only_sums_are_calibrated(name):
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), FOUR, pooling="mean")
    with pytest.raises(SettingsError, match="pooling"):
        SELECTORS[name](posterior, 1.0)


def test_data_fitted_without_error_are_refused():
    posterior = squared(torch.ones(12, dtype=torch.float64))
    with pytest.raises(DataError, match="without error"):
        information_matching(posterior)
    with pytest.raises(DataError):
        bootstrap_score_matching(posterior, num_replicates=20)


@pytest.mark.calibration
def test_coverage_of_the_calibrated_weight_is_nominal(limit):
    """Gaussian location of standard deviation two: 67.3 % at weight one, 95 % after calibration."""
    generator, rows, n = torch.Generator().manual_seed(0), 100, 50
    x = 2 * torch.randn(rows, n, generator=generator, dtype=torch.float64)
    weights = torch.tensor(
        [information_matching(GibbsPosterior(Flat(), losses.HalfSquared(), row, compile=False)).weight for row in x]
    )
    for weight, nominal in ((torch.ones(rows), 0.67290), (weights, 0.95)):
        covered = (x.mean(1).abs() < 1.959964 * (n * weight) ** -0.5).double().mean()
        spread = (nominal * (1 - nominal) / rows) ** 0.5
        # Estimating the variance costs a normal interval of 50 data about half a percent of coverage.
        assert -0.01 - limit(2) * spread < float(covered) - nominal < limit(2) * spread


def test_selections_without_a_curve_plot_nothing():
    with pytest.raises(SettingsError, match="no curve"):
        information_matching(squared()).plot()


TIED = torch.cat([torch.zeros(90), torch.linspace(-5, 5, 10)]).double()
LABELS = torch.tensor([1.0] * 70 + [-1.0] * 30, dtype=torch.float64)
KINKED = [(losses.Absolute(), TIED), (Scaled(losses.Absolute(), 1e-3), TIED), (losses.Hinge(), LABELS)]


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["bootstrap_score_matching", "weighted_likelihood_bootstrap_matching"])
@pytest.mark.parametrize(("loss", "data"), KINKED)
def test_minimisers_that_a_kink_holds_are_refused(name, loss, data):
    """They vary by rounding only: without the check the weights are of order 1e25."""
    with pytest.raises(DataError, match="hardly vary"):
        SELECTORS[name](GibbsPosterior(dist.Normal(0.0, 10.0), loss, data), 1.0)


def test_tied_data_on_a_kink_are_said():
    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Absolute(), TIED)
    assert any("90 of 100 data" in text for text in information_matching(posterior).warnings)
    rounded = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Pinball(0.25), normal_quantiles(200, 2.0).round())
    assert on_kinks(rounded, information_matching(rounded).diagnostics["information"].position)


@pytest.mark.calibration
@pytest.mark.parametrize("loss", [losses.Absolute(), losses.Pinball(0.1), losses.HalfSquared(), losses.Huber(1.0)])
@pytest.mark.parametrize("num_data", [9, 101, 4001])
def test_data_that_are_not_tied_are_not_said_to_be(loss, num_data):
    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), loss, normal_quantiles(num_data) + 1e3)
    for position in (1e3, 1e3 + 0.3):
        assert on_kinks(posterior, torch.tensor([position], dtype=torch.float64)) == ()
    regression = torch.stack([torch.ones(num_data).double(), torch.linspace(-1, 1, num_data).double()], 1)
    held = GibbsPosterior(Flat((2,)), losses.Absolute(losses.linear), (regression, normal_quantiles(num_data).sin()))
    assert on_kinks(held, torch.zeros(2, dtype=torch.float64)) == ()
