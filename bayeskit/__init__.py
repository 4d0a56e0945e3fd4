"""bayeskit: posterior draws, marginal likelihoods and objectives for Pyro models."""

from typing import TYPE_CHECKING

from bayeskit._lazy import imported_when_used

if TYPE_CHECKING:
    from bayeskit import errors, exact, ode
    from bayeskit.draws import Draws, prior_predictive
    from bayeskit.inference import evidence, objectives, samplers
    from bayeskit.inference.amortization import AmortizedPosterior, amortize
    from bayeskit.inference.experiments import information
    from bayeskit.inference.marginal import marginalize
    from bayeskit.inference.samplers import HMC, NUTS, sample
    from bayeskit.inference.training import Fit, fit
    from bayeskit.logdensity.recurrence import scan
    from bayeskit.logdensity.target import Target
    from bayeskit.workflows.bayes_factors import compare_models
    from bayeskit.workflows.simulation_based_calibration import SBCResult, sbc

#: Version of the package.
__version__ = "0.1.0"

__all__ = [
    "AmortizedPosterior",
    "Draws",
    "Fit",
    "HMC",
    "NUTS",
    "SBCResult",
    "Target",
    "__version__",
    "amortize",
    "compare_models",
    "errors",
    "evidence",
    "exact",
    "fit",
    "information",
    "marginalize",
    "objectives",
    "ode",
    "prior_predictive",
    "sample",
    "samplers",
    "sbc",
    "scan",
]

__getattr__ = imported_when_used(
    "bayeskit",
    {
        "AmortizedPosterior": "bayeskit.inference.amortization",
        "Draws": "bayeskit.draws",
        "Fit": "bayeskit.inference.training",
        "HMC": "bayeskit.inference.samplers",
        "NUTS": "bayeskit.inference.samplers",
        "SBCResult": "bayeskit.workflows.simulation_based_calibration",
        "Target": "bayeskit.logdensity.target",
        "amortize": "bayeskit.inference.amortization",
        "compare_models": "bayeskit.workflows.bayes_factors",
        "evidence": "bayeskit.inference",
        "fit": "bayeskit.inference.training",
        "information": "bayeskit.inference.experiments",
        "marginalize": "bayeskit.inference.marginal",
        "objectives": "bayeskit.inference",
        "prior_predictive": "bayeskit.draws",
        "sample": "bayeskit.inference.samplers",
        "samplers": "bayeskit.inference",
        "sbc": "bayeskit.workflows.simulation_based_calibration",
        "scan": "bayeskit.logdensity.recurrence",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
