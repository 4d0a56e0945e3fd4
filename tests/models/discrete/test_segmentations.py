"""Distributions over segmentations against the enumeration of all of them."""

import itertools
import math

import pytest
import torch

from bayeskit.errors import BayeskitError, DataError, SettingsError, ShapeError
from bayeskit.models.discrete.sequences import Counting, Expectation, LogSum, MaxWeight, Segmentations
from bayeskit.models.discrete.sequences import _segmentations as segmentations
from bayeskit.models.discrete.sequences._segmentations import numbered_sums, segment_lengths

LENGTHS = torch.tensor([6, 4, 1, 6])


def random_weights(n=6, longest=4, batch=(4,), seed=0, forbidden=0.15):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*batch, n, longest, generator=generator, dtype=torch.float64)
    weights[..., 1:][torch.rand(*batch, n, longest - 1, generator=generator) < forbidden] = -math.inf
    return weights


def all_ends(n):
    """Return every segmentation of ``n`` places, ``(2**(n - 1), n)``."""
    rows = itertools.product([False, True], repeat=n - 1)
    return torch.tensor([[*row, True] for row in rows])


def enumerated(weights, n):
    """Return all segmentations of the first ``n`` places and their log weights, by going through the segments."""
    ends, logs = all_ends(n), []
    for row in ends:
        places = [0, *(row.nonzero().flatten() + 1).tolist()]
        pieces = zip(places, places[1:], strict=False)
        fits = [weights[b - 1, b - a - 1] if b - a <= weights.shape[1] else -math.inf for a, b in pieces]
        logs.append(sum(float(piece) for piece in fits))
    return ends, torch.tensor(logs, dtype=torch.float64)


def segments_of(ends, longest):
    """Return which segments a segmentation has, ``(*, n, L)``, as numbers."""
    lengths = torch.arange(1, longest + 1)
    return (segment_lengths(ends).unsqueeze(-1) == lengths).double()


def largest_error(weights, lengths=LENGTHS):
    """Compare every answer with enumeration, and return the largest difference."""
    distribution, errors = Segmentations(weights, lengths), []
    values = random_weights(*weights.shape[-2:], seed=5, forbidden=0.0)
    entropy, mean, ends_probability = (
        distribution.entropy(),
        distribution.expectation(values),
        distribution.boundary_probabilities(),
    )
    for row, n in enumerate(lengths.tolist()):
        ends, logs = enumerated(weights[row], n)
        share = logs.softmax(0)
        segments = segments_of(ends, weights.shape[-1])
        exact = (share[:, None, None] * segments).sum(0)
        errors += [
            distribution.log_normalizer()[row] - logs.logsumexp(0),
            distribution.segment_probabilities()[row, :n] - exact,
            ends_probability[row, :n] - (share[:, None] * ends).sum(0),
            entropy[row] + torch.special.xlogy(share, share).sum(),
            mean[row] - (exact * values[row, :n]).sum(),
            (distribution.count()[row] - (logs > -math.inf).sum()).double(),
            distribution.log_weight(distribution.most_probable())[row] - logs.max(),
        ]
    return max(float(error.abs().max()) for error in errors)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_answer_is_that_of_enumeration(seed):
    assert largest_error(random_weights(seed=seed)) < 1e-12


class WithoutOffset(LogSum):
    """Forget to add the largest weight back."""

    def sum(self, elements, dim):
        return super().sum(elements, dim) - 0.01 * elements.amax(dim)


class SkipsAlternatives(LogSum):
    """Take the best alternative for the sum of all."""

    def sum(self, elements, dim):
        return elements.amax(dim)


@pytest.mark.parametrize("broken", [WithoutOffset, SkipsAlternatives])
def test_mutation_enumeration_notices_a_broken_sum(monkeypatch, broken):
    monkeypatch.setattr(segmentations, "LogSum", broken)
    assert largest_error(random_weights()) > 1e-3


@pytest.mark.parametrize(("longest", "number"), [(10, 512), (2, 89), (3, 274)])
def test_numbers_of_segmentations(longest, number):
    distribution = Segmentations(torch.zeros(10, longest, dtype=torch.float64))
    assert int(distribution.count()) == number
    assert abs(float(distribution.entropy()) - math.log(number)) < 1e-12


