"""Warm-up: step size, metric and trajectory length, learnt across the chains of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.dual_averaging import DualAveraging
from bayeskit.inference.samplers.hmc import HMC, HMCState
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.moments import MAX_CROSS_DIMENSION, Moments
from bayeskit.inference.samplers.trajectory import ChEES, TrajectoryRule, TrajectoryState
from bayeskit.target import Target

MetricKind = Literal["auto", "diagonal", "dense"]
MAX_DENSE_DIMENSION = 128
FLOOR = 0.1  # of an acceptance rate, or one chain in trouble would set the step size of all
FIRST_STEPS = 8.0  # leapfrogs at most while the metric is still a guess


class Kernel(Protocol):
    """A kernel that can be tuned: :class:`HMC`, :class:`NUTS`."""

    step_size: float | Tensor
    beta: float | Tensor

    def init(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density at ``position``."""
        ...

    def step(self, target: Target, state: HMCState, *, generator: torch.Generator) -> tuple[HMCState, Any]:
        """Take one step; the info has at least the fields of :class:`KernelInfo`."""
        ...

    def with_settings(self, **changes: object) -> Any:
        """Return a copy with some settings replaced."""
        ...


class AdaptationState(NamedTuple):
    """State of an adapting kernel; ``g`` counts groups, ``n`` chains."""

    kernel: HMCState
    iteration: Tensor  # (), int64, on the host
    num_gradients: Tensor  # (), int64: over all chains
    step: DualAveraging  # (g,) each
    factor: Tensor  # of the metric, (g, d) or (g, d, d)
    centre: Tensor  # (g, d), mean over the last window
    trajectory: TrajectoryState
    moments: Moments


