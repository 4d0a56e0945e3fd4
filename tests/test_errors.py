import inspect
import pickle
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

from bayeskit import errors
from bayeskit._core import documentation

DOCS = Path(__file__).parents[1] / "docs"
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
EXCEPTIONS = [c for c in CLASSES if issubclass(c, errors.BayeskitError)]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda c: c.__name__)
def test_every_error_ends_with_a_page_that_is_there(error):
    raised = error("what happened and where; the remedy")
    assert str(raised) == "what happened and where; the remedy"
    assert raised.__notes__ == [f"See docs/{error.page}.md"] and (DOCS / f"{error.page}.md").is_file()
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is error and str(again) == str(raised) and again.__notes__ == raised.__notes__


def test_an_installed_package_has_the_pages_and_says_where(tmp_path):
    """What a wheel is told to take in is taken in here by hand."""
    build = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    for source, place in build["targets"]["wheel"]["force-include"].items():
        shutil.copytree(DOCS.parent / source, tmp_path / place)
    (tmp_path / "bayeskit" / "_core").mkdir()
    copied = shutil.copy(documentation.__file__, tmp_path / "bayeskit" / "_core")
    place_of_page = runpy.run_path(copied)["place_of_page"]
    for error in EXCEPTIONS:
        place = place_of_page(error.page)
        assert place == str(tmp_path / "bayeskit" / "docs" / f"{error.page}.md") and Path(place).is_file()


@pytest.mark.parametrize("thing", CLASSES, ids=lambda c: c.__name__)
def test_the_page_of_errors_explains_every_class(thing):
    assert f"`{thing.__name__}`" in (DOCS / "how_to" / "errors.md").read_text(encoding="utf-8")
