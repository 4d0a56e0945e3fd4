"""What distributions over topologies have in common: Pyro's interface, files, bad input, many taxa."""

import math
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chi2

from bayeskit._core.folders import Schema
from bayeskit._core.storage import save_tensors
from bayeskit.errors import CheckpointError, SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics import Tree
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions import (
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
    TopologyDistribution,
)
from bayeskit.models.phylogenetics._distributions._frequencies import log_num_topologies, uniform_topologies
from bayeskit.models.phylogenetics._samples import TreeSample
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies

FAILURE_RATE = 1e-5
KINDS = [
    SampleFrequencies.fit,
    ConditionalCladeDistribution.fit,
    lambda sample: ConditionalCladeDistribution.fit(sample, order=0),
    lambda sample: ConditionalCladeDistribution.fit(sample, order=2),
    SubsplitBayesianNetwork.fit,
    lambda sample: Smoothed(SampleFrequencies.fit(sample), 0.2),
]

SCHEMA = Schema("a distribution over topologies", 1)


def sample_of(count, rooted=False, size=6, seed=0):
    topologies = all_topologies("ABCDEFGH"[:count], rooted)
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(len(topologies))[:size])
    return SimpleNamespace(topologies=topologies[chosen], weights=generator.dirichlet(np.ones(size)))


def wide_sample(num_taxa, rooted, seed=0):
    """Return random topologies of many taxa."""
    taxa = tuple(f"taxon{number}" for number in range(num_taxa))
    topologies = uniform_topologies(taxa, rooted, 12, torch.Generator().manual_seed(seed))
    return SimpleNamespace(topologies=topologies, weights=np.full(12, 1 / 12))


@pytest.fixture(params=range(len(KINDS)), ids=["frequencies", "ccd1", "ccd0", "ccd2", "network", "smoothed"])
def fit(request):
    return KINDS[request.param]


@pytest.mark.parametrize("rooted", [False, True])
def test_pyro_draws_and_scores_integer_tensors(fit, rooted):
    distribution = fit(sample_of(5, rooted))

    def model():
        with pyro.plate("trees", 3):
            return pyro.sample("topology", distribution)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        trace = pyro.poutine.trace(model).get_trace()
    site = trace.nodes["topology"]
    assert site["value"].shape == (3, 4 if rooted else 3, 2)
    assert site["value"].dtype == torch.int64
    trace.compute_log_prob()
    expected = distribution.log_prob(Topologies(distribution.taxa, site["value"].numpy().astype(np.int32), rooted))
    assert torch.equal(site["log_prob"], expected)
    assert distribution.support.check(site["value"]).tolist() == [True] * 3
    assert distribution.support.is_discrete


def test_shapes_follow_those_asked_for(fit):
    distribution = fit(sample_of(5))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert distribution.sample().shape == (3, 2)
        drawn = distribution.sample(torch.Size([2, 4]))
        assert drawn.shape == (2, 4, 3, 2)
        assert distribution.log_prob(drawn).shape == (2, 4)
        assert distribution.expand([4]).sample((2,)).shape == (2, 4, 3, 2)
    assert len(distribution.sample(7, seed=0)) == 7
    assert len(distribution.sample(0, seed=0)) == 0
    assert distribution.log_prob(distribution.sample(0, seed=0)).shape == (0,)


