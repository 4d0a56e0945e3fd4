"""Where to draw branch lengths from to weigh topologies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Gamma

from bayeskit.workflows.phylogenetics.defence import defended_draws, defended_log_prob

#: Effective draws that count as much as what was there before.
STEADY = 20.0
#: The smallest shape of a gamma distribution.
FLATTEST = 0.01


@dataclass(frozen=True)
class Proposal:
    """Independent gamma distributions of branch lengths, with a little of their prior and a heavy tail (see `defence`).

    Attributes
    ----------
    shape, rate : Tensor
        Of the gamma distributions, shape `(*batch, edges)`.
    prior : TorchDistribution
        Over one branch length or over the vector of all.

    Examples
    --------
    >>> import torch
    >>> proposal = Proposal(torch.ones(2, 3), torch.full((2, 3), 10.0), torch.distributions.Exponential(10.0))
    >>> x, part = proposal.sample(5, torch.Generator().manual_seed(0))
    >>> x.shape, part.shape, proposal.log_prob(x).shape
    (torch.Size([5, 2, 3]), torch.Size([5]), torch.Size([5, 2]))
    """

    shape: Tensor
    rate: Tensor
    prior: TorchDistribution

    @classmethod
    def matched_in_logarithms(cls, mode: Tensor, first: Tensor, second: Tensor, prior: TorchDistribution) -> Proposal:
        """Match gamma distributions at the mode of the logarithms, which a gamma distribution always has.

        Parameters
        ----------
        mode : Tensor
            Of `log_density(x) + log(x).sum(-1)`, shape `(*batch, edges)`.
        first, second : Tensor
            Derivatives of that by each coordinate, not by its logarithm.
        prior : TorchDistribution

        Returns
        -------
        Proposal

        Examples
        --------
        Of a gamma distribution itself, with shape 0.5 and rate 10:

        >>> mode = torch.tensor([0.05], dtype=torch.float64)
        >>> found = Proposal.matched_in_logarithms(mode, torch.zeros_like(mode), -0.5 / mode**2, Gamma(0.5, 10.0))
        >>> found.shape, found.rate
        (tensor([0.5000], dtype=torch.float64), tensor([10.], dtype=torch.float64))
        """
        shape = (-(second * mode + first) * mode).clamp(min=FLATTEST)
        return cls(shape, shape / mode, prior)

    def sample(self, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw points, `(num_draws, *batch, edges)`, and tell the part of the mixture of each, `(num_draws,)`."""
        full = (num_draws, *self.shape.shape)
        # torch's sampler takes a generator, its distribution does not.
        near = torch._standard_gamma(self.shape.expand(full), generator=generator) / self.rate
        return defended_draws(near.clamp(min=torch.finfo(near.dtype).tiny), self.prior, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities, `(*sample, *batch, edges) -> (*sample, *batch)`."""
        return defended_log_prob(Gamma(self.shape, self.rate, validate_args=False).log_prob(x), x, self.prior)

    def refitted(self, x: Tensor, log_weights: Tensor) -> Proposal:
        """Match the gamma distributions to weighted draws.

        Parameters
        ----------
        x : Tensor
            Draws, shape `(draws, *batch, edges)`.
        log_weights : Tensor
            Shape `(draws, *batch)`. The fewer effective draws they leave, the less is changed.

        Returns
        -------
        Proposal
            With the weighted mean and variance of the logarithm of each coordinate.
        """
        weights = log_weights.softmax(0)[..., None]
        effective = 1.0 / weights.square().sum(0)
        trust = effective / (effective + STEADY)
        # Of the logarithms, which have moments even where the prior has none.
        log_x = x.log()
        mean = (weights * log_x).sum(0)
        variance = (weights * (log_x - mean).square()).sum(0)
        mean = trust * mean + (1.0 - trust) * (self.shape.digamma() - self.rate.log())
        variance = trust * variance + (1.0 - trust) * torch.polygamma(1, self.shape)
        shape = _inverse_trigamma(variance).clamp(min=FLATTEST)
        return replace(self, shape=shape, rate=(shape.digamma() - mean).exp())


def _inverse_trigamma(value: Tensor) -> Tensor:
    """Return where the second derivative of the log of the gamma function has this value, by Newton's method.

    Examples
    --------
    >>> bool((torch.polygamma(1, _inverse_trigamma(torch.tensor([1e-3, 1.0, 1e3]).double())) > 0).all())
    True
    """
    x = 0.5 + 1.0 / value
    for _ in range(20):
        found = torch.polygamma(1, x)
        # The reciprocal is close to a straight line.
        x = x + found * (1.0 - found / value) / torch.polygamma(2, x)
    return x
