"""The likelihood of many topologies: enumeration, one topology at a time, gradients, shapes, scaling, mutations."""

import itertools
import math
import pickle
import shutil
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics import JC69, Alignment, Tree, TreeModel, primates
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._pruning import _passes as forest_passes
from bayeskit.models.phylogenetics._pruning._plan import CODE_BASE, SubPatterns
from bayeskit.models.phylogenetics._substitution import GTR, HKY85
from bayeskit.models.phylogenetics._topologies import Topologies

AMBIGUOUS = "ACGTACGTRYKMSWBDHVN-?"
BOTH = [pytest.param(True, id="compiled", marks=pytest.mark.compiler), pytest.param(False, id="tensors")]


@dataclass(frozen=True)
class JC69ByMatrices(JC69):
    """Jukes-Cantor without its shortcut."""

    @property
    def is_uniform(self) -> bool:
        return False


def gtr() -> GTR:
    return GTR(exchangeabilities=[1.0, 2.0, 0.5, 0.7, 3.0, 1.3], base_frequencies=[0.4, 0.3, 0.1, 0.2])


@pytest.fixture(params=BOTH)
def compiled(request):
    return request.param


@pytest.fixture(params=[JC69(), JC69ByMatrices(), gtr()], ids=["uniform", "matrices", "gtr"])
def substitution(request):
    return request.param


def random_tree(num_taxa: int, generator: torch.Generator) -> Tree:
    """A topology made by joining random pairs."""
    parts = [f"t{number}" for number in range(num_taxa)]
    while len(parts) > 3:
        first, second = torch.randperm(len(parts), generator=generator)[:2].tolist()
        joined = f"({parts[first]},{parts[second]})"
        parts = [part for number, part in enumerate(parts) if number not in (first, second)] + [joined]
    return Tree.from_newick(f"({','.join(parts)});")


def caterpillar(num_taxa: int) -> Tree:
    text = "t0"
    for number in range(1, num_taxa - 2):
        text = f"({text},t{number})"
    return Tree.from_newick(f"({text},t{num_taxa - 2},t{num_taxa - 1});")


def random_topologies(num_taxa: int, count: int, seed: int = 0) -> Topologies:
    generator = torch.Generator().manual_seed(seed)
    taxa = [f"t{number}" for number in range(num_taxa)]
    return Topologies.from_trees([random_tree(num_taxa, generator) for _ in range(count)], taxa)


def random_alignment(num_taxa: int, num_sites: int, seed: int = 1, symbols: str = AMBIGUOUS) -> Alignment:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(symbols), (num_taxa, num_sites), generator=generator).tolist()
    rows = {f"t{i}": "".join(symbols[j] for j in row) for i, row in enumerate(picks)}
    return Alignment.from_sequences(rows, data_type="DNA")


def lengths_for(topologies: Topologies, *sample: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*sample, len(topologies), topologies.num_edges)
    return 0.01 + 0.4 * torch.rand(shape, generator=generator, dtype=torch.float64)


def one_at_a_time(alignment, topologies, lengths, substitution=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradients from a model of each topology, in the order of edges of Topologies."""
    values, slopes = torch.empty(lengths.shape[:-1], dtype=torch.float64), torch.empty_like(lengths)
    for place in range(len(topologies)):
        tree = topologies.tree(place, torch.arange(topologies.num_edges, dtype=torch.float64))
        order = tree.branch_lengths.long()
        leaf = lengths[..., place, order].detach().requires_grad_()
        found = TreeModel(alignment, tree, substitution).log_likelihood(leaf)
        values[..., place] = found.detach()
        slopes[..., place, order] = torch.autograd.grad(found.sum(), leaf)[0]
    return values, slopes


def evaluate(forest: ForestLikelihood, topologies, lengths, **parameters) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = lengths.detach().clone().requires_grad_()
    values = forest.log_likelihood(topologies, leaf, **parameters)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


def enumerated(masks: list[int], tree: Tree, lengths: torch.Tensor, substitution) -> float:
    """Likelihood of one site as a sum over the states of all nodes; masks and lengths are in the tree's order."""
    like = torch.zeros((), dtype=torch.float64)
    matrices = torch.matrix_exp(substitution.rate_matrix(like) * lengths[:, None, None]).tolist()
    frequencies = substitution.frequencies(like).tolist()
    parents = tree.parents
    choices = [[state for state in range(4) if mask >> state & 1] for mask in masks]
    choices += [list(range(4))] * (tree.num_edges + 1 - len(masks))
    total = 0.0
    for states in itertools.product(*choices):
        probability = frequencies[states[-1]]
        for edge, parent in enumerate(parents):
            probability *= matrices[edge][states[parent]][states[edge]]
        total += probability
    return total


def all_trees(taxa: str) -> list[Tree]:
    """All topologies, by putting the next taxon on every edge."""

    def texts(text: str, rest: str) -> list[str]:
        if not rest:
            return [text]
        grown = []
        for start in range(1, len(text)):
            ends = [start + 1] if text[start] in taxa else []
            if text[start] == "(":
                depth = list(itertools.accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in text[start:]))
                ends = [start + depth.index(0) + 1]
            grown += [f"{text[:start]}({text[start:end]},{rest[0]}){text[end:]}" for end in ends]
        return [text for some in grown for text in texts(some, rest[1:])]

    return [Tree.from_newick(text + ";") for text in texts(f"({taxa[0]},{taxa[1]},{taxa[2]})", taxa[3:])]


