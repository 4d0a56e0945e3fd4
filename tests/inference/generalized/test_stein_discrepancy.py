"""Kernel Stein discrepancy: reference values, Stein's identity, the weight's derivative, exact U and V statistics."""

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import CoherenceError, DataError, SettingsError, ShapeError
from bayeskit.inference._kernel_discrepancy import InverseMultiquadric, RadialBasis
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.generalized.losses._scores import (
    GeneralInverseMultiquadric,
    KernelSteinDiscrepancy,
    own_derivatives,
    radial_derivatives,
    score_of,
)

KERNELS = (
    GeneralInverseMultiquadric(),
    GeneralInverseMultiquadric(1.7, 0.3),
    RadialBasis(0.9),
    InverseMultiquadric(1.3),
)
OUTLIERS = (2.0, 10.0, 100.0, 1000.0)
# Minimisers of the discrepancy for x = (-1, 0, .5, 1, y) with y as above.
UNWEIGHTED = (0.5, 1.135, 7.859, 74.98)
WEIGHTED = (0.505382, 0.346530, 0.303003, 0.298547)
WITHOUT_DERIVATIVE = (0.347, 0.218, 0.175, 0.170)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def location_score(mean, x):
    return mean - x


def robust(x):
    return (1 + x**2) ** -0.5


def robust_without_derivative(x):
    return robust(x).detach()


def coefficients(loss, x):
    """Of the squared discrepancy, as a polynomial of degree two: from three values, exactly."""
    below, middle, above = (
        loss.total(torch.tensor(m, dtype=torch.float64), x).item() / len(x) for m in (-1.0, 0.0, 1.0)
    )
    return (above + below) / 2 - middle, (above - below) / 2, middle


def minimiser(loss, x):
    square, slope, _ = coefficients(loss, x)
    return -slope / (2 * square)


def test_reference_coefficients():
    loss, x = KernelSteinDiscrepancy(location_score), double(-1.0, 0.0, 2.0)
    found = coefficients(loss, x)
    for value, expected in zip(found, (0.660122, -0.334122, 0.447969), strict=True):
        assert abs(value - expected) < 5e-7
    assert abs(minimiser(loss, x) - 0.253076) < 5e-7


@pytest.mark.parametrize(
    ("far", "plain", "weighted", "wrong"), list(zip(OUTLIERS, UNWEIGHTED, WEIGHTED, WITHOUT_DERIVATIVE, strict=True))
)
def test_reference_outliers(far, plain, weighted, wrong):
    x = double(-1.0, 0.0, 0.5, 1.0, far)
    assert abs(minimiser(KernelSteinDiscrepancy(location_score), x) / plain - 1) < 5e-4
    assert abs(minimiser(KernelSteinDiscrepancy(location_score, weight=robust), x) - weighted) < 5e-7
    # A weight whose derivative is dropped looks just as robust, and is another, wrong, estimator.
    broken = minimiser(KernelSteinDiscrepancy(location_score, weight=robust_without_derivative), x)
    assert abs(broken - wrong) < 5e-4 and abs(broken - weighted) > 0.1


def stein_mean(loss, y, count=4001):
    """Mean of the Stein kernel k(X, y) under the model N(0.3, 1), by quadrature: Stein's identity says zero."""
    theta = torch.tensor(0.3, dtype=torch.float64)
    grid = torch.linspace(-12, 12, count, dtype=torch.float64)
    mass = dist.Normal(theta, 1.0).log_prob(grid).exp() * (grid[1] - grid[0])
    column = torch.func.vmap(lambda x: loss.stein_kernel(theta, torch.stack([x, y]))[0, 1])(grid)
    return (mass * column).sum().item()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight", [None, robust])
def test_stein_identity(kernel, weight):
    loss = KernelSteinDiscrepancy(location_score, kernel, weight)
    for y in (-1.5, 0.3, 4.0):
        assert abs(stein_mean(loss, torch.tensor(y, dtype=torch.float64))) < 1e-12


def test_stein_identity_fails_without_the_derivative():
    loss = KernelSteinDiscrepancy(location_score, weight=robust_without_derivative)
    assert abs(stein_mean(loss, torch.tensor(-1.5, dtype=torch.float64))) > 1e-2


