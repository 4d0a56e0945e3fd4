"""The multi-sample bound's gradient for draws without a path."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit._settings import whole_number
from bayeskit.inference.gradients.estimator import Function, GradientEstimator, WeightedPoints, evaluated
from bayeskit.inference.gradients.multi_sample import importance_weighted_estimate
from bayeskit.inference.gradients.space import LIMIT, Space, check_size, space_of


@dataclass(frozen=True)
class VIMCO(GradientEstimator):
    r"""Gradient of the expected log of the mean of several values' exponentials, with leave-one-out baselines.

    What it estimates is not the gradient of :math:`E f` but of
    :math:`E \log \frac{1}{K} \sum_k \exp f(z_k)`; :meth:`expectation` gives that by enumeration.

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

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, least=2)

    def points(self, space: Space, generator: torch.Generator | None = None) -> WeightedPoints:
        """Draw points with equal weights."""
        codes = space.sample(self.num_samples, generator)
        log_probability = space.log_prob(codes)
        return WeightedPoints(space.value(codes), torch.full_like(log_probability, 1 / self.num_samples))

    def num_evaluations(self, space: Space) -> int:
        """Return the number of draws."""
        return self.num_samples

    def surrogate(
        self, distribution: Distribution | Space | Tensor, f: Function, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return an estimate of the bound whose gradient estimates that of the expected bound."""
        space = space_of(distribution)
        codes = space.sample(self.num_samples, generator)
        log_probability = space.log_prob(codes)
        values = evaluated(f, WeightedPoints(space.value(codes), log_probability))
        return importance_weighted_estimate(values, log_probability)

    def expectation(self, distribution: Distribution | Space | Tensor, f: Function, limit: int = LIMIT) -> Tensor:
        """Return the expected bound by enumeration of all tuples of points, differentiable, `(*batch)`.

        Raises
        ------
        SettingsError
            If there are more tuples than the limit.
        """
        space = space_of(distribution)
        check_size(space.size**self.num_samples, limit)
        codes = space.enumerate(limit)
        log_probability = space.log_prob(codes)
        values = evaluated(f, WeightedPoints(space.value(codes), log_probability))
        tuples = torch.cartesian_prod(*[torch.arange(space.size, device=codes.device)] * self.num_samples).mT
        bound = values[tuples].logsumexp(0) - math.log(self.num_samples)
        return (log_probability[tuples].sum(0).exp() * bound).sum(0)
