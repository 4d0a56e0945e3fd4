"""Recurrences in time, under batching, gradients and tracing, with gradients that need no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from bayeskit.core.functions_of_users import lines_named
from bayeskit.core.inputs import whole_number
from bayeskit.core.process_state import process_state
from bayeskit.core.torch_internals import (
    batching_level,
    current_dispatch_modes,
    disable_current_modes,
    has_forward_derivative,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    unwrap_dead_wrappers,
)
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.logdensity.compiling import loop, loop_gradient
from bayeskit.logdensity.native import gradient_source, loop_source
from bayeskit.logdensity.pyro_distributions import AugmentedAssignment
from bayeskit.logdensity.tracing import (
    QUERIES,
    UNTRACEABLE,
    Tape,
    changes_in_place,
    fail_apart,
    is_traced,
    name_of,
    traced,
)

__all__ = [
    "LoopStep",
    "MAX_DENSE_STATES",
    "NoSites",
    "Step",
    "affine_paths",
    "paths",
    "prefix",
    "program_text",
    "scan",
]


# A loop over time under batching, gradients and tracing, with gradients that need no loop.
#
# The states are computed one after another. Given all states, the Jacobian matrices of all steps are computed at once,
# and the gradient follows an affine recurrence backward in time.

MAX_DENSE_STATES = 16  # size of a state, beyond which matrix products cost more than a loop

LoopStep = Callable[..., tuple[Tensor, ...]]
"""``(*states, *inputs, *others) -> states`` of one time."""


def paths(step: LoopStep, affine: bool, times: int, num_states: int, num_inputs: int, *operands: Tensor) -> Any:
    """Return the states after each of ``times`` steps, stacked, times first."""
    # ``affine``: new states are an affine function of the old. Operands: states, inputs (times first) and others.
    if has_torch_function(operands):
        return handle_torch_function(paths, operands, step, affine, times, num_states, num_inputs, *operands)
    operands = unwrap_dead_wrappers(operands)
    return _Loop.apply(_Plan(step, affine, times, num_states, num_inputs, 0, (False,) * len(operands)), *operands)


@dataclass(frozen=True)
class _Plan:
    """The step of a loop, its sizes, and which operands have a batch as their first dimension."""

    step: LoopStep
    affine: bool
    times: int
    num_states: int
    num_inputs: int
    batch: int
    batched: tuple[bool, ...]

    @property
    def in_turn(self) -> int:
        """Number of operands that vary in time."""
        return self.num_states + self.num_inputs

    @property
    def num_operands(self) -> int:
        return len(self.batched)

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dimensions of the operands that are mapped over."""
        return tuple(0 if yes else None for yes in self.batched)

    def times_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Swap the batch and time dimensions of the tensors that have both; the swap is its own inverse."""
        n = self.num_operands
        return [
            x.movedim(1, 0) if self.batch and (place >= n or (self.is_input(place) and self.batched[place])) else x
            for place, x in enumerate(tensors)
        ]

    def is_input(self, place: int) -> bool:
        return self.num_states <= place < self.in_turn

    def at_one_time(self, operands: Sequence[Tensor], batch: bool) -> list[Tensor]:
        """Return the operands at the first time, of all members of the batch if ``batch``, else of the first."""
        found = []
        for place, x in enumerate(operands):
            if self.batched[place] and not batch:
                x = x[0]
            found.append(x.select(int(batch and self.batched[place]), 0) if self.is_input(place) else x)
        return found

    def in_batch(self, function: Callable[..., Any], more: int = 0) -> Callable[..., Any]:
        """Return ``function`` mapped over the batch of its operands and of ``more`` batched arguments."""
        return torch.func.vmap(function, in_dims=(*self.dims, *(0,) * more)) if self.batch else function

    def merged(self, size: int, dims: Sequence[int | None], tensors: Sequence[Tensor], forced: Sequence[int]) -> Any:
        """Merge a new batch dimension into the existing one; ``forced`` operands always get it."""
        old, found, batched = max(self.batch, 1), [], []
        for place, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
            before = self.batched[place] if place < self.num_operands else bool(self.batch)
            now = dim is not None or place < self.num_states or place >= self.num_operands or place in forced
            if now or before:
                x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                x = x if before else x.unsqueeze(1).expand(size, old, *x.shape[1:])
                x = x.reshape(size * old, *x.shape[2:])
            found.append(x)
            batched.append(now or before)
        return replace(self, batch=size * old, batched=tuple(batched[: self.num_operands])), found


class _Loop(torch.autograd.Function):
    """The sequential loop as a function of autograd, with a rule for vmap."""

    @staticmethod
    def forward(plan: _Plan, *operands: Tensor) -> tuple[Tensor, ...]:
        traced = _is_followed()
        at_once = plan.in_batch(lambda *x: affine_paths(plan.step, plan.times, plan.num_states, plan.num_inputs, *x))
        if plan.affine and not traced:
            return tuple(at_once(*operands))
        given = plan.times_first(operands)

        def exchange(path: Tensor) -> Tensor:
            return path.movedim(1, 0) if plan.batch else path

        with disable_current_modes():
            single = plan.at_one_time([x.detach() for x in operands], False)
            if plan.affine:
                program, constants = program_text(
                    lambda *x: [exchange(path) for path in at_once(*plan.times_first(x))], given
                )
            else:
                program, constants = program_text(plan.in_batch(plan.step), plan.at_one_time(operands, True))
            source = loop_source(plan.step, single, plan.batched, plan.num_states, plan.num_inputs) if traced else ""
        numbers = plan.num_states, plan.num_inputs, plan.times, plan.batch
        found = loop([*given, *constants], *numbers, program, plan.affine, source, False)
        return tuple(exchange(path) for path in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *operands = inputs
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        ctx.save_for_backward(*operands, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        plan, tensors = ctx.plan, unwrap_dead_wrappers((*ctx.saved_tensors, *cotangents))
        wanted = tuple(place for place, needs in enumerate(ctx.needs_input_grad[1:]) if needs)
        if not _is_followed():
            found = _pulled_back(plan, wanted, *tensors)
        else:
            found = _Gradient.apply(plan, wanted, *tensors)
        gradients = dict(zip(wanted, found, strict=True))
        return (None, *(gradients.get(place) for place in range(plan.num_operands)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], plan: _Plan, *operands: Tensor) -> tuple[Any, Any]:
        new, merged = plan.merged(info.batch_size, in_dims[1:], operands, ())
        found = _Loop.apply(new, *merged)
        if plan.batch:
            found = tuple(x.reshape(info.batch_size, plan.batch, *x.shape[1:]) for x in found)
        return found, (0,) * len(found)


class _Gradient(torch.autograd.Function):
    """Gradients of a loop as one operation of a graph."""

    @staticmethod
    def forward(plan: _Plan, wanted: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        given = plan.times_first(tensors)
        with disable_current_modes():
            single = plan.at_one_time([x.detach() for x in tensors[: plan.num_operands]], False)

            def gradient(*x: Tensor) -> list[Tensor]:
                found = dict(zip(wanted, _pulled_back(plan, wanted, *plan.times_first(x)), strict=True))
                back = plan.times_first([found.get(place, x[place]) for place in range(plan.num_operands)])
                return [back[place] for place in wanted]

            program, constants = program_text(gradient, given)
            floats = [place for place in range(plan.num_states) if single[place].is_floating_point()]
            step = _PulledBack(plan.step, tuple(floats), wanted, plan.num_operands)
            source = gradient_source(step, single, plan.batched, plan.num_states, plan.num_inputs, floats, wanted)
        found = loop_gradient([*given, *constants], wanted, plan.times, plan.batch, program, source, False)
        return tuple(
            x.movedim(1, 0) if plan.is_input(place) and plan.batched[place] else x
            for place, x in zip(wanted, found, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, ctx.wanted, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors = list(unwrap_dead_wrappers(ctx.saved_tensors))
        moving = [place for place, x in enumerate(tensors) if x.is_floating_point()]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            for place, value in zip(moving, values, strict=True):
                tensors[place] = value
            return _pulled_back(ctx.plan, ctx.wanted, *tensors)

        _, pull = torch.func.vjp(gradients, *(tensors[place] for place in moving))  # type: ignore[misc]
        found = dict(zip(moving, pull(cotangents), strict=True))
        return (None, None, *(found.get(place) for place in range(len(tensors))))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: _Plan, wanted: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Any, Any]:
        new, merged = plan.merged(info.batch_size, in_dims[2:], tensors, wanted)
        found = _Gradient.apply(new, wanted, *merged)
        if plan.batch:
            parts = (x.reshape(info.batch_size, plan.batch, *x.shape[1:]) for x in found)
            found = tuple(x if plan.batched[place] else x.sum(1) for place, x in zip(wanted, parts, strict=True))
        return found, (0,) * len(found)


# -- gradients ----------------------------------------------------------------------------------


def _pulled_back(plan: _Plan, wanted: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the ``wanted`` operands, given the operands, all states and their cotangents."""
    found = plan.in_batch(lambda *x: _single_pulled_back(plan, wanted, *x), 2 * plan.num_states)(*tensors)
    return tuple(
        x.sum(0) if plan.batch and not plan.batched[place] else x for place, x in zip(wanted, found, strict=True)
    )


