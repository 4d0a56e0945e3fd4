"""What a layer of infinite width knows of its inputs: covariances of one channel between pairs of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

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
    mixed : bool
        Whether such gradients are among those in ``ntk`` already, on average over channels.
    """

    nngp: Tensor
    ntk: Tensor | None
    channels: int
    num_axes: int = 0
    all_pairs: bool = False
    gap: Tensor | None = None
    mean: Tensor | None = None
    gain: bool = False
    mixed: bool = False

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

    @property
    def same_site(self) -> Tensor | float:
        """One where both sites of a pair are the same, and zero elsewhere, ``(*sites, *sites)``."""
        if not self.all_pairs:
            return 1.0
        size = self.sites.numel()
        ones = torch.eye(size, dtype=self.nngp.dtype, device=self.nngp.device)
        return ones.reshape(*self.sites, *self.sites)

    def settled(self) -> Covariance:
        """Return the same with gradients of gains added to the others; there is a gain for each channel and site."""
        if not self.gain:
            return self
        ntk = None if self.ntk is None else self.ntk + self.nngp * self.same_site
        return replace(self, ntk=ntk, gain=False, mixed=True)

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


class Joint(NamedTuple):
    """Second moments of two sets of features: covariances ``k``, variances ``a`` and ``b``, and the gap."""

    k: Tensor
    a: Tensor
    b: Tensor
    gap: Tensor

    def scaled(self, factor: float) -> Joint:
        """Return all times a factor."""
        return Joint(factor * self.k, factor * self.a, factor * self.b, factor * factor * self.gap)

    def plus(self, other: Joint) -> Joint:
        """Return the moments of a sum of features that are uncorrelated."""
        return Joint(self.k + other.k, self.a + other.a, self.b + other.b, gap_of_sum(self, other))


def gap_of(k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b - k**2``, zero where rounding errors alone could have made it."""
    product = a * b
    gap = torch.addcmul(product, k, k, value=-1)
    noise = SNAP * torch.finfo(k.dtype).eps * product
    if _plain(gap) and bool((gap.detach() - noise).amin() > 0):
        return gap  # the choice below takes longer than all else
    return torch.where(gap > noise, gap, torch.zeros_like(gap))


def root(x: Tensor) -> Tensor:
    """Return the square root, with gradient zero at zero."""
    if not tracked(x):
        return x.clamp_min(0).sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def angle(sine: Tensor, cosine: Tensor) -> Tensor:
    """Return the angle of a vector with such parts, of any length; zero, with gradient zero, if that is zero."""
    if tracked(sine, cosine):
        cosine = torch.where((sine == 0) & (cosine == 0), 1, cosine)
    return torch.atan2(sine, cosine)


def acute_angle(sine: Tensor, cosine: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle to the nearer of both directions of an axis, and how far the angle to one is from a right one.

    The former keeps its digits where it is small; the latter has the sign of the cosine.
    """
    if tracked(sine, cosine):
        between = angle(sine, cosine)
        return torch.where(cosine < 0, math.pi - between, between), 0.5 * math.pi - between
    # The same without choices and the slower function of two arguments.
    acute = torch.atan(sine / cosine.abs().clamp_min(torch.finfo(cosine.dtype).tiny))
    return acute, torch.copysign(0.5 * math.pi - acute, cosine)


def gap_of_sum(one: Joint, other: Joint) -> Tensor:
    """Return the gap of the sum of two covariances, with as many digits as theirs have."""
    apart = (root(one.a) * root(other.b) - root(other.a) * root(one.b)).square()
    alike = one.k * other.k > 0
    first, second = (torch.where(alike, x.k.abs(), x.k) for x in (one, other))
    scale = root(one.a) * root(one.b)
    missing = scale * excess(second, other.gap, other.a, other.b) + second * excess(first, one.gap, one.a, one.b)
    return one.gap + other.gap + apart + 2 * missing


def excess(k: Tensor, gap: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``sqrt(a b) - k`` with as many digits as the gap has."""
    size = k.abs()
    return excess_of_size(size, gap, a, b) + (size - k)


def excess_of_size(size: Tensor, gap: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the excess where the covariance is not negative."""
    below = torch.addcmul(size, root(a), root(b))
    if tracked(below):
        return gap / torch.where(below > 0, below, 1)
    return gap / below.clamp_min_(torch.finfo(size.dtype).tiny)


def where_zero(a: Tensor, b: Tensor, values: Tensor, one: float, both: float) -> Tensor:
    """Return other values for pairs of which one number has no variance, or both have none."""
    if all(_plain(x) and int(x.count_nonzero()) == x.numel() for x in (a, b)):
        return values
    first, second = a == 0, b == 0
    return torch.where(first & second, both, torch.where(first | second, one, values))


def tracked(*tensors: Tensor) -> bool:
    """Whether derivatives may be wanted; within transforms of functions tensors do not tell."""
    if transformed() or any(unpack_dual(x).tangent is not None for x in tensors):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def transformed() -> bool:
    """Whether a transform such as a derivative or a batch is under way."""
    return torch._C._functorch.maybe_current_level() is not None


def visible(x: Tensor) -> bool:
    """Whether a tensor's values can be looked at: not those of a batch that a transform hides."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return not torch.compiler.is_compiling()


def _plain(x: Tensor) -> bool:
    """Whether one may look at values: not while a graph is recorded, and not where looking waits for a device."""
    return x.device.type == "cpu" and x.numel() > 0 and not (transformed() or torch.compiler.is_compiling())
