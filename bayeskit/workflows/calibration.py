"""Calibration studies that leave their replicates, table and plot in a folder, and resume there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bayeskit._files import as_output_folder, write_atomically
from bayeskit.inference.evidence import Budget, Calibration, Problem, calibrate
from bayeskit.inference.evidence.calibration import SMALL, Answered


def calibration_in_folder(
    methods: str | Sequence[str],
    problem: str | Problem | Answered,
    folder: str | Path,
    num_replicates: int = 200,
    *,
    budget: Budget = SMALL,
    seed: int = 0,
    num_jobs: int = 1,
    progress: bool = True,
) -> Calibration:
    """Replicate methods on a problem and write ``replicates.csv``, ``calibration.csv`` and ``calibration.svg``.

    The folder is checked before anything is computed. While the study goes on, what is finished lies in
    ``checkpoint.replicates``; killed, it resumes from there when it is called again with the same arguments.

    Parameters
    ----------
    methods, problem, num_replicates, budget, seed, num_jobs, progress
        As in :func:`bayeskit.inference.evidence.calibrate`.
    folder : path
        Made if it does not exist.

    Returns
    -------
    Calibration

    Raises
    ------
    OutputError
        If the folder cannot be written.
    UnknownNameError, SettingsError
        As :func:`bayeskit.inference.evidence.calibrate`.
    CheckpointError
        If the folder holds replicates of another study.

    Examples
    --------
    >>> import tempfile
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.workflows import calibration_in_folder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = calibration_in_folder("bridge_sampling", "beta_binomial", folder, 2, budget=Budget(4, 100, 200))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['calibration.csv', 'calibration.svg', 'replicates.csv']
    """
    from matplotlib.figure import Figure

    out = as_output_folder(folder)
    kept = out / "checkpoint.replicates"
    found = calibrate(
        methods,
        problem,
        num_replicates,
        budget=budget,
        seed=seed,
        num_jobs=num_jobs,
        checkpoint=kept,
        progress=progress,
    )
    write_atomically(out / "replicates.csv", _csv(replicates_of(found, seed)))
    write_atomically(out / "calibration.csv", _csv(found.to_pandas()))
    figure = Figure(figsize=(7.0, 1.4 + 0.42 * len(found.estimates)), layout="constrained")
    found.plot(figure.subplots())
    figure.savefig(out / "calibration.svg", metadata={"Date": None})
    shutil.rmtree(kept, ignore_errors=True)
    return found


def replicates_of(found: Calibration, seed: int = 0) -> pd.DataFrame:
    """Return one row a method and replicate: case, method, seed, estimate, standard error, z, trusted, seconds.

    Examples
    --------
    >>> from bayeskit.inference import evidence
    >>> found = evidence.calibrate("laplace_importance_sampling", "beta_binomial", 3, progress=False)
    >>> replicates_of(found).shape
    (3, 8)
    """
    parts = [
        pd.DataFrame(
            {
                "case": found.case,
                "method": method,
                "seed": range(seed, seed + len(estimate)),
                "log_evidence": estimate,
                "standard_error": found.standard_errors[method],
                "z": found.z(method),
                "trusted": found.trusted[method],
                "seconds": found.seconds[method],
            }
        )
        for method, estimate in found.estimates.items()
    ]
    return pd.concat(parts, ignore_index=True)


def _csv(table: pd.DataFrame) -> bytes:
    return table.to_csv(index=False, float_format="%.10g").encode()
