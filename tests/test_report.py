import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit._core.plots import plot_prior_and_posterior, plot_rank, plot_trace
from bayeskit.errors import OutputError, SettingsError, ShapeError
from bayeskit.inference.evidence import Evidence, EvidenceComparison, PredictiveScore
from bayeskit.inference.evidence._plots import plot_calibration, plot_cost, plot_evidence, plot_path
from bayeskit.inference.samplers import sample_ladder
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel
from bayeskit.report import posterior_summary, write_page, write_report

GOOD = Evidence("bridge_sampling", -94.083, 0.004, 8000)
OTHER = Evidence("path_sampling", -94.090, 0.020, 9000)
ABSURD = Evidence("harmonic_mean", -2.0, 0.3, 4000, ("infinite variance <b>: use bridge sampling",))
FAILED = Evidence("stepping_stone", math.nan, math.nan, 0, ("failed: no ladder",))


@pytest.fixture(scope="module")
def draws():
    return bk.sample(bk.exact.get("linreg10").target(), 4, 200, 200, seed=0, progress=False)


@pytest.fixture
def comparison(draws):
    results = {z.method: z for z in (GOOD, OTHER, ABSURD, FAILED)}
    return EvidenceComparison(results, draws, None, {"seed": 17})


@pytest.mark.calibration
def test_summary_agrees_with_the_draws(draws):
    summary = posterior_summary(draws)
    flat = draws.values()["b"].reshape(-1, 10)
    assert list(summary.index) == [f"b[{i}]" for i in range(10)]
    np.testing.assert_allclose(summary["mean"], flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(summary["sd"], flat.std(0), rtol=1e-12)
    np.testing.assert_allclose(summary["95 %"], torch.quantile(flat, 0.95, dim=0), rtol=1e-12)
    # 4.4 standard errors: a failure rate of 1e-5.
    exact = bk.exact.get("linreg10").posterior_mean["b"].numpy()
    assert np.all(np.abs(summary["mean"] - exact) < 4.9 * summary["mcse"])


@pytest.mark.calibration
def test_report_is_one_file_that_needs_no_network(tmp_path, comparison):
    page = tmp_path / "report.html"
    write_report(page, comparison, title="linreg10", reference=-94.0845, settings={"model": "regression"})
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", unquote(text))
    assert not re.search(r'(src|href)\s*=\s*"(?!data:|#)', without_namespaces)
    assert "http://" not in without_namespaces and "https://" not in without_namespaces
    # Estimates, error against cost, prior beside posterior; and the chains.
    assert text.count("data:image/svg+xml,") == 3 and text.count("data:image/png;base64,") == 10
    for expected in ("-94.0830", "Reference value: -94.0845", "bayeskit", "seed", "17", "b[9]", "regression"):
        assert expected in text
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


class Reader(HTMLParser):
    """Reads a page as an assistive program does: elements in order, with their attributes."""

    EMPTY = frozenset({"meta", "img", "br", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note an element and the elements around it."""
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close an element, which must be the last one opened."""
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def of(self, *tags):
        """Return the elements of some kinds."""
        return [(tag, attributes, around) for tag, attributes, around in self.elements if tag in tags]


@pytest.fixture(scope="module")
def tree_target():
    alignment = Alignment.from_sequences({"A_1": "ACGTAC", "B_2": "ACGTAA", "<b>C": "ACCTGC", "D": "TCCTGC"})
    return bk.Target.from_pyro(TreeModel(alignment, Tree.from_newick("((A_1,B_2),'<b>C',D);")))


@pytest.fixture(scope="module")
def tree_page(tree_target, tmp_path_factory):
    """Return the report of a tree, with everything that a report can have."""
    draws = bk.sample(tree_target, 4, 100, 100, seed=0, progress=False)
    ladder = sample_ladder(tree_target, 6, 4, 30, 20, progress=False)
    score = PredictiveScore("pointwise_predictive_density", -12.3456, 0.5, 100)
    results = {z.method: z for z in (GOOD, OTHER, ABSURD, FAILED, Evidence("laplace", -94.1, math.nan, 1, ("no",)))}
    comparison = EvidenceComparison(
        results, draws, ladder, {"seed": 17}, scores={score.method: score}, refused={"chib": "no blocks"}
    )
    page = tmp_path_factory.mktemp("tree") / "report.html"
    write_report(page, comparison, title="A tree", reference=-94.0845)
    return page.read_text(encoding="utf-8")


@pytest.mark.calibration
def test_a_report_can_be_read_aloud_and_by_keyboard(tree_page):
    page = Reader(tree_page)
    assert page.open == [] and page.of("html")[0][1]["lang"] == "en"
    assert len(page.of("main")) == len(page.of("h1")) == len(page.of("nav")) == 1
    levels = [int(tag[1]) for tag, _, _ in page.of("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False))
    identities = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    links = [attributes["href"].removeprefix("#") for _, attributes, _ in page.of("a")]
    assert links[0] == "main" and set(links) <= set(identities) and len(links) == 8
    images = [attributes["alt"] for _, attributes, _ in page.of("img")]
    assert len(images) == 5 + 5 and all(len(alt) > 15 for alt in images) and len(set(images)) == len(images)
    assert all(around[-1] == "figure" for _, _, around in page.of("img"))
    assert len(page.of("figcaption")) == len(page.of("figure")) == len(images)
    assert all(attributes.get("scope") in {"col", "row"} for _, attributes, _ in page.of("th"))
    for _, attributes, _ in page.of("div"):
        assert attributes["role"] == "region" and attributes["aria-label"] and attributes["tabindex"] == "0"
    assert all("div" in around for _, _, around in page.of("table")), "a table scrolls in its own box"
    assert len(page.of("details")) == len(page.of("summary")) == 3 and not [a for _, a, _ in page.of("details") if a]


@pytest.mark.calibration
def test_a_report_says_the_answer_first_and_folds_warnings(tree_page):
    order = ["Skip to the results", "A tree</h1>", "-94.0830", "Reference value", "data:image/svg", "most precise"]
    order += ["Not trusted", "Approximations, bounds", "Predictive scores", "Warnings of 3 methods", "no blocks"]
    order += ["Error against cost", "From prior to posterior", "Densities of prior and posterior", "Tree of 4 taxa"]
    order += ["Posterior of every parameter", "Trace and ranks", "Settings</h2>", "Versions</h2>"]
    places = [tree_page.index(piece, tree_page.index("<body>")) for piece in order[:6]]
    places += [tree_page.index(piece, places[-1]) for piece in order[6:]]
    assert places == sorted(places)
    assert "infinite variance" in tree_page.partition("<details>")[2].partition("</details>")[0]


@pytest.mark.calibration
def test_splits_of_a_tree_are_named_and_escaped(tree_page, tree_target):
    names = tree_target.element_names()["branch_lengths"]
    assert names == ("A_1", "B_2", "<b>C", "D", "A_1|B_2")
    for shown in ("branch_<wbr>lengths[4] A_<wbr>1|B_<wbr>2", "branch_<wbr>lengths[2] &lt;b&gt;C"):
        assert f'<th scope="row">{shown}</th>' in tree_page
    assert "<b>C" not in tree_page
    assert re.search(r'alt="Tree of 4 taxa: \(\(A_1:[\d.]+,B_2:[\d.]+\):[\d.]+,', tree_page)


def test_a_model_without_names_of_its_own_has_none():
    target = bk.exact.get("linreg10").target()
    assert target.element_names() == {} and target.plot_values({}, None) is None
    assert bk.Target.from_functions(lambda u: -u.sum(-1), lambda u: u.sum(-1), 1).element_names() == {}

    class Named:
        """A model whose names do not fit."""

        element_names = {"x": ("a", "b"), "y": ("a",)}

        def __call__(self):
            """Sample."""
            x = pyro.sample("x", pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.factor("likelihood", -x.square().sum())

    assert bk.Target.from_pyro(Named()).element_names() == {}


def test_the_page_is_light_and_dark_narrow_and_wide():
    text = EvidenceComparison({GOOD.method: GOOD}, None, None).to_html()
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme: dark" in style and "overflow-x: auto" in style and ":focus-visible" in style
    after = style.partition("body {")[2]
    assert not re.findall(r"#[0-9a-fA-F]{3,6}\b", after), "a colour that does not change with the scheme"
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in style.split("@media")[:2])
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ink in ("ink", "faint", "link", "bad"):
            assert contrast(colours[ink], colours["paper"]) > 4.5, (ink, colours)


def contrast(one, other):
    """Return the contrast of two colours as the accessibility guidelines define it."""
    light = []
    for colour in (one, other):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        s = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        light.append(float(np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_the_contrast_of_black_and_white():
    assert contrast("#000", "#ffffff") == pytest.approx(21) and contrast("#777", "#fff") < 4.5


@pytest.mark.calibration
def test_report_escapes_every_text(tmp_path, comparison):
    page = tmp_path / "report.html"
    evil = "<script>alert('x')</script>&\""
    write_report(page, replace(comparison, draws=None), title=evil, settings={evil: evil})
    text = page.read_text(encoding="utf-8")
    assert evil not in text
    assert "alert(&#39;x&#39;)" in text
    assert "infinite variance &lt;b&gt;" in text


@pytest.mark.calibration
def test_report_without_draws_or_without_estimates(tmp_path, draws):
    write_report(tmp_path / "a.html", EvidenceComparison({"harmonic_mean": ABSURD}, None, None), title="a")
    assert "unknown" in (tmp_path / "a.html").read_text(encoding="utf-8")
    write_report(tmp_path / "b.html", EvidenceComparison({}, draws, None), title="b")
    text = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert "Log evidence" not in text and "Posterior" in text


def test_scores_and_refusals_alone_are_shown(tmp_path):
    score = PredictiveScore("pointwise_predictive_density", -12.3456, 0.5, 100, ("too few draws",))
    refused = {"chib": "it needs blocks"}
    alone = EvidenceComparison({}, None, None, scores={score.method: score}, refused=refused, notes=("a constant",))
    write_report(tmp_path / "s.html", alone, title="scores")
    for text in ((tmp_path / "s.html").read_text(encoding="utf-8"), alone.to_html()):
        assert "-12.35" in text and "it needs blocks" in text and "too few draws" in text and "a constant" in text
        assert "<img" not in text and 'class="headline"' not in text


@pytest.mark.calibration
def test_a_coordinate_that_stands_still_has_no_convergence_in_the_summary(draws):
    x = draws.unconstrained.clone()
    x[0, :, 0] = x[0, 0, 0]
    table = posterior_summary(replace(draws, unconstrained=x))
    assert math.isnan(table["r_hat"].iloc[0]) and table["ess"].iloc[0] == 0 and math.isnan(table["mcse"].iloc[0])
    assert bool((table["ess"].iloc[1:] > 0).all()) and not bool(table["r_hat"].iloc[1:].isna().any())


@pytest.mark.calibration
def test_report_shows_the_worst_chains_first(tmp_path):
    generator = torch.Generator().manual_seed(0)
    unconstrained = torch.randn(2, 50, 20, generator=generator, dtype=torch.float64)
    unconstrained[0, :, 13] += 5.0
    zeros = torch.zeros(2, 50, dtype=torch.float64)
    stuck = bk.Draws(unconstrained, zeros, zeros, torch.ones(2, dtype=torch.float64))
    write_report(tmp_path / "r.html", EvidenceComparison({}, stuck, None), title="stuck")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    captions = re.findall(r"<figcaption>([^,]+), R-hat", text)
    assert captions[0] == "u[13]" and len(captions) == 12
    assert (
        "Not converged, with an R-hat above 1.05 or none: " in text and "<summary>9 more parameters</summary>" in text
    )


@pytest.mark.calibration
def test_a_report_that_cannot_be_written_is_a_typed_error(tmp_path, comparison):
    with pytest.raises(OutputError, match=r"report\.html"):
        write_report(tmp_path / "missing" / "report.html", EvidenceComparison({}, None, None), title="x")


@pytest.fixture
def own_page(tmp_path):
    """Return the page of an analysis with everything that it can hold, and texts that look like HTML."""
    figure = Figure()
    figure.subplots().plot([0, 1])
    table = pd.DataFrame({"mean": [0.123456, 12345.6, math.nan], "n": [1, 20, 3], "ok": [True, False, True]})
    table.index = ["<b>first</b>", "second", "third"]
    plain = pd.DataFrame({"name": ["a", "b"], "value": [1.5, 2.5]})
    sections = {
        "Answer": "It is 3.2 +- 0.1.",
        "<i>Data</i>": [table, "Read from <file>.", (figure, "A line from zero to one.")],
        "Figure": (figure, "The same line once more, alone."),
        "Plain": (plain, "With a text in a tuple."),
    }
    write_page(tmp_path / "page.html", title="A <title>", sections=sections)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_of_ones_own_shows_texts_tables_and_figures(own_page):
    page = Reader(own_page)
    assert page.open == [] and len(page.of("table")) == 2 + 1  # with that of the versions
    assert [attributes["alt"] for _, attributes, _ in page.of("img")] == [
        "A line from zero to one.",
        "The same line once more, alone.",
    ]
    assert "3.2 ± 0.1" in own_page and "0.123" in own_page and "12,346" in own_page and "bayeskit" in own_page
    assert "<b>first" not in own_page and "<i>Data" not in own_page and "Read from &lt;file&gt;." in own_page
    links = [attributes["href"].removeprefix("#") for _, attributes, _ in page.of("a")]
    identities = {attributes["id"] for _, attributes, _ in page.elements if "id" in attributes}
    assert set(links) <= identities and len(links) == 1 + 4 + 1
    assert not re.search(r'(src|href)\s*=\s*"(?!data:|#)', re.sub(r'xmlns(:\w+)?="[^"]*"', "", unquote(own_page)))


def test_a_page_refuses_what_it_cannot_show_and_writes_nothing(tmp_path):
    for sections, said in (({}, "none is given"), ({"Draws": [torch.ones(2)]}, "'Draws' has Tensor")):
        with pytest.raises(SettingsError, match=said):
            write_page(tmp_path / "page.html", title="x", sections=sections)
    with pytest.raises(OutputError, match=r"page\.html"):
        write_page(tmp_path / "missing" / "page.html", title="x", sections={"Answer": "none"})
    assert not list(tmp_path.iterdir())


def test_an_absurd_estimate_does_not_flatten_the_others():
    axes = plot_evidence([GOOD, OTHER, ABSURD, FAILED], -94.0845, Figure().subplots())
    low, high = axes.get_xlim()
    assert low < -94.13 and high > -94.05 and high - low < 1.0
    texts = [text.get_text() for text in axes.texts]
    assert "-2.00" in texts and "failed" in texts and "reference -94.0845" in texts
    labels = [label.get_text() for label in axes.get_yticklabels()]
    doubtful = ["harmonic mean (not trusted)", "stepping stone (not trusted)"]
    assert labels == ["bridge sampling", "path sampling", *doubtful]


def test_one_wide_error_does_not_flatten_the_precise_ones():
    precise = [Evidence(f"m{i}", -100.0 + 0.01 * (i % 3), 0.01, 1) for i in range(9)]
    wide = Evidence("nested_sampling", -100.5, 1.2, 1)
    axes = plot_evidence([*precise, wide], -100.0, Figure().subplots())
    low, high = axes.get_xlim()
    assert high - low < 0.3
    assert all(low < z.interval()[0] and z.interval()[1] < high for z in precise)
    # Its bar crosses the axis with an arrow at both ends.
    arrows = [line for line in axes.lines if line.get_marker() in "<>" and line.get_ydata()[0] == 9]
    assert {line.get_marker() for line in arrows} == {"<", ">"} and "-100.50" in [t.get_text() for t in axes.texts]


@pytest.mark.parametrize("estimates", [[], [Evidence("exact", -10.0, 0.0, 1)] * 2, [ABSURD, FAILED]])
@pytest.mark.parametrize("reference", [None, -10.0, 1e6])
def test_plots_of_little_do_not_warn(estimates, reference):
    axes = plot_evidence(estimates, reference, Figure().subplots())
    axes.figure.canvas.draw()
    assert axes.get_xlim()[0] < axes.get_xlim()[1]


def test_a_plot_of_calibration_shows_the_worst():
    z = {"wrong": np.full(5, np.inf), "none": np.full(5, np.nan), "lost": np.full(5, np.nan),
         "far": np.array([-np.inf, -7.0, 0.0, 8.0, np.nan])}  # fmt: skip
    failed = {name: np.full(5, name == "lost") for name in z}
    axes = plot_calibration(z, {name: np.ones(5) for name in z}, "x", Figure().subplots(), failed=failed)
    dots = np.concatenate([np.asarray(one.get_offsets()) for one in axes.collections])
    assert len(dots) == 9 and dots[:, 0].tolist().count(6.0) == 6 and dots[:, 0].tolist().count(-6.0) == 2
    texts = {text.get_text().strip("‹› ") for text in axes.texts}
    assert texts == {"5", "no standard error", "failed", "2", "1"}
    assert axes.get_yticklabels()[3].get_text() == "far (1 without standard error)"


def test_untrusted_marks_are_hollow():
    doubtful = Evidence("harmonic_mean", -94.08, 0.004, 1, ("bad",))
    axes = plot_evidence([GOOD, doubtful], None, Figure().subplots())
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"]
    assert faces[0] == faces[0].upper() and faces[1] == "white"


def test_plot_survives_without_any_finite_estimate():
    axes = plot_evidence([FAILED], None, Figure().subplots())
    assert axes.get_xlim() == (-1.0, 1.0)


def test_plot_without_axes_makes_them():
    from matplotlib import pyplot

    axes = plot_evidence([GOOD])
    assert axes.figure in [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close(axes.figure)


def test_ranks_of_equal_chains_stay_in_the_band_and_others_leave_it():
    generator = np.random.default_rng(0)
    values = generator.normal(size=(4, 500))

    def reach(chains):
        axes = plot_rank(chains, "x", Figure().subplots())
        return max(np.abs(curve[:, 1]).max() for curve in axes.collections[0].get_segments())

    band = 1.628 * math.sqrt(0.75 / 500)
    assert reach(values) < band
    values[2] += 1.0
    assert reach(values) > 3 * band


def test_a_trace_shows_every_chain_in_full():
    values = np.random.default_rng(0).normal(size=(9, 30))
    axes = plot_trace(values, "x", Figure().subplots())
    paths = axes.collections[0].get_segments()
    np.testing.assert_array_equal(np.stack([path[:, 1] for path in paths]), values)
    low, high = axes.get_ylim()
    assert low <= values.min() and high >= values.max()


def test_plots_of_chains_refuse_other_shapes():
    for plot in (plot_trace, plot_rank):
        with pytest.raises(ShapeError, match="chains, draws"):
            plot(np.zeros(5), "x", Figure().subplots())


def test_error_against_cost_names_those_that_nothing_surpasses():
    errors = {"a": (100, 0.5), "b": (200, 0.6), "c": (300, 0.1), "d": (300, 0.2), "e": (400, 0.1), "exact": (10, 0.0)}
    estimates = [Evidence(name, -1.0, error, cost) for name, (cost, error) in errors.items()]
    axes = Figure().subplots()
    assert [z.method for z in plot_cost(estimates, axes)] == ["a", "c"]
    assert [text.get_text() for text in axes.texts] == ["a", "c"]
    axes.figure.canvas.draw()


@pytest.mark.calibration
def test_the_likelihood_rises_along_the_path(tree_target):
    ladder = sample_ladder(tree_target, 6, 4, 30, 20, progress=False)
    axes = plot_path(ladder, Figure().subplots())
    axes.figure.canvas.draw()
    beta, middle = axes.lines[0].get_data()
    np.testing.assert_array_equal(beta, ladder.beta)
    np.testing.assert_allclose(middle, np.median(ladder.log_likelihood.flatten(1).numpy(), axis=1))


@pytest.mark.parametrize("shift", [0.0, 3.0, 500.0])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_prior_and_posterior_are_densities_on_one_axis(shift, spread):
    generator = np.random.default_rng(0)
    prior, posterior = generator.normal(size=4000), shift + spread * generator.normal(size=1000)
    axes = plot_prior_and_posterior(prior, posterior, "x", Figure().subplots())
    axes.figure.canvas.draw()
    (first, edges, _), (last, same, _) = (patch.get_data() for patch in axes.patches)
    np.testing.assert_array_equal(edges, same)
    width = edges[1] - edges[0]
    assert 0 <= first.sum() * width <= 1 + 1e-9 and last.sum() * width == pytest.approx(1, abs=0.01)
    inside = np.ptp(np.quantile(posterior, [0.001, 0.999])) / (edges[-1] - edges[0])
    assert inside > 0.16 or spread == 0


def test_a_table_with_a_plain_count_of_rows_is_shown_without_it(tmp_path):
    table = pd.DataFrame({"year": [1906, 1907], "share": [0.25, 0.5]})
    write_page(tmp_path / "page.html", title="t", sections={"Years": table.iloc[::-1].reset_index(drop=True)})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search(r'<th scope="row">1907</th>.*<th scope="row">1906</th>', text, re.DOTALL)
    assert '<th scope="col">index' not in text


@pytest.mark.parametrize("sections", [{}, None, ["text"], {"a": 3}, {"a": [Figure()]}, {"a": {"b": "c"}}])
def test_what_a_page_cannot_show_is_refused(tmp_path, sections):
    with pytest.raises(SettingsError, match="sections: .*Remedy"):
        write_page(tmp_path / "page.html", title="t", sections=sections)
    assert not list(tmp_path.iterdir())
