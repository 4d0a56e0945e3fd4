"""Trees with supports and intervals: what other programs read, and roots that leave supports with their splits."""

import itertools
import random
import re
import warnings

import dendropy
import numpy as np
import pytest
import torch

from bayeskit.errors import TreeError, UnknownNameError
from bayeskit.models.phylogenetics import (
    AnnotatedTree,
    Topologies,
    Tree,
    TreeSample,
    all_topologies,
    greedy_consensus,
    majority_rule_consensus,
    maximum_clade_credibility,
)
from bayeskit.models.phylogenetics._weighted_summaries import summarised

TAXA = tuple("ABCDEFG")


def unrooted_sample(weighted: bool = False) -> TreeSample:
    random_numbers = np.random.default_rng(3)
    every = all_topologies(TAXA[:6])
    index = random_numbers.choice(30, 80, p=random_numbers.dirichlet(np.full(30, 0.3)))
    lengths = torch.from_numpy(random_numbers.exponential(0.1, (80, 9)))
    return TreeSample.from_topologies(every[index], random_numbers.random(80) if weighted else None, lengths)


def coalescent(source: random.Random) -> str:
    parts, height = [(taxon, 0.0) for taxon in TAXA], 0.0
    while len(parts) > 1:
        height += source.expovariate(len(parts))
        place = 0 if source.random() < 0.6 else source.randrange(len(parts) - 1)
        (one, low), (other, lower) = parts[place : place + 2]
        parts[place : place + 2] = [(f"({one}:{height - low!r},{other}:{height - lower!r})", height)]
    return parts[0][0] + ";"


def rooted_sample(tmp_path) -> TreeSample:
    source = random.Random(5)
    (tmp_path / "rooted.nwk").write_text("\n".join(coalescent(source) for _ in range(60)))
    return TreeSample.from_file(tmp_path / "rooted.nwk", taxa=TAXA)


def sides(tree: AnnotatedTree) -> list[frozenset[str]]:
    below = [frozenset([taxon]) for taxon in tree.taxa]
    for children in tree.children:
        below.append(frozenset().union(*(below[child] for child in children)))
    return below


def splits(tree: AnnotatedTree) -> dict[frozenset[str], float]:
    """Support of each split by its side without the first taxon."""
    everything, found = frozenset(tree.taxa), {}
    for side, support in zip(sides(tree)[:-1], tree.supports.tolist(), strict=True):
        side = everything - side if tree.taxa[0] in side else side
        assert found.setdefault(side, support) == support  # both edges at a root
    return found


# Summaries of lengths.


def shortest(values, weights):
    """The shortest interval with at least 95 % of the weight, from all pairs of values."""
    order = np.argsort(values)
    values, weights = values[order], weights[order] / weights.sum()
    pairs = [
        (values[end] - values[start], start, end)
        for start, end in itertools.combinations_with_replacement(range(len(values)), 2)
        if weights[start : end + 1].sum() >= 0.95 - 1e-9
    ]
    _, start, end = min(pairs)
    return values[start], values[end]


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_median_and_interval_by_hand(weighted):
    sample = unrooted_sample(weighted)
    tree = greedy_consensus(sample)
    assert tree.length_summary is not None and len(tree.children) == 4
    for edge, side in enumerate(sides(tree)[:-1]):
        rows, values = [], []
        for row, number in enumerate(sample.index):
            for place, bits in enumerate(sample.topologies.below[number]):
                held = frozenset(taxon for at, taxon in enumerate(sample.taxa) if int(bits[0]) >> at & 1)
                if held == side:
                    rows.append(row)
                    values.append(float(sample.branch_lengths[row, place]))
        values, weights = np.array(values), sample.sample_weights[rows]
        assert abs(weights.sum() - tree.supports[edge]) < 1e-12
        assert abs(np.average(values, weights=weights) - tree.length_summary.mean[edge]) < 1e-12
        if not weighted:
            assert abs(np.median(values) - tree.length_summary.median[edge]) < 1e-12
        assert tuple(tree.length_summary.interval[edge]) == shortest(values, weights)
    assert torch.equal(tree.branch_lengths, torch.from_numpy(tree.length_summary.mean))
    median = greedy_consensus(sample, lengths="median")
    assert torch.equal(median.branch_lengths, torch.from_numpy(tree.length_summary.median))


