"""Branch lengths of sampled trees that lose their roots, or get one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics.trees.topologies import Topologies


def reordered(lengths: Tensor | None, edges: np.ndarray, index: np.ndarray) -> Tensor | None:
    """Bring lengths `(samples, edges)` into another order, given for each topology as `(topologies, edges)`."""
    return None if lengths is None else lengths.take_along_dim(torch.from_numpy(edges[index]), dim=1)


def without_roots(
    topologies: Topologies, index: np.ndarray, lengths: Tensor | None
) -> tuple[Topologies, Tensor | None]:
    """Dissolve the roots of rooted topologies; the lengths of the two edges at each add.

    Parameters
    ----------
    topologies : Topologies
        Rooted.
    index : ndarray
        Which of them each sampled tree has, shape `(samples,)`.
    lengths : Tensor or None
        Shape `(samples, edges)`.

    Returns
    -------
    topologies : Topologies
        One for each given.
    lengths : Tensor or None
        Shape `(samples, edges - 1)`.
    """
    unrooted, edges = topologies.unrooted()
    if lengths is not None:
        upper = topologies.upper_root_edge
        lower = topologies.children[:, -1].sum(axis=1) - upper
        samples, lengths = np.arange(len(index)), lengths.clone()
        lengths[samples, lower[index]] += lengths[samples, upper[index]]
    return unrooted, reordered(lengths, edges, index)


def with_outgroup(
    topologies: Topologies, taxon: str, index: np.ndarray, lengths: Tensor | None
) -> tuple[Topologies, Tensor | None]:
    """Put the roots of unrooted topologies in the middle of the edge that ends in a taxon.

    Parameters
    ----------
    topologies : Topologies
        Unrooted.
    taxon : str
        The outgroup.
    index : ndarray
        Which of them each sampled tree has, shape `(samples,)`.
    lengths : Tensor or None
        Shape `(samples, edges)`.

    Returns
    -------
    topologies : Topologies
        One for each given.
    lengths : Tensor or None
        Shape `(samples, edges + 1)`.
    """
    rooted = topologies.rooted_at(taxon)
    if lengths is None:
        return rooted, None
    # Unrooted again they are as they were: this says where each edge has gone.
    _, edges = rooted.unrooted()
    upper = rooted.upper_root_edge
    lower = rooted.children[:, -1].sum(axis=1) - upper
    samples = np.arange(len(index))
    placed = lengths.new_zeros(len(index), rooted.num_edges)
    placed.scatter_(1, torch.from_numpy(edges[index]), lengths)
    placed[samples, lower[index]] /= 2
    placed[samples, upper[index]] = placed[samples, lower[index]]
    return rooted, placed
