"""States of ancestors, beside a sum over all states of all inner nodes."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.models.phylogenetics import (
    GTR,
    GY94,
    HKY85,
    JC69,
    Alignment,
    AminoAcidModel,
    FreeRates,
    GammaRates,
    InvariantSites,
    Mk,
    Tree,
    TreeModel,
    ancestral_states,
)

FIVE = "((A:0.1,B:0.2):0.15,(C:0.05,D:0.3):0.25,E:0.4);"
FOUR = "((A:0.1,B:0.2):0.15,C:0.3,D:0.25);"


def by_enumeration(model, lengths, site, substitution, rates, weights, invariant=0.0):
    """Probability of each state at each inner node, `(inner, n)`, by the sum over all states of all of them."""
    tree, alignment = model.tree, model.alignment
    n = substitution.num_states
    frequencies = substitution.frequencies(lengths).reshape(n)
    masks = alignment.patterns[:, alignment.site_patterns[site]].tolist()
    tips = [masks[alignment.taxa.index(taxon)] for taxon in tree.taxa]
    allowed = torch.tensor([[(mask >> state) & 1 for state in range(n)] for mask in tips], dtype=torch.float64)
    total = torch.zeros(len(tree.children), n, dtype=torch.float64)
    for rate, weight in zip(rates, weights, strict=True):
        matrices = substitution.transition_matrices(lengths * rate)
        tip_terms = [matrices[tip] @ allowed[tip] for tip in range(tree.num_taxa)]
        for states in itertools.product(range(n), repeat=len(tree.children)):
            term = weight * frequencies[states[-1]]
            for number, below in enumerate(tree.children):
                for child in below:
                    if child < tree.num_taxa:
                        term = term * tip_terms[child][states[number]]
                    else:
                        term = term * matrices[child, states[number], states[child - tree.num_taxa]]
            for number, state in enumerate(states):
                total[number, state] += term
    total += invariant * frequencies * allowed.prod(0)
    return total / total.sum(1, keepdim=True)


def as_array(table, model):
    return table["probability"].to_numpy().reshape(len(model.tree.children), -1, model.substitution.num_states)


def dna():
    rows = {"E": "ACGTA-", "A": "ACGRA-", "C": "AAGTCT", "B": "ACTTAT", "D": "GATTCN"}
    return Alignment.from_sequences(rows), Tree.from_newick(FIVE)


def protein():
    rows = {"A": "ARN", "B": "AKB", "C": "SKD", "D": "SR-"}
    return Alignment.from_sequences(rows, data_type="protein"), Tree.from_newick(FOUR)


def characters():
    rows = {"A": "0120", "B": "01?0", "C": "1221", "D": "1020", "E": "2121"}
    return Alignment.from_sequences(rows, data_type="standard"), Tree.from_newick(FIVE)


def codon():
    rows = {"A": "ATGCCC", "B": "ATGCCA", "C": "ATACCN", "D": "ATAAGA"}
    return Alignment.from_sequences(rows, data_type="codon"), Tree.from_newick(FOUR)


GENERAL = GTR([1.0, 2.5, 0.6, 0.9, 3.0, 1.0], [0.3, 0.2, 0.1, 0.4])
CASES = {
    "JC69": (dna, JC69(), None),
    "GTR": (dna, GENERAL, None),
    "gamma": (dna, GENERAL, GammaRates(0.5)),
    "gamma, invariant": (dna, GENERAL, InvariantSites(0.3, GammaRates(0.7, 3))),
    "invariant": (dna, JC69(), InvariantSites(0.4)),
    "free": (dna, GENERAL, FreeRates.of([0.2, 1.8], [0.5, 0.5])),
    "amino acids": (protein, AminoAcidModel("LG"), GammaRates(0.8, 2)),
    "characters": (characters, Mk(3), GammaRates(0.8, 2)),
    "codons": (codon, GY94(kappa=2.0, omega=0.3), None),
}


@pytest.mark.parametrize("name", CASES)
def test_all_states_of_all_nodes_are_summed(name):
    data, substitution, site_rates = CASES[name]
    alignment, tree = data()
    model = TreeModel(alignment, tree, substitution, site_rates=site_rates)
    table = ancestral_states(model, tree.branch_lengths)
    found = as_array(table, model)
    rates, weights, invariant = [1.0], [1.0], 0.0
    if site_rates is not None:
        categories = site_rates.categories(tree.branch_lengths)
        rates, weights = categories.rates.reshape(-1).tolist(), categories.weights.reshape(-1).tolist()
        invariant = 0.0 if categories.invariant is None else float(categories.invariant)
    for site in range(alignment.num_sites):
        expected = by_enumeration(model, tree.branch_lengths, site, model.substitution, rates, weights, invariant)
        assert np.abs(found[:, site] - expected.numpy()).max() < 1e-12
    # The mutation: another rate gives other probabilities.
    other = by_enumeration(model, 2 * tree.branch_lengths, 0, model.substitution, rates, weights, invariant)
    assert np.abs(found[:, 0] - other.numpy()).max() > 1e-6
    assert table["state"].tolist()[: len(alignment.data_type.states)] == list(alignment.data_type.states)
    assert table["node"].unique().tolist()[:1] == ["A|B"] and table["node"].iloc[-1] == "|".join(tree.taxa)


def test_probabilities_are_averaged_over_draws(monkeypatch):
    alignment, tree = dna()
    model = TreeModel(alignment, tree, HKY85(), site_rates=GammaRates())
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3)
    draws = {
        "branch_lengths": torch.rand(*shape, 7, generator=generator, dtype=torch.float64),
        "kappa": 1 + torch.rand(*shape, generator=generator, dtype=torch.float64),
        "base_frequencies": torch.full((*shape, 4), 0.25, dtype=torch.float64),
        "shape": 0.2 + torch.rand(*shape, generator=generator, dtype=torch.float64),
        "something_else": torch.zeros(shape),
    }
    found = as_array(ancestral_states(model, draws, sites=[3, 0, 3]), model)
    single = [
        as_array(ancestral_states(model, {name: value[place] for name, value in draws.items()}, sites=[3, 0]), model)
        for place in itertools.product(range(2), range(3))
    ]
    np.testing.assert_allclose(found[:, :2], np.mean(single, axis=0), rtol=0, atol=1e-13)
    np.testing.assert_array_equal(found[:, 0], found[:, 2])
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-12)
    # In chunks of one draw.
    monkeypatch.setattr("bayeskit.models.phylogenetics._ancestral_states._CHUNK_NUMBERS", 1)
    again = as_array(ancestral_states(model, draws, sites=[3, 0, 3]), model)
    np.testing.assert_allclose(again, found, rtol=0, atol=1e-13)


def test_three_taxa_have_one_ancestor():
    alignment = Alignment.from_sequences({"A": "AC", "B": "GC", "C": "NT"})
    tree = Tree.from_newick("(C:0.1,A:0.2,B:0.3);")
    model = TreeModel(alignment, tree, GENERAL)
    table = ancestral_states(model, tree.branch_lengths)
    assert table["node"].unique().tolist() == ["C|A|B"]
    for site in range(2):
        expected = by_enumeration(model, tree.branch_lengths, site, GENERAL, [1.0], [1.0])
        assert np.abs(as_array(table, model)[:, site] - expected.numpy()).max() < 1e-12


def test_draws_of_a_sampler():
    alignment, tree = dna()
    model = TreeModel(alignment, tree, HKY85(base_frequencies=[0.25] * 4))
    draws = bk.sample(bk.Target.from_pyro(model), num_chains=1, num_warmup=20, num_samples=5, seed=0, progress=False)
    found = ancestral_states(model, draws, sites=[2])
    values = {name: draws[name].numpy() for name in ("branch_lengths", "kappa")}
    assert values["branch_lengths"].shape == (1, 5, 7)
    pd.testing.assert_frame_equal(found, ancestral_states(model, values, sites=[2]))


def test_tables_name_sites_of_the_alignment():
    alignment, tree = dna()
    model = TreeModel(alignment, tree)
    table = ancestral_states(model, tree.branch_lengths.numpy(), sites=range(1, 3))
    assert table.columns.tolist() == ["node", "site", "state", "probability"]
    assert table["node"].unique().tolist() == ["A|B", "C|D", "A|B|C|D|E"] and len(table) == 3 * 2 * 4
    assert table["site"].tolist()[:8] == [1] * 4 + [2] * 4
    everything = ancestral_states(model, tree.branch_lengths)
    assert everything["site"].unique().tolist() == list(range(6))


def test_a_rate_at_which_a_site_is_impossible_does_no_harm():
    """The slowest category of rates is so slow that its likelihood underflows."""
    alignment, tree = dna()
    model = TreeModel(alignment, tree, site_rates=GammaRates(0.01))
    found = as_array(ancestral_states(model, tree.branch_lengths), model)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-9)


def test_what_is_refused():
    alignment, tree = dna()
    model = TreeModel(alignment, tree)
    for sites in ([6], [-1], [0.5], [], "AB"):
        with pytest.raises(AlignmentError, match="sites"):
            ancestral_states(model, tree.branch_lengths, sites=sites)
    with pytest.raises(SettingsError, match="Tree is not a TreeModel"):
        ancestral_states(tree, tree.branch_lengths)
    with pytest.raises(ShapeError, match=r"'branch_lengths' has shape \(6,\)"):
        ancestral_states(model, tree.branch_lengths[:-1])
    with pytest.raises(ShapeError, match="no draw"):
        ancestral_states(model, torch.ones(0, 7))
    for length in (-0.1, float("nan")):
        with pytest.raises(SettingsError, match="negative or NaN"):
            ancestral_states(model, torch.full((7,), length))
    with pytest.raises(AlignmentError, match="site 3: its likelihood is zero"):
        ancestral_states(model, torch.zeros(7), sites=[5, 3])
    free = TreeModel(alignment, tree, HKY85())
    with pytest.raises(SettingsError, match="'kappa'"):
        ancestral_states(free, {"branch_lengths": tree.branch_lengths})
    with pytest.raises(SettingsError, match="'kappa'"):
        ancestral_states(free, tree.branch_lengths)
    wrong = {"branch_lengths": torch.ones(2, 7), "kappa": torch.ones(3), "base_frequencies": torch.ones(4) / 4}
    with pytest.raises(ShapeError, match="numbers of draws differ"):
        ancestral_states(free, wrong)
