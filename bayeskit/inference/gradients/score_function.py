"""The score function, with and without baselines that leave it unbiased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.estimator import Function, GradientEstimator, WeightedPoints, evaluated, magic
from bayeskit.inference.gradients.space import Space, space_of


class Baseline(Protocol):
    """What is subtracted from values before they are multiplied by scores."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return a number for each of the batch, `(*batch)` or one that broadcasts, that knows nothing of this draw.

        Parameters
        ----------
        values : Tensor
            Those of this draw, `(points, *batch)`: only what comes later may learn from them.
        """
        ...


class MovingAverage(nn.Module):
    """The exponentially weighted mean of the values of earlier draws, one for the whole batch.

    Parameters
    ----------
    decay : float, default 0.9
        In [0, 1).

    Attributes
    ----------
    mean : Tensor
        Zero before the first draw.
    num_draws : Tensor
        How many it has learnt from.

    Notes
    -----
    The mean belongs to this object, made once, outside of the guide: one for each site keeps them apart. It is a
    module's buffer, so that checkpoints of :func:`bayeskit.fit` keep it where the object, or the estimator with it,
    belongs to the guide or is a variable that the guide reads; as with a network's running means, a new training run
    does not set it back.

    Raises
    ------
    SettingsError
        If the decay lies outside.

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
        if not 0 <= real_number("decay", decay) < 1:
            raise SettingsError(f"decay must lie in [0, 1), not {decay}; 0.9 remembers some ten draws")
        self.decay = decay
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        """Return the decay."""
        return str(self.decay)

    def forward(self, values: Tensor) -> Tensor:
        """Return the mean so far, zero at first, and take up the values."""
        with torch.no_grad():
            if self.mean.device != values.device:
                self.to(values.device)
            before = self.mean.to(values.dtype, copy=True)
            new = values.mean().to(self.mean.dtype)
            self.mean.lerp_(new, torch.where(self.num_draws == 0, 1.0, 1 - self.decay).to(new))
            self.num_draws += 1
        return before


@dataclass(frozen=True)
class ScoreFunction(GradientEstimator):
    """Independent draws, each value times the score of its point (REINFORCE).

    Parameters
    ----------
    num_samples : int, default 1
    baseline : callable, optional
        Subtracted from values; such as :class:`MovingAverage`, which learns from draw to draw.

    Raises
    ------
    SettingsError
        If there is nothing to draw.

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

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points."""
        return _independent(space, self.num_samples, generator)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples

    def surrogate(
        self, distribution: Distribution | Space | Tensor, f: Function, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return an estimate of the expectation whose gradient estimates that of the expectation."""
        drawn = self.points(space_of(distribution), generator)
        values = evaluated(f, drawn)
        return (drawn.weights * values).sum(0) + self.correction(drawn.weights, values)

    def correction(self, weights: Tensor, values: Tensor) -> Tensor | float:
        """Return what the baseline adds: zero in value, and in expectation of its gradient."""
        if self.baseline is None:
            return 0.0
        baseline = self.baseline(values.detach()).detach()
        return -((weights - weights.detach()) * baseline).sum(0)


@dataclass(frozen=True)
class LeaveOneOut(GradientEstimator):
    """Independent draws, from each value of which the mean of the others is subtracted.

    Parameters
    ----------
    num_samples : int, default 4
        At least 2.

    Raises
    ------
    SettingsError
        If there are no others.

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

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=2)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points."""
        count = self.num_samples
        codes = space.sample(count, generator)
        log_probability = space.log_prob(codes)
        # The value of a weight is 1 / count; its gradient, the score less the mean of the others', over count.
        moved = (log_probability - log_probability.mean(0)) / (count - 1)
        return WeightedPoints(space.value(codes), moved - (moved.detach() - 1 / count))

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples


@dataclass(frozen=True)
class ControlVariate(GradientEstimator):
    """The score function of what another function leaves over, plus the exact gradient of that one's expectation.

    Parameters
    ----------
    function : callable
        Like the one whose expectation is wanted, and cheaper: from values `(points, *batch, *event)` to
        `(points, *batch)`.
    mean : callable
        From the distribution to the expectation of `function`, `(*batch)`, differentiable.
    num_samples : int, default 1

    Raises
    ------
    SettingsError
        If there is nothing to draw.

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

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points; the offset is the control variate's expectation less what it is at them."""
        drawn = _independent(space, self.num_samples, generator)
        explained = (drawn.weights * evaluated(self.function, drawn).detach()).sum(0)
        return drawn._replace(offset=self.mean(space.distribution) - explained)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples


def _independent(space: Space, num_samples: int, generator: torch.Generator | None) -> WeightedPoints:
    """Draw points whose weights have the gradient of their log probabilities."""
    codes = space.sample(num_samples, generator)
    return WeightedPoints(space.value(codes), magic(space.log_prob(codes)) / num_samples)
