"""Evidence and posterior probabilities of many topologies for one alignment."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Gamma

from bayeskit.core.folders import write_atomically
from bayeskit.core.inputs import real_number, unknown_name, whole_number
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import global_stream, new_generator, one_thread
from bayeskit.core.statistics import (
    log_mean_exp,
    pareto_shape,
    share_beyond_the_largest,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit.core.torch_internals import standard_gamma
from bayeskit.errors import ConversionWarning, SamplingWarning, SettingsError
from bayeskit.inference.evidence import Budget, Evidence
from bayeskit.inference.evidence.checks import MIN_EFFECTIVE, weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.laplus import SHORTEST, Modes, climb_to_modes, match_gamma
from bayeskit.inference.evidence.methods import METHODS
from bayeskit.logdensity.supports import coordinate_log_density, draw_coordinates
from bayeskit.logdensity.target import Target
from bayeskit.logdensity.transforms import bijection, inside, support_of
from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    ForestLikelihood,
    SiteRates,
    SubstitutionModel,
    Topologies,
    Tree,
    TreeModel,
    TreeSample,
)
from bayeskit.models.phylogenetics.branch_length_priors import (
    allowed_lengths,
    check_branch_length_prior,
    in_double_precision,
    log_prior_of_lengths,
)
from bayeskit.models.phylogenetics.distributions import Estimate
from bayeskit.models.phylogenetics.distributions.frequencies import log_num_topologies
from bayeskit.workflows.bayes_factors import ModelComparison, compare_models, models_html

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "BranchLengthProposal",
    "HALF",
    "PRIOR",
    "TopologyComparison",
    "check_models",
    "compare_topologies",
    "defended_draws",
    "defended_log_prob",
    "share_of_tail",
    "unrooted_topologies",
]


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
    # Numbers of draws per component are stratified (fixed up to rounding), so the standard error needs no term for
    # random component sizes: see `stratified_log_mean_exp_error`.
    uniform = torch.rand((2, *near.shape), generator=generator, dtype=near.dtype, device=near.device)
    far = _MEDIAN * (_WIDTH * ((2 * uniform[0] - 1) * _ANGLE).tan()).exp()
    tailed = torch.where(uniform[1] < share_of_tail(near.shape[-1]), far, near)
    try:
        with global_stream(generator):
            before = prior.sample(near.shape[:-1] if prior.event_shape else near.shape).to(near)
    except NotImplementedError as error:
        raise SettingsError(
            f"branch_length_prior: {type(prior).__name__} cannot be sampled, and may be improper. Remedy: give a "
            "proper distribution with a method sample, such as Exponential(torch.tensor(10.0))."
        ) from error
    limits = torch.finfo(near.dtype)
    before = before.clamp(limits.tiny, limits.max)
    half = torch.where(uniform[1] < 0.5, before, near)
    offset = torch.rand((), generator=generator, dtype=near.dtype, device=near.device)
    order = torch.randperm(len(near), generator=generator, device=near.device)
    place = (order + offset) / len(near)
    part = (place >= PRIOR).long() + (place >= PRIOR + _share_of_half(prior)).long()
    number = part.reshape(-1, *(1,) * (near.dim() - 1))
    return torch.where(number == 0, before, torch.where(number == 1, half, tailed)), part


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


def unrooted_topologies(trees: TreeSample | Topologies | Sequence[Tree], alignment: Alignment) -> Topologies:
    """Return topologies without roots, with taxa in the order of an alignment; TreeError if they differ.

    Rooted topologies become distinct unrooted topologies, with a ConversionWarning; other types raise SettingsError.
    """
    if isinstance(trees, TreeSample):
        trees = trees.topologies
    if not isinstance(trees, Topologies):
        trees = Topologies.from_trees(_only_trees(trees))
    if trees.rooted:
        warnings.warn(
            "The topologies are rooted. They are unrooted here, because the likelihood of a time-reversible model does "
            "not depend on the root.",
            ConversionWarning,
            stacklevel=3,
        )
        trees = trees.unrooted()[0].distinct()[0]
    return trees.with_taxa(alignment.taxa)[0]


def check_models(
    alignment: Alignment, substitution: SubstitutionModel | None, site_rates: SiteRates | None
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


def _only_trees(trees: Sequence[Tree]) -> list[Tree]:
    remedy = "Remedy: give a TreeSample, Topologies, or a list of Tree, such as [Tree.from_newick(text), ...]."
    if isinstance(trees, (str, bytes)) or not isinstance(trees, Sequence):
        raise SettingsError(f"trees: {trees!r:.80} has the wrong type. {remedy}")
    for place, tree in enumerate(trees):
        if not isinstance(tree, Tree):
            raise SettingsError(f"tree {place + 1} is a {type(tree).__name__}. {remedy}")
    return list(trees)


# Proposals of branch lengths for importance sampling.

#: Number of effective draws with the same weight as the previous moments.
_STEADY = 20.0
#: Smallest shape of a gamma distribution.
_FLATTEST = 0.01


@dataclass(frozen=True)
class BranchLengthProposal:
    """Independent gamma distributions of branch lengths, defended by the prior and a heavy tail."""

    shape: Tensor  # (*batch, edges)
    rate: Tensor  # (*batch, edges)
    prior: TorchDistribution  # over one branch length or over the vector of all

    @classmethod
    def matched_in_logarithms(
        cls, mode: Tensor, first: Tensor, second: Tensor, prior: TorchDistribution
    ) -> BranchLengthProposal:
        """Match gamma distributions at a `mode` `(*batch, edges)` of `log_density(x) + log(x).sum(-1)`.

        `first` and `second` are derivatives of that by each coordinate, not by its logarithm.
        """
        # The log density of the logarithms of a gamma distribution always has a mode.
        shape = (-(second * mode + first) * mode).clamp(min=_FLATTEST)
        return cls(shape, shape / mode, prior)

    def sample(self, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw points, `(num_draws, *batch, edges)`, and return the mixture component of each, `(num_draws,)`."""
        full = (num_draws, *self.shape.shape)
        # torch's function accepts a generator, its distribution does not.
        near = standard_gamma(self.shape.expand(full), generator=generator) / self.rate
        return defended_draws(near.clamp(min=torch.finfo(near.dtype).tiny), self.prior, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities, `(*sample, *batch, edges) -> (*sample, *batch)`."""
        return defended_log_prob(Gamma(self.shape, self.rate, validate_args=False).log_prob(x), x, self.prior)

    def refitted(self, x: Tensor, log_weights: Tensor) -> BranchLengthProposal:
        """Match the gamma distributions to draws `(draws, *batch, edges)` with log weights `(draws, *batch)`."""
        # Sums over the last dimension do not depend on the size of the batch, not even by rounding.
        weights, trust = (column.unsqueeze(-2) for column in _weights_of_pilots(log_weights))
        trust = trust.squeeze(-1)
        # Moments of the logarithms, which exist even if those of the prior do not.
        log_x = x.log().movedim(0, -1).contiguous()
        mean = (weights * log_x).sum(-1)
        variance = (weights * (log_x - mean[..., None]).square()).sum(-1)
        mean = trust * mean + (1.0 - trust) * (self.shape.digamma() - self.rate.log())
        variance = trust * variance + (1.0 - trust) * torch.polygamma(1, self.shape)
        shape = _inverse_trigamma(variance).clamp(min=_FLATTEST)
        return replace(self, shape=shape, rate=(shape.digamma() - mean).exp())


def _weights_of_pilots(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return normalised weights `(*batch, draws)`, and how far to trust their moments, `(*batch, 1)`."""
    # The fewer effective draws, the smaller the update.
    weights = log_weights.movedim(0, -1).contiguous().softmax(-1)
    effective = 1.0 / weights.square().sum(-1, keepdim=True)
    # Without a draw of positive density there is nothing to learn.
    return weights.nan_to_num(nan=0.0), (effective / (effective + _STEADY)).nan_to_num(nan=0.0)


def _inverse_trigamma(value: Tensor) -> Tensor:
    """Return the inverse of the trigamma function, by Newton's method."""
    x = 0.5 + 1.0 / value
    for _ in range(20):
        found = torch.polygamma(1, x)
        # The reciprocal is nearly linear.
        x = x + found * (1.0 - found / value) / torch.polygamma(2, x)
    return x


# Free parameters of substitution and site rates.


class _FreeParameters:
    """Parameters with a prior, as one vector of unconstrained coordinates."""

    def __init__(self, substitution: SubstitutionModel, site_rates: SiteRates | None) -> None:
        like = torch.empty(0, dtype=torch.float64)
        priors = substitution.priors(like) | ({} if site_rates is None else site_rates.priors(like))
        self.priors = {name: in_double_precision(prior) for name, prior in priors.items()}
        try:
            self._transforms = {name: bijection(support_of(prior)) for name, prior in self.priors.items()}
        except NotImplementedError as error:
            raise SettingsError(
                f"a prior of {', '.join(self.priors)} has no unconstrained coordinates ({error}). Remedy: give another "
                "prior, or the value of the parameter."
            ) from error
        shapes = [
            self._transforms[name].inverse_shape(torch.Size(prior.event_shape)) for name, prior in self.priors.items()
        ]
        self._shapes, self._sizes = shapes, [shape.numel() for shape in shapes]

    @property
    def dim(self) -> int:
        """Number of unconstrained coordinates."""
        return sum(self._sizes)

    def _pieces(self, u: Tensor) -> Iterator[tuple[str, TorchDistribution, Tensor]]:
        pieces = u.split(self._sizes, -1) if self.priors else ()
        for (name, prior), piece, shape in zip(self.priors.items(), pieces, self._shapes, strict=True):
            yield name, prior, piece.reshape(u.shape[:-1] + shape)

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """Return the value of each parameter, `(*batch, dim) -> (*batch, *event_shape)`."""
        return {
            name: inside(support_of(prior), self._transforms[name](piece)) for name, prior, piece in self._pieces(u)
        }

    def log_prior(self, u: Tensor) -> Tensor:
        """Return the log prior density of the coordinates, `(*batch, dim) -> (*batch)`."""
        total = u.new_zeros(u.shape[:-1])
        for name, prior, piece in self._pieces(u):
            found = coordinate_log_density(prior, piece)
            if found is None:
                transform = self._transforms[name]
                value = inside(support_of(prior), transform(piece))
                jacobian = transform.log_abs_det_jacobian(piece, value)
                found = prior.log_prob(value) + jacobian.reshape(total.shape)
            total = total + found
        return total

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw coordinates from the prior, `(num_draws, dim)`; SettingsError if a prior cannot be sampled."""
        parts = [torch.empty(num_draws, 0, dtype=torch.float64)]
        for name, prior in self.priors.items():
            try:
                with global_stream(generator):
                    drawn = draw_coordinates(prior, torch.Size((num_draws,)))
                    if drawn is None:
                        drawn = self._transforms[name].inv(prior.sample((num_draws,)))
            except NotImplementedError as error:
                raise SettingsError(
                    f"{name}: {type(prior).__name__} cannot be sampled, and may be improper. Remedy: give a proper "
                    "prior, or the value of the parameter."
                ) from error
            parts.append(drawn.reshape(num_draws, -1).to(torch.float64))
        return torch.cat(parts, -1)


#: Degrees of freedom of the proposal of free parameters.
_DF = 7.0
#: Largest change of the logarithm of a branch length by the free parameters.
_MOST_SHIFTED = 3.0
#: Smallest precision of an unconstrained coordinate, above that of common priors.
_VAGUE = 0.05


@dataclass(frozen=True)
class _Proposal:
    """Free parameters of a Student distribution, and branch lengths whose logarithms depend on them linearly.

    In the share `PRIOR` of the draws, all of both come from the prior.
    """

    lengths: BranchLengthProposal  # at the centre
    parameters: _FreeParameters
    centre: Tensor  # (*batch, dim)
    factor: Tensor  # (*batch, dim, dim), lower triangular: its square is the scale matrix
    slopes: Tensor  # (*batch, edges, dim), of the logarithms of lengths by parameters

    def __getitem__(self, place: int | slice | Tensor) -> _Proposal:
        lengths = replace(self.lengths, shape=self.lengths.shape[place], rate=self.lengths.rate[place])
        return replace(
            self, lengths=lengths, centre=self.centre[place], factor=self.factor[place], slopes=self.slopes[place]
        )

    @classmethod
    def joined(cls, parts: Sequence[_Proposal]) -> _Proposal:
        """Return one batch of the topologies of several."""
        first = parts[0]
        lengths = replace(
            first.lengths,
            shape=torch.cat([one.lengths.shape for one in parts]),
            rate=torch.cat([one.lengths.rate for one in parts]),
        )
        names = ("centre", "factor", "slopes")
        return replace(
            first, lengths=lengths, **{name: torch.cat([getattr(one, name) for one in parts]) for name in names}
        )

    def sample(self, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw for one topology: lengths `(num_draws, edges)`, coordinates `(num_draws, dim)`, mixture components."""
        dim = self.parameters.dim
        if not dim:
            x, part = self.lengths.sample(num_draws, generator)
            return x, x.new_empty(num_draws, 0), part
        normal = torch.randn(num_draws, dim, generator=generator, dtype=self.centre.dtype)
        half = torch.full((num_draws, 1), _DF / 2, dtype=normal.dtype)
        t = normal * (half / standard_gamma(half, generator=generator)).sqrt()
        near = self.centre + (self.factor * t[:, None]).sum(-1)
        x, part = self._given(near).sample(num_draws, generator)
        before = self.parameters.sample(num_draws, generator)
        return x, torch.where((part == 0)[:, None], before, near), part

    def log_prob(self, x: Tensor, u: Tensor) -> Tensor:
        """Return log densities of lengths `(draws, *batch, edges)` and coordinates, `(draws, *batch)`."""
        dim = self.parameters.dim
        if not dim:
            return self.lengths.log_prob(x)
        inverse = torch.linalg.inv(self.factor)
        square = (inverse * (u - self.centre)[..., None, :]).sum(-1).square().sum(-1)
        constant = math.lgamma((_DF + dim) / 2) - math.lgamma(_DF / 2) - dim / 2 * math.log(_DF * math.pi)
        constant = constant + inverse.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_near = constant - (_DF + dim) / 2 * (square / _DF).log1p()
        lengths = self._given(u)
        gamma = Gamma(lengths.shape, lengths.rate, validate_args=False)
        log_ratio = self.parameters.log_prior(u) - log_near
        return log_near + defended_log_prob(gamma.log_prob(x), x, lengths.prior, log_ratio)

    def refitted(self, x: Tensor, u: Tensor, log_weights: Tensor) -> _Proposal:
        """Match the distributions to draws `(draws, *batch, ...)` with log weights `(draws, *batch)`."""
        if not self.parameters.dim:
            return replace(self, lengths=self.lengths.refitted(x, log_weights))
        weights, trust = _weights_of_pilots(log_weights)
        weights = weights.unsqueeze(-2)
        along = u.movedim(0, -1).contiguous()
        mean = (weights * along).sum(-1)
        away = along - mean[..., None]
        spread = (weights.unsqueeze(-2) * away.unsqueeze(-2) * away.unsqueeze(-3)).sum(-1)
        square = self.factor @ self.factor.mT
        centre = trust * mean + (1.0 - trust) * self.centre
        factor = torch.linalg.cholesky(trust[..., None] * spread + (1.0 - trust[..., None]) * square)
        # The lengths as they would be at the new centre.
        moved = replace(self, centre=centre, factor=factor, lengths=self._given(centre))
        return replace(moved, lengths=moved.lengths.refitted(x * (-moved._shift(u)).exp(), log_weights))

    def _given(self, u: Tensor) -> BranchLengthProposal:
        return replace(self.lengths, rate=self.lengths.rate * (-self._shift(u)).exp())

    def _shift(self, u: Tensor) -> Tensor:
        """Return the change of the logarithms of lengths, `(*batch, edges)`."""
        away = (u - self.centre)[..., None, :]
        return (self.slopes * away).sum(-1).clamp(-_MOST_SHIFTED, _MOST_SHIFTED)


# The posterior density on all topologies, in parts of limited memory.

#: Bytes of the tensors of one evaluation, about; results do not depend on it.
_BYTES = 2**26
#: Numbers for each input of the likelihood that are in memory at once, with and without gradients.
_COPIES, _COPIES_OF_GRADIENTS = 16, 32


class _Posterior:
    """Unnormalised density of branch lengths and of unconstrained parameters on each of several topologies."""

    def __init__(self, model: _Model, topologies: Topologies) -> None:
        self.topologies, self.prior = topologies, model.branch_length_prior
        self.likelihood = ForestLikelihood(model.alignment, model.substitution, site_rates=model.site_rates)
        self.parameters = _FreeParameters(model.substitution, model.site_rates)
        self.num_edges = topologies.num_edges
        # Of the prior, whatever the data; the modes of all other topologies are sought from that of the first.
        drawn = self.parameters.sample(1000, new_generator(0, stream="start of parameters"))
        self.usual = drawn.median(0).values
        rates = model.site_rates
        if rates is not None:
            rates = rates.with_parameters(self.parameters.values(self.usual))
        number = 1 if rates is None else rates.categories(self.usual.new_empty(0)).rates.shape[-1]
        self._inputs = self.num_edges * number * (1 if model.substitution.is_uniform else 16)

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


#: The estimator that evaluates all topologies as one batch.
_IN_ONE_BATCH = "gamma_laplus_importance_sampling"
#: Draws of each topology in each pilot run, and in a block of the final run.
_PILOTS, _BLOCK = (1000, 500, 500), 500
_DRAWS = 10_000
#: Fewest draws of a topology that matters little, as a share of what is asked for and as a number; and fewest that are
#: effective in expectation, four times as many as the diagnosis asks for.
_SMALLEST_SHARE, _FEWEST, _FEWEST_EFFECTIVE = 0.1, 1000, 4 * MIN_EFFECTIVE
#: Relative gain of the density below which the search for a mode ends.
_GAIN = 1e-10
#: Shortest branch length from which a search starts.
_SHORTEST_START = 1e-3
#: A prior whose density grows faster than this power of a length towards zero is unbounded there.
_RISES = -0.01


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
    """

    topologies: Topologies
    comparison: ModelComparison
    settings: dict[str, Any] = field(default_factory=dict)

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
    def total_log_evidence(self) -> Estimate:
        """Log evidence under a uniform prior of all `(2n-5)!!` topologies of `n` taxa, in nats, with standard error.

        Other topologies than those compared contribute nothing, as in `variational_inference` with the same support.
        """
        known = self.log_evidence.isfinite()
        values, errors = self.log_evidence[known], self.standard_error[known]
        error = float((values.softmax(0) * errors).square().sum().sqrt())
        return Estimate(float(values.logsumexp(0)) - log_num_topologies(self.topologies.num_taxa), error)

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
        write_atomically(path, self.to_pandas().to_csv(index=False, float_format="%.10g").encode())

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
    alignment: Alignment,
    trees: TreeSample | Topologies | Sequence[Tree],
    method: str = _IN_ONE_BATCH,
    *,
    substitution: SubstitutionModel | None = None,
    site_rates: SiteRates | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    prior_probabilities: Sequence[float] | None = None,
    num_draws: int | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> TopologyComparison:
    """Estimate the evidence of each topology, and compute posterior probabilities.

    The default method is importance sampling for all topologies as one batch. Its proposal consists of gamma
    distributions matched to the posterior mode of the branch lengths, mixed with a little of the prior and of a heavy
    tail so that weights are bounded.

    Parameters
    ----------
    alignment : Alignment
    trees : TreeSample, Topologies or sequence of Tree
        At least two distinct topologies over the taxa of the alignment. Roots are removed; weights of a sample are
        ignored.
    method : str, default "gamma_laplus_importance_sampling"
        Or the name of a function in :mod:`bayeskit.inference.evidence`, which estimates topologies separately.
    substitution : SubstitutionModel, default JC69()
        Requires values of all parameters for the default method; other methods sample parameters with a prior.
    site_rates : SiteRates, optional
        Distribution of the rate over sites, with values as for `substitution`; by default all sites have rate one.
    branch_length_prior : TorchDistribution, optional
        Over one positive branch length; or over the vector of all, in the edge order of `Topologies`: external branches
        first, in the alignment's order of taxa. Exponential with rate 10 by default.
    prior_probabilities : sequence of float, optional
        Nonnegative weights of the topologies, normalised to sum to one; equal by default.
    num_draws : int, optional
        Default method only: number of branch-length draws per topology, 10,000 by default.
    budget : Budget, optional
        Other methods only: budget of each topology.
    seed : int, default 0
    num_jobs : int, default 1
        Other methods only: number of topologies in parallel.
    checkpoint : path, optional
        Other methods only: folder from which a later call resumes.
    progress : bool, default True

    Returns
    -------
    TopologyComparison

    Raises
    ------
    SettingsError
        If there are fewer than two topologies or one is repeated, a setting is out of range, the default method lacks
        the value of a parameter, the prior of branch lengths is unsuitable, or a setting does not apply to the method.
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

    Examples
    --------
    >>> texts = ["((A,B),C,D);", "((A,C),B,D);", "((A,D),B,C);"]
    >>> alignment = Alignment.from_sequences({"A": "AACCA", "B": "AACCA", "C": "AGCTA", "D": "AGCTA"})
    >>> result = compare_topologies(alignment, [Tree.from_newick(text) for text in texts], num_draws=2000)
    >>> result.comparison.best, len(result.posterior_probabilities)
    ('tree 1', 3)
    """
    substitution = check_models(alignment, substitution, site_rates)
    topologies = unrooted_topologies(trees, alignment)
    _check_distinct(topologies)
    names = [f"tree {place + 1}" for place in range(len(topologies))]
    if branch_length_prior is None:
        branch_length_prior = dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    check_branch_length_prior(branch_length_prior, topologies.num_edges)
    model = _Model(alignment, substitution, site_rates, in_double_precision(branch_length_prior))
    seed = whole_number("seed", seed)
    weights = _weights(prior_probabilities, names)
    given = {"budget": budget, "checkpoint": checkpoint, "num_jobs": None if num_jobs == 1 else num_jobs}
    _check_method(method, given if method == _IN_ONE_BATCH else {"num_draws": num_draws})
    settings: dict[str, Any] = {"method": method, "seed": seed}
    if method == _IN_ONE_BATCH:
        number = _DRAWS if num_draws is None else whole_number("num_draws", num_draws, 1)
        results = _gamma_laplus_importance_sampling(model, topologies, num_draws=number, seed=seed, progress=progress)
        comparison = ModelComparison(dict(zip(names, results, strict=True)), weights, settings | {"num_draws": number})
        _warn(comparison)
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
    return TopologyComparison(topologies, comparison, comparison.settings)


def _check_distinct(found: Topologies) -> None:
    index = found.distinct()[1].tolist()
    for place, number in enumerate(index):
        first = index.index(number)
        if first < place:
            raise SettingsError(
                f"tree {first + 1} and tree {place + 1} are the same topology. Remedy: give each topology once."
            )
    if len(found) < 2:
        raise SettingsError(f"give at least two topologies to compare, not {len(found)}")


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


def _warn(comparison: ModelComparison) -> None:
    """Issue one warning for all topologies with an untrusted estimate."""
    reasons: dict[str, list[str]] = {}
    for name, found in comparison.results.items():
        if not found.trusted:
            reasons.setdefault("; ".join(found.warnings) or "it is not finite", []).append(name)
    if not reasons:
        return
    names = [name for group in reasons.values() for name in group]
    probability = sum(comparison.posterior_probabilities[name][0] for name in names)
    most = max(names, key=lambda name: comparison.posterior_probabilities[name])
    why = next(reason for reason, group in reasons.items() if most in group)
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    warnings.warn(
        f"the evidence of {len(names)} of {len(comparison.results)} topologies, with total posterior probability "
        f"{probability:.2g}, is not trusted: {some}. Reason for {most}: {why}",
        SamplingWarning,
        stacklevel=3,
    )


class _Model(NamedTuple):
    """Arguments of a tree model other than the topology."""

    alignment: Alignment
    substitution: SubstitutionModel
    site_rates: SiteRates | None
    branch_length_prior: dist.TorchDistribution


def _target(model: _Model, tree: Tree) -> Target:
    alignment, substitution, site_rates, prior = model
    return Target.from_pyro(TreeModel(alignment, tree, substitution, prior, site_rates=site_rates))


def _gamma_laplus_importance_sampling(
    model: _Model, topologies: Topologies, *, num_draws: int, seed: int, progress: bool
) -> list[Evidence]:
    begin = time.monotonic()
    with one_thread():
        posterior = _Posterior(model, topologies)
        modes, proposal = _first_proposal(posterior, progress)
        with torch.no_grad():
            proposal, log_weights = _after_pilots(posterior, proposal, seed, progress)
            blocks, size = _allocated(log_weights, num_draws)
            results = _weighed(posterior, proposal, modes, blocks.tolist(), size, seed, progress)
    seconds = (time.monotonic() - begin) / len(topologies)
    return [replace(z, seconds=seconds) for z in results]


def _first_proposal(posterior: _Posterior, progress: bool = False) -> tuple[Modes, _Proposal]:
    """Return modes, of lengths and exponentials of coordinates, and the proposal matched to them."""
    edges, count, prior = posterior.num_edges, len(posterior.topologies), posterior.prior
    # The posterior mode may be at zero whatever the data; the mode of the logarithms is near the probability mass.
    infinite = _is_infinite_at_zero(prior, edges)
    step = max(1, posterior.vectors(gradients=True) // (2 * (edges + posterior.parameters.dim)))
    start = torch.cat([allowed_lengths(prior, edges), posterior.usual.exp()]).unsqueeze(0)
    found: list[Modes] = []
    with progress_bar("modes of topologies", count, progress) as bar:
        for first in (0, *range(1, count, step)):
            places = torch.arange(first, min(first + (step if first else 1), count))

            def log_density(z: Tensor, places: Tensor = places) -> Tensor:
                x, u = z[..., :edges], z[..., edges:].log()
                value = posterior.log_density(places, x, u)
                return value + x.log().sum(-1) if infinite else value

            begin = _from_the_first(posterior.topologies, places, start, found[0].position) if first else start
            found.append(climb_to_modes(log_density, begin, tolerance=_GAIN))
            bar.update(int(places[-1]) + 1)
    modes = Modes(*(torch.cat(column) for column in zip(*found, strict=True)))
    x = modes.position[:, :edges]
    gradient, second = modes.gradient[:, :edges], modes.second[:, :edges]
    if infinite:
        lengths = BranchLengthProposal.matched_in_logarithms(x, gradient, second, prior)
        modes = modes._replace(value=modes.value - x.log().sum(-1))
    else:
        lengths = BranchLengthProposal(*match_gamma(x, gradient, second), prior)
    return modes, _Proposal(lengths, posterior.parameters, *_curved(modes, edges))


def _from_the_first(topologies: Topologies, places: Tensor, usual: Tensor, mode: Tensor) -> Tensor:
    """Return starts `(places, edges + dim)`: the first topology's mode, with the usual lengths for other splits."""
    known = dict(zip(map(bytes, topologies.below[0]), mode[0].tolist(), strict=False))
    start, edges = mode.repeat(len(places), 1), topologies.num_edges
    # At zero a logarithm has no slope, so that a search would stay there.
    shortest = usual[0, :edges].clamp(max=_SHORTEST_START)
    for row, place in zip(start, places.tolist(), strict=True):
        old = [known.get(bytes(split), math.nan) for split in topologies.below[place]]
        row[:edges] = torch.maximum(row.new_tensor(old).nan_to_num(nan=math.inf), shortest)
        row[:edges] = torch.where(row[:edges].isinf(), usual[0, :edges], row[:edges])
    return start


def _curved(modes: Modes, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return centre, factor and slopes of a `_Proposal` from the curvature at the modes."""
    z = modes.position
    precision = -modes.hessian * z[:, :, None] * z[:, None, :] - torch.diag_embed(modes.gradient * z)
    # The density of the logarithms of lengths has a steeper slope by one, and an end at zero.
    own = precision[:, :edges, :edges] + torch.eye(edges, dtype=z.dtype)
    across = precision[:, :edges, edges:]
    slopes = -torch.linalg.solve(own, across)
    marginal = precision[:, edges:, edges:] + across.mT @ slopes
    values, vectors = torch.linalg.eigh(0.5 * (marginal + marginal.mT))
    covariance = (vectors / values.clamp(min=_VAGUE)[:, None, :]) @ vectors.mT
    return z[:, edges:].log(), torch.linalg.cholesky(covariance), slopes


def _drawn(
    posterior: _Posterior, proposal: _Proposal, units: Sequence[tuple[int, int]], size: int, seed: int, stage: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw blocks of `size` draws: lengths, coordinates, mixture components, log densities and log weights.

    A unit is a topology and the number of its block, with the `proposal` in the same place. Each has a random stream of
    its own, so that draws do not depend on what is evaluated together.
    """
    blocks = []
    for row, (place, number) in enumerate(units):
        generator = new_generator(seed, stream=f"gamma laplus importance sampling, {stage} {place} {number}")
        blocks.append(proposal[row].sample(size, generator))
    x, u, part = (torch.stack(column, 1) for column in zip(*blocks, strict=True))
    value = posterior.log_density(torch.tensor([place for place, _ in units]), x, u)
    return x, u, part, value, value - proposal.log_prob(x, u)


def _after_pilots(posterior: _Posterior, proposal: _Proposal, seed: int, progress: bool) -> tuple[_Proposal, Tensor]:
    """Return the proposal matched to pilot draws, and log weights of the last of them, `(topologies, draws)`."""
    count, parts, last = len(posterior.topologies), [], []
    step = max(1, posterior.vectors() // max(_PILOTS))
    with progress_bar("pilot draws of topologies", count, progress) as bar:
        for first in range(0, count, step):
            part = proposal[first : first + step]
            units = [(place, 0) for place in range(first, min(first + step, count))]
            for stage, size in enumerate(_PILOTS):
                x, u, _, _, log_weights = _drawn(posterior, part, units, size, seed, f"pilot {stage}")
                # A NaN counts as zero here, and is reported of the final draws.
                log_weights = log_weights.nan_to_num(nan=-torch.inf)
                part = part.refitted(x, u, log_weights)
            parts.append(part)
            last.append(log_weights.T)
            bar.update(first + len(units))
    return _Proposal.joined(parts), torch.cat(last)


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


def _weighed(
    posterior: _Posterior,
    proposal: _Proposal,
    modes: Modes,
    blocks: list[int],
    size: int,
    seed: int,
    progress: bool,
) -> list[Evidence]:
    """Estimate the evidence of each topology from its blocks of draws."""
    units = [(place, number) for place, total in enumerate(blocks) for number in range(total)]
    step = max(1, posterior.vectors() // size)
    waiting: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    results: list[Evidence] = []
    with progress_bar("importance sampling of topologies", len(units), progress) as bar:
        for first in range(0, len(units), step):
            some = units[first : first + step]
            of_units = proposal[torch.tensor([place for place, _ in some])]
            _, _, part, value, log_weights = _drawn(posterior, of_units, some, size, seed, "draws")
            for column, (place, number) in enumerate(some):
                columns = (value[:, column], log_weights[:, column], part[:, column])
                waiting.setdefault(place, []).append(columns)
                if number == blocks[place] - 1:
                    pieces = (torch.cat(one) for one in zip(*waiting.pop(place), strict=True))
                    results.append(_estimate(*pieces, modes, place))
            bar.update(first + len(some))
    return results


def _is_infinite_at_zero(prior: dist.TorchDistribution, num_edges: int) -> bool:
    lengths = allowed_lengths(prior, num_edges).expand(num_edges, -1).clone()
    lengths.diagonal().fill_(SHORTEST)
    lengths.requires_grad_()
    with torch.enable_grad():
        # A uniform density does not depend on the lengths.
        (gradient,) = torch.autograd.grad((log_prior_of_lengths(prior, lengths) + 0.0 * lengths.sum(-1)).sum(), lengths)
    return bool((gradient.diagonal() * SHORTEST < _RISES).any())


def _estimate(log_density: Tensor, log_weights: Tensor, part: Tensor, modes: Modes, place: int) -> Evidence:
    """Return the evidence of one topology from its draws, all `(draws,)`."""
    usable, problems = without_nan(log_weights)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    error = float(stratified_log_mean_exp_error(usable, part))
    # The shape of the tail is irrelevant if the tail cannot move the estimate by its standard error.
    problems += weight_problems(shape if share_beyond_the_largest(usable) > error else 0.0, effective)
    if not bool(modes.converged[place]):
        problems.append("the search for the mode of the branch lengths did not converge: use bridge sampling")
    return Evidence(
        _IN_ONE_BATCH,
        float(log_mean_exp(usable[None])),
        with_rounding(error, log_density),
        len(usable) + sum(_PILOTS) + int(modes.num_evaluations[place]),
        tuple(problems),
        {
            "draws": len(usable),
            "pareto_shape": shape,
            "effective_draws": effective,
            "log_density_at_the_mode": float(modes.value[place]),
        },
    )
