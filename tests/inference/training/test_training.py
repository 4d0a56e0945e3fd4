import functools
import math
import os
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_models import Autoencoder, columns, trained

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import (
    BayeskitWarning,
    DataError,
    GuideError,
    LossError,
    SamplingWarning,
    SettingsError,
)
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.training import fit
from bayeskit.inference.training._minibatches import as_batches

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def same(first, second):
    return set(first) == set(second) and all(torch.equal(first[n], second[n]) for n in first)


def test_it_does_what_a_loop_by_hand_does():
    x = columns()
    vae, result = trained(x, optimizer=SGD, batch_size=None, num_epochs=5)
    by_hand = Autoencoder()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    losses = []
    with global_stream(new_generator(0, stream="guide of rank 0 of 1")), pyro.get_param_store().scope():
        for _ in range(5):
            loss = ELBO(max_plate_nesting=1).differentiable_loss(by_hand.model, by_hand.guide, x) / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert result.losses.tolist() == losses
    assert same(vae.state_dict(), by_hand.state_dict())
    assert result.ending == "finished" and result.num_steps == result.num_epochs == 5


def test_the_optimiser_is_adam_unless_another_is_given():
    x = columns()
    fused, default = trained(x)
    plain, expected = trained(x, optimizer=torch.optim.Adam)
    assert (default.losses - expected.losses).abs().max() < 1e-12
    assert all((plain.state_dict()[n] - v).abs().max() < 1e-12 for n, v in fused.state_dict().items())


def test_losses_are_for_each_datum_whether_or_not_the_plate_scales():
    x = columns()
    plain, scaled = trained(x)[1], trained(x, size=24)[1]
    assert plain.num_steps == 9
    assert float((plain.losses - scaled.losses).abs().max()) < 1e-12
    # Mutation: the loss of 24 data would be taken for that of 8.
    assert float((plain.losses - 3 * scaled.losses).abs().min()) > 0.1
    assert plain.epoch_losses.tolist() == [math.fsum(part) / 3 for part in plain.losses.reshape(3, 3).tolist()]


def test_no_global_changes_and_the_seed_decides():
    pyro.param("kept", torch.tensor(3.0))
    state = torch.get_rng_state()
    first, second, other = (trained(columns(), seed=seed)[1] for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(pyro.get_param_store().keys()) == ["kept"]
    assert torch.equal(first.losses, second.losses) and not torch.equal(first.losses, other.losses)


def model(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 2.0))
    with pyro.plate("data", 24, subsample_size=len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def guide(x):
    loc = pyro.param("loc", x.new_zeros(()))
    scale = pyro.param("scale", x.new_ones(()), constraint=dist.constraints.positive)
    pyro.sample("mean", dist.Normal(loc, scale))


class Guide(PyroModule):
    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.scale = PyroParam(torch.ones((), dtype=torch.float64), dist.constraints.positive)

    def forward(self, x):
        pyro.sample("mean", dist.Normal(self.loc, self.scale))


@pytest.mark.long
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("make", [lambda: guide, Guide, lambda: AutoNormal(model)])
def test_guides_of_every_kind_reach_the_exact_posterior(make, local):
    """The conjugate posterior has a precision of 24 + 1/4."""
    x = columns()[:, 0]
    precision = 24.25
    with pyro.settings.context(module_local_params=local):
        result = fit(
            model, make(), Trace_ELBO(), x, num_steps=400, batch_size=None, progress=False,
            optimizer=functools.partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99)),
            schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 400),
        )  # fmt: skip
        assert not list(pyro.get_param_store().keys())
        draws = result.sample_posterior(4000, x, seed=1)["mean"]
        assert not list(pyro.get_param_store().keys())
    assert draws.shape == (4000,)
    # Adam's last steps average over some tens of draws, each of which is off by about one posterior sd in its
    # gradient; 4 of that, far below the 24 of the first guide. The scale of a million such runs is 0.75 to 1.5 of the
    # posterior's; with its memory of a thousand steps Adam would not forget the first gradients, 24 times as large.
    assert abs(float(draws.mean()) - float(x.sum()) / precision) < 4 * 0.25 * precision**-0.5
    assert 0.6 < float(draws.std()) * precision**0.5 < 1.5
    assert len(result.parameters) == 2


def test_a_function_keeps_its_parameters_apart_from_the_global_store():
    x = columns()[:, 0]
    result = fit(model, guide, ELBO(), x, num_steps=3, progress=False)
    assert set(result.parameters) == {"store.loc", "store.scale"}
    with pyro.poutine.trace() as trace:
        result.guide(x)
    assert trace.trace.nodes["loc"]["value"] == result.parameters["store.loc"] != 0
    again = fit(result.model, result.guide, ELBO(), x, num_steps=1, progress=False)
    assert again.losses[0] < result.losses[0] and not list(pyro.get_param_store().keys())


