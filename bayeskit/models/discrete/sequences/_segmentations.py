"""Segmentations of sequences: dynamic programming in any semiring, and distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.extend import as_numbers, new_generator, whole_number
from bayeskit.models.discrete._inputs import as_real
from bayeskit.models.discrete.sequences._chains import (
    Counting,
    Expectation,
    LogSum,
    MaxWeight,
    Semiring,
    alternative_shares,
    draw_categories,
    surprisal,
)

# Dynamic programming over segmentations, in any semiring.
# Log weights of segments have shape ``(*batch, n, L)``. Entry ``[j, l]`` is the log weight of the segment of length
# ``l + 1`` that ends at position ``j``. The weight of a segmentation is the product over its segments.

Choice = Callable[[Tensor], Tensor]


def prefix_sums(semiring: Semiring, segments: Tensor) -> Tensor:
    """Sum over the segmentations of every prefix, the empty one first: ``(*batch, n, L)`` -> ``(*batch, n + 1)``."""
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


def _continuations(semiring: Semiring, sums: Tensor, segments: Tensor) -> Tensor:
    """Return the product of every segment ``(*batch, n, L)`` and the sum of the prefix before, ``(*batch, n + 1)``."""
    # Entry [j, l] combines the prefix of length j - l with the segment that follows.
    n, longest = segments.shape[-2:]
    start = torch.arange(n, device=sums.device).unsqueeze(1) - torch.arange(longest, device=sums.device)
    before = sums[..., start.clamp_min(0)]
    return semiring.product(torch.where(start >= 0, before, semiring.zero(before)), segments)


def numbered_sums(semiring: Semiring, segments: Tensor, largest: int) -> Tensor:
    """Sum over segmentations of prefixes into ``k`` parts: ``(*batch, n, L)`` -> ``(*batch, largest + 1, n + 1)``."""
    places = segments[..., 0]
    impossible = semiring.zero(places[..., :1])
    sums = [torch.cat([semiring.one(places[..., :1]), semiring.zero(places)], -1)]
    for _ in range(largest):
        extended = semiring.sum(_continuations(semiring, sums[-1], segments), -1)
        sums.append(torch.cat([impossible, extended], -1))
    return torch.stack(sums, -2)


def _follow(lengths: Tensor, end: Tensor) -> Tensor:
    """Return True where segments end, ``(*batch, n)``; backtracks ``lengths (*batch, n)`` from ``end (*batch)``."""
    n = lengths.shape[-1]
    reached = torch.arange(n + 1, device=lengths.device) == end.unsqueeze(-1)
    reached = reached.expand(*lengths.shape[:-1], n + 1).clone()
    for place in range(n, 0, -1):
        start = (place - lengths[..., place - 1 : place]).clamp_min(0)
        reached.scatter_(-1, start, reached.gather(-1, start) | reached[..., place : place + 1])
    return reached[..., 1:]


def follow_numbered(sums: Tensor, segments: Tensor, number: Tensor, choose: Choice) -> Tensor:
    """Tell where segments end, ``(*sample, n)``, choosing backwards when their ``number (*sample)`` is known.

    ``sums (largest + 1, n + 1)`` and ``segments (n, L)`` are logs; ``choose`` maps ``(*sample, L)`` to ``(*sample)``.
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
    """Return the probability of each segment, ``(n, L)``, given a distribution of the number of segments.

    ``sums (largest + 1, n + 1)`` and ``segments (n, L)`` are logs, ``number_probabilities (largest,)`` of 1, 2, ...
    """
    n, longest = segments.shape
    start = torch.arange(n, device=sums.device).unsqueeze(1) - torch.arange(longest, device=sums.device)
    # Backward pass: the probability of each prefix is divided among its possible last segments. This is the gradient of
    # the log total, with the memory of one step.
    probabilities, arriving = torch.zeros_like(segments), sums.new_zeros(n + 1)
    for number in range(len(sums) - 1, 0, -1):
        arriving[n] += number_probabilities[number - 1]
        last = alternative_shares(_continuations(LogSum(), sums[number - 1], segments), -1)
        flow = arriving[1:].unsqueeze(1) * last
        probabilities += flow
        arriving = torch.zeros_like(arriving).index_add(0, start.clamp_min(0).flatten(), flow.flatten())
    return probabilities


def segment_lengths(ends: Tensor) -> Tensor:
    """Return the segment length at the last position of each segment, 0 elsewhere: ``(*batch, n)`` -> same."""
    place = torch.arange(1, ends.shape[-1] + 1, device=ends.device)
    last = torch.where(ends, place, 0).cummax(-1).values
    before = torch.cat([torch.zeros_like(last[..., :1]), last[..., :-1]], -1)
    return torch.where(ends, place - before, 0)


# Distribution over segmentations, with probability proportional to the product of segment weights.


