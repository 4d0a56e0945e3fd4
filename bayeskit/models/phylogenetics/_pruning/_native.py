"""The two passes of pruning as compiled code, made on first use and kept for the next process."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.errors import OutputError
from bayeskit.extend import FLAGS, raise_for_status
from bayeskit.models.phylogenetics._compiled_code import load_or_warn
from bayeskit.models.phylogenetics._pruning._passes import root_rows
from bayeskit.models.phylogenetics._pruning._plan import CODE_BASE, PruningPlan

# The compiled code: made on first use by the machine's C++ compiler, and kept for the next process.

#: The source file and its header.
_SOURCES = (Path(__file__).with_name("kernel.cpp"), Path(__file__).with_name("lanes.h"))
_FLAGS = (*FLAGS, "-std=c++17", "-fno-math-errno", "-fno-trapping-math")
_lock = Lock()


def load(size_of_task: int, real: str = "double", kind: str = "Uniform", states: int = 4) -> ctypes.CDLL | None:
    """Load the compiled code, whose argument struct has `size_of_task` bytes; warn once and return None on failure."""
    # Other threads wait while one thread compiles.
    with _lock:
        return _load_once(size_of_task, real, kind, states)


@lru_cache
def _load_once(size_of_task: int, real: str, kind: str, states: int) -> ctypes.CDLL | None:
    sources = {source.name: source.read_text() for source in _SOURCES}
    flags = (*_FLAGS, f"-DREAL={real}", f"-DKIND={kind}", f"-DSTATES={states}")
    return load_or_warn("forest", sources, flags, ("size_of_task", size_of_task), "likelihoods of trees")


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


def can_run(dtype: torch.dtype, device: torch.device, num_states: int = 4) -> bool:
    """Tell whether there is compiled code for a type, a device and some states; compiles it on the first call."""
    return device.type == "cpu" and dtype in _NAMES and _functions(dtype, "Uniform", num_states) is not None


def _functions(dtype: torch.dtype, kind: str, num_states: int) -> ctypes.CDLL | None:
    return load(ctypes.sizeof(_Task), _NAMES[dtype], kind, num_states)


def arrays_of(plan: PruningPlan, copied: bool = False) -> list[Tensor]:
    """Return the arrays of a plan in the order of the struct; `copied`, or shared with the plan."""
    patterns, hanging, slots = plan
    reading = np.zeros((CODE_BASE, patterns.num_states), dtype=np.uint8)
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

        `inputs` are lengths `(samples, topologies, edges)` or matrices `(..., edges, n, n)`, `frequencies` `(..., n)`.
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
    library = _functions(inputs.dtype, "Matrices" if inputs.dim() == 5 else "Uniform", frequencies.shape[-1])
    if library is None:  # after the other kind was made
        raise OutputError("the likelihood of trees can no longer be compiled; is the disk full?")
    raise_for_status(
        library.prune(ctypes.byref(task)), f"the likelihood of {topologies} trees of {num_patterns} patterns"
    )
    return list(results.values())


_OPERATIONS.impl("prune", _prune, "CPU")
