"""Hamiltonian Monte Carlo for a batch of chains, each with its own inverse temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluation, Evaluator, Integrator
from bayeskit._core.inputs import real_number
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers._metric import Metric

# The leapfrog integrator shared by HMC and the SMC moves.


def integrate(
    evaluate: Evaluator,
    metric: Metric,
    q: Tensor,
    p: Tensor,
    step: Tensor,
    beta: Tensor,
    drift: float,
    kicks: Sequence[float],
    walled: Callable[[Evaluation], bool] = lambda evaluation: False,
) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
    """Move positions by ``drift`` steps, then momenta by a kick, once for each of the ``kicks``.

    A path may end early where ``walled`` says so of an evaluation.
    """
    # q, p: (n, d), whitened momenta; step, beta: (n,). Returns positions, momenta, the last evaluation, and the lowest
    # log density of the path, (n,), NaN if any is NaN.
    if _in_one_call(evaluate, metric, q):
        q, p, evaluation, met = evaluate.integrate(q, p, step, beta, metric.factor, metric.is_dense, drift, kicks)
        return q, p, evaluation, met[0]
    column, lowest = step.unsqueeze(-1), torch.full_like(step, torch.inf)
    for kick in kicks:
        q = torch.addcmul(q, column, metric.to_position(p), value=drift)
        evaluation = evaluate(q, beta)
        lowest = torch.minimum(lowest, evaluation.log_density)
        p = torch.addcmul(p, column, metric.to_momentum(evaluation.gradient), value=kick)
        if walled(evaluation):
            break
    return q, p, evaluation, lowest


def _in_one_call(evaluate: Evaluator, metric: Metric, q: Tensor) -> TypeGuard[Integrator]:
    """Tell whether one compiled call makes a whole trajectory."""
    if not isinstance(evaluate, Integrator) or metric.directions is not None:
        return False
    return evaluate.fits(q, metric.factor, metric.is_dense)


class HMCState(NamedTuple):
    """State of ``n`` chains; ``n`` is the leading dimension."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,)
    log_density: Tensor  # (n,), tempered
    gradient: Tensor  # (n, d), of the tempered density
    iteration: Tensor = torch.zeros((), dtype=torch.int64)  # (), on the host: steps taken


