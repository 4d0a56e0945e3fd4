"""Change points against published numbers, predictive densities, and the enumeration of all segmentations."""

import itertools
import math

import pytest
import torch
from scipy import stats

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.sequences import (
    ChangePoints,
    LogSum,
    NegativeBinomialLengths,
    NormalSegments,
    NumberOfChanges,
    PoissonSegments,
    load_nile,
    plot_change_points,
)
from bayeskit.models.discrete.sequences import (
    _change_points as change_points,
)
from bayeskit.models.discrete.sequences import _change_points as conjugate_segments
from bayeskit.models.discrete.sequences._segmentations import prefix_sums

NORMAL = NormalSegments(mean=0.5, precision=0.3, shape=2.0, rate=1.5)
POISSON = PoissonSegments(shape=1.5, rate=0.4)


def series(n=7, seed=0):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + 2.0 * (torch.arange(n) > n // 2)


def nile(prior):
    return ChangePoints(load_nile().values, NormalSegments(1000.0, 0.01, 2.0, 20_000.0), prior)


def test_one_change_of_the_nile_has_the_published_evidence_and_place():
    none, one = nile(NumberOfChanges.exactly(0)), nile(NumberOfChanges.exactly(1))
    assert abs(float(none.log_evidence) + 661.5642) < 5e-5
    assert abs(float(one.log_evidence) + 641.4766) < 5e-5
    assert abs(float(one.log_evidence - none.log_evidence) - 20.0875) < 5e-5
    places = one.place_probabilities()
    assert int(load_nile().times[places.argmax()]) == 1898
    assert abs(float(places.max()) - 0.7719) < 5e-5 and abs(float(places.sum()) - 1) < 1e-12
    assert load_nile().times[:-1][one.most_probable()].tolist() == [1898]


class ForgetsTheWays(NumberOfChanges):
    """Give each set of places the probability of their number."""

    def number_weights(self, totals):
        return super().number_weights(totals) + totals


def test_mutation_a_prior_that_forgets_how_many_places_there_are_misses_the_evidence():
    found = nile(ForgetsTheWays.exactly(1)).log_evidence
    assert abs(float(found) + 641.4766 - math.log(99)) < 5e-5


def test_normal_marginals_are_products_of_predictive_densities():
    x = series(6) + 3.0
    found = NORMAL.log_marginals(x, 6)
    for end, length in itertools.combinations_with_replacement(range(1, 7), 2):
        start, end = end - 1, length
        mean, precision, shape, rate, total = 0.5, 0.3, 2.0, 1.5, 0.0
        for y in x[start:end].tolist():
            scale = math.sqrt(rate * (precision + 1) / (shape * precision))
            total += stats.t.logpdf(y, 2 * shape, mean, scale)
            rate += 0.5 * precision * (y - mean) ** 2 / (precision + 1)
            mean, precision, shape = (precision * mean + y) / (precision + 1), precision + 1, shape + 0.5
        assert abs(float(found[end - 1, end - start - 1]) - total) < 1e-12
        assert abs(float(NORMAL.levels(x, 6)[end - 1, end - start - 1]) - mean) < 1e-12


def test_poisson_marginals_are_products_of_predictive_densities():
    x = torch.tensor([3, 0, 1, 7, 2])
    found = POISSON.log_marginals(x, 5)
    for start, end in itertools.combinations(range(6), 2):
        shape, rate, total = 1.5, 0.4, 0.0
        for y in x[start:end].tolist():
            total += stats.nbinom.logpmf(y, shape, rate / (rate + 1))
            shape, rate = shape + y, rate + 1
        assert abs(float(found[end - 1, end - start - 1]) - total) < 1e-12
        assert abs(float(POISSON.levels(x, 5)[end - 1, end - start - 1]) - shape / rate) < 1e-12


def test_marginals_of_data_far_from_zero_keep_their_digits():
    x, far = series(50), 1e6
    near = NORMAL.log_marginals(x, 50).tril()
    moved = NormalSegments(0.5 + far, 0.3, 2.0, 1.5).log_marginals(x + far, 50).tril()
    torch.testing.assert_close(moved, near, rtol=0, atol=1e-6)


def odd_series(kind, dtype):
    x = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "step":
        x[30:] += 1000
    else:
        x[0] = -9999.0 if kind == "outlier" else 1e8
    return x.to(dtype)


WIDE = NormalSegments(mean=0.0, precision=0.1, shape=2.0, rate=1.0)


def error_of_normal_marginals(x):
    """Compare some segments with sums of squares about their own means, data as they are; relative where large."""
    found, worst = WIDE.log_marginals(x, len(x)), 0.0
    for end in range(0, len(x), 7):
        for length in range(1, end + 2):
            part = x[end + 1 - length : end + 1].double()
            rate = 1.0 + 0.5 * float((part - part.mean()).square().sum())
            rate += 0.5 * 0.1 * length / (0.1 + length) * float(part.mean()) ** 2
            exact = math.lgamma(2 + length / 2) - (2 + length / 2) * math.log(rate)
            exact += 0.5 * math.log(0.1 / (0.1 + length)) - 0.5 * length * math.log(2 * math.pi)
            worst = max(worst, abs(float(found[end, length - 1]) - exact) / max(1.0, abs(exact)))
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["step", "outlier", "far"])
def test_normal_marginals_keep_their_digits_beside_a_step_and_an_outlier(kind, dtype):
    # Half a unit of the last place of what is returned; in double precision a few roundings on the way.
    assert error_of_normal_marginals(odd_series(kind, dtype)) < (1e-7 if dtype == torch.float32 else 1e-13)


