import os
import signal
import subprocess
import sys
import time

import arviz
import numpy as np
import pandas as pd
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import CheckpointError, OutputError, UnknownNameError
from bayeskit.inference.evidence import Budget
from bayeskit.workflows import evidence_in_folder, posterior_in_folder

SMALL = Budget(4, 60, 100, num_temperatures=6, ladder_chains=4, ladder_warmup=30, ladder_samples=40,
               num_particles=8, num_replicates=8, num_live=40)  # fmt: skip
LONG = """
import inspect, sys
import bayeskit as bk
from bayeskit.workflows import posterior_in_folder
inspect.unwrap(bk.sample).__kwdefaults__["checkpoint_seconds"] = 0.0
target = bk.exact.get("beta_binomial").target()
posterior_in_folder(target, sys.argv[1], title="x", num_warmup=150, num_samples=250, progress=False)
"""


def target():
    return bk.exact.get("beta_binomial").target()


@pytest.mark.calibration
def test_folder_holds_table_draws_and_report(tmp_path):
    out = tmp_path / "new" / "folder"
    comparison = evidence_in_folder(target(), out, title="coin", budget=SMALL, seed=3, progress=False)
    assert sorted(p.name for p in out.iterdir()) == ["evidence.csv", "posterior.nc", "report.html"]
    table = pd.read_csv(out / "evidence.csv")
    columns = "method log_evidence standard_error num_evaluations seconds trusted warnings predictive_score"
    assert list(table.columns) == columns.split()
    # A score has its own column, and no log evidence.
    assert (table["log_evidence"].isna() | table["predictive_score"].isna()).all()
    np.testing.assert_allclose(table["log_evidence"], comparison.to_pandas()["log_evidence"], rtol=1e-9)


@pytest.mark.calibration
def test_arviz_reads_the_draws(tmp_path):
    comparison = evidence_in_folder(
        target(), tmp_path, title="coin", methods=["bridge_sampling"], budget=SMALL, progress=False
    )
    loaded = arviz.from_netcdf(tmp_path / "posterior.nc", engine="h5netcdf")
    values = comparison.draws.values()["p"]
    np.testing.assert_array_equal(loaded["posterior"]["p"].values, values.numpy())
    assert "lp" in loaded["sample_stats"] and not loaded["sample_stats"]["diverging"].values.all()
    loaded.close()


def test_draws_come_from_the_ladder_where_there_is_no_posterior_run(tmp_path):
    comparison = evidence_in_folder(
        target(), tmp_path, title="coin", methods=["stepping_stone"], budget=SMALL, progress=False
    )
    assert comparison.draws is None
    loaded = arviz.from_netcdf(tmp_path / "posterior.nc", engine="h5netcdf")
    assert dict(loaded["posterior"].sizes) == {"chain": 4, "draw": 40}
    loaded.close()


def test_nothing_is_computed_for_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def forbidden(*args, **kwargs):
        raise RuntimeError("computed before the folder was checked")

    monkeypatch.setattr("bayeskit.workflows._folder.compare", forbidden)
    monkeypatch.setattr("bayeskit.workflows._folder.sample", forbidden)
    with pytest.raises(OutputError, match="--out"):
        evidence_in_folder(target(), tmp_path / "file" / "below", title="coin")
    with pytest.raises(OutputError, match="--out"):
        posterior_in_folder(target(), tmp_path / "file" / "below", title="coin")
    with pytest.raises(UnknownNameError):
        evidence_in_folder(target(), tmp_path, title="coin", methods=["nonsense"])


@pytest.mark.calibration
def test_a_checkpoint_survives_results_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("bayeskit.workflows._folder.write_report", _full)
    with pytest.raises(OutputError, match="full"):
        evidence_in_folder(target(), tmp_path, title="coin", budget=SMALL, progress=False)
    names = {p.name for p in tmp_path.iterdir()}
    parts = "posterior ladder reference smc.pilot smc.replicates adaptive nested".split()
    assert {f"checkpoint.{part}" for part in parts} | {"evidence.csv", "posterior.nc"} <= names
    assert "report.html" not in names
    with pytest.raises(CheckpointError, match="seed"):
        evidence_in_folder(target(), tmp_path, title="coin", budget=SMALL, seed=1, progress=False)


@pytest.mark.calibration
def test_no_checkpoint_is_left_and_no_file_of_others_is_touched(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"somebody's network")
    methods = ["generalised_stepping_stone", "thermodynamic_integration", "adaptive_smc", "nested_sampling"]
    comparison = evidence_in_folder(target(), tmp_path, title="coin", methods=methods, budget=SMALL, progress=False)
    assert not any(warning.startswith("failed") for z in comparison for warning in z.warnings)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint.pt", "evidence.csv", "posterior.nc", "report.html"]


@pytest.mark.calibration
def test_a_posterior_run_leaves_the_checkpoints_of_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr("bayeskit.workflows._folder.write_report", _full)
    with pytest.raises(OutputError, match="full"):
        evidence_in_folder(target(), tmp_path, title="x", methods=["stepping_stone"], budget=SMALL, progress=False)
    monkeypatch.undo()
    posterior_in_folder(target(), tmp_path, title="x", num_warmup=30, num_samples=30, progress=False)
    assert (tmp_path / "checkpoint.ladder").exists()


def _full(*args, **kwargs):
    raise OutputError("the disk is full")


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_draws(tmp_path):
    whole = tmp_path / "whole"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    length = {"num_warmup": 150, "num_samples": 250}
    posterior_in_folder(target(), whole, title="x", progress=False, **length)
    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", LONG, str(killed)], env=environment)
    checkpoint = killed / "checkpoint.posterior"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists() and not (killed / "posterior.nc").exists()
    draws = posterior_in_folder(target(), killed, title="x", progress=False, **length)
    expected = arviz.from_netcdf(whole / "posterior.nc", engine="h5netcdf")
    assert torch.equal(torch.as_tensor(expected["posterior"]["p"].values), draws.values()["p"])
    expected.close()
    assert not checkpoint.exists()


@pytest.mark.calibration
def test_draws_of_an_earlier_table_do_not_stay(tmp_path):
    for methods, files in ((["bridge_sampling"], 3), (["laplace_importance_sampling"], 2)):
        evidence_in_folder(target(), tmp_path, title="coin", methods=methods, budget=SMALL, progress=False)
        assert len(list(tmp_path.iterdir())) == files
