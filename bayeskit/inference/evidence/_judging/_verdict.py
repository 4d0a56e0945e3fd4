"""The verdict on several estimates of one log evidence: which one stands for them, and whether they agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import scipy

from bayeskit._core.page import Listed, result_html
from bayeskit._core.texts import with_error
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence._methods import METHODS, Part
from bayeskit.inference.evidence._result import Evidence

#: Largest probability of reporting disagreement if all trusted estimates are correct.
_FALSE_ALARM = 0.01
#: Largest ratio of standard errors of estimates of comparable precision.
_COMPARABLE = 10.0
#: Trusted methods that outweigh one that is not trusted, if they use several sources and the prior is among them.
_ENOUGH = 3
#: Relative rounding error of an estimate.
_ROUNDING = 1e-10


@dataclass(frozen=True, repr=False)
class Verdict:
    """Summary of several estimates of one log evidence.

    Attributes
    ----------
    best : Evidence or None
        The representative trusted estimate; None if no method is trusted.
    agreeing : tuple of str
        Trusted methods whose estimates agree with `best`, including its own.
    disagreeing : dict of float
        Trusted methods that disagree with `best`, with the distance in standard errors of the difference.
    untrusted : dict of str
        Methods that failed their diagnostics, with the reason.
    refused : dict of str
        Methods that do not apply to the target, with the reason.
    num_sources : int
        Number of different sets of draws or searches behind the agreeing methods.
    notes : tuple of str
        Remarks on the target.
    is_agreed : bool
        True if at least two methods are trusted, `best` agrees with a majority of them, overall and among those of
        comparable precision, and no consistent method has found more mass, beyond the errors of both. Methods of one
        set of draws that are not trusted do not count against three trusted methods that agree, use several sets of
        draws, and of which one begins at draws from the prior and contradicts them by itself.
    contradicted_by : dict of float
        Estimates by consistent methods that are not trusted and lie above `best`, with the distance in standard errors
        of the difference: they have found more mass, unless their failure has made it up.
    """

    best: Evidence | None
    agreeing: tuple[str, ...] = ()
    disagreeing: dict[str, float] = field(default_factory=dict)
    untrusted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    num_sources: int = 0
    notes: tuple[str, ...] = ()
    is_agreed: bool = False
    contradicted_by: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        estimates: Iterable[Evidence],
        *,
        sources: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Verdict:
        """Return the verdict on several estimates of one log evidence.

        Estimates that share draws are dependent, so they are not averaged. The representative estimate is the most
        precise trusted estimate that agrees with a majority of the trusted estimates, overall and among those of
        comparable precision (a standard error at most ten times its own). An estimate is not chosen if two more precise
        estimates agree with it but not with each other. If no estimate qualifies, the estimate with the most agreeing
        estimates of comparable precision is returned and ``is_agreed`` is False. The threshold of agreement, in
        standard errors of the difference, has a familywise false alarm rate of 1 % (Bonferroni).

        Parameters
        ----------
        estimates : iterable of Evidence
        sources : mapping of str to str, optional
            The draws or search behind each method; methods with equal entries count as one source. By default those of
            one run of `compare`.
        refused : mapping of str to str, optional
            Methods that do not apply, with the reason.
        notes : tuple of str, optional
            Remarks on the target.

        Returns
        -------
        Verdict

        Raises
        ------
        SettingsError
            If there are no estimates and no refused methods, or two estimates have the same method.

        Examples
        --------
        >>> from bayeskit.inference.evidence import Evidence, Verdict
        >>> bridge = Evidence("bridge_sampling", -94.083, 0.002, 8000)
        >>> others = Evidence("path_sampling", -94.09, 0.01, 8000), Evidence("smc", -94.5, 0.05, 8000)
        >>> verdict = Verdict.of([bridge, *others])
        >>> print(verdict)  # doctest: +NORMALIZE_WHITESPACE
        log evidence -94.0830 +- 0.0020 by bridge_sampling; 3 of 3 methods trusted; 2 of them agree;
        this estimate disagrees with smc (8.3 standard errors away)
        """
        results = list(estimates)
        if not results and refused is None:
            raise SettingsError("estimates is empty; give at least one estimate of the evidence")
        repeated = [name for name, count in Counter(z.method for z in results).items() if count > 1]
        if repeated:
            raise SettingsError(f"there are several estimates by {', '.join(repeated)}; give one estimate per method")
        trusted = sorted((z for z in results if z.trusted), key=lambda z: z.standard_error)
        untrusted = {z.method: "; ".join(z.warnings) or "the estimate is not finite" for z in results if not z.trusted}
        common = {"untrusted": untrusted, "refused": dict(refused or {}), "notes": notes}
        if not trusted:
            return cls(None, **common)  # type: ignore[arg-type]
        limit = -float(scipy.special.ndtri(_FALSE_ALARM / (2 * max(1, len(trusted) - 1))))
        gaps = [[_gap(one, other) for other in trusted] for one in trusted]
        agree = [[gap <= limit for gap in row] for row in gaps]
        place = next((i for i in range(len(trusted)) if _speaks(i, trusted, agree)), None)
        is_agreed = place is not None and len(trusted) > 1
        if place is None:
            united = [i for i in range(len(trusted)) if _united(i, agree)]
            place = max(united, key=lambda i: (sum(_comparable(i, trusted, agree)), -i))
        order = [z.method for z in results if z.trusted]
        away = {z.method: gap for z, gap in zip(trusted, gaps[place], strict=True)}
        agreeing = tuple(name for name in order if away[name] <= limit)
        disagreeing = {name: away[name] for name in order if away[name] > limit}
        source = {z.method: METHODS[z.method].source if z.method in METHODS else z.method for z in results} | dict(
            sources or {}
        )
        different = {source[name] for name in agreeing}
        above = _above(trusted[place], results)
        doubtful = {name: gap for name, gap in above.items() if name in untrusted}
        contradicting = [z for z in results if z.method in doubtful]
        outweighed = (
            len(agreeing) >= _ENOUGH
            and len(different) > 1
            and len({source[z.method] for z in contradicting}) == 1
            # One that begins at the prior is precise enough to tell the two apart.
            and any(
                all(_gap(one, other) > limit for other in contradicting)
                for one in trusted
                if one.method in agreeing and _begins_at_the_prior(one.method)
            )
        )
        return cls(
            trusted[place],
            agreeing,
            disagreeing,
            num_sources=len(different),
            is_agreed=is_agreed and (not above or (outweighed and doubtful == above)),
            contradicted_by=doubtful,
            **common,  # type: ignore[arg-type]
        )

    @property
    def log_evidence(self) -> float:
        """The estimate of `best` in nats; NaN if there is none."""
        return math.nan if self.best is None else self.best.log_evidence

    @property
    def standard_error(self) -> float:
        """Standard error of `log_evidence` in nats."""
        return math.nan if self.best is None else self.best.standard_error

    @property
    def num_trusted(self) -> int:
        """Number of trusted methods."""
        return len(self.agreeing) + len(self.disagreeing)

    @property
    def num_methods(self) -> int:
        """Number of methods that applied."""
        return self.num_trusted + len(self.untrusted)

    def _repr_html_(self) -> str:
        reasons = {"not trusted": self.untrusted, "do not apply": self.refused}
        listed = [Listed(f"{len(why)} {what}", list(why.items())) for what, why in reasons.items() if why]
        return result_html(str(self), folded=listed, notes=self.notes)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if self.best is None:
            if not self.untrusted and not self.refused:
                return "log evidence unknown: none of the selected methods estimates it"
            if not self.untrusted:
                return f"log evidence unknown: none of {len(self.refused)} methods applies"
            reason, count = Counter(self.untrusted.values()).most_common(1)[0]
            if self.num_methods == 1:
                return f"log evidence unknown: {next(iter(self.untrusted))} is not trusted: {reason}"
            text = f"log evidence unknown: none of {self.num_methods} methods is trusted"
            return f"{text}; {count} of them: {reason}" if count > 1 else text
        return f"log evidence {with_error(self.log_evidence, self.standard_error)} {self.grounds}"

    @property
    def grounds(self) -> str:
        """What the value rests on: its method, how many are trusted, and whether they agree; empty if it is unknown."""
        if self.best is None:
            return ""
        text = f"by {self.best.method}; {self.num_trusted} of {self.num_methods} methods trusted"
        away = ", ".join(f"{name} ({gap:.1f} standard errors away)" for name, gap in self.disagreeing.items())
        above = ", ".join(f"{name} ({gap:.1f} standard errors above)" for name, gap in self.contradicted_by.items())
        reasons = [f"this estimate disagrees with {away}"] * bool(away)
        reasons += [f"more mass was found, without trust, by {above}"] * bool(above)
        if self.is_agreed and away:
            return "; ".join([f"{text}; {len(self.agreeing)} of them agree", *reasons])
        if self.is_agreed or (self.num_trusted == 1 and not above):
            sources = f" and use {self.num_sources} separate sets of draws" if self.num_sources > 1 else ""
            return "; ".join([f"{text}; they agree{sources}" if self.num_trusted > 1 else text, *reasons])
        return f"{text}, but there is no agreement" + (f": {'; '.join(reasons)}" if reasons else "")


def _comparable(place: int, trusted: Sequence[Evidence], agree: Sequence[Sequence[bool]]) -> list[bool]:
    """Return whether each estimate of comparable precision agrees with the one at `place`."""
    reach = _COMPARABLE * trusted[place].standard_error
    return [agree[place][i] for i, z in enumerate(trusted) if i <= place or z.standard_error <= reach]


def _speaks(place: int, trusted: Sequence[Evidence], agree: Sequence[Sequence[bool]]) -> bool:
    """Tell whether an estimate agrees with a majority; `trusted` is in order of precision."""
    close = _comparable(place, trusted, agree)
    if 2 * sum(agree[place]) <= len(trusted) or 2 * sum(close) <= len(close):
        return False
    return _united(place, agree)


def _united(place: int, agree: Sequence[Sequence[bool]]) -> bool:
    """Tell whether the more precise estimates that agree with this one agree with each other."""
    finer = [i for i in range(place) if agree[place][i]]
    return all(agree[i][j] for i in finer for j in finer)


def _begins_at_the_prior(method: str) -> bool:
    """Tell whether a method begins at draws from the prior, so that it shares no search of modes with the others."""
    return method in METHODS and bool(METHODS[method].needs & {Part.PRIOR, Part.LADDER})


def _above(best: Evidence, results: Sequence[Evidence]) -> dict[str, float]:
    """Return the estimates that have found more mass than the best one, beyond the errors of both, trusted or not."""
    # Those of infinite variance lie above by themselves, and integrals over too few temperatures by their known error.
    # Others that fail miss mass as a rule, and make it up where chains at a low temperature stay at a high likelihood.
    limit = -float(scipy.special.ndtri(_FALSE_ALARM / (2 * max(1, len(results) - 1))))
    return {
        z.method: _gap(z, best)
        for z in results
        if z.method in METHODS
        and METHODS[z.method].kind == "consistent"
        and math.isfinite(z.standard_error)
        and z.log_evidence - abs(z.diagnostics.get("remaining_gap", z.diagnostics.get("trapezoid_gap", 0.0)))
        > best.log_evidence
        and _gap(z, best) > limit
    }


def _gap(one: Evidence, other: Evidence) -> float:
    difference = abs(one.log_evidence - other.log_evidence)
    # Sums of many terms differ by rounding even if their standard errors are zero.
    floor = _ROUNDING * (1 + abs(one.log_evidence))
    return difference / math.hypot(one.standard_error, other.standard_error, floor)