def test_weights_count_as_copies():
    """A weight of three is the same as three equal values, and a weight of zero as none."""
    values = np.array([[3.0], [1.0], [2.0], [9.0]])
    weighted = summarised(np.zeros((4, 1), dtype=int), values, np.array([1.0, 3.0, 2.0, 0.0]), 2)
    copied = summarised(np.zeros((6, 1), dtype=int), values[[0, 1, 1, 1, 2, 2]], np.ones(6), 2)
    for one, other in zip(weighted, copied, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-15)
    assert weighted.median[0] == 1.5 and np.isnan(weighted.mean[1])


# The tree of maximum clade credibility.


@pytest.mark.parametrize("rooted", [False, True])
def test_maximum_clade_credibility_by_hand(tmp_path, rooted):
    sample = rooted_sample(tmp_path) if rooted else unrooted_sample(weighted=True)
    num_taxa, frequencies = sample.num_taxa, {}
    for number, weight in enumerate(sample.weights):
        for bits in sample.topologies.below[number, num_taxa:]:
            frequencies[int(bits[0])] = frequencies.get(int(bits[0]), 0.0) + weight
    credibility = [
        sum(np.log(frequencies[int(bits[0])]) for bits in sample.topologies.below[number, num_taxa:])
        for number in range(len(sample.topologies))
    ]
    tree = maximum_clade_credibility(sample)
    best = int(np.argmax(credibility))
    expected = AnnotatedTree.of(sample.topologies[best])
    assert tree.children == expected.children and tree.rooted == rooted
    assert abs(np.log(tree.supports).sum() - credibility[best]) < 1e-9
    assert (tree.supports == AnnotatedTree.of(sample.topologies[best], sample).supports).all()


def test_ties_and_trees_of_weight_zero():
    every = all_topologies("ABCD")
    assert maximum_clade_credibility(TreeSample.from_topologies(every[[2, 0, 1]])).newick == "(A,B,(C,D)0.333333);"
    zero = TreeSample.from_topologies(every, [1, 0, 0])
    assert maximum_clade_credibility(zero).supports.tolist() == [1.0] * 5


def test_heights_of_common_ancestors(tmp_path):
    """As the program TreeAnnotator gives them with `-heights ca`: by DendroPy, over all trees."""
    sample = rooted_sample(tmp_path)
    tree = maximum_clade_credibility(sample, lengths="heights")
    trees = dendropy.TreeList.get(path=tmp_path / "rooted.nwk", schema="newick", rooting="force-rooted")
    heights = {node: [] for node in range(tree.num_edges + 1)}
    for one in trees:
        one.calc_node_ages(ultrametricity_precision=1e-9)
        for node, side in enumerate(sides(tree)):
            heights[node].append(one.mrca(taxon_labels=side).age)
    assert tree.height_summary is not None
    for node, values in heights.items():
        assert abs(np.mean(values) - tree.height_summary.mean[node]) < 1e-12
        assert abs(np.median(values) - tree.height_summary.median[node]) < 1e-12
    # All tips are at the same distance from the root.
    way = np.zeros(tree.num_edges + 1)
    for node in reversed(range(tree.num_taxa, tree.num_edges + 1)):
        for child in tree.children[node - tree.num_taxa]:
            way[child] = way[node] + tree.branch_lengths[child].item()
    np.testing.assert_allclose(way[: tree.num_taxa], tree.height_summary.mean[-1], rtol=1e-12)
    assert np.ptp(way[: tree.num_taxa]) < 1e-12
    # The mutation: means of lengths align no tips.
    assert maximum_clade_credibility(sample).branch_lengths.tolist() != tree.branch_lengths.tolist()


# Text that other programs read.


