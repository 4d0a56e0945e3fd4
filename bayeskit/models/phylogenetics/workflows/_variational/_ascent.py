"""Stochastic ascent of the expected bound of a family of trees, as an algorithm of ``drive``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from bayeskit.errors import LossError
from bayeskit.extend import (
    IWAE,
    Ending,
    Records,
    ReweightedWakeSleep,
    WeightSchedule,
    importance_weighted_estimate,
    log_mean_weight,
    reweighted_estimate,
)
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._learning_rates import LearningRates, Pace, by_steps

#: Log prior and log likelihood of trees, given topologies, branch lengths and parameters by name.
LogDensities = Callable[..., tuple[Tensor, Tensor]]


#: Settings of Adam (Kingma and Ba 2015).
_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
#: Number of steps whose bounds the progress bar averages.
_SHOWN = 200
#: Replaces the log weight of a draw that the prior excludes.
_IMPOSSIBLE = -1e6


class TrainingState(NamedTuple):
    """Parameters and Adam's averages of the gradient and its square, vectors of the same length."""

    parameters: Tensor
    first: Tensor
    second: Tensor
    position: Tensor  # at which the last step read the schedules, a scalar


@dataclass(frozen=True, eq=False)
class Training:
    """Ascent of the expected bound of a family; an algorithm of `drive`."""

    family: TreeFamily
    log_densities: LogDensities  # log prior and log likelihood of trees
    objective: IWAE | ReweightedWakeSleep
    learning_rates: LearningRates
    annealing: WeightSchedule  # inverse temperature of the likelihood at each step
    num_steps: int
    identity: dict[str, Any] = field(default_factory=dict)  # facts that a checkpoint must match, as JSON
    pace: Pace = by_steps
    first: TrainingState | None = None  # of a later part of a run, after as many steps as `taken`
    taken: int = 0
    until: int | None = None  # step or position at which a part of a run ends
    description: str = "fitting trees"

    def facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint must match."""
        return self.identity

    def start(self, generator: torch.Generator) -> TrainingState:
        """Return the first state."""
        if self.first is not None:
            return self.first
        parameters = self.family.start(generator)
        return TrainingState(
            parameters=parameters,
            first=torch.zeros_like(parameters),
            second=torch.zeros_like(parameters),
            position=torch.zeros((), dtype=torch.float64),
        )

    def estimate(
        self, parameters: Tensor, inverse_temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return scalar estimates of the tempered bound, whose gradient drives the parameters, and of the bound."""
        wake = isinstance(self.objective, ReweightedWakeSleep)
        drawn = self.family.draw(parameters, self.objective.num_particles, generator, reparameterized=not wake)
        log_guide = drawn.log_guide
        with torch.set_grad_enabled(torch.is_grad_enabled() and not wake):
            log_prior, log_likelihood = self.log_densities(drawn.topologies, drawn.lengths, **drawn.parameters)
        log_weight = log_prior + inverse_temperature * log_likelihood - log_guide
        if isinstance(self.objective, ReweightedWakeSleep):
            value = reweighted_estimate(log_weight, log_guide, self.objective.wake_phi)
        else:
            # A draw outside the prior's support must not give the other draws an infinite learning signal.
            possible = torch.where(log_weight.isneginf(), _IMPOSSIBLE, log_weight)
            value = importance_weighted_estimate(possible, drawn.log_topology)
        return value, log_mean_weight((log_prior + log_likelihood - log_guide).detach())

    def advance(
        self, state: TrainingState, iteration: int, generator: torch.Generator
    ) -> tuple[TrainingState, Mapping[str, Tensor]]:
        """Take one step."""
        iteration += self.taken
        position = self.pace(iteration, float(state.position))
        step = int(position)
        with torch.enable_grad():
            leaf = state.parameters.detach().requires_grad_(True)
            value, bound = self.estimate(leaf, self.annealing(step), generator)
            (gradient,) = torch.autograd.grad(value, leaf)
        if not bool(torch.isfinite(value.detach() + gradient.sum())):
            raise LossError(
                f"the bound or its gradient is not finite at step {iteration}. Remedy: lower the learning rates, or "
                "let the inverse temperature of the likelihood rise more slowly."
            )
        at = torch.tensor(position, dtype=torch.float64)
        parameters, first, second = self._ascend(state, gradient, iteration, self.learning_rates(step))
        after = TrainingState(parameters=parameters, first=first, second=second, position=at)
        return after, {"bound": bound, "position": at}

    def _ascend(
        self, state: TrainingState, gradient: Tensor, iteration: int, rates: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step of Adam towards a maximum; return parameters and both averages."""
        step, first, second = torch.zeros_like(gradient), state.first.clone(), state.second.clone()
        taken = torch.tensor(float(iteration))
        adam([step], [gradient], [first], [second], [], [taken], lr=1.0, maximize=True, foreach=False, **_ADAM)
        for_topologies, for_lengths = rates
        step[: self.family.num_logits] *= for_topologies
        step[self.family.num_logits :] *= for_lengths
        return state.parameters + step, first, second

    def ending(self, state: TrainingState, iteration: int, records: Records) -> Ending | None:
        """Return the reason to end, or None to continue."""
        done = iteration + self.taken >= self.num_steps
        if self.until is not None:
            done = done or max(float(iteration + self.taken), float(state.position)) >= self.until
        return "finished" if done else None

    def note(self, state: TrainingState, iteration: int, records: Records) -> str:
        """Return the text behind the progress bar."""
        latest = records.blocks("bound", max(0, records.count("bound") - _SHOWN))
        return f"bound {float(torch.cat(latest).mean()):.2f}"
