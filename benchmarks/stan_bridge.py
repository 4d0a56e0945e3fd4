"""Print what R's bridgesampling and bayeskit make of the same draws of Stan programs: values, errors, CPU seconds.

    python benchmarks/stan_bridge.py --data DIR [--r Rscript] [--only NAME ...] [--repetitions 5]

`DIR` has `NAME.stan` and `NAME.json` of posteriordb. R needs rstan, bridgesampling and jsonlite; rstan samples at its
defaults, 4 chains of 1,000 draws, and these draws are read here by `Draws.from_arviz`. `~` becomes `target +=`, because
rstan's log density drops constants otherwise, and arrays are declared as Stan before 2.26 did. Each number is the
median of the repetitions. Seconds are those of the processor: for R of `bridge_sampler` alone, for bayeskit of the
estimate alone and, in a column of its own, with `from_arviz`; compilation is left out on both sides. `z` is the
difference over both errors together.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import pandas as pd

import bayeskit as bk

HERE = Path(__file__).resolve().parent
PROGRAMS = ("eight_schools-eight_schools_noncentered", "arK-arK", "sblrc-blr")
METHODS: dict[str, Callable[..., Any]] = {
    "bridge_sampling": bk.evidence.bridge_sampling,
    "warp_bridge_sampling": bk.evidence.warp_bridge_sampling,
}


def normalised(program: str) -> str:
    """Return the program with `target +=` in place of each sampling statement."""
    distributed = re.compile(r"([\w\[\], :]+?)\s*~\s*(\w+)\((.*)\)\s*;")
    return distributed.sub(r"target += \2_lpdf(\1 | \3);", program)


def of_old_arrays(program: str) -> str:
    """Return the program with the declarations of arrays that Stan had before 2.26."""
    return re.sub(r"array\[([^\]]+)\]\s+(\w+(?:<[^>]*>)?)\s+(\w+)\s*;", r"\2 \3[\1];", program)


def as_arviz(table: pd.DataFrame, target: bk.Target) -> Any:
    """Return draws in R's columns `name` or `name[i]`, one chain after another, as ArviZ has them."""
    chains = int(table["chain"].max())
    values = {}
    for site in target.sites:
        columns = [c for c in table if c == site.name or c.startswith(site.name + "[")]
        x = table[columns].to_numpy().reshape(chains, -1, len(columns))
        values[site.name] = x[..., 0] if columns == [site.name] else x
    return az.from_dict(posterior=values)


def timed(work: Callable[[], Any], repetitions: int) -> tuple[Any, float]:
    """Return what the work gives, and the median of its CPU seconds."""
    seconds = []
    for _ in range(repetitions):
        before = time.process_time()
        found = work()
        seconds.append(time.process_time() - before)
    return found, statistics.median(seconds)


def rows(name: str, folder: Path, rscript: str, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each method."""
    program = normalised((folder / f"{name}.stan").read_text())
    data = json.loads((folder / f"{name}.json").read_text())["data"]
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "program.stan").write_text(of_old_arrays(program))
        (Path(made) / "data.json").write_text(json.dumps(data))
        command = [rscript, str(HERE / "stan_bridge_driver.R"), made, str(repetitions)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        table = pd.read_csv(Path(made) / "draws.csv")
        theirs = json.loads((Path(made) / "found.json").read_text())
    target = bk.Target.from_stan(program, data)
    foreign = as_arviz(table, target)
    draws, reading = timed(lambda: bk.Draws.from_arviz(foreign, target), repetitions)
    found = []
    for method, estimate in METHODS.items():
        estimate(draws)  # which compiles what it needs
        ours, seconds = timed(lambda estimate=estimate: estimate(draws), repetitions)
        their = theirs[method]
        error = math.hypot(ours.standard_error, their["error"])
        found.append(
            {
                "program": name,
                "method": method.removesuffix("_sampling"),
                "R": f"{their['value']:.4f} ± {their['error']:.4f}",
                "bayeskit": f"{ours.log_evidence:.4f} ± {ours.standard_error:.4f}",
                "trusted": ours.trusted,
                "z": round((ours.log_evidence - their["value"]) / error, 2),
                "R s": round(their["seconds"], 3),
                "ours s": round(seconds, 3),
                "with reading": round(seconds + reading, 3),
                "ratio": round((seconds + reading) / their["seconds"], 3),
            }
        )
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--r", default="Rscript")
    parser.add_argument("--only", nargs="*", default=PROGRAMS)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    found = [row for name in given.only for row in rows(name, given.data, given.r, given.repetitions)]
    print(pd.DataFrame(found).to_string(index=False))


if __name__ == "__main__":
    main()
