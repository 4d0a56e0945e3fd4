"""Sums of exponentials in a density, replaced by one of their terms.

A narrow term of a mixture has no slope to follow outside of its own width: the other terms are larger there. The term
by itself has one everywhere, so a search finds its mode from any start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayeskit._core.evaluation import Evaluator
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.own_density import ValueAndGradient
from bayeskit._logdensity.target import Target

#: Largest number of terms that are maximized, each in all sums at once.
_MOST = 8
_PAIRS = (torch.logaddexp, Tensor.logaddexp)
_SUMS = (torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)


class _OneTerm(TorchFunctionMode):
    """Replaces sums of exponentials by the term number ``which``, or, if None, by the mean of the logarithms."""

    def __init__(self, which: int | None) -> None:
        super().__init__()
        self.which = which
        self.most = 0  # terms of a sum

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PAIRS and len(args) == 2 and not kwargs:
            return self._term(torch.stack(torch.broadcast_tensors(*args)), 0, False)
        if func in _SUMS:
            return self._sum(*args, **kwargs)
        return func(*args, **kwargs)

    def _sum(self, values: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
        dims = sorted({d % values.dim() for d in ((dim,) if isinstance(dim, int) else dim)}, reverse=True)
        for one in dims:
            values = self._term(values, one, keepdim)
        return values

    def _term(self, values: Tensor, dim: int, keepdim: bool) -> Tensor:
        self.most = max(self.most, values.shape[dim])
        if self.which is None:
            return values.mean(dim, keepdim)
        place = self.which % values.shape[dim]
        return values.narrow(dim, place, 1) if keepdim else values.select(dim, place)


def objectives_of_summands(target: Target) -> Iterator[ValueAndGradient]:
    """Yield the log density with each sum of exponentials replaced by the mean of its terms, then by single terms.

    None without such sums, where vectors are evaluated one by one, and where gradients are not torch's.
    """
    evaluate = target.untraced()
    if evaluate is None:
        return
    origin = torch.zeros(2, target.dim, dtype=target.dtype, device=target.device)
    probe = _OneTerm(None)
    with suppress(*UNTRACEABLE), probe:
        evaluate(origin, torch.ones_like(origin[:, 0]))
    for which in (None, *range(min(probe.most, _MOST))) if probe.most > 1 else ():
        yield _of_terms(evaluate, which)


def _of_terms(evaluate: Evaluator, which: int | None) -> ValueAndGradient:
    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        with _OneTerm(which):
            found = evaluate(u, torch.ones_like(u[:, 0]))
        return found.log_density.detach(), found.gradient

    return value_and_gradient
