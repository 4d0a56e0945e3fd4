"""What a layer of infinite width knows of its inputs: covariances of one channel between pairs of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

SNAP = 16  # rounding errors by which a product of variances may exceed the squared covariance of parallel features


@dataclass(frozen=True)
class Covariance:
    """Covariances of one channel's features between pairs of inputs, at pairs of sites.

    Channels are alike, so that one stands for all. Where features lie on a grid (an image's pixels), there is a
    covariance for each site, or for each pair of sites if a later layer averages over them.

    Attributes
    ----------
    nngp : Tensor
        Second moments of the features, ``(*batch, *sites)`` or ``(*batch, *sites, *sites)``.
    ntk : Tensor or None
        Products of the features' gradients with respect to all parameters so far, of the same shape.
    channels : int
        Of the finite network.
    num_axes : int
        Of the grid: 0 for vectors, 2 for images.
    all_pairs : bool
        Whether all pairs of sites are there, or each site with itself only.
    gap : Tensor, optional
        The product of the variances minus the squared covariance, where it is known to more digits than the
        difference has.
    mean : Tensor, optional
        First moments, ``(*batch, *sites)``, where they are not zero; for an input with itself only.
    gain : bool
        Whether the features have just been multiplied by trainable gains, a number a channel, whose gradients (the
        features themselves) the next layer is to add.
    """

    nngp: Tensor
    ntk: Tensor | None
    channels: int
    num_axes: int = 0
    all_pairs: bool = False
    gap: Tensor | None = None
    mean: Tensor | None = None
    gain: bool = False

    @property
    def sites(self) -> torch.Size:
        """The size of the grid."""
        return self.nngp.shape[self.nngp.dim() - self.num_axes :]

    def variance(self) -> Tensor:
        """Return the second moment at each site, of an input with itself, ``(*batch, *sites)``."""
        if not self.all_pairs:
            return self.nngp
        size = self.sites
        batch = self.nngp.shape[: self.nngp.dim() - 2 * self.num_axes]
        flat = self.nngp.reshape(*batch, size.numel(), size.numel())
        return flat.diagonal(dim1=-2, dim2=-1).reshape(*batch, *size)

    def same_sites(self) -> Covariance:
        """Return the covariances of each site with itself only."""
        if not self.all_pairs:
            return self
        ntk = None if self.ntk is None else replace(self, nngp=self.ntk).variance()
        return replace(self, nngp=self.variance(), ntk=ntk, all_pairs=False, gap=None)

    def with_values(self, nngp: Tensor, ntk: Tensor | None, **changes: object) -> Covariance:
        """Return other moments of the same layout; a gap that is not given is forgotten."""
        return replace(self, nngp=nngp, ntk=ntk, **({"gap": None, "gain": False} | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Profile:
    """What each layer needs to know of single inputs: second and first moments of its features, ``(n, *sites)``."""

    variance: Mapping[str, Tensor]
    mean: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, chosen: Tensor | slice) -> Profile:
        """Return the profile of some of the inputs."""
        return Profile({k: v[chosen] for k, v in self.variance.items()}, {k: v[chosen] for k, v in self.mean.items()})


def gap_of(k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b - k**2``, zero where rounding errors alone could have made it."""
    product = a * b
    gap = product - k.square()
    return torch.where(gap > SNAP * torch.finfo(k.dtype).eps * product, gap, torch.zeros_like(gap))


def root(x: Tensor) -> Tensor:
    """Return the square root, with gradient zero at zero."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.clamp_min(0).sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def excess(k: Tensor, gap: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``sqrt(a b) - k`` with as many digits as the gap has."""
    scale = root(a) * root(b)
    below = torch.where(k > 0, scale + k, 1)
    return torch.where(k > 0, gap / torch.where(below > 0, below, 1), scale - k)
