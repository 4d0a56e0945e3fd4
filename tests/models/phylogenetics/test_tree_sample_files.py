"""Files of trees as samplers write them: MrBayes, BEAST, lists in Newick; and every malformed one."""

import gzip
import random
import re
import subprocess
import sys
import warnings

import dendropy
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from bayeskit.errors import AlignmentError, CheckpointError, ConversionWarning, SettingsError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics import _newick as newick
from bayeskit.models.phylogenetics import _samples as tree_files
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._distributions import SampleFrequencies
from bayeskit.models.phylogenetics._samples import TreeSample
from bayeskit.models.phylogenetics._substitution import JC69
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._tree_model import TreeModel
from bayeskit.models.phylogenetics._trees import Tree

TRPROBS = """#NEXUS
[ID: 3010964466]
[This file contains the trees that were found during the MCMC
search, sorted by posterior probability. "p" indicates ...]

begin trees;
   translate
    1 Alligator_m,
    2 B,
    3 'C c',
    4 D,
    5 E;
   tree tree_1 [p = 0.277, P = 0.277] = [&W 0.276723] (5,((2,3),4),1);
   tree tree_2 [p = 0.723, P = 1.000] = [&W 0.723277] ((2,5),(3,4),1);
end;
"""
MRBAYES = """#NEXUS
[ID: 0412]
[Param: tree{all}]
begin trees;
   translate
      1 A,
      2 B,
      3 C,
      4 D;
   tree gen.0 = [&U] (2:1.0e-01,(3:2.0e-01,4:3.0e-01):4.0e-01,1:5.0e-01);
   tree gen.500 = [&U] ((2:1.1e-01,3:2.1e-01):4.1e-01,4:3.1e-01,1:5.1e-01);
   tree gen.1000 = [&U] (2:1.2e-01,(3:2.2e-01,4:3.2e-01):4.2e-01,1:5.2e-01);
   tree gen.1500 = [&U] (2:1.3e-01,(3:2.3e-01,4:3.3e-01):4.3e-01,1:5.3e-01);
end;
"""
BEAST = """#NEXUS

Begin taxa;
	Dimensions ntax=4;
	Taxlabels
		A_2000.5
		B
		C
		D
		;
End;

Begin trees;
	Translate
		1 A_2000.5,
		2 B,
		3 C,
		4 D
		;
tree STATE_0 [&lnP=-123.4,posterior=-123.4] = [&R] ((1[&rate=1.0E0]:1.0,2[&rate=0.5]:1.0)[&height_range={0.5,
1.5}]:1.0,(3:0.5,4:0.5):[&rate=2]1.5)[&height=2.0]:0.0;
tree STATE_1000 [&lnP=-120.4,posterior=-120.4] = [&R] (((1:1.0,2:1.0):0.25,3:1.25):0.5,4:1.75);
END;
"""


def write(tmp_path, text, name="run.nex"):
    path = tmp_path / name
    path.write_text(text)
    return path


def named_sides(sample: TreeSample, topology: int) -> set[str]:
    inner = sample.topologies.below[topology, sample.num_taxa :]
    return {"".join(sample.taxa[taxon] for taxon in clades.members(side)) for side in inner}


def test_mrbayes_probabilities(tmp_path):
    sample = TreeSample.from_file(write(tmp_path, TRPROBS))
    assert sample.taxa == ("Alligator_m", "B", "C c", "D", "E")
    assert sample.weights.tolist() == [0.276723, 0.723277] and sample.branch_lengths is None and not sample.rooted
    assert [named_sides(sample, i) for i in range(2)] == [{"BC c", "BC cD"}, {"BE", "C cD"}]
    rounded = TRPROBS.replace("[&W 0.276723] ", "").replace("[&W 0.723277] ", "")
    assert TreeSample.from_file(write(tmp_path, rounded)).weights.tolist() == pytest.approx([0.277, 0.723], abs=1e-15)
    fractions = TRPROBS.replace("&W 0.276723", "&W 1/4").replace("&W 0.723277", "&w 3 / 4")
    assert TreeSample.from_file(write(tmp_path, fractions)).weights.tolist() == [0.25, 0.75]


def test_mrbayes_chain(tmp_path):
    path = write(tmp_path, MRBAYES, "run1.t")
    sample = TreeSample.from_file(path)
    # A quarter is left out.
    assert sample.num_samples == 3 and sample.taxa == tuple("ABCD")
    assert sample.index.tolist() == [0, 1, 1] and sample.weights.tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-15)
    expected = [[0.51, 0.11, 0.21, 0.31, 0.41], [0.52, 0.12, 0.22, 0.32, 0.42], [0.53, 0.13, 0.23, 0.33, 0.43]]
    assert sample.branch_lengths.tolist() == expected
    for burn_in, left in ((0, 4), (0.0, 4), (0.5, 2), (0.74, 2), (0.75, 1), (1, 3), (3, 1)):
        assert TreeSample.from_file(path, burn_in).num_samples == left
    for burn_in in (4, 99):
        with pytest.raises(TreeError, match=rf"run1\.t: the file holds 4 trees, and burn_in={burn_in} leaves none"):
            TreeSample.from_file(path, burn_in)
    for burn_in in (-1, -0.1, 1.5, 1.0, float("nan")):
        with pytest.raises(SettingsError, match="burn_in=.*Remedy"):
            TreeSample.from_file(path, burn_in)
    with pytest.raises(SettingsError, match="weighted trees"):
        TreeSample.from_file(write(tmp_path, TRPROBS), 0.25)


