"""Trace a minibatch density with its gradient once, rows as an input, and compile it where it pays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bayeskit import _evaluation
from bayeskit._engine import Compile
from bayeskit._evaluation import Evaluation
from bayeskit._tracing import UNTRACEABLE, first_line
from bayeskit.errors import CompilationWarning, ModelError, SlowModelWarning
from bayeskit.inference.samplers.stochastic_gradient._density import MinibatchDensity

Estimator = Callable[[Tensor, Tensor], Evaluation]
"""``(u (n, d), rows (n, B)) -> Evaluation``."""


class MinibatchEngine:
    """Estimators of one density, by number of chains and of planned calls.

    Attributes
    ----------
    loops : bool
        Whether the density cannot be batched and is evaluated chain by chain.
    """

    def __init__(self, density: MinibatchDensity) -> None:
        self._density = density
        self._estimators: dict[tuple[int, int, Compile], Estimator] = {}
        self.loops = not self._can_be_batched()

    def estimator(self, num_vectors: int, num_calls: int, compile: Compile) -> Estimator:
        """Return the estimator for ``num_vectors`` chains, compiled if ``compile`` or the plan says so."""
        key = (num_vectors, num_calls, compile)
        found = self._estimators.get(key)
        if found is None:
            found = self._estimators[key] = self._make(num_vectors, num_calls, compile)
        return found

    def _example(self, num_vectors: int) -> tuple[Tensor, Tensor]:
        density = self._density
        u = torch.zeros(num_vectors, density.dim, dtype=density.dtype, device=density.device)
        rows = torch.arange(density.batch_size, device=density.device)
        return u, rows.expand(num_vectors, -1).contiguous()

    def _can_be_batched(self) -> bool:
        u, rows = self._example(2)
        try:
            torch.func.vmap(self._density.joint)(u, rows)
        except ModelError:
            raise
        except UNTRACEABLE as error:
            try:
                self._density.joint(u[0], rows[0])
            except UNTRACEABLE as own:
                raise ModelError(f"the density cannot be evaluated: {own}") from own
            warnings.warn(
                f"the model cannot be batched ({first_line(error)}), so it is evaluated in a loop over chains, "
                "many times slower; replace Python control flow on sampled values by torch.where",
                SlowModelWarning,
                stacklevel=5,
            )
            return False
        return True

    def _make(self, num_vectors: int, num_calls: int, compile: Compile) -> Estimator:
        if self.loops:
            return self._one_by_one
        example = self._example(num_vectors)
        try:
            graph = _evaluation.trace_call(self._with_gradient, *example)
        except UNTRACEABLE as error:
            warnings.warn(
                f"the density cannot be traced ({first_line(error)}) and runs eagerly, slower",
                CompilationWarning,
                stacklevel=5,
            )
            return torch.no_grad()(self._with_gradient)
        call: Callable[..., tuple[Tensor, ...]] = graph
        # The estimate rests on the graph, not on a clock, so that a resumed run decides alike.
        cost = _evaluation.cost(graph)
        if compile is True or (compile == "auto" and num_calls * cost.seconds(1) > cost.compile_seconds):
            call = _evaluation.compile_graph(graph, *example)

        def estimate(u: Tensor, rows: Tensor) -> Evaluation:
            with torch.no_grad():  # the gradient is in the graph
                return Evaluation(*call(u.contiguous(), rows.contiguous()))

        return estimate

    def _with_gradient(self, u: Tensor, rows: Tensor) -> Evaluation:
        def total(u: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            log_prior, log_likelihood = torch.func.vmap(self._density.joint)(u, rows)
            log_density = log_prior + log_likelihood
            return log_density.sum(), (log_prior, log_likelihood, log_density)

        gradient, (log_prior, log_likelihood, log_density) = torch.func.grad(total, has_aux=True)(u)
        return Evaluation(log_prior, log_likelihood, log_density, gradient)

    def _one_by_one(self, u: Tensor, rows: Tensor) -> Evaluation:
        parts = []
        for vector, own in zip(u, rows, strict=True):
            evaluate = _evaluation.with_gradient_loop(partial(self._density.joint, rows=own))
            parts.append(evaluate(vector.unsqueeze(0), vector.new_ones(1)))
        return Evaluation(*(torch.cat(column) for column in zip(*parts, strict=True)))
