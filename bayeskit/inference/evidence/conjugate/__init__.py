"""The evidence from full conditional distributions."""

from bayeskit.inference.evidence.conjugate.blocks import ConjugateBlock
from bayeskit.inference.evidence.conjugate.chib import chib, refuses

__all__ = ["ConjugateBlock", "chib", "refuses"]
