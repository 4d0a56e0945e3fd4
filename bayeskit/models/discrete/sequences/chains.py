"""The dynamic programme over the states of a chain, in any semiring.

The log weights of transitions have shape ``(*batch, n, K, K)``: entry ``[t, i, j]`` is that of going from state ``i``
to state ``j``, and of what is seen there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.models.discrete.sequences.semirings import Semiring


def matrix_product(semiring: Semiring, left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of elements: ``(*batch, I, J)`` and ``(*batch, J, K)`` to ``(*batch, I, K)``."""
    return semiring.sum(semiring.product(left.unsqueeze(-1), right.unsqueeze(-3)), -2)


def identity(semiring: Semiring, like: Tensor) -> Tensor:
    """Return matrices that are neutral in :func:`matrix_product`, shaped as ``like``, ``(*batch, K, K)``."""
    diagonal = torch.eye(like.shape[-1], dtype=torch.bool, device=like.device)
    return torch.where(diagonal, semiring.one(like), semiring.zero(like))


def chain_product(semiring: Semiring, matrices: Tensor) -> Tensor:
    """Multiply the matrices of a chain, neighbours in pairs: ``log2(n)`` rounds, each of them one operation.

    Parameters
    ----------
    semiring : Semiring
    matrices : Tensor
        ``(*batch, n, K, K)``. Without matrices, the product is the identity.

    Returns
    -------
    Tensor
        ``(*batch, K, K)``.

    References
    ----------
    Sarkka, S., Garcia-Fernandez, A. F. (2021). Temporal parallelization of Bayesian smoothers. IEEE Transactions on
    Automatic Control 66, 299-306.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences.chains import chain_product
    >>> from bayeskit.models.discrete.sequences import Counting
    >>> chain_product(Counting(), torch.tensor([[1, 1], [1, 0]]).expand(10, 2, 2))
    tensor([[89, 55],
            [55, 34]])
    """
    if not matrices.shape[-3]:
        return identity(semiring, matrices.sum(-3))
    while matrices.shape[-3] > 1:
        even = matrices.shape[-3] // 2 * 2
        joined = matrix_product(semiring, matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :])
        matrices = torch.cat([joined, matrices[..., even:, :, :]], -3)
    return matrices[..., 0, :, :]


def prefix_sums(semiring: Semiring, start: Tensor, matrices: Tensor, rescale: bool = False) -> Tensor:
    """Sum over the paths to every state, one step after the other.

    Parameters
    ----------
    semiring : Semiring
    start : Tensor
        Elements of the first states, ``(*batch, K)``.
    matrices : Tensor
        ``(*batch, n, K, K)``.
    rescale : bool, default False
        Whether elements are logarithms, and only differences between states of one step matter: the largest is then
        made zero at every step, so that long paths cost no digits.

    Returns
    -------
    Tensor
        ``(*batch, n + 1, K)``.
    """
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
    """Follow the states backwards from the last one.

    Parameters
    ----------
    previous : Tensor of int
        ``(*batch, n, K)``: the state chosen to come before each.
    last : Tensor of int
        ``(*batch)``.

    Returns
    -------
    Tensor of int
        ``(*batch, n + 1)``.
    """
    states = [last]
    for step in previous.flip(-2).unbind(-2):
        states.append(step.gather(-1, states[-1].unsqueeze(-1)).squeeze(-1))
    return torch.stack(states[::-1], -1)
