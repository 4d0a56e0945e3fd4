"""bayeskit: posterior draws, marginal likelihoods and objectives for Pyro models."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bayeskit._moved import answer_to_old_paths

if TYPE_CHECKING:
    from bayeskit import errors, exact
    from bayeskit.draws import Draws
    from bayeskit.inference.samplers import sample
    from bayeskit.inference.training import Fit, fit
    from bayeskit.logdensity.recurrence import scan
    from bayeskit.logdensity.target import Target
    from bayeskit.workflows.simulation_based_calibration import SBCResult, sbc

__version__ = "0.1.0"

__all__ = ["Draws", "Fit", "SBCResult", "Target", "__version__", "errors", "exact", "fit", "sample", "sbc", "scan"]

#: The module of each public name. It is imported when the name is first used, so that a script loads what it needs.
_MODULES = {
    "Draws": "draws",
    "Fit": "inference.training",
    "SBCResult": "workflows.simulation_based_calibration",
    "Target": "logdensity.target",
    "fit": "inference.training",
    "sample": "inference.samplers",
    "sbc": "workflows.simulation_based_calibration",
    "scan": "logdensity.recurrence",
}

answer_to_old_paths()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(import_module(f"bayeskit.{_MODULES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"bayeskit.{name}") is not None:
        found = import_module(f"bayeskit.{name}")
    else:
        raise AttributeError(f"module 'bayeskit' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
