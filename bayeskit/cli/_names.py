"""Names that are typed, checked without an import of torch."""

from __future__ import annotations

import sys
from collections.abc import Collection

from bayeskit.core.inputs import unknown_name
from bayeskit.errors import SettingsError

#: Evidence methods, so that a misspelt name is refused without torch.
METHOD_NAMES = (
    "laplace",
    "maximum_likelihood",
    "maximum_posterior",
    "gamma_laplus",
    "beta_prime_laplus",
    "lognormal_laplus",
    "evidence_lower_bound",
    "naive_monte_carlo",
    "laplace_importance_sampling",
    "gamma_laplus_importance_sampling",
    "variational_importance_sampling",
    "bridge_sampling",
    "warp_bridge_sampling",
    "flow_importance_sampling",
    "learned_harmonic_mean",
    "corrected_arithmetic_mean",
    "generalised_stepping_stone",
    "harmonic_mean",
    "stabilised_harmonic_mean",
    "path_sampling",
    "modified_path_sampling",
    "stepping_stone",
    "thermodynamic_integration",
    "nested_sampling",
    "smc",
    "adaptive_smc",
    "prequential",
    "chib",
    "conditional_predictive_ordinates",
    "pointwise_predictive_density",
)


def checked_methods(text: str) -> str | list[str]:
    """Return the methods of the option, 'all' or names, each of which is known."""
    chosen = _names(text)
    if not chosen:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    # Where the command line is called from Python, other packages may have registered methods.
    loaded = sys.modules.get("bayeskit.inference.evidence")
    return _all_known("evidence method", chosen, METHOD_NAMES if loaded is None else loaded.METHODS)


def checked_cases(text: str) -> str | list[str]:
    from bayeskit import gallery

    loaded = sys.modules.get("bayeskit.exact")
    return _all_known("exact case", _names(text), gallery.EXACT_CASES if loaded is None else loaded.CASES)


def _all_known(what: str, chosen: str | list[str], known: Collection[str]) -> str | list[str]:
    for name in [] if isinstance(chosen, str) else chosen:
        if name not in known:
            raise unknown_name(what, name, known)
    return chosen


def _names(text: str) -> str | list[str]:
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
