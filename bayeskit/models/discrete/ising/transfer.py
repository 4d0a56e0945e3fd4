"""The transfer matrix of an Ising grid, applied bond by bond in log space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Couplings(NamedTuple):
    """Couplings and fields of a grid of ``rows`` by ``columns`` spins, all of shape ``(*batch, rows, columns)``.

    Attributes
    ----------
    horizontal : Tensor
        Between each site and its right neighbour; in the last column between its ends, zero where the grid ends there.
    vertical : Tensor
        Between each site and the one below; in the last row between the ends of columns, likewise.
    field : Tensor
        At each site.
    """

    horizontal: Tensor
    vertical: Tensor
    field: Tensor

    def transpose(self) -> Couplings:
        """Return the same grid with rows and columns exchanged."""
        return Couplings(self.vertical.mT, self.horizontal.mT, self.field.mT)


def row_states(width: int, like: Tensor) -> Tensor:
    """Return all states of a row, spins of -1 and 1: ``(2**width, width)``; bit ``j`` of a state is its spin ``j``."""
    bits = torch.arange(2**width, device=like.device).unsqueeze(1) >> torch.arange(width, device=like.device)
    return (2 * (bits & 1) - 1).to(like)


def row_potentials(couplings: Couplings) -> Tensor:
    """Return what fields and horizontal bonds add to the log probability of each state of each row.

    Returns
    -------
    Tensor
        Shape ``(*batch, rows, 2**columns)``.
    """
    states = row_states(couplings.field.shape[-1], couplings.field)
    return couplings.field @ states.mT + couplings.horizontal @ (states * states.roll(-1, -1)).mT


def messages(couplings: Couplings, rows: Tensor, periodic: bool) -> Iterator[Tensor]:
    """Yield the log weight of all that lies below a row, from the last row to the first.

    Parameters
    ----------
    couplings : Couplings
    rows : Tensor
        From :func:`row_potentials`.
    periodic : bool
        Whether the last row is joined to the first.

    Yields
    ------
    Tensor
        For each state of the row, ``(*batch, first, 2**columns)``: where the last row is joined to the first, the
        weight depends on the state of the first row too, and ``first`` is ``2**columns``; otherwise it is 1.
    """
    message = _closing_bonds(couplings, rows, periodic)
    yield message
    for row in range(rows.shape[-2] - 1, 0, -1):
        message = _cross_bonds(message + rows[..., row, None, :], couplings.vertical[..., row - 1, :])[-1]
        yield message


def first_row(rows: Tensor, periodic: bool, below: Tensor) -> Tensor:
    """Return the log weight of each state of the first row, all other rows summed out: ``(*batch, 2**columns)``.

    ``below`` is the last that :func:`messages` yields.
    """
    return rows[..., 0, :] + (below.diagonal(dim1=-2, dim2=-1) if periodic else below.squeeze(-2))


def draw(couplings: Couplings, periodic: bool, count: int) -> Tensor:
    """Draw grids exactly, spin after spin, from torch's global stream.

    Parameters
    ----------
    couplings : Couplings
        With one batch dimension.
    periodic : bool
    count : int

    Returns
    -------
    Tensor
        Spins, ``(batch, count, rows, columns)``.
    """
    rows = row_potentials(couplings)
    below = list(messages(couplings, rows, periodic))
    logits = first_row(rows, periodic, below.pop())
    first = torch.multinomial(logits.softmax(-1), count, replacement=True)
    start = first * logits.shape[-1] if periodic else first * 0
    states, state = [first], first
    for row in range(1, rows.shape[-2]):
        # Computed a second time, for the stages of all rows together would take as many times the memory as columns.
        stages = _cross_bonds(below.pop() + rows[..., row, None, :], couplings.vertical[..., row - 1, :])
        for j in reversed(range(len(stages) - 1)):
            # Bits above j are by now spins of this row, and the others still those of the row above.
            weight = stages[j].flatten(-2)
            down, up = state & ~(1 << j), state | (1 << j)
            above = 2.0 * ((state >> j) & 1) - 1.0
            log_odds = weight.gather(-1, start + up) - weight.gather(-1, start + down)
            log_odds = log_odds + 2 * above * couplings.vertical[..., row - 1, j, None]
            state = torch.where(torch.rand_like(log_odds) < log_odds.sigmoid(), up, down)
        states.append(state)
    return row_states(rows.shape[-1].bit_length() - 1, rows)[torch.stack(states, dim=-1)]


def _closing_bonds(couplings: Couplings, rows: Tensor, periodic: bool) -> Tensor:
    """Return the weight of what lies below the last row: nothing, or bonds to the first."""
    if not periodic:
        return (rows[..., -1, :] * 0).unsqueeze(-2)
    states = row_states(couplings.field.shape[-1], rows)
    return (states * couplings.vertical[..., -1, None, :]) @ states.mT


def _cross_bonds(message: Tensor, coupling: Tensor) -> list[Tensor]:
    """Return the weight of a row and all below it after ``0, 1, ..., columns`` of its spins were summed out.

    Each is replaced by the spin above it: bits of the state below that number are spins of the row above.
    """
    width = coupling.shape[-1]
    stages = [message]
    for j in range(width):
        split = stages[-1].unflatten(-1, (2 ** (width - 1 - j), 2, 2**j))
        bond = coupling[..., j, None, None, None, None]
        stages.append(torch.logaddexp(split + bond, split.flip(-2) - bond).flatten(-3))
    return stages
