"""zuko, the library of normalizing flows, without its change of a torch global."""

from bayeskit._core.randomness import validation_kept

with validation_kept():  # zuko switches torch's validation of distributions off globally
    import zuko

__all__ = ["zuko"]
