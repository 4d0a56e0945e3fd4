"""Activations by quadrature: against closed forms, inside their bounds, and what cannot be done."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bayeskit.errors import AccuracyWarning, ModelError, SettingsError
from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks._activations import (
    Erf,
    ExponentialActivation,
    GaussianBump,
    Gelu,
    PiecewiseLinear,
    Quadrature,
    Sine,
    _rule,
    hermite,
)

SMOOTH = [Erf(), Gelu(), Sine(1.1, 0.3), GaussianBump(0.3), ExponentialActivation(0.6), hermite(5)]
A, B = torch.tensor([1.3, 0.4, 0.9, 1.0, 0.02]).double(), torch.tensor([0.7, 1.1, 0.9, 1.0, 0.5]).double()
K = torch.tensor([0.6, -0.8, 1.0, -1.0, 0.1]).double() * (A * B).sqrt()


@pytest.mark.parametrize("activation", SMOOTH, ids=lambda x: type(x).__name__)
def test_quadrature_is_the_closed_form_for_smooth_functions(activation):
    found, wanted = Quadrature(activation).moments(K, A, B), activation.moments(K, A, B)
    torch.testing.assert_close(found.nngp, wanted.nngp, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.derivative, wanted.derivative, rtol=1e-10, atol=1e-12)
    mean = activation.mean(A)
    torch.testing.assert_close(Quadrature(activation).mean(A), torch.zeros_like(A) if mean is None else mean)
    gain = Quadrature(activation).gain().moments(K, A, B, derivative=False).nngp
    torch.testing.assert_close(gain, activation.gain().moments(K, A, B, derivative=False).nngp, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [(64, 128), (128, 512), (600, 1500)])
def test_the_error_of_kinked_functions_lies_within_the_bound(settings):
    rough, closed = Quadrature(torch.relu, *settings), PiecewiseLinear(0.0, 1.0)
    a, b = torch.tensor(1.3).double(), torch.tensor(0.6).double()
    for c in (-1.0, -0.5, 0.3, 0.9, 1.0):
        k = c * (a * b).sqrt()
        found, wanted, bound = rough.moments(k, a, b), closed.moments(k, a, b), rough.error_bound(a, b, c)
        assert (found.nngp - wanted.nngp).abs() < bound.nngp
        assert (found.derivative - wanted.derivative).abs() < bound.derivative
    # More terms and nodes help, as the message says.
    better = Quadrature(torch.relu, 2 * settings[0], 4 * settings[1])
    assert better.error_bound(a).nngp < 0.6 * rough.error_bound(a).nngp


def test_the_bound_of_a_truncated_series_is_what_is_missing():
    """A polynomial of degree five loses its last term, of known size, to a series of five terms."""
    one = torch.tensor(1.0).double()
    bound = Quadrature(hermite(5), num_terms=5).error_bound(one, c=0.9)
    # The remainder is bounded by c**5 times the coefficient's square.
    assert abs(bound.nngp - 0.9**5) < 1e-10
    assert Quadrature(hermite(5), num_terms=6).error_bound(one).nngp < 1e-10


@pytest.mark.parametrize("num_nodes", [8, 64, 512, 4096])
def test_the_rule_is_stable(num_nodes):
    nodes, polynomials = _rule(num_nodes, min(num_nodes, 256))
    assert bool(torch.isfinite(polynomials).all())
    weights = polynomials[:, 0]
    for power in range(1, 7):
        wanted = math.prod(range(2 * power - 1, 0, -2))
        assert abs((weights * nodes ** (2 * power)).sum() / wanted - 1) < 1e-11
    used = min(num_nodes // 2, 100)
    gram = (polynomials[:, :used] / weights[:, None]).mT @ polynomials[:, :used]
    assert (gram - torch.eye(used).double()).abs().max() < 1e-9


def test_inputs_of_no_variance_have_moments_and_gradients():
    a = torch.tensor([0.0, 0.0, 1.0]).double().requires_grad_()
    b = torch.tensor([0.0, 1.0, 0.0]).double()
    found = Quadrature(functional.softplus).moments(torch.zeros(3).double(), a, b)
    middle = float(Quadrature(functional.softplus).mean(torch.tensor(1.0).double()))
    wanted = math.log(2) * torch.tensor([math.log(2), middle, middle]).double()
    torch.testing.assert_close(found.nngp.detach(), wanted)
    torch.testing.assert_close(found.derivative.detach(), torch.full((3,), 0.25).double())  # the slope has mean 1/2
    (gradient,) = torch.autograd.grad(found.nngp.sum() + found.derivative.sum(), a)
    assert bool(torch.isfinite(gradient).all())


def test_the_derivatives_moment_is_the_moments_derivative():
    k = (torch.tensor([0.3, -0.5, 0.999]).double() * 1.2).requires_grad_()
    a = torch.full((3,), 1.2).double()
    found = Quadrature(torch.tanh).moments(k, a, a)
    (price,) = torch.autograd.grad(found.nngp.sum(), k)
    torch.testing.assert_close(price, found.derivative.detach(), rtol=1e-8, atol=0)


def test_jumps_have_no_derivative_as_in_finite_networks():
    assert float(Quadrature(torch.sign).moments(K, A, B).derivative.abs().max()) == 0


def test_functions_may_write_into_their_argument():
    inplace = Quadrature(nn.SiLU(inplace=True))
    torch.testing.assert_close(inplace.moments(K, A, B).nngp, Quadrature(functional.silu).moments(K, A, B).nngp)
    gains = [Quadrature(f).gain().moments(K, A, B, derivative=False).nngp for f in (inplace, functional.silu)]
    torch.testing.assert_close(*gains)


def network(activation):
    return nn.Sequential(nn.Linear(2, 8), activation, nn.Linear(8, 1))


X = torch.tensor([[1.0, 0.5], [-0.3, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize("module", [nn.Hardtanh(), nn.ReLU6(), nn.SELU()], ids=lambda x: type(x).__name__)
def test_kinked_functions_warn(module):
    kernel = infinite_width(network(module), weight_variance=2.0)
    with pytest.warns(AccuracyWarning, match="layer '1'.*num_nodes"):
        kernel.both(X)


def test_large_variances_warn_and_smooth_functions_do_not():
    with pytest.warns(AccuracyWarning, match="relative error"):
        infinite_width(network(nn.Tanh()), weight_variance=300.0).nngp(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.Sigmoid(), nn.Mish(), nn.GELU("tanh")):
            infinite_width(network(module), weight_variance=1.5, bias_variance=0.1).both(X)
            infinite_width(network(module), weight_variance=1.5).both(torch.zeros(2, 2))


def test_values_alone_need_no_derivative():
    staircase = Elementwise(lambda x: torch.from_numpy(np.tanh(x.numpy())))
    kernel = infinite_width(network(staircase))
    with pytest.raises(ModelError, match=r"layer '1'|derivative"):
        kernel.ntk(X)


def test_float32_is_as_exact_as_it_can_be():
    single = Quadrature(torch.tanh).moments(K.float(), A.float(), B.float())
    double = Quadrature(torch.tanh).moments(K, A, B)
    torch.testing.assert_close(single.nngp.double(), double.nngp, rtol=1e-6, atol=1e-7)
    assert single.nngp.dtype == torch.float32


@pytest.mark.parametrize(
    "function, message",
    [(lambda x: x.sum(), "elementwise"), (lambda x: torch.log(x), "not finite"), (lambda x: 3.0, "elementwise")],
)
def test_functions_that_have_no_moments_are_refused(function, message):
    with pytest.raises(ModelError, match=message):
        infinite_width(network(Elementwise(function))).nngp(X)


@pytest.mark.parametrize("settings", [{"num_terms": 0}, {"num_terms": 2.5}, {"num_terms": 20, "num_nodes": 10}])
def test_settings_outside_their_domain_are_refused(settings):
    with pytest.raises(SettingsError, match=r"num_terms|num_nodes"):
        Quadrature(torch.tanh, **settings)
    with pytest.raises(SettingsError, match="function"):
        Quadrature("tanh")
    with pytest.raises(SettingsError, match="correlation"):
        Quadrature(torch.tanh).error_bound(A, c=1.5)


def test_functions_one_after_another_are_one_function():
    """Also with layers between them that do nothing."""
    layers = [nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.3).eval(), nn.Identity(), nn.Softplus(), nn.Linear(8, 1)]
    joined = network(Elementwise(lambda x: functional.softplus(torch.tanh(x))))
    found, wanted = (infinite_width(module).both(X) for module in (nn.Sequential(*layers), joined))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "called, function",
    [
        (lambda x: functional.softplus(x, 2.0), lambda x: functional.softplus(x, 2.0)),
        (lambda x: functional.gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh")),
        (lambda x: functional.celu(x, 0.9, True), lambda x: functional.celu(x, 0.9)),
        (lambda x: x.sigmoid(), torch.sigmoid),
        (lambda x: x**3, lambda x: x**3),
        (lambda x: torch.pow(x, 2), torch.square),
    ],
)
@pytest.mark.filterwarnings("ignore::bayeskit.errors.AccuracyWarning")
def test_settings_of_functions_are_read_by_position_and_by_name(called, function):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.two(called(self.one(x)))

    found, wanted = (infinite_width(module).both(X) for module in (Calls(), network(Elementwise(function))))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
