"""Laplace approximation to a network's posterior at a mode, with the Gauss-Newton matrix as its curvature."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bayeskit._core.flat_networks import FlatNetwork, flat_copy, row_blocks
from bayeskit._core.inputs import real_number, warn_user, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit.errors import AccuracyWarning, BayeskitError, ModelError, SettingsError, ShapeError
from bayeskit.inference._optimize import scipy_lbfgs
from bayeskit.inference.curvature._fisher_matrices import gauss_newton_of, log_likelihood_gradient
from bayeskit.inference.curvature._likelihoods import BernoulliOutputs, Categorical, OutputLikelihood, check_likelihood
from bayeskit.inference.curvature._matrices import Curvature
from bayeskit.inference.curvature._module_data import BLOCK_SIZE, check_network_data

_POLISHED = 1000  # largest number of rows of a matrix for which Gauss-Newton steps are taken
_NUM_STEPS = 20
_CLOSE = 0.1  # posterior standard deviations


@dataclass(frozen=True)
class System:
    """The matrix ``I + W^T W``: the posterior precision for prior precision one."""

    factor: Tensor  # Cholesky factor of the matrix in the coordinates of the basis, (m, m)
    basis: Tensor | None  # of the span of the rows of W, orthonormal columns, (p, m); None for the whole space

    @property
    def log_determinant(self) -> float:
        """Log determinant of the matrix."""
        return 2 * float(self.factor.diagonal().log().sum())

    def quadratic(self, a: Tensor) -> Tensor:
        """Return ``a (I + W^T W)^{-1} a^T``, ``(m, m)``."""
        inside, outside = self._parts(a.mT)
        half = torch.linalg.solve_triangular(self.factor, inside, upper=False)
        # A sum of squares: the difference in Woodbury's formula cancels if the data are informative.
        return half.mT @ half + (0 if outside is None else outside.mT @ outside)

    def solve(self, v: Tensor) -> Tensor:
        """Return ``(I + W^T W)^{-1} v``, ``(p,)``."""
        inside, outside = self._parts(v.unsqueeze(1))
        inside = torch.cholesky_solve(inside, self.factor)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).squeeze(1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the centred normal distribution with this precision, ``(count, p)``."""
        size = len(self.factor if self.basis is None else self.basis)
        drawn = torch.randn(size, count, generator=generator, dtype=self.factor.dtype, device=generator.device)
        inside, outside = self._parts(drawn.to(self.factor.device))
        inside = torch.linalg.solve_triangular(self.factor.mT, inside, upper=True)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).mT

    def _parts(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the coordinates in the span of ``basis``, and the components orthogonal to it (or None)."""
        if self.basis is None:
            return columns, None
        inside = self.basis.mT @ columns
        outside = columns - self.basis @ inside
        # A second projection removes rounding errors.
        return inside, outside - self.basis @ (self.basis.mT @ outside)


class Prediction(NamedTuple):
    """Normal distribution of a linearised network's outputs.

    Attributes
    ----------
    mean : Tensor
        Outputs at the mode, ``(n, k)``.
    covariance : Tensor
        Covariance of outputs at each input, without observation noise, ``(n, k, k)``.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, repr=False)
