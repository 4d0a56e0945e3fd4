"""The log-uniform prior of a weight, and the divergence of a normal distribution from it in closed form."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints, register_kl
from torch.nn.functional import softplus

from bayeskit.errors import DataError

# The divergence is G(t) at t = 1 / (2 alpha), with G' = D(sqrt(t)) / sqrt(t), where D is Dawson's function. Both are
# interpolated in u = tanh((-2 - log_alpha) / 2), which takes the line to (-1, 1), as f and g, smooth at both ends:
#     G = log(1 + 1 / alpha) / 2 + f(u) / (1 + 2 alpha),    dG / d log_alpha = -g(u) / (2 (1 + alpha)).
_CENTRE = -2.0
_DEGREE = 63
_FAR = 40.0  # t beyond which the asymptotic series is more precise than rounding


def log_uniform_divergence(log_alpha: Tensor) -> Tensor:
    r"""Return the divergence of :math:`N(\mu, \alpha \mu^2)` from the log-uniform prior, zero at :math:`\alpha=\infty`.

    The prior has density :math:`1 / |w|` and no normaliser, so that the divergence has a free constant. With the
    constant chosen to be zero at infinity,

    .. math:: \mathrm{KL}(\alpha) = \tfrac12 \mathrm E[\psi(\tfrac12 + J)] - \tfrac12 \psi(\tfrac12), \qquad
       J \sim \mathrm{Poisson}(1 / (2 \alpha)),

    since :math:`(w / \sigma)^2` is noncentral chi-squared. The derivative in :math:`\log \alpha` is
    :math:`-\sqrt{t} D(\sqrt{t})` with :math:`t = 1 / (2 \alpha)` and Dawson's function :math:`D`. Values have an
    absolute error of about 1e-15 in double precision; first and second derivatives are finite everywhere.

    Parameters
    ----------
    log_alpha : Tensor
        Logarithm of the ratio of variance and squared mean, any shape; infinities are allowed.

    Returns
    -------
    Tensor
        The divergence in nats, of the same shape; infinite where ``log_alpha`` is minus infinity.

    Raises
    ------
    DataError
        If ``log_alpha`` has no floating-point dtype.

    Notes
    -----
    Molchanov et al. fit a sigmoid, which is off by up to 0.0094 near ``log_alpha = -3.5``.

    References
    ----------
    Kingma, D. P., Salimans, T., Welling, M. (2015). Variational dropout and the local reparameterization trick.
    NeurIPS. Molchanov, D., Ashukha, A., Vetrov, D. (2017). Variational dropout sparsifies deep neural networks. ICML.

    Examples
    --------
    >>> import torch
    >>> log_uniform_divergence(torch.tensor([-4.0, 0.0, 3.0], dtype=torch.float64))
    tensor([2.6258, 0.4267, 0.0247], dtype=torch.float64)
    """
    if not log_alpha.is_floating_point():
        raise DataError(f"log_alpha has dtype {log_alpha.dtype}; give real numbers, such as log_alpha.double()")
    divergence: Tensor = _Divergence.apply(log_alpha)
    return divergence


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, log_alpha: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(log_alpha)
        rest = _series(log_alpha, 0) * torch.sigmoid(-log_alpha - math.log(2))
        return 0.5 * softplus(-log_alpha) + rest

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (log_alpha,) = context.saved_tensors
        slope: Tensor = _Slope.apply(log_alpha)
        return gradient * slope


class _Slope(torch.autograd.Function):
    """Derivative of the divergence in ``log_alpha``."""

    @staticmethod
    def forward(context: Any, log_alpha: Tensor) -> Tensor:  # type: ignore[override]
        slope = -0.5 * torch.sigmoid(-log_alpha) * _series(log_alpha, 1)
        context.save_for_backward(log_alpha, slope)
        return slope

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        log_alpha, slope = context.saved_tensors
        edge = -math.log(2 * _FAR)
        t = torch.exp(-log_alpha.clamp_min(edge)) / 2
        near = t / 2 + (t - 0.5) * slope  # from D' = 1 - 2 x D
        inverse = 2 * torch.exp(log_alpha.clamp_max(edge))
        far = sum(-0.5 * k * a * inverse**k for k, a in enumerate(_asymptotic(12), 1))
        return gradient * torch.where(log_alpha > edge, near, far)


def _series(log_alpha: Tensor, which: int) -> Tensor:
    """Return the value of a Chebyshev series by Clenshaw's recurrence."""
    coefficients = _coefficients()[which]
    needed = np.flatnonzero(np.abs(coefficients) > torch.finfo(log_alpha.dtype).eps / 8)[-1]
    twice = 2 * torch.tanh((_CENTRE - log_alpha) / 2)
    ahead, after = torch.zeros_like(twice), torch.zeros_like(twice)
    for c in coefficients[needed:0:-1].tolist():
        ahead, after = torch.addcmul(-after, twice, ahead).add_(c), ahead
    return torch.addcmul(-after, twice, ahead, value=0.5).add_(float(coefficients[0]))


