"""One evaluation of many topologies: groups that fit into the tables, and what autograd and `vmap` make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayeskit._tracing import is_traced
from bayeskit.models.phylogenetics.forest import native as forest_native
from bayeskit.models.phylogenetics.forest import passes as forest_passes
from bayeskit.models.phylogenetics.forest.mixture import Rates, mix_rows
from bayeskit.models.phylogenetics.forest.plan import Plan, SubPatterns, make_plan
from bayeskit.models.phylogenetics.trees.topologies import Topologies

#: Numbers in the largest table of the tensor operations, and in that of the rows of the root at each rate.
_TABLE_SIZE = 2**22
_ROWS_SIZE = 2**20


class Evaluation:
    """Log-likelihoods of given topologies, evaluated in groups that fit into the tables.

    Parameters
    ----------
    topologies : Topologies
    patterns : SubPatterns
        Over the same taxa in the same order.
    compile : bool
        Whether to use compiled code where that is possible.
    """

    def __init__(self, topologies: Topologies, patterns: SubPatterns, compile: bool) -> None:
        self._topologies, self._patterns, self._compile = topologies, patterns, compile

    def log_likelihood(self, inputs: Tensor, frequencies: Tensor, *rates: Tensor) -> Tensor:
        """Return log-likelihoods `(*sample, topologies)`, differentiable once by all arguments.

        Parameters
        ----------
        inputs : Tensor
            Branch lengths `(*sample, topologies, edges)` or transition matrices `(*sample, topologies, edges, 4, 4)`;
            with rates of sites, those at each rate, a dimension after that of topologies.
        frequencies : Tensor
            Stationary frequencies, shape `(*sample, topologies, 4)`.
        *rates : Tensor
            What `Rates` holds, if rates vary over sites: `(*sample, topologies, ...)`.
        """
        tensors = (inputs, frequencies, *rates)
        at_once = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        values: Tensor = _LogLikelihood.apply(self, at_once, *tensors)[0]
        return values

    def run(self, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return values and, on request, gradients by all tensors."""
        inputs, frequencies = tensors[:2]
        sample, count = frequencies.shape[:-2], len(self._topologies)
        if frequencies.numel() == 0:
            empty = inputs.new_zeros((*sample, count))
            return (empty, *(torch.zeros_like(tensor) for tensor in tensors)) if slopes else (empty,)
        tensors = tuple(tensor.reshape(sample.numel(), *tensor.shape[len(sample) :]) for tensor in tensors)
        # What records operations on tensors must be shown some.
        recorded = is_traced() or torch.compiler.is_compiling()
        native = self._compile and not recorded and forest_native.can_run(inputs.dtype, inputs.device)
        step = self._patterns.num_topologies
        if not native:
            step = min(step, max(1, _TABLE_SIZE // (4 * self._patterns.masks.size)))
        parts = []
        for first in range(0, count, step):
            group = slice(first, min(first + step, count))
            # The whole object knows its parents and clades already.
            topologies = self._topologies if step >= count else self._topologies[group]
            # Another thread's plan would take slots away from this one.
            with self._patterns.lock:
                plan = make_plan(topologies, self._patterns)
                parts.append(_run(plan, native, slopes, *(tensor[:, group] for tensor in tensors)))
        return tuple(column.reshape(*sample, *column.shape[1:]) for column in _joined(parts, 1))


def _run(plan: Plan, native: bool, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the passes, the vectors of branch lengths in parts where tables would become large."""
    inputs, frequencies, *rates = tensors
    if native and not rates:
        return forest_native.run(plan, inputs, frequencies, slopes)
    tables = None if native else forest_passes.tabulate(plan, inputs.dtype, inputs.device)
    step = inputs.shape[0] if tables is None else _TABLE_SIZE // (4 * tables.num_rows)
    if rates:
        step = min(step, _ROWS_SIZE // (len(plan.slots) * plan.patterns.num_root_rows)) // inputs.shape[2]
    parts = []
    for part, at_root, *more in zip(*(tensor.split(max(1, step)) for tensor in tensors), strict=True):
        if more:
            parts.append(_run_rates(plan, tables, slopes, part, at_root, *more))
        elif tables is not None:
            parts.append(forest_passes.run(tables, part, at_root, slopes))
    return tuple(_joined(parts, 0))


def _run_rates(
    plan: Plan, tables: forest_passes.Tables | None, slopes: bool, inputs: Tensor, frequencies: Tensor, *rates: Tensor
) -> tuple[Tensor, ...]:
    """Return values and gradients where the rate of a site is one of several."""
    number = inputs.shape[2]
    # Vectors at each rate are vectors of their own.
    lengths = inputs.movedim(2, 0).flatten(0, 1)
    repeated = frequencies.expand(number, *frequencies.shape).flatten(0, 1)
    if tables is None:
        logs = forest_native.row_values(plan, lengths, repeated)
    else:
        logs = forest_passes.row_values(tables, lengths, repeated)
    patterns = plan.patterns
    counts, constant = (torch.as_tensor(array).to(inputs) for array in (patterns.root_weights, patterns.constant))
    mixed = mix_rows(logs.unflatten(0, (number, -1)), Rates(*rates), frequencies, counts, constant, slopes)
    if mixed.by_row is None:
        return (mixed.values,)
    weights = mixed.by_row.flatten(0, 1)
    if tables is None:
        by_length, by_frequency = forest_native.row_slopes(plan, lengths, repeated, weights)
    else:
        by_length, by_frequency = forest_passes.row_slopes(tables, lengths, repeated, weights)
    by_frequency = by_frequency.unflatten(0, (number, -1)).sum(0)
    if mixed.by_frequency is not None:
        by_frequency = by_frequency + mixed.by_frequency
    return mixed.values, by_length.unflatten(0, (number, -1)).movedim(0, 2), by_frequency, *mixed.by_rates


def _joined(parts: list[tuple[Tensor, ...]], dim: int) -> list[Tensor]:
    return [column[0] if len(column) == 1 else torch.cat(column, dim) for column in zip(*parts, strict=True)]


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods `(*sample, topologies)`; the gradients, if computed at once, are outputs, too."""

    @staticmethod
    def forward(evaluation: Evaluation, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return evaluation.run(slopes, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.evaluation, ctx.count = inputs[0], len(inputs) - 2
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[2:], *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, *_Gradient.apply(ctx.evaluation, ctx.count, cotangent, *ctx.saved_tensors))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], evaluation: Evaluation, slopes: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _LogLikelihood.apply(evaluation, slopes, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


class _Gradient(torch.autograd.Function):
    """Gradients times cotangents, as a function of its own, so that `vmap` of a gradient stays one call."""

    @staticmethod
    def forward(evaluation: Evaluation, count: int, cotangent: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the first `count` tensors by which to differentiate, and the gradients if they are there."""
        slopes = tensors[count:] or evaluation.run(True, *tensors)[1:]
        dims = (slope.dim() - cotangent.dim() for slope in slopes)
        lines = (cotangent.reshape(*cotangent.shape, *(1,) * more) for more in dims)
        return tuple(slope * line for slope, line in zip(slopes, lines, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "The likelihood has first derivatives only. Remedy: use finite differences of its gradient."
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], evaluation: Evaluation, count: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _Gradient.apply(evaluation, count, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


def _to_front(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...], size: int) -> list[Tensor]:
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
