"""Priors: distributions and Pyro models, proper and improper, on any support."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from bayeskit.errors import ImproperPosteriorError, ModelError, SettingsError, UnsupportedSiteError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._prior import Prior

LIKE = torch.zeros((), dtype=torch.float64)
X = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def both():
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    return mean, scale


def unnamed():
    both()


def single():
    with pyro.plate("parts", 2):
        pyro.sample("mean", dist.Normal(1.0, 2.0))


def transformed():
    scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    pyro.deterministic("variance", scale**2)
    return scale**2


def test_the_parameter_is_what_the_model_returns_or_its_sites():
    u = torch.tensor([0.5, 0.3], dtype=torch.float64)
    scale = u[1].exp()
    assert Prior(both, like=LIKE).parameter(u) == (u[0], scale)
    named = Prior(unnamed, like=LIKE).parameter(u)
    assert list(named) == ["mean", "scale"] and named["scale"] == scale
    torch.testing.assert_close(Prior(single, like=LIKE).parameter(u), u, rtol=0, atol=0)
    torch.testing.assert_close(Prior(transformed, like=LIKE).parameter(u[1:]), scale**2, rtol=0, atol=1e-15)


def test_distributions_name_their_site():
    prior = Prior(dist.Normal(torch.zeros(3), 1.0), like=LIKE, name="slope")
    assert [(s.name, tuple(s.shape)) for s in prior.sites] == [("slope", (3,))] and prior.dim == 3


def integral(prior, low=-60.0, high=60.0):
    """Integrate a density over the unconstrained line."""
    u = torch.linspace(low, high, 200_001, dtype=torch.float64)
    return float(torch.func.vmap(prior.log_density)(u[:, None]).exp().sum() * (u[1] - u[0]))


@pytest.mark.parametrize("prior", [dist.Gamma(3.0, 1.0), dist.LogNormal(0.0, 1.0), dist.Beta(2.0, 3.0)])
def test_densities_integrate_to_one_over_unconstrained_space(prior):
    assert integral(Prior(prior, like=LIKE)) == pytest.approx(1.0, abs=1e-6)


def test_a_dropped_jacobian_fails_the_same_check():
    prior = Prior(dist.Gamma(3.0, 1.0), like=LIKE)
    dropped = type("", (), {"log_density": staticmethod(lambda u: prior.log_density(u) - u[0])})
    assert abs(integral(dropped) - 1) > 0.1


def test_a_gamma_prior_is_conjugate_to_a_linear_loss():
    rate = GibbsPosterior(dist.Gamma(2.0, 1.0), lambda r, x: r * x - r.log(), X, 0.5, compile=False)
    u = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    exact = dist.Gamma(X.new_tensor(2 + 1.5), X.new_tensor(1 + 3.5)).log_prob(u.exp()[:, 0]) + u[:, 0]
    difference = rate.log_density(u) - exact
    torch.testing.assert_close(difference, difference[:1].expand(9), rtol=0, atol=1e-12)


def test_a_simplex_has_its_jacobian():
    prior = Prior(dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0])), like=LIKE)
    flat = Prior(Flat((3,), constraints.simplex), like=LIKE)
    u = torch.linspace(-12, 12, 601, dtype=torch.float64)
    both = torch.cartesian_prod(u, u)
    area = float((u[1] - u[0]) ** 2)
    assert float(torch.func.vmap(prior.log_density)(both).exp().sum()) * area == pytest.approx(1.0, abs=1e-5)
    # The simplex has area one half in the coordinates of all but one of its entries.
    assert float(torch.func.vmap(flat.log_density)(both).exp().sum()) * area == pytest.approx(0.5, abs=1e-3)
    assert float(prior.parameter(both[7]).sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flat((2,)),
        lambda: dist.ImproperUniform(constraints.real, (), (2,)),
        lambda: dist.ImproperUniform(constraints.real_vector, (), (2,)),
        lambda: dist.ImproperUniform(constraints.real, (2,), ()),
        lambda: dist.ImproperUniform(constraints.real, (2,), ()).to_event(1).mask(True),
        lambda: Flat().expand([2]),
        lambda: Flat().expand([2]).to_event(1),
        lambda: Flat().expand_by([2]).mask(True),
        lambda: dist.Normal(torch.zeros(2), 1.0).mask(False),
        lambda: dist.Normal(0.0, 1.0).mask(False).expand([2]).to_event(1),
        lambda: dist.ExpandedDistribution(dist.Normal(0.0, 1.0).mask(False), torch.Size([2])),
        lambda: pyro.poutine.mask(lambda: pyro.sample("theta", dist.Normal(torch.zeros(2), 1.0).to_event(1)), False),
    ],
)
def test_flat_priors_have_density_one_and_are_known_to_be_improper(make):
    prior = Prior(make(), like=LIKE)
    assert not prior.is_proper and prior.improper == ("theta",) and prior.dim == 2
    assert float(prior.log_density(torch.tensor([3.0, -100.0], dtype=torch.float64))) == 0.0


def test_priors_masked_in_places_or_flat_beneath_a_transform_are_improper():
    half = dist.Normal(torch.zeros(2), 1.0).mask(torch.tensor([True, False]))
    assert Prior(half, like=LIKE).improper == ("theta",)
    assert Prior(half.base_dist.mask(torch.tensor([True, True])), like=LIKE).is_proper
    assert not Prior(dist.TransformedDistribution(Flat(), dist.transforms.ExpTransform()), like=LIKE).is_proper
    assert Prior(dist.LogNormal(torch.zeros(2), 1.0).mask(True).to_event(1), like=LIKE).is_proper


def test_flat_on_a_half_line_and_in_plates():
    prior = Prior(Flat((), constraints.positive), like=LIKE)
    assert float(prior.log_density(LIKE.new_tensor([1.3]))) == pytest.approx(1.3, abs=1e-12)

    def plated():
        with pyro.plate("parts", 3):
            return pyro.sample("scale", Flat((), constraints.positive))

    assert float(Prior(plated, like=LIKE).log_density(LIKE.new_tensor([1.0, 2.0, 3.0]))) == pytest.approx(
        6.0, abs=1e-12
    )


@pytest.mark.parametrize("prior", [Flat().expand([1]), dist.Normal(torch.zeros(1), 1.0).mask(False)])
def test_improper_priors_in_disguise_are_neither_drawn_from_nor_given_bounded_losses(prior):
    loss = losses.FunctionLoss(lambda m, x: (x - m).square(), bounded=False)
    with pytest.raises(SettingsError, match="site 'theta' is improper"):
        GibbsPosterior(prior, loss, X, compile=False).sample_prior(3)
    with pytest.raises(ImproperPosteriorError, match="site 'theta'"):
        GibbsPosterior(prior, losses.FunctionLoss(loss.function, bounded=True), X)


@pytest.mark.parametrize(("shape", "support"), [((), constraints.unit_interval), ((3,), constraints.simplex)])
def test_flat_priors_on_bounded_supports_are_told_their_proper_names(shape, support):
    bounded = losses.FunctionLoss(lambda m, x: (x - m.sum()).tanh().square(), bounded=True)
    with pytest.raises(ImproperPosteriorError, match=r"dist\.Uniform.*dist\.Dirichlet"):
        GibbsPosterior(Flat(shape, support), bounded, X)


def test_one_improper_site_makes_the_prior_improper():
    def mixed():
        return pyro.sample("mean", Flat()) + pyro.sample("shift", dist.Normal(0.0, 1.0))

    assert Prior(mixed, like=LIKE).improper == ("mean",)
    assert Prior(both, like=LIKE).is_proper


def test_starting_points_are_reproducible_and_leave_globals_alone():
    before = torch.get_rng_state()
    prior = Prior(Flat((3,)), like=LIKE)
    assert torch.equal(prior.start(5, seed=1), prior.start(5, seed=1))
    assert prior.start(5).shape == (5, 3) and prior.start(5).dtype == torch.float64
    assert torch.equal(before, torch.get_rng_state())


def test_sites_that_are_summed_out_are_no_parameters():
    def mixture():
        which = pyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("mean", dist.Normal(which, 1.0))

    u = torch.tensor([[0.3], [-1.0]], dtype=torch.float64)
    posterior = GibbsPosterior(mixture, lambda m, x: (x - m).abs(), X, compile=False)
    prior = (dist.Normal(LIKE, 1.0).log_prob(u).exp() / 2 + dist.Normal(LIKE + 1, 1.0).log_prob(u).exp() / 2).log()
    torch.testing.assert_close(posterior.log_density(u), prior[:, 0] - (X - u).abs().sum(-1), rtol=0, atol=1e-12)


def observing():
    pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(1.0))


def with_a_factor():
    pyro.factor("extra", -pyro.sample("mean", dist.Normal(0.0, 1.0)).abs())


@pytest.mark.parametrize(
    ("prior", "error", "place"),
    [
        (observing, ModelError, "site 'y'"),
        (with_a_factor, ModelError, "site 'extra'"),
        (3.0, ModelError, "3.0"),
        (torch.distributions.Normal(0.0, 1.0), ModelError, "torch's own"),
        (dist.Normal, ModelError, "loc"),
        (lambda a: None, ModelError, "'a'"),
        (dist.Bernoulli(0.5), UnsupportedSiteError, "site 'theta' is discrete"),
        (lambda: torch.zeros(()), ModelError, "nothing to sample"),
    ],
)
def test_priors_that_are_none(prior, error, place):
    with pytest.raises(error, match=place):
        Prior(prior, like=LIKE)


def test_a_site_named_as_the_loss_is_refused():
    with pytest.raises(ModelError, match="two sites are named 'loss'"):
        GibbsPosterior(lambda: pyro.sample("loss", dist.Normal(0.0, 1.0)), lambda m, x: (x - m).abs(), X)
