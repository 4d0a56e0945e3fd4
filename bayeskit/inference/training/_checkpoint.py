"""The checkpoint of a training run, and whether it belongs to the run that resumes from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.folders import Schema
from bayeskit._core.storage import decode, encode, loaded_tensors, save_tensors, setting_as_json
from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.objectives._objective import Objective
from bayeskit.inference.training._learner import Learner
from bayeskit.inference.training._minibatches import Batches
from bayeskit.inference.training._plan import TrainingPlan

_SCHEMA = Schema("a checkpoint of training", 4)
_ROUNDING = 1e-4  # of log densities in single precision on several machines


def settings_of_run(
    plan: TrainingPlan,
    objective: Any,
    learner: Learner,
    batches: Batches,
    held_out: Batches | None,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> dict[str, Any]:
    """Return the settings that have to be equal in a checkpoint and in the run that resumes it, as JSON."""
    defaults = {n: v for n, v in optimizer.defaults.items() if not isinstance(v, Tensor)}
    device = next(iter(learner.trained().values())).device
    settings = {
        "data": batches.fingerprint(),
        "objective": _objective_settings(objective),
        "optimizer": [type(optimizer).__name__, setting_as_json(defaults)],
        "schedule": type(scheduler).__name__,
        "batch_size": plan.batch_size,
        "gradient_clipping": plan.gradient_clipping,
        "patience": plan.patience,
        "validation": None if held_out is None else held_out.fingerprint(),
        "validation_objective": _objective_settings(plan.validation_objective),
        "seed": plan.seed,
        "compile": bool(plan.compile),
        "precision": plan.precision,
        "processes": plan.ranks.world_size,
        "torch": torch.__version__,
        "device": device.type,
        # After the settings on which it depends, such as the first minibatch.
        "model": learner.fingerprint(next(batches.all()).to(device)),
    }
    settings_as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return settings_as_read


def _objective_settings(objective: Any) -> list[Any] | None:
    if objective is None:
        return None
    learnt = objective.state_dict() if isinstance(objective, Objective) else {}
    found = {*learnt, "max_plate_nesting"}  # set during the first run unless given
    return [
        type(objective).__name__,
        {n: setting_as_json(v) for n, v in vars(objective).items() if n not in found and not n.startswith("_")},
    ]


def write_checkpoint(path: str | Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a run atomically, with the ``settings`` that a resumed run must share."""
    tensors: dict[str, Tensor] = {}
    try:
        coded = encode(dict(state), tensors, {}, "the state")
    except CheckpointError as error:
        raise SettingsError(
            f"the run cannot be kept in a checkpoint ({error}). Remedy: use an optimiser and a schedule whose states "
            "are tensors and numbers, or train without a checkpoint."
        ) from error
    save_tensors(path, tensors, {"settings": dict(settings), "state": coded}, _SCHEMA)


@contextmanager
def restored_checkpoint(path: str | Path, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the state of the same run to a block that restores it; CheckpointError for any other file."""
    with loaded_tensors(path, _SCHEMA) as (tensors, facts):
        _compare_settings(path, facts["settings"], settings)
        yield decode(facts["state"], tensors, {})


def _compare_settings(path: str | Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*settings, *saved]):
        if saved.get(name) == settings.get(name):
            continue
        if name in ("model", "data"):
            place = _difference(saved.get(name), settings.get(name))
            if place is not None:
                raise CheckpointError(
                    f"{path} is a checkpoint of {'another model' if name == 'model' else 'other data'}{place}; give "
                    "another path or move it away"
                )
            continue
        raise CheckpointError(
            f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; resume "
            "with the same settings, or give another path"
        )


def _difference(saved: Any, now: Any, name: str = "") -> str | None:
    """Return where two fingerprints differ by more than the rounding of other machines, or None."""
    if isinstance(saved, dict) and isinstance(now, dict):
        differences = (_difference(saved.get(key), now.get(key), key) for key in dict.fromkeys([*saved, *now]))
        return next((place for place in differences if place is not None), None)
    if isinstance(saved, float) and isinstance(now, float):
        same = math.isclose(saved, now, rel_tol=_ROUNDING, abs_tol=_ROUNDING) or saved != saved and now != now
        return None if same else f": {name} is {saved:.6g} there and {now:.6g} here"
    return None if saved == now else f": {name} is {saved!r:.60} there and {now!r:.60} here" if name else ""
