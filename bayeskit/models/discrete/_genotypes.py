"""Noisy binary genotype matrices of subclonal evolution under a perfect phylogeny."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import VERMILION, as_numbers, new_generator, one_thread, support_of, whole_number
from bayeskit.models.discrete._inputs import as_real, digits_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Binary matrices compatible with a perfect phylogeny: three-gamete test, counting, enumeration.

#: Above this number of cells or mutations, error messages give a bound instead of the number of matrices.
_MAX_COUNTED = 30


def conflicting_pairs(genotypes: Tensor) -> Tensor:
    """Return the pairs of mutations that are incompatible with any tree (three-gamete test).

    Two mutations conflict if some cell has only the first, some cell only the second, and some cell both. The
    assumptions are that each mutation arises once and is never lost, and that the ancestor has no mutations.

    Parameters
    ----------
    genotypes : Tensor
        Entries 0 and 1, or bool, shape ``(*batch, cells, mutations)``.

    Returns
    -------
    Tensor of bool
        Shape ``(*batch, mutations, mutations)``, symmetric, diagonal False.

    Raises
    ------
    ShapeError
        If ``genotypes`` has fewer than two dimensions.
    DataError
        If an entry is not 0 or 1.

    References
    ----------
    Gusfield, D. (1991). Efficient algorithms for inferring evolutionary trees. Networks 21, 19-28.

    Examples
    --------
    >>> import torch
    >>> conflicting_pairs(torch.tensor([[1, 0], [0, 1], [1, 1]])).tolist()
    [[False, True], [True, False]]
    """
    present = _check_genotypes(genotypes).float()
    both = present.mT @ present > 0
    only_first = present.mT @ (1 - present) > 0
    return both & only_first & only_first.mT


def has_conflict(genotypes: Tensor) -> Tensor:
    """Return whether a pair of mutations conflicts, i.e. no perfect phylogeny exists.

    Argument and errors as in :func:`conflicting_pairs`; the result is bool, ``(*batch)``.

    Examples
    --------
    >>> import torch
    >>> has_conflict(torch.tensor([[[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 0], [1, 1]]]))
    tensor([ True, False])
    """
    return conflicting_pairs(genotypes).flatten(-2).any(-1)


def num_conflict_free(num_cells: int, num_mutations: int) -> int:
    r"""Return the number of conflict-free binary matrices.

    In a conflict-free matrix the cell sets of two mutations are nested or disjoint. Let :math:`F_{n,k}` be the number
    of such families of :math:`k` distinct nonempty sets on :math:`n` cells and :math:`S` the Stirling numbers of the
    second kind. The number of matrices with :math:`m` mutations is
    :math:`\sum_k F_{n,k} \, k! \, S(m + 1, k + 1)`. The generating function of the families is
    :math:`\exp(x + T)`, where :math:`T = y (\exp(x + T) - 1 - T)` counts families that include the set of all cells.

    Raises ``SettingsError`` if there are no cells or no mutations.

    Parameters
    ----------
    num_cells, num_mutations : int
        At least 1.

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
    """Return all conflict-free binary matrices.

    Raises ``SettingsError`` if there are more than ``limit``; the message gives the number or a bound.

    Parameters
    ----------
    num_cells, num_mutations : int
        At least 1.
    limit : int, default 262144
        Maximum number of matrices.

    Returns
    -------
    Tensor of bool
        Shape ``(count, cells, mutations)``.

    Examples
    --------
    >>> conflict_free_matrices(4, 3).shape
    torch.Size([2116, 4, 3])
    """
    num_cells = whole_number("num_cells", num_cells, least=1)
    num_mutations = whole_number("num_mutations", num_mutations, least=1)
    longer = max(num_cells, num_mutations)  # matrices with ones in a single row or column never conflict
    many = longer > _MAX_COUNTED
    count = 2**longer if many else num_conflict_free(num_cells, num_mutations)
    if count > limit:
        number = f"more than 2**{longer}" if many else f"{count}"
        raise SettingsError(
            f"there are {number} conflict-free matrices of {num_cells} cells and {num_mutations} mutations, and the "
            f"limit is {limit}; raise it if memory allows, or use methods without enumeration: "
            "NoisyGenotypes.log_evidence and sample for at most 10 cells and 8 mutations, gibbs_sweep for at most 12 "
            "mutations"
        )
    subsets = torch.arange(2**num_cells)
    columns = subsets.unsqueeze(1)
    for _ in range(num_mutations - 1):
        before = columns.unsqueeze(1)
        shared = before & subsets.unsqueeze(-1)
        nested = (shared == 0) | (shared == before) | (shared == subsets.unsqueeze(-1))
        row, subset = nested.all(-1).nonzero(as_tuple=True)
        columns = torch.cat([columns[row], subset.unsqueeze(1)], dim=1)
    return digits_of(columns, 2, num_cells).mT.contiguous() == 1


