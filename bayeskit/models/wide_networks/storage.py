"""Where matrices go: tensors that are given, and files of NumPy's format for those too large for memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError, OutputError, SettingsError, ShapeError


def check_out(out: Sequence[Tensor | None], shape: tuple[int, int], inputs: Sequence[Tensor]) -> None:
    """Refuse tensors that matrices do not fit into, or whose memory is in use while matrices are computed.

    Raises
    ------
    ShapeError, SettingsError
    """
    dtype, taken = inputs[0].dtype, list(inputs)
    for matrix in out:
        if matrix is None:
            continue
        if not isinstance(matrix, Tensor):
            raise SettingsError(f"out must be a tensor, not {type(matrix).__name__}; torch.from_numpy makes one")
        if matrix.shape != shape or matrix.dtype != dtype:
            raise ShapeError(f"out must be {shape} {dtype}, not {tuple(matrix.shape)} {matrix.dtype}")
        if matrix.requires_grad:
            raise SettingsError("out requires gradients, and results have none; pass out.detach()")
        if _overlaps_itself(matrix):
            raise SettingsError("entries of out share memory, as those of expanded tensors do; pass out.contiguous()")
        if any(_overlap(matrix, x) for x in taken):
            raise SettingsError("out shares memory with the inputs or another result; pass a tensor of its own")
        taken.append(matrix)


def check_paths(*paths: str | Path | None) -> None:
    """Refuse files that are named twice, or not as NumPy's are.

    Raises
    ------
    SettingsError
    """
    named = [Path(path) for path in paths if path is not None]
    if not named:
        raise SettingsError("name a file for at least one kernel: save(x, nngp=..., ntk=...)")
    for path in named:
        if path.suffix != ".npy":
            raise SettingsError(
                f"files are in NumPy's format: name it {str(path.with_suffix('.npy'))!r}, not {str(path)!r}"
            )
    if len({path.resolve() for path in named}) < len(named):
        raise SettingsError(f"{str(named[0])!r} is named for both kernels; each needs a file of its own")


def _overlaps_itself(x: Tensor) -> bool:
    """Whether steps along one axis of a matrix lead into what those along another have passed."""
    passed = 0
    for step, count in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if step <= passed:
            return True
        passed += step * (count - 1)
    return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the stretches of memory in which two tensors lie have a part in common."""
    if x.device != y.device or not (x.numel() and y.numel()):
        return False
    (first, last), (start, end) = _stretch(x), _stretch(y)
    return first < end and start < last


def _stretch(x: Tensor) -> tuple[int, int]:
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + length * x.element_size()


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
