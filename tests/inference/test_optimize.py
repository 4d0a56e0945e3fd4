"""Maximization: quadratics in one step, a curved valley, corners, starts without a value, starts that do not meet."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from bayeskit._core.randomness import new_generator
from bayeskit.inference._optimize import (
    InverseHessian,
    adam_path,
    lbfgs,
    lbfgs_path,
    negative_hessian,
    newton,
    refine_mode,
    saddle_free_inverse,
    scipy_lbfgs,
)

DOUBLE = torch.float64
FAILURE_RATE = 1e-5
PRECISION = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 40.0]], dtype=DOUBLE)
CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)


def quadratic(u):
    pull = (CENTRE - u) @ PRECISION
    return -0.5 * ((CENTRE - u) * pull).sum(-1), pull


def rosenbrock(u):
    """The curved valley of Rosenbrock (1960), upside down: its maximum is zero, at one and one."""
    x, y = u.unbind(-1)
    off = y - x.square()
    return -(1 - x).square() - 100 * off.square(), torch.stack([2 * (1 - x) + 400 * x * off, -200 * off], -1)


def test_searches_from_many_starts_do_not_know_of_each_other():
    start = torch.tensor([[-1.2, 1.0], [0.5, -0.5], [0.0, -5.0]], dtype=DOUBLE)
    scale = torch.ones(2, dtype=DOUBLE)
    *_, together = lbfgs_path(rosenbrock, start, 200, scale)
    for row, point in enumerate(start):
        *_, alone = lbfgs_path(rosenbrock, point[None], 200, scale)
        torch.testing.assert_close(together.position[row], alone.position[0], rtol=0, atol=1e-9)
    assert float(together.value.min()) > -1e-3


def test_a_start_without_a_value_stays_and_harms_no_other():
    def half_line(u):
        x = u[:, 0]
        return torch.where(x > 0, x.log() - x, torch.nan), (1 / x - 1).unsqueeze(-1)

    ends, values, _ = lbfgs(half_line, torch.tensor([[-1.0], [4.0]], dtype=DOUBLE))
    assert values[0] == -torch.inf and ends[0] == -1
    assert abs(float(ends[1]) - 1) < 0.05 and abs(float(values[1]) + 1) < 2e-3


def pairs_of(precision, n, count, generator):
    """Steps and what they show of a quadratic, the third useless to the second search."""
    result = []
    for k in range(count):
        step = torch.randn(n, len(precision), generator=generator, dtype=DOUBLE)
        bend = step @ precision
        weight = 1 / (step * bend).sum(-1)
        if k == 2:
            weight = weight * torch.tensor([1.0, 0.0] + [1.0] * (n - 2), dtype=DOUBLE)
        result.append((step, bend, weight))
    return tuple(result)


def dense_inverse(diagonal, pairs, row):
    """BFGS updates of the inverse Hessian as matrices."""
    d = pairs[0][0].shape[1]
    identity = torch.eye(d, dtype=DOUBLE)
    inverse = torch.diag(diagonal)
    for step, bend, weight in pairs:
        s, y, w = step[row], bend[row], weight[row]
        left = identity - w * torch.outer(s, y)
        inverse = left @ inverse @ left.T + w * torch.outer(s, s)
    return inverse


@pytest.fixture
def curved():
    generator = new_generator(1)
    root = torch.randn(5, 5, generator=generator, dtype=DOUBLE)
    precision = root @ root.T + 0.1 * torch.eye(5, dtype=DOUBLE)
    diagonal = torch.rand(3, 5, generator=generator, dtype=DOUBLE) + 0.5
    return InverseHessian(diagonal, pairs_of(precision, 3, 4, generator))


def test_the_inverse_hessian_is_that_of_bfgs(curved):
    vector = torch.randn(3, 5, generator=new_generator(2), dtype=DOUBLE)
    for row in range(3):
        exact = dense_inverse(curved.diagonal[row], curved.pairs, row)
        torch.testing.assert_close(curved.times(vector)[row], exact @ vector[row], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(curved.log_determinant()[row], torch.logdet(exact), rtol=1e-9, atol=1e-9)
    some = curved.of(torch.tensor([2, 0]))
    torch.testing.assert_close(some.log_determinant(), curved.log_determinant()[[2, 0]])


def test_draws_have_the_covariance_of_the_inverse_hessian(curved):
    """Squares along any direction, whitened by what they should be, are chi-square with one degree of freedom."""
    count = 20_000
    draws = curved.draws(count, new_generator(3))
    directions = torch.randn(12, 5, generator=new_generator(4), dtype=DOUBLE)
    scores = []
    for row in range(3):
        exact = dense_inverse(curved.diagonal[row], curved.pairs, row)
        along = draws[:, row] @ directions.T
        relative = along.square().mean(0) / ((directions @ exact) * directions).sum(-1)
        scores.append((relative - 1) / math.sqrt(2 / count))
    assert float(torch.stack(scores).abs().max()) < norm.isf(FAILURE_RATE / 72), scores


def test_a_search_ends_in_the_last_of_its_states():
    def hill(u):
        return -u.square().sum(-1), -2 * u

    start = torch.tensor([[1.0, 300.0], [-2.0, 5.0], [4.0, -80.0]], dtype=DOUBLE)
    path = list(lbfgs_path(hill, start, 80))
    ends, values, count = lbfgs(hill, start)
    assert torch.equal(path[-1].position, ends) and torch.equal(path[-1].value, values)
    assert path[-1].num_gradients == count == 3 * len(path)
    assert not bool(path[0].moved.any()) and torch.equal(path[0].position, start)


def test_a_newton_step_on_a_quadratic_is_exact():
    start = CENTRE + 0.1
    precision, count = negative_hessian(quadratic, start)
    torch.testing.assert_close(precision, PRECISION, rtol=1e-8, atol=1e-8)
    assert count % (2 * len(start)) == 0
    refined = refine_mode(quadratic, start, (0.0, 1.0))
    torch.testing.assert_close(refined.position, CENTRE, rtol=0, atol=1e-9)
    assert refined.gain < 1e-15 and abs(refined.value) < 1e-15


def test_newton_steps_end_at_the_maximum_of_the_valley():
    refined = refine_mode(rosenbrock, torch.tensor([0.99, 0.981], dtype=DOUBLE))
    torch.testing.assert_close(refined.position, torch.ones(2, dtype=DOUBLE), rtol=0, atol=1e-6)
    wanted = torch.tensor([[802.0, -400.0], [-400.0, 200.0]], dtype=DOUBLE)
    torch.testing.assert_close(refined.precision, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("end", [CENTRE + 5, CENTRE])
def test_no_newton_step_is_taken_far_from_a_maximum_or_at_it(end):
    refined = refine_mode(quadratic, end)
    assert torch.equal(refined.position, end)


def test_inverses_count_curvatures_as_positive_in_any_units():
    inverse, log_root = saddle_free_inverse(PRECISION)
    torch.testing.assert_close(inverse, torch.linalg.inv(PRECISION), rtol=1e-12, atol=1e-12)
    assert abs(float(log_root) + 0.5 * float(torch.logdet(PRECISION))) < 1e-12
    units = torch.tensor([1e-6, 1e5], dtype=DOUBLE)
    saddles = torch.diag_embed(torch.tensor([[1.0, 1.0], [-1.0, 2.0], [3.0, -1.0]], dtype=DOUBLE) * units.square())
    inverse, _ = saddle_free_inverse(saddles)
    torch.testing.assert_close(
        inverse, torch.diag_embed(1 / saddles.abs().diagonal(dim1=-2, dim2=-1)), rtol=1e-12, atol=1e-9
    )
    flat, _ = saddle_free_inverse(torch.zeros(2, 2, dtype=DOUBLE))
    assert bool(flat.isfinite().all()) and float(torch.linalg.eigvalsh(flat).min()) > 0


def test_a_saddle_is_not_refined():
    def saddle(u):
        signs = torch.tensor([-1.0, 1.0], dtype=DOUBLE)
        return (0.5 * signs * u.square()).sum(-1), signs * u

    refined = refine_mode(saddle, torch.tensor([0.1, 0.1], dtype=DOUBLE))
    assert refined.gain == math.inf and torch.equal(refined.position, torch.full((2,), 0.1, dtype=DOUBLE))


def test_one_search_ends_at_the_maximum_of_the_valley_to_rounding():
    def valley(x):
        value, gradient = rosenbrock(torch.from_numpy(x))
        return float(value), gradient.numpy()

    end, value, *_ = scipy_lbfgs(valley, np.array([-1.2, 1.0]), ftol=1e-16, gtol=1e-12)
    np.testing.assert_allclose(end, 1.0, rtol=0, atol=1e-8)
    assert abs(value) < 1e-15


def test_a_search_reaches_the_edge_of_the_support():
    """Beyond x = 1 there is no value, and the function rises up to there; under a barrier of 1e300 it ends at 0.69."""
    visited = []

    def edge(x):
        visited.append(float(x[0]))
        value = 3 * x[0] - x[1] ** 2 if x[0] <= 1 else math.nan
        return float(value), np.array([3.0, -2 * x[1]])

    end, value, *_ = scipy_lbfgs(edge, np.array([-4.0, 2.0]), maxiter=200)
    assert max(visited) > 1 >= end[0] > 1 - 1e-6 and abs(end[1]) < 2
    assert value == edge(end)[0]


def test_a_step_that_ends_without_a_value_after_a_large_gain_is_rejected():
    """The line search lengthens a step on a straight slope until it leaves the support, far above where it began."""

    def cliff(x):
        return (float(1e4 * x[0]), np.array([1e4])) if x[0] < 2.5 else (math.nan, np.array([math.nan]))

    end, value, *_ = scipy_lbfgs(cliff, np.array([0.0]), maxiter=50)
    assert 1 < end[0] < 2.5 and value == 1e4 * end[0]


def test_a_search_from_a_start_without_a_value_says_so():
    end, value, *_ = scipy_lbfgs(lambda x: (math.nan, np.zeros(2)), np.array([1.0, 2.0]))
    assert value == -math.inf and end.tolist() == [1.0, 2.0]


def test_a_search_keeps_its_bounds_and_says_how_it_ended():
    def valley(x):
        value, gradient = rosenbrock(torch.from_numpy(x))
        return float(value), gradient.numpy()

    start, bounds = np.array([-1.2, 1.0]), [(-2.0, 0.5), (-2.0, 2.0)]
    bounded = scipy_lbfgs(valley, start, bounds=bounds, ftol=1e-16, gtol=1e-12)
    np.testing.assert_allclose(bounded.position, [0.5, 0.25], rtol=0, atol=1e-8)  # the valley's floor at the bound
    np.testing.assert_allclose(bounded.gradient, valley(bounded.position)[1], rtol=0, atol=0)
    assert bounded.finished and bounded.gradient[0] > 0.5
    assert not scipy_lbfgs(valley, start, maxiter=3).finished
    seen = iter([False, False, True])
    stopped = scipy_lbfgs(valley, start, stop=lambda: next(seen))
    assert stopped.num_iterations == 3 and not stopped.finished and stopped.value > valley(start)[0]


def test_adam_by_hand():
    """The moments of the paper, and a rate that falls linearly."""
    betas, eps, rate, steps = (0.8, 0.95), 1e-3, 0.3, 12
    position, first, second = torch.tensor([2.0, -1.0], dtype=DOUBLE), 0.0, 0.0
    path = list(adam_path(lambda u: -2 * u, position, steps, rate, final_share=0.25, betas=betas, eps=eps))
    for t, found in enumerate(path, 1):
        gradient = -2 * position
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        share = 1 - 0.75 * (t - 1) / steps
        step = first / (1 - betas[0] ** t) / ((second / (1 - betas[1] ** t)).sqrt() + eps)
        position = position + rate * share * step
        torch.testing.assert_close(found, position, rtol=1e-12, atol=1e-12)
    assert len(path) == steps


def test_adam_stays_inside_and_ends_in_the_corner():
    start = torch.tensor([0.2, 0.7], dtype=DOUBLE)
    path = list(
        adam_path(lambda u: torch.tensor([1.0, -1.0], dtype=DOUBLE), start, 60, 0.1, inside=lambda u: u.clamp(0, 1))
    )
    assert bool(((torch.stack(path) >= 0) & (torch.stack(path) <= 1)).all()) and path[-1].tolist() == [1.0, 0.0]
    assert start.tolist() == [0.2, 0.7]


class Batch:
    """One function for each row of ``others``, for Newton's method."""

    def __init__(self, function, *others):
        self.function, self.others, self.num_derivatives = function, others, 0

    def values(self, position, rows):
        found = torch.func.vmap(self.function)(position, *(each[rows] for each in self.others))
        return found.nan_to_num(nan=-math.inf)

    def derivatives(self, position, rows):
        self.num_derivatives += len(rows)
        arguments = (position, *(each[rows] for each in self.others))
        gradient, hessian = (of(self.function) for of in (torch.func.grad, torch.func.hessian))
        return self.values(position, rows), *(torch.func.vmap(f)(*arguments) for f in (gradient, _negative(hessian)))


