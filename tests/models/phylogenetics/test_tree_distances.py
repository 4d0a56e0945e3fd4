"""Robinson-Foulds distances and split frequencies, beside DendroPy's."""

import math
import pathlib
import random

import dendropy
import numpy as np
import pytest
from dendropy.calculate import treecompare

from bayeskit.errors import SettingsError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics import _samples as tree_distances
from bayeskit.models.phylogenetics._distributions import SampleFrequencies
from bayeskit.models.phylogenetics._samples import TreeSample, asdsf, robinson_foulds, split_frequencies
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._trees import Tree


def random_topologies(num_taxa: int, count: int, seed: int, rooted: bool = False) -> Topologies:
    """Topologies that share many splits: a few joins are drawn anew for each."""
    source = random.Random(seed)
    names = [f"t{i:03d}" for i in range(num_taxa)]
    size = 5 if num_taxa > 10 else 1
    common = [names[start : start + size] for start in range(0, num_taxa, size)]
    trees = []
    for _ in range(count):
        parts = []
        for group in common:
            inner = list(group)
            while len(inner) > 1:
                source.shuffle(inner)
                inner = [f"({inner[0]},{inner[1]})", *inner[2:]]
            parts += inner
        while len(parts) > 3:
            source.shuffle(parts)
            parts = [f"({parts[0]},{parts[1]})", *parts[2:]]
        trees.append(Tree.from_newick(f"({','.join(parts)});"))
    topologies = Topologies.from_trees(trees, names)
    return topologies.rooted_at(np.arange(count) % topologies.num_edges) if rooted else topologies


def to_dendropy(topologies: Topologies) -> dendropy.TreeList:
    rooting = "force-rooted" if topologies.rooted else "force-unrooted"
    text = "".join(topologies.to_newick(row) for row in range(len(topologies)))
    namespace = dendropy.TaxonNamespace(topologies.taxa)
    return dendropy.TreeList.get(data=text, schema="newick", rooting=rooting, taxon_namespace=namespace)


@pytest.mark.parametrize(("num_taxa", "rooted"), [(4, False), (4, True), (12, False), (12, True), (66, False)])
def test_distances_are_those_of_dendropy(num_taxa, rooted):
    one = random_topologies(num_taxa, 12, seed=1, rooted=rooted)
    other = random_topologies(num_taxa, 7, seed=2, rooted=rooted)
    together = to_dendropy(Topologies(one.taxa, np.concatenate([one.children, other.children]), rooted))
    expected = [[treecompare.symmetric_difference(a, b) for b in together[12:]] for a in together[:12]]
    found = robinson_foulds(one, other)
    assert found.tolist() == expected and found.dtype == np.int64 and len(np.unique(found)) > 1
    shuffled = other.with_taxa(random.Random(3).sample(other.taxa, num_taxa))[0]
    assert robinson_foulds(one, shuffled).tolist() == expected
    # The mutation: taxa not brought into one order.
    if num_taxa > 4:
        assert robinson_foulds(one, Topologies(one.taxa, shuffled.children, rooted)).tolist() != expected


def test_distances_of_all_topologies_are_a_metric():
    every = robinson_foulds(all_topologies("ABCDEF"))
    assert (every == every.T).all() and ((every == 0) == np.eye(105, dtype=bool)).all() and every.max() == 6
    assert (every[:, :, None] <= every[:, None] + every.T[None]).all()
    # Each topology has 2 (n - 3) neighbours by an exchange around an inner edge.
    assert ((every == 2).sum(axis=1) == 6).all()
    assert robinson_foulds(all_topologies("ABC")).tolist() == [[0]]