@dataclass(frozen=True)
class Adaptation:
    """A kernel around a kernel that tunes it for ``num_warmup`` steps and then leaves it alone.

    The chains of a group (those at one temperature) share step size and metric and pool what they learn: dual
    averaging on the harmonic mean of their acceptance probabilities, covariances in doubling windows, and,
    for Hamiltonian Monte Carlo, one trajectory length for all chains.

    Parameters
    ----------
    kernel : HMC or NUTS
        Settings that stay fixed; its step size is the starting value.
    num_warmup : int
        Adapting steps.
    num_groups : int, default 1
        Chains ``i * n / num_groups`` to ``(i + 1) * n / num_groups - 1`` form group ``i``.
    target_acceptance : float, default 0.8
    max_steps : int, default 256
        Upper limit of the mean number of leapfrog steps.
    initial_variance : Tensor, optional
        Shape ``(d,)`` or ``(g, d)``; rough variances, such as the prior's.
    metric : {"auto", "diagonal", "dense"}, default "auto"
        "auto" is dense up to 128 dimensions where warm-up brings at least eight draws a dimension.
    trajectory : TrajectoryRule, optional
        By default :class:`ChEES`. Kernels that end trajectories themselves do not ask.

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

    def __post_init__(self) -> None:
        for name, least in (("num_warmup", None), ("num_groups", 1), ("max_steps", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.num_warmup < 20:
            raise SettingsError(f"num_warmup must be at least 20 to tune step size and metric, not {self.num_warmup}")
        acceptance = real_number("target_acceptance", self.target_acceptance, between=(0, 1))
        object.__setattr__(self, "target_acceptance", acceptance)
        if self.metric not in ("auto", "diagonal", "dense"):
            raise SettingsError(f"metric must be 'auto', 'diagonal' or 'dense', not {self.metric!r}")

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> AdaptationState:
        """Evaluate the density at ``position``, shape ``(n, d)``, and find a rough step size."""
        n, d = position.shape
        g = self.num_groups
        if n % g:
            raise SettingsError(f"{n} chains cannot be split into {g} groups of equal size")
        deviation = torch.ones_like(position[:g])
        if self.initial_variance is not None:
            deviation = self.initial_variance.to(deviation).expand(g, d).sqrt()
        dense = self._is_dense(n // g, d)
        state = self.kernel.init(target, position)
        metric = Metric(deviation, is_dense=False)
        step_size = self._rough_step_size(target, state, metric, generator)
        return AdaptationState(
            kernel=state,
            iteration=torch.zeros((), dtype=torch.int64),
            num_gradients=torch.zeros((), dtype=torch.int64, device=position.device),
            step=DualAveraging.start(step_size),
            factor=torch.diag_embed(deviation) if dense else deviation.clone(),
            centre=torch.zeros_like(deviation),
            trajectory=self.trajectory.start(position),
            moments=Moments.start(g, position),
        )

    def step(
        self, target: Target, state: AdaptationState, *, generator: torch.Generator
    ) -> tuple[AdaptationState, Any]:
        """Step the kernel; during warm-up learn from the step."""
        before, iteration = state.kernel.position, int(state.iteration)
        state, info = self.advance(target, state, self.tuned(state), generator)
        if iteration < self.num_warmup:
            state = self._learn(state, before, info, iteration)
        return state, info

    def advance(
        self, target: Target, state: AdaptationState, kernel: Any, generator: torch.Generator
    ) -> tuple[AdaptationState, Any]:
        """Step ``kernel``, as :meth:`tuned` returned it, and learn nothing."""
        new, info = kernel.step(target, state.kernel, generator=generator)
        # Chains advance in lockstep: the longest trajectory is paid for by all.
        gradients = state.num_gradients + info.num_steps.amax() * info.num_steps.numel()
        return state._replace(kernel=new, iteration=state.iteration + 1, num_gradients=gradients), info

    def tuned(self, state: AdaptationState) -> Any:
        """Return the kernel with what has been learnt so far."""
        changes: dict[str, object] = {"step_size": self._per_chain(state), "metric": self._metric(state)}
        if isinstance(self.kernel, HMC):
            limit = float(self.max_steps)
            if int(state.iteration) < self._windows()[1][0]:
                limit = min(limit, FIRST_STEPS)
            steps = (state.trajectory.log_length.exp() / state.step.step_size).median()
            changes["num_steps"] = min(max(float(steps), 1.0), limit)
        return self.kernel.with_settings(**changes)

    # -- learning ---------------------------------------------------------------------------

    def _learn(self, state: AdaptationState, before: Tensor, info: Any, iteration: int) -> AdaptationState:
        acceptance = self._acceptance(state.kernel.log_density, info.acceptance_rate)
        state = state._replace(step=state.step.update(acceptance, self.target_acceptance))
        first, ends = self._windows()
        if first <= iteration < ends[-1]:
            state = state._replace(
                moments=state.moments.update(state.kernel.position, state.kernel.log_density.isfinite())
            )
        if isinstance(self.kernel, HMC) and iteration >= ends[0]:
            state = self._learn_trajectory(state, before, info)
        if iteration + 1 in ends:
            state = self._close_window(state)
        if iteration + 1 == self.num_warmup:
            trajectory = state.trajectory._replace(log_length=state.trajectory.log_average)
            state = state._replace(step=state.step._replace(step_size=state.step.averaged), trajectory=trajectory)
        return state

    def _acceptance(self, log_density: Tensor, rate: Tensor) -> Tensor:
        """Return the harmonic mean acceptance of each group, which minds the chains that fare worst, ``(g,)``.

        Chains lost where there is no density cannot be helped by any step size and do not count.
        """
        alive = log_density.isfinite().reshape(self.num_groups, -1).to(rate)
        reciprocal = rate.reshape(self.num_groups, -1).clamp(min=FLOOR).reciprocal()
        return alive.sum(-1) / (alive * reciprocal).sum(-1).clamp(min=1.0)

    def _learn_trajectory(self, state: AdaptationState, before: Tensor, info: Any) -> AdaptationState:
        per_group = before.shape[0] // self.num_groups
        step_size = state.step.step_size.repeat_interleave(per_group)
        centre = state.centre.repeat_interleave(per_group, 0)
        trajectory = self.trajectory.update(state.trajectory, before, info, centre, self._metric(state), step_size)
        return state._replace(trajectory=trajectory)

    def _windows(self) -> tuple[int, list[int]]:
        """Return the first slow iteration and the end of each doubling window."""
        first = max(5, round(0.04 * self.num_warmup))
        last = self.num_warmup - max(5, round(0.1 * self.num_warmup))
        ends, size, end = [], max(10, round(0.05 * self.num_warmup)), first
        while end + size <= last:
            end += size
            if end + 2 * size > last:
                end = last
            ends.append(end)
            size *= 2
        return first, ends or [last]

    def _close_window(self, state: AdaptationState) -> AdaptationState:
        before = state.factor if state.factor.dim() == 2 else state.factor.square().sum(-1).sqrt()
        deviation = state.moments.variance(before.square()).sqrt()
        full = state.moments.cross.dim() == 3
        correlation = state.moments.correlation() if full else None
        factor = deviation
        if state.factor.dim() == 3 and correlation is not None:
            root, info = torch.linalg.cholesky_ex(correlation)
            usable = (info == 0)[:, None, None]
            identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
            # Row by row, as a checkpoint gives it back: products of the other layout round differently.
            factor = (deviation.unsqueeze(-1) * torch.where(usable, root, identity)).contiguous()
            correlation = None  # the metric takes it up
        return state._replace(
            factor=factor,
            centre=state.moments.mean,
            trajectory=self.trajectory.restart(state.trajectory, correlation),
            step=DualAveraging.start(state.step.averaged),
            moments=Moments.start(self.num_groups, state.kernel.position),
        )

    # -- helpers ----------------------------------------------------------------------------

    def _is_dense(self, chains: int, d: int) -> bool:
        if self.metric != "auto":
            if self.metric == "dense" and d > MAX_CROSS_DIMENSION:
                raise SettingsError(f"a dense metric is kept up to {MAX_CROSS_DIMENSION} dimensions, not {d}")
            return self.metric == "dense"
        _, ends = self._windows()
        last = ends[-1] - (ends[-2] if len(ends) > 1 else 0)
        return d <= MAX_DENSE_DIMENSION and chains * last >= 8 * d

    def _metric(self, state: AdaptationState) -> Metric:
        dense = state.factor.dim() == 3
        return Metric(state.factor[0] if self.num_groups == 1 else state.factor, is_dense=dense)

    def _per_chain(self, state: AdaptationState) -> Tensor:
        if self.num_groups == 1:
            return state.step.step_size
        return state.step.step_size.repeat_interleave(state.kernel.position.shape[0] // self.num_groups)

    def _rough_step_size(self, target: Target, state: HMCState, metric: Metric, generator: torch.Generator) -> Tensor:
        """Halve the step size of each group until single leapfrog steps are accepted half the time."""
        g = self.num_groups
        per_group = state.position.shape[0] // g
        start = torch.as_tensor(self.kernel.step_size, dtype=state.position.dtype, device=state.position.device)
        # One a group: chains share what they learn.
        step_size = start.expand(state.position.shape[0]).reshape(g, -1).log().mean(1).exp()
        planned = getattr(self.kernel, "planned_calls", 1)
        for _ in range(40):
            probe = HMC(
                step_size.repeat_interleave(per_group), metric, 1.0, beta=self.kernel.beta, planned_calls=planned
            )
            _, info = probe.step(target, state, generator=generator)
            alive = state.log_density.isfinite().reshape(g, -1).to(step_size)
            rate = (alive * info.acceptance_rate.reshape(g, -1)).sum(-1) / alive.sum(-1)  # NaN where all are lost
            small = rate < 0.5
            if not bool(small.any()):
                break
            step_size = torch.where(small, 0.5 * step_size, step_size)
        return step_size
