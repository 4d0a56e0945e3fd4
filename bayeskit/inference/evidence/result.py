"""Evidence: a log marginal likelihood that carries its error and says whether to believe it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Evidence", "PredictiveScore"]


@dataclass(frozen=True)
class Evidence:
    """An estimate of the log marginal likelihood.

    Attributes
    ----------
    method : str
        Name of the function that made it.
    log_evidence : float
        In nats.
    standard_error : float
        Monte Carlo standard error of ``log_evidence``, in nats.
    num_evaluations : int
        Evaluations of the log density or its gradient, those of the draws included.
    trusted : bool
        False where a diagnostic says that estimate or error cannot be relied on.
    warnings : tuple of str
        What the diagnostics found, each with its remedy.
    diagnostics : dict of float
        The numbers behind ``trusted``.
    seconds : float
        Wall time of the estimate, the draws that it was given included; in a table of
        :func:`~bayeskit.inference.evidence.compare` that of its fits, too. Two estimates that differ in it alone are
        equal.

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
        """Whether no diagnostic objected."""
        return not self.warnings and math.isfinite(self.log_evidence) and math.isfinite(self.standard_error)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Return the normal interval of ``z`` standard errors, 95 % by default."""
        return self.log_evidence - z * self.standard_error, self.log_evidence + z * self.standard_error

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.method}: log evidence {self.log_evidence:.4f} +- {self.standard_error:.4f}{flag}"


# Predictive scores, which are no log evidence.


@dataclass(frozen=True)
class PredictiveScore:
    """A sum of log predictive densities of the data.

    It ranks models, as the log evidence does, but is no estimate of it.

    Attributes
    ----------
    method : str
        Name of the function that made it.
    predictive_score : float
        In nats.
    standard_error : float
        Monte Carlo standard error of ``predictive_score``, in nats. It says nothing of how the score would differ on
        other data.
    num_evaluations : int
        Evaluations of the log density or its gradient, those of the draws included.
    warnings : tuple of str
        What the diagnostics found, each with its remedy.
    diagnostics : dict of float
        The numbers behind ``trusted``.
    seconds : float
    trusted : bool
        False where a diagnostic says that score or error cannot be relied on.

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
        """Whether no diagnostic objected."""
        return not self.warnings and math.isfinite(self.predictive_score) and math.isfinite(self.standard_error)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Return the normal interval of ``z`` standard errors, 95 % by default."""
        return self.predictive_score - z * self.standard_error, self.predictive_score + z * self.standard_error

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.method}: predictive score {self.predictive_score:.4f} +- {self.standard_error:.4f}{flag}"
