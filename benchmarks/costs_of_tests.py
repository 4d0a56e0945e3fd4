"""Print what the tests cost: CPU seconds of each file in each circle, and the most expensive tests.

    python benchmarks/costs_of_tests.py [--circle test calibrate long] [--csv docs/tables/tests.csv] [--most 30]

Seconds are those of the test's own process and of processes that it waited for, compilation included, on two processes
as in ``make test``. Pages are left out: the documentation runs them.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CIRCLES = {"test": "not calibration and not long", "calibrate": "calibration", "long": "long"}
PAGES = "tests/examples/test_examples.py::test_page_runs"


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write a test and its CPU seconds into a file of this process; pytest loads this module as a plugin."""
    begin = _cpu_seconds()
    result = yield
    with (Path(os.environ["TEST_COSTS"]) / str(os.getpid())).open("a", encoding="utf-8") as file:
        file.write(f"{item.nodeid}\t{_cpu_seconds() - begin:.2f}\n")
    return result


def measured(circle: str) -> dict[str, float]:
    """Run a circle of tests and return the CPU seconds of each test; one that fails has its cost, too."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"TEST_COSTS": folder, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", Path(__file__).stem]
        command += ["-m", CIRCLES[circle], "--deselect", PAGES, "tests"]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        lines = [line for file in Path(folder).iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    return {test: float(seconds) for test, _, seconds in (line.rpartition("\t") for line in lines)}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--circle", nargs="+", choices=list(CIRCLES), default=list(CIRCLES))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--most", type=int, default=30)
    settings = parser.parse_args()
    rows = []
    for circle in settings.circle:
        costs = measured(circle)
        print(f"make {circle}: {len(costs)} tests, {sum(costs.values()):.0f} CPU s")
        for test, seconds in sorted(costs.items(), key=lambda item: -item[1])[: settings.most]:
            print(f"  {seconds:7.1f}  {test}")
        files: dict[str, list[float]] = defaultdict(list)
        for test, seconds in costs.items():
            files[test.partition("::")[0]].append(seconds)
        rows += [(file, circle, len(each), f"{sum(each):.1f}") for file, each in files.items()]
    if settings.csv is not None:
        with settings.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("file", "circle", "tests", "CPU seconds"), *sorted(rows)])


if __name__ == "__main__":
    main()
