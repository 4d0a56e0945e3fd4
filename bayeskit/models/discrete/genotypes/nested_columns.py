"""Sum over all conflict-free matrices without listing them: a recursion over sets of cells and of mutations."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

#: The recursion takes about 3^cells 4^mutations multiplications and, with a gradient, keeps 2^cells 4^mutations
#: numbers for each element of a batch: about half a gigabyte each at these limits.
MAX_CELLS, MAX_MUTATIONS = 10, 8

#: Sums below this, relative to the product of each column's largest weight, may have lost terms to underflow.
_LEAST_SUM = 1e-270


def log_sum_over_columns(log_weights: Tensor) -> Tensor:
    r"""Return :math:`\log \sum_S \prod_j w_j(S_j)` over all columns :math:`S` whose sets are nested or disjoint.

    Given the cells ``A`` and mutations ``C``, the lowest cell of ``A`` is either in no set, or there is one largest
    set ``B`` around it. What happens inside ``B`` does not depend on what happens outside, so that the sums over
    ``A`` are convolutions, over the ways to share out ``C``, of those over ``B`` and the rest of ``A``. All terms are
    positive. The derivative by :math:`\log w_j(S)` is the probability that column :math:`j` is :math:`S`.

    Sums are in float64 whatever the weights are in. They are not in logarithms, so that matrix products can form them;
    what this may cost is less than rounding does, down to ``1e-270`` of the product of each column's largest weight.

    Parameters
    ----------
    log_weights : Tensor
        Log weight of each set of cells for each mutation, shape ``(*batch, mutations, 2**cells)``; bit ``i`` of the
        last index stands for cell ``i``.

    Returns
    -------
    Tensor of float64
        Shape ``(*batch)``; minus infinity where the sum is zero or lies below that range.

    References
    ----------
    Bjorklund, A., Husfeldt, T., Kaski, P., Koivisto, M. (2007). Fourier meets Moebius: fast subset convolution.
    STOC, 67-74 (the products; here without their transform, which subtracts).

    Examples
    --------
    >>> import torch
    >>> log_sum_over_columns(torch.zeros(3, 2**4, dtype=torch.float64)).exp()  # the number of 4 x 3 matrices
    tensor(2116.0000, dtype=torch.float64)
    """
    num_mutations, num_sets = log_weights.shape[-2:]
    log_weights = log_weights.double()
    largest = log_weights.detach().amax(-1, keepdim=True)
    # Where no set has any weight, the sum is zero, not undefined.
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = (log_weights - largest).exp()
    pairs = _disjoint_pairs(num_mutations, log_weights.device)
    empty = weights[..., :1, 0] * 0
    inside = torch.cat([empty + 1, empty.expand(*empty.shape[:-1], 2**num_mutations - 1)], dim=-1).unsqueeze(-2)
    capped = inside * 0  # of assignments that use the whole set, at the same rows as ``inside``
    for level in _levels(num_sets.bit_length() - 1):
        sets, without, parts, rest = (index.to(log_weights.device) for index in level)
        uncapped = inside[..., without, :]
        if parts.shape[1]:
            products = capped[..., parts, :].mT @ inside[..., rest, :]
            uncapped = uncapped + _sum_pairs(products.flatten(-2)[..., pairs.place], pairs)
        whole = _products(weights[..., sets].mT)
        using = torch.cat([whole[..., :1] * 0, whole[..., 1:]], dim=-1)
        cap = _sum_pairs(using[..., pairs.first] * uncapped[..., pairs.second], pairs)
        capped = torch.cat([capped, cap], dim=-2)
        inside = torch.cat([inside, uncapped + cap], dim=-2)
    unused = _products(weights[..., 0])  # mutations in no cell
    total = (unused * inside[..., -1, :].flip(-1)).sum(-1)
    return total.masked_fill(total < _LEAST_SUM, 0.0).log() + largest.sum((-2, -1))


class _Level(NamedTuple):
    """Sets of cells of one size, and how each falls apart.

    Attributes
    ----------
    sets : Tensor
        As bits, ``(sets,)``.
    without : Tensor
        Row of each set less its lowest cell, ``(sets,)``.
    parts, rest : Tensor
        Rows of each proper part that holds the lowest cell, and of what it leaves, ``(sets, parts)``.
    """

    sets: Tensor
    without: Tensor
    parts: Tensor
    rest: Tensor


class _Pairs(NamedTuple):
    """Pairs of disjoint sets of mutations, each field of shape ``(pairs,)``.

    Attributes
    ----------
    first, second, union : Tensor
        As bits.
    place : Tensor
        In a flattened table of all pairs.
    """

    first: Tensor
    second: Tensor
    union: Tensor
    place: Tensor


@lru_cache(maxsize=16)
def _levels(num_cells: int) -> list[_Level]:
    by_size: list[list[int]] = [[] for _ in range(num_cells + 1)]
    for cells in range(2**num_cells):
        by_size[cells.bit_count()].append(cells)
    row = {cells: position for position, cells in enumerate(cells for group in by_size for cells in group)}
    levels = []
    for group in by_size[1:]:
        lowest = [cells & -cells for cells in group]
        parts = [_proper_parts(cells, low) for cells, low in zip(group, lowest, strict=True)]
        levels.append(
            _Level(
                torch.tensor(group),
                torch.tensor([row[cells ^ low] for cells, low in zip(group, lowest, strict=True)]),
                torch.tensor([[row[part] for part in each] for each in parts], dtype=torch.int64),
                torch.tensor(
                    [[row[cells ^ part] for part in each] for cells, each in zip(group, parts, strict=True)],
                    dtype=torch.int64,
                ),
            )
        )
    return levels


def _proper_parts(cells: int, low: int) -> list[int]:
    others = cells ^ low
    found, part = [], others
    while part:
        part = (part - 1) & others
        found.append(part | low)
    return found


@lru_cache(maxsize=16)
def _disjoint_pairs(num_mutations: int, device: torch.device) -> _Pairs:
    subsets = torch.arange(2**num_mutations, device=device)
    first, second = ((subsets.unsqueeze(1) & subsets) == 0).nonzero(as_tuple=True)
    return _Pairs(first, second, first | second, first * len(subsets) + second)


def _sum_pairs(terms: Tensor, pairs: _Pairs) -> Tensor:
    """Add up the terms of all divisions in two of each set: ``(*batch, pairs)`` to ``(*batch, 2**mutations)``."""
    size = 2 ** round(math.log(len(pairs.union), 3))
    return terms.new_zeros(*terms.shape[:-1], size).index_add(-1, pairs.union, terms)


def _products(weights: Tensor) -> Tensor:
    """Return the product over each set of mutations: ``(*batch, mutations)`` to ``(*batch, 2**mutations)``."""
    products = weights[..., :1] * 0 + 1
    for j in range(weights.shape[-1]):
        products = torch.cat([products, products * weights[..., j : j + 1]], dim=-1)
    return products
