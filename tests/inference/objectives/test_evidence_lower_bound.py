import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, LossError, SettingsError
from bayeskit.inference.objectives import ELBO, IWAE, Cyclical, Linear, infomax_weight
from bayeskit.inference.objectives._objective import Draw

ELBO_VALUE = -1.674299  # x = 1, q = N(0.2, 0.9), six digits
KL_VALUE = -math.log(0.9) + (0.81 + 0.04 - 1) / 2


class Quadrature(dist.Normal):
    """Instead of draws, all combinations of one standard deviation up and down: exact for quadratic functions."""

    position = 0

    def rsample(self, sample_shape=()):
        shape = self._extended_shape(sample_shape)
        signs = 1.0 - 2.0 * (torch.arange(shape[0]) // 2**self.position % 2).to(self.loc.dtype)
        return self.loc + self.scale * signs.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


class SecondQuadrature(Quadrature):
    position = 1


@pytest.fixture(autouse=True)
def stream():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with global_stream(new_generator(7, stream="test")), pyro.get_param_store().scope():
        yield
    torch.set_default_dtype(before)


def model(x, size=None):
    with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x, size=None):
    with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
        pyro.sample("z", Quadrature(torch.tensor(0.2), torch.tensor(0.9)))


ONE = torch.ones(1)


@pytest.mark.parametrize("analytic_kl", [True, False])
def test_the_exact_value(analytic_kl):
    loss = ELBO(2, analytic_kl=analytic_kl).loss(model, guide, ONE)
    likelihood = -0.5 * math.log(2 * math.pi) - 0.5 * (0.8**2 + 0.81)
    assert abs(loss + likelihood - KL_VALUE) < 1e-12
    assert abs(loss + ELBO_VALUE) < 5e-7


def test_draws_agree_with_the_exact_value(limit):
    def random_guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.tensor(0.2), torch.tensor(0.9)))

    objective = ELBO(20_000, analytic_kl=False)
    weights = Draw(objective, model, random_guide, (ONE,), {})(20_000).log_weight[:, 0]
    z = (float(weights.mean()) - ELBO_VALUE) / (float(weights.std()) / 20_000**0.5)
    assert abs(z) < limit()


@pytest.mark.parametrize("weight", [0.0, 0.5, 4.0])
def test_the_divergence_is_weighted(weight):
    assert abs(ELBO(2, kl_weight=weight).loss(model, guide, ONE) + ELBO_VALUE - (weight - 1) * KL_VALUE) < 5e-7


def test_schedules_count_training_steps_and_are_resumed():
    objective, constant = ELBO(2, kl_weight=Linear(4)), ELBO(2, kl_weight=0.0)
    zero = constant.loss(model, guide, ONE)
    steps = [float(objective.differentiable_loss(model, guide, ONE)) - zero for _ in range(6)]
    assert max(abs(s - w * KL_VALUE) for s, w in zip(steps, (0, 0.25, 0.5, 0.75, 1, 1), strict=True)) < 1e-12
    resumed = ELBO(2, kl_weight=Linear(10))
    resumed.load_state_dict({"num_steps": torch.tensor(3)})
    assert abs(resumed.loss(model, guide, ONE) - zero - 0.3 * KL_VALUE) < 1e-12
    assert int(resumed.state_dict()["num_steps"]) == 3  # evaluating is no step
    assert [Cyclical(4)(step) for step in range(6)] == [0.0, 0.5, 1.0, 1.0, 0.0, 0.5]
    assert abs(infomax_weight(3.0) - 0.25) < 1e-15


