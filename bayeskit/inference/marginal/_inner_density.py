"""The log density of a Pyro model in remaining coordinates ``r`` and inner coordinates ``z``, with its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit._logdensity.pyro_density import PyroDensity, Site

Terms = tuple[int, ...]
#: Terms of the log density that are summed: its prior, its likelihood, or both.
PRIOR, LIKELIHOOD, BOTH = (0,), (1,), (0, 1)


class RemainingPrior(NamedTuple):
    """Log prior of the remaining sites at ``n`` vectors."""

    gradient: Tensor  # (n, p)
    value: Tensor  # (n,)


class InnerDensity:
    """The log density ``f(r, z)``, where ``z`` are the coordinates of the sites to be integrated out."""

    def __init__(self, whole: PyroDensity, over: Sequence[str]) -> None:
        self.whole, self.over = whole, frozenset(over)
        self.dtype, self.device = whole.dtype, whole.device
        self._is_inner = [site.name in self.over for site in whole.sites]
        self._widths = [site.stop - site.start for site in whole.sites]
        columns = torch.repeat_interleave(torch.tensor(self._is_inner), torch.tensor(self._widths))
        self.inner, self.remaining = columns.nonzero()[:, 0], (~columns).nonzero()[:, 0]
        self.dim, self.num_inner = len(self.remaining), len(self.inner)
        self.sites = self._remaining_sites()
        #: Inner coordinates for functions of the whole vector that do not depend on them, ``(m,)``.
        self.filler = torch.zeros(self.num_inner, dtype=self.dtype, device=self.device)

    def _remaining_sites(self) -> tuple[Site, ...]:
        sites, start = [], 0
        for site in self.whole.sites:
            if site.name not in self.over:
                width = site.stop - site.start
                sites.append(replace(site, start=start, stop=start + width))
                start += width
        return tuple(sites)

    def _coordinates(self, r: Tensor, z: Tensor) -> list[Tensor]:
        """Return the coordinates of each site of the whole model, ``(p,), (m,)``."""
        pairs = list(zip(self._widths, self._is_inner, strict=True))
        inner = iter(z.split([width for width, is_inner in pairs if is_inner]))
        outer = iter(r.split([width for width, is_inner in pairs if not is_inner]))
        return [next(inner if is_inner else outer) for is_inner in self._is_inner]

    def merged(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the vector of all sites, ``(p,), (m,) -> (d,)``."""
        return torch.cat(self._coordinates(r, z))

    def merged_rows(self, r: Tensor, z: Tensor) -> Tensor:
        """Return vectors of all sites, ``(n, p), (n, m) -> (n, d)``."""
        rows: Tensor = torch.func.vmap(self.merged)(r, z)
        return rows

    def terms(self, r: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood, ``(n, p), (n, m) -> (n,), (n,)``."""
        both: tuple[Tensor, Tensor] = torch.func.vmap(lambda r, z: self.whole.joint_of_parts(self._coordinates(r, z)))(
            r, z
        )
        return both

    def value(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the log density, ``(n, p), (n, m) -> (n,)``."""
        return torch.stack(self.terms(r, z)).sum(0)

    def slope(self, r: Tensor, z: Tensor, terms: Terms = BOTH) -> tuple[Tensor, ...]:
        """Return the gradient by ``z`` ``(n, m)`` and the value ``(n,)`` of the sum of terms."""

        def total(z: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            both = self.terms(r, z)
            value = both[terms[0]] if len(terms) == 1 else both[0] + both[1]
            return value.sum(), (value,)

        return gradient_and_rest(total, z, r)

    def hessian_product(self, r: Tensor, z: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, ...]:
        """Return the Hessian by ``z`` of the sum of terms times ``v``, its gradient and its value."""

        def along(z: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gradient, value = self.slope(r, z, terms)
            return (gradient * v).sum(), (gradient, value)

        return gradient_and_rest(along, z, r)

    def gradient(self, r: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient by ``r`` at fixed ``z``, ``(n, p)``, and the log density, ``(n,)``."""

        def total(r: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            value = self.value(r, z)
            return value.sum(), (value,)

        return gradient_and_rest(total, r, z)

    def shifted_gradient(self, r: Tensor, z: Tensor, shift: Tensor, terms: Terms = BOTH) -> Tensor:
        """Return the gradient by ``r`` of the sum of terms minus ``shift`` ``(n, m)`` times its slope by ``z``."""

        def total(r: Tensor, z: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gradient, value = self.slope(r, z, terms)
            return (value - (gradient * shift).sum(-1)).sum(), ()

        return gradient_and_rest(total, r, z, shift)[0]

    def prior_terms(self, r: Tensor, z: Tensor) -> dict[str, Tensor]:
        """Return the log prior of each site, ``(p,), (m,)``."""
        return self.whole.prior_terms(self.merged(r, z))

    def log_prior(self, r: Tensor) -> Tensor:
        """Return the log prior of the remaining sites, ``(n, p) -> (n,)``."""

        def one(r: Tensor) -> Tensor:
            terms = self.prior_terms(r, self.filler)
            return torch.stack([terms[site.name] for site in self.sites]).sum()

        value: Tensor = torch.func.vmap(one)(r)
        return value

    def prior(self, r: Tensor) -> RemainingPrior:
        """Return the log prior of the remaining sites with its gradient."""

        def total(r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            value = self.log_prior(r)
            return value.sum(), (value,)

        gradient, value = gradient_and_rest(total, r)
        return RemainingPrior(gradient=gradient, value=value)

    def normal_prior(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the only inner site, ``(n, p) -> (n, m), (n, m, m)``.

        Raises ``ModelError`` where its prior is not multivariate normal.
        """
        (name,) = self.over
        both: tuple[Tensor, Tensor] = torch.func.vmap(
            lambda r: self.whole.normal_prior(name, self._coordinates(r, self.filler))
        )(r)
        return both
