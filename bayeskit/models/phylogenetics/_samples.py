"""Weighted samples of trees: readers and writers, ranking of topologies, distances and convergence of runs."""

from __future__ import annotations

import gzip
import math
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import ConversionWarning, SettingsError, ShapeError, TreeError
from bayeskit.extend import new_generator, progress_bar, warn_user
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._exports import write_chain, write_run, write_topologies
from bayeskit.models.phylogenetics._newick import ParsedTree, TreeText, every_name, parse_newick, read_tree_texts
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import (
    Tree,
    check_lengths,
    check_same_taxa,
    check_taxa,
    describe_node,
    edges_of_trees,
    stacked_lengths,
    tip_name,
)

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

# Weights of sampled trees.


def normalised_weights(weights: Sequence[float] | NDArray[Any] | Tensor | None, count: int) -> NDArray[np.float64]:
    """Return weights divided by their sum, or equal ones, `(count,)`, float64; SettingsError if they are invalid."""
    if isinstance(weights, Tensor):
        weights = weights.detach().cpu().numpy()
    values = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.shape != (count,) or not (values >= 0).all() or not 0 < values.sum() < np.inf:
        raise SettingsError(
            f"weights must be {count} non-negative numbers with a positive, finite sum; their shape is "
            f"{values.shape}. Remedy: give one non-negative weight for each tree."
        )
    return values / values.sum()


def _check_shares(weights: np.ndarray, index: np.ndarray, num_topologies: int) -> None:
    """Raise SettingsError unless weights `(samples,)` sum to one and `index` `(samples,)` numbers topologies."""
    if not (weights >= 0).all() or not abs(weights.sum() - 1) <= 1e-9:
        raise SettingsError(
            "sample_weights: a weight is negative, or the weights do not sum to one. Remedy: make samples with "
            "TreeSample.from_topologies, which normalises the weights."
        )
    if not np.issubdtype(index.dtype, np.integer) or ((index < 0) | (index >= num_topologies)).any():
        raise SettingsError(
            f"index: an entry is not an integer from 0 to {num_topologies - 1}. Remedy: give the index of the topology "
            "of each tree."
        )


# Branch lengths of sampled trees when roots are removed or added.


def _reordered(lengths: Tensor | None, edges: np.ndarray, index: np.ndarray) -> Tensor | None:
    """Bring lengths `(samples, edges)` into another order, given for each topology as `(topologies, edges)`."""
    return None if lengths is None else lengths.take_along_dim(torch.from_numpy(edges[index]), dim=1)


def _without_roots(
    topologies: Topologies, index: np.ndarray, lengths: Tensor | None
) -> tuple[Topologies, Tensor | None]:
    """Return unrooted topologies and lengths `(samples, edges - 1)`, where those of the two root edges add."""
    # `index` (samples,) is the topology of each sampled tree, and `lengths` are (samples, edges).
    unrooted, edges = topologies.unrooted()
    if lengths is not None:
        upper = topologies.upper_root_edge
        lower = topologies.children[:, -1].sum(axis=1) - upper
        samples, lengths = np.arange(len(index)), lengths.clone()
        lengths[samples, lower[index]] += lengths[samples, upper[index]]
    return unrooted, _reordered(lengths, edges, index)


def _with_outgroup(
    topologies: Topologies, taxon: str, index: np.ndarray, lengths: Tensor | None
) -> tuple[Topologies, Tensor | None]:
    """Return topologies rooted at the midpoint of a taxon's edge, and lengths `(samples, edges + 1)`."""
    # `index` (samples,) is the topology of each sampled tree, and `lengths` are (samples, edges).
    rooted = topologies.rooted_at(taxon)
    if lengths is None:
        return rooted, None
    # `edges` is the position in the rooted topology of each edge of the unrooted one.
    _, edges = rooted.unrooted()
    upper = rooted.upper_root_edge
    lower = rooted.children[:, -1].sum(axis=1) - upper
    samples = np.arange(len(index))
    placed = lengths.new_zeros(len(index), rooted.num_edges)
    placed.scatter_(1, torch.from_numpy(edges[index]), lengths)
    placed[samples, lower[index]] /= 2
    placed[samples, upper[index]] = placed[samples, lower[index]]
    return rooted, placed


# Ranking of topologies by their weights.


class RankedTopologies(ABC):
    """Base class of weighted distinct topologies, such as `TreeSample`.

    Attributes
    ----------
    topologies : Topologies
        The distinct topologies.
    """

    topologies: Topologies

    @property
    @abstractmethod
    def weights(self) -> NDArray[np.float64]:
        """Weight of each topology, shape `(topologies,)`, float64; the weights sum to one."""

    def top(self, count: int) -> NDArray[np.int64]:
        """Return the positions in `topologies` of the most probable ones, in descending order of weight.

        Parameters
        ----------
        count : int
            Maximum number of topologies.

        Returns
        -------
        ndarray
            Shape `(count,)`, int64; ties are in order of first appearance.

        Raises
        ------
        SettingsError
            If `count` is below one.
        """
        if count < 1:
            raise SettingsError(f"count={count} is below 1. Remedy: ask for at least one topology.")
        return np.argsort(-self.weights, kind="stable")[:count]

    def credible_set(self, level: float = 0.95) -> NDArray[np.int64]:
        """Return the smallest set of topologies with at least a given total probability.

        Parameters
        ----------
        level : float, default 0.95
            Above 0 and at most 1.

        Returns
        -------
        ndarray
            Positions in `topologies`, int64, in descending order of weight.

        Raises
        ------
        SettingsError
            If `level` is outside its domain.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 6, 3])
        >>> chosen = sample.credible_set(0.9)
        >>> chosen.tolist(), sample.weights[chosen].tolist(), len(sample.topologies[chosen])
        ([1, 2], [0.6, 0.3], 2)
        """
        if not 0 < level <= 1:
            raise SettingsError(f"level={level} is not a probability. Remedy: give a number above 0 and at most 1.")
        order = self.top(len(self.weights))
        # The sum of all weights is one only up to rounding.
        return order[: 1 + int(np.searchsorted(np.cumsum(self.weights[order]), level - 1e-12))]

    @property
    def most_probable(self) -> Topologies:
        """The topology with the largest weight, as `Topologies` of length one."""
        return self.topologies[self.top(1)]

    def to_pandas(self, most: int | None = None) -> pd.DataFrame:
        """Return a table with one row per topology, in descending order of weight.

        Parameters
        ----------
        most : int, optional
            Number of topologies, the most probable ones; by default all.

        Returns
        -------
        DataFrame
            Columns `topology` (position in `topologies`), `weight`, `cumulative` (cumulative weight) and `newick`
            (without branch lengths).

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABCD"), [1, 6, 3]).to_pandas().round(3)
           topology  weight  cumulative        newick
        0         1     0.6         0.6  (A,D,(B,C));
        1         2     0.3         0.9  (A,B,(C,D));
        2         0     0.1         1.0  (A,C,(B,D));
        """
        import pandas as pd

        order = self.top(len(self.weights) if most is None else most)
        weights = self.weights[order]
        newick = [self.topologies.to_newick(place) for place in order.tolist()]
        return pd.DataFrame({"topology": order, "weight": weights, "cumulative": weights.cumsum(), "newick": newick})


