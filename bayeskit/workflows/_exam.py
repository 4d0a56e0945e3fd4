"""The exam: run evidence methods on problems with known evidence."""

from __future__ import annotations

import math
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit import exact
from bayeskit._core.folders import write_csv
from bayeskit._core.inputs import whole_number
from bayeskit._core.page import frame_table, result_html
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import derived_seed
from bayeskit.errors import BayeskitError, SamplingWarning, UnknownNameError
from bayeskit.inference.evidence import Budget, Evidence, compare, select
from bayeskit.parallel import map_tasks

if TYPE_CHECKING:
    import pandas as pd

_PASS, _SELF_FLAGGED, FALSE_COMFORT, FAILED = "pass", "self-flagged", "FALSE COMFORT", "failed"
_REFUSED, _REFUSED_WHOLE = "does not apply", "refused"
_MAX_Z = 3.0
_GENERATED_MAX_Z, MAX_PROBLEMS = 4.0, 1_000_000
MAX_FALSE_COMFORT = 0.002  # share of generated answers
MAX_SECONDS = 300.0  # of all methods on one generated problem
MAX_TRIALS = 12  # number of runs to shrink a failure
GENERATED_METHODS = (
    *("naive_monte_carlo", "laplace_importance_sampling", "variational_importance_sampling"),
    *("bridge_sampling", "warp_bridge_sampling", "stabilised_harmonic_mean", "generalised_stepping_stone"),
    *("stepping_stone", "path_sampling", "modified_path_sampling", "smc", "adaptive_smc"),
)
SMALL = Budget(
    8,
    150,
    250,
    num_temperatures=16,
    ladder_chains=8,
    ladder_warmup=80,
    ladder_samples=120,
    num_particles=32,
    num_live=100,
)
"""A budget of a few seconds for the whole exam, for tests; many estimates are then untrusted."""
GENERATED_BUDGET = Budget(
    64,
    150,
    150,
    num_temperatures=40,
    ladder_samples=500,
)
"""Many short chains: on a small problem the cost of an iteration hardly depends on the number of chains."""


