"""Tempered sequential Monte Carlo: populations of particles that move from the prior to the posterior in stages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import DataError, InitializationError, SettingsError, ShapeError
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, MoveInfo, PopulationHMC
from bayeskit.inference.samplers.smc.resampling import conditional_share, effective_share, systematic
from bayeskit.target import Target

RESAMPLE_BELOW = 0.9


class SMCState(NamedTuple):
    """``r`` independent populations of ``n`` weighted particles, all at one temperature."""

    position: Tensor  # (r, n, d)
    log_prior: Tensor  # (r, n)
    log_likelihood: Tensor  # (r, n), -inf where it was not a number or infinite
    log_weight: Tensor  # (r, n), normalised over n, double precision
    ancestor: Tensor  # (r, n), index of the prior draw that a particle descends from
    beta: Tensor  # (), double precision
    undefined_share: Tensor  # (), share of prior draws where the likelihood was not a number or infinite


class SMCInfo(NamedTuple):
    """What happened in one stage."""

    log_increment: Tensor  # (r,), estimate of the log ratio of the two normalising constants
    conditional_share: Tensor  # (r,), effective share left by this reweighting alone
    effective_share: Tensor  # (r,), of all weights, before resampling
    acceptance_rate: Tensor  # (r,), mean over particles and moves
    diverging: Tensor  # (r,), share of moves
    num_ancestors: Tensor  # (r,), int64: prior draws that still have descendants


def start(target: Target, num_replicates: int, num_particles: int, generator: torch.Generator) -> SMCState:
    """Draw the populations from the prior.

    Parameters
    ----------
    target : Target
        Its prior must be one it can draw from.
    num_replicates, num_particles : int
        ``r`` and ``n``.
    generator : torch.Generator

    Returns
    -------
    SMCState
        At ``beta = 0``.

    Raises
    ------
    SettingsError
        If the target cannot draw from its prior.
    DataError
        If the likelihood is not a number anywhere.
    InitializationError
        If it is zero everywhere.
    """
    r, n = num_replicates, num_particles
    position = target.sample_prior(r * n, generator).to(target.device)
    log_prior, log_likelihood = target.evaluate(position, compiled=False)
    if bool(log_likelihood.isnan().all()):
        raise DataError("the log likelihood is NaN at every prior draw; look for NaN or infinite values in the data")
    undefined = (log_likelihood.isnan() | (log_likelihood == torch.inf)).to(torch.float64).mean()
    log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    if not bool(log_likelihood.isfinite().any()):
        raise InitializationError(
            f"the likelihood is zero at all {r * n} prior draws; use more particles, or check that data and "
            "likelihood fit"
        )
    return SMCState(
        position.reshape(r, n, -1),
        log_prior.reshape(r, n),
        log_likelihood.reshape(r, n),
        torch.full((r, n), -math.log(n), dtype=torch.float64, device=position.device),
        torch.arange(n, device=position.device).expand(r, n).clone(),
        torch.zeros((), dtype=torch.float64, device=position.device),
        undefined,
    )


def reweight(state: SMCState, beta: float | Tensor) -> tuple[SMCState, Tensor, Tensor]:
    """Carry the weights to another temperature.

    Returns
    -------
    state : SMCState
    log_increment, conditional_share : Tensor
        Shape ``(r,)``. A population without likelihood gets ``-inf`` and equal weights: its estimate is zero
        and stays zero.
    """
    beta = beta if isinstance(beta, Tensor) else torch.full_like(state.beta, beta)
    log_ratio = (beta - state.beta) * state.log_likelihood.to(torch.float64)
    left = conditional_share(state.log_weight, log_ratio)
    log_weight = state.log_weight + log_ratio
    increment = log_weight.logsumexp(-1)
    alive = increment.isfinite().unsqueeze(-1)
    equal = -math.log(log_weight.shape[-1])
    log_weight = torch.where(alive, log_weight - increment.unsqueeze(-1), equal)
    return state._replace(log_weight=log_weight, beta=beta), increment, left.nan_to_num(nan=0.0)


def resample(state: SMCState, generator: torch.Generator, below: float = RESAMPLE_BELOW) -> SMCState:
    """Replace each population whose effective share has fallen under ``below`` by an equally weighted one."""
    needed = (effective_share(state.log_weight) < below).unsqueeze(-1)
    n = state.log_weight.shape[-1]
    index = torch.where(needed, systematic(state.log_weight, generator), torch.arange(n, device=needed.device))
    return select(state, index)._replace(log_weight=torch.where(needed, -math.log(n), state.log_weight))


def select(state: SMCState, index: Tensor) -> SMCState:
    """Keep the particles ``index``, ``(r, n)``, of each population; their weights stay where they are."""
    at = index.unsqueeze(-1).expand(-1, -1, state.position.shape[-1])
    return state._replace(
        position=state.position.gather(1, at),
        log_prior=state.log_prior.gather(1, index),
        log_likelihood=state.log_likelihood.gather(1, index),
        ancestor=state.ancestor.gather(1, index),
    )


def count_distinct(index: Tensor) -> Tensor:
    """Return how many different numbers are in each row, ``(r, n) -> (r,)``."""
    return 1 + (index.sort(-1).values.diff(dim=-1) != 0).sum(-1)


class Moved(NamedTuple):
    """Particles after their moves."""

    state: SMCState
    last: MoveInfo  # (r * n,), of the last move
    acceptance_rate: Tensor  # (r,), mean over particles and moves
    diverging: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of tempered sequential Monte Carlo: reweight to ``beta``, resample where needed, move.

    Nothing in it depends on the particles, so the product of its increments over stages is an unbiased
    estimate of the evidence.

    Parameters
    ----------
    beta : float in (0, 1]
        Inverse temperature at which the stage ends.
    step_size : float
        Of the moves, as in :class:`PopulationHMC`; ``num_steps`` and ``metric`` likewise.
    num_steps : int
    num_moves : int
        Trajectories a particle.
    metric : Metric
    planned_calls : int, default 1
        Gradient calls planned in all, from which ``Target`` decides whether to compile.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2006). Sequential Monte Carlo samplers. Journal of the
    Royal Statistical Society B 68, 411-436.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import Metric
    >>> from bayeskit.inference.samplers.smc.stages import Stage, start
    >>> target = bk.exact.get("beta_binomial").target()
    >>> stage = Stage(0.5, 1.0, 1, 1, Metric.diagonal(torch.ones(1, dtype=torch.float64)))
    >>> generator = torch.Generator().manual_seed(0)
    >>> state, info = stage.step(target, start(target, 4, 32, generator), generator=generator)
    >>> state.position.shape, info.log_increment.shape
    (torch.Size([4, 32, 1]), torch.Size([4]))
    """

    beta: float
    step_size: float
    num_steps: int
    num_moves: int
    metric: Metric
    planned_calls: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise SettingsError(f"a stage's inverse temperature must lie in (0, 1], not {self.beta}")
        if self.num_moves < 1:
            raise SettingsError(f"num_moves must be at least 1, not {self.num_moves}")
        self.kernel()  # checks the rest

    @property
    def num_calls(self) -> int:
        """Gradient evaluations of one particle: at its start, and along its trajectories."""
        return 1 + GRADIENTS_PER_STEP * self.num_steps * self.num_moves

    def step(self, target: Target, state: SMCState, *, generator: torch.Generator) -> tuple[SMCState, SMCInfo]:
        """Take the populations to ``beta``."""
        state, increment, left = reweight(state, self.beta)
        share = effective_share(state.log_weight)
        state = resample(state, generator)
        moved = self.move(target, state, generator=generator)
        ancestors = count_distinct(moved.state.ancestor)
        info = SMCInfo(increment, left, share, moved.acceptance_rate, moved.diverging, ancestors)
        return moved.state, info

    def move(self, target: Target, state: SMCState, *, generator: torch.Generator) -> Moved:
        """Run ``num_moves`` trajectories from every particle."""
        r, n, _ = state.position.shape
        kernel = self.kernel(r)
        chains = kernel.init(target, state.position.flatten(0, 1))
        acceptance = torch.zeros(r * n, dtype=torch.float64, device=state.beta.device)
        diverging = torch.zeros_like(acceptance)
        for _ in range(self.num_moves):
            chains, info = kernel.step(target, chains, generator=generator)
            acceptance += info.acceptance_rate
            diverging += info.diverging
        state = state._replace(
            position=chains.position.reshape(state.position.shape),
            log_prior=chains.log_prior.reshape(r, n),
            log_likelihood=chains.log_likelihood.reshape(r, n),
        )
        mean = (acceptance / self.num_moves).reshape(r, n).mean(-1)
        return Moved(state, info, mean, (diverging / self.num_moves).reshape(r, n).mean(-1))

    def kernel(self, num_populations: int = 1) -> PopulationHMC:
        """Return what moves the particles of so many populations."""
        return PopulationHMC(
            self.step_size,
            self.num_steps,
            self.metric,
            self.beta,
            num_populations=num_populations,
            planned_calls=self.planned_calls,
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything that a pilot run has learnt: temperatures, metrics, step sizes, trajectories, moves.

    Parameters
    ----------
    stages : tuple of Stage
        With increasing inverse temperatures, the last of them one.

    Raises
    ------
    SettingsError
        If a temperature lies outside (0, 1], or they do not increase to one.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Metric
    >>> metric = Metric.diagonal(torch.ones(2))
    >>> schedule = Schedule(tuple(Stage(beta, 1.0, 1, 1, metric) for beta in (0.1, 0.4, 1.0)))
    >>> len(schedule), schedule.dim
    (3, 2)
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        beta = self.beta
        if len(beta) < 2 or beta[-1] != 1 or bool((beta.diff() <= 0).any()):
            raise SettingsError("the inverse temperatures of a schedule must increase strictly and end at one")

    @property
    def num_calls(self) -> int:
        """Gradient evaluations of one particle."""
        return sum(stage.num_calls for stage in self.stages)

    @property
    def beta(self) -> Tensor:
        """Inverse temperatures, the prior's 0 included, shape ``(K + 1,)``."""
        return torch.tensor([0.0, *(stage.beta for stage in self.stages)], dtype=torch.float64)

    @property
    def dim(self) -> int:
        """Dimension of the vectors that the schedule was learnt on."""
        return int(self.stages[0].metric.factor.shape[-1])

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def check(self, target: Target) -> None:
        """Refuse a target of another dimension.

        Raises
        ------
        ShapeError
        """
        if self.dim != target.dim:
            raise ShapeError(
                f"the schedule was learnt in {self.dim} dimensions, the target has {target.dim}; "
                "learn a new one by leaving schedule=None"
            )

    def fingerprint(self) -> str:
        """Return a digest of all settings."""
        digest = hashlib.sha256()
        for stage in self.stages:
            digest.update(repr((stage.beta, stage.step_size, stage.num_steps, stage.num_moves)).encode())
            digest.update(stage.metric.factor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]
