"""The examples of all public docstrings, run by a user whose data are on a device."""

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pyro
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import bayeskit

_LIBRARIES = tuple(f"{folder}/" for module in (torch, pyro) for folder in module.__path__)


class _UsersTensors(TorchFunctionMode):
    """Put tensors that an example makes on the device; what the package makes stays where the package puts it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None and _by_example(sys._getframe(1)):
            kwargs = {**kwargs, "device": self.device}
        result = function(*args, **kwargs)
        return result.to(self.device) if function is torch.from_numpy and _by_example(sys._getframe(1)) else result


def _by_example(frame: FrameType | None) -> bool:
    """Tell whether the first caller outside torch and Pyro is an example."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith("<doctest")


class _Checker(doctest.OutputChecker):
    """Compare what is printed, but for the device."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub(r",\s*device='[a-z:0-9]*'", "", got), optionflags)


def modules() -> Iterator[ModuleType]:
    """Yield every module of the package that has public names."""
    for found in pkgutil.walk_packages(bayeskit.__path__, "bayeskit."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__"):
                yield module


def public() -> dict[str, tuple[ModuleType, Any]]:
    """Return every public class and function by its full name, with the module in which it stands."""
    return {
        f"{module.__name__}.{name}": (module, value)
        for module in modules()
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value)
        if value.__module__ == module.__name__
    }


def run_example(module: ModuleType, value: Any, name: str, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Run the examples of an object and its methods on a device; return what went wrong, and the names they bound."""
    said: list[str] = []
    bound: dict[str, Any] = {}
    for test in doctest.DocTestFinder().find(value, name, module=module, globs=dict(vars(module))):
        for example in test.examples:
            example.source = example.source.replace("torch.Generator()", f"torch.Generator({str(device)!r})")
        before = dict(test.globs)
        flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
        runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=flags)
        with _UsersTensors(device):
            runner.run(test, out=said.append, clear_globs=False)
        bound |= {f"{test.name}.{key}": x for key, x in test.globs.items() if before.get(key) is not x}
    return "".join(said), bound
