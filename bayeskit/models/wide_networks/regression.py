"""Gaussian-process regression with wide networks: NNGP and NTK posteriors, NTK ensembles and kernel regression."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import pandas as pd
import torch
from torch import Tensor, nn

from bayeskit.core.inputs import real_number, warn_user, whole_number
from bayeskit.core.randomness import new_generator
from bayeskit.core.texts import short_repr
from bayeskit.errors import (
    AccuracyWarning,
    DataError,
    JitterWarning,
    KernelError,
    ModelError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)
from bayeskit.models.wide_networks.kernels import InfiniteWidth, Kernels
from bayeskit.models.wide_networks.layers import check_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CHUNK",
    "Cholesky",
    "Ensemble",
    "GaussianProcess",
    "GaussianProcessComparison",
    "GradientDescent",
    "GradientFlow",
    "KernelRegression",
    "Matrix",
    "Posterior",
    "PrecomputedKernel",
    "ProcessPrediction",
    "Spectrum",
    "WideKernel",
    "both",
    "cholesky",
    "compare_gaussian_processes",
    "kernel_diagonal",
    "last_layer_ensemble",
    "mean_squares_rate",
    "needed_jitter",
    "nngp_posterior",
    "ntk_ensemble",
    "ntk_posterior",
    "ntk_regression",
    "refuse_module",
    "relative_ridge",
    "remaining_variance",
    "spectrum",
]


# Jitter on the diagonal of a kernel matrix, and its report.

_ROUNDING = 10  # rounding error of a zero eigenvalue, in machine precisions of the largest eigenvalue
_INACCURATE = 0.25  # power of the machine precision: relative error of a mean above which to warn


def _check_finite_matrix(matrix: Tensor, name: str) -> None:
    """Raise a ``DataError`` if a kernel matrix is not finite."""
    if not bool(torch.isfinite(matrix.detach()).all()):
        raise DataError(f"the {name} matrix of the training inputs is not finite; reduce the weight variances")


def needed_jitter(
    eigenvalues: Tensor, diagonal: Tensor, ridge: float, name: str, max_jitter: float | None = None
) -> float:
    """Return the jitter that a kernel matrix plus ridge needs to be numerically positive definite; usually zero.

    Parameters
    ----------
    eigenvalues : Tensor
        Eigenvalues of the kernel matrix without the ridge, ascending, ``(n,)``.
    diagonal : Tensor
        Diagonal of the same matrix, ``(n,)``.
    ridge : float
        Ridge on the diagonal.
    name : str
        Name of the kernel, for errors and warnings.
    max_jitter : float, optional
        Largest jitter allowed, relative to the mean of the diagonal; by default the square root of the machine
        precision, or more if the rounding error of a zero eigenvalue is larger.

    Returns
    -------
    float
        Zero or a power of ten, capped at the largest jitter allowed.

    Raises
    ------
    KernelError
        If the matrix needs more jitter than allowed.
    SettingsError
        If ``max_jitter`` is negative.

    Warns
    -----
    JitterWarning
        If the jitter is not zero.

    Examples
    --------
    >>> import torch
    >>> needed_jitter(torch.tensor([0.0, 2.0]), torch.ones(2), 0.1, "NNGP")
    0.0
    """
    precision = torch.finfo(eigenvalues.dtype).eps
    smallest, largest, scale = float(eigenvalues[0]), float(eigenvalues[-1]), float(diagonal.mean())
    rounding = _ROUNDING * precision * max(largest, 0.0)
    missing = rounding - (smallest + ridge)
    if missing <= 0 and scale > 0:
        return 0.0
    if max_jitter is None:
        # The computed value of a zero eigenvalue may be negative or positive, by the rounding error.
        allowed = max(precision**0.5 * scale, 2 * rounding)
    else:
        allowed = real_number("max_jitter", max_jitter, "[0, inf]") * scale
    if not missing <= allowed or scale <= 0:
        raise KernelError(
            f"the {name} matrix of the training inputs is not positive definite to working precision: its smallest "
            f"eigenvalue is {smallest:.3g}, its largest {largest:.3g}; with a ridge or noise variance of {ridge:g} the "
            f"jitter needed is {max(missing, 0.0):.3g}, and the largest jitter allowed is {allowed:.3g}. Remedy: "
            "remove repeated inputs, give a ridge or noise variance, use float64, or raise max_jitter"
        )
    jitter = min(10.0 ** math.ceil(math.log10(missing)), allowed)
    warn_user(
        f"the {name} matrix of the training inputs is not positive definite to working precision; jitter {jitter:.0e} "
        "was added to its diagonal (attribute jitter). Remedy: remove repeated inputs, or give a ridge or noise "
        "variance",
        JitterWarning,
    )
    return jitter


def _check_accuracy(coefficients: Tensor, y: Tensor, largest: float, name: str) -> None:
    """Warn with ``AccuracyWarning`` if rounding errors of the mean may be large relative to the targets.

    ``coefficients`` and ``y`` are ``(n, outputs)``, both rotated or neither; ``largest`` bounds the eigenvalues.
    """
    size = float(y.detach().norm())
    precision = torch.finfo(y.dtype).eps
    error = precision * largest * float(coefficients.detach().norm())
    if not error <= precision**_INACCURATE * size:
        warn_user(
            f"means computed from the {name} matrix may have errors of about {error / size:.0e} relative to the "
            "targets, because equal or nearly equal inputs have different targets without noise. Remedy: give a ridge "
            "or noise variance, or use float64 if the inputs are not equal",
            AccuracyWarning,
        )


# The Cholesky factor of the covariance of observations; gradients flow through it.


class Cholesky(NamedTuple):
    """Cholesky factor of the covariance of observations.

    Attributes
    ----------
    lower : Tensor
        Lower triangle, ``(n, n)``.
    jitter : float
        Jitter added to the diagonal; usually 0.
    """

    lower: Tensor
    jitter: float = 0.0

    def whitened(self, columns: Tensor) -> Tensor:
        """Return whitened columns, ``L^{-1} columns``, ``(n, m)``."""
        return torch.linalg.solve_triangular(self.lower, columns, upper=False)

    def solved(self, columns: Tensor) -> Tensor:
        """Return the inverse covariance times columns, ``(n, m)``."""
        return torch.cholesky_solve(columns, self.lower)

    def conditional(self, cross: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(*outputs, m)`` and reductions of variances ``(m,)`` at new inputs.

        ``cross`` has their covariances with observations, ``(n, m)``; ``white`` is whitened, ``(*outputs, n)``.
        """
        half = self.whitened(cross)
        return white @ half, half.square().sum(0)

    def log_density(self, y: Tensor) -> Tensor:
        """Return the joint log density, ``()``, of independent columns ``(n, outputs)`` with mean zero."""
        log_determinant = 2 * self.lower.diagonal().log().sum() + len(y) * math.log(2 * math.pi)
        return -0.5 * (self.whitened(y).square().sum() + y.shape[1] * log_determinant)


