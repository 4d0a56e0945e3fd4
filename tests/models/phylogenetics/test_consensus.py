"""Consensus trees, beside DendroPy's and by hand."""

import itertools
import random
import re

import dendropy
import numpy as np
import pytest
import torch

from bayeskit.errors import OutputError, SettingsError, TreeError
from bayeskit.models.phylogenetics._samples import TreeSample, robinson_foulds
from bayeskit.models.phylogenetics._summaries import (
    AnnotatedTree,
    greedy_consensus,
    majority_rule_consensus,
    maximum_clade_credibility,
    plot_credible_set,
)
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._trees import Tree


def random_newick(source: random.Random, num_taxa: int, at_root: int, keep: float) -> str:
    """A tree whose joins follow the numbers of the taxa with some probability, so that trees agree in part."""
    length = lambda: f":{source.expovariate(5):.5f}"  # noqa: E731
    parts = [f"t{i}{length()}" for i in range(num_taxa)]
    while len(parts) > at_root:
        place = 0 if source.random() < keep else source.randrange(len(parts) - 1)
        parts[place : place + 2] = [f"({parts[place]},{parts[place + 1]}){length()}"]
    return f"({','.join(parts)});"


def read(tmp_path, num_taxa: int, rooted: bool, weighted: bool = False, keep: float = 0.8):
    source = random.Random(num_taxa + rooted)
    texts = [random_newick(source, num_taxa, 2 if rooted else 3, keep) for _ in range(50)]
    weights = [source.random() + 0.1 if weighted else 1.0 for _ in texts]
    path = tmp_path / "trees.nwk"
    path.write_text("".join(f"{weight!r} {text}\n" for weight, text in zip(weights, texts, strict=True)))
    names = [f"t{i}" for i in range(num_taxa)]
    sample = TreeSample.from_file(path, taxa=names)
    assert sample.rooted == rooted
    trees = dendropy.TreeList.get(
        data="".join(texts),
        schema="newick",
        rooting="force-rooted" if rooted else "force-unrooted",
        taxon_namespace=dendropy.TaxonNamespace(names),
    )
    for tree, weight in zip(trees, weights, strict=True):
        tree.weight = weight
    return sample, trees


def edges(tree: AnnotatedTree) -> dict[frozenset[str], tuple[float, float | None]]:
    """Support and length of each edge by its side without the first taxon (or its clade)."""
    below = [frozenset([taxon]) for taxon in tree.taxa]
    for children in tree.children:
        below.append(frozenset().union(*(below[child] for child in children)))
    assert below[-1] == frozenset(tree.taxa) and len(below) == tree.num_edges + 1
    lengths = [None] * tree.num_edges if tree.branch_lengths is None else tree.branch_lengths.tolist()
    return {
        frozenset(tree.taxa) - side if tree.taxa[0] in side and not tree.rooted else side: (support, length)
        for side, support, length in zip(below[:-1], tree.supports.tolist(), lengths, strict=True)
    }


def theirs(tree: dendropy.Tree, first: str | None) -> set[frozenset[str]]:
    everything = frozenset(leaf.taxon.label for leaf in tree.leaf_node_iter())
    sides = [frozenset(leaf.taxon.label for leaf in node.leaf_iter()) for node in tree if node.parent_node]
    return {everything - side if first in side else side for side in sides}


@pytest.mark.calibration
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("num_taxa", [8, 66])
def test_majority_rule_is_that_of_dendropy(tmp_path, num_taxa, rooted, weighted):
    sample, trees = read(tmp_path, num_taxa, rooted, weighted, keep=0.2 if num_taxa == 8 else 0.7)
    counted = trees.split_distribution(use_tree_weights=weighted)
    sizes = []
    for threshold in (0.501, 0.701):
        found = edges(majority_rule_consensus(sample, threshold))
        expected = trees.consensus(min_freq=threshold, use_tree_weights=weighted)
        first = None if rooted else "t0"
        assert found.keys() == theirs(expected, first)
        sizes.append(len(found))
        for side, (support, length) in found.items():
            mask = trees.taxon_namespace.taxa_bitmask(labels=side)
            mask = mask if mask in counted.split_counts else (1 << num_taxa) - 1 - mask
            assert abs(support - counted[mask]) < 1e-12
            if not weighted:
                assert abs(length - np.mean(counted.split_edge_lengths[mask])) < 1e-12
    assert sample.topologies.num_edges > sizes[0] > sizes[1] > num_taxa


