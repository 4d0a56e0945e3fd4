"""Wild settings for every public function and constructor: a valid call, of which an argument or two are replaced.

The valid call is the one in the example of the docstring: the example runs until it reaches the call, whose arguments
are kept. A new call is covered as soon as a package exports it.
"""

from __future__ import annotations

import copy
import doctest
import enum
import functools
import importlib
import inspect
import math
import pkgutil
import random
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import bayeskit
from bayeskit.errors import BayeskitError

__all__ = ["KINDS", "calls", "is_valid", "run_case", "shrink"]

WILD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'x'": lambda: "x",
    "''": lambda: "",
    "b'x'": lambda: b"x",
    "[]": list,
    "()": tuple,
    "{}": dict,
    "[[], [[]]]": lambda: [[], [[]]],
    "{'a': {'b': []}}": lambda: {"a": {"b": []}},
    "[None]": lambda: [None],
    "object()": object,
    "lambda": lambda: lambda *args, **kwargs: None,
    "1j": lambda: 1j,
    "True": lambda: True,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "0.5": lambda: 0.5,
    "-0.0": lambda: -0.0,
    "1e25": lambda: 1e25,
    "1e-320": lambda: 1e-320,
    "10**12": lambda: 10**12,
    "2**63": lambda: 2**63,
    "np.int64(2)": lambda: np.int64(2),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "np.array([])": lambda: np.array([]),
    "torch.tensor(2)": lambda: torch.tensor(2),
    "torch.empty(0)": lambda: torch.empty(0),
    "torch.ones(3, 5, 7)": lambda: torch.ones(3, 5, 7),
    "torch.full((4,), nan)": lambda: torch.full((4,), math.nan),
    "torch.ones(2, dtype=complex64)": lambda: torch.ones(2, dtype=torch.complex64),
    "torch.ones(2, dtype=int32)": lambda: torch.ones(2, dtype=torch.int32),
    "torch.ones(2, device='meta')": lambda: torch.ones(2, device="meta"),
}
"""Values that are given in place of good ones, by how they are written."""

_NO_CALLS = ("bayeskit.cli", "bayeskit.errors", "bayeskit.testing", "bayeskit.core", "bayeskit.logdensity")


class _Reached(BaseException):
    """The call of an example is reached."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call_args, self.call_kwargs = args, kwargs


@functools.cache
def calls() -> dict[str, Any]:
    """Return the functions and classes that the packages export, by public name."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    packages = [m for m in pkgutil.walk_packages(bayeskit.__path__, "bayeskit.") if "._" not in m.name]
    for name in ["bayeskit", *(m.name for m in packages if m.ispkg or m.name.count(".") == 1)]:
        if name.startswith(_NO_CALLS):
            continue
        package = importlib.import_module(name)
        for word in getattr(package, "__all__", ()):
            thing = getattr(package, word)
            kind_of_class = inspect.isclass(thing) and issubclass(thing, (tuple, BaseException, enum.Enum))
            module = str(getattr(thing, "__module__", ""))
            ours = module.startswith("bayeskit.") and not module.startswith("bayeskit.core.")
            skipped = kind_of_class or getattr(thing, "_is_protocol", False) or inspect.isabstract(thing)
            if (inspect.isfunction(thing) or inspect.isclass(thing)) and ours and not skipped and id(thing) not in seen:
                seen.add(id(thing))
                found[f"{name}.{word}"] = thing
    return dict(sorted(found.items()))


def _examples(thing: Any) -> str:
    return "".join(e.source for e in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))


KINDS: tuple[str, ...] = tuple(calls())

NOT_COVERED = "not covered, no example of a docstring makes the call"


@contextmanager
def _caught(thing: Any) -> Iterator[None]:
    """Let a call of a public function or class raise its arguments."""

    def reach(*args: Any, **kwargs: Any) -> None:
        raise _Reached(args, kwargs)

    if inspect.isclass(thing):
        own, old = "__init__" in vars(thing), thing.__init__
        thing.__init__ = lambda self, *args, **kwargs: reach(*args, **kwargs)
        try:
            yield
        finally:
            if own:
                thing.__init__ = old
            else:
                del thing.__init__
        return
    replaced = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("bayeskit") and module is not None
        for name, value in list(vars(module).items())
        if value is thing
    ]
    for module, name in replaced:
        setattr(module, name, reach)
    try:
        yield
    finally:
        for module, name in replaced:
            setattr(module, name, thing)


