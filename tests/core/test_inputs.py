import numpy as np
import pandas as pd
import pytest
import torch

from bayeskit._core.inputs import as_numbers
from bayeskit.errors import DataError


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones(2, np.float32), torch.float32),
        (np.ones(2, ">f8"), torch.float64),
        ([1.0, 1.0], torch.float64),
        ((1, 1), torch.int64),
        ([True, True], torch.bool),
        (np.ones(2, np.uint32), torch.int64),
        (pd.Series([1.0, 1.0]), torch.float64),
        (pd.Series([1, 1], dtype=object), torch.float64),
        (np.ones(4)[::2], torch.float64),
    ],
    ids=["float32", "big endian", "floats", "integers", "bools", "unsigned", "column", "objects", "strided"],
)
def test_numbers_of_any_library(value, dtype):
    found = as_numbers("x", value)
    assert found.dtype == dtype and found.tolist() == [1, 1]


def test_a_missing_value_is_not_a_number_and_tables_are_matrices():
    assert bool(as_numbers("x", [1.0, None]).isnan()[1])
    assert as_numbers("x", pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})).tolist() == [[1.0, 0.5], [2.0, 1.5]]


def test_a_tensor_stays_and_an_array_is_copied():
    x = torch.ones(2, requires_grad=True)
    assert as_numbers("x", x) is x
    array = np.ones(2)
    as_numbers("x", array)[0] = 5.0
    assert array[0] == 1.0


@pytest.mark.parametrize(
    "value", ["abc", ["a", "b"], [[1.0], [1.0, 2.0]], None, print, np.array(["2020"], "M8[D]"), 1j, [2**63]]
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(DataError, match="y .*(give a tensor|make them categories)"):
        as_numbers("y", value)
