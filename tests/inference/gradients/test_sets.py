"""Draws without replacement: exact sums over all sets, and probabilities of the draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from bayeskit.inference import gradients
from bayeskit.inference.gradients import _without_replacement as ratios
from bayeskit.inference.gradients import _without_replacement as top_k
from bayeskit.inference.gradients import _without_replacement as without_replacement
from bayeskit.inference.gradients._space import space_of
from bayeskit.inference.gradients._without_replacement import (
    most_probable_codes,
    sample_outside,
    stochastic_beam_search,
)

DTYPE = torch.float64
LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.0, -1.2], dtype=DTYPE)
VALUES = torch.tensor([1.0, 3.0, -2.0, 0.5, 4.0], dtype=DTYPE)


def probability_of_order(p, order):
    found, waiting = 1.0, set(range(len(p)))
    for i in order:
        found *= p[i] / math.fsum(p[j] for j in waiting)  # a difference from one would lose small probabilities
        waiting.remove(i)
    return found


def probability_of_set(p, chosen):
    return sum(probability_of_order(p, order) for order in itertools.permutations(chosen))


def summed(estimator, logits, values, shift=0.0):
    """Return mean, expected gradient, and trace of its covariance, by a sum over all sets."""
    logits = logits.clone().requires_grad_(True)
    space, p = space_of(logits), logits.detach().softmax(-1).tolist()
    mean, gradient, square = 0.0, torch.zeros_like(values), 0.0
    for chosen in itertools.combinations(range(len(values)), estimator.k):
        weight = probability_of_set(p, chosen)
        drawn = estimator.weighted(space, torch.tensor(chosen).reshape(-1, 1))
        value = (drawn.weights * (values[list(chosen)] + shift)).sum()
        (found,) = torch.autograd.grad(value, logits, retain_graph=True)
        mean, gradient, square = (
            mean + weight * value.detach(),
            gradient + weight * found,
            square + weight * found @ found,
        )
    return mean, gradient, square - gradient @ gradient


@pytest.mark.parametrize("exact_size", [0, 10])
@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_sums_over_all_sets_are_exact(k, baseline, exact_size, scale, monkeypatch):
    monkeypatch.setattr(ratios, "EXACT_SIZE", exact_size)
    if baseline and k == 1:
        k = 2
    exact = gradients.Enumeration().estimate(scale * LOGITS, VALUES)
    _, gradient, _ = summed(gradients.UnorderedSet(k, baseline), scale * LOGITS, VALUES)
    assert float((gradient - exact).abs().max()) < 1e-12


def test_variances_are_those_of_the_reference():
    expected = torch.tensor([0.254616, 0.308132, -0.872636, 0.108774, 0.201114], dtype=DTYPE)
    found = {}
    for shift in (0.0, 10.0):
        for baseline in (False, True):
            mean, gradient, found[shift, baseline] = summed(gradients.UnorderedSet(2, baseline), LOGITS, VALUES, shift)
            assert abs(float(mean) - shift + 0.181116) < 1e-6
            assert float((gradient - expected).abs().max()) < 1e-6
    wanted = {(0.0, False): 0.6681, (0.0, True): 1.5723, (10.0, False): 25.2729, (10.0, True): 1.5723}
    for key, value in wanted.items():
        assert abs(float(found[key]) - value) < 6e-5


def test_a_ratio_of_another_set_is_seen(monkeypatch):
    original = ratios.log_leave_one_out_ratios
    monkeypatch.setattr(
        "bayeskit.inference.gradients._without_replacement.log_leave_one_out_ratios",
        lambda log_p, rest: original(log_p, rest - 0.05),
    )
    exact = gradients.Enumeration().estimate(LOGITS, VALUES)
    _, gradient, _ = summed(gradients.UnorderedSet(2), LOGITS, VALUES)
    assert float((gradient - exact).abs().max()) > 1e-4


@pytest.mark.parametrize("spread", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_both_ways_to_the_ratios_agree(k, spread):
    generator = torch.Generator().manual_seed(k)
    log_p = (spread * torch.randn(12, 4, generator=generator, dtype=DTYPE)).log_softmax(0)
    chosen, rest = log_p[:k], log_p[k:].logsumexp(0)
    sizes = (0, 1, 2)[: k + 1]
    for orders, integral in zip(
        ratios._by_orders(chosen, rest, sizes), ratios._by_quadrature(chosen, rest, sizes), strict=True
    ):
        torch.testing.assert_close(integral, orders, rtol=1e-13, atol=1e-11)


def test_many_improbable_members_keep_their_digits():
    # Members of probability e each of which the rest dwarfs: p(S) = k! e^k to first order.
    for k in (10, 60):
        log_p = torch.full((k,), -30.0, dtype=DTYPE)
        (found,) = ratios._by_quadrature(log_p, torch.zeros((), dtype=DTYPE), (0,))
        assert abs(float(found) - (math.lgamma(k + 1) - 30.0 * k)) < 1e-9


def test_draws_have_the_probabilities_of_orders(limit):
    count, k = 60_000, 3
    space = space_of(LOGITS.expand(count, 5))
    codes = stochastic_beam_search(space, k, torch.Generator().manual_seed(0)).codes[..., 0].T
    names = codes @ torch.tensor([25, 5, 1])
    check_frequencies(names, LOGITS.softmax(0).tolist(), k, lambda order: order @ torch.tensor([25, 5, 1]), limit)


def test_beams_of_sequences_have_the_probabilities_of_orders(limit):
    # Nine points, which beams see one variable at a time: one of three beginnings is given up.
    count, k = 60_000, 2

    def logits(codes):
        if not codes.shape[-1]:
            return torch.tensor([0.5, -0.2, 0.1], dtype=DTYPE).expand(*codes.shape[:-1], 3)
        return torch.tensor([[1.0, 0.0, -1.0], [-0.5, 0.5, 0.2], [0.0, 0.0, 0.0]], dtype=DTYPE)[codes[..., -1]]

    single = gradients.Autoregressive(logits, 2, 3)
    points = single.enumerate_support()
    p = single.log_prob(points).exp()
    space = gradients.Autoregressive(logits, 2, 3, (count,)).space()
    beam = stochastic_beam_search(space, k, torch.Generator().manual_seed(1))
    numbers = (beam.codes @ torch.tensor([3, 1])).T
    assert bool((beam.perturbed[0] >= beam.perturbed[1]).all())
    check_frequencies(numbers @ torch.tensor([9, 1]), p.tolist(), k, lambda order: order @ torch.tensor([9, 1]), limit)


def check_frequencies(names, p, k, name, limit):
    orders = [order for order in itertools.permutations(range(len(p)), k)]
    expected = {int(name(torch.tensor(order))): probability_of_order(p, order) for order in orders}
    seen, counts = names.unique(return_counts=True)
    observed = dict(zip(seen.tolist(), counts.tolist(), strict=True))
    assert set(observed) <= set(expected)
    likely = [key for key, value in expected.items() if value * len(names) > 10]
    rest = len(names) - sum(observed.get(key, 0) for key in likely)
    wanted = [expected[key] * len(names) for key in likely]
    statistic = sum((observed.get(key, 0) - mean) ** 2 / mean for key, mean in zip(likely, wanted, strict=True))
    left = len(names) - sum(wanted)
    statistic += (rest - left) ** 2 / max(left, 1.0)
    assert stats.chi2.sf(statistic, len(likely)) > 1e-5


def test_noise_that_forgets_its_maximum_is_seen(monkeypatch, limit):
    monkeypatch.setattr(without_replacement, "_given_maximum", lambda noisy, maximum: noisy)
    with pytest.raises(AssertionError):
        test_beams_of_sequences_have_the_probabilities_of_orders(limit)


def test_the_most_probable_are_found_and_the_others_drawn(limit):
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(6, generator=generator, dtype=DTYPE)
    bits = torch.distributions.Independent(torch.distributions.Bernoulli(logits=logits), 1)
    space = space_of(bits)
    everything = space.enumerate()
    p = space.log_prob(everything).exp()
    weights = 2 ** torch.arange(5, -1, -1)
    kept = most_probable_codes(space, 9)
    assert set((kept @ weights).tolist()) == set(p.topk(9).indices.tolist())
    drawn = sample_outside(space, kept, 50_000, torch.Generator().manual_seed(5)) @ weights
    left = p.clone()
    left[kept @ weights] = 0
    left /= left.sum()
    counts = torch.bincount(drawn, minlength=64)
    assert int(counts[left == 0].sum()) == 0
    often = left * len(drawn) > 10
    statistic = ((counts - left * len(drawn))[often] ** 2 / (left * len(drawn))[often]).sum()
    assert stats.chi2.sf(float(statistic), int(often.sum()) - 1) > 1e-5


def test_single_precision_keeps_the_rest():
    logits = torch.tensor([16.0, 15.0, 0.0, -0.5, 0.3])
    single = gradients.UnorderedSet(2).weighted(space_of(logits), torch.tensor([[0], [1]])).weights
    double = gradients.UnorderedSet(2).weighted(space_of(logits.double()), torch.tensor([[0], [1]])).weights
    torch.testing.assert_close(single.double(), double, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("lost", [0.0, 1e-3])
def test_top_k_summed_over_all_draws_is_exact(k, scale, lost, monkeypatch):
    logits = (scale * LOGITS).requires_grad_(True)
    space = space_of(logits)
    p = logits.detach().softmax(-1)
    kept = set(p.topk(k).indices.tolist())
    outside = [v for v in range(5) if v not in kept]
    rest = p[outside].sum()
    gradient = torch.zeros_like(VALUES)
    for v in outside:
        monkeypatch.setattr(top_k, "sample_outside", lambda *arguments, v=v: torch.tensor([[v]]))
        values, weights, _ = gradients.RaoBlackwell(k).points(space)
        (found,) = torch.autograd.grad((weights * VALUES[values]).sum(), logits, retain_graph=True)
        gradient += (1 - lost) * p[v] / rest * found
    exact = gradients.Enumeration().estimate(logits.detach(), VALUES)
    # A draw that is forgotten now and again is seen as soon as what is left over weighs enough.
    wrong = (gradient - exact).abs().max()
    assert (wrong < 1e-12) if not lost else (wrong > 1e-5 * rest)


@pytest.mark.parametrize(
    "estimator",
    [
        gradients.UnorderedSet(4),
        gradients.UnorderedSet(4, baseline=True),
        gradients.ImportanceWithoutReplacement(4),
        gradients.ImportanceWithoutReplacement(4, normalised=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("num_variables", [60, 400])
def test_codes_too_improbable_for_a_number(estimator, num_variables):
    """Probabilities of 1e-60 and 1e-400 in single precision: weights are like those of few variables."""
    logits = torch.zeros(8, num_variables, 10, requires_grad=True)
    q = torch.distributions.Independent(torch.distributions.OneHotCategorical(logits=logits), 1)
    drawn = estimator.points(space_of(q), torch.Generator().manual_seed(0))
    assert bool((drawn.weights > 0).all())
    # Unnormalised importance weights of k draws are near a gamma variable of mean one and variance 1 / (k - 1).
    slack = 20.0 if estimator == gradients.ImportanceWithoutReplacement(4) else 1e-3
    assert float((drawn.weights.detach().sum(0) - 1).abs().max()) < slack
    assert len(drawn.values.detach().flatten(1).unique(dim=0)) == len(drawn.values)
    (gradient,) = torch.autograd.grad((drawn.weights * drawn.values[..., 0].sum(-1)).sum(), logits)
    assert bool(gradient.isfinite().all()) and bool((gradient != 0).any())


@pytest.mark.calibration
def test_draws_outside_of_improbable_points_are_different_from_these():
    space = space_of(torch.distributions.Independent(torch.distributions.Bernoulli(torch.full((1200,), 0.5)), 1))
    kept = torch.zeros(3, 1200, dtype=torch.int64)
    kept[1, -1], kept[2, -2] = 1, 1
    codes = sample_outside(space, kept, 500, torch.Generator().manual_seed(0))
    assert abs(float(codes.double().mean()) - 0.5) < 5 * 0.5 / (500 * 1200) ** 0.5
    drawn = gradients.RaoBlackwell(3, 2).points(space, torch.Generator().manual_seed(0))
    assert float((drawn.weights.sum(0) - 1).abs().max()) < 1e-6
