import numpy as np
import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized import _minimizer as sandwich
from bayeskit.inference.generalized._checks import residual_mismatch
from bayeskit.inference.generalized._minimizer import hessian_of_loss, influence, information_matrices
from bayeskit.inference.generalized.losses._prediction import Pinball


def heteroskedastic(num_data=400, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, generator=draw, dtype=torch.float64)
    noise = (0.2 + x.abs()) * torch.randn(num_data, generator=draw, dtype=torch.float64)
    return torch.stack([torch.ones_like(x), x], 1), 1 + 2 * x + noise


def least_squares(weight=1.0):
    return GibbsPosterior(Flat((2,)), losses.HalfSquared(losses.linear), heteroskedastic(), weight=weight)


def test_least_squares_has_the_heteroskedasticity_consistent_covariance():
    covariates, outcomes = heteroskedastic()
    inverse = torch.linalg.inv(covariates.mT @ covariates)
    residuals = outcomes - covariates @ (inverse @ covariates.mT @ outcomes)
    white = inverse @ (covariates.mT * residuals.square()) @ covariates @ inverse
    found = information_matrices(least_squares())
    assert float((found.sandwich - white).abs().max()) < 1e-12
    assert float((found.posterior_covariance - inverse).abs().max()) < 1e-12


def test_a_likelihood_that_is_true_has_equal_information():
    # Two data whose variance is one: the unit-variance normal is as wide as they are.
    found = information_matrices(
        GibbsPosterior(Flat(), losses.HalfSquared(), torch.tensor([-1.0, 1.0], dtype=torch.float64))
    )
    assert float((found.sandwich - found.posterior_covariance).abs().max()) < 1e-12


def test_influence_of_a_sum_is_each_gradient():
    covariates, outcomes = heteroskedastic(30)
    posterior = GibbsPosterior(Flat((2,)), Pinball(0.3, predict=losses.linear), (covariates, outcomes))
    at = torch.tensor([0.5, 1.0], dtype=torch.float64)
    residual = outcomes - covariates @ at
    expected = -(0.3 - (residual < 0).double())[:, None] * covariates
    assert float((influence(posterior, at) - expected).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("quantile", "density"),
    [
        (lambda p: torch.special.ndtri(p), (2 * np.pi) ** -0.5),
        (lambda p: torch.tan(np.pi * (p - 0.5)), 1 / np.pi),
    ],
    ids=["normal", "cauchy"],
)
def test_curvature_of_the_median_nears_twice_the_density(quantile, density):
    errors = []
    for num_data in (200, 2000, 20000):
        x = quantile((torch.arange(num_data, dtype=torch.float64) + 0.5) / num_data)
        posterior = GibbsPosterior(Flat(), losses.Absolute(), x)
        errors.append(float(hessian_of_loss(posterior, torch.zeros(1, dtype=torch.float64))) / (2 * density) - 1)
    # Quantiles leave the smoothing error alone, which falls like a power of the width n^(-1/5).
    assert all(-0.12 < error < 0 for error in errors)
    assert all(abs(later) < 0.8 * abs(earlier) for earlier, later in zip(errors, errors[1:], strict=False))


def test_curvature_with_a_width_that_does_not_shrink_would_be_noticed(monkeypatch):
    monkeypatch.setattr(sandwich, "BANDWIDTH", 5.0)
    x = torch.special.ndtri((torch.arange(200, dtype=torch.float64) + 0.5) / 200)
    value = hessian_of_loss(GibbsPosterior(Flat(), losses.Absolute(), x), torch.zeros(1, dtype=torch.float64))
    assert float(value) / (2 * (2 * np.pi) ** -0.5) - 1 < -0.12


def test_curvature_does_not_depend_on_how_far_covariates_spread_the_outcomes():
    covariates, outcomes = heteroskedastic()
    steep = outcomes + 1000 * covariates[:, 1]
    at = torch.tensor([1.0, 2.0], dtype=torch.float64)
    values = [
        hessian_of_loss(GibbsPosterior(Flat((2,)), losses.Absolute(losses.linear), (covariates, y)), at + shift)
        for y, shift in ((outcomes, torch.zeros(2)), (steep, torch.tensor([0.0, 1000.0])))
    ]
    assert float((values[0] - values[1]).abs().max()) < 1e-9


def test_weights_count_as_repeated_data():
    x = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    posterior = GibbsPosterior(dist.Gamma(2.0, 1.0), losses.HalfSquared(), x)
    at, counts = torch.zeros(1, dtype=torch.float64), torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    weighted = hessian_of_loss(posterior, at, weights=counts) * 3
    repeated = hessian_of_loss(posterior, at, x.repeat_interleave(counts.long())) * 6
    assert float((weighted - repeated).abs().max()) < 1e-12


