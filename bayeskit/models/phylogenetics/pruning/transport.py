"""How partial likelihoods cross an edge, and how their adjoints come back.

Everything here is batched over vectors of branch lengths with the batch as the *last* dimension:
the same row of all vectors lies side by side in memory, so that a gather moves contiguous runs and
arithmetic uses the machine's vector instructions whatever the tree looks like. The four states of
a row are four separate tensors, which lets a compiler keep them in registers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from bayeskit.models.phylogenetics.pruning.schedule import Level, Schedule

States = list[Tensor]


class Transport(ABC):
    """What an edge does to partial likelihoods, in terms of some coefficients per edge."""

    #: Coefficients per edge.
    num_coefficients: int
    #: Whether `inner_terms` needs the partial likelihoods beside the messages.
    uses_partials: bool
    #: Where each term of the gradient adds to: the tips' first, then the inner ones level by level.
    slots: Tensor

    @abstractmethod
    def table(self, inputs: Tensor) -> Tensor:
        """Turn inputs `(batch, edges, *shape)` into coefficients `(num_coefficients * edges, batch)`."""

    @abstractmethod
    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""

    @abstractmethod
    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods, four tensors `(rows, batch)`, to the upper ends of their edges."""

    @abstractmethod
    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints of messages to the lower ends of their edges: the transpose of `send`."""

    @abstractmethod
    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return what each row adds to the gradient of its edge, in as many tensors as slots."""

    @abstractmethod
    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return what each tip line adds to the gradient of its edge, shape `(lines, batch)`."""

    @abstractmethod
    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Turn summed terms `(slots, batch)` into the gradient of `inputs`."""


class UniformTransport(Transport):
    """Transport where all changes are equally likely; the input is the branch length.

    The matrix is `a I + (1 - a) J / 4` with `a = exp(-4 t / 3)`, so a message is `a L + (1 - a) mean(L)`
    and its derivative by `t` is `-4/3 (message - mean(message))`.
    """

    num_coefficients = 2
    uses_partials = False

    def __init__(self, schedule: Schedule) -> None:
        self._tip_keep = schedule.tip_edges
        self._tip_mix = schedule.tip_edges + schedule.num_edges
        self._tip_states = schedule.tip_states[:, None]
        self._tip_means = schedule.tip_sets.mean(0)[:, None]
        self.slots = torch.cat([schedule.tip_edges, *(level.slots[0] for level in schedule.levels)])

    def table(self, inputs: Tensor) -> Tensor:
        """Return `a` and `1 - a` of all edges from inputs `(batch, edges)`."""
        events = inputs.T * (4.0 / 3.0)
        # 1 - exp(-x) by way of tanh: exact to rounding for short branches in eager mode and
        # compiled, where expm1 may be carried out as exp() - 1.
        half = torch.tanh(0.5 * events)
        return torch.cat([torch.exp(-events), 2.0 * half / (1.0 + half)])

    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""
        return table[self._tip_keep] * self._tip_states + table[self._tip_mix] * self._tip_means

    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods to the upper ends of their edges."""
        keep, mix = (table[slot] for slot in level.slots)
        return _mix(keep, mix, partials)

    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints to the lower ends; the matrix is symmetric."""
        return self.send(table, adjoints, level)

    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return what each row adds to the gradient of its edge."""
        mean = 0.25 * ((messages[0] + messages[1]) + (messages[2] + messages[3]))
        first, second, third, last = (
            adjoint * (mean - message) for adjoint, message in zip(adjoints, messages, strict=True)
        )
        return [(first + second) + (third + last)]

    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return what each tip line adds to the gradient of its edge."""
        return adjoints * (self._tip_means - messages)

    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient by branch lengths, `(batch, edges)`."""
        return (sums * (4.0 / 3.0)).T.reshape(inputs.shape)


class MatrixTransport(Transport):
    """Transport by any matrices; the input is one transition matrix for each edge."""

    num_coefficients = 16
    uses_partials = True

    def __init__(self, schedule: Schedule) -> None:
        first = schedule.tip_edges + schedule.tip_line_states * (4 * schedule.num_edges)
        self._tip_slots = [first + base * schedule.num_edges for base in range(4)]
        self._tip_sets = [allowed[:, None] for allowed in schedule.tip_sets]
        inner = (slot for level in schedule.levels for slot in level.slots)
        self.slots = torch.cat([*self._tip_slots, *inner])

    def table(self, inputs: Tensor) -> Tensor:
        """Return the entries of the matrices `(batch, edges, 4, 4)`, entry by entry."""
        batch, edges = inputs.shape[:2]
        return inputs.reshape(batch, edges, 16).permute(2, 1, 0).reshape(16 * edges, batch)

    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""
        return _dot([table[slot] for slot in self._tip_slots], self._tip_sets)

    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods to the upper ends of their edges."""
        entries = [table[slot] for slot in level.slots]
        return [_dot(entries[4 * row : 4 * row + 4], partials) for row in range(4)]

    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints to the lower ends of their edges."""
        entries = [table[slot] for slot in level.slots]
        return [_dot(entries[column::4], adjoints) for column in range(4)]

    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return the outer products of adjoints and partial likelihoods, entry by entry."""
        return [adjoint * partial for adjoint in adjoints for partial in partials]

    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return the outer products of adjoints and tip states, one line for each column."""
        return torch.cat([adjoints * allowed for allowed in self._tip_sets])

    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient by matrix entries, `(batch, edges, 4, 4)`."""
        batch, edges = inputs.shape[:2]
        return sums.reshape(16, edges, batch).permute(2, 1, 0).reshape(inputs.shape)


def _mix(keep: Tensor, mix: Tensor, states: States) -> States:
    mean = (0.25 * mix) * ((states[0] + states[1]) + (states[2] + states[3]))
    return [keep * state + mean for state in states]


def _dot(entries: States, states: States) -> Tensor:
    products = [entry * state for entry, state in zip(entries, states, strict=True)]
    return (products[0] + products[1]) + (products[2] + products[3])
