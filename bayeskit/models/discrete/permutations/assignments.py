"""Permutations as vectors of columns and as matrices, and the one nearest to a matrix.

Row ``i`` of a matrix is matched with the column ``permutation[i]``, here and in the whole folder.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import one_hot

from bayeskit._inputs import as_numbers
from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError

MOST_LISTED = 9  # 362,880 permutations


class _Permutation(constraints.Constraint):
    """Vectors that hold each of ``0, ..., n - 1`` once."""

    is_discrete = True
    event_dim = 1

    def check(self, value: Any) -> Tensor:
        """Return whether each vector is a permutation, ``(*batch)``."""
        return (value.sort(-1).values == torch.arange(value.shape[-1], device=value.device)).all(-1)


class _DoublyStochastic(constraints.Constraint):
    """Square matrices without negative entries whose rows and columns sum to one: the Birkhoff polytope."""

    event_dim = 2

    def check(self, value: Any) -> Tensor:
        """Return whether each matrix is doubly stochastic up to rounding, ``(*batch)``."""
        room = 10 * value.shape[-1] * torch.finfo(value.dtype).eps
        sums = ((value.sum(dim) - 1).abs().amax(-1) for dim in (-1, -2))
        return (value >= 0).all((-1, -2)) & (torch.maximum(*sums) <= room)


permutations = _Permutation()
doubly_stochastic = _DoublyStochastic()


def check_square(name: str, matrix: Tensor) -> int:
    """Return the number of rows of a square matrix, or of a batch of them.

    Raises
    ------
    ShapeError
        If the last two dimensions differ, or are empty.
    """
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ShapeError(f"{name} has shape {tuple(matrix.shape)}; give square matrices, (*batch, n, n)")
    return int(matrix.shape[-1])


def real_numbers(name: str, value: Any) -> Tensor:
    """Return data of any library as a tensor of real numbers; integers and bools take torch's default dtype.

    Raises
    ------
    DataError
        If they are no numbers.
    """
    numbers = as_numbers(name, value)
    return numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())


def check_possible(name: str, log_weights: Tensor) -> int:
    """Return the number of rows of log weights, of which each matrix leaves some permutation possible.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or no permutation avoids those that are ``-inf``.
    """
    size = check_log_weights(name, log_weights)
    refused = (log_weights == -math.inf).detach().reshape(-1, size, size)
    pattern = torch.zeros_like(refused, dtype=torch.float64).masked_fill(refused, -math.inf)[refused.any(-1).any(-1)]
    crowded = sum(_assigned(one) is None for one in pattern.cpu().numpy())
    if crowded:
        raise DataError(
            f"{crowded} of {len(refused)} matrices of {name} leave no permutation possible: some rows have, together, "
            "fewer columns than there are of them; allow more pairs"
        )
    return size


def check_log_weights(name: str, log_weights: Tensor) -> int:
    """Return the number of rows of log weights, which are finite or ``-inf`` with some finite ones in every row.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a whole row or column is ``-inf``.
    """
    size = check_square(name, log_weights)
    refused = log_weights.isnan() | (log_weights == math.inf)
    if refused.any():
        where = tuple(refused.nonzero()[0].tolist())
        raise DataError(
            f"{int(refused.sum())} of {refused.numel()} entries of {name} are NaN or +inf, the first at {where}; "
            "log weights are finite, or -inf where a pair is impossible"
        )
    impossible = log_weights == -math.inf
    for dim, line in ((-1, "row"), (-2, "column")):
        empty = impossible.all(dim)
        if empty.any():
            first = empty.nonzero()[0].tolist()
            raise DataError(
                f"{name} is -inf everywhere in {int(empty.sum())} {line}(s), the first is {line} {first[-1]}"
                f"{f' of matrix {tuple(first[:-1])}' if first[:-1] else ''}, so that no permutation is possible; "
                "give each a pair that it may have"
            )
    return size


def permutation_matrix(permutation: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the matrix with ones at ``(i, permutation[i])``.

    Parameters
    ----------
    permutation : Tensor or array of int
        Shape ``(*batch, n)``.
    dtype : torch.dtype, optional
        By default torch's default.

    Returns
    -------
    Tensor
        Shape ``(*batch, n, n)``.

    Raises
    ------
    DataError
        If vectors do not have each of ``0, ..., n - 1`` once.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import permutation_matrix
    >>> permutation_matrix(torch.tensor([2, 0, 1]), torch.int64).tolist()
    [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    """
    permutation = as_numbers("permutation", permutation)
    if not permutation.dim():
        raise ShapeError("permutation is a single number; give vectors, (*batch, n)")
    valid = permutations.check(permutation)
    if not valid.all():
        raise DataError(
            f"{int((~valid).sum())} of {valid.numel()} vectors of permutation do not have each of "
            f"0, ..., {permutation.shape[-1] - 1} once"
        )
    return one_hot(permutation.long(), permutation.shape[-1]).to(dtype or torch.get_default_dtype())


def all_permutations(size: int) -> Tensor:
    """List the permutations of ``0, ..., size - 1`` in lexicographic order.

    Parameters
    ----------
    size : int
        At most nine.

    Returns
    -------
    Tensor of int64
        Shape ``(size!, size)``.

    Raises
    ------
    SettingsError
        If there are too many to list; the message has their number.

    Examples
    --------
    >>> from bayeskit.models.discrete.permutations import all_permutations
    >>> all_permutations(3)[:2].tolist()
    [[0, 1, 2], [0, 2, 1]]
    """
    size = whole_number("size", size, least=1)
    if size > MOST_LISTED:
        raise SettingsError(
            f"there are {math.factorial(size):,} permutations of {size}; at most {MOST_LISTED} are listed "
            f"({math.factorial(MOST_LISTED):,}). The permanent of a matrix needs no list: see log_permanent."
        )
    return torch.tensor(list(itertools.permutations(range(size))))


def nearest_permutation(matrix: Tensor) -> Tensor:
    r"""Return the permutation :math:`\pi` of greatest :math:`\sum_i X_{i \pi_i}`, by the Hungarian algorithm.

    Its matrix is the one nearest to :math:`X` in the Frobenius norm; of log weights it is the most probable.

    Parameters
    ----------
    matrix : Tensor or array
        Shape ``(*batch, n, n)``, without NaN; ``-inf`` where a pair is impossible.

    Returns
    -------
    Tensor of int64
        Shape ``(*batch, n)``, without gradient.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or no permutation avoids the entries that are ``-inf``.

    References
    ----------
    Kuhn, H. W. (1955). The Hungarian method for the assignment problem. Naval Research Logistics 2, 83-97.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import nearest_permutation
    >>> nearest_permutation(torch.tensor([[0.6, 0.5], [0.5, 0.1]])).tolist()
    [1, 0]
    """
    matrix = real_numbers("matrix", matrix)
    size = check_square("matrix", matrix)
    found = [_assigned(one) for one in matrix.detach().cpu().double().reshape(-1, size, size).numpy()]
    if None in found:
        check_possible("matrix", matrix)
    return torch.tensor(found, dtype=torch.int64, device=matrix.device).reshape(*matrix.shape[:-2], size)


def _assigned(matrix: Any) -> list[int] | None:
    """Return the columns of greatest sum, or None where SciPy finds NaN or no permutation."""
    try:
        columns: list[int] = linear_sum_assignment(matrix, maximize=True)[1].tolist()
    except ValueError:
        return None
    return columns