def cholesky(matrix: Tensor, ridge: float | Tensor, name: str, max_jitter: float | None = None) -> Cholesky:
    """Return the Cholesky factor of a kernel matrix with a ridge on its diagonal.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``.
    ridge : float or Tensor
        Ridge on the diagonal.
    name, max_jitter
        As in :func:`~bayeskit.models.wide_networks.regression.needed_jitter`.

    Returns
    -------
    Cholesky

    Raises
    ------
    DataError
        If the matrix is not finite.
    KernelError
        If it is not positive definite even with jitter.

    Warns
    -----
    JitterWarning
        If jitter was added.

    Examples
    --------
    >>> import torch
    >>> cholesky(torch.tensor([[3.0, 2.0], [2.0, 4.0]]), 1.0, "NNGP")
    Cholesky(lower=tensor([[2., 0.],
            [1., 2.]]), jitter=0.0)
    """
    _check_finite_matrix(matrix, name)
    diagonal = matrix.diagonal()
    shifted = torch.diagonal_scatter(matrix, diagonal + ridge)
    lower, failed = torch.linalg.cholesky_ex(shifted)
    rounding = _ROUNDING * torch.finfo(matrix.dtype).eps * float(diagonal.detach().sum())
    if not bool(failed) and float(lower.detach().diagonal().square().min()) > rounding:
        return Cholesky(lower)
    # Pivots are at least the smallest eigenvalue: a small pivot means that the eigenvalue may be too small.
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    added = float(ridge.detach()) if isinstance(ridge, Tensor) else ridge
    jitter = needed_jitter(eigenvalues, diagonal.detach(), added, name, max_jitter)
    lower, failed = torch.linalg.cholesky_ex(torch.diagonal_scatter(matrix, diagonal + ridge + jitter))
    if bool(failed):
        raise KernelError(
            f"the Cholesky factorisation of the {name} matrix of the training inputs failed; use float64, or a ridge"
        )
    return Cholesky(lower, jitter)


# Interface of kernels for regression, and precomputed kernel matrices.

CHUNK = 32  # inputs per block; only the diagonal of the block's covariance is used

Matrix = Callable[..., Tensor]
"""``(x1, x2) -> (n1, n2)``, or ``x -> (n, n)``."""


