"""States of optimisers and schedules as tensors and JSON, and the checkpoint of a training run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._files import load_tensors, save_tensors
from bayeskit.errors import CheckpointError, SettingsError

KIND, VERSION = "training", 1


def encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return ``value`` as JSON, its tensors put into ``tensors`` under names that start with ``name``.

    Raises
    ------
    SettingsError
        If there is something that is neither a tensor nor a number, string, None, list, tuple or mapping.

    Examples
    --------
    >>> import torch
    >>> tensors = {}
    >>> coded = encode({0: (torch.ones(1), None)}, tensors, "optimizer")
    >>> decode(coded, tensors), list(tensors)
    ({0: (tensor([1.]), None)}, ['optimizer.0.0'])
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"mapping": [[encode(k, {}, name), encode(v, tensors, f"{name}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]}
    raise SettingsError(
        f"{name} holds {value!r:.80}, which no checkpoint can keep without running code; use an optimiser and a "
        "schedule whose states are tensors and numbers, or train without a checkpoint"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what :func:`encode` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mapping":
        return {decode(k, tensors): decode(v, tensors) for k, v in content}
    items = (decode(item, tensors) for item in content)
    return tuple(items) if kind == "tuple" else list(items)


def described(value: Any) -> Any:
    """Return a setting as JSON that differs where the setting does.

    Numbers, strings, None, tensors, and the lists, tuples, mappings and dataclasses made of such are compared by value,
    functions and other objects by name only.

    Examples
    --------
    >>> from bayeskit.inference.objectives import Linear
    >>> described((Linear(20), print))
    [['Linear', {'num_steps': 20, 'start': 0.0, 'end': 1.0}], 'print']
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous()
        digest = hashlib.sha256(content.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return [str(content.dtype), list(content.shape), digest]
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)},
        ]
    return getattr(value, "__qualname__", type(value).__qualname__)


def write_checkpoint(path: str | Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a run, whole or not at all.

    Parameters
    ----------
    path : path
    settings : mapping
        What must agree with a run that resumes it, as JSON.
    state : mapping
        Tensors, numbers, lists and mappings.
    """
    tensors: dict[str, Tensor] = {}
    coded = encode(state, tensors, "state")
    save_tensors(path, tensors, {"kind": KIND, "version": VERSION, "settings": dict(settings), "state": coded})


def read_checkpoint(path: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of the same run; reading runs no code.

    Raises
    ------
    CheckpointError
        If the file is truncated, of another kind, or belongs to another model, other data or other settings.
    """
    tensors, facts = load_tensors(path)
    if facts.get("kind") != KIND or facts.get("version") != VERSION:
        raise CheckpointError(f"{path} is no checkpoint of training by this version; use another path, or move it away")
    saved = facts["settings"]
    for name in dict.fromkeys([*settings, *saved]):
        if saved.get(name) == settings.get(name):
            continue
        if name in ("model", "data"):
            raise CheckpointError(
                f"{path} is a checkpoint of {'another model' if name == 'model' else 'other data'}; give another path "
                "or move it away"
            )
        raise CheckpointError(
            f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; resume "
            "with the same settings, or give another path"
        )
    state: dict[str, Any] = decode(facts["state"], tensors)
    return state
