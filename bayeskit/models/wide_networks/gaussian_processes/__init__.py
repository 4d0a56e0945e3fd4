"""Gaussian processes of wide networks: posteriors, trained ensembles, models for Pyro and GPyTorch, variance fits.

:class:`GPyTorchKernel` and :func:`large_regression` require GPyTorch, which is imported on first use.
"""

from bayeskit._lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