@pytest.mark.parametrize(("taxa", "count"), [("ABCD", 3), ("ABCDE", 15)])
def test_all_topologies_against_the_sum_over_all_states(taxa, count, substitution, compiled):
    trees = all_trees(taxa)
    topologies = Topologies.from_trees(trees, taxa)
    assert len(topologies.distinct()[0]) == len(topologies) == count
    alignment = random_alignment(len(taxa), 5)
    alignment = Alignment(tuple(taxa), alignment.patterns, alignment.weights, alignment.site_patterns)
    lengths = lengths_for(topologies)
    values = ForestLikelihood(alignment, substitution, compile=compiled).log_likelihood(topologies, lengths)
    for place in range(count):
        tree = topologies.tree(place, lengths[place])
        rows = [taxa.index(taxon) for taxon in tree.taxa]
        expected = sum(
            weight * math.log(enumerated(masks, tree, tree.branch_lengths, substitution))
            for masks, weight in zip(alignment.patterns[rows].T.tolist(), alignment.weights.tolist(), strict=True)
        )
        assert values[place].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.calibration
@pytest.mark.parametrize(("num_taxa", "sample"), [(3, (2,)), (4, ()), (7, (9,)), (12, (1,)), (24, (2, 11)), (70, (3,))])
def test_values_and_gradients_equal_those_of_one_topology_at_a_time(num_taxa, sample, substitution, compiled):
    topologies = random_topologies(num_taxa, 3)
    alignment, lengths = random_alignment(num_taxa, 40), lengths_for(topologies, *sample)
    expected, expected_slopes = one_at_a_time(alignment, topologies, lengths, substitution)
    forest = ForestLikelihood(alignment, substitution, compile=compiled)
    values, slopes = evaluate(forest, topologies, lengths)
    assert values.shape == (*sample, 3)
    assert ((values - expected) / expected).abs().max() < 1e-12
    assert relative_error(slopes, expected_slopes) < 1e-10
    with torch.no_grad():
        torch.testing.assert_close(forest.log_likelihood(topologies, lengths), values, rtol=1e-14, atol=0)


def test_primates(compiled):
    alignment, tree = primates()
    topologies = Topologies.from_trees([tree])
    lengths = torch.full((1, tree.num_edges), 0.1, dtype=torch.float64)
    values, slopes = evaluate(ForestLikelihood(alignment, compile=compiled), topologies, lengths)
    assert values.item() == pytest.approx(-6745.634651656332, rel=1e-12)
    assert slopes.norm().item() == pytest.approx(1921.9736455781178, rel=1e-12)


@pytest.mark.calibration
def test_gradcheck(substitution, compiled):
    topologies = random_topologies(6, 3)
    forest = ForestLikelihood(random_alignment(6, 8), substitution, compile=compiled)
    # Three vectors at least are computed side by side.
    lengths = lengths_for(topologies, *([3] if compiled else [])).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: forest.log_likelihood(topologies, x), (lengths,), atol=1e-6)


