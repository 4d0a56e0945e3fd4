"""Functions of tensors as C++ statements: every number is a variable of its own, or an element of an array."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from bayeskit._compiler.cost import is_view
from bayeskit._compiler.native_library import NUMBER_TYPES, VECTOR_FUNCTIONS, named_loop, space_of_loop
from bayeskit._compiler.torch_internals import OpOverload, core_aten_decompositions, get_decompositions
from bayeskit._core.torch_internals import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from bayeskit._core.untraceable import UNTRACEABLE

MAX_LINES = 200_000  # more lines take a compiler more than ten seconds
#: Size from which a tensor is an array and its operations are loops; maximal number of loops of one operation; maximal
#: length of the sums of arrays that are written term by term.
_ARRAY, _MAX_LOOPS, _MAX_TERMS = 24, 64, 64
_ON_STACK = 32_768  # numbers of all arrays on the stack; further arrays are in memory that the caller gives
_MAX_PRODUCT = 20_000  # terms of a matrix product, beyond which a library is faster
_FUNCTIONS = "sqrt tan sinh cosh asin acos atan erf erfc floor ceil trunc lgamma"
_EXPRESSIONS = {
    **{name: f"std::{name}({{0}})" for name in _FUNCTIONS.split()},
    **{name: f"simd::{name}({{0}})" for name in VECTOR_FUNCTIONS.split()},
    **{
        name: f"({{0}} {symbol} {{1}})"
        for name, symbol in zip("eq ne lt le gt ge".split(), "== != < <= > >=".split(), strict=True)
    },
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": "std::abs({0})",
    "round": "std::nearbyint({0})",
    "reciprocal": "(1 / {0})",
    "digamma": "digamma({0})",
    "rsqrt": "(1 / std::sqrt({0}))",
    "sigmoid": "(1 / (1 + simd::exp(-{0})))",
    "sign": "(({0} > 0) - ({0} < 0))",
    "relu": "({0} < 0 ? 0 : {0})",
    "pow": "std::pow({0}, {1})",
    "atan2": "std::atan2({0}, {1})",
    "fmod": "std::fmod({0}, {1})",
    "maximum": "({0} != {0} || {0} > {1} ? {0} : {1})",
    "minimum": "({0} != {0} || {0} < {1} ? {0} : {1})",
    "where": "({0} ? {1} : {2})",
    "isnan": "std::isnan({0})",
    "isinf": "std::isinf({0})",
    "logical_not": "(!{0})",
    "logical_and": "({0} && {1})",
    "logical_or": "({0} || {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "_to_copy": "{0}",
}
_MOVES = frozenset(
    "select slice permute unsqueeze squeeze expand view _unsafe_view reshape clone alias detach cat stack unbind split "
    "split_with_sizes t transpose diagonal repeat flip roll lift_fresh lift_fresh_copy select_scatter "
    "slice_scatter diagonal_scatter".split()
)
_KEYWORDS = {"add": {"alpha"}, "sub": {"alpha"}, "_to_copy": {"dtype", "layout", "device"}}
_FOLDS = {"sum": "add", "amax": "maximum", "amin": "minimum", "prod": "mul", "all": "logical_and", "any": "logical_or"}
_RUNNING = {"cumsum": "add", "cumprod": "mul"}
_NEUTRAL = {
    "add": "0",
    "mul": "1",
    "maximum": "-INFINITY",
    "minimum": "INFINITY",
    "logical_and": "true",
    "logical_or": "false",
}
#: Functions of C++ that compute whole numbers in double precision.
_OF_REAL_NUMBERS = frozenset("pow fmod floor ceil trunc round".split())


class _NoNativeCode(Exception):
    """Raised for a step with too many numbers or an unknown operation."""


class Numbers:
    """A tensor of positions in a list of C++ expressions; ``value`` holds their values if they are constant."""

    def __init__(self, positions: Tensor, dtype: torch.dtype, value: Tensor | None = None) -> None:
        self.positions, self.dtype, self.value = positions, dtype, value


def _name(target: Any) -> str:
    return target._schema.name.split("::")[1] if isinstance(target, OpOverload) else ""


def _out_of_place(target: Any) -> Any:
    """Return the out-of-place form of an in-place operation, or None if there is none."""
    name = _name(target)
    if not name.endswith("_") or name.startswith("_"):
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)


def _is_alone(node: Node) -> bool:
    """Tell whether no other node can share the memory of a node's result."""
    near = [x for x in (node, *node.users) if x.op != "output"]
    return all(_name(x.target) and not is_view(x.target) and _name(x.target) not in _MOVES for x in near)


