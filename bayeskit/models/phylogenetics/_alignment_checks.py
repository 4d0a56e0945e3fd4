"""What an alignment must have before trees are searched."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bayeskit.errors import AlignmentError, DataWarning
from bayeskit.extend import warn_user
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._partitions import Partition, subsets_of
from bayeskit.models.phylogenetics._site_sets import ranges


def check_for_search(alignment: Alignment | Partition) -> None:
    """Check that an alignment can say something about the topology.

    Parameters
    ----------
    alignment : Alignment or Partition
        Not changed: all sites and taxa are kept. The subsets of a partition have the same taxa.

    Raises
    ------
    AlignmentError
        If there are fewer than four taxa, for which there is at most one unrooted topology.

    Warns
    -----
    DataWarning
        If all sites are constant; if taxa or sites hold nothing but missing data; or if taxa have identical sequences.
        Each warning names the taxa or sites (counted from 1, in each subset).

    Examples
    --------
    >>> import warnings
    >>> sequences = {"A": "ACGT", "B": "ACGA", "C": "ACGA", "D": "TCGT"}
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_for_search(Alignment.from_sequences(sequences))
    >>> print(str(caught[0].message).split(". ")[0])
    Identical sequences: 'B', 'C'
    """
    subsets, taxa = subsets_of(alignment), alignment.taxa
    if len(taxa) < 4:
        raise AlignmentError(
            f"The alignment has {len(taxa)} taxa ({', '.join(taxa)}), and there is only one "
            "unrooted topology of three. Remedy: give at least four taxa; for three, use TreeModel."
        )
    for said in _findings(taxa, subsets):
        warn_user(said, DataWarning)


def _findings(taxa: tuple[str, ...], subsets: Mapping[str, Alignment]) -> list[str]:
    """Return the texts of the warnings."""
    parts = [alignment.patterns.numpy() for alignment in subsets.values()]
    everything = [2**alignment.data_type.num_states - 1 for alignment in subsets.values()]
    unknowns = [np.equal(part, every) for part, every in zip(parts, everything, strict=True)]
    patterns, missing = np.concatenate(parts, 1), np.concatenate(unknowns, 1)
    groups: dict[bytes, list[str]] = {}
    for taxon, row in zip(taxa, patterns, strict=True):
        groups.setdefault(row.tobytes(), []).append(repr(taxon))
    unknown = [repr(taxa[place]) for place in np.flatnonzero(missing.all(1))]
    equal = [group for group in groups.values() if len(group) > 1 and not set(group) <= set(unknown)]
    empty = [
        ranges(sites) + (f" of {name!r}" if name else "")
        for (name, alignment), gaps in zip(subsets.items(), unknowns, strict=True)
        if len(sites := np.flatnonzero(gaps.all(0)[alignment.site_patterns.numpy()]))
    ]
    found = []
    if not (np.bitwise_and.reduce(patterns, axis=0) == 0).any():
        found.append(
            "No site varies: some state is possible for all taxa at each site. The data say next to nothing about the "
            "topology. Remedy: give sites that vary."
        )
    if unknown:
        found.append(
            f"No base is known of {_listed(unknown)}. Only the prior tells their places in the tree. Remedy: leave "
            "them out, with alignment.select(taxa)."
        )
    if equal:
        found.append(
            f"Identical sequences: {_listed([', '.join(group) for group in equal], '; ')}. Only the prior tells which "
            "of them are closer. Remedy: keep one of each group, with alignment.select(taxa)."
        )
    if empty:
        found.append(
            f"No base is known at the sites {', '.join(empty)} (counted from 1). They are kept; the likelihood of "
            "each is one. Remedy: none is needed; alignment.select_sites(sites) leaves them out."
        )
    return found


def _listed(words: list[str], separator: str = ", ") -> str:
    return separator.join(words[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
