"""A share of the cases of ``benchmarks/fuzz_files.py``: damaged files are read unchanged, or refused by our errors."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "fuzz_files.py"
SPECIFICATION = importlib.util.spec_from_file_location("fuzz_files", PATH)
fuzz_files = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(fuzz_files)
QUICK = [kind for kind in fuzz_files.KINDS if not kind.startswith("checkpoint")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.parametrize("kind", QUICK)
def test_damage_is_noticed(kind, folder):
    assert [said for seed in range(8) if (said := fuzz_files.run_case(kind, seed, folder))] == []


@pytest.mark.parametrize(("kind", "way", "seed"), [("checkpoint of fit", "layout", 779079)])
def test_damage_that_was_not_noticed_once(kind, way, seed, folder):
    assert fuzz_files.failure(kind, fuzz_files.Damage(way, (seed,)), folder) is None


def test_a_change_that_nobody_notices_is_found_and_shrunk(folder, monkeypatch):
    """Mutation: without the comparison of checksums a changed number is loaded, and the fuzzer says so."""
    from bayeskit._core import folders as folders

    monkeypatch.setattr(folders, "_checksum", lambda whole, payload: "same")
    monkeypatch.setitem(fuzz_files.FILES, "unchecked", fuzz_files.FILES["Draws"])
    failed = [seed for seed in range(60) if fuzz_files.run_case("unchecked", seed, folder)]
    assert failed
    assert "silent change of a number" in fuzz_files.shrink("unchecked", failed[0], folder)
