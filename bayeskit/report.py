"""Results as one self-contained HTML page: no network, no other file, readable on a phone and in print."""

from __future__ import annotations

import itertools
import math
import numbers
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bayeskit._core.convergence import stands_still
from bayeskit._core.folders import write_atomically
from bayeskit._core.page import Cell, Number, PageTable, measured, number, rendered
from bayeskit._core.statistics import effective_sample_size, r_hat
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import BayeskitError, SettingsError
from bayeskit.inference.evidence import EvidenceComparison
from bayeskit.inference.evidence._comparison import comparison_facts, own_seconds

if TYPE_CHECKING:
    import pandas as pd

    from bayeskit._core.plots import Drawing
    from bayeskit.inference.samplers._ladder import Ladder

__all__ = ["posterior_section", "posterior_summary", "versions", "write_page", "write_report"]

_MAX_PLOTTED = 12
_MAX_COMPARED = 12  # parameters whose posterior is plotted beside the prior
_PRIOR_DRAWS = 4000
_TITLE = 32  # characters of the title of a small plot
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
    return _summary(*_components(draws), stands_still(draws.unconstrained).any(-1))


def _summary(names: list[str], values: torch.Tensor, still: torch.Tensor | None = None) -> pd.DataFrame:
    """Return the table of components ``(k, chains, draws)``; ``still (chains,)`` as of :func:`without_stillness`."""
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
    table = pd.DataFrame(columns, index=pd.Index(names, name="parameter"))
    if still is not None and bool(still.any()):
        constant = (values == values[..., :1]).all(-1)[:, still.cpu()].any(-1).numpy()
        table.loc[constant, ["mcse", "ess", "r_hat"]] = np.nan, 0.0, np.nan
    return table


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
    facts = comparison_facts(comparison, reference, reference_error)
    parts = {"answer": "Log evidence"} if comparison.results else {}
    if comparison.results or comparison.scores or comparison.refused:
        parts["estimates"] = "Estimates"
    if comparison.ladder is not None:
        facts["figures"]["path"] = _path(comparison.ladder)
        parts["path"] = "From prior to posterior"
    if comparison.draws is not None:
        parts |= {"posterior": "Posterior", "chains": "Chains"}
    page = rendered(
        "report.html",
        title=title,
        parts=parts | {"settings": "Settings", "versions": "Versions"},
        posterior=None if comparison.draws is None else _posterior(comparison.draws),
        tables=_tables(comparison, target, settings or {}),
        **facts,
    )
    write_atomically(path, page.encode("utf-8"))


def write_page(path: str | Path, *, title: str, sections: Mapping[str, Any]) -> None:
    """Write a whole analysis as one HTML page: texts, tables and figures under headings.

    The page needs no network and no other file, and can be sent. It ends with the versions of the packages.

    Parameters
    ----------
    path : path
        File to write; an existing file is replaced whole or not at all. Its folder must exist.
    title : str
        Heading of the page.
    sections : mapping of str to content
        By heading, in order: a text, a ``DataFrame``, a pair ``(Figure, caption)``, or a sequence of these. A text is
        one paragraph, in which ``+-`` becomes a sign. A table shows its index unless that is a plain count of rows;
        columns of strings are shown as they are, numbers to three digits or, from a thousand on, as whole numbers.

    Raises
    ------
    SettingsError
        If there are no sections, or one has something else.
    OutputError
        If the file cannot be written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pandas as pd
    >>> from bayeskit.report import write_page
    >>> table = pd.DataFrame({"cost": [812.4, 2050.0]}, index=["wait", "act"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = pathlib.Path(folder) / "page.html"
    ...     write_page(page, title="What to do", sections={"Answer": ["Wait: 812 +- 9.", table]})
    ...     "Wait: 812 ± 9." in page.read_text(encoding="utf-8")
    True
    """
    if not isinstance(sections, Mapping) or not sections:
        raise SettingsError("sections: none is given. Remedy: give a mapping of headings to texts, tables and figures.")
    parts = []
    for place, (heading, content) in enumerate(sections.items(), start=1):
        listed = list(content) if isinstance(content, Sequence) and not _is_one_item(content) else [content]
        parts.append(
            {"anchor": f"part-{place}", "heading": heading, "contents": [_item(str(heading), one) for one in listed]}
        )
    page = rendered("own_page.html", title=title, parts=parts, versions=versions())
    write_atomically(path, page.encode("utf-8"))


