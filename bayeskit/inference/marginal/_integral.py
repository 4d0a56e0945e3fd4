"""What every way of integrating the inner coordinates out gives for a batch of remaining coordinates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.inference.marginal._hessian import Hessian
from bayeskit.inference.marginal._inner_density import InnerDensity, RemainingPrior
from bayeskit.inference.marginal._modes import InnerModes, find_inner_modes, require_modes


class IntegralValue(NamedTuple):
    """Integrals over the inner coordinates at ``n`` vectors; numbers count only where ``found``."""

    log_likelihood: Tensor  # (n,), the log integral minus the log prior of the remaining sites
    gradient: Tensor  # (n, p), of the log likelihood
    found: Tensor  # (n,), bool
    next_start: Tensor  # (n, m), from where a further evaluation goes on


class ModePrediction(NamedTuple):
    """The mode of the inner coordinates to first order about a reference."""

    reference: Tensor  # (p,)
    mode: Tensor  # (m,), at the reference
    tangent: Tensor  # (p, m), derivative of the mode


@dataclass(frozen=True)
class InnerIntegral(ABC):
    """One way of integrating the inner coordinates of a density out."""

    density: InnerDensity

    @property
    @abstractmethod
    def description(self) -> str:
        """The structure of the integral in words."""

    @abstractmethod
    def start(self, r: Tensor) -> Tensor:
        """Return inner coordinates from which to evaluate, ``(n, p) -> (n, m)``."""

    @abstractmethod
    def evaluate(self, r: Tensor, start: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals by operations that can be traced; they depend on ``start`` only by rounding."""

    @abstractmethod
    def drawn(self, rows: Tensor, chunk: int, generator: torch.Generator) -> Tensor:
        """Return a draw of the inner coordinates at each of ``rows`` ``(n, p)``, ``chunk`` rows at a time."""


@dataclass(frozen=True)
class SearchedIntegral(InnerIntegral):
    """An integral from the mode and the Hessian there."""

    hessian: Hessian
    prediction: ModePrediction

    def start(self, r: Tensor) -> Tensor:
        """Return predicted modes, ``(n, p) -> (n, m)``."""
        return self.prediction.mode + (r - self.prediction.reference) @ self.prediction.tangent

    @abstractmethod
    def searched(self, r: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals at modes by a guarded search, where evaluations do not end at a mode."""

    def guarded_modes(self, r: Tensor) -> InnerModes:
        """Return modes by a guarded search from the mode at the reference."""
        return find_inner_modes(self.hessian, r, self.prediction.mode.expand(len(r), -1))

    def drawn(self, rows: Tensor, chunk: int, generator: torch.Generator) -> Tensor:
        """Return draws from the normal density with the mode and the Hessian there."""
        density, parts = self.density, []
        noise = torch.randn(len(rows), density.num_inner, generator=generator, dtype=density.dtype).to(density.device)
        for r, e in zip(rows.split(chunk), noise.split(chunk), strict=True):
            modes = self.guarded_modes(r)
            require_modes(modes, density)
            parts.append(modes.z + self.hessian.structure.spread(modes.factor, e))
        return torch.cat(parts)
