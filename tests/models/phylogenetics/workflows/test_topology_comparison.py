"""Evidence of many topologies against exact quadrature, and the search for modes."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from quartet_quadrature import evidence_of_general_model
from scipy.stats import chi2
from tree_quadrature import log_evidence, log_evidence_with_kappa

from bayeskit._core.statistics import (
    independent_log_mean_exp_error,
    log_mean_exp_error,
    mean_error,
    pareto_shape,
    stratified_log_mean_exp_error,
)
from bayeskit.errors import SamplingWarning, SettingsError, TreeError
from bayeskit.inference.evidence import Budget, Evidence
from bayeskit.inference.evidence._laplus import match_gamma, positive_modes
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    K80,
    Alignment,
    ForestLikelihood,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    SubsplitBayesianNetwork,
    Topologies,
    Tree,
    TreeModel,
    TreeSample,
    all_topologies,
    primates,
)
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
from bayeskit.models.phylogenetics._parameters import FreeParameters
from bayeskit.models.phylogenetics.workflows import _topology_comparison as defence
from bayeskit.models.phylogenetics.workflows import _topology_comparison as topology_comparison
from bayeskit.models.phylogenetics.workflows import compare_topologies
from bayeskit.models.phylogenetics.workflows._topology_comparison import (
    JointProposal,
    TopologyComparison,
    share_of_tail,
)
from bayeskit.workflows._bayes_factors import ModelComparison

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


@pytest.mark.calibration
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


@pytest.mark.calibration
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
    monkeypatch.setattr(topology_comparison, "forest_likelihood", lambda a, s, *_, **__: ForestLikelihood(a, s))
    found = compared(FIFTEEN_SITES, num_draws=20_000, site_rates=rates)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() > limit(3)
    assert ((found.log_evidence - one_rate) / found.standard_error).abs().max() < limit(3)


def test_a_free_kappa_is_integrated_over(limit, monkeypatch):
    """Against quadrature over lengths and kappa; a lost Jacobian is noticed."""
    few, topologies = FIVE.select(list("ABCD")), all_topologies("ABCD")
    truth = log_evidence_with_kappa(few, topologies)
    found = compared(few, substitution=K80(), num_draws=10_000)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() < limit(3)
    assert (truth.softmax(0) * found.standard_error).max() < 0.02
    original = FreeParameters.log_prior
    monkeypatch.setattr(FreeParameters, "log_prior", lambda self, u: original(self, u) - u.sum(-1))
    wrong = compared(few, substitution=K80(), num_draws=10_000)
    assert ((wrong.log_evidence - truth) / wrong.standard_error).abs().max() > limit(3)


@pytest.mark.calibration
def test_all_free_parameters_of_a_large_model(limit):
    """Against quadrature over lengths and quasi-random points of the parameters, with another likelihood."""
    few = FIVE.select(list("ABCD")).select_sites([0, 1, 4])
    two = Topologies.from_trees([Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,C),B,D);")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        found = compare_topologies(
            few, two, num_draws=4000, substitution=GTR(), site_rates=GammaRates(num_categories=2), progress=False
        )
    for order, z in zip(("ABCD", "ACBD"), found.comparison.results.values(), strict=True):
        value, exact_error = evidence_of_general_model(few.select(list(order)))
        error = math.hypot(z.standard_error, exact_error / value)
        # The error of the quadrature is a standard deviation of 8 replicates.
        assert abs(z.log_evidence - math.log(value)) < limit(2, dof=7) * error and error < 0.06


def test_parameters_with_strange_priors():
    """A prior without a closed form in its coordinates, one of a range, and one without draws."""
    kappa = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Gamma(torch.tensor([2.0, 9.0]), 1.0))
    found = compared(FOUR, num_draws=200, substitution=K80(kappa), site_rates=InvariantSites(dist.Uniform(0.0, 0.5)))
    assert found.log_evidence.isfinite().all()
    improper = dist.ImproperUniform(dist.constraints.positive, (), ())
    with pytest.raises(SettingsError, match="kappa: ImproperUniform cannot be sampled"):
        compared(FOUR, substitution=K80(improper))


def test_a_proposal_that_is_not_what_was_drawn_from_is_noticed(limit, monkeypatch):
    """The mutation: draws 8 % longer than their density says."""
    original = JointProposal.sample

    def longer(*arguments):
        x, u, part = original(*arguments)
        return 1.08 * x, u, part

    monkeypatch.setattr(JointProposal, "sample", longer)
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    found = compared(FOUR, num_draws=20_000, seed=1)
    assert ((found.log_evidence - truth) / found.standard_error).abs().max() > limit(3)


def proposal_of(shape, rate, prior, parameters=None, dependence=0.0):
    """Lengths and parameters of which each depends on those before it."""
    shape, rate = torch.tensor(shape, dtype=DOUBLE), torch.tensor(rate, dtype=DOUBLE)
    parameters = FreeParameters(JC69(), None) if parameters is None else parameters
    size = parameters.dim + len(shape)
    precision = torch.cat([torch.full((parameters.dim,), 3.0, dtype=DOUBLE), shape]).diag()
    precision = precision + dependence * torch.ones(size, size, dtype=DOUBLE)
    return JointProposal.matched(shape, rate, prior, parameters, torch.ones(parameters.dim, dtype=DOUBLE), precision)


def test_the_proposal_is_a_distribution(limit):
    """Weights of a known density have mean one, and a bound although its tail is heavier than the gamma's."""
    proposal = proposal_of([1.0, 3.0], [20.0, 8.0], dist.Exponential(torch.tensor(100.0, dtype=DOUBLE)))
    x, u, _ = proposal.sample(40_000, torch.Generator().manual_seed(0))
    log_weights = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1) - proposal.log_prob(x, u)
    weights = log_weights.exp()
    assert abs(float((weights.mean() - 1) / (weights.std() / 200))) < limit()
    # The density is at most 2.4 times that of the heavy tail, which four draws of five have.
    share = share_of_tail(2)
    assert weights.max() < (2.4 / share) ** 2 / 0.8 and (1 - share) ** 2 == pytest.approx(0.8, abs=1e-15)


