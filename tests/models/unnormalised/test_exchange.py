"""Posteriors by the exchange algorithm against posteriors on a grid, with constants by enumeration."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, Uniform

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.discrete._ising import IsingGrid
from bayeskit.models.unnormalised import exchange_posterior
from bayeskit.models.unnormalised._models import EnergyModel

DOUBLE = torch.float64


class Grid(nn.Module):
    """Ising grid of 2 by 3 with a coupling and a field."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=DOUBLE))

    def forward(self, x):
        return -statistics(x) @ self.theta


def statistics(x):
    s = (2 * x - 1).unflatten(-1, (2, 3))
    bonds = (s[..., 1:, :] * s[..., :-1, :]).sum((-2, -1)) + (s[..., 1:] * s[..., :-1]).sum((-2, -1))
    return torch.stack([bonds, s.sum((-2, -1))], -1)


def drawn(theta, count, generator):
    grid = IsingGrid.homogeneous(2, 3, theta[0], theta[1])
    with global_stream(generator):
        return (grid.sample((count,)).flatten(1) + 1) / 2


def data():
    return drawn(torch.tensor([0.3, 0.1], dtype=DOUBLE), 40, new_generator(0, stream="test of exchange"))


def on_a_grid(x, log_prior):
    """Return mean and standard deviation of both parameters by quadrature over a grid."""
    a, b = torch.linspace(-0.5, 1.2, 201, dtype=DOUBLE), torch.linspace(-0.8, 0.8, 201, dtype=DOUBLE)
    theta = torch.cartesian_prod(a, b)
    states = EnergyModel.of_bits(Grid(), 6).enumerate_states()
    log_z = (theta @ statistics(states).mT).logsumexp(-1)
    weight = torch.softmax(log_prior(theta) + theta @ statistics(x).sum(0) - len(x) * log_z, 0)
    mean = weight @ theta
    return mean, (weight @ (theta - mean).square()).sqrt()


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["enumerated", "transfer matrix"])
def test_the_posterior_is_that_of_a_grid(sampler):
    x = data()
    prior = Normal(torch.zeros(2, dtype=DOUBLE), 0.5)
    exact_draws = None if sampler == "enumerated" else lambda p, n, g: drawn(p["energy.theta"], n, g)
    warmup, count = (400, 1500) if exact_draws is None else (300, 500)
    found = exchange_posterior(
        EnergyModel.of_bits(Grid(), 6),
        x,
        {"energy.theta": prior},
        exact_draws=exact_draws,
        num_warmup=warmup,
        num_samples=count,
        seed=1,
        progress=False,
    )
    mean, deviation = on_a_grid(x, lambda theta: prior.log_prob(theta).sum(-1))
    draws, effective = found.draws["energy.theta"], found.effective["energy.theta"]
    assert draws.shape == (4, count, 2) and bool((effective > 30).all())
    assert found.trusted or exact_draws is not None
    z = (draws.mean((0, 1)) - mean) / (deviation / effective.sqrt())
    assert float(z.abs().max()) < 4.7
    # The log of a standard deviation has the standard error 1 / sqrt(2 n); its own draws are fewer by a factor of two.
    spread = (draws.flatten(0, 1).std(0) / deviation).log() * effective.sqrt()
    assert float(spread.abs().max()) < 4.7
    assert 0.1 < float(found.acceptance_rate.mean()) < 0.7
    assert found.num_model_draws == 4 * (warmup + count) * 40


@pytest.mark.calibration
def test_a_prior_with_an_edge_is_kept():
    x = data()
    prior = Uniform(torch.tensor([0.25, -0.3], dtype=DOUBLE), torch.tensor([1.0, 0.3], dtype=DOUBLE))
    found = exchange_posterior(
        EnergyModel.of_bits(Grid(), 6), x, {"energy.theta": prior}, num_warmup=300, num_samples=800, progress=False
    )

    def log_prior(theta):
        inside = (theta[:, 0] > 0.25) & (theta[:, 0] < 1) & (theta[:, 1].abs() < 0.3)
        return torch.where(inside, 0.0, -math.inf).to(DOUBLE)

    mean, deviation = on_a_grid(x, log_prior)
    draws, effective = found.draws["energy.theta"], found.effective["energy.theta"]
    assert float(draws[..., 0].min()) >= 0.25 and float(draws[..., 1].abs().max()) <= 0.3
    assert float(((draws.mean((0, 1)) - mean) / (deviation / effective.sqrt())).abs().max()) < 4.7