@functools.cache
def _valid(kind: str) -> tuple[Callable[..., Any], inspect.BoundArguments] | None:
    """Return a call and the arguments of its example; ``None`` where the example does not come to it."""
    thing = calls()[kind]
    for text in _texts(thing):
        try:
            with _caught(thing):
                # As doctest does: an example knows the names of its module.
                room = {**vars(sys.modules[thing.__module__]), "__name__": "example"}
                for example in doctest.DocTestParser().get_examples(text):
                    try:
                        exec(compile(example.source, kind, "single"), room)
                    except Exception:  # an example of an error, or one that needs what the call would have returned
                        continue
        except _Reached as reached:
            # A Pyro model is called by what reads it.
            reader = [bayeskit.Target.from_pyro] if kind.startswith("bayeskit.exact.") and "_model" in kind else []
            bound = inspect.signature(thing).bind(*reached.call_args, **reached.call_kwargs)
            return functools.partial(*reader, thing), bound
    return None


def _texts(thing: Any) -> Iterator[str]:
    """Yield docstrings whose examples may make a call: its own, of its methods, beside it, and of those who use it."""
    yield inspect.getdoc(thing) or ""
    home = sys.modules[thing.__module__]
    users = [m for key, m in sorted(sys.modules.items()) if key.startswith("bayeskit.") and m is not home]
    homes = [home, *(m for m in users if any(value is thing for value in list(vars(m).values())))]
    beside = [getattr(module, name, None) for module in homes for name in getattr(module, "__all__", ())]
    methods = list(vars(thing).values()) if inspect.isclass(thing) else []
    for other in dict.fromkeys(o for o in (*methods, *beside, home) if isinstance(o, Hashable)):
        text = getattr(getattr(other, "__func__", other), "__doc__", None)
        if other is not thing and isinstance(text, str) and ">>>" in text:
            yield text


