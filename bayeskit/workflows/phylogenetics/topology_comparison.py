"""The evidence of many topologies for one alignment, and their posterior probabilities."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.evidence import Budget, Evidence
from bayeskit.inference.evidence.checks import weight_problems, with_rounding
from bayeskit.inference.evidence.laplus import gamma_laplus
from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    ForestLikelihood,
    SubstitutionModel,
    Topologies,
    Tree,
    TreeModel,
    TreeSample,
)
from bayeskit.target import Target
from bayeskit.workflows.model_comparison import ModelComparison, compare_models
from bayeskit.workflows.phylogenetics.modes import Modes, climb_to_modes
from bayeskit.workflows.phylogenetics.proposal import Proposal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The estimator that works on all topologies as one batch.
IN_ONE_BATCH = "gamma_laplus_importance_sampling"
#: Branch-length vectors, over all topologies, that are weighed at a time.
_VECTORS = 4096
PILOTS, PILOT_DRAWS = 3, 1000


@dataclass(frozen=True)
class TopologyComparison:
    """Evidence and posterior probability of each of several topologies.

    Attributes
    ----------
    topologies : Topologies
        What was compared.
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
        """Monte Carlo errors of `posterior_probabilities`, shape `(topologies,)`."""
        return self._column(error for _, error in self.comparison.posterior_probabilities.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the estimates doubtful, with the remedy."""
        return self.comparison.warnings

    def to_sample(self) -> TreeSample:
        """Return the topologies weighted by their posterior probabilities."""
        return TreeSample.from_topologies(self.topologies, self.posterior_probabilities.numpy())

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a topology, the best first, with its Newick text."""
        texts = {f"tree {place + 1}": self.topologies.to_newick(place) for place in range(len(self.topologies))}
        table = self.comparison.to_pandas().rename(columns={"model": "topology"})
        return table.assign(newick=table["topology"].map(texts))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot log Bayes factors against the best topology with 95 % intervals."""
        return self.comparison.plot(ax)

    def __str__(self) -> str:
        return str(self.comparison)

    @staticmethod
    def _column(values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)


def compare_topologies(
    alignment: Alignment,
    trees: TreeSample | Topologies | Sequence[Tree],
    method: str = IN_ONE_BATCH,
    *,
    substitution: SubstitutionModel | None = None,
    branch_length_prior: dist.TorchDistribution | None = None,
    prior_probabilities: Sequence[float] | None = None,
    num_draws: int = 10_000,
    budget: Budget | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> TopologyComparison:
    """Estimate the evidence of every topology, and from it the posterior probability of each.

    Parameters
    ----------
    alignment : Alignment
    trees : TreeSample, Topologies or sequence of Tree
        At least two distinct unrooted topologies over the taxa of the alignment. Weights of a sample are not used.
    method : str, default "gamma_laplus_importance_sampling"
        By default importance sampling from gamma distributions matched to the posterior mode of the branch lengths,
        with a little of a heavier tail so that weights are bounded, for all topologies as one batch; or the name of a
        function in :mod:`bayeskit.inference.evidence`, which works on one topology after another, or several at a
        time with `num_jobs`.
    substitution : SubstitutionModel, optional
        Jukes-Cantor by default.
    branch_length_prior : TorchDistribution, optional
        Over one branch length or over the vector of all; Exponential with rate 10 by default.
    prior_probabilities : sequence of float, optional
        Of the topologies, scaled to add up to one; equal by default.
    num_draws : int, default 10,000
        Of branch lengths on each topology, for the default method.
    budget : Budget, optional
        Of each topology, for other methods.
    seed : int, default 0
    num_jobs : int, default 1
        Topologies under way at a time, for other methods.
    checkpoint : path, optional
        Folder from which a later call goes on, for other methods.
    progress : bool, default True

    Returns
    -------
    TopologyComparison

    Raises
    ------
    SettingsError
        If there are fewer than two topologies or one stands twice, or a setting is out of range.
    TreeError
        If the taxa are not those of the alignment.

    Warns
    -----
    SamplingWarning
        If an estimate is not to be trusted.

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
    topologies = _topologies(trees)
    names = [f"tree {place + 1}" for place in range(len(topologies))]
    substitution = JC69() if substitution is None else substitution
    prior = branch_length_prior or dist.Exponential(torch.tensor(10.0, dtype=torch.float64))
    seed = whole_number("seed", seed)
    weights = _weights(prior_probabilities, names)
    settings: dict[str, Any] = {"method": method, "seed": seed}
    if method == IN_ONE_BATCH:
        number = whole_number("num_draws", num_draws, 1)
        results = _gamma_laplus_importance_sampling(
            alignment, topologies, substitution, prior, num_draws=number, seed=seed, progress=progress
        )
        comparison = ModelComparison(dict(zip(names, results, strict=True)), weights, settings | {"num_draws": number})
        for warning in comparison.warnings:
            if "not told apart" not in warning:
                warnings.warn(warning, SamplingWarning, stacklevel=2)
    else:
        models = {
            name: partial(_target, alignment, topologies.tree(place), substitution, prior)
            for place, name in enumerate(names)
        }
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


def _topologies(trees: TreeSample | Topologies | Sequence[Tree]) -> Topologies:
    if isinstance(trees, TreeSample):
        trees = trees.topologies
    found = trees if isinstance(trees, Topologies) else Topologies.from_trees(trees)
    if found.rooted:
        raise SettingsError("The topologies are rooted. Remedy: give unrooted ones, such as topologies.unrooted().")
    index = found.distinct()[1].tolist()
    for place, number in enumerate(index):
        if index.index(number) < place:
            first = index.index(number)
            raise SettingsError(f"trees {first} and {place} are the same topology. Remedy: give each once.")
    if len(found) < 2:
        raise SettingsError(f"give at least two topologies to compare, not {len(found)}")
    return found


def _weights(given: Sequence[float] | None, names: list[str]) -> dict[str, float]:
    values = [1.0] * len(names) if given is None else [float(value) for value in given]
    if len(values) != len(names) or not all(0 <= v < math.inf for v in values) or sum(values) <= 0:
        raise SettingsError(
            f"prior_probabilities must give each of the {len(names)} topologies a nonnegative number, some above zero"
        )
    return {name: value / sum(values) for name, value in zip(names, values, strict=True)}


def _target(alignment: Alignment, tree: Tree, substitution: SubstitutionModel, prior: dist.TorchDistribution) -> Target:
    return Target.from_pyro(TreeModel(alignment, tree, substitution, prior))


def _gamma_laplus_importance_sampling(
    alignment: Alignment,
    topologies: Topologies,
    substitution: SubstitutionModel,
    prior: dist.TorchDistribution,
    *,
    num_draws: int,
    seed: int,
    progress: bool,
) -> list[Evidence]:
    begin = time.monotonic()
    likelihood = ForestLikelihood(alignment, substitution)

    def log_density(x: Tensor) -> Tensor:
        log_prior = prior.log_prob(x)
        return likelihood.log_likelihood(topologies, x) + (log_prior if prior.event_shape else log_prior.sum(-1))

    start = torch.full((len(topologies), topologies.num_edges), 0.05, dtype=torch.float64)
    with one_thread():
        modes = climb_to_modes(log_density, start)
        proposal = Proposal(*gamma_laplus(modes.position, modes.gradient, modes.second))
        generator = new_generator(seed, stream="gamma laplus importance sampling")
        with torch.no_grad():
            for _ in range(PILOTS):
                x = proposal.sample(PILOT_DRAWS, generator)
                proposal = proposal.refitted(x, log_density(x) - proposal.log_prob(x))
        parts: list[tuple[Tensor, Tensor]] = []
        step = max(1, _VECTORS // len(topologies))
        with torch.no_grad(), progress_bar("weighing topologies", num_draws, progress) as bar:
            for first in range(0, num_draws, step):
                size = min(step, num_draws - first)
                x = proposal.sample(size, generator)
                value = log_density(x)
                parts.append((value, value - proposal.log_prob(x)))
                bar.update(first + size)
    seconds = (time.monotonic() - begin) / len(topologies)
    log_density_values, log_weights = (torch.cat(column) for column in zip(*parts, strict=True))
    return [
        _estimate(log_density_values[:, place], log_weights[:, place], modes, place, seconds)
        for place in range(len(topologies))
    ]


def _estimate(log_density: Tensor, log_weights: Tensor, modes: Modes, place: int, seconds: float) -> Evidence:
    usable = torch.where(log_weights.isnan(), -torch.inf, log_weights)
    shape, effective = pareto_shape(usable[None]), float(weight_effective_sample_size(usable))
    problems = [*weight_problems(shape, effective)]
    if not bool(modes.converged[place]):
        problems.append("the search for the mode of the branch lengths did not converge: use bridge sampling")
    return Evidence(
        IN_ONE_BATCH,
        float(log_mean_exp(usable[None])),
        with_rounding(float(independent_log_mean_exp_error(usable[None])), log_density),
        len(usable) + modes.num_evaluations,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "log_density_at_the_mode": float(modes.value[place])},
        seconds,
    )
