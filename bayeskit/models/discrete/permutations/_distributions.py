"""Permutations and exact distributions over them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from pyro.distributions import TorchDistribution
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import one_hot

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, whole_number
from bayeskit.models.discrete._inputs import Shape, as_real

# Permutations as vectors and matrices, and projection of a matrix to the nearest permutation.
#
# Row ``i`` of a matrix is matched with the column ``permutation[i]``, in this package.

_MOST_LISTED = 9  # 362,880 permutations


class _Permutation(constraints.Constraint):
    """Vectors that hold each of ``0, ..., n - 1`` once."""

    is_discrete = True
    event_dim = 1

    def check(self, value: Any) -> Tensor:
        """Return whether each vector is a permutation, ``(*batch)``."""
        return (value.sort(-1).values == torch.arange(value.shape[-1], device=value.device)).all(-1)


class _DoublyStochastic(constraints.Constraint):
    """Doubly stochastic matrices (the Birkhoff polytope)."""

    event_dim = 2

    def check(self, value: Any) -> Tensor:
        """Return whether each matrix is doubly stochastic up to rounding, ``(*batch)``."""
        room = 10 * value.shape[-1] * torch.finfo(value.dtype).eps
        sums = ((value.sum(dim) - 1).abs().amax(-1) for dim in (-1, -2))
        return (value >= 0).all((-1, -2)) & (torch.maximum(*sums) <= room)


permutations = _Permutation()
doubly_stochastic = _DoublyStochastic()


def check_square(name: str, matrix: Tensor) -> int:
    """Return the number of rows of square matrices ``(*batch, n, n)``; ShapeError if they are not square or empty."""
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ShapeError(f"{name} has shape {tuple(matrix.shape)}; give square matrices, (*batch, n, n)")
    return int(matrix.shape[-1])


def check_possible(name: str, log_weights: Tensor) -> int:
    """Return the number of rows of log weights ``(*batch, n, n)``; DataError if no permutation is possible."""
    size = check_log_weights(name, log_weights)
    refused = (log_weights == -math.inf).detach().reshape(-1, size, size)
    pattern = torch.zeros_like(refused, dtype=torch.float64).masked_fill(refused, -math.inf)[refused.any(-1).any(-1)]
    crowded = sum(_assigned(one) is None for one in pattern.cpu().numpy())
    if crowded:
        raise DataError(
            f"{crowded} of {len(refused)} matrices of {name} leave no permutation possible: some set of rows has fewer "
            "possible columns than rows; allow more pairs"
        )
    return size


def check_log_weights(name: str, log_weights: Tensor) -> int:
    """Return the number of rows of ``log_weights (*batch, n, n)``; DataError for NaN, ``+inf``, a line of ``-inf``."""
    size = check_square(name, log_weights)
    refused = log_weights.isnan() | (log_weights == math.inf)
    if refused.any():
        where = tuple(refused.nonzero()[0].tolist())
        raise DataError(
            f"{int(refused.sum())} of {refused.numel()} entries of {name} are NaN or +inf, the first at {where}; "
            "log weights must be finite, or -inf for impossible pairs"
        )
    impossible = log_weights == -math.inf
    for dim, line in ((-1, "row"), (-2, "column")):
        empty = impossible.all(dim)
        if empty.any():
            first = empty.nonzero()[0].tolist()
            raise DataError(
                f"{name} is -inf everywhere in {int(empty.sum())} {line}(s), the first is {line} {first[-1]}"
                f"{f' of matrix {tuple(first[:-1])}' if first[:-1] else ''}, so no permutation is possible; "
                f"allow at least one pair in each {line}"
            )
    return size


def permutation_matrix(permutation: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the matrix with ones at ``(i, permutation[i])``.

    Raises ``DataError`` if a vector is not a permutation of ``0, ..., n - 1``.

    Parameters
    ----------
    permutation : Tensor or array of int
        Shape ``(*batch, n)``.
    dtype : torch.dtype, optional
        Default torch's default dtype.

    Returns
    -------
    Tensor
        Shape ``(*batch, n, n)``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import permutation_matrix
    >>> permutation_matrix(torch.tensor([2, 0, 1]), torch.int64).tolist()
    [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    """
    permutation = as_numbers("permutation", permutation)
    if not permutation.dim() or not permutation.shape[-1]:
        found = "empty" if permutation.dim() else "a single number"
        raise ShapeError(f"permutation is {found}; give vectors, (*batch, n)")
    valid = permutations.check(permutation)
    if not valid.all():
        raise DataError(
            f"{int((~valid).sum())} of {valid.numel()} vectors of permutation do not contain each of "
            f"0, ..., {permutation.shape[-1] - 1} exactly once"
        )
    return one_hot(permutation.long(), permutation.shape[-1]).to(dtype or torch.get_default_dtype())