def test_beast_chain(tmp_path):
    path = write(tmp_path, BEAST, "clock.trees")
    sample = TreeSample.from_file(path)
    assert sample.rooted and sample.taxa == ("A_2000.5", "B", "C", "D") and sample.num_samples == 2
    assert named_sides(sample, 0) == {"A_2000.5B", "CD"} and named_sides(sample, 1) == {"A_2000.5B", "A_2000.5BC"}
    assert sample.branch_lengths.tolist() == [[1, 1, 0.5, 0.5, 1, 1.5], [1, 1, 1.25, 1.75, 0.25, 0.5]]
    with pytest.warns(ConversionWarning, match=r"clock\.trees, line 20: this tree is rooted") as record:
        unrooted = TreeSample.from_file(path, rooted=False)
    assert len(record) == 1 and record[0].filename == __file__
    assert not unrooted.rooted and len(unrooted.topologies) == 1 and len(sample.topologies) == 2
    assert unrooted.branch_lengths.tolist() == [[1, 1, 0.5, 0.5, 2.5], [1, 1, 1.25, 2.25, 0.25]]
    for mine, theirs in zip(unrooted.branch_lengths, sample.unrooted().branch_lengths, strict=True):
        assert mine.tolist() == theirs.tolist()


def test_lists_in_newick(tmp_path):
    path = write(tmp_path, "((B,A),C,D);\n(A,\n(C,B),D);((A,B),C,D);\n((A,B),C,D)\n", "list.nwk")
    sample = TreeSample.from_file(path)
    assert sample.taxa == tuple("BACD") and sample.num_samples == 4 and sample.weights.tolist() == [0.75, 0.25]
    assert TreeSample.from_file(path, 0.5).weights.tolist() == [1.0]
    ordered = TreeSample.from_file(path, taxa="DCBA")
    assert ordered.taxa == tuple("DCBA") and named_sides(ordered, 0) == {"BA"} and named_sides(ordered, 1) == {"CB"}
    weighted = TreeSample.from_file(write(tmp_path, "0.5\t((B,A),C,D);\n1e-1\t(A,(C,B),D);\n0.4 ((A,B),C,D);\n"))
    assert weighted.weights.tolist() == [0.9, 0.1] and weighted.sample_weights.tolist() == [0.5, 0.1, 0.4]
    marked = TreeSample.from_file(write(tmp_path, "[&R] [&W 3] ((B,A),(C,D));\n[&W 1] [&R] (B,(A,(C,D)));"))
    assert marked.rooted and marked.weights.tolist() == [0.75, 0.25]


def test_kind_of_the_trees(tmp_path):
    forked, open_ = "((A,B),(C,D));", "((A,B),C,D);"
    assert TreeSample.from_file(write(tmp_path, forked)).rooted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not TreeSample.from_file(write(tmp_path, f"[&U] {forked}")).rooted
        assert TreeSample.from_file(write(tmp_path, f"[&U] {forked}"), rooted=True).rooted
        assert not TreeSample.from_file(write(tmp_path, f"#NEXUS\nbegin trees;\nutree a = {forked}\nend;")).rooted
    with pytest.warns(ConversionWarning, match=r"line 2: this tree is rooted") as record:
        mixed = TreeSample.from_file(write(tmp_path, f"{open_}\n{forked}\n"))
    assert len(record) == 1 and mixed.weights.tolist() == [1.0] and not mixed.rooted
    with pytest.raises(TreeError, match=r"run\.nex, line 2: the tree is unrooted.*rooted=False"):
        TreeSample.from_file(write(tmp_path, f"{forked}\n{open_}\n"))
    with pytest.raises(TreeError, match=r"run\.nex, line 1: the tree is unrooted"):
        TreeSample.from_file(write(tmp_path, open_), rooted=True)


def test_several_runs(tmp_path):
    one = write(tmp_path, MRBAYES, "run1.t")
    other = write(tmp_path, "((D:1,C:1):1,(B:1,A:1):1);\n((D:1,B:1):1,C:1,A:1);((D:1,B:1):1,C:1,A:1);", "run2")
    with pytest.warns(ConversionWarning, match="run2, line 1") as record:
        pooled = TreeSample.from_files([one, other], burn_in=0.25)
    assert len(record) == 1 and record[0].filename == __file__
    assert pooled.taxa == tuple("ABCD") and pooled.num_samples == 6 and pooled.branch_lengths.shape == (6, 5)
    assert [named_sides(pooled, i) for i in range(3)] == [{"BC"}, {"CD"}, {"BD"}]
    assert pooled.sample_weights.tolist() == pytest.approx([1 / 6] * 6, abs=1e-15)
    uneven = TreeSample.from_files([one, one], burn_in=0)
    assert uneven.weights.tolist() == pytest.approx([0.75, 0.25], abs=1e-15)
    with pytest.raises(TreeError, match="other, line 1.*'E'"):
        TreeSample.from_files([one, write(tmp_path, "((A:1,B:1):1,C:1,E:1);", "other")])
    with pytest.raises(TreeError, match="no sample"):
        TreeSample.from_files([])