def test_a_seed_gives_the_same_topologies(fit):
    distribution = fit(sample_of(6))
    one, same, other = (distribution.sample(50, seed=seed).children for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


def test_a_tree_and_its_topology_are_one(fit):
    sample = sample_of(5)
    distribution = fit(sample)
    for index in range(len(sample.topologies)):
        tree = sample.topologies.tree(index)
        assert distribution.log_prob(tree).shape == ()
        # But for the order in which a sum over rootings is taken.
        alone, among = float(distribution.log_prob(tree)), float(distribution.log_prob(sample.topologies)[index])
        assert abs(alone - among) < 1e-13 * (1 + abs(among))


@pytest.mark.parametrize("rooted", [False, True])
def test_the_order_of_taxa_does_not_matter(fit, rooted):
    sample = sample_of(5, rooted)
    distribution = fit(sample)
    expected = distribution.log_prob(sample.topologies)
    assert torch.equal(distribution.log_prob(sample.topologies.with_taxa("CEABD")[0]), expected)


@pytest.mark.parametrize("rooted", [False, True])
def test_saved_and_loaded_it_is_the_same(fit, rooted, tmp_path):
    sample = sample_of(5, rooted)
    distribution = fit(sample)
    path = tmp_path / "distribution.safetensors"
    every = all_topologies(sample.topologies.taxa, rooted)
    # Mixtures of any of them, too.
    for saved in (distribution, Smoothed(distribution, 0.3)):
        saved.save(path)
        for kind in (type(saved), TopologyDistribution):
            loaded = kind.load(path)
            assert type(loaded) is type(saved) and repr(loaded) == repr(saved)
            assert torch.equal(loaded.log_prob(every), saved.log_prob(every))
            assert (loaded.sample(20, seed=0).children == saved.sample(20, seed=0).children).all()
    distribution.save(path)
    loaded = type(distribution).load(path)
    if isinstance(distribution, SubsplitBayesianNetwork):
        assert (loaded.log_likelihoods == distribution.log_likelihoods).all()


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "network.safetensors"
    SubsplitBayesianNetwork.fit(sample_of(5)).save(path)
    with pytest.raises(CheckpointError, match="holds SubsplitBayesianNetwork"):
        SampleFrequencies.load(path)
    # What is loaded is mapped from the file, which is about to change.
    whole, tensors = path.read_bytes(), {name: one.clone() for name, one in load_file(path).items()}
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        SubsplitBayesianNetwork.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        SubsplitBayesianNetwork.load(tmp_path / "none")
    facts = {"kind": "SubsplitBayesianNetwork", "taxa": list("ABCDE"), "rooted": False, "with_sisters": True}
    for name, broken in (
        ("parts", tensors["parts"].flip(0)),
        ("parts", tensors["parts"] + 10_000),
        ("starts", tensors["starts"][:-1]),
        ("logits", tensors["logits"][:-1]),
        ("group_clade", tensors["group_clade"].flip(0)),
    ):
        save_tensors(path, {**tensors, name: broken}, facts, SCHEMA)
        with pytest.raises(CheckpointError, match="do not fit together"):
            SubsplitBayesianNetwork.load(path)
    save_tensors(path, tensors, {**facts, "taxa": None}, SCHEMA)
    with pytest.raises(CheckpointError, match="do not fit together"):
        SubsplitBayesianNetwork.load(path)


@pytest.mark.parametrize("rooted", [False, True])
def test_sets_of_more_than_one_word(fit, rooted):
    sample = wide_sample(70, rooted)
    distribution = fit(sample)
    expected = distribution.log_prob(sample.topologies)
    assert (expected > -math.inf).all()
    drawn = distribution.sample(20, seed=0)
    if not isinstance(distribution, Smoothed):
        assert (distribution.log_prob(drawn) > -math.inf).all()
        assert distribution.split_probabilities().probabilities.max() <= 1 + 1e-12
    elsewhere = wide_sample(70, rooted, seed=1).topologies
    outside = distribution.log_prob(elsewhere)
    uniform = -log_num_topologies(70, rooted) + math.log(0.2) if isinstance(distribution, Smoothed) else -math.inf
    torch.testing.assert_close(outside, torch.full_like(outside, uniform), rtol=1e-12, atol=0)


def test_frequencies_draw_and_sum_up_what_was_sampled(limit):
    sample = sample_of(5)
    frequencies = SampleFrequencies.fit(sample)
    drawn = frequencies.sample(20_000, seed=0)
    observed = np.bincount(frequencies._rows.find(drawn.children.reshape(20_000, -1)), minlength=6)
    expected = 20_000 * frequencies.weights
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), 5) > FAILURE_RATE
    assert frequencies.entropy().value == pytest.approx(-sample.weights @ np.log(sample.weights), rel=1e-12)
    best = sample.topologies[int(sample.weights.argmax())]
    assert (frequencies.most_probable_tree().children == best.children).all()
    splits = frequencies.split_probabilities()
    for split, probability in zip(splits.splits, splits.probabilities, strict=True):
        held = (sample.topologies.below == split).all(axis=-1).any(axis=1)
        assert probability == pytest.approx(sample.weights[held].sum(), rel=1e-12)


@pytest.mark.parametrize("rooted", [False, True])
def test_uniform_topologies_are_uniform(rooted):
    every = all_topologies("ABCDE" if not rooted else "ABCD", rooted)
    assert log_num_topologies(len(every.taxa), rooted) == pytest.approx(math.log(len(every)), abs=1e-12)
    drawn = uniform_topologies(every.taxa, rooted, 15_000, torch.Generator().manual_seed(0))
    observed = np.bincount(SampleFrequencies.from_topologies(every)._rows.find(drawn.children.reshape(15_000, -1)))
    assert chi2.sf(((observed - 1000) ** 2 / 1000).sum(), 14) > FAILURE_RATE


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_smoothing_is_a_mixture(epsilon):
    every = all_topologies("ABCDE")
    base = SubsplitBayesianNetwork.fit(sample_of(5))
    smoothed = Smoothed(base, epsilon)
    expected = (1 - epsilon) * base.log_prob(every).exp() + epsilon / 15
    torch.testing.assert_close(smoothed.log_prob(every).exp(), expected, rtol=1e-12, atol=0)
    assert float(expected.sum()) == pytest.approx(1.0, abs=1e-12)
    drawn = smoothed.sample(20_000, seed=0)
    observed = np.bincount(SampleFrequencies.from_topologies(every)._rows.find(drawn.children.reshape(20_000, -1)))
    expected = expected.numpy() * 20_000
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), 14) > FAILURE_RATE
    assert (smoothed.most_probable_tree().children == base.most_probable_tree().children).all()
    with pytest.raises(SettingsError, match="epsilon: 0"):
        Smoothed(base, 0.0)


