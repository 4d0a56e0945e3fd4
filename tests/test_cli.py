import json
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner
from typer.utils import get_params_from_function

from bayeskit import __version__, cli, exact, gallery
from bayeskit.cli._evidence import _problem
from bayeskit.cli._names import evidence_methods
from bayeskit.errors import OutputError
from bayeskit.gallery._registry import EXACT_CASES
from bayeskit.inference.evidence import METHODS, Budget, Evidence
from bayeskit.inference.evidence._budget import LEAST
from bayeskit.workflows._exam import Exam, ExamRow

SMALL = (
    "--chains 4 --warmup 60 --samples 100 --temperatures 6 --ladder-chains 4 --ladder-warmup 30 --ladder-samples 40"
).split()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Keep folders that have no name out of the checkout."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


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
    assert "evidence" in call("-h").stdout and "--methods" in call("evidence", "-h").stdout
    assert call("--version").stdout.strip() == f"bayeskit {__version__}"
    listed = call("list").stdout
    assert "primates" in listed and "linreg10" in listed and "-94.0845" in listed
    assert "nile_change_point" in listed and "Phylogenetics" in listed


@pytest.fixture(scope="module")
def coin(tmp_path_factory):
    """The evidence of a coin by all methods: the call's arguments, its folder and what it said."""
    fewer = "--live-points 40 --particles 16 --smc-replicates 8".split()
    arguments = ("evidence", "beta_binomial", *SMALL, *fewer)
    folder = tmp_path_factory.mktemp("coin") / "out"
    return arguments, folder, call(*arguments, "--out", folder)


@pytest.mark.calibration
def test_evidence_of_a_named_model(coin):
    _, folder, result = coin
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("beta_binomial: log evidence -2.") and lines[1] == "reference -2.3979"
    assert "bridge_sampling" in result.stdout and lines[-1].startswith("written to")
    table = pd.read_csv(folder / "evidence.csv")
    assert len(table) >= 6
    for warning in table["warnings"].dropna():
        # Whatever a method says against itself is readable below the table.
        assert warning.split(";")[0][:40] in " ".join(result.stdout.split())
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["evidence.csv", "posterior.nc", "report.html", "run.json"]


