"""Generated problems of extreme kinds have answers that a second way of computing them confirms."""

import math

import numpy as np
import pytest
import torch
from mpmath import mp, mpf, workdps
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import halfcauchy, invgamma, multivariate_t, norm

from bayeskit.errors import SettingsError
from bayeskit.exact import _generated_extremes as extremes
from bayeskit.exact import generate, generated
from bayeskit.exact._family import log_integral, log_integral_over_space
from bayeskit.exact._generated_extremes import EXTREME_FAMILIES


def problems(family, count=4, seed=7):
    rng = np.random.default_rng(seed)
    return [family.random(rng) for _ in range(count)]


def density(problem, dtype=torch.float64):
    """Return the log density of the target as a function of NumPy arrays ``(n, d)``, and its dimension."""
    target = problem.case().target(dtype)

    def log_f(u):
        log_prior, log_likelihood = target.evaluate(torch.from_numpy(np.ascontiguousarray(u, dtype=float)).to(dtype))
        return (log_prior + log_likelihood).double().nan_to_num(nan=-math.inf).numpy()

    return log_f, target.dim


def by_the_target(problem, edges):
    """Integrate the target itself over its one coordinate, piece by piece between edges."""
    log_f, dim = density(problem)
    assert dim == 1
    parts = [log_integral(lambda u: log_f(u[:, None]), a, b)[0] for a, b in zip(edges, edges[1:], strict=False)]
    return logsumexp(parts)


def on_a_mesh(problem, edges, count):
    """Integrate the target itself by the rule of trapezoids, which is exact to rounding where it is smooth and ends."""
    log_f, dim = density(problem)
    axes = [np.linspace(low, high, count) for low, high in edges]
    assert dim == len(axes)
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, dim)
    values = np.concatenate([log_f(part) for part in np.array_split(points, 20)])
    return logsumexp(values) + sum(math.log(axis[1] - axis[0]) for axis in axes)


def many_digits(x, y, prior, noise):
    """Return the log density of a normal regression's data with fifty digits."""
    with workdps(50):
        rows = mp.matrix((x * prior).tolist())
        covariance = rows * rows.T
        for i in range(len(y)):
            covariance[i, i] += mpf(noise) ** 2
        vector = mp.matrix(y.tolist())
        factor = mp.cholesky(covariance)
        quadratic = (vector.T * mp.lu_solve(covariance, vector))[0]
        log_det = 2 * sum(mp.log(factor[i, i]) for i in range(len(y)))
        return float(-(quadratic + log_det + len(y) * mp.log(2 * mp.pi)) / 2)


def test_vague_scales_against_student_t_and_adaptive_quadrature():
    for problem in problems(extremes.VagueScale, 12):
        x, y = problem._data()
        value, error = problem.log_evidence()
        if problem.tied and problem.kind != "HalfCauchy":
            second = multivariate_t.logpdf(
                y, np.zeros(len(y)), np.eye(len(y)) + problem.width**2 * x @ x.T, df=2 * problem.shape
            )
        else:

            def integrand(t, p=problem, x=x, y=y, value=value):
                v = math.exp(t)
                if p.kind == "HalfCauchy":
                    prior = halfcauchy.logpdf(math.sqrt(v), scale=p.shape) + 0.5 * t - math.log(2)
                else:
                    prior = invgamma.logpdf(v, p.shape, scale=p.shape) + t
                # By the coefficients' precision matrix: the data's covariance matrix is nearly singular.
                ratio = p.width**2 * (1 if p.tied else 1 / v)
                precision = x.T @ x + np.eye(x.shape[1]) / ratio
                rest = y - x @ np.linalg.solve(precision, x.T @ y)
                log_det = len(y) * t + np.linalg.slogdet(ratio * precision)[1]
                density = -0.5 * (len(y) * math.log(2 * math.pi) + log_det + y @ rest / v)
                return math.exp(density + prior - value)

            middle = 2 * math.log(problem.noise)
            points = [middle - 2, middle, middle + 2, middle + 4]
            mass, _ = quad(integrand, middle - 12, middle + 40, points=points, epsabs=0, epsrel=1e-9, limit=400)
            second = value + math.log(mass)
        # Up to 1e9 is the condition number of the dense matrices, and 1e-8 the share that the adaptive rule misses.
        assert value == pytest.approx(second, abs=error + 1e-6), problem


