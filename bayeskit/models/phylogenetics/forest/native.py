"""The two passes over many topologies as compiled code, made on first use and kept for the next process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics.forest.plan import CODE_BASE, ForestPlan

__all__ = [
    "can_run",
    "load",
    "native_log_likelihoods",
    "native_row_slopes",
    "native_row_values",
]

# The compiled code: made on first use by the machine's C++ compiler, and kept for the next process.

#: The source file and its header.
_SOURCES = (Path(__file__).with_name("kernel.cpp"), Path(__file__).with_name("lanes.h"))
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 120
_lock = Lock()


def load(size_of_task: int) -> ctypes.CDLL | None:
    """Load the compiled code, whose argument struct has `size_of_task` bytes; warn once and return None on failure."""
    # Other threads wait while one thread compiles.
    with _lock:
        return _load_once(size_of_task)


@lru_cache
def _load_once(size_of_task: int) -> ctypes.CDLL | None:
    candidates = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    compiler = next((name for name in candidates if name and shutil.which(name)), None)
    if compiler is None:
        problem = "no C++ compiler was found; install g++ or clang++"
    else:
        try:
            library = _library(compiler)
            if library.size_of_task() == size_of_task:
                return library
            problem = "the compiled code takes other arguments than this version of bayeskit passes; reinstall bayeskit"
        except subprocess.SubprocessError as error:
            problem = f"{compiler} failed ({str(getattr(error, 'stderr', '') or error)[:200]})"
        except OSError as error:
            problem = f"the compiled code cannot be stored or loaded ({error})"
    warnings.warn(
        f"the likelihood of many topologies runs as tensor operations, many times slower than compiled code: {problem}",
        CompilationWarning,
        stacklevel=_level_of_caller(),
    )
    return None


def _level_of_caller() -> int:
    """Return the stack level of the first caller outside bayeskit and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("bayeskit", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _library(compiler: str) -> ctypes.CDLL:
    """Load the code from the first folder that holds it or is writable."""
    identity = _identity(compiler)
    problem = OSError("no folder can hold it")
    for folder in _folders():
        try:
            return ctypes.CDLL(str(_kept(folder, identity) or _made(folder, identity, compiler)))
        except OSError as error:  # the folder may be read-only, full, or not for code
            problem = error
    raise problem


def _identity(compiler: str) -> str:
    """Return a short text that differs for each source, compiler and processor."""
    processor = platform.processor() + platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = (*(source.read_text() for source in _SOURCES), *_FLAGS, version, processor)
    return _digest("\0".join(texts).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Yield the user's cache folder, and a folder of the user's own among temporary files."""
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the home folder is unknown
        yield (Path(cache) if cache else Path.home() / ".cache") / "bayeskit"
    if hasattr(os, "getuid"):
        folder = Path(tempfile.gettempdir()) / f"bayeskit_{os.getuid()}"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            # All users can write to the temporary folder; code of other users is not run.
            if status.st_uid == os.getuid() and not status.st_mode & 0o022:
                yield folder


def _kept(folder: Path, identity: str) -> Path | None:
    """Return the library in a folder, if any, and delete damaged libraries."""
    for path in folder.glob(f"forest_{identity}_*.so"):
        # Loading a truncated library could crash the process.
        if path.stem.rpartition("_")[2] == _digest(path.read_bytes()):
            return path
        path.unlink()
    return None


def _made(folder: Path, identity: str, compiler: str) -> Path:
    """Compile the library into a folder, under a name with the hash of its content."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "forest.so"
        subprocess.run(
            [compiler, *_FLAGS, str(_SOURCES[0]), "-o", str(made)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_COMPILE_SECONDS,
        )
        return made.replace(folder / f"forest_{identity}_{_digest(made.read_bytes())}.so")


# The two passes over many topologies as compiled code.

_NAMES = {torch.float64: "double", torch.float32: "float"}


class _Task(ctypes.Structure):
    """The arguments, in the order of the struct of the same name in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("patterns", "taxa", "topologies", "samples")),
        *((name, ctypes.c_void_p) for name in ("codes", "representatives", "weights", "counts", "masks", "reading")),
        *((name, ctypes.c_void_p) for name in ("order", "factors", "roots", "slots", "inputs", "frequencies")),
        *((name, ctypes.c_void_p) for name in ("row_weights", "values", "row_values", "slopes", "frequency_slopes")),
    ]


def can_run(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether there is compiled code for a type and a device; compiles it on the first call."""
    return device.type == "cpu" and dtype in _NAMES and _functions() is not None


def native_log_likelihoods(plan: ForestPlan, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
    """Return log-likelihoods `(samples, topologies)` and, on request, gradients by inputs and by frequencies.

    `inputs` are lengths `(samples, topologies, edges)` or matrices `(..., edges, 4, 4)`, `frequencies` `(..., 4)`.
    """
    results = {"values": inputs.new_empty(inputs.shape[:2])}
    if slopes:
        results |= _room_for_slopes(inputs, frequencies)
    _call(plan, inputs, frequencies, results)
    return tuple(results.values())


def native_row_values(plan: ForestPlan, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """Return the log-likelihood of each root row, `(samples, topologies, rows)`; see `native_log_likelihoods`."""
    values = inputs.new_empty((*inputs.shape[:2], plan.patterns.num_root_rows))
    _call(plan, inputs, frequencies, {"row_values": values})
    return values


def native_row_slopes(plan: ForestPlan, inputs: Tensor, frequencies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients by inputs and by frequencies of the weighted sum of the root rows' log-likelihoods."""
    # The weights are (samples, topologies, rows), the other arguments as for `native_log_likelihoods`.
    results = _room_for_slopes(inputs, frequencies)
    _call(plan, inputs, frequencies, results, weights.contiguous())
    return results["slopes"], results["frequency_slopes"]


def _room_for_slopes(inputs: Tensor, frequencies: Tensor) -> dict[str, Tensor]:
    tensors = {"slopes": inputs, "frequency_slopes": frequencies}
    return {name: torch.empty_like(like, memory_format=torch.contiguous_format) for name, like in tensors.items()}


def _call(
    plan: ForestPlan,
    inputs: Tensor,
    frequencies: Tensor,
    results: Mapping[str, Tensor],
    row_weights: Tensor | None = None,
) -> None:
    """Run the compiled code and fill `results`, whose keys are their names in the struct."""
    inputs, frequencies = inputs.detach().contiguous(), frequencies.detach().contiguous()
    samples, topologies = inputs.shape[:2]
    patterns, hanging = plan.patterns, plan.hanging
    reading = np.zeros((CODE_BASE, 4), dtype=np.uint8)
    reading[: len(patterns.group.reading)] = patterns.group.reading
    arrays = [patterns.codes, patterns.representatives, patterns.weights, patterns.counts, patterns.masks, reading]
    arrays += [np.ascontiguousarray(array) for array in (*hanging[:3], plan.slots)]
    task = _Task(
        patterns.codes.shape[1],
        len(patterns.taxa),
        topologies,
        samples,
        *(array.ctypes.data for array in arrays),
        *(tensor.data_ptr() for tensor in (inputs, frequencies)),
        None if row_weights is None else row_weights.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in results.items()},
    )
    kind = "matrices" if inputs.dim() == 5 else "uniform"
    getattr(_functions(), f"{kind}_{_NAMES[inputs.dtype]}")(ctypes.byref(task))


def _functions() -> ctypes.CDLL | None:
    return load(ctypes.sizeof(_Task))
