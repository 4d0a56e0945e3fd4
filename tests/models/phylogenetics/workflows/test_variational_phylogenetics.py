"""Variational inference over trees against enumerated posteriors; resuming, output and bad input."""

import itertools
import math
import warnings
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from tree_quadrature import log_evidence

from bayeskit.errors import CheckpointError, LossError, SamplingWarning, SettingsError, TreeError
from bayeskit.inference.objectives import ELBO, IWAE, Linear, ReweightedWakeSleep
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    SubsplitBayesianNetwork,
    TreeSample,
    all_topologies,
)
from bayeskit.models.phylogenetics.workflows import compare_topologies
from bayeskit.models.phylogenetics.workflows._variational import (
    FlowLengths,
    LearningRates,
    LogNormalLengths,
    variational_inference,
)
from bayeskit.models.phylogenetics.workflows._variational import (
    _inference as inference,
)
from bayeskit.models.phylogenetics.workflows._variational._learning_rates import BudgetPace

DOUBLE = torch.float64
FOUR = Alignment.from_sequences(
    {"A": "GTCATTATCCCGATAAAAAA", "B": "CTCATTTTCCCGAGGAAAGT", "C": "ATCACTTTCTCGGTGAAAGC", "D": "TTCATTCTRTCG-GCAAAGG"}
)
SIX = Alignment.from_sequences(
    {
        "A": "GTATCGGCTACCGCACGTATCGTACTCTACTTACGCCGGC",
        "B": "GTATCGGCTACCGAACGAATAGTACCGTACTTTGCCGGGC",
        "C": "GTATCGGCCACCGCAAAAATAGTACCCCAGTACCGCGGGA",
        "D": "GTATCGGCGCCCGCAAATATAGTACCCTATTGCCGCAGGA",
        "E": "GTACCGGCTCTAGCAAAAATAGTACCCTCTTTACGGGGGA",
        "F": "CTACAAGCTCCAGCTAAAATACTACCCTCTTTCCGTGGCA",
    }
)


def fitted(alignment, topologies=None, **settings):
    support = SubsplitBayesianNetwork.from_topologies(topologies or all_topologies(alignment.taxa))
    return variational_inference(alignment, support, progress=False, **settings)


def kl(log_evidence, found):
    log_p = log_evidence.log_softmax(0)
    log_q = found.topologies.log_prob(all_topologies(found.topologies.taxa))
    return float((log_p.exp() * (log_p - log_q)).sum())


@pytest.fixture(scope="module")
def four():
    rates = LearningRates(0.03, 0.03, factor=0.5, every=200)
    return fitted(FOUR, num_steps=1000, learning_rates=rates, annealing=Linear(250, start=0.01))


@pytest.fixture(scope="module")
def exact():
    return log_evidence(FOUR, all_topologies(FOUR.taxa))


@pytest.mark.calibration
def test_three_topologies_are_those_of_quadrature(four, exact, limit):
    assert kl(exact, four) < 0.01
    found = four.log_evidence(8000)
    truth = float(exact.logsumexp(0)) - math.log(3)
    assert found.trusted and found.standard_error < 0.02
    assert abs(found.log_evidence - truth) < limit() * found.standard_error
    one, ten = four.lower_bound(1, 2000), four.lower_bound(10, 400)
    error = math.hypot(one.standard_error, ten.standard_error)
    assert one.value < ten.value + limit() * error and ten.value < truth + limit() * ten.standard_error


@pytest.mark.calibration
def test_importance_weights_correct_the_topologies(four, exact, limit):
    """What the weights make of draws is the exact posterior, each probability within its error."""
    drawn = four.weighted_trees(8000, seed=1)
    sample = TreeSample.from_topologies(drawn.topologies)
    weights = drawn.log_weight.softmax(0)
    for place, p in enumerate(exact.softmax(0).tolist()):
        same = (sample.topologies.children == all_topologies(FOUR.taxa).children[place]).all(axis=(1, 2))
        hit = torch.from_numpy(same[sample.index]).double()
        found = float(weights @ hit)
        error = float((weights.square() @ (hit - found).square()).sqrt())
        assert abs(found - p) < limit(3) * error


@pytest.mark.long
def test_a_hundred_topologies_of_six_taxa_by_reweighted_wake_sleep():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # of topologies that are next to impossible
        truth = compare_topologies(SIX, all_topologies(SIX.taxa), num_draws=1000, progress=False)
    probability, error = truth.posterior_probabilities, truth.posterior_errors
    assert error.max() < 0.01 and probability.max() < 0.7
    found = fitted(
        SIX,
        num_steps=1500,
        objective=ReweightedWakeSleep(20),
        learning_rates=LearningRates(0.1, 0.03, factor=0.5, every=250),
        annealing=Linear(100, start=0.01),
    )
    assert kl(truth.log_evidence, found) < 0.01