@dataclass(frozen=True)
class ExamRow:
    """Result of one method on one problem.

    Attributes
    ----------
    case : str
        Name of the :class:`~bayeskit.exact.ExactCase`.
    evidence : Evidence
        Estimate of the method.
    exact : float
        True log evidence in nats.
    exact_error : float, default 0
        Standard error of ``exact``.
    limit : float, default 3
        Number of standard errors above which an estimate is wrong.
    smallest : str, default ""
        For a generated problem with a failure or false comfort: the smallest problem found with the same verdict.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.workflows._exam import ExamRow
    >>> ExamRow("linreg10", Evidence("harmonic_mean", -75.7, 0.3, 1000), -94.0845).verdict
    'FALSE COMFORT'
    """

    case: str
    evidence: Evidence
    exact: float
    exact_error: float = 0.0
    limit: float = _MAX_Z
    smallest: str = ""

    @property
    def z(self) -> float:
        """Distance from ``exact`` in standard errors, combined over estimate and ``exact``; NaN if unknown."""
        difference = self.evidence.log_evidence - self.exact
        if difference == 0 or not math.isfinite(difference):
            return difference
        error = math.hypot(self.evidence.standard_error, self.exact_error)
        return math.copysign(math.inf, difference) if error == 0 else difference / error

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"self-flagged"``, ``"refused"``, ``"failed"`` or ``"FALSE COMFORT"``.

        An untrusted estimate is self-flagged. A trusted estimate more than ``limit`` standard errors away is false
        comfort. A method without an estimate failed, or refused a problem that has an answer.
        """
        if math.isnan(self.evidence.log_evidence):
            return _REFUSED_WHOLE if "".join(self.evidence.warnings).startswith("refused: ") else FAILED
        if not self.evidence.trusted:
            return _SELF_FLAGGED
        return _PASS if abs(self.z) <= self.limit else FALSE_COMFORT


@dataclass(frozen=True)
class Exam:
    """Results of all methods on all problems.

    Attributes
    ----------
    rows : tuple of ExamRow
        In order of problems.
    refused : dict of dict of str
        Reasons why methods were not run, by problem and method.
    """

    rows: tuple[ExamRow, ...]
    refused: dict[str, dict[str, str]] = field(default_factory=dict)

    def count(self, verdict: str) -> int:
        """Return the number of rows with a verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def by_method(self) -> pd.DataFrame:
        """Return counts by method: right, refused though right, flagged, trusted and wrong, failed, refused, n/a."""
        import pandas as pd

        columns = ["right", "refused though right", "flagged", "trusted and wrong", "failed", _REFUSED_WHOLE, _REFUSED]
        counts: dict[str, list[int]] = {}
        for row in self.rows:
            near = abs(row.z) <= row.limit
            kinds = {_PASS: 0, _SELF_FLAGGED: 1 if near else 2, FALSE_COMFORT: 3, FAILED: 4, _REFUSED_WHOLE: 5}
            counts.setdefault(row.evidence.method, [0] * len(columns))[kinds[row.verdict]] += 1
        for reasons in self.refused.values():
            for name in reasons:
                counts.setdefault(name, [0] * len(columns))[-1] += 1
        return pd.DataFrame.from_dict(counts, orient="index", columns=columns).rename_axis("method").reset_index()

    @property
    def has_false_comfort(self) -> bool:
        """Whether any trusted estimate is wrong, that is more than ``limit`` standard errors away."""
        return self.count(FALSE_COMFORT) > 0

    def to_pandas(self) -> pd.DataFrame:
        """Return case, method, estimate, standard_error, exact, z, trusted, seconds, verdict and remarks.

        ``remarks`` holds the warnings of a method, or the reason why it was not run; rows of methods not run come last.
        """
        import pandas as pd

        columns = "case method estimate standard_error exact z trusted seconds verdict remarks".split()
        rows: list[tuple[Any, ...]] = []
        for row in self.rows:
            e = row.evidence
            start = (row.case, e.method, e.log_evidence, e.standard_error, row.exact)
            rows.append((*start, row.z, e.trusted, e.seconds, row.verdict, "; ".join(e.warnings)))
        for case, reasons in self.refused.items():
            rows += [(case, name, *_NOTHING, False, 0.0, _REFUSED, why) for name, why in reasons.items()]
        return pd.DataFrame(rows, columns=columns)

    def to_csv(self, path: str | Path) -> None:
        """Write the table to a CSV file, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_csv(path, self.to_pandas())

    def _repr_html_(self) -> str:
        table = self.to_pandas().drop(columns=["seconds", "remarks"])
        return result_html(
            str(self), [frame_table("Answers", table, estimate=".4f", exact=".4f")] if len(table) else []
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        passed, flagged, comfort, failed = (self.count(v) for v in (_PASS, _SELF_FLAGGED, FALSE_COMFORT, FAILED))
        text = f"{len(self.rows)} answers: {passed} pass, {flagged} self-flagged, {comfort} false comfort"
        text += f", {failed} failed" if failed else ""
        if comfort:
            text += " (a correct method exceeds three standard errors in one of 370 answers: try another seed)"
        return text if self.rows else "0 answers: none of the methods applies to any of the cases"


_NOTHING = (math.nan,) * 4


def run_exam(
    methods: str | Sequence[str] = "all",
    cases: str | Sequence[str] = "all",
    *,
    seed: int = 0,
    budget: Budget | None = None,
    progress: bool = True,
) -> Exam:
    """Run evidence methods on problems with exactly known evidence.

    Predictive scores are not log evidences and are left out.

    Parameters
    ----------
    methods : "all" or sequence of str
        Names of functions in :mod:`bayeskit.inference.evidence`.
    cases : "all" or sequence of str
        Keys of :data:`bayeskit.exact.CASES`.
    seed : int, default 0
    budget : Budget, optional
        Budget of the shared draws of each case.
    progress : bool, default True

    Returns
    -------
    Exam

    Raises
    ------
    UnknownNameError
        For an unknown method or case.

    Examples
    --------
    >>> from bayeskit.workflows import run_exam
    >>> exam = run_exam(["laplace_importance_sampling"], ["beta_binomial"], progress=False)
    >>> print(exam)
    1 answers: 1 pass, 0 self-flagged, 0 false comfort
    """
    named = select(methods)  # an unknown method is reported before anything runs
    chosen = [method.name for method in named if method.kind != "score"]
    # With methods="all", inapplicable methods are not listed.
    no_answer = {} if methods == "all" else {m.name: "it is a predictive score" for m in named if m.kind == "score"}
    rows, refused = [], {}
    problems = [exact.get(name) for name in selected_cases(cases)]
    with progress_bar("exam", len(problems), progress) as bar:
        for done, case in enumerate(problems):
            bar.update(done, case.name)
            # The progress bars of the samplers would overwrite this one.
            comparison = compare(case.target(), chosen, seed=seed, budget=budget, progress=False)
            rows += [ExamRow(case.name, estimate, case.log_evidence, case.standard_error) for estimate in comparison]
            reasons = comparison.refused | no_answer
            if reasons:
                refused[case.name] = reasons
        bar.update(len(problems))
    return Exam(tuple(rows), refused)


def run_generated_exam(
    count: int,
    methods: str | Sequence[str] = GENERATED_METHODS,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    progress: bool = True,
    families: Sequence[type[exact.Family]] = exact.FAMILIES,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
) -> Exam:
    """Run evidence methods on random problems whose exact evidence is computed independently.

    Parameters
    ----------
    count : int
        Number of problems.
    methods : "all" or sequence of str
        By default twelve methods that need no long runs.
    seed : int, default 0
        Determines the problems and the random numbers of the methods.
    budget : Budget, optional
        Budget of the shared draws of each problem; by default many short chains.
    progress : bool, default True
    families : sequence of Family classes, optional
        Types of problems; :data:`bayeskit.exact.FAMILIES` by default.
    num_jobs : int, default 1
        Number of problems in parallel; see :func:`bayeskit.parallel.map_tasks`.
    checkpoint : path, optional
        Folder for the results of finished problems, from which a later call with the same arguments resumes.

    Returns
    -------
    Exam
        The name of a case is the representation of its :class:`~bayeskit.exact.Family`, which rebuilds it. An estimate
        more than four standard errors away is wrong. A problem refused as a whole counts as refused for each method.
        All methods fail on a problem that takes longer than five minutes in total. A problem with a failure or false
        comfort is shrunk to the smallest form with the same verdict, by at most twelve further runs.

    Raises
    ------
    UnknownNameError
        For an unknown method.
    SettingsError
        If ``count`` is less than one.
    CheckpointError
        If the checkpoint belongs to another exam.
    OutputError
        If the checkpoint cannot be written.

    Examples
    --------
    >>> from bayeskit.exact.generated import BetaBernoulli, GammaPoisson
        >>> from bayeskit.workflows import run_generated_exam
    >>> families = [BetaBernoulli, GammaPoisson]
    >>> exam = run_generated_exam(2, ["naive_monte_carlo"], seed=1, progress=False, families=families)
    >>> len(exam.rows), exam.has_false_comfort
    (2, False)
    """
    count, seed = whole_number("count", count, 1), whole_number("seed", seed, 0)
    chosen = tuple(method.name for method in select(methods) if method.kind != "score")
    parts = map_tasks(
        _answer_generated,
        [
            _Generated(seed, number, chosen, budget or GENERATED_BUDGET, problem)
            for number, problem in enumerate(exact.generate(seed * MAX_PROBLEMS + n, families) for n in range(count))
        ],
        num_jobs=num_jobs,
        checkpoint=checkpoint,
        result_types=(ExamRow, Evidence),
        progress=progress,
        description="exam",
    )
    rows = tuple(row for answered, _ in parts for row in answered)
    return Exam(rows, {case: reasons for _, refused in parts for case, reasons in refused.items()})


@dataclass(frozen=True)
class _Generated:
    """One problem of a generated exam, its number, and the methods to run."""

    seed: int
    number: int
    methods: tuple[str, ...]
    budget: Budget
    problem: exact.Family


class _TooLong(BaseException):
    """The time for one problem is over; not an ``Exception``, so that methods do not catch it."""


def _too_long() -> str:
    return f"failed: it took more than {MAX_SECONDS:g} s"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise ``_TooLong`` if the block takes longer; only in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: an exception in a call of the garbage collector, such as JAX has, is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _answer_generated(task: _Generated) -> tuple[tuple[ExamRow, ...], dict[str, dict[str, str]]]:
    """Return the rows of one problem and the reasons why methods do not apply, by problem name."""
    rows, refused = _ask(task.problem, task)
    trials = 0

    def fails(form: exact.Family, like: ExamRow) -> bool:
        nonlocal trials
        trials += 1
        if trials > MAX_TRIALS:
            return False
        again, _ = _ask(form, replace(task, methods=(like.evidence.method,)))
        return any(row.verdict == like.verdict for row in again)

    shrunk = tuple(
        replace(row, smallest=repr(exact.shrink(task.problem, partial(fails, like=row))))
        if row.verdict in (FALSE_COMFORT, FAILED) and row.evidence.warnings != (_too_long(),)
        else row
        for row in rows
    )
    return shrunk, refused


def _ask(problem: exact.Family, task: _Generated) -> tuple[tuple[ExamRow, ...], dict[str, dict[str, str]]]:
    own = derived_seed(task.seed, f"generated problem {task.number}")  # so that errors are independent
    name = repr(problem)
    try:
        case = problem.case()
    except BayeskitError as error:
        return (), {name: dict.fromkeys(task.methods, str(error))}
    with warnings.catch_warnings():
        # Each estimate carries the same warning.
        warnings.simplefilter("ignore", SamplingWarning)
        try:
            with _at_most(MAX_SECONDS):
                comparison = compare(case.target(), task.methods, seed=own, budget=task.budget, progress=False)
        except BayeskitError as error:
            said = f"refused: {error}"
        except _TooLong:
            said = _too_long()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = f"failed: {type(error).__name__}: {error}"
        else:
            rows = tuple(
                ExamRow(name, estimate, case.log_evidence, case.standard_error, _GENERATED_MAX_Z)
                for estimate in comparison
            )
            return rows, {name: dict(comparison.refused)} if comparison.refused else {}
    nothing = (Evidence(method, math.nan, math.nan, 0, (said,)) for method in task.methods)
    return tuple(ExamRow(name, e, case.log_evidence, case.standard_error, _GENERATED_MAX_Z) for e in nothing), {}


def selected_cases(cases: str | Sequence[str]) -> list[str]:
    """Return the names of exact cases, all for "all"; UnknownNameError if the list is empty."""
    if cases == "all":
        return list(exact.CASES)
    names = [cases] if isinstance(cases, str) else list(cases)
    if not names:
        raise UnknownNameError(f"no case is given; known are: {', '.join(exact.CASES)}")
    return names
