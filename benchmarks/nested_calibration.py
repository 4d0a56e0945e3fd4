"""Measure whether the error bars of nested sampling are right on problems with known evidence.

Prints, for each problem, mean and standard deviation of z = (estimate - exact) / standard error
over replicates (ideally 0 and 1), the coverage of the 95 % interval, the share of runs that
were trusted, and what a run costs.

    python benchmarks/nested_calibration.py --replicates 50 --jobs 2
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import NamedTuple

import numpy as np
import pandas as pd

from bayeskit._logdensity.target import Target
from bayeskit.exact import ExactCase, eggbox, gaussian_shells, linear_regression, spike_and_slab
from bayeskit.inference.evidence import nested_sampling
from bayeskit.parallel import map_tasks

CASES = {
    "linreg10": linear_regression,
    "shells2": functools.partial(gaussian_shells, 2),
    "shells10": functools.partial(gaussian_shells, 10),
    "eggbox": eggbox,
    "spike_and_slab": spike_and_slab,
}
DEFAULT = ["linreg10", "shells2", "shells10", "eggbox"]


class Replicate(NamedTuple):
    """One run to make."""

    case: str
    seed: int
    num_live: int
    num_slice_steps: int | None


@functools.cache
def prepared(name: str) -> tuple[ExactCase, Target]:
    """One target a process, whose compiled graph serves every replicate."""
    case = CASES[name]()
    target = case.target()
    target.compile = True
    return case, target


def replicate(task: Replicate) -> tuple[float, float, float, float, float]:
    case, target = prepared(task.case)
    z = nested_sampling(target, num_live=task.num_live, num_slice_steps=task.num_slice_steps, seed=task.seed)
    return z.log_evidence - case.log_evidence, z.standard_error, z.num_evaluations, z.seconds, z.trusted


def summary(name: str, results: list[tuple[float, float, float, float, float]]) -> dict[str, float | str]:
    off, error, evaluations, seconds, trusted = np.array(results).T
    z = off / error
    return {
        "case": name,
        "replicates": len(z),
        "mean_z": z.mean(),
        "sd_of_z": z.std(ddof=1),
        "largest_z": np.abs(z).max(),
        "coverage_95": (np.abs(z) <= 1.959963984540054).mean(),
        "mean_standard_error": error.mean(),
        "trusted": trusted.mean(),
        "evaluations": evaluations.mean(),
        "seconds": np.median(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=DEFAULT)
    parser.add_argument("--replicates", type=int, default=50)
    parser.add_argument("--live", type=int, default=200)
    parser.add_argument("--slice-steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    rows = []
    for name in arguments.cases:
        tasks = [
            Replicate(name, arguments.seed + i, arguments.live, arguments.slice_steps)
            for i in range(arguments.replicates)
        ]
        rows.append(summary(name, map_tasks(replicate, tasks, num_jobs=arguments.jobs, description=name)))
        print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1, float_format="%.3f"), flush=True)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
