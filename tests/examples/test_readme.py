import re
from pathlib import Path

import pytest
import torch

import bayeskit as bk
from bayeskit import extend

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE_OF_FAMILIES = (ROOT / "docs/how_to/own_family.md").read_text(encoding="utf-8")


def blocks(text, opening="python"):
    return re.findall(rf"```{opening}\n(.*?)```", text, re.DOTALL)


def run(page):
    """Run the one example of a page of the documentation, or else all of its cells; return the names."""
    text, scope = (ROOT / "docs" / page).read_text(encoding="utf-8"), {}
    for block in blocks(text) or blocks(text, r"\{code-cell\} python"):
        exec(block, scope)
    return scope


@pytest.mark.calibration
def test_the_quick_start_prints_what_it_says(capsys):
    scope = {}
    for block in blocks(README):
        exec(block, scope)
    printed = capsys.readouterr().out
    shown = "".join(re.findall(r"```text\n(.*?)```", README, re.DOTALL))
    number = r"-?\d+\.\d+"
    for line in (r"mean +({0}) +({0})", r"bridge_sampling: log evidence ({0})", r"scale 0.5: log evidence ({0})"):
        one, other = (re.search(line.format(number), text) for text in (printed, shown))
        # Posterior mean and deviation, of 0.44, come from some 5,000 effective draws; 0.05 is over five errors of both.
        assert [float(x) for x in one.groups()] == pytest.approx([float(x) for x in other.groups()], abs=0.05)
    # Normal data with a normal mean: the evidence in closed form.
    y = scope["y"]
    for line, scale in (("scale 0.5: log evidence", 0.5), ("scale 1.0: log evidence", 1.0)):
        covariance = 25.0 + scale**2 * torch.eye(len(y), dtype=y.dtype)
        exact = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
        for text in (printed, shown):
            found, error = re.search(rf"{line} ({number}) \+- ({number}(?:e-\d+)?)", text).groups()
            # Printed to two digits of the error.
            assert abs(float(found) - float(exact)) < 5.25 * float(error) + 1e-9


def test_the_number_of_ways_is_right():
    ways = [method for method in bk.inference.evidence.METHODS.values() if method.kind != "score"]
    # Path sampling has a standard error beside the bias of its integration.
    without = sum(method.kind in ("approximation", "bound") and "ladder" not in method.needs for method in ways)
    counts = re.findall(r"(\d+) ways: (\d+) estimators with .* and (\d+)\s+approximations", README, re.DOTALL)
    assert counts == [(str(len(ways)), str(len(ways) - without), str(without))]


def test_the_table_of_all_methods_names_each():
    section = (ROOT / "docs/choosing/estimator.md").read_text(encoding="utf-8").split("## All methods")[1]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {*re.findall(r"`(\w+)`", " ".join(rows))}
    scores = {name for name, method in bk.inference.evidence.METHODS.items() if method.kind == "score"}
    assert named == set(bk.inference.evidence.METHODS) - scores and all(f"`{name}`" in section for name in scores)


def test_the_length_of_the_readme():
    assert 90 < README.count("\n") < 131


@pytest.mark.calibration
def test_every_way_runs(capsys):
    scope = run("choosing/estimator.md")
    assert abs(scope["ways"].verdict.log_evidence - scope["case"].log_evidence) < 0.1
    printed = capsys.readouterr().out
    assert "gamma_laplus" in printed and "coverage_95" in printed


@pytest.mark.calibration
def test_the_training_example_runs(capsys):
    with torch.random.fork_rng():  # the script seeds torch, as scripts do
        scope = run("choosing/objective.md")
    fit = scope["fit"]
    assert fit.losses[-10:].mean() < fit.losses[:10].mean()
    assert re.match(r"Fit\(20 epochs, 280 steps, loss .* mean log likelihood -2\d", capsys.readouterr().out)


@pytest.mark.calibration
def test_the_example_of_discrete_gradients_runs(capsys):
    scope = run("how_to/discrete.md")
    assert scope["gradient"].shape == (5,) and "UnorderedSet(k=4)" in capsys.readouterr().out
    torch.testing.assert_close(scope["probability"], scope["by_hand"])


@pytest.mark.calibration
def test_the_example_of_a_loss_runs(capsys):
    scope = run("how_to/own_loss.md")
    assert 0.05 < scope["weight"] < 0.5 and "Draws" in capsys.readouterr().out


def test_the_example_of_a_wide_network_runs(capsys):
    scope = run("how_to/own_network.md")
    kernels = scope["kernel"].both(scope["x"])
    assert kernels.nngp.shape == kernels.ntk.shape == (8, 8)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("NNGP posterior", "NTK ensemble", "NTK regression", "NTK posterior"))


def test_the_example_of_trees_runs(capsys):
    scope = run("how_to/own_alignment.md")
    best = scope["found"].to_pandas().iloc[0]
    assert "(Homo_sapiens,Pan)" in best["newick"] and best["posterior_probability"] > 0.99
    assert best["newick"] in capsys.readouterr().out


@pytest.mark.calibration
def test_the_example_of_a_family_runs(capsys):
    scope = run("how_to/own_family.md")
    for kind, estimate in scope["found"].comparison.results.items():
        assert abs(estimate.log_evidence - scope["exact"][kind]) < 5.25 * estimate.standard_error
    assert "One rate for all groups: probability 0.8" in scope["found"]._repr_html_()
    assert "exact probability of one rate: 0.8059" in capsys.readouterr().out
    with pytest.raises(bk.errors.DataError, match="a count and a positive time for each group"):
        scope["EventRates"]([1, 2], [1.0, 0.0])
    with pytest.raises(bk.errors.UnknownNameError, match="'own'"):
        scope["EventRates"]([1, 2], [1.0, 1.0], rates="owm")


def test_the_interface_for_families_is_described_by_names_that_it_has():
    (table,) = re.findall(r"## What the interface offers\n(.*?)\n##", PAGE_OF_FAMILIES, re.DOTALL)
    named = re.findall(r"`(\w+)`", table)
    assert set(named) < set(extend.__all__) and len(named) == len(set(named)) > 50
