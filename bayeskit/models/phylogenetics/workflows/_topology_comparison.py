"""Evidence and posterior probabilities of many topologies for one alignment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Gamma

from bayeskit.errors import ConversionWarning, SamplingWarning, SettingsError, TreeError
from bayeskit.extend import (
    METHODS,
    MIN_EFFECTIVE,
    SHORTEST,
    Budget,
    Evidence,
    ModelComparison,
    Modes,
    Target,
    TaskFolder,
    compare_models,
    fitted_to_the_largest,
    global_stream,
    log_mean_exp,
    match_gamma,
    mean_error,
    models_html,
    new_generator,
    one_thread,
    pareto_shape,
    positive_modes,
    progress_bar,
    real_number,
    save_or_warn,
    setting_as_json,
    standard_gamma,
    stratified_log_mean_exp_error,
    unknown_name,
    warn_user,
    weight_effective_sample_size,
    weight_problems,
    whole_number,
    with_rounding,
    without_nan,
    write_csv,
)
from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    Partition,
    PartitionedTreeModel,
    SiteRates,
    SubstitutionModel,
    Topologies,
    Tree,
    TreeModel,
    TreeSample,
)
from bayeskit.models.phylogenetics._branch_length_priors import (
    allowed_lengths,
    check_branch_length_prior,
    in_double_precision,
    log_prior_of_lengths,
)
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate, TopologyDistribution
from bayeskit.models.phylogenetics._parameters import FreeParameters, PartitionParameters, free_parameters
from bayeskit.models.phylogenetics._partitions import forest_likelihood
from bayeskit.models.phylogenetics._substitution import check_data_type
from bayeskit.models.phylogenetics._topology_constraints import (
    check_constraints,
    constraint_splits,
    log_number_of_topologies,
)
from bayeskit.models.phylogenetics._trees import check_same_taxa
from bayeskit.models.phylogenetics._variable_sites import check_variable_sites

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Defensive mixture of a proposal of branch lengths with the prior and a heavy tail (T. Hesterberg 1995, Technometrics
# 37, 185-194). It bounds the importance weights: a density matched to the posterior may have lighter tails, towards
# very long and very short branches, which diagnostics of the weights do not detect. One draw of ten is from the prior;
# another one, if the prior is the same for each branch, has a random half of its branch lengths from the prior. In the
# others each length has a log-Cauchy component, whose share is such that one draw of five has at least one such length.
# Its density falls off as `1 / (x log(x)**2)` towards zero and infinity, so that the weight is bounded for any power of
# the length in the prior.

#: Shares of draws with all branch lengths, or a random half of them, from the prior.
PRIOR, HALF = 0.1, 0.1
#: Share of the other draws with at least one branch length from the heavy tail.
_DEFENCE = 0.2
#: Median of the heavy tail in expected substitutions per site, and half width at half maximum of its logarithm.
_MEDIAN, _WIDTH = 0.1, 2.0
#: Truncation of the logarithm, in widths from the median: values beyond exceed the range of floating-point numbers.
_END = 150.0
_ANGLE = math.atan(_END)


def share_of_tail(num_edges: int) -> float:
    """Return the tail share of one length for which any of `num_edges` is from the tail with probability `_DEFENCE`."""
    return -math.expm1(math.log1p(-_DEFENCE) / num_edges)


def defended_draws(near: Tensor, prior: TorchDistribution, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix draws with the prior and a heavy tail; return `(draws, *batch, edges)` and mixture components `(draws,)`.

    `near` are draws `(draws, *batch, edges)` of the proposal; SettingsError if the prior cannot be sampled.
    """
    chosen, other, part = _defence(near, prior, generator)
    return torch.where(chosen, other, near), part


