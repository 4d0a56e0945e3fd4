"""Loops over time and their gradients as operations of torch, run in Python or as compiled C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bayeskit._compiler.native_library import call_library, library_of
from bayeskit._compiler.python_text import function_of_text


@torch.library.custom_op(
    "bayeskit::loop",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt num_states, SymInt num_inputs, SymInt times, SymInt batch, str program, "
    "bool at_once, str source, bool native) -> Tensor[]",
)
def loop(
    tensors: Sequence[Tensor],
    num_states: int,
    num_inputs: int,
    times: int,
    batch: int,
    program: str,
    at_once: bool,
    source: str,
    native: bool,
) -> list[Tensor]:
    """Return the states after each step, times first, by the C++ ``source`` if ``native``, else by ``program``."""
    # ``tensors``: first states, inputs of all times (times first) and others; the batch, 0 if there is none, is their
    # first dimension, the second of inputs. ``program`` is one step, or all of them if ``at_once``.
    library = library_of(source) if native and source else None
    if library is not None:
        found = [state.new_empty(times, *state.shape) for state in tensors[:num_states]]
        call_library(library, tensors, found, times, batch)
        return found
    function = function_of_text(program)
    if at_once:
        return function(None, *tensors)
    in_turn = num_states + num_inputs
    now, found_at = list(tensors[:num_states]), []
    for t in range(times):
        now = function(None, *now, *(x[t] for x in tensors[num_states:in_turn]), *tensors[in_turn:])
        found_at.append(now)
    return [torch.stack(path) for path in zip(*found_at, strict=True)]


@torch.library.custom_op(
    "bayeskit::loop_gradient",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] wanted, SymInt times, SymInt batch, str program, str source, bool native) "
    "-> Tensor[]",
)
def loop_gradient(
    tensors: Sequence[Tensor], wanted: Sequence[int], times: int, batch: int, program: str, source: str, native: bool
) -> list[Tensor]:
    """Return the gradients of ``wanted`` tensors; ``tensors`` are operands of a loop, its states and cotangents."""
    library = library_of(source) if native and source else None
    if library is None:
        return function_of_text(program)(None, *tensors)
    found = [torch.zeros_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]
    call_library(library, tensors, found, times, batch)
    return found


@loop.register_fake
def _(tensors: Sequence[Tensor], num_states: int, num_inputs: int, times: int, *_: Any) -> list[Tensor]:
    return [state.new_empty(times, *state.shape) for state in tensors[:num_states]]


@loop_gradient.register_fake
def _(tensors: Sequence[Tensor], wanted: Sequence[int], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]


def run_natively(graph: GraphModule, native: bool = True) -> None:
    """Let the loops of a graph run as compiled code, or in torch."""
    changed = False
    for operation in (torch.ops.bayeskit.loop.default, torch.ops.bayeskit.loop_gradient.default):
        for node in graph.graph.find_nodes(op="call_function", target=operation):
            node.args = (*node.args[:-1], native)
            changed = True
    if changed:
        graph.recompile()


def num_operations(operation: Any, arguments: Sequence[Any]) -> int:
    """Return the number of operations that a loop or its gradient runs in Python; zero for other operations."""
    if operation is torch.ops.bayeskit.loop.default:
        _, _, _, times, _, program, at_once, *_ = arguments
        return int(program.count("torch.ops.")) * (1 if at_once else times)
    if operation is torch.ops.bayeskit.loop_gradient.default:
        return int(arguments[4].count("torch.ops."))
    return 0
