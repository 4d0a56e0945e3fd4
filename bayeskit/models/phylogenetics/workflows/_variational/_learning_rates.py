"""Learning rates by the step, and the pace at which a run reads its schedules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from bayeskit.errors import SettingsError
from bayeskit.extend import real_number, whole_number


@dataclass(frozen=True)
class LearningRates:
    """Step sizes of Adam with stepwise decay.

    Parameters
    ----------
    topologies, branch_lengths : float, default 0.001
        Initial step sizes of the network's logits, and of the parameters of all continuous distributions: branch
        lengths, and the normal distribution of parameters of substitution and site rates.
    factor : float, default 0.75
        Decay factor, above 0 and at most 1.
    every : int, default 20,000
        Number of steps between two decays.

    Raises
    ------
    SettingsError
        If a number lies outside its domain.

    Examples
    --------
    >>> LearningRates(0.01, 0.02, factor=0.5, every=10)(25)
    (0.0025, 0.005)
    """

    topologies: float = 1e-3
    branch_lengths: float = 1e-3
    factor: float = 0.75
    every: int = 20_000

    def __post_init__(self) -> None:
        for name in ("topologies", "branch_lengths"):
            if not 0 <= real_number(name, getattr(self, name)) < float("inf"):
                raise SettingsError(
                    f"learning rates: {name}={getattr(self, name)} is negative or not finite. Remedy: give a number "
                    "such as 0.001."
                )
        if not 0 < real_number("factor", self.factor) <= 1:
            raise SettingsError(
                f"learning rates: factor={self.factor} lies outside (0, 1]. Remedy: give a number such as 0.75."
            )
        whole_number("every", self.every, 1)

    def __call__(self, step: int) -> tuple[float, float]:
        """Return both step sizes at a step counted from zero."""
        scale = self.factor ** (step // self.every)
        return self.topologies * scale, self.branch_lengths * scale


#: The position at which a step reads the schedules, from the number of steps before it and the position before.
Pace = Callable[[int, float], float]


def by_steps(iteration: int, before: float) -> float:
    """Read schedules at the number of steps taken, but never before the last position."""
    return max(float(iteration), before)


class BudgetPace:
    """Positions that reach the last step when a time budget ends, or when all steps are taken, if that comes first.

    The budget of a resumed run is spread over what is left of the schedules.
    """

    def __init__(self, seconds: float, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._num_steps, self._clock = seconds, num_steps, clock
        self._begin, self._first = clock(), math.nan

    def __call__(self, iteration: int, before: float) -> float:
        """Return the next position; see `Pace`."""
        if math.isnan(self._first):
            self._first = before
        share = min((self._clock() - self._begin) / self._seconds, 1.0)
        return max(by_steps(iteration, before), self._first + share * (self._num_steps - self._first))
