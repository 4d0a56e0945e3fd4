"""Power laws in the width, by which tests see how fast a bias or a drift falls."""

from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

RATES = torch.linspace(-1.0, 6.0, 7001, dtype=torch.float64)


@dataclass(frozen=True)
class PowerLaw:
    """Quantities ``(W, p)`` with covariances ``(W, p, p)`` against powers of the width with a common rate."""

    widths: Tensor
    values: Tensor
    covariance: Tensor

    def misfits(self, rates: Tensor) -> Tensor:
        """Return the weighted sums of squares that are left by the best amplitudes, ``(rates,)``."""
        precision = torch.linalg.pinv(self.covariance, rtol=1e-10, hermitian=True)
        factor = (self.widths / self.widths.log().mean().exp()) ** -rates[:, None]
        weighted = torch.einsum("wpq,wq->wp", precision, self.values)
        normal = torch.einsum("rw,wpq->rpq", factor.square(), precision)
        projection = factor @ weighted
        best = (torch.linalg.pinv(normal, hermitian=True) @ projection[..., None])[..., 0]
        return (weighted * self.values).sum() - (best * projection).sum(1)

    @property
    def interval(self) -> tuple[float, float]:
        """Profile likelihood interval of the rate, of level 0.95."""
        misfits = self.misfits(RATES)
        inside = RATES[misfits <= misfits.min() + chi2.ppf(0.95, 1)]
        return float(inside[0]), float(inside[-1])

    @property
    def rate(self) -> float:
        """Best rate."""
        return float(RATES[self.misfits(RATES).argmin()])

    @property
    def p_value(self) -> float:
        """P-value of a chi-squared test of the fit."""
        ranks = torch.linalg.matrix_rank(self.covariance, rtol=1e-10, hermitian=True)
        return float(chi2.sf(float(self.misfits(RATES).min()), int(ranks.sum() - ranks.max()) - 1))

    def covers(self, rate: float) -> bool:
        """Whether the interval contains a rate."""
        low, high = self.interval
        return low <= rate <= high


@pytest.fixture(scope="session")
def power_law():
    """Return the class of power laws in the width."""
    return PowerLaw
