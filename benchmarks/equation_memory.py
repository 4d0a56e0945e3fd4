"""Solve equations of up to a million numbers with their gradients, and again with too little memory.

    python benchmarks/equation_memory.py [--runs 100] [--seed 0]

The first table tells memory and seconds by the number of states, which has to grow in proportion; the second how runs
end whose process may take a random part of the memory that they need.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from faults import Attempt, limited_memory

import bayeskit as bk

SIZES = (125_000, 250_000, 500_000, 1_000_000)
KINDS = {"dopri5": (1, 200_000), "rodas5": (20_000, 20)}  # chains, and states of each


def solved(chains: int, size: int, method: str, folder: Path) -> list[Any]:
    """Return whether solution and gradient are right, and the seconds."""
    start = torch.linspace(0.0, 1.0, size, dtype=torch.float64).expand(chains, size)
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    times = torch.tensor([0.0, 0.2], dtype=torch.float64)
    begin = time.monotonic()
    path = bk.ode.solve(lambda t, y, rate: -rate * y, start, times, rate, method=method)
    path[:, -1].sum().backward()
    exact = start * torch.exp(-0.2 * rate.detach())
    off = float((path[:, -1].detach() - exact).abs().max())
    slope = float(rate.grad) / float(-0.2 * exact.sum()) - 1
    return [off < 1e-5 and abs(slope) < 1e-4, time.monotonic() - begin]


def _both(first: Callable[[], Any], second: Callable[[], None]) -> None:
    first()
    second()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{'states':>10}{'MiB':>8}{'bytes a state':>15}{'seconds':>10}  right")
    with TemporaryDirectory() as name:
        folder = Path(name)
        for size in SIZES:
            ending = Attempt(partial(solved, 1, size, "dopri5"), folder, summary=list).end()
            right, seconds = ending.digest or (False, 0.0)
            print(f"{size:10,}{ending.peak / 2**20:8.0f}{ending.peak / size:15.0f}{seconds:10.2f}  {right}", flush=True)
        chance, seen = random.Random(given.seed), Counter[str]()
        for method, (chains, size) in KINDS.items():
            # Python and torch themselves do not withstand that they cannot load their modules.
            small = partial(solved, 2, min(size, 50), method, folder)
            call = partial(solved, chains, size, method)
            need = Attempt(call, folder, small, summary=list).end().peak
            need -= Attempt(partial(solved, 2, min(size, 50), method), folder, summary=list).end().peak
            for _ in range(given.runs // len(KINDS)):
                limit = limited_memory(int(chance.uniform(0.02, 0.98) * need))
                ending = Attempt(call, folder, partial(_both, small, limit), summary=list).end()
                if ending.how == "error":
                    how = "an error of memory" if ending.is_typed else f"another error: {ending.said[0]}"
                elif ending.how == "result":
                    how = "right" if ending.digest[0] else "WRONG"
                else:
                    how = f"CRASH ({ending.how})"
                seen[how] += 1
    print(f"{given.runs} runs with too little memory: " + ", ".join(f"{n} {how}" for how, n in seen.most_common()))
    return int(not set(seen) <= {"right", "an error of memory"})


if __name__ == "__main__":
    sys.exit(main())