def test_mutation_differences_of_running_sums_lose_the_digits(monkeypatch):
    def differences(x, max_length):
        start = (torch.arange(1, len(x) + 1).unsqueeze(1) - torch.arange(1, max_length + 1)).clamp_min(0)
        count = torch.arange(1, max_length + 1).to(x)

        def sums(values):
            running = torch.cat([values.new_zeros(1), values.cumsum(0)])
            return running[1:].unsqueeze(1) - running[start]

        return count, sums(x) / count, (sums(x.square()) - sums(x).square() / count).clamp_min(0)

    monkeypatch.setattr(conjugate_segments, "_moments", differences)
    assert error_of_normal_marginals(odd_series("outlier", torch.float32)) > 1e-3
    assert error_of_normal_marginals(odd_series("far", torch.float64)) > 1e-3


@pytest.mark.parametrize("kind", ["step", "outlier"])
def test_single_precision_finds_the_same_changes(kind):
    double, single = (
        ChangePoints(odd_series(kind, dtype), WIDE, NumberOfChanges.up_to(3))
        for dtype in (torch.float64, torch.float32)
    )
    # Log marginals of some 300 are rounded to 1.5e-5 each, and at most four are added up.
    torch.testing.assert_close(single.number_probabilities.double(), double.number_probabilities, rtol=0, atol=6e-5)
    torch.testing.assert_close(single.place_probabilities().double(), double.place_probabilities(), rtol=0, atol=6e-5)


def test_levels_keep_their_digits_beside_an_outlier():
    x = torch.tensor([1e15, -0.3, 0.1, 0.2, -0.1], dtype=torch.float64)
    logs, levels = WIDE.log_marginals(x, 5), WIDE.levels(x, 5)
    share = torch.stack([logs[end, end] + logs[4, 3 - end] for end in range(4)]).softmax(0)
    # With the change after the first datum the others have a level of their own; else they share it with the first.
    exact = share[0] * levels[4, 3] + (share * levels.diagonal()[:4])[1:].sum()
    found = ChangePoints(x, WIDE, NumberOfChanges.exactly(1)).levels()
    assert abs(float(found[1] - exact)) < 1e-12 and abs(float(levels[4, 3]) + 0.1 / 4.1) < 1e-15


def test_poisson_marginals_in_single_precision():
    x = torch.poisson(torch.full((150,), 1000.0), generator=torch.Generator().manual_seed(0))
    single, double = (PoissonSegments(1.0, 0.001).log_marginals(y, 150).tril() for y in (x, x.double()))
    torch.testing.assert_close(single.double(), double, rtol=1e-7, atol=0)
    x[0] = 1e7  # what other segments hold is no matter
    with_outlier = PoissonSegments(1.0, 0.001).log_marginals(x.double(), 150)
    torch.testing.assert_close(with_outlier[1:, 0], double[1:, 0], rtol=0, atol=1e-12)


