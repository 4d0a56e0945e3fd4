"""Fitting distributions over topologies: closed forms, counts by hand, and EM."""

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bayeskit.errors import AccuracyWarning, SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions import (
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
)
from bayeskit.models.phylogenetics._distributions import _networks as fitting
from bayeskit.models.phylogenetics._distributions import (
    _topology_distribution as topology_distribution,
)
from bayeskit.models.phylogenetics._distributions._graphs import EveryRoot
from bayeskit.models.phylogenetics._topologies import all_topologies


def random_sample(count, rooted=False, size=None, seed=0):
    """Return random weights on all topologies, or on some."""
    topologies = all_topologies("ABCDEFGH"[:count], rooted)
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(len(topologies))[: size or len(topologies)])
    return SimpleNamespace(topologies=topologies[chosen], weights=generator.dirichlet(np.ones(len(chosen))))


def log_likelihood(distribution, sample):
    return float(sample.weights @ distribution.log_prob(sample.topologies).detach().numpy())


def clade_sets(topologies, index):
    """Return the clades of one topology that are split, as sets of taxa, and the two parts of each."""
    below = clades.below(topologies.children, topologies.num_taxa)[index]
    sets = [frozenset(clades.members(one)) for one in below]
    return {
        sets[topologies.num_taxa + place]: frozenset(sets[one] for one in pair)
        for place, pair in enumerate(topologies.children[index].tolist())
    }


def slow_conditional_clades(sample, topologies):
    """Return probabilities by counting clades and their splits."""
    whole, split = defaultdict(float), defaultdict(float)
    for index, weight in enumerate(sample.weights):
        for clade, parts in clade_sets(sample.topologies, index).items():
            whole[clade] += weight
            split[parts] += weight
    return [
        math.prod(
            split[parts] / whole[clade] if split[parts] else 0.0
            for clade, parts in clade_sets(topologies, index).items()
        )
        for index in range(len(topologies))
    ]


@pytest.mark.parametrize("rooted", [False, True])
def test_conditional_clades_multiply_shares_of_splits(rooted):
    sample = random_sample(6 - rooted, rooted, size=12)
    every = all_topologies(sample.topologies.taxa, rooted)
    distribution = ConditionalCladeDistribution.fit(sample)
    expected = slow_conditional_clades(sample, every)
    np.testing.assert_allclose(distribution.log_prob(every).exp().numpy(), expected, rtol=1e-12, atol=0)
    assert sum(expected) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rooted", [False, True])
def test_order_zero_is_the_product_of_clade_frequencies(rooted):
    sample = random_sample(6 - rooted, rooted, size=12)
    every = all_topologies(sample.topologies.taxa, rooted)
    frequency = defaultdict(float)
    for index, weight in enumerate(sample.weights):
        for clade in clade_sets(sample.topologies, index):
            frequency[clade] += weight
    products = [math.prod(frequency[clade] for clade in clade_sets(every, index)) for index in range(len(every))]
    found = ConditionalCladeDistribution.fit(sample, order=0).log_prob(every).exp().numpy()
    np.testing.assert_allclose(found, np.array(products) / sum(products), rtol=1e-12, atol=0)
    # It reaches topologies whose splits were never met.
    assert (found > 0).sum() > (ConditionalCladeDistribution.fit(sample).log_prob(every) > -math.inf).sum()


def test_order_two_on_rooted_topologies_is_the_network_in_closed_form():
    sample = random_sample(5, rooted=True, size=30)
    every = all_topologies(sample.topologies.taxa, rooted=True)
    clade = ConditionalCladeDistribution.fit(sample, order=2).log_prob(every)
    for method in ("em", "simple_average"):
        network = SubsplitBayesianNetwork.fit(sample, method)
        np.testing.assert_allclose(network.log_prob(every).numpy(), clade.numpy(), rtol=0, atol=1e-12)


def test_closed_form_is_the_maximum_of_the_likelihood():
    sample = random_sample(5, rooted=True, size=30)
    network = SubsplitBayesianNetwork.fit(sample)
    best = log_likelihood(network, sample)
    generator = np.random.default_rng(1)
    for _ in range(20):
        moved = network.logits + torch.from_numpy(generator.normal(size=network.graph.num_options) * 0.05)
        assert log_likelihood(SubsplitBayesianNetwork(network.graph, moved), sample) < best


@pytest.mark.parametrize(("count", "rooted"), [(3, False), (4, False), (3, True), (4, True)])
def test_network_is_the_frequencies_where_its_structure_allows(count, rooted):
    sample = random_sample(count, rooted)
    network = SubsplitBayesianNetwork.fit(sample, tolerance=1e-15)
    # Near its maximum the likelihood is flat: what EM leaves of the gap is of second order in the probabilities.
    np.testing.assert_allclose(network.log_prob(sample.topologies).exp().numpy(), sample.weights, rtol=0, atol=1e-6)
    frequencies = SampleFrequencies.fit(sample)
    np.testing.assert_allclose(frequencies.log_prob(sample.topologies).exp().numpy(), sample.weights, rtol=1e-12)


