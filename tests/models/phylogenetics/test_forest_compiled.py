"""The compiled passes over many topologies: made anew, changed, and missing."""

import shutil

import pytest
import torch

from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics import Alignment, Tree
from bayeskit.models.phylogenetics.forest import native as forest_native
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.models.phylogenetics.substitution import HKY85
from bayeskit.models.phylogenetics.trees.topologies import Topologies

has_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
ROWS = {
    "A": "ACGTACCARG",
    "B": "ACGTACCCAG",
    "C": "ATGRAC-AAC",
    "D": "CTGAACTATC",
    "E": "GTGAGCTATT",
    "F": "GTAA?CTAGT",
}
TREES = ["((A,B),(C,D),(E,F));", "(((A,C),E),B,(D,F));", "((((A,F),B),C),D,E);"]


@pytest.fixture
def problem() -> tuple[Alignment, Topologies, torch.Tensor]:
    topologies = Topologies.from_trees([Tree.from_newick(text) for text in TREES])
    generator = torch.Generator().manual_seed(0)
    lengths = 0.01 + 0.4 * torch.rand(3, topologies.num_edges, generator=generator, dtype=torch.float64)
    return Alignment.from_sequences(ROWS), topologies, lengths


def evaluate(forest: ForestLikelihood, topologies: Topologies, lengths: torch.Tensor) -> list[torch.Tensor]:
    leaf = lengths.clone().requires_grad_()
    values = forest.log_likelihood(topologies, leaf)
    return [values.detach(), torch.autograd.grad(values.sum(), leaf)[0]]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


@pytest.fixture
def compiled_anew(monkeypatch, tmp_path):
    """Code is compiled in a folder of its own, and forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(forest_native, "_FLAGS", ("-O1", *forest_native._FLAGS[1:]))
    forest_native._library.cache_clear()
    yield
    forest_native._library.cache_clear()


@has_compiler
@pytest.mark.parametrize("mutated", [False, True])
def test_code_made_anew_is_right_and_a_mutation_is_caught(mutated, problem, compiled_anew, monkeypatch, tmp_path):
    alignment, topologies, lengths = problem
    model = HKY85(kappa=3.0, base_frequencies=[0.4, 0.3, 0.2, 0.1])
    expected = evaluate(ForestLikelihood(alignment, model, compile=False), topologies, lengths)
    if mutated:
        source = forest_native._SOURCE.read_text()
        path = tmp_path / "changed.cpp"
        path.write_text(source.replace("(entry(c, 0, j) * g[0]", "(entry(c, j, 0) * g[0]"))
        assert path.read_text() != source
        monkeypatch.setattr(forest_native, "_SOURCE", path)
    values, slopes = evaluate(ForestLikelihood(alignment, model), topologies, lengths)
    assert relative_error(values, expected[0]) < 1e-12
    assert (relative_error(slopes, expected[1]) < 1e-10) != mutated
    assert not mutated or relative_error(slopes, expected[1]) > 1e-3
    # It is kept for the next process, and nothing else is.
    assert [path.suffix for path in (tmp_path / "bayeskit").iterdir()] == [".so"]


@pytest.mark.parametrize(("compiler", "reason"), [("false", "false failed"), ("", "no C\\+\\+ compiler")])
def test_without_a_compiler_the_tensor_operations_are_used(compiler, reason, problem, compiled_anew, monkeypatch):
    alignment, topologies, lengths = problem
    expected = ForestLikelihood(alignment, compile=False).log_likelihood(topologies, lengths)
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", "")
    forest = ForestLikelihood(alignment)
    with pytest.warns(CompilationWarning, match=reason):
        values = forest.log_likelihood(topologies, lengths)
    assert torch.equal(values, expected)
    # Said once.
    assert torch.equal(forest.log_likelihood(topologies, lengths), expected)
