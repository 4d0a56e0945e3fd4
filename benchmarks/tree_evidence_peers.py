"""The evidence of a fixed topology: our estimators beside MrBayes' stepping stone, in turns in one run.

Usage::

    python benchmarks/tree_evidence_peers.py --data DIR [--mb mb] [--rounds 3] [--set num_chains=16 ...]
        [--methods NAME ...] [--problems primates DS1]

`DIR` holds `DS1.fasta` and `DS1_credible_set.txt`, whose first tree is taken; the primates ship with bayeskit. `mb` is
MrBayes 3.2.7, which takes part where it is named, with Jukes-Cantor, exponential branch lengths of rate 10, the
topology fixed, and stepping stone over 50 temperatures of 1,000,000 generations in all. Every tool runs in a process
of its own, on one thread.

Printed are times, errors and claimed errors as by `evidence_peers.py`; then the time in which MrBayes reaches a
standard deviation of 0.5 between runs, and whether ours is within it, with an error of at most 0.1, three standard
errors of the reference at most.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd  # noqa: E402
from evidence_peers import HERE, budget_of, our_tools  # noqa: E402
from evidence_rounds import Tool, show, tabulate, take_turns  # noqa: E402

from bayeskit.models.phylogenetics import Alignment, Tree, primates  # noqa: E402

#: Log evidence and its error, by importance sampling with many draws.
REFERENCES = {"primates": (-6468.912, 0.004), "DS1": (-7036.538, 0.009)}
METHODS = ("gamma_laplus_importance_sampling", "bridge_sampling", "stepping_stone", "generalised_stepping_stone")
#: Sets of bases as the bits that `Alignment` holds, A=1, C=2, G=4, T=8, by their letters.
LETTERS = "-ACMGRSVTWYHKDBN"
PEER_SPREAD, OUR_ERROR = 0.5, 0.1


def sequences_of(alignment: Alignment) -> dict[str, str]:
    """Return the sequences as MrBayes reads them; what is unknown is a gap."""
    rows = alignment.patterns[:, alignment.site_patterns].tolist()
    return {
        taxon: "".join("-" if bases == 15 else LETTERS[bases] for bases in row)
        for taxon, row in zip(alignment.taxa, rows, strict=True)
    }


def write_fasta(path: Path, sequences: dict[str, str]) -> None:
    """Write sequences for the driver of ours, which then has just what MrBayes has."""
    path.write_text("".join(f">{name}\n{row}\n" for name, row in sequences.items()))


def read_problem(name: str, data: Path | None, folder: Path) -> dict[str, Any]:
    """Return a problem as it is sent to every tool."""
    if name == "primates":
        alignment, tree = primates()
    else:
        if data is None:
            raise SystemExit("DS1 needs --data")
        alignment = Alignment.from_file(data / "DS1.fasta")
        tree = Tree.from_newick((data / "DS1_credible_set.txt").read_text().splitlines()[0].split("\t")[1])
    sequences = sequences_of(alignment)
    write_fasta(folder / f"{name}.fasta", sequences)
    newick = tree.to_newick()
    return {"name": name, "sequences": sequences, "tree": newick, "alignment": str(folder / f"{name}.fasta")}


def verdict(table: pd.DataFrame, tools: list[Tool], reference_error: float) -> pd.DataFrame | None:
    """Return how each of ours stands against the time in which MrBayes reaches its spread."""
    by_name = table.set_index("tool")
    limit = math.nan
    if "MrBayes" in by_name.index:
        peer = by_name.loc["MrBayes"]
        limit = peer["s"] * (peer["sd"] / PEER_SPREAD) ** 2
        error = f"{100 / math.sqrt(2 * max(peer['runs'] - 1, 1)):.0f} %"
        print(f"MrBayes: {int(peer['runs'])} runs of {peer['s']:.1f} s, sd {peer['sd']:.3f} (known to about {error}),")
        print(f"so that a standard deviation of {PEER_SPREAD} takes {limit:.1f} s\n")
    rows = []
    for tool in tools:
        if tool.ours:
            mine = by_name.loc[tool.name]
            z = [run["error"] / math.hypot(run["standard_error"], reference_error) for run in tool.runs]
            largest = max((abs(value) for value in z), default=math.nan)
            within = mine["first s"] <= limit
            rows.append(
                {
                    "method": tool.name,
                    "first s": mine["first s"],
                    "again s": mine["again s"],
                    "s": mine["s"],
                    "over MrBayes": mine["s"] / limit,
                    "claimed": mine["claimed"],
                    "rms error": mine["rms error"],
                    "largest |z|": largest,
                    f"error <= {OUR_ERROR}": "yes" if mine["claimed"] <= OUR_ERROR else "no",
                    "|z| <= 3": "yes" if largest <= 3 else "no",
                    "in time, compiled too": "-" if math.isnan(limit) else "yes" if within else "no",
                }
            )
    return pd.DataFrame(rows) if rows else None


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--mb", help="the program mb of MrBayes")
    parser.add_argument("--generations", type=int, default=1_000_000, help="of a run of MrBayes")
    parser.add_argument("--runs", type=int, default=2, help="of MrBayes in one round, one after the other")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="ours, by their names in the registry")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="fields of our evidence.Budget")
    parser.add_argument("--problems", nargs="+", default=list(REFERENCES), choices=list(REFERENCES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a tool skips further rounds")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="the seconds that are compared")
    parser.add_argument("--small", action="store_true", help="tiny settings, to see that everything works")
    parser.add_argument("--output", type=Path, help="a CSV file for every run")
    options = parser.parse_args()
    all_runs: list[dict[str, Any]] = []
    for name in options.problems:
        reference, reference_error = REFERENCES[name]
        tools = our_tools(options.methods, budget_of(options.set, options.small))
        if options.mb:
            settings = {"generations": 20_000 if options.small else options.generations, "steps": 50}
            settings |= {"runs": options.runs, "sample_every": 100 if settings["generations"] >= 500_000 else 10}
            command = [sys.executable, str(HERE / "mrbayes_driver.py"), options.mb]
            tools.append(Tool("MrBayes", command, settings))
        print(f"\n{name}: log evidence {reference}, its error {reference_error}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            problem = read_problem(name, options.data, Path(folder))
            take_turns(tools, problem, reference, reference_error, options.rounds, options.limit)
        table = tabulate(tools, OUR_ERROR, options.clock)
        print(f"\n{name}, seconds by the {options.clock} clock, cost for an error of {OUR_ERROR}")
        show(table)
        print()
        found = verdict(table, tools, reference_error)
        if found is not None:
            show(found)
        all_runs += [run for tool in tools for run in tool.runs]
    if options.output:
        pd.DataFrame(all_runs).drop(columns=["warnings"], errors="ignore").to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
