"""Generated problems have answers that a second way of computing them confirms."""

import itertools
import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf, workdps
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import beta, expon, halfnorm, lognorm, multivariate_normal, multivariate_t, norm, pareto, weibull_min

from bayeskit import exact
from bayeskit.errors import DataError, SettingsError
from bayeskit.exact import generated
from bayeskit.exact.generated import (
    EXTREME_FAMILIES,
    FAMILIES,
    generate,
    log_integral,
    log_integral_over_space,
    shrink,
)

#: Those of this module; the others are compared in `test_generated_extremes.py`.
OWN = tuple(family for family in FAMILIES if family not in EXTREME_FAMILIES)

# Walls, Cauchy priors and what has several coordinates are compared by other means below.
OTHERS = ("DirichletMultinomial", "NormalRegression", "UniformWall", "CauchyStudent", "NormalGroups", "PositiveScale")
TWO_COORDINATES = ("OrderedCuts", "SeveralCoefficients", "Autoregression", "TwoStateMarkov")
GROUPS = ("PoissonGroups", "BetaBinomialGroups", "LocalLevel", "WishartNormal", "SinglePrecision")
ONE_COORDINATE = [
    family for family in OWN if family.__name__ not in (*OTHERS, *TWO_COORDINATES, *GROUPS, "CorrelationPair")
]


def problems(family, count=4):
    rng = np.random.default_rng(7)
    return [family.random(rng) for _ in range(count)]


def by_the_target(problem):
    """Integrate the target itself over its one coordinate."""
    target = problem.case().target()
    assert target.dim == 1

    def log_f(u):
        log_prior, log_likelihood = target.evaluate(torch.from_numpy(u).unsqueeze(-1))
        return (log_prior + log_likelihood).numpy()

    # Tails of the priors are exponential in this coordinate, with rates down to .001.
    return max(log_integral(log_f, -end, end)[0] for end in (30.0, 700.0, 60_000.0))


def in_space(problem, start):
    """Integrate the target itself over its two or three coordinates."""
    target = problem.case().target()
    assert target.dim == len(start)

    def log_f(u):
        log_prior, log_likelihood = target.evaluate(torch.from_numpy(np.ascontiguousarray(u)))
        return (log_prior + log_likelihood).nan_to_num(nan=-math.inf).numpy()

    return log_integral_over_space(log_f, start)[0]


@pytest.mark.calibration
@pytest.mark.parametrize("name", TWO_COORDINATES)
def test_the_answer_is_the_integral_of_the_target_over_two_coordinates(name):
    for problem in problems(getattr(generated, name), 2):
        assert in_space(problem, [0.1, 0.1]) == pytest.approx(problem.log_evidence()[0], abs=1e-6), problem


@pytest.mark.calibration
@pytest.mark.parametrize(
    "problem",
    [
        generated.PoissonGroups(0.7, (3.0,)),
        generated.BetaBinomialGroups(0.6, 5, (2.0,)),
        generated.LocalLevel(0.5, (0.8,), -1),
    ],
)
def test_what_is_summed_out_is_the_integral_of_the_target(problem):
    """With one group or one step, three coordinates are few enough to integrate over all of them."""
    assert in_space(problem, [0.1, 0.1, 0.1]) == pytest.approx(problem.log_evidence()[0], abs=1e-6)


def test_a_missing_observation_against_a_multivariate_normal_density():
    problem = generated.LocalLevel(0.6, (0.5, -0.3, 1.2, 2.0), 1)
    seen, y = [0, 2, 3], np.array([0.5, 1.2, 2.0])

    grid = np.arange(-4.0, 4.0, 0.1)  # the rule of trapezoids, exact to rounding
    a, b = (part.ravel()[:, None, None] for part in np.meshgrid(grid, grid))
    walk = np.exp(2 * a) * np.minimum.outer(np.array(seen) + 1, np.array(seen) + 1)
    noisy = torch.from_numpy(walk + np.exp(2 * b) * np.eye(3))
    density = torch.distributions.MultivariateNormal(torch.zeros(3).double(), noisy).log_prob(torch.from_numpy(y))
    priors = (norm.logpdf(a, scale=0.6) + norm.logpdf(b, scale=0.6)).ravel()
    value = math.log(0.01) + logsumexp(density.numpy() + priors)
    assert value == pytest.approx(problem.log_evidence()[0], abs=1e-7)


