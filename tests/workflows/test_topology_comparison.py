"""Evidence of many topologies against exact quadrature, and the search for modes."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import chi2
from tree_quadrature import log_evidence

from bayeskit.core.statistics import independent_log_mean_exp_error, stratified_log_mean_exp_error
from bayeskit.errors import SamplingWarning, SettingsError, TreeError
from bayeskit.inference.evidence import Budget
from bayeskit.inference.evidence.laplus import climb_to_modes, match_gamma
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    ForestLikelihood,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Topologies,
    Tree,
    TreeModel,
    all_topologies,
    primates,
)
from bayeskit.workflows.phylogenetics import compare_topologies, topology_comparison
from bayeskit.workflows.phylogenetics import topology_comparison as defence
from bayeskit.workflows.phylogenetics.topology_comparison import BranchLengthProposal, share_of_tail

DOUBLE = torch.float64
SEQUENCES = {
    "A": "GTCATTATCCCGATAAAAAA",
    "B": "CTCATTTTCCCGAGGAAAGT",
    "C": "ATCACTTTCTCGGTGAAAGC",
    "D": "TTCATTCTRTCG-GCAAAGG",
}
FOUR = Alignment.from_sequences(SEQUENCES)
FIFTEEN_SITES = Alignment.from_sequences(
    {"A": "GTCAAATCCCGGGTT", "B": "CTCAAATCCCGGGTT", "C": "ATCAAATCTCGGATT", "D": "TTCAAATCTCGGACT"}
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
    assert z[trusted].abs().max() < limit(len(truth)) and (p * found.standard_error)[trusted].max() < 0.01
    assert ((found.posterior_probabilities - p) / found.posterior_errors)[trusted].abs().max() < limit(len(truth))
    assert found.posterior_probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert (p * (p.log() - found.posterior_probabilities.log())).sum() < 1e-3


def test_evidence_with_invariant_sites_is_exact(limit, monkeypatch):
    """Three taxa by hand, and by either way of estimating; a comparison that forgets the rates is noticed."""
    alike, p = Alignment.from_sequences({"A": "A", "B": "A", "C": "A"}), 0.2
    mean = (7.5 * (1 - p)) / (7.5 * (1 - p) + 1)
    exact = p / 4 + (1 - p) * (1 + 9 * mean**2 + 6 * mean**3) / 64
    assert log_evidence(alike, all_topologies("ABC"), p).exp().item() == pytest.approx(exact, rel=1e-13)
    truth = log_evidence(FIFTEEN_SITES, all_topologies("ABCD"), p)
    one_rate = log_evidence(FIFTEEN_SITES, all_topologies("ABCD"))
    rates = InvariantSites(p)
    batch = compared(FIFTEEN_SITES, num_draws=20_000, site_rates=rates)
    single = compared(FIFTEEN_SITES, method="naive_monte_carlo", budget=Budget(4, 50, 200), site_rates=rates)
    for found in (batch, single):
        assert ((found.log_evidence - truth) / found.standard_error).abs().max() < limit(6)
    monkeypatch.setattr(topology_comparison, "ForestLikelihood", lambda a, s, site_rates: ForestLikelihood(a, s))
    found = compared(FIFTEEN_SITES, num_draws=20_000, site_rates=rates)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() > limit(3)
    assert ((found.log_evidence - one_rate) / found.standard_error).abs().max() < limit(3)


def test_rates_with_a_prior_are_sampled_by_other_methods_only():
    with pytest.raises(SettingsError, match=r"parameters \['shape'\]"):
        compared(FOUR, site_rates=GammaRates())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        found = compare_topologies(
            FOUR,
            all_topologies(FOUR.taxa)[:2],
            method="naive_monte_carlo",
            budget=Budget(2, 20, 20),
            site_rates=InvariantSites(),
            progress=False,
        )
    assert found.log_evidence.isfinite().all()


def test_a_proposal_that_is_not_what_was_drawn_from_is_noticed(limit, monkeypatch):
    """The mutation: draws 8 % longer than their density says."""
    original = BranchLengthProposal.sample
    monkeypatch.setattr(BranchLengthProposal, "sample", lambda *args: (1.08 * original(*args)[0], original(*args)[1]))
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    found = compared(FOUR, num_draws=20_000, seed=1)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() > limit(3)


def test_the_proposal_is_a_distribution(limit):
    """Weights of a known density have mean one, and a bound although its tail is heavier than the gamma's."""
    shape, rate = torch.tensor([[1.0, 3.0]], dtype=DOUBLE), torch.tensor([[20.0, 8.0]], dtype=DOUBLE)
    proposal = BranchLengthProposal(shape, rate, dist.Exponential(torch.tensor(100.0, dtype=DOUBLE)))
    x, _ = proposal.sample(40_000, torch.Generator().manual_seed(0))
    log_weights = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1) - proposal.log_prob(x)
    weights = log_weights.exp()
    assert abs(float((weights.mean() - 1) / (weights.std() / 200))) < limit()
    # The density is at most 2.4 times that of the heavy tail, which four draws of five have.
    share = share_of_tail(2)
    assert weights.max() < (2.4 / share) ** 2 / 0.8 and (1 - share) ** 2 == pytest.approx(0.8, abs=1e-15)


