"""zuko, without what importing it does to torch."""

from __future__ import annotations

from bayeskit._torch import validation_kept

with validation_kept():  # zuko switches torch's validation of distributions off for everybody
    import zuko

__all__ = ["zuko"]
