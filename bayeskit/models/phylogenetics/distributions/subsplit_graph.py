"""The choices that make trees: clades, how each may be split, and what each split leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.distributions.rows import Floats, Numbers, RowNumbers, find_sorted
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.clades import Bits


class Level(NamedTuple):
    """Groups whose clades have the same size, and their options."""

    groups: slice
    options: slice


@dataclass(frozen=True, eq=False)
class SubsplitGraph:
    """Every way to build a tree from its root by splitting clades, numbered once.

    A **group** is a clade that is to be split, with its sister where the split may depend on it; its **options** are
    the splits it may get. Choosing an option leads to the groups of its two parts. Options stand group after group,
    and groups in ascending order of the size of their clades, so that an option leads to earlier groups only and the
    root is the last group. A pair of a group with a sister and an option is what the literature calls a parent-child
    subsplit pair; the options of the root are the root splits.

    Attributes
    ----------
    taxa : tuple of str
        Names of the `n` taxa.
    rooted : bool
        Whether the trees are rooted.
    with_sisters : bool
        Whether a split may depend on the sister of the clade that it splits.
    clades : ndarray
        The clades as bitsets, ascending by size, shape `(clades, words)`, uint64.
    group_clade, group_sister : ndarray
        Number of the clade of each group and of its sister, -1 for none, shape `(groups,)`.
    starts : ndarray
        Where the options of each group start, and their number at the end, shape `(groups + 1,)`.
    parts : ndarray
        The clades that each option splits its clade into, the smaller number first, shape `(options, 2)`.

    References
    ----------
    Zhang, C., Matsen, F. A. (2018). Generalizing tree probability estimation via Bayesian networks. NeurIPS 31.

    Jun, S.-H., Nasif, H., Jennings-Shaffer, C., Rich, D. H., Kooperberg, A., Fourment, M., Zhang, C., Suchard, M. A.,
    Matsen, F. A. (2023). A topology-marginal composite likelihood via a generalized phylogenetic pruning algorithm.
    Algorithms for Molecular Biology 18.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.distributions import SubsplitBayesianNetwork
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> graph = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD")).graph
    >>> graph.num_options, graph.describe_clade(graph.clades[5])
    (37, '{A, C}')
    """

    taxa: tuple[str, ...]
    rooted: bool
    with_sisters: bool
    clades: Bits
    group_clade: Numbers
    group_sister: Numbers
    starts: Numbers
    parts: Numbers

    @classmethod
    def from_choices(
        cls, taxa: tuple[str, ...], rooted: bool, with_sisters: bool, sets: Bits, choices: Numbers
    ) -> SubsplitGraph:
        """Make the graph of choices that were met.

        Parameters
        ----------
        taxa : tuple of str
            Names of the taxa.
        rooted, with_sisters : bool
            As in the attributes.
        sets : ndarray
            The clades as bitsets, ascending by size, shape `(clades, words)`.
        choices : ndarray
            Clade, sister (-1 for none) and smaller part of each choice, any number of times, shape `(choices, 3)`.

        Returns
        -------
        SubsplitGraph
            The graph.
        """
        count = len(sets)
        clade, sister, first = choices.T
        group_keys, group = np.unique(clade * (count + 1) + sister + 1, return_inverse=True)
        option_keys = np.unique(group * count + first)
        group, first = option_keys // count, option_keys % count
        group_clade, group_sister = group_keys // (count + 1), group_keys % (count + 1) - 1
        # A split leaves what its first part does not hold.
        second = RowNumbers(sets).find(sets[group_clade[group]] & ~sets[first])
        starts = np.searchsorted(group, np.arange(len(group_keys) + 1))
        parts = np.stack([first, second], axis=1)
        return cls(taxa, rooted, with_sisters, sets, group_clade, group_sister, starts, parts)

    def __post_init__(self) -> None:
        if not (self._is_ordered() and self._leads_down()):
            raise TreeError(
                "The splits do not make whole trees: a part is no clade, or is never split itself. Remedy: make the "
                "graph from whole topologies."
            )

    def _is_ordered(self) -> bool:
        shapes = self.group_clade.shape == self.group_sister.shape == (len(self.starts) - 1,)
        ends = self.starts[0] == 0 and self.starts[-1] == len(self.parts)
        sizes = clades.size(self.clades)
        ascending = (np.diff(sizes) >= 0, np.diff(self.starts) > 0, np.diff(self._group_keys) > 0)
        return bool(shapes and ends and (self.parts >= 0).all() and all(one.all() for one in ascending))

    def _leads_down(self) -> bool:
        one, other = self.clades[self.parts[:, 0]], self.clades[self.parts[:, 1]]
        whole = ((one | other) == self.clades[self.group_clade[self.group_of]]) & ((one & other) == 0)
        tips = clades.size(self.clades[self.parts]) == 1
        return bool(whole.all() and (tips | (self.next_groups >= 0)).all())

    @property
    def of_rootings(self) -> bool:
        """Whether the graph makes rooted trees that stand for unrooted ones, whose roots are summed out."""
        return not self.rooted and bool(clades.contains(self.clades[-1], 0))

    @property
    def num_choices(self) -> int:
        """Number of options that make one tree."""
        return len(self.taxa) - (1 if self.rooted or self.of_rootings else 2)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.group_clade)

    @property
    def num_options(self) -> int:
        """Number of options in all groups, root splits included."""
        return len(self.parts)

    @property
    def missing(self) -> int:
        """Number that stands for an option that is not there, one past the last."""
        return self.num_options

    @property
    def no_choice(self) -> int:
        """Number that stands for a place where there is nothing to choose, two past the last."""
        return self.num_options + 1

    @cached_property
    def group_of(self) -> Numbers:
        """Group of each option, shape `(options,)`."""
        return np.repeat(np.arange(self.num_groups), np.diff(self.starts))

    @cached_property
    def next_groups(self) -> Numbers:
        """Groups of both parts of each option, -1 for a part of one taxon, shape `(options, 2)`."""
        sister = self.parts[:, ::-1] if self.with_sisters else np.full_like(self.parts, -1)
        return self.find_group(self.parts, sister)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The groups by size of their clades, smallest first."""
        sizes = clades.size(self.clades[self.group_clade])
        edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), self.num_groups]
        return tuple(
            Level(slice(first, last), slice(int(self.starts[first]), int(self.starts[last])))
            for first, last in zip(edges[:-1], edges[1:], strict=True)
        )

    @cached_property
    def _clade_numbers(self) -> RowNumbers:
        return RowNumbers(self.clades)

    @cached_property
    def _group_keys(self) -> Numbers:
        return self.group_clade * (len(self.clades) + 1) + self.group_sister + 1

    @cached_property
    def _option_keys(self) -> Numbers:
        return self.group_of * len(self.clades) + self.parts[:, 0]

    def find_clade(self, sets: Bits) -> Numbers:
        """Return the number of each clade `(*batch, words)`, -1 where it is not there: `(*batch,)`."""
        return self._clade_numbers.find(sets)

    def find_group(self, clade: Numbers, sister: Numbers) -> Numbers:
        """Return the number of the group of a clade and its sister, -1 where it is not there; shapes are equal."""
        return find_sorted(self._group_keys, np.where(clade < 0, -1, clade * (len(self.clades) + 1) + sister + 1))

    def find_option(self, clade: Numbers, sister: Numbers, first: Numbers) -> Numbers:
        """Return the number of an option, `missing` where it is not there.

        Parameters
        ----------
        clade, sister, first : ndarray
            Numbers of the clade that is split, of its sister (-1 for none) and of the smaller part, equal shapes.
        """
        group = self.find_group(clade, sister)
        found = find_sorted(
            self._option_keys, np.where((group < 0) | (first < 0), -1, group * len(self.clades) + first)
        )
        return np.where(found < 0, self.missing, found)

    def table(self, values: Floats, missing: float, no_choice: float = 0.0) -> Floats:
        """Return values of options, `(options,)`, with those of `missing` and `no_choice` behind."""
        return np.concatenate([values, [missing, no_choice]])

    def sum_groups(self, values: Floats) -> Floats:
        """Add up the values `(options,)` of the options of each group, shape `(groups,)`."""
        return np.add.reduceat(values, self.starts[:-1])

    def normalised(self, logits: Floats) -> Floats:
        """Return log probabilities that sum to one in each group: `(options,)` from logits of the same shape."""
        top = np.maximum.reduceat(logits, self.starts[:-1])[self.group_of]
        shifted = logits - top
        return shifted - np.log(self.sum_groups(np.exp(shifted)))[self.group_of]

    def shares(self, counts: Floats) -> Floats:
        """Return the log share of each option in the count of its group, `(options,)`; equal where there is none."""
        totals = self.sum_groups(counts)
        sizes = np.diff(self.starts)
        shares = np.where(totals > 0, 0.0, 1 / sizes)[self.group_of]
        np.divide(counts, totals[self.group_of], out=shares, where=(totals > 0)[self.group_of])
        with np.errstate(divide="ignore"):
            return np.log(shares)

    def describe_clade(self, one: Bits) -> str:
        """Write a set of taxa with their names, four at most."""
        held = clades.members(one)
        names = [self.taxa[taxon] for taxon in held[:4]]
        more = [f"... ({len(held)} taxa)"] if len(held) > 4 else []
        return "{" + ", ".join([*names, *more]) + "}"

    def down(self) -> Iterator[Level]:
        """Go through the levels from the root on."""
        return reversed(self.levels)
