"""Functions of tensors recorded as graphs of torch operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.proxy import base_types
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit._compiler.factorisations import CHECK
from bayeskit._compiler.torch_internals import (
    DispatchMode,
    extract_tensor_metadata,
    make_graph_module,
    prepare_tracing,
    safe,
    tree_map,
    use_lazy_graph_module,
)
from bayeskit._core.torch_internals import current_dispatch_modes, tree_leaves


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
        result = None if operation is CHECK else operation(*args, **(kwargs or {}))
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


def _tensors_in(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0
