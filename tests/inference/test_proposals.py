"""Densities and draws of normal and Student-t noise, against SciPy."""

import numpy as np
import pytest
import torch
from scipy.stats import f as f_distribution
from scipy.stats import kstest, multivariate_normal, multivariate_t

from bayeskit.inference._proposals import normal_log_prob, student_log_prob, student_noise

POINTS = torch.linspace(-3, 4, 24, dtype=torch.float64).reshape(2, 4, 3)


@pytest.mark.parametrize("variance", [1.0, 0.3])
def test_normal_density(variance):
    exact = multivariate_normal(np.zeros(3), variance * np.eye(3)).logpdf(POINTS.numpy())
    np.testing.assert_allclose(normal_log_prob(POINTS, variance).numpy(), exact, rtol=1e-13)


@pytest.mark.parametrize("degrees_of_freedom", [1.0, 6.0, 1e5])
def test_student_density(degrees_of_freedom):
    exact = multivariate_t(np.zeros(3), np.eye(3), df=degrees_of_freedom).logpdf(POINTS.numpy())
    np.testing.assert_allclose(student_log_prob(POINTS, degrees_of_freedom).numpy(), exact, rtol=1e-9)


def test_squared_lengths_of_student_noise_have_the_f_distribution():
    noise = student_noise((2, 1000, 3), 4.5, torch.Generator().manual_seed(0))
    assert noise.shape == (2, 1000, 3) and noise.dtype == torch.float64
    lengths = (noise.square().sum(-1) / 3).flatten().numpy()
    assert kstest(lengths, f_distribution(3, 4.5).cdf).pvalue > 1e-4
    # The mutation: every coordinate with a scale of its own is another distribution.
    alone = student_noise((6000, 1), 4.5, torch.Generator().manual_seed(0)).reshape(2000, 3)
    assert kstest((alone.square().sum(-1) / 3).numpy(), f_distribution(3, 4.5).cdf).pvalue < 1e-4
