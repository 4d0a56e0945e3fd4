"""Matrices too large for memory, in files of NumPy's format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError, OutputError


@contextmanager
def new_matrix(path: str | Path, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a matrix whose memory is a file, which gets its name when the body has ended without an error.

    Raises
    ------
    OutputError
        If the folder does not exist, cannot be written, or has no space for the whole matrix.
    DataError
        If NumPy has no such dtype.
    """
    path = Path(path)
    try:
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise DataError(f"files of NumPy's format cannot hold {dtype}; convert inputs to torch.float32") from error
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid4().hex[:8]}.tmp")
    try:
        try:
            matrix = np.lib.format.open_memmap(temporary, mode="w+", dtype=numpy_dtype, shape=shape)
            _reserve(temporary)
            yield torch.from_numpy(matrix)
            matrix.flush()
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists, is writable and has "
            f"{shape[0] * shape[1] * numpy_dtype.itemsize / 1e9:.3g} GB of space"
        ) from error


def _reserve(path: Path) -> None:
    """Take the space on the disk now: a memory map that meets a full one ends the process."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
