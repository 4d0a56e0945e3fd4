"""The mean log likelihood as a function of the inverse temperature, and rules that integrate it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._statistics import log_mean_exp
from bayeskit.inference.evidence.checks import belongs, ladder_error, ladder_problems, with_rounding, without_nan
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target

MAX_GAP = 0.5  # in Monte Carlo errors: a bias of more would take |z| above 3 too often


class Curve(NamedTuple):
    """What a ladder says about the integrand, from the first temperature above the prior upwards.

    Attributes
    ----------
    start : float
        Log of the mean importance ratio of the first temperature to the prior.
    start_terms : Tensor
        Ratios behind ``start`` relative to their mean, shape ``(1, chains, draws)``.
    beta, mean, variance, third : Tensor
        Inverse temperatures with the cumulants of the log likelihood, shape ``(T - 1,)``; each cumulant is the
        derivative of the one before.
    centred : Tensor
        Log likelihoods less their mean, shape ``(T - 1, chains, draws)``.
    scale : Tensor
        Log likelihoods as they were, for their rounding.
    problems : tuple of str
    diagnostics : dict of float
    """

    start: float
    start_terms: Tensor
    beta: Tensor
    mean: Tensor
    variance: Tensor
    third: Tensor
    centred: Tensor
    scale: Tensor
    problems: tuple[str, ...]
    diagnostics: dict[str, float]

    @property
    def width(self) -> Tensor:
        """Widths of the intervals, shape ``(T - 2,)``."""
        return self.beta.diff()

    @property
    def trapezoid(self) -> float:
        """Integral by the trapezoidal rule, the first interval by its importance ratio."""
        return self.start + float((self.width * (self.mean[1:] + self.mean[:-1])).sum()) / 2

    @property
    def corrections(self) -> Tensor:
        """Leading error of the trapezoidal rule in each interval, by the derivatives at its ends."""
        return -self.width.square() * self.variance.diff() / 12

    @property
    def gaps(self) -> Tensor:
        """Leading error of the corrected rule in each interval, by the second derivatives at its ends.

        The correction holds if the variance changes as a trapezoidal rule for its own derivative
        would have it; what is missing there returns with a tenth of the weight of the next rule.
        """
        curvature = self.width * (self.third[1:] + self.third[:-1]) / 2
        return self.width.square() * (curvature - self.variance.diff()) / 60

    def error(self, ladder: Ladder, *, corrected: bool) -> float:
        """Monte Carlo error of the integral, that of the variances included where they correct it."""
        weight, slope = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        weight[:-1] += self.width / 2
        weight[1:] += self.width / 2
        if corrected:
            slope[:-1] += self.width.square() / 12
            slope[1:] -= self.width.square() / 12
        # One series a temperature carries the errors of mean and variance together, correlation included.
        influence = weight[:, None, None] * self.centred + slope[:, None, None] * self.centred.square()
        return with_rounding(ladder_error(torch.cat([self.start_terms, influence]), ladder), self.scale)

    def coarse_gap(self) -> float:
        """Estimate the error left by the corrected rule from a ladder of every second temperature.

        The rule is of fourth order, so the two differ by about fifteen times the error of the finer one.
        """
        keep = sorted({*range(0, len(self.beta), 2), len(self.beta) - 1})
        coarse = self._replace(beta=self.beta[keep], mean=self.mean[keep], variance=self.variance[keep])
        fine = self.trapezoid + float(self.corrections.sum())
        return abs(fine - coarse.trapezoid - float(coarse.corrections.sum())) / 15


def curve(target: Target, ladder: Ladder) -> Curve:
    """Read the integrand off a ladder, with what its diagnostics object to.

    Under a heavy-tailed prior the log likelihood has no moments, so the first interval, which a ladder keeps
    narrow, is bridged by its importance ratio as in stepping stone.

    Raises
    ------
    DrawsError
        If the ladder comes from another target.
    """
    belongs(ladder.draws, target, posterior=False)
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    first = ladder.beta[1] * log_likelihood[:1]
    start = float(log_mean_exp(first))
    tempered = log_likelihood[1:]
    mean = tempered.mean((1, 2))
    centred = tempered - mean[:, None, None]
    problems, diagnostics = ladder_problems(ladder)
    return Curve(
        start,
        (first - start).exp(),
        ladder.beta[1:],
        mean,
        centred.square().mean((1, 2)),
        centred.pow(3).mean((1, 2)),
        centred,
        log_likelihood,
        (*problems, *nan_problems),
        diagnostics,
    )
