"""Comparison of models of the same data: Bayes factors and posterior probabilities with standard errors."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import logsumexp

from bayeskit._core.folders import write_csv
from bayeskit._core.functions_of_users import lines_named
from bayeskit._core.inputs import real_number, warn_user, whole_number
from bayeskit._core.page import PageTable, measured, result_html, warnings_listed
from bayeskit._core.randomness import derived_seed
from bayeskit._core.storage import digest
from bayeskit._core.texts import with_error
from bayeskit._draws import Draws
from bayeskit._logdensity.observations import check_same_data
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import AccuracyWarning, SamplingWarning, SettingsError, UnknownNameError
from bayeskit.inference.evidence import Budget, Evidence, EvidenceComparison, compare
from bayeskit.inference.evidence._methods import Method, Part, select
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.parallel import map_tasks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Posterior probabilities of models with uncertain log evidences.

_PAIRS = 10_000


def _simulated_probabilities(weight: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return standard deviation, lower and upper 95 % end, ``(n,)`` each, of a softmax of normal log weights.

    ``weight`` and its standard errors ``error`` are ``(n,)``; -inf stands for no weight.
    """
    # A first-order expansion is wrong once errors exceed a fraction of a nat. Antithetic pairs have no third moment,
    # which would disturb small errors.
    if not error.any():
        p = np.exp(weight - logsumexp(weight))
        return np.zeros_like(p), p.copy(), p
    pairs = max(1000, min(_PAIRS, 10**7 // len(weight)))
    noise = np.random.default_rng(0).standard_normal((pairs, len(weight))) * error
    drawn = weight + np.concatenate([noise, -noise])
    drawn -= drawn.max(1, keepdims=True)
    np.exp(drawn, out=drawn)
    drawn /= drawn.sum(1, keepdims=True)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return drawn.std(0), low, high


# Bayes factors and posterior probabilities of models of the same data, with standard errors.

_TOLD_APART = 1.959963984540054
"""Number of standard errors by which two log evidences must differ to be distinguished."""
_TIED = 0.1
"""Half width of the 95 % interval of a log Bayes factor, in nats, below which an interval around zero is a tie."""
_TOO_VAGUE = 0.5
"""Standard error of a log evidence, in nats, above which probabilities are rough."""
_MOST_NAMED = 5
"""Models that a warning names."""
_MOST_SHOWN = 30
"""Models in a printed table."""


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """Evidence of several models of the same data.

    Attributes
    ----------
    results : dict of Evidence
        Evidence by model.
    prior_probabilities : dict of float, optional
        By model, normalised to sum to one; equal by default.
    settings : dict
        Method, seed and budget.

    Raises
    ------
    SettingsError
        If a result is not an Evidence, or the names in ``prior_probabilities`` are not those of the models.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.workflows import ModelComparison
    >>> results = {"with": Evidence("smc", -10.0, 0.03, 1000), "without": Evidence("smc", -12.0, 0.04, 1000)}
    >>> comparison = ModelComparison(results)
    >>> comparison.best
    'with'
    >>> {name: round(p, 3) for name, (p, error) in comparison.posterior_probabilities.items()}
    {'with': 0.881, 'without': 0.119}
    """

    results: dict[str, Evidence]
    prior_probabilities: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.results, Mapping) or not self.results:
            raise SettingsError("results must be a dict of Evidence by model, with at least one model")
        for name, z in self.results.items():
            if not isinstance(z, Evidence):
                several = isinstance(z, EvidenceComparison)
                remedy = "use ModelComparison.from_comparisons" if several else "give the Evidence of one method"
                raise SettingsError(f"the result of model {name!r} is a {type(z).__name__}: {remedy}")
        object.__setattr__(self, "results", dict(self.results))
        given = None if self.prior_probabilities == {} else self.prior_probabilities
        weights = _as_prior_probabilities(self.results, given)
        object.__setattr__(self, "prior_probabilities", weights)

    @classmethod
    def from_comparisons(
        cls, comparisons: Mapping[str, EvidenceComparison], prior_probabilities: Mapping[str, float] | None = None
    ) -> ModelComparison:
        """Compare models by several methods each, as evaluated by :func:`bayeskit.inference.evidence.compare`.

        The evidence of a model is the estimate named by the verdict of its table. It is missing if no method is
        trusted; if the methods disagree it is untrusted and has no standard error.

        Parameters
        ----------
        comparisons : mapping of str to EvidenceComparison
            By model.
        prior_probabilities : mapping of str to float, optional
            Nonnegative weights by model, normalised to sum to one; equal by default.

        Raises
        ------
        SettingsError
            If a value is not an EvidenceComparison, or the names in ``prior_probabilities`` are not those of the
            models.

        Examples
        --------
        >>> from bayeskit.inference.evidence import Evidence, EvidenceComparison
        >>> def table(bridge, path):
        ...     found = Evidence("bridge_sampling", bridge, 0.01, 8000), Evidence("path_sampling", path, 0.02, 8000)
        ...     return EvidenceComparison({z.method: z for z in found}, None, None)
        >>> models = {"with": table(-10.0, -10.01), "without": table(-12.0, -11.99)}
        >>> factor, error = ModelComparison.from_comparisons(models).log_bayes_factor("with", "without")
        >>> round(factor, 3), round(error, 3)
        (2.0, 0.014)
        """
        if not isinstance(comparisons, Mapping):
            raise SettingsError(
                f"comparisons must be a dict of EvidenceComparison by model, not a {type(comparisons).__name__}"
            )
        for name, comparison in comparisons.items():
            if not isinstance(comparison, EvidenceComparison):
                raise SettingsError(f"{name!r} is a {type(comparison).__name__}, not an EvidenceComparison")
        results = {name: _agreed(comparison) for name, comparison in comparisons.items()}
        return cls(results, _as_prior_probabilities(results, prior_probabilities) if results else {})

    def __getitem__(self, model: str) -> Evidence:
        if model not in self.results:
            raise UnknownNameError(f"no model is called {model!r}; there are: {', '.join(self.results)}")
        return self.results[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    @property
    def best(self) -> str:
        """The model with the largest evidence; prior probabilities are ignored."""
        return max(self.results, key=lambda name: _or_nothing(self.results[name].log_evidence))

    def log_bayes_factor(self, model: str, other: str | None = None) -> tuple[float, float]:
        """Return the log Bayes factor of a model against another and its standard error, in nats.

        Parameters
        ----------
        model : str
        other : str, optional
            By default the best model.
        """
        one, two = self[model], self[self.best if other is None else other]
        if one is two:
            return 0.0, 0.0
        return one.log_evidence - two.log_evidence, math.hypot(one.standard_error, two.standard_error)

    @property
    def posterior_probabilities(self) -> dict[str, tuple[float, float]]:
        """Posterior probability of each model and its Monte Carlo standard error.

        Probabilities are computed from the point estimates of the log evidences, consistently with the Bayes factors;
        averaging over errors would favour imprecisely estimated models. The standard error is the standard deviation
        under normal errors of all log evidences; see also :attr:`posterior_intervals`. A model without an estimate has
        NaN and is excluded from the normalisation. If the error of a log evidence is unknown, so is that of the model's
        probability; the other models' errors treat that log evidence as exact.
        """
        return {name: (p, error) for name, (p, error, _, _) in self._posterior.items()}

    @property
    def posterior_intervals(self) -> dict[str, tuple[float, float]]:
        """Central 95 % interval of each posterior probability under the errors of the log evidences."""
        return {name: (low, high) for name, (_, _, low, high) in self._posterior.items()}

    @cached_property
    def _posterior(self) -> dict[str, tuple[float, float, float, float]]:
        names = [name for name, z in self.results.items() if math.isfinite(z.log_evidence)]
        log_evidence = np.array([self.results[name].log_evidence for name in names])
        error = np.array([self.results[name].standard_error for name in names])
        with np.errstate(divide="ignore"):
            weight = np.log([self.prior_probabilities[name] for name in names]) + log_evidence
        unknown = dict.fromkeys(self.results, (math.nan,) * 4)
        if not np.isfinite(weight).any():
            return unknown
        p = np.exp(weight - logsumexp(weight))
        spread, low, high = _simulated_probabilities(weight, np.where(np.isfinite(error), error, 0.0))
        table = np.stack([p, spread, low, high])
        table[1:, ~np.isfinite(error)] = math.nan
        return unknown | {name: tuple(row) for name, row in zip(names, table.T.tolist(), strict=True)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the ranking, each with a remedy."""
        result = []
        doubts: dict[tuple[str, bool], list[str]] = {}
        for name, z in self.results.items():
            if not z.trusted:
                lacks_error = math.isfinite(z.log_evidence) and not math.isfinite(z.standard_error)
                doubts.setdefault(("; ".join(z.warnings) or "it is not finite", lacks_error), []).append(name)
        for (why, lacks_error), names in doubts.items():
            text = f"the evidence of {_listed(names)} is not trusted: {why}"
            if lacks_error:
                text += "; Bayes factors against it have no error, and errors of other probabilities exclude its error"
            result.append(text)
        vague = {name: z.standard_error for name, z in self.results.items() if z.trusted}
        vague = {name: error for name, error in vague.items() if error > _TOO_VAGUE}
        if vague:
            worst = " at worst" if len(vague) > 1 else ""
            result.append(
                f"the standard error of the log evidence of {_listed(vague)} is {max(vague.values()):.2g}{worst}, so "
                "posterior probabilities are imprecise (see posterior_intervals): give a larger budget or another "
                "method"
            )
        best = self.best
        for name in self.results:
            difference, error = self.log_bayes_factor(name)
            if name != best and abs(difference) <= _TOLD_APART * error:
                remedy = "give a larger budget"
                if _TOLD_APART * error < _TIED:
                    remedy = "the models are tied: a larger budget does not help, but other data may"
                result.append(
                    f"models {best!r} and {name!r} are not distinguished: their log Bayes factor is {-difference:.3g} "
                    f"+- {error:.2g}; {remedy}"
                )
        return tuple(result)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per model, in descending order of evidence; Bayes factors are against the best model."""
        import pandas as pd

        rows = []
        for name in sorted(self.results, key=lambda name: -_or_nothing(self.results[name].log_evidence)):
            z, (factor, factor_error) = self[name], self.log_bayes_factor(name)
            p, p_error, low, high = self._posterior[name]
            rows.append(
                {
                    "model": name,
                    "log_evidence": z.log_evidence,
                    "standard_error": z.standard_error,
                    "log_bayes_factor": factor,
                    "log_bayes_factor_error": factor_error,
                    "prior_probability": self.prior_probabilities[name],
                    "posterior_probability": p,
                    "posterior_probability_error": p_error,
                    "posterior_probability_low": low,
                    "posterior_probability_high": high,
                    "num_evaluations": z.num_evaluations,
                    "seconds": z.seconds,
                    "trusted": z.trusted,
                    "warnings": "; ".join(z.warnings),
                }
            )
        return pd.DataFrame(rows)

    def to_csv(self, path: str | Path) -> None:
        """Write the table to a CSV file, atomically.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_csv(path, self.to_pandas())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot log Bayes factors against the best model with 95 % intervals; the labels give posterior probabilities.

        Filled circles are trusted, hollow circles are not; a model without an estimate has no mark.

        Parameters
        ----------
        ax : Axes, optional
            By default new axes of ``pyplot``.
        """
        return _plot(self.to_pandas(), ax)

    def _repr_html_(self) -> str:
        return models_html(self.to_pandas(), self.warnings)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        table = self.to_pandas()
        lines = [
            f"{row.model}: log evidence {with_error(row.log_evidence, row.standard_error)}, log Bayes factor "
            f"{with_error(row.log_bayes_factor, row.log_bayes_factor_error)}, probability "
            f"{with_error(row.posterior_probability, row.posterior_probability_error)}"
            for row in table.head(_MOST_SHOWN).itertuples()
        ]
        if len(table) > _MOST_SHOWN:
            lines.append(f"... and {len(table) - _MOST_SHOWN} more models in .to_pandas()")
        return "\n".join([*lines, *(f"  {warning}" for warning in self.warnings)])


def models_html(table: pd.DataFrame, warnings: Sequence[str]) -> str:
    """Return the table of a :class:`ModelComparison` as a fragment for a notebook; names are in its first column."""
    columns = [str(table.columns[0]), "log evidence", "error", "log Bayes factor", "error", "probability", "error"]
    rows = []
    for row in table.head(_MOST_SHOWN).itertuples(index=False):
        rows.append(
            [
                row[0] if row.trusted else f"{row[0]} (not trusted)",
                *measured(row.log_evidence, row.standard_error),
                *measured(row.log_bayes_factor, row.log_bayes_factor_error),
                *measured(row.posterior_probability, row.posterior_probability_error),
            ]
        )
    best = table.iloc[0]
    more = len(table) - len(rows)
    name, probability = best.iloc[0], with_error(best.posterior_probability, best.posterior_probability_error)
    return result_html(
        f"{name} has the largest evidence; posterior probability {probability}",
        [PageTable("Models, log Bayes factors against the best", columns, rows)],
        warnings_listed("models", warnings),
        notes=[f"{more} more models are in .to_pandas()."] if more else [],
    )


def _as_prior_probabilities(models: Iterable[str], given: Mapping[str, float] | None) -> dict[str, float]:
    """Return prior probabilities by model that sum to one, equal if none are given; SettingsError if invalid."""
    if not isinstance(given, (Mapping, type(None))):
        raise SettingsError(f"prior_probabilities must be a dict of numbers by model, not a {type(given).__name__}")
    names = list(models)
    called = "the prior probability of {!r}".format
    equal = dict.fromkeys(names, 1.0)
    weights = equal if given is None else {name: real_number(called(name), given[name]) for name in given}
    total = sum(weights.values())
    if weights.keys() != set(names) or not 0 < total < math.inf or min(weights.values()) < 0:
        raise SettingsError(
            f"prior_probabilities must give each of the models {', '.join(map(str, names))} a nonnegative number, "
            f"at least one of them positive, not {dict(given or {})}"
        )
    return {name: weights[name] / total for name in names}


def _agreed(comparison: EvidenceComparison) -> Evidence:
    """Return the evidence chosen by a verdict, with its warnings."""
    verdict = comparison.verdict
    if verdict.best is None:
        return Evidence("verdict", math.nan, math.nan, 0, (str(verdict),))
    if not verdict.is_agreed and (verdict.contradicted_by or verdict.num_trusted > 1):
        # The distance between disagreeing estimates says more about the error than any of their standard errors.
        return replace(verdict.best, standard_error=math.nan, warnings=(str(verdict),))
    if verdict.contradicted_by:
        warn_user(str(verdict), AccuracyWarning)
    return verdict.best


def _listed(names: Iterable[str]) -> str:
    """Name models in a sentence, a few of many."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - _MOST_NAMED} more" if len(quoted) > _MOST_NAMED else ""
    return f"model{'s' * (len(quoted) > 1)} {', '.join(quoted[:_MOST_NAMED])}{more}"


def _or_nothing(log_evidence: float) -> float:
    return -math.inf if math.isnan(log_evidence) else log_evidence


def _plot(table: pd.DataFrame, ax: Axes | None) -> Axes:
    from bayeskit._core.plots import BLUE, GREY, VERMILION

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(table)), layout="constrained")
    for row, model in enumerate(table.itertuples()):
        factor, half = model.log_bayes_factor, _TOLD_APART * model.log_bayes_factor_error
        if not math.isfinite(factor):
            continue
        colour = BLUE if model.trusted else VERMILION
        ax.plot([factor - half, factor + half], [row, row], color=colour, linewidth=1.8, marker="|", markersize=9)
        face = colour if model.trusted else "white"
        ax.plot([factor], [row], marker="o", markersize=7, color=colour, mfc=face, mew=1.6, zorder=3)
    ax.axvline(0.0, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.set_yticks(range(len(table)), [_label(model) for model in table.itertuples()])
    ax.set_xlabel("log Bayes factor against the best model (nats)")
    ax.grid(axis="x", alpha=0.25)
    return ax


def _label(row: Any) -> str:
    if math.isnan(row.log_evidence):
        return f"{row.model} (failed)"
    return f"{row.model}, p = {row.posterior_probability:.2g}" + ("" if row.trusted else " (not trusted)")


# Comparison of models of the same data by their evidence.


def compare_models(
    models: Mapping[str, Target | Draws | Callable[[], Target]],
    method: str = "bridge_sampling",
    *,
    budget: Budget | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    prior_probabilities: Mapping[str, float] | None = None,
    same_data: bool = False,
    progress: bool = True,
) -> ModelComparison:
    """Estimate the evidence of each model, and compute Bayes factors and posterior probabilities.

    Parameters
    ----------
    models : mapping of str to Target, Draws or callable
        By name, at least two models of the same data. Draws stand for their target, and a method that needs posterior
        draws takes them as they are. A callable takes no argument and returns the Target. It is called in the process
        that estimates the model, and beforehand unless ``same_data``, or if the method does not apply to every target.
    method : str, default "bridge_sampling"
        Name of a function in :mod:`bayeskit.inference.evidence`.
    budget : Budget, optional
        Budget of each model.
    seed : int, default 0
        The random numbers of a model depend on the seed and its name, not on the other models.
    num_jobs : int, default 1
        Number of models estimated in parallel; see :func:`bayeskit.parallel.map_tasks`. The result does not depend on
        it.
    checkpoint : path, optional
        Folder from which a later call with the same arguments resumes, also within a model. The check of arguments
        ignores global variables of a callable: pass data by closure or ``functools.partial``.
    prior_probabilities : mapping of str to float, optional
        Nonnegative weights by model, normalised to sum to one; equal by default.
    same_data : bool, default False
        Whether you know that the models have the same data, so that observed values are not compared. By default they
        are, whatever the names of sites and the order of values: models of ``y`` and of ``log(y)`` have different data,
        unless one has the log Jacobian as a factor.
    progress : bool, default True

    Returns
    -------
    ModelComparison

    Raises
    ------
    SettingsError
        If there are fewer than two models, a model is neither Target nor callable, or the names in
        ``prior_probabilities`` are not those of the models; if the method gives no log evidence or does not apply to
        one of the models.
    DataError
        If the models have different data.
    UnknownNameError
        If there is no such method.
    CheckpointError
        If the folder belongs to another comparison.
    WorkerError
        If worker processes keep dying.

    Warns
    -----
    SamplingWarning
        If an estimate is not trusted, or the difference between a model and the best is within the error.

    References
    ----------
    Kass, R. E., Raftery, A. E. (1995). Bayes factors. Journal of the American Statistical Association 90, 773-795.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.workflows._bayes_factors import compare_models
    >>> models = {"density": exact.radiata_pine("x").target(), "adjusted": exact.radiata_pine("z").target()}
    >>> comparison = compare_models(models, budget=Budget(16, 200, 200), progress=False)
    >>> truth = exact.radiata_pine("x").log_evidence - exact.radiata_pine("z").log_evidence
    >>> factor, error = comparison.log_bayes_factor("density")
    >>> comparison.best, abs(factor - truth) < 4 * error < 0.5
    ('adjusted', True)
    """
    _check_models(models)
    weights = _as_prior_probabilities(models, prior_probabilities)
    way = select([method])[0]
    chosen = way.name
    _check_method(way, models)
    if not same_data:
        check_same_data({name: _built(name, model) for name, model in models.items()})
    spend = Budget() if budget is None else budget
    folder = None if checkpoint is None else Path(checkpoint)
    seed, jobs = whole_number("seed", seed), whole_number("num_jobs", num_jobs, 1)
    tasks = [
        _Task(
            name,
            model,
            chosen,
            spend,
            derived_seed(seed, f"model {name}"),
            None if folder is None else str(folder / f"model-{i:03d}"),
        )
        for i, (name, model) in enumerate(models.items())
    ]
    results = map_tasks(
        _estimate,
        [task.packed() for task in tasks],
        num_jobs=jobs,
        checkpoint=checkpoint,
        result_types=(Evidence,),
        progress=progress,
        description="comparing models",
    )
    if folder is not None:
        for path in folder.glob("model-*.*"):  # checkpoints within models: all models have a result now
            path.unlink(missing_ok=True)
    settings = {"method": chosen, "seed": seed} | vars(spend)
    comparison = ModelComparison(dict(zip(models, results, strict=True)), weights, settings)
    for warning in comparison.warnings:
        warn_user(warning, SamplingWarning)
    return comparison


@dataclass(frozen=True)
class _Task:
    name: str
    model: Target | Draws | Callable[[], Target]
    method: str
    budget: Budget
    seed: int
    checkpoint: str | None

    def packed(self) -> _Task:
        """Remove compiled graphs, which cannot be sent to another process and would round differently here."""
        if isinstance(self.model, Target):
            return replace(self, model=self.model.without_graphs())
        if isinstance(self.model, Draws):
            target = require_target(self.model).without_graphs()
            return replace(self, model=replace(self.model, target=target))
        return self

    def fingerprint(self) -> str:
        """Identify the task independently of its folder."""
        return digest((self.name, self.model, self.method, self.budget, self.seed))

    def __repr__(self) -> str:
        return f"model {self.name!r}"


def _check_method(method: Method, models: Mapping[str, Target | Draws | Callable[[], Target]]) -> None:
    """Raise SettingsError for a method that does not apply, before any model is estimated."""
    if method.kind == "score":
        raise SettingsError(
            f"{method.name} is a predictive score, not a log evidence, and gives no Bayes factor; choose a method such "
            "as bridge_sampling"
        )
    if method.refuses is None and not method.needs & {Part.PRIOR, Part.LADDER, Part.LIKELIHOOD}:
        return  # the method applies to every target, so no target is built here
    for name, model in models.items():
        target = _built(name, model)
        reason = method.refusal(target, SharedRuns(target))
        if reason is not None:
            raise SettingsError(
                f"{method.name} does not apply to model {name!r}: {reason}; choose a method that applies to all models"
            )


def _built(name: str, model: Target | Draws | Callable[[], Target]) -> Target:
    if isinstance(model, Target | Draws):
        return require_target(model)
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise SettingsError(
            f"the callable of model {name!r} cannot be called without arguments ({error}); for a Pyro model, give "
            "Target.from_pyro(model, ...)"
        ) from error
    with lines_named(f"the callable of model {name!r}"):
        target = model()
    if not isinstance(target, Target):
        raise SettingsError(f"the callable of model {name!r} returned a {type(target).__name__}, not a Target")
    return target


def _estimate(task: _Task) -> Evidence:
    target = _built(task.name, task.model)
    draws = task.model if isinstance(task.model, Draws) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # the estimate has the same warnings
        table = compare(
            target,
            [task.method],
            seed=task.seed,
            budget=task.budget,
            draws=draws,
            checkpoint=task.checkpoint,
            progress=False,
        )
    return table[task.method]


def _check_models(models: Mapping[str, Target | Draws | Callable[[], Target]]) -> None:
    if not isinstance(models, Mapping):
        raise SettingsError(f"models must be a dict of targets by name, not a {type(models).__name__}")
    if len(models) < 2:
        raise SettingsError(f"give at least two models to compare, not {len(models)}")
    for name, model in models.items():
        if not isinstance(name, str) or not (isinstance(model, Target | Draws) or callable(model)):
            raise SettingsError(
                f"model {name!r} is a {type(model).__name__}; give a name and a Target, as "
                "Target.from_pyro(model, *arguments) makes it, its Draws, or a function that returns one"
            )
