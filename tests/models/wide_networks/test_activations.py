"""Moments of activations: closed forms against quadrature in the plane, identities, and a variant that is wrong."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks._activations import (
    Elementwise,
    Erf,
    ExponentialActivation,
    GaussianBump,
    Gelu,
    NormalMoments,
    PiecewiseLinear,
    PolynomialActivation,
    Quadrature,
    Sine,
    Step,
    activation_of_module,
    hermite,
    monomial,
)

CLOSED = {
    "relu": PiecewiseLinear(0.0, 1.0),
    "leaky relu": PiecewiseLinear(0.2, 1.0),
    "absolute value": PiecewiseLinear(-1.0, 1.0),
    "erf": Erf(),
    "gelu": Gelu(),
    "sine": Sine(frequency=1.3),
    "cosine": Sine(phase=math.pi / 2),
    "shifted sine": Sine(frequency=0.8, phase=0.4, amplitude=1.7),
    "gaussian": GaussianBump(0.6),
    "sign": Step(),
    "heaviside": Step(0.0, 1.0),
    "exponential": ExponentialActivation(0.7),
    "hermite": hermite(3),
    "monomial": monomial(4),
    "polynomial": PolynomialActivation((0.3, -1.0, 0.5, 0.2)),
}
VARIANCES = [(1.3, 0.4), (2.0, 2.0), (0.05, 3.0), (1e-4, 1.0)]
CORRELATIONS = [-1.0, -1 + 1e-9, -0.9999, -0.7, 0.0, 0.3, 0.95, 1 - 1e-6, 1 - 1e-12, 1.0]


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def plane(a, b, c):
    """Return pairs of normal numbers and their weights: polar coordinates, cut where either number is zero.

    Functions that are smooth on both sides of zero are smooth between the cuts, so that Gauss and Legendre's rule
    converges fast; this knows nothing of Hermite polynomials or closed forms.
    """
    turn = math.atan2(math.sqrt((1 - c) * (1 + c)), c)
    cuts = sorted(
        {(angle % (2 * math.pi)) for angle in (math.pi / 2, -math.pi / 2, turn - math.pi / 2, turn + math.pi / 2)}
    )
    cuts.append(cuts[0] + 2 * math.pi)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    radius, thickness = 7.5 * (nodes + 1), 7.5 * weights
    first, second, mass = [], [], []
    for low, high in itertools.pairwise(cuts):
        angle, width = 0.5 * (high - low) * (nodes + 1) + low, 0.5 * (high - low) * weights
        first.append(np.outer(radius, np.cos(angle)))
        second.append(np.outer(radius, np.cos(angle - turn)))
        mass.append(np.outer(radius * np.exp(-0.5 * radius**2) * thickness, width) / (2 * math.pi))
    first, second, mass = (torch.from_numpy(np.concatenate(x, 1).reshape(-1)) for x in (first, second, mass))
    return math.sqrt(a) * first, math.sqrt(b) * second, mass


def slope(function, x):
    x = x.clone().requires_grad_()
    (result,) = torch.autograd.grad(function(x).sum(), x)
    return result


def worst_error(activation, of="nngp"):
    """Return the largest error of a moment, relative to the product of standard deviations."""
    worst = 0.0
    for (a, b), c in itertools.product(VARIANCES, CORRELATIONS):
        k = c * math.sqrt(a * b)
        gap = double(a * b * (1 - c) * (1 + c))
        u, v, mass = plane(a, b, c)
        if of == "gain":
            f, g = u * slope(activation, u), v * slope(activation, v)
            got = activation.gain().moments(double(k), double(a), double(b), gap, derivative=False).nngp
        elif of == "derivative":
            f, g = slope(activation, u), slope(activation, v)
            got = activation.moments(double(k), double(a), double(b), gap).derivative
        else:
            f, g = activation(u), activation(v)
            got = activation.moments(double(k), double(a), double(b), gap, derivative=False).nngp
        scale = ((mass * f.square()).sum() * (mass * g.square()).sum()).sqrt().clamp_min(1e-300)
        error = (got - (mass * f * g).sum()).abs()
        worst = max(worst, float(error / scale) if error > 0 else 0.0)
    return worst


@pytest.mark.calibration
@pytest.mark.parametrize("of", ["nngp", "derivative", "gain"])
@pytest.mark.parametrize("name", CLOSED)
def test_moments_are_those_of_quadrature_in_the_plane(name, of):
    assert worst_error(CLOSED[name], of) < 1e-10


class SignDropped(PiecewiseLinear):
    """The arc-cosine kernel with the angle's sign dropped."""

    def moments(self, k, a, b, gap=None, derivative=True):
        return super().moments(k.abs(), a, b, gap, derivative)


class HalfDensity(Gelu):
    """GELU's moments without the density's rational part."""

    def moments(self, k, a, b, gap=None, derivative=True):
        found = super().moments(k, a, b, gap, derivative)
        return NormalMoments(found.nngp - 0.01 * k.square(), found.derivative)


