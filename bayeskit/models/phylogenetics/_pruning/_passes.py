"""The two passes of pruning as tensor operations, on any device, and mixtures over the rates of sites."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.models.phylogenetics._pruning._plan import CODE_BASE, PruningPlan

# The likelihood of sites of unknown rate, from the likelihood of each root row at each rate.


class Rates(NamedTuple):
    """Probabilities of the rates of sites, for some samples and topologies."""

    weights: Tensor  # of each rate, (samples, topologies, rates)
    invariant: Tensor | None = None  # of a site that cannot change, (samples, topologies)


class Mixed(NamedTuple):
    """Log-likelihoods and, on request, their gradients."""

    values: Tensor  # (samples, topologies)
    by_row: Tensor | None = None  # by the log-likelihood of each row at each rate, (rates, samples, topologies, rows)
    by_rates: tuple[Tensor, ...] = ()  # by the fields of `Rates`
    by_frequency: Tensor | None = None  # through invariant sites only, (samples, topologies, states)


def mix_rows(logs: Tensor, rates: Rates, frequencies: Tensor, counts: Tensor, constant: Tensor, slopes: bool) -> Mixed:
    """Return log-likelihoods of sites of unknown rate from `logs` `(rates, samples, topologies, rows)` of root rows.

    `frequencies` are `(samples, topologies, n)`, `counts` `(rows,)`; `constant` `(rows, n)` is 1 for states of all
    taxa.
    """
    largest = logs.amax(0)
    chance = log_unchanged = None
    if rates.invariant is not None:
        chance = frequencies @ constant.T
        log_unchanged = chance.log() + rates.invariant.log()[..., None]
        largest = torch.maximum(largest, log_unchanged)
    # A row that is impossible at every rate.
    largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    weights = rates.weights.movedim(-1, 0)[..., None]
    scaled = torch.exp(logs - largest)
    total = (weights * scaled).sum(0)
    unchanged = None if log_unchanged is None else torch.exp(log_unchanged - largest)
    total = total if unchanged is None else total + unchanged
    # Thousands of terms are added up; in single precision their sum would lose two more digits.
    values = ((total.log() + largest).double() @ counts.double()).to(logs.dtype)
    if not slopes:
        return Mixed(values)
    by_total = torch.where(total > 0, counts / total, torch.zeros_like(total))
    by_weight = scaled * by_total
    by_rates, by_frequency = [by_weight.sum(-1).movedim(0, -1)], None
    if unchanged is not None and chance is not None and rates.invariant is not None:
        by_unchanged = by_total * unchanged
        by_rates.append(by_unchanged.sum(-1) / rates.invariant)
        by_frequency = torch.where(chance > 0, by_unchanged / chance, torch.zeros_like(chance)) @ constant
    return Mixed(values, by_weight * weights, tuple(by_rates), by_frequency)


# The two passes as tensor operations. Edges are grouped by their distance from the root, so that one gather and one
# product serve a level of all topologies, which needs the table of the next deeper level only. Vectors of branch
# lengths are the last dimension. Each partial likelihood is divided by its largest entry, so that nothing underflows,
# and the logarithms of these scalers are added up. Scalers count as constants in derivatives, which is exact: a scaler
# divides the likelihood and multiplies it again.


class Level(NamedTuple):
    """Rows of the edges at one distance from the root: first those of tips, then the others."""

    tips: Tensor  # allowed states of each tip row, entries 0 and 1, (tip_rows, n, 1)
    # line `n * row + state` of the next deeper table for each state of each other row, for either factor, (n * rows,)
    factors: tuple[Tensor, Tensor]
    edges: Tensor  # edge above each row, counted through all topologies, (tip_rows + rows,)
    trees: Tensor  # topology of each row but tips, (rows,)
    weights: Tensor  # number of sites of each row but tips, (rows, 1)


class Tables(NamedTuple):
    """The data of the two passes other than their inputs."""

    levels: list[Level]  # from the deepest to the one below the root
    root: tuple[Tensor, ...]  # line of each state of each root row, for each of the three factors, (trees * rows * n,)
    root_weights: Tensor  # number of sites of each root row, (rows, 1)
    num_rows: int  # of all levels
    num_trees: int
    num_edges: int  # of each topology
    num_states: int  # n


def tabulate(plan: PruningPlan, dtype: torch.dtype, device: torch.device) -> Tables:
    """List the rows of all topologies and the positions of their factors."""
    patterns, hanging, slots = plan
    count, num_edges = slots.shape
    num_taxa, num_states = len(patterns.taxa), patterns.num_states
    trees = np.arange(count)
    depth = np.zeros((count, num_edges), dtype=np.int64)
    factors = np.zeros((count, num_edges, 2), dtype=np.int64)
    for position in reversed(range(num_taxa - 3)):  # from the root down
        edge, below = hanging.order[:, position], hanging.factors[:, position]
        depth[trees[:, None], below] = 1 + depth[trees, edge][:, None]
        factors[trees, edge] = below + num_edges * trees[:, None]
    slot_of, is_tip = slots.ravel(), np.tile(np.arange(num_edges) < num_taxa, count)
    order = np.lexsort([~is_tip, -depth.ravel()])
    sizes = patterns.counts[slot_of[order]]
    ends = np.cumsum(sizes)
    bounds = np.concatenate([[0], ends[np.flatnonzero(np.diff(depth.ravel()[order]))], ends[-1:]])
    start = np.empty(len(order), dtype=np.int64)  # first row of each edge in the table of its level
    start[order] = ends - sizes - bounds[np.searchsorted(bounds, ends - sizes, side="right") - 1]

    def index(array: NDArray[Any]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64).ravel(), device=device)

    def real(array: NDArray[Any]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype, device=device)

    def lines(edges: NDArray[np.int64], shown: NDArray[np.int64]) -> Tensor:
        row, renaming = np.divmod(patterns.codes[slot_of[edges], shown], CODE_BASE)
        return index(num_states * (start[edges] + row)[:, None] + patterns.group.reading[renaming])

    edge = np.repeat(order, sizes)
    row = np.arange(len(edge)) - np.repeat(ends - sizes, sizes)
    shown = patterns.representatives[slot_of[edge], row]
    weights = patterns.weights[slot_of[edge], row]
    one, other = factors.reshape(-1, 2).T
    levels = []
    for first, last in itertools.pairwise(bounds.tolist()):
        middle = first + int(is_tip[edge[first:last]].sum())
        inner, tips = edge[middle:last], (edge[first:middle] % num_edges, shown[first:middle])
        levels.append(
            Level(
                tips=real((patterns.masks[tips][:, None] >> np.arange(num_states)) & 1)[..., None],
                factors=(lines(one[inner], shown[middle:last]), lines(other[inner], shown[middle:last])),
                edges=index(edge[first:last]),
                trees=index(inner // num_edges),
                weights=real(weights[middle:last])[:, None],
            )
        )
    root_shown = np.tile(patterns.representatives[num_taxa, : patterns.num_root_rows], count)
    root_edges = (hanging.roots + num_edges * trees[:, None]).astype(np.int64)
    return Tables(
        levels=levels,
        root=tuple(lines(np.repeat(root_edges[:, side], patterns.num_root_rows), root_shown) for side in range(3)),
        root_weights=real(patterns.root_weights)[:, None],
        num_rows=len(edge),
        num_trees=count,
        num_edges=num_edges,
        num_states=num_states,
    )


def _send(inputs: Tensor, edges: Tensor, partials: Tensor) -> Tensor:
    """Carry `(rows, n, samples)` up along edges."""
    if inputs.dim() == 3:
        keep, mix = inputs[0, edges], inputs[1, edges]
        return keep[:, None] * partials + (mix * partials.mean(1))[:, None]
    columns = zip(inputs[edges].unbind(2), partials.unbind(1), strict=True)
    return functools.reduce(torch.add, (column * partial[:, None] for column, partial in columns))


def _pull_back(inputs: Tensor, edges: Tensor, adjoints: Tensor) -> Tensor:
    """Carry adjoints down along edges: the transpose of `_send`."""
    if inputs.dim() == 3:
        return _send(inputs, edges, adjoints)
    return _send(inputs.transpose(1, 2), edges, adjoints)


def _terms(inputs: Tensor, adjoints: Tensor, messages: Tensor, partials: Tensor) -> Tensor:
    """Return what each row adds to the gradient of its edge."""
    if inputs.dim() == 3:
        return _speed(adjoints.shape[1]) * (adjoints * (messages.mean(1, keepdim=True) - messages)).sum(1)
    return adjoints[:, :, None] * partials[:, None]


def _speed(num_states: int) -> float:
    """Return the rate at which equally likely changes forget the state, if one is expected in a unit of time."""
    return num_states / (num_states - 1)


def _gather(table: Tensor, lines: Tensor) -> Tensor:
    return table.flatten(0, 1)[lines].unflatten(0, (-1, table.shape[1]))


def _largest_adjoint(sites: Tensor) -> float:
    """Return a bound at which adjoints of sites with tiny likelihoods stay finite, even summed over all rows."""
    return torch.finfo(sites.dtype).max / (64 * sites.shape[1])  # messages are at most two


def _scattered(parts: Iterable[Tensor], factors: Iterable[Tensor], like: Tensor) -> Tensor:
    """Add up what is handed to the lines of each factor, in a table like another."""
    table = like.new_zeros(like.shape)
    for values, lines in zip(parts, factors, strict=True):
        table.flatten(0, 1).index_add_(0, lines, values)
    return table


class _Upward(NamedTuple):
    """Results of the upward pass."""

    inputs: Tensor  # keep and mix of each edge, or its matrix; samples are the last dimension
    partials: list[Tensor]  # scaled partial likelihoods of each level, (rows, n, samples); if uniform, not needed
    messages: list[Tensor]  # from each row of a level up its edge, (rows, n, samples)
    scalers: list[Tensor]  # divisors of each level's partial likelihoods but tips, (rows, samples)
    frequencies: Tensor  # (topologies, 1, n, samples)
    factors: tuple[Tensor, ...]  # the three messages at each root row, (topologies, rows, n, samples)
    sites: Tensor  # scaled likelihood of each root row, (topologies, rows, samples)


class TensorPasses:
    """The two passes over the topologies of a plan as tensor operations, on any device."""

    def __init__(self, plan: PruningPlan, dtype: torch.dtype, device: torch.device) -> None:
        self._tables = tabulate(plan, dtype, device)
        self.table_size = self._tables.num_states**2 // 4 * self._tables.num_rows  # of one vector
        self.counts, self.constant = root_rows(plan, dtype, device)

    def log_likelihoods(self, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
        """Return log-likelihoods `(samples, topologies)` and, on request, gradients by inputs and by frequencies.

        `inputs` are lengths `(samples, topologies, edges)` or matrices `(..., edges, n, n)`, `frequencies` `(..., n)`.
        """
        tables = self._tables
        upward = _upward(tables, inputs, frequencies)
        # Thousands of terms are added up; in single precision their sum would lose two more digits.
        logs = (tables.root_weights * upward.sites.log()).double().sum(1)
        for level, scaler in zip(tables.levels, upward.scalers, strict=True):
            logs = logs.index_add(0, level.trees, (level.weights * scaler.log()).double())
        values = logs.T.to(inputs.dtype)
        return (values, *_downward(tables, upward, tables.root_weights)) if slopes else (values,)

    def row_values(self, inputs: Tensor, frequencies: Tensor) -> Tensor:
        """Return the log-likelihood of each root row, `(samples, topologies, rows)`; see `log_likelihoods`.

        Differentiable any number of times by the inputs, except at rows that are impossible.
        """
        tables = self._tables
        upward = _upward(tables, inputs, frequencies)
        totals = inputs.new_zeros((0, inputs.shape[0]), dtype=torch.float64)
        for level, scaler in zip(tables.levels, upward.scalers, strict=True):
            one, other = (totals[_rows(lines, tables.num_states)] for lines in level.factors)
            tips = totals.new_zeros((len(level.tips), totals.shape[1]))
            totals = torch.cat([tips, scaler.log().double() + one + other])
        # The logarithm of zero is avoided, because its derivative is infinite.
        impossible = upward.sites == 0
        values = torch.where(impossible, -torch.inf, torch.where(impossible, 1.0, upward.sites).log()).double()
        for lines in tables.root:
            values = values + totals[_rows(lines, tables.num_states)].unflatten(0, (tables.num_trees, -1))
        return values.permute(2, 0, 1).to(inputs.dtype)

    def row_slopes(self, inputs: Tensor, frequencies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients by inputs and by frequencies of the weighted sum of the root rows' log-likelihoods."""
        # The weights are (samples, topologies, rows), the other arguments as for `log_likelihoods`.
        return _downward(self._tables, _upward(self._tables, inputs, frequencies), weights.permute(1, 2, 0))


