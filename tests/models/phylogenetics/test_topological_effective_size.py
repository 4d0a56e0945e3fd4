"""Effective number of trees: independent trees, chains that stand still, and chains whose autocorrelation is known."""

import numpy as np
import pytest

from bayeskit.errors import SettingsError, TreeError
from bayeskit.models.phylogenetics import TreeSample, all_topologies, robinson_foulds, topological_effective_size
from bayeskit.models.phylogenetics._topological_effective_size import _independent_squared_distance, _splits

TOPOLOGIES = all_topologies("ABCDEF")
NUMBER = 4000


def chain(stay, number=NUMBER, seed=0):
    """A chain that keeps its tree with some probability, or draws a new one of all: its autocorrelation is `stay^t`."""
    generator = np.random.default_rng(seed)
    index, drawn = np.zeros(number, dtype=int), generator.integers(len(TOPOLOGIES), size=number)
    kept = generator.random(number) < stay
    for step in range(number):
        index[step] = index[step - 1] if step and kept[step] else drawn[step]
    return TreeSample.from_trees([TREES[place] for place in index])


TREES = [TOPOLOGIES.tree(place) for place in range(len(TOPOLOGIES))]


@pytest.mark.parametrize("method", ["frechet", "pseudo"])
@pytest.mark.parametrize("stay", [0.0, 0.5, 0.9])
def test_a_chain_of_known_autocorrelation(stay, method):
    """The effective size is N (1 - s) / (1 + s), within the error of estimates of the autocorrelation time."""
    exact = (1 - stay) / (1 + stay)
    found = np.array([topological_effective_size(chain(stay, seed=seed), method) / NUMBER for seed in range(4)])
    # The relative variance of an autocorrelation time is about 2 (2 M + 1) / N with a window of M steps.
    window = 6 * max(1.0, 1 / exact)
    assert abs(np.log(found).mean() - np.log(exact)) < 4.5 * np.sqrt(2 * (2 * window + 1) / NUMBER / 4)


def test_distances_are_those_of_robinson_and_foulds():
    sample = chain(0.5, 40)
    distances = robinson_foulds(sample.topologies)[sample.index][:, sample.index].astype(float)
    expected = np.square(distances).sum() / (40 * 39)
    assert _independent_squared_distance(_splits(sample)) == pytest.approx(expected, rel=1e-12)


def test_one_topology_and_a_chain_in_two_halves():
    still = TreeSample.from_trees([TREES[0]] * 100)
    assert topological_effective_size(still) == 100
    halves = TreeSample.from_trees([TREES[0]] * 500 + [TREES[50]] * 500)
    assert topological_effective_size(halves) < 10


def test_what_is_refused():
    with pytest.raises(TreeError, match="not a sample"):
        topological_effective_size(TREES)
    with pytest.raises(SettingsError, match="eight or more with equal weights"):
        topological_effective_size(TreeSample.from_trees(TREES[:9], weights=range(1, 10)))
    with pytest.raises(SettingsError, match="eight or more"):
        topological_effective_size(TreeSample.from_trees(TREES[:3]))
    with pytest.raises(SettingsError, match="method='best' is unknown"):
        topological_effective_size(chain(0.0, 20), "best")
