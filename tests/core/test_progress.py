"""Progress bars in a notebook's kernel, where there is no terminal."""

import io
import sys

import nbclient
import nbformat
import pytest

from bayeskit._core import progress as progress

CELL = """
from bayeskit._core import progress
progress._DELAY = progress._INTERVAL = 0.0
bar = progress.Bar("sampling", 10, {enabled})
bar.update(3, "step 0.1 <2>")
bar.update(7)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import sys")])
    client = nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    )
    with client.setup_kernel():
        yield client


def outputs(kernel, source):
    kernel.nb.cells.append(nbformat.v4.new_code_cell(source))
    kernel.execute_cell(kernel.nb.cells[-1], len(kernel.nb.cells) - 1)
    return kernel.nb.cells[-1].outputs


@pytest.mark.filterwarnings("ignore")  # of the kernel's transport
def test_a_notebook_shows_one_line_that_is_updated_and_goes_away(kernel):
    (shown,) = outputs(kernel, CELL.format(enabled=True))
    assert shown.data["text/plain"].startswith("sampling: 7 of 10, 0 s, 0 s left")
    assert '<progress max="10" value="7"></progress>' in shown.data["text/html"]
    (gone,) = outputs(kernel, CELL.format(enabled=True) + "bar.close()")
    assert gone.data["text/plain"] == ""
    (noted,) = outputs(kernel, CELL.format(enabled=True).replace("bar.update(7)", ""))
    assert noted.data["text/plain"].endswith("step 0.1 <2>") and "step 0.1 &lt;2&gt;" in noted.data["text/html"]
    assert outputs(kernel, CELL.format(enabled=False)) == []


def test_without_terminal_and_notebook_nothing_is_shown(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    with progress.progress_bar("sampling", 10) as bar:
        bar.update(10)
    assert stream.getvalue() == ""


def test_no_bar_in_a_silent_context(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.without_bars(), progress.without_bars(False), progress.progress_bar("work", None) as bar:
        assert not bar._enabled
    with progress.progress_bar("work", None) as bar:
        assert bar._enabled


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True
