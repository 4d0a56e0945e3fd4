"""Variational inference over topologies and branch lengths."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, get_args, runtime_checkable

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from bayeskit.core.compatibility import as_inference_data, to_datasets
from bayeskit.core.convergence import MAX_PARETO_SHAPE, MIN_EFFECTIVE
from bayeskit.core.flows import zuko
from bayeskit.core.folders import Schema
from bayeskit.core.inputs import real_number, warn_user, whole_number
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import global_stream, new_generator, one_thread
from bayeskit.core.statistics import (
    log_mean_exp,
    pareto_shape,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit.core.storage import decode, encode, loaded_tensors, qualified_name, save_tensors
from bayeskit.core.texts import short_repr
from bayeskit.errors import CheckpointError, LossError, SamplingWarning, SettingsError, TreeError
from bayeskit.inference.evidence import Evidence
from bayeskit.inference.evidence.judging.densities import with_rounding, without_nan
from bayeskit.inference.gradients.score_function import importance_weighted_estimate
from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep, WeightSchedule
from bayeskit.inference.objectives.objective import log_mean_weight
from bayeskit.inference.objectives.reweighted_wake_sleep import reweighted_estimate
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control, Ending, Records, drive, say_early
from bayeskit.inference.training.fitting import setting_as_json
from bayeskit.models.phylogenetics import (
    Alignment,
    DataType,
    FreeRates,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Partition,
    PartitionedForestLikelihood,
    SiteRates,
    SubsplitBayesianNetwork,
    Topologies,
    Tree,
    TreeSample,
)
from bayeskit.models.phylogenetics.branch_length_priors import (
    check_branch_length_prior,
    in_double_precision,
    log_prior_of_lengths,
)
from bayeskit.models.phylogenetics.distributions import Estimate
from bayeskit.models.phylogenetics.distributions.graphs import ABOVE, BELOW, ROOT, EveryRoot, Numbers, SubsplitGraph
from bayeskit.models.phylogenetics.forest import ForestLikelihood
from bayeskit.models.phylogenetics.model_names import SUBSTITUTION_MODELS
from bayeskit.models.phylogenetics.parameters import free_parameters
from bayeskit.models.phylogenetics.partitions import forest_likelihood
from bayeskit.models.phylogenetics.substitution import Parameterized, SubstitutionModel
from bayeskit.models.phylogenetics.topology_constraints import (
    check_constraints,
    constraint_splits,
    log_number_of_topologies,
)
from bayeskit.models.phylogenetics.trees import check_same_taxa
from bayeskit.workflows.phylogenetics.growing_support import (
    ScoredTrees,
    SupportGrowth,
    options_in,
    starting_topologies,
    with_new_options,
)
from bayeskit.workflows.phylogenetics.parameter_guide import ParameterGuide
from bayeskit.workflows.phylogenetics.topology_comparison import (
    check_data,
    defended_draws,
    defended_log_prob,
    model_facts,
    unrooted_topologies,
)
from bayeskit.workflows.phylogenetics.topology_inference import infer_topologies

__all__ = [
    "BudgetPace",
    "DrawnTrees",
    "FlowLengths",
    "FoundTopologies",
    "LearningRates",
    "LengthFamily",
    "Lengths",
    "LogDensities",
    "LogNormalLengths",
    "Pace",
    "Places",
    "Support",
    "SupportSearch",
    "Training",
    "TrainingState",
    "TreeFamily",
    "TreeTarget",
    "VariationalPosterior",
    "WeighedTrees",
    "by_steps",
    "carried",
    "variational_inference",
]

# Distributions of branch lengths with parameters shared among topologies.

_HALF_LOG_TWO_PI = 0.9189385332046727


class Lengths(NamedTuple):
    """Branch lengths `(topologies, edges)` and their log density `(topologies,)`."""

    value: Tensor
    log_prob: Tensor


class LengthFamily(Protocol):
    """A family of distributions of branch lengths, given the features of edges; given these, edges are independent."""

    @property
    def with_pairs(self) -> bool:
        """Whether primary subsplit pairs are features."""

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the first parameters, a vector that ends with equally many numbers for each feature."""

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths that are differentiable by the parameters, features `(topologies, edges, features of one)`."""

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the log density of lengths `(topologies, edges)`, shape `(topologies,)`."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Independent log-normal branch lengths with parameters shared among topologies.

    The mean and log standard deviation of a log length are sums over the features of its edge: one pair of parameters
    for its split and, optionally, one for each primary subsplit pair (the split and the subsplit of one of its sides).

    Parameters
    ----------
    with_pairs : bool, default True
        Include primary subsplit pairs.
    location, scale : float, default -3.0 and 1.0
        Initial mean and standard deviation of the log lengths.

    Raises
    ------
    SettingsError
        If `scale` is not positive.

    References
    ----------
    Zhang, C., Matsen, F. A. (2019). Variational Bayesian phylogenetic inference. ICLR.

    Examples
    --------
    >>> family, generator = LogNormalLengths(with_pairs=False), torch.Generator().manual_seed(0)
    >>> parameters, features = family.start(7, generator), torch.zeros(2, 5, 1, dtype=torch.int64)
    >>> lengths = family.rsample(parameters, features, generator)
    >>> torch.allclose(family.log_prob(parameters, features, lengths.value), lengths.log_prob)
    True
    """

    with_pairs: bool = True
    location: float = -3.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        real_number("location", self.location)
        real_number("scale", self.scale, "(0, inf)")

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the initial parameters: all zero, relative to `location` and `scale`."""
        return torch.zeros(2 * num_features, dtype=torch.float64)

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths; see `LengthFamily`."""
        location, log_scale = self._moments(parameters, features)
        noise = torch.randn(location.shape, generator=generator, dtype=location.dtype)
        log_length = location + log_scale.exp() * noise
        density = -(log_length + log_scale).sum(-1) - _standard(noise)
        return Lengths(log_length.exp(), density)

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log densities; see `LengthFamily`."""
        location, log_scale = self._moments(parameters, features)
        log_length = lengths.log()
        noise = (log_length - location) * (-log_scale).exp()
        return -(log_length + log_scale).sum(-1) - _standard(noise)

    def _moments(self, parameters: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the logarithms, `(topologies, edges)` each."""
        sums = _sum_features(parameters.reshape(-1, 2), features)
        start = parameters.new_tensor([self.location, self.scale])
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log()


def _sum_features(table: Tensor, features: Tensor) -> Tensor:
    """Add up the rows of `table` named by each edge's features, `(..., features) -> (..., columns)`."""
    # Index one past the last row stands for a missing feature and contributes zero.
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    flat = functional.embedding_bag(features.flatten(0, -2), padded, mode="sum", padding_idx=len(table))
    return flat.reshape(*features.shape[:-1], -1)


def _standard(noise: Tensor) -> Tensor:
    """Return minus the log density of standard normal noise, `(*batch, edges) -> (*batch)`."""
    return 0.5 * noise.square().sum(-1) + noise.shape[-1] * _HALF_LOG_TWO_PI


# Branch lengths from a normalizing flow.


