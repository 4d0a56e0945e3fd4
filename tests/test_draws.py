import errno
import warnings
from dataclasses import replace

import matplotlib.pyplot
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import bayeskit as bk
from bayeskit._core import compatibility as compatibility
from bayeskit._core.compatibility import as_inference_data, write_netcdf
from bayeskit.errors import (
    CheckpointError,
    DrawsError,
    OutputError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)

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
    return bk.sample(target, 2, 100, 50, seed=4, target_acceptance=0.95, progress=False)


@pytest.mark.calibration
def test_shapes(draws):
    values = draws.values()
    assert {k: tuple(v.shape) for k, v in values.items()} == {"mean": (2, 50), "scale": (2, 50, 2), "ratio": (2, 50)}
    torch.testing.assert_close(values["ratio"], values["mean"] / values["scale"][..., 0])
    torch.testing.assert_close(draws.log_density, draws.target.log_density(draws.unconstrained))


def elpd(loo):
    """Return the number that ArviZ 1.x calls `elpd`, and 0.x `elpd_loo`."""
    return float(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)


@pytest.mark.calibration
def test_arviz_reads_every_group(draws):
    data = draws.to_arviz()
    assert all(hasattr(data, group) for group in ("posterior", "sample_stats", "log_likelihood"))
    assert data.posterior["scale"].dims == ("chain", "draw", "scale_dim_0")
    stats = set(data.sample_stats.data_vars)
    assert stats >= {"lp", "diverging", "acceptance_rate", "energy", "n_steps", "step_size"}
    assert data.log_likelihood["y"].shape == (2, 50, 3)
    np.testing.assert_allclose(data.log_likelihood["y"].sum("data").values, draws.log_likelihood.numpy(), rtol=1e-12)
    summary = arviz.summary(data)
    assert {"mean", "scale[0]", "scale[1]", "ratio"} <= set(summary.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of three observations any one is influential
        assert np.isfinite(elpd(arviz.loo(data)))


@pytest.mark.calibration
def test_netcdf_round_trip(draws, tmp_path):
    data = draws.to_arviz()
    data.to_netcdf(str(tmp_path / "posterior.nc"), engine="h5netcdf")
    read = arviz.from_netcdf(str(tmp_path / "posterior.nc"), engine="h5netcdf")
    np.testing.assert_array_equal(read.posterior["mean"].values, draws.values()["mean"].numpy())


@pytest.mark.calibration
def test_a_changed_number_in_netcdf_is_found(draws, tmp_path):
    path = tmp_path / "posterior.nc"
    write_netcdf(draws.to_datasets(), path)
    whole = path.read_bytes()
    place = whole.index(np.ascontiguousarray(draws.to_datasets()["posterior"]["mean"].values).tobytes())
    path.write_bytes(whole[: place + 80] + b"\1" + whole[place + 81 :])
    with xr.open_datatree(path, engine="h5netcdf") as tree, pytest.raises(OSError, match="read"):
        tree["posterior"].to_dataset().load()
    assert [file.name for file in tmp_path.iterdir()] == ["posterior.nc"]


@pytest.mark.calibration
def test_the_border_gives_a_data_tree_where_arviz_has_no_inference_data(draws, monkeypatch):
    """ArviZ 1.x has no InferenceData; there the DataTree is the answer."""
    monkeypatch.delitem(vars(arviz), "InferenceData", raising=False)
    tree = as_inference_data(draws.to_datasets())
    assert isinstance(tree, xr.DataTree) and "posterior" in tree.children


@pytest.mark.calibration
def test_save_and_load(draws, tmp_path):
    path = tmp_path / "draws"
    draws.save(path)
    read = bk.Draws.load(path, draws.target)
    assert torch.equal(read.unconstrained, draws.unconstrained)
    assert read.sample_stats.keys() == draws.sample_stats.keys() and read.settings == draws.settings
    alone = bk.Draws.load(path)
    assert set(alone.to_datasets()) == {"posterior", "sample_stats"}
    assert alone.values().keys() == draws.values().keys()
    with pytest.raises(DrawsError, match="no target"):
        alone.loo()
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


@pytest.mark.calibration
def test_joined_chains_stand_next_to_each_other(draws):
    other = bk.sample(draws.target, 3, 100, 40, seed=5, progress=False)
    joined = bk.Draws.join([draws, other])
    assert repr(joined) == "Draws(5 chains x 40 draws, dim 3, sites: mean, scale)"
    assert torch.equal(joined.unconstrained[:2], draws.unconstrained[:, 10:])  # the last of the longer run
    assert torch.equal(joined.select([2, 3, 4]).log_density, other.log_density)
    assert torch.equal(joined.sample_stats["energy"][2:], other.sample_stats["energy"])
    assert joined.num_gradients == draws.num_gradients + other.num_gradients
    assert joined.settings["seed"] == [4, 5] and joined.settings["sampler"] == "HMC"
    assert joined.settings["ending"] == "finished" and joined.settings["endings"] == ["finished", "finished"]
    assert joined.to_arviz().posterior["scale"].shape == (5, 40, 2)


@pytest.mark.calibration
def test_a_joined_run_is_saved_whole(draws, tmp_path):
    joined = bk.Draws.join([draws, draws])
    joined.save(tmp_path / "draws")
    assert bk.Draws.load(tmp_path / "draws").settings == joined.settings
    joined.to_arviz().to_netcdf(str(tmp_path / "posterior.nc"), engine="h5netcdf")


@pytest.mark.calibration
def test_the_worst_ending_is_the_joint_one(draws):
    parts = [replace(draws, settings={"ending": name}) for name in ("converged", "finished", "interrupted")]
    endings = [bk.Draws.join(parts[:n]).settings["ending"] for n in (1, 2, 3)]
    assert endings == ["converged", "finished", "interrupted"]


@pytest.mark.calibration
def test_what_does_not_belong_together_is_not_joined(draws):
    with pytest.raises(DrawsError, match="nothing to join"):
        bk.Draws.join([])
    other = bk.Target.from_pyro(model, torch.tensor([9.0], dtype=torch.float64))
    with pytest.raises(DrawsError, match="different models"):
        bk.Draws.join([draws, replace(draws, target=other)])
    with pytest.raises(DrawsError, match="dimensions 2, 3"):
        bk.Draws.join([draws, replace(draws, unconstrained=draws.unconstrained[..., :2])])
    again = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5, 0.2], dtype=torch.float64))
    assert bk.Draws.join([replace(draws, target=again), draws]).num_chains == 4