class WideKernel(Protocol):
    """Interface of kernels for regression, such as :class:`~bayeskit.models.wide_networks.InfiniteWidth`.

    A method is required only if the regression uses it.
    """

    def nngp(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return the covariance of a network's outputs at initialisation, ``(n1, n2)``."""
        ...

    def ntk(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return inner products of gradients with respect to all trained parameters, ``(n1, n2)``."""
        ...


@dataclass(frozen=True, eq=False)
class PrecomputedKernel:
    """Precomputed kernel matrices; inputs are row indices.

    Parameters
    ----------
    nngp_matrix : Tensor
        Covariance of outputs at all inputs (training and new), ``(n, n)``.
    ntk_matrix : Tensor, optional
        Tangent kernel at all inputs, ``(n, n)``.

    Raises
    ------
    ShapeError
        If a matrix is not square, or the matrices have different sizes.
    DataError
        If a matrix is not finite.
    KernelError
        If a matrix is not symmetric.

    Examples
    --------
    >>> import torch
    >>> matrix = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 1.0], [0.5, 1.0, 2.0]])
    >>> kernel = PrecomputedKernel(matrix)
    >>> kernel.nngp(torch.tensor([2]), torch.tensor([0, 1]))
    tensor([[0.5000, 1.0000]])
    """

    nngp_matrix: Tensor
    ntk_matrix: Tensor | None = None

    def __post_init__(self) -> None:
        for name, matrix in (("nngp_matrix", self.nngp_matrix), ("ntk_matrix", self.ntk_matrix)):
            if matrix is not None:
                _check_matrix(name, matrix)
        if self.ntk_matrix is not None and self.ntk_matrix.shape != self.nngp_matrix.shape:
            raise ShapeError(
                f"both matrices must have one shape, not {tuple(self.nngp_matrix.shape)} and "
                f"{tuple(self.ntk_matrix.shape)}"
            )

    @classmethod
    def of(cls, kernel: WideKernel, x: Tensor) -> PrecomputedKernel:
        """Compute both kernel matrices at all inputs."""
        return cls(*both(kernel, x))

    def nngp(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return rows ``x1`` and columns ``x2`` of the covariance, ``(n1, n2)``."""
        return _chosen(self.nngp_matrix, x1, x2)

    def ntk(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return rows ``x1`` and columns ``x2`` of the tangent kernel, ``(n1, n2)``."""
        if self.ntk_matrix is None:
            raise DataError("the tangent kernel is needed, but ntk_matrix is missing; pass ntk_matrix")
        return _chosen(self.ntk_matrix, x1, x2)


def both(kernel: WideKernel, x1: Tensor, x2: Tensor | None = None) -> Kernels:
    """Return both kernels, in one pass if the kernel supports it."""
    if isinstance(kernel, InfiniteWidth):
        return kernel.both(x1, x2)
    return Kernels(kernel.nngp(x1, x2), kernel.ntk(x1, x2))


def refuse_module(kernel: object) -> None:
    """Raise a ``ModelError`` if a torch module without a kernel method is given as a kernel."""
    if isinstance(kernel, nn.Module) and not any(callable(getattr(kernel, name, None)) for name in ("nngp", "ntk")):
        raise ModelError(
            f"{type(kernel).__name__} is a torch module, not a kernel; wrap it: infinite_width(module, "
            "weight_variance=..., bias_variance=...)"
        )


def kernel_diagonal(matrix: Matrix, x: Tensor) -> Tensor:
    """Return the diagonal of a kernel matrix, ``(n,)``."""
    return torch.cat([matrix(part).diagonal() for part in x.split(CHUNK)])


def _check_matrix(name: str, matrix: Tensor) -> None:
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
        raise DataError(f"{name} must be a tensor of floating-point numbers")
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"{name} must be (n, n), not {tuple(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise DataError(f"{name} has values that are not finite")
    asymmetry = float((matrix - matrix.mT).abs().max()) if matrix.numel() else 0.0
    if asymmetry > torch.finfo(matrix.dtype).eps ** 0.5 * float(matrix.abs().max()):
        raise KernelError(f"{name} must be symmetric; entries differ from their mirror images by up to {asymmetry:.3g}")


def _chosen(matrix: Tensor, x1: Tensor, x2: Tensor | None) -> Tensor:
    x2 = x1 if x2 is None else x2
    for name, x in (("x1", x1), ("x2", x2)):
        if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool:
            raise DataError(f"{name} must be row indices of the matrix, a vector of integers such as arange(4)")
        if len(x) and not 0 <= int(x.min()) <= int(x.max()) < len(matrix):
            raise ShapeError(f"{name} has row indices outside 0 to {len(matrix) - 1}")
    return matrix[x1[:, None], x2]


# Base class of Gaussian processes that regression returns.


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


def _check_kernel(matrix: Tensor, x: Tensor, y: Tensor, name: str) -> Tensor:
    """Return the kernel matrix of the training inputs, or raise an error if shape, dtype or device do not fit."""
    if matrix.shape != (len(x), len(x)):
        raise ShapeError(f"the {name} matrix of {len(x)} training inputs has shape {tuple(matrix.shape)}")
    if matrix.dtype != y.dtype or matrix.device != y.device:
        raise DataError(
            f"the {name} matrix is {matrix.dtype} on {matrix.device}, but y is {y.dtype} on {y.device}; convert one of "
            "them"
        )
    return matrix


# Posterior of a Gaussian process whose prior covariance is the kernel of a wide network.


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
        Gradients flow through it, and through the variances of ``kernel``. :func:`relative_ridge` gives a noise
        variance relative to the kernel's diagonal.
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
    >>> from bayeskit.models.wide_networks.regression import PrecomputedKernel
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
    >>> from bayeskit.models.wide_networks.regression import PrecomputedKernel
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
    matrix = _check_kernel(kernel(x), x, y, prior)
    noise = noise_variance if isinstance(noise_variance, Tensor) else number
    found = cholesky(matrix, noise, prior, max_jitter)
    columns = y.detach().reshape(len(y), -1)
    # The largest absolute row sum bounds the largest eigenvalue.
    largest = float(matrix.detach().abs().sum(1).max())
    _check_accuracy(found._replace(lower=found.lower.detach()).solved(columns), columns, largest, prior)
    return Posterior(prior, kernel, x, y, noise, found)


# The eigenvalues of a kernel matrix, computed once for all training times and noise variances.


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigendecomposition of a kernel matrix with jitter.

    Attributes
    ----------
    eigenvalues : Tensor
        Ascending, jitter included, ``(n,)``.
    eigenvectors : Tensor
        As columns, ``(n, n)``.
    jitter : float
        Jitter added to the diagonal; usually 0.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    jitter: float

    def rotated(self, rows: Tensor) -> Tensor:
        """Return the rows of a matrix in the basis of the eigenvectors, ``(m, n)``."""
        return rows @ self.eigenvectors

    def solved(self, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """Return ``(K + ridge)^{-1} y`` and ``y``, both in the basis of the eigenvectors."""
        targets = self.rotated(y.reshape(len(y), -1).mT).mT
        return targets / (self.eigenvalues + ridge)[:, None], targets


def spectrum(matrix: Tensor, ridge: float, name: str, max_jitter: float | None = None) -> Spectrum:
    """Return the eigendecomposition of a kernel matrix, with jitter if matrix plus ridge is not positive definite.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``.
    ridge : float
        Ridge on the diagonal; it is not included in the eigenvalues returned.
    name, max_jitter
        As in :func:`~bayeskit.models.wide_networks.regression.needed_jitter`.

    Returns
    -------
    Spectrum

    Raises
    ------
    DataError
        If the matrix is not finite.
    KernelError
        If it is not positive definite even with jitter.

    Warns
    -----
    JitterWarning
        If jitter was added.

    Examples
    --------
    >>> import torch
    >>> spectrum(torch.ones(2, 2, dtype=torch.float64), 0.1, "NNGP").jitter  # two equal inputs
    0.0
    """
    _check_finite_matrix(matrix, name)
    values, vectors = torch.linalg.eigh(matrix)
    jitter = needed_jitter(values, matrix.diagonal(), ridge, name, max_jitter)
    return Spectrum(values + jitter, vectors, jitter)


# Progress of training in each eigendirection: gradient flow and gradient descent.


@dataclass(frozen=True)
class GradientFlow:
    r"""Gradient flow: gradient descent in the limit of small steps, :math:`\dot\theta = -\eta \nabla L`.

    Attributes
    ----------
    learning_rate : float, default 1.0
        :math:`\eta`.
    time : float, default inf

    Raises
    ------
    SettingsError
        If the learning rate is not positive or time is negative.

    Examples
    --------
    >>> import torch
    >>> GradientFlow(0.1, time=20.0).learned(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8647])
    """

    learning_rate: float = 1.0
    time: float = math.inf

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, "(0, inf)")
        real_number("time", self.time, "[0, inf]")

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the fraction of the error removed in directions with these curvatures of the loss, ``(n,)``."""
        if math.isinf(self.time):
            return torch.ones_like(curvature)
        return -torch.expm1(-self.learning_rate * self.time * curvature)

    def __str__(self) -> str:
        end = "to infinite time" if math.isinf(self.time) else f"to time {self.time:g}"
        return f"gradient flow {end}, learning rate {self.learning_rate:g}"


