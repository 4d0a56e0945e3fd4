"""The pilot of a tempered sequential Monte Carlo run: one population that tunes every stage as it goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.inference.samplers.driver import Ending, Records
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.inference.samplers.smc.resampling import bounded, effective_share, next_temperature
from bayeskit.inference.samplers.smc.stages import SMCInfo, SMCState, Stage, count_distinct, resample, reweight, start
from bayeskit.target import Target

MAX_DENSE_DIMENSION = 200
TRAJECTORY = math.pi / 2  # a quarter period of a whitened normal posterior
LEARNING_RATE = 2.0  # of the log step size, per unit of acceptance
WORTHWHILE = 0.9  # a move that leaves more than this of a correlation is not
MAX_SEARCH = 200  # gradient calls, in one stage, for a step size that is accepted at all
MIN_STEP_SIZE, MAX_STEPS = 1e-6, 64
PLANNED_CALLS = 500


class PilotState(NamedTuple):
    """A population and the step size that its moves have been tuned to."""

    particles: SMCState
    step_size: Tensor  # ()


@dataclass(frozen=True, eq=False)
class Pilot:
    """What :func:`drive` advances to learn a schedule, one stage a step.

    Each stage raises the temperature as far as ``ess_threshold`` allows, takes the metric from the weighted
    particles, and moves them until they have forgotten where they were. After every move the step size
    follows the acceptance, and the number of steps follows the step size.

    Parameters
    ----------
    target : Target
    num_particles : int
    ess_threshold : float
        Conditional effective share that a change of temperature leaves.
    seed : int
    max_correlation : float
        Moves end when no coordinate, nor the log likelihood, correlates more than this with its value before,
        or the last move has lowered no such correlation by a tenth.
    max_moves : int
        They end here in any case.
    target_acceptance : float
    """

    target: Target
    num_particles: int
    ess_threshold: float
    seed: int
    max_correlation: float = 0.5
    max_moves: int = 20
    target_acceptance: float = 0.9

    description = "tempering, pilot"
    stream = "tempering, pilot"
    num_steps = None

    def __post_init__(self) -> None:
        for name, called, least in (("num_particles", "num_pilot_particles", 2), ("max_moves", "max_moves", 1),
                                    ("seed", "seed", None)):  # fmt: skip
            object.__setattr__(self, name, whole_number(called, getattr(self, name), least))
        for name in ("ess_threshold", "max_correlation", "target_acceptance"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), between=(0, 1)))

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on."""
        settings = {k: v for k, v in vars(self).items() if k != "target"}
        return {"model": self.target.fingerprint(), "compile": str(self.target.compile)} | settings

    def start(self, generator: torch.Generator) -> PilotState:
        """Draw from the prior."""
        particles = start(self.target, 1, self.num_particles, generator)
        return PilotState(particles, torch.full_like(particles.beta, TRAJECTORY / 2))

    def advance(
        self, state: PilotState, iteration: int, generator: torch.Generator
    ) -> tuple[PilotState, Mapping[str, Tensor]]:
        """Tune and run one stage."""
        particles = state.particles
        log_likelihood = particles.log_likelihood[0].to(torch.float64)
        beta = next_temperature(particles.log_weight[0], log_likelihood, particles.beta, self.ess_threshold)
        particles, increment, left = reweight(particles, beta)
        share = effective_share(particles.log_weight)
        metric = learn_metric(particles.position[0], particles.log_weight[0])
        particles = resample(particles, generator)
        tuned = self._move(particles, metric, state.step_size, generator)
        ancestors = count_distinct(particles.ancestor)
        info = SMCInfo(increment, left, share, tuned.acceptance_rate, tuned.diverging, ancestors)
        learnt = {name: getattr(tuned, name) for name in ("step_size", "num_moves", "correlation", "gradients")}
        row = info._asdict() | learnt | {"beta": beta, "factor": metric.factor}
        return PilotState(tuned.particles, tuned.step_size), row

    def ending(self, state: PilotState, iteration: int, records: Records) -> Ending | None:
        """End at the posterior."""
        return "finished" if float(state.particles.beta) == 1 else None

    def note(self, state: PilotState, iteration: int, records: Records) -> str:
        """Say how far it has come."""
        moves, acceptance = int(records["num_moves"][-1]), float(records["acceptance_rate"][-1])
        return f"beta {float(state.particles.beta):.3g}, {moves} moves, acceptance {acceptance:.2f}"

    def stages(self, records: Records) -> tuple[Stage, ...]:
        """Freeze what has been learnt."""
        if "beta" not in records:
            return ()
        columns = (records[name].tolist() for name in ("beta", "step_size", "num_moves"))
        return tuple(
            Stage(beta, step_size, _num_steps(step_size), num_moves, Metric(factor, factor.dim() == 2))
            for beta, step_size, num_moves, factor in zip(*columns, records["factor"].unbind(), strict=True)
        )

    def spent(self, records: Records) -> int:
        """Return the gradient evaluations so far; values count as gradients."""
        return self.num_particles + (int(records["gradients"].sum()) if "gradients" in records else 0)

    def _move(self, particles: SMCState, metric: Metric, step_size: Tensor, generator: torch.Generator) -> _Tuned:
        """Move until nothing is left of where the particles were; tune the step size meanwhile."""
        log_weight = particles.log_weight[0]
        weight = log_weight.exp()
        before = _summaries(particles.position[0], particles.log_likelihood[0])
        beta, step = torch.stack([particles.beta, step_size]).tolist()  # one look at the device for both
        kernel = PopulationHMC(1.0, 1, metric, beta, planned_calls=PLANNED_CALLS)
        chains = kernel.init(self.target, particles.position[0])
        calls, moves = 1, 0
        correlation, busy = torch.ones_like(before[0]), 1.0
        while busy and moves < self.max_moves:
            kernel = replace(kernel, step_size=step, num_steps=_num_steps(step))
            chains, info = kernel.step(self.target, chains, generator=generator)
            calls += GRADIENTS_PER_STEP * kernel.num_steps
            acceptance = (weight * info.acceptance_rate).sum()
            step_size = step_size * (LEARNING_RATE * (acceptance - self.target_acceptance)).exp()
            step_size = step_size.clamp(MIN_STEP_SIZE, TRAJECTORY)
            now = _correlation(before, _summaries(chains.position, chains.log_likelihood), log_weight)
            # A coordinate that is held where it is, as by two modes, is not worth more moves.
            worth = ((now >= self.max_correlation) & (now < WORTHWHILE * correlation)).any()
            step, accepted, more = torch.stack([step_size, acceptance, worth.to(step_size)]).tolist()
            if accepted < 0.5 * self.target_acceptance and calls < MAX_SEARCH:
                continue  # the step size is far off, as it may be at first, and says nothing on how many are needed
            moves, busy, correlation = moves + 1, more, now
        return _Tuned(
            particles._replace(
                position=chains.position.unsqueeze(0),
                log_prior=chains.log_prior.unsqueeze(0),
                log_likelihood=chains.log_likelihood.unsqueeze(0),
            ),
            step_size,
            torch.tensor(moves),
            correlation[-1],
            acceptance.unsqueeze(0),
            (weight * info.diverging).sum().unsqueeze(0),
            torch.tensor(calls * self.num_particles),
        )