def test_the_model_and_torch_are_left_alone():
    model = EnergyModel.of_bits(Grid(), 6)
    state = torch.get_rng_state()
    runs = [
        exchange_posterior(
            model, data(), {"energy.theta": Normal(0.0, 0.5)}, num_warmup=10, num_samples=10, seed=s, progress=False
        )
        for s in (3, 3, 4)
    ]
    one, same, other = (run.draws["energy.theta"] for run in runs)
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(model.energy.theta.detach(), torch.zeros(2, dtype=DOUBLE))
    assert torch.equal(state, torch.get_rng_state())
    assert not runs[0].trusted and "effective" in " ".join(runs[0].warnings)


# Where exact draws do not exist.


def test_what_has_no_exact_draws_is_refused():
    energy = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten(0)).double()
    model = EnergyModel(energy, Independent(Normal(torch.zeros(2, dtype=DOUBLE), 1.0), 1), tilt=True)
    prior = {"energy.0.weight": Normal(0.0, 1.0)}
    with pytest.raises(SettingsError, match=r"needs exact draws, and real vectors.*Markov chain"):
        exchange_posterior(model, torch.zeros(5, 2, dtype=DOUBLE), prior)
    wide = EnergyModel.of_bits(nn.Sequential(nn.Linear(20, 1, bias=False), nn.Flatten(0)).double(), 20)
    with pytest.raises(SettingsError, match=r"2\*\*20 states are too many"):
        exchange_posterior(wide, torch.zeros(5, 20, dtype=DOUBLE), prior)


@pytest.mark.calibration
def test_a_real_model_with_exact_draws():
    # A normal mean with a known variance: the energy is linear, the base its factor, and the posterior is conjugate.
    energy = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Flatten(0)).double()
    model = EnergyModel(energy, Independent(Normal(torch.zeros(1, dtype=DOUBLE), 1.0), 1), tilt=True)
    x = 0.4 + torch.randn(20, 1, generator=new_generator(2, stream="test of exchange"), dtype=DOUBLE)

    def exact_draws(parameters, count, generator):
        mean = -parameters["energy.0.weight"].flatten()
        return mean + torch.randn(count, 1, generator=generator, dtype=DOUBLE)

    settings = {"num_warmup": 300, "num_samples": 800, "progress": False}
    prior = {"energy.0.weight": Normal(torch.zeros(1, 1, dtype=DOUBLE), 1.0)}
    found = exchange_posterior(model, x, prior, exact_draws=exact_draws, **settings)
    draws, effective = found.draws["energy.0.weight"], float(found.effective["energy.0.weight"])
    deviation = 1 / math.sqrt(21)
    assert abs(float(draws.mean()) + float(x.sum()) / 21) < 4.5 * deviation / math.sqrt(effective)
    with pytest.raises(ShapeError, match=r"must return finite draws of shape \(20, 1\)"):
        exchange_posterior(model, x, prior, exact_draws=lambda p, n, g: torch.zeros(n), **settings)


def test_wrong_priors_are_named():
    model = EnergyModel.of_bits(Grid(), 6)
    with pytest.raises(SettingsError, match=r"prior lacks energy\.theta"):
        exchange_posterior(model, data(), {})
    with pytest.raises(SettingsError, match="no trained parameter 'theta'"):
        exchange_posterior(model, data(), {"energy.theta": Normal(0.0, 1.0), "theta": Normal(0.0, 1.0)})
    with pytest.raises(ShapeError, match="must fit"):
        exchange_posterior(model, data(), {"energy.theta": Normal(torch.zeros(3), 1.0)})
    with pytest.raises(SettingsError, match="no parameters"):
        exchange_posterior(EnergyModel.of_bits(lambda x: x.sum(-1), 6), data(), {})
