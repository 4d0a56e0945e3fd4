"""The stick-breaking reparameterisation of the Birkhoff polytope, its density, and its limit at temperature zero."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.distributions import Transform, constraints
from torch.nn.functional import logsigmoid

from bayeskit._settings import real_number
from bayeskit.models.discrete.permutations.assignments import check_square, doubly_stochastic


class StickBreakingTransform(Transform):
    r"""Map real matrices one to one onto doubly stochastic matrices with one more row and column.

    Entries are broken off their row and their column one by one: entry :math:`x_{mn}` lies between the least and the
    greatest value that the entries before it leave possible, at the fraction
    :math:`\beta_{mn} = \sigma(\psi_{mn} / \tau)` of the way. Every other one of the four sums

    .. math:: x_{mn}, \quad r = \sum_{j > n} x_{mj}, \quad c = \sum_{i > m} x_{in}, \quad q = \sum_{i > m, j > n} x_{ij}

    follows from it, and the length of the way is :math:`w_{mn} = \min(x, q) + \min(r, c)`. The inverse needs no order:
    :math:`\psi_{mn} = \tau (\log \min(x, q) - \log \min(r, c))`. All sums are kept as logarithms in double precision,
    so that entries may be far below the smallest number of their own. Sums that differ by less than the rounding error
    of a double count as equal: determinants are accurate for :math:`|\psi| / \tau` up to about 60, far beyond they
    can be wrong by several. Entries of one antidiagonal do not depend on each other and are computed together.

    As the temperature falls, the matrices approach permutations. The map is continuous, with kinks where two of the
    four sums are equal.

    Parameters
    ----------
    temperature : float, default 1.0
        :math:`\tau`, positive.
    cache_size : int, default 0

    Raises
    ------
    SettingsError
        If the temperature is not positive.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import StickBreakingTransform
    >>> matrix = StickBreakingTransform()(torch.zeros(2, 2))
    >>> matrix.tolist()
    [[0.5, 0.25, 0.25], [0.25, 0.375, 0.375], [0.25, 0.375, 0.375]]
    >>> bool(StickBreakingTransform().inv(matrix).abs().max() < 1e-6)
    True
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = doubly_stochastic
    bijective = True

    def __init__(self, temperature: float = 1.0, cache_size: int = 0) -> None:
        super().__init__(cache_size=cache_size)
        self.temperature = real_number("temperature", temperature, between=(0.0, math.inf))
        self._latest: tuple[Tensor, Tensor] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StickBreakingTransform) and self.temperature == other.temperature

    __hash__ = Transform.__hash__

    def with_cache(self, cache_size: int = 1) -> StickBreakingTransform:
        """Return the same map with a cache of another size."""
        return self if cache_size == self._cache_size else StickBreakingTransform(self.temperature, cache_size)

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of what a matrix of this shape is mapped to."""
        return torch.Size([*shape[:-2], shape[-2] + 1, shape[-1] + 1])

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of what is mapped to a matrix of this shape."""
        return torch.Size([*shape[:-2], shape[-2] - 1, shape[-1] - 1])

    def _call(self, x: Tensor) -> Tensor:
        log_matrix, log_lengths = break_sticks(x.double() / self.temperature)
        if self._cache_size:
            self._latest = (x, log_lengths)
        return log_matrix.exp().to(x.dtype)

    def _inverse(self, y: Tensor) -> Tensor:
        taken, left = shares(y.double())
        return (self.temperature * (taken.log() - left.log())).to(y.dtype)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log determinant of the derivative of all rows and columns but the last, ``(*batch)``.

        Parameters
        ----------
        x : Tensor
            Shape ``(*batch, n - 1, n - 1)``.
        y : Tensor
            What it is mapped to, ``(*batch, n, n)``.
        """
        if self._latest is not None and self._latest[0] is x:
            # Entries of the matrix may have underflowed, their logarithms have not.
            log_lengths = self._latest[1]
        else:
            log_lengths = torch.add(*shares(y.double())).log()
        logits = x.double() / self.temperature
        slopes = logsigmoid(logits) + logsigmoid(-logits) - math.log(self.temperature)
        return (log_lengths + slopes).sum((-1, -2)).to(x.dtype)


def shares(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is taken and left of each way, ``min(x, q)`` and ``min(r, c)``, ``(*batch, n - 1, n - 1)`` each."""
    check_square("the doubly stochastic matrix", matrix)
    right = _sum_after(matrix, -1)
    below, corner = _sum_after(matrix, -2), _sum_after(right, -2)
    inner = (..., slice(-1), slice(-1))
    return torch.minimum(matrix, corner)[inner], torch.minimum(right, below)[inner]