def test_a_proposal_finds_gamma_distributions_from_draws(limit):
    """Also from weighted draws of a density without a mean; nothing is learned from one effective draw."""
    shape, rate = (torch.tensor(value, dtype=DOUBLE).expand(20, 2) for value in ([0.1, 3.0], [20.0, 8.0]))
    x = torch.distributions.Gamma(shape, rate)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = x.sample((5000,))
    start = BranchLengthProposal(torch.ones_like(shape), torch.ones_like(rate), dist.Exponential(10.0))
    found = start.refitted(draws, torch.zeros(5000, 20, dtype=DOUBLE))
    for one, exact in ((found.shape, shape), (found.rate, rate)):
        z = (one.log().mean(0) - exact[0].log()) / one.log().std(0) * math.sqrt(20)
        assert z.abs().max() < limit(4, dof=19)
    wide = torch.tensor([[[1e-3, 1e-3]], [[1e90, 1e-3]]], dtype=DOUBLE)
    kept = BranchLengthProposal(shape[:1], rate[:1], start.prior).refitted(
        wide, torch.tensor([[-800.0], [0.0]], dtype=DOUBLE)
    )
    assert kept.shape.isfinite().all() and (kept.rate > 0).all()


#: Exact evidence by Gauss quadrature for the measure of exp(-4 t / 3), its moments with fifty digits.
HARD_PRIORS = {
    "a power of -0.9 at zero": (dist.Gamma(0.1, 10.0), (-98.2289786138383, -98.52216980827659, -97.96032352071008)),
    "a power of -0.5 at zero": (dist.Gamma(0.5, 5.0), (-88.88555444400338, -89.21855933973448, -88.49029385191842)),
    "long branches": (dist.Exponential(0.1), (-100.18049234012152, -100.28924915921188, -99.77604909801892)),
    "no mean": (dist.HalfCauchy(0.1), (-88.13044688894985, -88.45227924784746, -87.70243149004122)),
}


@pytest.mark.parametrize(("prior", "exact"), HARD_PRIORS.values(), ids=HARD_PRIORS)
def test_priors_that_are_infinite_at_zero_or_have_heavy_tails(prior, exact, limit):
    alignment = Alignment.from_sequences({**SEQUENCES, "D": "TTCATTCTATCG-GCAAAGG"})
    topologies = Topologies.from_trees(
        [Tree.from_newick(text) for text in ("(A,C,(B,D));", "(A,D,(B,C));", "(A,B,(C,D));")]
    )
    z = []
    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            found = compare_topologies(
                alignment, topologies, branch_length_prior=prior, num_draws=5000, seed=seed, progress=False
            )
        trusted = torch.tensor([one.trusted for one in found.comparison.results.values()])
        z += ((found.log_evidence - torch.tensor(exact, dtype=DOUBLE)) / found.standard_error)[trusted].tolist()
    assert len(z) >= 5 and max(map(abs, z)) < limit(len(z))


def test_a_prior_that_is_infinite_at_zero_taken_for_another_is_noticed(limit, monkeypatch):
    """The mutation: gamma distributions matched at the mode itself, which is at zero whatever the data."""
    prior, exact = HARD_PRIORS["a power of -0.9 at zero"]
    monkeypatch.setattr(topology_comparison, "_is_infinite_at_zero", lambda *arguments: False)
    with pytest.raises(AssertionError):
        test_priors_that_are_infinite_at_zero_or_have_heavy_tails(prior, exact, limit)


def sum_of_squares(num_seeds, monkeypatch):
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    # The first proposal is the same whatever the seed, and its modes take longer than the draws.
    first = []

    def found_once(*arguments):
        first.extend(() if first else [found_anew(*arguments)])
        return first[0]

    found_anew = topology_comparison._first_proposal
    monkeypatch.setattr(topology_comparison, "_first_proposal", found_once)
    found = [compared(FOUR, num_draws=1000, seed=seed) for seed in range(num_seeds)]
    return float(sum(((one.log_evidence - truth) / one.standard_error).square().sum() for one in found))


def test_errors_are_neither_too_small_nor_too_large(monkeypatch):
    """Draws of the prior weigh nothing here: were their number left to chance, errors would be larger by a third."""
    assert chi2.isf(1 - 5e-6, 3 * 120) < sum_of_squares(120, monkeypatch) < chi2.isf(5e-6, 3 * 120)


def test_fixed_shares_are_worth_something(monkeypatch):
    """With many sites draws of the prior weigh nothing: were their number left to chance, errors would be larger."""
    by_chance = []

    def both(weights, part):
        by_chance.append(float(independent_log_mean_exp_error(weights[None])))
        return stratified_log_mean_exp_error(weights, part)

    monkeypatch.setattr(topology_comparison, "stratified_log_mean_exp_error", both)
    apes = primates()[0].select(["Hylobates", "Pongo", "Gorilla", "Homo_sapiens", "Pan"])
    found = compared(apes, num_draws=2000)
    assert float((torch.tensor(by_chance, dtype=DOUBLE) / found.standard_error).min()) > 1.08


