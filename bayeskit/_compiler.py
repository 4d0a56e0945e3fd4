"""Inductor with a time limit, in a thread of its own, so that Ctrl-C and time budgets are heard while it works."""

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
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from bayeskit._interruption import look
from bayeskit._torch import one_thread, validation_kept

COMPILE_SECONDS = 300.0
UNPROBED = {"cpp.vec_isa_ok": True}
_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 0.5
_FAREWELLS = 10
_TELL_AGAIN_SECONDS = 2.0

Compiled = Callable[..., tuple[Tensor, ...]]


class _Compilation(threading.Thread):
    """One call of inductor; to be made where all warnings have just been switched off."""

    def __init__(self, graph: GraphModule, examples: Sequence[Tensor], options: dict[str, Any]) -> None:
        super().__init__(name="bayeskit-compilation", daemon=True)
        self._graph, self._examples, self._options = graph, examples, options
        self._begin, self._abandoned = time.monotonic(), False
        self._filters: Any = warnings.filters
        self._told = 0.0
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._compiled: Compiled | None = None

    def run(self) -> None:
        device = self._examples[0].device
        # Gradient mode, device and number of threads belong to a thread; compiled code has the last built in.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                with one_thread(), torch.no_grad(), _remembered():
                    self._compiled = self._compile()
            except BaseException as error:  # raised again where somebody waits
                self._error = error
            finally:
                self._over.set()

    def _compile(self) -> Compiled:
        """Compile, and call it once."""
        import torch._inductor  # takes a second, as symbolic shapes do

        examples: list[Any] = list(self._examples)
        graph, compile = self._graph, torch._inductor.compile
        compiled: Compiled = without_probes(
            lambda options: compile(copy.deepcopy(graph), examples, options=self._options | options)
        )
        compiled(*self._examples)
        return compiled

    def wait(self) -> None:
        """Wait for the end, but no longer than Ctrl-C, a time budget or the limit."""
        while not self._over.wait(_POLL_SECONDS) and self.is_alive():
            if self._abandoned and time.monotonic() - self._told > _TELL_AGAIN_SECONDS:
                self._tell()
            look()
            if time.monotonic() - self._begin > COMPILE_SECONDS:
                raise TimeoutError(
                    f"no answer in {COMPILE_SECONDS:g} s; a run that goes on from a checkpoint of compiled code "
                    "will differ in its last digits"
                )

    def abandon(self) -> None:
        """End the thread, and stay until torch, which borrows the filters of warnings, has given them back."""
        if self._over.is_set():
            return
        self._abandoned = True
        del self._filters[0]  # the one that ignores everything: torch may give back this list when nobody waits
        for _ in range(_FAREWELLS):
            self._tell()
            if self._over.wait(_FAREWELL_SECONDS) or warnings.filters is self._filters:
                return

    def _tell(self) -> None:
        """Raise SystemExit in the thread, which hears it once it is back from what is not Python.

        In the callback of a weak reference it is lost, so that one has to tell again.
        """
        self._told = time.monotonic()
        if self.ident is not None and self.is_alive():  # the number of a thread that has ended may be another's
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))

    def result(self) -> Compiled:
        """Wait, and return what was compiled."""
        self.wait()
        if self._compiled is None:
            look()  # Ctrl-C at a terminal ends the compiler, too, which is no failure of its own
            raise self._error or RuntimeError("the compiler returned nothing")
        return self._compiled


class _FixedShapes(FakeTensorMode):
    """Takes no size for a symbol, although it has an account of symbols."""

    def from_tensor(self, tensor: Tensor, **how: Any) -> Any:
        return super().from_tensor(tensor, **(how | {"static_shapes": True, "symbolic_context": None}))


def _remembered() -> AbstractContextManager[object]:
    """Let inductor keep what it compiles on disk, and find what another process has compiled.

    It does so only where somebody keeps account of symbolic shapes, although all of ours are fixed.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    account = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return tracing(TracingContext(_FixedShapes(shape_env=account)))


def without_probes(compile: Callable[[dict[str, Any]], Any]) -> Any:
    """Compile for the vector instructions that torch says the processor has.

    That the compiler knows them as well inductor finds out by several programs, which take longer than a small density.
    So it is asked only where it fails. ``compile`` takes options of inductor's configuration.
    """
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    check = VecISA.check_build
    VecISA.check_build = lambda *_: True  # type: ignore[method-assign]
    try:
        return compile(UNPROBED)
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
    """Compile ``graph`` for arguments like ``examples``, and call it once.

    Parameters
    ----------
    graph : GraphModule
        Left as it is.
    examples : sequence of Tensor
        Their shapes, strides and dtypes are fixed in the code.
    options : dict
        Of inductor's configuration.

    Returns
    -------
    callable

    Raises
    ------
    TimeoutError
        If there is no answer within ``COMPILE_SECONDS``.
    Stopped
        If Ctrl-C or the time budget ends the run meanwhile.
    KeyboardInterrupt
        On Ctrl-C outside a run.
    """
    global _latest
    look()  # nothing is begun that would be given up at once
    with validation_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own deprecations are not the user's
        if _latest is not None:
            _latest.wait()  # one that was abandoned and hangs is a reason not to try again
        compilation = _latest = _Compilation(graph, examples, options)
        try:
            compilation.start()
            compiled = compilation.result()
        except BaseException:
            compilation.abandon()
            raise
    _latest = None
    return compiled
