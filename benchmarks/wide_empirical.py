"""Time the empirical neural tangent kernel of a 784-512-512-10 network beside neural-tangents and nngeometry.

Usage::

    python benchmarks/wide_empirical.py [--peer-python PATH] [--nngeometry-python PATH] [--rounds 5]

`--peer-python` has neural-tangents 0.6.5 (jax 0.4.20), `--nngeometry-python` has nngeometry and torch. Each library
runs in programs of its own, in turns; medians of their medians are printed, of process time (all threads) and of wall
time. The peer is compiled, and its compilation is not counted. nngeometry has the kernel of all outputs only, so that
this is what trace and diagonal stand beside, too. `--grow` prints how our time and memory grow with inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("wide_empirical_driver.py")
OUTPUTS = ("full", "trace", "diagonal")
ROOT = str(Path(__file__).resolve().parent.parent)


def run(python: Path, library: str, outputs: str, sizes: tuple[int, int], bits: int, options: Any) -> dict[str, Any]:
    """Run one library in a program of its own."""
    made = subprocess.run(
        [python, DRIVER, library, outputs, *map(str, (*sizes, bits, options.repeats))],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
            "PYTHONPATH": ROOT if library == "bayeskit" else "",
        },
    )
    if made.returncode:
        raise SystemExit(f"{library} failed:\n{made.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return result


def agree(found: dict[str, dict[str, Any]], outputs: str, bits: int) -> None:
    """Stop if libraries have different kernels."""
    for library, result in found.items():
        if library == "nngeometry" and outputs != "full":
            continue
        for ours, theirs in zip(found["bayeskit"]["checks"], result["checks"], strict=True):
            if abs(ours - theirs) > (1e-10 if bits == 64 else 1e-4) * abs(found["bayeskit"]["checks"][0]):
                raise SystemExit(f"{library} has another kernel: {theirs}, not {ours}")


def compare(pythons: dict[str, Path], options: argparse.Namespace) -> None:
    print(f"\n784-512-512-10, 100 inputs, float{options.bits}, {options.threads} thread(s) for torch")
    print(f"{'outputs':<9} {'library':<16} {'process ms':>10} {'wall ms':>8} {'MB':>6} {'ours / theirs':>14}")
    for outputs in options.outputs:
        rounds = []
        for _ in range(options.rounds):
            found = {
                name: run(python, name, outputs, (100, 10), options.bits, options) for name, python in pythons.items()
            }
            agree(found, outputs, options.bits)
            rounds.append(found)
        for name in pythons:
            process, wall, memory = (
                statistics.median(r[name][key] for r in rounds) for key in ("process", "wall", "megabytes")
            )
            ratio = statistics.median(r["bayeskit"]["process"] / r[name]["process"] for r in rounds)
            times = f"{1e3 * process:>10.1f} {1e3 * wall:>8.1f}"
            print(f"{outputs:<9} {name:<16} {times} {memory:>6.0f} {ratio:>14.2f}", flush=True)


def grow(python: Path, options: argparse.Namespace) -> None:
    print(f"\ngrowth, float{options.bits}: process ms (MB beyond what is loaded, result included)")
    sizes = [(50, 10), (100, 10), (200, 10), (400, 10), (100, 1), (100, 20), (100, 40)]
    print(f"{'inputs':>7} {'classes':>8} " + " ".join(f"{outputs:>18}" for outputs in OUTPUTS))
    for size in sizes:
        cells = []
        for outputs in OUTPUTS:
            result = run(python, "bayeskit", outputs, size, options.bits, options)
            cells.append(f"{1e3 * result['process']:>10.1f} ({result['megabytes']:>5.0f})")
        print(f"{size[0]:>7} {size[1]:>8} " + " ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="a Python with neural-tangents")
    parser.add_argument("--nngeometry-python", type=Path, help="a Python with nngeometry")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all libraries")
    parser.add_argument("--repeats", type=int, default=9, help="calls in each turn")
    parser.add_argument("--threads", type=int, default=1, help="of torch's operations")
    parser.add_argument("--outputs", nargs="+", default=OUTPUTS, choices=OUTPUTS)
    parser.add_argument("--bits", type=int, default=32, choices=(32, 64))
    parser.add_argument("--grow", action="store_true", help="print growth with inputs and outputs, too")
    options = parser.parse_args()
    pythons = {"bayeskit": Path(sys.executable)}
    # Not resolved: a virtual environment's Python is a link that must keep its place.
    if options.peer_python:
        pythons["neural-tangents"] = options.peer_python.absolute()
    if options.nngeometry_python:
        pythons["nngeometry"] = options.nngeometry_python.absolute()
    compare(pythons, options)
    if options.grow:
        grow(pythons["bayeskit"], options)


if __name__ == "__main__":
    sys.exit(main())
