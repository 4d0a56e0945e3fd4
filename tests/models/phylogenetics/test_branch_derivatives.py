"""First and second derivatives by branch lengths against autograd's Hessian of a plain implementation."""

import itertools

import pytest
import torch

from bayeskit.errors import ShapeError
from bayeskit.models.phylogenetics import JC69, Alignment, Tree, TreeModel, primates
from bayeskit.models.phylogenetics import _branch_derivatives as branch_derivatives
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites
from bayeskit.models.phylogenetics._substitution import GTR, HKY85, K80

FREQUENCIES = [0.4, 0.3, 0.2, 0.1]
MODELS = {
    "JC69": (JC69(), None),
    "JC69, both": (JC69(), InvariantSites(0.3, GammaRates(0.5))),
    "K80, invariant": (K80(3.0), InvariantSites(0.3)),
    "HKY85, Gamma": (HKY85(2.5, FREQUENCIES), GammaRates(0.5)),
    "GTR, both": (GTR([0.3, 2.0, 1.1, 0.7, 3.0, 1.0], FREQUENCIES), InvariantSites(0.2, GammaRates(0.5, 3))),
}
TREE = Tree.from_newick("(((A,B),C),(D,E),F);")
ALIGNMENT = Alignment.from_sequences(
    {"A": "ACGTACCAGG", "B": "ACGTACCCGG", "C": "ATGRAC-AGG", "D": "CTGAACTAGC", "E": "GTGAGCTAGC", "F": "GTAA?CTAGN"}
)