def _plan(kind: str, seed: int) -> dict[str, str]:
    """Return which arguments of a call are replaced, and by what."""
    generator = random.Random(f"{kind} {seed}")
    names = [
        p.name
        for p in inspect.signature(calls()[kind]).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    chosen = generator.sample(names, min(len(names), generator.choice((1, 1, 2))))
    if names and generator.random() < EQUALS:
        return {generator.choice(names): f"{EQUAL}{generator.randrange(6)}"}
    return {name: generator.choice(list(WILD)) for name in chosen}


def is_valid(kind: str, seed: int) -> bool:
    """Tell whether a case replaces arguments by their defaults alone, and so is a valid call with work of its own."""
    parameters = inspect.signature(calls()[kind]).parameters
    return all(text == repr(parameters[name].default) for name, text in _plan(kind, seed).items())


# Values that mean the same as good ones: the result is the same, to the last digit, or an error of the package.

EQUALS = 0.25
"""Share of the cases in which an argument is replaced by an equal value of another type."""

EQUAL = "an equal value, "
_QUICK = 2.0


def _equals(value: Any, annotation: str) -> list[Any]:
    """Return values of other types that mean the same."""
    if isinstance(value, (str, Path)) and "Path" in annotation:
        return [Path(value), str(value)]
    if type(value) is int:
        return [np.int64(value), torch.tensor(value)]
    if type(value) is float:
        short = [np.float32(value), torch.tensor(value)] if float(np.float32(value)) == value else []
        whole = [int(value)] if value.is_integer() else []
        return [np.float64(value), np.array(value), torch.tensor(value, dtype=torch.float64), *short, *whole]
    if type(value) is torch.Tensor and not value.requires_grad:
        listed = value.dim() and value.dtype in (torch.float64, torch.int64, torch.bool)
        return [value.clone().numpy(), *([value.tolist()] if listed else [])]
    if type(value) in (list, tuple):
        return [tuple(value) if type(value) is list else list(value)]
    return []


def _numbers(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the numbers in a result, and in its attributes."""
    if isinstance(thing, torch.Tensor):
        thing = np.asarray(thing.detach().resolve_conj())
    elif isinstance(thing, (list, tuple)) and thing:
        with suppress(ValueError, TypeError, RuntimeError):  # a list of numbers is as good as an array
            thing = table if (table := np.asarray(thing)).dtype.kind in "biufc" else thing
    if isinstance(thing, (np.ndarray, np.generic, bool, int, float, complex)):
        yield np.shape(thing), np.asarray(thing, dtype=complex).tobytes() if np.asarray(thing).dtype != object else b""
    elif isinstance(thing, (str, bytes)) or callable(thing) or id(thing) in seen:
        return
    elif isinstance(thing, (Mapping, list, tuple)):
        for item in thing.items() if isinstance(thing, Mapping) else thing:
            if not (isinstance(item, tuple) and item and item[0] in ("seconds", "created")):
                yield from _numbers(item, seen)
    elif hasattr(thing, "__dict__"):
        seen.add(id(thing))
        yield from _numbers(vars(thing), seen)


def _result(call: Callable[..., Any], bound: inspect.BoundArguments, changed: dict[str, Any]) -> list[Any]:
    """Return the numbers of a valid call, of which some arguments may be replaced."""
    torch.manual_seed(0)
    arguments = inspect.BoundArguments(bound.signature, copy.deepcopy(bound.arguments | changed))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_numbers(call(*arguments.args, **arguments.kwargs), set()))


@functools.cache
def _usual(kind: str) -> list[Any] | None:
    """Return the numbers of the valid call of a kind; ``None`` where they are others each time, or come late."""
    call, bound = _valid(kind)  # type: ignore[misc]
    begin = time.process_time()
    try:
        usual = _result(call, bound, {})
        again = _result(call, bound, {}) if time.process_time() - begin < _QUICK else None
    except Exception:  # of arguments that cannot be copied
        return None
    return usual if usual == again else None


def _change(kind: str, name: str, place: int) -> str | None:
    """Return what is wrong with a call one of whose arguments is replaced by an equal value."""
    call, bound = _valid(kind)  # type: ignore[misc]
    parameter = bound.signature.parameters[name]
    value = bound.arguments.get(name, parameter.default)
    equals = _equals(value, str(parameter.annotation))
    if not equals or _usual(kind) is None:
        return None
    equal = equals[place % len(equals)]
    told = f"{kind}({name}={type(equal).__name__}, equal to the {type(value).__name__} of the example)"
    try:
        found = _result(call, bound, {name: equal})
    except BayeskitError:
        return None
    except Exception as error:
        return f"{told}: {_told(error)}"
    return None if found == _usual(kind) else f"{told}: changed numbers"


def _failure(kind: str, plan: dict[str, str]) -> str | None:
    """Return what is wrong with the end of a call whose arguments are replaced so."""
    valid = _valid(kind)
    if valid is None:
        return f"{kind}: {NOT_COVERED}"
    for name, text in plan.items():
        if text.startswith(EQUAL):
            return _change(kind, name, int(text.removeprefix(EQUAL)))
    call, bound = valid
    try:
        kept = copy.deepcopy(bound.arguments)
    except Exception:
        kept = dict(bound.arguments)
    arguments = inspect.BoundArguments(bound.signature, {})  # type: ignore[arg-type]
    for parameter in bound.signature.parameters.values():
        name = parameter.name
        if name in plan:
            arguments.arguments[name] = WILD[plan[name]]()
        elif name in kept:
            arguments.arguments[name] = kept[name]
    told = f"{kind}({', '.join(f'{name}={value}' for name, value in plan.items())})"
    try:
        result = call(*arguments.args, **arguments.kwargs)
        # A constructor keeps what it is given.
        computed = not inspect.isclass(calls()[kind])
        number = result if isinstance(result, float) else getattr(result, "log_evidence", 0.0) if computed else 0.0
    except BayeskitError:
        return None
    except TypeError as error:
        if "argument" in str(error) and ("missing" in str(error) or "unexpected keyword" in str(error)):
            return None
        return None if _is_passed_on(error, call, arguments) else f"{told}: {_told(error)}"
    except Exception as error:
        return None if _is_passed_on(error, call, arguments) else f"{told}: {_told(error)}"
    if computed and isinstance(number, float) and math.isnan(number) and not getattr(result, "warnings", ()):
        return f"{told}: NaN without a word"
    return None


def _is_passed_on(error: Exception, call: Callable[..., Any], arguments: inspect.BoundArguments) -> bool:
    """Tell whether an error has a note of the package, and comes from within a function that the call was given."""
    if not hasattr(error, "__notes__"):
        return False
    raised: list[Exception] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as own:
                raised.append(own)
                raise

        return noted

    given = {name: noting(value) if callable(value) else value for name, value in arguments.arguments.items()}
    again = inspect.BoundArguments(arguments.signature, given)  # type: ignore[arg-type]
    try:
        call(*again.args, **again.kwargs)
    except Exception as second:
        return any(own is second for own in raised)
    return False


def _told(error: Exception) -> str:
    place, line = "", error.__traceback__
    while line is not None:
        if "/bayeskit/" in line.tb_frame.f_code.co_filename:
            place = f"{line.tb_frame.f_code.co_filename.rpartition('/bayeskit/')[2]}:{line.tb_lineno}"
        line = line.tb_next
    return f"{type(error).__name__} in {place}: {str(error).splitlines()[0][:100] if str(error) else ''}"


def run_case(kind: str, seed: int, folder: Path) -> str | None:
    """Make a call with wild arguments; return how it fails, or ``None`` where it returns or says what is wrong."""
    state = SimpleNamespace(random=torch.get_rng_state(), numpy=np.random.get_state())  # noqa: NPY002
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        found = _failure(kind, _plan(kind, seed))
    torch.set_rng_state(state.random)
    np.random.set_state(state.numpy)  # noqa: NPY002
    return found


def shrink(kind: str, seed: int, folder: Path) -> str:
    """Return the failure of a case with as few wild arguments as show it."""
    plan = _plan(kind, seed)
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        for name in plan:
            found = _failure(kind, {name: plan[name]})
            if found is not None:
                return found
        return _failure(kind, plan) or "not met again"
