"""The two passes over many topologies as compiled code, made on first use by the machine's C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics.forest.patterns import CODE_BASE
from bayeskit.models.phylogenetics.forest.plan import Plan

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_COMPILE_SECONDS = 120
_NAMES = {torch.float64: "double", torch.float32: "float"}


class _Task(ctypes.Structure):
    """The arguments, in the order of the struct of the same name in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("patterns", "taxa", "topologies", "samples")),
        *((name, ctypes.c_void_p) for name in ("codes", "representatives", "weights", "counts", "masks", "reading")),
        *((name, ctypes.c_void_p) for name in ("order", "factors", "roots", "slots", "inputs", "frequencies")),
        *((name, ctypes.c_void_p) for name in ("values", "slopes", "frequency_slopes")),
    ]


def can_run(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether there is compiled code for a type and a device; compiles it on the first call."""
    return device.type == "cpu" and dtype in _NAMES and _library() is not None


def run(plan: Plan, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
    """Compute log-likelihoods and, on request, their gradients.

    Parameters
    ----------
    plan : Plan
        How to go through the topologies.
    inputs : Tensor
        Branch lengths `(samples, topologies, edges)` or transition matrices `(samples, topologies, edges, 4, 4)`.
    frequencies : Tensor
        Shape `(samples, topologies, 4)`.
    slopes : bool
        Whether to compute gradients.

    Returns
    -------
    tuple of Tensor
        The values `(samples, topologies)`, and on request their gradients by inputs and by frequencies.
    """
    inputs, frequencies = inputs.detach().contiguous(), frequencies.detach().contiguous()
    samples, topologies = inputs.shape[:2]
    outputs = [inputs.new_empty((samples, topologies))]
    outputs += [torch.empty_like(inputs), torch.empty_like(frequencies)] if slopes else []
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
        *(tensor.data_ptr() for tensor in (inputs, frequencies, *outputs)),
    )
    kind = "matrices" if inputs.dim() == 5 else "uniform"
    getattr(_library(), f"{kind}_{_NAMES[inputs.dtype]}")(ctypes.byref(task))
    return tuple(outputs)


@lru_cache
def _library() -> ctypes.CDLL | None:
    """Load the compiled code; warn once and return None where that is impossible."""
    candidates = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    compiler = next((name for name in candidates if name and shutil.which(name)), None)
    if compiler is None:
        problem = "no C++ compiler was found; install g++ or clang++"
    else:
        try:
            return ctypes.CDLL(str(_compiled(compiler)))
        except subprocess.SubprocessError as error:
            problem = f"{compiler} failed ({str(getattr(error, 'stderr', '') or error)[:200]})"
        except OSError as error:
            problem = f"the compiled code cannot be stored or loaded ({error})"
    warnings.warn(
        f"the likelihood of many topologies runs as plain tensor operations, many times slower: {problem}",
        CompilationWarning,
        stacklevel=4,
    )
    return None


def _folder() -> Path:
    """Return the user's cache folder, or a new temporary one where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayeskit"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="bayeskit_"))


def _compiled(compiler: str) -> Path:
    """Return the shared library for this machine, compiled once and kept in the user's cache."""
    processor = platform.processor() + platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\0".join((_SOURCE.read_text(), *_FLAGS, version, processor))
    folder = _folder()
    path = folder / f"forest_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            subprocess.run(
                [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                check=True,
                timeout=_COMPILE_SECONDS,
            )
            made.replace(path)
    return path
