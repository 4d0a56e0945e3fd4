"""Likelihoods where numbers are all but zero, very large, or none."""

import math

import pytest
import torch
from torch.distributions import Normal

from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    TN93,
    Alignment,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Tree,
    TreeModel,
    primates,
)
from bayeskit.models.phylogenetics._site_rates import category_means, category_medians

pytestmark = pytest.mark.usefixtures("back_end")

TREE = Tree.from_newick("((A,B),C,D);")
ALIGNMENT = Alignment.from_sequences({"A": "ACGTA-", "B": "ACGTC-", "C": "ACTTAG", "D": "ACTAAA"})
MODELS = {
    "JC69": (JC69(), None),
    "HKY85": (HKY85(2.0, [0.1, 0.2, 0.3, 0.4]), None),
    "TN93": (TN93(2.0, 5.0, [0.1, 0.2, 0.3, 0.4]), None),
    "GTR": (GTR([1, 2, 1, 1, 2, 1], [0.1, 0.2, 0.3, 0.4]), None),
    "JC69 + Gamma": (JC69(), GammaRates(0.5)),
    "HKY85 + Gamma": (HKY85(2.0, [0.1, 0.2, 0.3, 0.4]), GammaRates(0.5)),
    "GTR + invariant": (GTR([1, 2, 1, 1, 2, 1], [0.1, 0.2, 0.3, 0.4]), InvariantSites(0.2, GammaRates(0.5))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [-0.01, -1e-300, float("nan")])
def test_lengths_without_a_likelihood_give_no_number(name, length):
    substitution, site_rates = MODELS[name]
    model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=site_rates)
    lengths = torch.full((5, 5), 0.1, dtype=torch.float64)
    lengths.fill_diagonal_(length)
    good = torch.full((5,), 0.1, dtype=torch.float64)
    batch = torch.cat([lengths, good[None]])
    values = model.log_likelihood(batch)
    assert values[:5].isnan().all() and values[5].isfinite()
    assert model.pattern_log_likelihoods(batch)[:5].isnan().all()
    assert model.branch_derivatives(batch).value[:5].isnan().all()
    assert torch.vmap(model.log_likelihood)(batch)[:5].isnan().all()


@pytest.mark.calibration
@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.float32, 0.0068, 0.0083), (torch.float64, 0.00187, 0.00196)])
def test_partial_likelihoods_too_small_to_invert_are_scaled(dtype, low, high):
    alignment, tree = primates()
    shapes = torch.linspace(low, high, 16, dtype=torch.float64)
    lengths = torch.full((16, tree.num_edges), 0.05, dtype=torch.float64)
    substitution = HKY85(2.0, [0.3, 0.3, 0.2, 0.2])
    model = TreeModel(alignment, tree, substitution, site_rates=GammaRates(), dtype=dtype)
    ones = lengths.to(dtype).requires_grad_()
    value = model.log_likelihood(ones, shape=shapes.to(dtype))
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), ones)[0].isfinite().all()
    # Far below them all lies the category that hardly changes: it adds nothing to a variable site.
    exact = TreeModel(alignment, tree, substitution, site_rates=GammaRates())
    expected = exact.branch_derivatives(lengths, shape=shapes.to(dtype).double()).value
    torch.testing.assert_close(value.double(), expected, rtol=1e-11 if dtype == torch.float64 else 1e-5, atol=0)