def test_marginals_that_would_begin_before_the_data_are_not_read():
    class Unread(NormalSegments):
        def log_marginals(self, x, max_length):
            right = super().log_marginals(x, max_length)
            return torch.where(torch.ones_like(right).tril() > 0, right, math.nan)

    found, right = (
        ChangePoints(series(), kind(0.5, 0.3, 2.0, 1.5), NumberOfChanges.up_to(2)) for kind in (Unread, NormalSegments)
    )
    assert torch.equal(found.log_evidence, right.log_evidence)
    assert torch.equal(found.levels(), right.levels()) and torch.equal(found.most_probable(), right.most_probable())


def test_numbers_without_room_are_left_out():
    found = ChangePoints(series(8), NORMAL, NumberOfChanges.up_to(2), max_length=4)
    right = ChangePoints(series(8), NORMAL, NumberOfChanges((0.0, 0.5, 0.5)), max_length=4)
    torch.testing.assert_close(found.log_evidence, right.log_evidence, rtol=0, atol=1e-13)
    assert float(found.number_probabilities[0]) == 0.0 and bool(found.log_evidence_by_number[0].isnan())


def sets_of_places(n):
    """Return all sets of change points, ``(2**(n - 1), n - 1)``, each with its segments (last place, length)."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=n - 1)))
    pieces = []
    for mask in masks:
        cuts = [0, *(mask.nonzero().flatten() + 1).tolist(), n]
        pieces.append([(b - 1, b - a - 1) for a, b in itertools.pairwise(cuts)])
    return masks, pieces


def prior_by_enumeration(prior, n, shortest, longest):
    """Return the prior probability of each set of places."""
    masks, pieces = sets_of_places(n)
    fits = torch.tensor([all(shortest <= length + 1 <= longest for _, length in p) for p in pieces])
    number = masks.sum(1)
    if isinstance(prior, NumberOfChanges):
        probabilities = torch.zeros(n, dtype=torch.float64)
        probabilities[: len(prior.probabilities)] = torch.tensor(prior.probabilities, dtype=torch.float64)
        ways = (number[fits][:, None] == torch.arange(n)).sum(0)
        weights = fits * (probabilities / ways)[number]
    else:
        lengths = stats.nbinom(prior.successes, prior.probability, loc=prior.successes)
        most = n if prior.most is None else prior.most
        weights = torch.tensor(
            [math.prod(lengths.pmf(k + 1) for _, k in p[:-1]) * lengths.sf(p[-1][1]) for p in pieces],
            dtype=torch.float64,
        )
        weights = weights * fits * (number <= most)
    return weights / weights.nansum()


def largest_error(prior, x, model, shortest=1, longest=None):
    """Compare every answer with the enumeration of all sets of places."""
    n = len(x)
    masks, pieces = sets_of_places(n)
    posterior = ChangePoints(x, model, prior, min_length=shortest, max_length=longest)
    marginals, levels = model.log_marginals(x, n), model.levels(x, n)
    likelihood = torch.stack([sum(marginals[place] for place in p) for p in pieces])
    weights = prior_by_enumeration(prior, n, shortest, longest or n).nan_to_num()
    joint = weights.log() + likelihood
    share = joint.softmax(0)
    mean = torch.stack([torch.cat([levels[place].expand(place[1] + 1) for place in p]) for p in pieces])
    errors = [
        posterior.log_evidence - joint.logsumexp(0),
        posterior.place_probabilities() - (share[:, None] * masks).sum(0),
        posterior.levels() - (share[:, None] * mean).sum(0),
        joint[(masks == posterior.most_probable()).all(1)] - joint.max(),
    ]
    for number, found in enumerate(posterior.number_probabilities):
        of_number = masks.sum(1) == number
        errors.append(found - share[of_number].sum())
        if bool(weights[of_number].sum() > 0):
            conditional = (weights[of_number] / weights[of_number].sum()).log() + likelihood[of_number]
            errors.append(posterior.log_evidence_by_number[number] - conditional.logsumexp(0))
    return max(float(error.abs().max()) for error in errors)


CASES = [
    (NumberOfChanges((0.2, 0.5, 0.1, 0.2)), 1, None),
    (NumberOfChanges((0.3, 0.0, 0.7)), 2, 4),
    (NegativeBinomialLengths(0.3), 1, None),
    (NegativeBinomialLengths(0.4, successes=2), 1, None),
    (NegativeBinomialLengths(0.4, successes=2, most=2), 2, 5),
]


@pytest.mark.parametrize(("prior", "shortest", "longest"), CASES, ids=str)
def test_every_answer_is_that_of_enumeration(prior, shortest, longest):
    if isinstance(prior, NumberOfChanges) and longest:
        prior = NumberOfChanges((0.0, *prior.probabilities[1:]))  # seven data do not fit into one segment
    assert largest_error(prior, series(), NORMAL, shortest, longest) < 1e-12
    assert largest_error(prior, torch.tensor([0.0, 1, 0, 5, 9, 4, 7]).double(), POISSON, shortest, longest) < 1e-12


def test_mutation_enumeration_notices_a_last_segment_that_must_not_be_cut_off(monkeypatch):
    right = NegativeBinomialLengths.segment_weights

    def not_cut_off(self, n, max_length):
        weights = right(self, n, max_length)
        weights[-1] = weights[0]
        return weights

    monkeypatch.setattr(NegativeBinomialLengths, "segment_weights", not_cut_off)
    assert largest_error(NegativeBinomialLengths(0.4, successes=2), series(), NORMAL) > 1e-3


def test_mutation_enumeration_notices_a_broken_sum(monkeypatch):
    class BestOnly(change_points.LogSum):
        def sum(self, elements, dim):
            return elements.amax(dim)

    monkeypatch.setattr(change_points, "LogSum", BestOnly)
    assert largest_error(NumberOfChanges.up_to(3), series(), NORMAL) > 1e-3


def test_probabilities_of_segments_are_the_gradient_of_the_log_evidence():
    prior, probability = NegativeBinomialLengths(0.1, successes=2), ChangePoints.segment_probabilities
    marginals = NORMAL.log_marginals(series(12), 12).requires_grad_()
    weights = prior.segment_weights(12, 12) + marginals
    gradient = torch.autograd.grad(prefix_sums(LogSum(), weights)[-1], marginals)[0]
    found = probability(ChangePoints(series(12), NORMAL, prior))
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("successes", [1, 2, 4])
def test_lengths_cut_off_by_the_end_are_a_distribution(successes):
    weights = NegativeBinomialLengths(0.3, successes).segment_weights(30, 30)
    assert abs(float(prefix_sums(LogSum(), weights)[-1])) < 1e-13


def test_geometric_lengths_are_independent_changes():
    x, probability = series(9), 0.2
    binomial = NumberOfChanges(tuple(stats.binom.pmf(range(9), 8, probability)))
    pair = [ChangePoints(x, NORMAL, prior) for prior in (binomial, NegativeBinomialLengths(probability))]
    torch.testing.assert_close(pair[0].log_evidence, pair[1].log_evidence, rtol=0, atol=1e-12)
    torch.testing.assert_close(pair[0].segment_probabilities(), pair[1].segment_probabilities(), rtol=0, atol=1e-12)


def test_draws_have_the_right_frequencies(limit):
    x, number = series(5), 20_000
    posterior = ChangePoints(x, NORMAL, NumberOfChanges.up_to(3))
    draws = posterior.sample(number, seed=0)
    masks, pieces = sets_of_places(5)
    marginals = NORMAL.log_marginals(x, 5)
    likelihood = torch.stack([sum(marginals[place] for place in p) for p in pieces])
    exact = (prior_by_enumeration(NumberOfChanges.up_to(3), 5, 1, 5).log() + likelihood).softmax(0)
    found = (draws[:, None] == masks).all(-1).double().mean(0)
    assert bool((found[exact == 0] == 0).all())
    z = (found - exact)[exact > 0] / (exact * (1 - exact) / number).sqrt()[exact > 0]
    assert float(z.abs().max()) < limit(len(exact))
    assert torch.equal(draws, posterior.sample(number, seed=0))


def test_several_changes_of_the_nile_are_less_probable_than_one():
    several = nile(NumberOfChanges.up_to(5))
    assert several.number_probabilities.argmax() == 1
    one = nile(NumberOfChanges.exactly(1))
    torch.testing.assert_close(several.log_evidence_by_number[1], one.log_evidence, rtol=0, atol=1e-10)
    assert one.log_evidence_by_number.isnan().tolist() == [True, False]


def test_plot_shows_places_and_numbers():
    posterior = ChangePoints(series(), NORMAL, NumberOfChanges.up_to(3))
    figure = plot_change_points(posterior, torch.arange(1990, 1997), name="flow")
    assert figure.axes[0].get_ylabel() == "flow"
    segments = figure.axes[1].collections[0].get_segments()
    assert [s[0][0] for s in segments] == list(range(1990, 1996))
    heights = torch.tensor([s[1][1] for s in segments])
    torch.testing.assert_close(heights, posterior.place_probabilities(), rtol=0, atol=1e-14)
    with pytest.raises(ShapeError, match="times"):
        plot_change_points(posterior, torch.arange(3))
    plot_change_points(ChangePoints(series().requires_grad_(), NORMAL, NumberOfChanges.up_to(1)))


def test_single_precision_and_one_datum():
    posterior = ChangePoints(series().float(), NORMAL, NumberOfChanges.up_to(2))
    assert posterior.log_evidence.dtype == posterior.levels().dtype == torch.float32
    alone = ChangePoints(series()[:1], NORMAL, NegativeBinomialLengths(0.1))
    assert alone.most_probable().shape == (0,) and alone.sample(3, seed=0).shape == (3, 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ChangePoints(torch.zeros(0), NORMAL, NumberOfChanges.exactly(0)), ShapeError, "sequence of numbers"),
        (lambda: ChangePoints(torch.zeros(2, 2), NORMAL, NumberOfChanges.exactly(0)), ShapeError, "shape"),
        (lambda: ChangePoints(series(), NORMAL, NumberOfChanges.exactly(7)), SettingsError, "7 change points"),
        (
            lambda: ChangePoints(series(), NORMAL, NumberOfChanges.exactly(2), min_length=3),
            SettingsError,
            "allow one from 0 to 1",
        ),
        (lambda: ChangePoints(series(), NORMAL, NumberOfChanges.up_to(2), min_length=9), SettingsError, "min_length"),
        (
            lambda: ChangePoints(series(), NORMAL, NegativeBinomialLengths(0.1, most=1), max_length=2),
            SettingsError,
            "no segmentation",
        ),
        (lambda: NumberOfChanges((0.0,)), SettingsError, "not all zero"),
        (lambda: NumberOfChanges((-1.0, 2.0)), SettingsError, "probabilities"),
        (lambda: NumberOfChanges(0.5), SettingsError, "probabilities=0.5"),
        (lambda: NumberOfChanges("ab"), SettingsError, "must be a number"),
        (lambda: NumberOfChanges(("a",)), SettingsError, "must be a number"),
        (lambda: NORMAL.log_marginals(torch.zeros(0), 2), ShapeError, "sequence of numbers"),
        (lambda: NegativeBinomialLengths(1.0), SettingsError, "probability"),
        (lambda: NegativeBinomialLengths(0.5, successes=0), SettingsError, "successes"),
        (lambda: NormalSegments(0.0, 0.0, 1.0, 1.0), SettingsError, "precision"),
        (lambda: PoissonSegments(1.0, -1.0), SettingsError, "rate"),
        (lambda: POISSON.log_marginals(torch.tensor([1.0, 0.5]), 2), DataError, "whole numbers"),
        (lambda: NORMAL.log_marginals(torch.tensor([1.0, math.nan]), 2), DataError, r"x\[1\]"),
        (
            lambda: change_points._checked_marginals(torch.full((2, 2), math.nan), 2, 2),
            DataError,
            r"1 data up to x\[0\]",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