@dataclass(frozen=True)
class FlowLengths:
    """Branch lengths from a conditional normalizing flow: a neural spline, then location and scale, of the logarithms.

    All edges share the spline. Its context vector, location and scale are sums over the features of an edge. Given the
    topology, edges are independent.

    Parameters
    ----------
    with_pairs : bool, default True
        Include primary subsplit pairs.
    location, scale : float, default -3.0 and 1.0
        As in `LogNormalLengths`.
    context : int, default 3
        Dimension of the context vector.
    bins : int, default 6
        Number of bins of the spline.
    hidden : int, default 16
        Units of the hidden layer between context and spline.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Zhang, C. (2020). Improved variational Bayesian phylogenetic inference with normalizing flows. NeurIPS 33.

    Durkan, C., Bekasov, A., Murray, I., Papamakarios, G. (2019). Neural spline flows. NeurIPS 32.

    Examples
    --------
    >>> family, generator = FlowLengths(), torch.Generator().manual_seed(0)
    >>> parameters, features = family.start(7, generator), torch.tensor([[[0, 1, 7], [2, 3, 4]]])
    >>> lengths = family.rsample(parameters, features, generator)
    >>> torch.allclose(family.log_prob(parameters, features, lengths.value), lengths.log_prob)
    True
    """

    with_pairs: bool = True
    location: float = -3.0
    scale: float = 1.0
    context: int = 3
    bins: int = 6
    hidden: int = 16

    def __post_init__(self) -> None:
        real_number("location", self.location)
        real_number("scale", self.scale, "(0, inf)")
        for name, least in (("context", 1), ("bins", 2), ("hidden", 1)):
            whole_number(name, getattr(self, name), least)

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the initial parameters: zero for all features, zuko's initial values for the network."""
        with global_stream(generator):
            flow = self._flow()
        weights = torch.nn.utils.parameters_to_vector(flow.parameters()).detach()
        return torch.cat([weights, weights.new_zeros(num_features * (2 + self.context))])

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths; see `LengthFamily`."""
        location, log_scale, transform = self._conditional(parameters, features)
        noise = torch.randn(location.shape, generator=generator, dtype=location.dtype)
        bent, log_slope = transform.inv.call_and_ladj(noise[..., None])
        log_length = location + log_scale.exp() * bent[..., 0]
        density = -0.5 * noise.square() - _HALF_LOG_TWO_PI - log_slope - log_scale - log_length
        return Lengths(log_length.exp(), density.sum(-1))

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log densities; see `LengthFamily`."""
        location, log_scale, transform = self._conditional(parameters, features)
        log_length = lengths.log()
        bent = (log_length - location) * (-log_scale).exp()
        noise, log_slope = transform.call_and_ladj(bent[..., None])
        density = -0.5 * noise[..., 0].square() - _HALF_LOG_TWO_PI + log_slope - log_scale - log_length
        return density.sum(-1)

    def _flow(self) -> nn.Module:
        hidden = (self.hidden,)
        flow = zuko.flows.NSF(1, self.context, transforms=1, bins=self.bins, hidden_features=hidden)
        return flow.double()

    @cached_property
    def _frame(self) -> nn.Module:
        """A network whose parameters are replaced by those of the family."""
        with torch.random.fork_rng(devices=[]):
            return self._flow()

    def _conditional(self, parameters: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return location and log scale of each edge, `(topologies, edges)`, and the transform to noise."""
        flow = self._frame
        values, used = {}, 0
        for name, parameter in flow.named_parameters():
            values[name] = parameters[used : used + parameter.numel()].reshape(parameter.shape)
            used += parameter.numel()
        sums = _sum_features(parameters[used:].reshape(-1, 2 + self.context), features)
        start = parameters.new_tensor([self.location, self.scale])
        transform = functional_call(flow, values, (sums[..., 2:],)).transform
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log(), transform


# Cache of the options and features of each topology.

#: Size of the cache in bytes.
_MEMORY = 2**26
_KINDS = 6
#: Memory of a cached topology, as a multiple of that of its children.
_COLUMN = 10


class FoundTopologies(NamedTuple):
    """Options and features of topologies in a network."""

    choices: EveryRoot  # for `log_prob_of_choices`
    # For each edge, (topologies, edges, features of an edge), int64: its split and, optionally, the primary subsplit
    # pairs on both sides of it. `Places.num_features` stands for the missing pair of a tip.
    features: Tensor


class Places:
    """Cache of the options and features of topologies in a network; TreeError if the network is over rooted topologies.

    A primary subsplit pair is the split of an edge together with the further split of one side of it.
    """

    # Both are options of the network: with the root on the edge, the split is a root split, and the pairs are options
    # of the root's children. Therefore all features of the topologies that the network can draw occur in its support.

    def __init__(self, network: SubsplitBayesianNetwork, with_pairs: bool) -> None:
        if not network.graph.of_rootings:
            raise TreeError(
                "The support is a network over rooted topologies. Remedy: give a sample of unrooted topologies, such "
                "as sample.unrooted(), or the network made from this sample."
            )
        self._network = SubsplitBayesianNetwork(network.graph)
        self._kinds = [ROOT, BELOW, ABOVE] if with_pairs else [ROOT]
        self.feature_of, self.num_features = _features(network.graph, with_pairs)
        self._nodes = 2 * len(network.taxa) - 2
        # The first taxon's edge is that above the last node.
        self._edges = np.array([self._nodes - 1, *range(1, self._nodes - 1)])
        self._known: dict[bytes, np.ndarray] = {}

    def look_up(self, topologies: Topologies) -> FoundTopologies:
        """Return options and features of topologies over the network's taxa; TreeError for an edge not in its trees."""
        width = topologies.children[0].nbytes
        text = np.ascontiguousarray(topologies.children).tobytes()
        keys = [text[start : start + width] for start in range(0, len(text), width)]
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        if new:
            if width * _COLUMN * (len(self._known) + len(new)) > _MEMORY:
                self._known = {key: self._known[key] for key in keys if key in self._known}
            self._learn(list(new), topologies[list(new.values())])
        return self._assemble(np.stack([self._known[key] for key in keys], axis=-1).astype(np.int64))

    def _learn(self, keys: list[bytes], topologies: Topologies) -> None:
        """Cache a column of integers for each topology, from which `_assemble` makes arrays."""
        choices = self._network.choices(topologies)
        if not isinstance(choices, EveryRoot):
            raise TypeError("a network of rootings has options of every rooting")
        count = len(topologies)
        parts = [choices.slots, *(one // count for one in (choices.parent, choices.sibling, choices.children))]
        columns = np.concatenate([part.reshape(-1, count) for part in parts]).astype(np.int32).T
        self._known.update(zip(keys, np.ascontiguousarray(columns), strict=True))

    def _assemble(self, columns: Numbers) -> FoundTopologies:
        count, nodes = columns.shape[1], self._nodes
        slots, parent, sibling, children = np.split(columns, np.cumsum([_KINDS * nodes, nodes, nodes]))
        slots = slots.reshape(_KINDS, nodes, count)
        position = np.arange(count)
        choices = EveryRoot(
            slots,
            children.reshape(-1, 2, count) * count + position,
            parent * count + position,
            sibling * count + position,
            self._network.graph.num_options,
        )
        features = self.feature_of[slots[self._kinds][:, self._edges]]
        if (features[0] == self.num_features).any():
            raise TreeError("A topology has an edge that no tree of the support has. Remedy: add it to the support.")
        return FoundTopologies(choices, torch.from_numpy(np.ascontiguousarray(features.transpose(2, 1, 0))))


def _features(graph: SubsplitGraph, with_pairs: bool) -> tuple[Numbers, int]:
    """Return the feature index of each option of a graph, `(options + 2,)`, and the number of features."""
    everything = graph.clades[-1]
    root = graph.group_sister < 0
    # The two children of a root contain all taxa.
    pair = ~root & ((graph.clades[graph.group_clade] | graph.clades[graph.group_sister]) == everything).all(axis=-1)
    used = np.flatnonzero((root | pair if with_pairs else root)[graph.group_of])
    table = np.full(graph.num_options + 2, len(used))
    table[used] = np.arange(len(used))
    return table, len(used)


# The variational family and its target.


@dataclass(frozen=True, eq=False)
class TreeTarget:
    """The joint density of data, branch lengths, parameters and topology, with a uniform prior of topologies."""

    likelihood: ForestLikelihood | PartitionedForestLikelihood
    branch_length_prior: dist.TorchDistribution  # over one branch length or over the vector of all
    priors: dict[str, dist.TorchDistribution] = field(default_factory=dict)  # of parameters without a fixed value
    constraints: tuple[tuple[str, ...], ...] = ()  # that all topologies with positive prior probability satisfy

    @property
    def data(self) -> Alignment | Partition:
        """The alignment or the partition."""
        likelihood = self.likelihood
        return likelihood.alignment if isinstance(likelihood, ForestLikelihood) else likelihood.partition

    @property
    def models(self) -> tuple[SubstitutionModel | None, SiteRates | None]:
        """The models of the alignment; a partition has its own."""
        likelihood = self.likelihood
        if isinstance(likelihood, ForestLikelihood):
            return likelihood.substitution, likelihood.site_rates
        return None, None

    @cached_property
    def log_topologies(self) -> float:
        """The log number of topologies with positive prior probability."""
        taxa = self.data.taxa
        return log_number_of_topologies(len(taxa), constraint_splits(self.constraints, taxa))

    @cached_property
    def guide(self) -> ParameterGuide:
        """The family of approximations of the parameters."""
        return ParameterGuide(self.priors)

    def log_densities(self, topologies: Topologies, lengths: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood `(topologies,)` of trees with branch lengths `(topologies, edges)`.

        Each parameter without a fixed value has one value per tree, `(topologies, *event_shape)`.
        """
        log_prior = log_prior_of_lengths(self.branch_length_prior, lengths) + self.guide.log_prior(parameters)
        log_likelihood = self.likelihood.log_likelihood(topologies, lengths, **parameters)
        return log_prior - self.log_topologies, log_likelihood


class DrawnTrees(NamedTuple):
    """Trees drawn from an approximation."""

    topologies: Topologies
    lengths: Tensor  # (trees, edges)
    parameters: dict[str, Tensor]  # of substitution and site rates, one value for each tree, (trees, *event_shape)
    log_topology: Tensor  # log probability of each topology, (trees,)
    log_lengths: Tensor  # log density of its branch lengths, (trees,)
    log_parameters: Tensor  # log density of its parameters, (trees,)
    part: Tensor  # mixture component of each tree, zero without a mixture, (trees,)

    @property
    def log_guide(self) -> Tensor:
        """Log density of each tree, `(trees,)`."""
        return self.log_topology + self.log_lengths + self.log_parameters


class TreeFamily:
    """A network, branch lengths given the topology, and a normal distribution of parameters, described by one vector.

    The vector holds the logits of the network, the parameters of branch lengths and those of the normal distribution.
    """

    def __init__(
        self, network: SubsplitBayesianNetwork, lengths: LengthFamily, guide: ParameterGuide | None = None
    ) -> None:
        self.network, self.lengths = network, lengths
        self.guide = ParameterGuide({}) if guide is None else guide
        self.places = Places(network, lengths.with_pairs)
        self.num_logits = network.graph.num_options

    def start(self, generator: torch.Generator) -> Tensor:
        """Return the first parameters, a vector."""
        logits = self.network.logits.detach().to("cpu", torch.float64)
        normal = torch.zeros(self.guide.num_parameters, dtype=torch.float64)
        return torch.cat([logits, self.lengths.start(self.places.num_features, generator), normal])

    def topologies(self, parameters: Tensor) -> SubsplitBayesianNetwork:
        """Return the distribution of topologies."""
        return SubsplitBayesianNetwork(self.network.graph, parameters[: self.num_logits])

    def medians(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the medians of the parameters of substitution and site rates."""
        return self.guide.medians(self._parts(parameters)[1])

    def _parts(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameters of branch lengths and of the normal distribution."""
        end = len(parameters) - self.guide.num_parameters
        return parameters[self.num_logits : end], parameters[end:]

    def draw(
        self, parameters: Tensor, num_trees: int, generator: torch.Generator, *, reparameterized: bool = True
    ) -> DrawnTrees:
        """Draw trees, differentiable by the parameters, or, if not `reparameterized`, with a differentiable density."""
        network, (of_lengths, of_normal) = self.topologies(parameters), self._parts(parameters)
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        log_topology = network.log_prob_of_choices(choices)
        with torch.set_grad_enabled(torch.is_grad_enabled() and reparameterized):
            lengths = self.lengths.rsample(of_lengths, features, generator)
            drawn = self.guide.rsample(of_normal, num_trees, generator)
        if not reparameterized:
            lengths = lengths._replace(log_prob=self.lengths.log_prob(of_lengths, features, lengths.value))
            drawn = drawn._replace(log_prob=self.guide.log_prob(of_normal, drawn.values))
        part = torch.zeros(num_trees, dtype=torch.int64, device=log_topology.device)
        return DrawnTrees(topologies, lengths.value, drawn.values, log_topology, lengths.log_prob, drawn.log_prob, part)

    def draw_defended(
        self, prior: dist.TorchDistribution, parameters: Tensor, num_trees: int, generator: torch.Generator
    ) -> DrawnTrees:
        """Draw trees for importance sampling, lengths and parameters defended by priors and heavy tails."""
        network, (of_lengths, of_normal) = self.topologies(parameters), self._parts(parameters)
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        lengths, part = defended_draws(self.lengths.rsample(of_lengths, features, generator).value, prior, generator)
        # Edges are independent, so the density of one edge is that of a tree with one edge.
        alone = self.lengths.log_prob(of_lengths, features.flatten(0, 1)[:, None], lengths.flatten()[:, None])
        log_lengths = defended_log_prob(alone.reshape(lengths.shape), lengths, prior)
        values, log_values = self.guide.draw_defended(of_normal, num_trees, generator)
        log_topology = network.log_prob_of_choices(choices)
        return DrawnTrees(topologies, lengths, values, log_topology, log_lengths, log_values, part)


#: Log prior and log likelihood of trees, given topologies, branch lengths and parameters by name.
LogDensities = Callable[..., tuple[Tensor, Tensor]]


# Contents of a file with a fitted approximation.

_SCHEMA = Schema("a variational posterior of trees", 3)
#: Supported priors of one branch length, of independent ones, of all jointly, and of parameters.
_PRIORS = (
    *(dist.Exponential, dist.Gamma, dist.InverseGamma, dist.LogNormal, dist.Weibull),
    *(dist.HalfNormal, dist.HalfCauchy, dist.Uniform, GammaDirichlet, dist.Beta, dist.Dirichlet),
)


class _Prior(NamedTuple):
    """A distribution by the name of its class."""

    name: str
    parameters: dict[str, Any]
    event_dims: int  # number of its batch dimensions that are one event


_STORED = (
    *(Alignment, DataType, SubsplitGraph, _Prior),
    *SUBSTITUTION_MODELS.values(),
    *(FreeRates, GammaRates, InvariantSites, LogNormalLengths, FlowLengths),
)
_TYPES = {qualified_name(kind): kind for kind in _STORED}


class _Contents(NamedTuple):
    """The contents of a file."""

    family: TreeFamily
    target: TreeTarget
    parameters: Tensor
    bounds: Tensor
    positions: Tensor
    ending: Ending
    seconds: float
    settings: dict[str, Any]


def _write(path: str | Path, contents: _Contents) -> None:
    """Write a file atomically; SettingsError for classes that cannot be stored, OutputError if it fails."""
    network, (substitution, site_rates) = contents.family.network, contents.target.models
    data = {
        "alignment": _stored_data(contents.target.data),
        "substitution": _without_priors(substitution),
        "site_rates": _without_priors(site_rates),
        "constraints": contents.target.constraints,
        "prior": _stored_prior("branch_length_prior", contents.target.branch_length_prior),
        "priors": {name: _stored_prior(name, prior) for name, prior in contents.target.priors.items()},
        "graph": network.graph,
        "logits": network.logits.detach(),
        "lengths": contents.family.lengths,
        **{name: getattr(contents, name) for name in _Contents._fields[2:]},
    }
    tensors: dict[str, Tensor] = {}
    try:
        coded = encode(data, tensors, _TYPES, "the approximation")
    except CheckpointError as error:
        raise SettingsError(
            f"{path}: the approximation cannot be saved, because it contains an object from outside bayeskit "
            f"({error}). Remedy: fit with `checkpoint`; the same call then returns the same approximation again."
        ) from error
    save_tensors(path, tensors, {"data": coded}, _SCHEMA)


def _read(path: str | Path) -> _Contents:
    """Read a file without running its code; CheckpointError if it is missing, damaged or has other contents."""
    with loaded_tensors(path, _SCHEMA) as (tensors, facts):
        return _restored(decode(facts["data"], tensors, _TYPES))


def _prior_parameters(prior: dist.TorchDistribution) -> dict[str, Any]:
    """Return the parameters of a distribution, or of its base distribution if it is `Independent`."""
    if isinstance(prior, torch.distributions.Independent):
        base = prior.base_dist
        return {
            "base_dist": [type(base).__name__, _prior_parameters(base)],
            "event_dims": prior.reinterpreted_batch_ndims,
        }
    # Derived parameters are cached as attributes and left out.
    given = (name for name in sorted(prior.arg_constraints) if name in vars(prior) or _is_property(prior, name))
    return {name: getattr(prior, name) for name in given}


def _is_property(item: object, name: str) -> bool:
    return isinstance(getattr(type(item), name, None), property)


def _without_priors(model: Any) -> Any:
    """Return a model with the default priors in place of given ones, which are stored beside it."""
    if not isinstance(model, Parameterized):
        return model
    fields = {item.name: getattr(model, item.name) for item in dataclass_fields(model)}  # type: ignore[arg-type]
    given = {name: None for name, value in fields.items() if isinstance(value, torch.distributions.Distribution)}
    inner = {name: _without_priors(value) for name, value in fields.items() if isinstance(value, Parameterized)}
    return replace(model, **given, **inner) if given or inner else model  # type: ignore[type-var]


def _stored_data(data: Alignment | Partition) -> Any:
    """Return an alignment, or the arguments of a partition, without priors."""
    if isinstance(data, Alignment):
        return data
    parts = (
        {name: _without_priors(model) for name, model in by_subset.items()}
        for by_subset in (data.substitution, data.site_rates)
    )
    return [data.subsets, *parts, data.linked, data.relative_rates if isinstance(data.relative_rates, Tensor) else None]


def _restored_data(stored: Any, shares: dist.TorchDistribution | None) -> Alignment | Partition:
    """Return the data; `shares` is the prior of the shares of subsets with unknown rates."""
    if isinstance(stored, Alignment):
        return stored
    subsets, substitution, site_rates, linked, rates = stored
    return Partition(
        subsets, substitution, site_rates, linked=linked, relative_rates=rates if shares is None else shares
    )


def _stored_prior(site: str, prior: dist.TorchDistribution) -> _Prior:
    event_dims = 0
    while isinstance(prior, torch.distributions.Independent):
        event_dims, prior = event_dims + prior.reinterpreted_batch_ndims, prior.base_dist
    name = type(prior).__name__
    # A torch distribution is equivalent to Pyro's of the same name.
    if not any(kind.__name__ == name and issubclass(kind, type(prior)) for kind in _PRIORS):
        raise SettingsError(
            f"{site}: {name} cannot be saved. Remedy: use one of {', '.join(kind.__name__ for kind in _PRIORS)}."
        )
    return _Prior(name, _prior_parameters(prior), event_dims)


def _restored_prior(stored: _Prior) -> dist.TorchDistribution:
    kind = next((kind for kind in _PRIORS if kind.__name__ == stored.name), None)
    if kind is None:
        raise CheckpointError(f"the prior {stored.name} is unknown")
    prior = kind(**stored.parameters)
    return prior.to_event(stored.event_dims) if stored.event_dims else prior


def _restored(data: dict[str, Any]) -> _Contents:
    network = SubsplitBayesianNetwork(data["graph"], data["logits"])
    priors = {name: _restored_prior(stored) for name, stored in data["priors"].items()}
    restored = _restored_data(data["alignment"], priors.get("rate_shares"))
    likelihood = forest_likelihood(restored, data["substitution"], data["site_rates"])
    target = TreeTarget(likelihood, _restored_prior(data["prior"]), priors, data["constraints"])
    family = TreeFamily(network, data["lengths"], target.guide)
    parameters, bounds, positions, ending = (data[name] for name in ("parameters", "bounds", "positions", "ending"))
    expected = family.start(torch.Generator().manual_seed(0)).shape
    if (
        parameters.shape != expected
        or parameters.dtype != torch.float64
        or bounds.dim() != 1
        or positions.shape != bounds.shape
    ):
        raise CheckpointError(f"the shape of the parameters is {tuple(parameters.shape)}, not {tuple(expected)}")
    if ending not in get_args(Ending):
        raise CheckpointError(f"the ending {ending!r} is unknown")
    seconds, settings = float(data["seconds"]), dict(data["settings"])
    return _Contents(family, target, parameters, bounds, positions, ending, seconds, settings)


# A fitted variational posterior of trees.

#: Number of trees in one batch.
_AT_ONCE = 500


class WeighedTrees(NamedTuple):
    """Trees drawn from a proposal, with importance weights.

    Attributes
    ----------
    topologies : Topologies
        One per tree.
    lengths : Tensor
        Branch lengths, shape `(trees, edges)`.
    log_prior, log_likelihood : Tensor
        Shape `(trees,)`.
    log_weight : Tensor
        Log of joint density over proposal density, `(trees,)`.
    parameters : dict of str to Tensor
        Values of the parameters without a fixed value by name, one for each tree, `(trees, *event_shape)`.
    part : Tensor
        Mixture component of the branch lengths of each tree, `(trees,)`: 0 if all are from the prior, 1 if half of them
        are, 2 otherwise; 0 for all trees if the proposal is the approximation itself.
    """

    topologies: Topologies
    lengths: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_weight: Tensor
    part: Tensor
    parameters: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class VariationalPosterior:
    """Approximate posterior of topologies, branch lengths and parameters, as fitted by `variational_inference`.

    Attributes
    ----------
    family : TreeFamily
        Network and distributions of branch lengths and parameters.
    target : TreeTarget
        Joint density of data, branch lengths, parameters of the models, and topology.
    parameters : Tensor
        Parameters of the family, a vector.
    bounds : Tensor
        Estimate of the untempered bound at each step, shape `(steps,)`.
    positions : Tensor
        Where each step read the schedules of annealing and learning rates, as a number of steps, shape `(steps,)`.
    ending : str
        `"finished"`, `"time budget"` or `"interrupted"`.
    seconds : float
    settings : dict
    """

    family: TreeFamily = field(repr=False)
    target: TreeTarget = field(repr=False)
    parameters: Tensor = field(repr=False)
    bounds: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    ending: Ending
    seconds: float
    settings: dict[str, Any]

    __repr__ = short_repr

    @cached_property
    def topologies(self) -> SubsplitBayesianNetwork:
        """The approximate posterior of the topology."""
        return self.family.topologies(self.parameters)

    @property
    def num_steps(self) -> int:
        """Number of training steps."""
        return len(self.bounds)

    def weighed_trees(self, num_draws: int, *, seed: int = 0, defended: bool = True) -> WeighedTrees:
        """Draw trees with importance weights for the exact posterior.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        defended : bool, default True
            Draw from a defensive mixture, which bounds the weights: one tree in ten has all branch lengths from the
            prior, another one half of them (if the prior is over one branch length), and one in five of the others at
            least one from a heavy tail. One tree in ten has parameters from their prior, the others from a t
            distribution. If False, draw from the approximation itself.

        Returns
        -------
        WeighedTrees
        """
        return self._weighed(num_draws, seed, "weighed" if defended else "drawn", defended=defended)

    def _weighed(self, num_draws: int, seed: int, purpose: str, *, defended: bool) -> WeighedTrees:
        """Draw trees with importance weights; draws for different purposes are independent."""
        num_draws = whole_number("num_draws", num_draws, 1)
        generator = new_generator(seed, stream=f"trees of a variational posterior, {purpose}")
        draw = partial(self.family.draw_defended, self.target.branch_length_prior) if defended else self.family.draw
        children, columns, values = [], [], []
        with torch.no_grad(), one_thread():
            for first in range(0, num_draws, _AT_ONCE):
                drawn = draw(self.parameters, min(_AT_ONCE, num_draws - first), generator)
                densities = self.target.log_densities(drawn.topologies, drawn.lengths, **drawn.parameters)
                log_prior, log_likelihood = densities
                log_weight = log_prior + log_likelihood - drawn.log_guide
                values.append(drawn.parameters)
                children.append(torch.from_numpy(drawn.topologies.children))
                columns.append((drawn.lengths, log_prior, log_likelihood, log_weight, drawn.part))
        topologies = Topologies(self.topologies.taxa, torch.cat(children).numpy())
        parameters = {name: torch.cat([one[name] for one in values]) for name in values[0]}
        lengths, log_prior, log_likelihood, log_weight, part = (
            torch.cat(column) for column in zip(*columns, strict=True)
        )
        return WeighedTrees(topologies, lengths, log_prior, log_likelihood, log_weight, part, parameters)

    def sample(self, num_draws: int, *, seed: int = 0, weighted: bool = False) -> TreeSample:
        """Draw trees with branch lengths.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        weighted : bool, default False
            If True, draw from the defensive mixture with importance weights for the exact posterior on the network's
            support; if False, draw from the approximation with equal weights.

        Returns
        -------
        TreeSample
            `weights` are the probabilities of the topologies.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        drawn = self.weighed_trees(num_draws, seed=seed, defended=weighted)
        weights = _trusted_weights(drawn.log_weight) if weighted else None
        return TreeSample.from_topologies(drawn.topologies, weights, drawn.lengths)

    def sample_parameters(self, num_draws: int, *, seed: int = 0, weighted: bool = False) -> dict[str, Tensor]:
        """Draw the parameters of substitution and site rates without a fixed value.

        Parameters
        ----------
        num_draws : int
        seed : int, default 0
        weighted : bool, default False
            If True, draws are resampled by their importance weights, so that they represent the exact posterior on the
            network's support, with repetition; if False, they are draws from the approximation.

        Returns
        -------
        dict of str to Tensor
            By name, shape `(draws, *event_shape)`: those of the trees of `sample` or, if weighted, of `to_arviz`.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        drawn = self.weighed_trees(num_draws, seed=seed, defended=weighted)
        rows = _resampled(drawn.log_weight, seed) if weighted else slice(None)
        return {name: value[rows] for name, value in drawn.parameters.items()}

    def lower_bound(self, num_particles: int = 1, num_draws: int = 1000, *, seed: int = 0) -> Estimate:
        """Estimate the importance-weighted lower bound of the log evidence.

        Parameters
        ----------
        num_particles : int, default 1
            Number of weights in each mean; 1 gives the ELBO.
        num_draws : int, default 1000
            Number of independent means, at least two.
        seed : int, default 0

        Returns
        -------
        Estimate
            In nats, with standard error.
        """
        count, repeats = whole_number("num_particles", num_particles, 1), whole_number("num_draws", num_draws, 2)
        drawn = self._weighed(count * repeats, seed, "lower bound", defended=False)
        bounds = drawn.log_weight.reshape(repeats, count).logsumexp(1) - math.log(count)
        return Estimate(float(bounds.mean()), float(bounds.std()) / math.sqrt(repeats))

    def log_evidence(self, num_draws: int = 10_000, *, seed: int = 0) -> Evidence:
        """Estimate the log evidence by importance sampling from the defensive mixture of `weighed_trees`.

        Parameters
        ----------
        num_draws : int, default 10,000
            At least two.
        seed : int, default 0

        Returns
        -------
        Evidence
            In nats, with diagnostics of the weights. Topologies outside the network's support contribute nothing.
        """
        begin = time.monotonic()
        drawn = self._weighed(whole_number("num_draws", num_draws, 2), seed, "evidence", defended=True)
        log_weight, problems, facts = _checked(drawn.log_weight)
        error = with_rounding(float(stratified_log_mean_exp_error(log_weight, drawn.part)), drawn.log_likelihood)
        return Evidence(
            "variational_importance_sampling",
            float(log_mean_exp(log_weight[None])),
            error,
            num_draws,
            tuple(problems),
            facts,
            time.monotonic() - begin,
        )

    def to_arviz(self, num_draws: int = 1000, *, seed: int = 0, weighted: bool = False) -> Any:
        """Return draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Parameters
        ----------
        num_draws : int, default 1000
        seed : int, default 0
        weighted : bool, default False
            If True, draws are resampled by their importance weights, so that they represent the exact posterior on the
            network's support, with repetition; if False, they are draws from the approximation.

        Returns
        -------
        InferenceData or DataTree
            Group `posterior` holds one chain of `tree_length`, the sum of all branch lengths, `topology`, the rank of
            the topology by its frequency in the draws, and the parameters without a fixed value. Group `sample_stats`
            holds the log joint density `lp` and, without resampling, `log_weight`. Group `constant_data` holds the
            Newick text of each topology, `newick`, by rank. The trees are those of `sample` with the same seed.

        Warns
        -----
        SamplingWarning
            If the weights are not trusted.
        """
        import xarray as xr

        drawn = self.weighed_trees(num_draws, seed=seed, defended=weighted)
        rows = _resampled(drawn.log_weight, seed) if weighted else torch.arange(num_draws)
        sample = TreeSample.from_topologies(drawn.topologies[rows.numpy()])
        order = sample.top(len(sample.topologies))
        rank = torch.from_numpy(order).argsort()
        stats = {"lp": drawn.log_prior + drawn.log_likelihood, "log_weight": drawn.log_weight}
        if weighted:
            del stats["log_weight"]
        tree_length, topology = drawn.lengths.sum(-1), rank[torch.from_numpy(sample.index)]
        chains: dict[str, dict[str, Tensor]] = {
            "posterior": {
                "tree_length": tree_length[None, rows],
                "topology": topology[None],
                **{name: value[None, rows] for name, value in drawn.parameters.items()},
            },
            "sample_stats": {name: value[None, rows] for name, value in stats.items()},
        }
        facts = {"seconds": self.seconds, "ending": self.ending, "num_steps": self.num_steps, "seed_of_draws": seed}
        data = to_datasets(chains, facts | {"settings": json.dumps(self.settings)})
        data["constant_data"] = xr.Dataset(
            {"newick": ("topology_rank", [sample.topologies.to_newick(place) for place in order.tolist()])}
        )
        return as_inference_data(data)

    def save(self, path: str | Path) -> None:
        """Write the approximation with data and model to one safetensors file.

        Parameters
        ----------
        path : str or Path
            Overwritten if it exists.

        Raises
        ------
        SettingsError
            If substitution model, site rates, prior or branch lengths are of a user-defined class.
        OutputError
            If the file cannot be written.
        """
        _write(path, _Contents(**{name: getattr(self, name) for name in _Contents._fields}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`, without executing code from it.

        Parameters
        ----------
        path : str or Path

        Returns
        -------
        VariationalPosterior
            Its draws are bitwise identical to those of the saved object.

        Raises
        ------
        CheckpointError
            If the file is missing, truncated, or has other contents.
        """
        return cls(*_read(path))


def _checked(log_weight: Tensor) -> tuple[Tensor, list[str], dict[str, float]]:
    """Return log weights without NaN, their problems, and their diagnostics."""
    usable, problems = without_nan(log_weight)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): train longer")
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: draw more trees, or train longer")
    return usable, problems, {"pareto_shape": shape, "effective_draws": effective}


def _trusted_weights(log_weight: Tensor) -> Tensor:
    """Return weights that sum to one; warn if they are not trusted."""
    usable, problems, _ = _checked(log_weight)
    if problems:
        what = f"the importance weights are not trusted: {'; '.join(problems)}"
        warn_user(what, SamplingWarning)
    return usable.softmax(0)


def _resampled(log_weight: Tensor, seed: int) -> Tensor:
    """Return indices of draws resampled by their weights, `(draws,)`; warn if the weights are not trusted."""
    weights, count = _trusted_weights(log_weight), len(log_weight)
    uniform = torch.rand((), generator=new_generator(seed, stream="resampled trees"), dtype=torch.float64)
    # Systematic resampling: the count of each draw is its expected count rounded up or down.
    return torch.searchsorted(weights.cumsum(0), (torch.arange(count) + uniform) / count).clamp(max=count - 1)


# Training: gradients of the bound, and Adam, as an algorithm of `drive`.

#: Adam's decay rates and the constant in its denominator.
_FIRST_DECAY, _SECOND_DECAY, _FLOOR = 0.9, 0.999, 1e-8
#: Number of steps whose bounds the progress bar averages.
_SHOWN = 200
#: Replaces the log weight of a draw that the prior excludes.
_IMPOSSIBLE = -1e6


@dataclass(frozen=True)
class LearningRates:
    """Step sizes of Adam with stepwise decay.

    Parameters
    ----------
    topologies, branch_lengths : float, default 0.001
        Initial step sizes of the network's logits, and of the parameters of all continuous distributions: branch
        lengths, and the normal distribution of parameters of substitution and site rates.
    factor : float, default 0.75
        Decay factor, above 0 and at most 1.
    every : int, default 20,000
        Number of steps between two decays.

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
                raise SettingsError(
                    f"learning rates: {name}={getattr(self, name)} is negative or not finite. Remedy: give a number "
                    "such as 0.001."
                )
        if not 0 < real_number("factor", self.factor) <= 1:
            raise SettingsError(
                f"learning rates: factor={self.factor} lies outside (0, 1]. Remedy: give a number such as 0.75."
            )
        whole_number("every", self.every, 1)

    def __call__(self, step: int) -> tuple[float, float]:
        """Return both step sizes at a step counted from zero."""
        scale = self.factor ** (step // self.every)
        return self.topologies * scale, self.branch_lengths * scale


#: The position at which a step reads the schedules, from the number of steps before it and the position before.
Pace = Callable[[int, float], float]


def by_steps(iteration: int, before: float) -> float:
    """Read schedules at the number of steps taken, but never before the last position."""
    return max(float(iteration), before)


class BudgetPace:
    """Positions that reach the last step when a time budget ends, or when all steps are taken, if that comes first.

    The budget of a resumed run is spread over what is left of the schedules.
    """

    def __init__(self, seconds: float, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._num_steps, self._clock = seconds, num_steps, clock
        self._begin, self._first = clock(), math.nan

    def __call__(self, iteration: int, before: float) -> float:
        """Return the next position; see `Pace`."""
        if math.isnan(self._first):
            self._first = before
        share = min((self._clock() - self._begin) / self._seconds, 1.0)
        return max(by_steps(iteration, before), self._first + share * (self._num_steps - self._first))


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
        zero = torch.zeros((), dtype=torch.float64)
        return TrainingState(parameters, torch.zeros_like(parameters), torch.zeros_like(parameters), zero)

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
        return TrainingState(parameters, first, second, at), {"bound": bound, "position": at}

    def _ascend(
        self, state: TrainingState, gradient: Tensor, iteration: int, rates: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step of Adam uphill; return parameters and both averages."""
        count = iteration + 1
        first = torch.lerp(state.first, gradient, 1 - _FIRST_DECAY)
        second = torch.lerp(state.second, gradient.square(), 1 - _SECOND_DECAY)
        step = first / ((second / (1 - _SECOND_DECAY**count)).sqrt_() + _FLOOR)
        for_topologies, for_lengths = rates
        correction = 1 - _FIRST_DECAY**count
        step[: self.family.num_logits] *= for_topologies / correction
        step[self.family.num_logits :] *= for_lengths / correction
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


#: Inverse temperature of the likelihood at the first step.
_HOTTEST = 0.001
#: Number of resampled alignments whose trees a search starts from.
_BOOTSTRAPS = 20
#: Rounds of a search for topologies by chains.
_WARM_UP, _ROUNDS = 300, 700
#: Number of points at which two priors are compared.
_PROBES = 64


#: Topologies, or the network that they make.
Support = TreeSample | Topologies | Sequence[Tree] | SubsplitBayesianNetwork


@runtime_checkable
class SupportSearch(Protocol):
    """Result of a search for topologies."""

    @property
    def sample(self) -> TreeSample:
        """Topologies, such as those of a Markov chain."""


def variational_inference(
    alignment: Alignment | Partition,
    support: Support | SupportSearch | Callable[[Any], Support | SupportSearch] | None = None,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    constraints: Sequence[Sequence[str]] = (),
    lengths: LengthFamily | None = None,
    objective: IWAE | ReweightedWakeSleep | None = None,
    num_steps: int = 200_000,
    learning_rates: LearningRates | None = None,
    annealing: WeightSchedule | None = None,
    growth: SupportGrowth | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> VariationalPosterior:
    r"""Approximate the posterior of topology, branch lengths and parameters by variational inference.

    The variational family is a subsplit Bayesian network :math:`Q(\tau)` of topologies, a distribution
    :math:`Q(q \mid \tau)` of branch lengths with parameters shared among topologies, and a multivariate normal
    distribution :math:`Q(\theta)` of the free parameters of substitution and site rates in unconstrained coordinates.
    By default training maximises the expected log of the mean of several weights

    .. math:: w = \frac{p(D \mid \tau, q, \theta)^\beta \, p(q) \, p(\theta) \, p(\tau)}
                      {Q(\tau) \, Q(q \mid \tau) \, Q(\theta)},

    with :math:`p(\tau) = 1 / (2n-5)!!` or, with constraints, uniform over the topologies that satisfy them; reweighted
    wake-sleep is the alternative.

    Parameters
    ----------
    alignment : Alignment or Partition
        A partition has its own substitution models and site rates, as in `PartitionedTreeModel`.
    support : TreeSample, Topologies, sequence of Tree, SubsplitBayesianNetwork, SupportSearch or callable, optional
        Topologies, such as those of a short MCMC run: the support consists of all recombinations of their subsplits,
        and training starts with equal probabilities of all options. Or a network, which is the starting point; or an
        object with such a `sample`, or a function of `alignment` that returns one of these. Roots are removed. By
        default the support is searched for, from trees of neighbour joining, and grows; with constraints, it is found
        by `infer_topologies`, which is slow without a C++ compiler.
    substitution : SubstitutionModel, default JC69()
        Parameters without a value, such as those of `GTR()`, have their prior and are inferred.
    site_rates : SiteRates, optional
        Distribution of the rate over sites, likewise; by default all sites have rate one.
    branch_length_prior : TorchDistribution, optional
        Over one positive branch length; or over the vector of all, in the edge order of `Topologies`: external branches
        first, in the alignment's order of taxa. Exponential with rate 10 by default.
    constraints : sequence of sequences of str, optional
        Groups of taxa that are on one side of a branch in every tree. Recombinations of trees that satisfy them satisfy
        them too.
    lengths : LengthFamily, default LogNormalLengths()
    objective : IWAE or ReweightedWakeSleep, default IWAE(10)
        Objective and number of particles, at least two. With IWAE, branch lengths are reparameterised, and topologies
        use the score function with leave-one-out baselines (VIMCO).
    num_steps : int, default 200,000
        The default takes about twenty minutes on one core of 2025 for 27 taxa and 1,949 sites (DS1).
    learning_rates : LearningRates, default LearningRates()
        Step sizes of Adam.
    annealing : Schedule, optional
        Inverse temperature of the likelihood at each step, above 0; by default it rises from 0.001 to one over the
        first half of the steps or of the time budget, whichever is further. A checkpoint distinguishes functions by
        name only.
    growth : SupportGrowth, optional
        Let the support grow during training, by neighbours of its probable topologies; not with constraints. By default
        a given support stays as it is.
    seed : int, default 0
    checkpoint : path, optional
        File for the state, from which an existing run resumes with bitwise identical results. Beside it, a support that
        grows has one file for each round, such as `run.growth1`; the search for topologies is repeated.
    checkpoint_seconds : float, default 10
        Seconds between two checkpoints; 0 writes one at every step.
    time_budget : float, optional
        Seconds after which the run ends. With the default annealing, annealing and learning rates follow the share of
        the budget that has passed, so that half of the run is at inverse temperature one; with `annealing` given, both
        follow the number of steps. A resumed run spreads its budget over what is left of the schedules. The search for
        a support under constraints takes half of the budget at most; with a checkpoint it is not cut short, so that a
        resumed run finds the same support.
    progress : bool, default True
        Show a progress bar if the run takes over two seconds.

    Returns
    -------
    VariationalPosterior

    Notes
    -----
    Without a time budget, a seed determines the result bit for bit, however often the run is resumed. With a time
    budget it also depends on when each step began: the attribute `positions` of the result records where each step read
    the schedules, and given these positions the run is reproducible. How many steps fit into the budget is not.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, a prior is unsuitable, or the constraints contradict each other or exclude
        a tree of the support.
    TreeError
        If the taxa of the support or of a subset differ from those of the alignment, or the support is a network over
        rooted topologies.
    LossError
        If the bound or its gradient is not finite; the message gives the step.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run ended early; the message gives the inverse temperature reached.
    ConversionWarning
        Once, if the topologies of the support are rooted.

    References
    ----------
    Zhang, C., Matsen, F. A. (2019). Variational Bayesian phylogenetic inference. ICLR.

    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.

    Bornschein, J., Bengio, Y. (2015). Reweighted wake-sleep. ICLR.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import all_topologies
    >>> alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCAGT", "C": "AGCTAGA", "D": "AGCTACA"})
    >>> support = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    >>> rates = LearningRates(0.02, 0.02)
    >>> posterior = variational_inference(alignment, support, num_steps=300, learning_rates=rates, progress=False)
    >>> posterior.topologies.most_probable_tree().to_newick(0)
    '(A,B,(C,D));'
    >>> posterior.log_evidence(1000).trusted
    True
    """
    substitution = check_data(alignment, substitution, site_rates, corrected=True)
    num_steps = whole_number("num_steps", num_steps, 1)
    objective = _checked_settings(IWAE(10) if objective is None else objective)
    default_annealing = annealing is None
    annealing = Linear(max(1, num_steps // 2), start=_HOTTEST) if annealing is None else annealing
    learning_rates = LearningRates() if learning_rates is None else learning_rates
    lengths = LogNormalLengths() if lengths is None else lengths
    by_chains = support is None and len(constraints) > 0
    growth = SupportGrowth() if support is None and growth is None and not by_chains else growth
    _check_options(learning_rates, annealing, lengths, growth)
    if growth is not None and len(constraints):
        raise SettingsError(
            "growth: neighbours of trees may violate the constraints. Remedy: leave growth out; without a support, one "
            "is found by infer_topologies, under the constraints."
        )
    prior = branch_length_prior
    if prior is None:
        prior = dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    check_branch_length_prior(prior, 2 * alignment.num_taxa - 3)
    likelihood = forest_likelihood(alignment, substitution, site_rates)
    priors = free_parameters(alignment, substitution, site_rates).priors
    groups = tuple(tuple(group) for group in constraints)
    target = TreeTarget(likelihood, in_double_precision(prior), priors, groups)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    settings = {
        "objective": type(objective).__name__,
        "num_particles": objective.num_particles,
        "learning_rates": setting_as_json(learning_rates),
        "annealing": setting_as_json(annealing),
        "lengths": setting_as_json(lengths),
        "seed": whole_number("seed", seed),
    }
    if isinstance(objective, ReweightedWakeSleep):
        settings["wake_phi"] = objective.wake_phi
    if growth is not None:
        settings |= {"growth": setting_as_json(growth), "num_steps": num_steps}
    begin = time.monotonic()
    trees = None
    if by_chains:
        found = infer_topologies(
            alignment,
            substitution=substitution,
            site_rates=site_rates,
            branch_length_prior=branch_length_prior,
            constraints=constraints,
            num_warmup=_WARM_UP,
            num_samples=_ROUNDS,
            seed=settings["seed"],
            time_budget=None if time_budget is None or checkpoint is not None else time_budget / 2,
            progress=progress,
        )
        if found.ending == "interrupted":
            raise KeyboardInterrupt
        support = found.sample
    if support is None:
        trees = ScoredTrees(partial(_log_posterior, target, None), alignment.taxa)
        network = _searched(trees, alignment, growth or SupportGrowth(), settings["seed"], control)
    else:
        network = _network_of(support, alignment)
        if growth is not None:
            trees = ScoredTrees(partial(_log_posterior, target, None), network.taxa)
    check_constraints(network.graph.clades, constraints, network.taxa, "the support")
    _check_order(target.branch_length_prior, alignment, network)
    family = TreeFamily(network, lengths, target.guide)
    spent = time.monotonic() - begin
    follows = default_annealing and time_budget is not None
    pace: Pace = BudgetPace(_left(control, spent), num_steps) if follows else by_steps
    training = Training(family, target.log_densities, objective, learning_rates, annealing, num_steps, {}, pace)
    rounds = _Rounds(trees, growth, settings["seed"])
    try:
        run = _train(training, target, control, rounds, settings, spent)
    except CheckpointError as error:
        if default_annealing and "annealing" in str(error):
            raise CheckpointError(
                f"{error}. By default the likelihood is annealed over half of num_steps. Remedy: resume with the "
                f"previous num_steps, or give annealing=Linear(half of the previous num_steps, start={_HOTTEST})."
            ) from error
        raise
    taken = len(run.bounds)
    done = f"after {taken} of {num_steps} steps"
    if taken and (weight := annealing(int(run.state.position))) < 1:
        done += f", with {100 * weight:.2g} % of the log likelihood: the trees do not yet approximate the posterior"
    say_early(run.ending, control, "variational inference", done)
    return VariationalPosterior(
        run.family, target, run.state.parameters, run.bounds, run.positions, run.ending, run.seconds, settings
    )


# Parts of a run between which the support grows.


class _Rounds(NamedTuple):
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


def _train(
    training: Training, target: TreeTarget, control: Control, rounds: _Rounds, settings: dict[str, Any], spent: float
) -> _Run:
    """Train in parts, between which the support grows; `spent` seconds of the time budget are gone."""
    begin = time.monotonic()
    ends: list[int | None] = [] if rounds.growth is None else list(rounds.growth.positions(training.num_steps))
    records: dict[str, list[Tensor]] = {"bound": [], "position": []}
    nothing, seconds = torch.zeros(0, dtype=torch.float64), spent
    stream = "variational inference over trees"
    for number, end in enumerate([*ends, None], start=1):
        identity = {"model": _fingerprint(target, training.family.network), **settings}
        training = replace(training, identity=identity, until=end)
        path = control.checkpoint
        here = replace(
            control,
            checkpoint=path if path is None or end is None else f"{path}.growth{number}",
            time_budget=None if control.time_budget is None else _left(control, spent + time.monotonic() - begin),
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
            rounds.trees.log_density = partial(
                _log_posterior, target, training.family.medians(outcome.state.parameters)
            )
            training = _grown(training, rounds.trees, rounds.growth, generator, control.progress)
            seconds += time.monotonic() - growing
    bounds, positions = (torch.cat(parts) for parts in records.values())
    return _Run(training.family, outcome.state, bounds, positions, outcome.ending, seconds)


def _left(control: Control, spent: float) -> float:
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
    _expand(trees, growth, progress)
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
    return TrainingState(parameters, first, second, state.position)


def _log_posterior(
    target: TreeTarget, parameters: dict[str, Tensor] | None, topologies: Topologies, lengths: Tensor
) -> Tensor:
    """Return the log posterior density of trees up to a constant, at fixed parameters or at the prior's medians."""
    guide = target.guide
    if parameters is None:
        parameters = guide.medians(torch.zeros(guide.num_parameters, dtype=torch.float64))
    values = {name: value.expand(len(topologies), *value.shape) for name, value in parameters.items()}
    log_prior, log_likelihood = target.log_densities(topologies, lengths, **values)
    return log_prior + log_likelihood


def _expand(trees: ScoredTrees, growth: SupportGrowth, progress: bool) -> None:
    with torch.no_grad(), one_thread(), progress_bar("searching topologies", None, progress) as bar:
        trees.expand(growth.mass, growth.max_expanded, bar.update)


def _searched(
    trees: ScoredTrees, alignment: Alignment | Partition, growth: SupportGrowth, seed: int, control: Control
) -> SubsplitBayesianNetwork:
    """Return the network of topologies that a search from trees of neighbour joining finds probable."""
    trees.add(starting_topologies(alignment, _BOOTSTRAPS, seed))
    _expand(trees, growth, control.progress)
    probable = trees.probable(growth.mass)
    sample = TreeSample.from_topologies(trees.topologies[probable], trees.shares[probable])
    return SubsplitBayesianNetwork.fit(sample, "simple_average")


def _network_of(
    support: Support | SupportSearch | Callable[[Any], Support | SupportSearch], alignment: Alignment | Partition
) -> SubsplitBayesianNetwork:
    """Return the network of a support."""
    if callable(support) and not isinstance(support, SubsplitBayesianNetwork):  # Pyro's distributions are callable
        support = support(alignment)
    if isinstance(support, SubsplitBayesianNetwork):
        check_same_taxa(alignment.taxa, support.taxa, "the alignment", "the support")
        return support
    if isinstance(support, SupportSearch) and isinstance(support.sample, TreeSample):
        support = support.sample
    return SubsplitBayesianNetwork.from_topologies(unrooted_topologies(support, alignment))  # type: ignore[arg-type]


def _check_options(learning_rates: object, annealing: object, lengths: object, growth: object) -> None:
    """Raise SettingsError for settings of the wrong type."""
    if not isinstance(learning_rates, LearningRates):
        raise SettingsError(
            f"learning_rates: {learning_rates!r:.80} has the wrong type. Remedy: give LearningRates(0.001, 0.001)."
        )
    if not callable(annealing):
        raise SettingsError(
            f"annealing: {annealing!r:.80} is not a schedule. Remedy: give a schedule such as Linear(1000, start=0.01)."
        )
    if isinstance(lengths, type) or not hasattr(lengths, "rsample"):
        raise SettingsError(
            f"lengths: {lengths!r:.80} is not an object of a length family. Remedy: give LogNormalLengths()."
        )
    if not isinstance(growth, SupportGrowth | None):
        raise SettingsError(f"growth: {growth!r:.80} has the wrong type. Remedy: give SupportGrowth(), or None.")


def _check_order(
    prior: dist.TorchDistribution, alignment: Alignment | Partition, network: SubsplitBayesianNetwork
) -> None:
    """Raise SettingsError for a joint prior if the order of taxa makes its edges ambiguous."""
    num_edges = 2 * alignment.num_taxa - 3
    tips = [alignment.taxa.index(taxon) for taxon in network.taxa]
    probes = _probes(num_edges)
    moved = log_prior_of_lengths(prior, probes[:, [*tips, *range(alignment.num_taxa, num_edges)]])
    # Summation in another order changes the rounding.
    if not torch.allclose(log_prior_of_lengths(prior, probes), moved, rtol=1e-9, atol=1e-9):
        raise SettingsError(
            "branch_length_prior depends on the order of the taxa, which differs between the support and the "
            "alignment. Remedy: make the network of topologies.with_taxa(alignment.taxa)[0], or give these topologies."
        )


def _probes(num_edges: int) -> Tensor:
    """Return branch lengths from very short to very long, `(probes, edges)`, no two edges alike."""
    generator = new_generator(0, stream="probes of a prior")
    return (-4.0 + 3.0 * torch.randn(_PROBES, num_edges, generator=generator, dtype=torch.float64)).exp()


def _checked_settings(objective: IWAE | ReweightedWakeSleep) -> IWAE | ReweightedWakeSleep:
    if not isinstance(objective, (IWAE, ReweightedWakeSleep)):
        raise SettingsError(
            f"objective: {objective!r:.80} is not supported for trees. Remedy: give IWAE or ReweightedWakeSleep."
        )
    if objective.num_particles < 2:
        raise SettingsError(
            f"objective: num_particles={objective.num_particles} is too small, because each topology is compared with "
            "the other particles. Remedy: give at least 2, such as 10."
        )
    if isinstance(objective, ReweightedWakeSleep) and objective.sleep_phi:
        raise SettingsError("objective: the sleep update is not supported for trees. Remedy: leave sleep_phi at 0.")
    return objective


def _fingerprint(target: TreeTarget, network: SubsplitBayesianNetwork) -> object:
    """Return data, support and model as JSON that identifies them."""
    graph, prior = network.graph, target.branch_length_prior
    arrays = [graph.clades.view("int64"), graph.group_clade, graph.group_sister, graph.starts, graph.parts]
    parts = [
        *model_facts(target.data, *target.models),
        target.constraints,
        list(network.taxa),
        [torch.from_numpy(array) for array in arrays],
        network.logits,
        type(prior).__name__,
        # The density identifies a prior of any class.
        log_prior_of_lengths(prior, _probes(2 * len(network.taxa) - 3)),
    ]
    if target.priors:
        guide = target.guide
        normal = torch.zeros(guide.num_parameters, dtype=torch.float64)
        probes = guide.rsample(normal, _PROBES, new_generator(0, stream="probes of a prior")).values
        parts += [sorted(target.priors), guide.log_prior(probes), list(probes.values())]
    return setting_as_json(parts)
