"""Minus a log likelihood as a loss: the ordinary posterior at weight one, entries summed, outcomes outside refused."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.func import grad, jacrev, vmap

import bayeskit as bk
from bayeskit.errors import DataError, ImproperPosteriorError, ModelError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood

X = torch.tensor([[0.5, 1.0], [1.0, -0.3], [-2.0, 0.4], [0.1, 0.1]], dtype=torch.float64)
Y = torch.tensor([1.0, 0.0, 3.0, 2.0], dtype=torch.float64)
BETA = torch.tensor([-0.3, 0.6], dtype=torch.float64)


def poisson(beta, x):
    return dist.Poisson((x @ beta).exp())


def test_weight_one_gives_the_ordinary_posterior():
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 2.0)

    def model(x, y):
        beta = pyro.sample("theta", prior.to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", poisson(beta, x), obs=y)

    target = bk.Target.from_pyro(model, X, Y, compile=False)
    posterior = GibbsPosterior(prior, NegativeLogLikelihood(poisson), (X, Y), compile=False)
    u = torch.stack([BETA, -BETA, 2 * BETA])
    for a, b in zip(target.value_and_grad(u), posterior.value_and_grad(u), strict=True):
        assert (a - b).abs().max() < 1e-12
    assert (target.pointwise_log_likelihood(u)["y"] - posterior.pointwise_log_likelihood(u)["loss"]).abs().max() < 1e-12


def test_the_power_posterior_of_a_coin():
    """Beta(a, b) and weight w give Beta(a + w s, b + w f), here over log odds and up to a constant."""
    flips = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    prior = dist.Beta(torch.tensor(2.0, dtype=torch.float64), 3.0)
    posterior = GibbsPosterior(prior, NegativeLogLikelihood(dist.Bernoulli), flips, weight=0.4, compile=False)
    u = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    p = u[:, 0].sigmoid()
    exact = (2 + 0.4 * 3) * p.log() + (3 + 0.4 * 2) * (-p).log1p()
    off = posterior.log_density(u) - exact
    assert (off - off[0]).abs().max() < 1e-12


def test_entries_of_an_outcome_are_summed():
    outcomes = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor([[0.1, 0.2], [0.3, -1.0], [2.0, 0.0]], dtype=torch.float64)
    by_hand = ((outcomes - mean) ** 2 / 2 + math.log(2 * math.pi) / 2).flatten(1).sum(-1)
    for events in range(3):
        loss = NegativeLogLikelihood(lambda m, events=events: dist.Normal(m, 1.0).to_event(events))
        assert (loss.pointwise(mean, outcomes) - by_hand).abs().max() < 1e-13
    scalar = NegativeLogLikelihood(lambda m: dist.Normal(m, 1.0))
    by_hand = ((outcomes - 0.5) ** 2 / 2 + math.log(2 * math.pi) / 2).flatten(1).sum(-1)
    assert (scalar.pointwise(torch.tensor(0.5, dtype=torch.float64), outcomes) - by_hand).abs().max() < 1e-13


def check_gradient(function):
    loss = NegativeLogLikelihood(function)
    size = 1e-5
    steps = torch.eye(2, dtype=torch.float64) * size
    slope = [(loss.total(BETA + s, (X, Y)) - loss.total(BETA - s, (X, Y))) / (2 * size) for s in steps]
    # Third derivatives of these few terms are below 100, and central differences err by their 1e-10.
    return bool((grad(loss.total)(BETA, (X, Y)) - torch.stack(slope)).abs().max() < 1e-8)


def test_gradient_is_that_of_finite_differences():
    assert check_gradient(poisson)
    assert not check_gradient(lambda beta, x: dist.Poisson((x @ beta + (x @ beta).detach()).exp()))


def test_batches_equal_loops_and_weights_count():
    loss = NegativeLogLikelihood(poisson)
    betas = torch.stack([BETA, -BETA])
    weights = torch.tensor([[1.0, 0.2, 0.0, 3.0], [0.5, 0.5, 2.0, 1.0]], dtype=torch.float64)
    sets = torch.stack([X, X.flip(0)]), torch.stack([Y, Y + 1])
    batched = vmap(loss.total)(betas, sets, weights)
    looped = torch.stack([loss.total(b, (sets[0][r], sets[1][r]), weights[r]) for r, b in enumerate(betas)])
    assert (batched - looped).abs().max() < 1e-12
    counts = torch.tensor([0, 2, 1, 3])
    repeated = (X.repeat_interleave(counts, 0), Y.repeat_interleave(counts))
    assert abs(loss.total(BETA, (X, Y), counts) - loss.total(BETA, repeated)) < 1e-12
    order = torch.tensor([2, 0, 3, 1])
    assert abs(loss.total(BETA, (X[order], Y[order])) - loss.total(BETA, (X, Y))) < 1e-12
    # Curvature of a Poisson log likelihood: the sum of rate x x'.
    rate = (X @ BETA).exp()
    assert (jacrev(grad(loss.total))(BETA, (X, Y)) - (X * rate[:, None]).mT @ X).abs().max() < 1e-12


def test_outcomes_outside_of_the_support_cost_infinitely():
    loss = NegativeLogLikelihood(dist.Bernoulli)
    found = loss.pointwise(torch.tensor(0.25, dtype=torch.float64), torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([math.log(4), math.inf, math.log(4 / 3)])
    # A support that depends on the parameter: outside for some draws from the prior is no reason to refuse.
    uniform = NegativeLogLikelihood(lambda top: dist.Uniform(0.0, top))
    data = torch.tensor([0.5, 2.0], dtype=torch.float64)
    assert uniform.total(torch.tensor(1.0, dtype=torch.float64), data) == math.inf
    posterior = GibbsPosterior(dist.Pareto(torch.tensor(1.0, dtype=torch.float64), 1.0), uniform, data, compile=False)
    assert posterior.log_likelihood(posterior.unconstrain({"theta": torch.tensor([4.0])})).item() == pytest.approx(
        -2 * math.log(4)
    )
    with pytest.raises(DataError, match="datum 1"):
        prior = dist.Beta(torch.tensor(2.0, dtype=torch.float64), 3.0)
        GibbsPosterior(prior, loss, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), compile=False)


def test_what_does_not_fit_is_refused():
    zero = torch.zeros((), dtype=torch.float64)
    with pytest.raises(ModelError, match="returns a distribution"):
        NegativeLogLikelihood(lambda m: m).pointwise(zero, Y)
    with pytest.raises(ShapeError, match=r"batch shape \(3,\)"):
        NegativeLogLikelihood(lambda m: dist.Normal(m.expand(3), 1.0)).pointwise(zero, Y)
    with pytest.raises(ShapeError, match=r"event shape \(2,\)"):
        NegativeLogLikelihood(lambda m: dist.Normal(m.expand(2), 1.0).to_event(1)).pointwise(zero, Y)
    with pytest.raises(ShapeError, match=r"outcomes of shape \(4, 1\)"):
        NegativeLogLikelihood(poisson).pointwise(BETA, (X, Y[:, None]))


def test_a_bounded_one_needs_a_proper_prior():
    share, sd = torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([1.0, 10.0], dtype=torch.float64)

    def mixture(mean):
        return dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(torch.stack([mean, 0 * mean]), sd))

    loss = NegativeLogLikelihood(mixture, bounded=True)
    clutter = NegativeLogLikelihood(lambda mean: dist.Normal(0 * mean, sd[1]))
    far = torch.tensor(1e6, dtype=torch.float64)
    assert abs(loss.total(far, Y) - clutter.total(far, Y) - 4 * math.log(10)) < 1e-12
    with pytest.raises(ImproperPosteriorError):
        GibbsPosterior(Flat(), loss, Y, compile=False)
