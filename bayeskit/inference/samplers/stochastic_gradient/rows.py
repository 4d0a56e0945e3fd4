"""In which order a stochastic-gradient sampler visits the rows of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RowState(NamedTuple):
    """Where each of ``n`` chains is in its pass over the ``N`` rows."""

    order: Tensor  # (n, N), int64; (n, 0) where no order is kept
    used: Tensor  # (), int64, on the host whatever the device: rows of the current order already visited


class RowOrder(Protocol):
    """How minibatches are drawn; each chain draws its own, so that chains stay independent."""

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Return the first state."""
        ...

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Return the new state and the rows of the next minibatch, ``(n, B)``."""
        ...


@dataclass(frozen=True)
class Epochs:
    """Every row once in random order, then again in another: sampling without replacement.

    Where the batch size does not divide the number of rows, the remainder of an epoch is
    skipped; as each epoch has a new order, every minibatch is still a uniformly drawn
    set of rows and its gradient unbiased.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Epochs
    >>> order, generator = Epochs(), torch.Generator().manual_seed(0)
    >>> state = order.init(1, 6, generator=generator)
    >>> state, first = order.next(state, 6, 3, generator=generator)
    >>> state, second = order.next(state, 6, 3, generator=generator)
    >>> sorted(torch.cat([first, second], 1)[0].tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Shuffle the rows once for every chain."""
        return RowState(_permutations(num_chains, num_data, generator), torch.zeros((), dtype=torch.int64))

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Take the next rows of the order, or shuffle anew where too few are left."""
        order = state.order
        if batch_size == num_data:
            return state, order
        start = int(state.used)  # lives on the host, so this waits for no device
        if start + batch_size > num_data:
            order, start = _permutations(order.shape[0], num_data, generator), 0
        stop = start + batch_size
        return RowState(order, torch.tensor(stop)), order[:, start:stop]


@dataclass(frozen=True)
class IndependentRows:
    """Rows drawn afresh and with replacement for every minibatch.

    The noise of successive gradients is then independent, as the closed forms for the
    bias of a finite step assume; :class:`Epochs` has less noise.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import IndependentRows
    >>> order, generator = IndependentRows(), torch.Generator().manual_seed(0)
    >>> state = order.init(2, 6, generator=generator)
    >>> order.next(state, 6, 3, generator=generator)[1].shape
    torch.Size([2, 3])
    """

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Return a state without an order."""
        order = torch.zeros(num_chains, 0, dtype=torch.int64, device=generator.device)
        return RowState(order, torch.zeros((), dtype=torch.int64))

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Draw rows uniformly."""
        shape = (state.order.shape[0], batch_size)
        return state, torch.randint(num_data, shape, generator=generator, device=generator.device)


def _permutations(num_chains: int, num_data: int, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(num_data, generator=generator, device=generator.device) for _ in range(num_chains)]
    return torch.stack(rows)
