"""Likelihoods: distributions of the data given the decoder's outputs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayeskit.errors import DataError
from bayeskit.extend import real_number, whole_number
from bayeskit.models.vae._distributions import DiscretizedLogisticMixture as _DiscretizedLogistic
from bayeskit.models.vae._distributions import check_finite_values, check_unit_interval, independent

__all__ = [
    "Bernoulli",
    "DiscretizedLogistic",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
]


class Likelihood(nn.Module):
    """Base class: entries of an observation are independent given the decoder's outputs.

    Attributes
    ----------
    num_parameters : int
        Number of decoder outputs per entry, concatenated along the first data dimension. Outputs have shape
        ``(*batch, num_parameters * D)`` for data of shape ``(D,)`` and ``(*batch, num_parameters * C, H, W)`` for
        images of shape ``(C, H, W)``.
    """

    num_parameters: int = 1

    @abstractmethod
    def entries(self, *parameters: Tensor) -> Any:
        """Return the distribution of each entry, from ``num_parameters`` tensors of shape ``(*batch, *data)``."""

    def check(self, x: Tensor) -> None:
        """Raise a ``DataError`` if a value of ``x`` is outside the support, by default the real numbers."""
        check_finite_values(x)

    def forward(self, outputs: Tensor, event_dim: int) -> Any:
        """Return the distribution of data with ``event_dim`` dimensions given the decoder's outputs."""
        parameters = (outputs,) if self.num_parameters == 1 else outputs.chunk(self.num_parameters, -event_dim)
        return independent(self.entries(*parameters), event_dim)


class Bernoulli(Likelihood):
    """Binary entries; values strictly between 0 and 1 are treated as probabilities.

    Examples
    --------
    >>> import torch
    >>> Bernoulli()(torch.zeros(5, 784), event_dim=1).event_shape
    torch.Size([784])
    """

    def entries(self, *parameters: Tensor) -> Any:
        """Return Bernoulli distributions with ``parameters[0]`` as logits."""
        return dist.Bernoulli(logits=parameters[0], validate_args=False)

    def check(self, x: Tensor) -> None:
        """Raise a ``DataError`` unless all values lie in ``[0, 1]``."""
        check_unit_interval(x, "a Bernoulli likelihood")


class Gaussian(Likelihood):
    """Normal entries with a common standard deviation.

    Raises ``SettingsError`` if ``scale`` is not positive.

    Parameters
    ----------
    scale : float, default 1.0
        Standard deviation, or its initial value if ``learn``.
    learn : bool, default True
        Make the standard deviation a trainable parameter.

    Examples
    --------
    >>> import torch
    >>> Gaussian(0.1, learn=False)(torch.zeros(2, 3), event_dim=1).variance[0]
    tensor([0.0100, 0.0100, 0.0100])
    """

    log_scale: Tensor

    def __init__(self, scale: float = 1.0, *, learn: bool = True) -> None:
        super().__init__()
        scale = real_number("scale", scale, "(0, inf)")
        value = torch.tensor(float(scale)).log()
        if learn:
            self.log_scale = nn.Parameter(value)
        else:
            self.register_buffer("log_scale", value)

    def entries(self, *parameters: Tensor) -> Any:
        """Return normal distributions with mean ``parameters[0]``."""
        return dist.Normal(parameters[0], self.log_scale.exp(), validate_args=False)


class HeteroscedasticGaussian(Likelihood):
    """Normal entries; the decoder outputs mean and log standard deviation.

    Raises ``SettingsError`` if ``smallest_scale`` is not positive.

    Parameters
    ----------
    smallest_scale : float, default 1e-3
        Added to the standard deviation; with 0 the likelihood would be unbounded.

    References
    ----------
    Mattei, P.-A., Frellsen, J. (2018). Leveraging the exact likelihood of deep latent variable models. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> HeteroscedasticGaussian()(torch.zeros(5, 6), event_dim=1).event_shape
    torch.Size([3])
    """

    num_parameters = 2

    def __init__(self, smallest_scale: float = 1e-3) -> None:
        super().__init__()
        smallest_scale = real_number("smallest_scale", smallest_scale, "(0, inf)")
        self.smallest_scale = smallest_scale

    def entries(self, *parameters: Tensor) -> Any:
        """Return normal distributions with means and log scales ``parameters``."""
        loc, log_scale = parameters
        return dist.Normal(loc, log_scale.exp() + self.smallest_scale, validate_args=False)


class DiscretizedLogistic(Likelihood):
    """Entries on equally spaced levels in ``[0, 1]``, such as eight-bit pixels divided by 255.

    Raises ``SettingsError`` if ``num_levels`` is less than 2 or ``num_components`` is less than 1.

    Parameters
    ----------
    num_levels : int, default 256
    num_components : int, default 1
        Mixture components per entry.

    References
    ----------
    Salimans, T., Karpathy, A., Chen, X., Kingma, D. P. (2017). PixelCNN++: improving the PixelCNN with discretized
    logistic mixture likelihood and other modifications. ICLR.

    Examples
    --------
    >>> import torch
    >>> DiscretizedLogistic(num_components=5).num_parameters
    15
    """

    def __init__(self, num_levels: int = 256, num_components: int = 1) -> None:
        super().__init__()
        num_levels = whole_number("num_levels", num_levels, least=2)
        num_components = whole_number("num_components", num_components, least=1)
        self.num_levels, self.num_components = num_levels, num_components
        self.num_parameters = 2 if num_components == 1 else 3 * num_components

    def entries(self, *parameters: Tensor) -> Any:
        """Return discretized logistic distributions with parameters location, log scale and, for mixtures, logits."""
        if self.num_components == 1:
            loc, log_scale = parameters
            return _DiscretizedLogistic(loc, log_scale, num_levels=self.num_levels)
        loc, log_scale, logits = torch.stack(parameters, -1).chunk(3, -1)
        return _DiscretizedLogistic(loc, log_scale, logits, self.num_levels)

    def check(self, x: Tensor) -> None:
        """Raise a ``DataError`` unless all values are levels."""
        check_unit_interval(x, "a discretised likelihood")
        scaled = x * (self.num_levels - 1)
        if bool(((scaled - scaled.round()).abs() > 1e-3).any()):
            raise DataError(
                f"x has values between the {self.num_levels} levels 0, 1/{self.num_levels - 1}, ..., 1; round them, "
                "or set num_levels to the number of levels of the data"
            )
