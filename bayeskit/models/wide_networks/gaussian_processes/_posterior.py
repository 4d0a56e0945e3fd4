"""Posteriors of Gaussian processes whose prior covariance is the kernel of a wide network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from bayeskit.errors import DataError, KernelError, ModelError, ShapeError
from bayeskit.extend import new_generator, real_number, whole_number
from bayeskit.models.wide_networks._layers import check_targets
from bayeskit.models.wide_networks.gaussian_processes._factors import Cholesky, check_accuracy, cholesky
from bayeskit.models.wide_networks.gaussian_processes._wide_kernels import (
    Matrix,
    WideKernel,
    kernel_diagonal,
    refuse_module,
)


class GaussianProcess(ABC):
    """Gaussian process given training data.

    Outputs are independent and have the same covariance. Moments are those of the function, without observation noise.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the process."""

    @property
    @abstractmethod
    def random(self) -> str:
        """Source of the variance, in words."""

    @property
    @abstractmethod
    def trained(self) -> str:
        """Description of the training, in words."""

    @abstractmethod
    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the prior variance of each output at new inputs, ``(n_new,)``."""

    @abstractmethod
    def mean(self, x_new: Tensor) -> Tensor:
        """Return the mean at new inputs, ``(n_new, *outputs)`` for ``y`` of shape ``(n, *outputs)``."""

    @abstractmethod
    def covariance(self, x_new: Tensor) -> Tensor:
        """Return the covariance of each output between new inputs, ``(n_new, n_new)``."""

    @abstractmethod
    def variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs, ``(n_new,)``."""

    def sample(self, x_new: Tensor, num_samples: int = 1, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw functions at new inputs.

        Parameters
        ----------
        x_new : Tensor
            New inputs, ``(n_new, ...)``.
        num_samples : int, default 1
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            ``(num_samples, n_new, *outputs)``.

        Raises
        ------
        KernelError
            If the covariance has negative eigenvalues beyond rounding.
        """
        count = whole_number("num_samples", num_samples, least=1)
        mean = self.mean(x_new)
        generator = new_generator(seed, mean.device, stream="Gaussian process")
        noise = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        factor = _root(self.covariance(x_new), float(self.prior_variance(x_new).max()))
        return mean + torch.einsum("ij,sj...->si...", factor, noise)


def _root(covariance: Tensor, scale: float) -> Tensor:
    """Return ``R`` with ``R R^T`` the covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    # The remaining variance is a difference; its rounding errors scale with the prior variance.
    if float(values[0]) < -(torch.finfo(covariance.dtype).eps ** 0.5) * len(values) * scale:
        raise KernelError(
            f"the covariance at new inputs has the negative eigenvalue {float(values[0]):.3g}; use float64, or a "
            "kernel that is positive definite on training and new inputs together"
        )
    return vectors * values.clamp_min(0).sqrt()


def remaining_variance(prior: Tensor, change: Tensor) -> Tensor:
    """Return ``prior + change`` ``(n_new,)`` clamped at zero; values negative beyond rounding raise ``KernelError``."""
    result = prior + change
    if not result.numel():
        return result
    smallest, scale = float(result.detach().min()), float(prior.detach().max())
    if smallest < -(torch.finfo(result.dtype).eps ** 0.5) * scale:
        raise KernelError(
            f"the variance at a new input is {smallest:.3g}, with prior variances up to {scale:.3g}; use float64, or "
            "a kernel that is positive definite on training and new inputs together"
        )
    return result.clamp_min(0)


def check_kernel(matrix: Tensor, x: Tensor, y: Tensor, name: str) -> Tensor:
    """Return the kernel matrix of the training inputs, or raise an error if shape, dtype or device do not fit."""
    if matrix.shape != (len(x), len(x)):
        raise ShapeError(f"the {name} matrix of {len(x)} training inputs has shape {tuple(matrix.shape)}")
    if matrix.dtype != y.dtype or matrix.device != y.device:
        raise DataError(
            f"the {name} matrix is {matrix.dtype} on {matrix.device}, but y is {y.dtype} on {y.device}; convert one of "
            "them"
        )
    return matrix


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(GaussianProcess):
    """Gaussian-process posterior; made by :func:`nngp_posterior` or :func:`ntk_posterior`.

    Attributes
    ----------
    prior : str
        Kernel of the prior, ``"NNGP"`` or ``"NTK"``.
    kernel : callable
        Covariance function of the prior.
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    noise_variance : float or Tensor
    cholesky : Cholesky
        Factor of the covariance of observations.
    """

    prior: str
    kernel: Matrix
    x: Tensor
    y: Tensor
    noise_variance: float | Tensor
    cholesky: Cholesky

    @property
    def jitter(self) -> float:
        """Jitter added to the diagonal of the kernel matrix."""
        return self.cholesky.jitter

    @property
    def name(self) -> str:
        """Name of the process."""
        return f"{self.prior} posterior"

    @property
    def random(self) -> str:
        """Source of the variance, in words."""
        if self.prior == "NNGP":
            return "all weights of a wide network, from their posterior"
        return "the coefficients of a linear model in a network's gradients, from their posterior"

    @property
    def trained(self) -> str:
        """Description of the training, in words."""
        return "nothing (Bayes' rule)"

    @property
    def log_evidence(self) -> Tensor:
        """Log marginal likelihood of all outputs, ``()``; gradients flow through it."""
        return self.cholesky.log_density(self.y.reshape(len(self.y), -1))

    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the prior variance of each output at new inputs, ``(n_new,)``."""
        return kernel_diagonal(self.kernel, x_new)

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the mean at new inputs, ``(n_new, *outputs)``."""
        y = self.cholesky.whitened(self.y.reshape(len(self.y), -1))
        return (self._whitened(x_new).mT @ y).reshape(-1, *self.y.shape[1:])

    def covariance(self, x_new: Tensor) -> Tensor:
        """Return the covariance of each output between new inputs, ``(n_new, n_new)``."""
        half = self._whitened(x_new)
        return self.kernel(x_new) - half.mT @ half

    def variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs, ``(n_new,)``."""
        return remaining_variance(self.prior_variance(x_new), -self._whitened(x_new).square().sum(0))

    def _whitened(self, x_new: Tensor) -> Tensor:
        """Return covariances of whitened observations with values at new inputs, ``(n, n_new)``."""
        return self.cholesky.whitened(self.kernel(x_new, self.x).mT)

    def __repr__(self) -> str:
        used = f", jitter {self.jitter:g}" if self.jitter else ""
        return f"{self.name} given {len(self.y)} observations, noise variance {self.noise_variance:g}{used}"


