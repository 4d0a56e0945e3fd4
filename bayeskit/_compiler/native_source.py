"""Loops over time, their gradients, and functions of a row as C++."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from bayeskit._compiler.native_library import NUMBER_TYPES, batch_source
from bayeskit._compiler.native_writer import MAX_LINES, Numbers, Writer


def loop_source(
    step: Callable[..., tuple[Tensor, ...]],  # (*states, *inputs, *others) -> states
    operands: Sequence[Tensor],  # of one time, without the batch
    batched: Sequence[bool],  # which of them have a batch in the loop
    num_states: int,
    num_inputs: int,
) -> str:
    """Return C++ of a ``loop`` over ``step``, see :func:`batch_source`, or "" if it is unsuited."""
    # Pointers: operands, then states of all times; dimensions are times, batch and the tensor's own.
    if not _are_suited(operands):
        return ""
    writer = Writer()
    names = [writer.operand(f"x{place}", x) for place, x in enumerate(operands)]
    found = writer.made(step, operands, names)
    if found is None:
        return ""
    frame = _Frame(writer, operands, batched, num_states, num_states + num_inputs)
    inputs = [line for p in range(num_states, frame.in_turn) for line in frame.read(f"x{p}", p, p, True)]
    new = [frame.results(f"n{p}", found[p], p) for p in range(num_states)]
    stored = [line for p in range(num_states) for line in frame.write(f"n{p}", p, len(operands) + p, True, "=")]
    body = [*inputs, *writer.lines, *sum(new, []), *stored]
    body += [f"x{p}_{e} = n{p}_{e};" for p in range(num_states) for e in range(operands[p].numel())]
    states = [line for p in range(num_states) for line in frame.read(f"x{p}", p, p, False, constant="")]
    return frame.written([*states, *frame.others(), "for (int64_t t = 0; t < times; ++t) {", *body, "}"])


def gradient_source(
    step: Callable[..., tuple[Tensor, ...]],  # (*operands, *later) -> gradients by floats, then by the other wanted
    operands: Sequence[Tensor],
    batched: Sequence[bool],
    num_states: int,
    num_inputs: int,
    floats: Sequence[int],
    wanted: Sequence[int],
) -> str:
    """Return C++ of the gradient of a loop with respect to ``wanted`` operands, or "" as in :func:`loop_source`."""
    # ``later`` are gradients of the new states ``floats``. Pointers: operands, states of all times, their cotangents,
    # and gradients of ``wanted``, which begin as zeros.
    if not _are_suited(operands):
        return ""
    writer, count = Writer(), len(operands)
    names = [writer.operand(f"x{place}", x) for place, x in enumerate(operands)]
    later = [writer.operand(f"m{place}", operands[place]) for place in floats]
    found = writer.made(step, [*operands, *(operands[place].clone() for place in floats)], [*names, *later])
    if found is None:
        return ""
    frame = _Frame(writer, operands, batched, num_states, num_states + num_inputs)
    moving = [*floats, *(place for place in wanted if place not in floats)]
    outputs = {place: count + 2 * num_states + position for position, place in enumerate(wanted)}
    body = []
    for p in range(num_states):
        body += frame.read(f"x{p}", p, p, False, later=count + p)
    for p in range(num_states, frame.in_turn):
        body += frame.read(f"x{p}", p, p, True)
    for p in floats:
        body += frame.read(f"c{p}", p, count + num_states + p, True)
        body += [f"const {frame.kind(p)} m{p}_{e} = l{p}_{e} + c{p}_{e};" for e in frame.elements(p)]
    body += writer.lines
    for p, numbers in zip(moving, found, strict=True):
        body += frame.results(f"g{p}", numbers, p)
    for p in floats:
        body += [f"l{p}_{e} = g{p}_{e};" for e in frame.elements(p)]
    for p in moving[len(floats) :]:
        if p < frame.in_turn:
            body += frame.write(f"g{p}", p, outputs[p], True, "+=")
        else:
            body += [f"l{p}_{e} += g{p}_{e};" for e in frame.elements(p)]
    sums = [p for p in moving if p in floats or p >= frame.in_turn]
    zeros = [f"{frame.kind(p)} l{p}_{e} = 0;" for p in sums for e in frame.elements(p)]
    last = [line for p in sums if p in outputs for line in frame.write(f"l{p}", p, outputs[p], False, "+=")]
    return frame.written([*frame.others(), *zeros, "for (int64_t t = times - 1; t >= 0; --t) {", *body, "}", *last])


class RowSource(NamedTuple):
    """A function of rows as C++, and the constants passed to each call after operands and results."""

    text: str
    data: tuple[Tensor, ...]


def row_source(
    function: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor], like: Sequence[int]
) -> RowSource | None:
    """Return C++ of ``function`` of each row of operands ``(1, ...)``, or None if it is unsuited."""
    # Result q has the shape and dtype of operand like[q]. Data are pointers, so the C++ serves others of their shape.
    if not _are_suited(operands):
        return None
    writer = Writer(takes_data=True)
    found = writer.made(function, operands, [writer.row(f"x{place}", x) for place, x in enumerate(operands)])
    if found is None:
        return None
    lines = [
        f"{_kind(x)} x{place} = ({_kind(x)})pointers[{place}] + b * {x.numel()};" for place, x in enumerate(operands)
    ]
    stored = []
    for q, (numbers, p) in enumerate(zip(found, like, strict=True)):
        if numbers.dtype != operands[p].dtype or numbers.positions.numel() != operands[p].numel():
            return None
        kind = f"{NUMBER_TYPES[numbers.dtype]}*"
        stored.append(f"{kind} r{q} = ({kind})pointers[{len(operands) + q}] + b * {operands[p].numel()};")
        stored += writer.stored(f"r{q}", numbers)
    first = len(operands) + len(like)
    lines += [f"{_kind(x)} d{k} = ({_kind(x)})pointers[{first + k}];" for k, x in enumerate(writer.data)]
    text = batch_source([*lines, *writer.lines, *stored], writer.functions, writer.space)
    return RowSource(text, tuple(writer.data))


class FunctionSource(NamedTuple):
    """A C++ structure whose static ``call(space, operands, results)`` takes an array a tensor, and the bytes of space.

    The call returns 0, or 1 where memory was not enough.
    """

    text: str
    space: int


def function_source(
    name: str, function: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor]
) -> FunctionSource | None:
    """Return the C++ of a function, or None if it is unsuited."""
    if not _are_suited(operands):
        return None
    writer = Writer()
    found = writer.made(function, operands, [writer.row(f"x{place}", x) for place, x in enumerate(operands)])
    if found is None:
        return None
    stored = [line for q, numbers in enumerate(found) for line in writer.stored(f"r{q}", numbers)]
    arguments = [f"{_kind(x)} x{place}" for place, x in enumerate(operands)]
    arguments += [f"{NUMBER_TYPES[numbers.dtype]}* r{q}" for q, numbers in enumerate(found)]
    body = [f"static int call({', '.join(['char* space', *arguments])}) {{", *writer.lines, *stored, "return 0;", "}"]
    return FunctionSource("\n".join([f"struct {name} {{", *writer.functions, *body, "};"]), writer.space)


def _kind(x: Tensor) -> str:
    return f"const {NUMBER_TYPES[x.dtype]}*"


def _are_suited(operands: Sequence[Tensor]) -> bool:
    few = sum(x.numel() for x in operands) <= MAX_LINES
    return few and all(x.dtype in NUMBER_TYPES and x.device.type == "cpu" for x in operands)


class _Frame:
    """Writer of the loads and stores around the statements of a step."""

    def __init__(
        self, writer: Writer, operands: Sequence[Tensor], batched: Sequence[bool], num_states: int, in_turn: int
    ) -> None:
        self._writer, self._operands, self._batched = writer, operands, batched
        self._num_states, self.in_turn = num_states, in_turn

    def kind(self, place: int) -> str:
        return NUMBER_TYPES[self._operands[place].dtype]

    def elements(self, place: int) -> range:
        return range(self._operands[place].numel())

    def others(self) -> list[str]:
        """Return the loads of the operands that are constant in time."""
        places = range(self.in_turn, len(self._operands))
        return [line for place in places for line in self.read(f"x{place}", place, place, False)]

    def read(
        self,
        name: str,
        place: int,
        pointer: int,
        over_time: bool,
        constant: str = "const ",
        later: int | None = None,
    ) -> list[str]:
        """Return the loads of a tensor; after the first time, those of ``later`` at the time before."""
        kind = self.kind(place)
        lines = []
        for element in self.elements(place):
            value = f"((const {kind}*)pointers[{pointer}])[{self._offset(place, over_time)} + {element}]"
            if later is not None:
                path = f"((const {kind}*)pointers[{later}])[{self._offset(place, True, '(t - 1)')} + {element}]"
                value = f"t > 0 ? {path} : {value}"
            lines.append(f"{constant}{kind} {name}_{element} = {value};")
        return lines

    def write(self, name: str, place: int, pointer: int, over_time: bool, assign: str) -> list[str]:
        target = f"(({self.kind(place)}*)pointers[{pointer}])[{self._offset(place, over_time)}"
        return [f"{target} + {element}] {assign} {name}_{element};" for element in self.elements(place)]

    def results(self, name: str, numbers: Numbers, place: int) -> list[str]:
        values = self._writer.values(numbers)
        return [f"const {self.kind(place)} {name}_{element} = {value};" for element, value in enumerate(values)]

    def _offset(self, place: int, over_time: bool, time: str = "t") -> str:
        size = self._operands[place].numel()
        if over_time:
            return f"({time} * batch + b) * {size}" if self._batched[place] else f"{time} * {size}"
        return f"b * {size}" if self._batched[place] else "0"

    def written(self, lines: Sequence[str]) -> str:
        """Return the C++ function without unused loads."""
        names = re.findall(r"\b[xc]\d+_\d+\b", "\n".join(lines))
        once = {name for name, count in Counter(names).items() if count == 1}
        declared = re.compile(r"(?:const )?\w+ ([xc]\d+_\d+) = ")
        kept = [line for line in lines if (m := declared.match(line)) is None or m[1] not in once]
        return batch_source(kept, self._writer.functions, self._writer.space)
