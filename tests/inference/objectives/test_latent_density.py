"""The density of each datum's latent variables, row by row, against densities written by hand."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.transforms import bijection
from bayeskit.errors import GuideError, SettingsError, ShapeError
from bayeskit.inference.objectives._latent_density import LatentDensity
from bayeskit.inference.samplers import HMC

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def fixed_stream():
    with global_stream(new_generator(0, stream="test")):
        yield


def number(value):
    return torch.tensor(value, dtype=DOUBLE)


X = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=DOUBLE)


def mixed_model(x):
    """Half-line, an interval that ends where the half-line's site is, simplex, and an inner plate of vectors."""
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Gamma(number(2.0), 1.5))
        b = pyro.sample("b", dist.Uniform(number(0.0), a))
        w = pyro.sample("w", dist.Dirichlet(torch.full((3,), 2.0, dtype=DOUBLE)))
        with pyro.plate("inner", 2, dim=-2):
            z = pyro.sample("z", dist.Normal(b.unsqueeze(-1).expand(*b.shape, 3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(a * w[..., 0] + z.sum(-1).sum(-2, keepdim=z.dim() > 3), 1.0), obs=x)


def mixed_guide(x):
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.LogNormal(number(0.2), 0.5))
        b = pyro.sample("b", dist.Uniform(number(0.0), a))
        pyro.sample("w", dist.Dirichlet(torch.full((3,), 3.0, dtype=DOUBLE)))
        with pyro.plate("inner", 2, dim=-2):
            pyro.sample("z", dist.Normal(b.unsqueeze(-1).expand(*b.shape, 3), 2.0).to_event(1))


def by_hand(values, x):
    """Return log prior, log likelihood and log guide without Jacobians, ``(*particles, data)``."""
    a, b, w, z = (values[name] for name in "abwz")
    if a.dim() == 3:  # drop the dimension of the inner plate
        a, b, w = a.squeeze(1), b.squeeze(1), w.squeeze(1)
    z = z.movedim(-3, -2)  # (..., data, inner, event)
    prior = (
        dist.Gamma(number(2.0), 1.5).log_prob(a)
        - a.log()
        + dist.Dirichlet(torch.full((3,), 2.0, dtype=DOUBLE)).log_prob(w)
        + dist.Normal(b[..., None, None], 1.0).log_prob(z).sum((-1, -2))
    )
    likelihood = dist.Normal(a * w[..., 0] + z.sum((-1, -2)), 1.0).log_prob(x)
    guide = (
        dist.LogNormal(number(0.2), 0.5).log_prob(a)
        - a.log()
        + dist.Dirichlet(torch.full((3,), 3.0, dtype=DOUBLE)).log_prob(w)
        + dist.Normal(b[..., None, None], 2.0).log_prob(z).sum((-1, -2))
    )
    return prior, likelihood, guide


def jacobian_by_hand(values):
    """Return the log determinants of exponential, scaled logistic and stick-breaking map."""
    a, b, w = values["a"], values["b"], values["w"]
    if a.dim() == 3:
        a, b, w = a.squeeze(1), b.squeeze(1), w.squeeze(1)
    sticks = torch.stack([w[..., 0], w[..., 1] / (1 - w[..., 0])], -1)
    lengths = torch.stack([torch.ones_like(w[..., 0]), 1 - w[..., 0]], -1)
    breaking = (sticks * (1 - sticks) * lengths).log().sum(-1)
    return a.log() + (b * (1 - b / a)).log() + breaking


def mixed(num_particles, **settings):
    return LatentDensity.from_pyro(mixed_model, mixed_guide, (X,), num_particles=num_particles, **settings)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("initial", ["prior", "guide"])
def test_densities_are_those_written_by_hand(num_particles, initial):
    density = mixed(num_particles, initial=initial)
    assert (density.num_rows, density.dim, density.dtype) == (4 * num_particles, 10, DOUBLE)
    u = density.position + 0.3 * torch.randn(density.num_rows, density.dim, dtype=DOUBLE)
    values = density.unflatten(u)
    prior, likelihood, guide = (term.reshape(-1) for term in by_hand(values, X))
    jacobian = jacobian_by_hand(values).reshape(-1)
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(density.log_prior(u), prior + jacobian, **close)
    torch.testing.assert_close(density.log_likelihood(u), likelihood, **close)
    torch.testing.assert_close(density.log_joint(u), prior + jacobian + likelihood, **close)
    torch.testing.assert_close(density.log_guide(u), guide + jacobian, **close)
    beta = torch.linspace(0, 1, density.num_rows, dtype=DOUBLE)
    first = (guide if initial == "guide" else prior) + jacobian
    expected = (1 - beta) * first + beta * (prior + jacobian + likelihood)
    torch.testing.assert_close(density.log_density(u, beta), expected, **close)
    evaluation = density.evaluator(density.num_rows)(u, beta)
    torch.testing.assert_close(evaluation.log_density, expected, **close)
    torch.testing.assert_close(evaluation.log_prior + evaluation.log_likelihood, density.log_joint(u), **close)


@pytest.mark.parametrize("num_particles", [1, 3])
def test_rows_are_values_and_back(num_particles):
    density = mixed(num_particles)
    u = torch.randn(density.num_rows, density.dim, dtype=DOUBLE)
    values = density.unflatten(u)
    lead = () if num_particles == 1 else (num_particles,)
    inner = () if num_particles == 1 else (1,)
    assert values["z"].shape == (*lead, 2, 4, 3)
    assert values["w"].shape == (*lead, *inner, 4, 3)
    torch.testing.assert_close(density.flatten(values), u, rtol=0, atol=1e-10)
    assert density.by_datum(u).shape == (num_particles, 4, 10)


@pytest.mark.parametrize("initial", ["prior", "guide"])
def test_gradient_is_the_finite_difference_and_rows_do_not_mix(initial):
    density = mixed(2, initial=initial)
    u, gap = density.position, 1e-6
    beta = torch.linspace(0.1, 1, density.num_rows, dtype=DOUBLE)
    gradient = density.evaluator(density.num_rows)(u, beta).gradient
    for column in range(density.dim):
        shift = torch.zeros_like(u)
        shift[:, column] = gap
        difference = (density.log_density(u + shift, beta) - density.log_density(u - shift, beta)) / (2 * gap)
        torch.testing.assert_close(gradient[:, column], difference, rtol=1e-6, atol=1e-7)
    moved = u.clone()
    moved[3] += 1.0
    changed = density.log_joint(moved) != density.log_joint(u)
    assert changed.nonzero().flatten().tolist() == [3]


def positive(n):
    def model():
        with pyro.plate("data", n):
            pyro.sample("s", dist.Gamma(number(3.0), 1.0))

    return model


def integral(density):
    """Integrate the prior over the first coordinate by the trapezium rule, one row a grid point."""
    grid = torch.linspace(-12, 5, density.num_rows, dtype=DOUBLE)
    return float(torch.trapezoid(density.log_prior(grid.unsqueeze(-1)).exp(), grid))


def test_prior_integrates_to_one_over_the_line(monkeypatch):
    density = LatentDensity.from_pyro(positive(2001), positive(2001))
    assert integral(density) == pytest.approx(1.0, abs=1e-10)
    # Without the Jacobian it is the mean of 1 / s, one half.
    transform = bijection(dist.Gamma(3.0, 1.0).support)
    monkeypatch.setattr(type(transform), "log_abs_det_jacobian", lambda self, x, y: 0 * x)
    assert integral(density) == pytest.approx(0.5, abs=1e-6)


def conjugate(x, precision):
    def model():
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(number(0.0), 1.0))
            pyro.sample("x", dist.Normal(z, precision**-0.5), obs=x)

    def guide():
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros_like(x), 1.0))

    return model, guide


