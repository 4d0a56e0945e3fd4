"""The cost of a density: its operations, and the bytes that they write, counted in one run or on a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit._compiler.loop_operations import num_operations
from bayeskit._compiler.torch_internals import DispatchMode, safe
from bayeskit._core.torch_internals import tree_leaves

CHUNK_BYTES = 48 * 2**20
_CHUNK_OF_DATA = 8  # times the bytes of the data, beyond any cache: reading them again costs more than intermediates
COMPILE_SECONDS, COMPILE_SECONDS_PER_NODE = 5.0, 0.02


@dataclass(frozen=True)
class Cost:
    """Cost of one vector, counted on its traced graph.

    ``num_repeated`` counts the operations of loops in Python, in addition to the nodes; ``data_bytes`` are read once
    a call, for any number of vectors.
    """

    num_nodes: int
    num_bytes: int
    num_repeated: int = 0
    data_bytes: int = field(default=0, compare=False)

    @classmethod
    def of_call(cls, function: Callable[..., Iterable[Tensor]], *arguments: Tensor, data_bytes: int = 0) -> Cost:
        """Count what one call computes behind its results, in a tenth of the time of tracing."""
        # Counted as in a traced graph without dead code, to a few operations; views of earlier tensors write nothing,
        # and what is made of constants alone is written once, not for each vector.
        with _Recorder(arguments) as recorder:
            num_nodes, num_bytes, num_repeated = recorder.behind(function(*arguments))
        return cls(num_nodes, num_bytes, num_repeated, data_bytes)

    @classmethod
    def of_graph(cls, graph: GraphModule) -> Cost:
        """Count the nodes of a graph traced for one vector and the bytes that they write for it."""
        num_bytes = num_nodes = 0
        given: set[Node] = set()  # inputs and their views, for which nothing is written
        unknown: set[Node] = set()  # what depends on the vector or on chance
        for node in graph.graph.nodes:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op == "placeholder" or random or not unknown.isdisjoint(node.all_input_nodes):
                unknown.add(node)
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or (
                schema and is_view(node.target) and given.issuperset(node.all_input_nodes)
            ):
                given.add(node)
            if node.op != "call_function":
                continue
            num_nodes += 1
            meta = node.meta.get("tensor_meta")
            if hasattr(meta, "shape") and node not in given and node in unknown:
                num_bytes += meta.shape.numel() * meta.dtype.itemsize
        return cls(num_nodes, num_bytes)

    @property
    def num_at_once(self) -> int:
        """Number of vectors whose intermediates stay within the budget of a chunk, at least one."""
        return max(1, max(CHUNK_BYTES, _CHUNK_OF_DATA * self.data_bytes) // max(self.num_bytes, 1))

    def chunk_size(self, num_vectors: int) -> int:
        """Return ``num_vectors`` or, if their intermediates exceed the budget, the largest power of two within it."""
        if self.num_at_once >= num_vectors:
            return num_vectors
        return 1 << (self.num_at_once.bit_length() - 1)  # whole vector registers, no ragged tail in compiled loops

    def seconds(self, chunk: int) -> float:
        """Estimate the seconds of a call: 1 us a node, 2.5 us an operation of a loop, 5 GB/s of memory traffic."""
        return 1e-6 * self.num_nodes + 2.5e-6 * self.num_repeated + 2e-10 * self.num_bytes * chunk

    @property
    def compile_seconds(self) -> float:
        """Estimate the seconds of compiling the graph, probing of the machine included."""
        return COMPILE_SECONDS + COMPILE_SECONDS_PER_NODE * self.num_nodes


def is_view(operation: Any) -> bool:
    """Tell whether an operation returns a view of its input and changes nothing in place."""
    returns, lifted = operation._schema.returns, operation is torch.ops.aten.lift_fresh.default  # which tracing copies
    return bool(returns) and returns[0].alias_info is not None and not operation._schema.is_mutable and not lifted


class _Recorder(DispatchMode):
    """Recorder of the inputs and the written bytes of each operation, below gradients and batching."""

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self._unknown = WeakIdKeyDictionary({x: True for x in arguments})  # tensors that depend on them, or on chance
        self._sources: list[list[int]] = []
        self._bytes: list[int] = []
        self._repeated: list[int] = []
        self._views: set[int] = set()  # views of tensors that existed before
        self._kept: list[int] = []  # operations that graphs keep although no result depends on them
        self._made_by = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operation = safe(operation)
        result = operation(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        sources = self._makers(leaves)
        random = torch.Tag.nondeterministic_seeded in operation.tags
        if random or any(isinstance(x, Tensor) and x in self._unknown for x in leaves):
            self._unknown.update({x: True for x in tree_leaves(result) if isinstance(x, Tensor)})
        if isinstance(result, Tensor):
            number = self._note(sources, result)
            if is_view(operation) and self._views.issuperset(sources):
                self._views.add(number)
        else:
            number = self._note(sources)
            self._repeated[number] = num_operations(operation, args)
            for part in tree_leaves(result):
                if isinstance(part, Tensor):  # taking an element of a tuple counts as an operation
                    self._note([number], part)
        if operation._schema.is_mutable or random:
            self._kept.append(number)
        return result

    def behind(self, results: Iterable[Tensor]) -> tuple[int, int, int]:
        """Return the number of operations behind ``results``, the bytes they wrote, and the operations inside loops."""
        found, waiting = set[int](), self._makers(results) + self._kept
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._sources[number]
        num_bytes = sum(self._bytes[number] for number in found - self._views)
        return len(found), num_bytes, sum(self._repeated[number] for number in found)

    def _makers(self, values: Iterable[Any]) -> list[int]:
        return [self._made_by[x] for x in values if isinstance(x, Tensor) and x in self._made_by]

    def _note(self, sources: list[int], result: Tensor | None = None) -> int:
        number = len(self._sources)
        self._sources.append(sources)
        self._repeated.append(0)
        written = result is not None and result in self._unknown
        self._bytes.append(result.numel() * result.dtype.itemsize if written and result is not None else 0)
        if result is not None:
            self._made_by[result] = number
        return number
