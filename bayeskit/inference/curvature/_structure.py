"""Structure of Hessians: blocks of coordinates that depend on each other, and products that hold all entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.torch_internals import gradient_and_rest

Factor = Any
"""A factorised matrix, as its structure made it."""


class DiagonalBlocks:
    """Equal blocks on the diagonal of a matrix, one for each group of coordinates; ``groups`` numbers them."""

    def __init__(self, groups: Tensor) -> None:
        size, device, groups = len(groups), groups.device, groups.cpu()
        count, width = int(groups.max()) + 1, int(groups.bincount().max())
        if count * width**2 > size**2:  # groups of very different sizes
            count, width, groups = 1, size, torch.zeros_like(groups)
        order = groups.argsort(stable=True)
        sorted_groups = groups[order]
        place = torch.arange(size) - torch.searchsorted(sorted_groups, sorted_groups)
        members = torch.zeros(count, width, dtype=torch.long)
        members[sorted_groups, place] = order
        filled = torch.zeros(count, width, dtype=torch.bool)
        filled[sorted_groups, place] = True
        self.count, self.width, self.size = count, width, size
        self.members, self.filled = members.to(device), filled.to(device)
        self._is_plain = width == 1 and bool((members[:, 0] == torch.arange(size)).all())
        self._is_full = bool(filled.all())
        self._positions = (sorted_groups * width + place)[order.argsort()].to(device)
        # One in place of what a smaller group lacks.
        self._lacking = torch.diag_embed((~self.filled).double())

    @classmethod
    def joined(cls, pattern: Tensor) -> DiagonalBlocks:
        """Return the blocks of the groups that a pattern ``(m, m)`` joins."""
        return cls(_components(pattern.cpu()).to(pattern.device))

    @property
    def is_dense(self) -> bool:
        """Whether there is one group."""
        return self.count == 1

    @property
    def is_separate(self) -> bool:
        """Whether each coordinate is a group of its own."""
        return self.width == 1

    @property
    def description(self) -> str:
        """The structure in words."""
        if self.count == 1:
            return f"dense, {self.size}"
        return f"{self.count} groups of {'' if self._is_full else 'up to '}{self.width}"

    def completed(self, blocks: Tensor) -> Tensor:
        """Return blocks that can be factorised, ``(n, G, b, b)``."""
        return blocks if self._is_full else blocks + self._lacking.to(blocks.dtype)

    def identity(self, like: Tensor) -> Tensor:
        """Return the identity, ``(1, 1, b, b)``."""
        return torch.eye(self.width, dtype=like.dtype, device=like.device)[None, None]

    def scale(self, blocks: Tensor) -> Tensor:
        """Return the largest entry of the diagonal, ``(n,)``."""
        return blocks.diagonal(dim1=-2, dim2=-1).abs().flatten(1).amax(1)

    def times(self, blocks: Tensor, z: Tensor) -> Tensor:
        """Return the product with a vector, ``(n, m)``."""
        return self.scattered(blocks @ self.gathered(z))

    def spread(self, factor: Tensor, z: Tensor) -> Tensor:
        """Return ``z`` divided by the transposed factor: standard normal draws get the inverse as covariance."""
        return self.scattered(torch.linalg.solve_triangular(factor.mT, self.gathered(z), upper=True))

    def factorised(self, blocks: Tensor) -> tuple[Factor, Tensor]:
        """Return Cholesky factors ``(n, G, b, b)``, and whether all blocks of a row are positive definite, ``(n,)``."""
        if self.width == 1:
            return blocks.sqrt(), blocks.flatten(1).amin(1) > 0
        factor, info = torch.linalg.cholesky_ex(blocks)
        return factor, info.sum(-1) == 0

    def gathered(self, z: Tensor) -> Tensor:
        """Return coordinates by group, ``(n, m) -> (n, G, b, 1)``."""
        if self._is_plain:
            return z[:, :, None, None]
        found = z[:, self.members]
        return (found if self._is_full else found * self.filled).unsqueeze(-1)

    def scattered(self, z: Tensor) -> Tensor:
        """Return coordinates in their order, ``(n, G, b, 1) -> (n, m)``."""
        return z[:, :, 0, 0] if self._is_plain else z.flatten(1)[:, self._positions]

    def solved(self, factor: Tensor, z: Tensor) -> Tensor:
        """Return ``z`` divided by the matrix of a Cholesky factor, ``(n, m)``."""
        parts = self.gathered(z)
        if self.width == 1:
            return self.scattered(parts / factor.square())
        lower = torch.linalg.solve_triangular(factor, parts, upper=False)
        return self.scattered(torch.linalg.solve_triangular(factor.mT, lower, upper=True))

    def inverted(self, blocks: Tensor, factor: Tensor) -> Tensor:
        """Return the inverse of a matrix with its Cholesky factor, ``(n, G, b, b)``."""
        if self.width == 1:
            return 1 / factor.square()
        one = torch.eye(self.width, dtype=factor.dtype, device=factor.device).expand_as(factor)
        lower = torch.linalg.solve_triangular(factor, one, upper=False)
        return lower.mT @ lower

    def half_log_det(self, factor: Tensor) -> Tensor:
        """Return half the log determinant of the matrix of a Cholesky factor, ``(n,)``."""
        return factor.diagonal(dim1=-2, dim2=-1).log().flatten(1).sum(1)


class Stencil:
    """Directions whose products with a Hessian hold all its entries, and where in the blocks these are.

    Without a pattern ``(m, m)`` of entries that are not zero, the Hessian is diagonal, and so are the blocks.
    """

    def __init__(self, pattern: Tensor | None, blocks: DiagonalBlocks) -> None:
        if pattern is None:
            self.num_directions, self.is_diagonal, self._is_dense = 1, True, False
            self.directions = torch.ones(1, blocks.size, device=blocks.members.device)
            return
        pattern, members, filled = pattern.cpu(), blocks.members.cpu(), blocks.filled.cpu()
        colours = _colours(pattern)
        cells = pattern[members[:, :, None], members[:, None, :]] & filled[:, :, None] & filled[:, None, :]
        g, i, j = cells.nonzero(as_tuple=True)
        device, self._shape = blocks.members.device, (blocks.count, blocks.width, blocks.width)
        self._cells = (g.to(device), i.to(device), j.to(device))
        self._sources = (colours[members[g, j]].to(device), members[g, i].to(device))  # direction, row
        self.num_directions = int(colours.max()) + 1
        self.directions = torch.nn.functional.one_hot(colours).T.to(device)  # (c, m)
        m = len(pattern)
        in_order = blocks.width == 1 and torch.equal(members[:, 0], torch.arange(m))
        self.is_diagonal = self.num_directions == 1 and in_order
        self._is_dense = self.num_directions == m and blocks.count == 1 and bool(pattern.all())

    def blocks(self, products: Tensor) -> Tensor:
        """Return minus the Hessian from its products with all directions, ``(c, n, m) -> (n, G, b, b)``."""
        if self.is_diagonal:
            return -products[0][:, :, None, None]
        if self._is_dense:
            found = -products.permute(1, 2, 0).unsqueeze(1)
            return 0.5 * (found + found.mT)
        direction, row = self._sources
        found = products.new_zeros(products.shape[1], *self._shape)
        found[:, *self._cells] = -products[direction, :, row].T
        return 0.5 * (found + found.mT)

    def weights(self, blocks: Tensor) -> Tensor:
        """Return ``w`` ``(c, n, m)`` for which the sum of ``w * products`` is the trace of blocks times Hessian."""
        if self.is_diagonal:
            return blocks[None, :, :, 0, 0]
        if self._is_dense:
            return blocks[:, 0].permute(2, 0, 1)
        direction, row = self._sources
        found = blocks.new_zeros(self.num_directions, len(blocks), self.directions.shape[1])
        found[direction, :, row] = blocks[:, *self._cells].T
        return found


def _components(pattern: Tensor) -> Tensor:
    """Return the number of each coordinate's group, coordinates that a pattern joins being in one group, ``(m,)``."""
    labels = torch.arange(len(pattern))
    while True:
        joined = torch.where(pattern, labels, len(labels)).amin(1)
        joined = joined[joined]
        if torch.equal(joined, labels):
            return labels.unique(return_inverse=True)[1]
        labels = joined


