import inspect
import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from bayeskit._core.flat_networks import flat_copy
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.curvature import (
    BernoulliOutputs,
    Categorical,
    GaussianOutputs,
    Poisson,
    empirical_fisher,
    fisher,
    gradient_fields,
    natural_gradient,
)
from bayeskit.inference.curvature._fisher_matrices import log_likelihood_gradient
from bayeskit.inference.curvature._matrices import Curvature

DOUBLE = torch.float64
X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=DOUBLE)
Y = torch.tensor([0.0, 2.0, 1.0], dtype=DOUBLE)


class Curved(nn.Module):
    """A network of few weights, each of which is a function of a parameter."""

    def __init__(self, weights, inverse, forward):
        super().__init__()
        self.parameter = nn.Parameter(inverse(weights).clone())
        self.forward_map = forward

    def forward(self, x):
        w = self.forward_map(self.parameter)
        return torch.tanh(x @ w[:4].reshape(2, 2)) @ w[4:].reshape(2, 2)


WEIGHTS = torch.tensor([0.9, -0.6, 0.4, 1.1, 0.8, -1.2, 0.3, 0.7], dtype=DOUBLE)
SCALES = torch.logspace(-1, 1, 8, dtype=DOUBLE)
PARAMETERIZATIONS = {
    "scaled": (lambda w: w / SCALES, lambda u: u * SCALES),
    "curved": (torch.asinh, torch.sinh),
}


def inputs(n=12):
    return 2 * torch.cos(1.3 * torch.arange(2 * n, dtype=DOUBLE) ** 2).reshape(n, 2)


@pytest.mark.parametrize("name", PARAMETERIZATIONS)
@pytest.mark.parametrize(
    ("likelihood", "y"),
    [(GaussianOutputs(0.3), torch.sin(inputs())), (Poisson(), inputs().abs().round())],
    ids=["gaussian", "poisson"],
)
def test_steps_in_outputs_do_not_depend_on_the_parametrisation(name, likelihood, y):
    x = inputs()
    plain = Curved(WEIGHTS, lambda w: w, lambda u: u)
    other = Curved(WEIGHTS, *PARAMETERIZATIONS[name])
    first, second = (flat_copy(m).push(x, natural_gradient(m, likelihood, x, y)) for m in (plain, other))
    torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-9)
    # A gradient without the Fisher information fails the same comparison.
    first, second = (
        flat_copy(m).push(x, log_likelihood_gradient(flat_copy(m), likelihood, x, y)) for m in (plain, other)
    )
    assert float((second - first).abs().max()) > 0.1 * float(first.abs().max())


def test_a_small_step_of_a_curved_parametrisation_leads_to_the_same_network():
    x, y = inputs(), torch.sin(inputs())
    gaps = []
    for size in (1e-2, 1e-3):
        ends = []
        for maps in ((lambda w: w, lambda u: u), PARAMETERIZATIONS["curved"]):
            module = Curved(WEIGHTS, *maps)
            step = size * natural_gradient(module, GaussianOutputs(), x, y)
            with torch.no_grad():
                module.parameter += step
            ends.append(module(x).detach())
        gaps.append(float((ends[0] - ends[1]).abs().max()))
    # What is left is of second order.
    assert gaps[0] > 0 and 80 < gaps[0] / gaps[1] < 120


def test_one_step_solves_least_squares_and_newton_is_the_same_for_counts():
    module = nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    nn.init.constant_(module.weight, 3.0)
    end = module.weight.detach().flatten() + natural_gradient(module, GaussianOutputs(0.3), X, Y)
    torch.testing.assert_close(end, torch.tensor([0.5, 0.5], dtype=DOUBLE), rtol=0, atol=1e-13)
    start = module.weight.detach().flatten()
    hessian = torch.func.hessian(lambda w: (X @ w).exp().sum() - Y @ X @ w)(start)
    expected = torch.linalg.solve(hessian, X.mT @ (Y - (X @ start).exp()))
    torch.testing.assert_close(natural_gradient(module, Poisson(), X, Y), expected, rtol=1e-12, atol=1e-13)


