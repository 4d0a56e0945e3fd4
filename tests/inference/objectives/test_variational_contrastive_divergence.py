"""Variational contrastive divergence against closed forms: target N(0, 1), guide N(m, s^2), AR(1) chains."""

import copy
import math
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.objectives import _variational_contrastive_divergence as module
from bayeskit.inference.objectives._variational_contrastive_divergence import VCD
from bayeskit.inference.samplers import HMC

MEAN, SCALE, RHO = 1.2, 0.7, 0.6
KNOWN = {0: 0.0, 1: 0.865763, 3: 1.842601}
SYMMETRISED = 2.454796


@pytest.fixture(autouse=True)
def fixed_stream():
    with global_stream(new_generator(0, stream="test")):
        yield


class ChainState(NamedTuple):
    position: torch.Tensor


class AutoregressiveKernel:
    """Leaves N(mean, scale^2) invariant."""

    def __init__(self, mean=0.0, scale=1.0):
        self.mean, self.scale = mean, scale

    def init(self, target, position):
        return ChainState(position)

    def step(self, target, state, *, generator):
        noise = torch.randn(state.position.shape, dtype=state.position.dtype, generator=generator)
        away = RHO * (state.position - self.mean) + math.sqrt(1 - RHO**2) * self.scale * noise
        return ChainState(self.mean + away), None


def kl(mean_1, variance_1, mean_2, variance_2):
    ratio = variance_1 / variance_2
    return 0.5 * (ratio + (mean_1 - mean_2) ** 2 / variance_2 - 1 - torch.log(ratio))


def closed_form(mean, scale, num_steps):
    one, share = torch.ones_like(mean), RHO**num_steps
    variance = scale**2
    mean_t, variance_t = share * mean, share**2 * variance + 1 - share**2
    return (
        kl(mean, variance, 0 * one, one) - kl(mean_t, variance_t, 0 * one, one) + kl(mean_t, variance_t, mean, variance)
    )


def copies(value, n):
    """Return a parameter of every datum, so that one run gives ``n`` gradients."""
    return torch.full((n,), value, dtype=torch.float64, requires_grad=True)


def normal_pair(n, mean, scale):
    def model():
        with pyro.plate("data", n):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))

    def guide():
        with pyro.plate("data", n):
            pyro.sample("z", dist.Normal(mean, scale))

    return model, guide


def exact_chains(num_steps, **settings):
    return VCD(num_steps=num_steps, kernel=AutoregressiveKernel(), target_acceptance=None, **settings)


def per_datum(objective, model, guide, *args):
    """Return the divergence of each datum, differentiable."""
    return -objective.estimate(module.Draw(objective, model, guide, args, {}))


def z_score(draws, expected):
    return abs(float((draws.mean() - expected) / (draws.std() / math.sqrt(len(draws)))))


def test_closed_form_has_the_known_values():
    mean, scale = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(SCALE, dtype=torch.float64)
    for num_steps, known in KNOWN.items():
        assert float(closed_form(mean, scale, num_steps)) == pytest.approx(known, abs=5e-7)
    assert float(closed_form(mean, scale, 50)) == pytest.approx(SYMMETRISED, abs=5e-7)


@pytest.mark.parametrize("num_steps", [1, 3, 50])
def test_value_is_that_of_the_closed_form(num_steps, limit):
    n = 100_000
    mean, scale = copies(MEAN, n), copies(SCALE, n)
    with torch.no_grad():
        draws = per_datum(exact_chains(num_steps), *normal_pair(n, mean, scale))
    assert z_score(draws, KNOWN.get(num_steps, SYMMETRISED)) < limit(3)


def test_no_steps_give_zero_and_no_gradient_on_average(limit):
    n = 50_000
    mean, scale = copies(MEAN, n), copies(SCALE, n)
    loss = exact_chains(0)
    value = per_datum(loss, *normal_pair(n, mean, scale))
    assert float(value.detach().abs().max()) == 0.0
    value.sum().backward()
    assert z_score(mean.grad, 0.0) < limit(2)
    assert z_score(scale.grad, 0.0) < limit(2)


def gradient_scores(num_steps, num_particles=1):
    n = 60_000
    mean, scale = copies(MEAN, n), copies(SCALE, n)
    objective = exact_chains(num_steps, num_particles=num_particles)
    model, guide = normal_pair(n, mean, scale)
    for _ in range(2):  # once with the others' mean, once with the moving average for control variate
        value = per_datum(objective, model, guide)
    value.sum().backward()
    point = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (MEAN, SCALE)]
    exact = torch.autograd.grad(closed_form(*point, num_steps), point)
    return [z_score(found.grad, e) for found, e in zip((mean, scale), exact, strict=True)]


@pytest.mark.parametrize(("num_steps", "num_particles"), [(1, 1), (3, 1), (3, 2), (20, 1)])
def test_gradient_is_that_of_the_closed_form(num_steps, num_particles, limit):
    assert max(gradient_scores(num_steps, num_particles)) < limit(8)


