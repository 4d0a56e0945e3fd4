"""bayeskit: posterior draws, marginal likelihoods and objectives for Pyro models."""

from bayeskit._lazy import names_of_stub

#: Version of the package.
__version__ = "0.1.0"

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
__all__ += ["__version__"]
