"""Bounds for guides with auxiliary sites, where the marginal is known: normal mixtures of normals, and of two."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.objectives import _hierarchical as module
from bayeskit.inference.objectives._hierarchical import AuxiliaryELBO
from bayeskit.inference.objectives._objective import Draw

DOUBLE = torch.float64
MEAN, SPREAD, NOISE = 0.2, 0.7, math.sqrt(0.81 - 0.49)  # the marginal is N(0.2, 0.9^2)
ELBO, X = -1.674299, 1.0
LOG_2PI = math.log(2 * math.pi)
AUXILIARY = {"is_auxiliary": True}


@pytest.fixture(autouse=True)
def fixed_stream():
    with global_stream(new_generator(0, stream="test")):
        yield


def point(*numbers):
    return [torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in numbers]


def copies(n, *numbers):
    """Return parameters of every datum, so that one run gives ``n`` gradients."""
    return [torch.full((n,), x, dtype=DOUBLE, requires_grad=True) for x in numbers]


def model(n):
    def run():
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.full((n,), X, dtype=DOUBLE))

    return run


def guide(n, mean, spread, noise):
    def run():
        with pyro.plate("data", n):
            a = pyro.sample("a", dist.Normal(mean, spread), infer=AUXILIARY)
            pyro.sample("z", dist.Normal(a, noise))

    return run


def exact_reverse(n, mean, spread, noise):
    def run(values):
        share = spread**2 / (spread**2 + noise**2)
        with pyro.plate("data", n):
            pyro.sample("a", dist.Normal(mean + share * (values["z"] - mean), noise * share.sqrt()))

    return run


def plain_reverse(n, loc, scale):
    def run(values):
        with pyro.plate("data", n):
            pyro.sample("a", dist.Normal(loc + 0.5 * values["z"], scale))

    return run


def per_datum(objective, *functions):
    return objective.estimate(Draw(objective, *functions, (), {}))


def z_score(draws, expected):
    expected = torch.as_tensor(expected).detach()
    return abs(float((draws.detach().mean() - float(expected)) / (draws.detach().std() / math.sqrt(len(draws)))))


# -- exact values by quadrature over the standard normals behind a_0, z and a_1 -------------------


def normal_log_density(x, mean, scale):
    return -0.5 * ((x - mean) / scale) ** 2 - torch.log(scale) - 0.5 * LOG_2PI


def quadrature(num_auxiliary, mean, spread, noise, reverse=None, nodes=50):
    """Return the bound; ``reverse`` has the parameters of ``plain_reverse``, None is the guide's own prior."""
    at, weight = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    weight = weight / weight.sum()
    one = torch.ones_like(mean)
    a_0 = (mean + spread * at)[:, None, None]
    z = a_0 + noise * at[:, None]
    log_joint = normal_log_density(z, 0 * one, one) + normal_log_density(X * one, z, one)

    def ratio(a):
        log_z = normal_log_density(z, a, noise)
        if reverse is None:
            return log_z
        loc, scale = reverse
        return log_z + normal_log_density(a, mean, spread) - normal_log_density(a, loc + 0.5 * z, scale)

    if num_auxiliary == 0:
        bound = log_joint - ratio(a_0)
    else:
        a_1 = mean + spread * at if reverse is None else reverse[0] + 0.5 * z + reverse[1] * at
        bound = log_joint - torch.logaddexp(ratio(a_0), ratio(a_1)) + math.log(2.0)
    return (bound * weight[:, None, None] * weight[:, None] * (weight if num_auxiliary else 1.0)).sum()


@pytest.mark.parametrize("num_auxiliary", [0, 1, 4])
@pytest.mark.parametrize("num_particles", [1, 3])
def test_exact_reverse_gives_the_marginal_on_every_draw(num_auxiliary, num_particles, limit):
    n = 20_000
    parameters = copies(n, MEAN, SPREAD, NOISE)
    functions = model(n), guide(n, *parameters)
    objective = AuxiliaryELBO(exact_reverse(n, *parameters), num_particles, num_auxiliary=num_auxiliary)
    drawn = Draw(objective, *functions, (), {})
    value = objective.estimate(drawn)
    z = drawn.last.guide_sites["z"]["value"].reshape(num_particles, n)
    one = torch.ones((), dtype=DOUBLE)
    weight = normal_log_density(z, 0 * one, one) + normal_log_density(X * one, z, one)
    weight = weight - normal_log_density(z, MEAN * one, 0.9 * one)
    torch.testing.assert_close(value, weight.mean(0), rtol=0, atol=1e-10)
    assert z_score(value, ELBO) < limit(6)