def numbers(text):
    return [float(one) for one in text] if isinstance(text, list) else float(text)


@pytest.mark.parametrize("form", ["mrbayes", "beast"])
@pytest.mark.parametrize("kind", ["majority rule", "maximum clade credibility", "rooted"])
def test_dendropy_reads_the_same_numbers(tmp_path, form, kind):
    sample = rooted_sample(tmp_path) if kind == "rooted" else unrooted_sample()
    tree = majority_rule_consensus(sample) if kind == "majority rule" else maximum_clade_credibility(sample)
    path = tmp_path / "summary.tre"
    tree.to_file(path, annotations=form)
    read = dendropy.Tree.get(path=path, schema="nexus", extract_comment_metadata=True)
    assert read.is_rooted == tree.rooted
    places = {side: node for node, side in enumerate(sides(tree))}
    names = {
        "mrbayes": ("length_mean", "length_median", "length_95%HPD"),
        "beast": ("length", "length_median", "length_95%_HPD"),
    }[form]
    # Numbers for names, because readers in R take a mark such as '.' in a name for the start of a length.
    assert re.search(r"tree summary = \[&[RU]\] \([(1-9]", path.read_text())
    count = 0
    for node in read.preorder_node_iter():
        place = places.pop(frozenset(leaf.taxon.label for leaf in node.leaf_iter()))
        notes = {key: numbers(value) for key, value in node.annotations.values_as_dict().items()}
        if place < tree.num_edges:
            assert node.edge_length == tree.branch_lengths[place].item()
            expected = [values[place].tolist() for values in tree.length_summary]
            assert [notes[name] for name in names] == expected
            count += 1
        if form == "mrbayes" and place == tree.num_edges and not tree.rooted:
            assert not notes
        elif form == "mrbayes":
            support = 1.0 if place == tree.num_edges else tree.supports[place]
            assert abs(notes["prob"] - support) < 1e-12
        elif tree.num_taxa <= place < tree.num_edges:
            assert abs(notes["posterior"] - tree.supports[place]) < 1e-12
        if form == "beast" and tree.rooted:
            expected = [values[place].tolist() for values in tree.height_summary]
            assert [notes[f"CAheight_{name}"] for name in ("mean", "median", "95%_HPD")] == expected
            assert notes["height"] == tree.height_summary.mean[place]
    assert not places and count == tree.num_edges