def test_gradients_by_parameters(compiled):
    topologies, alignment = random_topologies(6, 2), random_alignment(6, 20)
    forest = ForestLikelihood(alignment, HKY85(), compile=compiled)
    lengths = lengths_for(topologies, 3)
    kappa = torch.tensor([[1.5], [2.0], [4.0]], dtype=torch.float64, requires_grad=True)
    frequencies = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)

    def value(kappa, frequencies):
        return forest.log_likelihood(topologies, lengths, kappa=kappa, base_frequencies=frequencies)

    assert torch.autograd.gradcheck(value, (kappa, frequencies), atol=1e-6)
    fixed = ForestLikelihood(alignment, HKY85(kappa=2.0, base_frequencies=frequencies.detach()), compile=compiled)
    expected = fixed.log_likelihood(topologies, lengths[1])
    torch.testing.assert_close(value(kappa, frequencies)[1], expected, rtol=1e-13, atol=0)
    with pytest.raises(SettingsError, match="kappa"):
        forest.log_likelihood(topologies, lengths)


def test_both_ways_agree_on_real_data():
    alignment, tree = primates()
    generator = torch.Generator().manual_seed(3)
    trees = [tree]
    for _ in range(7):
        shuffled = [tree.taxa[place] for place in torch.randperm(12, generator=generator).tolist()]
        trees.append(Tree(tuple(shuffled), tree.children))
    topologies = Topologies.from_trees(trees, alignment.taxa)
    lengths = lengths_for(topologies, 5)
    expected, expected_slopes = one_at_a_time(alignment, topologies, lengths)
    for compile in (True, False) if shutil.which("g++") else (False,):
        values, slopes = evaluate(ForestLikelihood(alignment, compile=compile), topologies, lengths)
        assert ((values - expected) / expected).abs().max() < 1e-12
        assert relative_error(slopes, expected_slopes) < 1e-10


def test_repeated_topologies_and_any_order_of_taxa(compiled):
    topologies, alignment = random_topologies(9, 4), random_alignment(9, 30)
    mixed = topologies[[2, 0, 2, 1, 0]]
    lengths = lengths_for(mixed, 2)
    expected = one_at_a_time(alignment, mixed, lengths)
    forest = ForestLikelihood(alignment, compile=compiled)
    reordered, order = mixed.with_taxa([f"t{number}" for number in (4, 8, 0, 3, 1, 7, 2, 6, 5)])
    moved = torch.take_along_dim(lengths, torch.as_tensor(order)[None], -1)
    back = torch.argsort(torch.as_tensor(order), -1)[None]
    for _ in range(2):
        values, slopes = evaluate(forest, mixed, lengths)
        assert ((values - expected[0]) / expected[0]).abs().max() < 1e-12
        assert relative_error(slopes, expected[1]) < 1e-10
        values, slopes = evaluate(forest, reordered, moved)
        assert ((values - expected[0]) / expected[0]).abs().max() < 1e-12
        assert relative_error(torch.take_along_dim(slopes, back, -1), expected[1]) < 1e-10


def test_tables_that_are_too_small_are_used_again(compiled):
    topologies, alignment = random_topologies(12, 30), random_alignment(12, 25)
    lengths = lengths_for(topologies)
    forest = ForestLikelihood(alignment, compile=compiled, cache_bytes=0)
    expected = evaluate(ForestLikelihood(alignment, compile=compiled), topologies, lengths)
    for order in (list(range(30)), list(range(29, -1, -1))):
        values, slopes = evaluate(forest, topologies[order], lengths[order])
        assert forest._patterns[0].num_topologies == 1
        torch.testing.assert_close(values, expected[0][order], rtol=1e-13, atol=0)
        assert relative_error(slopes, expected[1][order]) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(forest.log_likelihood(topologies, lengths), expected[0], rtol=1e-13, atol=0)


def test_chunks_of_vectors_do_not_matter(monkeypatch):
    topologies, alignment = random_topologies(8, 5), random_alignment(8, 25)
    forest, lengths = ForestLikelihood(alignment, compile=False), lengths_for(topologies, 7)
    expected = evaluate(forest, topologies, lengths)
    monkeypatch.setattr("bayeskit.models.phylogenetics._pruning._evaluation._TABLE_SIZE", 2000)
    for found, reference in zip(evaluate(forest, topologies, lengths), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-13, atol=1e-11)


