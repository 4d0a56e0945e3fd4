"""A batched density with its gradient, traced once, and compiled where it pays."""

from __future__ import annotations

import copy
import ctypes
import math
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit.core.compiler_cache import compiler_cache
from bayeskit.core.inputs import warn_user
from bayeskit.core.libraries import FLAGS, compiler, load_library, raise_for_status
from bayeskit.core.process_state import process_state
from bayeskit.core.progress import look
from bayeskit.core.randomness import one_thread, validation_kept
from bayeskit.core.torch_internals import (
    DispatchMode,
    FakeTensorMode,
    TracingContext,
    gradient_and_rest,
    metrics_of_compilation,
    tracing,
    tree_leaves,
)
from bayeskit.errors import CompilationWarning
from bayeskit.logdensity.tracing import fail_apart, first_line, safe, traced

__all__ = [
    "CHUNK_BYTES",
    "COMPILE_SECONDS",
    "COMPILE_SECONDS_PER_NODE",
    "Compiled",
    "Cost",
    "Evaluation",
    "Evaluator",
    "Joint",
    "MAX_COMPILE_SECONDS",
    "SPACE",
    "TorchResults",
    "call_library",
    "compile_graph",
    "compile_with_inductor",
    "cost",
    "fold_constants",
    "function_of_text",
    "has_compiler",
    "in_chunks",
    "is_view",
    "library_of",
    "loop",
    "loop_gradient",
    "num_operations",
    "recorded",
    "run_natively",
    "settle",
    "space_of_loop",
    "tempered",
    "trace_call",
    "trace_density",
    "with_gradient",
    "with_gradient_loop",
]


# Inductor with a time limit, in a thread of its own, so that Ctrl-C and time budgets take effect during compilation.

MAX_COMPILE_SECONDS = 300.0
_UNPROBED = {"cpp.vec_isa_ok": True}
_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 0.5
_FAREWELLS = 10
_TELL_AGAIN_SECONDS = 2.0

Compiled = Callable[..., tuple[Tensor, ...]]


class _Compilation(threading.Thread):
    """One call of inductor in a thread; the caller has just switched off all warnings."""

    def __init__(self, graph: GraphModule, examples: Sequence[Tensor], options: dict[str, Any]) -> None:
        super().__init__(name="bayeskit-compilation", daemon=True)
        self._graph, self._examples, self._options = graph, examples, options
        self._begin, self._abandoned = time.monotonic(), False
        self._filters: Any = warnings.filters
        self._told = 0.0
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._compiled: Compiled | None = None
        #: Why the compiler's code is not kept where the user wants it.
        self.problem: str | None = None

    def run(self) -> None:
        device = self._examples[0].device
        # Gradient mode, device and number of threads belong to a thread; compiled code has the last built in.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                with one_thread(), torch.no_grad(), _remembered():
                    self._compiled = self._compile()
            except BaseException as error:  # raised again in the waiting thread
                self._error = error
            finally:
                self._over.set()

    def _compile(self) -> Compiled:
        """Compile the graph and call the result once."""
        import torch._inductor  # takes a second, as symbolic shapes do

        examples: list[Any] = list(self._examples)
        graph, compile = self._graph, torch._inductor.compile
        with compiler_cache() as cache, metrics_of_compilation():
            self.problem = cache.problem
            fixed = self._options | cache.options
            compiled: Compiled = _without_probes(
                lambda options: compile(copy.deepcopy(graph), examples, options=fixed | options)
            )
            compiled(*self._examples)
        return compiled

    def wait(self) -> None:
        """Wait for the end of the thread; Ctrl-C, a time budget or the time limit ends the wait."""
        while not self._over.wait(_POLL_SECONDS) and self.is_alive():
            if self._abandoned and time.monotonic() - self._told > _TELL_AGAIN_SECONDS:
                self._tell()
            look()
            if time.monotonic() - self._begin > MAX_COMPILE_SECONDS:
                raise TimeoutError(
                    f"the compiler did not finish in {MAX_COMPILE_SECONDS:g} s; a run resumed from a checkpoint of "
                    "compiled code will differ in the last digits"
                )

    def abandon(self) -> None:
        """End the thread, and wait until torch has restored the warning filters."""
        if self._over.is_set():
            return
        self._abandoned = True
        del self._filters[0]  # the filter that ignores everything: torch may restore this list after the wait
        for _ in range(_FAREWELLS):
            self._tell()
            if self._over.wait(_FAREWELL_SECONDS) or warnings.filters is self._filters:
                return

    def _tell(self) -> None:
        """Raise SystemExit in the thread, which takes effect once the thread is back in Python."""
        # In the callback of a weak reference the exception is lost, so callers repeat the call.
        self._told = time.monotonic()
        if self.ident is not None and self.is_alive():  # the id of an ended thread may be reused
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))

    def result(self) -> Compiled:
        """Wait for the compiled function and return it."""
        self.wait()
        if self._compiled is None:
            look()  # Ctrl-C at a terminal also ends the compiler, which is not a compilation failure
            raise self._error or RuntimeError("the compiler returned nothing")
        return self._compiled


