"""What a notebook shows of results: a few lines, and never the contents of tensors."""

import dataclasses
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

import bayeskit
from bayeskit import Draws
from bayeskit.inference.evidence import Evidence, EvidenceComparison, PredictiveScore, Verdict
from bayeskit.inference.evidence._calibration import Calibration
from bayeskit.inference.evidence._judging._constants import ConstantsReport
from bayeskit.inference.evidence._prequential_evidence import PrequentialEvidence
from bayeskit.models.phylogenetics import all_topologies
from bayeskit.models.phylogenetics.workflows._topology_comparison import TopologyComparison
from bayeskit.workflows import ModelComparison
from bayeskit.workflows._exam import Exam
from bayeskit.workflows._invariance import InvariantSubsets, SubsetEvidence
from bayeskit.workflows._simulation_based_calibration import SBCResult

GOOD = Evidence("bridge_sampling", -94.083, 3.1e-6, 8000, seconds=1.5)
BAD = Evidence("harmonic_mean", -2.0, 0.3, 4000, ("infinite variance <b>: use bridge sampling",))
LAPLACE = Evidence("laplace", -94.0, float("nan"), 400, ("an approximation of unknown error",))
SCORE = PredictiveScore("pointwise_predictive_density", -71.3, 0.02, 8000)
ZEROS = torch.zeros(2, 5)


def results():
    """Return results that a user meets, by what their text begins with."""
    several = {z.method: z for z in (BAD, GOOD, LAPLACE)}
    comparison = EvidenceComparison(
        several, None, None, scores={SCORE.method: SCORE}, refused={"chib": "it needs <b>blocks</b>"}
    )
    models = ModelComparison({"<b>plain</b>": GOOD, "other": BAD})
    arrays = {"bridge_sampling": np.array([-1.0, -1.1])}
    topologies = all_topologies(("A", "B", "C", "D"))
    trees = {f"tree {i + 1}": Evidence("smc", -float(i), 0.1, 10) for i in range(3)}
    return {
        "bridge_sampling: log evidence -94.0830000 +- 3.1e-06": GOOD,
        "prequential: log evidence -3.00 +- 0.10": PrequentialEvidence("prequential", -3.0, 0.1, 10),
        "pointwise_predictive_density: predictive score -71.300 +- 0.020": SCORE,
        "log evidence -94.0830000 +- 3.1e-06 by bridge_sampling; 1 of 3": comparison,
        "log evidence -94.0830000 +- 3.1e-06 by bridge_sampling; 1 of 2": Verdict.of([GOOD, BAD]),
        "other: log evidence -2.00 +- 0.30, log Bayes factor 0, probability 1.0": models,
        "tree 1: log evidence 0.00 +- 0.10": TopologyComparison(topologies, ModelComparison(trees)),
        "Draws(2 chains x 5 draws, dim 1)": Draws(torch.zeros(2, 5, 1), ZEROS, ZEROS, torch.ones(2)),
        "<b>: 2 replicates of 1 methods": Calibration(
            "<b>", float("nan"), arrays, arrays, {"bridge_sampling": np.array([True, True])}, arrays, seeds=(0, 1)
        ),
        "ranks of 1 quantities over 100 replicates are uniform": SBCResult(
            {"<b>": np.arange(100) % 10}, 9, np.full(100, 50.0), np.zeros(100, dtype=int)
        ),
        "no shared mechanism among 2 subsets of 1 columns": InvariantSubsets(
            tuple(SubsetEvidence(s, -9.0, -5.0, 0.1, -1.0, 2000.0) for s in ((), ("<b>",))), ("<b>",), {0: 5, 1: 5}
        ),
        "0 answers": Exam((), {}),
        "warning: a constant": ConstantsReport(0.0, 0.1, ("a constant",), (), 10),
    }


@pytest.mark.parametrize(("beginning", "result"), results().items(), ids=lambda x: type(x).__name__)
def test_the_text_is_short_and_begins_with_what_the_result_says(beginning, result):
    text = repr(result)
    assert text.startswith(beginning) and text == str(result)
    assert "tensor(" not in text and "array(" not in text and len(text) < 1500