def test_vmap_and_grad_in_every_order(substitution, compiled):
    topologies = random_topologies(7, 3)
    forest = ForestLikelihood(random_alignment(7, 20), substitution, compile=compiled)
    lengths = lengths_for(topologies, 2, 4)
    values, slopes = evaluate(forest, topologies, lengths)

    def f(x):
        return forest.log_likelihood(topologies, x)

    def total(x):
        return f(x).sum()

    cases = [
        (vmap(vmap(f))(lengths), values),
        (vmap(f, in_dims=1, out_dims=1)(lengths), values),
        (vmap(vmap(grad(total)))(lengths), slopes),
        (vmap(grad(lambda x: vmap(f)(x).sum()))(lengths), slopes),
        (grad(lambda x: vmap(vmap(f))(x).sum())(lengths), slopes),
    ]
    for found, reference in cases:
        torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.calibration
def test_tracing_follows_the_tensors(compiled):
    topologies = random_topologies(7, 3)
    forest = ForestLikelihood(random_alignment(7, 20), compile=compiled)
    lengths = lengths_for(topologies, 2)
    traced = make_fx(grad(lambda x: forest.log_likelihood(topologies, x).sum()))(lengths)
    other = lengths.flip(0)
    torch.testing.assert_close(traced(other), evaluate(forest, topologies, other)[1], rtol=1e-11, atol=1e-11)


def test_empty_samples_and_no_topology(compiled):
    topologies = random_topologies(5, 3)
    forest = ForestLikelihood(random_alignment(5, 10), compile=compiled)
    for some, sample in ((topologies, (0,)), (topologies[[]], (2,))):
        values, slopes = evaluate(forest, some, lengths_for(some, *sample))
        assert values.shape == (*sample, len(some)) and slopes.shape == (*sample, len(some), 7)


@cache
def a_thousand_taxa() -> tuple[Topologies, Alignment]:
    trees = [caterpillar(1000), random_tree(1000, torch.Generator().manual_seed(0))]
    topologies = Topologies.from_trees(trees, [f"t{number}" for number in range(1000)])
    return topologies, random_alignment(1000, 8, symbols="ACGT")


@pytest.mark.calibration
@pytest.mark.parametrize("model", [JC69(), gtr()], ids=["uniform", "gtr"])
def test_a_thousand_taxa_in_single_precision(model, compiled):
    topologies, alignment = a_thousand_taxa()
    lengths = lengths_for(topologies)
    values, slopes = evaluate(ForestLikelihood(alignment, model, compile=compiled), topologies, lengths)
    # Every site has a probability near 4^-1000, far below the smallest number of either precision.
    assert (values < -8 * 1000).all()
    single = ForestLikelihood(alignment, model, dtype=torch.float32, compile=compiled)
    rounded, rounded_slopes = evaluate(single, topologies, lengths.float())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), values, rtol=1e-5, atol=0)
    assert torch.isfinite(rounded_slopes).all()
    assert relative_error(rounded_slopes.double(), slopes) < 1e-3


@pytest.mark.parametrize("count", [1, 3])
def test_very_short_and_very_long_branches(count, substitution, compiled):
    topologies, alignment = random_topologies(8, 2), random_alignment(8, 10)
    forest = ForestLikelihood(alignment, substitution, compile=compiled)
    for scale in (1e-12, 1e-6, 30.0):
        lengths = scale * (0.5 + lengths_for(topologies, count))
        values, slopes = evaluate(forest, topologies, lengths)
        expected, expected_slopes = one_at_a_time(alignment, topologies, lengths, substitution)
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)
        # Along very long branches nothing is left of the gradient but rounding.
        atol = 1e-10 if scale < 1 else 1e-12
        torch.testing.assert_close(slopes * lengths, expected_slopes * lengths, rtol=1e-10, atol=atol)


@pytest.mark.parametrize("count", [1, 3])
def test_impossible_missing_and_broken_input(count, compiled):
    topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);"), Tree.from_newick("((A,C),B,D);")])
    lengths = torch.zeros(count, 2, 5, dtype=torch.float64)
    impossible = Alignment.from_sequences({"A": "AC", "B": "CC", "C": "AC", "D": "AC"})
    values, slopes = evaluate(ForestLikelihood(impossible, compile=compiled), topologies, lengths)
    assert (values == -torch.inf).all() and not slopes.isnan().any()
    gaps = ForestLikelihood(Alignment.from_sequences({name: "-N?" for name in "ABCD"}), compile=compiled)
    assert gaps.log_likelihood(topologies, lengths + 0.1).abs().max() < 1e-14
    lengths[0, 1, 2] = torch.nan
    values = ForestLikelihood(impossible, compile=compiled).log_likelihood(topologies, lengths + 0.1)
    assert values.isnan().sum() == 1 and values[0, 1].isnan()


