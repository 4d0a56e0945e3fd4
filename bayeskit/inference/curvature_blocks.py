"""Structure of Hessians: blocks of coordinates that depend on each other, and products that hold all entries."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Blocks", "Stencil"]


class Blocks:
    """Equal blocks on the diagonal of a matrix, one for each group of coordinates that a pattern joins."""

    def __init__(self, pattern: Tensor) -> None:
        size, device, pattern = len(pattern), pattern.device, pattern.cpu()
        groups = _components(pattern)
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

    def completed(self, blocks: Tensor) -> Tensor:
        """Return blocks that can be factorised, ``(n, G, b, b)``."""
        return blocks if self._is_full else blocks + self._lacking.to(blocks.dtype)

    def factorised(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
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

    def inverted(self, factor: Tensor) -> Tensor:
        """Return the inverse of the matrix of a Cholesky factor, ``(n, G, b, b)``."""
        if self.width == 1:
            return 1 / factor.square()
        one = torch.eye(self.width, dtype=factor.dtype, device=factor.device).expand_as(factor)
        lower = torch.linalg.solve_triangular(factor, one, upper=False)
        return lower.mT @ lower

    def half_log_det(self, factor: Tensor) -> Tensor:
        """Return half the log determinant of the matrix of a Cholesky factor, ``(n,)``."""
        return factor.diagonal(dim1=-2, dim2=-1).log().flatten(1).sum(1)


class Stencil:
    """Directions whose products with a Hessian hold all its entries, and where in the blocks these are."""

    def __init__(self, pattern: Tensor, blocks: Blocks) -> None:
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
