"""The frequencies of sampled topologies as a distribution."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics.distributions.rows import Floats, RowNumbers, add_up
from bayeskit.models.phylogenetics.distributions.split_probabilities import SplitProbabilities, most_probable_splits
from bayeskit.models.phylogenetics.distributions.topology_distribution import Estimate, TopologyDistribution
from bayeskit.models.phylogenetics.distributions.weighted import WeightedTopologies, check_topologies, weighted
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies


class SampleFrequencies(TopologyDistribution):
    """Topologies as probable as they are frequent in a sample; all others have probability zero.

    Parameters
    ----------
    topologies : Topologies
        Each once.
    weights : ndarray
        Their probabilities, above zero, which sum to one, `(topologies,)`.

    Raises
    ------
    SettingsError
        If the weights are not such probabilities, or a topology stands twice.

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
                f"weights: they do not sum to one over {len(topologies)} topologies, or one is not above zero. "
                "Remedy: use SampleFrequencies.fit."
            )
        if len(topologies.distinct()[0]) < len(topologies):
            raise SettingsError("topologies: one stands twice. Remedy: use SampleFrequencies.fit, which pools them.")
        self.topologies, self.weights = topologies, weights
        super().__init__(topologies.taxa, topologies.rooted)

    @classmethod
    def fit(cls, sample: WeightedTopologies | Topologies) -> Self:
        """Take over the weights of a sample.

        Parameters
        ----------
        sample : TreeSample
            Topologies and weights, or `Topologies` that count the same each.

        Returns
        -------
        SampleFrequencies
            The distribution.
        """
        return cls(*weighted(sample))

    @classmethod
    def from_topologies(cls, topologies: Topologies) -> Self:
        """Count topologies, which may repeat.

        Parameters
        ----------
        topologies : Topologies
            The sampled topologies.

        Returns
        -------
        SampleFrequencies
            The distribution.

        Raises
        ------
        TreeError
            If there is no topology, or something else is given.
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
        """Return the exact entropy in nats; the arguments are not needed."""
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
