import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from bayeskit._core.folders import Schema
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._core.storage import loaded_tensors, save_tensors
from bayeskit.errors import CheckpointError, OutputError, SamplingWarning, SettingsError
from bayeskit.inference.objectives import ELBO, IWAE, Linear
from bayeskit.inference.training import fit

TRAINING = Schema("a checkpoint of training", 4)


def places(node, place="state"):
    """Yield the place of each tensor in a stored state, such as ``state.losses``, with its name in the file."""
    if isinstance(node, dict):
        ((kind, content),) = node.items()
        if kind == "tensor":
            yield place, content
        else:
            for key, item in enumerate(content) if kind in ("list", "tuple") else content:
                yield from places(item, f"{place}.{key}")


def columns(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64) + 1.0


class Killed(Exception):
    pass


class Autoencoder(nn.Module):
    """A VAE with dropout and batch normalisation that dies in its ``limit``-th guide call, if asked to."""

    def __init__(self, limit=None, width=8):
        super().__init__()
        with global_stream(new_generator(1)):
            self.encoder = nn.Sequential(
                nn.Linear(2, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 2)
            ).double()
            self.decoder = nn.Linear(1, 2).double()
        self.calls, self.limit = 0, limit

    def model(self, x):
        with pyro.plate("data", 24, subsample=torch.arange(len(x))):
            z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        self.calls += 1
        if self.calls == self.limit:
            raise Killed
        with pyro.plate("data", 24, subsample=torch.arange(len(x))):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


ADAM = functools.partial(torch.optim.Adam, lr=0.02)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def once(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)


def milestones(optimizer):
    return lr_scheduler.MultiStepLR(optimizer, [2, 9], gamma=0.5)


def run(path=None, data=None, limit=None, width=8, **settings):
    vae = Autoencoder(limit, width)
    # Annealed, so that the objective has a state of its own.
    defaults = {"objective": ELBO(2, kl_weight=Linear(30), max_plate_nesting=1), "num_epochs": 5, "batch_size": 8}
    settings = defaults | {"optimizer": ADAM, "validation": columns(10, seed=2), "checkpoint_seconds": 0} | settings
    objective = settings.pop("objective")
    data = columns() if data is None else data
    return vae, fit(vae.model, vae.guide, objective, data, checkpoint=path, progress=False, **settings)


def assert_same(first, second):
    for name, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name
    for name in ("losses", "epoch_losses", "validation_losses"):
        assert torch.equal(getattr(first[1], name), getattr(second[1], name)), name


@pytest.mark.calibration
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": SGD, "schedule": once, "gradient_clipping": 0.5},
        {"schedule": milestones, "patience": 4, "validation_objective": ELBO(3, max_plate_nesting=1)},
        {"schedule": functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0)},
        {"data": DataLoader(TensorDataset(columns()), batch_size=8, shuffle=True)},
    ],
    ids=["adam", "momentum", "milestones", "plateau", "loader"],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, settings):
    whole = run(**settings)
    assert whole[1].num_steps == 15
    # Two calls before the first step; 3 steps and 2 batches of validation an epoch: in the middle of one, and
    # in a validation.
    for limit in (2 + 5 + 3, 2 + 5 + 5):
        path = tmp_path / f"{limit}"
        with pytest.raises(Killed):
            run(path, limit=limit, **settings)
        assert_same(run(path, **settings), whole)
        assert_same(run(path, **settings), whole)  # at its end: nothing is left to do
    longer = run(path, **settings | {"num_epochs": 7})
    assert_same(longer, run(**settings | {"num_epochs": 7}))


@pytest.mark.calibration
@pytest.mark.parametrize(
    "lost", ["state.streams.0", "state.optimizer.state.0.exp_avg", "state.buffers.model.encoder.1"]
)
def test_what_the_checkpoint_holds_matters(tmp_path, lost):
    """Mutation: with one part of the state changed the run does not end with the same bits."""
    path = tmp_path / "checkpoint"
    with pytest.raises(Killed):
        run(path, limit=10)
    with loaded_tensors(path, TRAINING) as (tensors, facts):
        changed = [name for place, name in places(facts["state"]) if place.startswith(lost)]
    assert changed
    for name in changed:
        tensors[name] = torch.Generator().get_state() if "streams" in lost else tensors[name] + 1
    save_tensors(path, tensors, facts, TRAINING)
    (vae, result), (other, whole) = run(path), run()
    if "buffers" in lost:  # running means matter in evaluation only
        assert not torch.equal(result.validation_losses, whole.validation_losses)
    else:
        assert not torch.equal(vae.encoder[0].weight, other.encoder[0].weight)


