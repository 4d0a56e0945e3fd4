"""Gradients of the bounds against enumeration and finite differences; features and densities against definitions."""

import itertools

import pytest
import torch

from bayeskit.inference.objectives import IWAE, Linear, ReweightedWakeSleep
from bayeskit.models.phylogenetics import Alignment, SubsplitBayesianNetwork, all_topologies
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics.workflows._variational import (
    FlowLengths,
    LearningRates,
    LogNormalLengths,
)
from bayeskit.models.phylogenetics.workflows._variational import (
    _ascent as ascent,
)
from bayeskit.models.phylogenetics.workflows._variational import (
    _topology_features as topology_features,
)
from bayeskit.models.phylogenetics.workflows._variational._ascent import Training
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._length_families import Lengths
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget
from bayeskit.models.phylogenetics.workflows._variational._topology_features import Places

DOUBLE = torch.float64
FIVE = Alignment.from_sequences({"A": "CCTCATCG", "B": "CCTCATCT", "C": "CCAGTGAT", "D": "GCAGTGCC", "E": "CTCGR-CA"})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class UnitLengths:
    """Branch lengths that are all one, so that a weight depends on the topology only."""

    with_pairs = False

    def start(self, num_features, generator):
        return torch.zeros(0, dtype=DOUBLE)

    def rsample(self, parameters, features, generator):
        return Lengths(torch.ones(features.shape[:2], dtype=DOUBLE), torch.zeros(len(features), dtype=DOUBLE))

    def log_prob(self, parameters, features, lengths):
        return torch.zeros(len(features), dtype=DOUBLE)


TOPOLOGIES = all_topologies("ABCD")
LOG_JOINT = torch.tensor([0.3, -1.2, 1.5], dtype=DOUBLE)


def log_densities(topologies, lengths):
    match = (torch.from_numpy(topologies.children)[:, None] == torch.from_numpy(TOPOLOGIES.children)).flatten(2).all(2)
    return 0.25 * LOG_JOINT[match.int().argmax(1)], 0.75 * LOG_JOINT[match.int().argmax(1)]


def training(objective):
    network = SubsplitBayesianNetwork.from_topologies(TOPOLOGIES)
    logits = 0.7 * torch.randn(network.graph.num_options, dtype=DOUBLE, generator=generator(1))
    family = TreeFamily(SubsplitBayesianNetwork(network.graph, logits), UnitLengths())
    return Training(family, log_densities, objective, LearningRates(), Linear(1), 1)


def exact_gradient(algorithm):
    """The expectation over all combinations of topologies."""
    logits = algorithm.family.start(generator()).requires_grad_()
    log_q = algorithm.family.topologies(logits).log_prob(TOPOLOGIES)
    count = algorithm.objective.num_particles
    combinations = torch.tensor(list(itertools.product(range(3), repeat=count)))
    log_weight = (LOG_JOINT - log_q)[combinations]
    probability = log_q[combinations].sum(1).exp()
    if isinstance(algorithm.objective, ReweightedWakeSleep):
        wake = (log_weight.detach().softmax(1) * log_q[combinations]).sum(1)
        value = (probability.detach() * wake).sum()
    else:
        value = (probability * log_weight.logsumexp(1)).sum()
    return torch.autograd.grad(value, logits)[0]


def largest_z(algorithm, repeats=1200):
    stream, rows = generator(2), []
    leaf = algorithm.family.start(stream).requires_grad_()
    for _ in range(repeats):
        value, _ = algorithm.estimate(leaf, 1.0, stream)
        rows.append(torch.autograd.grad(value, leaf)[0])
    found = torch.stack(rows)
    exact = exact_gradient(algorithm)
    error = found.std(0) / repeats**0.5
    still = error < 1e-12
    assert (found.mean(0) - exact)[still].abs().max() < 1e-10
    return ((found.mean(0) - exact) / error)[~still].abs().max(), int((~still).sum())


