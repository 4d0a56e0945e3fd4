"""Files of many trees: chains and lists of weighted trees, read at once, and written."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit._files import write_atomically
from bayeskit._progress import progress_bar
from bayeskit._torch import new_generator
from bayeskit.errors import ConversionWarning, SettingsError, TreeError
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.newick import ParsedTree, parse_newick, quote
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import check_lengths, check_same_taxa, check_taxa, describe_node, tip_name
from bayeskit.models.phylogenetics.trees.tree_texts import TreeText, read_tree_texts

#: Share of a chain that is left out unless the user says otherwise.
_BURN_IN = 0.25


class TreesRead(NamedTuple):
    """Trees of a file.

    Attributes
    ----------
    topologies : Topologies
        One for each description that differs as a text.
    rows : ndarray
        Which of them each tree has, shape `(trees,)`.
    weights : ndarray or None
        What the file gives, shape `(trees,)`.
    branch_lengths : Tensor or None
        Shape `(trees, edges)`, float64.
    num_burn_in : int
        How many trees before them were left out.
    """

    topologies: Topologies
    rows: np.ndarray
    weights: np.ndarray | None
    branch_lengths: Tensor | None
    num_burn_in: int


def read_runs(
    paths: Sequence[str | os.PathLike[str]],
    burn_in: float | None,
    rooted: bool | None,
    taxa: Sequence[str] | None,
    resolve: bool,
    seed: int | torch.Generator,
    incomplete: str,
    progress: bool,
) -> list[TreesRead]:
    """Read the trees of one file after another, the first one deciding taxa and kind; see `TreeSample.from_files`."""
    asked = rooted
    if isinstance(paths, (str, os.PathLike)):
        raise SettingsError(f"paths: {os.fspath(paths)!r} is one path. Remedy: give a list of paths, or use from_file.")
    generator = new_generator(seed, stream="multifurcations") if resolve else None
    runs: list[TreesRead] = []
    for path in paths:
        if runs:
            taxa, rooted = runs[0].topologies.taxa, runs[0].topologies.rooted
        reader = _Reader(taxa, rooted, generator, asked)
        runs.append(_read(path, burn_in, reader, incomplete, progress))
        if reader.converted:
            warnings.warn(
                f"{reader.converted}: this tree is rooted, but unrooted ones are read. In it, and in all like it, the "
                "two edges at the root were joined; their lengths, if any, add.",
                ConversionWarning,
                stacklevel=3,
            )
    return runs


def _read(
    path: str | os.PathLike[str], burn_in: float | None, reader: _Reader, incomplete: str, progress: bool
) -> TreesRead:
    texts = read_tree_texts(path, incomplete)
    weights = _weights(texts)
    num_burn_in = _num_dropped(texts, burn_in)
    texts = texts[num_burn_in:]
    with progress_bar("reading trees", len(texts), progress) as bar:
        for place, text in enumerate(texts):
            reader.add(text)
            bar.update(place + 1)
    return reader.result(weights, num_burn_in)


def write_topologies(path: str | os.PathLike[str], topologies: Topologies, weights: np.ndarray) -> None:
    """Write topologies with their weights, in their order."""
    newick = _numbered(topologies)
    totals = np.cumsum(weights)
    rows = zip(weights.tolist(), totals.tolist(), strict=True)
    trees = [
        (f"tree_{place + 1} [p = {weight:.3f}, P = {total:.3f}]", weight, newick(place))
        for place, (weight, total) in enumerate(rows)
    ]
    _write(path, topologies, trees)


def write_chain(
    path: str | os.PathLike[str],
    topologies: Topologies,
    index: np.ndarray,
    weights: np.ndarray,
    branch_lengths: Tensor | None,
) -> None:
    """Write sampled trees, each with its weight and branch lengths."""
    newick = _numbered(topologies)
    lengths = [None] * len(index) if branch_lengths is None else branch_lengths.tolist()
    rows = zip(index.tolist(), weights.tolist(), lengths, strict=True)
    trees = [(f"sample_{row + 1}", weight, newick(place, own)) for row, (place, weight, own) in enumerate(rows)]
    _write(path, topologies, trees)


def _numbered(topologies: Topologies) -> Callable[..., str]:
    numbers = tuple(str(number + 1) for number in range(topologies.num_taxa))
    return Topologies(numbers, topologies.children, topologies.rooted).to_newick


def _write(path: str | os.PathLike[str], topologies: Topologies, trees: Sequence[tuple[str, float, str]]) -> None:
    """Write trees given by their name, weight and description."""
    names = ",\n".join(f"    {number} {quote(taxon)}" for number, taxon in enumerate(topologies.taxa, start=1))
    mark = "[&R]" if topologies.rooted else "[&U]"
    lines = "".join(f"   tree {name} = [&W {weight!r}] {mark} {newick}\n" for name, weight, newick in trees)
    text = f"#NEXUS\n\nbegin trees;\n   translate\n{names};\n{lines}end;\n"
    write_atomically(os.fspath(path), text.encode())


def _weights(texts: Sequence[TreeText]) -> np.ndarray | None:
    given = [text.weight is not None for text in texts]
    if not any(given):
        return None
    if not all(given):
        bare, weighted = texts[given.index(False)], texts[given.index(True)]
        raise TreeError(
            f"{bare.source}, line {bare.line}: the tree has no weight, but that of line {weighted.line} has. Remedy: "
            "give every tree a weight such as '[&W 0.25]', or none."
        )
    weights = np.array([text.weight for text in texts])
    if not 0.0 < weights.sum() < np.inf:
        raise TreeError(f"{texts[0].source}: the weights add up to {weights.sum()}. Remedy: give positive weights.")
    return weights


def _num_dropped(texts: Sequence[TreeText], burn_in: float | None) -> int:
    source = texts[0].source
    weighted = texts[0].weight is not None
    if burn_in is None:
        # A list in Newick need not be a chain, and weighted trees are none.
        burn_in = 0 if weighted or texts[0].name is None else _BURN_IN
    whole = isinstance(burn_in, (int, np.integer)) and burn_in >= 0
    if isinstance(burn_in, (bool, np.bool_)) or not (isinstance(burn_in, Real) and (0 <= burn_in < 1 or whole)):
        raise SettingsError(
            f"burn_in={burn_in!r} is neither a fraction from 0 to below 1 nor a whole number of trees. Remedy: give "
            "one of these."
        )
    if weighted and burn_in:
        raise SettingsError(
            f"burn_in={burn_in}: {source} holds weighted trees, which do not stand in the order of a chain. Remedy: "
            "leave burn_in out."
        )
    dropped = int(burn_in * len(texts) + 1e-9) if burn_in < 1 else int(burn_in)
    if dropped >= len(texts):
        raise TreeError(
            f"{source}: the file holds {len(texts)} trees, and burn_in={burn_in} leaves none. Remedy: lower burn_in."
        )
    return dropped


class _Reader:
    """Turns one description after another into sets of taxa, the first one deciding taxa and kind."""

    def __init__(
        self, taxa: Sequence[str] | None, rooted: bool | None, generator: torch.Generator | None, asked: bool | None
    ) -> None:
        # Only who asks for rooted trees has those read as such that say they are unrooted.
        self._rooted, self._generator, self._trusts_marks = rooted, generator, not asked
        self._taxa: tuple[str, ...] = ()
        self._first = "the order asked for"
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
        self._all = (1 << len(taxa)) - 1
        self._bytes = 8 * clades.num_words(len(taxa))

    def add(self, text: TreeText) -> None:
        """Read a tree, or find that its text was read before."""
        key = (text.newick, id(text.translate), text.rooted)
        row = self._rows.get(key)
        if row is None:
            row, self._num_rows = self._num_rows, self._num_rows + 1
            # Each tree is resolved anew, even where two descriptions are equal.
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
            known = list(text.translate.values())
            self._set_taxa(known if sorted(known) == sorted(tips) else tips)
        self._check(text, parsed, names, tips, where)
        below, joined = self._below(parsed, names, where)
        edges: dict[int, float] = {}
        for part, length in [*zip(below[1:], parsed.lengths[1:], strict=True), *((part, 0.0) for part in joined)]:
            # Unrooted, an edge is known by its side without the first taxon: the two at a root become one.
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
                f"{where}: the tree has {'' if has_lengths else 'no '}branch lengths, unlike those before it. Remedy: "
                "give lengths for all trees, or for none."
            )
        forked = len(parsed.children[0]) == 2
        rooted = forked if text.rooted is None else text.rooted
        if self._rooted is None:
            self._rooted = rooted
        marked = self._trusts_marks and text.rooted is False
        if self._rooted and (marked or not (rooted or forked)):
            raise TreeError(
                f"{where}: the tree is unrooted, but rooted ones are read. Remedy: read all with rooted=False, or "
                "with rooted=True where the mark [&U] is wrong."
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
                # Three edges meet, one of them as good as from above.
                parts = parts[1:]
            if len(parts) > 2 and self._generator is not None:
                joined += _join_at_random(parts, self._generator)
            elif len(parts) != 2:
                remedy = "pass resolve=True, which resolves it at random" if len(parts) > 2 else "remove the node"
                raise TreeError(
                    f"{where}: the node above {describe_node(parsed.children, names, node)} joins {len(children)} "
                    f"subtrees; the tree is not binary. Remedy: {remedy}."
                )
        return below, joined

    def result(self, weights: np.ndarray | None, num_burn_in: int) -> TreesRead:
        """Return all that was added."""
        rooted = bool(self._rooted)
        sets = np.frombuffer(self._sets, dtype="<u8").astype(np.uint64)
        topologies, order = Topologies.from_edges(
            self._taxa, sets.reshape(self._num_rows, -1, self._bytes // 8), rooted
        )
        index = np.array(self._index)
        lengths = None
        if self._has_lengths:
            given = np.frombuffer(self._lengths).reshape(self._num_rows, -1)
            lengths = torch.from_numpy(np.take_along_axis(given, order, axis=1)[index])
        return TreesRead(topologies, index, weights, lengths, num_burn_in)


def _join_at_random(parts: Sequence[int], generator: torch.Generator) -> list[int]:
    """Join disjoint sets two at a time, every way equally likely; return all unions but the last."""
    nodes = [parts[0]]
    for part in parts[1:]:
        # Grafted onto the edge above any node so far.
        target = nodes[int(torch.randint(len(nodes), (), generator=generator))]
        nodes = [node | part if node & target == target and node != target else node for node in nodes]
        nodes += [target | part, part]
    return [node for node in nodes if node not in parts and node != sum(parts)]
