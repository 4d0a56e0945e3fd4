"""Sites integrated out by conjugacy: closed forms, gradients, exact draws, and what is not conjugate."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import kstwo

import bayeskit as bk
from bayeskit.errors import DrawsError
from bayeskit.inference import evidence

FLOAT = torch.float64
COUNTS = torch.tensor([1.0, 0, 3, 7, 2, 0], dtype=FLOAT)
WAITS = COUNTS + 0.1
TABLE = torch.tensor([[3.0, 2, 4, 1], [0, 0, 9, 1]], dtype=FLOAT)
LABELS = torch.tensor([0, 1, 1, 3, 3, 3])


def two_shapes():
    return pyro.sample("a", dist.LogNormal(0.0, 1.0)), pyro.sample("b", dist.LogNormal(0.0, 1.0))


def gamma_poisson(y):
    a, b = two_shapes()
    with pyro.plate("groups", len(y)):
        rate = pyro.sample("x", dist.Gamma(a, b))
        pyro.sample("y", dist.Poisson(rate), obs=y)


def beta_binomial(y):
    a, b = two_shapes()
    with pyro.plate("groups", len(y)):
        chance = pyro.sample("x", dist.Beta(a, b))
        pyro.sample("y", dist.Binomial(9, chance), obs=y)


def dirichlet_multinomial(y):
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        chances = pyro.sample("x", dist.Dirichlet(a * torch.ones(y.shape[1], dtype=FLOAT)))
        pyro.sample("y", dist.Multinomial(10, chances), obs=y)


def dirichlet_categorical(y):
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    chances = pyro.sample("x", dist.Dirichlet(a * torch.ones(4, dtype=FLOAT)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(chances), obs=y)


def unknown_variance(y):
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    variance = pyro.sample("x", dist.InverseGamma(a, 1.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, variance.sqrt()), obs=y)


def exponential_waits(y):
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        rate = pyro.sample("x", dist.Exponential(a))
        pyro.sample("y", dist.Exponential(rate), obs=y)


def uniform_chances(y):
    """A uniform prior, which is a beta distribution by another name, beside a probability that is no site."""
    a = pyro.sample("a", dist.Beta(2.0, 2.0))
    with pyro.plate("groups", len(y)):
        chance = pyro.sample("x", dist.Uniform(0.0, 1.0))
        pyro.sample("y", dist.Binomial(9, chance), obs=y)
        pyro.sample("more", dist.Bernoulli(a), obs=(y > 1).to(FLOAT))


def normal_beside_gamma(y):
    """Two families in one model, and one data set each."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        effect = pyro.sample("effect", dist.Normal(mean, 2.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)
        pyro.sample("z", dist.Normal(effect, 1.0), obs=y)


def of_gamma_poisson(v):
    return dist.GammaPoisson(v["a"][:, None], v["b"][:, None]).log_prob(COUNTS).sum(-1)


def of_beta_binomial(v):
    return dist.BetaBinomial(v["a"][:, None], v["b"][:, None], 9).log_prob(COUNTS).sum(-1)


def of_dirichlet_multinomial(v):
    return dist.DirichletMultinomial(v["a"][:, None, None].expand(-1, 2, 4), 10).log_prob(TABLE).sum(-1)


def of_dirichlet_categorical(v):
    a, counts = v["a"][:, None], torch.tensor([1.0, 2, 0, 3], dtype=FLOAT)
    lgamma = torch.lgamma
    return lgamma(4 * v["a"]) - lgamma(4 * v["a"] + 6) + (lgamma(a + counts) - lgamma(a)).sum(-1)


def of_unknown_variance(v):
    """By the Student t density of one datum after the other."""
    shape, scale, total = v["a"], torch.full_like(v["a"], 1.5), 0.0
    for y in COUNTS:
        total = total + dist.StudentT(2 * shape, v["mean"], (scale / shape).sqrt()).log_prob(y)
        shape, scale = shape + 0.5, scale + 0.5 * (y - v["mean"]).square()
    return total


