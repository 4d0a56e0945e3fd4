"""The report of estimators: exact estimators have no variance, biased ones are seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bayeskit.inference import gradients
from bayeskit.inference.gradients import LeaveOneOut, WeightedPoints

LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.0, -1.2], dtype=torch.float64)
VALUES = torch.tensor([1.0, 3.0, -2.0, 0.5, 4.0], dtype=torch.float64)


@dataclass(frozen=True)
class Shrunk(LeaveOneOut):
    """Weights a tenth too small: biased, and not saying so."""

    def points(self, space, generator=None):
        values, weights, _ = super().points(space, generator)
        return WeightedPoints(values, 0.9 * weights)


def test_the_table_tells_exact_from_biased_from_unbiased():
    estimators = [gradients.Enumeration(), LeaveOneOut(2), Shrunk(2), gradients.UnorderedSet(5)]
    found = gradients.compare(LOGITS, VALUES, estimators, num_replicates=20_000, seed=1)
    table = found.to_pandas().set_index("estimator")
    assert list(table["num_evaluations"]) == [5, 2, 2, 5]
    exact = table.loc[["Enumeration(limit=65536)", "UnorderedSet(k=5)"]]
    assert (exact["variance"] < 1e-25).all() and (exact["largest_z"] == 0).all()
    assert abs(table.loc["LeaveOneOut(num_samples=2)", "largest_z"]) < 5
    assert abs(table.loc["Shrunk(num_samples=2)", "largest_z"]) > 5
    assert "20000 replicates" in repr(found) and "LeaveOneOut" in repr(found)


def test_variances_are_those_of_the_reference():
    # Over 50,000 replicates a trace has a relative error of well below two per cent here.
    estimators = [gradients.ScoreFunction(), LeaveOneOut(2), gradients.UnorderedSet(2)]
    for shift, expected in ((0.0, (1.8500, 2.8096, 0.6681)), (10.0, (80.2552, 2.8096, 25.2729))):
        found = gradients.compare(LOGITS, VALUES + shift, estimators, num_replicates=50_000)
        for result, wanted in zip(found.results.values(), expected, strict=True):
            assert abs(result.variance / wanted - 1) < 0.06


def test_usual_estimators_are_chosen_and_plotted():
    bits = torch.distributions.Independent(torch.distributions.Bernoulli(logits=torch.zeros(3)), 1)
    found = gradients.compare(bits, lambda z: z.sum(-1).square(), num_replicates=100)
    assert "DisARM(num_pairs=2)" in found.results and len(found.results) == 6
    left, right = found.plot()
    assert [label.get_text() for label in left.get_yticklabels()] == list(found.results)
    assert len(right.lines) == 1 + len(found.results)


def test_a_baseline_is_measured_after_it_has_learnt_and_is_left_alone():
    baseline = gradients.MovingAverage(0.9)
    estimators = [gradients.ScoreFunction(), gradients.ScoreFunction(1, baseline)]
    plain, learnt = gradients.compare(LOGITS, VALUES + 10, estimators, num_replicates=20_000).results.values()
    assert int(baseline.num_draws) == 0
    assert learnt.variance < 0.1 * plain.variance and abs(learnt.largest_z) < 5


def test_estimators_that_read_alike_keep_their_rows():
    temperatures = [torch.tensor(0.1), torch.tensor(5.0)]
    found = gradients.compare(LOGITS, VALUES, [gradients.REBAR(t) for t in temperatures], num_replicates=100)
    assert list(found.results) == ["REBAR(temperature=0.1)", "REBAR(temperature=5)"]
    twice = gradients.compare(LOGITS, VALUES, [LeaveOneOut(2), LeaveOneOut(2)], num_replicates=100)
    assert list(twice.results) == ["LeaveOneOut(num_samples=2) #1", "LeaveOneOut(num_samples=2) #2"]


def test_a_bias_beside_a_larger_problem_is_seen():
    logits = torch.zeros(2, 3)
    values = torch.tensor([[1e6, 2e6, 0.0], [1.0, 2.0, 0.0]])
    (found,) = gradients.compare(logits, values, [Shrunk(2)], num_replicates=20_000).results.values()
    assert bool((found.z.abs().amax(-1) > 5).all())