def test_mean_lengths_are_weighted_by_hand():
    every = all_topologies("ABCD")
    lengths = np.arange(20.0).reshape(4, 5)
    sample = TreeSample.from_topologies(every[[0, 1, 0, 2]], [2, 1, 4, 1], torch.from_numpy(lengths))
    tree = majority_rule_consensus(sample)
    tips = np.average(lengths[:, :4], axis=0, weights=[2, 1, 4, 1])
    inner = (2 * lengths[0, 4] + 4 * lengths[2, 4]) / 6
    assert tree.branch_lengths.tolist() == pytest.approx([*tips, inner], abs=1e-12)
    assert tree.supports.tolist() == [1, 1, 1, 1, 0.75]
    # The mutation: equal weights.
    assert abs(inner - (lengths[0, 4] + lengths[2, 4]) / 2) > 0.1


def fits(one: frozenset[str], other: frozenset[str]) -> bool:
    return not one & other or one <= other or other <= one


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("keep", [0.3, 0.8])
def test_greedy_consensus_by_hand(tmp_path, rooted, keep):
    sample, _ = read(tmp_path, 10, rooted, weighted=True, keep=keep)
    support: dict[frozenset[str], float] = {}
    for number, weight in zip(sample.index, sample.sample_weights, strict=True):
        for side in sample.topologies.below[number, 10:]:
            members = frozenset(f"t{i}" for i in range(10) if int(side[0]) >> i & 1)
            support[members] = support.get(members, 0.0) + weight
    chosen: list[frozenset[str]] = []
    for side in sorted(support, key=lambda side: -support[side]):
        if all(fits(side, other) for other in chosen):
            chosen.append(side)
    tree = greedy_consensus(sample)
    found = {side: support for side, (support, _) in edges(tree).items() if len(side) > 1}
    found.pop(frozenset(sample.taxa[1:]), None) if not rooted else None
    assert found.keys() == set(chosen) and len(chosen) > 4
    assert max(abs(found[side] - support[side]) for side in chosen) < 1e-12
    for cut in (0.2, 0.5):
        limited = {side for side in edges(greedy_consensus(sample, cut)) if len(side) > 1} & support.keys()
        assert limited == {side for side in chosen if support[side] >= cut}
    # Whatever the majority has, the greedy tree has.
    assert edges(majority_rule_consensus(sample)).keys() <= edges(tree).keys()


def test_one_topology_is_its_own_consensus():
    every = all_topologies("ABCDEF")
    for row in (0, 50, 104):
        for tree in (majority_rule_consensus, greedy_consensus):
            found = tree(TreeSample.from_topologies(every[[row]]))
            assert [len(below) for below in found.children] == [2, 2, 2, 3] and set(found.supports) == {1.0}
            again = TreeSample.from_topologies(every[[row]].rooted_at(3))
            assert [len(below) for below in tree(again).children] == [2] * 5


def test_strict_consensus_and_ties():
    every = all_topologies("ABCD")
    sample = TreeSample.from_topologies(every[[0, 1]], [1 - 1e-6, 1e-6])
    assert len(majority_rule_consensus(sample, 1.0).children) == 1
    assert len(majority_rule_consensus(sample, 0.999).children) == 2
    third = TreeSample.from_topologies(every[[0] * 3 + [1] * 3])
    assert len(majority_rule_consensus(third).children) == 1
    assert majority_rule_consensus(TreeSample.from_topologies(every[[0] * 7]), 1.0).supports[-1] > 1 - 1e-12


def test_newick_of_a_consensus(tmp_path):
    sample, _ = read(tmp_path, 8, False)
    tree = majority_rule_consensus(sample)
    read_back = dendropy.Tree.get(data=tree.newick, schema="newick", rooting="force-unrooted")
    expected = edges(tree)
    assert theirs(read_back, "t0") == expected.keys()
    for node in read_back.preorder_node_iter():
        side = frozenset(leaf.taxon.label for leaf in node.leaf_iter())
        if node.parent_node and len(side) > 1:
            assert abs(float(node.label) - expected[side][0]) < 1e-6
            assert node.edge_length == expected[side][1]
    quoted = Topologies(("it's", "a b", "C", "D"), all_topologies("ABCD").children)
    assert majority_rule_consensus(TreeSample.from_topologies(quoted)).newick == "('it''s','a b',C,D);"


