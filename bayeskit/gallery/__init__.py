"""Models that can be run by name, each with what is known of its evidence.

Every case of :mod:`bayeskit.exact` is here, and models on data that ship with the package. Nothing heavy is
imported before an entry is asked for.
"""

from bayeskit.gallery.registry import Entry, entries, get, names
from bayeskit.gallery.trees import SUBSTITUTION_MODELS, tree_target

__all__ = ["SUBSTITUTION_MODELS", "Entry", "entries", "get", "names", "tree_target"]
