"""Every topology of a few taxa."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies


def all_topologies(taxa: Sequence[str], rooted: bool = False) -> Topologies:
    """List every topology of a few taxa.

    Parameters
    ----------
    taxa : sequence of str
        Names of the tips: 3 to 9, or 8 of rooted topologies.
    rooted : bool, default False
        Whether to list the rooted topologies.

    Returns
    -------
    Topologies
        All `(2n-5)!!` unrooted topologies, or `(2n-3)!!` rooted ones, each once.

    Raises
    ------
    TreeError
        If there are too few or too many taxa.

    Examples
    --------
    >>> [len(all_topologies("ABCDEFG"[:n])) for n in (3, 4, 5, 6, 7)]
    [1, 3, 15, 105, 945]
    >>> len(all_topologies("ABCD", rooted=True))
    15
    """
    largest = 8 if rooted else 9
    if not 3 <= len(taxa) <= largest:
        raise TreeError(
            f"{len(taxa)} taxa: every topology is listed of 3 to {largest} taxa. Remedy: for more, use those of a "
            "sample, TreeSample.from_file(...).topologies."
        )
    # An unrooted topology hangs from its first taxon, so that the others form a rooted one.
    first = 0 if rooted else 1
    alone = clades.single(len(taxa))
    # The taxa below every node; each further taxon is grafted onto the edge above each node, the root's included.
    nodes = alone[None, first : first + 1]
    for taxon in range(first + 1, len(taxa)):
        place = np.arange(nodes.shape[1])
        target = nodes[:, place, None]
        inside = ((target & ~nodes[:, None]) == 0).all(axis=-1) & (place[:, None] != place)
        grown = np.where(inside[..., None], nodes[:, None] | alone[taxon], nodes[:, None])
        added = np.broadcast_to(alone[taxon], target.shape)
        nodes = np.concatenate([grown, target | alone[taxon], added], axis=2).reshape(-1, len(place) + 2, len(alone[0]))
    internal = nodes[clades.size(nodes) > 1].reshape(len(nodes), -1, nodes.shape[-1])
    return Topologies.from_clades(taxa, internal, rooted)
