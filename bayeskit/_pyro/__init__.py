"""The one adapter that reads Pyro models; nothing outside this folder sees Pyro's runtime."""

from bayeskit._pyro.density import PyroDensity, Site

__all__ = ["PyroDensity", "Site"]
