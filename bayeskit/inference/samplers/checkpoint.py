"""Save and restore a run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._files import load_tensors, save_tensors
from bayeskit.errors import CheckpointError

VERSION = 2


def flatten(state: Any, prefix: str = "state") -> dict[str, Tensor]:
    """Name every tensor of nested named tuples: ``state.kernel.position`` and so on."""
    if isinstance(state, Tensor):
        return {prefix: state}
    result: dict[str, Tensor] = {}
    for field in state._fields:
        result.update(flatten(getattr(state, field), f"{prefix}.{field}"))
    return result


def restore(template: Any, tensors: dict[str, Tensor], prefix: str = "state") -> Any:
    """Rebuild named tuples shaped like ``template`` from named tensors.

    Raises
    ------
    CheckpointError
        If a tensor is missing or has another shape or dtype.
    """
    if isinstance(template, Tensor):
        found = tensors.get(prefix)
        if found is None or found.shape != template.shape or found.dtype != template.dtype:
            raise CheckpointError(
                f"the checkpoint's {prefix!r} does not fit this run; it was written by another version or model"
            )
        # In memory of its own, as in the run that saved it: products of what begins elsewhere round differently.
        return found.to(template.device, copy=True)
    return type(template)(*(restore(getattr(template, f), tensors, f"{prefix}.{f}") for f in template._fields))


def save_checkpoint(
    path: str | Path,
    state: Any,
    records: dict[str, Tensor],
    generator: torch.Generator,
    settings: dict[str, Any],
    iteration: int,
    seconds: float,
) -> None:
    """Write the whole state of a run; an older checkpoint is replaced in one step or not at all."""
    tensors = flatten(state)
    tensors |= {f"record.{name}": tensor for name, tensor in records.items()}
    tensors["generator"] = generator.get_state()
    save_tensors(path, tensors, {"version": VERSION, "settings": settings, "iteration": iteration, "seconds": seconds})


def load_checkpoint(
    path: str | Path, template: Any, generator: torch.Generator, settings: dict[str, Any]
) -> tuple[Any, dict[str, Tensor], int, float]:
    """Read a checkpoint of the same run: returns the state, what was recorded, the iteration and the seconds spent.

    Raises
    ------
    CheckpointError
        If the file is truncated, or belongs to another model or to other settings, or is the folder of a run in groups.
    """
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path} is a folder, as runs in groups use for their checkpoints; give the num_groups that it was "
            "written with, or the path of a file"
        )
    tensors, facts = load_tensors(path)
    if (
        facts.get("version") != VERSION
        or not {"settings", "iteration", "seconds"} <= facts.keys()
        or "generator" not in tensors
    ):
        raise CheckpointError(f"{path} is no checkpoint by this version of bayeskit; move it, or give another path")
    saved = facts["settings"]
    if saved.get("model") != settings["model"]:
        raise CheckpointError(
            f"{path} is a checkpoint of another model or of other data; give another path, or move it away"
        )
    for name in [*settings, *(extra for extra in saved if extra not in settings)]:
        if saved.get(name) != settings.get(name):
            raise CheckpointError(
                f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; "
                "resume with the same settings, or give another path"
            )
    state = restore(template, tensors)
    generator.set_state(tensors["generator"])
    records = {k.removeprefix("record."): v for k, v in tensors.items() if k.startswith("record.")}
    return state, records, int(facts["iteration"]), float(facts["seconds"])
