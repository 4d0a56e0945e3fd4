"""How long a Hamiltonian trajectory should be, learnt during warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.hmc import HMCInfo
from bayeskit.inference.samplers.metric import Metric


class TrajectoryState(NamedTuple):
    """What a rule remembers; lengths are in units of the whitened space."""

    log_length: Tensor  # (), in use
    log_average: Tensor  # (), over the iterations since the last restart
    second_moment: Tensor  # (), of the gradient
    count: Tensor  # type: ignore[assignment]  # ()


class TrajectoryRule(Protocol):
    """A way to choose the length of a trajectory, one for all chains."""

    def start(self, like: Tensor) -> TrajectoryState:
        """Return the first state, in dtype and device of ``like``."""
        ...

    def update(
        self, state: TrajectoryState, before: Tensor, info: HMCInfo, mean: Tensor, metric: Metric, step_size: Tensor
    ) -> TrajectoryState:
        """Learn from one step that started at ``before``, ``(n, d)``."""
        ...

    def restart(self, state: TrajectoryState, correlation: Tensor | None) -> TrajectoryState:
        """Take a new metric into account; ``correlation`` is what is left of it, ``(g, d, d)``."""
        ...


@dataclass(frozen=True)
class ChEES:
    """Maximise the change in squared distance from the centre.

    ChEES, the change in the estimator of the expected square, is the mean of ``(|x' - m|^2 - |x - m|^2)^2 / 4``
    over proposals ``x'``. Its derivative with respect to the length of the trajectory is
    known from each proposal and its momentum, so a stochastic gradient step on the log length is
    taken after every iteration, pooled over chains. Distances are measured in the metric.

    Parameters
    ----------
    learning_rate : float, default 0.05
        Of the log length; gradients are scaled by their own size (Adam without momentum).
    cost_exponent : float in [0, 1], default 0
        The criterion is divided by the length to this power: 0 maximises the change a step, 1 the
        change a gradient.

    References
    ----------
    Hoffman, M. D., Radul, A., Sountsov, P. (2021). An adaptive-MCMC scheme for setting
    trajectory lengths in Hamiltonian Monte Carlo. AISTATS 130, 3907-3915.
    Riou-Durand, L., Sountsov, P., Vogrinc, J., Margossian, C., Power, S. (2023). Adaptive tuning
    for Metropolis adjusted Langevin trajectories. AISTATS 206, 8102-8116 (the division by the length).
    """

    learning_rate: float = 0.05
    cost_exponent: float = 0.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise SettingsError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 <= self.cost_exponent <= 1:
            raise SettingsError(f"cost_exponent must lie in [0, 1], not {self.cost_exponent}")

    def start(self, like: Tensor) -> TrajectoryState:
        """Start at a quarter period of a standard normal."""
        zero = like.new_zeros(())
        length = zero + math.log(math.pi / 2)
        return TrajectoryState(length, length, zero, zero)

    def update(
        self, state: TrajectoryState, before: Tensor, info: HMCInfo, mean: Tensor, metric: Metric, step_size: Tensor
    ) -> TrajectoryState:
        """Take one stochastic gradient step on the log length."""
        start, end = metric.whiten(before - mean), metric.whiten(info.proposal - mean)
        change = end.square().sum(-1) - start.square().sum(-1)
        slope = change * (end * info.momentum).sum(-1) * step_size * info.num_steps
        criterion = 0.25 * change.square()
        usable = slope.isfinite() & criterion.isfinite()
        weight = torch.where(usable, info.acceptance_rate, 0.0)
        total = (weight * torch.where(usable, criterion, 0.0)).sum()
        ascent = (weight * torch.where(usable, slope, 0.0)).sum()
        # Gradient of log(criterion / length^c), up to the positive factor total / sum(weight).
        scale = weight.sum().clamp(min=1e-8)
        gradient = (ascent - self.cost_exponent * total) / scale
        # Squares of what is far out in a tail overflow, and one of them would end all learning.
        gradient = torch.where(gradient.square().isfinite(), gradient, 0.0)
        count = state.count + 1
        second = torch.lerp(state.second_moment, gradient.square(), 0.05)
        size = (second / (1 - 0.95**count)).sqrt().clamp(min=torch.finfo(second.dtype).tiny)
        log_length = state.log_length + self.learning_rate * (gradient / size).clamp(-3.0, 3.0)
        log_average = torch.lerp(state.log_average, log_length, count**-0.6)
        return TrajectoryState(log_length, log_average, second, count)

    def restart(self, state: TrajectoryState, correlation: Tensor | None) -> TrajectoryState:
        """Start anew at a quarter period of the longest axis: the criterion has maxima at its odd multiples, too."""
        zero = torch.zeros_like(state.count)
        log_length = zero + math.log(math.pi / 2)
        if correlation is not None:
            log_length = log_length + _longest(correlation).log()
        return TrajectoryState(log_length, log_length, zero, zero)


@dataclass(frozen=True)
class LongestAxis:
    """A fixed share of the period of the longest axis that the metric leaves.

    The longest axis is the square root of the largest eigenvalue of the correlation matrix. A quarter of a
    period would decorrelate means best; log likelihoods, which are even about the mode and which
    tempered ladders average, want less.

    Parameters
    ----------
    share : float, default 0.2
        Of the period.
    """

    share: float = 0.2

    def start(self, like: Tensor) -> TrajectoryState:
        """Start as on a standard normal."""
        zero = like.new_zeros(())
        length = zero + math.log(2 * math.pi * self.share)
        return TrajectoryState(length, length, zero, zero)

    def update(
        self, state: TrajectoryState, before: Tensor, info: HMCInfo, mean: Tensor, metric: Metric, step_size: Tensor
    ) -> TrajectoryState:
        """Learn nothing from single steps."""
        return state

    def restart(self, state: TrajectoryState, correlation: Tensor | None) -> TrajectoryState:
        """Measure the longest axis; the median over groups decides."""
        if correlation is None:
            return state
        length = (2 * math.pi * self.share * _longest(correlation)).log()
        return state._replace(log_length=length, log_average=length)


def _longest(correlation: Tensor) -> Tensor:
    """Return the standard deviation along the longest axis, the median over groups, ``(g, d, d) -> ()``."""
    return torch.linalg.eigvalsh(correlation)[..., -1].clamp(min=1.0).sqrt().median()