CASES = [(0, None), (1, None), (0, (0.1, 0.6)), (1, (0.1, 0.6))]


@pytest.mark.parametrize(("num_auxiliary", "reverse"), CASES)
def test_value_and_gradient_are_those_of_quadrature(num_auxiliary, reverse, limit):
    n = 50_000
    parameters, backward = copies(n, MEAN, SPREAD, NOISE), copies(n, *(reverse or ()))
    objective = AuxiliaryELBO(plain_reverse(n, *backward) if reverse else None, num_auxiliary=num_auxiliary)
    value = per_datum(objective, model(n), guide(n, *parameters))
    value.sum().backward()
    where, where_backward = point(MEAN, SPREAD, NOISE), point(*(reverse or ()))
    exact = quadrature(num_auxiliary, *where, where_backward or None)
    gradient = torch.autograd.grad(exact, [*where, *where_backward])
    assert float(exact.detach()) < ELBO
    assert z_score(value, exact) < limit(24)
    for found, expected in zip([*parameters, *backward], gradient, strict=True):
        assert z_score(found.grad, expected) < limit(24)


def test_quadrature_has_converged():
    for num_auxiliary, reverse in CASES:
        backward = point(*reverse) if reverse else None
        coarse, fine = (
            float(quadrature(num_auxiliary, *point(MEAN, SPREAD, NOISE), backward, nodes=k).detach()) for k in (50, 70)
        )
        assert coarse == pytest.approx(fine, abs=1e-5)


def test_more_auxiliary_draws_tighten_the_bound(limit):
    n, previous = 20_000, None
    parameters = copies(n, MEAN, SPREAD, NOISE)
    for num_auxiliary in (0, 1, 3, 10, 40):
        with torch.no_grad():
            value = per_datum(AuxiliaryELBO(None, num_auxiliary=num_auxiliary), model(n), guide(n, *parameters))
        mean, error = float(value.mean()), float(value.std()) / math.sqrt(n)
        if previous is not None:
            assert mean - previous[0] > -limit(5) * math.hypot(error, previous[1])
        previous = mean, error
    slack = limit(5) * error
    widest = ELBO - float(quadrature(0, *point(MEAN, SPREAD, NOISE)).detach())
    assert -slack < ELBO - mean < widest / 10 + slack


def test_a_reverse_left_out_is_noticed(monkeypatch, limit):
    """Counting the auxiliary draws of the guide without those of the reverse breaks the exact value."""
    n = 20_000
    parameters = copies(n, MEAN, SPREAD, NOISE)
    monkeypatch.setattr(module, "_terms", lambda sites, layout: {"a": torch.zeros((1, n), dtype=DOUBLE)})
    with torch.no_grad():
        value = per_datum(AuxiliaryELBO(exact_reverse(n, *parameters)), model(n), guide(n, *parameters))
    assert z_score(value, ELBO) > 5 * limit()


def two_component_guide(n, logit, gap):
    def run():
        with pyro.plate("data", n):
            a = pyro.sample("a", dist.Bernoulli(logits=logit), infer=AUXILIARY)
            pyro.sample("z", dist.Normal(gap * a, 0.8))

    return run


def two_component_quadrature(num_auxiliary, logit, gap, log_odds):
    """Return the bound with ``a_1`` from Bernoulli(log_odds), or from the guide's own prior where that is None."""
    at, weight = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(60))
    weight, one = weight / weight.sum(), torch.ones_like(logit)
    total = 0.0

    def log_bernoulli(a, logits):
        return torch.nn.functional.logsigmoid(logits if a else -logits)

    for a_0 in (0, 1):
        z = gap * a_0 + 0.8 * at
        log_joint = normal_log_density(z, 0 * one, one) + normal_log_density(X * one, z, one)

        def ratio(a, z=z):
            own = 0.0 if log_odds is None else log_bernoulli(a, logit) - log_bernoulli(a, log_odds)
            return normal_log_density(z, gap * a, 0.8 * one) + own

        probability = log_bernoulli(a_0, logit).exp()
        if num_auxiliary == 0:
            total = total + probability * (weight * (log_joint - ratio(a_0))).sum()
            continue
        for a_1 in (0, 1):
            bound = log_joint - torch.logaddexp(ratio(a_0), ratio(a_1)) + math.log(2.0)
            chance = log_bernoulli(a_1, logit if log_odds is None else log_odds).exp()
            total = total + probability * chance * (weight * bound).sum()
    return total


