"""Real data whose posteriors, modes and minimisers are published, to the digits printed there."""

import pyro.distributions as dist
import pytest
import torch
from lifelines.datasets import load_rossi
from statsmodels.datasets import engel

from bayeskit.inference.generalized import GibbsPosterior, losses, minimize

# Newcomb (1891), as listed by Stigler (1977), Do robust estimators work with real data? Annals of Statistics 5.
TIMES = """28 26 33 24 34 -44 27 16 40 -2 29 22 24 21 25 30 23 29 31 19 24 20 36 32 36 28 25 21 28 29 37 25 28 26
30 32 36 26 30 22 36 23 27 27 28 27 31 27 26 33 26 32 32 24 39 28 24 25 32 25 29 27 28 29 16 23"""
NEWCOMB = torch.tensor([float(word) for word in TIMES.split()], dtype=torch.float64)
NORMAL = losses.NegativeLogLikelihood(lambda mean: dist.Normal(mean, 10.7453))
# Loss, weight, posterior mean and standard deviation.
ROWS = {
    "normal model": (NORMAL, 1.0, 26.212, 1.323),
    "absolute loss": (losses.Absolute(), 1.0, 27.273, 0.311),
    "absolute loss, matched": (losses.Absolute(), 0.1528, 27.301, 0.728),
    "beta .1": (losses.BetaDivergence(0.1, lambda mean: dist.Normal(mean, 5.0)), 1.0, 27.617, 0.767),
    "beta .3": (losses.BetaDivergence(0.3, lambda mean: dist.Normal(mean, 5.0)), 1.0, 27.619, 1.121),
}
LAST_DIGIT = 5e-4

# Regression quantiles of food expenditure on income, by linear programming: intercept and slope.
QUANTILES = {0.1: (110.1416, 0.4018), 0.5: (81.4823, 0.5602), 0.9: (67.3509, 0.6863)}
# The maximum of the partial likelihood with Efron's ties, from the R package survival (Fox and Weisberg 2011).
COVARIATES = ["fin", "age", "race", "wexp", "mar", "paro", "prio"]
REARREST = [-0.37942, -0.05744, 0.31390, -0.14980, -0.43370, -0.08487, 0.09150]


def moments(loss, weight, low=-50.0, high=100.0, spacing=1e-3):
    """By the trapezoidal rule; kinks of the absolute loss lie on the grid."""
    grid = torch.linspace(low, high, round((high - low) / spacing) + 1, dtype=torch.float64)
    prior = dist.Normal(torch.tensor(25.0, dtype=torch.float64), 100.0)
    posterior = GibbsPosterior(prior, loss, NEWCOMB, weight)
    mass = torch.cat([posterior.log_density(part[:, None]) for part in grid.split(20_000)]).softmax(0)
    mean = (mass * grid).sum()
    return float(mean), float((mass * (grid - mean).square()).sum().sqrt())


@pytest.mark.parametrize("name", ROWS)
def test_speed_of_light(name):
    loss, weight, mean, sd = ROWS[name]
    found = moments(loss, weight)
    assert abs(found[0] - mean) <= LAST_DIGIT and abs(found[1] - sd) <= LAST_DIGIT, found


def test_another_weight_or_scale_misses_these_rows():
    assert abs(moments(losses.Absolute(), 0.16)[1] - 0.728) > 10 * LAST_DIGIT
    other = losses.BetaDivergence(0.1, lambda mean: dist.Normal(mean, 5.2))
    assert abs(moments(other, 1.0)[1] - 0.767) > 10 * LAST_DIGIT


def regression_quantile(level):
    """Return intercept and slope, by a prior so wide that the mode is the minimiser to more than their digits."""
    table = engel.load_pandas().data
    income, food = (torch.tensor(table[name].tolist(), dtype=torch.float64) for name in ("income", "foodexp"))
    # In thousands of francs, income about its mean: coefficients of like sizes that hardly depend on one another.
    scale = 1000.0
    covariates = torch.stack([torch.ones_like(income), (income - income.mean()) / scale], -1)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0)
    posterior = GibbsPosterior(prior, losses.Pinball(level, predict=losses.linear), (covariates, food / scale))
    at_mean, slope = posterior.parameter(minimize(posterior).position)
    return float(at_mean * scale - slope * income.mean()), float(slope)


@pytest.mark.calibration
@pytest.mark.parametrize("level", QUANTILES)
def test_engel(level):
    intercept, slope = regression_quantile(level)
    # 81.48225 at the median is printed as 81.4823: a little more than half a unit of the last digit.
    assert abs(intercept - QUANTILES[level][0]) < 1e-4 and abs(slope - QUANTILES[level][1]) <= 5e-5, (intercept, slope)


def test_another_level_misses_engels_median():
    assert abs(regression_quantile(0.52)[0] - QUANTILES[0.5][0]) > 1.0


def rossi(ties, prior_sd=1e4):
    table = load_rossi()
    x = torch.tensor(table[COVARIATES].to_numpy(float).tolist(), dtype=torch.float64)
    time, event = (torch.tensor(table[name].tolist(), dtype=torch.float64) for name in ("week", "arrest"))
    prior = dist.Normal(torch.zeros(len(COVARIATES), dtype=torch.float64), prior_sd)
    best = minimize(GibbsPosterior(prior, losses.CoxPartialLikelihood(ties), (x - x.mean(0), time, event))).position
    return float((best - best.new_tensor(REARREST)).abs().max())


def test_rearrest():
    assert rossi("efron") <= 5e-6 * (1 + 1e-6)


def test_another_rule_for_ties_misses_the_published_maximum():
    assert rossi("breslow") > 5e-5
