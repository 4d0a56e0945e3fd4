"""What several estimates of one log evidence amount to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scipy.stats import norm

from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.result import Evidence

#: How often, at most, trusted methods that are all right are said to disagree.
FALSE_ALARM = 0.01
#: Estimates whose errors are at most so many times larger count as comparable.
COMPARABLE = 10.0
#: Of an estimate, what rounding may make of it.
ROUNDING = 1e-10


@dataclass(frozen=True)
class Verdict:
    """What several estimates of one log evidence amount to.

    Attributes
    ----------
    best : Evidence or None
        The trusted estimate that speaks for those that agree; None where no method is trusted.
    agreeing : tuple of str
        Trusted methods whose estimates fit `best` within the errors of both, itself included.
    disagreeing : dict of float
        Trusted methods that do not fit, and by how many standard errors of the difference.
    untrusted : dict of str
        Methods that say themselves that they are not to be trusted, and why.
    refused : dict of str
        Methods that do not apply, and why.
    num_sources : int
        On how many different sets of draws or searches the agreeing methods rest.
    notes : tuple of str
        What to know of the target.
    is_agreed : bool
        Whether the agreeing methods outnumber those that disagree, also among those of comparable precision, and are
        more than one.
    """

    best: Evidence | None
    agreeing: tuple[str, ...] = ()
    disagreeing: dict[str, float] = field(default_factory=dict)
    untrusted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    num_sources: int = 0
    notes: tuple[str, ...] = ()
    is_agreed: bool = False

    @property
    def log_evidence(self) -> float:
        """The agreed value in nats; NaN where there is none."""
        return math.nan if self.best is None else self.best.log_evidence

    @property
    def standard_error(self) -> float:
        """Its standard error in nats."""
        return math.nan if self.best is None else self.best.standard_error

    @property
    def num_trusted(self) -> int:
        """How many methods trust themselves."""
        return len(self.agreeing) + len(self.disagreeing)

    @property
    def num_methods(self) -> int:
        """How many methods applied."""
        return self.num_trusted + len(self.untrusted)

    def __str__(self) -> str:
        if self.best is None:
            if not self.untrusted and not self.refused:
                return "log evidence unknown: none of the methods asked estimates it"
            if not self.untrusted:
                return f"log evidence unknown: none of {len(self.refused)} methods applies"
            reason, count = Counter(self.untrusted.values()).most_common(1)[0]
            if self.num_methods == 1:
                return f"log evidence unknown: {next(iter(self.untrusted))} is not trusted: {reason}"
            text = f"log evidence unknown: none of {self.num_methods} methods is trusted"
            return f"{text}; {count} of them: {reason}" if count > 1 else text
        text = f"log evidence {self.log_evidence:.4f} ± {self.standard_error:.4f} by {self.best.method}; "
        text += f"{self.num_trusted} of {self.num_methods} methods trusted"
        if not self.disagreeing and (self.is_agreed or self.num_trusted == 1):
            sources = f" on {self.num_sources} separate sets of draws" if self.num_sources > 1 else ""
            return f"{text}, which agree{sources}" if self.num_trusted > 1 else text
        away = ", ".join(f"{name} ({gap:.1f} standard errors away)" for name, gap in self.disagreeing.items())
        if self.is_agreed:
            return f"{text}, of which {len(self.agreeing)} agree; it disagrees with {away}"
        return f"{text}, but there is no agreement" + (f": it disagrees with {away}" if away else "")


def judge(
    estimates: Iterable[Evidence],
    *,
    sources: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Sum up several estimates of one log evidence.

    Estimates that share draws are not independent, so they are not averaged. The most precise trusted estimate speaks
    with which most of the trusted ones agree, and most of those of comparable precision: an estimate whose error is ten
    times larger agrees with nearly anything. Nor does an estimate speak with which more precise ones agree that
    contradict each other. Where there is none of that kind the one with the most comparable ones on its side is given,
    and the verdict says that there is no agreement. Two estimates agree unless they differ by more standard errors than
    the largest of so many comparisons would in one of a hundred tables of right ones.

    Parameters
    ----------
    estimates : iterable of Evidence
    sources : mapping of str to str, optional
        The draws or the search that each method rests on; methods on one count as one source.
    refused : mapping of str to str, optional
        Methods that did not apply, and why.
    notes : tuple of str, optional
        What to know of the target.

    Returns
    -------
    Verdict

    Raises
    ------
    SettingsError
        If two estimates are by one method.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> bridge = Evidence("bridge_sampling", -94.083, 0.002, 8000)
    >>> verdict = judge([bridge, Evidence("path_sampling", -94.09, 0.01, 8000), Evidence("smc", -94.5, 0.05, 8000)])
    >>> print(verdict)  # doctest: +NORMALIZE_WHITESPACE
    log evidence -94.0830 ± 0.0020 by bridge_sampling; 3 of 3 methods trusted, of which 2 agree;
    it disagrees with smc (8.3 standard errors away)
    """
    results = list(estimates)
    repeated = [name for name, count in Counter(z.method for z in results).items() if count > 1]
    if repeated:
        raise SettingsError(f"there are several estimates by {', '.join(repeated)}; give one of each method")
    trusted = sorted((z for z in results if z.trusted), key=lambda z: z.standard_error)
    untrusted = {z.method: "; ".join(z.warnings) or "it is not finite" for z in results if not z.trusted}
    common = {"untrusted": untrusted, "refused": dict(refused or {}), "notes": notes}
    if not trusted:
        return Verdict(None, **common)  # type: ignore[arg-type]
    limit = float(norm.isf(FALSE_ALARM / (2 * max(1, len(trusted) - 1))))
    gaps = [[_gap(one, other) for other in trusted] for one in trusted]
    agree = [[gap <= limit for gap in row] for row in gaps]
    place = next((i for i in range(len(trusted)) if _speaks(i, trusted, agree)), None)
    agreed = place is not None and len(trusted) > 1
    if place is None:
        united = [i for i in range(len(trusted)) if _united(i, agree)]
        place = max(united, key=lambda i: (sum(_comparable(i, trusted, agree)), -i))
    order = [z.method for z in results if z.trusted]
    away = {z.method: gap for z, gap in zip(trusted, gaps[place], strict=True)}
    agreeing = tuple(name for name in order if away[name] <= limit)
    disagreeing = {name: away[name] for name in order if away[name] > limit}
    different = {(sources or {}).get(name, name) for name in agreeing}
    return Verdict(
        trusted[place],
        agreeing,
        disagreeing,
        num_sources=len(different),
        is_agreed=agreed,
        **common,  # type: ignore[arg-type]
    )


