"""The value and gradient of a tempered log density, and its evaluation by automatic differentiation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.torch_internals import gradient_and_rest


class Evaluation(NamedTuple):
    """Log density and gradient of ``n`` vectors.

    Attributes
    ----------
    log_prior, log_likelihood, log_density : Tensor
        Shape ``(n,)``; ``log_density = log_prior + beta * log_likelihood``.
    gradient : Tensor
        Gradient of ``log_density``, shape ``(n, d)``.
    """

    log_prior: Tensor
    log_likelihood: Tensor
    log_density: Tensor
    gradient: Tensor


Evaluator = Callable[[Tensor, Tensor], Evaluation]
Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A batched joint density: ``(n, d) -> log_prior (n,), log_likelihood (n,)``."""


class Integrator(ABC):
    """An evaluator that also follows Hamiltonian trajectories, without a return to Python between their steps."""

    @abstractmethod
    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows ``(n, d)`` at inverse temperatures ``(n,)``."""

    @abstractmethod
    def fits(self, q: Tensor, factor: Tensor, is_dense: bool) -> bool:
        """Tell whether it can move positions ``(n, d)`` by a metric with this factor."""

    @abstractmethod
    def integrate(
        self,
        q: Tensor,
        p: Tensor,  # whitened
        step: Tensor,  # (n,)
        beta: Tensor,  # (n,)
        factor: Tensor,  # of the metric: (d,) or (g, d); lower triangles (d, d) or (g, d, d) if is_dense
        is_dense: bool,
        drift: float,  # in steps
        kicks: Sequence[float],  # in steps, one after each drift
        start: Evaluation | None = None,
    ) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
        """Move ``q``, ``p`` ``(n, d)``; return both, the last evaluation, and what was met on the way ``(4, n)``.

        That is the lowest log density; with the evaluation of ``q`` as ``start`` also the highest energy, and the
        number of steps into zero density, which reverse the momentum of rows that start at a positive one (the last).
        """


def tempered(log_prior: Tensor, log_likelihood: Tensor, beta: Tensor) -> Tensor:
    """Return ``log_prior + beta * log_likelihood``; ``beta = 0`` gives the prior even where the likelihood is 0."""
    return torch.where(beta == 0, log_prior, log_prior + beta * log_likelihood)


def with_gradient(joint: Joint) -> Evaluator:
    """Return the eager evaluation of ``joint`` and its gradient by automatic differentiation."""

    def total(u: Tensor, beta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        log_prior, log_likelihood = joint(u)
        log_density = tempered(log_prior, log_likelihood, beta)
        return log_density.sum(), (log_prior, log_likelihood, log_density)

    def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
        gradient, log_prior, log_likelihood, log_density = gradient_and_rest(total, u, beta)
        return Evaluation(log_prior, log_likelihood, log_density, gradient)

    return evaluate


def with_gradient_loop(joint: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Evaluator:
    """Return the evaluation, vector by vector, of a density that takes one vector ``(d,)`` and cannot be batched."""

    def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
        rows = []
        for vector, b in zip(u.detach(), beta, strict=True):
            with torch.enable_grad():
                leaf = vector.clone().requires_grad_(True)
                log_prior, log_likelihood = joint(leaf)
                log_density = tempered(log_prior, log_likelihood, b)
                (gradient,) = torch.autograd.grad(log_density, leaf)
            rows.append((log_prior.detach(), log_likelihood.detach(), log_density.detach(), gradient))
        return Evaluation(*(torch.stack(column) for column in zip(*rows, strict=True)))

    return evaluate
