"""Generated problems have answers that a second way of computing them confirms."""

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf, workdps
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import halfnorm, norm

from bayeskit import exact
from bayeskit.errors import DataError, SettingsError
from bayeskit.exact import generated
from bayeskit.exact.generated import FAMILIES, generate, log_integral, shrink

# Walls, Cauchy priors and what has several coordinates are compared by other means below.
OTHERS = ("DirichletMultinomial", "NormalRegression", "UniformWall", "CauchyStudent", "NormalGroups")
ONE_COORDINATE = [family for family in FAMILIES if family.__name__ not in OTHERS]


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


def test_a_wall_against_adaptive_quadrature():
    for problem in problems(generated.UniformWall):
        value, _ = quad(
            lambda t, p=problem: t ** -len(p.y) / p.top, max(problem.y), problem.top, epsabs=0, epsrel=1e-11
        )
        assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-9)


@pytest.mark.parametrize("family", ONE_COORDINATE)
def test_the_answer_is_the_integral_of_the_target(family):
    for problem in problems(family, 3):
        assert by_the_target(problem) == pytest.approx(problem.log_evidence()[0], abs=1e-6), problem


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
            log_det = 2 * sum(mp.log(d) for d in [mp.cholesky(covariance)[i, i] for i in range(len(y))])
            value = -(quadratic + log_det + len(y) * mp.log(2 * mp.pi)) / 2
        assert problem.log_evidence()[0] == pytest.approx(float(value), rel=1e-8, abs=1e-6)


def test_every_problem_of_many_seeds_is_known():
    seen = set()
    for seed in range(200):
        problem = generate(seed)
        value, error = problem.log_evidence()
        assert math.isfinite(value) and error <= generated.MAX_ERROR
        assert eval(repr(problem), vars(generated)) == problem  # noqa: S307  our own representation
        seen.add(type(problem))
    assert seen == set(FAMILIES)


def test_problems_can_be_shrunk():
    problem = generated.BetaBernoulli(0.0123, 7.0, 1.0, (1.0, 1.0, 0.0, 1.0))
    smallest = shrink(problem, lambda form: form.a < 0.1)
    assert smallest == generated.BetaBernoulli(0.01, 1.0, 1.0, (1.0,))
    for family in FAMILIES:
        for start in problems(family, 2):
            assert all(math.isfinite(form.log_evidence()[0]) for form in start.simpler())


def test_an_integrand_that_is_too_rough_is_refused():
    with pytest.raises(DataError, match="known to"):
        log_integral(lambda x: np.where(np.sin(1e5 * x) > 0, 0.0, -5.0), 0.0, 1.0)


def test_bad_seeds_are_refused():
    with pytest.raises(SettingsError):
        exact.generate(-1)
    with pytest.raises(SettingsError):
        exact.generate(1.5)
