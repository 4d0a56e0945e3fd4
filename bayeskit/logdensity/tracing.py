"""Functions recorded as graphs of torch operations that can be run again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.proxy import base_types
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit.core.torch_internals import (
    DispatchMode,
    OpOverload,
    TreeSpec,
    batching_level,
    current_dispatch_modes,
    extract_tensor_metadata,
    make_graph_module,
    prepare_tracing,
    script_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    unoptimised,
    use_lazy_graph_module,
)
from bayeskit.errors import ModelError

__all__ = [
    "FailingApart",
    "Program",
    "QUERIES",
    "Tape",
    "UNTRACEABLE",
    "UncheckedFactors",
    "changes_in_place",
    "fail_apart",
    "first_line",
    "interpreted",
    "is_traced",
    "name_of",
    "raise_if_forked",
    "safe",
    "traced",
]


# Record a function as a graph of operations; errors of tracing, and their text in warnings.

UNTRACEABLE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of a density that branches on values, or calls functions that cannot be batched or traced."""


def raise_if_forked(error: Exception) -> None:
    """Raise ModelError if an error is torch's refusal of gradients in a forked process."""
    if "fork-based multiprocessing" in str(error):
        raise ModelError(
            "a forked process cannot compute gradients after its parent has computed one, where torch is "
            "built for CUDA. Remedy: start processes by multiprocessing.get_context('spawn') or by joblib"
        ) from error