def all_permutations(size: int) -> Tensor:
    """Return all permutations of ``0, ..., size - 1`` in lexicographic order.

    Raises ``SettingsError`` if ``size`` is too large; the message gives the number of permutations.

    Parameters
    ----------
    size : int
        At most 9.

    Returns
    -------
    Tensor of int64
        Shape ``(size!, size)``.

    Examples
    --------
    >>> from bayeskit.models.discrete.permutations import all_permutations
    >>> all_permutations(3)[:2].tolist()
    [[0, 1, 2], [0, 2, 1]]
    """
    size = whole_number("size", size, least=1)
    if size > _MOST_LISTED:
        # The number itself has too many digits to be computed for a large size.
        number = f"{math.factorial(size):,}" if size <= 20 else "more than 10^19"
        raise SettingsError(
            f"there are {number} permutations of {size} elements; enumeration allows at most "
            f"{_MOST_LISTED} elements ({math.factorial(_MOST_LISTED):,}). Use log_permanent for the permanent, which "
            "needs no enumeration."
        )
    return torch.tensor(list(itertools.permutations(range(size))))


def nearest_permutation(matrix: Tensor) -> Tensor:
    r"""Return the permutation :math:`\pi` that maximizes :math:`\sum_i X_{i \pi_i}` (Hungarian algorithm).

    It is the permutation matrix nearest to :math:`X` in Frobenius norm; for log weights it is the mode.

    Parameters
    ----------
    matrix : Tensor or array
        Shape ``(*batch, n, n)``; ``-inf`` where a pair is impossible.

    Returns
    -------
    Tensor of int64
        Shape ``(*batch, n)``, without gradient.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or every permutation includes an impossible pair.

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
    matrix = as_real("matrix", matrix)
    size = check_square("matrix", matrix)
    found = [_assigned(one) for one in matrix.detach().cpu().double().reshape(-1, size, size).numpy()]
    if None in found:
        check_possible("matrix", matrix)
    return torch.tensor(found, dtype=torch.int64, device=matrix.device).reshape(*matrix.shape[:-2], size)


def _assigned(matrix: Any) -> list[int] | None:
    """Return the columns with the largest sum; None if SciPy finds NaN or no permutation."""
    try:
        columns: list[int] = linear_sum_assignment(matrix, maximize=True)[1].tolist()
    except ValueError:
        return None
    return columns


# The permanent of a matrix, by dynamic programming over sets of columns.

LARGEST = 20  # 1,048,576 sets of columns and ten times as many terms


def log_permanent(log_weights: Tensor) -> Tensor:
    r"""Return the log permanent of :math:`e^L`, that is :math:`\log \sum_\pi \exp \sum_i L_{i \pi_i}`.

    Dynamic programming over the sets of columns matched with the first :math:`k` rows has :math:`n 2^{n-1}` positive
    terms, without the alternating signs of Ryser's formula. The gradient is the matrix of marginal probabilities.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, n, n)``, finite or ``-inf``, with ``n <= 20``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``; ``-inf`` if no permutation is possible.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or a complete row or column is ``-inf``.
    SettingsError
        If there are more than 20 rows.

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
    log_weights = as_real("log_weights", log_weights)
    check_log_weights("log_weights", log_weights)
    return _partial_sums(log_weights)[-1].squeeze(-1)


