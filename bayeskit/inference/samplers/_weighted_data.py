"""Populations of particles at posteriors of weighted data, carried from some weights to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluator
from bayeskit._core.randomness import new_generator
from bayeskit._logdensity.combinators import Weighted
from bayeskit._logdensity.observations import SITE_REMEDY, check_terms_add_up
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import ShapeError
from bayeskit.inference.samplers._populations import (
    PLANNED_CALLS,
    ResampleMove,
    SMCInfo,
    SMCState,
    first_step_size,
)

_PROBES = 8
LOWEST = -1e30  # replaces minus infinity, so that differences are not nan
_IMPOSSIBLE = LOWEST / 1e6  # log ratios below are of zero likelihood


class WeightedData:
    """Data of a target that can be weighted one by one; observations with equal ``groups`` numbers are one datum."""

    def __init__(self, target: Target, groups: Tensor | None = None) -> None:
        self.target = require_target(target)
        generator = new_generator(0, stream="probes of the likelihood")
        probe = torch.randn(_PROBES, target.dim, generator=generator, dtype=torch.float64).to(target.dtype)
        probe = probe.to(target.device)
        entries = {name: x.reshape(len(x), -1) for name, x in target.pointwise_log_likelihood(probe).items()}
        #: Number of observations of each site, in their order.
        self.counts = {name: x.shape[1] for name, x in entries.items()}
        together = torch.cat(list(entries.values()), 1)
        check_terms_add_up(together.sum(1), target.log_likelihood(probe), SITE_REMEDY, entries)
        assignment = None if groups is None else _assignment(groups, together.shape[1]).to(target.device)
        self.num_data = together.shape[1] if assignment is None else int(assignment.max()) + 1
        self._assignment = assignment
        self.weighted = Weighted(target, self._each, self.num_data)

    def _each(self, pointwise: Mapping[str, Tensor]) -> Tensor:
        """Return the log likelihood of each datum at one vector, ``(n,)``."""
        entries = torch.cat([x.reshape(-1) for x in pointwise.values()])
        if self._assignment is None:
            return entries
        return entries.new_zeros(self.num_data).index_add(0, self._assignment, entries)

    def pointwise(self, u: Tensor) -> Tensor:
        """Return the log likelihood of each datum, ``(*batch, d) -> (*batch, n)``."""
        pointwise = self.target.pointwise_log_likelihood(u)
        flat = {name: x.reshape(-1, x.shape[u.dim() - 1 :].numel()) for name, x in pointwise.items()}
        each = torch.func.vmap(self._each)(flat)
        return each.reshape(*u.shape[:-1], self.num_data)

    def log_likelihood(self, position: Tensor) -> Tensor:
        """Return the log likelihood of each datum, ``(r, N, d) -> (r, N, n)``, double; what is no number is zero."""
        each = self.pointwise(position).to(torch.float64)
        return each.nan_to_num(nan=LOWEST, posinf=LOWEST, neginf=LOWEST).clamp(min=LOWEST)

    def counting(self, weights: Tensor) -> Target:
        """Return the target with data weights ``(r, n)``; batches of vectors are split into ``r`` equal parts."""
        return self.weighted.given(weights)


def _assignment(groups: Any, num_entries: int) -> Tensor:
    labels = torch.as_tensor(groups)
    if tuple(labels.shape) != (num_entries,) or labels.is_floating_point():
        raise ShapeError(
            f"groups must be {num_entries} integers, one for each observation, not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    return labels.unique(return_inverse=True)[1]


class DataPopulations(NamedTuple):
    """``r`` populations of ``N`` particles, each with its own weights of the ``n`` data."""

    particles: SMCState
    pointwise: Tensor  # (r, N, n), log likelihood of every datum, also of those with weight zero
    data_weights: Tensor  # (r, n), double precision
    step_size: Tensor  # (r,), of the moves
    num_evaluations: int

    @classmethod
    def at(cls, data: WeightedData, particles: SMCState, weight: float) -> DataPopulations:
        """Return particles of which every datum has one ``weight``."""
        pointwise = data.log_likelihood(particles.position)
        return cls(
            particles=particles,
            pointwise=pointwise,
            data_weights=pointwise.new_full((len(pointwise), data.num_data), weight),
            step_size=first_step_size(particles),
            num_evaluations=particles.log_weight.numel(),
        )


@dataclass(frozen=True, eq=False)
class _WeightedPath:
    """The straight line between two sets of data weights, ``(r, n)``."""

    data: WeightedData
    pointwise: Tensor  # (r, N, n)
    origin: Tensor
    weights: Tensor
    is_common: bool

    def log_ratio(self, particles: SMCState) -> Tensor:
        """Return the log likelihood of the data whose weights change."""
        change = self.weights - self.origin
        which = change.any(0).nonzero().flatten()  # often a single one
        total = (change[:, None, which] * self.pointwise[..., which]).sum(-1)
        return total.masked_fill(total < _IMPOSSIBLE, -torch.inf)

    def at(self, particles: SMCState, covered: Tensor) -> tuple[SMCState, Evaluator]:
        """Return the particles and their evaluation, each population with its own weights."""
        weights, (r, n) = self.between(covered), particles.log_weight.shape
        log_likelihood = (weights.unsqueeze(1) * self.pointwise).sum(-1).to(particles.position.dtype)
        evaluate = self.data.counting(weights).evaluator(r * n, PLANNED_CALLS)
        return particles._replace(log_likelihood=log_likelihood), evaluate

    def between(self, covered: Tensor) -> Tensor:
        """Return the weights at shares ``(r,)`` of the line."""
        share = covered.unsqueeze(-1)
        return torch.where(share >= 1, self.weights, self.origin + share * (self.weights - self.origin))


class Carried(NamedTuple):
    """Populations at new data weights, and how they got there."""

    state: DataPopulations
    log_ratio: Tensor  # (r,), of the normalising constants
    infos: list[SMCInfo]  # of each step
    correlations: list[Tensor]  # of the log likelihood with its value before moves, where there were any


def carry(
    data: WeightedData,
    state: DataPopulations,
    weights: Tensor,
    steps: ResampleMove,
    generator: torch.Generator,
    *,
    is_common: bool = False,
) -> Carried:
    """Carry populations to data weights ``(r, n)``, which are equal for all where ``is_common``."""
    origin = state.data_weights
    covered = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
    total, infos, correlations = torch.zeros_like(covered), [], []
    while bool((covered < 1).any()):
        path = _WeightedPath(data, state.pointwise, origin, weights, is_common)
        step = steps.step(path, state.particles, covered, state.step_size, generator)
        covered, total = step.covered, total + step.info.log_increment
        infos.append(step.info)
        state = state._replace(particles=step.particles, data_weights=path.between(covered), step_size=step.step_size)
        if step.moved is not None:
            correlations.append(step.moved.correlation)
            state = state._replace(
                pointwise=data.log_likelihood(step.particles.position),
                num_evaluations=state.num_evaluations + step.moved.num_evaluations + step.particles.log_weight.numel(),
            )
    return Carried(state=state, log_ratio=total, infos=infos, correlations=correlations)