def root_rows(plan: PruningPlan, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of sites of each root row, `(rows,)`, and the states of all taxa there, 0 or 1, `(rows, n)`."""
    counts, constant = plan.patterns.root_weights, plan.patterns.constant
    return torch.as_tensor(counts, dtype=dtype, device=device), torch.as_tensor(constant, dtype=dtype, device=device)


def _rows(lines: Tensor, num_states: int) -> Tensor:
    """Return the row that the lines of all its states belong to."""
    return lines[::num_states] // num_states


def _upward(tables: Tables, inputs: Tensor, frequencies: Tensor) -> _Upward:
    samples = inputs.shape[0]
    last, uniform = inputs.movedim(0, -1).flatten(0, 1), inputs.dim() == 3
    if uniform:
        events = last * _speed(tables.num_states)
        # 1 - exp(-x) by way of tanh: exact to rounding for short branches, also where a compiler turns expm1 into exp.
        half = torch.tanh(0.5 * events)
        last = torch.stack([torch.exp(-events), 2.0 * half / (1.0 + half)])
    root_frequencies = frequencies.permute(1, 2, 0)[:, None]
    table = inputs.new_zeros((0, tables.num_states, samples))
    partials, messages, scalers = [], [], []
    for level in tables.levels:
        one, other = (_gather(table, lines) for lines in level.factors)
        products = one * other
        scaler = products.detach().amax(1)
        # Divisors are neither zero nor so small that their inverse would overflow.
        smallest = torch.finfo(scaler.dtype).tiny
        scaler = torch.where(scaler > 0, scaler.clamp(min=smallest), torch.ones_like(scaler))
        partial = torch.cat([level.tips.expand(-1, -1, samples), products / scaler[:, None]])
        table = _send(last, level.edges, partial)
        partials.append(table if uniform else partial)
        messages.append(table)
        scalers.append(scaler)
    one, other, third = factors = tuple(
        _gather(table, lines).unflatten(0, (tables.num_trees, -1)) for lines in tables.root
    )
    sites = (root_frequencies * one * other * third).sum(2)
    return _Upward(last, partials, messages, scalers, root_frequencies, factors, sites)


def _downward(tables: Tables, upward: _Upward, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients by inputs and frequencies of the root's rows with weights `(topologies or 1, rows, samples)`."""
    last, partials, messages, scalers, frequencies, (one, other, third), sites = upward
    limit = _largest_adjoint(sites)
    share = torch.where(sites > 0, (weights / sites).clamp(max=limit), torch.zeros_like(sites))[:, :, None]
    by_frequency = (share * one * other * third).sum(1)
    share = share * frequencies
    pairs = ((share * pair).flatten(0, 2) for pair in (other * third, one * third, one * other))
    own = _scattered(pairs, tables.root, messages[-1])
    uniform = last.dim() == 3
    slope = last.new_zeros(last.shape[1:] if uniform else last.shape)
    for number in reversed(range(len(tables.levels))):
        level, scaler = tables.levels[number], scalers[number]
        slope.index_add_(0, level.edges, _terms(last, own, messages[number], partials[number]))
        if not number:
            break
        tips = len(level.tips)
        pulled = (_pull_back(last, level.edges[tips:], own[tips:]) / scaler[:, None]).clamp(max=limit)
        one, other = (_gather(messages[number - 1], lines) for lines in level.factors)
        handed = ((pulled * factor).flatten(0, 1) for factor in (other, one))
        own = _scattered(handed, level.factors, messages[number - 1])
    by_input = slope.unflatten(0, (tables.num_trees, tables.num_edges)).movedim(-1, 0)
    return by_input, by_frequency.permute(2, 0, 1)
