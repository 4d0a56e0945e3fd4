"""Arguments of every public call, checked against its signature.

``import bayeskit`` puts :func:`check_public_calls` behind the import of each module of the package. What a package
exports in ``__all__`` is checked; calls within the package are not. Four things are done:

* Numbers and arrays of NumPy and torch, and lists of numbers, become what the signature has: an int, a float, a tensor.
* Counts are compared with the memory before anything is allocated.
* An argument of a wrong type is named where the body ends in an error of another kind than the package's, and where a
  constructor takes a plain value of a wrong type.
* Tensors of a dataclass that a user makes have the shapes of its docstring, such as ``(n, d)``, each letter one size.

Which values are allowed ("at least 1") is said by the body, with ``whole_number`` and ``real_number``.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, TypeVar

from bayeskit.core.inputs import as_numbers
from bayeskit.errors import BayeskitError, DataError, SettingsError, ShapeError

__all__ = ["check_memory", "check_public_calls", "checked", "install"]

_Call = TypeVar("_Call", bound=Callable[..., Any])

#: Modules whose calls are made by the package alone, or check their arguments with a parser of their own.
_PRIVATE = ("bayeskit._", "bayeskit.__", "bayeskit.core", "bayeskit.cli", "bayeskit.errors", "bayeskit.testing")

#: A count of these is no number of things that are kept.
_NOT_KEPT = ("num_data", "num_jobs")

#: Types all of whose values belong to the type that an annotation names.
_ALWAYS_RIGHT = frozenset({bool, int, float, str, type(None)})

#: Modules whose calls of constructors are the package's own.
_WITHIN = ("bayeskit.", "dataclasses")

#: Where the types of plain values are defined.
_PLAIN = ("builtins", "numpy", "torch", "pathlib", "pathlib._local")

#: How the rule for tensors begins.
_TENSOR = "a tensor of real numbers"

_BYTES = 8
_MANY_ITEMS = 1000


class _Rule:
    """A type that an argument may have: its name for a message, a test of a value, and a conversion of equal values."""

    def __init__(
        self,
        expected: str,
        accepts: Callable[[Any], bool],
        remedy: str = "",
        exact: tuple[type, ...] = (),
        converted: Callable[[Any], Any] | None = None,
    ) -> None:
        self.expected, self.accepts, self.remedy = expected, accepts, remedy
        self.exact, self.converted = exact, converted


class _Argument:
    """An argument: its name, its type, and whether it is a number of things that are kept."""

    def __init__(self, name: str = "", rule: _Rule | None = None, kept: bool = False, is_needed: bool = False) -> None:
        self.name, self.rule, self.kept, self.is_needed = name, rule, kept, is_needed
        exact = frozenset(() if rule is None else rule.exact)
        #: Types of values that are right whatever they are, and of those with which nothing is to be done before.
        self.right = exact & _ALWAYS_RIGHT
        self.plain = exact - {int} if kept else exact


class _Signature:
    """What is known of the arguments of a call."""

    def __init__(self, call: Callable[..., Any], documentation: str = "") -> None:
        self.call = call
        self.by_place = _arguments_of(call)
        described = _shapes(documentation)
        tensors = [a.name for a in self.by_place if a.rule is not None and a.rule.expected.startswith(_TENSOR)]
        self.shapes = {name: described[name] for name in tensors if name in described}
        self.by_name = {argument.name: argument for argument in self.by_place}
        watched = [argument for argument in self.by_place if argument.kept or argument.rule and argument.rule.converted]
        self.watched_names = {argument.name: argument for argument in watched}
        self.watched_places = [(self.by_place.index(argument), argument) for argument in watched]

    def fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with numbers and arrays of other libraries as the signature has them."""
        for place, argument in self.watched_places:
            if place < len(args) and type(args[place]) not in argument.plain:
                args = (*args[:place], _fitted(argument, args[place]), *args[place + 1 :])
        for name in kwargs:
            watched = self.watched_names.get(name)
            if watched is not None and type(kwargs[name]) not in watched.plain:
                kwargs = {**kwargs, name: _fitted(watched, kwargs[name])}
        return args, kwargs

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: bool = False) -> BayeskitError | None:
        """Return the error for the first argument of a wrong type, or for the first plain value of a wrong type."""
        for argument, value in self.given(args, kwargs):
            if type(value) in argument.right or argument.rule is None or argument.rule.accepts(value):
                continue
            if not plain or type(value).__module__ in _PLAIN:
                return _refusal(self.call, argument.name, argument.rule, value)
        return None

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BayeskitError | None:
        """Return the error for the first tensor of another shape than that of the documentation."""
        sizes: dict[str, tuple[int, str]] = {}  # by letter, and the argument that has set it
        for argument, value in self.given(args, kwargs) if self.shapes else ():
            name, expected = argument.name, self.shapes.get(argument.name)
            shape = getattr(value, "shape", None)
            if expected is None or shape is None:
                continue
            batch = expected[0].startswith("*")
            last = expected[batch:]
            fits = len(shape) >= len(last) if batch else len(shape) == len(last)
            told = ""
            for letter, size in zip(last, shape[len(shape) - len(last) :], strict=True) if fits else ():
                right, where = (int(letter), "") if letter.isdigit() else sizes.setdefault(letter, (size, name))
                if size != right:
                    fits, told = False, f", where {letter} is {right} as in {where}" if where else ""
            if not fits:
                text = f"({', '.join(expected)}{',' * (len(expected) == 1)})"
                place = f"argument {name} of {_name_of(self.call)}"
                return ShapeError(f"{name} has shape {tuple(shape)} and must have {text}{told} ({place})")
        return None

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[_Argument, Any]]:
        """Yield arguments and their values."""
        yield from zip(self.by_place, args, strict=False)
        for name, value in kwargs.items():
            yield self.by_name.get(name) or _Argument(name), value