@pytest.mark.calibration
def test_a_finished_run_is_said_and_not_repeated(coin, monkeypatch):
    def never(*_, **__):
        raise OutputError("the run was repeated")

    arguments, folder, first = coin
    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", never)
    again = call(*arguments, "--out", folder)
    assert again.exit_code == 0, again.output
    said, written, remedy = again.stdout.splitlines()
    assert said == f"finished before: {first.stdout.splitlines()[0]}"
    assert "evidence.csv, posterior.nc, report.html" in written and "--force" in remedy
    assert call(*arguments, "--out", folder, "--quiet").stdout == ""
    other = refused(*arguments, "--out", folder, "--seed", 1)
    assert "another run, with seed 0 instead of 1; choose another folder by --out, or pass --force" in other
    copy = shutil.copytree(folder, folder.parent / "copy")
    assert "was repeated" in refused(*arguments, "--out", copy, "--force")
    assert json.loads((copy / "run.json").read_text())["facts"]["finished"] is None
    assert "was repeated" in refused(*arguments, "--out", copy)  # which resumes


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    for command in (["evidence", "beta_binomial"], ["run", "beta_binomial"], ["exam", "--small"]):
        assert "other files, such as 'thesis.tex'" in refused(*command, "--out", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_folder_without_a_name_is_found_again(monkeypatch):
    def ends(*_, **__):
        raise OutputError("enough")

    monkeypatch.setattr("bayeskit.workflows.posterior_in_folder", ends)
    for seed, folder in ((0, "run-eggbox"), (1, "run-eggbox-2"), (0, "run-eggbox"), (2, "run-eggbox-3")):
        result = call("run", "eggbox", "--seed", seed)
        assert f"results go to results/{folder}\n" in result.stderr


@pytest.mark.long
def test_evidence_of_files_in_a_subprocess(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    alignment.write_text(">A\nACGTACGT\n>B\nACGAACGA\n>C\nACAAACAA\n")
    tree.write_text("(A,B,C);")
    command = [sys.executable, "-m", "bayeskit", "evidence", "--alignment", alignment, "--tree", tree]
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
    arguments = ("run", "beta_binomial", "--chains", 2, "--warmup", 50, "--samples", 50, "--out", tmp_path / "out")
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    found = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert found == ["posterior.nc", "report.html", "run.json", "summary.csv"]
    assert list(pd.read_csv(tmp_path / "out" / "summary.csv")["parameter"]) == ["p"]
    assert "r-hat" in result.stdout
    assert "finished before: beta_binomial: 2 chains of 50 draws" in call(*arguments).stdout


@pytest.mark.long
def test_run_runs_a_page(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = call("run", "nile_change_point", "--out", tmp_path / "out", "--small", "--quiet")
    assert result.exit_code == 0, result.output
    assert "nile_change_point.txt, nile_change_point_1.png" in result.stdout
    assert "log Bayes factor" in (tmp_path / "out" / "nile_change_point.txt").read_text(encoding="utf-8")
    again = call("run", "nile_change_point", "--out", tmp_path / "out", "--small")
    assert again.exit_code == 0 and f"finished before: {gallery.page('nile_change_point').title}" in again.stdout
    assert "--small, not --chains" in refused("run", "nile_change_point", "--out", tmp_path, "--chains", 2)
    assert "bayeskit run karate_club" in refused("evidence", "karate_club", "--out", tmp_path)
    assert "--small" in refused("run", "beta_binomial", "--out", tmp_path, "--small")
    assert "did you mean 'nile_change_point'" in refused("run", "nile_changepoint", "--out", tmp_path)


def test_exam_prints_its_table():
    result = call("exam", "--small", "--cases", "beta_binomial", "--methods", "laplace_importance_sampling")
    assert result.exit_code == 0, result.output
    assert "1 answers: 1 pass" in result.stdout


def test_exam_writes_its_table_and_says_what_does_not_apply(tmp_path):
    methods = "laplace_importance_sampling,gamma_laplus,pointwise_predictive_density"
    result = call("exam", "--small", "--cases", "beta_binomial", "--methods", methods, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "out" / "exam.csv").set_index("method")
    assert table["verdict"].tolist() == ["pass", "does not apply", "does not apply"]
    assert "gamma_laplus: does not apply" in result.stdout
    nothing = call("exam", "--small", "--cases", "beta_binomial", "--methods", "gamma_laplus")
    assert nothing.exit_code == 2 and "0 answers" in nothing.stdout and "gamma_laplus: does not apply" in nothing.stdout


def test_exam_refuses_options_that_it_would_ignore():
    assert "--table calibration" in refused("exam", "--jobs", 2)
    assert "--table calibration" in refused("exam", "--replicates", 5)
    assert "no method" in refused("exam", "--methods", ",")


@pytest.mark.calibration
def test_calibration_of_several_cases_leaves_out_what_does_not_apply(tmp_path):
    methods = "laplace_importance_sampling,gamma_laplus_importance_sampling"
    arguments = (
        "--table",
        "calibration",
        "--small",
        "--replicates",
        2,
        "--out",
        tmp_path / "out",
        "--methods",
        methods,
    )
    result = call("exam", "--cases", "three_taxon_tree,beta_binomial", *arguments)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "out" / "calibration.csv")
    assert list(zip(table["case"], table["method"], strict=True)) == [
        ("three_taxon_tree", "laplace_importance_sampling"),
        ("three_taxon_tree", "gamma_laplus_importance_sampling"),
        ("beta_binomial", "laplace_importance_sampling"),
    ]
    assert "beta_binomial: gamma_laplus_importance_sampling: does not apply" in result.stdout
    assert (tmp_path / "out" / "calibration.svg").exists()
    replicates = pd.read_csv(tmp_path / "out" / "beta_binomial" / "replicates.csv")
    assert replicates["seed"].nunique() == 2 and replicates["seed"].max() > 10
    out = tmp_path / "none"
    only = ("--table", "calibration", "--cases", "beta_binomial", "--methods", "gamma_laplus", "--out", out)
    assert "no method applies" in refused("exam", *only)


@pytest.mark.calibration
def test_scores_alone_are_printed_without_a_verdict():
    result = call("evidence", "linreg10", "--methods", "pointwise_predictive_density", *SMALL)
    assert result.exit_code == 0, result.output
    assert "pointwise_predictive_density" in result.stdout and "unknown" not in result.stdout


def test_every_number_of_a_budget_has_an_option(monkeypatch):
    seen = {}

    def kept(*_, budget, **__):
        seen.update(budget.words())
        raise OutputError("enough")

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", kept)
    options = "--reference-temperatures 11 --particles 12 --smc-replicates 13 --live-points 14".split()
    refused("evidence", "beta_binomial", *options, *SMALL, "--quiet")
    wanted = {"num_reference_temperatures": 11, "num_particles": 12, "num_replicates": 13, "num_live": 14}
    assert seen | wanted == seen and seen["num_temperatures"] == 6
    assert call("evidence", "beta_binomial", "--particles", -3).exit_code == 2


def test_options_and_budgets_have_the_same_least_numbers():
    command = next(one for one in cli.app.registered_commands if one.name == "evidence")
    options = get_params_from_function(command.callback)
    names = {"particles": "num_particles", "smc_replicates": "num_replicates", "live_points": "num_live"}
    names |= {name.removeprefix("num_"): name for name in LEAST if name not in names.values()}
    assert {field: options[name].default.min for name, field in names.items()} == LEAST
    # Help names the defaults without importing the budget.
    shown = {field: options[name].default.show_default for name, field in names.items()}
    assert shown == {field: str(value) for field, value in Budget().words().items() if field in LEAST}


@pytest.mark.calibration
def test_what_is_known_without_torch_is_what_there_is():
    assert evidence_methods() == set(METHODS)
    built = {name: build() for name, build in exact.CASES.items()}
    known = {name: (case.description, round(case.log_evidence, 4)) for name, case in built.items()}
    assert known == EXACT_CASES and list(known) == list(EXACT_CASES)


def test_exam_fails_on_false_comfort(monkeypatch):
    wrong = ExamRow("beta_binomial", Evidence("bridge_sampling", -1.0, 0.01, 10), -2.4)
    monkeypatch.setattr("bayeskit.workflows._exam.run_exam", lambda *a, **k: Exam((wrong,)))
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
    assert "did you mean 'linreg10'" in refused("exam", "--cases", "linreg")
    assert "did you mean '--methods'" in refused("evidence", "linreg10", "--method", "all")
    assert "did you mean 'evidence'" in refused("evidense", "linreg10")
    assert not out.exists()


def test_names_and_files_exclude_and_need_each_other(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    assert "bayeskit list" in refused("evidence")
    assert "--alignment" in refused("evidence", "--tree", tree)
    assert "there is no such file" in refused("evidence", "--alignment", alignment)
    assert "--tree" in refused("evidence", "--alignment", alignment, "--methods", "bridge_sampling")
    assert "not both" in refused("evidence", "primates", "--alignment", alignment, "--tree", tree)


def test_bad_files_are_named(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    assert "a.fasta" in refused("evidence", "--alignment", alignment, "--tree", tree)
    alignment.write_text(">A\nACGT\n>B\nACG\n>C\nACAA\n")
    assert "t.nwk" in refused("evidence", "--alignment", alignment, "--tree", tree)
    tree.write_text("(A,B,D);")
    assert "'B'" in refused("evidence", "--alignment", alignment, "--tree", tree)
    alignment.write_text(">A\nACGT\n>B\nACGA\n>C\nACAA\n")
    assert "'D'" in refused("evidence", "--alignment", alignment, "--tree", tree)
    tree.write_text("(A,B,C);")
    arguments = ("--alignment", alignment, "--tree", tree, "--substitution", "jukes")
    assert "JC69" in refused("evidence", *arguments)


BLOCK = (
    "#NEXUS\nbegin data;\ndimensions ntax=3 nchar=8;\nformat datatype=dna;\nmatrix\n"
    "A ACGTACGT\nB ACGAACGA\nC ACAAACAA\n;\nend;\nbegin mrbayes;\n{}\nend;\n"
)


def test_a_mrbayes_block_chooses_the_model(tmp_path, monkeypatch):
    alignment, tree = tmp_path / "a.nex", tmp_path / "t.nwk"
    tree.write_text("(A,B,C);")
    command = ("evidence", "--alignment", alignment, "--tree", tree)
    asked = {}

    def ends(target, *_, settings, **__):
        asked.update(settings, sites=[site.name for site in target.sites])
        raise OutputError("enough")

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", ends)
    alignment.write_text(BLOCK.format("lset nst=2;\nlset covarion=yes;"))
    said = refused(*command, "--out", tmp_path / "lacking")
    assert "a.nex, line 13: 'lset covarion=yes': there is no model for covarion=yes" in said
    alignment.write_text(BLOCK.format("exclude 1-3;"))
    said = refused(*command, "--substitution", "JC69", "--out", tmp_path / "aside")
    assert "line 12: the MrBayes block is not used, but 'exclude 1-3' changes the data" in said
    alignment.write_text(BLOCK.format("lset nst=2; prset statefreqpr=fixed(equal); mcmc ngen=10;"))
    result = call(*command, "--out", tmp_path / "out")
    assert "all (8 sites): K80" in result.stderr and "gammadir(1, 0.1, 1, 1)" in result.stderr
    assert result.stderr.count("not used: mcmc ngen") == 1
    assert asked["sites"] == ["branch_lengths", "kappa"] and "K80" in asked["substitution"]
    result = call(*command, "--substitution", "JC69", "--out", tmp_path / "jukes_cantor")
    assert "the MrBayes block is not used, because a substitution model was named" in result.stderr
    assert asked["sites"] == ["branch_lengths"] and asked["substitution"] == "JC69"


@pytest.mark.parametrize("command", ["evidence", "run"])
def test_a_folder_that_cannot_be_written_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(command, "beta_binomial", "--out", tmp_path / "file" / "below")


def test_an_error_after_the_run_has_no_traceback_either(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OutputError("cannot write evidence.csv: no space")

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", full)
    assert "no space" in refused("evidence", "beta_binomial", "--out", tmp_path / "out")


def test_an_interrupted_run_says_how_to_resume(monkeypatch, tmp_path):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bayeskit.workflows.evidence_in_folder", interrupt)
    result = call("evidence", "beta_binomial", "--out", tmp_path / "out")
    assert result.exit_code == 130 and "resumes" in result.stderr


@pytest.mark.calibration
@pytest.mark.parametrize("moment", ["imports", "run"])
def test_ctrl_c_ends_quietly(moment, tmp_path):
    """Imports take seconds; a run has begun once its first checkpoint is there."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bayeskit", "run", "eight_schools", "--samples", "1000000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    awaited = out / ("run.json" if moment == "imports" else "checkpoint.posterior")
    while not awaited.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert stdout == "" and stderr.count("\n") == 1 and stderr.startswith("interrupted"), stderr


@pytest.mark.parametrize(
    "arguments",
    [["runn"], ["evidence", "--nope"], ["exam", "--seed"], ["exam", "--seed", "x"], ["run"]],
)
def test_usage_errors_end_with_the_page_that_explains_them(arguments):
    assert refused(*arguments).endswith(" (See docs/how_to/command_line.md)\n")


def test_the_error_of_a_reference_is_said(monkeypatch):
    from bayeskit.gallery import _registry as registry

    build = registry.get_model("beta_binomial").build
    entry = gallery.Entry("coin", "a coin", build, -2.3979, reference_error=0.004)
    monkeypatch.setitem(registry._ENTRIES, "coin", entry)
    result = call("evidence", "coin", "--methods", "laplace_importance_sampling", "--quiet", "--replicates", 2)
    assert result.exit_code == 0, result.output
    assert _problem(entry, None, None, "JC69").standard_error == 0.004
    shown = call("evidence", "coin", "--methods", "laplace_importance_sampling")
    assert "reference -2.3979 +- 0.0040" in shown.stdout
    assert registry.get_model("primates").reference_error == 0.004


@pytest.mark.calibration
def test_methods_that_do_not_apply_leave_the_others_in_place_and_none_is_no_answer():
    methods = ("--methods", "laplace_importance_sampling,gamma_laplus", "--replicates", 2)
    result = call("evidence", "beta_binomial", *methods)
    assert result.exit_code == 0, result.output
    assert "gamma_laplus: does not apply" in result.stdout and "laplace_importance_sampling" in result.stdout
    nothing = call("evidence", "beta_binomial", "--methods", "gamma_laplus")
    assert nothing.exit_code == 2 and "gamma_laplus: does not apply" in nothing.stdout
    silent = call("evidence", "beta_binomial", "--methods", "gamma_laplus", "--quiet")
    assert silent.exit_code == 2 and "no method gave an answer: gamma_laplus: " in silent.stderr
    score = call("evidence", "beta_binomial", "--methods", "pointwise_predictive_density", *SMALL)
    assert score.exit_code == 0, score.output


@pytest.mark.calibration
def test_trees_from_an_alignment_alone(tmp_path):
    path, out = tmp_path / "a.fasta", tmp_path / "out"
    path.write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    numbers = ("--warmup", 20, "--samples", 40, "--temperatures", 4)
    result = call("trees", "--alignment", path, "--substitution", "K80", "--no-evidence", "--out", out, *numbers)
    assert result.exit_code == 0, result.output
    names = {"consensus.nwk", "consensus.svg", "run1.trees", "run2.trees", "split_frequencies.csv", "parameters.csv"}
    assert {file.name for file in out.iterdir()} == names | {"posterior.nc", "report.html", "run.json"}
    report = (out / "report.html").read_text()
    assert f"bayeskit trees --alignment {path} --substitution K80 --no-evidence" in report and "kappa" in report
    assert "--runs 2" in refused("trees", "--alignment", path, "--runs", 1)
    assert "kappa" in (out / "parameters.csv").read_text() and "tree_length" in (out / "parameters.csv").read_text()
    again = call("trees", "--alignment", path, "--substitution", "K80", "--no-evidence", "--out", out, *numbers)
    assert "finished before" in again.output


@pytest.mark.calibration
def test_trees_by_a_mrbayes_block(tmp_path):
    path, out = tmp_path / "a.nex", tmp_path / "out"
    data = "matrix\nA AACCAGT\nB AACCGGT\nC AGCTAGA\nD AGCTACA\n;end;"
    block = "begin mrbayes; lset nst=2; constraint two = A B; prset topologypr=constraints(two); end;"
    path.write_text(f"#NEXUS begin data; dimensions ntax=4 nchar=7; format datatype=dna; {data} {block}")
    numbers = ("--warmup", 10, "--samples", 10, "--temperatures", 4)
    result = call("trees", "--alignment", path, "--no-evidence", "--out", out, *numbers)
    assert result.exit_code == 0, result.output
    assert "HKY85" in result.stderr
    splits = (out / "split_frequencies.csv").read_text().splitlines()
    assert len(splits) == 2 and splits[1].startswith(("C|D,2,", "A|B,2,"))  # the constraint is the only inner one


@pytest.mark.calibration
def test_evidence_of_all_topologies_that_a_mrbayes_block_allows(tmp_path):
    path, out = tmp_path / "a.nex", tmp_path / "out"
    data = "matrix\nA AACCAGT\nB AACCGGT\nC AGCTAGA\nD AGCTACA\n;end;"
    parts = "charset one = 1-3; charset two = 4-7; partition both = 2: one, two; set partition = both; "
    block = f"begin mrbayes; {parts}constraint two = A B; prset topologypr=constraints(two); end;"
    path.write_text(f"#NEXUS begin data; dimensions ntax=4 nchar=7; format datatype=dna; {data} {block}")
    numbers = ("--warmup", 20, "--samples", 100, "--temperatures", 4, "--steps", 50)
    result = call("trees", "--alignment", path, "--out", out, *numbers)
    assert result.exit_code == 0, result.output
    rows = (out / "evidence.csv").read_text().splitlines()
    assert len(rows) == 4  # three ways
    values = [float(row.split(",")[1]) for row in rows[1:]]
    assert max(values) - min(values) < 1


@pytest.mark.calibration
def test_trees_of_the_parts_of_a_mrbayes_block(tmp_path):
    path, out = tmp_path / "a.nex", tmp_path / "out"
    data = "matrix\nA AACCAGT\nB AACCGGT\nC AGCTAGA\nD AGCTACA\n;end;"
    parts = "charset one = 1-3; charset two = 4-7; partition both = 2: one, two; set partition = both; "
    models = "lset applyto=(1) nst=2; prset ratepr=variable statefreqpr=fixed(equal); "
    start = f"#NEXUS begin data; dimensions ntax=4 nchar=7; format datatype=dna; {data} begin mrbayes; {parts}{models}"
    path.write_text(f"{start}end;")
    numbers = ("--warmup", 10, "--samples", 10, "--temperatures", 4)
    result = call("trees", "--alignment", path, "--no-evidence", "--out", out, *numbers)
    assert result.exit_code == 0, result.output
    rows = (out / "parameters.csv").read_text()
    assert "kappa_one" in rows and "relative_rates[1]" in rows
    path.write_text(f"{start.replace('ratepr=variable ', '')}unlink brlens=(all); end;")
    assert "unlinks the branch lengths" in refused("trees", "--alignment", path, "--quiet")
    result = call("trees", "--alignment", path, "--no-evidence", "--out", tmp_path / "apart", *numbers)
    assert result.exit_code == 0, result.output
    assert "tree_lengths[1]" in (tmp_path / "apart" / "parameters.csv").read_text()


MIXED = (
    "#NEXUS\nbegin data;\ndimensions ntax=4 nchar=14;\n"
    "format datatype=mixed(dna:1-5,standard:6-10,restriction:11-14);\nmatrix\n"
    "A AACCA 01020 1101\nB AACCG 01121 1001\nC AGCTA 10211 0111\nD AGCTC 11000 0011\n;\nend;\n"
)


def test_topologies_are_compared_by_data_of_several_types(four, tmp_path):
    path = tmp_path / "mixed.nex"
    path.write_text(f"{MIXED}begin assumptions; typeset * mine = ord: 9; end;\n")
    command = ("compare", "--alignment", path, "--trees", four[1], "--draws", 200)
    result = call(*command)
    assert result.exit_code == 0, result.output
    for line in ("DNA (5 sites): JC69", "restriction (4 sites): Binary, coding noabsence", "standard (5 characters): "):
        assert f"  {line}" in result.stderr
    assert "coding variable, ordered: 9\n    3 characters: Mk with 2 states" in result.stderr
    result = call(*command, "--substitution", "DNA=HKY85,standard=Mk,restriction=Binary+G4")
    assert result.exit_code == 0, result.output
    for words in ("HKY85", "coding all", "Binary, GammaRates with 4 categories"):
        assert words in result.stderr
    path.write_text(f"{MIXED}begin mrbayes; lset nst=2; end;\n")
    result = call(*command)
    assert result.exit_code == 0, result.output
    for line in ("DNA (5 sites): HKY85", "states_3 (2 characters): Mk with 3 states, coding variable"):
        assert f"  {line}" in result.stderr
    assert "for data of one type" in refused(*command, "--substitution", "HKY85")
    assert "no substitution model is called 'HKY58'" in refused(*command, "--substitution", "DNA=HKY58,standard=Mk")
    assert "has no data 'protein'" in refused(*command, "--substitution", "protein=LG")


@pytest.mark.calibration
def test_trees_of_data_of_several_types(tmp_path):
    path, out = tmp_path / "mixed.nex", tmp_path / "out"
    path.write_text(MIXED)
    numbers = ("--warmup", 10, "--samples", 10, "--temperatures", 4)
    result = call("trees", "--alignment", path, "--no-evidence", "--out", out, *numbers)
    assert result.exit_code == 0, result.output
    assert "state_frequencies_restriction" in (out / "parameters.csv").read_text()
    assert "restriction (4 sites): Binary" in (out / "report.html").read_text()


@pytest.fixture
def four(tmp_path):
    """Return files with the sequences and the three topologies of four taxa."""
    alignment, trees = tmp_path / "a.fasta", tmp_path / "t.nwk"
    alignment.write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    trees.write_text("3 ((A,B),C,D);\n2 ((A,C),B,D);\n1 ((A,D),B,C);\n")
    return alignment, trees


def test_topologies_of_a_file_are_compared(four, tmp_path):
    alignment, trees = four
    command = ("compare", "--alignment", alignment, "--trees", trees, "--draws", 1000, "--out", tmp_path / "out")
    result = call(*command)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "tree 1 is the most probable of 3 topologies" in lines[0] and lines[-1].startswith("written to")
    assert "0.5000" in result.stdout and "log evidence of all topologies" not in result.stdout
    names = {"bayes_factors.svg", "run.json", "topologies.csv", "topologies.trprobs"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert "3 trees read, none left out as burn-in" in result.stdout
    assert "finished before: a.fasta: tree 1" in call(*command).output
    runs = call("compare", "--alignment", alignment, "--trees", trees, "--trees", trees, "--draws", 1000, "--most", 2)
    assert runs.exit_code == 0, runs.output
    assert "the files have 3; those compared are 0.8333" in runs.stdout
    assert "log evidence of all topologies -" in runs.stdout and "evidence.csv" in runs.stdout
    assert "results go to results/compare-a" in runs.stderr


def test_a_network_is_fitted_to_a_file(four, tmp_path):
    _, trees = four
    result = call("sbn", "--trees", trees, "--reference", trees, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "divergence from the sample 0.0000 nats" in result.stdout and "in reference" in result.stdout
    assert "topology 1: (A,B,(C,D));" in result.stdout
    names = {"measures.csv", "network.safetensors", "run.json", "splits.csv", "trees.csv"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    silent = call("sbn", "--trees", trees, "--method", "simple_average", "--quiet")
    assert silent.exit_code == 0 and silent.stdout == ""


@pytest.mark.calibration
def test_trees_are_approximated_from_an_alignment(four, tmp_path):
    alignment, trees = four
    numbers = ("--steps", 60, "--draws", 200, "--seed", 1)
    result = call("vi", "--alignment", alignment, "--trees", trees, *numbers, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "variational_importance_sampling" in result.stdout and "lower bound -" in result.stdout
    assert "not trusted" in result.stderr and "Traceback" not in result.stderr
    alone = call("vi", "--alignment", alignment, *numbers)
    assert alone.exit_code == 0, alone.output
    assert "results go to results/vi-a" in alone.stderr and "topology 1: (A," in alone.stdout


def test_a_run_that_its_time_budget_ended_is_not_finished(four, tmp_path):
    alignment, trees = four
    command = ("vi", "--alignment", alignment, "--trees", trees, "--time-budget", 0.05, "--draws", 50)
    for _ in range(2):
        result = call(*command, "--out", tmp_path / "out")
        assert result.exit_code == 0 and "finished before" not in result.output, result.output
        assert "checkpoint.training" in result.stdout and "time budget of 0.05 s" in result.stderr


def test_what_compare_sbn_and_vi_refuse(four, tmp_path):
    alignment, trees = four
    given = ("--alignment", alignment, "--trees", trees)
    assert "--trees" in refused("compare", "--alignment", alignment)
    assert "none.nwk: there is no such file" in refused("compare", "--alignment", alignment, "--trees", "none.nwk")
    assert "none.fasta: there is no such file" in refused("vi", "--alignment", "none.fasta")
    assert "GTR" in refused("compare", *given, "--substitution", "GRT")
    assert "simple_average" in refused("sbn", "--trees", trees, "--method", "simple")
    assert "--trees FILE" in refused("vi", "--alignment", alignment, "--burn-in", 0.5)
    assert "--most" in refused("compare", *given, "--most", 1)
    assert "burn_in" in refused("compare", *given, "--burn-in", 1, "--quiet")  # of weighted trees
    assert "whole number" in refused("sbn", "--trees", trees, "--burn-in", 1.5)
    trees.write_text("((A,B),C,D);\n((A,B),C,D);\n((A,C),B,E);\n")
    for command in (("compare", *given), ("sbn", "--trees", trees), ("vi", *given)):
        message = refused(*command, "--quiet")
        assert "t.nwk" in message and "3" in message and "E" in message
    trees.write_text("((A,B),C,D);\n((A,B),C,D);\n((A,C),B,D);\n")
    left_out = call("sbn", "--trees", trees, "--burn-in", 2)
    assert left_out.exit_code == 0 and "4 taxa, 2 left out as burn-in" in left_out.stdout


def test_burn_in_is_that_of_chains_and_is_printed(four, tmp_path):
    alignment, _ = four
    chain = tmp_path / "run.t"
    trees = ("((A,B),C,D)", "((A,C),B,D)", "((A,C),B,D)", "((A,D),B,C)")
    lines = "".join(f"tree gen.{100 * place} = [&U] {tree};\n" for place, tree in enumerate(trees))
    chain.write_text(f"#NEXUS\nbegin trees;\n{lines}end;\n")
    network = call("sbn", "--trees", chain, "--reference", chain)
    assert network.exit_code == 0, network.output
    assert network.stdout.count("3 trees, 2 unrooted topologies, 4 taxa, 1 left out as burn-in") == 2
    given = ("--alignment", alignment, "--trees", chain)
    approximation = call("vi", *given, "--steps", 2, "--draws", 50)
    assert approximation.exit_code == 0, approximation.output
    assert "support: TreeSample(3 trees, 2 unrooted topologies, 4 taxa, 1 left out as burn-in)" in approximation.stderr
    # A comparison leaves nothing out unless it is told to.
    for burn_in, said in (((), "4 trees read, none"), (("--burn-in", 0.5), "2 trees read, 2")):
        compared = call("compare", *given, "--draws", 100, *burn_in)
        assert compared.exit_code == 0, compared.output
        assert f"{said} left out as burn-in" in compared.stdout
        assert f"of {2 if burn_in else 3} topologies" in compared.stdout


def test_a_refused_run_leaves_its_folder_to_a_better_one(four, tmp_path):
    alignment, trees = four
    arguments = ("compare", "--alignment", alignment, "--trees", trees, "--draws", 500, "--out", tmp_path / "out")
    assert "is a model of protein data" in refused(*arguments, "--substitution", "LG", "--quiet")
    assert not (tmp_path / "out").exists()
    assert call(*arguments, "--substitution", "K80", "--quiet").exit_code == 0
    # What is there stays, and still tells of which run it is.
    assert "K80" in refused(*arguments, "--substitution", "LG", "--quiet")
    assert (tmp_path / "out" / "topologies.csv").exists()