@pytest.mark.calibration
@pytest.mark.parametrize("kind", ["Gamma", "InverseGamma", "HalfCauchy"])
@pytest.mark.parametrize("tied", [True, False])
def test_vague_scales_are_the_integral_of_the_target(kind, tied):
    problem = extremes.VagueScale(kind, tied, 0.7, 3.0, 1, 8, 1.3, 0.8, 5)
    log_f, dim = density(problem)
    assert dim == 2
    assert log_integral_over_space(log_f, [0.1, 0.1])[0] == pytest.approx(problem.log_evidence()[0], abs=1e-6)


@pytest.mark.calibration
def test_shrunk_means_against_adaptive_quadrature_and_the_target():
    for problem in problems(extremes.ShrunkMeans):

        def integrand(t, p=problem):
            return halfcauchy.pdf(math.exp(t), scale=p.width) * math.exp(t) * norm.pdf(
                p.y, scale=math.hypot(1, math.exp(t))
            ).prod()  # fmt: skip

        middle = math.log(problem.width)
        points = sorted({middle, 0.0, 1.0, 2.0, 3.0})
        value, _ = quad(integrand, middle - 50, 50, points=points, epsabs=0, epsrel=1e-10, limit=400)
        assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-7)
    problem = extremes.ShrunkMeans(0.8, (0.9,))
    log_f, _ = density(problem)
    scale = np.linspace(-25, 25, 2001)  # its logarithm

    def given(t):
        b = math.hypot(1, math.exp(min(t, 3))) * np.linspace(-12, 12, 1201)
        return logsumexp(log_f(np.stack([np.full_like(b, t), b], 1))) + math.log(b[1] - b[0])

    # The observation holds the mean where its prior is wide, and the prior does where it is narrow, to a spike.
    broad = [given(t) for t in scale if t > -3]
    known = norm.logpdf(0.9, scale=np.hypot(1, np.exp(scale[scale <= -3])))
    narrow = known + halfcauchy.logpdf(np.exp(scale[scale <= -3]), scale=0.8) + scale[scale <= -3]
    value = logsumexp([*broad, *narrow]) + math.log(scale[1] - scale[0])
    assert problem.log_evidence()[0] == pytest.approx(value, abs=1e-6)


def test_modes_are_the_integral_of_the_target():
    line = extremes.NormalModes((-0.4, -1.3, -3.0), ((1.2,), (-0.7,), (0.1,)), (0.05, 0.3, 0.8))
    assert on_a_mesh(line, [(-9, 9)], 20_001) == pytest.approx(line.log_evidence()[0], abs=1e-9)
    plane = extremes.NarrowInsideWide((-0.2, -2.0), ((-0.5, -0.5), (0.3, 0.1)), (1.5, 0.06))
    assert on_a_mesh(plane, [(-9, 9)] * 2, 1001) == pytest.approx(plane.log_evidence()[0], abs=1e-9)


def test_narrow_modes_have_the_share_that_was_drawn():
    for problem in problems(extremes.NarrowInsideWide, 20):
        parts = problem.log_parts()
        assert 0.049 < math.exp(parts[1] - problem.log_evidence()[0]) < 0.601
        assert problem.scales[1] <= 0.3


def logit(x):
    return math.log(x) - math.log1p(-x)


@pytest.mark.parametrize("kind", ["wall", "shift", "normal"])
def test_edges_are_the_integral_of_the_target(kind):
    steep = extremes.HardEdges(kind, 3.0, 40.0, (0.37,))
    flat = extremes.HardEdges(kind, 0.2, 2.0, (-0.4 if kind == "normal" else 0.9,))
    for problem in (steep, flat):
        low = logit(problem.ends[0]) if kind == "wall" else -60.0
        high = logit(problem.ends[0]) if kind == "shift" else 60.0
        value = by_the_target(problem, [low, high])
        assert problem.log_evidence()[0] == pytest.approx(value, abs=1e-8)


