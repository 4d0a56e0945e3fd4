"""Are the error bars right? Every method on every exact case, many times on fresh draws.

For each pair it prints bias, spread, the standard error claimed, the standard deviation of z = (estimate - exact) /
standard error (ideally 1), the coverage of the 95 % interval, the share trusted, and false comfort: the share of
replicates more than three standard errors off that were trusted.

    python benchmarks/evidence_calibration.py --replicates 200 --jobs 2 --out DIR [--cases NAMES] [--methods NAMES]

Replicates are kept in DIR, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import pandas as pd
import torch

from bayeskit.errors import BayeskitWarning
from bayeskit.inference import evidence
from bayeskit.workflows import calibration_in_folder
from bayeskit.workflows.exam import selected_cases

BUDGET = evidence.Budget(
    num_chains=16,
    num_warmup=200,
    num_samples=250,
    ladder_chains=8,
    ladder_warmup=100,
    ladder_samples=150,
    num_particles=32,
    num_replicates=16,
    num_live=100,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default="all", help="names separated by commas")
    parser.add_argument("--methods", default="all", help="names separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = "all" if options.methods == "all" else options.methods.split(",")
    tables = []
    for case in selected_cases("all" if options.cases == "all" else options.cases.split(",")):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BayeskitWarning)  # what methods say against themselves is counted
            found = calibration_in_folder(
                methods,
                case,
                options.out / case,
                options.replicates,
                budget=BUDGET,
                seed=options.seed,
                num_jobs=options.jobs,
            )
        tables.append(found.to_pandas())
        print(tables[-1].to_string(index=False, float_format=lambda x: f"{x:.4f}"))
        print(f"{case}: {time.perf_counter() - begin:.0f} s\n", flush=True)
    table = pd.concat(tables, ignore_index=True)
    table.to_csv(options.out / "calibration.csv", index=False, float_format="%.6g")
    consistent = table[table["method"].isin([m.name for m in evidence.METHODS.values() if m.kind == "consistent"])]
    narrow = consistent[(consistent["sd_of_z"] < 0.85) | (consistent["sd_of_z"] > 1.2)]
    covered = consistent[(consistent["coverage_95"] < 0.9) | (consistent["coverage_95"] > 0.99)]
    comfort = table[table["false_comfort"] > 0.01]
    for what, rows in (
        ("sd of z outside .85 to 1.2", narrow),
        ("coverage outside 90 to 99 %", covered),
        ("false comfort above 1 %", comfort),
    ):
        print(f"{what}: {len(rows)} of {len(consistent)} consistent pairs")
        for _, row in rows.iterrows():
            print(
                f"  {row['case']} {row['method']}: sd of z {row['sd_of_z']:.2f}, coverage {row['coverage_95']:.3f}, "
                f"trusted {row['trusted']:.2f}, false comfort {row['false_comfort']:.3f}"
            )


if __name__ == "__main__":
    main()
