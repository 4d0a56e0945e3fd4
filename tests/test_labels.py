"""Names of dimensions and labels along them, in summaries, warnings, files and ArviZ."""

import arviz
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, DrawsError, SettingsError, ShapeError, UnknownNameError

F64 = torch.float64
N = 12
COUNTIES = pd.Series(pd.Categorical(["Anoka", "Brown", "Clay"] * 4))
X = np.random.default_rng(1).normal(size=(N, 2))
Y = np.random.default_rng(2).poisson(2.0, N)
LABELS = {"coords": {"covariate": ["age", "income"]}, "dims": {"slope": ["covariate"], "x": ["row", "covariate"]}}

pytestmark = pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")  # short chains


def model(x, county, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    with pyro.plate("county", 3):
        effect = pyro.sample("effect", dist.Normal(mean, 1.0))
    with pyro.plate("row", len(y)):
        line = pyro.deterministic("line", effect[county] + x @ slope)
        pyro.sample("y", dist.Poisson(line.exp()), obs=y)


@pytest.fixture(scope="module")
def draws():
    return bk.sample(model, X, COUNTIES, Y, num_warmup=50, num_samples=30, progress=False, **LABELS)


NAMED = ["mean", "slope[age]", "slope[income]", "effect[Anoka]", "effect[Brown]", "effect[Clay]"]


def test_coordinates_have_the_labels_that_are_given_and_those_of_categories(draws):
    assert list(draws.target.names) == NAMED
    assert draws.summary().index.tolist() == NAMED + [f"line[{i}]" for i in range(N)]
    assert draws.summary(kind="stats", var_names=["effect"]).index.tolist() == NAMED[3:]
    plain = bk.Target.from_pyro(model, X, COUNTIES, Y)
    assert plain.names[1:4] == ("slope[0]", "slope[1]", "effect[Anoka]")
    assert plain.labelled(coords={"county": "ABC"}).names[3:] == ("effect[A]", "effect[B]", "effect[C]")
    assert plain.names[3] == "effect[Anoka]"  # as it was


def test_arviz_has_a_coordinate_along_each_dimension(draws):
    data = draws.predictive().to_arviz()
    for group in ("posterior", "posterior_predictive", "observed_data", "constant_data", "log_likelihood"):
        assert set(data[group].dims) == set(data[group].coords)
    assert data["posterior"]["line"].dims == ("chain", "draw", "row")
    assert data["constant_data"]["x"].dims == ("row", "covariate")
    assert data["posterior"].coords["county"].values.tolist() == ["Anoka", "Brown", "Clay"]
    unlabelled = bk.sample(model, X, COUNTIES, Y, num_warmup=20, num_samples=8, progress=False).to_arviz()
    assert unlabelled["posterior"].coords["slope_dim_0"].values.tolist() == [0, 1]


def test_counts_are_whole_numbers(draws):
    data = draws.predictive().to_arviz()
    for group in ("observed_data", "posterior_predictive"):
        assert data[group]["y"].dtype == np.int64
    assert data["posterior"]["line"].dtype == np.float64


def test_where_predictive_draws_are_is_said(draws):
    predicted = draws.predictive()
    assert repr(predicted).endswith("sites: mean, slope, effect, posterior_predictive: y)")
    with pytest.raises(UnknownNameError, match=r"predictive ones are \.posterior_predictive\['y'\]"):
        predicted["y"]
    with pytest.raises(UnknownNameError, match=r"'y' is observed or summed out; .*infer_discrete"):
        draws["y"]


def test_a_summary_of_an_unknown_site_names_those_that_there_are(draws):
    assert draws.summary(var_names="mean").index.tolist() == ["mean"]
    assert draws.summary(var_names=["~slope", "~effect", "~line"]).index.tolist() == ["mean"]
    for wrong in ("maen", ["mean", "maen"], ["~maen"]):
        with pytest.raises(UnknownNameError, match="no site is called 'maen'"):
            draws.summary(var_names=wrong)


def gaps(y, seen):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("row", len(y)), pyro.poutine.mask(mask=seen):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_data_that_a_mask_leaves_out_are_left_out_everywhere():
    y, seen = torch.linspace(-1.0, 2.0, N, dtype=F64), torch.arange(N) % 4 != 0
    masked = bk.sample(gaps, y, seen, num_samples=400, progress=False)
    data = masked.predictive().to_arviz(coords={"row": [f"day {i}" for i in range(N)]})
    kept = [f"day {i}" for i in range(N) if i % 4]
    for group in ("log_likelihood", "observed_data", "posterior_predictive"):
        assert data[group]["y"].dims[-1] == "y_datum"
        assert data[group].coords["y_datum"].values.tolist() == kept
    assert data["observed_data"]["y"].values.tolist() == y[seen].tolist()
    # The same model of the data that are left.
    whole = torch.ones(int(seen.sum()), dtype=torch.bool)
    own = bk.Target.from_pyro(gaps, y[seen], whole).pointwise_log_likelihood(masked.unconstrained)["y"]
    assert np.array_equal(data["log_likelihood"]["y"].values, own.numpy())
    assert arviz.loo(data).n_data_points == len(kept)
    prior = bk.prior_predictive(gaps, y, seen, num_draws=10).to_datasets()
    assert prior["prior_predictive"]["y"].shape == (1, 10, len(kept))


def test_masked_cells_of_a_table_have_their_indices_as_labels():
    def table(y, seen):
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
        with pyro.plate("column", 3), pyro.plate("row", 2), pyro.poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    seen = torch.tensor([[True, False, True], [True, True, False]])
    draws = bk.sample(table, torch.zeros(2, 3, dtype=F64), seen, num_warmup=20, num_samples=8, progress=False)
    found = draws.to_datasets()["observed_data"]
    assert found.coords["y_datum"].values.tolist() == ["0,0", "0,2", "1,0", "1,1"]


def test_a_deterministic_site_that_may_lie_along_two_plates_has_none():
    def square(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(4, dtype=F64), 1.0).to_event(1))
        with pyro.plate("row", 4):
            pyro.deterministic("pairs", x[:, None] * x)
            pyro.deterministic("matrix", torch.stack([x, x], 1))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    dimensions = bk.Target.from_pyro(square, torch.zeros(4, dtype=F64)).dimensions()
    assert dimensions["pairs"] == (None, None) and dimensions["matrix"] == ("row", None)


