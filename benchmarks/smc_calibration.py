"""Tempered sequential Monte Carlo: what its evidence costs, how far it is off, and whether its error bars are right.

First single runs at default settings on linreg10 and, where --data names the folder with pima_fw_model1.csv, on
Pima M1; then many small runs on linreg10, of which it prints the standard deviation of z = (estimate - exact) /
standard error (ideally 1) and the coverage of the 95 % interval.

    python benchmarks/smc_calibration.py --replicates 200 --jobs 2 --data DIR
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit.inference.evidence import smc
from bayeskit.inference.samplers import sample_smc
from bayeskit.parallel import map_tasks

PIMA_M1 = -257.23232
SMALL = {"num_particles": 32, "num_replicates": 16, "num_pilot_particles": 256, "ess_threshold": 0.95}


def logistic_regression(design: Tensor, response: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros_like(design[0]), 10.0).to_event(1))
    with pyro.plate("observations", len(response)):
        pyro.sample("y", dist.Bernoulli(logits=design @ b), obs=response)


@dataclass(frozen=True)
class Task:
    """One run; ``data`` None means linreg10."""

    seed: int
    data: str | None = None
    settings: dict[str, float] = field(default_factory=dict)


def problem(data: str | None) -> tuple[bk.Target, float]:
    if data is None:
        case = bk.exact.get("linreg10")
        return case.target(), case.log_evidence
    table = torch.as_tensor(pd.read_csv(Path(data) / "pima_fw_model1.csv").to_numpy())
    return bk.Target.from_pyro(logistic_regression, table[:, 1:], table[:, 0]), PIMA_M1


def estimate(task: Task) -> dict[str, object]:
    begin = time.monotonic()
    target, truth = problem(task.data)
    run = sample_smc(target, seed=task.seed, progress=False, **task.settings)
    result = smc(target, run)
    return {
        "problem": "linreg10" if task.data is None else "Pima M1",
        "seed": task.seed,
        "error": result.log_evidence - truth,
        "standard_error": result.standard_error,
        "z": (result.log_evidence - truth) / result.standard_error,
        "stages": len(run.beta),
        "gradients": result.num_evaluations,
        "of_pilot": run.pilot_gradients,
        "trusted": result.trusted,
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicates", type=int, default=200, help="small runs on linreg10")
    parser.add_argument("--seeds", type=int, default=5, help="runs at default settings")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", help="folder with pima_fw_model1.csv")
    arguments = parser.parse_args()
    problems = [None] if arguments.data is None else [None, arguments.data]
    tasks = [Task(seed, data) for data in problems for seed in range(arguments.seeds)]
    if tasks:
        table = pd.DataFrame(map_tasks(estimate, tasks, num_jobs=arguments.jobs, description="default settings"))
        print(table.to_string(index=False, float_format=lambda x: f"{x:.4f}"))
    if arguments.replicates:
        begin = time.monotonic()
        tasks = [Task(1000 + i, None, SMALL) for i in range(arguments.replicates)]
        table = pd.DataFrame(map_tasks(estimate, tasks, num_jobs=arguments.jobs, description="calibrating"))
        z = table["z"].to_numpy()
        print(
            f"\nlinreg10, {len(z)} runs of {table['gradients'].mean():.0f} gradients: mean error "
            f"{table['error'].mean():+.4f}, its sd {table['error'].std():.4f}, mean standard error "
            f"{table['standard_error'].mean():.4f}\nmean z {z.mean():+.3f}, sd of z {z.std(ddof=1):.3f}, coverage of "
            f"95 % intervals {np.mean(np.abs(z) <= 1.959964):.3f}, trusted {table['trusted'].mean():.3f}, "
            f"{time.monotonic() - begin:.0f} s"
        )


if __name__ == "__main__":
    main()
