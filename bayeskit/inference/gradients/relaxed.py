"""Estimators by paths: discrete draws relaxed to points between corners, at the price of a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.gradients.estimator import GradientEstimator, WeightedPoints
from bayeskit.inference.gradients.space import Factorised, Space, gumbel
from bayeskit.inference.gradients.temperature import Temperature, check_temperature, present


@dataclass(frozen=True)
class GumbelSoftmax(GradientEstimator):
    r"""Draws relaxed by a softmax of perturbed log probabilities (the Concrete distribution).

    Each variable becomes :math:`\operatorname{softmax}((\log p + G) / \tau)` with Gumbel noise :math:`G`; of bits the
    probability of a one, :math:`\sigma((\operatorname{logit} p + L) / \tau)` with logistic noise. Where the function
    is a network, gradients follow the path through these points.

    **Biased**: value and gradient are those of the relaxed problem, in which the function is averaged over points
    between corners. The bias goes to zero with the temperature, while the variance grows without bound. With `hard`
    the value is unbiased, but the gradient, of the function at corners times that of the relaxed points, belongs to
    neither problem: even of a linear function it is that of the mean relaxed point, not of the probabilities.

    Parameters
    ----------
    temperature : float, Tensor, or callable, default 0.5
        Above zero. A function without arguments is called at each draw; :class:`Annealed` is one that follows a
        schedule.
    num_samples : int, default 1
    hard : bool, default False
        Whether points are put at the nearest corner and only gradients take the relaxed path (straight-through
        Gumbel).

    Raises
    ------
    SettingsError
        If the temperature is not above zero, there is nothing to draw, or variables depend on each other.

    References
    ----------
    Jang, E., Gu, S., Poole, B. (2017). Categorical reparameterization with Gumbel-Softmax. ICLR.

    Maddison, C. J., Mnih, A., Teh, Y. W. (2017). The Concrete distribution: a continuous relaxation of discrete random
    variables. ICLR.

    Examples
    --------
    >>> import torch
    >>> gradient = GumbelSoftmax(temperature=0.1).estimate(torch.zeros(5000, 2), torch.tensor([1.0, 3.0]))
    >>> bool((gradient.mean(0) - torch.tensor([-0.5, 0.5])).abs().max() < 0.1)
    True
    """

    unbiased: ClassVar[bool] = False
    relaxed: ClassVar[bool] = True

    temperature: Temperature = 0.5
    num_samples: int = 1
    hard: bool = False

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw relaxed points with equal weights."""
        independent = require_independent(space, type(self).__name__)
        noisy = perturbed(independent, self.num_samples, generator)
        soft = (noisy / present(self.temperature)).softmax(-1)
        if self.hard:
            soft = straight_through(noisy.argmax(-1), soft)
        return equally_weighted(independent.soft(soft), soft)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples


@dataclass(frozen=True)
class StraightThrough(GradientEstimator):
    r"""Draws whose gradient is taken to be that of their probabilities.

    A point :math:`b` counts as :math:`b + p - \bar p`, where :math:`\bar p` is held fixed: the function sees a corner,
    its derivative there goes on to the probabilities.

    **Biased**, unless the function is linear in each variable while the others are held fixed; the value is unbiased.
    The bias is of the order of the function's curvature between corners, and no setting makes it vanish.

    Parameters
    ----------
    num_samples : int, default 1

    Raises
    ------
    SettingsError
        If there is nothing to draw, or variables depend on each other.

    References
    ----------
    Bengio, Y., Leonard, N., Courville, A. (2013). Estimating or propagating gradients through stochastic neurons for
    conditional computation. arXiv:1308.3432.

    Examples
    --------
    >>> import torch
    >>> StraightThrough().estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor([-0.5000,  0.5000])
    """

    unbiased: ClassVar[bool] = False
    relaxed: ClassVar[bool] = True

    num_samples: int = 1

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=1)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points with equal weights."""
        independent = require_independent(space, type(self).__name__)
        codes = independent.sample(self.num_samples, generator)
        values = straight_through(codes, independent.log_probabilities.exp())
        return equally_weighted(independent.soft(values), values)

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples


def require_independent(space: Space, name: str) -> Factorised:
    """Return the space, if its variables are independent.

    Raises
    ------
    SettingsError
        If they are not.
    """
    if isinstance(space, Factorised):
        return space
    raise SettingsError(
        f"{name} relaxes independent variables, but those of {type(space.distribution).__name__} depend on each other; "
        "use Bernoulli or OneHotCategorical, alone or with .to_event, or an estimator such as UnorderedSet"
    )


def perturbed(space: Factorised, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Return log probabilities plus Gumbel noise, `(num_samples, *batch, variables, categories)`."""
    log_probability = space.log_probabilities
    return log_probability + gumbel((num_samples, *log_probability.shape), log_probability, generator)


def straight_through(codes: Tensor, soft: Tensor) -> Tensor:
    """Return corners, `(points, *batch, variables, categories)`, with the gradient of soft points."""
    return one_hot(codes, soft.shape[-1]).to(soft.dtype) + (soft - soft.detach())


def equally_weighted(values: Tensor, like: Tensor) -> WeightedPoints:
    """Return points with equal weights; `like` has their batch and two more dimensions."""
    return WeightedPoints(values, like.new_full(like.shape[:-2], 1 / len(like)))