class LaplacePosterior:
    r"""Laplace posterior ``N(mean, (diag(prior_precision) + GGN)^{-1})``; made by :func:`laplace_posterior`.

    Attributes
    ----------
    curvature : Curvature
        Gauss-Newton matrix (GGN).
    prior_precision : Tensor
        ``(p,)``.
    log_likelihood : float
        Log likelihood of all data at the mode.
    distance : float
        Length of a Newton step from ``mean``, in posterior standard deviations.
    system : System
        Factorised precision, scaled to prior precision one.
    likelihood : OutputLikelihood
    """

    curvature: Curvature
    prior_precision: Tensor
    log_likelihood: float
    distance: float
    system: System
    likelihood: OutputLikelihood

    def __repr__(self) -> str:
        n, p = len(self.curvature.x), len(self.mean)
        return f"Laplace posterior of {p} parameters from {n} data, log evidence {self.log_evidence:.6g}"

    @property
    def mean(self) -> Tensor:
        """The mode, ``(p,)``."""
        return self.curvature.network.vector

    @property
    def log_evidence(self) -> float:
        """Laplace approximation to the log marginal likelihood."""
        misfit = float((self.prior_precision * self.mean.square()).sum())
        return self.log_likelihood - 0.5 * misfit - 0.5 * self.system.log_determinant

    def precision(self) -> Tensor:
        """Return the inverse covariance, ``(p, p)``."""
        return self.curvature.matrix() + torch.diag(self.prior_precision)

    def covariance(self) -> Tensor:
        """Return the covariance of parameters, ``(p, p)``."""
        return self.system.quadratic(torch.diag(self.prior_precision.rsqrt()))

    def predict(self, x: Tensor) -> Prediction:
        """Return mean and covariance of the outputs of the network linearised at the mode.

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
        x, outputs = check_network_data(network, x)
        length = max(BLOCK_SIZE // (network.num_parameters * outputs.shape[1]), 1)
        found = []
        for rows in row_blocks(len(x), length):
            scaled = network.jacobian(x[rows]) * self.prior_precision.rsqrt()
            found += [self.system.quadratic(one) for one in scaled]
        return Prediction(outputs, torch.stack(found))

    def predict_probabilities(self, x: Tensor, *, num_draws: int = 10_000, seed: int | torch.Generator = 0) -> Tensor:
        """Return predictive probabilities, averaged over the distribution of outputs from :meth:`predict`.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, ...)``.
        num_draws : int, default 10_000
            Number of draws of outputs for :class:`Categorical`; the standard error is at most
            ``0.5 / sqrt(num_draws)``. Not used for :class:`BernoulliOutputs`, whose integrals are computed to about
            eight digits.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            ``(n, k)``: probabilities of ones for :class:`BernoulliOutputs`, of classes for :class:`Categorical`.

        Raises
        ------
        SettingsError
            If the likelihood is neither of these.
        """
        count = whole_number("num_draws", num_draws, least=1)
        if not isinstance(self.likelihood, BernoulliOutputs | Categorical):
            name = type(self.likelihood).__name__
            raise SettingsError(f"the likelihood must be BernoulliOutputs or Categorical, not {name}; call predict()")
        mean, covariance = self.predict(x)
        if isinstance(self.likelihood, BernoulliOutputs):
            return _mean_sigmoid(mean, covariance.diagonal(dim1=1, dim2=2).sqrt())
        generator = new_generator(seed, stream="predictive probabilities")
        size = count, mean.shape[1]
        noise = torch.randn(size, generator=generator, dtype=mean.dtype, device=generator.device).to(mean)
        values, vectors = torch.linalg.eigh(covariance)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        return torch.stack([(m + noise @ root.mT).softmax(1).mean(0) for m, root in zip(mean, roots, strict=True)])

    def sample(self, num_draws: int = 1, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw parameters, ``(num_draws, p)``.

        To write a draw into a copy of the module, use
        ``torch.nn.utils.vector_to_parameters(draw, [p for p in module.parameters() if p.requires_grad])``.
        """
        count = whole_number("num_draws", num_draws, least=1)
        generator = new_generator(seed, stream="laplace posterior")
        return self.mean + self.system.sample(count, generator) * self.prior_precision.rsqrt()


