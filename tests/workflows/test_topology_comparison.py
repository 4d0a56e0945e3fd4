"""Evidence of many topologies against exact quadrature, and the search for modes."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from tree_quadrature import log_evidence

from bayeskit.errors import SamplingWarning, SettingsError, TreeError
from bayeskit.inference.evidence import Budget
from bayeskit.inference.evidence.laplus import gamma_laplus
from bayeskit.models.phylogenetics import HKY85, Alignment, Tree, TreeModel, all_topologies, primates
from bayeskit.workflows.phylogenetics import compare_topologies
from bayeskit.workflows.phylogenetics.modes import climb_to_modes
from bayeskit.workflows.phylogenetics.proposal import Proposal

DOUBLE = torch.float64
FOUR = Alignment.from_sequences(
    {"A": "GTCATTATCCCGATAAAAAA", "B": "CTCATTTTCCCGAGGAAAGT", "C": "ATCACTTTCTCGGTGAAAGC", "D": "TTCATTCTRTCG-GCAAAGG"}
)
FIVE = Alignment.from_sequences({"A": "CCTCATCG", "B": "CCTCATCT", "C": "CCAGTGAT", "D": "GCAGTGCC", "E": "CTCGR-CA"})


def compared(alignment, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return compare_topologies(alignment, all_topologies(alignment.taxa), progress=False, **settings)


def test_three_taxa_by_hand():
    """One site that all taxa share: the evidence is that of the polynomial (1 + 3 (ab + ac + bc) + 6 abc) / 16."""
    alignment = Alignment.from_sequences({"A": "A", "B": "A", "C": "A"})
    mean = 7.5 / 8.5
    exact = (1 + 9 * mean**2 + 6 * mean**3) / 64
    assert log_evidence(alignment, all_topologies("ABC")).exp().item() == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("alignment", [FOUR, FIVE], ids=["3 topologies", "15 topologies"])
def test_evidence_and_posterior_probabilities_are_exact(alignment, limit):
    truth = log_evidence(alignment, all_topologies(alignment.taxa))
    found = compared(alignment, num_draws=20_000, seed=1)
    trusted = torch.tensor([z.trusted for z in found.comparison.results.values()])
    p = truth.softmax(0)
    # Few sites leave poor topologies with branches of any length; what cannot be believed must say so.
    assert p[trusted].sum() > 0.99
    z = (found.log_evidence - truth) / found.standard_error
    assert z[trusted].abs().max() < limit(len(truth)) and found.standard_error[trusted].max() < 0.05
    assert ((found.posterior_probabilities - p) / found.posterior_errors)[trusted].abs().max() < limit(len(truth))
    assert found.posterior_probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert (p * (p.log() - found.posterior_probabilities.log())).sum() < 1e-3


def test_a_proposal_that_is_not_what_was_drawn_from_is_noticed(limit, monkeypatch):
    """The mutation: draws 5 % longer than their density says."""
    original = Proposal.sample
    monkeypatch.setattr(Proposal, "sample", lambda *args: 1.05 * original(*args))
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    found = compared(FOUR, num_draws=20_000, seed=1)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() > limit(3)


def test_the_proposal_is_a_distribution(limit):
    """Weights of a known density have mean one, and a bound although its tail is heavier than the gamma's."""
    shape, rate = torch.tensor([[1.0, 3.0]], dtype=DOUBLE), torch.tensor([[20.0, 8.0]], dtype=DOUBLE)
    proposal = Proposal(shape, rate)
    x = proposal.sample(40_000, torch.Generator().manual_seed(0))
    log_weights = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1) - proposal.log_prob(x)
    weights = log_weights.exp()
    assert abs(float((weights.mean() - 1) / (weights.std() / 200))) < limit()
    assert weights.max() < 1 / proposal.share**2
    assert float((1 - proposal.share) ** 2) == pytest.approx(0.8, abs=1e-15)


def test_any_other_estimator_works_on_one_topology_after_another(limit):
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    found = compared(FOUR, method="naive_monte_carlo", budget=Budget(4, 50, 50))
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() < limit(3)
    assert found.settings["method"] == "naive_monte_carlo"


