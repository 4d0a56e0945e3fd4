"""Count on generated problems what methods and verdicts say, against answers that are computed by other means.

Prints, for pairs of problems and methods at the defaults of `evidence.compare`: how many were trusted and more than
four errors off, how many were refused though right, and how many verdicts were wrong; then counts by family, and a row
for each pair that was trusted and wrong, or failed, with the problem that rebuilds it. Problems of a seed are those of
`bayeskit exam --generated`.

    python benchmarks/generated_exam.py --problems 125 --seed 1 2              # 3,000 pairs with twelve methods
    python benchmarks/generated_exam.py --problems 20 --families Ridge HardEdges --methods smc bridge_sampling
    python benchmarks/generated_exam.py --problems 2 --families FiftyThousandRows --methods smc bridge_sampling
"""

from __future__ import annotations

import argparse
import signal
import time
import warnings
from collections import Counter
from functools import partial
from typing import Any

from bayeskit import exact
from bayeskit._core.randomness import derived_seed
from bayeskit.errors import BayeskitError
from bayeskit.exact import generated
from bayeskit.inference.evidence import compare, select
from bayeskit.parallel import map_tasks
from bayeskit.workflows._exam import GENERATED_METHODS, MAX_PROBLEMS, ExamRow

LIMIT = 4.0  # standard errors
WRONG, REFUSED, GIVEN = "trusted and wrong", "refused though right", "trusted"


def kind_of(row: ExamRow) -> str:
    """Say whether an estimate was trusted, and whether it is within the limit."""
    if abs(row.evidence.log_evidence) == float("inf") or row.evidence.log_evidence != row.evidence.log_evidence:
        return "no estimate"
    near = abs(row.z) <= row.limit
    if row.evidence.trusted:
        return GIVEN if near else WRONG
    return REFUSED if near else "refused and wrong"


class TooLong(BaseException):
    """The time for one problem is over; not an `Exception`, so that methods do not catch it."""


def ring(number: int, frame: Any) -> None:
    raise TooLong


def answer(
    task: tuple[int, int], methods: tuple[str, ...], families: tuple[type[exact.Family], ...], limit: int
) -> dict[str, Any]:
    """Compare methods on one problem, given by its exam's seed and its number; the result is plain data."""
    signal.signal(signal.SIGALRM, ring)
    begin, (seed, number) = time.monotonic(), task

    def spent() -> float:
        return time.monotonic() - begin

    problem = exact.generate(seed * MAX_PROBLEMS + number, families)
    name, family = repr(problem), type(problem).__name__
    try:
        case = problem.case()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = derived_seed(seed, f"generated problem {number}")
            signal.alarm(limit)
            try:
                table = compare(case.target(), methods, seed=own, progress=False)
            finally:
                signal.alarm(0)
    except (BayeskitError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, TooLong) as error:
        said = f"{type(error).__name__}: {error}"
        known = {BayeskitError: "refused as a whole", TooLong: "too long"}
        word = next((known[kind] for kind in known if isinstance(error, kind)), "failed")
        rows = [(method, word, said) for method in methods]
        return {"case": name, "family": family, "rows": rows, "verdict": word, "said": said, "seconds": spent()}
    rows = [
        (row.evidence.method, kind_of(row), f"{row.evidence.log_evidence:.4f} +- {row.evidence.standard_error:.4f}")
        for row in (ExamRow(name, z, case.log_evidence, case.standard_error, LIMIT) for z in table)
    ]
    best, verdict = table.verdict.best, "none"
    if best is not None:
        verdict = kind_of(ExamRow(name, best, case.log_evidence, case.standard_error, LIMIT))
    said = f"{table.verdict}; exact {case.log_evidence:.4f}"
    return {"case": name, "family": family, "rows": rows, "verdict": verdict, "said": said, "seconds": spent()}


def share(count: int, total: int) -> str:
    return f"{count} of {total} ({100 * count / max(total, 1):.2f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=125, help="for each seed")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--methods", nargs="+", default=list(GENERATED_METHODS))
    parser.add_argument("--families", nargs="+", default=["all"], help="names, 'all', or 'extremes'")
    parser.add_argument("--seconds", type=int, default=900, help="for all methods on one problem")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--checkpoint", help="folder for finished problems, from which a later call goes on")
    arguments = parser.parse_args()
    named = (*exact.FAMILIES, generated.FiftyThousandRows)
    known = {family.__name__: (family,) for family in named}
    known |= {"all": exact.FAMILIES, "extremes": generated.EXTREME_FAMILIES}
    families = tuple(family for name in arguments.families for family in known[name])
    methods = tuple(method.name for method in select(arguments.methods))
    found = map_tasks(
        partial(answer, methods=methods, families=families, limit=arguments.seconds),
        [(seed, number) for seed in arguments.seed for number in range(arguments.problems)],
        num_jobs=arguments.processes,
        checkpoint=arguments.checkpoint,
        progress=True,
        description="exam",
    )
    pairs = Counter(word for part in found for _, word, _ in part["rows"])
    verdicts = Counter(part["verdict"] for part in found)
    total = pairs.total()
    print(f"pairs: {total}; trusted and more than {LIMIT:g} errors off: {share(pairs[WRONG], total)}; ", end="")
    print(f"refused though right: {share(pairs[REFUSED], total)}")
    print(f"verdicts: {len(found)}; trusted and more than {LIMIT:g} errors off: {share(verdicts[WRONG], len(found))}")
    print(f"all pairs: {dict(pairs)}\nall verdicts: {dict(verdicts)}\n\nfamily, trusted and wrong, all pairs, seconds")
    for family in sorted({part["family"] for part in found}):
        parts = [part for part in found if part["family"] == family]
        words = [word for part in parts for _, word, _ in part["rows"]]
        seconds = sum(part["seconds"] for part in parts)
        print(f"{family:22s} {words.count(WRONG):4d} {len(words):5d} {seconds:7.0f}")
    print()
    for part in found:
        for method, word, said in part["rows"]:
            if word in (WRONG, "failed"):
                print(f"{word}: {method}: {said}: {part['case']}")
        if part["verdict"] == WRONG:
            print(f"verdict wrong: {part['said']}: {part['case']}")


if __name__ == "__main__":
    main()