def nngp_posterior(
    kernel: WideKernel, x: Tensor, y: Tensor, noise_variance: float | Tensor = 0.0, *, max_jitter: float | None = None
) -> Posterior:
    """Return the posterior of an infinitely wide Bayesian network.

    Under the normal prior of the weights, outputs are a Gaussian process with covariance ``kernel.nngp``. Observations
    are outputs plus normal noise.

    Parameters
    ----------
    kernel : WideKernel
        For example from :func:`~bayeskit.models.wide_networks.infinite_width`, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Observations, ``(n,)`` or ``(n, outputs)``.
    noise_variance : float or Tensor, default 0.0
        Gradients flow through it, and through the variances of ``kernel``.
    max_jitter : float, optional
        Largest jitter allowed, relative to the mean of the kernel's diagonal; by default the square root of the machine
        precision, or more if the rounding error of eigenvalues is larger. The attribute ``jitter`` is the jitter added.

    Returns
    -------
    Posterior

    Raises
    ------
    ShapeError, DataError
        If the shapes or types of the data do not match each other or the kernel.
    SettingsError
        If the noise variance is negative.
    KernelError
        If the kernel matrix is not positive definite. ``variance`` raises it if the matrix of all inputs is not.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If the noise variance is too small for equal or nearly equal inputs that have different targets.

    References
    ----------
    Lee, J., Bahri, Y., Novak, R., Schoenholz, S. S., Pennington, J., Sohl-Dickstein, J. (2018). Deep neural networks
    as Gaussian processes. International Conference on Learning Representations.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.gaussian_processes import PrecomputedKernel
    >>> kernel = PrecomputedKernel(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> posterior = nngp_posterior(kernel, torch.tensor([0]), y, noise_variance=2.0)
    >>> posterior
    NNGP posterior given 1 observations, noise variance 2
    >>> posterior.mean(torch.tensor([1])), posterior.variance(torch.tensor([1]))
    (tensor([1.], dtype=torch.float64), tensor([1.7500], dtype=torch.float64))
    """
    refuse_module(kernel)
    return _posterior("NNGP", kernel.nngp, x, y, noise_variance, max_jitter)


