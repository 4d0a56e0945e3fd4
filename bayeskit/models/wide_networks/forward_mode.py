"""Derivatives along vectors, torch's forward mode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import jvp

Arguments = TypeVar("Arguments", Tensor, dict[str, Tensor])


def along(function: Callable[[Arguments], Tensor], at: Arguments, change: Arguments) -> Any:
    """Return a function's value, and how it changes as its argument does."""
    _load()
    return jvp(function, (at,), (change,))


@functools.cache
def _load() -> None:
    """Let torch load what it needs, without its warnings about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))
