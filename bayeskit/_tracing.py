"""What running a density under ``torch.func.vmap`` or ``make_fx`` may raise, and how a warning quotes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

UNTRACEABLE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of a density that branches on values, or calls what cannot be batched or traced."""


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def fail_apart(graph: GraphModule) -> None:
    """Let a matrix that cannot be factorised give NaN to its own vector instead of an error to all of them."""
    aten = torch.ops.aten
    for check in list(graph.graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)):
        info = check.args[0]
        for result in list(info.args[0].users):
            meta = result.meta.get("tensor_meta")
            if result is info or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
                continue
            with graph.graph.inserting_before(check):
                failed = graph.graph.call_function(aten.ne.Scalar, (info, 0))
                for _ in range(len(meta.shape) - len(info.meta["tensor_meta"].shape)):
                    failed = graph.graph.call_function(aten.unsqueeze.default, (failed, -1))
                masked = graph.graph.call_function(aten.masked_fill.Scalar, (result, failed, torch.nan))
            result.replace_all_uses_with(masked, delete_user_cb=lambda user, masked=masked: user is not masked)
        graph.graph.erase_node(check)


class FailingApart(TorchFunctionMode):
    """Do what :func:`fail_apart` does for Cholesky factors, outside of graphs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.linalg.cholesky:
            return func(*args, **(kwargs or {}))
        factor, info = torch.linalg.cholesky_ex(*args, **(kwargs or {}))
        return factor.masked_fill((info != 0)[..., None, None], torch.nan)
