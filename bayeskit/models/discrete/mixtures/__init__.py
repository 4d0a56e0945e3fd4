"""Finite mixtures of normal distributions: models, priors, relabelling, plots, and evidence over relabellings."""

from bayeskit._lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
