"""Averages over substitution models, weighted by their posterior probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError, UnknownNameError
from bayeskit.extend import (
    ModelComparison,
    Modes,
    models_html,
    one_thread,
    progress_bar,
    real_number,
    whole_number,
    with_error,
)
from bayeskit.models.phylogenetics import (
    Alignment,
    GTRSubmodel,
    SiteRates,
    SubstitutionModel,
    Topologies,
    Tree,
    all_reversible_models,
    parse_substitution,
)
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
from bayeskit.models.phylogenetics._parameters import FreeParameters, PartitionParameters
from bayeskit.models.phylogenetics._substitution import check_data_type
from bayeskit.models.phylogenetics.workflows._topology_comparison import (
    ForestModel,
    JointProposal,
    TopologyPosterior,
    check_models,
    default_length_prior,
    first_proposals,
    sample_importance,
    unrooted_topologies,
    warn_of_untrusted,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_DRAWS = 10_000
#: Exchangeabilities that differ by less, relative to their sum, are the same parameter.
_SAME = 1e-9
#: Bars of a plot, and models in a text.
_BARS, _SHOWN = 20, 5


@dataclass(frozen=True, repr=False)
class SubstitutionAverage:
    """Posterior probabilities of substitution models on one topology, and averages over them.

    Attributes
    ----------
    comparison : ModelComparison
        Evidence of each model, with branch lengths and parameters integrated out.
    pairs : tuple of str
        Pairs of states, such as "A-C".
    exchangeabilities, exchangeability_errors : Tensor
        Posterior mean of the exchangeability of each pair, scaled so that those of all pairs sum to one, and its Monte
        Carlo standard error, shape `(pairs,)`.
    states : tuple of str
    frequencies, frequency_errors : Tensor
        Posterior means of the stationary frequencies, and their errors, shape `(states,)`.
    equal, equal_errors : Tensor
        Posterior probability that two pairs have the same exchangeability, and its error, shape `(pairs, pairs)`.
    branch_lengths, branch_length_errors : Tensor
        Posterior means of the branch lengths in expected substitutions per site, in the order of `tree.edge_names`, and
        their errors, shape `(edges,)`.
    tree : Tree
        The topology with these branch lengths.
    settings : dict
        Number of draws and seed.
    """

    comparison: ModelComparison
    pairs: tuple[str, ...]
    exchangeabilities: Tensor
    exchangeability_errors: Tensor
    states: tuple[str, ...]
    frequencies: Tensor
    frequency_errors: Tensor
    equal: Tensor
    equal_errors: Tensor
    branch_lengths: Tensor
    branch_length_errors: Tensor
    tree: Tree
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def posterior_probabilities(self) -> dict[str, Estimate]:
        """Posterior probability of each model and its standard error."""
        return {name: Estimate(*pair) for name, pair in self.comparison.posterior_probabilities.items()}

    def probability_of_equal(self, one: str, other: str) -> Estimate:
        """Return the posterior probability that two pairs of states have the same exchangeability.

        Parameters
        ----------
        one, other : str
            Of `pairs`, such as "A-G".

        Raises
        ------
        UnknownNameError
            If there is no such pair.
        """
        for pair in (one, other):
            if pair not in self.pairs:
                raise UnknownNameError(f"there is no pair {pair!r}. Remedy: give two of {', '.join(self.pairs)}.")
        place = self.pairs.index(one), self.pairs.index(other)
        return Estimate(float(self.equal[place]), float(self.equal_errors[place]))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the estimates, each with a remedy."""
        return tuple(
            f"the evidence of {name} is not trusted: {'; '.join(z.warnings) or 'it is not finite'}"
            for name, z in self.comparison.results.items()
            if not z.trusted
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each model, in descending order of evidence."""
        return self.comparison.to_pandas()

    def averages_to_pandas(self) -> pd.DataFrame:
        """Return one row for each exchangeability, frequency and branch length: its name, mean and standard error."""
        import pandas as pd

        parts = (
            ("exchangeability", self.pairs, self.exchangeabilities, self.exchangeability_errors),
            ("frequency", self.states, self.frequencies, self.frequency_errors),
            ("branch_length", self.tree.edge_names, self.branch_lengths, self.branch_length_errors),
        )
        return pd.DataFrame(
            [
                {"quantity": quantity, "of": name, "mean": mean, "standard_error": error}
                for quantity, names, means, errors in parts
                for name, mean, error in zip(names, means.tolist(), errors.tolist(), strict=True)
            ]
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot posterior probabilities as bars with 95 % intervals, at most 20 of them.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes of ``pyplot``.
        """
        from bayeskit.extend import BLUE, GREY

        table = self.to_pandas().sort_values("posterior_probability", ascending=False).head(_BARS)
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(6.0, 1.0 + 0.28 * len(table)), layout="constrained")
        p = table["posterior_probability"]
        ends = [p - table["posterior_probability_low"], table["posterior_probability_high"] - p]
        ax.barh(table["model"], p, xerr=[end.clip(lower=0.0) for end in ends], color=BLUE, ecolor=GREY)
        ax.invert_yaxis()
        rest = max(0.0, 1.0 - float(p.sum()))
        more = len(self.comparison.results) - len(table)
        ax.set_xlabel("posterior probability" + (f" ({more} more models: {rest:.2g})" if more else ""))
        return ax

    def _repr_html_(self) -> str:
        return models_html(self.to_pandas(), self.warnings)

    def __repr__(self) -> str:
        ranked = sorted(self.posterior_probabilities.items(), key=lambda item: -item[1].value)
        lines = [f"{name}: posterior probability {with_error(*found)}" for name, found in ranked[:_SHOWN]]
        if len(ranked) > _SHOWN:
            rest = 1.0 - sum(found.value for _, found in ranked[:_SHOWN])
            lines.append(f"{len(ranked) - _SHOWN} more models: {max(0.0, rest):.2g}")
        return "\n".join(lines)