@pytest.mark.calibration
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["none", "datum", "entries"])
def test_stein_kernel_against_its_definition(kernel, form):
    """Both Stein operators applied to the kernel by automatic differentiation, entry by entry."""
    x = torch.tensor([[0.1, 1.0], [-1.0, 0.4], [2.0, -0.7]], dtype=torch.float64)
    theta, one = double(0.2, -0.4), torch.ones((), dtype=torch.float64)
    weights = {
        "none": None,
        "datum": lambda x: (1 + (x**2).sum(-1)) ** -0.5,
        "entries": lambda x: torch.stack([(1 + x[..., 0] ** 2) ** -0.5, x[..., 1].exp() + x[..., 0]], -1),
    }
    weight = weights[form]

    def log_density(p, x):
        return -((x - p) ** 2).sum(-1) / 2 - 0.1 * (x**4).sum(-1) - 0.3 * x[..., 0] * x[..., 1]

    score = score_of(log_density)

    def entry(a, b, j):
        def product(a, b):
            m = [torch.ones(2).to(c) if weight is None else weight(c[None])[0].expand(2) for c in (a, b)]
            return m[0][j] * kernel(((a - b) ** 2).sum(), one) * m[1][j]

        def in_b(a):  # s_j(b) f + d/db_j f
            return score(theta, b[None])[0, j] * product(a, b) + torch.func.grad(product, 1)(a, b)[j]

        return score(theta, a[None])[0, j] * in_b(a) + torch.func.grad(in_b)(a)[j]

    expected = torch.stack([torch.stack([entry(a, b, 0) + entry(a, b, 1) for b in x]) for a in x])
    found = KernelSteinDiscrepancy(score, kernel, weight).stein_kernel(theta, x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found, found.mT, rtol=1e-13, atol=1e-13)
    assert torch.linalg.eigvalsh(found).min() > 0