def test_free_bits_stop_the_gradient_of_small_divergences():
    loc = torch.tensor(0.2, requires_grad=True)

    def trained(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", Quadrature(loc, torch.tensor(0.9)))

    def value_and_gradient(free_bits):
        (gradient,) = torch.autograd.grad(
            loss := ELBO(2, free_bits=free_bits).differentiable_loss(model, trained, ONE), loc
        )
        return float(loss.detach()), float(gradient)

    # d KL / d loc = loc and d E log p(x | z) / d loc = x - loc.
    for bits, kl, slope in ((0.0, KL_VALUE, 0.2), (KL_VALUE - 1e-6, KL_VALUE, 0.2), (KL_VALUE + 1e-6, None, 0.0)):
        loss, gradient = value_and_gradient(bits)
        assert abs(loss + ELBO_VALUE - ((bits if kl is None else kl) - KL_VALUE)) < 5e-7
        assert abs(gradient - (slope - 0.8)) < 1e-12


def test_subsampling_scales_the_loss_up():
    assert abs(ELBO(2).loss(model, guide, torch.ones(3), 12) + 12 * ELBO_VALUE) < 12 * 5e-7


def grid_model(x):
    with pyro.plate("rows", x.shape[0], dim=-2):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("columns", x.shape[1], dim=-1):
            w = pyro.sample("w", dist.Normal(z, 0.5))
            pyro.sample("x", dist.Normal(w, 1.0), obs=x)


def grid_guide(x):
    with pyro.plate("rows", x.shape[0], dim=-2):
        z = pyro.sample("z", Quadrature(torch.tensor(0.1), torch.tensor(0.7)))
        with pyro.plate("columns", x.shape[1], dim=-1):
            pyro.sample("w", SecondQuadrature(0.3 * z + 0.2, torch.tensor(0.6)))


def test_nested_plates_give_one_bound_a_row():
    x = torch.arange(6.0).reshape(2, 3) / 5

    def expected(row):
        z, w = dist.Normal(0.1, 0.7), (0.3 * 0.1 + 0.2, 0.6**2 + (0.3 * 0.7) ** 2)
        value = -kl_divergence(z, dist.Normal(torch.zeros(()), 1.0))
        for datum in row:
            # E KL(N(0.3 z + 0.2, 0.6) || N(z, 0.5)) and E log N(x; w, 1)
            gap = (0.2 - 0.7 * 0.1) ** 2 + 0.49 * 0.49
            value = value - (math.log(0.5 / 0.6) + (0.36 + gap) / 0.5 - 0.5)
            value = value - 0.5 * math.log(2 * math.pi) - 0.5 * ((datum - w[0]) ** 2 + w[1])
        return float(value)

    for analytic_kl in (True, False):
        objective = ELBO(4, analytic_kl=analytic_kl)
        estimate = objective.estimate(Draw(objective, grid_model, grid_guide, (x,), {}))
        assert estimate.shape == (2,)
        assert max(abs(float(e) - expected(row)) for e, row in zip(estimate, x, strict=True)) < 1e-12


def reversed_model(x):
    with pyro.plate("data", len(x)):
        second = pyro.sample("second", dist.Normal(torch.zeros(()), 1.0))
        first = pyro.sample("first", dist.Normal(0.8 * second, 0.5))
        pyro.sample("x", dist.Normal(first, 1.0), obs=x)


def reversed_guide(x):
    with pyro.plate("data", len(x)):
        first = pyro.sample("first", Quadrature(0.5 * x, torch.tensor(0.6)))
        pyro.sample("second", SecondQuadrature(0.4 * first, torch.tensor(0.7)))


def test_closed_forms_are_used_only_where_they_stand_for_the_difference_of_log_densities():
    x = torch.tensor([1.0, -0.4])
    sampled, closed = (ELBO(4, analytic_kl=a) for a in (False, True))
    particles = Draw(closed, reversed_model, reversed_guide, (x,), {})(4, analytic_kl=True)
    # The model's "first" is conditioned on "second", which the guide draws later.
    assert set(particles.kl) == {"second"}
    value = sampled.loss(reversed_model, reversed_guide, x)
    assert abs(closed.loss(reversed_model, reversed_guide, x) - value) < 1e-12
    # Mutation: the closed form of that site, too.
    sites = particles.guide_sites["first"]["fn"], particles.model_sites["first"]["fn"]
    wrong = kl_divergence(*sites).mean(0)
    right = (particles.log_guide["first"] - particles.log_prior["first"]).mean(0)
    assert float((wrong - right).abs().min()) > 0.01


def test_a_loss_that_is_not_finite_names_the_site():
    def broken(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z * math.nan, 1.0, validate_args=False), obs=x)

    for objective in (ELBO(2), IWAE(3)):
        with pytest.raises(LossError, match="site 'x' is not finite; lower the learning rate"):
            objective.loss_and_grads(broken, guide, ONE)


def plated(x, *sites):
    with pyro.plate("data", len(x)):
        for name, fn in sites:
            pyro.sample(name, fn)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ([], "no site for the latent site 'z'"),
        ([("z", dist.Normal(0.0, 1.0)), ("w", dist.Normal(0.0, 1.0))], "a site 'w' that the model lacks"),
        ([("z", dist.Normal(0.0, 1.0)), ("x", dist.Normal(0.0, 1.0))], "'x', which the model observes"),
        ([("z", dist.Poisson(1.0))], "site 'z': the guide's Poisson has support"),
    ],
)
def test_guides_that_do_not_fit_are_refused(sites, message):
    with pytest.raises(GuideError, match=message):
        ELBO().loss(model, lambda x: plated(x, *sites), ONE)


def test_a_guide_wider_than_the_prior_is_refused():
    def bounded(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Uniform(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    with pytest.raises(GuideError, match="site 'z': the guide's Normal"):
        ELBO().loss(bounded, lambda x: plated(x, ("z", dist.Normal(0.5, 0.1))), ONE)


def test_weights_of_data_need_their_plate():
    def loose(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def loose_guide(x):
        pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    with pytest.raises(GuideError, match="site 'z' stands outside the plate 'data'"):
        IWAE(3, data_plate="data").loss(loose, loose_guide, ONE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ELBO(0), "num_particles"),
        (lambda: IWAE(0), "num_particles"),
        (lambda: ELBO(2.5), "num_particles"),
        (lambda: ELBO(chunk_size=0), "chunk_size"),
        (lambda: ELBO(kl_weight=-1.0), "kl_weight"),
        (lambda: ELBO(kl_weight=math.nan), "kl_weight"),
        (lambda: ELBO(free_bits=-1.0), "free_bits"),
        (lambda: infomax_weight(-0.1), "information"),
        (lambda: Linear(0), "num_steps"),
        (lambda: Cyclical(1), "period"),
    ],
)
def test_settings_outside_their_domain_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()
