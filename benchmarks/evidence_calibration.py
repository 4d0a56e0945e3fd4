"""Are the error bars right? Every method on every exact case, many times on fresh draws.

For each pair it prints bias, spread, the standard error claimed, the standard deviation of z = (estimate - exact) /
standard error (ideally 1), the coverage of the 95 % interval, the share trusted, and false comfort: the share of
replicates more than three standard errors off that were trusted.

    python benchmarks/evidence_calibration.py --replicates 200 --jobs 2 --out DIR [--cases NAMES] [--methods NAMES]

Replicates and finished cases are kept in DIR, from which the same command goes on; a case whose folder is removed is
run again. `--page docs/tables/calibration.md` writes the tables as a page, and as `docs/tables/calibration.csv` beside
it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import binom, norm

import bayeskit
from bayeskit.errors import BayeskitWarning
from bayeskit.inference import evidence
from bayeskit.workflows import calibration_in_folder
from bayeskit.workflows._exam import selected_cases

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


#: What an answer without any Monte Carlo error claims, that of rounding.
ROUNDING = 1e-9
#: Columns of the page: name, heading and how its numbers are written.
COLUMNS = (
    ("bias", "bias", ".4f"),
    ("sd_of_estimate", "sd", ".4f"),
    ("mean_standard_error", "error it claims", ".4f"),
    ("sd_of_z", "sd of z", ".2f"),
    ("coverage_95", "95 % interval covers", ".3f"),
    ("trusted", "trusted", ".3f"),
    ("false_comfort", "false comfort", ".3f"),
)


def in_short(table: pd.DataFrame, replicates: int) -> list[str]:
    """Return what the pairs come to that are trusted most of the time, and what chance alone would show."""
    trusted = table[(table["trusted"] > 0.5) & (table["mean_standard_error"] > ROUNDING)]
    right = trusted["sd_of_z"].between(0.85, 1.2) & trusted["coverage_95"].between(0.9, 0.99)
    exact = table[(table["trusted"] > 0.5) & (table["mean_standard_error"] <= ROUNDING)]
    of_rounding = " and ".join(f"`{row.method}` on {row.case}" for row in exact.itertuples())
    but = f", not counting {of_rounding}, which are right to rounding" if len(exact) else ""
    comfort = table[table["false_comfort"] > 0.01]
    beyond = math.floor(0.01 * replicates)
    chance = binom.sf(beyond, (replicates * table["trusted"]).round(), 2 * norm.sf(3)).sum()
    named = ", ".join(f"`{row.method}` on {row.case} ({row.false_comfort:.3f})" for row in comfort.itertuples())
    return [
        f"{len(trusted)} pairs of a method and a case are trusted most of the time{but}. Of these, {int(right.sum())} "
        "have a standard deviation of z between 0.85 and 1.2 and intervals that cover in 90 to 99 %.",
        "",
        f"In {len(comfort)} of {len(table)} pairs false comfort exceeds 1 %{': ' + named if named else ''}. By chance "
        f"alone, more than {beyond} of {replicates} replicates would be beyond three errors in {chance:.1f} pairs if "
        "all errors were exact and normal; errors from sixteen replicates, widened by Student's distribution, exceed "
        "three about twice as often as normal ones.",
    ]


def page(table: pd.DataFrame, replicates: int, older: Sequence[str] = ()) -> str:
    """Return the tables of all cases as a Markdown page, which names those that other code has made."""
    heading = ["method", *(name for _, name, _ in COLUMNS)]
    lines = [
        "# Are the error bars right?",
        "",
        f"Every method on the exact cases below, {replicates} times on fresh draws, by "
        "`benchmarks/evidence_calibration.py`, which also says how much each may spend. Numbers are in nats; z is the "
        "estimate less the exact answer over the error that it claims, whose standard deviation should be 1. False "
        "comfort is the share of replicates that were more than three errors off and trusted. A method that is never "
        "trusted says by itself that it does not suit the case. Methods that are not listed do not apply.",
        "",
        *in_short(table, replicates),
    ]
    if older:
        lines += ["", f"Measured before the last change of the code: {', '.join(older)}."]
    for case, rows in table.groupby("case", sort=False):
        lines += ["", f"## {case}", "", f"| {' | '.join(heading)} |", "|---" + "|---:" * len(COLUMNS) + "|"]
        for _, row in rows.iterrows():
            numbers = [format(row[name], form) if math.isfinite(row[name]) else "" for name, _, form in COLUMNS]
            lines.append(f"| `{row['method']}` | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def code() -> str:
    """Return a mark of the code that is measured."""
    files = sorted(Path(bayeskit.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def study(options: argparse.Namespace) -> dict[str, object]:
    """Return what a finished case has to agree in."""
    asked = {"methods": options.methods, "replicates": options.replicates, "seed": options.seed}
    return asked | {"budget": asdict(BUDGET)}


def finished(folder: Path, asked: dict[str, object]) -> tuple[pd.DataFrame, bool] | None:
    """Return the table of a case that was finished by the same study, and whether other code made it."""
    kept = folder / "study.json"
    if not kept.exists():
        return None
    study = json.loads(kept.read_text(encoding="utf-8"))
    by = study.pop("code", "unknown")
    if study != asked:
        return None
    print(f"{folder.name}: finished before" + (f", by other code ({by})" if by != code() else ""), flush=True)
    return pd.read_csv(folder / "calibration.csv"), by != code()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default="all", help="names separated by commas")
    parser.add_argument("--methods", default="all", help="names separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="write the tables as a Markdown page, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = "all" if options.methods == "all" else options.methods.split(",")
    tables, older = [], []
    for case in selected_cases("all" if options.cases == "all" else options.cases.split(",")):
        begin = time.perf_counter()
        done = finished(options.out / case, study(options))
        if done is not None:
            tables.append(done[0])
            older += [case] if done[1] else []
            continue
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
                skip_refused=True,
            )
        tables.append(found.to_pandas())
        (options.out / case / "study.json").write_text(json.dumps(study(options) | {"code": code()}), encoding="utf-8")
        print(tables[-1].to_string(index=False, float_format=lambda x: f"{x:.4f}"))
        print(f"{case}: {time.perf_counter() - begin:.0f} s\n", flush=True)
    table = pd.concat(tables, ignore_index=True)
    table.to_csv(options.out / "calibration.csv", index=False, float_format="%.6g")
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(table, options.replicates, older), encoding="utf-8")
        table.to_csv(options.page.with_suffix(".csv"), index=False, float_format="%.6g")
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
