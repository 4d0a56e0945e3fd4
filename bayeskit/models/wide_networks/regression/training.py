"""How far training has come in each direction: gradient flow and gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks.regression.jitter import not_negative


@dataclass(frozen=True)
class GradientFlow:
    r"""Gradient descent with infinitely small steps.

    Parameters :math:`\theta` move with velocity :math:`-\eta \nabla L`.

    Attributes
    ----------
    learning_rate : float, default 1.0
        :math:`\eta`.
    time : float, default inf

    Raises
    ------
    SettingsError
        If the learning rate is not positive or time is negative.

    Examples
    --------
    >>> import torch
    >>> GradientFlow(0.1, time=20.0).learned(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8647])
    """

    learning_rate: float = 1.0
    time: float = math.inf

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, between=(0.0, math.inf))
        not_negative("time", self.time)

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the share of the way that is behind, in directions of these curvatures of the loss, ``(n,)``."""
        if math.isinf(self.time):
            return torch.ones_like(curvature)
        return -torch.expm1(-self.learning_rate * self.time * curvature)

    def __str__(self) -> str:
        end = "in the limit" if math.isinf(self.time) else f"to time {self.time:g}"
        return f"gradient flow {end}, learning rate {self.learning_rate:g}"


@dataclass(frozen=True)
class GradientDescent:
    """A number of steps of full-batch gradient descent.

    Attributes
    ----------
    learning_rate : float
    num_steps : int

    Raises
    ------
    SettingsError
        If the learning rate is not positive or the number of steps negative.

    Examples
    --------
    >>> import torch
    >>> GradientDescent(0.1, num_steps=20).learned(torch.tensor([0.0, 1.0, 15.0]))
    tensor([0.0000, 0.8784, 1.0000])
    """

    learning_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, between=(0.0, math.inf))
        whole_number("num_steps", self.num_steps, least=0)

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the share of the way that is behind, in directions of these curvatures of the loss, ``(n,)``.

        Raises
        ------
        SettingsError
            If steps are so long that they diverge.
        """
        step = self.learning_rate * curvature
        if float(step.max()) > 2:
            raise SettingsError(
                f"gradient descent diverges with learning rate {self.learning_rate:g}; it must be at most "
                f"{2 / float(curvature.max()):.4g}, two over the largest curvature"
            )
        small = step < 0.5
        slowly = -torch.expm1(self.num_steps * torch.log1p(-torch.where(small, step, 0)))
        return torch.where(small, slowly, 1 - (1 - step) ** self.num_steps)

    def __str__(self) -> str:
        return f"{self.num_steps} steps of gradient descent, learning rate {self.learning_rate:g}"


def mean_squares_rate(learning_rate: float, y: Tensor) -> float:
    """Return the learning rate of half the sum of squares that trains as this one of ``torch.nn.MSELoss`` does.

    Parameters
    ----------
    learning_rate : float
        With which the mean of squares over all entries of ``y`` is minimised.
    y : Tensor

    Examples
    --------
    >>> import torch
    >>> mean_squares_rate(0.5, torch.zeros(5, 2))
    0.1
    """
    return 2 * real_number("learning_rate", learning_rate, between=(0.0, math.inf)) / y.numel()


def relative_ridge(diagonal: Tensor, share: float) -> float:
    """Return a ridge, or noise variance, as a share of the mean of a kernel's diagonal.

    Parameters
    ----------
    diagonal : Tensor
        Such as ``kernel.ntk_diagonal(x)``.
    share : float

    Examples
    --------
    >>> import torch
    >>> relative_ridge(torch.tensor([1.0, 3.0]), 0.01)
    0.02
    """
    return not_negative("share", share) * float(diagonal.mean())
