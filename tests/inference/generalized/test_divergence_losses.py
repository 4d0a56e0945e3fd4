"""Beta-, gamma- and alpha-divergence: integrals in closed form, published posteriors, limits, outliers."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad

from bayeskit.errors import DataError, ImproperPosteriorError, ModelError, SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior
from bayeskit.inference.generalized.losses._densities import (
    AlphaDivergence,
    BetaDivergence,
    EmpiricalMass,
    GammaDivergence,
    KernelDensity,
    log_power_integral,
)

OUTLIER = torch.tensor([-1.0, 0.0, 0.5, 1.0, 10.0], dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def location(mean):
    return dist.Normal(mean, 1.0)


def moments(loss, x, low, high, prior_scale=10.0, count=40_001):
    """Mean and standard deviation of a posterior on a line, by the trapezoidal rule."""
    grid = torch.linspace(low, high, count, dtype=torch.float64)
    log_density = -torch.func.vmap(lambda mean: loss.total(mean, x))(grid) - (grid / prior_scale) ** 2 / 2
    mass = log_density.softmax(0)
    mean = (mass * grid).sum()
    return mean.item(), (mass * (grid - mean) ** 2).sum().sqrt().item()


# -- integrals of powers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "low"),
    [
        (dist.Normal(scalar(0.3), scalar(1.7)), -math.inf),
        (dist.Laplace(scalar(-0.2), scalar(0.6)), -math.inf),
        (dist.Exponential(scalar(2.5)), 0.0),
    ],
    ids=["Normal", "Laplace", "Exponential"],
)
@pytest.mark.parametrize("power", [0.7, 1.0, 1.3, 2.0])
def test_continuous_integrals_against_quadrature(law, low, power):
    middle = float(law.mean)

    def density(x):
        return float(law.log_prob(scalar(x)).mul(power).exp())

    expected = sum(quad(density, a, b, epsabs=1e-13)[0] for a, b in ((low, middle), (middle, math.inf)))
    assert abs(log_power_integral(law, power).exp().item() - expected) < 1e-10


def test_several_dimensions_against_one_and_quadrature():
    means, scales = double(0.0, 1.0, -2.0), double(0.5, 1.0, 3.0)
    each = log_power_integral(dist.Normal(means, scales), 1.4)
    apart = log_power_integral(dist.Normal(means, scales).to_event(1), 1.4)
    joint = log_power_integral(dist.MultivariateNormal(means, scales.square().diag()), 1.4)
    assert each.shape == (3,) and apart.shape == joint.shape == ()
    torch.testing.assert_close(apart, each.sum(), rtol=1e-13, atol=0)
    torch.testing.assert_close(joint, apart, rtol=1e-13, atol=0)
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
    law = dist.MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance)
    axis = torch.linspace(-9, 9, 361, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    numeric = (1.4 * law.log_prob(grid)).exp().sum() * 0.05**2
    torch.testing.assert_close(log_power_integral(law, 1.4).exp(), numeric, rtol=1e-10, atol=0)


@pytest.mark.parametrize("power", [0.7, 1.0, 1.3, 2.0])
def test_discrete_integrals_are_sums(power):
    logits = double(0.3, -1.0, 2.0)
    shares = logits.softmax(0)
    for law in (dist.Categorical(logits=logits), dist.OneHotCategorical(logits=logits)):
        torch.testing.assert_close(log_power_integral(law, power).exp(), (shares**power).sum(), rtol=1e-13, atol=0)
    coin = log_power_integral(dist.Bernoulli(scalar(0.2)), power).exp()
    torch.testing.assert_close(coin, (double(0.2, 0.8) ** power).sum(), rtol=1e-13, atol=0)
    for rate in (0.01, 3.0, 35.0, 36.0, 300.0, 5000.0, 1e6):
        law = dist.Poisson(scalar(rate))
        width = 40 * math.sqrt(rate / min(power, 1.0)) + 100
        counts = torch.arange(max(0, math.floor(rate - width)), rate + width, dtype=torch.float64)
        every = (power * law.log_prob(counts)).logsumexp(0)
        # Log masses near 1e6 log(1e6) - log(1e6!) cancel to a relative 1e-16 of 1e7.
        torch.testing.assert_close(log_power_integral(law, power), every, rtol=0, atol=1e-11 + 1e-14 * rate)


def test_families_without_an_integral_are_named_and_may_bring_their_own():
    def cauchy(mean):
        return dist.Cauchy(mean, 1.0)

    x, zero = double(0.0, 1.0), scalar(0.0)
    with pytest.raises(ModelError, match=r"Cauchy is not known; pass power_integral="):
        BetaDivergence(1.0, cauchy).total(zero, x)

    def square(law, power):
        assert power == 2.0
        return 1 / (2 * math.pi * law.scale)

    # 1 / (1 + x^2) / pi at 0 and 1, and the integral of its square, 1 / (2 pi).
    expected = double(-1.0, -0.5) / math.pi + 0.5 / (2 * math.pi)
    torch.testing.assert_close(BetaDivergence(1.0, cauchy, square).pointwise(zero, x), expected, rtol=1e-13, atol=0)
    expected = double(-1.0, -0.5) / math.pi * (2 * math.pi) ** 0.5
    torch.testing.assert_close(GammaDivergence(1.0, cauchy, square).pointwise(zero, x), expected, rtol=1e-13, atol=0)


# -- posteriors ---------------------------------------------------------------------------------------------


def test_posterior_of_the_beta_divergence():
    # Exact for N(theta, 1), prior N(0, sd 10); beta -> 0 is the ordinary posterior, N(10.5 / 5.01, 1 / 5.01).
    mean, sd = moments(BetaDivergence(1e-7, location), OUTLIER, -60, 60)
    assert abs(mean - 10.5 / 5.01) < 1e-4 and abs(sd - 5.01**-0.5) < 1e-4
    assert abs(mean - 2.0958) < 1e-4 and abs(sd - 0.4468) < 1e-4
    mean, sd = moments(BetaDivergence(0.1, location), OUTLIER, -60, 60)
    assert abs(mean - 0.1578) < 5e-5 and abs(sd - 0.5631) < 5e-5
    # At .5 the loss is so flat that the prior shows: over the whole line, and cut to [-5, 12].
    mean, sd = moments(BetaDivergence(0.5, location), OUTLIER, -5, 12)
    assert abs(mean - 0.5569) < 5e-5 and abs(sd - 2.1880) < 5e-5
    mean, sd = moments(BetaDivergence(0.5, location), OUTLIER, -90, 90)
    assert abs(mean - 0.3465) < 5e-5 and abs(sd - 3.8703) < 5e-5


# Newcomb's measurements of the speed of light of 1882, in 24.8 microseconds plus so many nanoseconds.
NEWCOMB = (
    "28 26 33 24 34 -44 27 16 40 -2 29 22 24 21 25 30 23 29 31 19 24 20 36 32 36 28 25 21 28 29 37 25 28 26 30 32 36 "
    "26 30 22 36 23 27 27 28 27 31 27 26 33 26 32 32 24 39 28 24 25 32 25 29 27 28 29 16 23"
)


@pytest.mark.parametrize(("beta", "mean", "sd"), [(0.1, 27.617, 0.767), (0.3, 27.619, 1.121)])
def test_speed_of_light(beta, mean, sd):
    x = torch.tensor([float(a) for a in NEWCOMB.split()], dtype=torch.float64)
    assert len(x) == 66 and x.min() == -44 and x.median() == 27 and abs(x.mean() - 26.2121) < 5e-5
    # The prior N(25, sd 100), moved to the origin.
    found = moments(BetaDivergence(beta, lambda m: dist.Normal(m, 5.0)), x - 25, -60, 60, prior_scale=100.0)
    assert abs(found[0] + 25 - mean) < 5.5e-4 and abs(found[1] - sd) < 5.5e-4


def test_other_conventions_miss_these_numbers():
    class Scaled(BetaDivergence):
        def pointwise(self, parameter, data):  # -(1 + 1/beta) p^beta + integral
            return (1 + self.beta) * super().pointwise(parameter, data)

    _, sd = moments(Scaled(0.1, location), OUTLIER, -60, 60)
    assert abs(sd - 0.5631) > 0.02


def test_losses_against_their_formula_at_normal_laws():
    theta, x, s = double(0.3, 1.2), double(-1.0, 4.0), 1.3

    def law(p):
        return dist.Normal(p[0], p[1])

    density = np.exp(-(((x.numpy() - 0.3) / 1.2) ** 2) / 2) / (1.2 * np.sqrt(2 * np.pi))
    integral = quad(lambda y: (math.exp(-(((y - 0.3) / 1.2) ** 2) / 2) / (1.2 * math.sqrt(2 * math.pi))) ** s, -15, 15)[
        0
    ]
    beta = -(density**0.3) / 0.3 + integral / 1.3
    gamma = -(density**0.3) / 0.3 * integral ** (-0.3 / 1.3)
    assert np.abs(BetaDivergence(0.3, law).pointwise(theta, x).numpy() - beta).max() < 1e-12
    assert np.abs(GammaDivergence(0.3, law).pointwise(theta, x).numpy() - gamma).max() < 1e-12


@pytest.mark.parametrize("family", [BetaDivergence, GammaDivergence])
def test_gradient_becomes_that_of_the_likelihood(family):
    theta = double(0.3, 0.2)

    def law(p):
        return dist.Normal(p[0], p[1].exp())

    likelihood = torch.func.grad(lambda p: -law(p).log_prob(OUTLIER).sum())(theta)
    errors = [
        (torch.func.grad(lambda p, h=h: family(h, law).total(p, OUTLIER))(theta) - likelihood).abs().max()
        for h in (1e-3, 1e-4)
    ]
    assert errors[0] < 2.0 and abs(errors[0] / errors[1] - 10) < 1  # of first order


def test_gamma_loss_ignores_a_factor_and_minimises_the_cross_entropy():
    x, theta = OUTLIER, double(0.3, 0.2)

    def law(p):
        return dist.Normal(p[0], p[1].exp())

    class Doubled(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) + math.log(2.0)

    doubled = GammaDivergence(
        0.4, lambda p: Doubled(p[0], p[1].exp()), lambda d, s: 2**s * log_power_integral(d, s).exp()
    )
    plain = GammaDivergence(0.4, law)
    torch.testing.assert_close(doubled.total(theta, x), plain.total(theta, x), rtol=1e-13, atol=0)
    # Without the norm of the density the factor shows.
    bare = [GammaDivergence(0.4, loss.distribution, lambda d, s: torch.ones_like(d.mean)) for loss in (doubled, plain)]
    assert (bare[0].total(theta, x) / bare[1].total(theta, x) - 2**0.4).abs() < 1e-12

    def cross_entropy(p):  # -log mean p^g / g + log integral p^(1+g) / (1+g)
        power = (0.4 * law(p).log_prob(x)).logsumexp(0) - math.log(len(x))
        return -power / 0.4 + log_power_integral(law(p), 1.4) / 1.4

    # Monotone in one another: gradients are parallel, with a factor of n exp(-gamma * cross entropy).
    a, b = torch.func.grad(plain.total)(theta, x), torch.func.grad(cross_entropy)(theta)
    factor = len(x) * (-0.4 * cross_entropy(theta)).exp()
    torch.testing.assert_close(a, factor * b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("family", [BetaDivergence, GammaDivergence])
def test_outliers_stop_to_matter(family):
    grid = torch.linspace(-20, 20, 4001, dtype=torch.float64)

    def minimiser(loss, far):
        x = torch.cat([OUTLIER[:4], double(far)])
        return grid[torch.func.vmap(lambda mean: loss.total(mean, x))(grid).argmin()].item()

    robust = [minimiser(family(0.3, location), far) for far in (10.0, 100.0, 1000.0)]
    clean = grid[torch.func.vmap(lambda m: family(0.3, location).total(m, OUTLIER[:4]))(grid).argmin()].item()
    assert max(abs(m - clean) for m in robust) < 0.011  # the grid's spacing
    assert abs(minimiser(family(1e-3, location), 50.0) - clean) > 1


def test_regression_takes_covariates():
    x, y = double(0.0, 1.0, 2.0), double(0.1, 1.2, 30.0)
    loss = BetaDivergence(0.5, lambda p, x: dist.Normal(p[0] + p[1] * x, 1.0))
    each = loss.pointwise(double(0.0, 1.0), (x, y))
    alone = BetaDivergence(0.5, location).pointwise(scalar(0.0), y - x)
    torch.testing.assert_close(each, alone, rtol=1e-13, atol=0)
    posterior = GibbsPosterior(dist.Normal(torch.zeros(2), 3.0).to_event(1), loss, (x, y))
    assert posterior.log_likelihood(double(0.0, 1.0)).item() == pytest.approx(-each.sum().item(), rel=1e-12)


# -- the alpha-divergence -----------------------------------------------------------------------------------


def test_alpha_divergence_is_what_it_says():
    counts, theta = double(0, 1, 1, 2, 7), scalar(1.4)
    values, share = double(0, 1, 2, 7), double(0.2, 0.4, 0.2, 0.2)
    for alpha in (0.1, 0.5, 0.9):
        affinity = (share**alpha * dist.Poisson(theta).log_prob(values).mul(1 - alpha).exp()).sum()
        expected = 5 * (1 - affinity) / (alpha * (1 - alpha))
        found = AlphaDivergence(alpha, dist.Poisson, EmpiricalMass()).total(theta, counts)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    # alpha = 1/2: 2 n times the squared Hellinger distance, over all counts.
    every = torch.arange(60, dtype=torch.float64)
    mass = torch.zeros(60, dtype=torch.float64)
    mass[values.long()] = share
    hellinger = (mass.sqrt() - dist.Poisson(theta).log_prob(every).exp().sqrt()).square().sum()
    found = AlphaDivergence(0.5, dist.Poisson, EmpiricalMass()).total(theta, counts)
    torch.testing.assert_close(found, 2 * 5 * hellinger, rtol=1e-12, atol=0)
    # alpha -> 1: the Kullback-Leibler divergence.
    divergence = 5 * (share * (share.log() - dist.Poisson(theta).log_prob(values))).sum()
    near = AlphaDivergence(1 - 1e-6, dist.Poisson, EmpiricalMass()).total(theta, counts)
    assert (near - divergence).abs() < 1e-4


def test_alpha_divergence_of_a_smoothed_estimate_against_quadrature():
    x, h = double(-1.0, 0.0, 0.5, 1.0), 0.6
    grid = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    smooth = dist.Normal(x, h).log_prob(grid[:, None]).logsumexp(1) - math.log(4)
    for mean in (0.0, 1.5):
        affinity = (0.5 * smooth + 0.5 * location(scalar(mean)).log_prob(grid)).exp().sum() * 1e-3
        expected = 4 * (1 - affinity) / 0.25
        errors = [
            (AlphaDivergence(0.5, location, KernelDensity(h, k)).total(scalar(mean), x) - expected).abs().item()
            for k in (2, 8, 24)
        ]
        assert errors[2] < 1e-6 and errors[2] < errors[1] < errors[0] < 0.5


def test_weightless_outliers_leave_a_smoothed_estimate_finite():
    x, weights = double(0.0, 1.0, 1000.0), double(1.0, 1.0, 0.0)
    loss = AlphaDivergence(0.5, location, KernelDensity(0.3))
    value, gradient = torch.func.grad_and_value(loss.total)(scalar(0.2), x, weights)[::-1]
    torch.testing.assert_close(value, loss.total(scalar(0.2), x[:2]), rtol=1e-12, atol=0)
    assert gradient.isfinite()


def test_hellinger_resists_an_outlier():
    grid = torch.linspace(0.05, 12, 2400, dtype=torch.float64)
    x = double(0, 1, 1, 2, 2, 1, 0, 3, 50)
    loss = AlphaDivergence(0.5, dist.Poisson, EmpiricalMass())
    best = grid[torch.func.vmap(lambda rate: loss.total(rate, x))(grid).argmin()]
    assert best < 1.6 and x.mean() > 6


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [BetaDivergence(0.5, location), GammaDivergence(0.5, location), AlphaDivergence(0.5, location, KernelDensity(1.0))],
    ids=["beta", "gamma", "alpha"],
)
def test_bounded_losses_refuse_improper_priors(loss):
    with pytest.raises(ImproperPosteriorError, match="take a proper prior"):
        GibbsPosterior(Flat(), loss, OUTLIER)
    # And rightly so: the loss does not fall off.
    far = loss.total(scalar(1e3), OUTLIER)
    assert loss.total(scalar(1e6), OUTLIER) == far < math.inf
    GibbsPosterior(dist.Normal(0.0, 5.0), loss, OUTLIER)


def test_whole_number_types_are_taken():
    counts = torch.tensor([0, 1, 1, 4])
    for loss in (
        BetaDivergence(0.3, dist.Poisson),
        GammaDivergence(0.3, dist.Poisson),
        AlphaDivergence(0.3, dist.Poisson, EmpiricalMass()),
    ):
        single = loss.total(torch.tensor(1.3), counts)
        assert single == loss.total(torch.tensor(1.3), counts.float())
        GibbsPosterior(dist.Gamma(2.0, 1.0), loss, counts)


def test_settings_are_checked():
    for wrong in (0.0, -0.1, math.inf, "0.1"):
        with pytest.raises(SettingsError, match="beta must"):
            BetaDivergence(wrong, location)
        with pytest.raises(SettingsError, match="gamma must"):
            GammaDivergence(wrong, location)
    for wrong in (0.0, 1.0, 1.5, -1.0):
        with pytest.raises(SettingsError, match="alpha must"):
            AlphaDivergence(wrong, location, EmpiricalMass())
    with pytest.raises(SettingsError, match="estimate must be"):
        AlphaDivergence(0.5, location, 0.3)
    with pytest.raises(SettingsError, match="bandwidth must"):
        KernelDensity(0.0)
    with pytest.raises(SettingsError, match="num_nodes"):
        KernelDensity(1.0, 0)


def test_data_are_checked():
    with pytest.raises(DataError, match="datum 1;"):
        GibbsPosterior(dist.Gamma(2.0, 1.0), BetaDivergence(0.5, dist.Poisson), double(1.0, math.nan))
    with pytest.raises(ShapeError, match="covariates"):
        GibbsPosterior(dist.Normal(0.0, 1.0), AlphaDivergence(0.5, location, KernelDensity(1.0)), (OUTLIER, OUTLIER))
    with pytest.raises(ShapeError, match="numbers"):
        AlphaDivergence(0.5, location, KernelDensity(1.0)).total(scalar(0.0), OUTLIER[:, None])
    with pytest.raises(DataError, match="floating type"):
        AlphaDivergence(0.5, location, KernelDensity(1.0)).total(scalar(0.0), torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="does not fit outcomes"):
        BetaDivergence(0.5, lambda p: dist.Normal(p, 1.0)).total(double(0.0, 1.0, 2.0), torch.zeros(5, 2))
    with pytest.raises(ModelError, match="must return a distribution"):
        BetaDivergence(0.5, lambda p: p).total(scalar(0.0), OUTLIER)


def unknown_scale(p):
    return dist.Normal(p[0], p[1])


@pytest.mark.parametrize(
    ("beta", "n", "k"), [(0.1, 11, 1), (0.1, 12, 1), (0.1, 20, 2), (0.1, 30, 2), (0.5, 3, 1), (0.5, 4, 1)]
)
def test_pole_of_the_beta_divergence(beta, n, k):
    x = torch.cat([torch.zeros(k, dtype=torch.float64), torch.arange(1.0, n - k + 1, dtype=torch.float64)])
    loss, scale = BetaDivergence(beta, unknown_scale), 1e-9
    found = float(loss.total((scalar(0.0), scalar(scale)), x))
    stated = (2 * math.pi) ** (-beta / 2) * scale**-beta * (n / (1 + beta) ** 1.5 - k / beta)
    assert found == pytest.approx(stated, rel=1e-12, abs=1e-12)
    assert (found < 0) == (n < k * (1 + beta) ** 1.5 / beta)


def test_pole_of_the_gamma_divergence():
    x, loss = torch.arange(40, dtype=torch.float64), GammaDivergence(0.5, unknown_scale)
    near, nearer = (float(loss.total((scalar(7.0), scalar(s)), x)) for s in (1e-6, 1e-9))
    assert math.log(nearer / near) / math.log(1e3) == pytest.approx(0.5 / 1.5, abs=1e-12) and nearer < near < 0


def test_outcomes_outside_of_the_support_have_density_zero():
    rate, x = scalar(2.0), double(0.5, -1.0)
    beta = BetaDivergence(0.5, torch.distributions.Exponential)
    # The integral of (2 exp(-2 y))**1.5 is 2**1.5 / 3.
    assert beta.pointwise(rate, x)[1] == pytest.approx(2**1.5 / 3 / 1.5, abs=1e-14)
    assert GammaDivergence(0.5, torch.distributions.Exponential).pointwise(rate, x)[1] == 0.0
    inside = GibbsPosterior(dist.Gamma(2.0, 1.0), beta, x[:1])
    both = GibbsPosterior(dist.Gamma(2.0, 1.0), beta, x)
    u = double(0.3)
    assert float(both.log_likelihood(u) - inside.log_likelihood(u)) == pytest.approx(
        -(math.exp(0.3) ** 0.5) / 1.5 / 1.5, abs=1e-12
    )
    # Half of a kernel may lie outside.
    hellinger = AlphaDivergence(0.5, torch.distributions.Exponential, KernelDensity(0.5))
    assert 0.0 < float(hellinger.total(rate, x[:1])) < 4.0


def test_outcomes_outside_leave_gradients_finite():
    law = torch.distributions.LogNormal
    loss = GammaDivergence(0.5, lambda m: law(m, 1.0), power_integral=lambda law, s: law.loc * 0 + 1.0)

    def gradient(x):
        return torch.func.grad(lambda m: loss.total(m, x))(scalar(0.2))

    assert torch.equal(gradient(double(1.5, -1.0)), gradient(double(1.5))) and gradient(double(1.5)) != 0


def test_supports_that_depend_on_the_parameter_are_batched():
    x = double(0.5, 3.0, 7.0)
    loss = GammaDivergence(0.5, lambda top: torch.distributions.Uniform(0.0, top), lambda law, s: law.high ** (1 - s))
    tops = double(2.0, 5.0, 0.1)
    found = torch.func.vmap(lambda top: loss.total(top, x))(tops)
    # Each datum inside adds -2 p**.5 (p**.5)**(-1/3) = -2 top**(-1/3).
    expected = -2 * tops ** (-1 / 3) * double(1.0, 2.0, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
