"""Damaged files, thousands of them: which end in foreign exceptions, hang, or take the memory.

python benchmarks/fuzz.py --cases 10000 --seed 1 [--kinds alignments ...] [--out FILE]

Cases run in worker processes, which are killed where a case takes more than ten seconds. ``--kinds`` takes names of
kinds and their beginnings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path

import fuzz_files

__all__ = ["main", "run"]

SECONDS = 10.0
"""Time of the processor that a case may take; it may wait ten times as long for it."""

START_SECONDS = 120.0
"""Time of a valid call, and of the first case of a kind in a process, which makes its valid call or file."""

GROWTH = 200 * 2**20
"""Bytes by which a case may grow its process."""

LIMIT = 4 * 2**30
"""Bytes that a process may have."""

CASES_OF_A_WORKER = 400
COLUMNS = ("cases", "fine", "foreign exceptions", "hangs", "growth", "changed numbers", "not covered")


def _memory() -> int:
    """Return the greatest number of bytes that the process had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(channel: Connection) -> None:
    """Run cases that come in, and send what they are found to be."""
    import resource

    import torch

    os.environ["TQDM_DISABLE"] = "1"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))  # a case that wants more fails alone
    known: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        while True:
            kind, seed = channel.recv()
            fresh, before = kind not in known, _memory()
            known.add(kind)
            try:
                failure = fuzz_files.run_case(kind, seed, Path(folder))
                if failure is not None:
                    failure = fuzz_files.shrink(kind, seed, Path(folder))
            except Exception as error:
                failure = f"{kind}, seed {seed}: {type(error).__name__}: {error}"
            grown = _memory() - before
            if failure is None and grown > GROWTH and not fresh:
                failure = f"{kind}, seed {seed}: growth of {grown / 2**20:.0f} MiB"
            channel.send(failure)


def _column(failure: str | None) -> str:
    if failure is None:
        return "fine"
    for words, column in (
        ("hang ", "hangs"),
        ("growth of", "growth"),
        ("changed", "changed numbers"),
        ("not covered", "not covered"),
    ):
        if words in failure.split(": ", 1)[-1][:40]:
            return column
    return "foreign exceptions"


class _Worker:
    def __init__(self) -> None:
        self.channel, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=_work, args=(other,))
        self.process.start()
        self.done, self.known, self.case = 0, set(), None

    def give(self, case: tuple[str, int], now: float) -> None:
        self.case, self.done = case, self.done + 1
        self.limit = SECONDS if case[0] in self.known else START_SECONDS
        self.since, self.before = now, self.processor_seconds()
        self.known.add(case[0])
        self.channel.send(case)

    def is_late(self, now: float) -> bool:
        """Tell whether its case has taken too much of the processor, or of the day."""
        spent = self.processor_seconds() - self.before
        return spent > self.limit or now > self.since + 10 * self.limit

    def processor_seconds(self) -> float:
        """Return the time of a processor that the process has had, or of the day where that is not known."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def run(cases: list[tuple[str, int]], workers: int = 1) -> list[str | None]:
    """Run cases, each a kind and a seed, in processes; return how each fails, or ``None``."""
    results: dict[tuple[str, int], str | None] = {}
    said = 0
    waiting = list(reversed(cases))
    team = [_Worker() for _ in range(workers)]
    try:
        while waiting or any(worker.case for worker in team):
            for failure in list(results.values())[said:]:  # a long run tells of what it has found
                if failure is not None:
                    print(failure, file=sys.stderr, flush=True)
            said = len(results)
            for place, worker in enumerate(team):
                if worker.case is None and waiting:
                    if worker.done >= CASES_OF_A_WORKER:
                        worker.stop()
                        worker = team[place] = _Worker()
                    worker.give(waiting.pop(), time.monotonic())
            busy = [worker for worker in team if worker.case is not None]
            ready = wait([worker.channel for worker in busy], timeout=0.5)
            for place, worker in enumerate(team):
                if worker.case is None:
                    continue
                kind, seed = worker.case
                died = False
                if worker.channel in ready:
                    try:
                        results[worker.case], worker.case = worker.channel.recv(), None
                    except (EOFError, OSError):
                        died = True
                if worker.case is not None and (died or not worker.process.is_alive()):
                    results[worker.case] = f"{kind}, seed {seed}: the process died"
                elif worker.case is not None and worker.is_late(time.monotonic()):
                    results[worker.case] = f"{kind}, seed {seed}: hang"
                else:
                    continue
                worker.stop()
                team[place] = _Worker()
    finally:  # workers may have children, so that they are no daemons and end with nobody
        for worker in team:
            worker.stop()
    return [results[case] for case in cases]


def main() -> None:
    """Run the cases that the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[""])
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = [kind for kind in fuzz_files.KINDS if kind.startswith(tuple(options.kinds))]
    # Cases of a kind follow each other, because its valid call or file is made once in a process.
    numbers = Counter(kinds[i % len(kinds)] for i in range(options.cases)) if kinds else Counter()
    cases = [(kind, options.seed * 10**6 + i) for kind in kinds for i in range(numbers[kind])]
    failures = run(cases, options.workers)
    table: dict[str, Counter[str]] = {}
    for (kind, _), failure in zip(cases, failures, strict=True):
        table.setdefault(kind, Counter()).update(["cases", _column(failure)])
    table["all"] = sum(table.values(), Counter())
    print(f"{'kind':<42}" + "".join(f"{column:>19}" for column in COLUMNS))
    for room, row in table.items():
        print(f"{room:<42}" + "".join(f"{row[column]:>19}" for column in COLUMNS))
    found = Counter(failure for failure in failures if failure is not None)
    print("\nfailures, shrunk:" if found else "\nno failure")
    for failure, times in found.most_common():
        print(f"{times:>4}  {failure}")
    if options.out is not None:
        rows = {room: dict(row) for room, row in table.items()}
        options.out.write_text(json.dumps({"table": rows, "failures": dict(found)}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