def laplace_posterior(
    module: nn.Module,
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    tolerance: float = 0.1,
) -> LaplacePosterior:
    r"""Return the Laplace approximation to the posterior of a network's parameters at a mode.

    The prior is normal with mean zero. The posterior precision is the prior precision plus the generalized Gauss-Newton
    matrix. If outputs are natural parameters, this matrix is positive semidefinite and does not depend on residuals.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters must be at a mode of the posterior; see :func:`find_parameter_mode`.
    likelihood, x, y
        As in :func:`gauss_newton`.
    prior_precision : float or Tensor
        Positive; a number, or a value per parameter, ``(p,)``.
    tolerance : float, default 0.1
        Largest length of a Newton step at the mode, in posterior standard deviations.

    Returns
    -------
    LaplacePosterior
        Factorised in the space of parameters or, if smaller, of the outputs of all observations.

    Raises
    ------
    ModelError
        If the module is not at a mode, or the Gauss-Newton matrix is indefinite.
    SettingsError
        If the prior precision is not positive, or there are too many parameters and observations.
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
    >>> from bayeskit.inference.curvature import GaussianOutputs, find_parameter_mode, laplace_posterior
    >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> mode = find_parameter_mode(line, GaussianOutputs(), x, y, prior_precision=1.0)
    >>> posterior = laplace_posterior(mode, GaussianOutputs(), x, y, prior_precision=1.0)
    >>> posterior.precision()
    tensor([[6.]], dtype=torch.float64)
    >>> exact = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double() + x @ x.mT)
    >>> abs(posterior.log_evidence - float(exact.log_prob(y))) < 1e-12
    True
    """
    likelihood, network = check_likelihood(likelihood), flat_copy(module)
    prior = _checked_precision(prior_precision, network.vector)
    curvature = gauss_newton_of(network, likelihood, x, y)
    system = _factorised(curvature, prior)
    distance = _newton_step(curvature, system, likelihood, y, prior)[1]
    if not distance <= real_number("tolerance", tolerance, "(0, inf)"):
        raise ModelError(
            f"the module is not at a mode of this posterior: the length of a Newton step is {distance:.3g} posterior "
            f"standard deviations, more than {tolerance:g}; train the module further with the same likelihood and "
            "prior, for example by find_parameter_mode"
        )
    outputs = network.outputs(curvature.x)
    value = float(likelihood.log_likelihood(outputs, likelihood.targets(outputs, y)).sum())
    return LaplacePosterior(
        curvature=curvature,
        prior_precision=prior,
        log_likelihood=value,
        distance=distance,
        system=system,
        likelihood=likelihood,
    )


def find_parameter_mode(
    module: nn.Module,
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    max_iterations: int = 5000,
) -> nn.Module:
    """Return a copy of a module at a posterior mode, found by L-BFGS and, for small matrices, Gauss-Newton steps.

    Parameters
    ----------
    module, likelihood, x, y, prior_precision
        As in :func:`laplace_posterior`; the search starts at the module's parameters.
    max_iterations : int, default 5000
        Limit of L-BFGS.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    ModelError, SettingsError, DataError, ShapeError
        As in :func:`gauss_newton`, and if the prior precision is not positive.

    Warns
    -----
    AccuracyWarning
        If the search did not converge.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.curvature import GaussianOutputs, find_parameter_mode
    >>> line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> x, y = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> mode = find_parameter_mode(line, GaussianOutputs(), x, y, prior_precision=1.0)
    >>> mode.weight.detach()  # 5 / (5 + 1)
    tensor([[0.8333]], dtype=torch.float64)
    """
    likelihood, network = check_likelihood(likelihood), flat_copy(module)
    prior = _checked_precision(prior_precision, network.vector)
    x, outputs = check_network_data(network, x)
    targets = likelihood.targets(outputs, y)
    network, x, prior = _in_double(network, x, prior)
    targets = likelihood.targets(network.outputs(x), y)

    def log_posterior(position: np.ndarray) -> tuple[float, np.ndarray]:
        vector = torch.as_tensor(position).to(network.vector)
        value, gradient = _negative_log_posterior(network.at(vector), likelihood, x, targets, prior)
        return -value, -gradient.double().cpu().numpy()

    limit = whole_number("max_iterations", max_iterations, least=1)
    start = network.vector.double().cpu().numpy()
    found = scipy_lbfgs(log_posterior, start, maxiter=limit, maxfun=10**9, ftol=0.0, gtol=1e-9)
    network = network.at(torch.as_tensor(found.position).to(network.vector))
    network, distance = _polished(network, likelihood, x, y, prior)
    if not found.finished if distance is None else not distance <= _CLOSE:
        far = "" if distance is None else f" (length of the next step: {distance:.3g} posterior standard deviations)"
        warn_user(
            f"the search for a mode did not converge in {found.num_iterations} iterations{far}; raise max_iterations, "
            "or train the module further first",
            AccuracyWarning,
        )
    result = copy.deepcopy(module)
    learned = [parameter for parameter in result.parameters() if parameter.requires_grad]
    with torch.no_grad():
        nn.utils.vector_to_parameters(network.vector.to(learned[0]), learned)
    return result