def of_exponential_waits(v):
    a = v["a"][:, None]
    return (a.log() - 2 * (a + WAITS).log()).sum(-1)


def of_uniform_chances(v):
    return -len(COUNTS) * math.log(10) + dist.Bernoulli(v["a"][:, None]).log_prob((COUNTS > 1).to(FLOAT)).sum(-1)


def of_normal_beside_gamma(v):
    counted = dist.GammaPoisson(torch.tensor(2.0, dtype=FLOAT), 1.0).log_prob(COUNTS).sum()
    return counted + dist.Normal(v["mean"][:, None], math.sqrt(5.0)).log_prob(COUNTS).sum(-1)


CASES = {
    "gamma-Poisson": (gamma_poisson, COUNTS, of_gamma_poisson, "6 gamma"),
    "beta-binomial": (beta_binomial, COUNTS, of_beta_binomial, "6 beta"),
    "Dirichlet-multinomial": (dirichlet_multinomial, TABLE, of_dirichlet_multinomial, "6 Dirichlet"),
    "Dirichlet-categorical": (dirichlet_categorical, LABELS, of_dirichlet_categorical, "3 Dirichlet"),
    "inverse gamma-normal": (unknown_variance, COUNTS, of_unknown_variance, "1 inverse gamma"),
    "gamma-exponential": (exponential_waits, WAITS, of_exponential_waits, "6 gamma"),
    "uniform-binomial": (uniform_chances, COUNTS, of_uniform_chances, "6 beta"),
    "two families": (normal_beside_gamma, COUNTS, of_normal_beside_gamma, "6 normal, 6 gamma"),
}


def marginal(name):
    model, data, exact, said = CASES[name]
    target = bk.Target.from_pyro(model, data)
    sites = [site.name for site in target.sites if site.name in {"x", "rate", "effect"}]
    return bk.marginalize(target, sites), exact, said


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_conjugate_pairs_are_integrated_exactly(name):
    target, exact, said = marginal(name)
    assert (target.is_exact, target.curvature) == (True, f"conjugate: {said}")
    u = torch.randn(4, target.dim, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    torch.testing.assert_close(target.log_likelihood(u), exact(target.constrain(u)), rtol=1e-10, atol=1e-10)
    # Two steps and Richardson's extrapolation.
    eye, found = torch.eye(target.dim, dtype=FLOAT), target.value_and_grad(u)[1]

    def difference(step):
        up, down = (target.log_density(u[:, None] + sign * step * eye) for sign in (1, -1))
        return (up - down) / (2 * step)

    expected = (4 * difference(1e-3) - difference(2e-3)) / 3
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["gamma-Poisson", "beta-binomial", "Dirichlet-categorical", "inverse gamma-normal"])
def test_draws_of_the_sites_have_their_exact_distribution(name, limit):
    target, _, _ = marginal(name)
    count, num_uniform = 4000, 10
    u = torch.full((target.dim,), 0.3, dtype=FLOAT).expand(2, count // 2, -1)
    zeros = torch.zeros(u.shape[:2], dtype=FLOAT)
    draws = target.with_latents(bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT)), seed=3)
    x = draws["x"].flatten(0, 1).reshape(count, -1)
    a = math.exp(0.3)
    if name == "gamma-Poisson":
        p = torch.special.gammainc(a + COUNTS, (math.exp(0.3) + 1) * x)
    elif name == "inverse gamma-normal":
        total = 1.5 + 0.5 * float((COUNTS - 0.3).square().sum())
        p = torch.special.gammaincc(torch.tensor(a + 3, dtype=FLOAT), total / x)
    else:
        from scipy.stats import beta

        shapes = (a + COUNTS, a + 9 - COUNTS)
        if name == "Dirichlet-categorical":
            counts = torch.tensor([1.0, 2, 0, 3], dtype=FLOAT)
            shapes = (a + counts, 3 * a + 6 - counts)
        p = torch.as_tensor(beta.cdf(x, *shapes))
    # Kolmogorov's distance of each coordinate, and the mean of the products of two in a row.
    steps = torch.arange(1, count + 1, dtype=FLOAT)[:, None] / count
    ordered = p.sort(0).values
    distance = torch.maximum((steps - ordered).abs(), (steps - 1 / count - ordered).abs()).amax(0)
    assert float(kstwo.sf(distance.numpy(), count).min()) > 1e-5 / num_uniform
    if name in {"gamma-Poisson", "beta-binomial"}:
        products = ((p[:, :-1] - 0.5) * (p[:, 1:] - 0.5)).mean(0) * 12 * math.sqrt(count)
        assert float(products.abs().max()) < limit(5)