def test_hidden_states_against_enumeration():
    problem = generated.TwoStateMarkov(2.0, 1.5, 0.5, (0.4, -1.0, 1.3))
    paths = np.array(list(itertools.product((-1, 1), repeat=3)))

    t, log_height = (grid.ravel() for grid in np.meshgrid(np.linspace(-25, 25, 501), np.linspace(-5, 5, 401)))
    stay = 1 / (1 + np.exp(-t))
    value = np.zeros(len(t))
    for path in paths:  # the rule of trapezoids is exact to rounding for what falls off on both sides
        stays = np.prod([stay if one == other else 1 - stay for one, other in itertools.pairwise(path)], 0)
        value += (
            0.5
            * stays
            * np.prod([norm.pdf(y, s * np.exp(log_height)) for y, s in zip(problem.y, path, strict=True)], 0)
        )
    value *= beta.pdf(stay, 2.0, 1.5) * stay * (1 - stay) * norm.pdf(log_height, scale=0.5)
    assert problem.log_evidence()[0] == pytest.approx(math.log(value.sum() * 0.1 * 0.025), abs=1e-7)


def test_precision_matrices_against_one_predictive_density_after_another():
    for problem in problems(generated.WishartNormal):
        d, freedom, inverse, value = problem.dim, problem.freedom, np.eye(problem.dim) / problem.scale, 0.0
        for y in np.array(problem.y).reshape(-1, d):
            df = freedom - d + 1
            value += multivariate_t.logpdf(y, np.zeros(d), inverse / df, df)
            freedom, inverse = freedom + 1, inverse + np.outer(y, y)
        assert problem.log_evidence()[0] == pytest.approx(value, abs=1e-9)


def test_scales_and_correlations_against_adaptive_quadrature():
    y = (0.5, -1.2, 0.8)
    priors = {
        "LogNormal": lognorm(0.7, scale=2.0),
        "Weibull": weibull_min(0.7, scale=2.0),
        "Pareto": pareto(0.7, scale=2.0),
        "HalfNormal": halfnorm(scale=2.0),
        "Exponential": expon(scale=0.5),
    }
    for kind, prior in priors.items():
        low = 2.0 if kind == "Pareto" else 1e-9
        value, _ = quad(
            lambda t, p=prior: math.exp(t) * p.pdf(math.exp(t)) * norm.pdf(np.array(y), scale=math.exp(t)).prod(),
            math.log(low), 25.0, points=[0.0, 2.0], epsabs=0, epsrel=1e-10, limit=400,
        )  # fmt: skip
        problem = generated.PositiveScale(kind, 2.0, 0.7, y)
        assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-7), kind
    problem = generated.CorrelationPair(0.8, (0.5, -1.0), (0.2, -1.4))
    pairs = np.stack([problem.x, problem.y], -1)

    def of_correlation(r):
        density = multivariate_normal.logpdf(pairs, cov=[[1, r], [r, 1]]).sum()
        return math.exp(density) * beta.pdf((1 + r) / 2, 0.8, 0.8) / 2

    value, _ = quad(of_correlation, -1, 1, epsabs=0, epsrel=1e-10, limit=400)
    assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-7)


def test_single_precision_keeps_the_answer():
    for problem in problems(generated.SinglePrecision, 6):
        args, inner = problem.args(), problem.problem.args()
        assert {value.dtype for value in args} == {torch.float32}
        assert all(torch.equal(one.double(), other) for one, other in zip(args, inner, strict=True))
        assert problem.case().target().dtype == torch.float32


def test_an_integrand_in_space_that_does_not_fall_off_or_is_rough_is_refused():
    with pytest.raises(DataError, match="fall off"):
        log_integral_over_space(lambda u: -np.abs(u[:, 0]) + 0 * u[:, 1], [0.0, 0.0])
    with pytest.raises(DataError, match="known to"):
        log_integral_over_space(lambda u: -(u**2).sum(1) + (np.sin(1e4 * u[:, 0]) > 0), [0.0, 0.0])


def test_a_wall_against_adaptive_quadrature():
    for problem in problems(generated.UniformWall):
        value, _ = quad(
            lambda t, p=problem: t ** -len(p.y) / p.top, max(problem.y), problem.top, epsabs=0, epsrel=1e-11
        )
        assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-9)


@pytest.mark.calibration
@pytest.mark.parametrize("family", ONE_COORDINATE)
def test_the_answer_is_the_integral_of_the_target(family):
    for problem in problems(family, 3):
        assert by_the_target(problem) == pytest.approx(problem.log_evidence()[0], abs=1e-6), problem


