"""What every family of generated problems shares: its interface, and quadrature whose error is measured."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.exact.case import ExactCase

MAX_ERROR = 1e-7  # of a quadrature, in nats
NEGLIGIBLE = 60.0  # nats below the maximum, where an integrand is cut off
NODES, PIECES, DOUBLINGS = 48, 60, 6
NEGLIGIBLE_IN_SPACE, MAX_POINTS = 40.0, 2**23

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Family(ABC):
    """A kind of problem; subclasses have their hyper-parameters and data as fields."""

    @classmethod
    @abstractmethod
    def random(cls, rng: np.random.Generator) -> Family:
        """Draw hyper-parameters and data."""

    @abstractmethod
    def log_evidence(self) -> tuple[float, float]:
        """Return the exact log evidence, in nats, and a bound of its error."""

    @abstractmethod
    def model(self) -> Callable[..., Any]:
        """Return the Pyro model, a function of :meth:`args`."""

    @abstractmethod
    def args(self) -> tuple[Tensor, ...]:
        """Return the arguments of the model, data first."""

    def case(self) -> ExactCase:
        """Return the problem with its answer; its name is the representation of the family."""
        value, error = self.log_evidence()
        return ExactCase(
            repr(self), type(self).__doc__ or "", self.model(), self.args(), value, None, None, "computed", error
        )

    def simpler(self) -> Iterator[Family]:
        """Yield smaller forms: half of the data, and hyper-parameters that are one, or a power of ten."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) > 1:
                yield replace(self, **{field.name: value[: len(value) // 2]})
            elif isinstance(value, float) and value > 0:
                power = 10.0 ** round(math.log10(value))
                yield from (replace(self, **{field.name: new}) for new in (1.0, power) if new != value)


def wide(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform, to three digits."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def tensors(*values: Any) -> tuple[Tensor, ...]:
    """Return numbers and tuples as tensors in double precision."""
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


# -- quadrature -----------------------------------------------------------------------------------------------


def log_integral(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> tuple[float, float]:
    """Return the logarithm of the integral of ``exp(log_f)`` over an interval, and a bound of its error.

    Pieces lie where the integrand is within 60 nats of its maximum, which a grid finds; their number is doubled until
    the integral stays.

    Raises
    ------
    DataError
        If the largest numbers of pieces disagree, so that the integrand is rougher than this can integrate.
    """
    for _ in range(3):  # twice nearer to where the integrand is large
        grid = np.linspace(low, high, 20_001)
        values = log_f(grid)
        large = np.flatnonzero(values > np.nanmax(values) - NEGLIGIBLE)
        low, high = grid[max(0, large[0] - 1)], grid[min(len(grid) - 1, large[-1] + 1)]
    fine = _gauss_legendre(log_f, low, high, PIECES)
    for doubling in range(1, DOUBLINGS + 1):
        coarse, fine = fine, _gauss_legendre(log_f, low, high, PIECES * 2**doubling)
        error = abs(fine - coarse) + 1e-12 * (1 + abs(fine))
        if error <= MAX_ERROR:
            return fine, error
    raise DataError(f"the quadrature of a generated problem is known to {error:.1g} nats only; draw another one")


def _gauss_legendre(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float, pieces: int) -> float:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    edges = np.linspace(low, high, pieces + 1)
    half = 0.5 * (edges[1] - edges[0])
    x = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * nodes).ravel()
    return float(logsumexp(log_f(x), b=np.tile(half * weights, pieces)))


Density = Callable[[np.ndarray], np.ndarray]


def log_integral_over_space(log_f: Density, start: Sequence[float]) -> tuple[float, float]:
    """Return the logarithm of the integral of ``exp(log_f)`` over a space of two or three dimensions, and its error.

    In coordinates in which the integrand is round at its maximum, a box grows until the integrand is negligible
    outside. There the rule of trapezoids converges faster than any power for what is smooth; its points are doubled
    until the integral stays.

    Parameters
    ----------
    log_f : callable
        ``(n, d) -> (n,)``, smooth, with one hill that falls off on all sides.
    start : sequence of float
        Where the climb to its top begins.

    Raises
    ------
    DataError
        If the box does not end, or the largest numbers of points disagree.

    Examples
    --------
    >>> import math
    >>> from bayeskit.exact.family import log_integral_over_space
    >>> value, error = log_integral_over_space(lambda u: -0.5 * (u**2).sum(1), [1.0, 2.0])
    >>> abs(value - math.log(2 * math.pi)) < 1e-9, error < 1e-9
    (True, True)
    """
    top, axes = _round_coordinates(log_f, np.array(start, dtype=float))
    d = len(top)

    def at(edges: np.ndarray, count: int) -> np.ndarray:
        grid = np.stack(np.meshgrid(*(np.linspace(a, b, count) for a, b in edges), indexing="ij"), -1).reshape(-1, d)
        parts = np.array_split(grid, max(1, len(grid) // 50_000))
        return np.concatenate([log_f(top + part @ axes.T) for part in parts]).reshape((count,) * d)

    edges = np.full((d, 2), [-8.0, 8.0])
    for _ in range(40):
        values = at(edges, 41)
        large = np.argwhere(values > np.nanmax(values) - NEGLIGIBLE_IN_SPACE)
        touched = np.stack([large.min(0) == 0, large.max(0) == 40], 1)
        if not touched.any():
            break
        edges = np.where(touched, 1.6 * edges, edges)
    else:
        raise DataError("an integrand of a generated problem does not fall off; draw another one")
    width = (edges[:, 1] - edges[:, 0]) / 40
    edges = np.stack([edges[:, 0] + width * (large.min(0) - 1), edges[:, 0] + width * (large.max(0) + 1)], 1)
    log_volume, fine, count, error = float(np.linalg.slogdet(axes)[1]), math.nan, 40, math.inf
    while count**d <= MAX_POINTS and not error <= MAX_ERROR:
        cell = float(np.log((edges[:, 1] - edges[:, 0]) / (count - 1)).sum())
        coarse, fine = fine, float(logsumexp(at(edges, count))) + cell + log_volume
        error, count = abs(fine - coarse) + 1e-12 * (1 + abs(fine)), 2 * count
    if not error <= MAX_ERROR:
        raise DataError(f"the quadrature of a generated problem is known to {error:.1g} nats only; draw another one")
    return fine, error


def _round_coordinates(log_f: Density, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum, and axes along which the integrand falls off alike."""
    options = {"maxiter": 5000, "xatol": 1e-5, "fatol": 1e-7}
    top = minimize(lambda x: -log_f(x[None])[0], start, method="Nelder-Mead", options=options).x
    height, unit = log_f(top[None])[0], np.eye(len(top))

    def fall(h: float, axis: np.ndarray) -> float:
        return float(height - min(log_f((top + h * axis)[None])[0], log_f((top - h * axis)[None])[0]))

    steps = []
    for axis in unit:
        h = 1.0
        while fall(h, axis) < 0.5 and h < 1e6:
            h *= 2
        while fall(h, axis) > 0.5 and h > 1e-9:
            h /= 2
        steps.append(h)
    step = np.diag(steps)

    def second(i: int, j: int) -> float:
        corners = [top + a * step[i] + b * step[j] for a in (1, -1) for b in (1, -1)]
        pp, pm, mp, mm = log_f(np.array(corners))
        return float(pp - pm - mp + mm) / 4

    precision = -np.array([[second(i, j) for j in range(len(top))] for i in range(len(top))])
    eigenvalues, vectors = np.linalg.eigh(precision)
    return top, step @ vectors / np.sqrt(np.clip(eigenvalues, 0.05, None))


__all__ = ["Family", "log_integral", "log_integral_over_space", "tensors", "wide"]