def lengths_like(tree: Tree, *batch: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.02 + 0.4 * torch.rand(*batch, tree.num_edges, generator=generator, dtype=torch.float64)


def plain(model: TreeModel):
    """The log-likelihood by matrix exponentials and pruning over all patterns of each category, without scaling."""
    tree, alignment = model.tree, model.alignment
    rows = alignment.patterns[[alignment.taxa.index(taxon) for taxon in tree.taxa]].long()
    tips = ((rows[..., None] >> torch.arange(4)) & 1).double()
    like = torch.zeros((), dtype=torch.float64)
    generator, frequencies = model.substitution.rate_matrix(like), model.substitution.frequencies(like)
    categories = [(1.0, 1.0)]
    if model.site_rates is not None:
        found = model.site_rates.categories(like)
        categories = list(zip(found.rates.tolist(), found.weights.tolist(), strict=True))
        if found.invariant is not None:
            categories.append((0.0, found.invariant.item()))

    def log_likelihood(lengths):
        total = 0.0
        for rate, weight in categories:
            matrices = torch.matrix_exp(generator * rate * lengths[:, None, None])
            partial = list(tips)
            for below in tree.children:
                product = 1.0
                for child in below:
                    product = product * (partial[child] @ matrices[child].T)
                partial.append(product)
            total = total + weight * partial[-1] @ frequencies
        return (alignment.weights * total.log()).sum()

    return log_likelihood


def expected(model: TreeModel, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Value, gradient and diagonal of the full Hessian, by autograd."""
    function = plain(model)
    hessian = torch.autograd.functional.hessian(function, lengths)
    return function(lengths), torch.autograd.functional.jacobian(function, lengths), hessian.diagonal()


def error(found: torch.Tensor, reference: torch.Tensor) -> float:
    return ((found - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_equal_autograd(name):
    substitution, rates = MODELS[name]
    model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
    lengths = lengths_like(TREE)
    for found, reference in zip(model.branch_derivatives(lengths), expected(model, lengths), strict=True):
        assert found.shape == reference.shape
        assert error(found, reference) < 1e-11


def test_primates_with_rates():
    alignment, tree = primates()
    model = TreeModel(alignment, tree, HKY85(3.0, FREQUENCIES), site_rates=GammaRates(0.5, 2))
    lengths = lengths_like(tree)
    found = model.branch_derivatives(lengths)
    for one, reference in zip(found, expected(model, lengths), strict=True):
        assert error(one, reference) < 1e-10
    leaf = lengths.clone().requires_grad_()
    value = model.log_likelihood(leaf)
    assert error(found.value, value.detach()) < 1e-13
    assert error(found.first, torch.autograd.grad(value, leaf)[0]) < 1e-10


def test_batches_chunks_and_transforms(monkeypatch):
    model = TreeModel(ALIGNMENT, TREE, GTR(None, FREQUENCIES), site_rates=InvariantSites(0.3, GammaRates()))
    generator = torch.Generator().manual_seed(3)
    lengths = lengths_like(TREE, 2, 3)
    values = {
        "exchangeabilities": 0.2 + torch.rand(3, 6, generator=generator, dtype=torch.float64),
        "shape": 0.2 + torch.rand(2, 1, generator=generator, dtype=torch.float64),
    }
    found = model.branch_derivatives(lengths, **values)
    assert [part.shape for part in found] == [(2, 3), (2, 3, 9), (2, 3, 9)]
    for i, j in itertools.product(range(2), range(3)):
        single = {"exchangeabilities": values["exchangeabilities"][j], "shape": values["shape"][i, 0]}
        for part, reference in zip(found, model.branch_derivatives(lengths[i, j], **single), strict=True):
            assert error(part[i, j], reference) < 1e-11
    monkeypatch.setattr(branch_derivatives, "_CHUNK_NUMBERS", 1)
    for part, reference in zip(model.branch_derivatives(lengths, **values), found, strict=True):
        assert error(part, reference) < 1e-12
    first = values["exchangeabilities"][0]
    mapped = torch.func.vmap(
        lambda rows, shape: model.branch_derivatives(rows, exchangeabilities=first, shape=shape).second
    )(lengths[:, 0], values["shape"][:, 0])
    assert error(mapped, found.second[:, 0]) < 1e-11
    assert model.branch_derivatives(lengths[:0], exchangeabilities=first, shape=first[0]).second.shape == (0, 3, 9)


def test_many_taxa_in_single_precision():
    text = "t0"
    for number in range(1, 298):
        text = f"({text},t{number})"
    tree = Tree.from_newick(f"({text},t298,t299);")
    picks = torch.randint(4, (300, 8), generator=torch.Generator().manual_seed(1)).tolist()
    alignment = Alignment.from_sequences({f"t{i}": "".join("ACGT"[j] for j in row) for i, row in enumerate(picks)})
    lengths = lengths_like(tree)
    double, single = (
        TreeModel(alignment, tree, HKY85(2.0, FREQUENCIES), dtype=dtype).branch_derivatives(lengths)
        for dtype in (torch.float64, torch.float32)
    )
    assert double.value.item() < -3000
    for one, other in zip(single, double, strict=True):
        assert one.dtype == torch.float32
        assert error(one.double(), other) < 1e-3


def test_impossible_data_give_no_nan():
    for substitution, rates in MODELS.values():
        model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
        found = model.branch_derivatives(torch.zeros(9, dtype=torch.float64))
        assert found.value.item() == -torch.inf
        assert not found.first.isnan().any() and not found.second.isnan().any()


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"\(\*batch, 9\)"):
        TreeModel(ALIGNMENT, TREE).branch_derivatives(torch.ones(4))


def dropped_square(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "square", lambda tensor: 0.0 * tensor)


def untransposed(monkeypatch):
    # Only a matrix that is not symmetric shows it.
    original = branch_derivatives._derivatives_downward
    monkeypatch.setattr(
        branch_derivatives, "_derivatives_downward", lambda tree, matrices, *rest: original(tree, matrices.mT, *rest)
    )


@pytest.mark.parametrize("mutate", [dropped_square, untransposed])
def test_the_check_catches_mutations(mutate, monkeypatch):
    substitution, rates = MODELS["HKY85, Gamma"]
    model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
    lengths = lengths_like(TREE)
    reference = expected(model, lengths)[2]
    mutate(monkeypatch)
    assert error(model.branch_derivatives(lengths).second, reference) > 1e-3
