"""Write down what a function does as a graph of operations; what that may raise, and how a warning quotes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.fx.proxy import base_types
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

UNTRACEABLE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of a density that branches on values, or calls what cannot be batched or traced."""


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def traced(function: Callable[..., Iterable[Tensor]], *arguments: Tensor) -> GraphModule:
    """Return the graph of the operations that make the results of a function, below gradients and batching.

    It is that of :func:`torch.fx.experimental.proxy_tensor.make_fx`, at a fifth of the cost: nothing is done but to
    note each operation when it runs.

    Parameters
    ----------
    function : callable
        ``(*arguments) -> tensors``
    *arguments : Tensor
        Their shapes, and what else is no tensor, are fixed from now on.

    Raises
    ------
    RuntimeError
        If the function asks for the value of a tensor that depends on its arguments or on chance.
    NotImplementedError
        For what a graph cannot hold, such as a generator of random numbers.

    Examples
    --------
    >>> import torch
    >>> graph = traced(lambda u: (u.square().sum(),), torch.tensor([3.0, 4.0]))
    >>> graph(torch.tensor([1.0, 2.0]))
    (tensor(5.),)
    """
    with _Tracer(arguments) as tracer:
        results = tuple(function(*arguments))
    tracer.graph.output(tuple(tracer.node_of(result) for result in results))
    with _use_lazy_graph_module(True):  # it is written as Python when it is called, after all changes
        return _make_graph_module(tracer.root, tracer.graph)


def is_traced() -> bool:
    """Tell whether a graph is being made of operations, here or by torch."""
    return get_proxy_mode() is not None or any(isinstance(x, _Tracer) for x in _get_current_dispatch_mode_stack())


class _Tracer(TorchDispatchMode):
    """Notes each operation as a node of a graph; tensors that none of them made are buffers of its root."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.root, self.graph = torch.nn.Module(), Graph()
        self._nodes, self._constants = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._num_constants = 0
        self._unknown = WeakIdKeyDictionary()  # tensors that depend on the arguments or on chance
        self._changed: dict[int, Tensor] = {}  # what holds the memory that such values were written to
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
        if operation is torch.ops.aten.lift_fresh.default:  # what is done in place would change the graph's constant
            operation = torch.ops.aten.lift_fresh_copy.default
        node = self.graph.call_function(operation, *tree_map(self._argument, (args, dict(kwargs or {}))))
        result = operation(*args, **(kwargs or {}))
        unknown = unknown or torch.Tag.nondeterministic_seeded in operation.tags
        if unknown and operation._schema.is_mutable:
            self._changed |= {_memory(x): x for x in _tensors_in(result) or tensors}
        self._note(result, node, unknown)
        return result

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node that made a tensor, or stands for one that was there before."""
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
                node.meta["tensor_meta"] = _extract_tensor_metadata(result)
            self._nodes[result] = node
            if unknown:
                self._unknown[result] = True
        elif isinstance(result, (list, tuple)):
            for number, part in enumerate(result):
                self._note(part, self.graph.call_function(operator.getitem, (node, number)), unknown)


def safe(operation: Any) -> Any:
    """Return the operation, or one that does the same where a mode that watches it would crash the process.

    Forward derivatives start from zeros without memory, which cannot be multiplied by a number under a mode of Python.
    """
    return torch.ops.aten.zeros.default if operation is torch.ops.aten._efficientzerotensor.default else operation


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


def fail_apart(graph: GraphModule) -> None:
    """Let a matrix that cannot be factorised give NaN to its own vector instead of an error to all of them."""
    aten = torch.ops.aten
    for check in list(graph.graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)):
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


class FailingApart(TorchFunctionMode):
    """Do what :func:`fail_apart` does for Cholesky factors, outside of graphs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.linalg.cholesky:
            return func(*args, **(kwargs or {}))
        factor, info = torch.linalg.cholesky_ex(*args, **(kwargs or {}))
        return factor.masked_fill((info != 0)[..., None, None], torch.nan)