class Segmentations:
    r"""Distribution over the segmentations of sequences.

    A segmentation divides a sequence into consecutive segments :math:`s_1, \dots, s_m`. With weights
    :math:`w(s) \ge 0`, e.g. word probabilities or marginal likelihoods of segments,

    .. math:: p(s_1, \dots, s_m) = \frac{1}{Z} \prod_{i=1}^m w(s_i), \qquad Z = \sum \prod_i w(s_i),

    All results are exact. The cost is proportional to ``n * L``. Methods raise the ``DataError`` of :meth:`check` where
    they need a segmentation of every sequence.

    Parameters
    ----------
    log_weights : Tensor or array
        Shape ``(*batch, n, L)``. Entry ``[j, l]`` is the log weight of the segment of length ``l + 1`` that ends at
        position ``j``; ``-inf`` excludes it. ``L`` is the maximum segment length. Entries with ``l > j`` are ignored.
    lengths : Tensor or array of int, optional
        Sequence lengths, 1 to ``n``, broadcast to ``(*batch)``; default ``n``. Padding is ignored.

    Raises
    ------
    ShapeError
        If ``log_weights`` has fewer than two dimensions or is empty, or ``lengths`` does not broadcast to its batch.
    DataError
        If a length is not an integer from 1 to ``n``, or ``log_weights`` are not real.

    References
    ----------
    Goodman, J. (1999). Semiring parsing. Computational Linguistics 25, 573-605.

    Kong, L., Dyer, C., Smith, N. A. (2016). Segmental recurrent neural networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import Segmentations
    >>> segmentations = Segmentations(torch.zeros(10, 3))
    >>> segmentations.count(), segmentations.entropy()
    (tensor(274), tensor(5.6131))
    """

    def __init__(self, log_weights: Tensor, lengths: Tensor | None = None) -> None:
        log_weights = as_real("log_weights", log_weights)
        if log_weights.dim() < 2 or not log_weights.shape[-1] or not log_weights.shape[-2]:
            raise ShapeError(
                f"log_weights has shape {tuple(log_weights.shape)}; give (*batch, n, L), with a row for each end "
                "position and a column for each segment length"
            )
        self.lengths = checked_lengths(lengths, log_weights.shape[:-2], log_weights.shape[-2], log_weights.device)
        self.log_weights = torch.where(_within(self.lengths, *log_weights.shape[-2:]), log_weights, -math.inf)

    def __repr__(self) -> str:
        *batch, n, longest = self.log_weights.shape
        return f"Segmentations(batch {tuple(batch)}, {n} places, segments of up to {longest})"

    def log_normalizer(self) -> Tensor:
        """Return the log normalizer ``log Z``, shape ``(*batch)``.

        It is ``-inf`` if no segmentation has positive weight. Its gradient with respect to the log weights is
        :meth:`segment_probabilities`.
        """
        return totals(LogSum(), self.log_weights, self.lengths)

    def segment_probabilities(self) -> Tensor:
        """Return the probability that each segment is part of the segmentation, ``(*batch, n, L)``, differentiable."""
        self.check()
        follows = self.log_weights.requires_grad
        with torch.enable_grad():
            weights = self.log_weights if follows else self.log_weights.detach().requires_grad_()
            total = Segmentations(weights, self.lengths).log_normalizer().sum()
            return torch.autograd.grad(total, weights, create_graph=follows)[0]

    def boundary_probabilities(self) -> Tensor:
        """Return the probability that a segment ends at each position, ``(*batch, n)``."""
        return self.segment_probabilities().sum(-1)

    def most_probable(self) -> Tensor:
        """Return the most probable segmentation (any, if tied): True where a segment ends, ``(*batch, n)``."""
        return self._backtracked(MaxWeight(), lambda logits: logits.argmax(-1))

    def sample(self, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw independent segmentations: True where a segment ends, ``(num_samples, *batch, n)``.

        Raises ``SettingsError`` if ``num_samples`` is not a positive integer.
        """
        num_samples = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, self.log_weights.device, stream="segmentations")
        return self._backtracked(LogSum(), lambda logits: draw_categories(logits, num_samples, generator))

    def _backtracked(self, semiring: Semiring, choose: Choice) -> Tensor:
        """Tell where segments end, ``(*sample, *batch, n)``; ``choose`` takes logits ``(*batch, n, L)``."""
        self.check()
        with torch.no_grad():
            logits = _continuations(semiring, prefix_sums(semiring, self.log_weights), self.log_weights)
            return _follow(choose(logits) + 1, self.lengths)

    def log_prob(self, ends: Tensor) -> Tensor:
        """Return the log probability of segmentations, ``(*sample, *batch, n)`` to ``(*sample, *batch)``.

        ``ends``: True where a segment ends, including the last position of each sequence. Raises ``ShapeError`` if the
        last dimension of ``ends`` is not ``n``; ``DataError`` if a sequence has no segmentation.
        """
        self.check()
        return self.log_weight(ends) - self.log_normalizer()

    def log_weight(self, ends: Tensor) -> Tensor:
        """Return the unnormalized :meth:`log_prob` of segmentations, ``(*sample, *batch)``.

        ``ends``: ``(*sample, *batch, n)``. Raises ``ShapeError`` if the last dimension of ``ends`` is not ``n``.
        """
        ends = as_numbers("ends", ends)
        n, longest = self.log_weights.shape[-2:]
        if ends.shape[-1:] != (n,) or ends.dtype != torch.bool:
            raise ShapeError(f"ends is {ends.dtype} of shape {tuple(ends.shape)}; give a mask (*sample, *batch, {n})")
        place = torch.arange(1, n + 1, device=ends.device)
        inside = place <= self.lengths.unsqueeze(-1)
        length = torch.where(inside, segment_lengths(ends), 0)
        index = (length - 1).clamp(0, longest - 1).unsqueeze(-1)
        weights = self.log_weights.expand(*length.shape, longest).gather(-1, index).squeeze(-1)
        weights = torch.where(length > longest, -math.inf, torch.where(length > 0, weights, 0.0))
        finished = (ends & (place == self.lengths.unsqueeze(-1))).any(-1)
        return torch.where(finished, weights.sum(-1), -math.inf)

    def count(self) -> Tensor:
        """Return the number of segmentations with positive weight, int64, ``(*batch)``.

        Raises ``DataError`` if the number overflows int64; the message gives its logarithm.
        """
        possible = self.log_weights.detach() > -math.inf
        logarithm = totals(LogSum(), torch.where(possible, 0.0, -math.inf).double(), self.lengths)
        number = totals(Counting(), possible.long(), self.lengths)
        # int64 addition is modulo 2**64, so numbers from 2**63 to 2**64 are negative.
        if bool(((number < 0) | (logarithm > 63.5 * math.log(2))).any()):
            raise DataError(
                f"there are about exp({float(logarithm.max()):.6g}) segmentations, which overflows int64; for the "
                "logarithm use log_normalizer() with log weights of zero"
            )
        return number

    def expectation(self, values: Tensor) -> Tensor:
        """Return the mean over segmentations of the sum of their segments' values, ``(*batch)``.

        The result is differentiable with respect to values and log weights. With unit values it is the mean number of
        segments. ``values`` (tensor or array): finite, broadcast to ``(*batch, n, L)``. Values of excluded segments are
        ignored. Raises ``DataError`` if a sequence has no segmentation.
        """
        self.check()
        semiring = Expectation()
        values = as_real("values", values).expand(self.log_weights.shape).to(self.log_weights)
        values = torch.where(self.log_weights > -math.inf, values, 0.0)
        return totals(semiring, semiring.elements(self.log_weights, values), self.lengths)[1]

    def entropy(self) -> Tensor:
        """Return the entropy of the distribution over segmentations in nats, ``(*batch)``, differentiable."""
        return self.log_normalizer() + self.expectation(surprisal(self.log_weights))

    def check(self) -> None:
        """Raise an error if a sequence has no segmentation, naming the first such sequence and position.

        Raises ``DataError`` if a sequence has no segmentation, or a log weight in use is NaN or ``+inf``.
        """
        weights = self.log_weights.detach()
        bad = weights.isnan() | (weights == math.inf)
        if bool(bad.any()):
            index = tuple(int(i) for i in bad.nonzero()[0])
            *sequence, place, length = index
            raise DataError(
                f"the log weight of the segment of length {length + 1} that ends at place {place}{_of(sequence)} is "
                f"{float(weights[index])}; give finite log weights, or minus infinity to exclude a segment"
            )
        reachable = prefix_sums(MaxWeight(), weights) > -math.inf
        lost = ~reachable.gather(-1, self.lengths.unsqueeze(-1)).squeeze(-1)
        if bool(lost.any()):
            sequence = [int(i) for i in lost.nonzero()[0]]
            row = reachable[tuple(sequence)]
            place = int(row[: int(self.lengths[tuple(sequence)]) + 1].nonzero()[-1])
            raise DataError(
                f"no segmentation{_of(sequence)} has positive weight: no allowed segment begins at place {place} and "
                "ends within the sequence, and no segmentation extends beyond that place; allow such a segment, or "
                "longer segments"
            )


def _within(lengths: Tensor, n: int, longest: int) -> Tensor:
    """Return True for segments within their sequence, ``(*batch, n, L)``."""
    place = torch.arange(n, device=lengths.device).unsqueeze(-1)
    return (torch.arange(longest, device=lengths.device) <= place) & (place < lengths[..., None, None])


def _of(sequence: list[int]) -> str:
    return f" of sequence {tuple(sequence) if len(sequence) > 1 else sequence[0]}" if sequence else ""


def checked_lengths(lengths: Tensor | None, batch: torch.Size, n: int, device: torch.device) -> Tensor:
    """Return validated sequence lengths from 1 to ``n``, default ``n``, int64 ``(*batch)``."""
    if lengths is None:
        return torch.full(batch, n, dtype=torch.int64, device=device)
    lengths = as_numbers("lengths", lengths).to(device)
    if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
        raise DataError(f"lengths are {lengths.dtype}; give integers, each from 1 to {n}")
    lengths = lengths.to(torch.int64)
    if bool(((lengths < 1) | (lengths > n)).any()):
        raise DataError(f"lengths range from {int(lengths.min())} to {int(lengths.max())}; each must be from 1 to {n}")
    try:
        return lengths.expand(batch)
    except RuntimeError:
        raise ShapeError(f"lengths has shape {tuple(lengths.shape)}; the batch has {tuple(batch)}") from None
