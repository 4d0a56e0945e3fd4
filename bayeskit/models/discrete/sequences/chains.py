"""Semirings, and the dynamic programme over the states of a chain in any of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = [
    "Counting",
    "Expectation",
    "LogSum",
    "MaxWeight",
    "Semiring",
    "alternative_shares",
    "chain_product",
    "draw_categories",
    "follow",
    "identity",
    "path_prefix_sums",
    "predecessors",
    "suffix_sums",
    "surprisal",
]

# Semirings: sums and products under which one dynamic programme computes different quantities.


class Semiring(ABC):
    """What a dynamic programme over paths needs: a product along a path, a sum over paths, and their neutral elements.

    Elements are tensors. Operations act on each entry and broadcast; dimensions are counted from the right, because
    :class:`Expectation` keeps two tensors in one, stacked in front.
    """

    @abstractmethod
    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply entry by entry: what two parts of a path weigh together."""

    @abstractmethod
    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Add up dimension ``dim``, negative: what alternatives weigh together."""

    @abstractmethod
    def one(self, like: Tensor) -> Tensor:
        """Return elements neutral in products, shaped as the elements ``like``."""

    @abstractmethod
    def zero(self, like: Tensor) -> Tensor:
        """Return elements neutral in sums, shaped as the elements ``like``."""


class LogSum(Semiring):
    """Sums of weights, as logarithms: the marginal over all paths.

    Its gradient is finite also where every alternative weighs zero, unlike that of :func:`torch.logsumexp`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import LogSum
    >>> LogSum().sum(torch.tensor([0.25, 0.5]).log(), dim=-1).exp()
    tensor(0.7500)
    """

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply weights: add their logarithms."""
        return left + right

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Add weights up."""
        largest = elements.detach().amax(dim, keepdim=True)
        impossible = largest == -math.inf
        offset = largest.masked_fill(impossible, 0.0)
        total = (elements - offset).exp().sum(dim, keepdim=True)
        # The logarithm never meets a zero, so that no infinite slope is multiplied by a zero on the way back.
        logarithm = total.masked_fill(impossible, 1.0).log() + offset
        return logarithm.masked_fill(impossible, -math.inf).squeeze(dim)

    def one(self, like: Tensor) -> Tensor:
        """Return logarithms of one."""
        return torch.zeros_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return logarithms of zero."""
        return torch.full_like(like, -math.inf)


class MaxWeight(Semiring):
    """The largest weight, as a logarithm: that of the most probable path.

    Which path it is, :func:`~.segments.follow` and :func:`~.chains.follow` read off the table of largest weights.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import MaxWeight
    >>> MaxWeight().sum(torch.tensor([0.25, 0.5]).log(), dim=-1).exp()
    tensor(0.5000)
    """

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply weights: add their logarithms."""
        return left + right

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Keep the largest."""
        return elements.amax(dim)

    def one(self, like: Tensor) -> Tensor:
        """Return logarithms of one."""
        return torch.zeros_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return logarithms of zero."""
        return torch.full_like(like, -math.inf)


class Counting(Semiring):
    """Natural numbers: how many paths there are. Elements are integers, one where a path may go and zero elsewhere.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import Counting
    >>> Counting().sum(torch.tensor([1, 0, 1]), dim=-1)
    tensor(2)
    """

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply numbers."""
        return left * right

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Add numbers up."""
        return elements.sum(dim)

    def one(self, like: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(like)


class Expectation(Semiring):
    """Log weights with the mean, over the paths they stand for, of something that adds up along a path.

    The first-order expectation semiring holds pairs of a weight and of weight times value. Here the value is kept
    divided by its weight, so that nothing under- or overflows and a product of pairs is their sum. With minus log
    weights as values the mean is the entropy of paths less their log normaliser.

    References
    ----------
    Li, Z., Eisner, J. (2009). First- and second-order expectation semirings with applications to minimum-risk
    training on translation forests. EMNLP, 40-51.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import Expectation
    >>> semiring = Expectation()
    >>> pairs = semiring.elements(torch.tensor([0.25, 0.75]).log(), torch.tensor([10.0, 2.0]))
    >>> semiring.sum(pairs, dim=-1)[1]
    tensor(4.)
    """

    def elements(self, log_weights: Tensor, values: Tensor) -> Tensor:
        """Pair log weights and values of one shape: ``(2, *shape)``."""
        return torch.stack([log_weights, values])

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply weights and add values."""
        return left + right

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Add weights up and average values by weight."""
        log_weights, values = elements
        return torch.stack([LogSum().sum(log_weights, dim), (alternative_shares(log_weights, dim) * values).sum(dim)])

    def one(self, like: Tensor) -> Tensor:
        """Return weights of one with value zero."""
        return torch.zeros_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return weights of zero with value zero."""
        return self.elements(torch.full_like(like[0], -math.inf), torch.zeros_like(like[1]))


