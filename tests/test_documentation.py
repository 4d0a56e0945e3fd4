"""Pages that repeat a fact, and what writes pages; the built pages have tests of their own."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from bayeskit import __version__, gallery

DOCS = Path(__file__).parents[1] / "docs"
#: What is set or met through another module only: kinds of moves of a search, the laws of activations of a network.
OF_OTHERS = {"bayeskit.models.phylogenetics._topology_moves", "bayeskit.models.wide_networks._activations"}


def extension(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "_extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_entry_to_cite_is_that_of_the_citation_file():
    said = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text(encoding="utf-8"))
    (entry,) = re.findall(r"```bibtex\n(.*?)```", page("citing"), re.DOTALL)
    fields = dict(re.findall(r"(\w+) = \{(.*)\},", entry))
    plain = {name: text.replace("{", "").replace("}", "") for name, text in fields.items()}
    assert plain == {
        "author": said["authors"][0]["name"],
        "title": said["title"],
        "version": said["version"],
        "license": said["license"],
    }
    assert said["version"] == __version__


def test_the_glossary_is_in_order_and_says_each_word_once():
    (body,) = re.findall(r"```\{glossary\}\n(.*?)```", page("concepts/glossary"), re.DOTALL)
    terms = [line for line in body.splitlines() if line and not line.startswith(" ")]
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.casefold)
    words = [word for term in terms for word in term.split(", ")]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"BAYESKIT_ISSUES_URL": ""}, []),
        ({"BAYESKIT_ISSUES_URL": "https://host/issues"}, ["Issues"]),
        (
            {"BAYESKIT_ISSUES_URL": "https://host/issues", "BAYESKIT_REPOSITORY_URL": "https://host"},
            ["Repository", "Issues"],
        ),
    ],
)
def test_links_of_the_project_are_those_of_the_environment(environment, names):
    links = extension("project_links").icon_links(environment)
    assert [link["name"] for link in links] == names
    assert {link["url"] for link in links} == {url for url in environment.values() if url}


@pytest.mark.parametrize(
    ("room", "above"), [("a", None), ("a.b", "a"), ("a.b.c.d", "a.b"), ("ab", None), ("x.y", None)]
)
def test_a_room_is_in_the_innermost_room_above_it(room, above):
    assert extension("reference").room_above(room, ["a", "a.b", "a.c", "x.z"]) == above


def test_every_page_of_the_gallery_answers_a_question_and_every_module_has_one(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    questions, names = extension("questions"), {each.name for each in gallery.pages()}
    asked = questions.NAMED.findall(page("questions"))
    assert set(asked) == names
    without = {room for room, pages in questions.systems().items() if not pages}
    assert without <= OF_OTHERS, f"no page of the gallery uses {sorted(without - OF_OTHERS)}"
    timed = set(questions.seconds_of(DOCS / "tables" / "gallery.csv"))
    assert timed == names, "run benchmarks/gallery_pages.py on new pages, with --save docs/tables/gallery.csv"
