import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.special import roots_hermitenorm
from torch import nn
from torch.func import functional_call, hessian, jacrev

from bayeskit._core.randomness import new_generator
from bayeskit.errors import BudgetError, DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.curvature import (
    BernoulliOutputs,
    Categorical,
    GaussianOutputs,
    OutputLikelihood,
    Poisson,
    empirical_fisher,
    fisher,
    gauss_newton,
)
from bayeskit.inference.curvature import _matrices as operator

DOUBLE = torch.float64
X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=DOUBLE)
Y = torch.tensor([0.0, 2.0, 1.0], dtype=DOUBLE)


def filled(module, scale=1.7):
    """Weights that need no random numbers."""
    size = sum(p.numel() for p in module.parameters())
    weights = torch.sin(scale * torch.arange(1, size + 1, dtype=DOUBLE))
    nn.utils.vector_to_parameters(weights, module.double().parameters())
    return module


def perceptron(*sizes):
    layers = []
    for before, after in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return filled(nn.Sequential(*layers[:-1]))


def points(*shape, phase=0.0):
    return 2 * torch.cos(1.3 * torch.arange(math.prod(shape), dtype=DOUBLE) ** 2 + phase).reshape(shape)


def jacobian(module, x):
    """By torch alone, all inputs at once, ``(n, k, p)``."""
    parameters = {k: v.detach() for k, v in module.named_parameters()}
    found = jacrev(lambda p: functional_call(module, p, (x,)))(parameters)
    return torch.cat([v.flatten(2) for v in found.values()], 2)


def line(weights=(0.0, 0.0)):
    module = nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([weights], dtype=DOUBLE))
    return module


@dataclass(frozen=True)
class Cauchy(OutputLikelihood):
    """A location family; outputs are no natural parameters."""

    def targets(self, outputs, y):
        return y

    def log_likelihood(self, outputs, y):
        return -torch.log1p((y - outputs).square()).sum(1)

    def score(self, outputs, y):
        return 2 * (y - outputs) / (1 + (y - outputs).square())

    def hessian(self, outputs, y):
        square = (y - outputs).square()
        return torch.diag_embed(2 * (1 - square) / (1 + square).square())

    def fisher(self, outputs):
        return torch.diag_embed(torch.full_like(outputs, 0.5))

    def sample(self, outputs, generator):
        return outputs + torch.empty_like(outputs).cauchy_(generator=generator)


CASES = {
    "gaussian": (GaussianOutputs(0.3), points(7, 2, phase=0.2)),
    "bernoulli": (BernoulliOutputs(), (points(7, 2) > 0).to(DOUBLE)),
    "categorical": (Categorical(), torch.tensor([0, 1, 1, 0, 0, 1, 0])),
    "poisson": (Poisson(), points(7, 2).abs().round()),
    "cauchy": (Cauchy(), points(7, 2, phase=0.9)),
}
cases = pytest.mark.parametrize(("likelihood", "y"), CASES.values(), ids=CASES)


def outcomes(likelihood, output):
    """All data that one row of outputs may give, and their probabilities."""
    if isinstance(likelihood, GaussianOutputs):
        nodes, weights = roots_hermitenorm(8)
        pairs = torch.cartesian_prod(*[torch.as_tensor(nodes)] * 2)
        weight = torch.cartesian_prod(*[torch.as_tensor(weights / weights.sum())] * 2).prod(1)
        return output + math.sqrt(likelihood.variance) * pairs, weight
    if isinstance(likelihood, Categorical):
        y = torch.arange(len(output))
    else:
        y = torch.cartesian_prod(
            *[torch.arange(2.0 if isinstance(likelihood, BernoulliOutputs) else 60.0, dtype=DOUBLE)] * 2
        )
    return y, likelihood.log_likelihood(output.expand(len(y), -1), y).exp()


