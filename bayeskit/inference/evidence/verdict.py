"""What several estimates of one log evidence amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scipy.stats import norm

from bayeskit.inference.evidence.result import Evidence

#: How often, at most, trusted methods that are all right are said to disagree.
FALSE_ALARM = 0.01


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
    """

    best: Evidence | None
    agreeing: tuple[str, ...] = ()
    disagreeing: dict[str, float] = field(default_factory=dict)
    untrusted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    num_sources: int = 0
    notes: tuple[str, ...] = ()

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

    @property
    def is_agreed(self) -> bool:
        """Whether the agreeing methods outnumber those that disagree."""
        return self.best is not None and len(self.agreeing) > len(self.disagreeing)

    def __str__(self) -> str:
        if self.best is None:
            return f"log evidence unknown: none of {self.num_methods} methods is trusted"
        text = f"log evidence {self.log_evidence:.4f} ± {self.standard_error:.4f} by {self.best.method}; "
        text += f"{self.num_trusted} of {self.num_methods} methods trusted"
        if not self.disagreeing:
            sources = f" on {self.num_sources} separate sets of draws" if self.num_sources > 1 else ""
            return f"{text}, which agree{sources}" if self.num_trusted > 1 else text
        away = ", ".join(f"{name} ({gap:.1f} standard errors away)" for name, gap in self.disagreeing.items())
        if self.is_agreed:
            return f"{text}, of which {len(self.agreeing)} agree; it disagrees with {away}"
        return f"{text}, but there is no agreement: it disagrees with {away}"


def judge(
    estimates: Iterable[Evidence],
    *,
    sources: Mapping[str, frozenset[str]] | None = None,
    refused: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Sum up several estimates of one log evidence.

    Estimates that share draws are not independent, so they are not averaged. The most precise trusted estimate with
    which most of the trusted ones agree speaks for them; where no majority agrees, the one with which most do. Two
    estimates agree unless they differ by more standard errors than the largest of so many comparisons would in one of
    a hundred tables of right ones.

    Parameters
    ----------
    estimates : iterable of Evidence
    sources : mapping of str to set of str, optional
        What each method works on; methods on one thing count as one source.
    refused : mapping of str to str, optional
        Methods that did not apply, and why.
    notes : tuple of str, optional
        What to know of the target.

    Returns
    -------
    Verdict

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
    trusted = sorted((z for z in results if z.trusted), key=lambda z: z.standard_error)
    untrusted = {z.method: "; ".join(z.warnings) or "it is not finite" for z in results if not z.trusted}
    common = {"untrusted": untrusted, "refused": dict(refused or {}), "notes": notes}
    if not trusted:
        return Verdict(None, **common)  # type: ignore[arg-type]
    limit = float(norm.isf(FALSE_ALARM / (2 * max(1, len(trusted) - 1))))
    away = {z.method: {other.method: _gap(z, other) for other in trusted} for z in trusted}
    support = {name: sum(gap <= limit for gap in gaps.values()) for name, gaps in away.items()}
    wanted = len(trusted) // 2 + 1
    wanted = wanted if max(support.values()) >= wanted else max(support.values())
    best = next(z for z in trusted if support[z.method] >= wanted)
    gaps = away[best.method]
    order = [z.method for z in results if z.trusted]
    agreeing = tuple(name for name in order if gaps[name] <= limit)
    disagreeing = {name: gaps[name] for name in order if gaps[name] > limit}
    different = {(sources or {}).get(name, frozenset([name])) for name in agreeing}
    return Verdict(best, agreeing, disagreeing, num_sources=len(different), **common)  # type: ignore[arg-type]


def _gap(one: Evidence, other: Evidence) -> float:
    difference = abs(one.log_evidence - other.log_evidence)
    error = math.hypot(one.standard_error, other.standard_error)
    if error > 0:
        return difference / error
    return 0.0 if difference == 0 else math.inf
