"""Functions and classes of pages, which are tested further than the page has room for."""

import ast
from types import SimpleNamespace

import pytest

from bayeskit import gallery


def _is_definition(node: ast.stmt) -> bool:
    """Tell whether a statement imports, or defines a function, a class or a constant in capital letters."""
    if isinstance(node, ast.Assign):
        names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
        return bool(names) and all(name.isupper() for name in names)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


@pytest.fixture(scope="session")
def definitions():
    """Return what a page defines, without running the rest of it."""

    def of_page(name):
        path = gallery.page(name).path
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if _is_definition(node)]
        names = {"__name__": name}
        exec(compile(tree, path, "exec"), names)
        return SimpleNamespace(**names)

    return of_page
