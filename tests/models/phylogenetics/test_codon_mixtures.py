"""Codon models with several omegas against codeml of PAML, sums over all states, and bad input."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics import GY94, Alignment, ForestLikelihood, Tree, TreeModel, codon_frequencies
from bayeskit.models.phylogenetics._codon_mixtures import M3, BranchModel, BranchSiteModel, M1a, M2a
from bayeskit.models.phylogenetics._codon_models import MG94, place_frequencies

LIKE = torch.zeros((), dtype=torch.float64)
TREE = Tree.from_newick("((A:0.11,B:0.23):0.07,(C:0.31,D:0.05):0.13,(E:0.19,F:0.42):0.09);")
SEQUENCES = """
    ATTTTAAGTAGGCCCATGAGGACTTGCTCGAAAGACACGATTCGTCGTCTATGTACTAGTGGATTATGTTCTAATTTAGCTTCTCGAATCCACGGAGTT
    ATTTTAAGTAGGCCCATGAGAACTTACTCGAAGGACACGATTCGCCGTCTATGTACGTGTGGATTGTGTTCTAATCTGGCTTCTCGAATCCACGGAGTT
    ATCTTGAGGAGTCCCTTGGGAACTTGCCAGGAAGACACGATTCGCCATCTATGTATTAGCGGATTATGTTATAATTTAGCTTCTCGAATCTACGGAGTT
    ATTTTAAGTAGGCCCATGGGAACTTGCCCGGAAGACACGATTCGCCGTCTATGTATTAGCGGATTATGTTCTAATTTAGCTTCTCGAATCTACGGAGTT
    ATTTTAGGTGGGCACATAGGAACTTGCTCGAAGGACACGATTCGTCGTCTATGTATTAGTGGGTTATATCCTAATTTAGCTTCTCGAATCTATGGAGTT
    ATCTTAAGTAGGGCCATAGGTAATTGCTCAAAGGACACGATCCGCCGTCTGTCTTTTAGTGGATTGTCTTCTAATCTAACTTCCCGAACCTACGGTGTT"""
ALIGNMENT = Alignment.from_sequences(dict(zip("ABCDEF", SEQUENCES.split(), strict=True)), data_type="codon")
F3X4 = codon_frequencies(ALIGNMENT)
INNER, TWO = ["A", "B"], [["C", "D"], "E"]  # the foreground

# Log-likelihoods of codeml of PAML 4.9 for these sequences, with the branch lengths and parameters here (a file
# in.codeml that begins with -1: no search). The frequencies of codons are equal, or those of CodonFreq = 2 (F3x4), 4
# and 5 (Muse and Gaut). The last two of the models with a foreground have labels #1 above C and D, and above E.
PUBLISHED = {
    "M0": (GY94(4.5, 0.6), -344.083233),
    "M0, F3x4": (GY94(4.5, 0.6, F3X4), -343.856218),
    "MG94, F1x4": (MG94(4.5, 0.6, place_frequencies(ALIGNMENT, "F1x4")[0]), -341.993088),
    "MG94, F3x4": (MG94(4.5, 0.6, place_frequencies(ALIGNMENT, "F3x4").flatten()), -342.889113),
    "M1a": (M1a(kappa=4.5, omega=0.2, class_weights=[0.6, 0.4]), -345.615394),
    "M1a, F3x4": (M1a(kappa=4.5, omega=0.2, class_weights=[0.6, 0.4], codon_frequencies=F3X4), -344.668936),
    "M2a": (M2a(kappa=4.5, omega=0.2, omega_excess=2.5, class_weights=[0.6, 0.3, 0.1]), -348.813056),
    "M2a, F3x4": (
        M2a(kappa=4.5, omega=0.2, omega_excess=2.5, class_weights=[0.6, 0.3, 0.1], codon_frequencies=F3X4),
        -347.903068,
    ),
    "M3": (M3(kappa=4.5, omega_increments=[0.1, 0.6, 1.8], class_weights=[0.5, 0.3, 0.2]), -349.795958),
    "branch": (BranchModel(foreground=INNER, kappa=4.5, omega=0.6, foreground_omega=2.5), -343.067031),
    "branch-site": (
        BranchSiteModel(foreground=INNER, kappa=4.5, omega=0.2, omega_excess=2.5, class_weights=[0.5, 0.3, 0.2]),
        -344.556633,
    ),
    "branch-site, F3x4": (
        BranchSiteModel(
            foreground=INNER,
            kappa=4.5,
            omega=0.2,
            omega_excess=2.5,
            class_weights=[0.5, 0.3, 0.2],
            codon_frequencies=F3X4,
        ),
        -343.641625,
    ),
    "branch-site, null": (
        BranchSiteModel(
            foreground=INNER,
            positive_selection=False,
            kappa=4.5,
            omega=0.2,
            class_weights=[0.5, 0.3, 0.2],
            codon_frequencies=F3X4,
        ),
        -344.244062,
    ),
    "two branches": (
        BranchModel(foreground=TWO, kappa=4.5, omega=0.6, foreground_omega=2.5, codon_frequencies=F3X4),
        -345.775329,
    ),
    "branch-site, two branches": (
        BranchSiteModel(
            foreground=TWO,
            kappa=4.5,
            omega=0.2,
            omega_excess=2.5,
            class_weights=[0.5, 0.3, 0.2],
            codon_frequencies=F3X4,
        ),
        -345.738009,
    ),
}


@pytest.mark.calibration
@pytest.mark.parametrize("case", PUBLISHED)
def test_likelihoods_as_in_paml(case, back_end):
    model, expected = PUBLISHED[case]
    assert TreeModel(ALIGNMENT, TREE, model).log_likelihood(TREE.branch_lengths).item() == pytest.approx(
        expected, abs=1e-5
    )


SMALL = Alignment.from_sequences({"A": "ATGAARCCC", "B": "ATGCAACCN", "C": "ATAAAG---"}, data_type="codon")
STAR = Tree.from_newick("(A,B,C);")
THREE = torch.tensor([0.3, 0.8, 0.2], dtype=torch.float64)
FREQUENCIES = torch.arange(1, 62, dtype=torch.float64)
KAPPA, BEHIND, AHEAD, SHARES = 3.0, [0.2, 1.0, 0.2, 1.0], [0.2, 1.0, 2.5, 2.5], [0.5, 0.3, 0.125, 0.075]


def rates_of(omega: float) -> torch.Tensor:
    """Unscaled rates, from the bases of the codons."""
    data_type = SMALL.data_type
    amino_acids = dict(zip(data_type.states, data_type.amino_acids, strict=True))
    share = FREQUENCIES / FREQUENCIES.sum()
    rates = torch.zeros(61, 61, dtype=torch.float64)
    for i, old in enumerate(data_type.states):
        for j, new in enumerate(data_type.states):
            pairs = [a + b for a, b in zip(old, new, strict=True) if a != b]
            if len(pairs) == 1:
                rates[i, j] = share[j] * (KAPPA if pairs[0] in ("AG", "GA", "CT", "TC") else 1.0)
                rates[i, j] *= 1.0 if amino_acids[old] == amino_acids[new] else omega
    return rates - rates.sum(1).diag()


@pytest.mark.parametrize("foreground", ["B", 1, ["A", "C"]])
def test_likelihood_is_the_weighted_sum_over_the_classes(foreground, back_end):
    """Of the branch-site model on a star, where the second branch is the foreground, from matrix exponentials."""
    share = FREQUENCIES / FREQUENCIES.sum()
    total = torch.zeros(3, dtype=torch.float64)
    speeds = [
        sum(-w * (share * rates_of(omega).diag()).sum() for w, omega in zip(SHARES, omegas, strict=True))
        for omegas in (BEHIND, AHEAD)
    ]
    masks = [[torch.tensor([mask >> s & 1 for s in range(61)]).double() for mask in row] for row in SMALL.patterns]
    for weight, behind, ahead in zip(SHARES, BEHIND, AHEAD, strict=True):
        matrices = [rates_of(behind) / speeds[0], rates_of(ahead) / speeds[1], rates_of(behind) / speeds[0]]
        moved = [torch.matrix_exp(matrix * length) for matrix, length in zip(matrices, THREE, strict=True)]
        for pattern in range(3):
            product = share.clone()
            for taxon in range(3):
                product = product * (moved[taxon] @ masks[taxon][pattern])
            total[pattern] += weight * product.sum()
    model = BranchSiteModel(
        foreground=foreground,
        kappa=KAPPA,
        omega=0.2,
        omega_excess=1.5,
        class_weights=[0.5, 0.3, 0.2],
        codon_frequencies=FREQUENCIES,
    )
    found = TreeModel(SMALL, STAR, model)
    torch.testing.assert_close(found.pattern_log_likelihoods(THREE), total.log(), rtol=1e-12, atol=0)
    expected = (SMALL.weights * total.log()).sum()
    torch.testing.assert_close(found.log_likelihood(THREE), expected, rtol=1e-12, atol=0)


def test_equal_omegas_are_the_model_with_one():
    lengths = TREE.branch_lengths
    one = TreeModel(ALIGNMENT, TREE, GY94(2.0, 0.5)).log_likelihood(lengths)
    for model in (
        BranchModel(foreground=0, kappa=2.0, omega=0.5, foreground_omega=0.5),
        M3(classes=2, kappa=2.0, omega_increments=[0.5, 1e-12], class_weights=[0.3, 0.7]),
        M1a(kappa=2.0, omega=0.5, class_weights=[1.0 - 1e-12, 1e-12]),
    ):
        found = TreeModel(ALIGNMENT, TREE, model).log_likelihood(lengths)
        torch.testing.assert_close(found, one, rtol=1e-10, atol=0)


FREE = {
    "M2a": M2a(codon_frequencies=None),
    "M3": M3(classes=2),
    "branch": BranchModel(foreground=INNER),
    "branch-site": BranchSiteModel(foreground=INNER),
}


@pytest.mark.parametrize("case", FREE)
def test_gradients_and_batches_of_all_parameters(case, back_end):
    model = TreeModel(SMALL, STAR, FREE[case] if "branch" not in case else type(FREE[case])(foreground="B"))
    torch.manual_seed(0)
    priors = {"branch_lengths": dist.Gamma(torch.full((3,), 4.0), torch.full((3,), 10.0)).to_event(1), **model.priors}
    values = {name: prior.sample((2,)).double() for name, prior in priors.items()}
    for value in values.values():
        value.requires_grad_()
    both = model.log_likelihood(**values)
    each = [model.log_likelihood(**{name: value[i] for name, value in values.items()}) for i in range(2)]
    torch.testing.assert_close(both, torch.stack(each), rtol=1e-12, atol=0)
    slopes = torch.autograd.grad(both.sum(), list(values.values()))
    step = 1e-5
    for (name, value), slope in zip(values.items(), slopes, strict=True):
        direction = value.detach() * torch.randn_like(value)  # frequencies may be small
        with torch.no_grad():
            up, down = (model.log_likelihood(**values | {name: value + k * step * direction}) for k in (1, -1))
        expected = ((up - down) / (2 * step)).sum()
        torch.testing.assert_close((slope * direction).sum(), expected, rtol=1e-6, atol=1e-7)


def test_names_of_the_sampled_parameters():
    names = {
        M1a(): {"kappa", "omega", "class_weights"},
        M3(): {"kappa", "omega_increments", "class_weights"},
        BranchSiteModel(foreground=INNER): {"kappa", "omega", "omega_excess", "class_weights"},
        BranchSiteModel(foreground=INNER, positive_selection=False): {"kappa", "omega", "class_weights"},
    }
    for model, expected in names.items():
        tree_model = TreeModel(ALIGNMENT, TREE, model)
        assert set(tree_model.priors) == expected
        trace = poutine.trace(tree_model).get_trace()
        assert trace.nodes["class_weights"]["value"].sum().item() == pytest.approx(1.0)
        assert torch.isfinite(trace.log_prob_sum())


def test_frequencies_of_muse_and_gaut_are_stationary():
    model = MG94(2.0, 0.3, [0.1, 0.2, 0.3, 0.4, 0.3, 0.3, 0.2, 0.2, 0.25, 0.15, 0.35, 0.25])
    rates, frequencies = model.rate_matrix(LIKE), model.frequencies(LIKE)
    flow = frequencies[:, None] * rates
    torch.testing.assert_close(flow, flow.mT, rtol=1e-12, atol=1e-16)
    states = model.data_type.states
    # From AAA to the codons that differ in one base: frequencies of the new base, a transition, and another amino acid.
    first, second, third = (rates[0, states.index(codon)].item() for codon in ("CAA", "AGA", "AAG"))
    assert second / first == pytest.approx(2.0 * 0.2 / 0.2)
    assert third / first == pytest.approx(2.0 * 0.35 / (0.3 * 0.2))


BAD = {
    "weights": (
        lambda: M2a(class_weights=[0.5, 0.3, 0.3]),
        SettingsError,
        r"M2a, class_weights: \[0.5, 0.3, 0.3\] do not sum to one",
    ),
    "number of weights": (lambda: M1a(class_weights=[0.5, 0.3, 0.2]), ShapeError, r"class_weights: .*\(\*batch, 2\)"),
    "omega above one": (lambda: M1a(omega=1.5), SettingsError, "omega: 1.5 does not lie between 0 and 1"),
    "one class": (lambda: M3(classes=1), SettingsError, "classes must be at least 2"),
    "number of bases": (lambda: MG94(2.0, 1.0, [0.5, 0.5]), ShapeError, r"base_frequencies: .*\(\*batch, 4\)"),
    "no foreground": (lambda: BranchModel(foreground=[]), SettingsError, "there is no branch"),
    "null and excess": (
        lambda: BranchSiteModel(foreground="A", positive_selection=False, omega_excess=2.0),
        SettingsError,
        "omega_excess: without positive selection",
    ),
    "no such branch": (
        lambda: TreeModel(ALIGNMENT, TREE, BranchModel(foreground=["A", "C"])),
        TreeError,
        "no branch of the tree separates A, C from the rest",
    ),
    "no such taxon": (
        lambda: TreeModel(ALIGNMENT, TREE, BranchSiteModel(foreground=[["A", "G"]])),
        TreeError,
        "the tree has no taxon 'G'",
    ),
    "no such index": (
        lambda: TreeModel(ALIGNMENT, TREE, BranchSiteModel(foreground=9)),
        TreeError,
        "the tree has no branch 9, only 0 to 8",
    ),
    "all taxa": (
        lambda: TreeModel(ALIGNMENT, TREE, BranchSiteModel(foreground=list("ABCDEF"))),
        TreeError,
        "no branch of the tree separates",
    ),
    "many topologies": (
        lambda: ForestLikelihood(ALIGNMENT, BranchModel(foreground="A")),
        SettingsError,
        "BranchModel names branches of one tree",
    ),
    "without a tree": (
        lambda: BranchModel(foreground="A", kappa=1.0, omega=1.0, foreground_omega=2.0).class_transition_matrices(
            THREE
        ),
        SettingsError,
        "the branches are those of an unknown tree",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()
