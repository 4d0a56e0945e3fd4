"""Compiled moves of trajectories that grow by doubling, for few chains in few dimensions.

There the bookkeeping of a leaf costs several times the density if each of its operations is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bayeskit._compiler import compile_with_inductor, settle
from bayeskit._evaluation import Evaluation, has_compiler
from bayeskit._torch import one_thread, validation_kept
from bayeskit._tracing import traced
from bayeskit.inference.samplers.hmc import HMCState
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.nuts.doubling import (
    Half,
    Tree,
    add_leaf,
    join_half,
    leave,
    num_closed,
    start,
    subtrees_turn,
)

CLOSED_AT_ONCE = 3  # subtrees that compiled code looks at


class CompiledGrowth:
    """Growth by one compiled call a move, on packed tensors.

    Parameters
    ----------
    metric : Metric
    moves : Moves
        From :func:`compiled_moves`, for this form of batch and metric.
    max_depth : int
    """

    def __init__(self, metric: Metric, moves: Moves, max_depth: int) -> None:
        self._metric, self._moves, self._max_depth = metric, moves, max_depth
        self._factor = metric.factor.contiguous()  # compiled code takes dtype and strides for granted

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin with a tree of one leaf."""
        self._step_size = step_size
        self._memory = momentum.new_empty(self._max_depth, 3, *momentum.shape)
        self._rows = self._memory.unbind(0)
        tree, half = start(self._metric, state, momentum, direction, step_size)
        self._packed = [*_pack(tree), *_pack(half)]
        return half.next_position.contiguous()

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add a leaf and close the subtrees that it ends."""
        slot, closed = leaf.bit_count(), num_closed(leaf)
        subtrees = self._moves.subtrees[slot][min(closed, CLOSED_AT_ONCE)]
        plain = (x.to(self._factor.dtype).contiguous() for x in evaluation)
        position, growing, *self._packed[2:], remembered = self._moves.add(
            self._factor, *self._packed[2:], *plain, exponential, self._memory, subtrees
        )
        self._rows[slot].copy_(remembered)
        if closed > CLOSED_AT_ONCE:
            growing = self._close_more(slot, closed)
        return position, growing

    def _close_more(self, slot: int, closed: int) -> Tensor:
        half = _unpack(Half, *self._packed[2:])
        first = self._memory[slot - closed : slot - CLOSED_AT_ONCE]
        middle = self._memory[slot - closed + 1 : slot - CLOSED_AT_ONCE + 1]
        alive = half.alive & ~subtrees_turn(first, middle, half).any(0)
        self._packed[2:] = _pack(half._replace(alive=alive))
        return alive.any()

    def join(self, position: Tensor, gradient: Tensor, luck: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Join a half and begin the next."""
        plain = gradient.to(self._factor.dtype).contiguous()
        position, growing, *self._packed = self._moves.join(
            self._factor, *self._packed, position, plain, self._memory, luck, direction, self._step_size
        )
        return position, growing

    def parts(self) -> tuple[Tree, Half]:
        """Return the trajectory and what has been counted."""
        return _unpack(Tree, *self._packed[:2]), _unpack(Half, *self._packed[2:])


_VECTORS = {
    "left_position",
    "left_momentum",
    "left_gradient",
    "right_position",
    "right_momentum",
    "right_gradient",
    "next_position",
    "half_momentum",
    "last_momentum",
    "momentum_sum",
    "position",
    "gradient",
}
_FLAGS = {"active", "alive", "diverging"}
_Part = TypeVar("_Part", Tree, Half)


def _pack(part: Tree | Half) -> tuple[Tensor, Tensor]:
    """Put all vectors into one tensor, ``(k, n, d)``, and all numbers into another, ``(m, n)``: fewer arguments."""
    vectors = [x for name, x in part._asdict().items() if name in _VECTORS]
    numbers = [x.to(vectors[0].dtype) for name, x in part._asdict().items() if name not in _VECTORS]
    return torch.stack(vectors), torch.stack(numbers)


