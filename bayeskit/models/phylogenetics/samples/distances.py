"""How far trees, and samples of trees, are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, overload

import numpy as np

from bayeskit.errors import SettingsError, TreeError
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import Tree, check_same_taxa

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_array

    from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample


@overload
def robinson_foulds(one: Tree, other: Tree) -> int: ...
@overload
def robinson_foulds(one: Topologies, other: Topologies | Tree | None = None) -> np.ndarray: ...
@overload
def robinson_foulds(one: Tree, other: Topologies) -> np.ndarray: ...


def robinson_foulds(one: Topologies | Tree, other: Topologies | Tree | None = None) -> np.ndarray | int:
    """Count the splits that only one of two topologies has, for every pair.

    Rooted topologies are compared by their clades.

    Parameters
    ----------
    one : Topologies or Tree
        Rows of the result.
    other : Topologies or Tree, optional
        Columns of the result; `one` by default.

    Returns
    -------
    ndarray or int
        Robinson-Foulds distances, shape `(len(one), len(other))`, int64; of two trees a number.

    Raises
    ------
    TreeError
        If the topologies differ in taxa or in being rooted, or something else is given.

    References
    ----------
    D. F. Robinson and L. R. Foulds (1981), Comparison of phylogenetic trees, Mathematical Biosciences 53, 131-147.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> robinson_foulds(all_topologies("ABCD")).tolist()
    [[0, 2, 2], [2, 0, 2], [2, 2, 0]]
    >>> robinson_foulds(Tree.from_newick("((A,B),C,D);"), Tree.from_newick("((A,C),B,D);"))
    2
    """
    if isinstance(one, Tree) and isinstance(other, Tree):
        return int(robinson_foulds(Topologies.from_trees([one]), Topologies.from_trees([other])).item())
    one = _as_topologies(one)
    other = one if other is None else _as_topologies(other)
    if one.rooted != other.rooted:
        raise TreeError("Only one of the two is rooted. Remedy: unroot it by unrooted().")
    if one.taxa != other.taxa:
        other = other.with_taxa(one.taxa)[0]
    _, index = clades.identify(np.concatenate([_inner_edges(one), _inner_edges(other)]))
    shared = _incidence(index[: len(one)], index) @ _incidence(index[len(one) :], index).T
    return 2 * (index.shape[1] - shared.toarray())


def _as_topologies(given: object) -> Topologies:
    if isinstance(given, Tree):
        return Topologies.from_trees([given])
    if not isinstance(given, Topologies):
        raise TreeError(
            f"{type(given).__name__} is neither a Tree nor Topologies. Remedy: give Topologies.from_trees(trees), or "
            "those of a sample, sample.topologies."
        )
    return given


@dataclass(frozen=True, eq=False, repr=False)
class SplitFrequencies:
    """How often each split, or each clade of rooted trees, stands in each of several samples.

    Splits of one taxon from all others, which every tree has, are left out.

    Attributes
    ----------
    taxa : tuple of str
        Names of the tips.
    rooted : bool
        Whether the splits are clades of rooted trees.
    splits : ndarray
        Each split as a bitset of its side without the first taxon (or the clade), shape `(splits, words)`, uint64; by
        falling mean frequency.
    frequencies : ndarray
        Shape `(samples, splits)`.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [6, 3, 1])
    >>> table = split_frequencies([sample])
    >>> table.names, table.frequencies.tolist()
    (('B|D', 'B|C', 'C|D'), [[0.6, 0.3, 0.1]])
    """

    taxa: tuple[str, ...]
    rooted: bool
    splits: clades.Bits
    frequencies: np.ndarray

    def __repr__(self) -> str:
        num_samples, num_splits = self.frequencies.shape
        kind = "clades" if self.rooted else "splits"
        return f"SplitFrequencies({num_splits} {kind} in {num_samples} samples, {len(self.taxa)} taxa)"

    @property
    def names(self) -> tuple[str, ...]:
        """The taxa of each split's side without the first taxon, or of each clade, joined by `|`."""
        return tuple("|".join(self.taxa[taxon] for taxon in clades.members(side)) for side in self.splits)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table, a row for each split: the side that `names` gives, its size, its frequency in each sample."""
        import pandas as pd

        columns = {f"sample_{number}": values for number, values in enumerate(self.frequencies)}
        return pd.DataFrame({"split": self.names, "size": clades.size(self.splits), **columns})


def split_frequencies(samples: TreeSample | Sequence[TreeSample]) -> SplitFrequencies:
    """Count the splits of one or several samples.

    Parameters
    ----------
    samples : TreeSample or sequence of TreeSample
        All rooted or all unrooted, over the same taxa.

    Returns
    -------
    SplitFrequencies
        The splits of all samples, and how often each stands in each of them.

    Raises
    ------
    TreeError
        If there is no sample, or they differ in taxa or in being rooted.
    """
    aligned = comparable(samples if isinstance(samples, Sequence) else [samples])
    inner = [_inner_edges(sample.topologies) for sample in aligned]
    splits, index = clades.identify(np.concatenate(inner))
    bounds = np.cumsum([0, *(len(edges) for edges in inner)])
    frequencies = np.stack(
        [
            np.bincount(index[start:end].ravel(), sample.weights.repeat(index.shape[1]), minlength=len(splits))
            for sample, start, end in zip(aligned, bounds[:-1], bounds[1:], strict=True)
        ]
    )
    # Rounded, so that what is equally frequent does not depend on the order of the trees.
    order = np.argsort(-frequencies.mean(axis=0).round(12), kind="stable")
    return SplitFrequencies(aligned[0].taxa, aligned[0].rooted, splits[order], frequencies[:, order])


@dataclass(frozen=True, eq=False, repr=False)
class SplitDeviations:
    """Standard deviations of the split frequencies of several runs.

    Attributes
    ----------
    frequencies : SplitFrequencies
        The splits that count, and their frequencies in each run.
    standard_deviations : ndarray
        Of each split among the runs, with divisor `runs - 1`: shape `(splits,)`.
    """

    frequencies: SplitFrequencies
    standard_deviations: np.ndarray

    def __repr__(self) -> str:
        num_runs, num_splits = self.frequencies.frequencies.shape
        values = f"ASDSF {self.average:.4f}, maximum {self.maximum:.4f}"
        return f"SplitDeviations({values}, {num_splits} splits in {num_runs} runs)"

    @property
    def average(self) -> float:
        """Average standard deviation of split frequencies (ASDSF)."""
        return float(self.standard_deviations.mean())

    @property
    def maximum(self) -> float:
        """Largest standard deviation of a split frequency."""
        return float(self.standard_deviations.max())

    def to_pandas(self) -> pd.DataFrame:
        """Return a table, a row for each split: its taxa, its frequencies, and their standard deviation."""
        return self.frequencies.to_pandas().assign(standard_deviation=self.standard_deviations)


def asdsf(samples: Sequence[TreeSample], minimum_frequency: float = 0.1) -> SplitDeviations:
    """Measure how far the split frequencies of several runs are apart.

    Splits count that have at least the minimum frequency in at least one run. With independent runs that have
    converged, the average goes to zero as the runs grow; below 0.01 is usually called good.

    Parameters
    ----------
    samples : sequence of TreeSample
        Two runs or more, burn-in left out.
    minimum_frequency : float, default 0.1
        From 0 to 1.

    Returns
    -------
    SplitDeviations
        With `.average`, the ASDSF, and `.maximum`.

    Raises
    ------
    SettingsError
        If there are less than two samples, or they are given one by one, not as a list; if the minimum frequency is no
        frequency, or no split reaches it.
    TreeError
        If the samples differ in taxa or in being rooted, or are no samples.

    References
    ----------
    C. Lakner, P. van der Mark, J. P. Huelsenbeck, B. Larget and F. Ronquist (2008), Efficiency of Markov chain Monte
    Carlo tree proposals in Bayesian phylogenetics, Systematic Biology 57, 86-103.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
    >>> runs = [TreeSample.from_topologies(all_topologies("ABCD"), weights) for weights in ([4, 6, 0], [6, 4, 0])]
    >>> round(asdsf(runs).average, 6), round(asdsf(runs).maximum, 6)
    (0.141421, 0.141421)
    """
    if not isinstance(samples, Sequence) or not isinstance(minimum_frequency, Real):
        raise SettingsError("samples: they are not given as a list. Remedy: compare two runs as asdsf([one, other]).")
    if len(samples) < 2:
        raise SettingsError(f"samples: {len(samples)} given. Remedy: compare two runs or more.")
    if not 0 <= minimum_frequency <= 1:
        raise SettingsError(f"minimum_frequency={minimum_frequency} is no frequency. Remedy: give one from 0 to 1.")
    table = split_frequencies(samples)
    # A frequency is a sum of weights, and as a sum is off by rounding.
    counted = (table.frequencies >= minimum_frequency - 1e-12).any(axis=0)
    if not counted.any():
        raise SettingsError(
            f"minimum_frequency={minimum_frequency}: no split is that frequent. Remedy: lower it, or compare trees "
            "of at least four taxa."
        )
    chosen = SplitFrequencies(table.taxa, table.rooted, table.splits[counted], table.frequencies[:, counted])
    return SplitDeviations(chosen, chosen.frequencies.std(axis=0, ddof=1))


def comparable(samples: Sequence[TreeSample]) -> list[TreeSample]:
    """Bring the taxa of several samples into one order.

    Raises
    ------
    TreeError
        If there is no sample, or they differ in taxa or in being rooted.
    """
    if not samples:
        raise TreeError("There is no sample of trees. Remedy: give at least one.")
    first = check_sample(samples[0])
    for place, sample in enumerate(samples, start=1):
        check_same_taxa(first.taxa, check_sample(sample).taxa, "sample 1", f"sample {place}")
        if sample.rooted != first.rooted:
            raise TreeError(f"Sample {place} and sample 1: only one is rooted. Remedy: unroot it by unrooted().")
    return [sample if sample.taxa == first.taxa else sample.with_taxa(first.taxa) for sample in samples]


def check_sample(sample: TreeSample) -> TreeSample:
    """Return a sample of trees; refuse anything else.

    Raises
    ------
    TreeError
        If it is something else, such as a path.
    """
    if not (isinstance(getattr(sample, "topologies", None), Topologies) and hasattr(sample, "sample_weights")):
        raise TreeError(
            f"{type(sample).__name__} is no sample of trees. Remedy: read a file by TreeSample.from_file(path), or "
            "make one by TreeSample.from_trees or TreeSample.from_topologies."
        )
    return sample


def _inner_edges(topologies: Topologies) -> clades.Bits:
    """Return the splits that are not in every tree, or the clades, `(topologies, splits, words)`."""
    return topologies.below[:, topologies.num_taxa :]


def _incidence(index: np.ndarray, among: np.ndarray) -> csr_array:
    """Tell which topology has which split, as a sparse matrix `(topologies, splits)`."""
    from scipy.sparse import csr_array

    ends = np.arange(len(index) + 1) * index.shape[1]
    shape = (len(index), int(among.max(initial=-1)) + 1)
    return csr_array((np.ones(index.size, dtype=np.int64), index.ravel(), ends), shape=shape)
