"""Priors are right for every coordinate that a number can hold, also where values round to an end of the support."""

import math

import mpmath
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from mpmath import mp, mpf
from pyro.distributions import constraints
from scipy.stats import kstest

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity import supports as _unconstrained
from bayeskit._logdensity.supports import coordinate_log_density, draw_coordinates
from bayeskit._logdensity.transforms import bijection
from bayeskit.errors import UnsupportedSiteError

FAILURE_RATE = 1e-5
F64 = torch.float64
COORDINATES = (0.0, 1.0, -1.0, 3.7, -7.3, 30.0, -30.0, 40.0, -40.0, 100.0, -100.0, 300.0, -300.0, 700.0, -700.0)
PARAMETERS = ((0.001, 0.001), (0.05, 0.05), (1.0, 1.0), (3.0, 0.01), (200.0, 7.0))


@pytest.fixture(autouse=True)
def many_digits():
    with mpmath.workdps(60):
        yield


def number(value, dtype=F64):
    return torch.tensor(value, dtype=dtype)


# -- the densities by their textbook formulas, in sixty digits; u is the coordinate -------------------------------


def log_sigmoid(u):
    return -mp.log1p(mp.exp(-u))


def log_beta(a, b):
    return mp.loggamma(a) + mp.loggamma(b) - mp.loggamma(a + b)


def normal(z):
    return -z * z / 2 - mp.log(2 * mp.pi) / 2


def student(y, df):
    normalizer = mp.loggamma((df + 1) / 2) - mp.loggamma(df / 2) - mp.log(df * mp.pi) / 2
    return normalizer - (df + 1) / 2 * mp.log1p(y * y / df)


def folded_student(u, df, scale):
    shift = mpf(0.3)
    sides = [mp.exp(student((sign * mp.exp(u) - shift) / scale, df)) for sign in (1, -1)]
    return mp.log(sum(sides)) - mp.log(scale) + u


def softplus_normal(u, loc, scale):
    v = mp.exp(u)
    w = v + mp.log(-mp.expm1(-v)) if u < 6 else v
    slope = u - mp.log(-mp.expm1(-v)) if u < 6 else u
    return normal((w - loc) / scale) - mp.log(scale) + slope


def kumaraswamy(u, a, b):
    log_v = log_sigmoid(u)
    return mp.log(a * b) + a * log_v + (b - 1) * mp.log(-mp.expm1(a * log_v)) + log_sigmoid(-u)


def fisher_snedecor(u, d1, d2):
    z = mp.log(d1 / d2) + u
    return d1 / 2 * z - (d1 + d2) / 2 * mp.log1p(mp.exp(z)) - log_beta(d1 / 2, d2 / 2)


def weibull(u, scale, shape):
    z = shape * (u - mp.log(scale))
    return mp.log(shape) + z - mp.exp(z)


def relaxed_bernoulli(u, temperature):
    z = mp.log(mpf(0.3) / (1 - mpf(0.3))) - u * temperature
    return mp.log(temperature) + z - 2 * mp.log1p(mp.exp(z))


def continuous_bernoulli(u, a):
    v = 1 / (1 + mp.exp(-u))
    return mp.log(a / mp.tanh(a / 2)) - a * v - mp.log1p(mp.exp(-a)) + log_sigmoid(u) + log_sigmoid(-u)


def polya_gamma(u):
    """The density of PG(1, 0) by its alternating series, over what of it lies below 2.5, by the dual series."""
    v = mpf(2.5) / (1 + mp.exp(-u))
    series = sum((-1) ** n * (2 * n + 1) * mp.exp(-mpf(n * (n + 1)) / (2 * v)) for n in range(40))
    beyond = sum((-1) ** n * 4 / ((2 * n + 1) * mp.pi) * mp.exp(-5 * (n + mpf(0.5)) ** 2 * mp.pi**2) for n in range(9))
    density = mp.log(series) - 1 / (8 * v) - mp.log(2 * mp.pi * v**3) / 2 - mp.log1p(-beyond)
    return density + mp.log(v) + log_sigmoid(-u)


def von_mises(u, concentration, loc):
    angle = 2 * mp.pi / (1 + mp.exp(-u)) - mp.pi
    density = concentration * mp.cos(angle - loc) - mp.log(mp.besseli(0, concentration))
    return density + log_sigmoid(u) + log_sigmoid(-u)


def stretched_logit_of_beta(u, a, b):
    z = (u - 1) / 3
    return a * log_sigmoid(z) + b * log_sigmoid(-z) - log_beta(a, b) - mp.log(3)


