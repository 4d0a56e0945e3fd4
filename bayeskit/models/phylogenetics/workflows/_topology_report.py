"""A search for topologies as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributions import Distribution

from bayeskit.errors import SettingsError
from bayeskit.extend import (
    Cell,
    EvidenceComparison,
    PageTable,
    comparison_facts,
    number,
    posterior_section,
    rendered,
    versions,
    write_atomically,
)
from bayeskit.models.phylogenetics import (
    Partition,
    SiteRates,
    asdsf,
    majority_rule_consensus,
    plot_credible_set,
    plot_split_frequencies,
    split_frequencies,
)
from bayeskit.models.phylogenetics._parameters import FreeParameters, PartitionParameters
from bayeskit.models.phylogenetics._summaries import AnnotatedTree
from bayeskit.models.phylogenetics.workflows._topology_evidence import TopologyEvidence
from bayeskit.models.phylogenetics.workflows._topology_inference import TopologyInference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bayeskit.extend import Drawing

_MOST_TOPOLOGIES, _MOST_SPLITS = 10, 60
#: Pairs of runs whose split frequencies are plotted.
_MOST_PAIRS = 3


def write_topology_report(
    path: str | Path,
    search: TopologyInference,
    evidence: TopologyEvidence | None = None,
    *,
    title: str,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write an HTML page with consensus, topologies, convergence, evidence, parameters, and the model.

    Parameters
    ----------
    path : path
        File to write; an existing file is replaced whole or not at all.
    search : TopologyInference
    evidence : TopologyEvidence, optional
        Of this search. Without it, the page has the evidence of the search's temperatures, if the search gives it.
    title : str
        Heading of the page.
    settings : mapping, optional
        More rows for the table of settings, such as the file and the command.

    Raises
    ------
    SettingsError
        If `evidence` is that of another search.
    OutputError
        If the file cannot be written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from bayeskit.models.phylogenetics import Alignment
    >>> from bayeskit.models.phylogenetics.workflows import infer_topologies
    >>> alignment = Alignment.from_sequences({"A": "AACCAGT", "B": "AACCGGT", "C": "AGCTAGA", "D": "AGCTACA"})
    >>> search = infer_topologies(alignment, num_warmup=50, num_samples=50, num_temperatures=4, progress=False)
    >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
    >>> write_topology_report(page, search, title="Four taxa")
    >>> "Split frequencies" in page.read_text(encoding="utf-8")
    True
    """
    if evidence is not None and evidence.search is not search:
        raise SettingsError("evidence: it belongs to another search. Remedy: give topology_evidence(search).")
    if evidence is not None:
        comparison = evidence.table
    else:
        known = {"bidirectional_ratio": search.evidence} if search.is_warm else {}
        comparison = EvidenceComparison(known, None, None)
    sections = [_consensus(search), _topologies(search), _convergence(search), _splits(search)]
    parts = {section.anchor: section.heading for section in sections}
    if comparison.results:
        parts |= {"answer": "Log evidence", "estimates": "Estimates"}
    page = rendered(
        "trees.html",
        home=__package__,
        title=title,
        trees=sections,
        parts=parts
        | {"posterior": "Parameters", "chains": "Chains", "model": "Model", "run": "Run", "versions": "Versions"},
        posterior=_parameters(search),
        tables={"Model": _model(search), "Run": dict(settings or {}) | _run(search), "Versions": versions()},
        **comparison_facts(comparison),
    )
    write_atomically(path, page.encode("utf-8"))


def draw_consensus(tree: AnnotatedTree) -> Figure:
    """Return a figure of a consensus tree, as high as it has taxa."""
    from bayeskit.extend import new_figure

    figure = new_figure(0.8 + 0.22 * tree.num_taxa)
    tree.plot(figure.subplots())
    return figure


class _Section(NamedTuple):
    """A part of the page."""

    anchor: str
    heading: str
    texts: Sequence[str] = ()
    figures: Sequence[Drawing] = ()
    tables: Sequence[PageTable] = ()
    is_bad: bool = False


