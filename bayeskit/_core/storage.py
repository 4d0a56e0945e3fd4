"""Files of tensors, and results of tasks in a folder, stored so that loading runs no code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from bayeskit._core.folders import (
    Schema,
    as_output_folder,
    clear_temporary_files,
    facts_of,
    read_facts,
    record_of,
    restoring,
    write_atomically,
    write_facts,
)
from bayeskit.errors import CheckpointError, ShapeError

# Tensors and facts in one file.


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], schema: Schema) -> None:
    """Write tensors and JSON-able facts as one safetensors file, with schema, version and checksum."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = record_of({"tensors": _layout(contiguous), **facts}, schema, _payload(contiguous))
    write_atomically(path, *_as_safetensors(contiguous, json.dumps(record)))


@contextmanager
def loaded_tensors(path: str | Path, schema: Schema) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Give tensors and facts of a file of :func:`save_tensors` to the block that restores something from them.

    No code of the file is run. ``CheckpointError`` says that the file is damaged or of another schema, or, whatever
    the block raises, that its contents do not fit together.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    clear_temporary_files(path.parent)
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})["bayeskit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises errors of many types
        said = str(error)[:500]
        raise CheckpointError(
            f"{path} is truncated or not a file of bayeskit ({said}); pass another path. If it is a truncated "
            "checkpoint, pass a path that does not exist, which starts a new run"
        ) from error
    with restoring(path):
        facts = facts_of(path, record, schema, _payload(tensors))
        if facts.pop("tensors") != _layout(tensors):
            raise ShapeError("its tensors are not of the names, types and shapes that it names")
        yield tensors, facts


def is_tensor_file(path: str | Path) -> bool:
    """Return whether a file was written by :func:`save_tensors`, without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return "bayeskit" in (file.metadata() or {})
    except Exception:  # safetensors raises errors of many types
        return False


def _as_safetensors(tensors: Mapping[str, Tensor], facts: str) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file of safetensors, whose own writer copies it and ends the process without memory."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"bayeskit": facts}}
    end = 0
    for name in ordered:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        kind = _NAMES_OF_TYPES.get(tensors[name].dtype)
        if kind is None:
            raise CheckpointError(f"tensor {name!r} is of type {tensors[name].dtype}, which a file cannot hold")
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name of {ordered!r:.200} has characters that a file cannot hold: {error}") from error
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from (_bytes_of(tensors[name]) for name in ordered)


_NAMES_OF_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    # A single number may have any stride, and only a stride of one can be read as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def _payload(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in sorted(tensors):
        yield f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode("utf-8", "surrogatepass")
        yield _bytes_of(tensors[name])


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


# Finished tasks in a folder: the run that they belong to, and their results, stored so that loading runs no code.

_MANIFEST = "tasks.json"
_TASKS, _RESULT = Schema("tasks", 1), Schema("the result of a task", 1)
_PLAIN = (type(None), bool, int, float, str)


class TaskFolder:
    """Results of one call of ``map_tasks``, a file each, and a manifest of its function and tasks."""

    def __init__(
        self, path: str | Path, function: Callable[..., Any], tasks: Sequence[Any], result_types: Sequence[type]
    ) -> None:
        self._folder = as_output_folder(path)
        self._types = {qualified_name(t): t for t in result_types}  # dataclasses and named tuples of results
        self._digests = [digest(task) for task in tasks]
        facts = {"function": digest(function), "tasks": self._digests}
        manifest = self._folder / _MANIFEST
        if manifest.exists():
            self._check(manifest, facts)
        else:
            write_facts(manifest, facts | {"name": qualified_name(function)}, _TASKS)

    def _check(self, manifest: Path, facts: dict[str, Any]) -> None:
        remedy = "give another checkpoint folder, or delete this one"
        saved = read_facts(manifest, _TASKS)
        with restoring(manifest):
            saved_tasks, saved_function = list(saved["tasks"]), str(saved["function"])
        if saved_function != facts["function"]:
            raise CheckpointError(f"{self._folder} holds results of {saved.get('name', 'another function')}; {remedy}")
        if len(saved_tasks) != len(self._digests):
            raise CheckpointError(
                f"{self._folder} holds results of {len(saved_tasks)} tasks, this run has {len(self._digests)}; {remedy}"
            )
        for index, (old, new) in enumerate(zip(saved_tasks, self._digests, strict=True)):
            if old != new:
                raise CheckpointError(f"{self._folder} was written with another task {index}; {remedy}")

    def _file(self, index: int) -> Path:
        return self._folder / f"task-{index:06d}.safetensors"

    def load(self) -> dict[int, Any]:
        """Return the stored results by index; raise ``CheckpointError`` for a damaged file or that of another task."""
        results = {}
        for index, task in enumerate(self._digests):
            path = self._file(index)
            if not path.exists():
                continue
            with loaded_tensors(path, _RESULT) as (tensors, facts):
                if facts["task"] != task:
                    raise CheckpointError(f"{path} holds the result of another task; delete it")
                results[index] = decode(facts["result"], tensors, self._types)
        return results

    def save(self, index: int, result: Any) -> None:
        """Write one result, whole or not at all; raise ``CheckpointError`` if its types cannot be stored."""
        tensors: dict[str, Tensor] = {}
        structure = encode(result, tensors, self._types, f"the result of task {index}")
        save_tensors(self._file(index), tensors, {"task": self._digests[index], "result": structure}, _RESULT)


def qualified_name(item: Any) -> str:
    """Return the module and name of a function or class, or of the class of an object."""
    named = item if isinstance(item, (type, FunctionType, BuiltinFunctionType)) else type(item)
    return f"{named.__module__}.{named.__qualname__}"


# -- results ----------------------------------------------------------------------------------


def encode(value: Any, tensors: dict[str, Tensor], types: Mapping[str, type], place: str = "the value") -> Any:
    """Return nested data as JSON, with arrays moved to ``tensors``; raise ``CheckpointError`` for other types."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return {"tensor": _put(value, tensors)} if not value.is_complex() else _complex(value, tensors)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        # As bytes: torch lacks some of NumPy's types.
        raw = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy())
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: _put(raw, tensors), "dtype": value.dtype.str, "shape": list(value.shape)}
    if type(value) in (dict, OrderedDict, Counter):
        inside = ((k, encode(v, tensors, types, f"{place}[{k!r}]")) for k, v in value.items())
        return {type(value).__name__: [[encode(k, tensors, types, f"a key of {place}"), v] for k, v in inside]}
    if type(value) in (list, tuple):
        items = [encode(v, tensors, types, f"{place}[{i}]") for i, v in enumerate(value)]
        return {type(value).__name__: items}
    if types.get(qualified_name(value)) is type(value):
        fields = {k: encode(v, tensors, types, f"{place}.{k}") for k, v in _fields(value).items()}
        return {"type": qualified_name(value), "fields": fields}
    raise CheckpointError(
        f"{place} is of type {qualified_name(value)}, which cannot be stored, because loading must not run code; "
        "return tensors, arrays, numbers, strings, dicts, lists and tuples, or name a dataclass or named tuple "
        "in result_types"
    )


