"""Hypergradients: a closed form, central differences, the series that needs many terms, and what is refused."""

import pytest
import torch
from sklearn.datasets import load_diabetes

from bayeskit.errors import InitializationError, SettingsError, ShapeError
from bayeskit.inference._hypergradients import hypergradient

DOUBLE = torch.float64
ZERO = torch.zeros((), dtype=DOUBLE)


class Ridge:
    """Penalised squares of 300 patients, all standardised, and half the mean square of the other 142."""

    def __init__(self, dtype=DOUBLE):
        x, y = load_diabetes(return_X_y=True)
        x, y = torch.tensor(x / x.std(0), dtype=dtype), torch.tensor((y - y.mean()) / y.std(), dtype=dtype)
        self.x, self.y, self.new_x, self.new_y = x[:300], y[:300], x[300:], y[300:]

    def inner(self, b, log_penalty):
        return (self.x @ b - self.y).square().sum() + log_penalty.exp() * b.square().sum()

    def outer(self, b, log_penalty):
        return 0.5 * (self.new_x @ b - self.new_y).square().mean()

    def solution(self, log_penalty):
        gram = self.x.T @ self.x + log_penalty.exp() * torch.eye(10, dtype=DOUBLE)
        return torch.linalg.solve(gram, self.x.T @ self.y)


START, LOG_TEN = torch.zeros(10, dtype=DOUBLE), torch.tensor(10.0, dtype=DOUBLE).log()


def by_differences(function, at, step):
    """Return the derivative of a function of one number by central differences of fourth order."""
    near, far = (function(at + k * step) - function(at - k * step) for k in (1, 2))
    return float((8 * near - far) / (12 * step))


@pytest.mark.parametrize("method", ["cholesky", "conjugate_gradients"])
def test_ridge_regression(method):
    ridge = Ridge()
    found = hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, method=method)
    at = ridge.solution(LOG_TEN)
    gram = ridge.x.T @ ridge.x + 10 * torch.eye(10, dtype=DOUBLE)
    slope = ridge.new_x.T @ (ridge.new_x @ at - ridge.new_y) / len(ridge.new_y)
    closed_form = -float(slope @ torch.linalg.solve(gram, 10 * at))
    differences = by_differences(lambda log_c: ridge.outer(ridge.solution(log_c), log_c), LOG_TEN, 1e-3)
    assert found.trusted and found.gradient.shape == () and found.residual < 1e-10
    assert abs(float(found.gradient) + 0.000859095) < 1e-9
    assert abs(float(found.gradient) - closed_form) < 1e-14 and abs(float(found.gradient) - differences) < 1e-11
    assert torch.allclose(found.parameters, at, rtol=0, atol=1e-12)
    assert abs(found.outer - float(ridge.outer(at, LOG_TEN))) < 1e-12
    assert abs(found.inner - float(ridge.inner(at, LOG_TEN))) < 1e-10


@pytest.mark.calibration
def test_the_series_needs_many_terms_and_says_so():
    ridge = Ridge()
    exact = float(hypergradient(ridge.inner, ridge.outer, START, LOG_TEN).gradient)
    wanted = {6: -0.00105, 21: -0.00129, 101: -0.00107, 501: -0.000863}  # terms up to the power 5, 20, 100, 500
    for num_terms, value in wanted.items():
        found = hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, method="neumann", num_terms=num_terms)
        assert float(f"{float(found.gradient):.3g}") == pytest.approx(value, abs=1e-5 if num_terms < 500 else 1e-6)
        assert not found.trusted and f"after {num_terms} terms" in found.warnings[0]
        assert abs(float(found.gradient) / exact - 1) > 1e-3
    found = hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, method="neumann", num_terms=5000)
    assert found.trusted and abs(float(found.gradient) - exact) < 1e-12


def of_classes(b, log_penalty):
    """Penalised logistic loss with a penalty for each row of coefficients ``(3, 2)``: not quadratic, with shapes."""
    logits = Ridge().x[:60, :3] @ b
    classes = (Ridge().y[:60] > 0).long()
    return (
        torch.nn.functional.cross_entropy(logits, classes, reduction="sum")
        + (log_penalty.exp().unsqueeze(-1) * b.square()).sum()
    )


def elsewhere(b, log_penalty):
    classes = (Ridge().new_y > 0).long()
    direct = 0.01 * log_penalty.square().sum()  # the outer loss depends on the hyperparameters itself, too
    return torch.nn.functional.cross_entropy(Ridge().new_x[:, :3] @ b, classes) + direct