def alternative_shares(log_weights: Tensor, dim: int) -> Tensor:
    """Return the share of each alternative in the sum over ``dim``; zero where every one is impossible."""
    impossible = (log_weights.detach() == -math.inf).all(dim, keepdim=True)
    # Shares sum to one to rounding, however large the log weights, unlike exponentials of differences from their sum.
    return log_weights.masked_fill(impossible, 0.0).softmax(dim).masked_fill(impossible, 0.0)


def surprisal(log_weights: Tensor) -> Tensor:
    """Return minus ``log_weights``, but zero where they are minus infinity: no path goes there."""
    return (-log_weights).masked_fill(log_weights == -math.inf, 0.0)


def draw_categories(logits: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw categories, ``(*batch, K)`` -> ``(num_samples, *batch)``; zero where every logit is minus infinity."""
    logits = logits.detach()
    impossible = logits.amax(-1, keepdim=True) == -math.inf
    probabilities = logits.masked_fill(impossible, 0.0).softmax(-1)
    rows = probabilities.reshape(-1, logits.shape[-1])
    drawn = torch.multinomial(rows, num_samples, replacement=True, generator=generator)
    drawn = drawn.masked_fill(impossible.reshape(-1, 1), 0)
    return drawn.mT.reshape(num_samples, *logits.shape[:-1])


# The dynamic programme over the states of a chain, in any semiring.
# The log weights of transitions have shape ``(*batch, n, K, K)``: entry ``[t, i, j]`` is that of going from state ``i``
# to state ``j``, and of the observation there.


def _matrix_product(semiring: Semiring, left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of elements: ``(*batch, I, J)`` and ``(*batch, J, K)`` to ``(*batch, I, K)``."""
    return semiring.sum(semiring.product(left.unsqueeze(-1), right.unsqueeze(-3)), -2)


def identity(semiring: Semiring, like: Tensor) -> Tensor:
    """Return matrices that are neutral in :func:`_matrix_product`, shaped as ``like``, ``(*batch, K, K)``."""
    diagonal = torch.eye(like.shape[-1], dtype=torch.bool, device=like.device)
    return torch.where(diagonal, semiring.one(like), semiring.zero(like))


def chain_product(semiring: Semiring, matrices: Tensor) -> Tensor:
    """Return the product ``(*batch, K, K)`` of ``matrices (*batch, n, K, K)`` of a chain, the identity if ``n = 0``."""
    # Neighbours are multiplied in pairs, in log2(n) rounds of one operation each (Sarkka & Garcia-Fernandez
    # 2021, IEEE Transactions on Automatic Control 66).
    if not matrices.shape[-3]:
        return identity(semiring, matrices.sum(-3))
    while matrices.shape[-3] > 1:
        even = matrices.shape[-3] // 2 * 2
        joined = _matrix_product(semiring, matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :])
        matrices = torch.cat([joined, matrices[..., even:, :, :]], -3)
    return matrices[..., 0, :, :]


def path_prefix_sums(semiring: Semiring, start: Tensor, matrices: Tensor, rescale: bool = False) -> Tensor:
    """Sum over paths to every state, ``(*batch, n + 1, K)``: ``start (*batch, K)``, ``matrices (*batch, n, K, K)``."""
    # Rescaling makes the largest logarithm zero at every step, so that long paths cost no digits where only differences
    # between states of one step matter.
    sums = [_rescaled(start) if rescale else start]
    for matrix in matrices.unbind(-3):
        extended = semiring.sum(semiring.product(sums[-1].unsqueeze(-1), matrix), -2)
        sums.append(_rescaled(extended) if rescale else extended)
    return torch.stack(sums, -2)


def suffix_sums(semiring: Semiring, matrices: Tensor, rescale: bool = False) -> Tensor:
    """Sum over the paths from every state: ``(*batch, n, K, K)`` to ``(*batch, n + 1, K)``."""
    sums = [semiring.one(matrices.sum(-3)[..., 0])]
    for matrix in matrices.flip(-3).unbind(-3):
        extended = semiring.sum(semiring.product(matrix, sums[-1].unsqueeze(-2)), -1)
        sums.append(_rescaled(extended) if rescale else extended)
    return torch.stack(sums[::-1], -2)


def _rescaled(sums: Tensor) -> Tensor:
    """Subtract the largest of the last dimension; where all are minus infinity they stay so."""
    largest = sums.detach().amax(-1, keepdim=True)
    return sums - largest.masked_fill(largest == -math.inf, 0.0)


def predecessors(sums: Tensor, matrices: Tensor) -> Tensor:
    """Return logits of the state before: ``(*batch, n, K, K)``, for each step and each state it leads to, last."""
    return (sums[..., :-1, :].unsqueeze(-1) + matrices).mT


def follow(previous: Tensor, last: Tensor) -> Tensor:
    """Follow states backwards: ``previous (*batch, n, K)`` of each, ``last (*batch)`` -> ``(*batch, n + 1)``."""
    states = [last]
    for step in previous.flip(-2).unbind(-2):
        states.append(step.gather(-1, states[-1].unsqueeze(-1)).squeeze(-1))
    return torch.stack(states[::-1], -1)
