"""Baselines of score-function terms: what they may not contain, and where they leave no noise."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.inference.gradients._score_function import leave_one_out_bound
from bayeskit.inference.objectives import STL, VCD
from bayeskit.inference.objectives import _evidence_lower_bound as landing
from bayeskit.inference.objectives import _variational_contrastive_divergence as contrastive


@pytest.fixture(autouse=True)
def fixed_stream():
    with global_stream(new_generator(3, stream="test")):
        yield


@pytest.mark.parametrize(("count", "decay"), [(1, 0.0), (3, 0.0), (1, 0.5)])
def test_a_control_variate_without_plates_knows_only_earlier_draws(count, decay, monkeypatch):
    mean = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)

    def model():
        pyro.sample("z", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))

    def guide():
        pyro.sample("z", dist.Normal(mean, 0.7))

    weights, variates = [], []
    estimate = contrastive.contrastive_estimate

    def recorded(weight_before, log_joint, log_guide, log_score, control_variate):
        weights.append((log_joint - log_guide).detach().mean(0))
        variates.append(control_variate.clone())
        return estimate(weight_before, log_joint, log_guide, log_score, control_variate)

    monkeypatch.setattr(contrastive, "contrastive_estimate", recorded)
    objective = VCD(count, num_steps=2, decay=decay)
    for _ in range(6):
        objective.loss_and_grads(model, guide)
    expected = weights[0]
    for weight, variate in zip(weights[1:], variates[1:], strict=True):
        assert abs(variate - expected) < 1e-12
        assert abs(variate - weight) > 1e-6
        expected = torch.lerp(weight, expected, decay)


def gradient_at_the_posterior(count):
    """Return the gradient of guide parameters at the prior, which nothing observed has moved away from."""
    mean = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    slope = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros((), dtype=torch.float64)

    def model():
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Normal(zero, 1.0))
            pyro.sample("y", dist.Bernoulli(logits=z))

    def guide():
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("y", dist.Bernoulli(logits=slope * z))

    return torch.stack(torch.autograd.grad(STL(count).differentiable_loss(model, guide), [mean, slope])).abs().max()


@pytest.mark.parametrize("count", [2, 4])
def test_stl_vanishes_where_a_discrete_site_depends_on_a_continuous_draw(count):
    assert max(gradient_at_the_posterior(count) for _ in range(5)) < 1e-12


def test_a_score_put_back_is_noticed(monkeypatch):
    estimate = landing.score_function_estimate
    monkeypatch.setattr(
        landing, "score_function_estimate", lambda value, score: estimate(value + (score - score.detach()), score)
    )
    assert gradient_at_the_posterior(4) > 1e-3


def test_a_weight_of_zero_among_the_others():
    bound = leave_one_out_bound(torch.tensor([0.0, -math.inf, 1.0], dtype=torch.float64))
    # The geometric mean of the others is zero for the first and the last, and exp(1/2) for the second.
    expected = torch.tensor([1.0, math.log(1 + math.exp(0.5) + math.e), 0.0], dtype=torch.float64) - math.log(3)
    assert (bound - expected).abs().max() < 1e-12


def test_weights_of_zero_in_a_batch():
    log_weight = torch.randn(4, 5, dtype=torch.float64)
    zeros = log_weight.clone()
    zeros[0, 1] = zeros[1, 2] = zeros[2, 2] = -math.inf
    bound, among_finite = leave_one_out_bound(zeros), leave_one_out_bound(log_weight)
    untouched = [0, 3, 4]
    assert torch.equal(bound[:, untouched], among_finite[:, untouched])
    for item, kept in ((1, [1, 2, 3]), (2, [0, 3])):
        for k in range(4):
            rest = [i for i in range(4) if i != k]
            weights = zeros[:, item].exp()
            others = zeros[rest, item].mean().exp()  # the mean of minus infinity makes a weight of zero
            by_hand = ((weights[rest].sum() + others) / 4).log()
            assert abs(bound[k, item] - by_hand) < 1e-12
        assert bound[kept, item].isfinite().all()


def test_others_far_below_the_largest_weight_are_not_lost():
    """Early on, one tree may be thousands of nats above all others; without it the bound is theirs."""
    bound = leave_one_out_bound(torch.tensor([0.0, -1000.0, -3000.0], dtype=torch.float64))
    # Without the largest: weights -2000 (the others' geometric mean), -1000 and -3000.
    assert bound[0].item() == pytest.approx(-1000.0 - math.log(3), abs=1e-12)
    assert bound[1].item() == pytest.approx(-math.log(3), abs=1e-12)