def test_bad_input_is_refused():
    alignment, topologies = random_alignment(5, 10), random_topologies(5, 2)
    forest = ForestLikelihood(alignment)
    with pytest.raises(ShapeError, match=r"\(\*sample, 2, 7\)"):
        forest.log_likelihood(topologies, torch.ones(7))
    with pytest.raises(ShapeError, match=r"\(\*sample, 2, 7\)"):
        forest.log_likelihood(topologies, torch.ones(3, 7))
    with pytest.raises(TreeError, match="the alignment and the topologies differ"):
        forest.log_likelihood(random_topologies(6, 2), torch.ones(2, 9))
    with pytest.raises(TreeError, match="unrooted"):
        forest.log_likelihood(topologies.rooted_at("t3"), torch.ones(2, 8))
    with pytest.raises(SettingsError, match="float16"):
        ForestLikelihood(alignment, dtype=torch.float16)
    with pytest.raises(SettingsError, match="kappa"):
        forest.log_likelihood(topologies, torch.ones(2, 7), kappa=torch.tensor(2.0))


def test_second_derivatives_are_refused(compiled):
    topologies = random_topologies(5, 2)
    forest = ForestLikelihood(random_alignment(5, 10), compile=compiled)
    lengths = lengths_for(topologies).requires_grad_()
    (slope,) = torch.autograd.grad(forest.log_likelihood(topologies, lengths).sum(), lengths, create_graph=True)
    with pytest.raises(NotImplementedError, match="Remedy"):
        slope.sum().backward()


def test_a_copy_is_small_and_gives_the_same(compiled):
    topologies = random_topologies(12, 6)
    forest, lengths = ForestLikelihood(random_alignment(12, 50), compile=compiled), lengths_for(topologies, 4)
    values = forest.log_likelihood(topologies, lengths)
    text = pickle.dumps(forest)
    assert len(text) < 20_000
    assert torch.equal(pickle.loads(text).log_likelihood(topologies, lengths), values)


def test_gradients_repeat_bit_for_bit(compiled):
    topologies = random_topologies(12, 6)
    forest, lengths = ForestLikelihood(random_alignment(12, 50), compile=compiled), lengths_for(topologies, 10)
    first = evaluate(forest, topologies, lengths)
    for again in (evaluate(forest, topologies, lengths) for _ in range(2)):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def wrong_renamings(monkeypatch):
    original = SubPatterns._store
    monkeypatch.setattr(
        SubPatterns,
        "_store",
        lambda self, slot, rows: original(self, slot, rows._replace(codes=rows.codes // CODE_BASE * CODE_BASE)),
    )


def wrong_weights(monkeypatch):
    original = SubPatterns._store

    def store(self, slot, rows):
        original(self, slot, rows)
        self.weights[slot] = 1.0

    monkeypatch.setattr(SubPatterns, "_store", store)


@pytest.mark.parametrize("mutate", [wrong_renamings, wrong_weights])
def test_the_value_check_catches_mutations(mutate, monkeypatch, compiled):
    topologies, alignment = random_topologies(9, 3), random_alignment(9, 40, symbols="ACGTAA")
    lengths = lengths_for(topologies)
    expected, _ = one_at_a_time(alignment, topologies, lengths)
    mutate(monkeypatch)
    values, _ = evaluate(ForestLikelihood(alignment, compile=compiled), topologies, lengths)
    assert ((values - expected) / expected).abs().max() > 1e-4


def wrong_sign(monkeypatch):
    original = forest_passes._terms
    monkeypatch.setattr(forest_passes, "_terms", lambda *args: -original(*args))


def wrong_transpose(monkeypatch):
    monkeypatch.setattr(forest_passes, "_pull_back", forest_passes._send)


@pytest.mark.parametrize("mutate", [wrong_sign, wrong_transpose])
def test_the_gradient_check_catches_mutations(mutate, monkeypatch):
    topologies, alignment = random_topologies(9, 3), random_alignment(9, 40)
    lengths = lengths_for(topologies)
    _, expected = one_at_a_time(alignment, topologies, lengths, gtr())
    mutate(monkeypatch)
    _, slopes = evaluate(ForestLikelihood(alignment, gtr(), compile=False), topologies, lengths)
    assert relative_error(slopes, expected) > 1e-3
