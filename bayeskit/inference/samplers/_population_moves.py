"""Hamiltonian moves of whole populations, with stratified momenta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluator
from bayeskit._core.inputs import real_number, whole_number
from bayeskit.inference.samplers._hmc import integrate
from bayeskit.inference.samplers._metric import Metric

_OUTER_KICK = 0.21178
GRADIENTS_PER_STEP = 2


class HasEvaluator(Protocol):
    """What a kernel asks of a density: how to evaluate it."""

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        """Return the evaluation of ``num_vectors`` rows."""
        ...


class MoveState(NamedTuple):
    """Positions and densities of all particles; populations are consecutive rows."""

    position: Tensor  # (n, d)
    log_prior: Tensor  # (n,)
    log_likelihood: Tensor  # (n,)
    log_density: Tensor  # (n,), tempered
    gradient: Tensor  # (n, d), of the tempered density


class MoveInfo(NamedTuple):
    """Diagnostics of one move, for each particle."""

    acceptance_rate: Tensor  # (n,), probability of accepting
    diverging: Tensor  # (n,), bool
    energy: Tensor  # (n,), Hamiltonian at the state kept


@dataclass(frozen=True, eq=False)
class PopulationHMC:
    """Hamiltonian Monte Carlo for populations of particles.

    Each particle's momentum is standard normal and independent of its position. Within a population, each coordinate of
    the momenta is a Latin hypercube sample, which reduces the variance of population averages. Estimates that are
    unbiased with independent momenta stay unbiased, because each expectation involves one particle at a time.

    A step is a two-stage splitting (kick, drift, kick, drift, kick). Its energy error is much smaller than that of two
    leapfrog steps with the same two gradients.

    Parameters
    ----------
    step_size : float
        Positive; length of both stages together.
    num_steps : int
        Steps per trajectory, two gradients each.
    metric : Metric
    beta : float in [0, 1]
        Inverse temperature.
    num_populations : int, default 1
        Populations are consecutive blocks of rows, of equal size.
    step_size_jitter : float in [0, 1), default 0.1
        Relative range of the uniform factor of each particle's step size.
    max_energy_error : float, default 1000
        A larger energy error counts as a divergence.
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether ``Target`` compiles.

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
        real_number("step_size", self.step_size, "(0, inf)")
        whole_number("num_steps", self.num_steps, least=1)
        real_number("beta", self.beta, "[0, 1]")
        real_number("step_size_jitter", self.step_size_jitter, "[0, 1)")

    def init(self, target: HasEvaluator, position: Tensor) -> MoveState:
        """Evaluate the density at ``position``, shape ``(n, d)``; a NaN likelihood counts as zero."""
        evaluate = target.evaluator(len(position), self.planned_calls)
        state = MoveState(position, *evaluate(position, self._beta(position)))
        undefined = state.log_likelihood.isnan()
        return state._replace(
            log_density=state.log_density.masked_fill(undefined, -torch.inf),
            log_likelihood=state.log_likelihood.masked_fill(undefined, -torch.inf),
        )

    def step(self, target: HasEvaluator, state: MoveState, *, generator: torch.Generator) -> tuple[MoveState, MoveInfo]:
        """Run one trajectory per particle and accept or reject its end point."""
        n = len(state.position)
        momentum = self._momenta(state.position, generator)
        uniform = torch.rand(2, n, dtype=momentum.dtype, device=momentum.device, generator=generator)
        step = self.step_size * (1 + self.step_size_jitter * (2 * uniform[0] - 1)).unsqueeze(-1)
        energy_before = 0.5 * momentum.square().sum(-1) - state.log_density
        end, momentum = self._trajectory(target, state, momentum, step)
        energy_after = 0.5 * momentum.square().sum(-1) - end.log_density

        error = energy_after - energy_before
        # A particle that meets NaN or an infinite density keeps its position and counts as diverging.
        diverging = ~((error <= self.max_energy_error) & (end.log_density < torch.inf))
        probability = torch.where(diverging, 0.0, (-error).exp().clamp(max=1.0))
        accept = uniform[1] < probability
        pairs = zip(end, state, strict=True)
        kept = MoveState(*(torch.where(accept.unsqueeze(-1) if a.dim() == 2 else accept, a, b) for a, b in pairs))
        return kept, MoveInfo(probability, diverging, torch.where(accept, energy_after, energy_before))

    def _trajectory(self, target: HasEvaluator, state: MoveState, p: Tensor, step: Tensor) -> tuple[MoveState, Tensor]:
        evaluate = target.evaluator(len(p), self.planned_calls)
        p = torch.addcmul(p, step, self.metric.to_momentum(state.gradient), value=_OUTER_KICK)
        # Adjacent outer kicks of consecutive steps are merged; only the last outer kick is separate.
        kicks = [1 - 2 * _OUTER_KICK, 2 * _OUTER_KICK] * self.num_steps
        kicks[-1] = _OUTER_KICK
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
