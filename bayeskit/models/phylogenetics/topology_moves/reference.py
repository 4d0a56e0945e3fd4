"""Reference distribution of a path to the posterior: clades, subsplits and branch lengths of a sample of trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics import clades
from bayeskit.models.phylogenetics.topologies import Topologies

__all__ = ["TreeReference"]

#: Weight of the mean over all clades in the fit of a clade's branch length, in draws.
_SHRINKAGE = 4.0


class TreeReference(NamedTuple):
    """Distribution over topologies and branch lengths: subsplits of clades, and gamma distributions of lengths.

    Clades are the taxa below an edge, seen from the first taxon. Without clades it stands for no distribution.
    """

    clades: Tensor  # as bits, (clades, words), int64
    shape: Tensor  # of the length of the edge above each clade; the last is that of all other clades, (clades + 1,)
    rate: Tensor
    parent: Tensor  # clade of each subsplit, ascending, (subsplits,), int64
    child: Tensor  # its child with the parent's first taxon
    weight: Tensor  # total weight of the trees that have it, (subsplits,), float64

    @classmethod
    def none(cls, num_taxa: int) -> TreeReference:
        """Return no distribution."""
        numbers, whole = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return cls(
            torch.zeros(0, clades.num_words(num_taxa), dtype=torch.int64), numbers, numbers, whole, whole, numbers
        )

    @classmethod
    def fitted(cls, splits: Tensor, lengths: Tensor, weights: Tensor, num_taxa: int) -> TreeReference:
        """Fit to trees: splits `(draws, edges, words)`, lengths `(draws, edges)` and weights `(draws,)`."""
        taxa = tuple(str(number) for number in range(num_taxa))
        topologies, order = Topologies.from_edges(taxa, splits.numpy().view(np.uint64), rooted=False)
        sets = clades.below(topologies.children, num_taxa)[:, 1:]
        # The first taxon's edge is the last node's.
        times = np.roll(np.take_along_axis(lengths.numpy(), order, axis=1), -1, axis=1)
        distinct, index = clades.identify(sets)
        edges = index.shape[1]
        weight = weights.numpy().repeat(edges)
        shape, rate = _gamma_fits(index.ravel(), times.ravel(), weight, len(distinct), clades.size(distinct) == 1)
        children = index[np.arange(len(index))[:, None, None], topologies.children - 1]
        parent = index[:, num_taxa - 1 :]
        lowest = np.array([clades.members(one)[0] for one in distinct])
        child = np.where(lowest[children[..., 0]] == lowest[parent], children[..., 0], children[..., 1])
        pairs, place = np.unique(np.stack([parent.ravel(), child.ravel()], 1), axis=0, return_inverse=True)
        total = np.bincount(place.ravel(), weights.numpy().repeat(parent.shape[1]))
        return cls(
            torch.from_numpy(distinct.view(np.int64)),
            torch.from_numpy(shape),
            torch.from_numpy(rate),
            torch.from_numpy(pairs[:, 0].copy()),
            torch.from_numpy(pairs[:, 1].copy()),
            torch.from_numpy(total),
        )


def _gamma_fits(
    index: np.ndarray, times: np.ndarray, weight: np.ndarray, count: int, pendant: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return shape and rate of each clade's lengths and of other clades', `(count + 1,)`, shrunk to their mean."""
    number = np.bincount(index, weight, minlength=count)
    times = np.maximum(times, 1e-12)
    total = np.bincount(index, weight * times, minlength=count)
    logs = np.bincount(index, weight * np.log(times), minlength=count)
    inner = ~pendant if not pendant.all() else pendant
    typical, typical_log = (float((part[inner] / number[inner]).mean()) for part in (total, logs))
    mean = np.append((total + _SHRINKAGE * typical) / (number + _SHRINKAGE), typical)
    mean_log = np.append((logs + _SHRINKAGE * typical_log) / (number + _SHRINKAGE), typical_log)
    # Near the maximum of the likelihood of a gamma distribution (Minka 2002).
    gap = np.maximum(np.log(mean) - mean_log, 1e-6)
    shape = (3 - gap + np.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    return shape, shape / mean