@pytest.mark.long
def test_the_evidence_of_a_conjugate_marginal_is_exact(limit):
    """Of one group, by quadrature of the known likelihood."""

    def model(y):
        a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
        rate = pyro.sample("x", dist.Gamma(a, 2.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)

    y = torch.tensor(4.0, dtype=FLOAT)
    target = bk.marginalize(bk.Target.from_pyro(model, y), ["x"])
    draws = bk.sample(target, num_samples=500, progress=False)
    found = evidence.bridge_sampling(target, draws)

    def density(u):
        a = math.exp(u)
        height = math.lgamma(a + 4) - math.lgamma(a) - math.lgamma(5) + a * math.log(2 / 3) - 4 * math.log(3)
        return math.exp(height - 0.5 * u**2) / math.sqrt(2 * math.pi)

    exact = math.log(quad(density, -12, 12, epsabs=1e-13)[0])
    assert found.trusted
    assert abs(found.log_evidence - exact) < limit(1) * found.standard_error
    correction = target.correction(draws)
    assert (correction.log_ratio, correction.standard_error, correction.trusted) == (0.0, 0.0, True)


@pytest.mark.calibration
def test_what_is_nearly_conjugate_is_not_taken_for_it():
    def model(y):
        a, b = two_shapes()
        with pyro.plate("groups", len(y)):
            rate = pyro.sample("x", dist.Gamma(a, b))
            pyro.sample("y", dist.Poisson(rate + 1e-3), obs=y)

    def truncated(y):
        a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", len(y)):
            rate = pyro.sample("x", dist.Gamma(2.0, a))
            pyro.sample("y", dist.Normal(rate, 1.0), obs=y)

    for each in (model, truncated):
        target = bk.marginalize(bk.Target.from_pyro(each, COUNTS), ["x"])
        assert (target.is_exact, target.curvature) == (False, "6 groups of 1")


@pytest.mark.calibration
def test_a_vector_without_an_integral_fails_alone():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 0.3))
        with pyro.plate("groups", len(y)):
            rate = pyro.sample("x", dist.Gamma(2.0, 1.0))
            pyro.sample("y", dist.Poisson(rate), obs=y)
        pyro.factor("more", (a * rate).sum())

    target = bk.marginalize(bk.Target.from_pyro(model, COUNTS), ["x"])
    assert target.curvature == "conjugate: 6 gamma"
    u = torch.tensor([[0.1], [0.5], [-3.0]], dtype=FLOAT)
    value, gradient = target.value_and_grad(u)
    assert target.num_failures == 0
    u[1] = 2.5  # the rate of the gamma distribution would be negative
    again, slope = target.value_and_grad(u)
    assert again[1] == -math.inf and slope.isfinite().all() and target.num_failures == 1
    assert torch.equal(again[[0, 2]], value[[0, 2]]) and torch.equal(slope[[0, 2]], gradient[[0, 2]])
    zeros = torch.zeros(1, 3, dtype=FLOAT)
    with pytest.raises(DrawsError, match=r"no finite integral by \['x'\] at 1 of 3 draws"):
        target.with_latents(bk.Draws(u[None], zeros, zeros, torch.ones(1, dtype=FLOAT)))


