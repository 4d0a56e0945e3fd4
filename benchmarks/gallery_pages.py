"""Run pages of the gallery with shifted seeds, and print a table of seconds and failures.

    python benchmarks/gallery_pages.py [NAME ...] [--seeds 5] [--small] [--jobs 1] [--save docs/tables/gallery.csv]

A page's assertions should not hang on its seed. Run 0 is the page as it stands. Run ``k`` adds ``1000 k`` to every seed
of the page: to the arguments ``seed=`` and ``random_state=``, and to the first argument of ``manual_seed``,
``default_rng``, ``RandomState``, ``SeedSequence``, ``set_rng_seed`` and ``seed``. The seconds are CPU seconds of the
whole command, imports and compilation included, with one thread a process: the median over the runs. Without a name all
pages run. The table of ``--save`` keeps the rows of the pages that did not run. The exit code is 1 if a run failed or
warned.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bayeskit import gallery

ROOT = Path(__file__).resolve().parent.parent
KEYWORDS = {"seed", "random_state"}
FUNCTIONS = {"manual_seed", "default_rng", "RandomState", "SeedSequence", "set_rng_seed", "seed"}
COLUMNS = ("page", "seconds", "small_seconds", "seeds", "failures", "small_seeds", "small_failures")


class Shift(ast.NodeTransformer):
    """Add a number to every seed of a script."""

    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def shifted(self, seed: ast.expr) -> ast.expr:
        """Return the expression of a seed plus the shift; None, a generator and a flag stay."""
        self.count += 1
        test = f"(lambda seed: seed + {self.by} if type(seed) is int else seed)(0)"
        call = ast.parse(test, mode="eval").body
        assert isinstance(call, ast.Call)
        call.args[0] = seed
        return call

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Shift the seeds among the arguments of one call."""
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in FUNCTIONS and node.args:
            node.args[0] = self.shifted(node.args[0])
        for keyword in node.keywords:
            if keyword.arg in KEYWORDS:
                keyword.value = self.shifted(keyword.value)
        return node


def script(page: gallery.Page, shift: int, folder: Path) -> tuple[Path, int]:
    """Write a page with shifted seeds, and return its path and the number of its seeds."""
    transformer = Shift(shift)
    tree = transformer.visit(ast.parse(page.path.read_text(encoding="utf-8")))
    path = folder / str(shift) / page.path.name
    path.parent.mkdir(exist_ok=True)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    return path, transformer.count


def run(page: gallery.Page, shift: int, small: bool, folder: Path) -> tuple[float, str]:
    """Return the CPU seconds of one run, and what went wrong, empty if nothing."""
    path, _ = script(page, shift, folder)
    environment = {name: value for name, value in os.environ.items() if name != "BAYESKIT_SMALL_EXAMPLES"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"BAYESKIT_SMALL_EXAMPLES": "1"} if small else {}
    errors = path.with_suffix(".err")
    with errors.open("wb") as file:
        command = [sys.executable, str(path)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=file, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
    seconds = used.ru_utime + used.ru_stime
    said = [line.strip() for line in errors.read_text(encoding="utf-8").splitlines() if line.strip()]
    if status:
        places = [
            place for place, line in enumerate(said) if str(path) in line
        ]  # of the traceback, each before its code
        return seconds, f"{said[-1] if said else 'killed'}: {said[places[-1] + 1] if places else ''}"[:200]
    return seconds, next((line[:200] for line in said if "Warning" in line), "")


def save(path: Path, rows: dict[str, dict[str, object]]) -> None:
    """Write the table, with the rows that it had of pages that exist and did not run."""
    known = {page.name for page in gallery.pages()}
    kept: dict[str, dict[str, object]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = {row["page"]: dict(row) for row in csv.DictReader(file) if row["page"] in known}
    for name, row in rows.items():
        kept[name] = kept.get(name, dict.fromkeys(COLUMNS, "")) | row
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[name] for name in sorted(kept))


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages; all if none is named")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each page")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--small", action="store_true", help="in small mode, as in the tests")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--save", type=Path, metavar="CSV", help="table to be updated")
    options = parser.parse_args()
    pages = [gallery.page(name) for name in options.names] or list(gallery.pages())
    shifts = [1000 * k for k in range(options.first, options.first + options.seeds)]
    rows: dict[str, dict[str, object]] = {}
    print(f"{'page':45s} {'seeds':>5s} {'seconds':>8s} {'failed':>6s}")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        jobs = {page.name: [pool.submit(run, page, shift, options.small, folder) for shift in shifts] for page in pages}
        for page in pages:
            found = [job.result() for job in jobs[page.name]]
            seconds = statistics.median(taken for taken, _ in found)
            failures = {shift: said for shift, (_, said) in zip(shifts, found, strict=True) if said}
            print(f"{page.name:45s} {len(found):5d} {seconds:8.1f} {len(failures):6d}", flush=True)
            for shift, said in failures.items():
                print(f"    seeds + {shift}: {said}", flush=True)
            prefix = "small_" if options.small else ""
            rows[page.name] = {
                "page": page.name,
                f"{prefix}seconds": f"{seconds:.1f}",
                f"{prefix}seeds": len(found),
                f"{prefix}failures": len(failures),
            }
    total = sum(float(str(row["small_seconds" if options.small else "seconds"])) for row in rows.values())
    failed = sum(int(str(row["small_failures" if options.small else "failures"])) for row in rows.values())
    print(
        f"{len(rows)} pages, {total:.0f} seconds one after another; {failed} of {len(rows) * len(shifts)} runs failed"
    )
    if options.save:
        save(options.save, rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
