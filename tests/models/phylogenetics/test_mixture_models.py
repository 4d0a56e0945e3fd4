"""Mixtures over profiles of amino acids against IQ-TREE, sums over classes, gradients, many topologies, bad input."""

import math

import pytest
import torch

from bayeskit.errors import SettingsError, ShapeError, UnknownNameError
from bayeskit.models.phylogenetics import (
    Alignment,
    AminoAcidModel,
    ForestLikelihood,
    FreeRates,
    GammaRates,
    InvariantSites,
    TimeTreeModel,
    Topologies,
    Tree,
    TreeModel,
    VariableSites,
)
from bayeskit.models.phylogenetics._mixture_models import ProfileMixture
from bayeskit.models.phylogenetics.workflows import infer_topologies

TREE = Tree.from_newick("((A:0.11,B:0.23):0.07,(C:0.31,D:0.05):0.13,(E:0.19,F:0.42):0.09);")
SEQUENCES = """RLKANYARVAGLLQNSMMSLIDLIELCSARIQRFHNMDYD RLKGNHARVKSLLQNSLLALVDLIELCSTRIQRFHNMDYD
    RPKDNEARVKGMSQDSLLRLTELIEVVSVRIQRWHNMPPD RPKANYARIKGLMQNSMLSLSDLLEICSVRIQRWHNIDYD
    RLKANYAPIKGILQKSMLSLVDLIELCSTRIQRWHNMDSD RIKANYARVKGLLKQAELTIVDLIELCKSKMQRWYNLDYN"""
ALIGNMENT_OF = dict(zip("ABCDEF", SEQUENCES.split(), strict=True))
ALIGNMENT = Alignment.from_sequences(ALIGNMENT_OF, data_type="protein")
GAMMA = GammaRates(0.5)
BOTH = InvariantSites(0.2, GammaRates(0.7))
FREE_RATES = FreeRates.of([0.2, 0.9, 1.93333333333], weights=[0.3, 0.4, 0.3])

# Log-likelihoods of IQ-TREE 2.0.7 for these sequences and branch lengths (-te, -blfix), with the published weights and
# fixed rates (models such as POISSON+FMIX{C10pi1:1:0.1191344178,...}+G4{0.5}).
PUBLISHED = {
    "C10": (ProfileMixture("C10"), None, -362.5435),
    "C10+G4": (ProfileMixture("C10"), GAMMA, -370.2720),
    "C20": (ProfileMixture("C20"), None, -361.6908),
    "C20+G4": (ProfileMixture("C20"), GAMMA, -369.0062),
    "C30+G4": (ProfileMixture("C30"), GAMMA, -367.5121),
    "C40+G4": (ProfileMixture("C40"), GAMMA, -367.4525),
    "C50+G4": (ProfileMixture("C50"), GAMMA, -367.5665),
    "LG+C20": (ProfileMixture("C20", "LG"), None, -357.5876),
    "LG+C20+I+G4": (ProfileMixture("C20", "LG"), BOTH, -365.6534),
    "LG+C20+R3": (ProfileMixture("C20", "LG"), FREE_RATES, -358.7513),
}


def value(substitution, site_rates=None) -> torch.Tensor:
    return TreeModel(ALIGNMENT, TREE, substitution, site_rates=site_rates).log_likelihood(TREE.branch_lengths)


@pytest.mark.calibration
@pytest.mark.parametrize("case", PUBLISHED)
def test_profiles_as_in_iqtree(case, back_end):
    model, rates, expected = PUBLISHED[case]
    assert value(model, rates).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.calibration
def test_sixty_profiles_as_in_iqtree():
    """IQ-TREE raises weights below 0.001 to that value: the only one is that of the profile 46 of C60."""
    published = ProfileMixture("C60")
    weights = published.class_weights.clamp(min=1e-3)
    assert (published.class_weights < 1e-3).nonzero().tolist() == [[45]]
    raised = ProfileMixture("C60", class_weights=weights / weights.sum())
    assert value(raised).item() == pytest.approx(-360.6996, abs=1e-4)


TWO = torch.stack([torch.arange(1.0, 21.0, dtype=torch.float64), torch.arange(20.0, 0.0, -1.0, dtype=torch.float64)])
WEIGHTS = [0.3, 0.7]


