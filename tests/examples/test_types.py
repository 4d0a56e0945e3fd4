"""Users' scripts under a type checker: the quick start, the pages, many calls, and settings of the wrong type."""

import ast
import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/how_to/*.md")) + sorted(ROOT.glob("docs/tutorials/*.md"))
SETUP = "import torch, pyro, bayeskit as bk\ndef model(y: torch.Tensor) -> None: ...\ny = torch.zeros(3)\n"


def checked(files, *options):
    """Return the errors that mypy finds in files of users."""
    output, errors, _ = api.run([*options, "--scripts-are-modules", "--no-error-summary", "--config-file=", *files])
    assert not errors, errors
    return [line for line in output.splitlines() if ": error:" in line]


@pytest.mark.calibration
def test_types_of_the_quick_start_and_the_pages(tmp_path):
    quick = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))
    (tmp_path / "quick_start.py").write_text(quick)
    assert checked([str(tmp_path / "quick_start.py")], "--strict") == []
    written = []
    for page in PAGES:
        if cells := re.findall(r"```\{code-cell\}[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            file = tmp_path / f"page_{page.stem}.py"
            file.write_text("\n\n".join(re.sub(r"^:.*\n", "", cell, flags=re.MULTILINE) for cell in cells))
            written.append(str(file))
    assert len(written) >= 10
    assert checked(written, "--ignore-missing-imports") == []


def names_called(file):
    """Return the names that the package defines among those that a script calls."""
    functions = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    called = {getattr(function, "attr", getattr(function, "id", "")) for function in functions}
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "bayeskit").rglob("*.py"))
    return called & {name for source in sources for name in re.findall(r"^ *(?:def|class) (\w+)", source, re.MULTILINE)}


@pytest.mark.calibration
def test_types_of_the_calls_of_users():
    file = Path(__file__).with_name("typed_calls.py")
    assert checked([str(file)], "--strict") == []
    assert len(names_called(file)) >= 50


@pytest.mark.calibration
def test_settings_of_the_wrong_type_are_found(tmp_path):
    wrong = [
        'bk.sample(model, y, num_samples="many")',
        'bk.sample(bk.Target.from_pyro(model, y), metric="denser")',
        "bk.sample(model, y).extend()",
        "bk.evidence.bridge_sampling(model)",
        "bk.evidence.bridge_sampling(bk.sample(model, y)).log_evidense",
        "bk.Draws.from_arviz({}, None)",
    ]
    right = [
        "bk.sample(model, y, num_samples=10)",
        "bk.sample(model, y).loo().elpd + 1.0",
        "bk.sample(model, y).target.dim",
    ]
    file = tmp_path / "script.py"
    file.write_text(SETUP + "\n".join(wrong + right) + "\n")
    first = SETUP.count("\n") + 1
    lines = [int(re.search(r":(\d+): error", line)[1]) for line in checked([str(file)], "--ignore-missing-imports")]
    assert lines == list(range(first, first + len(wrong)))