# Readers of files with many trees: chains and lists of weighted trees.

#: Default fraction of each run to discard as burn-in.
_BURN_IN = 0.25


class _TreesRead(NamedTuple):
    """The trees of a file."""

    topologies: Topologies  # one for each distinct description
    rows: np.ndarray  # topology of each tree, (trees,)
    weights: np.ndarray | None  # as the file gives them, (trees,)
    branch_lengths: Tensor | None  # (trees, edges), float64
    num_burn_in: int  # number of discarded trees


def _read_runs(
    paths: Sequence[str | os.PathLike[str]],
    burn_in: float | None,
    rooted: bool | None,
    taxa: Sequence[str] | None,
    resolve: bool,
    seed: int | torch.Generator,
    incomplete: str,
    progress: bool,
) -> list[_TreesRead]:
    """Read files of trees, with taxa and rooting as in the first file by default; see `TreeSample.from_files`."""
    asked = rooted
    if isinstance(paths, (str, os.PathLike)):
        raise SettingsError(f"paths: {os.fspath(paths)!r} is one path. Remedy: give a list of paths, or use from_file.")
    generator = new_generator(seed, stream="multifurcations") if resolve else None
    runs: list[_TreesRead] = []
    for path in paths:
        if runs:
            taxa, rooted = runs[0].topologies.taxa, runs[0].topologies.rooted
        reader = _Reader(taxa, rooted, generator, asked)
        runs.append(_read(path, burn_in, reader, incomplete, progress))
        if reader.converted:
            warn_user(
                f"{reader.converted}: this tree is rooted, but unrooted trees are read. The two edges at the root of "
                "each rooted tree were joined; their lengths, if any, were added.",
                ConversionWarning,
            )
    return runs


def _read(
    path: str | os.PathLike[str], burn_in: float | None, reader: _Reader, incomplete: str, progress: bool
) -> _TreesRead:
    texts = read_tree_texts(path, incomplete)
    weights = _weights(texts)
    kept = _without_burn_in(texts, burn_in)
    with progress_bar("reading trees", len(kept), progress) as bar:
        for place, text in enumerate(kept):
            reader.add(text)
            bar.update(place + 1)
    return reader.result(weights, len(texts) - len(kept))


def _weights(texts: Sequence[TreeText]) -> np.ndarray | None:
    """Return the weights of trees, `(trees,)`, None where there are none; one where only others have a weight."""
    bare = [text for text in texts if text.weight is None]
    if len(bare) == len(texts):
        return None
    if bare:
        warn_user(
            f"{bare[0].source}, line {bare[0].line}: {len(bare)} of {len(texts)} trees have no weight. Each of them "
            "was given the weight 1, as in PAUP.",
            ConversionWarning,
        )
    weights = np.array([1.0 if text.weight is None else text.weight for text in texts])
    if not 0.0 < weights.sum() < np.inf:
        raise TreeError(f"{texts[0].source}: the weights add up to {weights.sum()}. Remedy: give positive weights.")
    return weights


def _without_burn_in(texts: list[TreeText], burn_in: float | None) -> list[TreeText]:
    """Return the trees that remain of each run in a file; by default, only numbered generations have a burn-in."""
    source = texts[0].source
    weighted = any(text.weight is not None for text in texts)
    if burn_in is None:
        numbered = all(text.generation is not None for text in texts)
        burn_in = _BURN_IN if numbered and not weighted else 0
    whole = isinstance(burn_in, (int, np.integer)) and burn_in >= 0
    if isinstance(burn_in, (bool, np.bool_)) or not (isinstance(burn_in, Real) and (0 <= burn_in < 1 or whole)):
        raise SettingsError(
            f"burn_in={burn_in!r} is invalid. Remedy: give a fraction of at least 0 and below 1, or a whole number of "
            "trees."
        )
    if not burn_in:
        return texts
    if weighted:
        raise SettingsError(
            f"burn_in={burn_in}: {source} holds weighted trees, which are not in the order of a chain. Remedy: omit "
            "burn_in."
        )
    runs: dict[str, list[TreeText]] = {}
    for text in texts:
        runs.setdefault(text.run, []).append(text)
    kept: list[TreeText] = []
    for run in runs.values():
        _check_ascending(run)
        dropped = int(burn_in * len(run) + 1e-9) if burn_in < 1 else int(burn_in)
        if dropped >= len(run):
            raise TreeError(
                f"{source}: the file holds {len(run)} trees{' of one run' if len(runs) > 1 else ''}, and "
                f"burn_in={burn_in} leaves none. Remedy: lower burn_in."
            )
        kept += run[dropped:]
    return kept


