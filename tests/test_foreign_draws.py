"""Draws of other programs, draws without their target, and draws in place of a target."""

import copy
import inspect
import pickle
from dataclasses import replace

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import bayeskit as bk
from bayeskit.errors import DataError, DataWarning, DrawsError, ModelError, SettingsError, ShapeError, UnknownNameError

Y = np.random.default_rng(0).normal(size=12)
ROWS = np.arange(12) % 3


def regression(y, group, power=1.0):
    centre = pyro.sample("centre", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfNormal(3.0))
    with pyro.plate("state", 3):
        effect = pyro.sample("effect", dist.Normal(centre, 1.0))
    pyro.sample("share", dist.Dirichlet(torch.ones(2, dtype=torch.float64)))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(effect[group], scale**power), obs=y)


@pytest.fixture(scope="module")
def drawn():
    return bk.sample(
        regression, Y, ROWS, num_samples=200, num_warmup=200, progress=False, coords={"state": ["IA", "MN", "WI"]}
    )


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(regression, Y, ROWS)


@pytest.mark.parametrize("form", ["InferenceData", "Dataset", "arrays"])
def test_draws_of_arviz_are_those_that_went_there(drawn, target, form):
    data = drawn.to_arviz()
    given = {
        "InferenceData": data,
        "Dataset": drawn.to_datasets()["posterior"],
        "arrays": {name: x.numpy() for name, x in drawn.values().items()},
    }[form]
    found = bk.Draws.from_arviz(given, target)
    torch.testing.assert_close(found.unconstrained, drawn.unconstrained, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.log_density, drawn.log_density, rtol=1e-9, atol=1e-9)
    if form != "arrays":
        assert found.target.names[2:5] == ("effect[IA]", "effect[MN]", "effect[WI]") and target.names[2] == "effect[0]"
    if form == "InferenceData":
        assert found.sample_stats.keys() == drawn.sample_stats.keys()
        assert found.sample_stats["diverging"].dtype is torch.bool
        assert found.settings["sampler"] == drawn.settings["sampler"]
    assert found.loo().elpd == pytest.approx(drawn.loo().elpd, abs=1e-6)


def test_the_evidence_of_independent_draws_is_exact(limit):
    case = bk.exact.get("beta_binomial")  # 2 successes of 10, uniform prior: Beta(3, 9)
    draws = bk.Draws.from_arviz({"p": np.random.default_rng(4).beta(3, 9, (4, 1000))}, case.target())
    found = bk.evidence.bridge_sampling(draws)
    assert found.trusted
    assert abs(found.log_evidence - case.log_evidence) < limit() * found.standard_error


def test_names_of_dimensions_come_from_the_data():
    def model(y):
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(slope.sum(), 1.0), obs=y)

    posterior = {"slope": np.random.default_rng(0).normal(size=(2, 9, 2))}
    names = {"dims": {"slope": ["covariate"]}, "coords": {"covariate": ["age", "height"]}}
    old = "InferenceData" in vars(az)
    data = az.from_dict(posterior=posterior, **names) if old else az.from_dict({"posterior": posterior}, **names)
    draws = bk.Draws.from_arviz(data, bk.Target.from_pyro(model, torch.tensor(0.5, dtype=torch.float64)))
    assert draws.target.names == ("slope[age]", "slope[height]")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: {name: v for name, v in x.items() if name != "scale"}, UnknownNameError, "'scale'"),
        (lambda x: x | {"scale": -x["scale"]}, DataError, "'scale' lies outside its support"),
        (lambda x: x | {"scale": x["scale"] * np.nan}, DataError, "'scale' lies outside its support"),
        (lambda x: x | {"effect": x["effect"][..., :2]}, ShapeError, "site 'effect' has shape"),
        (lambda x: x | {"centre": np.zeros(3)}, ShapeError, "chain and draw"),
        (lambda x: x | {"centre": x["centre"][:, 1:]}, ShapeError, "different numbers of chains and draws"),
        (lambda x: x | {"centre": [[1.0], [1.0, 2.0]]}, ShapeError, "are no array"),
        (lambda x: x | {"centre": x["centre"].astype(str).astype(object) + "?"}, DataError, "no real numbers"),
        (lambda x: list(x), SettingsError, "not a list"),
    ],
)
def test_other_values_are_typed_errors(drawn, target, change, error, words):
    with pytest.raises(error, match=words):
        bk.Draws.from_arviz(change({name: x.numpy() for name, x in drawn.values().items()}), target)


