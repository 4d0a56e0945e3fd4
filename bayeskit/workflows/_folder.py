"""Runs that write table, draws and report to a folder, and resume there after an interruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeskit._core.compatibility import write_netcdf
from bayeskit._core.folders import as_output_folder, write_csv
from bayeskit._core.storage import is_tensor_file
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.inference.evidence import Budget, EvidenceComparison, compare, select
from bayeskit.inference.samplers import sample
from bayeskit.inference.samplers._driver import obey
from bayeskit.report import posterior_summary, write_report

_CHECKPOINT = "checkpoint"


@takes_draws
def evidence_in_folder(
    target: Target,
    folder: str | Path,
    *,
    title: str,
    methods: str | Sequence[str] = "all",
    seed: int = 0,
    budget: Budget | None = None,
    reference: float | None = None,
    reference_error: float = 0.0,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> EvidenceComparison:
    """Estimate the evidence and write ``evidence.csv``, ``posterior.nc`` and ``report.html``.

    The folder is checked before any computation. Files ``checkpoint.*`` hold the state during the run: a call with the
    same arguments resumes from them. They are deleted once all results are written.

    Parameters
    ----------
    target : Target
    folder : path
        Created if missing.
    title : str
        Heading of the report.
    methods, seed, budget, progress
        As in :func:`bayeskit.inference.evidence.compare`.
    reference, reference_error, settings
        As in :func:`bayeskit.report.write_report`.

    Returns
    -------
    EvidenceComparison

    Raises
    ------
    OutputError
        If the folder cannot be written.
    UnknownNameError
        For an unknown method.
    CheckpointError
        If the folder holds a checkpoint of another run.

    Examples
    --------
    >>> import tempfile
    >>> import bayeskit as bk
    >>> from bayeskit.workflows import evidence_in_folder
    >>> from bayeskit.inference.evidence import Budget
    >>> target = bk.exact.get("beta_binomial").target()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = evidence_in_folder(
    ...         target, folder, title="coin", methods=["bridge_sampling"], budget=Budget(4, 100, 200))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['evidence.csv', 'posterior.nc', 'report.html']
    """
    select(methods)
    out = as_output_folder(folder)
    comparison = compare(target, methods, seed=seed, budget=budget, checkpoint=out / _CHECKPOINT, progress=progress)
    # The table first: if the disk fills up with the draws, the table is already there.
    comparison.to_csv(out / "evidence.csv")
    draws = posterior_draws(comparison)
    if draws is not None:
        save_netcdf(draws, out / "posterior.nc")
    else:
        (out / "posterior.nc").unlink(missing_ok=True)  # of an earlier run, not the basis of this table
    write_report(
        out / "report.html",
        comparison,
        title=title,
        target=target,
        reference=reference,
        reference_error=reference_error,
        settings=settings,
    )
    remove_checkpoints(out)
    return comparison


@takes_draws
def posterior_in_folder(
    target: Target,
    folder: str | Path,
    *,
    title: str,
    seed: int = 0,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    target_acceptance: float = 0.8,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Draws:
    """Draw from the posterior and write ``summary.csv``, ``posterior.nc`` and ``report.html``.

    The folder is checked before any computation; an interrupted run resumes as in :func:`evidence_in_folder`.

    Parameters
    ----------
    target, folder, title, settings
        As in :func:`evidence_in_folder`.
    seed, num_chains, num_warmup, num_samples, target_acceptance, progress
        As in :func:`bayeskit.sample`.

    Returns
    -------
    Draws

    Raises
    ------
    OutputError
        If the folder cannot be written.
    CheckpointError
        If the folder holds a checkpoint of another run.

    Examples
    --------
    >>> import tempfile
    >>> import bayeskit as bk
    >>> from bayeskit.workflows import posterior_in_folder
    >>> target = bk.exact.get("beta_binomial").target()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draws = posterior_in_folder(target, folder, title="coin", num_warmup=50, num_samples=50)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['posterior.nc', 'report.html', 'summary.csv']
    """
    out = as_output_folder(folder)
    draws = sample(
        target,
        num_chains,
        num_warmup,
        num_samples,
        seed=seed,
        target_acceptance=target_acceptance,
        checkpoint=out / f"{_CHECKPOINT}.posterior",
        progress=progress,
    )
    obey(draws.settings["ending"])
    write_csv(out / "summary.csv", posterior_summary(draws), index=True, float_format="%.8g")
    save_netcdf(draws, out / "posterior.nc")
    facts = dict(settings or {}) | {"num_chains": num_chains, "num_samples": num_samples} | draws.settings
    write_report(out / "report.html", EvidenceComparison({}, draws, None), title=title, target=target, settings=facts)
    remove_checkpoints(out, "posterior")
    return draws


def posterior_draws(comparison: EvidenceComparison) -> Draws | None:
    """Return the draws of the posterior run, or of the ladder's last rung; None without either."""
    if comparison.draws is not None or comparison.ladder is None:
        return comparison.draws
    whole = comparison.ladder.draws
    last = whole.beta == 1
    return Draws(
        whole.unconstrained[last],
        whole.log_prior[last],
        whole.log_likelihood[last],
        whole.beta[last],
        {name: value[last] for name, value in whole.sample_stats.items()},
        whole.num_gradients,
        whole.seconds,
        whole.settings,
        whole.target,
    )


def save_netcdf(draws: Draws, path: str | Path) -> None:
    """Write draws as netCDF in ArviZ's schema, atomically.

    Parameters
    ----------
    draws : Draws
    path : path

    Raises
    ------
    OutputError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import bayeskit as bk, xarray as xr
    >>> from bayeskit.workflows import save_netcdf
    >>> target = bk.exact.get("beta_binomial").target()
    >>> draws = bk.sample(target, num_warmup=50, num_samples=20)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_netcdf(draws, f"{folder}/posterior.nc")
    ...     with xr.open_datatree(f"{folder}/posterior.nc", engine="h5netcdf") as tree:
    ...         dict(tree["posterior"].sizes)
    {'chain': 4, 'draw': 20}
    """
    write_netcdf(draws.to_datasets(), path)


def remove_checkpoints(folder: Path, part: str = "*") -> None:
    """Delete the checkpoint files of finished runs, and no other files."""
    for path in folder.glob(f"{_CHECKPOINT}.{part}"):
        if is_tensor_file(path):
            path.unlink(missing_ok=True)
