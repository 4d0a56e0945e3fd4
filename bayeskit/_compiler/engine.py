"""The gradient engine of a density: traces each batch size once, compiles where planned work repays it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from bayeskit._compiler.compilation import TorchResults, compile_graph
from bayeskit._compiler.cost import Cost
from bayeskit._compiler.graph_passes import fold_constants, trace_call, trace_density
from bayeskit._compiler.interpreter import interpreted
from bayeskit._compiler.native_evaluator import NativeEvaluator, over_rows
from bayeskit._compiler.native_library import has_compiler
from bayeskit._compiler.native_source import RowSource, row_source
from bayeskit._core.evaluation import Evaluation, Evaluator, Joint, with_gradient, with_gradient_loop
from bayeskit._core.inputs import warn_user
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import one_thread
from bayeskit._core.untraceable import UNTRACEABLE, OfAnotherLibrary, first_line, raise_if_forked
from bayeskit.errors import CompilationWarning

Compile = bool | Literal["auto"]
#: Seconds to compile C++ over rows: the minimum, and for each node of small and of large densities.
ROW_SECONDS, _ROW_SECONDS_PER_NODE, _ROW_SECONDS_OF_MANY = 0.3, 4e-4, 1e-4
_SMALL_ROW_SECONDS = 1.5
#: Bytes written by the nodes of a row, in total and per node, beyond which inductor's vector instructions are faster.
_MAX_ROW_BYTES, _MAX_BYTES_PER_NODE = 5 * 2**17, 2**11
#: Number of nodes beyond which building torch's interpreter takes longer than running the graph in Python until it is
#: compiled, and the factor by which Python is slower.
_MANY_NODES, _SLOWER_IN_PYTHON = 4000, 10.0
#: Index of the argument (0: vectors, 1: inverse temperatures) that has the shape of each result.
RESULTS = (1, 1, 1, 0)


@runtime_checkable
class Evaluators(Protocol):
    """The source of a Target's gradients: an engine, a wrapper of another target's engine, or the density itself."""

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator for ``num_vectors`` rows."""
        ...

    def compiled(self, num_vectors: int) -> Evaluator | None:
        """Return a compiled evaluator that serves ``num_vectors`` rows, or None where there is none."""
        ...

    @property
    def cost(self) -> Cost:
        """Nodes and bytes of the gradient graph of one vector."""
        ...


