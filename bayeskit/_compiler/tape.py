"""One run of a function as a list of calls of torch, which can be repeated with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayeskit._compiler.factorisations import UncheckedFactors
from bayeskit._compiler.torch_internals import TreeSpec
from bayeskit._core.process_state import process_state
from bayeskit._core.torch_internals import batching_level, tree_flatten, tree_leaves, tree_unflatten
from bayeskit.errors import ModelError

# Functions, methods and attributes, without underscores, that do not read the values of a tensor.
QUERIES = frozenset(
    "size dim numel len shape ndim dtype device layout stride requires_grad is_floating_point is_contiguous "
    "is_complex is_tensor get_device".split()
)
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli binomial multinomial poisson "
    "dropout uniform exponential standard_gamma sample_dirichlet".split()
)


def name_of(function: Any) -> str:
    """Return the name of a function, method or attribute of torch, without underscores around it."""
    whole = getattr(function, "__name__", "")
    return str(function.__self__.__name__) if whole in ("__get__", "__set__") else whole.strip("_")


def changes_in_place(function: Any, kwargs: Any) -> bool:
    """Tell whether a call of torch changes one of its arguments."""
    whole = getattr(function, "__name__", "")
    return whole in ("__setitem__", "__set__") or "out" in kwargs or (whole.endswith("_") and not whole.endswith("__"))


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among the arguments of a call."""

    number: int


@dataclass(frozen=True)
class _Call:
    function: Any
    layout: TreeSpec
    arguments: tuple[Any, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True)
class Program:
    """Calls of a tape as a function of tensors; programs with the same calls are equal."""

    num_arguments: int
    calls: tuple[_Call, ...]
    results: tuple[int, ...]  # slots of the returned tensors

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Make the calls."""
        slots = dict(enumerate(arguments))
        for call in self.calls:
            leaves = [slots[leaf.number] if isinstance(leaf, _Slot) else leaf for leaf in call.arguments]
            args, kwargs = tree_unflatten(leaves, call.layout)
            for number, made in zip(call.results, tree_leaves(call.function(*args, **kwargs)), strict=True):
                if number is not None:
                    slots[number] = made
        return tuple(slots[number] for number in self.results)


def _ends(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


class Tape(TorchFunctionMode):
    """Record the calls of torch that a function makes of the tensors ``given``."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # Set by calls that other tensors cannot repeat: reading values, changes in place, random numbers, transforms.
        self.lost = False
        self._kept: list[Any] = list(given)  # alive, for their ids
        self._depends = {id(x) for x in given}
        self._made: dict[int, tuple[int, int]] = {id(x): (-1, place) for place, x in enumerate(given)}
        self._outside: list[Tensor] = []
        self._calls: list[tuple[Any, TreeSpec, list[Any], list[Any]]] = []
        self._record: list[Any] = []
        self._level, self._has_gradients = batching_level(), torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, layout = tree_flatten((args, kwargs))
        results = tree_leaves(result)
        depends = any(isinstance(leaf, Tensor) and id(leaf) in self._depends for leaf in leaves)
        name = name_of(func)
        self.lost |= (
            (changes_in_place(func, kwargs) and (depends or name != "requires_grad"))  # as Pyro's parameters ask for
            or name in _RANDOM
            or (depends and torch.is_grad_enabled() != self._has_gradients)
            or batching_level() != self._level
            or any(isinstance(x, Tensor) for leaf in leaves if isinstance(leaf, slice) for x in _ends(leaf))
        )
        if not all(isinstance(leaf, Tensor) for leaf in results):
            self.lost |= depends and name not in QUERIES
            return result
        entry = func, layout, [self._place(leaf) for leaf in leaves]
        call = len(self._calls) if depends else self._same(entry)
        self._record.append(entry)
        self._calls.append((func, layout, leaves, results))
        self._kept += results
        for place, made in enumerate(results):
            if id(made) not in self._made:
                self._made[id(made)] = (call, place)
            if depends:
                self._depends.add(id(made))
        return result

    def _same(self, entry: Any) -> int:
        """Return the index of the first equal call, or of the next call."""
        try:
            return self._record.index(entry)
        except (ValueError, RuntimeError, TypeError):
            return len(self._calls)

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._made:
            self._made[id(leaf)] = (-2, len(self._outside))
            self._outside.append(leaf)
            self._kept.append(leaf)
        return self._made[id(leaf)]

    def agrees(self, other: Tape, mine: Sequence[Any], others: Sequence[Any]) -> bool:
        """Tell whether two runs made the same calls, with the same tensors from outside, and the same results."""
        try:
            return (
                not self.lost
                and not other.lost
                and [self._place(x) for x in mine] == [other._place(x) for x in others]
                and len(self._outside) == len(other._outside)
                and all(one is two for one, two in zip(self._outside, other._outside, strict=True))
                and self._record == other._record
            )
        except (RuntimeError, ValueError, TypeError):
            return False  # arguments that cannot be compared

    def program(self, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[Program, list[Tensor]]:
        """Return the program that computes ``wanted`` from ``given`` and further tensors, and these further tensors."""
        # Tensors that depend on nothing given are arguments, not computed again.
        slots = {id(x): number for number, x in reversed(list(enumerate(given)))}
        needed = {id(x) for x in wanted} - set(slots)
        calls = []
        for call in reversed(self._calls):
            _, _, leaves, results = call
            if any(id(x) in needed and id(x) in self._depends for x in results):
                calls.append(call)
                needed -= {id(x) for x in results}
                needed |= {id(x) for x in leaves if isinstance(x, Tensor)} - set(slots)
        by_place = {self._place(x): x for x in reversed((*self._kept, *wanted)) if id(x) in needed}
        others = list(by_place.values())
        order = {place: len(given) + number for number, place in enumerate(by_place)}
        slots |= {number: order[self._made[number]] for number in needed}
        num_arguments = len(given) + len(others)
        count, made = num_arguments, []
        for function, layout, leaves, results in reversed(calls):
            arguments = tuple(_Slot(slots[id(x)]) if isinstance(x, Tensor) else x for x in leaves)
            numbers: list[int | None] = []
            for x in results:
                if id(x) in slots:  # given, or an argument that the call returns as it is
                    numbers.append(None)
                    continue
                slots[id(x)] = count
                numbers.append(count)
                count += 1
            made.append(_Call(function, layout, arguments, tuple(numbers)))
        return Program(num_arguments, tuple(made), tuple(slots[id(x)] for x in wanted)), others


class NoSites(Messenger):
    """Refuse sites in a step, because their number would depend on the number of steps; ``text`` says what to do."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def _pyro_sample(self, msg: Any) -> None:
        raise ModelError(f"site {msg['name']!r} {self._text}")


def record(function: Callable[..., Any], given: Sequence[Tensor], refusal: str) -> tuple[Any, Tape]:
    """Run a user's function on a tape; ``refusal`` says of its Pyro sites that they must not be, and what to do.

    Failed matrix factorisations pass: the programs that are made of it mark them.
    """
    tape = Tape(given)
    with process_state(), NoSites(refusal), UncheckedFactors(), tape:
        return function(*given), tape
