import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._core.statistics import effective_sample_size
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.objectives._constrained import (
    GECO,
    LogLikelihoodConstraint,
    MeanSquaredError,
    updated_multiplier,
)
from bayeskit.inference.objectives._objective import Draw

VARIANCE, DISTORTION, DIMENSIONS = 2.0, 0.3, 2
RATE = 0.5 * math.log(VARIANCE / DISTORTION) * DIMENSIONS  # nats, the rate-distortion function


class Quadrature(dist.Normal):
    """Instead of draws, one standard deviation up and down: exact for quadratic functions."""

    def rsample(self, sample_shape=()):
        shape = self._extended_shape(sample_shape)
        signs = 1.0 - 2.0 * (torch.arange(shape[0]) % 2).to(self.loc.dtype)
        return self.loc + self.scale * signs.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


@pytest.fixture(autouse=True)
def stream():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with global_stream(new_generator(3, stream="test")), pyro.get_param_store().scope():
        yield
    torch.set_default_dtype(before)


class LinearCode(nn.Module):
    """z ~ N(0, 1), x close to w z; the code is N(a x, s)."""

    def __init__(self, distribution=Quadrature):
        super().__init__()
        self.w, self.a = (nn.Parameter(torch.full((DIMENSIONS,), value)) for value in (0.9, 0.4))
        self.log_s = nn.Parameter(torch.zeros(DIMENSIONS))
        self.distribution = distribution

    def model(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(DIMENSIONS), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.w * z, 1.0).to_event(1), obs=x)

    def guide(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", self.distribution(self.a * x, self.log_s.exp()).to_event(1))

    def divergence(self, x):
        a, s = self.a.detach(), self.log_s.detach().exp()
        return float((0.5 * ((a * x).square() + s.square() - 1) - s.log()).sum(-1).mean())

    def error(self, x):
        """Mean squared error of each dimension."""
        w, a, s = self.w.detach(), self.a.detach(), self.log_s.detach().exp()
        return float((((1 - w * a) * x).square() + (w * s).square()).mean())


def gaussian_data():
    """Only the second moment matters to the optimum."""
    return math.sqrt(VARIANCE) * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])


def train(code, objective, x, steps, lr=0.01):
    optimizer = torch.optim.Adam(code.parameters(), lr=lr)
    multipliers = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr if step < steps // 2 else lr / 10
        optimizer.zero_grad()
        (objective.differentiable_loss(code.model, code.guide, x) / len(x)).backward()
        optimizer.step()
        multipliers.append(float(objective.multiplier))
    return torch.tensor(multipliers)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("constraint", "multiplier"),
    [
        (MeanSquaredError("x", DISTORTION * DIMENSIONS, summed=True), 1 / (2 * DISTORTION)),
        (MeanSquaredError("x", DISTORTION), DIMENSIONS / (2 * DISTORTION)),
        (
            # Unit variance: half the squared error of every dimension and a constant.
            LogLikelihoodConstraint("x", DIMENSIONS * (DISTORTION + math.log(2 * math.pi)) / 2),
            1 / DISTORTION,
        ),
    ],
    ids=["summed", "mean", "likelihood"],
)
def test_training_reaches_the_rate_distortion_optimum(constraint, multiplier):
    x, code = gaussian_data(), LinearCode()
    objective = GECO(constraint, 2, smoothing=0.8, rate=0.05, max_plate_nesting=1)
    train(code, objective, x, 500, lr=0.05)
    assert abs(code.error(x) / DISTORTION - 1) < 1e-3
    assert abs(code.divergence(x) / RATE - 1) < 1e-3
    assert abs(float(objective.multiplier) / multiplier - 1) < 1e-3


@pytest.mark.long
def test_the_multiplier_settles_where_draws_are_random(limit):
    x, code = gaussian_data().repeat(25, 1), LinearCode(dist.Normal)
    objective = GECO(MeanSquaredError("x", DISTORTION * DIMENSIONS, summed=True), 4, smoothing=0.9, rate=0.02)
    multipliers = train(code, objective, x, 2000)[-800:]
    error = float(multipliers.std()) / float(effective_sample_size(multipliers[None])) ** 0.5
    assert 0 < error < 0.05 * 1.67
    assert abs(float(multipliers.mean()) - 1 / (2 * DISTORTION)) < limit() * error


@pytest.mark.calibration
def test_a_multiplier_of_the_wrong_sign_misses_the_optimum(monkeypatch):
    """Mutation."""

    def wrong(multiplier, average, rate, bounds):
        return updated_multiplier(multiplier, -average, rate, bounds)

    monkeypatch.setattr("bayeskit.inference.objectives._constrained.updated_multiplier", wrong)
    x, code = gaussian_data(), LinearCode()
    objective = GECO(MeanSquaredError("x", DISTORTION), 2, smoothing=0.9, rate=0.02)
    train(code, objective, x, 300)
    assert abs(code.error(x) / DISTORTION - 1) > 0.1


