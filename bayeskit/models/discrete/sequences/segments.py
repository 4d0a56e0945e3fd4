"""The dynamic programme over segmentations, in any semiring.

The log weights of segments have shape ``(*batch, n, L)``: entry ``[j, l]`` is that of the ``l + 1`` places up to and
including place ``j``. A segmentation cuts the places ``0, ..., n - 1`` into segments and weighs their product.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit.models.discrete.sequences.semirings import LogSum, Semiring, shares

Choice = Callable[[Tensor], Tensor]


def prefix_sums(semiring: Semiring, segments: Tensor) -> Tensor:
    """Sum over the segmentations of every prefix.

    Parameters
    ----------
    semiring : Semiring
    segments : Tensor
        Elements of segments, ``(*batch, n, L)``.

    Returns
    -------
    Tensor
        ``(*batch, n + 1)``: entry ``j`` belongs to the first ``j`` places. That of none is one.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences.segments import prefix_sums
    >>> from bayeskit.models.discrete.sequences import Counting
    >>> prefix_sums(Counting(), torch.ones(10, 2, dtype=torch.int64))
    tensor([ 1,  1,  2,  3,  5,  8, 13, 21, 34, 55, 89])
    """
    longest = segments.shape[-1]
    template = segments[..., 0, :]
    recent = torch.cat([semiring.one(template[..., :1]), semiring.zero(template[..., 1:])], -1)
    sums = [recent[..., 0]]
    for segment in segments.unbind(-2):
        sums.append(semiring.sum(semiring.product(recent, segment), -1))
        recent = torch.cat([sums[-1].unsqueeze(-1), recent[..., : longest - 1]], -1)
    return torch.stack(sums, -1)


def totals(semiring: Semiring, segments: Tensor, lengths: Tensor) -> Tensor:
    """Sum over all segmentations of sequences with ``lengths``: ``(*batch, n, L)`` and ``(*batch)`` to ``(*batch)``."""
    sums = prefix_sums(semiring, segments)
    return sums.gather(-1, lengths.expand(sums.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def continuations(semiring: Semiring, sums: Tensor, segments: Tensor) -> Tensor:
    """Join every segment to what may stand before it.

    Parameters
    ----------
    semiring : Semiring
    sums : Tensor
        Elements of prefixes, ``(*batch, n + 1)``.
    segments : Tensor
        Elements of segments, ``(*batch, n, L)``.

    Returns
    -------
    Tensor
        ``(*batch, n, L)``: entry ``[j, l]`` is the product of the prefix of ``j - l`` places and the segment after it.
    """
    n, longest = segments.shape[-2:]
    start = torch.arange(n, device=sums.device).unsqueeze(1) - torch.arange(longest, device=sums.device)
    before = sums[..., start.clamp_min(0)]
    return semiring.product(torch.where(start >= 0, before, semiring.zero(before)), segments)


def numbered_sums(semiring: Semiring, segments: Tensor, largest: int) -> Tensor:
    """Sum over the segmentations of every prefix into a given number of segments.

    Parameters
    ----------
    semiring : Semiring
    segments : Tensor
        Elements of segments, ``(*batch, n, L)``.
    largest : int
        The largest number of segments.

    Returns
    -------
    Tensor
        ``(*batch, largest + 1, n + 1)``: entry ``[k, j]`` belongs to the first ``j`` places in ``k`` segments.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences.segments import numbered_sums
    >>> from bayeskit.models.discrete.sequences import Counting
    >>> numbered_sums(Counting(), torch.ones(5, 5, dtype=torch.int64), 5)[:, -1]
    tensor([0, 1, 4, 6, 4, 1])
    """
    places = segments[..., 0]
    impossible = semiring.zero(places[..., :1])
    sums = [torch.cat([semiring.one(places[..., :1]), semiring.zero(places)], -1)]
    for _ in range(largest):
        extended = semiring.sum(continuations(semiring, sums[-1], segments), -1)
        sums.append(torch.cat([impossible, extended], -1))
    return torch.stack(sums, -2)


def follow(lengths: Tensor, end: Tensor) -> Tensor:
    """Follow the last segments backwards from the end.

    Parameters
    ----------
    lengths : Tensor of int
        ``(*batch, n)``: of the segment that was chosen to end at each place, were there a boundary.
    end : Tensor of int
        ``(*batch)``: how many places there are.

    Returns
    -------
    Tensor of bool
        ``(*batch, n)``: True where a segment ends.
    """
    n = lengths.shape[-1]
    reached = torch.arange(n + 1, device=lengths.device) == end.unsqueeze(-1)
    reached = reached.expand(*lengths.shape[:-1], n + 1).clone()
    for place in range(n, 0, -1):
        start = (place - lengths[..., place - 1 : place]).clamp_min(0)
        reached.scatter_(-1, start, reached.gather(-1, start) | reached[..., place : place + 1])
    return reached[..., 1:]


def follow_numbered(sums: Tensor, segments: Tensor, number: Tensor, choose: Choice) -> Tensor:
    """Choose segments backwards from the end when their number is known.

    Parameters
    ----------
    sums : Tensor
        Logarithms, ``(largest + 1, n + 1)``, of :func:`numbered_sums`.
    segments : Tensor
        Log weights ``(n, L)``.
    number : Tensor of int
        ``(*sample)``: how many segments each segmentation has.
    choose : callable
        Maps logits ``(*sample, L)`` to indices ``(*sample)``.

    Returns
    -------
    Tensor of bool
        ``(*sample, n)``: True where a segment ends.
    """
    n, longest = segments.shape
    position = torch.full_like(number, n)
    ends = torch.zeros(*number.shape, n + 1, dtype=torch.bool, device=number.device)
    back = torch.arange(longest, device=number.device) + 1
    for left in range(int(number.max()), 0, -1):
        active = number >= left
        ends.scatter_(-1, position.unsqueeze(-1), ends.gather(-1, position.unsqueeze(-1)) | active.unsqueeze(-1))
        start = position.unsqueeze(-1) - back
        before = torch.where(start >= 0, sums[left - 1][start.clamp_min(0)], -math.inf)
        length = choose(before + segments[(position - 1).clamp_min(0)]) + 1
        position = torch.where(active, position - length, position)
    return ends[..., 1:]


def numbered_probabilities(sums: Tensor, segments: Tensor, number_probabilities: Tensor) -> Tensor:
    """Return the probability of each segment where the number of segments has a distribution of its own.

    Probability flows backwards from the end, and is divided among the segments that may come last. That is the
    gradient of the log of the total, in the memory of one step.

    Parameters
    ----------
    sums : Tensor
        Logarithms, ``(largest + 1, n + 1)``, of :func:`numbered_sums`.
    segments : Tensor
        Log weights ``(n, L)``.
    number_probabilities : Tensor
        Of 1, 2, ... segments, ``(largest,)``.

    Returns
    -------
    Tensor
        ``(n, L)``.
    """
    n, longest = segments.shape
    start = torch.arange(n, device=sums.device).unsqueeze(1) - torch.arange(longest, device=sums.device)
    probabilities, arriving = torch.zeros_like(segments), sums.new_zeros(n + 1)
    for number in range(len(sums) - 1, 0, -1):
        arriving[n] += number_probabilities[number - 1]
        last = shares(continuations(LogSum(), sums[number - 1], segments), -1)
        flow = arriving[1:].unsqueeze(1) * last
        probabilities += flow
        arriving = torch.zeros_like(arriving).index_add(0, start.clamp_min(0).flatten(), flow.flatten())
    return probabilities


def segment_lengths(ends: Tensor) -> Tensor:
    """Return, at the last place of each segment, its length, and zero elsewhere: ``(*batch, n)`` to the same."""
    place = torch.arange(1, ends.shape[-1] + 1, device=ends.device)
    last = torch.where(ends, place, 0).cummax(-1).values
    before = torch.cat([torch.zeros_like(last[..., :1]), last[..., :-1]], -1)
    return torch.where(ends, place - before, 0)
