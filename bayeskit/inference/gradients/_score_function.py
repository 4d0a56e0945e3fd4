"""Score-function estimators: baselines, the multi-sample bound, and antithetic draws of bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bayeskit._core.inputs import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients._estimator import (
    DrawsEstimator,
    Function,
    GradientEstimator,
    WeightedPoints,
    evaluated,
    magic,
)
from bayeskit.inference.gradients._space import LIMIT, Factorised, Space, check_size, space_of

# The score function with and without unbiased baselines.


class Baseline(Protocol):
    """Baseline, subtracted from function values before multiplication by scores."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return a baseline, `(*batch)` or broadcastable; only later draws may learn from `values (points, *batch)`."""
        ...


class MovingAverage(nn.Module):
    """Exponentially weighted mean of the values of earlier draws, shared by the whole batch.

    Parameters
    ----------
    decay : float, default 0.9
        Weight of earlier draws, in [0, 1).

    Attributes
    ----------
    mean : Tensor
        Current mean; zero before the first draw.
    num_draws : Tensor
        Number of draws in the mean.

    Raises
    ------
    SettingsError
        If ``decay`` lies outside [0, 1).

    Notes
    -----
    Construct the object once, outside the guide function, and one per site for separate means. The mean is a module
    buffer. Checkpoints of :func:`bayeskit.fit` include it if the object, or an estimator that holds it, is an
    attribute of the guide or a variable that the guide reads. A new training run does not reset it.

    Examples
    --------
    >>> import torch
    >>> baseline = MovingAverage(0.5)
    >>> [float(baseline(torch.tensor([x]))) for x in (4.0, 8.0, 0.0)]
    [0.0, 4.0, 6.0]
    """

    mean: Tensor
    num_draws: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        decay = real_number("decay", decay, "[0, 1)")
        self.decay = decay
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        """Return the decay."""
        return str(self.decay)

    def forward(self, values: Tensor) -> Tensor:
        """Return the current mean, then update it with ``values``."""
        with torch.no_grad():
            if self.mean.device != values.device:
                self.to(values.device)
            before = self.mean.to(values.dtype, copy=True)
            new = values.mean().to(self.mean.dtype)
            self.mean.lerp_(new, torch.where(self.num_draws == 0, 1.0, 1 - self.decay).to(new))
            self.num_draws += 1
        return before


@dataclass(frozen=True)
class ScoreFunction(DrawsEstimator):
    """Score-function estimator from independent draws (REINFORCE).

    Parameters
    ----------
    baseline : callable, optional
        Subtracted from function values, such as :class:`MovingAverage`.

    Raises
    ------
    SettingsError
        If ``num_samples`` is less than 1.

    References
    ----------
    Williams, R. J. (1992). Simple statistical gradient-following algorithms for connectionist reinforcement learning.
    Machine Learning 8, 229-256.

    Examples
    --------
    >>> import torch
    >>> gradient = ScoreFunction(num_samples=1000).estimate(torch.zeros(2), torch.tensor([1.0, 3.0]), seed=0)
    >>> bool((gradient - torch.tensor([-0.5, 0.5])).abs().max() < 0.2)
    True
    """

    num_samples: int = 1
    baseline: Baseline | None = None

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points."""
        return _independent(space, self.num_samples, generator)

    def surrogate(
        self, distribution: Distribution | Space | Tensor, f: Function, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return an estimate of the expectation whose gradient estimates the gradient of the expectation."""
        drawn = self.points(space_of(distribution), generator)
        values = evaluated(f, drawn)
        return (drawn.weights * values).sum(0) + self.correction(drawn.weights, values)

    def correction(self, weights: Tensor, values: Tensor) -> Tensor | float:
        """Return the baseline term, with value zero and expected gradient zero."""
        if self.baseline is None:
            return 0.0
        baseline = self.baseline(values.detach()).detach()
        return -((weights - weights.detach()) * baseline).sum(0)