def test_large_systems_are_solved_by_iteration(monkeypatch):
    module, x = Curved(WEIGHTS, lambda w: w, lambda u: u), inputs()
    y = torch.arange(12) % 2
    exact = natural_gradient(module, Categorical(), x, y, damping=0.1)
    monkeypatch.setitem(inspect.unwrap(natural_gradient).__globals__, "_EXACT_SIZE", 3)
    monkeypatch.setattr(Curvature, "solve_exactly", None)
    iterated = natural_gradient(module, Categorical(), x, y, damping=0.1)
    torch.testing.assert_close(iterated, exact, rtol=1e-8, atol=1e-8)


def test_singular_fisher_needs_damping():
    module = nn.Linear(2, 1, dtype=DOUBLE)
    with pytest.raises(SettingsError, match="larger damping"):
        natural_gradient(module, GaussianOutputs(), X[:2], Y[:2])
    assert natural_gradient(module, GaussianOutputs(), X[:2], Y[:2], damping=1e-6).shape == (3,)


def test_fields_are_those_of_single_points():
    x = torch.linspace(-2, 2, 9, dtype=DOUBLE).unsqueeze(1)
    y = (x.squeeze(1) > 0.3).to(DOUBLE)
    module = nn.Linear(1, 1, dtype=DOUBLE)
    before = module.weight.detach().clone()
    first, second = torch.linspace(-1, 2, 4, dtype=DOUBLE), torch.linspace(0, 1, 3, dtype=DOUBLE)
    fields = gradient_fields(module, BernoulliOutputs(), x, y, first, second, damping=1e-3)
    assert torch.equal(module.weight, before)
    assert all(field.shape == (4, 3, 2) for field in fields)
    assert torch.equal(fields.points[3, 1], torch.stack([first[3], second[1]]))
    with torch.no_grad():
        module.weight.fill_(first[3])
        module.bias.fill_(second[1])
    natural = natural_gradient(module, BernoulliOutputs(), x, y, damping=1e-3)
    torch.testing.assert_close(fields.natural[3, 1], natural, rtol=1e-12, atol=1e-12)
    gradient = fisher(module, BernoulliOutputs(), x).matrix() @ natural + 1e-3 * natural
    torch.testing.assert_close(fields.gradient[3, 1], gradient, rtol=1e-11, atol=1e-11)
    empirical = empirical_fisher(module, BernoulliOutputs(), x, y).solve_exactly(gradient, 1e-3)
    torch.testing.assert_close(fields.empirical[3, 1], empirical, rtol=1e-9, atol=1e-9)


def test_natural_gradients_of_a_line_point_to_the_fit_and_empirical_ones_do_not():
    module = nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    grid = torch.linspace(-2, 3, 6, dtype=DOUBLE)
    fields = gradient_fields(module, GaussianOutputs(), X, Y, grid, grid, damping=1e-9)
    to_fit = 0.5 - fields.points
    torch.testing.assert_close(fields.natural, to_fit, rtol=0, atol=1e-8)
    assert float(torch.cosine_similarity(fields.empirical, to_fit, dim=2).min()) < 0.5
    assert math.isfinite(float(fields.empirical.sum()))


def test_plot_puts_the_first_parameter_on_the_horizontal_axis():
    module = nn.Linear(2, 1, bias=False, dtype=DOUBLE)
    first, second = torch.linspace(-2, 3, 7, dtype=DOUBLE), torch.linspace(0, 1, 5, dtype=DOUBLE)
    axes = Figure().subplots(1, 3)
    gradient_fields(module, GaussianOutputs(), X, Y, first, second).plot(list(axes))
    low, high = axes[1].get_xlim()
    assert low <= -1.5 and high >= 2.5
    assert axes[1].get_ylim()[1] < 1.5
    assert [ax.get_title() for ax in axes] == ["gradient", "natural gradient", "empirical Fisher"]


def test_fields_need_two_parameters():
    with pytest.raises(ModelError, match="not 3"):
        gradient_fields(nn.Linear(2, 1).double(), GaussianOutputs(), X, Y, Y, Y)
    with pytest.raises(ShapeError, match="n1"):
        gradient_fields(nn.Linear(2, 1, bias=False).double(), GaussianOutputs(), X, Y, X, Y)
