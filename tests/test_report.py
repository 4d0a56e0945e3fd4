import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.core.plots import plot_rank, plot_trace
from bayeskit.errors import OutputError, ShapeError
from bayeskit.inference.evidence import Evidence, EvidenceComparison, PredictiveScore
from bayeskit.inference.evidence.plots import plot_calibration, plot_evidence
from bayeskit.report import posterior_summary, write_report

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


def test_report_is_one_file_that_needs_no_network(tmp_path, comparison):
    page = tmp_path / "report.html"
    write_report(page, comparison, title="linreg10", reference=-94.0845, settings={"model": "regression"})
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r'(src|href)\s*=\s*"(?!data:|#)', without_namespaces)
    assert "http://" not in without_namespaces and "https://" not in without_namespaces
    assert text.count("<svg") == 1 and text.count("data:image/png;base64,") == 10
    for expected in ("-94.0830", "Reference value: -94.0845", "bayeskit", "seed", "17", "b[9]", "regression"):
        assert expected in text
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_report_escapes_every_text(tmp_path, comparison):
    page = tmp_path / "report.html"
    evil = "<script>alert('x')</script>&\""
    write_report(page, replace(comparison, draws=None), title=evil, settings={evil: evil})
    text = page.read_text(encoding="utf-8")
    assert evil not in text
    assert "alert(&#39;x&#39;)" in text
    assert "infinite variance &lt;b&gt;" in text


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
        assert "12.3456" in text and "it needs blocks" in text and "too few draws" in text and "a constant" in text
        assert "<svg" not in text and 'class="headline"' not in text


def test_report_shows_the_worst_chains_first(tmp_path):
    generator = torch.Generator().manual_seed(0)
    unconstrained = torch.randn(2, 50, 20, generator=generator, dtype=torch.float64)
    unconstrained[0, :, 13] += 5.0
    zeros = torch.zeros(2, 50, dtype=torch.float64)
    stuck = bk.Draws(unconstrained, zeros, zeros, torch.ones(2, dtype=torch.float64))
    write_report(tmp_path / "r.html", EvidenceComparison({}, stuck, None), title="stuck")
    captions = re.findall(r"<figcaption>([^,]+), R-hat", (tmp_path / "r.html").read_text(encoding="utf-8"))
    assert captions[0] == "u[13]" and len(captions) == 12


def test_a_report_that_cannot_be_written_is_a_typed_error(tmp_path, comparison):
    with pytest.raises(OutputError, match=r"report\.html"):
        write_report(tmp_path / "missing" / "report.html", EvidenceComparison({}, None, None), title="x")


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
