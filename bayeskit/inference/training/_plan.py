"""Settings of a training run, and the optimiser that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

from bayeskit.distributed import Ranks
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers._driver import Control

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a run; see :func:`~bayeskit.inference.training.fit`."""

    num_epochs: int | None
    num_steps: int | None
    batch_size: int | None
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None
    gradient_clipping: float | None
    patience: int | None
    validation_objective: Any
    seed: int
    compile: bool | tuple[nn.Module, ...]
    precision: Precision
    ranks: Ranks
    on_ranks_device: bool
    control: Control


def default_optimizer(parameters: list[Tensor]) -> torch.optim.Adam:
    """Return Adam with learning rate 1e-3, fused over all parameters if torch supports it."""
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.Adam(parameters, fused=fused)


def new_optimizer(make: Callable[[list[Tensor]], Any], parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimiser of a list of parameters; SettingsError if it is none, or needs a closure."""
    if isinstance(make, PyroOptim):
        raise SettingsError(
            f"optimizer is a Pyro optimiser, {type(make).__name__}, for pyro.infer.SVI; give a torch optimiser, such "
            "as functools.partial(torch.optim.Adam, lr=1e-3)"
        )
    try:
        optimizer = make(parameters)
    except (AssertionError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"optimizer={make!r:.80} does not make a torch optimiser of a list of parameters ({error}); give a class "
            "of torch.optim, or functools.partial of it with its settings"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise SettingsError(
            "optimizer must make, from a list of parameters, a torch optimiser that needs no closure, such as "
            f"functools.partial(torch.optim.Adam, lr=1e-3), not {type(optimizer).__name__}"
        )
    return optimizer