def _sum_after(matrix: Tensor, dim: int) -> Tensor:
    """Return the sum of all later entries, added up from the end: nothing is subtracted, so nothing cancels."""
    ends = matrix.flip(dim).cumsum(dim).flip(dim)
    return torch.cat([ends.narrow(dim, 1, ends.shape[dim] - 1), torch.zeros_like(ends.narrow(dim, 0, 1))], dim)


def break_sticks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the doubly stochastic matrix of fractions, and the log of the length of each way.

    A cell receives what its row and the rows below can still take from its column on, and what its column and the
    columns after it can still give; it splits both by the same cut. What its row has left goes to the next column,
    what its column has left goes to the next row, and what is left of both goes to both.

    Parameters
    ----------
    logits : Tensor
        Of the fractions, ``(*batch, n - 1, n - 1)``.

    Returns
    -------
    log_matrix : Tensor
        Shape ``(*batch, n, n)``.
    log_lengths : Tensor
        Shape ``(*batch, n - 1, n - 1)``.
    """
    size = check_square("the matrix to map", logits)
    batch = logits.shape[:-2]
    order, place, end = _antidiagonals(size)
    taken, left = (
        part.flatten(-2).index_select(-1, order.to(logits.device)) for part in (logsigmoid(logits), logsigmoid(-logits))
    )
    shares = torch.stack([taken, left])
    one = logits.new_zeros(*batch, 1)
    row = rest_below = logits.new_zeros(*batch, 0)
    rest_right_and_column = logits.new_zeros(2, *batch, 0)
    entries, lengths, last_column, last_row = [], [], [], []
    start = 0
    for diagonal in range(2 * size - 1):
        if diagonal < size:  # another row begins on the left, and another column at the top
            others = one + math.log(size - diagonal)
            row, rest_below = torch.cat([row, one], -1), torch.cat([rest_below, others], -1)
            rest_right_and_column = torch.cat([torch.stack([others, one]), rest_right_and_column], -1)
        else:
            row, rest_below = row[..., 1:], rest_below[..., 1:]
            rest_right_and_column = rest_right_and_column[..., :-1]
        here = slice(start, start + row.shape[-1])
        start = here.stop
        length = torch.minimum(torch.minimum(row, rest_below), rest_right_and_column.amin(0))
        (entry, row), rest_right_and_column = _split(row, rest_right_and_column, shares[..., here] + length)
        rest_below = rest_right_and_column[0]
        entries.append(entry)
        lengths.append(length)
        if diagonal >= size - 1:
            last_column.append(row[..., :1])
            last_row.append(rest_right_and_column[1, ..., -1:])
    flat = torch.cat([*entries, *last_column, *last_row, rest_below], -1)
    log_matrix = flat.index_select(-1, end.to(logits.device)).unflatten(-1, (size + 1, size + 1))
    log_lengths = torch.cat(lengths, -1).index_select(-1, place.to(logits.device)).unflatten(-1, (size, size))
    return log_matrix, log_lengths


def _split(first: Tensor, second: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return logs of ``max(0, first - second) + share`` and ``max(0, second - first) + share``, all given as logs."""
    gap = (first - second).abs()
    equal = gap == 0
    log_difference = torch.maximum(first, second) + (-torch.expm1(-gap.masked_fill(equal, 1.0))).log()
    more = torch.logaddexp(log_difference.masked_fill(equal, -math.inf), share)
    greater = first > second
    return torch.where(greater, more, share), torch.where(greater, share, more)


@functools.lru_cache(maxsize=32)
def _antidiagonals(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cells by antidiagonal, the place of each cell in that order, and the same with the last row and column."""
    cells = torch.arange(size)
    row, column = cells.repeat_interleave(size), cells.repeat(size)
    order = ((row + column) * size + row).argsort()
    place = order.argsort()
    inner = size * size
    end = torch.empty(size + 1, size + 1, dtype=torch.int64)
    end[:size, :size] = place.reshape(size, size)
    end[:size, size] = inner + cells
    end[size, :size] = inner + size + cells
    end[size, size] = inner + 2 * size
    return order, place, end.flatten()
