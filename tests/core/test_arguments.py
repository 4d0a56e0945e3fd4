"""Arguments of models in the forms in which people have them: each becomes one tensor, or is refused by name."""

import copy
import pickle

import cloudpickle
import numpy as np
import pandas as pd
import polars as pl
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.arguments import arrays_as_tensors, in_precision
from bayeskit._core.inputs import labels_of
from bayeskit.errors import DataError

LETTERS = ["b", "a", "b"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((torch.tensor([1, 0], dtype=kind), [1, 0]) for kind in (torch.int8, torch.uint8, torch.int32, torch.uint16)),
        *((np.array([1, 0], dtype=kind), [1, 0]) for kind in ("i1", "u1", ">i2", "u4", "u8")),
        (pd.Series([1, 0], dtype="Int16"), [1, 0]),
        (pd.Series(LETTERS, dtype="category"), [1, 0, 1]),
        (pd.Series(LETTERS, dtype="category").cat.codes, [1, 0, 1]),
        (pd.Categorical(LETTERS), [1, 0, 1]),
        (pl.Series(LETTERS, dtype=pl.Categorical), [1, 0, 1]),
        (pl.Series(LETTERS, dtype=pl.Enum(["b", "a"])), [0, 1, 0]),
        (pl.Series([1, 0], dtype=pl.UInt8), [1, 0]),
        (np.arange(6)[::-2], [5, 3, 1]),
    ],
    ids=str,
)
def test_whole_numbers_are_64_bits_wide(value, expected):
    found = arrays_as_tensors(value)
    assert found.dtype == torch.int64 and found.tolist() == expected


@pytest.mark.parametrize(
    "value",
    [
        pd.Series([1, None, 3], dtype="Int64"),
        pd.Series([1.0, None, 3.0]),
        pd.Series([1, None, 3], dtype=object),
        pl.Series([1, None, 3]),
        np.ma.array([1, 2, 3], mask=[False, True, False]),
        np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_what_is_missing_is_nan(value):
    found = arrays_as_tensors(value)
    torch.testing.assert_close(found, torch.tensor([1.0, torch.nan, 3.0], dtype=torch.float64), equal_nan=True)


def test_texts_stay_and_containers_are_looked_into():
    names = np.array(["a", "b"])
    assert arrays_as_tensors(names) is names
    found = arrays_as_tensors([np.ones(2, np.int8), {"flags": np.array([True])}, "text", 3])
    assert found[0].dtype == torch.int64 and found[1]["flags"].dtype == torch.bool and found[2:] == ["text", 3]


def test_categories_keep_their_labels():
    assert labels_of(pd.Series(LETTERS, dtype="category")) == ("a", "b")
    assert labels_of(pl.Series(LETTERS, dtype=pl.Enum(["b", "a"]))) == ("b", "a")
    assert labels_of(pl.Series(LETTERS, dtype=pl.Categorical)) == ("a", "b")
    assert labels_of(np.array([1])) is None and labels_of([1]) is None

    def model(county, table, more=None):
        with pyro.plate("counties", 2):
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(county)):
            pyro.sample("y", dist.Normal(mean[county] + mean[more["b"]], 1.0), obs=table["y"])

    counties, b = (pd.Series(LETTERS, dtype="category").cat.rename_categories(names) for names in (["A", "B"], [3, 4]))
    table = pd.DataFrame({"y": [1.0, 2.0, 3.0], "floor": counties})
    target = bk.Target.from_pyro(model, counties, table, more={"b": b})
    assert target.categories == {"county": ("A", "B"), "floor": ("A", "B"), "b": (3, 4)}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (pd.Series([*LETTERS, None], dtype="category"), "argument 'x' has 1 missing categories, the first in row 3"),
        (pl.Series([None, *LETTERS], dtype=pl.Categorical), "1 missing categories, the first in row 0"),
        (pd.Series(pd.to_datetime(["2020-01-01"])), "argument 'x' holds dates or times .*the days since the first"),
        (pl.Series(["2020-01-01"]).str.to_date(), "argument 'x' holds dates or times"),
        (np.array([3], "m8[s]"), "argument 'x' holds dates or times"),
        (pd.Series(pd.date_range("2020", periods=2, tz="UTC")), r"holds dates or times \(Timestamp\)"),
        (pd.Series(pd.period_range("2020", periods=2, freq="D")), r"holds dates or times \(Period\)"),
        (pl.DataFrame({"a": np.ones((2, 1))}), "column 'a' of argument 'x' holds arrays, not numbers"),
        (iter([1.0]), "argument 'x' is an iterator"),
        (pd.DataFrame(np.ones((2, 2))), r"columns are called 0, 1, which a tensor would take for rows; .* \.to_numpy"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "several columns called 'a'"),
        (pd.DataFrame(), "without columns"),
        (
            pd.DataFrame({"a": ["p"], "b": ["q"]}),
            "column 'a' of argument 'x' is an array of texts, such as 'p'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(value, said):
    with pytest.raises(DataError, match=said):
        arrays_as_tensors(value, "argument 'x'")


@pytest.mark.parametrize("library", [pd, pl])
def test_a_frame_is_a_matrix_with_names(library):
    table = library.DataFrame({"x": [1.0, 2.0], "n": [3, 4]})
    frame = arrays_as_tensors(table)
    assert frame["n"].dtype == torch.int64 and frame.x.dtype == torch.float64 and len(frame) == 2
    assert "x" in frame and "y" not in frame
    weights = torch.tensor([1.0, 10.0], dtype=torch.float64)
    assert (frame @ weights).tolist() == [31.0, 42.0] and type(frame * 2) is torch.Tensor
    assert frame[["n", "x"]].tolist() == [[3.0, 1.0], [4.0, 2.0]] and frame[0].tolist() == [1.0, 3.0]
    rows = frame[torch.tensor([1, 0])]
    assert (
        rows["n"].tolist() == [4, 3]
        and frame[1:].x.tolist() == [2.0]
        and frame.to(torch.float32).n.dtype == torch.float32
    )
    for again in (copy.deepcopy(frame), pickle.loads(cloudpickle.dumps(frame))):
        assert again["n"].dtype == torch.int64 and torch.equal(again + 0, frame + 0)
    assert in_precision(frame, torch.float32).x.dtype == torch.float32
    assert in_precision(frame, torch.float64) is frame
    with pytest.raises(DataError, match="the data frame has no column 'z'; it has 'x', 'n'"):
        frame["z"]
    with pytest.raises(AttributeError, match="no column 'z'"):
        frame.z  # noqa: B018


def test_a_column_of_texts_is_refused_where_it_is_used():
    frame = arrays_as_tensors(pd.DataFrame({"x": [1.0, 2.0], "name": ["a", "b"]}), "argument 'table'")
    assert frame["x"].tolist() == [1.0, 2.0] and len(frame) == 2
    for use in (lambda: frame["name"], lambda: frame * 2, lambda: frame[["x", "name"]]):
        with pytest.raises(DataError, match="column 'name' of argument 'table' is an array of texts"):
            use()
