"""The density of the remaining sites as a target's density: values, gradients, draws from the prior, and latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayeskit._compiler import Compile, Cost, Engine, Evaluators, is_traced
from bayeskit._core.evaluation import Evaluation, Evaluator
from bayeskit._core.randomness import one_thread
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit.errors import ModelError
from bayeskit.inference.marginal._evaluation import (
    MarginalEvaluation,
    evaluate_integral,
    evaluate_untraced,
    traced_pass,
)
from bayeskit.inference.marginal._inner_density import InnerDensity
from bayeskit.inference.marginal._selection import select_integral
from bayeskit.inference.marginal._unbiased import ApproximateIntegral


class MarginalDensity(Evaluators):
    """A Pyro model's density with some sites integrated out, and its gradient."""

    def __init__(self, density: PyroDensity, over: Sequence[str]) -> None:
        self.dtype, self.device, self.data = density.dtype, density.device, density.data
        self.improper_sites = density.improper_sites
        self.inner = InnerDensity(density, over)
        self.dim, self.sites = self.inner.dim, self.inner.sites
        selection = select_integral(self.inner)
        self._integral, self._independent_sites = selection.integral, selection.independent_sites
        self.start, self.problems = selection.start, selection.problems
        self.num_failures = 0
        data_bytes = sum(x.numel() * x.element_size() for x in self.data)
        self._engine = Engine(
            None,
            self.dim + self.inner.num_inner,
            self.dtype,
            self.device,
            data_bytes,
            evaluate=partial(traced_pass, self._integral),
        )

    @property
    def description(self) -> str:
        """The structure of the integral in words."""
        return self._integral.description

    @property
    def approximation(self) -> ApproximateIntegral | None:
        """The integral where it is approximate, None where it is exact."""
        return self._integral if isinstance(self._integral, ApproximateIntegral) else None

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood, ``(*batch, p) -> (*batch)``, differentiable once."""
        if is_traced():
            raise RuntimeError("a search for modes cannot be traced")
        prior, likelihood = _KnownDerivatives.apply(u, self)
        return prior, likelihood

    def parts_with_gradients(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log prior, log likelihood, and the gradients of both, ``(n, p) -> (n,), (n,), (n, p), (n, p)``."""
        parts = []
        with one_thread():
            for r in rows.split(self.cost.chunk_size(len(rows))):
                found = self._counted(evaluate_untraced(self._integral, r))
                outside = self.inner.prior(r).gradient
                parts.append((found.log_prior, found.log_likelihood, outside, found.gradient - outside))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator for ``num_vectors`` rows."""
        return self._searching(self._engine.evaluator(num_vectors, num_calls, compile))

    def compiled(self, num_vectors: int) -> Evaluator | None:
        """Return an evaluator compiled already that serves ``num_vectors`` rows, or None."""
        found = self._engine.compiled(num_vectors)
        return None if found is None else self._searching(found)

    def _searching(self, one_pass: Evaluator) -> Evaluator:
        """Return an evaluator that searches for what a traced pass does not find."""

        def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
            with one_thread():
                chunk = self.cost.chunk_size(len(u))
                found = self._counted(evaluate_integral(self._integral, one_pass, u.detach(), beta, chunk))
                return Evaluation(
                    log_prior=found.log_prior,
                    log_likelihood=found.log_likelihood,
                    log_density=found.log_density(beta),
                    gradient=found.gradient,
                )

        return evaluate

    def _counted(self, found: MarginalEvaluation) -> MarginalEvaluation:
        """Return an evaluation with density zero where nothing is found, and count these rows."""
        self.num_failures += int(found.log_likelihood.isnan().sum())
        return found.zero_where_lost()

    @property
    def cost(self) -> Cost:
        """Nodes and bytes of the graph of one vector."""
        return self._engine.cost

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites at ``(n, p)``, and of deterministic ones that need no other site."""

        def one(r: Tensor) -> dict[str, Tensor]:
            found = self.inner.whole.values(self.inner.merged(r, self.inner.filler), deterministic)
            return {name: value for name, value in found.items() if name in self._independent_sites}

        found: dict[str, Tensor] = torch.func.vmap(one)(u)
        return found

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of one set of values."""
        otherwise = self.inner.merged(self.start, self.inner.filler)
        return self.inner.whole.vector(values, otherwise)[self.inner.remaining]

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained| of the remaining sites, ``(n, p) -> (n,)``."""
        raise ModelError("the Jacobian of the sites that are left is not known apart from that of the others")

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Raise ``ModelError``: data that share a latent site are dependent without it."""
        raise ModelError(
            "data are dependent once a site that they share is integrated out; draw it again by with_latents(draws)"
        )

    def log_prior(self, r: Tensor) -> Tensor:
        """Return the log prior of the remaining sites at ``(n, p)``."""
        return self.inner.log_prior(r)

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw from the prior of the remaining sites, ``(num_draws, p)``."""
        return self.inner.whole.prior_draws(num_draws, generator, True)[:, self.inner.remaining]

    def completed(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return vectors of all sites, those that were integrated out drawn at random, ``(n, p) -> (n, d)``."""
        with one_thread():
            z = self._integral.drawn(rows, self.cost.chunk_size(len(rows)), generator)
            return self.inner.merged_rows(rows, z)


class _KnownDerivatives(torch.autograd.Function):
    """Log prior and log likelihood whose derivatives are known, for automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, density: MarginalDensity) -> tuple[Tensor, Tensor]:
        prior, likelihood, *ctx.gradients = density.parts_with_gradients(u.detach().reshape(-1, u.shape[-1]))
        return prior.reshape(u.shape[:-1]), likelihood.reshape(u.shape[:-1])

    @staticmethod
    def backward(ctx: Any, along_prior: Tensor, along_likelihood: Tensor) -> tuple[Tensor, None]:
        sides = (along_prior.unsqueeze(-1), along_likelihood.unsqueeze(-1))
        return sum(a * g.reshape(*a.shape[:-1], -1) for a, g in zip(sides, ctx.gradients, strict=True)), None