@pytest.mark.parametrize("form", ["mrbayes", "beast", None])
def test_our_reader_reads_the_tree_and_passes_over_the_notes(tmp_path, form):
    sample = unrooted_sample()
    tree = maximum_clade_credibility(sample)
    tree.to_file(tmp_path / "tree.nexus", annotations=form)
    again = Tree.from_file(tmp_path / "tree.nexus")
    assert AnnotatedTree.of(again, sample).newick == tree.newick
    outgroup = next(side for side in sides(tree) if len(side) == 3)
    rooted = tree.rooted_at(sorted(outgroup))
    rooted.to_file(tmp_path / "rooted.nexus", annotations=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = Tree.from_file(tmp_path / "rooted.nexus")
    topologies = Topologies.from_trees([back], taxa=tree.taxa)
    assert AnnotatedTree.of(topologies).children == tree.children
    torch.testing.assert_close(topologies.branch_lengths_of([back])[0], tree.branch_lengths, rtol=1e-15, atol=0)
    assert TreeSample.from_file(tmp_path / "rooted.nexus", burn_in=0).rooted


def test_names_and_notes_that_are_left_out(tmp_path):
    quoted = Topologies(("it's", "a b", "C", "D"), all_topologies("ABCD").children[:1])
    tree = majority_rule_consensus(TreeSample.from_topologies(quoted))
    tree.to_file(tmp_path / "tree.nex")
    labels = dendropy.Tree.get(path=tmp_path / "tree.nex", schema="nexus").taxon_namespace.labels()
    assert sorted(labels) == ["C", "D", "a b", "it's"]
    assert "prob" not in tree.to_newick(False, annotations="mrbayes")
    assert tree.to_newick(annotations="beast").endswith("[&posterior=1.0];")
    tree.to_file(tmp_path / "tree.nwk")
    assert (tmp_path / "tree.nwk").read_text() == tree.newick + "\n"


# A given tree beside a sample.


def test_supports_of_a_given_tree():
    every = all_topologies("ABCD")
    lengths = torch.arange(15.0, dtype=torch.float64).reshape(3, 5)
    sample = TreeSample.from_topologies(every[[0, 0, 1]], None, lengths)
    names = [frozenset(side) for side in ("AC", "BD")]
    for row, support in ((0, 2 / 3), (1, 1 / 3), (2, 0.0)):
        tree = AnnotatedTree.of(every.tree(row), sample.with_taxa("DCBA"))
        assert tree.supports[-1] == pytest.approx(support, abs=1e-12) and tree.supports[:4].tolist() == [1.0] * 4
        assert np.isnan(tree.length_summary.mean[-1]) == (support == 0)
        assert any(name in sides(tree) for name in names) == (row == 0)
        assert tree.to_newick(annotations="mrbayes").count("length_mean") == (4 if row == 2 else 5)
    own = AnnotatedTree.of(Tree.from_newick("((A:1,B:2):3,C:4,D:5);"), sample)
    assert own.branch_lengths.tolist() == [1.0, 2.0, 4.0, 5.0, 3.0]
    assert AnnotatedTree.of(Tree.from_newick("(A,B,C);")).newick == "(A,B,C);"


# Roots.


def test_supports_stay_with_their_splits_under_every_root():
    """Nodes turn over when a root moves; a support that stayed at its node would come to another split."""
    tree = maximum_clade_credibility(unrooted_sample())
    expected = splits(tree)
    inner = {side: support for side, support in expected.items() if len(side) > 1 and len(side) < 5}
    assert len(set(inner.values())) == len(inner) == 3  # all different
    displaced = 0
    for side in sides(tree)[:-1]:
        for outgroup in (side, frozenset(tree.taxa) - side):
            rooted = tree.rooted_at(sorted(outgroup))
            assert rooted.rooted and {frozenset(outgroup), frozenset(tree.taxa) - outgroup} <= set(sides(rooted))
            assert splits(rooted) == expected
            one, other = rooted.children[-1]
            assert rooted.branch_lengths[one] == rooted.branch_lengths[other]
            assert abs(float(rooted.branch_lengths.sum() - tree.branch_lengths.sum())) < 1e-14
            # Of both halves together, mean and interval are those of the whole edge.
            whole = next(edge for edge, found in enumerate(sides(tree)) if found == side)
            for ours, theirs in zip(rooted.length_summary, tree.length_summary, strict=True):
                np.testing.assert_allclose(ours[one] + ours[other], theirs[whole], rtol=1e-14)
            # What a reader of labels sees.
            read = dendropy.Tree.get(data=rooted.newick, schema="newick", rooting="force-rooted")
            for node in read.preorder_internal_node_iter(exclude_seed_node=True):
                below = frozenset(leaf.taxon.label for leaf in node.leaf_iter())
                key = frozenset(tree.taxa) - below if "A" in below else below
                assert float(node.label) == pytest.approx(expected[key], abs=1e-6)
                displaced += key != below
    assert displaced > 10


def test_the_outgroup_must_be_on_one_side_of_an_edge():
    tree = majority_rule_consensus(TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6]))
    for outgroup in ("B", ["B"], ["A"], ["A", "C", "D"], ["C", "D"], ["A", "B"], ["D", "C", "D"]):
        assert tree.rooted_at(outgroup).rooted
    with pytest.raises(TreeError, match=r"no edge separates A, C from all other taxa.*also has"):
        tree.rooted_at(["A", "C"])
    # Two of the three branches of a node are no clade either.
    star = majority_rule_consensus(TreeSample.from_topologies(all_topologies("ABCD")))
    with pytest.raises(TreeError, match="no edge separates"):
        star.rooted_at(["A", "B"])
    for outgroup in ([], list("ABCD")):
        with pytest.raises(TreeError, match="empty, or has all taxa"):
            tree.rooted_at(outgroup)
    with pytest.raises(TreeError, match="no taxon 'X'"):
        tree.rooted_at(["C", "X"])
    with pytest.raises(TreeError, match="has a root"):
        tree.rooted_at("C").rooted_at("B")


