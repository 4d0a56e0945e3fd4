"""Results as one self-contained HTML page: no network, no other file, readable on a phone and in print."""

from __future__ import annotations

import base64
import io
import itertools
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bayeskit.core.folders import write_atomically
from bayeskit.core.page import rendered
from bayeskit.core.statistics import effective_sample_size, r_hat
from bayeskit.draws import Draws
from bayeskit.inference.evidence import EvidenceComparison
from bayeskit.inference.evidence.comparison import comparison_facts, own_seconds
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["posterior_summary", "write_report"]

_MAX_PLOTTED = 12
_MAX_LISTED = 400
_PACKAGES = ("bayeskit", "torch", "pyro-ppl", "numpy", "scipy", "xarray", "arviz", "matplotlib")


def posterior_summary(draws: Draws) -> pd.DataFrame:
    """Summarise every scalar component of every site, deterministic sites included.

    Parameters
    ----------
    draws : Draws
        Draws; without a target, the unconstrained coordinates are summarised.

    Returns
    -------
    DataFrame
        Indexed by the component's name, in model order, with columns ``mean``, ``mcse`` (standard error of
        the mean), ``sd``, ``5 %``, ``95 %``, ``ess`` and ``r_hat``.

    Examples
    --------
    >>> import bayeskit as bk
    >>> target = bk.exact.get("beta_binomial").target()
    >>> draws = bk.sample(target, num_warmup=100, num_samples=200, seed=0)
    >>> list(posterior_summary(draws).columns)
    ['mean', 'mcse', 'sd', '5 %', '95 %', 'ess', 'r_hat']
    """
    return _summary(*_components(draws))


def _summary(names: list[str], values: torch.Tensor) -> pd.DataFrame:
    import pandas as pd

    count = values.shape[-1]
    flat = values.flatten(1)
    sd = flat.std(1)
    ess = effective_sample_size(values) if count >= 8 else torch.full_like(sd, math.nan)
    # NumPy's quantiles: torch's refuse more than 2**24 values.
    low, high = np.quantile(flat.numpy(), [0.05, 0.95], axis=1)
    columns = {
        "mean": flat.mean(1).numpy(),
        "mcse": (sd / ess.sqrt()).numpy(),
        "sd": sd.numpy(),
        "5 %": low,
        "95 %": high,
        "ess": ess.numpy(),
        "r_hat": r_hat(values).numpy() if count >= 4 else np.full(len(names), math.nan),
    }
    return pd.DataFrame(columns, index=pd.Index(names, name="parameter"))


