"""Training of a variational approximation: gradients of its bound, and Adam, as an algorithm of the one loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import LossError, SettingsError
from bayeskit.inference.gradients.multi_sample import importance_weighted_estimate
from bayeskit.inference.objectives import IWAE, ReweightedWakeSleep, Schedule
from bayeskit.inference.objectives.objective import log_mean_exp as log_mean_weight
from bayeskit.inference.objectives.reweighted_wake_sleep import reweighted_estimate
from bayeskit.inference.samplers.driver import Ending, Records
from bayeskit.workflows.phylogenetics.variational.family import LogDensities, TreeFamily

#: Adam's averages and what keeps its steps finite.
FIRST_DECAY, SECOND_DECAY, FLOOR = 0.9, 0.999, 1e-8
#: Steps whose bounds the bar averages.
_SHOWN = 200
#: Stands for the log weight of a draw that the prior excludes.
_IMPOSSIBLE = -1e6


@dataclass(frozen=True)
class LearningRates:
    """Step sizes of Adam, lowered by a factor now and again.

    Parameters
    ----------
    topologies, branch_lengths : float, default 0.001
        Of the logits of the network, and of the parameters of branch lengths.
    factor : float, default 0.75
        What both are multiplied by, above 0 and at most 1.
    every : int, default 20,000
        After how many steps, each time.

    Raises
    ------
    SettingsError
        If a number lies outside its domain.

    Examples
    --------
    >>> LearningRates(0.01, 0.02, factor=0.5, every=10)(25)
    (0.0025, 0.005)
    """

    topologies: float = 1e-3
    branch_lengths: float = 1e-3
    factor: float = 0.75
    every: int = 20_000

    def __post_init__(self) -> None:
        for name in ("topologies", "branch_lengths"):
            if not 0 <= real_number(name, getattr(self, name)) < float("inf"):
                raise SettingsError(f"learning rates: {name}={getattr(self, name)}. Remedy: give such as 0.001.")
        if not 0 < real_number("factor", self.factor) <= 1:
            raise SettingsError(f"learning rates: factor={self.factor} lies outside (0, 1]. Remedy: give such as 0.75.")
        whole_number("every", self.every, 1)

    def __call__(self, step: int) -> tuple[float, float]:
        """Return both at a step counted from zero."""
        scale = self.factor ** (step // self.every)
        return self.topologies * scale, self.branch_lengths * scale


class TrainingState(NamedTuple):
    """Parameters and Adam's averages of the gradient and its square, vectors of the same length."""

    parameters: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class Training:
    """Ascent of the expected bound of a family; an algorithm of `drive`.

    Parameters
    ----------
    family : TreeFamily
    log_densities : callable
        Log prior and log likelihood of trees.
    objective : IWAE or ReweightedWakeSleep
    learning_rates : LearningRates
    annealing : Schedule
        Inverse temperature of the likelihood at each step.
    num_steps : int
    identity : dict
        What a checkpoint must agree with, as JSON.
    """

    family: TreeFamily
    log_densities: LogDensities
    objective: IWAE | ReweightedWakeSleep
    learning_rates: LearningRates
    annealing: Schedule
    num_steps: int
    identity: dict[str, Any] = field(default_factory=dict)
    description: str = "fitting trees"

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with."""
        return self.identity

    def start(self, generator: torch.Generator) -> TrainingState:
        """Return the first state."""
        parameters = self.family.start(generator)
        return TrainingState(parameters, torch.zeros_like(parameters), torch.zeros_like(parameters))

    def estimate(
        self, parameters: Tensor, inverse_temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return an estimate of the tempered bound, whose gradient drives the parameters, and that of the bound itself.

        Parameters
        ----------
        parameters : Tensor
            Requires a gradient.
        inverse_temperature : float
        generator : torch.Generator

        Returns
        -------
        value, bound : Tensor
            Scalars.
        """
        wake = isinstance(self.objective, ReweightedWakeSleep)
        drawn = self.family.draw(parameters, self.objective.num_particles, generator, reparameterized=not wake)
        log_guide = drawn.log_topology + drawn.log_lengths
        with torch.set_grad_enabled(torch.is_grad_enabled() and not wake):
            log_prior, log_likelihood = self.log_densities(drawn.topologies, drawn.lengths)
        log_weight = log_prior + inverse_temperature * log_likelihood - log_guide
        if isinstance(self.objective, ReweightedWakeSleep):
            value = reweighted_estimate(log_weight, log_guide, self.objective.wake_phi)
        else:
            # A draw outside the support of the prior must not give others an infinite advantage.
            possible = torch.where(log_weight.isneginf(), _IMPOSSIBLE, log_weight)
            value = importance_weighted_estimate(possible, drawn.log_topology)
        return value, log_mean_weight((log_prior + log_likelihood - log_guide).detach())

    def advance(
        self, state: TrainingState, iteration: int, generator: torch.Generator
    ) -> tuple[TrainingState, Mapping[str, Tensor]]:
        """Take one step."""
        with torch.enable_grad():
            leaf = state.parameters.detach().requires_grad_(True)
            value, bound = self.estimate(leaf, self.annealing(iteration), generator)
            (gradient,) = torch.autograd.grad(value, leaf)
        if not bool(torch.isfinite(value.detach() + gradient.sum())):
            raise LossError(
                f"the bound or its gradient is not finite at step {iteration}. Remedy: lower the learning rates, or "
                "let the inverse temperature of the likelihood rise more slowly."
            )
        return self._ascend(state, gradient, iteration), {"bound": bound}

    def _ascend(self, state: TrainingState, gradient: Tensor, iteration: int) -> TrainingState:
        """Take a step of Adam uphill."""
        count = iteration + 1
        first = torch.lerp(state.first, gradient, 1 - FIRST_DECAY)
        second = torch.lerp(state.second, gradient.square(), 1 - SECOND_DECAY)
        step = first / ((second / (1 - SECOND_DECAY**count)).sqrt_() + FLOOR)
        for_topologies, for_lengths = self.learning_rates(iteration)
        correction = 1 - FIRST_DECAY**count
        step[: self.family.num_logits] *= for_topologies / correction
        step[self.family.num_logits :] *= for_lengths / correction
        return TrainingState(state.parameters + step, first, second)

    def ending(self, state: TrainingState, iteration: int, records: Records) -> Ending | None:
        """Say whether to end."""
        return "finished" if iteration >= self.num_steps else None

    def note(self, state: TrainingState, iteration: int, records: Records) -> str:
        """Return what is shown behind the bar."""
        return f"bound {float(records['bound'][-_SHOWN:].mean()):.2f}"
