"""Ordinary differential equations inside models, with steps of each chain's own and exact gradients of the steps."""

from bayeskit._lazy import imported_when_used
from bayeskit.ode._solving import count_failures, solve

__all__ = ["count_failures", "solve"]

__getattr__ = imported_when_used("bayeskit.ode")
