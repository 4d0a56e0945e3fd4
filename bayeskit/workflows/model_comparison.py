"""Compare models of the same data by their evidence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bayeskit._engine import Engine
from bayeskit._settings import whole_number
from bayeskit._tasks import digest
from bayeskit._torch import derived_seed
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.evidence import Budget, Evidence, compare
from bayeskit.inference.evidence.material import Material
from bayeskit.inference.evidence.methods import Method, select
from bayeskit.parallel import map_tasks
from bayeskit.target import Target
from bayeskit.workflows.bayes_factors import ModelComparison, as_prior_probabilities


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
        called where the model is worked on, and before where the method does not apply to every target.
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
        those of the models; if the method gives no log evidence or does not apply to one of the models.
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
    _check_models(models)
    weights = as_prior_probabilities(models, prior_probabilities)
    way = select([method])[0]
    chosen = way.name
    _check_method(way, models)
    spend = budget or Budget()
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
        """Leave graphs behind: here they would round otherwise than in another process, where they cannot go."""
        return replace(self, model=_without_graphs(self.model)) if isinstance(self.model, Target) else self

    def fingerprint(self) -> str:
        """Identify the task wherever its folder lies."""
        return digest((self.name, self.model, self.method, self.budget, self.seed))

    def __repr__(self) -> str:
        return f"model {self.name!r}"


def _check_method(method: Method, models: Mapping[str, Target | Callable[[], Target]]) -> None:
    """Say what cannot work before any model is worked on."""
    if method.kind == "score":
        raise SettingsError(
            f"{method.name} is a predictive score, which is no log evidence and gives no Bayes factor; choose a method "
            "such as bridge_sampling"
        )
    if method.refuses is None and not method.needs & {"prior", "ladder"}:
        return  # it applies to every target, so that none needs to be built here
    for name, model in models.items():
        target = _built(name, model)
        reason = method.refusal(target, Material(target))
        if reason is not None:
            raise SettingsError(
                f"{method.name} does not apply to model {name!r}: {reason}; choose a method that applies to all models"
            )


def _built(name: str, model: Target | Callable[[], Target]) -> Target:
    try:
        target = model if isinstance(model, Target) else model()
    except TypeError as error:
        raise SettingsError(
            f"the callable of model {name!r} cannot be called without arguments ({error}); of a Pyro model, give "
            "Target.from_pyro(model, ...)"
        ) from error
    if not isinstance(target, Target):
        raise SettingsError(f"the callable of model {name!r} returned a {type(target).__name__}, not a Target")
    return target


def _estimate(task: _Task) -> Evidence:
    target = _built(task.name, task.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # the estimate says by itself whether to trust it
        table = compare(
            target, [task.method], task.seed, budget=task.budget, checkpoint=task.checkpoint, progress=False
        )
    return table[task.method]


def _check_models(models: Mapping[str, Target | Callable[[], Target]]) -> None:
    if not isinstance(models, Mapping):
        raise SettingsError(f"models must be a dict of targets by name, not a {type(models).__name__}")
    if len(models) < 2:
        raise SettingsError(f"give at least two models to compare, not {len(models)}")
    for name, model in models.items():
        if not isinstance(name, str) or not (isinstance(model, Target) or callable(model)):
            raise SettingsError(
                f"model {name!r} is a {type(model).__name__}; give a name and a Target, or a function that makes one"
            )


def _without_graphs(target: Target) -> Target:
    bare = copy.copy(target)
    bare._engine = Engine(bare._joint_of_batch, bare.dim, bare.dtype, bare.device)
    return bare


__all__ = ["ModelComparison", "compare_models"]
