"""The target of draws that were read without it: names, labels and the fingerprint, but no density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from bayeskit._core.page import result_html
from bayeskit._logdensity.labels import DimensionLabels
from bayeskit._logdensity.target import NO_TARGET, Target
from bayeskit.errors import DrawsError


class _NoDensityError(DrawsError, AttributeError):
    """What was asked of a target that is not known; ``hasattr`` is then False."""


class UnknownTarget(Target):
    """A target of which only what is stored beside draws is known; anything else raises ``DrawsError``."""

    has_density = False

    def __init__(
        self,
        labels: DimensionLabels | None = None,
        *,
        names: tuple[str, ...] = (),
        counted: Mapping[str, Tensor] | None = None,
        whole_numbers: frozenset[str] = frozenset(),
        fingerprint: str | None = None,
    ) -> None:
        self._labels = DimensionLabels() if labels is None else labels
        self._names, self._counted, self._whole_numbers = names, dict(counted or {}), whole_numbers
        self._fingerprint = fingerprint

    @property
    def labels(self) -> DimensionLabels:
        return self._labels

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def dimensions(self) -> dict[str, tuple[str | None, ...]]:
        return dict(self._labels.dimensions)

    def counted(self) -> dict[str, Tensor]:
        return self._counted

    def whole_numbers(self) -> frozenset[str]:
        return self._whole_numbers

    def element_names(self) -> dict[str, tuple[str, ...]]:
        return {}

    def fingerprint(self) -> str:
        return self._fingerprint or ""

    def __getattr__(self, name: str) -> NoReturn:
        # Methods of a target use its density, its sites or its engine, none of which is there.
        raise AttributeError(name) if name.startswith("__") else _NoDensityError(NO_TARGET)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _repr_html_(self) -> str:
        return result_html("A target of which only names are known", notes=[NO_TARGET])

    def __repr__(self) -> str:
        return "UnknownTarget()"
