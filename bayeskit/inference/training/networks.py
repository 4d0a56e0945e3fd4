"""Networks inside a model or guide: found, compiled, and computed in fewer digits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.utils import _pytree

from bayeskit._torch import validation_kept


def owner(function: Any) -> nn.Module | None:
    """Return the module that a model or guide is, or is a method of."""
    found = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def named_modules(function: Any) -> dict[str, nn.Module]:
    """Return the modules that a plain function reads from around itself."""
    return {} if owner(function) is not None else {n: v for n, v in _around(function) if isinstance(v, nn.Module)}


def named_modules_in_settings(function: Any) -> dict[str, nn.Module]:
    """Return the modules in dataclasses that a model or guide holds or reads, as a baseline in a gradient estimator.

    Examples
    --------
    >>> from bayeskit.inference.gradients import MovingAverage, ScoreFunction
    >>> estimator = ScoreFunction(baseline=MovingAverage())
    >>> def guide():
    ...     return {"gradient": estimator}
    >>> named_modules_in_settings(guide)
    {'estimator.baseline': MovingAverage(0.9)}
    """
    whole = owner(function)
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
    """Tell what dataclasses.is_dataclass tells of objects, faster: each step asks about all attributes of modules."""
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
    elif type(value) is dict and not name.rpartition(".")[2].startswith("_"):  # modules keep dictionaries of their own
        for key, part in value.items():
            yield from _in_settings(f"{name}.{key}", part)


def networks(*functions: Any) -> list[nn.Module]:
    """Return the largest modules inside models and guides that know nothing of Pyro.

    Parameters
    ----------
    *functions
        Models and guides: modules, their methods, or functions that read modules from around themselves.

    Examples
    --------
    >>> import torch
    >>> encoder = torch.nn.Linear(2, 1)
    >>> def guide(x):
    ...     return encoder(x)
    >>> networks(guide)
    [Linear(in_features=2, out_features=1, bias=True)]
    """
    found: dict[int, nn.Module] = {}
    for function in functions:
        whole = owner(function)
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


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Let each module compute by ``wrap(module)`` for a while."""
    before = [vars(module).get("forward") for module in modules]
    with validation_kept():
        try:
            for module in modules:
                module.forward = wrap(module)  # type: ignore[method-assign]
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward  # type: ignore[method-assign]


def mixed(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the module's computation in ``dtype`` where that is safe; what it returns is as precise as before.

    Log densities are computed outside of it, in full precision.
    """
    forward = module.forward
    parameter = next(module.parameters())

    def full(x: Any) -> Any:
        return x.to(parameter.dtype) if isinstance(x, Tensor) and x.dtype == dtype else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(parameter.device.type, dtype=dtype):
            result = forward(*args, **kwargs)
        return _pytree.tree_map(full, result)

    return run


def compiled(module: nn.Module) -> Callable[..., Any]:
    """Return the module's computation, compiled when it is first called."""
    return torch.compile(module.forward)
