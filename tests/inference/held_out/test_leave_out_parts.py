"""What scores of held-out data are made of: smoothed weights, sampled sets, controls and weighted data."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.statistics import pareto_shape, pareto_smoothed
from bayeskit.inference.held_out import _leave_out as leave_out
from bayeskit.inference.held_out._leave_out import (
    adjusted,
    all_sets,
    cross_validation_evidence,
    predict,
    prior_populations,
    sampled_sets,
    widened_standard_error,
)
from bayeskit.inference.samplers import ResampleMove
from bayeskit.inference.samplers._populations import equally_weighted
from bayeskit.inference.samplers._weighted_data import DataPopulations, WeightedData, carry

NORMAL = torch.tensor([1.2, -0.3, 2.5, 0.8, 1.9, 0.1], dtype=torch.float64)
PRIOR_VARIANCE = 4.0


@pytest.fixture(scope="module")
def normal_target():
    def location(y):
        mean = pyro.sample("mean", dist.Normal(0.0, PRIOR_VARIANCE**0.5))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return bk.Target.from_pyro(location, NORMAL)


def test_smoothed_weights_have_the_shape_that_is_reported():
    generator = torch.Generator().manual_seed(0)
    log_weights = torch.randn(4, 1000, generator=generator, dtype=torch.float64) * torch.tensor([[0.1], [1], [2], [4]])
    smoothed, shape = pareto_smoothed(log_weights)
    assert torch.allclose(shape, torch.tensor([pareto_shape(row) for row in log_weights], dtype=torch.float64))
    assert torch.allclose(smoothed.exp().sum(1), torch.ones(4, dtype=torch.float64))
    # All but the tail are as they were, up to a constant, and the order is kept.
    order = log_weights.argsort(1)[:, :800]
    difference = (smoothed - log_weights).gather(1, order)
    assert float(difference.var(1).max()) < 1e-20
    assert torch.equal(smoothed.argsort(1)[:, :800], order)


@pytest.fixture(scope="module")
def psis():
    """ArviZ's Pareto smoothing, which moved between its versions."""
    import arviz

    if "psislw" in vars(arviz):
        return arviz.psislw
    from arviz_stats.base import array_stats

    return array_stats.psislw


@pytest.mark.calibration
def test_smoothed_weights_agree_with_arviz(psis):
    generator = torch.Generator().manual_seed(1)
    log_weights = 1.5 * torch.randn(3, 2000, generator=generator, dtype=torch.float64)
    smoothed, shape = pareto_smoothed(log_weights)
    expected, expected_shape = psis(log_weights.numpy())
    assert float((smoothed - torch.as_tensor(expected)).abs().max()) < 1e-10
    assert float((shape - torch.as_tensor(expected_shape)).abs().max()) < 1e-10


@pytest.mark.calibration
def test_leave_one_out_agrees_with_arviz(psis, normal_target, monkeypatch):
    monkeypatch.setattr(leave_out, "MAX_TYPICAL_SHAPE", math.inf)  # weights only, as ArviZ
    normal_draws = bk.sample(normal_target, num_chains=4, num_warmup=300, num_samples=1000, seed=1, progress=False)
    each = normal_target.pointwise_log_likelihood(normal_draws.unconstrained)["y"].flatten(0, 1).mT
    log_weights, _ = psis(-each.numpy())
    expected = (torch.as_tensor(log_weights) + each).logsumexp(1).mean()
    result = cross_validation_evidence(normal_target, normal_draws, p=1, held_out="all")
    assert result.num_rerun.tolist() == [0]
    # Chains repeat draws, and of equal weights at its edge ArviZ leaves all out of the tail.
    assert abs(float(result.score[0] - expected)) < 0.05 * float(result.standard_error[0])