@pytest.mark.calibration
def test_a_repr_is_one_line(draws):
    assert repr(draws) == "Draws(2 chains x 50 draws, dim 3, sites: mean, scale)"
    assert repr(replace(draws, target=None)) == "Draws(2 chains x 50 draws, dim 3)"

    def many():
        for i in range(9):
            pyro.sample(f"x{i}", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        pyro.sample("y", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0), obs=torch.ones(()).double())

    shown = repr(replace(draws, target=bk.Target.from_pyro(many)))
    assert shown.endswith("sites: x0, x1, x2, x3, x4, 4 more)")


@pytest.mark.calibration
def test_a_full_disk_is_found_before_the_file_is_begun(draws, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compatibility.os, "posix_fallocate", full, raising=False)
    with pytest.raises(OutputError, match="No space left on device"):
        write_netcdf(draws.to_datasets(), tmp_path / "draws.nc")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:ArviZ cannot hold some names")
def test_names_that_a_tree_of_datasets_cannot_have(tmp_path):
    """Pyro's scopes put a slash into names; the dimensions of draws are taken."""

    def model():
        one = pyro.sample("group/x", dist.Normal(0.0, 1.0))
        other = pyro.sample("group.x", dist.Normal(one, 1.0).expand([2]).to_event(1))
        chain = pyro.sample("chain", dist.Normal(other.sum(-1), 1.0))
        pyro.sample("group/y", dist.Normal(chain, 1.0), obs=torch.tensor(1.0))

    found = bk.sample(bk.Target.from_pyro(model, compile=False), 2, 20, 10, seed=0, progress=False)
    path = tmp_path / "draws.nc"
    write_netcdf(found.to_datasets(), path)
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        posterior = tree["posterior"].to_dataset()
        assert set(posterior.data_vars) == {"group.x_", "group.x", "chain_"}
        assert posterior["group.x"].shape == (2, 10, 2)
        assert posterior["group.x_"].attrs["site"] == "group/x" and posterior["chain_"].attrs["site"] == "chain"
        np.testing.assert_array_equal(posterior["group.x_"], found.values()["group/x"].numpy())
    assert "group.y" in found.to_arviz()["log_likelihood"].data_vars


def test_a_site_by_its_name_and_a_table(summarised):
    assert torch.equal(summarised["p"], summarised.values()["p"])
    with pytest.raises(UnknownNameError, match="no site is called 'q'. Known names: p"):
        summarised["q"]
    table = summarised.summary(round_to="none")
    value = summarised["p"]
    assert table.index.tolist() == ["p"] and {"mean", "sd", "ess_bulk", "ess_tail", "r_hat"} <= set(table.columns)
    assert float(table["mean"]["p"]) == pytest.approx(float(value.mean()), rel=1e-12)


