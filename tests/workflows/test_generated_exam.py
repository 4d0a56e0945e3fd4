"""The exam on generated problems counts what each method says against answers computed by other means."""

import math
import signal
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest

from bayeskit import cli, exact
from bayeskit.cli._application import BAD_INPUT
from bayeskit.cli._exam import print_generated_exam
from bayeskit.errors import CheckpointError, DataError, SettingsError
from bayeskit.exact import generated
from bayeskit.inference.evidence import Budget, Evidence
from bayeskit.workflows import _exam as exam_module
from bayeskit.workflows import run_generated_exam
from bayeskit.workflows._exam import SMALL, Exam, ExamRow

#: What is quickly sampled, where any problems do.
NAMES = vars(generated)
SIMPLE = (generated.BetaBernoulli, generated.GammaPoisson)
#: Without modes that no draw of the prior finds, so that what is said about them can be asked to be right.
WITHOUT_EXTREMES = tuple(family for family in exact.FAMILIES if family not in generated.EXTREME_FAMILIES)


@pytest.mark.calibration
def test_methods_that_draw_from_the_prior_are_right_or_say_that_they_are_not():
    exam = run_generated_exam(
        6,
        ["naive_monte_carlo", "laplace_importance_sampling"],
        seed=5,
        budget=SMALL,
        progress=False,
        families=WITHOUT_EXTREMES,
    )
    counts = exam.by_method().set_index("method")
    assert (counts.sum(axis=1) == 6).all() and (counts[["trusted and wrong", "failed"]] == 0).all(axis=None)
    assert counts.loc["laplace_importance_sampling", "right"] >= 3
    for row in exam.rows:
        assert eval(row.case, NAMES).case().log_evidence == row.exact  # noqa: S307  our own names


@pytest.mark.calibration
def test_the_same_seed_gives_the_same_exam_and_another_one_others():
    one, same, other = (
        run_generated_exam(2, ["naive_monte_carlo"], seed=seed, budget=SMALL, progress=False).rows for seed in (1, 1, 2)
    )
    assert one == same and [row.case for row in one] != [row.case for row in other]


def row(estimate, error, warnings=()):
    return ExamRow("case", Evidence("method", estimate, error, 1, tuple(warnings)), 0.0, 0.0, 4.0)


def test_answers_are_counted_by_kind():
    rows = (row(0.3, 0.1), row(0.3, 0.1, ["no"]), row(0.5, 0.1, ["no"]), row(0.5, 0.1))
    nothing = (row(math.nan, math.nan, ["no"]), row(math.nan, math.nan, ["refused: no"]))
    counts = Exam((*rows, *nothing), {"other": {"method": "why"}}).by_method()
    assert counts.iloc[0].tolist() == ["method", 1, 1, 1, 1, 1, 1, 1]


def test_a_problem_that_is_refused_as_a_whole_counts_as_refused(monkeypatch):
    def refusing(*given, **named):
        raise SettingsError("the prior is improper")

    monkeypatch.setattr(exam_module, "compare", refusing)
    exam = run_generated_exam(2, ["naive_monte_carlo"], seed=1, progress=False)
    assert exam.count("refused") == 2 and not exam.refused
    assert exam.by_method()["refused"].tolist() == [2]


# The first alarm may ring in a call of the garbage collector (of JAX), where its exception is lost: the next one counts
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_problem_that_takes_too_long_fails(monkeypatch):
    def endless(*given, **named):
        while True:
            pass

    monkeypatch.setattr(exam_module, "compare", endless)
    monkeypatch.setattr(exam_module, "MAX_SECONDS", 0.01)
    exam = run_generated_exam(2, ["naive_monte_carlo"], seed=1, progress=False)
    for answer in exam.rows:
        assert answer.verdict == "failed" and answer.evidence.warnings == ("failed: it took more than 0.01 s",)
        assert answer.smallest == ""  # smaller forms would take as long again
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_failure_is_shrunk_and_printed_in_its_smallest_form(monkeypatch, capsys):
    def broken(*given, **named):
        raise RuntimeError("always")

    monkeypatch.setattr(exam_module, "compare", broken)
    families = [generated.HalfCauchyScale]
    exam = run_generated_exam(1, ["naive_monte_carlo"], seed=1, progress=False, families=families)
    (answer,) = exam.rows
    smallest = eval(answer.smallest, NAMES)  # noqa: S307  our own names
    assert len(smallest.y) == 1 and smallest.width == 1.0
    print_generated_exam(exam, None)
    assert "smallest: HalfCauchyScale(width=1.0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.calibration