def _unpack(kind: type[_Part], vectors: Tensor, numbers: Tensor) -> _Part:
    rows = {True: iter(vectors.unbind(0)), False: iter(numbers.unbind(0))}
    values = ((name, next(rows[name in _VECTORS])) for name in kind._fields)
    return kind(**{name: value != 0 if name in _FLAGS else value for name, value in values})


class Moves(NamedTuple):
    """Compiled calls on packed tensors."""

    add: Callable[..., tuple[Tensor, ...]]
    join: Callable[..., tuple[Tensor, ...]]
    subtrees: tuple[tuple[Tensor, ...], ...]  # for each slot and number of closed subtrees: their slots, or -1


@lru_cache(maxsize=16)
def compiled_moves(
    factor_shape: torch.Size,
    is_dense: bool,
    n: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    max_depth: int,
    max_energy_error: float,
) -> Moves | None:
    """Compile the moves for one form of batch and metric, or return None where that fails.

    Compiled code wants fixed shapes, so it always looks at three subtrees; which of
    them are there it is told by a tensor. More are closed only by every sixteenth leaf.
    """

    def add(factor: Tensor, vectors: Tensor, numbers: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        exponential, memory, subtrees = rest[4:]
        half = _unpack(Half, vectors, numbers)
        half, remembered = add_leaf(
            Metric(factor, is_dense), max_energy_error, half, Evaluation(*rest[:4]), exponential
        )
        first = memory[subtrees.clamp(min=0)]
        middle = torch.cat([first[1:], remembered.unsqueeze(0)])
        turned = subtrees_turn(first, middle, half) & (subtrees >= 0).unsqueeze(-1)
        half = half._replace(alive=half.alive & ~turned.any(0))
        return half.next_position, half.alive.any(), *_pack(half), remembered

    def join(factor: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        tree, half = _unpack(Tree, *rest[:2]), _unpack(Half, *rest[2:4])
        position, gradient, memory, luck, direction, step_size = rest[4:]
        tree = join_half(tree, half, position, gradient, memory[0, 0], luck)
        half = leave(Metric(factor, is_dense), tree, half, direction, step_size)
        return half.next_position, tree.active.any(), *_pack(tree), *_pack(half)

    factor = torch.ones(factor_shape, dtype=dtype, device=device)
    vector, number = factor.new_zeros(n, d), factor.new_zeros(n)
    evaluation = (number, number, number, vector)
    memory = factor.new_zeros(max_depth, 3, n, d)
    subtrees = tuple(
        tuple(_slots(slot, closed, device) for closed in range(min(slot, CLOSED_AT_ONCE) + 1))
        for slot in range(max_depth)
    )
    metric = Metric(factor, is_dense)
    state = HMCState._make((vector, *evaluation, number))
    tree, half = (_pack(part) for part in start(metric, state, vector, number, number + 1))
    leaf = (factor, *half, *evaluation, number + 1, memory, subtrees[0][0])
    end = (factor, *tree, *half, vector, vector, memory, number, number, number + 1)
    try:
        return Moves(_compiled(add, leaf), _compiled(join, end), subtrees)
    except (RuntimeError, OSError, NotImplementedError, AttributeError, AssertionError):
        return None  # the density has said already that compiling does not work here


def _slots(slot: int, closed: int, device: torch.device) -> Tensor:
    """Return the slots of the first leaves of the subtrees that the leaf in ``slot`` closes, after -1 for none."""
    slots = [slot - k if k <= closed else -1 for k in range(CLOSED_AT_ONCE, 0, -1)]
    return torch.tensor(slots, device=device)


def _compiled(
    function: Callable[..., tuple[Tensor, ...]], examples: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    if examples[0].device.type == "cpu" and not has_compiler():
        raise OSError("no C++ compiler")
    examples = tuple(x.clone() for x in examples)  # one tensor in two places would be traced as one argument
    settle()
    with one_thread(), torch.no_grad(), validation_kept():
        graph = traced(function, *examples)
    # All tensors are made here, so their sizes need no second look at each call.
    return compile_with_inductor(graph, examples, {"size_asserts": False, "force_pointwise_cat": True})