def test_thinning_counts_from_the_last_draw(summarised):
    thinned = summarised.thin(7)
    assert torch.equal(thinned.unconstrained, summarised.unconstrained.flip(1)[:, ::7].flip(1))
    assert thinned.num_draws == -(-summarised.num_draws // 7) and thinned.thin(2).settings["thinning"] == 14
    for wrong in (0, -1, 1.5):
        with pytest.raises(SettingsError, match="step"):
            summarised.thin(wrong)


@pytest.fixture(scope="module")
def summarised():
    return bk.sample(bk.exact.get("beta_binomial").target(), 4, 50, 100, progress=False)


@pytest.fixture(scope="module")
def predicted():
    y = torch.linspace(-2, 2, 5)
    draws = bk.sample(bk.Target.from_pyro(model, y), 4, 200, 100, target_acceptance=0.95, progress=False)
    return draws.predictive(seed=1).predictive(torch.zeros(3), seed=2)


@pytest.mark.calibration
def test_predictions_go_where_draws_go(predicted, tmp_path):
    assert predicted.posterior_predictive["y"].shape == (4, 100, 5) and predicted.predictions["y"].shape == (4, 100, 3)
    assert "ratio" in predicted.predictions and "ratio" not in predicted.posterior_predictive
    predicted.save(tmp_path / "draws")
    kinds = ("posterior_predictive", "predictions")
    for kind in kinds:
        whole = getattr(predicted, kind)["y"]
        assert torch.equal(getattr(bk.Draws.load(tmp_path / "draws"), kind)["y"], whole)
        assert torch.equal(getattr(predicted.select([1, 2]), kind)["y"], whole[1:3])
        assert torch.equal(getattr(predicted.thin(10), kind)["y"], whole[:, 9::10])
        assert torch.equal(getattr(bk.Draws.join([predicted, predicted]), kind)["y"], torch.cat([whole, whole]))
    with pytest.raises(DrawsError, match="no target"):
        bk.Draws.load(tmp_path / "draws").predictive()


@pytest.mark.calibration
def test_arviz_has_all_groups_with_named_dimensions(predicted):
    prior = bk.prior_predictive(predicted.target, num_draws=50)
    groups = predicted.to_datasets(prior=prior, coords={"data": list("abcde")}, dims={"scale": ["part"]})
    assert groups.keys() == {
        *("posterior", "sample_stats", "log_likelihood", "log_prior", "posterior_predictive", "predictions"),
        *("observed_data", "prior", "prior_predictive"),
    }
    assert groups["posterior_predictive"]["y"].dims == ("chain", "draw", "data")
    assert groups["observed_data"]["y"].dims == ("data",)
    assert groups["observed_data"]["data"].values.tolist() == list("abcde")
    assert groups["posterior"]["scale"].dims == groups["prior"]["scale"].dims == ("chain", "draw", "part")
    # Of the constrained values: without the Jacobian, by the densities themselves.
    value = predicted.values()
    exact = dist.Normal(0.0, 1.0).log_prob(value["mean"]) + dist.HalfNormal(1.0).log_prob(value["scale"]).sum(-1)
    found = torch.from_numpy(groups["log_prior"]["log_prior"].values)
    torch.testing.assert_close(found, exact.to(found), rtol=1e-4, atol=1e-4)


@pytest.mark.calibration
def test_names_and_labels_that_do_not_fit_are_named(predicted):
    with pytest.raises(ShapeError, match="2 labels for dimension 'data', whose size is 5"):
        predicted.to_arviz(coords={"data": ["a", "b"]})
    with pytest.raises(UnknownNameError, match="did you mean 'scale'"):
        predicted.to_arviz(dims={"scal": ["part"]})
    with pytest.raises(ShapeError, match="dimensions of site 'scale', which has 1"):
        predicted.to_arviz(dims={"scale": ["part", "other"]})


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore")  # of ArviZ and Matplotlib
def test_arviz_plots_and_scores_from_one_call(predicted):
    data = predicted.to_arviz(prior=bk.prior_predictive(predicted.target, num_draws=50))
    arviz.plot_trace(data, var_names=["mean"])
    assert np.isfinite(elpd(arviz.loo(data)))
    if hasattr(arviz, "plot_ppc"):
        arviz.plot_ppc(data, num_pp_samples=10)
        arviz.plot_loo_pit(data, y="y")
    matplotlib.pyplot.close("all")
