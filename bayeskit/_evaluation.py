"""Trace a batched density with its gradient once, and compile it where it pays.

An :class:`Evaluator` is made for a fixed number of vectors. It splits them into
chunks whose intermediates stay near the cache, and calls one graph a chunk.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bayeskit._compiler import compile_with_inductor, settle
from bayeskit._cost import is_view
from bayeskit._operations import run_natively
from bayeskit._torch import one_thread
from bayeskit._tracing import fail_apart, traced
from bayeskit.errors import CompilationWarning

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A batched joint density: ``(n, d) -> log_prior (n,), log_likelihood (n,)``."""

CHUNK_BYTES = 48 * 2**20
CHUNK_OF_DATA = 8  # times the bytes of the data: beyond any cache, reading the data again costs more than intermediates
MAX_FOLDED_BYTES = 2**27
COMPILE_SECONDS, COMPILE_SECONDS_PER_NODE = 5.0, 0.02


class Evaluation(NamedTuple):
    """Log density and gradient of ``n`` vectors.

    Attributes
    ----------
    log_prior, log_likelihood, log_density : Tensor
        Shape ``(n,)``; ``log_density = log_prior + beta * log_likelihood``.
    gradient : Tensor
        Gradient of ``log_density``, shape ``(n, d)``.
    """

    log_prior: Tensor
    log_likelihood: Tensor
    log_density: Tensor
    gradient: Tensor


Evaluator = Callable[[Tensor, Tensor], Evaluation]


