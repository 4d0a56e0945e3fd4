"""Estimators for independent bits, by antithetic draws."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints
from bayeskit.inference.gradients.space import Factorised, Space


@dataclass(frozen=True)
class _Antithetic(GradientEstimator):
    """Pairs of draws made of one uniform number `u` for each bit and of `1 - u`.

    Parameters
    ----------
    num_pairs : int, default 1

    Raises
    ------
    SettingsError
        If there is nothing to draw, or the distribution is not made of bits.
    """

    num_pairs: int = 1

    def __post_init__(self) -> None:
        whole_number("num_pairs", self.num_pairs, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw pairs."""
        logits = _bits(space, type(self).__name__)
        shape = (self.num_pairs, *logits.shape)
        uniform = torch.rand(shape, dtype=logits.dtype, device=logits.device, generator=generator)
        fixed = logits.detach()
        second, first = uniform < fixed.sigmoid(), uniform > (-fixed).sigmoid()
        slope = self.slope(uniform, first, second, fixed)
        # What each bit's logit moves of the first point's weight, it takes from the second's.
        moved = (slope * (logits - fixed)).sum(-1)
        weights = torch.cat([0.5 + moved, 0.5 - moved]) / self.num_pairs
        return WeightedPoints(space.value(torch.cat([first, second]).long()), weights)

    @abstractmethod
    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return by how much the difference of both values moves each logit, `(pairs, *batch, bits)`."""

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return 2 * self.num_pairs


@dataclass(frozen=True)
class ARM(_Antithetic):
    r"""Augment, reinforce, merge: :math:`(f(b_1) - f(b_2)) (u - 1/2)` for the logit of each bit.

    Parameters
    ----------
    num_pairs : int, default 1
        Each costs two evaluations.

    Raises
    ------
    SettingsError
        If there is nothing to draw, or the distribution is not made of bits.

    References
    ----------
    Yin, M., Zhou, M. (2019). ARM: Augment-REINFORCE-merge gradient for stochastic binary networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> bit = torch.distributions.Bernoulli(logits=torch.zeros(1000, requires_grad=True))
    >>> gradient = ARM().estimate(bit, lambda z: 4.0 * z)
    >>> bool((gradient.mean() - 1.0).abs() < 0.1)
    True
    """

    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return the uniform number's distance from its mean."""
        return uniform - 0.5


@dataclass(frozen=True)
class DisARM(_Antithetic):
    r"""ARM with its noise integrated out given both points: bits in which they agree do not move.

    Parameters
    ----------
    num_pairs : int, default 1
        Each costs two evaluations.

    Raises
    ------
    SettingsError
        If there is nothing to draw, or the distribution is not made of bits.

    References
    ----------
    Dong, Z., Mnih, A., Tucker, G. (2020). DisARM: an antithetic gradient estimator for binary latent variables.
    NeurIPS.

    Examples
    --------
    >>> import torch
    >>> bit = torch.distributions.Bernoulli(logits=torch.zeros(1, requires_grad=True))
    >>> DisARM().estimate(bit, lambda z: 4.0 * z)
    tensor([1.])
    """

    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return half the probability of the likelier value where the points differ, signed by the first."""
        sign = first.to(logits) - second.to(logits)
        return 0.5 * sign * logits.abs().sigmoid()


def _bits(space: Space, name: str) -> Tensor:
    """Return logits `(*batch, bits)`."""
    if not isinstance(space, Factorised) or not space.binary:
        raise SettingsError(
            f"{name} draws bits, but the distribution is a {type(space.distribution).__name__}; use Bernoulli, alone "
            "or with .to_event, or another estimator such as UnorderedSet"
        )
    return space.parameter.reshape(*space.batch_shape, space.num_variables)
