"""Constraints on topologies: groups of taxa that are on one side of a branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import _clades as clades


def constraint_splits(groups: Sequence[Sequence[str]], taxa: Sequence[str]) -> clades.Bits:
    """Return the splits of groups of taxa, `(constraints, words)`; SettingsError if they are invalid."""
    number = {taxon: place for place, taxon in enumerate(taxa)}
    everything, alone = clades.everything(len(taxa)), clades.single(len(taxa))
    splits: list[Any] = []
    for group in groups:
        if isinstance(group, str) or not all(taxon in number for taxon in group):
            unknown = group if isinstance(group, str) else [taxon for taxon in group if taxon not in number]
            raise SettingsError(
                f"constraints: {unknown!r:.80} is not in the alignment. Remedy: give lists of its taxa."
            )
        if not 2 <= len(set(group)) <= len(taxa) - 2:
            raise SettingsError(
                f"constraints: {list(group)!r:.80} does not constrain a tree. Remedy: give at least two taxa, and "
                "leave at least two out."
            )
        split = np.bitwise_or.reduce(alone[[number[taxon] for taxon in group]], axis=0)
        split = everything & ~split if split[0] & np.uint64(1) else split
        for place, other in enumerate(splits):
            common = split & other
            if common.any() and (common != split).any() and (common != other).any():
                raise SettingsError(
                    f"constraints: groups {place + 1} and {len(splits) + 1} contradict each other. Remedy: give groups "
                    "of which one holds the other, or that have no taxon in common."
                )
        splits.append(split)
    return np.array(splits, dtype=np.uint64).reshape(len(splits), clades.num_words(len(taxa)))


def check_constraints(sets: clades.Bits, groups: Sequence[Sequence[str]], taxa: Sequence[str], what: str) -> None:
    """Raise SettingsError if a tree with one of the sides of branches `(sets, words)` can violate a constraint."""
    # A resolved tree has each split that none of its own contradicts.
    everything = clades.everything(len(taxa))
    for group, split in zip(groups, constraint_splits(groups, taxa), strict=True):
        quarters = (sets & split, sets & ~split, split & ~sets, everything & ~(sets | split))
        if np.all([quarter.any(-1) for quarter in quarters], axis=0).any():
            raise SettingsError(
                f"constraints: that on {', '.join(group)} excludes a tree of {what}. Remedy: give trees in which these "
                "taxa are on one side of a branch, such as those of infer_topologies with the same constraints."
            )


def log_number_of_topologies(num_taxa: int, constraints: np.ndarray | None = None) -> float:
    """Return the log number of unrooted binary topologies that have the splits `(constraints, words)`."""
    splits = np.zeros((0, clades.num_words(num_taxa)), np.uint64) if constraints is None else constraints
    splits = np.unique(splits, axis=0)
    top = clades.everything(num_taxa) & ~clades.single(num_taxa)[0]
    total = 0.0
    for one in [top, *splits]:
        inside = [other for other in splits if not (other & ~one).any() and (other != one).any()]
        largest = [
            other for other in inside if not any(not (other & ~big).any() and (other != big).any() for big in inside)
        ]
        parts = int(clades.size(one)) - sum(int(clades.size(other)) - 1 for other in largest)
        # (2 m - 3)!! rooted binary trees of m parts.
        total += math.lgamma(2 * parts - 1) - (parts - 1) * math.log(2) - math.lgamma(parts)
    return total
