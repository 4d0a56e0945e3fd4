"""What evidence costs for the same error: our methods beside R bridgesampling, dynesty and PyMC's SMC, in one run.

Usage::

    python benchmarks/evidence_peers.py --data DIR [--r Rscript] [--dynesty-python PATH] [--pymc-python PATH]
        [--rounds 20] [--set num_chains=16 ...] [--methods NAME ...]

`DIR` holds `linreg10.csv` and `pima_fw_model1.csv` (column 0 the response, the others the design). A peer takes part
where its interpreter is named: an R with bridgesampling, coda and jsonlite, a Python with dynesty and SciPy, a Python
with PyMC. Every tool, ours as well, runs in a process of its own, on one thread, in turns: one run of each a round.

Printed are the time until a tool is imported, of its first run (tracing and compilation included), of the first run
of another process that finds the code compiled before, and of a later one; its error against the known evidence, what
it claims, and whether the two agree (standard deviation of z, ideally 1). Then the cost of a common error: seconds x
(root mean square error / 0.01)^2, with a 95 % interval, and ours over the cheapest peer's, to be at most one third.
Time of import never counts, nor what PyMC spends on building its kernel. Our posterior draws count, and R's:
random-walk chains in matrix form, started and scaled by the Laplace approximation.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from evidence_rounds import Tool, ratios, show, tabulate, take_turns  # noqa: E402

from bayeskit.inference import evidence  # noqa: E402

HERE = Path(__file__).resolve().parent
#: File, standard deviation of the prior and of the noise (None: logistic), log evidence and its error.
PROBLEMS = {
    "linreg10": ("linreg10.csv", 2.0, 1.0, -94.08450741106007, 0.0),
    "Pima M1": ("pima_fw_model1.csv", 10.0, None, -257.232588303, 1e-9),
}
#: Ours.
METHODS = (
    "bridge_sampling",
    "warp_bridge_sampling",
    "generalised_stepping_stone",
    "laplace_importance_sampling",
    "smc",
    "nested_sampling",
)
#: Only to see that everything works.
SMALL_BUDGET = {"num_chains": 16, "num_warmup": 100, "num_samples": 100, "num_particles": 32, "num_replicates": 8} | {
    "num_temperatures": 10,
    "ladder_chains": 4,
    "ladder_samples": 100,
    "num_live": 50,
}


def read_problem(folder: Path, name: str) -> dict[str, Any]:
    """Return a problem as it is sent to every tool."""
    file, prior_sd, noise_sd, *_ = PROBLEMS[name]
    table = np.loadtxt(folder / file, delimiter=",", skiprows=1)
    data = {"design": table[:, 1:].tolist(), "response": table[:, 0].tolist()}
    return {"name": name, "prior_sd": prior_sd, "noise_sd": noise_sd, **data}


def budget_of(pairs: list[str], small: bool) -> dict[str, Any]:
    """Return the fields of `evidence.Budget` that were given as NAME=VALUE, each in its type."""
    defaults = evidence.Budget().words()
    found: dict[str, Any] = {k: v for k, v in SMALL_BUDGET.items() if k in defaults} if small else {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in defaults:
            raise SystemExit(f"--set {pair}: a budget has {', '.join(defaults)}")
        kind = type(defaults[name])
        found[name] = value.lower() == "true" if kind is bool else kind(value)
    return found


def our_tools(methods: list[str], budget: dict[str, Any]) -> list[Tool]:
    """Return a tool for each of these methods."""
    command = [sys.executable, str(HERE / "bayeskit_evidence_driver.py")]
    return [Tool(m.name, command, {"method": m.name, "budget": budget}, ours=True) for m in evidence.select(methods)]


def peers(options: argparse.Namespace) -> list[Tool]:
    """Return the peers whose interpreters were named."""
    small, found = options.small, []
    if options.r:
        draws = {"chains": options.r_chains, "draws": (1000 if small else 10_000) // options.r_chains}
        for method in ("normal", "warp3"):
            settings = {**draws, "thin": 4, "warmup": 200, "method": method}
            command = [options.r, str(HERE / "bridgesampling_driver.R")]
            found.append(Tool(f"R bridgesampling, {method}", command, settings))
    if options.dynesty_python:
        for sample in options.dynesty_samples:
            settings = {"live": 50 if small else 500, "sample": sample, "remaining": 0.01}
            command = [options.dynesty_python, str(HERE / "dynesty_driver.py")]
            found.append(Tool(f"dynesty, {sample}", command, settings))
    if options.pymc_python:
        settings = {"draws": 200 if small else 2000, "chains": 4, "cores": options.pymc_cores}
        found.append(Tool("PyMC SMC", [options.pymc_python, str(HERE / "pymc_driver.py")], settings))
    return found


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--r", help="an Rscript with bridgesampling")
    parser.add_argument("--r-chains", type=int, default=4, help="of its random walk; 10,000 draws in all")
    parser.add_argument("--dynesty-python")
    parser.add_argument("--dynesty-samples", nargs="+", default=["auto", "rslice"])
    parser.add_argument("--pymc-python")
    parser.add_argument("--pymc-cores", type=int, default=1, help="for its four chains; all else has one core")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="ours, by their names in the registry")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="fields of our evidence.Budget")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a tool skips further rounds")
    parser.add_argument("--error", type=float, default=0.01, help="the common error whose cost is compared")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="the seconds that are compared")
    parser.add_argument("--small", action="store_true", help="tiny settings, to see that everything works")
    parser.add_argument("--output", type=Path, help="a CSV file for every run")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.problems:
        reference, reference_error = PROBLEMS[name][3:]
        tools = our_tools(options.methods, budget_of(options.set, options.small)) + peers(options)
        print(f"\n{name}: log evidence {reference:.6f}, its error {reference_error}")
        problem = read_problem(options.data, name)
        take_turns(tools, problem, reference, reference_error, options.rounds, options.limit)
        table = tabulate(tools, options.error, options.clock)
        print(f"\n{name}, seconds by the {options.clock} clock, cost for an error of {options.error}")
        show(table)
        mine = [tool.name for tool in tools if tool.ours]
        if mine and len(mine) < len(tools):
            print(f"\n{name}, our cost over that of the best peer")
            show(ratios(table, mine))
        rows += [run for tool in tools for run in tool.runs]
    if options.output:
        pd.DataFrame(rows).drop(columns=["warnings"], errors="ignore").to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
