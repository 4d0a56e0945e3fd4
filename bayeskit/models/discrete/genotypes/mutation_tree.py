"""The tree that a conflict-free genotype matrix implies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.discrete.genotypes.conflicts import check_genotypes, has_conflict


class MutationTree(NamedTuple):
    """Clones of cells, each with the mutations that it was the first to have.

    Node 0 is the ancestor without mutations; parents come before their children.

    Attributes
    ----------
    parents : tuple of int
        Of each node; -1 for the ancestor.
    mutations : tuple of tuple of int
        Those that arose on the branch above each node; which of several came first, the matrix cannot tell.
    cells : tuple of tuple of int
        Those with exactly the mutations from the root to each node.
    absent : tuple of int
        Mutations of no cell, which have no place on the tree.
    """

    parents: tuple[int, ...]
    mutations: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, ...], ...]
    absent: tuple[int, ...]

    @classmethod
    def from_genotypes(cls, genotypes: Tensor) -> MutationTree:
        """Build the tree of a conflict-free matrix.

        Parameters
        ----------
        genotypes : Tensor
            Zeros and ones, shape ``(cells, mutations)``.

        Raises
        ------
        ShapeError
            If it is not one matrix.
        DataError
            If it has a conflict, so that there is no tree.

        Examples
        --------
        >>> import torch
        >>> tree = MutationTree.from_genotypes(torch.tensor([[1, 0], [1, 1], [1, 1]]))
        >>> tree.parents, tree.mutations, tree.cells
        ((-1, 0, 1), ((), (0,), (1,)), ((), (0,), (1, 2)))
        """
        if genotypes.dim() != 2:
            raise ShapeError(f"genotypes have shape {tuple(genotypes.shape)}; give one matrix, (cells, mutations)")
        present = check_genotypes(genotypes)
        if bool(has_conflict(present)):
            raise DataError("the genotypes have a conflict (conflicting_pairs says where), so that no tree fits them")
        columns: dict[frozenset[int], list[int]] = {}
        for mutation, column in enumerate(present.T):
            columns.setdefault(frozenset(column.nonzero().flatten().tolist()), []).append(mutation)
        absent = columns.pop(frozenset(), [])
        # Larger sets first: the last set so far that holds another is then the smallest one around it.
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
        """Return the matrix of the tree, bool of shape ``(cells, mutations)``."""
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
        """Return the tree as indented lines: a clone's own mutations, and its cells.

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
