"""Permanents and distributions over permutations against lists of all permutations, Ryser's formula and draws."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.permutations import (
    GibbsPermutation,
    all_permutations,
    log_permanent,
    nearest_permutation,
    permutation_matrix,
    permutations,
)
from bayeskit.models.discrete.permutations import _distributions as permanent

INFINITY = math.inf


def sines():
    index = torch.arange(4, dtype=torch.float64)
    return torch.sin(1 + 3 * index.unsqueeze(1) + 2 * index)


def random_log_weights(*shape, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def listed_sum(log_weights):
    """Return the log permanent of one matrix as a sum over permutations, without the code under test."""
    size = len(log_weights)
    totals = [sum(log_weights[i, j] for i, j in enumerate(p)) for p in itertools.permutations(range(size))]
    return torch.stack(totals).logsumexp(0)


def ryser(log_weights):
    """Return the log permanent by inclusion and exclusion of columns."""
    weights, size = log_weights.exp(), len(log_weights)
    total = weights.new_zeros(())
    for count in range(1, size + 1):
        for columns in itertools.combinations(range(size), count):
            total += (-1) ** (size - count) * weights[:, list(columns)].sum(1).prod()
    return total.log()


def test_reference_values():
    matching = GibbsPermutation(sines())
    assert abs(float(matching.log_partition) - 4.141526) < 5e-7
    expected = torch.tensor([0.414272, 0.209771, 0.023609, 0.352348], dtype=torch.float64)
    torch.testing.assert_close(matching.marginals[0], expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_log_permanent_is_a_sum_over_permutations(size):
    log_weights = random_log_weights(3, size, size, seed=size)
    expected = torch.stack([listed_sum(one) for one in log_weights])
    torch.testing.assert_close(log_permanent(log_weights), expected, rtol=0, atol=1e-12)


def test_log_permanent_is_rysers():
    log_weights = random_log_weights(10, 10, scale=0.5)
    torch.testing.assert_close(log_permanent(log_weights), ryser(log_weights), rtol=0, atol=1e-10)


def test_twenty_rows_of_ones_and_of_far_scales():
    # Scaling a row or a column scales the permanent, here by factors that no double could hold.
    rows, columns = random_log_weights(2, 20, scale=500.0)
    total = log_permanent(rows.unsqueeze(1) + columns)
    expected = math.lgamma(21) + float(rows.sum() + columns.sum())
    assert abs(float(total) - expected) < 1e-9


def test_mutation_a_set_without_its_last_column_is_noticed(monkeypatch):
    original = permanent.column_sets
    monkeypatch.setattr(permanent, "column_sets", lambda size: [(c, s * 0, b) for c, s, b in original(size)])
    assert abs(float(log_permanent(sines())) - 4.141526) > 1e-3


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_probabilities_sum_to_one_and_marginals_are_theirs(batch):
    matching = GibbsPermutation(random_log_weights(*batch, 5, 5))
    listed = matching.enumerate_support()
    assert listed.shape == (120, *batch, 5)
    probabilities = matching.log_prob(listed).exp()
    torch.testing.assert_close(probabilities.sum(0), torch.ones(batch, dtype=torch.float64), rtol=0, atol=1e-12)
    marginals = (permutation_matrix(listed, torch.float64) * probabilities[..., None, None]).sum(0)
    torch.testing.assert_close(matching.marginals, marginals, rtol=0, atol=1e-12)
    entropy = -(probabilities * probabilities.log()).sum(0)
    torch.testing.assert_close(matching.entropy(), entropy, rtol=0, atol=1e-12)
    best = listed.gather(0, probabilities.argmax(0)[None, ..., None].expand(1, *batch, 5)).squeeze(0)
    assert torch.equal(matching.mode, best)


def test_marginals_are_differentiable():
    log_weights = random_log_weights(4, 4).requires_grad_()
    assert torch.autograd.gradgradcheck(log_permanent, log_weights)
    assert torch.autograd.gradcheck(lambda matrix: GibbsPermutation(matrix).marginals, log_weights)


def test_impossible_pairs():
    log_weights = sines()
    log_weights[0, 1:] = -INFINITY
    log_weights[2, 3] = -INFINITY
    log_weights.requires_grad_()
    matching = GibbsPermutation(log_weights)
    listed = matching.enumerate_support()
    allowed = (listed[:, 0] == 0) & (listed[:, 2] != 3)
    log_prob = matching.log_prob(listed).detach()
    assert torch.equal(log_prob > -INFINITY, allowed) and abs(float(log_prob.exp().sum()) - 1) < 1e-12
    marginals = (permutation_matrix(listed, torch.float64) * log_prob.exp()[:, None, None]).sum(0)
    torch.testing.assert_close(matching.marginals.detach(), marginals, rtol=0, atol=1e-12)
    expected = -(log_prob[allowed].exp() * log_prob[allowed]).sum()
    torch.testing.assert_close(matching.entropy().detach(), expected, rtol=0, atol=1e-12)
    with global_stream(new_generator(0)):
        draws = matching.sample((1000,))
    assert bool(((draws[:, 0] == 0) & (draws[:, 2] != 3)).all())


def distance_of_frequencies(matching, draws):
    """Return the chi-squared statistic of drawn permutations, in standard deviations from its mean."""
    listed = matching.enumerate_support()
    expected = matching.log_prob(listed).exp() * len(draws)
    found = (draws.unsqueeze(1) == listed).all(-1).sum(0)
    statistic = ((found - expected).square() / expected).sum()
    freedom = len(listed) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def test_draws_are_exact(limit):
    matching = GibbsPermutation(sines())
    with global_stream(new_generator(0)):
        draws = matching.sample((200_000,))
    # The quantile at the suite's failure rate: chi squared has heavier tails than the normal distribution.
    assert distance_of_frequencies(matching, draws) < (chi2.isf(1e-5, 23) - 23) / math.sqrt(46)
    uniform = GibbsPermutation(torch.zeros(4, 4, dtype=torch.float64))
    assert distance_of_frequencies(uniform, draws) > 1000
    batched = GibbsPermutation(random_log_weights(2, 3, 5, 5))
    with global_stream(new_generator(1)):
        draws = batched.sample((20_000,))
    assert draws.shape == (20_000, 2, 3, 5) and bool(permutations.check(draws).all())
    p = batched.marginals
    z = (permutation_matrix(draws, torch.float64).mean(0) - p) / (p * (1 - p) / len(draws)).sqrt()
    assert float(z.abs().max()) < limit(p.numel())


def test_mutation_draws_that_forget_the_rows_above_are_noticed(monkeypatch):
    matching = GibbsPermutation(sines())
    monkeypatch.setattr(GibbsPermutation, "_table", lambda self: torch.zeros(16, dtype=torch.float64))
    with global_stream(new_generator(0)):
        draws = matching.sample((200_000,))
    assert distance_of_frequencies(matching, draws) > 100


def test_expansion_and_weights():
    matching = GibbsPermutation(sines()).expand((3,))
    assert matching.log_prob(torch.arange(4)).shape == (3,)
    from_weights = GibbsPermutation.from_weights(sines().exp())
    torch.testing.assert_close(from_weights.log_partition, matching.log_partition[0], rtol=0, atol=1e-12)


def test_weights_may_change_in_place_and_be_trained():
    log_weights = random_log_weights(3, 3)
    matching = GibbsPermutation(log_weights)
    listed = matching.enumerate_support()
    before = matching.log_prob(listed).exp()
    log_weights[0, 0] += 2.0
    after = matching.log_prob(listed).exp()
    assert abs(float(after.sum()) - 1) < 1e-12 and float((after - before).abs().max()) > 0.05
    assert torch.equal(matching._sums[-1], matching._sums[-1]) and matching._sums is matching._sums
    log_weights = log_weights.requires_grad_()
    matching = GibbsPermutation(log_weights)
    optimizer = torch.optim.SGD([log_weights], 1.0)
    losses = []
    for _ in range(3):
        loss = -matching.log_prob(listed[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2] > 0
    assert abs(float(matching.log_prob(listed).detach().exp().sum()) - 1) < 1e-12


def test_data_of_any_library():
    weights = [[2, 0], [0, 1]]
    expected = GibbsPermutation(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    for given in (weights, np.array(weights), torch.tensor(weights)):
        matching = GibbsPermutation(given)
        assert abs(float(matching.log_partition - expected.log_partition)) < 1e-6
        assert abs(float(log_permanent(given) - expected.log_partition)) < 1e-6
        assert nearest_permutation(given).tolist() == [0, 1]
        assert float(matching.log_prob(torch.tensor([0, 1], dtype=torch.int32))) < 0
    assert permutation_matrix([1, 0]).tolist() == [[0, 1], [1, 0]]


def test_nearest_permutation_is_the_best_of_all():
    matrices = random_log_weights(4, 3, 6, 6)
    listed = all_permutations(6)
    totals = (matrices.unsqueeze(-3) * permutation_matrix(listed, torch.float64)).sum((-1, -2))
    assert torch.equal(nearest_permutation(matrices), listed[totals.argmax(-1)])


def test_bad_input_is_refused_with_counts():
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        log_permanent(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match="square"):
        GibbsPermutation(torch.zeros(3))
    with pytest.raises(DataError, match=r"2 of 9 weights are negative, the first at \(0, 1\): -1"):
        GibbsPermutation.from_weights(torch.tensor([[1.0, -1, 1], [1, 1, 1], [-2, 1, 1]]))
    with pytest.raises(DataError, match="1 of 9 entries of log_weights are NaN"):
        GibbsPermutation(torch.eye(3).masked_fill(torch.eye(3).cumsum(0).cumsum(1) == 3, math.nan))
    row = torch.zeros(2, 3, 3)
    row[1, 2] = -INFINITY
    with pytest.raises(DataError, match=r"-inf everywhere in 1 row\(s\), the first is row 2 of matrix \(1,\)"):
        GibbsPermutation(row)
    column = torch.zeros(3, 3)
    column[:, :2] = -INFINITY
    with pytest.raises(DataError, match=r"2 column\(s\), the first is column 0"):
        log_permanent(column)
    crowded = torch.zeros(3, 3)
    crowded[:2, 1:] = -INFINITY
    with pytest.raises(DataError, match="1 of 1 matrices of log_weights leave no permutation"):
        GibbsPermutation(crowded)
    with pytest.raises(DataError, match="1 of 2 vectors of permutation"):
        permutation_matrix(torch.tensor([[0, 1], [0, 0]]))
    with pytest.raises(ShapeError, match=r"values have shape \(1,\); give \(\*batch, 4\)"):
        GibbsPermutation(sines()).log_weight(torch.tensor([0]))
    with pytest.raises(DataError, match="no permutation"):
        nearest_permutation(crowded)
    with pytest.raises(SettingsError, match="2,097,152 sets"):
        log_permanent(torch.zeros(21, 21))
    with pytest.raises(SettingsError, match="3,628,800 permutations"):
        all_permutations(10)
    with pytest.raises(SettingsError, match="more than 10.19 permutations"):
        all_permutations(10**12)  # whose number of permutations nobody computes
    with pytest.raises(ShapeError, match="permutation is empty"):
        permutation_matrix([])
    with pytest.raises(ValueError, match="support|log_prob"):
        GibbsPermutation(sines(), validate_args=True).log_prob(torch.tensor([0, 0, 1, 2]))


def test_large_matrices_still_have_a_mode_and_log_weights():
    matching = GibbsPermutation(random_log_weights(40, 40))
    assert sorted(matching.mode.tolist()) == list(range(40))
    others = torch.rand(100, 40, generator=torch.Generator().manual_seed(0)).argsort(-1)
    assert bool((matching.log_weight(matching.mode) >= matching.log_weight(others)).all())
