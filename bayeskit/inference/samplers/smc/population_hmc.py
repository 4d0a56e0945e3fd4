"""Hamiltonian moves of whole populations: momenta spread evenly over each, steps that err little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.integrator import integrate
from bayeskit.inference.samplers.metric import Metric
from bayeskit.target import Target

OUTER_KICK = 0.21178
GRADIENTS_PER_STEP = 2


class MoveState(NamedTuple):
    """Where the particles are, all populations in a row."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,)
    log_density: Tensor  # (n,), tempered
    gradient: Tensor  # (n, d), of the tempered density


class MoveInfo(NamedTuple):
    """What happened in one move, for each particle."""

    acceptance_rate: Tensor  # (n,), probability of accepting
    diverging: Tensor  # (n,), bool
    energy: Tensor  # (n,), Hamiltonian at the state kept


@dataclass(frozen=True, eq=False)
class PopulationHMC:
    """Hamiltonian Monte Carlo for populations of particles.

    Every particle moves as a chain of its own would: its momentum is standard normal and independent of its
    position. Over a population, though, each coordinate of the momenta is a Latin hypercube sample, so
    that averages over the population vary less. Whatever is unbiased with independent momenta is so
    with these, because only one particle at a time enters its expectation.

    A step is a two-stage splitting (kick, drift, kick, drift, kick), whose energy error is many times
    smaller than that of two leapfrog steps at the same two gradients.

    Parameters
    ----------
    step_size : float
        Positive; of the two stages together.
    num_steps : int
        Steps of a trajectory, two gradients each.
    metric : Metric
    beta : float in [0, 1]
        Inverse temperature.
    num_populations : int, default 1
        Neighbouring rows of equal number form a population.
    step_size_jitter : float in [0, 1), default 0.1
        Each particle's step size is multiplied by a uniform factor within this of one.
    max_energy_error : float, default 1000
        A larger error of the Hamiltonian counts as a divergence.
    planned_calls : int, default 1
        Gradient calls planned in all, from which ``Target`` decides whether to compile.

    References
    ----------
    Blanes, S., Casas, F., Sanz-Serna, J. M. (2014). Numerical integrators for the hybrid Monte Carlo
    method. SIAM Journal on Scientific Computing 36, A1556-A1580.
    McKay, M. D., Beckman, R. J., Conover, W. J. (1979). A comparison of three methods for selecting
    values of input variables in the analysis of output from a computer code. Technometrics 21, 239-245.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import Metric
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=3)
    >>> kernel = PopulationHMC(1.5, 1, Metric.diagonal(torch.ones(3, dtype=torch.float64)), 1.0, num_populations=2)
    >>> state = kernel.init(target, torch.zeros(16, 3, dtype=torch.float64))
    >>> state, info = kernel.step(target, state, generator=torch.Generator().manual_seed(0))
    >>> state.position.shape, bool(info.acceptance_rate.mean() > 0.9)
    (torch.Size([16, 3]), True)
    """

    step_size: float
    num_steps: int
    metric: Metric
    beta: float
    num_populations: int = 1
    step_size_jitter: float = 0.1
    max_energy_error: float = 1000.0
    planned_calls: int = 1

    def __post_init__(self) -> None:
        if not self.step_size > 0:
            raise SettingsError(f"step_size must be positive, not {self.step_size}")
        if self.num_steps < 1:
            raise SettingsError(f"num_steps must be at least 1, not {self.num_steps}")
        if not 0 <= self.beta <= 1:
            raise SettingsError(f"beta must lie in [0, 1], not {self.beta}")
        if not 0 <= self.step_size_jitter < 1:
            raise SettingsError(f"step_size_jitter must lie in [0, 1), not {self.step_size_jitter}")

    def init(self, target: Target, position: Tensor) -> MoveState:
        """Evaluate the density at ``position``, shape ``(n, d)``; a likelihood that is not a number counts as zero."""
        evaluate = target.evaluator(len(position), self.planned_calls)
        state = MoveState(position, *evaluate(position, self._beta(position)))
        undefined = state.log_likelihood.isnan()
        return state._replace(
            log_density=state.log_density.masked_fill(undefined, -torch.inf),
            log_likelihood=state.log_likelihood.masked_fill(undefined, -torch.inf),
        )

    def step(self, target: Target, state: MoveState, *, generator: torch.Generator) -> tuple[MoveState, MoveInfo]:
        """Run one trajectory per particle and accept or reject its end."""
        n = len(state.position)
        momentum = self._momenta(state.position, generator)
        uniform = torch.rand(2, n, dtype=momentum.dtype, device=momentum.device, generator=generator)
        step = self.step_size * (1 + self.step_size_jitter * (2 * uniform[0] - 1)).unsqueeze(-1)
        energy_before = 0.5 * momentum.square().sum(-1) - state.log_density
        end, momentum = self._trajectory(target, state, momentum, step)
        energy_after = 0.5 * momentum.square().sum(-1) - end.log_density

        error = energy_after - energy_before
        # A particle that meets NaN or an infinite density stays where it is and counts as diverging.
        diverging = ~((error <= self.max_energy_error) & (end.log_density < torch.inf))
        probability = torch.where(diverging, 0.0, (-error).exp().clamp(max=1.0))
        accept = uniform[1] < probability
        pairs = zip(end, state, strict=True)
        kept = MoveState(*(torch.where(accept.unsqueeze(-1) if a.dim() == 2 else accept, a, b) for a, b in pairs))
        return kept, MoveInfo(probability, diverging, torch.where(accept, energy_after, energy_before))

    def _trajectory(self, target: Target, state: MoveState, p: Tensor, step: Tensor) -> tuple[MoveState, Tensor]:
        evaluate = target.evaluator(len(p), self.planned_calls)
        p = torch.addcmul(p, step, self.metric.to_momentum(state.gradient), value=OUTER_KICK)
        # Inner kicks and, between steps, two outer ones in one; only the last outer one stands alone.
        kicks = [1 - 2 * OUTER_KICK, 2 * OUTER_KICK] * self.num_steps
        kicks[-1] = OUTER_KICK
        beta = self._beta(state.position)
        q, p, evaluation, _ = integrate(evaluate, self.metric, state.position, p, step.squeeze(-1), beta, 0.5, kicks)
        return MoveState(q, *evaluation), p

    def _momenta(self, position: Tensor, generator: torch.Generator) -> Tensor:
        """Draw normal numbers ``(n, d)``, each column stratified within each population."""
        n, d = position.shape
        shape = (self.num_populations, n // self.num_populations, d)
        like = {"dtype": position.dtype, "device": position.device, "generator": generator}
        stratum = torch.rand(shape, **like).argsort(1)  # type: ignore[call-overload]
        uniform = (stratum + torch.rand(shape, **like)) / shape[1]  # type: ignore[call-overload]
        epsilon = torch.finfo(position.dtype).eps
        return torch.special.ndtri(uniform.clamp(epsilon, 1 - epsilon)).reshape(n, d)

    def _beta(self, position: Tensor) -> Tensor:
        return torch.full_like(position[:, 0], self.beta)
