"""Logistic, hinge and exponential loss: their minimisers in closed form, limits, and labels that are none."""

import dataclasses
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch.func import grad, jacrev, vmap

from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._margin import Exponential, Hinge, Logistic
from bayeskit.inference.generalized.losses._prediction import linear

LOSSES = [Logistic, Hinge, Exponential]
BETA = torch.tensor([0.3, -0.8], dtype=torch.float64)


def sample(n=30, seed=0):
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(n), rng.standard_normal(n)], -1)
    y = np.where(rng.uniform(size=n) < 1 / (1 + np.exp(-x @ [0.5, 1.0])), 1.0, -1.0)
    return torch.as_tensor(x), torch.as_tensor(y)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def test_minimisers_in_closed_form():
    """Three of four labels are +1: log odds, half of them, and the sign."""
    labels = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    assert abs(grad(Logistic().total)(scalar(math.log(3)), labels)) < 1e-14
    assert abs(grad(Exponential().total)(scalar(math.log(3) / 2), labels)) < 1e-14
    assert Exponential().total(scalar(math.log(3) / 2), labels) == pytest.approx(2 * math.sqrt(3), abs=1e-14)
    scores = torch.linspace(-3, 3, 61, dtype=torch.float64)
    hinge = vmap(Hinge().total, (0, None))(scores, labels)
    assert abs(scores[hinge.argmin()] - 1) < 1e-12 and abs(hinge.min() - 2) < 1e-12


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_logistic_loss_is_that_of_logistic_regression(dtype):
    x, y = sample()
    bernoulli = NegativeLogLikelihood(lambda beta, x: dist.Bernoulli(logits=x @ beta))
    found = Logistic(predict=linear).pointwise(BETA, (x, y.to(dtype)))
    assert (found - bernoulli.pointwise(BETA, (x, (y + 1) / 2))).abs().max() < 1e-14


def test_one_example_of_each():
    labels = torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = torch.stack([loss().pointwise(scalar(0.5), labels) for loss in LOSSES])
    by_hand = [
        [math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.5))],
        [0.5, 1.5],
        [math.exp(-0.5), math.exp(0.5)],
    ]
    assert (found - torch.tensor(by_hand, dtype=torch.float64)).abs().max() < 1e-15


def test_the_logistic_loss_far_out():
    """No overflow, no digits lost, in value, gradient and curvature."""
    scores = torch.tensor([-1e4, -800.0, -30.0, 30.0, 800.0], dtype=torch.float64)
    label = torch.ones(1, dtype=torch.float64)
    value, slope, curvature = (
        vmap(f, (0, None))(scores, label)
        for f in (Logistic().total, grad(Logistic().total), grad(grad(Logistic().total)))
    )
    by_hand = [1e4, 800.0, 30 + math.log1p(math.exp(-30)), math.log1p(math.exp(-30)), 0.0]
    assert (value / torch.tensor(by_hand, dtype=torch.float64) - 1)[:4].abs().max() < 1e-14 and value[4] == 0
    assert slope.isfinite().all() and abs(slope[0] + 1) < 1e-15 and abs(slope[3] / -math.exp(-30) - 1) < 1e-12
    assert curvature.isfinite().all() and bool((curvature >= 0).all())


def differences(function, at, *rest, size=1e-5):
    steps = torch.eye(len(at), dtype=at.dtype) * size
    return torch.stack([(function(at + s, *rest) - function(at - s, *rest)) / (2 * size) for s in steps], -1)


def check_gradient(loss, data):
    # The third derivatives of thirty smooth terms are below 1e3, and central differences err by their 1e-10.
    return bool((grad(loss.total)(BETA, data) - differences(loss.total, BETA, data)).abs().max() < 1e-7)


@pytest.mark.parametrize("loss", [*(f(predict=linear) for f in LOSSES), Hinge(predict=linear).smoothed(0.3)])
def test_gradient_is_that_of_finite_differences(loss):
    assert check_gradient(loss, sample())


def test_a_label_without_effect_is_noticed():
    @dataclasses.dataclass(frozen=True)
    class Cut(Logistic):
        def of_margin(self, margin):
            return super().of_margin(margin) + 0.1 * margin.detach()

    assert not check_gradient(Cut(predict=linear), sample())


def test_the_smoothed_hinge():
    data = sample()
    exact = Hinge(predict=linear).pointwise(BETA, data)
    for width in (1e-1, 1e-4, 1e-8):
        off = Hinge(predict=linear).smoothed(width).pointwise(BETA, data) - exact
        assert bool((off >= -1e-15).all()) and off.max() <= width / 2
    smooth = Hinge(predict=linear).smoothed(0.3)
    curvature = jacrev(grad(smooth.total))(BETA, data)
    assert (curvature - differences(grad(smooth.total), BETA, data)).abs().max() < 1e-6
    assert bool((torch.linalg.eigvalsh(curvature) > 0).all())


@pytest.mark.parametrize("make", LOSSES)
def test_batches_equal_loops_and_weights_count(make):
    loss, (x, y) = make(predict=linear), sample(12)
    betas = torch.stack([BETA, -BETA, 2 * BETA])
    weights = torch.as_tensor(np.random.default_rng(1).exponential(size=(3, 12)))
    sets = torch.stack([x, x.flip(0), 2 * x]), torch.stack([y, y, -y])
    batched = vmap(loss.total)(betas, sets, weights)
    looped = [loss.total(b, (sets[0][r], sets[1][r]), weights[r]) for r, b in enumerate(betas)]
    assert (batched - torch.stack(looped)).abs().max() < 1e-12
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    again = loss.total(BETA, (x[order], y[order]), weights[0][order])
    assert abs(again - loss.total(BETA, (x, y), weights[0])) < 1e-12
    counts = torch.tensor([0, 1, 2, 1, 0, 3, 1, 1, 0, 1, 1, 1])
    repeated = (x.repeat_interleave(counts, 0), y.repeat_interleave(counts))
    assert abs(loss.total(BETA, (x, y), counts) - loss.total(BETA, repeated)) < 1e-12


@pytest.mark.parametrize("make", LOSSES)
def test_traced_as_a_target(make):
    x, y = sample(12)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0)
    posterior = GibbsPosterior(prior, make(predict=linear), (x, y), weight=0.7, compile=False)
    value, slope = posterior.value_and_grad(BETA[None])
    by_hand = (-BETA.square() / 18 - math.log(3 * math.sqrt(2 * math.pi))).sum() - 0.7 * make(predict=linear).total(
        BETA, (x, y)
    )
    assert abs(value[0] - by_hand) < 1e-10
    assert (slope[0] + BETA / 9 + 0.7 * grad(make(predict=linear).total)(BETA, (x, y))).abs().max() < 1e-10


@pytest.mark.parametrize("make", LOSSES)
def test_other_labels_are_refused(make):
    x, y = sample(4)
    with pytest.raises(DataError, match=r"datum 1 is 0.*2 \* labels - 1"):
        make(predict=linear).check((x, torch.tensor([1, 0, 1, 0])))
    with pytest.raises(DataError, match="datum 2 is 3") as caught:
        make().check(torch.tensor([1.0, -1.0, 3.0, -1.0]))
    assert "2 * labels" not in str(caught.value)
    with pytest.raises(DataError, match="datum 2 is 0"):
        prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0)
        GibbsPosterior(prior, make(predict=linear), (x, torch.tensor([1.0, 1.0, 0.0, 1.0])), compile=False)
    with pytest.raises(ShapeError, match="predict"):
        make().pointwise(BETA[0], (x, y))
