"""Every bijection, and every family of priors, against calculus."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions import constraints as pyro_constraints
from target_checks import F64, assert_close, free_coordinates, normal
from torch.distributions import constraints
from torch.distributions.transforms import CatTransform, StackTransform

from bayeskit import Target
from bayeskit._logdensity.transforms import LowerTriangle, bijection, support_of

# (support, shape of one unconstrained event)
SUPPORTS = {
    "real": (constraints.real, ()),
    "real_vector": (constraints.real_vector, (3,)),
    "positive": (constraints.positive, ()),
    "nonnegative": (constraints.nonnegative, ()),
    "greater_than": (constraints.greater_than(1.5), ()),
    "greater_than_eq": (constraints.greater_than_eq(-0.5), ()),
    "less_than": (constraints.less_than(0.7), ()),
    "interval": (constraints.interval(-1.0, 2.5), ()),
    "half_open_interval": (constraints.half_open_interval(0.5, 0.75), ()),
    "unit_interval": (constraints.unit_interval, ()),
    "interval of a batch": (
        constraints.interval(torch.zeros(3, dtype=F64), torch.arange(1.0, 4.0, dtype=F64)),
        (3,),
    ),
    "independent": (constraints.independent(constraints.positive, 2), (2, 3)),
    "simplex": (constraints.simplex, (3,)),
    "independent simplex": (constraints.independent(constraints.simplex, 1), (4, 2)),
    "ordered_vector": (pyro_constraints.ordered_vector, (4,)),
    "positive_ordered_vector": (pyro_constraints.positive_ordered_vector, (4,)),
    "softplus_positive": (pyro_constraints.softplus_positive, ()),
    "lower_cholesky": (constraints.lower_cholesky, (6,)),
    "positive_definite": (constraints.positive_definite, (6,)),
    "positive_semidefinite": (constraints.positive_semidefinite, (6,)),
    "lower_triangular": (constraints.lower_triangular, (6,)),
    "unit_lower_cholesky": (pyro_constraints.unit_lower_cholesky, (6,)),
    "corr_cholesky": (constraints.corr_cholesky, (6,)),
    "corr_matrix": (pyro_constraints.corr_matrix, (6,)),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_bijection(name):
    support, shape = SUPPORTS[name]
    transform = bijection(support)
    x = normal(*shape, seed=2)
    y = transform(x)
    assert support.check(y).all()
    assert tuple(transform.inverse_shape(y.shape)) == tuple(shape)
    assert transform.forward_shape(x.shape) == y.shape
    assert_close(transform.inv(y), x)

    matrix = torch.autograd.functional.jacobian(
        lambda v: free_coordinates(transform(v.reshape(shape)), v.numel()), x.reshape(-1)
    )
    assert_close(transform.log_abs_det_jacobian(x, y).sum(), torch.linalg.slogdet(matrix).logabsdet)
    # A batch, vectorised and as one call, is its parts.
    batch = normal(5, *shape, seed=3)
    assert_close(torch.func.vmap(transform)(batch), torch.stack([transform(v) for v in batch]))
    assert_close(transform(batch)[2], transform(batch[2]))


def test_bijections_of_joined_supports():
    pair = [constraints.positive, constraints.unit_interval]
    for joined, kind in ((constraints.stack(pair), StackTransform), (constraints.cat(pair), CatTransform)):
        transform = bijection(joined)
        assert isinstance(transform, kind)
        x = normal(2, seed=4)
        y = transform(x)
        assert_close(transform.inv(y), x)
        matrix = torch.autograd.functional.jacobian(transform, x)
        assert_close(transform.log_abs_det_jacobian(x, y).sum(), torch.linalg.slogdet(matrix).logabsdet)


def test_lower_triangles_compare_by_kind():
    assert LowerTriangle("exp") == LowerTriangle("exp")
    assert LowerTriangle("exp") != LowerTriangle("free")
    assert LowerTriangle("exp") != LowerTriangle("exp", square=True)


# -- priors integrate to one ------------------------------------------------------------------------------


def prior_target(make) -> Target:
    data = torch.zeros(2, dtype=F64)

    def model(y):
        pyro.sample("x", make())
        pyro.sample("y", dist.Normal(0.0, 1.0).expand([2]).to_event(1), obs=y)

    return Target.from_pyro(model, data, compile=False)


def mixture(components):
    return dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.3, 0.7])), components)


ONE_DIMENSION = {
    "Normal": lambda: dist.Normal(0.3, 2.0),
    "StudentT": lambda: dist.StudentT(3.0, 0.5, 1.2),
    "Logistic": lambda: dist.Logistic(0.5, 1.2),
    "Gumbel": lambda: dist.Gumbel(0.5, 1.2),
    "Gamma": lambda: dist.Gamma(1.7, 0.4),
    "InverseGamma": lambda: dist.InverseGamma(2.0, 1.5),
    "LogNormal": lambda: dist.LogNormal(0.4, 0.7),
    "Exponential": lambda: dist.Exponential(2.0),
    "HalfNormal": lambda: dist.HalfNormal(2.0),
    "HalfCauchy": lambda: dist.HalfCauchy(2.0),
    "Weibull": lambda: dist.Weibull(1.3, 2.0),
    "Chi2": lambda: dist.Chi2(3.0),
    "Pareto": lambda: dist.Pareto(1.5, 2.5),
    "Beta": lambda: dist.Beta(2.0, 1.3),
    "Kumaraswamy": lambda: dist.Kumaraswamy(1.5, 1.3),
    "Uniform": lambda: dist.Uniform(-1.0, 3.0),
    "VonMises": lambda: dist.VonMises(2.5, 1.3),
    "mixture on the line": lambda: mixture(dist.Normal(torch.tensor([-2.0, 1.0]), torch.tensor([1.0, 0.5]))),
    "mixture above zero": lambda: mixture(dist.LogNormal(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 0.5]))),
    "mixture between bounds": lambda: mixture(dist.Uniform(torch.tensor([-1.0, -1.0]), torch.tensor([3.0, 3.0]))),
    "mixture of mixtures": lambda: mixture(
        dist.MixtureSameFamily(dist.Categorical(torch.ones(2, 2)), dist.LogNormal(torch.zeros(2, 2), torch.ones(2, 2)))
    ),
    "mixture of angles": lambda: mixture(dist.VonMises(torch.tensor([-2.0, 1.0]), torch.tensor([1.3, 1.3]))),
    "RelaxedBernoulli": lambda: dist.RelaxedBernoulli(torch.tensor(0.7), 0.4),
    "ContinuousBernoulli": lambda: dist.ContinuousBernoulli(0.2),
    "power": lambda: dist.TransformedDistribution(
        dist.Gamma(2.0, 1.0), dist.transforms.PowerTransform(torch.tensor(0.5))
    ),
    "Dirichlet of two": lambda: dist.Dirichlet(torch.tensor([1.5, 2.5])),
    "LKJCholesky of two": lambda: dist.LKJCholesky(2, 1.7),
    "LKJ of two": lambda: dist.LKJ(2, 1.7),
    "Wishart of one": lambda: dist.Wishart(torch.tensor(3.0), torch.eye(1)),
}


def sinh_grid(limit: float, step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return trapezoid nodes and log weights for the whole line under ``u = sinh(t)``."""
    t = torch.arange(-limit, limit + step / 2, step, dtype=F64)
    return t.sinh(), t.cosh().log() + math.log(step)


