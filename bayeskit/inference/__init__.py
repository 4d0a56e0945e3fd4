"""Inference: samplers and what is computed from their draws."""

from bayeskit._lazy import imported_when_used

__getattr__ = imported_when_used(
    "bayeskit.inference",
    {
        "best_design": "bayeskit.inference.experiments",
        "information_gradient": "bayeskit.inference.experiments",
    },
)