def test_a_run_that_was_stopped_goes_on(tmp_path):
    path = tmp_path / "checkpoint"
    with pytest.warns(SamplingWarning, match="the same call resumes from the checkpoint"):
        first = run(path, num_epochs=4000, time_budget=0.2)[1]
    assert first.ending == "time budget"
    result = run(path, num_epochs=first.num_epochs + 2)
    assert_same(result, run(num_epochs=first.num_epochs + 2))
    assert result[1].seconds > first.seconds


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 9}, "another model"),
        ({"data": columns(seed=1)}, "other data"),
        ({"objective": IWAE(2)}, "written with objective="),
        ({"objective": ELBO(3, kl_weight=Linear(30), max_plate_nesting=1)}, "'num_particles': 2"),
        ({"objective": ELBO(2, kl_weight=Linear(31), max_plate_nesting=1)}, "'num_steps': 30"),
        ({"validation_objective": ELBO()}, "validation_objective=None"),
        ({"optimizer": SGD}, "optimizer=.*'Adam'"),
        ({"optimizer": functools.partial(torch.optim.Adam, lr=0.01)}, "'lr': 0.02"),
        ({"batch_size": 12}, "batch_size=8, this run has batch_size=12"),
        ({"seed": 1}, "seed=0, this run has seed=1"),
        ({"gradient_clipping": 1.0}, "gradient_clipping=None"),
        ({"validation": columns(10)}, "validation="),
        ({"precision": "bfloat16"}, "precision="),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(finished, settings, message):
    with pytest.raises(CheckpointError, match=message):
        run(finished, **settings)


@pytest.fixture
def finished(tmp_path):
    path = tmp_path / "checkpoint"
    run(path, num_epochs=1)
    return path


def test_damaged_and_foreign_files_are_refused(finished, tmp_path):
    whole = finished.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        finished.write_bytes(data)
        with pytest.raises(CheckpointError, match="truncated or not a file of bayeskit"):
            run(finished)
    save_tensors(finished, {"x": torch.zeros(1)}, {}, Schema("draws", 1))
    with pytest.raises(CheckpointError, match="holds draws, not a checkpoint of training"):
        run(finished)
    with pytest.raises(OutputError, match="cannot write"):
        run(tmp_path / "missing" / "checkpoint")


@pytest.mark.parametrize(
    ("place", "made"),
    [
        ("state.parameters.model.decoder.weight", lambda x: x[0]),  # which would broadcast
        ("state.best.parameter.model.decoder.weight", lambda x: x.T),
        ("state.buffers.model.encoder.1.running_mean", lambda x: x.float()),
        ("state.streams.0", lambda x: x[1:]),
        ("state.losses", None),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, place, made):
    path = tmp_path / "checkpoint"
    settings = {"num_epochs": 1, "patience": 3, "validation": columns(10), "validation_objective": ELBO()}
    run(path, **settings)
    with loaded_tensors(path, TRAINING) as (tensors, facts):
        tensors = {key: x.clone() for key, x in tensors.items()}
    name = dict(places(facts["state"]))[place]
    found = tensors.pop(name)
    save_tensors(path, tensors if made is None else {**tensors, name: made(found)}, facts, TRAINING)
    with pytest.raises(CheckpointError, match="checkpoint: its contents do not fit together"):
        run(path, **settings)


def test_states_that_only_code_could_restore_are_refused(tmp_path):
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"secret": object()}

    with pytest.raises(
        SettingsError, match=r"\['optimizer'\]\['secret'\] is of type builtins.object.*train without a checkpoint"
    ):
        run(tmp_path / "checkpoint", optimizer=functools.partial(Odd, lr=0.1))