def test_tiny_lengths_have_their_likelihood():
    """Two tips that differ at both ends of one path: the likelihood is the length times 1/3 of 1/4, to first order."""
    alignment = Alignment.from_sequences({"A": "A", "B": "C", "C": "A"})
    for dtype, tiny in ((torch.float64, 1e-310), (torch.float32, 1e-40)):
        lengths = torch.tensor([tiny, tiny, 0.0], dtype=dtype)
        found = TreeModel(alignment, Tree.from_newick("(A,B,C);"), JC69(), dtype=dtype).log_likelihood(lengths)
        exact = math.log(float(lengths[0])) - math.log(12.0)
        assert found.item() == pytest.approx(exact, rel=1e-4 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("num_categories", [1, 4, 16])
def test_rates_of_large_shapes_are_those_of_a_normal_distribution(num_categories):
    """With variance `1 / shape` going to zero, the mean of a category is that of the normal distribution."""
    bounds = torch.arange(1, num_categories, dtype=torch.float64) / num_categories
    density = Normal(0.0, 1.0).log_prob(torch.special.ndtri(bounds)).exp()
    none = torch.zeros(1, dtype=torch.float64)
    means = num_categories * torch.diff(-torch.cat([none, density, none]))
    for shape in (1e10, 1e12, 1e16, 1e20, 1e24, 1e30, 1e300):
        width = min(shape, 1e24) ** -0.5
        rates = category_means(torch.tensor(shape, dtype=torch.float64), num_categories)
        # The next term of the expansion is of the order of the variance.
        torch.testing.assert_close(rates, 1.0 + width * means, rtol=0, atol=10 / min(shape, 1e24) + 1e-13)
        medians = category_medians(torch.tensor(shape, dtype=torch.float64), num_categories)
        assert (medians - 1.0).abs().max() < 3 * width + 1e-12
    grid = torch.logspace(2.55, 2.65, 41, dtype=torch.float64)
    steps = category_means(grid, 4).diff(dim=0)
    assert (steps.diff(dim=0).abs() < 1e-5).all()  # no jump where one method hands over to the other


@pytest.mark.parametrize(
    "substitution",
    [GTR([1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4]), MODELS["TN93"][0], MODELS["HKY85"][0], JC69()],
)
def test_very_long_branches_reach_the_stationary_distribution(substitution):
    lengths = torch.tensor([1e3, 1e8, 1e15, 1e30], dtype=torch.float64)
    matrices = substitution.transition_matrices(lengths)
    expected = substitution.frequencies(lengths).expand(4, 4, 4)
    torch.testing.assert_close(matrices, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1e-8, 1e-10, 1e-12])
def test_single_precision_keeps_rare_changes_of_short_branches(length):
    frequencies = [0.1, 0.2, 0.3, 0.4]
    for model in (
        GTR([1, 1e-6, 1, 1, 1, 1], frequencies),
        HKY85(1e-6, frequencies),
        TN93(1e-6, 2.0, frequencies),
        TN93(2.0, 1e-6, frequencies),
    ):
        found = model.transition_matrices(torch.tensor([length]))
        rates = model.rate_matrix(torch.zeros((), dtype=torch.float64))
        assert found.dtype == torch.float32
        changes = ~torch.eye(4, dtype=torch.bool)
        expected = (rates * float(torch.tensor(length)))[changes].float()
        # To first order; the second is smaller by the length, but reaches a rare change by way of two common ones.
        torch.testing.assert_close(found[0][changes], expected, rtol=1e-3 if length < 1e-9 else 2e-2, atol=0)


def test_gradients_of_patterns_where_a_category_does_not_change():
    model = TreeModel(ALIGNMENT, TREE, JC69(), site_rates=GammaRates(0.001))
    lengths = torch.full((5,), 0.01, dtype=torch.float64, requires_grad=True)
    total = (model.pattern_log_likelihoods(lengths) * ALIGNMENT.weights).sum()
    found = torch.autograd.grad(total, lengths)[0]
    torch.testing.assert_close(found, model.branch_derivatives(lengths.detach()).first, rtol=1e-9, atol=0)


def test_logarithms_of_many_taxa_are_added_in_double_precision():
    num_taxa = 400
    text = "(t0,t1,t2)"
    for number in range(3, num_taxa):
        text = text.replace(f"t{number - 1})", f"(t{number - 1},t{number}))", 1)
    tree = Tree.from_newick(text + ";")
    bases = {f"t{number}": "ACGT"[number * 7 % 4] + "ACGT"[number // 3 % 4] for number in range(num_taxa)}
    alignment = Alignment.from_sequences(bases)
    lengths = torch.full((tree.num_edges,), 0.1)
    single = TreeModel(alignment, tree, JC69(), site_rates=GammaRates(0.5), dtype=torch.float32)
    double = TreeModel(alignment, tree, JC69(), site_rates=GammaRates(0.5))
    found, exact = single.log_likelihood(lengths), double.log_likelihood(lengths.double())
    assert found.dtype == torch.float32 and single.pattern_log_likelihoods(lengths).dtype == torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=3e-7)


def test_an_infinite_tree_has_density_zero():
    prior = GammaDirichlet(torch.ones(3, dtype=torch.float64), validate_args=False)
    lengths = torch.tensor([[1.0, 2.0, torch.inf], [1.0, 2.0, 3.0], [1.0, 2.0, torch.nan]], dtype=torch.float64)
    found = prior.log_prob(lengths)
    assert found[0] == -torch.inf and found[1].isfinite() and found[2].isnan()