def test_equal_texts_are_parsed_once(tmp_path, monkeypatch):
    calls = []
    parse = newick.parse_newick
    monkeypatch.setattr(tree_files, "parse_newick", lambda *of: calls.append(of[0]) or parse(*of))
    path = write(tmp_path, "((A,B),C,D);\n" * 50 + "((A,C),B,D);\n" * 50)
    assert TreeSample.from_file(path).index.tolist() == [0] * 50 + [1] * 50 and len(calls) == 2


def test_lengths_and_splits_as_dendropy_reads_them(tmp_path):
    source = random.Random(5)
    names = [f"t{i}" for i in range(66)]
    texts = []
    for _ in range(12):
        parts = [f"{number + 1}:{source.expovariate(10):.6e}" for number in range(66)]
        while len(parts) > 3:
            source.shuffle(parts)
            parts = [f"({parts[0]},{parts[1]}):{source.expovariate(10):.6e}", *parts[2:]]
        texts.append(f"({','.join(parts)})")
    table = ",\n".join(f"{number + 1} {name}" for number, name in enumerate(names))
    lines = "\n".join(f"tree gen.{number} = [&U] {text};" for number, text in enumerate(texts))
    path = write(tmp_path, f"#NEXUS\nbegin trees;\ntranslate\n{table};\n{lines}\nend;\n")
    sample = TreeSample.from_file(path, burn_in=0)
    namespace = dendropy.TaxonNamespace(names)
    theirs = dendropy.TreeList.get(path=str(path), schema="nexus", taxon_namespace=namespace)
    for row, tree in enumerate(theirs):
        tree.encode_bipartitions()
        expected = {edge.bipartition.split_bitmask: edge.length for edge in tree.edges() if edge.length is not None}
        sides = sample.topologies.below[sample.index[row]]
        found = {}
        for side, length in zip(sides, sample.branch_lengths[row].tolist(), strict=True):
            mask = sum(1 << taxon for taxon in clades.members(side))
            # DendroPy takes the side without the first taxon, too.
            found[mask if not mask & 1 else (1 << 66) - 1 - mask] = length
        assert found == {mask if not mask & 1 else (1 << 66) - 1 - mask: length for mask, length in expected.items()}


@pytest.mark.parametrize("rooted", [False, True])
def test_multifurcations_are_resolved_at_random_every_way_alike(tmp_path, rooted):
    count = 3000
    text = "[&R] (A:1,B:1,C:1,D:1);\n" if rooted else "(A:1,B:1,C:1,D:1,E:1);\n"
    path = write(tmp_path, text * count)
    sample = TreeSample.from_file(path, resolve=True, seed=1)
    every = all_topologies("ABCD" if rooted else "ABCDE", rooted)
    assert sample.rooted == rooted and len(sample.topologies) == len(every) == 15
    counts = np.bincount(sample.index)
    assert chisquare(counts).pvalue > 1e-5
    # The mutation: joining the first two anew each time prefers some.
    assert chisquare(counts + np.eye(15, dtype=int)[0] * 150 - np.eye(15, dtype=int)[1] * 150).pvalue < 1e-5
    assert set(sample.branch_lengths.sum(dim=1).tolist()) == {4.0 if rooted else 5.0}
    again = TreeSample.from_file(path, resolve=True, seed=1)
    assert np.array_equal(again.index, sample.index)
    assert not np.array_equal(TreeSample.from_file(path, resolve=True, seed=2).index, sample.index)


