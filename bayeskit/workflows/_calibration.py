"""Calibration studies with replicates, table and plot in a folder, from which an interrupted study resumes."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bayeskit._core.folders import as_output_folder, write_atomically, write_csv
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence import Budget, Calibration, Problem, calibrate
from bayeskit.inference.evidence._calibration import SMALL, Answered, applicable, as_problem

if TYPE_CHECKING:
    import pandas as pd

_CHECKPOINT = "checkpoint.replicates"


def calibration_in_folder(
    methods: str | Sequence[str],
    problem: str | Problem | Answered,
    folder: str | Path,
    num_replicates: int = 200,
    *,
    budget: Budget = SMALL,
    seed: int = 0,
    num_jobs: int = 1,
    skip_refused: bool = False,
    progress: bool = True,
) -> Calibration:
    """Replicate methods on a problem and write ``replicates.csv``, ``calibration.csv`` and ``calibration.svg``.

    The folder is checked before any computation. ``checkpoint.replicates`` holds finished replicates until the study
    ends; a call with the same arguments resumes from them.

    Parameters
    ----------
    methods, problem, num_replicates, budget, seed, num_jobs, skip_refused, progress
        As in :func:`bayeskit.inference.evidence.calibrate`.
    folder : path
        Created if missing.

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
    out = as_output_folder(folder)
    found = calibrate(
        methods,
        problem,
        num_replicates,
        budget=budget,
        seed=seed,
        num_jobs=num_jobs,
        skip_refused=skip_refused,
        checkpoint=out / _CHECKPOINT,
        progress=progress,
    )
    _write(found, out)
    _remove_checkpoint(out)
    return found


def calibrations(
    methods: str | Sequence[str],
    problems: Sequence[str | Problem | Answered],
    folder: str | Path | None = None,
    num_replicates: int = 20,
    *,
    budget: Budget = SMALL,
    seed: int = 0,
    num_jobs: int = 1,
    progress: bool = True,
) -> list[Calibration]:
    """Replicate on each problem the methods that apply to it; SettingsError if no method applies to any problem.

    With a folder, each problem has a resumable subfolder, and ``calibration.csv`` and ``.svg`` show all problems.
    """
    import pandas as pd

    # Inapplicable methods are reported before any replication.
    out = None if folder is None else as_output_folder(folder)
    known = [as_problem(problem) for problem in problems]
    fitting = [applicable(methods, problem.build()) for problem in known]
    if not any(names for names, _ in fitting):
        reasons = [
            f"{name} on {p.name}: {why}" for p, (_, no) in zip(known, fitting, strict=True) for name, why in no.items()
        ]
        raise SettingsError(f"no method applies to any problem: {'; '.join(reasons)}")
    found = []
    for problem, (names, refused) in zip(known, fitting, strict=True):
        if not names:
            found.append(Calibration(problem.name, problem.log_evidence, {}, {}, {}, {}, refused=refused))
            continue
        inner = None if out is None else as_output_folder(out / problem.name)
        one = calibrate(
            methods,
            problem,
            num_replicates,
            budget=budget,
            seed=seed,
            num_jobs=num_jobs,
            skip_refused=True,
            checkpoint=None if inner is None else inner / _CHECKPOINT,
            progress=progress,
        )
        if inner is not None:
            _write(one, inner)
        found.append(one)
    if out is not None:
        estimated = [one for one in found if one.estimates]
        write_csv(out / "calibration.csv", pd.concat([one.to_pandas() for one in estimated]))
        _save_plot(estimated, out / "calibration.svg")
        for one in estimated:  # deleted last, so that a study killed at the last problem keeps the others
            _remove_checkpoint(out / one.case)
    return found


def _write(found: Calibration, folder: Path) -> None:
    write_csv(folder / "replicates.csv", _replicates_of(found))
    write_csv(folder / "calibration.csv", found.to_pandas())
    _save_plot([found], folder / "calibration.svg")


def _remove_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / _CHECKPOINT, ignore_errors=True)


def _save_plot(found: Sequence[Calibration], path: Path) -> None:
    from matplotlib.figure import Figure

    heights = [1.4 + 0.42 * len(one.estimates) for one in found]
    figure = Figure(figsize=(7.0, sum(heights)), layout="constrained")
    axes = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
    for one, ax in zip(found, axes, strict=True):
        one.plot(ax)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def _replicates_of(found: Calibration) -> pd.DataFrame:
    """Return a row per method and replicate: case, method, seed, estimate, standard error, z, trusted, seconds."""
    import pandas as pd

    parts = [
        pd.DataFrame(
            {
                "case": found.case,
                "method": method,
                "seed": found.seeds or [math.nan] * len(estimate),
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
