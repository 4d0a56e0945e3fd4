"""Maximum mean discrepancy between data and a simulator or a normal model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.extend import Kernel, RadialBasis, draw_values, global_stream, new_generator, whole_number
from bayeskit.inference.generalized.losses._densities import Model, joint_law_of
from bayeskit.inference.generalized.losses._loss import Data, Loss, columns
from bayeskit.inference.generalized.losses._scores import check_pairs, mean_over_pairs, typical_squared_distance

Statistic = Literal["V", "U"]


class MeanEmbedding(ABC):
    """Base class of models with kernel means, for :class:`MaximumMeanDiscrepancy`."""

    @abstractmethod
    def means(
        self, parameter: Any, x: Tensor, kernel: Kernel, typical: Tensor, statistic: Statistic
    ) -> tuple[Tensor, Tensor]:
        """Return the mean kernel between two draws, scalar, and between a draw and each datum, ``(n,)``.

        ``typical`` is the median squared distance between data ``x (n, ...)``, for kernels without a bandwidth.
        Statistic "V" includes pairs of a simulated draw with itself, "U" excludes them.
        """


@dataclass(frozen=True)
class Simulated(MeanEmbedding):
    """Simulator with common random numbers for all parameters.

    The loss is a deterministic function of the parameter, differentiable if the simulator is. The posterior includes
    the Monte Carlo error of the ``num_draws`` simulated points: use several times the number of data.

    Parameters
    ----------
    simulate : callable
        ``(parameter, noise (m, ...)) -> draws (m, ...)``, with the trailing shape of the data.
    num_draws : int, default 512
        Number of draws ``m``, at least two.
    noise : Distribution, optional
        Distribution of the noise of one draw; scalar standard normal by default.

    Raises
    ------
    SettingsError
        If there are fewer than two draws.

    Examples
    --------
    >>> import torch
    >>> model = Simulated(lambda mean, noise: mean + noise, num_draws=4)
    >>> model.draws(torch.tensor(1.0), torch.zeros(3)).shape
    torch.Size([4])
    """

    simulate: Callable[[Any, Tensor], Tensor]
    num_draws: int = 512
    noise: Distribution | None = None
    seed: int = field(default=0, kw_only=True)
    _noise: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = whole_number("num_draws", self.num_draws, least=2)
        zero = torch.zeros((), dtype=torch.float64)
        law = Normal(zero, zero + 1) if self.noise is None else self.noise
        with global_stream(new_generator(self.seed, stream="maximum mean discrepancy")):
            object.__setattr__(self, "_noise", draw_values(law, (count,)))

    def draws(self, parameter: Any, like: Tensor) -> Tensor:
        """Return draws ``(m, ...)`` like data, in shape, dtype and device; ShapeError for another shape."""
        noise = self._noise.to(like) if self._noise.is_floating_point() else self._noise.to(like.device)
        draws = self.simulate(parameter, noise)
        if draws.shape != (self.num_draws, *like.shape[1:]):
            raise ShapeError(
                f"simulate returns shape {tuple(draws.shape)} instead of {(self.num_draws, *like.shape[1:])}"
            )
        return draws

    def means(
        self, parameter: Any, x: Tensor, kernel: Kernel, typical: Tensor, statistic: Statistic
    ) -> tuple[Tensor, Tensor]:
        """Return kernel means over simulated draws, as in :meth:`MeanEmbedding.means`."""
        draws = self.draws(parameter, x)
        among = mean_over_pairs(kernel(_squared_distances(draws, draws), typical), None, statistic)
        return among, kernel(_squared_distances(draws, x), typical).mean(0)


@dataclass(frozen=True)
class GaussianEmbedding(MeanEmbedding):
    """Normal model, with closed-form means of a radial basis kernel.

    Parameters
    ----------
    distribution : callable
        Distribution of one datum, ``parameter -> `` ``Normal``, ``Normal(...).to_event(1)`` or ``MultivariateNormal``.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference._kernel_discrepancy import RadialBasis
    >>> model = GaussianEmbedding(lambda mean: dist.Normal(mean, 1.0))
    >>> among, _ = model.means(torch.tensor(0.0), torch.zeros(3), RadialBasis(1.0), torch.tensor(1.0), "V")
    >>> round(among.item(), 6)  # 1 / sqrt(3)
    0.57735
    """

    distribution: Model

    def means(
        self, parameter: Any, x: Tensor, kernel: Kernel, typical: Tensor, statistic: Statistic
    ) -> tuple[Tensor, Tensor]:
        """Return exact kernel means, as in :meth:`MeanEmbedding.means`.

        Raises
        ------
        ModelError, ShapeError
            If the distribution or the kernel is not normal
            (:class:`~bayeskit.inference.RadialBasis`), or the distribution does not fit the data.
        """
        if not isinstance(kernel, RadialBasis):
            raise ModelError(
                f"means of {type(kernel).__name__} under a normal law have no closed form; take RadialBasis, or "
                "Simulated(...)"
            )
        law, x = joint_law_of(self.distribution, parameter, x)
        squared_bandwidth = typical / 2 if kernel.bandwidth is None else typical.new_tensor(kernel.bandwidth**2)
        mean, covariance = _moments(law, x)
        identity = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        between = x.reshape(len(x), -1) - mean
        log_scale = len(mean) / 2 * squared_bandwidth.log()
        with_datum = _log_peak(squared_bandwidth * identity + covariance, between)
        with_draw = _log_peak(squared_bandwidth * identity + 2 * covariance, torch.zeros_like(between[:1]))
        return (log_scale + with_draw[0]).exp(), (log_scale + with_datum).exp()


def _log_peak(covariance: Tensor, difference: Tensor) -> Tensor:
    """Return ``-log det(C) / 2 - d' C^-1 d / 2`` of each difference."""
    factor = torch.linalg.cholesky_ex(covariance).L
    whitened = torch.linalg.solve_triangular(factor, difference.mT, upper=False)
    return -factor.diagonal().log().sum() - whitened.square().sum(0) / 2


