"""ArviZ's functions on draws of ten models, beside the same arrays that ``from_dict`` is given by hand."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import arviz as az
import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from matplotlib import pyplot

import bayeskit as bk

matplotlib.use("Agg")
OLD = "InferenceData" in vars(az)
DOUBLE = {"dtype": torch.float64}
rng = np.random.default_rng(20)


class Case(NamedTuple):
    """A model with its data, and what ArviZ is told by hand."""

    model: Any
    args: tuple[Any, ...]
    observed: dict[str, np.ndarray]
    constant: dict[str, np.ndarray] = {}
    dims: dict[str, list[str]] = {}
    coords: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    counted: np.ndarray | None = None  # which data of "y" a mask leaves


def labelled(y, state):
    centre, width = pyro.sample("centre", dist.Normal(0.0, 2.0)), pyro.sample("width", dist.HalfNormal(1.0))
    with pyro.plate("state", 3):
        effect = pyro.sample("effect", dist.Normal(centre, width))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(effect[state], 1.0), obs=y)


def vectors(x, y):
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2, **DOUBLE), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ slope, 1.0).to_event(1), obs=y)


def summed_out(y):
    with pyro.plate("component", 2):
        place = pyro.sample("place", dist.Normal(torch.tensor([-2.0, 2.0], **DOUBLE), 0.5))
    with pyro.plate("row", len(y)):
        which = pyro.sample("which", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(place[which.long()], 1.0), obs=y)


def masked(y, seen):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("row", len(y)), pyro.poutine.mask(mask=seen):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def several(y, count):
    share, rate = pyro.sample("share", dist.Beta(1.0, 1.0)), pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y)
        pyro.sample("count", dist.Poisson(rate), obs=count)


def deterministic(x, y):
    base, slope = pyro.sample("base", dist.Normal(0.0, 2.0)), pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(y)):
        line = pyro.deterministic("line", base + slope * x)
        pyro.sample("y", dist.Normal(line, 1.0), obs=y)


def one_chain(y):
    mean, scale = pyro.sample("mean", dist.Normal(0.0, 3.0)), pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


def simplex(y):
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3, **DOUBLE)))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Categorical(share), obs=y)


def correlated(y):
    factor = pyro.sample("factor", dist.LKJCholesky(2, torch.tensor(1.0, **DOUBLE)))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2, **DOUBLE)).to_event(1))
    with pyro.plate("row", len(y)):
        tril = scale.unsqueeze(-1) * factor
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2, **DOUBLE), scale_tril=tril), obs=y)


Y, X, SEEN = rng.normal(size=12), rng.normal(size=(12, 2)), np.arange(12) % 4 != 0
STATE, VOTES, COUNTS = np.arange(12) % 3, (np.arange(12) % 3 == 0) * 1.0, rng.poisson(2, 12) * 1.0
MIXED, PAIRS, KINDS = np.where(VOTES > 0, 2.0, -2.0) + rng.normal(size=12), rng.normal(size=(12, 2)), np.arange(12) % 3
CASES = {
    "labelled": Case(
        labelled,
        (Y, STATE),
        {"y": Y},
        {"state": STATE},
        {"effect": ["state"], "y": ["row"]},
        {"state": ["IA", "MN", "WI"]},
        {"coords": {"state": ["IA", "MN", "WI"]}},
    ),
    "vectors": Case(vectors, (X, Y), {"y": Y}, {"x": X}),
    "summed out": Case(
        summed_out, (MIXED,), {"y": MIXED}, dims={"place": ["component"], "which": ["row"], "y": ["row"]}
    ),
    "masked": Case(masked, (Y, torch.as_tensor(SEEN)), {"y": Y[SEEN]}, {"seen": SEEN}, counted=SEEN),
    "several": Case(
        several,
        (VOTES, COUNTS),
        {"y": VOTES.astype(int), "count": COUNTS.astype(int)},
        dims={"y": ["row"], "count": ["row"]},
    ),
    "deterministic": Case(deterministic, (X[:, 0], Y), {"y": Y}, {"x": X[:, 0]}, {"line": ["row"], "y": ["row"]}),
    "one chain": Case(one_chain, (Y,), {"y": Y}, dims={"y": ["row"]}, settings={"num_chains": 1}),
    "single": Case(
        one_chain, (torch.as_tensor(Y, dtype=torch.float32),), {"y": Y.astype(np.float32)}, dims={"y": ["row"]}
    ),
    "simplex": Case(simplex, (torch.as_tensor(KINDS),), {"y": KINDS}, dims={"y": ["row"]}),
    "correlated": Case(
        correlated, (PAIRS,), {"y": PAIRS}, dims={"y": ["row", "side"]}, settings={"dims": {"y": ["side"]}}
    ),
}


@cache
def both(name: str) -> tuple[Any, Any]:
    """Return the data for ArviZ as made by the package, and by hand."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = bk.sample(case.model, *case.args, num_samples=60, num_warmup=200, progress=False, **case.settings)
        draws = draws.predictive()
        if name == "summed out":
            draws = draws.infer_discrete()
        prior = bk.prior_predictive(draws.target, num_draws=60)
        ours = draws.to_arviz(prior=prior)

    def arrays(values: dict[str, torch.Tensor], data: bool = False) -> dict[str, np.ndarray]:
        found = {}
        for key, x in values.items():
            array = x.numpy()
            if data and case.counted is not None:
                array = array[..., case.counted]
            whole = data and np.issubdtype(case.observed.get(key, np.zeros(1)).dtype, np.integer)
            found[key] = array.astype(int) if whole or key == "which" else array
        return found

    pointwise = draws.target.pointwise_log_likelihood(draws.unconstrained)
    groups = {
        "posterior": arrays(draws.values()),
        "sample_stats": arrays(draws.sample_stats) | {"lp": draws.log_density.numpy()},
        "log_likelihood": {
            key: (x.numpy()[..., case.counted] if case.counted is not None else x.numpy())
            for key, x in pointwise.items()
        },
        "log_prior": {"log_prior": (draws.log_prior - draws.target.log_jacobian(draws.unconstrained)).numpy()},
        "posterior_predictive": arrays(draws.posterior_predictive, data=True),
        "prior": arrays(prior.values()),
        "prior_predictive": arrays(prior.posterior_predictive, data=True),
        "observed_data": case.observed,
        "constant_data": case.constant,
    }
    groups = {key: value for key, value in groups.items() if value}
    names = {"dims": case.dims, "coords": case.coords}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours, az.from_dict(**groups, **names) if OLD else az.from_dict(groups, **names)


