"""Sparse priors of weights, the distributions they need, and their divergences in closed form or by quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints, register_kl
from torch.distributions.utils import broadcast_all
from torch.nn.functional import logsigmoid, softplus

from bayeskit.errors import ModelError
from bayeskit.extend import real_number, unknown_name

# What a user chooses.


@dataclass(frozen=True)
class LogUniformPrior:
    r"""Improper density :math:`1 / |w|` of each weight, or of the scale of each group of weights.

    The guide of a weight is normal, with the closed form of
    :func:`~bayeskit.models.sparse_networks.log_uniform_divergence`. With groups, weights are :math:`z_j w_{ij}` with
    :math:`w_{ij} \sim N(0, 1)`, and :math:`z_j` has the improper prior.

    Parameters
    ----------
    threshold : float, default 3.0
        A weight is removed if the logarithm of variance over squared mean exceeds it. The same holds for a group, with
        sums of variances and squared means.

    Raises
    ------
    SettingsError
        If ``threshold`` is not a number.

    References
    ----------
    Molchanov, D., Ashukha, A., Vetrov, D. (2017). Variational dropout sparsifies deep neural networks. ICML.

    Examples
    --------
    >>> LogUniformPrior()
    LogUniformPrior(threshold=3.0)
    """

    threshold: float = 3.0

    def __post_init__(self) -> None:
        real_number("threshold", self.threshold)


@dataclass(frozen=True)
class HorseshoePrior:
    r"""Weights :math:`z_j w_{ij}` with :math:`w_{ij} \sim N(0, 1)` and half-Cauchy :math:`z_j`, a proper prior.

    The guide has independent normal :math:`w_{ij}` and :math:`\log z_j`. Without groups each weight has a scale of its
    own.

    Parameters
    ----------
    scale : float, default 0.1
        Scale of the half-Cauchy distribution, positive.
    threshold : float, default 3.0
        A weight or group is removed if the logarithm of variance over squared mean, each summed over the group, exceeds
        it.

    Raises
    ------
    SettingsError
        If a number is outside its domain.

    References
    ----------
    Carvalho, C. M., Polson, N. G., Scott, J. G. (2010). The horseshoe estimator for sparse signals. Biometrika 97,
    465-480. Louizos, C., Ullrich, K., Welling, M. (2017). Bayesian compression for deep learning. NeurIPS.

    Examples
    --------
    >>> HorseshoePrior(scale=0.5)
    HorseshoePrior(scale=0.5, threshold=3.0)
    """

    scale: float = 0.1
    threshold: float = 3.0

    def __post_init__(self) -> None:
        real_number("scale", self.scale, "(0, inf)")
        real_number("threshold", self.threshold)


@dataclass(frozen=True)
class SpikeAndSlabPrior:
    """Each weight, or each group of weights, is zero or normal.

    The guide is of the same kind with its own probability of each weight or group, mean and scale. In a regression with
    orthonormal predictors and known noise it is exact.

    Parameters
    ----------
    probability : float, default 0.5
        Prior probability that a weight or group is not zero, between 0 and 1.
    scale : float, default 1.0
        Standard deviation of weights that are not zero, positive.
    threshold : float, default 0.5
        A weight or group is removed if its posterior probability is at most this, between 0 and 1.

    Raises
    ------
    SettingsError
        If a number is outside its domain.

    References
    ----------
    Mitchell, T. J., Beauchamp, J. J. (1988). Bayesian variable selection in linear regression. JASA 83, 1023-1032.
    Titsias, M. K., Lazaro-Gredilla, M. (2011). Spike and slab variational inference for multi-task and multiple kernel
    learning. NeurIPS.

    Examples
    --------
    >>> SpikeAndSlabPrior(probability=0.1).scale
    1.0
    """

    probability: float = 0.5
    scale: float = 1.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        real_number("probability", self.probability, "(0, 1)")
        real_number("scale", self.scale, "(0, inf)")
        real_number("threshold", self.threshold, "(0, 1)")


WeightPrior = LogUniformPrior | HorseshoePrior | SpikeAndSlabPrior
PriorName = Literal["log_uniform", "horseshoe", "spike_and_slab"]

_NAMED: dict[str, type[WeightPrior]] = {
    "log_uniform": LogUniformPrior,
    "horseshoe": HorseshoePrior,
    "spike_and_slab": SpikeAndSlabPrior,
}


def as_prior(prior: WeightPrior | PriorName) -> WeightPrior:
    """Return the settings that a name stands for; UnknownNameError for others."""
    if isinstance(prior, LogUniformPrior | HorseshoePrior | SpikeAndSlabPrior):
        return prior
    if not isinstance(prior, str) or prior not in _NAMED:
        raise unknown_name("prior of weights", str(prior), _NAMED)
    return _NAMED[prior]()


# The logarithm of a half-Cauchy variable.


class HyperbolicSecant(dist.TorchDistribution):  # type: ignore[misc]
    r"""Distribution of the logarithm of a half-Cauchy variable, :math:`1 / (\pi \cosh(u - m))`.

    Parameters
    ----------
    loc : Tensor
        :math:`m`, the logarithm of the half-Cauchy scale, any shape.

    Examples
    --------
    >>> import torch
    >>> import pyro.distributions as dist
    >>> u = torch.tensor(0.3)
    >>> ours = HyperbolicSecant(torch.tensor(0.0)).log_prob(u)
    >>> torch.allclose(ours, dist.HalfCauchy(1.0).log_prob(u.exp()) + u)
    True
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {"loc": constraints.real}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        return -math.log(math.pi) - _log_cosh(value - self.loc)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Return draws by the inverse of the distribution function."""
        uniform = torch.rand(self.shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        tiny = torch.finfo(uniform.dtype).eps / 2
        return self.loc + torch.tan(uniform.clamp(tiny, 1 - tiny) * (math.pi / 2)).log()

    def expand(self, batch_shape: Any, _instance: Any = None) -> HyperbolicSecant:
        """Return the distribution with another batch shape."""
        return HyperbolicSecant(self.loc.expand(batch_shape))


def _log_cosh(x: Tensor) -> Tensor:
    size = x.abs()
    return size + softplus(-2 * size) - math.log(2)


@lru_cache
def _hermite(num_points: int = 48) -> tuple[list[float], list[float]]:
    """Return points and weights for the mean of a function of a standard normal variable."""
    points, weights = np.polynomial.hermite_e.hermegauss(num_points)
    kept = weights > 1e-18 * weights.sum()
    return points[kept].tolist(), (weights[kept] / weights.sum()).tolist()


@register_kl(torch.distributions.Normal, HyperbolicSecant)
def _from_hyperbolic_secant(posterior: Any, prior: HyperbolicSecant) -> Tensor:
    """Return the divergence by Gauss-Hermite quadrature, with an error below 1e-9 for scales up to 1, 1e-5 up to 2."""
    away = posterior.loc - prior.loc
    expected = sum(w * _log_cosh(away + posterior.scale * z) for z, w in zip(*_hermite(), strict=True))
    return expected + math.log(math.pi) - 0.5 - 0.5 * math.log(2 * math.pi) - posterior.scale.log()


# Point mass at zero and normal distribution.


class _RealsWithAtom(constraints.Constraint):  # type: ignore[misc]
    """Real numbers of which zero has positive probability: no transform makes a density of it."""

    event_dim = 0

    def check(self, value: Tensor) -> Tensor:
        """Return which values are real numbers."""
        return ~value.isnan()


class SpikeAndSlab(dist.TorchDistribution):  # type: ignore[misc]
    """Tensor that is zero with some probability and normal otherwise, entry by entry or group by group.

    ``log_prob`` is the log density with respect to the sum of Lebesgue measure and a point mass at zero. A draw has
    gradients in location and scale, but none in the probability. Objectives that need it are refused: train by
    ``ELBO()``, for which the divergence has a closed form, and network outputs by their moments.

    Parameters
    ----------
    logits : Tensor
        Log odds that an entry or a group is not zero, with as many dimensions as ``loc``; along those of size one the
        entries of ``loc`` are a group.
    loc, scale : Tensor
        Mean and standard deviation of entries that are not zero, of one shape.

    Examples
    --------
    >>> import torch
    >>> tied = SpikeAndSlab(torch.zeros(1, 3), torch.zeros(2, 3), torch.ones(2, 3))
    >>> with torch.no_grad():
    ...     tied.log_prob(torch.zeros(2, 3)).exp()  # three groups of two entries
    tensor(0.1250)
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_rsample = True

    def __init__(self, logits: Tensor, loc: Tensor, scale: Tensor, batch_shape: tuple[int, ...] = ()) -> None:
        self.logits, (self.loc, self.scale) = logits, broadcast_all(loc, scale)
        super().__init__(torch.Size(batch_shape), self.loc.shape, validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        """Real numbers, with an atom at zero."""
        return constraints.independent(_RealsWithAtom(), self.event_dim) if self.event_dim else _RealsWithAtom()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; ModelError if it needs a gradient in the probabilities."""
        if torch.is_grad_enabled() and self.logits.requires_grad:
            raise ModelError(
                "a draw of SpikeAndSlab carries no gradient in its probability, which this objective needs; train by "
                "ELBO() with its closed forms, and without gradient_clipping"
            )
        entries = torch.distributions.Normal(self.loc, self.scale, validate_args=False).log_prob(value)
        included = self._by_group((value != 0).to(entries)) > 0
        slab = logsigmoid(self.logits) + self._by_group(entries)
        terms = torch.where(included, slab, logsigmoid(-self.logits))
        return terms.sum(tuple(range(-self.event_dim, 0))) if self.event_dim else terms

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Return draws, with gradients in location and scale."""
        outer = torch.Size(sample_shape) + self.batch_shape
        uniform = torch.rand((*outer, *self.logits.shape), dtype=self.loc.dtype, device=self.loc.device)
        noise = torch.randn((*outer, *self.loc.shape), dtype=self.loc.dtype, device=self.loc.device)
        return (uniform < self.logits.sigmoid()) * (self.loc + self.scale * noise)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SpikeAndSlab:
        """Return the distribution with another batch shape."""
        return SpikeAndSlab(self.logits, self.loc, self.scale, tuple(batch_shape))

    @property
    def probabilities(self) -> Tensor:
        """Probability that an entry or group is not zero, in the shape of ``logits``."""
        return self.logits.sigmoid()

    @property
    def mean(self) -> Tensor:
        """Mean of each entry."""
        return self.probabilities * self.loc

    @property
    def variance(self) -> Tensor:
        """Variance of each entry."""
        p = self.probabilities
        return p * self.scale.square() + p * (1 - p) * self.loc.square()

    def _by_group(self, terms: Tensor) -> Tensor:
        """Sum terms of entries over the entries that share a probability, in the shape of ``logits``."""
        tied = tuple(d for d in range(-self.event_dim, 0) if self.logits.shape[d] == 1)
        return terms.sum(tied, keepdim=True) if tied else terms


@register_kl(SpikeAndSlab, SpikeAndSlab)
def _between_spikes(posterior: SpikeAndSlab, prior: SpikeAndSlab) -> Tensor:
    """Return the divergence of two distributions with the same groups."""
    if posterior.logits.shape != prior.logits.shape:
        raise NotImplementedError
    p, q = prior.logits, posterior.logits
    inside, outside = logsigmoid(q) - logsigmoid(p), logsigmoid(-q) - logsigmoid(-p)
    choice = (q.sigmoid() * inside + (-q).sigmoid() * outside).sum()
    ratio = posterior.scale / prior.scale
    away = (posterior.loc - prior.loc) / prior.scale
    slab = 0.5 * (ratio.square() + away.square() - 1) - ratio.log()
    return (choice + (q.sigmoid() * slab).sum()).expand(posterior.batch_shape)