def decode(node: Any, tensors: Mapping[str, Tensor], types: Mapping[str, type]) -> Any:
    """Undo :func:`encode`; only the types given here are ever made."""
    if type(node) in _PLAIN:
        return node
    match node:
        case {"tensor": name}:
            return tensors[name]
        case {"complex": name}:
            return torch.view_as_complex(tensors[name])
        case {"array": name, "dtype": dtype, "shape": shape}:
            return np.frombuffer(tensors[name].numpy().tobytes(), dtype=dtype).reshape(shape).copy()
        case {"scalar": name, "dtype": dtype}:
            return np.frombuffer(tensors[name].numpy().tobytes(), dtype=dtype)[0]
        case {"dict": items}:
            return {decode(k, tensors, types): decode(v, tensors, types) for k, v in items}
        case {"OrderedDict": items}:
            return OrderedDict(decode({"dict": items}, tensors, types))
        case {"Counter": items}:
            return Counter(decode({"dict": items}, tensors, types))
        case {"list": items}:
            return [decode(v, tensors, types) for v in items]
        case {"tuple": items}:
            return tuple(decode(v, tensors, types) for v in items)
        case {"type": name, "fields": fields}:
            if (kind := types.get(name)) is None:
                raise CheckpointError(f"a stored result is of type {name}; name this type in result_types to load it")
            return kind(**{k: decode(v, tensors, types) for k, v in fields.items()})
    raise CheckpointError(f"a stored result has an unknown part: {str(node)[:80]}; delete the folder to start anew")


