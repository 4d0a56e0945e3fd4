"""Pages that are left out of the build for lack of their data: what links to them becomes plain text."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

#: A role such as :doc:`title </place>`, in either markup, or a link of Markdown.
_LINK = re.compile(
    r"(?::doc:|\{doc\})`(?:(?P<title>[^`<]+?)\s*<(?P<goal>[^`>]+)>|(?P<bare>[^`<>]+))`"
    r"|(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<address>[^()\s]+)\)"
)


def ignore_pattern(names: Iterable[str]) -> str:
    """Return what keeps sphinx-gallery from running the scripts of these names, besides ``__init__.py``.

    It looks for the pattern in a file's bare name, or in its path, depending on its version.
    """
    return "|".join(rf"(?:^|/){re.escape(name)}\.py$" for name in ("__init__", *names))


def without_links(text: str, docname: str, left_out: Mapping[str, str]) -> str:
    """Return the source of a page without links to pages that are left out.

    Parameters
    ----------
    text : str
        reStructuredText or MyST Markdown.
    docname : str
        The page's own place, from which relative links start, such as ``"gallery/evidence/nested_sampling"``.
    left_out : mapping of str to str
        Titles by place, said where a link has no text of its own.
    """

    def plain(found: re.Match[str]) -> str:
        goal = (found["goal"] or found["bare"] or found["address"]).partition("#")[0].strip()
        if goal.startswith("/"):
            place = goal[1:]
        else:
            place = posixpath.normpath(posixpath.join(posixpath.dirname(docname), goal))
        title = left_out.get(re.sub(r"\.(rst|md|html)$", "", place))
        return found[0] if title is None else found["title"] or found["text"] or title

    return _LINK.sub(plain, text)


def connect(app: Any, left_out: Mapping[str, str]) -> None:
    """Let an application of Sphinx read every page without links to those that are left out."""

    def read(app: Any, docname: str, source: list[str]) -> None:
        source[0] = without_links(source[0], docname, left_out)

    if left_out:
        app.connect("source-read", read)