def test_split_frequencies_are_those_of_dendropy():
    topologies = random_topologies(66, 40, seed=4)
    weights = np.random.default_rng(0).dirichlet(np.ones(40))
    sample = TreeSample.from_topologies(topologies, weights)
    trees = to_dendropy(topologies)
    for tree, weight in zip(trees, weights, strict=True):
        tree.weight = weight
    counted = trees.split_distribution(use_tree_weights=True)
    expected = {mask: counted[mask] for mask in counted.split_counts if 2 <= mask.bit_count() <= 64}
    table = split_frequencies(sample)
    everything = (1 << 66) - 1
    found = {}
    for side, frequency in zip(table.splits, table.frequencies[0], strict=True):
        mask = sum(1 << taxon for taxon in clades.members(side))
        found[mask if mask in expected else everything - mask] = frequency
    assert found.keys() == expected.keys() and len(found) > 100
    assert max(abs(found[mask] - expected[mask]) for mask in found) < 1e-12
    assert (np.diff(table.frequencies[0]) <= 0).all()


def test_table_of_split_frequencies():
    every = all_topologies("ABCDE")
    one = TreeSample.from_topologies(every[[0, 1]], [3, 1])
    other = TreeSample.from_topologies(every[[1]]).with_taxa("EDCBA")
    frame = split_frequencies([one, other]).to_pandas()
    assert list(frame.columns) == ["split", "size", "sample_0", "sample_1"]
    # Named by the side whose size is given, as by the distributions: that without the first taxon.
    assert [len(split.split("|")) for split in frame["split"]] == frame["size"].tolist() and 3 in frame["size"].tolist()
    named = SampleFrequencies.fit(one).split_probabilities().to_dict()
    assert {"|".join(taxa): share for taxa, share in named.items()} == {
        split: share for split, share in zip(frame["split"], frame["sample_0"], strict=True) if share
    }
    for sample, column in ((one, "sample_0"), (other.with_taxa("ABCDE"), "sample_1")):
        for split, frequency in zip(frame["split"], frame[column], strict=True):
            side = set(split.split("|"))
            by_hand = sum(
                weight
                for tree, weight in zip(sample.trees, sample.weights, strict=True)
                if split in tree.edge_names
                or any(set(name.split("|")) in (side, set("ABCDE") - side) for name in tree.edge_names)
            )
            assert abs(by_hand - frequency) < 1e-15
    rooted = split_frequencies(TreeSample.from_topologies(every[[0]].rooted_at("A")))
    assert sorted(len(name.split("|")) for name in rooted.names) == [2, 3, 4]


def mrbayes_definition(runs: list[list[set]], minimum: float) -> tuple[float, float]:
    """Average and largest standard deviation, one split after another."""
    splits = set().union(*(tree for run in runs for tree in run))
    deviations = []
    for split in splits:
        frequencies = [sum(split in tree for tree in run) / len(run) for run in runs]
        if max(frequencies) >= minimum:
            mean = sum(frequencies) / len(runs)
            deviations.append((sum((f - mean) ** 2 for f in frequencies) / (len(runs) - 1)) ** 0.5)
    return sum(deviations) / len(deviations), max(deviations)


@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("num_runs", [2, 4])
def test_average_standard_deviation_of_split_frequencies(minimum, num_runs):
    samples = [TreeSample.from_topologies(random_topologies(11, 30 + run, seed=run)) for run in range(num_runs)]
    runs = [
        [{side.tobytes() for side in sample.topologies.below[place][11:]} for place in sample.index]
        for sample in samples
    ]
    average, maximum = mrbayes_definition(runs, minimum)
    found = asdsf([samples[0], *(sample.with_taxa(sample.taxa[::-1]) for sample in samples[1:])], minimum)
    assert abs(found.average - average) < 1e-12 and abs(found.maximum - maximum) < 1e-12
    assert found.to_pandas()["standard_deviation"].max() == found.maximum
    assert (found.frequencies.frequencies.max(axis=0) >= minimum - 1e-12).all()
    # The mutation: another divisor.
    deviations = found.frequencies.frequencies.std(axis=0)
    assert abs(deviations.mean() - average) > 1e-4


