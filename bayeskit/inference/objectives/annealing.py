"""Weights that change over the steps of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bayeskit.errors import SettingsError


@runtime_checkable
class Schedule(Protocol):
    """A weight for each step, counted from zero."""

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        ...


@dataclass(frozen=True)
class Linear:
    """From ``start`` to ``end`` in ``num_steps`` equal steps, then ``end``.

    Examples
    --------
    >>> Linear(10)(0), Linear(10)(5), Linear(10)(100)
    (0.0, 0.5, 1.0)
    """

    num_steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise SettingsError(f"num_steps must be at least 1, not {self.num_steps}")

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        return self.start + (self.end - self.start) * min(step / self.num_steps, 1.0)


@dataclass(frozen=True)
class Cyclical:
    """Again and again from ``start`` to ``end``: up over the first half of each period, then constant.

    References
    ----------
    Fu, H. et al. (2019). Cyclical annealing schedule: a simple approach to mitigating KL vanishing. NAACL.

    Examples
    --------
    >>> Cyclical(10)(0), Cyclical(10)(5), Cyclical(10)(12)
    (0.0, 1.0, 0.4)
    """

    period: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if self.period < 2:
            raise SettingsError(f"period must be at least 2, not {self.period}")

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        return self.start + (self.end - self.start) * min(2 * (step % self.period) / self.period, 1.0)
