"""Bayes' rule with the kernel of a wide network as the covariance of the prior."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayeskit.models.wide_networks.inputs import check_targets
from bayeskit.models.wide_networks.regression.cholesky import Cholesky, cholesky
from bayeskit.models.wide_networks.regression.jitter import check_accuracy, not_negative
from bayeskit.models.wide_networks.regression.kernels import Matrix, WideKernel, diagonal, refuse_module
from bayeskit.models.wide_networks.regression.process import GaussianProcess, check_kernel, remaining_variance


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(GaussianProcess):
    """A Gaussian-process prior given noisy observations; made by :func:`nngp_posterior` or :func:`ntk_posterior`.

    Attributes
    ----------
    prior : str
        ``"NNGP"`` or ``"NTK"``: whose kernel the prior's covariance is.
    kernel : callable
        That kernel.
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    noise_variance : float or Tensor
        Of observations.
    cholesky : Cholesky
        Of the covariance of observations.
    """

    prior: str
    kernel: Matrix
    x: Tensor
    y: Tensor
    noise_variance: float | Tensor
    cholesky: Cholesky

    @property
    def jitter(self) -> float:
        """What rounding made it necessary to add to the diagonal of the kernel matrix."""
        return self.cholesky.jitter

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.prior} posterior"

    @property
    def random(self) -> str:
        """What its variance is over, in words."""
        if self.prior == "NNGP":
            return "all weights of a wide network, from their prior given the data"
        return "the weights of a network linear in its gradients and zero at their prior's mean, given the data"

    @property
    def trained(self) -> str:
        """What was trained, in words."""
        return "nothing (Bayes' rule)"

    @property
    def log_evidence(self) -> Tensor:
        """Log density of the targets, all outputs together; gradients flow through it, ``()``."""
        return self.cholesky.log_density(self.y.reshape(len(self.y), -1))

    def prior_variance(self, x_new: Tensor) -> Tensor:
        """Return the variance of each output at new inputs before any data, ``(n_new,)``."""
        return diagonal(self.kernel, x_new)

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
        """Return covariances of white observations with new values, ``(n, n_new)``."""
        return self.cholesky.whitened(self.kernel(x_new, self.x).mT)

    def __repr__(self) -> str:
        used = f", jitter {self.jitter:g}" if self.jitter else ""
        return f"{self.name} given {len(self.y)} observations, noise variance {self.noise_variance:g}{used}"


def nngp_posterior(
    kernel: WideKernel, x: Tensor, y: Tensor, noise_variance: float | Tensor = 0.0, *, max_jitter: float | None = None
) -> Posterior:
    """Return the posterior of an infinitely wide Bayesian network.

    Weights have their normal prior, of which outputs are a Gaussian process with covariance ``kernel.nngp``, and
    observations are outputs plus normal noise.

    Parameters
    ----------
    kernel : WideKernel
        Such as :func:`~bayeskit.models.wide_networks.infinite_width` returns, or a :class:`PrecomputedKernel`.
    x : Tensor
        Training inputs, ``(n, ...)``.
    y : Tensor
        Observations, ``(n,)`` or ``(n, outputs)``.
    noise_variance : float or Tensor, default 0.0
        Of observations; gradients flow through it, as through the variances of ``kernel``. See
        :func:`relative_ridge` for a share of the kernel's diagonal.
    max_jitter : float, optional
        What may be added to the diagonal where rounding makes it necessary, in units of its mean; by default the
        square root of the machine's precision, or rounding errors of eigenvalues where these are more. What was added
        is the attribute ``jitter``.

    Returns
    -------
    Posterior

    Raises
    ------
    ShapeError, DataError
        If data do not fit one another or the kernel.
    SettingsError
        If the noise variance is negative.
    KernelError
        If the kernel matrix is not positive definite; ``variance`` raises it where that of all inputs is not.
    ModelError
        If the kernel is a torch module.

    Warns
    -----
    JitterWarning
        If jitter was added.
    AccuracyWarning
        If equal inputs, or nearly equal ones, have different targets without noise.

    References
    ----------
    Lee, J., Bahri, Y., Novak, R., Schoenholz, S. S., Pennington, J., Sohl-Dickstein, J. (2018). Deep neural networks
    as Gaussian processes. International Conference on Learning Representations.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.regression.kernels import PrecomputedKernel
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
    """Return the posterior of a Gaussian process whose prior has the tangent kernel as its covariance.

    It is Bayesian linear regression on a network's gradients, with standard normal coefficients. No wide network, be
    it trained or Bayesian, has this law: its mean is that of :func:`ntk_regression` with the noise variance as the
    ridge, but its variance is neither that of :func:`ntk_ensemble` nor of :func:`nngp_posterior`.

    Parameters and errors are those of :func:`nngp_posterior`.

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
    >>> from bayeskit.models.wide_networks.regression.kernels import PrecomputedKernel
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
    number = not_negative("noise_variance", noise_variance)
    y = check_targets(x, y)
    matrix = check_kernel(kernel(x), x, y, prior)
    noise = noise_variance if isinstance(noise_variance, Tensor) else number
    found = cholesky(matrix, noise, prior, max_jitter)
    columns = y.detach().reshape(len(y), -1)
    # The largest sum of a row is no smaller than the largest eigenvalue.
    largest = float(matrix.detach().abs().sum(1).max())
    check_accuracy(found._replace(lower=found.lower.detach()).solved(columns), columns, largest, prior)
    return Posterior(prior, kernel, x, y, noise, found)
