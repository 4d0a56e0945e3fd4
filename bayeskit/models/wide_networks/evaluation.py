"""Kernels of a graph's output for pairs of inputs: what layers need of single inputs first, then block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks import tiles
from bayeskit.models.wide_networks.covariance import Covariance, Profile, tracked, visible
from bayeskit.models.wide_networks.graph import INPUT, Graph
from bayeskit.models.wide_networks.layers.grid import Flatten
from bayeskit.models.wide_networks.layers.layer import Variances
from bayeskit.models.wide_networks.layers.normalization import LayerNormalization

MARGIN = 1e-3  # of the largest number whose square there is: layers take products of variances times small factors


class KernelBlock(NamedTuple):
    """One block of both kernels.

    Attributes
    ----------
    rows, columns : slice
        Where it lies.
    mirrored : bool
        Whether its transpose is a block, too, which does not come by itself.
    nngp : Tensor
        The block of the covariance of outputs.
    ntk : Tensor or None
        That of the tangent kernel.
    """

    rows: slice
    columns: slice
    mirrored: bool
    nngp: Tensor
    ntk: Tensor | None


class Singles(NamedTuple):
    """Inputs one by one: themselves, what layers need of them, and the output's covariance of each with itself."""

    x: Tensor
    profile: Profile
    own: Covariance


@dataclass(frozen=True)
class Evaluation:
    """Kernels of two sets of inputs, or of one with itself.

    Attributes
    ----------
    graph, variances : Graph, Variances
        The network.
    first, second : Singles
        Both sets.
    symmetric : bool
        Whether they are one.
    ntk : bool
        Whether the tangent kernel is wanted.
    dtype : torch.dtype
        Of results; they are computed in double precision where the range of another does not suffice.
    """

    graph: Graph
    variances: Variances
    first: Singles
    second: Singles
    symmetric: bool
    ntk: bool
    dtype: torch.dtype

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return whole matrices at once, through which derivatives flow."""
        profiles = self.first.profile, self.second.profile
        found = self.graph.cross(self.first.x, self.second.x, profiles, self.variances, self.ntk)
        nngp, ntk = found.nngp, found.ntk
        if self.symmetric:
            own = self.first.own
            nngp = nngp.diagonal_scatter(own.nngp)
            if ntk is not None and own.ntk is not None:
                ntk = ntk.diagonal_scatter(own.ntk)
        return nngp.to(self.dtype), None if ntk is None else ntk.to(self.dtype)

    def fill(self, out: Sequence[Tensor | None]) -> None:
        """Write matrices into tensors, block by block; both halves of symmetric ones from one."""
        chosen = self._blocks()

        def store(block: tiles.Block) -> None:
            found = self._block(block)
            for matrix, values in zip(out, (found.nngp, found.ntk), strict=False):
                if matrix is None or values is None:
                    continue
                matrix[block.rows, block.columns] = values
                if block.mirrored:
                    matrix[block.columns, block.rows] = values.mT

        with progress_bar("kernel", len(chosen)) as bar:
            for i, _ in enumerate(tiles.each(store, chosen, self.first.x.device)):
                bar.update(i + 1)

    def blocks(self) -> Iterator[KernelBlock]:
        """Yield both matrices block by block; of symmetric ones those on and above the diagonal."""
        yield from tiles.each(self._block, self._blocks(), self.first.x.device)

    def _blocks(self) -> list[tiles.Block]:
        num_rows, num_columns = len(self.first.x), len(self.second.x)
        sites = _pairs_of_sites(self.graph, self.first.x)
        length = tiles.side(sites, tiles.shared_size(num_rows * num_columns * sites, self.first.x.device))
        return list(tiles.blocks(num_rows, num_columns, self.symmetric, length))

    @torch.no_grad()
    def _block(self, block: tiles.Block) -> KernelBlock:
        rows, columns, mirrored = block
        first, second = self.first, self.second
        profiles = first.profile.rows(rows), second.profile.rows(columns)
        found = self.graph.cross(first.x[rows], second.x[columns], profiles, self.variances, self.ntk)
        if self.symmetric and not mirrored:
            for matrix, values in ((found.nngp, first.own.nngp), (found.ntk, first.own.ntk)):
                if matrix is not None and values is not None:
                    matrix.diagonal().copy_(values[rows])
                    # Both halves of a block on the diagonal were computed; they may differ in the last digit.
                    matrix.copy_(matrix.triu() + matrix.triu(1).mT)
        ntk = None if found.ntk is None else found.ntk.to(self.dtype)
        return KernelBlock(rows, columns, mirrored, found.nngp.to(self.dtype), ntk)


def evaluation(
    graph: Graph, variances: Variances, x1: Tensor, x2: Tensor | None, ntk: bool, derivatives: bool
) -> Evaluation:
    """Return the kernels of two sets of inputs, or of one with itself, to be computed.

    Parameters
    ----------
    graph, variances : Graph, Variances
        The network.
    x1, x2 : Tensor
        Inputs that have been checked; None for the same.
    ntk : bool
        Whether the tangent kernel is wanted.
    derivatives : bool
        Whether derivatives are to flow.

    Returns
    -------
    Evaluation

    Raises
    ------
    ShapeError
        If there are no inputs.
    DataError
        If second moments leave the range of numbers.
    """
    with torch.set_grad_enabled(derivatives and torch.is_grad_enabled()):
        first = singles(graph, variances, x1, ntk)
        second = first if x2 is None else singles(graph, variances, x2, ntk)
        if first.x.dtype != second.x.dtype:
            assert x2 is not None
            first, second = (_checked(graph, variances, x.double(), ntk, x.dtype) for x in (x1, x2))
    return Evaluation(graph, variances, first, second, x2 is None, ntk, x1.dtype)


def singles(graph: Graph, variances: Variances, x: Tensor, ntk: bool) -> Singles:
    """Return what layers need of single inputs, in double precision where the range of another does not suffice."""
    if not len(x):
        raise ShapeError("there must be at least one input")
    try:
        return _checked(graph, variances, x, ntk, x.dtype)
    except DataError:
        if x.dtype == torch.float64:
            raise
    return _checked(graph, variances, x.double(), ntk, x.dtype)


def _checked(graph: Graph, variances: Variances, x: Tensor, ntk: bool, dtype: torch.dtype) -> Singles:
    """Return what layers need of single inputs, or say which layer's moments have lost their digits."""
    x = _centred(graph, x)
    result = Singles(x, *_profile(graph, variances, x, ntk))
    if all(visible(y) for y in result.profile.variance.values()) and visible(x):
        _check_range(graph, result, dtype)
    return result