def checked(call: _Call, documentation: str = "", shaped: bool = False) -> _Call:
    """Return a function that refuses arguments of wrong types and counts beyond all memory, and calls another.

    Tensors of other shapes than the documentation gives are named where the call fails, and if ``shaped`` always.
    """
    signature: _Signature | None = None
    constructs = call.__name__ == "__init__"

    @functools.wraps(call)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        nonlocal signature
        if signature is None:
            signature = _Signature(call, documentation or inspect.getdoc(call) or "")
        args, kwargs = signature.fitted(args, kwargs)
        try:
            result = call(*args, **kwargs)
        except BayeskitError:  # knows more of what is wrong
            raise
        except Exception as error:
            refusal = signature.refusal(args, kwargs)
            if refusal is None and isinstance(error, _OF_VALUES):
                refusal = signature.misfit(args, kwargs)
            if refusal is not None:
                raise refusal from error
            _blame(call, signature.given(args, kwargs), error)
            raise
        # An object of another class may be as good as the right one; a plain value cannot.
        if constructs:
            refusal = signature.refusal(args, kwargs, plain=True)
            # The package may end early with less than its documentation says.
            if refusal is None and shaped and not sys._getframe(1).f_globals.get("__name__", "").startswith(_WITHIN):
                refusal = signature.misfit(args, kwargs)
            if refusal is not None:
                raise refusal
        return result

    with_checks.__dict__["checks_arguments"] = True
    if hasattr(call, "__wrapped__"):  # what another decorator hides stays in reach
        with_checks.__dict__["__wrapped__"] = call.__wrapped__
    return typing.cast(_Call, with_checks)


def _fitted(argument: _Argument, value: Any) -> Any:
    """Return a value as its argument has it, where that means the same; refuse counts beyond the memory."""
    rule = argument.rule
    if rule is not None and rule.converted is not None and type(value) not in rule.exact:
        value = rule.converted(value)
    if argument.kept and isinstance(value, int):
        check_memory(argument.name, value)
    return value