@pytest.mark.parametrize("which", ["score", "after", "before"])
def test_a_sign_dropped_is_noticed(which, monkeypatch, limit):
    right = module.contrastive_estimate

    def wrong(before, joint_after, guide_after, score, control_variate):
        flip = dict(zip(("before", "after", "score"), (before, guide_after, score), strict=True))
        flip[which] = 2 * flip[which].detach() - flip[which]  # same value, opposite gradient
        return right(flip["before"], joint_after, flip["after"], flip["score"], control_variate)

    monkeypatch.setattr(module, "contrastive_estimate", wrong)
    assert max(gradient_scores(3)) > 5 * limit(8)


def test_gradient_is_the_finite_difference_with_common_random_numbers(limit):
    n, num_steps, gap = 60_000, 3, 1e-4
    mean, scale = copies(MEAN, n), copies(SCALE, n)
    per_datum(exact_chains(num_steps), *normal_pair(n, mean, scale)).sum().backward()

    def with_same_numbers(shift):
        with global_stream(new_generator(1, stream="common")), torch.no_grad():
            return per_datum(exact_chains(num_steps), *normal_pair(n, mean + shift, scale))

    difference = (with_same_numbers(gap) - with_same_numbers(-gap)) / (2 * gap)
    error = math.sqrt(float(mean.grad.var() + difference.var()) / n)
    assert abs(float(mean.grad.mean() - difference.mean())) < limit() * error
    # The estimator is no path derivative of its value: draw by draw the two differ.
    assert float((mean.grad - difference).abs().mean()) > 0.1


def conjugate_pair(x, shift, mean, scale):
    def model():
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
            pyro.sample("x", dist.Normal(z + shift, 1.0), obs=x)

    def guide():
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(mean, scale))

    return model, guide


def test_model_climbs_the_joint_density_at_the_end_of_the_chains(limit):
    n, b, x = 50_000, 0.3, 1.0
    shift, mean, scale = copies(b, n), copies(MEAN, n), copies(SCALE, n)
    posterior_mean = (x - b) / 2
    kernel = AutoregressiveKernel(posterior_mean, math.sqrt(0.5))
    objective = VCD(num_steps=2, kernel=kernel, target_acceptance=None)
    model, guide = conjugate_pair(torch.full((n,), x, dtype=torch.float64), shift, mean, scale)
    per_datum(objective, model, guide).sum().backward()
    expected_z = posterior_mean + RHO**2 * (MEAN - posterior_mean)
    assert z_score(-shift.grad, x - b - expected_z) < limit()


def test_zero_at_the_posterior_and_hmc_keeps_it():
    n = 100
    x = torch.linspace(-1, 1, n, dtype=torch.float64)
    model, guide = conjugate_pair(x, 0.0, x / 2, math.sqrt(0.5))
    assert float(per_datum(VCD(num_steps=3), model, guide).detach().abs().max()) < 1e-12


def test_hmc_from_far_away_comes_near_the_symmetrised_divergence(limit):
    n = 10_000
    model, guide = normal_pair(n, copies(MEAN, n), copies(SCALE, n))
    objective = VCD(num_steps=30, kernel=HMC(step_size=0.5, num_steps=4), target_acceptance=None)
    with torch.no_grad():
        draws = per_datum(objective, model, guide)
    assert z_score(draws, SYMMETRISED) < limit()


@pytest.mark.calibration
def test_step_size_is_moved_until_the_acceptance_is_as_wanted(limit):
    n, tail = 500, 50
    model, guide = normal_pair(n, copies(0.0, n), copies(1.0, n))
    objective = VCD(num_steps=2, kernel=HMC(step_size=0.1, num_steps=3), target_acceptance=0.8, adaptation_rate=0.5)
    rates = []
    for _ in range(150):
        objective.loss_and_grads(model, guide)
        rates.append(objective.acceptance_rate)
    assert rates[0] > 0.99
    last = torch.tensor(rates[-tail:])
    assert z_score(last, 0.8) < limit()
    before = objective.state_dict()
    objective.loss(model, guide)  # an evaluation teaches nothing
    assert torch.equal(before["log_factor"], objective.state_dict()["log_factor"])


def test_training_resumes_bit_for_bit():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)

    def setting():
        torch.manual_seed(0)
        table = torch.zeros(9, dtype=torch.float64, requires_grad=True)

        def model():
            with pyro.plate("data", 9, subsample_size=4) as i:
                z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

        def guide():
            with pyro.plate("data", 9, subsample_size=4) as i:
                pyro.sample("z", dist.Normal(table[i], 1.0))

        return table, model, guide

    def train(objective, table, model, guide, steps):
        for _ in range(steps):
            objective.loss_and_grads(model, guide)
            with torch.no_grad():
                table -= 0.1 * table.grad
                table.grad = None

    table, model, guide = setting()
    first = VCD(num_steps=2)
    train(first, table, model, guide, 5)
    state, kept, stream = copy.deepcopy(first.state_dict()), table.detach().clone(), torch.get_rng_state()
    train(first, table, model, guide, 5)

    table_2, model, guide = setting()
    with torch.no_grad():
        table_2.copy_(kept)
    second = VCD(num_steps=2)
    second.load_state_dict(state)
    torch.set_rng_state(stream)
    train(second, table_2, model, guide, 5)
    assert torch.equal(table, table_2)
    assert not torch.equal(table_2, kept)
    for name, value in first.state_dict().items():
        assert torch.equal(value.nan_to_num(), second.state_dict()[name].nan_to_num())


