"""Topologies as arrays, sets of taxa as bits: against plain sets, all topologies of few taxa, and many taxa."""

import random
import re

import dendropy
import numpy as np
import pytest
import torch

from bayeskit.errors import ConversionWarning, DataError, ShapeError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._trees import Tree

NAMES = "ABCDEFGHI"


def below_edges(newick: str) -> dict[frozenset[str], float | None]:
    """Taxa below every edge, and its length, by hand."""
    edges: dict[frozenset[str], float | None] = {}
    stack: list[set[str]] = [set()]
    for mark, label, length in re.findall(r"([(),])([^(),:;]*)(?::([^(),:;]+))?", newick):
        if mark == "(":
            stack.append(set())
        closed = frozenset(stack.pop() if mark == ")" else {label} if label else ())
        if closed:
            stack[-1] |= closed
            edges[closed] = float(length) if length else None
    # The outermost parenthesis has no edge.
    return {side: length for side, length in edges.items() if side != frozenset(stack[0])}


def splits(newick: str, first: str) -> dict[frozenset[str], float | None]:
    """Split of every edge by its side without the first taxon; lengths of equal ones add."""
    edges = below_edges(newick)
    everything = frozenset().union(*edges)
    result: dict[frozenset[str], float | None] = {}
    for side, length in edges.items():
        key = everything - side if first in side else side
        result[key] = length if result.get(key) is None else result[key] + length
    return result


def random_newick(source: random.Random, names: list[str], at_root: int, lengths: bool = True) -> str:
    end = (lambda: f":{source.uniform(0, 1)!r}") if lengths else (lambda: "")
    parts = [name + end() for name in names]
    while len(parts) > at_root:
        source.shuffle(parts)
        parts = [f"({parts[0]},{parts[1]}){end()}", *parts[2:]]
    return f"({','.join(parts)});"


def named_edges(topologies: Topologies, index: int) -> list[frozenset[str]]:
    return [frozenset(topologies.taxa[i] for i in clades.members(side)) for side in topologies.below[index]]


def agrees(topologies: Topologies, newicks: list[str]) -> bool:
    """Tell whether topologies are those of texts."""
    if topologies.rooted:
        return all(set(named_edges(topologies, i)) == set(below_edges(text)) for i, text in enumerate(newicks))
    everything, first = set(topologies.taxa), topologies.taxa[0]
    found = [
        {frozenset(everything - side) if first in side else side for side in named_edges(topologies, i)}
        for i in range(len(topologies))
    ]
    return all(found[i] == set(splits(text, first)) for i, text in enumerate(newicks))