@pytest.mark.filterwarnings("ignore:Singular sample:UserWarning")
@pytest.mark.parametrize("name", ONE_DIMENSION)
def test_prior_of_one_coordinate_integrates_to_one(name):
    target = prior_target(ONE_DIMENSION[name])
    assert target.dim == 1
    heavy = name == "StudentT"  # density u^-4: the tail past e^24 is below rounding
    u, log_weight = sinh_grid(24.0 if heavy else 5.0, 1 / 64)
    assert_close(((target.log_prior(u.unsqueeze(-1)) + log_weight).exp()).sum().item(), 1.0, 1e-9)


class Triangle(TorchDistribution):
    """A matrix with independent entries: standard normal, or half-normal where they must be positive."""

    arg_constraints: dict = {}

    def __init__(self, kind):
        super().__init__(torch.Size(), torch.Size((2, 2)), validate_args=False)
        self.kind = kind

    @property
    def support(self):
        return self.kind

    def sample(self, sample_shape=()):
        return bijection(self.kind)(torch.zeros(*sample_shape, 1 if self.unit else 3))

    @property
    def unit(self):
        return self.kind is pyro_constraints.unit_lower_cholesky

    def log_prob(self, value):
        below = dist.Normal(0.0, 1.0).log_prob(value[..., 1, 0])
        if self.unit:
            return below
        diagonal = dist.Normal(0.0, 1.0) if self.kind is constraints.lower_triangular else dist.HalfNormal(1.0)
        return below + diagonal.log_prob(value[..., 0, 0]) + diagonal.log_prob(value[..., 1, 1])