def test_draws_keep_the_shapes_of_their_sites():
    x = columns(5)
    vae, result = trained(x, batch_size=None)
    draws = result.sample_posterior(7, x)
    assert draws["z"].shape == (7, 5, 1) and draws["z"].std(0).min() > 0
    assert torch.equal(draws["z"], result.sample_posterior(7, x)["z"])
    with pytest.raises(SettingsError, match="num_draws"):
        result.sample_posterior(0, x)


def test_early_stopping_restores_the_best_parameters():
    x, held_out = columns(8), columns(200, seed=3)
    vae, result = trained(x, batch_size=None, num_epochs=3000, validation=held_out, patience=40,
                          optimizer=functools.partial(torch.optim.Adam, lr=0.03), objective=ELBO(8))  # fmt: skip
    assert result.ending == "early stopping"
    best = int(result.validation_losses.argmin())
    assert result.best_epoch == best and result.num_epochs == best + 1 + 40
    with torch.no_grad(), global_stream(new_generator(0, stream="validation")), pyro.get_param_store().scope():
        loss = ELBO(8, max_plate_nesting=1).differentiable_loss(vae.model, vae.guide, held_out) / 200
    assert float(loss) == float(result.validation_losses[best])
    assert float(result.validation_losses[-1]) > float(result.validation_losses[best])


def test_validation_runs_in_evaluation_mode_with_smaller_last_batches():
    modes = []

    class Watched(Autoencoder):
        def guide(self, x):
            modes.append((self.training, len(x)))
            super().guide(x)

    vae = Watched()
    fit(vae.model, vae.guide, ELBO(max_plate_nesting=1), columns(8), num_epochs=1, batch_size=4,
        validation=columns(6), progress=False)  # fmt: skip
    assert modes[-2:] == [(False, 4), (False, 2)] and vae.training and vae.encoder.training


def test_a_loss_that_is_not_finite_names_step_and_site_and_keeps_good_parameters(tmp_path):
    x = columns()

    class Broken(Autoencoder):
        steps = 0

        def model(self, x):
            self.steps += 1
            with self.plate(x):
                z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
                nan = math.nan if float(self.encoder[0].weight.detach().sum()) > self.limit else 0.0
                fn = dist.Normal(self.decoder(z) + nan, 1.0, validate_args=False).to_event(1)
                pyro.sample("x", fn, obs=x)

    vae, path = Broken(), tmp_path / "checkpoint"
    start = float(vae.encoder[0].weight.detach().sum())
    vae.limit = start + 0.5
    grow = functools.partial(Growing, lr=0.01)
    with pytest.raises(LossError, match=r"step (\d+) in epoch \d: .*site 'x'.*parameters of step") as caught:
        fit(vae.model, vae.guide, ELBO(), x, num_epochs=10, batch_size=8, optimizer=grow, checkpoint=path,
            checkpoint_seconds=0, progress=False)  # fmt: skip
    step = int(str(caught.value).split()[1])
    # Every step adds 0.01 to each of 16 weights, and the loss is NaN beyond 0.5.
    assert step == 4
    assert float(vae.encoder[0].weight.detach().sum()) - start == pytest.approx(3 * 0.16, abs=1e-12)
    weight = vae.encoder[0].weight
    kept = [tensor for tensor in load_file(path).values() if tensor.shape == weight.shape]
    assert len(kept) == 1 and torch.equal(kept[0], weight)