#: By name: the distribution, and its log density at ``u`` with the Jacobian; both of two parameters.
FAMILIES = {
    "beta": (dist.Beta, lambda u, a, b: a * log_sigmoid(u) + b * log_sigmoid(-u) - log_beta(a, b)),
    "gamma": (dist.Gamma, lambda u, a, b: a * (mp.log(b) + u) - b * mp.exp(u) - mp.loggamma(a)),
    "inverse gamma": (dist.InverseGamma, lambda u, a, b: a * (mp.log(b) - u) - b * mp.exp(-u) - mp.loggamma(a)),
    "kumaraswamy": (dist.Kumaraswamy, kumaraswamy),
    "fisher-snedecor": (dist.FisherSnedecor, fisher_snedecor),
    "weibull": (dist.Weibull, weibull),
    "pareto": (
        dist.Pareto,
        lambda u, s, k: mp.log(k) + k * mp.log(s) + u - (k + 1) * mp.log(s + mp.exp(u)),
    ),
    "half-cauchy": (
        lambda a, b: dist.HalfCauchy(a),
        lambda u, s, _: mp.log(2 / mp.pi) + u - mp.log(s) - mp.log1p(mp.exp(2 * (u - mp.log(s)))),
    ),
    "half-normal": (lambda a, b: dist.HalfNormal(a), lambda u, s, _: mp.log(2) + normal(mp.exp(u) / s) + u - mp.log(s)),
    "exponential": (lambda a, b: dist.Exponential(a), lambda u, s, _: mp.log(s) + u - s * mp.exp(u)),
    "log-normal": (dist.LogNormal, lambda u, m, s: normal((u - m) / s) - mp.log(s)),
    "uniform": (lambda a, b: dist.Uniform(-a, b), lambda u, a, b: log_sigmoid(u) + log_sigmoid(-u)),
    "continuous bernoulli": (
        lambda a, b: dist.ContinuousBernoulli(logits=-a),
        lambda u, a, _: continuous_bernoulli(u, a),
    ),
    "affine, then exponential": (
        lambda a, b: dist.TransformedDistribution(
            dist.Normal(a, b), [dist.transforms.AffineTransform(1.0, 3.0), dist.transforms.ExpTransform()]
        ),
        lambda u, m, s: normal((u - 1 - 3 * m) / (3 * s)) - mp.log(3 * s),
    ),
    "folded student": (lambda a, b: dist.FoldedDistribution(dist.StudentT(a, 0.3, b)), folded_student),
    "softplus": (
        lambda a, b: dist.TransformedDistribution(dist.Normal(a, b), [dist.transforms.SoftplusTransform()]),
        softplus_normal,
    ),
    "tanh": (
        lambda a, b: dist.TransformedDistribution(dist.Normal(a, b), [dist.transforms.TanhTransform()]),
        lambda u, m, s: normal((u / 2 - m) / s) - mp.log(s) - mp.log(2),
    ),
    "logarithm of gamma": (
        lambda a, b: dist.TransformedDistribution(dist.Gamma(a, b), [dist.transforms.ExpTransform().inv]),
        lambda u, a, b: a * (mp.log(b) + u) - b * mp.exp(u) - mp.loggamma(a),
    ),
    "stretched logit of beta": (
        lambda a, b: dist.TransformedDistribution(
            dist.Beta(a, b), [dist.transforms.SigmoidTransform().inv, dist.transforms.AffineTransform(1.0, 3.0)]
        ),
        stretched_logit_of_beta,
    ),
    "polya-gamma": (lambda a, b: dist.TruncatedPolyaGamma(a), lambda u, _, __: polya_gamma(u)),
    "von mises": (lambda a, b: dist.VonMises(b, a), von_mises),
    "relaxed bernoulli": (
        lambda a, b: dist.RelaxedBernoulli(b, probs=torch.tensor(0.3, dtype=b.dtype)),
        lambda u, _, t: relaxed_bernoulli(u, t),
    ),
}


def relative(found, exact):
    return 0.0 if found == exact else abs(found - exact) / max(1.0, abs(exact))


