"""Tables in files: a spreadsheet runs none of their texts, and their numbers are read back."""

import csv
import math
import re
from pathlib import Path

import pandas as pd
import pytest

import bayeskit
from bayeskit._core.folders import write_atomically, write_csv
from bayeskit.errors import OutputError
from bayeskit.inference.evidence import Evidence
from bayeskit.workflows import ModelComparison

ROOT = Path(bayeskit.__file__).parent

FORMULAS = ['=HYPERLINK("http://x")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\n+a", " =1", "--1"]
HARMLESS = ["a=b", "x[-1]", "(A,B);", "", "-1.5", "+2", "-inf", "'quoted'", "1e-3", "α"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_and_no_name_is_a_formula(text, tmp_path):
    table = pd.DataFrame({"name": [text], text: [-1.5]}, index=pd.Index([text], name=text))
    write_csv(tmp_path / "table.csv", table, index=True)
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [[f"'{text}", "name", f"'{text}"], [f"'{text}", f"'{text}", "-1.5"]]


def test_numbers_and_other_texts_stay_as_they_are(tmp_path):
    table = pd.DataFrame(
        {
            "text": HARMLESS,
            "number": [-1.0 / 3, -math.inf, math.nan, 0.0, 1e-300, -2.0, 3.5, 1.0, 2.0, 3.0],
            "count": range(-5, 5),
            "flag": [True, False] * 5,
        }
    )
    before = table.copy()
    write_csv(tmp_path / "table.csv", table, float_format=None)
    assert (tmp_path / "table.csv").read_text() == table.to_csv(index=False)
    write_csv(tmp_path / "table.csv", table)
    assert (tmp_path / "table.csv").read_text() == table.to_csv(index=False, float_format="%.10g")
    pd.testing.assert_frame_equal(table, before)


def test_tables_of_results_are_written_so(tmp_path):
    models = ModelComparison({"=1+1": Evidence("bridge_sampling", -1.0, 0.1, 10), "b": Evidence("smc", -2.0, 0.1, 10)})
    models.to_csv(tmp_path / "models.csv")
    table = pd.read_csv(tmp_path / "models.csv")
    assert list(table["model"]) == ["'=1+1", "b"] and float(table["log_evidence"][0]) == -1.0


def places(pattern):
    """Return the modules of the package in which a pattern occurs."""
    found = (path for path in ROOT.rglob("*.py") if re.search(pattern, path.read_text(encoding="utf-8")))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def test_there_is_no_other_way_to_write_a_table_or_to_load_code():
    assert places(r"to_csv\([^)]*=|csv\.writer|DictWriter") == ["_core/folders.py"]
    # What a process has sent to another one, which is code anyway; files are never read in this way.
    sent = ["_logdensity/numpyro_density.py"]
    assert places(r"pickle\.loads?\(|torch\.load\(|allow_pickle|load_library\([^n]*torch") == sent
    assert places(r"ctypes\.CDLL\(|cdll\.") == ["_core/libraries.py"]
    compiling = places(r"torch\.compile\(|_inductor\.compile\b")
    assert compiling == ["_compiler/inductor.py", "inference/training/_forward_passes.py"]
    assert set(compiling) <= set(places(r"with compiler_cache\(\)|enter_context\(compiler_cache\(\)\)"))


def test_a_folder_that_is_missing_is_a_typed_error(tmp_path):
    with pytest.raises(OutputError, match="cannot write"):
        write_csv(tmp_path / "missing" / "table.csv", pd.DataFrame({"a": [1]}))


def test_a_path_without_a_name():
    with pytest.raises(OutputError, match="names no file"):
        write_atomically("", b"text")