def test_reference_values():
    for weights in ((0.0, 0.0), (0.5, 0.5), (-3.0, 8.0)):
        found = fisher(line(weights), GaussianOutputs(), X).matrix()
        torch.testing.assert_close(found, torch.tensor([[3.0, 3.0], [3.0, 5.0]], dtype=DOUBLE), rtol=0, atol=1e-14)
    at_zero = empirical_fisher(line(), GaussianOutputs(), X, Y).matrix()
    torch.testing.assert_close(at_zero, torch.tensor([[5.0, 6.0], [6.0, 8.0]], dtype=DOUBLE), rtol=0, atol=1e-14)
    at_fit = empirical_fisher(line((0.5, 0.5)), GaussianOutputs(), X, Y).matrix()
    torch.testing.assert_close(at_fit, torch.tensor([[1.5, 1.5], [1.5, 2.0]], dtype=DOUBLE), rtol=0, atol=1e-14)


def test_logistic_regression():
    module = line((0.7, -1.1))
    p = torch.sigmoid(X @ torch.tensor([0.7, -1.1], dtype=DOUBLE))
    expected = X.mT @ torch.diag(p * (1 - p)) @ X
    torch.testing.assert_close(fisher(module, BernoulliOutputs(), X).matrix(), expected, rtol=0, atol=1e-14)


@cases
def test_derivatives_in_outputs(likelihood, y):
    outputs = points(7, 2, phase=0.4)
    score = torch.func.grad(lambda f: likelihood.log_likelihood(f, y).sum())(outputs)
    torch.testing.assert_close(likelihood.score(outputs, y), score, rtol=1e-13, atol=1e-13)
    whole = hessian(lambda f: -likelihood.log_likelihood(f, y).sum())(outputs)
    rows = torch.arange(7)
    torch.testing.assert_close(likelihood.hessian(outputs, y), whole[rows, :, rows], rtol=1e-12, atol=1e-13)
    root = likelihood.fisher_root(outputs)
    torch.testing.assert_close(root @ root.mT, likelihood.fisher(outputs), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "categorical", "poisson"])
def test_fisher_is_the_mean_outer_product_over_all_labels(name):
    likelihood, x, module = CASES[name][0], points(4, 3), perceptron(3, 3, 2)
    expected = 0
    for row, output in zip(jacobian(module, x), module(x).detach(), strict=True):
        y, probability = outcomes(likelihood, output)
        assert abs(float(probability.sum()) - 1) < 1e-12
        gradients = likelihood.score(output.expand(len(y), -1), y) @ row
        expected = expected + gradients.mT @ (probability.unsqueeze(1) * gradients)
    torch.testing.assert_close(fisher(module, likelihood, x).matrix(), expected, rtol=1e-11, atol=1e-12)


def test_a_wrong_root_is_noticed(monkeypatch):
    monkeypatch.setattr(Categorical, "fisher_root", lambda self, f: torch.diag_embed(f.softmax(1).sqrt()))
    with pytest.raises(AssertionError):
        test_fisher_is_the_mean_outer_product_over_all_labels("categorical")


@cases
def test_gauss_newton_is_the_hessian_of_linear_models(likelihood, y):
    module, x = filled(nn.Linear(3, 2)), points(7, 3)
    names, start = [n for n, _ in module.named_parameters()], nn.utils.parameters_to_vector(module.parameters())

    def loss(vector):
        weight, bias = vector[:6].reshape(2, 3), vector[6:]
        outputs = functional_call(module, dict(zip(names, (weight, bias), strict=True)), (x,))
        return -likelihood.log_likelihood(outputs, y).sum()

    found = gauss_newton(module, likelihood, x, y).matrix()
    torch.testing.assert_close(found, hessian(loss)(start.detach()), rtol=1e-11, atol=1e-12)
    same = torch.allclose(found, fisher(module, likelihood, x).matrix(), rtol=1e-10, atol=1e-12)
    assert same == likelihood.natural


def test_empirical_fisher_is_a_sum_over_data():
    likelihood, y = CASES["categorical"]
    module, x = perceptron(3, 4, 2), points(7, 3)
    expected = 0
    for row, label in zip(x, y, strict=True):
        module.zero_grad()
        nn.functional.cross_entropy(module(row.unsqueeze(0)), label.unsqueeze(0)).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
        expected = expected + torch.outer(gradient, gradient)
    found = empirical_fisher(module, likelihood, x, y)
    torch.testing.assert_close(found.matrix(), expected, rtol=1e-12, atol=1e-13)
    halved = empirical_fisher(module, likelihood, x, y, mean=True)
    torch.testing.assert_close(halved.matrix(), expected / 7, rtol=1e-12, atol=1e-13)


