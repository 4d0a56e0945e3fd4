"""Evidence and posterior probabilities of many topologies for one alignment."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
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
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.laplus import SHORTEST, Modes, climb_to_modes, match_gamma
from bayeskit.inference.evidence.methods import METHODS
from bayeskit.logdensity.target import Target
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


def defended_log_prob(log_near: Tensor, lengths: Tensor, prior: TorchDistribution) -> Tensor:
    """Return log densities of `defended_draws`, `(*batch)`, from `log_near` and `lengths`, both `(*batch, edges)`."""
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
    return torch.stack([*parts, log_prior + math.log(PRIOR)]).logsumexp(0)


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
        # The fewer effective draws, the smaller the update.
        weights = log_weights.softmax(0)[..., None]
        effective = 1.0 / weights.square().sum(0)
        trust = effective / (effective + _STEADY)
        # Moments of the logarithms, which exist even if those of the prior do not.
        log_x = x.log()
        mean = (weights * log_x).sum(0)
        variance = (weights * (log_x - mean).square()).sum(0)
        mean = trust * mean + (1.0 - trust) * (self.shape.digamma() - self.rate.log())
        variance = trust * variance + (1.0 - trust) * torch.polygamma(1, self.shape)
        shape = _inverse_trigamma(variance).clamp(min=_FLATTEST)
        return replace(self, shape=shape, rate=(shape.digamma() - mean).exp())


def _inverse_trigamma(value: Tensor) -> Tensor:
    """Return the inverse of the trigamma function, by Newton's method."""
    x = 0.5 + 1.0 / value
    for _ in range(20):
        found = torch.polygamma(1, x)
        # The reciprocal is nearly linear.
        x = x + found * (1.0 - found / value) / torch.polygamma(2, x)
    return x


#: The estimator that evaluates all topologies as one batch.
_IN_ONE_BATCH = "gamma_laplus_importance_sampling"
#: Number of branch-length vectors, over all topologies, in one batch.
_VECTORS = 4096
_PILOTS, _PILOT_DRAWS = 3, 1000
_DRAWS = 10_000
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
    prior = model.branch_length_prior
    likelihood = ForestLikelihood(model.alignment, model.substitution, site_rates=model.site_rates)

    def log_density(x: Tensor) -> Tensor:
        return likelihood.log_likelihood(topologies, x) + log_prior_of_lengths(prior, x)

    with one_thread():
        modes, proposal = _first_proposal(log_density, prior, topologies)
        generator = new_generator(seed, stream="gamma laplus importance sampling")
        with torch.no_grad():
            for _ in range(_PILOTS):
                x, _ = proposal.sample(_PILOT_DRAWS, generator)
                proposal = proposal.refitted(x, log_density(x) - proposal.log_prob(x))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        step = max(1, _VECTORS // len(topologies))
        with torch.no_grad(), progress_bar("importance sampling of topologies", num_draws, progress) as bar:
            for first in range(0, num_draws, step):
                size = min(step, num_draws - first)
                x, part = proposal.sample(size, generator)
                value = log_density(x)
                parts.append((value, value - proposal.log_prob(x), part))
                bar.update(first + size)
    seconds = (time.monotonic() - begin) / len(topologies)
    log_density_values, log_weights, part = (torch.cat(column) for column in zip(*parts, strict=True))
    evaluations = num_draws + _PILOTS * _PILOT_DRAWS + modes.num_evaluations
    return [
        _estimate(log_density_values[:, place], log_weights[:, place], part, modes, place, evaluations, seconds)
        for place in range(len(topologies))
    ]


def _first_proposal(
    log_density: Callable[[Tensor], Tensor], prior: dist.TorchDistribution, topologies: Topologies
) -> tuple[Modes, BranchLengthProposal]:
    """Return modes and the gamma distributions matched to them."""
    start = allowed_lengths(prior, topologies.num_edges).expand(len(topologies), -1)
    if not _is_infinite_at_zero(prior, topologies.num_edges):
        modes = climb_to_modes(log_density, start)
        return modes, BranchLengthProposal(*match_gamma(modes.position, modes.gradient, modes.second), prior)
    # The posterior mode is at zero whatever the data; the mode of the logarithms is near the probability mass.
    modes = climb_to_modes(lambda x: log_density(x) + x.log().sum(-1), start)
    proposal = BranchLengthProposal.matched_in_logarithms(modes.position, modes.gradient, modes.second, prior)
    return modes._replace(value=modes.value - modes.position.log().sum(-1)), proposal


def _is_infinite_at_zero(prior: dist.TorchDistribution, num_edges: int) -> bool:
    lengths = allowed_lengths(prior, num_edges).expand(num_edges, -1).clone()
    lengths.diagonal().fill_(SHORTEST)
    lengths.requires_grad_()
    with torch.enable_grad():
        # A uniform density does not depend on the lengths.
        (gradient,) = torch.autograd.grad((log_prior_of_lengths(prior, lengths) + 0.0 * lengths.sum(-1)).sum(), lengths)
    return bool((gradient.diagonal() * SHORTEST < _RISES).any())


def _estimate(
    log_density: Tensor,
    log_weights: Tensor,
    part: Tensor,
    modes: Modes,
    place: int,
    num_evaluations: int,
    seconds: float,
) -> Evidence:
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
        num_evaluations,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "log_density_at_the_mode": float(modes.value[place])},
        seconds,
    )
