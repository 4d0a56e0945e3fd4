"""Writers of NEXUS files of trees, with weights or in the forms of MrBayes and BEAST, and of tables of parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.extend import unknown_name, whole_number, write_atomically
from bayeskit.models.phylogenetics._newick import quote
from bayeskit.models.phylogenetics._topologies import Topologies

# Weighted trees, as PAUP and MrBayes write them.


def write_topologies(path: str | os.PathLike[str], topologies: Topologies, weights: np.ndarray) -> None:
    """Write topologies with their weights `(topologies,)`, in their order."""
    newick, totals = _numbered(topologies), np.cumsum(weights)
    rows = zip(weights.tolist(), totals.tolist(), strict=True)
    trees = (
        (f"tree_{place + 1} [p = {weight:.3f}, P = {total:.3f}]", f"[&W {weight!r}] ", newick(place))
        for place, (weight, total) in enumerate(rows)
    )
    write_nexus(path, topologies.taxa, topologies.rooted, trees)


def write_chain(
    path: str | os.PathLike[str],
    topologies: Topologies,
    index: np.ndarray,
    weights: np.ndarray,
    branch_lengths: Tensor | None,
) -> None:
    """Write sampled trees `(samples,)`, each with its weight and branch lengths."""
    rows = zip(weights.tolist(), _newicks(topologies, index, branch_lengths), strict=True)
    trees = ((f"sample_{row + 1}", f"[&W {weight!r}] ", newick) for row, (weight, newick) in enumerate(rows))
    write_nexus(path, topologies.taxa, topologies.rooted, trees)


def _numbered(topologies: Topologies) -> Callable[..., str]:
    numbers = tuple(str(number + 1) for number in range(topologies.num_taxa))
    return Topologies(numbers, topologies.children, topologies.rooted).to_newick


def _newicks(topologies: Topologies, index: np.ndarray, branch_lengths: Tensor | None) -> Iterable[str]:
    """Yield the sampled trees with numbers for names."""
    newick = _numbered(topologies)
    lengths = [None] * len(index) if branch_lengths is None else branch_lengths.tolist()
    return (newick(place, own) for place, own in zip(index.tolist(), lengths, strict=True))


def write_nexus(
    path: str | os.PathLike[str],
    taxa: Sequence[str],
    rooted: bool,
    trees: Iterable[tuple[str, str, str]],
    head: str = "",
) -> None:
    """Write trees given by their name, comments and description, in which taxa are numbers from 1."""
    names = ",\n".join(f"    {number} {quote(taxon)}" for number, taxon in enumerate(taxa, start=1))
    mark = "[&R]" if rooted else "[&U]"
    lines = "".join(f"   tree {name} = {comments}{mark} {newick}\n" for name, comments, newick in trees)
    text = f"#NEXUS\n{head}\nbegin trees;\n   translate\n{names};\n{lines}end;\n"
    write_atomically(os.fspath(path), text.encode())


def taxa_block(taxa: Sequence[str]) -> str:
    """Return a NEXUS block that lists the taxa."""
    labels = "".join(f"      {quote(taxon)}\n" for taxon in taxa)
    return f"\nbegin taxa;\n   dimensions ntax={len(taxa)};\n   taxlabels\n{labels}   ;\nend;\n"


# Chains as MrBayes and BEAST write them: a file of trees, and beside it a table of parameters with the same rows.

#: Of each program, the suffixes of trees and table, and the name of the column of tree lengths.
FORMATS: Mapping[str, tuple[str, str, str]] = {
    "mrbayes": (".t", ".p", "TL"),
    "beast": (".trees", ".log", "treeLength"),
}
#: The first line of both files of MrBayes, which its readers skip.
_MRBAYES_HEAD = "[ID: 0000000000]\n"


def write_run(
    path: str | os.PathLike[str],
    format: str,
    topologies: Topologies,
    index: np.ndarray,
    weights: np.ndarray,
    branch_lengths: Tensor | None,
    parameters: Mapping[str, Any] | None,
    interval: int,
) -> None:
    """Write sampled trees `(samples,)` and the table of parameters of a chain; see `TreeSample.to_file`."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    suffix, table_suffix, tree_length = FORMATS[format]
    where, interval = os.fspath(path), whole_number("interval", interval, least=1)
    if Path(where).suffix != suffix:
        raise SettingsError(f"{where}: the suffix of a file of {format!r} is {suffix!r}. Remedy: change the name.")
    if np.ptp(weights) > 1e-9 / len(weights):
        raise SettingsError(
            f"{where}: the trees have different weights, and a file of {format!r} has none. Remedy: write each run on "
            "its own, or omit format, which writes weights."
        )
    if format == "beast" and not topologies.rooted:
        raise TreeError(f"{where}: trees of BEAST are rooted. Remedy: place a root with sample.rooted_at('OUTGROUP').")
    if format == "mrbayes" and branch_lengths is None:
        raise TreeError(f"{where}: the trees have no branch lengths. Remedy: omit format, which needs none.")
    columns = {} if branch_lengths is None else {tree_length: branch_lengths.sum(-1).numpy()}
    columns |= {} if parameters is None else _columns(parameters, len(index))
    rows = enumerate(_newicks(topologies, index, branch_lengths))
    generations = [interval * row for row in range(len(index))]
    if format == "mrbayes":
        trees = ((f"gen.{generations[row]}", "", newick) for row, newick in rows)
        head, first, block = _MRBAYES_HEAD, "Gen", f"{_MRBAYES_HEAD}[Param: tree{{all}}]"
    else:
        trees = ((f"STATE_{generations[row]}", "", newick) for row, newick in rows)
        head, first, block = "", "Sample", taxa_block(topologies.taxa)
    write_nexus(path, topologies.taxa, topologies.rooted, trees, block)
    lines = ["\t".join([first, *columns])]
    values = zip(*(column.tolist() for column in columns.values()), strict=True) if columns else [()] * len(index)
    lines += ["\t".join([str(at), *map(repr, row)]) for at, row in zip(generations, values, strict=True)]
    write_atomically(where.removesuffix(suffix) + table_suffix, (head + "\n".join(lines) + "\n").encode())


def _columns(parameters: Mapping[str, Any], count: int) -> dict[str, NDArray[Any]]:
    """Return the columns of a table, one for each number of a parameter, counted from 1."""
    columns: dict[str, NDArray[Any]] = {}
    for name, given in parameters.items():
        values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        if values.shape[:1] != (count,) or values.dtype.kind not in "iuf":
            raise ShapeError(
                f"parameters: {name!r} is an array of {values.dtype} with shape {values.shape}. Remedy: give numbers "
                f"of shape ({count}, ...), one row for each sampled tree."
            )
        flat = values.reshape(count, -1)
        names = [name] if values.ndim == 1 else [f"{name}{{{place + 1}}}" for place in range(flat.shape[1])]
        columns |= {"_".join(str(one).split()): flat[:, place] for place, one in enumerate(names)}
    return columns