def test_draws_of_another_target_are_errors(drawn):
    data = drawn.to_arviz()
    with pytest.raises(DataError, match="observed data of 'y' differ"):
        bk.Draws.from_arviz(data, bk.Target.from_pyro(regression, Y + 1, ROWS))
    with pytest.raises(DrawsError, match="datum .* of 'y'.*variances"):
        bk.Draws.from_arviz(data, bk.Target.from_pyro(regression, Y, ROWS, power=0.5))


def eight_schools(y, error):
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("school", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("obs", dist.Normal(theta, error), obs=y)


def test_draws_by_pymc_of_eight_schools():
    """ArviZ ships these draws; PyMC's log likelihoods, statistics and labels come with them."""
    data = az.load_arviz_data("centered_eight")
    y, error = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    draws = bk.Draws.from_arviz(data, bk.Target.from_pyro(eight_schools, y, error))
    assert draws.target.names[2] == "theta[Choate]" and draws.num_draws == data["posterior"].sizes["draw"]
    theirs = torch.from_numpy(data["log_likelihood"]["obs"].values)
    mine = draws.target.pointwise_log_likelihood(draws.unconstrained)["obs"]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert draws.sample_stats["diverging"].sum() == int(data["sample_stats"]["diverging"].sum()) > 0
    # A centred hierarchy that diverges and moves slowly is not trusted, whoever drew it.
    assert not bk.evidence.bridge_sampling(draws).trusted
    with pytest.raises(DrawsError, match="variances and precisions"):
        bk.Draws.from_arviz(data, bk.Target.from_pyro(eight_schools, y, [e**2 for e in error]))


def test_groups_of_other_lengths_and_tempered_draws_are_errors(drawn, target):
    groups = drawn.to_datasets()
    fewer = groups | {"posterior": groups["posterior"].isel(draw=slice(50))}
    for group in ("log_likelihood", "sample_stats"):
        with pytest.raises(ShapeError, match=f"{group} has 4 chains of 200 draws, and the posterior 4 of 50"):
            bk.Draws.from_arviz(xr.DataTree.from_dict(fewer), target)
        del fewer[group]
    tempered = replace(drawn, beta=torch.full((4,), 0.5, dtype=torch.float64))
    with pytest.raises(DrawsError, match="tempered"):
        bk.Draws.from_arviz(tempered.to_arviz(), target)


def test_draws_of_a_larger_model_are_told(drawn, target):
    larger = drawn.to_datasets()["posterior"].assign(slope=(["chain", "draw"], np.zeros((4, 200))))
    with pytest.warns(DataWarning, match="the target has no 'slope'"):
        bk.Draws.from_arviz(larger, target)


def test_a_scalar_observation_goes_there_and_back():
    target = bk.exact.get("beta_binomial").target()
    p = torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    draws = bk.Draws.from_arviz({"p": p}, target)
    again = bk.Draws.from_arviz(draws.to_arviz(), target)
    torch.testing.assert_close(again.log_likelihood, draws.log_likelihood, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["mask", "NanMaskedNormal"])
def test_missing_outcomes_are_left_out(kind):
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        with pyro.plate("row", len(y)):
            if kind == "mask":
                with pyro.poutine.mask(mask=~y.isnan()):
                    pyro.sample("y", dist.Normal(0.0, scale), obs=y)
            else:
                pyro.sample("y", dist.NanMaskedNormal(0.0, scale), obs=y)

    y = torch.tensor([0.3, torch.nan, -1.2, 0.8, torch.nan, 0.1], dtype=torch.float64)
    draws = bk.sample(model, y, num_samples=100, num_warmup=100, progress=False).predictive()
    groups = draws.to_datasets()
    assert {groups[g].sizes["y_datum"] for g in ("log_likelihood", "observed_data", "posterior_predictive")} == {4}
    assert groups["observed_data"]["y"]["y_datum"].values.tolist() == [0, 2, 3, 5]
    assert "constant_data" not in groups
    assert int(draws.loo().counts.sum()) == 4


def test_a_target_in_place_of_a_model_is_needed(drawn, tmp_path):
    drawn.save(tmp_path / "draws")
    with pytest.raises(SettingsError, match="from_pyro"):
        bk.Draws.load(tmp_path / "draws", target=regression)
    assert bk.Draws.load(tmp_path / "draws", target=drawn).target is drawn.target
    with pytest.raises(DrawsError, match="posterior draws are missing"):
        bk.evidence.bridge_sampling(drawn.target, None)
    with pytest.raises(UnknownNameError, match="num_draws"):
        bk.prior_predictive(regression, Y, ROWS, num_samples=10)
    with pytest.raises(ModelError, match="give None for data that are to be drawn"):
        bk.prior_predictive(regression, Y)
    with pytest.raises(SettingsError, match="not Draws"):
        drawn.loo().difference(drawn)


def test_vectors_of_many_values_are_those_of_single_ones(target):
    u = target.sample_prior(20)
    values = target.constrain(u)
    one_by_one = torch.stack([target.unconstrain({k: v[i] for k, v in values.items()}) for i in range(20)])
    torch.testing.assert_close(target.unconstrain(values), one_by_one, rtol=1e-12, atol=1e-12)
    values["share"][7] += 0.1
    with pytest.raises(DataError, match="'share' lies outside its support"):
        target.unconstrain(values)


def test_draws_without_their_target_keep_what_arviz_needs(tmp_path):
    def model(y, seen):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("day", len(y)), pyro.poutine.mask(mask=seen):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    y, seen = torch.tensor([2.0, 0.0, 3.0, 1.0]), torch.tensor([True, True, False, True])
    draws = bk.sample(model, y, seen, num_samples=100, num_warmup=100, progress=False).predictive()
    draws.save(tmp_path / "draws.safetensors")
    found = bk.Draws.load(tmp_path / "draws.safetensors")
    assert not found.target.has_density and found.target.names == draws.target.names
    assert found.target.fingerprint() == draws.target.fingerprint()
    mine, whole = (x.to_datasets()["posterior_predictive"]["y"] for x in (found, draws))
    assert mine.dtype == np.int64 and mine.identical(whole)
    for made in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), bk.Draws.join([found]), found.thin(2)):
        assert made.summary().index.tolist() == ["rate"]
    for call in (found.loo, found.predictive, found.infer_discrete, lambda: found.target.dim):
        with pytest.raises(DrawsError, match=r"Draws\.load\(path, target=target\)"):
            call()
    assert bk.Draws.join([draws, found]).target is draws.target


