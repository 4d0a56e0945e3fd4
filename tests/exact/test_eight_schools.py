import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import multivariate_normal

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact import eight_schools

Y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
S = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


@pytest.mark.parametrize("centered", [False, True])
def test_evidence_is_the_published_one(centered: bool) -> None:
    assert eight_schools(centered=centered).log_evidence == pytest.approx(-31.3113474, abs=5e-8)


def _grid(y: np.ndarray, s: np.ndarray, mu_scale: float, tau_scale: float) -> tuple[np.ndarray, ...]:
    """Trapezoid in (mu, log tau): twice another parameterisation, and mu is integrated by number too."""
    mu = np.linspace(-11.0, 11.0, 441)[:, None] * mu_scale
    log_tau = np.linspace(-32.0, 14.0, 921)[None, :]
    tau = np.exp(log_tau)
    log_density = (
        -0.5 * (mu / mu_scale) ** 2
        - 0.5 * math.log(2.0 * math.pi * mu_scale**2)
        + math.log(2.0 / (math.pi * tau_scale))
        - np.log1p((tau / tau_scale) ** 2)
        + log_tau
    )
    for effect, error in zip(y, s, strict=True):
        variance = error**2 + tau**2
        log_density = log_density - 0.5 * np.log(2.0 * math.pi * variance) - 0.5 * (effect - mu) ** 2 / variance
    cell = (mu[1, 0] - mu[0, 0]) * (log_tau[0, 1] - log_tau[0, 0])
    return mu, tau, np.exp(log_density) * cell


@pytest.mark.parametrize(("mu_scale", "tau_scale"), [(5.0, 5.0), (20.0, 1.0)])
def test_evidence_and_moments_agree_with_a_two_dimensional_rule(mu_scale: float, tau_scale: float) -> None:
    case = eight_schools(mu_scale=mu_scale, tau_scale=tau_scale)
    mu, tau, mass = _grid(Y, S, mu_scale, tau_scale)
    assert case.log_evidence == pytest.approx(math.log(mass.sum()), abs=1e-9)
    mass = mass / mass.sum()
    for site, value in (("mu", mu), ("tau", tau)):
        mean = (mass * value).sum()
        assert case.posterior_mean[site].item() == pytest.approx(mean, rel=1e-8)
        variance = (mass * (value - mean) ** 2).sum()
        assert case.posterior_covariance[site].item() == pytest.approx(variance, rel=1e-8)
    for j in range(len(Y)):
        precision = 1.0 / S[j] ** 2 + 1.0 / tau**2
        conditional = (Y[j] / S[j] ** 2 + mu / tau**2) / precision
        mean = (mass * conditional).sum()
        assert case.posterior_mean["theta"][j].item() == pytest.approx(mean, rel=1e-8)
        variance = (mass * (1.0 / precision + (conditional - mean) ** 2)).sum()
        assert case.posterior_covariance["theta"][j, j].item() == pytest.approx(variance, rel=1e-8)
        raw = (mass * (conditional - mu) / tau).sum()
        assert case.posterior_mean["eta"][j].item() == pytest.approx(raw, rel=1e-6, abs=1e-9)


def test_covariances_agree_with_the_full_normal_given_tau() -> None:
    case = eight_schools()
    ones, num = np.ones(8), 8

    def given_tau(tau: float) -> tuple[float, np.ndarray, np.ndarray]:
        # (mu, eta) jointly normal, theta a linear map of it, y = theta + noise.
        prior = np.diag([25.0, *ones])
        to_theta = np.column_stack([ones, tau * np.eye(num)])
        noise = np.diag(S**2)
        covariance_y = to_theta @ prior @ to_theta.T + noise
        gain = prior @ to_theta.T @ np.linalg.inv(covariance_y)
        density = multivariate_normal.pdf(Y, cov=covariance_y) * 2.0 / (math.pi * 5.0 * (1.0 + (tau / 5.0) ** 2))
        mean, covariance = gain @ Y, prior - gain @ to_theta @ prior
        mapped = np.vstack([np.eye(num + 1), to_theta])
        return density, mapped @ mean, mapped @ covariance @ mapped.T

    # Trapezoid in log tau, fine enough for the tolerance below.
    log_tau = np.linspace(-25.0, 10.0, 701)
    densities, means, covariances = zip(*(given_tau(math.exp(v)) for v in log_tau), strict=True)
    mass = np.array(densities) * np.exp(log_tau)
    mass /= mass.sum()
    means = np.array(means)
    mean = mass @ means
    covariance = np.einsum("k,kij->ij", mass, np.array(covariances))
    covariance += np.einsum("k,ki,kj->ij", mass, means - mean, means - mean)
    for site, block in (("mu", slice(0, 1)), ("eta", slice(1, 9)), ("theta", slice(9, 17))):
        np.testing.assert_allclose(case.posterior_covariance[site], covariance[block, block], atol=1e-7)
        np.testing.assert_allclose(case.posterior_mean[site].reshape(-1), mean[block], atol=1e-8)


def test_evidence_agrees_with_adaptive_quadrature_in_log_scale() -> None:
    def integrand(log_tau: float) -> float:
        tau = math.exp(log_tau)
        covariance = np.diag(S**2 + tau**2) + 25.0
        log_prior = math.log(2.0 / (math.pi * 5.0)) - math.log1p((tau / 5.0) ** 2) + log_tau
        return math.exp(multivariate_normal.logpdf(Y, cov=covariance) + log_prior + 31.0)

    value, _ = quad(integrand, -30.0, 12.0, points=[0.0, 2.0], epsabs=0.0, epsrel=1e-10, limit=300)
    assert eight_schools().log_evidence == pytest.approx(math.log(value) - 31.0, abs=1e-9)


def test_the_rule_has_converged() -> None:
    coarse, fine = eight_schools(num_nodes=96), eight_schools(num_nodes=400)
    assert coarse.log_evidence == pytest.approx(fine.log_evidence, abs=1e-11)
    for site in fine.posterior_mean:
        np.testing.assert_allclose(coarse.posterior_mean[site], fine.posterior_mean[site], rtol=1e-9)


def test_both_parameterisations_share_the_answers() -> None:
    centred, non_centred = eight_schools(centered=True), eight_schools()
    assert set(centred.posterior_mean) == {"mu", "tau", "theta"}
    assert set(non_centred.posterior_mean) == {"mu", "tau", "theta", "eta"}
    for site, mean in centred.posterior_mean.items():
        assert mean.equal(non_centred.posterior_mean[site])


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "word"),
    [
        (([1.0, 2.0],), {}, DataError, "both"),
        (([1.0, 2.0], [1.0]), {}, ShapeError, "2 entries"),
        (([1.0, 2.0], [1.0, 0.0]), {}, DataError, "above zero"),
        (([1.0, math.nan], [1.0, 1.0]), {}, DataError, "effects"),
        (([1.0], [1.0]), {}, DataError, "at least two"),
        ((), {"mu_scale": -5.0}, SettingsError, "mu_scale"),
        ((), {"tau_scale": 0.0}, SettingsError, "tau_scale"),
        ((), {"num_nodes": 4}, SettingsError, "num_nodes"),
        ((), {"num_nodes": 8}, SettingsError, "larger num_nodes"),
    ],
)
def test_unusable_input_is_named(arguments, settings, error, word) -> None:
    with pytest.raises(error, match=word):
        eight_schools(*arguments, **settings)
