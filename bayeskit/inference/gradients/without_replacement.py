"""Draws without replacement: Gumbel top-k, and stochastic beam search where points are sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.gradients.space import Space, gumbel


class Beam(NamedTuple):
    """Different points in the order in which they were drawn.

    Attributes
    ----------
    codes : Tensor
        Shape `(k, *batch, variables)`.
    perturbed : Tensor
        Log probabilities plus Gumbel noise, from the largest on: shape `(k, *batch)`.
    """

    codes: Tensor
    perturbed: Tensor


def check_k(k: int, space: Space, what: str = "k") -> None:
    """Refuse more points than there are."""
    if k > space.size:
        raise SettingsError(
            f"{what}={k} points without replacement from a support of {space.size}; give at most {space.size}, or use "
            "Enumeration"
        )


@torch.no_grad()
def stochastic_beam_search(space: Space, k: int, generator: torch.Generator | None = None) -> Beam:
    r"""Draw `k` different points, one after the other in proportion to their probabilities.

    Every point has its own Gumbel noise, and the `k` largest sums :math:`\log p(z) + G_z` are found without listing
    all: noises of continuations are drawn given that their maximum is that of the common beginning.

    Parameters
    ----------
    space : Space
    k : int
        At most the size of the support.
    generator : torch.Generator, optional

    Returns
    -------
    Beam

    Raises
    ------
    SettingsError
        If `k` is below one or larger than the support.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2019). Stochastic beams and where to find them: the Gumbel-top-k trick for
    sampling sequences without replacement. ICML.
    """
    check_k(whole_number("k", k, least=1), space)
    like = space.like
    root = (1, *space.batch_shape)
    codes = torch.zeros(*root, 0, dtype=torch.int64, device=like.device)
    log_probability = torch.zeros(root, dtype=like.dtype, device=like.device)
    perturbed = gumbel(root, like, generator)
    for _ in range(space.num_variables):
        children = log_probability.unsqueeze(-1) + space.conditional(codes)
        noisy = children + gumbel(tuple(children.shape), like, generator)
        noisy = _given_maximum(noisy, perturbed.unsqueeze(-1))
        codes, chosen, perturbed = _best(codes, noisy, k)
        flat = children.movedim(-1, 1).flatten(0, 1)
        log_probability = flat.gather(0, chosen)
    return Beam(codes, perturbed)


def gumbel_top_k(logits: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `k` different categories, one after the other in proportion to their probabilities.

    Parameters
    ----------
    logits : Tensor
        Shape `(*batch, categories)`.
    k : int
    generator : torch.Generator, optional

    Returns
    -------
    Tensor
        Indices in the order of their draws, shape `(*batch, k)`.

    Raises
    ------
    SettingsError
        If `k` is below one or larger than the number of categories.
    DataError
        If a logit is not finite.

    Examples
    --------
    >>> import torch
    >>> gumbel_top_k(torch.tensor([0.0, 0.0, -200.0]), 2).sort().values
    tensor([0, 1])
    """
    count = logits.shape[-1]
    if whole_number("k", k, least=1) > count:
        raise SettingsError(f"k={k} categories without replacement from {count}; give at most {count}")
    if not logits.is_floating_point() or not bool(logits.isfinite().all()):
        raise DataError("logits must be finite floating-point numbers; leave out categories of probability zero")
    with torch.no_grad():
        return (logits + gumbel(tuple(logits.shape), logits, generator)).topk(k, dim=-1).indices


def most_probable(space: Space, k: int) -> Tensor:
    """Return the codes of the `k` points a beam search finds, `(k, *batch, variables)`.

    These are the `k` most probable where variables are independent, and otherwise those that look so on the way.
    """
    check_k(whole_number("k", k, least=1), space)
    with torch.no_grad():
        like = space.like
        root = (1, *space.batch_shape)
        codes = torch.zeros(*root, 0, dtype=torch.int64, device=like.device)
        log_probability = torch.zeros(root, dtype=like.dtype, device=like.device)
        for _ in range(space.num_variables):
            codes, _, log_probability = _best(codes, log_probability.unsqueeze(-1) + space.conditional(codes), k)
    return codes


def _best(codes: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best continuations: codes, their places among all `(beginning, category)`, and scores."""
    count = scores.shape[-1]
    flat = scores.movedim(-1, 1).flatten(0, 1)
    best, chosen = flat.topk(min(k, len(flat)), dim=0)
    before = codes.gather(0, (chosen // count).unsqueeze(-1).expand(*chosen.shape, codes.shape[-1]))
    return torch.cat([before, (chosen % count).unsqueeze(-1)], -1), chosen, best


def _given_maximum(noisy: Tensor, maximum: Tensor) -> Tensor:
    """Return Gumbel variables as they are given what their largest is, in a form that does not overflow."""
    largest = noisy.amax(-1, keepdim=True)
    v = maximum - noisy + torch.log1p(-(noisy - largest).exp())
    # At the largest itself the logarithm is minus infinity, and the result the maximum.
    return maximum - v.clamp_min(0) - torch.log1p((-v.abs()).exp())