def _check_genotypes(genotypes: Tensor) -> Tensor:
    """Return ``genotypes`` as bool; ShapeError or DataError if they are invalid."""
    if genotypes.dim() < 2:
        raise ShapeError(f"genotypes have shape {tuple(genotypes.shape)}; give (*batch, cells, mutations)")
    present = genotypes == 1
    if not bool((present | (genotypes == 0)).all()):
        raise DataError("genotypes hold entries other than 0 and 1; only an observed matrix may have missing entries")
    return present


def _nested_families(num_cells: int, most: int) -> list[int]:
    """Return the numbers of nested families of 0, 1, ... sets on ``num_cells`` cells."""
    # Solve for the coefficients of x^n y^k of the exponential generating functions order by order: the coefficient of
    # x^n in exp(x + T), without the contribution of T at order n, depends only on lower orders.
    most = min(most, 2 * num_cells - 1)
    one = np.array([Fraction(1)] + [Fraction(0)] * most)
    whole, anything = [0 * one], [one]
    for n in range(1, num_cells + 1):
        # n [x^n] exp(u) = sum_i i [x^i] u [x^(n-i)] exp(u); the term i = n omits the unknown coefficient.
        below = one if n == 1 else 0 * one
        for i in range(1, n):
            own = whole[i] + one if i == 1 else whole[i]
            below = below + Fraction(i, n) * np.convolve(own, anything[n - i])[: most + 1]
        whole.append(np.array([Fraction(0), *below[:-1]]))
        anything.append(below + whole[n])
    return [int(value * factorial(num_cells)) for value in anything[num_cells]]


def _stirling(n: int, k: int) -> int:
    """Return the Stirling number of the second kind: partitions of ``n`` elements into ``k`` parts."""
    return sum((-1) ** (k - j) * comb(k, j) * j**n for j in range(k + 1)) // factorial(k)


# Sum over all conflict-free matrices by recursion over sets of cells and mutations.

#: The recursion needs about 3^cells 4^mutations multiplications and, with a gradient, stores 2^cells 4^mutations
#: numbers per batch element: about half a gigabyte at these limits.
_MAX_CELLS, _MAX_MUTATIONS = 10, 8

#: Minimum sum, relative to the product of the columns' largest weights, without loss of terms by underflow.
_LEAST_SUM = 1e-270


def log_sum_over_columns(log_weights: Tensor) -> Tensor:
    r"""Return :math:`\log \sum_S \prod_j w_j(S_j)` over all conflict-free matrices with column sets :math:`S_j`.

    For cells ``A`` and mutations ``C``, the lowest cell of ``A`` is in no set or in a unique largest set ``B``. The sum
    over ``A`` is a convolution, over the partitions of ``C``, of the sums over ``B`` and over the rest of ``A``. All
    terms are positive. The derivative with respect to :math:`\log w_j(S)` is the probability that column :math:`j` is
    :math:`S`.

    Sums are computed in float64, on the linear scale to use matrix products. Underflow errors are below rounding errors
    for sums down to ``1e-270`` of the product of the columns' largest weights.

    Parameters
    ----------
    log_weights : Tensor
        Log weight of each cell set for each mutation, shape ``(*batch, mutations, 2**cells)``. Bit ``i`` of the last
        index is cell ``i``.

    Returns
    -------
    Tensor of float64
        Shape ``(*batch)``; ``-inf`` if the sum is zero or below this range.

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
    # If all weights are zero, the sum is zero (not NaN).
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
    """Sets of cells of one size, as bits, and the partitions of each set into two parts."""

    sets: Tensor  # (sets,), as bits
    without: Tensor  # (sets,): row of each set without its lowest cell
    parts: Tensor  # (sets, parts): rows of each proper subset with the lowest cell
    rest: Tensor  # (sets, parts): rows of the complements of these subsets in the set


class _Pairs(NamedTuple):
    """Pairs of disjoint sets of mutations, as bits, each field of shape ``(pairs,)``."""

    first: Tensor
    second: Tensor
    union: Tensor
    place: Tensor  # index in a flattened table of all pairs


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
    """Sum the terms over all partitions of each set into two: ``(*batch, pairs)`` to ``(*batch, 2**mutations)``."""
    size = 2 ** round(math.log(len(pairs.union), 3))
    return terms.new_zeros(*terms.shape[:-1], size).index_add(-1, pairs.union, terms)


def _products(weights: Tensor) -> Tensor:
    """Return the product over each set of mutations: ``(*batch, mutations)`` to ``(*batch, 2**mutations)``."""
    products = weights[..., :1] * 0 + 1
    for j in range(weights.shape[-1]):
        products = torch.cat([products, products * weights[..., j : j + 1]], dim=-1)
    return products


# Log likelihood of a genotype matrix: entries, columns, and matrix.

#: A Gibbs sweep enumerates all 2^mutations genotypes of a cell.
_MAX_SWEEP_MUTATIONS = 12


def _check_observed(observed: Tensor) -> Tensor:
    """Return an observed matrix as floating-point numbers; ShapeError or DataError if it is invalid."""
    observed = as_real("observed", observed)
    if observed.dim() != 2 or not observed.numel():
        raise ShapeError(f"observed has shape {tuple(observed.shape)}; give (cells, mutations), at least one of each")
    wrong = ~((observed == 0) | (observed == 1) | observed.isnan())
    if bool(wrong.any()):
        cell, mutation = wrong.nonzero()[0].tolist()
        raise DataError(
            f"the observed entry of cell {cell} and mutation {mutation} is {observed[cell, mutation]:g}; "
            "give 0, 1, or NaN for a missing entry"
        )
    return observed


def _check_size(num_cells: int, num_mutations: int) -> None:
    """Raise SettingsError if a matrix is too large for the recursion over sets."""
    if num_cells > _MAX_CELLS or num_mutations > _MAX_MUTATIONS:
        remedy = "use NoisyGenotypes.gibbs_sweep, or " if num_mutations <= _MAX_SWEEP_MUTATIONS else "use "
        raise SettingsError(
            f"the exact sum takes at most {_MAX_CELLS} cells and {_MAX_MUTATIONS} mutations, but there are {num_cells} "
            f"and {num_mutations}; {remedy}fewer cells or mutations"
        )


def subset_members(size: int, like: Tensor) -> Tensor:
    """Return indicators of the items of each subset, dtype of ``like``: ``(2**size, size)``."""
    return digits_of(2**size, 2, size, like.device).to(like)


def _entry_terms(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of each entry if it is 0 and if it is 1, ``(*batch, cells, mutations)``, float64."""
    positive, negative = (rate.double()[..., None, None] for rate in (false_positive, false_negative))
    read, missing = observed == 1, observed.isnan()
    # The gradient with respect to a rate of exactly zero is NaN.
    absent = torch.where(read, positive.log(), (-positive).log1p())
    present = torch.where(read, (-negative).log1p(), negative.log())
    return absent.masked_fill(missing, 0.0), present.masked_fill(missing, 0.0)


