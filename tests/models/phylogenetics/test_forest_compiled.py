"""The compiled passes over many topologies: made anew, changed, damaged, and missing."""

import tempfile
from pathlib import Path

import pytest
import torch

from bayeskit._core import libraries as libraries
from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics import Alignment, Tree
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._pruning import _native as native
from bayeskit.models.phylogenetics._pruning._plan import make_plan
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites
from bayeskit.models.phylogenetics._substitution import HKY85
from bayeskit.models.phylogenetics._topologies import Topologies

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
    """Code is compiled in folders of its own, and forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))
    native._load_once.cache_clear()
    yield
    native._load_once.cache_clear()


def change_source(monkeypatch, folder, old: str, new: str) -> None:
    assert sum(source.read_text().count(old) for source in native._SOURCES) == 1
    copies = []
    for source in native._SOURCES:
        text = source.read_text()
        copies.append(folder / source.name)
        copies[-1].write_text(text.replace(old, new))
    monkeypatch.setattr(native, "_SOURCES", tuple(copies))


def kept(folder: Path) -> list[Path]:
    """The files of a folder, of which nothing but compiled code may stay behind."""
    found = list(folder.iterdir()) if folder.exists() else []
    assert all(path.suffix == ".so" for path in found)
    return found


def stand_in(monkeypatch) -> list[Path]:
    """Compile what does nothing but tell its size, quickly; return the list of folders where that happened."""
    made, original = [], libraries._made

    def note(folder, *rest):
        made.append(folder)
        return original(folder, *rest)

    path = Path(tempfile.gettempdir()) / "stand_in.cpp"
    path.write_text('extern "C" { long long size_of_task() { return 8; } }')
    monkeypatch.setattr(native, "_SOURCES", (path,))
    monkeypatch.setattr(libraries, "_made", note)
    return made


@pytest.mark.compiler
@pytest.mark.parametrize("mutated", [False, True])
def test_code_made_anew_is_right_and_a_mutation_is_caught(mutated, problem, compiled_anew, monkeypatch, tmp_path):
    alignment, topologies, lengths = problem
    model = HKY85(kappa=3.0, base_frequencies=[0.4, 0.3, 0.2, 0.1])
    expected = evaluate(ForestLikelihood(alignment, model, compile=False), topologies, lengths)
    if mutated:
        change_source(monkeypatch, tmp_path, "entry(c, i, j) * g[i]", "entry(c, j, i) * g[i]")
    values, slopes = evaluate(ForestLikelihood(alignment, model), topologies, lengths)
    assert relative_error(values, expected[0]) < 1e-12
    assert (relative_error(slopes, expected[1]) < 1e-10) != mutated
    assert not mutated or relative_error(slopes, expected[1]) > 1e-3
    # What is compiled for lengths and for matrices is kept for the next process, and nothing else is.
    assert len(kept(tmp_path / "bayeskit")) == 2


@pytest.mark.compiler
def test_a_mutation_of_the_exponents_of_single_rows_is_caught(problem, compiled_anew, monkeypatch, tmp_path):
    alignment, topologies, lengths = problem
    rates = InvariantSites(0.2, GammaRates(0.5))
    expected = evaluate(ForestLikelihood(alignment, site_rates=rates, compile=False), topologies, lengths)
    change_source(monkeypatch, tmp_path, "+ total(a) + total(b);", "+ total(a);")
    found = evaluate(ForestLikelihood(alignment, site_rates=rates), topologies, lengths)
    assert all(relative_error(one, other) > 1e-3 for one, other in zip(found, expected, strict=True))


@pytest.mark.compiler
@pytest.mark.parametrize("mutated", [False, True])
def test_mutations_of_the_ends_of_the_numbers_are_caught(mutated, problem, compiled_anew, monkeypatch, tmp_path):
    alignment, topologies, lengths = problem
    if mutated:
        change_source(monkeypatch, tmp_path, "return value > zero ?", "return value != zero ?")
        change_source(monkeypatch, tmp_path, "ratio > limit ? limit : ratio", "ratio")
    forest = ForestLikelihood(alignment)
    slopes = evaluate(forest, topologies, lengths * 1e-308)[1]
    assert bool(torch.isfinite(slopes).all()) != mutated
    passes = native.CompiledPasses(make_plan(topologies, forest._patterns[0]), torch.float64, torch.device("cpu"))
    for vectors in (1, 3):
        negative = torch.full((vectors, 3, 4), -0.25, dtype=torch.float64)
        (values,) = passes.log_likelihoods(lengths.expand(vectors, -1, -1), negative, False)
        assert bool(values.isnan().all()) != mutated


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


@pytest.mark.compiler
def test_the_user_s_line_is_named_and_arguments_of_another_size_are_refused(problem, compiled_anew, monkeypatch):
    alignment, topologies, lengths = problem
    stand_in(monkeypatch)
    assert native.load(8) is not None
    with pytest.warns(CompilationWarning, match="takes other arguments") as caught:
        values = ForestLikelihood(alignment).log_likelihood(topologies, lengths)
    assert [warning.filename for warning in caught] == [__file__]
    assert torch.equal(values, ForestLikelihood(alignment, compile=False).log_likelihood(topologies, lengths))


@pytest.mark.compiler
@pytest.mark.parametrize("size", [0, 3000])
def test_code_that_was_cut_short_is_made_anew(size, compiled_anew, monkeypatch, tmp_path):
    made = stand_in(monkeypatch)
    assert native.load(8).size_of_task() == 8
    (path,) = kept(tmp_path / "bayeskit")
    whole = path.read_bytes()
    # A new file, because this process has the old one open.
    path.unlink()
    path.write_bytes(whole[:size])
    for _ in range(2):  # the second time it is found
        native._load_once.cache_clear()
        assert native.load(8).size_of_task() == 8
    assert len(made) == 2
    assert [path.stat().st_size for path in kept(tmp_path / "bayeskit")] == [len(whole)]


@pytest.mark.compiler
def test_where_the_cache_cannot_be_written_code_is_kept_among_temporary_files(compiled_anew, monkeypatch, tmp_path):
    made = stand_in(monkeypatch)
    (tmp_path / "bayeskit").write_text("no folder")
    for _ in range(2):
        native._load_once.cache_clear()
        assert native.load(8) is not None
    (folder,) = (path for path in (tmp_path / "temporary").iterdir() if path.is_dir())
    assert made == [folder] and len(kept(folder)) == 1
    # Where others can write, code is neither kept nor run.
    folder.chmod(0o777)
    folder.parent.chmod(0o777)
    native._load_once.cache_clear()
    with pytest.warns(CompilationWarning, match="cannot be stored or loaded"):
        assert native.load(8) is None


@pytest.mark.compiler
def test_a_user_without_a_home_has_temporary_files(compiled_anew, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    made = stand_in(monkeypatch)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert native.load(8) is not None
    assert [folder.parent.name for folder in made] == ["temporary"]
