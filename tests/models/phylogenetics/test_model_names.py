"""Models by the names of other programs, and the submodels of GTR."""

import pytest
import torch

from bayeskit.errors import AlignmentError, SettingsError, UnknownNameError
from bayeskit.models._substitution_names import KNOWN_NAMES
from bayeskit.models.phylogenetics import (
    GTR,
    GY94,
    HKY85,
    JC69,
    K80,
    TN93,
    Alignment,
    AminoAcidModel,
    FreeRates,
    GammaRates,
    GTRSubmodel,
    InvariantSites,
    Mk,
    all_reversible_models,
    empirical_frequencies,
    parse_substitution,
)
from bayeskit.models.phylogenetics._codon_mixtures import M3, M1a, M2a
from bayeskit.models.phylogenetics._codon_models import MG94
from bayeskit.models.phylogenetics._mixture_models import ProfileMixture

BASES = Alignment.from_sequences({"A": "ACGTAC", "B": "ACGTTT"})
LIKE = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize(
    ("text", "kind", "free"),
    [
        ("JC", JC69, []),
        ("F81", GTRSubmodel, ["base_frequencies"]),
        ("JC+FO", GTRSubmodel, ["base_frequencies"]),
        ("K2P", K80, ["kappa"]),
        ("HKY+FQ", K80, ["kappa"]),
        ("hky", HKY85, ["base_frequencies", "kappa"]),
        ("TrN", TN93, ["base_frequencies", "kappa_purines", "kappa_pyrimidines"]),
        ("TNe", TN93, ["kappa_purines", "kappa_pyrimidines"]),
        ("SYM", GTR, ["exchangeabilities"]),
        ("gtr", GTR, ["base_frequencies", "exchangeabilities"]),
        ("TIM2+FQ", GTRSubmodel, ["exchangeabilities"]),
        ("010010", GTRSubmodel, ["base_frequencies", "exchangeabilities"]),
        ("121121+FQ", GTRSubmodel, ["exchangeabilities"]),
        ("000000+FQ", JC69, []),
        ("LG", AminoAcidModel, []),
        ("LG+FO", AminoAcidModel, ["amino_acid_frequencies"]),
        ("mtrev", AminoAcidModel, []),
        ("DAYHOFF+FO", AminoAcidModel, ["amino_acid_frequencies"]),
        ("C20", ProfileMixture, []),
        ("LG+c60", ProfileMixture, []),
        ("GY", GY94, ["kappa", "omega"]),
        ("M0+FO", GY94, ["codon_frequencies", "kappa", "omega"]),
        ("MG94", MG94, ["kappa", "omega"]),
        ("MG+FO", MG94, ["base_frequencies", "kappa", "omega"]),
        ("m1a", M1a, ["class_weights", "kappa", "omega"]),
        ("M2a", M2a, ["class_weights", "kappa", "omega", "omega_excess"]),
        ("M3", M3, ["class_weights", "kappa", "omega_increments"]),
        ("M3K4+FO", M3, ["class_weights", "codon_frequencies", "kappa", "omega_increments"]),
    ],
)
def test_names(text, kind, free):
    model, rates = parse_substitution(text)
    assert type(model) is kind and sorted(model.priors(LIKE)) == free and rates is None


def test_partitions_say_which_rates_are_equal():
    expected = {"TIM": "012230", "TIM2": "010232", "TIM3": "012032", "TVM": "012314"}
    expected |= {"TPM2": "010212", "TPM3": "012012", "K81": "012210", "K3Pu": "012210"}
    assert {name: parse_substitution(name)[0].partition for name in expected} == expected
    matrix = GTRSubmodel("012314", [1.0, 2.0, 3.0, 4.0, 5.0], [0.25] * 4).exchangeability_matrix(LIKE)
    # A-C, A-G, A-T, C-G, C-T, G-T; A-G and C-T are equal in TVM.
    assert matrix[[0, 0, 0, 1, 1, 2], [1, 2, 3, 2, 3, 3]].tolist() == [1.0, 2.0, 3.0, 4.0, 2.0, 5.0]
    assert GTRSubmodel("313323").partition == "010020"


def test_submodels_with_the_same_rates_are_the_same():
    lengths = torch.tensor([0.1, 1.0], dtype=torch.float64)
    frequencies = [0.4, 0.3, 0.2, 0.1]
    for submodel, model in (
        (GTRSubmodel("010010", [1.0, 3.0], frequencies), HKY85(3.0, frequencies)),
        (GTRSubmodel("010020", [1.0, 3.0, 7.0], frequencies), TN93(3.0, 7.0, frequencies)),
        (GTRSubmodel("000000", None, [0.25] * 4), JC69()),
    ):
        found, expected = (one.transition_matrices(lengths) for one in (submodel, model))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_there_are_203_submodels():
    codes = all_reversible_models()
    assert len(set(codes)) == 203 and all(GTRSubmodel(code).partition == code for code in codes)
    # Partitions of six things into k classes: Stirling's numbers of the second kind.
    assert [sum(len(set(code)) == k for code in codes) for k in range(1, 7)] == [1, 31, 90, 65, 15, 1]