def _comparable(place: int, trusted: Sequence[Evidence], agree: Sequence[Sequence[bool]]) -> list[bool]:
    """Return which of the estimates that are not much less precise agree."""
    reach = COMPARABLE * trusted[place].standard_error
    return [agree[place][i] for i, z in enumerate(trusted) if i <= place or z.standard_error <= reach]


def _speaks(place: int, trusted: Sequence[Evidence], agree: Sequence[Sequence[bool]]) -> bool:
    """Tell whether an estimate speaks for the majority; `trusted` is in order of precision."""
    close = _comparable(place, trusted, agree)
    if 2 * sum(agree[place]) <= len(trusted) or 2 * sum(close) <= len(close):
        return False
    return _united(place, agree)


def _united(place: int, agree: Sequence[Sequence[bool]]) -> bool:
    """Tell whether the more precise estimates that agree with this one agree with each other; the first has none."""
    finer = [i for i in range(place) if agree[place][i]]
    return all(agree[i][j] for i in finer for j in finer)


def _gap(one: Evidence, other: Evidence) -> float:
    difference = abs(one.log_evidence - other.log_evidence)
    # Sums of many terms differ by rounding, whatever their errors.
    floor = ROUNDING * (1 + abs(one.log_evidence))
    return difference / math.hypot(one.standard_error, other.standard_error, floor)
