"""Take results of chunks or of single vectors apart and put them together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lift(result: Any) -> Any:
    """Give the result for one vector a leading batch dimension."""
    if isinstance(result, dict):
        return {k: v.unsqueeze(0) for k, v in result.items()}
    if isinstance(result, tuple):
        return tuple(v.unsqueeze(0) for v in result)
    return result.unsqueeze(0)


def first_rows(result: Any, count: int) -> Any:
    if isinstance(result, dict):
        return {k: v[:count] for k, v in result.items()}
    return tuple(v[:count] for v in result)


def gather(parts: list[Any], batch: torch.Size) -> Any:
    """Concatenate chunk results and give them the caller's batch shape."""

    def join(tensors: list[Tensor]) -> Tensor:
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return whole.reshape(batch + whole.shape[1:])

    if isinstance(parts[0], dict):
        return {k: join([p[k] for p in parts]) for k in parts[0]}
    return tuple(join([p[i] for p in parts]) for i in range(len(parts[0])))
