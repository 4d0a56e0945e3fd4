"""Which binary matrices fit a perfect phylogeny: the three-gametes rule, how many do, and all of them."""

from __future__ import annotations

from fractions import Fraction
from math import comb, factorial

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError

#: Of more cells or mutations, lists refuse without an exact number.
_MAX_COUNTED = 30


def conflicting_pairs(genotypes: Tensor) -> Tensor:
    """Return which pairs of mutations no tree can explain together.

    Two mutations conflict when some cell has only the first, some only the second, and some both: each arose once and
    was never lost, in descendants of an ancestor without mutations, so that one of them would have to lie within the
    other (the three-gametes rule; without a known ancestor it would be four).

    Parameters
    ----------
    genotypes : Tensor
        Zeros and ones, or bool, shape ``(*batch, cells, mutations)``.

    Returns
    -------
    Tensor of bool
        Shape ``(*batch, mutations, mutations)``, symmetric, with a diagonal of False.

    Raises
    ------
    ShapeError
        If ``genotypes`` is not at least a matrix.
    DataError
        If an entry is neither zero nor one.

    References
    ----------
    Gusfield, D. (1991). Efficient algorithms for inferring evolutionary trees. Networks 21, 19-28.

    Examples
    --------
    >>> import torch
    >>> conflicting_pairs(torch.tensor([[1, 0], [0, 1], [1, 1]])).tolist()
    [[False, True], [True, False]]
    """
    present = check_genotypes(genotypes).float()
    both = present.mT @ present > 0
    only_first = present.mT @ (1 - present) > 0
    return both & only_first & only_first.mT


def has_conflict(genotypes: Tensor) -> Tensor:
    """Return whether some pair of mutations conflicts, so that no perfect phylogeny explains the matrix.

    Parameters
    ----------
    genotypes : Tensor
        Zeros and ones, or bool, shape ``(*batch, cells, mutations)``.

    Returns
    -------
    Tensor of bool
        Shape ``(*batch)``.

    Raises
    ------
    ShapeError, DataError
        As :func:`conflicting_pairs`.

    Examples
    --------
    >>> import torch
    >>> has_conflict(torch.tensor([[[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 0], [1, 1]]]))
    tensor([ True, False])
    """
    return conflicting_pairs(genotypes).flatten(-2).any(-1)


def num_conflict_free(num_cells: int, num_mutations: int) -> int:
    r"""Return how many binary matrices are free of conflicts.

    The cells of any two mutations are nested or disjoint. With :math:`F_{n,k}` the number of families of :math:`k`
    different sets, not empty, that are so on :math:`n` cells, there are
    :math:`\sum_k F_{n,k} \, k! \, S(m + 1, k + 1)` matrices with :math:`m` mutations, :math:`S` being Stirling's
    numbers of the second kind. The families are counted by the generating function
    :math:`\exp(x + T)`, where :math:`T = y (\exp(x + T) - 1 - T)` counts those with the set of all cells.

    Parameters
    ----------
    num_cells, num_mutations : int
        At least one.

    Raises
    ------
    SettingsError
        If there are no cells or no mutations.

    Examples
    --------
    >>> [num_conflict_free(*shape) for shape in [(3, 2), (3, 3), (4, 2), (4, 3), (5, 2)]]
    [58, 398, 196, 2116, 634]
    >>> num_conflict_free(8, 8)
    15411841765756
    """
    num_cells = whole_number("num_cells", num_cells, least=1)
    num_mutations = whole_number("num_mutations", num_mutations, least=1)
    families = _nested_families(num_cells, num_mutations)
    return sum(
        count * factorial(k) * _stirling(num_mutations + 1, k + 1)
        for k, count in enumerate(families)
        if k <= num_mutations
    )


