"""Print the size of the house: lines, public names, names that families use of the core, pages, files of tests.

    python benchmarks/house.py

Counts describe; none is an aim. Lines are those of Python, comments and docstrings included.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import bayeskit
from bayeskit import extend

ROOT = Path(bayeskit.__file__).parent
FAMILIES = ("models/", "inference/generalized/")
NOT_THE_CORE = (*FAMILIES, "cli/", "gallery/", "testing.py")


def lines_of(paths: list[Path]) -> int:
    """Return the number of lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def public_names() -> dict[str, int]:
    """Return the number of names that each package offers to users."""
    packages = [part.name for part in pkgutil.walk_packages(bayeskit.__path__, "bayeskit.") if part.ispkg]
    packages = ["bayeskit", *(name for name in packages if "._" not in name and name != "bayeskit.cli")]
    counts = {name: len(getattr(importlib.import_module(name), "__all__", ())) for name in packages}
    return {name: count for name, count in counts.items() if count}


def main() -> None:
    """Print the counts."""
    files = sorted(ROOT.rglob("*.py"))
    core = [path for path in files if not str(path.relative_to(ROOT)).startswith(NOT_THE_CORE)]
    print(f"package: {lines_of(files):,} lines in {len(files)} files; core: {lines_of(core):,} in {len(core)}")
    for folder in sorted({path.parent for path in files}):
        print(f"  {lines_of(list(folder.glob('*.py'))):7,}  {folder.relative_to(ROOT.parent)}")
    names = public_names()
    print(f"public names: {sum(names.values())}")
    for name, count in names.items():
        print(f"  {count:7}  {name}")
    print(f"names of the core that families use: {len(extend.__all__)}, and the errors")
    beside = ROOT.parent
    print(f"pages: {len(list((beside / 'examples').rglob('*.py')))}")
    print(f"files of tests: {len(list((beside / 'tests').rglob('test_*.py')))}")


if __name__ == "__main__":
    main()
