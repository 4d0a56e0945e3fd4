"""Calibration of standard errors: replicates of methods on a problem with a known answer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.page import Listed, frame_table, result_html
from bayeskit._core.randomness import new_generator
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import BayeskitWarning, SettingsError
from bayeskit.inference.evidence._budget import Budget
from bayeskit.inference.evidence._comparison import compare
from bayeskit.inference.evidence._methods import METHODS, Part, select
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.parallel import map_tasks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

SMALL = Budget(
    num_chains=4,
    num_warmup=200,
    num_samples=1000,
    ladder_chains=8,
    ladder_warmup=150,
    ladder_samples=300,
    num_particles=16,
    num_live=100,
)
_COMPILE_FROM = 16
#: The exact case with a normal posterior in unconstrained space.
_NORMAL_CASE = "linreg10"
#: Errors below this, in nats, are rounding errors.
_EXACT = 1e-10
_COVERED = NormalDist().inv_cdf(0.975)


class Answered(Protocol):
    """A problem whose log evidence is known, such as an :class:`~bayeskit.exact.ExactCase`."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    @property
    def log_evidence(self) -> float:
        """Exact log evidence in nats."""
        ...

    def target(self) -> Target:
        """Return the target to estimate on."""
        ...


@dataclass(frozen=True)
class Problem:
    """A target for replicated estimates.

    Attributes
    ----------
    name : str
    build : callable
        Function that makes the target, called once per process.
    log_evidence : float, default NaN
        Exact answer in nats; if NaN, replicates are compared with their mean.
    standard_error : float, default 0
        Standard error of ``log_evidence``, if that is an estimate.
    """

    name: str
    build: Callable[[], Target]
    log_evidence: float = math.nan
    standard_error: float = 0.0


@dataclass(frozen=True)
class _Replicate:
    problem: Problem
    fingerprint: str
    methods: tuple[str, ...]
    budget: Budget
    correlation: float | None
    seed: int
    compile: bool