def ordered(transform):
    return dist.TransformedDistribution(dist.Normal(torch.zeros(2), 1.0).to_event(1), transform)


SEVERAL_DIMENSIONS = {
    "Dirichlet": lambda: dist.Dirichlet(torch.tensor([1.5, 2.5, 1.2])),
    "MultivariateNormal": lambda: dist.MultivariateNormal(torch.ones(2), torch.tensor([[2.0, 0.6], [0.6, 1.0]])),
    "independent": lambda: dist.Gamma(torch.tensor([1.5, 2.0]), 1.0).to_event(1),
    "ordered": lambda: ordered(dist.transforms.OrderedTransform()),
    "Wishart": lambda: dist.Wishart(torch.tensor(4.0), torch.tensor([[1.0, 0.3], [0.3, 0.8]])),
    "LKJCholesky": lambda: dist.LKJCholesky(3, 1.5),
    "LKJ": lambda: dist.LKJ(3, 1.5),
    "lower_cholesky": lambda: Triangle(constraints.lower_cholesky),
    "softplus_lower_cholesky": lambda: Triangle(pyro_constraints.softplus_lower_cholesky),
    "lower_triangular": lambda: Triangle(constraints.lower_triangular),
    "unit_lower_cholesky": lambda: Triangle(pyro_constraints.unit_lower_cholesky),
    "mixture of two": lambda: mixture(dist.Gamma(torch.tensor([[1.5, 2.0], [3.0, 1.0]]), 1.0).to_event(1)),
    "mixtures side by side": lambda: mixture(dist.Normal(torch.tensor([-2.0, 1.0]), 1.0)).expand([2]).to_event(1),
    "SineBivariateVonMises": lambda: dist.SineBivariateVonMises(0.5, -1.0, 2.0, 1.0, 0.3),
}


@pytest.mark.filterwarnings("ignore:Singular sample:UserWarning")  # torch's check has its sign wrong
@pytest.mark.filterwarnings("ignore:the density cannot be traced")  # a normaliser that branches on values
@pytest.mark.parametrize("name", [n for n in SEVERAL_DIMENSIONS if n != "LKJ"])
def test_prior_of_several_coordinates_integrates_to_one(name):
    target = prior_target(SEVERAL_DIMENSIONS[name])
    u, log_weight = sinh_grid(3.6, 1 / 8)
    grid = torch.cartesian_prod(*[u] * target.dim).reshape(-1, target.dim)
    weight = torch.cartesian_prod(*[log_weight] * target.dim).reshape(len(grid), -1).sum(-1)
    integral = sum(
        (target.log_prior(g) + w).exp().sum() for g, w in zip(grid.split(50_000), weight.split(50_000), strict=True)
    )
    assert_close(float(integral), 1.0, 1e-6)


def test_correlation_matrices_and_their_factors_have_one_density():
    # A factor's coordinates are the same, so both densities over them must be.
    matrix, factor = prior_target(SEVERAL_DIMENSIONS["LKJ"]), prior_target(SEVERAL_DIMENSIONS["LKJCholesky"])
    u = normal(30, 3, seed=5)
    assert_close(matrix.log_prior(u), factor.log_prior(u))


@pytest.mark.filterwarnings("ignore:Singular sample:UserWarning")
@pytest.mark.parametrize("make", [*ONE_DIMENSION.values(), *SEVERAL_DIMENSIONS.values()])
def test_prior_draws_are_in_the_support(make):
    target = prior_target(make)
    u = target.sample_prior(20, seed=1)
    assert u.shape == (20, target.dim) and u.isfinite().all() and target.log_prior(u).isfinite().all()


def test_the_support_of_a_mixture_holds_all_components():
    low, high = torch.tensor([[0.0, 1.0], [-1.0, -2.0]]), torch.tensor([[2.0, 3.0], [0.0, 0.5]])
    bounds = support_of(mixture(dist.Uniform(low, high).to_event(0)))
    assert bounds.lower_bound.tolist() == [0.0, -2.0] and bounds.upper_bound.tolist() == [3.0, 0.5]
    # Of two components with events of two numbers.
    inner = support_of(mixture(dist.Uniform(low, high).to_event(1))).base_constraint
    assert inner.lower_bound.tolist() == [-1.0, -2.0] and inner.upper_bound.tolist() == [2.0, 3.0]
