"""Maxima of likelihood and posterior: inside, at an edge, at infinity, and where there is none."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import gamma

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import DrawsError, InitializationError, ShapeError
from bayeskit.inference.evidence._laplace_approximation import maximum_likelihood, maximum_posterior
from bayeskit.inference.evidence._modes import find_mode, likelihood, posterior, posterior_of_values
from bayeskit.models.phylogenetics import TreeModel, primates

DOUBLE = torch.float64
BOTH = (maximum_likelihood, maximum_posterior)


def double(x):
    return torch.tensor(x, dtype=DOUBLE)


def read(model, *args):
    return bk.Target.from_pyro(model, *args, compile=False)


def counted(count, shape, rate):
    x = pyro.sample("x", dist.Gamma(shape, rate).to_event(1))
    pyro.sample("count", dist.Poisson(x).to_event(1), obs=count)


def proportions(counts, concentration):
    p = pyro.sample("p", dist.Dirichlet(concentration))
    pyro.sample("counts", dist.Multinomial(int(counts.sum()), p), obs=counts)


def separated(x, y):
    slope = pyro.sample("slope", dist.Normal(double(0.0), 3.0))
    pyro.sample("y", dist.Bernoulli(logits=slope * x).to_event(1), obs=y)


def normal_of_unknown_scale(y):
    mean = pyro.sample("mean", dist.Normal(double(0.0), 10.0))
    scale = pyro.sample("scale", dist.HalfNormal(double(5.0)))
    pyro.sample("y", dist.Normal(mean, scale).expand(y.shape).to_event(1), obs=y)


def test_rates_of_counts():
    count, shape, rate = double([3.0, 7.0]), double([2.0, 1.5]), double([1.0, 0.5])
    target = read(counted, count, shape, rate)
    poisson = dist.Poisson(count).log_prob(count).sum()
    assert abs(maximum_likelihood(target).log_evidence - float(poisson)) < 1e-9
    x = (shape + count - 1) / (rate + 1)
    wanted = dist.Gamma(shape, rate).log_prob(x).sum() + dist.Poisson(x).log_prob(count).sum()
    assert abs(maximum_posterior(target).log_evidence - float(wanted)) < 1e-9


def test_a_rate_that_is_largest_at_zero():
    """No counts and an exponential prior: the density is largest where the logarithm is minus infinity."""
    target = read(counted, double([0.0, 4.0]), double([1.0, 1.0]), double([2.0, 2.0]))
    z = maximum_posterior(target)
    x = 4 / 3
    wanted = 2 * math.log(2.0) - 2 * x + 4 * math.log(x) - x - math.lgamma(5.0)
    assert abs(z.log_evidence - wanted) < 1e-5 and len(z.warnings) == 1
    z = maximum_likelihood(target)
    assert abs(z.log_evidence - (4 * math.log(4.0) - 4 - math.lgamma(5.0))) < 1e-5 and len(z.warnings) == 1


def test_a_likelihood_that_is_largest_at_infinity():
    """Separated classes: the likelihood tends to one as the slope grows."""
    x, y = double([-2.0, -1.0, 1.0, 2.0]), double([0.0, 0.0, 1.0, 1.0])
    z = maximum_likelihood(read(separated, x, y))
    assert abs(z.log_evidence) < 1e-3
    assert maximum_posterior(read(separated, x, y)).log_evidence < -1


@pytest.mark.calibration
def test_proportions_with_an_edge():
    """A simplex counts by all entries but the last; one proportion is largest at zero."""
    counts, concentration = double([4.0, 0.0, 6.0]), double([2.0, 1.0, 1.0])
    target = read(proportions, counts, concentration)
    coefficient = math.lgamma(11.0) - math.lgamma(5.0) - math.lgamma(7.0)
    wanted = coefficient + 4 * math.log(0.4) + 6 * math.log(0.6)
    assert abs(maximum_likelihood(target).log_evidence - wanted) < 1e-5
    wanted = coefficient + math.log(6.0) + 5 * math.log(5 / 11) + 6 * math.log(6 / 11)
    assert abs(maximum_posterior(target).log_evidence - wanted) < 1e-5


@pytest.mark.calibration
@pytest.mark.parametrize("estimator", BOTH)
def test_a_density_without_bound_is_named(estimator):
    """One observation, of unknown mean and scale: the smaller the scale, the larger the density."""
    z = estimator(read(normal_of_unknown_scale, double([0.7])))
    assert len(z.warnings) == 2 and "in scale" in z.warnings[1] and "unbounded" in z.warnings[1]
    assert len(estimator(read(normal_of_unknown_scale, double([0.7, 1.5]))).warnings) == 1


@pytest.mark.calibration
def test_a_pole_at_zero_is_named():
    z = maximum_posterior(read(counted, double([0.0]), double([0.5]), double([1.0])))
    assert len(z.warnings) == 2 and "in x[0]" in z.warnings[1]


@pytest.mark.parametrize("estimator", BOTH)
def test_never_trusted(estimator):
    z = estimator(exact.get("beta_binomial").target())
    assert math.isnan(z.standard_error) and not z.trusted and "a maximum and not an integral" in z.warnings[0]
    assert z.method == estimator.__name__ and z.num_evaluations > 0


@pytest.mark.calibration
def test_primates():
    """The published maximum of the posterior; the likelihood there is -6424.29, so its maximum is higher."""
    target = bk.Target.from_pyro(TreeModel(*primates()), compile=False)
    mode = find_mode(target)
    z = maximum_posterior(target, mode=mode)
    assert abs(z.log_evidence + 6390.0879) < 1e-4 and len(z.warnings) == 1
    z = maximum_likelihood(target, mode=mode)
    assert -6424.2947 < z.log_evidence < -6424.2 and len(z.warnings) == 1


def test_linear_regression():
    """Least squares, and the ridge that is its posterior."""
    case = exact.get("linreg10")
    x, y = case.args[0], case.args[1]
    target = case.target()
    z = maximum_likelihood(target)
    best = target.evaluate(target.unconstrain({target.sites[0].name: torch.linalg.lstsq(x, y).solution}))[1]
    assert abs(z.log_evidence - float(best)) < 1e-9
    posterior_mean = target.unconstrain({name: value for name, value in case.posterior_mean.items()})
    assert abs(maximum_posterior(target).log_evidence - float(target.log_density(posterior_mean))) < 1e-9


def test_the_representation_does_not_matter():
    """Ten times the units: densities are divided by ten for each value, likelihoods stay."""

    def scaled(count, unit):
        x = pyro.sample("x", dist.Gamma(double(3.0), 2.0 / unit))
        pyro.sample("count", dist.Poisson(x / unit), obs=count)

    one, ten = read(scaled, double(4.0), double(1.0)), read(scaled, double(4.0), double(10.0))
    difference = maximum_posterior(one).log_evidence - maximum_posterior(ten).log_evidence
    assert abs(difference - math.log(10.0)) < 1e-9
    assert abs(maximum_likelihood(one).log_evidence - maximum_likelihood(ten).log_evidence) < 1e-9


def test_functions_have_no_jacobian():
    target = bk.Target.from_functions(
        lambda u: -0.5 * (u**2).sum(-1) - math.log(2 * math.pi), lambda u: -2 * (u - 3.0).square().sum(-1), dim=2
    )
    assert abs(maximum_likelihood(target).log_evidence) < 1e-9
    wanted = -math.log(2 * math.pi) - 2 * (0.5 * 2.4**2 + 2 * 0.6**2)
    assert abs(maximum_posterior(target).log_evidence - wanted) < 1e-9


@pytest.mark.parametrize("objective_of", [posterior, posterior_of_values, likelihood])
def test_gradients_are_those_of_the_value(objective_of):
    objective = objective_of(read(counted, double([3.0, 0.0]), double([2.0, 1.5]), double([1.0, 0.5])))
    u = double([[0.3, -1.2], [1.1, 0.4], [-0.2, 0.7]])
    value, gradient = objective.value_and_gradient(u)
    assert torch.allclose(value, objective.value(u), atol=1e-12, rtol=0)
    for i in range(2):
        step = torch.zeros(2, dtype=DOUBLE)
        step[i] = 1e-5
        slope = (objective.value(u + step) - objective.value(u - step)) / 2e-5
        assert torch.allclose(gradient[:, i], slope, atol=1e-8, rtol=0)


def test_a_jacobian_left_in_is_noticed(monkeypatch):
    monkeypatch.setattr(bk.Target, "log_jacobian", lambda self, u: u.new_zeros(u.shape[:-1]))
    count, shape, rate = double([3.0]), double([2.0]), double([1.0])
    wanted = gamma.logpdf(2.0, 2.0) + float(dist.Poisson(double(2.0)).log_prob(count).sum())
    assert abs(maximum_posterior(read(counted, count, shape, rate)).log_evidence - wanted) > 0.1


@pytest.mark.parametrize("estimator", BOTH)
def test_single_precision(estimator):
    args = (double([3.0, 7.0]), double([2.0, 1.5]), double([1.0, 0.5]))
    wanted = estimator(read(counted, *args)).log_evidence
    z = estimator(read(counted, *(a.float() for a in args)))
    assert abs(z.log_evidence - wanted) < 1e-4 and len(z.warnings) == 1


@pytest.mark.calibration
@pytest.mark.parametrize("estimator", BOTH)
def test_draws_and_modes_of_another_target_are_refused(estimator):
    case = exact.get("beta_binomial")
    target = case.target()
    draws = bk.sample(target, 2, 50, 20, seed=0, progress=False)
    assert estimator(target, draws=draws).num_evaluations > draws.num_gradients
    other = exact.get("three_taxon_tree").target()
    with pytest.raises(DrawsError, match="dimension"):
        estimator(other, draws=draws)
    with pytest.raises(ShapeError, match="dimension"):
        estimator(other, mode=find_mode(target))


@pytest.mark.parametrize("estimator", BOTH)
def test_a_likelihood_of_zero_is_refused(estimator):
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: torch.full_like(u[..., 0], -math.inf),
        dim=1,
    )
    with pytest.raises(InitializationError):
        estimator(target)
