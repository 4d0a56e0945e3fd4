"""The evidence of fitted approximations, over seeds, against exact quadrature: errors that are what they say."""

import math

import pytest
import torch
from scipy.stats import chi2
from tree_quadrature import log_evidence

from bayeskit.errors import SamplingWarning
from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep
from bayeskit.models.phylogenetics import Alignment, TreeSample, all_topologies
from bayeskit.models.phylogenetics.workflows import FlowLengths, LearningRates, LogNormalLengths, variational_inference
from bayeskit.models.phylogenetics.workflows._topology_comparison import HALF, PRIOR, defended_log_prob, share_of_tail
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily

DOUBLE = torch.float64
FOUR = Alignment.from_sequences(
    {"A": "GTCATTATCCCGATAAAAAA", "B": "CTCATTTTCCCGAGGAAAGT", "C": "ATCACTTTCTCGGTGAAAGC", "D": "TTCATTCTRTCG-GCAAAGG"}
)
TOPOLOGIES = all_topologies(FOUR.taxa)
SEEDS = 8
#: A sum of squares of so many standard normal numbers is larger once in 100,000 times.
LARGEST = chi2.isf(1e-5, SEEDS)


@pytest.fixture(scope="module")
def truth():
    return float(log_evidence(FOUR, TOPOLOGIES).logsumexp(0)) - math.log(3)


def fitted(**settings):
    return variational_inference(FOUR, TOPOLOGIES, progress=False, **settings)


def sum_of_squares(posterior, truth, num_draws=4000, seeds=SEEDS):
    found = [posterior.log_evidence(num_draws, seed=seed) for seed in range(seeds)]
    z = [(one.log_evidence - truth) / one.standard_error for one in found]
    return sum(value**2 for value in z), sum(one.trusted for one in found)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": IWAE(10)},
        {"objective": ReweightedWakeSleep(10)},
        {"lengths": FlowLengths(hidden=8)},
    ],
    ids=["bound", "wake", "flow"],
)
def test_errors_of_the_evidence_are_what_they_say(settings, truth):
    rates = LearningRates(0.02, 0.02, factor=0.5, every=150)
    posterior = fitted(num_steps=450, learning_rates=rates, annealing=Linear(80, start=0.01), **settings)
    squares, trusted = sum_of_squares(posterior, truth)
    assert squares < LARGEST and trusted > SEEDS / 2


@pytest.mark.long
def test_an_approximation_with_lighter_tails_than_the_posterior(truth, monkeypatch):
    """The mutation: without the heavy tail, estimates that most diagnostics let pass are off.

    Errors may be a tenth too small. Seldom does a draw reach far into the tail, so the mutation takes more seeds.
    """
    posterior = fitted(num_steps=1, lengths=LogNormalLengths(location=-2.3, scale=0.7))
    squares, trusted = sum_of_squares(posterior, truth, 20_000)
    assert squares < 1.1**2 * LARGEST and trusted > SEEDS / 2
    monkeypatch.setattr(TreeFamily, "draw_defensive", lambda self, prior, *settings: self.draw(*settings))
    squares, trusted = sum_of_squares(posterior, truth, 20_000, seeds=60)
    assert squares > 1.1**2 * chi2.isf(1e-5, 60) and trusted > 60 / 2


@pytest.mark.calibration
@pytest.mark.parametrize("lengths", [LogNormalLengths(), FlowLengths()], ids=["log-normal", "flow"])
def test_defensive_draws_have_their_density(lengths, limit):
    """Weights of a known density of lengths and a uniform topology have mean one."""
    posterior = fitted(num_steps=1, lengths=lengths)
    drawn = posterior.weighted_trees(20_000)
    log_q = drawn.log_prior + drawn.log_likelihood - drawn.log_weight
    known = torch.distributions.Exponential(torch.tensor(10.0, dtype=DOUBLE)).log_prob(drawn.lengths).sum(-1)
    weights = (known - math.log(3) - log_q).exp()
    assert abs(float((weights.mean() - 1) / (weights.std() / 20_000**0.5))) < limit()
    pure = posterior.weighted_trees(20_000, defensive=False)
    far = [float((one.lengths > 5.0).any(-1).double().mean()) for one in (drawn, pure)]
    assert far[0] > 0.01 > far[1]


def test_the_heavy_tail_is_a_density():
    """Alone, it integrates to its share over a grid of the logarithm; its power beats that of any prior at zero."""
    log_length = torch.linspace(-303.0, 299.0, 602_001, dtype=DOUBLE)
    nothing = torch.full((len(log_length), 1), -math.inf, dtype=DOUBLE)
    other = torch.distributions.LogNormal(torch.tensor(-2.0, dtype=DOUBLE), 1.0)
    density = (defended_log_prob(nothing, log_length.exp()[:, None], other) + log_length).exp()
    # The distribution ends between two points of the grid.
    share = PRIOR + HALF / 2 + (1 - PRIOR - HALF) * share_of_tail(1)
    assert abs(float(torch.trapezoid(density, log_length)) - share) < 1e-8
    prior = torch.distributions.Gamma(torch.tensor(0.1, dtype=DOUBLE), torch.tensor(1.0, dtype=DOUBLE))
    inner = (log_length > -250) & (log_length < 5)
    assert (prior.log_prob(log_length.exp()) + log_length - density.log())[inner].max() < math.log(100)


def test_draws_for_different_purposes_are_independent():
    posterior = fitted(num_steps=1)
    bound = posterior.lower_bound(1, 1000)
    drawn, pure = posterior.weighted_trees(1000), posterior.weighted_trees(1000, defensive=False)
    assert bound.value != float(pure.log_weight.mean())
    assert posterior.log_evidence(1000).log_evidence != float(drawn.log_weight.logsumexp(0)) - math.log(1000)
    assert torch.equal(posterior.sample(20).branch_lengths, posterior.weighted_trees(20, defensive=False).lengths)


def test_weights_that_are_not_to_be_trusted_are_warned_of():
    posterior = fitted(num_steps=1, lengths=LogNormalLengths(location=-8.0, scale=0.1))
    assert isinstance(posterior.sample(100), TreeSample)
    for call in (posterior.sample, posterior.to_arviz):
        with pytest.warns(SamplingWarning, match="weights are not trusted"):
            call(100, weighted=True)


@pytest.mark.long
def test_resampled_draws_for_arviz(truth, limit):
    posterior = fitted(num_steps=300, learning_rates=LearningRates(0.03, 0.03), annealing=Linear(80, start=0.01))
    data = posterior.to_arviz(4000, weighted=True)
    sample = posterior.sample(4000, weighted=True)
    newick = data["constant_data"]["newick"].values.tolist()
    share = [float((data["posterior"]["topology"].values == rank).mean()) for rank in range(3)]
    by_text = {sample.topologies.to_newick(place): weight for place, weight in enumerate(sample.weights)}
    # Systematic resampling scatters by no more than independent draws would.
    largest = limit(4) / math.sqrt(4000)
    assert max(abs(one - by_text[text]) for one, text in zip(share, newick, strict=True)) < 0.5 * largest
    lengths = data["posterior"]["tree_length"].values
    expected = float((torch.from_numpy(sample.sample_weights) * sample.branch_lengths.sum(-1)).sum())
    assert abs(lengths.mean() - expected) < lengths.std() * largest
    assert "log_weight" not in data["sample_stats"] and '"seed": 0' in data["posterior"].attrs["settings"]