def _defence(like: Tensor, prior: TorchDistribution, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return which lengths are not the proposal's, `(draws, *batch, edges)` as `like`, their values, and components."""
    # Numbers of draws per component are stratified (fixed up to rounding), so the standard error needs no term for
    # random component sizes: see `stratified_log_mean_exp_error`.
    uniform = torch.rand((2, *like.shape), generator=generator, dtype=like.dtype, device=like.device)
    far = _MEDIAN * (_WIDTH * ((2 * uniform[0] - 1) * _ANGLE).tan()).exp()
    try:
        with global_stream(generator):
            before = prior.sample(like.shape[:-1] if prior.event_shape else like.shape).to(like)
    except NotImplementedError as error:
        raise SettingsError(
            f"branch_length_prior: {type(prior).__name__} cannot be sampled, and may be improper. Remedy: give a "
            "proper distribution with a method sample, such as Exponential(torch.tensor(10.0))."
        ) from error
    limits = torch.finfo(like.dtype)
    before = before.clamp(limits.tiny, limits.max)
    offset = torch.rand((), generator=generator, dtype=like.dtype, device=like.device)
    order = torch.randperm(len(like), generator=generator, device=like.device)
    place = (order + offset) / len(like)
    part = (place >= PRIOR).long() + (place >= PRIOR + _share_of_half(prior)).long()
    number = part.reshape(-1, *(1,) * (like.dim() - 1))
    share = torch.where(number == 2, share_of_tail(like.shape[-1]), 0.5)
    return (number == 0) | (uniform[1] < share), torch.where(number == 2, far, before), part


def defended_log_prob(
    log_near: Tensor, lengths: Tensor, prior: TorchDistribution, log_ratio: Tensor | float = 0.0
) -> Tensor:
    """Return log densities of `defended_draws`, `(*batch)`, from `log_near` and `lengths`, both `(*batch, edges)`.

    `log_ratio` `(*batch)` belongs to what is drawn with the lengths: its log prior density, as in the draws with all
    lengths from the prior, minus that in the other draws.
    """
    share = share_of_tail(lengths.shape[-1])
    log_length = lengths.log()
    standard = (log_length - math.log(_MEDIAN)) / _WIDTH
    far = math.log(share / (2 * _ANGLE * _WIDTH)) - torch.log1p(standard.square()) - log_length
    far = torch.where(standard.abs() <= _END, far, -torch.inf)
    tailed = torch.logaddexp(log_near + math.log1p(-share), far).sum(-1)
    log_prior = log_prior_of_lengths(prior, lengths[..., None] if not prior.event_shape else lengths)
    half = _share_of_half(prior)
    parts = [tailed + math.log1p(-PRIOR - half)]
    if half:
        mixed = (torch.logaddexp(log_near, log_prior) - math.log(2)).sum(-1)
        parts.append(mixed + math.log(half))
        log_prior = log_prior.sum(-1)
    return torch.stack([*parts, log_prior + log_ratio + math.log(PRIOR)]).logsumexp(0)


def _share_of_half(prior: TorchDistribution) -> float:
    """Return the share of draws with half of their lengths from the prior, zero for dependent branch lengths."""
    return 0.0 if prior.event_shape else HALF


# Arguments of both workflows: topologies in any form, and substitution models and site rates.


def unrooted_topologies(
    trees: TreeSample | Topologies | Sequence[Tree], alignment: Alignment | Partition
) -> Topologies:
    """Return topologies without roots, with taxa in the order of an alignment; TreeError if they differ.

    Rooted topologies become distinct unrooted topologies, with a ConversionWarning; other types raise SettingsError.
    """
    if isinstance(trees, TreeSample):
        trees = trees.topologies
    if not isinstance(trees, Topologies):
        trees = Topologies.from_trees(_only_trees(trees))
    if trees.rooted:
        warn_user(
            "The topologies are rooted. They are unrooted here, because the likelihood of a time-reversible model does "
            "not depend on the root.",
            ConversionWarning,
        )
        trees = trees.unrooted()[0].distinct()[0]
    return trees.with_taxa(alignment.taxa)[0]


def check_models(
    alignment: Alignment,
    substitution: SubstitutionModel | None,
    site_rates: SiteRates | None,
) -> SubstitutionModel:
    """Return the substitution model, JC69 by default; SettingsError if an argument has the wrong type."""
    if not isinstance(alignment, Alignment):
        raise SettingsError(
            f"alignment: {alignment!r:.80} is not an Alignment. Remedy: give Alignment.from_file(path)."
        )
    substitution = JC69() if substitution is None else substitution
    if not isinstance(substitution, SubstitutionModel):
        raise SettingsError(
            f"substitution: {substitution!r:.80} is not a substitution model. Remedy: give an object such as "
            "HKY85(kappa=2.0, base_frequencies=[0.3, 0.2, 0.2, 0.3])."
        )
    if not isinstance(site_rates, (SiteRates, type(None))):
        raise SettingsError(
            f"site_rates: {site_rates!r:.80} is not a model of site rates. Remedy: give an object such as "
            "GammaRates(0.5)."
        )
    return substitution


def check_data(
    data: Alignment | Partition,
    substitution: SubstitutionModel | None,
    site_rates: SiteRates | None,
) -> SubstitutionModel | None:
    """Return the substitution model, JC69 by default, or None for a partition, which has its own.

    SettingsError if a model does not fit the data, TreeError if subsets have different taxa, AlignmentError if a site
    cannot be in data of its model.
    """
    if not isinstance(data, Partition):
        substitution = check_models(data, substitution, site_rates)
        check_data_type(data, substitution)
        check_variable_sites(data, substitution, site_rates)
        return substitution
    if substitution is not None or site_rates is not None:
        raise SettingsError(
            "substitution and site_rates: the partition has its own. Remedy: give them to Partition, for all subsets "
            "or by subset."
        )
    first = next(iter(data.subsets))
    for name, subset in data.subsets.items():
        check_same_taxa(data.taxa, subset.taxa, f"subset {first!r}", f"subset {name!r}")
        check_models(subset, data.substitution[name], data.site_rates[name])
        check_data_type(subset, data.substitution[name])
        check_variable_sites(subset, data.substitution[name], data.site_rates[name])
    return None


def model_facts(
    data: Alignment | Partition, substitution: SubstitutionModel | None, site_rates: SiteRates | None
) -> list[Any]:
    """Return what identifies data and model, for `setting_as_json`."""
    if not isinstance(data, Partition):
        return [list(data.taxa), data.patterns, data.weights, substitution, site_rates]
    subsets = [[list(one.taxa), one.patterns, one.weights] for one in data.subsets.values()]
    return [subsets, data.substitution, data.site_rates, data.linked, data.relative_rates]


def default_length_prior(prior: TorchDistribution | None, num_edges: int) -> TorchDistribution:
    """Return a prior of branch lengths in double precision, Exponential(10) by default; SettingsError if invalid."""
    if prior is None:
        prior = dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    check_branch_length_prior(prior, num_edges)
    return in_double_precision(prior)


def _only_trees(trees: Sequence[Tree]) -> list[Tree]:
    remedy = "Remedy: give a TreeSample, Topologies, or a list of Tree, such as [Tree.from_newick(text), ...]."
    if isinstance(trees, (str, bytes)) or not isinstance(trees, Sequence):
        raise SettingsError(f"trees: {trees!r:.80} has the wrong type. {remedy}")
    for place, tree in enumerate(trees):
        if not isinstance(tree, Tree):
            raise SettingsError(f"tree {place + 1} is a {type(tree).__name__}. {remedy}")
    return list(trees)


# The proposal of branch lengths and free parameters on one topology.

#: Degrees of freedom of free parameters.
_DF = 7.0
#: Largest change of the logarithm of a branch length by the other coordinates.
_MOST_SHIFTED = 3.0
#: Number of effective draws with the same weight as the previous moments.
_STEADY = 50.0
#: Smallest shape of a gamma distribution.
_FLATTEST = 0.01
#: Smallest precision along any direction, below that of common priors.
_VAGUE = 0.05


@dataclass(frozen=True)
class JointProposal:
    """Free parameters and branch lengths, each of which depends on those before it.

    Parameters follow a multivariate Student distribution. A branch length is a gamma variable, of which the logarithm
    is shifted linearly by the parameters and by the logarithms of earlier lengths. Both are defended by the prior, and
    lengths by a heavy tail.
    """

    shape: Tensor  # of the gamma variables, (edges,)
    rate: Tensor  # (edges,)
    prior: TorchDistribution  # over one branch length or over the vector of all
    parameters: FreeParameters | PartitionParameters
    centre: Tensor  # of the parameters, (dim,)
    factor: Tensor  # (dim, dim), lower triangular: its square is the scale matrix
    origin: Tensor  # of the shifts, (dim + edges,), parameters and logarithms of lengths
    slopes: Tensor  # of the shifts, (edges, dim + edges), of earlier coordinates only

    @classmethod
    def matched(
        cls,
        shape: Tensor,
        rate: Tensor,
        prior: TorchDistribution,
        parameters: FreeParameters | PartitionParameters,
        centre: Tensor,
        precision: Tensor,
    ) -> JointProposal:
        """Match independent gamma distributions `(edges,)` to a precision matrix.

        The `precision` `(dim + edges, dim + edges)` is that of parameters, around the `centre`, and of the logarithms
        of lengths.
        """
        values, vectors = torch.linalg.eigh(0.5 * (precision + precision.mT))
        factor = torch.linalg.cholesky((vectors / values.clamp(min=_VAGUE)) @ vectors.mT)
        dim, own = len(centre), factor.diagonal()
        slopes = torch.tril(-own[:, None] * torch.linalg.inv(factor), -1)[dim:]
        # The logarithm of a gamma variable has about the precision of its shape.
        alone = 1.0 / own[dim:].square()
        origin = torch.cat([centre, shape.digamma() - rate.log()])
        return cls(alone, alone * rate / shape, prior, parameters, centre, factor[:dim, :dim], origin, slopes)

    def sample(self, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw lengths `(num_draws, edges)` and parameters `(num_draws, dim)`; also return mixture components."""
        dim, edges = len(self.centre), len(self.shape)
        # torch's function accepts a generator, its distribution does not.
        gamma = standard_gamma(self.shape.expand(num_draws, edges), generator=generator) / self.rate
        limits = torch.finfo(gamma.dtype)
        chosen, other, part = _defence(gamma, self.prior, generator)
        normal = torch.empty(num_draws, dim, dtype=gamma.dtype).normal_(generator=generator)
        half = torch.full((num_draws, 1), _DF / 2, dtype=gamma.dtype)
        u = self.centre + normal * (half / standard_gamma(half, generator=generator)).sqrt() @ self.factor.mT
        if dim:
            u = torch.where((part == 0)[:, None], self.parameters.sample(num_draws, generator), u)
        log_gamma, log_other = (one.clamp(limits.tiny, limits.max).log().mT.contiguous() for one in (gamma, other))
        chosen = chosen.mT.contiguous()
        away = torch.cat([(u - self.origin[:dim]).mT, log_other])
        for edge in range(edges):
            here = dim + edge
            shift = (self.slopes[edge, :here] @ away[:here]).clamp(-_MOST_SHIFTED, _MOST_SHIFTED)
            away[here] = torch.where(chosen[edge], log_other[edge], log_gamma[edge] + shift) - self.origin[here]
        x = (away[dim:] + self.origin[dim:, None]).mT.exp()
        return x.clamp(limits.tiny, limits.max).contiguous(), u, part

    def log_prob(self, x: Tensor, u: Tensor) -> Tensor:
        """Return log densities of lengths `(draws, edges)` and parameters `(draws, dim)`, `(draws,)`."""
        rate = self.rate * (-self._shift(x, u)).exp()
        log_near = Gamma(self.shape, rate, validate_args=False).log_prob(x)
        dim = len(self.centre)
        if not dim:
            return defended_log_prob(log_near, x, self.prior)
        scaled = torch.linalg.solve_triangular(self.factor, (u - self.centre).mT, upper=False)
        constant = math.lgamma((_DF + dim) / 2) - math.lgamma(_DF / 2) - dim / 2 * math.log(_DF * math.pi)
        log_near_u = (
            constant - self.factor.diagonal().log().sum() - (_DF + dim) / 2 * (scaled.square().sum(0) / _DF).log1p()
        )
        log_ratio = self.parameters.log_prior(u) - log_near_u
        return log_near_u + defended_log_prob(log_near, x, self.prior, log_ratio)

    def refitted(self, x: Tensor, u: Tensor, log_weights: Tensor) -> JointProposal:
        """Match the distributions, but not the slopes, to draws as of `sample` with log weights `(draws,)`."""
        # The fewer effective draws, the smaller the update.
        weights = log_weights.softmax(0).nan_to_num(nan=0.0)[:, None]
        trust = (1.0 / (1.0 + _STEADY * weights.square().sum())) if bool(weights.any()) else 0.0
        # Moments of the logarithms, which exist even if those of the prior do not.
        alone = x.log() - self._shift(x, u)
        mean = (weights * alone).sum(0)
        variance = (weights * (alone - mean).square()).sum(0)
        mean = trust * mean + (1.0 - trust) * (self.shape.digamma() - self.rate.log())
        variance = trust * variance + (1.0 - trust) * torch.polygamma(1, self.shape)
        shape = _inverse_trigamma(variance).clamp(min=_FLATTEST)
        centre = (weights * u).sum(0)
        spread = (weights * (u - centre)).mT @ (u - centre)
        return replace(
            self,
            shape=shape,
            rate=(shape.digamma() - mean).exp(),
            centre=trust * centre + (1.0 - trust) * self.centre,
            factor=torch.linalg.cholesky(trust * spread + (1.0 - trust) * self.factor @ self.factor.mT),
        )

    def _shift(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the change of the logarithm of each length by what comes before it, `(draws, edges)`."""
        away = torch.cat([u, x.log()], -1) - self.origin
        return (away @ self.slopes.mT).clamp(-_MOST_SHIFTED, _MOST_SHIFTED)


def _inverse_trigamma(value: Tensor) -> Tensor:
    """Return the inverse of the trigamma function, by Newton's method."""
    x = 0.5 + 1.0 / value
    for _ in range(20):
        found = torch.polygamma(1, x)
        # The reciprocal is nearly linear.
        x = x + found * (1.0 - found / value) / torch.polygamma(2, x)
    return x


# The posterior density on all topologies, in parts of limited memory.

#: Bytes of the tensors of one evaluation, about; results do not depend on it but for rounding.
_BYTES = 2**26
#: Numbers for each input of the likelihood that are in memory at once, with and without gradients.
_COPIES, _COPIES_OF_GRADIENTS = 16, 32


class TopologyPosterior:
    """Unnormalised density of branch lengths and of unconstrained parameters on each of several topologies."""

    def __init__(self, model: ForestModel, topologies: Topologies, name: str = "") -> None:
        self.topologies, self.prior, self.name = topologies, model.branch_length_prior, name
        # The tables always have room for one topology.
        self.likelihood = forest_likelihood(*model[:3], cache_bytes=0 if len(topologies) == 1 else 2**28)
        self.parameters = free_parameters(*model[:3])
        self.num_edges = topologies.num_edges
        # Of the prior, whatever the data: where the search for modes starts.
        drawn = self.parameters.sample(1000, new_generator(0, stream="start of parameters"))
        self.usual = drawn.median(0).values
        sizes = [
            (1 if rates is None else rates.rates.shape[-1]) * (1 if one.is_uniform else one.num_states**2)
            for one, rates in self.parameters.parts(self.usual)
        ]
        self._inputs = self.num_edges * max(sizes)

    def vectors(self, gradients: bool = False) -> int:
        """Return how many vectors are evaluated at a time."""
        copies = _COPIES_OF_GRADIENTS if gradients else _COPIES
        return max(1, _BYTES // (8 * copies * (self._inputs + self.parameters.dim)))

    def log_density(self, places: Tensor, x: Tensor, u: Tensor) -> Tensor:
        """Return log densities `(draws, places)` of lengths `(draws, places, edges)` and parameters on topologies."""
        topologies = self.topologies[places.numpy()]
        step = max(1, self.vectors(torch.is_grad_enabled()) // len(places))
        parts = []
        for one, other in zip(x.split(step), u.split(step), strict=True):
            value = self.likelihood.log_likelihood(topologies, one, **self.parameters.values(other))
            parts.append(value + log_prior_of_lengths(self.prior, one) + self.parameters.log_prior(other))
        return torch.cat(parts)

    def drawn(
        self, proposal: JointProposal, place: int, num_draws: int, seed: int, stage: str
    ) -> tuple[Tensor, Tensor, _Weights]:
        """Draw lengths and parameters on one topology; each stage of each topology has a random stream of its own."""
        generator = new_generator(
            seed, stream=f"gamma laplus importance sampling, {stage}, {self.name}topology {place}"
        )
        x, u, part = proposal.sample(num_draws, generator)
        value = self.log_density(torch.tensor([place]), x[:, None], u[:, None])[:, 0]
        return x, u, _Weights(value, value - proposal.log_prob(x, u), part)


#: Takes the place of a topology, its draws of lengths and of coordinates of parameters, and their log weights.
Visit = Callable[[int, Tensor, Tensor, Tensor], None]


class _Weights(NamedTuple):
    """Draws on one topology, each field `(draws,)`."""

    log_density: Tensor
    log_weights: Tensor
    part: Tensor  # mixture component


#: The estimator that evaluates all topologies as one batch.
_IN_ONE_BATCH = "gamma_laplus_importance_sampling"
_DRAWS = 10_000
#: Draws of each pilot run and, at most, of each block of the final run. Pilot runs end after so many, or when so large
#: a share of the draws is effective.
_BLOCK, _MOST_PILOTS, _GOOD_SHARE = 1000, 5, 0.3
#: Fewest draws of a topology that matters little, as a share of what is asked for and as a number; and fewest that are
#: effective in expectation, four times as many as the diagnosis asks for.
_SMALLEST_SHARE, _FEWEST, _FEWEST_EFFECTIVE = 0.1, 1000, 4 * MIN_EFFECTIVE
#: Relative gain of the density below which the search for a mode ends.
_GAIN = 1e-10
#: Posterior probability of topologies below which their evidence need not be trusted.
NEGLIGIBLE = 0.01
#: A prior whose density grows faster than this power of a length towards zero is unbounded there.
_RISES = -0.01


#: Draws of a chain below which their autocorrelation says too little.
_LEAST_SERIES = 100


@dataclass(frozen=True, repr=False)
class TopologyComparison:
    """Evidence and posterior probability of each of several topologies.

    Attributes
    ----------
    topologies : Topologies
        The topologies, with the taxa in the order of the alignment.
    comparison : ModelComparison
        The estimates, under the names "tree 1", "tree 2", ...
    settings : dict
        Method, seed and budget.
    constraints : tuple of tuple of str
        Groups of taxa that are on one side of a branch in every topology with positive prior probability.
    """

    topologies: Topologies
    comparison: ModelComparison
    settings: dict[str, Any] = field(default_factory=dict)
    constraints: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def log_evidence(self) -> Tensor:
        """Log evidence of each topology in nats, shape `(topologies,)`."""
        return self._column(z.log_evidence for z in self.comparison.results.values())

    @cached_property
    def standard_error(self) -> Tensor:
        """Standard errors of `log_evidence`, shape `(topologies,)`."""
        return self._column(z.standard_error for z in self.comparison.results.values())

    @cached_property
    def posterior_probabilities(self) -> Tensor:
        """Posterior probability of each topology among those compared, shape `(topologies,)`."""
        return self._column(p for p, _ in self.comparison.posterior_probabilities.values())

    @cached_property
    def posterior_errors(self) -> Tensor:
        """Monte Carlo standard errors of `posterior_probabilities`, shape `(topologies,)`."""
        return self._column(error for _, error in self.comparison.posterior_probabilities.values())

    @property
    def untrusted_probability(self) -> float:
        """Posterior probability of all topologies whose evidence is not trusted."""
        results = self.comparison.results.values()
        return sum(p for p, z in zip(self.posterior_probabilities.tolist(), results, strict=True) if not z.trusted)

    @property
    def total_log_evidence(self) -> Estimate:
        """Log evidence under a uniform prior of all `(2n-5)!!` topologies of `n` taxa, in nats, with standard error.

        With constraints, the prior is uniform over the topologies that satisfy them. Other topologies than those
        compared contribute nothing, as in `variational_inference` with the same support; `total_log_evidence_with` adds
        them.
        """
        known = self.log_evidence.isfinite()
        values, errors = self.log_evidence[known], self.standard_error[known]
        error = float((values.softmax(0) * errors).square().sum().sqrt())
        taxa = self.topologies.taxa
        number = log_number_of_topologies(len(taxa), constraint_splits(self.constraints, taxa))
        return Estimate(float(values.logsumexp(0)) - number, error)

    def mass_in(self, runs: Sequence[TreeSample | TopologyDistribution], *, chosen: bool = False) -> Estimate:
        """Return the posterior probability of all compared topologies together, from independent runs.

        Parameters
        ----------
        runs : sequence of TreeSample or TopologyDistribution
            At least two, with the same model and a uniform prior over topologies: samples of Markov chains, or
            distributions fitted to one such sample each, which know topologies that were never sampled.
        chosen : bool, default False
            Whether the compared topologies are the most frequent ones of these samples. Their relative frequency in
            the same draws is then too large. Each run therefore gives the mass of those topologies only that the other
            runs would have chosen without it; the evidence gives the mass of the rest relative to these.

        Returns
        -------
        Estimate
            The mean over the runs, and its standard error: by the autocorrelation of the draws if all runs are chains
            of equally many trees, otherwise by the spread of the runs. The spread of few may be small by chance.

        Raises
        ------
        SettingsError
            If there are fewer than two runs, or one is neither a sample nor a distribution; if the topologies were
            chosen from distributions, or each run has topologies of its own.
        TreeError
            If taxa differ, or a run is rooted.

        Examples
        --------
        >>> texts = ["((A,B),C,D);", "((A,C),B,D);"]
        >>> alignment = Alignment.from_sequences({"A": "AACCA", "B": "AACCA", "C": "AGCTA", "D": "AGCTA"})
        >>> result = compare_topologies(alignment, [Tree.from_newick(text) for text in texts], num_draws=2000)
        >>> third = Tree.from_newick("((A,D),B,C);")
        >>> trees = Topologies.from_trees([result.topologies.tree(0), result.topologies.tree(1), third])
        >>> runs = [TreeSample.from_topologies(trees, weights) for weights in ([85, 6, 9], [82, 10, 8])]
        >>> mass = result.mass_in(runs)
        >>> round(mass.value, 3), round(mass.standard_error, 3)
        (0.915, 0.005)
        >>> result.total_log_evidence_with(mass).value > result.total_log_evidence.value
        True
        """
        runs = list(runs) if isinstance(runs, Sequence) else [runs]
        if len(runs) < 2:
            raise SettingsError(
                "runs: one run gives no standard error. Remedy: give the samples of at least two independent runs in a "
                "list, or an Estimate of the mass to total_log_evidence_with."
            )
        held = [self._held(run) for run in runs]
        if chosen:
            samples = [run for run in runs if isinstance(run, TreeSample)]
            if len(samples) < len(runs):
                raise SettingsError(
                    "runs: topologies are chosen from samples. Remedy: give TreeSample, or chosen=False."
                )
            shares = torch.stack([self._shares(run) for run in samples])
            # What would be compared whatever one run had: without it, still more frequent than what was left out.
            known = (shares.sum(0) - shares) / len(runs) > self._most_left_out(samples)
            if not known.any(1).all():
                raise SettingsError(
                    "runs: no topology is frequent enough in all of them to estimate the mass of the compared ones. "
                    "Remedy: give longer runs."
                )
            held = [
                self._held(run, mask, 1 / float(self.posterior_probabilities[mask].sum()))
                for run, mask in zip(runs, known, strict=True)
            ]
        masses = torch.tensor([mass for mass, _ in held], dtype=torch.float64)
        series = [draws for _, draws in held if draws is not None and len(draws) >= _LEAST_SERIES]
        if len(series) == len(runs) and len({len(draws) for draws in series}) == 1:
            among = torch.stack(series)
            # A tree that no draw is has a probability of about one in their number, at most.
            constant = bool((among == among[0, 0]).all())
            return Estimate(float(masses.mean()), 1 / among.numel() if constant else float(mean_error(among)))
        return Estimate(float(masses.mean()), float(masses.std()) / math.sqrt(len(runs)))

    def _places(self, run: TreeSample) -> np.ndarray:
        """Return the place among the compared topologies, -1 for none, of each topology of a run."""
        if not isinstance(run, TreeSample):
            raise SettingsError(
                f"runs: {type(run).__name__} is neither a TreeSample nor a distribution over topologies. Remedy: give "
                "TreeSample.from_file(path), or SubsplitBayesianNetwork.fit(sample, alpha=1e-4)."
            )
        if run.topologies.rooted:
            raise TreeError("runs: a sample is rooted. Remedy: read it with rooted=False.")
        known = {row.tobytes(): place for place, row in enumerate(self.topologies.children)}
        rows = run.topologies.with_taxa(self.topologies.taxa)[0].children
        return np.array([known.get(row.tobytes(), -1) for row in rows])

    def _most_left_out(self, runs: Sequence[TreeSample]) -> float:
        """Return the largest mean share in the runs of a topology that was not compared, -1 if all were."""
        left: dict[bytes, float] = {}
        for run in runs:
            children = run.topologies.with_taxa(self.topologies.taxa)[0].children
            for row, place, weight in zip(children, self._places(run), run.weights, strict=True):
                if place < 0:
                    left[row.tobytes()] = left.get(row.tobytes(), 0.0) + float(weight) / len(runs)
        return max(left.values(), default=-1.0)

    def _shares(self, run: TreeSample | TopologyDistribution) -> Tensor:
        """Return the probability of each compared topology in a run, `(K,)`."""
        if isinstance(run, TopologyDistribution):
            with torch.no_grad():
                return run.log_prob(self.topologies).exp()
        places = self._places(run) + 1
        return torch.from_numpy(np.bincount(places, run.weights, minlength=len(self.topologies) + 1)[1:])

    def _held(
        self, run: TreeSample | TopologyDistribution, mask: Tensor | None = None, factor: float = 1.0
    ) -> tuple[float, Tensor | None]:
        """Return `factor` times the probability of the compared topologies of `mask`, and times whether a draw is one.

        The draws are None if the run is no chain.
        """
        mask = torch.ones(len(self.topologies), dtype=torch.bool) if mask is None else mask
        mass = factor * float(self._shares(run)[mask].sum())
        if isinstance(run, TopologyDistribution) or float(run.sample_weights.max() - run.sample_weights.min()) > 0:
            return mass, None
        places = torch.from_numpy(self._places(run)[run.index])
        return mass, factor * ((places >= 0) & mask[places]).double()

    def total_log_evidence_with(
        self, mass: Estimate | Sequence[TreeSample | TopologyDistribution], *, chosen: bool = False
    ) -> Estimate:
        """Return the log evidence of all topologies, those that were not compared included, in nats.

        It is the total over the compared topologies divided by their posterior probability.

        Parameters
        ----------
        mass : Estimate, or sequence of TreeSample or TopologyDistribution
            Posterior probability of the compared topologies together with its standard error, zero if exact; or the
            independent runs that `mass_in` takes.
        chosen : bool, default False
            Whether the topologies are the most frequent ones of these runs, as in `mass_in`.

        Returns
        -------
        Estimate
            The value and its standard error, to which both parts contribute.

        Raises
        ------
        SettingsError
            If the mass is not above 0 and at most 1, or its error is negative or not finite.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
        >>> texts = ["((A,B),C,D);", "((A,C),B,D);"]
        >>> alignment = Alignment.from_sequences({"A": "AACCA", "B": "AACCA", "C": "AGCTA", "D": "AGCTA"})
        >>> result = compare_topologies(alignment, [Tree.from_newick(text) for text in texts], num_draws=2000)
        >>> total = result.total_log_evidence_with(Estimate(0.9, 0.01))
        >>> round(total.value - result.total_log_evidence.value, 3)
        0.105
        """
        value, error = mass if isinstance(mass, Estimate) else self.mass_in(mass, chosen=chosen)
        value = min(value, 1.0) if chosen else value
        # Probabilities of a network add up to one only to rounding.
        if not (0 < value < 1 + 1e-9 and 0 <= error < math.inf):
            raise SettingsError(
                f"mass: {value!r} with standard error {error!r} is not an estimate of a probability above 0. Remedy: "
                "give Estimate(value, standard_error), or runs that have sampled some of the topologies."
            )
        total = self.total_log_evidence
        return Estimate(total.value - math.log(value), math.hypot(total.standard_error, error / value))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the estimates, each with a remedy."""
        return self.comparison.warnings

    def to_sample(self) -> TreeSample:
        """Return the topologies weighted by their posterior probabilities."""
        return TreeSample.from_topologies(self.topologies, self.posterior_probabilities.numpy())

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per topology, in descending order of evidence, with its Newick text."""
        texts = {f"tree {place + 1}": self.topologies.to_newick(place) for place in range(len(self.topologies))}
        table = self.comparison.to_pandas().rename(columns={"model": "topology"})
        return table.assign(newick=table["topology"].map(texts))

    def to_csv(self, path: str | Path) -> None:
        """Write the table to a CSV file, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_csv(path, self.to_pandas())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot log Bayes factors against the best topology with 95 % intervals."""
        return self.comparison.plot(ax)

    def _repr_html_(self) -> str:
        table = self.to_pandas()
        table.insert(0, "tree", table["topology"] + " " + table["newick"])
        return models_html(table, self.warnings)

    def __repr__(self) -> str:
        return str(self.comparison)

    @staticmethod
    def _column(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)


def compare_topologies(
    alignment: Alignment | Partition,
    trees: TreeSample | Topologies | Sequence[Tree],
    method: str = _IN_ONE_BATCH,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    prior_probabilities: Sequence[float] | None = None,
    constraints: Sequence[Sequence[str]] = (),
    num_draws: int | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> TopologyComparison:
    """Estimate the evidence of each topology, and compute posterior probabilities.

    The default method is importance sampling. Each branch length is proposed from a gamma distribution that depends on
    the lengths before it, and on parameters without a value, for which a Student distribution is proposed; all are
    matched to the posterior mode and to pilot draws, and mixed with a little of the prior and of a heavy tail so that
    weights are bounded. Topologies get draws in proportion to their share of the error (Neyman allocation), the others
    enough for a diagnosis.

    Parameters
    ----------
    alignment : Alignment or Partition
        A partition has its own substitution models and site rates, as in `PartitionedTreeModel`.
    trees : TreeSample, Topologies or sequence of Tree
        Distinct topologies over the taxa of the alignment, at least two for other methods than the default one. Roots
        are removed; weights of a sample are ignored.
    method : str, default "gamma_laplus_importance_sampling"
        Or the name of a function in :mod:`bayeskit.inference.evidence`, which estimates topologies separately.
    substitution : SubstitutionModel, default JC69()
        The evidence integrates over parameters without a value, such as all of `GTR()`, under their priors.
    site_rates : SiteRates, optional
        Distribution of the rate over sites, with parameters as for `substitution`; by default all sites have rate one.
    branch_length_prior : TorchDistribution, optional
        Over one positive branch length; or over the vector of all, in the edge order of `Topologies`: external branches
        first, in the alignment's order of taxa. Exponential with rate 10 by default.
    prior_probabilities : sequence of float, optional
        Nonnegative weights of the topologies, normalised to sum to one; equal by default.
    constraints : sequence of sequences of str, optional
        Groups of taxa that are on one side of a branch in each of the topologies, and in all those that
        `total_log_evidence` sums over.
    num_draws : int, optional
        Default method only: the sum over topologies gets the standard error of this number of draws of each, 10,000 by
        default. A topology that contributes little to it gets fewer, at least a tenth and 1,000 if there are so many;
        one that contributes much gets more.
    budget : Budget, optional
        Other methods only: budget of each topology.
    seed : int, default 0
    num_jobs : int, default 1
        Other methods only: number of topologies in parallel.
    checkpoint : path, optional
        Folder from which a later call resumes: with the topologies, or the parts of their runs, that are not done.
    progress : bool, default True

    Returns
    -------
    TopologyComparison

    Raises
    ------
    SettingsError
        If one topology is repeated, or there is one only and the method is not the default one; if a setting is out of
        range or does not apply to the method, a prior is unsuitable, or the constraints contradict each other or
        exclude a topology.
    UnknownNameError
        If there is no such method.
    TreeError
        If the taxa differ from those of the alignment.

    Warns
    -----
    SamplingWarning
        If an estimate is not trusted.
    ConversionWarning
        Once, if the topologies are rooted.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Neyman, J. (1934). On the two different aspects of the representative method: the method of stratified sampling and
    the method of purposive selection. Journal of the Royal Statistical Society 97, 558-625.

    Examples
    --------
    >>> texts = ["((A,B),C,D);", "((A,C),B,D);", "((A,D),B,C);"]
    >>> alignment = Alignment.from_sequences({"A": "AACCA", "B": "AACCA", "C": "AGCTA", "D": "AGCTA"})
    >>> result = compare_topologies(alignment, [Tree.from_newick(text) for text in texts], num_draws=2000)
    >>> result.comparison.best, len(result.posterior_probabilities)
    ('tree 1', 3)
    """
    substitution = check_data(alignment, substitution, site_rates)
    topologies = unrooted_topologies(trees, alignment)
    _check_distinct(topologies)
    groups = tuple(tuple(group) for group in constraints)
    check_constraints(topologies.below, constraints, topologies.taxa, "trees")
    names = [f"tree {place + 1}" for place in range(len(topologies))]
    length_prior = default_length_prior(branch_length_prior, topologies.num_edges)
    model = ForestModel(alignment, substitution, site_rates, length_prior)
    seed = whole_number("seed", seed)
    weights = _weights(prior_probabilities, names)
    given = {"budget": budget, "num_jobs": None if num_jobs == 1 else num_jobs}
    _check_method(method, given if method == _IN_ONE_BATCH else {"num_draws": num_draws})
    settings: dict[str, Any] = {"method": method, "seed": seed}
    if method == _IN_ONE_BATCH:
        number = _DRAWS if num_draws is None else whole_number("num_draws", num_draws, 2)
        folder = None
        if checkpoint is not None:
            described = setting_as_json([*model_facts(alignment, substitution, site_rates), length_prior])
            trees_done = [topologies.to_newick(place) for place in range(len(topologies))]
            shared = [described, trees_done, number, seed]
            folder = TaskFolder(
                checkpoint, compare_topologies, [[place, shared] for place in range(len(topologies))], [Evidence]
            )
        posterior = TopologyPosterior(model, topologies)
        begin = time.monotonic()
        with one_thread():
            modes, proposals = first_proposals(posterior, progress=progress)
            results = sample_importance(
                [posterior], [modes], proposals, number, seed=seed, progress=progress, folder=folder
            )
        seconds = (time.monotonic() - begin) / len(topologies)
        found = {name: replace(z, seconds=seconds) for name, z in zip(names, results, strict=True)}
        comparison = ModelComparison(found, weights, settings | {"num_draws": number})
        warn_of_untrusted(comparison)
    else:
        models = {name: partial(_target, model, _in_order(topologies, place)) for place, name in enumerate(names)}
        comparison = compare_models(
            models,
            method,
            budget=budget,
            seed=seed,
            num_jobs=num_jobs,
            checkpoint=checkpoint,
            prior_probabilities=weights,
            progress=progress,
        )
    return TopologyComparison(topologies, comparison, comparison.settings, groups)


def _check_distinct(found: Topologies) -> None:
    index = found.distinct()[1].tolist()
    for place, number in enumerate(index):
        first = index.index(number)
        if first < place:
            raise SettingsError(
                f"tree {first + 1} and tree {place + 1} are the same topology. Remedy: give each topology once."
            )


def _in_order(topologies: Topologies, place: int) -> Tree:
    """Return a tree whose edges are in the order of `Topologies`, which is also that of a joint prior."""
    *inner, last = topologies.children[place].tolist()
    return Tree(topologies.taxa, (*map(tuple, inner), (0, *last)))


def _weights(given: Sequence[float] | None, names: list[str]) -> dict[str, float]:
    values = [1.0] * len(names) if given is None else [real_number("prior_probabilities", value) for value in given]
    if len(values) != len(names) or not all(0 <= v < math.inf for v in values) or sum(values) <= 0:
        raise SettingsError(
            f"prior_probabilities must give each of the {len(names)} topologies a nonnegative number, at least one of "
            "them positive"
        )
    return {name: value / sum(values) for name, value in zip(names, values, strict=True)}


def _check_method(method: str, unused: dict[str, Any]) -> None:
    """Raise an error for an unknown method, or for settings that it does not use."""
    if method != _IN_ONE_BATCH and method not in METHODS:
        raise unknown_name("method", method, [_IN_ONE_BATCH, *METHODS])
    for name, value in unused.items():
        if value is not None:
            raise SettingsError(f"{name} is not used by the method {method}. Remedy: omit it.")


def sum_over_topologies(comparison: TopologyComparison, runs: Sequence[TreeSample]) -> Evidence:
    """Return the evidence over all topologies from the most frequent ones of some runs and their mass in these runs."""
    results = comparison.comparison.results.values()
    doubts = set()
    if comparison.untrusted_probability >= NEGLIGIBLE:
        doubts = {why for z in results for why in z.warnings}
    try:
        total = comparison.total_log_evidence_with(runs, chosen=True)
    except SettingsError as error:
        total = Estimate(math.nan, math.nan)
        doubts.add(str(error))
    evaluations, seconds = sum(z.num_evaluations for z in results), sum(z.seconds for z in results)
    return Evidence("sum_over_topologies", *total, evaluations, tuple(sorted(doubts)), seconds=seconds)


def warn_of_untrusted(comparison: ModelComparison, what: str = "topologies") -> None:
    """Issue one warning for all topologies, or models, with an untrusted estimate."""
    reasons: dict[str, list[str]] = {}
    for name, found in comparison.results.items():
        if not found.trusted:
            reasons.setdefault("; ".join(found.warnings) or "it is not finite", []).append(name)
    if not reasons:
        return
    names = [name for group in reasons.values() for name in group]
    probability = sum(comparison.posterior_probabilities[name][0] for name in names)
    if probability < NEGLIGIBLE:
        return
    most = max(names, key=lambda name: comparison.posterior_probabilities[name])
    why = next(reason for reason, group in reasons.items() if most in group)
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    warn_user(
        f"the evidence of {len(names)} of {len(comparison.results)} {what}, with total posterior probability "
        f"{probability:.2g}, is not trusted: {some}. Reason for {most}: {why}",
        SamplingWarning,
    )


class ForestModel(NamedTuple):
    """Arguments of a tree model other than the topology."""

    alignment: Alignment | Partition
    substitution: SubstitutionModel | None  # of an alignment
    site_rates: SiteRates | None
    branch_length_prior: dist.TorchDistribution


def _target(model: ForestModel, tree: Tree) -> Target:
    alignment, substitution, site_rates, prior = model
    if isinstance(alignment, Partition):
        return Target.from_pyro(PartitionedTreeModel(alignment, tree, prior))
    return Target.from_pyro(TreeModel(alignment, tree, substitution, prior, site_rates=site_rates))


def sample_importance(
    posteriors: Sequence[TopologyPosterior],
    modes: Sequence[Modes],
    proposals: Sequence[JointProposal],
    num_draws: int,
    *,
    seed: int,
    progress: bool,
    what: str = "topologies",
    log_prior: Tensor | None = None,
    visit: Visit | None = None,
    folder: TaskFolder | None = None,
) -> list[Evidence]:
    """Return the evidence of each topology of each posterior, by importance sampling in one thread.

    `proposals` are those of all topologies, `log_prior` the logarithms of their prior probabilities. `visit` is called
    with the place of a topology among all and its final draws. Without `visit`, results in `folder` are not computed
    again.
    """
    items = [
        (posterior, found, place)
        for posterior, found in zip(posteriors, modes, strict=True)
        for place in range(len(posterior.topologies))
    ]
    kept: dict[int, Evidence] = {} if folder is None else folder.load()
    if len(kept) == len(items):
        return [kept[item] for item in range(len(items))]
    results = []
    with torch.no_grad():
        pilots = []
        with progress_bar(f"pilot draws of {what}", len(items), progress) as bar:
            for (posterior, _, place), proposal in zip(items, proposals, strict=True):
                pilots.append(_after_pilots(posterior, proposal, place, seed))
                bar.update(len(pilots))
        log_weights = torch.stack([pilot.log_weights for pilot in pilots])
        blocks, size = _allocated(log_weights if log_prior is None else log_weights + log_prior[:, None], num_draws)
        with progress_bar(f"importance sampling of {what}", int(blocks.sum()), progress) as bar:
            done = 0
            for item, (pilot, number) in enumerate(zip(pilots, blocks.tolist(), strict=True)):
                posterior, found, place = items[item]
                if item in kept:
                    done += number
                    results.append(kept[item])
                    continue
                drawn = []
                for block in range(number):
                    drawn.append(posterior.drawn(pilot.proposal, place, size, seed, f"block {block}"))
                    done += 1
                    bar.update(done)
                x, u = torch.cat([one[0] for one in drawn]), torch.cat([one[1] for one in drawn])
                weights = _Weights(*(torch.cat(column) for column in zip(*(one[2] for one in drawn), strict=True)))
                results.append(_estimate(weights, found, place, pilot.num_draws))
                if folder is not None:
                    save_or_warn(partial(folder.save, item, results[-1]), "the comparison goes on")
                if visit is not None:
                    visit(item, x, u, weights.log_weights)
    return results


def first_proposals(
    posterior: TopologyPosterior, start: Tensor | None = None, *, progress: bool = False
) -> tuple[Modes, list[JointProposal]]:
    """Return modes, of lengths and exponentials of parameters, and the proposals matched to them.

    The search begins at `start` `(edges + dim,)`, by default at the median of the prior.
    """
    edges, count, prior = posterior.num_edges, len(posterior.topologies), posterior.prior
    # The posterior mode may be at zero whatever the data; the mode of the logarithms is near the probability mass.
    infinite = _is_infinite_at_zero(prior, edges)
    step = max(1, posterior.vectors(gradients=True) // (2 * (edges + posterior.parameters.dim)))
    if start is None:
        start = torch.cat([allowed_lengths(prior, edges), posterior.usual.exp()])
    found: list[Modes] = []
    with progress_bar("modes of topologies", count, progress) as bar:
        for first in range(0, count, step):
            places = torch.arange(first, min(first + step, count))

            def log_density(z: Tensor, places: Tensor = places) -> Tensor:
                x, u = z[..., :edges], z[..., edges:].log()
                value = posterior.log_density(places, x, u)
                return value + x.log().sum(-1) if infinite else value

            # Not from another topology's mode, which may be near a lower mode of this one.
            found.append(positive_modes(log_density, start.expand(len(places), -1), tolerance=_GAIN))
            bar.update(int(places[-1]) + 1)
    modes = Modes(*(torch.cat(column) for column in zip(*found, strict=True)))
    x, z = modes.position[:, :edges], modes.position
    gradient, second = modes.gradient[:, :edges], modes.second[:, :edges]
    precision = -modes.hessian * z[:, :, None] * z[:, None, :] - torch.diag_embed(modes.gradient * z)
    if infinite:
        shape = (-(second * x + gradient) * x).clamp(min=_FLATTEST)
        rate = shape / x
        modes = modes._replace(value=modes.value - x.log().sum(-1))
    else:
        shape, rate = match_gamma(x, gradient, second)
        precision[:, range(edges), range(edges)] += 1.0  # of the density of the logarithms
    # Parameters come first.
    order = [*range(edges, z.shape[-1]), *range(edges)]
    precision = precision[:, order][:, :, order]
    centre = z[:, edges:].log()
    return modes, [
        JointProposal.matched(a, b, prior, posterior.parameters, c, d)
        for a, b, c, d in zip(shape, rate, centre, precision, strict=True)
    ]


class _Pilot(NamedTuple):
    """What pilot runs on one topology give."""

    proposal: JointProposal
    log_weights: Tensor  # of the last run, (draws,)
    num_draws: int  # of all runs


def _after_pilots(posterior: TopologyPosterior, proposal: JointProposal, place: int, seed: int) -> _Pilot:
    """Match a proposal to pilot draws."""
    for run in range(_MOST_PILOTS):
        x, u, weights = posterior.drawn(proposal, place, _BLOCK, seed, f"pilot {run}")
        # A NaN counts as zero here, and is reported of the final draws.
        log_weights = weights.log_weights.nan_to_num(nan=-torch.inf)
        proposal = proposal.refitted(x, u, log_weights)
        if float(weight_effective_sample_size(log_weights)) >= _GOOD_SHARE * _BLOCK:
            break
    return _Pilot(proposal, log_weights, (run + 1) * _BLOCK)


def _allocated(log_weights: Tensor, num_draws: int) -> tuple[Tensor, int]:
    """Return the number of blocks of each topology and the size of a block, from pilot weights `(topologies, draws)`.

    Neyman's allocation: draws in proportion to the standard deviation of the weights, in as many draws as give the sum
    over topologies the standard error of `num_draws` draws each.
    """
    size = -(-num_draws // -(-num_draws // _BLOCK))
    log_mean = log_mean_exp(log_weights.unsqueeze(-2))
    relative = (log_weights - log_mean.unsqueeze(-1)).exp()
    matters = (log_mean.softmax(0) * relative.std(-1)).nan_to_num(nan=0.0)
    wanted = num_draws * matters * matters.sum() / matters.square().sum().clamp(min=torch.finfo(matters.dtype).tiny)
    share = (weight_effective_sample_size(log_weights) / log_weights.shape[-1]).nan_to_num(nan=0.0)
    fewest = (_FEWEST_EFFECTIVE / share).clamp(min=max(_FEWEST, _SMALLEST_SHARE * num_draws)).clamp(max=num_draws)
    return (torch.maximum(wanted, fewest) / size).ceil().long(), size


def _is_infinite_at_zero(prior: dist.TorchDistribution, num_edges: int) -> bool:
    lengths = allowed_lengths(prior, num_edges).expand(num_edges, -1).clone()
    lengths.diagonal().fill_(SHORTEST)
    lengths.requires_grad_()
    with torch.enable_grad():
        # A uniform density does not depend on the lengths.
        (gradient,) = torch.autograd.grad((log_prior_of_lengths(prior, lengths) + 0.0 * lengths.sum(-1)).sum(), lengths)
    return bool((gradient.diagonal() * SHORTEST < _RISES).any())


def _share_beyond_the_largest(log_weights: Tensor) -> float:
    """Return the share that weights above the largest of ``n`` add to the mean if one draw in ``n`` has them."""
    scale, shape = fitted_to_the_largest(log_weights)
    if not shape < 1:
        return math.inf
    weights = (log_weights - log_weights.max()).flatten().to(torch.float64).exp()
    # Mean excess of the fitted tail over the largest weight, which is 1.
    return (1 + max(scale / (1 - shape), 0.0)) / float(weights.sum())


def _estimate(weights: _Weights, modes: Modes, place: int, num_pilot_draws: int) -> Evidence:
    """Return the evidence of one topology from its draws."""
    usable, problems = without_nan(weights.log_weights)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    error = float(stratified_log_mean_exp_error(usable, weights.part))
    # The shape of the tail is irrelevant if the tail cannot move the estimate by its standard error.
    problems += weight_problems(shape if _share_beyond_the_largest(usable) > error else 0.0, effective)
    if not bool(modes.converged[place]):
        problems.append("the search for the mode of the branch lengths did not converge: use bridge sampling")
    return Evidence(
        _IN_ONE_BATCH,
        float(log_mean_exp(usable[None])),
        with_rounding(error, weights.log_density),
        len(usable) + num_pilot_draws + int(modes.num_evaluations[place]),
        tuple(problems),
        {
            "draws": len(usable),
            "pareto_shape": shape,
            "effective_draws": effective,
            "log_density_at_the_mode": float(modes.value[place]),
        },
    )
