"""The tree likelihood: closed forms, enumeration, plain implementations, invariances, scaling, mutations."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from bayeskit.models.phylogenetics import JC69, Alignment, Tree, TreeModel, primates
from bayeskit.models.phylogenetics import _tree_model as tree_model
from bayeskit.models.phylogenetics._pruning import _passes as passes

pytestmark = pytest.mark.usefixtures("back_end")

GENERATOR = torch.full((4, 4), 1.0 / 3.0, dtype=torch.float64) - torch.eye(4, dtype=torch.float64) * 4 / 3
AMBIGUOUS = "ACGTACGTRYKMSWBDHVN-?"


def states_of(alignment: Alignment, tree: Tree) -> torch.Tensor:
    """Sets of bases as 0 and 1, shape (taxa in tree order, sites, 4)."""
    rows = [alignment.taxa.index(taxon) for taxon in tree.taxa]
    masks = alignment.patterns[rows][:, alignment.site_patterns].long()
    return ((masks[..., None] >> torch.arange(4)) & 1).double()


def plain_log_likelihood(alignment: Alignment, tree: Tree, lengths: torch.Tensor) -> torch.Tensor:
    """Pruning over all sites with matrix exponentials: no repeats, no patterns; lengths (edges,)."""
    matrices = torch.matrix_exp(GENERATOR * lengths[:, None, None])
    partial = list(states_of(alignment, tree))
    log_scale = torch.zeros(alignment.num_sites, dtype=torch.float64)
    for below in tree.children:
        product = torch.ones(alignment.num_sites, 4, dtype=torch.float64)
        for child in below:
            product = product * (partial[child] @ matrices[child].T)
        total = product.sum(-1)
        log_scale = log_scale + total.log()
        partial.append(product / total[:, None])
    return (log_scale + (0.25 * partial[-1].sum(-1)).log()).sum()


def enumerated_likelihood(masks: list[int], tree: Tree, lengths: torch.Tensor) -> float:
    """Likelihood of one site as a sum over all states of all nodes; masks are in tree order."""
    matrices = torch.matrix_exp(GENERATOR * lengths[:, None, None])
    num_nodes = tree.num_edges + 1
    choices = [[state for state in range(4) if mask >> state & 1] for mask in masks]
    choices += [list(range(4))] * (num_nodes - len(masks))
    parents = tree.parents
    total = 0.0
    for states in itertools.product(*choices):
        probability = 0.25
        for edge, parent in enumerate(parents):
            probability *= matrices[edge, states[parent], states[edge]].item()
        total += probability
    return total


def random_tree(num_taxa: int, generator: torch.Generator) -> Tree:
    """A topology made by joining random pairs."""
    parts = [f"t{number}" for number in range(num_taxa)]
    while len(parts) > 3:
        first, second = torch.randperm(len(parts), generator=generator)[:2].tolist()
        joined = f"({parts[first]},{parts[second]})"
        parts = [part for number, part in enumerate(parts) if number not in (first, second)] + [joined]
    return Tree.from_newick(f"({','.join(parts)});")


def random_alignment(num_taxa: int, num_sites: int, generator: torch.Generator, symbols: str = "ACGT") -> Alignment:
    """Sequences of independent random symbols."""
    picks = torch.randint(len(symbols), (num_taxa, num_sites), generator=generator).tolist()
    rows = {f"t{i}": "".join(symbols[j] for j in row) for i, row in enumerate(picks)}
    return Alignment.from_sequences(rows, data_type="DNA")


@dataclass(frozen=True)
class JC69ByMatrices(JC69):
    """Jukes-Cantor without its shortcut: takes the way of a general model."""

    @property
    def is_uniform(self) -> bool:
        return False


@pytest.fixture(params=[JC69(), JC69ByMatrices()], ids=["uniform", "matrices"])
def substitution(request):
    return request.param


def lengths_like(tree: Tree, seed: int, *batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.01 + 0.4 * torch.rand(*batch, tree.num_edges, generator=generator, dtype=torch.float64)


def gradient(model: TreeModel, lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.detach().clone().requires_grad_()
    return torch.autograd.grad(model.log_likelihood(lengths).sum(), lengths)[0]


def plain_gradient(alignment: Alignment, tree: Tree, lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.detach().clone().requires_grad_()
    return torch.autograd.grad(plain_log_likelihood(alignment, tree, lengths), lengths)[0]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


def test_pattern_probabilities_of_four_taxa(substitution):
    tree = Tree.from_newick("((A,B),C,D);")
    columns = ["".join(column) for column in itertools.product("ACGT", repeat=4)]
    rows = zip("ABCD", zip(*columns, strict=True), strict=True)
    alignment = Alignment.from_sequences({taxon: "".join(row) for taxon, row in rows})
    model = TreeModel(alignment, tree, substitution)
    log_probabilities = model.pattern_log_likelihoods(torch.full((5,), 0.1, dtype=torch.float64))
    by_column = dict(zip(columns, log_probabilities[alignment.site_patterns].exp().tolist(), strict=True))
    assert sum(by_column.values()) == pytest.approx(1.0, abs=1e-13)
    assert by_column["AACC"] == pytest.approx(0.005653389, abs=5e-10)
    assert by_column["ACAC"] == pytest.approx(0.000377220, abs=5e-10)
    assert by_column["ACCA"] == pytest.approx(0.000377220, abs=5e-10)
    assert by_column["AAAA"] == pytest.approx(0.152967739, abs=5e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    "newick",
    ["(A,B,C);", "((A,B),C,D);", "(A,(B,C),D);", "((A,B),(C,D),E);", "(A,((B,C),D),E);", "((A,(B,C)),D,E);"],
)
def test_likelihood_equals_the_sum_over_all_states(newick, substitution):
    tree = Tree.from_newick(newick)
    generator = torch.Generator().manual_seed(3)
    alignment = random_alignment(tree.num_taxa, 12, generator, AMBIGUOUS)
    alignment = Alignment(tree.taxa, alignment.patterns, alignment.weights, alignment.site_patterns)
    lengths = lengths_like(tree, 5)
    model = TreeModel(alignment, tree, substitution)
    expected = torch.tensor(
        [enumerated_likelihood(column.tolist(), tree, lengths) for column in alignment.patterns.T],
        dtype=torch.float64,
    ).log()
    torch.testing.assert_close(model.pattern_log_likelihoods(lengths), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model.log_likelihood(lengths), (alignment.weights * expected).sum(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("num_taxa", [3, 4, 6, 11, 24])
def test_value_and_gradient_equal_a_plain_implementation(num_taxa, substitution):
    generator = torch.Generator().manual_seed(num_taxa)
    tree = random_tree(num_taxa, generator)
    alignment = random_alignment(num_taxa, 40, generator, AMBIGUOUS)
    model = TreeModel(alignment, tree, substitution)
    lengths = lengths_like(tree, num_taxa)
    expected = plain_log_likelihood(alignment, tree, lengths)
    torch.testing.assert_close(model.log_likelihood(lengths), expected, rtol=1e-12, atol=0)
    total = (model.pattern_log_likelihoods(lengths) * alignment.weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    assert relative_error(gradient(model, lengths), plain_gradient(alignment, tree, lengths)) < 1e-10


def test_gradcheck(substitution):
    generator = torch.Generator().manual_seed(0)
    tree = random_tree(6, generator)
    model = TreeModel(random_alignment(6, 8, generator, AMBIGUOUS), tree, substitution)
    lengths = lengths_like(tree, 1, 2).requires_grad_()
    assert torch.autograd.gradcheck(model.log_likelihood, (lengths,), atol=1e-6)


def test_gradient_by_frequencies_of_a_general_model():
    tree = Tree.from_newick("((A,B),C,D);")
    alignment = Alignment.from_sequences({"A": "ACGTRA", "B": "ACCTAA", "C": "AGG-TA", "D": "CCGTTA"})

    @dataclass(frozen=True)
    class TiltedRoot(JC69ByMatrices):
        values: torch.Tensor

        def frequencies(self, like):
            return self.values

    def value(frequencies):
        return TreeModel(alignment, tree, TiltedRoot(frequencies)).log_likelihood(lengths_like(tree, 2))

    frequencies = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (frequencies,), atol=1e-6)


def test_primates_against_plain_implementation_and_fixed_numbers(substitution):
    alignment, tree = primates()
    model = TreeModel(alignment, tree, substitution)
    lengths = torch.full((tree.num_edges,), 0.1, dtype=torch.float64)
    value = model.log_likelihood(lengths)
    torch.testing.assert_close(value, plain_log_likelihood(alignment, tree, lengths), rtol=1e-12, atol=0)
    assert value.item() == pytest.approx(-6745.634651656332, rel=1e-12)
    slope = gradient(model, lengths)
    assert slope.norm().item() == pytest.approx(1921.9736455781178, rel=1e-12)
    assert relative_error(slope, plain_gradient(alignment, tree, lengths)) < 1e-10


def test_primates_posterior_mode_has_the_published_height():
    # Log posterior -6390.0879 and log-likelihood near -6424.29, found by independent programs.
    alignment, tree = primates()
    model = TreeModel(alignment, tree)
    logs = torch.full((tree.num_edges,), 0.1, dtype=torch.float64).log().requires_grad_()
    optimizer = torch.optim.LBFGS([logs], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def log_posterior():
        lengths = logs.exp()
        prior = torch.distributions.Exponential(torch.tensor(10.0, dtype=torch.float64))
        return model.log_likelihood(lengths) + prior.log_prob(lengths).sum()

    def closure():
        optimizer.zero_grad()
        loss = -log_posterior()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert log_posterior().item() == pytest.approx(-6390.0879, abs=2e-3)
    assert model.log_likelihood(logs.exp()).item() == pytest.approx(-6424.29, abs=0.1)


def test_batches_of_any_shape(substitution):
    generator = torch.Generator().manual_seed(8)
    tree = random_tree(7, generator)
    model = TreeModel(random_alignment(7, 20, generator), tree, substitution)
    lengths = lengths_like(tree, 9, 2, 3)
    values = model.log_likelihood(lengths)
    assert values.shape == (2, 3)
    patterns = model.pattern_log_likelihoods(lengths)
    assert patterns.shape == (2, 3, model.alignment.num_patterns)
    slopes = gradient(model, lengths)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(values[i, j], model.log_likelihood(lengths[i, j]), rtol=1e-13, atol=0)
        torch.testing.assert_close(patterns[i, j], model.pattern_log_likelihoods(lengths[i, j]))
        assert relative_error(slopes[i, j], gradient(model, lengths[i, j])) < 1e-13
    assert model.log_likelihood(lengths[:0]).shape == (0, 3)


def test_order_of_sites_and_taxa_does_not_matter():
    generator = torch.Generator().manual_seed(4)
    tree = random_tree(9, generator)
    alignment = random_alignment(9, 60, generator, AMBIGUOUS)
    masks = alignment.patterns[:, alignment.site_patterns]
    letters = {1: "A", 2: "C", 4: "G", 8: "T", 5: "R", 10: "Y", 12: "K", 3: "M", 6: "S", 9: "W"}
    letters |= {14: "B", 13: "D", 11: "H", 7: "V", 15: "-"}
    order = torch.randperm(60, generator=generator)
    shuffled = Alignment.from_sequences(
        {
            alignment.taxa[i]: "".join(letters[mask] for mask in masks[i, order].tolist())
            for i in torch.randperm(9, generator=generator).tolist()
        },
        data_type="DNA",
    )
    lengths = lengths_like(tree, 6)
    first, second = TreeModel(alignment, tree), TreeModel(shuffled, tree)
    torch.testing.assert_close(first.log_likelihood(lengths), second.log_likelihood(lengths), rtol=1e-13, atol=0)
    assert relative_error(gradient(first, lengths), gradient(second, lengths)) < 1e-12


def test_position_of_the_root_does_not_matter():
    generator = torch.Generator().manual_seed(5)
    alignment = Alignment.from_sequences(
        {name: "".join("ACGT"[i] for i in torch.randint(4, (30,), generator=generator).tolist()) for name in "ABCDE"}
    )
    texts = [
        "((A:0.1,B:0.2):0.3,C:0.4,(D:0.5,E:0.6):0.7);",
        "(A:0.1,B:0.2,(C:0.4,(D:0.5,E:0.6):0.7):0.3);",
        "((C:0.4,(B:0.2,A:0.1):0.3):0.7,E:0.6,D:0.5);",
    ]
    values = []
    for text in texts:
        tree = Tree.from_newick(text)
        values.append(TreeModel(alignment, tree).log_likelihood(tree.branch_lengths))
    torch.testing.assert_close(torch.stack(values), values[0].expand(3), rtol=1e-13, atol=0)


@pytest.mark.calibration
@pytest.mark.parametrize("shape", ["caterpillar", "random"])
def test_a_thousand_taxa_in_single_precision(shape):
    num_taxa = 1000
    generator = torch.Generator().manual_seed(12)
    if shape == "caterpillar":
        text = "t0"
        for number in range(1, num_taxa - 2):
            text = f"({text},t{number})"
        tree = Tree.from_newick(f"({text},t{num_taxa - 2},t{num_taxa - 1});")
    else:
        tree = random_tree(num_taxa, generator)
    alignment = random_alignment(num_taxa, 12, generator)
    lengths = lengths_like(tree, 3)
    double, single = TreeModel(alignment, tree), TreeModel(alignment, tree, dtype=torch.float32)
    value = double.log_likelihood(lengths)
    # Every site has probability near 4^-1000, far below the smallest number of either precision.
    assert value.item() < -12 * 1000
    torch.testing.assert_close(value, plain_log_likelihood(alignment, tree, lengths), rtol=1e-12, atol=0)
    rounded = single.log_likelihood(lengths.float())
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(value.item(), rel=1e-5)
    slope = gradient(single, lengths.float()).double()
    assert torch.isfinite(slope).all()
    assert relative_error(slope, gradient(double, lengths)) < 1e-3


def test_very_short_and_very_long_branches(substitution):
    generator = torch.Generator().manual_seed(6)
    tree = random_tree(8, generator)
    alignment = random_alignment(8, 10, generator)
    for scale in (1e-12, 1e-6, 30.0, 1e3):
        lengths = scale * (0.5 + lengths_like(tree, 7))
        model = TreeModel(alignment, tree, substitution)
        value, slope = model.log_likelihood(lengths), gradient(model, lengths)
        assert torch.isfinite(value) and torch.isfinite(slope).all()
        if scale < 1:
            expected = plain_log_likelihood(alignment, tree, lengths)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=0)
            expected = plain_gradient(alignment, tree, lengths)
            assert relative_error(slope * lengths, expected * lengths) < 1e-4
        else:
            # The ends of such branches are independent, so that all states are equally likely.
            assert value.item() == pytest.approx(-80 * math.log(4.0), rel=1e-6)


def test_impossible_data_have_log_likelihood_minus_infinity(substitution):
    tree = Tree.from_newick("((A,B),C,D);")
    alignment = Alignment.from_sequences({"A": "AC", "B": "CC", "C": "AC", "D": "AC"})
    lengths = torch.zeros(5, dtype=torch.float64)
    model = TreeModel(alignment, tree, substitution)
    assert model.log_likelihood(lengths).item() == -torch.inf
    assert not gradient(model, lengths).isnan().any()


def test_gaps_only_give_probability_one(substitution):
    tree = Tree.from_newick("((A,B),C,D);")
    alignment = Alignment.from_sequences({name: "-N?" for name in "ABCD"})
    value = TreeModel(alignment, tree, substitution).log_likelihood(lengths_like(tree, 1))
    assert value.item() == pytest.approx(0.0, abs=1e-14)


def test_renaming_bases_saves_work_and_changes_nothing():
    alignment, tree = primates()
    fast, plain = TreeModel(alignment, tree), TreeModel(alignment, tree, JC69ByMatrices())
    rows = [int(made._plans[0].patterns.counts[made._plans[0].slots].sum()) for made in (fast, plain)]
    assert rows[0] < 0.6 * rows[1]
    lengths = lengths_like(tree, 11, 3)
    torch.testing.assert_close(fast.log_likelihood(lengths), plain.log_likelihood(lengths), rtol=1e-13, atol=0)
    assert relative_error(gradient(fast, lengths), gradient(plain, lengths)) < 1e-12


def test_second_derivatives_are_refused():
    alignment, tree = primates()
    model = TreeModel(alignment, tree)
    lengths = lengths_like(tree, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model.log_likelihood(lengths), lengths, create_graph=True)
    with pytest.raises(NotImplementedError, match="Remedy"):
        slope.sum().backward()


def wrong_sign(monkeypatch):
    original = passes._terms
    monkeypatch.setattr(passes, "_terms", lambda *args: -original(*args))


def wrong_transpose(monkeypatch):
    monkeypatch.setattr(passes, "_pull_back", lambda inputs, edges, adjoints: adjoints)


def wrong_factor(monkeypatch):
    original = passes._terms
    monkeypatch.setattr(passes, "_terms", lambda *args: 0.75 * original(*args))


@pytest.mark.parametrize("mutate", [wrong_sign, wrong_transpose, wrong_factor])
def test_the_gradient_check_catches_mutations(mutate, monkeypatch):
    monkeypatch.setattr(tree_model, "can_run", lambda *_: False)
    alignment, tree = primates()
    lengths = lengths_like(tree, 2)
    expected = plain_gradient(alignment, tree, lengths)
    assert relative_error(gradient(TreeModel(alignment, tree), lengths), expected) < 1e-10
    mutate(monkeypatch)
    assert relative_error(gradient(TreeModel(alignment, tree), lengths), expected) > 1e-3


def test_the_value_check_catches_a_dropped_scaler():
    alignment, tree = primates()
    lengths = lengths_like(tree, 2)
    model = TreeModel(alignment, tree)
    model._plans[0].patterns.weights[tree.num_taxa + 1 :] = 0.0
    assert relative_error(model.log_likelihood(lengths), plain_log_likelihood(alignment, tree, lengths)) > 1e-3


def test_a_general_model_with_a_wrong_transpose_is_caught(monkeypatch):
    monkeypatch.setattr(tree_model, "can_run", lambda *_: False)
    # Jukes-Cantor's matrices are symmetric and would hide it, so the matrices are tilted.
    tree = Tree.from_newick("((A,B),C,D);")
    alignment = Alignment.from_sequences({"A": "ACGTRA", "B": "ACCTAA", "C": "AGG-TA", "D": "CCGTTA"})

    @dataclass(frozen=True)
    class Tilted(JC69ByMatrices):
        def transition_matrices(self, branch_lengths):
            tilt = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
            matrices = super().transition_matrices(branch_lengths) * tilt
            return matrices / matrices.sum(-1, keepdim=True)

    model = TreeModel(alignment, tree, Tilted())
    lengths = lengths_like(tree, 3).requires_grad_()
    assert torch.autograd.gradcheck(model.log_likelihood, (lengths,), atol=1e-6)
    monkeypatch.setattr(passes, "_pull_back", passes._send)
    assert not torch.autograd.gradcheck(model.log_likelihood, (lengths,), atol=1e-6, raise_exception=False)
