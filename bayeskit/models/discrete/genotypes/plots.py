"""Plots of genotype matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._plots import VERMILION
from bayeskit.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_genotypes(probabilities: Tensor, observed: Tensor, ax: Axes | None = None) -> Axes:
    """Plot the probability of each entry to be one, dark for one, and what was read.

    Filled circles are entries read as one, hollow ones those read as zero, and missing entries have no mark: a hollow
    circle on a dark field is a likely false negative.

    Parameters
    ----------
    probabilities, observed : Tensor or array
        Shape ``(cells, mutations)``; missing entries of ``observed`` are NaN.
    ax : Axes, optional
        By default those of a new figure. A colour bar takes some of their space.

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If they are not matrices of one shape.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> plot_genotypes(torch.full((3, 2), 0.5), torch.eye(3)[:, :2], Figure().subplots()).get_xlabel()
    'mutation'
    """
    probabilities, observed = as_numbers("probabilities", probabilities), as_numbers("observed", observed)
    if probabilities.dim() != 2 or probabilities.shape != observed.shape:
        raise ShapeError(
            f"probabilities and observed have shapes {tuple(probabilities.shape)} and {tuple(observed.shape)}; "
            "give (cells, mutations) for both"
        )
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(layout="constrained").subplots()
    shown = probabilities.detach().cpu().double().numpy()
    image = ax.imshow(shown, cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="probability to have the mutation")
    for value, face in ((1, VERMILION), (0, "none")):
        cells, mutations = (observed == value).cpu().nonzero(as_tuple=True)
        ax.scatter(mutations.numpy(), cells.numpy(), s=40, facecolors=face, edgecolors=VERMILION, linewidths=1.4)
    ax.set_xticks(range(observed.shape[1]))
    ax.set_yticks(range(observed.shape[0]))
    ax.tick_params(length=0)
    ax.set_xlabel("mutation")
    ax.set_ylabel("cell")
    return ax
