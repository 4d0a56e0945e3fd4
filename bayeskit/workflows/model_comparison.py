"""Compare models of the same data by their evidence: Bayes factors and posterior probabilities with their errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scipy.special import logsumexp

from bayeskit._files import write_atomically
from bayeskit._settings import real_number, whole_number
from bayeskit._tasks import digest
from bayeskit._torch import new_generator
from bayeskit.errors import SamplingWarning, SettingsError, UnknownNameError
from bayeskit.inference.evidence import Budget, Evidence, compare
from bayeskit.inference.evidence.methods import select
from bayeskit.inference.samplers.groups import without_graphs
from bayeskit.parallel import map_tasks
from bayeskit.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLD_APART = 1.959963984540054
"""Standard errors by which two log evidences must differ to be told apart."""


@dataclass(frozen=True)
class ModelComparison:
    """Evidence of several models of the same data.

    Attributes
    ----------
    results : dict of Evidence
        By model.
    prior_probabilities : dict of float
        By model, adding up to one.
    settings : dict
        Method, seed and budget.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.workflows.model_comparison import ModelComparison
    >>> results = {"with": Evidence("smc", -10.0, 0.03, 1000), "without": Evidence("smc", -12.0, 0.04, 1000)}
    >>> comparison = ModelComparison(results, {"with": 0.5, "without": 0.5})
    >>> comparison.best
    'with'
    >>> {name: round(p, 3) for name, (p, error) in comparison.posterior_probabilities.items()}
    {'with': 0.881, 'without': 0.119}
    """

    results: dict[str, Evidence]
    prior_probabilities: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, model: str) -> Evidence:
        if model not in self.results:
            raise UnknownNameError(f"no model is called {model!r}; there are: {', '.join(self.results)}")
        return self.results[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    @property
    def best(self) -> str:
        """The model with the largest evidence, whatever its prior probability."""
        return max(self.results, key=lambda name: _or_nothing(self.results[name].log_evidence))

    def log_bayes_factor(self, model: str, other: str | None = None) -> tuple[float, float]:
        """Return the log Bayes factor of a model against another and its standard error, in nats.

        Parameters
        ----------
        model : str
        other : str, optional
            By default the best.
        """
        one, two = self[model], self[self.best if other is None else other]
        if one is two:
            return 0.0, 0.0
        return one.log_evidence - two.log_evidence, math.hypot(one.standard_error, two.standard_error)

    @property
    def posterior_probabilities(self) -> dict[str, tuple[float, float]]:
        """Posterior probability of each model and its Monte Carlo error, to first order in those of the log evidences.

        A model without an estimate has NaN, and the others share its probability.
        """
        names = [name for name, z in self.results.items() if math.isfinite(z.log_evidence)]
        log_evidence = np.array([self.results[name].log_evidence for name in names])
        error = np.array([self.results[name].standard_error for name in names])
        with np.errstate(divide="ignore"):
            weight = np.log([self.prior_probabilities[name] for name in names]) + log_evidence
        p = np.exp(weight - logsumexp(weight)) if np.isfinite(weight).any() else np.full(len(names), math.nan)
        # d p_i = p_i (d z_i - sum_j p_j d z_j), and the errors of the models are independent.
        jacobian = np.diag(p) - np.outer(p, p)
        spread = np.sqrt(jacobian**2 @ error**2)
        known = {name: (float(a), float(b)) for name, a, b in zip(names, p, spread, strict=True)}
        return {name: known.get(name, (math.nan, math.nan)) for name in self.results}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the ranking doubtful, with the remedy."""
        result = []
        for name, z in self.results.items():
            if not z.trusted:
                why = "; ".join(z.warnings) or "it is not finite"
                result.append(f"the evidence of model {name!r} is not to be trusted: {why}")
        best = self.best
        for name in self.results:
            difference, error = self.log_bayes_factor(name)
            if name != best and abs(difference) <= TOLD_APART * error:
                result.append(
                    f"models {best!r} and {name!r} are not told apart: their log Bayes factor is {-difference:.3g} +- "
                    f"{error:.2g}; give a larger budget"
                )
        return tuple(result)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a model, the best first; Bayes factors are against the best."""
        posterior = self.posterior_probabilities
        rows = []
        for name in sorted(self.results, key=lambda name: -_or_nothing(self.results[name].log_evidence)):
            z, (factor, factor_error), (p, p_error) = self.results[name], self.log_bayes_factor(name), posterior[name]
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
                    "num_evaluations": z.num_evaluations,
                    "seconds": z.seconds,
                    "trusted": z.trusted,
                    "warnings": "; ".join(z.warnings),
                }
            )
        return pd.DataFrame(rows)

    def to_csv(self, path: str | Path) -> None:
        """Write the table, whole or not at all.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        write_atomically(path, self.to_pandas().to_csv(index=False, float_format="%.10g").encode())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot log Bayes factors against the best with 95 % intervals, and write down posterior probabilities.

        Filled circles are trusted, hollow ones are not; a model without an estimate is listed without a mark.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default new axes of ``pyplot``.
        """
        return _plot(self.to_pandas(), ax)

    def __str__(self) -> str:
        lines = []
        for row in self.to_pandas().itertuples():
            lines.append(
                f"{row.model}: log evidence {row.log_evidence:.4f} +- {row.standard_error:.4f}, log Bayes factor "
                f"{row.log_bayes_factor:.4f}, probability {row.posterior_probability:.4g} +- "
                f"{row.posterior_probability_error:.2g}"
            )
        return "\n".join([*lines, *(f"  {warning}" for warning in self.warnings)])


def compare_models(
    models: Mapping[str, Target | Callable[[], Target]],
    method: str = "bridge_sampling",
    *,
    budget: Budget | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    prior_probabilities: Mapping[str, float] | None = None,
    progress: bool = True,
) -> ModelComparison:
    """Estimate the evidence of each model and turn it into Bayes factors and posterior probabilities.

    Parameters
    ----------
    models : mapping of str to Target or callable
        By name, at least two models of the same data. A callable takes no argument and returns the Target; it is
        called where the model is worked on.
    method : str, default "bridge_sampling"
        Name of a function in :mod:`bayeskit.inference.evidence`.
    budget : Budget, optional
        Of each model.
    seed : int, default 0
        Each model has random numbers of its own, which depend on this and on its name, not on the other models.
    num_jobs : int, default 1
        Models under way at a time; see :func:`bayeskit.parallel.map_tasks`. The result does not depend on it.
    checkpoint : path, optional
        Folder from which a later call with the same arguments goes on, in the middle of a model too. Values of
        globals do not tell a callable from another: pass data by closure or ``functools.partial``.
    prior_probabilities : mapping of str to float, optional
        Nonnegative weights, scaled to add up to one; by default equal.
    progress : bool, default True

    Returns
    -------
    ModelComparison

    Raises
    ------
    SettingsError
        If there are fewer than two models, one is neither Target nor callable, or ``prior_probabilities`` are not
        those of the models.
    UnknownNameError
        If no method has that name.
    CheckpointError
        If the folder belongs to another comparison.
    WorkerError
        If processes that work on models keep dying.

    Warns
    -----
    SamplingWarning
        If an estimate is not to be trusted, or a model differs from the best by no more than the error allows.

    References
    ----------
    Kass, R. E., Raftery, A. E. (1995). Bayes factors. Journal of the American Statistical Association 90, 773-795.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.workflows.model_comparison import compare_models
    >>> models = {"density": exact.radiata_pine("x").target(), "adjusted": exact.radiata_pine("z").target()}
    >>> comparison = compare_models(models, budget=Budget(16, 200, 200), progress=False)
    >>> truth = exact.radiata_pine("x").log_evidence - exact.radiata_pine("z").log_evidence
    >>> factor, error = comparison.log_bayes_factor("density")
    >>> comparison.best, abs(factor - truth) < 4 * error < 0.5
    ('adjusted', True)
    """
    weights = _weights(models, prior_probabilities)
    chosen = select([method])[0].name
    spend = budget or Budget()
    folder = None if checkpoint is None else Path(checkpoint)
    seed, jobs = whole_number("seed", seed), whole_number("num_jobs", num_jobs, 1)
    tasks = [
        _Task(name, model, chosen, spend, _seed(seed, name), None if folder is None else str(folder / f"model-{i:03d}"))
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
        for path in folder.glob("model-*.*"):  # runs in the middle of models: all have their result now
            path.unlink(missing_ok=True)
    settings = {"method": chosen, "seed": seed} | vars(spend)
    comparison = ModelComparison(dict(zip(models, results, strict=True)), weights, settings)
    for warning in comparison.warnings:
        warnings.warn(warning, SamplingWarning, stacklevel=2)
    return comparison


@dataclass(frozen=True)
class _Task:
    name: str
    model: Target | Callable[[], Target]
    method: str
    budget: Budget
    seed: int
    checkpoint: str | None

    def packed(self) -> _Task:
        """Leave graphs behind: they cannot travel, and here they would round otherwise than elsewhere."""
        return replace(self, model=without_graphs(self.model)) if isinstance(self.model, Target) else self

    def fingerprint(self) -> str:
        """Identify the task wherever its folder lies."""
        return digest((self.name, self.model, self.method, self.budget, self.seed))

    def __repr__(self) -> str:
        return f"model {self.name!r}"


def _estimate(task: _Task) -> Evidence:
    target = task.model if isinstance(task.model, Target) else task.model()
    if not isinstance(target, Target):
        raise SettingsError(f"the callable of model {task.name!r} returned a {type(target).__name__}, not a Target")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # the estimate says by itself whether to trust it
        table = compare(
            target, [task.method], task.seed, budget=task.budget, checkpoint=task.checkpoint, progress=False
        )
    return table[task.method]


def _seed(seed: int, name: str) -> int:
    return int(torch.randint(2**31, (), generator=new_generator(seed, stream=f"model {name}")))


def _weights(
    models: Mapping[str, Target | Callable[[], Target]], given: Mapping[str, float] | None
) -> dict[str, float]:
    if not isinstance(models, Mapping):
        raise SettingsError(f"models must be a dict of targets by name, not a {type(models).__name__}")
    if len(models) < 2:
        raise SettingsError(f"give at least two models to compare, not {len(models)}")
    for name, model in models.items():
        if not isinstance(name, str) or not (isinstance(model, Target) or callable(model)):
            raise SettingsError(
                f"model {name!r} is a {type(model).__name__}; give a name and a Target, or a function that makes one"
            )
    if not isinstance(given, (Mapping, type(None))):
        raise SettingsError(f"prior_probabilities must be a dict of numbers by model, not a {type(given).__name__}")
    called = "the prior probability of {!r}".format
    equal = dict.fromkeys(models, 1.0)
    weights = equal if given is None else {name: real_number(called(name), given[name]) for name in given}
    total = sum(weights.values())
    if weights.keys() != models.keys() or not 0 < total < math.inf or min(weights.values()) < 0:
        raise SettingsError(
            f"prior_probabilities must give each of the models {', '.join(models)} a nonnegative number, some above "
            f"zero, not {dict(given or {})}"
        )
    return {name: weights[name] / total for name in models}


def _or_nothing(log_evidence: float) -> float:
    return -math.inf if math.isnan(log_evidence) else log_evidence


def _plot(table: pd.DataFrame, ax: Axes | None) -> Axes:
    from bayeskit._plots import BLUE, GREY, VERMILION

    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(table)), layout="constrained")
    for row, model in enumerate(table.itertuples()):
        factor, half = model.log_bayes_factor, TOLD_APART * model.log_bayes_factor_error
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


__all__ = ["ModelComparison", "compare_models"]
