import math

import pytest

from bayeskit.errors import UnknownNameError
from bayeskit.inference.evidence import METHODS, Evidence
from bayeskit.workflows import run_exam
from bayeskit.workflows._exam import SMALL, Exam, ExamRow


def row(estimate, error, warnings=()):
    return ExamRow("case", Evidence("method", estimate, error, 10, warnings), -10.0)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (row(-10.02, 0.01), "pass"),
        (row(-10.0, 0.0), "pass"),
        (row(-10.04, 0.01), "FALSE COMFORT"),
        (row(-9.9, 0.0), "FALSE COMFORT"),
        (row(-5.0, 0.01, ("weights dominate",)), "self-flagged"),
        (row(-10.0, 0.01, ("weights dominate",)), "self-flagged"),
        (row(math.nan, math.nan, ("failed: x",)), "failed"),
    ],
)
def test_verdicts(made, verdict):
    assert made.verdict == verdict
    assert Exam((made,)).has_false_comfort == (verdict == "FALSE COMFORT")


def test_the_error_of_the_answer_counts():
    estimate = Evidence("method", -10.04, 0.01, 10)
    assert ExamRow("case", estimate, -10.0, 0.02).z == pytest.approx(-0.04 / math.hypot(0.01, 0.02))
    assert ExamRow("case", estimate, -10.0, 0.02).verdict == "pass"


def test_summary_counts():
    exam = Exam((row(-10.0, 0.1), row(-10.0, 0.1), row(0.0, 0.1, ("bad",)), row(0.0, 0.1)))
    assert str(exam).startswith("4 answers: 2 pass, 1 self-flagged, 1 false comfort")
    failed = Exam((row(-10.0, 0.1), row(math.nan, math.nan, ("failed: x",))))
    assert failed.count("self-flagged") == 0 and str(failed).endswith("1 failed")


@pytest.mark.calibration
def test_small_exam_of_every_method():
    exam = run_exam(cases=["beta_binomial"], budget=SMALL, progress=False)
    table = exam.to_pandas()
    columns = "case method estimate standard_error exact z trusted seconds verdict remarks".split()
    assert list(table.columns) == columns
    # Every method has a row, those that do not apply with the reason; scores are no answers.
    wanted = {name for name, method in METHODS.items() if method.kind != "score"}
    assert set(table["method"]) == wanted and "gamma_laplus" in exam.refused["beta_binomial"]
    assert (table.loc[table["verdict"] == "does not apply", "remarks"] != "").all()
    assert list(table["case"].unique()) == ["beta_binomial"] and len(table) >= 6
    trusted = table[table["trusted"]].set_index("method")
    assert {"bridge_sampling", "laplace_importance_sampling"} <= set(trusted.index)
    # Two-sided 1e-5 for each of a handful of methods.
    assert (trusted["z"].abs() < 4.9).all()


def test_unknown_names_are_refused_before_anything_runs():
    with pytest.raises(UnknownNameError, match="bridge_sampling"):
        run_exam(["bridge"], progress=False)
    with pytest.raises(UnknownNameError, match="linreg10"):
        run_exam(cases=["linreg"], progress=False)
    with pytest.raises(UnknownNameError):
        run_exam(cases=[], progress=False)


def test_without_an_error_there_is_no_distance_in_errors():
    laplace = row(-5.0, math.nan, ("an approximation",))
    assert math.isnan(laplace.z) and laplace.verdict == "self-flagged"
    assert row(-9.9, 0.0).z == math.inf and row(-10.1, 0.0).z == -math.inf
