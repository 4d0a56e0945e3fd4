import ast
import builtins
import io
import os
import re
import subprocess
import symtable
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest

from bayeskit import gallery

HERE = Path(__file__).parent
PAGES = gallery.pages()
ENVIRONMENT = os.environ | {"BAYESKIT_SMALL_EXAMPLES": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""  # forked processes can use no device that torch has looked for before
HEADINGS = ("The model", "Before the data", "An exact twin", "The fit", "What it says")
"""What every page has, but for those on sampling, which teach how runs are made."""
LAST = "Try it on yours"
"""The heading of the last section of every page."""
READERS = set("data model guide module likelihood prior_precision noise_variance table x y inputs outputs".split())
READERS |= set("new_rows new_inputs new_outputs x_new x_all y_all x_subset y_subset centres observations".split())
READERS |= set("x_labelled y_labelled x_unlabelled num_classes first second".split())
"""What a reader has before a code block begins, beside names that begin with ``your_``."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a script as its reader would, but for the seconds of importing; return status, output and errors."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    with subprocess.Popen([sys.executable, HERE / "run_scripts.py"], **pipe) as runner:

        def one(path, figures):
            folder = tmp_path_factory.mktemp("example")
            output, errors = folder / "output", folder / "errors"
            runner.stdin.write(f"{path}\t{figures}\t{output}\t{errors}\n")
            runner.stdin.flush()
            status = int(runner.stdout.readline())
            return status, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")

        yield one
        runner.stdin.close()


def cells(text):
    """Return the cells of a page: each the heading it stands under, and its code."""
    heading, found = "", []
    for cell in re.split(r"^# %%.*\n", text, flags=re.MULTILINE):
        if title := re.match(r"# (.+)\n# -+\n", cell):
            heading = title[1]
        found.append((heading, cell))
    return found


def code_blocks(cell):
    """Return the code blocks of a cell's comments, which the page itself does not run."""
    lines = [line[2:] for line in cell.splitlines() if line.startswith("#")]
    found = re.findall(r"^\.\. code-block:: python\n((?:   .*\n|\n)+)", "\n".join([*lines, ""]), re.MULTILINE)
    return [textwrap.dedent(block).strip() for block in found]


def module_names(text):
    """Return the names that a script has at its end: imported, assigned or defined, but not inside a function."""
    found = symtable.symtable(text, "script", "exec").get_symbols()
    return {symbol.get_name() for symbol in found if symbol.is_imported() or symbol.is_assigned()}


def unknown_names(block, text):
    """Return the names that a code block uses, and that neither it, nor its page, nor the reader has."""
    tables = [symtable.symtable(block, "block", "exec")]
    for table in tables:
        tables.extend(table.get_children())
    used = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
    }
    known = module_names(block) | module_names(text) | set(dir(builtins)) | READERS
    return {name for name in used - known if not name.startswith("your_")}


def num_code_lines(text):
    """Count the lines that hold more than comments and documentation."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef)]
    for node in documented:
        if ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_there_are_pages_of_every_group():
    assert len(PAGES) >= 28
    assert {page.group for page in PAGES} == set(gallery.GROUPS)
    assert len({page.name for page in PAGES} | set(gallery.names())) == len(PAGES) + len(gallery.names())


def test_no_script_is_outside_of_the_groups():
    assert {page.path for page in PAGES} == set((HERE.parents[1] / "examples").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_short_and_has_its_parts(page):
    text = page.path.read_text(encoding="utf-8")
    assert num_code_lines(text) < 120
    assert page.title and page.lesson
    titles = [heading for heading, _ in cells(text)]
    wanted = HEADINGS if page.group != "sampling" else ("An exact twin",)
    assert not set(wanted) - set(titles)
    assert page.group == "sampling" or ".. math::" in text or ":math:" in text
    for heading in set(wanted) & {"An exact twin", "The fit"}:
        code = "".join(code for title, code in cells(text) if title == heading)
        assert re.search(r"^\s*assert ", code, re.MULTILINE), f"{heading!r} asserts nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_ends_with_what_to_replace(page):
    text = page.path.read_text(encoding="utf-8")
    heading, cell = cells(text)[-1]
    assert heading == LAST
    assert num_code_lines(cell) or code_blocks(cell), "no code that a reader could start from"
    for block in code_blocks(cell):
        compile(block, f"{page.name}, {LAST}", "exec")
        assert not unknown_names(block, text), "names that the page does not have"


def test_code_blocks_are_read_from_comments():
    cell = "# Try it.\n#\n# .. code-block:: python\n#\n#    for x in y:\n#        print(x)\n#\n# More.\nz = 1\n"
    assert code_blocks(cell) == ["for x in y:\n    print(x)"] and not code_blocks("# Try ``print(x)``.\n")


@pytest.mark.parametrize(
    ("block", "unknown"),
    [
        ("bk.fit(model, x)", {"bk"}),
        ("import bayeskit as bk\nbk.fit(model, your_data)", set()),
        ("fitted = fit(model, lambda z: local + z)", {"local"}),
        ("def loss(z):\n    return z + scale\nprint(loss(x), [fit(row) for row in x])", {"scale"}),
        ("held_out.waic(fit(x))", {"held_out"}),
    ],
)
def test_mutation_names_of_code_blocks_that_nobody_has_are_found(block, unknown):
    page = "from bayeskit import fit\n\ndef helper(local):\n    other = local\n    return other\n"
    assert unknown_names(block, page) == unknown


@pytest.mark.calibration
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, run, tmp_path):
    status, output, errors = run(page.path, tmp_path)
    assert status == 0, errors
    assert page.group == "sampling" or "+-" in output, "no number with its Monte Carlo error"
    assert page.group == "sampling" or list(tmp_path.glob("*.png")), "no figure"
    # A warning in an example would teach that warnings are normal; that there is no compiler is none of the example's.
    assert "Warning" not in re.sub(r".*CompilationWarning: .*no C\+\+ compiler was found.*", "", errors)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("assert 1 + 1 == 3, 'no sum'", 1, "AssertionError: no sum"),
        ("import warnings\nwarnings.warn('careful')", 0, "UserWarning: careful"),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("import atexit\natexit.register(lambda: 1 / 0)", 0, "ZeroDivisionError"),
    ],
)
def test_mutation_a_script_that_fails_or_warns_is_noticed(run, tmp_path, text, status, said):
    path = tmp_path / "script.py"
    path.write_text(text)
    found, _, errors = run(path, tmp_path)
    assert found == status and said in errors


@pytest.mark.calibration
def test_scripts_do_not_see_each_other(run, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import torch\nprint(torch.get_default_dtype())\ntorch.set_default_dtype(torch.float64)")
    assert run(path, tmp_path) == run(path, tmp_path) == (0, "torch.float32\n", "")
