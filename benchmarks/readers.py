"""CPU seconds of reading alignments and trees of growing size, and the exponent of the growth.

    python benchmarks/readers.py [--shapes NAME ...]

Each shape of input is written at 1, 2, 4 and 8 times its size, and read several times; the exponent is the slope of the
logarithm of the least seconds from the second size to the last. A reader in linear time has one.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bayeskit.models.phylogenetics import Alignment, Tree, TreeSample
from bayeskit.models.phylogenetics._site_sets import read_partitions

CHOICE = random.Random(1)
REPEATS = 3


def sequence(length: int, letters: str = "ACGT") -> str:
    """Return letters at random."""
    return "".join(CHOICE.choices(letters, k=length))


def rows(count: int, length: int, letters: str = "ACGT") -> list[tuple[str, str]]:
    """Return names and sequences."""
    return [(f"t{i}", sequence(length, letters)) for i in range(count)]


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text."""
    return [text[start : start + width] for start in range(0, len(text), width)]


def fasta(given: list[tuple[str, str]], width: int = 10**9) -> str:
    """Return a FASTA file."""
    return "".join(f">{name}\n" + "\n".join(wrapped(text, width)) + "\n" for name, text in given)


def phylip(given: list[tuple[str, str]], interleaved: bool = False) -> str:
    """Return a PHYLIP file."""
    head = f"{len(given)} {len(given[0][1])}\n"
    if not interleaved:
        return head + "\n".join(f"{name} {text}" for name, text in given) + "\n"
    return head + blocks(given, names=False)


def blocks(given: list[tuple[str, str]], names: bool) -> str:
    """Return interleaved rows, with names in all blocks or in the first."""
    parts = [wrapped(text, 60) for _, text in given]
    lines = []
    for block in range(len(parts[0])):
        named = names or block == 0
        lines += [
            f"{name} {part[block]}" if named else part[block] for (name, _), part in zip(given, parts, strict=True)
        ]
        lines.append("")
    return "\n".join(lines)


def nexus(given: list[tuple[str, str]], interleaved: bool = False, datatype: str = "dna", more: str = "") -> str:
    """Return a NEXUS file with a data block."""
    body = blocks(given, names=True) if interleaved else "\n".join(f"{name} {text}" for name, text in given)
    return (
        f"#NEXUS\nbegin data;\ndimensions ntax={len(given)} nchar={len(given[0][1])};\nformat datatype={datatype} "
        f"missing=? gap=-{' interleave' if interleaved else ''};\nmatrix\n{body}\n;\nend;\n{more}"
    )


def charsets(count: int) -> str:
    """Return a block of sets of ten sites."""
    sets = "\n".join(f"charset part{i} = {10 * i + 1}-{10 * i + 10};" for i in range(count))
    return f"begin sets;\n{sets}\nend;\n"


def balanced(names: list[str]) -> str:
    """Return a balanced unrooted tree."""
    found = [f"{name}:0.1" for name in names]
    while len(found) > 3:
        pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
        found = [f"({','.join(pair)}):0.1" if len(pair) == 2 else pair[0] for pair in pairs]
    return f"({','.join(found)});"


def ladder(count: int) -> str:
    """Return a tree in which each clade holds the one before."""
    text = "(" * (count - 1) + "t0:0.1"
    for i in range(1, count):
        text += f",t{i}:0.1)" + (":0.1" if i < count - 1 else "")
    return text + ";"


def names_of(count: int) -> list[str]:
    """Return names of taxa."""
    return [f"t{i}" for i in range(count)]


def annotated(count: int) -> str:
    """Return a balanced tree with a comment at each length."""
    return balanced(names_of(count)).replace(":0.1", ":[&rate=1.0]0.1")


def mrbayes(taxa: int, count: int, comments: bool = False) -> str:
    """Return a sample of trees as MrBayes writes it."""
    names = ",\n".join(f" {i + 1} t{i}" for i in range(taxa))
    tree = balanced([str(i + 1) for i in range(taxa)])
    tree = tree.replace(":0.1", ":[&height=0.1]0.1") if comments else tree
    trees = "\n".join(f" tree gen.{i} = [&U] {tree}" for i in range(count))
    return f"#NEXUS\nbegin trees;\n translate\n{names};\n{trees}\nend;\n"