@pytest.mark.parametrize("rates", [None, GAMMA, FREE_RATES])
def test_likelihood_is_the_weighted_sum_over_the_classes(rates, back_end):
    parts = [TreeModel(ALIGNMENT, TREE, AminoAcidModel("WAG", profile), site_rates=rates) for profile in TWO.unbind()]
    logs = torch.stack([part.pattern_log_likelihoods(TREE.branch_lengths) for part in parts])
    expected = torch.logsumexp(logs + torch.tensor(WEIGHTS, dtype=torch.float64).log()[:, None], 0)
    mixture = TreeModel(ALIGNMENT, TREE, ProfileMixture(TWO, "WAG", WEIGHTS), site_rates=rates)
    torch.testing.assert_close(mixture.pattern_log_likelihoods(TREE.branch_lengths), expected, rtol=1e-12, atol=0)
    total = (ALIGNMENT.weights * expected).sum()
    torch.testing.assert_close(mixture.log_likelihood(TREE.branch_lengths), total, rtol=1e-12, atol=0)


def test_sites_that_cannot_change_have_the_frequencies_of_their_class(back_end):
    """On a tree of three taxa, with a site that is the same in all of them, and one that is not."""
    alignment = Alignment.from_sequences({"A": "AR", "B": "AR", "C": "AN"}, data_type="protein")
    lengths = torch.tensor([0.3, 0.8, 0.2], dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64)
    for weight, profile in zip(WEIGHTS, (TWO / 210.0).unbind(), strict=True):
        moved = AminoAcidModel("Poisson", profile).transition_matrices(lengths / 0.6)
        for site, states in enumerate([(0, 0, 0), (1, 1, 2)]):
            chance = profile.clone()
            for taxon, state in enumerate(states):
                chance = chance * moved[taxon, :, state]
            total[site] += weight * (0.6 * chance.sum() + 0.4 * (profile[0] if site == 0 else 0.0))
    model = TreeModel(
        alignment,
        Tree.from_newick("(A,B,C);"),
        ProfileMixture(TWO, class_weights=WEIGHTS),
        site_rates=InvariantSites(0.4),
    )
    found = model.pattern_log_likelihoods(lengths)[alignment.site_patterns]
    torch.testing.assert_close(found, total.log(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.log_likelihood(lengths), total.log().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("site_rates", [None, InvariantSites(others=GammaRates(num_categories=2))])
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.compiler), False])
def test_many_topologies_as_one_at_a_time(site_rates, compiled):
    trees = [TREE, Tree.from_newick("((A,C),(B,D),(E,F));"), Tree.from_newick("(((A,F),C),(B,D),E);")]
    topologies = Topologies.from_trees(trees)
    model = ProfileMixture("C10", "LG", None)
    forest = ForestLikelihood(ALIGNMENT, model, site_rates=site_rates, compile=compiled)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand((2, 3, 9), generator=generator, dtype=torch.float64)
    values = {"class_weights": torch.rand(10, generator=generator, dtype=torch.float64).softmax(-1)}
    if site_rates is not None:
        values |= {"proportion": torch.tensor(0.3).double(), "shape": torch.tensor([[0.5], [0.8]]).double()}
    found = forest.log_likelihood(topologies, lengths, **values)
    for sample in range(2):
        for place, tree in enumerate(trees):
            one = TreeModel(ALIGNMENT, tree, model, site_rates=site_rates)
            order = Topologies.from_trees([tree], topologies.taxa).branch_lengths_of([tree_of(tree)])[0].long()
            own = torch.empty(9, dtype=torch.float64)
            own[order] = lengths[sample, place]
            parts = values | ({} if site_rates is None else {"shape": values["shape"][sample, 0]})
            torch.testing.assert_close(found[sample, place], one.log_likelihood(own, **parts), rtol=1e-11, atol=0)


def tree_of(tree: Tree) -> Tree:
    """The tree with the index of each edge as its length."""
    return Tree(tree.taxa, tree.children, torch.arange(tree.num_edges, dtype=torch.float64))