def _check_ascending(run: Sequence[TreeText]) -> None:
    """Raise TreeError if a generation is not above the one before it."""
    numbered = [(text.generation, text) for text in run if text.generation is not None]
    for (one, _), (other, text) in pairwise(numbered):
        if other <= one:
            raise TreeError(
                f"{text.source}, line {text.line}: generation {other} follows generation {one}, so that the start of "
                "the file is no burn-in of all of it. Remedy: write each run to a file of its own, or pass burn_in=0."
            )


class _Reader:
    """Converts tree descriptions to sets of taxa, with taxa and rooting as in the first tree by default."""

    def __init__(
        self, taxa: Sequence[str] | None, rooted: bool | None, generator: torch.Generator | None, asked: bool | None
    ) -> None:
        # Trees marked as unrooted are read as rooted only on explicit request.
        self._rooted, self._generator, self._trusts_marks = rooted, generator, not asked
        self._taxa: tuple[str, ...] = ()
        self._first = "the requested order"
        if taxa is not None:
            self._set_taxa(taxa)
        self._rows: dict[tuple[str, int, bool | None], int] = {}
        self._index: list[int] = []
        self._num_rows = 0
        self._sets = bytearray()
        self._lengths = array("d")
        self._has_lengths: bool | None = None
        self.converted = ""

    def _set_taxa(self, taxa: Sequence[str]) -> None:
        check_taxa(list(taxa), self._first)
        self._taxa = tuple(taxa)
        self._bits = {taxon: 1 << position for position, taxon in enumerate(taxa)}
        self._forms = every_name(dict(zip(taxa, taxa, strict=True)))
        self._all = (1 << len(taxa)) - 1
        self._bytes = 8 * clades.num_words(len(taxa))

    def add(self, text: TreeText) -> None:
        """Read a tree, or reuse the result of an identical text."""
        key = (text.newick, id(text.translate), text.rooted)
        row = self._rows.get(key)
        if row is None:
            row, self._num_rows = self._num_rows, self._num_rows + 1
            # Each tree is resolved separately, even if two descriptions are equal.
            if not self._read(text):
                self._rows[key] = row
        self._index.append(row)

    def _read(self, text: TreeText) -> bool:
        """Keep the sets and lengths of one tree; tell whether anything was resolved at random."""
        where = f"{text.source}, line {text.line}"
        parsed = parse_newick(text.newick, text.source, text.line)
        names = [
            "" if below else tip_name(parsed, node, where, text.translate) for node, below in enumerate(parsed.children)
        ]
        tips = [name for name, below in zip(names, parsed.children, strict=True) if not below]
        if not self._taxa:
            self._first = where
            known = list(dict.fromkeys(text.translate.values()))
            self._set_taxa(known if sorted(known) == sorted(tips) else tips)
        if not self._bits.keys() >= set(tips):
            names = [self._forms.get(name, name) for name in names]
            tips = [self._forms.get(tip, tip) for tip in tips]
        self._check(text, parsed, names, tips, where)
        below, joined = self._below(parsed, names, where)
        edges: dict[int, float] = {}
        for part, length in [*zip(below[1:], parsed.lengths[1:], strict=True), *((part, 0.0) for part in joined)]:
            # An unrooted edge is identified by its side without the first taxon: both edges at a root have the same.
            side = self._all ^ part if not self._rooted and part & 1 else part
            edges[side] = edges.get(side, 0.0) + (length or 0.0)
        self._sets += b"".join(side.to_bytes(self._bytes, "little") for side in edges)
        self._lengths.extend(edges.values())
        return bool(joined)

    def _check(self, text: TreeText, parsed: ParsedTree, names: list[str], tips: list[str], where: str) -> None:
        if len(tips) != len(self._taxa) or set(tips) != self._bits.keys():
            check_taxa(tips, where)
            check_same_taxa(self._taxa, tips, self._first, where)
        has_lengths = check_lengths(parsed, names, where)
        if self._has_lengths is None:
            self._has_lengths = has_lengths
        if has_lengths != self._has_lengths:
            raise TreeError(
                f"{where}: the tree has {'' if has_lengths else 'no '}branch lengths, unlike the previous trees. "
                "Remedy: give lengths for all trees, or for none."
            )
        forked = len(parsed.children[0]) == 2
        rooted = forked if text.rooted is None else text.rooted
        if self._rooted is None:
            self._rooted = rooted
        marked = self._trusts_marks and text.rooted is False
        if self._rooted and (marked or not (rooted or forked)):
            raise TreeError(
                f"{where}: the tree is unrooted, but rooted trees are read. Remedy: read all trees with rooted=False, "
                "or with rooted=True if the mark [&U] is wrong."
            )
        if not self._rooted and rooted and forked:
            self.converted = self.converted or where

    def _below(self, parsed: ParsedTree, names: list[str], where: str) -> tuple[list[int], list[int]]:
        """Return the taxa below every node, and those below the nodes that resolve multifurcations."""
        below = [0] * len(names)
        joined: list[int] = []
        for node in reversed(range(len(names))):
            children = parsed.children[node]
            if not children:
                below[node] = self._bits[names[node]]
                continue
            parts = [below[child] for child in children]
            # The parts share no taxon.
            below[node] = sum(parts)
            if node == 0 and not self._rooted and len(parts) > 2:
                # Three edges meet at the root; any of them may serve as the upper one.
                parts = parts[1:]
            if len(parts) > 2 and self._generator is not None:
                joined += _join_at_random(parts, self._generator)
            elif len(parts) > 2:
                raise TreeError(
                    f"{where}: the node above {describe_node(parsed.children, names, node)} joins {len(children)} "
                    "subtrees; the tree is not binary. Remedy: pass resolve=True, which resolves the node at random."
                )
        return below, joined

    def result(self, weights: np.ndarray | None, num_burn_in: int) -> _TreesRead:
        """Return all that was added."""
        rooted = bool(self._rooted)
        sets = np.frombuffer(self._sets, dtype="<u8").astype(np.uint64, copy=False)
        topologies, order = Topologies.from_edges(
            self._taxa, sets.reshape(self._num_rows, -1, self._bytes // 8), rooted
        )
        index = np.array(self._index)
        lengths = None
        if self._has_lengths:
            given = np.frombuffer(self._lengths).reshape(self._num_rows, -1)
            lengths = torch.from_numpy(np.take_along_axis(given, order, axis=1)[index])
        return _TreesRead(topologies, index, weights, lengths, num_burn_in)


def _join_at_random(parts: Sequence[int], generator: torch.Generator) -> list[int]:
    """Join disjoint sets two at a time, every way equally likely; return all unions but the last."""
    nodes = [parts[0]]
    for part in parts[1:]:
        # Grafted onto the edge above a node chosen uniformly.
        target = nodes[int(torch.randint(len(nodes), (), generator=generator))]
        nodes = [node | part if node & target == target and node != target else node for node in nodes]
        nodes += [target | part, part]
    return [node for node in nodes if node not in parts and node != sum(parts)]


# Distances between trees, and between samples of trees.


@overload
def robinson_foulds(one: Tree, other: Tree) -> int: ...
@overload
def robinson_foulds(one: Topologies, other: Topologies | Tree | None = None) -> NDArray[np.int64]: ...
@overload
def robinson_foulds(one: Tree, other: Topologies) -> NDArray[np.int64]: ...


def robinson_foulds(one: Topologies | Tree, other: Topologies | Tree | None = None) -> NDArray[np.int64] | int:
    """Return the Robinson-Foulds distance, the number of splits in only one of two topologies, for all pairs.

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
        Shape `(len(one), len(other))`, int64; an int for two trees.

    Raises
    ------
    TreeError
        If only one argument is rooted, the taxa differ, or an argument has another type.

    References
    ----------
    D. F. Robinson and L. R. Foulds (1981), Comparison of phylogenetic trees, Mathematical Biosciences 53, 131-147.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
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
        raise TreeError("Only one of the two arguments is rooted. Remedy: unroot it with unrooted().")
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
            "the topologies of a sample, sample.topologies."
        )
    return given


@dataclass(frozen=True, eq=False, repr=False)
class SplitFrequencies:
    """Frequency of each split (or clade, if rooted) in each of several samples.

    Trivial splits, one taxon against all others, are left out.

    Attributes
    ----------
    taxa : tuple of str
        Names of the tips.
    rooted : bool
        Whether the splits are clades of rooted trees.
    splits : ndarray
        Bitset of each clade, or of the side of each split without the first taxon: shape `(splits, words)`, uint64,
        in descending order of mean frequency.
    frequencies : ndarray
        Shape `(samples, splits)`.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [6, 3, 1])
    >>> table = split_frequencies([sample])
    >>> table.names, table.frequencies.tolist()
    (('B|D', 'B|C', 'C|D'), [[0.6, 0.3, 0.1]])
    """

    taxa: tuple[str, ...]
    rooted: bool
    splits: clades.Bits
    frequencies: NDArray[np.float64]

    def __repr__(self) -> str:
        num_samples, num_splits = self.frequencies.shape
        kind = "clades" if self.rooted else "splits"
        return f"SplitFrequencies({num_splits} {kind} in {num_samples} samples, {len(self.taxa)} taxa)"

    @property
    def names(self) -> tuple[str, ...]:
        """Taxa of each clade, or of the side of each split without the first taxon, joined by `|`."""
        return tuple("|".join(self.taxa[taxon] for taxon in clades.members(side)) for side in self.splits)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per split: its name (see `names`), its size and its frequency in each sample."""
        import pandas as pd

        columns = {f"sample_{number}": values for number, values in enumerate(self.frequencies)}
        return pd.DataFrame({"split": self.names, "size": clades.size(self.splits), **columns})