def test_steep_edges_against_many_digits():
    for mean, steepness in [(-0.5, 300.0), (1.4, 80.0), (0.6, 5.0)]:
        with workdps(60):
            low, high = -steepness * mpf(mean), steepness * (1 - mpf(mean))
            tails = (high, low) if low < 0 else (-low, -high)  # lower ones, which keep their digits
            value = mp.log(mp.ncdf(tails[0]) - mp.ncdf(tails[1])) + mp.log(mp.sqrt(2 * mp.pi) / steepness)
        problem = extremes.HardEdges("normal", 2.0, steepness, (mean,))
        assert problem.log_evidence()[0] == pytest.approx(float(value), abs=1e-9)
    for kind, end in [("wall", 0.05), ("shift", 0.05), ("shift", 0.9)]:
        steepness = 300.0 if kind == "wall" else 2.5
        first, last = (end, 1.0) if kind == "wall" else (0.0, end)

        def likelihood(x, s=steepness, end=end, kind=kind):
            return (x / end) ** -s if kind == "wall" else math.exp(s * (x - end))

        value, _ = quad(likelihood, first, last, epsabs=0, epsrel=1e-12, limit=400)
        problem = extremes.HardEdges(kind, 2.0, steepness, (end,))
        assert problem.log_evidence()[0] == pytest.approx(math.log(value), abs=1e-9)
    # Several sides add up, and a power of minus one is the limit of those beside it.
    both = extremes.HardEdges("wall", 2.0, 7.0, (0.2, 0.6)).log_evidence()[0]
    apart = [extremes.HardEdges("wall", 2.0, 7.0, (end,)).log_evidence()[0] for end in (0.2, 0.6)]
    assert both == pytest.approx(sum(apart), abs=1e-12)
    beside = extremes.HardEdges("wall", 2.0, 1 + 1e-9, (0.2,)).log_evidence()[0]
    assert extremes.HardEdges("wall", 2.0, 1.0, (0.2,)).log_evidence()[0] == pytest.approx(beside, abs=1e-7)


def test_a_change_point_is_the_integral_of_the_target():
    problem = extremes.ChangePoint(2.0, 0.8, (0.4, 1.1, -0.6, -0.9))
    log_f, dim = density(problem)
    assert dim == 3
    level = np.linspace(-14, 14, 141)
    before, after = (part.ravel() for part in np.meshgrid(level, level))
    edges = [0, 0.5, 1.5, 2.5, 3.5, 4]
    parts = []
    for low, high in zip(edges, edges[1:], strict=False):
        # Constant within the interval; the coordinate's density is the slope of its logistic function.
        u, share = logit((low + high) / 8), (high - low) / 4
        points = np.stack([np.full_like(before, u), before, after], 1)
        slope = math.log((low + high) / 8) + math.log1p(-(low + high) / 8)
        parts.append(logsumexp(log_f(points)) + 2 * math.log(0.2) - slope + math.log(share))
    assert problem.log_evidence()[0] == pytest.approx(logsumexp(parts), abs=1e-9)


def test_ridges_are_the_integral_of_the_target_and_normal_densities():
    for d in (2, 3):
        problem = extremes.Ridge(False, d, 1.5, 0.3, (1.2, 0.7))
        log_f, _ = density(problem)
        assert log_integral_over_space(log_f, [0.4] * d)[0] == pytest.approx(problem.log_evidence()[0], abs=1e-6)
    for problem in problems(extremes.Ridge, 12):
        y = np.array(problem.y)
        value, error = problem.log_evidence()
        if not problem.product:
            columns = np.ones((len(y), problem.num_duplicates))
            second = many_digits(columns, y, problem.prior, problem.noise)
            assert value == pytest.approx(second, abs=10 * error), problem
    product = extremes.Ridge(True, 2, 0.9, 0.4, (0.7, 1.0))
    assert on_a_mesh(product, [(-8, 8)] * 2, 1201) == pytest.approx(product.log_evidence()[0], abs=1e-7)


def test_a_product_against_many_digits():
    problem = extremes.Ridge(True, 2, 10.0, 0.02, (37.001, 36.98))
    with workdps(30):
        y, prior, noise = [mpf(v) for v in problem.y], mpf(problem.prior), mpf(problem.noise)

        def integrand(a):
            # One factor is integrated out by the data's covariance matrix, of rank one above the noise.
            total = noise**2 + len(y) * (a * prior) ** 2
            inside = (sum(v * v for v in y) - (a * prior * sum(y)) ** 2 / total) / noise**2
            log_det = (len(y) - 1) * mp.log(noise**2) + mp.log(total)
            density = mp.exp(-(inside + log_det + len(y) * mp.log(2 * mp.pi)) / 2)
            return 2 * density * mp.npdf(a, 0, prior)

        value = float(mp.log(mp.quad(integrand, [0, 0.1, 0.5, 1, 2, 5, 10, 20, 40, 80, 140])))
    assert problem.log_evidence()[0] == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("kind", ["Normal", "Uniform", "Gamma", "Beta", "HalfCauchy"])