class Engine:
    """Evaluators of one batched density, traced or compiled, by number of vectors."""

    def __init__(
        self,
        joint: Joint | None,  # (n, d) -> (n,), (n,)
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        data_bytes: int = 0,  # that each call reads
        one_by_one: Joint | None = None,  # (d,) -> (), (), called in a loop
        evaluate: Evaluator | None = None,  # in place of the automatic derivative of `joint`
    ) -> None:
        self._data_bytes, self._one_by_one = data_bytes, one_by_one
        self._joint, self._evaluate = joint, evaluate
        self._dim, self._dtype, self._device = dim, dtype, device
        self._eager: Evaluator | None = None
        self._cost: Cost | None = None
        self._rows: RowSource | None = None
        self._rows_are_known = False
        self._calls: dict[tuple[int, bool], Callable[..., tuple[Tensor, ...]]] = {}  # by size of chunk
        self._evaluators: dict[tuple[int, bool], Evaluator] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Drop graphs and compiled code, which cannot be pickled; they are made again on demand."""
        return {**self.__dict__, "_eager": None, "_calls": {}, "_evaluators": {}}

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator for ``num_vectors`` rows, compiled if ``compile`` or the plan says so."""
        if self._one_by_one is not None:
            return with_gradient_loop(self._one_by_one)
        with process_state():  # threads may share a target
            key = (num_vectors, self._pays(num_vectors, num_calls) if compile == "auto" else compile)
            found = self._evaluators.get(key)
            if found is None:
                found = self._evaluators[key] = self._make(*key)
            return found

    def _pays(self, num_vectors: int, num_calls: int) -> bool:
        """Tell whether ``num_calls`` calls of the traced graph take longer than to compile it."""
        # Estimated from the graph, not timed, so that a resumed run decides alike.
        chunk = self.cost.chunk_size(num_vectors)
        calls = num_calls * math.ceil(num_vectors / chunk)
        seconds = calls * self.cost.seconds(chunk)
        if self._stays_in_python():
            seconds *= _SLOWER_IN_PYTHON
        return seconds > self.cost.compile_seconds or (seconds > self._row_seconds() and bool(self._row_source()))

    def _row_seconds(self) -> float:
        """Estimate the seconds of compiling C++ over rows."""
        count = self.cost.num_nodes
        small = min(ROW_SECONDS + _ROW_SECONDS_PER_NODE * count, _SMALL_ROW_SECONDS)
        return max(small, _ROW_SECONDS_OF_MANY * count)

    def _stays_in_python(self) -> bool:
        return self.cost.num_nodes > _MANY_NODES and bool(self._row_source())

    def _row_source(self) -> RowSource | None:
        """Return the density of a row as C++; None if it is large or has unknown operations, or without a compiler."""
        most = max(_MAX_ROW_BYTES, _MAX_BYTES_PER_NODE * self.cost.num_nodes)
        if self._device.type != "cpu" or self.cost.num_bytes > most or not has_compiler():
            return None
        if not self._rows_are_known:
            u = torch.zeros(1, self._dim, dtype=self._dtype)
            with suppress(*UNTRACEABLE):
                self._rows = row_source(self._trace(1), (u, torch.ones_like(u[:, 0])), RESULTS)
            self._rows_are_known = True
        return self._rows

    def compiled(self, num_vectors: int) -> Evaluator | None:
        """Return an evaluator over a graph compiled already for at most ``num_vectors`` rows, or None."""
        chunk = max((size for size, done in list(self._calls) if done and size <= num_vectors), default=None)
        # Each call would read more data than it writes, unlike a single call for all rows.
        if chunk is not None and chunk < num_vectors and chunk * self.cost.num_bytes < self._data_bytes:
            chunk = None
        return None if chunk is None else self._evaluator(self._calls[chunk, True], num_vectors, chunk)

    @property
    def cost(self) -> Cost:
        """Nodes and bytes of the gradient graph of one vector, counted without tracing it."""
        if self._cost is None:
            u = torch.zeros(1, self._dim, dtype=self._dtype, device=self._device)
            try:
                with process_state(), one_thread():
                    self._cost = Cost.of_call(self._eagerly, u, torch.ones_like(u[:, 0]), data_bytes=self._data_bytes)
            except UNTRACEABLE as error:
                self._give_up(error)
                self._cost = Cost(0, 2**20)
        return self._cost

    def _make(self, num_vectors: int, compile: bool) -> Evaluator:
        chunk = self.cost.chunk_size(num_vectors)
        if self._eager is not None:
            return self._eager
        key = (chunk, compile)
        if key not in self._calls:
            try:
                graph = self._trace(chunk)
            except UNTRACEABLE as error:
                return self._give_up(error)
            probe = torch.zeros(chunk, self._dim, dtype=self._dtype, device=self._device)
            beta = torch.ones_like(probe[:, 0])
            make = self._compiled if compile else interpreted
            call = graph if self._stays_in_python() and not compile else make(graph, probe, beta)
            self._calls[key] = call  # not before: Ctrl-C may have ended the compilation
        return self._evaluator(self._calls[key], num_vectors, chunk)

    @staticmethod
    def _evaluator(call: Callable[..., tuple[Tensor, ...]], num_vectors: int, chunk: int) -> Evaluator:
        return call if isinstance(call, NativeEvaluator) else _in_chunks(call, num_vectors, chunk)

    def _compiled(self, graph: torch.fx.GraphModule, u: Tensor, beta: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        """Compile C++ over rows if the density is small and the C++ reproduces the graph's results, else the graph."""
        source = self._row_source()
        if not source:
            return compile_graph(graph, u, beta)
        call = over_rows(source, self._dim, u.dtype)
        if call is None:  # a warning was given, and inductor would call the same compiler
            return interpreted(graph, u, beta)
        if TorchResults(graph, (u, beta)).is_met_by(call, "is compiled by torch, which takes longer"):
            return call
        return compile_graph(graph, u, beta)

    @property
    def _eagerly(self) -> Evaluator:
        return self._evaluate or with_gradient(cast(Joint, self._joint))

    def _trace(self, num_vectors: int) -> torch.fx.GraphModule:
        graph = trace_density(self._eagerly, num_vectors, self._dim, self._dtype, self._device)
        fold_constants(graph)
        return graph

    def _give_up(self, error: Exception) -> Evaluator:
        raise_if_forked(error)
        if self._eager is None:
            self._eager = torch.no_grad()(self._eagerly)
            if not isinstance(error, OfAnotherLibrary):
                warn_user(
                    f"the density cannot be traced ({first_line(error)}) and runs eagerly, which is slower",
                    CompilationWarning,
                )
        return self._eager


def _in_chunks(call: Callable[..., tuple[Tensor, ...]], num_vectors: int, chunk: int) -> Evaluator:
    """Return an evaluator that calls ``call`` on contiguous chunks, the last one padded to full size.

    With more than one chunk it takes any number of rows.
    """
    if chunk >= num_vectors:

        def once(u: Tensor, beta: Tensor) -> Evaluation:
            with torch.no_grad():  # the gradient is in the graph; a module's parameters need not record another
                return Evaluation(*call(u.contiguous(), beta.contiguous()))

        return once

    def several(u: Tensor, beta: Tensor) -> Evaluation:
        number = len(u)
        if padding := -number % chunk:
            u = torch.cat([u, u[:1].expand(padding, -1)])
            beta = torch.cat([beta, beta[:1].expand(padding)])
        with torch.no_grad():
            pairs = zip(u.contiguous().split(chunk), beta.contiguous().split(chunk), strict=True)
            parts = [call(*pair) for pair in pairs]
        columns = (torch.cat(column)[:number] for column in zip(*parts, strict=True))
        return Evaluation(*columns)

    return several


def compile_evaluation(
    evaluate: Callable[..., Evaluation], examples: Sequence[Tensor], num_calls: int, compile: Compile
) -> Callable[..., Evaluation]:
    """Return ``evaluate`` traced for tensors like ``examples``, and compiled if ``num_calls`` calls repay it."""
    try:
        graph = trace_call(evaluate, *examples)
    except UNTRACEABLE as error:
        warn_user(f"the density cannot be traced ({first_line(error)}) and runs eagerly, slower", CompilationWarning)
        return torch.no_grad()(evaluate)
    call: Callable[..., tuple[Tensor, ...]] = graph
    # The estimate depends on the graph, not on a clock, so a resumed run decides alike.
    cost = Cost.of_graph(graph)
    if compile is True or (compile == "auto" and num_calls * cost.seconds(1) > cost.compile_seconds):
        call = compile_graph(graph, *examples)

    def evaluation(*inputs: Tensor) -> Evaluation:
        with torch.no_grad():  # the gradient is in the graph
            return Evaluation(*call(*(x.contiguous() for x in inputs)))

    return evaluation
