"""What both workflows over trees are given: priors of branch lengths, topologies in any form, and settings."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import (
    CheckpointError,
    ConversionWarning,
    SamplingWarning,
    SettingsError,
    TreeError,
    UnknownNameError,
)
from bayeskit.inference.evidence import Budget
from bayeskit.models.phylogenetics import (
    Alignment,
    ForestLikelihood,
    GammaDirichlet,
    SubsplitBayesianNetwork,
    Topologies,
    Tree,
    TreeModel,
    TreeSample,
    all_topologies,
)
from bayeskit.models.phylogenetics._branch_length_priors import (
    allowed_lengths,
    check_branch_length_prior,
    log_prior_of_lengths,
)
from bayeskit.models.phylogenetics.workflows import LogNormalLengths, compare_topologies, variational_inference
from bayeskit.models.phylogenetics.workflows._topology_comparison import _in_order

DOUBLE = torch.float64
FOUR = Alignment.from_sequences(
    {"A": "GTCATTATCCCGATAAAAAA", "B": "CTCATTTTCCCGAGGAAAGT", "C": "ATCACTTTCTCGGTGAAAGC", "D": "TTCATTCTRTCG-GCAAAGG"}
)
FIVE = Alignment.from_sequences({"A": "CCTCATCG", "B": "CCTCATCT", "C": "CCAGTGAT", "D": "GCAGTGCC", "E": "CTCGR-CA"})
#: Drawn so that the first tree's taxa come in another order than the alignment's.
DRAWN = [Tree.from_newick(text) for text in ("((E,C),(B,D),A);", "((A,B),E,(C,D));")]


def number(*values):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=DOUBLE)


def mixture(rate):
    return dist.MixtureSameFamily(dist.Categorical(number(0.5, 0.5)), dist.Exponential(number(10.0, rate)))


def compared(alignment, trees, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return compare_topologies(alignment, trees, progress=False, **settings)


def fitted(support=None, **settings):
    support = all_topologies("ABCD") if support is None else support
    return variational_inference(FOUR, support, progress=False, **({"num_steps": 2} | settings))


@pytest.mark.calibration
def test_a_prior_of_all_branches_means_the_same_ones_whatever_the_method_and_the_drawing(limit):
    """The mutation: a prior that is turned round gives another evidence."""
    prior = dist.Exponential(number(2.0, 5.0, 10.0, 20.0, 40.0, 10.0, 5.0)).to_event(1)
    turned = dist.Exponential(number(40.0, 20.0, 10.0, 5.0, 2.0, 10.0, 5.0)).to_event(1)
    batch = compared(FIVE, DRAWN, branch_length_prior=prior)
    other = compared(FIVE, Topologies.from_trees(DRAWN, taxa="BADCE"), branch_length_prior=prior)
    assert torch.equal(batch.log_evidence, other.log_evidence) and batch.topologies.taxa == FIVE.taxa
    single = compared(FIVE, DRAWN, method="naive_monte_carlo", budget=Budget(4, 50, 100), branch_length_prior=prior)
    error = torch.hypot(batch.standard_error, single.standard_error)
    assert ((batch.log_evidence - single.log_evidence) / error).abs().max() < limit(2)
    wrong = compared(FIVE, DRAWN, method="naive_monte_carlo", budget=Budget(4, 50, 100), branch_length_prior=turned)
    assert ((batch.log_evidence - wrong.log_evidence) / error).abs().max() > limit(2)


def test_a_tree_in_the_order_of_edges_of_topologies():
    topologies = Topologies.from_trees(DRAWN, taxa=FIVE.taxa)
    lengths = torch.rand(2, 7, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    expected = ForestLikelihood(FIVE).log_likelihood(topologies, lengths)
    for place in range(2):
        found = TreeModel(FIVE, _in_order(topologies, place)).log_likelihood(lengths[place])
        assert abs(float(found - expected[place])) < 1e-10


def test_a_network_over_taxa_in_another_order_needs_a_prior_that_does_not_tell_them_apart():
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("DBCA"))
    assert fitted(network, branch_length_prior=GammaDirichlet(torch.ones(5, dtype=DOUBLE))).num_steps == 2
    prior = dist.Exponential(number(1.0, 2.0, 3.0, 4.0, 5.0)).to_event(1)
    with pytest.raises(SettingsError, match="depends on the order of the taxa"):
        fitted(network, branch_length_prior=prior)
    # Of topologies, taxa are taken in the alignment's order.
    one, other = (
        fitted(all_topologies(taxa), branch_length_prior=prior, seed=1).log_evidence(500) for taxa in ("ABCD", "DBCA")
    )
    assert one.log_evidence == other.log_evidence


NO_PRIORS = {
    "a number": (10.0, "not a distribution"),
    "a class": (dist.Exponential, "not a distribution"),
    "a batch": (dist.Exponential(torch.full((5,), 10.0)), "batch_shape"),
    "a vector of another size": (dist.Exponential(torch.full((4,), 10.0)).to_event(1), "batch_shape"),
    "negative numbers": (dist.Normal(0.1, 0.1), "allows negative numbers"),
    "some negative numbers": (dist.Uniform(-0.001, 1.0), "allows negative numbers"),
    "negative vectors": (dist.MultivariateNormal(torch.zeros(5), torch.eye(5)), "allows negative numbers"),
    "whole numbers": (dist.Poisson(1.0), "allows negative numbers"),
    "a given sum": (dist.Dirichlet(torch.ones(5)), "has no density over positive branch lengths"),
}


@pytest.mark.parametrize(("prior", "message"), NO_PRIORS.values(), ids=NO_PRIORS)
def test_what_is_no_prior_of_branch_lengths_is_refused(prior, message):
    with pytest.raises(SettingsError, match=message):
        compared(FOUR, all_topologies("ABCD"), branch_length_prior=prior)
    with pytest.raises(SettingsError, match=message):
        fitted(branch_length_prior=prior)


def test_priors_of_a_range():
    """Outside, the density is zero; its gradient is no NaN; and there is a place to start from."""
    narrow = dist.Uniform(number(0.001), number(0.002))
    ranges = dist.Uniform(number(0.0, 0.1), number(0.1, 0.2)).to_event(1)
    for prior in (dist.Uniform(number(0.0), number(0.5)), narrow, ranges, dist.Beta(number(2.0), number(3.0))):
        check_branch_length_prior(prior, 2)
        inside = allowed_lengths(prior, 2)
        lengths = torch.stack([inside, inside + 5.0]).requires_grad_()
        found = log_prior_of_lengths(prior, lengths)
        direct = prior.log_prob(inside)
        assert found[0] == direct.sum() and found[1] == -math.inf
        gradient = torch.autograd.grad((found + lengths.sum(-1))[0], lengths)[0]
        assert gradient.isfinite().all()


def test_a_uniform_prior_in_both_workflows(limit):
    """One site that all taxa share: every topology has the same evidence, by quadrature of a smooth function."""
    alignment = Alignment.from_sequences(dict.fromkeys("ABCD", "A"))
    prior = dist.Uniform(number(0.0), number(1.0))
    nodes = torch.linspace(0.0, 1.0, 13, dtype=DOUBLE)
    weights = torch.linalg.solve(
        torch.stack([nodes**k for k in range(13)]), torch.tensor([1 / (k + 1) for k in range(13)], dtype=DOUBLE)
    )
    grid = torch.cartesian_prod(*[torch.arange(13)] * 5)
    topologies = all_topologies("ABCD")[:2]
    likelihood = torch.cat(
        [
            ForestLikelihood(alignment).log_likelihood(topologies[:1], nodes[some][:, None])[:, 0].exp()
            for some in grid.split(50_000)
        ]
    )
    truth = float((likelihood * weights[grid].prod(-1)).sum().log())
    batch = compared(alignment, topologies, branch_length_prior=prior, num_draws=5000)
    assert ((batch.log_evidence - truth) / batch.standard_error).abs().max() < limit(2)
    found = variational_inference(
        alignment, topologies, branch_length_prior=prior, num_steps=60, progress=False, lengths=LogNormalLengths()
    ).log_evidence(20_000)
    expected = truth + math.log(2 / 3)  # one topology of three is not in the support
    assert abs(found.log_evidence - expected) < limit() * found.standard_error


OTHERS = {
    "HalfNormal": (dist.HalfNormal(number(0.1)), dist.HalfNormal(number(1.0))),
    "InverseGamma": (dist.InverseGamma(number(3.0), number(0.1)), dist.InverseGamma(number(3.0), number(1.0))),
    "HalfCauchy": (dist.HalfCauchy(number(0.1)), dist.HalfCauchy(number(1.0))),
    "a mixture": (mixture(1.0), mixture(2.0)),
}


@pytest.mark.parametrize(("first", "second"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_belongs_to_one_prior_of_any_class(first, second, tmp_path):
    path = tmp_path / "run"
    fitted(branch_length_prior=first, checkpoint=path)
    assert fitted(branch_length_prior=first, checkpoint=path).num_steps == 2
    with pytest.raises(CheckpointError, match="another model or of other data"):
        fitted(branch_length_prior=second, checkpoint=path)


def test_topologies_in_any_form():
    topologies = all_topologies("ABCD")
    trees = [topologies.tree(place) for place in range(3)]
    forms = [topologies, trees, TreeSample.from_topologies(topologies)]
    evidence = [compared(FOUR, form, num_draws=200).log_evidence for form in forms]
    assert torch.equal(evidence[0], evidence[1]) and torch.equal(evidence[0], evidence[2])
    parameters = [fitted(form).parameters for form in forms]
    assert torch.equal(parameters[0], parameters[1]) and torch.equal(parameters[0], parameters[2])
    rooted = TreeSample.from_topologies(all_topologies("ABCD", rooted=True))
    with pytest.warns(ConversionWarning, match="unrooted") as told:
        found = compared(FOUR, rooted, num_draws=200)
    assert len(told) == 1 and len(found.topologies) == 3
    with pytest.warns(ConversionWarning, match="unrooted") as told:
        assert fitted(rooted).topologies.taxa == FOUR.taxa
    assert len(told) == 1
    for wrong, message in (
        (["((A,B),C,D);"] * 2, "tree 1 is a str"),
        ("((A,B),C,D);", "wrong type"),
        (None, "wrong type"),
    ):
        with pytest.raises(SettingsError, match=message):
            compare_topologies(FOUR, wrong)
        if wrong is not None:  # without a support, one is searched for
            with pytest.raises(SettingsError, match=message):
                variational_inference(FOUR, wrong)
    with pytest.raises(TreeError):
        compare_topologies(FOUR, [])


def test_settings_of_another_type_or_without_effect_are_refused():
    topologies = all_topologies("ABCD")
    for settings, message in (
        ({"substitution": "HKY85"}, "substitution"),
        ({"site_rates": 0.5}, "site_rates"),
        ({"num_draws": 1}, "num_draws must be at least 2"),
        ({"num_jobs": 2}, "num_jobs is not used"),
        ({"budget": Budget()}, "budget is not used"),
        ({"method": "naive_monte_carlo", "num_draws": 100}, "num_draws is not used"),
        ({"prior_probabilities": ["a", 1.0, 1.0]}, "prior_probabilities must be a number"),
    ):
        with pytest.raises(SettingsError, match=message):
            compare_topologies(FOUR, topologies, **settings)
    with pytest.raises(UnknownNameError, match="no method is called .felsenstein."):
        compare_topologies(FOUR, topologies, "felsenstein")
    with pytest.warns(SamplingWarning, match="no error") as told:
        assert compare_topologies(FOUR, topologies, "laplace", progress=False).posterior_errors.isnan().all()
    assert len(told) == 1
    for call in (compare_topologies, variational_inference):
        with pytest.raises(SettingsError, match="alignment"):
            call("alignment.nex", topologies)
    for settings, message in (
        ({"substitution": "HKY85"}, "substitution"),
        ({"learning_rates": 0.03}, "learning_rates"),
        ({"annealing": 0.5}, "annealing"),
        ({"lengths": LogNormalLengths}, "lengths"),
    ):
        with pytest.raises(SettingsError, match=message):
            fitted(**settings)


def test_a_longer_run_from_a_checkpoint_says_what_to_do_about_the_annealing(tmp_path):
    path = tmp_path / "run"
    fitted(num_steps=4, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"half of num_steps.*Remedy: resume with the previous num_steps"):
        fitted(num_steps=8, checkpoint=path)