def split_frequencies(samples: TreeSample | Sequence[TreeSample]) -> SplitFrequencies:
    """Return the frequencies of all splits in one or several samples.

    Parameters
    ----------
    samples : TreeSample or sequence of TreeSample
        All rooted or all unrooted, over the same taxa.

    Returns
    -------
    SplitFrequencies

    Raises
    ------
    TreeError
        If there is no sample, the taxa differ, or only some samples are rooted.
    """
    aligned = comparable(samples if isinstance(samples, Sequence) else [samples])
    inner = [_inner_edges(sample.topologies) for sample in aligned]
    splits, index = clades.identify(np.concatenate(inner))
    bounds = np.cumsum([0, *(len(edges) for edges in inner)])
    frequencies: NDArray[Any] = np.stack(
        [
            np.bincount(index[start:end].ravel(), sample.weights.repeat(index.shape[1]), minlength=len(splits))
            for sample, start, end in zip(aligned, bounds[:-1], bounds[1:], strict=True)
        ]
    )
    # Rounded, so that the order of tied splits does not depend on the order of the trees.
    order = np.argsort(-frequencies.mean(axis=0).round(12), kind="stable")
    return SplitFrequencies(aligned[0].taxa, aligned[0].rooted, splits[order], frequencies[:, order])


@dataclass(frozen=True, eq=False, repr=False)
class SplitDeviations:
    """Standard deviations of split frequencies among runs.

    Attributes
    ----------
    frequencies : SplitFrequencies
        Frequencies of the included splits in each run.
    standard_deviations : ndarray
        Standard deviation of each split among runs, with divisor `runs - 1`: shape `(splits,)`.
    """

    frequencies: SplitFrequencies
    standard_deviations: NDArray[np.float64]

    def __repr__(self) -> str:
        num_runs, num_splits = self.frequencies.frequencies.shape
        if not num_splits:
            return f"SplitDeviations(no split is frequent enough in any of {num_runs} runs)"
        values = f"ASDSF {self.average:.4f}, maximum {self.maximum:.4f}"
        return f"SplitDeviations({values}, {num_splits} splits in {num_runs} runs)"

    @property
    def average(self) -> float:
        """Average standard deviation of split frequencies (ASDSF); NaN without splits."""
        return float(self.standard_deviations.mean()) if len(self.standard_deviations) else math.nan

    @property
    def maximum(self) -> float:
        """Largest standard deviation of a split frequency; NaN without splits."""
        return float(self.standard_deviations.max()) if len(self.standard_deviations) else math.nan

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per split: its taxa, its frequencies and their standard deviation."""
        return self.frequencies.to_pandas().assign(standard_deviation=self.standard_deviations)


def asdsf(samples: Sequence[TreeSample], minimum_frequency: float = 0.1) -> SplitDeviations:
    """Compute the average standard deviation of split frequencies (ASDSF) among independent runs.

    It includes splits with at least the minimum frequency in at least one run. For runs of the same posterior it
    converges to zero; a value below 0.01 is the usual criterion of convergence.

    Parameters
    ----------
    samples : sequence of TreeSample
        Two runs or more, without burn-in.
    minimum_frequency : float, default 0.1
        From 0 to 1.

    Returns
    -------
    SplitDeviations
        `.average` is the ASDSF, `.maximum` the largest standard deviation. Without signal no split may be that
        frequent: then there are no splits, and both are NaN.

    Raises
    ------
    SettingsError
        If there are fewer than two samples or four taxa, the samples are not in a list, or the minimum frequency is
        outside its domain.
    TreeError
        If an element is no TreeSample, the taxa differ, or only some samples are rooted.

    References
    ----------
    C. Lakner, P. van der Mark, J. P. Huelsenbeck, B. Larget and F. Ronquist (2008), Efficiency of Markov chain Monte
    Carlo tree proposals in Bayesian phylogenetics, Systematic Biology 57, 86-103.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> runs = [TreeSample.from_topologies(all_topologies("ABCD"), weights) for weights in ([4, 6, 0], [6, 4, 0])]
    >>> round(asdsf(runs).average, 6), round(asdsf(runs).maximum, 6)
    (0.141421, 0.141421)
    """
    if not isinstance(samples, Sequence) or not isinstance(minimum_frequency, Real):
        raise SettingsError(
            "samples must be a list, and minimum_frequency a number. Remedy: compare two runs with asdsf([one, other])."
        )
    if len(samples) < 2:
        raise SettingsError(f"samples: {len(samples)} given. Remedy: give at least two runs.")
    if not 0 <= minimum_frequency <= 1:
        raise SettingsError(
            f"minimum_frequency={minimum_frequency} is not a frequency. Remedy: give a number from 0 to 1."
        )
    table = split_frequencies(samples)
    if not len(table.splits):
        raise SettingsError(
            f"samples: trees of {len(table.taxa)} taxa have no splits. Remedy: compare trees of at least four taxa."
        )
    # A frequency is a sum of weights, subject to rounding.
    counted = (table.frequencies >= minimum_frequency - 1e-12).any(axis=0)
    chosen = SplitFrequencies(table.taxa, table.rooted, table.splits[counted], table.frequencies[:, counted])
    return SplitDeviations(chosen, chosen.frequencies.std(axis=0, ddof=1))


def comparable(samples: Sequence[TreeSample]) -> list[TreeSample]:
    """Return samples with the same order of taxa; TreeError if there is no sample, or taxa or rooting differ."""
    if not samples:
        raise TreeError("There is no sample of trees. Remedy: give at least one sample.")
    first = check_sample(samples[0])
    for place, sample in enumerate(samples, start=1):
        check_same_taxa(first.taxa, check_sample(sample).taxa, "sample 1", f"sample {place}")
        if sample.rooted != first.rooted:
            raise TreeError(f"Only one of sample 1 and sample {place} is rooted. Remedy: unroot it with unrooted().")
    return [sample if sample.taxa == first.taxa else sample.with_taxa(first.taxa) for sample in samples]


def check_sample(sample: TreeSample) -> TreeSample:
    """Return a sample of trees, and raise TreeError for anything else."""
    if not (isinstance(getattr(sample, "topologies", None), Topologies) and hasattr(sample, "sample_weights")):
        raise TreeError(
            f"{type(sample).__name__} is not a sample of trees. Remedy: read a file with TreeSample.from_file(path), "
            "or make a sample with TreeSample.from_trees or TreeSample.from_topologies."
        )
    return sample


def _inner_edges(topologies: Topologies) -> clades.Bits:
    """Return the nontrivial splits, or the clades if rooted, `(topologies, splits, words)`."""
    return topologies.below[:, topologies.num_taxa :]


def _incidence(index: np.ndarray, among: np.ndarray) -> csr_array:
    """Return the sparse incidence matrix of topologies and splits, `(topologies, splits)`."""
    from scipy.sparse import csr_array

    ends = np.arange(len(index) + 1) * index.shape[1]
    shape = (len(index), int(among.max(initial=-1)) + 1)
    return csr_array((np.ones(index.size, dtype=np.int64), index.ravel(), ends), shape=shape)


# Samples of trees: weighted topologies, with optional branch lengths of each sampled tree.


@dataclass(frozen=True, eq=False, repr=False)
class TreeSample(RankedTopologies):
    """Weighted trees over the same taxa, such as posterior draws.

    Use `from_file`, `from_files`, `from_trees` or `from_topologies` to make a sample.

    Attributes
    ----------
    topologies : Topologies
        The distinct topologies, in order of first appearance.
    index : ndarray
        Position in `topologies` of each sampled tree, shape `(samples,)`.
    sample_weights : ndarray
        Weight of each sampled tree, shape `(samples,)`, float64; the weights sum to one.
    branch_lengths : Tensor or None
        Branch lengths of each sampled tree in the edge order of `Topologies`, shape `(samples, edges)`, float64. A
        `Tree` has another edge order: use `sampled_tree(i).branch_lengths` there.
    num_burn_in : int
        Number of trees discarded as burn-in when files were read.

    Raises
    ------
    ShapeError, SettingsError
        If shapes are inconsistent, weights are negative or do not sum to one, or an index is out of range.

    Examples
    --------
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,C),B,D);", "((C,D),A,B);")]
    >>> sample = TreeSample.from_trees(trees)
    >>> sample
    TreeSample(3 trees, 2 unrooted topologies, 4 taxa)
    >>> sample.weights.round(3).tolist(), sample.index.tolist()
    ([0.667, 0.333], [0, 1, 0])
    """

    topologies: Topologies
    index: NDArray[np.int64]
    sample_weights: NDArray[np.float64]
    branch_lengths: Tensor | None = None
    num_burn_in: int = 0

    def __post_init__(self) -> None:
        count = len(self.index)
        shape = None if self.branch_lengths is None else tuple(self.branch_lengths.shape)
        if self.sample_weights.shape != (count,) or shape not in (None, (count, self.topologies.num_edges)):
            raise ShapeError(
                f"{count} trees do not fit weights of shape {self.sample_weights.shape} and branch lengths of shape "
                f"{shape}. Remedy: make samples with TreeSample.from_topologies."
            )
        _check_shares(self.sample_weights, self.index, len(self.topologies))

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        burn_in: float | None = None,
        rooted: bool | None = None,
        *,
        taxa: Sequence[str] | None = None,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
        incomplete: str = "error",
        progress: bool = True,
    ) -> TreeSample:
        """Read the trees of a file of Newick, NEXUS, PHYLIP, PAML or RevBayes, plain or compressed by gzip.

        Supported are `.t` and `.trprobs` files of MrBayes, `.trees` files of BEAST, logs of RevBayes with one column of
        trees, tree files of PHYLIP and PAML, whose first line has the number of trees (text behind these trees is not
        read), and Newick lists with or without a weight before each tree. Annotations of nodes are ignored, and so are
        the marks of branches in PAML's files. A node with one child is joined to this child.

        Parameters
        ----------
        path : str or os.PathLike
            Weights are read from `[&W ...]`, `[p = ...]` or a number before the tree; otherwise they are equal. Where
            only some trees have a weight, that of the others is one.
        burn_in : float, optional
            Trees to discard at the start: a fraction below 1, or a whole number of trees (0.25 is 25 %, 25 are 25
            trees). By default 0.25 if all trees are numbered by ascending generations (names such as `gen.1000` or
            `STATE_1000`, the first columns of a log) and have no weights, and else none. It is left out of each run of
            a log with a column `Replicate_ID`. `num_burn_in` is the number discarded.
        rooted : bool, optional
            Whether to read rooted or unrooted topologies; roots are removed for unrooted ones. By default as the first
            tree: its mark `[&R]` or `[&U]`, otherwise rooted if its outermost parenthesis has two children. With True,
            a tree with such a parenthesis is read as rooted even if it is marked `[&U]`.
        taxa : sequence of str, optional
            Order of the taxa, such as `alignment.taxa`; by default that of the file's table of names, or of the first
            tree. A blank and an underscore in a name are the same, as in NEXUS; the names are those given here.
        resolve : bool, default False
            Resolve polytomies at random with edges of length zero, all resolutions equally likely, independently for
            each tree; if False, a polytomy is an error.
        seed : int or torch.Generator, default 0
            Used by `resolve`.
        incomplete : {"error", "warn"}, default "error"
            For a file that is truncated, such as that of a running chain: raise, or read the complete trees.
        progress : bool, default True
            Whether a long file shows a progress bar.

        Returns
        -------
        TreeSample
            With branch lengths if the file has them.

        Raises
        ------
        TreeError
            If the file is unreadable, truncated, or has no tree after burn-in; if a tree is malformed, not binary, or
            unrooted among rooted trees; if taxa differ between trees; if only some trees have branch lengths; if a
            weight is negative; if generations do not ascend and there is a burn-in; if several columns of a log hold
            trees. The message gives file and line.
        SettingsError
            If `burn_in` or `incomplete` is outside its domain, or `burn_in` is given for weighted trees.

        Warns
        -----
        ConversionWarning
            Once per file, if roots were removed, if nodes have one child, if only some trees have weights, if trees
            follow those that a first line of counts announces, or if the file is truncated and `incomplete` is "warn".

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "list.txt"
        >>> _ = path.write_text("0.6 ((A,B),C,D);  0.4 ((A,C),B,D);")
        >>> TreeSample.from_file(path).weights.tolist()
        [0.6, 0.4]
        """
        return cls._collected(*_read_runs([path], burn_in, rooted, taxa, resolve, seed, incomplete, progress)[0])

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        burn_in: float | None = None,
        rooted: bool | None = None,
        *,
        taxa: Sequence[str] | None = None,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
        incomplete: str = "error",
        progress: bool = True,
    ) -> TreeSample:
        """Read several runs and pool them with equal weight per run.

        Parameters
        ----------
        paths : sequence of str or os.PathLike
            One file per run.
        burn_in, rooted, taxa, resolve, seed, incomplete, progress
            As in `from_file`; `taxa` and `rooted` are by default those of the first file.

        Raises
        ------
        TreeError, SettingsError
            As in `from_file`, or if there is no file.

        Warns
        -----
        ConversionWarning
            As in `from_file`.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "1").write_text("((A,B),C,D);"), (folder / "2").write_text("((A,B),C,D); ((A,C),B,D);")
        >>> TreeSample.from_files([folder / "1", folder / "2"]).weights.tolist()
        [0.75, 0.25]
        """
        runs = _read_runs(paths, burn_in, rooted, taxa, resolve, seed, incomplete, progress)
        return cls.pooled([cls._collected(*run) for run in runs])

    @classmethod
    def pooled(cls, samples: Sequence[TreeSample]) -> TreeSample:
        """Pool several samples with equal weight per sample, in the taxon order of the first.

        Parameters
        ----------
        samples : sequence of TreeSample
            All rooted or all unrooted, over the same taxa. Branch lengths are kept if all samples have them.

        Raises
        ------
        TreeError
            If there is no sample, the taxa differ, or only some samples are rooted.
        """
        first, *_ = samples = comparable(samples)
        starts = np.cumsum([0, *(len(sample.topologies) for sample in samples[:-1])])
        children = np.concatenate([sample.topologies.children for sample in samples])
        lengths = [sample.branch_lengths for sample in samples if sample.branch_lengths is not None]
        return cls._collected(
            Topologies(first.taxa, children, first.rooted),
            np.concatenate([sample.index + start for sample, start in zip(samples, starts, strict=True)]),
            np.concatenate([sample.sample_weights for sample in samples]),
            torch.cat(lengths) if len(lengths) == len(samples) else None,
            sum(sample.num_burn_in for sample in samples),
        )

    @classmethod
    def from_trees(
        cls,
        trees: Sequence[Tree],
        weights: Sequence[float] | NDArray[Any] | None = None,
        taxa: Sequence[str] | None = None,
    ) -> TreeSample:
        """Make a sample of unrooted trees.

        Parameters
        ----------
        trees : sequence of Tree
            All over the same taxa, in any order; all with branch lengths or all without.
        weights : sequence of float, optional
            Nonnegative, normalised to sum to one; equal by default.
        taxa : sequence of str, optional
            Order of the taxa; by default that of the first tree.

        Raises
        ------
        TreeError
            If there is no tree, an element is not a `Tree`, taxa differ, or only some trees have branch lengths.
        SettingsError
            If the number of weights differs from that of trees, a weight is negative, or their sum is zero or infinite.
        """
        topologies, edges = Topologies.from_edges(*edges_of_trees(trees, taxa), rooted=False)
        lengths, index = stacked_lengths(trees), np.arange(len(trees))
        lengths = None if lengths is None else lengths.detach().to("cpu", torch.float64)
        return cls._collected(topologies, index, weights, _reordered(lengths, edges, index))

    @classmethod
    def from_topologies(
        cls,
        topologies: Topologies,
        weights: Sequence[float] | NDArray[Any] | Tensor | None = None,
        branch_lengths: Tensor | None = None,
    ) -> TreeSample:
        """Make a sample of topologies.

        Parameters
        ----------
        topologies : Topologies
            One for each sampled tree, with repetition.
        weights : sequence of float, optional
            Nonnegative, normalised to sum to one; equal by default.
        branch_lengths : Tensor, optional
            Shape `(topologies, edges)`.

        Raises
        ------
        TreeError
            If there is no topology, or `topologies` has another type.
        SettingsError
            If the number of weights differs from that of topologies, a weight is negative, or their sum is zero or
            infinite.
        ShapeError
            If the branch lengths have another shape.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABCD"), [2, 1, 1]).weights.tolist()
        [0.5, 0.25, 0.25]
        """
        if not (isinstance(topologies, Topologies) and len(topologies)):
            kind = type(topologies).__name__
            raise TreeError(f"There is no topology in this {kind}. Remedy: give Topologies; for trees, use from_trees.")
        lengths = None if branch_lengths is None else branch_lengths.detach().to("cpu", torch.float64)
        return cls._collected(topologies, np.arange(len(topologies)), weights, lengths)

    @classmethod
    def _collected(
        cls,
        topologies: Topologies,
        index: NDArray[np.int64],
        weights: Sequence[float] | NDArray[Any] | Tensor | None,
        lengths: Tensor | None,
        num_burn_in: int = 0,
    ) -> TreeSample:
        distinct, which = topologies.distinct()
        return cls(distinct, which[index], normalised_weights(weights, len(index)), lengths, num_burn_in)

    def __repr__(self) -> str:
        kind = "rooted" if self.rooted else "unrooted"
        topologies = f"{len(self.topologies)} {kind} topologies"
        left_out = f", {self.num_burn_in} left out as burn-in" if self.num_burn_in else ""
        return f"TreeSample({self.num_samples} trees, {topologies}, {self.num_taxa} taxa{left_out})"

    def __len__(self) -> int:
        return self.num_samples

    @property
    def taxa(self) -> tuple[str, ...]:
        """Names of the tips."""
        return self.topologies.taxa

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return self.topologies.num_taxa

    @property
    def rooted(self) -> bool:
        """Whether the topologies are rooted."""
        return self.topologies.rooted

    @property
    def num_samples(self) -> int:
        """Number of sampled trees, with repetition and including those of weight zero."""
        return len(self.index)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Weight of each distinct topology, shape `(topologies,)`, float64; the weights sum to one."""
        totals: NDArray[Any] = np.bincount(self.index, self.sample_weights, minlength=len(self.topologies))
        return totals

    @cached_property
    def trees(self) -> list[Tree]:
        """The distinct topologies as unrooted trees without branch lengths, in the order of `weights`."""
        return [self.topologies.tree(place) for place in range(len(self.topologies))]

    def sampled_tree(self, sample: int) -> Tree:
        """Return one sampled tree, with its branch lengths if any.

        Raises
        ------
        TreeError
            If the trees are rooted.
        SettingsError
            If the index is out of range.
        """
        if not (isinstance(sample, (int, np.integer)) and -self.num_samples <= sample < self.num_samples):
            last = self.num_samples - 1
            raise SettingsError(f"sample={sample!r}: there is no such tree. Remedy: give a number from 0 to {last}.")
        lengths = None if self.branch_lengths is None else self.branch_lengths[sample]
        return self.topologies.tree(int(self.index[sample]), lengths)

    def unrooted(self) -> TreeSample:
        """Remove the roots, if any; the lengths of the two edges at each root add up.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABC", rooted=True)).unrooted()
        TreeSample(3 trees, 1 unrooted topologies, 3 taxa)
        """
        if not self.rooted:
            return self
        topologies, lengths = _without_roots(self.topologies, self.index, self.branch_lengths)
        return TreeSample._collected(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def rooted_at(self, taxon: str) -> TreeSample:
        """Root all trees at the midpoint of an outgroup's edge; inverse of `unrooted`.

        Parameters
        ----------
        taxon : str
            The outgroup.

        Raises
        ------
        TreeError
            If the taxon is unknown, or the trees are rooted.

        Examples
        --------
        >>> rooted = TreeSample.from_trees([Tree.from_newick("((A:1,B:2):3,C:4,D:5);")]).rooted_at("C")
        >>> rooted.topologies.to_newick(0, rooted.branch_lengths[0])
        '(C:2.0,(D:5.0,(A:1.0,B:2.0):3.0):2.0);'
        """
        topologies, lengths = _with_outgroup(self.topologies, taxon, self.index, self.branch_lengths)
        return TreeSample(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def with_taxa(self, taxa: Sequence[str]) -> TreeSample:
        """Return the sample with another order of its taxa.

        Raises
        ------
        TreeError
            If the names differ.
        """
        topologies, edges = self.topologies.with_taxa(taxa)
        lengths = _reordered(self.branch_lengths, edges, self.index)
        return TreeSample(topologies, self.index, self.sample_weights, lengths, self.num_burn_in)

    def to_file(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        interval: int = 1,
    ) -> None:
        """Write the sample as NEXUS, with weights or in the form of another program; `from_file` reads it back.

        Parameters
        ----------
        path : str or os.PathLike
            Without `format`, the suffix `.trprobs` writes the distinct topologies in descending order of weight; `.t`
            or `.trees` writes every sampled tree with its branch lengths. Both include weights.
        format : {"mrbayes", "beast"}, optional
            Write a chain without weights, and a table of parameters beside it: for MrBayes `NAME.t`, with trees
            `gen.0`, `gen.1`, ..., and `NAME.p`; for BEAST `NAME.trees`, with trees `STATE_0`, `STATE_1`, ..., and
            `NAME.log`. Read it back with `from_file(path, burn_in=0)`.
        parameters : mapping of str to array_like, optional
            Columns of the table, such as `{"LnL": ..., "kappa": ...}` or a `DataFrame`: shape `(samples, *shape)`, one
            row for each sampled tree. The tree length, the sum of the branch lengths, is the first column.
        interval : int, default 1
            Number of generations from one tree to the next.

        Raises
        ------
        SettingsError
            If the suffix does not fit, `parameters` come without a `format`, or a `format` meets different weights.
        TreeError
            If the trees have no branch lengths, which MrBayes needs, or no root, which BEAST needs.
        ShapeError
            If a parameter has another number of rows.
        OutputError
            If a file cannot be written.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run1.t"
        >>> sample = TreeSample.from_trees([Tree.from_newick("((A:1,B:2):3,C:4,D:5);")] * 2)
        >>> sample.to_file(path, "mrbayes", parameters={"LnL": [-7.5, -7.25]}, interval=100)
        >>> path.read_text().splitlines()[-2]
        '   tree gen.100 = [&U] (1:1.0,2:2.0,(3:4.0,4:5.0):3.0);'
        >>> path.with_suffix(".p").read_text().splitlines()[2].split()
        ['0', '15.0', '-7.5']
        """
        suffix = Path(path).suffix.lower()
        if format is not None:
            chain = self.topologies, self.index, self.sample_weights, self.branch_lengths
            write_run(path, format, *chain, parameters, interval)
        elif parameters is not None:
            raise SettingsError("parameters: a file of weights has no table. Remedy: give format='mrbayes' or 'beast'.")
        elif suffix == ".trprobs":
            order = self.top(len(self.weights))
            write_topologies(path, self.topologies[order], self.weights[order])
        elif suffix in (".t", ".trees"):
            write_chain(path, self.topologies, self.index, self.sample_weights, self.branch_lengths)
        else:
            raise SettingsError(f"{os.fspath(path)}: unknown suffix. Remedy: use '.trprobs', '.trees' or '.t'.")


# Tree samples that come with the package.


class TetrapodRuns(NamedTuple):
    """Trees of 27 tetrapods sampled by Markov chains.

    Attributes
    ----------
    short_run : TreeSample
        Trees of one short run.
    long_runs : TreeSample
        Trees of ten long runs, pooled with equal weight per run.
    """

    short_run: TreeSample
    long_runs: TreeSample


def tetrapods() -> TetrapodRuns:
    """Load tree samples of 27 tetrapods, the benchmark data set DS1.

    The trees were sampled by MrBayes from the posterior given ribosomal RNA under the Jukes-Cantor model, with a
    uniform prior over topologies and exponential branch lengths of rate 10. Weights are frequencies after burn-in,
    rounded to one in a million in each run.

    Returns
    -------
    TetrapodRuns
        Unrooted, without branch lengths.

    References
    ----------
    S. B. Hedges, K. D. Moberg and L. R. Maxson (1990), Tetrapod phylogeny inferred from 18S and 28S ribosomal RNA
    sequences and a review of the evidence for amniote relationships, Molecular Biology and Evolution 7, 607-633.

    Examples
    --------
    >>> short_run, long_runs = tetrapods()
    >>> long_runs
    TreeSample(2784 trees, 2784 unrooted topologies, 27 taxa)
    >>> short_run.weights[:2].round(3).tolist()
    [0.277, 0.198]
    """
    packed = (resources.files(__package__) / "data" / "tetrapods.txt.gz").read_bytes()
    taxa, *rows = gzip.decompress(packed).decode("ascii").splitlines()
    names = {str(number): taxon for number, taxon in enumerate(taxa.split(), start=1)}
    counts = np.array([row.split()[:2] for row in rows], dtype=np.float64)
    trees = Topologies.from_trees([Tree.from_newick(row.split()[2], translate=names) for row in rows], taxa.split())
    runs = [TreeSample.from_topologies(trees[np.flatnonzero(run)], run[run > 0] / run.sum()) for run in counts.T]
    return TetrapodRuns(*runs)
