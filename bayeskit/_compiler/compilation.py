"""Graphs compiled by inductor, and compiled code compared with torch at first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from bayeskit._compiler.inductor import Compiled, compile_with_inductor, settle
from bayeskit._compiler.loop_operations import run_natively
from bayeskit._compiler.native_library import has_compiler
from bayeskit._compiler.tracing import traced
from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import one_thread, validation_kept
from bayeskit.errors import CompilationWarning


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


def compile_function(function: Callable[..., tuple[Tensor, ...]], examples: Sequence[Tensor]) -> Compiled:
    """Compile a function of tensors that have the shapes, strides and dtypes of ``examples`` in each call, unchecked.

    Raise ``OSError`` without a compiler, and other errors where compilation fails or ends before its time.
    """
    if examples[0].device.type == "cpu" and not has_compiler():
        raise OSError("no C++ compiler")
    examples = tuple(x.clone() for x in examples)  # a tensor used twice would be traced as one argument
    with validation_kept(), one_thread(), torch.no_grad():
        settle()
        graph = traced(function, *examples)
    return compile_with_inductor(graph, examples, {"size_asserts": False, "force_pointwise_cat": True})
