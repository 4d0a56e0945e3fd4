"""The two passes over many topologies as tensor operations, on any device, and mixtures over the rates of sites."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.models.phylogenetics.forest.plan import CODE_BASE, ForestPlan

__all__ = [
    "Mixed",
    "Rates",
    "RowLevel",
    "Tables",
    "mix_rows",
    "tabulate",
    "tensor_log_likelihoods",
    "tensor_row_slopes",
    "tensor_row_values",
]

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
    by_frequency: Tensor | None = None  # through invariant sites only, (samples, topologies, 4)


def mix_rows(logs: Tensor, rates: Rates, frequencies: Tensor, counts: Tensor, constant: Tensor, slopes: bool) -> Mixed:
    """Return log-likelihoods of sites of unknown rate from `logs` `(rates, samples, topologies, rows)` of root rows.

    `frequencies` are `(samples, topologies, 4)`, `counts` `(rows,)`; `constant` `(rows, 4)` is 1 for bases of all taxa.
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


# The two passes over many topologies as tensor operations, on any device. All rows of all topologies are stored in one
# table, ordered by their height above the tips, so that one gather and one product serve a level of all topologies.
# Vectors of branch lengths are the last dimension.


class RowLevel(NamedTuple):
    """Rows of one height above the tips, contiguous in the table."""

    rows: slice  # their place in the table
    factors: tuple[Tensor, Tensor]  # line `4 * row + state` of each state of each row, for either factor, (rows * 4,)
    edges: Tensor  # edge above each row, counted through all topologies, (rows,)
    trees: Tensor  # topology of each row, (rows,)
    weights: Tensor  # number of sites of each row, (rows, 1)


class Tables(NamedTuple):
    """The data of the two passes other than their inputs."""

    num_rows: int  # of the table
    num_trees: int
    num_edges: int  # of each topology
    tips: Tensor  # allowed bases of each tip row, entries 0 and 1, (tip_rows, 4, 1)
    tip_edges: Tensor  # edge above each tip row, (tip_rows,)
    levels: list[RowLevel]  # all other rows, from the tips up
    root: tuple[Tensor, ...]  # line of each state of each root row, for each of the three factors, (trees * rows * 4,)
    root_weights: Tensor  # number of sites of each root row, (rows, 1)


def tabulate(plan: ForestPlan, dtype: torch.dtype, device: torch.device) -> Tables:
    """List the rows of all topologies and the positions of their factors."""
    patterns, hanging, slots = plan
    count, num_edges = slots.shape
    num_taxa = len(patterns.taxa)
    trees = np.arange(count)
    height = np.zeros((count, num_edges), dtype=np.int64)
    for position in range(num_taxa - 3):
        below = height[trees[:, None], hanging.factors[:, position]].max(axis=1)
        height[trees, hanging.order[:, position]] = 1 + below
    factors = np.zeros((count, num_edges, 2), dtype=np.int64)
    np.put_along_axis(factors, hanging.order[..., None].astype(np.int64), hanging.factors, axis=1)
    # Blocks of rows in the order of the table.
    order = np.argsort(height.ravel(), kind="stable")
    sizes = patterns.counts[slots.ravel()[order]]
    ends = np.cumsum(sizes)
    start = np.empty(count * num_edges, dtype=np.int64)
    start[order] = ends - sizes

    def index(array: NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64).ravel(), device=device)

    def real(array: NDArray[np.float64]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype, device=device)

    def lines(edges: NDArray[np.int64], shown: NDArray[np.int64]) -> Tensor:
        row, renaming = np.divmod(patterns.codes[slots.ravel()[edges], shown], CODE_BASE)
        return index(4 * (start[edges] + row)[:, None] + patterns.group.reading[renaming])

    edge = np.repeat(order, sizes)
    row = np.arange(len(edge)) - np.repeat(ends - sizes, sizes)
    slot = slots.ravel()[edge]
    shown = patterns.representatives[slot, row]
    tip_rows = int(sizes[: count * num_taxa].sum())
    sets = patterns.masks[edge[:tip_rows] % num_edges, shown[:tip_rows]]
    bounds = np.searchsorted(height.ravel()[edge], np.arange(1, height.max() + 2))
    levels = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = slice(first, last)
        tree = edge[rows] // num_edges
        one, other = (
            lines(tree * num_edges + factors.reshape(-1, 2)[edge[rows], side], shown[rows]) for side in (0, 1)
        )
        weights = real(patterns.weights[slot[rows], row[rows]])[:, None]
        levels.append(RowLevel(rows, (one, other), index(edge[rows]), index(tree), weights))
    num_root_rows = int(patterns.counts[num_taxa])
    root_shown = np.tile(patterns.representatives[num_taxa, :num_root_rows], count)
    root_edges = (hanging.roots + num_edges * trees[:, None]).astype(np.int64)
    return Tables(
        num_rows=len(edge),
        num_trees=count,
        num_edges=num_edges,
        tips=real((sets[:, None] >> np.arange(4)) & 1)[..., None],
        tip_edges=index(edge[:tip_rows]),
        levels=levels,
        root=tuple(lines(np.repeat(root_edges[:, side], num_root_rows), root_shown) for side in range(3)),
        root_weights=real(patterns.weights[num_taxa, :num_root_rows])[:, None],
    )


