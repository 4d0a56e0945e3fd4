"""The two passes over many topologies as tensor operations, on any device.

All rows of all topologies stand in one table, ordered by their height above the tips, so that one gather and one
product serve a level of all topologies. Vectors of branch lengths are the last dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.models.phylogenetics.forest.patterns import CODE_BASE
from bayeskit.models.phylogenetics.forest.plan import Plan


class Level(NamedTuple):
    """Rows of one height above the tips, which stand together in the table.

    Attributes
    ----------
    rows : slice
        Their place in the table.
    factors : tuple of Tensor
        For either factor, the line of each state of each row, `(rows * 4,)`; a line is `4 * row + state`.
    edges : Tensor
        Edge above each row, counted through all topologies, `(rows,)`.
    trees : Tensor
        Topology of each row, `(rows,)`.
    weights : Tensor
        Number of sites of each row, `(rows, 1)`.
    """

    rows: slice
    factors: tuple[Tensor, Tensor]
    edges: Tensor
    trees: Tensor
    weights: Tensor


class Tables(NamedTuple):
    """What the passes need but the inputs.

    Attributes
    ----------
    num_rows, num_trees, num_edges : int
        Rows of the table, topologies, and edges of each.
    tips : Tensor
        The bases allowed in each row of the tips, entries 0 and 1, `(tip_rows, 4, 1)`.
    tip_edges : Tensor
        Edge above each row of the tips, `(tip_rows,)`.
    levels : list of Level
        All other rows, from the tips up.
    root : tuple of Tensor
        For each of the three factors, the line of each state of each root row, `(trees * rows * 4,)`.
    root_weights : Tensor
        Number of sites of each root row, `(rows, 1)`.
    """

    num_rows: int
    num_trees: int
    num_edges: int
    tips: Tensor
    tip_edges: Tensor
    levels: list[Level]
    root: tuple[Tensor, ...]
    root_weights: Tensor


def tabulate(plan: Plan, dtype: torch.dtype, device: torch.device) -> Tables:
    """List the rows of all topologies and where their factors stand."""
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
    # Blocks of rows in the order in which they stand in the table.
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
        levels.append(Level(rows, (one, other), index(edge[rows]), index(tree), weights))
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


def run(tables: Tables, inputs: Tensor, frequencies: Tensor, slopes: bool) -> tuple[Tensor, ...]:
    """Compute log-likelihoods and, on request, their gradients.

    Parameters
    ----------
    tables : Tables
        The rows.
    inputs : Tensor
        Branch lengths `(samples, topologies, edges)` or transition matrices `(samples, topologies, edges, 4, 4)`.
    frequencies : Tensor
        Shape `(samples, topologies, 4)`.
    slopes : bool
        Whether to compute gradients.

    Returns
    -------
    tuple of Tensor
        The values `(samples, topologies)`, and on request their gradients by inputs and by frequencies.
    """
    samples = inputs.shape[0]
    last = inputs.movedim(0, -1).flatten(0, 1)
    if inputs.dim() == 3:
        last = torch.stack([torch.exp(last * (-4.0 / 3.0)), -torch.expm1(last * (-4.0 / 3.0))])
    root_frequencies = frequencies.permute(1, 2, 0)[:, None]
    messages = inputs.new_empty((tables.num_rows, 4, samples))
    messages[: len(tables.tips)] = _send(last, tables.tip_edges, tables.tips.expand(-1, -1, samples))
    logs = inputs.new_zeros((tables.num_trees, samples), dtype=torch.float64)
    scalers = []
    for level in tables.levels:
        one, other = (_gather(messages, lines) for lines in level.factors)
        partials = one * other
        scaler = partials.amax(1)
        scaler = torch.where(scaler > 0, scaler, torch.ones_like(scaler))
        scalers.append(scaler)
        messages[level.rows] = _send(last, level.edges, partials / scaler[:, None])
        logs.index_add_(0, level.trees, (level.weights * scaler.log()).double())
    one, other, third = (_gather(messages, lines).unflatten(0, (tables.num_trees, -1)) for lines in tables.root)
    sites = (root_frequencies * one * other * third).sum(2)
    logs += (tables.root_weights * sites.log()).double().sum(1)
    values = logs.T.to(inputs.dtype)
    if not slopes:
        return (values,)
    share = torch.where(sites > 0, tables.root_weights / sites, torch.zeros_like(sites))[:, :, None]
    by_frequency = (share * one * other * third).sum(1)
    adjoints = torch.zeros_like(messages)
    flat = adjoints.flatten(0, 1)
    share = share * root_frequencies
    for lines, pair in zip(tables.root, (other * third, one * third, one * other), strict=True):
        flat.index_add_(0, lines, (share * pair).flatten(0, 2))
    slope = last.new_zeros(last.shape[1:] if inputs.dim() == 3 else last.shape)
    for level, scaler in zip(reversed(tables.levels), reversed(scalers), strict=True):
        own = adjoints[level.rows]
        one, other = (_gather(messages, lines) for lines in level.factors)
        partials = one * other / scaler[:, None]
        slope.index_add_(0, level.edges, _terms(last, own, messages[level.rows], partials))
        pulled = _pull_back(last, level.edges, own) / scaler[:, None]
        flat.index_add_(0, level.factors[0], (pulled * other).flatten(0, 1))
        flat.index_add_(0, level.factors[1], (pulled * one).flatten(0, 1))
    tips = slice(0, len(tables.tips))
    slope.index_add_(0, tables.tip_edges, _terms(last, adjoints[tips], messages[tips], tables.tips))
    by_input = slope.unflatten(0, (tables.num_trees, tables.num_edges)).movedim(-1, 0)
    return values, by_input, by_frequency.permute(2, 0, 1)
