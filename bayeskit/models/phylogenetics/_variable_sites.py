"""Check of data that a substitution model of variable sites is for."""

from __future__ import annotations

import numpy as np

from bayeskit.errors import AlignmentError, SettingsError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._site_rates import InvariantSites, SiteRates
from bayeskit.models.phylogenetics._site_sets import ranges
from bayeskit.models.phylogenetics._substitution import SubstitutionModel, VariableSites


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
    >>> from bayeskit.models.phylogenetics._substitution import Mk
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
