"""Compare generated C++ with torch on random operations, types and layouts.

    python benchmarks/compiled_operations.py [--cases 5000] [--seed 0]

Prints each case that differs beyond rounding, and the share that is left to torch.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))
from random_operations import compared, random_case

_AT_ONCE = 60  # in one library, whose function has the arrays of all of them on its stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    done = wrong = left = 0
    alone: Counter[str] = Counter()
    while done < given.cases:
        cases = []
        while len(cases) < min(_AT_ONCE, given.cases - done):
            case = random_case(chance)
            if case is not None:
                cases.append(case)
        differences, unknown = compared(cases)
        for difference in differences:
            case = difference.case
            print(f"{case.words}\n  x = {case.x}\n  y = {case.y}\n  C++ {difference.found}\n  torch {case.expected}")
        done, wrong, left = done + len(cases), wrong + len(differences), left + len(unknown)
        alone.update(case.words.partition(" of torch")[0] for case in unknown if " > " not in case.words)
    print(f"{done} cases, {wrong} wrong, {100 * left / done:.1f} % left to torch")
    print("operations left to torch in cases of one: " + ", ".join(f"{n} ({c})" for n, c in alone.most_common()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
