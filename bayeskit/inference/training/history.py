"""Settings of a training run, and what happens in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayeskit.distributed import Ranks
from bayeskit.inference.samplers.driver import Control
from bayeskit.inference.training.result import Ending


@dataclass(frozen=True)
class Plan:
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
    precision: str
    ranks: Ranks
    on_ranks_device: bool
    control: Control


@dataclass
class History:
    """What has happened so far."""

    losses: list[float] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best_epoch: int | None = None

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return len(self.losses)

    @property
    def num_epochs(self) -> int:
        """Epochs completed."""
        return len(self.epoch_ends)

    @property
    def steps_of_epoch(self) -> int:
        """Steps taken of the epoch under way."""
        return self.num_steps - (self.epoch_ends[-1] if self.epoch_ends else 0)

    def epoch_losses(self) -> list[float]:
        """Return the mean loss of each epoch."""
        starts = [0, *self.epoch_ends]
        return [math.fsum(self.losses[a:b]) / (b - a) for a, b in zip(starts[:-1], self.epoch_ends, strict=True)]


class Moment(NamedTuple):
    """What a forward pass may change, as it was before."""

    stream: Tensor
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Good(NamedTuple):
    """Parameters with which the loss was finite, and what belongs to them."""

    parameters: dict[str, Tensor]
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Outcome(NamedTuple):
    """What a run leaves behind."""

    history: History
    parameters: dict[str, Tensor]
    ending: Ending
    best_epoch: int | None
    seconds: float
