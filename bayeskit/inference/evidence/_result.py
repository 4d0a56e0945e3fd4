"""Results: estimates of the log marginal likelihood and predictive scores, with errors and diagnostics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from bayeskit._core.page import Listed, result_html
from bayeskit._core.texts import with_error


class _Estimate:
    """A number in nats with its Monte Carlo standard error, its cost, and what its diagnostics found."""

    _name: ClassVar[str]  # of the field with the number
    method: str
    standard_error: float
    num_evaluations: int
    warnings: tuple[str, ...]
    seconds: float

    @property
    def value(self) -> float:
        """The number estimated, in nats."""
        return float(getattr(self, self._name))

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.value) and math.isfinite(self.standard_error)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Return the normal interval of ``z`` standard errors, 95 % by default."""
        return self.value - z * self.standard_error, self.value + z * self.standard_error

    def _text(self, flag: str) -> str:
        return f"{self.method}: {self._name.replace('_', ' ')} {with_error(self.value, self.standard_error)}{flag}"

    def _repr_html_(self) -> str:
        count = len(self.warnings)
        remarks = [(self.method, why) for why in self.warnings]
        folded = [Listed(f"{count} warning{'s' * (count > 1)}", remarks)] if count else []
        cost = f"{self.num_evaluations} evaluations" + (f", {self.seconds:.1f} seconds" if self.seconds else "")
        return result_html(self._text("" if self.trusted else ", not trusted"), folded=folded, notes=[cost])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return self._text("" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings))


@dataclass(frozen=True, repr=False)
class Evidence(_Estimate):
    """An estimate of the log marginal likelihood.

    ``trusted`` is False if a diagnostic finds the estimate or its error unreliable.

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

    _name = "log_evidence"

    method: str
    log_evidence: float
    standard_error: float
    num_evaluations: int
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, repr=False)
class PredictiveScore(_Estimate):
    """A sum of log predictive densities of the data.

    The score ranks models; it does not estimate the log evidence. ``trusted`` is False if a diagnostic finds the score
    or its error unreliable.

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

    Examples
    --------
    >>> from bayeskit.inference.evidence._result import PredictiveScore
    >>> score = PredictiveScore("conditional_predictive_ordinates", -71.3, 0.02, 8000)
    >>> low, high = score.interval()
    >>> round(low, 4), round(high, 4), score.trusted
    (-71.3392, -71.2608, True)
    """

    _name = "predictive_score"

    method: str
    predictive_score: float
    standard_error: float
    num_evaluations: int
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