@pytest.mark.parametrize("result", results().values(), ids=lambda x: type(x).__name__)
def test_a_fragment_is_of_the_one_template_and_escaped(result):
    if isinstance(result, ConstantsReport):
        assert not hasattr(result, "_repr_html_")
        return
    shown = result._repr_html_()
    assert shown.startswith('<div class="bayeskit-result"><style>') and shown.rstrip().endswith("</div>")
    assert (
        "<b>plain" not in shown and "<b>blocks" not in shown and "variance <b>" not in shown and "<b><b>" not in shown
    )
    assert shown.count("<p><b>") == 1, "it says first what it is"
    assert "0.0000</td>" not in shown, "an error that is printed as zero"


def test_groups_of_a_comparison_are_in_order_and_grey_where_not_trusted():
    comparison = results()["log evidence -94.0830000 +- 3.1e-06 by bridge_sampling; 1 of 3"]
    shown = comparison._repr_html_()
    order = ["1 of 3 methods trusted", "Estimates, the most precise first", "Not trusted", "Approximations, bounds"]
    order += ["Predictive scores", "Warnings of 2 methods", "1 method does not apply"]
    places = [shown.index(piece) for piece in order]
    assert places == sorted(places)
    grey = [part.partition("<caption>")[2].partition("<")[0] for part in shown.split('class="sortable grey"')[1:]]
    assert grey == ["Not trusted", "Approximations, bounds and maxima"]
    lines = str(comparison).splitlines()
    assert [line for line in lines if line[0] != " "][1:] == [
        "Estimates, the most precise first",
        "Not trusted",
        "Approximations, bounds and maxima, without an error",
        "Predictive scores",
        "Do not apply",
        "2 of the methods have warnings, such as .results['harmonic_mean'].warnings",
    ]
    points = {line.index(".") for line in lines if "+-" in line and line.startswith("  ")}
    assert len(points) == 1, "numbers stand below each other by their points"
    assert "variance" not in "\n".join(lines)


def test_most_precise_estimates_come_first():
    several = [Evidence(f"m{error}", -1.0, error, 1) for error in (0.3, 0.1, 0.2)]
    comparison = EvidenceComparison({z.method: z for z in several}, None, None)
    assert [z.method for z in comparison.groups[0].members] == ["m0.1", "m0.2", "m0.3"]
    assert comparison.results.keys() == {"m0.3", "m0.1", "m0.2"}


def test_long_tables_are_cut_and_say_so():
    models = ModelComparison({f"model {i}": Evidence("smc", -10.0 * i, 0.1, 10) for i in range(40)})
    assert str(models).count("\n") == 30 and "10 more models in .to_pandas()" in str(models)
    assert models._repr_html_().count('scope="row"') == 30 and "10 more models" in models._repr_html_()


def test_draws_are_shown_without_a_run_of_the_model():
    target = bayeskit.exact.get("beta_binomial").target()
    draws = bayeskit.sample(target, 2, 20, 20, progress=False)
    target.constrain = None  # a call would fail
    shown = draws._repr_html_()
    for piece in ("2 chains of 20 draws", "<td>p</td>", "0 of 40", "HMC", "<td>20</td>"):
        assert piece in shown


def public_dataclasses():
    """Yield the dataclasses that packages export."""
    for found in pkgutil.walk_packages(bayeskit.__path__, "bayeskit."):
        if found.ispkg:
            room = importlib.import_module(found.name)
            for name in getattr(room, "__all__", ()):
                thing = getattr(room, name)
                if inspect.isclass(thing) and dataclasses.is_dataclass(thing):
                    yield thing


def tensors_shown(one):
    """Return the fields of a dataclass whose contents its own text would show."""
    if "__create_fn__" not in one.__repr__.__qualname__ and not hasattr(one.__repr__, "__wrapped__"):
        return []
    kinds = ("Tensor", "ndarray", "dict[str, Any]")
    return [f.name for f in dataclasses.fields(one) if f.repr and str(f.type).startswith(kinds)]


def test_no_result_prints_its_tensors():
    offending = {one.__qualname__: tensors_shown(one) for one in public_dataclasses()}
    assert {name: found for name, found in offending.items() if found} == {}

    assert tensors_shown(dataclasses.make_dataclass("Noise", [("x", "Tensor"), ("n", "int")])) == ["x"]