@pytest.mark.parametrize(("num_auxiliary", "log_odds"), [(0, 0.5), (1, None), (1, 0.5)])
@pytest.mark.parametrize("num_particles", [1, 2])
def test_discrete_auxiliary_sites_have_unbiased_gradients(num_auxiliary, log_odds, num_particles, limit):
    n = 50_000
    logit, gap = copies(n, -0.4, 1.5)
    backward = copies(n, *([] if log_odds is None else [log_odds]))

    def reverse(values):
        with pyro.plate("data", n):
            pyro.sample("a", dist.Bernoulli(logits=backward[0]))

    objective = AuxiliaryELBO(reverse if backward else None, num_particles, num_auxiliary=num_auxiliary)
    value = per_datum(objective, model(n), two_component_guide(n, logit, gap))
    value.sum().backward()
    where, where_backward = point(-0.4, 1.5), point(*([] if log_odds is None else [log_odds]))
    exact = two_component_quadrature(num_auxiliary, *where, where_backward[0] if where_backward else None)
    gradient = torch.autograd.grad(exact, [*where, *where_backward])
    assert z_score(value, exact) < limit(24)
    for found, expected in zip([logit, gap, *backward], gradient, strict=True):
        assert z_score(found.grad, expected) < limit(24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trains_reverse_and_guide_in_svi_on_minibatches(dtype):
    x = torch.linspace(-1, 1, 10, dtype=dtype)
    network = torch.nn.Linear(2, 1, dtype=dtype)

    def joint():
        with pyro.plate("data", 10, subsample_size=4) as i:
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=dtype), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

    def mixture():
        loc = pyro.param("loc", torch.zeros((), dtype=dtype))
        with pyro.plate("data", 10, subsample_size=4):
            a = pyro.sample("a", dist.Normal(loc, torch.ones((), dtype=dtype)), infer=AUXILIARY)
            pyro.sample("z", dist.Normal(a, 0.5))

    def reverse(values):
        pyro.module("reverse", network)
        with pyro.plate("data", 10, subsample_size=4) as i:
            z = values["z"]
            inputs = torch.stack([z, x[i].expand(z.shape)], -1)
            pyro.sample("a", dist.Normal(network(inputs).squeeze(-1), 1.0))

    before = network.weight.detach().clone()
    optimizer = pyro.optim.Adam({"lr": 0.01})
    for num_auxiliary in (0, 3):
        loss = AuxiliaryELBO(reverse, num_particles=2, num_auxiliary=num_auxiliary)
        svi = pyro.infer.SVI(joint, mixture, optimizer, loss=loss)
        assert all(math.isfinite(svi.step()) for _ in range(3))
    assert not torch.equal(before, network.weight.detach())
    assert float(pyro.param("loc").detach()) != 0.0


def test_refusals():
    def without():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))

    def wrong(values):
        with pyro.plate("data", 3):
            pyro.sample("b", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))

    def too_many(values):
        with pyro.plate("data", 3):
            pyro.sample("a", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("b", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))

    right = guide(3, *point(MEAN, SPREAD, NOISE))
    with pytest.raises(GuideError, match="no auxiliary site"):
        AuxiliaryELBO(None).loss(model(3), without)
    for num_auxiliary in (0, 2):
        with pytest.raises(GuideError, match="auxiliary 'a'"):
            AuxiliaryELBO(wrong, num_auxiliary=num_auxiliary).loss(model(3), right)
        with pytest.raises(GuideError, match="'b' that is no auxiliary"):
            AuxiliaryELBO(too_many, num_auxiliary=num_auxiliary).loss(model(3), right)
    with pytest.raises(SettingsError, match="num_auxiliary"):
        AuxiliaryELBO(None, num_auxiliary=-1)
    with pytest.raises(SettingsError, match="num_particles"):
        AuxiliaryELBO(None, 0)