@pytest.mark.calibration
def test_a_cauchy_prior_against_many_digits():
    # Noise that is narrow beside prior and data needs more pieces than others do.
    narrow = (generated.CauchyStudent(20.6, 0.123, (47.8309, 0.6853)), generated.CauchyStudent(24.9, 0.11, (-1.0636,)))
    for problem in (*problems(generated.CauchyStudent, 3), *narrow):
        with workdps(30):
            y, c, s = [mpf(v) for v in problem.y], mpf(problem.width), mpf(problem.noise)
            constant = mp.gamma(2.5) / mp.gamma(2) / mp.sqrt(4 * mp.pi) / s

            def f(x, y=y, c=c, s=s, constant=constant):
                value = 1 / (mp.pi * c * (1 + (x / c) ** 2))
                for v in y:
                    value *= constant * (1 + ((v - x) / s) ** 2 / 4) ** mpf(-2.5)
                return value

            middle = sorted({float(v) for v in problem.y} | {0.0})
            points = [-mp.inf, *(p + d * float(s) for p in middle for d in (-30, -3, 0, 3, 30)), mp.inf]
            exact_value = mp.log(mp.quad(f, sorted(points)))
        assert problem.log_evidence()[0] == pytest.approx(float(exact_value), abs=1e-6)


def test_groups_against_a_second_quadrature():
    """Integrate over the centre as well, which the answer sums out in closed form."""
    problem = generated.NormalGroups(2.0, 1.0, (0.3, -1.2, 2.0, 0.5), (0.5, 0.7, 1.0, 0.4))
    y, errors = np.array(problem.y), np.array(problem.errors)
    centre = np.linspace(-24, 24, 2401)  # the rule of trapezoids is exact to rounding for what falls off on both sides

    def log_f(t):
        variance = errors**2 + np.exp(t)[:, None] ** 2
        terms = norm.logpdf(y, centre[:, None, None], np.sqrt(variance)).sum(-1)
        inner = logsumexp(terms + norm.logpdf(centre, scale=problem.prior)[:, None], axis=0) + math.log(0.02)
        return inner + halfnorm.logpdf(np.exp(t), scale=problem.width) + t

    values = np.linspace(-35, 3, 3801)
    second = logsumexp(np.concatenate([log_f(part) for part in np.array_split(values, 20)]))
    assert second + math.log(0.01) == pytest.approx(problem.log_evidence()[0], abs=1e-8)


def test_shares_and_regressions_against_other_formulas():
    for problem in problems(generated.DirichletMultinomial):
        # One observation after another, by the predictive probabilities of a Polya urn.
        a, value = np.array(problem.concentration), 0.0
        for kind, count in enumerate(problem.counts):
            for _ in range(int(count)):
                value += math.log(a[kind] / a.sum())
                a[kind] += 1
        value += math.lgamma(sum(problem.counts) + 1) - sum(math.lgamma(n + 1) for n in problem.counts)
        assert problem.log_evidence()[0] == pytest.approx(value, abs=1e-9)
    for problem in problems(generated.NormalRegression):
        x, y = problem._data()
        with workdps(50):
            covariance = mp.matrix((problem.prior**2 * mp.matrix(x.tolist()) * mp.matrix(x.tolist()).T).tolist())
            for i in range(len(y)):
                covariance[i, i] += mpf(problem.noise) ** 2
            vector = mp.matrix(y.tolist())
            quadratic = (vector.T * mp.lu_solve(covariance, vector))[0]
            factor = mp.cholesky(covariance)
            log_det = 2 * sum(mp.log(factor[i, i]) for i in range(len(y)))
            value = -(quadratic + log_det + len(y) * mp.log(2 * mp.pi)) / 2
        assert problem.log_evidence()[0] == pytest.approx(float(value), rel=1e-8, abs=1e-6)


def test_every_problem_of_many_seeds_is_known():
    seen = set()
    for seed in range(200):
        problem = generate(seed)
        value, error = problem.log_evidence()
        # Bessel functions of torch are known to seven digits.
        assert math.isfinite(value) and error <= (
            1e-5 if isinstance(problem, generated.AngleAcrossCut) else generated.MAX_ERROR
        )
        assert eval(repr(problem), vars(generated)) == problem  # noqa: S307  our own representation
        seen.add(type(problem))
    assert seen == set(FAMILIES)


@pytest.mark.calibration
def test_problems_can_be_shrunk():
    problem = generated.BetaBernoulli(0.0123, 7.0, 1.0, (1.0, 1.0, 0.0, 1.0))
    smallest = shrink(problem, lambda form: form.a < 0.1)
    assert smallest == generated.BetaBernoulli(0.01, 1.0, 1.0, (1.0,))
    for family in FAMILIES:
        for start in problems(family, 1):
            assert all(math.isfinite(form.log_evidence()[0]) for form in start.simpler())


def test_an_integrand_that_is_too_rough_is_refused():
    with pytest.raises(DataError, match="known to"):
        log_integral(lambda x: np.where(np.sin(1e5 * x) > 0, 0.0, -5.0), 0.0, 1.0)


def test_bad_seeds_are_refused():
    with pytest.raises(SettingsError):
        exact.generate(-1)
    with pytest.raises(SettingsError):
        exact.generate(1.5)
