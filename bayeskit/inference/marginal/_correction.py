"""What Laplace's approximation of an integral misses: a number with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE
from bayeskit._core.statistics import log_mean_exp, log_mean_exp_error, pareto_shape
from bayeskit.errors import SettingsError

#: Standard deviation of log weights below which their tail says nothing.
_EQUAL_WEIGHTS = 1e-3
#: Share of an integral at the ends of the quadrature beyond which it is not trusted.
_MOST_LEFT_OVER = 1e-6

E = TypeVar("E", bound=Any)  # Evidence, whose module imports this one


@dataclass(frozen=True, repr=False)
class LaplaceCorrection:
    """The ratio of an evidence to that by Laplace's approximation; made by :meth:`MarginalTarget.correction`.

    Attributes
    ----------
    log_weights : Tensor
        Log ratio of likelihood and approximation at some draws, ``(chains, draws)``.
    left_over : float
        Largest share of an integral beyond the ends of the quadrature; zero for importance sampling.

    Examples
    --------
    >>> import torch
    >>> LaplaceCorrection(torch.full((4, 100), 0.01, dtype=torch.float64))
    LaplaceCorrection(0.0100 +- 0.0000 nats)
    """

    log_weights: Tensor
    left_over: float = 0.0

    @property
    def log_ratio(self) -> float:
        """Log evidence minus that of the approximation, in nats."""
        return float(log_mean_exp(self.log_weights))

    @property
    def standard_error(self) -> float:
        """Monte Carlo standard error of :attr:`log_ratio`, in nats."""
        return float(log_mean_exp_error(self.log_weights))

    @property
    def pareto_k(self) -> float:
        """Shape of the largest weights; NaN if all are equal or there are too few."""
        return pareto_shape(self.log_weights.flatten())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the correction or its error cannot be trusted."""
        found = []
        if self.pareto_k > MAX_PARETO_SHAPE and float(self.log_weights.std()) > _EQUAL_WEIGHTS:
            found.append(
                f"the largest weights dominate the correction (Pareto k {self.pareto_k:.2f} > {MAX_PARETO_SHAPE}): the "
                "approximation is poor; take more points by num_inner=..., or sample these sites with the others"
            )
        if self.left_over > _MOST_LEFT_OVER:
            found.append(
                f"the quadrature leaves out up to {self.left_over:.1e} of an integral, beyond 12 standard deviations "
                "from the mode, or the density bends too much: the approximation is poor; sample these sites with the "
                "others"
            )
        if not found and not math.isfinite(self.log_ratio):
            found.append("the likelihood is zero or NaN at a point of the integral, so there is no correction")
        return tuple(found)

    @property
    def trusted(self) -> bool:
        """True if there is no warning."""
        return not self.warnings and math.isfinite(self.log_ratio)

    def applied(self, estimate: E) -> E:
        """Return an estimate of the evidence of the marginal target, corrected: values add up, variances as well.

        Parameters
        ----------
        estimate : Evidence
            Of the marginal target.

        Returns
        -------
        Evidence
            With the warnings of both, and the parts as ``diagnostics``.

        Raises
        ------
        SettingsError
            If the estimate is corrected already.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.evidence import Evidence
        >>> correction = LaplaceCorrection(torch.full((4, 100), 0.01, dtype=torch.float64))
        >>> correction.applied(Evidence("bridge_sampling", -94.08, 0.004, 8000))
        bridge_sampling: log evidence -94.0700 +- 0.0040
        """
        if "laplace_correction" in estimate.diagnostics:
            raise SettingsError(
                "the estimate is corrected already, as are all of a target made by marginalize(correct=True)"
            )
        return replace(
            estimate,
            log_evidence=estimate.log_evidence + self.log_ratio,
            standard_error=math.hypot(estimate.standard_error, self.standard_error),
            warnings=(*estimate.warnings, *self.warnings),
            diagnostics=estimate.diagnostics
            | {"laplace_correction": self.log_ratio, "laplace_correction_error": self.standard_error},
        )

    def __repr__(self) -> str:
        flag = "" if self.trusted else ", NOT TRUSTED: " + "; ".join(self.warnings)
        return f"LaplaceCorrection({self.log_ratio:.4f} +- {self.standard_error:.4f} nats{flag})"