def test_too_many_to_count_are_refused_with_their_logarithm():
    distribution = Segmentations(torch.zeros(100, 100))
    with pytest.raises(DataError, match=r"exp\(68\.62"):
        distribution.count()
    assert int(Segmentations(torch.zeros(62, 62)).count()) == 2**61
    assert int(Segmentations(torch.zeros(63, 63)).count()) == 2**62
    assert int(Segmentations(torch.zeros(64, 63)).count()) == 2**63 - 1
    with pytest.raises(DataError, match=r"exp\(43\.66"):
        Segmentations(torch.zeros(64, 64)).count()
    assert Segmentations(torch.zeros(0, 4, 2)).count().shape == (0,)


def every_answer(distribution):
    return (
        distribution.log_normalizer(),
        distribution.segment_probabilities(),
        distribution.entropy(),
        distribution.expectation(torch.ones(())),
        distribution.count(),
        distribution.most_probable(),
        distribution.sample(20, seed=0),
        distribution.log_prob(distribution.most_probable()),
    )


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_lies_outside_a_sequence_is_not_read(what):
    weights = random_weights()
    read = torch.zeros_like(weights, dtype=torch.bool)
    for row, n in enumerate(LENGTHS.tolist()):
        read[row, :n] = torch.ones(n, 4, dtype=torch.bool).tril()
    spoiled = torch.where(read, weights, what).requires_grad_()
    right, found = every_answer(Segmentations(weights, LENGTHS)), every_answer(Segmentations(spoiled, LENGTHS))
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    gradient = torch.autograd.grad(found[0].sum() + found[2].sum(), spoiled)[0]
    assert bool(gradient.isfinite().all()) and float(gradient[~read].abs().sum()) == 0.0


def error_of_long_entropy():
    # A factor for each place makes weights as small as those of a long sequence, and changes no probability.
    weights = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) - 16 * torch.arange(1, 6)
    exact = Segmentations(weights.double()).entropy()
    return float((Segmentations(weights).entropy() - exact).abs())


def test_entropies_of_long_sequences_in_single_precision(monkeypatch):
    assert error_of_long_entropy() < 5e-3  # ten units of the last place of the log normaliser, some -4700

    class Drifts(Expectation):
        def sum(self, elements, dim):
            log_weights, values = elements
            total = LogSum().sum(log_weights, dim)
            return torch.stack([total, ((log_weights - total.unsqueeze(dim)).exp() * values).sum(dim)])

    # Weights that do not add up to one by rounding, each time they multiply the whole sum so far.
    monkeypatch.setattr(segmentations, "Expectation", Drifts)
    monkeypatch.setattr(Drifts, "zero", lambda self, like: self.elements(torch.full_like(like[0], -1e30), like[1] * 0))
    assert error_of_long_entropy() > 5e-2


def test_probabilities_of_segments_are_the_gradient_of_the_log_marginal():
    weights = random_weights(forbidden=0.0).requires_grad_()
    distribution = Segmentations(weights, LENGTHS)
    gradient = torch.autograd.grad(distribution.log_normalizer().sum(), weights)[0]
    assert torch.equal(gradient, distribution.segment_probabilities())
    # What comes after the end has no probability.
    assert float(gradient[2, 1:].abs().sum()) == 0.0

    def log_marginal(w):
        return Segmentations(w, LENGTHS).log_normalizer()

    assert torch.autograd.gradcheck(log_marginal, weights)
    assert torch.autograd.gradgradcheck(log_marginal, weights)
    assert torch.autograd.gradcheck(lambda w: Segmentations(w, LENGTHS).entropy(), weights)


def test_an_impossible_sequence_has_log_marginal_minus_infinity_and_leaves_the_others_a_gradient():
    weights = random_weights()
    weights[1] = -math.inf
    weights.requires_grad_()
    total = Segmentations(weights, LENGTHS).log_normalizer()
    assert (total == -math.inf).tolist() == [False, True, False, False]
    gradient = torch.autograd.grad(total[total > -math.inf].sum(), weights)[0]
    assert bool(gradient.isfinite().all()) and float(gradient[1].abs().sum()) == 0.0


def test_draws_have_the_right_frequencies_and_log_probabilities(limit):
    weights, number = random_weights(n=4, longest=3, batch=(2,)), 20_000
    distribution = Segmentations(weights, torch.tensor([4, 3]))
    draws = distribution.sample(number, seed=0)
    assert draws.shape == (number, 2, 4) and not bool(draws[:, 1, 3].any())
    for row, n in enumerate((4, 3)):
        ends, logs = enumerated(weights[row], n)
        exact = logs.softmax(0)
        found = (draws[:, row, None, :n] == ends).all(-1).double().mean(0)
        assert bool((found[exact == 0] == 0).all())
        z = (found - exact)[exact > 0] / (exact * (1 - exact) / number).sqrt()[exact > 0]
        assert float(z.abs().max()) < limit(2 * len(exact))
        padded = torch.nn.functional.pad(ends, (0, 4 - n)).unsqueeze(1).expand(-1, 2, -1)
        torch.testing.assert_close(distribution.log_prob(padded)[:, row], logs.log_softmax(0), rtol=0, atol=1e-12)
    assert torch.equal(draws, distribution.sample(number, seed=0))