@pytest.mark.calibration
@pytest.mark.parametrize("method", ["cholesky", "conjugate_gradients", "neumann"])
def test_several_hyperparameters_of_a_loss_that_is_not_quadratic(method):
    log_penalty = torch.tensor([0.5, -0.3, 1.0], dtype=DOUBLE)
    start = torch.ones(3, 2, dtype=DOUBLE)
    found = hypergradient(of_classes, elsewhere, start, log_penalty, method=method, num_terms=3000)
    assert found.trusted and found.parameters.shape == (3, 2) and found.gradient.shape == (3,)

    def at(log_penalty):
        return torch.tensor(hypergradient(of_classes, elsewhere, start, log_penalty).outer, dtype=DOUBLE)

    for place, axis in enumerate(torch.eye(3, dtype=DOUBLE)):
        differences = by_differences(lambda t, axis=axis: at(log_penalty + t * axis), 0.0, 1e-2)
        assert abs(float(found.gradient[place]) - differences) < 1e-9


def test_a_search_far_from_the_minimum():
    """Newton's method without a line search diverges from here."""

    def inner(x, c):
        return torch.nn.functional.softplus(x) + torch.nn.functional.softplus(-x) + 1e-3 * (x - c) ** 2

    start = torch.tensor(20.0, dtype=DOUBLE)
    c = torch.tensor(1.0, dtype=DOUBLE)
    found = hypergradient(inner, lambda x, c: x, start, c)
    x = found.parameters
    bend = 2 * torch.sigmoid(x) * torch.sigmoid(-x) + 2e-3
    assert abs(float(2 * torch.sigmoid(x) - 1 + 2e-3 * (x - c))) < 1e-13
    assert abs(float(found.gradient - 2e-3 / bend)) < 1e-12


def test_single_precision():
    ridge = Ridge(torch.float32)
    found = hypergradient(ridge.inner, ridge.outer, START.float(), LOG_TEN.float())
    assert found.gradient.dtype == torch.float32 and abs(float(found.gradient) + 0.000859095) < 1e-6


def test_arguments_stay_as_they_are():
    ridge = Ridge()
    start, log_penalty = START.clone().requires_grad_(), LOG_TEN.clone().requires_grad_()
    with torch.no_grad():
        found = hypergradient(ridge.inner, ridge.outer, start, log_penalty)
    assert start.grad is None and log_penalty.grad is None and not found.gradient.requires_grad
    assert not found.parameters.requires_grad and torch.equal(start.detach(), START)


def test_losses_that_do_not_depend_on_something():
    def inner(x, c):
        return (x - 1.0).square().sum()

    x, c = torch.zeros(2, dtype=DOUBLE), torch.tensor(0.3, dtype=DOUBLE)
    assert float(hypergradient(inner, lambda x, c: x.sum(), x, c).gradient) == 0
    assert float(hypergradient(inner, lambda x, c: c**2, x, c).gradient) == pytest.approx(0.6)
    assert float(hypergradient(inner, lambda x, c: torch.ones(()), x, c).gradient) == 0


@pytest.mark.parametrize("method", ["cholesky", "conjugate_gradients"])
@pytest.mark.parametrize(
    ("inner", "curvature"),
    [(lambda x, c: -(x**2).sum(), "-2"), (lambda x, c: x.sum(), "0"), (lambda x, c: (x[0] - x[1] - 1) ** 2, "")],
    ids=["a maximum", "a slope", "a valley"],
)
def test_inner_losses_without_an_isolated_minimum(inner, curvature, method):
    with pytest.raises(InitializationError, match=f"not positive definite.*curvature {curvature}"):
        hypergradient(inner, lambda x, c: x.sum(), torch.ones(2, dtype=DOUBLE), ZERO, method=method)


def test_what_is_refused():
    ridge = Ridge()
    with pytest.raises(SettingsError, match="method must be one of"):
        hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, method="lu")
    with pytest.raises(SettingsError, match="num_terms"):
        hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, num_terms=0)
    with pytest.raises(ShapeError, match="the inner loss has shape \\(10,\\)"):
        hypergradient(lambda b, c: b**2, ridge.outer, START, LOG_TEN)
    with pytest.raises(ShapeError, match="the outer loss has shape \\(142,\\)"):
        hypergradient(ridge.inner, lambda b, c: ridge.new_x @ b, START, LOG_TEN)
    with pytest.raises(InitializationError, match="not finite"):
        hypergradient(lambda b, c: b.log().sum(), ridge.outer, START, LOG_TEN)
    with pytest.raises(InitializationError, match="does not vanish after 0 steps"):
        hypergradient(ridge.inner, ridge.outer, START, LOG_TEN, max_steps=0)
    at = ridge.solution(LOG_TEN)
    found = hypergradient(ridge.inner, ridge.outer, at, LOG_TEN, max_steps=0)
    assert torch.equal(found.parameters, at) and abs(float(found.gradient) + 0.000859095) < 1e-9
