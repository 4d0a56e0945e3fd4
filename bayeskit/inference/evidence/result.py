"""Results: estimates of the log marginal likelihood and predictive scores, with errors and diagnostics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bayeskit.core.page import Listed, result_html
from bayeskit.core.texts import with_error

__all__ = ["Evidence", "PredictiveScore"]


@dataclass(frozen=True, repr=False)
class Evidence:
    """An estimate of the log marginal likelihood.

    Attributes
    ----------
    method : str
        Name of the estimator.
    log_evidence : float
        In nats.
    standard_error : float
        Monte Carlo standard error of ``log_evidence``, in nats.
    num_evaluations : int
        Evaluations of the log density or its gradient, including those for the draws.
    trusted : bool
        False if a diagnostic finds the estimate or its error unreliable.
    warnings : tuple of str
        Problems found by the diagnostics, each with its remedy.
    diagnostics : dict of float
        Values of the diagnostics.
    seconds : float
        Wall time, including that of the draws passed in and, in a table of
        :func:`~bayeskit.inference.evidence.compare`, of the fits. Equality of two estimates ignores it.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> z = Evidence("bridge_sampling", -94.08, 0.004, 8000)
    >>> low, high = z.interval()
    >>> round(low, 4), round(high, 4)
    (-94.0878, -94.0722)
    """

    method: str
    log_evidence: float
    standard_error: float
    num_evaluations: int
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.log_evidence) and math.isfinite(self.standard_error)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Return the normal interval of ``z`` standard errors, 95 % by default."""
        return self.log_evidence - z * self.standard_error, self.log_evidence + z * self.standard_error

    def _repr_html_(self) -> str:
        return _html(self, "log evidence", self.log_evidence)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.method}: log evidence {with_error(self.log_evidence, self.standard_error)}{flag}"


# Predictive scores, which do not estimate the log evidence.


@dataclass(frozen=True, repr=False)
class PredictiveScore:
    """A sum of log predictive densities of the data.

    The score ranks models; it does not estimate the log evidence.

    Attributes
    ----------
    method : str
        Name of the estimator.
    predictive_score : float
        In nats.
    standard_error : float
        Monte Carlo standard error of ``predictive_score``, in nats. It excludes the sampling variation of the data.
    num_evaluations : int
        Evaluations of the log density or its gradient, including those for the draws.
    warnings : tuple of str
        Problems found by the diagnostics, each with its remedy.
    diagnostics : dict of float
        Values of the diagnostics.
    seconds : float
    trusted : bool
        False if a diagnostic finds the score or its error unreliable.

    Examples
    --------
    >>> from bayeskit.inference.evidence.result import PredictiveScore
    >>> score = PredictiveScore("conditional_predictive_ordinates", -71.3, 0.02, 8000)
    >>> low, high = score.interval()
    >>> round(low, 4), round(high, 4), score.trusted
    (-71.3392, -71.2608, True)
    """

    method: str
    predictive_score: float
    standard_error: float
    num_evaluations: int
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.predictive_score) and math.isfinite(self.standard_error)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Return the normal interval of ``z`` standard errors, 95 % by default."""
        return self.predictive_score - z * self.standard_error, self.predictive_score + z * self.standard_error

    def _repr_html_(self) -> str:
        return _html(self, "predictive score", self.predictive_score)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.method}: predictive score {with_error(self.predictive_score, self.standard_error)}{flag}"


def _html(z: Evidence | PredictiveScore, name: str, value: float) -> str:
    """Return the estimate as a fragment: the number, its cost, and its warnings folded."""
    trust = "" if z.trusted else ", not trusted"
    text = f"{z.method}: {name} {with_error(value, z.standard_error)}{trust}"
    count = len(z.warnings)
    listed = [Listed(f"{count} warning{'s' * (count > 1)}", [(z.method, why) for why in z.warnings])] if count else []
    cost = f"{z.num_evaluations} evaluations" + (f", {z.seconds:.1f} seconds" if z.seconds else "")
    return result_html(text, folded=listed, notes=[cost])
