"""Tools in turns on one problem with a known evidence: what they cost, how far off they are, whether they know it.

Shared by `evidence_peers.py` and `tree_evidence_peers.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from peer_process import PeerProcess
from scipy import stats

Clock = Literal["wall", "processor"]
#: Of the first run, which is not among the replicates.
FIRST_SEED = 10_000
#: Rounds in which every tool takes part, however slow.
LEAST_ROUNDS = 3


@dataclass
class Tool:
    """A tool with its settings, and what it has answered so far.

    Attributes
    ----------
    name : str
    command : sequence of str
        Starts its driver.
    settings : dict
        Passed with every task.
    ours : bool
    """

    name: str
    command: Sequence[str]
    settings: Mapping[str, Any]
    ours: bool = False
    version: str = ""
    start_up: float = math.nan
    first: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    used: float = 0.0

    def seconds(self, run: Mapping[str, Any], clock: Clock) -> float:
        """Return what a run took, without what the tool itself says to be preparation."""
        name = "seconds" if clock == "wall" else "processor_seconds"
        return run[name] - run.get("preparing", {}).get(name, 0.0)


def single_runs(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an answer as one, or for several independent estimates as that many, each with its part of the time."""
    estimates = answer.get("estimates")
    if estimates is None:
        return [answer]
    shares = {name: answer[name] / len(estimates) for name in ("seconds", "processor_seconds")}
    return [answer | shares | {"log_evidence": value, "standard_error": None} for value in estimates]


def number(value: float | None) -> float:
    """Return a number for what may be missing."""
    return math.nan if value is None else float(value)


def take_turns(
    tools: Sequence[Tool],
    problem: Mapping[str, Any],
    reference: float,
    reference_error: float,
    rounds: int,
    limit: float,
) -> None:
    """Start every tool, let each make a first run, then one a round; print each run.

    Where compiled code was kept, the first run is made again by another process, which finds it.
    A tool that has used up `limit` seconds leaves after the round in which it has, but not before the third.
    """
    processes: dict[str, PeerProcess] = {}
    try:
        for tool in tools:
            processes[tool.name] = process = PeerProcess(tool.command)
            tool.version, tool.start_up = process.about["version"], process.start_up
            task = {"problem": problem, "settings": tool.settings, "seed": FIRST_SEED}
            tool.first = process.ask(task)
            tool.again, times = tool.first, f"{tool.first['seconds']:.2f} s"
            if any(Path(process.caches).iterdir()):
                another = PeerProcess(tool.command, before=process)
                try:
                    tool.again = another.ask(task)
                finally:
                    another.close()
                times += f", {tool.again['seconds']:.2f} s where the code is kept"
            print(f"{tool.name}: {tool.version}, first run {times}", flush=True)
        for seed in range(1, rounds + 1):
            for tool in tools:
                if seed > LEAST_ROUNDS and tool.used > limit:
                    continue
                begin = time.perf_counter()
                answer = processes[tool.name].ask({"problem": problem, "settings": tool.settings, "seed": seed})
                tool.used += time.perf_counter() - begin
                for run in single_runs(answer):
                    run |= {"tool": tool.name, "problem": problem["name"], "seed": seed}
                    run["standard_error"] = number(run["standard_error"])
                    run["error"] = run["log_evidence"] - reference
                    run["z"] = run["error"] / math.hypot(run["standard_error"], reference_error)
                    tool.runs.append(run)
                    print(describe(run), flush=True)
    finally:
        for process in processes.values():
            process.close()


def describe(run: Mapping[str, Any]) -> str:
    """Return one run as a line."""
    warned = "  " + "; ".join(run["warnings"]) if run.get("warnings") else ""
    return (
        f"  round {run['seed']:>3}  {run['tool']:<34} {run['seconds']:8.2f} s  {run['log_evidence']:.5f}  error "
        f"{run['error']:+.5f}  claimed {run['standard_error']:.5f}  z {run['z']:+.2f}{warned}"
    )


