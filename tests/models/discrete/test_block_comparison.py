"""Numbers of blocks compared with listed assignments; steps chosen by pilots; data and weights as users have them."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from bayeskit.errors import AccuracyWarning, DataError, SettingsError, UnknownNameError
from bayeskit.models.discrete import block_model as annealing
from bayeskit.models.discrete.block_model import (
    AnnealedEvidence,
    BlockComparison,
    StochasticBlockModel,
    annealed_evidence,
    co_assignment,
    compare_num_blocks,
    karate_club,
    plot_adjacency,
    plot_co_assignment,
)

TRIANGLES = torch.block_diag(*[1 - torch.eye(3, dtype=torch.float64)] * 2)


def exact_probabilities(sizes, chances):
    """Sum the probability of the graph over assignments one by one, by the Beta function of each pair of blocks."""
    found = []
    for size, chance in zip(sizes, chances, strict=True):
        total = 0.0
        for blocks in itertools.product(range(size), repeat=6):
            members = [blocks.count(block) for block in range(size)]
            log_joint = math.lgamma(size) - math.lgamma(size + 6) + sum(math.lgamma(count + 1) for count in members)
            for pair in itertools.combinations_with_replacement(range(size), 2):
                kinds = [
                    float(TRIANGLES[i, j])
                    for i, j in itertools.combinations(range(6), 2)
                    if tuple(sorted((blocks[i], blocks[j]))) == pair
                ]
                edges, gaps = kinds.count(1.0), kinds.count(0.0)
                log_joint += math.lgamma(edges + 1) + math.lgamma(gaps + 1) - math.lgamma(edges + gaps + 2)
            total += math.exp(log_joint)
        found.append(chance * total)
    return np.array(found) / sum(found)


def test_probabilities_of_numbers_are_those_of_listed_assignments(limit):
    sizes, chances = [1, 2, 3], {1: 2.0, 2: 1.0, 3: 1.0}
    comparison = compare_num_blocks(
        TRIANGLES, sizes, prior_probabilities=chances, num_chains=2000, num_steps=10, progress=False
    )
    exact = exact_probabilities(sizes, [0.5, 0.25, 0.25])
    p, error = np.array([comparison.posterior_probabilities[size] for size in sizes]).T
    assert 0 < error.max() < 0.02 and abs(p.sum() - 1) < 1e-12
    assert np.abs((p - exact) / error).max() < limit(3)
    assert np.abs((p - exact_probabilities(sizes, [1 / 3] * 3)) / error).max() > 2 * limit(3)
    table = comparison.to_pandas()
    assert list(table.num_blocks) == sizes and np.array_equal(table.posterior_probability, p)
    assert list(table.prior_probability) == [0.5, 0.25, 0.25] and table.reliable.all()
    assert comparison.log_bayes_factor(comparison.best) == (0.0, 0.0)
    assert comparison.log_bayes_factor(3, 1)[0] == comparison[3].log_evidence - comparison[1].log_evidence
    axes = comparison.plot(Figure().subplots())
    assert [bar.get_height() for bar in axes.patches] == p.tolist()
    assert repr(comparison).startswith("1 blocks: log evidence ") and repr(comparison).count("\n") == 2
    alone = compare_num_blocks(TRIANGLES, [3, 1], num_chains=2000, num_steps=10, progress=False)
    assert alone[3].log_evidence == comparison[3].log_evidence
    with pytest.raises(UnknownNameError, match="there are: 1, 2, 3"):
        comparison[4]


def test_errors_of_probabilities_are_their_spread():
    """A little more of one log evidence moves each probability by its derivative."""

    def probabilities(log_evidence):
        results = {
            size: AnnealedEvidence(z, e, torch.zeros(1, 2).long(), torch.zeros(1), 1)
            for size, z, e in zip((1, 2, 3), log_evidence, (0.1, 0.2, 0.05), strict=True)
        }
        return np.array(list(BlockComparison(results, {1: 0.2, 2: 0.3, 3: 0.5}).posterior_probabilities.values()))

    at, step = np.array([-3.0, -2.5, -4.0]), 1e-5
    slopes = [(probabilities(at + shift) - probabilities(at - shift))[:, 0] / (2 * step) for shift in step * np.eye(3)]
    expected = np.sqrt(np.array(slopes).T ** 2 @ np.array([0.1, 0.2, 0.05]) ** 2)
    assert np.abs(probabilities(at)[:, 1] - expected).max() < 1e-8


def test_pilots_choose_the_steps_and_take_no_part(limit, monkeypatch):
    runs, anneal = [], annealing._anneal

    def recorded(*args):
        runs.append(anneal(*args))
        return runs[-1]

    monkeypatch.setattr(annealing, "_anneal", recorded)
    monkeypatch.setattr(annealing, "_FIRST_PILOT", 1)
    model = StochasticBlockModel(karate_club().adjacency[:8, :8], 3)
    found = annealed_evidence(model, num_chains=100, progress=False)
    steps = [run.num_steps for run in runs]
    assert steps == [2**i for i in range(len(steps))] and len(steps) >= 2
    assert all(run.effective_sample_size < 50 for run in runs[:-2]) and runs[-2].effective_sample_size >= 50
    assert found is runs[-1]
    exact = float(model.enumerate().log_evidence)
    assert abs(math.exp(found.log_evidence - exact) - 1) < limit() * found.standard_error
    runs.clear()
    hard = StochasticBlockModel(karate_club().adjacency, 4)
    with pytest.warns(AccuracyWarning, match="raise num_steps above 7"):
        annealed_evidence(hard, num_chains=40, max_num_steps=7, progress=False)
    assert [run.num_steps for run in runs] == [1, 2, 7] or [run.num_steps for run in runs] == [1, 2, 4, 7]


def test_few_effective_chains_are_said_wherever_they_are_used():
    hard = StochasticBlockModel(karate_club().adjacency, 4)
    with pytest.warns(AccuracyWarning, match="the evidence or its error"):
        found = annealed_evidence(hard, num_chains=60, num_steps=2)
    assert not found.reliable and f"worth {found.effective_sample_size:.0f} chains" in repr(found)
    with pytest.warns(AccuracyWarning, match="probabilities to share a block; raise num_steps above 2"):
        together = found.co_assignment()
    assert torch.equal(together, co_assignment(found.assignments, found.weights))
    assert float(found.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    by_logarithms = co_assignment(found.assignments, log_weights=found.log_weights)
    torch.testing.assert_close(by_logarithms, together, rtol=0, atol=1e-12)
    with pytest.raises(DataError, match="given as log_weights"):
        co_assignment(found.assignments, found.log_weights)
    with pytest.raises(SettingsError, match="either"):
        co_assignment(found.assignments, found.weights, log_weights=found.log_weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        annealed_evidence(StochasticBlockModel(TRIANGLES, 1), num_chains=100, num_steps=2).co_assignment()


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.uint8, np.float64])
def test_adjacency_of_any_type(kind):
    graph = TRIANGLES.numpy().astype(kind)
    model = StochasticBlockModel(graph, 2)
    assert model.adjacency.is_floating_point()
    exact = float(StochasticBlockModel(TRIANGLES, 2).enumerate().log_evidence)
    assert abs(float(model.enumerate().log_evidence) - exact) < 1e-5
    assert repr(model) == "StochasticBlockModel(6 nodes, 6 edges, num_blocks=2)"
    assert "64 assignments of 6 nodes" in repr(model.enumerate())


def test_matrices_side_by_side_have_one_order():
    graph, assignments = karate_club().adjacency.numpy(), np.arange(34) % 3
    together = np.random.default_rng(0).random((34, 34))
    left, right = plot_adjacency(graph, assignments), plot_co_assignment(together, assignments)
    orders = [[label.get_text() for label in axes.get_xticklabels()] for axes in (left, right)]
    assert orders[0] == orders[1] == [str(node) for block in range(3) for node in range(block, 34, 3)]
    assert right.images[0].colorbar is not None and left.images[0].colorbar is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_blocks": [2]}, "at least two"),
        ({"num_blocks": 3}, "at least two"),
        ({"num_blocks": [1, 1]}, "each once"),
        ({"num_blocks": [0, 1]}, "num_blocks"),
        ({"num_blocks": [1, 2], "prior_probabilities": {1: 1.0}}, "each of"),
        ({"num_blocks": [1, 2], "prior_probabilities": {1: 0.0, 2: 0.0}}, "above zero"),
        ({"max_num_steps": 99}, "max_num_steps"),
    ],
)
def test_numbers_and_priors_are_checked(settings, said):
    with pytest.raises(SettingsError, match=said):
        compare_num_blocks(TRIANGLES, **settings)
