"""Samples of trees in the forms of MrBayes and BEAST."""

import re

import dendropy
import numpy as np
import pandas as pd
import pytest
import torch

from bayeskit.errors import OutputError, SettingsError, ShapeError, TreeError, UnknownNameError
from bayeskit.models.phylogenetics import Topologies, TreeSample, all_topologies


def chain(rooted: bool, names=tuple("ABCDE")) -> TreeSample:
    random_numbers = np.random.default_rng(0)
    every = all_topologies("ABCDE", rooted)
    index = random_numbers.integers(len(every), size=12)
    lengths = torch.from_numpy(random_numbers.exponential(0.1, (12, every.num_edges)))
    return TreeSample.from_topologies(Topologies(names, every.children[index], rooted), None, lengths)


@pytest.mark.parametrize(
    "format, suffix, rooted", [("mrbayes", ".t", False), ("mrbayes", ".t", True), ("beast", ".trees", True)]
)
def test_chains_are_read_back_as_they_were(tmp_path, format, suffix, rooted):
    sample = chain(rooted, ("it's", "a b", "x_1", "(y)", "1"))
    path = tmp_path / f"run.1{suffix}"
    sample.to_file(path, format, interval=500)
    again = TreeSample.from_file(path, burn_in=0)
    assert again.taxa == sample.taxa and again.rooted == rooted
    assert (again.topologies.children == sample.topologies.children).all()
    assert np.array_equal(again.index, sample.index) and torch.equal(again.branch_lengths, sample.branch_lengths)
    np.testing.assert_allclose(again.sample_weights, sample.sample_weights, rtol=1e-14)
    names = re.findall(r"^   tree (\S+) = \[&[RU]\] \(", path.read_text(), re.MULTILINE)
    assert names == [f"{'gen.' if format == 'mrbayes' else 'STATE_'}{500 * row}" for row in range(12)]
    trees = dendropy.TreeList.get(path=path, schema="nexus", preserve_underscores=True)
    assert [tree.length() for tree in trees] == pytest.approx(sample.branch_lengths.sum(1).tolist(), rel=1e-12)
    assert all(tree.is_rooted == rooted for tree in trees)


@pytest.mark.parametrize(
    "format, suffix, table_suffix, length", [("mrbayes", ".t", ".p", "TL"), ("beast", ".trees", ".log", "treeLength")]
)
def test_the_table_has_a_row_for_each_tree(tmp_path, format, suffix, table_suffix, length):
    sample = chain(True)
    values = np.random.default_rng(1).normal(size=(12, 2))
    parameters = {"LnL": values[:, 0], "pi": torch.from_numpy(values), "count": np.arange(12)}
    sample.to_file(tmp_path / f"run1{suffix}", format, parameters=parameters, interval=10)
    lines = (tmp_path / f"run1{table_suffix}").read_text().splitlines()
    if format == "mrbayes":
        assert re.fullmatch(r"\[ID: \d{10}\]", lines.pop(0))
    rows = [line.split("\t") for line in lines]
    assert rows[0] == ["Gen" if format == "mrbayes" else "Sample", length, "LnL", "pi{1}", "pi{2}", "count"]
    found = np.array(rows[1:], dtype=float)
    expected = np.column_stack([10 * np.arange(12), sample.branch_lengths.sum(1), values[:, 0], values, np.arange(12)])
    assert np.array_equal(found, expected)
    # A table of pandas gives the same columns.
    frame = pd.DataFrame({"LnL": values[:, 0], "kappa": values[:, 1]}, index=range(5, 17))
    sample.to_file(tmp_path / f"run1{suffix}", format, parameters=frame)
    assert (tmp_path / f"run1{table_suffix}").read_text().count("\t") == 13 * 3


def test_beast_needs_no_lengths(tmp_path):
    bare = TreeSample.from_topologies(all_topologies("ABCD", rooted=True))
    bare.to_file(tmp_path / "run.trees", "beast")
    assert TreeSample.from_file(tmp_path / "run.trees", burn_in=0).branch_lengths is None
    assert (tmp_path / "run.log").read_text().split() == ["Sample", *map(str, range(15))]


def test_what_is_refused(tmp_path):
    sample = chain(False)
    path = tmp_path / "run.t"
    with pytest.raises(UnknownNameError, match="'paup'"):
        sample.to_file(path, "paup")
    for name, format in (("run.trees", "mrbayes"), ("run.t", "beast"), ("run", "mrbayes")):
        with pytest.raises(SettingsError, match=f"{name}: the suffix"):
            sample.to_file(tmp_path / name, format)
    with pytest.raises(TreeError, match=r"BEAST are rooted.*rooted_at"):
        sample.to_file(tmp_path / "run.trees", "beast")
    with pytest.raises(TreeError, match="no branch lengths"):
        TreeSample.from_topologies(all_topologies("ABCD")).to_file(path, "mrbayes")
    weighted = TreeSample.from_topologies(sample.topologies, np.arange(1, 1 + len(sample.topologies)))
    with pytest.raises(SettingsError, match="different weights"):
        weighted.to_file(path, "mrbayes")
    for interval in (0, 1.5, "2"):
        with pytest.raises(SettingsError, match="interval"):
            sample.to_file(path, "mrbayes", interval=interval)
    for wrong in (np.ones(11), np.ones(()), ["a"] * 12):
        with pytest.raises(ShapeError, match=r"'kappa'.*shape \(12, \.\.\.\)"):
            sample.to_file(path, "mrbayes", parameters={"kappa": wrong})
    with pytest.raises(SettingsError, match="parameters"):
        sample.to_file(path, parameters={"kappa": np.ones(12)})
    assert not list(tmp_path.iterdir())
    with pytest.raises(OutputError):
        sample.to_file(tmp_path / "missing" / "run.t", "mrbayes")
