"""Energy models against sums over all states and closed forms, and what is known of their constants."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, MultivariateNormal, Normal, Poisson

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.models.discrete._ising import IsingGrid
from bayeskit.models.unnormalised._models import EnergyModel, lipschitz_bound

DOUBLE = torch.float64
W = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=DOUBLE)
B = torch.tensor([0.1, -0.4], dtype=DOUBLE)


def bits(dim):
    return Independent(Bernoulli(torch.full((dim,), 0.5, dtype=DOUBLE)), 1)


def normal(dim, scale=1.0):
    return Independent(Normal(torch.zeros(dim, dtype=DOUBLE), scale), 1)


def test_linear_logits_on_bits_are_a_mixture():
    model = EnergyModel.from_classifier(lambda x: x @ W.T + B, bits(3), tilt=False)
    shares = B + nn.functional.softplus(W).sum(-1)
    assert abs(float(model.exact_log_normaliser()) - 3.039377520649344) < 1e-14
    assert abs(float(shares.logsumexp(0)) - 3.039377520649344) < 1e-14
    states = model.enumerate_states()
    joint = (model.logits(states) - model.exact_log_normaliser()).exp()
    assert torch.allclose(joint.sum(0), torch.softmax(shares, 0), rtol=0, atol=1e-14)
    assert abs(float(joint.sum(0)[0]) - 0.74254) < 5e-6
    tilted = EnergyModel.from_classifier(lambda x: x @ W.T + B, bits(3))
    assert abs(float(tilted.exact_log_normaliser()) - 3.039377520649344 + 3 * math.log(2)) < 1e-14
    x = states[3:5]
    for one in (model, tilted):
        assert torch.allclose(one.log_ratio(x), one.log_density(x) - one.base.log_prob(x), rtol=0, atol=1e-14)
        assert torch.equal(one(x, "classes"), one.log_prob(x))  # the constant is zero before training


def test_quadratic_logits_are_discriminant_analysis():
    # Two normal classes with one precision: logits, density and constant are those of linear discriminant analysis.
    means, log_prior = (
        torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=DOUBLE),
        torch.tensor([0.3, 0.7], dtype=DOUBLE).log(),
    )

    def logits(x):
        return log_prior - 0.5 * (x.unsqueeze(-2) - means).square().sum(-1)

    model = EnergyModel.from_classifier(logits, normal(2, 2.0), tilt=False)
    x = torch.linspace(-2, 2, 10, dtype=DOUBLE).reshape(5, 2)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=log_prior), Independent(Normal(means, 1.0), 1)
    )
    gap = model.log_density(x) - mixture.log_prob(x)
    assert torch.allclose(gap, torch.full_like(gap, math.log(2 * math.pi)), rtol=0, atol=1e-13)
    assert model.check_normaliser().is_finite is None


def test_an_ising_grid():
    grid = IsingGrid.homogeneous(4, 4, torch.tensor(0.4, dtype=DOUBLE))
    model = EnergyModel.of_bits(lambda x: -grid.log_potential((2 * x - 1).unflatten(-1, (4, 4))), 16)
    assert abs(float(model.exact_log_normaliser() - grid.log_partition)) < 1e-12
    assert model.check_normaliser().is_finite


def test_lipschitz_bounds():
    network = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 2)).double()
    bound = lipschitz_bound(network)
    x, y = torch.randn(2, 2000, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    slopes = (network(x) - network(y)).detach().norm(dim=-1) / (x - y).norm(dim=-1)
    assert float(slopes.max()) <= bound < 100 * float(slopes.max())
    grid = torch.linspace(-8, 8, 4001, dtype=DOUBLE)
    for activation in (nn.SiLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.ELU(), nn.ELU(2.0)):
        steepest = float((activation(grid).diff() / grid.diff()).abs().max())
        assert steepest <= lipschitz_bound(activation) <= 1.02 * steepest + 1e-3
    assert lipschitz_bound(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) is None


@pytest.mark.parametrize(
    ("energy", "tilt", "expected"),
    [
        (nn.Linear(2, 1), False, False),
        (nn.Linear(2, 1), True, True),
        (lambda x: 0.0 * x.sum(-1), False, False),
        (lambda x: -0.6 * x.square().sum(-1), True, False),
        (lambda x: -0.4 * x.square().sum(-1), True, None),
        (lambda x: 0.5 * x.square().sum(-1), False, None),
        (lambda x: 1.1 * x.square().sum(-1).log1p(), False, None),  # a Student-t density
        (lambda x: 0.9 * x.square().sum(-1).log1p(), False, False),  # falls as radius to the power -1.8 in a plane
    ],
)
def test_constants_that_are_finite_as_far_as_bounds_allow(energy, tilt, expected):
    if isinstance(energy, nn.Module):
        energy = nn.Sequential(energy.double(), nn.Flatten(0))
    assert EnergyModel(energy, normal(2), tilt=tilt).check_normaliser().is_finite is expected


def test_a_network_without_a_base_has_no_constant():
    torch_state = torch.get_rng_state()
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    base = MultivariateNormal(torch.zeros(4, dtype=DOUBLE), torch.eye(4, dtype=DOUBLE))
    torch.set_rng_state(torch_state)
    found = EnergyModel.from_classifier(network, base).check_normaliser()
    assert found.is_finite and "Lipschitz" in found.reason
    refuted = EnergyModel.from_classifier(network, base, tilt=False).check_normaliser()
    assert refuted.is_finite is False and "random rays" in refuted.reason
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_what_is_no_model_is_refused():
    with pytest.raises(ShapeError, match=r"event shape \(d,\).*Independent"):
        EnergyModel(lambda x: x, Normal(torch.zeros(3), 1.0))
    with pytest.raises(SettingsError, match="neither|support"):
        EnergyModel(lambda x: x.sum(-1), Independent(Poisson(torch.ones(3)), 1))
    with pytest.raises(ShapeError, match=r"instead of \(2,\)"):
        EnergyModel(lambda x: x, normal(3))
    with pytest.raises(ModelError, match="same dtype"):
        EnergyModel(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), normal(3))
    with pytest.raises(ModelError, match="must be finite"):
        EnergyModel(lambda x: x.sum(-1) / 0.0, normal(3))
    with pytest.raises(SettingsError, match="at most"):
        EnergyModel.of_bits(lambda x: x.sum(-1), 21).exact_log_normaliser()
    with pytest.raises(SettingsError, match="cannot be listed"):
        EnergyModel(lambda x: x.square().sum(-1), normal(3)).enumerate_states()
    with pytest.raises(SettingsError, match="from_classifier"):
        EnergyModel.of_bits(lambda x: x.sum(-1), 3).logits(torch.zeros(1, 3))


def test_layers_of_ones_own_prove_nothing():
    class Squared(nn.Sequential):
        def forward(self, x):
            return -super().forward(x).square().sum(-1)

    energy = Squared(nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        energy[0].weight.copy_(2 * torch.eye(2))
    base = Independent(Normal(torch.zeros(2, dtype=DOUBLE), 1.0), 1)
    assert EnergyModel(energy, base, tilt=True).check_normaliser().is_finite is False


def test_the_base_moves_with_the_model():
    energy = nn.Sequential(nn.Linear(2, 1), nn.Flatten(-2))
    model = EnergyModel(energy, Independent(Normal(torch.zeros(2), 1.0), 1), tilt=True).double()
    x = model.base.sample((3,))
    assert x.dtype == model.log_density(x).dtype == DOUBLE