# -- contents -------------------------------------------------------------------------------


def _is_one_item(content: Any) -> bool:
    """Tell a text or a pair of figure and caption from a sequence of items."""
    from matplotlib.figure import Figure

    is_pair = isinstance(content, tuple) and len(content) == 2 and isinstance(content[0], Figure)
    return isinstance(content, str) or (is_pair and isinstance(content[1], str))


def _item(heading: str, one: Any) -> tuple[str, Any]:
    """Return what the template `own_page.html` takes for a text, a table or a figure."""
    import pandas as pd

    from bayeskit._core.plots import Drawing

    if isinstance(one, str):
        return "text", one
    if isinstance(one, pd.DataFrame):
        return "table", _own_table(heading, one)
    if _is_one_item(one):
        figure, caption = one
        return "figure", Drawing.of(figure, caption, caption)
    raise SettingsError(
        f"sections: {heading!r} has {type(one).__name__}, which a page cannot show. Remedy: give a text, a DataFrame, "
        "or a pair (Figure, caption); of other results, their str() or to_pandas()."
    )


def _own_table(caption: str, frame: pd.DataFrame) -> PageTable:
    """Return a data frame as a table; what stands first names the row."""
    import pandas as pd

    shown = frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()
    rows: list[list[Cell]] = []
    for row in shown.itertuples(index=False, name=None):
        first, *others = (_own_cell(value) for value in row)
        rows.append([first.text if isinstance(first, Number) else first, *others])
    named = ["" if column == "index" and shown is not frame else str(column) for column in shown.columns]
    return PageTable(caption, named, rows)


def _own_cell(value: Any) -> Cell:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return number(int(value), "d")
    if isinstance(value, numbers.Real):
        real = float(value)
        return number(real, ",.0f" if abs(real) >= 1000 else ".3g")
    return str(value)


def _posterior(draws: Draws) -> dict[str, Any]:
    """Return the text, the table, the pictures and the chains of the posterior."""
    names, values = _components(draws)  # once: deterministic sites need the whole model
    labels = _labels(names, draws.target)
    diverging = draws.sample_stats.get("diverging")
    text = f"{draws.num_chains} chains of {draws.num_draws} draws"
    if diverging is not None:
        text += f", {int(diverging.sum())} of {draws.num_chains * draws.num_draws} transitions divergent"
    pictures = [*_against_the_prior(draws, labels, names, values), *_picture(draws)]
    return posterior_section(text, names, values, labels, pictures, stands_still(draws.unconstrained).any(-1))


