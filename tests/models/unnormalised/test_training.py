"""Training of energy models against maximum likelihood by enumeration, closed forms, and the bridge."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal

from bayeskit._core.randomness import new_generator
from bayeskit.errors import AccuracyWarning, DataError, LossError, ModelError, SettingsError, ShapeError
from bayeskit.models.unnormalised import (
    NoiseContrastive,
    PersistentContrastiveDivergence,
    RankingNoiseContrastive,
    ScoreMatchingObjective,
    fit_energy,
    noise_contrastive_constant,
)
from bayeskit.models.unnormalised._models import EnergyModel

DOUBLE = torch.float64


class Pairs(nn.Module):
    """Fields and couplings of three bits, a full exponential family of pairs."""

    def __init__(self):
        super().__init__()
        self.field, self.coupling = (nn.Parameter(torch.zeros(3, dtype=DOUBLE)) for _ in range(2))

    def statistics(self, x):
        return torch.cat([x, x[..., [0, 1, 2]] * x[..., [1, 2, 0]]], -1)

    def forward(self, x):
        return -self.statistics(x) @ torch.cat([self.field, self.coupling])


def pairs():
    return EnergyModel.of_bits(Pairs(), 3)


def by_lbfgs(loss, parameters, steps=60):
    """Minimise a fixed function of the parameters."""
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def bits_of_pairs(count):
    """Return data of known parameters, the maximum likelihood estimate, and features and probabilities of states."""
    model = pairs()
    with torch.no_grad():
        model.energy.field.copy_(torch.tensor([0.5, -0.5, 0.2]))
        model.energy.coupling.copy_(torch.tensor([0.8, -0.6, 0.4]))
    states = model.enumerate_states()
    probabilities = (model.log_density(states) - model.exact_log_normaliser()).detach().exp()
    generator = new_generator(0, stream="test of training")
    x = states[torch.multinomial(probabilities, count, replacement=True, generator=generator)]
    fitted = pairs()
    parameters = [fitted.energy.field, fitted.energy.coupling]
    by_lbfgs(lambda: fitted.exact_log_normaliser() - fitted.log_density(x).mean(), parameters)
    return x, vector(fitted), model.energy.statistics(states), probabilities


def excess_of_noise_contrast(features, p, ratio):
    """Return the asymptotic variance of noise contrast beyond maximum likelihood, a datum, with uniform noise."""
    noise = torch.full_like(p, 1 / len(p))
    h = ratio * noise / (p + ratio * noise)
    wide = torch.cat([features, -torch.ones_like(features[:, :1])], 1)
    inverse = torch.linalg.inv((wide.mT * (p * h)) @ wide)
    pull = inverse @ (wide.mT @ (p * h))
    covariance = inverse - (1 + 1 / ratio) * pull.outer(pull)
    best = torch.linalg.inv(torch.cov(features.mT, aweights=p, correction=0))
    return covariance.diagonal()[:-1] - best.diagonal()


def vector(model):
    return torch.cat([model.energy.field, model.energy.coupling]).detach()


@pytest.mark.parametrize("objective", [NoiseContrastive(20, redraw=False), RankingNoiseContrastive(20, redraw=False)])
def test_noise_contrast_is_nearly_maximum_likelihood(objective):
    x, best, features, probabilities = bits_of_pairs(4000)
    model = pairs()
    torch.manual_seed(1)
    by_lbfgs(lambda: objective.differentiable_loss(model, None, x) / len(x), list(model.parameters()))
    # Maximum likelihood is efficient, so the difference from it has the variance that noise contrast has in excess.
    # Ranking has about the same.
    excess = excess_of_noise_contrast(features, probabilities, 20)
    slack = 1.0 if isinstance(objective, NoiseContrastive) else 1.2
    z = (vector(model) - best) / (excess / len(x)).sqrt()
    assert float(z.abs().max()) < 4.8 * slack
    if isinstance(objective, NoiseContrastive):
        assert abs(float((model.log_constant - model.exact_log_normaliser()).detach())) < 0.15
    else:
        assert float(model.log_constant.detach()) == 0


def test_the_constant_alone_is_the_bridge():
    x, *_ = bits_of_pairs(1000)
    model = pairs()
    with torch.no_grad():
        model.energy.field.copy_(torch.tensor([0.5, -0.5, 0.2]))
    objective = NoiseContrastive(3, redraw=False)
    torch.manual_seed(2)
    by_lbfgs(lambda: objective.differentiable_loss(model, None, x) / len(x), [model.log_constant])
    noise = objective.state_dict()["noise"]
    z = noise_contrastive_constant(model.log_ratio(x), model.log_ratio(noise))
    assert noise.shape == (3000, 3) and abs(float(model.log_constant.detach()) - z.log_evidence) < 1e-6


def test_score_matching_of_a_normal_is_its_closed_form():
    x = 0.7 * torch.randn(300, 2, generator=new_generator(0, stream="test"), dtype=DOUBLE)
    precision = nn.Parameter(torch.ones(2, dtype=DOUBLE))
    energy = nn.Module()
    energy.precision = precision
    energy.forward = lambda rows: 0.5 * (precision * rows.square()).sum(-1)
    model = EnergyModel(energy, Independent(Normal(torch.zeros(2, dtype=DOUBLE), 1.0), 1))
    by_lbfgs(lambda: ScoreMatchingObjective().differentiable_loss(model, None, x) / len(x), [precision])
    assert torch.allclose(precision, 1 / x.square().mean(0), rtol=1e-6)


@pytest.mark.calibration
def test_contrastive_divergence_matches_moments():
    x, *_ = bits_of_pairs(4000)
    model = pairs()
    objective = PersistentContrastiveDivergence(1000)
    fit_energy(model, x, objective=objective, num_steps=200, learning_rate=0.03, seed=1, progress=False)
    states = model.enumerate_states()
    probabilities = (model.log_density(states) - model.exact_log_normaliser()).exp()
    gap = (probabilities @ model.energy.statistics(states) - model.energy.statistics(x).mean(0)).abs().max()
    assert float(gap.detach()) < 4.5 * 0.5 / math.sqrt(1000)  # as noisy as the moments of the chains of one step
    assert objective.chains.shape == (1000, 3) and bool(((objective.chains == 0) | (objective.chains == 1)).all())


@pytest.mark.calibration
def test_contrastive_divergence_of_real_vectors():
    x = 1 + 0.5 * torch.randn(500, 1, generator=new_generator(0, stream="test"), dtype=DOUBLE)
    energy = nn.Module()
    energy.a = nn.Parameter(torch.tensor([1.0, 0.0], dtype=DOUBLE))
    energy.forward = lambda rows: (0.5 * energy.a[0] * rows.square() - energy.a[1] * rows).sum(-1)
    model = EnergyModel(energy, Independent(Normal(torch.zeros(1, dtype=DOUBLE), 2.0), 1))
    objective = PersistentContrastiveDivergence(1000)
    fit_energy(model, x, objective=objective, num_steps=400, learning_rate=0.05, seed=1, progress=False)
    precision, shift = energy.a.tolist()
    spread = 1 / math.sqrt(precision)
    assert abs(shift / precision - float(x.mean())) < 4.5 * 0.5 / math.sqrt(1000)
    assert abs(spread / float(x.std(correction=0)) - 1) < 4.5 / math.sqrt(2000)


def test_a_resumed_run_is_the_same(tmp_path):
    x, *_ = bits_of_pairs(200)
    found = []
    for name, stops in (("straight", [30]), ("resumed", [12, 30])):
        for steps in stops:
            model = pairs()
            settings = {"objective": PersistentContrastiveDivergence(20), "num_steps": steps, "batch_size": 50}
            fit_energy(model, x, checkpoint=tmp_path / name, seed=3, progress=False, **settings)
        found.append(vector(model))
    assert torch.equal(*found)


def test_classes_add_their_cross_entropy():
    network = nn.Linear(3, 2).double()
    base = Independent(Bernoulli(torch.full((3,), 0.5, dtype=DOUBLE)), 1)
    model = EnergyModel.from_classifier(network, base)
    x, y = model.enumerate_states(), torch.arange(8) % 2
    objective = NoiseContrastive(2, redraw=False, class_weight=0.5)
    torch.manual_seed(0)
    alone = objective.differentiable_loss(model, None, x)
    both = objective.differentiable_loss(model, None, x, y)
    assert torch.allclose(both - alone, 0.5 * nn.functional.cross_entropy(network(x), y, reduction="sum"))
    fitted = fit_energy(model, x, y, num_steps=20, progress=False)
    assert fitted.num_steps == 20 and bool(fitted.losses.isfinite().all())


# Bad input.


def straight(dim=2):
    """Return an energy that falls along one direction without end, which a base does not hold."""
    network = nn.Sequential(nn.Linear(dim, 1), nn.Flatten(0)).double()
    with torch.no_grad():
        network[0].weight.fill_(1.0)
    return EnergyModel(network, Independent(Normal(torch.zeros(dim, dtype=DOUBLE), 1.0), 1))


def test_chains_that_diverge_are_named():
    x = torch.randn(50, 2, generator=new_generator(0, stream="test"), dtype=DOUBLE)
    objective = PersistentContrastiveDivergence(32, num_moves=5)
    with pytest.raises(LossError, match=r"persistent contrastive divergence diverge.*tilt=True"):
        fit_energy(straight(), x, objective=objective, num_steps=500, learning_rate=1e-6, progress=False)
    with pytest.raises(LossError, match="mean log densities of chains and data"):
        fit_energy(
            straight(), x, objective=PersistentContrastiveDivergence(32, max_gap=1e-3), num_steps=5, progress=False
        )


def test_a_model_that_has_no_constant_after_training_is_said():
    x = torch.randn(50, 2, generator=new_generator(0, stream="test"), dtype=DOUBLE)
    with pytest.warns(AccuracyWarning, match="no finite normalising constant"):
        fit_energy(straight(), x, num_steps=2, progress=False)


def test_wrong_data_and_settings_are_named():
    model = pairs()
    x = model.enumerate_states()
    with pytest.raises(ShapeError, match=r"\(n, 3\)"):
        fit_energy(model, x[:, :2])
    with pytest.raises(DataError, match="entries other than 0 and 1"):
        fit_energy(model, 2 * x)
    with pytest.raises(DataError, match="1 of 8 rows of x are not finite"):
        fit_energy(model, torch.where(torch.arange(8).unsqueeze(1) == 2, torch.nan, x))
    with pytest.raises(SettingsError, match="from_classifier"):
        fit_energy(model, x, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(SettingsError, match="bits have no derivative"):
        fit_energy(model, x, objective=ScoreMatchingObjective(), progress=False)
    with pytest.raises(SettingsError, match="EnergyModel"):
        fit_energy(nn.Linear(3, 1), x)
    with pytest.raises(SettingsError, match="ratio"):
        NoiseContrastive(0)
    with pytest.raises(SettingsError, match="Independent"):
        NoiseContrastive(noise=Normal(torch.zeros(3), 1.0))
    with pytest.raises(SettingsError, match="class_weight"):
        NoiseContrastive(class_weight=-1.0)


def test_score_matching_refuses_kinks():
    base = Independent(Normal(torch.zeros(1, dtype=DOUBLE), 1.0), 1)
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(-2)).double()
    model = EnergyModel(network, base, tilt=True)
    with pytest.raises(ModelError, match="part ReLU, whose slope jumps.*Softplus"):
        fit_energy(model, torch.ones(3, 1, dtype=DOUBLE), objective=ScoreMatchingObjective(), num_steps=1)
