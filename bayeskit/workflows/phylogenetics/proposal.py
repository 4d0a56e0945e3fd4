"""Where to draw branch lengths from to weigh topologies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Gamma

#: The share of draws that have a branch length from the heavy tail.
DEFENCE = 0.2
#: The median of the heavy tail, in expected substitutions per site.
MEDIAN = 0.1
#: Effective draws that count as much as what was there before.
STEADY = 20.0


@dataclass(frozen=True)
class Proposal:
    """Independent gamma distributions of positive coordinates, with a little of a heavy tail.

    Data say little about a very long branch, so that its posterior falls off as slowly as its prior; a gamma
    distribution matched to the mode may fall off faster, and a weight could be of any size. A share of each
    coordinate has density `median / (x + median) ** 2` instead, such that in one of five draws one coordinate at
    least comes from there: weights are bounded for every prior that falls off faster than that.

    Attributes
    ----------
    shape, rate : Tensor
        Of the gamma distributions, shape `(*batch, dim)`.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
    185-194.

    Examples
    --------
    >>> import torch
    >>> proposal = Proposal(torch.ones(2, 3), torch.full((2, 3), 10.0))
    >>> x = proposal.sample(5, torch.Generator().manual_seed(0))
    >>> x.shape, proposal.log_prob(x).shape
    (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """

    shape: Tensor
    rate: Tensor

    @property
    def share(self) -> float:
        """Probability that a coordinate comes from the heavy tail."""
        return 1.0 - float((1.0 - DEFENCE) ** (1.0 / self.shape.shape[-1]))

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points, shape `(num_draws, *batch, dim)`."""
        full = (num_draws, *self.shape.shape)
        # torch's sampler takes a generator, its distribution does not.
        near = torch._standard_gamma(self.shape.expand(full), generator=generator) / self.rate
        uniform = torch.rand((2, *full), generator=generator, dtype=self.shape.dtype, device=self.shape.device)
        # A uniform number of zero or one has no length.
        finest = torch.finfo(self.shape.dtype).eps
        share = uniform[0].clamp(finest, 1 - finest)
        far = MEDIAN * share / (1.0 - share)
        return torch.where(uniform[1] < self.share, far, near).clamp(min=torch.finfo(self.shape.dtype).tiny)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities, `(*sample, *batch, dim) -> (*sample, *batch)`."""
        near = Gamma(self.shape, self.rate, validate_args=False).log_prob(x) + math.log1p(-self.share)
        far = math.log(self.share * MEDIAN) - 2.0 * (x + MEDIAN).log()
        return torch.logaddexp(near, far).sum(-1)

    def refitted(self, x: Tensor, log_weights: Tensor) -> Proposal:
        """Match the gamma distributions to weighted draws.

        Parameters
        ----------
        x : Tensor
            Draws, shape `(draws, *batch, dim)`.
        log_weights : Tensor
            Shape `(draws, *batch)`. The fewer effective draws they leave, the less is changed.

        Returns
        -------
        Proposal
            With the weighted mean and variance of each coordinate.
        """
        weights = log_weights.softmax(0)[..., None]
        effective = 1.0 / weights.square().sum(0)
        trust = effective / (effective + STEADY)
        mean = (weights * x).sum(0)
        variance = (weights * (x - mean).square()).sum(0)
        mean = trust * mean + (1.0 - trust) * self.shape / self.rate
        variance = trust * variance + (1.0 - trust) * self.shape / self.rate.square()
        return Proposal(mean.square() / variance, mean / variance)
