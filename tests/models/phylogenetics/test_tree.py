"""Trees: reading, numbering, writing, and every malformed input."""

import itertools
import random
import sys

import pytest
import torch
from scipy.stats import chisquare

from bayeskit.errors import ConversionWarning, ShapeError, TreeError
from bayeskit.models.phylogenetics import Topologies, Tree

NEXUS = """#NEXUS
[ID: 1 [nested]]
begin taxa;
  dimensions ntax=4; taxlabels a_1 b c d;
end;
begin trees;
   translate
    1 a_1,
    2 'b c',
    3 c,
    4 d;
   tree first [p = 0.3, P = 0.3] = [&W 0.3] ((1:0.1,2:0.2):0.3,3:0.4,4:0.5);
   tree second = [&U] ((1,3),
      2,4);
end;
"""


def splits(tree: Tree) -> set[frozenset[str]]:
    """Splits of all edges, each by its side without the first name in alphabetical order."""
    below = [{taxon} for taxon in tree.taxa]
    for children in tree.children:
        below.append(set().union(*(below[child] for child in children)))
    first = min(tree.taxa)
    return {frozenset(set(tree.taxa) - side if first in side else side) for side in below[:-1]}


def test_numbering_of_nodes_and_edges():
    tree = Tree.from_newick("((A:1,B:2)x:3,(C:4,(D:5,E:6):7):8,F:9);")
    assert tree.taxa == ("A", "B", "C", "D", "E", "F")
    assert tree.children == ((0, 1), (3, 4), (2, 7), (6, 8, 5))
    assert tree.parents == (6, 6, 8, 7, 7, 9, 9, 8, 9)
    assert tree.branch_lengths.tolist() == [1, 2, 4, 5, 6, 9, 3, 7, 8]
    assert tree.branch_lengths.dtype == torch.float64
    assert tree.edge_names == ("A", "B", "C", "D", "E", "F", "A|B", "D|E", "C|D|E")
    assert (tree.num_taxa, tree.num_edges, tree.root) == (6, 9, 9)


def test_children_come_before_parents_in_random_trees():
    source = random.Random(1)
    for size in range(3, 30):
        parts = [f"t{i}" for i in range(size)]
        while len(parts) > 3:
            source.shuffle(parts)
            parts = [f"({parts[0]}:0.5,{parts[1]}:1e-3)", *parts[2:]]
        tree = Tree.from_newick("(" + ",".join(part + ":2" for part in parts) + ")")
        assert all(edge < parent for edge, parent in enumerate(tree.parents))
        assert len(set(tree.edge_names)) == tree.num_edges == 2 * size - 3
        again = Tree.from_newick(tree.to_newick())
        assert (again.taxa, again.children) == (tree.taxa, tree.children)
        assert torch.equal(again.branch_lengths, tree.branch_lengths)


def test_names_of_long_splits_are_short_and_unique():
    tree = Tree.from_newick("((((((A,B),C),D),E),F),G,H);")
    assert tree.edge_names[-2:] == ("A|B|...|E (5 taxa)", "A|B|...|F (6 taxa)")
    clash = Tree.from_newick("((A,B),'A|B',C);")
    assert len(set(clash.edge_names)) == 5


def test_labels():
    tree = Tree.from_newick("('it''s (x)':1,'a b':2[&note],B_c:3)root;")
    assert tree.taxa == ("it's (x)", "a b", "B_c")
    assert tree.to_newick() == "('it''s (x)':1.0,'a b':2.0,B_c:3.0);"
    names = {"1": "A", "2": "B", "3": "C"}
    assert Tree.from_newick("(2,(3,A),1)", translate=names | {"1": "D", "4": "A"}).taxa == ("B", "C", "A", "D")
    with pytest.raises(TreeError, match="tip '4' is neither a key nor a name of the translate table.*'A', 'B', 'C'"):
        Tree.from_newick("(2,(3,4),1)", translate=names)
    assert Tree.from_newick("(10,(9,8),7);").taxa == ("10", "9", "8", "7")


def test_labels_that_newick_would_split_are_written_in_quotes():
    text = "('A=1','{B}','\"C\"');"
    assert Tree.from_newick(text).to_newick() == text


def test_labels_that_differ_in_case_only_are_different_taxa():
    assert Tree.from_newick("(a,A,(b,B));").taxa == ("a", "A", "b", "B")


def test_numbers_as_labels_are_not_taken_for_positions(tmp_path):
    path = tmp_path / "numbers.nex"
    path.write_text("#NEXUS\nbegin trees;\ntree a = (3,1,2);\ntree b = (4,1,(5,2));\nend;\n")
    assert Tree.from_file(path, index=0).taxa == ("3", "1", "2")
    assert Tree.from_file(path, index=1).taxa == ("4", "1", "5", "2")


