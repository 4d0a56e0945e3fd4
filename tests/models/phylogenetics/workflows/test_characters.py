"""Searches with morphological characters, restriction sites and several types of data, against quadrature."""

import math

import numpy as np
import pytest
import scipy.special
import torch

from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    Binary,
    GammaRates,
    Partition,
    VariableSites,
    all_topologies,
)
from bayeskit.models.phylogenetics._partitions import forest_likelihood
from bayeskit.models.phylogenetics.workflows import _topology_inference as module
from bayeskit.models.phylogenetics.workflows import infer_topologies
from tests.models.phylogenetics.test_tree_chains import keys

ROWS = {"A": "00012010", "B": "0?012120", "C": "01120131", "D": "01102031"}
CHARACTERS = Alignment.from_sequences(ROWS, data_type="standard")
BASES = Alignment.from_sequences({"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTTA"})
SITES = Alignment.from_sequences({"A": "0111", "B": "0110", "C": "1010", "D": "1001"}, data_type="standard")


def mixed():
    characters = Partition.of_characters(CHARACTERS.select_sites([1, 3, 5]), coding="variable")
    subsets, models = {"bases": BASES, **characters.subsets}, {"bases": JC69(), **characters.substitution}
    return Partition(subsets, models, {"bases": GammaRates(0.7)}, relative_rates=[0.5, 1.5, 1.0])


CASES = {
    "Mk": lambda: (Partition.of_characters(CHARACTERS), None),
    "Mkv": lambda: (Partition.of_characters(CHARACTERS.select_sites(range(1, 8)), coding="variable"), None),
    "ordered": lambda: (Partition.of_characters(CHARACTERS, ordered=[3, 4, 6], site_rates=GammaRates(0.5)), None),
    "restriction sites": lambda: (SITES, VariableSites(Binary([0.3, 0.7]), "noabsence")),
    "mixed": lambda: (mixed(), None),
}


def by_quadrature(data, substitution, number):
    """Log masses of the topologies of four taxa, with exponential branch lengths of rate 10, `(3,)`."""
    topologies, likelihood = all_topologies("ABCD"), forest_likelihood(data, substitution)
    lengths, weights = scipy.special.roots_laguerre(number)
    grid = torch.cartesian_prod(*[torch.as_tensor(lengths / 10)] * 5)
    logs = torch.cartesian_prod(*[torch.as_tensor(np.log(weights))] * 5).sum(-1)
    parts = [likelihood.log_likelihood(topologies, one[:, None].expand(-1, 3, -1)) for one in grid.split(2**14)]
    return topologies, (torch.cat(parts) + logs[:, None]).logsumexp(0)


@pytest.mark.compiler
@pytest.mark.calibration
@pytest.mark.parametrize("name", CASES)
def test_evidence_and_topologies_are_those_of_quadrature(name, limit):
    data, substitution = CASES[name]()
    topologies, masses = by_quadrature(data, substitution, 9)
    error_of_quadrature = float((masses - by_quadrature(data, substitution, 8)[1]).abs().max())
    found = infer_topologies(
        data, substitution=substitution, num_warmup=150, num_samples=1500, num_temperatures=5, progress=False
    )
    exact = float(masses.logsumexp(0)) - math.log(3)
    assert error_of_quadrature < 0.3 * found.evidence.standard_error
    assert found.evidence.trusted
    assert abs(found.log_evidence - exact) - error_of_quadrature < limit(4) * found.evidence.standard_error < 0.2
    series = torch.zeros(3, *found.log_prior.shape, dtype=torch.float64)
    for run, sample in enumerate(found.samples):
        names = keys(sample.topologies)
        for place, key in enumerate(keys(topologies)):
            series[place, run] = torch.from_numpy(np.array([names[i] == key for i in sample.index]))
    z = (series.mean((1, 2)) - masses.softmax(0)) / module.mean_error(series)
    assert float(z.abs().max()) < limit(4), (z, masses.softmax(0))


@pytest.mark.compiler
@pytest.mark.calibration
def test_images_of_an_alignment_under_swaps_of_taxa_have_equal_mass(limit):
    """Characters, and the same with B and C swapped: the topologies AB|CD and AC|BD have one mass."""
    swapped = {"A": ROWS["A"], "B": ROWS["C"], "C": ROWS["B"], "D": ROWS["D"]}
    both = {taxon: ROWS[taxon][1:] + swapped[taxon][1:] for taxon in "ABCD"}
    data = Partition.of_characters(Alignment.from_sequences(both, data_type="standard"), coding="variable")
    found = infer_topologies(data, num_warmup=150, num_samples=1500, num_temperatures=5, progress=False)
    difference = torch.zeros(1, *found.log_prior.shape, dtype=torch.float64)
    for run, sample in enumerate(found.samples):
        side = sample.topologies.below[:, 4, 0][sample.index]  # of the inner edge, without A: C and D, or B and D
        difference[0, run] = torch.from_numpy((side == 0b1100) * 1.0 - (side == 0b1010))
    assert abs(float(difference.mean() / module.mean_error(difference)[0])) < limit(4)
