"""Dense networks against 40-digit recursions, on inputs that lose digits elsewhere; gradients there."""

import itertools

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import nn

from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks._activations import Erf

ACTIVATIONS = {"relu": nn.ReLU, "erf": lambda: Elementwise(Erf()), "gelu": nn.GELU}


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def dense(activation, depth, bias=True, inputs=3):
    layers = [nn.Linear(inputs, 8, bias=bias)]
    for i in range(depth):
        layers += [ACTIVATIONS[activation](), nn.Linear(8, 8 if i < depth - 1 else 1, bias=bias)]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(torch.relu(h))
        return self.last(torch.relu(h))


def assert_exact(got, wanted, tolerance=1e-10):
    scale = wanted.abs() + 1e-4 * wanted.abs().max()  # entries that are zero but for rounding
    assert float(((got - wanted).abs() / scale).max()) < tolerance


def moments(activation, k, a, b):
    """Return both moments of an activation at the working precision."""
    pi = mpmath.pi
    if activation == "relu":
        if a * b == 0:
            return mpf(0), mpf(1) / 4  # of the limit; unused, for nothing reaches it
        sine = mpmath.sqrt(max(a * b - k * k, 0))
        angle = mpmath.atan2(sine, k)
        return (sine + (pi - angle) * k) / (2 * pi), (pi - angle) / (2 * pi)
    if activation == "erf":
        product = (1 + 2 * a) * (1 + 2 * b)
        return 2 / pi * mpmath.asin(2 * k / mpmath.sqrt(product)), 4 / pi / mpmath.sqrt(product - 4 * k * k)
    product = (1 + a) * (1 + b)
    root = mpmath.sqrt(product - k * k)
    both = mpf(1) / 4 + mpmath.asin(k / mpmath.sqrt(product)) / (2 * pi)
    nngp = k * both + (a * b + k * k * (1 - a * b) / product) / (2 * pi * root)
    return nngp, both + k / (2 * pi * root) * (1 / (1 + a) + 1 / (1 + b) + 1 / root**2)


def pair(activation, depth, weight, bias, x, y):
    """Return both kernels of a dense network for one pair of inputs, at 40 digits."""
    weight, bias = mpf(weight), mpf(bias)
    products = [sum(mpf(p) * mpf(q) for p, q in zip(u, v, strict=True)) / len(x) for u, v in ((x, y), (x, x), (y, y))]
    k, a, b = (weight * product + bias for product in products)
    tangent = k
    for _ in range(depth):
        slope = moments(activation, k, a, b)[1]
        k, a, b = (weight * moments(activation, *z)[0] + bias for z in ((k, a, b), (a, a, a), (b, b, b)))
        tangent = k + weight * slope * tangent
    return float(k), float(tangent)


def exact(activation, depth, weight, bias, x):
    nngp, ntk = (torch.zeros(len(x), len(x), dtype=torch.float64) for _ in range(2))
    rows = x.tolist()
    with mp.workdps(40):
        for i, j in itertools.combinations_with_replacement(range(len(x)), 2):
            nngp[i, j], ntk[i, j] = pair(activation, depth, weight, bias, rows[i], rows[j])
    return nngp + nngp.triu(1).mT, ntk + ntk.triu(1).mT


def near_duplicates(dtype=torch.float64, num_features=6):
    """Return rows beside a first one at distances from 1e-3 to 1e-9, parallel, opposite, equal and far ones."""
    generator = torch.Generator().manual_seed(0)
    first, other, third = torch.randn(3, num_features, generator=generator, dtype=torch.float64)
    rows = [first] + [first + 10.0**-power * third for power in range(3, 10)]
    rows += [2 * first, -first, -3 * first + 1e-7 * third, first, other, 1e-6 * other + third]
    return torch.stack(rows).to(dtype)