def test_profiles_and_codons():
    model, rates = parse_substitution("WAG+C30+I+G4")
    assert (model.profiles, model.matrix, model.num_classes) == ("C30", "WAG", 30)
    assert isinstance(rates, InvariantSites)
    assert parse_substitution("C10")[0].matrix == "Poisson" and parse_substitution("M3K5")[0].classes == 5
    codons = Alignment.from_sequences({"A": "ATGCCACGT", "B": "ATGCGTAAC"}, data_type="codon")
    model = parse_substitution("MG94+F1x4", codons)[0]
    counts = torch.tensor([5.0, 5.0, 4.0, 4.0], dtype=torch.float64)  # of A, C, G and T
    torch.testing.assert_close(model.base_frequencies.unflatten(0, (3, 4)), (counts / 18.0).expand(3, 4))
    torch.testing.assert_close(
        parse_substitution("M2a+F1x4", codons)[0].codon_frequencies, model.frequencies(LIKE), rtol=1e-13, atol=0
    )


def test_suffixes():
    model, rates = parse_substitution("HKY85+F+I+G", BASES)
    assert torch.equal(model.base_frequencies, empirical_frequencies(BASES))
    assert isinstance(rates, InvariantSites) and isinstance(rates.others, GammaRates)
    assert rates.others.num_categories == 4
    rates = parse_substitution("GTR+R3")[1]
    assert isinstance(rates, FreeRates) and rates.num_categories == 3
    assert isinstance(parse_substitution("JC69+I")[1], InvariantSites)
    characters = Alignment.from_sequences({"A": "2120", "B": "0212", "C": "2222"})
    assert parse_substitution("Mk+G8", characters)[0] == Mk(3)


@pytest.mark.parametrize("name", sorted(set(KNOWN_NAMES) - {"Mk"}))  # which needs an alignment
def test_every_known_name_is_read_in_any_case(name):
    assert type(parse_substitution(name.lower())[0]) is type(parse_substitution(name.upper())[0])


@pytest.mark.parametrize(
    ("text", "alignment", "error", "message"),
    [
        ("GTS", None, UnknownNameError, "'GTS'; did you mean 'GTR'"),
        ("mtRAV", None, UnknownNameError, "'mtRAV'; did you mean 'mtREV'"),
        ("M3K1", None, UnknownNameError, "'M3K1'; did you mean 'M3K"),
        ("GTR+C20", None, SettingsError, r"profiles such as \+C20 follow a matrix of amino acids"),
        ("LG+C20+C10", None, SettingsError, r"profiles such as \+C20 follow a matrix of amino acids"),
        ("LG+C20+F", None, SettingsError, r"profiles such as \+C20 follow .* without other frequencies"),
        ("C20+FO", None, SettingsError, r"\+FO does not fit C20"),
        ("C20+ASC", None, SettingsError, "no correction for ProfileMixture, whose sites belong to classes"),
        ("MG94+F", None, SettingsError, r"\+F does not fit MG94"),
        ("M2a+F3x4", None, SettingsError, "depends on the alignment"),
        ("GTR+H", None, SettingsError, r"\+H is unknown"),
        ("GTR+G4+R2", None, SettingsError, "rates of sites twice"),
        ("GTR+G0", None, SettingsError, r"\+G0 is unknown"),
        ("GTR+F+FQ", None, SettingsError, "frequencies twice"),
        ("GTR+F3x4", BASES, SettingsError, r"\+F3X4 does not fit GTR"),
        ("HKY+F", None, SettingsError, "depends on the alignment"),
        ("LG", BASES, SettingsError, "a model of protein data, but the data of the alignment are DNA"),
        ("Mk", BASES, SettingsError, "a model of standard with 2 states data"),
        ("Mkv", BASES, SettingsError, "a model of standard with 2 states data"),
        ("JC69+ASC", BASES, AlignmentError, r"Sites 1-4 \(counted from 1\): some state is possible"),
        ("GTR+I+ASC", None, SettingsError, r"\+I and \+ASC exclude each other"),
    ],
)
def test_bad_texts_are_named(text, alignment, error, message):
    with pytest.raises(error, match=message):
        parse_substitution(text, alignment)
