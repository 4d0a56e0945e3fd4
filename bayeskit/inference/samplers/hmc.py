"""Hamiltonian Monte Carlo over a batch of chains, each with its own inverse temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.target import Evaluation, Target


class HMCState(NamedTuple):
    """Where the chains are; the leading dimension ``n`` is the chain."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,)
    log_density: Tensor  # (n,), tempered
    gradient: Tensor  # (n, d), of the tempered density


class HMCInfo(NamedTuple):
    """What happened in one step, for diagnostics and adaptation."""

    acceptance_rate: Tensor  # (n,), probability of accepting
    diverging: Tensor  # (n,), bool: the energy error was not finite or above the limit
    energy: Tensor  # (n,), Hamiltonian at the state kept
    num_steps: Tensor  # (n,), leapfrog steps


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo with a diagonal metric and jittered trajectories.

    Chains share the number of leapfrog steps of an iteration, so that one
    gradient call serves all of them; step size, metric and inverse temperature
    are each chain's own.

    Parameters
    ----------
    step_size : float or Tensor, default 0.1
        Positive; broadcasts to ``(n,)``.
    inverse_mass : Tensor, optional
        Diagonal of the inverse mass matrix, broadcasts to ``(n, d)``; ideally the
        posterior variances.
    num_steps : float, default 4
        Mean number of leapfrog steps.
    num_steps_jitter : float in [0, 1), default 0.25
        Each iteration draws an integer within this share of ``num_steps``.
    step_size_jitter : float in [0, 1), default 0.2
        Each chain's step size is multiplied by a uniform factor within this of one.
    beta : float or Tensor, default 1
        Inverse temperature, broadcasts to ``(n,)``.
    max_energy_error : float, default 1000
        A larger error of the Hamiltonian counts as a divergence.
    planned_calls : int, default 1
        Gradient calls planned in all, from which ``Target`` decides whether to compile.

    References
    ----------
    Neal, R. M. (2011). MCMC using Hamiltonian dynamics. Handbook of Markov Chain
    Monte Carlo, chapter 5.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import HMC
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=3)
    >>> kernel, generator = HMC(step_size=0.5), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 3, dtype=torch.float64))
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> state.position.shape, bool(info.diverging.any())
    (torch.Size([8, 3]), False)
    """

    step_size: float | Tensor = 0.1
    inverse_mass: Tensor | None = None
    num_steps: float = 4.0
    num_steps_jitter: float = 0.25
    step_size_jitter: float = 0.2
    beta: float | Tensor = 1.0
    max_energy_error: float = 1000.0
    planned_calls: int = 1

    def __post_init__(self) -> None:
        step_size = torch.as_tensor(self.step_size)
        if not bool((step_size > 0).all()):
            raise SettingsError(f"step_size must be positive, not {self.step_size}")
        if not 0 <= self.step_size_jitter < 1:
            raise SettingsError(f"step_size_jitter must lie in [0, 1), not {self.step_size_jitter}")
        beta = torch.as_tensor(self.beta)
        if not bool(((beta >= 0) & (beta <= 1)).all()):
            raise SettingsError(f"beta must lie in [0, 1], not {self.beta}")
        if self.num_steps < 1:
            raise SettingsError(f"num_steps must be at least 1, not {self.num_steps}")

    def init(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density at ``position``, shape ``(n, d)``."""
        evaluation = self._evaluate(target, position, self._beta(position))
        return HMCState(position, *evaluation)

    def step(self, target: Target, state: HMCState, *, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
        """Run one trajectory per chain and accept or reject its end."""
        q = state.position
        n = q.shape[0]
        like = {"dtype": q.dtype, "device": q.device, "generator": generator}
        noise = torch.randn(q.shape, **like)  # type: ignore[call-overload]
        uniform = torch.rand(3, n, **like)  # type: ignore[call-overload]
        num_steps = self._draw_num_steps(generator)

        inverse_mass = torch.ones_like(q) if self.inverse_mass is None else self.inverse_mass
        jitter = 1 + self.step_size_jitter * (2 * uniform[0] - 1)
        step = (torch.as_tensor(self.step_size, dtype=q.dtype, device=q.device) * jitter).unsqueeze(-1)
        beta = self._beta(q)

        p = noise / inverse_mass.sqrt()
        energy_before = 0.5 * (inverse_mass * p * p).sum(-1) - state.log_density
        drift = step * inverse_mass
        p = torch.addcmul(p, step, state.gradient, value=0.5)
        for i in range(num_steps):
            q = torch.addcmul(q, drift, p)
            evaluation = self._evaluate(target, q, beta)
            p = torch.addcmul(p, step, evaluation.gradient, value=1.0 if i < num_steps - 1 else 0.5)
        energy_after = 0.5 * (inverse_mass * p * p).sum(-1) - evaluation.log_density

        error = energy_after - energy_before
        # A chain that meets NaN is rejected and counted as diverging; the others do not notice.
        diverging = ~(error <= self.max_energy_error)
        probability = torch.where(diverging, 0.0, (-error).exp().clamp(max=1.0))
        accept = uniform[1] < probability
        state = _choose(accept, HMCState(q, *evaluation), state)
        energy = torch.where(accept, energy_after, energy_before)
        steps = torch.full((n,), num_steps, dtype=torch.int64, device=q.device)
        return state, HMCInfo(probability, diverging, energy, steps)

    def with_settings(self, **changes: object) -> HMC:
        """Return a copy with some settings replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _draw_num_steps(self, generator: torch.Generator) -> int:
        low = max(1, math.ceil((1 - self.num_steps_jitter) * self.num_steps - 0.5))
        high = max(low, math.ceil((1 + self.num_steps_jitter) * self.num_steps - 0.5))
        return int(torch.randint(low, high + 1, (), generator=generator, device=generator.device))

    def _beta(self, position: Tensor) -> Tensor:
        beta = torch.as_tensor(self.beta, dtype=position.dtype, device=position.device)
        return beta.expand(position.shape[0])

    def _evaluate(self, target: Target, position: Tensor, beta: Tensor) -> Evaluation:
        return target.evaluator(position.shape[0], self.planned_calls)(position, beta)


def _choose(accept: Tensor, new: HMCState, old: HMCState) -> HMCState:
    return HMCState(
        *(torch.where(accept.unsqueeze(-1) if a.dim() == 2 else accept, a, b) for a, b in zip(new, old, strict=True))
    )
