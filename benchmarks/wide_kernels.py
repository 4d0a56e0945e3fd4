"""Kernels of infinitely wide networks, beside neural-tangents: time, memory, and growth with inputs and depth.

Both sides compute NNGP and NTK of three hidden ReLU layers: dense ones on 784 features, and 3x3 convolutions on 8x8
images that end in an average over pixels. Rounds are interleaved, medians printed; neural-tangents (with its own jax)
runs in an environment of its own. Each side's peak of memory is that of its process.

    python benchmarks/wide_kernels.py --peer-python PATH [--count 4000] [--images 100] [--rounds 5] [--threads 2]
    python benchmarks/wide_kernels.py --stream 50000 [--bits 32] [--folder .]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bayeskit.models.wide_networks._kernels import InfiniteWidth, infinite_width

DRIVER = Path(__file__).with_name("neural_tangents_driver.py")
Task = dict[str, int | str]
Answer = dict[str, float]


def kernel(network: str, depth: int) -> InfiniteWidth:
    """Return the kernel of a network, the same as the driver's."""
    layers: list[nn.Module] = []
    for i in range(depth):
        if network == "dense":
            layers += [nn.Linear(784 if i == 0 else 8, 8), nn.ReLU()]
        else:
            layers += [nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()]
    if network == "conv":
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return infinite_width(nn.Sequential(*layers, nn.Linear(8, 1)), weight_variance=2.0, bias_variance=0.01)


def inputs(network: str, count: int, bits: int) -> Tensor:
    """Return the same numbers as the driver's."""
    shape = (count, 784) if network == "dense" else (count, 8, 8, 1)
    numbers = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    numbers = numbers if network == "dense" else numbers.permute(0, 3, 1, 2).contiguous()
    return numbers.to(torch.float64 if bits == 64 else torch.float32)


def answer(task: Task) -> Answer:
    """Compute one task and return what it took."""
    network, depth, count, bits = str(task["network"]), int(task["depth"]), int(task["count"]), int(task["bits"])
    function, x = kernel(network, depth), inputs(network, count, bits)
    begin, cpu = time.perf_counter(), time.process_time()
    found = function.both(x)
    return {
        "compiling": 0.0,
        "wall": time.perf_counter() - begin,
        "cpu": time.process_time() - cpu,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "nngp": float(found.nngp[0, 1]),
        "ntk": float(found.ntk[0, 1]),
    }


class Contestant:
    """A process that answers tasks, one line each."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, task: Task) -> Answer:
        """Return the answer to one task."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended without an answer; run it by hand to see why")
        found: Answer = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(options: argparse.Namespace, task: Task) -> None:
    """Print medians of interleaved rounds of one task."""
    ours = [sys.executable, __file__, "--answer", "--threads", str(options.threads)]
    commands = {"bayeskit": ours}
    if options.peer_python:
        single = ["--one-thread"] if options.threads == 1 else []
        commands["neural-tangents"] = [options.peer_python, str(DRIVER), *single]
    sides = {name: Contestant(command) for name, command in commands.items()}
    answers: dict[str, list[Answer]] = {name: [] for name in sides}
    first = {name: side.ask(task) for name, side in sides.items()}  # compiles, and is not counted
    for _ in range(options.rounds):
        for name, side in sides.items():
            answers[name].append(side.ask(task))
    for side in sides.values():
        side.close()
    print(f"\n{task['network']}, {task['count']} inputs, {task['depth']} hidden layers, float{task['bits']}")
    middle = {key: {n: statistics.median(a[key] for a in found) for n, found in answers.items()} for key in first[name]}
    for name in sides:
        print(
            f"  {name:16s} {middle['wall'][name]:8.3f} s wall {middle['cpu'][name]:8.3f} s CPU "
            f"{middle['peak'][name]:7.0f} MiB   compiled in {first[name]['compiling']:.1f} s"
        )
    if len(sides) == 2:
        wall, cpu = (middle[key]["bayeskit"] / middle[key]["neural-tangents"] for key in ("wall", "cpu"))
        apart = max(abs(middle[k]["bayeskit"] / middle[k]["neural-tangents"] - 1) for k in ("nngp", "ntk"))
        print(f"  ratio {wall:.2f} wall, {cpu:.2f} CPU; values differ by {apart:.0e}")


def growth(tasks: list[Task], name: str) -> None:
    """Print how time grows with one number."""
    print(f"\n{name:>8}   s wall    s CPU")
    for task in tasks:
        found = min((answer(task) for _ in range(2)), key=lambda x: x["wall"])
        print(f"{task[name]:8d} {found['wall']:8.3f} {found['cpu']:8.3f}")


def stream(count: int, bits: int, folder: Path) -> None:
    """Write both kernels to files, print time and memory, and remove them."""
    function, x = kernel("dense", 3), inputs("dense", count, bits)
    paths = folder / "nngp.npy", folder / "ntk.npy"
    begin = time.perf_counter()
    function.save(x, nngp=paths[0], ntk=paths[1])
    seconds = time.perf_counter() - begin
    rows = slice(count // 2, count // 2 + 2)
    expected = function.both(x[rows], x).ntk
    found = torch.from_numpy(np.load(paths[1], mmap_mode="r")[rows].copy())
    apart = float((found - expected).abs().max() / expected.abs().max())
    size = sum(path.stat().st_size for path in paths) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count} inputs, float{bits}: {seconds:.1f} s, {size:.2f} GB in two files, rows differ by {apart:.0e}")
    print(f"peak of memory {peak:.0f} MiB, which counts pages of the files that the system keeps while it has room")
    for path in paths:
        path.unlink()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the interpreter of an environment with neural-tangents")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, nargs="*", default=[64, 32], choices=[64, 32])
    parser.add_argument("--networks", nargs="*", default=["dense", "conv"], choices=["dense", "conv"])
    parser.add_argument("--growth", type=int, nargs="*", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--stream", type=int, help="write kernels of so many inputs to files, and nothing else")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.answer:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
        return
    if options.stream:
        for bits in options.bits:
            stream(options.stream, bits, options.folder)
        return
    for network in options.networks:
        for bits in options.bits:
            count = options.count if network == "dense" else options.images
            compare(options, {"network": network, "depth": 3, "count": count, "bits": bits})
    growth([{"network": "dense", "depth": 3, "count": count, "bits": 64} for count in options.growth], "count")
    growth([{"network": "dense", "depth": depth, "count": 2000, "bits": 64} for depth in options.depths], "depth")


if __name__ == "__main__":
    main()