def check_memory(name: str, count: int, each: int = _BYTES) -> None:
    """Raise ``SettingsError`` if so many things, of so many bytes each, do not fit into the memory of the machine."""
    if count * each > _memory():
        raise SettingsError(
            f"{name}={count:.3g} needs at least {count * each / 1e9:,.0f} GB, and this machine has "
            f"{_memory() / 1e9:,.0f} GB; ask for fewer"
        )


#: Errors of torch, NumPy and Python that may come from the values of arguments.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


def _blame(call: Any, given: Iterable[tuple[_Argument, Any]], error: Exception) -> None:
    """Raise an error that names the argument which a body could not use, where that is certain; else return."""
    given = list(given)
    for argument, value in given:
        name, rule = argument.name, argument.rule
        if argument.kept and type(value) is int and value < 0:
            raise SettingsError(f"{name} must not be negative, not {value} (argument {name} of {_name_of(call)})")
        if type(value).__module__ in _PLAIN and (value is not None or argument.is_needed):
            lacks = isinstance(error, AttributeError) and error.obj is value
            no_tensor = rule is not None and rule.expected.startswith(_TENSOR) and not hasattr(value, "detach")
            told = isinstance(error, TypeError) and re.search(rf"\b{type(value).__name__}\b", str(error))
            if lacks or (no_tensor and told) or getattr(value, "is_meta", False):
                raise _refusal(call, name, rule or _Rule("what its documentation says", bool), value) from error
    quoted = set(re.findall(r"'(\w+)'", str(error))) if isinstance(error, (AttributeError, TypeError)) else set()
    odd = [
        (argument, value)
        for argument, value in given
        if type(value).__name__ in quoted
        and type(value).__module__ in _PLAIN
        and (value is not None or argument.is_needed)
        and (argument.rule is None or type(value) not in argument.rule.exact)
    ]
    if len(odd) == 1:
        raise _refusal(
            call, odd[0][0].name, odd[0][0].rule or _Rule("what its documentation says", bool), odd[0][1]
        ) from error
    if isinstance(error, _OF_VALUES):
        for argument, value in given:
            if fault := _fault(value, error):
                words = f"{type(error).__name__}: {str(error)[:200]}"
                raise (SettingsError if isinstance(value, (int, float)) else DataError)(
                    f"{argument.name} {fault}, which {_name_of(call)} cannot use ({words}); give other values "
                    f"(argument {argument.name} of {_name_of(call)})"
                ) from error
        shapes = [
            f"{a.name} {tuple(x.shape)}" for a, x in given if hasattr(x, "detach") or type(x).__name__ == "ndarray"
        ]
        if shapes and _MISFIT.search(str(error)):
            raise ShapeError(
                f"shapes do not fit {_name_of(call)}: {', '.join(shapes)} ({str(error)[:200]}); see its documentation"
            ) from error


#: What errors of torch, NumPy and Python say of shapes, domains, tensors without dimensions and memory.
_MISFIT = re.compile(r"must match|broadcast|mismatch|shape|dimension|(same|expanded|expected|of) size", re.IGNORECASE)
_DOMAIN = re.compile(r"domain error|Expected parameter")
_NO_DIMENSION = re.compile(r"0-d|no dimension|unpack|index out of range|Dimension out of range")
_NO_MEMORY = re.compile(r"alloc|memory|(calculation|multiplication) overflow", re.IGNORECASE)
_MANY, _GREAT = 2**24, 1e100