def posterior_section(
    text: str,
    names: list[str],
    values: torch.Tensor,
    labels: list[str] | None = None,
    pictures: Sequence[Drawing] = (),
    still: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return what a page shows of a posterior: a text, a table, pictures and chains.

    Parameters
    ----------
    text : str
        Sentence without its full stop.
    names : list of str
        Names of the components.
    values : Tensor
        Shape `(components, chains, draws)`.
    labels : list of str, optional
        Longer names.
    pictures : sequence of Drawing, optional
    still : Tensor, optional
        Chains in which a coordinate never moves, shape `(chains,)`, bool: components that are constant there have no
        R-hat and the effective size zero.

    Returns
    -------
    dict
        What the template `report.html` takes as `posterior`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.report import posterior_section
    >>> values = torch.randn(1, 4, 100, generator=torch.Generator().manual_seed(0))
    >>> posterior_section("A slope", ["slope"], values)["text"]
    'A slope'
    """
    labels, summary = labels or names, _summary(names, values, still)
    shown = np.sort(_worst_first(summary)[:_MAX_LISTED])
    table = summary.iloc[shown]
    doubtful = [
        labels[i] for i in shown if not summary["r_hat"].iloc[i] <= 1.05 or not math.isfinite(summary["mean"].iloc[i])
    ]
    notes = []
    if len(table) < len(summary):
        notes.append(f"The table has the {len(table)} of {len(summary)} parameters with the largest R-hat.")
    if doubtful and values.shape[-1] >= 4:
        more = ", ..." if len(doubtful) > 10 else ""
        notes.append(f"Not converged, with an R-hat above 1.05 or none: {', '.join(doubtful[:10])}{more}.")
    rows = [[labels[i], *_row(one)] for i, (_, one) in zip(shown, table.iterrows(), strict=True)]
    columns = ["parameter", *summary.columns]
    return {
        "text": text,
        "table": PageTable("Posterior of every parameter", columns, rows, note=" ".join(notes)),
        "pictures": list(pictures),
        "chains": _chain_figures(labels, values, summary),
    }


def _row(one: pd.Series) -> list[Number]:
    """Return the cells of a parameter: the mean to the digits of its error, quantiles to those of the spread."""
    low, high = (Number(measured(one[end], one["sd"])[0].text, one[end]) for end in ("5 %", "95 %"))
    return [
        *measured(one["mean"], one["mcse"]),
        Number(f"{one['sd']:#.3g}".rstrip(".") if math.isfinite(one["sd"]) else "–", one["sd"]),
        low,
        high,
        number(one["ess"], ".0f"),
        number(one["r_hat"], ".3f"),
    ]


def _labels(names: list[str], target: Any) -> list[str]:
    """Return the names of components, with what the model calls them."""
    known = target.element_names() if isinstance(target, Target) else {}
    called = {f"{site}[{i}]": name for site, of in known.items() for i, name in enumerate(of)}
    return [f"{name} {called[name]}" if name in called else name for name in names]


def _tables(
    comparison: EvidenceComparison, target: Target | None, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the settings and the versions of packages."""
    draws = comparison.draws
    target = target or (draws.target if draws is not None else None)
    facts: dict[str, Any] = dict(settings) | dict(comparison.settings)
    if target is not None and target.has_density:
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
    return {"Settings": facts, "Versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of those that it computes with, and the platform."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"platform": platform.platform(terse=True)}


# -- figures --------------------------------------------------------------------------------


def _against_the_prior(draws: Draws, labels: list[str], names: list[str], values: torch.Tensor) -> list[Drawing]:
    """Return densities of the prior and the posterior of the first parameters; nothing without prior draws."""
    from bayeskit._core.plots import Drawing, new_figure, plot_prior_and_posterior

    target = draws.target
    if not isinstance(target, Target) or not (target.has_density and target.can_sample_prior):
        return []
    try:
        u = target.sample_prior(_PRIOR_DRAWS, seed=0)
        of_prior = dict(zip(*_flat({s: v.unsqueeze(0) for s, v in target.constrain(u).items()}, target), strict=True))
    except BayeskitError:
        return []  # such as flat priors
    finite = values.isfinite().all(-1).all(-1)
    chosen = [
        i for i, name in enumerate(names) if name in of_prior and finite[i] and bool(of_prior[name].isfinite().all())
    ]
    shown = chosen[:_MAX_COMPARED]
    if not shown:
        return []
    rows = -(-len(shown) // 2)
    figure = new_figure(0.3 + 1.05 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for ax, i in itertools.zip_longest(axes, shown):
        if i is None:
            ax.set_axis_off()
            continue
        title = labels[i].removeprefix(names[i]).strip() or names[i]
        title = title if len(title) <= _TITLE else title[: _TITLE - 3] + "..."
        plot_prior_and_posterior(of_prior[names[i]].flatten().numpy(), values[i].flatten().numpy(), _plain(title), ax)
    first = f" of the first {len(shown)} of {len(chosen)} parameters" if len(shown) < len(chosen) else ""
    caption = f"Prior (line) and posterior (filled){first}. Axes end where a posterior would be too narrow."
    alt = f"Densities of prior and posterior of {', '.join(labels[i] for i in shown)}; the table below has the numbers"
    return [Drawing.of(figure, alt, caption)]


def _picture(draws: Draws) -> list[Drawing]:
    """Return what a model draws of itself at the posterior mean."""
    from bayeskit._core.plots import Drawing, new_figure

    target = draws.target
    if not isinstance(target, Target) or not target.has_density:
        return []
    mean = {site: value.flatten(0, 1).mean(0) for site, value in draws.values(deterministic=False).items()}
    figure = new_figure(0.6 + 0.16 * max((value.numel() for value in mean.values()), default=1))
    said = target.plot_values(mean, figure.subplots())
    return [] if said is None else [Drawing.of(figure, said[0], f"At the posterior mean; {said[1]}.")]


def _path(ladder: Ladder) -> Drawing:
    """Return the log likelihood along the ladder."""
    from bayeskit._core.plots import Drawing, new_figure
    from bayeskit.inference.evidence._plots import plot_path

    figure = new_figure(3.0)
    plot_path(ladder, figure.subplots())
    ends = [float(ladder.log_likelihood[place].median()) for place in (0, -1)]
    alt = f"Log likelihood against inverse temperature: it rises from a median of {ends[0]:.6g} to {ends[1]:.6g}"
    caption = (
        f"Medians and central 90 % of the draws at {len(ladder.beta)} temperatures. The log evidence is the area under "
        "the mean, on a linear axis; a jump is a change of phase, where temperatures should be close."
    )
    return Drawing.of(figure, alt, caption)


def _chain_figures(labels: list[str], values: torch.Tensor, summary: pd.DataFrame) -> list[Drawing]:
    from matplotlib.figure import Figure

    from bayeskit._core.plots import Drawing, plot_rank, plot_trace

    figures = []
    for index in _worst_first(summary)[:_MAX_PLOTTED]:
        chains = values[index].numpy()
        # Fixed margins: a layout engine would draw every figure twice.
        figure = Figure(figsize=(8.0, 2.1))
        figure.subplots_adjust(left=0.1, right=0.985, bottom=0.22, top=0.96, wspace=0.28)
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
        plot_trace(chains, _plain(str(summary.index[index])), left)
        plot_rank(chains, "", right)
        ratio = float(summary["r_hat"].iloc[index])
        caption = f"{labels[index]}, R-hat {number(ratio, '.3f').text}"
        alt = f"Trace and ranks of {labels[index]}"
        figures.append(Drawing.of(figure, alt, caption, is_broad=True, as_pixels=True))
    return figures


def _plain(text: str) -> str:
    """Escape dollar signs in a site's name, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


# -- numbers --------------------------------------------------------------------------------


def _components(draws: Draws) -> tuple[list[str], torch.Tensor]:
    """Return the name of every scalar component and its chains, ``(components, chains, draws)``."""
    known = draws.target.has_density or draws.sites
    return _flat(draws.values() if known else {"u": draws.unconstrained}, draws.target)


def _flat(sites: Mapping[str, torch.Tensor], target: Target) -> tuple[list[str], torch.Tensor]:
    names: list[str] = []
    columns = []
    labels = target.labels
    for site, value in sites.items():
        names += labels.of(site, value.shape[2:])
        columns.append(value.detach().cpu().to(torch.float64).reshape(*value.shape[:2], -1).movedim(-1, 0))
    return names, torch.cat(columns)


def _worst_first(summary: pd.DataFrame) -> np.ndarray:
    """Return positions by falling R-hat; a chain with NaN counts as worst."""
    return np.argsort(-summary["r_hat"].fillna(np.inf).to_numpy(), kind="stable")
