"""Natural gradients, and their fields over the plane of two parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from bayeskit._plots import BLUE, ORANGE, VERMILION
from bayeskit.errors import ModelError, ShapeError
from bayeskit.models.wide_networks.curvature.flat_network import (
    PRODUCT_ROWS,
    FlatNetwork,
    check_data,
    flat_network,
    row_blocks,
)
from bayeskit.models.wide_networks.curvature.likelihoods import Likelihood, checked_likelihood
from bayeskit.models.wide_networks.curvature.matrices import empirical_fisher_of, fisher_of
from bayeskit.models.wide_networks.curvature.operator import Curvature

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT_SIZE = 2000  # rows of the smaller matrix up to which it is factorised


def natural_gradient(module: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, damping: float = 0.0) -> Tensor:
    r"""Return the direction of steepest ascent of the log likelihood in the geometry of the model.

    .. math:: (F + \lambda I)^{-1} \nabla_\theta \sum_i \log p(y_i \mid f_\theta(x_i))

    Without damping the step it makes in the network's outputs does not depend on how these are parametrised, to first
    order.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`.
    damping : float, default 0
        ``lambda``; positive if there are more parameters than outputs of all data.

    Returns
    -------
    Tensor
        In the order of the module's parameters that require gradients, ``(p,)``. Solved by factorisation where the
        Fisher information or its dual has at most 2,000 rows, and by conjugate gradients elsewhere.

    Raises
    ------
    SettingsError
        If the damped Fisher information is singular.
    BudgetError
        If conjugate gradients do not converge.
    ModelError, DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    Amari, S. (1998). Natural gradient works efficiently in learning. Neural Computation 10, 251-276.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian, natural_gradient
    >>> line = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> natural_gradient(line, Gaussian(), x, torch.tensor([0.0, 2.0, 1.0]))  # to the least-squares fit in one step
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    likelihood, network = checked_likelihood(likelihood), flat_network(module)
    return _solved(fisher_of(network, likelihood, x), log_likelihood_gradient(network, likelihood, x, y), damping)


def log_likelihood_gradient(network: FlatNetwork, likelihood: Likelihood, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the log likelihood of all data, ``(p,)``."""
    x, outputs = check_data(network, x)
    score = likelihood.score(outputs, likelihood.targets(outputs, y))
    result = torch.zeros_like(network.vector)
    for rows in row_blocks(len(x), PRODUCT_ROWS):
        result = result + network.pull(x[rows], score[rows])
    return result


class GradientFields(NamedTuple):
    """Three directions of ascent at each point of a grid; all are ``(n1, n2, 2)``.

    Attributes
    ----------
    points : Tensor
        The two parameters.
    gradient : Tensor
        Of the log likelihood.
    natural : Tensor
        The gradient, preconditioned with the Fisher information.
    empirical : Tensor
        The gradient, preconditioned with the empirical Fisher.
    """

    points: Tensor
    gradient: Tensor
    natural: Tensor
    empirical: Tensor

    def plot(self, axes: list[Axes]) -> None:
        """Draw the three fields as streams, each into axes of its own."""
        fields = (self.gradient, self.natural, self.empirical)
        titles = ("gradient", "natural gradient", "empirical Fisher")
        first, second = self.points[:, 0, 0].cpu().numpy(), self.points[0, :, 1].cpu().numpy()
        for ax, title, arrows, colour in zip(axes, titles, fields, (BLUE, ORANGE, VERMILION), strict=True):
            # Matplotlib's rows are the vertical axis.
            u, v = arrows.permute(2, 1, 0).cpu().numpy()
            ax.streamplot(first, second, u, v, color=colour, linewidth=0.8, density=0.9, arrowsize=0.8)
            ax.set(title=title, xlabel="first parameter", ylabel="second parameter")


def gradient_fields(
    module: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    first: Tensor,
    second: Tensor,
    damping: float = 1e-8,
) -> GradientFields:
    """Evaluate gradient, natural gradient and its counterpart of the empirical Fisher over a grid.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`; the module has two parameters.
    first, second : Tensor
        Their values, increasing and evenly spaced if they are to be plotted, ``(n1,)`` and ``(n2,)``.
    damping : float, default 1e-8
        Added to both matrices.

    Returns
    -------
    GradientFields

    Raises
    ------
    ModelError
        If the module has more or fewer parameters.
    SettingsError, DataError, ShapeError
        As in :func:`natural_gradient`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian, gradient_fields
    >>> x, y = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([-1.0, 0.5, 2.0])
    >>> grid = torch.linspace(-3.0, 3.0, 5)
    >>> fields = gradient_fields(torch.nn.Linear(1, 1), Gaussian(), x, y, grid, grid)
    >>> (fields.points + fields.natural)[0, 0]  # every arrow ends at the fit
    tensor([1.5000, 0.5000])
    """
    likelihood, network = checked_likelihood(likelihood), flat_network(module)
    if network.num_parameters != 2:
        raise ModelError(f"a field can be drawn of 2 parameters, not of {network.num_parameters}; freeze the others")
    if first.dim() != 1 or second.dim() != 1:
        raise ShapeError(f"first and second must be (n1,) and (n2,), not {tuple(first.shape)}, {tuple(second.shape)}")
    points = torch.stack(torch.meshgrid(first, second, indexing="ij"), 2).to(network.vector)
    found = []
    for point in points.reshape(-1, 2):
        here = network.at(point)
        gradient = log_likelihood_gradient(here, likelihood, x, y)
        matrices = fisher_of(here, likelihood, x), empirical_fisher_of(here, likelihood, x, y)
        found.append(torch.stack([gradient, *(m.solve_exactly(gradient, damping) for m in matrices)]))
    fields = torch.stack(found).reshape(*points.shape[:2], 3, 2)
    return GradientFields(points, *fields.unbind(2))


def _solved(curvature: Curvature, v: Tensor, damping: float) -> Tensor:
    if min(curvature.dual_size, curvature.shape[0]) <= EXACT_SIZE:
        return curvature.solve_exactly(v, damping)
    return curvature.solve(v, damping)