@pytest.mark.parametrize("num_taxa", [3, 63, 64, 65, 128, 130])
def test_sets_as_bits_are_sets(num_taxa):
    source = random.Random(num_taxa)
    sets = [frozenset(source.sample(range(num_taxa), source.randint(1, num_taxa))) for _ in range(40)]
    sets += sets[:7]
    alone = clades.single(num_taxa)
    bits = np.stack([np.bitwise_or.reduce(alone[sorted(one)], axis=0) for one in sets])
    assert bits.shape == (47, -(-num_taxa // 64))
    assert [clades.members(one) for one in bits] == [sorted(one) for one in sets]
    assert clades.size(bits).tolist() == [len(one) for one in sets]
    for taxon in range(num_taxa):
        assert clades.contains(bits, taxon).tolist() == [taxon in one for one in sets]
    assert clades.members(clades.everything(num_taxa)) == list(range(num_taxa))
    distinct, index = clades.identify(bits.reshape(47, 1, -1))
    assert index.shape == (47, 1) and len(distinct) == len(set(sets))
    assert (distinct[index[:, 0]] == bits).all()
    keys = [(len(one), sum(1 << taxon for taxon in one)) for one in sets]
    in_order = [keys[i] for i in clades.order(bits)]
    assert in_order == sorted(keys)
    assert [sum(1 << t for t in clades.members(one)) for one in distinct] == [key for _, key in sorted(set(keys))]


@pytest.mark.parametrize(("num_taxa", "count"), [(3, 1), (4, 3), (5, 15), (6, 105), (7, 945), (8, 10395)])
def test_all_topologies_are_different_and_as_many_as_there_are(num_taxa, count):
    unrooted = all_topologies(NAMES[:num_taxa])
    assert len(unrooted) == count == len(unrooted.distinct()[0])
    # An unrooted topology is a rooted one of all taxa but one.
    if num_taxa > 3:
        rooted = all_topologies(NAMES[: num_taxa - 1], rooted=True)
        assert len(rooted) == count == len(rooted.distinct()[0])


def test_all_topologies_are_those_grown_by_hand():
    texts = ["(A,B,C);"]
    for taxon in "DEF":
        grown = []
        for text in texts:
            # On the edge above every node, the outermost excepted.
            for match in re.finditer(r"[A-Z]", text):
                grown.append(text[: match.start()] + f"({match.group()},{taxon})" + text[match.end() :])
            for start in (match.start() for match in re.finditer(r"\(", text[1:])):
                depth, end = 0, start + 1
                while not (depth == 1 and text[end] == ")"):
                    depth += {"(": 1, ")": -1}.get(text[end], 0)
                    end += 1
                inner = text[start + 1 : end + 1]
                grown.append(text[: start + 1] + f"({inner},{taxon})" + text[end + 1 :])
        texts = grown
    by_hand = {frozenset(splits(text, "A")) for text in texts}
    ours = all_topologies("ABCDEF")
    found = {frozenset(splits(ours.to_newick(i), "A")) for i in range(len(ours))}
    assert len(texts) == len(by_hand) == 105 and found == by_hand


@pytest.mark.parametrize("num_taxa", [3, 4, 9, 64, 65, 66, 130])
def test_trees_as_rows_and_back(num_taxa):
    source = random.Random(num_taxa)
    names = [f"t{i}" for i in range(num_taxa)]
    texts = [random_newick(source, names, 3) for _ in range(12)]
    trees = [Tree.from_newick(text) for text in texts]
    topologies = Topologies.from_trees(trees, taxa=names)
    assert topologies.children.shape == (12, num_taxa - 2, 2) and topologies.children.dtype == np.int32
    assert agrees(topologies, texts)
    # The mutation: two tips exchanged in one tree, unless they are sisters.
    children = topologies.children.copy()
    one, other = children[5] == 1, children[5] == num_taxa - 1
    children[5][one], children[5][other] = num_taxa - 1, 1
    assert agrees(Topologies(topologies.taxa, children), texts) == (num_taxa == 3)
    # Children come before parents, and edge i joins node i to its parent.
    assert (topologies.children < np.arange(num_taxa, 2 * num_taxa - 2)[:, None]).all()
    for row, (parents, below) in enumerate(zip(topologies.parents, topologies.children, strict=True)):
        for node, pair in enumerate(below, start=num_taxa):
            assert (parents[pair] == node).all()
        assert parents[0] == topologies.num_edges
        again = topologies.tree(row)
        assert splits(again.to_newick(), "t0").keys() == splits(texts[row], "t0").keys()
        assert splits(topologies.to_newick(row), "t0").keys() == splits(texts[row], "t0").keys()


@pytest.mark.parametrize("rooted", [False, True])
def test_lengths_follow_their_edges(rooted):
    source = random.Random(3)
    names = [f"t{i}" for i in range(70)]
    texts = [random_newick(source, names, 2 if rooted else 3) for _ in range(8)]
    edges = [below_edges(text) for text in texts]
    bits = np.stack(
        [
            [np.bitwise_or.reduce(clades.single(70)[[names.index(t) for t in side]], axis=0) for side in of]
            for of in edges
        ]
    )
    topologies, order = Topologies.from_edges(names, bits, rooted)
    lengths = np.take_along_axis(np.array([list(of.values()) for of in edges]), order, axis=1)
    assert topologies.rooted == rooted and agrees(topologies, texts)
    for row, text in enumerate(texts):
        expected = below_edges(text) if rooted else splits(text, "t0")
        for written in (lengths[row].tolist(), torch.from_numpy(lengths[row])):
            newick = topologies.to_newick(row, written)
            assert (below_edges(newick) if rooted else splits(newick, "t0")) == expected
        if not rooted:
            tree = topologies.tree(row, torch.from_numpy(lengths[row]))
            assert splits(tree.to_newick(), "t0") == expected


def test_one_topology_is_one_row_however_it_is_written():
    source = random.Random(4)
    names = [f"t{i}" for i in range(66)]
    text = random_newick(source, names, 3, lengths=False)
    tree = dendropy.Tree.get(data=text, schema="newick", rooting="force-unrooted", preserve_underscores=True)
    trees = [Tree.from_newick(text)]
    for node in source.sample([node for node in tree.internal_nodes() if node.parent_node is not None], 6):
        tree.reroot_at_node(node, update_bipartitions=False)
        for inner in tree.internal_nodes():
            children = inner.child_nodes()
            source.shuffle(children)
            inner.set_child_nodes(children)
        trees.append(Tree.from_newick(tree.as_string("newick", suppress_rooting=True).strip()))
    assert len({tree.to_newick() for tree in trees}) == 7
    distinct, index = Topologies.from_trees(trees, names).distinct()
    assert len(distinct) == 1 and index.tolist() == [0] * 7


def test_distinct_topologies_in_order_of_appearance():
    every = all_topologies("ABCDE")
    chosen = np.array([7, 3, 7, 0, 3, 14])
    distinct, index = every[chosen].distinct()
    assert index.tolist() == [0, 1, 0, 2, 1, 3]
    assert (distinct.children == every.children[[7, 3, 0, 14]]).all()
    assert len(every[2]) == 1 and len(every[2:5]) == 3
    assert [len(one) for one in every] == [1] * 15


def test_sets_in_any_order_make_the_same_topologies():
    every = all_topologies("ABCDEF", rooted=True)
    sets = clades.below(every.children, 6)[:, 6:]
    shuffled = np.random.default_rng(0).permuted(np.arange(5)[None].repeat(len(every), axis=0), axis=1)
    again = Topologies.from_clades("ABCDEF", np.take_along_axis(sets, shuffled[..., None], axis=1), rooted=True)
    assert (again.children == every.children).all()


@pytest.mark.parametrize("num_taxa", [3, 4, 5, 6])
def test_every_root_of_every_topology_gives_every_rooted_topology_once(num_taxa):
    unrooted = all_topologies(NAMES[:num_taxa])
    num_edges = unrooted.num_edges
    rooted = [unrooted.rooted_at(edge) for edge in range(num_edges)]
    rows = np.concatenate([one.children for one in rooted])
    every = all_topologies(NAMES[:num_taxa], rooted=True)
    assert len(rows) == len(every) == len(np.unique(rows, axis=0))
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in every.children}
    for edge, one in enumerate(rooted):
        back, order = one.unrooted()
        assert (back.children == unrooted.children).all()
        for row in range(len(unrooted)):
            # The root stands on the edge asked for.
            side = set(named_edges(unrooted, row)[edge])
            at_root = [named_edges(one, row)[child] for child in one.children[row, -1]]
            assert side in at_root and set(NAMES[:num_taxa]) - side in at_root
            # Each edge keeps its split.
            everything = frozenset(NAMES[:num_taxa])
            for mine, theirs in zip(named_edges(back, row), order[row], strict=True):
                assert named_edges(one, row)[theirs] in (mine, everything - mine)


def test_rooting_and_unrooting_many_taxa():
    source = random.Random(6)
    names = [f"t{i}" for i in range(130)]
    texts = [random_newick(source, names, 3, lengths=False) for _ in range(5)]
    topologies = Topologies.from_trees([Tree.from_newick(text) for text in texts], names)
    edges = np.array([0, 1, 129, 200, 256])
    rooted = topologies.rooted_at(edges)
    assert agrees(rooted, [rooted.to_newick(row) for row in range(5)])
    assert (rooted.unrooted()[0].children == topologies.children).all()
    outgroup = topologies.rooted_at("t77")
    assert all((outgroup.children[:, -1] == 77).any(axis=1))
    assert (outgroup.children == topologies.rooted_at(77).children).all()
    for row in range(5):
        assert splits(outgroup.to_newick(row), "t0").keys() == splits(texts[row], "t0").keys()
        with pytest.warns(ConversionWarning):
            tree = Tree.from_newick(rooted.to_newick(row))
        assert (Topologies.from_trees([tree], names).children == topologies.children[row]).all()


@pytest.mark.parametrize("rooted", [False, True])
def test_another_order_of_the_taxa(rooted):
    source = random.Random(7)
    names = [f"t{i}" for i in range(67)]
    texts = [random_newick(source, names, 3, lengths=False) for _ in range(5)]
    topologies = Topologies.from_trees([Tree.from_newick(text) for text in texts], names)
    topologies = topologies.rooted_at(100) if rooted else topologies
    other = source.sample(names, 67)
    again, order = topologies.with_taxa(other)
    assert again.taxa == tuple(other)
    assert agrees(again, [topologies.to_newick(row) for row in range(5)])
    everything = frozenset(names)
    for row in range(5):
        for mine, theirs in zip(named_edges(again, row), order[row], strict=True):
            there = named_edges(topologies, row)[theirs]
            assert mine == there or (not rooted and mine == everything - there)


def test_dendropy_reads_what_is_written():
    names = ["it's", "a b", "x_1", "(y)", "E"]
    every = Topologies(tuple(names), all_topologies("ABCDE").children)
    for row in range(len(every)):
        tree = dendropy.Tree.get(
            data=every.to_newick(row, [0.5] * 7), schema="newick", rooting="force-unrooted", preserve_underscores=True
        )
        found = {frozenset(leaf.taxon.label for leaf in node.leaf_iter()) for node in tree.postorder_node_iter()}
        assert set(named_edges(every, row)) <= found | {frozenset(names) - side for side in found}


def test_what_is_refused():
    trees = [Tree.from_newick("((A,B),C,D);"), Tree.from_newick("((A,B),C,E);")]
    with pytest.raises(TreeError, match=r"only in tree 1: 'D'; only in tree 2: 'E'.*Remedy"):
        Topologies.from_trees(trees)
    with pytest.raises(TreeError, match="only in the requested order: 'X'"):
        Topologies.from_trees(trees[:1], "ABCX")
    with pytest.raises(TreeError, match="no tree"):
        Topologies.from_trees([])
    crossing = np.array([[[0b0011], [0b0110], [0b1111]]], dtype=np.uint64)
    with pytest.raises(TreeError, match="do not form binary trees"):
        Topologies.from_clades("ABCD", crossing, rooted=True)
    twice = np.array([[[0b0011], [0b0011], [0b1111]]], dtype=np.uint64)
    with pytest.raises(TreeError, match="do not form binary trees"):
        Topologies.from_clades("ABCD", twice, rooted=True)
    headless = np.array([[[0b0011], [0b0111], [0b0111]]], dtype=np.uint64)
    with pytest.raises(TreeError, match="do not form binary trees"):
        Topologies.from_clades("ABCD", headless, rooted=True)
    for children in ([None], 10**12):
        with pytest.raises(DataError, match="children must be an array of node numbers"):
            Topologies(("A", "B", "C"), children)
    with pytest.raises(ShapeError, match=r"\(topologies, 2, 1\)"):
        Topologies.from_clades("ABCD", crossing, rooted=False)
    with pytest.raises(ShapeError, match="does not fit 4 taxa"):
        Topologies(tuple("ABCD"), np.zeros((1, 3, 2), dtype=np.int32))
    unrooted = all_topologies("ABCD")
    for lengths in ([0.1] * 4, torch.ones(1, 5)):
        with pytest.raises(ShapeError, match=r"\(5,\)"):
            unrooted.to_newick(0, lengths)
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        unrooted.tree(0, torch.ones(6))
    with pytest.raises(TreeError, match="no taxon 'X'"):
        unrooted.rooted_at("X")
    for edge in (5, -1):
        with pytest.raises(TreeError, match="from 0 to 4"):
            unrooted.rooted_at(edge)
    rooted = unrooted.rooted_at(0)
    with pytest.raises(TreeError, match="call unrooted"):
        rooted.rooted_at(0)
    with pytest.raises(TreeError, match="not an unrooted tree"):
        rooted.tree(0)
    with pytest.raises(TreeError, match="only in the requested order: 'X'"):
        rooted.with_taxa("ABCX")
    for count, kind in ((2, False), (10, False), (9, True)):
        with pytest.raises(TreeError, match=f"{count} taxa"):
            all_topologies("ABCDEFGHIJ"[:count], rooted=kind)


def test_lengths_are_written_as_plain_numbers():
    unrooted = all_topologies("ABCD")
    values = [0.1, 0.2, 1e-7, 0.5, 1 / 3]
    expected = unrooted.to_newick(0, values)
    assert "0.1" in expected and repr(1 / 3) in expected
    needs_gradient = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    for lengths in (np.array(values), [np.float64(value) for value in values], needs_gradient):
        assert unrooted.to_newick(0, lengths) == expected
    assert unrooted.to_newick(0, np.arange(5)) == unrooted.to_newick(0, [0, 1, 2, 3, 4])


def test_no_topologies_are_no_distinct_ones():
    distinct, index = all_topologies("ABCD")[:0].distinct()
    assert len(distinct) == len(index) == 0


def test_taxa_that_stand_twice_are_refused():
    every = all_topologies("ABCD")
    with pytest.raises(TreeError, match="'D' occurs twice"):
        every.with_taxa("ABCDD")
    with pytest.raises(TreeError, match="taxa: the taxon 'A' occurs twice"):
        Topologies(tuple("AACD"), every.children)
    with pytest.raises(TreeError, match="'A' occurs twice"):
        all_topologies("AACD")


def test_edges_that_are_none_are_refused():
    every = all_topologies("ABCD")
    for edge in ([0, 1], [[0, 1, 2]], 0.5, [0.0, 1.0, 2.0], True, None, ["A", "B", "C"]):
        with pytest.raises(TreeError, match="does not select edges"):
            every.rooted_at(edge)
