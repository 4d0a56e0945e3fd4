"""Activations that are linear on either side of zero: ReLU, leaky ReLU, absolute value, identity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.models.wide_networks.activations.activation import Activation, Moments
from bayeskit.models.wide_networks.covariance import acute_angle, excess_of_size, gap_of, root, where_zero


@dataclass(frozen=True)
class PiecewiseLinear(Activation):
    r"""Slope ``left`` below zero and ``right`` above.

    With half the sum :math:`\alpha` and half the difference :math:`\beta` of the slopes the function is
    :math:`\alpha x + \beta |x|`, and its moments those of the absolute value and the identity, which do not mix.

    At zero the derivative is ``left``, which is torch's convention for ``relu`` and ``leaky_relu``, and zero for the
    absolute value, as for ``abs``. That counts where a feature has no variance: at an input of zeros, without biases.

    Parameters
    ----------
    left, right : float
        Its slopes.

    References
    ----------
    Cho, Y., Saul, L. K. (2009). Kernel methods for deep learning. Advances in Neural Information Processing Systems
    22 (arc-cosine kernels of degrees zero and one).

    Examples
    --------
    >>> import torch
    >>> variance = torch.tensor(2.0, dtype=torch.float64)
    >>> PiecewiseLinear(0.0, 1.0).moments(variance, variance, variance).nngp.item()  # half of the variance
    1.0
    """

    left: float
    right: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        if self.left == -self.right:
            return self.right * x.abs()
        return torch.where(x > 0, self.right * x, self.left * x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        odd, even = (0.5 * (self.right + self.left)) ** 2, (0.5 * (self.right - self.left)) ** 2
        known = gap is not None
        if gap is None:
            gap = gap_of(k, a, b)
        # The tangent of the angle between features keeps its digits where the cosine is one or minus one.
        sine = root(gap)
        acute, ahead = acute_angle(sine, k)
        nngp = (2 * even / math.pi) * torch.addcmul(sine, k, ahead)
        if odd:
            nngp = nngp + odd * k
        slope = None
        if derivative:
            middle = 0.0 if self.left == -self.right else self.left  # the slope at zero
            slope = (2 * even / math.pi) * ahead + odd
            slope = where_zero(a, b, slope, one=middle * 0.5 * (self.left + self.right), both=middle**2)
        return Moments(nngp, slope, self._gap(k, gap, sine, acute, a, b, nngp) if known else None)

    def _gap(self, k: Tensor, gap: Tensor, sine: Tensor, acute: Tensor, a: Tensor, b: Tensor, nngp: Tensor) -> Tensor:
        """Return the gap between the function's own moments, from that between its arguments'."""
        odd, even = (0.5 * (self.right + self.left)) ** 2, (0.5 * (self.right - self.left)) ** 2
        size = k.abs()
        parallel = torch.addcmul(sine, acute, size, value=-1)
        # The excess of the negative covariance is that of its size, plus what they differ by.
        missing = torch.add((odd + even) * excess_of_size(size, gap, a, b), parallel, alpha=-2 * even / math.pi)
        if odd:
            missing = missing + odd * (size - k)
        return missing.clamp_min(0) * torch.addcmul(nngp, root(a), root(b), value=odd + even)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return 0.5 * (self.right - self.left) * math.sqrt(2 / math.pi) * root(a)

    def gain(self) -> Activation:
        """Return the function itself."""
        return self
