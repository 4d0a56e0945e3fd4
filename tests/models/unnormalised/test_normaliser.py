"""Log normalising constants from both sides against sums over all states, and one family of estimators."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.evidence import bridge_sampling
from bayeskit.inference.evidence._bridge import halved
from bayeskit.models.unnormalised import energy_target, log_normaliser, noise_contrastive_constant
from bayeskit.models.unnormalised._models import EnergyModel

DOUBLE = torch.float64
#: Normal quantile of a failure rate of 1e-5 a comparison, both sides.
LIMIT = 4.5


def jem():
    w = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=DOUBLE)
    return EnergyModel.of_bits(lambda x: -(x @ w.T + torch.tensor([0.1, -0.4], dtype=DOUBLE)).logsumexp(-1), 3)


def ising():
    def energy(x):
        s = (2 * x - 1).unflatten(-1, (4, 4))
        return -0.4 * ((s[..., 1:, :] * s[..., :-1, :]).sum((-2, -1)) + (s[..., 1:] * s[..., :-1]).sum((-2, -1)))

    return EnergyModel.of_bits(energy, 16)


def boltzmann_machine():
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(10, 8, generator=generator, dtype=DOUBLE)
    b, c = torch.randn(10, generator=generator, dtype=DOUBLE), torch.randn(8, generator=generator, dtype=DOUBLE)
    return EnergyModel.of_bits(lambda x: -x @ b - nn.functional.softplus(x @ w + c).sum(-1), 10)


PRECISION = 0.7 * torch.eye(3, dtype=DOUBLE) + 0.3


def normal(dim=3, scale=2.0):
    return Independent(Normal(torch.zeros(dim, dtype=DOUBLE), scale), 1)


def correlated():
    return EnergyModel(lambda x: 0.5 * ((x - 1) @ PRECISION * (x - 1)).sum(-1), normal())


@pytest.mark.calibration
@pytest.mark.parametrize("draws", ["chains", "enumerate"])
@pytest.mark.parametrize(
    ("make", "steps"), [(jem, 4), (ising, 30), (boltzmann_machine, 30)], ids=["jem", "ising", "boltzmann"]
)
def test_constants_of_binary_energies(make, steps, draws):
    model = make()
    z = log_normaliser(model, num_temperatures=steps, draws=draws, seed=3, progress=False)
    exactly = float(model.exact_log_normaliser())
    for side in (z.forward, z.reverse, z.bridge):
        assert side.trusted and abs(side.log_evidence - exactly) < LIMIT * side.standard_error < 0.3
    assert z.is_finite and z.has_exact_draws == (draws == "enumerate")
    assert z.value == z.bridge.log_evidence and z.standard_error < min(
        z.forward.standard_error, z.reverse.standard_error
    )


@pytest.mark.calibration
def test_a_real_density_from_chains_and_from_exact_draws():
    model = correlated()
    exactly = 1.5 * math.log(2 * math.pi) - 0.5 * float(torch.logdet(PRECISION))
    noise = torch.randn(256, 3, generator=new_generator(5, stream="test"), dtype=DOUBLE)
    exact_draws = 1 + torch.linalg.solve_triangular(torch.linalg.cholesky(PRECISION).mT, noise.mT, upper=True).mT
    for draws in ("chains", exact_draws):
        z = log_normaliser(model, num_temperatures=60, draws=draws, seed=4, progress=False)
        for side in (z.forward, z.reverse, z.bridge):
            assert abs(side.log_evidence - exactly) < LIMIT * side.standard_error < 0.6
        assert z.trusted and z.is_finite is None and "no proof" in z.reason


def test_the_sides_are_low_and_high_where_annealing_is_poor():
    # Two steps for strongly coupled spins: the bias of either side exceeds its error, and the gap shows it.
    model = EnergyModel.of_bits(lambda x: -1.5 * ((2 * x[..., 1:] - 1) * (2 * x[..., :-1] - 1)).sum(-1), 16)
    z = log_normaliser(model, num_temperatures=1, draws="enumerate", seed=1, progress=False)
    exactly = float(model.exact_log_normaliser())
    assert z.forward.log_evidence < exactly < z.reverse.log_evidence and z.gap > 1
    assert not z.trusted and "NOT TRUSTED" in repr(z) and "more temperatures" in z.bridge.warnings[0]


# One family of estimators.


def bridge(posterior, proposal, effective):
    """Return the fixed point of Meng and Wong's iteration."""
    share, log_z = effective / (effective + len(proposal)), float(posterior.median())
    for _ in range(1000):
        a, b = (proposal - log_z).exp(), (posterior - log_z).exp()
        above, below = a / (share * a + 1 - share), 1 / (share * b + 1 - share)
        log_z += float(above.mean().log() - below.mean().log())
    return log_z


