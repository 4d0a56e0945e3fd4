"""Data and pointwise log likelihoods as ArviZ takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError


def pointwise_log_likelihood(target: Target, u: Tensor) -> dict[str, Tensor]:
    """Return the log likelihood of each datum, ``{site: (chains, draws, *shape)}``, nothing where it is not known."""
    if not target.has_density:
        return {}
    try:
        return target.pointwise_log_likelihood(u)
    except ModelError:
        return {}  # observations coupled by a summed-out site, or a target made from functions


class DataForArviz:
    """What belongs to data, as ArviZ takes it: without those that a mask leaves out, and whole numbers as such."""

    def __init__(
        self,
        target: Target,
        names: Mapping[str, tuple[str | None, ...]] | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        names, coords = names or {}, coords or {}
        self._counted, self._whole = target.counted(), target.whole_numbers()
        self.names, self.coords = dict(names), dict(coords)
        for site, counted in self._counted.items():
            own = names.get(site, ())
            along, rest = own[: counted.dim()], own[counted.dim() :]
            # Along one plate the data keep its labels; other data have their indices as labels.
            labels = coords.get(along[0]) if len(along) == 1 and along[0] is not None else None
            places = counted.nonzero().tolist()
            if labels is not None and len(labels) == len(counted):
                self.coords[f"{site}_datum"] = [labels[i] for (i,) in places]
            else:
                one = counted.dim() == 1
                self.coords[f"{site}_datum"] = [i[0] if one else ",".join(map(str, i)) for i in places]
            self.names[site] = (f"{site}_datum", *rest)

    def counted(self, values: Mapping[str, Tensor], first: int = 2) -> dict[str, Tensor]:
        """Return the values of data that count, from dimension ``first`` on; all of a site without a mask."""
        found = {}
        for name, x in values.items():
            counted = self._counted.get(name)
            if counted is not None:
                last = first + counted.dim()
                places = counted.flatten().nonzero().flatten().to(x.device)
                x = x.reshape(*x.shape[:first], -1, *x.shape[last:]).index_select(first, places)
            found[name] = x
        return self.whole(found)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values, those of discrete sites as whole numbers."""
        return {
            name: x.to(torch.int64) if name in self._whole and bool((x.double() % 1 == 0).all()) else x
            for name, x in values.items()
        }
