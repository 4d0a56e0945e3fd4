"""Every claim of the documentation's table is recomputed, with every number that its header states."""

import ast
import importlib.util
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence

DOCS = Path(__file__).parents[1] / "docs"
PATHS = sorted((DOCS / "claims").glob("*.py"))
NUMBER = re.compile(r"(\+- )?(?<![\w.])(-?\d[\d,]*(?:\.(\d+))?)")


def extension():
    spec = importlib.util.spec_from_file_location("claims", DOCS / "_extensions" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def claims():
    return extension()


def stated(text):
    """Return the numbers of a header, each with half of its last digit and, after ``+-``, its standard error."""
    found = []
    for plus_minus, digits, decimals in NUMBER.findall(text):
        value = float(digits.replace(",", ""))
        if plus_minus:
            found[-1][2] = value
        else:
            found.append([value, 0.5 * 10.0 ** -len(decimals), None])
    return found


def disagreements(text, found, limit):
    """Return the numbers of a header that the script did not find, within rounding or Monte Carlo errors."""
    said = stated(text)
    if len(said) != len(found):
        return [f"{len(said)} numbers stated, {len(found)} found"]
    wrong = []
    for (value, half, error), new in zip(said, found, strict=True):
        new, new_error = new if isinstance(new, tuple) else (new, None)
        agree = abs(value - new) <= half * (1 + 1e-6)
        if new_error is not None:
            agree = error is not None and abs(value - new) < half + limit * math.hypot(error, new_error)
            agree = agree and 0.5 < error / new_error < 2
        if not agree or (error is None) != (new_error is None):
            wrong.append(f"{value} +- {error} stated, {new} +- {new_error} found")
    return wrong


@pytest.mark.calibration
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_claim_has_its_verdict_and_its_numbers(path, claims, limit):
    claim = claims.read(path)
    assert 4 <= len([line for line in claim.code.splitlines() if line.strip()]) <= 34
    assert re.search(r"^ *assert ", claim.code, re.MULTILINE), "no verdict is asserted"
    asserted = [node.test for node in ast.walk(ast.parse(claim.code)) if isinstance(node, ast.Assert)]
    compared = [op for test in asserted for node in ast.walk(test) if isinstance(node, ast.Compare) for op in node.ops]
    assert max(len(asserted), len(compared)) > claim.verdict.startswith("holds if"), "a condition has two sides"
    assert "{cite:" in claim.made_in
    assert not claim.page or (DOCS.parent / "examples" / f"{claim.page}.py").exists()
    found = runpy.run_path(str(path))["found"]
    assert not disagreements(claim.number, found, limit(len(found)))


@pytest.mark.calibration
def test_there_are_thirty_claims_on_one_page(claims):
    found = claims.read_all(DOCS / "claims")
    assert sorted(claim.name for claim in found) == [path.stem for path in PATHS]
    table, scripts = claims.table(found), claims.scripts(found)
    targets = re.findall(r"\[script\]\(#([\w-]+)\)", table)
    assert len(targets) == len(set(targets)) == len({claim.title for claim in found}) == len(found) >= 30
    assert re.findall(r"^\(([\w-]+)\)=\n### ", scripts, re.MULTILINE) == targets
    assert tuple(re.findall(r"^## (.+)$", table, re.MULTILINE)) == claims.SUBJECTS
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    assert all(text.count(mark) == 1 for mark in claims.MARKS)
    assert "claims" in (DOCS / "measured.md").read_text(encoding="utf-8").split()
    assert "(claims.md)" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "found", "agree"),
    [
        ("0.16 nats, -1,234.5 in all", (0.1596, -1234.52), True),
        ("0.16 nats", (0.1549,), False),
        ("0.16 nats", (0.16, 0.2), False),
        ("1.03 +- 0.02 times", ((1.05, 0.019),), True),
        ("1.03 +- 0.02 times", ((1.33, 0.019),), False),
        ("1.03 +- 0.02 times", ((1.03, 0.2),), False),
        ("1.03 times", ((1.03, 0.02),), False),
        ("1.03 +- 0.02 times", (1.03,), False),
        ("R2 and x1 are names", (), True),
    ],
)
def test_mutation_a_number_that_is_not_found_is_noticed(text, found, agree, limit):
    assert (not disagreements(text, found, limit())) == agree


@pytest.mark.calibration
@pytest.mark.parametrize(
    "header",
    [
        "A claim without an end",
        "A claim.\n\nTitle: t\nSubject: Differential equations\nVerdict: holds\nNumber: 1",
        "A claim.\n\nTitle: t\nSubject: Differential equations\nMade in: x\nVerdict: maybe\nNumber: 1",
        "A claim.\n\nTitle: t\nSubject: Weather\nMade in: x\nVerdict: holds\nNumber: 1",
    ],
)
def test_mutation_a_header_without_its_parts_is_refused(header, claims, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f'"""{header}\n"""\n')
    with pytest.raises(ValueError, match=r"script\.py"):
        claims.read(path)


def mixed(function):
    """Return the mixed second derivative of a function of two numbers, at (1, 2)."""
    t, t0 = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.0, 2.0))
    (slope,) = torch.autograd.grad(function(t, t0), t, create_graph=True)
    return float(torch.autograd.grad(slope, t0)[0])


def test_every_line_that_refutes_a_misprint_is_true():
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| .* \| `([^`]+)` \|$", text, re.MULTILINE)
    names = {"log": math.log, "Normal": Normal, "kl": lambda p, q: float(kl_divergence(p, q)), "mixed": mixed}
    assert len(lines) == 6
    assert all(eval(line, dict(names)) for line in lines)
