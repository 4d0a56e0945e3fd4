"""Long runs: memory, cost of checkpoints, clocks that jump and disks that fill up and empty again.

    python benchmarks/long_runs.py [--steps 100000] [--calls sample fit]

Each call runs for so many steps in a process of its own, with a checkpoint every half second. The table has the
growth of resident memory from the second to the ninth tenth of the run, less the rows that the run keeps; the
milliseconds that a checkpoint took, as medians of the first and the last tenth of them; and whether the same run with a
clock that jumps an hour back and forth, and with a disk that is full for a third of its checkpoints, gives the same
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

import bayeskit as bk  # noqa: E402
from bayeskit import exact  # noqa: E402
from bayeskit._core import folders as folders  # noqa: E402

#: Growth of memory that counts as none, in MiB: allocators keep some.
_FLAT = 20.0
_EVERY = 0.5


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_sample(steps: int, checkpoint: Path) -> tuple[torch.Tensor, int]:
    """Sample a normal posterior; return what must not change, and the bytes of the rows kept."""
    target = exact.get("linreg10").target()
    settings = {"checkpoint": checkpoint, "checkpoint_seconds": _EVERY, "progress": False}
    draws = bk.sample(target, 4, 500, steps, **settings)
    rows = draws.unconstrained
    return rows, rows.numel() * (rows.element_size() + 8)


def run_fit(steps: int, checkpoint: Path) -> tuple[torch.Tensor, int]:
    """Train a network of one layer; return its weights, and the bytes of the losses kept."""
    import pyro
    import pyro.distributions as dist

    from bayeskit.inference.objectives import ELBO

    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.zero_()

    def model(x: torch.Tensor) -> None:
        pyro.module("layer", layer)
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(layer(x)[:, 0] + z, 1.0), obs=x[:, 0])

    def guide(x: torch.Tensor) -> None:
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    bk.fit(
        model,
        guide,
        ELBO(),
        data,
        batch_size=64,
        num_epochs=steps,
        checkpoint=checkpoint,
        checkpoint_seconds=_EVERY,
        progress=False,
    )
    return layer.weight.detach(), 32 * steps


def run_topologies(steps: int, checkpoint: Path) -> tuple[torch.Tensor, int]:
    """Search the topologies of four taxa; return the log likelihoods, and the bytes of the rows kept."""
    from bayeskit.models.phylogenetics import Alignment
    from bayeskit.models.phylogenetics.workflows import infer_topologies

    alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCGGT", "C": "AGCTAGA", "D": "AGCTACA"})
    found = infer_topologies(
        alignment,
        num_warmup=500,
        num_samples=steps,
        num_temperatures=3,
        checkpoint=checkpoint,
        checkpoint_seconds=_EVERY,
        progress=False,
    )
    return found.log_likelihood, steps * 2 * (5 * 16 + 8 * 8)


CALLS: dict[str, Callable[[int, Path], tuple[torch.Tensor, int]]] = {
    "sample": run_sample,
    "fit": run_fit,
    "infer_topologies": run_topologies,
}


@contextlib.contextmanager
def memory_in_tenths() -> Iterator[list[float]]:
    """Give a list, which holds in the end the least resident memory in each tenth of the time, in MiB."""
    readings, least, done = list[float](), list[float](), threading.Event()

    def read() -> None:
        while not done.wait(0.02):
            readings.append(resident())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield least
    finally:
        done.set()
        thread.join()
        count = len(readings) / 10
        least += [min(readings[int(k * count) : int((k + 1) * count)], default=math.nan) for k in range(10)]


@contextlib.contextmanager
def jumping_clock() -> Iterator[None]:
    """Let the clock of the calendar jump an hour back or forth at each look."""
    looks, now = iter(range(10**9)), time.time
    with mock.patch.object(time, "time", lambda: now() + 3600 * (-1) ** next(looks)):
        yield


@contextlib.contextmanager
def filling_disk() -> Iterator[list[int]]:
    """Let every third of the checkpoints after the first find a full disk; give the list of those refused."""
    calls, refused, sync = iter(range(10**9)), list[int](), os.fsync

    def full(file: int) -> None:
        call = next(calls)
        if call % 3 == 2:
            refused.append(call)
            raise OSError(28, "No space left on device")
        sync(file)

    with mock.patch.object(os, "fsync", full), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield refused


def measure(name: str, steps: int, answers: Any) -> None:
    """Run one call in all its circumstances and put a row of the table into `answers`."""
    torch.set_num_threads(1)
    seconds: list[float] = []
    write = folders.write_atomically

    def timed(path: str | Path, data: bytes) -> None:
        begin = time.monotonic()
        write(path, data)
        seconds.append(time.monotonic() - begin)

    with tempfile.TemporaryDirectory() as folder:
        # Who wrote the function down under its name calls it by that.
        from bayeskit._core import storage as storage

        with mock.patch.object(storage, "write_atomically", timed), memory_in_tenths() as memory:
            plain, kept = CALLS[name](steps, Path(folder) / "plain")
        tenth = max(1, len(seconds) // 10)
        early, late = statistics.median(seconds[:tenth]), statistics.median(seconds[-tenth:])
        # The bytes of a file come and go with it, so the least of a tenth counts.
        growth = memory[8] - memory[1] - 0.7 * kept / 2**20
        fewer = steps // 10
        short, _ = CALLS[name](fewer, Path(folder) / "short")
        with jumping_clock():
            jumped, _ = CALLS[name](fewer, Path(folder) / "jumped")
        with filling_disk() as refused:
            filled, _ = CALLS[name](fewer, Path(folder) / "filled")
    same = torch.equal(short, jumped), torch.equal(short, filled)
    answers.put((name, len(seconds), growth, early, late, *same, len(refused)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    arguments = parser.parse_args()
    print("| call | checkpoints | growth, MiB | ms a checkpoint, early | late | clock that jumps | full disk |")
    print("|---|---:|---:|---:|---:|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for name in arguments.calls:
        answers = spawn.Queue()
        process = spawn.Process(target=measure, args=(name, arguments.steps, answers))
        process.start()
        name, number, growth, early, late, clock, disk, refused = answers.get()
        process.join()
        flat = "flat" if growth < _FLAT else "GROWS"
        words = ["same" if one else "DIFFERS" for one in (clock, disk)]
        times = f"{1e3 * early:.1f} | {1e3 * late:.1f}"
        print(f"| {name} | {number} | {growth:.1f} ({flat}) | {times} | {words[0]} | {words[1]}, {refused} refused |")


if __name__ == "__main__":
    main()