def conflict_free_matrices(num_cells: int, num_mutations: int, limit: int = 2**18) -> Tensor:
    """Return all binary matrices without a conflict.

    Parameters
    ----------
    num_cells, num_mutations : int
        At least one.
    limit : int, default 262144
        The most matrices to list.

    Returns
    -------
    Tensor of bool
        Shape ``(count, cells, mutations)``.

    Raises
    ------
    SettingsError
        If there are more than ``limit``; the message has their number, or a bound where that would take long.

    Examples
    --------
    >>> conflict_free_matrices(4, 3).shape
    torch.Size([2116, 4, 3])
    """
    num_cells = whole_number("num_cells", num_cells, least=1)
    num_mutations = whole_number("num_mutations", num_mutations, least=1)
    longer = max(num_cells, num_mutations)  # ones in a single row or column never conflict
    many = longer > _MAX_COUNTED
    count = 2**longer if many else num_conflict_free(num_cells, num_mutations)
    if count > limit:
        number = f"more than 2**{longer}" if many else f"{count}"
        raise SettingsError(
            f"there are {number} conflict-free matrices of {num_cells} cells and {num_mutations} mutations, and the "
            f"limit is {limit}; raise it if memory allows, or use what needs no list: NoisyGenotypes.log_evidence and "
            "sample for at most 10 cells and 8 mutations, gibbs_sweep for at most 12 mutations"
        )
    subsets = torch.arange(2**num_cells)
    columns = subsets.unsqueeze(1)
    for _ in range(num_mutations - 1):
        before = columns.unsqueeze(1)
        shared = before & subsets.unsqueeze(-1)
        nested = (shared == 0) | (shared == before) | (shared == subsets.unsqueeze(-1))
        row, subset = nested.all(-1).nonzero(as_tuple=True)
        columns = torch.cat([columns[row], subset.unsqueeze(1)], dim=1)
    return (columns.unsqueeze(1) >> torch.arange(num_cells).unsqueeze(1)) & 1 == 1


def check_genotypes(genotypes: Tensor) -> Tensor:
    """Return ``genotypes`` as bool, or say what is wrong with them."""
    if genotypes.dim() < 2:
        raise ShapeError(f"genotypes have shape {tuple(genotypes.shape)}; give (*batch, cells, mutations)")
    present = genotypes == 1
    if not bool((present | (genotypes == 0)).all()):
        raise DataError("genotypes hold entries other than 0 and 1; only an observed matrix may have missing entries")
    return present


def _nested_families(num_cells: int, most: int) -> list[int]:
    """Return the numbers of nested families of 0, 1, ... sets on ``num_cells`` cells."""
    # Coefficients of x^n y^k of exponential generating functions, solved order by order: that of x^n in
    # exp(x + T) without T's own comes from lower orders, and T y^-1 + T is that plus T.
    most = min(most, 2 * num_cells - 1)
    whole = [[Fraction(0)] * (most + 1)]
    anything = [[Fraction(1)] + [Fraction(0)] * most]
    for n in range(1, num_cells + 1):
        # n [x^n] exp(u) = sum_i i [x^i] u [x^(n-i)] exp(u); the term i = n lacks what is now sought.
        below = [Fraction(0)] * (most + 1)
        for i in range(1, n):
            below = _add(below, _multiply(_with_uncovered(whole[i], i), anything[n - i]), Fraction(i, n))
        if n == 1:
            below[0] += 1
        whole.append([Fraction(0), *below[:-1]])
        anything.append(_add(below, whole[n], Fraction(1)))
    return [int(value * factorial(num_cells)) for value in anything[num_cells]]


def _with_uncovered(coefficients: list[Fraction], order: int) -> list[Fraction]:
    return [coefficients[0] + (1 if order == 1 else 0), *coefficients[1:]]


def _multiply(left: list[Fraction], right: list[Fraction]) -> list[Fraction]:
    return [sum((left[i] * right[k - i] for i in range(k + 1)), Fraction(0)) for k in range(len(left))]


def _add(left: list[Fraction], right: list[Fraction], factor: Fraction) -> list[Fraction]:
    return [x + factor * y for x, y in zip(left, right, strict=True)]


def _stirling(n: int, k: int) -> int:
    """Return the number of partitions of ``n`` things into ``k`` parts."""
    return sum((-1) ** (k - j) * comb(k, j) * j**n for j in range(k + 1)) // factorial(k)