def average_substitution_models(
    alignment: Alignment,
    tree: Tree,
    models: Sequence[str] | Mapping[str, SubstitutionModel] | None = None,
    *,
    site_rates: SiteRates | None = None,
    branch_length_prior: TorchDistribution | None = None,
    prior_probabilities: Mapping[str, float] | None = None,
    num_draws: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SubstitutionAverage:
    """Weigh substitution models by their evidence on one topology, and average over them.

    The evidence of each model is an integral over its branch lengths and free parameters. It is estimated by the
    importance sampling of `compare_topologies`: proposals are matched to the posterior mode and to pilot draws, and
    models get draws in proportion to their share of the error. Modes are sought from that of the model with the most
    parameters.

    Parameters
    ----------
    alignment : Alignment
    tree : Tree
        The topology; its root and its branch lengths are not used.
    models : sequence of str, or mapping of str to SubstitutionModel, optional
        At least two: names that `parse_substitution` knows, such as "HKY85" or "012232+F+G4", or models by a name of
        yours. By default all 203 reversible models of bases (`all_reversible_models`), with free base frequencies. For
        those with the frequencies of the alignment give `[code + "+F" for code in all_reversible_models()]`.
    site_rates : SiteRates, optional
        Rates of sites for models whose name has none; by default all sites have rate one.
    branch_length_prior : TorchDistribution, optional
        As in `compare_topologies`; exponential with rate 10 by default.
    prior_probabilities : mapping of str to float, optional
        Nonnegative weights of the models by name, normalised to sum to one; equal by default.
    num_draws : int, optional
        The sum over models gets the standard error of this number of draws of each, 10,000 by default. A model that
        contributes little gets fewer, at least a tenth and 1,000 if there are so many.
    seed : int, default 0
        The random numbers of a model depend on the seed and its name, not on the other models.
    progress : bool, default True

    Returns
    -------
    SubstitutionAverage

    Raises
    ------
    SettingsError
        If there are fewer than two models, two have the same name, one is for another type of data, or a setting is
        out of range.
    UnknownNameError
        If there is no model of a name.
    TreeError
        If the taxa differ from those of the alignment.

    Warns
    -----
    SamplingWarning
        If estimates that matter are not trusted.
    ConversionWarning
        If the tree is rooted.

    References
    ----------
    Huelsenbeck, J. P., Larget, B., Alfaro, M. E. (2004). Bayesian phylogenetic model selection using reversible jump
    Markov chain Monte Carlo. Molecular Biology and Evolution 21, 1123-1133.

    Hoeting, J. A., Madigan, D., Raftery, A. E., Volinsky, C. T. (1999). Bayesian model averaging: a tutorial.
    Statistical Science 14, 382-417.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import primates
    >>> alignment, tree = primates()
    >>> found = average_substitution_models(alignment, tree, ["JC69", "K80", "HKY85"], num_draws=1000, progress=False)
    >>> found.comparison.best, found.probability_of_equal("A-G", "C-T").value
    ('HKY85', 1.0)
    """
    check_models(alignment, None, site_rates)
    if not isinstance(tree, Tree):
        raise SettingsError(f"tree: {tree!r:.80} is not a Tree. Remedy: give Tree.from_file(path).")
    chosen = _chosen(models, alignment, site_rates)
    weights = _weights(prior_probabilities, list(chosen))
    topologies = unrooted_topologies([tree], alignment)
    prior = default_length_prior(branch_length_prior, topologies.num_edges)
    number, seed = _DRAWS if num_draws is None else whole_number("num_draws", num_draws, 1), whole_number("seed", seed)
    begin = time.monotonic()
    posteriors = [
        TopologyPosterior(ForestModel(alignment, *model, prior), topologies, f"model {name}, ")
        for name, model in chosen.items()
    ]
    moments: dict[int, _Moments] = {}

    def visit(place: int, x: Tensor, u: Tensor, log_weights: Tensor) -> None:
        moments[place] = _Moments.of(_features(posteriors[place].parameters, x, u), log_weights)

    with one_thread():
        modes, proposals = _modes(posteriors, progress)
        log_prior = torch.tensor([weights[name] for name in chosen], dtype=torch.float64).log()
        settings: dict[str, Any] = {"seed": seed, "progress": progress, "what": "models", "log_prior": log_prior}
        results = sample_importance(posteriors, modes, proposals, number, visit=visit, **settings)
    seconds = (time.monotonic() - begin) / len(chosen)
    found = {name: replace(z, seconds=seconds) for name, z in zip(chosen, results, strict=True)}
    comparison = ModelComparison(found, weights, {"num_draws": number, "seed": seed})
    warn_of_untrusted(comparison, "models")
    return _averaged(comparison, [moments[place] for place in range(len(chosen))], alignment, topologies)


_Models = dict[str, tuple[SubstitutionModel, SiteRates | None]]


def _chosen(
    models: Sequence[str] | Mapping[str, SubstitutionModel] | None, alignment: Alignment, site_rates: SiteRates | None
) -> _Models:
    """Return substitution models and site rates by name."""
    remedy = "Remedy: give names such as ['HKY85', 'GTR'], or a dict of substitution models."
    if models is None:
        models = all_reversible_models()
    if isinstance(models, str) or not isinstance(models, (Sequence, Mapping)):
        raise SettingsError(f"models: {models!r:.80} is no sequence of names. {remedy}")
    chosen: _Models = {}
    for name in models:
        if not isinstance(name, str):
            raise SettingsError(f"models: {name!r:.80} is no name. {remedy}")
        if name in chosen:
            raise SettingsError(f"models: {name!r} is given twice. Remedy: give each model once.")
        if isinstance(models, Mapping):
            chosen[name] = check_models(alignment, models[name], None), site_rates
            check_data_type(alignment, chosen[name][0])
        else:
            substitution, own = parse_substitution(name, alignment)
            chosen[name] = substitution, site_rates if own is None else own
    if len(chosen) < 2:
        raise SettingsError(f"models: an average needs at least two models, not {len(chosen)}. {remedy}")
    return chosen


def _weights(given: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """Return prior probabilities that sum to one."""
    if given is None:
        return dict.fromkeys(names, 1.0 / len(names))
    if not isinstance(given, Mapping) or given.keys() != set(names):
        raise SettingsError(
            "prior_probabilities does not give a number to each model, and to no other. Remedy: give a dict by the "
            f"names {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}."
        )
    weights = {name: real_number(f"prior_probabilities[{name!r}]", given[name]) for name in names}
    if min(weights.values()) < 0 or not 0 < sum(weights.values()) < math.inf:
        raise SettingsError("prior_probabilities: give nonnegative numbers, at least one of them positive.")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _modes(posteriors: list[TopologyPosterior], progress: bool) -> tuple[list[Modes], list[JointProposal]]:
    """Return the modes and the first proposal of each model."""
    order = sorted(range(len(posteriors)), key=lambda place: -posteriors[place].parameters.dim)
    general = posteriors[order[0]]
    found: dict[int, tuple[Modes, JointProposal]] = {}
    with progress_bar("modes of models", len(order), progress) as bar:
        for done, place in enumerate(order):
            start = _start(posteriors[place], general, found[order[0]][0].position[0]) if done else None
            modes, (proposal,) = first_proposals(posteriors[place], start)
            found[place] = modes, proposal
            bar.update(done + 1)
    return [found[place][0] for place in range(len(order))], [found[place][1] for place in range(len(order))]


def _start(posterior: TopologyPosterior, general: TopologyPosterior, mode: Tensor) -> Tensor:
    """Return where the search for a mode starts: at that of a general model, rates of a class being their mean."""
    edges, space = posterior.num_edges, posterior.parameters
    at = mode[edges:].log()
    known = general.parameters.values(at)
    values = space.values(posterior.usual)
    for name, value in values.items():
        if name in known and known[name].shape == value.shape:
            values[name] = known[name]
        elif isinstance(space.substitution, GTRSubmodel) and name == "exchangeabilities":
            rates = _exchangeabilities(general.parameters.parts(at)[0][0], mode)
            digits = torch.tensor([int(digit) for digit in space.substitution.partition])
            sums = torch.zeros_like(value).index_add(0, digits, rates)
            means = sums / torch.bincount(digits)
            values[name] = means / means.sum()
    return torch.cat([mode[:edges], space.coordinates(values).exp()])


def _exchangeabilities(substitution: SubstitutionModel, like: Tensor) -> Tensor:
    """Return the exchangeabilities of the pairs of states, `(*batch, pairs)`, which sum to one."""
    n = substitution.num_states
    matrix = substitution.rate_matrix(like) / substitution.frequencies(like)[..., None, :]
    pairs = matrix[(..., *torch.triu_indices(n, n, 1))]
    return pairs / pairs.sum(-1, keepdim=True)


class _Features(NamedTuple):
    """Quantities that all models have, at draws from one of them."""

    exchangeabilities: Tensor  # (draws, pairs)
    frequencies: Tensor  # (draws, states)
    lengths: Tensor  # (draws, edges)


def _features(space: FreeParameters | PartitionParameters, x: Tensor, u: Tensor) -> _Features:
    ((substitution, _),) = space.parts(u)
    rates, frequencies = _exchangeabilities(substitution, x), substitution.frequencies(x)
    return _Features(rates.expand(len(x), rates.shape[-1]), frequencies.expand(len(x), frequencies.shape[-1]), x)


class _Moments(NamedTuple):
    """Means over draws from one model, with weights `w` of mean one."""

    mean: Tensor  # of each quantity, (quantities,)
    square: Tensor  # of the square of each quantity times `w`, (quantities,)
    product: Tensor  # of each quantity times the square of `w`
    weight: Tensor  # of the square of `w`, ()
    num_draws: int
    equal: Tensor  # which pairs have the same exchangeability, (pairs, pairs)

    @classmethod
    def of(cls, features: _Features, log_weights: Tensor) -> _Moments:
        """Sum up draws."""
        weights = len(log_weights) * log_weights.nan_to_num(nan=-torch.inf).softmax(0)[:, None]
        few = features.exchangeabilities[weights[:, 0].topk(min(3, len(weights))).indices]
        equal = ((few[:, :, None] - few[:, None]).abs() < _SAME).all(0).to(torch.float64)
        # The weight of a draw that is no number is zero.
        values = torch.where(weights > 0, torch.cat(features, -1), 0.0)
        products = weights * values
        return cls(
            products.mean(0),
            products.square().mean(0),
            (products * weights).mean(0),
            weights.square().mean(),
            len(weights),
            equal,
        )

    def variance(self, average: Tensor) -> Tensor:
        """Return the variance of the mean of `w (quantity - average)`."""
        square = self.square - 2.0 * average * self.product + average.square() * self.weight
        return (square - (self.mean - average).square()).clamp(min=0.0) / self.num_draws


def _averaged(
    comparison: ModelComparison, moments: list[_Moments], alignment: Alignment, topologies: Topologies
) -> SubstitutionAverage:
    """Return the averages over models with their errors, those of ratios of means over draws of all models."""
    chances, errors = [], []
    for name, (chance, _) in comparison.posterior_probabilities.items():
        chances.append(0.0 if math.isnan(chance) else chance)
        errors.append(comparison[name].standard_error)
    p = torch.tensor(chances, dtype=torch.float64)
    known = [place for place, chance in enumerate(chances) if chance > 0]
    average = torch.stack([p[place] * moments[place].mean for place in known]).sum(0)
    variance = torch.stack([p[place].square() * moments[place].variance(average) for place in known]).sum(0)
    equal = torch.stack([p[place] * moments[place].equal for place in known]).sum(0)
    equal_variance = torch.stack(
        [(p[place] * errors[place] * (moments[place].equal - equal)).square() for place in known]
    ).sum(0)
    states = alignment.data_type.states
    pairs = tuple(f"{one}-{other}" for place, one in enumerate(states) for other in states[place + 1 :])
    sizes = [len(pairs), len(states), topologies.num_edges]
    (rates, frequencies, lengths), found = average.split(sizes), variance.sqrt().split(sizes)
    return SubstitutionAverage(
        comparison,
        pairs,
        rates,
        found[0],
        tuple(states),
        frequencies,
        found[1],
        equal.clamp(max=1.0),
        equal_variance.sqrt(),
        lengths[topologies.tree_edges(0)],
        found[2][topologies.tree_edges(0)],
        topologies.tree(0, lengths),
        comparison.settings,
    )
