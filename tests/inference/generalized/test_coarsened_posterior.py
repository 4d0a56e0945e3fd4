"""Coarsened posteriors: the coin of Miller and Dunson, and the calibration curve against Beta's moments."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.special import betaln, digamma, expit, polygamma

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized import _coarsened as coarsened
from bayeskit.inference.generalized._coarsened import (
    CalibrationCurve,
    calibration_curve,
    coarsened_posterior,
    coarsening_weight,
)

FLAT = dist.Beta(torch.tensor(1.0, dtype=torch.float64), 1.0)
# Heads in 56 % of n tosses; probability that the coin is fair, by the ordinary posterior and by alpha = 1250.
COIN = {100: (0.7973, 0.7998), 1000: (0.0183, 0.2560), 10000: (3.6e-30, 0.0087)}


def tosses(n):
    heads = torch.zeros(n, dtype=torch.float64)
    heads[: round(0.56 * n)] = 1
    return heads


def probability_of_a_fair_coin(n, alpha):
    """Even odds of theta = 1/2 and theta uniform, each with the same power of the likelihood, by quadrature."""
    posterior = coarsened_posterior(FLAT, dist.Bernoulli, tosses(n), alpha)
    peak = math.log(0.56 / 0.44)

    def log_density(u):
        return float(posterior.log_density(torch.tensor([u], dtype=torch.float64)))

    height = log_density(peak)
    width = 12 / math.sqrt(0.25 * posterior.weight * n)
    integral = quad(lambda u: math.exp(log_density(u) - height), peak - width, peak + width, limit=200)[0]
    log_fair = float(posterior.log_likelihood(torch.zeros(1, dtype=torch.float64)))
    return float(expit(log_fair - height - math.log(integral)))


@pytest.mark.calibration
@pytest.mark.parametrize("n", [100, 1000])
def test_the_coin_by_quadrature_of_the_posterior(n):
    for alpha, exact in zip((math.inf, 1250.0), COIN[n], strict=True):
        assert probability_of_a_fair_coin(n, alpha) == pytest.approx(exact, abs=5e-5)


def test_the_coin_by_beta_functions():
    for n, row in COIN.items():
        for alpha, exact in zip((math.inf, 1250.0), row, strict=True):
            power = coarsening_weight(alpha, n)
            log_odds = -power * n * math.log(2) - betaln(1 + power * 0.56 * n, 1 + power * 0.44 * n)
            assert float(f"{expit(log_odds):.1e}") == float(f"{exact:.1e}")
            assert expit(log_odds) == pytest.approx(exact, abs=5e-5)


def test_weights():
    assert coarsening_weight(math.inf, 5) == 1.0 and coarsening_weight(1250.0, 10_000) == 1 / 9
    posterior = coarsened_posterior(FLAT, dist.Bernoulli, tosses(50), 50.0, name="heads")
    assert posterior.weight == 0.5 and posterior.sites[0].name == "heads"


ALPHA = [2.0, 5.0, 20.0, 100.0, 400.0]


def exact_curve(n, alpha=ALPHA):
    heads, tails = round(0.56 * n), n - round(0.56 * n)
    power = np.array([coarsening_weight(a, n) for a in alpha])
    a, b = 1 + power * heads, 1 + power * tails
    fit = heads * (digamma(a) - digamma(a + b)) + tails * (digamma(b) - digamma(a + b))
    shared = polygamma(1, a + b)
    return fit, heads * (polygamma(1, a) - shared) + tails * (polygamma(1, b) - shared)


@pytest.fixture(scope="module")
def curve():
    posterior = coarsened_posterior(FLAT, dist.Bernoulli, tosses(100), 10.0)
    return calibration_curve(posterior, ALPHA, num_chains=40, num_warmup=200, num_draws=250, progress=False)


@pytest.mark.calibration
def test_curve_against_moments_of_beta(curve, limit):
    fit, complexity = exact_curve(100)
    for value, error, exact in (
        (curve.log_likelihood, curve.log_likelihood_error, fit),
        (curve.complexity, curve.complexity_error, complexity),
    ):
        z = (value.numpy() - exact) / error.numpy()
        assert np.abs(z).max() < 1.3 * limit(10)  # forty chains: Student's t rather than normal
        assert bool((error > 0).all())


@pytest.mark.calibration
def test_mutation_another_power_fails(curve, limit):
    fit, _ = exact_curve(100, [2 * a for a in ALPHA])
    assert np.abs((curve.log_likelihood.numpy() - fit) / curve.log_likelihood_error.numpy()).max() > 1.3 * limit(10)


@pytest.mark.calibration
def test_elbow_table_and_plot(curve):
    assert list(curve.to_pandas().index) == ALPHA
    assert curve.elbow in ALPHA
    assert curve.plot().get_xlabel() == "complexity"
    steps = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    fit, complexity, zero = torch.tensor([0.0, 9.0, 9.5, 10.0]), torch.tensor([1.0, 1.5, 4.0, 9.0]), torch.zeros(4)
    assert CalibrationCurve(steps, steps, fit, zero, complexity, zero).elbow == 10.0


@pytest.mark.calibration
def test_a_complexity_of_ones_own(limit):
    posterior = coarsened_posterior(FLAT, dist.Bernoulli, tosses(100), 10.0)
    curve = calibration_curve(posterior, [2.0, 5.0, 20.0], lambda v: v["theta"], num_warmup=100, num_draws=100,
                              num_chains=40, progress=False)  # fmt: skip
    power = curve.weight.numpy()
    z = (curve.complexity.numpy() - (1 + 56 * power) / (2 + 100 * power)) / curve.complexity_error.numpy()
    assert np.abs(z).max() < 1.3 * limit(3)
    with pytest.raises(ShapeError, match="complexity"):
        coarsened._complexity(posterior, torch.zeros(2, 3, 1, dtype=torch.float64), lambda v: v["theta"].mean())


def test_bad_settings():
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(SettingsError):
            coarsening_weight(alpha, 5)
    with pytest.raises(SettingsError):
        coarsening_weight(1.0, 0)
    posterior = coarsened_posterior(FLAT, dist.Bernoulli, tosses(10), 10.0)
    for alpha in ([1.0, 2.0], [1.0, 2.0, -3.0], [1.0, 2.0, math.inf]):
        with pytest.raises(SettingsError, match="at least three"):
            calibration_curve(posterior, alpha)