def _send(inputs: Tensor, edges: Tensor, partials: Tensor) -> Tensor:
    """Carry `(rows, 4, samples)` up along edges."""
    if inputs.dim() == 3:
        keep, mix = inputs[0, edges], inputs[1, edges]
        return keep[:, None] * partials + (mix * partials.mean(1))[:, None]
    return (inputs[edges] * partials[:, None]).sum(2)


def _pull_back(inputs: Tensor, edges: Tensor, adjoints: Tensor) -> Tensor:
    """Carry adjoints down along edges: the transpose of `_send`."""
    if inputs.dim() == 3:
        return _send(inputs, edges, adjoints)
    return (inputs[edges] * adjoints[:, :, None]).sum(1)


def _terms(inputs: Tensor, adjoints: Tensor, messages: Tensor, partials: Tensor) -> Tensor:
    """Return what each row adds to the gradient of its edge."""
    if inputs.dim() == 3:
        return (4.0 / 3.0) * (adjoints * (messages.mean(1, keepdim=True) - messages)).sum(1)
    return adjoints[:, :, None] * partials[:, None]


def _gather(table: Tensor, lines: Tensor) -> Tensor:
    return table.flatten(0, 1)[lines].unflatten(0, (-1, 4))


class _Upward(NamedTuple):
    """Results of the upward pass."""

    inputs: Tensor  # keep and mix of each edge, or its matrix; samples are the last dimension
    messages: Tensor  # from each row up its edge, (rows, 4, samples)
    scalers: list[Tensor]  # divisors of each level's partial likelihoods, (rows, samples)
    frequencies: Tensor  # (topologies, 1, 4, samples)
    factors: tuple[Tensor, ...]  # the three messages at each root row, (topologies, rows, 4, samples)
    sites: Tensor  # scaled likelihood of each root row, (topologies, rows, samples)


