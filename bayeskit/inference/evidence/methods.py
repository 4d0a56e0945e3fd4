"""The registry of estimators: what each is called and what it needs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bayeskit.draws import Draws
from bayeskit.errors import SettingsError, UnknownNameError
from bayeskit.inference.evidence.budget import Budget
from bayeskit.inference.evidence.ladder.path_sampling import path_sampling
from bayeskit.inference.evidence.ladder.stepping_stone import stepping_stone
from bayeskit.inference.evidence.mode.laplace_importance_sampling import laplace_importance_sampling
from bayeskit.inference.evidence.posterior.bridge_sampling import bridge_sampling
from bayeskit.inference.evidence.posterior.harmonic_mean import harmonic_mean
from bayeskit.inference.evidence.prior.naive_monte_carlo import naive_monte_carlo
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.sequential.nested_sampling import nested_sampling
from bayeskit.inference.evidence.sequential.smc import smc
from bayeskit.inference.samplers import Ladder, sample_nested, sample_smc
from bayeskit.inference.samplers.driver import obey
from bayeskit.target import Target

Needs = Literal["density", "prior", "posterior", "ladder"]


@dataclass(frozen=True)
class Material:
    """What estimators share.

    Attributes
    ----------
    draws : Draws or None
        From the posterior.
    ladder : Ladder or None
        From every temperature.
    budget : Budget
        For methods that make runs of their own.
    checkpoint : str or None
        Prefix of those runs' checkpoints.
    progress : bool
    """

    draws: Draws | None = None
    ladder: Ladder | None = None
    budget: Budget = Budget()
    checkpoint: str | None = None
    progress: bool = False

    def file(self, name: str) -> str | None:
        """Return the checkpoint of the run called ``name``."""
        return None if self.checkpoint is None else f"{self.checkpoint}.{name}"


Estimate = Callable[[Target, Material, int], Evidence]


@dataclass(frozen=True)
class Method:
    """One estimator.

    Attributes
    ----------
    name : str
        The name of its function.
    needs : {"density", "prior", "posterior", "ladder"}
        The most expensive thing it needs: only the density, prior draws, posterior
        draws, or the tempered ladder.
    estimate : callable
        ``(target, material, seed) -> Evidence``.
    """

    name: str
    needs: Needs
    estimate: Estimate


def _needed(x: Draws | Ladder | None, what: str) -> Any:
    if x is None:
        raise SettingsError(f"this method needs {what}; pass them or call it through evidence.compare")
    return x


def _posterior(function: Callable[..., Evidence]) -> Estimate:
    return lambda target, material, seed: function(target, _needed(material.draws, "posterior draws"), seed=seed)


def _tempered(function: Callable[..., Evidence]) -> Estimate:
    return lambda target, material, seed: function(target, _needed(material.ladder, "a tempered ladder"))


def _checked(function: Callable[..., Evidence]) -> Estimate:
    """Let a method that can do without posterior draws check itself against them where they exist."""
    return lambda target, material, seed: function(target, draws=material.draws, seed=seed)


def _alone(function: Callable[..., Evidence]) -> Estimate:
    return lambda target, material, seed: function(target, seed=seed)


def _smc(target: Target, material: Material, seed: int) -> Evidence:
    spend = material.budget
    run = sample_smc(
        target,
        spend.num_particles,
        spend.num_replicates,
        seed,
        checkpoint=material.file("smc"),
        progress=material.progress,
    )
    obey(run.ending)
    return smc(target, run, seed=seed)


def _nested(target: Target, material: Material, seed: int) -> Evidence:
    run = sample_nested(
        target, material.budget.num_live, seed, checkpoint=material.file("nested"), progress=material.progress
    )
    obey(run.ending)
    return nested_sampling(target, run, seed=seed)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("naive_monte_carlo", "prior", _alone(naive_monte_carlo)),
        Method("laplace_importance_sampling", "density", _checked(laplace_importance_sampling)),
        Method("harmonic_mean", "posterior", _posterior(harmonic_mean)),
        Method("bridge_sampling", "posterior", _posterior(bridge_sampling)),
        Method("path_sampling", "ladder", _tempered(path_sampling)),
        Method("stepping_stone", "ladder", _tempered(stepping_stone)),
        Method("smc", "prior", _smc),
        Method("nested_sampling", "prior", _nested),
    )
}


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
    names = [methods] if isinstance(methods, str) else list(methods)
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, 1, 0.3)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownNameError(f"no evidence method is called {name!r}{hint} Known are: {', '.join(METHODS)}")
    return [method for name, method in METHODS.items() if name in names]
