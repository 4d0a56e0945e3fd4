"""What a first user of ``fit`` gives it: arrays, classes, data with holes; and what there is to read afterwards."""

from collections import UserDict

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam

from bayeskit.errors import DataError, GuideError, ModelError, SettingsError
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.training import fit

DATA = torch.tensor([0.5, -1.0, 2.0, 0.3], dtype=torch.float64)


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x):
    scale = pyro.param("scale", x.new_tensor(0.5), constraint=dist.constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x / 2, scale))


def run(data, objective=None, **settings):
    return fit(model, guide, objective or ELBO(), data, **({"num_steps": 3, "progress": False} | settings))


def test_arrays_and_lists_are_data():
    expected = run(DATA).losses

    class OfAnotherLibrary:
        def __array__(self, dtype=None, copy=None):
            return DATA.numpy().astype(dtype or "f8")

    forms = (DATA.numpy(), DATA.tolist(), (DATA.numpy(),), {"x": DATA.numpy()})
    for data in (*forms, UserDict(x=DATA.numpy()), (OfAnotherLibrary(),)):
        assert torch.equal(run(data).losses, expected)
    batches = [DATA[:2].numpy(), DATA[2:].numpy()]
    assert torch.equal(run(batches).losses, run([DATA[:2], DATA[2:]]).losses)


def test_frames_are_data():
    """Minibatches are rows of all columns."""
    frame = pd.DataFrame({"name": list("abcd"), "x": DATA.numpy()})

    def of_frame(function):
        return lambda data: function(data["x"])

    for size in (None, 2):
        expected = run(DATA, batch_size=size).losses
        found = fit(
            of_frame(model), of_frame(guide), ELBO(), frame, num_steps=3, batch_size=size, progress=False
        ).losses
        assert torch.equal(found, expected)


@pytest.mark.parametrize("objective", [ELBO(), IWAE(3), pyro.infer.Trace_ELBO()], ids=lambda o: type(o).__name__)
def test_columns_in_model_or_guide_are_named(objective):
    assert len(run(DATA, objective).losses) == 3  # what the objective has found out of a first model does not matter
    with pytest.raises(ModelError, match=r"site 'z' has batch shape \(4, 4\), .*by .squeeze"):
        run(DATA[:, None], objective)

    def of_column(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(pyro.param("shift", x.new_tensor(0.5)) * x[:, None], 1.0))

    with pytest.raises(ModelError, match=r"site 'z' has batch shape \(4, 4\), .*'data' of size 4 at dimension -1"):
        fit(model, of_column, objective, DATA, num_steps=3, progress=False)


def test_values_are_those_that_the_guide_sees():
    found = run(DATA)
    assert float(found.values["store.scale"]) > 0
    assert torch.allclose(found.values["store.scale"].log(), found.parameters["store.scale"], atol=1e-12, rtol=0)

    class Module(PyroModule):
        def __init__(self):
            super().__init__()
            self.inner = PyroModule[torch.nn.Module]()
            self.inner.scale = PyroParam(torch.tensor(0.5, dtype=torch.float64), dist.constraints.positive)
            self.shift = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(x / 2 + self.shift, self.inner.scale))

    module = Module()
    values = fit(model, module, ELBO(), DATA, num_steps=3, progress=False).values
    assert torch.equal(values["guide.inner.scale"], module.inner.scale.detach())
    assert torch.equal(values["guide.shift"], module.shift.detach())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": ELBO}, r"ELBO\(\)"),
        ({"optimizer": pyro.optim.Adam({"lr": 0.01})}, "torch.optim.Adam"),
    ],
    ids=["class", "pyro"],
)
def test_settings_of_another_kind(settings, message):
    with pytest.raises(SettingsError, match=message):
        run(DATA, **settings)


def test_data_with_holes_are_found():
    with pytest.raises(DataError, match=r"argument 0 .* nan at \(2,\)"):
        run(np.array([0.1, 0.2, np.nan]))


def test_a_wrong_model_is_not_blamed_on_the_data():
    def wrong(x):
        pyro.sample("z", dist.Normal(x.new_tensor(0.0), x.new_tensor(-1.0)))

    with pytest.raises(ValueError, match="scale"):
        fit(wrong, lambda x: None, ELBO(), DATA, num_steps=1, progress=False)


@pytest.mark.parametrize("objective", [ELBO(), IWAE(2)])
def test_our_errors_do_not_end_in_shapes_of_sites(objective):
    def other(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Poisson(1.0))

    with pytest.raises(GuideError) as caught:
        fit(model, other, objective, DATA, num_steps=1, progress=False)
    assert "'z'" in str(caught.value) and "Trace Shapes" not in str(caught.value)