def test_only_multifurcations_are_resolved(tmp_path):
    path = write(tmp_path, "((A:1,B:2,F:3):4,(C:5,D:6):7,E:8,G:9);", "poly.nwk")
    sample = TreeSample.from_file(path, resolve=True)
    assert {"CD"} < named_sides(sample, 0) and sample.branch_lengths.sum().item() == 45
    assert sorted(sample.branch_lengths[0].tolist()) == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(TreeError, match=r"poly\.nwk, line 1: the node above \(A, B, F\) joins 3.*resolve=True"):
        TreeSample.from_file(write(tmp_path, "((A,B,F),C,D);", "poly.nwk"))
    with pytest.raises(TreeError, match=r"joins 4 subtrees.*resolve=True"):
        TreeSample.from_file(write(tmp_path, "(A,B,C,D);"))
    with pytest.raises(TreeError, match=r"joins 3 subtrees.*resolve=True"):
        TreeSample.from_file(write(tmp_path, "[&R] (A,B,C);"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "file is empty"),
        ("#NEXUS\nbegin trees;\nend;\n", "holds no tree"),
        (MRBAYES[:-6], r"bad, line \d+: the file ends inside TREES.*truncated"),
        (MRBAYES[:-30], "truncated"),
        (MRBAYES.replace("4 D", "3 D"), "line 5: the translate key '3' occurs twice"),
        (MRBAYES.replace("4 D", "4 C"), "line 10: the taxon 'C' occurs twice"),
        ("((A,B),C,D);\n\n((A,B),C,E);", r"bad, line 1 and .*bad, line 3 differ.*'D'.*'E'"),
        ("((A,B),C,D);\n((A,B),C,D,(E,F));", "bad, line 2 differ.*'E', 'F'"),
        ("((A,B),C,D);\n((A,B),C,C);", "line 2.*'C' occurs twice"),
        ("((A,B),C,D);\n((A,B),C);", "bad, line 2 differ.*'D'"),
        ("((A,C),B,D);\n-0.5 ((A,B),C,D);", r"line 2: '&W -0\.5' gives no weight"),
        ("nan ((A,B),C,D);", "line 1: '&W nan' gives no weight"),
        (TRPROBS.replace("0.723277", "-0.7"), r"line 14: '&W -0\.7' gives no weight"),
        (TRPROBS.replace("0.723277", "much"), r"line 14: '&W much' gives no weight"),
        (TRPROBS.replace("0.723277", "1/0"), r"line 14: '&W 1/0' gives no weight"),
        ("0 ((A,B),C,D);", r"weights add up to 0\.0"),
        ("((A,B),C,D);\n((A:1,B:1):1,C:1,D:1);", "line 2: the tree has branch lengths, unlike"),
        ("((A:1,B:1):1,C:1,D:1);\n((A,B),C,D);", "line 2: the tree has no branch lengths, unlike"),
        ("((A:1,B:1):1,C:1,D:1);\n((A:1,B:-1):1,C:1,D:1);", r"line 2: the edge above \(B\) has length -1\.0"),
        ("((A,B),C,D);\n((A,B),C,,D);", "line 2: a node is missing"),
        ("hello", "bad"),
        ("3\n((A,B),C,D);\n((A,C),B,D);", "the first line announces 3 trees, but the file has 2"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    with pytest.raises(TreeError, match=message) as error:
        TreeSample.from_file(write(tmp_path, content, "bad"), burn_in=0)
    assert "Remedy" in str(error.value) and "bad" in str(error.value)


@pytest.mark.parametrize("text", [MRBAYES, BEAST, "((A,B),C,D);\n((A,C),B,D);\n((A,D),B,C);\n((A,B),C,D);\n"])
def test_files_that_are_still_written(tmp_path, text):
    """Cut a file inside its last tree at every place: those that are complete are read, or the option is named."""
    *_, start, end = (match.end() for match in re.finditer(r"\)[^()]*?;", text))
    expected = TreeSample.from_file(write(tmp_path, text), burn_in=0)
    complete = expected.num_samples - 1
    first = expected.topologies[expected.index[:complete]].distinct()[0]
    for cut in range(start + 2, end):
        path = write(tmp_path, text[:cut], "cut")
        with pytest.warns(ConversionWarning, match=rf"cut: the file ends too early\. Its {complete} complete trees"):
            sample = TreeSample.from_file(path, burn_in=0, incomplete="warn")
        assert np.array_equal(sample.topologies.children, first.children)
        if sample.branch_lengths is not None:
            assert torch.equal(sample.branch_lengths, expected.branch_lengths[:complete])
        if text.startswith("#NEXUS") or 3 < cut - start < end - start - 1:
            with pytest.raises(TreeError, match="incomplete='warn'"):
                TreeSample.from_file(path, burn_in=0)
    assert np.array_equal(TreeSample.from_file(write(tmp_path, text), 0, incomplete="warn").index, expected.index)
    with pytest.raises(SettingsError, match="incomplete='yes'"):
        TreeSample.from_file(write(tmp_path, text), incomplete="yes")


def test_other_files_are_told_apart(tmp_path):
    nexus = "#NEXUS\nbegin data;\ndimensions ntax=3 nchar=2;\nformat datatype=dna;\nmatrix A ac B ac C ac;\nend;\n"
    for text in (">A\nacgt\n>B\nacgt\n", "3 2\nA ac\nB ac\nC ac\n", nexus):
        for reader in (TreeSample.from_file, Tree.from_file):
            with pytest.raises(TreeError, match=r"this is an alignment.*Alignment\.from_file"):
                reader(write(tmp_path, text))
    for text in (MRBAYES, TRPROBS, "((A,B),C,D);", "0.5 ((A,B),C,D);", "[&R] ((A,B),C,D);"):
        with pytest.raises(AlignmentError, match=r"this is a file of trees.*TreeSample\.from_file"):
            Alignment.from_file(write(tmp_path, text))
    for text in ("tree.nwk", "/data/tree", "a/b.tre"):
        with pytest.raises(TreeError, match=r"is a path, not a tree.*Tree\.from_file"):
            Tree.from_newick(text)
    with pytest.raises(TreeError, match=r"PosixPath is not text.*Tree\.from_file"):
        Tree.from_newick(tmp_path)
    with pytest.raises(CheckpointError, match="not a file of bayeskit") as error:
        SampleFrequencies.load(write(tmp_path, MRBAYES))
    assert "delete" not in str(error.value)
    with pytest.raises(TreeError, match=r"^[^ ]*none\.t: there is no such file\. Remedy"):
        TreeSample.from_file(tmp_path / "none.t")
    with pytest.raises(TreeError, match="trees by ';'"):
        TreeSample.from_file(write(tmp_path, "((A,B),C,D)\n((A,C),B,D)\n"))


def test_taxa_asked_for_must_be_those_of_the_trees(tmp_path):
    with pytest.raises(TreeError, match=r"requested order and .*run\.nex, line 1 differ; only in the .*: 'X'"):
        TreeSample.from_file(write(tmp_path, "((A,B),C,D);"), taxa="ABCX")
    with pytest.raises(TreeError, match="'A' occurs twice"):
        TreeSample.from_file(write(tmp_path, "((A,B),C,D);"), taxa="AACX")


MARKS = list("(),:;[]'\"= \n\t.-+e0123A{}\\_") + ["&", "é", "\u00a0", "inf", "nan", "1_0", "1e-3", "(A,B)"]


def test_plain_descriptions_are_read_as_dendropy_reads_them(monkeypatch):
    """Change a tree at random places; whatever is read here, DendroPy reads the same, and refuses nothing of it."""
    source = random.Random(6)
    plain = newick._read_plain
    base = "((A_1:0.1,B:2)x:.3,(C:4.,(D-d:5E-2,E:6)0.95:7):8,F:9e1)root:0.5"
    num_plain = 0
    for _ in range(4000):
        text = base
        for _ in range(source.randint(1, 3)):
            place = source.randrange(len(text))
            text = text[:place] + source.choice(MARKS) + text[place + source.randint(0, 2) :]
        text = text.strip()
        found = plain(text)
        if found is None:
            continue
        num_plain += 1
        with monkeypatch.context() as patch:
            patch.setattr(newick, "_read_plain", lambda newick: None)
            try:
                # Nodes with one child are removed from both, with the same warning.
                with warnings.catch_warnings(action="ignore", category=ConversionWarning):
                    found = newick._without_single_children(found, "text")
                    expected = newick.parse_newick(text)
            except TreeError as error:
                pytest.fail(f"{text!r}: {error}")
        assert (found.children, found.labels, found.lengths) == (expected.children, expected.labels, expected.lengths)
    assert num_plain > 500
    # The mutation: a length that is not a number would be dropped.
    assert plain(base) is not None and plain(base.replace("9e1", "9x")) is None


def test_quoted_and_annotated_descriptions_are_left_to_dendropy():
    for text in ("('A':1,B:1,C:1)", "(A,B,C)(D,E)", "(A,B,C", "(A,B,C))", "(A,,C)", "A", "(A{1},B,C)", "(A:x,B,C)"):
        assert newick._read_plain(text) is None
    assert Tree.from_newick("('A b':1,B:1,C:1)").taxa == ("A b", "B", "C")


def test_numbers_of_numpy_leave_out_trees_and_other_things_do_not(tmp_path):
    path = write(tmp_path, MRBAYES)
    for burn_in, left in ((np.int64(2), 2), (np.float32(0.5), 2), (np.int64(0), 4)):
        assert TreeSample.from_file(path, burn_in).num_samples == left
    for burn_in in (True, False, np.True_, "0.25", "1", [1], np.int64(-1)):
        with pytest.raises(SettingsError, match="burn_in=.*Remedy"):
            TreeSample.from_file(path, burn_in)
    assert repr(TreeSample.from_file(path, 1)).endswith("4 taxa, 1 left out as burn-in)")
    assert TreeSample.from_files([path, path], 0.5).num_burn_in == 4
    for paths in (path, str(path)):
        with pytest.raises(SettingsError, match="one path.*from_file"):
            TreeSample.from_files(paths)


def test_trees_that_say_they_are_unrooted_are_not_read_as_rooted(tmp_path):
    texts = ("[&R] ((A,B),(C,D));", "[&U] ((A,B),(C,D));", "((A,B),(C,D));")
    path = write(tmp_path, "\n".join(texts))
    with pytest.raises(TreeError, match="line 2: the tree is unrooted, but rooted trees are read"):
        TreeSample.from_file(path)
    assert TreeSample.from_file(path, rooted=True).rooted
    one, other = write(tmp_path, texts[0], "one"), write(tmp_path, texts[1], "other")
    with pytest.raises(TreeError, match="other, line 1: the tree is unrooted"):
        TreeSample.from_files([one, other])
    assert TreeSample.from_files([one, other], rooted=True).weights.tolist() == [1.0]
    with pytest.warns(ConversionWarning, match="line 1"):
        assert not TreeSample.from_file(path, rooted=False).rooted


def test_numbers_stand_for_labels_of_taxa(tmp_path):
    block = "#NEXUS\nbegin taxa;\ndimensions ntax=4;\ntaxlabels D 'C c' B A_1;\nend;\nbegin trees;\n{}end;\n"
    names = ("D", "C c", "B", "A_1")
    for tree in ("((1,2),3,4)", "((D,'C c'),B,A_1)", "((1,'C c'),B,4)"):
        sample = TreeSample.from_file(write(tmp_path, block.format(f"tree a = {tree};\n")), burn_in=0)
        assert sample.taxa == names and named_sides(sample, 0) == {"BA_1"}
    # A table of names in the block of trees counts alone, and a taxon that is called by a number is that taxon.
    own = "translate x D, y 'C c', z B, 1 A_1;\ntree a = ((x,y),z,1);\n"
    assert TreeSample.from_file(write(tmp_path, block.format(own)), burn_in=0).taxa == names
    numbered = block.replace("D 'C c' B A_1", "4 3 2 1").format("tree a = ((4,3),2,1);\n")
    assert TreeSample.from_file(write(tmp_path, numbered), burn_in=0).taxa == tuple("4321")


SAME = [
    "(Ann_x:1,Bob:2,(Cid:3,(Dan:4,Eve:5):6):7)",
    "(Ann_x:2,Bob:2,(Dan:3,(Cid:4,Eve:5):6):7)",
    "(Ann_x:3,Bob:2,(Cid:3,(Dan:4,Eve:5):6):8)",
    "(Bob:4,Ann_x:2,(Eve:3,(Cid:4,Dan:5):6):7)",
    "(Ann_x:5,Bob:2,(Cid:3,(Dan:4,Eve:5):6):7)",
]
NAMES = ("Ann_x", "Bob", "Cid", "Dan", "Eve")


def nexus(trees, name="tree_{}", table=""):
    lines = "".join(f"tree {name.format(100 * place)} = [&U] {tree};\n" for place, tree in enumerate(trees))
    return f"#NEXUS\nbegin trees;\n{table}{lines}end;\n"


def revbayes(trees, head="Iteration\tPosterior\tpsi\tpi[1]", row="{}\t-1.5\t{};\t0.25"):
    rows = [row.format(10 * place, tree) for place, tree in enumerate(trees)]
    return "\n".join(["#RevBayes version 1.2", head, *rows]) + "\n"


def numbered(tree):
    return re.sub("|".join(NAMES), lambda name: str(NAMES.index(name.group()) + 1), tree)


def annotated(tree):
    return re.sub(r":", "[&index=1,rate_95%_HPD={0.1,0.2}]:", tree)


TRANSLATE = "translate " + ",".join(f"{place} {name}" for place, name in enumerate(NAMES, start=1)) + ";\n"
LIST = ";\n".join(SAME) + ";\n"
MARKED = [tree.replace("Bob", "Bob #1").replace("):6", ") '>0.6<0.8' $2:6").replace("):7", ")@0.5:7") for tree in SAME]
#: The same trees in files of many kinds, and how many of them are burn-in by default.
KINDS = {
    "a list in Newick": (LIST, 0),
    "NEXUS": (nexus(SAME), 0),
    "NEXUS with a table": (nexus(map(numbered, SAME), table=TRANSLATE), 0),
    "names of which one has no number": (nexus(SAME, "gen.{}").replace("gen.200", "start"), 0),
    "MrBayes": (nexus(map(numbered, SAME), "gen.{}", TRANSLATE), 1),
    "BEAST": (nexus(map(annotated, SAME), "STATE_{} [&lnP=-1.5]"), 1),
    "RevBayes": (revbayes(map(annotated, SAME)), 1),
    "a log of BEAST": (revbayes(SAME, "state\ttree", "{}\t{};"), 1),
    "PAML": (f"  5  5\n\n{LIST}", 0),
    "PAML with marks": ("5 5\n" + ";  / the 1st (of 5); isn't it\n".join(MARKED) + ";\n// (A,B,C) doesn't end\n", 0),
    "PHYLIP": (f"5\n{LIST}", 0),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_trees_are_the_same_sample_in_every_format(tmp_path, kind, packed):
    text, num_burn_in = KINDS[kind]
    path, expected = tmp_path / "file", TreeSample.from_file(write(tmp_path, LIST, "list"))
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    sample = TreeSample.from_file(path, burn_in=0)
    assert sample.taxa == NAMES and not sample.rooted and sample.num_burn_in == 0
    assert np.array_equal(sample.topologies.children, expected.topologies.children)
    assert sample.index.tolist() == expected.index.tolist() == [0, 1, 0, 2, 0]
    assert torch.equal(sample.branch_lengths, expected.branch_lengths)
    default = TreeSample.from_file(path, taxa=NAMES)
    assert default.num_burn_in == num_burn_in and default.num_samples == 5 - num_burn_in
    assert repr(default).endswith("5 taxa, 1 left out as burn-in)" if num_burn_in else "5 taxa)")
    assert torch.equal(default.branch_lengths, expected.branch_lengths[num_burn_in:])
    tree = Tree.from_file(path, 3)
    assert torch.equal(Topologies.from_trees([tree], NAMES).branch_lengths_of([tree])[0], expected.branch_lengths[3])


def test_runs_in_one_file_have_no_burn_in_of_their_own(tmp_path):
    twice = nexus(SAME, "gen.{}").replace("end;\n", "") + nexus(SAME, "gen.{}").split("begin trees;\n")[1]
    path = write(tmp_path, twice, "two.t")
    for burn_in in (None, 0.5, 2):
        with pytest.raises(TreeError, match=r"two\.t, line 8: generation 0 follows generation 400.*Remedy.*burn_in=0"):
            TreeSample.from_file(path, burn_in)
    assert TreeSample.from_file(path, 0).num_samples == 10
    weighted = twice.replace("[&U]", "[&W 2]")
    assert TreeSample.from_file(write(tmp_path, weighted)).num_burn_in == 0
    # The column of a log that tells its runs apart, be they one after the other or side by side.
    head, row = "Iteration\tReplicate_ID\tpsi", "{}\t{}\t{};"
    rows = [(10 * place, run, tree) for run in range(2) for place, tree in enumerate(SAME)]
    for order in (rows, sorted(rows, key=lambda row: row[0])):
        text = "\n".join([head, *(row.format(*one) for one in order)])
        sample = TreeSample.from_file(write(tmp_path, text))
        assert sample.num_burn_in == 2 and sample.index.tolist() == [0, 1, 2, 1] * 2
        assert TreeSample.from_file(write(tmp_path, text), 3).num_samples == 4
        with pytest.raises(TreeError, match="holds 5 trees of one run, and burn_in=5 leaves none"):
            TreeSample.from_file(write(tmp_path, text), 5)


def test_trees_without_a_weight_among_others_have_the_weight_one(tmp_path):
    for text in ("0.5 ((A,B),C,D);\n((A,C),B,D);\n", "[&U] [&W 1/2] ((A,B),C,D);\n[&U] ((A,C),B,D);\n"):
        with pytest.warns(
            ConversionWarning, match="part, line 2: 1 of 2 trees have no weight.*the weight 1, as in PAUP"
        ):
            sample = TreeSample.from_file(write(tmp_path, text, "part"))
        assert sample.weights.tolist() == [1 / 3, 2 / 3] and not sample.rooted
    with pytest.warns(ConversionWarning, match="1 of 2"), pytest.raises(SettingsError, match="weighted trees"):
        TreeSample.from_file(write(tmp_path, text), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Iteration\tpsi\tphi\n0\t(A,B,C);\t(B,A,C);\n", "line 1: the columns 'psi' and 'phi' hold trees.*keep one"),
        ("# a log\nstate\tposterior\n0\t-1.5\n", "line 2: no column of this log holds trees.*writes its trees"),
        ("Iteration\tpsi\n", "line 1: no column of this log holds trees"),
        ("Iteration\tpsi\n0\t(A,B,C);\n10\n20\t(A,B,C);\n", "line 3: the row has 1 columns of 2"),
        ("Iteration\tpsi\n0\t(A,B,C);\n10\tx\n20\t(A,B,C);\n", "line 3: there is no tree"),
        ("Iteration\tpsi\n0\t(A,B,C);\n1.5\t(A,B,C);\n", r"line 3: '1\.5' in the column 'Iteration' is not a whole"),
        ("Iteration\tpsi\n0\t(A,B,C);\n10\t(A,B,D);\n", "bad, line 2 and .*bad, line 3 differ"),
        ("Iteration\tpsi\n0\t(A,B,C);\n10\t(A,B", "line 3: there is no tree.*incomplete='warn'"),
        ("3 2\n(A,B,C);\n", "first line announces 2 trees, but the file has 1.*incomplete='warn'"),
        ("3 2\n(A,B,C);\n(A,B", "line 3: there is no complete tree"),
        ("3 0\n(A,B,C);\n", "holds no tree"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*what follows them was not read")
def test_malformed_logs_and_counted_lists(tmp_path, text, message):
    with pytest.raises(TreeError, match=message) as error:
        TreeSample.from_file(write(tmp_path, text, "bad"), burn_in=0)
    assert "Remedy" in str(error.value) and "bad" in str(error.value)


@pytest.mark.parametrize("kind", ["RevBayes", "PHYLIP", "PAML"])
def test_logs_and_counted_lists_that_are_still_written(tmp_path, kind):
    text = KINDS[kind][0]
    start = text.rstrip().rfind("\n") + 1
    for cut in range(start + 1, start + text[start:].index(";")):
        path = write(tmp_path, text[:cut], "cut")
        with pytest.warns(ConversionWarning, match=r"cut: the file ends too early\. Its 4 complete trees") as record:
            sample = TreeSample.from_file(path, burn_in=0, incomplete="warn")
        assert sample.index.tolist() == [0, 1, 0, 2] and len(record) == 1


def test_text_behind_the_announced_trees_is_not_read(tmp_path):
    more = "a remark; isn't it\n"
    assert TreeSample.from_file(write(tmp_path, f"3 1\n(A,B,C);\n{more}")).num_samples == 1
    with pytest.warns(ConversionWarning, match="line 4: the first line announces 1 trees; what follows"):
        assert TreeSample.from_file(write(tmp_path, f"3 1\n(A,B,C);\n{more}(A,B,D);\n")).num_samples == 1
    # In PHYLIP, which has no marks, they are part of a name.
    assert TreeSample.from_file(write(tmp_path, "1\n(A#1,B@2,C/3);")).taxa == ("A#1", "B@2", "C/3")
    assert TreeSample.from_file(write(tmp_path, "3 1\n(A#1,B@2,C/3);")).taxa == ("A", "B", "C/3")
    assert TreeSample.from_file(write(tmp_path, "1\n((A,B) #1,C #1,D);")).taxa == tuple("ABCD")


def test_blanks_and_underscores_in_names(tmp_path):
    blank, underscore = "(('Homo sapiens',B_b),C,D);", "((Homo_sapiens,'B b'),C,D);"
    taxa = ("Homo_sapiens", "B b", "C", "D")
    for text in (blank, underscore, blank + underscore):
        assert TreeSample.from_file(write(tmp_path, text), taxa=taxa).taxa == taxa
    table = "#NEXUS\nbegin taxa;\ntaxlabels 'Homo sapiens' B_b C D;\nend;\nbegin trees;\ntree a = {}\nend;\n"
    for text in (blank, underscore):
        assert Tree.from_file(write(tmp_path, table.format(text))).taxa == ("Homo sapiens", "B_b", "C", "D")
    # Where both forms are names of taxa, each is itself; a form that two names share is none.
    both = "((A_b,'A b'),C,D);"
    assert TreeSample.from_file(write(tmp_path, both), taxa=("A b", "A_b", "C", "D")).taxa[:2] == ("A b", "A_b")
    assert newick.every_name({"1": "a_b c", "2": "a b_c"}) == {
        "1": "a_b c",
        "2": "a b_c",
        "a_b c": "a_b c",
        "a b_c": "a b_c",
    }
    with pytest.raises(TreeError, match="'A b' occurs twice"):
        TreeSample.from_file(write(tmp_path, both), taxa=("A b", "B", "C", "D"))
    alignment = Alignment.from_sequences({"Homo_sapiens": "ac", "B_b": "ac", "C": "ac", "D": "ac"})
    with pytest.raises(
        TreeError, match="'Homo.sapiens' and 'Homo.sapiens' differ by a blank and an underscore only; write"
    ):
        TreeModel(alignment, Tree.from_newick(blank), JC69())


def test_a_tree_of_ten_thousand_taxa_takes_megabytes(tmp_path):
    script = """
import random, resource, sys
from pathlib import Path
from bayeskit.models.phylogenetics import Topologies, Tree, TreeSample

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

source, parts = random.Random(1), [f"t{number}:0.5" for number in range(10_000)]
while len(parts) > 3:
    one = parts.pop(source.randrange(len(parts)))
    place = source.randrange(len(parts))
    parts[place] = f"({parts[place]},{one}):0.25"
path = Path(sys.argv[1])
path.write_text(f"({','.join(parts)});")
start = peak()
tree, sample = Tree.from_file(path), TreeSample.from_file(path, progress=False)
topologies = Topologies.from_trees([tree], sample.taxa)
assert (topologies.children == sample.topologies.children).all() and sample.num_taxa == 10_000
assert sample.branch_lengths.sum() == 10_000 * 0.5 + 9_997 * 0.25
rooted = sample.rooted_at("t7").unrooted()
assert (rooted.topologies.children == sample.topologies.children).all()
sample.to_file(path.with_suffix(".trees"))
again = TreeSample.from_file(path.with_suffix(".trees"), progress=False)
assert (again.topologies.children == sample.topologies.children).all()
print(peak() - start)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "big.nwk")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 400


def test_a_block_of_trees_says_whose_taxa_its_numbers_are(tmp_path):
    path = tmp_path / "two.nex"
    path.write_text(
        "#NEXUS\nbegin taxa;\ntitle 'gene copies';\ntaxlabels a1 a2 b1 c1;\nend;\n"
        "begin taxa;\ntitle species;\ntaxlabels A B C;\nend;\n"
        "begin trees;\nlink taxa = 'gene copies';\ntree one = ((1,2),3,4);\nend;\n"
        "begin trees;\nlink TAXA=Species;\ntree two = (3,2,1);\nend;\n"
    )
    assert Tree.from_file(path, 0).taxa == ("a1", "a2", "b1", "c1")
    assert Tree.from_file(path, 1).taxa == ("C", "B", "A")