def test_what_is_no_segmentation_of_the_sequence_has_no_weight():
    distribution = Segmentations(torch.zeros(3, 2))
    unfinished, too_long = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    assert distribution.log_weight(torch.stack([unfinished, too_long])).tolist() == [-math.inf, -math.inf]


def test_sums_by_number_add_up_to_the_sum_over_all():
    weights = random_weights(batch=())
    by_number = numbered_sums(LogSum(), weights, 6)[:, -1]
    ends, logs = enumerated(weights, 6)
    for number in range(1, 7):
        exact = logs[ends.sum(1) == number].logsumexp(0)
        torch.testing.assert_close(by_number[number], exact, rtol=0, atol=1e-12)
    assert numbered_sums(Counting(), torch.ones(5, 5, dtype=torch.int64), 5)[:, -1].tolist() == [0, 1, 4, 6, 4, 1]


@pytest.mark.parametrize("semiring", [LogSum(), MaxWeight(), Counting()])
def test_laws_of_semirings(semiring):
    a, b, c = torch.tensor([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
    a, b, c = (a, b, c) if isinstance(semiring, Counting) else (a.double(), b.double(), c.double())

    def add(x, y):
        return semiring.sum(torch.stack([x, y], -1), -1)

    left, right = semiring.product(a, add(b, c)), add(semiring.product(a, b), semiring.product(a, c))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    assert torch.equal(semiring.product(a, semiring.one(a)), a)
    torch.testing.assert_close(add(a, semiring.zero(a)), a, rtol=0, atol=1e-12)


def test_expectations_survive_weights_beyond_floating_point():
    semiring = Expectation()
    log_weights = torch.tensor([-1e4, -1e4 + math.log(3)], dtype=torch.float64)
    pairs = semiring.elements(log_weights, torch.tensor([1.0, 2.0], dtype=torch.float64))
    total, mean = semiring.sum(pairs, -1)
    assert abs(float(total) + 1e4 - math.log(4)) < 1e-10 and abs(float(mean) - 1.75) < 1e-10


def test_dtype_follows_the_weights():
    distribution = Segmentations(torch.zeros(2, 5, 2))
    for answer in (distribution.log_normalizer(), distribution.entropy(), distribution.segment_probabilities()):
        assert answer.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Segmentations(torch.zeros(3)), ShapeError, "shape"),
        (lambda: Segmentations(torch.zeros(3, 0)), ShapeError, "shape"),
        (lambda: Segmentations(torch.zeros(2, 3, 2), torch.tensor([1, 2, 3])), ShapeError, "lengths"),
        (lambda: Segmentations(torch.zeros(2, 3, 2), torch.tensor([0, 3])), DataError, "from 1 to 3"),
        (lambda: Segmentations(torch.full((3, 2), math.nan)).entropy(), DataError, "length 1 that ends at place 0"),
        (lambda: Segmentations(torch.tensor([[0.0, 0.0], [0.0, math.inf]])).check(), DataError, "length 2 .* 1 is inf"),
        (lambda: Segmentations(torch.zeros(3, 2), torch.tensor(2.9)), DataError, "float32; give integers"),
        (lambda: Segmentations(torch.zeros(3, 2, dtype=torch.complex64)), DataError, "complex"),
        (lambda: Segmentations(torch.full((3, 2), -math.inf)).sample(3, seed=0), DataError, "begins at place 0"),
        (lambda: Segmentations(torch.zeros(3, 2)).sample(0, seed=0), SettingsError, "num_samples"),
        (lambda: Segmentations(torch.zeros(3, 2)).log_prob(torch.ones(2) > 0), ShapeError, "ends"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert isinstance(caught.value, BayeskitError)


def test_the_error_names_the_sequence_and_the_place():
    weights = torch.zeros(2, 5, 2)
    weights[1, 3:] = -math.inf
    with pytest.raises(DataError, match="of sequence 1 .* begins at place 3"):
        Segmentations(weights).most_probable()
