"""Deep rendering mixture with one layer; max-sum inference is convolution, ReLU and max-pooling."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.extend import new_generator, real_number, whole_number
from bayeskit.models.discrete._inputs import as_real, finite_values


class Rendering(NamedTuple):
    """Latent variables of images.

    Attributes
    ----------
    template : Tensor
        Template index, ``(n,)``.
    position : Tensor
        Row and column of the template's upper left corner, ``(n, 2)``.
    on : Tensor
        Switch: True if the template is rendered, ``(n,)``.
    """

    template: Tensor
    position: Tensor
    on: Tensor


class RenderingMixture:
    r"""Mixture model of images: at most one of several templates, at an unknown position, in Gaussian noise.

    Template :math:`k` and position :math:`g` have uniform priors; switch :math:`a` is 1 with probability :math:`\pi`.
    The image is :math:`x \sim N(a T_g \mu_k, \sigma^2 I)`. With
    :math:`b_k = \log(\pi / (1 - \pi)) - |\mu_k|^2 / 2 \sigma^2`, the log joint density is

    .. math:: \log p(x, k, g, a) = c(x) + a \left(\langle T_g \mu_k, x \rangle / \sigma^2 + b_k\right).

    Its maximum over the switch and the positions in a window is :math:`c(x)` plus a convolution followed by ReLU and
    max-pooling. Summing over the switch instead replaces ReLU by softplus.

    Parameters
    ----------
    templates : Tensor or array
        ``(templates, height, width)``. Its dtype and device are used for all computations.
    image_shape : (int, int)
        Height and width of images, at least the size of the templates.
    noise_scale : float, default 1.0
        Noise standard deviation :math:`\sigma`, positive.
    on_probability : float, default 0.5
        Prior probability :math:`\pi` of the switch, in (0, 1).

    Raises
    ------
    ShapeError
        If templates are not three-dimensional or empty, or exceed the images.
    DataError
        If templates are not finite.
    SettingsError
        If ``noise_scale`` or ``on_probability`` is outside its domain, or ``image_shape`` is not two whole numbers.

    References
    ----------
    Patel, A. B., Nguyen, T., Baraniuk, R. G. (2016). A probabilistic framework for deep learning. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete._rendering_mixture import RenderingMixture
    >>> mixture = RenderingMixture(torch.tensor([[[3.0, 3.0]], [[3.0, -3.0]]]), (4, 5))
    >>> image = torch.zeros(1, 4, 5)
    >>> image[0, 2, 1:3] = torch.tensor([3.0, -3.0])
    >>> found = mixture.most_probable(image)
    >>> found.template, found.position, found.on
    (tensor([1]), tensor([[2, 1]]), tensor([True]))
    """

    def __init__(
        self, templates: Tensor, image_shape: tuple[int, int], noise_scale: float = 1.0, on_probability: float = 0.5
    ) -> None:
        templates = finite_values("templates", as_real("templates", templates))
        if templates.dim() != 3 or not templates.numel():
            raise ShapeError(f"templates have shape {tuple(templates.shape)}; they must be (templates, height, width)")
        _, height, width = templates.shape
        if not isinstance(image_shape, (tuple, list)) or len(image_shape) != 2:
            raise SettingsError(f"image_shape must be height and width, such as (28, 28), not {image_shape!r}")
        image_shape = whole_number("image_shape[0]", image_shape[0]), whole_number("image_shape[1]", image_shape[1])
        if image_shape[0] < height or image_shape[1] < width:
            raise ShapeError(f"templates of {height} by {width} do not fit into images of shape {image_shape}")
        self.templates = templates
        self.image_shape = image_shape
        self.noise_scale = real_number("noise_scale", noise_scale, "(0, inf)")
        self.on_probability = real_number("on_probability", on_probability, "(0, 1)")
        #: Numbers of rows and columns of positions.
        self.positions = image_shape[0] - height + 1, image_shape[1] - width + 1

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the filters ``(templates, 1, height, width)`` and biases ``(templates,)`` of the convolution."""
        variance = self.noise_scale**2
        odds = math.log(self.on_probability) - math.log1p(-self.on_probability)
        return self.templates.unsqueeze(1) / variance, odds - self.templates.square().sum((-1, -2)) / (2 * variance)

    def scores(self, x: Tensor) -> Tensor:
        """Return the posterior log odds of the switch given template and position, ``(n, templates, rows, columns)``.

        ``x`` (tensor or array): images, ``(n, height, width)``. This and later methods raise ``ShapeError`` if the
        images have a wrong shape; ``DataError`` if a value is not finite.
        """
        return conv2d(self._images(x).unsqueeze(1), *self.weights())

    def _images(self, x: Tensor) -> Tensor:
        x = finite_values("x", as_real("x", x)).to(self.templates)
        if x.dim() != 3 or tuple(x.shape[1:]) != tuple(self.image_shape):
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; it must be (n, {self.image_shape[0]}, {self.image_shape[1]})"
            )
        return x

    def log_background(self, x: Tensor) -> Tensor:
        """Return the log joint density with the switch off, equal for all templates and positions, ``(n,)``."""
        x = self._images(x)
        normal = torch.distributions.Normal(torch.zeros((), dtype=x.dtype, device=x.device), self.noise_scale)
        causes = len(self.templates) * math.prod(self.positions)
        return normal.log_prob(x).sum((-1, -2)) + math.log1p(-self.on_probability) - math.log(causes)

    def feature_maps(self, x: Tensor, window: int) -> Tensor:
        """Return window maxima of the log joint density over switch and position, minus :meth:`log_background`.

        ``window``: edge length of the windows, a divisor of the numbers of rows and columns of positions. Returns ``(n,
        templates, rows / window, columns / window)``: convolution, ReLU, max-pool. Raises ``SettingsError`` if windows
        do not tile the positions.
        """
        if any(size % whole_number("window", window, 1) for size in self.positions):
            raise SettingsError(
                f"windows of {window} by {window} do not tile {self.positions[0]} by {self.positions[1]} positions"
            )
        return max_pool2d(self.scores(x).relu(), window)

    def log_evidence(self, x: Tensor) -> Tensor:
        """Return the log marginal density of each image, ``(n,)``."""
        scores = self.scores(x).flatten(1)
        return self.log_background(x) + torch.logaddexp(scores, torch.zeros_like(scores)).logsumexp(-1)

    def most_probable(self, x: Tensor) -> Rendering:
        """Return the posterior mode of the latent variables of each image.

        If the switch is off, template and position are not identified; the first of each is returned.
        """
        score, index = self.scores(x).relu().flatten(1).max(-1)
        rows, columns = self.positions
        position = torch.stack([index % (rows * columns) // columns, index % columns], -1)
        return Rendering(index // (rows * columns), position, score > 0)

    def sample(self, n: int, *, seed: int | torch.Generator) -> tuple[Tensor, Rendering]:
        """Draw ``n`` images ``(n, height, width)`` and their latent variables; ``n`` is at least 1."""
        n = whole_number("n", n, least=1)
        templates = self.templates
        generator = new_generator(seed, templates.device, stream="renderings")
        settings: Any = {"generator": generator, "device": templates.device}
        which = torch.randint(len(templates), (n,), **settings)
        row, column = (torch.randint(size, (n,), **settings) for size in self.positions)
        on = torch.rand(n, **settings) < self.on_probability
        x = self.noise_scale * torch.randn(n, *self.image_shape, dtype=templates.dtype, **settings)
        rows = (row.unsqueeze(-1) + torch.arange(templates.shape[1], device=row.device)).unsqueeze(-1)
        columns = (column.unsqueeze(-1) + torch.arange(templates.shape[2], device=row.device)).unsqueeze(-2)
        number = torch.arange(n, device=row.device).reshape(-1, 1, 1)
        x[number, rows, columns] += templates[which] * on.to(templates.dtype).reshape(-1, 1, 1)
        return x, Rendering(which, torch.stack([row, column], -1), on)
