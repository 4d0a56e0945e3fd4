import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from bayeskit._core.storage import setting_as_json
from bayeskit.errors import BayeskitWarning, CheckpointError, SettingsError
from bayeskit.inference.objectives import (
    ELBO,
    GECO,
    IWAE,
    SUMO,
    TVO,
    VCD,
    Cyclical,
    EqualMoments,
    Linear,
    MeanSquaredError,
    ReciprocalTail,
)
from bayeskit.inference.samplers import HMC
from bayeskit.inference.training import fit


def columns(count=24, seed=0):
    return torch.randn(count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1.0


class Code(nn.Module):
    """The decoder is fixed: only the guide learns."""

    def __init__(self, loc=0.0, log_scale=0.0):
        super().__init__()
        self.loc, self.log_scale = (
            nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (loc, log_scale)
        )

    def model(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(2 * z, 0.5).to_event(1), obs=x)

    def guide(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.loc * x, self.log_scale.exp()).to_event(1))


def run(objective, start=(0.0, 0.0), **settings):
    code = Code(*start)
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    defaults = {"num_epochs": 3, "batch_size": 8, "optimizer": adam, "progress": False}
    return fit(code.model, code.guide, objective, columns(), **(defaults | settings))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: ELBO(kl_weight=Linear(20)), lambda: ELBO(kl_weight=Linear(500))),
        (lambda: ELBO(kl_weight=Linear(20)), lambda: ELBO(kl_weight=Cyclical(20))),
        (lambda: GECO(MeanSquaredError("x", 0.5)), lambda: GECO(MeanSquaredError("x", 5.0))),
        (lambda: GECO(MeanSquaredError("x", 0.5)), lambda: GECO(MeanSquaredError("x", 0.5), bounds=(0.5, 2.0))),
        (lambda: SUMO(), lambda: SUMO(ReciprocalTail(switch=9))),
        (lambda: TVO(4), lambda: TVO(4, EqualMoments(5))),
        (lambda: VCD(num_steps=1), lambda: VCD(num_steps=1, kernel=HMC(step_size=0.3, num_steps=2))),
    ],
    ids=["schedule", "kind", "tolerance", "bounds", "tail", "temperatures", "kernel"],
)
def test_a_checkpoint_refuses_an_objective_of_other_settings(tmp_path, first, second):
    path = tmp_path / "checkpoint"
    run(first(), num_epochs=1, checkpoint=path)
    with pytest.raises(CheckpointError, match="written with objective="):
        run(second(), num_epochs=2, checkpoint=path)
    assert run(first(), num_epochs=2, checkpoint=path).num_epochs == 2


def test_descriptions_hold_no_addresses_and_tell_tensors_apart():
    class Plain:
        pass

    assert setting_as_json(Plain()) == setting_as_json(Plain())
    one = torch.ones(2)
    assert setting_as_json({"a": (one,)}) == setting_as_json({"a": (one.clone(),)})
    assert len({str(setting_as_json(x)) for x in (one, 2 * one, one.double(), one[:1], one[None])}) == 5


@pytest.mark.calibration
@pytest.mark.parametrize(
    "make",
    [
        lambda: ELBO(2, kl_weight=Linear(9)),
        lambda: GECO(MeanSquaredError("x", 0.5), rate=0.5, smoothing=0.5),
        lambda: VCD(num_steps=1),
    ],
    ids=["annealing", "multiplier", "control variate"],
)
def test_a_second_run_starts_as_the_first(make, monkeypatch):
    objective = make()
    first = run(objective).losses
    assert torch.equal(run(objective).losses, first)
    monkeypatch.setattr(type(objective), "reset", lambda self: None)  # mutation
    assert not torch.equal(run(objective).losses, first)


@pytest.mark.parametrize("batch_size", [8, None])
def test_control_variates_belong_to_data_and_not_to_positions(batch_size):
    """The model's plate has the size of the minibatch; the loop says which data it holds."""
    objective = VCD(num_steps=1)
    run(objective, num_epochs=1, batch_size=batch_size)
    table = objective.state_dict()["control_variate"]
    assert table.shape == (24,) and bool(table.isfinite().all())


def test_patience_compares_what_stays_the_same():
    # The guide starts where it is best without any weight on the divergence.
    settings = {"num_epochs": 60, "patience": 5, "validation": columns(16, seed=1), "start": (0.5, -4.0)}
    objective = ELBO(4, kl_weight=Linear(120))
    with pytest.warns(BayeskitWarning, match="changes in training even if.*give validation_objective"):
        moving = run(objective, **settings)
    # The weight rises faster than the guide learns: the first loss looks best.
    assert moving.ending == "early stopping" and moving.best_epoch == 0
    fixed = run(objective, **settings, validation_objective=ELBO(50))
    assert fixed.best_epoch > 5
    loss = [ELBO().loss(result.model, result.guide, columns(400, seed=2)) / 400 for result in (moving, fixed)]
    assert loss[1] < loss[0] - 0.5
    # Only what moves is warned of; warnings are errors here.
    run(ELBO(), **settings | {"num_epochs": 2})
    for moves in (GECO(MeanSquaredError("x", 0.5)), VCD(num_steps=1)):
        with pytest.warns(BayeskitWarning, match=f"the loss of {type(moves).__name__} changes"):
            run(moves, **settings | {"num_epochs": 1})


def test_validation_losses_are_those_of_the_validation_objective():
    settings = {"start": (0.3, -0.5), "num_epochs": 1, "validation": columns(16, seed=1)}
    own = run(ELBO(kl_weight=7.0), **settings)
    other = run(ELBO(kl_weight=7.0), **settings, validation_objective=ELBO())
    loc, scale = other.parameters["model.loc"] * settings["validation"], other.parameters["model.log_scale"].exp()
    divergence = (0.5 * (loc.square() + scale.square() - 1) - scale.log()).mean()
    # The same random numbers, one weight of the divergence for the other.
    assert torch.equal(own.losses, other.losses) and divergence > 0.1
    assert abs(float(own.validation_losses - other.validation_losses - 6 * divergence)) < 1e-10


def test_one_validation_objective_serves_a_run_and_its_continuation(tmp_path):
    settings = {
        "validation": columns(16, seed=1),
        "validation_objective": IWAE(3),
        "checkpoint": tmp_path / "checkpoint",
    }
    run(ELBO(), **settings, num_epochs=1)
    assert torch.equal(
        run(ELBO(), **settings).validation_losses, run(ELBO(), **settings | {"checkpoint": None}).validation_losses
    )


def test_bad_validation_objectives_are_refused():
    with pytest.raises(SettingsError, match="needs validation data"):
        run(ELBO(), validation_objective=ELBO())
    with pytest.raises(SettingsError, match="validation_objective must be one of"):
        run(ELBO(), validation=columns(8), validation_objective="elbo")