@pytest.mark.calibration
@pytest.mark.parametrize("objective", [IWAE(3), ReweightedWakeSleep(3)], ids=["bound", "wake"])
def test_gradients_by_topologies_are_those_of_enumeration(objective, limit):
    z, comparisons = largest_z(training(objective))
    assert comparisons > 10 and z < limit(comparisons)


@pytest.mark.parametrize("sign", [0.0, -1.0], ids=["dropped", "turned"])
def test_a_score_term_dropped_or_turned_is_noticed(sign, limit, monkeypatch):
    original = ascent.importance_weighted_estimate
    monkeypatch.setattr(ascent, "importance_weighted_estimate", lambda weight, score: original(weight, sign * score))
    z, comparisons = largest_z(training(IWAE(3)), repeats=500)
    assert z > limit(comparisons)


def five(lengths):
    network = SubsplitBayesianNetwork.from_topologies(all_topologies(FIVE.taxa))
    family = TreeFamily(network, lengths)
    parameters = family.start(generator())
    parameters += 0.2 * torch.randn(len(parameters), dtype=DOUBLE, generator=generator(1))
    return family, parameters


FAMILIES = pytest.mark.parametrize(
    "lengths", [LogNormalLengths(), LogNormalLengths(with_pairs=False), FlowLengths()], ids=["pairs", "splits", "flow"]
)


