"""Modules inside a model or guide, in its closure or in its settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from pyro.nn import PyroModule
from torch import nn


def owning_module(function: Any) -> nn.Module | None:
    """Return the module of a model or guide that is a module or one of its methods, or None."""
    found = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def named_modules(function: Any) -> dict[str, nn.Module]:
    """Return the modules in the closure and globals of a plain function."""
    return (
        {} if owning_module(function) is not None else {n: v for n, v in _around(function) if isinstance(v, nn.Module)}
    )


def named_modules_in_settings(function: Any) -> dict[str, nn.Module]:
    """Return the modules in dataclasses that a model or guide holds or reads, as ``{'estimator.baseline': ...}``."""
    whole = owning_module(function)
    values: Iterable[tuple[str, Any]] = _around(function)
    if whole is not None:
        values = (
            (f"{at}.{name}", v)
            for at, part in whole.named_modules()
            for name, v in vars(part).items()
            if _is_dataclass(v) or (type(v) is dict and not name.startswith("_"))
        )
    return dict(found for name, value in values for found in _in_settings(name, value))


def _is_dataclass(value: Any) -> bool:
    """Like dataclasses.is_dataclass for objects, but faster, because each step calls it for all attributes."""
    return hasattr(type(value), "__dataclass_fields__")


def _around(function: Any) -> Iterable[tuple[str, Any]]:
    if not inspect.isfunction(function):
        return ()
    around = inspect.getclosurevars(function)
    return {**around.globals, **around.nonlocals}.items()


def _in_settings(name: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    if _is_dataclass(value):
        for field in dataclasses.fields(value):
            if isinstance(part := getattr(value, field.name, None), nn.Module):
                yield f"{name}.{field.name}", part
    elif type(value) is dict and not name.rpartition(".")[2].startswith("_"):  # skip a module's private dictionaries
        for key, part in value.items():
            yield from _in_settings(f"{name}.{key}", part)


def networks(*functions: Any) -> list[nn.Module]:
    """Return the largest Pyro-free modules inside models and guides or in their closures."""
    found: dict[int, nn.Module] = {}
    for function in functions:
        whole = owning_module(function)
        parts = list(named_modules(function).values()) if whole is None else list(whole.children())
        for part in parts:
            for network in _plain(part):
                found[id(network)] = network
    return list(found.values())


def _plain(module: nn.Module) -> Iterator[nn.Module]:
    container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not container and not any(isinstance(part, PyroModule) for part in module.modules()):
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        yield from _plain(child)