def test_hmc_finds_the_posterior_of_every_datum_with_its_own_step_size(limit):
    num_particles = 500
    x, precision = torch.tensor([0.0, 1.0, -3.0], dtype=DOUBLE), torch.tensor([0.5, 4.0, 99.0], dtype=DOUBLE)
    model, guide = conjugate(x, precision)
    density = LatentDensity.from_pyro(model, guide, num_particles=num_particles)
    scale = (1 + precision) ** -0.5
    kernel = HMC(step_size=(0.7 * scale).repeat(num_particles), num_steps=3)
    generator = new_generator(0, stream="chains")
    state = kernel.init(density, density.position)
    for _ in range(60):
        state, info = kernel.step(density, state, generator=generator)
    assert not bool(info.diverging.any())
    draws = density.by_datum(state.position).squeeze(-1)
    z = (draws - x * precision / (1 + precision)) / scale
    assert float(z.mean(0).abs().max()) * math.sqrt(num_particles) < limit(6)
    assert float((z.square().mean(0) - 1).abs().max()) / math.sqrt(2 / num_particles) < limit(6)


def test_draws_come_from_prior_and_guide(limit):
    x = torch.full((4000,), 7.0, dtype=DOUBLE)
    model, _ = conjugate(x, number(1.0))

    def guide():
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.full_like(x, 2.0), 0.5))

    density = LatentDensity.from_pyro(model, guide, initial="guide")
    generator = new_generator(1, stream="draws")
    prior, first = density.sample_prior(generator), density.sample_initial(generator)
    assert abs(float(prior.mean())) * math.sqrt(4000) < limit(2)
    assert abs(float(first.mean()) - 2.0) / 0.5 * math.sqrt(4000) < limit(2)


