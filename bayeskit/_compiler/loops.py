"""A loop over time under batching, gradients and tracing, with gradients that need no loop.

The states are computed one after another. Given all states, the Jacobian matrices of all steps are computed at once,
and the gradient follows an affine recurrence backward in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from bayeskit._compiler.affine_recurrence import LoopStep, affine_paths, jacobians, packed, prefix, unpacked
from bayeskit._compiler.loop_operations import loop, loop_gradient
from bayeskit._compiler.native_source import gradient_source, loop_source
from bayeskit._compiler.python_text import program_text
from bayeskit._core.torch_internals import current_dispatch_modes, disable_current_modes, unwrap_dead_wrappers

MAX_DENSE_STATES = 16  # size of a state, beyond which matrix products cost more than a loop


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
    incoming = packed([cotangents[place] for place in floats])
    if incoming.shape[1] <= MAX_DENSE_STATES:
        slopes = jacobians(lambda *e: pull(e)[: len(floats)], shapes, incoming)
        back = slopes.mT.flip(0)
        back = torch.cat([torch.zeros_like(back[:1]), back[:-1]])
        adjoint = unpacked(prefix(back, incoming.flip(0), torch.zeros_like(incoming[0])).flip(0), shapes)
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


def _is_followed() -> bool:
    """Tell whether operations are traced or counted, so that a loop must be a single operation."""
    return bool(current_dispatch_modes())
