"""Losses and epochs of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

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

    @property
    def epochs_since_best(self) -> int:
        """Epochs completed after that of the lowest validation loss."""
        return self.num_epochs - (0 if self.best_epoch is None else self.best_epoch + 1)

    def end_epoch(self) -> None:
        """Count the steps since the last epoch as one."""
        self.epoch_ends.append(self.num_steps)

    def add_validation(self, loss: float) -> bool:
        """Add the validation loss of the epoch that ended; return whether it is the lowest so far."""
        is_lowest = self.best_epoch is None or loss < self.validation[self.best_epoch]
        self.validation.append(loss)
        if math.isnan(loss) or not is_lowest:
            return False
        self.best_epoch = self.num_epochs - 1
        return True

    def epoch_losses(self) -> list[float]:
        """Return the mean loss of each epoch."""
        starts = [0, *self.epoch_ends]
        return [math.fsum(self.losses[a:b]) / (b - a) for a, b in zip(starts[:-1], self.epoch_ends, strict=True)]
