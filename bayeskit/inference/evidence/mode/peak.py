"""What surrounds a mode: an ellipsoid and the posterior mass in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import chi2
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.inference.evidence.modes import curvature
from bayeskit.target import Target

PEAK_DRAWS = 1000
#: Part of the normal distribution about a mode that counts as its peak.
PEAK_SHARE = 0.9
#: A peak is weighed if at least so many of its draws are effective.
MIN_EFFECTIVE = 30.0
#: A missing share is said if it is larger than so many of its errors.
MAX_ERRORS = 5.0


@dataclass(frozen=True)
class Peak:
    """An ellipsoid about a mode, and what it holds.

    Attributes
    ----------
    position : Tensor
        The mode, unconstrained, shape ``(d,)``.
    factor : Tensor
        Lower Cholesky factor of the negative Hessian there, shape ``(d, d)``.
    radius : float
        Of the ellipsoid, in standard deviations of the normal distribution about the mode.
    log_mass : float
        Log of prior times likelihood integrated over the ellipsoid.
    relative_error : float
        Standard error of the mass over the mass.
    """

    position: Tensor
    factor: Tensor
    radius: float
    log_mass: float
    relative_error: float

    def holds(self, x: Tensor) -> Tensor:
        """Return whether points lie inside, ``(*batch, d) -> (*batch)``, bool."""
        return ((x - self.position) @ self.factor).norm(dim=-1) <= self.radius


def weigh_peak(target: Target, mode: Tensor, *, seed: int = 0) -> tuple[Peak | None, int]:
    """Weigh the ellipsoid about a mode by draws from the normal distribution that fits there.

    Parameters
    ----------
    target : Target
    mode : Tensor
        Unconstrained, shape ``(d,)``.
    seed : int, default 0

    Returns
    -------
    peak : Peak or None
        None where no normal distribution fits, or too few of its draws tell the mass.
    num_evaluations : int

    Examples
    --------
    >>> import bayeskit as bk, torch
    >>> from bayeskit.inference.evidence.mode.peak import weigh_peak
    >>> target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u[..., 0], 2)
    >>> peak, _ = weigh_peak(target, torch.zeros(2, dtype=torch.float64))
    >>> abs(peak.log_mass - math.log(0.9 * 2 * math.pi)) < 5 * peak.relative_error
    True
    """
    precision, spent = curvature(target, mode)
    factor, failed = torch.linalg.cholesky_ex(precision)
    if bool(failed) or not bool(factor.isfinite().all()):
        return None, spent
    generator = new_generator(seed, factor.device, stream="mass of a peak")
    like = {"dtype": factor.dtype, "device": factor.device, "generator": generator}
    noise = torch.randn(PEAK_DRAWS, target.dim, **like)  # type: ignore[call-overload]
    radius = math.sqrt(float(chi2.ppf(PEAK_SHARE, target.dim)))
    x = mode + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
    constant = factor.diagonal().log().sum() - 0.5 * target.dim * math.log(2 * math.pi)
    log_weight = target.log_density(x) + 0.5 * noise.square().sum(-1) - constant
    log_weight = torch.where(noise.norm(dim=-1) <= radius, log_weight, -torch.inf)
    log_weight = log_weight.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).to(torch.float64)
    total = float(log_weight.logsumexp(0))
    effective = math.exp(2 * total - float((2 * log_weight).logsumexp(0))) if math.isfinite(total) else 0.0
    if effective < MIN_EFFECTIVE:
        return None, spent + PEAK_DRAWS
    error = math.sqrt(max(1 / effective - 1 / PEAK_DRAWS, 1 / PEAK_DRAWS**2))
    return Peak(mode, factor, radius, total - math.log(PEAK_DRAWS), error), spent + PEAK_DRAWS


def is_missed(expected: float, share: float, chance: float, relative_error: float, least: float) -> bool:
    """Whether draws hold less of a peak than they should, beyond all errors.

    Where what should be there is known but roughly, it is its logarithm that has a normal error.

    Parameters
    ----------
    expected, share : float
        Share of the posterior that the peak should have, and that of the draws in it.
    chance : float
        Standard error of the share.
    relative_error : float
        Of what is expected.
    least : float
        What counts as missing at all.

    Examples
    --------
    A hundred times the estimate, whose error is a fifth, and not one draw:

    >>> is_missed(100.0, 0.0, 0.001, 0.2, least=0.01)
    True
    >>> is_missed(1.1, 1.0, 0.001, 0.2, least=0.01)
    False
    """
    difference = math.hypot(chance, expected * relative_error)
    lowest = expected * math.exp(-MAX_ERRORS * relative_error)
    return expected - share > max(least, MAX_ERRORS * difference) or lowest - share > max(least, MAX_ERRORS * chance)