@dataclass(frozen=True)
class Calibration:
    """Replicated estimates of one log evidence, by method.

    Attributes
    ----------
    case : str
    log_evidence : float
        Exact answer; NaN if unknown.
    estimates, standard_errors, trusted, seconds : dict of array
        Arrays by method, each of shape ``(replicates,)``.
    reference_error : float
        Standard error of ``log_evidence``.
    seeds : tuple of int
        Seeds of the replicates.
    refused : dict of str
        Methods that do not apply, with the reason.
    """

    case: str
    log_evidence: float
    estimates: dict[str, NDArray[np.float64]]
    standard_errors: dict[str, NDArray[np.float64]]
    trusted: dict[str, NDArray[np.bool_]]
    seconds: dict[str, NDArray[np.float64]]
    reference_error: float = 0.0
    seeds: tuple[int, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def z(self, method: str) -> NDArray[np.float64]:
        """Return ``(estimate - exact) / standard error`` of every replicate; relative to their mean if exact is NaN."""
        estimate = self.estimates[method]
        truth = estimate[np.isfinite(estimate)].mean() if math.isnan(self.log_evidence) else self.log_evidence
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (estimate - truth) / np.hypot(self.standard_errors[method], self.reference_error)
        # An estimate that is exact up to rounding, with an error of zero, has z = 0.
        return np.where((self.standard_errors[method] < _EXACT) & (np.abs(estimate - truth) < _EXACT), 0.0, z)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per method: bias, error, sd of z, coverage of the 95 % interval, false comfort.

        ``false_comfort`` is the share of replicates with ``|z| > 3`` that were trusted. ``failed`` is the share of
        replicates without an estimate, which enter no other column but ``trusted``.
        """
        import pandas as pd

        rows = []
        for method in self.estimates:
            known = np.isfinite(self.estimates[method])
            z, error = self.z(method)[known], self.standard_errors[method][known]
            off, trusted = self.estimates[method][known] - self.log_evidence, self.trusted[method]
            with np.errstate(invalid="ignore", divide="ignore"):
                rows.append(
                    {
                        "case": self.case,
                        "method": method,
                        "replicates": len(known),
                        "bias": _mean(off),
                        "sd_of_estimate": _spread(self.estimates[method][known]),
                        "mean_standard_error": _mean(error),
                        "mean_z": _mean(z),
                        "sd_of_z": _spread(z),
                        "coverage_95": _mean(np.abs(z) <= _COVERED) if np.isfinite(error).any() else math.nan,
                        "trusted": _mean(trusted),
                        "false_comfort": float(((np.abs(z) > 3) & trusted[known]).sum()) / len(known),
                        "failed": 1 - _mean(known),
                        "seconds": float(np.median(self.seconds[method])),
                    }
                )
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        table = frame_table("Errors of the estimates", self._shown(), coverage_95=".1%", replicates="d")
        listed = [Listed(f"{len(self.refused)} methods do not apply", list(self.refused.items()))]
        return result_html(self._headline(), [table], listed if self.refused else [])

    def __repr__(self) -> str:
        return "\n".join([self._headline(), self._shown().to_string(index=False, float_format="{:.3g}".format)])

    def _headline(self) -> str:
        known = "" if math.isnan(self.log_evidence) else f", log evidence {self.log_evidence:.4f}"
        return f"{self.case}{known}: {len(self.seeds)} replicates of {len(self.estimates)} methods"

    def _shown(self) -> pd.DataFrame:
        return self.to_pandas().drop(columns=["case", "sd_of_estimate", "mean_z", "failed"])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot z of all replicates, one row per method; about 95 % should lie in the shaded band.

        Parameters
        ----------
        ax : Axes, optional
        """
        from bayeskit.inference.evidence._plots import plot_calibration

        z = {method: self.z(method) for method in self.estimates}
        failed = {method: np.isnan(estimate) for method, estimate in self.estimates.items()}
        return plot_calibration(z, self.trusted, self.case, ax, failed=failed)


def calibrate(
    methods: str | Sequence[str],
    problem: str | Problem | Answered,
    num_replicates: int = 200,
    *,
    budget: Budget = SMALL,
    correlation: float | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    skip_refused: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Calibration:
    """Replicate methods on a problem, with new draws for each replicate.

    Parameters
    ----------
    methods : str or sequence of str
        Names of estimators in :mod:`bayeskit.inference.evidence`; "all" selects those that apply to the problem.
    problem : str, ExactCase or Problem
        Name in :data:`bayeskit.exact.CASES`, case, or target with its answer.
    num_replicates : int, default 200
    budget : Budget
        Sizes of the runs of each replicate; small by default.
    correlation : float, optional
        Replace sampling by stationary first-order autoregressive draws with this autocorrelation from the exact
        posterior. Only for linreg10 and for methods that use posterior draws.
    seed : int, default 0
        Determines the seeds of the replicates.
    num_jobs : int, default 1
        Number of replicates run in parallel; see :func:`bayeskit.parallel.map_tasks`.
    skip_refused : bool, default False
        Skip methods that do not apply, as "all" does, instead of raising; the result lists them in ``refused``.
    checkpoint : path, optional
        Folder of finished replicates, from which a later call with the same arguments resumes.
    progress : bool, default True

    Returns
    -------
    Calibration

    Raises
    ------
    UnknownNameError
        If a method or case is unknown.
    SettingsError
        If a method does not apply or is a predictive score, unless skipped; if no method is left; if ``correlation``
        is used with another target or with a method that does not use posterior draws alone; if the ``build`` of a
        problem does not make a target.
    CheckpointError
        If the folder belongs to another study.

    Examples
    --------
    >>> from bayeskit.inference import evidence
    >>> result = evidence.calibrate("bridge_sampling", "linreg10", 4, correlation=0.5)
    >>> result.estimates["bridge_sampling"].shape
    (4,)
    """
    num_replicates = whole_number("num_replicates", num_replicates, 1)
    known = as_problem(problem)
    if not callable(known.build):
        raise SettingsError(
            f"the build of problem {known.name!r} is a {type(known.build).__name__}; give a function without arguments "
            "that makes the Target, because each process makes its own"
        )
    try:
        target = known.build()
    except TypeError as error:
        raise SettingsError(
            f"the build of problem {known.name!r} cannot be called without arguments: {error}"
        ) from error
    if not isinstance(target, Target):
        raise SettingsError(f"the build of problem {known.name!r} returned a {type(target).__name__}, not a Target")
    names, refused = applicable(methods, target)
    if refused and (not names or not (skip_refused or methods == "all")):
        raise SettingsError(
            "; ".join(f"{name} cannot be calibrated on {known.name}: {refused[name]}" for name in refused)
        )
    if correlation is not None:
        of_another = target.fingerprint() != _exact_target(_NORMAL_CASE).fingerprint()
        if of_another or any(Part.POSTERIOR not in METHODS[m].needs for m in names):
            raise SettingsError(
                f"autoregressive draws exist only for the exact case {_NORMAL_CASE} and methods on posterior draws"
            )
        correlation = real_number("correlation", correlation, "[0, 1)")
    pays, fingerprint = num_replicates >= _COMPILE_FROM, target.fingerprint()
    seeds = _seeds(seed, num_replicates)
    tasks = [_Replicate(known, fingerprint, names, budget, correlation, one, pays) for one in seeds]
    results = map_tasks(
        _replicate,
        tasks,
        num_jobs=num_jobs,
        checkpoint=checkpoint,
        progress=progress,
        description=f"calibrating on {known.name}",
    )

    def column(attribute: str) -> dict[str, NDArray[Any]]:
        return {m: np.array([r[m][attribute] for r in results]) for m in names}

    return Calibration(
        known.name,
        known.log_evidence,
        column("log_evidence"),
        column("standard_error"),
        column("trusted"),
        column("seconds"),
        known.standard_error,
        seeds,
        refused,
    )


def as_problem(problem: str | Problem | Answered) -> Problem:
    """Return a Problem as it is or made from an exact case or its name; UnknownNameError or SettingsError otherwise."""
    if isinstance(problem, Problem):
        return problem
    if isinstance(problem, str):
        from bayeskit import exact

        case = exact.get(problem)
        error = float(getattr(case, "standard_error", 0.0))
        return Problem(case.name, partial(_exact_target, problem), case.log_evidence, error)
    try:
        error = float(getattr(problem, "standard_error", 0.0))
        return Problem(problem.name, problem.target, float(problem.log_evidence), error)
    except AttributeError as missing:
        raise SettingsError(
            f"problem must not be a {type(problem).__name__} ({missing}); give the name of an exact case, an "
            "ExactCase, or evidence.Problem(name, build, log_evidence)"
        ) from missing


def _exact_target(name: str) -> Target:
    from bayeskit import exact

    return exact.get(name).target()


def applicable(methods: str | Sequence[str], target: Target) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the methods that can be calibrated on a target, and for the others the reason, by name."""
    names, refused, runs = [], {}, SharedRuns(target)
    for method in select(methods):
        score = "it is a predictive score, not a log evidence" if method.kind == "score" else None
        reason = score or method.refusal(target, runs)
        if reason is None:
            names.append(method.name)
        else:
            refused[method.name] = reason
    return tuple(names), refused


def _seeds(seed: int, count: int) -> tuple[int, ...]:
    """Draw seeds one at a time, so that a longer list begins with a shorter one; neighbouring seeds share none."""
    generator = new_generator(whole_number("seed", seed), stream="replicates")
    return tuple(int(torch.randint(2**31, (), generator=generator)) for _ in range(count))


# One target per process, whose traced and compiled graphs serve every replicate.
_TARGETS: dict[str, Target] = {}


def _target(task: _Replicate) -> Target:
    if task.fingerprint not in _TARGETS:
        _TARGETS.clear()
        _TARGETS[task.fingerprint] = task.problem.build()
        _TARGETS[task.fingerprint].compile = task.compile
    return _TARGETS[task.fingerprint]


def _replicate(task: _Replicate) -> dict[str, dict[str, float | bool]]:
    target = _target(task)
    draws = None if task.correlation is None else _autoregressive(target, task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayeskitWarning)  # warnings are counted by ``trusted``
        table = compare(target, task.methods, seed=task.seed, budget=task.budget, draws=draws, progress=False)
    return {
        z.method: {
            "log_evidence": z.log_evidence,
            "standard_error": z.standard_error,
            "trusted": z.trusted,
            "seconds": z.seconds,
        }
        for z in table
    }


def _autoregressive(target: Target, task: _Replicate) -> Draws:
    """Draws with a known autocorrelation from the exact normal posterior of linreg10."""
    from bayeskit import exact

    case, rho = exact.get(_NORMAL_CASE), float(task.correlation or 0.0)
    assert case.posterior_mean is not None and case.posterior_covariance is not None
    mean, factor = case.posterior_mean["b"], torch.linalg.cholesky(case.posterior_covariance["b"])
    generator = new_generator(task.seed, stream="autoregressive draws")
    chains, count = task.budget.num_chains, task.budget.num_samples
    noise = torch.randn(count, chains, target.dim, generator=generator, dtype=target.dtype)
    x = noise.clone()
    for i in range(1, count):
        x[i] = rho * x[i - 1] + math.sqrt(1 - rho**2) * noise[i]
    u = (mean + x @ factor.T).movedim(0, 1).contiguous()
    log_prior, log_likelihood = target.evaluate(u)
    return Draws(u, log_prior, log_likelihood, torch.ones(chains, dtype=target.dtype), target=target)


def _mean(x: Any) -> float:
    return float(np.mean(x)) if len(x) else math.nan


def _spread(x: Any) -> float:
    return float(np.std(x, ddof=1)) if len(x) > 1 else math.nan
