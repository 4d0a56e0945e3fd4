"""The exam: every evidence method on every problem with a known answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from bayeskit import exact
from bayeskit._progress import progress_bar
from bayeskit.errors import UnknownNameError
from bayeskit.inference.evidence import Budget, Evidence, compare, select

PASS, SELF_FLAGGED, FALSE_COMFORT = "pass", "self-flagged", "FALSE COMFORT"
MAX_Z = 3.0
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
"""A budget of a few seconds for the whole exam, for tests; many methods will not trust themselves on it."""


@dataclass(frozen=True)
class ExamRow:
    """One method on one case.

    Attributes
    ----------
    case : str
        Name of the :class:`~bayeskit.exact.ExactCase`.
    evidence : Evidence
        What the method answered.
    exact : float
        The right answer, in nats.
    exact_error : float, default 0
        The standard error of the right answer.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.workflows import ExamRow
    >>> ExamRow("linreg10", Evidence("harmonic_mean", -75.7, 0.3, 1000), -94.0845).verdict
    'FALSE COMFORT'
    """

    case: str
    evidence: Evidence
    exact: float
    exact_error: float = 0.0

    @property
    def z(self) -> float:
        """Distance from the right answer in standard errors, the method's own and the answer's together."""
        difference = self.evidence.log_evidence - self.exact
        if difference == 0 or not math.isfinite(difference):
            return difference
        error = math.hypot(self.evidence.standard_error, self.exact_error)
        return difference / error if error > 0 else math.copysign(math.inf, difference)

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"self-flagged"`` or ``"FALSE COMFORT"``.

        A method that says it cannot be trusted is honest, however wrong it is; one that claims to be trusted
        and is more than three standard errors away gives false comfort.
        """
        if not self.evidence.trusted:
            return SELF_FLAGGED
        return PASS if abs(self.z) <= MAX_Z else FALSE_COMFORT


@dataclass(frozen=True)
class Exam:
    """All answers.

    Attributes
    ----------
    rows : tuple of ExamRow
        Case by case.
    """

    rows: tuple[ExamRow, ...]

    def count(self, verdict: str) -> int:
        """Return how many rows have this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def has_false_comfort(self) -> bool:
        """Whether any method trusted an answer more than three standard errors away."""
        return self.count(FALSE_COMFORT) > 0

    def to_pandas(self) -> pd.DataFrame:
        """Return case, method, estimate, standard_error, exact, z, trusted, seconds and verdict."""
        columns = "case method estimate standard_error exact z trusted seconds verdict".split()
        rows = []
        for row in self.rows:
            e = row.evidence
            start = (row.case, e.method, e.log_evidence, e.standard_error, row.exact)
            rows.append((*start, row.z, e.trusted, e.seconds, row.verdict))
        return pd.DataFrame(rows, columns=columns)

    def __str__(self) -> str:
        passed, flagged, comfort = (self.count(v) for v in (PASS, SELF_FLAGGED, FALSE_COMFORT))
        text = f"{len(self.rows)} answers: {passed} pass, {flagged} self-flagged, {comfort} false comfort"
        if comfort:
            text += " (an honest method exceeds three standard errors once in 370 times: try another seed)"
        return text


def run_exam(
    methods: str | Sequence[str] = "all",
    cases: str | Sequence[str] = "all",
    seed: int = 0,
    budget: Budget | None = None,
    progress: bool = True,
) -> Exam:
    """Let evidence methods answer problems whose exact evidence is known.

    Parameters
    ----------
    methods : "all" or sequence of str
        Names of functions in :mod:`bayeskit.inference.evidence`.
    cases : "all" or sequence of str
        Keys of :data:`bayeskit.exact.CASES`.
    seed : int, default 0
    budget : Budget, optional
        Of the shared draws of each case.
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
    chosen = [method.name for method in select(methods)]  # an unknown method is said before anything runs
    rows = []
    problems = [exact.get(name) for name in selected_cases(cases)]
    with progress_bar("exam", len(problems), progress) as bar:
        for done, case in enumerate(problems):
            bar.update(done, case.name)
            # The bars of the samplers would write over this one.
            comparison = compare(case.target(), chosen, seed, budget=budget, progress=False)
            rows += [ExamRow(case.name, estimate, case.log_evidence, case.standard_error) for estimate in comparison]
        bar.update(len(problems))
    return Exam(tuple(rows))


def selected_cases(cases: str | Sequence[str]) -> list[str]:
    """Return the names of the exact cases that are meant by `cases`, "all" or names.

    Raises
    ------
    UnknownNameError
        If there is none.

    Examples
    --------
    >>> selected_cases("linreg10")
    ['linreg10']
    """
    if cases == "all":
        return list(exact.CASES)
    names = [cases] if isinstance(cases, str) else list(cases)
    if not names:
        raise UnknownNameError(f"no case was named; known are: {', '.join(exact.CASES)}")
    return names