class Restart:
    """Puts every chain at one half."""

    def init(self, target, position):
        return ChainState(position)

    def step(self, target, state, *, generator):
        return ChainState(torch.full_like(state.position, 0.5)), None


def subsampled_pair(x):
    def model(indices):
        with pyro.plate("data", len(x), subsample=indices) as i:
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

    def guide(indices):
        with pyro.plate("data", len(x), subsample=indices):
            pyro.sample("z", dist.Normal(torch.ones((), dtype=x.dtype).requires_grad_(), 1.0))

    return model, guide


def test_control_variate_follows_the_datum_through_minibatches():
    x = torch.arange(5, dtype=torch.float64)
    objective = VCD(num_steps=1, kernel=Restart(), target_acceptance=None)
    for batch in ([4, 1], [1, 2], [4, 2]):
        objective.loss_and_grads(*subsampled_pair(x), torch.tensor(batch))
    half = torch.tensor(0.5, dtype=torch.float64)
    weight = dist.Normal(0.0, 1.0).log_prob(half) + dist.Normal(half, 1.0).log_prob(x)
    weight = weight - dist.Normal(1.0, 1.0).log_prob(half)
    table = objective.state_dict()["control_variate"]
    assert table.isnan().tolist() == [True, False, False, True, False]
    assert float((table - weight)[~table.isnan()].abs().max()) < 1e-12


def test_minibatches_scale_the_loss_up():
    objective = VCD(num_steps=1, kernel=Restart(), target_acceptance=None)
    model, guide = subsampled_pair(torch.arange(12, dtype=torch.float64))
    batch, before = torch.tensor([7, 2, 3]), torch.get_rng_state()
    loss = objective.loss(model, guide, batch)
    torch.set_rng_state(before)
    assert loss == pytest.approx(4 * float(per_datum(objective, model, guide, batch).sum().detach()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trains_in_svi_with_hierarchical_constrained_latents(dtype):
    x = torch.tensor([0.5, 2.0, 1.0], dtype=dtype)

    def model():
        with pyro.plate("data", 3):
            scale = pyro.sample("scale", dist.Gamma(torch.tensor(2.0, dtype=dtype), 2.0))
            z = pyro.sample("z", dist.Normal(0 * scale.unsqueeze(-1).expand(*scale.shape, 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), scale), obs=x)

    def guide():
        loc = pyro.param("loc", torch.zeros(3, dtype=dtype))
        with pyro.plate("data", 3):
            scale = pyro.sample("scale", dist.LogNormal(loc, 0.5))
            z_loc = pyro.param("z_loc", torch.zeros(2, dtype=dtype)) + scale.unsqueeze(-1)
            pyro.sample("z", dist.Normal(z_loc, 1.0).to_event(1))

    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), loss=VCD(num_particles=2, num_steps=2))
    losses = [svi.step() for _ in range(3)]
    assert all(math.isfinite(value) for value in losses)
    assert float(pyro.param("loc").detach().abs().min()) > 0
    assert float(pyro.param("z_loc").detach().abs().min()) > 0
    assert pyro.param("loc").dtype == dtype


def test_as_a_module_it_does_the_same():
    x = torch.tensor([1.0, -0.6], dtype=torch.float64)

    class Guide(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self):
            with pyro.plate("data", 2):
                pyro.sample("z", dist.Normal(self.slope * x, 1.0))

    shift = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    model, _ = conjugate_pair(x, shift, 0.0, 1.0)
    results, stream = [], torch.get_rng_state()
    for as_module in (True, False):
        torch.set_rng_state(stream)
        guide, objective, shift.grad = Guide(), VCD(num_particles=3, num_steps=3), None
        if as_module:
            loss = objective(model, guide)()
            loss.backward()
            value = float(loss.detach())
        else:
            value = objective.loss_and_grads(model, guide)
        results.append((value, float(guide.slope.grad), float(shift.grad)))
    assert results[0] == results[1]
    assert all(number != 0 for number in results[0])


def test_refusals():
    def discrete():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Bernoulli(0.5))

    def stuck():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.VonMises(torch.zeros(()), 1.0))

    with pytest.raises(GuideError, match=r"site 'z'.*are not reparameterised"):
        VCD().loss(discrete, discrete)
    with pytest.raises(GuideError, match=r"site 'z'.*are not reparameterised"):
        VCD().loss(stuck, stuck)
    for settings in (
        {"num_steps": -1},
        {"num_steps": 1.5},
        {"num_particles": 0},
        {"target_acceptance": 1.0},
        {"decay": 1.0},
        {"adaptation_rate": 0.0},
        {"kernel": AutoregressiveKernel()},
    ):
        with pytest.raises(SettingsError):
            VCD(**settings)
