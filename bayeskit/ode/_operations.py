"""The solution of all chains and its gradient as operations of torch: compiled C++, or steps of the batch in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler import call_library, function_of_text, library_of

_COUNTS: ContextVar[list[FailureCount] | None] = ContextVar("counts of failures", default=None)


class FailureCount(NamedTuple):
    """Number of solutions of differential equations, and of those that failed."""

    num_solutions: int
    num_failures: int


@contextmanager
def counted() -> Iterator[list[FailureCount]]:
    """Context in which each run of the operation, in this thread, adds its count to a list."""
    counts: list[FailureCount] = []
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


@torch.library.custom_op(
    "bayeskit::ode",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt times, SymInt batch, float[] settings, str[] texts, str source) -> Tensor",
)
def ode(
    tensors: Sequence[Tensor],
    times: int,
    batch: int,
    settings: Sequence[float],
    texts: Sequence[str],
    source: str,
) -> Tensor:
    """Return the states of all times, ``(B, T, d)``; the row of a chain that failed is NaN."""
    if source:
        path = tensors[1].new_empty(batch, times, tensors[1].shape[1])
        call_library(library_of(source), tensors, [path], times, batch)
    else:
        path = _Integration(tensors, settings, texts).run()
    if (counts := _COUNTS.get()) is not None:
        counts.append(FailureCount(batch, int(path[:, -1].isnan().any(-1).sum())))
    return path


@torch.library.custom_op(
    "bayeskit::ode_gradient",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] wanted, SymInt times, SymInt batch, float[] settings, str[] texts, str source) "
    "-> Tensor[]",
)
def ode_gradient(
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    times: int,
    batch: int,
    settings: Sequence[float],
    texts: Sequence[str],
    source: str,
) -> list[Tensor]:
    """Return the gradients of the ``wanted`` tensors at the steps that the solution has taken."""
    if not source:
        return _Integration(tensors[:-1], settings, texts).pull_back(tensors[-1], wanted, texts[-1])
    found = [torch.zeros_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]
    call_library(library_of(source), tensors, found, times, batch)
    return found


@ode.register_fake
def _(tensors: Sequence[Tensor], times: int, batch: int, *_: Any) -> Tensor:
    return tensors[1].new_empty(batch, times, tensors[1].shape[1])


@ode_gradient.register_fake
def _(tensors: Sequence[Tensor], wanted: Sequence[int], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]


class _Taken(NamedTuple):
    """Steps that some chains took from ``y`` at times ``t``, and the places of the times at which they ended, or -1."""

    t: Tensor
    h: Tensor
    y: Tensor
    accepted: Tensor
    landed: Tensor


class _Integration:
    """The steps of the C++, taken by all chains at once; each chain accepts its own."""

    def __init__(self, tensors: Sequence[Tensor], settings: Sequence[float], texts: Sequence[str]) -> None:
        self._grid, self._start, *self._others = tensors
        self._rtol, self._atol, self._most = settings
        self._slope, self._step = (function_of_text(text) for text in texts[:2])

    def run(self, noted: Callable[[_Taken], None] | None = None) -> Tensor:
        """Return the solution, ``(B, T, d)``, and note the steps."""
        grid, y = self._grid, self._start
        (batch, dim), times = y.shape, len(grid)
        path = y.new_full((batch, times, dim), torch.nan)
        path[:, 0] = y
        t, before, done = y.new_zeros(batch), y.new_full((batch,), 1e-4), grid.new_ones(batch).long()
        peak = y.abs()
        running, late = torch.full_like(done, times > 1, dtype=torch.bool), torch.zeros_like(done, dtype=torch.bool)
        failed, tries = torch.zeros_like(late), 0
        h = self._first_step(grid[0].expand(batch), y) if times > 1 else t
        while bool(running.any()):
            origin = grid[done - 1]  # t is the time since then
            left = grid[done.clamp(max=times - 1)] - origin - t
            later = t + torch.where(h >= left, left, torch.where(2 * h > left, left / 2, h))
            length = torch.where(h >= left, left, later - t)
            failed |= running & (~(later > t) | (tries == self._most))
            running &= ~failed
            tries += 1
            new, error = self._step(None, origin + t, length, y, *self._others)
            reached = torch.maximum(peak, new.abs())
            scale = self._absolute(reached) + self._rtol * torch.maximum(y.abs(), new.abs())
            norm = (error / scale + 0 * new).square().mean(-1).sqrt()
            accepted = running & (norm <= 1)
            landed = accepted & (length == left)
            if noted is not None:
                noted(_Taken(origin + t, length, y, accepted, torch.where(landed, done, -1)))
            factor = (0.9 * norm.clamp(min=1e-10) ** -0.17 * before**0.04).clamp(0.2, 10)
            factor = torch.where(late, factor.clamp(max=1), factor)
            next_h = torch.where((factor == 10) & (10 * length < h), h, length * factor)
            shorter = length * (0.9 * norm**-0.2).clamp(min=0.2).nan_to_num(nan=0.2)
            shorter = torch.where(t + shorter == later, length / 4, shorter)  # not the same step again
            h = torch.where(accepted, next_h, torch.where(running, shorter, h))
            before, late = torch.where(accepted, norm.clamp(min=1e-4), before), running & ~accepted
            t = torch.where(landed, 0, torch.where(accepted, later, t))
            y, peak = (torch.where(accepted.unsqueeze(-1), *pair) for pair in ((new, y), (reached, peak)))
            rows = landed.nonzero().squeeze(-1)
            path[rows, done[rows]] = y[rows]
            done = done + landed.long()
            running &= done < times
        return path.masked_fill(failed[:, None, None], torch.nan)

    def _first_step(self, t: Tensor, y: Tensor) -> Tensor:
        (slope,) = self._slope(None, t, y, *self._others)
        highest = y.abs().amax(-1, keepdim=True)
        unit = torch.where(highest > 0, highest, 1.0)
        scale = self._atol + self._rtol * (y.abs() if self._atol else unit)
        size, speed = ((x / scale).square().mean(-1).sqrt() for x in (y, slope))
        first = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
        first = first.clamp(max=float(self._grid[-1] - self._grid[0]))
        (moved,) = self._slope(None, t + first, y + first.unsqueeze(-1) * slope, *self._others)
        turn = ((moved - slope) / scale).square().mean(-1).sqrt() / first
        most = torch.maximum(turn, speed)
        h = torch.where(most <= 1e-15, (first * 1e-3).clamp(min=1e-6), (0.01 / most) ** 0.2)
        return torch.minimum(h, 100 * first)

    def _absolute(self, reached: Tensor) -> Tensor | float:
        if self._atol:
            return self._atol
        kind = torch.finfo(reached.dtype)
        least = (kind.eps * reached.amax(-1, keepdim=True)).clamp(min=kind.tiny)
        return torch.maximum(0.01 * self._rtol * reached, least)

    def pull_back(self, cotangent: Tensor, wanted: Sequence[int], text: str) -> list[Tensor]:
        """Return the gradients of the ``wanted`` operands, step by step from the last."""
        pull, steps = function_of_text(text), list[_Taken]()
        failed = self.run(steps.append)[:, -1].isnan().any(-1) & (cotangent != 0).flatten(1).any(-1)
        later, chains = torch.zeros_like(self._start), torch.arange(len(cotangent), device=cotangent.device)
        total: dict[int, Any] = {place: 0.0 for place in wanted if place > 1}
        for taken in reversed(steps):
            own = taken.accepted.unsqueeze(-1)
            landed = later + cotangent[chains, taken.landed.clamp(min=0)]
            later = torch.where((taken.landed >= 0).unsqueeze(-1), landed, later)
            before, *parts = pull(None, taken.t, taken.h, taken.y, *self._others, torch.where(own, later, 0.0))
            later = torch.where(own, before, later)
            for place, part in zip(total, parts, strict=True):
                total[place] = total[place] + torch.where(_like(taken.accepted, part), part, 0.0)
        total[1] = later + cotangent[:, 0]
        found = []
        for place in wanted:
            x = total[place] if steps or place == 1 else torch.zeros_like(self._others[place - 2])
            if steps:
                x = x.masked_fill(_like(failed, x), torch.nan)
                x = x.sum(0) if place > 1 and x.dim() > self._others[place - 2].dim() else x
            found.append(x.clone())
        return found


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(-1, *(1,) * (x.dim() - 1))