class _FixedShapes(FakeTensorMode):
    """A fake-tensor mode with a shape environment, in which every size is static."""

    def from_tensor(self, tensor: Tensor, **how: Any) -> Any:
        return super().from_tensor(tensor, **(how | {"static_shapes": True, "symbolic_context": None}))


def _remembered() -> AbstractContextManager[object]:
    """Return a context in which inductor stores compiled code on disk and reuses code of other processes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor caches only where symbolic shapes are tracked, although all shapes are fixed here.
    account = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return tracing(TracingContext(_FixedShapes(shape_env=account)))


def _without_probes(compile: Callable[[dict[str, Any]], Any]) -> Any:
    """Call ``compile`` with options by which inductor trusts the vector instructions that torch reports."""
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    # To verify them inductor compiles several programs, which takes longer than to compile a small density; they are
    # verified only after a failure.
    check = VecISA.check_build
    VecISA.check_build = lambda *_: True  # type: ignore[method-assign]
    try:
        return compile(_UNPROBED)
    except RuntimeError as error:
        if "C++ compile error" not in str(error):
            raise
        valid_vec_isa_list.cache_clear()
    finally:
        VecISA.check_build = check  # type: ignore[method-assign]
    return compile({})


_latest: _Compilation | None = None


def settle() -> None:
    """Wait for an abandoned compilation, because torch traces one graph at a time."""
    if _latest is not None:
        with suppress(TimeoutError):
            _latest.wait()


def compile_with_inductor(graph: GraphModule, examples: Sequence[Tensor], options: dict[str, Any]) -> Compiled:
    """Compile ``graph`` for the shapes, strides and dtypes of ``examples``, and call it once.

    Raise ``TimeoutError`` after ``MAX_COMPILE_SECONDS``, and ``Stopped`` or ``KeyboardInterrupt`` if the run ends.
    """
    global _latest
    look()  # do not start a compilation that would be stopped at once
    with validation_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own deprecations are not the user's
        if _latest is not None:
            _latest.wait()  # raises TimeoutError if an abandoned compilation hangs
        compilation = _latest = _Compilation(graph, examples, options)
        try:
            compilation.start()
            compiled = compilation.result()
        except BaseException:
            compilation.abandon()
            raise
    _latest = None
    if compilation.problem is not None:
        warn_user(compilation.problem, CompilationWarning)
    return compiled


# Loops over time and their gradients as operations of torch, run in Python or as compiled C++.


@torch.library.custom_op(
    "bayeskit::loop",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt num_states, SymInt num_inputs, SymInt times, SymInt batch, str program, "
    "bool at_once, str source, bool native) -> Tensor[]",
)
def loop(
    tensors: Sequence[Tensor],
    num_states: int,
    num_inputs: int,
    times: int,
    batch: int,
    program: str,
    at_once: bool,
    source: str,
    native: bool,
) -> list[Tensor]:
    """Return the states after each step, times first, by the C++ ``source`` if ``native``, else by ``program``."""
    # ``tensors``: first states, inputs of all times (times first) and others; the batch, 0 if there is none, is their
    # first dimension, the second of inputs. ``program`` is one step, or all of them if ``at_once``.
    library = library_of(source) if native and source else None
    if library is not None:
        found = [state.new_empty(times, *state.shape) for state in tensors[:num_states]]
        call_library(library, tensors, found, times, batch)
        return found
    function = function_of_text(program)
    if at_once:
        return function(None, *tensors)
    in_turn = num_states + num_inputs
    now, found_at = list(tensors[:num_states]), []
    for t in range(times):
        now = function(None, *now, *(x[t] for x in tensors[num_states:in_turn]), *tensors[in_turn:])
        found_at.append(now)
    return [torch.stack(path) for path in zip(*found_at, strict=True)]


@torch.library.custom_op(
    "bayeskit::loop_gradient",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] wanted, SymInt times, SymInt batch, str program, str source, bool native) "
    "-> Tensor[]",
)
def loop_gradient(
    tensors: Sequence[Tensor], wanted: Sequence[int], times: int, batch: int, program: str, source: str, native: bool
) -> list[Tensor]:
    """Return the gradients of ``wanted`` tensors; ``tensors`` are operands of a loop, its states and cotangents."""
    library = library_of(source) if native and source else None
    if library is None:
        return function_of_text(program)(None, *tensors)
    found = [torch.zeros_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]
    call_library(library, tensors, found, times, batch)
    return found


@loop.register_fake
def _(tensors: Sequence[Tensor], num_states: int, num_inputs: int, times: int, *_: Any) -> list[Tensor]:
    return [state.new_empty(times, *state.shape) for state in tensors[:num_states]]


@loop_gradient.register_fake
def _(tensors: Sequence[Tensor], wanted: Sequence[int], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in wanted]


def call_library(library: Any, given: Sequence[Tensor], made: Sequence[Tensor], times: int, batch: int) -> None:
    """Call the function ``loop`` that :mod:`bayeskit.logdensity.native` has written."""
    given = [x.contiguous() for x in given]
    pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(x.data_ptr() for x in (*given, *made)))
    # Most code needs no space, and a tensor for none would cost a tenth of a small density.
    space = torch.empty(library.space, dtype=torch.uint8) if library.space else None
    address = None if space is None else ctypes.c_void_p(space.data_ptr())
    if status := library.loop(pointers, ctypes.c_int64(times), ctypes.c_int64(max(batch, 1)), address):
        raise_for_status(status, "the steps of a differential equation, which its gradient keeps")


@lru_cache(maxsize=128)
def function_of_text(program: str) -> Callable[..., list[Tensor]]:
    """Return the function whose code torch.fx has generated; its first argument, the module, is None."""
    names = {"torch": torch, "device": torch.device, "inf": torch.inf, "nan": torch.nan, "NoneType": type(None)}
    scope: dict[str, Any] = names
    exec(program, scope)  # code generated by torch.fx
    function: Callable[..., list[Tensor]] = scope["forward"]
    return function


#: How C++ begins to say what memory it takes from its caller.
SPACE = "constexpr int64_t space_of_loop"

#: Flags of generated code, which has the same digits with any vectors, as no products are fused with sums; of C++14,
#: whose <cmath> takes half of the time to read; whose whole numbers overflow as torch's do.
_CPP_FLAGS = (*FLAGS, "-std=c++14", "-DNDEBUG", "-ffp-contract=off", "-fwrapv")


def space_of_loop(source: str) -> int:
    """Return the bytes of memory that the C++ of a loop takes from its caller."""
    return int(source.partition(f"{SPACE} = ")[2].partition(";")[0] or 0)


@lru_cache(maxsize=128)
def library_of(source: str) -> Any:
    """Return the library of C++ source, compiled here or by another process; None if compilation fails."""
    look()  # Ctrl-C at a terminal also ends the compiler, which is not a compilation failure
    try:
        library: Any = load_library("density", {"density.cpp": source}, _CPP_FLAGS)
        library.space = space_of_loop(source)
        return library
    except (OSError, subprocess.SubprocessError) as error:
        look()
        reason = first_line(getattr(error, "stderr", None) or error)
        warn_user(
            f"the generated C++ could not be compiled ({reason}); the same operations run in torch, more slowly",
            CompilationWarning,
        )
        return None


def run_natively(graph: GraphModule, native: bool = True) -> None:
    """Let the loops of a graph run as compiled code, or in torch."""
    changed = False
    for operation in (torch.ops.bayeskit.loop.default, torch.ops.bayeskit.loop_gradient.default):
        for node in graph.graph.find_nodes(op="call_function", target=operation):
            node.args = (*node.args[:-1], native)
            changed = True
    if changed:
        graph.recompile()


def num_operations(operation: Any, arguments: Sequence[Any]) -> int:
    """Return the number of operations that a loop or its gradient runs in Python; zero for other operations."""
    if operation is torch.ops.bayeskit.loop.default:
        _, _, _, times, _, program, at_once, *_ = arguments
        return int(program.count("torch.ops.")) * (1 if at_once else times)
    if operation is torch.ops.bayeskit.loop_gradient.default:
        return int(arguments[4].count("torch.ops."))
    return 0


# Count the operations behind a result during one run, in a tenth of the time of tracing.


def recorded(function: Callable[..., Iterable[Tensor]], *arguments: Tensor) -> tuple[int, int, int]:
    """Return the number of operations behind the results, the bytes they write, and the operations inside loops."""
    # Counted as in a traced graph without dead code, to a few operations; views of earlier tensors write nothing, and
    # what is made of constants alone is written once, not for each vector.
    with _Recorder(arguments) as recorder:
        results = function(*arguments)
        return recorder.behind(results)


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


# Trace a batched density with its gradient once, and compile it where it pays.
#
# An :class:`Evaluator` is made for a fixed number of vectors. It splits them into chunks whose intermediates stay near
# the cache, and calls one graph a chunk.

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A batched joint density: ``(n, d) -> log_prior (n,), log_likelihood (n,)``."""