def test_a_constant_is_the_integral_of_the_target(kind):
    problem = extremes.ConstantLikelihood(kind, 12.5, (0.9,))
    assert by_the_target(problem, [-60.0, 60.0]) == pytest.approx(12.5, abs=1e-7)


def test_an_angle_is_the_integral_of_the_target():
    for problem in problems(extremes.AngleAcrossCut, 8):
        value, error = problem.log_evidence()
        assert by_the_target(problem, [-90.0, 0.0, 90.0]) == pytest.approx(value, abs=error), problem


@pytest.mark.calibration
def test_scaled_regressions_against_many_digits_and_the_target():
    for problem in (*problems(extremes.ScaledRegression, 12), *problems(extremes.ManyCoefficients, 2)):
        x, y, prior, noise = problem._data()
        value, error = problem.log_evidence()
        assert value == pytest.approx(many_digits(x, y, prior, noise), abs=error), problem
    for problem in (
        extremes.ScaledRegression(2, 10.0, 1.0, 0.0, 2.0, 0.7, 9, 1),
        extremes.ScaledRegression(1, 1.0, 1.0, 30.0, 2.0, 0.7, 9, 1),
        extremes.ScaledRegression(3, 3.0, 1.0, 0.0, 1.0, 1.0, 12, 2),
    ):
        log_f, dim = density(problem)
        assert log_integral_over_space(log_f, [0.0] * dim)[0] == pytest.approx(problem.log_evidence()[0], abs=1e-6)


def test_scale_and_noise_only_shift_the_answer():
    for p in problems(extremes.ScaledRegression, 6):
        plain = extremes.ScaledRegression(p.num_columns, p.condition, 1.0, p.offset, p.prior, 1.0, p.num_data, p.seed)
        shift = p.num_data * math.log(p.noise)
        assert p.log_evidence()[0] + shift == pytest.approx(plain.log_evidence()[0], abs=1e-7)


def test_many_rows_are_the_integral_of_the_target_in_double_precision():
    problem = extremes.FiftyThousandRows(1, 1.0, 1.0, 0.0, 2.0, 0.5, 50_000, 3)
    x, y, _, noise = problem._data()
    assert {value.dtype for value in problem.args()} == {torch.float32}
    assert (x == np.float32(x)).all() and (y == np.float32(y)).all()
    log_f, dim = density(problem)
    centre, width = x[:, 0] @ y / (x[:, 0] @ x[:, 0]), noise / math.sqrt(x[:, 0] @ x[:, 0])
    points = centre + width * np.linspace(-10, 10, 101)
    value = logsumexp(log_f(points[:, None])) + math.log(points[1] - points[0])
    assert dim == 1 and problem.log_evidence()[0] == pytest.approx(value, abs=1e-6)
    assert problem.case().target().dtype == torch.float32 and len(repr(problem)) < 200


@pytest.mark.parametrize("family", [*EXTREME_FAMILIES, extremes.FiftyThousandRows])
def test_problems_are_determined_rebuilt_and_shrunk(family):
    for problem, same in zip(problems(family, 3), problems(family, 3), strict=True):
        assert problem == same and problem.log_evidence() == same.log_evidence()
        assert type(problem) is family and eval(repr(problem), vars(generated)) == problem  # noqa: S307  our own names
        assert type(problem).__doc__ and problem.case().name == repr(problem)
        for form in problem.simpler():
            assert math.isfinite(form.log_evidence()[0]) and form.case().target().dim >= 1
    assert problems(family, 1) != problems(family, 1, seed=8)


def test_the_exam_draws_from_all_of_them():
    assert set(EXTREME_FAMILIES) <= set(generated.FAMILIES)
    assert {type(generate(seed, EXTREME_FAMILIES)) for seed in range(100)} == set(EXTREME_FAMILIES)
    with pytest.raises(SettingsError):
        generate(-1, EXTREME_FAMILIES)