@pytest.mark.parametrize("known", [True, False], ids=["right", "slopes forgotten"])
def test_lengths_and_parameters_that_depend_on_each_other_have_their_density(limit, known):
    """Weights of known densities have mean one; the mutation: dependence that the density does not know."""
    parameters = FreeParameters(HKY85(), GammaRates())
    prior = dist.Exponential(torch.tensor(12.0, dtype=DOUBLE))
    proposal = proposal_of([2.0, 3.0, 4.0], [20.0, 10.0, 40.0], prior, parameters, dependence=1.0)
    assert proposal.slopes.abs().max() > 0.1
    x, u, _ = proposal.sample(40_000, torch.Generator().manual_seed(0))
    if not known:
        proposal = replace(proposal, slopes=torch.zeros_like(proposal.slopes))
    numbers = torch.tensor([3.0, 20.0, 1.0, 0.5], dtype=DOUBLE)
    log_target = dist.Gamma(*numbers[:2]).log_prob(x).sum(-1) + dist.Normal(*numbers[2:]).log_prob(u).sum(-1)
    weights = (log_target - proposal.log_prob(x, u)).exp()
    assert (abs(float((weights.mean() - 1) / (weights.std() / 200))) < limit()) == known


def test_a_proposal_finds_gamma_distributions_from_draws(limit, monkeypatch):
    """Also from weighted draws of a density without a mean, and without any draw of positive density."""
    monkeypatch.setattr(topology_comparison, "_STEADY", 0.1)  # next to nothing is kept of the previous moments
    shape, rate = (torch.tensor(value, dtype=DOUBLE) for value in ([0.1, 3.0], [20.0, 8.0]))
    x = torch.distributions.Gamma(shape, rate)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = x.sample((20, 5000))
    start = proposal_of([1.0, 1.0], [1.0, 1.0], dist.Exponential(10.0))
    none = torch.zeros(5000, 0, dtype=DOUBLE)
    found = [start.refitted(one, none, torch.zeros(5000, dtype=DOUBLE)) for one in draws]
    for name, exact in (("shape", shape), ("rate", rate)):
        one = torch.stack([getattr(proposal, name) for proposal in found])
        z = (one.log().mean(0) - exact.log()) / one.log().std(0) * math.sqrt(20)
        assert z.abs().max() < limit(4, dof=19)
    wide = torch.tensor([[1e-3, 1e-3], [1e90, 1e-3]], dtype=DOUBLE)
    for log_weights in ([-800.0, 0.0], [-math.inf, -math.inf]):
        kept = start.refitted(wide, none[:2], torch.tensor(log_weights, dtype=DOUBLE))
        assert kept.shape.isfinite().all() and (kept.rate > 0).all()


