"""Quasi-random draws: each has its distribution, sets are independent, means are closer than by chance."""

import math

import pytest
import torch
from scipy import stats

from bayeskit._core.randomness import normal_points, student_points, uniform_points
from bayeskit.inference._proposals import Mixture, StudentT

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sets_of(draw, count):
    """One point of each of many sets: these are independent, so that a test for independent draws applies."""
    g = generator()
    return torch.stack([draw(8, g)[5] for _ in range(count)])


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (lambda n, g: uniform_points(n, 3, g), stats.uniform),
        (lambda n, g: normal_points(n, 3, g), stats.norm),
        (lambda n, g: student_points(n, 3, 5.0, g), stats.t(5.0)),
    ],
    ids=["uniform", "normal", "student"],
)
def test_any_point_follows_the_distribution(draw, law):
    for column in sets_of(draw, 1000).T.numpy():
        assert stats.kstest(column, law.cdf).pvalue > 1e-5


def test_coordinates_of_a_student_share_their_radius():
    """A mutation: paired with those of other sets, they do not."""
    one, other = sets_of(lambda n, g: student_points(n, 2, 3.0, g), 2000).abs().T.numpy()
    assert stats.spearmanr(one, other).pvalue < 1e-5 < stats.spearmanr(one, other[::-1]).pvalue


def test_sets_scatter_about_the_mean_by_less_than_chance_would():
    g = generator()
    means = torch.stack([normal_points(512, 4, g).exp().mean(0) for _ in range(40)])
    exact, by_chance = math.exp(0.5), math.sqrt((math.e - 1) * math.e / 512)
    assert float(means.std(0).max()) < 0.3 * by_chance
    z = (means.mean(0) - exact) / (means.std(0) / math.sqrt(len(means)))
    assert float(z.abs().max()) < stats.t.isf(5e-6 / 4, len(means) - 1)


def test_more_dimensions_than_the_sequence_has():
    points = uniform_points(4, 22_000, generator())
    assert points.shape == (4, 22_000) and 0 < float(points.min()) < float(points.max()) < 1
    assert stats.kstest(points.flatten().numpy(), "uniform").pvalue > 1e-5


def test_a_mixture_takes_whole_numbers_from_each_part():
    """Weights of the mixture against one of its parts average to one only if the share is that of the draws."""
    location, factor = torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)
    main, heavy = StudentT(location, factor, 8.0), StudentT(location + 1, 2 * factor, 5.0)
    size, rough = 10, Mixture([main, heavy], [0.84, 0.16])
    mixture = rough.with_share_of(size)
    assert mixture.shares == (0.8, 0.2)
    g = generator()
    x = torch.stack([mixture.spread(size, g) for _ in range(2000)])
    for proposal, right in ((mixture, True), (rough, False)):
        sets = (heavy.log_prob(x.flatten(0, 1)) - proposal.log_prob(x.flatten(0, 1))).exp().reshape(2000, size).mean(1)
        z = float((sets.mean() - 1) / (sets.std() / math.sqrt(2000)))
        assert bool(abs(z) < stats.norm.isf(5e-6)) is right