def _in_double(network: FlatNetwork, x: Tensor, prior: Tensor) -> tuple[FlatNetwork, Tensor, Tensor]:
    """Return the arguments in double precision if the module supports it; gradient errors limit the search."""
    wide = x.double() if x.is_floating_point() else x
    try:
        converted = flat_copy(copy.deepcopy(network.module).double())
        check_network_data(converted, wide)
    except (BayeskitError, RuntimeError):  # a layer or the device does not support double precision
        return network, x, prior
    return converted, wide, prior.double()


def _polished(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, prior: Tensor
) -> tuple[FlatNetwork, float | None]:
    """Take Gauss-Newton steps; also return the length of the last step computed, or None without steps."""
    outputs = network.outputs(x)
    p, dual = network.num_parameters, outputs.numel()
    if min(p, dual) > _POLISHED or p * min(p, dual) > _POLISHED**2:
        return network, None
    targets = likelihood.targets(outputs, y)
    distance = math.inf
    for _ in range(_NUM_STEPS):
        try:
            curvature = gauss_newton_of(network, likelihood, x, y)
            step, distance = _newton_step(curvature, _factorised(curvature, prior), likelihood, y, prior)
        except ModelError:  # indefinite
            return network, None
        if distance <= 1e-6 * _CLOSE:
            break
        value = _negative_log_posterior(network, likelihood, x, targets, prior)[0]
        tried = [network.at(network.vector + 0.5**i * step) for i in range(5)]
        better = (t for t in tried if _negative_log_posterior(t, likelihood, x, targets, prior)[0] < value)
        network, before = next(better, network), network
        if network is before:
            break
    return network, distance


def _newton_step(
    curvature: Curvature, system: System, likelihood: OutputLikelihood, y: Tensor, prior: Tensor
) -> tuple[Tensor, float]:
    """Return the step to the mode of the quadratic model, and its length in posterior standard deviations."""
    network = curvature.network
    gradient = log_likelihood_gradient(network, likelihood, curvature.x, y) - prior * network.vector
    scaled = gradient * prior.rsqrt()
    return system.solve(scaled) * prior.rsqrt(), math.sqrt(float(system.quadratic(scaled.unsqueeze(0))))


def _mean_sigmoid(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return ``E[sigmoid(mean + deviation * N(0, 1))]`` by the trapezoidal rule, in the shape of ``mean``."""
    # The error falls exponentially in the distance of the sigmoid's poles, pi / deviation, divided by the step.
    largest = float(deviation.max())
    step = min(0.25, 1.0 / max(largest, 1e-3))
    half = round(9 / step)
    result = torch.zeros_like(mean)
    for i in range(-half, half + 1):
        weight = step / math.sqrt(2 * math.pi) * math.exp(-0.5 * (i * step) ** 2)
        result += weight * (mean + i * step * deviation).sigmoid()
    return result.clamp_(0, 1)


def _negative_log_posterior(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, targets: Tensor, prior: Tensor
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
            "the posterior precision is not positive definite at these parameters; this can happen if outputs are not "
            "natural parameters of the likelihood. Remedy: train further, or raise prior_precision"
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