def test_writing_other_lengths():
    tree = Tree.from_newick("((A,B),C,D);")
    assert tree.branch_lengths is None
    assert tree.to_newick() == "((A,B),C,D);"
    lengths = torch.tensor([0.1, 0.2, 0.3, 0.4, 1 / 3], dtype=torch.float64)
    assert torch.equal(Tree.from_newick(tree.to_newick(lengths)).branch_lengths, lengths)
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        tree.to_newick([0.1, 0.2])


@pytest.mark.parametrize(
    ("rooted", "unrooted"),
    [
        ("((A:1,B:2):3,(C:4,D:5):6);", "(A:1,B:2,(C:4,D:5):9);"),
        ("(A:1,((B:2,C:3):4,D:5):6);", "(A:7,(B:2,C:3):4,D:5);"),
        ("(((B:2,C:3):4,D:5):6,A:1);", "((B:2,C:3):4,D:5,A:7);"),
        ("((A,B),C);", "(A,B,C);"),
    ],
)
def test_a_rooted_tree_is_unrooted_with_one_warning(rooted, unrooted):
    with pytest.warns(ConversionWarning, match="unrooted") as record:
        tree = Tree.from_newick(rooted)
    assert len(record) == 1 and record[0].filename == __file__
    expected = Tree.from_newick(unrooted)
    assert splits(tree) == splits(expected)
    assert tree.taxa == expected.taxa
    by_name = lambda t: dict(zip(t.edge_names, t.branch_lengths.tolist(), strict=True))  # noqa: E731
    if expected.branch_lengths is not None:
        assert by_name(tree) == by_name(expected)


def test_deep_trees_do_not_recurse():
    text = "t0:0.1"
    for number in range(1, 1998):
        text = f"({text},t{number}:0.1):0.1"
    limit = sys.getrecursionlimit()
    tree = Tree.from_newick(f"({text},x:0.1,y:0.1);")
    assert sys.getrecursionlimit() == limit
    assert tree.num_taxa == 2000
    assert Tree.from_newick(tree.to_newick()).children == tree.children
    assert len(set(tree.edge_names)) == tree.num_edges


def test_newick_files(tmp_path):
    path = tmp_path / "one.nwk"
    path.write_bytes(b"\xef\xbb\xbf((A:1,B:2):3,\r\nC:4,D:5);\r\n")
    assert Tree.from_file(path).branch_lengths.tolist() == [1, 2, 4, 5, 3]
    path.write_text("((A,B),C,D)\n")
    assert Tree.from_file(path).num_taxa == 4
    path.write_text("((A,B),C,D);\n((A,C),B,D);\n")
    with pytest.raises(TreeError, match=r"one\.nwk: the file holds 2 trees.*index=0"):
        Tree.from_file(path)
    assert Tree.from_file(path, index=1).edge_names[-1] == "A|C"
    with pytest.raises(TreeError, match="no tree 2"):
        Tree.from_file(path, index=2)


def test_nexus_files(tmp_path):
    path = tmp_path / "two.nex"
    path.write_text(NEXUS)
    first = Tree.from_file(path, index=0)
    assert first.taxa == ("a_1", "b c", "c", "d")
    assert first.branch_lengths.tolist() == [0.1, 0.2, 0.4, 0.5, 0.3]
    assert Tree.from_file(path, index=1).edge_names[-1] == "a_1|c"


BAD = {
    "": "there is no complete tree",
    "A;": "1 taxa",
    "(A,B);": "2 taxa",
    "(A,B,C,D);": r"above \(A, B, C, D\) joins 4 subtrees.*resolve=True",
    "((A,B,E),C,D);": r"above \(A, B, E\) joins 3 subtrees",
    "((A,B,C,D,E,F),G,H);": r"\(A, B, C, D, \.\.\.\)",
    "(A,B,A);": "'A' occurs twice",
    "(A,B,);": "missing before",
    "(A,B,'');": "no name",
    "(A:1,B,C:1);": r"above \(B\) has no length",
    "(A:1,(B:1,D:1),C:1);": r"above \(B, D\) has no length",
    "(A:-1,B:1,C:1);": r"above \(A\) has length -1\.0",
    "(A:nan,B:1,C:1);": "length nan",
    "(A:inf,B:1,C:1);": "length inf",
    "(A:x,B:1,C:1);": "'x' is not a number",
    "(A:1:2,B:1,C:1);": "does not follow a node",
    "(A,B,C": "inside a parenthesis",
    "(A,B,C));": "outside all parentheses",
    "(A,B,C)(D,E);": "follows a complete node",
    "(A,B,C);(A,B,C);": "follows the end",
    "(A B,C,D);": "quote labels",
    "('A,B,C);": "unmatched quotation mark",
    "(A,[B,C);": "never closed",
    "(A,]B,C);": "unmatched character",
    "(A:,B,C);": "not a number",
    "(A,B,C:": "inside a parenthesis",
    "(A,B,C):": "no complete tree",
    "(A,(B,,D),C);": "missing before ','",
    "(A:1 x,B:1,C:1);": "'x' after a length",
    "(A:1{,B:1,C:1);": "after a length",
    "(A B'C,D,E);": "inside a word",
    "(A=1,B,C);": "quote labels",
}


