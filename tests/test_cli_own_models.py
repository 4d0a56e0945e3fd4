"""Models in a user's file, with the data of a table, from the command line."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from bayeskit import cli

MODELS = """
import pyro
import pyro.distributions as dist


def mean_only(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def by_group(y, group):
    with pyro.plate("group", 2):
        effect = pyro.sample("effect", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def whole(data, width=1.0):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(data)):
        pyro.sample("y", dist.Normal(mean, width), obs=data["y"])


def by_seed(seed):
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=seed)


class Kind:
    pass


number = 3
"""
Y = np.random.default_rng(5).normal(1.0, 1.0, 10).round(3)
FEW = ("--warmup", 100, "--samples", 100, "--quiet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    pd.DataFrame({"y": Y, "group": ["a", "b"] * 5, "note": "x"}).to_csv("d.csv", index=False)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def test_draws_of_a_model_in_a_file(folder):
    result = call("sample", "models.py:by_group", "--data", "d.csv", *FEW)
    assert result.exit_code == 0, result.output
    out = folder / "results" / "sample-models-by_group"
    table = pd.read_csv(out / "summary.csv", index_col=0)
    assert table.index.tolist() == ["effect[a]", "effect[b]"]
    exact = [Y[rows].sum() / (5 + 0.25) for rows in (slice(0, None, 2), slice(1, None, 2))]
    np.testing.assert_allclose(table["mean"], exact, atol=6 * float(table["mcse"].max()))
    assert (out / "posterior.nc").exists() and "models.py:by_group" in (out / "report.html").read_text()
    again = call("sample", "models.py:by_group", "--data", "d.csv", "--warmup", 100, "--samples", 100)
    assert again.stdout.startswith("finished before: models.py:by_group")
    edited = (folder / "models.py").read_text().replace("dist.Normal(0.0, 2.0)", "dist.Normal(0.0, 3.0)")
    (folder / "models.py").write_text(edited)
    other = call("sample", "models.py:by_group", "--data", "d.csv", "--out", out, *FEW)
    assert other.exit_code == 2 and "holds another run" in other.stderr


@pytest.mark.parametrize("model", ["mean_only", "whole"])
def test_evidence_of_a_model_in_a_file_is_exact(folder, model):
    arguments = ("--data", "d.csv", "--methods", "bridge_sampling", "--chains", 8, "--out", "out", *FEW)
    result = call("evidence", f"models.py:{model}", *arguments)
    assert result.exit_code == 0, result.output
    row = pd.read_csv("out/evidence.csv").iloc[0]
    exact = stats.multivariate_normal(np.zeros(10), np.eye(10) + 4).logpdf(Y)
    assert abs(row["log_evidence"] - exact) < 5 * row["standard_error"]


def test_only_columns_that_are_used_are_asked(folder):
    rows = ["y,group,note", "1.0,a,7", "2.0,,x", "0.5,b,8"]  # a note of numbers and texts, and a group that is missing
    (folder / "mixed.csv").write_text("\n".join(rows))
    assert call("sample", "models.py:mean_only", "--data", "mixed.csv", *FEW).exit_code == 0
    assert call("sample", "models.py:whole", "--data", "mixed.csv", *FEW).exit_code == 0
    missing = call("sample", "models.py:by_group", "--data", "mixed.csv", *FEW)
    assert missing.exit_code == 2 and "'group'" in missing.stderr and "numbers" not in missing.stderr.split("drop")[0]


@pytest.mark.calibration
def test_models_of_files_are_compared(folder):
    models = ("models.py:mean_only", "models.py:by_group")
    result = call("compare", *models, "--data", "d.csv", "--out", "out")
    assert result.exit_code == 0, result.output
    table = pd.read_csv("out/models.csv").set_index("model")
    one = stats.multivariate_normal(np.zeros(10), np.eye(10) + 4).logpdf(Y)
    five = stats.multivariate_normal(np.zeros(5), np.eye(5) + 4)
    two = five.logpdf(Y[::2]) + five.logpdf(Y[1::2])
    for model, exact in zip(models, (one, two), strict=True):
        assert abs(table["log_evidence"][model] - exact) < 5 * table["standard_error"][model]
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["models.csv", "run.json"]
    scored = call("loo", *models, "--data", "d.csv", "--out", "scores", *FEW)
    assert scored.exit_code == 0, scored.output
    rows = pd.read_csv("scores/loo.csv")
    assert rows["difference"][0] == 0 and rows["difference"][1] <= 0 and math.isfinite(rows["its_error"][1])
    assert len(pd.read_csv("scores/models-by_group/loo.csv")) == 10
    assert json.loads((folder / "scores" / "run.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sample", "none.py:model"), "none.py: there is no such file"),
        (("sample", "models.py:mean"), "no model is called 'mean'"),
        (("sample", "models.py"), "no model is called 'model'"),
        (("sample", "models.py:number"), "number in models.py is a int"),
        (("sample", "models.py:mean_only"), "takes y; pass --data FILE"),
        (("sample", "models.py:mean_only", "--data", "e.csv"), "e.csv: there is no such file"),
        (("sample", "models.py:by_group", "--data", "other.csv"), "'group', which is no column of other.csv"),
        (("sample", "models.py:mean_only", "--data", "models.npy"), "cannot be read as a table"),
        (("sample", "broken.py:model"), "broken.py, line 2: ZeroDivisionError"),
        (("sample", "left.py:model"), "left.py, line 2: SystemExit"),
        (("sample", "models.py:Kind", "--data", "d.csv"), "Kind in models.py is a class"),
        (
            ("sample", "models.py:by_seed", "--data", "seed.csv"),
            "'seed' of models.py:by_seed has the name",
        ),
        (("sample", "models.py:mean_only", "--data", "odd.csv"), "'y' holds numbers and texts, such as '-' in row 3"),
        (("sample", "models.py:mean_only", "--data", "words.csv"), "'y' holds texts"),
        (("sample", "models.py:mean_only", "--data", "long.csv"), "long.csv cannot be read as a table"),
        (("sample", "models.py:mean_only", "--data", "twice.csv"), "two columns called 'y'"),
        (("loo", "models.py:by_group", "--data", "d.csv", "--by", "nope"), "no plate is called 'nope'"),
        (("compare", "models.py:whole", "models.py:mean_only", "--draws", 5), "are for topologies"),
        (("compare", "--alignment", "x", "--trees", "y", "--jobs", 2), "are for models of yours"),
        (("compare", "models.py:whole"), "needs two models"),
        (("compare", "models.py:whole", "models.py:whole", "--data", "d.csv"), "the same name"),
        (("compare", "a.py", "b.py", "--alignment", "x"), "not both"),
        (("compare",), "nothing to compare"),
        (("compare", "models.py:whole", "models.py:mean_only", "--method", "all"), "--method is the name of one"),
        (("evidence", "beta_binomial", "--data", "d.csv"), "--data is for a model in a file"),
        (("loo", "models.py:whole", "models.py:whole", "--data", "d.csv"), "the same name"),
    ],
)
def test_what_is_refused(folder, arguments, words):
    pd.DataFrame({"y": Y}).to_csv("other.csv", index=False)
    (folder / "models.npy").write_bytes(bytes(range(256)))
    (folder / "broken.py").write_text("x = 1\ny = x / 0\n")
    (folder / "left.py").write_text("import sys\nsys.exit('no')\n")
    (folder / "odd.csv").write_text("y\n1.5\n2\n-\n")
    (folder / "seed.csv").write_text("seed\n1.5\n2\n")
    (folder / "words.csv").write_text("y\na\nb\n")
    (folder / "long.csv").write_text("x,y\n1,2,3\n4,5,6\n")
    (folder / "twice.csv").write_text("y,y\n1,2\n4,5\n")
    result = call(*arguments)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert not (folder / "results").exists() or not list((folder / "results").iterdir())
