import subprocess
import sys

import pandas as pd
import pytest
from typer.testing import CliRunner

from bayeskit import __version__, cli
from bayeskit.errors import OutputError
from bayeskit.inference.evidence import Evidence
from bayeskit.workflows import Exam, ExamRow

SMALL = (
    "--chains 4 --warmup 60 --samples 100 --temperatures 6 --ladder-chains 4 --ladder-warmup 30 --ladder-samples 40"
).split()


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def refused(*arguments):
    """Call with bad input; return the message, which is one line without a traceback."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_help_version_and_list():
    assert "evidence" in call("--help").stdout
    assert call("--version").stdout.strip() == f"bayeskit {__version__}"
    listed = call("list").stdout
    assert "primates" in listed and "linreg10" in listed and "-94.0845" in listed


def test_evidence_of_a_named_model(tmp_path):
    result = call("evidence", "beta_binomial", "--out", tmp_path / "out", *SMALL)
    assert result.exit_code == 0, result.output
    assert "bridge_sampling" in result.stdout and "reference -2.3979" in result.stdout
    assert "written to" in result.stdout
    table = pd.read_csv(tmp_path / "out" / "evidence.csv")
    assert len(table) >= 6
    for warning in table["warnings"].dropna():
        # Whatever a method says against itself is readable below the table.
        assert warning.split(";")[0][:40] in result.stdout.replace("\n", " ")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["evidence.csv", "posterior.nc", "report.html"]


def test_evidence_of_files_in_a_subprocess(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    alignment.write_text(">A\nACGTACGT\n>B\nACGAACGA\n>C\nACAAACAA\n>D\nACAAACAC\n")
    tree.write_text("(A,B,(C,D));")
    command = [sys.executable, "-m", "bayeskit.cli", "evidence", "--alignment", alignment, "--tree", tree]
    options = ["--substitution", "JC69", "--methods", "laplace_importance_sampling,bridge_sampling"]
    out = tmp_path / "out"
    done = subprocess.run(
        [*map(str, command), *options, "--out", out, *SMALL, "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    table = pd.read_csv(out / "evidence.csv").set_index("method")
    assert set(table.index) == {"laplace_importance_sampling", "bridge_sampling"}
    assert "a.fasta" in (out / "report.html").read_text(encoding="utf-8")


def test_run_writes_the_posterior(tmp_path):
    arguments = ("--chains", 2, "--warmup", 50, "--samples", 50)
    result = call("run", "beta_binomial", "--out", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["posterior.nc", "report.html", "summary.csv"]
    assert list(pd.read_csv(tmp_path / "summary.csv")["parameter"]) == ["p"]
    assert "r-hat" in result.stdout


def test_exam_prints_its_table():
    result = call("exam", "--small", "--cases", "beta_binomial", "--methods", "laplace_importance_sampling")
    assert result.exit_code == 0, result.output
    assert "1 answers: 1 pass" in result.stdout


def test_exam_fails_on_false_comfort(monkeypatch):
    wrong = ExamRow("beta_binomial", Evidence("bridge_sampling", -1.0, 0.01, 10), -2.4)
    monkeypatch.setattr("bayeskit.workflows.exam.run_exam", lambda *a, **k: Exam((wrong,)))
    result = call("exam")
    assert result.exit_code == 1
    assert "FALSE COMFORT" in result.stdout and "1 false comfort" in result.stdout


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    out = tmp_path / "out"
    assert "did you mean 'primates'" in refused("evidence", "primats", "--out", out)
    assert "did you mean 'linreg10'" in refused("run", "linreg", "--out", out)
    arguments = ("--methods", "brige", "--out", out)
    assert "did you mean 'bridge_sampling'" in refused("evidence", "linreg10", *arguments)
    assert "no method" in refused("evidence", "linreg10", "--methods", ",")
    assert "linreg10" in refused("exam", "--cases", "linreg")
    assert not out.exists()


def test_names_and_files_exclude_and_need_each_other(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    assert "bayeskit list" in refused("evidence")
    assert "--alignment" in refused("evidence", "--tree", tree)
    assert "--tree" in refused("evidence", "--alignment", alignment)
    assert "not both" in refused("evidence", "primates", "--alignment", alignment, "--tree", tree)


def test_bad_files_are_named(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    assert "a.fasta" in refused("evidence", "--alignment", alignment, "--tree", tree)
    alignment.write_text(">A\nACGT\n>B\nACG\n>C\nACAA\n")
    assert "'B'" in refused("evidence", "--alignment", alignment, "--tree", tree)
    alignment.write_text(">A\nACGT\n>B\nACGA\n>C\nACAA\n")
    assert "t.nwk" in refused("evidence", "--alignment", alignment, "--tree", tree)
    tree.write_text("(A,B,C);")
    arguments = ("--alignment", alignment, "--tree", tree, "--substitution", "jukes")
    assert "JC69" in refused("evidence", *arguments)


@pytest.mark.parametrize("command", ["evidence", "run"])
def test_a_folder_that_cannot_be_written_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out" in refused(command, "beta_binomial", "--out", tmp_path / "file" / "below")


def test_an_error_after_the_run_has_no_traceback_either(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OutputError("cannot write evidence.csv: no space")

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", full)
    assert "no space" in refused("evidence", "beta_binomial", "--out", tmp_path)


def test_an_interrupted_run_says_how_to_resume(monkeypatch, tmp_path):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", interrupt)
    result = call("evidence", "beta_binomial", "--out", tmp_path)
    assert result.exit_code == 130 and "resumes" in result.stderr
