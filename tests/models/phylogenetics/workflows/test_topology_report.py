import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import GTR, Alignment, GammaRates, asdsf, majority_rule_consensus
from bayeskit.models.phylogenetics.workflows import infer_topologies, topology_evidence
from bayeskit.models.phylogenetics.workflows._topology_report import draw_consensus, write_topology_report

ALIGNMENT = Alignment.from_sequences(
    {"a_1": "AACCAGT", "<b>B": "AACCGGT", "C": "AGCTAGA", "D": "AGCTACA", "E": "AGTTACT"}
)
NUMBERS = {"num_warmup": 100, "num_samples": 200, "num_temperatures": 5, "progress": False}


@pytest.fixture(scope="module")
def search():
    return infer_topologies(ALIGNMENT, **NUMBERS)


@pytest.fixture(scope="module")
def found(search):
    return topology_evidence(search, num_steps=50, num_draws=200, progress=False)


@pytest.fixture(scope="module")
def page(search, found, tmp_path_factory):
    """Return the whole report."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    facts = {"command": "bayeskit trees --alignment 'my <file>.fasta'"}
    write_topology_report(path, search, found, title="Five taxa", settings=facts)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def drawn(page):
    """Return the pictures that are drawn as lines."""
    return [unquote(text) for text in re.findall(r'src="data:image/svg\+xml,([^"]*)"', page)]


@pytest.mark.calibration
def test_notebooks_show_a_search_and_its_evidence(search, found):
    shown = search._repr_html_()
    best = search.sample.to_pandas(1)
    assert f"{best.weight[0]:.4f}" in shown and shown.count('<td class="number"') == 2 * len(search.sample.topologies)
    assert best.newick[0].replace("<", "&lt;").replace(">", "&gt;") in shown.replace("<wbr>", "")
    assert search.problems == () or search.problems[0] in unescape(shown)
    shown = found._repr_html_()
    assert f"{found.search.log_evidence:.3f}" in shown and "<summary>" in shown


@pytest.mark.calibration
def test_the_page_needs_no_other_file(page):
    bare = re.sub(r'xmlns(:\w+)?="[^"]*"', "", unquote(page))
    assert page.startswith("<!doctype html>")
    assert not re.search(r'(src|href)\s*=\s*"(?!data:|#)', bare)
    assert "http://" not in bare and "https://" not in bare


@pytest.mark.calibration
def test_the_page_is_well_formed_and_its_links_lead_somewhere(page):
    opened, anchors, links = [], [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            facts = dict(attributes)
            anchors.extend([facts["id"]] if "id" in facts else [])
            links.extend([facts["href"][1:]] if tag == "a" else [])
            opened.extend([] if tag in {"meta", "img", "br", "wbr"} else [tag])

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Reader().feed(page)
    assert opened == [] and len(anchors) == len(set(anchors)) and set(links) <= set(anchors)


@pytest.mark.calibration
def test_the_page_has_what_the_search_found(search, found, page):
    consensus, *_ = drawn(page)
    tree = majority_rule_consensus(search.sample)
    for support in tree.supports[tree.num_taxa :]:
        assert f"<!-- {support:.2f} -->" in consensus
    assert all(f"<!-- {taxon.replace('<', '&lt;').replace('>', '&gt;')} -->" in consensus for taxon in tree.taxa)
    assert f">{asdsf(search.samples).average:.4f}</td>" in page and "ASDSF" in page
    assert f">{float(search.split_effective_sizes.min()):.0f}</td>" in page
    assert "R-hat of tree_length</th><td" in page.replace("_<wbr>", "_")
    assert f">{search.r_hat['tree_length']:.3f}</td>" in page
    for way in ("bidirectional_", "sum_", "variational_"):
        assert f"{way}<wbr>" in page
    assert "tree_length" in page and "JC69()" in page and "Exponential(10)" in page
    assert "&#39;my &lt;file&gt;.fasta&#39;" in page and "<b>B" not in page
    assert len(drawn(page)) >= 4 and page.count("data:image/png;base64,") == 2  # tree length and log likelihood
    assert ("NOT CONVERGED" in page) == (not search.is_converged)


@pytest.mark.calibration
def test_one_run_with_parameters_and_no_evidence(tmp_path):
    numbers = NUMBERS | {
        "num_runs": 1,
        "constraints": [["C", "D"]],
        "num_warmup": 20,
        "num_samples": 20,
    }
    search = infer_topologies(ALIGNMENT, substitution=GTR(), site_rates=GammaRates(), **numbers)
    path = tmp_path / "report.html"
    write_topology_report(path, search, title="One run")
    page = path.read_text(encoding="utf-8").replace("_<wbr>", "_")
    assert "A single run cannot show whether runs agree" in page and "NOT CONVERGED" in page
    assert "bidirectional_ratio" in page and "standard deviation" not in page
    assert "exchangeabilities[5]" in page and "base_frequencies[3]" in page and "shape ~ Exponential(1)" in page
    assert "those that satisfy 1 constraint," in page and "GammaRates" in page


@pytest.mark.calibration
def test_the_evidence_of_the_search_alone(search, tmp_path):
    path = tmp_path / "report.html"
    write_topology_report(path, search, title="Five taxa")
    page = path.read_text(encoding="utf-8")
    assert "bidirectional_<wbr>ratio" in page and "variational_<wbr>importance" not in page


@pytest.mark.calibration
def test_evidence_of_another_search_is_refused(search, found, tmp_path):
    with pytest.raises(SettingsError, match="another search"):
        write_topology_report(tmp_path / "report.html", replace(search), found, title="mixed up")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.calibration
def test_mutation_the_consensus_is_that_of_the_majority(search):
    """Splits that most trees lack are in no figure: a greedy consensus would have them."""
    tree = majority_rule_consensus(search.sample)
    texts = [text.get_text() for text in draw_consensus(tree).axes[0].texts]
    supports = [float(text) for text in texts if re.fullmatch(r"[01]\.\d\d", text)]
    assert sorted(supports) == sorted(tree.supports[tree.num_taxa :].round(2).tolist()) and min(supports) >= 0.5