def test_an_error_that_is_not_ours_fails_its_problem_alone(monkeypatch):
    right, first = exam_module.compare, []

    def broken(target, given, *, seed, **named):
        first.append(seed)
        if seed == first[0]:  # of the first problem, and of its smaller forms
            raise RuntimeError("not ours")
        return right(target, given, seed=seed, **named)

    monkeypatch.setattr(exam_module, "compare", broken)
    exam = run_generated_exam(3, ["naive_monte_carlo"], seed=1, progress=False, families=WITHOUT_EXTREMES)
    assert exam.count("failed") == 1 and len(exam.rows) == 3


def test_a_problem_without_an_answer_is_refused(monkeypatch):
    def unknown(self):
        raise DataError("known to 1 nats only")

    first = exact.generate(1 * exam_module.MAX_PROBLEMS)
    monkeypatch.setattr(type(first), "log_evidence", unknown)
    exam = run_generated_exam(1, ["naive_monte_carlo"], seed=1, progress=False)
    assert exam.refused == {repr(first): {"naive_monte_carlo": str(exam.refused[repr(first)]["naive_monte_carlo"])}}


@pytest.mark.calibration
def test_a_biased_method_is_found(monkeypatch):
    """A mutation: every estimate half a nat too high, with its error unchanged."""
    right = exam_module.compare

    def biased(*given, **named):
        table = right(*given, **named)
        return replace(
            table, results={k: replace(v, log_evidence=v.log_evidence + 0.5) for k, v in table.results.items()}
        )

    monkeypatch.setattr(exam_module, "compare", biased)
    monkeypatch.setattr(exam_module, "MAX_TRIALS", 1)  # how small a form still fails is not asked here
    exam = run_generated_exam(2, ["laplace_importance_sampling"], seed=5, progress=False, families=SIMPLE)
    assert exam.has_false_comfort


@pytest.mark.calibration
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    arguments = ["exam", "--generated", "2", "--seed", "5", "--methods", "naive_monte_carlo", "--quiet"]
    monkeypatch.setattr("sys.argv", ["bayeskit", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "naive_monte_carlo" in printed and printed.rstrip().endswith("exam.csv")
    assert (tmp_path / "out" / "exam.csv").exists()


@pytest.mark.long
def test_a_killed_exam_goes_on_where_it_was(tmp_path, monkeypatch):
    methods, right, asked = ["naive_monte_carlo", "smc"], exam_module.compare, []
    budget = Budget(4, 30, 40, num_particles=16, num_replicates=4)
    settings = {"budget": budget, "progress": False, "families": SIMPLE}
    whole = run_generated_exam(3, methods, seed=1, **settings)

    def killed_at_the_third(*given, **named):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(given)
        return right(*given, **named)

    run = partial(run_generated_exam, 3, methods, seed=1, checkpoint=tmp_path / "kept", **settings)
    monkeypatch.setattr(exam_module, "compare", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(exam_module, "compare", lambda *a, **k: asked.append(a) or right(*a, **k))
    for _ in range(2):
        table = run().to_pandas()  # where what is not a number equals itself
        pd.testing.assert_frame_equal(
            *(t.drop(columns="seconds") for t in (table, whole.to_pandas())), check_exact=True
        )
        assert len(asked) == 3
    with pytest.raises(CheckpointError):
        run_generated_exam(3, methods, seed=2, checkpoint=tmp_path / "kept", **settings)


@pytest.mark.parametrize("ignored", [["--cases", "linreg10"], ["--table", "calibration"], ["--replicates", "3"]])
def test_options_that_it_would_ignore_are_refused(ignored, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bayeskit", "exam", "--generated", "2", *ignored])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == BAD_INPUT and "leave out" in capsys.readouterr().err


def test_no_problems_are_refused():
    with pytest.raises(SettingsError):
        run_generated_exam(0, budget=SMALL, progress=False)