def _convergence(search: TopologyInference) -> _Section:
    """Return whether the runs agree, by each diagnostic."""
    sizes, trips = search.split_effective_sizes, int(search.exchange.round_trips.sum())
    rows: list[list[Cell]] = []
    if len(search.samples) > 1:
        deviations = asdsf(search.samples)
        count = len(deviations.standard_deviations)
        rows.append(["splits with a frequency of at least 0.1 in a run", number(count, "d")])
        if count:
            rows.append(["average standard deviation of split frequencies (ASDSF)", number(deviations.average, ".4f")])
            rows.append(["largest standard deviation of a split frequency", number(deviations.maximum, ".4f")])
    rows.append(["splits with a frequency from 0.05 to 0.95", number(len(sizes), "d")])
    if len(sizes):
        rows.append(["smallest effective sample size of such a split", number(float(sizes.min()), ".0f")])
        rows.append(["median effective sample size of such a split", number(float(sizes.median()), ".0f")])
    rows += [[f"R-hat of {name}", number(value, ".3f")] for name, value in search.r_hat.items()]
    rows.append(["round trips between the ends of the temperatures", number(trips, "d")])
    rows.append(
        ["lowest exchange rate of neighbouring temperatures", number(1 - float(search.exchange.rejection.max()), ".2f")]
    )
    moves: list[list[Cell]] = [
        [name.replace("_", " "), number(tried, "d"), number(rate if tried else math.nan, ".3f")]
        for name, (tried, rate) in search.moves.items()
    ]
    return _Section(
        "convergence",
        "Convergence",
        tables=[
            PageTable("Diagnostics", ["diagnostic", "value"], rows),
            PageTable("Moves at all temperatures", ["move", "proposed", "accepted"], moves),
        ],
    )


def _consensus(search: TopologyInference) -> _Section:
    """Return the majority-rule consensus, and whether the runs agree."""
    from bayeskit.extend import Drawing

    runs, draws = len(search.samples), search.log_likelihood.shape[-1]
    said = f"{runs} runs of {draws} trees" if runs > 1 else f"One run of {draws} trees"
    texts = [f"{said}: converged." if search.is_converged else f"{said}: NOT CONVERGED."]
    texts += [f"{problem[0].upper()}{problem[1:]}." for problem in search.problems]
    tree = majority_rule_consensus(search.sample)
    alt = f"Consensus tree, in Newick format: {tree.to_newick()}"
    caption = (
        "Splits in more than half of the trees, with their posterior probabilities and mean branch lengths in expected "
        "substitutions per site. The position of the root has no meaning."
    )
    drawn = Drawing.of(draw_consensus(tree), alt, caption)
    return _Section("consensus", "Consensus tree", texts, [drawn], is_bad=not search.is_converged)


def _topologies(search: TopologyInference) -> _Section:
    """Return the most probable topologies."""
    from bayeskit.extend import Drawing, new_figure

    sample = search.sample
    table = sample.to_pandas()
    shown = table.head(_MOST_TOPOLOGIES)
    rows = [
        [f"{place}", number(row.weight, ".4f"), number(row.cumulative, ".4f"), row.newick]
        for place, row in enumerate(shown.itertuples(), start=1)
    ]
    note = f"The first {len(shown)} of {len(table)} topologies." if len(shown) < len(table) else ""
    columns = ["topology", "probability", "sum", "Newick"]
    drawn = []
    if len(table) > 1:
        figure = new_figure(2.8)
        chosen = sample.credible_set()
        plot_credible_set(sample, ax=figure.subplots())
        alt = f"Probabilities of {len(chosen)} topologies: {shown.weight[0]:.3f} for the first; the table has more"
        drawn.append(Drawing.of(figure, alt, "The 95 % credible set of topologies."))
    text = f"{len(table)} {'topology' if len(table) == 1 else 'topologies'} among {sample.num_samples} trees."
    table_of_all = PageTable("Most probable topologies", columns, rows, note=note)
    return _Section("topologies", "Topologies", [text], drawn, [table_of_all])


