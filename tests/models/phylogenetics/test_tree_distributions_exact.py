"""Graphs of splits against enumeration, and against a slow implementation that roots every tree everywhere."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions import ConditionalCladeDistribution, SubsplitBayesianNetwork
from bayeskit.models.phylogenetics._distributions import _graphs as choices
from bayeskit.models.phylogenetics._distributions._graphs import graph_of_all_splits, graph_of_hanging, log_sums
from bayeskit.models.phylogenetics._topologies import all_topologies

FAILURE_RATE = 1e-5
CASES = [(3, False), (4, False), (5, False), (6, False), (3, True), (4, True), (5, True)]


def taxa(count):
    return tuple("ABCDEFGH"[:count])


def random_network(count, rooted, seed=0, topologies=None):
    """Return a network with full support, unless topologies are given, and random probabilities."""
    graph = SubsplitBayesianNetwork.from_topologies(topologies or all_topologies(taxa(count), rooted)).graph
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=graph.num_options) * 1.5)
    return SubsplitBayesianNetwork(graph, logits)


def random_clades(count, rooted, seed=0, with_sisters=False):
    graph = graph_of_hanging(all_topologies(taxa(count), rooted), with_sisters)
    return ConditionalCladeDistribution(
        graph, torch.from_numpy(np.random.default_rng(seed).normal(size=graph.num_options))
    )


def conditional_probabilities(graph, log_probabilities):
    """Return {(clade, sister): {one part: probability}} with sets of taxa."""
    sets = [frozenset(clades.members(one)) for one in graph.clades]
    table = defaultdict(dict)
    for option, probability in enumerate(np.exp(log_probabilities)):
        group = graph.group_of[option]
        sister = graph.group_sister[group]
        key = (sets[graph.group_clade[group]], sets[sister] if sister >= 0 else None)
        for part in graph.parts[option]:
            table[key][sets[part]] = float(probability)
    return table


def neighbours(topologies, index):
    """Return the neighbours of every node of an unrooted topology."""
    near = defaultdict(list)
    for child, parent in enumerate(topologies.parents[index].tolist()):
        near[child].append(parent)
        near[parent].append(child)
    return near


def nested(near, node, came_from):
    """Return the tree seen from an edge as nested pairs of taxa."""
    if len(near[node]) == 1:
        return node
    return tuple(nested(near, next_one, node) for next_one in near[node] if next_one != came_from)


def rooted_trees(topologies, index):
    """Return every rooting of an unrooted topology, or the one of a rooted topology, as nested pairs of taxa."""
    if not topologies.rooted:
        near = neighbours(topologies, index)
        pairs = [(one, other) for one in near for other in near[one] if one < other]
        return [(nested(near, one, other), nested(near, other, one)) for one, other in pairs]
    trees = list(range(topologies.num_taxa))
    for left, right in topologies.children[index].tolist():
        trees.append((trees[left], trees[right]))
    return [trees[-1]]


def leaves(tree):
    return frozenset([tree]) if isinstance(tree, int) else leaves(tree[0]) | leaves(tree[1])


def rooted_probability(tree, table, sister=None, with_sisters=True):
    if isinstance(tree, int):
        return 1.0
    one, other = tree
    here = table.get((leaves(tree), sister if with_sisters else None), {}).get(leaves(one), 0.0)
    return (
        here
        * rooted_probability(one, table, leaves(other), with_sisters)
        * rooted_probability(other, table, leaves(one), with_sisters)
    )


def slow_probabilities(network, topologies):
    table = conditional_probabilities(network.graph, network.log_probabilities)
    return np.array(
        [
            sum(rooted_probability(tree, table) for tree in rooted_trees(topologies, index))
            for index in range(len(topologies))
        ]
    )


def error_of_sum(network):
    topologies = all_topologies(network.taxa, network.rooted)
    return abs(float(network.log_prob(topologies).exp().sum()) - 1.0)


@pytest.mark.parametrize(("count", "rooted"), CASES)
def test_full_support_sums_to_one_and_agrees_with_every_rooting(count, rooted):
    network = random_network(count, rooted)
    topologies = all_topologies(taxa(count), rooted)
    assert error_of_sum(network) < 1e-12
    expected = np.log(slow_probabilities(network, topologies))
    np.testing.assert_allclose(network.log_prob(topologies).numpy(), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rooted", [False, True])
def test_partial_support_has_the_probabilities_of_its_rootings_and_zero_elsewhere(rooted):
    everything = all_topologies(taxa(6), rooted)
    network = random_network(6, rooted, topologies=(given := everything[::5]))
    expected = slow_probabilities(network, everything)
    # The network makes other trees than those that its support was made from, but not all.
    assert 0 < (expected == 0).sum() < len(everything) - len(given)
    np.testing.assert_allclose(network.log_prob(everything).exp().numpy(), expected, rtol=1e-12, atol=0)
    assert expected.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("count", "rooted"), CASES)
@pytest.mark.parametrize("with_sisters", [False, True])
def test_conditional_clades_sum_to_one_and_count_every_topology(count, rooted, with_sisters):
    distribution = random_clades(count, rooted, with_sisters=with_sisters)
    assert error_of_sum(distribution) < 1e-12
    number = np.exp(log_sums(distribution.graph, np.zeros(distribution.graph.num_options))[0][-1])
    assert number == pytest.approx(len(all_topologies(taxa(count), rooted)), rel=1e-12)


def test_splits_of_all_clades_hold_every_topology_of_these_clades():
    topologies = all_topologies(taxa(6))[[3, 50, 77, 101]]
    distribution = ConditionalCladeDistribution(
        graph := graph_of_all_splits(topologies), torch.zeros(graph.num_options, dtype=torch.float64)
    )
    every = all_topologies(taxa(6))
    inner = clades.below(every.children, 6)[:, 6:]
    met = {tuple(one) for one in clades.below(topologies.children, 6)[:, 6:].reshape(-1, inner.shape[-1])}
    expected = [all(tuple(one) in met for one in each) for each in inner]
    assert (distribution.log_prob(every) > -math.inf).tolist() == expected
    assert error_of_sum(distribution) < 1e-12


def goodness_of_fit(distribution, topologies, num_samples, seed):
    """Return the p-value of the draws' frequencies."""
    drawn = distribution.sample(num_samples, seed=seed)
    rows = {row.tobytes(): number for number, row in enumerate(topologies.children)}
    observed = np.bincount([rows[row.tobytes()] for row in drawn.children], minlength=len(topologies))
    expected = distribution.log_prob(topologies).exp().numpy() * num_samples
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return chi2.sf(((observed - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1)


@pytest.mark.parametrize(("count", "rooted"), [(4, False), (5, False), (6, False), (5, True)])
def test_samples_match_probabilities(count, rooted):
    topologies = all_topologies(taxa(count), rooted)
    assert goodness_of_fit(random_network(count, rooted), topologies, 40_000, seed=1) > FAILURE_RATE
    assert goodness_of_fit(random_clades(count, rooted), topologies, 40_000, seed=2) > FAILURE_RATE


def test_samples_of_another_network_do_not_match():
    network, other = random_network(5, False), random_network(5, False, seed=1)
    other._draw = network._draw
    assert goodness_of_fit(other, all_topologies(taxa(5)), 40_000, seed=1) < FAILURE_RATE


@pytest.mark.parametrize("make", [random_network, random_clades])
@pytest.mark.parametrize(("count", "rooted"), CASES[1:])
def test_split_probabilities_are_those_of_enumeration(make, count, rooted):
    distribution, topologies = make(count, rooted), all_topologies(taxa(count), rooted)
    probability = distribution.log_prob(topologies).exp().numpy()
    expected = defaultdict(float)
    for index, sets in enumerate(clades.below(topologies.children, count)[:, count:]):
        for one in sets:
            held = clades.members(one)
            if 1 < len(held) < count - (0 if rooted else 1):
                expected[tuple(taxa(count)[taxon] for taxon in held)] += probability[index]
    found = distribution.split_probabilities().to_dict()
    assert found.keys() == expected.keys()
    assert max(abs(found[split] - expected[split]) for split in expected) < 1e-12
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.parametrize("make", [random_network, random_clades])
@pytest.mark.parametrize(("count", "rooted"), CASES)
def test_entropy_and_most_probable_tree_are_those_of_enumeration(make, count, rooted, limit):
    distribution, topologies = make(count, rooted), all_topologies(taxa(count), rooted)
    log_prob = distribution.log_prob(topologies).numpy()
    exact = -np.exp(log_prob) @ log_prob
    entropy = distribution.entropy(num_samples=20_000, seed=3)
    if make is random_clades or rooted:
        assert entropy.standard_error == 0.0
        assert entropy.value == pytest.approx(exact, abs=1e-12)
    else:
        assert abs(entropy.value - exact) <= limit(len(CASES)) * entropy.standard_error + 1e-12
    best = distribution.most_probable_tree()
    assert (best.children[0] == topologies[int(log_prob.argmax())].children[0]).all()


def test_probabilities_of_options_add_up_to_the_splits_of_a_tree():
    network = random_network(5, True)
    # A rooted tree of five taxa splits four clades.
    assert network.option_probabilities().sum() == pytest.approx(4.0, abs=1e-12)


@pytest.mark.parametrize(("count", "rooted"), [(4, False), (5, False), (4, True)])
def test_gradient_by_the_logits_is_that_of_finite_differences(count, rooted):
    network, topologies = random_network(count, rooted), all_topologies(taxa(count), rooted)

    def log_prob(logits):
        return SubsplitBayesianNetwork(network.graph, logits).log_prob(topologies)

    assert torch.autograd.gradcheck(log_prob, network.logits.clone().requires_grad_(True))


def test_expected_counts_are_those_of_the_slow_implementation():
    network, topologies = random_network(5, False), all_topologies(taxa(5))
    found = network.choices(topologies)
    log_prob, saved = found.log_prob(network.graph.table(network.log_probabilities, missing=-np.inf))
    counts = found.counts(saved, np.exp(log_prob))
    # Over all topologies, weighted by their probability, they are the marginal probabilities of the options.
    np.testing.assert_allclose(counts, network.option_probabilities(), rtol=0, atol=1e-13)


def test_the_gradient_of_the_mean_probability_is_zero():
    network, topologies = random_network(5, False), all_topologies(taxa(5))
    network.logits.requires_grad_(True)
    (gradient,) = torch.autograd.grad(network.log_prob(topologies).exp().sum(), network.logits)
    assert gradient.abs().max() < 1e-14


def test_a_lost_rooting_is_noticed(monkeypatch):
    network = random_network(5, False)
    whole = choices.EveryRoot.rootings

    def without_one(self, table):
        rootings = whole(self, table)
        rootings[2] = -np.inf
        return rootings

    monkeypatch.setattr(choices.EveryRoot, "rootings", without_one)
    assert error_of_sum(network) > 1e-3


@pytest.mark.parametrize("kind", [choices.CHILD, choices.BESIDE, choices.BEYOND])
def test_a_wrong_sister_is_noticed(monkeypatch, kind):
    network = random_network(5, False)
    whole = choices.every_root_choices

    def with_wrong_sister(topologies, numbers, everything):
        found, chosen = whole(topologies, numbers, everything)
        nodes = numbers.shape[1] // 2
        opposite = {
            int(one): int(other)
            for one, other in zip(numbers[:, :nodes].ravel(), numbers[:, nodes:].ravel(), strict=True)
        }
        opposite |= {other: one for one, other in opposite.items()}
        # As if the root were always next to the clade: its sister would be everything else.
        clade = np.where(chosen[kind], found[kind, ..., 0], 0)
        found[kind, ..., 1] = np.vectorize(lambda one: opposite.get(int(one), -1))(clade)
        return found, chosen

    monkeypatch.setattr(choices, "every_root_choices", with_wrong_sister)
    # The probabilities still sum to one, but they are those of another network.
    topologies = all_topologies(taxa(5))
    found = network.log_prob(topologies).exp().numpy()
    assert abs(found - slow_probabilities(network, topologies)).max() > 1e-3


def test_a_lost_pass_is_noticed(monkeypatch):
    network, topologies = random_network(5, False), all_topologies(taxa(5))
    whole = choices.EveryRoot.usage

    def without_siblings(self, rootings):
        used = whole(self, rootings)
        used[choices.BEYOND] = 0.0
        return used

    monkeypatch.setattr(choices.EveryRoot, "usage", without_siblings)

    def log_prob(logits):
        return SubsplitBayesianNetwork(network.graph, logits).log_prob(topologies)

    logits = network.logits.clone().requires_grad_(True)
    assert not torch.autograd.gradcheck(log_prob, logits, raise_exception=False, fast_mode=True)