class HMCInfo(NamedTuple):
    """Diagnostics of one step, also used by the adaptation."""

    acceptance_rate: Tensor  # (n,), probability of accepting
    diverging: Tensor  # (n,), bool: the energy error was not finite or above the limit
    energy: Tensor  # (n,), Hamiltonian at the state kept
    num_steps: Tensor  # (n,), leapfrog steps
    proposal: Tensor  # (n, d), end of the trajectory, accepted or not
    momentum: Tensor  # (n, d), whitened, at the end of the trajectory


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo with jittered trajectories.

    All chains share the number of leapfrog steps of an iteration and each gradient call. Step size, metric and inverse
    temperature are separate for each chain.

    Parameters
    ----------
    step_size : float or Tensor, default 0.1
        Positive; broadcasts to ``(n,)``.
    metric : Metric, optional
        Estimate of the posterior variances or covariance; identity by default.
    num_steps : float, default 4
        Mean number of leapfrog steps.
    num_steps_jitter : float in [0, 1], default 0.25
        Relative range of the number of steps, drawn for each iteration from a quasi-random sequence.
    step_size_jitter : float in [0, 1), default 0.2
        Relative range of the uniform factor of each chain's step size.
    beta : float or Tensor, default 1
        Inverse temperature; broadcasts to ``(n,)``.
    max_energy_error : float, default 1000
        A larger energy error counts as a divergence.
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether ``Target`` compiles.

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
    metric: Metric | None = None
    num_steps: float = 4.0
    num_steps_jitter: float = 0.25
    step_size_jitter: float = 0.2
    beta: float | Tensor = 1.0
    max_energy_error: float = 1000.0
    planned_calls: int = 1

    def __post_init__(self) -> None:
        # Only init checks tensors: a check here would synchronise with the device in every iteration of a warm-up.
        if not isinstance(self.step_size, Tensor):
            require_positive_step(torch.as_tensor(self.step_size))
        if not isinstance(self.beta, Tensor):
            require_temperature(torch.as_tensor(self.beta))
        real_number("num_steps_jitter", self.num_steps_jitter, "[0, 1]")
        real_number("step_size_jitter", self.step_size_jitter, "[0, 1)")
        real_number("max_energy_error", self.max_energy_error, "(0, inf)")
        real_number("num_steps", self.num_steps, "[1, inf)")

    def init(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density at ``position``, shape ``(n, d)``.

        Raises
        ------
        SettingsError
            If a step size is not positive or an inverse temperature lies outside [0, 1].
        """
        require_positive_step(torch.as_tensor(self.step_size))
        require_temperature(torch.as_tensor(self.beta))
        return self.evaluate(target, position)

    def evaluate(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density as :meth:`init` does, without its checks, which synchronise with the device."""
        evaluate = target.evaluator(position.shape[0], self.planned_calls)
        return HMCState(position, *evaluate(position, self._beta(position)), torch.zeros((), dtype=torch.int64))

    def step(self, target: Target, state: HMCState, *, generator: torch.Generator) -> tuple[HMCState, HMCInfo]:
        """Run one trajectory per chain and accept or reject its end."""
        q = state.position
        n = q.shape[0]
        like = {"dtype": q.dtype, "device": q.device, "generator": generator}
        noise = torch.randn(q.shape, **like)  # type: ignore[call-overload]
        uniform = torch.rand(2, n, **like)  # type: ignore[call-overload]
        num_steps = self._jittered_num_steps(int(state.iteration))

        metric = self.metric or Metric(torch.ones_like(q[0]), is_dense=False)
        jitter = 1 + self.step_size_jitter * (2 * uniform[0] - 1)
        step = (self.step_size * jitter).unsqueeze(-1)
        beta = self._beta(q)
        evaluate = target.evaluator(n, self.planned_calls)

        energy_before = 0.5 * noise.square().sum(-1) - state.log_density
        p = torch.addcmul(noise, step, metric.to_momentum(state.gradient), value=0.5)
        start, spent, quality = p, 0, torch.ones_like(energy_before)
        # Zero densities are rare. On the host a check is cheap; elsewhere it costs more than handling them always.
        inside, looks = state.log_density > -torch.inf, 0

        def meets_wall(there: Evaluation) -> bool:
            # Without a finite slope it is no wall, but a path that leaves for infinity.
            nonlocal looks
            looks += 1
            zero = (there.log_density == -torch.inf) & inside
            return bool(zero.any()) and bool((zero & there.gradient.isfinite().all(-1)).any())

        walled = q.device.type != "cpu"
        if not walled:
            kicks = _kicks(num_steps)
            q, p, evaluation, lowest = integrate(evaluate, metric, q, p, step.squeeze(-1), beta, 1.0, kicks, meets_wall)
            spent = looks or num_steps  # in one compiled call nobody looks
            walled = bool(((lowest == -torch.inf) & inside).any())
        if walled:
            q, p, evaluation, quality = self._bouncing(state, start, step, metric, evaluate, num_steps)
            spent += num_steps
        energy_after = 0.5 * p.square().sum(-1) - evaluation.log_density

        error = energy_after - energy_before
        # NaN rejects the proposal of that chain only and counts as a divergence.
        diverging = ~((error <= self.max_energy_error) & (evaluation.log_density < torch.inf))
        probability = torch.where(diverging, 0.0, (-error).exp().clamp(max=1.0))
        accept = uniform[1] < probability
        state = choose(accept, HMCState(q, *evaluation, state.iteration + 1), state)
        energy = torch.where(accept, energy_after, energy_before)
        steps = torch.full((n,), spent, dtype=torch.int64, device=q.device)
        return state, HMCInfo(torch.minimum(probability, quality), diverging, energy, steps, q, p)

    def _bouncing(
        self,
        state: HMCState,
        p: Tensor,
        step: Tensor,
        metric: Metric,
        evaluate: Callable[..., Evaluation],
        num_steps: int,
    ) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
        """Return the end of a path that reverses at zero density, and its quality, ``(n,)``."""
        # ``p (n, d)`` is half a step ahead. A step into zero density keeps the position and reverses the momentum. Up
        # to the sign of the momentum this step is its own inverse, and it preserves volume. The path is therefore
        # reversible and needs no rejection.
        q, here = state.position, Evaluation(*state[1:5])
        beta = self._beta(q)
        force = metric.to_momentum(here.gradient)
        energy = 0.5 * (p - 0.5 * step * force).square().sum(-1) - here.log_density
        if _in_one_call(evaluate, metric, q):
            factor, column = metric.factor, step.squeeze(-1)
            q, end, here, met = evaluate.integrate(
                q, p, column, beta, factor, metric.is_dense, 1.0, _kicks(num_steps), here
            )
            return q, end, here, _quality(energy, torch.maximum(energy, met[1]), met[2] / num_steps)
        highest, turns = energy, torch.zeros_like(energy)
        inside = here.log_density > -torch.inf  # a chain that starts at zero density may move to positive density
        for _ in range(num_steps):
            moved = torch.addcmul(q, step, metric.to_position(p))
            there = evaluate(moved, beta)
            bounced = inside & (there.log_density == -torch.inf)
            turns = turns + bounced
            column = bounced.unsqueeze(-1)
            q, p = torch.where(column, q, moved), torch.where(column, -p, p)
            here = choose(~bounced, there, here)
            force = torch.where(column, force, metric.to_momentum(there.gradient))
            end = torch.addcmul(p, step, force, value=0.5)
            highest = torch.maximum(highest, 0.5 * end.square().sum(-1) - here.log_density)
            p = torch.addcmul(p, step, force)
        return q, end, here, _quality(energy, highest, turns / num_steps)

    def with_settings(self, **changes: object) -> HMC:
        """Return a copy with some settings replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _jittered_num_steps(self, iteration: int) -> int:
        """Return the number of steps, spread evenly about its mean by a sequence computed on the host."""
        jitter = self.num_steps_jitter * (2 * _van_der_corput(iteration + 1) - 1)
        return max(1, math.floor((1 + jitter) * self.num_steps + 0.5))

    def _beta(self, position: Tensor) -> Tensor:
        if not isinstance(self.beta, Tensor):
            return position.new_full(position.shape[:1], self.beta)
        return self.beta.to(position).expand(position.shape[0])


def _kicks(num_steps: int) -> list[float]:
    return [1.0] * (num_steps - 1) + [0.5]


def _quality(energy: Tensor, highest: Tensor, reversed_share: Tensor) -> Tensor:
    """Return the quality of paths from their first and highest energies and their share of steps that reversed."""
    # A path that diverges into zero density and returns the same way, or only reverses, is accepted, but its
    # integration was inaccurate.
    quality = (energy - highest).exp().nan_to_num(nan=0.0) * (1 - reversed_share)
    return torch.where(reversed_share > 0, quality, 1.0)


def require_positive_step(step_size: Tensor) -> None:
    """Raise SettingsError if a step size is not positive and finite."""
    if not bool(((step_size > 0) & step_size.isfinite()).all()):
        raise SettingsError(f"step_size must be positive and finite, not {step_size}")


def require_temperature(beta: Tensor) -> None:
    """Raise SettingsError if an inverse temperature lies outside [0, 1]."""
    if not bool(((beta >= 0) & (beta <= 1)).all()):
        raise SettingsError(f"beta must lie in [0, 1], not {beta}")


Chains = TypeVar("Chains", HMCState, Evaluation)


def choose(accept: Tensor, new: Chains, old: Chains) -> Chains:
    """Take each chain's new state where it is accepted, ``(n,)``."""
    columns = (
        a if a.dim() == 0 else torch.where(accept.unsqueeze(-1) if a.dim() == 2 else accept, a, b)
        for a, b in zip(new, old, strict=True)
    )
    return type(new)(*columns)


def _van_der_corput(index: int) -> float:
    """Return the ``index``-th number of van der Corput's sequence in base two, in (0, 1)."""
    value, share = 0.0, 0.5
    while index:
        value += share * (index & 1)
        index >>= 1
        share /= 2
    return value
