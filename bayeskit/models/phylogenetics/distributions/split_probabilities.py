"""How probable splits are under a distribution over topologies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bayeskit.models.phylogenetics.distributions.rows import Floats
from bayeskit.models.phylogenetics.trees import clades

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class SplitProbabilities:
    """How probable splits are, most probable first.

    Attributes
    ----------
    taxa : tuple of str
        Names of the taxa.
    splits : ndarray
        The side of each split without the first taxon, or the clade of rooted topologies, as bitsets: shape
        `(splits, words)`. Those that every tree has are left out.
    probabilities : ndarray
        Their probabilities, `(splits,)`.
    """

    taxa: tuple[str, ...]
    splits: clades.Bits
    probabilities: Floats

    def __repr__(self) -> str:
        likely = int((self.probabilities > 0.5).sum())
        return f"SplitProbabilities({len(self.splits)} splits, {likely} above 0.5, {len(self.taxa)} taxa)"

    def to_dict(self) -> dict[tuple[str, ...], float]:
        """Return the probability of each split by the names of its taxa, in the order of `taxa`."""
        names = (tuple(self.taxa[taxon] for taxon in clades.members(split)) for split in self.splits)
        return dict(zip(names, self.probabilities.tolist(), strict=True))

    def to_pandas(self) -> pd.DataFrame:
        """Return a table, a row for each split: its taxa joined by `|`, its size, and its probability.

        Examples
        --------
        >>> splits = clades.single(4)[1:3].sum(axis=0, dtype=np.uint64)[None]
        >>> SplitProbabilities(("A", "B", "C", "D"), splits, np.array([0.75])).to_pandas()
          split  size  probability
        0   B|C     2         0.75
        """
        import pandas as pd

        names = ["|".join(taxa) for taxa in self.to_dict()]
        return pd.DataFrame({"split": names, "size": clades.size(self.splits), "probability": self.probabilities})


def most_probable_splits(
    taxa: tuple[str, ...], rooted: bool, sets: clades.Bits, probabilities: Floats
) -> SplitProbabilities:
    """Keep the splits that some but not all trees can have, with a probability above zero, most probable first."""
    sizes = clades.size(sets)
    kept = (sizes > 1) & (sizes < len(taxa) - (0 if rooted else 1)) & (probabilities > 0)
    if not rooted:
        kept &= ~clades.contains(sets, 0)
    order = np.flatnonzero(kept)[np.argsort(-probabilities[kept], kind="stable")]
    return SplitProbabilities(taxa, sets[order], probabilities[order])
