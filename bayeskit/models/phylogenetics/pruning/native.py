"""The two passes of pruning as compiled code, made on first use and kept for the next process."""

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
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics.pruning.passes import root_rows
from bayeskit.models.phylogenetics.pruning.plan import CODE_BASE, PruningPlan

__all__ = ["CompiledPasses", "arrays_of", "can_run", "load"]

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
        f"the likelihood of trees runs as tensor operations, many times slower than compiled code: {problem}",
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


# The two passes as one operation of torch, so that they are a single node where operations are recorded or compiled.

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


def _functions() -> ctypes.CDLL | None:
    return load(ctypes.sizeof(_Task))


def arrays_of(plan: PruningPlan, copied: bool = False) -> list[Tensor]:
    """Return the arrays of a plan in the order of the struct; `copied`, or shared with the plan."""
    patterns, hanging, slots = plan
    reading = np.zeros((CODE_BASE, 4), dtype=np.uint8)
    reading[: len(patterns.group.reading)] = patterns.group.reading
    tables: list[NDArray[Any]] = [patterns.codes, patterns.representatives, patterns.weights, patterns.counts]
    if copied:
        # The next plan may reuse the slots. Those of the tips and of all taxa together are the first ones.
        used = np.union1d(np.arange(len(patterns.taxa) + 1), slots)
        slots = np.searchsorted(used, slots).astype(np.int32)
        tables = [table[used] for table in tables]
    arrays = [*tables, patterns.masks, reading, hanging.order, hanging.factors, hanging.roots, slots]
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


class CompiledPasses:
    """The two passes over the topologies of a plan as compiled code, on a CPU; `can_run` must be true.

    `copied` keeps what the plan needs, also after the next plan.
    """

    table_size = 0  # of one vector: the code does a few vectors of one topology at a time

    def __init__(self, plan: PruningPlan, dtype: torch.dtype, device: torch.device, copied: bool = False) -> None:
        self._arrays = arrays_of(plan, copied)
        self.counts, self.constant = root_rows(plan, dtype, device)

    def log_likelihoods(self, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
        """Return log-likelihoods `(samples, topologies)` and, on request, gradients by inputs and by frequencies.

        `inputs` are lengths `(samples, topologies, edges)` or matrices `(..., edges, 4, 4)`, `frequencies` `(..., 4)`.
        """
        return tuple(torch.ops.bayeskit.prune(self._arrays, inputs, frequencies, None, 0, slopes))

    def row_values(self, inputs: Tensor, frequencies: Tensor) -> Tensor:
        """Return the log-likelihood of each root row, `(samples, topologies, rows)`; see `log_likelihoods`."""
        values: Tensor = torch.ops.bayeskit.prune(self._arrays, inputs, frequencies, None, len(self.counts), False)[0]
        return values

    def row_slopes(self, inputs: Tensor, frequencies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients by inputs and by frequencies of the weighted sum of the root rows' log-likelihoods."""
        # The weights are (samples, topologies, rows), the other arguments as for `log_likelihoods`.
        by_input, by_frequency = torch.ops.bayeskit.prune(
            self._arrays, inputs, frequencies, weights, len(self.counts), True
        )
        return by_input, by_frequency


_OPERATIONS = torch.library.Library("bayeskit", "FRAGMENT")
_OPERATIONS.define(
    "prune(Tensor[] plan, Tensor inputs, Tensor frequencies, Tensor? row_weights, int num_rows, bool slopes)"
    " -> Tensor[]"
)


def _results(
    inputs: Tensor, frequencies: Tensor, row_weights: Tensor | None, num_rows: int, slopes: bool
) -> dict[str, Tensor]:
    """Return room for the results, by their names in the struct."""
    results = {}
    if row_weights is None:
        name, shape = ("row_values", (num_rows,)) if num_rows else ("values", ())
        results[name] = inputs.new_empty((*inputs.shape[:2], *shape))
    if slopes:
        results |= {
            "slopes": inputs.new_empty(inputs.shape),
            "frequency_slopes": frequencies.new_empty(frequencies.shape),
        }
    return results


@torch.library.register_fake("bayeskit::prune", lib=_OPERATIONS)
def _shapes(plan: list[Tensor], *arguments: Any) -> list[Tensor]:
    return list(_results(*arguments).values())


def _prune(
    plan: list[Tensor], inputs: Tensor, frequencies: Tensor, row_weights: Tensor | None, num_rows: int, slopes: bool
) -> list[Tensor]:
    """Run the compiled code; a gradient of single rows takes a weight for each, `(samples, topologies, rows)`."""
    results = _results(inputs, frequencies, row_weights, num_rows, slopes)
    inputs, frequencies = inputs.contiguous(), frequencies.contiguous()
    row_weights = None if row_weights is None else row_weights.contiguous()
    samples, topologies = inputs.shape[:2]
    num_patterns, num_taxa = plan[0].shape[1], plan[4].shape[0]
    task = _Task(
        num_patterns,
        num_taxa,
        topologies,
        samples,
        *(tensor.data_ptr() for tensor in (*plan, inputs, frequencies)),
        None if row_weights is None else row_weights.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in results.items()},
    )
    kind = "matrices" if inputs.dim() == 5 else "uniform"
    getattr(_functions(), f"{kind}_{_NAMES[inputs.dtype]}")(ctypes.byref(task))
    return list(results.values())


_OPERATIONS.impl("prune", _prune, "CPU")