def test_a_frequency_at_the_minimum_counts():
    every = all_topologies("ABCD")
    samples = [TreeSample.from_topologies(every, weights) for weights in ([1, 9, 0], [0, 10, 0])]
    assert len(asdsf(samples).standard_deviations) == 2
    assert len(asdsf(samples, 0.1 + 1e-9).standard_deviations) == 1


def test_runs_that_agree():
    sample = TreeSample.from_topologies(random_topologies(9, 20, seed=8))
    found = asdsf([sample, sample, sample])
    assert found.average <= found.maximum < 1e-12


def test_distances_of_single_trees():
    one, other = (Tree.from_newick(text) for text in ("((A,B),(C,D),E);", "((B,C),(A,D),E);"))
    assert robinson_foulds(one, other) == 4 and isinstance(robinson_foulds(one, other), int)
    assert robinson_foulds(one, one) == 0
    every = all_topologies("EDCBA")
    rows = robinson_foulds(one, every)
    assert rows.shape == (1, 15) and np.array_equal(robinson_foulds(every, one), rows.T)
    assert rows.min() == 0 and robinson_foulds(one).tolist() == [[0]]
    for wrong in ("((A,B),C,D);", [one], None):
        with pytest.raises(TreeError, match=r"neither a Tree nor Topologies.*from_trees"):
            robinson_foulds(wrong, one)


def test_runs_given_one_by_one_or_as_paths():
    four = TreeSample.from_topologies(all_topologies("ABCD"))
    for call in (lambda: asdsf(four, four), lambda: asdsf(four), lambda: asdsf([four, four], four)):
        with pytest.raises(SettingsError, match=r"asdsf\(\[one, other\]\)"):
            call()
    with pytest.raises(TreeError, match=r"str is not a sample of trees.*TreeSample\.from_file"):
        asdsf(["one.t", "other.t"])
    with pytest.raises(TreeError, match="PosixPath is not a sample"):
        split_frequencies(pathlib.PosixPath("one.t"))


def test_representations():
    runs = [TreeSample.from_topologies(all_topologies("ABCD"), weights) for weights in ([4, 6, 0], [6, 4, 0])]
    assert repr(asdsf(runs)) == "SplitDeviations(ASDSF 0.1414, maximum 0.1414, 2 splits in 2 runs)"
    assert repr(split_frequencies(runs)) == "SplitFrequencies(3 splits in 2 samples, 4 taxa)"


def test_no_split_may_be_frequent_enough():
    four = TreeSample.from_topologies(all_topologies("ABCD"))
    found = asdsf([four, four], 0.9)
    assert math.isnan(found.average) and math.isnan(found.maximum) and len(found.to_pandas()) == 0
    assert repr(found) == "SplitDeviations(no split is frequent enough in any of 2 runs)"


def test_what_is_refused():
    four = TreeSample.from_topologies(all_topologies("ABCD"))
    for number in (0, 1):
        with pytest.raises(SettingsError, match=f"samples: {number} given"):
            asdsf([four] * number)
    for minimum in (-0.1, 1.1, float("nan")):
        with pytest.raises(SettingsError, match="not a frequency"):
            asdsf([four, four], minimum)
    three = TreeSample.from_topologies(all_topologies("ABC"))
    with pytest.raises(SettingsError, match="at least four taxa"):
        asdsf([three, three], 0.0)
    with pytest.raises(TreeError, match="only in sample 2: 'E'"):
        asdsf([four, TreeSample.from_topologies(all_topologies("ABCE"))])
    with pytest.raises(TreeError, match="no sample"):
        split_frequencies([])
    rooted = all_topologies("ABCD", rooted=True)
    with pytest.raises(TreeError, match="Only one of the two arguments is rooted"):
        robinson_foulds(four.topologies, rooted)
    with pytest.raises(TreeError, match="only in the requested order: 'D'"):
        robinson_foulds(all_topologies("ABCD"), all_topologies("ABCE"))
    assert tree_distances.comparable([four, four.with_taxa("DCBA")])[1].taxa == four.taxa