def test_simple_average_counts_every_rooting_alike():
    sample = random_sample(5, size=6)
    network = SubsplitBayesianNetwork.fit(sample, "simple_average")
    roots = np.exp(network.log_probabilities[network.graph.starts[-2] :])
    expected = defaultdict(float)
    for index, weight in enumerate(sample.weights):
        for one in sample.topologies.below[index]:
            split = frozenset(clades.members(one))
            expected[min(split, frozenset(range(5)) - split, key=lambda side: (len(side), sorted(side)))] += weight / 7
    parts = network.graph.parts[network.graph.starts[-2] :, 0]
    found = {frozenset(clades.members(network.graph.clades[part])): p for part, p in zip(parts, roots, strict=True)}
    assert found.keys() == expected.keys()
    assert max(abs(found[split] - expected[split]) for split in expected) < 1e-14


@pytest.mark.parametrize("alpha", [0.0, 0.01])
@pytest.mark.parametrize(("count", "size"), [(5, 6), (6, 20), (6, 105), (7, 60)])
def test_em_never_lowers_the_objective_and_ends_where_it_is_stationary(count, size, alpha, monkeypatch):
    sample = random_sample(count, size=size)
    network = SubsplitBayesianNetwork.fit(sample, alpha=alpha, tolerance=1e-12, max_iterations=20_000)
    history = network.log_likelihoods
    if alpha == 0.0:
        assert (np.diff(history) > -1e-13).all()
    assert history[-1] == pytest.approx(log_likelihood(network, sample), abs=1e-12)
    average = SubsplitBayesianNetwork.fit(sample, "simple_average")
    assert history[0] == pytest.approx(log_likelihood(average, sample), abs=1e-12)
    # The objective is stationary: its slope by each logit is the square root of what a step can still gain, about.
    logits = network.logits.clone().requires_grad_(True)
    fitted = SubsplitBayesianNetwork(network.graph, logits)
    objective = torch.from_numpy(sample.weights) @ fitted.log_prob(sample.topologies)
    prior = fitting.prior_counts(network.graph, network.choices(sample.topologies), sample.weights, alpha)
    slope = torch.autograd.grad(objective, logits)[0].numpy()
    slope += prior - np.exp(network.log_probabilities) * network.graph.sum_groups(prior)[network.graph.group_of]
    assert abs(slope).max() < 1e-5


def test_the_first_steps_are_those_of_plain_em_and_later_ones_climb_faster(monkeypatch):
    sample = random_sample(7, size=60)
    settings = {"tolerance": 0.0, "max_iterations": 30}
    with pytest.warns(AccuracyWarning, match="still gained"):
        stretched = SubsplitBayesianNetwork.fit(sample, **settings).log_likelihoods
    monkeypatch.setattr(fitting, "_GROWTH", 1.0)
    with pytest.warns(AccuracyWarning, match="after 30 iterations"):
        plain = SubsplitBayesianNetwork.fit(sample, **settings).log_likelihoods
    assert len(plain) == 31
    np.testing.assert_array_equal(stretched[:11], plain[:11])
    assert stretched[-1] > plain[-1]


def test_steps_that_are_always_stretched_and_kept_are_noticed(monkeypatch):
    sample = random_sample(5, size=6)
    monkeypatch.setattr(fitting, "_stretched", lambda graph, point, stretch: graph.normalised(-point.target))
    history = SubsplitBayesianNetwork.fit(sample, tolerance=1e-8).log_likelihoods
    # Each is tried, found worse, and taken back.
    assert (np.diff(history) > -1e-13).all()


