"""Losses and epochs of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["History", "TrainingEnding"]

TrainingEnding = Literal["finished", "early stopping", "time budget", "interrupted"]


@dataclass
class History:
    """Losses and epochs so far."""

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
        """Steps taken in the current epoch."""
        return self.num_steps - (self.epoch_ends[-1] if self.epoch_ends else 0)

    def epoch_losses(self) -> list[float]:
        """Return the mean loss of each epoch."""
        starts = [0, *self.epoch_ends]
        return [math.fsum(self.losses[a:b]) / (b - a) for a, b in zip(starts[:-1], self.epoch_ends, strict=True)]