class Growing(torch.optim.Optimizer):
    """Adds the learning rate to every parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += group["lr"]


def test_gradients_that_are_not_finite_stop_the_run():
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = parameter

        def forward(self, x):
            pyro.sample("mean", dist.Normal(self.loc.abs().sqrt(), 1.0))  # infinite slope at zero

    with pytest.raises(LossError, match="step 0 in epoch 0"):
        fit(model, Flat(), Trace_ELBO(), columns()[:, 0], num_steps=2, progress=False)
    assert float(parameter.detach()) == 0


@pytest.mark.parametrize("network", ["encoder", "decoder"])
def test_clipping_bounds_the_steps_of_guide_and_model_apart(network):
    vae, _ = trained(columns(), num_epochs=1, batch_size=None, gradient_clipping=1e-3, optimizer=SGD)
    now, start = getattr(vae, network).parameters(), getattr(Autoencoder(), network).parameters()
    moved = [(p - q).detach() for p, q in zip(now, start, strict=True)]
    assert math.sqrt(sum(float(m.square().sum()) for m in moved)) == pytest.approx(1e-4, rel=1e-3)


def test_schedules_advance_with_steps_and_plateaus_with_epochs():
    rates = []

    def warm(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates.append(step) or 1.0)

    trained(columns(), schedule=warm)
    assert rates == list(range(10))
    seen = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(metrics)
            super().step(metrics)

    result = trained(columns(), schedule=Plateau)[1]
    assert seen == result.epoch_losses.tolist()


def test_ctrl_c_and_time_budget_return_what_is_done():
    class Interrupting(Autoencoder):
        calls = 0

        def guide(self, x):
            self.calls += 1
            if self.calls == 8:
                os.kill(os.getpid(), signal.SIGINT)
            super().guide(x)

    vae = Interrupting()
    with pytest.warns(SamplingWarning, match="training: interrupted after"):
        result = fit(vae.model, vae.guide, ELBO(max_plate_nesting=1), columns(), num_epochs=50, progress=False)
    assert result.ending == "interrupted" and 5 <= result.num_steps < 9
    with pytest.warns(SamplingWarning, match="time budget of 0.2 s"):
        result = trained(columns(), num_epochs=10**6, time_budget=0.2)[1]
    assert result.ending == "time budget" and result.num_steps > 0


@pytest.mark.calibration
def test_data_of_every_form():
    x = columns()
    whole = trained(x, batch_size=None)[1].losses
    for data in ((x,), {"x": x}, [x], [(x,)], [{"x": x}], DataLoader(TensorDataset(x), batch_size=24)):
        assert torch.equal(trained(data, batch_size=None)[1].losses, whole)
    loader = DataLoader(TensorDataset(x), batch_size=5, shuffle=True)
    first, second = trained(loader)[1], trained(loader)[1]
    assert first.num_steps == 15 and torch.equal(first.losses, second.losses)
    epochs = [torch.cat([b.args[0] for b in as_batches(loader, None, None, 0).epoch(e)]) for e in (0, 1)]
    assert not torch.equal(*epochs) and torch.equal(*(e.sort(0).values for e in epochs))
    nothing = fit(
        lambda: pyro.sample("mean", dist.Normal(0.0, 1.0)),
        lambda: pyro.sample("mean", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0)),
        ELBO(), None, num_steps=200, progress=False, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    assert abs(float(nothing.parameters["store.loc"])) < 1e-6  # the closed form: (loc**2) / 2, without noise


def test_pages_of_arviz_and_plot():
    x = columns()
    result = trained(x, validation=columns(6), patience=50)[1]
    group = result.to_arviz(result.sample_posterior(3, x[:4]))
    assert group["optimization"]["loss"].values.tolist() == result.losses.tolist()
    assert group["optimization"]["validation_loss"].sizes == {"epoch": 3}
    assert dict(group["posterior"]["z"].sizes) == {"chain": 1, "draw": 3, "z_dim_0": 4, "z_dim_1": 1}
    ax = result.plot(Figure().subplots())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["step", "epoch", "validation"]


def test_a_global_latent_variable_without_a_scaling_plate_is_warned_of():
    def unscaled(x):
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    x = columns()[:, 0]
    with pytest.warns(BayeskitWarning, match="outside every plate.*subsample_size"):
        fit(unscaled, guide, ELBO(), x, num_steps=1, batch_size=8, progress=False)
    fit(unscaled, guide, ELBO(), x, num_steps=1, progress=False)
    fit(model, guide, ELBO(), x, num_steps=1, batch_size=8, progress=False)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_epochs": None}, SettingsError, "exactly one of num_epochs and num_steps"),
        ({"num_steps": 3}, SettingsError, "exactly one of num_epochs and num_steps"),
        ({"num_epochs": 0}, SettingsError, "num_epochs must be at least 1"),
        ({"batch_size": 25}, SettingsError, "batch_size must be"),
        ({"batch_size": 2.5}, SettingsError, "batch_size must be a whole number"),
        ({"gradient_clipping": 0.0}, SettingsError, "gradient_clipping must lie in"),
        ({"precision": "float16"}, SettingsError, "precision must be"),
        ({"patience": 3}, SettingsError, "validation"),
        ({"optimizer": torch.optim.LBFGS}, SettingsError, "needs no closure"),
        ({"optimizer": pyro.optim.Adam}, SettingsError, "torch optimiser"),
        ({"objective": "elbo"}, SettingsError, "objective must be"),
        ({"data": (torch.zeros(3), torch.zeros(4))}, DataError, r"not \[3, 4\]"),
        ({"data": torch.zeros(0, 2)}, DataError, "leading dimension"),
        ({"data": 3.0}, DataError, "data must be a tensor"),
        ({"data": iter([])}, DataError, "iterator"),
        ({"data": []}, DataError, "no batches"),
    ],
)
def test_bad_input_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        trained(settings.pop("data", columns()), **settings)


def test_a_guide_that_does_not_fit_and_nothing_to_train_are_refused():
    x = columns()[:, 0]
    with pytest.raises(GuideError, match="no site for the latent site 'mean'"):
        fit(model, lambda x: None, ELBO(), x, num_steps=1, progress=False)
    fixed = lambda x: pyro.sample("mean", dist.Normal(0.0, 1.0))  # noqa: E731
    with pytest.raises(SettingsError, match="no parameters to train"):
        fit(model, fixed, ELBO(), x, num_steps=1, progress=False)
