import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import gamma, multivariate_normal
from scipy.stats import t as student_t

from bayeskit.errors import DataError, SettingsError
from bayeskit.exact import radiata_pine

EVIDENCE = {"x": -310.1282855, "z": -301.7046021}


@pytest.mark.parametrize("covariate", ["x", "z"])
def test_evidence_is_the_published_one(covariate: str) -> None:
    assert radiata_pine(covariate).log_evidence == pytest.approx(EVIDENCE[covariate], abs=6e-8)


def _design_and_response(case) -> tuple[np.ndarray, np.ndarray]:
    covariate, response = (argument.numpy() for argument in case.args[:2])
    return np.column_stack([np.ones_like(covariate), covariate - covariate.mean()]), response


@pytest.mark.parametrize("covariate", ["x", "z"])
def test_evidence_is_the_product_of_the_sequential_student_predictions(covariate: str) -> None:
    case = radiata_pine(covariate)
    design, response = _design_and_response(case)
    mean, precision, shape, rate = np.array([3000.0, 185.0]), np.diag([0.06, 6.0]), 3.0, 2.0 * 300.0**2
    total = 0.0
    for row, y in zip(design, response, strict=True):
        spread = 1.0 + row @ np.linalg.solve(precision, row)
        total += student_t.logpdf(y, df=2.0 * shape, loc=row @ mean, scale=math.sqrt(rate / shape * spread))
        error = y - row @ mean
        updated = precision + np.outer(row, row)
        mean = np.linalg.solve(updated, precision @ mean + row * y)
        precision, shape, rate = updated, shape + 0.5, rate + 0.5 * error**2 / spread
    assert case.log_evidence == pytest.approx(total, rel=1e-12)
    # The same recursion ends in the posterior.
    assert case.posterior_mean["alpha"].item() == pytest.approx(mean[0], rel=1e-10)
    assert case.posterior_mean["beta"].item() == pytest.approx(mean[1], rel=1e-10)
    assert case.posterior_mean["tau"].item() == pytest.approx(shape / rate, rel=1e-10)


@pytest.mark.parametrize("covariate", ["x", "z"])
def test_evidence_and_moments_by_quadrature_over_the_precision(covariate: str) -> None:
    case = radiata_pine(covariate)
    design, response = _design_and_response(case)
    # Given tau, the response is normal and so are the coefficients: their moments mix over tau.
    unit_covariance = np.eye(len(response)) + design @ np.diag([1.0 / 0.06, 1.0 / 6.0]) @ design.T
    marginal = multivariate_normal(cov=unit_covariance)
    residual = response - design @ np.array([3000.0, 185.0])
    n = len(response)

    def log_integrand(log_tau: float) -> float:
        tau = math.exp(log_tau)
        likelihood = 0.5 * n * log_tau + marginal.logpdf(math.sqrt(tau) * residual)
        return likelihood + gamma.logpdf(tau, a=3.0, scale=1.0 / (2.0 * 300.0**2)) + log_tau

    def integral(power: int) -> float:
        value, _ = quad(
            lambda v: math.exp(log_integrand(v) - case.log_evidence + power * (v + 11.0)),
            -16.0,
            -8.0,
            epsabs=0.0,
            epsrel=1e-11,
            limit=200,
        )
        return value * math.exp(-11.0 * power)

    assert math.log(integral(0)) == pytest.approx(0.0, abs=1e-10)
    mean = case.posterior_mean["tau"].item()
    assert integral(1) == pytest.approx(mean, rel=1e-9)
    assert integral(2) - mean**2 == pytest.approx(case.posterior_covariance["tau"].item(), rel=1e-7)
    precision = np.diag([0.06, 6.0]) + design.T @ design
    covariance = integral(-1) * np.linalg.inv(precision)
    assert covariance[0, 0] == pytest.approx(case.posterior_covariance["alpha"].item(), rel=1e-9)
    assert covariance[1, 1] == pytest.approx(case.posterior_covariance["beta"].item(), rel=1e-9)


def test_the_prior_matters_and_can_be_changed() -> None:
    wide = radiata_pine("x", prior_precision=(0.006, 0.6), shape=2.0, rate=1e5)
    assert wide.log_evidence != radiata_pine("x").log_evidence
    assert wide.args[3].tolist() == [0.006, 0.6]


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"covariate": "density"}, SettingsError, "'x'"),
        ({"prior_mean": (1.0,)}, SettingsError, "two numbers"),
        ({"prior_precision": (1.0, -1.0)}, SettingsError, "above zero"),
        ({"prior_mean": (math.nan, 1.0)}, DataError, "prior_mean"),
        ({"shape": -1.0}, SettingsError, "shape"),
        ({"rate": 0.0}, SettingsError, "rate"),
    ],
)
def test_unusable_settings_are_named(settings, error, word) -> None:
    with pytest.raises(error, match=word):
        radiata_pine(**settings)
