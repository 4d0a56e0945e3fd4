"""From a torch module to a list of the operations in its forward method."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import fx, nn

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.activations.module import Elementwise
from bayeskit.models.wide_networks.refusals import Refusals, check_plain, reason_against

LONGEST = 70  # a line of code in a message
LINE = "line"  # where in a node's notes the line of the user's code is


class Tracer(fx.Tracer):
    """Traces a module down to torch's own layers, and notes the lines of code that call them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Take torch's modules, except containers, and elementwise functions as they are."""
        return isinstance(m, Elementwise) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, kind: str, *arguments: Any, **options: Any) -> fx.Node:
        """Return a node that knows the line of code it comes from."""
        if kind.startswith("call") and not torch.is_grad_enabled():
            raise ModelError(
                "a part of the forward method runs without gradients, under torch.no_grad(); freeze its layers with "
                "requires_grad_(False), which leaves them out of the tangent kernel"
            )
        node = super().create_node(kind, *arguments, **options)
        node.meta[LINE] = _line_of_code()
        return node


def trace(module: nn.Module) -> fx.Graph:
    """Return the operations of a module's forward method.

    Raises
    ------
    ModelError
        If it has branches on values, or does what cannot be recorded.
    """
    check_plain(f"{type(module).__name__}, the whole network", module)
    try:
        # Whether the caller wants gradients is not a property of the network.
        with torch.enable_grad(), _recorded_lengths(module):
            return Tracer().trace(module)
    except ModelError:
        raise
    except Exception as error:  # fx raises whatever the module's own code raises on symbols
        _check_layers(module)
        raise ModelError(
            f"{type(module).__name__} cannot be traced: {error}. Build it from nn.Sequential, or write a forward "
            "method without branches on values"
        ) from error


def place_of(node: fx.Node) -> str:
    """Return where an operation stands: in which module, and on which line of code."""
    modules = [path for path in node.meta.get("nn_module_stack") or {} if path]
    inside = f"in module {modules[-1]!r}" if modules and node.op != "call_module" else ""
    known = [x for x in (inside, node.meta.get(LINE, "")) if x]
    return f" ({', '.join(known)})" if known else ""


def _check_layers(module: nn.Module) -> None:
    """Name the layers on which tracing may have failed, for what fails is often what is done with their results."""
    refusals = Refusals()
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith("torch.nn") and _returns_several(layer):
            refusals.add(ModelError(f"layer {name!r} ({type(layer).__name__}): {reason_against(layer)}"))
    refusals.check()


def _returns_several(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention)


@contextmanager
def _recorded_lengths(module: nn.Module) -> Iterator[None]:
    """Let ``len`` of a tensor be recorded where the forward methods call it, as Python lets it return numbers only."""
    scopes = [getattr(type(layer).forward, "__globals__", {}) for layer in module.modules()]
    borrowed = {id(x): x for x in scopes if "len" not in x and not str(x.get("__name__", "torch")).startswith("torch")}
    for scope in borrowed.values():
        scope["len"] = _length
    try:
        yield
    finally:
        for scope in borrowed.values():
            del scope["len"]


def _length(x: Any) -> Any:
    return x.tracer.create_proxy("call_function", len, (x,), {}) if isinstance(x, fx.Proxy) else len(x)


def _line_of_code() -> str:
    """Return the line of the forward method that is being traced, or nothing if it is torch's own."""
    frame = sys._getframe(1)
    while frame is not None:
        scope = frame.f_globals.get("__name__", "")
        if scope == __name__ and frame.f_code is trace.__code__:
            break
        if scope != __name__ and not scope.startswith("torch.") and scope != "contextlib":
            path, number = frame.f_code.co_filename, frame.f_lineno
            text = shorten(linecache.getline(path, number).strip(), LONGEST, placeholder=" ...")
            return f"line {number} of {Path(path).name}" + (f", `{text}`" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