def _functions_of_targets():
    """Return every public function whose first argument is a target."""
    from bayeskit import evidence, samplers, workflows
    from bayeskit.inference import generalized

    rooms = {"bk": bk, "evidence": evidence, "samplers": samplers, "workflows": workflows, "generalized": generalized}
    # The engines of samplers, and what needs estimates from minibatches, are given targets by those that call them.
    inner = {"Chains", "run", "sample_stochastic_gradient"}
    for room, module in rooms.items():
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function) and not inspect.isclass(function) and name not in inner:
                if next(iter(inspect.signature(function).parameters), None) == "target":
                    yield pytest.param(function, id=f"{room}.{name}")


@pytest.mark.parametrize("function", list(_functions_of_targets()))
def test_draws_stand_for_their_target(function, drawn, tmp_path):
    """Draws are taken for their target: those without one say so, and are no foreign error."""
    drawn.save(tmp_path / "draws.safetensors")
    loaded = bk.Draws.load(tmp_path / "draws.safetensors")
    with pytest.raises(DrawsError, match=r"Draws\.load\(path, target=target\)"):
        function(loaded)


def test_an_estimate_from_draws_alone_is_that_from_target_and_draws(drawn):
    both = bk.evidence.bridge_sampling(drawn.target, drawn)
    assert bk.evidence.bridge_sampling(drawn).log_evidence == both.log_evidence
    assert bk.evidence.fit_flow(drawn, max_steps=5).gain == bk.evidence.fit_flow(drawn.target, drawn, max_steps=5).gain
    assert bk.evidence.check_constants(drawn).log_prior_integral == pytest.approx(0, abs=0.2)
    assert bk.sample(drawn, num_samples=20, num_warmup=20, progress=False).target is drawn.target
