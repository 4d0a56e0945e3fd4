"""The block model of a page against urns, all graphs, and draws from the exact posterior."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import one_hot


@pytest.fixture(scope="module")
def page(definitions):
    return definitions("karate_club")


def random_graph(nodes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    above = (torch.rand(nodes, nodes, generator=generator, dtype=torch.float64) < 0.5).double().triu(1)
    return above + above.T


def all_members(nodes, blocks):
    assignments = torch.cartesian_prod(*[torch.arange(blocks)] * nodes)
    return one_hot(assignments, blocks).double()


def urn_log_joint(adjacency, assignment, blocks):
    """Draw nodes, then edges, one after the other, from the predictive distributions of what came before."""
    total, sizes = 0.0, [0] * blocks
    for node, block in enumerate(assignment):
        total += math.log((1 + sizes[block]) / (blocks + node))
        sizes[block] += 1
    seen = {}
    for first, second in itertools.combinations(range(len(adjacency)), 2):
        counts = seen.setdefault(tuple(sorted((assignment[first], assignment[second]))), [1, 1])
        edge = int(adjacency[first, second])
        total += math.log(counts[edge] / sum(counts))
        counts[edge] += 1
    return total


def largest_z(members, exact):
    """Return the largest |z| of the frequencies of assignments expected at least ten times, and their number."""
    blocks, assignments = members.shape[-1], members.argmax(-1)
    place = (assignments * blocks ** torch.arange(assignments.shape[1]).flip(0)).sum(-1)
    share = torch.bincount(place, minlength=len(exact)) / len(members)
    often = exact * len(members) >= 10
    error = (exact * (1 - exact) / len(members)).sqrt()
    return float(((share - exact) / error)[often].abs().max()), int(often.sum())


@pytest.mark.parametrize(("nodes", "blocks"), [(5, 2), (4, 3), (6, 1)])
def test_joint_is_that_of_urns(page, nodes, blocks):
    adjacency, members = random_graph(nodes), all_members(nodes, blocks)
    slow = [urn_log_joint(adjacency, assignment, blocks) for assignment in members.argmax(-1).tolist()]
    joint = sum(page.log_prior_and_likelihood(adjacency, members))
    torch.testing.assert_close(joint, torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-12)


def test_probabilities_of_all_graphs_and_assignments_sum_to_one(page):
    total, members = 0.0, all_members(4, 2)
    for edges in itertools.product([0.0, 1.0], repeat=6):
        adjacency = torch.zeros(4, 4, dtype=torch.float64)
        adjacency[tuple(torch.triu_indices(4, 4, 1))] = torch.tensor(edges, dtype=torch.float64)
        total += sum(page.log_prior_and_likelihood(adjacency + adjacency.T, members)).exp().sum()
    assert abs(float(total) - 1) < 1e-12


@pytest.mark.parametrize(("nodes", "blocks", "power"), [(6, 2, 1.0), (4, 3, 1.0), (5, 2, 0.3)])
def test_sweeps_keep_the_posterior_at_any_power(page, limit, nodes, blocks, power):
    adjacency, members = random_graph(nodes), all_members(nodes, blocks)
    log_prior, log_likelihood = page.log_prior_and_likelihood(adjacency, members)
    exact, generator = (log_prior + power * log_likelihood).softmax(0), torch.Generator().manual_seed(2)
    draws = members[torch.multinomial(exact, 20_000, replacement=True, generator=generator)]
    page.gibbs_sweep(adjacency, draws, power, generator)
    z, comparisons = largest_z(draws, exact)
    assert comparisons > 20 and z < limit(comparisons)


def test_mutation_sweeps_of_another_power_are_noticed(page, limit):
    adjacency, members = random_graph(6), all_members(6, 2)
    exact, generator = (
        sum(page.log_prior_and_likelihood(adjacency, members)).softmax(0),
        torch.Generator().manual_seed(2),
    )
    draws = members[torch.multinomial(exact, 20_000, replacement=True, generator=generator)]
    page.gibbs_sweep(adjacency, draws, 0.7, generator)
    z, comparisons = largest_z(draws, exact)
    assert z > 2 * limit(comparisons)


@pytest.mark.parametrize(("nodes", "blocks"), [(7, 2), (6, 3)])
def test_mean_weight_of_annealing_is_the_evidence(page, limit, nodes, blocks):
    adjacency = random_graph(nodes, seed=3)
    exact = sum(page.log_prior_and_likelihood(adjacency, all_members(nodes, blocks))).logsumexp(0)
    _, log_weights = page.anneal(adjacency, blocks, num_chains=4000, num_steps=10, seed=1)
    log_evidence, error, worth = page.evidence(log_weights)
    assert abs(math.exp(log_evidence - float(exact)) - 1) < limit() * error
    assert error < 0.05 and worth > 1000
