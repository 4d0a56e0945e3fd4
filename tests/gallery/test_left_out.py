"""A page that is left out of the documentation does not stop the other pages from being built."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "docs" / "_extensions" / "left_out.py"
SPEC = importlib.util.spec_from_file_location("left_out", SOURCE)
left_out = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(left_out)

GONE = {"gallery/evidence/galaxies": "How many galaxies"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":doc:`galaxies` counts.", "How many galaxies counts."),
        (":doc:`galaxies by number <galaxies>`", "galaxies by number"),
        (":doc:`/gallery/evidence/galaxies` and :doc:`schools`", "How many galaxies and :doc:`schools`"),
        (":doc:`../evidence/galaxies`", "How many galaxies"),
        ("{doc}`the\ngalaxies </gallery/evidence/galaxies>`", "the\ngalaxies"),
        ("[the\ngalaxies](/gallery/evidence/galaxies), [x](schools)", "the\ngalaxies, [x](schools)"),
        ("[galaxies](galaxies.rst#the-fit)", "galaxies"),
        (":func:`galaxies`, ``galaxies``, ![a picture](galaxies)", None),
        (":doc:`/galaxies`, [elsewhere](https://galaxies)", None),
    ],
)
def test_links_to_what_is_left_out_become_text(text, expected):
    assert left_out.without_links(text, "gallery/evidence/schools", GONE) == (text if expected is None else expected)


def test_scripts_left_out_are_not_run():
    pattern = re.compile(left_out.ignore_pattern(["galaxies"]))
    assert all(pattern.search(name) for name in ("galaxies.py", "../examples/evidence/galaxies.py", "__init__.py"))
    assert not any(pattern.search(name) for name in ("schools.py", "more_galaxies.py", "galaxies.pyx"))


@pytest.mark.calibration
@pytest.mark.parametrize("connected", [True, False])
def test_the_other_pages_are_built_without_a_warning(tmp_path, connected):
    gone = GONE if connected else {}
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(SOURCE.parent)!r})\nimport left_out\n"
        "extensions = ['myst_parser']\nmyst_enable_extensions = ['attrs_inline']\n"
        f"def setup(app):\n    left_out.connect(app, {gone!r})\n",
        encoding="utf-8",
    )
    (tmp_path / "gallery" / "evidence").mkdir(parents=True)
    (tmp_path / "index.md").write_text(
        "# Pages\n\n[some](/gallery/evidence/galaxies), {doc}`/gallery/evidence/galaxies` and\n"
        "[schools](/gallery/evidence/schools).\n\n```{toctree}\ngallery/evidence/schools\n```\n",
        encoding="utf-8",
    )
    (tmp_path / "gallery" / "evidence" / "schools.rst").write_text(
        "Schools\n=======\n\n:doc:`galaxies` and :doc:`others <galaxies>`, back to :doc:`/index`.\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "text", str(tmp_path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode == 0) == connected, result.stderr
    if connected:
        text = (tmp_path / "out" / "gallery" / "evidence" / "schools.txt").read_text(encoding="utf-8")
        assert "How many galaxies and others, back to Pages." in text
    else:
        assert "galaxies" in result.stderr