def _put(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().resolve_neg()
    return name


def _complex(value: Tensor, tensors: dict[str, Tensor]) -> dict[str, str]:
    return {"complex": _put(torch.view_as_real(value.detach().resolve_conj()), tensors)}


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return dict(value._asdict())


# -- tasks ------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a digest by which a later process recognises a function or a task, or raise ``CheckpointError``."""
    # Data: by value. Functions: by name, instructions with their constants and names, and closure, but not by the
    # globals that they read. Classes: by name. Objects: by fingerprint(), or else by attributes.
    return _digest(value, ())


_BY_TEXT = (*_PLAIN, complex, bytes, slice, range, EllipsisType, torch.dtype, torch.device, np.dtype, Path)


def _digest(value: Any, within: tuple[int, ...]) -> str:
    if id(value) in within:
        return "cycle"
    inner = functools.partial(_digest, within=(*within, id(value)))
    text = "\n".join([qualified_name(value), *_parts(value, inner)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _parts(value: Any, inner: Callable[[Any], str]) -> list[str]:
    if isinstance(value, _BY_TEXT):
        return [repr(value)]
    if isinstance(value, Tensor):
        raw = value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), str(tuple(value.shape)), hashlib.sha256(raw).hexdigest()]
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            return [inner(value.tolist())]
        return [str(value.dtype), str(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return sorted(inner(k) + inner(v) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(inner, value))
    if isinstance(value, (list, tuple)):
        return [inner(v) for v in value]
    if isinstance(value, (type, BuiltinFunctionType)):
        return []
    if isinstance(value, FunctionType):
        return [
            inner(value.__defaults__),
            inner(value.__kwdefaults__),
            inner(_code(value.__code__)),
            inner(dict(inspect.getclosurevars(value).nonlocals)),
        ]
    if isinstance(value, MethodType):
        return [inner(value.__func__), inner(value.__self__)]
    if isinstance(value, functools.partial):
        return [inner(value.func), inner(value.args), inner(value.keywords)]
    if callable(getattr(value, "fingerprint", None)):
        return [str(value.fingerprint())]
    if dataclasses.is_dataclass(value):
        return [inner({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})]
    if hasattr(value, "__dict__"):
        return [inner(vars(value))]
    raise CheckpointError(
        f"a task holds an object of type {qualified_name(value)}, which a later run could not recognise; "
        "describe tasks by plain data, or give the object a method fingerprint() -> str"
    )


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return the parts that identify code, including the code of nested functions."""
    constants = tuple(_code(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_flags, code.co_names, code.co_varnames, constants


# -- settings -------------------------------------------------------------------------------


def setting_as_json(value: Any) -> Any:
    """Return a setting as JSON that is equal for equal settings."""
    # Functions and other objects are compared by name only; tensors, numbers, containers and distributions by value.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous()
        digest = hashlib.sha256(content.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return [str(content.dtype), list(content.shape), digest]
    if isinstance(value, Mapping):
        return {str(key): setting_as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [setting_as_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            {f.name: setting_as_json(getattr(value, f.name)) for f in dataclasses.fields(value)},
        ]
    if isinstance(value, torch.distributions.Distribution):
        names = [*value.arg_constraints, "base_dist", "transforms"]
        return [type(value).__qualname__, {name: setting_as_json(getattr(value, name, None)) for name in names}]
    if isinstance(value, torch.distributions.Transform):
        own = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        return [type(value).__qualname__, setting_as_json(own)]
    return getattr(value, "__qualname__", type(value).__qualname__)