def summarise(tool: Tool, common: float, clock: Clock) -> dict[str, Any]:
    """Return a row: times, errors, calibration and the cost of an error of `common`.

    `first s`, `again s` and `s` are by the chosen clock, `s` without preparation; `whole s` and `cpu s` are with it.
    `again s` is the first run of a process that finds the compiled code of another. The cost grows with the square of
    the root mean square error about the reference, so that a biased tool is not taken for a precise one; what the
    tool claims does not enter.
    """
    runs = [run for run in tool.runs if math.isfinite(run["log_evidence"])]
    errors = np.array([run["error"] for run in runs])
    z = np.array([run["z"] for run in runs])
    z = z[np.isfinite(z)]
    rms = float(np.sqrt(np.mean(errors**2))) if len(runs) else math.nan
    seconds = statistics.median(tool.seconds(run, clock) for run in tool.runs)
    first, again = (run["seconds" if clock == "wall" else "processor_seconds"] for run in (tool.first, tool.again))
    cost = seconds * (rms / common) ** 2
    low, high = stats.chi2.ppf([0.025, 0.975], max(len(runs), 1)) / max(len(runs), 1)
    return {
        "tool": tool.name,
        "runs": len(runs),
        "failed": len(tool.runs) - len(runs),
        "start-up s": tool.start_up,
        "first s": first,
        "again s": again,
        "whole s": statistics.median(run["seconds"] for run in tool.runs),
        "cpu s": statistics.median(run["processor_seconds"] for run in tool.runs),
        "s": seconds,
        "mean error": float(errors.mean()) if len(runs) else math.nan,
        "sd": float(errors.std(ddof=1)) if len(runs) > 1 else math.nan,
        "rms error": rms,
        "claimed": statistics.median(run["standard_error"] for run in tool.runs),
        "sd of z": float(z.std(ddof=1)) if len(z) > 1 else math.nan,
        "in 95 %": float(np.mean(np.abs(z) <= 1.96)) if len(z) else math.nan,
        "trusted": float(np.mean([run["trusted"] for run in tool.runs])) if tool.ours else math.nan,
        "cost": cost,
        "from": cost / high,
        "to": cost / low,
        "cost, first": cost + max(first - seconds, 0.0),
        "cost, again": cost + max(again - seconds, 0.0),
    }


def tabulate(tools: Sequence[Tool], common: float, clock: Clock) -> pd.DataFrame:
    """Return a row a tool."""
    return pd.DataFrame([summarise(tool, common, clock) for tool in tools])


def show(table: pd.DataFrame) -> None:
    """Print a table with four significant digits."""
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"), flush=True)


def ratios(table: pd.DataFrame, ours: Sequence[str]) -> pd.DataFrame:
    """Return the cost of each of our methods over that of the cheapest peer, with a 95 % interval.

    Which peer is the cheapest is decided by these same runs, to the peers' advantage.
    """
    peers = table[~table["tool"].isin(list(ours))]
    best = peers.loc[peers["cost"].idxmin()]
    rows = []
    for _, mine in table[table["tool"].isin(list(ours))].iterrows():
        ratio = mine["cost"] / best["cost"]
        # The ratio of two mean squares of normal errors is distributed as F.
        low, high = stats.f.ppf([0.025, 0.975], mine["runs"], best["runs"]) if mine["runs"] else (math.nan, math.nan)
        rows.append(
            {
                "method": mine["tool"],
                "best peer": best["tool"],
                "ratio": ratio,
                "from": ratio / high,
                "to": ratio / low,
                "ratio, our first run": mine["cost, first"] / best["cost"],
                "ratio, code kept": mine["cost, again"] / best["cost"],
                "at most 1/3": "yes" if ratio <= 1 / 3 else "no",
                "sd of z": mine["sd of z"],
            }
        )
    return pd.DataFrame(rows)
