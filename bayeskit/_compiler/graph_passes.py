"""Graphs of densities, made ready to be run again: constants folded, dtypes fixed, rows kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bayeskit._compiler.factorisations import fail_apart
from bayeskit._compiler.inductor import settle
from bayeskit._compiler.tracing import traced
from bayeskit._core.evaluation import Evaluation, Evaluator
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import one_thread


def trace_density(
    evaluate: Evaluator, num_vectors: int, dim: int, dtype: torch.dtype, device: torch.device
) -> GraphModule:
    """Trace an evaluation of ``num_vectors`` vectors."""
    u = torch.zeros(num_vectors, dim, dtype=dtype, device=device)
    return trace_call(evaluate, u, torch.ones_like(u[:, 0]))


def trace_call(evaluate: Callable[..., Evaluation], *arguments: Tensor) -> GraphModule:
    """Trace one call of a function that gives values and gradients."""
    with process_state():
        settle()
        with one_thread():
            graph = traced(evaluate, *arguments)
        fail_apart(graph)
        _fold_masks(graph)
        _own_rows(graph)
        graph.graph.eliminate_dead_code()
        _pin_dtypes(graph)
        graph.recompile()
    return graph


def fold_constants(graph: GraphModule) -> None:
    """Replace operations on constants alone, such as ``2 * y - 1`` of the data ``y``, by their values."""
    # Tensors that a later operation may change in place.
    changed: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if node in changed or (node.op == "call_function" and _is_mutable(node)):
            changed.update(node.all_input_nodes)
            changed.add(node)
    values: dict[Node, Any] = {}
    with torch.no_grad(), one_thread():
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                values[node] = getattr(graph, str(node.target))
            elif _is_foldable(node) and node not in changed and all(i in values for i in node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    kept: set[Node] = set()  # still computed in each call
    for node in reversed(graph.graph.nodes):
        needed = any(user in kept or user not in values for user in node.users)
        if node.op == "get_attr" or not needed:
            continue
        value = values.get(node)
        size = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        if not isinstance(value, Tensor) or not value.is_contiguous() or size > _MAX_FOLDED_BYTES:
            kept.add(node)  # a view costs nothing
            continue
        name = f"_folded_{node.name}"
        graph.register_buffer(name, value)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
    graph.graph.eliminate_dead_code()
    graph.recompile()


_MAX_FOLDED_BYTES = 2**27


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _is_foldable(node: Node) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not random and not _is_mutable(node)


def _pin_dtypes(graph: GraphModule) -> None:
    """Fix the dtype of the constants a graph creates, or they would follow torch's default at each call."""
    for node in graph.graph.nodes:
        made = node.meta.get("tensor_meta")
        schema = getattr(node.target, "_schema", None)
        if made is None or schema is None or node.all_input_nodes or not hasattr(made, "dtype"):
            continue
        if any(argument.name == "dtype" for argument in schema.arguments) and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": made.dtype}


def _fold_masks(graph: GraphModule) -> None:
    """Replace boolean masks that are constants of the model by index tensors, whose sizes the compiler knows."""
    aten = torch.ops.aten

    def is_constant(node: Node) -> bool:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        known = node.op == "get_attr" or (node.op == "call_function" and not random)
        return known and all(is_constant(i) for i in node.all_input_nodes)

    def value(node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(graph, str(node.target))
        args, kwargs = map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    for node in [
        *graph.graph.find_nodes(op="call_function", target=aten.index.Tensor),
        *graph.graph.find_nodes(op="call_function", target=aten.index_put.default),
    ]:
        indices: list[Any] = []
        for index in node.args[1]:
            meta = None if index is None else index.meta.get("tensor_meta")
            if getattr(meta, "dtype", None) != torch.bool or not is_constant(index):
                indices.append(index)
                continue
            for axis, positions in enumerate(value(index).nonzero(as_tuple=True)):
                name = f"_positions_{node.name}_{index.name}_{axis}"
                graph.register_buffer(name, positions)
                with graph.graph.inserting_before(node):
                    indices.append(graph.graph.get_attr(name))
        node.args = (node.args[0], indices, *node.args[2:])


#: Operations that return a tensor into which something is put.
_PUTTING = {
    getattr(torch.ops.aten, name)
    for name in "index_put index_add index_copy index_fill masked_fill masked_scatter scatter scatter_add "
    "scatter_reduce select_scatter slice_scatter diagonal_scatter put index_reduce as_strided_scatter".split()
}


def _own_rows(graph: GraphModule) -> None:
    """Copy tensors whose rows share memory before something is put into them.

    Inductor keeps their strides, so that all rows of a batch would get what is put into the last one.
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "overloadpacket", None) not in _PUTTING:
            continue
        (into, *others), meta = node.args, node.args[0].meta.get("tensor_meta")
        stride = getattr(meta, "stride", ())
        if any(step == 0 and size > 1 for step, size in zip(stride, getattr(meta, "shape", ()), strict=True)):
            whole: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with graph.graph.inserting_before(node):
                copy = graph.graph.call_function(aten.clone.default, (into,), whole)
            copy.meta["tensor_meta"] = meta._replace(stride=torch.empty(meta.shape, device="meta").stride())
            node.args = (copy, *others)
