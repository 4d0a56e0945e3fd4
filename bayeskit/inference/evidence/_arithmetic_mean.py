"""The corrected arithmetic mean: importance sampling on a set of known posterior probability."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayeskit._core.convergence import MIN_EFFECTIVE
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import (
    effective_sample_size,
    independent_log_mean_exp_error,
    log_mean_exp,
    weight_effective_sample_size,
)
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.inference.evidence._bridge import halved
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import with_rounding, without_nan
from bayeskit.inference.evidence._judging._weights import missed_draws, shape_that_matters, weight_problems
from bayeskit.inference.evidence._methods import Part
from bayeskit.inference.evidence._result import Evidence

#: Standard deviation and share of the wider part of the proposal, for tails heavier than a normal's.
_WIDER, _WIDE_SHARE = 2.0, 0.2


@estimator(Part.POSTERIOR)
def corrected_arithmetic_mean(
    target: Target, draws: Draws, *, num_proposals: int | None = None, seed: int = 0
) -> Evidence:
    """Estimate the log evidence from the mass in a box, and the share of posterior draws in it.

    For any set of parameters the evidence is the integral of prior times likelihood over it, divided by its posterior
    probability. The set is the box that the first half of each chain spans, along the axes of a normal distribution
    fitted to these draws in unconstrained space. Importance sampling from this normal, truncated to the box, estimates
    the integral; the share of the second halves that lies in the box estimates the probability. A fifth of the
    proposals have twice the standard deviations, for tails heavier than a normal's. In more than 50 dimensions with too
    few draws for the covariance, the normal has the curvature at the draws' mean, corrected by the draws.

    Weights are bounded, because the box is. The variance on the log scale is that of the independent weights plus that
    of the share, over the effective sample size of the draws, each divided by its squared mean. Half a draw outside the
    box is added to the latter, so that a box with all of the draws has an error, too.

    Parameters
    ----------
    target : Target
    draws : Draws
        Posterior draws: 16 or more per chain, ``4 * dim`` or more in all (200 suffice above 50 dimensions).
    num_proposals : int, optional
        Number of proposal draws, at least two; by default the number of posterior draws in the second halves.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target, are too few to fit the proposal, or have a singular covariance.
    SettingsError
        If ``num_proposals`` is not a whole number of at least two.

    References
    ----------
    Pajor, A. (2017). Estimating the marginal likelihood using the arithmetic mean identity. Bayesian Analysis 12,
    261-287.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import corrected_arithmetic_mean
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = corrected_arithmetic_mean(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.02
    (True, True)
    """
    halves = halved(target, draws, num_proposals)
    fitted = halves.fitted
    box = _Box.around(fitted, halves.draws.unconstrained[:, : halves.draws.num_draws // 2])
    x = box.sample(halves.num_proposals, new_generator(seed, stream="corrected arithmetic mean"))
    log_density, nan_problems = without_nan(target.log_density(x))
    log_weights = log_density.to(torch.float64) - box.log_prob(x)
    inside = box.holds(halves.unconstrained)
    share, share_error = _share_inside(inside, halves.log_density)

    there = box.log_prob(halves.unconstrained)
    above = (halves.log_density.to(torch.float64) - there)[inside]
    shape = shape_that_matters(log_weights.unsqueeze(0), above)
    effective = float(weight_effective_sample_size(log_weights))
    problems = nan_problems + weight_problems(shape, effective)
    problems += missed_draws(
        # What lies outside the box is not the proposal's to cover.
        lambda u: torch.where(box.holds(u), box.log_prob(u), torch.inf),
        halves.draws,
        float(log_weights.max()),
    )
    if not share * inside.numel() >= MIN_EFFECTIVE:
        problems.append(
            f"only {int(inside.sum())} draws of the second halves lie in the box of the first: run longer chains, or "
            "use bridge sampling"
        )
    # No draw in the box, no estimate; the warning above says so.
    log_share = math.log(share) if share > 0 else math.nan
    error = math.hypot(float(independent_log_mean_exp_error(log_weights.unsqueeze(0))), share_error)
    return Evidence(
        "corrected_arithmetic_mean",
        float(log_mean_exp(log_weights.unsqueeze(0))) - log_share,
        with_rounding(error, halves.log_density),
        halves.draws.num_gradients + halves.num_evaluations + halves.num_proposals,
        tuple(problems),
        {"pareto_shape": shape, "effective_proposals": effective, "share_inside": share},
    )


class _Box(NamedTuple):
    """A box along the axes of a normal distribution, and a mixture of this normal and a wider one, both truncated."""

    normal: MultivariateNormal
    low: Tensor  # (d,), standardised, in double precision
    high: Tensor  # (d,)

    @classmethod
    def around(cls, normal: MultivariateNormal, x: Tensor) -> _Box:
        """Return the smallest box that holds ``x (*batch, d)``."""
        standard = _standardised(normal, x).flatten(0, -2)
        return cls(normal, standard.amin(0), standard.amax(0))

    def holds(self, x: Tensor) -> Tensor:
        """Whether points are in the box, ``(*batch, d) -> (*batch)``."""
        standard = _standardised(self.normal, x)
        return ((standard >= self.low) & (standard <= self.high)).all(-1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw points of the mixture, ``(count, d)``."""
        uniform = torch.rand(count, len(self.low) + 1, generator=generator, dtype=torch.float64).to(self.low.device)
        scale = torch.where(uniform[:, :1] < _WIDE_SHARE, _WIDER, 1.0)
        below, within = self._levels(scale)
        # Rounding may put a quantile of a far tail at infinity.
        standard = (scale * torch.special.ndtri(below + uniform[:, 1:] * within)).clamp(self.low, self.high)
        return self.normal.loc + standard.to(self.normal.loc) @ self.normal.scale_tril.T

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities at points of the box in double precision, ``(*batch, d) -> (*batch)``."""
        standard = _standardised(self.normal, x)
        scale = torch.tensor([[1.0], [_WIDER]], dtype=torch.float64, device=standard.device)
        volume = (scale * self._levels(scale)[1]).log().sum(-1)
        parts = -0.5 * (standard.unsqueeze(-2) / scale).square().sum(-1) - volume
        weights = torch.tensor([1 - _WIDE_SHARE, _WIDE_SHARE], dtype=torch.float64, device=standard.device)
        constant = (
            0.5 * len(self.low) * math.log(2 * math.pi) + self.normal.scale_tril.to(standard).diagonal().log().sum()
        )
        return (parts + weights.log()).logsumexp(-1) - constant

    def _levels(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities below and within the box, ``(n, d)`` each, of normals of some scales ``(n, 1)``."""
        below = torch.special.ndtr(self.low / scale)
        return below, torch.special.ndtr(self.high / scale) - below


def _standardised(normal: MultivariateNormal, x: Tensor) -> Tensor:
    """Return ``x (*batch, d)`` in coordinates in which the normal is standard, in double precision."""
    factor, centred = normal.scale_tril.to(torch.float64), (x - normal.loc).to(torch.float64)
    return torch.linalg.solve_triangular(factor, centred.unsqueeze(-1), upper=False).squeeze(-1)


def _share_inside(inside: Tensor, log_density: Tensor) -> tuple[float, float]:
    """Return the share of draws ``(chains, draws)`` that are inside, and the standard error of its logarithm."""
    share = float(inside.to(torch.float64).mean())
    # Draws that are all on one side do not show how far they depend on each other; their densities do.
    shown = inside.to(torch.float64) if 0 < share < 1 else log_density.to(torch.float64)
    effective = min(float(effective_sample_size(shown)), float(inside.numel()))
    outside = ((1 - share) * effective + 0.5) / (effective + 1)
    return share, math.sqrt(outside / (1 - outside) / effective)
