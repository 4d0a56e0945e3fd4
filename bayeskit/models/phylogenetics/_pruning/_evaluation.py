"""Log-likelihoods of an alignment on topologies by either back end, with rules for autograd and ``vmap``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from bayeskit.extend import is_traced
from bayeskit.models.phylogenetics._pruning._native import CompiledPasses, can_run
from bayeskit.models.phylogenetics._pruning._passes import Rates, TensorPasses, mix_rows
from bayeskit.models.phylogenetics._pruning._plan import SubPatterns, make_plan
from bayeskit.models.phylogenetics._topologies import Topologies

#: Number of elements in the largest table of the tensor operations, and in that of the root rows at each rate.
_TABLE_SIZE = 2**22
_ROWS_SIZE = 2**20

Passes = CompiledPasses | TensorPasses
#: Yields places of topologies with the passes over them.
Groups = Callable[[], Generator[tuple[slice, Passes]]]


def log_likelihood(groups: Groups, inputs: Tensor, frequencies: Tensor, *rates: Tensor) -> Tensor:
    """Return log-likelihoods `(*sample, topologies)`, differentiable once by all tensors."""
    # `inputs` are branch lengths (*sample, topologies, edges) or matrices (*sample, topologies, edges, n, n); with site
    # rates, those at each rate, a dimension after that of topologies. `frequencies` are (*sample, topologies, n), or
    # those at each rate (then without invariant sites), and `rates` the fields of `Rates`, (*sample, topologies, ...).
    tensors = (inputs, frequencies, *rates)
    at_once = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    values: Tensor = _LogLikelihood.apply(groups, at_once, *tensors)[0]
    return values


def planned_groups(
    topologies: Topologies, patterns: SubPatterns, dtype: torch.dtype, device: torch.device, compile: bool
) -> Generator[tuple[slice, Passes]]:
    """Yield topologies in groups that fit into the tables of `patterns`, and the passes over each."""
    native = compile and can_run(dtype, device, patterns.num_states)
    step, count = patterns.num_topologies, len(topologies)
    if not native:
        step = min(step, max(1, _TABLE_SIZE // (patterns.num_states**2 // 4 * patterns.masks.size)))
    for first in range(0, count, step):
        group = slice(first, min(first + step, count))
        # Another thread's plan would take slots away from this one.
        with patterns.lock:
            # The whole object keeps its cached parents and clades.
            plan = make_plan(topologies if step >= count else topologies[group], patterns)
            if native:  # what is recorded runs again after other plans
                yield group, CompiledPasses(plan, dtype, device, copied=_is_recorded())
            else:
                yield group, TensorPasses(plan, dtype, device)


def _is_recorded() -> bool:
    return is_traced() or torch.compiler.is_compiling()


def _evaluate(groups: Groups, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return values and, on request, gradients by all tensors."""
    inputs, frequencies, *rates = tensors
    *sample, count, _ = rates[0].shape if rates else frequencies.shape
    if frequencies.numel() == 0:
        empty = inputs.new_zeros((*sample, count))
        return (empty, *(torch.zeros_like(tensor) for tensor in tensors)) if slopes else (empty,)
    tensors = tuple(tensor.reshape(-1, *tensor.shape[len(sample) :]) for tensor in tensors)
    with closing(groups()) as each:
        parts = [_evaluate_group(passes, slopes, *(tensor[:, group] for tensor in tensors)) for group, passes in each]
    return tuple(column.reshape(*sample, *column.shape[1:]) for column in _joined(parts, 1))


def _evaluate_group(passes: Passes, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the passes, in parts of the vectors of branch lengths if tables would become large."""
    inputs, frequencies, *rates = tensors
    samples, count = frequencies.shape[:2]
    step = samples
    if passes.table_size and not _is_recorded():
        step = _TABLE_SIZE // passes.table_size
    if rates:
        step = min(step, _ROWS_SIZE // (count * len(passes.counts))) // inputs.shape[2]
    parts = []
    for part, at_root, *more in zip(*(tensor.split(max(1, step)) for tensor in tensors), strict=True):
        if more:
            parts.append(_evaluate_rates(passes, slopes, part, at_root, *more))
        else:
            parts.append(passes.log_likelihoods(part, at_root, slopes))
    return tuple(_joined(parts, 0))


def _evaluate_rates(
    passes: Passes, slopes: bool, inputs: Tensor, frequencies: Tensor, *rates: Tensor
) -> tuple[Tensor, ...]:
    """Return values and gradients for several rates of sites."""
    number = inputs.shape[2]
    # Vectors at each rate are treated as separate vectors.
    by_rate = inputs.movedim(2, 0).flatten(0, 1)
    alike = frequencies.dim() == 3
    repeated = (frequencies.expand(number, *frequencies.shape) if alike else frequencies.movedim(2, 0)).flatten(0, 1)
    logs = passes.row_values(by_rate, repeated).unflatten(0, (number, -1))
    mixed = mix_rows(logs, Rates(*rates), frequencies, passes.counts, passes.constant, slopes)
    if mixed.by_row is None:
        return (mixed.values,)
    by_input, by_frequency = passes.row_slopes(by_rate, repeated, mixed.by_row.flatten(0, 1))
    by_frequency = by_frequency.unflatten(0, (number, -1))
    by_frequency = by_frequency.sum(0) if alike else by_frequency.movedim(0, 2)
    if mixed.by_frequency is not None:
        by_frequency = by_frequency + mixed.by_frequency
    return mixed.values, by_input.unflatten(0, (number, -1)).movedim(0, 2), by_frequency, *mixed.by_rates


def _joined(parts: list[tuple[Tensor, ...]], dim: int) -> list[Tensor]:
    return [column[0] if len(column) == 1 else torch.cat(column, dim) for column in zip(*parts, strict=True)]


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods `(*sample, topologies)`; the gradients, if computed at once, are outputs, too."""

    @staticmethod
    def forward(groups: Groups, slopes: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _evaluate(groups, slopes, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.groups, ctx.count = inputs[0], len(inputs) - 2
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[2:], *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, *_Gradient.apply(ctx.groups, ctx.count, cotangent, *ctx.saved_tensors))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], groups: Groups, slopes: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _LogLikelihood.apply(groups, slopes, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


class _Gradient(torch.autograd.Function):
    """Gradients times cotangents, as a function of its own, so that `vmap` of a gradient stays one call."""

    @staticmethod
    def forward(groups: Groups, count: int, cotangent: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the products; `tensors` are `count` inputs and then, if computed before, their gradients."""
        slopes = tensors[count:] or _evaluate(groups, True, *tensors)[1:]
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
        info: Any, in_dims: tuple[int | None, ...], groups: Groups, count: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = _Gradient.apply(groups, count, *_to_front(tensors, in_dims[2:], info.batch_size))
        return out, (0,) * len(out)


def _to_front(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...], size: int) -> list[Tensor]:
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
