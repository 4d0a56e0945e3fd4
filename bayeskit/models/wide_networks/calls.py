"""How functions are called in a trace."""

from __future__ import annotations

import inspect
import operator
from types import FunctionType
from typing import Any

from torch import fx, nn
from torch.nn import functional

from bayeskit.models.wide_networks.refusals import called_as
from bayeskit.models.wide_networks.tracing import place_of

IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def place_of_call(node: fx.Node) -> str:
    """Return how messages call a function."""
    called = called_as(node.target)
    return f"{node.name!r}" + (f" ({called})" if called != node.name else "") + place_of(node)


def is_in_place(node: fx.Node) -> bool:
    """Whether a function writes its result over its first input."""
    target = node.target
    if isinstance(target, str):
        return target.endswith("_")
    if isinstance(target, FunctionType):
        signature = inspect.signature(target)
        if "inplace" in signature.parameters:
            return signature.bind(*node.args, **node.kwargs).arguments.get("inplace") is True
    return target in IN_PLACE


def operands(node: fx.Node) -> tuple[Any, Any]:
    """Return what a function of two takes, by position or by name."""
    named = [node.kwargs[key] for key in ("input", "other") if key in node.kwargs]
    found: list[Any] = [*node.args, *named, None]
    return found[0], found[1]


def pool_of(node: fx.Node) -> nn.AvgPool1d | nn.AvgPool2d:
    """Return the module that does what a function does."""
    settings = {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
    if node.target is functional.avg_pool1d:
        return nn.AvgPool1d(**given(node, **settings))
    return nn.AvgPool2d(**given(node, **settings, divisor_override=None))


def given(node: fx.Node, **settings: Any) -> dict[str, Any]:
    """Return what a function is called with behind the tensor, by position or by name."""
    by_position = dict(zip(settings, node.args[1:], strict=False))
    named = {"dim" if key == "axis" else key: value for key, value in node.kwargs.items()}
    return settings | by_position | {key: value for key, value in named.items() if key in settings}
