"""Plots of images, reconstructions and latent traversals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.vae.generative_model import Autoencoder

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_images(images: Tensor, ax: Axes) -> Axes:
    """Plot a table of grey images, white for zero and black for one.

    Parameters
    ----------
    images : Tensor
        Shape ``(rows, columns, pixels)`` with a square number of pixels, or ``(rows, columns, height, width)``.
    ax : Axes

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If ``images`` has another shape.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.vae import plot_images
    >>> plot_images(torch.zeros(2, 5, 64), Figure().subplots()).images[0].get_array().shape
    (18, 48)
    """
    images = images.detach().cpu()
    if images.dim() == 3 and math.isqrt(images.shape[-1]) ** 2 == images.shape[-1]:
        images = images.unflatten(-1, (math.isqrt(images.shape[-1]),) * 2)
    if images.dim() != 4:
        raise ShapeError(
            f"images have shape {tuple(images.shape)}; give (rows, columns, height, width), or (rows, columns, "
            "pixels) where images are square"
        )
    # One pixel of white around each image keeps neighbours apart.
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1))
    rows, columns, height, width = framed.shape
    table = framed.permute(0, 2, 1, 3).reshape(rows * height, columns * width)[1:-1, 1:-1]
    ax.imshow(table.numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return ax


def plot_reconstructions(vae: Autoencoder, x: Tensor, ax: Axes) -> Axes:
    """Plot data above their reconstructions.

    Parameters
    ----------
    vae : Autoencoder
    x : Tensor
        Images, ``(n, *data_shape)``; channels are averaged.
    ax : Axes

    Returns
    -------
    Axes

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.vae import mlp_vae, plot_reconstructions
    >>> vae = mlp_vae(data_dim=64, hidden=(8,), latent_dim=2)
    >>> [label.get_text() for label in plot_reconstructions(vae, torch.zeros(3, 64), Figure().subplots()).texts]
    ['data', 'reconstruction']
    """
    pairs = torch.stack([x, vae.reconstruct(x)])
    plot_images(_grey(pairs, vae), ax)
    for row, name in enumerate(("data", "reconstruction")):
        position = (-0.01, 0.75 - 0.5 * row)
        ax.text(*position, name, transform=ax.transAxes, ha="right", va="center", fontsize="small")
    return ax


def plot_traversal(
    vae: Autoencoder, ax: Axes, *, centre: Tensor | None = None, dims: int = 8, steps: int = 9, reach: float = 3.0
) -> Axes:
    """Plot what the decoder makes of codes that differ in one coordinate, a row for each coordinate.

    Parameters
    ----------
    vae : Autoencoder
    ax : Axes
    centre : Tensor, optional
        The code that rows share but for one coordinate, ``(latent_dim,)``; by default zero.
    dims : int, default 8
        Coordinates to show, or all if there are fewer.
    steps : int, default 9
        Images in a row.
    reach : float, default 3.0
        Rows go from ``-reach`` to ``reach``.

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If ``centre`` is not one code.
    SettingsError
        If there is nothing to show.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.vae import mlp_vae, plot_traversal
    >>> vae = mlp_vae(data_dim=64, hidden=(8,), latent_dim=2)
    >>> plot_traversal(vae, Figure().subplots()).get_xlabel()
    'coordinate of the code, from -3 to 3'
    """
    if dims < 1 or steps < 2 or not reach > 0:
        raise SettingsError(
            f"dims must be at least 1, steps at least 2 and reach positive, not {dims}, {steps}, {reach}"
        )
    parameter = next(vae.parameters())
    base = parameter.new_zeros(vae.latent_dim) if centre is None else centre.to(parameter)
    if base.shape != (vae.latent_dim,):
        raise ShapeError(f"centre has shape {tuple(base.shape)}; give one code, ({vae.latent_dim},)")
    dims = min(dims, vae.latent_dim)
    codes = base.repeat(dims, steps, 1)
    for dim in range(dims):
        codes[dim, :, dim] = torch.linspace(-reach, reach, steps).to(parameter)
    plot_images(_grey(vae.decode(codes), vae), ax)
    ax.set_xlabel(f"coordinate of the code, from {-reach:g} to {reach:g}")
    ax.set_ylabel("coordinates")
    return ax


def _grey(images: Tensor, vae: Autoencoder) -> Tensor:
    return images.mean(-3) if vae.event_dim == 3 else images
