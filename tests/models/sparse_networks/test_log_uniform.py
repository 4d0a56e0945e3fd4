"""The divergence from the log-uniform prior against quadrature, Dawson's function, and its limits."""

import math

import numpy as np
import pytest
import torch
from scipy.special import dawsn

from bayeskit.errors import DataError
from bayeskit.models.sparse_networks import ImproperLogUniform, log_uniform_divergence

POINTS = [-8.0, -4.0, -1.0, 0.0, 1.0, 3.0, 8.0]


def by_quadrature(log_alpha):
    """Return the mean of log |1 + z / m| plus a constant, m = alpha**-0.5, by the trapezoidal rule in log |w|."""
    m = math.exp(-log_alpha / 2)
    # Smooth and falling off at both ends, so that the rule converges faster than any power of the step.
    v, step = np.linspace(-50, math.log(m + 40), 200_001, retstep=True)
    w = np.exp(v)
    density = np.exp(-0.5 * (w - m) ** 2) + np.exp(-0.5 * (w + m) ** 2) - 2 * np.exp(-0.5 * w * w)
    return math.fsum(v * w * density) * step / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("log_alpha", POINTS)
def test_divergence_is_the_integral(log_alpha):
    ours = float(log_uniform_divergence(torch.tensor(log_alpha, dtype=torch.float64)))
    assert abs(ours - by_quadrature(log_alpha)) < 1e-12


def test_published_values():
    values = {-4: 2.625754932, -1: 0.914531310, 0: 0.426685604, 1: 0.173193859, 3: 0.024688335}
    ours = log_uniform_divergence(torch.tensor(list(values), dtype=torch.float64))
    assert (ours - torch.tensor(list(values.values()), dtype=torch.float64)).abs().max() < 6e-10


def test_the_usual_approximation_is_off_by_a_hundredth():
    log_alpha = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    sigmoid = 0.63576 * (1 - torch.sigmoid(1.87320 + 1.48695 * log_alpha)) + 0.5 * torch.log1p((-log_alpha).exp())
    off = (sigmoid - log_uniform_divergence(log_alpha)).abs()
    assert abs(float(off.max()) - 0.00937) < 1e-5 and abs(float(log_alpha[off.argmax()]) + 3.5) < 0.06


def test_derivative_is_dawsons_function():
    log_alpha = torch.linspace(-60, 60, 4001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_uniform_divergence(log_alpha).sum(), log_alpha)
    root = np.exp(-log_alpha.detach().numpy() / 2) / math.sqrt(2)
    exact = -root * dawsn(root)
    assert np.abs(slope.numpy() / exact - 1).max() < 1e-13


@pytest.mark.calibration
def test_second_derivative():
    log_alpha = torch.linspace(-12, 12, 97, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: log_uniform_divergence(x), log_alpha, atol=1e-9)
    assert torch.autograd.gradgradcheck(lambda x: log_uniform_divergence(x), log_alpha, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits(dtype):
    log_alpha = torch.tensor([-math.inf, -1e30, -800.0, 800.0, 1e30, math.inf], dtype=dtype, requires_grad=True)
    value = log_uniform_divergence(log_alpha)
    (slope,) = torch.autograd.grad(value.sum(), log_alpha, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), log_alpha)
    constant = (np.euler_gamma + math.log(2)) / 2
    assert value[0] == math.inf and abs(float(value[2].detach()) - 400 - constant) < 400 * torch.finfo(dtype).eps * 2
    assert value[3:].tolist() == [0.0, 0.0, 0.0]
    assert torch.allclose(slope, torch.tensor([-0.5, -0.5, -0.5, 0, 0, 0], dtype=dtype), atol=1e-6)
    assert bool(curvature.isfinite().all())


def test_single_precision():
    log_alpha = torch.linspace(-20, 20, 401)
    exact = log_uniform_divergence(log_alpha.double())
    assert ((log_uniform_divergence(log_alpha) - exact).abs() / (1 + exact)).max() < 1e-6


def test_normal_distributions_have_the_closed_form():
    loc = torch.tensor([[0.0, 1.0], [-2.0, 1e-30]], dtype=torch.float64, requires_grad=True)
    posterior = torch.distributions.Normal(loc, 0.5)
    independent = torch.distributions.Independent(posterior, 2)
    divergence = torch.distributions.kl_divergence(independent, ImproperLogUniform((2, 2)))
    (gradient,) = torch.autograd.grad(divergence, loc)
    exact = sum(by_quadrature(math.log(0.25 / m**2)) for m in (1.0, 2.0))
    assert abs(float(divergence.detach()) - exact) < 1e-12
    assert bool(gradient.isfinite().all()) and gradient[0, 0] == 0


def test_refusals():
    with pytest.raises(DataError, match="log_alpha has dtype"):
        log_uniform_divergence(torch.tensor([1]))
