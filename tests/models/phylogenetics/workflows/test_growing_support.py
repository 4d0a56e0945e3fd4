"""A support that is searched for and grows: neighbours, scores, graphs, what is carried over, and the evidence."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from tree_quadrature import log_evidence

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.objectives import Linear
from bayeskit.models.phylogenetics import (
    Alignment,
    ForestLikelihood,
    SubsplitBayesianNetwork,
    TreeSample,
    all_topologies,
    robinson_foulds,
)
from bayeskit.models.phylogenetics.workflows import (
    FlowLengths,
    LearningRates,
    LogNormalLengths,
    SupportGrowth,
    variational_inference,
)
from bayeskit.models.phylogenetics.workflows._growing_support import (
    ScoredTrees,
    joined_graphs,
    nearest_neighbours,
    options_in,
    starting_topologies,
    with_new_options,
)
from bayeskit.models.phylogenetics.workflows._variational._ascent import Training, TrainingState
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._rounds import carried
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget

DOUBLE = torch.float64
FOUR = Alignment.from_sequences(
    {"A": "GTCATTATCCCGATAAAAAA", "B": "CTCATTTTCCCGAGGAAAGT", "C": "ATCACTTTCTCGGTGAAAGC", "D": "TTCATTCTRTCG-GCAAAGG"}
)
SIX = all_topologies("ABCDEF")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_neighbours_differ_in_one_split_and_keep_the_lengths_of_the_others():
    chosen = SIX[[0, 40, 104]]
    lengths = torch.rand(3, 9, generator=generator(), dtype=DOUBLE)
    found, moved = nearest_neighbours(chosen, lengths)
    assert len(found) == 3 * 2 * 3
    distance = robinson_foulds(chosen, SIX)
    everything = np.uint64(63)
    met = []
    for place in range(len(found)):
        near = robinson_foulds(found[place], chosen)[0]
        origin = [at for at in range(3) if near[at] == 2]
        rows = {row.tobytes() for row in found[place].children}
        met.append(rows)
        new = dict(zip(found.below[place, :, 0].tolist(), moved[place].tolist(), strict=True))
        matches = []
        for at in origin:
            old = dict(zip(chosen.below[at, :, 0].tolist(), lengths[at].tolist(), strict=True))
            shared = [key for key in new if key in old]
            matches.append(len(shared) == 8 and all(new[key] == old[key] for key in shared))
            assert all(key in old or int(everything) - key not in old for key in new)
        assert any(matches)
    expected = {SIX.children[j].tobytes() for j in range(len(SIX)) if (distance[:, j] == 2).any()}
    assert {row for rows in met for row in rows} == expected


def test_neighbour_joining_finds_a_clear_tree():
    # Splits AB, CD, EF have three sites each, the split of AB from the others has three more.
    sites = {"A": "AAAAAAAAAAAA", "B": "AAAAAAAAAAAA", "C": "CCCAAACCCAAA", "D": "CCCAAACCCAAA", "E": "CCCAAAAAACCC"}
    sequences = {taxon: text + "ACGT" * 30 for taxon, text in (sites | {"F": sites["E"]}).items()}
    alignment = Alignment.from_sequences(sequences)
    found = starting_topologies(alignment, 30, seed=0)
    assert 1 < len(found) <= 31 and found.to_newick(0) == "(A,B,((C,D),(E,F)));"


def log_density(topologies, lengths):
    target = TreeTarget(ForestLikelihood(FOUR), dist.Exponential(torch.tensor(10.0, dtype=DOUBLE)))
    return sum(target.log_densities(topologies, lengths))


def test_scores_are_maxima_over_the_logarithms():
    trees = ScoredTrees(log_density, FOUR.taxa)
    trees.add(all_topologies(FOUR.taxa)[:1])
    trees.expand(0.1, 10)
    assert len(trees.scores) == 3
    position = trees.lengths.log().requires_grad_()
    optimiser = torch.optim.LBFGS([position], max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def loss():
        optimiser.zero_grad()
        value = -(log_density(trees.topologies, position.exp()) + position.sum(-1)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    best = (log_density(trees.topologies, position.exp()) + position.sum(-1)).detach()
    # The climb stops after a fixed number of steps.
    assert (best - trees.scores).abs().max() < 0.05
    known = trees.scores.clone()
    trees.add(all_topologies(FOUR.taxa))
    assert torch.equal(trees.scores, known)
    assert trees.probable(0.5).tolist() in ([], [int(trees.scores.argmax())])


def graph_arrays(graph):
    return [graph.clades, graph.group_clade, graph.group_sister, graph.starts, graph.parts]


def test_joined_graphs_are_those_of_all_topologies():
    one, other = (SubsplitBayesianNetwork.from_topologies(SIX[rows]).graph for rows in ([3, 50, 77], [9, 50, 101]))
    both = SubsplitBayesianNetwork.from_topologies(SIX[[3, 50, 77, 9, 101]]).graph
    joined = joined_graphs(one, other)
    assert all(np.array_equal(a, b) for a, b in zip(graph_arrays(joined), graph_arrays(both), strict=True))
    place = options_in(joined, one)
    assert (
        len(set(place.tolist())) == one.num_options and (options_in(one, joined)[place] == np.arange(len(place))).all()
    )
    assert (options_in(one, other) == one.missing).any()


def test_new_options_start_at_the_implied_conditional_probability():
    old = SubsplitBayesianNetwork.fit(TreeSample.from_topologies(SIX[[3, 50]], [0.7, 0.3]))
    outside = SIX[[9]]
    grown = with_new_options(old, outside, np.array([0.2]))
    assert old.log_prob(outside).isneginf().all()
    assert 0.2 / 4 < float(grown.log_prob(outside).exp()) < 0.2 * 4
    # The ratio of old options within a group stays.
    place = options_in(grown.graph, old.graph)
    moved = grown.log_probabilities[place] - old.log_probabilities
    groups = old.graph.group_of
    assert max(np.ptp(moved[groups == group]) for group in range(old.graph.num_groups)) < 1e-12
    total = grown.log_prob(SIX).exp().sum()
    assert abs(float(total) - 1) < 1e-12


@pytest.mark.parametrize("lengths", [LogNormalLengths(), LogNormalLengths(False), FlowLengths(hidden=4)])
def test_branch_lengths_and_averages_are_carried_over(lengths):
    topologies = SIX[[3, 50]]
    old = TreeFamily(SubsplitBayesianNetwork.from_topologies(topologies), lengths)
    parameters, first, second = (torch.randn_like(old.start(generator())) for _ in range(3))
    state = TrainingState(parameters, first, second.square(), torch.tensor(7.0, dtype=DOUBLE))
    network = old.topologies(parameters)
    new = TreeFamily(with_new_options(network, SIX[[9]], np.array([0.1])), lengths)
    after = carried(state, old, new)
    value = torch.rand(2, 9, generator=generator(), dtype=DOUBLE)
    densities = [
        lengths.log_prob(vector[family.num_logits :], family.places.look_up(topologies).features, value)
        for family, vector in ((old, parameters), (new, after.parameters))
    ]
    assert torch.equal(*densities)
    for before, now in ((first, after.first), (second.square(), after.second)):
        assert now.sort().values[now.sort().values != 0].tolist() == before.sort().values.tolist()
    assert after.position == 7.0


@pytest.fixture(scope="module")
def truth():
    return float(log_evidence(FOUR, all_topologies(FOUR.taxa)).logsumexp(0)) - math.log(3)


def fitted(support=None, **settings):
    rates = LearningRates(0.03, 0.03, factor=0.5, every=50)
    settings = {"num_steps": 120, "learning_rates": rates, "annealing": Linear(40, start=0.01)} | settings
    return variational_inference(FOUR, support, progress=False, **settings)


class Found:
    """What a search returns."""

    sample = TreeSample.from_topologies(all_topologies(FOUR.taxa)[:1])


GROWTH = SupportGrowth(rounds=2, until=0.3, mass=1e-3)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("support", "growth"),
    [(None, None), (Found(), GROWTH), (lambda alignment: all_topologies(alignment.taxa)[1:2], GROWTH)],
    ids=["searched", "grown from a search", "grown from a function"],
)
def test_the_evidence_of_a_support_that_was_not_given(support, growth, truth, limit):
    posterior = fitted(support, growth=growth)
    assert posterior.topologies.log_prob(all_topologies(FOUR.taxa)).isfinite().all()
    found = posterior.log_evidence(2000)
    assert found.trusted and abs(found.log_evidence - truth) < limit() * found.standard_error
    assert len(posterior.bounds) == 120 and posterior.positions.tolist() == list(range(120))


@pytest.mark.calibration
def test_a_grown_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    settings = {"growth": GROWTH, "num_steps": 30}
    whole = fitted(Found(), **settings)
    ending = Training.ending
    # Killed in the first part, in the second, after growth, and in the last.
    for last in (2, 7, 9, 20):
        monkeypatch.setattr(
            Training,
            "ending",
            lambda self, state, iteration, records, last=last: (
                "interrupted" if iteration + self.taken >= last else ending(self, state, iteration, records)
            ),
        )
        with pytest.warns(match="interrupted"):
            part = fitted(Found(), **settings, checkpoint=tmp_path / "run")
        assert len(part.bounds) == last
    monkeypatch.undo()
    again = fitted(Found(), **settings, checkpoint=tmp_path / "run")
    assert torch.equal(again.parameters, whole.parameters) and torch.equal(again.bounds, whole.bounds)
    for other in ({"num_steps": 40}, {"growth": SupportGrowth(rounds=2, until=0.3)}):
        with pytest.raises(CheckpointError, match=next(iter(other))):
            fitted(Found(), **(settings | other), checkpoint=tmp_path / "run")


def test_growth_that_is_not_possible():
    for settings in ({"until": 0.0}, {"mass": 2.0}, {"rounds": -1}, {"max_expanded": 0}):
        with pytest.raises(SettingsError, match=next(iter(settings))):
            SupportGrowth(**settings)
    with pytest.raises(SettingsError, match="growth"):
        fitted(Found(), growth=3)
