"""The normal approximation to a network's posterior at a mode, with the Gauss-Newton matrix as its curvature."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import AccuracyWarning, BayeskitError, ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks.curvature.flat_network import (
    BLOCK_SIZE,
    FlatNetwork,
    check_data,
    flat_network,
    row_blocks,
)
from bayeskit.models.wide_networks.curvature.likelihoods import Bernoulli, Categorical, Likelihood, checked_likelihood
from bayeskit.models.wide_networks.curvature.matrices import gauss_newton_of
from bayeskit.models.wide_networks.curvature.natural_gradient import log_likelihood_gradient
from bayeskit.models.wide_networks.curvature.operator import Curvature
from bayeskit.models.wide_networks.curvature.system import System

POLISHED = 1000  # rows of matrices up to which steps are taken
NUM_STEPS = 20
CLOSE = 0.1  # posterior standard deviations


class Prediction(NamedTuple):
    """Normal law of a linearised network's outputs.

    Attributes
    ----------
    mean : Tensor
        The network's outputs, ``(n, k)``.
    covariance : Tensor
        At each input, noise of data not included, ``(n, k, k)``.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, repr=False)
class LaplacePosterior:
    r"""Normal law of parameters, ``N(mean, (diag(prior_precision) + GGN)^{-1})``; made by :func:`laplace_posterior`.

    Attributes
    ----------
    curvature : Curvature
        The Gauss-Newton matrix.
    prior_precision : Tensor
        ``(p,)``.
    log_likelihood : float
        Of all data at the mode.
    distance : float
        From the mode to where a Newton step leads, in posterior standard deviations.
    system : System
        What inverts the precision.
    likelihood : Likelihood
    """

    curvature: Curvature
    prior_precision: Tensor
    log_likelihood: float
    distance: float
    system: System
    likelihood: Likelihood

    def __repr__(self) -> str:
        n, p = len(self.curvature.x), len(self.mean)
        return f"Laplace posterior of {p} parameters from {n} data, log evidence {self.log_evidence:.6g}"

    @property
    def mean(self) -> Tensor:
        """The mode, ``(p,)``."""
        return self.curvature.network.vector

    @property
    def log_evidence(self) -> float:
        """Logarithm of the marginal likelihood, in nats."""
        misfit = float((self.prior_precision * self.mean.square()).sum())
        return self.log_likelihood - 0.5 * misfit - 0.5 * self.system.log_determinant

    def precision(self) -> Tensor:
        """Return the inverse covariance, ``(p, p)``."""
        return self.curvature.matrix() + torch.diag(self.prior_precision)

    def covariance(self) -> Tensor:
        """Return the covariance of parameters, ``(p, p)``."""
        return self.system.quadratic(torch.diag(self.prior_precision.rsqrt()))

    def predict(self, x: Tensor) -> Prediction:
        """Return mean and covariance of outputs of the network, linear in its parameters about the mode.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, ...)``.

        References
        ----------
        Immer, A., Korzepa, M., Bauer, M. (2021). Improving predictions of Bayesian neural nets via local
        linearization. International Conference on Artificial Intelligence and Statistics.
        """
        network = self.curvature.network
        x, outputs = check_data(network, x)
        length = max(BLOCK_SIZE // (network.num_parameters * outputs.shape[1]), 1)
        found = []
        for rows in row_blocks(len(x), length):
            scaled = network.jacobian(x[rows]) * self.prior_precision.rsqrt()
            found += [self.system.quadratic(one) for one in scaled]
        return Prediction(outputs, torch.stack(found))

    def predict_probabilities(self, x: Tensor, *, num_samples: int = 10_000, seed: int | torch.Generator = 0) -> Tensor:
        """Return probabilities of data, averaged over the normal law of outputs that :meth:`predict` gives.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, ...)``.
        num_samples : int, default 10_000
            Draws of outputs, for :class:`Categorical`: the Monte Carlo error is at most ``0.5 / sqrt(num_samples)``.
            Not used for :class:`Bernoulli`, whose integrals are computed to about eight digits.
        seed : int or torch.Generator, default 0
            Of these draws.

        Returns
        -------
        Tensor
            Of ones, ``(n, k)``, for :class:`Bernoulli`; of classes, ``(n, k)``, for :class:`Categorical`.

        Raises
        ------
        SettingsError
            If the likelihood is another.
        """
        count = whole_number("num_samples", num_samples, least=1)
        if not isinstance(self.likelihood, Bernoulli | Categorical):
            name = type(self.likelihood).__name__
            raise SettingsError(f"probabilities are those of Bernoulli or Categorical data, not {name}; call predict()")
        mean, covariance = self.predict(x)
        if isinstance(self.likelihood, Bernoulli):
            return _mean_sigmoid(mean, covariance.diagonal(dim1=1, dim2=2).sqrt())
        generator = new_generator(seed, stream="predictive probabilities")
        size = count, mean.shape[1]
        noise = torch.randn(size, generator=generator, dtype=mean.dtype, device=generator.device).to(mean)
        values, vectors = torch.linalg.eigh(covariance)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        return torch.stack([(m + noise @ root.mT).softmax(1).mean(0) for m, root in zip(mean, roots, strict=True)])

    def sample(self, num_samples: int = 1, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw parameters, ``(num_samples, p)``.

        A draw goes back into a copy of the module, in the order of parameters that require gradients, by
        ``torch.nn.utils.vector_to_parameters(draw, [p for p in module.parameters() if p.requires_grad])``.
        """
        count = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, stream="laplace posterior")
        return self.mean + self.system.sample(count, generator) * self.prior_precision.rsqrt()


def laplace_posterior(
    module: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    tolerance: float = 0.1,
) -> LaplacePosterior:
    r"""Approximate the posterior of a network's parameters by a normal law at a mode.

    The prior is normal about zero. The precision is that of the prior plus the generalized Gauss-Newton matrix, which
    unlike the Hessian has no negative eigenvalues, and unlike the empirical Fisher does not depend on residuals.

    Parameters
    ----------
    module : torch.nn.Module
        At a mode of the posterior; see :func:`find_mode`.
    likelihood, x, y
        As in :func:`gauss_newton`.
    prior_precision : float or Tensor
        Positive; one number, or one a parameter, ``(p,)``.
    tolerance : float, default 0.1
        How many posterior standard deviations a Newton step may lead away.

    Returns
    -------
    LaplacePosterior
        Factorised in the space of parameters, or that of outputs of all data if that is smaller.

    Raises
    ------
    ModelError
        If the module is not at a mode, or the Gauss-Newton matrix is indefinite.
    SettingsError
        If the prior precision is not positive, or there are too many parameters and data.
    DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    MacKay, D. J. C. (1992). A practical Bayesian framework for backpropagation networks. Neural Computation 4, 448-472.

    Daxberger, E., Kristiadi, A., Immer, A., Eschenhagen, R., Bauer, M., Hennig, P. (2021). Laplace redux: effortless
    Bayesian deep learning. Advances in Neural Information Processing Systems 34.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian, find_mode, laplace_posterior
    >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> mode = find_mode(line, Gaussian(), x, y, prior_precision=1.0)
    >>> posterior = laplace_posterior(mode, Gaussian(), x, y, prior_precision=1.0)
    >>> posterior.precision()
    tensor([[6.]], dtype=torch.float64)
    >>> exact = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double() + x @ x.mT)
    >>> abs(posterior.log_evidence - float(exact.log_prob(y))) < 1e-12
    True
    """
    likelihood, network = checked_likelihood(likelihood), flat_network(module)
    prior = _checked_precision(prior_precision, network.vector)
    curvature = gauss_newton_of(network, likelihood, x, y)
    system = _factorised(curvature, prior)
    distance = _newton_step(curvature, system, likelihood, y, prior)[1]
    if not distance <= real_number("tolerance", tolerance, between=(0, math.inf)):
        raise ModelError(
            f"the module is not at a mode of this posterior: a Newton step leads {distance:.3g} posterior standard "
            f"deviations away, more than {tolerance:g}; train it further with the same likelihood and prior, for "
            "example by find_mode"
        )
    outputs = network.outputs(curvature.x)
    value = float(likelihood.log_likelihood(outputs, likelihood.targets(outputs, y)).sum())
    return LaplacePosterior(curvature, prior, value, distance, system, likelihood)


def find_mode(
    module: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    max_iterations: int = 5000,
) -> nn.Module:
    """Return a copy of a module at a mode of its posterior, found from where it is.

    By L-BFGS, and then, where matrices are not too large, Gauss-Newton steps; in double precision if the module can be
    converted, whatever its own.

    Parameters
    ----------
    module, likelihood, x, y, prior_precision
        As in :func:`laplace_posterior`.
    max_iterations : int, default 5000

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    SettingsError, ModelError, DataError, ShapeError
        As in :func:`laplace_posterior`, which also tells whether the search came close enough.

    Warns
    -----
    AccuracyWarning
        If the search ended before it came close enough.
    """
    likelihood, network = checked_likelihood(likelihood), flat_network(module)
    prior = _checked_precision(prior_precision, network.vector)
    x, outputs = check_data(network, x)
    targets = likelihood.targets(outputs, y)
    network, x, prior = _in_double(network, x, prior)
    targets = likelihood.targets(network.outputs(x), y)

    def loss(position: np.ndarray) -> tuple[float, np.ndarray]:
        vector = torch.as_tensor(position).to(network.vector)
        value, gradient = _negative_log_posterior(network.at(vector), likelihood, x, targets, prior)
        if not math.isfinite(value):
            return 1e300, np.zeros_like(position)
        return value, gradient.double().cpu().numpy()

    options = {"maxiter": whole_number("max_iterations", max_iterations, least=1), "maxfun": 10**9, "maxls": 50}
    start = network.vector.double().cpu().numpy()
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={**options, "ftol": 0.0, "gtol": 1e-9})
    network = network.at(torch.as_tensor(found.x).to(network.vector))
    network, distance = _polished(network, likelihood, x, y, prior)
    if found.status == 1 if distance is None else not distance <= CLOSE:
        far = "" if distance is None else f", {distance:.3g} posterior standard deviations from where a step leads"
        warnings.warn(
            f"the search for a mode ended after {found.nit} iterations before it was there{far}; raise max_iterations, "
            "or train the module further first",
            AccuracyWarning,
            stacklevel=2,
        )
    result = copy.deepcopy(module)
    learned = [parameter for parameter in result.parameters() if parameter.requires_grad]
    with torch.no_grad():
        nn.utils.vector_to_parameters(network.vector.to(learned[0]), learned)
    return result


def _in_double(network: FlatNetwork, x: Tensor, prior: Tensor) -> tuple[FlatNetwork, Tensor, Tensor]:
    """Return the same in double precision if the module works there, for gradients' digits limit a search."""
    wide = x.double() if x.is_floating_point() else x
    try:
        converted = flat_network(copy.deepcopy(network.module).double())
        check_data(converted, wide)
    except (BayeskitError, RuntimeError):  # some layer wants its own precision, or the device has no other
        return network, x, prior
    return converted, wide, prior.double()


def _polished(
    network: FlatNetwork, likelihood: Likelihood, x: Tensor, y: Tensor, prior: Tensor
) -> tuple[FlatNetwork, float | None]:
    """Take Gauss-Newton steps; return also how far another one would lead, None if there are no such steps."""
    outputs = network.outputs(x)
    p, dual = network.num_parameters, outputs.numel()
    if min(p, dual) > POLISHED or p * min(p, dual) > POLISHED**2:
        return network, None
    targets = likelihood.targets(outputs, y)
    distance = math.inf
    for _ in range(NUM_STEPS):
        try:
            curvature = gauss_newton_of(network, likelihood, x, y)
            step, distance = _newton_step(curvature, _factorised(curvature, prior), likelihood, y, prior)
        except ModelError:  # indefinite
            return network, None
        if distance <= 1e-6 * CLOSE:
            break
        value = _negative_log_posterior(network, likelihood, x, targets, prior)[0]
        tried = [network.at(network.vector + 0.5**i * step) for i in range(5)]
        better = (t for t in tried if _negative_log_posterior(t, likelihood, x, targets, prior)[0] < value)
        network, before = next(better, network), network
        if network is before:
            break
    return network, distance


def _newton_step(
    curvature: Curvature, system: System, likelihood: Likelihood, y: Tensor, prior: Tensor
) -> tuple[Tensor, float]:
    """Return the step to the mode of the quadratic model, and its length in posterior standard deviations."""
    network = curvature.network
    gradient = log_likelihood_gradient(network, likelihood, curvature.x, y) - prior * network.vector
    scaled = gradient * prior.rsqrt()
    return system.solve(scaled) * prior.rsqrt(), math.sqrt(float(system.quadratic(scaled.unsqueeze(0))))


def _mean_sigmoid(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the mean of the sigmoid of normal variables, by the trapezoidal rule.

    Its error falls exponentially in the distance of the sigmoid's poles, ``pi / deviation``, by the step.
    """
    largest = float(deviation.max())
    step = min(0.25, 1.0 / max(largest, 1e-3))
    half = round(9 / step)
    result = torch.zeros_like(mean)
    for i in range(-half, half + 1):
        weight = step / math.sqrt(2 * math.pi) * math.exp(-0.5 * (i * step) ** 2)
        result += weight * (mean + i * step * deviation).sigmoid()
    return result.clamp_(0, 1)


def _negative_log_posterior(
    network: FlatNetwork, likelihood: Likelihood, x: Tensor, targets: Tensor, prior: Tensor
) -> tuple[float, Tensor]:
    outputs = network.outputs(x)
    score = likelihood.score(outputs, targets)
    value = 0.5 * (prior * network.vector.square()).sum() - likelihood.log_likelihood(outputs, targets).sum()
    return float(value), prior * network.vector - network.pull(x, score)


def _factorised(curvature: Curvature, prior: Tensor) -> System:
    basis = None
    if curvature.dual_size < curvature.shape[0]:
        basis, triangle = torch.linalg.qr((curvature.rows() * prior.rsqrt()).mT)
        matrix = triangle @ triangle.mT
    else:
        matrix = curvature.matrix() * prior.rsqrt() * prior.rsqrt().unsqueeze(1)
    matrix.diagonal().add_(1.0)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise ModelError(
            "the posterior precision is not positive definite at these parameters, which happens where outputs are no "
            "natural parameters of the likelihood; train further, or raise prior_precision"
        )
    return System(factor, basis)


def _checked_precision(value: float | Tensor, vector: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(real_number("prior_precision", value), dtype=torch.float64)
    value = value.detach().to(vector)
    if value.dim() and value.shape != vector.shape:
        raise ShapeError(f"prior_precision must be one number or ({len(vector)},), not {tuple(value.shape)}")
    if not bool((torch.isfinite(value) & (value > 0)).all()):
        raise SettingsError("prior_precision must be positive and finite")
    return value.expand_as(vector)
