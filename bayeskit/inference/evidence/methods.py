"""The registry of methods: each registers itself where it is defined, with the parts that it works on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bayeskit.core.inputs import unknown_name
from bayeskit.inference.evidence.checks import NO_PRIOR_DRAWS
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    from bayeskit.draws import Draws
    from bayeskit.inference.evidence.result import Evidence, PredictiveScore

__all__ = ["Estimate", "Kind", "METHODS", "Method", "Part", "Parts", "Refusal", "register", "select"]


class Part(StrEnum):
    """What methods work on and can share: draws, a ladder, fits and modes."""

    PRIOR = "prior"
    MODE = "mode"
    POSITIVE_MODE = "positive mode"
    MEAN_FIELD = "mean field"
    POSTERIOR = "posterior"
    FLOW = "flow"
    LADDER = "ladder"


#: The argument by which an estimator takes each part; draws from the prior it makes itself.
_ARGUMENTS = {
    Part.MODE: "mode",
    Part.POSITIVE_MODE: "mode",
    Part.MEAN_FIELD: "mean_field",
    Part.POSTERIOR: "draws",
    Part.FLOW: "flow",
    Part.LADDER: "ladder",
}


class Parts(Protocol):
    """Where methods find the parts, and how much to spend on runs of their own."""

    budget: Any
    given_draws: Draws | None  # not made for another method
    blocks: tuple[Any, ...]  # for Chib's method
    progress: bool

    @property
    def improper(self) -> str | None:
        """What is known to be improper of the prior; None if nothing is."""
        ...

    def part(self, name: str) -> Any:
        """Return a part, made when it is first asked for."""
        ...

    def file(self, name: str) -> str | None:
        """Return the checkpoint of a run."""
        ...


Estimate = Callable[[Target, Parts, int], "Evidence | PredictiveScore"]
Refusal = Callable[[Target, Parts], "str | None"]
#: "consistent": the estimate tends to the log evidence with more draws, and its error is one; "unstable": so it does,
#: but no error of it can be relied on; "approximation": it has a bias that more draws do not mend; "bound": it lies
#: below; "score": a predictive score, no marginal likelihood.
Kind = Literal["consistent", "unstable", "approximation", "bound", "score"]


@dataclass(frozen=True)
class Method:
    """One way to compute a marginal likelihood.

    Attributes
    ----------
    name : str
        The name of its function.
    needs : frozenset of Part
        What it works on; ``Part.PRIOR`` where it draws from the prior.
    estimate : callable
        ``(target, material, seed) -> Evidence``, or a predictive score.
    kind : {"consistent", "unstable", "approximation", "bound", "score"}
    refuses : callable, optional
        ``(target, material)``, the reason why the method does not apply, or None.
    has_own_run : bool
        Whether it makes a run of its own, by the budget.
    """

    name: str
    needs: frozenset[Part]
    estimate: Estimate
    kind: Kind = "consistent"
    refuses: Refusal | None = None
    has_own_run: bool = False

    @property
    def source(self) -> str:
        """The draws or the search that its estimate rests on; a method with a run of its own is its own source."""
        order = (Part.POSTERIOR, Part.LADDER, Part.MODE, Part.POSITIVE_MODE, Part.MEAN_FIELD)
        return next((part.value for part in order if part in self.needs), self.name)

    def refusal(self, target: Target, material: Parts) -> str | None:
        """Return the reason why the method does not apply to a target, or None."""
        if self.kind != "score" and material.improper is not None:
            return material.improper
        if self.needs & {Part.PRIOR, Part.LADDER} and not target.can_sample_prior:
            return NO_PRIOR_DRAWS
        return None if self.refuses is None else self.refuses(target, material)

    @property
    def _place(self) -> tuple[int, int]:
        """Place in tables: the cheap ones first, scores last, then by the part and as they were registered."""
        parts = [list(Part).index(part) for part in self.needs] or [len(Part)]
        if self.kind == "score":
            group = 5
        elif Part.POSTERIOR in self.needs:
            group = 2
        elif Part.LADDER in self.needs:
            group = 3
        elif self.has_own_run:
            group = 4
        else:
            group = int(self.kind == "consistent")
        return group, 0 if group in (2, 3) else min(parts)


#: The methods by name, in the order of tables.
METHODS: dict[str, Method] = {}


def register(
    function: Callable[..., Any], needs: Iterable[Part], kind: Kind, refuses: Refusal | None, by: Estimate | None
) -> None:
    """Add an estimator to the registry; ``by`` calls it where its arguments are not parts, draws and a seed."""
    arguments = inspect.signature(function).parameters
    parts = frozenset(needs)

    def estimate(target: Target, material: Parts, seed: int) -> Evidence | PredictiveScore:
        given = {_ARGUMENTS[part]: material.part(part) for part in parts if part in _ARGUMENTS}
        if "draws" in arguments and "draws" not in given:
            # Never those that another method has needed: an answer must not depend on who else was asked.
            given["draws"] = material.given_draws
        if "seed" in arguments:
            given["seed"] = seed
        found: Evidence | PredictiveScore = function(target, **given)
        return found

    method = Method(function.__name__, parts, by or estimate, kind, refuses, by is not None)
    METHODS[method.name] = method
    for name in sorted(METHODS, key=lambda name: METHODS[name]._place):  # stable
        METHODS[name] = METHODS.pop(name)


def select(methods: str | Sequence[str]) -> list[Method]:
    """Return the methods of these names, in registry order; ``"all"`` means every one.

    Raises
    ------
    UnknownNameError
        For a name that is not registered; the message suggests the nearest.

    Examples
    --------
    >>> [m.name for m in select(["stepping_stone", "bridge_sampling"])]
    ['bridge_sampling', 'stepping_stone']
    """
    if methods == "all":
        return list(METHODS.values())
    names = [methods] if isinstance(methods, str) else list(methods) if isinstance(methods, Iterable) else [methods]
    for name in names:
        if name not in METHODS:
            raise unknown_name("evidence method", name, METHODS)
    return [method for name, method in METHODS.items() if name in names]
