"""Alignments and trees of other projects, as they are: how many files are read, and what is said of the others.

    python benchmarks/foreign_trees.py --data DIR [--seconds 60] [--refused]

Each folder of DIR holds the files of one project, such as a copy of its repository. A file is taken if its first lines
are those of a format that is read: NEXUS, Newick, PHYLIP, FASTA, Clustal, Stockholm, or a log with a column of trees.
Each file is read in a process of its own, as an alignment, as matrices of several types, and as trees: a sample as it
stands, with random resolution of multifurcations, without roots, or one tree after another. An error of another type
than those of bayeskit is foreign. `--refused` prints what is said of each file that is not read.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bayeskit.errors import BayeskitError
from bayeskit.models.phylogenetics import Alignment, Partition, Tree, TreeSample, read_matrices

#: How a text in one of the formats begins.
START = re.compile(
    r"(#[^\n]*\n\s*)?#NEXUS|(\[[^\]]*\]\s*)*\(|\d+[ \t]+\d+\b[^\n]*\n|\d+\s*\n\s*\(|>[^\n]*\n\s*[A-Za-z?*.-]"
    r"|CLUSTAL|MUSCLE|PROBCONS|# STOCKHOLM|(#[^\n]*\n)*(Iteration|Generation|Sample|state)\t",
    re.IGNORECASE,
)
#: Sources and documents, which may begin like one of them.
OTHERS = re.compile(r"\.(java|xml|py|r|c|h|cpp|hpp|cs|pas|html?|rst|tex|md|json|out|ipynb|psl|pslx|bbcols|pfm)$", re.I)
#: Trees of a file that are read one by one.
MOST = 30


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a project that begin like alignments or trees."""
    for path in sorted(folder.rglob("*")):
        if OTHERS.search(path.name) or not path.is_file():
            continue
        content = path.read_bytes()
        try:
            content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        except OSError:
            continue
        coding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1"
        text = content[:4000].decode(coding, errors="ignore").removeprefix("\xef\xbb\xbf").lstrip()
        if "\0" not in text and START.match(text) and (not text.startswith("(") or b";" in content):
            yield path


def one_by_one(path: Path) -> None:
    """Read the first trees of a file, which may have different taxa."""
    for index in range(MOST):
        try:
            Tree.from_file(path, index, resolve=True)
        except BayeskitError as error:
            if "there is no tree" in str(error):
                return
            raise


#: Ways to read a file, by what is read.
READERS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "alignment": (Alignment.from_file, read_matrices, Partition.from_file),
    "trees": (
        lambda path: TreeSample.from_file(path, progress=False),
        lambda path: TreeSample.from_file(path, resolve=True, progress=False),
        lambda path: TreeSample.from_file(path, rooted=False, resolve=True, progress=False),
        one_by_one,
    ),
}


def said_of(path: Path) -> tuple[list[str], list[str]]:
    """Return what a file was read as, and what was said by the readers that refused it."""
    found, said = [], []
    for name, readers in READERS.items():
        for number, reader in enumerate(readers):
            try:
                with warnings.catch_warnings(action="ignore"):
                    reader(path)
            except BayeskitError as error:
                if not number:
                    said.append(str(error).splitlines()[0])
            except Exception as error:
                return ["foreign"], [f"{type(error).__name__}: {error}"]
            else:
                found.append(name)
                break
    return found, said


def main() -> None:
    """Read all files and print a row for each project."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--refused", action="store_true")
    options = parser.parse_args()
    columns = ("files", "alignment", "trees", "both", "refused", "foreign", "too long")
    print(f"{'project':32}" + "".join(f"{column:>10}" for column in columns), flush=True)
    total: Counter[str] = Counter()
    for folder in sorted(path for path in options.data.iterdir() if path.is_dir()):
        counts: Counter[str] = Counter()
        refusals: list[str] = []
        for path in files_of(folder):
            with multiprocessing.Pool(1) as pool:  # a file that takes too long ends with its process
                try:
                    found, said = pool.apply_async(said_of, (path,)).get(options.seconds)
                except multiprocessing.TimeoutError:
                    found, said = ["too long"], [f"more than {options.seconds:g} s"]
            kind = "both" if len(found) > 1 else found[0] if found else "refused"
            counts.update(["files", kind])
            if kind in ("refused", "foreign", "too long"):
                refusals += [f"    {path.relative_to(folder)}: {kind}", *(f"        {text}" for text in said)]
        print(f"{folder.name:32}" + "".join(f"{counts[column]:10}" for column in columns), flush=True)
        if options.refused:
            print(*(text.replace(f"{folder}{os.sep}", "") for text in refusals), sep="\n", flush=True)
        total += counts
    print(f"{'all':32}" + "".join(f"{total[column]:10}" for column in columns))


if __name__ == "__main__":
    main()
