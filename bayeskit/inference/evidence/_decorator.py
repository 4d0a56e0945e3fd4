"""The decorator of estimators: what happens before and after an estimate is made, and its registration.

Before the outermost call the target is checked; an estimator that calls another one, or a comparison that runs several,
counts as one call. Posterior draws are checked, and an estimator gets their chains of finite density. What it returns
is judged: by the diagnostics of these chains, and by the :class:`~bayeskit.inference.evidence.Diagnostics` of the
target. An estimate for a target that approximates an integral is corrected once, in the outermost call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from bayeskit._core.randomness import one_thread
from bayeskit._draws import Draws
from bayeskit._logdensity.target import OfTarget, Target, takes_draws
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence._judging._belonging import usable_draws
from bayeskit.inference.evidence._judging._chains import posterior_problems
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, EvidenceFromDraws
from bayeskit.inference.evidence._methods import Estimate, Kind, Part, Refusal, register, split_refusal
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.marginal._correction import LaplaceCorrection
from bayeskit.inference.samplers import sample
from bayeskit.inference.samplers._ladder import Ladder
from bayeskit.inference.samplers._nested import NestedRun
from bayeskit.inference.samplers._smc import SMCRun

P = ParamSpec("P")
R = TypeVar("R")

_NOBODY, _COMPARISON, _ESTIMATOR = range(3)
_ASKED_BY: ContextVar[int] = ContextVar("asked by", default=_NOBODY)


def estimator(
    *needs: Part,
    kind: Kind = "consistent",
    mixing: bool = True,
    refuses: Refusal | None = None,
    by: Estimate | None = None,
) -> Callable[[Callable[Concatenate[Target, P], R]], OfTarget[P, R]]:
    """Decorate a public estimator: register it, check what it is given, judge its estimate, and measure its time.

    An estimator that needs ``Part.POSTERIOR`` has the draws as its argument after the target. It is called with those
    of their chains whose density is finite. Callers may give draws in place of the target, for both.

    Parameters
    ----------
    *needs : Part
        Shared parts that the estimator needs. :func:`~bayeskit.inference.evidence.compare` makes them and passes them
        as ``draws``, ``ladder``, ``mode``, ``mean_field`` and ``flow``.
    kind : {"consistent", "unstable", "approximation", "bound", "score"}
        Limit of the estimate; see :class:`~bayeskit.inference.evidence.Method`. A score needs no proper prior.
    mixing : bool, default True
        Whether an estimate from posterior draws is untrusted if their chains have not mixed.
    refuses : callable, optional
        ``(target, parts)``: the reason why the estimator does not apply to a target, or None.
    by : callable, optional
        ``(target, parts, seed)``: the call by a comparison, if the estimator makes its own run within the budget.

    Returns
    -------
    callable
        The decorator; ``function(target, ..., seed=0) -> Evidence``.

    Examples
    --------
    The likelihood at the mode, which is not a useful estimate:

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

    def decorate(function: Callable[Concatenate[Target, P], R]) -> OfTarget[P, R]:
        from_posterior = functools.partial(_from_posterior, function, mixing)
        estimate: Callable[..., Any] = from_posterior if Part.POSTERIOR in needs else function

        @takes_draws
        @functools.wraps(function)
        def judged(target: Target, *given: Any, **named: Any) -> Any:
            asked_by = _ASKED_BY.get()
            if asked_by == _ESTIMATOR:
                return _judged(target, estimate(target, *given, **named))
            if asked_by == _NOBODY:
                Diagnostics(target).check_target(proper=kind != "score")
                if (reason := split_refusal(target, needs)) is not None:
                    raise SettingsError(f"{function.__name__} does not apply: {reason}")
            begin = time.monotonic()
            with one_thread(), _asked_by(_ESTIMATOR):
                found = _judged(target, estimate(target, *given, **named))
                if asked_by == _NOBODY and isinstance(found, Evidence):
                    seed, progress = named.get("seed", 0), named.get("progress", True)

                    def draws() -> Draws:
                        known = draws_among((found, *given, *named.values()))
                        return known or sample(target, seed=seed, progress=progress)

                    found = of_integral(target, found, correction_of(target, draws, seed, progress))
            own = time.monotonic() - begin
            earlier = sum(_seconds(value) for value in (*given, *named.values()))
            # The duration of a resumed run includes the time before this call.
            return replace(found, seconds=max(own + earlier, found.seconds))

        register(judged, needs, kind, refuses, by)
        return cast(OfTarget[P, R], judged)

    return decorate


@contextmanager
def comparison() -> Iterator[None]:
    """Tell estimators that their target has been checked already."""
    with one_thread(), _asked_by(_COMPARISON):
        yield


@contextmanager
def _asked_by(who: int) -> Iterator[None]:
    token = _ASKED_BY.set(who)
    try:
        yield
    finally:
        _ASKED_BY.reset(token)


def correction_of(target: Target, draws: Callable[[], Draws], seed: int, progress: bool) -> LaplaceCorrection | None:
    """Return the correction of a target that approximates an integral, if it is to be corrected."""
    return target.correction(draws(), seed=seed, progress=progress) if target.needs_correction else None


def of_integral(
    target: Target, estimate: Evidence, correction: LaplaceCorrection | None, problems: tuple[str, ...] = ()
) -> Evidence:
    """Return an estimate with the correction, and with the problems of a target that approximates an integral."""
    found = estimate if correction is None else correction.applied(estimate)
    problems += target.problems
    return replace(found, warnings=(*found.warnings, *problems)) if problems else found


def draws_among(given: Iterable[object]) -> Draws | None:
    """Return the first posterior draws among an estimate and what it was made of."""
    for value in given:
        if isinstance(value, Ladder):
            return value.posterior
        if isinstance(value, NestedRun):
            return value.draws
        draws = value if isinstance(value, Draws) else getattr(value, "draws", None)
        if isinstance(draws, Draws) and bool((draws.beta == 1).all()):
            return draws
    return None


def _from_posterior(function: Callable[..., Any], mixing: bool, target: Target, *given: Any, **named: Any) -> Any:
    """Return what an estimator makes of the chains of finite density, with these chains' diagnostics and all draws."""
    draws, *others = (named.pop("draws"), *given) if "draws" in named else given or (None,)
    usable = usable_draws(draws, target)
    found = function(target, usable, *others, **named)
    if mixing:
        problems, diagnostics = posterior_problems(usable)
        found = replace(found, warnings=(*problems, *found.warnings), diagnostics=diagnostics | found.diagnostics)
    return EvidenceFromDraws(**vars(found) | {"draws": draws}) if isinstance(found, Evidence) else found


def _judged(target: Target, found: Any) -> Any:
    """Return an estimate with the warnings of its draws."""
    return Diagnostics(target).judge(found) if isinstance(found, EvidenceFromDraws) else found


def _seconds(given: object) -> float:
    """Return the duration of a run that an estimator is given."""
    if isinstance(given, Ladder | SMCRun):
        return given.draws.seconds
    return given.seconds if isinstance(given, Draws | NestedRun) else 0.0