@pytest.mark.parametrize("rooted", [False, True])
def test_splits_of_a_mixture_are_mixed(rooted):
    every = all_topologies("ABCDEF" if not rooted else "ABCDE", rooted)
    smoothed = Smoothed(SampleFrequencies.from_topologies(every[::9]), 0.3)
    probability = smoothed.log_prob(every).exp().numpy()
    found = smoothed.split_probabilities()
    assert len(found.splits) > 5
    for split, one in zip(found.splits, found.probabilities, strict=True):
        assert one == pytest.approx(probability[(every.below == split).all(axis=-1).any(axis=1)].sum(), rel=1e-12)


def test_files_of_mixtures_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "mixture"
    Smoothed(SampleFrequencies.from_topologies(all_topologies("ABCD")), 0.1).save(path)
    with pytest.raises(CheckpointError, match="holds Smoothed, not SampleFrequencies"):
        SampleFrequencies.load(path)
    tensors = {name: one.clone() for name, one in load_file(path).items()}
    facts = {"kind": "Smoothed", "taxa": list("ABCD"), "rooted": False, "epsilon": 0.1}
    base = {"kind": "SampleFrequencies"}
    for broken in (
        facts,
        {**facts, "base": {"kind": "Path"}},
        {**facts, "base": {"kind": "SubsplitBayesianNetwork", "with_sisters": True}},
        {**facts, "base": base, "epsilon": 2.0},
        {**facts, "base": base, "epsilon": None},
        {**facts, "base": base, "taxa": list("ABCDE")},
    ):
        save_tensors(path, tensors, broken, SCHEMA)
        with pytest.raises(CheckpointError, match="do not fit together"):
            Smoothed.load(path)
    save_tensors(path, tensors, {**facts, "base": base}, SCHEMA)
    assert Smoothed.load(path).epsilon == 0.1


def test_a_tree_sample_is_fitted(fit):
    trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((C,D),A,B);", "((A,C),B,D);")]
    sample = TreeSample.from_trees(trees)
    expected = fit(SimpleNamespace(topologies=sample.topologies, weights=[2, 1])).log_prob(sample.topologies)
    assert torch.equal(fit(sample).log_prob(sample.topologies), expected)


def test_topologies_that_do_not_fit_are_refused(fit):
    unrooted, rooted = fit(sample_of(5)), fit(sample_of(5, rooted=True))
    with pytest.raises(TreeError, match="are rooted, but the distribution is over unrooted"):
        unrooted.log_prob(all_topologies("ABCDE", rooted=True))
    with pytest.raises(TreeError, match="are unrooted, but the distribution is over rooted"):
        rooted.log_prob(all_topologies("ABCDE"))
    with pytest.raises(TreeError, match="A Tree has no root"):
        rooted.log_prob(Tree.from_newick("((A,B),C,(D,E));"))
    with pytest.raises(TreeError, match="taxa"):
        unrooted.log_prob(Tree.from_newick("((A,B),C,(D,X));"))
    with pytest.raises(ShapeError, match=r"does not end with \(3, 2\)"):
        unrooted.log_prob(torch.zeros(4, 2, 2, dtype=torch.int64))
    with pytest.raises(SettingsError, match="negative"):
        unrooted.sample(-1, seed=0)


def test_splits_are_named_by_their_taxa():
    trees = [Tree.from_newick("((A,B),C,(D,E));")]
    splits = SampleFrequencies.from_topologies(Topologies.from_trees(trees)).split_probabilities()
    assert splits.to_dict() == {("D", "E"): 1.0, ("C", "D", "E"): 1.0}
    assert [clades.members(split) for split in splits.splits] == [[3, 4], [2, 3, 4]]