@dataclass(frozen=True)
class Cost:
    """What one vector costs, read off its traced graph.

    ``num_repeated`` operations are made by loops in Python, beyond the nodes; ``data_bytes`` are read once a call,
    however many vectors.
    """

    num_nodes: int
    num_bytes: int
    num_repeated: int = 0
    data_bytes: int = field(default=0, compare=False)

    def chunk_size(self, num_vectors: int) -> int:
        """Return how many vectors keep their intermediates within the budget, in equal powers of two."""
        budget = max(CHUNK_BYTES, CHUNK_OF_DATA * self.data_bytes)
        fitting = max(1, budget // max(self.num_bytes, 1))
        if fitting >= num_vectors:
            return num_vectors
        return 1 << (fitting.bit_length() - 1)  # whole vector registers, no ragged tail in compiled loops

    def seconds(self, chunk: int) -> float:
        """Estimate a call of the traced graph: a microsecond a node, 2.5 one of a loop's, and 5 GB/s of traffic."""
        return 1e-6 * self.num_nodes + 2.5e-6 * self.num_repeated + 2e-10 * self.num_bytes * chunk

    @property
    def compile_seconds(self) -> float:
        """Estimate what compiling the graph takes, some of it to find out what the machine can do."""
        return COMPILE_SECONDS + COMPILE_SECONDS_PER_NODE * self.num_nodes


def tempered(log_prior: Tensor, log_likelihood: Tensor, beta: Tensor) -> Tensor:
    """Return ``log_prior + beta * log_likelihood``; ``beta = 0`` gives the prior even where the likelihood is 0."""
    return torch.where(beta == 0, log_prior, log_prior + beta * log_likelihood)


def with_gradient(joint: Joint) -> Evaluator:
    """Return the eager evaluation of ``joint`` and its gradient by automatic differentiation."""
    import torch._dynamo  # noqa: F401  torch.func imports it at its first gradient, which may be inside a mode of ours

    def total(u: Tensor, beta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        log_prior, log_likelihood = joint(u)
        log_density = tempered(log_prior, log_likelihood, beta)
        return log_density.sum(), (log_prior, log_likelihood, log_density)

    def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
        gradient, (log_prior, log_likelihood, log_density) = torch.func.grad(total, has_aux=True)(u, beta)
        return Evaluation(log_prior, log_likelihood, log_density, gradient)

    return evaluate


def with_gradient_loop(joint: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Evaluator:
    """Return the evaluation, vector by vector, of a density that takes one vector ``(d,)`` and cannot be batched."""

    def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
        rows = []
        for vector, b in zip(u.detach(), beta, strict=True):
            with torch.enable_grad():
                leaf = vector.clone().requires_grad_(True)
                log_prior, log_likelihood = joint(leaf)
                log_density = tempered(log_prior, log_likelihood, b)
                (gradient,) = torch.autograd.grad(log_density, leaf)
            rows.append((log_prior.detach(), log_likelihood.detach(), log_density.detach(), gradient))
        return Evaluation(*(torch.stack(column) for column in zip(*rows, strict=True)))

    return evaluate


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
    """Replace boolean masks that are constants of the model by positions, whose number the compiler can see."""
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


def fold_constants(graph: GraphModule) -> None:
    """Compute once what a graph makes of its constants alone, such as ``2 * y - 1`` of the data ``y``.

    What a later operation may change in place is left as it is.
    """
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
        if not isinstance(value, Tensor) or not value.is_contiguous() or size > MAX_FOLDED_BYTES:
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


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _is_foldable(node: Node) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not random and not _is_mutable(node)


def trace(joint: Joint, num_vectors: int, dim: int, dtype: torch.dtype, device: torch.device) -> GraphModule:
    """Trace value and gradient of ``joint`` for ``num_vectors`` vectors."""
    u = torch.zeros(num_vectors, dim, dtype=dtype, device=device)
    return trace_call(with_gradient(joint), u, torch.ones_like(u[:, 0]))


def trace_call(evaluate: Callable[[Tensor, Tensor], Evaluation], *arguments: Tensor) -> GraphModule:
    """Trace one call of a function that gives values and gradients."""
    settle()
    with one_thread():
        graph = traced(evaluate, *arguments)
    fail_apart(graph)
    _fold_masks(graph)
    graph.graph.eliminate_dead_code()
    _pin_dtypes(graph)
    graph.recompile()
    return graph


def cost(graph: GraphModule) -> Cost:
    """Count the nodes of a graph traced for one vector and the bytes that they write."""
    num_bytes = num_nodes = 0
    given: set[Node] = set()  # and its views, which nothing is written for
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or (schema and is_view(node.target) and given.issuperset(node.all_input_nodes)):
            given.add(node)
        if node.op != "call_function":
            continue
        num_nodes += 1
        meta = node.meta.get("tensor_meta")
        if hasattr(meta, "shape") and node not in given:
            num_bytes += meta.shape.numel() * meta.dtype.itemsize
    return Cost(num_nodes, num_bytes)


def has_compiler() -> bool:
    """Tell whether a C++ compiler, which ``torch.compile`` needs on a CPU, is on the path."""
    return _is_on_path(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@lru_cache
def _is_on_path(named: str, path: str) -> bool:
    return any(name and shutil.which(name, path=path) for name in (named, "g++", "clang++", "c++"))


def compile_graph(graph: GraphModule, u: Tensor, beta: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Compile ``graph``; where that fails or takes minutes, warn once and return the graph itself.

    Inductor is called on the graph directly: shapes, strides and dtype are fixed
    here, and the guards that ``torch.compile`` would check on every call cost more
    than a small density itself.

    Only Ctrl-C, or the end of a run's time budget, ends it without a result.
    """
    if u.device.type == "cpu" and not has_compiler():
        warnings.warn(
            "no C++ compiler was found, so the density runs as a traced graph, a few times slower; "
            "install g++ or clang++ to have it compiled",
            CompilationWarning,
            stacklevel=3,
        )
        return graph
    run_natively(graph)
    try:
        return compile_with_inductor(graph, (u.clone(), beta.clone()), {"size_asserts": False})
    except (RuntimeError, OSError, NotImplementedError, AttributeError, AssertionError) as error:
        warnings.warn(
            f"the density could not be compiled ({type(error).__name__}: {str(error)[:200]}); "
            "the traced graph is used instead, a few times slower",
            CompilationWarning,
            stacklevel=3,
        )
        return graph


def in_chunks(call: Callable[..., tuple[Tensor, ...]], num_vectors: int, chunk: int) -> Evaluator:
    """Return an evaluator that calls ``call`` on contiguous chunks, the last one padded to full size."""
    if chunk >= num_vectors:

        def once(u: Tensor, beta: Tensor) -> Evaluation:
            with torch.no_grad():  # the gradient is in the graph; a module's parameters need not record another
                return Evaluation(*call(u.contiguous(), beta.contiguous()))

        return once
    starts = list(range(0, num_vectors, chunk))
    padding = starts[-1] + chunk - num_vectors

    def several(u: Tensor, beta: Tensor) -> Evaluation:
        u, beta = u.contiguous(), beta.contiguous()
        if padding:
            u = torch.cat([u, u[:1].expand(padding, -1)])
            beta = torch.cat([beta, beta[:1].expand(padding)])
        with torch.no_grad():
            parts = [call(u[s : s + chunk], beta[s : s + chunk]) for s in starts]
        columns = (torch.cat(column)[:num_vectors] for column in zip(*parts, strict=True))
        return Evaluation(*columns)

    return several