def test_equal_and_few_weights():
    smoothed, shape = pareto_smoothed(torch.zeros(2, 100, dtype=torch.float64))
    assert shape.tolist() == [-math.inf, -math.inf]
    assert torch.allclose(smoothed.exp(), torch.full((2, 100), 0.01, dtype=torch.float64))
    assert pareto_smoothed(torch.arange(10.0))[1].item() == math.inf
    for count in (10, 100):
        rows = torch.randn(2, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        alone, _ = pareto_smoothed(rows[1:])
        smoothed, shape = pareto_smoothed(torch.cat([torch.full((1, count), -math.inf), rows[1:]]))
        assert torch.allclose(smoothed[0].exp(), torch.full((count,), 1 / count, dtype=torch.float64))
        assert shape[0].item() == math.inf and torch.equal(smoothed[1:], alone)


def test_sampled_sets_are_distinct_and_uniform(limit):
    generator = torch.Generator().manual_seed(0)
    sets = torch.stack([sampled_sets(6, 3, 10, generator) for _ in range(300)])
    assert bool((sets.sum(-1) == 3).all())
    assert all(len(row.unique(dim=0)) == 10 for row in sets)
    share = sets.double().mean((0, 1))
    assert float((share - 0.5).abs().max()) < limit(6) * 0.5 / math.sqrt(3000)
    assert torch.equal(sampled_sets(4, 2, 100, generator), all_sets(4, 2))


def test_controls_leave_the_mean_right(limit):
    # Scores that depend on a control in a nonlinear way, whose mean over all sets is known.
    generator = torch.Generator().manual_seed(2)
    control, noise = torch.randn(2, 10, 4000, generator=generator, dtype=torch.float64)
    score = control + 0.3 * (control.square() - 1) + 0.2 * noise
    rows, doubt = adjusted(score, control, torch.zeros(()))
    assert float(doubt.abs().max()) == 0
    means = rows.mean(0)
    assert abs(float(means.mean())) < limit() * float(means.std()) / math.sqrt(4000)
    assert float(means.var()) < 0.5 * float(score.mean(0).var())
    # A slope that is fitted to the very rows it adjusts would leave a bias.
    centred = control - control.mean(0)
    slope = (centred * score).sum(0) / centred.square().sum(0)
    naive = (score - slope * control).mean(0)
    assert abs(float(naive.mean())) > limit() * float(naive.std()) / math.sqrt(4000)
    excess = widened_standard_error(rows).square() - means.square()
    assert float(excess.mean()) > -limit() * float(excess.std()) / math.sqrt(4000)


def test_controls_of_few_kinds_have_slope_one():
    # Two kinds are fitted perfectly; a third, rare one, would show in nothing but the shift.
    control = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(16).unsqueeze(1)
    rows, doubt = adjusted(3 * control, control, torch.tensor(0.6, dtype=torch.float64))
    assert torch.allclose(rows, 2 * control + 0.6, rtol=0, atol=1e-15)
    assert float(doubt) == pytest.approx(0.05, abs=1e-15)


def test_one_evaluation_gives_the_likelihood_of_each_datum(normal_target):
    data = WeightedData(normal_target)
    u = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    each = data.pointwise(u)
    assert torch.allclose(each.sum(1), normal_target.log_likelihood(u), rtol=1e-13)
    weights = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0, 0.0]], dtype=torch.float64)
    value, gradient = data.counting(weights).value_and_grad(u)
    part = data.counting(weights).evaluator(5)(u, torch.ones(5, dtype=torch.float64))
    expected = normal_target.log_prior(u) + (weights * each).sum(1)
    assert torch.allclose(part.log_density, expected, rtol=1e-13)
    slope = (weights * (NORMAL - u)).sum(1) - u.squeeze(1) / PRIOR_VARIANCE
    assert torch.allclose(part.gradient.squeeze(1), slope, rtol=1e-13)
    assert value.shape == (5,) and gradient.shape == (5, 1)


def test_particles_are_carried_to_any_weights(normal_target, limit):
    # Half a datum counts: the power posterior is normal, and its normaliser known.
    data = WeightedData(normal_target)
    generator = torch.Generator().manual_seed(6)
    state = prior_populations(data, 16, 256, generator)
    weights = torch.zeros(16, 6, dtype=torch.float64)
    weights[:, 0], weights[:, 3] = 0.5, 1.0
    state, increment, _, _ = carry(data, state, weights, ResampleMove(), generator)
    precision = 1 / PRIOR_VARIANCE + 1.5
    total, squares = 0.5 * NORMAL[0] + NORMAL[3], 0.5 * NORMAL[0].square() + NORMAL[3].square()
    exact = -0.75 * math.log(2 * math.pi) - 0.5 * math.log(PRIOR_VARIANCE * precision)
    exact += float(0.5 * total.square() / precision - 0.5 * squares)
    value = float(increment.logsumexp(0)) - math.log(16)
    assert abs(value - exact) < limit() * float((increment - value).exp().std()) / 4
    mean = (state.particles.log_weight.exp() * state.particles.position.squeeze(-1)).sum(1)
    assert abs(float(mean.mean() - total / precision)) < limit() * float(mean.std()) / 4
    assert torch.equal(state.data_weights, weights)


def test_prediction_is_a_weighted_mean(normal_target):
    data = WeightedData(normal_target)
    generator = torch.Generator().manual_seed(0)
    position = torch.randn(2, 400, 1, generator=generator, dtype=torch.float64)
    state = DataPopulations.at(data, equally_weighted(position, position[..., 0], position[..., 0]), 0.0)
    predictive = predict(state.particles.log_weight, state.pointwise)
    mean = state.pointwise.exp().mean(1)
    variance = state.pointwise.exp().var(1, correction=0) / 400
    assert torch.allclose(predictive.log_density, mean.log() + 0.5 * variance / mean.square())
    assert torch.allclose(predictive.influence.square().sum(1), variance / mean.square())


def test_an_observation_without_a_plate_is_one_datum():
    def location(y, many):
        mean = pyro.sample("mean", dist.Normal(0.0, PRIOR_VARIANCE**0.5))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        if many is not None:
            with pyro.plate("pairs", 2):
                pyro.sample("many", dist.Normal(mean, 1.0).expand([2, 3]).to_event(1), obs=many)

    u = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    data = WeightedData(bk.Target.from_pyro(location, NORMAL[0], None))
    expected = torch.distributions.Normal(u, 1.0).log_prob(NORMAL[0])
    assert data.num_data == 1
    torch.testing.assert_close(data.pointwise(u), expected)
    beside = WeightedData(bk.Target.from_pyro(location, NORMAL[0], NORMAL.reshape(2, 3)))
    assert beside.num_data == 3
    torch.testing.assert_close(beside.pointwise(u)[:, :1], expected)