def _colours(pattern: Tensor) -> Tensor:
    """Return colours of columns, ``(m,)``, each the first that no earlier column with a common row has."""
    common = pattern.float()
    common = (common.T @ common) > 0
    colours = torch.full((len(pattern),), -1)
    for column, near in enumerate(common):
        taken = torch.zeros(len(pattern) + 1, dtype=torch.bool)
        taken[colours[near]] = True
        colours[column] = int((~taken).int().argmax())
    return colours


class _Level(NamedTuple):
    """Elimination of every second block of a chain, of which there are ``s``, with ``t`` neighbours to the right."""

    factor: Tensor  # (n, s, w, w), Cholesky factors of the eliminated blocks
    left: Tensor  # (n, s, w, w), and their couplings to the blocks before
    right: Tensor  # (n, t, w, w), and after them, divided by these factors


class Band:
    """A symmetric matrix of bandwidth ``w`` as a chain of ``T`` blocks, ``(n, T, 2, w, w)``.

    The second block at ``t`` stands below the diagonal, in the columns of block ``t`` and the rows of the next. Cyclic
    reduction eliminates every second block at once, so that time and memory are proportional to ``m`` and the number of
    steps to its logarithm.
    """

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.size, self.width = size, width
        self.count = -(-size // width)
        self._padding = self.count * width - size
        lacking = torch.zeros(self.count * width, dtype=torch.float64)
        lacking[size:] = 1.0
        self._lacking = torch.stack(
            [torch.diag_embed(lacking.reshape(-1, width)), torch.zeros(self.count, width, width)], 1
        )
        self._lacking = self._lacking.to(device)

    is_separate = False

    @property
    def is_dense(self) -> bool:
        """Never."""
        return False

    @property
    def description(self) -> str:
        """The structure in words."""
        return f"chain of {self.size}, bandwidth {self.width}"

    def completed(self, band: Tensor) -> Tensor:
        """Return a matrix that can be factorised."""
        return band + self._lacking.to(band.dtype) if self._padding else band

    def identity(self, like: Tensor) -> Tensor:
        """Return the identity, ``(1, 1, 2, w, w)``."""
        one = torch.eye(self.width, dtype=like.dtype, device=like.device)
        return torch.stack([one, torch.zeros_like(one)])[None, None]

    def scale(self, band: Tensor) -> Tensor:
        """Return the largest entry of the diagonal, ``(n,)``."""
        return band[:, :, 0].diagonal(dim1=-2, dim2=-1).abs().flatten(1).amax(1)

    def times(self, band: Tensor, z: Tensor) -> Tensor:
        """Return the product with a vector, ``(n, m)``."""
        x = self._gathered(z)
        diagonal, below = band[:, :, 0], band[:, :-1, 1]
        found = diagonal @ x
        found = found + torch.cat([torch.zeros_like(x[:, :1]), below @ x[:, :-1]], 1)
        return self._scattered(found + torch.cat([below.mT @ x[:, 1:], torch.zeros_like(x[:, :1])], 1))

    def factorised(self, band: Tensor) -> tuple[Factor, Tensor]:
        """Return the levels of the reduction, and whether each matrix is positive definite, ``(n,)``."""
        diagonal, below = band[:, :, 0], band[:, :-1, 1]
        levels, worst = [], []
        while True:
            # The last block is eliminated alone.
            first = 0 if diagonal.shape[1] == 1 else 1
            factor, pivot = self._cholesky(diagonal[:, first::2])
            worst.append(pivot)
            if first == 0:
                nothing = diagonal[:, :0]
                levels.append(_Level(factor, nothing, nothing))
                return levels, torch.stack(worst).amin(0) > 0
            num_right = below.shape[1] // 2
            left = self._divided(factor, below[:, 0::2])
            right = self._divided(factor[:, :num_right], below[:, 1::2].mT)
            levels.append(_Level(factor, left, right))
            kept = diagonal[:, 0::2]
            kept = kept - _filled_up(left.mT @ left, kept.shape[1], True)
            diagonal = kept - _filled_up(right.mT @ right, kept.shape[1], False)
            below = -(right.mT @ left[:, :num_right])

    def solved(self, levels: list[_Level], z: Tensor) -> Tensor:
        """Return ``z`` divided by the matrix, ``(n, m)``."""
        x, inner = self._gathered(z), []
        for factor, left, right in levels[:-1]:
            y = self._divided(factor, x[:, 1::2])
            kept = x[:, 0::2] - _filled_up(left.mT @ y, (x.shape[1] + 1) // 2, True)
            x = kept - _filled_up(right.mT @ y[:, : right.shape[1]], kept.shape[1], False)
            inner.append(y)
        inner.append(self._divided(levels[-1].factor, x))
        return self._scattered(self._backwards(levels, inner))

    def spread(self, levels: list[_Level], z: Tensor) -> Tensor:
        """Return draws with the inverse as covariance from standard normal ones, ``(n, m)``."""
        x, inner = self._gathered(z), []
        for _ in levels[:-1]:
            inner.append(x[:, 1::2])
            x = x[:, 0::2]
        return self._scattered(self._backwards(levels, [*inner, x]))

    def inverted(self, band: Tensor, levels: list[_Level]) -> Tensor:
        """Return the entries of the inverse within the band, those below the diagonal doubled."""

        def total(band: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return 2 * self.half_log_det(self.factorised(band)[0]).sum(), ()

        # The derivative of the log determinant by an entry is that of the inverse, in both triangles.
        return gradient_and_rest(total, band)[0]

    def half_log_det(self, levels: list[_Level]) -> Tensor:
        """Return half the log determinant, ``(n,)``."""
        found = [level.factor.diagonal(dim1=-2, dim2=-1).log().flatten(1).sum(1) for level in levels]
        return torch.stack(found).sum(0)

    def _backwards(self, levels: list[_Level], inner: list[Tensor]) -> Tensor:
        x = self._divided(levels[-1].factor, inner[-1], transposed=True)
        for (factor, left, right), y in zip(reversed(levels[:-1]), reversed(inner[:-1]), strict=True):
            rest = y - left @ x[:, : left.shape[1]]
            rest = rest - _filled_up(right @ x[:, 1 : 1 + right.shape[1]], y.shape[1], True)
            x = _interleaved(x, self._divided(factor, rest, transposed=True))
        return x

    def _cholesky(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        if self.width == 1:
            return blocks.sqrt(), blocks.flatten(1).amin(1)
        factor, info = torch.linalg.cholesky_ex(blocks)
        return factor, 0.5 - info.sum(-1).to(blocks.dtype)

    def _divided(self, factor: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
        if self.width == 1:
            return x / factor
        return torch.linalg.solve_triangular(factor.mT if transposed else factor, x, upper=transposed)

    def _gathered(self, z: Tensor) -> Tensor:
        return torch.nn.functional.pad(z, (0, self._padding)).reshape(len(z), self.count, self.width, 1)

    def _scattered(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)[:, : self.size]


Structure = DiagonalBlocks | Band
"""What is known of the zeros of ``n`` symmetric matrices ``(m, m)``, and how they are stored and factorised."""


def _filled_up(x: Tensor, length: int, from_first: bool) -> Tensor:
    """Return blocks from the first place on, or from the second, among zeros, ``(n, s, ...) -> (n, length, ...)``."""
    before = 0 if from_first else 1
    sides = [x.new_zeros(len(x), k, *x.shape[2:]) for k in (before, length - before - x.shape[1])]
    return torch.cat([sides[0], x, sides[1]], 1)


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Return blocks in turn, first an even one, ``(n, s, ...)``."""
    if even.shape[1] > odd.shape[1]:
        pairs = torch.stack([even[:, :-1], odd], 2).flatten(1, 2)
        return torch.cat([pairs, even[:, -1:]], 1)
    return torch.stack([even, odd], 2).flatten(1, 2)


class BandStencil:
    """Directions whose products with a Hessian of bandwidth ``reach`` hold all its entries, as a :class:`Band`."""

    def __init__(self, band: Band, reach: int, device: torch.device) -> None:
        m, w, count = band.size, band.width, band.count
        self.num_directions = min(2 * reach + 1, m)
        colours = torch.arange(m) % self.num_directions
        self.directions = torch.nn.functional.one_hot(colours, self.num_directions).T.to(device)
        block, inside = torch.arange(count)[:, None, None, None] * w, torch.arange(w)
        row = (block + w * torch.arange(2)[:, None, None] + inside[:, None]).expand(count, 2, w, w)
        column = (block + inside).expand(count, 2, w, w)
        there = ((row - column).abs() <= reach) & (row < m) & (column < m)
        self._there = there.to(device)
        self._row = row.clamp(max=m - 1).to(device)
        self._direction = colours[column.clamp(max=m - 1)].to(device)

    def blocks(self, products: Tensor) -> Tensor:
        """Return minus the Hessian from its products with all directions, ``(c, n, m) -> (n, T, 2, w, w)``."""
        found = -products.movedim(0, 1)[:, self._direction, self._row]
        return found * self._there

    def weights(self, inverse: Tensor) -> Tensor:
        """Return ``w`` ``(c, n, m)`` for which the sum of ``w * products`` is the trace of inverse times Hessian."""
        n, m = len(inverse), self.directions.shape[1]
        found = inverse.new_zeros(n, self.num_directions, m)
        where = (torch.arange(n, device=inverse.device)[:, None], self._direction[self._there], self._row[self._there])
        return found.index_put(where, inverse[:, self._there], accumulate=True).movedim(1, 0)
