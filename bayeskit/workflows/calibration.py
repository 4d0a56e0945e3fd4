"""Are the error bars right? Replicate estimators on a problem with a known answer and look at z."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bayeskit import exact
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence import METHODS, Budget, Evidence, compare
from bayeskit.parallel import map_tasks
from bayeskit.target import Target

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


@dataclass(frozen=True)
class _Replicate:
    case: str
    methods: tuple[str, ...]
    budget: Budget
    correlation: float | None
    seed: int
    compile: bool


COMPILE_FROM = 16


@dataclass(frozen=True)
class Calibration:
    """Estimates of one known log evidence, by method and replicate.

    Attributes
    ----------
    case : str
    log_evidence : float
        The exact answer.
    estimates, standard_errors, trusted : dict of array
        By method, each of shape ``(replicates,)``.
    """

    case: str
    log_evidence: float
    estimates: dict[str, np.ndarray]
    standard_errors: dict[str, np.ndarray]
    trusted: dict[str, np.ndarray]

    def z(self, method: str) -> np.ndarray:
        """Return ``(estimate - exact) / standard error`` of every replicate."""
        return (self.estimates[method] - self.log_evidence) / self.standard_errors[method]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a method: bias, error, sd of z, coverage of the 95 % interval, false comfort.

        ``false_comfort`` is the share of replicates with ``|z| > 3`` that were trusted.
        """
        rows = []
        for method in self.estimates:
            z, error = self.z(method), self.standard_errors[method]
            off = self.estimates[method] - self.log_evidence
            rows.append(
                {
                    "case": self.case,
                    "method": method,
                    "replicates": len(z),
                    "bias": off.mean(),
                    "sd_of_estimate": off.std(ddof=1),
                    "mean_standard_error": error.mean(),
                    "mean_z": z.mean(),
                    "sd_of_z": z.std(ddof=1),
                    "coverage_95": float((np.abs(z) <= 1.959963984540054).mean()),
                    "trusted": float(self.trusted[method].mean()),
                    "false_comfort": float(((np.abs(z) > 3) & self.trusted[method]).mean()),
                }
            )
        return pd.DataFrame(rows)


def calibrate(
    case: str,
    methods: tuple[str, ...] = ("bridge_sampling", "path_sampling", "stepping_stone"),
    num_replicates: int = 200,
    *,
    budget: Budget = SMALL,
    correlation: float | None = None,
    seed: int = 0,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Calibration:
    """Replicate estimators on an exact case, each time on fresh draws.

    Parameters
    ----------
    case : str
        A name in :data:`bayeskit.exact.CASES`.
    methods : tuple of str
    num_replicates : int, default 200
    budget : Budget
        Of each replicate; the default is small.
    correlation : float, optional
        Instead of sampling, use first-order autoregressive draws with this
        autocorrelation whose stationary law is the exact posterior, normal in
        unconstrained space; for methods that need posterior draws only.
    seed : int, default 0
    num_jobs : int, default 1
        Replicates under way at a time; see :func:`bayeskit.parallel.map_tasks`.
    checkpoint : path, optional
        Folder that keeps finished replicates, from which a later call with the same arguments goes on.
    progress : bool, default True

    Returns
    -------
    Calibration

    Raises
    ------
    SettingsError
        If ``correlation`` is given for a case whose posterior is not normal or
        a method that needs a ladder.
    CheckpointError
        If the folder belongs to another study.

    Examples
    --------
    >>> from bayeskit.workflows.calibration import calibrate
    >>> result = calibrate("linreg10", ("bridge_sampling",), 4, correlation=0.5)
    >>> result.estimates["bridge_sampling"].shape
    (4,)
    """
    if correlation is not None:
        if case != "linreg10" or any(METHODS[m].needs == "ladder" for m in methods):
            raise SettingsError("autoregressive draws exist for linreg10 and methods on posterior draws only")
        if not 0 <= correlation < 1:
            raise SettingsError(f"correlation must lie in [0, 1), not {correlation}")
    tasks = [
        _Replicate(case, tuple(methods), budget, correlation, seed + i, num_replicates >= COMPILE_FROM)
        for i in range(num_replicates)
    ]
    results = map_tasks(
        _replicate,
        tasks,
        num_jobs=num_jobs,
        checkpoint=checkpoint,
        result_types=(Evidence,),
        progress=progress,
        description=f"calibrating on {case}",
    )

    def column(attribute: str) -> dict[str, np.ndarray]:
        return {m: np.array([getattr(r[m], attribute) for r in results]) for m in methods}

    known = exact.get(case).log_evidence
    return Calibration(case, known, column("log_evidence"), column("standard_error"), column("trusted"))


@functools.cache
def _target(case: str, compile: bool) -> Target:
    """One target a process, so that its traced and compiled graphs serve every replicate."""
    target = exact.get(case).target()
    target.compile = compile
    return target


def _replicate(task: _Replicate) -> dict[str, Evidence]:
    target = _target(task.case, task.compile)
    draws = None if task.correlation is None else _autoregressive(target, task)
    table = compare(target, task.methods, seed=task.seed, budget=task.budget, draws=draws, progress=False)
    return table.results


def _autoregressive(target: Target, task: _Replicate) -> Draws:
    """Draws with a known autocorrelation from the exact normal posterior of linreg10."""
    case, rho = exact.get(task.case), float(task.correlation or 0.0)
    if case.posterior_mean is None or case.posterior_covariance is None:
        raise SettingsError(f"the posterior of {task.case} is not known in closed form")
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
