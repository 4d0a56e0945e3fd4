"""Regression with normal noise on a network of infinite width, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.wide_networks.gaussian_processes.factor import Factor, factorize
from bayeskit.models.wide_networks.gaussian_processes.parameters import check_covariance, matrix
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth


class Prediction(NamedTuple):
    """A normal law of function values.

    Attributes
    ----------
    mean : Tensor
        At each new input, ``(m,)``.
    covariance : Tensor
        Of the function, without noise, ``(m, m)``.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Of the function at each new input, ``(m,)``."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class ExactRegression:
    """A posterior; made by :func:`exact_regression`.

    Attributes
    ----------
    network : InfiniteWidth
        Whose covariance the prior is.
    covariance : str
        ``"nngp"`` or ``"ntk"``.
    x, y : Tensor
        The data.
    noise_variance : float or Tensor
        Of the data.
    factor : Factor
        Of the covariance of the data, with the jitter that it needed.
    """

    network: InfiniteWidth
    covariance: str
    x: Tensor
    y: Tensor
    noise_variance: float | Tensor
    factor: Factor

    @property
    def jitter(self) -> float:
        """What was added to the diagonal to make it positive definite; zero if nothing was."""
        return self.factor.jitter

    @property
    def log_marginal_likelihood(self) -> Tensor:
        """The log density of the data, the function integrated out; differentiable, ``()``."""
        whitened = torch.linalg.solve_triangular(self.factor.lower, self.y[:, None], upper=False)
        log_determinant = self.factor.lower.diagonal().log().sum()
        return -0.5 * whitened.square().sum() - log_determinant - 0.5 * len(self.y) * math.log(2 * math.pi)

    def predict(self, x: Tensor) -> Prediction:
        """Return the function at new inputs, ``(m, ...)``.

        Raises
        ------
        ShapeError, DataError
            If inputs do not fit the network, or are not finite.
        """
        cross = matrix(self.network, self.covariance, self.x, x)
        return conditioned(self.factor.lower, self.y, cross, matrix(self.network, self.covariance, x))


def exact_regression(
    network: InfiniteWidth,
    x: Tensor,
    y: Tensor,
    noise_variance: float | Tensor,
    covariance: str = "nngp",
    max_jitter: float = 1e-6,
) -> ExactRegression:
    r"""Return the posterior of a function with a network's covariance, given values with normal noise.

    :math:`f \sim GP(0, k)` and :math:`y \mid f \sim N(f(x), \sigma^2)`. With ``"nngp"`` it is the posterior of the
    Bayesian network, all of whose weights have their prior. With ``"ntk"`` the tangent kernel is taken for a prior's
    covariance; that is not the law of trained networks.

    Parameters
    ----------
    network : InfiniteWidth
        Gradients flow through its variances.
    x : Tensor
        Inputs, ``(n, features)`` or ``(n, channels, *grid)``.
    y : Tensor
        Values, ``(n,)``.
    noise_variance : float or Tensor
        Not negative.
    covariance : {"nngp", "ntk"}, default "nngp"
    max_jitter : float, default 1e-6
        As in :func:`~bayeskit.models.wide_networks.gaussian_processes.factorize`.

    Returns
    -------
    ExactRegression

    Raises
    ------
    KernelError
        If the covariance of the data is not positive definite.
    ShapeError, DataError, SettingsError
        If ``x`` and ``y`` do not fit, are not finite, or the noise is negative.

    References
    ----------
    Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian processes for machine learning. MIT Press (chapter 2).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> posterior = exact_regression(network, x, torch.tensor([1.0, 2.0], dtype=torch.float64), noise_variance=0.1)
    >>> posterior.predict(x).mean
    tensor([0.9615, 1.9231], dtype=torch.float64)
    """
    check_covariance(covariance)
    check_values(x, y)
    noise = torch.as_tensor(noise_variance, dtype=y.dtype, device=y.device)
    if noise.dim() or not bool(torch.isfinite(noise)) or float(noise.detach()) < 0:
        raise SettingsError(f"noise_variance must be one number that is finite and not negative, not {noise_variance}")
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    factor = factorize(matrix(network, covariance, x) + noise * identity, "the covariance of the data", max_jitter)
    return ExactRegression(network, covariance, x, y, noise_variance, factor)


def check_values(x: Tensor, y: Tensor) -> None:
    """Refuse values that do not fit their inputs."""
    if y.dim() != 1 or len(y) != len(x):
        raise ShapeError(f"y must have one value for each of {len(x)} inputs, ({len(x)},), not {tuple(y.shape)}")
    if y.dtype != x.dtype or y.device != x.device:
        raise ShapeError(f"x and y must have one dtype and device, not {x.dtype} {x.device} and {y.dtype} {y.device}")
    if not bool(torch.isfinite(y).all()):
        first = int((~torch.isfinite(y)).nonzero()[0])
        raise DataError(f"y has values that are not finite, first at position {first}")


def conditioned(lower: Tensor, y: Tensor, cross: Tensor, prior: Tensor) -> Prediction:
    """Return the law of new values given ``y``, whose covariance has the factor ``lower``.

    Parameters
    ----------
    lower : Tensor
        ``(n, n)``.
    y : Tensor
        ``(n,)``.
    cross, prior : Tensor
        Covariances of data with new values, ``(n, m)``, and of new values, ``(m, m)``.
    """
    solved = torch.linalg.solve_triangular(lower, torch.cat([y[:, None], cross], 1), upper=False)
    white, rest = solved[:, 0], solved[:, 1:]
    return Prediction(rest.mT @ white, prior - rest.mT @ rest)
