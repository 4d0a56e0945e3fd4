"""Gaussian-process regression for more than about 10,000 points: GPyTorch's conjugate gradients and inducing points."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import global_stream, new_generator, real_number, whole_number
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks._layers import check_targets, check_vectors
from bayeskit.models.wide_networks.gaussian_processes._gpytorch_kernel import GPyTorchKernel

from linear_operator.utils.cholesky import psd_safe_cholesky  # isort: skip
from linear_operator.utils.warnings import NumericalWarning  # isort: skip
import gpytorch  # isort: skip  after the kernel's module, which says how to install it


class Marginals(NamedTuple):
    """Marginal normal distributions of the function, or of observations, at new inputs.

    Attributes
    ----------
    mean, variance : Tensor
        ``(m,)``.
    """

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class ConjugateGradients:
    """Solve linear systems by preconditioned conjugate gradients, without factorising the covariance.

    The covariance, ``(n, n)``, is held in memory. Variances are not trained.

    Attributes
    ----------
    tolerance : float
        Norm of the residual relative to the right-hand side. GPyTorch's iterations stall near 1e-6, with a warning.
    max_iterations : int
    preconditioner_rank : int
        Rank of the pivoted Cholesky factor.
    """

    tolerance: float = 1e-4
    max_iterations: int = 1000
    preconditioner_rank: int = 100

    def __post_init__(self) -> None:
        real_number("tolerance", self.tolerance, "(0, 1)")
        whole_number("max_iterations", self.max_iterations, least=1)
        whole_number("preconditioner_rank", self.preconditioner_rank, least=0)


@dataclass(frozen=True)
class InducingPoints:
    """Sparse approximation of the posterior with inducing points.

    Attributes
    ----------
    num_points : int
        Number of inducing points, initialised at random inputs.
    num_steps : int
        Steps of Adam that maximise a lower bound of the log marginal likelihood over points, variances and noise; 0
        leaves all of them at their initial values.
    learning_rate : float
    seed : int
        Seed for the initial points.

    References
    ----------
    Titsias, M. (2009). Variational learning of inducing variables in sparse Gaussian processes. AISTATS, PMLR 5.

    Examples
    --------
    >>> from bayeskit.models.wide_networks.gaussian_processes import InducingPoints
    >>> InducingPoints(num_points=100)
    InducingPoints(num_points=100, num_steps=0, learning_rate=0.05, seed=0)
    """

    num_points: int = 500
    num_steps: int = 0
    learning_rate: float = 0.05
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        whole_number("num_points", self.num_points, least=1)
        whole_number("num_steps", self.num_steps, least=0)
        real_number("learning_rate", self.learning_rate, "(0, inf)")


class _Model(gpytorch.models.ExactGP):
    """GPyTorch's exact regression model with prior mean zero."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> Any:
        """Return the prior distribution at inputs ``(n, features)``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class LargeRegression:
    """Approximate posterior for large data; made by :func:`large_regression`.

    Attributes
    ----------
    model : gpytorch.models.ExactGP
        In evaluation mode.
    method : ConjugateGradients or InducingPoints
    kernel : GPyTorchKernel
        Kernel with the final variances.
    noise_variance : float
    bound : float or None
        Lower bound of the log marginal likelihood, with inducing points only.
    jitter : float
        Jitter that GPyTorch adds to the covariance of inducing points; usually zero.
    """

    model: Any
    method: ConjugateGradients | InducingPoints
    kernel: GPyTorchKernel
    noise_variance: float
    bound: float | None
    jitter: float

    def predict(self, x: Tensor, *, noise: bool = False) -> Marginals:
        """Return moments of the function at new inputs, ``(m, features)``; with ``noise``, of observations."""
        check_vectors(x, "x")
        with _settings(self.method), torch.no_grad():
            law = self.model(x)
            return Marginals(law.mean, law.variance + self.noise_variance if noise else law.variance)


def large_regression(
    network: InfiniteWidth | GPyTorchKernel,
    x: Tensor,
    y: Tensor,
    noise_variance: float,
    method: ConjugateGradients | InducingPoints | None = None,
) -> LargeRegression:
    """Return the Gaussian-process posterior for data too large for a Cholesky factor.

    Parameters
    ----------
    network : InfiniteWidth or GPyTorchKernel
        Pass a kernel for the tangent kernel (``covariance="ntk"``) or an input shape.
    x : Tensor
        Inputs, ``(n, features)``.
    y : Tensor
        Observations, ``(n,)``.
    noise_variance : float
        Positive.
    method : ConjugateGradients or InducingPoints, optional
        By default conjugate gradients.

    Returns
    -------
    LargeRegression

    Raises
    ------
    MissingPackageError
        If GPyTorch is not installed.
    SettingsError, ShapeError, DataError
        If a setting is outside its domain, or the data have the wrong shape or are not finite.

    References
    ----------
    Gardner, J. R., Pleiss, G., Bindel, D., Weinberger, K. Q., Wilson, A. G. (2018). GPyTorch: blackbox matrix-matrix
    Gaussian process inference with GPU acceleration. Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> x = torch.linspace(0.1, 1, 50, dtype=torch.float64)[:, None]
    >>> posterior = large_regression(network, x, 2 * x[:, 0], noise_variance=0.01)
    >>> round(float(posterior.predict(x[-1:]).mean), 2)
    2.0
    """
    method = ConjugateGradients() if method is None else method
    noise_variance = real_number("noise_variance", noise_variance, "(0, inf)")
    check_vectors(x, "x")
    y = check_targets(x, y, one_output=True)
    kernel = copy.deepcopy(network) if isinstance(network, GPyTorchKernel) else GPyTorchKernel(network)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).to(x)
    likelihood.noise = torch.tensor(noise_variance, dtype=x.dtype, device=x.device)
    bound, jitter = None, 0.0
    if isinstance(method, InducingPoints):
        if method.num_points > len(x):
            raise SettingsError(f"num_points must be at most the number of inputs, {len(x)}, not {method.num_points}")
        generator = new_generator(method.seed, stream="inducing points")
        chosen = torch.randperm(len(x), generator=generator)[: method.num_points].to(x.device)
        model = _Model(x, y, likelihood, gpytorch.kernels.InducingPointKernel(kernel, x[chosen].clone(), likelihood))
        bound = _climb(model, likelihood, x, y, method)
        jitter = _jitter(model.covar_module)
    else:
        model = _Model(x, y, likelihood, kernel)
    model.eval()
    likelihood.eval()
    return LargeRegression(model, method, kernel, float(likelihood.noise.detach()), bound, jitter)


def _climb(model: _Model, likelihood: Any, x: Tensor, y: Tensor, method: InducingPoints) -> float:
    """Maximise the lower bound, and return its final value."""
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=method.learning_rate)
    with _settings(method), global_stream(new_generator(method.seed, stream="bound")):
        for _ in range(method.num_steps):
            optimizer.zero_grad()
            loss = -objective(model(x), y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return float(objective(model(x), y)) * len(x)


@torch.no_grad()
def _jitter(kernel: Any) -> float:
    """Return the jitter that GPyTorch adds to the covariance of inducing points before its Cholesky factorisation."""
    prior = kernel.base_kernel(kernel.inducing_points, kernel.inducing_points).to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # the jitter is returned instead
        upper = psd_safe_cholesky(prior, upper=True)
    added = float((upper.square().sum(0) - prior.diagonal()).mean())
    return added if added > len(prior) * torch.finfo(prior.dtype).eps * float(prior.diagonal().max()) else 0.0


@contextmanager
def _settings(method: ConjugateGradients | InducingPoints) -> Iterator[None]:
    """Context: set GPyTorch's global switches for ``method``."""
    settings = gpytorch.settings
    with ExitStack() as stack:
        stack.enter_context(settings.fast_pred_var(False))
        stack.enter_context(settings.skip_posterior_variances(False))
        if isinstance(method, ConjugateGradients):
            switches: tuple[Any, ...] = (
                settings.max_cholesky_size(1),
                settings.cg_tolerance(method.tolerance),
                settings.eval_cg_tolerance(method.tolerance),
                settings.max_cg_iterations(method.max_iterations),
                settings.max_preconditioner_size(method.preconditioner_rank),
                settings.min_preconditioning_size(1),
            )
        else:
            switches = (settings.max_cholesky_size(1 << 30),)
        for switch in switches:
            stack.enter_context(switch)
        yield
