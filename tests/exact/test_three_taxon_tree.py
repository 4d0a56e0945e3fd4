import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.exact import pattern_log_probabilities, three_taxon_sequences, three_taxon_tree
from bayeskit.exact._three_taxon_tree import PATTERN_CLASSES, count_site_patterns

BRANCHES = np.array([[0.1, 0.2, 0.3], [1e-6, 0.02, 1.5], [0.7, 0.7, 0.7], [3.0, 0.001, 12.0]])


def _class_of(pattern: tuple[int, ...]) -> int:
    first, second, third = pattern
    if first == second == third:
        return 0
    if first == second:
        return 1
    if first == third:
        return 2
    return 3 if second == third else 4


@pytest.mark.parametrize("branches", BRANCHES)
def test_pattern_probabilities_equal_the_sum_over_the_hidden_root(branches: np.ndarray) -> None:
    rates = np.full((4, 4), 1.0 / 3.0) - np.eye(4) * 4.0 / 3.0
    transitions = [expm(rates * branch) for branch in branches]
    closed_form = pattern_log_probabilities(torch.from_numpy(branches)).exp().tolist()
    total = 0.0
    for pattern in itertools.product(range(4), repeat=3):
        brute_force = sum(
            0.25
            * transitions[0][root, pattern[0]]
            * transitions[1][root, pattern[1]]
            * transitions[2][root, pattern[2]]
            for root in range(4)
        )
        assert closed_form[_class_of(pattern)] == pytest.approx(brute_force, rel=1e-9)
        total += closed_form[_class_of(pattern)]
    assert total == pytest.approx(1.0, rel=1e-14)


def test_short_branches_keep_their_digits() -> None:
    # One change on branch 3, to first order in t.
    length = 1e-12
    log_probability = pattern_log_probabilities(torch.full((3,), length, dtype=torch.float64))[1].item()
    assert log_probability == pytest.approx(math.log(0.25 * length / 3.0), rel=1e-11)


def test_the_likelihood_is_batched() -> None:
    batch = torch.from_numpy(BRANCHES).reshape(2, 2, 3)
    assert pattern_log_probabilities(batch).shape == (2, 2, 5)
    assert pattern_log_probabilities(batch)[1, 0].equal(pattern_log_probabilities(batch[1, 0]))
    with pytest.raises(ShapeError, match="last must be 3"):
        pattern_log_probabilities(torch.ones(4))


def test_40_and_64_nodes_agree_to_ten_digits() -> None:
    coarse, fine = three_taxon_tree(num_nodes=40), three_taxon_tree(num_nodes=64)
    assert coarse.log_evidence == pytest.approx(fine.log_evidence, abs=1e-10)
    for moment in ("posterior_mean", "posterior_covariance"):
        np.testing.assert_allclose(
            getattr(coarse, moment)["branch_lengths"], getattr(fine, moment)["branch_lengths"], rtol=1e-9
        )


def _counts_and_polynomials() -> tuple[list[int], list[dict[tuple[int, int, int], int]]]:
    """Counts, and 64 times the pattern probabilities as polynomials in exp(-4 t_i / 3)."""
    counts = [int(count) for count in count_site_patterns(three_taxon_sequences())]
    pairs = {(1, 1, 0), (1, 0, 1), (0, 1, 1)}
    constant, every = (0, 0, 0), (1, 1, 1)
    polynomials = [{constant: 1, **dict.fromkeys(pairs, 3), every: 6}]
    for equal in ((1, 1, 0), (1, 0, 1), (0, 1, 1)):
        polynomials.append({constant: 1, **{pair: 3 if pair == equal else -1 for pair in pairs}, every: -2})
    polynomials.append({constant: 1, **dict.fromkeys(pairs, -1), every: 2})
    return counts, polynomials


def _exact_evidence(rate: Fraction) -> tuple[float, list[float]]:
    """Expand the likelihood as a polynomial in exp(-4 t_i / 3) and integrate each term: no quadrature at all.

    The coefficients are integers; the integrals are rationals, rounded to 700 binary digits so that
    the cancellation between the terms is harmless.
    """
    counts, polynomials = _counts_and_polynomials()
    degree = sum(counts)
    size = degree + 1
    product = np.zeros((size, size, size), dtype=object)
    product[0, 0, 0] = 1
    reached = 0
    for count, polynomial in zip(counts, polynomials, strict=True):
        for _ in range(count):
            reached += 1
            updated = np.zeros_like(product)
            for (i, j, k), coefficient in polynomial.items():
                source = product[: reached + 1 - i, : reached + 1 - j, : reached + 1 - k]
                updated[i : reached + 1, j : reached + 1, k : reached + 1] += coefficient * source
            product = updated
    bits = 700
    # E exp(-4 k t / 3) and E t exp(-4 k t / 3) under the exponential prior.
    zeroth = [rate / (rate + Fraction(4 * k, 3)) for k in range(size)]
    first = [rate / (rate + Fraction(4 * k, 3)) ** 2 for k in range(size)]
    weights = np.array([int(value * 2**bits) for value in zeroth], dtype=object)
    weights_first = np.array([int(value * 2**bits) for value in first], dtype=object)
    evidence = ((product @ weights) @ weights) @ weights
    means = [
        ((product @ weights) @ weights) @ weights_first,
        ((product @ weights) @ weights_first) @ weights,
        ((product @ weights_first) @ weights) @ weights,
    ]
    log_evidence = math.log(evidence) - 3 * bits * math.log(2.0) - degree * math.log(64.0)
    return log_evidence, [float(Fraction(mean, evidence)) for mean in means]