def _partial_sums(log_weights: Tensor) -> list[Tensor]:
    """Return the log sums over matchings of the first ``k`` rows with each set of ``k`` columns, for ``k = 0, ..., n``.

    ``log_weights (*batch, n, n)`` give ``(*batch, n choose k)``, the sets in the order of :func:`column_sets`.
    """
    size = log_weights.shape[-1]
    sums = [log_weights.new_zeros(*log_weights.shape[:-2], 1)]
    for row, (columns, smaller, _) in enumerate(column_sets(size)):
        weights = log_weights[..., row, :].index_select(-1, columns.to(log_weights.device).reshape(-1))
        before = sums[-1].index_select(-1, smaller.to(log_weights.device).reshape(-1))
        terms = (weights + before).unflatten(-1, columns.shape)
        # Mask sets of weight zero, for which the gradient of the logarithm is NaN.
        none = (terms == -math.inf).all(-1)
        sums.append(terms.masked_fill(none.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(none, -math.inf))
    return sums


@functools.lru_cache(maxsize=4)
def column_sets(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for ``k = 1, ..., size <= 20`` the sets of ``k`` columns: their columns, the sets without each, and bits.

    Columns are ``(size choose k, k)``, as are places at ``k - 1`` of the sets without each; bits ``(size choose k)``.
    """
    if size > LARGEST:
        raise SettingsError(
            f"the permanent of {size} rows sums over {2**size:,} sets of columns; the limit is {LARGEST} rows "
            f"({2**LARGEST:,}). For more rows use the approximations GumbelSinkhorn, RoundedPermutation or "
            "StickBreakingPermutation; the most probable permutation is available for any size."
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


# Distributions over permutations with log probability linear in the pairs.


class GibbsPermutation(TorchDistribution):  # type: ignore[misc]
    r"""Permutations with :math:`p(\pi) = \exp(\sum_i L_{i \pi_i}) / \operatorname{perm}(e^L)`.

    Normalizer (the permanent), draws and marginal probabilities are exact, for at most 20 rows. The mode is available
    for any number of rows. Log weights of zero give the uniform distribution. A value is a vector of columns: row ``i``
    is matched with column ``value[i]``.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, n, n)``, finite, or ``-inf`` where a pair is impossible.

    Raises
    ------
    ShapeError
        If a matrix is not square.
    DataError
        If entries are NaN or ``+inf``, or every permutation has probability zero.

    References
    ----------
    Linderman, S. W., Mena, G. E., Cooper, H., Paninski, L., Cunningham, J. P. (2018). Reparameterizing the Birkhoff
    polytope for variational permutation inference. AISTATS.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.permutations import GibbsPermutation
    >>> matching = GibbsPermutation(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> [round(p, 4) for p in matching.log_prob(torch.tensor([[0, 1], [1, 0]])).exp().tolist()]
    [0.9526, 0.0474]
    >>> matching.mode.tolist()
    [0, 1]
    """

    arg_constraints = {"log_weights": constraints.independent(constraints.real, 2)}
    support = permutations
    has_enumerate_support = True

    def __init__(self, log_weights: Tensor, validate_args: bool | None = None) -> None:
        log_weights = as_real("log_weights", log_weights)
        size = check_possible("log_weights", log_weights)
        self.log_weights = log_weights
        self._latest: tuple[int, list[Tensor]] | None = None
        # torch's argument check would reject -inf.
        super().__init__(log_weights.shape[:-2], torch.Size([size]), validate_args=False)
        self._validate_args = TorchDistribution._validate_args if validate_args is None else validate_args

    @classmethod
    def from_weights(cls, weights: Tensor) -> GibbsPermutation:
        """Return the distribution with probability proportional to the product of ``weights`` of the pairs.

        ``weights``: ``(*batch, n, n)``, nonnegative. Raises ``ShapeError`` if a matrix is not square; ``DataError`` if
        entries are negative, or every permutation has weight zero.
        """
        weights = as_real("weights", weights)
        check_square("weights", weights)
        negative = weights < 0
        if negative.any():
            where = tuple(negative.nonzero()[0].tolist())
            raise DataError(
                f"{int(negative.sum())} of {negative.numel()} weights are negative, the first at {where}: "
                f"{float(weights[where]):g}. If they are log weights, use GibbsPermutation(log_weights)."
            )
        return cls(weights.log())

    def expand(self, batch_shape: Shape, _instance: None = None) -> GibbsPermutation:
        """Return the distribution expanded to another batch shape."""
        return GibbsPermutation(
            self.log_weights.expand(*batch_shape, *self.log_weights.shape[-2:]), self._validate_args
        )

    @property
    def _sums(self) -> list[Tensor]:
        weights = self.log_weights
        if weights.requires_grad or weights.is_inference():  # an autograd graph allows one backward pass
            return _partial_sums(weights)
        if self._latest is None or self._latest[0] != weights._version:  # they may have changed in place
            self._latest = weights._version, _partial_sums(weights)
        return self._latest[1]

    @property
    def log_partition(self) -> Tensor:
        """The log permanent, ``(*batch)``.

        Raises ``SettingsError`` if there are more than 20 rows.
        """
        return self._sums[-1].squeeze(-1)

    def log_weight(self, value: Tensor) -> Tensor:
        """Return the unnormalized log probability, for any number of rows: ``(*batch, n)`` to ``(*batch)``.

        Raises ``ShapeError`` if ``value`` has a wrong number of rows.
        """
        if value.shape[-1:] != self.event_shape:
            raise ShapeError(f"values have shape {tuple(value.shape)}; give (*batch, {self.event_shape[0]})")
        shape = torch.broadcast_shapes(value.shape, self.log_weights.shape[:-1])
        weights = self.log_weights.expand(*shape, self.log_weights.shape[-1])
        return weights.gather(-1, value.long().expand(shape).unsqueeze(-1)).squeeze(-1).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of permutations, ``(*batch, n)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        return self.log_weight(value) - self.log_partition

    @property
    def marginals(self) -> Tensor:
        """Marginal probability of each pair, ``(*batch, n, n)``, differentiable."""
        differentiable = self.log_weights.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = self.log_weights if differentiable else self.log_weights.detach().requires_grad_()
            total = (self if differentiable else GibbsPermutation(leaf)).log_partition.sum()
            return torch.autograd.grad(total, leaf, create_graph=differentiable)[0]

    @property
    def mode(self) -> Tensor:
        """Mode, ``(*batch, n)``, by the Hungarian algorithm, for any number of rows."""
        return nearest_permutation(self.log_weights)

    def entropy(self) -> Tensor:
        """Return the entropy, ``(*batch)``."""
        finite = self.log_weights.masked_fill(self.log_weights == -math.inf, 0.0)
        return self.log_partition - (self.marginals * finite).sum((-1, -2))

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw exact samples, ``sample_shape + (*batch, n)``.

        Rows are drawn sequentially from the last to the first, from the sums of the permanent's dynamic programme.
        """
        size, shape = self.event_shape[0], self._extended_shape(sample_shape)
        with torch.no_grad():
            table = self._table().expand(*shape[:-1], -1)
            bits = 1 << torch.arange(size, device=table.device)
            left = torch.full((*shape[:-1], 1), 2**size - 1, dtype=torch.int64, device=table.device)
            drawn = []
            for row in reversed(range(size)):
                scores = self.log_weights[..., row, :] + table.gather(-1, left & ~bits)
                scores = scores.masked_fill(left & bits == 0, -math.inf)
                gumbel = -torch.empty_like(scores).exponential_().log()
                column = (scores + gumbel).argmax(-1, keepdim=True)
                drawn.append(column)
                left = left ^ bits[column]
            return torch.cat(drawn[::-1], -1)

    def _table(self) -> Tensor:
        """Return the partial sums in one table with the sets, as numbers, for its places: ``(*batch, 2^n)``."""
        table = self.log_weights.new_zeros(*self.batch_shape, 2 ** self.event_shape[0])
        for (_, _, sets), sums in zip(column_sets(self.event_shape[0]), self._sums[1:], strict=True):
            table[..., sets.to(table.device)] = sums.detach()
        return table

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all permutations for ``n <= 9``, ``(n!, *batch, n)``; batch dimensions are 1 unless ``expand``.

        Raises ``SettingsError`` if ``n`` is too large; the message gives the number of permutations.
        """
        listed = all_permutations(self.event_shape[0]).to(self.log_weights.device)
        listed = listed.reshape(-1, *(1 for _ in self.batch_shape), self.event_shape[0])
        return listed.expand(-1, *self.batch_shape, -1) if expand else listed

    def __repr__(self) -> str:
        return f"GibbsPermutation(log_weights: {tuple(self.log_weights.shape)})"
