"""The Pyro model around the likelihood."""

import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    Alignment,
    GammaRates,
    Topologies,
    Tree,
    TreeModel,
    primates,
)

TREE = Tree.from_newick("((A,B),C,D);")
ALIGNMENT = Alignment.from_sequences({"D": "ACGT", "B": "ACGA", "C": "AC-A", "A": "ACCA"})


def test_sites_of_the_model():
    model = TreeModel(ALIGNMENT, TREE)
    with pyro.validation_enabled(True):
        trace = poutine.trace(model).get_trace()
    lengths = trace.nodes["branch_lengths"]["value"]
    assert lengths.shape == (5,) and lengths.dtype == torch.float64
    trace.compute_log_prob()
    prior = torch.distributions.Exponential(torch.tensor(10.0, dtype=torch.float64))
    torch.testing.assert_close(trace.nodes["branch_lengths"]["log_prob"], prior.log_prob(lengths).sum())
    torch.testing.assert_close(trace.nodes["alignment"]["log_prob"], model.log_likelihood(lengths))
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == [
        "branch_lengths",
        "alignment",
    ]


def test_another_prior_and_dtype():
    model = TreeModel(ALIGNMENT, TREE, JC69(), dist.Gamma(torch.tensor(2.0), torch.tensor(20.0)), dtype=torch.float32)
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    lengths = trace.nodes["branch_lengths"]["value"]
    expected = torch.distributions.Gamma(2.0, 20.0).log_prob(lengths).sum()
    torch.testing.assert_close(trace.nodes["branch_lengths"]["log_prob"], expected)
    assert model.log_likelihood(torch.full((5,), 0.1)).dtype == torch.float32


def test_gradient_reaches_inputs_of_another_dtype():
    lengths = torch.full((5,), 0.1, dtype=torch.float32, requires_grad=True)
    TreeModel(ALIGNMENT, TREE).log_likelihood(lengths).backward()
    assert lengths.grad.dtype == torch.float32


def test_pickling_keeps_the_numbers():
    model = TreeModel(*primates())
    lengths = torch.full((21,), 0.1, dtype=torch.float64)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy.log_likelihood(lengths), model.log_likelihood(lengths))


def test_different_taxa_are_named_on_both_sides():
    tree = Tree.from_newick("((A,B),E,D);")
    with pytest.raises(TreeError, match=r"only in the alignment: 'C'; only in the tree: 'E'.*Remedy"):
        TreeModel(ALIGNMENT, tree)
    with pytest.raises(TreeError, match=r"only in the alignment: 'D'\. Remedy"):
        TreeModel(ALIGNMENT, Tree.from_newick("(A,B,C);"))


WRONG = {
    "a name": (lambda: TreeModel(ALIGNMENT, TREE, "HKY85"), "substitution: str 'HKY85' has the wrong type.*HKY85"),
    "a class": (lambda: TreeModel(ALIGNMENT, TREE, GTR), "substitution: the class GTR has the wrong type.*GTR()"),
    "rates as a name": (lambda: TreeModel(ALIGNMENT, TREE, site_rates="gamma"), "site_rates: str.*GammaRates()"),
    "rates of another kind": (lambda: TreeModel(ALIGNMENT, TREE, site_rates=JC69()), "site_rates: JC69"),
    "rates as the prior": (lambda: TreeModel(ALIGNMENT, TREE, JC69(), GammaRates()), "site_rates=GammaRates"),
    "a number as the prior": (lambda: TreeModel(ALIGNMENT, TREE, branch_length_prior=10.0), "not a distribution"),
    "a prior below zero": (
        lambda: TreeModel(ALIGNMENT, TREE, branch_length_prior=dist.Normal(0.1, 0.1)),
        "Normal is discrete or allows negative numbers",
    ),
    "a path": (lambda: TreeModel("a.fasta", TREE), r"alignment: str 'a\.fasta'.*Alignment\.from_file"),
    "another path": (lambda: TreeModel(ALIGNMENT, "a.nwk"), r"tree: str.*Tree\.from_file"),
    "topologies": (lambda: TreeModel(ALIGNMENT, Topologies.from_trees([TREE])), r"tree: Topologies.*\.tree\(0\)"),
    "swapped": (lambda: TreeModel(TREE, ALIGNMENT), "alignment and tree are swapped"),
    "a type's name": (lambda: TreeModel(ALIGNMENT, TREE, dtype="float64"), "floating-point type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_of_another_kind_are_refused(case):
    call, message = WRONG[case]
    with pytest.raises(SettingsError, match=message) as error:
        call()
    assert "Remedy" in str(error.value)


def test_only_tensors_are_evaluated():
    model = TreeModel(ALIGNMENT, TREE)
    for wrong in ([0.1] * 5, np.full(5, 0.1), None, 0.1):
        for call in (model.log_likelihood, model.pattern_log_likelihoods, model.branch_derivatives):
            with pytest.raises(ShapeError, match=f"branch_lengths: {type(wrong).__name__} is not a tensor.*torch"):
                call(wrong)
    with pytest.raises(ShapeError, match="shape: float is not a tensor"):
        TreeModel(ALIGNMENT, TREE, site_rates=GammaRates()).log_likelihood(torch.ones(5), shape=1.0)


def test_representation():
    model = TreeModel(ALIGNMENT, TREE, HKY85(kappa=2.0), site_rates=GammaRates())
    expected = "Alignment(DNA, 4 taxa, 4 sites, 4 patterns), HKY85, GammaRates, 5 branches; sampled: branch_lengths"
    assert repr(model) == f"TreeModel({expected}, base_frequencies, shape)"


def test_settings_are_checked():
    with pytest.raises(SettingsError, match="floating-point"):
        TreeModel(ALIGNMENT, TREE, dtype=torch.int64)
    with pytest.raises(SettingsError, match="Remedy"):
        TreeModel(ALIGNMENT, TREE, branch_length_prior=dist.Exponential(torch.ones(5)))


@pytest.mark.parametrize("shape", [(), (4,), (5, 2)])
def test_shapes_are_checked(shape):
    model = TreeModel(ALIGNMENT, TREE)
    for call in (model.log_likelihood, model.pattern_log_likelihoods):
        with pytest.raises(ShapeError, match=r"\(\*batch, 5\)"):
            call(torch.ones(shape, dtype=torch.float64))


def test_transition_matrices_of_jukes_cantor():
    lengths = torch.tensor([0.0, 1e-12, 0.1, 2.0, 1e3], dtype=torch.float64)
    matrices = JC69().transition_matrices(lengths)
    generator = torch.full((4, 4), 1 / 3, dtype=torch.float64) - 4 / 3 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(matrices, torch.matrix_exp(generator * lengths[:, None, None]), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(matrices.sum(-1), torch.ones(5, 4, dtype=torch.float64))
    # The chance of a change along a short branch keeps all its digits.
    assert matrices[1, 0, 1].item() == pytest.approx(1e-12 / 3, rel=1e-11)
    single = JC69().transition_matrices(torch.ones(2, 3))
    assert single.shape == (2, 3, 4, 4) and single.dtype == torch.float32
    assert JC69().frequencies(single).tolist() == [0.25] * 4


def test_primates_are_as_published():
    alignment, tree = primates()
    assert (alignment.num_taxa, alignment.num_sites) == (12, 898)
    assert set(alignment.taxa) == set(tree.taxa)
    names = {str(number): taxon for number, taxon in enumerate(alignment.taxa, start=1)}
    assert tree.taxa == tuple(names[number] for number in "2 12 11 10 9 8 7 6 5 4 3 1".split())
