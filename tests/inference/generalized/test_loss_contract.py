"""What every divergence loss promises: batching, weights as repeated data, gradients, tracing, float32."""

import pyro.distributions as dist
import pytest
import torch

from bayeskit.inference._kernel_discrepancy import InverseMultiquadric, RadialBasis
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.generalized.losses._densities import (
    AlphaDivergence,
    BetaDivergence,
    EmpiricalMass,
    GammaDivergence,
    KernelDensity,
)
from bayeskit.inference.generalized.losses._loss import PointwiseLoss
from bayeskit.inference.generalized.losses._mean_discrepancy import (
    GaussianEmbedding,
    MaximumMeanDiscrepancy,
    Simulated,
)
from bayeskit.inference.generalized.losses._scores import (
    DiscreteFisherDivergence,
    KernelSteinDiscrepancy,
    ScoreMatching,
    score_of,
)

REAL = torch.tensor([-1.0, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
COUNTS = torch.tensor([0.0, 1.0, 1.0, 4.0, 2.0], dtype=torch.float64)
PLANE = torch.tensor([[0.1, 1.0], [-1.0, 0.4], [2.0, -0.7], [0.3, 0.2], [1.5, 1.5]], dtype=torch.float64)
BITS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def normal(parameter):
    return dist.Normal(parameter[0], parameter[1].exp())


def normal_plane(parameter):
    return dist.MultivariateNormal(parameter, parameter.new_tensor([[1.0, 0.3], [0.3, 0.8]]))


def poisson(parameter):
    return dist.Poisson((parameter[0] + 0.1 * parameter[1]).exp())


def categorical(parameter):
    return dist.Categorical(
        logits=torch.stack([parameter[0], parameter[1], 0 * parameter[0], parameter[0] ** 2, -parameter[1]])
    )


def normal_density(parameter, x):
    return -(((x - parameter[0]) / parameter[1].exp()) ** 2) / 2


def plane_density(parameter, x):
    return -((x - parameter) ** 2).sum(-1) / 2 - 0.1 * (x**4).sum(-1) - 0.2 * parameter[0] * x[..., 0] * x[..., 1]


def ising(parameter, x):
    return parameter[0] * x.sum(-1) + parameter[1] * x[..., 0] * x[..., 1]


def poisson_mass(parameter, x):
    return x * (parameter[0] + 0.1 * parameter[1]) - torch.lgamma(x + 1)


def robust(x):
    return (1 + x**2) ** -0.5


def robust_plane(x):
    return (1 + (x**2).sum(-1)) ** -0.5


CASES = {
    "beta normal": (BetaDivergence(0.3, normal), REAL),
    "beta plane": (BetaDivergence(0.3, normal_plane), PLANE),
    "beta Poisson": (BetaDivergence(0.3, poisson), COUNTS),
    "beta categorical": (BetaDivergence(0.3, categorical), COUNTS),
    "gamma normal": (GammaDivergence(0.3, normal), REAL),
    "gamma entries": (GammaDivergence(0.3, lambda p: dist.Normal(p, 1.0)), PLANE),
    "alpha Poisson": (AlphaDivergence(0.5, poisson, EmpiricalMass()), COUNTS),
    "alpha normal": (AlphaDivergence(0.4, normal, KernelDensity(0.5)), REAL),
    "Stein": (KernelSteinDiscrepancy(score_of(normal_density)), REAL),
    "Stein weighted": (KernelSteinDiscrepancy(score_of(normal_density), weight=robust), REAL),
    "Stein plane": (KernelSteinDiscrepancy(score_of(plane_density), weight=robust_plane), PLANE),
    "Stein median": (KernelSteinDiscrepancy(score_of(normal_density), RadialBasis()), REAL),
    "mean discrepancy": (MaximumMeanDiscrepancy(GaussianEmbedding(normal), RadialBasis(1.3)), REAL),
    "mean discrepancy plane": (MaximumMeanDiscrepancy(GaussianEmbedding(normal_plane), RadialBasis(1.3)), PLANE),
    "mean discrepancy simulated": (
        MaximumMeanDiscrepancy(
            Simulated(lambda p, noise: p[0] + p[1].exp() * noise, num_draws=20), InverseMultiquadric(1.0)
        ),
        REAL,
    ),
    "score matching": (ScoreMatching(normal_density), REAL),
    "score matching weighted": (ScoreMatching(normal_density, weight=robust), REAL),
    "score matching plane": (ScoreMatching(plane_density), PLANE),
    "Fisher Poisson": (DiscreteFisherDivergence(poisson_mass), COUNTS),
    "Fisher Ising": (DiscreteFisherDivergence(ising, num_states=2), BITS),
}
OWN_SCALE = ("Stein median",)  # the kernel's bandwidth is a median over the data, in which repeated ones count

cases = pytest.mark.parametrize(("loss", "x"), CASES.values(), ids=CASES.keys())


def parameters(count=3):
    generator = torch.Generator().manual_seed(1)
    return 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64)


# torch's forward mode scripts some of its own functions, and warns of that.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@cases
def test_batches_over_parameters_weights_and_data_sets(loss, x):
    generator = torch.Generator().manual_seed(2)
    theta, weights = parameters(), torch.rand(3, len(x), generator=generator, dtype=torch.float64)
    sets = torch.stack([x, x[[1, 1, 0, 2, 4]], x[[4, 3, 2, 1, 0]]])
    loop = torch.stack([loss.total(p, d, w) for p, d, w in zip(theta, sets, weights, strict=True)])
    batched = torch.func.vmap(loss.total)(theta, sets, weights)
    torch.testing.assert_close(batched, loop, rtol=1e-11, atol=1e-11)
    assert loop.unique().numel() == 3
    gradient = torch.func.vmap(torch.func.grad(loss.total))(theta, sets, weights)
    hessian = torch.func.vmap(torch.func.hessian(loss.total))(theta, sets, weights)
    assert gradient.isfinite().all() and hessian.isfinite().all()


@cases
def test_whole_number_weights_are_repeated_data(loss, x):
    theta, counts = parameters(1)[0], torch.tensor([2, 1, 0, 3, 1])
    weighted = loss.total(theta, x, counts.double())
    if loss not in [CASES[name][0] for name in OWN_SCALE]:
        repeated = loss.total(theta, x.repeat_interleave(counts, 0))
        torch.testing.assert_close(weighted, repeated, rtol=1e-11, atol=1e-11)
    doubled = loss.total(theta, x, 2 * counts.double())
    torch.testing.assert_close(doubled, 2 * weighted, rtol=1e-11, atol=1e-11)
    ones = loss.total(theta, x, torch.ones(len(x), dtype=torch.float64))
    torch.testing.assert_close(loss.total(theta, x), ones, rtol=1e-11, atol=1e-11)


@cases
def test_does_not_depend_on_the_order_of_data(loss, x):
    theta, order = parameters(1)[0], torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(loss.total(theta, x[order]), loss.total(theta, x), rtol=1e-11, atol=1e-11)


@cases
def test_gradient_against_finite_differences(loss, x):
    theta, step = parameters(1)[0], 1e-5
    basis = torch.eye(2, dtype=torch.float64)

    def slope(h):
        return torch.stack([(loss.total(theta + h * e, x) - loss.total(theta - h * e, x)) / (2 * h) for e in basis])

    # Richardson's combination is of fourth order, so that rounding, about 1e-16 / step, is what is left.
    differences = (4 * slope(step) - slope(2 * step)) / 3
    scale = 1 + loss.total(theta, x).abs()
    assert ((torch.func.grad(loss.total)(theta, x) - differences).abs() < 1e-9 * scale).all()


@pytest.mark.calibration
@cases
def test_posterior_traces_it(loss, x):
    posterior = GibbsPosterior(dist.Normal(torch.zeros(2), 2.0).to_event(1), loss, x, weight=0.7, compile=False)
    u = parameters()
    value, gradient = posterior.value_and_grad(u)
    for row, v, g in zip(u, value, gradient, strict=True):
        expected = -0.7 * loss.total(row, x) + posterior.log_prior(row)
        torch.testing.assert_close(v, expected, rtol=1e-11, atol=1e-11)
        slope = -0.7 * torch.func.grad(loss.total)(row, x) - row / 4
        torch.testing.assert_close(g, slope, rtol=1e-10, atol=1e-10)


@cases
def test_single_precision(loss, x):
    theta = parameters(1)[0]
    single = loss.total(theta.float(), x.float())
    assert single.dtype == torch.float32
    # A few hundred operations, each of relative error 6e-8, on terms of the size of the loss and of the number of data.
    torch.testing.assert_close(single.double(), loss.total(theta, x), rtol=1e-4, atol=1e-4)


@cases
def test_pointwise_losses_add_up(loss, x):
    if isinstance(loss, PointwiseLoss):
        theta = parameters(1)[0]
        alone = torch.stack([loss.pointwise(theta, x[i : i + 1])[0] for i in range(len(x))])
        torch.testing.assert_close(loss.pointwise(theta, x), alone, rtol=1e-12, atol=1e-12)
        return
    # The others look at pairs of data: their totals are no sums, which is why they are not pointwise.
    theta = parameters(1)[0]
    parts = loss.total(theta, x[:2]) + loss.total(theta, x[2:])
    assert (loss.total(theta, x) - parts).abs() > 1e-3
