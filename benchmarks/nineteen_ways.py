"""Nineteen ways, and more, to compute the marginal likelihood of a tree topology, over the 42 credible ones of DS1.

For each method it prints the divergence from the frequencies of long Markov chains to the probabilities of the
topologies that its estimates imply, both normalised over the set; the root mean square difference of its estimates from
the reference column and from importance sampling with ten times the draws; how many it trusts; and the median seconds
of one topology, shared draws included. Predictive scores and maxima are compared as if they were log evidence, as in
Fourment et al. (2020), 19 dubious ways to compute the marginal likelihood of a phylogenetic tree topology.

    python benchmarks/nineteen_ways.py --data DIR [--jobs 2] [--trees 42] [--checkpoint DIR] [--slow]

`DIR` holds `DS1.fasta`, `DS1_credible_set.txt` and `DS1_per_topology_reference.csv`. Finished topologies are kept in
the checkpoint folder, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import bayeskit as bk
from bayeskit.errors import BayeskitWarning
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import Alignment, TreeModel, TreeSample
from bayeskit.models.phylogenetics.workflows import compare_topologies
from bayeskit.parallel import map_tasks

BUDGET = evidence.Budget(
    num_chains=32,
    num_warmup=200,
    num_samples=200,
    num_temperatures=50,
    ladder_chains=4,
    ladder_warmup=100,
    ladder_samples=500,
    num_particles=16,
    num_replicates=16,
    num_live=64,
)
#: Runs of their own that take longer than all the others together.
SLOW = ("nested_sampling", "adaptive_smc", "prequential", "thermodynamic_integration")


@dataclass(frozen=True)
class Task:
    """One topology."""

    data: str
    tree: int
    methods: tuple[str, ...]
    seed: int


def inputs(data: str) -> tuple[Alignment, TreeSample]:
    folder = Path(data)
    return Alignment.from_file(folder / "DS1.fasta"), TreeSample.from_file(folder / "DS1_credible_set.txt")


def estimate(task: Task) -> dict[str, dict[str, float]]:
    alignment, sample = inputs(task.data)
    target = bk.Target.from_pyro(TreeModel(alignment, sample.trees[task.tree]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayeskitWarning)  # what the methods say against themselves is counted
        found = evidence.compare(target, task.methods, seed=task.seed, budget=BUDGET, progress=False)
    rows = {z.method: (z.log_evidence, z) for z in found}
    rows |= {score.method: (score.predictive_score, score) for score in found.scores.values()}
    return {
        name: {"value": value, "error": z.standard_error, "trusted": float(z.trusted), "seconds": z.seconds}
        for name, (value, z) in rows.items()
    }


def divergence(frequencies: torch.Tensor, values: np.ndarray) -> float:
    """KL from the frequencies to the probabilities in proportion to the exponentials of the values."""
    if not np.isfinite(values).all():
        return math.nan
    implied = torch.tensor(values).log_softmax(0)
    return float((frequencies * (frequencies.log() - implied)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trees", type=int, default=42)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default="all", help="names separated by commas")
    parser.add_argument("--slow", action="store_true", help=f"also {', '.join(SLOW)}")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if options.trees < 2:
        parser.error("--trees must be at least 2, to be compared")
    torch.set_num_threads(1)
    names = "all" if options.methods == "all" else options.methods.split(",")
    chosen = [m.name for m in evidence.select(names)]
    if names == "all" and not options.slow:
        chosen = [name for name in chosen if name not in SLOW]
    begin = time.perf_counter()
    tasks = [Task(str(options.data), tree, tuple(chosen), options.seed + tree) for tree in range(options.trees)]
    found = map_tasks(
        estimate, tasks, num_jobs=options.jobs, checkpoint=options.checkpoint, description="weighing topologies"
    )
    reference = pd.read_csv(options.data / "DS1_per_topology_reference.csv").iloc[: options.trees]
    frequencies = torch.tensor(reference["log_srf"].to_numpy()).softmax(0)
    alignment, sample = inputs(str(options.data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayeskitWarning)
        long = compare_topologies(alignment, sample.trees[: options.trees], num_draws=100_000, seed=options.seed)
    truth = long.log_evidence.numpy()
    rows = []
    for name in found[0]:
        values, errors, trusted, seconds = (
            np.array([row[name][part] for row in found]) for part in ("value", "error", "trusted", "seconds")
        )
        z = (values - truth) / np.hypot(errors, long.standard_error.numpy())
        off = values - reference["glis"].to_numpy()
        rows.append(
            {
                "method": name,
                "KL": divergence(frequencies, values),
                "rmse_of_reference": math.sqrt(np.mean(off**2)),
                "rmse_of_long_run": math.sqrt(np.mean((values - truth) ** 2)),
                "mean_error": errors.mean(),
                "trusted": int(trusted.sum()),
                "largest_trusted_z": np.abs(z[trusted > 0]).max() if trusted.any() else math.nan,
                "seconds": np.median(seconds),
            }
        )
    table = pd.DataFrame(rows).sort_values("KL", na_position="last")
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4f}"))
    columns = {"maximum_likelihood": "max_lnL", "maximum_posterior": "max_logpost", "gamma_laplus": "gamma_laplace",
               "gamma_laplus_importance_sampling": "glis"}  # fmt: skip
    for name, column in columns.items():
        print(f"KL of the reference's {column}: {divergence(frequencies, reference[column].to_numpy()):.4f} ({name})")
    print(f"KL of the long run: {divergence(frequencies, truth):.4f}, largest error {long.standard_error.max():.4f}")
    print(f"{len(tasks)} topologies, {time.perf_counter() - begin:.0f} s with {options.jobs} jobs")


if __name__ == "__main__":
    main()
