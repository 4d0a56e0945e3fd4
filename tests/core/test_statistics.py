import math
import warnings

import numpy as np
import pytest
import torch

from bayeskit._core.statistics import (
    effective_sample_size,
    effective_within_chains,
    independent_log_mean_exp_error,
    log_mean_exp,
    log_mean_exp_error,
    mean_error,
    num_largest,
    pareto_shape,
    pareto_smoothed,
    r_hat,
    shape_of_largest,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz

try:
    from arviz import psislw
except ImportError:  # ArviZ 1.x
    from arviz_stats.base import array_stats

    def psislw(log_weights):
        return array_stats.psislw(-log_weights)  # it takes log likelihoods


def autoregressive(rho, shape, seed=0):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = noise.clone()
    for i in range(1, shape[-1]):
        x[..., i] = rho * x[..., i - 1] + math.sqrt(1 - rho**2) * noise[..., i]
    return x


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_autoregressive_draws(rho):
    """The exact answer is N (1 - rho) / (1 + rho); each estimate scatters by a few per cent, their mean by less."""
    x = autoregressive(rho, (64, 4, 2000))
    ratio = effective_sample_size(x) / (8000 * (1 - rho) / (1 + rho))
    error = float(ratio.std()) / 8
    # Geyer's estimate truncates a sum of noisy terms; its bias at 8,000 draws stays within 5 %.
    assert abs(float(ratio.mean()) - 1) < 5 * error + 0.05


@pytest.mark.calibration
@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.9])
def test_effective_sample_size_agrees_with_arviz(rho):
    x = autoregressive(rho, (4, 1000), seed=3)
    theirs = float(arviz.ess({"x": x.numpy()}, method="mean")["x"])
    assert abs(float(effective_sample_size(x)) / theirs - 1) < 0.02


def test_r_hat_agrees_with_arviz():
    x = autoregressive(0.5, (4, 500), seed=1) + torch.tensor([[0.0], [0.3], [0.0], [-0.2]])
    theirs = float(arviz.rhat({"x": x.numpy()}, method="split")["x"])
    assert abs(float(r_hat(x)) - theirs) < 1e-10


def test_pareto_shape_agrees_with_arviz():
    generator = torch.Generator().manual_seed(0)
    for k in (0.2, 0.5, 0.9):
        log_weights = -k * torch.rand(4000, generator=generator, dtype=torch.float64).log()
        _, theirs = psislw(log_weights.numpy())
        assert abs(pareto_shape(log_weights) - float(theirs)) < 0.01


def capped(share):
    """Log of uniform weights, capped such that a share of them is the largest."""
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (u / (1 - share)).clamp(max=1.0).log()


@pytest.mark.parametrize("share", (0.005, 0.02, 0.05, 0.5))
def test_many_weights_at_their_bound_are_no_heavy_tail(share):
    log_weights = capped(share)
    # Weights that lie as close to the bound as rounding allows are at it, too.
    near = log_weights - 1e-14 * torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for each in (log_weights, near):
        smoothed, shape = pareto_smoothed(torch.stack([each, each - 7.0]))
        assert pareto_shape(each) < -1 and bool((shape < -1).all())
        assert bool(((smoothed - smoothed.amax(-1, keepdim=True)) - each).abs().max() < (1e-9 if share > 0.03 else 1))
        largest = each.sort().values[-num_largest(10_000) :]
        assert float(shape_of_largest(largest.unsqueeze(0))) < -1


@pytest.mark.parametrize("share", (0.0, 0.9, 0.97))
def test_ties_below_a_heavy_tail_do_not_hide_it(share):
    """Weights of a Pareto distribution with shape 1.5, of which the smallest are made equal."""
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_weights = -1.5 * u.log()
    tied = log_weights.clamp(min=float(log_weights.quantile(share)))
    assert pareto_shape(tied) > 0.9 and bool(pareto_smoothed(tied[None])[1] > 0.9)


def test_pareto_shape_of_degenerate_weights():
    assert pareto_shape(torch.zeros(1000)) == -math.inf
    one = torch.full((1000,), -torch.inf)
    one[3] = 0.0
    assert pareto_shape(one) == math.inf
    assert pareto_shape(torch.zeros(3)) == math.inf


def test_standard_errors_match_the_scatter_of_replicates(calibrated):
    """Up to the 5 % of the effective sample size, and the skewness of a log-normal mean."""
    x = autoregressive(0.6, (400, 4, 500))
    assert calibrated(x.mean((1, 2)) / mean_error(x), off=0.05)
    log_x = 0.3 * x
    assert calibrated((log_mean_exp(log_x) - 0.3**2 / 2) / log_mean_exp_error(log_x), off=0.05, bias=0.05)


def test_independent_error_against_the_log_normal(calibrated):
    x = 0.5 * torch.randn(500, 1, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimate, error = log_mean_exp(x), independent_log_mean_exp_error(x)
    # A mean and its error are correlated by half the skewness, 1.75, over the root of the number of draws.
    assert calibrated((estimate - 0.125) / error, bias=1.75 / 2 / math.sqrt(2000))


def test_weight_effective_sample_size():
    assert float(weight_effective_sample_size(torch.zeros(50))) == pytest.approx(50)
    assert float(weight_effective_sample_size(torch.tensor([0.0, -torch.inf, -torch.inf]))) == pytest.approx(1)


def test_a_constant_counts_in_full():
    assert float(effective_sample_size(torch.full((2, 100), 3.0))) == 200
    assert np.isfinite(float(r_hat(torch.full((2, 100), 3.0))))


def test_chains_that_stand_still_at_different_points_disagree():
    stuck = torch.arange(4, dtype=torch.float64).unsqueeze(-1).expand(4, 100)
    assert r_hat(stuck) == torch.inf
    assert r_hat(torch.zeros(4, 100, dtype=torch.float64)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_said_to_have_converged(value):
    """Chains that disagree did so with an R-hat of one and more effective draws than draws."""
    x = torch.randn(3, 4, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += 5 * torch.arange(4)[:, None]
    x[1, 2, 7] = value
    for found in (r_hat(x), effective_sample_size(x), effective_within_chains(x)):
        assert found.isnan().tolist() == [False, True, False]


def test_constants_in_single_precision_are_constant():
    constants = torch.rand(200, generator=torch.Generator().manual_seed(0))
    x = constants[:, None, None].expand(-1, 4, 100)
    assert effective_sample_size(x).tolist() == [400.0] * 200 and effective_sample_size(x).dtype == x.dtype
    assert r_hat(x).tolist() == [1.0] * 200


def test_the_error_of_fixed_shares_matches_the_scatter_of_replicates(calibrated):
    """Parts that differ far more than what is in them: two fifths are 1, the others 5, up to noise."""
    part = torch.tensor([0, 1, 1, 0, 1]).repeat(40)
    noise = torch.randn(4000, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_x = (1.0 + 4.0 * part + 0.3 * noise).abs().log().T
    error = stratified_log_mean_exp_error(log_x, part)
    z = (log_x.logsumexp(0) - math.log(200 * (0.4 * 1 + 0.6 * 5))) / error
    assert calibrated(z, off=0.01) and not calibrated(1.1 * z, off=0.01)
    assert float(independent_log_mean_exp_error(log_x.T[:, None]).mean() / error.mean()) > 5
