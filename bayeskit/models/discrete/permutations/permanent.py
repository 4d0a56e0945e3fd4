"""The permanent of a matrix, by a dynamic programme over sets of columns."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.models.discrete.permutations.assignments import check_log_weights, real_numbers

LARGEST = 20  # 1,048,576 sets of columns and ten times as many terms


def log_permanent(log_weights: Tensor) -> Tensor:
    r"""Return the log permanent of :math:`e^L`, that is :math:`\log \sum_\pi \exp \sum_i L_{i \pi_i}`.

    Rows are added one by one to a table of the sums over all ways to match the first :math:`k` rows with a set of
    :math:`k` columns: :math:`n 2^{n-1}` terms, all positive, where Ryser's formula has alternating signs. The gradient
    is the matrix of marginal probabilities.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, n, n)``, finite or ``-inf``; ``n`` at most 20.

    Returns
    -------
    Tensor
        Shape ``(*batch)``; ``-inf`` where no permutation avoids the pairs that are ``-inf``.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a row or column is ``-inf`` everywhere.
    SettingsError
        If there are more than 20 rows; the message has the number of sets.

    References
    ----------
    Ryser, H. J. (1963). Combinatorial mathematics. Mathematical Association of America.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import log_permanent
    >>> float(log_permanent(torch.zeros(5, 5)).exp().round())
    120.0
    """
    log_weights = real_numbers("log_weights", log_weights)
    check_log_weights("log_weights", log_weights)
    return partial_sums(log_weights)[-1].squeeze(-1)


def partial_sums(log_weights: Tensor) -> list[Tensor]:
    """Return for ``k = 0, ..., n`` the log sums over matchings of the first ``k`` rows with each set of ``k`` columns.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, n, n)``.

    Returns
    -------
    list of Tensor
        Shapes ``(*batch, n choose k)``; the order of the sets is that of :func:`column_sets`.

    Raises
    ------
    SettingsError
        If there are more than 20 rows.
    """
    size = log_weights.shape[-1]
    sums = [log_weights.new_zeros(*log_weights.shape[:-2], 1)]
    for row, (columns, smaller, _) in enumerate(column_sets(size)):
        weights = log_weights[..., row, :].index_select(-1, columns.to(log_weights.device).reshape(-1))
        before = sums[-1].index_select(-1, smaller.to(log_weights.device).reshape(-1))
        terms = (weights + before).unflatten(-1, columns.shape)
        # The gradient of a log of a sum of zeros is NaN, and such a set contributes nothing.
        none = (terms == -math.inf).all(-1)
        sums.append(terms.masked_fill(none.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(none, -math.inf))
    return sums


@functools.lru_cache(maxsize=4)
def column_sets(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for ``k = 1, ..., size`` the sets of ``k`` columns: their columns, what is left without each, and bits.

    Parameters
    ----------
    size : int
        At most 20.

    Returns
    -------
    list of (Tensor, Tensor, Tensor)
        Columns ``(size choose k, k)``; for each the place, among the sets of ``k - 1``, of the set without it, same
        shape; the set as a number with a bit a column, ``(size choose k)``.

    Raises
    ------
    SettingsError
        If ``size`` is larger; the message has the number of sets.
    """
    if size > LARGEST:
        raise SettingsError(
            f"the permanent of {size} rows sums over {2**size:,} sets of columns; at most {LARGEST} rows "
            f"({2**LARGEST:,}) are summed. Approximate beyond: GumbelSinkhorn, RoundedPermutation or "
            "StickBreakingPermutation have no such limit, and the most probable permutation is found for any size."
        )
    numbers = np.arange(2**size, dtype=np.int32)
    counts = np.bitwise_count(numbers)
    place = np.zeros(2**size, dtype=np.int32)
    levels = []
    for count in range(1, size + 1):
        sets = numbers[counts == count]
        members = np.nonzero(sets[:, None] >> np.arange(size, dtype=np.int32) & 1)[1]
        columns = members.astype(np.int32).reshape(len(sets), count)
        smaller = place[sets[:, None] ^ np.left_shift(np.int32(1), columns)]
        place[sets] = np.arange(len(sets), dtype=np.int32)
        levels.append((torch.from_numpy(columns), torch.from_numpy(smaller), torch.from_numpy(sets)))
    return levels
