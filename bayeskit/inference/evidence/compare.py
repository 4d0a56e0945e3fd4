"""Run several estimators on shared draws and set them side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from bayeskit._files import write_atomically
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, UnknownNameError
from bayeskit.inference.evidence.budget import Budget
from bayeskit.inference.evidence.methods import Material, Method, select
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder, sample, sample_ladder
from bayeskit.inference.samplers.driver import obey
from bayeskit.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("method", "log_evidence", "standard_error", "num_evaluations", "seconds", "trusted", "warnings")


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
    """

    results: dict[str, Evidence]
    draws: Draws | None
    ladder: Ladder | None
    settings: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, method: str) -> Evidence:
        if method not in self.results:
            raise UnknownNameError(f"{method!r} was not run; there are: {', '.join(self.results)}")
        return self.results[method]

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self.results.values())

    def to_pandas(self) -> pd.DataFrame:
        """Return the table: method, estimate, standard error, evaluations, seconds, trusted, warnings."""
        rows = [
            (
                z.method,
                z.log_evidence,
                z.standard_error,
                z.num_evaluations,
                z.seconds,
                z.trusted,
                "; ".join(z.warnings),
            )
            for z in self
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

    def __str__(self) -> str:
        return "\n".join(str(z) for z in self)


def compare(
    target: Target,
    methods: str | Sequence[str] = "all",
    seed: int = 0,
    *,
    budget: Budget | None = None,
    draws: Draws | None = None,
    ladder: Ladder | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> EvidenceComparison:
    """Estimate the log evidence by several methods: one posterior run, one tempered ladder.

    Parameters
    ----------
    target : Target
    methods : "all" or sequence of str
        Names of functions in :mod:`bayeskit.inference.evidence`.
    seed : int, default 0
    budget : Budget, optional
        Chains and lengths of the shared runs.
    draws, ladder : optional
        Existing runs to use instead of new ones.
    checkpoint : path, optional
        Prefix of the files from which an interrupted comparison resumes: ``PREFIX.posterior``,
        ``PREFIX.ladder``, ``PREFIX.smc`` and ``PREFIX.nested``.
    progress : bool, default True

    Returns
    -------
    EvidenceComparison
        ``num_evaluations`` and ``seconds`` of each method include its draws: what the
        estimate would have cost alone.

    Raises
    ------
    UnknownNameError
        For an unknown method.
    BayeskitError
        If the shared draws cannot be made. A method that fails later is reported as
        failed in its row, and the others stand.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> case = bk.exact.get("beta_binomial")
    >>> small = evidence.Budget(4, 100, 200, num_temperatures=10, ladder_chains=4, ladder_samples=100)
    >>> table = evidence.compare(case.target(), ["bridge_sampling", "stepping_stone"], budget=small)
    >>> list(table.to_pandas()["method"])
    ['bridge_sampling', 'stepping_stone']
    >>> abs(table["bridge_sampling"].log_evidence - case.log_evidence) < 0.05
    True
    """
    chosen = select(methods)
    spend = budget or Budget()
    needs = {m.needs for m in chosen}
    if "posterior" in needs and draws is None:
        draws = sample(
            target,
            spend.num_chains,
            spend.num_warmup,
            spend.num_samples,
            seed,
            target_acceptance=spend.target_acceptance,
            checkpoint=None if checkpoint is None else f"{checkpoint}.posterior",
            progress=progress,
        )
        obey(draws.settings.get("ending"))
    if "ladder" in needs and ladder is None:
        ladder = sample_ladder(
            target,
            spend.num_temperatures,
            spend.ladder_chains,
            spend.ladder_warmup,
            spend.ladder_samples,
            seed,
            exchange=spend.exchange,
            target_acceptance=spend.target_acceptance,
            checkpoint=None if checkpoint is None else f"{checkpoint}.ladder",
            progress=progress,
        )
        obey(ladder.draws.settings.get("ending"))
    material = Material(draws, ladder, spend, None if checkpoint is None else str(checkpoint), progress)
    results = {m.name: _estimate(m, target, material, seed) for m in chosen}
    settings = {"seed": seed} | {k: v for k, v in vars(spend).items()}
    return EvidenceComparison(results, draws, ladder, settings)


def _estimate(method: Method, target: Target, material: Material, seed: int) -> Evidence:
    begin = time.monotonic()
    try:
        result = method.estimate(target, material, seed)
    except (BayeskitError, ArithmeticError, RuntimeError, ValueError) as error:
        # Whatever one method stumbles over, the draws and the other methods' results stand.
        kind = "" if isinstance(error, BayeskitError) else f"{type(error).__name__}: "
        result = Evidence(method.name, math.nan, math.nan, 0, (f"failed: {kind}{error}",))
    shared = 0.0
    if method.needs in ("posterior", "density") and material.draws is not None:
        shared = material.draws.seconds
    elif method.needs == "ladder" and material.ladder is not None:
        shared = material.ladder.draws.seconds
    return replace(result, seconds=time.monotonic() - begin + shared)
