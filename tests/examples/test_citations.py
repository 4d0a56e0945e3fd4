import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLE = re.compile(r":cite:\w+:`([^`]+)`|\{cite:\w+\}`([^`]+)`")


def cited_keys(text):
    return {key.strip() for keys in ROLE.findall(text) for key in "".join(keys).split(",")}


def entry_keys(text):
    return re.findall(r"^@\w+\{([^,\s]+),$", text, re.MULTILINE)


PAGES = (*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "claims").glob("*.py"))
PAGES = {path: cited_keys(path.read_text(encoding="utf-8")) for path in PAGES if "_build" not in path.parts}
ENTRIES = entry_keys((ROOT / "docs" / "references.bib").read_text(encoding="utf-8"))


def test_every_work_cited_has_an_entry():
    missing = {str(path.relative_to(ROOT)): keys - set(ENTRIES) for path, keys in PAGES.items() if keys - set(ENTRIES)}
    assert not missing
    assert len(set().union(*PAGES.values())) > 60


def test_no_entry_occurs_twice():
    assert sorted(set(ENTRIES)) == sorted(ENTRIES)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("by :cite:t:`neal2001`, and", {"neal2001"}),
        (":cite:p:`neal2001,\nwu2017`", {"neal2001", "wu2017"}),
        ("Cox :cite:yearpar:`cox1972, cox1975`", {"cox1972", "cox1975"}),
        ("said {cite:p}`talts2018`.", {"talts2018"}),
        (":math:`x` by Neal (2001)", set()),
    ],
)
def test_keys_are_found(text, keys):
    assert cited_keys(text) == keys


def test_mutation_a_second_entry_is_found():
    assert entry_keys("@article{a2001,\n}\n\n@misc{b2002,\n}\n\n@book{a2001,\n}\n") == ["a2001", "b2002", "a2001"]