@pytest.mark.calibration
@pytest.mark.parametrize("variances", [(2.0, 0.0), (1.5, 0.1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("depth", [1, 3])
def test_near_duplicates_keep_their_digits(activation, depth, variances):
    x = near_duplicates()
    found = infinite_width(dense(activation, depth, inputs=6), "ntk", *variances).both(x)
    nngp, ntk = exact(activation, depth, *variances, x)
    assert_exact(found.nngp, nngp)
    assert_exact(found.ntk, ntk)


def test_the_check_notices_angles_that_have_lost_half_their_digits(monkeypatch):
    x = near_duplicates()
    ntk = exact("relu", 3, 2.0, 0.0, x)[1]
    kernel = infinite_width(dense("relu", 3, inputs=6), weight_variance=2.0)
    assert_exact(kernel.ntk(x), ntk)
    monkeypatch.setattr(
        "bayeskit.models.wide_networks._layers._vector_gap",
        lambda x, y, k, a, b: (a[:, None] * b - k.square()).clamp_min(0),
    )
    with pytest.raises(AssertionError):
        assert_exact(kernel.ntk(x), ntk)


def test_residual_networks_keep_the_digits_of_near_duplicates():
    """Sums carry the gap, too: the kernel is that of mixed covariances at 40 digits."""
    x = near_duplicates(num_features=3)
    found = infinite_width(Residual(), "ntk", 1.5, 0.1).both(x)
    rows = x.tolist()
    for i, j in itertools.combinations_with_replacement(range(len(x)), 2):
        with mp.workdps(40):
            nngp, ntk = residual_pair(rows[i], rows[j])
        for got, wanted in ((found.nngp[i, j], nngp), (found.ntk[i, j], ntk)):
            assert abs(float(got) - wanted) < 1e-10 * (abs(wanted) + 1e-4)


def residual_pair(x, y):
    weight, bias = mpf(1.5), mpf(0.1)
    products = [sum(mpf(p) * mpf(q) for p, q in zip(u, v, strict=True)) / 3 for u, v in ((x, y), (x, x), (y, y))]
    k, a, b = (weight * product + bias for product in products)
    tangent = k
    for block in range(3):
        slope = moments("relu", k, a, b)[1]
        new = [weight * moments("relu", *z)[0] + bias for z in ((k, a, b), (a, a, a), (b, b, b))]
        branch = new[0] + weight * slope * tangent
        if block == 2:
            return float(new[0]), float(branch)
        tangent = tangent + branch
        k, a, b = k + new[0], a + new[1], b + new[2]
    raise AssertionError


def test_float32_keeps_five_digits_and_stays_positive():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 20, generator=generator)
    x = torch.cat(
        [x, x[:20] * (1 + 1e-4 * torch.randn(20, 20, generator=generator)), x[:5] + 1e-6, 2 * x[5:8], -x[8:11]]
    )
    kernel = infinite_width(dense("relu", 3, inputs=20), "ntk", 2.0, 0.0)
    single, reference = kernel.both(x), kernel.both(x.double())
    chosen = [0, 1, 5, 8, 100, 101, 120, 125, 128]
    for matrix, wanted in zip(reference, exact("relu", 3, 2.0, 0.0, x[chosen].double()), strict=True):
        assert_exact(matrix[chosen][:, chosen], wanted)
    for got, wanted in zip(single, reference, strict=True):
        assert got.dtype == torch.float32
        assert float(((got - wanted) / wanted).abs().max()) < 1e-5
        values = torch.linalg.eigvalsh(got.double())
        assert float(values[0]) > -1e-6 * float(values[-1])


@pytest.mark.calibration
def test_gradients_are_those_of_finite_differences():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    variances = [double(value).requires_grad_() for value in (1.5, 0.3)]
    for activation in ("relu", "erf", "gelu"):
        module = dense(activation, 2)
        assert torch.autograd.gradcheck(
            lambda x, w, b, module=module: tuple(infinite_width(module, "ntk", w, b).both(x, x[:2].flip(0) + 0.1)),
            (x, *variances),
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_finite_at_correlation_one_and_at_zero(activation):
    x = double(
        [[1.0, 0.5, -0.3], [2.0, 1.0, -0.6], [-1.0, -0.5, 0.3], [1.0, 0.5, -0.3], [0.0, 0.0, 0.0]]
    ).requires_grad_()
    for value in (0.0, 0.1):
        weight, bias = double(1.5).requires_grad_(), double(value).requires_grad_()
        found = infinite_width(dense(activation, 3), "ntk", weight, bias).both(x)
        gradients = torch.autograd.grad(found.nngp.sum() + found.ntk.sum(), (x, weight, bias))
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_gradients_of_the_diagonal_are_those_of_the_whole():
    """At correlation one the gradient with respect to variances is that of the closed diagonal."""
    x = double([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7]])
    weight, bias = double(1.5).requires_grad_(), double(0.1).requires_grad_()
    kernel = infinite_width(dense("relu", 2), "ntk", weight, bias)
    wanted = torch.autograd.grad(kernel.nngp_diagonal(x).sum(), (weight, bias))
    found = torch.autograd.grad(kernel.nngp(x, x.clone()).diagonal().sum(), (weight, bias))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


def test_zero_and_equal_rows():
    x = double([[0.0, 0.0, 0.0], [1.0, 0.5, -0.3], [1.0, 0.5, -0.3], [0.0, 0.0, 0.0]])
    for activation, variances in itertools.product(ACTIVATIONS, ((2.0, 0.0), (1.5, 0.1))):
        for matrix in infinite_width(dense(activation, 2), "ntk", *variances).both(x):
            assert bool(torch.isfinite(matrix).all())
            torch.testing.assert_close(matrix[1], matrix[2], rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(matrix[0], matrix[3], rtol=0, atol=0)
