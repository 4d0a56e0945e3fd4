"""What both workflows are given: topologies in any form, and models of the sites."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from bayeskit.errors import ConversionWarning, SettingsError
from bayeskit.models.phylogenetics import (
    JC69,
    Alignment,
    SiteRates,
    SubstitutionModel,
    Topologies,
    Tree,
    TreeSample,
)


def unrooted_topologies(trees: TreeSample | Topologies | Sequence[Tree], alignment: Alignment) -> Topologies:
    """Return topologies without their roots, the taxa in the order of an alignment.

    Parameters
    ----------
    trees : TreeSample, Topologies or sequence of Tree
        Of rooted ones that are alike but for the root, one is kept.
    alignment : Alignment

    Returns
    -------
    Topologies

    Raises
    ------
    SettingsError
        If something else is given.
    TreeError
        If the taxa are not those of the alignment, or there is no tree.

    Warns
    -----
    ConversionWarning
        Once, if the topologies are rooted.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"D": "A", "C": "A", "B": "C", "A": "C"})
    >>> unrooted_topologies([Tree.from_newick("((A,B),C,D);")], alignment).to_newick(0)
    '(D,C,(B,A));'
    """
    if isinstance(trees, TreeSample):
        trees = trees.topologies
    if not isinstance(trees, Topologies):
        trees = Topologies.from_trees(_only_trees(trees))
    if trees.rooted:
        warnings.warn(
            "The topologies are rooted; they are unrooted here, as a time-reversible model cannot tell where a root "
            "stands.",
            ConversionWarning,
            stacklevel=3,
        )
        trees = trees.unrooted()[0].distinct()[0]
    return trees.with_taxa(alignment.taxa)[0]


def check_models(
    alignment: Alignment, substitution: SubstitutionModel | None, site_rates: SiteRates | None
) -> SubstitutionModel:
    """Refuse what is no alignment or model; return the substitution model, Jukes-Cantor by default.

    Raises
    ------
    SettingsError
        Naming the argument.
    """
    if not isinstance(alignment, Alignment):
        raise SettingsError(f"alignment: {alignment!r:.80} is none. Remedy: give Alignment.from_file(path).")
    substitution = JC69() if substitution is None else substitution
    if not isinstance(substitution, SubstitutionModel):
        raise SettingsError(
            f"substitution: {substitution!r:.80} is no substitution model. Remedy: give an object, such as "
            "HKY85(kappa=2.0, base_frequencies=[0.3, 0.2, 0.2, 0.3])."
        )
    if not isinstance(site_rates, (SiteRates, type(None))):
        raise SettingsError(f"site_rates: {site_rates!r:.80} is none. Remedy: give an object such as GammaRates(0.5).")
    return substitution


def _only_trees(trees: Sequence[Tree]) -> list[Tree]:
    remedy = "Remedy: give a TreeSample, Topologies, or a list of Tree, such as [Tree.from_newick(text), ...]."
    if isinstance(trees, (str, bytes)) or not isinstance(trees, Sequence):
        raise SettingsError(f"trees: {trees!r:.80} is none of these. {remedy}")
    for place, tree in enumerate(trees):
        if not isinstance(tree, Tree):
            raise SettingsError(f"tree {place + 1} is a {type(tree).__name__}. {remedy}")
    return list(trees)
