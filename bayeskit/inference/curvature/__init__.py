"""Curvature of networks: Fisher and Gauss-Newton matrices, natural gradients, Laplace; structure of Hessians."""

from bayeskit._lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
