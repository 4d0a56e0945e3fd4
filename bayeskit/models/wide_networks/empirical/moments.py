"""Moments, over random networks of one width, of the entries of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.models.wide_networks.empirical.random_networks import RandomNetworks, random_networks
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.inputs import check_inputs
from bayeskit.models.wide_networks.regression.kernels import refuse_module
from bayeskit.parallel import map_tasks

NUM_BLOCKS = 8  # tasks a width, each with random numbers of its own: enough for a few processes
KERNELS = ("nngp", "ntk")


@dataclass(frozen=True)
class Moments:
    """Moments of deviations of random networks' kernels from their limit.

    Attributes
    ----------
    width : int or None
        None for the module's own widths.
    num_networks : int
        Over which moments are averages.
    limit : Tensor
        Shape ``(n, n)``.
    bias : Tensor
        Mean deviation of the entries on and above the diagonal, row by row, ``(n (n + 1) / 2,)``.
    covariance : Tensor
        Of one network's entries, ``(n (n + 1) / 2, n (n + 1) / 2)``; by the number of networks, that of ``bias``.
    distance : tuple of float
        Mean, over networks, of the squared Frobenius norm of the deviation, and the standard error of that mean.
    """

    width: int | None
    num_networks: int
    limit: Tensor
    bias: Tensor
    covariance: Tensor
    distance: tuple[float, float]

    @property
    def is_diagonal(self) -> Tensor:
        """Which entries are those of an input with itself."""
        rows, columns = pairs_of(len(self.limit))
        return rows == columns

    def matrix(self, entries: Tensor) -> Tensor:
        """Return entries as a symmetric matrix, ``(n, n)``."""
        rows, columns = pairs_of(len(self.limit))
        result = entries.new_empty(self.limit.shape)
        result[rows, columns] = entries
        result[columns, rows] = entries
        return result


def pairs_of(n: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the entries on and above the diagonal."""
    rows, columns = torch.triu_indices(n, n)
    return rows, columns


def kernel_moments(
    kernel: InfiniteWidth,
    x: Tensor,
    widths: Sequence[int | None],
    num_networks: int,
    which: str,
    seed: int,
    num_jobs: int,
    progress: bool,
) -> list[Moments]:
    """Average over random networks of each width.

    Raises
    ------
    SettingsError, DataError, ShapeError, ModelError
        If settings, inputs or the network do not fit.
    """
    refuse_module(kernel)
    if which not in KERNELS:
        raise SettingsError(f'which must be "nngp" or "ntk", not {which!r}')
    if isinstance(seed, torch.Generator):
        raise SettingsError("seed must be a whole number: every block of networks has a stream of its own")
    x = check_inputs(x, "x", kernel.graph.num_axes).detach()
    blocks = min(NUM_BLOCKS, num_networks)
    sizes = [num_networks // blocks + (i < num_networks % blocks) for i in range(blocks)]
    networks = [random_networks(kernel, width, x.dtype) for width in widths]
    limits = [_limit(law, x, which) for law in networks]
    tasks = [
        Task(law, limit, size, f"networks of width {width}, block {i}")
        for law, limit, width in zip(networks, limits, widths, strict=True)
        for i, size in enumerate(sizes)
    ]
    sums = map_tasks(
        partial(_block, x, which, seed), tasks, num_jobs=num_jobs, progress=progress, description="networks"
    )
    return [
        _moments(width, limit, num_networks, torch.stack(sums[i * blocks : (i + 1) * blocks]).sum(0))
        for i, (width, limit) in enumerate(zip(widths, limits, strict=True))
    ]


class Task(NamedTuple):
    """Some networks of one width, with a random stream of their own."""

    networks: RandomNetworks
    limit: Tensor
    size: int
    stream: str


def _limit(networks: RandomNetworks, x: Tensor, which: str) -> Tensor:
    """Return the kernel of infinite width, ``(n, n)`` in float64: its rounding errors must not pass for a bias."""
    result: Tensor = (networks.limit.nngp if which == "nngp" else networks.limit.ntk)(x.double())
    if not bool((result.diagonal() > 0).all()):
        row = int((result.diagonal() <= 0).nonzero()[0])
        raise DataError(f"the kernel of row {row} of x with itself is zero, so that there is nothing to compare")
    return result


def _block(x: Tensor, which: str, seed: int, task: Task) -> Tensor:
    """Return sums over some networks: entries, their products and squared distances, in one vector."""
    networks = task.networks
    generator = new_generator(seed, x.device, stream=task.stream)
    rows, columns = pairs_of(len(x))
    total: Tensor | None = None
    for first in range(0, task.size, chunk := networks.chunk(x)):
        parameters = networks.draw(min(chunk, task.size - first), generator)
        found = (networks.nngp if which == "nngp" else networks.ntk)(parameters, x)
        # Networks are in the precision of x, which their randomness hides; their sums are not.
        away = found.double() - task.limit
        entries, distance = away[:, rows, columns], away.square().sum((1, 2))
        sums = [entries.sum(0), (entries.mT @ entries).flatten(), distance.sum()[None], distance.square().sum()[None]]
        total = torch.cat(sums) if total is None else total + torch.cat(sums)
    assert total is not None
    return total


def _moments(width: int | None, limit: Tensor, num_networks: int, total: Tensor) -> Moments:
    size = len(limit) * (len(limit) + 1) // 2
    total = total / num_networks
    bias, products, distance = total[:size], total[size:-2].reshape(size, size), total[-2:]
    unbiased = num_networks / (num_networks - 1)
    error = ((distance[1] - distance[0].square()).clamp_min(0) * unbiased / num_networks).sqrt()
    covariance = (products - bias[:, None] * bias) * unbiased
    return Moments(width, num_networks, limit, bias, covariance, (float(distance[0]), float(error)))
