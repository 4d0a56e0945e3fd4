"""Wake and sleep updates against closed forms; the wake update's bias is enumerated in test_discrete_guides."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.objectives import IWAE
from bayeskit.inference.objectives._reweighted_wake_sleep import ReweightedWakeSleep

# z ~ N(0, 1), x given z ~ N(slope z, 1), x = 1; guide N(tilt x + shift, sd).
START = {"slope": 1.3, "tilt": 0.4, "shift": 0.1, "log_sd": -0.2}
COUNT = 40_000


def leaves_of(count: int = COUNT) -> dict[str, Tensor]:
    return {k: torch.full((count,), v, dtype=torch.float64, requires_grad=True) for k, v in START.items()}


def problem(leaves: dict[str, Tensor]):
    def model(x: Tensor, size: int) -> None:
        with pyro.plate("data", size):
            z = pyro.sample("z", dist.Normal(leaves["slope"].new_zeros(()), 1.0))
            pyro.sample("x", dist.Normal(leaves["slope"] * z, 1.0), obs=x)

    def guide(x: Tensor, size: int) -> None:
        with pyro.plate("data", size):
            pyro.sample("z", dist.Normal(leaves["tilt"] * x + leaves["shift"], leaves["log_sd"].exp()))

    return model, guide


def gradients(objective, *, named: bool = False) -> dict[str, Tensor]:
    leaves = leaves_of()
    model, guide = problem(leaves)
    x = torch.ones(COUNT, dtype=torch.float64)
    with global_stream(new_generator(4, stream="wake sleep")):
        if named:
            loss = objective.differentiable_loss(model, guide, x=x, size=COUNT)
        else:
            loss = objective.differentiable_loss(model, guide, x, COUNT)
    grads = torch.autograd.grad(-loss, list(leaves.values()), allow_unused=True)
    return {k: torch.zeros(COUNT) if g is None else g for k, g in zip(leaves, grads, strict=True)}


def z_scores(found: dict[str, Tensor], exact: dict[str, float]) -> list[float]:
    return [float((found[k].mean() - v) / (found[k].std() / COUNT**0.5)) for k, v in exact.items()]


def exact_sleep() -> dict[str, float]:
    """Gradient of E log q(z | x) over the model's own z and x."""
    a, b, c, sd = START["slope"], START["tilt"], START["shift"], torch.tensor(START["log_sd"]).double().exp().item()
    square = 1 - 2 * a * b + b**2 * (a**2 + 1) + c**2
    return {"tilt": (a - b * (a**2 + 1)) / sd**2, "shift": -c / sd**2, "log_sd": square / sd**2 - 1}


@pytest.mark.parametrize("named", [False, True])
def test_the_sleep_update_dreams_of_data(named, limit):
    objective = ReweightedWakeSleep(2, wake_phi=0.0, sleep_phi=1.0, observed={"x": "x" if named else 0})
    assert max(map(abs, z_scores(gradients(objective, named=named), exact_sleep()))) < limit(3)


def test_a_sleep_update_on_the_given_data_is_noticed(limit, monkeypatch):
    # The mutation: the model's latent variables, but the data that were given.
    monkeypatch.setattr("bayeskit.inference.objectives._reweighted_wake_sleep._put", lambda *_: None)
    objective = ReweightedWakeSleep(2, wake_phi=0.0, sleep_phi=1.0, observed={"x": 0})
    assert max(map(abs, z_scores(gradients(objective), exact_sleep()))) > limit(3)


def test_weights_of_the_updates_add_up(limit):
    both = gradients(ReweightedWakeSleep(4, wake_phi=0.5, sleep_phi=2.0, observed={"x": 0}))
    wake = gradients(ReweightedWakeSleep(4))
    neither = gradients(ReweightedWakeSleep(4, wake_phi=0.0))
    assert all(float(neither[k].abs().max()) == 0 for k in ("tilt", "shift", "log_sd"))
    assert torch.equal(both["slope"], wake["slope"])
    # The wake part uses the same draws, which come first; what is left is the sleep part.
    sleep = {k: (both[k] - 0.5 * wake[k]) / 2 for k in ("tilt", "shift", "log_sd")}
    assert max(map(abs, z_scores(sleep, exact_sleep()))) < limit(3)


def test_the_model_follows_the_importance_weighted_bound():
    found, exact = (gradients(o)["slope"] for o in (ReweightedWakeSleep(5), IWAE(5)))
    difference = found - exact  # the same draws, once with a gradient through them
    assert float(difference.abs().max()) < 1e-12


def test_many_particles_bring_the_wake_update_to_the_posterior(limit):
    # The posterior is N(slope / (1 + slope^2), 1 / (1 + slope^2)); E of the guide's score over it.
    a, sd = START["slope"], torch.tensor(START["log_sd"]).double().exp().item()
    centre, mean = START["tilt"] + START["shift"], a / (1 + a**2)
    exact = {
        "shift": (mean - centre) / sd**2,
        "log_sd": (1 / (1 + a**2) + (mean - centre) ** 2) / sd**2 - 1,
    }
    leaves = leaves_of(400)
    model, guide = problem(leaves)
    with global_stream(new_generator(4, stream="wake sleep")):
        loss = ReweightedWakeSleep(4_000).differentiable_loss(model, guide, torch.ones(400, dtype=torch.float64), 400)
    loss.backward()
    for name, value in exact.items():
        found = -leaves[name].grad
        assert abs(float(found.mean()) - value) < limit(2) * float(found.std()) / 20 + 1 / 4_000


def test_discrete_dreams(limit):
    logit = torch.zeros(COUNT, dtype=torch.float64, requires_grad=True)

    def model(x: Tensor) -> None:
        with pyro.plate("data", COUNT):
            z = pyro.sample("z", dist.Bernoulli(x.new_tensor(0.3)))
            pyro.sample("x", dist.Bernoulli(0.2 + 0.5 * z), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", COUNT):
            pyro.sample("z", dist.Bernoulli(logits=logit * x))

    objective = ReweightedWakeSleep(2, wake_phi=0.0, sleep_phi=1.0, observed={"x": 0})
    with global_stream(new_generator(4)):
        objective.differentiable_loss(model, guide, torch.ones(COUNT, dtype=torch.float64)).backward()
    # E x (z - 1/2) = P(x = 1) (P(z = 1 | x = 1) - 1/2) = 0.21 - 0.35 / 2
    assert abs(float((-logit.grad.mean() - 0.035) / (logit.grad.std() / COUNT**0.5))) < limit()


class TestBadInput:
    @pytest.mark.parametrize(
        "settings", [{"wake_phi": -1.0}, {"sleep_phi": -1.0}, {"sleep_phi": 1.0}, {"num_particles": 0}]
    )
    def test_settings(self, settings):
        with pytest.raises(SettingsError):
            ReweightedWakeSleep(**settings)

    def test_an_argument_that_is_not_there(self):
        with pytest.raises(SettingsError, match="'y'.*site 'x'"):
            gradients(ReweightedWakeSleep(2, sleep_phi=1.0, observed={"x": "y"}))

    def test_a_site_that_was_forgotten(self):
        with pytest.raises(ModelError, match="'x' is observed"):
            gradients(ReweightedWakeSleep(2, sleep_phi=1.0, observed={"y": 0}))

    def test_an_argument_of_another_shape(self):
        with pytest.raises(ShapeError, match="site 'x'.*int"):
            gradients(ReweightedWakeSleep(2, sleep_phi=1.0, observed={"x": 1}))
