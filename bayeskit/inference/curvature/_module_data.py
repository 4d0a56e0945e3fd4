"""Checks of a network and its inputs before their curvature is computed."""

from __future__ import annotations

from torch import Tensor, nn

from bayeskit._core.flat_networks import FlatNetwork
from bayeskit._core.module_functions import check_finite, functional_result, trial_run
from bayeskit.errors import DataError, ShapeError

BLOCK_SIZE = 1 << 22  # largest number of entries of Jacobians or output curvatures held at once
_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv2d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
)


def _trainable_layers(module: nn.Module) -> list[nn.Module]:
    """Return torch's own layers that have parameters to train."""
    layers = [m for m in module.modules() if isinstance(m, _LAYERS)]
    return [m for m in layers if any(p.requires_grad for p in m.parameters(recurse=False))]


def check_network_data(network: FlatNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the detached inputs ``(n, ...)`` and outputs ``(n, k)``, or raise if either is not finite or does not fit.

    Outputs that are random, or depend on other inputs, raise a ``ModelError``.
    """
    if not isinstance(x, Tensor) or x.dim() < 1 or not len(x):
        raise ShapeError(f"x must be a tensor with at least one input, (n, ...), not {getattr(x, 'shape', type(x))}")
    if x.is_floating_point() and x.dtype != network.vector.dtype:
        raise DataError(f"x is {x.dtype} but the parameters are {network.vector.dtype}; convert one of them")
    if x.device != network.vector.device:
        raise DataError(f"x is on {x.device} but the parameters are on {network.vector.device}; move one of them")
    x = x.detach()
    check_finite(x, "x")
    trial_run(network.module, x, _trainable_layers)
    found = functional_result(network.module, {}, x[:1]).shape
    if len(found) > 2:
        raise ShapeError(f"the module must return one row of outputs per input, (n, k), not {tuple(found)} for one")
    outputs = network.outputs(x)
    check_finite(outputs, "the network's output")
    return x, outputs