def _column_terms(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> Tensor:
    """Return the log probability of each observed column for each set of cells, ``(*batch, mutations, 2**cells)``."""
    absent, present = (x.mT.unsqueeze(-2) for x in _entry_terms(observed, false_positive, false_negative))
    # With a rate of zero a term is -inf, and its product with an indicator of 0 would be NaN.
    return torch.where(subset_members(observed.shape[0], observed) == 1, present, absent).sum(-1)


def _log_evidence_given_rates(observed: Tensor, false_positive: Tensor, false_negative: Tensor) -> Tensor:
    """Return the log probability of an observed matrix, ``(*batch)`` of the rates; only its size is validated."""
    _check_size(*observed.shape)
    total = log_sum_over_columns(_column_terms(observed, false_positive, false_negative))
    return (total - math.log(num_conflict_free(*observed.shape))).to(false_positive.dtype)


def _column_probabilities(terms: Tensor) -> Tensor:
    """Return the posterior of each column, ``(*batch, mutations, 2**cells)``, from log probabilities of that shape."""
    with torch.enable_grad():
        terms = terms.detach().requires_grad_()
        total = log_sum_over_columns(terms)
        _check_range(total.detach(), terms.detach())
        _check_possible(total.detach())
        (probabilities,) = torch.autograd.grad(total.sum(), terms)
    return probabilities


def _check_range(log_sum: Tensor, terms: Tensor) -> None:
    """Raise SettingsError if the sum over columns underflows although some conflict-free matrix is possible."""
    lost = log_sum == -torch.inf
    if not bool(lost.any()):
        return
    number = log_sum_over_columns(torch.zeros_like(terms).masked_fill(terms == -torch.inf, -torch.inf))
    if bool((lost & (number > -torch.inf)).any()):
        raise SettingsError(
            "at these small rates the probability of the observed matrix is below the range of floating-point numbers, "
            "although not zero; raise the rates"
        )


def _check_possible(log_evidence: Tensor) -> None:
    """Raise DataError if the observed matrix has probability zero."""
    if bool((log_evidence == -torch.inf).any()):
        raise DataError(
            "the observed matrix has probability zero under every conflict-free matrix at these rates; "
            "allow for errors with rates above zero"
        )


# Tree of a conflict-free genotype matrix.


class MutationTree(NamedTuple):
    """Tree of clones with the mutations acquired on each branch.

    Node 0 is the ancestor without mutations. Parents precede their children.

    Attributes
    ----------
    parents : tuple of int
        Parent of each node; -1 for the ancestor.
    mutations : tuple of tuple of int
        Mutations on the branch above each node; their order on the branch is not identified.
    cells : tuple of tuple of int
        Cells with exactly the mutations on the path from the root to the node.
    absent : tuple of int
        Mutations without cells, which are not on the tree.
    """

    parents: tuple[int, ...]
    mutations: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, ...], ...]
    absent: tuple[int, ...]

    @classmethod
    def from_genotypes(cls, genotypes: Tensor) -> MutationTree:
        """Build the tree of a conflict-free genotype matrix.

        ``genotypes``: entries 0 and 1, shape ``(cells, mutations)``. Raises ``ShapeError`` if ``genotypes`` is not
        two-dimensional; ``DataError`` if ``genotypes`` has a conflict.

        Examples
        --------
        >>> import torch
        >>> tree = MutationTree.from_genotypes(torch.tensor([[1, 0], [1, 1], [1, 1]]))
        >>> tree.parents, tree.mutations, tree.cells
        ((-1, 0, 1), ((), (0,), (1,)), ((), (0,), (1, 2)))
        """
        if genotypes.dim() != 2:
            raise ShapeError(f"genotypes have shape {tuple(genotypes.shape)}; give one matrix, (cells, mutations)")
        present = _check_genotypes(genotypes)
        if bool(has_conflict(present)):
            raise DataError("the genotypes have a conflict (see conflicting_pairs), so no tree fits them")
        columns: dict[frozenset[int], list[int]] = {}
        for mutation, column in enumerate(present.T):
            columns.setdefault(frozenset(column.nonzero().flatten().tolist()), []).append(mutation)
        absent = columns.pop(frozenset(), [])
        # In descending order of size, the last set so far that contains a set is its smallest superset.
        clones = [
            frozenset(range(len(present))),
            *sorted(columns, key=lambda cells: (-len(cells), min(columns[cells]))),
        ]
        parents = [-1] + [
            max(other for other in range(node) if clones[node] <= clones[other]) for node in range(1, len(clones))
        ]
        children = [
            frozenset[int]().union(*(c for c, p in zip(clones, parents, strict=True) if p == node))
            for node in range(len(clones))
        ]
        return cls(
            tuple(parents),
            ((), *(tuple(columns[cells]) for cells in clones[1:])),
            tuple(tuple(sorted(clone - below)) for clone, below in zip(clones, children, strict=True)),
            tuple(absent),
        )

    def to_genotypes(self) -> Tensor:
        """Return the genotype matrix, bool, shape ``(cells, mutations)``."""
        num_cells = sum(len(cells) for cells in self.cells)
        num_mutations = len(self.absent) + sum(len(mutations) for mutations in self.mutations)
        genotypes = torch.zeros(num_cells, num_mutations, dtype=torch.bool)
        carried: list[list[int]] = []
        for parent, mutations, cells in zip(self.parents, self.mutations, self.cells, strict=True):
            carried.append((carried[parent] if parent >= 0 else []) + list(mutations))
            for cell in cells:
                genotypes[cell, carried[-1]] = True
        return genotypes

    def to_text(self) -> str:
        """Return the tree as indented text with the mutations and cells of each clone.

        Examples
        --------
        >>> import torch
        >>> print(MutationTree.from_genotypes(torch.tensor([[1, 0], [1, 1], [0, 0]])).to_text())
        no mutation: cells 2
          mutations 0: cells 0
            mutations 1: cells 1
        """
        children: list[list[int]] = [[] for _ in self.parents]
        depth = [0]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
            depth.append(depth[parent] + 1)
        lines, to_visit = [], [0]
        while to_visit:
            node = to_visit.pop()
            to_visit.extend(reversed(children[node]))
            mutations = ", ".join(map(str, self.mutations[node]))
            name = f"mutations {mutations}" if mutations else "no mutation"
            cells = ", ".join(map(str, self.cells[node])) or "none"
            lines.append(f"{'  ' * depth[node]}{name}: cells {cells}")
        return "\n".join(lines)


