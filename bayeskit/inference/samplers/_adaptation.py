"""Warm-up: adaptation of step size, metric and trajectory length, shared by the chains of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.texts import short_repr
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers._hmc import HMC, HMCInfo, HMCState
from bayeskit.inference.samplers._metric import MAX_CROSS_DIMENSION, RANK, Metric, Moments, Window
from bayeskit.inference.samplers._scale_jumps import ScaleJumps, jump, scale_jumps, within_reach
from bayeskit.inference.samplers._starts import local_scale

# Dual averaging of the step size towards a target mean acceptance statistic.


class DualAveraging(NamedTuple):
    """Dual averaging of ``g`` log step sizes at once (Hoffman and Gelman 2014, section 3.2)."""

    step_size: Tensor  # (g,), in use
    # State of dual averaging, each (g,).
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


# Adaptation of the length of Hamiltonian trajectories during warm-up.


class TrajectoryState(NamedTuple):
    """State of the adaptation of trajectory lengths, in units of the whitened space."""

    log_length: Tensor  # (), in use
    log_average: Tensor  # (), over the iterations since the last restart
    second_moment: Tensor  # (), of the gradient
    count: Tensor  # type: ignore[assignment]  # ()


class TrajectoryRule(Protocol):
    """Rule for the trajectory length, which all chains share."""

    def start(self, like: Tensor) -> TrajectoryState:
        """Return the first state, in dtype and device of ``like``."""
        ...

    def update(
        self, state: TrajectoryState, before: Tensor, info: HMCInfo, mean: Tensor, metric: Metric, step_size: Tensor
    ) -> TrajectoryState:
        """Learn from one step that started at ``before``, ``(n, d)``."""
        ...

    def restart(
        self, state: TrajectoryState, correlation: Tensor | None, spread: Tensor | None = None
    ) -> TrajectoryState:
        """Adjust to a new metric.

        ``correlation (g, d, d)`` is the correlation matrix of the draws in a diagonal metric, ``spread (g, d, d)``
        their covariance in a dense one.
        """
        ...


@dataclass(frozen=True)
class ChEES:
    """Trajectory length that maximises ChEES, the change in the estimator of the expected square.

    ChEES is the mean of ``(|x' - m|^2 - |x - m|^2)^2 / 4`` over proposals ``x'``, with distances in the metric. Its
    derivative by the trajectory length follows from each proposal and its momentum. Every iteration makes one
    stochastic gradient step on the log length, pooled over chains.

    Parameters
    ----------
    learning_rate : float, default 0.05
        Learning rate of the log length (Adam without momentum).
    cost_exponent : float in [0, 1], default 0
        The criterion is divided by the length to this power: 0 maximises the change per trajectory, 1 the change per
        gradient.

    References
    ----------
    Hoffman, M. D., Radul, A., Sountsov, P. (2021). An adaptive-MCMC scheme for setting
    trajectory lengths in Hamiltonian Monte Carlo. AISTATS 130, 3907-3915.
    Riou-Durand, L., Sountsov, P., Vogrinc, J., Margossian, C., Power, S. (2023). Adaptive tuning
    for Metropolis adjusted Langevin trajectories. AISTATS 206, 8102-8116 (the division by the length).

    Examples
    --------
    >>> from bayeskit.inference.samplers import ChEES
    >>> ChEES(cost_exponent=1.0)  # for equal costs of all draws
    ChEES(learning_rate=0.05, cost_exponent=1.0)
    """

    learning_rate: float = 0.05
    cost_exponent: float = 0.0

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, "(0, inf)")
        real_number("cost_exponent", self.cost_exponent, "[0, 1]")

    def start(self, like: Tensor) -> TrajectoryState:
        """Start at a quarter period of a standard normal distribution."""
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
        # Squares of far tail values overflow; a single overflow would stop the adaptation.
        gradient = torch.where(gradient.square().isfinite(), gradient, 0.0)
        count = state.count + 1
        second = torch.lerp(state.second_moment, gradient.square(), 0.05)
        size = (second / (1 - 0.95**count)).sqrt().clamp(min=torch.finfo(second.dtype).tiny)
        log_length = state.log_length + self.learning_rate * (gradient / size).clamp(-3.0, 3.0)
        log_average = torch.lerp(state.log_average, log_length, count**-0.6)
        return TrajectoryState(log_length, log_average, second, count)

    def restart(
        self, state: TrajectoryState, correlation: Tensor | None, spread: Tensor | None = None
    ) -> TrajectoryState:
        """Restart at a quarter period of the longest axis; the criterion also has maxima at its odd multiples."""
        zero = torch.zeros_like(state.count)
        log_length = zero + math.log(math.pi / 2)
        if correlation is not None:
            log_length = log_length + _longest(correlation).log()
        return TrajectoryState(log_length, log_length, zero, zero)


@dataclass(frozen=True)
class LongestAxis:
    """Trajectory length as a fixed share of the period of the longest axis in the metric.

    The length of this axis is the square root of the largest eigenvalue of the correlation matrix. A quarter period is
    best for means. A shorter trajectory is best for log likelihoods, which are even about the mode and whose means
    tempered ladders estimate.

    Parameters
    ----------
    share : float, default 0.2
        Share of the period.
    """

    share: float = 0.2

    def start(self, like: Tensor) -> TrajectoryState:
        """Start at the length for a standard normal distribution."""
        zero = like.new_zeros(())
        length = zero + math.log(2 * math.pi * self.share)
        return TrajectoryState(length, length, zero, zero)

    def update(
        self, state: TrajectoryState, before: Tensor, info: HMCInfo, mean: Tensor, metric: Metric, step_size: Tensor
    ) -> TrajectoryState:
        """Return the state unchanged."""
        return state

    def restart(
        self, state: TrajectoryState, correlation: Tensor | None, spread: Tensor | None = None
    ) -> TrajectoryState:
        """Set the length from the longest axis, the median over groups."""
        axes = correlation if spread is None else spread
        if axes is None:
            return state
        length = (2 * math.pi * self.share * _longest(axes)).log()
        return state._replace(log_length=length, log_average=length)


def _longest(covariance: Tensor) -> Tensor:
    """Return the standard deviation along the longest axis, the median over groups, ``(g, d, d) -> ()``."""
    return torch.linalg.eigvalsh(covariance)[..., -1].clamp(min=1.0).sqrt().median()


MetricKind = Literal["auto", "diagonal", "dense", "low_rank"]
# Draws in the last window for "auto": per dimension for a dense metric, in total for a low-rank metric.
_DRAWS_DENSE, _DRAWS_LOW_RANK = 2.5, 200
_MAX_LOW_RANK_DIMENSION = 10_000  # beyond, "auto" does not store the draws of a window
FLOOR = 0.1  # of an acceptance rate, so that one stuck chain does not determine the step size of all
_FIRST_CAREFUL = 2  # first window whose divergences count; metrics of earlier windows are rough
_MAX_DIVERGING = 1e-3  # share of a window's transitions
_FAR = 30.0  # factor by which a window changes a scale, from which on the step size is sought anew
_HALVINGS, _LEAPS = 12, 10  # trials of a rough step size
_SHARE_OF_WARMUP = 3  # of its gradients: most that is spent on jumps, in large batches
_FIRST_STEPS = 8  # limit of leapfrog steps in the first window; doubles with every window


class AdaptationState(NamedTuple):
    """State of an adapting kernel; ``g`` counts groups, ``n`` chains."""

    kernel: HMCState
    iteration: Tensor  # (), int64, on the host
    num_gradients: Tensor  # (), int64: over all chains
    num_calls: Tensor  # (), int64: batched gradients since the last window was closed
    planned_calls: Tensor  # (), int64, on the host: largest estimate so far of the remaining calls
    step: DualAveraging  # (g,) each
    wanted: Tensor  # (g,), target acceptance
    divergences: Tensor  # (g,), int64: since the last window was closed
    factor: Tensor  # of the metric, (g, d) or (g, d, d)
    centre: Tensor  # (g, d), mean over the last window
    trajectory: TrajectoryState
    moments: Moments  # of positions, in units of the metric about the centre where the metric is dense
    slopes: Moments  # of gradients, whitened where the metric is dense; empty where it is diagonal
    directions: Tensor  # of a low-rank metric, (g, d, k); k is zero for other metrics
    stretch: Tensor  # along them, (g, k)
    window: Window  # draws and gradients from which directions are estimated; without slots for other metrics
    anchor: Tensor  # (n, d): positions when the window before began, by which a chain that stands still is known
    restarts: Tensor  # (), int64, on the host: how often the warm-up began again
    jumps: ScaleJumps  # of the sampling phase; empty before it, and where trajectories cross the posterior


@dataclass(frozen=True)
class Adaptation:
    """A kernel that tunes another kernel for ``num_warmup`` steps and then keeps it fixed.

    The chains of a group (those at one temperature) share step size and metric. The adaptation pools them: dual
    averaging on the harmonic mean of their acceptance probabilities, covariances in doubling windows and, for
    Hamiltonian Monte Carlo, one trajectory length for all chains.

    Parameters
    ----------
    kernel : HMC or NUTS
        Its step size is the starting value; its other settings are kept.
    num_warmup : int
        Number of adapting steps.
    num_groups : int, default 1
        Chains ``i * n / num_groups`` to ``(i + 1) * n / num_groups - 1`` form group ``i``.
    target_acceptance : float, default 0.8
        Target acceptance rate. From the third window on, the rejection rate ``1 - target_acceptance`` is halved at the
        end of a window with too many divergences.
    max_steps : int, default 256
        Upper limit of the mean number of leapfrog steps.
    initial_variance : Tensor, optional
        Rough variances, such as the prior's, shape ``(d,)`` or ``(g, d)``.
    metric : {"auto", "diagonal", "dense", "low_rank"}, default "auto"
        "auto" is dense up to 400 dimensions if the last warm-up window has 2.5 draws per dimension, low-rank up to
        10,000 dimensions if it has 200 draws, and otherwise diagonal.
    trajectory : TrajectoryRule, optional
        :class:`ChEES` by default. Ignored by kernels that end trajectories themselves.
    num_samples : int, default 0
        Number of steps after the warm-up.
    least_length : float, default 1.75
        Least length of a trajectory in units of a dense or low-rank metric.

    Notes
    -----
    The decision to compile is made at the end of a window, from the number of remaining steps and the cost of those in
    the window. It uses counts in the state, so a resumed run decides alike. Short runs are not compiled.

    References
    ----------
    Hoffman, M. D., Gelman, A. (2014). The No-U-Turn sampler. Journal of Machine Learning
    Research 15, 1593-1623.
    Hoffman, M. D., Radul, A., Sountsov, P. (2021). An adaptive-MCMC scheme for setting
    trajectory lengths in Hamiltonian Monte Carlo. AISTATS 130, 3907-3915.
    """

    kernel: Any
    num_warmup: int
    num_groups: int = 1
    target_acceptance: float = 0.8
    max_steps: int = 256
    initial_variance: Tensor | None = None
    metric: MetricKind = "auto"
    trajectory: TrajectoryRule = ChEES()
    num_samples: int = 0
    # A little over a quarter period of a standard normal: means are then negatively correlated, squares hardly
    # correlated, and non-normal posteriors have longer trajectories.
    least_length: float = 1.75

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name, least in (("num_warmup", None), ("num_groups", 1), ("max_steps", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.num_warmup < 20:
            raise SettingsError(f"num_warmup must be at least 20 to tune step size and metric, not {self.num_warmup}")
        acceptance = real_number("target_acceptance", self.target_acceptance, "(0, 1)")
        object.__setattr__(self, "target_acceptance", acceptance)
        if self.metric not in get_args(MetricKind):
            kinds = ", ".join(map(repr, get_args(MetricKind)))
            raise SettingsError(f"metric must be one of {kinds}, not {self.metric!r}")

    def init(
        self, target: Target, position: Tensor, *, generator: torch.Generator, covariance: Tensor | None = None
    ) -> AdaptationState:
        """Evaluate the density at ``position``, shape ``(n, d)``, and find a rough step size.

        A rough ``covariance``, ``(d, d)``, or variances, ``(d,)``, replace the initial variance.
        """
        n, d = position.shape
        g = self.num_groups
        if n % g:
            raise SettingsError(f"{n} chains cannot be split into {g} groups of equal size")
        kind = self._kind(n // g, d)
        rank = min(RANK, d) if kind == "low_rank" else 0
        factor = self._first_factor(position, covariance, kind)
        state = self.kernel.init(target, position)
        metric = Metric(factor, is_dense=factor.dim() == 3)
        step_size, _ = self._rough_step_size(target, state, metric, generator)
        return AdaptationState(
            kernel=state,
            iteration=torch.zeros((), dtype=torch.int64),
            num_gradients=torch.zeros((), dtype=torch.int64, device=position.device),
            num_calls=torch.zeros((), dtype=torch.int64, device=position.device),
            planned_calls=torch.ones((), dtype=torch.int64),
            step=DualAveraging.start(step_size),
            wanted=torch.full_like(step_size, self.target_acceptance),
            divergences=torch.zeros(g, dtype=torch.int64, device=position.device),
            factor=factor,
            centre=position.reshape(g, n // g, d).mean(1),
            trajectory=self.trajectory.start(position),
            moments=Moments.start(g, position),
            slopes=Moments.start(g, position[:, : 0 if kind == "diagonal" else d]),
            directions=factor.new_zeros(g, d, rank),
            stretch=factor.new_ones(g, rank),
            window=Window.start(g, position, kind == "low_rank"),
            anchor=position,
            restarts=torch.zeros((), dtype=torch.int64),
            jumps=ScaleJumps.none(position),
        )

    def step(
        self, target: Target, state: AdaptationState, *, generator: torch.Generator
    ) -> tuple[AdaptationState, Any]:
        """Run one step of the kernel; during warm-up, adapt from it."""
        before, iteration = state.kernel.position, int(state.iteration)
        state, info = self.advance(target, state, self.tuned(state), generator)
        if iteration < self.num_warmup:
            used = state.factor
            state = self._learn(state, before, info, iteration)
            if iteration + 1 in self._windows()[1]:
                state = self._set_going(target, state, used, generator, iteration + 1)
        return state, info

    def stands_still(self, state: AdaptationState) -> Tensor:
        """Return which coordinates of which chains have not moved for a window or more, ``(n, d)``."""
        return (state.kernel.position == state.anchor) & _alive(state.kernel).unsqueeze(-1)

    def advance(
        self, target: Target, state: AdaptationState, kernel: Any, generator: torch.Generator
    ) -> tuple[AdaptationState, Any]:
        """Run one step of ``kernel``, as returned by :meth:`tuned`, without adaptation."""
        new, info = kernel.step(target, state.kernel, generator=generator)
        # Chains advance in lockstep: the longest trajectory determines the cost for all.
        longest, spent = info.num_steps.amax(), 0
        if len(state.jumps.column):
            if bool(info.diverging.any()):  # jumps may visit the region in which this trajectory was inaccurate
                is_visited, spent = within_reach(target, new, state.jumps)
                info = info._replace(diverging=info.diverging & ~is_visited)
            new, gradients = jump(target, kernel, new, state.jumps, generator)
            spent += gradients
        return state._replace(
            kernel=new,
            iteration=state.iteration + 1,
            num_gradients=state.num_gradients + longest * info.num_steps.numel() + spent,
            num_calls=state.num_calls + longest,
        ), info

    def with_jumps(self, target: Target, state: AdaptationState, generator: torch.Generator) -> AdaptationState:
        """Let chains jump from now on along scales on which trajectories would take too long."""
        budget = _SHARE_OF_WARMUP * int(state.num_gradients)
        jumps, spent = scale_jumps(target, state.centre[0], _deviation(state.factor)[0], budget, generator)
        return state._replace(jumps=jumps, num_gradients=state.num_gradients + spent)

    def planned(self, state: AdaptationState) -> Any:
        """Return the kernel with the number of remaining calls, which decides whether they are compiled."""
        return self.kernel.with_settings(planned_calls=int(state.planned_calls))

    def tuned(self, state: AdaptationState) -> Any:
        """Return the kernel with the current adaptation."""
        changes: dict[str, object] = {"step_size": self._per_chain(state), "metric": self._metric(state)}
        if isinstance(self.kernel, HMC):
            # Early metrics are inaccurate and not worth long trajectories; the limit doubles with every window.
            closed = sum(end <= int(state.iteration) for end in self._windows()[1])
            limit = float(min(self.max_steps, _FIRST_STEPS << closed))
            if int(state.iteration) >= self._windows()[1][-1]:
                limit = float(self.max_steps)
            length = state.trajectory.log_length.exp()
            if state.factor.dim() == 3 or state.stretch.shape[-1]:
                length = length.clamp(min=self.least_length)
            steps = (length / state.step.step_size).median()
            changes["num_steps"] = min(max(float(steps), 1.0), limit)
        return self.kernel.with_settings(planned_calls=int(state.planned_calls), **changes)

    @property
    def window_ends(self) -> list[int]:
        """Iterations of the warm-up before which a window of draws ends."""
        return list(self._windows()[1])

    # -- adaptation -------------------------------------------------------------------------

    def _learn(self, state: AdaptationState, before: Tensor, info: Any, iteration: int) -> AdaptationState:
        acceptance = self._acceptance(state.kernel, info.acceptance_rate)
        diverging = (info.diverging & _alive(state.kernel)).reshape(self.num_groups, -1).sum(-1)
        state = state._replace(
            step=state.step.update(acceptance, state.wanted), divergences=state.divergences + diverging
        )
        first, ends = self._windows()
        if first <= iteration < ends[-1]:
            state = self._observe(state)
        if isinstance(self.kernel, HMC) and iteration >= ends[0]:
            state = self._learn_trajectory(state, before, info)
        if iteration + 1 in ends:
            state = self._close_window(self._careful(self._plan(state, iteration + 1), iteration + 1))
        if iteration + 1 == self.num_warmup:
            state = self._plan(state, iteration + 1)
            trajectory = state.trajectory._replace(log_length=state.trajectory.log_average)
            state = state._replace(step=state.step._replace(step_size=state.step.averaged), trajectory=trajectory)
        return state

    def _plan(self, state: AdaptationState, iteration: int) -> AdaptationState:
        """Estimate the remaining calls from the calls per iteration since the end of the last window."""
        begin = max((end for end in self._windows()[1] if end < iteration), default=0)
        left = self.num_warmup + self.num_samples - iteration
        planned = left * int(state.num_calls) // (iteration - begin)
        return state._replace(
            num_calls=torch.zeros_like(state.num_calls),
            planned_calls=state.planned_calls.clamp(min=planned),
        )

    def _careful(self, state: AdaptationState, iteration: int) -> AdaptationState:
        """Raise the target acceptance of groups with many divergences, as in the neck of a funnel."""
        ends = self._windows()[1]
        number = ends.index(iteration)
        wanted = state.wanted
        if number >= _FIRST_CAREFUL:
            transitions = (iteration - ends[number - 1]) * len(state.kernel.position) // self.num_groups
            often = state.divergences > _MAX_DIVERGING * transitions
            wanted = torch.where(often, 1 - 0.5 * (1 - wanted), wanted)
        return state._replace(wanted=wanted, divergences=torch.zeros_like(state.divergences))

    def _acceptance(self, chains: HMCState, rate: Tensor) -> Tensor:
        """Return the harmonic mean acceptance over the living chains of each group, ``(g,)``."""
        # The harmonic mean gives most weight to the chains of lowest acceptance. No step size helps chains at zero
        # density, so they are excluded.
        alive = _alive(chains).reshape(self.num_groups, -1).to(rate)
        reciprocal = rate.reshape(self.num_groups, -1).clamp(min=FLOOR).reciprocal()
        return alive.sum(-1) / (alive * reciprocal).sum(-1).clamp(min=1.0)

    def _learn_trajectory(self, state: AdaptationState, before: Tensor, info: Any) -> AdaptationState:
        per_group = before.shape[0] // self.num_groups
        step_size = state.step.step_size.repeat_interleave(per_group)
        centre = state.centre.repeat_interleave(per_group, 0)
        trajectory = self.trajectory.update(state.trajectory, before, info, centre, self._metric(state), step_size)
        return state._replace(trajectory=trajectory)

    def _windows(self) -> tuple[int, list[int]]:
        return _windows_of(self.num_warmup)

    def _observe(self, state: AdaptationState) -> AdaptationState:
        """Add the positions and gradients of the chains to the moments of the window."""
        position, gradient = state.kernel.position, state.kernel.gradient
        alive = _alive(state.kernel)
        if state.factor.dim() == 2:
            state = state._replace(moments=state.moments.update(position, alive))
            if len(state.window.draws[0]):
                slopes = state.slopes.update(gradient, alive)
                state = state._replace(slopes=slopes, window=state.window.update(position, gradient, alive))
            return state
        metric = self._metric(state)
        centre = state.centre.repeat_interleave(len(position) // self.num_groups, 0)
        return state._replace(
            moments=state.moments.update(metric.whiten(position - centre), alive),
            # Contiguous memory as in a restored checkpoint: products of views with another offset round differently.
            slopes=state.slopes.update(metric.to_momentum(gradient.clone()), alive),
        )

    def _close_window(self, state: AdaptationState) -> AdaptationState:
        moments, correlation, spread = state.moments, None, None
        directions, stretch, low_rank = state.directions, state.stretch, bool(len(state.window.draws[0]))
        if state.factor.dim() == 3:
            # Row-major as in a restored checkpoint: products of the other layout round differently.
            root = moments.root_with(state.slopes)
            factor = (state.factor @ root).contiguous()
            # In earlier windows chains that are on their way lie apart, which is no reason for long trajectories.
            spread = moments.spread(root) if int(state.iteration) == self._windows()[1][-1] else None
            centre = state.centre + (state.factor @ moments.mean.unsqueeze(-1)).squeeze(-1)
        else:
            variance = moments.variance(state.factor.square())
            if low_rank:
                variance = (variance / state.slopes.variance(1 / state.factor.square())).sqrt()
            factor, centre = variance.sqrt(), moments.mean
            if low_rank:
                directions, stretch = state.window.directions(factor)
            correlation = moments.correlation() if moments.cross.dim() == 3 and not low_rank else None
        return state._replace(
            factor=factor,
            centre=centre,
            slopes=Moments.start(self.num_groups, state.slopes.mean),
            trajectory=self.trajectory.restart(state.trajectory, correlation, spread),
            step=DualAveraging.start(state.step.averaged),
            moments=Moments.start(self.num_groups, state.kernel.position),
            directions=directions,
            stretch=stretch,
            window=Window.start(self.num_groups, state.kernel.position, low_rank),
        )

    def _set_going(
        self, target: Target, state: AdaptationState, used: Tensor, generator: torch.Generator, iteration: int
    ) -> AdaptationState:
        """Give coordinates that stand still a new scale, and a new step size where the metric was far off."""
        still = self.stands_still(state)
        # Chains that are stuck are known by the last window and what follows it, which may be short.
        anchor = state.anchor if iteration == self._windows()[1][-1] else state.kernel.position
        state = state._replace(anchor=anchor)
        everywhere = still.reshape(self.num_groups, -1, still.shape[-1]).all(1)  # (g, d)
        changed = _deviation(state.factor) / _deviation(used)
        far = ((changed > _FAR) | (changed < 1 / _FAR)).any(-1) | everywhere.any(-1)  # (g,)
        if not bool(far.any()):
            return state
        spent = 0
        if bool(everywhere.any()):
            state, spent = self._rescaled(target, state, everywhere)
        step_size, probes = self._rough_step_size(target, state.kernel, self._metric(state), generator)
        step_size = torch.where(far, step_size, state.step.step_size)
        return state._replace(step=DualAveraging.start(step_size), num_gradients=state.num_gradients + spent + probes)

    def _rescaled(self, target: Target, state: AdaptationState, still: Tensor) -> tuple[AdaptationState, int]:
        """Give coordinates, ``(g, d)`` bool, the scale that the density has at the chains; also return evaluations."""
        position, columns = state.kernel.position, still.any(0).nonzero().flatten()
        beta = torch.as_tensor(self.kernel.beta).to(position).expand(len(position))
        found, spent = local_scale(target, position, beta, columns)
        scale = torch.ones_like(_deviation(state.factor))
        scale[:, columns] = found.log().unflatten(0, (self.num_groups, -1)).median(1).values.exp()
        return state._replace(factor=_with_scale(state.factor, scale, still)), spent

    # -- helpers ----------------------------------------------------------------------------

    def _first_factor(self, position: Tensor, covariance: Tensor | None, kind: MetricKind) -> Tensor:
        """Return the factor of the first metric of the warm-up, ``(g, d)`` or ``(g, d, d)``."""
        g, d = self.num_groups, position.shape[-1]
        variance = self.initial_variance
        if covariance is not None:
            variance = covariance if covariance.dim() == 1 else covariance.diagonal()
        deviation = torch.ones_like(position[:g])
        if variance is not None:
            deviation = variance.to(deviation).expand(g, d).sqrt()
        if kind != "dense":
            return deviation.clone()
        if covariance is not None and covariance.dim() == 2:
            # Scaled, because variances may differ by more than the floating-point precision.
            scaled = covariance.to(deviation) / (deviation[0].unsqueeze(-1) * deviation[0])
            root, failed = torch.linalg.cholesky_ex(scaled)
            if not bool(failed) and bool(root.isfinite().all()):
                return (deviation.unsqueeze(-1) * root).contiguous()
        return torch.diag_embed(deviation)

    def _kind(self, chains: int, d: int) -> MetricKind:
        if self.metric == "dense" and d > MAX_CROSS_DIMENSION:
            raise SettingsError(
                f"a dense metric is possible up to {MAX_CROSS_DIMENSION} dimensions, not {d}; take metric='low_rank'"
            )
        if self.metric != "auto":
            return self.metric
        _, ends = self._windows()
        draws = chains * (ends[-1] - (ends[-2] if len(ends) > 1 else 0))
        if d <= MAX_CROSS_DIMENSION and draws >= _DRAWS_DENSE * d:
            return "dense"
        return "low_rank" if draws >= _DRAWS_LOW_RANK and d <= _MAX_LOW_RANK_DIMENSION else "diagonal"

    def _metric(self, state: AdaptationState) -> Metric:
        parts = (state.factor, state.directions, state.stretch)
        factor, directions, stretch = (part[0] for part in parts) if self.num_groups == 1 else parts
        if not stretch.shape[-1]:
            return Metric(factor, is_dense=state.factor.dim() == 3)
        return Metric(factor, False, directions, stretch)

    def _per_chain(self, state: AdaptationState) -> Tensor:
        if self.num_groups == 1:
            return state.step.step_size
        return state.step.step_size.repeat_interleave(state.kernel.position.shape[0] // self.num_groups)

    def _rough_step_size(
        self, target: Target, state: HMCState, metric: Metric, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        """Shorten the step of each group until single leapfrog steps are accepted half the time; also return gradients.

        Steps are halved at first, then shortened by ever larger factors, and at last bisected.
        """
        g = self.num_groups
        per_group = state.position.shape[0] // g
        start = torch.as_tensor(self.kernel.step_size, dtype=state.position.dtype, device=state.position.device)
        # One value per group: the chains of a group share the adaptation.
        step_size = start.expand(state.position.shape[0]).reshape(g, -1).log().mean(1).exp()
        planned = getattr(self.kernel, "planned_calls", 1)
        alive = _alive(state).reshape(g, -1).to(step_size)
        probes = 0

        def is_long(step_size: Tensor) -> Tensor:
            nonlocal probes
            probes += len(state.position)
            probe = HMC(
                step_size.repeat_interleave(per_group), metric, 1.0, beta=self.kernel.beta, planned_calls=planned
            )
            _, info = probe.step(target, state, generator=generator)
            rate = (alive * info.acceptance_rate.reshape(g, -1)).sum(-1) / alive.sum(-1)  # NaN if all are dead
            return rate < 0.5

        shorter, too_long = 0.5, step_size
        for trial in range(_HALVINGS + _LEAPS):
            long = is_long(step_size)
            if not bool(long.any()):
                break
            if trial >= _HALVINGS:
                shorter = shorter**2
            too_long = torch.where(long, step_size, too_long)
            step_size = torch.where(long, shorter * step_size, step_size).clamp(min=torch.finfo(step_size.dtype).tiny)
        for _ in range(_LEAPS if shorter < 0.5 else 0):
            middle = (too_long.log() + step_size.log()).mul(0.5).exp()
            long = is_long(middle)
            too_long, step_size = torch.where(long, middle, too_long), torch.where(long, step_size, middle)
        return step_size, probes


def _deviation(factor: Tensor) -> Tensor:
    """Return standard deviations ``(g, d)`` of a factor ``(g, d)`` or ``(g, d, d)``."""
    return factor if factor.dim() == 2 else factor.norm(dim=-1)


def _with_scale(factor: Tensor, scale: Tensor, where: Tensor) -> Tensor:
    """Return a factor in which some coordinates, ``(g, d)`` bool, are independent and have the ``scale (g, d)``."""
    if factor.dim() == 2:
        return torch.where(where, scale, factor)
    apart = where.unsqueeze(-1) | where.unsqueeze(-2)
    return torch.where(apart, torch.diag_embed(torch.where(where, scale, 0.0)), factor).contiguous()


@cache  # asked several times in each iteration
def _windows_of(num_warmup: int) -> tuple[int, list[int]]:
    """Return the first slow iteration and the end of each doubling window."""
    first = max(5, round(0.01 * num_warmup))
    last = num_warmup - max(5, round(0.1 * num_warmup))
    ends, size, end = [], max(10, round(0.02 * num_warmup)), first
    while end + size <= last:
        end += size
        if end + 2 * size > last:
            end = last
        ends.append(end)
        size *= 2
    return first, ends or [last]


def _alive(chains: HMCState) -> Tensor:
    """Return which chains can move, ``(n,)``: density and gradient are finite."""
    return chains.log_density.isfinite() & chains.gradient.isfinite().all(-1)