def first_line(error: Exception | str) -> str:
    """Return the beginning of an error's message, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def traced(function: Callable[..., Iterable[Tensor]], *arguments: Tensor) -> GraphModule:
    """Return the graph of the operations behind the results of ``function``, below gradients and batching.

    Raise ``RuntimeError`` if it reads the value of a tensor, ``NotImplementedError`` if no graph can hold an argument.
    """
    # The graph of make_fx at a fifth of the cost: each operation is only noted when it runs.
    prepare_tracing()
    with _Tracer(arguments) as tracer:
        results = tuple(function(*arguments))
    tracer.graph.output(tuple(tracer.node_of(result) for result in results))
    with use_lazy_graph_module(True):  # its Python code is generated at the first call, after all changes
        return make_graph_module(tracer.root, tracer.graph)


def is_traced() -> bool:
    """Tell whether operations are being traced, here or by torch."""
    return get_proxy_mode() is not None or any(isinstance(x, _Tracer) for x in current_dispatch_modes())


_CHECK = torch.ops.aten._linalg_check_errors.default


class _Tracer(DispatchMode):
    """Recorder of operations as nodes of a graph; tensors made elsewhere become buffers of its root."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.root, self.graph = torch.nn.Module(), Graph()
        self._nodes, self._constants = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._num_constants = 0
        self._unknown = WeakIdKeyDictionary()  # tensors that depend on the arguments or on random numbers
        self._changed: dict[int, Tensor] = {}  # tensors whose memory such values were written to
        for number, argument in enumerate(arguments):
            self._note(argument, self.graph.placeholder(f"argument_{number}"), True)

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operation = safe(operation)
        tensors = _tensors_in((args, kwargs))
        if not all(type(x) in (Tensor, torch.nn.Parameter) or x in self._nodes for x in tensors):
            return NotImplemented
        unknown = any(x in self._unknown or _memory(x) in self._changed for x in tensors)
        if torch.Tag.data_dependent_output in operation.tags:
            if unknown:
                raise RuntimeError(f"{operation} asks for the value of a tensor that is not known yet")
            return operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten.lift_fresh.default:  # an in-place operation would change the graph's constant
            operation = torch.ops.aten.lift_fresh_copy.default
        # A failed factorisation of the example is no error of the graph.
        result = None if operation is _CHECK else operation(*args, **(kwargs or {}))
        args, kwargs = self._explicit(operation, args, dict(kwargs or {}), result)
        node = self.graph.call_function(operation, *tree_map(self._argument, (args, kwargs)))
        unknown = unknown or torch.Tag.nondeterministic_seeded in operation.tags
        if unknown and operation._schema.is_mutable:
            self._changed |= {_memory(x): x for x in _tensors_in(result) or tensors}
        self._note(result, node, unknown)
        return result

    def _explicit(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments that give ``result`` whatever torch's default dtype is when the graph runs."""
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return args, kwargs
        tensors = _tensors_in((args, kwargs))
        if any(argument.name == "dtype" for argument in operation._schema.arguments):
            return args, kwargs if tensors else kwargs | {"dtype": result.dtype}
        if not tensors or any(x.is_floating_point() for x in tensors) or operation._schema.is_mutable:
            return args, kwargs
        # Functions of whole numbers have the default dtype.
        to = torch.ops.aten._to_copy.default
        args, kwargs = tree_map(
            lambda x: self.__torch_dispatch__(to, (), (x,), {"dtype": result.dtype}) if isinstance(x, Tensor) else x,
            (args, kwargs),
        )
        return args, kwargs

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; a tensor made elsewhere becomes a constant."""
        node: Node | None = self._nodes.get(tensor) or self._constants.get(tensor)
        if node is None:
            name = f"constant_{self._num_constants}"
            self._num_constants += 1
            self.root.register_buffer(name, tensor.detach())
            node = self._constants[tensor] = self.graph.get_attr(name)
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if value is None or isinstance(value, base_types):
            return value
        raise NotImplementedError(f"a graph cannot hold a {type(value).__name__}")

    def _note(self, result: Any, node: Node, unknown: bool) -> None:
        if isinstance(result, Tensor):
            if result.layout is torch.strided:
                node.meta["tensor_meta"] = extract_tensor_metadata(result, include_contiguity=False)
            self._nodes[result] = node
            if unknown:
                self._unknown[result] = True
        elif isinstance(result, (list, tuple)):
            for number, part in enumerate(result):
                self._note(part, self.graph.call_function(operator.getitem, (node, number)), unknown)


def safe(operation: Any) -> Any:
    """Return an equivalent operation that does not crash the process under a dispatch mode."""
    # Forward derivatives start from zeros without memory, which crash when multiplied by a number.
    return torch.ops.aten.zeros.default if operation is torch.ops.aten._efficientzerotensor.default else operation


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


def fail_apart(graph: GraphModule) -> None:
    """Make a failed matrix factorisation give NaN for its own vector instead of an error for the whole batch."""
    aten = torch.ops.aten
    for check in list(graph.graph.find_nodes(op="call_function", target=_CHECK)):
        info = check.args[0]
        for result in list(info.args[0].users):
            meta = result.meta.get("tensor_meta")
            if result is info or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
                continue
            with graph.graph.inserting_before(check):
                failed = graph.graph.call_function(aten.ne.Scalar, (info, 0))
                failed.meta["tensor_meta"] = info.meta["tensor_meta"]._replace(dtype=torch.bool)
                for _ in range(len(meta.shape) - len(info.meta["tensor_meta"].shape)):
                    failed = graph.graph.call_function(aten.unsqueeze.default, (failed, -1))
                masked = graph.graph.call_function(aten.masked_fill.Scalar, (result, failed, torch.nan))
            result.replace_all_uses_with(masked, delete_user_cb=lambda user, masked=masked: user is not masked)
        graph.graph.erase_node(check)


class UncheckedFactors(DispatchMode):
    """Let failed matrix factorisations pass, where a run is recorded and :func:`fail_apart` marks them later."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = safe(operation)
        return None if operation is _CHECK else operation(*args, **(kwargs or {}))


class FailingApart(TorchFunctionMode):
    """Do what :func:`fail_apart` does for Cholesky factors, outside of graphs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.linalg.cholesky:
            return func(*args, **(kwargs or {}))
        factor, info = torch.linalg.cholesky_ex(*args, **(kwargs or {}))
        return factor.masked_fill((info != 0)[..., None, None], torch.nan)


# Torch's own interpreter for traced graphs: the same operations in the same order, at a third of Python's cost.


def interpreted(graph: GraphModule, *examples: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Return ``graph`` in torch's interpreter, for the shapes of ``examples``, or as it is if results would differ."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    if any(example.device.type != "cpu" for example in examples):
        return graph  # comparing results would wait for the device
    if not all(isinstance(target, OpOverload) or target is operator.getitem for target in targets):
        return graph  # a loop would be unrolled
    try:
        with torch.no_grad():
            call = unoptimised(script_of("density", lambda *u: graph(*u), examples))
    except (RuntimeError, TypeError, AttributeError):
        return graph

    with torch.no_grad():
        pairs = zip(call(*examples), graph(*examples), strict=True)
        same = all(a.shape == b.shape and a.dtype == b.dtype and a.allclose(b, 0, 0, equal_nan=True) for a, b in pairs)
    return call if same else graph


# One run of a function as a list of calls of torch, which can be repeated with other tensors.

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