# Posterior of binary genotypes observed with false positives, false negatives and missing entries.

#: Maximum number of parallel recursions in sampling, and of numbers stored by all of them.
_PREFIXES, _NUMBERS = 64, 2**27


class GenotypePosterior(NamedTuple):
    """Posterior of all conflict-free genotype matrices.

    Attributes
    ----------
    genotypes : Tensor of bool
        Matrices in descending order of probability, ``(count, cells, mutations)``.
    probabilities : Tensor
        Posterior probabilities, ``(count,)``.
    log_evidence : Tensor
        Log marginal likelihood, ``()``.
    """

    genotypes: Tensor
    probabilities: Tensor
    log_evidence: Tensor

    def __repr__(self) -> str:
        count, cells, mutations = self.genotypes.shape
        return (
            f"GenotypePosterior(log_evidence={float(self.log_evidence):.6f}, {count} matrices of {cells} cells and "
            f"{mutations} mutations)"
        )


class NoisyGenotypes:
    """Posterior of the genotype matrix of a perfect phylogeny given a noisy observation.

    The prior is uniform over conflict-free matrices. Entries are observed with independent errors.

    Parameters
    ----------
    observed : Tensor
        Entries 0, 1, or NaN if missing, shape ``(cells, mutations)``.
    false_positive_rate, false_negative_rate : Tensor or float
        Probability of observing 1 given 0, and 0 given 1, in ``[0, 1)``, shape ``(*batch)``.

    Raises
    ------
    ShapeError
        If ``observed`` is not a matrix, or the rates do not broadcast.
    DataError
        If an entry is not 0, 1 or NaN.
    SettingsError
        If a rate is not a number or is outside ``[0, 1)``.

    References
    ----------
    Jahn, K., Kuipers, J., Beerenwinkel, N. (2016). Tree inference for single-cell data. Genome Biology 17, 86
    (the noise; their prior is uniform over trees of mutations, here it is so over matrices).

    Examples
    --------
    >>> import torch
    >>> observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    >>> model = NoisyGenotypes(observed, false_positive_rate=0.01, false_negative_rate=0.2)
    >>> posterior = model.enumerate()
    >>> posterior.probabilities[:2]
    tensor([0.3935, 0.3935], dtype=torch.float64)
    >>> bool((model.log_evidence() - posterior.log_evidence).abs() < 1e-12)
    True
    """

    def __init__(
        self, observed: Tensor, false_positive_rate: Tensor | float, false_negative_rate: Tensor | float
    ) -> None:
        self.observed = _check_observed(observed)
        positive = self._rate("false_positive_rate", false_positive_rate)
        negative = self._rate("false_negative_rate", false_negative_rate)
        try:
            self.false_positive_rate, self.false_negative_rate = torch.broadcast_tensors(positive, negative)
        except RuntimeError as error:
            raise ShapeError(
                f"the rates have shapes {tuple(positive.shape)} and {tuple(negative.shape)}; give the same (*batch)"
            ) from error

    def __repr__(self) -> str:
        missing, rates = int(self.observed.isnan().sum()), []
        for name in ("false_positive_rate", "false_negative_rate"):
            rate = getattr(self, name)
            rates.append(f"{name}={f'shape {tuple(rate.shape)}' if rate.dim() else f'{float(rate):g}'}")
        return (
            f"NoisyGenotypes({self.num_cells} cells, {self.num_mutations} mutations, {missing} missing entries, "
            f"{', '.join(rates)})"
        )

    @property
    def num_cells(self) -> int:
        """Number of rows of the matrix."""
        return self.observed.shape[0]

    @property
    def num_mutations(self) -> int:
        """Number of columns of the matrix."""
        return self.observed.shape[1]

    def log_likelihood(self, genotypes: Tensor) -> Tensor:
        """Return the log likelihood of true genotype matrices, with or without conflicts, ``(*batch)``.

        ``genotypes``: entries 0 and 1, ``(*batch, cells, mutations)``; the batch broadcasts with that of the rates.
        Raises ``ShapeError`` or ``DataError`` if ``genotypes`` are invalid, or batches do not broadcast.
        """
        present = self._check(genotypes)
        self._broadcast_batch(present)
        return self._log_likelihood(present).to(self.observed.dtype)

    def enumerate(self, limit: int = 2**18) -> GenotypePosterior:
        """Return the posterior probability of every conflict-free matrix.

        ``limit``: maximum number of matrices. Raises ``SettingsError`` if there are more than ``limit`` matrices, or
        the rates are batched; ``DataError`` if every conflict-free matrix has likelihood zero (possible with rates of
        zero).
        """
        self._check_single_rates("enumerate")
        genotypes = conflict_free_matrices(self.num_cells, self.num_mutations, limit).to(self.observed.device)
        log_likelihood = self._log_likelihood(genotypes)
        total = log_likelihood.logsumexp(0)
        _check_possible(total)
        probabilities, order = (log_likelihood - total).exp().to(self.observed.dtype).sort(descending=True, stable=True)
        log_evidence = (total - math.log(len(genotypes))).to(self.observed.dtype)
        return GenotypePosterior(genotypes[order], probabilities, log_evidence)

    def log_evidence(self) -> Tensor:
        """Return the exact log evidence by recursion, without enumeration.

        Returns ``(*batch)`` of the rates; ``-inf`` if no matrix is possible. Differentiable with respect to positive
        rates; the gradient with respect to a rate of zero is NaN. Raises ``SettingsError`` if there are more than 10
        cells or 8 mutations, or the sum underflows (possible with rates below about ``1e-12``).
        """
        log_evidence = _log_evidence_given_rates(self.observed, self.false_positive_rate, self.false_negative_rate)
        _check_range(log_evidence.detach(), self._column_terms().detach())
        return log_evidence

    def marginals(self) -> Tensor:
        """Return the posterior probability that each entry is 1, ``(*batch, cells, mutations)``.

        Raises ``SettingsError`` as in :meth:`log_evidence`; ``DataError`` if no conflict-free matrix is possible.
        """
        probabilities = _column_probabilities(self._column_terms())
        return (probabilities @ subset_members(self.num_cells, probabilities)).mT.to(self.observed.dtype)

    def conflict_free_probability(self) -> Tensor:
        """Return the posterior probability of no conflict if all binary matrices are equally probable a priori.

        The other methods assume that there is no conflict. Returns ``(*batch)``. Raises ``SettingsError`` as in
        :meth:`log_evidence`.

        Examples
        --------
        >>> import torch
        >>> observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
        >>> NoisyGenotypes(observed, 0.0, 0.0).conflict_free_probability()
        tensor(0., dtype=torch.float64)
        >>> round(64 * float(NoisyGenotypes(observed, 0.5, 0.5).conflict_free_probability()), 6)  # no information
        58.0
        """
        log_number = math.log(num_conflict_free(*self.observed.shape))
        without = self.log_evidence().double() + log_number
        return (without - torch.logaddexp(*self._entry_terms()).sum((-2, -1))).exp().to(self.observed.dtype)

    def linear_probability(self) -> Tensor:
        """Return the posterior probability that the tree has no branches, by recursion over sets of mutations.

        Without branches the cells of any two mutations are nested, also if a mutation has no cells. Returns
        ``(*batch)``. Raises ``SettingsError`` as in :meth:`log_evidence`; ``DataError`` if no conflict-free matrix is
        possible.

        Examples
        --------
        >>> import torch
        >>> observed = torch.tensor([[1, 0], [0, 1]], dtype=torch.float64)
        >>> NoisyGenotypes(observed, 0.0, 0.0).linear_probability()
        tensor(0., dtype=torch.float64)
        >>> NoisyGenotypes(observed, 0.5, 0.5).linear_probability()  # no information: 14 of 16 matrices
        tensor(0.8750, dtype=torch.float64)
        """
        terms = self._column_terms()
        total = log_sum_over_columns(terms)
        _check_range(total.detach(), terms.detach())
        _check_possible(total.detach())
        return (_log_sum_over_chains(terms) - total).exp().to(self.observed.dtype)

    def sample(self, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw independent matrices from the exact posterior, column by column.

        Returns ``(num_samples, cells, mutations)``, bool. Raises ``SettingsError`` as in :meth:`log_evidence`, or if
        the rates are batched; ``DataError`` if no conflict-free matrix is possible.
        """
        self._check_single_rates("sample")
        num_samples = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, self.observed.device, stream="genotypes")
        terms = self._column_terms()
        kept = 2 ** (self.num_cells + 2 * self.num_mutations)
        side_by_side = min(_PREFIXES, max(1, _NUMBERS // kept))
        columns = torch.empty(num_samples, 0, dtype=torch.int64, device=terms.device)
        for j in range(self.num_mutations):
            # Samples with equal columns so far use the same recursion.
            prefixes, which = columns.unique(dim=0, return_inverse=True) if j else (columns[:1], None)
            chunks = [_column_probabilities(_given(terms, chunk))[:, j] for chunk in prefixes.split(side_by_side)]
            probabilities = torch.cat(chunks)
            probabilities = probabilities.expand(num_samples, -1) if which is None else probabilities[which]
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            columns = torch.cat([columns, drawn], dim=1)
        return (subset_members(self.num_cells, self.observed)[columns] == 1).mT

    @one_thread()
    def gibbs_sweep(self, genotypes: Tensor, *, generator: torch.Generator) -> Tensor:
        """Perform a Gibbs sweep over the cells' genotypes.

        The sweep leaves the posterior invariant and is irreducible for positive rates. The number of cells is not
        limited; the cost is proportional to ``2**mutations``. ``genotypes``: conflict-free matrices, one per chain,
        ``(*chains, cells, mutations)``, e.g. zeros. The batch of the rates must broadcast to ``chains``. Raises
        ``ShapeError`` or ``DataError`` if ``genotypes`` are invalid or have a conflict; ``SettingsError`` if there are
        more than 12 mutations, or a rate is zero.

        Returns
        -------
        Tensor of bool
            Same shape.
        """
        if self.num_mutations > _MAX_SWEEP_MUTATIONS:
            raise SettingsError(
                f"a sweep enumerates all 2**{self.num_mutations} genotypes of a cell; "
                f"it supports at most {_MAX_SWEEP_MUTATIONS} mutations"
            )
        if bool(((self.false_positive_rate == 0) | (self.false_negative_rate == 0)).any()):
            raise SettingsError(
                "sweeps need rates above zero: with a rate of zero the Markov chain is not irreducible; use sample, or "
                "a small rate"
            )
        present = self._check(genotypes).clone()
        if self._broadcast_batch(present) != present.shape[:-2]:
            raise ShapeError(
                f"genotypes have shape {tuple(present.shape)}, but rates have batch shape "
                f"{tuple(self.false_positive_rate.shape)}; start from at least one matrix for each pair of rates"
            )
        if bool(has_conflict(present).any()):
            raise DataError("the initial genotypes have a conflict; start from zeros, for example")
        patterns = subset_members(self.num_mutations, self.observed) == 1
        kinds = _gametes(patterns)
        terms = torch.stack(self._entry_terms(), dim=-2)
        for cell in range(self.num_cells):
            others = torch.cat([present[..., :cell, :], present[..., cell + 1 :, :]], dim=-2)
            seen = _gametes(others).any(-3)
            conflict = (seen.unsqueeze(-3) | kinds).all(-2).any(-1)
            absent_term, present_term = terms[..., cell, :, :].unsqueeze(-3).unbind(-2)
            logits = torch.where(patterns, present_term, absent_term).sum(-1).masked_fill(conflict, -torch.inf)
            uniform = torch.rand(conflict.shape, dtype=terms.dtype, device=terms.device, generator=generator)
            # Gumbel-max trick.
            present[..., cell, :] = patterns[(logits - (-uniform.log()).log()).argmax(-1)]
        return present

    def _entry_terms(self) -> tuple[Tensor, Tensor]:
        return _entry_terms(self.observed, self.false_positive_rate, self.false_negative_rate)

    def _column_terms(self) -> Tensor:
        _check_size(self.num_cells, self.num_mutations)
        return _column_terms(self.observed, self.false_positive_rate, self.false_negative_rate)

    def _check(self, genotypes: Tensor) -> Tensor:
        if genotypes.shape[-2:] != self.observed.shape:
            raise ShapeError(
                f"genotypes have shape {tuple(genotypes.shape)}; give (*batch, {self.num_cells}, {self.num_mutations})"
            )
        return _check_genotypes(genotypes)

    def _log_likelihood(self, present: Tensor) -> Tensor:
        absent_term, present_term = self._entry_terms()
        return torch.where(present, present_term, absent_term).sum((-2, -1))

    def _broadcast_batch(self, genotypes: Tensor) -> torch.Size:
        batch, rates = genotypes.shape[:-2], self.false_positive_rate.shape
        try:
            return torch.broadcast_shapes(batch, rates)
        except RuntimeError as error:
            raise ShapeError(
                f"genotypes have a batch of shape {tuple(batch)}, which does not broadcast with that of the rates, "
                f"{tuple(rates)}"
            ) from error

    def _check_single_rates(self, method: str) -> None:
        if self.false_positive_rate.dim():
            raise SettingsError(
                f"{method} needs one pair of rates, but they have shape {tuple(self.false_positive_rate.shape)}"
            )

    def _rate(self, name: str, value: Tensor | float) -> Tensor:
        try:
            rate = torch.as_tensor(value, dtype=self.observed.dtype, device=self.observed.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"{name} must be a number in [0, 1) or a tensor of numbers, not {value!r}") from error
        if not bool(((rate >= 0) & (rate < 1)).all()):
            raise SettingsError(f"{name} must lie in [0, 1), not {value}")
        return rate


def _log_sum_over_chains(terms: Tensor) -> Tensor:
    """Return the log sum over nested columns, ``(*batch, mutations, 2**cells)`` to ``(*batch)``."""
    peak = terms.amax(-1, keepdim=True).clamp_min(torch.finfo(terms.dtype).min)
    weights = (terms - peak).exp()
    # Weights of mutations with equal columns; sums over chains of larger columns; both by bit masks of mutations.
    equal: dict[int, Tensor] = {0: torch.ones_like(weights[..., 0, :])}
    larger: dict[int, Tensor] = {}
    total = equal[0]
    for chosen in range(1, 2 ** terms.shape[-2]):
        lowest = chosen & -chosen
        equal[chosen] = equal[chosen ^ lowest] * weights[..., lowest.bit_length() - 1, :]
        total, last = equal[chosen], (chosen - 1) & chosen
        while last:
            total = total + equal[last] * larger[chosen ^ last]
            last = (last - 1) & chosen
        larger[chosen] = _sums_over_larger_sets(total)
    return total.sum(-1).log() + peak.sum((-2, -1))


def _sums_over_larger_sets(values: Tensor) -> Tensor:
    """Return the sum over all proper supersets of each set, ``(*batch, 2**items)``."""
    with_itself, without = values, torch.zeros_like(values)
    for item in range(values.shape[-1].bit_length() - 1):
        out, whole = without.unflatten(-1, (-1, 2, 2**item)), with_itself.unflatten(-1, (-1, 2, 2**item))
        out = torch.stack([out[..., 0, :] + whole[..., 1, :], out[..., 1, :]], dim=-2)
        whole = torch.stack([whole.sum(-2), whole[..., 1, :]], dim=-2)
        without, with_itself = out.flatten(-3), whole.flatten(-3)
    return without


def _given(terms: Tensor, columns: Tensor) -> Tensor:
    """Condition on the first columns: ``(prefixes, columns)`` to ``(prefixes, mutations, 2**cells)``."""
    fixed = torch.nn.functional.one_hot(columns, terms.shape[-1]).bool()
    first = terms[: columns.shape[1]].masked_fill(~fixed, -torch.inf)
    return torch.cat([first, terms[columns.shape[1] :].expand(len(columns), -1, -1)], dim=1)


def _gametes(present: Tensor) -> Tensor:
    """Return gametes (only first, only second, both) by pair: bool, ``(*batch, mutations)`` to ``(*, 3, pairs)``."""
    first, second = torch.triu_indices(present.shape[-1], present.shape[-1], 1, device=present.device)
    left, right = present[..., first], present[..., second]
    return torch.stack([left & ~right, ~left & right, left & right], dim=-2)


# Pyro model with unknown error rates, genotypes marginalized.


class GenotypeModel:
    """Pyro model of a noisy genotype matrix with unknown error rates, genotypes marginalized.

    Sites are ``"false_positive_rate"`` and ``"false_negative_rate"``; the factor ``"observed"`` adds the log likelihood
    of the rates, summed over all conflict-free matrices. :class:`NoisyGenotypes` gives the posterior of the matrix
    given draws of the rates.

    Parameters
    ----------
    observed : Tensor
        Entries 0, 1, or NaN if missing, shape ``(cells, mutations)``; at most 10 cells and 8 mutations.
    false_positive_prior, false_negative_prior : pyro.distributions.TorchDistribution, optional
        Distributions on ``(0, 1)``; default Beta(1, 20) and Beta(2, 6), plausible for single-cell whole-genome
        amplification (few false positives, about a quarter of mutations missed).

    Raises
    ------
    ShapeError, DataError
        If ``observed`` is invalid.
    SettingsError
        If ``observed`` is too large, or a prior is not univariate on ``(0, 1)``.

    Examples
    --------
    >>> import torch
    >>> import bayeskit as bk
    >>> observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(GenotypeModel(observed))
    >>> target.dim
    2
    """

    #: Factor sites that are normalized log likelihoods.
    normalised_factors = frozenset({"observed"})

    def __init__(
        self,
        observed: Tensor,
        false_positive_prior: dist.TorchDistribution | None = None,
        false_negative_prior: dist.TorchDistribution | None = None,
    ) -> None:
        self.observed = _check_observed(observed)
        _check_size(*self.observed.shape)
        number = self.observed.new_tensor
        positive = false_positive_prior or dist.Beta(number(1.0), number(20.0))
        negative = false_negative_prior or dist.Beta(number(2.0), number(6.0))
        for prior in (positive, negative):
            if not _is_over_rates(prior):
                raise SettingsError(f"the prior of a rate must be over one number between 0 and 1, not {prior}")
        self.false_positive_prior, self.false_negative_prior = positive, negative

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Sample both rates, add the log probability of the observed matrix, and return the rates."""
        positive = pyro.sample("false_positive_rate", self.false_positive_prior)
        negative = pyro.sample("false_negative_rate", self.false_negative_prior)
        pyro.factor("observed", _log_evidence_given_rates(self.observed, positive, negative))
        return positive, negative


def _is_over_rates(prior: object) -> bool:
    if not isinstance(prior, torch.distributions.Distribution) or prior.batch_shape or prior.event_shape:
        return False
    support = support_of(prior)
    if not isinstance(support, (constraints.interval, constraints.half_open_interval)):
        return False
    return bool(support.lower_bound >= 0) and bool(support.upper_bound <= 1)


# Plots of genotype matrices.


def plot_genotypes(probabilities: Tensor, observed: Tensor, ax: Axes | None = None) -> Axes:
    """Plot posterior probabilities of entries (dark for 1) with the observed entries.

    Filled circles are observed ones, hollow circles observed zeros; missing entries have no mark. A hollow circle on a
    dark cell is a likely false negative. Raises ``ShapeError`` if the arguments are not matrices of equal shape.

    Parameters
    ----------
    probabilities, observed : Tensor or array
        Shape ``(cells, mutations)``; missing entries of ``observed`` are NaN.
    ax : Axes, optional
        Default axes of a new figure. The colour bar takes space from the axes.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> plot_genotypes(torch.full((3, 2), 0.5), torch.eye(3)[:, :2], Figure().subplots()).get_xlabel()
    'mutation'
    """
    probabilities, observed = as_numbers("probabilities", probabilities), as_numbers("observed", observed)
    if probabilities.dim() != 2 or probabilities.shape != observed.shape:
        raise ShapeError(
            f"probabilities and observed have shapes {tuple(probabilities.shape)} and {tuple(observed.shape)}; "
            "give (cells, mutations) for both"
        )
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(layout="constrained").subplots()
    shown = probabilities.detach().cpu().double().numpy()
    image = ax.imshow(shown, cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="probability to have the mutation")
    for value, face in ((1, VERMILION), (0, "none")):
        cells, mutations = (observed == value).cpu().nonzero(as_tuple=True)
        ax.scatter(mutations.numpy(), cells.numpy(), s=40, facecolors=face, edgecolors=VERMILION, linewidths=1.4)
    ax.set_xticks(range(observed.shape[1]))
    ax.set_yticks(range(observed.shape[0]))
    ax.tick_params(length=0)
    ax.set_xlabel("mutation")
    ax.set_ylabel("cell")
    return ax
