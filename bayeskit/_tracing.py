"""What running a density under ``torch.func.vmap`` or ``make_fx`` may raise, and how a warning quotes it."""

from __future__ import annotations

UNTRACEABLE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of a density that branches on values, or calls what cannot be batched or traced."""


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
