"""Derivatives along vectors, torch's forward mode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp


def along(function: Callable[[dict[str, Tensor]], Tensor], at: dict[str, Tensor], change: Mapping[str, Tensor]) -> Any:
    """Return a function's value, and how it changes as its arguments do."""
    _load()
    return jvp(function, (at,), (dict(change),))


@functools.cache
def _load() -> None:
    """Let torch load what it needs, without its warnings about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))
