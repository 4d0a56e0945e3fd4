import ast
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import bayeskit
from bayeskit import gallery
from bayeskit.errors import MissingPackageError, OutputError, UnknownNameError
from bayeskit.gallery import _scripts as module
from bayeskit.gallery._run_script import figures_in

PAGE = '''r"""
A title
=======

**What you will learn:** how one
thing is done.

More.
"""

import json

import numpy
{imports}

{code}
'''


@pytest.fixture
def new_page(tmp_path, monkeypatch):
    """Make the only page of a gallery."""
    monkeypatch.setattr(module, "_folder", lambda: tmp_path)

    def new(code="print(1)", imports=""):
        folder = tmp_path / "evidence"
        folder.mkdir(exist_ok=True)
        (folder / "a_page.py").write_text(PAGE.format(imports=imports, code=code))
        module._pages.cache_clear()
        module._packages.cache_clear()
        return gallery.page("a_page")

    yield new
    module._pages.cache_clear()


def test_a_page_is_read_from_its_script(new_page):
    page = new_page()
    assert (page.name, page.group, page.title, page.lesson) == (
        "a_page",
        "evidence",
        "A title",
        "how one thing is done.",
    )
    assert page.packages == ("numpy",) and page.missing_packages == ()


@pytest.mark.parametrize(
    "imports",
    [
        "from bayeskit.models.discrete.sequences import load_nile",
        "from bayeskit.models.discrete import sequences\nflow = sequences.load_nile",
    ],
)
def test_a_page_needs_what_its_data_come_from(new_page, monkeypatch, imports):
    page = new_page(imports=imports)
    assert page.packages == ("numpy", "statsmodels")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "statsmodels" else find_spec(name))
    with pytest.raises(MissingPackageError, match=r"needs statsmodels; install with: pip install 'bayeskit\[tables\]'"):
        page.require()


def test_all_functions_that_read_data_from_other_packages_are_known():
    """Those whose body imports what bayeskit does not import elsewhere."""
    found = {}
    for path in Path(bayeskit.__file__).parent.rglob("*.py"):
        if "examples" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "def load_" in text else ():
            if isinstance(function, ast.FunctionDef) and function.name.startswith("load_"):
                packages = {each for each in module._imports(function) if module._install((each,)) != each}
                found |= dict.fromkeys([function.name] if packages else [], *packages)
    assert found == module._DATA


def test_a_missing_package_names_what_to_install(new_page, monkeypatch):
    page = new_page(imports="import no_such_package, sklearn.datasets\nfrom lifelines.datasets import load_rossi")
    assert page.packages == ("lifelines", "no_such_package", "numpy", "sklearn")
    assert page.missing_packages == ("no_such_package",)
    with pytest.raises(MissingPackageError, match="pip install no_such_package"):
        page.require()
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in ("lifelines", "sklearn") else 1)
    with pytest.raises(MissingPackageError, match=r"pip install 'bayeskit\[tables\]' 'bayeskit\[images\]'"):
        page.require()


def test_data_that_are_read_from_a_package_count_as_needed(new_page):
    page = new_page('folder = find_spec("no_such_package")', "from importlib.util import find_spec")
    assert page.packages == ("no_such_package", "numpy") and page.missing_packages == ("no_such_package",)


def test_a_page_that_needs_what_is_missing_does_not_run(new_page, tmp_path):
    new_page(imports="import no_such_package")
    with pytest.raises(MissingPackageError, match="'a_page' needs no_such_package"):
        module.run_page("a_page", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.calibration
def test_output_and_figures_are_kept(new_page, tmp_path, capfd):
    code = "from matplotlib.figure import Figure\nfigures = Figure(), Figure()\nfirst, second = figures\nprint('é')"
    new_page(code)
    files = module.run_page("a_page", tmp_path / "out")
    assert [file.name for file in files] == ["a_page.txt", "a_page_1.png", "a_page_2.png"]
    assert files[0].read_text(encoding="utf-8") == "é\n" == capfd.readouterr().out
    new_page()  # now without figures: those of the earlier run would lie
    assert module.run_page("a_page", tmp_path / "out", quiet=True) == files[:1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a_page.txt"]
    assert capfd.readouterr().out == ""


def test_small_is_what_a_page_asks_for(new_page, tmp_path, monkeypatch):
    monkeypatch.delenv("BAYESKIT_SMALL_EXAMPLES", raising=False)
    new_page("print(is_small())", "from bayeskit.gallery import is_small")
    said = [module.run_page("a_page", tmp_path, small=s, quiet=True)[0].read_text() for s in (False, True)]
    assert said == ["False\n", "True\n"] and "BAYESKIT_SMALL_EXAMPLES" not in os.environ


def test_a_page_that_fails_says_how(new_page, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    new_page("print('before')\nassert 1 == 2, 'no twin'")
    with pytest.raises(OutputError, match="'a_page' failed; its last line: AssertionError: no twin"):
        module.run_page("a_page", tmp_path, quiet=True)
    assert "before" in (tmp_path / "a_page.txt").read_text()


def test_a_page_that_fails_with_an_error_of_ours_says_more_than_where_it_is_explained(new_page, tmp_path):
    new_page("from bayeskit.errors import TreeError\nraise TreeError('a bracket is missing')")
    with pytest.raises(OutputError, match=r"its last line: bayeskit\.errors\.TreeError: a bracket is missing\n"):
        module.run_page("a_page", tmp_path, quiet=True)


def test_unknown_pages_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'karate_club'"):
        gallery.page("karate-club")
    with pytest.raises(UnknownNameError, match="no model or page is called 'karate'"):
        module.is_page("karate")


def test_figures_are_found_once_each():
    from matplotlib.figure import Figure

    figure = Figure()
    assert figures_in({"a": figure, "b": 1, "c": figure}) == [figure]


def test_every_group_has_a_header():
    folder = module._folder()
    for group in gallery.GROUPS:
        assert (folder / group / "GALLERY_HEADER.rst").read_text(encoding="utf-8").startswith(gallery.GROUPS[group])


@pytest.mark.parametrize(("name", "rows"), [("minnesota_radon.csv", 919), ("leukaemia_remission.csv", 42)])
def test_files_of_case_studies_are_whole_and_say_where_they_are_from(name, rows):
    path = gallery.data_file(name)
    lines = path.read_text(encoding="utf-8").splitlines()
    data = [line.split(",") for line in lines if not line.startswith("#")]
    assert any("Source:" in line for line in lines) and path.stat().st_size < 25_000
    assert len(data) == rows + 1 and {len(row) for row in data} == {len(data[0])} and all(map(all, data))


def test_published_counts_of_the_files():
    trial = [line.split(",") for line in gallery.data_file("leukaemia_remission.csv").read_text().splitlines()[3:]]
    relapses = {arm: sum(int(e) for a, _, e in trial if a == arm) for arm in ("6-MP", "placebo")}
    weeks = {arm: sum(int(t) for a, t, _ in trial if a == arm) for arm in ("6-MP", "placebo")}
    assert relapses == {"6-MP": 9, "placebo": 21} and weeks == {"6-MP": 359, "placebo": 182}
    houses = [line.split(",") for line in gallery.data_file("minnesota_radon.csv").read_text().splitlines()[4:]]
    assert len({county for county, *_ in houses}) == 85 and sum(floor == "0" for _, floor, *_ in houses) == 766


def test_an_unknown_file_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'primates.nex'"):
        gallery.data_file("primates.nexus")
