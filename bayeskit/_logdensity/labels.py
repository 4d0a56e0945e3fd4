"""Names of the dimensions of sites, and labels along them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bayeskit._core.inputs import unknown_name
from bayeskit._logdensity.pyro_density import Site
from bayeskit.errors import DataError, SettingsError, ShapeError

#: The name along each dimension of a value, None where it has none.
Dimensions = Mapping[str, tuple[str | None, ...]]


@dataclass(frozen=True)
class DimensionLabels:
    """Names of dimensions by site, and labels by dimension."""

    dimensions: Dimensions = field(default_factory=dict)
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def of(self, name: str, shape: Sequence[int]) -> list[str]:
        """Return the name of each element of a value, such as ``effect[Minnesota]``, in the order of its memory."""
        if not len(shape):
            return [name]
        own = self.dimensions.get(name, ())
        if len(own) != len(shape):
            own = (None,) * len(shape)
        along = [self._along(dim, size) for dim, size in zip(own, shape, strict=True)]
        return [f"{name}[{', '.join(str(x[i]) for x, i in zip(along, at, strict=True))}]" for at in np.ndindex(*shape)]

    def _along(self, dimension: str | None, size: int) -> Sequence[Any]:
        found = self.coords.get(dimension, ()) if dimension is not None else ()
        return found if len(found) == size else range(size)


def with_names(dimensions: Dimensions, given: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str | None, ...]]:
    """Return dimensions with names ``given`` to the last ones of values; a typed error if these do not fit."""
    names = dict(dimensions)
    _require_mapping("dims", given)
    for name, last in (given or {}).items():
        own = names.get(name)
        if own is None:
            raise unknown_name("site or argument", name, list(names))
        if isinstance(last, str) or len(last) > len(own):
            raise ShapeError(f"dims names {last!r} as dimensions of site {name!r}, which has {len(own)}")
        names[name] = (*own[: len(own) - len(last)], *last)
    return names


def _require_mapping(name: str, given: object) -> None:
    if not isinstance(given, Mapping | None):
        raise SettingsError(f"{name} must be a mapping, such as {{'state': [...]}}, not a {type(given).__name__}")


def sizes_of(dimensions: Dimensions, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the size of each dimension that has a name."""
    return {
        dimension: size
        for name, shape in shapes.items()
        for dimension, size in zip(dimensions.get(name, ()), shape, strict=False)
        if dimension is not None
    }


def checked_coords(
    coords: Mapping[str, Collection[Any]] | None, sizes: Mapping[str, int]
) -> dict[str, tuple[Any, ...]]:
    """Return labels by dimension; a typed error for an unknown dimension, another number of labels, or equal ones."""
    found: dict[str, tuple[Any, ...]] = {}
    _require_mapping("coords", coords)
    for dimension, given in (coords or {}).items():
        labels = tuple(np.asarray(given).tolist()) if hasattr(given, "__array__") else tuple(given)
        if dimension not in sizes:
            raise unknown_name("plate or dimension", dimension, list(sizes))
        if len(labels) != sizes[dimension]:
            raise ShapeError(
                f"coords has {len(labels)} labels for dimension {dimension!r}, whose size is {sizes[dimension]}"
            )
        if len(set(labels)) < len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise DataError(f"coords has the label {twice!r} of dimension {dimension!r} twice; make the labels unique")
        found[dimension] = labels
    return found


def unconstrained_names(sites: Sequence[Site], labels: DimensionLabels | None = None) -> tuple[str, ...]:
    """Return a readable name for each unconstrained coordinate, such as ``theta[2]`` or ``effect[Minnesota]``."""
    names: list[str] = []
    for site in sites:
        known = labels if labels is not None and site.unconstrained_shape == site.shape else DimensionLabels()
        names += known.of(site.name, site.unconstrained_shape)
    return tuple(names)
