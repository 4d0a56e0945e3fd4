"""The built pages as files: every link leads somewhere, and nothing is loaded from elsewhere."""

import functools
import importlib
import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from bayeskit import errors, gallery

sys.path.insert(0, str(Path(__file__).parents[1] / "_extensions"))

import reference  # noqa: E402

LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


class Page(HTMLParser):
    """What a page loads, where it leads, and what can be led to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.without_text = [], [], {"", "top"}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.anchors.update(known[name] for name in ("id", "name") if known.get(name))
        if tag == "a" and known.get("href"):
            self.links.append(known["href"])
        if tag in LOADED and known.get(LOADED[tag]) and known.get("rel") != "canonical":
            self.loads.append(known[LOADED[tag]])
        if tag == "img" and known.get("alt") is None:
            self.without_text.append(known.get("src"))


@functools.cache
def read(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages(site):
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def test_every_link_leads_somewhere(site, pages):
    broken = []
    for path in pages:
        for link in read(path).links:
            where = urlsplit(link)
            if where.scheme in ("http", "https", "mailto"):
                continue
            goal = (path.parent / unquote(where.path)).resolve() if where.path else path
            if not goal.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif goal.suffix == ".html" and unquote(where.fragment) not in read(goal).anchors:
                broken.append(f"{path.relative_to(site)}: {link} (no such place on the page)")
    assert not broken, "\n".join(broken[:40])


def test_nothing_is_loaded_from_elsewhere(site, pages):
    foreign, missing = [], []
    for path in pages:
        for address in read(path).loads:
            where = urlsplit(address)
            if where.scheme in ("http", "https") or where.netloc:
                foreign.append(f"{path.relative_to(site)}: {address}")
            elif where.scheme != "data" and not (path.parent / unquote(where.path)).resolve().exists():
                missing.append(f"{path.relative_to(site)}: {address}")
    assert not foreign and not missing, "\n".join((foreign + missing)[:40])


def test_every_picture_has_a_description(site, pages):
    mute = [f"{path.relative_to(site)}: {src}" for path in pages for src in read(path).without_text]
    assert not mute, "\n".join(mute[:40])


def test_every_page_of_the_gallery_is_there_with_its_figures(site):
    for page in gallery.pages():
        built = site / "gallery" / page.group / f"{page.name}.html"
        assert built.is_file() == (not page.missing_packages), page.name
        if built.is_file() and page.group != "sampling":
            assert re.search(r'<img [^>]*src="[^"]*sphx_glr_', built.read_text(encoding="utf-8")), page.name


def test_every_public_name_has_its_place(site):
    described = {path.stem for path in (site / "api" / "generated").glob("*.html")}
    described |= {path.stem for path in (site / "api").glob("*.html")}
    described |= {anchor for path in (site / "api").glob("*.html") for anchor in read(path).anchors}
    assert {"bayeskit.Target", "bayeskit.sample", "bayeskit.inference.evidence.compare"} <= described
    places: dict[int, set[str]] = {}
    for room in (room for roots in reference.PARTS.values() for root in roots for room in reference.rooms_below(root)):
        module = importlib.import_module(room)
        for name in reference.public_names(module):
            thing = getattr(module, name)
            where = places.setdefault(id(thing), set())
            where.add(thing.__name__ if inspect.ismodule(thing) else f"{room}.{name}")
    assert len(places) > 500
    assert not [min(where) for where in places.values() if not where & described]
    # What functions return is described too, though nobody makes it by name.
    for result in ("KernelRegime", "Interval", "NTKDrift", "FiniteWidthBias", "SplitFrequencies"):
        assert [name for name in described if name.endswith(f".{result}")], result
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, errors.BayeskitError):
            assert (site / f"{thing.page}.html").is_file(), name


def test_pages_of_the_reference_are_titled_by_the_last_component(site):
    titles = {
        path.stem: re.search(r"<h1>(.*?)<a", path.read_text(encoding="utf-8"), re.DOTALL)[1]
        for path in [*(site / "api").glob("bayeskit*.html"), *(site / "api" / "generated").glob("*.html")]
    }
    assert len(titles) > 400
    assert not {stem: title for stem, title in titles.items() if title != stem.rpartition(".")[2]}


def test_every_room_that_the_pages_name_has_a_page(site):
    pages = (Path(__file__).parents[1] / "how_to").glob("*.md")
    rooms = {room for page in pages for room in re.findall(r"of `\.(\w+)`", page.read_text(encoding="utf-8"))}
    assert {"sequences", "permutations"} < rooms
    assert not [room for room in sorted(rooms) if not list((site / "api").glob(f"bayeskit.models.*.{room}.html"))]


def test_mathematics_comes_with_the_pages(site):
    assert (site / "_static" / "mathjax" / "tex-chtml-full.js").stat().st_size > 1e6
    assert list((site / "_static" / "mathjax" / "output" / "chtml" / "fonts" / "woff-v2").glob("*.woff"))
