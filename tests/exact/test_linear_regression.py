import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch.distributions import MultivariateNormal

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact import linear_regression


def test_linreg10_has_the_published_evidence() -> None:
    assert linear_regression().log_evidence == pytest.approx(-94.0845074111, abs=5e-11)


def test_linreg10_has_the_published_information() -> None:
    case = linear_regression()
    mean, covariance = case.posterior_mean["b"], case.posterior_covariance["b"]
    posterior = MultivariateNormal(mean, covariance)
    prior = MultivariateNormal(torch.zeros(10, dtype=torch.float64), 4.0 * torch.eye(10, dtype=torch.float64))
    information = torch.distributions.kl_divergence(posterior, prior).item()
    assert information == pytest.approx(22.901, abs=5e-4)


@pytest.mark.parametrize(("noise_sd", "prior_sd"), [(1.0, 2.0), (0.3, 5.0), (4.0, 0.1)])
def test_evidence_is_the_normal_density_of_the_response(noise_sd: float, prior_sd: float) -> None:
    case = linear_regression(*linear_regression().args[:2], noise_sd=noise_sd, prior_sd=prior_sd)
    design, response = case.args[0].numpy(), case.args[1].numpy()
    covariance = noise_sd**2 * np.eye(len(response)) + prior_sd**2 * design @ design.T
    expected = multivariate_normal.logpdf(response, mean=np.zeros(len(response)), cov=covariance)
    assert case.log_evidence == pytest.approx(expected, rel=1e-12)


def test_moments_are_those_of_conditioning_the_joint_normal_on_the_response() -> None:
    case = linear_regression(noise_sd=1.5, prior_sd=0.7)
    design, response = case.args[0].numpy(), case.args[1].numpy()
    gain = 0.7**2 * design.T @ np.linalg.inv(1.5**2 * np.eye(50) + 0.7**2 * design @ design.T)
    np.testing.assert_allclose(case.posterior_mean["b"], gain @ response, rtol=1e-10)
    covariance = 0.7**2 * (np.eye(10) - gain @ design)
    np.testing.assert_allclose(case.posterior_covariance["b"], covariance, rtol=1e-9, atol=1e-14)


def test_a_case_of_ones_own_takes_lists_and_fewer_rows_than_columns() -> None:
    case = linear_regression([[1.0, 2.0, 0.5]], [0.3], noise_sd=2.0, prior_sd=1.0)
    sd = math.sqrt(4.0 + 1.0 + 4.0 + 0.25)
    expected = -0.5 * math.log(2.0 * math.pi) - math.log(sd) - 0.5 * (0.3 / sd) ** 2
    assert case.log_evidence == pytest.approx(expected, rel=1e-13)
    assert case.posterior_mean["b"].shape == (3,)
    assert case.name == "linear_regression"


def test_the_callers_arrays_are_copied() -> None:
    response = np.array([0.3, 0.1])
    case = linear_regression(np.ones((2, 1)), response)
    response[0] = 100.0
    assert case.args[1][0] == 0.3


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "word"),
    [
        (([[1.0]],), {}, DataError, "both"),
        (([[1.0]], [math.nan]), {}, DataError, r"response is not finite at index \(0,\)"),
        (([[1.0], [math.inf]], [1.0, 2.0]), {}, DataError, r"design is not finite at index \(1, 0\)"),
        (([["a"]], [1.0]), {}, DataError, "design"),
        ((np.ones((0, 2)), np.ones(0)), {}, DataError, "empty"),
        (([1.0], [1.0]), {}, ShapeError, "design"),
        (([[1.0], [1.0]], [1.0]), {}, ShapeError, "2 rows"),
        ((), {"noise_sd": 0.0}, SettingsError, "noise_sd"),
        ((), {"prior_sd": math.inf}, SettingsError, "prior_sd"),
    ],
)
def test_unusable_input_is_named(arguments, settings, error, word) -> None:
    with pytest.raises(error, match=word):
        linear_regression(*arguments, **settings)