def test_a_loss_without_a_proper_minimum_is_refused():
    x = torch.ones(5, 1, dtype=torch.float64)
    covariates = torch.cat([x, x], 1)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1)
    posterior = GibbsPosterior(prior, losses.HalfSquared(losses.linear), (covariates, x[:, 0]))
    with pytest.raises(DataError, match="positive definite"):
        information_matrices(posterior)
    with pytest.raises(ShapeError):
        information_matrices(least_squares(), at=torch.zeros(3))


def brute_force(ours, theirs):
    """Return the smallest and largest ratio of standard deviations over many directions of the plane."""
    angle = torch.linspace(0, np.pi, 200_001, dtype=torch.float64)
    contrast = torch.stack([angle.cos(), angle.sin()], 1)
    ratio = ((contrast @ ours * contrast).sum(1) / (contrast @ theirs * contrast).sum(1)).sqrt()
    return ratio.min(), ratio.max()


def test_mismatch_of_a_heteroskedastic_regression_is_the_worst_over_all_directions():
    found = residual_mismatch(least_squares(weight=0.7))
    smallest, largest = brute_force(found.posterior_covariance, found.sandwich)
    # A step of the grid of angles changes the ratio by its square.
    assert float(found.ratios[0] - smallest) == pytest.approx(0, abs=1e-8)
    assert float(found.ratios[1] - largest) == pytest.approx(0, abs=1e-8)
    for contrast, ratio in zip(found.contrasts, found.ratios, strict=True):
        ours, theirs = contrast @ found.posterior_covariance @ contrast, contrast @ found.sandwich @ contrast
        assert float((ours / theirs).sqrt() - ratio) == pytest.approx(0, abs=1e-10)
    # Noise grows with |x|, so that the slope is the worse known, relative to what the posterior says.
    assert float(found.contrasts[0].abs().argmax()) == 1 and float(found.contrasts[1].abs().argmax()) == 0
    assert "theta[1]" in repr(found)


def test_contrasts_of_eigenvectors_left_in_the_wrong_coordinates_would_be_noticed():
    found = residual_mismatch(least_squares())
    vectors = torch.linalg.eigh(found.posterior_covariance).eigenvectors
    ratio = ((vectors.mT @ found.posterior_covariance @ vectors) / (vectors.mT @ found.sandwich @ vectors)).diagonal()
    assert float((ratio.sqrt().sort().values - found.ratios).abs().max()) > 1e-3


def test_mismatch_vanishes_where_a_covariance_is_the_sandwich():
    posterior = least_squares()
    found = residual_mismatch(posterior, covariance=information_matrices(posterior).sandwich)
    assert float((found.ratios - 1).abs().max()) < 1e-10
    assert float((found.coverage - 0.95).abs().max()) < 1e-10


def test_mismatch_scales_with_the_weight_and_knows_the_coverage():
    # The reference values of a unit-variance normal on noise of standard deviation 3, 2 and 1/2.
    for spread, coverage in ((3.0, 0.48645), (2.0, 0.67290), (0.5, 0.99991)):
        x = spread * torch.tensor([-1.0, 1.0], dtype=torch.float64)
        found = residual_mismatch(GibbsPosterior(Flat(), losses.HalfSquared(), x))
        assert float(found.coverage) == pytest.approx(coverage, abs=5e-6)
        calibrated = residual_mismatch(GibbsPosterior(Flat(), losses.HalfSquared(), x, weight=spread**-2))
        assert float(calibrated.coverage) == pytest.approx(0.95, abs=1e-10)


def test_mismatch_refuses_what_is_no_covariance():
    with pytest.raises(ShapeError):
        residual_mismatch(least_squares(), covariance=torch.eye(3))
    with pytest.raises(DataError, match="posterior covariance"):
        residual_mismatch(least_squares(), covariance=-torch.eye(2))


def test_a_function_with_kinks_is_sent_to_losses_that_know_theirs():
    x = torch.special.ndtri((torch.arange(30, dtype=torch.float64) + 0.5) / 30)
    own = GibbsPosterior(dist.Normal(0.0, 5.0), lambda m, x: (x - m).abs(), x)
    with pytest.raises(DataError, match=r"kinks.*losses.Absolute.*smoothed\(\)"):
        information_matrices(own, at=torch.zeros(1, dtype=torch.float64))
    assert float(information_matrices(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x)).mean_hessian) > 0