def _is_mutable(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _changes_views(graph: torch.fx.GraphModule) -> bool:
    """Tell whether an in-place operation of a graph may change an aliased tensor, or has no out-of-place form."""
    changes = [node for node in graph.graph.nodes if node.op == "call_function" and _is_mutable(node.target)]
    return not all(
        _out_of_place(node.target) and isinstance(node.args[0], Node) and _is_alone(node.args[0]) for node in changes
    )


def _functional(function: Callable[..., tuple[Tensor, ...]], examples: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the graph of a function in core operations, none of them in place."""
    return make_fx(torch.func.functionalize(lambda *x: function(*x)), decomposition_table=_decompositions())(*examples)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    return {**core_aten_decompositions(), **get_decompositions([aten._softmax.default, aten._log_softmax.default])}


class _Names:
    """The C++ expressions of positions: a variable or a literal each, or consecutive elements of an array."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._labels: list[str] = []
        self._sizes: list[int] = []  # zero where it is no array
        self._count = 0

    def add(self, label: str, size: int = 0) -> int:
        """Return the first new position."""
        self._starts.append(self._count)
        self._labels.append(label)
        self._sizes.append(size)
        self._count += max(size, 1)
        return self._starts[-1]

    def of(self, position: int) -> tuple[str, int, int]:
        """Return the name around a position, its first position and its size."""
        place = bisect_right(self._starts, position) - 1
        return self._labels[place], self._starts[place], self._sizes[place]

    def __getitem__(self, position: int) -> str:
        label, start, size = self.of(position)
        return f"{label}[{position - start}]" if size else label


class _Loop:
    """An unfinished C++ loop over elements of arrays."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.body: list[str] = []
        self.made: set[int] = set()  # arrays and variables that it writes, by their first position
        self.current: dict[tuple[int, int], str] = {}  # variables of elements that it has written, by first and stride


class _Access(NamedTuple):
    """An element read in a loop: its C++ text, the start of its array, and its first position and stride."""

    text: str
    start: int
    path: tuple[int, int] | None


def _like(x: Any) -> Any:
    """Return a tensor without memory in place of numbers, for the rules of torch's types."""
    return torch.empty(x.positions.shape, dtype=x.dtype, device="meta") if isinstance(x, Numbers) else x


def _known(args: Any) -> Any:
    """Return arguments with constant numbers as values; raise ``_NoNativeCode`` if a number is not constant."""
    if any(x.value is None for x in tree_leaves(args) if isinstance(x, Numbers)):
        raise _NoNativeCode
    return tree_map_only(Numbers, lambda x: x.value, args)


class Writer:
    """Writer of the C++ statements of one function."""

    def __init__(self, takes_data: bool = False) -> None:
        self.lines: list[str] = []
        self.data: list[Tensor] = []  # constants passed at each call instead of written, if ``takes_data``
        self._takes_data = takes_data
        self.functions: list[str] = []  # loops that are called, as C++
        self.space = 0  # bytes of arrays that are not on the stack
        self._names = _Names()
        self._loop: _Loop | None = None
        self._counter, self._on_stack = count(), 0
        self._literals: dict[tuple[str, torch.dtype], int] = {}
        self._rules: dict[Any, torch.fx.GraphModule] = {}  # operations on tensors of some shapes, decomposed

    def made(
        self, function: Callable[..., tuple[Tensor, ...]], examples: Sequence[Tensor], operands: Sequence[Numbers]
    ) -> list[Numbers] | None:
        """Write the results of a function of the operands; None if the function is large or has unknown operations."""
        try:
            with torch.no_grad():
                if not isinstance(function, torch.fx.GraphModule) or _changes_views(function):
                    function = _functional(function, examples)
                found = self._followed(function, operands)
                self._close()
                return found
        except (*UNTRACEABLE, _NoNativeCode, KeyError, AttributeError):
            return None  # for example an unknown dtype or form of arguments

    def _followed(self, graph: torch.fx.GraphModule, operands: Sequence[Numbers]) -> list[Numbers]:
        values: dict[Node, Any] = {}
        given = iter(operands)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._constant(getattr(graph, str(node.target)))
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                if _is_mutable(node.target):
                    found = self._called(_out_of_place(node.target), node, args, kwargs)
                    values[node] = values[cast(Node, node.args[0])] = found
                else:
                    values[node] = self._called(node.target, node, args, kwargs)
            else:
                return [values[result] for result in cast(Sequence[Node], node.args[0])]
        raise _NoNativeCode

    # -- numbers --------------------------------------------------------------------------------

    def operand(self, name: str, x: Tensor) -> Numbers:
        """Name the elements of a tensor."""
        found = [self._names.add(f"{name}_{element}") for element in range(x.numel())]
        return Numbers(torch.tensor(found, dtype=torch.int64).reshape(x.shape), x.dtype)

    def row(self, name: str, x: Tensor) -> Numbers:
        """Name an array with the elements of a tensor."""
        return Numbers(self._names.add(name, x.numel()) + torch.arange(x.numel()).reshape(x.shape), x.dtype)

    def stored(self, name: str, numbers: Numbers) -> list[str]:
        """Return the statements that write the elements of a tensor to an array."""
        self._close()
        positions = numbers.positions.reshape(-1)
        lines, begin = [], 0
        for run in positions.tensor_split((positions.diff() != 1).nonzero().squeeze(-1) + 1):
            access = self._access(run) if len(run) >= _ARRAY else None
            if access is not None:
                lines.append(f"for (int64_t i = 0; i < {len(run)}; ++i) {name}[{begin} + i] = {access.text};")
            else:
                lines += [f"{name}[{begin + k}] = {self._names[position]};" for k, position in enumerate(run.tolist())]
            begin += len(run)
        return lines

    def values(self, numbers: Numbers) -> list[str]:
        """Return the C++ expressions of the elements of a tensor."""
        self._close()
        return [self._names[position] for position in numbers.positions.reshape(-1).tolist()]

    def _constant(self, x: Tensor, is_data: bool = False) -> Numbers:
        if x.numel() > MAX_LINES:
            raise _NoNativeCode
        many = x.numel() > 1 and bool((x != x.reshape(-1)[0]).any())
        if (many or is_data) and self._takes_data and x.dtype.is_floating_point:
            start = self._names.add(f"d{len(self.data)}", x.numel())
            self.data.append(x.contiguous())
            return Numbers(start + torch.arange(x.numel()).reshape(x.shape), x.dtype, x)
        if many and x.numel() >= _ARRAY:
            texts = [self._text(value, x.dtype) for value in x.reshape(-1).tolist()]
            start = self._array(texts, x.dtype, "static const")
            return Numbers(start + torch.arange(x.numel()).reshape(x.shape), x.dtype, x)
        found = [self._literal(value, x.dtype) for value in x.reshape(-1).tolist()]
        return Numbers(torch.tensor(found, dtype=torch.int64).reshape(x.shape), x.dtype, x)

    def _array(self, texts: Sequence[str], dtype: torch.dtype, kept: str) -> int:
        """Declare an array with its elements; return the first position."""
        name = f"w{next(self._counter)}"
        self.lines.append(f"{kept} {NUMBER_TYPES[dtype]} {name}[] = {{{', '.join(texts)}}};")
        return self._names.add(name, len(texts))

    def _empty(self, size: int, dtype: torch.dtype) -> tuple[str, int]:
        """Declare an array; return its name and first position."""
        name = f"w{next(self._counter)}"
        self._declare(name, size, dtype)
        return name, self._names.add(name, size)

    def _declare(self, name: str, size: int, dtype: torch.dtype) -> None:
        """Declare an array on the stack, or in the caller's memory where the stack is full."""
        kind, self._on_stack = NUMBER_TYPES[dtype], self._on_stack + size
        if self._on_stack <= _ON_STACK:
            self.lines.append(f"{kind} {name}[{max(size, 1)}];")
        else:
            self.lines.append(f"{kind}* __restrict__ {name} = ({kind}*)(space + {self.space});")
            self.space += size * dtype.itemsize + -size * dtype.itemsize % 64

    @staticmethod
    def _text(value: float | bool, dtype: torch.dtype) -> str:
        if not dtype.is_floating_point:
            return str(value).lower() if dtype == torch.bool else f"INT64_C({int(value)})"
        text = repr(float(value)) if math.isfinite(value) else "NAN" if value != value else "INFINITY"
        return f"{'-' if value == -math.inf else ''}{text}"

    def _literal(self, value: float | bool, dtype: torch.dtype) -> int:
        text = self._text(value, dtype)
        key = text, dtype
        if key not in self._literals:
            self._literals[key] = self._names.add(f"({NUMBER_TYPES[dtype]})({text})")
        return self._literals[key]

    def _statement(self, expression: str, dtype: torch.dtype) -> int:
        if len(self.lines) >= MAX_LINES:
            raise _NoNativeCode
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {NUMBER_TYPES[dtype]} {name} = {expression};")
        return self._names.add(name)

    # -- loops over arrays ----------------------------------------------------------------------

    def _close(self) -> None:
        """Finish the open loop, so that its results can be read elsewhere."""
        if self._loop is not None:
            self.lines += [f"for (int64_t i = 0; i < {self._loop.length}; ++i) {{", *self._loop.body, "}"]
            self._loop = None
            if len(self.lines) >= MAX_LINES:
                raise _NoNativeCode

    def _access(self, positions: Tensor) -> _Access | None:
        """Return the access to one repeated number or to equally spaced elements of an array, else None."""
        first, last = int(positions[0]), int(positions[-1])
        stride = int(positions[1]) - first
        label, start, size = self._names.of(first)
        if bool((positions.diff() != stride).any()) or (stride and not (size and start <= last < start + size)):
            return None
        text = f"{label}[{first - start} + {stride} * i]" if stride else self._names[first]
        return _Access(text, start, (first, stride))

    def _looked_up(self, positions: Tensor, dtype: torch.dtype) -> _Access:
        """Return the access to numbers in any order by an index table; numbers of several arrays are first copied."""
        self._close()
        unique, places = positions.unique(return_inverse=True)
        label, start, size = self._names.of(int(unique[0]))
        if not start <= int(unique[-1]) < start + size:
            start = self._gathered(unique, dtype)
            positions, label = start + places, self._names.of(start)[0]
            found = self._access(positions)
            if found is not None:
                return found
        return _Access(f"{label}[{self._table(positions - start)}[i]]", start, None)

    def _table(self, places: Tensor) -> str:
        name = f"g{next(self._counter)}"
        self.lines.append(f"static const int32_t {name}[] = {{{', '.join(map(str, places.tolist()))}}};")
        return name

    def _gathered(self, positions: Tensor, dtype: torch.dtype) -> int:
        """Copy numbers of several arrays, in the order of their positions, into one; return its first position."""
        (name, first), done = self._empty(len(positions), dtype), 0
        while done < len(positions):
            label, start, size = self._names.of(int(positions[done]))
            near = positions[done:][positions[done:] < start + max(size, 1)]
            if len(near) >= _ARRAY:
                source = self._access(near) or _Access(f"{label}[{self._table(near - start)}[i]]", start, None)
                self.lines.append(f"for (int64_t i = 0; i < {len(near)}; ++i) {name}[{done} + i] = {source.text};")
            else:
                texts = enumerate((self._names[position] for position in near.tolist()), done)
                self.lines += [f"{name}[{place}] = {text};" for place, text in texts]
            done += len(near)
        return first

    def _each(self, length: int, accesses: Sequence[_Access]) -> tuple[_Loop, list[str]]:
        """Return the loop for a statement with these accesses, and their C++ texts in it."""
        loop = self._loop
        if loop is not None and (
            loop.length != length or any(a.start in loop.made and a.path not in loop.current for a in accesses)
        ):
            self._close()
        loop = self._loop = self._loop or _Loop(length)
        return loop, [loop.current.get(a.path, a.text) if a.path else a.text for a in accesses]

    def _vector(
        self, pattern: str, operands: Sequence[tuple[Tensor, torch.dtype, str]], shape: torch.Size, dtype: torch.dtype
    ) -> Numbers:
        """Write an elementwise operation as loops over all elements, or over the longest possible dimension."""
        size = shape.numel()
        given = [torch.broadcast_to(positions, shape) for positions, _, _ in operands]
        accesses, dim = None, None
        for dim in (None, *sorted(range(len(shape)), key=lambda d: -shape[d])):
            rows = [x.reshape(1, -1) if dim is None else x.movedim(dim, -1).reshape(-1, shape[dim]) for x in given]
            if not rows or rows[0].shape[1] < _ARRAY or len(rows[0]) > _MAX_LOOPS:
                continue
            found = [[self._access(row) for row in x] for x in rows]
            if all(access is not None for x in found for access in x):
                accesses = cast(list[list[_Access]], found)
                break
        if accesses is None:
            dim = None
            flat = [x.reshape(-1) for x in given]
            accesses = [
                [self._access(x) or self._looked_up(x, kind)] for x, (_, kind, _) in zip(flat, operands, strict=True)
            ]
        name, start = self._empty(size, dtype)
        made = start + torch.arange(size).reshape(shape)
        ends = made.reshape(1, -1) if dim is None else made.movedim(dim, -1).reshape(-1, shape[dim])
        for row, end in enumerate(ends):
            read = [x[row] for x in accesses]
            loop, texts = self._each(len(end), read)
            texts = [cast_ + text for text, (_, _, cast_) in zip(texts, operands, strict=True)]
            path, variable = (int(end[0]), int(end[1] - end[0])), f"e{next(self._counter)}"
            loop.body.append(f"const {NUMBER_TYPES[dtype]} {variable} = {pattern.format(*texts)};")
            loop.body.append(f"{name}[{path[0] - start} + {path[1]} * i] = {variable};")
            loop.current[path] = variable
            loop.made.add(start)
        return Numbers(made, dtype)

    def _reduced(self, operation: str, rows: Tensor, dtype: torch.dtype) -> list[int]:
        """Write a reduction, such as a sum, of each row of positions as a loop over its elements."""
        found = []
        for row in rows:
            access = self._access(row) or self._looked_up(row, dtype)
            name = f"s{next(self._counter)}"
            loop, (text,) = self._each(len(row), [access])
            # In double precision: terms are added one after the other, where torch adds them in pairs.
            self.lines.append(f"double {name} = {_NEUTRAL[operation]};")
            loop.body.append(f"{name} = {_EXPRESSIONS[operation].format(name, text)};")
            found.append(self._names.add(f"(({NUMBER_TYPES[dtype]}){name})"))
            loop.made.add(found[-1])
        return found

    def _close_before(self, numbers: Iterable[int]) -> None:
        """Finish the open loop if it writes one of the numbers."""
        if self._loop is not None and any(self._names.of(position)[1] in self._loop.made for position in numbers):
            self._close()

    # -- operations -----------------------------------------------------------------------------

    def _called(self, target: Any, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        name = _name(target)
        if not name:
            raise _NoNativeCode
        meta: Any = node.meta.get("tensor_meta")
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Numbers)]
        if torch.Tag.nondeterministic_seeded not in target.tags and all(x.value is not None for x in numbers):
            is_data = any(x.positions.numel() > 1 and x.dtype.is_floating_point for x in numbers)
            args, kwargs = _known((args, kwargs))
            return tree_map_only(Tensor, lambda x: self._constant(x, is_data), target(*args, **kwargs))
        if name in _MOVES:
            if len({x.dtype for x in numbers}) > 1 or kwargs.get("dtype") is not None:
                raise _NoNativeCode
            return self._moved(target, args, kwargs, numbers[0].dtype)
        if name in ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full"):
            fill = {"full_like": 1, "new_full": 2}.get(name)
            number = args[fill] if fill else float("ones" in name)
            return self._constant(torch.full(meta.shape, number, dtype=meta.dtype))
        if target.namespace == "bayeskit":
            return self._looped(target, args)
        if name in ("tril", "triu"):
            x, below = args[0], torch.ones_like(args[0].positions)
            return self._elementwise("where", (self._constant(target(below, *args[1:]) > 0), x, 0), meta.shape, x.dtype)
        if name in ("index", "index_select", "gather"):
            return self._at(target, args)
        if name in ("index_put", "scatter_add", "index_add") and not kwargs:
            return self._put(name, args)
        if name in _RUNNING:
            return self._running(_RUNNING[name], args[0], args[1], meta.dtype)
        if name == "linalg_cholesky_ex" and not kwargs.get("upper"):
            return self._cholesky(args[0])
        if name == "linalg_solve_triangular":
            return self._solved(*args, **kwargs)
        if name == "mean":
            total = self._folded("sum", args, {}, meta)
            return self._elementwise(
                "div", (total, args[0].positions.numel() / meta.shape.numel()), meta.shape, meta.dtype
            )
        if name in _FOLDS:
            return self._folded(name, args, kwargs, meta)
        if name in ("mm", "bmm", "mv", "dot", "addmm"):
            return self._product(name, args, kwargs, meta)
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamped(name, args, kwargs, meta)
        if name in _EXPRESSIONS:
            if set(kwargs) - _KEYWORDS.get(name, set()):
                raise _NoNativeCode
            if kwargs.get("alpha", 1) != 1:
                scaled = self._elementwise("mul", (args[1], kwargs["alpha"]), args[1].positions.shape, meta.dtype)
                args = args[0], scaled
            return self._elementwise(name, args, meta.shape, meta.dtype)
        return self._decomposed(target, args, kwargs)

    def _decomposed(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write an operation by torch's decomposition into simpler operations."""
        leaves, form = tree_flatten((args, kwargs))
        places = [place for place, x in enumerate(leaves) if isinstance(x, Numbers)]

        def simpler(*tensors: Tensor) -> tuple[Any, ...]:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, form)
            found = target(*args, **kwargs)
            return found if isinstance(found, tuple) else (found,)

        numbers = [leaves[place] for place in places]
        shapes = tuple((x.positions.shape, x.dtype) for x in numbers)
        others = tuple(str(x) for place, x in enumerate(leaves) if place not in places)
        key = target, str(form), shapes, others
        if key not in self._rules:
            examples = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
            self._rules[key] = _functional(simpler, examples)
        if any(node.target is target for node in self._rules[key].graph.nodes):
            raise _NoNativeCode
        found = self._followed(self._rules[key], numbers)
        return found if len(target._schema.returns) > 1 else found[0]

    def _moved(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        """Apply an operation that only moves elements to their positions."""
        args, kwargs = tree_map_only(Numbers, lambda x: x.positions, (args, kwargs))
        found = target(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: Numbers(x, dtype), found)

    def _elementwise(self, name: str, args: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Numbers:
        # Operands have the dtype of the result, but for comparisons, whose operands have one of their own.
        common, compared = dtype, args[name == "where" :]
        if dtype == torch.bool and len(compared) == 2:
            common = torch.result_type(*map(_like, compared))
        elif dtype == torch.bool and isinstance(compared[0], Numbers):
            common = compared[0].dtype
        if not dtype.is_floating_point and name in _OF_REAL_NUMBERS:
            raise _NoNativeCode
        if name == "pow" and args[1] in (2, 0.5, 1):
            x = args[0]
            if args[1] == 2:
                return self._elementwise("mul", (x, x), shape, dtype)
            return self._elementwise("sqrt", (x,), shape, dtype) if args[1] == 0.5 else x
        operands = []
        for place, x in enumerate(args):
            if isinstance(x, (bool, int, float)):
                x = self._constant(torch.tensor(x, dtype=common))
            if not isinstance(x, Numbers):
                raise _NoNativeCode
            wanted = x.dtype if name == "_to_copy" or (name == "where" and place == 0) else common
            operands.append((x.positions, x.dtype, "" if x.dtype == wanted else f"({NUMBER_TYPES[wanted]})"))
        pattern = f"({NUMBER_TYPES[dtype]}){_EXPRESSIONS[name]}"
        if shape.numel() >= _ARRAY:
            return self._vector(pattern, operands, shape, dtype)
        columns = []
        for positions, _, cast_ in operands:
            flat = torch.broadcast_to(positions, shape).reshape(-1).tolist()
            self._close_before(flat)
            columns.append([cast_ + self._names[position] for position in flat])
        made = [self._statement(pattern.format(*row), dtype) for row in zip(*columns, strict=True)]
        return Numbers(torch.tensor(made, dtype=torch.int64).reshape(shape), dtype)

    def _folded(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any) -> Numbers:
        x, dims = args[0], list(args[1]) if len(args) > 1 and isinstance(args[1], (list, tuple)) else None
        if len(args) > 1 and isinstance(args[1], int):
            dims = [args[1]]
        rank = x.positions.dim()
        dims = [d % rank for d in dims] if dims and rank else list(range(rank))
        kept = [d for d in range(rank) if d not in dims]
        flat = x.positions.permute(*kept, *dims).reshape(*(x.positions.shape[d] for d in kept), -1)
        folded = self._fold(_FOLDS[name], Numbers(flat, x.dtype), meta.dtype)
        if folded.dtype != meta.dtype:
            folded = self._elementwise("_to_copy", (folded,), folded.positions.shape, meta.dtype)
        return Numbers(folded.positions.reshape(meta.shape), meta.dtype)

    def _looped(self, target: Any, args: Sequence[Any]) -> Any:
        """Write a call of an operation that has C++ of its own, see :func:`batch_source`, with tensors as arrays."""
        named = dict(zip((argument.name for argument in target._schema.arguments), args, strict=True))
        source, given, times, batch = (named[word] for word in ("source", "tensors", "times", "batch"))
        if not source:
            raise _NoNativeCode
        results = target(*tree_map_only(Numbers, _like, args))  # without memory
        made = tree_leaves(results)
        number, found = len(self.lines), []
        name = f"loop{number}"
        self._close()
        self.functions.append(named_loop(name, source))
        for place, x in enumerate(given):
            array, positions = f"{NUMBER_TYPES[x.dtype]} a{number}_{place}", x.positions.reshape(-1)
            label, start, size = self._names.of(int(positions[0])) if len(positions) else ("", 0, 0)
            if size and bool((positions.diff() == 1).all()) and int(positions[-1]) < start + size:
                self.lines.append(
                    f"const {NUMBER_TYPES[x.dtype]}* a{number}_{place} = {label} + {int(positions[0]) - start};"
                )
            else:
                self.lines.append(f"const {array}[] = {{{', '.join(self.values(x)) or '0'}}};")
        for place, result in enumerate(made, len(given)):
            size = result.numel()
            array = f"a{number}_{place}"
            self._declare(array, size, result.dtype)
            self.lines.append(f"for (int64_t i = 0; i < {size}; ++i) {array}[i] = 0;")
            start = self._names.add(f"a{number}_{place}", max(size, 1))
            found.append(Numbers(start + torch.arange(size).reshape(result.shape), result.dtype))
        arrays = ", ".join(f"(void*)a{number}_{place}" for place in range(len(given) + len(made)))
        self.lines.append(f"void* a{number}[] = {{{arrays}}};")
        self.lines.append(f"if ({name}(a{number}, {times}, {max(batch, 1)}, space + {self.space})) return 1;")
        self.space += space_of_loop(source)
        return found if isinstance(results, list) else found[0]

    def _fold(self, operation: str, x: Numbers, dtype: torch.dtype) -> Numbers:
        """Reduce the last dimension by an operation."""
        *kept, length = x.positions.shape
        foldable = dtype.is_floating_point or dtype == torch.bool
        if length >= _ARRAY and foldable and (math.prod(kept) < _ARRAY or length > _MAX_TERMS):
            if x.dtype != dtype:
                x = self._elementwise("_to_copy", (x,), x.positions.shape, dtype)
            found = self._reduced(operation, x.positions.reshape(-1, length), dtype)
            return Numbers(torch.tensor(found, dtype=torch.int64).reshape(kept), dtype)
        parts = [Numbers(part, x.dtype) for part in x.positions.unbind(-1)]
        return reduce(lambda a, b: self._elementwise(operation, (a, b), a.positions.shape, dtype), parts)

    def _running(self, operation: str, x: Numbers, dim: int, dtype: torch.dtype) -> Numbers:
        parts = [Numbers(part, x.dtype) for part in x.positions.unbind(dim)]
        if x.dtype != dtype:
            raise _NoNativeCode
        if operation == "add" and dtype.is_floating_point and parts:  # torch begins with 0, and 0 + -0 is 0
            parts[0] = self._elementwise("add", (parts[0], 0), parts[0].positions.shape, dtype)
        for k in range(1, len(parts)):
            parts[k] = self._elementwise(operation, (parts[k - 1], parts[k]), parts[k].positions.shape, dtype)
        return Numbers(torch.stack([part.positions for part in parts], dim), dtype)

    def _at(self, target: Any, args: tuple[Any, ...]) -> Numbers:
        """Index by constant positions."""
        return Numbers(target(args[0].positions, *_known(args[1:])), args[0].dtype)

    def _put(self, name: str, args: tuple[Any, ...]) -> Numbers:
        """Write or add numbers at constant positions."""
        self._close()
        x = args[0]
        places = torch.arange(x.positions.numel()).reshape(x.positions.shape)
        if name == "index_put":
            values, adds = args[2], len(args) > 3 and args[3]
            places = torch.ops.aten.index(places, *_known(args[1:2]))
        else:
            values, adds = args[3], True
            dim, index = _known(args[1:3])
            places = places.index_select(dim, index) if name == "index_add" else places.gather(dim, index)
        if values.dtype != x.dtype:
            raise _NoNativeCode
        numbers = values.positions
        if name == "scatter_add":  # the source may be larger than the index
            numbers = numbers[tuple(slice(size) for size in places.shape)]
        new = x.positions.reshape(-1).tolist()
        given = numbers.expand_as(places).reshape(-1).tolist()
        for place, number in zip(places.reshape(-1).tolist(), given, strict=True):
            total = f"({self._names[new[place]]} + {self._names[number]})"
            new[place] = self._statement(total, x.dtype) if adds else number
        return Numbers(torch.tensor(new, dtype=torch.int64).reshape(x.positions.shape), x.dtype)

    def _less(self, number: int, terms: Iterable[tuple[int, int]]) -> str:
        """Return the C++ of a number minus a sum of products."""
        return " - ".join([self._names[number], *(f"{self._names[a]} * {self._names[b]}" for a, b in terms)])

    def _cholesky(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """Write lower Cholesky factors, column by column, and the number of the first pivot that is not positive."""
        self._close()
        n, zero = x.positions.shape[-1], self._literal(0.0, x.dtype)
        factors, failures = [], []
        for matrix in x.positions.reshape(-1, n, n).tolist():
            factor, pivots = [[zero] * n for _ in range(n)], []
            for j in range(n):
                rest = self._less(matrix[j][j], ((factor[j][k], factor[j][k]) for k in range(j)))
                pivots.append(self._statement(rest, x.dtype))
                factor[j][j] = self._statement(f"std::sqrt({self._names[pivots[j]]})", x.dtype)
                for i in range(j + 1, n):
                    rest = self._less(matrix[i][j], ((factor[i][k], factor[j][k]) for k in range(j)))
                    factor[i][j] = self._statement(f"({rest}) / {self._names[factor[j][j]]}", x.dtype)
            failed = "0"
            for j in reversed(range(n)):
                failed = f"({self._names[pivots[j]]} > 0 ? {failed} : {j + 1})"
            factors.append(factor)
            failures.append(self._statement(failed, torch.int32))
        shape = x.positions.shape
        return Numbers(torch.tensor(factors).reshape(shape), x.dtype), Numbers(
            torch.tensor(failures).reshape(shape[:-2]), torch.int32
        )

    def _solved(
        self, a: Numbers, b: Numbers, *, upper: bool, left: bool = True, unitriangular: bool = False
    ) -> Numbers:
        """Write the solution of ``a x = b``, or of ``x a = b``, for triangular ``a``."""
        self._close()
        matrices, sides = a.positions, b.positions
        if not left:
            matrices, sides, upper = matrices.mT, sides.mT, not upper
        if upper:  # the last row first
            matrices, sides = matrices.flip(-1, -2), sides.flip(-2)
        n, k = sides.shape[-2:]
        batch = torch.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
        pairs = zip(
            matrices.broadcast_to(*batch, n, n).reshape(-1, n, n).tolist(),
            sides.broadcast_to(*batch, n, k).reshape(-1, n, k).tolist(),
            strict=True,
        )
        found = []
        for matrix, side in pairs:
            rows: list[list[int]] = []
            for i in range(n):
                scale = "1" if unitriangular else self._names[matrix[i][i]]
                rests = [self._less(side[i][c], ((matrix[i][j], rows[j][c]) for j in range(i))) for c in range(k)]
                rows.append([self._statement(f"({rest}) / {scale}", b.dtype) for rest in rests])
            found.append(rows)
        x = torch.tensor(found, dtype=torch.int64).reshape(*batch, n, k)
        x = x.flip(-2) if upper else x
        return Numbers(x if left else x.mT, b.dtype)

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any) -> Numbers:
        if kwargs or args[-1].dtype != meta.dtype:
            raise _NoNativeCode
        a, b = args[-2].positions, args[-1].positions
        if name in ("mv", "dot"):
            b = b.unsqueeze(-1)
        a = a.unsqueeze(0) if name == "dot" else a
        shape = torch.broadcast_shapes(a.unsqueeze(-1).shape, b.unsqueeze(-3).shape)
        if shape.numel() > _MAX_PRODUCT:
            raise _NoNativeCode
        terms = self._elementwise(
            "mul", (Numbers(a.unsqueeze(-1), meta.dtype), Numbers(b.unsqueeze(-3), meta.dtype)), shape, meta.dtype
        )
        total = self._fold("add", Numbers(terms.positions.movedim(-2, -1), meta.dtype), meta.dtype)
        if name == "addmm":
            total = self._elementwise("add", (args[0], total), meta.shape, meta.dtype)
        return Numbers(total.positions.reshape(meta.shape), meta.dtype)

    def _clamped(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any) -> Any:
        limits = {"clamp_min": ["min"], "clamp_max": ["max"]}.get(name, ["min", "max"])
        given = dict(zip(limits, args[1:], strict=False)) | kwargs
        x = args[0]
        for limit, function in (("min", "maximum"), ("max", "minimum")):
            if given.get(limit) is not None:
                x = self._elementwise(function, (x, given[limit]), meta.shape, meta.dtype)
        return x
