"""What an alignment must have before trees are searched."""

from __future__ import annotations

import numpy as np

from bayeskit.core.inputs import warn_user
from bayeskit.errors import AlignmentError, DataWarning, SettingsError
from bayeskit.models.phylogenetics.alignments import Alignment
from bayeskit.models.phylogenetics.site_rates import InvariantSites, SiteRates
from bayeskit.models.phylogenetics.site_sets import ranges
from bayeskit.models.phylogenetics.substitution import SubstitutionModel, VariableSites

__all__ = ["check_for_search", "check_variable_sites"]


def check_for_search(alignment: Alignment) -> None:
    """Check that an alignment can say something about the topology.

    Parameters
    ----------
    alignment : Alignment
        Not changed: all sites and taxa are kept.

    Raises
    ------
    AlignmentError
        If there are fewer than four taxa, for which there is at most one unrooted topology.

    Warns
    -----
    DataWarning
        If all sites are constant; if taxa or sites hold nothing but missing data; or if taxa have identical sequences.
        Each warning names the taxa or sites (counted from 1).

    Examples
    --------
    >>> import warnings
    >>> sequences = {"A": "ACGT", "B": "ACGA", "C": "ACGA", "D": "TCGT"}
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_for_search(Alignment.from_sequences(sequences))
    >>> print(str(caught[0].message).split(". ")[0])
    Identical sequences: 'B', 'C'
    """
    if alignment.num_taxa < 4:
        raise AlignmentError(
            f"The alignment has {alignment.num_taxa} taxa ({', '.join(alignment.taxa)}), and there is only one "
            "unrooted topology of three. Remedy: give at least four taxa; for three, use TreeModel."
        )
    for said in _findings(alignment):
        warn_user(said, DataWarning)


def check_variable_sites(alignment: Alignment, substitution: SubstitutionModel, site_rates: SiteRates | None) -> None:
    """Check that an alignment and site rates fit a substitution model of variable sites, if it is one.

    Raises
    ------
    AlignmentError
        If some state is possible for all taxa at a site; the sites are named, counted from 1.
    SettingsError
        If there are invariant sites.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.substitution import Mk
    >>> check_variable_sites(Alignment.from_sequences({"A": "01", "B": "10"}), VariableSites(Mk(2)), None)
    """
    if not isinstance(substitution, VariableSites):
        return
    if isinstance(site_rates, InvariantSites):
        raise SettingsError(
            "site_rates: InvariantSites have no variable site, and VariableSites (+ASC) no invariant one. Remedy: use "
            "GammaRates() or FreeRates() with VariableSites."
        )
    constant = np.bitwise_and.reduce(alignment.patterns.numpy(), axis=0) != 0
    found = np.flatnonzero(constant[alignment.site_patterns.numpy()])
    if len(found):
        raise AlignmentError(
            f"Sites {ranges(found)} (counted from 1): some state is possible for all taxa, but VariableSites (+ASC) is "
            "for data without constant sites. Remedy: leave these sites out: give the others to "
            "alignment.select_sites; or use the model without the correction."
        )


def _findings(alignment: Alignment) -> list[str]:
    """Return the texts of the warnings."""
    patterns, site_patterns = alignment.patterns.numpy(), alignment.site_patterns.numpy()
    missing = patterns == 2**alignment.data_type.num_states - 1
    groups: dict[bytes, list[str]] = {}
    for taxon, row in zip(alignment.taxa, patterns, strict=True):
        groups.setdefault(row.tobytes(), []).append(repr(taxon))
    unknown = [repr(taxon) for taxon, gaps in zip(alignment.taxa, missing.all(1), strict=True) if gaps]
    equal = [group for group in groups.values() if len(group) > 1 and not set(group) <= set(unknown)]
    empty = np.flatnonzero(missing.all(0)[site_patterns])
    found = []
    if not (np.bitwise_and.reduce(patterns, axis=0) == 0).any():
        found.append(
            "No site varies: some state is possible for all taxa at each site. The data say next to nothing about the "
            "topology. Remedy: give sites that vary."
        )
    if unknown:
        found.append(
            f"No base is known of {_listed(unknown)}. Only the prior tells their places in the tree. Remedy: leave "
            "them out, with alignment.select(taxa)."
        )
    if equal:
        found.append(
            f"Identical sequences: {_listed([', '.join(group) for group in equal], '; ')}. Only the prior tells which "
            "of them are closer. Remedy: keep one of each group, with alignment.select(taxa)."
        )
    if len(empty):
        found.append(
            f"No base is known at the sites {ranges(empty)} (counted from 1). They are kept; the likelihood of each is "
            "one. Remedy: none is needed; alignment.select_sites(sites) leaves them out."
        )
    return found


def _listed(words: list[str], separator: str = ", ") -> str:
    return separator.join(words[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
