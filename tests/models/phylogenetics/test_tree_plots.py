"""Plots of trees and samples: what is drawn is what they hold."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from bayeskit.errors import SettingsError, TreeError
from bayeskit.models.phylogenetics._samples import TreeSample, asdsf
from bayeskit.models.phylogenetics._summaries import (
    AnnotatedTree,
    _round_length,
    greedy_consensus,
    majority_rule_consensus,
    maximum_clade_credibility,
    plot_credible_set,
    plot_split_frequencies,
    plot_tree,
)
from bayeskit.models.phylogenetics._topologies import all_topologies
from bayeskit.models.phylogenetics._trees import Tree


def names_at(ax) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.xy for text in ax.texts}


def horizontal_lines(ax) -> list[np.ndarray]:
    return [line for line in ax.collections[0].get_segments() if line[0, 1] == line[1, 1]]


def test_a_phylogram_is_to_scale():
    tree = Tree.from_newick("(((A:1,B:2):3,C:4):0.5,(D:6,E:7):8,F:9);")
    ax = plot_tree(tree, Figure().subplots())
    places = names_at(ax)
    # The way from the root to each tip.
    expected = {"A": 4.5, "B": 5.5, "C": 4.5, "D": 14.0, "E": 15.0, "F": 9.0}
    assert {name: places[name][0] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert [places[name][1] for name in "ABCDEF"] == [0, 1, 2, 3, 4, 5]
    drawn = sorted(line[:, 0].max() - line[:, 0].min() for line in horizontal_lines(ax))
    assert drawn == pytest.approx(sorted(tree.branch_lengths.tolist()), abs=1e-12)
    assert len(ax.collections[0].get_segments()) == tree.num_edges + 4
    # The bar has the length that it says.
    (bar,) = ax.lines
    assert np.ptp(bar.get_xdata()) == float(ax.texts[-1].get_text()) == 2
    # The mutation: other lengths are drawn otherwise.
    other = plot_tree(Tree.from_newick(tree.to_newick([1.0] * 9)), Figure().subplots())
    assert names_at(other)["A"][0] == 3


def test_a_cladogram_aligns_its_tips():
    ax = plot_tree(Tree.from_newick("(((A,B),C),(D,E),F);"), Figure().subplots())
    places = names_at(ax)
    assert list(places) == list("ABCDEF") and {x for x, _ in places.values()} == {3}
    assert not ax.lines and len(horizontal_lines(ax)) == 9
    assert all(line[1, 0] > line[0, 0] for line in horizontal_lines(ax))


def test_no_lines_cross():
    """Tips stand in rows, and the rows below each node are consecutive."""
    sample = TreeSample.from_topologies(all_topologies("ABCDEFG")[[500]])
    tree = greedy_consensus(sample)
    places = names_at(plot_tree(tree, Figure().subplots()))
    row = {taxon: int(places[name][1]) for taxon, name in enumerate(tree.taxa)}
    assert sorted(row.values()) == list(range(7))
    rows = [{row[taxon]} for taxon in range(7)]
    for children in tree.children:
        rows.append(set().union(*(rows[child] for child in children)))
        assert max(rows[-1]) - min(rows[-1]) == len(rows[-1]) - 1


def test_supports_of_a_consensus():
    every = all_topologies("ABCD")
    lengths = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    sample = TreeSample.from_topologies(every[[0, 0, 0, 1]], None, lengths)
    tree = majority_rule_consensus(sample)
    ax = tree.plot(Figure().subplots())
    texts = [text.get_text() for text in ax.texts]
    assert texts[:5] == ["A", "B", "C", "D", "0.75"] and len(ax.lines) == 1
    assert names_at(ax)["0.75"][0] == pytest.approx(float(tree.branch_lengths[4]), abs=1e-12)
    star = majority_rule_consensus(TreeSample.from_topologies(every))
    assert [text.get_text() for text in star.plot(Figure().subplots()).texts] == list("ABCD")


def test_supports_of_a_rooted_tree_are_those_of_its_splits():
    tree = majority_rule_consensus(TreeSample.from_topologies(all_topologies("ABCD")[[0, 0, 0, 1]]))
    texts = [text.get_text() for text in tree.rooted_at(["A", "C"]).plot(Figure().subplots()).texts]
    assert texts == ["A", "B", "C", "D", "0.75", "0.75"]
    texts = [
        text.get_text() for text in AnnotatedTree.of(Tree.from_newick("((A,B),C,D);")).plot(Figure().subplots()).texts
    ]
    assert texts == ["A", "B", "C", "D"]


def test_bars_of_heights():
    heights = torch.tensor([[1.0, 3.0], [2.0, 4.0], [1.5, 6.0]], dtype=torch.float64)
    lengths = torch.stack([heights[:, 0], heights[:, 0], heights[:, 1], heights[:, 1] - heights[:, 0]], 1)
    sample = TreeSample.from_topologies(all_topologies("ABC", rooted=True)[[1] * 3], None, lengths)
    tree = maximum_clade_credibility(sample, lengths="heights")
    ax = plot_tree(tree, Figure().subplots(), intervals=True)
    bars = ax.collections[1].get_segments()
    tips = names_at(ax)["A"][0]
    assert tips == pytest.approx(13 / 3, abs=1e-12)
    for line, (low, high) in zip(bars, ((1.0, 2.0), (3.0, 6.0)), strict=True):
        assert sorted(tips - line[:, 0]) == pytest.approx([low, high], abs=1e-12)
    assert ax.get_xlim()[0] < tips - 6.0
    for bare in (Tree.from_newick("(A,B,C);"), maximum_clade_credibility(sample.unrooted())):
        with pytest.raises(TreeError, match=r"no heights.*lengths='heights'"):
            plot_tree(bare, Figure().subplots(), intervals=True)


def test_lengths_of_zero():
    ax = plot_tree(Tree.from_newick("((A:0,B:0):0,C:0,D:0);"), Figure().subplots())
    assert np.isfinite(ax.get_xlim()).all() and ax.get_xlim()[1] > 0


def test_length_of_the_bar():
    for largest, expected in ((0.26, 0.2), (0.2, 0.2), (0.6, 0.5), (0.99, 0.5), (1.0, 1.0), (730.0, 500.0)):
        assert _round_length(largest) == pytest.approx(expected, rel=1e-12)


def test_split_frequencies_of_two_samples():
    every = all_topologies("ABCDE")
    one, other = TreeSample.from_topologies(every[:3], [5, 3, 2]), TreeSample.from_topologies(every[:3], [2, 3, 5])
    ax = plot_split_frequencies(one, other, Figure().subplots())
    line, points = ax.lines
    assert line.get_xdata().tolist() == line.get_ydata().tolist() == [0, 1]
    x, y = points.get_xdata(), points.get_ydata()
    found = asdsf([one, other])
    assert len(x) == len(found.standard_deviations)
    assert abs(np.mean(np.abs(x - y) / np.sqrt(2)) - found.average) < 1e-12
    assert ax.get_title() == f"ASDSF {found.average:.4f}, maximum {found.maximum:.4f}"
    with pytest.raises(TreeError, match="only in sample 1"):
        plot_split_frequencies(one, TreeSample.from_topologies(all_topologies("ABCDX")), Figure().subplots())


def test_credible_set():
    weights = np.array([0.05, 0.5, 0.1, 0.3, 0.05])
    sample = TreeSample.from_topologies(all_topologies("ABCDE")[:5], weights)
    ax = plot_credible_set(sample, 0.85, Figure().subplots())
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0.5, 0.3, 0.1], abs=1e-15)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.8, 0.9], abs=1e-15)
    assert ax.get_title() == "3 of 5 topologies have probability 0.900"
    with pytest.raises(SettingsError, match="not a probability"):
        plot_credible_set(sample, 0.0, Figure().subplots())


def test_new_axes_go_through_pyplot():
    sample = TreeSample.from_topologies(all_topologies("ABCD"))
    drawn = [
        plot_tree(sample.trees[0]),
        majority_rule_consensus(sample).plot(),
        plot_split_frequencies(sample, sample),
        plot_credible_set(sample),
    ]
    assert [ax.figure.number for ax in drawn] == pyplot.get_fignums()[-4:]
    for ax in drawn:
        ax.figure.canvas.draw()
        pyplot.close(ax.figure)


def test_several_topologies_are_no_tree_to_plot():
    for topologies in (all_topologies("ABCD"), all_topologies("ABCD", rooted=True)):
        with pytest.raises(TreeError, match=r"not a single tree.*\.tree\(0\).*greedy_consensus"):
            plot_tree(topologies)