@pytest.mark.calibration
@pytest.mark.parametrize("name", FAMILIES)
def test_density_and_gradient_in_double_precision(name):
    family, formula = FAMILIES[name]
    for parameters in PARAMETERS:
        fn = family(*map(number, parameters))
        exact = [mpf(p) for p in parameters]
        for u in COORDINATES:
            x = number(u).requires_grad_()
            found = coordinate_log_density(fn, x)
            (slope,) = torch.autograd.grad(found, x)
            h = mpf(10) ** -20
            true_slope = (formula(u + h, *exact) - formula(u - h, *exact)) / (2 * h)
            assert relative(float(found.detach()), float(formula(mpf(u), *exact))) < 1e-12, (parameters, u)
            assert relative(float(slope), float(true_slope)) < 1e-10, (parameters, u)


@pytest.mark.parametrize("name", FAMILIES)
def test_density_in_single_precision(name):
    family, formula = FAMILIES[name]
    for parameters in PARAMETERS[1:]:
        rounded = [number(p, torch.float32) for p in parameters]
        for u in (0.0, 1.0, -7.25, 16.0, -16.0, 30.0, -30.0, 80.0, -80.0):
            exact = float(formula(mpf(u), *(mpf(float(p)) for p in rounded)))
            found = coordinate_log_density(family(*rounded), number(u, torch.float32))
            assert found.dtype == torch.float32
            if abs(exact) < 1e30:  # a number of single precision
                # Four roundings of the largest term, log Gamma(200) = 858.
                assert relative(float(found), exact) < 4 * 858 * torch.finfo(torch.float32).eps, (parameters, u)


# -- simplices, correlations, covariances: by the definition of the map, in four hundred digits -------------------


def broken_stick(x):
    rest, pieces, log_jacobian = mpf(1), [], mpf(0)
    for k, t in enumerate(x):
        z = 1 / (1 + mp.exp(-(t - mp.log(len(x) - k))))
        pieces.append(rest * z)
        log_jacobian += mp.log(z) + mp.log(1 - z) + mp.log(rest)
        rest *= 1 - z
    return [*pieces, rest], log_jacobian


def correlation_factor(x, n):
    factor, log_jacobian, entries = mp.zeros(n), mpf(0), iter(x)
    for i in range(n):
        rest = mpf(1)
        for j in range(i):
            r = mp.tanh(next(entries))
            factor[i, j] = r * mp.sqrt(rest)
            log_jacobian += mp.log(1 - r * r) + mp.log(rest) / 2
            rest *= 1 - r * r
        factor[i, i] = mp.sqrt(rest)
    return factor, log_jacobian


def coordinates_of(size, scale):
    return scale * torch.randn(3, size, generator=torch.Generator().manual_seed(size), dtype=F64)


@pytest.mark.parametrize("scale", [1, 10, 40, 150])
def test_simplices(scale):
    for x in coordinates_of(3, scale):
        with mpmath.workdps(400):
            pieces, log_jacobian = broken_stick([mpf(t) for t in x.tolist()])
            logs = [mp.log(v) for v in pieces]
            for concentration in ([0.01, 0.05, 2.0, 30.0], [1.0] * 4):
                a = [mpf(c) for c in concentration]
                exact = sum((c - 1) * v for c, v in zip(a, logs, strict=True)) + log_jacobian
                exact += mp.loggamma(sum(a)) - sum(mp.loggamma(c) for c in a)
                assert (
                    relative(float(coordinate_log_density(dist.Dirichlet(number(concentration)), x)), float(exact))
                    < 1e-12
                )
            values = bijection(constraints.simplex)(x).tolist()
            for value, piece in zip(values, pieces, strict=True):
                assert value == pytest.approx(float(piece), rel=1e-12, abs=1e-307)


@pytest.mark.parametrize("scale", [1, 10, 40, 150])
def test_correlation_matrices(scale):
    n, transform = 4, bijection(constraints.corr_cholesky)
    for x in coordinates_of(6, scale):
        value = transform(x)
        with mpmath.workdps(400):
            factor, log_jacobian = correlation_factor([mpf(t) for t in x.tolist()], n)
            assert relative(float(transform.log_abs_det_jacobian(x, value)), float(log_jacobian)) < 1e-12
            for i in range(n):
                for j in range(i + 1):
                    assert float(value[i, j]) == pytest.approx(float(factor[i, j]), rel=1e-12, abs=1e-307)
            for eta in (0.05, 1.0, 7.0):
                # The normalizer of Lewandowski, Kurowicka and Joe (2009), as a product over dimensions.
                powers = sum((2 * mpf(eta) - 2 + n - i) * mp.log(factor[i - 1, i - 1]) for i in range(2, n + 1))
                normalizer = sum(
                    k * mp.log(mp.pi) / 2 + mp.loggamma(eta + mpf(n - 1 - k) / 2) - mp.loggamma(eta + mpf(n - 1) / 2)
                    for k in range(1, n)
                )
                exact = float(powers - normalizer + log_jacobian)
                for fn in (dist.LKJCholesky(n, number(eta)), dist.LKJ(n, number(eta))):
                    assert relative(float(coordinate_log_density(fn, x)), exact) < 1e-12
        if scale <= 10:
            torch.testing.assert_close(transform.inv(value), x, rtol=1e-13, atol=1e-13)


