"""Step sizes that may shrink as a sampler goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayeskit.errors import SettingsError


class Schedule(Protocol):
    """A step size for every iteration; it never grows."""

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the step size at ``iteration``, a tensor ``()``: shape ``()`` or ``(n,)``, one per chain."""
        ...


@dataclass(frozen=True, eq=False)
class Constant:
    """The same step size throughout.

    Parameters
    ----------
    value : float or Tensor
        Positive; a tensor of shape ``(n,)`` gives each chain its own.
    """

    value: float | Tensor

    def __post_init__(self) -> None:
        if not bool((torch.as_tensor(self.value) > 0).all()):
            raise SettingsError(f"step_size must be positive, not {self.value}")

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the value."""
        if isinstance(self.value, Tensor):
            return self.value.to(iteration.device, dtype)
        return torch.full((), self.value, dtype=dtype, device=iteration.device)


@dataclass(frozen=True)
class Polynomial:
    r"""Step sizes :math:`a\,(b + t)^{-\gamma}` at iteration :math:`t = 0, 1, \dots`.

    With :math:`1/2 < \gamma \le 1` they sum to infinity while their squares do not, so that
    the bias of the steps vanishes in the limit; the draws are then to be averaged with
    the step sizes as weights, which ``sample_stats["step_size"]`` holds.

    Parameters
    ----------
    a, b : float
        Positive.
    gamma : float in (0, 1], default 0.55

    References
    ----------
    Welling, M., Teh, Y. W. (2011). Bayesian learning via stochastic gradient Langevin
    dynamics. International Conference on Machine Learning.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Polynomial
    >>> Polynomial(a=0.1, b=1.0, gamma=0.5).at(torch.tensor(3), torch.float64).item()
    0.05
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise SettingsError(f"a and b must be positive, not {self.a} and {self.b}")
        if not 0 < self.gamma <= 1:
            raise SettingsError(f"gamma must lie in (0, 1], not {self.gamma}")

    def at(self, iteration: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the step size at ``iteration``."""
        return self.a * (self.b + iteration.to(dtype)).pow(-self.gamma)


def as_schedule(step_size: float | Tensor | Schedule) -> Schedule:
    """Return a number as a constant schedule, a schedule as it is."""
    return Constant(step_size) if isinstance(step_size, (int, float, Tensor)) else step_size