Shape = tuple[int, Callable[[int], str], str, Callable[[Path], Any]]
ALIGNMENT, TREE, TREES = Alignment.from_file, Tree.from_file, TreeSample.from_file
SHAPES: dict[str, Shape] = {
    "fasta, rows alike": (1000, lambda k: fasta([(f"t{i}", "ACGT" * 4) for i in range(k)]), ".fasta", ALIGNMENT),
    "fasta, rows": (1000, lambda k: fasta(rows(k, 30)), ".fasta", ALIGNMENT),
    "fasta, wrapped rows": (300, lambda k: fasta(rows(k, 600), 60), ".fasta", ALIGNMENT),
    "fasta, sites": (20_000, lambda k: fasta(rows(5, k)), ".fasta", ALIGNMENT),
    "fasta, wrapped sites": (20_000, lambda k: fasta(rows(5, k), 60), ".fasta", ALIGNMENT),
    "fasta, sites alike": (20_000, lambda k: fasta([(f"t{i}", "A" * k) for i in range(5)]), ".fasta", ALIGNMENT),
    "fasta, long names": (1000, lambda k: fasta([(f"n{i}_" * 20, "ACGT") for i in range(k)]), ".fasta", ALIGNMENT),
    "phylip, rows": (1000, lambda k: phylip(rows(k, 30)), ".phy", ALIGNMENT),
    "phylip, sites": (20_000, lambda k: phylip(rows(5, k)), ".phy", ALIGNMENT),
    "phylip, interleaved rows": (300, lambda k: phylip(rows(k, 300), True), ".phy", ALIGNMENT),
    "phylip, interleaved sites": (10_000, lambda k: phylip(rows(5, k), True), ".phy", ALIGNMENT),
    "nexus, rows": (500, lambda k: nexus(rows(k, 30)), ".nex", ALIGNMENT),
    "nexus, sites": (10_000, lambda k: nexus(rows(5, k)), ".nex", ALIGNMENT),
    "nexus, interleaved rows": (300, lambda k: nexus(rows(k, 300), True), ".nex", ALIGNMENT),
    "nexus, interleaved sites": (10_000, lambda k: nexus(rows(5, k), True), ".nex", ALIGNMENT),
    "nexus, comments": (300, lambda k: nexus(rows(k, 30), more="[" + "x" * 100 * k + "]\n"), ".nex", ALIGNMENT),
    "partition, parts": (100, lambda k: f"#NEXUS\n{charsets(k)}", ".nex", lambda path: read_partitions(path, 10**6)),
    "newick, balanced": (2000, lambda k: balanced(names_of(k)), ".nwk", TREE),
    "newick, ladder": (1000, ladder, ".nwk", TREE),
    "newick, comments": (500, annotated, ".nwk", TREE),
    "newick, quoted": (500, lambda k: balanced([f"'taxon {i}'" for i in range(k)]), ".nwk", TREE),
    "sample, trees": (1000, lambda k: "\n".join([balanced(names_of(20))] * k), ".trees", TREES),
    "sample, taxa": (100, lambda k: "\n".join([balanced(names_of(k))] * 20), ".trees", TREES),
    "mrbayes, trees": (1000, lambda k: mrbayes(20, k), ".t", TREES),
    "mrbayes, taxa": (100, lambda k: mrbayes(k, 20), ".t", TREES),
    "mrbayes, comments": (200, lambda k: mrbayes(20, k, True), ".t", TREES),
}


def main() -> None:
    """Print seconds and exponents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    chosen = parser.parse_args().shapes
    warnings.simplefilter("ignore")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            size, make, suffix, read = SHAPES[name]
            seconds = []
            for factor in (1, 2, 4, 8):
                path = Path(folder) / f"input{suffix}"
                path.write_text(make(size * factor), encoding="utf-8")
                spent = []
                for _ in range(REPEATS):
                    begin = time.process_time()
                    read(path)
                    spent.append(time.process_time() - begin)
                seconds.append(min(spent))
            exponent = math.log(seconds[3] / seconds[1]) / math.log(4)
            worst = max(worst, exponent)
            print(f"{name:26s} {' '.join(f'{s:8.3f}' for s in seconds)} s   exponent {exponent:.2f}", flush=True)
    print(f"{len(chosen)} shapes, largest exponent {worst:.2f}")


if __name__ == "__main__":
    main()