def test_gradients_of_lengths_weights_and_rates(back_end):
    model = TreeModel(
        ALIGNMENT, TREE, ProfileMixture("C10", class_weights=None), site_rates=InvariantSites(others=GAMMA)
    )
    values = {
        "branch_lengths": TREE.branch_lengths.clone(),
        "class_weights": torch.full((10,), 0.1, dtype=torch.float64),
        "proportion": torch.tensor(0.2, dtype=torch.float64),
    }
    for leaf in values.values():
        leaf.requires_grad_()
    slopes = torch.autograd.grad(model.log_likelihood(**values), list(values.values()))
    rows = (model.pattern_log_likelihoods(**values) * ALIGNMENT.weights).sum()
    for slope, other in zip(slopes, torch.autograd.grad(rows, list(values.values())), strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-9, atol=1e-9)
    step = 1e-5
    for (name, leaf), slope in zip(values.items(), slopes, strict=True):
        with torch.no_grad():
            up, down = (model.log_likelihood(**values | {name: leaf + k * step}) for k in (1, -1))
        assert slope.sum().item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-6)


def test_frequencies_over_all_sites():
    model = ProfileMixture(TWO, class_weights=WEIGHTS)
    expected = (0.3 * TWO[0] + 0.7 * TWO[1]) / 210.0
    torch.testing.assert_close(model.frequencies(TWO), expected, rtol=1e-14, atol=0)


def test_time_trees_have_the_likelihood_of_the_unrooted_tree(back_end):
    four = Alignment.from_sequences({taxon: ALIGNMENT_OF[taxon] for taxon in "ABCD"}, data_type="protein")
    model = ProfileMixture("C10")
    lengths = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    rooted = TimeTreeModel(four, "(((A,B),C),D);", model)
    unrooted = TreeModel(four, Tree.from_newick("((A,B),C,D);"), model)
    # The two edges at the root are one, of 0.1 and 0.3.
    expected = unrooted.log_likelihood(torch.tensor([0.1, 0.1, 0.2, 0.4, 0.1], dtype=torch.float64))
    torch.testing.assert_close(rooted.log_likelihood(lengths), expected, rtol=1e-12, atol=0)


BAD = {
    "weights": (
        lambda: ProfileMixture("C10", class_weights=[0.2] * 10),
        SettingsError,
        "ProfileMixture, class_weights: .* do not sum to one",
    ),
    "number of weights": (
        lambda: ProfileMixture("C10", class_weights=[0.5, 0.5]),
        ShapeError,
        r"class_weights: .*\(\*batch, 10\)",
    ),
    "no weights": (lambda: ProfileMixture(TWO), SettingsError, "class_weights: 'own' is neither numbers nor a prior"),
    "profiles": (lambda: ProfileMixture("C15"), UnknownNameError, "'C15'"),
    "one profile": (lambda: ProfileMixture([0.05] * 20), SettingsError, "the frequencies are not a table of classes"),
    "frequencies": (lambda: ProfileMixture([[0.1] * 19]), ShapeError, "amino_acid_frequencies"),
    "matrix": (lambda: ProfileMixture("C10", "LX"), UnknownNameError, "'LX'; did you mean 'LG'"),
    "derivatives": (
        lambda: TreeModel(ALIGNMENT, TREE, ProfileMixture("C10")).branch_derivatives(TREE.branch_lengths),
        SettingsError,
        "branch_derivatives has one rate matrix for all sites, but ProfileMixture has one for each class",
    ),
    "one matrix": (
        lambda: ProfileMixture("C10").rate_matrix(TWO),
        SettingsError,
        "this calculation needs one rate matrix for all sites",
    ),
    "chains": (
        lambda: infer_topologies(ALIGNMENT, substitution=ProfileMixture("C10"), num_samples=10, num_warmup=10),
        SettingsError,
        "ProfileMixture: this calculation needs one rate matrix for all sites",
    ),
    "variable sites": (
        lambda: TreeModel(ALIGNMENT, TREE, VariableSites(ProfileMixture("C10"))),
        SettingsError,
        "no correction for ProfileMixture",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()


def test_lengths_that_are_no_numbers_give_none():
    model = TreeModel(ALIGNMENT, TREE, ProfileMixture("C10"), site_rates=InvariantSites(0.2))
    assert math.isnan(model.log_likelihood(-TREE.branch_lengths).item())
