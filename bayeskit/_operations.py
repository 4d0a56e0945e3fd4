"""Loops over time, and what goes back through them, as operations of torch: in Python, or as compiled C++."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bayeskit._compiler import without_probes
from bayeskit._interruption import look
from bayeskit.errors import CompilationWarning


@torch.library.custom_op("bayeskit::loop", mutates_args=())
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
    """Return the states after each step, times first.

    Parameters
    ----------
    tensors : sequence of Tensor
        First states, inputs of all times, times first, and what is the same at all times.
    num_states, num_inputs, times, batch : int
        ``batch`` is 0 where there is none. What is batched has it as its first dimension, inputs as their second.
    program : str
        One step as Python; all of them where ``at_once``.
    at_once : bool
    source : str
        All of it as C++, or nothing.
    native : bool
        Whether the C++ is compiled and run.
    """
    library = library_of(source) if native and source else None
    if library is not None:
        found = [state.new_empty(times, *state.shape) for state in tensors[:num_states]]
        call_library(library, tensors, found, times, batch)
        return found
    function = _function(program)
    if at_once:
        return function(None, *tensors)
    in_turn = num_states + num_inputs
    now, found_at = list(tensors[:num_states]), []
    for t in range(times):
        now = function(None, *now, *(x[t] for x in tensors[num_states:in_turn]), *tensors[in_turn:])
        found_at.append(now)
    return [torch.stack(path) for path in zip(*found_at, strict=True)]


@torch.library.custom_op("bayeskit::loop_gradient", mutates_args=())
def loop_gradient(
    tensors: Sequence[Tensor], wanted: Sequence[int], times: int, batch: int, program: str, source: str, native: bool
) -> list[Tensor]:
    """Return the gradients by the ``wanted`` ones of ``tensors``, which are those of a loop, its states and cotangents.

    ``program`` is all of it as Python.
    """
    library = library_of(source) if native and source else None
    if library is None:
        return _function(program)(None, *tensors)
    found = [torch.zeros_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]
    call_library(library, tensors, found, times, batch)
    return found


@loop.register_fake
def _(tensors: Sequence[Tensor], num_states: int, num_inputs: int, times: int, *_: Any) -> list[Tensor]:
    return [state.new_empty(times, *state.shape) for state in tensors[:num_states]]


@loop_gradient.register_fake
def _(tensors: Sequence[Tensor], wanted: Sequence[int], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]


def call_library(library: Any, given: Sequence[Tensor], made: Sequence[Tensor], times: int, batch: int) -> None:
    """Call the function ``loop`` that :mod:`bayeskit._native` has written."""
    given = [x.contiguous() for x in given]
    pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(x.data_ptr() for x in (*given, *made)))
    library.loop(pointers, ctypes.c_int64(times), ctypes.c_int64(max(batch, 1)))


@lru_cache(maxsize=128)
def _function(program: str) -> Callable[..., list[Tensor]]:
    names = {"torch": torch, "device": torch.device, "inf": torch.inf, "nan": torch.nan, "NoneType": type(None)}
    scope: dict[str, Any] = names
    exec(program, scope)  # what torch.fx has written
    function: Callable[..., list[Tensor]] = scope["forward"]
    return function


@lru_cache(maxsize=128)
def library_of(source: str) -> Any:
    """Compile C++, or find it compiled by another process; None where that fails."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    def load(options: dict[str, Any]) -> Any:
        look()  # Ctrl-C at a terminal ends the compiler, too, which is no failure of its own
        with config.patch(options):
            return CppCodeCache.load(source)

    try:
        return without_probes(load)
    except (RuntimeError, OSError, AttributeError, ImportError) as error:
        look()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        warnings.warn(
            f"C++ could not be compiled ({reason}); it runs as operations of torch, slower",
            CompilationWarning,
            stacklevel=2,
        )
        return None


def run_natively(graph: GraphModule) -> None:
    """Let the loops of a graph run as compiled code."""
    changed = False
    for operation in (torch.ops.bayeskit.loop.default, torch.ops.bayeskit.loop_gradient.default):
        for node in graph.graph.find_nodes(op="call_function", target=operation):
            node.args = (*node.args[:-1], True)
            changed = True
    if changed:
        graph.recompile()


def num_operations(operation: Any, arguments: Sequence[Any]) -> int:
    """Return how many operations a loop or its gradient makes in Python; zero for what is neither."""
    if operation is torch.ops.bayeskit.loop.default:
        _, _, _, times, _, program, at_once, *_ = arguments
        return int(program.count("torch.ops.")) * (1 if at_once else times)
    if operation is torch.ops.bayeskit.loop_gradient.default:
        return int(arguments[4].count("torch.ops."))
    return 0


__all__ = ["call_library", "library_of", "loop", "loop_gradient", "num_operations", "run_natively"]