def test_saved_draws_know_names_and_labels(draws, tmp_path):
    draws.save(tmp_path / "draws")
    loaded = bk.Draws.load(tmp_path / "draws")
    assert list(loaded.values()) == list(draws.values()) == ["mean", "slope", "effect", "line"]
    assert all(torch.equal(loaded[name], x) for name, x in draws.values().items())
    assert loaded.summary().equals(draws.summary())
    assert loaded.to_datasets()["posterior"].equals(draws.to_datasets()["posterior"])
    assert torch.equal(loaded.thin(3)["effect"], draws.thin(3)["effect"])
    assert "mean, slope, effect" in repr(loaded)
    loaded.save(tmp_path / "again")
    assert bk.Draws.load(tmp_path / "again").summary().equals(draws.summary())
    with pytest.raises(DrawsError, match="no target"):
        loaded.predictive()
    assert bk.Draws.load(tmp_path / "draws", draws.target).predictive().posterior_predictive.keys() == {"y"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"coords": {"county": ["A", "B"]}}, ShapeError, "2 labels for dimension 'county', whose size is 3"),
        ({"coords": {"county": ["A", "B", "B"]}}, DataError, "label 'B' of dimension 'county' twice"),
        ({"coords": {"town": ["A"]}}, UnknownNameError, "no plate or dimension is called 'town'"),
        ({"dims": {"slop": ["covariate"]}}, UnknownNameError, "no site or argument is called 'slop'"),
        ({"dims": {"mean": ["covariate"]}}, ShapeError, "site 'mean', which has 0"),
        ({"coords": 2}, SettingsError, "coords must be a mapping"),
        ({"dims": {"slope": "covariate"}}, ShapeError, "site 'slope', which has 1"),
    ],
)
def test_bad_labels_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        bk.sample(model, X, COUNTIES, Y, progress=False, **settings)


def test_columns_of_a_whole_frame_are_constant_data():
    """Columns that cannot be read and are not used, such as mixed texts, are left out."""

    def model(data):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("row", len(data)):
            pyro.sample("y", dist.Normal(mean + data["x"], 1.0), obs=data["y"])

    frame = pd.DataFrame({"y": [1.0, 2.0, 0.5], "x": [0.0, 1.0, 2.0], "note": ["7", "x", None]})
    groups = bk.sample(model, frame, num_samples=50, num_warmup=50, progress=False).to_datasets()
    assert list(groups["constant_data"].data_vars) == ["x"] and list(groups["observed_data"].data_vars) == ["y"]