def matrices(sizes=(3, 4, 2)):
    module, x = perceptron(*sizes), points(7, sizes[0])
    return [
        fisher(module, Categorical(), x, mean=True),
        gauss_newton(module, GaussianOutputs(0.3), x, CASES["gaussian"][1]),
        gauss_newton(module, Cauchy(), x, CASES["cauchy"][1]),
        empirical_fisher(module, Poisson(), x, CASES["poisson"][1]),
    ]


@pytest.mark.parametrize("small", [False, True])
def test_products_diagonals_and_traces(small, monkeypatch):
    if small:  # several blocks, the last of which is not full
        monkeypatch.setattr(operator, "PRODUCT_ROWS", 3)
        monkeypatch.setattr(operator, "BLOCK_SIZE", 28 * 2 * 2)
    for found in matrices():
        whole = found.matrix()
        assert found.shape == whole.shape == (26, 26)
        columns = points(26, 20)
        torch.testing.assert_close(found @ columns, whole @ columns, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found @ columns[:, 0], whole @ columns[:, 0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.diagonal(), whole.diagonal(), rtol=1e-12, atol=1e-12)
        exact = found.trace()
        assert exact.standard_error == 0 and abs(exact.value - float(whole.trace())) < 1e-10


def test_a_dropped_sign_is_noticed(monkeypatch):
    right = operator.Curvature._rows
    monkeypatch.setattr(operator.Curvature, "_rows", lambda self: ((rows, None) for rows, _ in right(self)))
    with pytest.raises(AssertionError):
        test_products_diagonals_and_traces(False, monkeypatch)


@pytest.mark.calibration
def test_random_traces_agree_within_their_error(limit):
    for found in matrices():
        estimate = found.trace(num_probes=300, seed=3)
        assert 0 < estimate.standard_error < abs(found.trace().value)
        assert abs(estimate.value - found.trace().value) < limit(4) * estimate.standard_error
        assert found.trace(num_probes=5, seed=3) == found.trace(num_probes=5, seed=3)


def test_dual_and_matrix_share_eigenvalues():
    module, x = perceptron(3, 8, 2), points(7, 3)  # 50 parameters, 14 outputs
    found = fisher(module, GaussianOutputs(), x)
    rows = jacobian(module, x).flatten(0, 1)
    torch.testing.assert_close(found.dual(), rows @ rows.mT, rtol=1e-12, atol=1e-12)
    for curvature in (
        found,
        empirical_fisher(module, GaussianOutputs(), x, points(7, 2), mean=True),
        *matrices((3, 1, 2)),
    ):
        expected = torch.linalg.eigvalsh(curvature.matrix())
        torch.testing.assert_close(curvature.eigenvalues(), expected, rtol=1e-10, atol=1e-11)


def test_indefinite_matrices_have_no_dual():
    found = gauss_newton(line(), Cauchy(), X, 3 * Y.unsqueeze(1))
    assert float(found.eigenvalues()[0]) < 0
    with pytest.raises(ModelError, match="indefinite.*Fisher information"):
        found.dual()


@pytest.mark.parametrize("width", [2, 9])  # fewer and more parameters than outputs of all data
def test_solvers_agree(width):
    module, x = perceptron(3, width, 2), points(7, 3)
    for found in (
        fisher(module, Categorical(), x),
        fisher(module, GaussianOutputs(0.3), x, mean=True),
        empirical_fisher(module, GaussianOutputs(), x, points(7, 2)),
    ):
        v = points(found.shape[0])
        expected = torch.linalg.solve(found.matrix() + 0.1 * torch.eye(len(v), dtype=DOUBLE), v)
        torch.testing.assert_close(found.solve_exactly(v, 0.1), expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(found.solve(v, 0.1), expected, rtol=1e-7, atol=1e-8)


def test_solvers_say_why_they_cannot():
    found = fisher(perceptron(3, 9, 2), GaussianOutputs(), points(7, 3))
    v = points(found.shape[0])
    with pytest.raises(SettingsError, match="larger damping"):
        found.solve_exactly(v, 0.0)
    with pytest.raises(BudgetError, match="raise damping"):
        found.solve(v, 1e-3, max_iterations=2)
    with pytest.raises(SettingsError, match="not negative"):
        found.solve(v, -1.0)
    with pytest.raises(ShapeError, match="v must be"):
        found.solve(v[:-1], 1.0)
    with pytest.raises(DataError, match="not finite"):
        found.solve(v / 0, 1.0)
    with pytest.raises(ShapeError, match="multiplied"):
        found @ v[:3]


def test_matrices_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(operator, "_LARGEST", 10)
    found = fisher(perceptron(3, 4, 2), GaussianOutputs(), points(7, 3))
    with pytest.raises(SettingsError, match="26 rows.*multiply by vectors"):
        found.matrix()
    with pytest.raises(SettingsError, match="14 rows"):
        found.dual()
    assert found.diagonal().shape == (26,)
    monkeypatch.setattr(operator, "_LARGEST", 15)
    with pytest.raises(SettingsError, match="14 x 26 numbers.*freeze"):
        found.dual()


def test_frozen_parameters_are_constants():
    module, x = perceptron(3, 4, 2), points(7, 3)
    whole = fisher(module, GaussianOutputs(), x).matrix()
    module[0].weight.requires_grad_(False)
    torch.testing.assert_close(fisher(module, GaussianOutputs(), x).matrix(), whole[12:, 12:], rtol=0, atol=1e-13)


class Tied(nn.Module):
    """Words, compared with themselves: one matrix in two places, whole numbers as inputs."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 3)
        self.compare = nn.Linear(3, 4, bias=False)
        self.compare.weight = self.words.weight

    def forward(self, x):
        return self.compare(torch.tanh(self.words(x)))


def test_shared_weights_count_once():
    module, x = filled(Tied()), torch.tensor([0, 2, 3, 2])
    found = fisher(module, Categorical(), x)
    weight = module.words.weight.detach()
    rows = jacrev(lambda w: torch.tanh(w[x]) @ w.mT)(weight).flatten(2)
    p = module(x).detach().softmax(1)
    centre = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    expected = torch.einsum("nkp,nkl,nlq->pq", rows, centre, rows)
    assert found.shape == (12, 12)
    torch.testing.assert_close(found.matrix(), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found @ torch.eye(12, dtype=DOUBLE), expected, rtol=1e-12, atol=1e-13)


def test_later_changes_of_the_module_do_not_matter():
    module, x = perceptron(3, 4, 2), points(7, 3)
    found = fisher(module, Categorical(), x)
    before = found.matrix()
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(found.matrix(), before)


def test_images_single_precision_and_one_output_without_an_axis():
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1), nn.Flatten(0)
    module = filled(nn.Sequential(*layers).eval()).float()
    x = points(5, 1, 4, 4).float()
    found = fisher(module, BernoulliOutputs(), x)
    exact = fisher(module.double(), BernoulliOutputs(), x.double()).matrix()
    module.float()
    assert found.matrix().dtype == torch.float32
    torch.testing.assert_close(found.matrix().double(), exact, rtol=1e-4, atol=1e-5)
    v = torch.ones(found.shape[0])
    torch.testing.assert_close(found @ v, found.matrix() @ v, rtol=1e-4, atol=1e-5)


def well_specified(likelihood, seed, n=2000):
    module, x = perceptron(3, 4, 2), points(n, 3)
    y = likelihood.sample(module(x).detach(), new_generator(seed, stream="data"))
    return module, likelihood, x, y


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "categorical", "poisson"])
def test_empirical_fisher_of_data_of_the_model_is_trusted(name, limit):
    likelihood = CASES[name][0]
    for seed in range(3):
        found = empirical_fisher(*well_specified(likelihood, seed))
        assert found.trusted and not found.warnings, found.warnings
        assert abs(found.diagnostics["z"]) < limit(12 * 8)


def test_empirical_fisher_of_other_data_is_not(limit):
    module, _, x, y = well_specified(GaussianOutputs(), 0)
    wide = empirical_fisher(module, GaussianOutputs(0.2), x, y)
    assert not wide.trusted and "disagree with the model" in wide.warnings[0] and "NOT TRUSTED" in str(wide)
    assert abs(wide.diagnostics["ratio"] / 5 - 1) < limit(2) * wide.diagnostics["noise"] and wide.diagnostics["z"] > 10
    narrow = empirical_fisher(module, GaussianOutputs(5.0), x, y)
    assert not narrow.trusted
    assert abs(narrow.diagnostics["ratio"] * 5 - 1) < limit(2) * narrow.diagnostics["noise"]
    with torch.no_grad():
        module[2].bias += 0.5  # residuals grow by a quarter, all the same way
    moved = empirical_fisher(module, GaussianOutputs(), x, y)
    assert not moved.trusted and "not at an optimum" in moved.warnings[-1]
    few = empirical_fisher(line((0.5, 0.5)), GaussianOutputs(), X, Y)
    assert not few.trusted and "too few observations" in few.warnings[-1]
    exact = empirical_fisher(line((0.5, 0.5)), GaussianOutputs(), X, X @ torch.tensor([0.5, 0.5], dtype=DOUBLE))
    assert not exact.trusted and math.isfinite(exact.diagnostics["ratio"])


def test_a_probe_of_a_model_with_a_wrong_fisher_is_noticed(monkeypatch, limit):
    right = Poisson.fisher_root
    monkeypatch.setattr(Poisson, "fisher_root", lambda self, f: 2 * right(self, f))
    with pytest.raises(AssertionError):
        test_empirical_fisher_of_data_of_the_model_is_trusted("poisson", limit)


@pytest.mark.parametrize(
    ("likelihood", "y", "error", "message"),
    [
        (GaussianOutputs(), points(7, 1), ShapeError, r"\(7, 2\).*\(7, 1\)"),
        (GaussianOutputs(), points(7, 2).index_fill(0, torch.tensor([4]), math.nan), DataError, "row 4"),
        (BernoulliOutputs(), points(7, 2), DataError, "zeros and ones.*row 0"),
        (Poisson(), -points(7, 2).abs().round() - 1, DataError, "counts"),
        (Categorical(), torch.full((7,), 2), DataError, "from 0 to 1.*row 0"),
        (Categorical(), torch.zeros(7), DataError, "integer dtype"),
        (Categorical(), torch.zeros(6, dtype=torch.long), ShapeError, "class indices"),
        ("gaussian", points(7, 2), SettingsError, "an object such as Gaussian"),
    ],
)
def test_bad_data(likelihood, y, error, message):
    with pytest.raises(error, match=message):
        gauss_newton(perceptron(3, 4, 2), likelihood, points(7, 3), y)


def test_bad_modules_and_inputs():
    module, x = perceptron(3, 4, 2), points(7, 3)
    with pytest.raises(DataError, match="float32.*float64"):
        fisher(module, GaussianOutputs(), x.float())
    with pytest.raises(DataError, match="x has values that are not finite, first in row 2"):
        fisher(module, GaussianOutputs(), x.index_fill(0, torch.tensor([2]), math.inf))
    with pytest.raises(ShapeError, match="at least one input"):
        fisher(module, GaussianOutputs(), x[:0])
    with pytest.raises(ModelError, match=r"'1' \(Dropout\).*eval"):
        fisher(nn.Sequential(nn.Linear(3, 2), nn.Dropout()).double(), GaussianOutputs(), x)
    with pytest.raises(ModelError, match="no parameters"):
        fisher(nn.Tanh(), GaussianOutputs(), x)
    with pytest.raises(ModelError, match="one dtype"):
        fisher(nn.Sequential(nn.Linear(3, 2).double(), nn.Linear(2, 2)), GaussianOutputs(), x)
    with pytest.raises(ShapeError, match="one row of outputs"):
        fisher(nn.Sequential(module, nn.Unflatten(1, (1, 2))), GaussianOutputs(), x)
    with pytest.raises(DataError, match="output has values that are not finite, first in row 0"):
        with torch.no_grad():
            module[0].bias.fill_(math.nan)
        fisher(module, GaussianOutputs(), x)
    with pytest.raises(ShapeError, match="use BernoulliOutputs"):
        gauss_newton(line(), Categorical(), X, torch.zeros(3, dtype=torch.long))
    for variance in (0.0, -1.0, math.inf):
        with pytest.raises(SettingsError, match="variance"):
            GaussianOutputs(variance)
    assert GaussianOutputs(np.float64(2)).variance == 2.0