@dataclass(frozen=True)
class LeaveOneOut(DrawsEstimator):
    """Score-function estimator with the mean value of the other draws as baseline.

    Parameters
    ----------
    num_samples : int, default 4
        At least 2.

    Raises
    ------
    SettingsError
        If ``num_samples`` is less than 2.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2019). Buy 4 REINFORCE samples, get a baseline for free! ICLR workshop on deep
    reinforcement learning meets structured prediction.

    Examples
    --------
    >>> import torch
    >>> LeaveOneOut(num_samples=3).estimate(torch.zeros(2), torch.tensor([7.0, 7.0]))
    tensor([0., 0.])
    """

    num_samples: int = 4

    least: ClassVar[int] = 2

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points."""
        count = self.num_samples
        codes = space.sample(count, generator)
        log_probability = space.log_prob(codes)
        # Each weight is 1 / count; its gradient is (score - mean score of the other draws) / count.
        moved = (log_probability - log_probability.mean(0)) / (count - 1)
        return WeightedPoints(space.value(codes), moved - (moved.detach() - 1 / count))


@dataclass(frozen=True)
class ControlVariate(DrawsEstimator):
    """Score-function estimator with a control variate of known expectation.

    The score function is applied to the difference from the control variate; the gradient of its expectation is added.

    Parameters
    ----------
    function : callable
        Control variate, correlated with the integrand: from values `(points, *batch, *event)` to `(points, *batch)`.
    mean : callable
        Function from the distribution to the differentiable expectation of `function`, `(*batch)`.

    Raises
    ------
    SettingsError
        If ``num_samples`` is less than 1.

    References
    ----------
    Paisley, J., Blei, D., Jordan, M. (2012). Variational Bayesian inference with stochastic search. ICML.

    Examples
    --------
    >>> import torch
    >>> def linear(z):
    ...     return 2.0 * z
    >>> estimator = ControlVariate(linear, lambda q: 2.0 * q.probs)
    >>> logits = torch.zeros((), requires_grad=True)
    >>> estimator.estimate(torch.distributions.Bernoulli(logits=logits), linear)
    tensor(0.5000)
    """

    function: Function
    mean: Callable[[Distribution], Tensor]
    num_samples: int = 1

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points; the offset is the control variate's expectation minus its mean at the points."""
        drawn = _independent(space, self.num_samples, generator)
        explained = (drawn.weights * evaluated(self.function, drawn).detach()).sum(0)
        return drawn._replace(offset=self.mean(space.distribution) - explained)


def _independent(space: Space, num_samples: int, generator: torch.Generator | None) -> WeightedPoints:
    """Draw points whose weights have the gradient of their log probabilities."""
    codes = space.sample(num_samples, generator)
    return WeightedPoints(space.value(codes), magic(space.log_prob(codes)) / num_samples)


# The multi-sample bound and its gradient for draws that are not reparameterized.


def leave_one_out_bound(log_weight: Tensor) -> Tensor:
    """Return the bound with each weight replaced by the geometric mean of the others, ``(K, *batch)``, ``K >= 2``."""
    count = len(log_weight)
    finite = log_weight.isfinite()
    known = torch.where(finite, log_weight, 0.0)
    others = (known.sum(0) - known) / (count - 1)
    # One weight of zero among the others makes their geometric mean zero; taken from a sum it would make it NaN.
    others = torch.where((~finite).sum(0) > (~finite).long(), -torch.inf, others)
    peak = log_weight.amax(0)
    weight = (log_weight - peak).exp()
    # The sum without particle k is taken anew where subtracting would cancel, and in logarithms throughout: the
    # others may be too small for a number beside the largest.
    without = (weight.sum(0) - weight).log() + peak
    top = log_weight.argmax(0, keepdim=True)
    without = without.scatter(0, top, log_weight.scatter(0, top, -torch.inf).logsumexp(0, keepdim=True))
    return torch.logaddexp(without, others) - math.log(count)


def importance_weighted_estimate(log_weight: Tensor, log_score: Tensor | None = None) -> Tensor:
    """Return the bound, ``(*batch)``, with a gradient that is right for any draws (Mnih and Rezende 2016)."""
    # log_weight: (K, *batch); log_score: (K, *batch), log guide density of the draws without a gradient.
    bound = log_weight.logsumexp(0) - math.log(len(log_weight))
    if log_score is None:
        return bound
    detached = log_weight.detach()
    signal = bound.detach() - (leave_one_out_bound(detached) if len(detached) > 1 else 0.0)
    surrogate = bound + (signal * log_score).sum(0)
    return bound.detach() + (surrogate - surrogate.detach())


# The multi-sample bound's gradient for draws without a pathwise gradient.