def _check_range(graph: Graph, found: Singles, dtype: torch.dtype) -> None:
    limits = torch.finfo(found.x.dtype)
    least, most = math.sqrt(limits.tiny / limits.eps), MARGIN * math.sqrt(limits.max)
    output = graph.nodes[-1].name
    moments = {name: x.detach().reshape(-1) for name, x in found.profile.variance.items() if name != output}
    low, high = _extremes(torch.cat(list(moments.values())))
    if not (least <= low and high <= most):
        for name, variance in moments.items():
            low, high = _extremes(variance)
            if not high <= most:
                raise _out_of_range(name, high, found.x.dtype, "down")
            if low < least:
                raise _out_of_range(name, low, found.x.dtype, "up")
    if _vanished(found.x, found.profile.variance[INPUT].detach()):
        raise _out_of_range(INPUT, 0.0, found.x.dtype, "up")
    for own in (found.own.nngp, found.own.ntk):
        largest = 0.0 if own is None else float(own.detach().max())
        if not largest <= torch.finfo(dtype).max:
            raise _out_of_range(output, largest, dtype, "down")


def _extremes(x: Tensor) -> tuple[float, float]:
    """Return the least number that is not zero, and the largest."""
    low, high = torch.where(x == 0, 1, x).aminmax()
    return float(low), float(high)


def _vanished(x: Tensor, variance: Tensor) -> bool:
    """Whether squares of inputs are zero that are not."""
    if int(variance.count_nonzero()) == variance.numel():
        return False
    return bool(((variance == 0) & (x.detach() != 0).any(1)).any())


def _out_of_range(name: str, value: float, dtype: torch.dtype, direction: str) -> DataError:
    what = "the inputs" if name == INPUT else f"layer {name!r}"
    return DataError(
        f"second moments of {what} reach {value:.3g}, and their products leave the range of {dtype}; scale inputs, or "
        f"variances of weights, {direction}"
    )


def _centred(graph: Graph, x: Tensor) -> Tensor:
    """Return inputs without their mean if all that reads them takes it away: squares would lose the rest's digits."""
    same, readers = {INPUT}, []
    for node in graph.nodes:
        if same.isdisjoint(node.inputs):
            continue
        if isinstance(node.layer, Flatten):
            same.add(node.name)
        else:
            readers.append(isinstance(node.layer, LayerNormalization))
    if not any(readers):
        return x
    if not all(readers):
        return x.double()
    axes = tuple(range(1, x.dim()))
    for _ in range(2):  # once more for what rounding has left
        x = x - x.mean(axes, keepdim=True)
    return x


def _profile(graph: Graph, variances: Variances, x: Tensor, ntk: bool) -> tuple[Profile, Covariance]:
    """Return what layers need of single inputs, in pieces that fit into the cache."""
    length = max(tiles.side(_pairs_of_sites(graph, x), tiles.SIZE) ** 2, 1)
    if len(x) <= length or derivatives_wanted(variances, x):
        return graph.profile(x, variances, ntk)
    parts = [graph.profile(piece, variances, ntk) for piece in x.split(length)]
    profile = Profile(
        {k: torch.cat([p.variance[k] for p, _ in parts]) for k in parts[0][0].variance},
        {k: torch.cat([p.mean[k] for p, _ in parts]) for k in parts[0][0].mean},
    )
    own = parts[0][1].with_values(
        torch.cat([c.nngp for _, c in parts]),
        torch.cat([c.ntk for _, c in parts if c.ntk is not None]) if ntk else None,
    )
    return profile, own


def derivatives_wanted(variances: Variances, *x: Tensor) -> bool:
    """Whether derivatives are wanted, of inputs or variances, or a transform of functions is under way."""
    numbers = (*x, *variances.weight.values(), *variances.bias.values())
    return tracked(*(y for y in numbers if isinstance(y, Tensor)))


def _pairs_of_sites(graph: Graph, x: Tensor) -> int:
    """Return how many covariances a pair of inputs has at the network's beginning."""
    sites = x.shape[2:].numel()
    return sites * sites if INPUT in graph.all_pairs else sites