def test_the_constant_by_classification_is_the_bridge():
    generator = new_generator(0, stream="test")
    x, y = torch.randn(2, 4000, generator=generator, dtype=DOUBLE) * torch.tensor([[0.5], [1.5]], dtype=DOUBLE).sqrt()

    def log_ratio(x):
        return -x.square() - Normal(torch.zeros((), dtype=DOUBLE), 1.5**0.5).log_prob(x)

    z = noise_contrastive_constant(log_ratio(x), log_ratio(y))
    assert abs(z.log_evidence - bridge(log_ratio(x), log_ratio(y), 4000.0)) < 1e-9
    assert abs(z.log_evidence - 0.5 * math.log(math.pi)) < LIMIT * z.standard_error < 0.1
    fewer = noise_contrastive_constant(log_ratio(x), log_ratio(y), effective=400.0)
    assert abs(fewer.log_evidence - bridge(log_ratio(x), log_ratio(y), 400.0)) < 1e-9


@pytest.mark.calibration
def test_the_constant_equals_bridge_sampling_on_the_same_draws():
    target = energy_target(correlated())
    draws = bk.sample(target, num_warmup=200, num_samples=200, seed=2, progress=False)
    z = bridge_sampling(target, draws, seed=7)
    # The proposals of bridge_sampling, drawn again, are the noise.
    halves = halved(target, draws, None)
    generator = new_generator(7, stream="bridge sampling")
    noise = torch.randn(halves.num_proposals, 3, generator=generator, dtype=DOUBLE)
    noise = halves.fitted.loc + noise @ halves.fitted.scale_tril.T
    at_draws = halves.log_density - halves.fitted.log_prob(halves.unconstrained)
    at_noise = target.log_density(noise) - halves.fitted.log_prob(noise)
    worth = min(float(effective_sample_size(at_draws)), at_draws.numel())
    constant = noise_contrastive_constant(at_draws, at_noise, effective=worth)
    assert abs(constant.log_evidence - z.log_evidence) < 1e-6
    exactly = 1.5 * math.log(2 * math.pi) - 0.5 * float(torch.logdet(PRECISION))
    assert abs(z.log_evidence - exactly) < LIMIT * z.standard_error


def test_one_step_is_importance_sampling_from_the_base():
    model = jem()
    z = log_normaliser(model, num_temperatures=1, num_chains=2000, draws="enumerate", seed=2, progress=False)
    ratio = model.log_ratio(model.enumerate_states())
    # Relative variance of an importance weight with uniform proposals, exactly.
    weight = (ratio - model.exact_log_normaliser()).exp()
    variance = float(weight.square().mean() - 1)
    assert abs(z.forward.standard_error / math.sqrt(variance / 2000) - 1) < 0.15
    assert abs(z.value - float(model.exact_log_normaliser())) < LIMIT * z.standard_error


def test_a_seed_fixes_the_number_and_torch_keeps_its_stream():
    before = torch.get_rng_state()
    one, same, other = (log_normaliser(jem(), num_temperatures=3, seed=s, progress=False).value for s in (5, 5, 6))
    assert one == same != other and torch.equal(before, torch.get_rng_state())


# Bad input.


def test_a_model_without_a_finite_constant_is_refused():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with pytest.raises(ModelError, match=r"no finite normalising constant.*tilt=True"):
        log_normaliser(EnergyModel.from_classifier(network, normal(), tilt=False), progress=False)


def test_wrong_settings_are_named():
    model = jem()
    with pytest.raises(SettingsError, match="draws must be"):
        log_normaliser(model, draws="exact")
    with pytest.raises(SettingsError, match="cannot be listed"):
        log_normaliser(correlated(), draws="enumerate", num_temperatures=1, progress=False)
    with pytest.raises(ShapeError, match=r"\(n, 3\)"):
        log_normaliser(model, draws=torch.zeros(40, 2, dtype=DOUBLE))
    with pytest.raises(SettingsError, match="at least 32"):
        log_normaliser(model, draws=torch.zeros(4, 3, dtype=DOUBLE))
    with pytest.raises(SettingsError, match="num_temperatures"):
        log_normaliser(model, num_temperatures=0)
    with pytest.raises(SettingsError, match="log_normaliser"):
        energy_target(model)
    with pytest.raises(DataError, match="noise has to cover"):
        noise_contrastive_constant(torch.tensor([0.0, torch.inf]), torch.zeros(3))
    with pytest.raises(SettingsError, match="effective"):
        noise_contrastive_constant(torch.zeros(3), torch.zeros(3), effective=0.0)


def test_a_random_energy_is_refused():
    base = Independent(Normal(torch.zeros(3, dtype=DOUBLE), 1.0), 1)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2)).double()
    model = EnergyModel.from_classifier(network, base)
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match="energy is random.*eval"):
        log_normaliser(model, num_temperatures=2, num_chains=32, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert log_normaliser(model.eval(), num_temperatures=2, num_chains=32, progress=False).is_finite
