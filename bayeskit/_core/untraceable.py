"""Errors of functions that cannot be batched, traced or differentiated, and their text in warnings."""

from __future__ import annotations

from bayeskit.errors import ModelError

UNTRACEABLE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of a density that branches on values, or calls functions that cannot be batched or traced."""


class OfAnotherLibrary(RuntimeError):
    """Raised where torch would trace a density that another library computes, which runs as it is."""


def raise_if_forked(error: Exception) -> None:
    """Raise ModelError if an error is torch's refusal of gradients in a forked process."""
    if "fork-based multiprocessing" in str(error):
        raise ModelError(
            "a forked process cannot compute gradients after its parent has computed one, where torch is "
            "built for CUDA. Remedy: start processes by multiprocessing.get_context('spawn') or by joblib"
        ) from error


def first_line(error: Exception | str) -> str:
    """Return the beginning of an error's message, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
