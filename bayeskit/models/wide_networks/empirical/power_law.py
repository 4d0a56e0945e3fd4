"""A power of the width, fitted to numbers with errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import chi2
from torch import Tensor

RATES = (-1.0, 6.0)  # between which a fit looks
STEPS = 141
DEGENERATE = 1e-10  # share of the largest variance below which a direction has none


@dataclass(frozen=True)
class PowerLaw:
    """Numbers that fall as ``amplitude * width**(-rate)``, fitted by generalised least squares.

    Attributes
    ----------
    rate : float
        The common power.
    interval : tuple of float
        95 % confidence interval, by profile likelihood; an infinite end is one that the data leave open.
    p_value : float
        How often numbers that follow a power exactly would stray further from the best fit; NaN where there are too
        few to tell. A small one says that higher powers of one over the width show: leave out the smallest widths.
    amplitude : Tensor
        One for each number, ``(p,)``.

    Examples
    --------
    >>> import torch
    >>> widths = torch.tensor([8.0, 16.0, 32.0], dtype=torch.float64)
    >>> error = 1e-4 * torch.eye(1, dtype=torch.float64).expand(3, 1, 1)
    >>> law = fit_power_law(widths, (2 / widths)[:, None], error)
    >>> round(law.rate, 4), law.covers(1.0)
    (1.0, True)
    """

    rate: float
    interval: tuple[float, float]
    p_value: float
    amplitude: Tensor

    def covers(self, rate: float) -> bool:
        """Whether a rate lies in the confidence interval."""
        return self.interval[0] <= rate <= self.interval[1]

    @property
    def is_open(self) -> bool:
        """Whether the numbers are so small beside their errors that any rate fits."""
        return not (self.interval[0] > -math.inf or self.interval[1] < math.inf)

    def __repr__(self) -> str:
        low, high = self.interval
        if self.is_open:
            return "no rate to be told: the numbers drown in their errors"
        interval = f"rate in {low:.3f} to {high:.3f} at 95 %"
        unknown = math.isnan(self.p_value)
        fit = "too few widths for a goodness of fit" if unknown else f"goodness of fit p = {self.p_value:.2g}"
        return f"width**({-self.rate:.3f}) ({interval}, {fit})"


def fit_power_law(widths: Tensor, values: Tensor, covariance: Tensor) -> PowerLaw:
    """Fit one power, and an amplitude each, to several numbers that were measured at several widths.

    Parameters
    ----------
    widths : Tensor
        Shape ``(W,)``.
    values : Tensor
        Shape ``(W, p)``.
    covariance : Tensor
        Of the values at each width, ``(W, p, p)``; directions without variance are left out.

    Returns
    -------
    PowerLaw
    """
    # Against the middle of the widths, amplitudes have the size of the values.
    middle = widths.log().mean()
    scale = widths.log() - middle
    precision, num_directions = precisions(covariance)
    weighted = (precision @ values[..., None])[..., 0]
    total = (weighted * values).sum()

    def amplitudes(rates: Tensor) -> tuple[Tensor, Tensor]:
        factor = (-rates[:, None] * scale).exp()
        normal = torch.einsum("rw,wpq->rpq", factor.square(), precision)
        projection = factor @ weighted
        best = (torch.linalg.pinv(normal, hermitian=True) @ projection[..., None])[..., 0]
        return best, total - (best * projection).sum(1)

    def misfit(rate: float) -> float:
        return float(amplitudes(widths.new_tensor([rate]))[1])

    grid = torch.linspace(*RATES, STEPS, dtype=widths.dtype)
    found = amplitudes(grid)[1]
    best, step = float(grid[found.argmin()]), float(grid[1] - grid[0])
    rate = float(minimize_scalar(misfit, bounds=(best - step, best + step), method="bounded").x)
    least = misfit(rate)
    bound = least + float(chi2.ppf(0.95, 1))
    inside = [*grid[found <= bound].tolist(), rate]
    low, high = _crossing(misfit, bound, min(inside), -step), _crossing(misfit, bound, max(inside), step)
    freedom = sum(num_directions) - max(num_directions) - 1
    p_value = float(chi2.sf(least, freedom)) if freedom > 0 else float("nan")
    amplitude = amplitudes(widths.new_tensor([rate]))[0][0] * (rate * middle).exp()
    return PowerLaw(rate, (low, high), p_value, amplitude)


def precisions(covariance: Tensor) -> tuple[Tensor, list[int]]:
    """Return inverses of covariances, in the directions that have variance, and how many these are."""
    variance, direction = torch.linalg.eigh(covariance)
    kept = variance > DEGENERATE * variance[..., -1:]
    inverse = torch.where(kept, variance, 1).reciprocal() * kept
    return direction * inverse[..., None, :] @ direction.mT, kept.sum(-1).tolist()


def _crossing(misfit: Callable[[float], float], bound: float, start: float, step: float) -> float:
    """Return where the misfit rises above a bound, from a rate within it; infinite where it never does."""
    end = start + step
    while misfit(end) <= bound:
        if not RATES[0] <= end <= RATES[1]:
            return float("inf") if step > 0 else float("-inf")
        end += step
    return float(brentq(lambda rate: misfit(rate) - bound, start, end))
