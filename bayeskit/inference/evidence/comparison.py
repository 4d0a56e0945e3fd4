"""Estimates of one log evidence side by side: table, plot, page, file and verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import xarray as xr

from bayeskit._arviz import as_inference_data, plain_attributes, write_netcdf
from bayeskit._files import write_atomically
from bayeskit.draws import Draws
from bayeskit.errors import UnknownNameError
from bayeskit.inference.evidence.predictive.result import PredictiveScore
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.verdict import Verdict, judge
from bayeskit.inference.samplers import Ladder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "method",
    "log_evidence",
    "standard_error",
    "num_evaluations",
    "seconds",
    "trusted",
    "warnings",
    "predictive_score",
)


@dataclass(frozen=True)
class EvidenceComparison:
    """Estimates of one log evidence by several methods.

    Attributes
    ----------
    results : dict of Evidence
        By method name. A method that failed is there with NaN and its reason.
    draws : Draws or None
        The shared posterior draws.
    ladder : Ladder or None
        The shared tempered ladder.
    settings : dict
        Seed and budget.
    scores : dict of PredictiveScore
        By method name. They say how well single observations are foretold, and are no log evidence.
    refused : dict of str
        Methods that do not apply to the target, and why.
    sources : dict of frozenset of str
        What each method worked on.
    part_seconds : dict of float
        What each shared part took.
    notes : tuple of str
        What to know of the target, such as where constants of its density may be missing.
    """

    results: dict[str, Evidence]
    draws: Draws | None
    ladder: Ladder | None
    settings: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, PredictiveScore] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sources: Mapping[str, frozenset[str]] = field(default_factory=dict)
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, method: str) -> Evidence:
        if method in self.refused:
            raise UnknownNameError(f"{method!r} does not apply to this target: {self.refused[method]}")
        if method in self.scores:
            raise UnknownNameError(f"{method!r} is a predictive score, no log evidence; see scores[{method!r}]")
        if method not in self.results:
            raise UnknownNameError(f"{method!r} was not run; there are: {', '.join(self.results)}")
        return self.results[method]

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self.results.values())

    @cached_property
    def verdict(self) -> Verdict:
        """What the estimates amount to: the agreed value, who disagrees, who does not trust itself and why."""
        from bayeskit.inference.evidence.methods import METHODS

        sources = {name: METHODS[name].source for name in self.results if name in METHODS}
        return judge(self, sources=sources, refused=self.refused, notes=self.notes)

    def to_pandas(self) -> pd.DataFrame:
        """Return the table, one row a method.

        Columns are ``method``, ``log_evidence``, ``standard_error``, ``num_evaluations``, ``seconds``, ``trusted``,
        ``warnings`` and ``predictive_score``, which only scores have. Methods that do not apply come last.
        """
        rows: list[tuple[Any, ...]] = [
            (z.method, z.log_evidence, z.standard_error, *_spent(z), math.nan) for z in self.results.values()
        ]
        rows += [(s.method, math.nan, s.standard_error, *_spent(s), s.predictive_score) for s in self.scores.values()]
        rows += [
            (name, math.nan, math.nan, 0, 0.0, False, f"does not apply: {reason}", math.nan)
            for name, reason in self.refused.items()
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def to_csv(self, path: str | Path) -> None:
        """Write the table, whole or not at all.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_atomically(path, self.to_pandas().to_csv(index=False, float_format="%.10g").encode())

    def to_datasets(self) -> dict[str, xr.Dataset]:
        """Return the group ``evidence``, in dimension ``estimator``, and those of the posterior draws if there are."""
        groups = {} if self.draws is None else self.draws.to_datasets()
        table = self.to_pandas()
        columns = {
            name: ("estimator", table[name].to_numpy()) for name in COLUMNS[1:] if name not in ("trusted", "warnings")
        }
        columns["trusted"] = ("estimator", table["trusted"].to_numpy().astype("int8"))  # netCDF has no booleans
        columns["warnings"] = ("estimator", table["warnings"].to_numpy().astype(object))
        facts = {"verdict": str(self.verdict)} | {k: v for k, v in self.settings.items() if v is not None}
        # Not called "method", which is an argument of xarray's sel.
        names = {"estimator": table["method"].to_numpy().astype(object)}
        return groups | {"evidence": xr.Dataset(columns, coords=names, attrs=plain_attributes(facts))}

    def to_arviz(self) -> Any:
        """Return the groups for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x."""
        return as_inference_data(self.to_datasets())

    def to_netcdf(self, path: str | Path) -> None:
        """Write estimates and posterior draws as netCDF, whole or not at all.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_netcdf(self.to_datasets(), path)

    def to_html(
        self, path: str | Path | None = None, reference: float | None = None, reference_error: float = 0.0
    ) -> str:
        """Return the table, the plot and the verdict as a page that needs no other file; write it if there is a path.

        Parameters
        ----------
        path : path, optional
        reference : float, optional
            An exact or published value to compare with.
        reference_error : float, default 0
            Its standard error, if it is an estimate too.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        from bayeskit.inference.evidence.page import comparison_page

        page = comparison_page(self, reference, reference_error)
        if path is not None:
            write_atomically(path, page.encode("utf-8"))
        return page

    def plot(self, reference: float | None = None, ax: Axes | None = None) -> Axes:
        """Plot the estimates with 95 % intervals; untrusted ones are hollow.

        Parameters
        ----------
        reference : float, optional
            An exact or published value to draw as a line.
        ax : Axes, optional
        """
        from bayeskit._plots import plot_evidence

        return plot_evidence(list(self), reference, ax)

    def _repr_html_(self) -> str:
        from bayeskit.inference.evidence.page import notebook_view

        return notebook_view(self)

    def __str__(self) -> str:
        lines = [str(z) for z in self.results.values()] + [str(s) for s in self.scores.values()]
        lines += [f"{', '.join(names)}: does not apply: {why}" for why, names in by_reason(self.refused).items()]
        return "\n".join([*lines, *([str(self.verdict)] if self.results else []), *self.notes])


def by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the methods that do not apply by the reason, which several may share.

    Examples
    --------
    >>> by_reason({"gamma_laplus": "no", "chib": "nor this", "lognormal_laplus": "no"})
    {'no': ['gamma_laplus', 'lognormal_laplus'], 'nor this': ['chib']}
    """
    together: dict[str, list[str]] = {}
    for method, reason in refused.items():
        together.setdefault(reason, []).append(method)
    return together


def _spent(z: Evidence | PredictiveScore) -> tuple[int, float, bool, str]:
    return z.num_evaluations, z.seconds, z.trusted, "; ".join(z.warnings)
