"""The gradient estimator that a model puts into its guide's sites."""

from __future__ import annotations

from bayeskit.errors import SettingsError


def checked_gradient(gradient: object | None) -> object | None:
    """Return a gradient estimator, or None, as it is.

    Raises
    ------
    SettingsError
        If it is anything else, such as a name or a class.
    """
    if gradient is None or not isinstance(gradient, type) and callable(getattr(gradient, "points", None)):
        return gradient
    raise SettingsError(
        f"gradient is {gradient!r:.80}, no gradient estimator; give an object of bayeskit.inference.gradients such as "
        "UnorderedSet(k=4)"
    )