#: Few sites that tell little, and the evidence under a uniform prior up to ten, of a tensor grid of Gauss-Legendre
#: points, 32 a branch; with 28 the last digit is the same.
TEN_SITES = Alignment.from_sequences({"A": "AAACCGTTAC", "B": "AAACCGTAAC", "C": "ACACGGTATC", "D": "ACACGGTACG"})
UP_TO_TEN = (-51.1626, -54.1734, -54.0337)


@pytest.mark.filterwarnings("ignore:the evidence of:bayeskit.errors.SamplingWarning")
def test_branches_that_are_all_long_together(limit):
    """Most of the prior, and .3 of the evidence in nats, is where sites are random whatever the tree is.

    An estimate whose largest weights dominate says so, with some seeds; its error has to be right then, too.
    """
    topologies = Topologies.from_trees(
        [Tree.from_newick(f"((A,{x[0]}),{x[1]},{x[2]});") for x in ("BCD", "CBD", "DBC")]
    )
    z = []
    for seed in range(5):
        found = compare_topologies(
            TEN_SITES, topologies, branch_length_prior=dist.Uniform(0.0, 10.0), seed=seed, progress=False
        )
        z += ((found.log_evidence - torch.tensor(UP_TO_TEN, dtype=DOUBLE)) / found.standard_error).tolist()
    assert max(map(abs, z)) < limit(len(z))


def test_proposals_without_the_prior_miss_branches_that_are_all_long(limit, monkeypatch):
    """The mutation: branch lengths that are drawn from a heavy tail, but each by itself."""
    monkeypatch.setattr(defence, "PRIOR", 1e-12)
    monkeypatch.setattr(defence, "HALF", 1e-12)
    with pytest.warns(SamplingWarning), pytest.raises(AssertionError):
        test_branches_that_are_all_long_together(limit)


def test_a_prior_without_draws_is_refused():
    improper = dist.ImproperUniform(dist.constraints.positive, (), ())
    with pytest.raises(SettingsError, match="ImproperUniform cannot be sampled"):
        compared(FOUR, branch_length_prior=improper)


def test_lengths_of_one_prior_for_all_have_their_density(limit):
    """Weights of a known density have mean one where lengths depend on each other, and the prior draws them whole."""
    numbers = torch.tensor([[1.0, 3.0, 2.0]], dtype=DOUBLE)
    proposal = BranchLengthProposal(
        numbers, 10 * numbers, GammaDirichlet(numbers[0], length_shape=2.0, length_rate=1.0)
    )
    x, _ = proposal.sample(40_000, torch.Generator().manual_seed(0))
    log_weights = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1) - proposal.log_prob(x)
    weights = log_weights.exp()
    assert abs(float((weights.mean() - 1) / (weights.std() / 200))) < limit()
    assert 0.08 < float((x.sum(-1) > 1.0).double().mean()) < 0.2


def test_the_sum_over_all_topologies_and_the_file(tmp_path):
    found = compared(FOUR, num_draws=500)
    total = found.total_log_evidence
    assert total.value == pytest.approx(float(found.log_evidence.logsumexp(0)) - math.log(3), abs=1e-12)
    assert 0 < total.standard_error < float(found.standard_error.max())
    path = tmp_path / "topologies.csv"
    found.to_csv(path)
    assert "newick" in path.read_text().splitlines()[0] and repr(found) == str(found.comparison)


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


def test_doubtful_estimates_are_warned_of_once():
    with pytest.warns(SamplingWarning, match="3 of 3 topologies.*effective weights") as told:
        found = compare_topologies(FOUR, all_topologies(FOUR.taxa), num_draws=60, progress=False)
    assert len(told) == 1 and all(z.num_evaluations > 3060 for z in found.comparison.results.values())


def test_weights_that_are_not_a_number_are_no_zeros_in_silence(monkeypatch):
    original = ForestLikelihood.log_likelihood

    def broken(self, topologies, lengths, **parameters):
        found = original(self, topologies, lengths, **parameters)
        return torch.where(lengths[..., 0] > 0.3, torch.nan, found)

    monkeypatch.setattr(ForestLikelihood, "log_likelihood", broken)
    found = compared(FOUR, num_draws=500)
    assert all("NaN" in z.warnings[0] for z in found.comparison.results.values())


def test_bad_input_is_named():
    topologies = all_topologies(FOUR.taxa)
    for trees, message in (
        ([topologies.tree(0)], "at least two"),
        ([topologies.tree(0), topologies.tree(1), topologies.tree(0)], "tree 1 and tree 3 are the same"),
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
    found_shape, found_rate = match_gamma(modes.position, modes.gradient, modes.second)
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
