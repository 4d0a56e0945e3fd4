"""The report and pages of the gallery as a reader sees them, in headless Chromium.

Screenshots go to the folder named by ``BAYESKIT_SCREENSHOTS``, by default ``docs/_build/screenshots``. Chromium and its
driver are Debian's (packages ``chromium`` and ``chromium-driver``).
"""

import base64
import functools
import io
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from bayeskit import exact
from bayeskit.inference import evidence
from bayeskit.workflows import evidence_in_folder

GALLERY = (
    "gallery/discrete_latent_variables/nile_change_point.html",
    "gallery/evidence/eight_schools_by_every_estimator.html",
    "gallery/phylogenetics/human_chimp_gorilla.html",
)
GUIDE = (
    "how_to/compare_models.html",
    "how_to/divergences.html",
    "how_to/migrate.html",
    "concepts/glossary.html",
    "release_notes.html",
    "api/bayeskit.inference.evidence.html",
)
PAGES = ("report/report.html", "index.html", *GALLERY, *GUIDE)
PHONE, DESK = (390, 844), (1280, 900)
SHOTS = Path(os.environ.get("BAYESKIT_SCREENSHOTS", Path(__file__).parents[1] / "_build" / "screenshots"))


class Quiet(SimpleHTTPRequestHandler):
    """Serve files and say nothing."""

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site, tmp_path_factory):
    """Serve the pages, with a report among them."""
    small = evidence.Budget(
        num_chains=8, num_warmup=150, num_samples=200, num_temperatures=12, ladder_chains=4, ladder_samples=100
    )
    methods = ["bridge_sampling", "laplace_importance_sampling", "stepping_stone", "harmonic_mean", "naive_monte_carlo"]
    folder = tmp_path_factory.mktemp("site")
    case = exact.get("eight_schools")
    evidence_in_folder(
        case.target(),
        folder / "report",
        title="Evidence of eight schools",
        methods=methods,
        budget=small,
        reference=case.log_evidence,
        progress=False,
    )
    for entry in site.iterdir():
        (folder / entry.name).symlink_to(entry)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.fail("install Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",  # they come and go between screenshots, which would differ in width
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def look(browser, address, page, size):
    """Open a page at a size and wait until it stands still; return what the console said."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE},
    )
    browser.get(f"{address}/{page}")
    wait = WebDriverWait(browser, 60)
    wait.until(lambda b: b.execute_script("return document.readyState") == "complete")
    if browser.find_elements(By.CSS_SELECTOR, ".math"):
        wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "mjx-container"))
        browser.execute_async_script("MathJax.startup.promise.then(arguments[0])")
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def shoot(browser, name):
    """Store a screenshot of the whole page, and return its pixels."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    height = min(int(browser.execute_script("return document.documentElement.scrollHeight")), 12_000)
    width = int(browser.execute_script("return document.documentElement.clientWidth"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    (SHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")).astype(float)


def name_of(page):
    return page.rpartition("/")[2].removesuffix(".html")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_nothing_is_missing(browser, address, page):
    said = look(browser, address, page, DESK)
    assert not said
    broken = browser.execute_script(
        "return [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src)"
    )
    assert not broken
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith((address, "data:")) for name in loaded), loaded
    raw = browser.execute_script("return [...document.querySelectorAll('mjx-merror')].map(e => e.textContent)")
    assert not raw
    text = browser.find_element(By.TAG_NAME, "body").text
    for mark in ("\\(", "\\[", ":math:", ":doc:", ":func:", "system-message"):
        assert mark not in text
    shoot(browser, f"{name_of(page)}_desk")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_it_reads_well_on_a_phone(browser, address, page):
    look(browser, address, page, PHONE)
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 1, f"the page is {wide} pixels wider than the screen"
    small = browser.execute_script(
        "return [...document.querySelectorAll('p, li, td')].filter(e => e.offsetParent !== null && e.textContent.trim()"
        " && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.textContent.trim().slice(0, 40))"
    )
    assert not small
    shoot(browser, f"{name_of(page)}_phone")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_it_prints(browser, address, page):
    look(browser, address, page, DESK)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script(
        "return [...document.querySelectorAll('header, nav, .bd-sidebar-primary, .bd-sidebar-secondary')]"
        ".filter(e => e.offsetParent !== null && e.offsetHeight > 0 && !e.closest('article'))"
        ".map(e => e.tagName + '.' + e.className)"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert not shown, "what is only of use on a screen is printed"
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]) > 20_000


def lab(colours):
    """Return CIELAB coordinates of colours from 0 to 255, under D65."""
    s = colours / 255
    linear = np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = linear @ np.array(matrix).T / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def closest_pair(seen, seen_so, against_paper):
    """Return two colours of a figure that many can tell apart and these readers cannot; None twice if there are none.

    Colours are those of flat patches, so that blends at edges do not count; under five units in CIELAB there is no
    telling two lines apart, and colours thirty units apart are meant to be different. Without any colour, curves are
    told apart by their marks, but none may vanish ``against_paper``.
    """
    flat = (seen[1:-1, 1:-1] == seen[:-2, 1:-1]) & (seen[1:-1, 1:-1] == seen[1:-1, :-2])
    flat = flat.all(-1)
    colours, first, count = np.unique(seen[1:-1, 1:-1][flat], axis=0, return_index=True, return_counts=True)
    colours, so = colours[count >= 12], seen_so[1:-1, 1:-1][flat][first[count >= 12]]
    before, after = (np.linalg.norm(lab(c)[:, None] - lab(c), axis=-1) for c in (colours, so))
    meant = before > 30
    if against_paper:
        meant &= (colours == 255).all(-1)
    alike = np.argwhere(meant & (after < 5))
    return (colours[alike[0, 0]], colours[alike[0, 1]]) if len(alike) else (None, None)


@pytest.mark.parametrize("kind", ["deuteranopia", "protanopia", "achromatopsia"])
@pytest.mark.parametrize("page", [PAGES[0], *GALLERY[1:]], ids=name_of)
def test_it_is_seen_by_colour_blind_readers(browser, address, page, kind):
    look(browser, address, page, DESK)
    seen = shoot(browser, f"{name_of(page)}_desk")
    places = browser.execute_script(
        "return [...document.querySelectorAll('figure img[src^=\"data:image/svg\"], img[src*=sphx_glr_]')]"
        ".map(e => e.getBoundingClientRect())"
        ".map(r => [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY].map(Math.round))"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": kind})
    seen_so = shoot(browser, f"{name_of(page)}_{kind}")
    browser.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    assert places and seen.shape == seen_so.shape
    assert not np.array_equal(seen, seen_so), "nothing was emulated"
    if kind == "achromatopsia":
        assert np.ptp(seen_so, axis=-1).max() <= 2, "there still are colours"
    for left, top, right, bottom in places:
        where = np.s_[top:bottom, left:right]
        assert 20 < right - left and top + 20 < bottom <= len(seen), "a figure is not in the picture"
        one, other = closest_pair(seen[where], seen_so[where], kind == "achromatopsia")
        assert one is None, f"of a figure's colours {one} and {other} look alike"


def test_trust_is_said_in_words_and_not_by_colour_alone(browser, address):
    look(browser, address, PAGES[0], DESK)
    tables = browser.find_elements(By.CSS_SELECTOR, "#estimates table")
    said = {("grey" in t.get_attribute("class"), t.find_element(By.TAG_NAME, "caption").text) for t in tables}
    assert {(False, "Estimates, the most precise first"), (True, "Not trusted")} <= said


def test_the_report_is_read_in_the_dark_and_by_keyboard(browser, address):
    look(browser, address, PAGES[0], DESK)
    for scheme, is_light in (("light", True), ("dark", False)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        seen = shoot(browser, f"report_{scheme}")
        # Figures too: nine tenths of all are paper.
        assert np.quantile(seen, 0.1) > 200 if is_light else np.quantile(seen, 0.9) < 60
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    reached = []
    for _ in range(60):
        here = browser.switch_to.active_element
        reached.append(here.get_attribute("class") + here.tag_name)
        here.send_keys(Keys.TAB)
    assert reached[0] == "skipa" and {"sortbutton", "widediv", "summary"} <= set(reached)
    fold = browser.find_element(By.TAG_NAME, "summary")
    fold.send_keys(Keys.ENTER)
    assert browser.find_element(By.TAG_NAME, "details").get_attribute("open")


def column(table, index):
    return [
        row.find_elements(By.CSS_SELECTOR, "th, td")[index].text
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
    ]


def test_tables_sort_and_numbers_can_be_copied(browser, address):
    look(browser, address, PAGES[0], DESK)
    table = browser.find_element(By.CSS_SELECTOR, "table.sortable")
    heads = table.find_elements(By.CSS_SELECTOR, "thead th")
    index = next(i for i, head in enumerate(heads) if "error" in head.text)
    heads[index].click()
    ascending = [float(text) for text in column(table, index) if text not in ("", "–")]
    assert len(ascending) >= 3 and ascending == sorted(ascending)
    heads[index].click()
    descending = [float(text) for text in column(table, index) if text not in ("", "–")]
    assert descending == sorted(ascending, reverse=True)
    for cell in browser.find_elements(By.CSS_SELECTOR, "td.number"):
        assert cell.text == "–" or float(cell.text) is not None  # as it is copied, Python reads it


def test_tables_of_the_pages_sort(browser, address):
    look(browser, address, "tables/calibration.html", DESK)
    table = browser.find_element(By.CSS_SELECTOR, "table.sortable")
    heads = table.find_elements(By.CSS_SELECTOR, "thead th")
    before = column(table, 0)
    heads[-1].click()
    heads[-1].click()
    values = [float(text) for text in column(table, len(heads) - 1) if text]
    assert values == sorted(values, reverse=True) and sorted(column(table, 0)) == sorted(before)


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("bridge_sampling", "bayeskit.inference.evidence.bridge_sampling.html"),
        ("divergences", "how_to/divergences.html"),
        ("missing data", "how_to/missing_data.html"),
        ("NumPyro", "how_to/migrate.html"),
        ("Bayes factors", "how_to/compare_models.html"),
    ],
)
def test_search_finds(browser, address, words, page, size):
    """The button opens the field, and the page that a reader wants is among the first five."""
    look(browser, address, "how_to/results.html", size)
    button = next(b for b in browser.find_elements(By.CSS_SELECTOR, ".search-button__button") if b.is_displayed())
    button.click()
    browser.find_element(By.CSS_SELECTOR, "#pst-search-dialog input").send_keys(words, Keys.ENTER)
    wait = WebDriverWait(browser, 60)
    wait.until(lambda b: "search.html" in b.current_url)
    wait.until(lambda b: b.execute_script("return document.querySelector('p.search-summary')?.innerText"))
    found = [
        a.get_attribute("href") for a in browser.find_elements(By.CSS_SELECTOR, "#search-results ul.search > li > a")
    ]
    assert any(page in link for link in found[:5]), found[:5]


def test_a_phone_has_all_pages_behind_one_button(browser, address):
    look(browser, address, "how_to/results.html", PHONE)
    browser.find_element(By.CSS_SELECTOR, "button.primary-toggle").click()
    menu = browser.find_element(By.ID, "pst-primary-sidebar-modal")
    WebDriverWait(browser, 60).until(lambda b: menu.is_displayed())
    shown = {link.text.strip() for link in menu.find_elements(By.TAG_NAME, "a") if link.is_displayed()}
    assert {"Reference", "Gallery", "Project", "Compare models", "Missing data", "Frequently asked questions"} <= shown
    next(link for link in menu.find_elements(By.TAG_NAME, "a") if link.text.strip() == "Compare models").click()
    WebDriverWait(browser, 60).until(lambda b: "how_to/compare_models.html" in b.current_url)


@pytest.mark.parametrize("width", [1000, 1280, 1600])
def test_the_head_has_one_or_two_lines_and_names_every_part(browser, address, width):
    look(browser, address, "index.html", (width, 900))
    head = browser.find_element(By.CSS_SELECTOR, "header.bd-header")
    assert head.size["height"] < 110
    assert "Reference" in head.text and "How to" in head.text
    shoot(browser, f"index_{width}")


def test_the_reference_is_listed_by_short_names(browser, address):
    look(browser, address, "api/bayeskit.inference.evidence.html", DESK)
    names = [link.text for link in browser.find_elements(By.CSS_SELECTOR, ".bd-sidebar-primary nav.bd-links a")]
    assert {"evidence", "samplers", "bridge_sampling"} <= set(names)
    assert not [name for name in names if "." in name]
    assert browser.find_element(By.CSS_SELECTOR, "h1").text.startswith("evidence")
