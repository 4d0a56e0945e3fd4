"""Problems with known evidence, used by ``bayeskit exam``.

Each module defines a Pyro model and a function that builds an :class:`ExactCase`, with evidence and posterior
moments in closed form or by quadrature. :data:`CASES` maps the names of registered cases to their builders.
:data:`EASY` lists the unimodal cases on which every consistent method should be accurate.
"""

from __future__ import annotations

from collections.abc import Callable

from bayeskit._core.inputs import unknown_name
from bayeskit.exact import generated
from bayeskit.exact._beta_binomial import beta_binomial
from bayeskit.exact._case import ExactCase
from bayeskit.exact._eight_schools import eight_schools
from bayeskit.exact._enumeration import Marginal, enumerate_latents
from bayeskit.exact._linear_regression import linear_regression
from bayeskit.exact._neals_funnel import neals_funnel
from bayeskit.exact._pima import pima
from bayeskit.exact._radiata_pine import radiata_pine
from bayeskit.exact._several_modes import (
    eggbox,
    gaussian_shells,
    spike_and_slab,
)
from bayeskit.exact._three_taxon_tree import (
    pattern_log_probabilities,
    three_taxon_sequences,
    three_taxon_tree,
)
from bayeskit.exact.generated import FAMILIES, Family, generate, shrink

__all__ = [
    "CASES",
    "ExactCase",
    "FAMILIES",
    "Family",
    "Marginal",
    "beta_binomial",
    "eggbox",
    "eight_schools",
    "enumerate_latents",
    "gaussian_shells",
    "generate",
    "generated",
    "get",
    "linear_regression",
    "neals_funnel",
    "pattern_log_probabilities",
    "pima",
    "radiata_pine",
    "shrink",
    "spike_and_slab",
    "three_taxon_sequences",
    "three_taxon_tree",
]


def _radiata_pine_m1() -> ExactCase:
    return radiata_pine("x")


def _radiata_pine_m2() -> ExactCase:
    return radiata_pine("z")


def _pima_m1() -> ExactCase:
    return pima("m1")


def _pima_m2() -> ExactCase:
    return pima("m2")


def _gaussian_shells_10() -> ExactCase:
    return gaussian_shells(10)


EASY: tuple[str, ...] = (
    "linreg10",
    "radiata_pine_m1",
    "radiata_pine_m2",
    "beta_binomial",
    "eight_schools",
    "three_taxon_tree",
)
"""Names of unimodal cases on which every consistent method is accurate with a small budget."""

CASES: dict[str, Callable[[], ExactCase]] = {
    "linreg10": linear_regression,
    "radiata_pine_m1": _radiata_pine_m1,
    "radiata_pine_m2": _radiata_pine_m2,
    "beta_binomial": beta_binomial,
    "eight_schools": eight_schools,
    "three_taxon_tree": three_taxon_tree,
    "pima_m1": _pima_m1,
    "pima_m2": _pima_m2,
    "gaussian_shells_2": gaussian_shells,
    "gaussian_shells_10": _gaussian_shells_10,
    "eggbox": eggbox,
    "spike_and_slab": spike_and_slab,
    "neals_funnel": neals_funnel,
}
"""Builder of each registered case by name."""


def get(name: str) -> ExactCase:
    """Build a registered case.

    Parameters
    ----------
    name : str
        A key of :data:`CASES`.

    Returns
    -------
    ExactCase
        A new object at each call.

    Raises
    ------
    UnknownNameError
        If there is no such case; the message suggests a similar name.

    Examples
    --------
    >>> from bayeskit import exact
    >>> round(exact.get("linreg10").log_evidence, 4)
    -94.0845
    >>> exact.get("linreg")
    Traceback (most recent call last):
    ...
    bayeskit.errors.UnknownNameError: no exact case is called 'linreg'; did you mean 'linreg10'?...
    """
    if name not in CASES:
        raise unknown_name("exact case", name, CASES)
    return CASES[name]()
