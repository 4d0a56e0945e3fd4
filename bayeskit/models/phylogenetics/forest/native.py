"""The two passes over many topologies as compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics.forest import library as forest_library
from bayeskit.models.phylogenetics.forest.patterns import CODE_BASE
from bayeskit.models.phylogenetics.forest.plan import Plan

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
    results = {"values": inputs.new_empty(inputs.shape[:2])}
    if slopes:
        results |= _room_for_slopes(inputs, frequencies)
    _call(plan, inputs, frequencies, results)
    return tuple(results.values())


def row_values(plan: Plan, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """Compute the log-likelihood of each row of the root.

    Parameters
    ----------
    plan, inputs, frequencies
        As for `run`.

    Returns
    -------
    Tensor
        Shape `(samples, topologies, rows)`.
    """
    values = inputs.new_empty((*inputs.shape[:2], plan.patterns.num_root_rows))
    _call(plan, inputs, frequencies, {"row_values": values})
    return values


def row_slopes(plan: Plan, inputs: Tensor, frequencies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of a weighted sum of the log-likelihoods of the root's rows.

    Parameters
    ----------
    plan, inputs, frequencies
        As for `run`.
    weights : Tensor
        Shape `(samples, topologies, rows)`.

    Returns
    -------
    by_input, by_frequency : Tensor
        Shapes of `inputs` and `frequencies`.
    """
    results = _room_for_slopes(inputs, frequencies)
    _call(plan, inputs, frequencies, results, weights.contiguous())
    return results["slopes"], results["frequency_slopes"]


def _room_for_slopes(inputs: Tensor, frequencies: Tensor) -> dict[str, Tensor]:
    tensors = {"slopes": inputs, "frequency_slopes": frequencies}
    return {name: torch.empty_like(like, memory_format=torch.contiguous_format) for name, like in tensors.items()}


def _call(
    plan: Plan, inputs: Tensor, frequencies: Tensor, results: Mapping[str, Tensor], row_weights: Tensor | None = None
) -> None:
    """Fill some results, by their names in the struct."""
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
    getattr(_library(), f"{kind}_{_NAMES[inputs.dtype]}")(ctypes.byref(task))


def _library() -> ctypes.CDLL | None:
    return forest_library.load(ctypes.sizeof(_Task))