def _negative(function):
    return lambda *arguments: -function(*arguments)


def test_newton_needs_one_step_on_quadratics_and_one_look_to_see_it():
    centres = torch.tensor([[1.0, -2.0, 0.5], [100.0, 0.0, -7.0]], dtype=DOUBLE)
    problem = Batch(lambda u, centre: -0.5 * ((u - centre) @ PRECISION * (u - centre)).sum(), centres)
    ends, converged = newton(problem, torch.zeros(2, 3, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE))
    torch.testing.assert_close(ends, centres, rtol=0, atol=1e-12)
    assert bool(converged.all()) and problem.num_derivatives == 4


def test_newton_in_valleys_at_once_and_one_by_one():
    def valley(u, steepness):
        return -(1 - u[0]).square() - steepness * (u[1] - u[0].square()).square()

    steepness = torch.tensor([1.0, 10.0, 100.0], dtype=DOUBLE)
    start = torch.tensor([[-1.2, 1.0]], dtype=DOUBLE).expand(3, -1)
    ends, converged = newton(Batch(valley, steepness), start, torch.zeros(3, dtype=DOUBLE))
    assert bool(converged.all())
    torch.testing.assert_close(ends, torch.ones_like(ends), rtol=0, atol=1e-6)
    for row in range(3):
        alone, _ = newton(Batch(valley, steepness[row : row + 1]), start[:1], torch.zeros(1, dtype=DOUBLE))
        torch.testing.assert_close(ends[row], alone[0], rtol=0, atol=1e-12)