@lru_cache
def _coefficients() -> np.ndarray[Any, Any]:
    """Return the coefficients of f and g, ``(2, degree + 1)``, from their series at the Chebyshev points."""
    angles = np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1)
    values = np.array([_at(_CENTRE - 2 * math.atanh(u)) for u in np.cos(angles)]).T
    transform = np.cos(np.outer(angles, np.arange(_DEGREE + 1))) * (2 / (_DEGREE + 1))
    transform[:, 0] /= 2
    return values @ transform


def _at(log_alpha: float) -> tuple[float, float]:
    """Return f and g at one point."""
    t = 0.5 * math.exp(-log_alpha)
    if t > _FAR:
        terms = [a / t**k for k, a in enumerate(_asymptotic(40), 1)]
        value = 0.5 * math.log(t) + 0.5 * np.euler_gamma + math.log(2)
        value -= math.fsum(term / (2 * k) for k, term in enumerate(terms, 1))
        slope = (1 + math.fsum(terms)) / (2 * t)  # G'(t)
    else:
        # Poisson probabilities times psi(1/2 + j) / 2 - psi(1/2) / 2, and times 1 / (1 + 2 j).
        chances = [math.exp(-t)]
        for j in range(1, 200):
            chances.append(chances[-1] * t / j)
        inverse = 1 / (1 + 2 * np.arange(200))
        value = math.fsum(np.array(chances) * np.concatenate([[0], inverse.cumsum()[:-1]]))
        slope = math.fsum(np.array(chances) * inverse)
    return (value - 0.5 * math.log1p(2 * t)) * (1 + 1 / t), (1 + 2 * t) * slope


def _asymptotic(count: int) -> list[float]:
    """Return coefficients ``(2k - 1)!! / 2**k`` of ``2 t G'(t) = 1 + sum a_k / t**k``, for k from 1."""
    return np.cumprod([(2 * k - 1) / 2 for k in range(1, count + 1)]).tolist()


class ImproperLogUniform(dist.TorchDistribution):  # type: ignore[misc]
    """Improper prior with density ``1 / |w|`` for each entry: uniform in the logarithm of the size, of either sign.

    Its mass is infinite near zero and far from it. A likelihood that does not exclude zero therefore leaves the
    posterior improper, as :func:`~bayeskit.inference.generalized.propriety_check` says.

    Parameters
    ----------
    shape : tuple of int, default ()
        Shape of the weights.

    References
    ----------
    Hron, J., Matthews, A. G. de G., Ghahramani, Z. (2018). Variational Bayesian dropout: pitfalls and fixes. ICML.

    Examples
    --------
    >>> import torch
    >>> ImproperLogUniform((2,)).log_prob(torch.tensor([0.5, -4.0])).exp().item()
    0.5
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    is_improper: ClassVar[bool] = True  # read by targets

    def __init__(self, shape: tuple[int, ...] = (), batch_shape: tuple[int, ...] = ()) -> None:
        super().__init__(torch.Size(batch_shape), torch.Size(shape), validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        """Return the real numbers; zero has density infinity."""
        return constraints.independent(constraints.real, self.event_dim) if self.event_dim else constraints.real

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the sum of ``-log |w|`` over entries."""
        terms = -value.abs().log()
        return terms.sum(tuple(range(-self.event_dim, 0))) if self.event_dim else terms

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Return starting points; their distribution has no meaning."""
        return torch.randn(self.shape(sample_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> ImproperLogUniform:
        """Return the prior with another batch shape."""
        return ImproperLogUniform(tuple(self.event_shape), batch_shape)


@register_kl(torch.distributions.Independent, ImproperLogUniform)
def _from_log_uniform(posterior: Any, prior: ImproperLogUniform) -> Tensor:
    """Return the divergence of independent normal entries, with the constant of :func:`log_uniform_divergence`."""
    base = posterior.base_dist
    if not isinstance(base, torch.distributions.Normal) or posterior.event_shape != prior.event_shape:
        raise NotImplementedError
    terms = log_uniform_divergence(log_noise_ratio(base.loc, base.scale.square()))
    return terms.sum(tuple(range(-prior.event_dim, 0)))


def log_noise_ratio(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the logarithm of variance over squared mean, with the gradient zero in ``mean`` where that is zero."""
    return variance.log() - (mean.square() + torch.finfo(mean.dtype).tiny).log()
