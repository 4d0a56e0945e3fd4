"""The registry of named models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bayeskit.core.inputs import unknown_name
from bayeskit.gallery.trees import primates_target

if TYPE_CHECKING:
    from bayeskit.exact import ExactCase
    from bayeskit.logdensity.target import Target

__all__ = ["Entry", "entries", "get_model", "names"]


@dataclass(frozen=True)
class Entry:
    """A model that can be run by name.

    Attributes
    ----------
    name : str
    description : str
        One line.
    build : callable
        Makes its :class:`~bayeskit.Target`.
    reference : float or None
        Known log evidence, in nats.
    reference_source : str
        Where ``reference`` comes from.
    budget : mapping
        Settings of :class:`~bayeskit.inference.evidence.Budget` that suit this model.
    reference_error : float, default 0
        Standard error of ``reference``, zero if exact.
    """

    name: str
    description: str
    build: Callable[[], Target]
    reference: float | None = None
    reference_source: str = ""
    budget: Mapping[str, int] = field(default_factory=dict)
    reference_error: float = 0.0


_ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "primates",
            "mitochondrial DNA of 12 primates on a fixed topology, Jukes-Cantor",
            primates_target,
            reference=-6468.912,
            reference_source="importance sampling with 40,000 draws, standard error 0.004",
            reference_error=0.004,
            # Many short chains: the posterior run then shares its compiled graph with the ladder, and
            # compiling takes longest here. The ladder is short enough for a demonstration of less than
            # a minute, with standard errors of 0.04; --ladder-samples 1000 halves them. Few particles and
            # live points for the same reason.
            budget={
                "num_chains": 64,
                "num_warmup": 300,
                "num_samples": 250,
                "ladder_samples": 250,
                "num_particles": 16,
                "num_live": 128,  # blocks of 64 rows, which share the compiled graph
            },
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all models.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> gallery.names()[:2]
    ('primates', 'linreg10')
    """
    from bayeskit.exact import CASES

    return (*_ENTRIES, *CASES)


def entries() -> tuple[Entry, ...]:
    """Return all models; their targets are not built yet."""
    return tuple(get_model(name) for name in names())


def get_model(name: str) -> Entry:
    """Return the model of that name.

    Parameters
    ----------
    name : str

    Returns
    -------
    Entry

    Raises
    ------
    UnknownNameError
        If no model has that name; the message suggests the nearest name.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> gallery.get_model("linreg10").build().dim
    10
    >>> gallery.get_model("primate")
    Traceback (most recent call last):
    ...
    bayeskit.errors.UnknownNameError: no model is called 'primate'; did you mean 'primates'? ...
    """
    if name in _ENTRIES:
        return _ENTRIES[name]
    from bayeskit.exact import CASES

    if name not in CASES:
        raise unknown_name("model", name, names())
    return _of_case(CASES[name]())


def _of_case(case: ExactCase) -> Entry:
    return Entry(
        case.name,
        case.description,
        case.target,
        case.log_evidence,
        case.reference,
        reference_error=case.standard_error,
    )