def test_newton_leaves_a_saddle_and_stays_inside_of_the_support():
    def bumps(u, height):
        """Minima of curvature at zero, maxima at one and minus one; without a value beyond two."""
        inside = u[0].abs() < 2
        return height * torch.where(inside, u[0].square() / 2 - u[0] ** 4 / 4, math.nan) - u[1].square()

    start = torch.tensor([[0.1, 3.0], [-0.1, -3.0]], dtype=DOUBLE)
    ends, converged = newton(Batch(bumps, torch.tensor([1.0, 5.0], dtype=DOUBLE)), start, torch.zeros(2, dtype=DOUBLE))
    wanted = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=DOUBLE)
    torch.testing.assert_close(ends, wanted, rtol=0, atol=1e-7)
    assert bool(converged.all())


def test_newton_does_not_call_a_supremum_at_infinity_a_maximum():
    problem = Batch(lambda u, rate: -torch.exp(-rate * u[0]), torch.ones(1, dtype=DOUBLE))
    _, converged = newton(problem, torch.zeros(1, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE))
    assert not bool(converged.any())


def test_newton_ends_where_little_is_missing():
    problem = Batch(lambda u, power: -(u[0].abs() ** power), torch.full((1,), 4.0, dtype=DOUBLE))
    ends, converged = newton(problem, torch.ones(1, 1, dtype=DOUBLE), torch.full((1,), 1e-3, dtype=DOUBLE))
    assert bool(converged.all()) and 1e-3 < float(ends) < 0.3
