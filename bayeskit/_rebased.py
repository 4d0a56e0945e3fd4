"""The same posterior with another distribution in the prior's place, for paths that start there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from bayeskit._density import Density
from bayeskit._evaluation import Cost, Evaluation, Evaluator, tempered
from bayeskit.errors import ModelError
from bayeskit.target import Target


class Reference(Protocol):
    """A normalised distribution over unconstrained space."""

    @property
    def parameters(self) -> list[Tensor]: ...
    def log_prob(self, u: Tensor) -> Tensor: ...
    def gradient(self, u: Tensor) -> Tensor: ...
    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor: ...


class RebasedDensity:
    """A density whose prior is a reference; the likelihood is what is left of the posterior."""

    def __init__(self, density: Density, reference: Reference) -> None:
        self._density, self._reference = density, reference
        self.sites, self.dim = density.sites, density.dim
        self.dtype, self.device = density.dtype, density.device
        self.data = [*density.data, *reference.parameters]

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        log_prior, log_likelihood = self._density.joint(u)
        reference = self._reference.log_prob(u)
        return reference, log_prior + log_likelihood - reference

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return self._density.values(u, deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._density.vector(values)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        raise ModelError("the likelihood of a rebased target is no product over observations; ask the target itself")


class RebasedTarget(Target):
    """The posterior of ``whole`` on a path from ``reference``, whose gradients come from the graphs of ``whole``.

    Parameters
    ----------
    whole : Target
    reference : Reference
        Takes the prior's place; the product of prior and likelihood stays what it was.
    """

    def __init__(self, whole: Target, reference: Reference) -> None:
        density = RebasedDensity(whole._density, reference)
        super().__init__(density, batched=whole._batched, sample_prior=reference.sample, compile=whole.compile)
        self._whole, self._reference, self._loops = whole, reference, whole._loops

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        """Return the evaluation of ``num_vectors`` rows; nothing that ``whole`` has traced is traced again."""
        evaluate = self._whole.evaluator(num_vectors, num_calls)

        def on_path(u: Tensor, beta: Tensor) -> Evaluation:
            posterior = evaluate(u, torch.ones_like(beta))
            log_reference = self._reference.log_prob(u)
            rest = posterior.log_density - log_reference
            gradient = torch.lerp(self._reference.gradient(u), posterior.gradient, beta.unsqueeze(-1))
            return Evaluation(log_reference, rest, tempered(log_reference, rest, beta), gradient)

        return on_path

    @property
    def cost(self) -> Cost:
        """That of ``whole``."""
        return self._whole.cost