@pytest.mark.calibration
def test_evidence_and_mean_agree_with_the_exact_expansion_in_rational_numbers() -> None:
    case = three_taxon_tree()
    log_evidence, means = _exact_evidence(Fraction(10))
    assert case.log_evidence == pytest.approx(log_evidence, abs=1e-11)
    np.testing.assert_allclose(case.posterior_mean["branch_lengths"], means, rtol=1e-10)


@pytest.mark.parametrize("rate", [10.0, 3.0])
def test_evidence_and_moments_agree_with_gauss_legendre_on_the_unit_cube(rate: float) -> None:
    case = three_taxon_tree(rate=rate)
    counts, polynomials = _counts_and_polynomials()
    # u = exp(-rate t) is uniform a priori; squaring clusters nodes at u = 0, where the integrand is rough.
    abscissae, weights = np.polynomial.legendre.leggauss(96)
    v = 0.5 * (abscissae + 1.0)
    t = -2.0 * np.log(v) / rate
    mass = weights * v  # 0.5 from the interval times 2 v from the square
    a1, a2, a3 = np.meshgrid(*[np.exp(-4.0 * t / 3.0)] * 3, indexing="ij")
    log_likelihood = np.zeros_like(a1)
    for count, polynomial in zip(counts, polynomials, strict=True):
        value = sum(c * a1**i * a2**j * a3**k for (i, j, k), c in polynomial.items())
        log_likelihood += count * np.log(value / 64.0)
    peak = log_likelihood.max()
    mass = np.exp(log_likelihood - peak) * mass[:, None, None] * mass[None, :, None] * mass[None, None, :]
    assert case.log_evidence == pytest.approx(peak + math.log(mass.sum()), abs=1e-9)
    mass /= mass.sum()
    mean = np.array([(mass * t[:, None, None]).sum(), (mass * t[None, :, None]).sum(), (mass * t).sum()])
    np.testing.assert_allclose(case.posterior_mean["branch_lengths"], mean, rtol=1e-8)
    shifted = np.meshgrid(*[t - m for m in mean], indexing="ij")
    covariance = [[(mass * row * column).sum() for column in shifted] for row in shifted]
    np.testing.assert_allclose(case.posterior_covariance["branch_lengths"], covariance, rtol=1e-6)


def test_the_sequences_carry_the_counts() -> None:
    sequences = three_taxon_sequences()
    counts = count_site_patterns(sequences)
    assert counts.tolist() == [44.0, 12.0, 8.0, 5.0, 3.0]
    assert counts.equal(three_taxon_tree().args[0])
    assert 60 <= counts.sum() <= 100
    recount = [0] * len(PATTERN_CLASSES)
    for pattern in zip(*sequences.values(), strict=True):
        recount[_class_of(tuple("ACGT".index(base) for base in pattern))] += 1
    assert recount == counts.tolist()
    sequences["taxon1"] = ""
    assert three_taxon_sequences()["taxon1"]


def test_relabelling_the_taxa_permutes_the_posterior_and_keeps_the_evidence() -> None:
    sequences = three_taxon_sequences()
    reversed_taxa = dict(reversed(list(sequences.items())))
    case, other = three_taxon_tree(), three_taxon_tree(reversed_taxa)
    assert other.log_evidence == pytest.approx(case.log_evidence, abs=1e-11)
    np.testing.assert_allclose(
        other.posterior_mean["branch_lengths"], case.posterior_mean["branch_lengths"].flip(0), rtol=1e-11
    )


def test_evidences_of_every_single_site_sum_to_one() -> None:
    total = sum(
        size * math.exp(three_taxon_tree(dict(zip("abc", pattern, strict=True)), num_nodes=32).log_evidence)
        for size, pattern in zip((4, 12, 12, 12, 24), ("AAA", "AAC", "ACA", "CAA", "ACG"), strict=True)
    )
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("sequences", "word"),
    [
        ({"a": "A", "b": "C"}, "three taxa"),
        ({"a": "AC", "b": "C", "c": "AC"}, "lengths"),
        ({"a": "", "b": "", "c": ""}, "lengths"),
        ({"a": "AC", "b": "A-", "c": "AC"}, "'b' has the character '-' at site 2"),
    ],
)
def test_a_malformed_alignment_is_named(sequences, word) -> None:
    with pytest.raises(AlignmentError, match=word):
        three_taxon_tree(sequences)


def test_quadrature_that_has_not_converged_is_refused() -> None:
    many_sites = {taxon: 50 * sequence for taxon, sequence in three_taxon_sequences().items()}
    with pytest.raises(SettingsError, match="larger num_nodes"):
        three_taxon_tree(many_sites)


@pytest.mark.parametrize("settings", [{"rate": -1.0}, {"num_nodes": 4}, {"num_nodes": 1000}])
def test_settings_out_of_range_are_named(settings) -> None:
    with pytest.raises(SettingsError, match=next(iter(settings))):
        three_taxon_tree(**settings)
