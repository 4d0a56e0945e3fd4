"""Warm-up: step size, diagonal metric and trajectory length, learnt across the chains of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.hmc import HMC, HMCInfo, HMCState
from bayeskit.target import Target

MAX_DENSE_DIMENSION = 400
TRAJECTORY = 0.4 * math.pi


class AdaptationState(NamedTuple):
    """State of an adapting kernel; ``g`` counts groups, ``n`` chains."""

    kernel: HMCState
    iteration: Tensor  # (), int64
    step_size: Tensor  # (g,), in use
    inverse_mass: Tensor  # (g, d)
    num_steps: Tensor  # (), float: mean number of leapfrog steps
    correlation_scale: Tensor  # (g,), square root of the largest eigenvalue of the correlation matrix
    dual_average: Tensor  # (4, g): error sum, log step size averaged, centre, count
    moment_count: Tensor  # ()
    moment_mean: Tensor  # (g, d)
    moment_cross: Tensor  # (g, d, d), or (g, d) in high dimension


@dataclass(frozen=True)
class Adaptation:
    """A kernel around :class:`HMC` that tunes it for ``num_warmup`` steps and then leaves it alone.

    The chains of a group (those at one temperature) share step size and metric
    and pool what they learn: dual averaging on their mean acceptance
    probability (Hoffman and Gelman 2014), variances in doubling windows. The
    trajectory is a fifth of a period of the longest axis: 0.4 pi times the square
    root of the largest eigenvalue of the correlation matrix. (A quarter period would
    decorrelate means best; log likelihoods, which are even about the mode, want less.)

    Parameters
    ----------
    kernel : HMC
        Settings that stay fixed; its step size is the starting value.
    num_warmup : int
        Adapting steps.
    num_groups : int, default 1
        Chains ``i * n / num_groups`` to ``(i + 1) * n / num_groups - 1`` form group ``i``.
    target_acceptance : float, default 0.8
    max_steps : int, default 256
        Upper limit of the mean number of leapfrog steps.
    initial_inverse_mass : Tensor, optional
        Shape ``(d,)`` or ``(g, d)``; rough variances, such as the prior's.
    """

    kernel: HMC
    num_warmup: int
    num_groups: int = 1
    target_acceptance: float = 0.8
    max_steps: int = 256
    initial_inverse_mass: Tensor | None = None

    def __post_init__(self) -> None:
        if self.num_warmup < 20:
            raise SettingsError(f"num_warmup must be at least 20 to tune step size and metric, not {self.num_warmup}")
        if not 0 < self.target_acceptance < 1:
            raise SettingsError(f"target_acceptance must lie in (0, 1), not {self.target_acceptance}")

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> AdaptationState:
        """Evaluate the density at ``position``, shape ``(n, d)``, and find a rough step size."""
        n, d = position.shape
        g = self.num_groups
        if n % g:
            raise SettingsError(f"{n} chains cannot be split into {g} groups of equal size")
        like = {"dtype": position.dtype, "device": position.device}
        inverse_mass = torch.ones(g, d, **like)  # type: ignore[call-overload]
        if self.initial_inverse_mass is not None:
            inverse_mass = self.initial_inverse_mass.to(**like).expand(g, d).clone()  # type: ignore[call-overload]
        state = self.kernel.init(target, position)
        step_size = self._rough_step_size(target, state, inverse_mass, generator)
        zero = torch.zeros((), **like)  # type: ignore[call-overload]
        cross = (g, d, d) if d <= MAX_DENSE_DIMENSION else (g, d)
        return AdaptationState(
            kernel=state,
            iteration=torch.zeros((), dtype=torch.int64),
            step_size=step_size,
            inverse_mass=inverse_mass,
            num_steps=torch.tensor(4.0, dtype=torch.float64),
            correlation_scale=torch.ones_like(step_size),
            dual_average=_restart(step_size),
            moment_count=zero,
            moment_mean=torch.zeros_like(inverse_mass),
            moment_cross=torch.zeros(cross, **like),  # type: ignore[call-overload]
        )

    def step(
        self, target: Target, state: AdaptationState, *, generator: torch.Generator
    ) -> tuple[AdaptationState, HMCInfo]:
        """Step the kernel; during warm-up learn from the step."""
        kernel = self.tuned(state)
        new, info = kernel.step(target, state.kernel, generator=generator)
        iteration = int(state.iteration)
        state = state._replace(kernel=new, iteration=state.iteration + 1)
        if iteration < self.num_warmup:
            state = self._learn(state, info, iteration)
        return state, info

    def tuned(self, state: AdaptationState) -> HMC:
        """Return the kernel with what has been learnt so far."""
        per_group = state.kernel.position.shape[0] // self.num_groups
        return self.kernel.with_settings(
            step_size=state.step_size.repeat_interleave(per_group),
            inverse_mass=state.inverse_mass.repeat_interleave(per_group, 0),
            num_steps=float(state.num_steps),
        )

    # -- learning ---------------------------------------------------------------------------

    def _learn(self, state: AdaptationState, info: HMCInfo, iteration: int) -> AdaptationState:
        acceptance = info.acceptance_rate.reshape(self.num_groups, -1).mean(-1)
        dual_average, step_size = _average(state.dual_average, acceptance, self.target_acceptance)
        state = state._replace(dual_average=dual_average, step_size=step_size)
        first, ends = self._windows()
        if first <= iteration < ends[-1]:
            state = self._accumulate(state)
        if iteration + 1 in ends:
            state = self._close_window(state)
        if iteration + 1 == self.num_warmup:
            state = state._replace(step_size=state.dual_average[1].exp())
        return state._replace(num_steps=self._steps(state))

    def _windows(self) -> tuple[int, list[int]]:
        """Return the first slow iteration and the end of each doubling window."""
        first = max(5, round(0.15 * self.num_warmup))
        last = self.num_warmup - max(5, round(0.15 * self.num_warmup))
        ends, size, end = [], max(10, (last - first) // 8), first
        while end + size <= last:
            end += size
            if end + 2 * size > last:
                end = last
            ends.append(end)
            size *= 2
        return first, ends or [last]

    def _accumulate(self, state: AdaptationState) -> AdaptationState:
        x = state.kernel.position.reshape(self.num_groups, -1, state.kernel.position.shape[-1])
        m = x.shape[1]
        count = state.moment_count + m
        batch_mean = x.mean(1)
        delta = batch_mean - state.moment_mean
        centred = x - batch_mean.unsqueeze(1)
        weight = state.moment_count * m / count
        if state.moment_cross.dim() == 3:
            cross = centred.mT @ centred + weight * delta.unsqueeze(-1) * delta.unsqueeze(-2)
        else:
            cross = centred.square().sum(1) + weight * delta.square()
        return state._replace(
            moment_count=count,
            moment_mean=state.moment_mean + delta * (m / count),
            moment_cross=state.moment_cross + cross,
        )

    def _close_window(self, state: AdaptationState) -> AdaptationState:
        count = state.moment_count
        covariance = state.moment_cross / (count - 1).clamp(min=1)
        dense = covariance.dim() == 3
        variance = covariance.diagonal(dim1=-2, dim2=-1) if dense else covariance
        # Shrink as Stan does, towards the old metric instead of a fixed number, which has no scale.
        inverse_mass = (count * variance + 5 * state.inverse_mass) / (count + 5)
        usable = (variance > 0) & variance.isfinite()
        inverse_mass = torch.where(usable, inverse_mass, state.inverse_mass)
        scale = state.correlation_scale
        if dense:
            root = inverse_mass.rsqrt()
            correlation = covariance * root.unsqueeze(-1) * root.unsqueeze(-2)
            # Chains of a short window inflate the largest eigenvalue; shrink to the identity.
            shrinkage = correlation.shape[-1] / (correlation.shape[-1] + count)
            identity = torch.eye(correlation.shape[-1], dtype=root.dtype, device=root.device)
            correlation = (1 - shrinkage) * correlation + shrinkage * identity
            scale = torch.linalg.eigvalsh(correlation)[..., -1].clamp(min=1.0).sqrt()
        return state._replace(
            inverse_mass=inverse_mass,
            correlation_scale=scale,
            dual_average=_restart(state.dual_average[1].exp()),
            moment_count=torch.zeros_like(count),
            moment_mean=torch.zeros_like(state.moment_mean),
            moment_cross=torch.zeros_like(state.moment_cross),
        )

    def _steps(self, state: AdaptationState) -> Tensor:
        steps = (TRAJECTORY * state.correlation_scale / state.step_size).median()
        return steps.clamp(1.0, float(self.max_steps)).to("cpu", torch.float64)

    def _rough_step_size(
        self, target: Target, state: HMCState, inverse_mass: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Halve the step size of each group until single leapfrog steps are accepted half the time."""
        g = self.num_groups
        per_group = state.position.shape[0] // g
        start = torch.as_tensor(self.kernel.step_size, dtype=state.position.dtype, device=state.position.device)
        step_size = start.expand(g).clone()
        for _ in range(40):
            kernel = self.kernel.with_settings(
                step_size=step_size.repeat_interleave(per_group),
                inverse_mass=inverse_mass.repeat_interleave(per_group, 0),
                num_steps=1.0,
            )
            _, info = kernel.step(target, state, generator=generator)
            small = info.acceptance_rate.reshape(g, -1).mean(-1) < 0.5
            if not bool(small.any()):
                break
            step_size = torch.where(small, 0.5 * step_size, step_size)
        return step_size


def _restart(step_size: Tensor) -> Tensor:
    log_step = step_size.log()
    zero = torch.zeros_like(log_step)
    return torch.stack([zero, log_step, log_step + math.log(2.0), zero])


def _average(state: Tensor, acceptance: Tensor, wanted: float) -> tuple[Tensor, Tensor]:
    """One step of Nesterov's dual averaging on the log step size (Hoffman and Gelman 2014, section 3.2)."""
    error_sum, log_average, centre, count = state
    count = count + 1
    weight = 1 / (count + 10)
    error_sum = (1 - weight) * error_sum + weight * (wanted - acceptance)
    log_step = centre - count.sqrt() / 0.05 * error_sum
    power = count**-0.75
    log_average = power * log_step + (1 - power) * log_average
    return torch.stack([error_sum, log_average, centre, count]), log_step.exp()
