"""Amino acids, codons and morphological characters against IQ-TREE, sums over all states and finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch

from bayeskit.errors import AlignmentError, DataWarning, SettingsError, ShapeError, UnknownNameError
from bayeskit.models.phylogenetics import (
    GTR,
    GY94,
    PROTEIN,
    Alignment,
    AminoAcidModel,
    ForestLikelihood,
    FreeRates,
    GammaRates,
    GTRSubmodel,
    InvariantSites,
    Mk,
    Topologies,
    Tree,
    TreeModel,
    codon_frequencies,
    codons,
    empirical_frequencies,
    parse_substitution,
    standard_characters,
)
from bayeskit.models.phylogenetics import _substitution as substitution_module

TREE = Tree.from_newick("((A:0.11,B:0.23):0.07,(C:0.31,D:0.05):0.13,(E:0.19,F:0.42):0.09);")


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def alignment_of(text: str, data_type: str) -> Alignment:
    words = text.split()
    lines = len(words) // 6  # of each sequence
    sequences = {taxon: "".join(words[i * lines : (i + 1) * lines]) for i, taxon in enumerate(TREE.taxa)}
    return Alignment.from_sequences(sequences, data_type=data_type)


# Simulated on TREE. The log-likelihoods are those that IQ-TREE 2.0.7 prints, with four decimals, for the model and the
# fixed branch lengths; ratios of codons are its estimates.
PROTEINS = {
    "LG": """RLKANYARVAGLLQNSMMSLIDLIELCSARIQRFHNMDYD RLKGNHARVKSLLQNSLLALVDLIELCSTRIQRFHNMDYD
        RPKDNEARVKGMSQDSLLRLTELIEVVSVRIQRWHNMPPD RPKANYARIKGLMQNSMLSLSDLLEICSVRIQRWHNIDYD
        RLKANYAPIKGILQKSMLSLVDLIELCSTRIQRWHNMDSD RIKANYARVKGLLKQAELTIVDLIELCKSKMQRWYNLDYN""",
    "WAG": """SHTFRVSSRIGCKTHCLASKSGVWSDVANFPVEGIDRICF SHKFRVSSRVGCKTHCFATKSGVWSSITNFPIEGNDQICF
        SHSFRLSSRIGYKSHCLAAKQGVWTDIANHQLNGIDRICF KHTFRLPSRIGYKTHCKASKSGVWSDIANFPVEGIDRICF
        EHSLRVSSRVGYKTHCLVTKSGVWSDIANLPVQGIDRMCF SYSFALNSRIGYETHCLATKFGVWKKNADLKVTGVERFAL""",
    "JTT": """ACSLRHINERGLHKPVEMFEGVEEWLISSFGKMYDKEPPD FSSLRHINPRGLHEPVELFEAEGEWLTSSFGSMFDKEPPD
        KCSLKHINPRGLHKPVELCEVLEEILSLSFGGSYDKEPPE RCSLKHMNPRGLHKPVEMFEAVEKILISAFGRMYDKEPPD
        NCPLKHRNPQGLHKPVEMFEALEEWPASAFGGMYDKVPPD HCALKHINPQNMKSLIGMFEEIEEWRTSAFGGLYDKVPLD""",
}
RATES = {
    "": None,
    "+F": None,
    "+G4": GammaRates(0.5),
    "+I+G4": InvariantSites(0.2, GammaRates(0.7)),
    "+R3": FreeRates.of([0.2, 0.9, 1.93333333333], weights=[0.3, 0.4, 0.3]),
}
#: By matrix, for the keys of RATES.
PUBLISHED = {
    "LG": (-349.0671, -346.8213, -359.2313, -361.1724, -351.4508),
    "WAG": (-353.7268, -351.7735, -366.3148, -367.9811, -357.6035),
    "JTT": (-372.0508, -362.2094, -378.3261, -379.9430, -372.6734),
}


def value(alignment: Alignment, substitution, site_rates=None) -> float:
    return TreeModel(alignment, TREE, substitution, site_rates=site_rates).log_likelihood(TREE.branch_lengths).item()


@pytest.mark.calibration
@pytest.mark.parametrize("matrix", PUBLISHED)
def test_amino_acids_as_in_iqtree(matrix, back_end):
    alignment = alignment_of(PROTEINS[matrix], "protein")
    for (suffix, rates), expected in zip(RATES.items(), PUBLISHED[matrix], strict=True):
        text = matrix + (suffix if suffix == "+F" else "")
        assert value(alignment, parse_substitution(text, alignment)[0], rates) == pytest.approx(expected, abs=1e-4)


CODONS = """ATTTTAAGTAGGCCCATGAGGACTTGCTCGAAAGACACGATTCGTCGTCTATGTACTAGTGGATTATGTTCTAATTTAGCTTCTCGAATCCACGGAGTTA
    TAAGAGTGAATTTAAGAGCACGCCATAGGGATTGGGTTGCAGGTGAAGAGTGGCACATCTTATTACTCTACGTCTCAACAAGCCTGCGTGGCGCCCGACA
    CTGTTACACGCGAGTGTCTTTCGTGTGCGGGACAATACGTACAGGCCAGGGGATATCTGCGGTTACACGTAGTTTAAGACTTACTACGGGGTGTCTATAC
    ATTTTAAGTAGGCCCATGAGAACTTACTCGAAGGACACGATTCGCCGTCTATGTACGTGTGGATTGTGTTCTAATCTGGCTTCTCGAATCCACGGAGTTA
    TAAGAGTTAACTTAAGAGCCCGCCATAGGGTTTGGGGTGCGGGTGAAGGGTGGCACATTTTATTACTCTACGTCTTAAAAAGCCTGCGTGGCGCCCGTCA
    CGGTTACCCGCAAGCGTCTTTCATGTGCGGGACCATACGTACGGGCCGGGGGATATCAGGAGTTACACGTAGCTTGAGACCTACTACGGGGTGCCTATAC
    ATCTTGAGGAGTCCCTTGGGAACTTGCCAGGAAGACACGATTCGCCATCTATGTATTAGCGGATTATGTTATAATTTAGCTTCTCGAATCTACGGAGTTA
    TAAGAGTGAACCTAATAGCGCGCCAAAGGGTTTGCATAGCAGGTGAAGAGCGACCCATCTTATTTCTCTACGTCTTAACATGCTTGCGTGGCTATCGGCA
    CTGTTATACAGGAGCGTCTTTCATTTGTGGGACAACCAGTACAGGCCAGGGTTCATCTGGGGTTGCACGTAGTTTGAGACTAACTACGAGGTGCTTATAT
    ATTTTAAGTAGGCCCATGGGAACTTGCCCGGAAGACACGATTCGCCGTCTATGTATTAGCGGATTATGTTCTAATTTAGCTTCTCGAATCTACGGAGTTA
    TAAGAGTGAACTTAAGAGCGCGCCAAAGCGTTTGGGTAGCAGGTGATGAGTGGCACACCTTATTACTCTACGTCTTAACATGCTTGCGTGGCGCTCAACA
    CTGTTATACGGGAGTGTCTTTCATCTGTGGGCCAATAAGTACAGGCCAGGGGACATCTGGGGTTGCACGTAGTTTAAGACTAACTACGAGGTGCTTATAC
    ATTTTAGGTGGGCACATAGGAACTTGCTCGAAGGACACGATTCGTCGTCTATGTATTAGTGGGTTATATCCTAATTTAGCTTCTCGAATCTATGGAGTTA
    CAAGAGTGAACTTAAGAGCACGCCACAGGGTTTGGGTAGCAGGTGAAGAGTGGCACATCTTATTACTTTACGTCTTAACATGTCTGCGTGGTGCCCGGCA
    CTGTTATACGCGAATGCCTTTCATGTGCGGGACAATAAGTACAGGCCAGGGGACATCTGGCGTTGCACGTAGTTTAAGACTTACTACTGGGTGCCTATCC
    ATCTTAAGTAGGGCCATAGGTAATTGCTCAAAGGACACGATCCGCCGTCTGTCTTTTAGTGGATTGTCTTCTAATCTAACTTCCCGAACCTACGGTGTTA
    TAGGAGTGAACTTAAAAGCATACCATAGAGATTGGGTAGCTGGCGAAGAGTGGCATGTGTTATTACGTTACGTCTTAACAAGCCTGCGTGGCGCCCGGCA
    CTGTTATACGCGATTGTTGATCACGTTCGGGACGATAAGTACGGGCCAGAGGACATCTGGGTTTAGACGTAGCTTCAGACTTACTACGGGGGGCCGATAC"""
CHARACTERS = """221001101210122221201020220201211120201212002110020102120022
    001001101200122220201022220200212110200212001010020102121022
    201001101220020211201221121200201100002102001110200211121020
    221001100001120201201022222220201102000202102110020211121020
    211201100210122201201120010222002100200212202111020212102202
    011001110200022021101220011220201100200112002221020012110021"""


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("suffix", "omega", "kappa", "expected"),
    [
        ("", 0.5124859296, 2.786410113, -1095.4787),
        ("+F1x4", 0.5087927542, 2.786839923, -1093.8493),
        ("+F3x4", 0.5275452217, 2.93307141, -1095.2784),
    ],
)
def test_codons_as_in_iqtree(suffix, omega, kappa, expected, back_end):
    alignment = alignment_of(CODONS, "codon")
    model = parse_substitution(f"GY94{suffix}", alignment)[0]
    values = {"kappa": tensor(kappa), "omega": tensor(omega)}
    assert value(alignment, model.with_parameters(values)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.calibration
def test_morphological_characters_as_in_iqtree(back_end):
    alignment = alignment_of(CHARACTERS, "standard")
    with pytest.warns(DataWarning, match="characters show fewer than 3 states"):
        model, _ = parse_substitution("Mk", alignment)
    assert (alignment.data_type, model.states) == (standard_characters(3), 3)
    assert value(alignment, model) == pytest.approx(-313.8108, abs=1e-4)
    assert value(alignment, model, GammaRates(0.6)) == pytest.approx(-318.9270, abs=1e-4)


# Sums over the states of all inner nodes, from the definition of the model.


def by_enumeration(sequences, model, lengths, sites: int) -> float:
    """Log-likelihood of `(A,B,(C,D))` from sets of states, with rates exponentiated by torch."""
    n, masks = model.num_states, Alignment.from_sequences(sequences, data_type=model.data_type)
    rates, frequencies = model.rate_matrix(lengths), model.frequencies(lengths)
    matrices = torch.matrix_exp(rates * lengths[:, None, None])
    total = 0.0
    for site in range(sites):
        column = masks.patterns[:, masks.site_patterns[site]].tolist()
        allowed = [tensor([mask >> state & 1 for state in range(n)]) for mask in column]
        a, b, c, d = (matrices[place] @ allowed[place] for place in range(4))
        terms = [
            frequencies[root] * a[root] * b[root] * matrices[4, root, inner] * c[inner] * d[inner]
            for root, inner in itertools.product(range(n), repeat=2)
        ]
        total += torch.stack(terms).sum().log().item()
    return total


SMALL = {
    "two states": (Mk(2), {"A": "0110-", "B": "0011?", "C": "11010", "D": "01101"}),
    "five states": (Mk(5), {"A": "0413-", "B": "0041?", "C": "11020", "D": "31104"}),
    "nine states": (Mk(9), {"A": "0818-", "B": "0081?", "C": "71020", "D": "31108"}),
    "amino acids": (AminoAcidModel("WAG"), {"A": "MKVB-", "B": "MRVZW", "C": "IKJNX", "D": "MKLDW"}),
    "codons": (
        GY94(2.0, 0.3, codon_frequencies=tensor(range(1, 62))),
        {"A": "ATGAARCCC---TAT", "B": "ATGAAACCNTTTTAC", "C": "ATAAAGCGTTTYTGT", "D": "ATGCAGCCATTATGG"},
    ),
}


@pytest.mark.calibration
@pytest.mark.parametrize("case", SMALL)
def test_likelihood_is_the_sum_over_all_states(case, back_end):
    model, sequences = SMALL[case]
    alignment = Alignment.from_sequences(sequences, data_type=model.data_type)
    tree = Tree.from_newick("(A,B,(C,D));")
    lengths = tensor([0.1, 0.4, 0.2, 1.3, 0.3])
    expected = by_enumeration(sequences, model, lengths, 5)
    by_tree = {"A": 0, "B": 1, "C": 2, "D": 3}
    order = [by_tree.get(name, 4) for name in (*tree.taxa, *["inner"])]
    found = TreeModel(alignment, tree, model)
    assert found.log_likelihood(lengths[order]).item() == pytest.approx(expected, abs=1e-12 * abs(expected))
    rows = found.pattern_log_likelihoods(lengths[order])[alignment.site_patterns].sum().item()
    assert rows == pytest.approx(expected, abs=1e-12 * abs(expected))
    forest = ForestLikelihood(alignment, model, compile=back_end == "compiled")
    topologies = Topologies.from_trees([tree])
    one = forest.log_likelihood(topologies, torch.full((3, 1, 5), 0.2, dtype=torch.float64))
    assert one[0, 0].item() == pytest.approx(
        found.log_likelihood(torch.full((5,), 0.2, dtype=torch.float64)).item(), rel=1e-12
    )


def test_a_dropped_frequency_is_noticed(monkeypatch):
    """Exchangeabilities taken for rates would pass for equal frequencies only."""
    model, sequences = SMALL["amino acids"]
    lengths = tensor([0.1, 0.4, 0.2, 1.3, 0.3])
    expected = by_enumeration(sequences, model, lengths, 5)
    original = substitution_module._reversible_rate_matrix
    monkeypatch.setattr(substitution_module, "_reversible_rate_matrix", lambda pairs, f: original(pairs, f * 0 + 0.05))
    alignment = Alignment.from_sequences(sequences, data_type=PROTEIN)
    wrong = TreeModel(alignment, Tree.from_newick("(A,B,(C,D));"), model).log_likelihood(lengths).item()
    assert abs(wrong - expected) > 0.01


FREE = {
    "LG": (AminoAcidModel("LG", None), "protein", PROTEINS["LG"]),
    "GY94": (GY94(codon_frequencies=None), "codon", CODONS),
    "Mk with free rates": (Mk(3), "standard", CHARACTERS),
    "TIM2": (GTRSubmodel("010232"), "DNA", "ACGTACGTAA ACGTACGTAC ACTTACGTCA AGGTACGTCA ACGTAGGTAA ACGTATGTTT"),
}


@pytest.mark.parametrize("case", FREE)
def test_gradients_by_lengths_and_parameters(case, back_end):
    model, kind, text = FREE[case]
    alignment = alignment_of(text, kind)
    rates = FreeRates(num_categories=2) if case.endswith("rates") else None
    tree_model = TreeModel(alignment, TREE, model, site_rates=rates)
    generator = torch.Generator().manual_seed(0)
    leaves = {"branch_lengths": TREE.branch_lengths.clone()}
    for name, prior in tree_model.priors.items():
        size = prior.event_shape
        leaves[name] = 0.2 + torch.rand(size, generator=generator, dtype=torch.float64)
    for leaf in leaves.values():
        leaf.requires_grad_()
    directions = {
        name: torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for name, leaf in leaves.items()
    }

    def along(step: float) -> torch.Tensor:
        return tree_model.log_likelihood(**{name: leaf + step * directions[name] for name, leaf in leaves.items()})

    slopes = torch.autograd.grad(along(0.0), list(leaves.values()))
    expected = sum((slope * directions[name]).sum() for slope, name in zip(slopes, leaves, strict=True)).item()
    step = 1e-4
    with torch.no_grad():
        one, two = (along(k * step) - along(-k * step) for k in (1, 2))
    # Errors of order step to the power of four, and of rounding.
    assert ((8 * one - two) / (12 * step)).item() == pytest.approx(expected, rel=1e-7, abs=1e-6)
    by_branch = tree_model.branch_derivatives(**{name: leaf.detach() for name, leaf in leaves.items()})
    torch.testing.assert_close(by_branch.first, slopes[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "model", [AminoAcidModel("JTT"), GY94(3.0, 0.2), GTRSubmodel("012314", [1, 2, 3, 4, 5], [1, 2, 3, 4])]
)
def test_rates_are_reversible(model):
    """Detailed balance and Kolmogorov's criterion: the product of rates around a triangle is the same both ways."""
    rates, frequencies = model.rate_matrix(torch.zeros((), dtype=torch.float64)), model.frequencies(tensor(0.0))
    flow = frequencies[:, None] * rates
    torch.testing.assert_close(flow, flow.mT, rtol=1e-13, atol=1e-16)
    around = torch.einsum("ij,jk,ki->ijk", rates, rates, rates)
    torch.testing.assert_close(around, around.permute(2, 1, 0), rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(rates.sum(-1), torch.zeros_like(frequencies), rtol=0, atol=1e-13)


def test_models_at_repeated_eigenvalues_and_infinite_lengths():
    """Equal exchangeabilities have one eigenvalue 60 times; gradients are finite there, and long branches forget."""
    frequencies = torch.full((61,), 1.0 / 61, dtype=torch.float64).requires_grad_()
    model = GY94(2.0, 0.5).with_parameters({"codon_frequencies": frequencies, "omega": tensor(1.0)})
    (slope,) = torch.autograd.grad(model.transition_matrices(tensor([0.0, 0.3]))[:, 0, 3].sum(), frequencies)
    assert slope.isfinite().all() and slope.abs().max() > 1e-4
    exchangeabilities = torch.ones(6, dtype=torch.float64).requires_grad_()
    equal = GTR().with_parameters({"exchangeabilities": exchangeabilities, "base_frequencies": tensor([0.25] * 4)})
    lengths = tensor([0.3, math.inf])
    (slope,) = torch.autograd.grad(equal.transition_matrices(lengths)[0, 0, 1], exchangeabilities)
    assert slope.isfinite().all() and slope.abs().max() > 1e-3
    for limit in (model, equal, AminoAcidModel("LG")):
        found = limit.transition_matrices(lengths)[1]
        torch.testing.assert_close(found, limit.frequencies(lengths).expand_as(found), rtol=1e-12, atol=1e-13)


def test_free_rates_have_mean_one_and_one_order():
    rates = FreeRates(tensor([[1.0, 2.0, 3.0], [1.0, 0.5, 0.1]]), tensor([0.2, 0.3, 0.5]), 3)
    found, weights, invariant = rates.categories(torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close((found * weights).sum(-1), torch.ones(2, dtype=torch.float64), rtol=1e-15, atol=0)
    torch.testing.assert_close(found[0], tensor([1.0, 3.0, 6.0]) / 4.1, rtol=1e-15, atol=0)
    assert invariant is None and (found.diff() > 0).all() and rates.batch_shape == (2,)
    priors = FreeRates(num_categories=5).priors(torch.zeros(()))
    assert {name: prior.event_shape for name, prior in priors.items()} == {
        "rate_increments": (5,),
        "rate_weights": (5,),
    }


def test_codon_frequencies_are_those_of_the_bases():
    alignment = alignment_of(CODONS, "codon")
    found = codon_frequencies(alignment)
    text = "".join(CODONS.split())
    shares = [np.array([text[place::3].count(base) for base in "ACGT"]) / (len(text) / 3) for place in range(3)]
    states = alignment.data_type.states
    products = np.array([np.prod([shares[i]["ACGT".index(c)] for i, c in enumerate(codon)]) for codon in states])
    np.testing.assert_allclose(found.numpy(), products / products.sum(), rtol=1e-13)
    assert (codon_frequencies(alignment, "F1x4") - found).abs().max() > 1e-4
    assert empirical_frequencies(alignment).sum().item() == pytest.approx(1.0, abs=1e-14)


BAD = {
    "model and data": (
        lambda: TreeModel(alignment_of(PROTEINS["LG"], "protein"), TREE),
        SettingsError,
        "JC69 is a model of DNA data, but the data of the alignment are protein",
    ),
    "forest and data": (
        lambda: ForestLikelihood(alignment_of(CHARACTERS, "standard"), Mk(4)),
        SettingsError,
        "standard with 4 states data, but the data of the alignment are standard with 3 states",
    ),
    "number of frequencies": (lambda: GY94(2.0, 1.0, [1.0] * 60), ShapeError, r"codon_frequencies: .*\(\*batch, 61\)"),
    "matrix": (lambda: AminoAcidModel("LX"), UnknownNameError, "'LX'; did you mean 'LG'"),
    "own": (lambda: AminoAcidModel("LG", "mine"), SettingsError, "amino_acid_frequencies: 'mine' is neither"),
    "partition": (lambda: GTRSubmodel("01002"), SettingsError, "partition='01002' is not six digits"),
    "equal rates": (lambda: GTRSubmodel("000000", [1.0]), SettingsError, "exchangeabilities: all are equal"),
    "genetic code": (lambda: codons("standart"), UnknownNameError, "did you mean 'standard'"),
    "one state": (lambda: Mk(1), SettingsError, "states=1: there may be from 2 to 36"),
    "equal free rates": (lambda: FreeRates.of([1.0, 1.0], [0.5, 0.5]), SettingsError, "different rates above 0"),
    "one category": (lambda: FreeRates(num_categories=1), SettingsError, "num_categories must be at least 2"),
    "frequencies of no codons": (
        lambda: codon_frequencies(alignment_of(CHARACTERS, "standard")),
        AlignmentError,
        "standard with 3 states, not codons",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()