def test_steps_are_those_of_adam_with_a_rate_for_each_group(monkeypatch):
    family, start = five(LogNormalLengths())
    rates = LearningRates(0.03, 0.01, factor=0.5, every=2)
    slopes = torch.randn(len(start), dtype=DOUBLE, generator=generator(7))

    def bound(parameters):
        return (slopes * parameters.sin()).sum()

    monkeypatch.setattr(Training, "estimate", lambda self, parameters, *_: (bound(parameters), slopes[0]))
    algorithm = Training(family, log_densities, IWAE(4), rates, Linear(1), 5)
    state = algorithm.start(generator())._replace(parameters=start)
    for iteration in range(5):
        state, _ = algorithm.advance(state, iteration, generator())
    groups = [
        part.clone().requires_grad_() for part in start.split([family.num_logits, len(start) - family.num_logits])
    ]
    optimizer = torch.optim.Adam([{"params": [group]} for group in groups], maximize=True)
    for iteration in range(5):
        for group, rate in zip(optimizer.param_groups, rates(iteration), strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        bound(torch.cat(groups)).backward()
        optimizer.step()
    torch.testing.assert_close(state.parameters, torch.cat(groups).detach(), rtol=1e-12, atol=1e-14)


@FAMILIES
def test_gradients_by_branch_lengths_are_finite_differences(lengths):
    family, parameters = five(lengths)
    target = TreeTarget(ForestLikelihood(FIVE), torch.distributions.Exponential(torch.tensor(10.0, dtype=DOUBLE)))
    algorithm = Training(family, target.log_densities, IWAE(4), LearningRates(), Linear(1), 1)
    direction = torch.randn(len(parameters), dtype=DOUBLE, generator=generator(5))
    direction[: family.num_logits] = 0.0
    leaf = parameters.clone().requires_grad_()
    value, _ = algorithm.estimate(leaf, 0.7, generator(6))
    slope = float(torch.autograd.grad(value, leaf)[0] @ direction)
    step = 2e-6
    ends = [float(algorithm.estimate(parameters + h * direction, 0.7, generator(6))[0]) for h in (step, -step)]
    # The differences err by step ** 2 and by rounding over step.
    assert abs(slope - (ends[0] - ends[1]) / (2 * step)) < 1e-6 * max(1.0, abs(slope))


@FAMILIES
def test_densities_of_draws_and_of_given_lengths_agree(lengths):
    family, parameters = five(lengths)
    drawn = family.draw(parameters, 7, generator(3))
    again = family.draw(parameters, 7, generator(3), reparameterized=False)
    assert torch.equal(drawn.lengths, again.lengths)
    assert (drawn.log_lengths - again.log_lengths).abs().max() < 1e-10
    assert (drawn.log_topology - family.topologies(parameters).log_prob(drawn.topologies)).abs().max() < 1e-12


def test_log_normal_densities():
    family, parameters = five(LogNormalLengths(location=-2.0, scale=0.5))
    drawn = family.draw(parameters, 7, generator(3))
    features = family.places.look_up(drawn.topologies).features
    table = torch.cat([parameters[family.num_logits :].reshape(-1, 2), torch.zeros(1, 2, dtype=DOUBLE)])
    sums = table[features].sum(2)
    by_torch = torch.distributions.LogNormal(sums[..., 0] - 2.0, 0.5 * sums[..., 1].exp()).log_prob(drawn.lengths)
    assert (by_torch.sum(1) - drawn.log_lengths).abs().max() < 1e-11


def test_a_flow_is_a_distribution(limit):
    """The density of one edge's length, which the flow bends, integrates to one over a fine grid of its logarithm."""
    lengths = FlowLengths()
    parameters = lengths.start(1, generator())
    parameters = parameters + 0.5 * torch.randn(len(parameters), dtype=DOUBLE, generator=generator(1))
    log_length = torch.linspace(-40.0, 40.0, 200_001, dtype=DOUBLE)
    features = torch.zeros(len(log_length), 1, 1, dtype=torch.int64)
    density = lengths.log_prob(parameters, features, log_length.exp()[:, None]) + log_length
    # Second derivatives jump at the knots of the spline, so that the sum errs by the square of the distance.
    assert abs(float(torch.trapezoid(density.exp(), log_length)) - 1) < 1e-6


def test_topologies_are_found_again_whatever_is_kept(monkeypatch):
    network = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCDE"))
    drawn = network.sample(40, seed=generator())
    kept = Places(network, with_pairs=True)
    kept.look_up(drawn[:20])
    monkeypatch.setattr(topology_features, "_MEMORY", 0)
    fresh = Places(network, with_pairs=True)
    fresh.look_up(drawn[30:])
    found, again = kept.look_up(drawn), fresh.look_up(drawn)
    assert torch.equal(found.features, again.features) and len(fresh._known) == len(drawn.distinct()[0])
    assert (network.log_prob_of_choices(again.choices) == network.log_prob(drawn)).all()
    assert (network.log_prob_of_choices(found.choices) == network.log_prob(drawn)).all()


def test_features_are_splits_and_how_their_sides_are_split_further():
    """Brute force: two edges share a feature where the sets of taxa are the same."""
    topologies = all_topologies("ABCDE")
    places = Places(SubsplitBayesianNetwork.from_topologies(topologies), with_pairs=True)
    features = places.look_up(topologies).features
    meanings, numbers = {}, {}
    for place in range(len(topologies)):
        neighbours = {node: [] for node in range(topologies.num_edges + 1)}
        for edge, parent in enumerate(topologies.parents[place].tolist()):
            neighbours[edge].append(parent)
            neighbours[parent].append(edge)

        def parts(node, away, neighbours=neighbours):
            return [side(other, node) for other in neighbours[node] if other != away]

        def side(node, away):
            return frozenset({node}).union(*parts(node, away)) & frozenset(range(5))

        for edge, parent in enumerate(topologies.parents[place].tolist()):
            # What lies below an edge is away from the first taxon.
            below, above = ((parent, edge), (edge, parent)) if edge == 0 else ((edge, parent), (parent, edge))
            split = frozenset(side(*end) for end in (below, above))
            for number, key in zip(
                features[place, edge].tolist(),
                [split, (split, frozenset(parts(*below))), (split, frozenset(parts(*above)))],
                strict=True,
            ):
                if isinstance(key, tuple) and not key[1]:
                    assert number == places.num_features
                    continue
                assert meanings.setdefault(number, key) == key and numbers.setdefault(key, number) == number
    # Fifteen splits; seven ways to split what is across from a tip, one and three those beside an internal edge.
    assert len(meanings) == places.num_features == 15 + 5 * 7 + 10 * (1 + 3)