class _Tuned(NamedTuple):
    """Particles after their moves, and what was learnt from them."""

    particles: SMCState
    step_size: Tensor  # ()
    num_moves: Tensor  # ()
    correlation: Tensor  # (), of the log likelihood
    acceptance_rate: Tensor  # (1,)
    diverging: Tensor  # (1,)
    gradients: Tensor  # ()


def _num_steps(step_size: float) -> int:
    return min(max(1, round(TRAJECTORY / step_size)), MAX_STEPS)


def learn_metric(position: Tensor, log_weight: Tensor) -> Metric:
    """Estimate the covariance of weighted particles, tails cut off.

    Parameters
    ----------
    position : Tensor
        Shape ``(n, d)``.
    log_weight : Tensor
        Shape ``(n,)``.

    Returns
    -------
    Metric
        Dense up to 200 dimensions, shrunk to the diagonal by the square of ``d`` over the effective number.
    """
    n, d = position.shape
    weight = log_weight.exp().to(position.dtype).unsqueeze(-1)
    z, scale = bounded(position, log_weight)
    z = z - (weight * z).sum(0)
    deviation = (weight * z.square()).sum(0).sqrt()
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    if d > MAX_DENSE_DIMENSION:
        return Metric(deviation * scale, False)
    z = z / deviation
    correlation = (weight * z).mT @ z
    shrinkage = (d / (n * effective_share(log_weight))).square().clamp(max=1.0).to(position.dtype)
    identity = torch.eye(d, dtype=position.dtype, device=position.device)
    factor, failed = torch.linalg.cholesky_ex(torch.lerp(correlation, identity, shrinkage + 1e-9))
    factor = torch.where(failed == 0, factor, identity)
    return Metric((deviation * scale).unsqueeze(-1) * factor, True)


def _summaries(position: Tensor, log_likelihood: Tensor) -> Tensor:
    return torch.cat([position, log_likelihood.unsqueeze(-1)], -1)


def _correlation(before: Tensor, after: Tensor, log_weight: Tensor) -> Tensor:
    """Return the correlation of each column before and after, tails cut off."""
    weight = log_weight.exp().to(before.dtype).unsqueeze(-1)
    x, y = (bounded(column, log_weight)[0] for column in (before, after))
    x, y = x - (weight * x).sum(0), y - (weight * y).sum(0)
    covariance = (weight * x * y).sum(0)
    size = ((weight * x * x).sum(0) * (weight * y * y).sum(0)).sqrt()
    return torch.where(size > 0, covariance / size, torch.zeros_like(size))