def test_covariance_matrices_have_the_density_of_torch_where_that_is_right():
    covariance = number([[2.0, 0.5, 0.1], [0.5, 1.0, -0.2], [0.1, -0.2, 3.0]])
    fn, transform = dist.Wishart(number(4.5), covariance_matrix=covariance), bijection(constraints.positive_definite)
    x = coordinates_of(6, 1)
    value = transform(x)
    theirs = fn.log_prob(value) + transform.log_abs_det_jacobian(x, value)
    torch.testing.assert_close(coordinate_log_density(fn, x), theirs, rtol=1e-10, atol=1e-10)


SQUARE = [dist.transforms.PowerTransform(number(2.0))]
THREE = number([0.5, 2.0, 3.0])
SEVERAL = {
    "tanh": (lambda p: dist.Normal(p, 2 * p), [dist.transforms.TanhTransform()]),
    "softplus": (lambda p: dist.Normal(p, 2 * p), [dist.transforms.SoftplusTransform()]),
    "exponential": (lambda p: dist.Normal(p, 2 * p), [dist.transforms.ExpTransform()]),
    "power": (lambda p: dist.Gamma(p, 2 * p), SQUARE),
    "power of exponential": (lambda p: dist.Normal(p, 2 * p), [dist.transforms.ExpTransform(), *SQUARE]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_transforms_of_one_event_have_the_density_of_its_elements(name):
    """The slope of a transform counts once for each element of an event, whatever the base distribution calls one."""
    base, chain = SEVERAL[name]
    together = dist.TransformedDistribution(base(THREE).to_event(1), chain)
    x = coordinates_of(3, 2)  # where no value is rounded
    transform = bijection(together.support)
    value = transform(x)
    theirs = together.log_prob(value) + transform.log_abs_det_jacobian(x, value)
    assert theirs.shape == (3,)
    torch.testing.assert_close(coordinate_log_density(together, x), theirs, rtol=1e-9, atol=1e-9)
    far = coordinates_of(3, 100)
    alone = sum(
        coordinate_log_density(dist.TransformedDistribution(base(p), chain), far[:, i]) for i, p in enumerate(THREE)
    )
    torch.testing.assert_close(coordinate_log_density(together, far), alone, rtol=1e-13, atol=1e-13)
    with global_stream(new_generator(0)):
        assert draw_coordinates(together, torch.Size([5])).shape == (5, 3)


@pytest.mark.parametrize(
    "base",
    [
        dist.Beta(number(2.0), number(3.0)),
        dist.Uniform(number(0.0), number(1.0)),
        dist.Pareto(number(1.5), number(3.0)),
    ],
    ids=lambda base: type(base).__name__,
)
def test_a_power_of_what_is_not_all_positive_numbers_is_refused(base):
    """The support of its powers is declared as all positive numbers."""
    fn = dist.TransformedDistribution(base, SQUARE)
    assert coordinate_log_density(fn, number(0.3)) is None and draw_coordinates(fn, torch.Size([2])) is None

    def model():
        value = pyro.sample("value", fn)
        pyro.sample("y", dist.Normal(value, 1.0), obs=number(0.4))

    with pytest.raises(UnsupportedSiteError, match="'value' has support .*reach a part.*reparameterise"):
        bk.Target.from_pyro(model)


def test_partial_transforms_of_an_unbounded_distribution_do_not_mislead():
    """A Gumbel variable is the negative logarithm of that of a uniform one, of which the inner covers a half-line."""
    assert coordinate_log_density(dist.Gumbel(number(2.0), number(3.0)), number(0.3)) is None


def test_parameters_of_a_continuous_bernoulli_are_not_held_away_from_the_ends():
    for logit in (0.0, 1e-12, 3.0, -45.0):
        x = number([-50.0, 0.3, 50.0])
        flat = [log_sigmoid(mpf(t)) + log_sigmoid(-mpf(t)) for t in x.tolist()]
        exact = [continuous_bernoulli(mpf(t), mpf(-logit)) for t in x.tolist()] if logit else flat
        found = coordinate_log_density(dist.ContinuousBernoulli(logits=number(logit)), x)
        assert found.tolist() == pytest.approx([float(e) for e in exact], rel=1e-12)
    fn = dist.ContinuousBernoulli(probs=number(0.3))
    before = coordinate_log_density(fn, number(1.0))
    fn.log_prob(number(0.2))  # which computes the logits, too
    assert coordinate_log_density(fn, number(1.0)) == before


def test_a_mask_that_leaves_all_leaves_the_density():
    fn, x = dist.Beta(number(0.05), number(0.05)), number([60.0, -60.0])
    assert torch.equal(coordinate_log_density(fn.mask(True), x), coordinate_log_density(fn, x))
    masked = pyro.poutine.mask(beta_bernoulli, mask=True)
    target = bk.Target.from_pyro(masked, number([1.0]), 0.05, compile=False)
    assert torch.equal(target.log_prior(x.unsqueeze(-1)), coordinate_log_density(fn, x))


# -- draws --------------------------------------------------------------------------------------------------------

DRAWN = {
    "mixture": dist.MixtureSameFamily(
        dist.Categorical(number([0.3, 0.7])), dist.Beta(number([0.05, 2.0]), number([0.1, 3.0]))
    ),
    "correlation": dist.LKJCholesky(2, number(0.05)),
    "dirichlet": dist.Dirichlet(number([0.02, 0.3])),
}


def probability_of_draws(fn, num_draws=20_000, change=lambda x: x):
    """Compare draws of one coordinate with the integral of the density, by Kolmogorov and Smirnov; the p-value."""
    with global_stream(new_generator(0)):
        x = draw_coordinates(fn, torch.Size([num_draws]))
    if x is None:
        return None
    column, width = x.dim() > 1, float(x.max() - x.min())
    around = torch.linspace(float(x.min()) - width, float(x.max()) + width, 400_001, dtype=F64)
    x = change(x).reshape(-1)
    grid = torch.cat([around, x]).sort().values
    density = coordinate_log_density(fn, grid.unsqueeze(-1) if column else grid).exp()
    below = torch.cat([number([0.0]), (0.5 * (density[1:] + density[:-1]) * grid.diff()).cumsum(0)])
    assert float(below[-1]) == pytest.approx(1.0, abs=5e-3)
    return kstest(np.interp(x.numpy(), grid.numpy(), (below / below[-1]).numpy()), "uniform").pvalue


CASES = [(name, parameters) for name in FAMILIES for parameters in PARAMETERS]


@pytest.mark.calibration
@pytest.mark.parametrize("name", [*FAMILIES, *DRAWN])
def test_draws_follow_the_density(name):
    if name in DRAWN:
        assert probability_of_draws(DRAWN[name]) > FAILURE_RATE
        return
    for parameters in PARAMETERS:
        found = probability_of_draws(FAMILIES[name][0](*map(number, parameters)))
        assert found is None or found > FAILURE_RATE / len(PARAMETERS), parameters


@pytest.mark.filterwarnings("ignore:Low df values")
@pytest.mark.parametrize("df", [1.05, 4.5])
def test_draws_of_covariances_have_the_mean_determinant(df):
    covariance, n = number([[2.0, 0.5], [0.5, 1.0]]), 4000
    with global_stream(new_generator(0)):
        x = draw_coordinates(dist.Wishart(number(df), covariance_matrix=covariance), torch.Size([n]))
    log_det = 2 * x[:, :2].sum(-1)
    exact = 2 * math.log(2) + math.log(1.75) + sum(float(mp.digamma(mpf(df - i) / 2)) for i in range(2))
    assert abs(float(log_det.mean()) - exact) < 4.42 * float(log_det.std()) / math.sqrt(n)
    matrix = bijection(constraints.positive_definite)(x)
    error = 4.7 * matrix.std(0) / math.sqrt(n)  # three different elements
    assert bool(((matrix.mean(0) - df * covariance).abs() < error).all())


def test_draws_that_are_clamped_are_noticed():
    """What torch draws itself: half of the values are the smallest number."""
    fn = dist.Gamma(number(0.001), number(0.001))
    assert probability_of_draws(fn, change=lambda x: x.clamp(min=-708.0)) < FAILURE_RATE


# -- through a model ----------------------------------------------------------------------------------------------


def beta_bernoulli(y, a):
    p = pyro.sample("p", dist.Beta(number(a), number(a)))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def test_the_prior_of_a_model_is_not_cut_off():
    target = bk.Target.from_pyro(beta_bernoulli, number([1.0, 1.0, 1.0]), 0.05, compile=False)
    u = number([[60.0], [-60.0]])
    exact = 0.05 * (log_sigmoid(mpf(60)) + log_sigmoid(mpf(-60))) - log_beta(mpf(0.05), mpf(0.05))
    assert target.log_prior(u).tolist() == pytest.approx([float(exact)] * 2, rel=1e-14)
    assert target.log_likelihood(u).tolist() == pytest.approx([0.0, -180.0], abs=1e-12)


def everything():
    scale = pyro.sample("scale", dist.Gamma(number(0.01), number(0.01)))
    pyro.sample("share", dist.Dirichlet(number([0.05, 0.1, 3.0])))
    with pyro.plate("three", 3):
        pyro.sample("angle", dist.VonMises(number(0.1), number(4.0)))
        pyro.sample("p", dist.Beta(number(0.1), number(0.02)))
        pyro.sample("wide", dist.HalfCauchy(scale.clamp(max=1e10)))
    pyro.sample("factor", dist.LKJCholesky(3, number(0.3)))
    pyro.sample("y", dist.Normal(scale, 1.0), obs=number(0.4))


@pytest.mark.parametrize("compile", [False, True])
def test_traced_and_compiled_densities_are_the_eager_ones_at_the_edges(compile):
    target = bk.Target.from_pyro(everything, compile=compile)
    u = torch.cat([target.sample_prior(16, seed=1), coordinates_of(target.dim, 200)])
    log_prior, _ = target.evaluate(u, compiled=False)
    found = target.evaluator(len(u))(u, torch.zeros(len(u), dtype=F64))
    assert log_prior.isfinite().all() and found.gradient.isfinite().all()
    torch.testing.assert_close(found.log_density, log_prior, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("u", [0.3, 19.0, 21.0, -25.0, 300.0])
def test_the_jacobian_of_an_interval_is_right_beyond_twenty(u):
    transform = bijection(constraints.interval(-1.0, 2.0))
    x = number(u)
    exact = mp.log(3) + log_sigmoid(mpf(u)) + log_sigmoid(mpf(-u))
    assert float(transform.log_abs_det_jacobian(x, transform(x))) == pytest.approx(float(exact), rel=1e-14)


def test_a_density_or_draws_of_the_users_own_are_kept():
    class Own(dist.Beta):
        def log_prob(self, value):
            return super().log_prob(value) + 1.0

    class Drawn(dist.Beta):
        def rsample(self, sample_shape=()):
            return torch.full(sample_shape, 0.5, dtype=F64)

    x = torch.zeros((), dtype=F64)
    assert coordinate_log_density(Own(number(2.0), number(3.0)), x) is None
    assert draw_coordinates(Drawn(number(2.0), number(3.0)), torch.Size([2])) is None


def test_a_lost_term_is_noticed(monkeypatch):
    """A mutation: the Jacobian left out of the density of the logit."""

    def wrong(fn, x):
        return (fn.concentration1 - 1) * torch.nn.functional.logsigmoid(x) + (
            fn.concentration0 - 1
        ) * torch.nn.functional.logsigmoid(-x)

    forms = tuple(
        form._replace(log_density=wrong) if form.kind is torch.distributions.Beta else form
        for form in _unconstrained._FORMS
    )
    monkeypatch.setattr(_unconstrained, "_FORMS", forms)
    with pytest.raises(AssertionError):
        test_density_and_gradient_in_double_precision("beta")


@pytest.mark.parametrize("rate", [0.001, 0.01])
def test_prior_draws_of_a_model_reach_below_the_smallest_number(rate):
    def model():
        value = pyro.sample("rate", dist.Gamma(number(rate), number(rate)))
        pyro.sample("y", dist.Poisson(value), obs=number(0.0))

    target = bk.Target.from_pyro(model, compile=False)
    u = target.sample_prior(4000, seed=0)[:, 0]
    # log Gamma(a, b) has mean digamma(a) - log(b) and variance trigamma(a).
    mean, variance = float(mp.digamma(rate) - mp.log(rate)), float(mp.psi(1, rate))
    fourth = 9.0  # of a variable that is nearly exponential
    assert abs(float(u.mean()) - mean) < 4.42 * math.sqrt(variance / 4000)
    assert abs(float(u.var()) / variance - 1) < 4.42 * math.sqrt((fourth - 1) / 4000)
    assert float((u < -709).double().mean()) > 0.001 if rate == 0.001 else u.isfinite().all()
