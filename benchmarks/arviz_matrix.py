"""Print what ArviZ's functions make of draws: for each function and model of the contract, how a call ends.

    python benchmarks/arviz_matrix.py [--models NAME ...] [--functions NAME ...]

A call on ``draws.to_arviz()`` stands beside the same call on ``from_dict`` of the same arrays, as in
`tests/test_arviz_contract.py`:

    =  the same numbers, or both draw the plot
    +  the call works on the package's data alone
    -  the call fails for both: the function is not for such data
    F  the call fails, or has other numbers, on the package's data alone
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import arviz as az
import numpy as np

CONTRACT = Path(__file__).resolve().parents[1] / "tests" / "test_arviz_contract.py"


def contract() -> ModuleType:
    """Return the module of the tests, whose models and calls these are."""
    spec = importlib.util.spec_from_file_location("contract", CONTRACT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ending(cases: ModuleType, function: str, ours: Any, by_hand: Any) -> tuple[str, str]:
    """Return the mark of a call, and the error where there is one."""
    (mine, error), (expected, why) = cases.called(function, ours), cases.called(function, by_hand)
    if why is not None:
        return ("+", "") if error is None else ("-", repr(why))
    if error is not None:
        return "F", repr(error)
    if function.startswith("plot_"):
        return "=", ""
    found, other = cases.numbers(mine), cases.numbers(expected)
    same = len(found) == len(other) > 0 and all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(found, other, strict=True)
    )
    return ("=", "") if same else ("F", "other numbers")


def main() -> None:
    """Print the table, the counts and the reasons."""
    cases = contract()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(cases.CASES), default=list(cases.CASES))
    parser.add_argument("--functions", nargs="+", default=cases.NUMBERS + cases.PLOTS)
    options = parser.parse_args()
    print(f"ArviZ {az.__version__}: {len(options.functions)} functions, {len(options.models)} models")
    for place, name in enumerate(options.models):
        print(f"  {place}  {name}")
    counts, reasons = Counter[str](), list[str]()
    print(f"{'':32}{' '.join(str(place) for place in range(len(options.models)))}")
    for function in options.functions:
        row = [ending(cases, function, *cases.both(name)) for name in options.models]
        print(f"{function:32}{' '.join(mark for mark, _ in row)}", flush=True)
        counts.update(mark for mark, _ in row)
        reasons += [
            f"{mark} {function}, {name}: {why[:160]}"
            for name, (mark, why) in zip(options.models, row, strict=True)
            if why
        ]
    print(", ".join(f"{mark} {counts[mark]}" for mark in "=+-F"))
    print(*reasons, sep="\n")


if __name__ == "__main__":
    main()