@pytest.mark.parametrize("broken", [SignDropped(0.0, 1.0), HalfDensity()])
def test_the_check_of_moments_notices_a_mistake(broken):
    assert worst_error(broken) > 1e-3


@pytest.mark.parametrize("name", [name for name in CLOSED if name not in ("sign", "heaviside")])
def test_the_derivatives_moment_is_the_moments_derivative(name):
    """Price's theorem: the derivative with respect to the covariance."""
    a, b = double([1.3, 0.4, 2.0]), double([0.7, 2.1, 2.0])
    k = (double([0.6, -0.8, 0.2]) * (a * b).sqrt()).requires_grad_()
    found = CLOSED[name].moments(k, a, b)
    (price,) = torch.autograd.grad(found.nngp.sum(), k)
    torch.testing.assert_close(price, found.derivative.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CLOSED)
def test_means_are_those_of_quadrature_on_the_line(name):
    nodes, weights = np.polynomial.legendre.leggauss(100)
    half, mass = 7.5 * (nodes + 1), 7.5 * weights * np.exp(-0.5 * (7.5 * (nodes + 1)) ** 2) / math.sqrt(2 * math.pi)
    z, mass = (torch.from_numpy(x) for x in (np.concatenate([half, -half]), np.concatenate([mass, mass])))
    activation = CLOSED[name]
    for a in (0.0, 0.3, 2.5):
        values = activation(math.sqrt(a) * z)
        if a == 0 and isinstance(activation, Step):
            continue  # the sign of zero is zero, which has no weight anywhere else
        found = activation.mean(double(a))
        wanted = (mass * values).sum()
        assert abs(wanted - (0 if found is None else found)) < 1e-11 * (1 + abs(wanted))


def test_hermite_polynomials_are_orthonormal():
    one = double(1.0)
    for degree, c in itertools.product(range(8), (-0.7, 0.4, 1.0)):
        found = hermite(degree).moments(c * one, one, one)
        assert abs(found.nngp - c**degree) < 1e-10
        assert abs(found.derivative - (degree * c ** (degree - 1) if degree else 0)) < 1e-9
    # Mixed products, from sums of two of them.
    for m, n in itertools.combinations(range(5), 2):
        pairs = itertools.zip_longest(hermite(m).coefficients, hermite(n).coefficients, fillvalue=0.0)
        both = PolynomialActivation(tuple(x + y for x, y in pairs))
        assert abs(both.moments(0.6 * one, one, one).nngp - 0.6**m - 0.6**n) < 1e-10


def test_moments_broadcast():
    a, b = double([0.5, 1.0, 2.0]), double([0.3, 0.7])
    k = 0.4 * (a[:, None] * b).sqrt()
    for activation in CLOSED.values():
        found = activation.moments(k, a[:, None], b[None])
        for i, j in itertools.product(range(3), range(2)):
            alone = activation.moments(k[i, j], a[i], b[j])
            torch.testing.assert_close(found.nngp[i, j], alone.nngp, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(found.derivative[i, j], alone.derivative, rtol=1e-13, atol=1e-14)


def test_modules_are_the_activations_that_they_compute():
    x = torch.linspace(-3, 3, 41, dtype=torch.float64)
    modules = [
        nn.ReLU(),
        nn.LeakyReLU(0.3),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.Tanh(),
        nn.SELU(inplace=True),
        nn.Hardtanh(-2, 1),
    ]
    for module in modules:
        torch.testing.assert_close(activation_of_module(module)(x.clone()), module(x.clone()))
    assert activation_of_module(nn.Linear(2, 2)) is None
    assert activation_of_module(Elementwise(Erf())) == Erf()


def test_functions_of_torch_have_their_closed_form():
    for function, closed in ((torch.erf, Erf()), (torch.relu, PiecewiseLinear(0.0, 1.0)), (nn.GELU(), Gelu())):
        assert Elementwise(function).activation == closed
    assert isinstance(Elementwise(torch.tanh).activation, Quadrature)
    assert isinstance(Elementwise(lambda x: torch.erf(x)).activation, Quadrature)
    with pytest.raises(SettingsError, match="function of a tensor"):
        Elementwise("erf")


def test_gaps_of_moments_are_their_difference():
    """What the rectifier knows of its own gap, where the difference still has digits."""
    a, b = double([1.3, 0.4, 2.0, 1.0]), double([0.7, 2.1, 2.0, 1.0])
    c = double([0.6, -0.8, 0.2, 0.0])
    for activation in (PiecewiseLinear(0.0, 1.0), PiecewiseLinear(0.2, 1.0), PiecewiseLinear(-1.0, 1.0)):
        found = activation.moments(c * (a * b).sqrt(), a, b, a * b * (1 - c.square()))
        wanted = activation.moments(a, a, a).nngp * activation.moments(b, b, b).nngp - found.nngp.square()
        torch.testing.assert_close(found.gap, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PolynomialActivation(()),
        lambda: PolynomialActivation((float("nan"),)),
        lambda: hermite(-1),
        lambda: monomial(1.5),
    ],
)
def test_polynomials_without_meaning_are_refused(make):
    with pytest.raises(SettingsError):
        make()
