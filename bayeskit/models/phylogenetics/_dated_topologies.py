"""Rooted topologies with dated tips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._newick import parse_newick
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import Tree, check_taxa, describe_node, tip_name

_REMEDY = (
    "Remedy: give rooted Newick text such as '((A,B),(C,D));', or place the root on an unrooted tree with "
    "Topologies.from_trees([tree]).rooted_at('OUTGROUP')."
)

# Rooted topologies with dated tips.


@dataclass(frozen=True, eq=False, repr=False)
class DatedTopology:
    """One rooted binary topology of `n` taxa and the height of each tip.

    A height is the time before the youngest tip, which has height 0. Internal node `i` is that of row `i` of
    `topology.children[0]`: children come before their parents, and the root is the last. The order of the internal
    nodes in time is free, except that parents are above their children.

    Use `of` to make one.

    Attributes
    ----------
    topology : Topologies
        One rooted topology.
    tip_heights : Tensor
        Shape `(n,)`, float64, in the order of `topology.taxa`; the least is 0.
    youngest_date : float
        The date of height 0; 0.0 where only heights are known.

    Examples
    --------
    >>> dated = DatedTopology.of("((A,B),C);", dates={"A": 2009.5, "B": 2010.0, "C": 2007.0})
    >>> dated.tip_heights, dated.node_names
    (tensor([0.5000, 0.0000, 3.0000], dtype=torch.float64), ('A|B', 'A|B|C'))
    """

    topology: Topologies
    tip_heights: Tensor
    youngest_date: float = 0.0

    @classmethod
    def of(
        cls,
        tree: str | Topologies,
        *,
        dates: Mapping[str, float] | None = None,
        tip_heights: Mapping[str, float] | None = None,
    ) -> DatedTopology:
        """Join a rooted topology with the dates of its tips.

        Parameters
        ----------
        tree : str or Topologies
            Newick text whose root has two children (branch lengths are ignored), or one rooted topology.
        dates : mapping of str to float, optional
            Time of sampling of each taxon, which **grows towards the present**, such as 2009.5; see
            `dates_from_names` and `dates_from_file`.
        tip_heights : mapping of str to float, optional
            Time **before** the youngest tip of each taxon, at least 0. Without dates and heights, all are 0.

        Returns
        -------
        DatedTopology

        Raises
        ------
        TreeError
            If the tree is unrooted, not binary, or has fewer than three taxa.
        DataError
            If a date is missing, belongs to no taxon, or is not finite, or a height is negative.
        """
        topology = _rooted(tree)
        if dates is not None and tip_heights is not None:
            raise DataError("dates and tip_heights are both given. Remedy: give one of them.")
        if dates is not None:
            found = _values(dates, topology.taxa, "dates")
            return cls(topology, found.max() - found, float(found.max()))
        if tip_heights is None:
            return cls(topology, torch.zeros(topology.num_taxa, dtype=torch.float64))
        found = _values(tip_heights, topology.taxa, "tip_heights")
        if float(found.min()) != 0.0:
            raise DataError(
                f"tip_heights: the least is {float(found.min()):g}, not 0. Heights are times before the youngest tip. "
                "Remedy: subtract the least height from all, or give dates=, which grow towards the present."
            )
        return cls(topology, found)

    def __repr__(self) -> str:
        tips = f"heights of the tips 0 to {float(self.tip_heights.max()):g}" if self.is_dated else "tips of one date"
        return f"DatedTopology({self.num_taxa} taxa, {tips}: {self.topology.to_newick(0)})"

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return self.topology.num_taxa

    @cached_property
    def is_dated(self) -> bool:
        """Whether the tips have different heights."""
        return bool((self.tip_heights > 0).any())

    @cached_property
    def children(self) -> Tensor:
        """Both children of each internal node, shape `(n-1, 2)`; numbers below `n` are tips."""
        return torch.as_tensor(self.topology.children[0], dtype=torch.int64)

    @cached_property
    def parents(self) -> Tensor:
        """Parent of every node but the root as a row of `children`, shape `(2n-2,)`."""
        return torch.as_tensor(self.topology.parents[0], dtype=torch.int64) - self.num_taxa

    @cached_property
    def siblings(self) -> Tensor:
        """Sibling of every node but the root as a row of `children`, shape `(2n-2,)`."""
        return self.children.flip(-1).flatten()[self.children.flatten().argsort()]

    @cached_property
    def lower_bounds(self) -> Tensor:
        """Height of the oldest tip below each internal node, shape `(n-1,)`, float64."""
        heights = self.tip_heights.tolist()
        for one, other in self.children.tolist():
            heights.append(max(heights[one], heights[other]))
        return torch.tensor(heights[self.num_taxa :], dtype=torch.float64)

    @cached_property
    def num_internal_below(self) -> Tensor:
        """Number of internal nodes of the subtree of each internal node, itself included, shape `(n-1,)`, float64."""
        return torch.as_tensor(clades.size(self._sets) - 1, dtype=torch.float64)

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """Unique names of the internal nodes: the taxa below, abbreviated from five taxa on."""
        names: list[str] = []
        for one in self._sets:
            below = [self.topology.taxa[taxon] for taxon in clades.members(one)]
            short = f"{below[0]}|{below[1]}|...|{below[-1]} ({len(below)} taxa)"
            name = short if len(below) > 4 else "|".join(below)
            names.append(f"{name} [{len(names)}]" if name in names else name)
        return tuple(names)

    @cached_property
    def edge_names(self) -> tuple[str, ...]:
        """Names of the nodes below the edges, shape `(2n-2,)`: tips, then internal nodes without the root."""
        return (*self.topology.taxa, *self.node_names[:-1])

    def common_ancestor(self, taxa: Sequence[str]) -> int:
        """Return the index among the internal nodes of the most recent common ancestor of some taxa.

        Parameters
        ----------
        taxa : sequence of str
            At least two.

        Returns
        -------
        int
            `node_heights[..., index]` is the height of this ancestor.

        Raises
        ------
        TreeError
            If there are fewer than two taxa, or one is not in the tree.

        Examples
        --------
        >>> DatedTopology.of("(((A,B),C),D);").common_ancestor(["A", "C"])
        1
        """
        given = [taxa] if isinstance(taxa, str) else list(taxa)
        unknown = [taxon for taxon in given if taxon not in self.topology.taxa]
        if unknown or len(set(given)) < 2:
            problem = f"{unknown[0]!r} is not in the tree" if unknown else "an ancestor needs at least two taxa"
            raise TreeError(f"taxa: {problem}. Remedy: give two or more of {', '.join(self.topology.taxa[:5])}, ...")
        numbers = [self.topology.taxa.index(taxon) for taxon in given]
        # Nodes are ordered by size: the first that holds all is the smallest.
        held = np.all([clades.contains(self._sets, number) for number in numbers], axis=0)
        return int(held.argmax())

    @property
    def _sets(self) -> clades.Bits:
        return clades.below(self.topology.children, self.num_taxa)[0, self.num_taxa :]

    def all_heights(self, node_heights: Tensor) -> Tensor:
        """Append heights of internal nodes `(*batch, n-1)` to those of the tips: shape `(*batch, 2n-1)`."""
        tips = self.tip_heights.to(node_heights).expand(*node_heights.shape[:-1], self.num_taxa)
        return torch.cat([tips, node_heights], -1)

    def edge_times(self, node_heights: Tensor) -> Tensor:
        """Return the duration of each edge, `(*batch, n-1) -> (*batch, 2n-2)`, in the order of `edge_names`.

        Examples
        --------
        >>> DatedTopology.of("((A,B),C);").edge_times(torch.tensor([1.0, 3.0]))
        tensor([1., 1., 3., 2.])
        """
        return node_heights[..., self.parents] - self.all_heights(node_heights)[..., :-1]


def _rooted(tree: object) -> Topologies:
    """Return one rooted topology; TreeError for anything else."""
    if isinstance(tree, str):
        return _rooted_from_text(tree)
    if isinstance(tree, Tree):
        raise TreeError(f"tree: a Tree is unrooted, but heights need a root. {_REMEDY}")
    if not isinstance(tree, Topologies):
        raise TreeError(f"tree: {type(tree).__name__} is not a rooted topology. {_REMEDY}")
    if not tree.rooted:
        raise TreeError(f"tree: the topology is unrooted, but heights need a root. {_REMEDY}")
    if len(tree) != 1:
        raise TreeError(f"tree: {len(tree)} topologies are given. Remedy: choose one, such as topologies[0].")
    return tree


def _rooted_from_text(text: str) -> Topologies:
    if "(" not in text:
        raise TreeError(f"tree: {text!r:.60} is not Newick text. {_REMEDY} For a file, give Path(path).read_text().")
    where, parsed = "Newick text", parse_newick(text)
    names = [tip_name(parsed, node, where, {}) if not below else "" for node, below in enumerate(parsed.children)]
    tips = [node for node, below in enumerate(parsed.children) if not below]
    taxa = [names[node] for node in tips]
    check_taxa(taxa, where)
    if len(parsed.children[0]) == 3:
        raise TreeError(f"{where}: the outermost node joins three subtrees, so the tree is unrooted. {_REMEDY}")
    for node, below in enumerate(parsed.children):
        if below and len(below) != 2:
            raise TreeError(
                f"{where}: the node above {describe_node(parsed.children, names, node)} joins {len(below)} subtrees, "
                f"not 2; the tree is not binary. {_REMEDY}"
            )
    sets = np.zeros((len(names), clades.num_words(len(taxa))), dtype=np.uint64)
    sets[tips] = clades.single(len(taxa))
    for node in reversed(range(len(names))):  # nodes open before those below them
        for child in parsed.children[node]:
            sets[node] |= sets[child]
    internal = [node for node, below in enumerate(parsed.children) if below]
    return Topologies.from_clades(taxa, sets[None, internal], rooted=True)


def _values(given: object, taxa: Sequence[str], name: str) -> Tensor:
    """Return one finite number a taxon, `(n,)`, float64; DataError for anything else."""
    if not hasattr(given, "keys") or not hasattr(given, "__getitem__"):  # a pandas Series is no Mapping
        raise DataError(
            f"{name}: {type(given).__name__} is not a mapping. Remedy: give a dictionary of numbers by taxon, "
            "dates_from_names(alignment.taxa) or dates_from_file(path)."
        )
    values = {taxon: given[taxon] for taxon in given.keys()}  # noqa: SIM118  a Series iterates over its values
    missing, extra = [taxon for taxon in taxa if taxon not in values], sorted(map(str, set(values) - set(taxa)))
    if missing or extra:
        problem = f"there is none for {', '.join(map(repr, missing[:5]))}" if missing else ""
        problem += " and " if missing and extra else ""
        problem += f"{', '.join(map(repr, extra[:5]))} belongs to no taxon" if extra else ""
        raise DataError(f"{name}: {problem}. Remedy: give one number for each taxon of the tree, by its exact name.")
    for taxon in taxa:
        value = values[taxon]
        try:
            finite = not isinstance(value, (bool, str, bytes)) and math.isfinite(value)
        except TypeError:
            finite = False
        if not finite:
            raise DataError(
                f"{name}: {value!r} of the taxon {taxon!r} is not a finite number. Remedy: give a number such as "
                "2009.5; drop taxa of unknown date from alignment and tree."
            )
    return torch.tensor([float(values[taxon]) for taxon in taxa], dtype=torch.float64)
