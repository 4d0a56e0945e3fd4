"""What can be read off a model before and beside its sites: dtype and device of its data, places of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, MethodType
from typing import Any

import pyro
import torch
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import Tensor

from bayeskit.errors import BayeskitError, ModelError


def culprit(error: Exception) -> str:
    """Quote the user's own line that failed: a distribution is built before its site has a name."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if not is_of_a_library(frame.filename):
            return f", in line {frame.lineno} of {frame.name} ({frame.line})"
    return ""


def is_of_a_library(filename: str) -> bool:
    """Whether a file is torch's, Pyro's or of this room; models of ours are a user's code like any other."""
    return filename.startswith((*torch.__path__, *pyro.__path__, str(Path(__file__).parent)))


def place_of(error: Exception) -> str:
    """Return the site and distribution whose density failed, or else the user's own line."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("at site ")]
    return f" {notes[0]}" if notes else culprit(error)


@contextmanager
def globals_kept() -> Iterator[None]:
    """Leave Pyro's handlers, plates and parameters and torch's validation as they were, however a model ends.

    Ctrl-C or an alarm may arrive while a plate is entered or left, which then stays allocated: each later model with a
    plate of that name would fail.
    """
    store = pyro.get_param_store()
    names, handlers, plates = set(store.keys()), list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
    torch_validates = torch.distributions.Distribution._validate_args
    try:
        yield
    finally:
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, plates
        torch.distributions.Distribution.set_default_validate_args(torch_validates)
        for name in set(store.keys()) - names:
            del store[name]


@contextmanager
def own_words() -> Iterator[None]:
    """Let errors of ours say what they say, without the shapes of sites that Pyro's tracing adds to any message."""
    try:
        yield
    except BayeskitError as error:
        message, shapes, _ = str(error).partition("\nTrace Shapes:")
        if not shapes:
            raise
        raise type(error)(message).with_traceback(error.__traceback__) from None


def unsteady(name: str) -> ModelError:
    return ModelError(
        f"site {name!r} appeared only in some runs of the model; the set of sites must not depend on values"
    )


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors inside ``data``: containers, modules, and what functions and objects in it refer to."""
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, FunctionType):
            names = getclosurevars(item)
            visit(names.nonlocals)
            # Functions among the globals are libraries' more often than the model's own.
            visit({k: v for k, v in names.globals.items() if not isinstance(v, FunctionType)})
        elif isinstance(item, MethodType):
            visit((item.__func__, item.__self__))
        elif isinstance(item, partial):
            visit((item.func, item.args, item.keywords))
        elif isinstance(item, torch.nn.Module):
            tensors.extend(item.parameters())
            tensors.extend(item.buffers())
        elif isinstance(item, Mapping):
            for value in item.values():
                visit(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                visit(value)
        elif callable(item) and not isinstance(item, type):
            visit(getattr(item, "__dict__", None))

    visit(data)
    return tensors


def dtype_and_device(
    data: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[torch.dtype, torch.device]:
    """Find the dtype and device of the floating tensors inside ``data`` and the functions in it."""
    tensors = tensors_in(data)
    floating = [t for t in tensors if t.is_floating_point()]
    found = dtype
    for tensor in floating:
        if tensor.dtype in (torch.float32, torch.float64):
            found = tensor.dtype if found is None else torch.promote_types(found, tensor.dtype)
    if tensors and (device is None or device.type == "cpu"):
        device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    return found or torch.get_default_dtype(), device or torch.device("cpu")
