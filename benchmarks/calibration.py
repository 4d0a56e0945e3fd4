"""Measure whether the error bars of the evidence estimators are right.

Prints, for each estimator on linreg10, the standard deviation of z = (estimate - exact) /
standard error over replicates (ideally 1) and the coverage of the 95 % interval. Bridge
sampling is shown on draws of our sampler and on autoregressive draws of known
autocorrelation, independent ones included; path sampling and stepping stone on ladders without and with
exchange. `smc_calibration.py` and `nested_calibration.py` do the same for those.

    python benchmarks/calibration.py --replicates 200 --jobs 2
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import pandas as pd

from bayeskit.inference.evidence._calibration import SMALL, calibrate

DEFAULT = ("bridge_sampling", "modified_path_sampling", "stepping_stone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="linreg10")
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    common = {"num_replicates": arguments.replicates, "seed": arguments.seed, "num_jobs": arguments.jobs}
    tables = [calibrate(DEFAULT, arguments.case, **common).to_pandas().assign(draws="Hamiltonian Monte Carlo")]
    exchanging = calibrate(
        ("modified_path_sampling", "stepping_stone"), arguments.case, budget=replace(SMALL, exchange=True), **common
    )
    tables.append(exchanging.to_pandas().assign(draws="parallel tempering"))
    if arguments.case == "linreg10":
        for rho in (0.0, 0.5, 0.9):
            result = calibrate("bridge_sampling", "linreg10", correlation=rho, **common)
            tables.append(result.to_pandas().assign(draws=f"autoregressive {rho}"))
    table = pd.concat(tables, ignore_index=True)
    columns = ["draws", *[c for c in table.columns if c != "draws"]]
    print(table[columns].to_string(index=False, float_format=lambda x: f"{x:.4f}"))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