def _moments(law: Distribution, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean ``(d,)`` and covariance ``(d, d)`` of a normal distribution."""
    size = x[0].numel()
    if law.batch_shape + law.event_shape != x.shape[1:]:
        raise ShapeError(
            f"the law of a datum has shape {tuple(law.batch_shape + law.event_shape)} instead of {tuple(x.shape[1:])}"
        )
    base = law
    while isinstance(base, Independent):
        base = base.base_dist
    if isinstance(base, Normal):
        return base.loc.reshape(size), base.variance.reshape(size).diag()
    if isinstance(base, MultivariateNormal) and not base.batch_shape:
        return base.loc, base.covariance_matrix
    raise ModelError(f"GaussianEmbedding takes Normal and MultivariateNormal, not {type(base).__name__}")


@dataclass(frozen=True)
class MaximumMeanDiscrepancy(Loss):
    r"""``n`` times the squared maximum mean discrepancy between data and model.

    .. math:: \mathrm{MMD}^2(\theta) = \mathbb E\,k(Y, Y') - \frac 2n \sum_i \mathbb E\,k(Y, x_i)
        + \frac{1}{n^2} \sum_{i,k} k(x_i, x_k), \qquad Y, Y' \sim p_\theta,

    (V-statistic). The U-statistic takes means over pairs of different data and, for simulated models, of different
    draws. The loss needs draws but no density, and is robust: the contribution of a distant datum does not depend on
    the parameter. It is bounded, so the prior must be proper. It is not pointwise, so minibatches and sequential
    updates are not supported.

    Parameters
    ----------
    model : MeanEmbedding
        :class:`Simulated` or :class:`GaussianEmbedding`.
    kernel : Kernel, optional
        As for :class:`KernelSteinDiscrepancy`; :class:`~bayeskit.inference.RadialBasis` by default.
    statistic : {"V", "U"}, default "V"

    Raises
    ------
    SettingsError
        If ``model`` is not a :class:`MeanEmbedding`, or ``statistic`` is unknown.

    References
    ----------
    Gretton, A., Borgwardt, K. M., Rasch, M. J., Schoelkopf, B., Smola, A. (2012). A kernel two-sample test. JMLR 13,
    723-773. Cherief-Abdellatif, B.-E., Alquier, P. (2020). MMD-Bayes: robust Bayesian estimation via maximum mean
    discrepancy. Symposium on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference._kernel_discrepancy import RadialBasis
    >>> loss = MaximumMeanDiscrepancy(GaussianEmbedding(lambda mean: dist.Normal(mean, 1.0)), RadialBasis(1.0))
    >>> x = torch.tensor([-1.0, 0.0, 1.0, 100.0])
    >>> [round(loss.total(torch.tensor(mean), x).item(), 3) for mean in (0.0, 25.0)]
    [0.367, 3.984]
    """

    model: MeanEmbedding
    kernel: Kernel = field(default_factory=RadialBasis)
    statistic: Statistic = "V"

    bounded = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, MeanEmbedding):
            raise SettingsError(f"model must be Simulated(...) or GaussianEmbedding(...), not {self.model!r:.80}")
        if self.statistic not in ("V", "U"):
            raise SettingsError(f"statistic must be 'V' or 'U', not {self.statistic!r}")

    def check(self, data: Data) -> None:
        """Raise DataError or ShapeError for covariates, integers, one datum with "U", and ties without a bandwidth."""
        check_pairs("MaximumMeanDiscrepancy", data, self.kernel, self.statistic)

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the squared discrepancy times the sum of ``weights (n,)``."""
        (x,) = columns(data)
        counts = x.new_ones(len(x)) if weights is None else weights.to(x)
        distances = _squared_distances(x, x)
        typical = typical_squared_distance(distances)
        among_draws, with_draw = self.model.means(parameter, x, self.kernel, typical, self.statistic)
        among_data = mean_over_pairs(self.kernel(distances, typical), counts, self.statistic)
        return counts.sum() * (among_draws + among_data) - 2 * (counts * with_draw).sum()


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared distances between rows, ``(n, ...)``, ``(m, ...)`` -> ``(n, m)``."""
    return (x.reshape(len(x), 1, -1) - y.reshape(1, len(y), -1)).square().sum(-1)