@dataclass(frozen=True)
class VIMCO(DrawsEstimator):
    r"""Gradient of the multi-sample bound with leave-one-out baselines.

    The estimand is the gradient of :math:`E \log \frac{1}{K} \sum_k \exp f(z_k)`, not of :math:`E f`.
    :meth:`expectation` computes this bound by enumeration.

    Parameters
    ----------
    num_samples : int, default 4
        At least 2.

    Raises
    ------
    SettingsError
        If ``num_samples`` is less than 2.

    References
    ----------
    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.

    Examples
    --------
    >>> import torch
    >>> f = torch.tensor([0.0, 1.0])
    >>> exact = VIMCO(num_samples=2).expectation(torch.zeros(2), lambda z: f[z])
    >>> f.exp().mean().log() > exact > f.mean()
    tensor(True)
    """

    num_samples: int = 4

    least: ClassVar[int] = 2

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points with equal weights."""
        drawn = _independent(space, self.num_samples, generator)
        return drawn._replace(weights=drawn.weights.detach())

    def surrogate(
        self, distribution: Distribution | Space | Tensor, f: Function, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return an estimate of the bound whose gradient estimates the gradient of the expected bound."""
        space = space_of(distribution)
        codes = space.sample(self.num_samples, generator)
        log_probability = space.log_prob(codes)
        values = evaluated(f, WeightedPoints(space.value(codes), log_probability))
        return importance_weighted_estimate(values, log_probability)

    def expectation(self, distribution: Distribution | Space | Tensor, f: Function, limit: int = LIMIT) -> Tensor:
        """Return the expected bound by enumeration of all tuples of points, differentiable, `(*batch)`.

        SettingsError if the number of tuples exceeds ``limit``.
        """
        space = space_of(distribution)
        check_size(space.size**self.num_samples, limit)
        codes = space.enumerate(limit)
        log_probability = space.log_prob(codes)
        values = evaluated(f, WeightedPoints(space.value(codes), log_probability))
        tuples = torch.cartesian_prod(*[torch.arange(space.size, device=codes.device)] * self.num_samples).mT
        bound = values[tuples].logsumexp(0) - math.log(self.num_samples)
        return (log_probability[tuples].sum(0).exp() * bound).sum(0)


# Estimators for independent bits with antithetic draws.


@dataclass(frozen=True)
class _Antithetic(GradientEstimator):
    """Pairs of draws made of one uniform number `u` for each bit and of `1 - u`."""

    num_pairs: int = 1

    def __post_init__(self) -> None:
        whole_number("num_pairs", self.num_pairs, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw pairs."""
        logits = _bits(space, type(self).__name__)
        shape = (self.num_pairs, *logits.shape)
        uniform = torch.rand(shape, dtype=logits.dtype, device=logits.device, generator=generator)
        fixed = logits.detach()
        second, first = uniform < fixed.sigmoid(), uniform > (-fixed).sigmoid()
        slope = self.slope(uniform, first, second, fixed)
        # The gradients of the two weights with respect to each logit have opposite signs.
        moved = (slope * (logits - fixed)).sum(-1)
        weights = torch.cat([0.5 + moved, 0.5 - moved]) / self.num_pairs
        return WeightedPoints(space.value(torch.cat([first, second]).long()), weights)

    @abstractmethod
    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return the factor of the value difference in each logit's gradient, `(pairs, *batch, bits)`."""

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return 2 * self.num_pairs


@dataclass(frozen=True)
class ARM(_Antithetic):
    r"""Augment-REINFORCE-merge: :math:`(f(b_1) - f(b_2)) (u - 1/2)` for the logit of each bit.

    Parameters
    ----------
    num_pairs : int, default 1
        Number of pairs; each needs two evaluations.

    Raises
    ------
    SettingsError
        If ``num_pairs`` is less than 1, or the variables are not independent bits.

    References
    ----------
    Yin, M., Zhou, M. (2019). ARM: Augment-REINFORCE-merge gradient for stochastic binary networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> bit = torch.distributions.Bernoulli(logits=torch.zeros(1000, requires_grad=True))
    >>> gradient = ARM().estimate(bit, lambda z: 4.0 * z)
    >>> bool((gradient.mean() - 1.0).abs() < 0.1)
    True
    """

    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return the uniform number minus its mean."""
        return uniform - 0.5


@dataclass(frozen=True)
class DisARM(_Antithetic):
    r"""ARM with the uniform noise integrated out given both points; equal bits have gradient zero.

    Parameters and errors are those of :class:`ARM`.

    References
    ----------
    Dong, Z., Mnih, A., Tucker, G. (2020). DisARM: an antithetic gradient estimator for binary latent variables.
    NeurIPS.

    Examples
    --------
    >>> import torch
    >>> bit = torch.distributions.Bernoulli(logits=torch.zeros(1, requires_grad=True))
    >>> DisARM().estimate(bit, lambda z: 4.0 * z)
    tensor([1.])
    """

    def slope(self, uniform: Tensor, first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
        """Return half the probability of the likelier value, signed by the first point; zero for equal bits."""
        sign = first.to(logits) - second.to(logits)
        return 0.5 * sign * logits.abs().sigmoid()


def _bits(space: Space, name: str) -> Tensor:
    """Return logits `(*batch, bits)`."""
    if not isinstance(space, Factorised) or not space.binary:
        raise SettingsError(
            f"{name} draws bits, but the distribution is a {type(space.distribution).__name__}; use Bernoulli, alone "
            "or with .to_event, or another estimator such as UnorderedSet"
        )
    return space.parameter.reshape(*space.batch_shape, space.num_variables)
