"""Natural gradients, and their fields over the plane of two parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from bayeskit._core.flat_networks import flat_copy
from bayeskit._core.plots import BLUE, ORANGE, VERMILION
from bayeskit.errors import ModelError, ShapeError
from bayeskit.inference.curvature._fisher_matrices import empirical_fisher_of, fisher_of, log_likelihood_gradient
from bayeskit.inference.curvature._likelihoods import OutputLikelihood, check_likelihood
from bayeskit.inference.curvature._matrices import Curvature

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXACT_SIZE = 2000  # largest number of rows of a matrix that is factorised


def natural_gradient(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, damping: float = 0.0
) -> Tensor:
    r"""Return the natural gradient of the log likelihood.

    .. math:: (F + \lambda I)^{-1} \nabla_\theta \sum_i \log p(y_i \mid f_\theta(x_i))

    Without damping the resulting change of the outputs is, to first order, invariant to the parametrisation of the
    network.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`.
    damping : float, default 0
        :math:`\lambda`; must be positive if the number of parameters exceeds the total number of outputs, ``n k``.

    Returns
    -------
    Tensor
        Natural gradient in the order of the parameters that require gradients, ``(p,)``. It is computed by
        factorisation if the Fisher information or its dual has at most 2,000 rows, otherwise by conjugate gradients.

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
    >>> from bayeskit.inference.curvature import GaussianOutputs, natural_gradient
    >>> line = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> natural_gradient(line, GaussianOutputs(), x, torch.tensor([0.0, 2.0, 1.0]))  # the least-squares fit in a step
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    likelihood, network = check_likelihood(likelihood), flat_copy(module)
    return _solved(fisher_of(network, likelihood, x), log_likelihood_gradient(network, likelihood, x, y), damping)


class GradientFields(NamedTuple):
    """Three directions of ascent at each point of a grid; all tensors are ``(n1, n2, 2)``.

    Attributes
    ----------
    points : Tensor
        Values of the two parameters.
    gradient : Tensor
        Gradient of the log likelihood.
    natural : Tensor
        Gradient preconditioned with the Fisher information.
    empirical : Tensor
        Gradient preconditioned with the empirical Fisher.
    """

    points: Tensor
    gradient: Tensor
    natural: Tensor
    empirical: Tensor

    def plot(self, axes: list[Axes]) -> None:
        """Plot each of the three fields as streamlines in one of the axes."""
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
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    first: Tensor,
    second: Tensor,
    damping: float = 1e-8,
) -> GradientFields:
    """Evaluate the gradient, the natural gradient and the empirical-Fisher gradient on a grid of two parameters.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`; the module has two parameters.
    first, second : Tensor
        Values of the two parameters, ``(n1,)`` and ``(n2,)``; for plots increasing and evenly spaced.
    damping : float, default 1e-8
        Added to both matrices.

    Returns
    -------
    GradientFields

    Raises
    ------
    ModelError
        If the module does not have two parameters.
    SettingsError, DataError, ShapeError
        As in :func:`natural_gradient`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.curvature import GaussianOutputs, gradient_fields
    >>> x, y = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([-1.0, 0.5, 2.0])
    >>> grid = torch.linspace(-3.0, 3.0, 5)
    >>> fields = gradient_fields(torch.nn.Linear(1, 1), GaussianOutputs(), x, y, grid, grid)
    >>> (fields.points + fields.natural)[0, 0]  # every arrow ends at the fit
    tensor([1.5000, 0.5000])
    """
    likelihood, network = check_likelihood(likelihood), flat_copy(module)
    if network.num_parameters != 2:
        raise ModelError(
            f"the module must have 2 parameters that require gradients, not {network.num_parameters}; freeze the others"
        )
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
    if min(curvature.dual_size, curvature.shape[0]) <= _EXACT_SIZE:
        return curvature.solve_exactly(v, damping)
    return curvature.solve(v, damping)
