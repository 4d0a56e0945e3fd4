"""What gradient estimators learn from step to step is part of a training run: counted, kept, resumed."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.gradients import Annealed, ExponentialDecay, GumbelSoftmax, MovingAverage, ScoreFunction
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.training import fit

DATA = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64).repeat(3, 1)


class Killed(Exception):
    pass


class Codes(nn.Module):
    """A code of two bits for each datum, whose guide dies in its ``limit``-th call, if asked to."""

    def __init__(self, estimator, limit=None):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
        self.logits = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        self.estimator, self.calls, self.limit = estimator, 0, limit

    def model(self, x):
        with pyro.plate("data", len(DATA), subsample=torch.arange(len(x))):
            z = pyro.sample("z", dist.Bernoulli(x.new_full((2,), 0.5)).to_event(1))
            pyro.sample("x", dist.Normal(z @ self.weight, 0.5).to_event(1), obs=x)

    def guide(self, x):
        self.calls += 1
        if self.calls == self.limit:
            raise Killed
        with pyro.plate("data", len(DATA), subsample=torch.arange(len(x))):
            pyro.sample("z", dist.Bernoulli(logits=x @ self.logits).to_event(1), infer={"gradient": self.estimator})


def averaged():
    return ScoreFunction(2, MovingAverage(0.8))


def annealed():
    return GumbelSoftmax(Annealed(ExponentialDecay(0.1, 1.0, 0.2)))


def run(estimator, path=None, limit=None):
    codes = Codes(estimator, limit)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    result = fit(
        codes.model,
        codes.guide,
        ELBO(max_plate_nesting=1),
        DATA,
        num_epochs=4,
        batch_size=4,
        optimizer=sgd,
        checkpoint=path,
        checkpoint_seconds=0,
        progress=False,
    )
    return codes, result


@pytest.mark.parametrize("make", [averaged, annealed])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, make):
    whole, result = run(make())
    with pytest.raises(Killed):
        run(make(), tmp_path / "checkpoint", limit=8)
    again, resumed = run(make(), tmp_path / "checkpoint")
    assert again.calls < whole.calls + 2  # two for the fingerprint of model and guide
    assert torch.equal(resumed.losses, result.losses)
    assert torch.equal(again.logits, whole.logits)


def test_the_state_matters_to_the_resumed_run(tmp_path, monkeypatch):
    """Mutation: buffers that estimators hold are not found."""
    _, result = run(averaged())
    monkeypatch.setattr("bayeskit.inference.training._learner.named_modules_in_settings", lambda function: {})
    with pytest.raises(Killed):
        run(averaged(), tmp_path / "checkpoint", limit=8)
    assert not torch.equal(run(averaged(), tmp_path / "checkpoint")[1].losses, result.losses)


def test_every_step_of_the_optimiser_is_counted_once():
    estimator = annealed()
    run(estimator)
    assert int(estimator.temperature.num_steps) == 12


def test_a_plain_function_is_looked_into():
    estimator, settings = annealed(), {"gradient": averaged()}

    def model():
        pyro.sample("y", dist.Bernoulli(0.5))
        pyro.sample("z", dist.Bernoulli(0.5))

    def guide():
        logits = pyro.param("logits", torch.zeros(()))
        pyro.sample("y", dist.Bernoulli(logits=logits), infer={"gradient": estimator})
        pyro.sample("z", dist.Bernoulli(logits=logits), infer=settings)

    fit(model, guide, ELBO(), None, num_steps=5, progress=False)
    assert int(estimator.temperature.num_steps) == 5
    assert int(settings["gradient"].baseline.num_draws) == 5


def test_a_module_that_wants_arguments_is_no_temperature():
    with pytest.raises(SettingsError, match="without arguments"):
        GumbelSoftmax(nn.Linear(1, 1))


def test_an_objective_of_pyro_does_not_heed_the_mark():
    codes = Codes(averaged())
    with pytest.raises(GuideError, match="'z'.*Trace_ELBO.*objectives.ELBO"):
        fit(codes.model, codes.guide, pyro.infer.Trace_ELBO(max_plate_nesting=1), DATA, num_steps=1, progress=False)
