"""The core's interface for model families, those of this package and of others.

A family imports nothing else of the core than these names and :mod:`bayeskit.errors`. Each is imported when it is first
used, and documented where it is defined.
"""

from bayeskit._lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