@pytest.mark.parametrize("text", BAD)
def test_malformed_newick(text):
    with pytest.raises(TreeError, match=BAD[text]) as error:
        Tree.from_newick(text)
    assert "Remedy" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "file is empty"),
        ("((A,B),\nC,(D);\n", r"line 2"),
        ("\n\n((A,B),C,A);\n", r"bad, line 3.*'A' occurs twice"),
        ("#NEXUS\nbegin data;\nend;\n", "holds no tree"),
        ("#NEXUS\nbegin trees;\ntree a = (A,B,C);\n", "truncated"),
        ("#NEXUS\nbegin trees;\ntree a = (A,B,C)\n", "truncated"),
        ("#NEXUS\nbegin trees;\ntree (A,B,C);\nend;\n", r"line 3.*without '='"),
        ("#NEXUS\nbegin trees;\ntranslate 1 A 2, 2 B;\ntree a=(1,2,3);\nend;\n", r"line 3.*not a pair"),
        ("#NEXUS\nbegin trees;\n\ntree a =\n(A,B,\n:C);\nend;\n", r"line 6"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "bad"
    path.write_text(content)
    with pytest.raises(TreeError, match=message) as error:
        Tree.from_file(path)
    assert "Remedy" in str(error.value) and "bad" in str(error.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(TreeError, match=r"missing\.nwk: there is no such file\. Remedy"):
        Tree.from_file(tmp_path / "missing.nwk")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    with pytest.raises(TreeError, match="cannot be read"):
        Tree.from_file(tmp_path / "binary")


@pytest.mark.calibration
def test_multifurcations_are_resolved_every_way_alike():
    counts: dict[str, int] = {}
    generator = torch.Generator().manual_seed(5)
    for _ in range(1500):
        tree = Tree.from_newick("(A:1,B:2,C:3,D:4,E:5);", resolve=True, seed=generator)
        assert sorted(tree.branch_lengths.tolist()) == [0, 0, 1, 2, 3, 4, 5] and tree.branch_lengths[:5].sum() == 15
        counts[text] = counts.get(text := Topologies.from_trees([tree], "ABCDE").to_newick(0), 0) + 1
    assert len(counts) == 15 and chisquare(list(counts.values())).pvalue > 1e-5
    # The mutation: one of the ways, at least an average one, twice as often.
    assert chisquare([2 * counts.pop(max(counts, key=counts.get)), *counts.values()]).pvalue < 1e-5
    inner = Tree.from_newick("((A,B,C,D),E,F);", resolve=True)
    assert inner.num_taxa == 6 and inner.branch_lengths is None
    assert Tree.from_newick(inner.to_newick()).to_newick() == inner.to_newick()
    with pytest.warns(ConversionWarning, match="rooted"):
        assert Tree.from_newick("((A:1,B:1,C:1):1,D:2);", resolve=True).branch_lengths.sum() == 6


def test_dendropy_reads_what_is_written():
    dendropy = pytest.importorskip("dendropy")
    tree = Tree.from_newick("(((A:1,B:2):3,C:4):5,(D:6,E:7):8,F:9);")
    other = dendropy.Tree.get(data=tree.to_newick(), schema="newick", rooting="force-unrooted")
    lengths = {
        frozenset(leaf.taxon.label for leaf in node.leaf_iter()): node.edge_length
        for node in other.postorder_node_iter()
        if node.parent_node is not None
    }
    below = [{taxon} for taxon in tree.taxa]
    for children in tree.children:
        below.append(set(itertools.chain.from_iterable(below[child] for child in children)))
    for side, length in zip(below, tree.branch_lengths.tolist(), strict=False):
        assert lengths[frozenset(side)] == length


def test_nodes_with_one_child_are_joined_to_it():
    with pytest.warns(ConversionWarning, match="nodes with one child were joined"):
        tree = Tree.from_newick("((((A:1,(((B:2)x:4)y:8):16)z:32):64,C:128,D:256));")
    assert tree.to_newick() == "((A:1.0,B:30.0):96.0,C:128.0,D:256.0);"
    with pytest.warns(ConversionWarning, match="not read"):
        assert Tree.from_newick("((A),'B b',(C,(D)));").to_newick() == "(A,'B b',(C,D));"
    with pytest.warns(ConversionWarning), pytest.raises(TreeError, match=r"above \(A\) has no length"):
        Tree.from_newick("((A:1),B:1,C:1);")


def test_apostrophes_are_part_of_a_name():
    tree = Tree.from_newick("(( O'Brien:1,witches'-broom:2):3,'don''t, it''s':4,B'a2-13':5);")
    assert tree.taxa == ("O'Brien", "witches'-broom", "don't, it's", "B'a2-13'")
    assert tree.branch_lengths.tolist() == [1, 2, 4, 5, 3]
    assert Tree.from_newick("(A'B,C',D);").taxa == ("A'B", "C'", "D")
