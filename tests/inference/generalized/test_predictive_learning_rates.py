import math
import sys

import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized.calibrate import held_out_predictive, safe_bayes

PRIOR_VARIANCE = 4.0
GRID = torch.tensor([0.05, 0.2, 1.0, 3.0], dtype=torch.float64)
# Importance sampling with quasi-random draws: what repeated runs with other seeds scatter by, times this many.
SEEDS = 8


def unit_normal(mean):
    return dist.Normal(mean, 1.0)


def noisy(num_data=24, spread=3.0, seed=0):
    return spread * torch.randn(num_data, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def location(data, prior=None):
    prior = dist.Normal(0.0, PRIOR_VARIANCE**0.5) if prior is None else prior
    return GibbsPosterior(prior, losses.HalfSquared(), data)


def normal_posterior(data, weight):
    """Return mean and variance of the posterior of a normal location, exactly."""
    variance = 1 / (1 / PRIOR_VARIANCE + weight * len(data))
    return variance * weight * data.sum(), variance


def exact_held_out(data, weight, num_folds, seed, mixed):
    generator = new_generator(seed, stream="folds")
    fold = torch.randperm(len(data), generator=generator) % num_folds
    total = 0.0
    for k in range(num_folds):
        mean, variance = normal_posterior(data[fold != k], weight)
        held_out = data[fold == k]
        if mixed:
            total -= dist.Normal(mean, (1 + variance) ** 0.5).log_prob(held_out).sum()
        else:
            total += 0.5 * ((held_out - mean).square() + variance).sum()
    return float(total)


def exact_prequential(data, weight, randomized):
    total = 0.0
    for i in range(len(data)):
        mean, variance = normal_posterior(data[:i], weight)
        total += 0.5 * ((data[i] - mean).square() + (variance if randomized else 0.0))
    return float(total)


def agrees(estimates, exact, limit):
    """Whether estimates ``(seeds, g)`` agree with exact values, up to their scatter and rounding."""
    error = estimates.std(0) / math.sqrt(len(estimates))
    # A scatter known from few seeds: Student's t instead of the normal law.
    quantile = limit(2 * estimates.shape[1]) * 2.5
    return bool(((estimates.mean(0) - exact).abs() <= quantile * error + 1e-9).all())


@pytest.mark.calibration
@pytest.mark.parametrize("mixed", [True, False], ids=["predictive density", "held-out loss"])
def test_held_out_scores_of_a_normal_location_are_exact(mixed, limit):
    data, model = noisy(23), unit_normal if mixed else None
    runs = torch.stack(
        [
            held_out_predictive(
                location(data), grid=GRID, num_folds=4, model=model, num_draws=256, seed=seed
            ).curve.values
            - torch.tensor([exact_held_out(data, float(w), 4, seed, mixed) for w in GRID], dtype=torch.float64)
            for seed in range(SEEDS)
        ]
    )
    assert agrees(runs, torch.zeros(len(GRID), dtype=torch.float64), limit)
    assert float(runs.abs().max()) < 1.0  # of scores near a hundred


def test_the_best_held_out_weight_is_that_of_the_exact_scores():
    data = noisy(23)
    for seed in range(3):
        exact = [exact_held_out(data, float(w), 4, seed, True) for w in GRID]
        chosen = held_out_predictive(location(data), grid=GRID, num_folds=4, model=unit_normal, seed=seed)
        assert chosen.weight == float(GRID[exact.index(min(exact))])


def test_scoring_the_training_data_would_be_noticed(monkeypatch):
    data, module = noisy(23), sys.modules[held_out_predictive.__module__]
    original = module._scores
    monkeypatch.setattr(
        module, "_scores", lambda p, loss, parts, training, *rest: original(p, loss, parts, training.roll(1, 0), *rest)
    )
    runs = torch.stack(
        [
            held_out_predictive(location(data), grid=GRID, num_folds=4, model=unit_normal, seed=seed).curve.values
            - torch.tensor([exact_held_out(data, float(w), 4, seed, True) for w in GRID], dtype=torch.float64)
            for seed in range(SEEDS)
        ]
    )
    assert float(runs.abs().max()) > 1.0


def test_every_datum_is_scored_once():
    chosen = held_out_predictive(location(noisy(11)), grid=GRID, num_folds=3, model=unit_normal)
    scores = chosen.diagnostics["scores"]
    assert scores.shape == (4, 11) and bool(scores.isfinite().all())
    assert float((scores.sum(1) - chosen.curve.values).abs().max()) < 1e-9


def test_held_out_data_with_covariates_keep_their_rows():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    outcomes = 3 * x[:, 0] + noisy(12, 0.5)
    posterior = GibbsPosterior(Flat((1,)), losses.HalfSquared(losses.linear), (x, outcomes))
    chosen = held_out_predictive(posterior, grid=GRID, num_folds=12, model=lambda b, x: dist.Normal(x @ b, 1.0))
    best = chosen.diagnostics["scores"][-1]
    for i in range(12):
        kept = torch.arange(12) != i
        slope = (x[kept, 0] @ outcomes[kept]) / x[kept, 0].square().sum()
        variance = 1 + x[i, 0].square() / (float(GRID[-1]) * x[kept, 0].square().sum())
        exact = -dist.Normal(x[i, 0] * slope, variance.sqrt()).log_prob(outcomes[i])
        assert abs(float(best[i] - exact)) < 0.02


def test_an_expected_loss_and_an_edge_are_warned_of():
    chosen = held_out_predictive(location(noisy()), grid=GRID, num_folds=4)
    assert any("uncertainty" in text for text in chosen.warnings)
    assert any("extend the grid" in text for text in safe_bayes(location(noisy()), GRID, randomized=False).warnings)


@pytest.mark.calibration
@pytest.mark.parametrize("randomized", [True, False])
def test_prequential_losses_of_a_normal_location_are_exact(randomized, limit):
    data = noisy(20)
    exact = torch.tensor([exact_prequential(data, float(w), randomized) for w in GRID], dtype=torch.float64)
    runs = torch.stack(
        [
            safe_bayes(location(data), GRID, randomized=randomized, num_draws=128, seed=s).curve.values
            for s in range(SEEDS)
        ]
    )
    assert agrees(runs, exact, limit)
    # Looking at the datum to be predicted is off by more.
    peeking = torch.tensor([exact_prequential(torch.cat([data[1:], data[:1]]), float(w), randomized) for w in GRID])
    assert not agrees(runs, peeking, limit)


def test_safe_bayes_is_no_coverage_calibrator():
    """The reference row: noise of variance nine, a unit-variance model, and yet the full weight."""
    chosen = safe_bayes(location(noisy(200)), [2.0**-k for k in range(5)], first=20, num_draws=64)
    assert chosen.weight == 1.0 and chosen.trusted
    coverage = math.erf(1.959964 / 3 / 2**0.5)
    assert round(100 * coverage, 1) == 48.6
    assert "not coverage" in chosen.target


def test_safe_bayes_of_an_improper_prior_waits_for_data():
    chosen = safe_bayes(location(noisy(12), Flat()), GRID)
    assert chosen.diagnostics["first"] == 2 and chosen.diagnostics["losses"].shape == (4, 10)
    with pytest.raises(SettingsError):
        safe_bayes(location(noisy(12), Flat()), GRID, first=0)


def test_settings_out_of_their_domain_are_refused():
    posterior = location(noisy(12))
    for bad in (
        lambda: safe_bayes(posterior, [1.0]),
        lambda: safe_bayes(posterior, [1.0, -1.0]),
        lambda: safe_bayes(posterior, GRID, first=12),
        lambda: held_out_predictive(posterior, grid=GRID, num_folds=13),
        lambda: held_out_predictive(posterior, grid=GRID, num_folds=1),
    ):
        with pytest.raises(SettingsError):
            bad()


def test_what_was_compared_can_be_plotted():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = safe_bayes(location(noisy(12)), GRID)
    ax = chosen.plot()
    assert ax.get_xscale() == "log" and "cumulative" in ax.get_ylabel()
    pyplot.close(ax.figure)
