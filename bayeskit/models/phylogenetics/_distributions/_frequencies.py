"""Sample frequencies of topologies, the uniform distribution over topologies, and their mixture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions._graphs import Floats, Numbers, RowNumbers, add_up
from bayeskit.models.phylogenetics._distributions._topology_distribution import (
    Estimate,
    SplitProbabilities,
    TopologyDistribution,
    WeightedTopologies,
    check_topologies,
    most_probable_splits,
    weighted_topologies,
)
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import Tree

# Sample frequencies as a distribution.


class SampleFrequencies(TopologyDistribution):
    """Distribution of topologies given by their weights in a sample; zero for all other topologies.

    Parameters
    ----------
    topologies : Topologies
        Distinct topologies.
    weights : ndarray
        Probabilities of the topologies, above zero, which sum to one, `(topologies,)`.

    Raises
    ------
    SettingsError
        If the weights are not positive or do not sum to one, or a topology is repeated.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Tree
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,B),C,D);", "((A,C),B,D);")]
    >>> frequencies = SampleFrequencies.from_topologies(Topologies.from_trees(trees))
    >>> frequencies.log_prob(Tree.from_newick("(A,D,(B,C));")).item()
    -inf
    >>> {"".join(taxa): round(p, 3) for taxa, p in frequencies.split_probabilities().to_dict().items()}
    {'CD': 0.667, 'BD': 0.333}
    """

    def __init__(self, topologies: Topologies, weights: Floats) -> None:
        if weights.shape != (len(topologies),) or not (weights > 0).all() or abs(weights.sum() - 1) > 1e-9:
            raise SettingsError(
                f"weights must be {len(topologies)} positive numbers, one for each topology, that sum to one. Remedy: "
                "use SampleFrequencies.fit."
            )
        if len(topologies.distinct()[0]) < len(topologies):
            raise SettingsError(
                "topologies: a topology occurs twice. Remedy: use SampleFrequencies.fit, which pools equal topologies."
            )
        self.topologies, self.weights = topologies, weights
        super().__init__(topologies.taxa, topologies.rooted)

    @classmethod
    def fit(cls, sample: WeightedTopologies | Topologies) -> Self:
        """Use the weights of a sample as probabilities.

        Parameters
        ----------
        sample : TreeSample or Topologies
            Topologies with weights, or with equal weights.

        Returns
        -------
        SampleFrequencies
        """
        return cls(*weighted_topologies(sample))

    @classmethod
    def from_topologies(cls, topologies: Topologies) -> Self:
        """Use the relative frequencies of topologies as probabilities.

        Parameters
        ----------
        topologies : Topologies
            Sampled topologies, with repetition.

        Returns
        -------
        SampleFrequencies

        Raises
        ------
        TreeError
            If there is no topology, or `topologies` has another type.
        """
        check_topologies(topologies)
        distinct, index = topologies.distinct()
        return cls(distinct, np.bincount(index) / len(index))

    @cached_property
    def _rows(self) -> RowNumbers:
        return RowNumbers(self.topologies.children.reshape(len(self.topologies), -1))

    def _log_prob(self, topologies: Topologies) -> Tensor:
        row = self._rows.find(topologies.children.reshape(len(topologies), -1))
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.append(self.weights, 0.0))[row])

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Topologies:
        uniform = torch.rand(num_samples, generator=generator, dtype=torch.float64).numpy()
        cumulative = np.cumsum(self.weights)
        # Rounding must not lead past the last topology.
        row = np.searchsorted(cumulative / cumulative[-1], uniform, side="right")
        return self.topologies[np.minimum(row, len(self.topologies) - 1)]

    def entropy(  # type: ignore[override]  # with its error
        self, *, num_samples: int = 0, seed: int | torch.Generator = 0
    ) -> Estimate:
        """Return the exact entropy in nats; the arguments are ignored."""
        return Estimate(float(-self.weights @ np.log(self.weights)), 0.0)

    def most_probable_tree(self) -> Topologies:
        """Return the most frequent topology as `Topologies` of length one."""
        return self.topologies[int(self.weights.argmax())]

    def split_probabilities(self) -> SplitProbabilities:
        """Return the frequency of each split, or of each clade of rooted topologies."""
        sets, numbers = clades.identify(clades.below(self.topologies.children, len(self.taxa)))
        each = np.broadcast_to(self.weights[:, None], numbers.shape)
        frequencies = add_up(numbers, each, len(sets))
        return most_probable_splits(self.taxa, self.rooted, sets, frequencies)

    def _size(self) -> str:
        return f"{len(self.topologies)} topologies"

    def _tensors(self) -> dict[str, Tensor]:
        children = np.ascontiguousarray(self.topologies.children)
        return {"children": torch.from_numpy(children), "weights": torch.from_numpy(self.weights)}

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        topologies = Topologies(tuple(facts["taxa"]), tensors["children"].numpy(), facts["rooted"])
        return cls(topologies, tensors["weights"].numpy())


# The uniform distribution over topologies, and its mixture with another distribution.


def log_num_topologies(num_taxa: int, rooted: bool = False) -> float:
    """Return the log of the number of binary topologies, `(2n-5)!!` or, rooted, `(2n-3)!!`, for `n >= 3` taxa."""
    factors = num_taxa - (1 if rooted else 2)
    return math.lgamma(2 * factors + 1) - factors * math.log(2) - math.lgamma(factors + 1)


def uniform_topologies(
    taxa: Sequence[str], rooted: bool, num_samples: int, generator: torch.Generator | None
) -> Topologies:
    """Draw uniform topologies by attaching each taxon to an edge drawn uniformly."""
    num_taxa, first = len(taxa), 0 if rooted else 1
    alone = clades.single(num_taxa)
    sets = np.repeat((alone[first] | alone[first + 1])[None, None], num_samples, axis=0)
    for taxon in range(first + 2, num_taxa):
        place = torch.randint(2 * (taxon - first) - 1, (num_samples,), generator=generator).numpy()
        sets = _graft(sets, taxon, place, num_taxa, first)
    return Topologies.from_clades(taxa, sets, rooted)


class Smoothed(TopologyDistribution):
    r"""Mixture of a distribution over topologies with the uniform distribution.

    .. math:: p(\tau) = (1 - \epsilon) \, q(\tau) + \epsilon / N,

    with `N` the number of topologies: `(2n-5)!!` unrooted or `(2n-3)!!` rooted. No topology has probability zero.

    Parameters
    ----------
    base : TopologyDistribution
        The distribution `q`.
    epsilon : float
        Weight of the uniform distribution, above zero and at most one.

    Raises
    ------
    SettingsError
        If `epsilon` lies outside its domain.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._distributions import SampleFrequencies
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> topologies = all_topologies("ABCD")
    >>> Smoothed(SampleFrequencies.from_topologies(topologies[:2]), epsilon=0.3).log_prob(topologies).exp()
    tensor([0.4500, 0.4500, 0.1000], dtype=torch.float64)
    """

    def __init__(self, base: TopologyDistribution, epsilon: float) -> None:
        if not 0.0 < epsilon <= 1.0:
            raise SettingsError(f"epsilon: {epsilon} lies outside (0, 1]. Remedy: give a small share such as 1e-6.")
        self.base, self.epsilon = base, epsilon
        super().__init__(base.taxa, base.rooted)

    def _log_prob(self, topologies: Topologies) -> Tensor:
        base = self.base._log_prob(topologies)
        uniform = math.log(self.epsilon) - log_num_topologies(len(self.taxa), self.rooted)
        kept = math.log1p(-self.epsilon) if self.epsilon < 1 else -math.inf
        return torch.logaddexp(base + kept, torch.full_like(base, uniform))

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Topologies:
        spread = (torch.rand(num_samples, generator=generator, dtype=torch.float64) < self.epsilon).numpy()
        children = np.empty((num_samples, *self.event_shape), dtype=np.int32)
        children[~spread] = self.base._draw(int((~spread).sum()), generator).children
        count = int(spread.sum())
        if count:
            children[spread] = uniform_topologies(self.taxa, self.rooted, count, generator).children
        return Topologies(self.taxa, children, self.rooted)

    def most_probable_tree(self) -> Topologies:
        """Return the most probable topology of the base as `Topologies` of length one; also that of the mixture."""
        return self.base.most_probable_tree()

    def split_probabilities(self) -> SplitProbabilities:
        """Return the exact probability of each split (or clade, if rooted) in the support of the base.

        Other splits have `epsilon` times their probability under the uniform distribution, and are left out.
        """
        found = self.base.split_probabilities()
        num_taxa, sizes = len(self.taxa), clades.size(found.splits)
        outside = num_taxa - sizes + (1 if self.rooted else 0)
        # Each side of a split is an independent rooted topology; so is the rest of a clade, with the clade as a tip.
        log_share = np.array(
            [
                log_num_topologies(one, True) + log_num_topologies(other, True)
                for one, other in zip(sizes.tolist(), outside.tolist(), strict=True)
            ]
        )
        uniform = np.exp(log_share - log_num_topologies(num_taxa, self.rooted))
        mixed = (1 - self.epsilon) * found.probabilities + self.epsilon * uniform
        return most_probable_splits(self.taxa, self.rooted, found.splits, mixed)

    def why_not(self, tree: Topologies | Tree) -> None:
        """Return None: no topology has probability zero. `base.why_not` explains the support of the base.

        Parameters
        ----------
        tree : Topologies or Tree
            Over the same taxa.
        """
        self.read(tree)

    def _size(self) -> str:
        return f"epsilon {self.epsilon}"

    def _tensors(self) -> dict[str, Tensor]:
        return {f"base.{name}": tensor for name, tensor in self.base._tensors().items()}

    def _facts(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon, "base": {"kind": type(self.base).__name__, **self.base._facts()}}

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        kind = TopologyDistribution._of_kind(facts["base"]["kind"])
        if kind is None:
            raise SettingsError(f"its base, {facts['base']['kind']}, is unknown")
        inner = {name.removeprefix("base."): tensor for name, tensor in tensors.items()}
        shared = {name: facts[name] for name in ("taxa", "rooted")}
        return cls(kind._restore(inner, {**shared, **facts["base"]}), facts["epsilon"])


def _graft(sets: clades.Bits, taxon: int, place: Numbers, num_taxa: int, first: int) -> clades.Bits:
    """Attach a taxon to the edge above a tip or internal node of each tree, `(trees, internal, words)`."""
    alone = clades.single(num_taxa)
    tips = np.broadcast_to(alone[first:taxon], (len(sets), taxon - first, sets.shape[-1]))
    sister = np.concatenate([tips, sets], axis=1)[np.arange(len(sets)), place][:, None]
    above = ((sister & ~sets) == 0).all(axis=-1) & (sets != sister).any(axis=-1)
    return np.concatenate([np.where(above[..., None], sets | alone[taxon], sets), sister | alone[taxon]], axis=1)
