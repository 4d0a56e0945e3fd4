import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import bayeskit as bk
from bayeskit._arviz import as_inference_data
from bayeskit.errors import CheckpointError, DrawsError, OutputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz


def model(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    pyro.deterministic("ratio", mean / scale[0])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, scale.sum()), obs=y)


@pytest.fixture(scope="module")
def draws():
    target = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5, 0.2], dtype=torch.float64))
    return bk.sample(target, 2, 100, 50, seed=4, progress=False)


def test_shapes(draws):
    values = draws.values()
    assert {k: tuple(v.shape) for k, v in values.items()} == {"mean": (2, 50), "scale": (2, 50, 2), "ratio": (2, 50)}
    torch.testing.assert_close(values["ratio"], values["mean"] / values["scale"][..., 0])
    torch.testing.assert_close(draws.log_density, draws.target.log_density(draws.unconstrained))


def test_arviz_reads_every_group(draws):
    data = draws.to_arviz()
    assert set(data.groups()) >= {"posterior", "sample_stats", "log_likelihood"}
    assert data.posterior["scale"].dims == ("chain", "draw", "scale_dim_0")
    stats = set(data.sample_stats.data_vars)
    assert stats >= {"lp", "diverging", "acceptance_rate", "energy", "n_steps", "step_size"}
    assert data.log_likelihood["y"].shape == (2, 50, 3)
    np.testing.assert_allclose(data.log_likelihood["y"].sum("y_dim_0").values, draws.log_likelihood.numpy(), rtol=1e-12)
    summary = arviz.summary(data, hdi_prob=0.9)
    assert {"mean", "scale[0]", "scale[1]", "ratio"} <= set(summary.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of three observations any one is influential
        assert np.isfinite(arviz.loo(data).elpd_loo)


def test_netcdf_round_trip(draws, tmp_path):
    data = draws.to_arviz()
    data.to_netcdf(str(tmp_path / "posterior.nc"), engine="h5netcdf")
    read = arviz.from_netcdf(str(tmp_path / "posterior.nc"), engine="h5netcdf")
    np.testing.assert_array_equal(read.posterior["mean"].values, draws.values()["mean"].numpy())


def test_the_border_gives_a_data_tree_where_arviz_has_no_inference_data(draws, monkeypatch):
    """ArviZ 1.x has no InferenceData; there the DataTree is the answer."""
    monkeypatch.delattr(arviz, "InferenceData")
    tree = as_inference_data(draws.to_datasets())
    assert isinstance(tree, xr.DataTree) and "posterior" in tree.children


def test_save_and_load(draws, tmp_path):
    path = tmp_path / "draws"
    draws.save(path)
    read = bk.Draws.load(path, draws.target)
    assert torch.equal(read.unconstrained, draws.unconstrained)
    assert read.sample_stats.keys() == draws.sample_stats.keys() and read.settings == draws.settings
    alone = bk.Draws.load(path)
    assert set(alone.to_datasets()) == {"posterior", "sample_stats"}
    with pytest.raises(DrawsError, match="no target"):
        alone.values()
    other = bk.Target.from_pyro(model, torch.tensor([9.0], dtype=torch.float64))
    with pytest.raises(DrawsError, match="another model"):
        bk.Draws.load(path, other)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="truncated"):
        bk.Draws.load(path)
    with pytest.raises(OutputError):
        draws.save(path / "below")


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(DrawsError, match="chains, draws, d"):
        bk.Draws(x, x, x, torch.ones(2))
    with pytest.raises(DrawsError, match="log_prior"):
        bk.Draws(torch.zeros(2, 3, 1), torch.zeros(2, 4), x, torch.ones(2))
