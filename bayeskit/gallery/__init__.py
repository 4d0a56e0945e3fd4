"""Models that can be run by name, and the pages that teach them.

The models are all cases of :mod:`bayeskit.exact`, with their known evidence, and models of data that ship with the
package. The pages of the gallery are scripts, each about one idea. Heavy packages are imported only when an entry is
requested.
"""

from bayeskit.gallery._registry import EXACT_CASES, Entry, entries, get_model, listed, names
from bayeskit.gallery._scripts import GROUPS, Page, data_file, is_page, is_small, page, pages, run_page
from bayeskit.gallery._trees import check_substitution, mrbayes_block, tree_target

__all__ = [
    "EXACT_CASES",
    "Entry",
    "GROUPS",
    "Page",
    "check_substitution",
    "data_file",
    "entries",
    "get_model",
    "is_page",
    "is_small",
    "listed",
    "mrbayes_block",
    "names",
    "page",
    "pages",
    "run_page",
    "tree_target",
]
