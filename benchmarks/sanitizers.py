"""Run compiled code under the address and undefined-behaviour sanitizers of the compiler, on exact cases.

    python benchmarks/sanitizers.py [--tests FILE ...] [--taxa 4 5 63 64 65 128 129]

A wrapper around the compiler adds the sanitizers to whatever is compiled: generated densities and equations, the
pruning kernel and the chains over topologies. Test files of the project run with it in an environment of their own,
with empty caches, and trees of several sizes are evaluated and moved. The first report of a sanitizer ends a process;
the last line counts the processes that ended so. Needs g++ or clang++ with their sanitizer libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
MARKS = ("ERROR: AddressSanitizer", "runtime error:", "    #0 ", "    #1 ", "    #2 ")
TESTS = [
    "tests/ode/test_contract.py",
    "tests/compiler/test_native_writer.py",
    "tests/compiler/test_native_evaluator.py",
    "tests/compiler/test_loops.py",
    "tests/models/phylogenetics/test_forest_compiled.py",
    "tests/models/phylogenetics/test_forest_extremes.py",
    "tests/models/phylogenetics/test_topology_constraints.py",
    "tests/models/phylogenetics/test_tree_chains.py",
]
TREES = """
import sys, warnings
import torch
from bayeskit.models.phylogenetics import GTR, Alignment, GammaRates, Partition
from bayeskit.models.phylogenetics.workflows import infer_topologies
warnings.simplefilter("ignore")
taxa = int(sys.argv[1])
letters = torch.randint(6, (taxa, 60), generator=torch.Generator().manual_seed(taxa)).tolist()
names = [f"t{i}" for i in range(taxa)]
rows = {name: "".join("ACGT-N"[x] for x in row) for name, row in zip(names, letters)}
data = Alignment.from_sequences(rows)
parts = {k: Alignment.from_sequences({name: row[k : k + 30] for name, row in rows.items()}) for k in (0, 30)}
settings = {"num_runs": 1, "num_warmup": 10, "num_samples": 20, "progress": False}
infer_topologies(data, substitution=GTR(), site_rates=GammaRates(4), **settings)
infer_topologies(data, constraints=[names[:2]], **settings)
infer_topologies(Partition({f"part {k}": part for k, part in parts.items()}), **settings)
"""


def sanitized(folder: Path) -> dict[str, str]:
    """Return the environment of a process whose compiler adds sanitizers, which it loads first."""
    found = os.environ.get("CXX", "g++")
    wrapper = folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {found} "$@" {FLAGS}\n', encoding="utf-8")
    wrapper.chmod(0o700)
    # Exceptions are thrown by the library of C++, which is loaded first as well.
    paths = [_library(found, name) for name in ("libasan.so", "libstdc++.so.6")]
    return os.environ | {
        "CXX": str(wrapper),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "LD_PRELOAD": " ".join(str(Path(path).resolve()) for path in paths),
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={folder}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={folder}/report",
        "OMP_NUM_THREADS": "1",
    }


def _library(found: str, name: str) -> str:
    """Return the path of a library of a compiler, or its name if there is none."""
    command = [found, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Print what each process said, and return 1 if one has met an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", nargs="*", default=TESTS, metavar="FILE")
    parser.add_argument("--taxa", nargs="*", type=int, default=[4, 5, 63, 64, 65, 128, 129])
    arguments = parser.parse_args()
    plain = ["-o", "addopts=--strict-markers --import-mode=importlib", "-q", "-s", "--tb=short", "-x"]
    commands = {file: ["-m", "pytest", *plain, file] for file in arguments.tests}
    commands |= {f"trees of {taxa} taxa": ["-c", TREES, str(taxa)] for taxa in arguments.taxa}
    found = os.environ.get("CXX", "g++")
    if shutil.which(found) is None or not Path(_library(found, "libasan.so")).is_absolute():
        print(f"{found} has no sanitizers here, so that compiled code is not run under them")
        return 0
    reports = failures = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = sanitized(Path(folder))
        for name, command in commands.items():
            begin = time.perf_counter()
            run = subprocess.run(
                [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
            )
            written = [file.read_text(encoding="utf-8", errors="replace") for file in Path(folder).glob("report*")]
            written += [run.stdout + run.stderr] if run.returncode else []
            said = [line for text in written for line in text.splitlines() if any(word in line for word in MARKS)]
            for file in Path(folder).glob("report*"):
                file.unlink()
            reports += bool(said)
            failures += run.returncode != 0
            last = (run.stdout.strip() or run.stderr.strip()).splitlines()[-1:] or [""]
            print(
                f"{name:58s} status {run.returncode}  {time.perf_counter() - begin:5.0f} s  {last[0][:60]}", flush=True
            )
            print("\n".join(f"    {line}" for line in said[:5]), end="\n" if said else "", flush=True)
    print(f"{len(commands)} processes, {reports} with a report of a sanitizer, {failures} that did not end well")
    return int(bool(reports or failures))


if __name__ == "__main__":
    sys.exit(main())
