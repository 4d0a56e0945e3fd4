"""The few directions along which a posterior is longer or shorter than its coordinates say, in many dimensions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.inference.samplers.moments import agreement

RANK = 32  # directions at most
MAX_DRAWS = 256  # of a group that are remembered
CUTOFF = 2.0  # variances, in units of the diagonal, that are nearer to one than this factor are not worth a product


class Window(NamedTuple):
    """Draws of a window of ``g`` groups and gradients there, evenly spread over the window.

    Attributes
    ----------
    draws, gradients : Tensor
        Shape ``(g, slots, m, d)``, of ``m`` chains of a group at a time; NaN for what is not there.
    count : Tensor
        Times that were offered so far, (), int64, on the host.
    stride : Tensor
        Every so manyth is kept, (), int64, on the host.
    """

    draws: Tensor
    gradients: Tensor
    count: Tensor  # type: ignore[assignment]
    stride: Tensor

    @classmethod
    def start(cls, num_groups: int, like: Tensor, kept: bool = True) -> Window:
        """Start empty, for chains of the shape ``(n, d)`` of ``like``; one that keeps nothing has no slots."""
        m, d = min(len(like) // num_groups, MAX_DRAWS), like.shape[-1]
        slots = 2 * max(1, MAX_DRAWS // (2 * m)) if kept else 0
        empty = like.new_full((num_groups, slots, m, d), torch.nan)
        return cls(empty, empty.clone(), torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.int64))

    def update(self, position: Tensor, gradient: Tensor, alive: Tensor) -> Window:
        """Offer one draw of every chain, ``(n, d)`` and ``(n,)``, and the gradients there."""
        count, stride, slots = int(self.count), int(self.stride), self.draws.shape[1]
        draws, gradients = self.draws, self.gradients
        if slots and count % stride == 0:
            slot = count // stride
            if slot == slots:  # full: every other one goes
                stride, slot = 2 * stride, slots // 2
                draws, gradients = (
                    torch.cat([x[:, ::2], torch.full_like(x[:, ::2], torch.nan)], 1) for x in (draws, gradients)
                )
            index = torch.tensor([slot], device=draws.device)
            news = (torch.where(alive.unsqueeze(-1), new, torch.nan) for new in (position, gradient))
            draws, gradients = (
                x.index_copy(1, index, new.reshape(len(x), 1, -1, x.shape[-1])[:, :, : x.shape[2]])
                for x, new in zip((draws, gradients), news, strict=True)
            )
        return Window(draws, gradients, self.count + 1, torch.full_like(self.stride, stride))

    def directions(self, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Return directions ``(g, d, k)`` and stretches ``(g, k)``, in units of ``deviation``, ``(g, d)``.

        The candidates are the longest axes of the draws and of the gradients, which are the shortest of the posterior.
        In the space of those, draws and gradients agree on a covariance as they do on a dense metric. Of its axes those
        stay that are off by more than a factor of two; the others are stretched by one.
        """
        g, d = deviation.shape
        k = min(RANK, d)
        unit = deviation[:, None, None]
        x, y = (one.flatten(1, 2).double() for one in (self.draws / unit, self.gradients * unit))
        known = (x.isfinite() & y.isfinite()).all(-1, keepdim=True)
        count = known.sum(1, keepdim=True)
        x, y = (_centred(one, known, count) for one in (x, y))
        basis, _ = torch.linalg.qr(torch.cat([_longest(x, k), _longest(y, k)], -1))  # (g, d, 2 k)
        along, sloping = x @ basis, y @ basis
        covariance = agreement(along.mT @ along, sloping.mT @ sloping, count)
        values, vectors = torch.linalg.eigh(covariance)
        size = values.log().abs()
        best = size.argsort(-1, descending=True)[..., :k]
        values, size = values.gather(-1, best), size.gather(-1, best)
        vectors = vectors.gather(-1, best.unsqueeze(-2).expand(g, vectors.shape[-1], k))
        usable = values.isfinite().all(-1, keepdim=True) & (values > 0).all(-1, keepdim=True)
        stretch = torch.where(usable & (size > torch.tensor(CUTOFF).log()), values.sqrt(), 1.0)
        directions = (basis @ vectors).nan_to_num()
        return directions.to(deviation).contiguous(), stretch.to(deviation)


def _centred(x: Tensor, known: Tensor, count: Tensor) -> Tensor:
    """Return rows about their mean, ``(g, N, d)``, zero where one is not known."""
    x = torch.where(known, x, 0.0)
    return torch.where(known, x - x.sum(1, keepdim=True) / count.clamp(min=1), 0.0)


def _longest(x: Tensor, k: int) -> Tensor:
    """Return the ``k`` longest axes of rows ``(g, N, d)``, ``(g, d, k)``."""
    _, vectors = torch.linalg.eigh(x @ x.mT)
    axes = x.mT @ vectors[..., -k:]
    return axes / axes.norm(dim=1, keepdim=True).clamp(min=torch.finfo(axes.dtype).tiny)
