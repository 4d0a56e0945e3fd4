"""Gamma distributions, and beside each a wider one that reaches as far as a power of the coordinate would."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Gamma

from bayeskit.inference.evidence.laplus.positive import PositiveDensity

#: Degrees of freedom of the logarithm in the wider part, and its scale beside that of the gamma distribution's.
_DF, _WIDTH = 4.0, 1.5
#: Chance of the wider distribution for each coordinate, in the part of the draws where many are far out together.
_MANY = 0.5
#: Points along each coordinate, both ways to this many scales of the logarithm, closer together near the centre.
_POINTS, _REACH = 41, 50.0
#: Weights above the largest one drawn by less than this, on the log scale, are not new.
_MARGIN = 0.1


class Proposal:
    """A mixture of products, over the coordinates, of a gamma distribution and a log-Student-t one.

    A gamma distribution falls off faster than any power of the coordinate, as few posteriors of scales and variances
    do; a Student-t distribution of the logarithm falls off more slowly than every power.

    Parameters
    ----------
    gamma : Gamma
        Of batch shape `(d,)`.
    tail_share : float
        Share of the draws in which each coordinate comes from its log-Student-t distribution with an even chance; in
        the others that share of a coordinate does, on average.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> proposal = Proposal(Gamma(3 * one, 2 * one), 0.5)
    >>> x = torch.linspace(-30, 30, 6001, dtype=torch.float64).exp().unsqueeze(-1)
    >>> bool(abs((proposal.log_prob(x).exp() * x[:, 0]).sum() * 0.01 - 1) < 1e-4)
    True
    """

    def __init__(self, gamma: Gamma, tail_share: float) -> None:
        shape, rate = gamma.concentration.double(), gamma.rate.double()
        self.gamma = Gamma(shape, rate, validate_args=False)
        # Mode and curvature of the density of the logarithm.
        self.centre, self.scale = (shape / rate).log(), _WIDTH / shape.sqrt()
        # Weight of each part, and the chance of the wider distribution for each coordinate in it.
        rest = 1 - tail_share
        self.parts = [(1.0, 0.0)] if not tail_share else [(rest, tail_share / len(shape)), (tail_share, _MANY)]

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw, in double precision, shape `(num_draws, d)`."""
        shape = self.gamma.concentration.expand(num_draws, -1)
        x = torch._standard_gamma(shape, generator=generator) / self.gamma.rate
        if len(self.parts) > 1:
            half = torch.full_like(shape, _DF / 2)
            normal = torch.empty_like(x).normal_(generator=generator)
            t = normal * (half / torch._standard_gamma(half, generator=generator)).sqrt()
            (_, few), (weight, many) = self.parts
            chance = torch.where(torch.empty_like(x[:, :1]).uniform_(generator=generator) < weight, many, few)
            wide = torch.empty_like(x).uniform_(generator=generator) < chance
            x = torch.where(wide, (self.centre + self.scale * t).exp(), x)
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the positive coordinates, `(*batch, d) -> (*batch)`."""
        x = x.double()
        narrow = self.gamma.log_prob(x)
        if len(self.parts) == 1:
            return narrow.sum(-1)
        u = x.log()
        constant = math.lgamma((_DF + 1) / 2) - math.lgamma(_DF / 2) - 0.5 * math.log(_DF * math.pi)
        kernel = ((u - self.centre) / self.scale).square().div(_DF).log1p()
        wide = constant - (_DF + 1) / 2 * kernel - self.scale.log() - u
        few, many = (
            math.log(weight) + torch.logaddexp(narrow + math.log1p(-share), wide + math.log(share)).sum(-1)
            for weight, share in self.parts
        )
        return torch.logaddexp(few, many)


def beyond_reach(density: PositiveDensity, proposal: Proposal, largest: float) -> tuple[float, int]:
    """Look along each coordinate, the others at their centres, for weights larger than any that was drawn.

    Parameters
    ----------
    density : PositiveDensity
    proposal : Proposal
    largest : float
        Log of the largest weight drawn.

    Returns
    -------
    share : float
        What such weights are worth beside the others along the same line, at the worst coordinate: a ratio of
        contributions to the mean of the squared weights.
    num_evaluations : int
    """
    d = len(proposal.centre)
    t = torch.linspace(-1.0, 1.0, _POINTS, dtype=torch.float64, device=proposal.centre.device) * math.asinh(_REACH)
    u = proposal.centre.repeat(d, _POINTS, 1)
    u.diagonal(dim1=0, dim2=2).add_(t.sinh().unsqueeze(-1) * proposal.scale / _WIDTH)
    x = within(u.exp(), density.target.dtype)
    log_density = density.log_density(x).double()
    log_weights = log_density - proposal.log_prob(x)
    # The line integral of weight times density, over the logarithm.
    terms = log_weights + log_density + u.diagonal(dim1=0, dim2=2).T + t.cosh().log()
    new = log_weights > largest + _MARGIN
    unseen, seen = (torch.where(kept, terms, -torch.inf).logsumexp(1) for kept in (new, ~new))
    ratio = torch.where(new.any(1), (unseen - seen).clamp(max=700.0).exp(), 0.0)
    return float(ratio.nan_to_num(nan=math.inf).max()), d * _POINTS


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest positive numbers that the format of the target has, and keep their logarithms finite."""
    info = torch.finfo(dtype)
    return x.clamp(min=info.tiny, max=info.max).to(dtype)
