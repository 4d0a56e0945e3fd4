"""Run tests, doctests and pages on several kinds of processor, without a compiler, and with other seeds.

    python benchmarks/portability.py [--rows native default+shift-1] [--tests tests/inference] [--out DIR]

A test that passes here and fails there has a tolerance by luck. Each row of the table is one run of pytest:

* ``default``, ``avx2``, ``native``: the vector instructions that torch may use (``ATEN_CPU_CAPABILITY``), by which sums
  are rounded differently;
* ``no-compiler``: no C++ compiler can be found, so that nothing is compiled;
* ``shift-1`` to ``shift-3``: other random numbers from the same seeds (``BAYESKIT_SEED_SHIFT``).

Names joined by a plus sign are one run that has both differences: where it has no failure, neither has one. Rows that
are in DIR already are not run again; what pytest printed is there, too. The pages run in their small modes, as part of
the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")
ROWS: dict[str, dict[str, str]] = {
    "native": {},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no-compiler": {"PATH": "", "CXX": ""},
    "shift-1": {"BAYESKIT_SEED_SHIFT": "1"},
    "shift-2": {"BAYESKIT_SEED_SHIFT": "2"},
    "shift-3": {"BAYESKIT_SEED_SHIFT": "3"},
}
RESULT = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


def path_without_compilers(folder: Path) -> str:
    """Return a PATH whose folders have everything but compilers, as links in `folder`."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not re.fullmatch(rf"({'|'.join(map(re.escape, COMPILERS))})(-\d+)?", program.name) and not link.exists():
                link.symlink_to(program)
    return str(folder)


def row(name: str) -> str:
    """Return `name` if each of its parts is a row."""
    if unknown := [part for part in name.split("+") if part not in ROWS]:
        raise argparse.ArgumentTypeError(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return name


def run(name: str, tests: list[str], processes: int, folder: Path, log: Path) -> dict[str, object]:
    """Run pytest in the environment of one row; what is compiled is kept by kind of processor, for the next row."""
    parts = name.split("+")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for part in parts:
        environment |= ROWS[part]
    if capability := environment.get("ATEN_CPU_CAPABILITY"):
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"torchinductor_{capability}")
    if "no-compiler" in parts:
        # An empty one, so that nothing is found compiled.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
        (folder / "bin").mkdir()
        environment["PATH"] = path_without_compilers(folder / "bin")
    selected = [f"--doctest-modules {test}" if test == "bayeskit" else test for test in tests]
    lines, begin = "", time.monotonic()
    counts: dict[str, int] = {}
    for test in selected:
        command = [sys.executable, "-m", "pytest", "-n", str(processes), *test.split()]
        output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
        lines += output
        closing = output.strip().splitlines()[-1] if output.strip() else ""
        for count, kind in RESULT.findall(closing):
            counts[kind] = counts.get(kind, 0) + int(count)
    log.write_text(lines)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", lines, re.MULTILINE)
    return {"counts": counts, "failed": failed, "minutes": (time.monotonic() - begin) / 60, "tests": tests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=row, default=list(ROWS))
    parser.add_argument("--tests", nargs="+", default=["tests", "bayeskit"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("portability"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    print(f"{'row':20s} {'passed':>7s} {'failed':>7s} {'skipped':>8s} {'minutes':>8s}", flush=True)
    for name in settings.rows:
        file = settings.out / f"{name}.json"
        if file.exists() and json.loads(file.read_text())["tests"] == settings.tests:
            result = json.loads(file.read_text())
        else:
            folder = Path(tempfile.mkdtemp(prefix="portability-"))
            try:
                result = run(name, settings.tests, settings.processes, folder, file.with_suffix(".log"))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            file.write_text(json.dumps(result, indent=1))
        counts = result["counts"]
        wrong = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
        print(f"{name:20s} {passed:7d} {wrong:7d} {skipped:8d} {result['minutes']:8.1f}", flush=True)
        for test in result["failed"]:
            print(f"                     {test}", flush=True)


if __name__ == "__main__":
    main()