def test_em_that_counts_other_rootings_is_noticed(monkeypatch):
    sample = random_sample(6, size=20)
    whole = EveryRoot.usage

    # Every rooting is taken for the one above another node.
    monkeypatch.setattr(EveryRoot, "usage", lambda self, rootings: whole(self, np.roll(rootings, 1, axis=0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)
        history = SubsplitBayesianNetwork.fit(sample, max_iterations=20).log_likelihoods
    assert (np.diff(history) < 0).any()


def test_the_prior_adds_its_counts():
    sample = random_sample(4, rooted=True, size=6)
    network = SubsplitBayesianNetwork.fit(sample, alpha=0.5)
    graph = network.graph
    counts = network.choices(sample.topologies).counts(np.zeros(6), sample.weights)
    totals = graph.sum_groups(counts)
    sizes = np.diff(graph.starts)
    expected = (counts + 0.5 * (totals / sizes)[graph.group_of]) / (1.5 * totals)[graph.group_of]
    root = int(graph.starts[-2])
    expected[root:] = counts[root:]
    np.testing.assert_allclose(np.exp(network.log_probabilities), expected, rtol=1e-12)


def test_a_strong_prior_is_nearer_to_the_average_than_a_weak_one():
    sample = random_sample(6, size=20)
    entropies = [
        np.abs(SubsplitBayesianNetwork.fit(sample, alpha=alpha).log_probabilities).sum() for alpha in (1e-3, 1e3)
    ]
    assert entropies[1] < entropies[0]


def test_repeated_topologies_and_weights_of_any_scale_are_pooled():
    sample = random_sample(5, size=6)
    twice = SimpleNamespace(
        topologies=sample.topologies[[0, 1, 2, 3, 4, 5, 0, 0]],
        weights=torch.tensor(
            [*(3 * sample.weights[:1] / 2), *(3 * sample.weights[1:]), *[0.75 * sample.weights[0]] * 2]
        ),
    )
    for fit in (SampleFrequencies.fit, ConditionalCladeDistribution.fit, SubsplitBayesianNetwork.fit):
        one, other = fit(sample), fit(twice)
        np.testing.assert_allclose(
            one.log_prob(sample.topologies).numpy(), other.log_prob(sample.topologies).numpy(), rtol=0, atol=1e-9
        )


def test_topologies_of_weight_zero_are_left_out():
    sample = random_sample(5, size=6)
    weights = np.array([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    network = SubsplitBayesianNetwork.fit(SimpleNamespace(topologies=sample.topologies, weights=weights))
    alone = SubsplitBayesianNetwork.from_topologies(sample.topologies[:2])
    assert network.graph.num_options == alone.graph.num_options


def test_divergence_is_that_of_the_sums_and_infinite_outside_the_support():
    reference = random_sample(5)
    network = SubsplitBayesianNetwork.fit(random_sample(5, seed=1))
    expected = reference.weights @ (np.log(reference.weights) - network.log_prob(reference.topologies).numpy())
    assert network.kl_from(reference) == pytest.approx(expected, abs=1e-12)
    assert network.kl_from(SampleFrequencies.fit(reference)) == pytest.approx(expected, abs=1e-12)
    assert SampleFrequencies.fit(reference).kl_from(reference) == pytest.approx(0.0, abs=1e-14)

    some = SampleFrequencies.fit(SimpleNamespace(topologies=reference.topologies[:14], weights=np.ones(14)))
    missing = rf"1 of the reference's 15 topologies, with total probability {reference.weights[14]:.3g},.*Smoothed"
    with pytest.warns(AccuracyWarning, match=missing):
        assert some.kl_from(reference) == math.inf
    weights = reference.weights
    floored = weights[:14] @ np.log(weights[:14] * 14) + weights[14] * (math.log(weights[14]) - math.log(1e-16))
    assert some.kl_from(reference, floor=1e-16) == pytest.approx(floored, rel=1e-12)
    smoothed = (1 - 0.1) / 14 + 0.1 / 15
    mixed = weights[:14] @ np.log(weights[:14] / smoothed) + weights[14] * math.log(weights[14] / (0.1 / 15))
    assert Smoothed(some, 0.1).kl_from(reference) == pytest.approx(mixed, rel=1e-12)


def test_divergence_from_a_distribution_is_exact_or_has_an_error(monkeypatch, limit):
    true = SubsplitBayesianNetwork.fit(random_sample(6, seed=3))
    other = Smoothed(ConditionalCladeDistribution.fit(random_sample(6, seed=4)), 0.05)
    every = all_topologies(true.taxa)
    weights = true.log_prob(every).exp().numpy()
    held = weights > 0
    expected = weights[held] @ (np.log(weights[held]) - other.log_prob(every[held]).numpy())
    exact = other.kl_from(true)
    assert exact == pytest.approx((expected, 0.0), abs=1e-12)
    monkeypatch.setattr(topology_distribution, "_LISTED_TAXA", 5)
    estimate = other.kl_from(true, num_samples=4000, seed=1)
    assert 0 < estimate.standard_error < 0.1 * expected
    assert abs(estimate.value - expected) < limit() * estimate.standard_error
    # The mutation: frequencies of few draws have a divergence of their own.
    draws = SampleFrequencies.from_topologies(true.sample(300, seed=1))
    assert other.kl_from(draws) - expected > limit() * estimate.standard_error
    with pytest.raises(SettingsError, match="num_samples"):
        other.kl_from(true, num_samples=1)
    alone = SampleFrequencies.from_topologies(every[:3])
    with pytest.warns(AccuracyWarning, match="infinite.*epsilon"):
        assert alone.kl_from(true) == (math.inf, 0.0)
    assert alone.kl_from(true, floor=1e-9).value < math.inf


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "newton"}, "method: 'newton'"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": 0.1, "method": "simple_average"}, "no prior"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"tolerance": math.nan}, "tolerance=nan"),
    ],
)
def test_settings_outside_their_domain_are_refused(settings, match):
    with pytest.raises(SettingsError, match=match):
        SubsplitBayesianNetwork.fit(random_sample(4), **settings)


def test_samples_that_are_none_are_refused():
    topologies = all_topologies("ABCD")
    for weights in ([1.0, -0.1, 0.1], [0.0, 0.0, 0.0], [math.nan, 1.0, 1.0]):
        with pytest.raises(TreeError, match="weights"):
            SampleFrequencies.fit(SimpleNamespace(topologies=topologies, weights=weights))
    with pytest.raises(ShapeError, match="one weight for each"):
        SampleFrequencies.fit(SimpleNamespace(topologies=topologies, weights=[1.0]))
    with pytest.raises(SettingsError, match="order: 3"):
        ConditionalCladeDistribution.fit(random_sample(4), order=3)


@pytest.mark.parametrize("tolerance", [1e-5, 1e-6])
def test_em_does_not_stop_between_steps_that_gain_much(tolerance):
    sample = random_sample(7, size=300)
    history = SubsplitBayesianNetwork.fit(sample, tolerance=tolerance).log_likelihoods
    # The last steps are of a cycle that gained less than the tolerance as a whole.
    assert history[-1] - history[-6] < tolerance
    assert history[-1] - history[0] > 1e4 * tolerance


def test_em_stops_at_a_closed_form_after_one_step():
    network = SubsplitBayesianNetwork.fit(random_sample(5, rooted=True, size=30), alpha=0.1)
    assert len(network.log_likelihoods) == 2


def test_every_tree_that_the_graph_can_make_is_possible_after_em(monkeypatch):
    sample = random_sample(7, size=300)
    network = SubsplitBayesianNetwork.fit(sample)
    every = all_topologies("ABCDEFG")
    can_be_made = SubsplitBayesianNetwork(network.graph).log_prob(every) > -math.inf
    assert torch.equal(network.log_prob(every) > -math.inf, can_be_made)
    made = int(can_be_made.nonzero()[-1])
    assert network.why_not(every[made]) is None
    # Neither the path nor the likelihood is another.
    monkeypatch.setattr(fitting, "_LEAST", -math.inf)
    underflown = SubsplitBayesianNetwork.fit(sample)
    np.testing.assert_array_equal(network.log_likelihoods, underflown.log_likelihoods)
    assert log_likelihood(network, sample) == pytest.approx(log_likelihood(underflown, sample), abs=1e-13)
    assert np.isneginf(underflown.log_probabilities).any()
    assert (underflown.log_prob(every)[can_be_made] == -math.inf).any()


def test_topologies_alone_count_the_same_each():
    topologies = all_topologies("ABCDE")[[0, 0, 3]]
    for fit in (SampleFrequencies.fit, ConditionalCladeDistribution.fit, SubsplitBayesianNetwork.fit):
        expected = fit(SimpleNamespace(topologies=topologies, weights=[1, 1, 1])).log_prob(topologies)
        assert torch.equal(fit(topologies).log_prob(topologies), expected)
    assert SampleFrequencies.fit(topologies).kl_from(topologies) == pytest.approx(0.0, abs=1e-14)


def test_what_holds_no_weighted_topologies_is_refused():
    network = SubsplitBayesianNetwork.fit(random_sample(4))
    trees = [topology.tree(0) for topology in all_topologies("ABCD")]
    for fit in (SampleFrequencies.fit, ConditionalCladeDistribution.fit, SubsplitBayesianNetwork.fit, network.kl_from):
        for other in (network, trees, trees[0], None, SimpleNamespace(topologies=trees, weights=[1, 1, 1])):
            if other is network and fit == network.kl_from:
                continue  # which takes distributions
            with pytest.raises(TreeError, match="Remedy"):
                fit(other)
        with pytest.raises(TreeError, match="TreeSample.from_topologies"):
            fit(trees)
        with pytest.raises(TreeError, match="no topology"):
            fit(all_topologies("ABCD")[:0])
    for make in (SampleFrequencies.from_topologies, SubsplitBayesianNetwork.from_topologies):
        for other in (SimpleNamespace(topologies=all_topologies("ABCD"), weights=[1, 1, 1]), trees, network):
            with pytest.raises(TreeError, match="is not Topologies"):
                make(other)
        with pytest.raises(TreeError, match="no topology"):
            make(all_topologies("ABCD")[:0])
    for floor in (-1e-9, math.nan, 2.0):
        with pytest.raises(SettingsError, match="floor"):
            network.kl_from(random_sample(4), floor=floor)
