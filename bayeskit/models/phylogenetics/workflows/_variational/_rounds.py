"""Parts of a run of variational inference, between which the support grows."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit.extend import Control, Ending, drive, new_generator
from bayeskit.models.phylogenetics.workflows._growing_support import (
    ScoredTrees,
    SupportGrowth,
    options_in,
    with_new_options,
)
from bayeskit.models.phylogenetics.workflows._variational._ascent import Training, TrainingState
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._support import expand_support
from bayeskit.models.phylogenetics.workflows._variational._target import (
    TreeTarget,
    fingerprint_of_target,
    log_posterior,
)


class GrowthRounds(NamedTuple):
    """What the support grows by."""

    trees: ScoredTrees | None
    growth: SupportGrowth | None
    seed: int


class _Run(NamedTuple):
    """Result of all parts of a run."""

    family: TreeFamily
    state: TrainingState
    bounds: Tensor
    positions: Tensor
    ending: Ending
    seconds: float


def train_in_rounds(
    training: Training,
    target: TreeTarget,
    control: Control,
    rounds: GrowthRounds,
    settings: dict[str, Any],
    spent: float,
) -> _Run:
    """Train in parts, between which the support grows; `spent` seconds of the time budget are gone."""
    begin = time.monotonic()
    ends: list[int | None] = [] if rounds.growth is None else list(rounds.growth.positions(training.num_steps))
    records: dict[str, list[Tensor]] = {"bound": [], "position": []}
    nothing, seconds = torch.zeros(0, dtype=torch.float64), spent
    stream = "variational inference over trees"
    for number, end in enumerate([*ends, None], start=1):
        identity = {"model": fingerprint_of_target(target, training.family.network), **settings}
        training = replace(training, identity=identity, until=end)
        path = control.checkpoint
        here = replace(
            control,
            checkpoint=path if path is None or end is None else f"{path}.growth{number}",
            time_budget=None if control.time_budget is None else time_left(control, spent + time.monotonic() - begin),
        )
        outcome = drive(training, here, new_generator(rounds.seed, stream=stream))
        for name, parts in records.items():
            parts.append(outcome.records[name].clone() if name in outcome.records else nothing)
        seconds += outcome.seconds
        if end is None or outcome.ending != "finished":
            break
        training = replace(training, first=outcome.state, taken=training.taken + outcome.num_iterations)
        stream = f"variational inference over trees, after round {number}"
        if rounds.growth is not None and rounds.trees is not None:
            growing = time.monotonic()
            generator = new_generator(rounds.seed, stream=f"growth of a support, round {number}")
            rounds.trees.log_density = partial(log_posterior, target, training.family.medians(outcome.state.parameters))
            training = _grown(training, rounds.trees, rounds.growth, generator, control.progress)
            seconds += time.monotonic() - growing
    bounds, positions = (torch.cat(parts) for parts in records.values())
    return _Run(
        family=training.family,
        state=outcome.state,
        bounds=bounds,
        positions=positions,
        ending=outcome.ending,
        seconds=seconds,
    )


def time_left(control: Control, spent: float) -> float:
    """Return what is left of the time budget, at least a moment."""
    return max((control.time_budget or 0.0) - spent, 1e-3)


def _grown(
    training: Training, trees: ScoredTrees, growth: SupportGrowth, generator: torch.Generator, progress: bool
) -> Training:
    """Return a training that goes on with the options of probable topologies outside the support."""
    family, state = training.family, training.first
    if state is None:
        raise TypeError("a support grows between two parts of a run")
    network = family.topologies(state.parameters)
    trees.add(network.sample(growth.num_draws, seed=generator).distinct()[0])
    expand_support(trees, growth, progress)
    probable = trees.probable(growth.mass)
    missing = network.log_prob(trees.topologies[probable]).isneginf().numpy()
    if not missing.any():
        return training
    new = probable[missing]
    grown = TreeFamily(
        with_new_options(network, trees.topologies[new], trees.shares[new].numpy()), family.lengths, family.guide
    )
    return replace(training, family=grown, first=carried(state, family, grown))


def carried(state: TrainingState, old: TreeFamily, new: TreeFamily) -> TrainingState:
    """Return the state for a family with more options; what is new starts as in a new family."""
    stream = new_generator(0, stream="start of what is replaced")
    parameters = new.start(stream)
    options = torch.from_numpy(options_in(new.network.graph, old.network.graph))
    head = len(old.lengths.start(0, stream))
    columns = len(old.lengths.start(1, stream)) - head
    features = torch.empty(old.places.num_features, dtype=torch.int64)
    of_old = torch.from_numpy(old.places.feature_of[:-2])
    used = of_old < old.places.num_features
    features[of_old[used]] = torch.from_numpy(new.places.feature_of)[options[used]]
    table = new.num_logits + head
    rows = (features[:, None] * columns + torch.arange(columns)).flatten() + table
    rest = torch.arange(new.guide.num_parameters) + table + columns * new.places.num_features
    place = torch.cat([options, torch.arange(new.num_logits, table), rows, rest])
    first, second = (torch.zeros_like(parameters).index_copy(0, place, one) for one in (state.first, state.second))
    # Logits of old options are kept relative to those of new ones.
    parameters[place[old.num_logits :]] = state.parameters[old.num_logits :]
    return state._replace(parameters=parameters, first=first, second=second)
