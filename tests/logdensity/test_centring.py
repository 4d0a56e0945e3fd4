"""Targets in partly centred coordinates: the same distribution, whatever the centredness."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._logdensity.centring import PartlyCentred, Recentred, location_scale_sites, locations
from bayeskit.errors import SettingsError, ShapeError


def nested(y, group):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    between = pyro.sample("between", dist.HalfCauchy(1.0))
    within = pyro.sample("within", dist.LogNormal(mu, 0.5))
    with pyro.plate("regions", 3):
        region = pyro.sample("region", dist.Normal(mu, between))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.Normal(region[group], within))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def families(y):
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.Gamma(2.0, 2.0))
    with pyro.plate("groups", len(y)):
        total = pyro.sample("student", dist.StudentT(4.0, mu, tau))
        total = total + pyro.sample("laplace", dist.Laplace(mu, tau)) + pyro.sample("cauchy", dist.Cauchy(mu, tau))
        total = total + pyro.sample("gumbel", dist.Gumbel(mu, tau)) + pyro.sample("logistic", dist.Logistic(mu, tau))
        total = total + pyro.sample("lognormal", dist.LogNormal(mu, tau))
        pyro.sample("y", dist.Normal(total, 1.0), obs=y)


def events(y):
    tau = pyro.sample("tau", dist.InverseGamma(2.0, 1.0).expand([2]).to_event(1))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau.sqrt()).to_event(1))
        pyro.sample("y", dist.Normal(theta, 1.0).to_event(1), obs=y)


def crossed(y):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    rows, columns = pyro.plate("rows", y.shape[0], dim=-2), pyro.plate("columns", y.shape[1], dim=-1)
    with rows:
        a = pyro.sample("a", dist.Normal(0.0, tau))
    with rows, columns:
        b = pyro.sample("b", dist.Normal(a, tau))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def mixed(y):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.Normal(0.0, tau))
        side = pyro.sample("side", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(theta + 2.0 * side, 1.0), obs=y)


def _numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MODELS = {
    "nested": (nested, (_numbers(6), torch.tensor([0, 0, 1, 1, 2, 2])), ["within", "region", "theta"]),
    "families": (families, (_numbers(3),), ["student", "laplace", "cauchy", "gumbel", "logistic", "lognormal"]),
    "events": (events, (_numbers(4, 2),), ["theta"]),
    "crossed": (crossed, (_numbers(3, 2),), ["a", "b"]),
    "mixed": (mixed, (_numbers(4),), ["theta"]),
}


def _case(name, seed=1):
    model, args, expected = MODELS[name]
    target = bk.Target.from_pyro(model, *args)
    sites = location_scale_sites(target)
    assert [site.name for site in sites] == expected
    generator = torch.Generator().manual_seed(seed)
    centredness = torch.ones(target.dim, dtype=target.dtype)
    for site in sites:
        part = centredness[site.start : site.stop]
        part[:] = torch.rand(part.shape, generator=generator, dtype=target.dtype)
        if len(part) > 2:
            part[0], part[1] = 0.0, 1.0
    v = torch.randn(5, target.dim, generator=generator, dtype=target.dtype)
    return target, Recentred(target, centredness), v


def _jacobian(recentred, v):
    """Return log |du / dv| of the map by automatic differentiation, row by row."""
    density = recentred.target.density
    rows = [torch.autograd.functional.jacobian(lambda x: density.to_original(x)[0], row) for row in v]
    return torch.linalg.slogdet(torch.stack(rows))[1]


@pytest.mark.calibration
@pytest.mark.parametrize("name", MODELS)
def test_the_density_is_that_of_the_target_times_the_jacobian(name):
    target, recentred, v = _case(name)
    u, log_jacobian = recentred.to_original(v)
    torch.testing.assert_close(log_jacobian, _jacobian(recentred, v))
    torch.testing.assert_close(recentred.target.log_prior(v), target.log_prior(u) + log_jacobian)
    torch.testing.assert_close(recentred.target.log_likelihood(v), target.log_likelihood(u))
    assert (u != v).any()


@pytest.mark.calibration
@pytest.mark.parametrize("name", MODELS)
def test_coordinates_come_back(name):
    target, recentred, v = _case(name)
    u, _ = recentred.to_original(v)
    torch.testing.assert_close(recentred.from_original(u), v)
    ours, theirs = recentred.target.constrain(v), target.constrain(u)
    for site in target.sites:
        torch.testing.assert_close(ours[site.name], theirs[site.name])
    torch.testing.assert_close(recentred.target.unconstrain(ours), v)
    whole = recentred.target.log_jacobian(v)
    torch.testing.assert_close(whole, target.log_jacobian(u) + _jacobian(recentred, v))
    pointwise = recentred.target.pointwise_log_likelihood(v)["y"]
    torch.testing.assert_close(pointwise, target.pointwise_log_likelihood(u)["y"])


@pytest.mark.calibration
@pytest.mark.parametrize("name", MODELS)
def test_compiled_gradients_are_those_of_the_eager_density(name):
    _, recentred, v = _case(name)
    compiled = Recentred(recentred._original, recentred.centredness)
    compiled.target.compile = True
    value, gradient = compiled.target.value_and_grad(v)
    leaf = v.clone().requires_grad_()
    density = recentred.target.density
    eager = torch.stack([torch.stack(density.joint(row)).sum() for row in leaf])
    torch.testing.assert_close(value, eager.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(eager.sum(), leaf)[0])


def _pair(y):
    tau = pyro.sample("tau", dist.LogNormal(0.0, 0.7))
    theta = pyro.sample("theta", dist.Normal(0.5, tau))
    pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def _integral(target):
    grid = torch.linspace(-12, 12, 801, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    return target.log_density(points).logsumexp(0) + 2 * (grid[1] - grid[0]).log()


@pytest.mark.calibration
@pytest.mark.parametrize("c", [0.0, 0.3, 0.8])
def test_the_evidence_does_not_depend_on_the_coordinates(c):
    target = bk.Target.from_pyro(_pair, torch.tensor(0.3, dtype=torch.float64))
    recentred = Recentred(target, torch.tensor([1.0, c], dtype=torch.float64))
    torch.testing.assert_close(_integral(recentred.target), _integral(target), rtol=0, atol=1e-6)


def test_without_the_jacobian_the_evidence_is_another(monkeypatch):
    target = bk.Target.from_pyro(_pair, torch.tensor(0.3, dtype=torch.float64))
    recentred = Recentred(target, torch.tensor([1.0, 0.3], dtype=torch.float64))
    monkeypatch.setattr(
        PartlyCentred, "joint", lambda self, v: self.original.joint_moved(v, self._move([], None)), raising=True
    )
    assert float((_integral(recentred.target) - _integral(target)).abs()) > 0.01


def test_the_prior_of_a_coordinate_has_the_scale_to_the_power_of_the_centredness():
    target = bk.Target.from_pyro(_pair, torch.tensor(0.3, dtype=torch.float64))
    c = 0.4
    recentred = Recentred(target, torch.tensor([1.0, c], dtype=torch.float64))
    v = _numbers(7, 2)
    expected = torch.distributions.Normal(0.5 * c, (c * v[:, 0]).exp()).log_prob(v[:, 1])
    expected = expected + torch.distributions.Normal(0.0, 0.7).log_prob(v[:, 0])
    torch.testing.assert_close(recentred.target.log_prior(v), expected)


def test_fully_centred_coordinates_are_those_of_the_target():
    target, _, u = _case("nested")
    recentred = Recentred(target, torch.ones(target.dim, dtype=target.dtype))
    assert torch.equal(recentred.to_original(u).position, u)
    assert torch.equal(recentred.from_original(u), u)
    assert torch.equal(recentred.target.log_density(u), target.log_density(u))


def test_locations_are_those_of_the_parents():
    target, _, u = _case("nested")
    at, values = locations(target, u), target.constrain(u)
    theta = next(site for site in target.sites if site.name == "theta")
    part = slice(theta.start, theta.stop)
    torch.testing.assert_close(at.location[:, part], values["region"][:, MODELS["nested"][1][1]])
    torch.testing.assert_close(at.log_scale[:, part], values["within"].log().unsqueeze(-1).expand(5, 6))


def constant(y):
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)


def of_a_discrete_site(y):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", len(y)):
        side = pyro.sample("side", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(mu[side.long()], tau), obs=y)


@pytest.mark.parametrize("model", [constant, of_a_discrete_site])
def test_sites_without_latent_parents_stay(model):
    assert location_scale_sites(bk.Target.from_pyro(model, _numbers(4))) == ()


def test_targets_from_functions_have_no_sites():
    target = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=2)
    assert location_scale_sites(target) == ()
    with pytest.raises(SettingsError, match="from_pyro"):
        Recentred(target, torch.ones(2))
    with pytest.raises(SettingsError, match="from_pyro"):
        locations(target, torch.ones(2))


def test_one_centredness_a_coordinate():
    target = bk.Target.from_pyro(_pair, torch.tensor(0.3, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"\(2,\)"):
        Recentred(target, torch.ones(3))