def _fault(value: Any, error: Exception) -> str:
    """Return what is odd with a number, a tensor or an array, such as ``"is empty"``; nothing if nothing is."""
    if isinstance(value, (int, float)) and value <= 0 and _DOMAIN.search(str(error)):
        return f"is {value}"
    if isinstance(value, int):
        if abs(value) >= 2**63:
            return "is beyond the whole numbers of 64 bits"
        if isinstance(error, OverflowError) and abs(value) >= _MANY:
            return f"is {value:.3g}"
        room = not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error))
        return "" if abs(value) < _MANY or room else "needs more than the memory"
    if isinstance(value, float):
        extreme = value and not 1 / _GREAT < abs(value) < _GREAT
        return f"is {value}" if extreme or not math.isfinite(value) else ""
    if isinstance(value, Mapping):
        lacks = isinstance(error, KeyError) and error.args and isinstance(error.args[0], str)
        return f"has no {error.args[0]!r}" if lacks and error.args[0] not in value else ""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return ""
    if 0 in value.shape:
        return "is empty"
    if not _is_known(value) or str(value.dtype).startswith(("<U", "object")):
        return ""
    if hasattr(value, "is_sparse") and (value.is_sparse or value.is_complex()):
        return "is sparse" if value.is_sparse else "is complex"
    if bool((value != value).any()):
        return "has NaN"
    return "has no dimension" if not value.shape and _NO_DIMENSION.search(str(error)) else ""


def _name_of(call: Any) -> str:
    return str(call.__qualname__).removesuffix(".__init__")


