"""Undocumented parts of torch that the compiler alone uses; tested with torch 2.13 and 2.14."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.passes.shape_prop import _extract_tensor_metadata as extract_tensor_metadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_map

__all__ = [
    "DispatchMode",
    "FakeTensorMode",
    "OpOverload",
    "TracingContext",
    "TreeSpec",
    "core_aten_decompositions",
    "extract_tensor_metadata",
    "get_decompositions",
    "make_graph_module",
    "metrics_of_compilation",
    "prepare_tracing",
    "safe",
    "script_of",
    "tracing",
    "tree_map",
    "unoptimised",
    "use_lazy_graph_module",
]


class DispatchMode(TorchDispatchMode):
    """Mode that sees each operation; unlike torch's, its first operation does not import torch's compiler (1.5 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def safe(operation: Any) -> Any:
    """Return an equivalent operation that does not crash the process under a dispatch mode."""
    # Forward derivatives start from zeros without memory, which crash when multiplied by a number.
    return torch.ops.aten.zeros.default if operation is torch.ops.aten._efficientzerotensor.default else operation


def script_of(name: str, function: Callable[..., Any], examples: tuple[Tensor, ...]) -> Any:
    """Return a function recorded at example inputs, run by torch's interpreter."""
    recorded = torch._C._create_graph_by_tracing(function, examples, lambda _: "", True, False)[0]
    return torch._C._create_function_from_graph(name, recorded)


def prepare_tracing() -> None:
    """Import what torch 2.6 imports at the first gradient, and which computes in doing so, before a graph is traced."""
    if torch.__version__.startswith("2.6."):
        importlib.import_module("torch._dynamo")


def metrics_of_compilation() -> AbstractContextManager[Any]:
    """Return a context for calls of inductor, whose cache torch 2.6 cannot read outside of it."""
    if not torch.__version__.startswith("2.6."):
        return nullcontext()
    from torch._dynamo.utils import get_metrics_context

    context: AbstractContextManager[Any] = get_metrics_context()
    return context


def unoptimised(script: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a script without optimisation, which is a setting of the thread."""

    def call(*arguments: Tensor) -> Any:
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            return script(*arguments)
        finally:
            torch._C._set_graph_executor_optimize(before)

    return call
