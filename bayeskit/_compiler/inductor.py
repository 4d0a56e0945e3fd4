"""Inductor with a time limit, in a thread of its own, so that Ctrl-C and time budgets end a compilation."""

from __future__ import annotations

import copy
import ctypes
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bayeskit._compiler.torch_internals import FakeTensorMode, TracingContext, metrics_of_compilation, tracing
from bayeskit._core.compiler_cache import compiler_cache
from bayeskit._core.inputs import warn_user
from bayeskit._core.progress import look
from bayeskit._core.randomness import one_thread, validation_kept
from bayeskit.errors import CompilationWarning

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
