"""Gradient moves of branch lengths and parameters leave their posterior on one topology unchanged."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from pyro.distributions import LogNormal

from bayeskit._core.randomness import new_generator
from bayeskit.models.phylogenetics import K80, Alignment, ForestLikelihood, all_topologies
from bayeskit.models.phylogenetics._parameters import free_parameters
from bayeskit.models.phylogenetics._topology_moves._chains import LengthPrior
from bayeskit.models.phylogenetics.workflows._gradient_moves import GradientMoves

FOUR = Alignment.from_sequences({"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTTA"})
PRIOR = LogNormal(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
CHAINS = 120


@pytest.fixture(scope="module")
def exact():
    """Posterior means of the log of kappa, of the lengths and of their sum with the log, by quadrature."""
    nodes, weights = scipy.special.roots_hermitenorm(8)
    lengths, length_weights = scipy.special.roots_laguerre(6)
    grid = torch.cartesian_prod(*[torch.as_tensor(lengths / 10)] * 5)
    logs = torch.cartesian_prod(*[torch.as_tensor(np.log(length_weights))] * 5).sum(-1)
    topology, likelihood = all_topologies(FOUR.taxa)[:1], ForestLikelihood(FOUR, K80())
    rows = []
    for node, weight in zip(nodes, weights, strict=True):
        kappa = torch.tensor(math.exp(1 + 0.5 * node), dtype=torch.float64)
        rows.append(likelihood.log_likelihood(topology, grid[:, None], kappa=kappa)[:, 0] + logs + math.log(weight))
    mass = torch.stack(rows).flatten().softmax(0).reshape(8, -1)
    return torch.cat([(mass.sum(1) @ (1 + 0.5 * torch.as_tensor(nodes)))[None], mass.sum(0) @ grid])


def scores(exact, prior, rounds=60):
    """Score of each mean over chains that start at the prior's median."""
    space = free_parameters(FOUR, K80(PRIOR), None)
    moves = GradientMoves(FOUR, space, prior)
    topologies, generator = all_topologies(FOUR.taxa)[[0] * CHAINS], new_generator(2, stream="gradient moves")
    lengths = torch.full((CHAINS, 5), 0.07, dtype=torch.float64)
    position, root = torch.full((CHAINS, 1), 1.0, dtype=torch.float64), torch.full((1, 1), 0.5, dtype=torch.float64)
    means, accepted = torch.zeros(CHAINS, 6, dtype=torch.float64), 0.0
    for number in range(rounds):
        step = 0.3 + 0.4 * torch.rand((), generator=generator, dtype=torch.float64)
        lengths, position, probability = moves.move(topologies, lengths, position, root, step, generator)
        if number >= rounds // 4:
            means += torch.cat([position, lengths], 1) / (rounds - rounds // 4)
            accepted += float(probability.mean()) / (rounds - rounds // 4)
    assert 0.5 < accepted < 0.999
    return (means.mean(0) - exact) / (means.std(0) / math.sqrt(CHAINS))


@pytest.mark.calibration
def test_posterior_means_are_those_of_quadrature(exact, limit):
    z = scores(exact, LengthPrior())
    assert float(z.abs().max()) < limit(6, dof=CHAINS - 1), z


@pytest.mark.calibration
def test_a_missing_derivative_of_the_roots_is_noticed(exact, limit):
    # A density of shape 1/2 makes up for the root of the length in the density of its root.
    z = scores(exact, LengthPrior(pendant=0.5, inner=0.5))
    assert float(z.abs().max()) > limit(6, dof=CHAINS - 1), z
