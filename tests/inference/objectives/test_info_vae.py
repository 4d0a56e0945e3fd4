import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, SettingsError, ShapeError
from bayeskit.inference._kernel_discrepancy import InverseMultiquadric, RadialBasis, maximum_mean_discrepancy
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.objectives._constrained import InfoVAE

BANDWIDTH = 0.8


@pytest.fixture(autouse=True)
def stream():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with global_stream(new_generator(11, stream="test")), pyro.get_param_store().scope():
        yield
    torch.set_default_dtype(before)


def mean_kernel(gap, variance):
    """E exp(-d**2 / (2 h**2)) for d ~ N(gap, variance)."""
    h = BANDWIDTH**2
    return math.sqrt(h / (h + variance)) * math.exp(-(gap**2) / (2 * (h + variance)))


def standardised(draws, exact):
    return (float(draws.mean()) - exact) / (float(draws.std()) / len(draws) ** 0.5)


def test_the_discrepancy_of_gaussians_is_unbiased(limit):
    x, y = 0.3 + 0.5 * torch.randn(20_000, 5, 1), torch.randn(20_000, 4, 1)
    exact = mean_kernel(0, 0.5) + mean_kernel(0, 2.0) - 2 * mean_kernel(0.3, 1.25)
    found = maximum_mean_discrepancy(x, y, RadialBasis(BANDWIDTH))
    assert found.shape == (20_000,) and float(found.min()) < 0
    assert abs(standardised(found, exact)) < limit()
    # Mutation: a draw is not to be compared with itself. Its kernel is one.
    biased = found + (1 - mean_kernel(0, 0.5)) / 5 + (1 - mean_kernel(0, 2.0)) / 4
    assert abs(standardised(biased, exact)) > 20


def test_dimensions_multiply_and_equal_distributions_have_none(limit):
    x, y = torch.randn(20_000, 4, 3), torch.randn(20_000, 4, 3)
    y = y + torch.tensor([0.4, 0.0, 0.0])
    exact = 2 * mean_kernel(0, 2.0) ** 3 - 2 * mean_kernel(0.4, 2.0) * mean_kernel(0, 2.0) ** 2
    assert abs(standardised(maximum_mean_discrepancy(x, y, RadialBasis(BANDWIDTH)), exact)) < limit()
    same = maximum_mean_discrepancy(x, torch.randn(20_000, 4, 3), InverseMultiquadric(1.5))
    assert abs(standardised(same, 0.0)) < limit()


def test_a_scale_from_the_draws_does_not_depend_on_the_units():
    x, y = torch.randn(6, 2), torch.randn(7, 2) + 1
    for kernel in (RadialBasis(), InverseMultiquadric(), None):
        one, scaled = (maximum_mean_discrepancy(c * x, c * y, kernel) for c in (1.0, 50.0))
        assert abs(float(one - scaled)) < 1e-12
    assert torch.isfinite(maximum_mean_discrepancy(torch.zeros(3, 1), torch.zeros(3, 1)))


def test_the_gradient_is_that_of_finite_differences():
    x, y = torch.randn(2, 4, 2, requires_grad=True), torch.randn(2, 3, 2)
    for kernel in (RadialBasis(0.7), InverseMultiquadric(1.3)):
        assert torch.autograd.gradcheck(lambda x, k=kernel: maximum_mean_discrepancy(x, y, k), x)


@pytest.mark.parametrize("shapes", [((1, 2), (5, 2)), ((5, 2), (1, 2)), ((5, 2), (5, 3)), ((5,), (5,))])
def test_draws_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ShapeError, match="at least two draws each"):
        maximum_mean_discrepancy(*(torch.zeros(shape) for shape in shapes))


def model(x):
    with pyro.plate("data", 40, subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x):
    with pyro.plate("data", 40, subsample=torch.arange(len(x))):
        pyro.sample("z", dist.Normal(0.6 * x, 0.5))


def with_stream(objective, *args):
    with global_stream(new_generator(2)):
        return objective.loss(*args)


X = torch.tensor([1.0, -0.5, 0.3, 2.0])


@pytest.mark.parametrize("num_particles", [1, 3])
def test_without_further_weight_it_is_the_elbo(num_particles):
    for analytic_kl in (True, False):
        args = {"num_particles": num_particles, "analytic_kl": analytic_kl}
        bound = with_stream(ELBO(**args), model, guide, X)
        assert abs(with_stream(InfoVAE(**args), model, guide, X) - bound) < 1e-12
        weighted = with_stream(ELBO(**args, kl_weight=0.3), model, guide, X)
        assert abs(with_stream(InfoVAE(0.7, 0.3, **args), model, guide, X) - weighted) < 1e-12


