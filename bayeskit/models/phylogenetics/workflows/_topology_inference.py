"""Posterior over topologies, branch lengths and parameters from an alignment alone, by tempered chains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.distributions import Exponential, Gamma, TorchDistribution
from torch import Tensor

from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.extend import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Evidence,
    Exchange,
    Outcome,
    Records,
    as_inference_data,
    bidirectional_ratio,
    drive,
    effective_sample_size,
    frame_table,
    mean_error,
    new_generator,
    nothing_done,
    r_hat,
    real_number,
    result_html,
    say_early,
    setting_as_json,
    warn_user,
    warnings_listed,
    whole_number,
)
from bayeskit.models.phylogenetics import (
    Alignment,
    GammaDirichlet,
    Partition,
    SiteRates,
    SubstitutionModel,
    Topologies,
    Tree,
    TreeSample,
    VariableSites,
    asdsf,
    check_for_search,
)
from bayeskit.models.phylogenetics import (
    _clades as clades,
)
from bayeskit.models.phylogenetics._neighbour_joining import joined_neighbours
from bayeskit.models.phylogenetics._parameters import FreeParameters, PartitionParameters, free_parameters
from bayeskit.models.phylogenetics._partitions import check_separate_lengths, sites_of_lengths, subsets_of
from bayeskit.models.phylogenetics._topology_constraints import constraint_splits, log_number_of_topologies
from bayeskit.models.phylogenetics._topology_moves._chains import (
    FIRST_LENGTH,
    CompiledChains,
    LengthPrior,
    Moves,
    Process,
    TreeChains,
    Trees,
    topologies_of,
)
from bayeskit.models.phylogenetics._topology_moves._reference import TreeReference
from bayeskit.models.phylogenetics._topology_moves._tensor_chains import tree_chains
from bayeskit.models.phylogenetics._trees import check_same_taxa
from bayeskit.models.phylogenetics.workflows._gradient_moves import GradientMoves
from bayeskit.models.phylogenetics.workflows._topology_comparison import check_data, model_facts

if TYPE_CHECKING:
    import xarray as xr


class _History(NamedTuple):
    """Trees and parameters of some chains in rounds before the last fit of the reference."""

    splits: Tensor  # (rounds, chains, edges, words), int64
    lengths: Tensor  # (rounds, chains, sets * edges)
    position: Tensor  # (rounds, chains, P)

    def and_round(self, trees: Trees, position: Tensor, chains: Tensor) -> _History:
        """Return the history with the present state of `chains` as a further round."""
        row = trees.splits[chains], trees.lengths[chains], position[chains]
        return _History(*(torch.cat([kept, new[None]]) for kept, new in zip(self, row, strict=True)))


class SearchState(NamedTuple):
    """State of `R` runs, each of `T` tempered replicas; `P` parameters, replicas in the order of runs."""

    trees: Trees  # of R * T chains
    position: Tensor  # unconstrained parameters, (R * T, P)
    replica: Tensor  # the replica at each temperature, (R, T), int64
    beta: Tensor  # inverse temperatures from 0 to 1, (T,)
    rejection: Tensor  # sums of rejection probabilities of neighbours since the last adaptation, (T - 1,)
    num_counted: Tensor  # number of their terms, ()
    mean: Tensor  # of the parameters at the posterior, (P,)
    covariance: Tensor  # (P, P)
    log_scale: Tensor  # of the proposals of parameters at each temperature, (T,)
    log_step: Tensor  # of the gradient moves, ()
    gradient_counts: Tensor  # number of gradient moves, and sum of their probabilities of acceptance, (2,)
    heading: Tensor  # per replica: 1 if its last end visited is the prior, (R, T), int64
    round_trips: Tensor  # (R,), int64
    reference: TreeReference  # of trees, at the beginning of the path; without clades, the path begins at the prior
    parameter_mean: Tensor  # of the normal distribution of the parameters there, (P,)
    parameter_root: Tensor  # Cholesky factor of its covariance, (P, P)
    effort: Tensor  # moves of a warmer chain for each of one at the posterior; share of independent proposals, (2,)
    judged: Tensor  # independent proposals and those accepted at the last adaptation, (2,), int64
    history: _History  # at the posterior's temperature
    warmer: _History  # at the other temperatures, in the later half of the rounds before the first fit


#: Rounds between proposals of parameters, number of these without and with gradient moves, and rounds between those.
_PARAMETER_ROUNDS, _PARAMETER_PROPOSALS, _BESIDE_GRADIENTS, _GRADIENT_ROUNDS = 2, 3, 2, 20
#: Moves of a chain in a round for each edge, without and with free parameters: proposals of these evaluate whole trees,
#: so that a round of few moves would be spent on them.
_MOVES_PER_EDGE = (0.5, 2.0)
#: Shares of the warm-up after which the reference is fitted to the later half of the rounds before, and the weight of
#: the trees at other temperatures in each fit: they have clades which the posterior's chains have not met yet.
_FITTED, _WARMER = (0.3, 0.55, 0.8), (0.5, 0.3, 0.1)
#: Share of the warm-up after which the temperatures stay as they are, and number of their adaptations.
_ADAPTED, _ADAPTATIONS = 0.95, 6
#: Rate of exchange from which warmer chains move as often as those at the posterior, and their least share of the moves
#: of those: what they find arrives by exchange. Rate of acceptance from which independent proposals keep their share,
#: and the least part of it that is left.
_WORTHWHILE_EXCHANGE, _LEAST_EFFORT, _WORTHWHILE_PROPOSAL, _LEAST_SHARE = 0.4, 0.2, 0.1, 0.1
_TARGET_ACCEPTANCE = 0.25
#: Size of the first leapfrog steps, and rate at which gradient moves shall be accepted.
_FIRST_STEP, _GRADIENT_ACCEPTANCE = 0.3, 0.7
#: A log density ratio that stands for none.
_IMPOSSIBLE = 1e10


@dataclass
class TopologySearch:
    """Runs of tempered chains over topologies as an algorithm for the driver."""

    chains: TreeChains
    space: FreeParameters | PartitionParameters
    num_runs: int
    beta: Tensor
    num_warmup: int
    num_samples: int
    moves: Moves
    num_moves: int  # of each chain in a round
    settings: dict[str, Any]
    stop: float | None = None
    taxa: tuple[str, ...] = ()
    from_reference: bool = True
    log_topologies: float = 0.0  # log number of topologies with positive prior probability
    first: tuple[Topologies, Tensor] | None = None  # a tree of each run, (runs, edges)
    gradient_moves: GradientMoves | None = None
    _began: float = math.inf  # when the run started; one that is resumed forecasts nothing

    description = "topologies"

    @property
    def num_steps(self) -> int:
        """Rounds of moves, warm-up included."""
        return self.num_warmup + self.num_samples

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and a resumed run."""
        return self.settings

    @cached_property
    def _fixed_process(self) -> Process:
        return self._process_at(torch.empty(self.chains.num_chains, 0, dtype=torch.float64))

    def _process(self, position: Tensor) -> Process:
        return self._process_at(position) if self.space.dim else self._fixed_process

    def _process_at(self, position: Tensor) -> Process:
        count, like, parts = len(position), position.new_zeros(()), []
        for model, categories in self.space.parts(position):
            frequencies = model.frequencies(like)
            number = frequencies.shape[-1]
            matrix = model.rate_matrix(like).expand(count, number, number)
            one = Process.of(matrix, frequencies.expand(count, number), categories, self.chains.num_states)
            # The sites that cannot be in the data are a part of their own.
            parts += [one, one] if isinstance(model, VariableSites) else [one]
        return Process.joined(parts)

    def start(self, generator: torch.Generator) -> SearchState:
        """Start from the given trees, or from trees of few changes, and from the prior's parameters."""
        self._began = time.monotonic()
        levels, runs, dim = len(self.beta), self.num_runs, self.space.dim
        replica = torch.arange(levels).expand(runs, levels).contiguous()
        # Medians of the priors would need their quantiles; the mean of few draws is near enough.
        draws = self.space.sample(64 * runs * levels, generator).reshape(64, runs * levels, dim)
        position = draws.median(0).values
        trees = self._first_trees(generator, self._process(position))
        return SearchState(
            trees,
            position,
            replica,
            self.beta,
            torch.zeros(levels - 1, dtype=torch.float64),
            torch.zeros((), dtype=torch.int64),
            position.mean(0),
            torch.eye(dim, dtype=torch.float64) * 0.05,
            torch.zeros(levels, dtype=torch.float64),
            torch.tensor(_FIRST_STEP, dtype=torch.float64).log(),
            torch.zeros(2, dtype=torch.float64),
            torch.zeros(runs, levels, dtype=torch.int64),
            torch.zeros(runs, dtype=torch.int64),
            TreeReference.none(self.chains.num_taxa, self.chains.num_sets),
            torch.zeros(dim, dtype=torch.float64),
            torch.eye(dim, dtype=torch.float64),
            torch.tensor([1.0, self.moves.independent], dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            self._no_history(runs),
            self._no_history(runs * (levels - 1)),
        )

    def _no_history(self, chains: int) -> _History:
        edges, words = self.chains.num_edges, clades.num_words(self.chains.num_taxa)
        numbers = torch.zeros(0, chains, self.chains.num_sets * edges, dtype=torch.float64)
        splits = torch.zeros(0, chains, edges, words, dtype=torch.int64)
        return _History(splits, numbers, torch.zeros(0, chains, self.space.dim, dtype=torch.float64))

    def _due(self) -> list[int]:
        """Return the rounds before which the reference is fitted."""
        return [max(2, round(part * self.num_warmup)) for part in _FITTED] if self.from_reference else []

    def _first_trees(self, generator: torch.Generator, process: Process) -> Trees:
        if self.first is None:
            return self.chains.start(generator, process)
        run = np.arange(self.num_runs).repeat(len(self.beta))
        topologies, lengths = self.first
        return self.chains.start_at(topologies[run], lengths[run], generator, process)

    def advance(
        self, state: SearchState, iteration: int, generator: torch.Generator
    ) -> tuple[SearchState, Mapping[str, Tensor]]:
        """Move all replicas, propose parameters, and exchange every second pair of neighbouring temperatures."""
        warming = iteration < self.num_warmup
        due = self._due()
        if iteration in due:
            state = self._fit(state, due.index(iteration))
        reference = state.reference if len(state.reference.clades) else None
        runs, levels = state.replica.shape
        level = (
            torch.empty_like(state.replica)
            .scatter_(1, state.replica, torch.arange(levels).expand(runs, levels))
            .flatten()
        )
        beta = state.beta[level]
        at = (beta == 0).nonzero().flatten()
        position = state.position.clone()
        if reference is None:
            position[at] = self.space.sample(len(at), generator)
        else:
            normal = torch.randn(len(at), self.space.dim, generator=generator, dtype=torch.float64)
            position[at] = state.parameter_mean + normal @ state.parameter_root.T
        process = self._process(position)
        drawn = self.chains.draw(state.trees, process, at.tolist(), generator, reference)
        state = state._replace(trees=drawn, position=position)
        warmer, independent = state.effort.tolist()
        moves = torch.where(beta == 1, self.num_moves, math.ceil(warmer * self.num_moves))
        kinds = replace(self.moves, independent=independent)
        trees = self.chains.run(state.trees, process, beta, kinds, torch.where(beta > 0, moves, 0), reference)
        state = state._replace(trees=trees)
        if self.space.dim and iteration % _PARAMETER_ROUNDS == 0:
            state = self._propose(state, process, level, warming, iteration, generator)
        chain = state.replica + torch.arange(runs)[:, None] * levels
        cold = chain[:, -1]
        if self.gradient_moves is not None and iteration % _GRADIENT_ROUNDS == 0:
            state = self._follow_gradient(state, self.gradient_moves, cold, warming, iteration, generator)
        row = {
            "splits": state.trees.splits[cold],
            "lengths": state.trees.lengths[cold],
            "position": state.position[cold],
        }
        if due and iteration < due[-1]:
            state = state._replace(history=state.history.and_round(state.trees, state.position, cold))
        if due and due[0] // 2 <= iteration < due[0]:
            others = chain[:, :-1].flatten()
            state = state._replace(warmer=state.warmer.and_round(state.trees, state.position, others))
        state, exchanged = self._exchange(state, iteration, generator)
        state = self._count(state, warming)
        return self._adapt(state, iteration) if warming else state, row | exchanged

    def _independent_counts(self, state: SearchState) -> Tensor:
        """Return the numbers of independent proposals and of those accepted, `(2,)`."""
        return state.trees.counts.sum(0)[list(asdict(self.moves)).index("independent")]

    def _fit(self, state: SearchState, number: int) -> SearchState:
        """Fit the reference for the `number`-th time, which is judged anew, and begin its path the first time."""
        first, last = number == 0, number == len(_FITTED) - 1
        splits, lengths, position = (part[len(part) // 2 :].flatten(0, 1) for part in state.history)
        more_splits, more_lengths, _ = (part.flatten(0, 1) for part in state.warmer)
        share = _WARMER[number] * len(splits) / len(more_splits)
        weights = torch.cat([torch.ones(len(splits)), torch.full((len(more_splits),), share)]).double()
        mean, dim = position.mean(0), self.space.dim
        spread = position - mean
        # Few draws do not show the whole spread.
        covariance = spread.mT @ spread / max(1, len(spread) - 1) * 1.2 + 1e-4 * torch.eye(dim, dtype=torch.float64)
        runs, levels = state.replica.shape
        return state._replace(
            reference=TreeReference.fitted(
                torch.cat([splits, more_splits]), torch.cat([lengths, more_lengths]), weights, self.chains.num_taxa
            ),
            parameter_mean=mean,
            parameter_root=torch.linalg.cholesky(covariance),
            beta=torch.linspace(0, 1, levels, dtype=torch.float64) if first else state.beta,
            effort=torch.stack([state.effort[0], torch.tensor(self.moves.independent).double()]),
            judged=self._independent_counts(state),
            rejection=torch.zeros_like(state.rejection),
            num_counted=torch.zeros_like(state.num_counted),
            heading=torch.zeros_like(state.heading),
            history=self._no_history(runs) if last else state.history,
            warmer=self._no_history(runs * (levels - 1)) if last else state.warmer,
        )

    def _log_parameters(self, state: SearchState, position: Tensor) -> Tensor:
        """Return the log density of the reference of the parameters, `(chains, P) -> (chains,)`."""
        root = state.parameter_root
        scaled = torch.linalg.solve_triangular(root, (position - state.parameter_mean).mT, upper=False)
        constant = 0.5 * self.space.dim * math.log(2 * math.pi) + root.diagonal().log().sum()
        return -0.5 * scaled.square().sum(0) - constant

    def _log_ratio(self, state: SearchState) -> Tensor:
        """Return the log density of the end of the path relative to its beginning, `(chains,)`."""
        trees = state.trees
        if not len(state.reference.clades):
            return trees.log_likelihood
        prior = self.chains.prior.log_density(trees.lengths, self.chains.num_taxa) - self.log_topologies
        ratio = trees.log_likelihood + prior - trees.log_reference
        if self.space.dim:
            ratio = ratio + self.space.log_prior(state.position) - self._log_parameters(state, state.position)
        return ratio.nan_to_num(-_IMPOSSIBLE).clamp(min=-_IMPOSSIBLE)

    def _root(self, state: SearchState) -> Tensor:
        """Return a root of the covariance of the parameters, `(P, P)`."""
        return torch.linalg.cholesky(state.covariance + 1e-10 * torch.eye(self.space.dim, dtype=torch.float64))

    def _propose(
        self,
        state: SearchState,
        process: Process,
        level: Tensor,
        warming: bool,
        iteration: int,
        generator: torch.Generator,
    ) -> SearchState:
        """Random walk Metropolis steps of the parameters, with the covariance found in warm-up."""
        dim, trees, position, number = self.space.dim, state.trees, state.position, iteration // _PARAMETER_ROUNDS
        beta, log_scale, referred = state.beta[level], state.log_scale.clone(), bool(len(state.reference.clades))
        root = self._root(state)

        def log_density(position: Tensor) -> Tensor:
            prior = self.space.log_prior(position)
            return torch.lerp(self._log_parameters(state, position), prior, beta) if referred else prior

        log_prior = log_density(position)
        for _ in range(_PARAMETER_PROPOSALS if self.gradient_moves is None else _BESIDE_GRADIENTS):
            step = torch.randn(position.shape, generator=generator, dtype=torch.float64) @ root.T
            scale = (2.38 / math.sqrt(dim)) * log_scale[level].exp()
            proposed = position + scale[:, None] * step
            there = self._process(proposed)
            log_prior_there = log_density(proposed)
            moved = self.chains.run(trees, there, beta, self.moves, torch.zeros_like(level))
            gain = torch.where(beta > 0, beta * (moved.log_likelihood - trees.log_likelihood), 0.0)
            log_ratio = gain + log_prior_there - log_prior
            uniform = torch.rand(len(level), generator=generator, dtype=torch.float64)
            accept = (uniform.log() < log_ratio) & there.is_finite
            position = torch.where(accept[:, None], proposed, position)
            log_prior = torch.where(accept, log_prior_there, log_prior)
            log_likelihood = torch.where(accept, moved.log_likelihood, trees.log_likelihood)
            trees = trees._replace(log_likelihood=log_likelihood)
            if warming:
                probability = log_ratio.clamp(max=0).exp().nan_to_num(0.0)
                mean = torch.zeros_like(log_scale).index_add_(0, level, probability) / self.num_runs
                log_scale += (mean - _TARGET_ACCEPTANCE) / (number + 1) ** 0.6
        state = state._replace(trees=trees, position=position, log_scale=log_scale)
        if not warming:
            return state
        runs, levels = state.replica.shape
        cold = position[state.replica[:, -1] + torch.arange(runs) * levels]
        weight = min(1.0, 3.0 / (number + 3))
        mean = torch.lerp(state.mean, cold.mean(0), weight)
        spread = (cold - state.mean).mT @ (cold - mean) / runs
        covariance = torch.lerp(state.covariance, (spread + spread.mT) / 2, 0.0 if iteration < 50 else weight)
        return state._replace(mean=mean, covariance=covariance)

    def _follow_gradient(
        self,
        state: SearchState,
        moves: GradientMoves,
        cold: Tensor,
        warming: bool,
        iteration: int,
        generator: torch.Generator,
    ) -> SearchState:
        """Move branch lengths and parameters of the chains at the posterior along the gradient of its density."""
        trees = state.trees
        topologies, order = topologies_of(self.taxa, trees.splits[cold])
        edges = _in_each_set(order, self.chains.num_sets)
        step = state.log_step.exp() * (0.5 + torch.rand((), generator=generator, dtype=torch.float64))
        lengths, position = trees.lengths[cold], state.position
        moved = moves.move(topologies, lengths.gather(1, edges), position[cold], self._root(state), step, generator)
        trees = trees._replace(lengths=trees.lengths.index_put((cold,), lengths.scatter(1, edges, moved.lengths)))
        position = position.index_put((cold,), moved.position)
        reference = state.reference if len(state.reference.clades) else None
        ones = torch.ones(len(position), dtype=torch.float64)
        trees = self.chains.run(trees, self._process(position), ones, self.moves, 0, reference)
        log_step = state.log_step
        if warming:
            number = iteration // _GRADIENT_ROUNDS
            log_step = log_step + (moved.probability.mean() - _GRADIENT_ACCEPTANCE) / (number + 1) ** 0.6
        counts = torch.stack([torch.tensor(float(len(cold))).double(), moved.probability.sum()])
        return state._replace(
            trees=trees, position=position, log_step=log_step, gradient_counts=state.gradient_counts + counts
        )

    def _exchange(
        self, state: SearchState, iteration: int, generator: torch.Generator
    ) -> tuple[SearchState, dict[str, Tensor]]:
        runs, levels = state.replica.shape
        log_likelihood = state.trees.log_likelihood.reshape(runs, levels).gather(1, state.replica)
        log_ratio = self._log_ratio(state).reshape(runs, levels).gather(1, state.replica)
        width = state.beta.diff()
        probability = (width * (log_ratio[:, :-1] - log_ratio[:, 1:])).exp().clamp(max=1.0)
        uniform = torch.rand(probability.shape, generator=generator, dtype=torch.float64)
        turn = (torch.arange(levels - 1) + iteration) % 2 == 0
        accept = (uniform < probability) & turn
        source = torch.arange(levels).repeat(runs, 1)
        source[:, :-1] += accept.long()
        source[:, 1:] -= accept.long()
        state = state._replace(
            replica=state.replica.gather(1, source),
            rejection=state.rejection + (1 - probability).mean(0),
            num_counted=state.num_counted + 1,
        )
        found = {"log_likelihood": log_likelihood, "log_ratio": log_ratio, "exchange_probability": probability}
        return state, found

    def _count(self, state: SearchState, warming: bool) -> SearchState:
        """Count round trips of replicas from the beginning of the path to the posterior and back."""
        heading = state.heading.clone()
        top, bottom = state.replica[:, -1:], state.replica[:, :1]
        arrived = heading.gather(1, top)[:, 0] == 1
        heading.scatter_(1, top, 0).scatter_(1, bottom, 1)
        trips = state.round_trips if warming else state.round_trips + arrived.long()
        return state._replace(heading=heading, round_trips=trips)

    def _adapt(self, state: SearchState, iteration: int) -> SearchState:
        """Place the temperatures so that neighbours exchange at equal rates, and let moves be worth their time."""
        begin = _FITTED[0] if self.from_reference else 0.0
        step = (_ADAPTED - begin) / _ADAPTATIONS
        due = [round((begin + step * (k + 1)) * self.num_warmup) for k in range(_ADAPTATIONS)]
        if iteration + 1 not in due or int(state.num_counted) < 10:
            return state
        seen = Exchange(state.rejection / state.num_counted, torch.zeros(1), int(state.num_counted))
        beta = seen.temperatures(state.beta, len(state.beta) - 1).to(torch.float64)
        beta[0] = 0
        warmer = min(1.0, max(_LEAST_EFFORT, float(1 - seen.rejection.mean()) / _WORTHWHILE_EXCHANGE))
        counts = self._independent_counts(state)
        tried, accepted = (counts - state.judged).tolist()
        worth = min(1.0, max(_LEAST_SHARE, accepted / tried / _WORTHWHILE_PROPOSAL)) if tried else 1.0
        return state._replace(
            effort=torch.tensor([warmer, worth * self.moves.independent], dtype=torch.float64),
            judged=counts,
            beta=beta,
            rejection=torch.zeros_like(state.rejection),
            num_counted=torch.zeros_like(state.num_counted),
        )

    def ending(self, state: SearchState, iteration: int, records: Records) -> Ending | None:
        """Return how the runs end, or None to continue."""
        if iteration == _FORECAST_AFTER:
            self._warn_of_hours()
        if iteration >= self.num_steps:
            return "finished"
        done = iteration - self.num_warmup
        if self.stop is None or done < _CHECKED or done % _CHECKED:
            return None
        splits = records["splits"][self.num_warmup :]
        samples = [
            TreeSample.from_topologies(topologies_of(self.taxa, splits[:, run])[0]) for run in range(self.num_runs)
        ]
        if not asdsf(samples).average < self.stop:
            return None
        sizes = _split_effective_sizes(samples)
        return None if len(sizes) and float(sizes.min()) < _LEAST_EFFECTIVE else "converged"

    def _warn_of_hours(self) -> None:
        """Say how long all rounds would take, if that is hours."""
        hours = (time.monotonic() - self._began) / _FORECAST_AFTER * self.num_steps / 3600
        if hours > 1:
            warn_user(
                f"{self.num_steps} rounds of {self.chains.num_taxa} taxa would take about {hours:.1f} hours, by the "
                f"first {_FORECAST_AFTER} of them. Remedy: give time_budget=, and checkpoint= to continue later; or "
                "fewer rounds, or num_jobs= threads.",
                SamplingWarning,
            )

    def note(self, state: SearchState, iteration: int, records: Records) -> str:
        """Return the text behind the progress bar."""
        phase = "warm-up" if iteration <= self.num_warmup else "sampling"
        best = float(records.blocks("log_likelihood")[-1][-1, :, -1].max())
        return f"{phase}, log likelihood {best:.1f}, {int(state.round_trips.sum())} round trips"


#: Rounds from which the time of all is told.
_FORECAST_AFTER = 10
#: Draws between checks of the stopping rule.
_CHECKED = 200
#: Topologies of a search that a notebook shows.
_SHOWN = 10


@dataclass(frozen=True, eq=False, repr=False)
class TopologyInference:
    """Posterior over topologies, branch lengths and parameters, with the evidence over all topologies.

    Attributes
    ----------
    samples : tuple of TreeSample
        Trees of each run with their branch lengths, without burn-in. Where subsets have their own branch lengths, those
        of a tree are their means, weighted by the numbers of sites; `sample_of` has a subset's own.
    parameters : dict of Tensor
        Values of the free parameters of the substitution model and the site rates, shape `(runs, draws, *event_shape)`.
        Those of a partition are called as in `Partition`; `"relative_rates"` are beside their `"rate_shares"`.
    log_likelihood : Tensor
        Log-likelihoods at each temperature, shape `(temperatures, runs, draws)`.
    log_ratio : Tensor
        Log density of the posterior, without its constant, relative to the beginning of the path, of the states at each
        temperature, shape `(temperatures, runs, draws)`. If the path begins at the prior, this is the log-likelihood.
    log_prior : Tensor
        Log prior densities of branch lengths and parameters of the trees in `samples`, shape `(runs, draws)`.
    beta : Tensor
        Powers of the posterior along the path, from 0 to 1, shape `(temperatures,)`.
    exchange : Exchange
        Exchange rates of neighbouring temperatures, and round trips.
    moves : dict of tuple of float
        Number of proposals and acceptance rate of each kind of move at the posterior's temperature and below, and of
        the "gradient" moves at the posterior.
    ending : str
        "finished", "converged", "time budget" or "interrupted".
    seconds : float
    settings : dict
        Settings of the run.
    alignment, substitution, site_rates, branch_length_prior
        The data and the model; of a partition, which is in `alignment`, the models of each subset by its name.
    is_warm : bool
        Whether the run reached the end of its warm-up; otherwise its later half is returned.
    constraints : tuple of tuple of str
        Groups of taxa that are on one side of a branch in every tree.
    searches : tuple of TopologyInference
        Of a result of `pooled`, the searches; else empty.
    branch_lengths : Tensor or None
        With separate branch lengths, those of each of `alignment.length_groups`, shape `(runs, draws, groups, edges)`;
        edges of draw `d` of run `r` are in the order of the topology `samples[r].index[d]` of `samples[r].topologies`.
    """

    samples: tuple[TreeSample, ...]
    parameters: dict[str, Tensor]
    log_likelihood: Tensor
    log_ratio: Tensor
    log_prior: Tensor
    beta: Tensor
    exchange: Exchange
    moves: dict[str, tuple[int, float]]
    ending: Ending
    seconds: float
    settings: dict[str, Any]
    alignment: Alignment | Partition
    substitution: SubstitutionModel | Mapping[str, SubstitutionModel]
    site_rates: SiteRates | Mapping[str, SiteRates | None] | None = None
    branch_length_prior: TorchDistribution | None = None
    is_warm: bool = True
    constraints: tuple[tuple[str, ...], ...] = ()
    searches: tuple[TopologyInference, ...] = ()
    branch_lengths: Tensor | None = None

    @classmethod
    def pooled(cls, searches: Sequence[TopologyInference]) -> TopologyInference:
        """Join independent searches, such as those of several seeds on several machines.

        All their runs are compared with each other. The evidence is the mean of the searches' estimates; its error is
        the larger of that by their errors and that by their spread. `beta` is the mean of their temperatures.

        Parameters
        ----------
        searches : sequence of TopologyInference
            Of one alignment and model, with different seeds and equal numbers of draws and temperatures.

        Returns
        -------
        TopologyInference

        Raises
        ------
        SettingsError
            If there are fewer than two searches, one is itself pooled, or they differ in anything but seed and runs.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics import primates
        >>> from bayeskit.parallel import map_tasks
        >>> def search(seed):
        ...     numbers = {"num_warmup": 50, "num_samples": 50, "num_temperatures": 8}
        ...     return infer_topologies(primates()[0], seed=seed, progress=False, **numbers)
        >>> pooled = TopologyInference.pooled(map_tasks(search, [0, 1]))  # num_jobs=2 does both at a time
        >>> len(pooled.samples), pooled.sample.num_samples
        (4, 200)
        """
        searches = tuple(searches)
        _check_poolable(searches)
        first = searches[0]
        lengths = [one.branch_lengths for one in searches if one.branch_lengths is not None]
        moves = {}
        for name in first.moves:
            tried = sum(one.moves[name][0] for one in searches)
            accepted = sum(one.moves[name][0] * one.moves[name][1] for one in searches)
            moves[name] = (tried, accepted / max(1, tried))
        exchange = Exchange(
            torch.stack([one.exchange.rejection for one in searches]).mean(0),
            torch.cat([one.exchange.round_trips for one in searches]),
            first.exchange.num_iterations,
        )
        numbers = {
            "num_runs": sum(len(one.samples) for one in searches),
            "num_evaluations": sum(int(one.settings["num_evaluations"]) for one in searches),
            "seed": [one.settings["seed"] for one in searches],
        }
        early = [one.ending for one in searches if one.ending in ("interrupted", "time budget")]
        return replace(
            first,
            samples=tuple(run for one in searches for run in one.samples),
            parameters={name: torch.cat([one.parameters[name] for one in searches]) for name in first.parameters},
            log_likelihood=torch.cat([one.log_likelihood for one in searches], 1),
            log_ratio=torch.cat([one.log_ratio for one in searches], 1),
            log_prior=torch.cat([one.log_prior for one in searches]),
            branch_lengths=torch.cat(lengths) if lengths else None,
            beta=torch.stack([one.beta for one in searches]).mean(0),
            exchange=exchange,
            moves=moves,
            ending=early[0] if early else first.ending,
            seconds=sum(one.seconds for one in searches),
            settings=first.settings | numbers,
            is_warm=all(one.is_warm for one in searches),
            searches=searches,
        )

    @cached_property
    def sample(self) -> TreeSample:
        """Trees of all runs."""
        return TreeSample.pooled(self.samples)

    def sample_of(self, subset: str) -> TreeSample:
        """Return the trees of all runs with a subset's own branch lengths.

        Parameters
        ----------
        subset : str
            Name of a subset of the partition.

        Returns
        -------
        TreeSample

        Raises
        ------
        SettingsError
            If subsets do not have their own branch lengths, or there is no such subset.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics import primates
        >>> subsets = primates()[0].partitioned({"coding": range(457), "others": range(457, 898)})
        >>> numbers = {"num_warmup": 50, "num_samples": 50, "num_temperatures": 5}
        >>> found = infer_topologies(Partition(subsets), separate_branch_lengths=True, progress=False, **numbers)
        >>> found.branch_lengths.shape
        torch.Size([2, 50, 2, 21])
        >>> found.sample_of("coding").num_samples
        100
        """
        if self.branch_lengths is None or not isinstance(self.alignment, Partition):
            raise SettingsError(
                "sample_of: all sites have the same branch lengths. Remedy: use sample, or search with "
                "separate_branch_lengths=True."
            )
        if subset not in self.alignment.subsets:
            raise SettingsError(
                f"subset: there is no subset {subset!r:.80}. Remedy: choose from {', '.join(self.alignment.subsets)}."
            )
        place = self.alignment.length_indices[list(self.alignment.subsets).index(subset)]
        own = zip(self.samples, self.branch_lengths[:, :, place], strict=True)
        return TreeSample.pooled([replace(sample, branch_lengths=lengths) for sample, lengths in own])

    @cached_property
    def asdsf(self) -> float:
        """Average standard deviation of split frequencies among the runs.

        NaN for a single run, and where no split reaches a frequency of 0.1 in any run, as without signal.
        """
        return asdsf(self.samples).average if len(self.samples) > 1 else math.nan

    @cached_property
    def split_effective_sizes(self) -> Tensor:
        """Effective sample size of the indicator of each split with a frequency from 0.05 to 0.95, `(splits,)`."""
        return _split_effective_sizes(self.samples)

    @cached_property
    def r_hat(self) -> dict[str, float]:
        """R-hat of the tree length, the log-likelihood and each parameter; the largest of its elements.

        Of subsets with their own branch lengths, there are `tree_lengths` too.
        """
        return {name: float(r_hat(series).max()) for name, series in self._series.items()}

    @property
    def _series(self) -> dict[str, Tensor]:
        """Return scalar summaries, `(elements, runs, draws)`."""
        lengths = torch.stack([torch.as_tensor(sample.branch_lengths).sum(-1) for sample in self.samples])
        series = {"tree_length": lengths[None], "log_likelihood": self.log_likelihood[-1][None]}
        if self.branch_lengths is not None:
            series["tree_lengths"] = self.branch_lengths.sum(-1).movedim(-1, 0)
        for name, values in self.parameters.items():
            series[name] = values.reshape(*values.shape[:2], -1).movedim(-1, 0)
        return series

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """What speaks against convergence, each with its remedy; empty if nothing does."""
        found = []
        if not self.is_warm:
            found.append("the run ended in its warm-up and has not converged: give more time")
        more = "take more samples after a longer warm-up"
        if len(self.samples) < 2:
            found.append("a single run cannot show whether runs agree: use two runs or more")
        elif self.asdsf >= _ASDSF:
            found.append(f"the runs' split frequencies differ (ASDSF {self.asdsf:.3f}, above {_ASDSF}): {more}")
        sizes = self.split_effective_sizes
        if len(sizes) and float(sizes.min()) < _LEAST_EFFECTIVE:
            found.append(f"a split has only {float(sizes.min()):.0f} effective draws: {more}")
        worst = max(self.r_hat, key=lambda name: self.r_hat[name])
        if not self.r_hat[worst] < _MOST_R_HAT:
            found.append(f"the runs disagree on {worst} (R-hat {self.r_hat[worst]:.3f}): {more}")
        return tuple(found)

    @property
    def is_converged(self) -> bool:
        """Whether no diagnostic speaks against convergence."""
        return not self.problems

    @cached_property
    def evidence(self) -> Evidence:
        """Evidence over all topologies under their uniform prior, by the ratios of neighbouring temperatures.

        With constraints, the prior is uniform over the topologies that satisfy them. Each ratio of normalising
        constants is estimated from the draws at both of its temperatures (Bennett 1976). Not a number if the run ended
        in its warm-up.
        """
        evaluations = int(self.settings["num_evaluations"])
        if not self.is_warm:
            return Evidence("bidirectional_ratio", math.nan, math.nan, evaluations, (self.problems[0],))
        if self.searches:
            return _mean_evidence([one.evidence for one in self.searches])
        ratios, influence = ratios_of_neighbours(self.beta, self.log_ratio)
        problems = []
        trips = int(self.exchange.round_trips.sum())
        if trips < _LEAST_ROUND_TRIPS:
            problems.append(f"only {trips} round trips along the path to the posterior: take more samples")
        size = effective_sample_size(influence)
        if not float(size.min()) >= _LEAST_EFFECTIVE:
            problems.append(f"a step has only {float(size.min()):.0f} effective draws: take more samples")
        widest = float(self.exchange.rejection.max())
        if widest > _MOST_REJECTED:
            problems.append(
                f"neighbouring temperatures exchange {100 * (1 - widest):.0f} % of the time only: use more temperatures"
            )
        facts = {"round_trips": float(trips), "barrier": self.exchange.barrier}
        # Exchanges make the temperatures' errors dependent, so that their influences are added up.
        error = float(mean_error(influence.sum(0)))
        return Evidence(
            "bidirectional_ratio", float(ratios.sum()), error, evaluations, tuple(problems), facts, seconds=self.seconds
        )

    @property
    def log_evidence(self) -> float:
        """The log evidence over all topologies in nats; its error and warnings are in `evidence`."""
        return self.evidence.log_evidence

    @property
    def verdict(self) -> str:
        """One sentence on convergence and the evidence."""
        splits = "one run" if len(self.samples) < 2 else f"ASDSF {self.asdsf:.4f}"
        if len(self.samples) > 1 and math.isnan(self.asdsf):
            splits = "no split reaches a frequency of 0.1"
        state = "converged" if self.is_converged else "NOT CONVERGED"
        text = f"{state} ({splits}, {self.sample.num_samples} trees, {len(self.sample.topologies)} topologies)"
        if self.is_warm:
            text += f"; {self.evidence}"
        return text + "".join(f"\n  {problem}" for problem in self.problems)

    def _repr_html_(self) -> str:
        probable = self.sample.to_pandas(_SHOWN)[["newick", "weight", "cumulative"]]
        table = frame_table("Most probable topologies", probable, weight=".4f", cumulative=".4f")
        facts = {
            "runs": f"{len(self.samples)} of {self.log_likelihood.shape[-1]} draws",
            "largest R-hat": f"{max(self.r_hat.values()):.3f}",
            "seconds": f"{self.seconds:.1f}",
        }
        return result_html(self.verdict.split("\n")[0], [table], warnings_listed("search", self.problems), facts=facts)

    def __repr__(self) -> str:
        return f"TopologyInference({len(self.samples)} runs x {self.log_likelihood.shape[-1]} draws): {self.verdict}"

    def to_datasets(self) -> dict[str, xr.Dataset]:
        """Return the groups of `to_arviz`."""
        import xarray as xr

        draws = ("chain", "draw")
        variables = {
            name: ((*draws, *(f"{name}_dim_{k}" for k in range(values.dim() - 2))), values.numpy())
            for name, values in self.parameters.items()
        }
        variables["tree_length"] = (draws, self._series["tree_length"][0].numpy())
        if self.branch_lengths is not None:
            variables["tree_lengths"] = ((*draws, "tree_lengths_dim_0"), self.branch_lengths.sum(-1).numpy())
        stats = {
            "lp": (draws, (self.log_prior + self.log_likelihood[-1]).numpy()),
            "log_likelihood": (draws, self.log_likelihood[-1].numpy()),
        }
        return {"posterior": xr.Dataset(variables), "sample_stats": xr.Dataset(stats)}

    def to_arviz(self) -> Any:
        """Return parameters, tree length and log-likelihood as `InferenceData` (ArviZ 0.x) or `DataTree` (1.x).

        A run is a chain. Trees are in `samples`.
        """
        return as_inference_data(self.to_datasets())


def _split_effective_sizes(samples: Sequence[TreeSample]) -> Tensor:
    """Return the effective sample sizes of `TopologyInference.split_effective_sizes`."""
    sample, runs = TreeSample.pooled(samples), len(samples)
    inner = sample.topologies.below[:, sample.num_taxa :]
    splits, index = clades.identify(inner)
    shares = np.bincount(index.ravel(), np.repeat(sample.weights, index.shape[1]), len(splits))
    # All other splits share a column, which is left out.
    counted = (shares >= 0.05) & (shares <= 0.95)
    column = np.where(counted, counted.cumsum() - 1, counted.sum())
    incidence = np.zeros((len(inner), counted.sum() + 1), dtype=bool)
    np.put_along_axis(incidence, column[index], True, axis=1)
    chosen = incidence[sample.index, :-1]
    draws = sample.num_samples // runs
    series = torch.from_numpy(chosen.astype(np.float64)).T.reshape(chosen.shape[1], runs, draws)
    return effective_sample_size(series) if len(series) else torch.zeros(0, dtype=torch.float64)


def _check_poolable(searches: Sequence[TopologyInference]) -> None:
    """Raise SettingsError if searches cannot be pooled."""
    if len(searches) < 2 or not all(isinstance(one, TopologyInference) and not one.searches for one in searches):
        raise SettingsError("searches: give two results of infer_topologies or more, none of them pooled before.")
    first, *others = searches
    differing = [
        name
        for name in ("model", "constraints", "separate_branch_lengths", "path", "dtype", "num_temperatures")
        if any(one.settings[name] != first.settings[name] for one in others)
    ]
    if differing:
        raise SettingsError(f"searches: they differ in {', '.join(differing)}. Remedy: let them differ in seed= only.")
    if any(one.log_prior.shape[-1] != first.log_prior.shape[-1] for one in others):
        raise SettingsError(
            "searches: they have different numbers of draws. Remedy: give each the same num_samples and num_warmup, "
            "without stop= and time_budget=."
        )
    seeds = [one.settings["seed"] for one in searches]
    if len(set(seeds)) < len(seeds):
        raise SettingsError(f"searches: two of them have the same seed ({seeds}). Remedy: give each a seed of its own.")


#: Probability with which searches that agree are said to disagree.
_FALSE_ALARM = 1e-3


def _mean_evidence(estimates: Sequence[Evidence]) -> Evidence:
    """Return the mean of independent estimates, with the larger of its errors by their errors and by their spread."""
    from scipy.special import chdtri

    values = torch.tensor([one.log_evidence for one in estimates], dtype=torch.float64)
    errors = torch.tensor([one.standard_error for one in estimates], dtype=torch.float64)
    count = len(estimates)
    problems = list(dict.fromkeys(why for one in estimates for why in one.warnings))
    weights = errors**-2
    middle = (weights * values).sum() / weights.sum()
    if not float((weights * (values - middle).square()).sum()) <= chdtri(count - 1, _FALSE_ALARM):
        problems.append("the searches' estimates differ by more than their errors: take more samples")
    error = torch.maximum(errors.square().sum().sqrt() / count, values.std() / math.sqrt(count))
    return Evidence(
        estimates[0].method,
        float(values.mean()),
        float(error),
        sum(one.num_evaluations for one in estimates),
        tuple(problems),
        {"round_trips": sum(one.diagnostics["round_trips"] for one in estimates)},
        seconds=sum(one.seconds for one in estimates),
    )


_ASDSF, _LEAST_EFFECTIVE, _MOST_R_HAT = 0.01, 100, 1.05
_LEAST_ROUND_TRIPS, _MOST_REJECTED = 10, 0.9


def ratios_of_neighbours(beta: Tensor, log_likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Return log ratios of the normalising constants of neighbouring temperatures, and the influence of each draw.

    `beta` is `(T,)`, `log_likelihood` `(T, runs, draws)`; the ratios are `(T - 1,)`, and the influences, whose mean is
    the error to first order, `(T - 1, runs, draws)`.
    """
    gains = beta.diff()[:, None, None]
    up, down = (gains * x for x in (log_likelihood[:-1], log_likelihood[1:]))
    found = bidirectional_ratio(down.flatten(1), up.flatten(1))
    one, other = found.of_denominator.reshape(up.shape), found.of_numerator.reshape(down.shape)
    slope = (one * (1 - one)).mean((1, 2)) + (other * (1 - other)).mean((1, 2))
    return found.log_ratio, (one - other) / slope[:, None, None]


def infer_topologies(
    alignment: Alignment | Partition,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    branch_length_prior: TorchDistribution | None = None,
    separate_branch_lengths: bool = False,
    num_runs: int = 2,
    num_warmup: int = 500,
    num_samples: int | None = None,
    num_temperatures: int | None = None,
    path: Literal["reference", "prior"] = "reference",
    constraints: Sequence[Sequence[str]] = (),
    start: str | Tree | Sequence[str | Tree] = "parsimony",
    moves: Moves | None = None,
    gradient_moves: bool | None = None,
    stop: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_jobs: int = 1,
    progress: bool = True,
) -> TopologyInference:
    r"""Sample topologies, branch lengths and parameters from an alignment alone.

    Parallel tempering over unrooted topologies with a uniform prior. A round is some moves of every chain, a few
    proposals of the free parameters, and an exchange of neighbouring temperatures; each run gives one draw a round.
    Branch lengths are proposed from gamma distributions that match the first two derivatives of their log density;
    topologies by nearest-neighbour interchange, subtree pruning and regrafting, and tree bisection and reconnection,
    guided by likelihood and parsimony.

    The chains lie on a path of densities that ends at the posterior. By default it begins at a reference distribution,
    which the warm-up learns: the clades of the trees found split independently, with gamma distributions of the branch
    lengths (a conditional clade distribution). Trees of the warmer chains have a small weight in it, and any tree has
    positive probability. Trees drawn from the reference travel to the posterior by exchange, and are proposed to every
    chain; so chains pass between islands of trees, and the evidence needs few temperatures.

    Parameters
    ----------
    alignment : Alignment or Partition
        The subsets of a partition have their own substitution models and site rates, linked or not, and the same branch
        lengths times their relative rates, or their own, as in `PartitionedTreeModel`. They may be of different types
        of data; each then takes the time of the type with most states.
    substitution : SubstitutionModel, default JC69()
        Parameters without a value are sampled. A partition has its own.
    site_rates : SiteRates, optional
        Distribution of the rate over sites; parameters without a value are sampled. By default all sites have rate one.
        A partition has its own.
    branch_length_prior : TorchDistribution, optional
        `Exponential` or `Gamma` of one branch length, or `GammaDirichlet` of all. Exponential with rate 10 by default.
    separate_branch_lengths : bool, default False
        Each subset of the partition, or each of its `length_groups`, has its own branch lengths, independent of the
        others' and with the same prior, as with `unlink brlens=(all)` in MrBayes.
    num_runs : int, default 2
        Independent runs, from different trees.
    num_warmup : int, default 500
        Rounds of the warm-up, at least 10 if it learns a reference.
    num_samples : int, optional
        Rounds after the warm-up. By default as many as `stop` takes, 20,000 at most; 4,000 of one run.
    num_temperatures : int, optional
        Temperatures of each run; by default enough for the number of branches. They are placed in the warm-up.
    path : {"reference", "prior"}, default "reference"
        Where the path to the posterior begins. From the prior it needs many more temperatures and draws, but depends on
        nothing that the warm-up found.
    constraints : sequence of sequences of str, optional
        Groups of taxa that are on one side of a branch in every tree.
    start : {"parsimony", "neighbour_joining"}, Tree, str or sequence of Tree or str, default "parsimony"
        Where the runs start. "parsimony" adds taxa in random order where they add fewest changes, another tree for each
        chain. "neighbour_joining" joins neighbours by `jukes_cantor_distances`, one tree for all chains. Or a tree, as
        `Tree` or Newick text, for all runs, or one for each run; its branch lengths are used if it has any. Runs that
        start at one tree tell less about convergence.
    moves : Moves, optional
        Relative frequencies of the kinds of moves. In the warm-up, the share of independent trees falls in proportion
        where fewer than a tenth of them are accepted, and so does the number of moves of the warmer chains where fewer
        than four in ten exchanges are.
    gradient_moves : bool, optional
        In every twentieth round, move all branch lengths and free parameters at once along the gradient of the
        posterior density (Hamiltonian Monte Carlo). By default if the model has free parameters.
    stop : float, optional
        Runs end early once the average standard deviation of split frequencies is below this number, and each split has
        100 effective draws. Both are checked every 200 rounds. By default 0.01 if `num_samples` is not given, and there
        are two runs or more. The runs have trees and temperatures of their own, but on the path from the reference they
        share this reference, which proposes trees to both: they are not as independent as runs of two programs.
    seed : int, default 0
    dtype : torch.dtype, default torch.float32
        Of the partial likelihoods in the chains. Log-likelihoods have errors of some 1e-7 per site in single precision;
        float64 takes nearly twice the time.
    checkpoint : path, optional
        File for the state, from which an existing run resumes with bitwise identical results.
    checkpoint_seconds : float, default 10
    time_budget : float, optional
        Seconds after which the runs end early, as on Ctrl-C.
    num_jobs : int, default 1
        Threads over chains; the result does not depend on it.
    progress : bool, default True
        Show a progress bar if the run takes over two seconds.

    Returns
    -------
    TopologyInference

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, the constraints contradict each other, or one of them excludes the start;
        if separate branch lengths are asked of an alignment, or of a partition with relative rates.
    TreeError
        If a tree of `start` is malformed, or its taxa differ from those of the alignment, or those of subsets do.
    AlignmentError
        If there are fewer than four taxa.
    CheckpointError
        If the checkpoint is damaged or belongs to another run, such as one with compiled chains where these are not.

    Warns
    -----
    CompilationWarning
        If there is no C++ compiler. The chains then run as array operations with simpler moves. A round takes 4 to 20
        times as long, and gives fewer effective draws.
    SamplingWarning
        If the run ended early, or, after ten rounds, if all rounds would take over an hour.

    References
    ----------
    Altekar, G., Dwarkadas, S., Huelsenbeck, J. P., Ronquist, F. (2004). Parallel Metropolis coupled Markov chain Monte
    Carlo for Bayesian phylogenetic inference. Bioinformatics 20, 407-415.

    Hoehna, S., Drummond, A. J. (2012). Guided tree topology proposals for Bayesian phylogenetic inference. Systematic
    Biology 61, 1-11.

    Larget, B. (2013). The estimation of tree posterior probabilities using conditional clade probability distributions.
    Systematic Biology 62, 501-511.

    Neal, R. M. (2011). MCMC using Hamiltonian dynamics. In Handbook of Markov Chain Monte Carlo, CRC Press, 113-162.

    Fan, Y., Wu, R., Chen, M.-H., Kuo, L., Lewis, P. O. (2011). Choosing among partition models in Bayesian
    phylogenetics. Molecular Biology and Evolution 28, 523-532.

    Holder, M. T., Lewis, P. O., Swofford, D. L., Bryant, D. (2014). Variable tree topology stepping-stone marginal
    likelihood estimation. In Bayesian Phylogenetics: Methods, Algorithms, and Applications, CRC Press, 95-111.

    Lakner, C., van der Mark, P., Huelsenbeck, J. P., Larget, B., Ronquist, F. (2008). Efficiency of Markov chain Monte
    Carlo tree proposals in Bayesian phylogenetics. Systematic Biology 57, 86-103.

    Zhang, C., Huelsenbeck, J. P., Ronquist, F. (2020). Using parsimony-guided tree proposals to accelerate convergence
    in Bayesian phylogenetic inference. Systematic Biology 69, 1016-1032.

    Xie, W., Lewis, P. O., Fan, Y., Kuo, L., Chen, M.-H. (2011). Improving marginal likelihood estimation for Bayesian
    phylogenetic model selection. Systematic Biology 60, 150-160.

    Bennett, C. H. (1976). Efficient estimation of free energy differences from Monte Carlo data. Journal of
    Computational Physics 22, 245-268.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import primates
    >>> alignment, _ = primates()
    >>> result = infer_topologies(alignment, num_warmup=50, num_samples=50, num_temperatures=8, progress=False)
    >>> result.sample.num_samples
    100
    """
    substitution = check_data(alignment, substitution, site_rates)
    subsets, taxa = list(subsets_of(alignment).values()), alignment.taxa
    models = [substitution] if isinstance(alignment, Alignment) else list(alignment.substitution.values())
    check_for_search(alignment)
    model = model_facts(alignment, substitution, site_rates)
    prior = _length_prior(branch_length_prior, len(taxa))
    if path not in ("reference", "prior"):
        raise SettingsError(f'path={path!r:.80} is not known. Remedy: use "reference" or "prior".')
    num_runs = whole_number("num_runs", num_runs, 1)
    num_warmup = whole_number("num_warmup", num_warmup, _LEAST_WARMUP if path == "reference" else 0)
    if num_samples is None:
        stop = _ASDSF if stop is None and num_runs > 1 else stop
        num_samples = _ROUNDS if stop is None else _MOST_ROUNDS
    num_samples, seed = whole_number("num_samples", num_samples, _LEAST_DRAWS), whole_number("seed", seed)
    num_jobs = whole_number("num_jobs", num_jobs, 1)
    if stop is not None:
        stop = real_number("stop", stop, "(0, 1)")
        if num_runs < 2:
            raise SettingsError("stop compares runs. Remedy: use num_runs=2 or more, or leave stop=None.")
    if dtype not in (torch.float64, torch.float32):
        raise SettingsError(f"dtype={dtype} is not supported. Remedy: use torch.float64 or torch.float32.")
    num_edges = 2 * len(taxa) - 3
    if num_temperatures is None:
        slope, least = (3.4, 4) if path == "prior" else (0.2, 2)
        num_temperatures = math.ceil(least + slope * math.sqrt(num_edges))
    num_temperatures = whole_number("num_temperatures", num_temperatures, 3)
    beta = torch.linspace(0, 1, num_temperatures, dtype=torch.float64)
    beta = beta**3 if path == "prior" else _WARMEST + (1 - _WARMEST) * beta
    moves = Moves() if moves is None else moves
    if not isinstance(moves, Moves) or min(astuple(moves)) < 0 or not sum(astuple(moves)) > 0:
        raise SettingsError(f"moves: {moves!r:.80} is invalid. Remedy: give Moves(...) with shares of at least 0.")
    splits = constraint_splits(constraints, taxa)
    first = _first_trees(start, subsets, num_runs, constraints, splits)
    if separate_branch_lengths:
        length_sets = check_separate_lengths(alignment).length_indices
    else:
        length_sets = [0] * len(subsets)
    parts = _parts_of_sites(subsets, models, length_sets)
    chains = tree_chains(
        np.concatenate([part.masks for part in parts], 1),
        np.concatenate([part.weights for part in parts]),
        max(subset.data_type.num_states for subset in subsets),
        num_runs * num_temperatures,
        prior,
        parts=[len(part.weights) for part in parts],
        conditioned=[part.conditioned for part in parts],
        part_sets=[part.lengths for part in parts],
        constraints=splits,
        dtype=dtype,
        num_threads=num_jobs,
    )
    space = free_parameters(alignment, substitution, site_rates)
    gradient_moves = space.dim > 0 if gradient_moves is None else gradient_moves
    settings: dict[str, Any] = {
        "model": setting_as_json([*model, astuple(prior)]),
        "constraints": splits.tolist(),
        "start": start if first is None else [first[0].to_newick(run, first[1][run]) for run in range(num_runs)],
        "num_runs": num_runs,
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_temperatures": num_temperatures,
        "path": path,
        "moves": list(astuple(moves)),
        "gradient_moves": gradient_moves,
        "separate_branch_lengths": separate_branch_lengths,
        "stop": stop,
        "seed": seed,
        "dtype": str(dtype),
    }
    if not isinstance(chains, CompiledChains):
        settings["compiled"] = False  # its chains have states and moves of their own
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    search = TopologySearch(
        chains,
        space,
        num_runs,
        beta,
        num_warmup,
        num_samples,
        moves,
        math.ceil(_MOVES_PER_EDGE[space.dim > 0] * num_edges),
        settings,
        stop,
        taxa,
        path == "reference",
        log_number_of_topologies(len(taxa), splits),
        first,
        GradientMoves(alignment, space, prior, separate_branch_lengths) if gradient_moves else None,
    )
    outcome = drive(search, control, new_generator(seed, stream="topologies"))
    return _result(search, outcome, control, alignment, branch_length_prior, constraints, separate_branch_lengths)


class _PartOfSites(NamedTuple):
    """Patterns as chains take them."""

    masks: NDArray[np.uint64]  # (taxa, patterns)
    weights: NDArray[np.float64]  # (patterns,)
    conditioned: float  # see `TreeChains`
    lengths: int  # set of branch lengths


def _parts_of_sites(
    subsets: Sequence[Alignment], models: Sequence[SubstitutionModel | None], lengths: Sequence[int]
) -> list[_PartOfSites]:
    """Return the patterns of each subset, and after them those that its model excludes from the data.

    `lengths` are the sets of branch lengths of the subsets.
    """
    found = []
    for subset, model, own in zip(subsets, models, lengths, strict=True):
        found.append(_PartOfSites(subset.patterns.numpy().astype(np.uint64), subset.weights.numpy(), 0.0, own))
        if isinstance(model, VariableSites):
            left_out = model.left_out(subset.num_taxa)
            patterns, sites = left_out.patterns.astype(np.uint64), float(subset.num_sites)
            found.append(_PartOfSites(patterns, left_out.counts, sites, own))
    return found


#: Rounds after the warm-up by default, and the most of runs that end once they agree.
_ROUNDS, _MOST_ROUNDS = 4000, 20_000
#: Fewest rounds from which a reference is learnt.
_LEAST_WARMUP = 10
#: Smallest power of the likelihood before there is a reference.
_WARMEST = 0.5


def _result(
    search: TopologySearch,
    outcome: Outcome,
    control: Control,
    alignment: Alignment | Partition,
    branch_length_prior: TorchDistribution | None,
    constraints: Sequence[Sequence[str]],
    separate_branch_lengths: bool,
) -> TopologyInference:
    """Collect the draws of the runs."""
    done, warm = outcome.num_iterations, outcome.num_iterations >= search.num_warmup + _LEAST_DRAWS
    first = search.num_warmup if warm else done // 2
    if done - first < _LEAST_DRAWS:
        raise nothing_done(outcome.ending, control, f"after {done} rounds")
    rows = {name: rows[first:] for name, rows in outcome.records.as_dict().items()}
    num_runs, state, num_sets = search.num_runs, outcome.state, search.chains.num_sets
    sites = sites_of_lengths(alignment, separate_branch_lengths)
    samples, of_sets = [], []
    for run in range(num_runs):
        topologies, order = topologies_of(search.taxa, rows["splits"][:, run])
        own = rows["lengths"][:, run].gather(1, _in_each_set(order, num_sets)).unflatten(1, (num_sets, -1))
        mean = torch.einsum("dse,s->de", own, sites / sites.sum()) if num_sets > 1 else own[:, 0]
        samples.append(replace(TreeSample.from_topologies(topologies, branch_lengths=mean), num_burn_in=first))
        of_sets.append(own)
    position, prior = rows["position"].movedim(0, 1), search.chains.prior
    lengths = rows["lengths"].movedim(0, 1)
    log_prior = search.space.log_prior(position) + prior.log_density(lengths, len(search.taxa))
    rejection = 1 - rows["exchange_probability"].mean((0, 1))
    counts = torch.cat([state.trees.counts.sum(0).double(), state.gradient_counts[None]])
    moves = {
        name: (int(tried), accepted / max(1, int(tried)))
        for name, (tried, accepted) in zip([*asdict(search.moves), "gradient"], counts.tolist(), strict=True)
    }
    warm_up = f"after {done} of {search.num_steps} rounds"
    say_early(outcome.ending, control, search.description, warm_up + ("" if warm else ", in the warm-up"))
    return TopologyInference(
        tuple(samples),
        _parameters(search.space, position),
        rows["log_likelihood"].permute(2, 1, 0).contiguous(),
        rows["log_ratio"].permute(2, 1, 0).contiguous(),
        log_prior,
        state.beta,
        Exchange(rejection, state.round_trips, done - first),
        moves,
        outcome.ending,
        outcome.seconds,
        search.settings | {"num_evaluations": int(counts[:, 0].sum())},
        alignment,
        search.space.substitution,
        search.space.site_rates,
        branch_length_prior,
        warm,
        tuple(map(tuple, constraints)),
        branch_lengths=torch.stack(of_sets) if separate_branch_lengths else None,
    )


def _in_each_set(order: NDArray[np.integer[Any]], num_sets: int) -> Tensor:
    """Return the places of edges, `(trees, edges)`, among those of all sets of lengths, `(trees, sets * edges)`."""
    first = np.arange(num_sets)[:, None] * order.shape[1]
    return torch.from_numpy((order[:, None] + first).reshape(len(order), -1))


_LEAST_DRAWS = 8


def _parameters(space: FreeParameters | PartitionParameters, position: Tensor) -> dict[str, Tensor]:
    """Return the values of the parameters, and the relative rates of subsets that follow from them."""
    values = space.values(position)
    rates = space.partition.rates(values, position) if isinstance(space, PartitionParameters) else None
    return values if rates is None or "rate_shares" not in values else values | {"relative_rates": rates}


def _length_prior(prior: TorchDistribution | None, num_taxa: int) -> LengthPrior:
    """Return the prior of branch lengths in the form that the chains need."""
    if prior is None:
        return LengthPrior()
    if isinstance(prior, Exponential) and prior.batch_shape == ():
        return LengthPrior(rate=float(prior.rate))
    if isinstance(prior, Gamma) and prior.batch_shape == ():
        shape = float(prior.concentration)
        return LengthPrior(shape, shape, float(prior.rate))
    if isinstance(prior, GammaDirichlet) and prior.event_shape == (2 * num_taxa - 3,):
        pendant, inner = prior.concentration[..., :num_taxa], prior.concentration[..., num_taxa:]
        if prior.batch_shape == () and bool((pendant == pendant[0]).all() and (inner == inner[0]).all()):
            power = float(prior.length_shape - prior.concentration.sum())
            return LengthPrior(float(pendant[0]), float(inner[0]), float(prior.length_rate), power)
    raise SettingsError(
        f"branch_length_prior: {type(prior).__name__} is not supported here, because branches change their places. "
        "Remedy: give Exponential(torch.tensor(10.0)), Gamma(...) of one length, or GammaDirichlet.for_tree(tree)."
    )


#: Smallest branch length of a start.
_SHORTEST = 1e-6


def _first_trees(
    start: Any, subsets: Sequence[Alignment], num_runs: int, groups: Sequence[Sequence[str]], splits: clades.Bits
) -> tuple[Topologies, Tensor] | None:
    """Return the first tree of each run with its lengths, `(runs, edges)`; None for stepwise addition."""
    taxa = subsets[0].taxa
    if isinstance(start, str) and start == "parsimony":
        return None
    if isinstance(start, str) and start == "neighbour_joining":
        given: Sequence[Any] = [joined_neighbours(subsets)]
    else:
        given = [start] if isinstance(start, Tree | str) else start
    if not isinstance(given, Sequence) or not given or not all(map(_is_tree, given)):
        raise SettingsError(
            f"start: {start!r:.80} is no start. Remedy: give 'parsimony', 'neighbour_joining', or a tree as Newick "
            "text or Tree, such as Tree.from_file(path)."
        )
    if len(given) not in (1, num_runs):
        raise SettingsError(
            f"start: there are {len(given)} trees for {num_runs} runs. Remedy: give one tree, or one for each run."
        )
    trees = [one if isinstance(one, Tree) else Tree.from_newick(one) for one in given]
    for place, tree in enumerate(trees, start=1):
        check_same_taxa(taxa, tree.taxa, "the alignment", f"start, tree {place}")
    trees = trees * (num_runs // len(trees))
    topologies = Topologies.from_trees(trees, taxa)
    for place in range(num_runs):
        held = (topologies.below[place, :, None] == splits).all(-1).any(0)
        if not held.all():
            names = ", ".join(groups[held.argmin()])
            raise SettingsError(
                f"start: the constraint on {names} excludes tree {place + 1}. Remedy: give a tree in which these taxa "
                "are on one side of a branch, or start='parsimony', which satisfies all constraints."
            )
    lengths = torch.full((num_runs, topologies.num_edges), FIRST_LENGTH, dtype=torch.float64)
    for place, tree in enumerate(trees):
        if tree.branch_lengths is not None:
            lengths[place] = topologies[place].branch_lengths_of([tree])[0].clamp(min=_SHORTEST)
    return topologies, lengths


def _is_tree(one: Any) -> bool:
    return isinstance(one, Tree) or (isinstance(one, str) and "(" in one)
