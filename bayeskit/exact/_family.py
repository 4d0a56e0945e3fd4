"""The interface of families of generated problems, and quadrature with error estimates."""

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
from bayeskit.exact._case import ExactCase

MAX_ERROR = 1e-7  # maximum quadrature error in nats
_NEGLIGIBLE = 60.0  # nats below the maximum at which an integrand is truncated
_NODES, _PIECES, _DOUBLINGS = 48, 60, 6
_NEGLIGIBLE_IN_SPACE, _MAX_POINTS = 40.0, 2**23

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Family(ABC):
    """Base class of families of problems; the fields of a subclass are hyperparameters and data."""

    @classmethod
    @abstractmethod
    def random(cls, rng: np.random.Generator) -> Family:
        """Draw hyperparameters and data."""

    @abstractmethod
    def log_evidence(self) -> tuple[float, float]:
        """Return the exact log evidence in nats and a bound on its error."""

    @abstractmethod
    def model(self) -> Callable[..., Any]:
        """Return the Pyro model, a function of :meth:`args`."""

    @abstractmethod
    def args(self) -> tuple[Tensor, ...]:
        """Return the arguments of the model, data first."""

    def case(self) -> ExactCase:
        """Return the problem as an :class:`ExactCase`; its name is the ``repr`` of this object."""
        value, error = self.log_evidence()
        return ExactCase(
            repr(self), type(self).__doc__ or "", self.model(), self.args(), value, None, None, "computed", error
        )

    def simpler(self) -> Iterator[Family]:
        """Yield simpler problems: half of the data, or a hyperparameter set to 1 or rounded to a power of ten."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) > 1:
                yield replace(self, **{field.name: value[: len(value) // 2]})
            elif isinstance(value, float) and value > 0:
                power = 10.0 ** round(math.log10(value))
                yield from (replace(self, **{field.name: new}) for new in (1.0, power) if new != value)


def wide(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a log-uniform number, rounded to three digits."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def tensors(*values: Any) -> tuple[Tensor, ...]:
    """Return numbers and tuples as float64 tensors."""
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


# -- quadrature -----------------------------------------------------------------------------------------------


def log_integral(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> tuple[float, float]:
    """Return the log integral of ``exp(log_f)`` and an error estimate; DataError if the error exceeds ``MAX_ERROR``."""
    for _ in range(3):  # narrow the limits to the region where the integrand is not negligible
        grid = np.linspace(low, high, 20_001)
        values = log_f(grid)
        large = np.flatnonzero(values > np.nanmax(values) - _NEGLIGIBLE)
        low, high = grid[max(0, large[0] - 1)], grid[min(len(grid) - 1, large[-1] + 1)]
    fine = _gauss_legendre(log_f, low, high, _PIECES)
    # Double the number of pieces until the integral converges.
    for doubling in range(1, _DOUBLINGS + 1):
        coarse, fine = fine, _gauss_legendre(log_f, low, high, _PIECES * 2**doubling)
        error = abs(fine - coarse) + 1e-12 * (1 + abs(fine))
        if error <= MAX_ERROR:
            return fine, error
    raise DataError(f"the quadrature of a generated problem is known to {error:.1g} nats only; draw another problem")


def _gauss_legendre(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float, pieces: int) -> float:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.linspace(low, high, pieces + 1)
    half = 0.5 * (edges[1] - edges[0])
    x = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * nodes).ravel()
    return float(logsumexp(log_f(x), b=np.tile(half * weights, pieces)))


Density = Callable[[np.ndarray], np.ndarray]


def log_integral_over_space(log_f: Density, start: Sequence[float]) -> tuple[float, float]:
    """Return the log integral of ``exp(log_f)`` over two or three dimensions, and its error.

    The coordinates are standardized by the curvature at the mode. A box is enlarged until the integrand is negligible
    outside. The trapezoidal rule, which converges faster than any power for smooth integrands, is refined until the
    integral converges.

    Parameters
    ----------
    log_f : callable
        ``(n, d) -> (n,)``, smooth and unimodal, tending to minus infinity in all directions.
    start : sequence of float
        Initial point of the mode search.

    Returns
    -------
    value, error : float
        Log integral and an estimate of its error.

    Raises
    ------
    DataError
        If the integrand does not decay, or the rule has not converged with the maximum number of points.

    Examples
    --------
    >>> import math
    >>> from bayeskit.exact._family import log_integral_over_space
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
        large = np.argwhere(values > np.nanmax(values) - _NEGLIGIBLE_IN_SPACE)
        touched = np.stack([large.min(0) == 0, large.max(0) == 40], 1)
        if not touched.any():
            break
        edges = np.where(touched, 1.6 * edges, edges)
    else:
        raise DataError("the integrand of a generated problem does not fall off; draw another problem")
    width = (edges[:, 1] - edges[:, 0]) / 40
    edges = np.stack([edges[:, 0] + width * (large.min(0) - 1), edges[:, 0] + width * (large.max(0) + 1)], 1)
    log_volume, fine, count, error = float(np.linalg.slogdet(axes)[1]), math.nan, 40, math.inf
    while count**d <= _MAX_POINTS and not error <= MAX_ERROR:
        cell = float(np.log((edges[:, 1] - edges[:, 0]) / (count - 1)).sum())
        coarse, fine = fine, float(logsumexp(at(edges, count))) + cell + log_volume
        error, count = abs(fine - coarse) + 1e-12 * (1 + abs(fine)), 2 * count
    if not error <= MAX_ERROR:
        raise DataError(
            f"the quadrature of a generated problem is known to {error:.1g} nats only; draw another problem"
        )
    return fine, error


def _round_coordinates(log_f: Density, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mode, and the axes of coordinates in which the integrand has unit curvature there."""
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
