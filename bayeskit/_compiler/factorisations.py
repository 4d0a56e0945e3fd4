"""Failed matrix factorisations, which give NaN for their own vector instead of an error for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from bayeskit._compiler.torch_internals import DispatchMode, safe

CHECK = torch.ops.aten._linalg_check_errors.default


def fail_apart(graph: GraphModule) -> None:
    """Make a failed matrix factorisation give NaN for its own vector instead of an error for the whole batch."""
    aten = torch.ops.aten
    for check in list(graph.graph.find_nodes(op="call_function", target=CHECK)):
        info = check.args[0]
        for result in list(info.args[0].users):
            meta = result.meta.get("tensor_meta")
            if result is info or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
                continue
            with graph.graph.inserting_before(check):
                failed = graph.graph.call_function(aten.ne.Scalar, (info, 0))
                failed.meta["tensor_meta"] = info.meta["tensor_meta"]._replace(dtype=torch.bool)
                for _ in range(len(meta.shape) - len(info.meta["tensor_meta"].shape)):
                    failed = graph.graph.call_function(aten.unsqueeze.default, (failed, -1))
                masked = graph.graph.call_function(aten.masked_fill.Scalar, (result, failed, torch.nan))
            result.replace_all_uses_with(masked, delete_user_cb=lambda user, masked=masked: user is not masked)
        graph.graph.erase_node(check)


class UncheckedFactors(DispatchMode):
    """Let failed matrix factorisations pass, where a run is recorded and :func:`fail_apart` marks them later."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = safe(operation)
        return None if operation is CHECK else operation(*args, **(kwargs or {}))


class FailingApart(TorchFunctionMode):
    """Do what :func:`fail_apart` does for Cholesky factors, outside of graphs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.linalg.cholesky:
            return func(*args, **(kwargs or {}))
        factor, info = torch.linalg.cholesky_ex(*args, **(kwargs or {}))
        return factor.masked_fill((info != 0)[..., None, None], torch.nan)
