"""Comparison of several estimators on shared draws: table, plot, page and file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit._core.compatibility import as_inference_data, plain_attributes, write_netcdf
from bayeskit._core.folders import write_atomically, write_csv
from bayeskit._core.functions_of_users import is_for_want_of_memory
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.page import measured, rendered, result_html
from bayeskit._core.texts import with_error
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import BayeskitError, CheckpointError, DrawsError, OutputError, SettingsError, UnknownNameError
from bayeskit.inference._known_modes import KnownModes, ModeCheck, WeightedMode, remembered_checks
from bayeskit.inference.evidence._budget import Budget
from bayeskit.inference.evidence._decorator import comparison, correction_of, draws_among, of_integral
from bayeskit.inference.evidence._judging._belonging import belongs
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics
from bayeskit.inference.evidence._judging._verdict import Verdict
from bayeskit.inference.evidence._methods import METHODS, Method, Part, select
from bayeskit.inference.evidence._result import Evidence, PredictiveScore
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.inference.evidence._tables import EstimateGroup, folded, groups_of, html_tables, text_lines
from bayeskit.inference.marginal._correction import LaplaceCorrection
from bayeskit.inference.samplers._ladder import Ladder

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.axes import Axes

    from bayeskit._core.plots import Drawing
    from bayeskit.inference.evidence._conditionals import ConjugateBlock

# A comparison as HTML.


def comparison_facts(
    comparison: EvidenceComparison, reference: float | None = None, reference_error: float = 0.0
) -> dict[str, Any]:
    """Return the contents of the page: groups, warnings, the distance to a reference, and the figures."""
    verdict = comparison.verdict
    return {
        "comparison": comparison,
        "best": measured(verdict.log_evidence, verdict.standard_error),
        "said": str(verdict) if verdict.best is None else f"Log evidence {verdict.grounds}",
        "groups": html_tables(comparison.groups),
        "folded": folded((*comparison, *comparison.scores.values()), comparison.refused),
        "reference": _beside_reference(comparison, reference, reference_error) if comparison.results else "",
        "figures": _figures(comparison, reference),
    }


def _beside_reference(comparison: EvidenceComparison, reference: float | None, reference_error: float) -> str:
    """Return the sentences on a reference value and on the distance of the verdict to it."""
    if reference is None:
        return ""
    verdict = comparison.verdict
    reference = real_number("reference", reference)
    reference_error = real_number("reference_error", reference_error)
    if not (math.isfinite(reference) and 0 <= reference_error < math.inf):
        raise SettingsError(
            f"reference and reference_error must be finite, the error at least zero, not {reference} and "
            f"{reference_error}; leave them out if they are unknown"
        )
    known = with_error(reference, reference_error or math.nan, "±")
    note = f" Reference value: {known}."
    error = math.hypot(verdict.standard_error, reference_error)
    if verdict.best is not None and error > 0:
        z = (verdict.log_evidence - reference) / error
        note += f" The estimate is {z:+.2f} standard errors away from it."
    return note


def own_seconds(comparison: EvidenceComparison) -> float:
    """Return the time of the estimators without the time of shared parts."""
    spent = comparison.part_seconds
    shared = {name: math.fsum(spent.get(part, 0.0) for part in parts) for name, parts in comparison.sources.items()}
    return math.fsum(max(0.0, z.seconds - shared.get(z.method, 0.0)) for z in comparison)


def _figures(comparison: EvidenceComparison, reference: float | None) -> dict[str, Drawing]:
    """Return the forest plot, and the errors of trusted estimates against their cost if there are several."""
    from bayeskit._core.plots import Drawing, new_figure
    from bayeskit.inference.evidence._plots import plot_cost, plot_evidence

    trusted = sorted((z for z in comparison if z.trusted), key=lambda z: z.standard_error)
    shown = trusted or list(comparison)
    if not shown:
        return {}
    figure = new_figure(1.1 + 0.27 * len(shown))
    plot_evidence(shown, reference, figure.subplots())
    values = "; ".join(f"{z.method} {with_error(z.log_evidence, z.standard_error, '±')}" for z in shown)
    left_out = len(comparison.results) - len(shown)
    caption = "Trusted estimates" if trusted else "Estimates, none of which is trusted,"
    caption += " with 95 % intervals"
    caption += f"; {left_out} more are in the tables." if left_out else "."
    figures = {"forest": Drawing.of(figure, f"Estimates of the log evidence with 95 % intervals: {values}", caption)}
    if len(trusted) > 1 and any(z.standard_error > 0 and z.num_evaluations for z in trusted):
        figure = new_figure(3.0)
        best = plot_cost(trusted, figure.subplots())
        names = ", ".join(z.method for z in best)
        alt = f"Standard error against evaluations of {len(trusted)} estimates; most precise for their cost: {names}"
        caption = (
            "Trusted estimates, with the evaluations of their draws. No other is both cheaper and more precise than "
            "one with a name."
        )
        figures["cost"] = Drawing.of(figure, alt, caption)
    return figures


# Comparison of several estimates of one log evidence.

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


@dataclass(frozen=True, repr=False)
class EvidenceComparison:
    """Estimates of one log evidence by several methods.

    Attributes
    ----------
    results : dict of Evidence
        By method name. A failed method has the value NaN and the reason.
    draws : Draws or None
        The shared posterior draws.
    ladder : Ladder or None
        The shared tempered ladder.
    settings : dict
        Seed and budget.
    scores : dict of PredictiveScore
        By method name. Predictive scores do not estimate the log evidence.
    refused : dict of str
        Methods that do not apply to the target, with the reason.
    sources : dict of frozenset of str
        Shared parts used by each method.
    part_seconds : dict of float
        Seconds spent on each shared part.
    notes : tuple of str
        Remarks on the target, such as possibly missing constants of its density.
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
            raise UnknownNameError(f"{method!r} is a predictive score, not a log evidence; see scores[{method!r}]")
        if method not in self.results:
            raise UnknownNameError(f"{method!r} was not run; the methods run are: {', '.join(self.results)}")
        return self.results[method]

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self.results.values())

    @cached_property
    def verdict(self) -> Verdict:
        """The representative value and the methods that agree, disagree or are untrusted."""
        sources = {name: METHODS[name].source for name in self.results if name in METHODS}
        return Verdict.of(self, sources=sources, refused=self.refused, notes=self.notes)

    def to_pandas(self) -> pd.DataFrame:
        """Return the table, one row per method.

        Columns are ``method``, ``log_evidence``, ``standard_error``, ``num_evaluations``, ``seconds``, ``trusted``,
        ``warnings`` and ``predictive_score`` (scores only). Methods that do not apply come last.
        """
        import pandas as pd

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
        """Write the table as CSV, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_csv(path, self.to_pandas())

    def to_datasets(self) -> dict[str, xr.Dataset]:
        """Return the group ``evidence``, with dimension ``estimator``, and any groups of the posterior draws."""
        import xarray as xr

        groups = {} if self.draws is None else self.draws.to_datasets()
        table = self.to_pandas()
        columns = {
            name: ("estimator", table[name].to_numpy()) for name in COLUMNS[1:] if name not in ("trusted", "warnings")
        }
        columns["trusted"] = ("estimator", table["trusted"].to_numpy().astype("int8"))  # netCDF has no booleans
        columns["warnings"] = ("estimator", table["warnings"].to_numpy().astype(object))
        facts = {"verdict": str(self.verdict)} | {k: v for k, v in self.settings.items() if v is not None}
        # The name "method" is an argument of xarray's sel.
        names = {"estimator": table["method"].to_numpy().astype(object)}
        return groups | {"evidence": xr.Dataset(columns, coords=names, attrs=plain_attributes(facts))}

    def to_arviz(self) -> Any:
        """Return the groups as ``InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (ArviZ 1.x)."""
        return as_inference_data(self.to_datasets())

    def to_netcdf(self, path: str | Path) -> None:
        """Write estimates and posterior draws as netCDF, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_netcdf(self.to_datasets(), path)

    def to_html(
        self, path: str | Path | None = None, reference: float | None = None, reference_error: float = 0.0
    ) -> str:
        """Return table, plot and verdict as a self-contained HTML page, written to ``path`` if given.

        Parameters
        ----------
        path : path, optional
        reference : float, optional
            Exact or published value for comparison.
        reference_error : float, default 0
            Standard error of ``reference``.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        facts = comparison_facts(self, reference, reference_error)
        page = rendered("comparison_page.html", title="Log evidence", **facts)
        if path is not None:
            write_atomically(path, page.encode("utf-8"))
        return page

    def plot(self, reference: float | None = None, ax: Axes | None = None) -> Axes:
        """Plot the estimates with 95 % intervals; untrusted ones are hollow.

        Parameters
        ----------
        reference : float, optional
            Exact or published value, drawn as a line.
        ax : Axes, optional
        """
        from bayeskit.inference.evidence._plots import plot_evidence

        return plot_evidence(list(self), reference, ax)

    @property
    def groups(self) -> list[EstimateGroup]:
        """Estimates in groups: trusted by error, not trusted, those without an error, predictive scores."""
        return groups_of(self, self.scores.values())

    def _repr_html_(self) -> str:
        return result_html(
            str(self.verdict) if self.results else "No estimate of the log evidence",
            html_tables(self.groups),
            folded((*self, *self.scores.values()), self.refused),
            notes=self.notes,
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [*([str(self.verdict)] if self.results else []), *text_lines(self.groups, self.refused), *self.notes]
        warned = [z.method for z in (*self, *self.scores.values()) if z.warnings]
        if warned:
            lines.append(f"{len(warned)} of the methods have warnings, such as .results[{warned[0]!r}].warnings")
        return "\n".join(lines)


def _spent(z: Evidence | PredictiveScore) -> tuple[int, float, bool, str]:
    return z.num_evaluations, z.seconds, z.trusted, "; ".join(z.warnings)


# A run of several methods on shared draws.


def compare(
    target: Target,
    methods: str | Sequence[str] = "all",
    *,
    seed: int = 0,
    budget: Budget | None = None,
    draws: Draws | None = None,
    ladder: Ladder | None = None,
    blocks: ConjugateBlock | Sequence[ConjugateBlock] = (),
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> EvidenceComparison:
    """Estimate the log evidence by several methods on shared draws, tempered ladders and fits.

    Parameters
    ----------
    target : Target
    methods : "all" or sequence of str
        Names of estimators in :mod:`bayeskit.inference.evidence`.
    seed : int, default 0
    budget : Budget, optional
        Numbers of chains and iterations of the shared runs.
    draws, ladder : optional
        Existing runs to use instead of new ones. Methods that need no draws use them for starting points and checks;
        draws made by the comparison itself are not used in this way.
    blocks : ConjugateBlock or sequence of them, optional
        Full conditionals of the model for :func:`~bayeskit.inference.evidence.chib`; by default those known from the
        target.
    checkpoint : path, optional
        Prefix of the checkpoint files, such as ``PREFIX.posterior`` and ``PREFIX.ladder``.
    progress : bool, default True

    Returns
    -------
    EvidenceComparison
        Each estimate is independent of the other selected methods; its judgement knows the modes that all of them have
        found. ``num_evaluations`` and ``seconds`` of a row include the shared draws. Methods that do not apply are in
        ``refused``, predictive scores in ``scores``.

    Raises
    ------
    UnknownNameError
        If a method is unknown.
    SettingsError
        If `target` is not a target, or its prior is known to be improper.
    DrawsError
        If draws or ladder belong to another target or are too few.
    CheckpointError
        If a checkpoint belongs to another run.
    BayeskitError
        If the shared draws cannot be made. A method that fails later is reported in its row.
    MemoryError
        If a method has too little memory.

    Warns
    -----
    ConstantsWarning
        If the prior does not integrate to one, which shifts every estimate; see
        :func:`~bayeskit.inference.evidence.check_constants`.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> case = bk.exact.get("beta_binomial")
    >>> small = evidence.Budget(4, 100, 200, num_temperatures=10, ladder_chains=4, ladder_samples=100)
    >>> table = evidence.compare(case.target(), ["bridge_sampling", "stepping_stone"], budget=small)
    >>> list(table.to_pandas()["method"])
    ['bridge_sampling', 'stepping_stone']
    >>> abs(table["bridge_sampling"].log_evidence - case.log_evidence) < 0.05, table.verdict.is_agreed
    (True, True)
    """
    if isinstance(target, Draws) and draws is None:
        draws = target
    target = require_target(target)
    chosen, seed = select(methods), whole_number("seed", seed)
    if not chosen:
        raise SettingsError("methods is empty; give names, or 'all'")
    for name, value, kind in (("budget", budget, Budget), ("draws", draws, Draws), ("ladder", ladder, Ladder)):
        if not isinstance(value, (kind, type(None))):
            raise SettingsError(f"{name} must be a {kind.__name__}, not a {type(value).__name__}")
    given = _as_blocks(blocks)
    if draws is not None:
        belongs(draws, target)
    if ladder is not None:
        belongs(ladder.draws, target, posterior=False)
    runs = SharedRuns(
        target, budget, seed=seed, draws=draws, ladder=ladder, blocks=given, checkpoint=checkpoint, progress=progress
    )
    constants = Diagnostics(target).check_target(proper=any(method.kind != "score" for method in chosen))
    refusals = {method.name: method.refusal(target, runs) for method in chosen}
    refused = {name: reason for name, reason in refusals.items() if reason is not None}
    applied = [method for method in chosen if method.name not in refused]
    for part in (Part.POSTERIOR, Part.LADDER):
        # The most expensive parts come first: if they fail, there is little to compare.
        if any(part in method.needs for method in applied):
            runs.part(part)
    answers: dict[str, Evidence | PredictiveScore] = {}
    checks: dict[str, list[ModeCheck]] = {}
    with comparison():
        for method in applied:
            with remembered_checks() as checks[method.name]:
                answers[method.name] = _answer(method, runs, seed)
    known_modes = KnownModes.of(target)
    answers = {name: _judged_again(answer, checks[name], known_modes.weighted) for name, answer in answers.items()}
    correction: LaplaceCorrection | None = None
    problems: tuple[str, ...] = ()
    if any(isinstance(answer, Evidence) for answer in answers.values()):
        known = draws_among([runs.draws_if_there, runs.ladder if runs.has("ladder") else None])
        try:
            correction = correction_of(target, lambda: known or runs.part(Part.POSTERIOR), seed, progress)
        except DrawsError as error:  # must not lose the results
            problems = (f"not corrected: {error}",)
    return EvidenceComparison(
        {name: of_integral(target, z, correction, problems) for name, z in answers.items() if isinstance(z, Evidence)},
        runs.draws_if_there,
        runs.ladder if runs.has("ladder") else None,
        {"seed": seed} | runs.budget.words(),
        {name: answer for name, answer in answers.items() if isinstance(answer, PredictiveScore)},
        refused,
        {method.name: method.needs for method in applied},
        dict(runs.seconds),
        (*constants.warnings, *constants.notes, *([known_modes.summary] if known_modes.weighted else [])),
    )


def _judged_again(
    answer: Evidence | PredictiveScore, checks: Sequence[ModeCheck], modes: Sequence[WeightedMode]
) -> Evidence | PredictiveScore:
    """Return an estimate with a warning if it misses a mode that another method found later."""
    if not (isinstance(answer, Evidence) and answer.trusted):
        return answer
    problems = [problem for check in checks for problem in check(modes)]
    return replace(answer, warnings=(*answer.warnings, *problems[:1])) if problems else answer


def _as_blocks(blocks: ConjugateBlock | Sequence[ConjugateBlock]) -> tuple[ConjugateBlock, ...]:
    from bayeskit.inference.evidence._conditionals import ConjugateBlock

    several = (blocks,) if isinstance(blocks, ConjugateBlock) else blocks
    if not isinstance(several, Sequence) or not all(isinstance(block, ConjugateBlock) for block in several):
        raise SettingsError(
            "blocks must be ConjugateBlocks, one or a sequence of them, such as blocks=[ConjugateBlock(...)]"
        )
    return tuple(several)


def _answer(method: Method, runs: SharedRuns, seed: int) -> Evidence | PredictiveScore:
    begin, made = time.monotonic(), sum(runs.seconds.values())
    result: Evidence | PredictiveScore
    try:
        result = method.estimate(runs.target, runs, seed)
    except (CheckpointError, OutputError):
        raise  # the files of another run affect every method
    except (BayeskitError, ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        if is_for_want_of_memory(error):  # which says nothing of the method, and might be kept as its result
            raise MemoryError(
                f"{method.name} had too little memory ({str(error)[:160]}); leave it out of methods, or pass "
                "checkpoint=, from which the same call goes on with its draws on a larger machine"
            ) from error
        # An error of one method must not lose the draws and the other results.
        kind = "" if isinstance(error, BayeskitError) else f"{type(error).__name__}: "
        failure = (f"failed: {kind}{error}",)
        if method.kind == "score":
            result = PredictiveScore(method.name, math.nan, math.nan, 0, failure)
        else:
            result = Evidence(method.name, math.nan, math.nan, 0, failure)
    own = time.monotonic() - begin - (sum(runs.seconds.values()) - made)
    shared = math.fsum(runs.seconds.get(part, 0.0) for part in method.needs)
    # The estimate's own time includes that of draws which it was given, and of earlier parts of a resumed run.
    return replace(result, seconds=max(max(0.0, own) + shared, result.seconds))