def ntk_posterior(
    kernel: WideKernel, x: Tensor, y: Tensor, noise_variance: float | Tensor = 0.0, *, max_jitter: float | None = None
) -> Posterior:
    """Return the posterior of a Gaussian process whose prior covariance is the tangent kernel.

    It is Bayesian linear regression on a network's gradients, with standard normal coefficients. It is not the
    distribution of any trained or Bayesian wide network. Its mean is the mean of :func:`ntk_regression` with the noise
    variance as the ridge; its variance differs from those of :func:`ntk_ensemble` and :func:`nngp_posterior`.

    Parameters and errors are the same as for :func:`nngp_posterior`.

    Returns
    -------
    Posterior

    References
    ----------
    He, B., Lakshminarayanan, B., Teh, Y. W. (2020). Bayesian deep ensembles via the neural tangent kernel. Advances in
    Neural Information Processing Systems 33.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.gaussian_processes import PrecomputedKernel
    >>> nngp = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> ntk_posterior(PrecomputedKernel(nngp, 2 * nngp), torch.tensor([0]), y).variance(torch.tensor([1]))
    tensor([3.], dtype=torch.float64)
    """
    refuse_module(kernel)
    return _posterior("NTK", kernel.ntk, x, y, noise_variance, max_jitter)


def _posterior(
    prior: str, kernel: Matrix, x: Tensor, y: Tensor, noise_variance: float | Tensor, max_jitter: float | None
) -> Posterior:
    number = real_number("noise_variance", noise_variance, "[0, inf]")
    y = check_targets(x, y)
    matrix = check_kernel(kernel(x), x, y, prior)
    noise = noise_variance if isinstance(noise_variance, Tensor) else number
    found = cholesky(matrix, noise, prior, max_jitter)
    columns = y.detach().reshape(len(y), -1)
    # The largest absolute row sum bounds the largest eigenvalue.
    largest = float(matrix.detach().abs().sum(1).max())
    check_accuracy(found._replace(lower=found.lower.detach()).solved(columns), columns, largest, prior)
    return Posterior(prior=prior, kernel=kernel, x=x, y=y, noise_variance=noise, cholesky=found)


@dataclass(frozen=True, eq=False, repr=False)
class KernelRegression:
    """Function fitted by ridge regression with the tangent kernel; made by :func:`ntk_regression`.

    Attributes
    ----------
    posterior : Posterior
        Posterior with the tangent kernel, whose mean is the function and whose noise variance is the ridge.
    """

    posterior: Posterior

    name = "NTK regression"
    random = "nothing"
    trained = "all layers, of a network whose outputs were zero at initialisation"

    @property
    def jitter(self) -> float:
        """Jitter added to the diagonal of the kernel matrix."""
        return self.posterior.jitter

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the fitted function at new inputs, ``(n_new, *outputs)``."""
        return self.posterior.mean(x_new)

    def covariance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a point estimate has no covariance."""
        _refuse_point_estimate("covariance")

    def variance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a point estimate has no variance."""
        _refuse_point_estimate("variance")

    def sample(self, x_new: Tensor, num_samples: int = 1, *, seed: int = 0) -> NoReturn:
        """Raise an error: a point estimate has no distribution to draw from."""
        _refuse_point_estimate("draws")

    def __repr__(self) -> str:
        used = f", jitter {self.jitter:g}" if self.jitter else ""
        data, ridge = len(self.posterior.y), self.posterior.noise_variance
        return f"{self.name} on {data} inputs, ridge {ridge:g}{used}; a function, without a variance"


def ntk_regression(
    kernel: WideKernel, x: Tensor, y: Tensor, ridge: float = 0.0, *, max_jitter: float | None = None
) -> KernelRegression:
    """Fit a function by ridge regression with the tangent kernel.

    The function is the mean of :func:`ntk_posterior`, and that of :func:`ntk_ensemble` after infinite training time. It
    is also the limit of a single wide network whose outputs are zero at initialisation. It is a point estimate, without
    a variance.

    Parameters and errors are the same as for :func:`nngp_posterior`, with the ridge as the noise variance.

    Returns
    -------
    KernelRegression

    References
    ----------
    Jacot, A., Gabriel, F., Hongler, C. (2018). Neural tangent kernel: convergence and generalization in neural
    networks. Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.gaussian_processes import PrecomputedKernel
    >>> ntk = torch.tensor([[4.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> fitted = ntk_regression(PrecomputedKernel(ntk, ntk), torch.tensor([0]), y)
    >>> fitted
    NTK regression on 1 inputs, ridge 0; a function, without a variance
    >>> fitted.mean(torch.tensor([1]))
    tensor([2.], dtype=torch.float64)
    """
    ridge = real_number("ridge", ridge, "[0, inf]")
    return KernelRegression(ntk_posterior(kernel, x, y, ridge, max_jitter=max_jitter))


def _refuse_point_estimate(what: str) -> NoReturn:
    raise ModelError(
        f"kernel regression is a point estimate, which has no {what}; use ntk_ensemble for the distribution of trained "
        "networks, nngp_posterior for the posterior of a Bayesian network, or ntk_posterior"
    )