def test_the_midpoint_is_that_of_dendropy():
    source = np.random.default_rng(1)
    for row in source.choice(945, 20, replace=False):
        lengths = torch.from_numpy(source.exponential(1.0, 11))
        tree = AnnotatedTree.of(all_topologies(TAXA)[[int(row)]].tree(0, lengths))
        rooted = tree.rooted_at_midpoint()
        read = dendropy.Tree.get(data=tree.newick, schema="newick", rooting="force-unrooted")
        read.reroot_at_midpoint(suppress_unifurcations=True)
        expected = {
            frozenset(leaf.taxon.label for leaf in node.leaf_iter()): node.edge_length
            for node in read.preorder_node_iter()
            if node.parent_node
        }
        found = dict(zip(sides(rooted)[:-1], rooted.branch_lengths.tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert all(abs(found[side] - expected[side]) < 1e-12 for side in found)
        # The two longest ways from the root are equal, in both directions.
        ways = [
            max(leaf.distance_from_root() for leaf in child.leaf_iter()) for child in read.seed_node.child_node_iter()
        ]
        assert abs(ways[0] - ways[1]) < 1e-12


def test_a_midpoint_on_a_node_and_no_midpoint():
    tree = AnnotatedTree.of(Tree.from_newick("((A:2,B:2):0,C:1,D:1);"))
    rooted = tree.rooted_at_midpoint()
    assert rooted.rooted and rooted.branch_lengths.min() >= 0
    assert float(rooted.branch_lengths.sum()) == 6
    for newick in ("((A,B),C,D);", "((A:0,B:0):0,C:0,D:0);"):
        with pytest.raises(TreeError, match="no branch lengths above zero"):
            AnnotatedTree.of(Tree.from_newick(newick)).rooted_at_midpoint()
    with pytest.raises(TreeError, match="has a root"):
        rooted.rooted_at_midpoint()


def test_the_root_of_a_midpoint_leaves_supports_with_their_splits():
    tree = greedy_consensus(unrooted_sample())
    assert splits(tree.rooted_at_midpoint()) == splits(tree)


# What is refused.


def test_what_is_refused(tmp_path):
    bare = TreeSample.from_topologies(all_topologies("ABCD"))
    for make in (majority_rule_consensus, greedy_consensus, maximum_clade_credibility):
        with pytest.raises(TreeError, match="no branch lengths"):
            make(bare, lengths="median")
        with pytest.raises(TreeError, match="no root"):
            make(unrooted_sample(), lengths="heights")
        with pytest.raises(UnknownNameError, match="choice of lengths"):
            make(unrooted_sample(), lengths="mode")
    tree = maximum_clade_credibility(bare)
    for call in (tree.to_newick, lambda annotations: tree.to_file(tmp_path / "x.nex", annotations=annotations)):
        with pytest.raises(UnknownNameError, match="form of annotations"):
            call(annotations="paup")
    with pytest.raises(TreeError, match="is not a sample of trees"):
        maximum_clade_credibility(None)
    for wrong in (None, "((A,B),C,D);", all_topologies("ABCD")):
        with pytest.raises(TreeError, match="not a single tree"):
            AnnotatedTree.of(wrong)
    with pytest.raises(TreeError, match="only in the sample"):
        AnnotatedTree.of(Tree.from_newick("(A,B,C);"), bare)
    with pytest.raises(TreeError, match="is rooted"):
        AnnotatedTree.of(bare.topologies[0].rooted_at("A"), bare)
    assert re.match(r"AnnotatedTree\(4 taxa, unrooted, 1 of at most 1 inner edges: ", repr(tree))