def groups_of(data: Any) -> dict[str, xr.Dataset]:
    return {n: data[n] for n in data.groups()} if OLD else {n: group.to_dataset() for n, group in data.children.items()}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_those_of_the_arrays(name):
    """Values, kinds of numbers and dimensions are those that a careful hand gives; every dimension has a coordinate."""
    ours, by_hand = map(groups_of, both(name))
    assert by_hand.keys() <= ours.keys()
    for group, expected in by_hand.items():
        found = ours[group]
        assert set(found.dims) <= set(found.coords)
        for variable, x in expected.data_vars.items():
            mine = found[variable]
            np.testing.assert_array_equal(mine.values, x.values)
            assert mine.dtype.kind == x.dtype.kind and mine.dtype.itemsize >= min(x.dtype.itemsize, 4)
            if variable in CASES[name].dims:
                assert mine.dims == x.dims
                for dim in mine.dims:
                    np.testing.assert_array_equal(mine[dim], x[dim])
    if OLD:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pandas, about ArviZ's own call
            assert both(name)[0].to_dataframe().shape[0] == 60 * (1 if name == "one chain" else 4)


#: Calls of functions that need more than the data.
MORE: dict[str, Any] = {
    "compare": lambda f, data: f({"one": data, "other": data}, **_one(data)),
    "plot_compare": lambda f, data: f(az.compare({"one": data, "other": data}, **_one(data))),
    "plot_elpd": lambda f, data: f({"one": data, "other": data}, **_one(data)),
    "plot_khat": lambda f, data: f(az.loo(data, pointwise=True, **_one(data))),
    "plot_lm": lambda f, data: f("y", data),
    "plot_ts": lambda f, data: f(data, "y"),
    "plot_loo_pit": lambda f, data: f(data, y="y") if OLD else f(data),
    "loo_pit": lambda f, data: f(data, y="y") if OLD else f(data),
    "plot_separation": lambda f, data: f(data, y="y", y_hat="y"),
    "plot_bf": lambda f, data: f(data, var_names=_first(data)) if not OLD else f(data, var_name=_first(data)),
    "bayes_factor": lambda f, data: f(data, var_names=_first(data)) if not OLD else f(data, var_name=_first(data)),
    "loo": lambda f, data: f(data, pointwise=True, **_one(data)),
    "waic": lambda f, data: f(data, pointwise=True, **_one(data)),
    "psens": lambda f, data: f(data, component="prior"),
    "plot_ess": lambda f, data: f(data, kind="quantile") if OLD else f(data),
    "weight_predictions": lambda f, data: f([data, data], random_seed=0),
    "loo_r2": lambda f, data: f(data, var_name="y"),
    "loo_score": lambda f, data: f(data, var_name="y"),
    "loo_subsample": lambda f, data: f(data, observations=6, seed=0, **_one(data)),
    "rhat_nested": lambda f, data: f(data, superchain_ids=[0, 0, 1, 1]),
    "get_unconstrained_samples": lambda f, data: f(data, return_dataset=True),
}


