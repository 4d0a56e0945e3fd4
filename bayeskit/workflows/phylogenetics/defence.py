"""A little of the prior and of a heavy tail in a proposal of branch lengths, so that importance weights are bounded.

A density that was matched to a posterior may fall off faster than the posterior itself: data say little about a very
long branch, and next to nothing about how short a branch without a substitution is. The weight of a draw far out can
then be of any size, and so rare that no diagnostic of the weights at hand sees it missing.

One draw of ten is of the prior, so that no weight can exceed that of the likelihood by much: few sites with a wide
prior leave much of the evidence to trees with all branches so long that the sites are random. In another one, where the
prior is the same for each branch, a random half of the branch lengths is of the prior, because often some are known.

In the others, a share of each branch length comes from a log-Cauchy distribution, such that in one of five one length
at least does. Its density falls off as `1 / (x log(x)**2)`, both towards zero and towards infinity, so that the weight
is bounded whatever power of the length the prior rises or falls by, and whatever the others are.

References
----------
Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
185-194.
"""

from __future__ import annotations

import math

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from bayeskit._torch import global_stream
from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics.branch_length_priors import log_prior_of_lengths

#: The shares of draws of which all branch lengths, or a random half, are of the prior.
PRIOR, HALF = 0.1, 0.1
#: The share of the other draws that have a branch length from the heavy tail.
DEFENCE = 0.2
#: The median of the heavy tail, in expected substitutions per site, and the half width at half height of its logarithm.
MEDIAN, WIDTH = 0.1, 2.0
#: Logarithms end this many widths from the median: what lies beyond is no floating-point number any more.
_END = 150.0
_ANGLE = math.atan(_END)


def share_of_tail(num_edges: int) -> float:
    """Return the probability that one of so many branch lengths comes from the heavy tail.

    Examples
    --------
    >>> (1 - share_of_tail(5)) ** 5
    0.8
    """
    return -math.expm1(math.log1p(-DEFENCE) / num_edges)


def defended_draws(near: Tensor, prior: TorchDistribution, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace a share of draws by the prior's, and of other branch lengths by draws from the prior or the heavy tail.

    How many draws have all lengths from the prior, or a half, is not left to chance, but for rounding, so that an error
    may leave out what the shares would add: see `stratified_log_mean_exp_error`.

    Parameters
    ----------
    near : Tensor
        Draws of what is to be defended, shape `(draws, *batch, edges)`.
    prior : TorchDistribution
        Over one branch length or over the vector of all.
    generator : torch.Generator

    Returns
    -------
    lengths : Tensor
        Shape `(draws, *batch, edges)`.
    part : Tensor
        Which part of the mixture each draw is from, shape `(draws,)`.

    Raises
    ------
    SettingsError
        If the prior has no draws.
    """
    uniform = torch.rand((2, *near.shape), generator=generator, dtype=near.dtype, device=near.device)
    far = MEDIAN * (WIDTH * ((2 * uniform[0] - 1) * _ANGLE).tan()).exp()
    tailed = torch.where(uniform[1] < share_of_tail(near.shape[-1]), far, near)
    try:
        with global_stream(generator):
            before = prior.sample(near.shape[:-1] if prior.event_shape else near.shape).to(near)
    except NotImplementedError as error:
        raise SettingsError(
            f"branch_length_prior: {type(prior).__name__} cannot be drawn from, and may be improper. Remedy: give a "
            "proper one with a method sample, such as Exponential(torch.tensor(10.0))."
        ) from error
    limits = torch.finfo(near.dtype)
    before = before.clamp(limits.tiny, limits.max)
    half = torch.where(uniform[1] < 0.5, before, near)
    offset = torch.rand((), generator=generator, dtype=near.dtype, device=near.device)
    order = torch.randperm(len(near), generator=generator, device=near.device)
    place = (order + offset) / len(near)
    part = (place >= PRIOR).long() + (place >= PRIOR + _share_of_half(prior)).long()
    number = part.reshape(-1, *(1,) * (near.dim() - 1))
    return torch.where(number == 0, before, torch.where(number == 1, half, tailed)), part


def defended_log_prob(log_near: Tensor, lengths: Tensor, prior: TorchDistribution) -> Tensor:
    """Return the log density of `defended_draws`.

    Parameters
    ----------
    log_near : Tensor
        Log density of each length by itself, shape `(*batch, edges)`.
    lengths : Tensor
        Shape `(*batch, edges)`.
    prior : TorchDistribution

    Returns
    -------
    Tensor
        Shape `(*batch)`.
    """
    share = share_of_tail(lengths.shape[-1])
    log_length = lengths.log()
    standard = (log_length - math.log(MEDIAN)) / WIDTH
    far = math.log(share / (2 * _ANGLE * WIDTH)) - torch.log1p(standard.square()) - log_length
    far = torch.where(standard.abs() <= _END, far, -torch.inf)
    tailed = torch.logaddexp(log_near + math.log1p(-share), far).sum(-1)
    log_prior = log_prior_of_lengths(prior, lengths[..., None] if not prior.event_shape else lengths)
    half = _share_of_half(prior)
    parts = [tailed + math.log1p(-PRIOR - half)]
    if half:
        mixed = (torch.logaddexp(log_near, log_prior) - math.log(2)).sum(-1)
        parts.append(mixed + math.log(half))
        log_prior = log_prior.sum(-1)
    return torch.stack([*parts, log_prior + math.log(PRIOR)]).logsumexp(0)


def _share_of_half(prior: TorchDistribution) -> float:
    """Nothing where branch lengths are not independent of each other, and cannot be drawn one by one."""
    return 0.0 if prior.event_shape else HALF