def test_a_prior_over_all_branch_lengths_and_another_substitution_model():
    prior = GammaDirichlet(torch.ones(5, dtype=DOUBLE), 2.0, 4.0)
    found = fitted(FOUR, num_steps=20, branch_length_prior=prior, substitution=HKY85(4.0, [0.3, 0.3, 0.2, 0.2]))
    assert found.num_steps == 20 and math.isfinite(found.lower_bound(1, 20).value)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("objective", "lengths"),
    [(IWAE(3), LogNormalLengths()), (ReweightedWakeSleep(3), LogNormalLengths(False)), (IWAE(3), FlowLengths())],
    ids=["bound", "wake", "flow"],
)
def test_a_run_goes_on_bit_for_bit(objective, lengths, tmp_path):
    settings = {"objective": objective, "lengths": lengths, "annealing": Linear(20, start=0.1), "seed": 3}
    whole = fitted(FOUR, num_steps=25, **settings)
    path = tmp_path / "run"
    fitted(FOUR, num_steps=11, checkpoint=path, **settings)
    rest = fitted(FOUR, num_steps=25, checkpoint=path, **settings)
    assert torch.equal(whole.parameters, rest.parameters) and torch.equal(whole.bounds, rest.bounds)
    assert not torch.equal(whole.parameters, fitted(FOUR, num_steps=25, **(settings | {"seed": 4})).parameters)
    with pytest.raises(CheckpointError, match="seed"):
        fitted(FOUR, num_steps=25, checkpoint=path, **(settings | {"seed": 4}))
    with pytest.raises(CheckpointError, match="another model or of other data"):
        fitted(FOUR, all_topologies("ABCD")[:2], num_steps=25, checkpoint=path, **settings)


@pytest.mark.calibration
def test_rates_over_sites_reach_the_evidence_and_the_checkpoint(limit, tmp_path):
    rates = LearningRates(0.05, 0.05, factor=0.5, every=80)
    found = fitted(FOUR, num_steps=320, learning_rates=rates, site_rates=InvariantSites(0.2)).log_evidence(4000)
    truth = log_evidence(FOUR, all_topologies(FOUR.taxa), 0.2)
    other = log_evidence(FOUR, all_topologies(FOUR.taxa))
    z = [(found.log_evidence - float(one.logsumexp(0)) + math.log(3)) / found.standard_error for one in (truth, other)]
    assert found.trusted and abs(z[0]) < limit() < abs(z[1])
    path = tmp_path / "run"
    fitted(FOUR, num_steps=2, checkpoint=path, site_rates=GammaRates(0.5))
    for others in (GammaRates(0.6), GammaRates(0.5, 3), InvariantSites(0.1, GammaRates(0.5)), None):
        with pytest.raises(CheckpointError, match="another model or of other data"):
            fitted(FOUR, num_steps=2, checkpoint=path, site_rates=others)


@pytest.mark.parametrize("kind", [dist.LogNormal, dist.Gamma])
def test_a_checkpoint_belongs_to_one_prior(kind, tmp_path):
    path, numbers = tmp_path / "run", torch.ones(2, 5, dtype=DOUBLE)
    for make in (lambda a, b: kind(a[0], b[0]), lambda a, b: kind(a, b).to_event(1)):
        path.unlink(missing_ok=True)
        fitted(FOUR, num_steps=2, checkpoint=path, branch_length_prior=make(*numbers))
        with pytest.raises(CheckpointError, match="another model or of other data"):
            fitted(FOUR, num_steps=2, checkpoint=path, branch_length_prior=make(numbers[0], 2 * numbers[1]))


def test_a_time_budget_shortens_the_annealing(monkeypatch, tmp_path):
    """By a clock that advances as if half of the steps fitted into the budget."""
    ticks = itertools.count()
    monkeypatch.setattr(inference, "BudgetPace", partial(BudgetPace, clock=lambda: 5e7 * next(ticks)))
    settings = {"num_steps": 40, "objective": IWAE(3), "learning_rates": LearningRates(0.01, 0.01, every=10)}
    found = fitted(FOUR, time_budget=1e9, **settings)
    expected = torch.arange(1, 41, dtype=DOUBLE) * 2
    # The budget is less the moments before training.
    assert (found.positions - expected.clamp(max=40)).abs().max() < 1e-3
    # What was recorded suffices to repeat it, also in two parts of which the second knows no budget.
    monkeypatch.setattr(inference, "by_steps", lambda iteration, before: float(found.positions[iteration]))
    again = fitted(FOUR, **settings)
    assert torch.equal(again.parameters, found.parameters) and torch.equal(again.bounds, found.bounds)
    for steps in (11, 40):
        part = fitted(
            FOUR, **(settings | {"num_steps": steps}), annealing=Linear(20, start=0.001), checkpoint=tmp_path / "x"
        )
    assert torch.equal(part.parameters, found.parameters) and torch.equal(part.positions, found.positions)
    # Given schedules are read step by step.
    monkeypatch.undo()
    assert fitted(FOUR, time_budget=1e6, annealing=Linear(20), **settings).positions.tolist() == list(range(40))