def _single_pulled_back(plan: _Plan, wanted: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    n, s, i = plan.num_operands, plan.num_states, plan.in_turn
    operands, found, cotangents = tensors[:n], tensors[n : n + s], tensors[n + s :]
    floats = tuple(place for place in range(s) if operands[place].is_floating_point())
    moving = floats + tuple(place for place in wanted if place >= s)
    at = [*_before(operands, found), *operands[s:]]
    over_time = torch.func.vmap(plan.step, in_dims=(*(0,) * i, *(None,) * (n - i)))
    _, pull = torch.func.vjp(_Partial(over_time, floats, moving, tuple(at)), *(at[place] for place in moving))  # type: ignore[misc]
    shapes = [operands[place].shape for place in floats]
    incoming = _packed([cotangents[place] for place in floats])
    if incoming.shape[1] <= MAX_DENSE_STATES:
        slopes = _slopes(lambda *e: pull(e)[: len(floats)], shapes, incoming)
        back = slopes.mT.flip(0)
        back = torch.cat([torch.zeros_like(back[:1]), back[:-1]])
        adjoint = _unpacked(prefix(back, incoming.flip(0), torch.zeros_like(incoming[0])).flip(0), shapes)
    else:
        adjoint = _adjoint_in_turn(plan, floats, at, cotangents)
    gradients = dict(zip(moving, pull(tuple(adjoint)), strict=True))
    return tuple(gradients[place][0] if place < s else gradients[place] for place in wanted)


def _before(first: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    """Return the states before each step."""
    return [torch.cat([x.unsqueeze(0), path[:-1]]) for x, path in zip(first, found, strict=False)]


@dataclass(frozen=True)
class _Partial:
    """Floating-point new states as a function of some of the operands."""

    step: LoopStep
    floats: tuple[int, ...]
    moving: tuple[int, ...]
    at: tuple[Tensor, ...]

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = list(self.at)
        for place, value in zip(self.moving, values, strict=True):
            given[place] = value
        new = self.step(*given)
        return tuple(new[place] for place in self.floats)


@dataclass(frozen=True)
class _PulledBack:
    """One backward step: operands and gradients of the new states to gradients of the old states and ``wanted``."""

    step: LoopStep
    floats: tuple[int, ...]
    wanted: tuple[int, ...]
    num_operands: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        at, later = tensors[: self.num_operands], tensors[self.num_operands :]
        moving = self.floats + tuple(place for place in self.wanted if place not in self.floats)
        _, pull = torch.func.vjp(_Partial(self.step, self.floats, moving, at), *(at[place] for place in moving))  # type: ignore[misc]
        gradients: tuple[Tensor, ...] = pull(later)
        return gradients


@dataclass(frozen=True)
class _Adjoint:
    """A backward step as the step of a loop: the gradient propagated from later times plus the present cotangent."""

    back: _PulledBack
    in_turn: int

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        k = len(self.back.floats)
        end = k + self.in_turn
        later, at, own, others = operands[:k], operands[k:end], operands[end : end + k], operands[end + k :]
        return tuple(x + y for x, y in zip(self.back(*at, *others, *later), own, strict=True))


def _adjoint_in_turn(
    plan: _Plan, floats: tuple[int, ...], at: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    last = [cotangents[place][-1] for place in floats]
    if plan.times == 1:
        return [x.unsqueeze(0) for x in last]
    i = plan.in_turn
    inputs = [*(x[1:].flip(0) for x in at[:i]), *(cotangents[place][:-1].flip(0) for place in floats)]
    step = _Adjoint(_PulledBack(plan.step, floats, (), plan.num_operands), i)
    earlier = paths(step, False, plan.times - 1, len(last), len(inputs), *last, *inputs, *at[i:])
    return [torch.cat([x.unsqueeze(0), path]).flip(0) for x, path in zip(last, earlier, strict=True)]


# -- recurrences that are affine ----------------------------------------------------------------


def affine_paths(step: LoopStep, times: int, num_states: int, num_inputs: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """Compute all states from the matrices and offsets of all times."""
    i = num_states + num_inputs
    first = operands[:num_states]
    over_time = torch.func.vmap(step, in_dims=(*(0,) * i, *(None,) * (len(operands) - i)))
    zeros = [x.new_zeros(times, *x.shape) for x in first]
    offsets, pull = torch.func.vjp(lambda *x: over_time(*x, *operands[num_states:]), *zeros)  # type: ignore[misc]
    offset, shapes = _packed(offsets), [x.shape for x in first]
    start = torch.cat([x.reshape(-1) for x in first])
    return tuple(_unpacked(prefix(_slopes(lambda *e: pull(e), shapes, offset), offset, start), shapes))


def _slopes(pull: Callable[..., Sequence[Tensor]], shapes: Sequence[torch.Size], like: Tensor) -> Tensor:
    """Return the Jacobian matrices of all times, ``(T, k, k)``, from a vector-Jacobian product over all times."""
    times, k = like.shape
    identity = torch.eye(k, dtype=like.dtype, device=like.device)
    rows: Tensor = torch.func.vmap(lambda e: _packed(pull(*_unpacked(e.expand(times, k), shapes))))(identity)
    return rows.movedim(0, 1)


def prefix(matrices: Tensor, offsets: Tensor, first: Tensor) -> Tensor:
    """Return ``x[t] = A[t] x[t - 1] + b[t]`` for all times, ``(T, k, k), (T, k), (k,) -> (T, k)``."""
    times, k = offsets.shape
    offset = torch.cat([(matrices[0] @ first + offsets[0]).unsqueeze(0), offsets[1:]])
    # The first matrix is zero, because the first offset already contains the first state.
    matrix = torch.cat([torch.zeros_like(matrices[:1]), matrices[1:]])
    if k == 1:
        matrix = matrix.squeeze(-1)
    # Each round doubles the number of earlier times that every state includes.
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
    """Return ``x`` delayed by ``times`` steps and padded with zeros, ``(T, ...) -> (T, ...)``."""
    return pad(x[:-times], (0, 0) * (x.dim() - 1) + (times, 0))


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of all times as one, ``[(T, *shape)] -> (T, k)``."""
    return torch.cat([x.reshape(len(x), -1) for x in parts], -1)


def _unpacked(x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the parts of the last dimension in their own shapes, ``(T, k) -> [(T, *shape)]``."""
    parts = x.split([shape.numel() for shape in shapes], -1)
    return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_followed() -> bool:
    """Tell whether operations are traced or counted, so that a loop must be a single operation."""
    return bool(current_dispatch_modes())


# -- texts --------------------------------------------------------------------------------------


def program_text(function: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor]) -> tuple[str, list[Tensor]]:
    """Return the Python source of a function, and its constants, which become arguments."""

    def whole(*operands: Tensor) -> list[Tensor]:
        return [y.clone(memory_format=torch.contiguous_format) for y in function(*operands)]

    with torch.no_grad():
        graph = traced(whole, *(x.detach() for x in operands))
    fail_apart(graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # other values may have another order in memory
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
    return graph.code, constants


# Recurrences in time: each state is a function of the state before.

Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(step: Step, state: Any, inputs: Any = None, length: int | None = None) -> tuple[Any, Any]:
    r"""Apply a step repeatedly: each new state enters the next step.

    When a model becomes a target, the step is traced once for all times: the loop is one operation of the graph and its
    gradient another, both compiled with the density. The step may use parameters from outside, and has second
    derivatives. Works in a Pyro model, and under ``torch.func``.

    A step whose new state is an affine function of the old state, ``A x + b`` with ``A`` and ``b`` computed from inputs
    and parameters, is detected; without a compiler, all times are then computed at once, in a number of operations that
    grows with the logarithm of the length. Examples are autoregressions, moving averages, exponential smoothing, and
    the variance of a GARCH process. A step that branches on values, changes tensors in place, or runs a transform of
    ``torch.func`` is unrolled: its graph grows with the length.

    Parameters
    ----------
    step : callable
        ``(state, input) -> (state, output)``. Without side effects, and without ``pyro.sample``.
    state : Tensor, or tuple, list or dict of them
        Initial state; steps keep its shapes and dtypes.
    inputs : Tensor, or tuple, list or dict of them, optional
        Inputs of all times; the first dimension is time, of length ``T``.
    length : int, optional
        ``T``; required without inputs.

    Returns
    -------
    state
        State after the last step.
    outputs
        Outputs stacked along time, the first dimension; None where the step returns None.

    Raises
    ------
    ShapeError
        If inputs differ in length, or the step changes the shape or dtype of the state.
    SettingsError
        If neither inputs nor a length are given.
    ModelError
        If the step has a Pyro site.

    Notes
    -----
    The matrices of an affine step are multiplied, and for gradients the Jacobian matrices of any step. If these
    products overflow although the states do not, for example with ``1e200 * x`` from zero, the result is NaN, unless it
    is compiled.

    References
    ----------
    Blelloch, G. E. (1990). Prefix sums and their applications. Carnegie Mellon University, CMU-CS-90-190.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> y = torch.tensor([1.0, 2.0, 4.0])
    >>> def smooth(level, y):
    ...     level = 0.5 * level + 0.5 * y
    ...     return level, level
    >>> bk.scan(smooth, torch.tensor(0.0), y)
    (tensor(2.6250), tensor([0.5000, 1.2500, 2.6250]))
    """
    state = _as_tensors("state", state)
    inputs = _as_tensors("inputs", inputs)
    times = _length(inputs, length)
    with lines_named("the step"):
        run = _Run(step, state, _at(inputs, 0) if times else _nothing(inputs))
    if times == 0:
        return state, _map(lambda leaf: _as_tensor(leaf).new_empty(0, *_as_tensor(leaf).shape), run.found[1])
    if times > 1:
        try:
            if _is_transformed() and run.agrees(_Run(step, run.found[0], _at(inputs, 1))):
                return _replayed(run, state, inputs, times)
            if run.is_affine:
                return _all_at_once(step, state, inputs, times)
        except UNTRACEABLE:
            pass  # a step that branches on its inputs
    return _one_by_one(step, state, inputs, times)


def _is_transformed() -> bool:
    """Tell whether functorch batches or differentiates, in reverse alone, or something is traced."""
    return (batching_level() is not None or is_traced()) and not has_forward_derivative()


class _Run:
    """One run of a step, its tape, and whether the new state is an affine function of the old one."""

    def __init__(self, step: Step, state: Any, inputs: Any) -> None:
        # Views, to distinguish the state from the same tensor used by the step from outside.
        state, inputs = _map(lambda leaf: leaf.view_as(leaf), state), _map(lambda leaf: leaf.view_as(leaf), inputs)
        self.state = tree_leaves(state)
        self.inputs = [leaf for leaf in tree_leaves(inputs) if leaf is not None]
        self.tape = Tape([*self.state, *self.inputs])
        with process_state(), NoSites(_SITE_IN_STEP), self.tape, _Degrees(state) as degrees, AugmentedAssignment():
            self.found = step(state, inputs)
        _check(self.found, state)
        small = sum(leaf.numel() for leaf in self.state) <= MAX_DENSE_STATES
        alike = self.state[0].is_floating_point() and len({leaf.dtype for leaf in self.state}) == 1
        self.is_affine = small and alike and not self.tape.lost and degrees.is_affine(self.found[0])

    def agrees(self, other: _Run) -> bool:
        """Tell whether both runs made the same calls, all of which are on the tape."""
        return self.tape.agrees(other.tape, tree_leaves(self.found), tree_leaves(other.found))


def _replayed(run: _Run, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    """Compute the states by the tape of one step, and then all outputs at once."""
    new = tree_leaves(run.found[0])
    first, spec = tree_flatten(state)
    columns = [leaf for leaf in tree_leaves(inputs) if leaf is not None]
    step, others = run.tape.program([*run.state, *run.inputs], new)
    after = paths(step, run.is_affine, times, len(first), len(columns), *first, *columns, *others)
    known = {id(x): path for x, path in zip(new, after, strict=True)}
    leaves, layout = tree_flatten(run.found[1])
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known]
    if wanted:
        output, others = run.tape.program([*run.state, *run.inputs, *new], wanted)
        before = [torch.cat([x.unsqueeze(0), path[:-1]]) for x, path in zip(first, after, strict=True)]
        in_turn = [*before, *columns, *after]
        dims = (*(0,) * len(in_turn), *(None,) * len(others))
        made = torch.func.vmap(output, in_dims=dims)(*in_turn, *others)
        known |= {id(x): path for x, path in zip(wanted, made, strict=True)}
    outputs = [
        leaf
        if leaf is None
        else known[id(leaf)]
        if isinstance(leaf, Tensor)
        else _as_tensor(leaf).expand(times, *_as_tensor(leaf).shape)
        for leaf in leaves
    ]
    return tree_unflatten([path[-1] for path in after], spec), tree_unflatten(outputs, layout)


def _one_by_one(step: Step, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    outputs = []
    with AugmentedAssignment():
        for t in range(times):
            state, output = step(state, _at(inputs, t))
            outputs.append(output)
    spec = tree_flatten(outputs[0])[1]
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    stacked = [None if column[0] is None else torch.stack([_as_tensor(v) for v in column]) for column in columns]
    return state, tree_unflatten(stacked, spec)


def _all_at_once(step: Step, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    """Compute all states from the matrices and offsets of all times."""
    leaves, spec = tree_flatten(state)
    k = len(leaves)
    columns, layout = tree_flatten(inputs)

    def flat_step(*leaves: Tensor) -> tuple[Tensor, ...]:
        new, _ = step(tree_unflatten(leaves[:k], spec), tree_unflatten(leaves[k:], layout))
        return tuple(tree_leaves(new))

    def output_of(*leaves: Tensor) -> Any:
        return step(tree_unflatten(leaves[:k], spec), tree_unflatten(leaves[k:], layout))[1]

    states = affine_paths(flat_step, times, k, len(columns), *leaves, *columns)
    outputs = step(state, _at(inputs, 0))[1]
    if any(leaf is not None for leaf in tree_leaves(outputs)):
        before = [torch.cat([x.unsqueeze(0), path[:-1]]) for x, path in zip(leaves, states, strict=True)]
        outputs = torch.func.vmap(output_of)(*before, *columns)
    return tree_unflatten([path[-1] for path in states], spec), outputs


class _Degrees(TorchFunctionMode):
    """Follow one step and tell, by known rules, whether its new state is an affine function of the old one."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._followed: dict[int, Tensor] = {id(leaf): leaf for leaf in tree_flatten(state)[0]}  # kept alive, for ids
        self._beyond: dict[int, Tensor] = {}  # tensors that depend on the state, but not affinely
        self._lost = False  # set by reading a number of the state, assigning to it or changing it in place

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        followed, beyond = self._depends((args, kwargs), self._followed), self._depends((args, kwargs), self._beyond)
        if not followed and not beyond:
            return result
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        name = name_of(func)
        if changes_in_place(func, kwargs) or (not made and name not in QUERIES):
            self._lost = True
        plain = not self._depends(kwargs, self._followed) and "rounding_mode" not in kwargs
        is_affine = not beyond and plain and self._is_affine_rule(name, args)
        kept = self._followed if is_affine else self._beyond
        kept.update((id(leaf), leaf) for leaf in made)
        return result

    @staticmethod
    def _depends(data: Any, known: dict[int, Tensor]) -> bool:
        return any(isinstance(leaf, Tensor) and id(leaf) in known for leaf in tree_flatten(data)[0])

    def _is_affine_rule(self, name: str, args: tuple[Any, ...]) -> bool:
        follows = [self._depends(argument, self._followed) for argument in args]
        if name in _SUMS:
            return True
        if name in _PRODUCTS:
            return follows.count(True) == 1
        if name in _OF_FIRST:
            return follows.count(True) == 1 and follows[0]
        return name == "where" and len(args) == 3 and not follows[0]

    def is_affine(self, state: Any) -> bool:
        """Tell whether every part of a new state is an affine function of the old one."""
        return not self._lost and not self._depends(state, self._beyond)


# Names of torch's functions, methods and attributes, without underscores, that are linear in all arguments together, in
# one factor, and in the first argument alone.
_SUMS = frozenset("add radd sub rsub stack cat concatenate".split())
_PRODUCTS = frozenset("mul rmul multiply matmul rmatmul mv mm dot".split())
_OF_FIRST = frozenset(
    "neg positive getitem unsqueeze squeeze reshape view flatten sum mean expand clone unbind permute transpose "
    "movedim t contiguous cumsum roll flip diff select narrow truediv div divide T mT".split()
)


_SITE_IN_STEP = (
    "is in the step of a scan, which must not have sites; draw the values of all times before the scan, in a plate or "
    "as one vector, pass them as inputs, and observe the outputs after it"
)


class NoSites(Messenger):
    """Refuse sites in a step, because their number would depend on the number of steps; ``text`` says what to do."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def _pyro_sample(self, msg: Any) -> None:
        raise ModelError(f"site {msg['name']!r} {self._text}")


def _as_tensors(name: str, data: Any) -> Any:
    leaves, spec = tree_flatten(data)
    if not leaves and name == "state":
        raise ShapeError("the state of a scan holds no tensor; give a tensor, or a tuple or dictionary of tensors")
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, (Tensor, int, float)):
            raise ShapeError(f"the {name} of a scan must be tensors, not {type(leaf).__name__}; use torch.as_tensor")
    like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    made = [
        leaf
        if leaf is None or isinstance(leaf, Tensor)
        else torch.as_tensor(float(leaf), dtype=None if like is None else like.dtype)
        for leaf in leaves
    ]
    return tree_unflatten(made, spec)


def _length(inputs: Any, length: int | None) -> int:
    sizes = {len(leaf) if leaf.dim() else None for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)}
    if None in sizes:
        raise ShapeError("an input of a scan has no time dimension; make time its first dimension")
    if length is not None:
        sizes.add(whole_number("length", length, least=0))
    if not sizes:
        raise SettingsError("a scan has neither inputs nor a length; pass inputs or length=")
    if len(sizes) > 1:
        raise ShapeError(f"the inputs of a scan differ in length: {sorted(s for s in sizes if s is not None)}")
    return int(sizes.pop() or 0)


def _at(inputs: Any, t: int) -> Any:
    return _map(lambda leaf: leaf[t], inputs)


def _nothing(inputs: Any) -> Any:
    """Return zeros as the inputs of one time, for inputs of length zero."""
    return _map(lambda leaf: leaf.new_zeros(leaf.shape[1:]), inputs)


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    leaves, spec = tree_flatten(data)
    return tree_unflatten([leaf if leaf is None else function(leaf) for leaf in leaves], spec)


def _as_tensor(value: Any) -> Tensor:
    """Return an output as a tensor; numbers may be outputs, too."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"an output of a scan is a {type(value).__name__}, not a tensor or a number") from error


def _check(found: Any, state: Any) -> None:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ShapeError("the step of a scan must return (state, output); return (state, None) if there is no output")
    old, new = tree_flatten(state), tree_flatten(found[0])
    if old[1] != new[1]:
        raise ShapeError(f"the step of a scan changes the structure of its state, from {old[1]} to {new[1]}")
    for place, (before, after) in enumerate(zip(old[0], new[0], strict=True)):
        if not isinstance(after, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
            now = f"{tuple(after.shape)}, {after.dtype}" if isinstance(after, Tensor) else type(after).__name__
            raise ShapeError(
                f"part {place} of the state of a scan has shape {tuple(before.shape)}, {before.dtype}, and after one "
                f"step {now}; pass an initial state with the shape and dtype that the step returns"
            )