def _first(data: Any) -> str:
    return next(iter(groups_of(data)["posterior"].data_vars))


def _one(data: Any) -> dict[str, str]:
    return {"var_name": "y"} if len(groups_of(data)["log_likelihood"]) > 1 else {}


def _functions() -> list[str]:
    """Return ArviZ's public functions of data, as named by their first argument or in the table of others."""
    first = {"data", "idata", "dt", "ary"}
    # These write or read files, change groups in place, or belong to data of another kind; xarray_... are ArviZ's own
    # iterators.
    left_out = {"to_netcdf", "to_json", "to_zarr", "to_cds", "clear_data_home", "convert_to_dataset", "to_datatree"}
    left_out |= {"dict_to_dataset", "pytree_to_dataset", "reloo", "numpy_to_data_array", "autocorr", "autocov"}
    left_out |= {
        "apply_test_function",
        "extract_dataset",
        "from_dict",
        "convert_to_inference_data",
        "convert_to_datatree",
    }
    # Draws at random, without a seed; or takes all memory for sites with elements that are constant.
    left_out |= {"weight_predictions"} if OLD else {"qds"}
    found = []
    for name in dir(az):
        function = getattr(az, name)
        if not callable(function) or inspect.isclass(function) or name.startswith(("_", "xarray_")) or name in left_out:
            continue
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            continue
        needed = [
            x for x in parameters if x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
        ]
        if name in MORE or (parameters and parameters[0].name in first and len(needed) <= 1):
            found.append(name)
    return found


def called(name: str, data: Any) -> tuple[Any, Exception | None]:
    function = getattr(az, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return (MORE[name](function, data) if name in MORE else function(data)), None
        except Exception as error:
            return None, error
        finally:
            pyplot.close("all")


def numbers(found: Any) -> list[np.ndarray]:
    """Return the numbers of a result, in order; none of a plot."""
    if type(found).__name__.startswith("ELPDData"):  # a Series of objects in ArviZ 0.x
        names = ("elpd_loo", "elpd_waic", "se", "p_loo", "p_waic", "loo_i", "waic_i", "pareto_k")
        names = names if OLD else ("elpd", "se", "p", "elpd_i", "pareto_k")
        return [np.asarray(getattr(found, name)) for name in names if getattr(found, name, None) is not None]
    if OLD and isinstance(found, az.InferenceData):
        return [x for group in groups_of(found).values() for x in numbers(group)]
    if isinstance(found, xr.DataTree):
        return [x for node in found.subtree for x in numbers(node.to_dataset(inherit=False))]
    if isinstance(found, xr.Dataset):
        return [x for variable in found.data_vars.values() for x in numbers(variable)]
    if isinstance(found, dict):
        return [x for value in found.values() for x in numbers(value)]
    if hasattr(found, "select_dtypes"):
        return [found.select_dtypes("number").to_numpy()]
    if hasattr(found, "values") and isinstance(found.values, np.ndarray):
        return [found.values] if found.dtype.kind in "biufc" else []
    if isinstance(found, tuple | list | Iterator):
        return [x for value in found for x in numbers(value)]
    array = np.asarray(found)
    return [array] if array.dtype.kind in "biufc" else []


#: Functions that apply to every model, so that a failure of both sides is one of the test.
ALWAYS = {"bfmi", "ess", "extract", "hdi", "loo", "mcse", "rhat", "summary"}
NUMBERS = [name for name in _functions() if not name.startswith("plot_")]
PLOTS = [name for name in _functions() if name.startswith("plot_")]


@pytest.mark.parametrize("function", NUMBERS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_arrays(name, function):
    ours, by_hand = both(name)
    (mine, error), (expected, why) = called(function, ours), called(function, by_hand)
    assert why is None or function not in ALWAYS, f"{function} fails for from_dict: {why!r}"
    if why is None:
        assert error is None, f"{function} fails: {error!r}"
        pairs = list(zip(numbers(mine), numbers(expected), strict=True))
        for found, other in pairs:
            np.testing.assert_allclose(found, other, rtol=1e-6, atol=1e-9)
        assert pairs


@pytest.mark.long
@pytest.mark.parametrize("function", PLOTS)
@pytest.mark.parametrize("name", CASES)
def test_plots_are_drawn_where_those_of_the_arrays_are(name, function):
    ours, by_hand = both(name)
    if called(function, by_hand)[1] is None:
        error = called(function, ours)[1]
        assert error is None, f"{function} fails: {error!r}"