def _splits(search: TopologyInference) -> _Section:
    """Return the frequencies of splits, of run against run."""
    from bayeskit.extend import Drawing, new_figure

    runs = search.samples
    if len(runs) > 1:
        frame = asdsf(runs, 0.0).to_pandas()
    else:
        frame = split_frequencies(search.sample).to_pandas()
    shown = frame.head(_MOST_SPLITS)
    numbered = [f"sample_{run}" for run in range(len(runs))]
    more = ["standard_deviation"] if len(runs) > 1 else []
    rows = [
        [row["split"].replace("|", ", "), *(number(row[name], ".4f") for name in (*numbered, *more))]
        for row in shown.to_dict("records")
    ]
    columns = ["split", *(f"run {run + 1}" for run in range(len(runs))), *("standard deviation" for _ in more)]
    note = f"The {len(shown)} most frequent of {len(frame)} splits." if len(shown) < len(frame) else ""
    drawn = []
    for one, other in list(combinations(range(len(runs)), 2))[:_MOST_PAIRS]:
        figure = new_figure(4.6)
        axes = plot_split_frequencies(runs[one], runs[other], figure.subplots())
        axes.set(xlabel=f"split frequency, run {one + 1}", ylabel=f"split frequency, run {other + 1}")
        caption = f"Split frequencies of run {one + 1} against run {other + 1}: runs that agree lie on the diagonal."
        alt = f"{caption} {axes.get_title()}"
        drawn.append(Drawing.of(figure, alt, caption))
    about = "A split is named by its taxa on the side without the first taxon of the alignment."
    table = PageTable("Frequencies of splits", columns, rows, note=note)
    return _Section("splits", "Split frequencies", [about], drawn, [table])


def _parameters(search: TopologyInference) -> dict[str, Any]:
    """Return the table and the chains of the parameters, of the tree length and of the log likelihood."""
    names: list[str] = []
    columns: list[torch.Tensor] = []
    groups = search.to_datasets()
    series = {str(name): groups["posterior"][name].to_numpy() for name in groups["posterior"].data_vars}
    series["log_likelihood"] = groups["sample_stats"]["log_likelihood"].to_numpy()
    for name, values in series.items():
        flat = torch.as_tensor(values).flatten(2) if values.ndim > 2 else torch.as_tensor(values)[..., None]
        names += [name if values.ndim == 2 else f"{name}[{place}]" for place in range(flat.shape[-1])]
        columns.append(flat.movedim(-1, 0))
    runs, draws = series["log_likelihood"].shape
    text = f"{runs} run{'s' if runs > 1 else ''} of {draws} draws, each a chain at the posterior's temperature"
    return posterior_section(text, names, torch.cat(columns).to(torch.float64))


def _model(search: TopologyInference) -> dict[str, str]:
    """Return the data, the model and its priors in words."""
    data, substitution, rates = search.alignment, cast("Any", search.substitution), cast("Any", search.site_rates)
    if isinstance(data, Partition):
        free = PartitionParameters(data).priors
        models = "; ".join(f"{name}: {model}" for name, model in data.substitution.items())
        site_rates = "; ".join(f"{name}: {_site_rates(part)}" for name, part in data.site_rates.items())
    else:
        free = FreeParameters(substitution, rates).priors
        models, site_rates = str(substitution), _site_rates(rates)
    prior = search.branch_length_prior
    priors = "; ".join(f"{name} ~ {_in_words(given)}" for name, given in free.items())
    constraints = len(search.settings["constraints"])
    among = f"those that satisfy {constraints} constraint{'s' * (constraints > 1)}" if constraints else "all"
    of_lengths = "Exponential(10), independent" if prior is None else _in_words(prior)
    if search.branch_lengths is not None and isinstance(data, Partition):
        of_lengths += f"; {len(data.length_groups)} independent sets of lengths"
    return {
        "data": str(data),
        "substitution": models,
        "rates of sites": site_rates,
        "priors of parameters": priors or "none is free",
        "prior of branch lengths": of_lengths,
        "prior of topologies": f"uniform over {among}, without a root",
    }


def _site_rates(rates: SiteRates | None) -> str:
    return "equal" if rates is None else str(rates)


def _in_words(prior: Distribution) -> str:
    """Return the name of a distribution and its numbers."""
    numbers = [
        ", ".join(f"{value:.4g}" for value in getattr(prior, name).flatten().tolist())
        for name in prior.arg_constraints
        if isinstance(getattr(prior, name, None), torch.Tensor)
    ]
    if not numbers and hasattr(prior, "base_dist"):
        return f"a transform of {_in_words(prior.base_dist)}"
    return f"{type(prior).__name__}({', '.join(numbers)})"


def _run(search: TopologyInference) -> dict[str, Any]:
    """Return the settings and the cost of the search."""
    kept = ("num_runs", "num_warmup", "num_samples", "num_temperatures", "stop", "seed", "dtype", "num_evaluations")
    facts = {name: search.settings[name] for name in kept if search.settings.get(name) is not None}
    betas = ", ".join(f"{beta:.3g}" for beta in search.beta.tolist())
    return facts | {"inverse temperatures": betas, "ending": search.ending, "seconds": f"{search.seconds:.1f}"}