def test_radial_derivatives_in_closed_form():
    t, one = torch.linspace(0, 9, 7, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    value, first, second = radial_derivatives(GeneralInverseMultiquadric(1.5, 0.4), t, one)
    base = 1 + t / 2.25
    torch.testing.assert_close(value, base**-0.4, rtol=1e-13, atol=0)
    torch.testing.assert_close(first, -0.4 / 2.25 * base**-1.4, rtol=1e-13, atol=0)
    torch.testing.assert_close(second, 0.56 / 2.25**2 * base**-2.4, rtol=1e-13, atol=0)


def test_own_derivatives_are_the_diagonal():
    x = torch.tensor([[0.3, -1.0], [2.0, 0.5]], dtype=torch.float64)
    value, slope = own_derivatives(lambda x: torch.stack([x[:, 0] ** 2 * x[:, 1], x.prod(-1).sin()], -1), x)
    torch.testing.assert_close(value, torch.stack([x[:, 0] ** 2 * x[:, 1], x.prod(-1).sin()], -1))
    expected = torch.stack([2 * x[:, 0] * x[:, 1], x[:, 0] * x.prod(-1).cos()], -1)
    torch.testing.assert_close(slope, expected, rtol=1e-13, atol=0)


def test_constant_weights_scale_the_kernel():
    x, theta = double(-1.0, 0.0, 2.0), torch.tensor(0.6, dtype=torch.float64)
    plain = KernelSteinDiscrepancy(location_score).total(theta, x)
    constant = KernelSteinDiscrepancy(location_score, weight=lambda x: 3.0 * torch.ones_like(x))
    torch.testing.assert_close(constant.total(theta, x), 9 * plain, rtol=1e-13, atol=0)


def test_statistics_by_hand():
    x, theta = double(-1.0, 0.0, 2.0, 0.4), torch.tensor(0.6, dtype=torch.float64)
    kernel = KernelSteinDiscrepancy(location_score).stein_kernel(theta, x)
    for statistic, pairs in (("V", 16), ("U", 12)):
        loss = KernelSteinDiscrepancy(location_score, statistic=statistic)
        total = sum(kernel[i, j] for i in range(4) for j in range(4) if statistic == "V" or i != j)
        torch.testing.assert_close(loss.total(theta, x), 4 * total / pairs, rtol=1e-13, atol=0)
        w = double(0.5, 2.0, 1.0, 0.7)
        chosen = [(i, j) for i in range(4) for j in range(4) if statistic == "V" or i != j]
        weighted = sum(w[i] * w[j] * kernel[i, j] for i, j in chosen) / sum(w[i] * w[j] for i, j in chosen)
        torch.testing.assert_close(loss.total(theta, x, w), w.sum() * weighted, rtol=1e-13, atol=0)
        twice = torch.tensor([2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
        torch.testing.assert_close(loss.total(theta, x, twice), 2 * loss.total(theta, x), rtol=1e-13, atol=0)


def test_u_statistic_is_unbiased(limit):
    """Under the model itself the mean of the U-statistic is zero, and that of the V-statistic is not."""
    generator = torch.Generator().manual_seed(4)
    sets, theta = torch.randn(4000, 6, generator=generator, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for statistic, biased in (("U", False), ("V", True)):
        loss = KernelSteinDiscrepancy(location_score, statistic=statistic)
        values = torch.func.vmap(lambda x, loss=loss: loss.total(theta, x))(sets)
        z = values.mean() / (values.std() / len(values) ** 0.5)
        assert (z.abs() > limit()) == biased


def test_identifies_the_model():
    """The discrepancy at the quantiles of a law is small for its own score, and large for another's."""
    x = dist.Normal(0.0, 1.0).icdf((torch.arange(200, dtype=torch.float64) + 0.5) / 200)
    zero = torch.zeros((), dtype=torch.float64)
    own = KernelSteinDiscrepancy(location_score).total(zero, x)
    other = KernelSteinDiscrepancy(lambda m, x: (m - x) / 4).total(zero, x)
    assert own < 0.05 and other > 10


def test_scales_taken_from_the_data():
    x, theta = double(-1.0, 0.0, 2.0, 0.4), torch.tensor(0.6, dtype=torch.float64)
    squared = torch.stack([(a - b) ** 2 for i, a in enumerate(x) for b in x[:i]]).median().item()
    open_scale = KernelSteinDiscrepancy(location_score, InverseMultiquadric()).total(theta, x)
    torch.testing.assert_close(
        open_scale, KernelSteinDiscrepancy(location_score, InverseMultiquadric(squared)).total(theta, x)
    )
    alone = KernelSteinDiscrepancy(location_score, RadialBasis()).total(theta, x[:1])
    assert alone.isfinite()


def test_zero_bandwidth_and_other_settings_are_refused():
    for wrong in (0.0, -1.0):
        with pytest.raises(SettingsError, match="bandwidth must"):
            GeneralInverseMultiquadric(bandwidth=wrong)
        with pytest.raises(SettingsError, match="bandwidth must"):
            RadialBasis(wrong)
    with pytest.raises(SettingsError, match="exponent must"):
        GeneralInverseMultiquadric(exponent=0.0)
    with pytest.raises(SettingsError, match="statistic must"):
        KernelSteinDiscrepancy(location_score, statistic="W")


def test_data_are_checked():
    prior, x = dist.Normal(0.0, 1.0), double(-1.0, 0.0, 2.0)
    with pytest.raises(ShapeError, match="covariates"):
        GibbsPosterior(prior, KernelSteinDiscrepancy(location_score), (x, x))
    with pytest.raises(DataError, match="whole numbers"):
        GibbsPosterior(prior, KernelSteinDiscrepancy(location_score), torch.tensor([1, 2]))
    with pytest.raises(DataError, match="two data at least"):
        GibbsPosterior(prior, KernelSteinDiscrepancy(location_score, statistic="U"), x[:1])
    with pytest.raises(ShapeError, match="score returns shape"):
        KernelSteinDiscrepancy(lambda m, x: m).total(torch.zeros(()), x)
    with pytest.raises(ShapeError, match="log_density returns shape"):
        KernelSteinDiscrepancy(score_of(lambda m, x: (m - x).sum())).total(torch.zeros(()), x)
    with pytest.raises(ShapeError, match="keeps the shape"):
        KernelSteinDiscrepancy(location_score, weight=lambda x: x.sum()).total(torch.zeros(()), x)


def test_is_not_updated_sequentially():
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), KernelSteinDiscrepancy(location_score), double(-1.0, 0.0, 2.0))
    with pytest.raises(CoherenceError, match="KernelSteinDiscrepancy"):
        posterior.update(double(1.0))


def test_ties_leave_no_bandwidth():
    x = double(0.0, 0.0, 0.0, 0.0, 1.0)
    for kernel in (RadialBasis(), InverseMultiquadric()):
        with pytest.raises(DataError, match=f"tied.*{type(kernel).__name__}.*give the kernel a bandwidth"):
            GibbsPosterior(dist.Normal(0.0, 3.0), KernelSteinDiscrepancy(location_score, kernel), x)
    # Four of ten pairs, and any number where the kernel has a bandwidth, are no obstacle.
    for kernel, data in ((RadialBasis(), double(0.0, 0.0, 1.0, 1.0, 3.0)), (RadialBasis(1.0), x)):
        KernelSteinDiscrepancy(location_score, kernel).check(data)
    KernelSteinDiscrepancy(location_score).check(x)


def test_weights_are_repeated_data_for_pairs_with_themselves_only():
    x, mean, counts = double(-1.0, 0.5, 2.0), double(0.3)[0], torch.tensor([2, 1, 3])
    repeated = x.repeat_interleave(counts)
    off = {}
    for statistic in ("V", "U"):
        loss = KernelSteinDiscrepancy(location_score, statistic=statistic)
        off[statistic] = float((loss.total(mean, x, counts.double()) - loss.total(mean, repeated)).abs())
    assert off["V"] < 1e-12 and off["U"] > 0.1
