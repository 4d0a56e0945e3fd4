"""The first minute: what imports, help, a list, a typing error and README's quick start cost a new process.

    python benchmarks/first_minute.py --rounds 5
    python benchmarks/first_minute.py --demo

Processor seconds of a process and of the compilers that it starts, one thread, and the median over rounds in which all
take turns. What is above `import torch, pyro` is the difference of the two processes of the same round. The quick start
runs twice in each round: "first" with empty cache folders, "second" with those that the first run left. `--demo`
measures `bayeskit evidence primates` in the same way, once, which takes a minute or two.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARE = "import torch, pyro"


def quick_start() -> str:
    """Return the first block of Python in README."""
    found = re.search(r"## Quick start\n+```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    if found is None:
        raise SystemExit("README has no quick start")
    return found[1]


def measured(arguments: list[str], caches: Path, folder: Path, status: int = 0) -> tuple[float, float]:
    """Return processor and wall seconds of `python ARGUMENTS`, its children included."""
    own = {"TORCHINDUCTOR_CACHE_DIR": caches / "inductor", "XDG_CACHE_HOME": caches / "home"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {name: str(value) for name, value in own.items()}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    after = os.times()
    if done.returncode != status:
        raise SystemExit(f"{' '.join(arguments)[:80]} ended with {done.returncode}:\n{done.stderr}")
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return spent, time.monotonic() - begin


def tasks() -> dict[str, tuple[list[str], int]]:
    """Return the arguments of Python and the exit status of everything that is measured."""
    command = ["-m", "bayeskit"]
    return {
        BARE: (["-c", BARE], 0),
        "import bayeskit": (["-c", "import bayeskit"], 0),
        "import bayeskit; bayeskit.sample": (["-c", f"{BARE}; import bayeskit; bayeskit.sample"], 0),
        "bayeskit --help": ([*command, "--help"], 0),
        "bayeskit list": ([*command, "list"], 0),
        "bayeskit evidence primats": ([*command, "evidence", "primats"], 2),
        "bayeskit evidence primates --methods bridge": ([*command, "evidence", "primates", "--methods", "bridge"], 2),
        "quick start, first": (["-c", quick_start()], 0),
        "quick start, second": (["-c", quick_start()], 0),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demo", action="store_true", help="measure `bayeskit evidence primates` instead")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if settings.demo:
            for name in ("first", "second"):
                arguments = ["-m", "bayeskit", "evidence", "primates", "--out", name]
                spent, passed = measured(arguments, folder / "caches", folder)
                print(f"bayeskit evidence primates, {name}: {spent:.1f} processor seconds, {passed:.1f} on the clock")
            return
        found: dict[str, list[float]] = {name: [] for name in tasks()}
        for number in range(settings.rounds + 1):  # the first fills the caches of files, and does not count
            for name, (arguments, status) in tasks().items():
                spent, _ = measured(arguments, folder / f"caches_{number}", folder, status)
                if number:
                    found[name].append(spent)
        print("| what | processor seconds | above `import torch, pyro` |\n|---|---|---|")
        for name, spent in found.items():
            above = statistics.median(s - bare for s, bare in zip(spent, found[BARE], strict=True))
            print(f"| {name} | {statistics.median(spent):.2f} | {above:+.2f} |")


if __name__ == "__main__":
    main()