@pytest.mark.parametrize("suffix", [".nwk", ".nex"])
def test_a_consensus_is_read_back(tmp_path, suffix):
    sample, _ = read(tmp_path, 8, False)
    tree = majority_rule_consensus(sample, 0.9)
    path = tmp_path / f"consensus{suffix}"
    tree.to_file(path)
    with pytest.raises(TreeError, match="resolve=True"):
        Tree.from_file(path)
    again = TreeSample.from_trees([Tree.from_file(path, resolve=True, seed=seed) for seed in range(20)])
    assert len(again.topologies) > 1
    back = majority_rule_consensus(again.with_taxa(tree.taxa), 1.0)
    found, expected = edges(back), edges(tree)
    assert found.keys() == expected.keys()
    assert all(abs(found[side][1] - expected[side][1]) < 1e-14 for side in found)
    assert re.sub(r"\)[0-9.]+:", "):", tree.to_newick()) == tree.to_newick(supports=False)
    with pytest.raises(OutputError):
        tree.to_file(tmp_path / "missing" / "tree.nwk")


def test_an_outgroup_keeps_supports_and_lengths(tmp_path):
    sample, _ = read(tmp_path, 8, False)
    tree = majority_rule_consensus(sample)
    for taxon in tree.taxa:
        rooted = tree.rooted_at(taxon)
        outgroup = rooted.taxa.index(taxon)
        root = rooted.children[-1]
        assert rooted.rooted and len(root) == 2 and outgroup in root
        assert rooted.branch_lengths[root[0]] == rooted.branch_lengths[root[1]]
        # As the consensus of rooted trees has them.
        expected = majority_rule_consensus(sample.rooted_at(taxon))
        assert rooted.children == expected.children
        np.testing.assert_allclose(rooted.supports, expected.supports, rtol=0, atol=1e-12)
        torch.testing.assert_close(rooted.branch_lengths, expected.branch_lengths, rtol=1e-12, atol=0)
    with pytest.raises(TreeError, match="has a root"):
        rooted.rooted_at("t1")
    with pytest.raises(TreeError, match="no taxon 'X'"):
        tree.rooted_at("X")


@pytest.mark.parametrize("wrong", ["run.t", None, Tree.from_newick("(A,B,C);")])
def test_only_samples_have_a_consensus(wrong):
    for call in (majority_rule_consensus, greedy_consensus, plot_credible_set):
        with pytest.raises(TreeError, match=r"is not a sample of trees.*TreeSample\.from_file"):
            call(wrong)


@pytest.mark.parametrize("threshold", [0.49, 1.01, float("nan")])
def test_what_is_refused(threshold):
    sample = TreeSample.from_topologies(all_topologies("ABCD"))
    with pytest.raises(SettingsError, match="greedy_consensus"):
        majority_rule_consensus(sample, threshold)
    for minimum in itertools.chain([-0.1, 1.1], [threshold] if threshold != 0.49 else []):
        with pytest.raises(SettingsError, match="not a frequency"):
            greedy_consensus(sample, minimum)


def test_splits_that_are_equally_frequent_are_taken_in_their_own_order():
    """Frequencies of one half that stand on the other side of rounding where the same trees come in another order."""
    topologies = all_topologies("ABCDE")
    trees = [8, 10, 0, 11, 5, 11, 8, 8, 11, 5, 5, 10]
    permuted = [trees[place] for place in (6, 4, 7, 1, 0, 8, 2, 9, 3, 11, 5, 10)]
    one, other = (greedy_consensus(TreeSample.from_topologies(topologies[order])) for order in (trees, permuted))
    assert one.newick == other.newick == "(A,(C,D)0.416667,(B,E)0.5);"


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_the_summary_of_one_large_tree_is_the_tree(keep):
    tree = Tree.from_newick(random_newick(random.Random(4), 400, 3, keep))
    sample = TreeSample.from_trees([tree])
    for summary in (majority_rule_consensus, greedy_consensus, maximum_clade_credibility):
        found = summary(sample)
        assert robinson_foulds(tree, Tree.from_newick(found.newick)) == 0
        assert found.branch_lengths.sum().item() == pytest.approx(tree.branch_lengths.sum().item())
