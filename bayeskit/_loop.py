"""A loop over time as one operation of torch, with gradients that need no loop.

The states are computed one after another. Given all of them, the slopes of all steps are computed at once, and the
gradient goes back through time as an affine recurrence.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function

from bayeskit._native import native_source
from bayeskit._tracing import fail_apart
from bayeskit.errors import CompilationWarning

MAX_DENSE_STATES = 16  # numbers of a state, beyond which products of matrices cost more than a loop

Step = Callable[..., tuple[Tensor, ...]]
"""``(*states, *inputs, *others) -> states`` of one time."""


# -- the operation ------------------------------------------------------------------------------


@torch.library.custom_op("bayeskit::loop", mutates_args=())
def loop(
    states: Sequence[Tensor],
    inputs: Sequence[Tensor],
    others: Sequence[Tensor],
    program: str,
    source: str,
    times: int,
    batch: int,
    native: bool,
) -> list[Tensor]:
    """Return the states after each of ``times`` steps, stacked, times first.

    Parameters
    ----------
    states : sequence of Tensor
        The first ones.
    inputs : sequence of Tensor
        Times first.
    others : sequence of Tensor
        The same at all times.
    program : str
        A step as Python.
    source : str
        All of the loop as C++, or nothing.
    times, batch : int
        ``batch`` is 0 where there is none; else what is batched has it as its first dimension, inputs as their second.
    native : bool
        Whether the C++ is compiled and run.
    """
    library = _library(source) if native and source else None
    if library is not None:
        given = [x.contiguous() for x in (*states, *inputs, *others)]
        paths = [state.new_empty(times, *state.shape) for state in states]
        pointers = (ctypes.c_void_p * (len(given) + len(paths)))(*(x.data_ptr() for x in (*given, *paths)))
        library.loop(pointers, ctypes.c_int64(times), ctypes.c_int64(max(batch, 1)))
        return paths
    step, now, found = _function(program), list(states), []
    for t in range(times):
        now = step(None, *now, *(x[t] for x in inputs), *others)
        found.append(now)
    return [torch.stack(path) for path in zip(*found, strict=True)]


@loop.register_fake
def _(
    states: Sequence[Tensor],
    inputs: Sequence[Tensor],
    others: Sequence[Tensor],
    program: str,
    source: str,
    times: int,
    batch: int,
    native: bool,
) -> list[Tensor]:
    return [state.new_empty(times, *state.shape) for state in states]


@lru_cache(maxsize=128)
def _function(program: str) -> Callable[..., list[Tensor]]:
    scope: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": torch.inf,
        "nan": torch.nan,
        "NoneType": type(None),
    }
    exec(program, scope)  # what torch.fx has written
    function: Callable[..., list[Tensor]] = scope["forward"]
    return function


@lru_cache(maxsize=128)
def _library(source: str) -> Any:
    """Compile C++, or find it compiled by another process; None where that fails."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            return CppCodeCache.load(source)
    except (RuntimeError, OSError, AttributeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        warnings.warn(
            f"a loop could not be compiled ({reason}) and runs in Python, slower", CompilationWarning, stacklevel=2
        )
        return None


def run_natively(graph: GraphModule) -> None:
    """Let the loops of a graph run as compiled code."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.bayeskit.loop.default):
        node.args = (*node.args[:7], True)


def num_operations(operation: Any, arguments: Sequence[Any]) -> int:
    """Return how many operations a loop makes in Python; zero for what is no loop."""
    if operation is not torch.ops.bayeskit.loop.default:
        return 0
    program, times = arguments[3], arguments[5]
    return int(times) * program.count("torch.ops.")


# -- its gradient -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """How many of the operands are states and inputs, and which of them have a batch as their first dimension."""

    num_states: int
    num_inputs: int
    times: int
    batch: int
    batched: tuple[bool, ...]

    @property
    def in_turn(self) -> int:
        """How many operands differ from time to time."""
        return self.num_states + self.num_inputs

    def dims(self) -> tuple[int | None, ...]:
        """Return the dimensions of the operands that are mapped over."""
        return tuple(0 if yes else None for yes in self.batched)


def paths(step: Step, affine: bool, times: int, num_states: int, num_inputs: int, *operands: Tensor) -> Any:
    """Return the states after each of ``times`` steps, stacked, times first.

    Parameters
    ----------
    step : callable
        ``(*states, *inputs, *others) -> states``; equal to another where it does the same.
    affine : bool
        Whether the new states are an affine function of the old ones.
    times, num_states, num_inputs : int
    *operands : Tensor
        States, inputs, whose first dimension is time, and others.
    """
    if has_torch_function(operands):
        return handle_torch_function(paths, operands, step, affine, times, num_states, num_inputs, *operands)
    if affine:
        return affine_paths(step, times, num_states, num_inputs, *operands)
    layout = _Layout(num_states, num_inputs, times, 0, (False,) * len(operands))
    return _Loop.apply(step, layout, *operands)


class _Loop(torch.autograd.Function):
    """States one after another, as functorch and autograd see them."""

    @staticmethod
    def forward(step: Step, layout: _Layout, *operands: Tensor) -> tuple[Tensor, ...]:
        eager = get_proxy_mode() is None
        with disable_proxy_modes_tracing():
            program, source, constants = _texts(step, layout, [x.detach() for x in operands], eager)
        s, i = layout.num_states, layout.in_turn
        times_first = [
            x.movedim(1, 0) if batched else x for x, batched in zip(operands[s:i], layout.batched[s:i], strict=True)
        ]
        others = [*operands[i:], *constants]
        found = loop(operands[:s], times_first, others, program, source, layout.times, layout.batch, False)
        return tuple(path.movedim(0, 1) if layout.batch else path for path in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.step, ctx.layout, *operands = inputs
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.save_for_backward(*operands, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        step, layout = ctx.step, ctx.layout
        operands, found = ctx.saved_tensors[: -layout.num_states], ctx.saved_tensors[-layout.num_states :]
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad[2:]) if needs]

        def pulled(*given: Tensor) -> tuple[Tensor, ...]:
            parts = given[: len(operands)], given[len(operands) : -layout.num_states], given[-layout.num_states :]
            return _pull_back(step, layout, wanted, *parts)

        if layout.batch:
            pulled = torch.func.vmap(pulled, in_dims=(*layout.dims(), *(0,) * 2 * layout.num_states))
        gradients: list[Tensor | None] = [None] * len(operands)
        for place, gradient in zip(wanted, pulled(*operands, *found, *cotangents), strict=True):
            gradients[place] = gradient.sum(0) if layout.batch and not layout.batched[place] else gradient
        return (None, None, *gradients)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], step: Step, layout: _Layout, *operands: Tensor
    ) -> tuple[Any, Any]:
        size, merged, batched = info.batch_size, [], []
        old = max(layout.batch, 1)
        for place, (x, dim) in enumerate(zip(operands, in_dims[2:], strict=True)):
            before, now = layout.batched[place], dim is not None or place < layout.num_states
            if before or now:
                x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                if not before:
                    x = x.unsqueeze(1).expand(size, old, *x.shape[1:])
                x = x.reshape(size * old, *x.shape[2:])
            merged.append(x)
            batched.append(before or now)
        new = _Layout(layout.num_states, layout.num_inputs, layout.times, size * old, tuple(batched))
        found = _Loop.apply(step, new, *merged)
        if layout.batch:
            found = tuple(x.reshape(size, old, *x.shape[1:]) for x in found)
        return found, (0,) * len(found)


def _pull_back(
    step: Step,
    layout: _Layout,
    wanted: Sequence[int],
    operands: Sequence[Tensor],
    found: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return the gradients by the ``wanted`` operands, without a batch."""
    s, i = layout.num_states, layout.in_turn
    floats = [place for place in range(s) if operands[place].is_floating_point()]
    moving = floats + [place for place in wanted if place >= s]
    before = [torch.cat([first.unsqueeze(0), path[:-1]]) for first, path in zip(operands, found, strict=False)]
    at = [*before, *operands[s:]]
    over_time = torch.func.vmap(step, in_dims=(*(0,) * i, *(None,) * (len(operands) - i)))

    def moved(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(at)
        for place, value in zip(moving, values, strict=True):
            given[place] = value
        new = over_time(*given)
        return tuple(new[place] for place in floats)

    _, pull = torch.func.vjp(moved, *(at[place] for place in moving))
    shapes = [operands[place].shape for place in floats]
    incoming = _packed([cotangents[place] for place in floats])
    if incoming.shape[1] <= MAX_DENSE_STATES:
        slopes = _slopes(lambda *e: pull(e)[: len(floats)], shapes, incoming)
        back = slopes.mT.flip(0)
        back = torch.cat([torch.zeros_like(back[:1]), back[:-1]])
        adjoint = _unpacked(prefix(back, incoming.flip(0), torch.zeros_like(incoming[0])).flip(0), shapes)
    else:
        adjoint = _adjoint_in_turn(step, layout, floats, at, cotangents)
    gradients = dict(zip(moving, pull(tuple(adjoint)), strict=True))
    return tuple(gradients[place][0] if place < s else gradients[place] for place in wanted)


@dataclass(frozen=True)
class _Adjoint:
    """A step back in time: what the later state's gradient and this time's own make together."""

    step: Step
    floats: tuple[int, ...]
    in_turn: int

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        k = len(self.floats)
        later, at, own, others = (
            operands[:k],
            list(operands[k : k + self.in_turn]),
            operands[k + self.in_turn : 2 * k + self.in_turn],
            operands[2 * k + self.in_turn :],
        )

        def moved(*values: Tensor) -> tuple[Tensor, ...]:
            for place, value in zip(self.floats, values, strict=True):
                at[place] = value
            new = self.step(*at, *others)
            return tuple(new[place] for place in self.floats)

        _, pull = torch.func.vjp(moved, *(at[place] for place in self.floats))
        return tuple(g + mine for g, mine in zip(pull(later), own, strict=True))


def _adjoint_in_turn(
    step: Step, layout: _Layout, floats: Sequence[int], at: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    last = [cotangents[place][-1] for place in floats]
    if layout.times == 1:
        return [x.unsqueeze(0) for x in last]
    i = layout.in_turn
    inputs = [*(x[1:].flip(0) for x in at[:i]), *(cotangents[place][:-1].flip(0) for place in floats)]
    back = _Adjoint(step, tuple(floats), i)
    earlier = paths(back, False, layout.times - 1, len(last), len(inputs), *last, *inputs, *at[i:])
    return [torch.cat([x.unsqueeze(0), path]).flip(0) for x, path in zip(last, earlier, strict=True)]


# -- recurrences that are affine ----------------------------------------------------------------


def affine_paths(step: Step, times: int, num_states: int, num_inputs: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """Compute all states from the matrices and offsets of all times."""
    firsts, inputs = operands[:num_states], operands[num_states : num_states + num_inputs]
    others = operands[num_states + num_inputs :]
    shapes = [x.shape for x in firsts]
    first = torch.cat([x.reshape(-1) for x in firsts])

    def moved(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(step, in_dims=(*(0,) * (num_states + num_inputs), *(None,) * len(others)))(
            *values, *inputs, *others
        )

    offsets, pull = torch.func.vjp(moved, *(x.new_zeros(times, *x.shape) for x in firsts))
    offset = _packed(offsets)
    return tuple(_unpacked(prefix(_slopes(lambda *e: pull(e), shapes, offset), offset, first), shapes))


def _slopes(pull: Callable[..., Sequence[Tensor]], shapes: Sequence[torch.Size], like: Tensor) -> Tensor:
    """Return the matrices of slopes of all times, ``(T, k, k)``, from a product with them that goes over all times."""
    times, k = like.shape
    identity = torch.eye(k, dtype=like.dtype, device=like.device)

    def row(direction: Tensor) -> Tensor:
        return _packed(pull(*_unpacked(direction.expand(times, k), shapes)))

    return torch.func.vmap(row, out_dims=1)(identity)


def prefix(matrices: Tensor, offsets: Tensor, first: Tensor) -> Tensor:
    """Return ``x[t] = A[t] x[t - 1] + b[t]`` for all times, ``(T, k, k), (T, k), (k,) -> (T, k)``.

    In each round every time takes in as many times before it as the rounds before have covered.
    """
    times, k = offsets.shape
    offset = torch.cat([(matrices[0] @ first + offsets[0]).unsqueeze(0), offsets[1:]])
    # What comes before the first time is left out: its offset holds the first state already.
    matrix = torch.cat([torch.zeros_like(matrices[:1]), matrices[1:]])
    if k == 1:
        matrix = matrix.squeeze(-1)
    reach = 1
    while reach < times:
        earlier = _later(offset, reach)
        before = _later(matrix, reach)
        if k == 1:
            offset, matrix = offset + matrix * earlier, matrix * before
        else:
            offset, matrix = offset + (matrix @ earlier.unsqueeze(-1)).squeeze(-1), matrix @ before
        reach *= 2
    return offset


def _later(x: Tensor, times: int) -> Tensor:
    """Return what was so many times before, and zero where there was nothing, ``(T, ...) -> (T, ...)``."""
    return pad(x[:-times], (0, 0) * (x.dim() - 1) + (times, 0))


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of all times as one, ``[(T, *shape)] -> (T, k)``."""
    return torch.cat([x.reshape(len(x), -1) for x in parts], -1)


def _unpacked(x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the parts of the last dimension in their own shapes, ``(T, k) -> [(T, *shape)]``."""
    parts = x.split([shape.numel() for shape in shapes], -1)
    return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


# -- texts --------------------------------------------------------------------------------------


def _texts(step: Step, layout: _Layout, operands: list[Tensor], eager: bool) -> tuple[str, str, list[Tensor]]:
    """Write a step as Python for the whole batch, and all of the loop as C++ unless it runs but once."""
    i = layout.in_turn

    def at_first(x: Tensor, place: int, batch: bool) -> Tensor:
        if layout.batched[place] and not batch:
            x = x[0]
        if layout.num_states <= place < i:
            x = x.select(int(batch and layout.batched[place]), 0)
        return x

    single = [at_first(x, place, False) for place, x in enumerate(operands)]
    whole = single
    mapped: Step = step
    if layout.batch:
        whole = [at_first(x, place, True) for place, x in enumerate(operands)]
        mapped = torch.func.vmap(step, in_dims=layout.dims())
    graph, constants = _traced(mapped, whole)
    if eager or any(x.device.type != "cpu" for x in operands):
        return graph.code, "", constants
    return graph.code, native_source(step, single, layout.batched, layout.num_states, layout.num_inputs), constants


def _traced(step: Step, operands: list[Tensor]) -> tuple[GraphModule, list[Tensor]]:
    """Trace a step; its constants become arguments."""
    with torch.no_grad():
        graph = make_fx(lambda *x: [y.clone() if any(y is z for z in x) else y for y in step(*x)])(*operands)
    fail_apart(graph)
    constants: list[Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in graph.graph.find_nodes(op="get_attr"):
        constants.append(getattr(graph, str(node.target)).detach())
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{len(constants)}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, constants


__all__ = ["MAX_DENSE_STATES", "affine_paths", "loop", "num_operations", "paths", "run_natively"]