@functools.cache
def _memory() -> float:
    """Return the bytes of memory of the machine, or infinity where that is not known."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return float("inf")


def _refusal(call: Any, name: str, rule: _Rule, value: Any) -> BayeskitError:
    kind, where = type(value).__name__, _name_of(call)
    short = isinstance(value, (str, bytes, int, float, complex))
    given = "None" if value is None else f"{repr(value)[:60]} of type {kind}" if short else f"an object of type {kind}"
    return (DataError if rule.expected.startswith("a tensor") else SettingsError)(
        f"{name} must be {rule.expected}, not {given}; {rule.remedy or f'see the documentation of {where}'} "
        f"(argument {name} of {where})"
    )


#: An argument in a docstring of numpydoc, and a shape in its description.
_DESCRIBED = re.compile(r"^(\w[\w, ]*) : (.*\n(?:    .*\n|\n)*)", re.MULTILINE)
_SHAPE = re.compile(r"(?<!\w)\(((?:[\w*+ -]+,)+[\w*+ -]*)\)")


def _shapes(documentation: str) -> dict[str, tuple[str, ...]]:
    """Return the shapes that a docstring gives, each a letter or word for every dimension, of arguments with one."""
    found: dict[str, tuple[str, ...]] = {}
    for names, text in _DESCRIBED.findall(documentation + "\n"):
        shapes = {tuple(size.strip() for size in shape.rstrip(", ").split(",")) for shape in _SHAPE.findall(text)}
        if len(shapes) == 1 and any(map(str.isidentifier, sizes := shapes.pop())) and "*" not in "".join(sizes[1:]):
            found |= dict.fromkeys(names.split(", "), sizes)
    return found


def _arguments_of(call: Callable[..., Any]) -> list[_Argument]:
    """Return what is known of each argument, in their order."""
    found: list[_Argument] = []
    names = _Names(getattr(inspect.unwrap(call), "__globals__", {}))
    parameters = inspect.signature(call).parameters.values()
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        rule = None if parameter.annotation is parameter.empty else _rule(names.read(parameter.annotation))
        if rule is not None and parameter.default is None and not rule.accepts(None):
            rule = _either([rule, _rule(None)])
        name = parameter.name
        counts = name in ("batch_size", "dim") or name.endswith("_dim") or name.startswith("num_")
        kept = counts and name not in _NOT_KEPT
        found.append(_Argument(name, rule, kept, parameter.default is parameter.empty))
    if open_ended:  # what is given by position beyond the first ones has no name
        cut = next(i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL)
        found[cut:cut] = [_Argument()] * _MANY_ITEMS
    return found


class _Names(dict[str, Any]):
    """Names in annotations: of the module, and what it imports for the type checker alone."""

    def __init__(self, module: dict[str, Any]) -> None:
        super().__init__()
        self._module = module

    def read(self, annotation: Any) -> Any:
        """Return the type that an annotation means, or ``Any`` where that is not known."""
        if not isinstance(annotation, str):
            return annotation
        try:
            return eval(annotation, {}, self)
        except Exception:  # of a name that only the type checker can read
            return Any

    def __missing__(self, name: str) -> Any:
        usual: dict[str, Any] = {"Callable": Callable, "Mapping": Mapping, "np": sys.modules.get("numpy")}
        if torch := sys.modules.get("torch"):
            usual |= {"torch": torch, "Tensor": torch.Tensor}
        usual |= {"Sequence": Sequence, "Iterable": Iterable, "Collection": Collection, "Path": os.PathLike}
        for known in (self._module, usual, vars(builtins)):
            if name in known:
                return known[name]
        # The type of an argument is there once there are values of it, and names stand for one thing in the package.
        for module in [m for key, m in sys.modules.items() if key.startswith("bayeskit.")]:
            thing = vars(module).get(name)
            if inspect.isclass(thing) and thing.__module__ == module.__name__:
                return thing
        return Any


def _rule(kind: Any) -> _Rule | None:
    """Return the rule for a type, or ``None`` where everything goes."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, str) or kind is Any or kind is object or isinstance(kind, TypeVar):
        return None
    if origin is typing.Annotated:
        return _rule(parts[0])
    if origin in (typing.Union, types.UnionType):
        named = any(_is_class(part, "torch", "device") for part in parts)  # a str beside it is the name of a device
        return _either([_rule(part) for part in parts if not (named and part is str)])
    if origin is typing.Literal:
        allowed = tuple({type(part) for part in parts})
        return _Rule("one of " + ", ".join(map(repr, parts)), lambda value: isinstance(value, allowed))
    if kind is None or kind is type(None):
        return _Rule("None", lambda value: value is None, exact=(type(None),))
    if kind is bool:
        return _Rule("True or False", _is_switch, exact=(bool,), converted=_as_switch)
    if kind is int:
        return _Rule("a whole number", _is_whole, exact=(int,), converted=_as_plain)
    if kind is float:
        return _Rule("a number", _is_number, exact=(float, int), converted=_as_plain)
    if _is_class(kind, "torch", "Tensor") or _is_class(kind, "numpy", "ndarray"):
        converted = _as_tensor if _is_class(kind, "torch", "Tensor") else None
        remedy = "give a tensor, an array or a list of numbers"
        return _Rule(_TENSOR, _is_numeric, remedy, (kind,), converted)
    base = origin or kind
    if base is Callable or base is type:
        return _Rule("a function" if base is not type else "a class", callable)
    if not inspect.isclass(base):
        return None
    if base is str:
        return _Rule("a str", lambda value: isinstance(value, str), exact=(str,))
    if base is os.PathLike or base.__module__ == "pathlib":
        return _Rule("a path", lambda value: isinstance(value, (str, os.PathLike)))
    if _is_class(base, "torch", "device"):
        return _Rule("a device such as 'cpu'", functools.partial(_is_device, base), exact=(base,), converted=_as_plain)
    if issubclass(base, Mapping):
        items = _rule(parts[1]) if len(parts) == 2 else None
        return _Rule(
            "a dictionary" + (f" whose values are each {items.expected}" if items else ""),
            lambda v: hasattr(v, "keys") and hasattr(v, "__getitem__") and _all(items, [v[key] for key in v.keys()]),
        )
    if base in (Sequence, Iterable, Collection, list, tuple, set, frozenset):
        items = _rule(parts[0]) if parts and (base is not tuple or {*parts[1:]} <= {parts[0], ...}) else None
        length = len(parts) if base is tuple and parts and parts[-1] is not ... and parts != ((),) else None
        return _Rule(
            ("a list" if length is None else f"{length} values") + (f", each item {items.expected}" if items else ""),
            functools.partial(_is_list, base, length, items),
            exact=(list, tuple),
            converted=_conversion_of_lists(items),
        )
    if getattr(base, "_is_protocol", False):
        needed = [name for name in vars(base) if not name.startswith("_") or name == "__call__"]
        words = f"an object with {', '.join(n for n in needed)}" if needed != ["__call__"] else "a function"
        return _Rule(words, lambda value: all(hasattr(value, name) for name in needed))
    if base.__name__ == "TorchDistribution":  # Pyro's name for what torch's own distributions are as good as
        base = sys.modules["torch"].distributions.Distribution
    name = base.__name__
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    remedy = "make one with bayeskit.Target.from_pyro(model, data)" if name == "Target" else ""
    return _Rule(f"{article} {name}", lambda value: isinstance(value, base), remedy)


