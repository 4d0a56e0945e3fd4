"""How many terms of an infinite sum to take: distributions of a stopping index, given by their tails."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bayeskit.errors import SettingsError


@runtime_checkable
class Tail(Protocol):
    """Distribution of a whole number of at least one."""

    @property
    def mean(self) -> float:
        """Expected number."""
        ...

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``: float64, of the shape of ``k``, one for ``k <= 1``."""
        ...

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        ...


@dataclass(frozen=True)
class ReciprocalTail:
    """Reaches ``k`` with probability ``1 / k`` up to ``switch``, from there on falling geometrically.

    Parameters
    ----------
    switch : int, default 80
    decay : float, default 0.9
        Factor by which the probability falls at each step from ``switch`` on.
    cap : int, optional
        Never go beyond it: bounded cost, at the price of a bias, for the terms beyond are never seen. What is
        estimated then is the sum up to ``cap``.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Luo, Y. et al. (2020). SUMO: unbiased estimation of log marginal probability for latent variable models. ICLR.

    Examples
    --------
    >>> round(ReciprocalTail().mean, 4)
    5.078
    >>> ReciprocalTail().survival(torch.tensor([1, 4, 80]))
    tensor([1.0000, 0.2500, 0.0125], dtype=torch.float64)
    """

    switch: int = 80
    decay: float = 0.9
    cap: int | None = None

    def __post_init__(self) -> None:
        _check_count("switch", self.switch)
        _check_decay(self.decay)
        _check_cap(self.cap)

    @classmethod
    def of_mean(cls, mean: float, decay: float = 0.9) -> ReciprocalTail:
        """Return the tail without a cap whose mean comes closest to ``mean`` by choice of ``switch``.

        Examples
        --------
        >>> tail = ReciprocalTail.of_mean(4.0)
        >>> tail.switch, round(tail.mean, 2)
        (18, 4.0)
        """
        _check_decay(decay)
        switch = max(1, math.ceil(decay / (1 - decay) - 1e-9))  # where the mean is smallest
        tail = cls(switch, decay)
        if mean < tail.mean:
            raise SettingsError(
                f"no ReciprocalTail with decay {decay} has a mean below {tail.mean:.4g}; lower decay, or use "
                "GeometricTail.of_mean"
            )
        if mean > 12:
            raise SettingsError(
                f"a ReciprocalTail of mean {mean} would reach {math.exp(mean - 1):.1e} terms; leave it at 12 or less "
                "and raise SUMO's minimum_particles instead"
            )
        while (after := cls(tail.switch + 1, decay)).mean <= mean:
            tail = after
        return after if after.mean - mean < mean - tail.mean else tail

    @property
    def mean(self) -> float:
        """Expected number."""
        if self.cap is not None:
            return float(self.survival(torch.arange(1, self.cap + 1)).sum())
        return float((1.0 / torch.arange(1, self.switch, dtype=torch.float64)).sum()) + 1 / (
            self.switch * (1 - self.decay)
        )

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``."""
        k = k.to(torch.float64)
        beyond = self.decay ** (k - self.switch).clamp(min=0) / self.switch
        return _capped(torch.where(k < self.switch, 1 / k.clamp(min=1), beyond), k, self.cap)

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        u = _uniform()
        if u > 1 / self.switch:
            drawn = math.floor(1 / u)
        else:
            drawn = self.switch + math.floor(math.log(self.switch * u) / math.log(self.decay))
        return drawn if self.cap is None else min(drawn, self.cap)


@dataclass(frozen=True)
class GeometricTail:
    """Reaches ``k`` with probability ``decay ** (k - 1)``.

    Parameters
    ----------
    decay : float, default 0.9
    cap : int, optional
        As in :class:`ReciprocalTail`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Examples
    --------
    >>> round(GeometricTail(0.75).mean, 4), round(GeometricTail(0.75, cap=2).mean, 4)
    (4.0, 1.75)
    """

    decay: float = 0.9
    cap: int | None = None

    def __post_init__(self) -> None:
        _check_decay(self.decay)
        _check_cap(self.cap)

    @classmethod
    def of_mean(cls, mean: float) -> GeometricTail:
        """Return the tail without a cap that has this mean, above one."""
        if not (mean > 1 and math.isfinite(mean)):
            raise SettingsError(f"mean must be a finite number above 1, not {mean}")
        return cls(1 - 1 / mean)

    @property
    def mean(self) -> float:
        """Expected number."""
        lost = 0.0 if self.cap is None else self.decay**self.cap
        return (1 - lost) / (1 - self.decay)

    def survival(self, k: Tensor) -> Tensor:
        """Return the probability of reaching ``k``."""
        k = k.to(torch.float64)
        return _capped(self.decay ** (k - 1).clamp(min=0), k, self.cap)

    def sample(self) -> int:
        """Draw a number from torch's global random stream."""
        drawn = 1 + math.floor(math.log(_uniform()) / math.log(self.decay))
        return drawn if self.cap is None else min(drawn, self.cap)


def _uniform() -> float:
    """Draw from (0, 1], whose logarithm is finite."""
    return 1.0 - float(torch.rand((), dtype=torch.float64))


def _capped(survival: Tensor, k: Tensor, cap: int | None) -> Tensor:
    return survival if cap is None else torch.where(k <= cap, survival, 0.0)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_cap(cap: int | None) -> None:
    if cap is not None:
        _check_count("cap", cap)


def _check_decay(decay: float) -> None:
    if not 0 < decay < 1:
        raise SettingsError(
            f"decay must lie between 0 and 1, not {decay}: at 0 later terms would have probability zero, at 1 the "
            "sum would never end"
        )
