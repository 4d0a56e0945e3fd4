"""Model families, each a Pyro model with its data and, where one exists, its exact twin."""

from bayeskit._lazy import imported_when_used

__getattr__ = imported_when_used("bayeskit.models")
