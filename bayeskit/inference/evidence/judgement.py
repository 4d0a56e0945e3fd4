"""One judgement of every estimate, whether it is asked for by itself or by a comparison.

Each public estimator is decorated by :func:`estimator`. What concerns the target is looked at before it runs and said
once, by whoever was asked first; an estimator that calls another one, or a comparison that runs several, is judged as
one call. What concerns the estimate is added by the estimator itself, so that nobody who calls it needs to.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from bayeskit.draws import Draws
from bayeskit.errors import ConstantsWarning, SettingsError
from bayeskit.inference.evidence.constants import ConstantsReport, check_constants
from bayeskit.inference.evidence.improper_priors import improper
from bayeskit.inference.evidence.methods import Estimate, Kind, Part, Refusal, register
from bayeskit.inference.samplers import Ladder
from bayeskit.inference.samplers.nested import NestedRun
from bayeskit.inference.samplers.smc import SMCRun
from bayeskit.logdensity.target import Target

__all__ = ["F", "comparison", "estimator", "judge_target"]

F = TypeVar("F", bound=Callable[..., Any])

_NOBODY, _COMPARISON, _ESTIMATOR = range(3)
_ASKED_BY: ContextVar[int] = ContextVar("asked by", default=_NOBODY)
# One seed for all, so that what is said of a target does not depend on who asked first.
_SEED = 0
_REASONS: WeakKeyDictionary[Target, str | None] = WeakKeyDictionary()
_REPORTS: WeakKeyDictionary[Target, ConstantsReport] = WeakKeyDictionary()


def judge_target(target: Target, *, proper: bool = True, stacklevel: int = 2) -> ConstantsReport:
    """Return a target's constants report, kept with it; warn of its problems, SettingsError for an improper prior."""
    if not isinstance(target, Target):
        raise SettingsError(f"a Target is needed, not a {type(target).__name__}; make one by Target.from_pyro")
    if target not in _REASONS:
        _REASONS[target] = improper(target)
    if proper and (reason := _REASONS[target]) is not None:
        raise SettingsError(reason)
    if target not in _REPORTS:
        _REPORTS[target] = check_constants(target, seed=_SEED)
    report = _REPORTS[target]
    if proper and report.improper:
        raise SettingsError(report.warnings[0])
    for problem in report.warnings:
        warnings.warn(problem, ConstantsWarning, stacklevel=stacklevel + 1)
    return report


def estimator(
    *needs: Part, kind: Kind = "consistent", refuses: Refusal | None = None, by: Estimate | None = None
) -> Callable[[F], F]:
    """Decorate a public estimator: it is registered, its target is judged first, and its time is measured.

    Parameters
    ----------
    *needs : Part
        What it works on: :func:`~bayeskit.inference.evidence.compare` makes these parts, and gives them by the names
        ``draws``, ``ladder``, ``mode``, ``mean_field`` and ``flow``.
    kind : {"consistent", "unstable", "approximation", "bound", "score"}
        What its number tends to; see :class:`~bayeskit.inference.evidence.Method`. A score does without a proper prior.
    refuses : callable, optional
        ``(target, parts)``, the reason why it does not apply to a target, or None.
    by : callable, optional
        ``(target, parts, seed)``, how a comparison calls it, where it makes a run of its own by the budget.

    Returns
    -------
    callable
        The decorator; ``function(target, ..., seed=0) -> Evidence``.

    Examples
    --------
    The mean of the likelihood over the mode alone, which is no estimate worth having:

    >>> import bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> from bayeskit.inference.evidence import Evidence, Part, estimator
    >>> @estimator(Part.MODE, kind="approximation")
    ... def likelihood_at_the_mode(target, *, mode, seed=0):
    ...     value = float(target.log_likelihood(mode.position))
    ...     return Evidence("likelihood_at_the_mode", value, 0.0, 1)
    >>> found = evidence.compare(bk.exact.get("linreg10").target(), ["likelihood_at_the_mode", "laplace"])
    >>> list(found.results)
    ['laplace', 'likelihood_at_the_mode']
    >>> del evidence.METHODS["likelihood_at_the_mode"]
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def judged(target: Target, *given: Any, **named: Any) -> Any:
            asked_by = _ASKED_BY.get()
            if asked_by == _ESTIMATOR:
                return function(target, *given, **named)
            if asked_by == _NOBODY:
                judge_target(target, proper=kind != "score", stacklevel=2)
            begin = time.monotonic()
            with _asked_by(_ESTIMATOR):
                found = function(target, *given, **named)
            own = time.monotonic() - begin
            earlier = sum(_seconds(value) for value in (*given, *named.values()))
            # A run that was resumed knows of time before this call.
            return replace(found, seconds=max(own + earlier, found.seconds))

        register(judged, needs, kind, refuses, by)
        return cast(F, judged)

    return decorate


@contextmanager
def comparison() -> Iterator[None]:
    """Let estimators know that their target has been judged already."""
    with _asked_by(_COMPARISON):
        yield


@contextmanager
def _asked_by(who: int) -> Iterator[None]:
    token = _ASKED_BY.set(who)
    try:
        yield
    finally:
        _ASKED_BY.reset(token)


def _seconds(given: object) -> float:
    """Return what a run that an estimator is given took; it counts for its evaluations, too."""
    if isinstance(given, Ladder | SMCRun):
        return given.draws.seconds
    return given.seconds if isinstance(given, Draws | NestedRun) else 0.0
