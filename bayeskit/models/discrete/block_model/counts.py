"""What an assignment of nodes to blocks leaves of a graph, and how probable that is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot


class BlockCounts(NamedTuple):
    """Sufficient statistics of assignments.

    Attributes
    ----------
    sizes : Tensor
        Nodes of each block, ``(*batch, blocks)``.
    ends : Tensor
        Edges between blocks, ``(*batch, blocks, blocks)``, those within a block counted at both of their ends.
    """

    sizes: Tensor
    ends: Tensor

    @classmethod
    def of(cls, adjacency: Tensor, assignments: Tensor, num_blocks: int) -> BlockCounts:
        """Count from the beginning: ``assignments`` of shape ``(*batch, nodes)``."""
        members = one_hot(assignments, num_blocks).to(adjacency)
        return cls(members.sum(-2), members.mT @ (adjacency @ members))

    @property
    def edges(self) -> Tensor:
        """Edges between blocks, and within each on the diagonal: ``(*batch, blocks, blocks)``."""
        return _within_once(self.ends)

    @property
    def pairs(self) -> Tensor:
        """Pairs of nodes between blocks, and within each on the diagonal: ``(*batch, blocks, blocks)``."""
        return _within_once(self.sizes.unsqueeze(-1) * self.sizes.unsqueeze(-2) - self.sizes.diag_embed())

    def changed(self, block: Tensor, neighbours: Tensor, sign: int) -> BlockCounts:
        """Return the counts after a node joins (``sign`` 1) or leaves (-1) a block.

        Parameters
        ----------
        block : Tensor
            One at the block of the node, ``(*batch, blocks)``.
        neighbours : Tensor
            How many neighbours it has in each block, same shape.
        sign : int
        """
        met = block.unsqueeze(-1) * neighbours.unsqueeze(-2)
        return BlockCounts(self.sizes + sign * block, self.ends + sign * (met + met.mT))


class EdgePrior:
    """Beta distributions of the probabilities of edges, integrated out.

    As counts are whole numbers, ratios of Gamma functions are read from tables, several times faster than computed.
    These are float64 whatever the graph is in, for what is wanted are small differences of large entries.

    Parameters
    ----------
    edges, gaps : Tensor
        Parameters of the Beta distributions, symmetric, ``(blocks, blocks)``.
    most : int
        The most pairs of nodes there can be.
    """

    def __init__(self, edges: Tensor, gaps: Tensor, most: int) -> None:
        self.edges, self.gaps = edges, gaps
        kinds, kind = torch.stack([edges, gaps], -1).flatten(0, 1).unique(dim=0, return_inverse=True)
        self._start = kind.view_as(edges) * (most + 1)
        first, second = kinds.double().unbind(-1)
        self._edge_table, self._gap_table, self._pair_table = (
            log_rising_factorials(start, most) for start in (first, second, first + second)
        )

    def log_marginal(self, edges: Tensor, pairs: Tensor) -> Tensor:
        """Return the log probability of the edges among pairs of nodes, elementwise.

        Shape ``(*batch, blocks, blocks)``, float64.
        """
        found, all_pairs = edges.long(), pairs.long()
        among = self._edge_table[self._start + found] + self._gap_table[self._start + all_pairs - found]
        return among - self._pair_table[self._start + all_pairs]


def _within_once(counts: Tensor) -> Tensor:
    return counts - 0.5 * torch.diag_embed(counts.diagonal(dim1=-2, dim2=-1))


def log_rising_factorials(start: Tensor, most: int) -> Tensor:
    """Return ``log Gamma(start + n) - log Gamma(start)`` for ``n = 0 ... most``, one ``start`` after the other."""
    factors = (start.unsqueeze(-1) + torch.arange(most, device=start.device)).log()
    return torch.nn.functional.pad(factors.cumsum(-1), (1, 0)).flatten()
