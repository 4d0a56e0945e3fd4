"""The report of estimators: exact estimators have no variance, biased ones are seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bayeskit.errors import DataError, SettingsError
from bayeskit.inference import gradients
from bayeskit.inference.gradients import LeaveOneOut
from bayeskit.inference.gradients._estimator import WeightedPoints

LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.0, -1.2], dtype=torch.float64)
VALUES = torch.tensor([1.0, 3.0, -2.0, 0.5, 4.0], dtype=torch.float64)


@dataclass(frozen=True)
class Shrunk(LeaveOneOut):
    """Weights a tenth too small: biased, and not saying so."""

    def points(self, space, generator=None):
        values, weights, _ = super().points(space, generator)
        return WeightedPoints(values, 0.9 * weights)


@pytest.mark.calibration
def test_the_table_tells_exact_from_biased_from_unbiased():
    estimators = [gradients.Enumeration(), LeaveOneOut(2), Shrunk(2), gradients.UnorderedSet(5)]
    found = gradients.compare_estimators(LOGITS, VALUES, estimators, num_replicates=20_000, seed=1)
    table = found.to_pandas().set_index("estimator")
    assert list(table["num_evaluations"]) == [5, 2, 2, 5]
    exact = table.loc[["Enumeration(limit=65536)", "UnorderedSet(k=5)"]]
    assert (exact["variance"] < 1e-25).all() and (exact["largest_z"] == 0).all()
    assert abs(table.loc["LeaveOneOut(num_samples=2)", "largest_z"]) < 5
    assert abs(table.loc["Shrunk(num_samples=2)", "largest_z"]) > 5
    assert "20000 replicates" in repr(found) and "LeaveOneOut" in repr(found)


@pytest.mark.calibration
def test_variances_are_those_of_the_reference(limit):
    estimators = [gradients.ScoreFunction(), LeaveOneOut(2), gradients.UnorderedSet(2)]
    for shift, expected in ((0.0, (1.8500, 2.8096, 0.6681)), (10.0, (80.2552, 2.8096, 25.2729))):
        found = torch.empty(16, 3)
        for seed in range(16):
            run = gradients.compare_estimators(LOGITS, VALUES + shift, estimators, num_replicates=4000, seed=seed)
            found[seed] = torch.tensor([result.variance for result in run.results.values()])
        assert ((found.mean(0) - torch.tensor(expected)).abs() < limit(6, dof=15) * found.std(0) / 4).all()


def test_usual_estimators_are_chosen_and_plotted():
    bits = torch.distributions.Independent(torch.distributions.Bernoulli(logits=torch.zeros(3)), 1)
    found = gradients.compare_estimators(bits, lambda z: z.sum(-1).square(), num_replicates=400)
    assert "DisARM(num_pairs=2)" in found.results and len(found.results) == 6
    left, right = found.plot()
    assert [label.get_text() for label in left.get_yticklabels()] == list(found.results)
    marked = [line.get_ydata()[0] for line in right.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert marked == list(range(len(found.results)))


def test_a_baseline_is_measured_after_it_has_learnt_and_is_left_alone():
    baseline = gradients.MovingAverage(0.9)
    estimators = [gradients.ScoreFunction(), gradients.ScoreFunction(1, baseline)]
    plain, learnt = gradients.compare_estimators(
        LOGITS, VALUES + 10, estimators, num_replicates=20_000
    ).results.values()
    assert int(baseline.num_draws) == 0
    assert learnt.variance < 0.1 * plain.variance and abs(learnt.largest_z) < 5


def test_estimators_that_read_alike_keep_their_rows():
    temperatures = [torch.tensor(0.1), torch.tensor(5.0)]
    found = gradients.compare_estimators(LOGITS, VALUES, [gradients.REBAR(t) for t in temperatures], num_replicates=100)
    assert list(found.results) == ["REBAR(temperature=0.1)", "REBAR(temperature=5)"]
    twice = gradients.compare_estimators(LOGITS, VALUES, [LeaveOneOut(2), LeaveOneOut(2)], num_replicates=100)
    assert list(twice.results) == ["LeaveOneOut(num_samples=2) #1", "LeaveOneOut(num_samples=2) #2"]


def test_a_bias_beside_a_larger_problem_is_seen():
    logits = torch.zeros(2, 3)
    values = torch.tensor([[1e6, 2e6, 0.0], [1.0, 2.0, 0.0]])
    (found,) = gradients.compare_estimators(logits, values, [Shrunk(2)], num_replicates=20_000).results.values()
    assert bool((found.z.abs().amax(-1) > 5).all())


EXACT = [gradients.UnorderedSet(5), gradients.RaoBlackwell(5), gradients.UnorderedSet(5, baseline=True)]


@pytest.mark.calibration
@pytest.mark.parametrize("values", [torch.ones(5).double(), VALUES + 1e6, VALUES + 1e8], ids=["ones", "1e6", "1e8"])
def test_exact_estimators_are_exact_whatever_the_mean(values):
    found = gradients.compare_estimators(LOGITS, values, [*EXACT, LeaveOneOut(2)], num_replicates=2000)
    *exact, other = found.results.values()
    assert all(x.without_variance and x.largest_z == 0 and bool(x.judged.all()) for x in exact)
    assert abs(other.largest_z) < 5
    # What is beyond rounding is still seen.
    (shrunk,) = gradients.compare_estimators(LOGITS, values + VALUES, [Shrunk(5)], num_replicates=5000).results.values()
    assert abs(shrunk.largest_z) > 5


def test_few_replicates_say_so():
    found = gradients.compare_estimators(LOGITS, VALUES, [LeaveOneOut(2), *EXACT], num_replicates=2000)
    assert "3 of 5" in repr(found) and f"raise num_replicates to {found.enough}" in repr(found)
    assert list(found.to_pandas()["judged"]) == [3, 5, 5, 5]
    assert math.ceil(200 / float(LOGITS.softmax(0).min())) == found.enough
    enough = gradients.compare_estimators(LOGITS, VALUES, [LeaveOneOut(2)], num_replicates=found.enough)
    assert "5 of 5" in repr(enough) and "raise" not in repr(enough)
    left, right = gradients.compare_estimators(LOGITS, VALUES, [LeaveOneOut(2)], num_replicates=10).plot()
    assert [text.get_text() for text in right.texts] == ["too few draws"]


def test_rare_categories_that_were_never_drawn_are_no_bias():
    logits = torch.tensor([0.0, -25.0], dtype=torch.float64)
    (found,) = gradients.compare_estimators(logits, VALUES[:2], LeaveOneOut(2), num_replicates=300).results.values()
    assert math.isnan(found.largest_z) or found.largest_z == 0


def test_relaxed_estimators_of_a_table_are_not_called_exact():
    estimators = [gradients.StraightThrough(), gradients.Enumeration()]
    table = gradients.compare_estimators(LOGITS, VALUES, estimators, num_replicates=50)
    assert "continued linearly" in repr(table)
    assert [text.get_text() for text in table.plot()[0].texts] == ["no variance", "exact"]
    bits = torch.distributions.Bernoulli(logits=torch.zeros(2))
    assert "linearly" not in repr(gradients.compare_estimators(bits, torch.square, estimators, num_replicates=50))


def test_labels_stay_apart():
    for values, count in ((VALUES, 2), (VALUES * 1e3, 4)):
        names = [LeaveOneOut(k) for k in range(2, 2 + count)]
        left, right = gradients.compare_estimators(LOGITS, values, names, num_replicates=50).plot()
        left.figure.canvas.draw()
        for axes in (left, right):
            low, high = axes.get_xlim()
            ticks = list(zip(axes.get_xticks(), axes.get_xticklabels(), strict=True))
            boxes = [text.get_window_extent() for x, text in ticks if low <= x <= high and text.get_text()]
            assert boxes and all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
            assert not any(text.get_text() for text in axes.get_xticklabels(minor=True))
        one, other = (axes.xaxis.label.get_window_extent() for axes in (left, right))
        assert one.x1 < other.x0
        assert [text.get_text() for text in left.figure.legends[0].get_texts()][0].startswith("a bias beyond")


def test_values_and_logits_come_from_any_library():
    wanted = gradients.compare_estimators(LOGITS, VALUES, LeaveOneOut(2), num_replicates=50)[
        "LeaveOneOut(num_samples=2)"
    ].mean
    for logits, values in ((LOGITS.numpy(), VALUES.tolist()), (LOGITS.tolist(), VALUES.numpy())):
        found = gradients.compare_estimators(logits, values, LeaveOneOut(2), num_replicates=50).results.values()
        assert torch.equal(next(iter(found)).mean, wanted)
    assert gradients.compare_estimators(np.arange(3), range(3), num_replicates=50).num_replicates == 50


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (VALUES.log(), "f is nan at 2"),
        ([1.0, math.inf, 0.0, 0.0, 0.0], "f is inf at 1"),
        (lambda z: torch.where(z == 3, math.nan, 1.0), "f is nan at 3"),
        ("f", "f is of type str"),
    ],
)
def test_functions_that_are_no_numbers_are_refused(f, said):
    with pytest.raises(DataError, match=said):
        gradients.compare_estimators(LOGITS, f, [LeaveOneOut(2)], num_replicates=50)


def test_functions_that_are_undefined_between_corners_are_refused():
    bits = torch.distributions.Bernoulli(logits=torch.zeros(2))
    with pytest.raises(DataError, match="REBAR.*between corners"):
        gradients.compare_estimators(bits, lambda z: torch.where(z == z.round(), z, math.nan), gradients.REBAR())


@pytest.mark.parametrize("wrong", [LeaveOneOut, [LeaveOneOut], ["LeaveOneOut"], "LeaveOneOut", [None], 3])
def test_what_is_no_estimator_is_refused(wrong):
    with pytest.raises(SettingsError, match="LeaveOneOut|None|3"):
        gradients.compare_estimators(LOGITS, VALUES, wrong, num_replicates=50)
