"""Dual averaging: a step size that makes a mean acceptance statistic equal a wanted value."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DualAveraging(NamedTuple):
    """Nesterov's dual averaging on the log step size, ``g`` of them at once.

    Attributes
    ----------
    step_size : Tensor
        Shape ``(g,)``, in use.
    error_sum, log_average, centre, count : Tensor
        Shape ``(g,)``: what the algorithm remembers.

    References
    ----------
    Hoffman, M. D., Gelman, A. (2014). The No-U-Turn sampler. Journal of Machine Learning
    Research 15, 1593-1623, section 3.2.

    Examples
    --------
    >>> import torch
    >>> state = DualAveraging.start(torch.tensor([1.0]))
    >>> for _ in range(200):  # acceptance falls with the step size and is 0.8 at 0.5
    ...     state = state.update((1.05 - 0.5 * state.step_size).clamp(0, 1), wanted=0.8)
    >>> round(float(state.averaged), 1)
    0.5
    """

    step_size: Tensor
    error_sum: Tensor
    log_average: Tensor
    centre: Tensor
    count: Tensor  # type: ignore[assignment]

    @classmethod
    def start(cls, step_size: Tensor) -> DualAveraging:
        """Start at ``step_size``, leaning towards twice as large ones."""
        log_step, zero = step_size.log(), torch.zeros_like(step_size)
        return cls(step_size, zero, log_step, log_step + math.log(2.0), zero)

    def update(self, acceptance: Tensor, wanted: float | Tensor) -> DualAveraging:
        """Learn from one mean acceptance statistic, shape ``(g,)``."""
        count = self.count + 1
        weight = 1 / (count + 10)
        error_sum = torch.lerp(self.error_sum, wanted - acceptance, weight)
        log_step = self.centre - count.sqrt() / 0.05 * error_sum
        log_average = torch.lerp(self.log_average, log_step, count**-0.75)
        return DualAveraging(log_step.exp(), error_sum, log_average, self.centre, count)

    @property
    def averaged(self) -> Tensor:
        """The step size to keep after adaptation, ``(g,)``."""
        return self.log_average.exp()
