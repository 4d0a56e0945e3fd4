import re
from pathlib import Path

import torch

import bayeskit as bk

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_ten_lines_run(capsys):
    scope = {}
    exec(BLOCKS[0], scope)
    assert isinstance(scope["draws"], bk.Draws)
    assert scope["estimate"].trusted
    assert "bridge_sampling: log evidence" in capsys.readouterr().out


def test_the_number_of_ways_is_right():
    ways = sum(method.kind != "score" for method in bk.inference.evidence.METHODS.values())
    assert re.findall(r"(\d+) ways", README.read_text(encoding="utf-8")) == [str(ways)] * 2


def test_every_way_runs(capsys):
    scope = {}
    exec(BLOCKS[1], scope)
    assert abs(scope["ways"].verdict.log_evidence - scope["case"].log_evidence) < 0.1
    printed = capsys.readouterr().out
    assert "gamma_laplus" in printed and "coverage_95" in printed


def test_the_training_example_runs(capsys):
    scope = {}
    with torch.random.fork_rng():  # the script seeds torch, as scripts do
        exec(BLOCKS[2], scope)
    fit = scope["fit"]
    assert fit.losses[-10:].mean() < fit.losses[:10].mean()
    assert re.match(r"Fit\(20 epochs, 280 steps, loss .* mean log likelihood -2\d", capsys.readouterr().out)


def test_the_example_of_discrete_gradients_runs(capsys):
    scope = {}
    exec(BLOCKS[3], scope)
    assert scope["gradient"].shape == (5,) and "UnorderedSet(k=4)" in capsys.readouterr().out


def test_the_example_of_a_loss_runs(capsys):
    scope = {}
    exec(BLOCKS[4], scope)
    assert 0.05 < scope["weight"] < 0.5 and "Draws" in capsys.readouterr().out


def test_the_example_of_a_wide_network_runs(capsys):
    scope = {}
    exec(BLOCKS[5], scope)
    kernels = scope["kernel"].both(scope["x"])
    assert kernels.nngp.shape == kernels.ntk.shape == (8, 8)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("NNGP posterior", "NTK ensemble", "NTK regression", "NTK posterior"))


def test_the_example_of_trees_runs(capsys):
    scope = {}
    exec(BLOCKS[6], scope)
    assert len(BLOCKS) == 7
    best = scope["found"].to_pandas().iloc[0]
    assert "(Homo_sapiens,Pan)" in best["newick"] and best["posterior_probability"] > 0.99
    assert best["newick"] in capsys.readouterr().out