@pytest.mark.parametrize("rooted", [False, True])
def test_tensors_in_another_order_are_the_same_topologies(fit, rooted):
    sample = sample_of(6, rooted)
    distribution = fit(sample)
    expected = distribution.log_prob(sample.topologies)
    children = torch.from_numpy(sample.topologies.children.astype(np.int64))
    assert torch.equal(distribution.log_prob(children.flip(-1)), expected)
    # Nodes numbered as they close in the text: still children before parents.
    renumbered = torch.stack([closing_order(one, 6) for one in children])
    assert not torch.equal(renumbered, children)
    assert torch.equal(distribution.log_prob(renumbered), expected)


def closing_order(children, num_taxa):
    """Number internal nodes as a walk from the root leaves them."""
    pairs, found = children.tolist(), []

    def number(node):
        if node < num_taxa:
            return node
        found.append([number(child) for child in reversed(pairs[node - num_taxa])])
        return num_taxa + len(found) - 1

    number(num_taxa + len(pairs) - 1)
    return torch.tensor(found)


@pytest.mark.parametrize(
    "children",
    [
        [[1, 2], [2, 3]],  # a taxon twice
        [[0, 2], [3, 4]],  # the first taxon, which hangs from the last node
        [[1, 5], [2, 3]],  # a child after its parent
        [[1, 4], [2, 3]],  # a node below itself
        [[-1, 2], [3, 4]],
        [[1, 2], [3, 2**32 + 4]],
    ],
)
def test_tensors_that_are_no_topologies_are_refused(children):
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD"))
    assert network.log_prob(torch.tensor([[1, 2], [3, 4]])).shape == ()
    with pytest.raises(TreeError, match="not used exactly once"):
        network.log_prob(torch.tensor(children))
    with pytest.raises(TreeError, match="node numbers cannot be"):
        network.log_prob(torch.tensor(children, dtype=torch.float64))


def test_log_prob_has_the_batch_of_an_expanded_distribution(fit):
    distribution = fit(sample_of(5))
    one = torch.from_numpy(distribution.sample(1, seed=0).children[0])
    expanded = distribution.expand([4])
    assert torch.equal(expanded.log_prob(one), distribution.log_prob(one).expand(4))
    assert expanded.log_prob(one.expand(3, 1, 3, 2)).shape == (3, 4)
    assert distribution.expand([2, 1]).log_prob(one.expand(4, 3, 2)).shape == (2, 4)
    with pytest.raises(ShapeError, match=r"\(3,\) does not broadcast with the batch shape \(4,\)"):
        expanded.log_prob(one.expand(3, 3, 2))


def test_topologies_of_wide_integers_are_found(fit):
    sample = sample_of(5)
    distribution = fit(sample)
    wide = Topologies(sample.topologies.taxa, sample.topologies.children.astype(np.int64)[:, :, :])
    assert wide.children.dtype == np.int32 and wide.children.flags.c_contiguous
    assert torch.equal(distribution.log_prob(wide), distribution.log_prob(sample.topologies))
    turned = Topologies(sample.topologies.taxa, np.asfortranarray(sample.topologies.children))
    assert torch.equal(distribution.log_prob(turned), distribution.log_prob(sample.topologies))


def test_what_are_no_topologies_is_refused(fit):
    distribution = fit(sample_of(5))
    every = all_topologies("ABCDE")
    for other in (TreeSample.from_topologies(every), [every.tree(0)], every.children, distribution, "(A,B,C);"):
        with pytest.raises(TreeError, match="is not Topologies.*Remedy"):
            distribution.log_prob(other)


def test_frequencies_of_a_topology_that_stands_twice_are_refused():
    with pytest.raises(SettingsError, match="occurs twice"):
        SampleFrequencies(all_topologies("ABCD")[[0, 1, 0]], np.full(3, 1 / 3))


def test_what_a_distribution_is_stands_in_its_name():
    sample = sample_of(5)
    network = SubsplitBayesianNetwork.fit(sample)
    assert repr(network) == f"SubsplitBayesianNetwork(5 taxa, unrooted, {network.graph.num_options} options)"
    assert repr(ConditionalCladeDistribution.fit(sample_of(5, True))).startswith(
        "ConditionalCladeDistribution(5 taxa, rooted, "
    )
    assert repr(SampleFrequencies.fit(sample)) == "SampleFrequencies(5 taxa, unrooted, 6 topologies)"
    assert repr(Smoothed(SampleFrequencies.fit(sample), 0.1)) == "Smoothed(5 taxa, unrooted, epsilon 0.1)"


def test_a_mixture_lacks_no_topology():
    every = all_topologies("ABCDE")
    base = SubsplitBayesianNetwork.from_topologies(every[:1])
    smoothed = Smoothed(base, 0.1)
    assert base.why_not(every[9]) and smoothed.why_not(every[9]) is None
    with pytest.raises(TreeError, match="rooted"):
        smoothed.why_not(all_topologies("ABCDE", rooted=True))