def test_parameters_get_no_gradient_from_evaluations_but_can_have_one():
    weight = torch.tensor(0.7, dtype=DOUBLE, requires_grad=True)

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(number(0.0), 1.0))
            pyro.sample("x", dist.Normal(weight * z, 1.0), obs=X)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(weight * X, 1.0))

    density = LatentDensity.from_pyro(model, guide, initial="guide")
    u = density.position
    evaluation = density.evaluator(4)(u, torch.full((4,), 0.5, dtype=DOUBLE))
    assert weight.grad is None
    assert not any(part.requires_grad for part in evaluation)
    z = u.squeeze(-1)
    (found,) = torch.autograd.grad(density.log_joint(u).sum(), weight)
    torch.testing.assert_close(found, ((X - weight * z) * z).sum().detach(), rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(density.log_guide(u).sum(), weight)
    torch.testing.assert_close(found, ((z - weight * X) * X).sum().detach(), rtol=1e-12, atol=1e-12)


def test_a_subsample_stays_the_same():
    x = torch.arange(100, dtype=DOUBLE)
    drawn = []

    def model():
        with pyro.plate("data", 100, subsample_size=5) as i:
            drawn.append(i)
            z = pyro.sample("z", dist.Normal(number(0.0), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

    def guide():
        with pyro.plate("data", 100, subsample_size=5):
            pyro.sample("z", dist.Normal(number(0.0), 1.0))

    density = LatentDensity.from_pyro(model, guide, num_particles=2)
    zero = torch.zeros(10, 1, dtype=DOUBLE)
    expected = 2 * dist.Normal(0.0, 1.0).log_prob(zero[:5, 0]) - 0.5 * x[drawn[-1]].square()
    for _ in range(2):  # each datum's own density, not scaled up
        torch.testing.assert_close(density.log_joint(zero), expected.repeat(2), rtol=1e-12, atol=0)


def test_latents_outside_the_plates_make_one_row_of_all_data():
    def model():
        mean = pyro.sample("mean", dist.Normal(number(0.0), 1.0))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    def guide():
        pyro.sample("mean", dist.Normal(number(0.0), 1.0))
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(number(0.0), 1.0))

    density = LatentDensity.from_pyro(model, guide, num_particles=3)
    assert density.position.shape == (3, 5)
    u = torch.randn(3, 5, dtype=DOUBLE)
    mean, z = u[:, :1], u[:, 1:]
    normal = dist.Normal(0.0, 1.0).log_prob
    expected = normal(mean).sum(-1) + (normal(z - mean) + normal(X - z)).sum(-1)
    torch.testing.assert_close(density.log_joint(u), expected, rtol=0, atol=1e-12)


def test_a_chain_that_leaves_for_infinity_is_rejected_alone():
    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(torch.zeros(2, dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(0 * z, z.exp()), obs=torch.ones(2, dtype=DOUBLE))

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(torch.zeros(2, dtype=DOUBLE), 0.1))

    density = LatentDensity.from_pyro(model, guide)
    kernel = HMC(step_size=torch.tensor([1e6, 0.1], dtype=DOUBLE))
    state, info = kernel.step(density, kernel.init(density, density.position), generator=new_generator(0))
    assert info.diverging.tolist() == [True, False]
    assert bool(state.position.isfinite().all())


def test_refusals():
    def discrete():
        with pyro.plate("data", 2):
            pyro.sample("k", dist.Categorical(torch.ones(3, dtype=DOUBLE)))

    def auxiliary():
        a = pyro.sample("a", dist.Normal(number(0.0), 1.0), infer={"is_auxiliary": True})
        with pyro.plate("data", 2):
            pyro.sample("s", dist.LogNormal(a, 1.0))

    def nothing():
        pass

    with pytest.raises(GuideError, match=r"'k' is discrete"):
        LatentDensity.from_pyro(discrete, discrete)
    with pytest.raises(GuideError, match="'s'"):
        LatentDensity.from_pyro(positive(2), nothing)
    density = LatentDensity.from_pyro(positive(2), auxiliary)
    with pytest.raises(GuideError, match=r"'a' is not in the model"):
        density.log_guide(density.position)
    with pytest.raises(ShapeError, match="rows of this density"):
        density.log_joint(torch.zeros(3, 1))
    with pytest.raises(ShapeError, match="not 5"):
        density.evaluator(5)
    with pytest.raises(SettingsError, match="initial"):
        LatentDensity.from_pyro(positive(2), positive(2), initial="posterior")
