"""Files that are whole or absent: write to a temporary name, then rename."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bayeskit.errors import CheckpointError, OutputError


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a killed process or a full disk leaves the old file whole.

    Raises
    ------
    OutputError
        If the folder does not exist, cannot be written, or the disk is full.
    """
    path = Path(path)
    # Not tempfile's: its files are private, and a result should have the permissions the user's mask gives.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists, is writable and has space"
        ) from error


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts as one safetensors file."""
    contiguous: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # The format refuses tensors that share memory.
        contiguous[name] = value.clone() if value.untyped_storage().data_ptr() in memory else value
        memory.add(value.untyped_storage().data_ptr())
    write_atomically(path, save(contiguous, metadata={"bayeskit": json.dumps(dict(facts))}))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote; reading runs no code.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["bayeskit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a file of bayeskit ({error}); give another path, and where it is a checkpoint "
            "that was cut off, one that does not exist yet starts anew"
        ) from error
    return tensors, facts


def as_output_folder(path: str | Path) -> Path:
    """Create ``path`` if needed and check that it can be written.

    Raises
    ------
    OutputError
        If it cannot.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {folder}: {error.strerror or error}; give another folder, "
            "on the command line by --out"
        ) from error
    return folder
