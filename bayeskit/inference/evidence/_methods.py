"""Registry of methods; each method registers itself with the shared parts that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bayeskit._core.inputs import unknown_name
from bayeskit._logdensity.target import Target
from bayeskit.errors import UnknownNameError
from bayeskit.inference.evidence._judging._belonging import NO_PRIOR_DRAWS

if TYPE_CHECKING:
    from bayeskit._draws import Draws
    from bayeskit.inference.evidence._budget import Budget
    from bayeskit.inference.evidence._result import Evidence, PredictiveScore


class Part(StrEnum):
    """Parts that methods need and can share: draws, a ladder, fits and modes; or need to know apart from the others."""

    PRIOR = "prior"
    MODE = "mode"
    POSITIVE_MODE = "positive mode"
    MEAN_FIELD = "mean field"
    POSTERIOR = "posterior"
    FLOW = "flow"
    LADDER = "ladder"
    LIKELIHOOD = "likelihood"


#: Parts that a target made from one log density does not have.
_SPLIT = frozenset({Part.PRIOR, Part.LADDER, Part.LIKELIHOOD})

#: The argument of an estimator for each part; estimators make prior draws themselves.
_ARGUMENTS = {
    Part.MODE: "mode",
    Part.POSITIVE_MODE: "mode",
    Part.MEAN_FIELD: "mean_field",
    Part.POSTERIOR: "draws",
    Part.FLOW: "flow",
    Part.LADDER: "ladder",
}


class Parts(Protocol):
    """Shared parts, and the budget of a method's own run."""

    budget: Budget
    given_draws: Draws | None  # passed in by the caller
    blocks: tuple[Any, ...]  # for Chib's method
    progress: bool

    @property
    def improper(self) -> str | None:
        """Reason why the prior is improper; None if unknown or proper."""
        ...

    def part(self, name: str) -> Any:
        """Return a part, made on first use."""
        ...

    def file(self, name: str) -> str | None:
        """Return the checkpoint of a run."""
        ...


Estimate = Callable[[Target, Parts, int], "Evidence | PredictiveScore"]
Refusal = Callable[[Target, Parts], "str | None"]
#: "consistent": converges to the log evidence, with a valid standard error; "unstable": converges, but without a
#: reliable standard error; "approximation": has a bias that does not vanish with more draws; "bound": a lower bound;
#: "score": a predictive score, not a marginal likelihood.
Kind = Literal["consistent", "unstable", "approximation", "bound", "score"]


@dataclass(frozen=True)
class Method:
    """A method that estimates a marginal likelihood.

    Attributes
    ----------
    name : str
        Name of its function.
    needs : frozenset of Part
        Shared parts; ``Part.PRIOR`` if the method draws from the prior, ``Part.LIKELIHOOD`` if it evaluates the
        likelihood by itself.
    estimate : callable
        ``(target, runs, seed) -> Evidence`` or ``PredictiveScore``.
    kind : {"consistent", "unstable", "approximation", "bound", "score"}
    refuses : callable, optional
        ``(target, runs)``: the reason why the method does not apply, or None.
    has_own_run : bool
        True if the method makes its own run within the budget.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Method, Part, harmonic_mean
    >>> method = Method("mine", frozenset({Part.POSTERIOR}), lambda target, runs, seed: harmonic_mean(runs.draws))
    >>> method.source
    'posterior'
    """

    name: str
    needs: frozenset[Part]
    estimate: Estimate
    kind: Kind = "consistent"
    refuses: Refusal | None = None
    has_own_run: bool = False

    @property
    def source(self) -> str:
        """The draws or search behind the estimate; a method with its own run is its own source."""
        order = (Part.POSTERIOR, Part.LADDER, Part.MODE, Part.POSITIVE_MODE, Part.MEAN_FIELD)
        return next((part.value for part in order if part in self.needs), self.name)

    def refusal(self, target: Target, runs: Parts) -> str | None:
        """Return the reason why the method does not apply to a target, or None."""
        if self.kind != "score" and runs.improper is not None:
            return runs.improper
        if (reason := split_refusal(target, self.needs)) is not None:
            return reason
        if self.needs & {Part.PRIOR, Part.LADDER} and not target.can_sample_prior:
            return NO_PRIOR_DRAWS
        return None if self.refuses is None else self.refuses(target, runs)

    @property
    def _place(self) -> tuple[int, int]:
        """Place in tables: cheap methods first, scores last, then by part and order of registration."""
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


def split_refusal(target: Target, needs: Collection[Part]) -> str | None:
    """Return the reason why a method with these needs does not apply to a target of a single log density, or None."""
    if target.is_split or not _SPLIT & set(needs):
        return None
    what = "the likelihood by itself" if Part.LIKELIHOOD in needs else "the prior by itself"
    return (
        f"it needs {what}, and this target is one log density: use bridge_sampling or another method of the posterior, "
        "or make the target by Target.from_functions or Target.from_pyro"
    )


#: Methods by name, in the order of tables.
METHODS: dict[str, Method] = {}


def register(
    function: Callable[..., Any], needs: Iterable[Part], kind: Kind, refuses: Refusal | None, by: Estimate | None
) -> None:
    """Add an estimator to the registry; ``by`` calls it if its arguments are not parts, draws and a seed."""
    arguments = inspect.signature(function).parameters
    parts = frozenset(needs)

    def estimate(target: Target, runs: Parts, seed: int) -> Evidence | PredictiveScore:
        given = {_ARGUMENTS[part]: runs.part(part) for part in parts if part in _ARGUMENTS}
        if "draws" in arguments and "draws" not in given:
            # Never draws made for another method: the result must not depend on the other methods selected.
            given["draws"] = runs.given_draws
        if "seed" in arguments:
            given["seed"] = seed
        found: Evidence | PredictiveScore = function(target, **given)
        return found

    has_own_run = by is not None and kind != "score"  # a score of a comparison only takes fewer draws
    method = Method(function.__name__, parts, by or estimate, kind, refuses, has_own_run)
    METHODS[method.name] = method
    for name in sorted(METHODS, key=lambda name: METHODS[name]._place):  # stable
        METHODS[name] = METHODS.pop(name)


def select(methods: str | Sequence[str]) -> list[Method]:
    """Return the methods of these names, in registry order; ``"all"`` returns every method.

    Raises
    ------
    UnknownNameError
        If a name is not registered; the message suggests the closest name.

    Examples
    --------
    >>> [m.name for m in select(["stepping_stone", "bridge_sampling"])]
    ['bridge_sampling', 'stepping_stone']
    """
    if methods == "all":
        return list(METHODS.values())
    if isinstance(methods, str) and "," in methods:
        raise UnknownNameError(f"{methods!r} is one text; give the names of several methods as a list")
    names = [methods] if isinstance(methods, str) else list(methods) if isinstance(methods, Iterable) else [methods]
    for name in names:
        if name not in METHODS:
            raise unknown_name("evidence method", name, METHODS)
    return [method for name, method in METHODS.items() if name in names]
