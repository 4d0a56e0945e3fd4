"""Check of data that a substitution model of sites that were chosen is for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bayeskit.errors import AlignmentError, SettingsError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._site_rates import InvariantSites, SiteRates
from bayeskit.models.phylogenetics._site_sets import ranges
from bayeskit.models.phylogenetics._substitution import SubstitutionModel, VariableSites

#: What is wrong with a site that a coding leaves out.
_LEFT_OUT = {
    "variable": "some state is possible for all taxa, but VariableSites (+ASC) is for data without constant sites",
    "informative": "no two states are in two taxa each, but coding='informative' is for parsimony-informative sites",
    "noabsence": "the first state is possible for all taxa, but coding='noabsence' is for data without such sites",
}


def sites_left_out(alignment: Alignment, coding: str) -> NDArray[np.int64]:
    """Return the sites that a coding of `VariableSites` leaves out, counted from 0, `(sites,)`.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "000", "B": "010", "C": "011", "D": "000"}, data_type="standard")
    >>> [sites_left_out(alignment, coding).tolist() for coding in ("variable", "informative", "noabsence")]
    [[0], [0, 2], [0]]
    """
    patterns = alignment.patterns.numpy().astype(np.int64)
    common = np.bitwise_and.reduce(patterns, axis=0)
    if coding == "informative":
        # A set of states counts for none of them.
        counts = np.stack([(patterns == 1 << state).sum(0) for state in range(alignment.data_type.num_states)])
        out = (counts >= 2).sum(0) < 2
    else:
        out = common != 0 if coding == "variable" else (common & 1) != 0
    return np.flatnonzero(out[alignment.site_patterns.numpy()])


def check_variable_sites(alignment: Alignment, substitution: SubstitutionModel, site_rates: SiteRates | None) -> None:
    """Check that an alignment and site rates fit a substitution model of chosen sites, if it is one.

    Raises
    ------
    AlignmentError
        If a site cannot be in the data; the sites are named, counted from 1.
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
    found = sites_left_out(alignment, substitution.coding)
    if len(found):
        raise AlignmentError(
            f"Sites {ranges(found)} (counted from 1): {_LEFT_OUT[substitution.coding]}. Remedy: leave these sites out: "
            "give the others to alignment.select_sites; or use the model without the correction."
        )