def single(prior, likelihood, y):
    """Return the target of one group, and a function of its exact log likelihood by quadrature around the mode."""

    def model(y):
        a = pyro.sample("a", dist.LogNormal(torch.zeros((), dtype=FLOAT), 1.0))
        x = pyro.sample("x", prior(a))
        with pyro.plate("data", len(y)):
            pyro.sample("y", likelihood(x), obs=y)

    whole = bk.Target.from_pyro(model, y)
    target = bk.marginalize(whole, ["x"])

    def exact(u, width):
        top = torch.zeros(len(u), 1, dtype=FLOAT)
        for scale in (60.0, 6.0, 0.6, 0.06):
            z = top + scale * torch.linspace(-1, 1, 4001, dtype=FLOAT)
            height = whole.log_density(torch.stack(torch.broadcast_tensors(u[:, :1], z), -1))
            top = z.gather(1, height.argmax(1, keepdim=True))
        z = top + width * torch.linspace(-1, 1, 40_001, dtype=FLOAT)
        height = whole.log_density(torch.stack(torch.broadcast_tensors(u[:, :1], z), -1))
        assert float((height[:, [0, -1]].amax(1) - height.amax(1)).max()) < -30
        return height.logsumexp(1) + math.log(2 * width / 40_000) - target.log_prior(u)

    return target, exact


@pytest.mark.long
@pytest.mark.parametrize("vague", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("name", ["gamma", "inverse gamma", "beta"])
def test_vague_conjugate_priors(name, vague):
    """Draws from these priors are within rounding of zero or one, where slopes say nothing."""
    e = torch.tensor(vague, dtype=FLOAT)
    prior, likelihood, y = {
        "gamma": (lambda a: dist.Gamma(e, e * a), dist.Poisson, torch.tensor([3.0, 1, 2], dtype=FLOAT)),
        "inverse gamma": (
            lambda a: dist.InverseGamma(e, a),
            lambda x: dist.Normal(0.0, x.sqrt()),
            torch.tensor([0.3, 1, 2], dtype=FLOAT),
        ),
        "beta": (lambda a: dist.Beta(e * a, e), lambda x: dist.Binomial(9, x), torch.tensor([4.0], dtype=FLOAT)),
    }[name]
    target, exact = single(prior, likelihood, y)
    assert target.curvature == f"conjugate: 1 {name}"
    u = torch.tensor([[-1.0], [0.5]], dtype=FLOAT)
    torch.testing.assert_close(target.log_likelihood(u), exact(u, 45.0), rtol=1e-10, atol=1e-10)


@pytest.mark.calibration
@pytest.mark.parametrize("count", [1e2, 1e5, 1e9])
def test_a_prior_that_data_swamp_may_pass_but_is_not_lost(count):
    """A lognormal rate beside a Poisson count: no gamma distribution, but one may be as close as rounding."""
    y = torch.tensor([round(0.7 * count)], dtype=FLOAT)
    target, exact = single(lambda a: dist.LogNormal(a.log(), 1.0), lambda x: dist.Poisson(count * x), y)
    assert target.is_exact == (count > 1e6)
    u = torch.tensor([[-1.0], [0.5]], dtype=FLOAT)
    if target.is_exact:
        gap = (target.log_likelihood(u) - exact(u, 15 / math.sqrt(count))).abs()
        assert float(gap.max()) < 1e3 * torch.finfo(FLOAT).eps * count
    else:
        assert target.curvature == "dense, 1"


@pytest.mark.calibration
def test_a_likelihood_that_saturates_is_not_conjugate():
    target, _ = single(
        lambda a: dist.Gamma(2.0 + 0 * a, 1.0),
        lambda x: dist.Poisson(x.clamp(max=15.0)),
        torch.tensor([16.0, 14, 18, 13], dtype=FLOAT),
    )
    assert not target.is_exact