def test_loss_average_and_gradient_of_two_steps():
    x, code = gaussian_data(), LinearCode()
    objective = GECO(MeanSquaredError("x", 0.5), 2, smoothing=0.75, rate=0.1, multiplier=2.0)
    here = code.error(x) - 0.5
    first = objective.differentiable_loss(code.model, code.guide, x)
    assert abs(float(objective.average) - here) < 1e-12
    assert abs(float(first.detach()) / 4 - code.divergence(x) - 2.0 * here) < 1e-12
    with torch.no_grad():
        code.w.mul_(1.5)
    later = code.error(x) - 0.5
    second = objective.differentiable_loss(code.model, code.guide, x)
    average = 0.75 * here + 0.25 * later
    multiplier = 2.0 * math.exp(0.1 * here)
    assert abs(float(objective.multiplier) - multiplier * math.exp(0.1 * average)) < 1e-12
    # The value has the average, the gradient passes through the constraint of this step in full.
    assert abs(float(second.detach()) / 4 - code.divergence(x) - multiplier * average) < 1e-12
    (gradient,) = torch.autograd.grad(second, code.w)
    w, a, s = (p.detach() for p in (code.w, code.a, code.log_s.exp()))
    slope = (-2 * (1 - w * a) * a * VARIANCE + 2 * w * s.square()) / DIMENSIONS
    assert float((gradient / 4 - multiplier * slope).abs().max()) < 1e-12


def test_what_was_learnt_is_resumed_and_evaluating_teaches_nothing():
    x, code = gaussian_data(), LinearCode()
    objective = GECO(MeanSquaredError("x", 0.5), 2)
    objective.differentiable_loss(code.model, code.guide, x)
    state = {name: value.clone() for name, value in objective.state_dict().items()}
    loss = objective.loss(code.model, code.guide, x)
    assert all(torch.equal(value, state[name]) for name, value in objective.state_dict().items())
    resumed = GECO(MeanSquaredError("x", 0.5), 2)
    resumed.load_state_dict(state)
    assert resumed.loss(code.model, code.guide, x) == loss
    after = [float(o.differentiable_loss(code.model, code.guide, x).detach()) for o in (objective, resumed)]
    assert after[0] == after[1] and float(objective.average) == float(resumed.average)


def test_the_multiplier_stays_in_its_bounds():
    one = torch.tensor(1.0)
    assert float(updated_multiplier(one, torch.tensor(50.0), 1.0, (0.1, 1e6))) == pytest.approx(math.e, abs=1e-12)
    assert float(updated_multiplier(one, torch.tensor(50.0), 1.0, (0.1, 2.0))) == 2.0
    assert float(updated_multiplier(one, torch.tensor(-50.0), 1.0, (0.5, 2.0))) == 0.5
    assert float(updated_multiplier(one, torch.tensor(-0.5), 0.2, (0.1, 2.0))) == pytest.approx(math.exp(-0.1))


def test_constraints_see_masks_inner_plates_and_events():
    x = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[True, True, False], [True, True, True]])

    def model(x):
        with pyro.plate("data", 2, dim=-2):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            with pyro.plate("pixels", 3, dim=-1), pyro.poutine.mask(mask=mask):
                pyro.sample("x", dist.Normal(torch.zeros(2), 2.0).to_event(1), obs=x)

    def guide(x):
        with pyro.plate("data", 2, dim=-2):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    objective = GECO(MeanSquaredError("x", 1.0))
    particles = Draw(objective, model, guide, (x,), {})(5)
    sums = torch.tensor([float(x[0, :2].square().sum()), float(x[1].square().sum())])
    mean = MeanSquaredError("x", 1.0)(particles)
    assert mean.shape == (5, 2)
    assert float((mean - (sums / torch.tensor([4.0, 6.0]) - 1)).abs().max()) < 1e-12
    assert float((MeanSquaredError("x", 1.0, summed=True)(particles) - (sums - 1)).abs().max()) < 1e-12
    density = sums / 8 + torch.tensor([4.0, 6.0]) * math.log(2 * math.sqrt(2 * math.pi))
    assert float((LogLikelihoodConstraint("x", 1.0)(particles) - (density - 1)).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", ["svi", "module"])
def test_a_function_may_be_the_constraint_in_single_precision_and_minibatches(kind):
    torch.set_default_dtype(torch.float32)

    def model(x):
        with pyro.plate("data", 100, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.tensor(0.1))
        with pyro.plate("data", 100, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, 0.5))

    objective = GECO(lambda particles: -particles.log_likelihood - 1.0, 3)
    x = torch.ones(10)
    if kind == "svi":
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=objective)
        assert math.isfinite(svi.step(x)) and float(pyro.param("loc").detach()) != pytest.approx(0.1, abs=1e-6)
    else:
        loss = objective(model, guide)(x)
        assert loss.dtype == torch.float32 and loss.requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GECO("x"), "constraint must be callable"),
        (lambda: GECO(abs, smoothing=1.0), "smoothing"),
        (lambda: GECO(abs, rate=0.0), "rate"),
        (lambda: GECO(abs, multiplier=0.0), "multiplier"),
        (lambda: GECO(abs, bounds=(2.0, 3.0)), "bounds"),
        (lambda: GECO(abs, bounds=[[], [[]]]), "bounds must be a number"),
        (lambda: GECO(abs, 0), "num_particles"),
        (lambda: MeanSquaredError("x", 0.0), "tolerance"),
    ],
)
def test_settings_outside_their_domain_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()


def test_constraints_that_do_not_fit_are_refused():
    x, code = gaussian_data(), LinearCode()
    with pytest.raises(SettingsError, match="site 'y', but the model observes x"):
        GECO(MeanSquaredError("y", 0.1)).loss(code.model, code.guide, x)
    with pytest.raises(ShapeError, match=r"shape \(4,\), not that of \(particles, \*data\), \(1, 4\)"):
        GECO(lambda particles: particles.log_likelihood[0]).loss(code.model, code.guide, x)