def test_prior_probabilities_priors_and_seeds():
    weights = [0.0, 3.0, 1.0]
    first, again = (compared(FOUR, num_draws=500, prior_probabilities=weights) for _ in range(2))
    assert torch.equal(first.log_evidence, again.log_evidence)
    assert not torch.equal(first.log_evidence, compared(FOUR, num_draws=500, seed=1).log_evidence)
    expected = (first.log_evidence + torch.tensor(weights, dtype=DOUBLE).log()).softmax(0)
    assert torch.allclose(first.posterior_probabilities, expected, rtol=0, atol=1e-14)
    other = compared(FOUR, num_draws=500, branch_length_prior=dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)))
    assert torch.equal(other.log_evidence, first.log_evidence)


def test_models_with_other_rates_are_weighed_as_one_topology_after_another_is(limit):
    substitution = HKY85(4.0, [0.3, 0.3, 0.2, 0.2])
    topologies = all_topologies(FOUR.taxa)
    found = compared(FOUR, num_draws=5000, substitution=substitution)
    one = compared(FOUR, method="naive_monte_carlo", substitution=substitution, budget=Budget(4, 50, 50))
    error = torch.hypot(found.standard_error, one.standard_error)
    assert ((found.log_evidence - one.log_evidence) / error).abs().max() < limit(3)
    with pytest.raises(SettingsError, match="kappa"):
        compare_topologies(FOUR, topologies, substitution=HKY85())


def test_the_table_the_sample_and_the_plot():
    found = compared(FOUR, num_draws=500)
    table = found.to_pandas()
    assert table["log_evidence"].is_monotonic_decreasing and str(found).startswith("tree ")
    best = Tree.from_newick(table["newick"][0])
    sample = found.to_sample()
    assert (
        sample.most_probable.tree(0).to_newick()
        == found.topologies.tree(int(found.posterior_probabilities.argmax())).to_newick()
    )
    assert set(best.taxa) == set("ABCD")
    assert sample.weights.tolist() == pytest.approx(found.posterior_probabilities.tolist(), abs=1e-13)
    assert len(found.plot(Figure().subplots()).get_yticklabels()) == 3


def test_doubtful_estimates_are_warned_of():
    with pytest.warns(SamplingWarning, match="effective weights"):
        compare_topologies(FOUR, all_topologies(FOUR.taxa), num_draws=60, progress=False)


def test_bad_input_is_named():
    topologies = all_topologies(FOUR.taxa)
    for trees, message in (
        ([topologies.tree(0)], "at least two"),
        ([topologies.tree(0), topologies.tree(1), topologies.tree(0)], "trees 0 and 2 are the same"),
        (all_topologies(FOUR.taxa, rooted=True), "rooted"),
    ):
        with pytest.raises(SettingsError, match=message):
            compare_topologies(FOUR, trees)
    with pytest.raises(TreeError, match="only in"):
        compare_topologies(FOUR, all_topologies("ABCE"))
    for weights in ([1.0], [1.0, -1.0, 1.0], [0.0] * 3, [math.nan, 1.0, 1.0]):
        with pytest.raises(SettingsError, match="prior_probabilities"):
            compare_topologies(FOUR, topologies, prior_probabilities=weights)
    with pytest.raises(SettingsError, match="num_draws"):
        compare_topologies(FOUR, topologies, num_draws=0)


def test_modes_of_gamma_densities_and_at_zero():
    shape = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.5, 30.0]], dtype=DOUBLE)
    rate = torch.tensor([[10.0, 5.0, 0.1], [0.5, 40.0, 2.0]], dtype=DOUBLE)
    modes = climb_to_modes(lambda x: dist.Gamma(shape, rate).log_prob(x).sum(-1), torch.full((2, 3), 0.1, dtype=DOUBLE))
    expected = (shape - 1) / rate
    assert bool(modes.converged.all())
    assert ((modes.position - expected) / expected.clamp(min=1.0)).abs().max() < 1e-6
    assert modes.position[0, 1] < 1e-6 and modes.position[1, 0] < 1e-6
    found_shape, found_rate = gamma_laplus(modes.position, modes.gradient, modes.second)
    assert ((found_shape - shape) / shape).abs().max() < 1e-5 and ((found_rate - rate) / rate).abs().max() < 1e-5


def test_the_mode_of_the_primates():
    alignment, tree = primates()
    model = TreeModel(alignment, tree)

    def log_density(x):
        prior = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1)
        return model.log_likelihood(x) + prior

    modes = climb_to_modes(log_density, torch.full((1, tree.num_edges), 0.05, dtype=DOUBLE))
    assert modes.value.item() == pytest.approx(-6390.0879, abs=5e-5)  # published with four decimals
    assert modes.gradient.abs().max() < 1e-2
