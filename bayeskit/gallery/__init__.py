"""Models that can be run by name, and the pages that teach them.

Every case of :mod:`bayeskit.exact` is here, each with what is known of its evidence, and models on data that ship with
the package; besides, the pages of the gallery, scripts of one idea each. Nothing heavy is imported before an entry is
asked for.
"""

from bayeskit._moved import answer_to_old_names
from bayeskit.gallery.registry import Entry, entries, get_model, names
from bayeskit.gallery.scripts import GROUPS, Page, is_page, is_small, page, pages, run_page
from bayeskit.gallery.trees import SUBSTITUTION_MODELS, tree_target

__all__ = [
    "Entry",
    "GROUPS",
    "Page",
    "SUBSTITUTION_MODELS",
    "entries",
    "get_model",
    "is_page",
    "is_small",
    "names",
    "page",
    "pages",
    "run_page",
    "tree_target",
]

__getattr__ = answer_to_old_names(__name__)
