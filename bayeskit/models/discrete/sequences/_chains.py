"""Semirings, and dynamic programming over the states of a chain in a semiring."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

# Semirings: each defines the quantity that the dynamic programme computes.


class Semiring(ABC):
    """Semiring for dynamic programming: product along a path, sum over paths, and neutral elements.

    Elements are tensors. Operations are elementwise and broadcast. Dimensions are negative, because
    :class:`Expectation` stacks two tensors along a new first dimension.
    """

    @abstractmethod
    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the elementwise product: the weight of a path from its parts."""

    @abstractmethod
    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Return the sum over dimension ``dim`` (negative): the weight of alternatives."""

    @abstractmethod
    def one(self, like: Tensor) -> Tensor:
        """Return neutral elements of the product, shaped as ``like``."""

    @abstractmethod
    def zero(self, like: Tensor) -> Tensor:
        """Return neutral elements of the sum, shaped as ``like``."""


class _LogWeights(Semiring):
    """Log weights, which a product adds."""

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Add log weights."""
        return left + right

    def one(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return minus infinity."""
        return torch.full_like(like, -math.inf)


class LogSum(_LogWeights):
    """Log-sum-exp semiring: the log of the total weight of all paths.

    The gradient is finite even if all weights are zero, unlike that of :func:`torch.logsumexp`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import LogSum
    >>> LogSum().sum(torch.tensor([0.25, 0.5]).log(), dim=-1).exp()
    tensor(0.7500)
    """

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Return the log-sum-exp."""
        largest = elements.detach().amax(dim, keepdim=True)
        impossible = largest == -math.inf
        offset = largest.masked_fill(impossible, 0.0)
        total = (elements - offset).exp().sum(dim, keepdim=True)
        # No logarithm of zero is taken: its infinite gradient times zero would be NaN.
        logarithm = total.masked_fill(impossible, 1.0).log() + offset
        return logarithm.masked_fill(impossible, -math.inf).squeeze(dim)


class MaxWeight(_LogWeights):
    """Max-plus semiring: the log weight of the most probable path.

    The path itself is recovered by backtracking.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import MaxWeight
    >>> MaxWeight().sum(torch.tensor([0.25, 0.5]).log(), dim=-1).exp()
    tensor(0.5000)
    """

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Return the maximum."""
        return elements.amax(dim)


class Counting(Semiring):
    """Counting semiring: the number of paths. Elements are integers, 1 for possible and 0 for impossible steps.

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
        """Add numbers."""
        return elements.sum(dim)

    def one(self, like: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(like)

    def zero(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(like)


class Expectation(_LogWeights):
    """Expectation semiring: log weights, and the mean over paths of an additive quantity.

    Elements are pairs of log weight and mean value, instead of the usual weight and weight times value. This avoids
    underflow and overflow, and a product of pairs is their sum. With negative log weights as values, the mean is the
    entropy of the paths minus the log normalizer.

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
        """Stack log weights and values of the same shape: ``(2, *shape)``."""
        return torch.stack([log_weights, values])

    def sum(self, elements: Tensor, dim: int) -> Tensor:
        """Add weights and average values with the weights."""
        log_weights, values = elements
        return torch.stack([LogSum().sum(log_weights, dim), (alternative_shares(log_weights, dim) * values).sum(dim)])

    def zero(self, like: Tensor) -> Tensor:
        """Return weights of zero with value zero."""
        return self.elements(torch.full_like(like[0], -math.inf), torch.zeros_like(like[1]))


def alternative_shares(log_weights: Tensor, dim: int) -> Tensor:
    """Return the normalized weights over ``dim``; zeros if all alternatives are impossible."""
    impossible = (log_weights.detach() == -math.inf).all(dim, keepdim=True)
    # Softmax sums to 1 up to rounding for large log weights, unlike exp(log weight - logsumexp).
    return log_weights.masked_fill(impossible, 0.0).softmax(dim).masked_fill(impossible, 0.0)


def surprisal(log_weights: Tensor) -> Tensor:
    """Return ``-log_weights``, with 0 for impossible steps (log weight ``-inf``)."""
    return (-log_weights).masked_fill(log_weights == -math.inf, 0.0)


def draw_categories(logits: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw categories, ``(*batch, K)`` -> ``(num_samples, *batch)``; 0 if all logits are ``-inf``."""
    logits = logits.detach()
    impossible = logits.amax(-1, keepdim=True) == -math.inf
    probabilities = logits.masked_fill(impossible, 0.0).softmax(-1)
    rows = probabilities.reshape(-1, logits.shape[-1])
    drawn = torch.multinomial(rows, num_samples, replacement=True, generator=generator)
    drawn = drawn.masked_fill(impossible.reshape(-1, 1), 0)
    return drawn.mT.reshape(num_samples, *logits.shape[:-1])


# Dynamic programming over the states of a chain, in any semiring.
# Log weights of transitions have shape ``(*batch, n, K, K)``. Entry ``[t, i, j]`` is the log weight of the transition
# from state ``i`` to state ``j`` and of the observation emitted by ``j``.


def _matrix_product(semiring: Semiring, left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of elements: ``(*batch, I, J)`` and ``(*batch, J, K)`` to ``(*batch, I, K)``."""
    return semiring.sum(semiring.product(left.unsqueeze(-1), right.unsqueeze(-3)), -2)


def identity(semiring: Semiring, like: Tensor) -> Tensor:
    """Return identity matrices of :func:`_matrix_product`, shaped as ``like (*batch, K, K)``."""
    diagonal = torch.eye(like.shape[-1], dtype=torch.bool, device=like.device)
    return torch.where(diagonal, semiring.one(like), semiring.zero(like))


def chain_product(semiring: Semiring, matrices: Tensor) -> Tensor:
    """Return the product ``(*batch, K, K)`` of ``matrices (*batch, n, K, K)``; the identity if ``n = 0``."""
    # Multiply adjacent pairs, in log2(n) rounds of one operation each (Sarkka & Garcia-Fernandez 2021, IEEE
    # Transactions on Automatic Control 66).
    if not matrices.shape[-3]:
        return identity(semiring, matrices.sum(-3))
    while matrices.shape[-3] > 1:
        even = matrices.shape[-3] // 2 * 2
        joined = _matrix_product(semiring, matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :])
        matrices = torch.cat([joined, matrices[..., even:, :, :]], -3)
    return matrices[..., 0, :, :]


def path_prefix_sums(semiring: Semiring, start: Tensor, matrices: Tensor, rescale: bool = False) -> Tensor:
    """Sum over paths to every state, ``(*batch, n + 1, K)``: ``start (*batch, K)``, ``matrices (*batch, n, K, K)``."""
    # Rescaling sets the maximum log weight of each step to zero. This preserves precision for long chains if only
    # differences between states of a step are used.
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
    """Subtract the maximum over the last dimension; rows of minus infinity are unchanged."""
    largest = sums.detach().amax(-1, keepdim=True)
    return sums - largest.masked_fill(largest == -math.inf, 0.0)


def predecessors(sums: Tensor, matrices: Tensor) -> Tensor:
    """Return logits of the previous state (last dimension) for each step and next state, ``(*batch, n, K, K)``."""
    return (sums[..., :-1, :].unsqueeze(-1) + matrices).mT


def follow(previous: Tensor, last: Tensor) -> Tensor:
    """Backtrack from ``last (*batch)`` through ``previous (*batch, n, K)`` -> states ``(*batch, n + 1)``."""
    states = [last]
    for step in previous.flip(-2).unbind(-2):
        states.append(step.gather(-1, states[-1].unsqueeze(-1)).squeeze(-1))
    return torch.stack(states[::-1], -1)
