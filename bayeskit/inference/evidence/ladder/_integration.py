"""The mean log likelihood as a function of the inverse temperature, and rules that integrate it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._statistics import effective_sample_size, log_mean_exp, pareto_shape, weight_effective_sample_size
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import (
    MAX_PARETO_SHAPE,
    MIN_EFFECTIVE,
    belongs,
    ladder_error,
    ladder_problems,
    with_rounding,
    without_nan,
)
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target

MAX_GAP = 0.5  # in Monte Carlo errors: a bias of more would take |z| above 3 too often
MIN_INTERVALS = 4  # of which every second temperature can be left out, and a rule remains


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
    first_step_holds : bool
        Whether enough of the prior's draws count in the first step.
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
    first_step_holds: bool = True

    @property
    def has_enough_intervals(self) -> bool:
        """Whether there are temperatures enough to see what the rules miss between them."""
        return len(self.beta) > MIN_INTERVALS

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
        error = ladder_error(torch.cat([self.start_terms, influence]), ladder)
        return with_rounding_of_sum(error, self.scale, len(ladder.beta))

    def coarse_gap(self) -> float:
        """Estimate the error left by the corrected rule from a ladder of every second temperature.

        The rule is of fourth order, so the two differ by about fifteen times the error of the finer one.
        Infinite where too few temperatures would be left.
        """
        if not self.has_enough_intervals:
            return math.inf
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
    SettingsError
        If ``ladder`` is none.
    DrawsError
        If it comes from another target.
    """
    check_ladder(ladder, target)
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    log_likelihood = log_likelihood.to(torch.float64)
    first = ladder.beta[1] * log_likelihood[:1]
    start = float(log_mean_exp(first))
    tempered = log_likelihood[1:]
    mean = tempered.mean((1, 2))
    centred = tempered - mean[:, None, None]
    terms = (first - start).exp()
    problems, diagnostics = ladder_problems(ladder)
    first_problems, facts = _first_step(first, terms)
    if len(ladder.beta) - 2 < MIN_INTERVALS:
        problems.append(
            f"a ladder of {len(ladder.beta) - 1} steps has too few temperatures to see the discretisation: use at "
            f"least {MIN_INTERVALS + 1}"
        )
    return Curve(
        start,
        terms,
        ladder.beta[1:],
        mean,
        centred.square().mean((1, 2)),
        centred.pow(3).mean((1, 2)),
        centred,
        ladder.log_likelihood,
        (*problems, *first_problems, *nan_problems),
        diagnostics | facts,
        not first_problems,
    )


def check_ladder(ladder: Ladder, target: Target) -> None:
    """Refuse what is no ladder, or one of another target.

    Raises
    ------
    SettingsError
        If ``ladder`` is none.
    DrawsError
        If it comes from another target.
    """
    if not isinstance(ladder, Ladder):
        raise SettingsError(
            f"a Ladder is needed, with draws at every temperature, not {type(ladder).__name__}; make one by "
            "sample_ladder(target)"
        )
    belongs(ladder.draws, target, posterior=False)


def with_rounding_of_sum(standard_error: float, log_values: Tensor, count: int) -> float:
    """Add to a standard error the rounding of log densities, and that of a sum of ``count`` terms as large."""
    return with_rounding(with_rounding(standard_error, log_values), count * log_values.to(torch.float64))


def _first_step(log_weights: Tensor, terms: Tensor) -> tuple[list[str], dict[str, float]]:
    """Check the weights of the step up from the prior, ``(1, chains, draws)``; ``terms`` are they over their mean."""
    # A likelihood of zero counts among the effective draws; to the tail of the weights it does not belong.
    shape = pareto_shape(log_weights[log_weights > -torch.inf])
    independent = (effective_sample_size(terms[0]) / terms.numel()).clamp(max=1.0)
    effective = float(weight_effective_sample_size(log_weights.flatten()) * independent)
    problems = []
    if not effective >= MIN_EFFECTIVE:
        problems.append(
            f"the first step, up from the prior, rests on {effective:.0f} effective draws: use a first temperature "
            "closer to zero, or longer chains"
        )
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the weights of the first step have a heavy tail (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): use a first "
            "temperature closer to zero"
        )
    return problems, {"first_step_effective_draws": effective, "first_step_pareto_shape": shape}