def _either(rules: list[_Rule | None]) -> _Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    words = list(dict.fromkeys(rule.expected for rule in known))
    remedy = next((rule.remedy for rule in known if rule.remedy), "")
    conversions = list(dict.fromkeys(rule.converted for rule in known if rule.converted is not None))
    conversions.sort(key=lambda conversion: conversion is not _as_plain)  # a number stays one where it may
    exact = tuple(kind for rule in known for kind in rule.exact)

    def converted(value: Any) -> Any:
        for conversion in conversions:
            value = value if type(value) in exact else conversion(value)
        return value

    return _Rule(
        " or ".join(words),
        lambda value: any(rule.accepts(value) for rule in known),
        remedy,
        exact,
        converted if conversions else None,
    )


# Values of other libraries that mean the same as those of the signature.


def _as_plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's, and everything else as it is."""
    if type(value).__module__ not in ("numpy", "torch") or getattr(value, "ndim", True) or not _is_known(value):
        return value
    return value.item()


def _as_switch(value: Any) -> Any:
    """Return True and False of other libraries, and 1 and 0, as Python's, and everything else as it is."""
    value = _as_plain(value)
    return bool(value) if type(value) is int and value in (0, 1) else value


def _as_tensor(value: Any) -> Any:
    """Return a number, an array, or a list of numbers, as a tensor, and everything else as it is."""
    kind = type(value)
    lists = kind in (list, tuple) and not _of_tensors(value)
    number = kind in (int, float) or kind.__module__ == "numpy" and issubclass(kind, sys.modules["numpy"].number)
    if lists or number or _is_class(kind, "numpy", "ndarray"):
        try:
            return as_numbers("", value)
        except DataError:  # named below
            pass
    return value


def _conversion_of_lists(items: _Rule | None) -> Callable[[Any], Any] | None:
    """Return the conversion of what stands for a list whose items have a rule."""
    if items is None or float in items.exact:
        return None
    return _as_whole_numbers if int in items.exact else _as_list


def _as_whole_numbers(value: Any) -> Any:
    """Return a vector of whole numbers as a tuple, and everything else as it is."""
    if type(value).__module__ not in ("numpy", "torch") or getattr(value, "ndim", 0) != 1 or not _is_known(value):
        return value
    return value if any(word in str(value.dtype) for word in ("float", "complex", "bool")) else tuple(value.tolist())


def _as_list(value: Any) -> Any:
    """Return an array as a list, and everything else as it is."""
    return value.tolist() if _is_class(type(value), "numpy", "ndarray") and value.ndim else value


def _of_tensors(values: Sequence[Any]) -> bool:
    """Tell whether the first item of a list, nested ones too, is a tensor."""
    first: Any = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return hasattr(first, "detach")


def _is_known(value: Any) -> bool:
    """Tell whether the value of a number can be read: nothing differentiates, batches or records it."""
    if not hasattr(value, "detach"):
        return True
    from bayeskit.core.torch_internals import is_concrete

    return is_concrete(value)


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_device(device: Any, value: Any) -> bool:
    """Tell whether a value is a device, or the name or number of one."""
    if not isinstance(value, str) and not _is_whole(value):
        return isinstance(value, device)
    try:
        device(value)
    except (OverflowError, RuntimeError, ValueError):
        return False
    return True


def _is_class(kind: Any, module: str, name: str) -> bool:
    """Tell whether a class is one of a package, which is not imported for the question."""
    return module in sys.modules and kind is getattr(sys.modules[module], name)


