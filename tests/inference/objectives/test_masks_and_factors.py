"""What stands beside the draws: deterministic sites, factors, masks, loose dimensions, models that come second."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch.distributions import kl_divergence

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import LossError, ModelError, SettingsError
from bayeskit.inference.objectives import ELBO, IWAE, VCD, ReweightedWakeSleep
from bayeskit.inference.objectives import _drawing as terms
from bayeskit.inference.objectives._drawing import site_log_density

DATA = torch.linspace(-2, 2, 5, dtype=torch.float64)


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def with_stream(function, seed=0):
    with global_stream(new_generator(seed, stream="objectives")):
        return function()


def model(x, *, outside=False, inside=False):
    if outside:
        pyro.deterministic("outside", torch.tensor(2.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if inside:
            pyro.deterministic("inside", 2 * z)
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def guide(x, **_):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.3 * x, 0.9))


def by_datum():
    """Return the bound of eight particles for every datum, summed."""
    z = with_stream(lambda: torch.randn(8, len(DATA))) * 0.9 + 0.3 * DATA
    joint = dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z, 0.5).log_prob(DATA)
    log_weight = joint - dist.Normal(0.3 * DATA, 0.9).log_prob(z)
    return float((log_weight.logsumexp(0) - math.log(8)).sum())


@pytest.mark.parametrize("where", [{}, {"outside": True}, {"inside": True}])
def test_a_deterministic_site_leaves_the_weights_to_each_datum(where):
    objective = IWAE(8, max_plate_nesting=1)
    assert abs(with_stream(lambda: objective.loss(model, guide, DATA, **where)) + by_datum()) < 1e-10


def test_weights_of_the_whole_data_are_noticed():
    def with_factor(x):
        pyro.factor("zero", torch.tensor(0.0))  # unlike a deterministic site, a density outside the plate
        model(x)

    objective = IWAE(8, max_plate_nesting=1)
    assert abs(with_stream(lambda: objective.loss(with_factor, guide, DATA)) + by_datum()) > 1e-3


def test_a_deterministic_site_is_no_datum_of_the_sleep_phase():
    slope = torch.tensor(0.3, requires_grad=True)

    def recognition(x, **_):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope * x, 0.9))

    def gradient(inside):
        objective = ReweightedWakeSleep(4, sleep_phi=1.0, observed={"x": 0}, max_plate_nesting=1)
        loss = with_stream(lambda: objective.differentiable_loss(model, recognition, DATA, inside=inside))
        return torch.autograd.grad(loss, slope)[0]

    assert gradient(True).abs() > 0
    assert abs(gradient(True) - gradient(False)) < 1e-10


def test_what_a_mask_takes_out_is_not_to_blame():
    x = torch.tensor([1.0, math.nan, 2.0])

    def with_gap(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with poutine.mask(mask=~x.isnan()):
                pyro.sample("x", dist.Normal(z, 1.0, validate_args=False), obs=x)
            pyro.factor("broken", z * math.inf)

    with pytest.raises(LossError, match="'broken'"):
        with_stream(lambda: ELBO().loss(with_gap, lambda x: guide(torch.zeros(3)), x))


@pytest.mark.parametrize("count", [1, 3])
def test_chains_move_a_single_positive_number(count):
    location = torch.tensor(0.3, requires_grad=True)

    def positive():
        sd = pyro.sample("sd", dist.HalfNormal(2.0))
        pyro.sample("x", dist.Normal(0.0, sd), obs=torch.tensor(1.0))

    def positive_guide():
        pyro.sample("sd", dist.LogNormal(location, 0.3))

    loss = with_stream(lambda: VCD(count, num_steps=2).loss_and_grads(positive, positive_guide))
    assert math.isfinite(loss)
    assert location.grad.abs() > 0


@pytest.mark.parametrize("analytic_kl", [True, False])
def test_a_factor_of_the_guide_counts(analytic_kl):
    weight = torch.tensor(0.7, requires_grad=True)

    def with_factor(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(weight * x, 0.9))
            pyro.factor("penalty", weight * z.square(), has_rsample=True)

    def by_hand():
        z = with_stream(lambda: torch.randn(3, len(DATA))) * 0.9 + weight * DATA
        posterior, prior = dist.Normal(weight * DATA, 0.9), dist.Normal(0.0, 1.0)
        drawn = posterior.log_prob(z) - prior.log_prob(z)
        divergence = kl_divergence(posterior, prior) if analytic_kl else drawn
        return (divergence + weight * z.square() - dist.Normal(z, 0.5).log_prob(DATA)).mean(0).sum()

    ours = ELBO(3, analytic_kl=analytic_kl, max_plate_nesting=1)
    theirs = Trace_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
    losses = [with_stream(lambda: ours.differentiable_loss(model, with_factor, DATA)), by_hand()]
    if not analytic_kl:
        losses.append(with_stream(lambda: theirs.differentiable_loss(model, with_factor, DATA)))
    slopes = [torch.autograd.grad(loss, weight)[0] for loss in losses]
    for loss, slope in zip(losses[1:], slopes[1:], strict=True):
        assert abs(float(losses[0].detach()) - float(loss.detach())) < 1e-10
        assert abs(slopes[0] - slope) < 1e-10


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("objective", [ELBO, IWAE])
def test_a_dimension_without_a_plate_is_refused_by_name(objective, count):
    def loose_model(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(5), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def loose_guide(x):
        pyro.sample("z", dist.Normal(torch.zeros(5), 1.0))

    with pytest.raises(ModelError, match=r"'z'.*size 5.*to_event"):
        objective(count).loss(loose_model, loose_guide, torch.ones(5))


@pytest.mark.parametrize("count", [1, 4, 5])  # the data are five
def test_a_deeper_model_needs_an_objective_of_its_own(count):
    def flat(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(mean.unsqueeze(-1), torch.ones(len(x))).to_event(1), obs=x)

    def flat_guide(x):
        pyro.sample("mean", dist.Normal(0.0, 1.0))

    objective = ELBO(count)
    with_stream(lambda: objective.loss(flat, flat_guide, DATA))
    with pytest.raises(SettingsError, match="'data'.*max_plate_nesting"):
        with_stream(lambda: objective.loss(model, guide, DATA))


def discrete_pair(num_data):
    weight, probability = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0.5, 0.2, 0.9, 0.4])
    logits = torch.linspace(-1, 2, num_data * 4).reshape(num_data, 4).requires_grad_()
    x = torch.linspace(0, 1, num_data * 3).reshape(num_data, 3)

    def discrete(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(probability).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, 1.0).to_event(1), obs=x)

    def recognition(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))

    return discrete, recognition, x, weight, probability, logits


def check_discrete(count, num_data):
    discrete, recognition, x, weight, probability, logits = discrete_pair(num_data)
    loss = with_stream(lambda: ELBO(count, max_plate_nesting=1).loss(discrete, recognition, x))
    posterior = logits.detach().sigmoid()
    z = with_stream(lambda: torch.bernoulli(posterior.expand(count, num_data, 4)))
    divergence = posterior * (posterior / probability).log()
    divergence = divergence + (1 - posterior) * ((1 - posterior) / (1 - probability)).log()
    likelihood = dist.Normal(z @ weight, 1.0).log_prob(x).sum(-1).mean(0)
    assert abs(loss - float((divergence.sum(-1) - likelihood).sum())) < 1e-10


@pytest.mark.parametrize(("count", "num_data"), [(3, 7), (3, 3), (1, 7), (5, 4)])
def test_discrete_codes_whose_prior_has_the_shape_of_one(count, num_data):
    check_discrete(count, num_data)


def test_a_prior_of_another_shape_is_noticed(monkeypatch):
    monkeypatch.setattr(terms, "_alike", lambda posterior, prior: (posterior, prior))
    with pytest.raises((IndexError, AssertionError)):
        check_discrete(3, 7)


def test_second_derivatives_of_bernoulli_pixels():
    value = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    logits = with_stream(lambda: torch.randn(2, 4)).requires_grad_()

    def density(logits):
        return site_log_density(dist.Bernoulli(logits=logits).to_event(1), value)

    assert torch.autograd.gradcheck(density, (logits,))
    assert torch.autograd.gradgradcheck(density, (logits,))
