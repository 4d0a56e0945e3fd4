import pandas as pd
import pytest

from bayeskit._core.page import Listed, PageTable, frame_table, measured, number, result_html

EVIL = '<b onclick="x">\'&'


def test_every_text_of_a_fragment_is_escaped():
    table = PageTable(EVIL, [EVIL, EVIL], [[EVIL, EVIL]], note=EVIL)
    shown = result_html(EVIL, [table], [Listed(EVIL, [(EVIL, EVIL)])], facts={EVIL: EVIL}, notes=[EVIL])
    assert EVIL not in shown and "<b onclick" not in shown
    assert shown.count("&lt;b onclick=&#34;x&#34;&gt;&#39;&amp;") == 14


def test_remarks_are_folded_and_tables_have_a_caption_and_heads_with_a_scope():
    table = PageTable("Caption", ["name", "value"], [["a_b", measured(-94.083, 0.02)[0]]], is_grey=True)
    shown = result_html("It is so", [table], [Listed("2 warnings", [("a", "first"), ("a", "second")])])
    assert shown.index("It is so") < shown.index("<table") < shown.index("<details>")
    assert shown.count("<details>") == 1 and "<details open" not in shown and "first" in shown.split("<summary>")[1]
    for piece in ("<caption>Caption</caption>", '<th scope="col">value</th>', '<th scope="row">a_<wbr>b</th>', "grey"):
        assert piece in shown
    assert 'data-sort="-94.083">-94.083</td>' in shown and 'aria-label="Caption" tabindex="0"' in shown


def test_the_style_is_bound_to_the_fragment_and_has_no_colours_of_its_own():
    style = result_html("x").partition("<style>")[2].partition("</style>")[0]
    rules = [line for line in style.splitlines() if "{" in line]
    assert rules and all(rule.startswith(".bayeskit-result") for rule in rules)
    assert "#" not in style and "background: #" not in style, "a dark notebook has other colours"


@pytest.mark.parametrize(("value", "shown"), [(2.0, "2.0"), (float("nan"), "–"), (float("inf"), "–")])
def test_a_number_that_is_not_finite_is_a_dash_and_sorts_last(value, shown):
    cell = number(value, ".1f")
    assert cell.text == shown
    html = result_html("x", [PageTable("t", ["a", "b"], [["row", cell]])])
    assert f'data-sort="{value if shown != "–" else ""}">{shown}</td>' in html


def test_a_data_frame_becomes_a_table():
    frame = pd.DataFrame({"method": ["<b>"], "mean_z": [0.12345], "replicates": [20], "passed": [True]})
    table = frame_table("Frame", frame, replicates="d")
    assert list(table.columns) == ["method", "mean z", "replicates", "passed"]
    assert [getattr(cell, "text", cell) for cell in table.rows[0]] == ["<b>", "0.123", "20", "yes"]
