"""Names of sites and plates that people give reach ArviZ, netCDF, files and amortised posteriors."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.compatibility import write_netcdf
from bayeskit.errors import ConversionWarning

Y = torch.tensor([0.5, 1.5, 0.2], dtype=torch.float64)
NAMES = ["school/pupil", "two words", "for", "émile ☃", "2nd", "chain", "draw", " padded ", "x[0]", "lp", "", "a.b/c.d"]


def model_of(latent, plate, observed):
    def model(y=None):
        mean = pyro.sample(latent, dist.Normal(0.0, 1.0))
        with pyro.plate(plate, 3):
            effect = pyro.sample(f"{latent} effect", dist.Normal(mean, 1.0))
            pyro.sample(observed, dist.Normal(effect, 1.0), obs=y)

    return model


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_names_pass_to_arviz_and_back(name, tmp_path):
    model = model_of(name, f"{name} plate", f"{name} data")
    draws = bk.sample(model, Y, num_warmup=50, num_samples=50, progress=False)
    is_renamed = name != name.strip() or "/" in name or name in ("chain", "draw", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = draws.to_arviz()
    said = [str(one.message) for one in caught if issubclass(one.category, ConversionWarning)]
    assert bool(said) == is_renamed and all(repr(f"{name} data") in text or f"{name!r} as " in text for text in said)
    stored = {x.attrs.get("site", key): key for key, x in data["posterior"].data_vars.items()}
    assert set(stored) == {name, f"{name} effect"}
    assert torch.equal(torch.as_tensor(data["posterior"][stored[name]].values), draws.values()[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConversionWarning)
        write_netcdf(draws.to_datasets(), tmp_path / "draws.nc")
    draws.save(tmp_path / "draws.safetensors")
    again = bk.Draws.load(tmp_path / "draws.safetensors")
    assert torch.equal(again.unconstrained, draws.unconstrained)
    assert len(draws.summary()) == 4


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore:ArviZ cannot hold")
@pytest.mark.parametrize("name", ["x", "chain", "part/y"])
def test_a_site_may_be_called_as_its_plate(name):
    draws = bk.sample(model_of("mean", f"{name}", name), Y, num_warmup=50, num_samples=50, progress=False)
    data = draws.to_arviz()
    assert data["posterior"]["mean effect"].shape == (4, 50, 3)
    (observed,) = data["observed_data"].data_vars.values()
    assert observed.shape == (3,)


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["part/y", "for", "2nd", "two words", "y.z", "mean_"])
def test_names_are_those_of_arguments_of_an_amortised_posterior(name):
    def model(mean_=0.0):
        mean = pyro.sample("mean", dist.Normal(mean_, 1.0))
        pyro.sample(name, dist.Normal(mean, 1.0))

    posterior = bk.amortize(model, (), observed=[name], num_steps=3, batch_size=8, progress=False)
    assert posterior.correct(torch.tensor(0.3)).draws["mean"].isfinite().all()
