"""Models that can be run by name, and the pages that teach them.

The models are all cases of :mod:`bayeskit.exact`, with their known evidence, and models of data that ship with the
package. The pages of the gallery are scripts, each about one idea. Heavy packages are imported only when an entry is
requested.
"""

from bayeskit.gallery._registry import Entry, entries, listed, names
from bayeskit.gallery._scripts import GROUPS, Page, data_file, is_small, page, pages
from bayeskit.gallery._trees import tree_target

__all__ = [
    "Entry",
    "GROUPS",
    "Page",
    "data_file",
    "entries",
    "is_small",
    "listed",
    "names",
    "page",
    "pages",
    "tree_target",
]