def test_a_proposal_finds_parameters_from_draws(limit):
    """The mean and covariance of weighted draws."""
    proposal = proposal_of([2.0], [9.0], dist.Exponential(10.0), FreeParameters(HKY85(), None))
    generator = torch.Generator().manual_seed(0)
    u = 0.3 + torch.randn(20_000, 4, dtype=DOUBLE, generator=generator) @ torch.eye(4, dtype=DOUBLE).cumsum(0).mT
    found = proposal.refitted(torch.full((20_000, 1), 0.2, dtype=DOUBLE), u, torch.zeros(20_000, dtype=DOUBLE))
    covariance = torch.minimum(*torch.meshgrid(*[torch.arange(1.0, 5.0, dtype=DOUBLE)] * 2, indexing="ij"))
    # The previous moments weigh fifty draws.
    slack = 50 / 20_000 * 5
    assert ((found.centre - 0.3).abs() < limit(4) * (covariance.diagonal() / 20_000).sqrt() + slack).all()
    assert ((found.factor @ found.factor.mT - covariance).abs() < limit(16) * 4 * math.sqrt(2 / 20_000) + slack).all()


def test_draws_go_where_they_matter():
    """As many as give the sum the error of equally many each, in proportion to mean times relative deviation."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.5, 0.5, 1.0, 0.5], dtype=DOUBLE)[:, None]
    noise = scale * torch.randn(4, 1000, dtype=DOUBLE, generator=generator)
    log_weights = torch.tensor([0.0, -1.0, -1.0, -20.0], dtype=DOUBLE)[:, None] + noise
    blocks, size = topology_comparison._allocated(log_weights, 20_000)
    draws = (blocks * size).to(DOUBLE)
    weights = log_weights.exp()
    deviation = weights.std(-1)
    assert size == 1000 and draws[-1] == 2000  # a tenth
    assert (draws[:-1] / deviation[:-1] / (draws[0] / deviation[0]) - 1).abs().max() < 0.2  # whole blocks
    variance = (deviation.square() / draws).sum() / (deviation.square() / 20_000).sum()
    assert 0.85 < variance <= 1.0 + 1e-9
    for number in (1, 60, 1000, 1001, 2500):
        blocks, size = topology_comparison._allocated(log_weights, number)
        assert size <= 1000 and number <= int(blocks[0]) * size < 2.5 * number + 1000
    nothing = torch.full((2, 1000), -torch.inf, dtype=DOUBLE)
    assert topology_comparison._allocated(nothing, 500)[0].tolist() == [1, 1]


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("model", "least"),
    [({}, 2**20), ({"substitution": K80(), "site_rates": GammaRates(0.5)}, 2**22)],
    ids=["JC69", "K80"],
)
def test_results_do_not_depend_on_the_memory(model, least, monkeypatch):
    settings = {"num_draws": 300, **model}
    some = all_topologies(FIVE.taxa)[:3]
    found = []
    for size in (topology_comparison._BYTES, least):  # in the lesser, draws and modes are done in several parts
        monkeypatch.setattr(topology_comparison, "_BYTES", size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            found.append(compare_topologies(FIVE, some, progress=False, **settings))
    whole, parts = found
    for name, z in whole.comparison.results.items():
        other = parts.comparison[name]
        # Vectors are done several at a time, whose number changes the rounding.
        assert abs(z.log_evidence - other.log_evidence) < 1e-8
        assert abs(z.standard_error - other.standard_error) < 1e-8
        assert z.num_evaluations == other.num_evaluations
        assert z.diagnostics == pytest.approx(other.diagnostics, rel=1e-7)


def test_the_mass_of_other_topologies_is_added(limit):
    """All topologies but one, and its probability: the total over all."""
    everything = all_topologies("ABCD")
    truth = log_evidence(FOUR, everything)
    found = compare_topologies(FOUR, everything[:2], num_draws=5000, progress=False)
    exact = float(truth.softmax(0)[:2].sum())
    total = found.total_log_evidence_with(Estimate(exact, 0.0))
    assert total.standard_error == found.total_log_evidence.standard_error
    assert abs(total.value - float(truth.logsumexp(0)) + math.log(3)) < limit() * total.standard_error
    shares = (0.02, -0.02, 0.01, -0.01)
    turned = everything.with_taxa("DBCA")[0]
    p = truth.softmax(0)
    runs = [TreeSample.from_topologies(turned, [float(p[0]) + d, float(p[1]), float(p[2]) - d]) for d in shares]
    mass = found.mass_in(runs)
    assert mass.value == pytest.approx(exact, abs=1e-12)
    assert mass.standard_error == pytest.approx(torch.tensor(shares).std().item() / 2, rel=1e-6)
    # Two chains that happen to agree: their error is that of autocorrelated draws, not zero.
    states = [0] * 60 + [2] * 20 + [1] * 80 + [2] * 20 + [0] * 20
    chains = [TreeSample.from_topologies(turned[order]) for order in (states, states[::-1])]
    agreed = found.mass_in(chains)
    among = torch.tensor([[state < 2 for state in order] for order in (states, states[::-1])]).double()
    assert agreed.value == pytest.approx(0.8) and agreed.standard_error == pytest.approx(float(mean_error(among)))
    assert agreed.standard_error > 3 * math.sqrt(0.8 * 0.2 / 400)
    assert found.mass_in([TreeSample.from_topologies(turned[[0] * 100])] * 2) == Estimate(pytest.approx(1.0), 1 / 200)
    networks = [SubsplitBayesianNetwork.fit(run) for run in runs]
    assert found.mass_in(networks).value == pytest.approx(exact, abs=1e-3)  # fitted until little changes
    with_error = found.total_log_evidence_with(runs)
    assert with_error.value == pytest.approx(total.value, abs=1e-12)
    assert with_error.standard_error == pytest.approx(
        math.hypot(total.standard_error, mass.standard_error / mass.value), abs=1e-12
    )
    for wrong, message in (
        (runs[:1], "one run gives no standard error"),
        (["a", "b"], "str is neither"),
        (Estimate(0.0, 0.1), "not an estimate of a probability"),
        (Estimate(1.2, 0.1), "not an estimate of a probability"),
        (Estimate(0.5, math.nan), "not an estimate of a probability"),
    ):
        with pytest.raises(SettingsError, match=message):
            found.total_log_evidence_with(wrong)


@pytest.mark.calibration
def test_runs_that_chose_the_topologies_do_not_weigh_them_too_much(calibrated):
    """Frequent by chance: the share of the chosen in the same draws is too large, that across runs is not."""
    topologies, rng = all_topologies("ABCDEF"), np.random.default_rng(2)
    log_p = np.log(rng.dirichlet(np.full(len(topologies), 0.7)))
    scores, excess = [], []
    for _ in range(200):
        draws = rng.choice(len(topologies), (2, 150), p=np.exp(log_p))
        runs = [TreeSample.from_topologies(topologies[row]) for row in draws]
        pooled = TreeSample.pooled(runs)
        places = pooled.credible_set(0.8)
        evidence = [float(log_p[draws.ravel()[list(pooled.index).index(place)]]) for place in places]
        results = {f"tree {k + 1}": Evidence("exact", one, 0.0, 1) for k, one in enumerate(evidence)}
        equal = dict.fromkeys(results, 1 / len(results))
        found = TopologyComparison(pooled.topologies[places], ModelComparison(results, equal, {}), {})
        mass, truth = found.mass_in(runs, chosen=True), float(np.exp(evidence).sum())
        scores.append((mass.value - truth) / mass.standard_error)
        excess.append((found.mass_in(runs).value - truth) / mass.standard_error)
    assert calibrated(scores)
    assert not calibrated(excess) and np.mean(excess) > 1


#: Exact evidence by Gauss quadrature for the measure of exp(-4 t / 3), its moments with fifty digits.
HARD_PRIORS = {
    "a power of -0.9 at zero": (dist.Gamma(0.1, 10.0), (-98.2289786138383, -98.52216980827659, -97.96032352071008)),
    "a power of -0.5 at zero": (dist.Gamma(0.5, 5.0), (-88.88555444400338, -89.21855933973448, -88.49029385191842)),
    "long branches": (dist.Exponential(0.1), (-100.18049234012152, -100.28924915921188, -99.77604909801892)),
    "no mean": (dist.HalfCauchy(0.1), (-88.13044688894985, -88.45227924784746, -87.70243149004122)),
}


@pytest.mark.calibration
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

    def found_once(*arguments, **settings):
        first.extend(() if first else [found_anew(*arguments, **settings)])
        return first[0]

    found_anew = topology_comparison.first_proposals
    monkeypatch.setattr(topology_comparison, "first_proposals", found_once)
    found = [compared(FOUR, num_draws=1000, seed=seed) for seed in range(num_seeds)]
    return float(sum(((one.log_evidence - truth) / one.standard_error).square().sum() for one in found))


@pytest.mark.calibration
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


@pytest.mark.calibration
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


@pytest.mark.calibration
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
    prior = GammaDirichlet(torch.tensor([1.0, 3.0, 2.0], dtype=DOUBLE), length_shape=2.0, length_rate=1.0)
    proposal = proposal_of([1.0, 3.0, 2.0], [10.0, 30.0, 20.0], prior)
    x, u, _ = proposal.sample(40_000, torch.Generator().manual_seed(0))
    log_weights = dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(x).sum(-1) - proposal.log_prob(x, u)
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


@pytest.mark.calibration
def test_any_other_estimator_works_on_one_topology_after_another(limit):
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa))
    found = compared(FOUR, method="naive_monte_carlo", budget=Budget(4, 50, 200))
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


@pytest.mark.calibration
def test_models_with_other_rates_are_weighed_as_one_topology_after_another_is(limit):
    substitution = HKY85(4.0, [0.3, 0.3, 0.2, 0.2])
    found = compared(FOUR, num_draws=5000, substitution=substitution)
    one = compared(FOUR, method="naive_monte_carlo", substitution=substitution, budget=Budget(4, 50, 200))
    error = torch.hypot(found.standard_error, one.standard_error)
    assert ((found.log_evidence - one.log_evidence) / error).abs().max() < limit(3)


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
    assert len(told) == 1 and all(z.num_evaluations > 1060 for z in found.comparison.results.values())


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
    with pytest.raises(SettingsError, match="tree 1 and tree 3 are the same"):
        compare_topologies(FOUR, [topologies.tree(place) for place in (0, 1, 0)])
    with pytest.raises(SettingsError, match="at least two"):
        compare_topologies(FOUR, [topologies.tree(0)], "naive_monte_carlo")
    with pytest.raises(TreeError, match="There is no tree"):
        compare_topologies(FOUR, [])
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
    modes = positive_modes(lambda x: dist.Gamma(shape, rate).log_prob(x).sum(-1), torch.full((2, 3), 0.1, dtype=DOUBLE))
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

    modes = positive_modes(log_density, torch.full((1, tree.num_edges), 0.05, dtype=DOUBLE))
    assert modes.value.item() == pytest.approx(-6390.0879, abs=5e-5)  # published with four decimals
    assert modes.gradient.abs().max() < 1e-2


def test_the_share_beyond_the_largest_weight_is_that_of_the_distribution(limit):
    k, n = 0.5, 100_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = u**-k
    exact = float(weights.max() / weights.sum()) / (1 - k)  # beyond w, a Pareto distribution has the mean w / (1 - k)
    # The fitted shape has a standard error of (1 + k) / sqrt(m), of m weights; that of 1 / (1 - k) is relative to it.
    relative = (1 + k) / math.sqrt(3 * math.sqrt(n)) / (1 - k)
    assert abs(defence._share_beyond_the_largest(weights.log()) / exact - 1) < limit() * relative
    assert defence._share_beyond_the_largest(-1.5 * u.log()) == math.inf
    # A tail of that shape on weights that differ among themselves by much more.
    heavy, slight = -0.8 * u.log(), (1 + 0.5 * (torch.arange(n) % 2) + 1e-4 * u**-0.8).log()
    assert min(pareto_shape(heavy), pareto_shape(slight)) > 0.7
    for log_weights, matters in ((heavy, True), (slight, False)):
        error = float(log_mean_exp_error(log_weights[None]))
        assert (defence._share_beyond_the_largest(log_weights) > error) is matters