@dataclass(frozen=True)
class GradientDescent:
    """Full-batch gradient descent.

    Attributes
    ----------
    learning_rate : float
    num_steps : int

    Raises
    ------
    SettingsError
        If the learning rate is not positive or the number of steps negative.

    Examples
    --------
    >>> import torch
    >>> GradientDescent(0.1, num_steps=20).learned(torch.tensor([0.0, 1.0, 15.0]))
    tensor([0.0000, 0.8784, 1.0000])
    """

    learning_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        real_number("learning_rate", self.learning_rate, "(0, inf)")
        whole_number("num_steps", self.num_steps, least=0)

    def learned(self, curvature: Tensor) -> Tensor:
        """Return the fraction of the error removed in directions with these curvatures of the loss, ``(n,)``.

        Raises
        ------
        SettingsError
            If the learning rate exceeds two over the largest curvature, so that descent diverges.
        """
        step = self.learning_rate * curvature
        if float(step.max()) > 2:
            raise SettingsError(
                f"gradient descent diverges with learning rate {self.learning_rate:g}; the learning rate must be at "
                f"most {2 / float(curvature.max()):.4g}, two over the largest curvature"
            )
        small = step < 0.5
        slowly = -torch.expm1(self.num_steps * torch.log1p(-torch.where(small, step, 0)))
        return torch.where(small, slowly, 1 - (1 - step) ** self.num_steps)

    def __str__(self) -> str:
        return f"{self.num_steps} steps of gradient descent, learning rate {self.learning_rate:g}"


def mean_squares_rate(learning_rate: float, y: Tensor) -> float:
    """Convert a learning rate for ``torch.nn.MSELoss`` to the equivalent rate for half the sum of squares.

    Parameters
    ----------
    learning_rate : float
        Learning rate for the mean of squares over all entries of ``y``.
    y : Tensor

    Examples
    --------
    >>> import torch
    >>> mean_squares_rate(0.5, torch.zeros(5, 2))
    0.1
    """
    return 2 * real_number("learning_rate", learning_rate, "(0, inf)") / y.numel()


def relative_ridge(diagonal: Tensor, share: float) -> float:
    """Return a ridge or noise variance: a share of the mean of a kernel's diagonal.

    Parameters
    ----------
    diagonal : Tensor
        For example ``kernel.ntk_diagonal(x)``.
    share : float

    Examples
    --------
    >>> import torch
    >>> relative_ridge(torch.tensor([1.0, 3.0]), 0.01)
    0.02
    """
    return real_number("share", share, "[0, inf]") * float(diagonal.mean())


# Ridge regression with the tangent kernel: a point estimate without a variance.


@dataclass(frozen=True, eq=False, repr=False)
class KernelRegression:
    """Function fitted by ridge regression with the tangent kernel; made by :func:`ntk_regression`.

    Attributes
    ----------
    kernel : WideKernel
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    ridge : float
    spectrum : Spectrum
        Eigendecomposition of the kernel matrix of training inputs.
    """

    kernel: WideKernel
    x: Tensor
    y: Tensor
    ridge: float
    spectrum: Spectrum

    name = "NTK regression"
    random = "nothing"
    trained = "all layers, of a network whose outputs were zero at initialisation"

    @property
    def jitter(self) -> float:
        """Jitter added to the diagonal of the kernel matrix."""
        return self.spectrum.jitter

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the fitted function at new inputs, ``(n_new, *outputs)``."""
        coefficients, _ = self.spectrum.solved(self.y, self.ridge)
        result = self.spectrum.rotated(self.kernel.ntk(x_new, self.x)) @ coefficients
        return result.reshape(-1, *self.y.shape[1:])

    def covariance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a point estimate has no covariance."""
        _no_law("covariance")

    def variance(self, x_new: Tensor) -> NoReturn:
        """Raise an error: a point estimate has no variance."""
        _no_law("variance")

    def sample(self, x_new: Tensor, num_samples: int = 1, *, seed: int = 0) -> NoReturn:
        """Raise an error: a point estimate has no distribution to draw from."""
        _no_law("draws")

    def __repr__(self) -> str:
        used = f", jitter {self.jitter:g}" if self.jitter else ""
        return f"{self.name} on {len(self.y)} inputs, ridge {self.ridge:g}{used}; a function, without a variance"


def ntk_regression(
    kernel: WideKernel, x: Tensor, y: Tensor, ridge: float = 0.0, *, max_jitter: float | None = None
) -> KernelRegression:
    """Fit a function by ridge regression with the tangent kernel.

    The function is the mean of :func:`ntk_ensemble` after infinite training time. It is also the limit of a single wide
    network whose outputs are zero at initialisation. It is a point estimate, without a variance.

    Parameters
    ----------
    kernel : WideKernel
        For example from :func:`~bayeskit.models.wide_networks.infinite_width`, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    ridge : float, default 0.0
        Ridge on the kernel's diagonal. :func:`relative_ridge` gives a ridge relative to the diagonal.
    max_jitter : float, optional
        Largest jitter allowed, relative to the mean of the kernel's diagonal; by default the square root of the machine
        precision, or more if the rounding error of eigenvalues is larger. The attribute ``jitter`` is the jitter added.

    Returns
    -------
    KernelRegression

    Raises
    ------
    ShapeError, DataError
        If the shapes or types of the data do not match each other or the kernel.
    SettingsError
        If the ridge is negative.
    KernelError
        If the kernel matrix is not positive definite.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If the ridge is too small for equal or nearly equal inputs that have different targets.

    References
    ----------
    Jacot, A., Gabriel, F., Hongler, C. (2018). Neural tangent kernel: convergence and generalization in neural
    networks. Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.regression import PrecomputedKernel
    >>> ntk = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> fitted = ntk_regression(PrecomputedKernel(ntk, ntk), torch.tensor([0]), y)
    >>> fitted
    NTK regression on 1 inputs, ridge 0; a function, without a variance
    >>> fitted.mean(torch.tensor([1]))
    tensor([2.], dtype=torch.float64)
    """
    ridge = real_number("ridge", ridge, "[0, inf]")
    refuse_module(kernel)
    return _regression(kernel, x, y, ridge, max_jitter)


