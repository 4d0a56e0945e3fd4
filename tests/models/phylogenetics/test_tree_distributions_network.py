"""Subsplit networks: what lies outside their support, and logits that are trained, changed, or none."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics import Tree
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions import SampleFrequencies, SubsplitBayesianNetwork
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies


def sample_of(count, rooted=False, size=6, seed=0):
    topologies = all_topologies("ABCDEFGH"[:count], rooted)
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(len(topologies))[:size])
    return SimpleNamespace(topologies=topologies[chosen], weights=generator.dirichlet(np.ones(size)))


def splits_with_sisters(topologies, index):
    """Return the text that `why_not` would use for each clade of a rooted topology, and for each of its splits."""

    def name(node):
        held = [topologies.taxa[taxon] for taxon in clades.members(below[node])]
        return "{" + ", ".join(held) + "}"

    below = clades.below(topologies.children, topologies.num_taxa)[index]
    children = topologies.children[index].tolist()
    sister = {one: other for pair in children for one, other in (pair, pair[::-1])}
    texts = {f"no tree of the support has the clade {name(node)}" for node in range(len(below))}
    for place, pair in enumerate(children):
        node = topologies.num_taxa + place
        beside = f" with the sister {name(sister[node])}" if node in sister else ""
        for one, other in (pair, pair[::-1]):
            texts.add(
                f"no tree of the support has the clade {name(node)} split into {name(one)} and {name(other)}{beside}"
            )
    return texts


def test_what_is_missing_is_named():
    every = all_topologies("ABCD", rooted=True)
    sample = SampleFrequencies.from_topologies(every[[0, 1, 7, 10, 13]])
    network = SubsplitBayesianNetwork.fit(sample)
    known = set().union(*(splits_with_sisters(sample.topologies, index) for index in range(5)))
    reasons = [network.why_not(every[index]) for index in range(len(every))]
    outside = (network.log_prob(every) == -math.inf).tolist()
    assert [reason is not None for reason in reasons] == outside
    for index, reason in enumerate(reasons):
        if reason is not None:
            assert reason in splits_with_sisters(every, index)
            assert reason not in known
    assert any("with the sister" in reason for reason in reasons if reason)


def test_what_is_missing_in_the_best_rooting_is_named():
    trees = [Tree.from_newick(text) for text in ("(((A,B),C),D,(E,F));", "((A,B),(C,D),(E,F));")]
    network = SubsplitBayesianNetwork.from_topologies(Topologies.from_trees(trees, "ABCDEF"))
    assert [network.why_not(tree) for tree in trees] == [None, None]
    # Three taxa change places: two more splits are there than needed, whose clades no other tree has.
    reason = network.why_not(Tree.from_newick("(((A,B),D),C,(E,F));"))
    assert reason == "no tree of the support has the clade {C, E, F}"


def test_a_split_with_probability_zero_is_named():
    topologies = all_topologies("ABCD")
    network = SubsplitBayesianNetwork.from_topologies(topologies)
    logits = network.logits.clone()
    root = int(network.graph.starts[-2])
    logits[root:-1] = -math.inf
    only = SubsplitBayesianNetwork(network.graph, logits)
    outside = int((only.log_prob(topologies) == -math.inf).nonzero()[0])
    assert only.why_not(topologies[outside]).startswith("no tree of the support has the clade {A, B, C, D} split into")
    with pytest.raises(ShapeError, match="there are 3 topologies"):
        only.why_not(topologies)


def test_an_optimiser_moves_the_network_to_a_sample():
    sample = sample_of(5)
    network = SubsplitBayesianNetwork.from_topologies(sample.topologies)
    network.logits.requires_grad_(True)
    optimiser = torch.optim.Adam([network.logits], lr=0.1)
    best = SubsplitBayesianNetwork.fit(sample, tolerance=1e-12)
    weights = torch.from_numpy(sample.weights)
    for _ in range(300):
        optimiser.zero_grad()
        (-weights @ network.log_prob(sample.topologies)).backward()
        optimiser.step()
    gap = float(weights @ (best.log_prob(sample.topologies) - network.log_prob(sample.topologies).detach()))
    assert -1e-9 < gap < 0.01
    # What was drawn before the last step is not what is drawn now.
    assert torch.equal(
        network.log_prob(sample.topologies),
        SubsplitBayesianNetwork(network.graph, network.logits.detach().clone()).log_prob(sample.topologies),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_have_the_type_of_the_logits(dtype):
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCDE"))
    logits = network.logits.to(dtype).requires_grad_(True)
    log_prob = SubsplitBayesianNetwork(network.graph, logits).log_prob(all_topologies("ABCDE"))
    log_prob.sum().backward()
    assert log_prob.dtype == logits.grad.dtype == dtype


def test_logits_that_are_none_are_refused():
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    with pytest.raises(ShapeError, match="logits: shape"):
        SubsplitBayesianNetwork(network.graph, torch.zeros(3))
    with pytest.raises(SettingsError, match="not a number"):
        SubsplitBayesianNetwork(network.graph, network.logits * math.nan).sample(1, seed=0)


def step_of_a_fused_optimiser(network):
    network.logits.grad = torch.linspace(-1, 1, len(network.logits), dtype=torch.float64)
    torch.optim.Adam([network.logits], lr=0.5, fused=True).step()


def write_to_data(network):
    network.logits.data[:] = torch.linspace(-1, 1, len(network.logits), dtype=torch.float64)


def replace_logits(network):
    network.logits = torch.linspace(-1, 1, len(network.logits), dtype=torch.float64)


def replace_logits_of_another_type(network):
    network.logits = torch.linspace(-1, 1, len(network.logits))


@pytest.mark.parametrize(
    "change", [step_of_a_fused_optimiser, write_to_data, replace_logits, replace_logits_of_another_type]
)
def test_changed_logits_are_noticed(change):
    every = all_topologies("ABCDE")
    network = SubsplitBayesianNetwork.from_topologies(every)
    network.logits.requires_grad_(True)
    before = network.log_prob(every).detach()
    old_splits = network.split_probabilities().probabilities
    change(network)
    again = SubsplitBayesianNetwork(network.graph, network.logits.detach().clone())
    assert not torch.equal(again.log_prob(every), before.to(again.logits.dtype))
    assert torch.equal(network.log_prob(every), again.log_prob(every))
    splits = network.split_probabilities().probabilities
    np.testing.assert_array_equal(splits, again.split_probabilities().probabilities)
    assert not np.array_equal(splits, old_splits)
    assert (network.sample(50, seed=0).children == again.sample(50, seed=0).children).all()


def test_networks_work_in_inference_mode():
    every = all_topologies("ABCDE")
    with torch.inference_mode():
        network = SubsplitBayesianNetwork.from_topologies(every)
        assert float(network.log_prob(every).exp().sum()) == pytest.approx(1.0, abs=1e-12)
        network.logits.copy_(torch.linspace(-1, 1, len(network.logits), dtype=torch.float64))
        again = SubsplitBayesianNetwork(network.graph, network.logits.clone())
        assert torch.equal(network.log_prob(every), again.log_prob(every))


def test_logits_that_are_no_real_numbers_are_refused():
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    with pytest.raises(SettingsError, match="logits must be a floating-point tensor"):
        SubsplitBayesianNetwork(network.graph, network.logits.long())
    network.logits = torch.zeros(3)
    with pytest.raises(ShapeError, match="logits: shape"):
        network.log_prob(all_topologies("ABCD"))