def test_a_resumed_budget_is_spread_over_the_rest():
    now = [3.0]
    pace = BudgetPace(10.0, 100, clock=lambda: now[0])
    found, position = [], 40.0  # reached by an earlier run
    for seconds, iteration in ((0.0, 7), (5.0, 8), (2.0, 9), (5.0, 75), (10.0, 76), (12.0, 77)):
        now[0] = 3.0 + seconds
        position = pace(iteration, position)
        found.append(position)
    # The position never goes back, keeps up with the steps, and ends with the budget.
    assert found == [40.0, 70.0, 70.0, 75.0, 100.0, 100.0]


def test_a_time_budget_ends_a_run_and_says_so():
    with pytest.warns(SamplingWarning, match=r"time budget.* with [\d.e-]+ % of the log likelihood"):
        found = fitted(FOUR, num_steps=10**6, time_budget=0.2, annealing=Linear(10**6, start=0.001))
    assert found.ending == "time budget" and found.num_steps < 10**6


def test_training_starts_from_a_network_and_keeps_what_it_cannot_make():
    topologies = all_topologies(FOUR.taxa)
    network = SubsplitBayesianNetwork.fit(TreeSample.from_topologies(topologies, [6.0, 3.0, 1.0]))
    rates = LearningRates(0.0, 0.01)
    found = variational_inference(FOUR, network, num_steps=5, learning_rates=rates, progress=False)
    assert torch.equal(found.topologies.log_prob(topologies), network.log_prob(topologies))
    sample = TreeSample.from_topologies(topologies[:2])
    found = variational_inference(FOUR, sample, num_steps=5, progress=False)
    assert found.topologies.log_prob(topologies)[2] == -math.inf


@pytest.mark.calibration
def test_samples_files_and_arviz(four, tmp_path):
    sample = four.sample(50, seed=5)
    path = tmp_path / "posterior.trees"
    sample.to_file(path)
    again = TreeSample.from_file(path, burn_in=0, taxa=sample.taxa, progress=False)
    assert (again.topologies.children == sample.topologies.children).all() and (again.index == sample.index).all()
    assert (again.branch_lengths / sample.branch_lengths - 1).abs().max() < 1e-6
    weighted = four.sample(500, seed=5, weighted=True)
    assert torch.equal(weighted.branch_lengths, four.weighted_trees(500, seed=5).lengths)
    assert weighted.weights.sum() == pytest.approx(1, abs=1e-12) and len(weighted.credible_set(0.99)) > 1
    data = four.to_arviz(50, seed=5)
    posterior, stats = data["posterior"], data["sample_stats"]
    assert posterior["tree_length"].values[0].tolist() == pytest.approx(sample.branch_lengths.sum(1).tolist())
    ranks = posterior["topology"].values[0]
    assert ranks.min() == 0 and (ranks == 0).sum() == round(50 * sample.weights.max())
    assert stats["lp"].shape == stats["log_weight"].shape == (1, 50)
    best = sample.topologies.to_newick(int(sample.weights.argmax()))
    assert data["constant_data"]["newick"].values[0] == best and posterior.attrs["seed_of_draws"] == 5


def test_bad_input_is_named():
    topologies = all_topologies(FOUR.taxa)
    for support, message in (
        (SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD", rooted=True)), "rooted"),
        (TreeSample.from_topologies(all_topologies("ABCE")), "only in"),
    ):
        with pytest.raises(TreeError, match=message):
            variational_inference(FOUR, support, num_steps=1)
    for settings, message in (
        ({"num_steps": 0}, "num_steps"),
        ({"objective": IWAE(1)}, "num_particles=1"),
        ({"objective": ELBO()}, "objective"),
        ({"objective": ReweightedWakeSleep(5, sleep_phi=1.0, observed={"x": 0})}, "sleep"),
        ({"time_budget": -1.0}, "time_budget"),
    ):
        with pytest.raises(SettingsError, match=message):
            fitted(FOUR, topologies, **({"num_steps": 1} | settings))
    for make in (lambda: LearningRates(-1.0), lambda: LearningRates(factor=0.0), lambda: LearningRates(every=0)):
        with pytest.raises(SettingsError):
            make()
    with pytest.raises(SettingsError, match="scale"):
        LogNormalLengths(scale=0.0)
    with pytest.raises(LossError, match="step"):
        fitted(FOUR, num_steps=50, learning_rates=LearningRates(0.1, 1e6))