CHUNK_BYTES = 48 * 2**20
_CHUNK_OF_DATA = (
    8  # times the bytes of the data: beyond any cache, reading the data again costs more than intermediates
)
_MAX_FOLDED_BYTES = 2**27
#: Operations that return a tensor into which something is put.
_PUTTING = {
    getattr(torch.ops.aten, name)
    for name in "index_put index_add index_copy index_fill masked_fill masked_scatter scatter scatter_add "
    "scatter_reduce select_scatter slice_scatter diagonal_scatter put index_reduce as_strided_scatter".split()
}
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
    """Cost of one vector, counted on its traced graph.

    ``num_repeated`` counts the operations of loops in Python, in addition to the nodes; ``data_bytes`` are read once
    a call, for any number of vectors.
    """

    num_nodes: int
    num_bytes: int
    num_repeated: int = 0
    data_bytes: int = field(default=0, compare=False)

    def chunk_size(self, num_vectors: int) -> int:
        """Return ``num_vectors`` or, if its intermediates exceed the budget, the largest power of two within it."""
        budget = max(CHUNK_BYTES, _CHUNK_OF_DATA * self.data_bytes)
        fitting = max(1, budget // max(self.num_bytes, 1))
        if fitting >= num_vectors:
            return num_vectors
        return 1 << (fitting.bit_length() - 1)  # whole vector registers, no ragged tail in compiled loops

    def seconds(self, chunk: int) -> float:
        """Estimate the seconds of a call: 1 us a node, 2.5 us an operation of a loop, 5 GB/s of memory traffic."""
        return 1e-6 * self.num_nodes + 2.5e-6 * self.num_repeated + 2e-10 * self.num_bytes * chunk

    @property
    def compile_seconds(self) -> float:
        """Estimate the seconds of compiling the graph, probing of the machine included."""
        return COMPILE_SECONDS + COMPILE_SECONDS_PER_NODE * self.num_nodes


def tempered(log_prior: Tensor, log_likelihood: Tensor, beta: Tensor) -> Tensor:
    """Return ``log_prior + beta * log_likelihood``; ``beta = 0`` gives the prior even where the likelihood is 0."""
    return torch.where(beta == 0, log_prior, log_prior + beta * log_likelihood)


def with_gradient(joint: Joint) -> Evaluator:
    """Return the eager evaluation of ``joint`` and its gradient by automatic differentiation."""

    def total(u: Tensor, beta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        log_prior, log_likelihood = joint(u)
        log_density = tempered(log_prior, log_likelihood, beta)
        return log_density.sum(), (log_prior, log_likelihood, log_density)

    def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
        gradient, log_prior, log_likelihood, log_density = gradient_and_rest(total, u, beta)
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


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _is_foldable(node: Node) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not random and not _is_mutable(node)


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


def cost(graph: GraphModule) -> Cost:
    """Count the nodes of a graph traced for one vector and the bytes that they write for it."""
    num_bytes = num_nodes = 0
    given: set[Node] = set()  # inputs and their views, for which nothing is written
    unknown: set[Node] = set()  # what depends on the vector or on chance
    for node in graph.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "placeholder" or random or not unknown.isdisjoint(node.all_input_nodes):
            unknown.add(node)
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or (schema and is_view(node.target) and given.issuperset(node.all_input_nodes)):
            given.add(node)
        if node.op != "call_function":
            continue
        num_nodes += 1
        meta = node.meta.get("tensor_meta")
        if hasattr(meta, "shape") and node not in given and node in unknown:
            num_bytes += meta.shape.numel() * meta.dtype.itemsize
    return Cost(num_nodes, num_bytes)


def has_compiler() -> bool:
    """Tell whether a C++ compiler, which ``torch.compile`` needs on a CPU, is on the path."""
    return compiler() is not None


class TorchResults:
    """What a graph of torch gives at some points, against which its compiled code is compared at first use."""

    def __init__(self, graph: GraphModule, examples: Sequence[Tensor]) -> None:
        self._at = [
            torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
            if place == 0 and x.is_floating_point()
            else x.clone()  # such as inverse temperatures, or numbers of rows
            for place, x in enumerate(examples)
        ]
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        packets = (getattr(node.target, "overloadpacket", None) for node in nodes)
        self._operations = sorted({str(packet).removeprefix("aten.") for packet in packets if packet is not None})
        is_random = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in nodes)
        self._expected = [] if is_random else [self._results(graph, scale) for scale in _SCALES]

    def _results(self, call: Callable[..., Iterable[Tensor]], scale: float) -> list[Tensor]:
        """Return results at points within ``scale`` of zero; none where the density fails there."""
        try:
            with torch.no_grad(), one_thread():
                return [x.clone() for x in call(scale * self._at[0], *self._at[1:])]
        except Exception:  # of a function of the user, or of a matrix that is singular at this point
            return []

    def is_met_by(self, call: Callable[..., Iterable[Tensor]], remedy: str) -> bool:
        """Tell whether ``call`` gives the same beyond rounding; else warn that the density therefore ``remedy``."""
        # Both points, so that no rounding at a singular one counts.
        worst = min((self._worst(expected, scale, call) for expected, scale in self._pairs()), default=0.0)
        if worst and self._at[0].dtype == torch.float64:  # in single precision, rounding alone may differ by as much
            names = ", ".join(self._operations)
            what = f"differs from torch by {worst:.3g}" if math.isfinite(worst) else "fails where torch's does not"
            warn_user(f"the compiled density {what}, so it {remedy}; its operations are {names}", CompilationWarning)
        return not worst

    def _pairs(self) -> list[tuple[list[Tensor], float]]:
        return [pair for pair in zip(self._expected, _SCALES, strict=False) if pair[0]]

    def _worst(self, known: list[Tensor], scale: float, call: Callable[..., Iterable[Tensor]]) -> float:
        """Return the largest difference beyond rounding."""
        results = self._results(call, scale)
        worst = 0.0 if results else math.inf
        for expected, found in zip(known, results, strict=False):
            near = 10 * math.sqrt(torch.finfo(expected.dtype).eps)
            size = near * float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
            off = ~found.isclose(expected, near, near + size, equal_nan=True)
            if off.any():
                worst = max(worst, float((found - expected).abs()[off].nan_to_num(torch.inf).max()))
        return worst


_SCALES = (1.0, 0.1)  # of the points at which compiled code is compared


def compile_graph(graph: GraphModule, *examples: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Compile ``graph``; where that fails or times out, warn once and return the graph itself."""
    if examples[0].device.type == "cpu" and not has_compiler():
        warn_user(
            "no C++ compiler was found, so the density runs as a traced graph, a few times slower; "
            "install g++ or clang++ to compile it",
            CompilationWarning,
        )
        return graph
    # Not by torch.compile: its guards cost more than a small density in each call; shapes, strides and dtype are fixed.
    reference = TorchResults(graph, examples)
    run_natively(graph)
    try:
        compiled = compile_with_inductor(graph, tuple(x.clone() for x in examples), {"size_asserts": False})
        is_single = examples[0].dtype != torch.float64
        if is_single or reference.is_met_by(compiled, "runs uncompiled, a few times slower"):
            return compiled
        run_natively(graph, False)
        return graph
    except (RuntimeError, OSError, NotImplementedError, AttributeError, AssertionError) as error:
        warn_user(
            f"the density could not be compiled ({type(error).__name__}: {str(error)[:200]}); "
            "the traced graph is used instead, a few times slower",
            CompilationWarning,
        )
        return graph


def in_chunks(call: Callable[..., tuple[Tensor, ...]], num_vectors: int, chunk: int) -> Evaluator:
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