def tensor_log_likelihoods(tables: Tables, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
    """Return log-likelihoods `(samples, topologies)` and, on request, gradients by inputs and by frequencies.

    `inputs` are lengths `(samples, topologies, edges)` or matrices `(..., edges, 4, 4)`, `frequencies` `(..., 4)`.
    """
    upward = _upward(tables, inputs, frequencies)
    logs = inputs.new_zeros((tables.num_trees, inputs.shape[0]), dtype=torch.float64)
    for level, scaler in zip(tables.levels, upward.scalers, strict=True):
        logs.index_add_(0, level.trees, (level.weights * scaler.log()).double())
    logs += (tables.root_weights * upward.sites.log()).double().sum(1)
    values = logs.T.to(inputs.dtype)
    return (values, *_downward(tables, upward, tables.root_weights)) if slopes else (values,)


def tensor_row_values(tables: Tables, inputs: Tensor, frequencies: Tensor) -> Tensor:
    """Return the log-likelihood of each root row, `(samples, topologies, rows)`; see `tensor_log_likelihoods`."""
    upward = _upward(tables, inputs, frequencies)
    totals = inputs.new_zeros((tables.num_rows, inputs.shape[0]))
    for level, scaler in zip(tables.levels, upward.scalers, strict=True):
        one, other = (totals[_rows(lines)] for lines in level.factors)
        totals[level.rows] = scaler.log() + one + other
    values = upward.sites.log()
    for lines in tables.root:
        values = values + totals[_rows(lines)].unflatten(0, (tables.num_trees, -1))
    return values.permute(2, 0, 1)


def tensor_row_slopes(tables: Tables, inputs: Tensor, frequencies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients by inputs and by frequencies of the weighted sum of the root rows' log-likelihoods."""
    # The weights are (samples, topologies, rows), the other arguments as for `tensor_log_likelihoods`.
    return _downward(tables, _upward(tables, inputs, frequencies), weights.permute(1, 2, 0))


def _rows(lines: Tensor) -> Tensor:
    """Return the row that every four lines belong to."""
    return lines[::4] // 4


def _upward(tables: Tables, inputs: Tensor, frequencies: Tensor) -> _Upward:
    samples = inputs.shape[0]
    last = inputs.movedim(0, -1).flatten(0, 1)
    if inputs.dim() == 3:
        last = torch.stack([torch.exp(last * (-4.0 / 3.0)), -torch.expm1(last * (-4.0 / 3.0))])
    root_frequencies = frequencies.permute(1, 2, 0)[:, None]
    messages = inputs.new_empty((tables.num_rows, 4, samples))
    messages[: len(tables.tips)] = _send(last, tables.tip_edges, tables.tips.expand(-1, -1, samples))
    scalers = []
    for level in tables.levels:
        one, other = (_gather(messages, lines) for lines in level.factors)
        partials = one * other
        scaler = partials.amax(1)
        # Divisors are neither zero nor so small that their inverse would overflow.
        smallest = torch.finfo(scaler.dtype).tiny
        scaler = torch.where(scaler > 0, scaler.clamp(min=smallest), torch.ones_like(scaler))
        scalers.append(scaler)
        messages[level.rows] = _send(last, level.edges, partials / scaler[:, None])
    factors = tuple(_gather(messages, lines).unflatten(0, (tables.num_trees, -1)) for lines in tables.root)
    one, other, third = factors
    sites = (root_frequencies * one * other * third).sum(2)
    return _Upward(last, messages, scalers, root_frequencies, factors, sites)


def _downward(tables: Tables, upward: _Upward, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients by inputs and frequencies of the root's rows with weights `(topologies or 1, rows, samples)`."""
    last, messages, scalers, frequencies, (one, other, third), sites = upward
    # Adjoints of sites with very small likelihoods stay finite, even summed over all rows; messages are at most two.
    limit = torch.finfo(sites.dtype).max / (64 * sites.shape[1])
    share = torch.where(sites > 0, (weights / sites).clamp(max=limit), torch.zeros_like(sites))[:, :, None]
    by_frequency = (share * one * other * third).sum(1)
    adjoints = torch.zeros_like(messages)
    flat = adjoints.flatten(0, 1)
    share = share * frequencies
    for lines, pair in zip(tables.root, (other * third, one * third, one * other), strict=True):
        flat.index_add_(0, lines, (share * pair).flatten(0, 2))
    uniform = last.dim() == 3
    slope = last.new_zeros(last.shape[1:] if uniform else last.shape)
    for level, scaler in zip(reversed(tables.levels), reversed(scalers), strict=True):
        own = adjoints[level.rows]
        one, other = (_gather(messages, lines) for lines in level.factors)
        partials = one * other / scaler[:, None]
        slope.index_add_(0, level.edges, _terms(last, own, messages[level.rows], partials))
        pulled = (_pull_back(last, level.edges, own) / scaler[:, None]).clamp(max=limit)
        flat.index_add_(0, level.factors[0], (pulled * other).flatten(0, 1))
        flat.index_add_(0, level.factors[1], (pulled * one).flatten(0, 1))
    tips = slice(0, len(tables.tips))
    slope.index_add_(0, tables.tip_edges, _terms(last, adjoints[tips], messages[tips], tables.tips))
    by_input = slope.unflatten(0, (tables.num_trees, tables.num_edges)).movedim(-1, 0)
    return by_input, by_frequency.permute(2, 0, 1)
