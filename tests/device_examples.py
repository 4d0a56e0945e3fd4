"""The examples of all public docstrings, run by a user whose data are on a device."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any

import pyro
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import bayeskit

#: Modules whose functions make neural networks.
_MODULES = ("bayeskit.models.vae.autoencoders", "bayeskit.models.vae.networks", "bayeskit.models.vae.flows")
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


class _NamesTheDevice(ast.NodeTransformer):
    """Let an example name the device where a user has to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names = {"Generator", "target", *_with_a_device()}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        place = ast.Constant(str(self.device))
        if name in self.names and not any(keyword.arg == "device" for keyword in node.keywords):
            node.keywords.append(ast.keyword("device", place))
        if name in _made_on_the_host():
            return ast.Call(ast.Attribute(node, "to", ast.Load()), [place], [])
        return node


class _Checker(doctest.OutputChecker):
    """Compare what is printed, but for the device."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub(r",\s*device='[a-z:0-9]*'", "", got), optionflags)


@lru_cache
def public() -> dict[str, Any]:
    """Return every class and function that a package exports, by the name of its module and its own."""
    found = {}
    for part in pkgutil.walk_packages(bayeskit.__path__, "bayeskit."):
        if part.ispkg and not part.name.rpartition(".")[2].startswith("_"):
            package = importlib.import_module(part.name)
            for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
                if inspect.isclass(value) or inspect.isfunction(value):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return dict(sorted(found.items()))


@lru_cache
def _made_on_the_host() -> frozenset[str]:
    """Return the names of what a user moves to the device: modules, and tensors made of a size alone."""
    modules = {x.__name__ for x in public().values() if inspect.isclass(x) and issubclass(x, torch.nn.Module)}
    functions = {x.__name__ for x in public().values() if inspect.isfunction(x) and x.__module__.startswith(_MODULES)}
    return frozenset(modules | functions) - {"likelihoods"} | {"all_permutations"}


@lru_cache
def _with_a_device() -> frozenset[str]:
    """Return the names of public classes, functions and their constructors that take a device."""
    found = set()
    for value in public().values():
        for made in (value, *(vars(value).values() if inspect.isclass(value) else ())):
            made = made.__func__ if isinstance(made, classmethod | staticmethod) else made
            with suppress(TypeError, ValueError):
                if "device" in inspect.signature(made).parameters:
                    found.add(made.__name__)
    return frozenset(found) - {"to", "new_generator", "__init__"}


def run_example(name: str, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Run the examples of an object and its methods on a device; return what went wrong, and the names they bound."""
    value = public()[name]
    module = importlib.import_module(value.__module__)
    said: list[str] = []
    bound: dict[str, Any] = {}
    for test in doctest.DocTestFinder().find(value, name, module=module, globs=dict(vars(module))):
        for example in test.examples:
            renamed = _NamesTheDevice(device).visit(ast.parse(example.source))
            example.source = f"{ast.unparse(renamed)}\n"
        before = dict(test.globs)
        flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
        runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=flags)
        with _UsersTensors(device):
            runner.run(test, out=said.append, clear_globs=False)
        bound |= {f"{test.name}.{key}": x for key, x in test.globs.items() if before.get(key) is not x}
    return "".join(said), bound