def write_report(
    path: str | Path,
    comparison: EvidenceComparison,
    *,
    title: str,
    target: Target | None = None,
    reference: float | None = None,
    reference_error: float = 0.0,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write an HTML page with the evidence, the posterior and the settings of both.

    Parameters
    ----------
    path : path
        File to write; an existing file is replaced whole or not at all.
    comparison : EvidenceComparison
        Evidence to show. If its ``results`` are empty or its ``draws`` None, the page lacks that part, but has the
        scores and the methods that did not apply.
    title : str
        Heading of the page.
    target : Target, optional
        The sampled target, described in the settings; by default that of the draws.
    reference : float, optional
        Exact or published log evidence for comparison.
    reference_error : float, default 0
        Its standard error, if it is an estimate too.
    settings : mapping, optional
        More rows for the table of settings, such as file names.

    Raises
    ------
    OutputError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from bayeskit.inference.evidence import Evidence, EvidenceComparison
    >>> estimate = Evidence("bridge_sampling", -94.08, 0.004, 8000)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder) / "report.html"
    ...     comparison = EvidenceComparison({"bridge_sampling": estimate}, None, None)
    ...     write_report(page, comparison, title="linreg10")
    ...     page.read_text(encoding="utf-8").startswith("<!doctype html>")
    True
    """
    page = rendered(
        "report.html",
        title=title,
        posterior=None if comparison.draws is None else _posterior(comparison.draws),
        tables=_tables(comparison, target, settings or {}),
        **comparison_facts(comparison, reference, reference_error),
    )
    write_atomically(path, page.encode("utf-8"))


# -- contents -------------------------------------------------------------------------------


def _posterior(draws: Draws) -> dict[str, Any]:
    """Return the text, the rows of the summary and the figures of the chains."""
    names, values = _components(draws)  # once: deterministic sites need the whole model
    summary = _summary(names, values)
    shown = summary.iloc[np.sort(_worst_first(summary)[:_MAX_LISTED])]
    specs = [{"ess": ".0f", "r_hat": ".3f"}.get(column, ".4g") for column in summary.columns]
    diverging = draws.sample_stats.get("diverging")
    text = f"{draws.num_chains} chains of {draws.num_draws} draws"
    if diverging is not None:
        text += f", {int(diverging.sum())} of {draws.num_chains * draws.num_draws} transitions divergent"
    rows = [
        {
            "name": name,
            "cells": list(zip(row, specs, strict=True)),
            "doubtful": row["r_hat"] > 1.05 or not math.isfinite(row["mean"]),
        }
        for name, row in shown.iterrows()
    ]
    return {
        "text": text,
        "columns": list(summary.columns),
        "rows": rows,
        "num_parameters": len(summary),
        "figures": _chain_figures(names, values, summary),
    }


def _tables(
    comparison: EvidenceComparison, target: Target | None, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the settings and the versions of packages."""
    draws = comparison.draws
    target = target or (draws.target if draws is not None else None)
    facts: dict[str, Any] = dict(settings) | dict(comparison.settings)
    if target is not None:
        # At most 20 names, because a run may have hundreds of sites.
        sites = ", ".join(f"{site.name} {tuple(site.shape)}" for site in target.sites[:20])
        facts |= {
            "dimension": target.dim,
            "sites": sites,
            "precision": str(target.dtype).removeprefix("torch."),
        }
        facts["device"] = str(target.device)
    if draws is not None:
        facts["posterior run, seconds"] = f"{draws.seconds:.1f}"
        facts["posterior run, gradients"] = f"{draws.num_gradients}"
    if comparison.ladder is not None:
        facts["tempered ladder, seconds"] = f"{comparison.ladder.draws.seconds:.1f}"
        facts["tempered ladder, gradients"] = f"{comparison.ladder.num_evaluations}"
    facts["estimators alone, seconds"] = f"{own_seconds(comparison):.1f}"
    versions = {"python": platform.python_version()} | _versions() | {"platform": platform.platform(terse=True)}
    return {"Settings": facts, "Versions": versions}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# -- figures --------------------------------------------------------------------------------


def _chain_figures(names: list[str], values: torch.Tensor, summary: pd.DataFrame) -> list[dict[str, Any]]:
    from matplotlib.figure import Figure

    from bayeskit.core.plots import plot_rank, plot_trace

    figures = []
    for index in _worst_first(summary)[:_MAX_PLOTTED]:
        name, chains = names[index], values[index].numpy()
        # Fixed margins: a layout engine would draw every figure twice.
        figure = Figure(figsize=(8.0, 2.1))
        figure.subplots_adjust(left=0.1, right=0.985, bottom=0.22, top=0.96, wspace=0.28)
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
        plot_trace(chains, _plain(name), left)
        plot_rank(chains, "", right)
        ratio = float(summary["r_hat"].iloc[index])
        figures.append({"name": name, "source": _as_png(figure), "r_hat": ratio})
    return figures


def _plain(text: str) -> str:
    """Escape dollar signs in a site's name, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def _as_png(figure: Figure) -> str:
    from PIL import Image

    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    # A palette is enough for a few lines and a third of the size.
    Image.open(drawn).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE).save(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


# -- numbers --------------------------------------------------------------------------------


def _components(draws: Draws) -> tuple[list[str], torch.Tensor]:
    """Return the name of every scalar component and its chains, ``(components, chains, draws)``."""
    if draws.target is None:
        sites = {"u": draws.unconstrained}
    else:
        sites = draws.values()
    names: list[str] = []
    columns = []
    for site, value in sites.items():
        shape = value.shape[2:]
        indices = itertools.product(*(range(n) for n in shape))
        names += [f"{site}[{','.join(map(str, index))}]" if index else site for index in indices]
        columns.append(value.detach().cpu().to(torch.float64).reshape(*value.shape[:2], -1).movedim(-1, 0))
    return names, torch.cat(columns)


def _worst_first(summary: pd.DataFrame) -> np.ndarray:
    """Return positions by falling R-hat; a chain with NaN counts as worst."""
    return np.argsort(-summary["r_hat"].fillna(np.inf).to_numpy(), kind="stable")