def _regression(kernel: WideKernel, x: Tensor, y: Tensor, ridge: float, max_jitter: float | None) -> KernelRegression:
    y = check_targets(x, y)
    matrix = _check_kernel(kernel.ntk(x), x, y, "NTK")
    found = spectrum(matrix, ridge, "NTK", max_jitter)
    _check_accuracy(*found.solved(y, ridge), float(found.eigenvalues[-1]), "NTK")
    return KernelRegression(kernel, x, y, ridge, found)


def _no_law(what: str) -> NoReturn:
    raise ModelError(
        f"kernel regression is a point estimate, which has no {what}; use ntk_ensemble for the distribution of trained "
        "networks, nngp_posterior for the posterior of a Bayesian network, or ntk_posterior"
    )


# Distribution of wide networks trained by gradient flow from random initial weights.


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble(GaussianProcess):
    """Distribution of trained networks; made by :func:`ntk_ensemble` or :func:`last_layer_ensemble`.

    Attributes
    ----------
    kernel : WideKernel
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    last_layer : bool
        Whether only the last layer is trained.
    training : GradientFlow or GradientDescent
        Training algorithm, learning rate and duration.
    ridge : float
        Weight of half the squared distance from the initial weights, in the loss.
    target_noise : float
        Variance of the noise added to each network's targets.
    spectrum : Spectrum
        Eigendecomposition of the kernel of the training dynamics.
    initial : Tensor
        Covariance of initial outputs at training inputs, in the basis of the eigenvectors, ``(n, n)``.
    """

    kernel: WideKernel
    x: Tensor
    y: Tensor
    last_layer: bool
    training: GradientFlow | GradientDescent
    ridge: float
    target_noise: float
    spectrum: Spectrum
    initial: Tensor

    @property
    def jitter(self) -> float:
        """Jitter added to the diagonal of the kernel matrix."""
        return self.spectrum.jitter

    @property
    def name(self) -> str:
        """Name of the process."""
        return "last-layer ensemble" if self.last_layer else "NTK ensemble"

    @property
    def random(self) -> str:
        """Source of the variance, in words."""
        return "the initial weights" + (" and the noise of targets" if self.target_noise else "")

    @property
    def trained(self) -> str:
        """Description of the training, in words."""
        return f"{'the last layer' if self.last_layer else 'all layers'}, by {self.training}"

    @property
    def largest_learning_rate(self) -> float:
        """Largest learning rate at which gradient descent does not diverge."""
        return 2 / float(self._curvature()[-1])

    def at(self, time: float) -> Ensemble:
        """Return the ensemble at another time of gradient flow; the eigendecomposition is reused."""
        return replace(self, training=GradientFlow(self.training.learning_rate, time))

    def after(self, num_steps: int) -> Ensemble:
        """Return the ensemble after ``num_steps`` steps of gradient descent, without discretisation error.

        Raises
        ------
        SettingsError
            If the learning rate is above :attr:`largest_learning_rate`.
        """
        descent = GradientDescent(self.training.learning_rate, num_steps)
        descent.learned(self._curvature())
        return replace(self, training=descent)

    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs before training, ``(n_new,)``."""
        return kernel_diagonal(self.kernel.nngp, x_new)

    def mean(self, x_new: Tensor) -> Tensor:
        """Return the mean at new inputs, ``(n_new, *outputs)``."""
        cross = self.kernel.nngp(x_new, self.x) if self.last_layer else self.kernel.ntk(x_new, self.x)
        y = self.spectrum.rotated(self.y.reshape(len(self.y), -1).mT)
        return (self._smoother(cross) @ y.mT).reshape(-1, *self.y.shape[1:])

    def covariance(self, x_new: Tensor) -> Tensor:
        """Return the covariance of each output between new inputs, ``(n_new, n_new)``."""
        smoother, initial = self._both(x_new)
        half = smoother @ (0.5 * self._noisy_initial() @ smoother.mT - initial.mT)
        return self.kernel.nngp(x_new) + half + half.mT

    def variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs, ``(n_new,)``."""
        smoother, initial = self._both(x_new)
        change = (smoother * (smoother @ self._noisy_initial() - 2 * initial)).sum(1)
        return remaining_variance(self.prior_variance(x_new), change)

    def training_loss(self, times: Tensor) -> Tensor:
        """Return the expected training loss along gradient flow, without the ridge term.

        Parameters
        ----------
        times : Tensor
            Non-negative, inf allowed, ``(T,)``.

        Returns
        -------
        Tensor
            Half the expected sum of squared errors over training data and outputs, ``(T,)``.

        Raises
        ------
        SettingsError
            If a time is negative.
        """
        y = self.y.reshape(len(self.y), -1)
        start = self.spectrum.rotated(y.mT).square().sum(0) + y.shape[1] * self._noisy_initial().diagonal()
        if bool((times < 0).any()):
            raise SettingsError("times must not be negative")
        curvature = self._curvature()
        remaining = torch.exp(-self.training.learning_rate * times.to(curvature)[:, None] * curvature)
        # With a ridge or jitter, the training error does not go to zero.
        error = remaining + (self.ridge + self.jitter) / curvature * (1 - remaining)
        return 0.5 * error.square() @ start

    def _curvature(self) -> Tensor:
        return self.spectrum.eigenvalues + self.ridge

    def _noisy_initial(self) -> Tensor:
        return self.initial + self.target_noise * torch.eye(len(self.y), dtype=self.y.dtype, device=self.y.device)

    def _smoother(self, cross: Tensor) -> Tensor:
        """Return the weights of the rotated targets in the outputs at new inputs, ``(n_new, n)``."""
        curvature = self._curvature()
        return self.spectrum.rotated(cross) * (self.training.learned(curvature) / curvature)

    def _both(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smoother, and covariances of initial outputs with those at training inputs, ``(n_new, n)``."""
        if self.last_layer:
            nngp = ntk = self.kernel.nngp(x_new, self.x)
        else:
            nngp, ntk = both(self.kernel, x_new, self.x)
        return self._smoother(ntk), self.spectrum.rotated(nngp)

    def __repr__(self) -> str:
        parts = [f"{self.name} on {len(self.y)} inputs: {self.training}"]
        parts += [f"ridge {self.ridge:g}"] if self.ridge else []
        parts += [f"target noise {self.target_noise:g}"] if self.target_noise else []
        parts += [f"jitter {self.jitter:g}"] if self.jitter else []
        return ", ".join(parts)


def ntk_ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float = 1.0,
    time: float = math.inf,
    ridge: float = 0.0,
    target_noise: float = 0.0,
    max_jitter: float | None = None,
) -> Ensemble:
    r"""Return the distribution of infinitely wide networks after training.

    Each network starts from independent random weights :math:`\theta_0` and is trained by gradient flow
    :math:`\dot\theta = -\eta\, \nabla L` on the loss

    .. math:: L(\theta) = \tfrac12 \sum_i |f_\theta(x_i) - y_i|^2 + \tfrac\rho2 |\theta - \theta_0|^2.

    With the tangent kernel :math:`\Theta`, outputs at a new input are the initial outputs plus
    :math:`A\,(y - f_{\theta_0}(x))`, where :math:`A = \Theta_{*x} (\Theta + \rho)^{-1} (1 - e^{-\eta (\Theta + \rho)
    t})`, and therefore normal. This distribution is not a posterior. :func:`mean_squares_rate` converts learning rates
    for a mean of squares.

    Parameters
    ----------
    kernel : WideKernel
        For example from :func:`~bayeskit.models.wide_networks.infinite_width`, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    learning_rate : float, default 1.0
        :math:`\eta`; only its product with time matters.
    time : float, default inf
        :math:`t`. :meth:`Ensemble.at` gives other times, :meth:`Ensemble.after` steps of gradient descent.
    ridge : float, default 0.0
        :math:`\rho`. :func:`relative_ridge` gives a ridge relative to the kernel's diagonal.
    target_noise : float, default 0.0
        Variance of normal noise added to the targets, drawn once per network.
    max_jitter : float, optional
        Largest jitter allowed, relative to the mean of the kernel's diagonal; by default the square root of the machine
        precision, or more if the rounding error of eigenvalues is larger. The attribute ``jitter`` is the jitter added.

    Returns
    -------
    Ensemble

    Raises
    ------
    ShapeError, DataError
        If the shapes or types of the data do not match each other or the kernel.
    SettingsError
        If the learning rate is not positive, or time, ridge or noise are negative.
    KernelError
        If the matrix of the tangent kernel is not positive definite. ``variance`` raises it if the matrix of all inputs
        is not.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If the ridge is too small for equal or nearly equal inputs that have different targets, and time is infinite.

    References
    ----------
    Lee, J., Xiao, L., Schoenholz, S. S., Bahri, Y., Novak, R., Sohl-Dickstein, J., Pennington, J. (2019). Wide neural
    networks of any depth evolve as linear models under gradient descent. Advances in Neural Information Processing
    Systems 32. Equations 14 to 16.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), bias_variance=0.1)
    >>> x = torch.tensor([[-1.0], [0.5], [1.0]], dtype=torch.float64)
    >>> ensemble = ntk_ensemble(kernel, x, torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64))
    >>> ensemble
    NTK ensemble on 3 inputs: gradient flow to infinite time, learning rate 1
    >>> ensemble.mean(x).round(decimals=9).abs()  # they interpolate
    tensor([1.0000, 0.0000, 0.5000], dtype=torch.float64)
    >>> ensemble.at(0.0).variance(x) == kernel.nngp_diagonal(x)
    tensor([True, True, True])
    """
    flow = GradientFlow(learning_rate, time)
    return _ensemble(kernel, x, y, False, flow, ridge, target_noise, max_jitter)


def last_layer_ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    *,
    learning_rate: float = 1.0,
    time: float = math.inf,
    ridge: float = 0.0,
    target_noise: float = 0.0,
    max_jitter: float | None = None,
) -> Ensemble:
    """Return the distribution of infinitely wide networks after training the last layer only.

    In the NTK parametrisation, the tangent kernel of the last layer is the covariance of the outputs. If training time
    is infinite and ``target_noise`` equals ``ridge``, the distribution is :func:`nngp_posterior` with that noise
    variance.

    Parameters and errors are the same as for :func:`ntk_ensemble`.

    Returns
    -------
    Ensemble

    Raises
    ------
    ModelError
        Also if the kernel is in the standard parametrisation, in which products of gradients grow with the width.

    References
    ----------
    Matthews, A. G. de G., Hron, J., Turner, R. E., Ghahramani, Z. (2017). Sample-then-optimize posterior sampling for
    Bayesian linear models. NeurIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.regression import PrecomputedKernel
    >>> kernel = PrecomputedKernel(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    >>> old, new = torch.tensor([0]), torch.tensor([1])
    >>> y = torch.tensor([4.0], dtype=torch.float64)
    >>> last_layer_ensemble(kernel, old, y, ridge=2.0, target_noise=2.0).variance(new)
    tensor([1.7500], dtype=torch.float64)
    """
    if isinstance(kernel, InfiniteWidth) and kernel.parameterization != "ntk":
        raise ModelError(
            f"the kernel is in the {kernel.parameterization} parametrisation, in which the last layer's products of "
            'gradients grow with the width; use infinite_width(module, "ntk", ...)'
        )
    flow = GradientFlow(learning_rate, time)
    return _ensemble(kernel, x, y, True, flow, ridge, target_noise, max_jitter)


def _ensemble(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    last_layer: bool,
    flow: GradientFlow,
    ridge: float,
    target_noise: float,
    max_jitter: float | None,
) -> Ensemble:
    ridge, target_noise = real_number("ridge", ridge, "[0, inf]"), real_number("target_noise", target_noise, "[0, inf]")
    refuse_module(kernel)
    y = check_targets(x, y)
    nngp, ntk = (kernel.nngp(x), None) if last_layer else both(kernel, x)
    nngp = _check_kernel(nngp, x, y, "NNGP")
    followed = nngp if ntk is None else _check_kernel(ntk, x, y, "NTK")
    name = "NNGP" if last_layer else "NTK"
    found = spectrum(followed, ridge, name, max_jitter)
    if math.isinf(flow.time):
        _check_accuracy(*found.solved(y, ridge), float(found.eigenvalues[-1]), name)
    initial = found.eigenvectors.mT @ nngp @ found.eigenvectors
    return Ensemble(kernel, x, y, last_layer, flow, ridge, target_noise, found, initial)


# The four Gaussian processes of a wide network on the same data.

_BAND = "2 standard deviations"


@dataclass(frozen=True, eq=False)
class ProcessPrediction:
    """Prediction of one Gaussian process at new inputs.

    Attributes
    ----------
    name : str
        Name of the process.
    random : str
        Source of the variance, in words.
    trained : str
        Description of the training, in words.
    mean : Tensor
        ``(n_new, *outputs)``.
    variance : Tensor or None
        Variance of each output, ``(n_new,)``; None for kernel regression.
    jitter : float
        Jitter added to the diagonal of the kernel matrix.
    """

    name: str
    random: str
    trained: str
    mean: Tensor
    variance: Tensor | None
    jitter: float

    __repr__ = short_repr


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProcessComparison:
    """Predictions of the four Gaussian processes of a wide network at the same new inputs.

    Attributes
    ----------
    predictions : dict of ProcessPrediction
        By name of the process.
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    x_new : Tensor
        New inputs, ``(n_new, ...)``.
    noise_variance : float
        Noise variance of both posteriors; ridge of the ensemble and of kernel regression.
    """

    predictions: dict[str, ProcessPrediction]
    x: Tensor
    y: Tensor
    x_new: Tensor
    noise_variance: float

    def __getitem__(self, name: str) -> ProcessPrediction:
        if name not in self.predictions:
            raise UnknownNameError(f"there is no process {name!r}; the names are: {', '.join(self.predictions)}")
        return self.predictions[name]

    def __iter__(self) -> Iterator[ProcessPrediction]:
        return iter(self.predictions.values())

    def to_pandas(self) -> pd.DataFrame:
        """Return mean and standard deviation (or NaN), one row per process, new input and output."""
        tables = []
        for one in self:
            mean = one.mean.reshape(len(one.mean), -1)
            variance = torch.full_like(mean[:, 0], math.nan) if one.variance is None else one.variance
            points, outputs = mean.shape
            columns = {
                "process": one.name,
                "point": torch.arange(points).repeat_interleave(outputs).numpy(),
                "output": torch.arange(outputs).repeat(points).numpy(),
                "mean": mean.reshape(-1).cpu().numpy(),
                "standard_deviation": variance.sqrt().repeat_interleave(outputs).cpu().numpy(),
            }
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def summary(self) -> pd.DataFrame:
        """Return descriptions, distances, standard deviations and jitter, one row per process.

        ``distance`` is the root mean square difference from the mean of the NNGP posterior, ``standard_deviation`` the
        square root of the mean variance.
        """
        first = next(iter(self)).mean
        rows = [
            {
                "process": one.name,
                "random": one.random,
                "trained": one.trained,
                "distance": float((one.mean - first).square().mean().sqrt()),
                "standard_deviation": math.nan if one.variance is None else float(one.variance.mean().sqrt()),
                "jitter": one.jitter,
            }
            for one in self
        ]
        return pd.DataFrame(rows)

    def distances(self) -> pd.DataFrame:
        """Return root mean square differences between the means of all pairs, ``(4, 4)``."""
        means = torch.stack([one.mean.reshape(-1) for one in self])
        gaps = (means[:, None] - means).square().mean(-1).sqrt()
        names = list(self.predictions)
        return pd.DataFrame(gaps.cpu().numpy(), index=names, columns=names)

    def plot(self, output: int = 0, axes: list[Axes] | None = None) -> Figure | None:
        """Plot the mean of one output plus and minus two standard deviations, one panel per process.

        The horizontal axis is the input if it is scalar. Otherwise new inputs are ordered by the mean of the NNGP
        posterior.

        Parameters
        ----------
        output : int, default 0
        axes : list of Axes, optional
            Four axes; by default a new figure is made and returned.

        Raises
        ------
        ShapeError
            If the output does not exist, or the number of axes is not four.
        """
        from matplotlib.figure import Figure

        outputs = self.y.reshape(len(self.y), -1).shape[1]
        if not 0 <= output < outputs:
            raise ShapeError(f"output must be 0 to {outputs - 1}, not {output}")
        figure = None
        if axes is None:
            figure = Figure(figsize=(3.1 * len(self.predictions), 3.0), layout="constrained")
            axes = list(figure.subplots(1, len(self.predictions), sharey=True, squeeze=False)[0])
        if len(axes) != len(self.predictions):
            raise ShapeError(f"there must be {len(self.predictions)} axes, not {len(axes)}")
        for one, ax in zip(self, axes, strict=True):
            self._panel(one, output, ax)
        axes[0].set_ylabel("output" if outputs == 1 else f"output {output}")
        axes[0].legend(frameon=False, fontsize="small")
        return figure

    def _panel(self, one: ProcessPrediction, output: int, ax: Axes) -> None:
        from bayeskit.core.plots import BLUE, VERMILION

        line = self.x_new.dim() == 2 and self.x_new.shape[1] == 1
        first = next(iter(self)).mean.reshape(len(self.x_new), -1)[:, output]
        order = (self.x_new[:, 0] if line else first).argsort().cpu()
        place = (self.x_new[:, 0].cpu()[order] if line else torch.arange(len(order))).numpy()
        mean = one.mean.reshape(len(self.x_new), -1)[:, output].cpu()[order].numpy()
        ax.plot(place, mean, color=BLUE, linewidth=1.5, label="mean")
        if one.variance is not None:
            spread = 2 * one.variance.sqrt().cpu()[order].numpy()
            ax.fill_between(place, mean - spread, mean + spread, color=BLUE, alpha=0.2, linewidth=0, label=_BAND)
        if line:
            targets = self.y.reshape(len(self.y), -1)[:, output]
            x = self.x[:, 0].cpu().numpy()
            ax.plot(x, targets.cpu().numpy(), "o", markersize=4, color=VERMILION, label="data")
        ax.set_xlabel("input" if line else "new inputs, ordered by NNGP mean")
        ax.set_title(one.name + ("\n(point estimate, no variance)" if one.variance is None else ""), fontsize="medium")
        ax.grid(alpha=0.25)

    def __repr__(self) -> str:
        lines = [
            f"{len(self.x_new)} new inputs, {len(self.y)} training inputs, noise variance or ridge "
            f"{self.noise_variance:g}",
            f"  {'':16}{'distance':>10}{'sd':>10}",
        ]
        for row in self.summary().itertuples():
            spread = "-" if math.isnan(row.standard_deviation) else f"{row.standard_deviation:.4g}"
            used = f"; jitter {row.jitter:g}" if row.jitter else ""
            lines.append(f"  {row.process:16}{row.distance:10.4g}{spread:>10}{used}")
            lines.append(f"      random: {row.random}")
            lines.append(f"      trained: {row.trained}")
        return "\n".join(lines)


def compare_gaussian_processes(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    x_new: Tensor,
    *,
    noise_variance: float = 0.0,
    learning_rate: float = 1.0,
    time: float = math.inf,
    max_jitter: float | None = None,
) -> GaussianProcessComparison:
    """Compare the predictions of four Gaussian processes of a wide network.

    - NNGP posterior: posterior of a Bayesian network.
    - NTK ensemble: distribution of networks trained by gradient flow.
    - NTK regression: point estimate of kernel regression, without a variance.
    - NTK posterior: posterior with the tangent kernel as prior covariance; its variance describes no wide network.

    After infinite training time the last three have the same mean.

    Parameters
    ----------
    kernel : WideKernel
        For example from :func:`~bayeskit.models.wide_networks.infinite_width`, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Targets, ``(n,)`` or ``(n, outputs)``.
    x_new : Tensor
        New inputs, ``(n_new, ...)``.
    noise_variance : float, default 0.0
        Noise variance of both posteriors; ridge of the ensemble and of kernel regression.
    learning_rate, time : float, default 1.0 and inf
        Training of the ensemble; see :func:`ntk_ensemble`.
    max_jitter : float, optional
        Largest jitter allowed; see :func:`nngp_posterior`.

    Returns
    -------
    GaussianProcessComparison

    Raises
    ------
    ShapeError, DataError
        If the shapes or types of the data do not match each other or the kernel.
    SettingsError
        If the noise variance or time is negative, or the learning rate not positive.
    KernelError
        If a kernel matrix is not positive definite.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If the noise variance is too small for equal or nearly equal inputs that have different targets.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), bias_variance=1.0)
    >>> x = torch.tensor([[-1.0], [0.5], [1.0]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    >>> table = compare_gaussian_processes(kernel, x, y, torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    >>> table.summary()[["process", "distance", "standard_deviation"]].round(3)
              process  distance  standard_deviation
    0  NNGP posterior     0.000               0.191
    1    NTK ensemble     0.515               0.275
    2  NTK regression     0.515                 NaN
    3   NTK posterior     0.515               0.673
    """
    refuse_module(kernel)
    check_targets(x, y)
    if x.dtype != x_new.dtype or x.device != x_new.device:
        raise DataError(
            f"x is {x.dtype} on {x.device}, but x_new is {x_new.dtype} on {x_new.device}; convert one of them"
        )
    if x.shape[1:] != x_new.shape[1:]:
        raise ShapeError(f"x and x_new must have inputs of one shape, not {tuple(x.shape)} and {tuple(x_new.shape)}")
    shared = PrecomputedKernel.of(kernel, torch.cat([x, x_new]))
    rows = torch.arange(len(x) + len(x_new), device=x.device)
    old, new = rows[: len(x)], rows[len(x) :]
    ensemble = ntk_ensemble(
        shared, old, y, learning_rate=learning_rate, time=time, ridge=noise_variance, max_jitter=max_jitter
    )
    found = (
        nngp_posterior(shared, old, y, noise_variance, max_jitter=max_jitter),
        ensemble,
        KernelRegression(shared, old, y, ensemble.ridge, ensemble.spectrum),  # shares the eigendecomposition
        ntk_posterior(shared, old, y, noise_variance, max_jitter=max_jitter),
    )
    return GaussianProcessComparison({one.name: _predict(one, new) for one in found}, x, y, x_new, noise_variance)


def _predict(one: Posterior | Ensemble | KernelRegression, new: Tensor) -> ProcessPrediction:
    variance = None if isinstance(one, KernelRegression) else one.variance(new)
    return ProcessPrediction(one.name, one.random, one.trained, one.mean(new), variance, one.jitter)