def _is_switch(value: Any) -> bool:
    if _is_class(type(value), "torch", "Tensor"):
        return _is_number(value)
    return type(value).__name__ in ("bool", "bool_") or isinstance(value, int) and value in (0, 1)


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes, bool, type)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return False
    if hasattr(value, "detach"):
        return value.numel() == 1 and _is_real(value)
    return getattr(value, "size", 1) == 1 and str(getattr(value, "dtype", "")) != "object"


def _is_numeric(value: Any) -> bool:
    if hasattr(value, "detach"):
        return _is_real(value)
    if isinstance(value, (list, tuple)):
        return _of_tensors(value) or _as_tensor(value) is not value or not value
    if hasattr(value, "__array__") and not isinstance(value, type):
        return str(getattr(value, "dtype", "")) != "object" or _as_tensor(value) is not value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return False
    return not isinstance(value, (str, bytes, type)) and hasattr(value, "__float__")


def _is_real(tensor: Any) -> bool:
    """Tell whether a tensor holds real numbers, all of them."""
    return not (tensor.is_complex() or tensor.is_sparse)


def _is_list(base: type, length: int | None, items: _Rule | None, value: Any) -> bool:
    if isinstance(value, Mapping) and base not in (Iterable, Collection):
        return False
    if isinstance(value, bytes):
        return False
    if isinstance(value, str) and (base is list or items is not None and not items.accepts("")):  # letters
        return False
    if not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        return False
    if hasattr(value, "ndim"):
        sparse = getattr(value, "is_sparse", False)
        return (
            value.ndim > 0 and length in (None, len(value)) and not sparse and _is_known(value) and _all(items, value)
        )
    if length is not None and hasattr(value, "__len__") and len(value) != length:
        return False
    return not isinstance(value, (list, tuple)) or _all(items, value)


def _all(items: _Rule | None, values: Sequence[Any]) -> bool:
    return items is None or all(items.accepts(value) for value in values[:_MANY_ITEMS])


# Where the checks are put on.


def check_public_calls(module: types.ModuleType) -> None:
    """Put checks on the functions, constructors and class methods that a module defines for users."""
    exported = _exported(module.__name__.rpartition(".")[0])
    for name in getattr(module, "__all__", ()):
        thing = vars(module).get(name)
        if getattr(thing, "__module__", None) != module.__name__ or (exported is not None and name not in exported):
            continue
        if inspect.isfunction(thing) and not getattr(thing, "checks_arguments", False):
            setattr(module, name, checked(thing))
        elif inspect.isclass(thing) and not issubclass(thing, (tuple, BaseException)):
            for word, member in list(vars(thing).items()):
                if isinstance(member, classmethod) and not word.startswith("_"):
                    setattr(thing, word, classmethod(checked(member.__func__)))
            _check_constructor(thing)


@functools.cache
def _exported(package: str) -> frozenset[str] | None:
    """Return the names that a package or one above it exports; ``None`` if all of its modules are for users.

    Calls within the package, thousands of which make a run, stay as they are.
    """
    parts = package.split(".")
    if len(parts) == 1:
        return None
    above = [".".join(parts[: k + 1]) for k in range(len(parts))]
    texts = [sys.modules[name].__loader__.get_source(name) or "" for name in above]  # type: ignore[union-attr]
    return frozenset(re.findall(r'"(\w+)"', "".join(texts)))


def _check_constructor(thing: type) -> None:
    for base in thing.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is not None:
            if (
                base.__module__.startswith("bayeskit.")
                and inspect.isfunction(constructor)
                and not getattr(base, "_is_protocol", False)
                and not getattr(constructor, "checks_arguments", False)
            ):
                shaped = "__dataclass_fields__" in vars(base)
                base.__init__ = checked(constructor, inspect.getdoc(base) or "", shaped)  # type: ignore[misc]
            return


class _Loader(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        """Run a module, and put checks on its public calls."""
        super().exec_module(module)
        check_public_calls(module)


class _Finder:
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module of the package, for a loader that puts on the checks."""
        if not name.startswith("bayeskit.") or name.startswith(_PRIVATE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Put the checks on every module of the package that is imported from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
