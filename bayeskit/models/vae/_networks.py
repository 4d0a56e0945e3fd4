"""Neural networks, and modules that map features to distributions of codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayeskit.errors import SettingsError
from bayeskit.extend import whole_number
from bayeskit.models.vae._distributions import independent

Activation = Callable[[], nn.Module]


def mlp(sizes: Sequence[int], activation: Activation = nn.Tanh) -> nn.Sequential:
    """Create a multilayer perceptron with an activation after every layer but the last.

    Raises ``SettingsError`` if a size is not positive, or there are fewer than two sizes.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of inputs, units of each hidden layer, and outputs.
    activation : callable, default torch.nn.Tanh
        Constructor of the activation module.

    Examples
    --------
    >>> import torch
    >>> mlp([784, 200, 10])(torch.zeros(3, 784)).shape
    torch.Size([3, 10])
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise SettingsError(f"sizes must have at least two entries, each at least 1, not {list(sizes)}")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class DiagonalNormal(nn.Module):
    """Normal distribution with independent coordinates; mean and log scale are linear in the features.

    Parameters
    ----------
    num_features, dim : int

    Examples
    --------
    >>> import torch
    >>> encoder = torch.nn.Sequential(mlp([784, 200]), torch.nn.Tanh(), DiagonalNormal(200, 50))
    >>> encoder(torch.zeros(3, 784)).mean.shape
    torch.Size([3, 50])
    """

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, 2 * dim)

    def forward(self, features: Tensor) -> Any:
        """Return the distribution: ``(*batch, num_features)`` to batch shape ``(*batch)``, event shape ``(dim,)``."""
        loc, log_scale = self.linear(features).chunk(2, -1)
        return independent(dist.Normal(loc, log_scale.exp(), validate_args=False), 1)


class StandardNormal(nn.Module):
    """Standard normal distribution in ``dim`` dimensions.

    Examples
    --------
    >>> StandardNormal(3)().event_shape
    torch.Size([3])
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("loc", torch.zeros(dim), persistent=False)
        self.register_buffer("scale", torch.ones(dim), persistent=False)

    def forward(self) -> Any:
        """Return the distribution, event shape ``(dim,)``."""
        return independent(dist.Normal(self.loc, self.scale, validate_args=False), 1)


class ConvolutionalFeatures(nn.Module):
    """Image features by stride-2 convolutions, each of which halves height and width.

    Raises ``SettingsError`` if height or width is not divisible by ``2 ** len(channels)``.

    Parameters
    ----------
    image_shape : tuple of int
        Channels, height, width; height and width must be divisible by ``2 ** len(channels)``.
    channels : sequence of int
        Channels after each convolution.
    num_features : int
    activation : callable, default torch.nn.ReLU

    Examples
    --------
    >>> import torch
    >>> ConvolutionalFeatures((1, 28, 28), (32, 64), 256)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 256])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        channels: Sequence[int],
        num_features: int,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        smallest = _smallest_shape(image_shape, channels)
        layers: list[nn.Module] = []
        for before, after in pairwise([image_shape[0], *channels]):
            layers += [nn.Conv2d(before, after, kernel_size=4, stride=2, padding=1), activation()]
        self.convolutions = nn.Sequential(*layers)
        self.linear = nn.Sequential(nn.Linear(math.prod(smallest), num_features), activation())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*batch, channels, height, width)`` to ``(*batch, num_features)``."""
        batch = x.shape[:-3]
        return self.linear(self.convolutions(x.reshape(-1, *x.shape[-3:])).reshape(*batch, -1))


class ConvolutionalDecoder(nn.Module):
    """Decoder to images by transposed convolutions, each of which doubles height and width.

    Raises ``SettingsError`` if height or width is not divisible by ``2 ** len(channels)``.

    Parameters
    ----------
    num_inputs : int
    image_shape, activation
        As in :class:`ConvolutionalFeatures`, for the output.
    channels : sequence of int
        Channels before each transposed convolution.
    num_features : int
        Width of the dense layer between inputs and convolutions.

    Examples
    --------
    >>> import torch
    >>> ConvolutionalDecoder(10, (1, 8, 8), (64, 32), 256)(torch.zeros(5, 10)).shape
    torch.Size([5, 1, 8, 8])
    """

    def __init__(
        self,
        num_inputs: int,
        image_shape: tuple[int, int, int],
        channels: Sequence[int],
        num_features: int,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        _, height, width = _smallest_shape(image_shape, channels)
        self.smallest = (channels[0], height, width)
        first = nn.Linear(num_inputs, num_features), activation()
        self.linear = nn.Sequential(*first, nn.Linear(num_features, math.prod(self.smallest)), activation())
        layers: list[nn.Module] = []
        for before, after in pairwise([*channels, image_shape[0]]):
            layers += [nn.ConvTranspose2d(before, after, kernel_size=4, stride=2, padding=1), activation()]
        self.convolutions = nn.Sequential(*layers[:-1])

    def forward(self, z: Tensor) -> Tensor:
        """Map ``(*batch, num_inputs)`` to ``(*batch, channels, height, width)``."""
        images = self.convolutions(self.linear(z).reshape(-1, *self.smallest))
        return images.reshape(*z.shape[:-1], *images.shape[-3:])


def _smallest_shape(image_shape: tuple[int, int, int], channels: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape of an image after all halvings."""
    factor = 2 ** len(channels)
    _, height, width = (whole_number("image_shape", size, 1) for size in image_shape)
    if not channels or height % factor or width % factor:
        raise SettingsError(
            f"images of {height} x {width} pixels cannot be halved {len(channels)} times; channels needs at least one "
            "entry, and 2 ** len(channels) must divide height and width; give fewer entries, or pad the images"
        )
    return channels[-1], height // factor, width // factor


def check_sizes(*sizes: int) -> None:
    """Raise a ``SettingsError`` unless all sizes are positive."""
    if min(sizes) < 1:
        raise SettingsError(f"every size must be at least 1, not {min(sizes)}")


def check_hidden(hidden: Sequence[int]) -> None:
    """Raise a ``SettingsError`` unless there is a hidden layer and every width is positive."""
    if not hidden:
        raise SettingsError("hidden is empty; give the width of at least one layer, such as (200,)")
    check_sizes(*hidden)