def test_the_aggregates_are_compared_without_bias(limit):
    """The difference to the ELBO, for each of the 40 data, is the discrepancy of the mixture from the prior."""
    kernel = RadialBasis(BANDWIDTH)
    among = [mean_kernel(0.6 * float(a - b), 0.5) for i, a in enumerate(X) for j, b in enumerate(X) if i != j]
    between = [mean_kernel(0.6 * float(a), 1.25) for a in X]
    exact = math.fsum(among) / 12 + mean_kernel(0, 2.0) - 2 * math.fsum(between) / 4
    objective = InfoVAE(0.0, 3.0, kernel, 10, max_plate_nesting=1)
    base = InfoVAE(0.0, 1.0, kernel, 10, max_plate_nesting=1)
    found = []
    for seed in range(150):
        values = []
        for one in (objective, base):
            with global_stream(new_generator(seed)):
                values.append(one.loss(model, guide, X))
        found.append((values[0] - values[1]) / (40 * 2.0))
    assert abs(standardised(torch.tensor(found), exact)) < limit()


def test_gradients_reach_the_guide_and_pull_the_aggregate_to_the_prior():
    shift = torch.tensor(2.0, requires_grad=True)

    def shifted(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x + shift, 0.5))

    def flat(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    InfoVAE(1.0, 5.0).differentiable_loss(flat, shifted, torch.randn(200)).backward()
    assert float(shift.grad) > 0.1


def hierarchical_model(x):
    with pyro.plate("data", len(x), dim=-2):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("pixels", 3, dim=-1):
            w = pyro.sample("w", dist.Normal(z.sum(-1), 1.0))
            pyro.sample("x", dist.Normal(w, 0.5), obs=x)


def hierarchical_guide(x):
    with pyro.plate("data", len(x), dim=-2):
        z = pyro.sample("z", dist.Normal(x.mean(-1)[:, None, None].expand(-1, 1, 2), 0.5).to_event(1))
        with pyro.plate("pixels", 3, dim=-1):
            pyro.sample("w", dist.Normal(z.sum(-1) + x, 0.5))


@pytest.mark.parametrize("num_particles", [1, 4])
def test_several_sites_are_one_vector_a_datum(monkeypatch, num_particles):
    seen = []

    def watched(x, y, kernel):
        seen.append((x, y))
        return maximum_mean_discrepancy(x, y, kernel)

    monkeypatch.setattr("bayeskit.inference.objectives._constrained.maximum_mean_discrepancy", watched)
    x = torch.randn(6, 3)
    loss = InfoVAE(0.5, 2.0, num_particles=num_particles).loss(hierarchical_model, hierarchical_guide, x)
    assert math.isfinite(loss)
    codes, prior = seen[0]
    assert codes.shape == prior.shape == (num_particles, 6, 5)  # three pixels and two dimensions of z
    # The guide's draws follow the data, the prior's do not.
    assert float((codes[..., 3:].mean(0).mean(-1) - x.mean(-1)).abs().max()) < 5 * 0.5
    assert len({round(float(v), 9) for v in prior.flatten()}) == prior.numel()


def test_uses_in_svi_and_single_precision():
    torch.set_default_dtype(torch.float32)

    def trained(x):
        loc = pyro.param("loc", torch.zeros(()))
        with pyro.plate("data", 40, subsample=torch.arange(len(x))):
            pyro.sample("z", dist.Normal(loc * x, 0.5))

    svi = pyro.infer.SVI(model, trained, pyro.optim.Adam({"lr": 0.01}), loss=InfoVAE(0.5, 2.0))
    assert math.isfinite(svi.step(X.float()))
    assert float(pyro.param("loc").detach()) != 0
    loss = InfoVAE(0.5, 2.0)(model, trained)(X.float())
    assert loss.dtype == torch.float32


def test_what_it_cannot_do_is_refused():
    with pytest.raises(SettingsError, match="at least two items in a minibatch"):
        InfoVAE(0.5, 2.0).loss(model, guide, X[:1])

    def coin(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))

    with pytest.raises(GuideError, match="draws carry gradients"):
        InfoVAE(0.5, 2.0).loss(coin, coin, X)
    for alpha, weight in ((1.5, 1.0), (0.0, 0.5), (math.nan, 1.0)):
        with pytest.raises(SettingsError, match="alpha must be at most 1"):
            InfoVAE(alpha, weight)
    for kernel in (RadialBasis, InverseMultiquadric):
        with pytest.raises(SettingsError, match="must lie in"):
            kernel(0.0)
