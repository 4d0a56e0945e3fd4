"""What estimators share: draws, a ladder, fits and modes, each made once, and how much to spend on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, SettingsError
from bayeskit.inference.evidence.improper_priors import improper
from bayeskit.inference.samplers import Ladder, sample, sample_ladder
from bayeskit.inference.samplers.driver import obey
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    from bayeskit.inference.evidence.conditionals import ConjugateBlock
    from bayeskit.inference.evidence.flows import FittedFlow
    from bayeskit.inference.evidence.laplus import PositiveMode
    from bayeskit.inference.evidence.modes import Mode
    from bayeskit.inference.evidence.variational import MeanField

__all__ = ["Budget", "LEAST", "MAKERS", "Material"]


# Budgets for draws.

#: Below these no sampler runs. What is too short for an error is up to each method to say, so that the others stand.
LEAST = {
    "num_chains": 1,
    "num_warmup": 20,
    "num_samples": 1,
    "num_temperatures": 2,
    "ladder_chains": 1,
    "ladder_warmup": 20,
    "ladder_samples": 1,
    "num_reference_temperatures": 2,
    "num_particles": 2,
    "num_replicates": 1,
    "num_live": 4,
}


@dataclass(frozen=True)
class Budget:
    """How much to spend on the draws that estimators share.

    Parameters
    ----------
    num_chains, num_warmup, num_samples : int, default 64, 400, 400
        Of the posterior run.
    num_temperatures, ladder_chains, ladder_warmup, ladder_samples : int, default 50, 32, 150, 1000
        Of the tempered ladder.
    num_reference_temperatures : int, default 10
        Of the generalised stepping stone, from a reference distribution to the posterior; chains and iterations at each
        are those of the ladder.
    target_acceptance : float, default 0.8
    exchange : bool, default False
        Let neighbouring temperatures of the ladder exchange states (parallel tempering).
    num_particles, num_replicates : int, default 64 and 32
        Of sequential Monte Carlo; where populations adapt to themselves they are twice as large and half as many.
    num_live : int, default 500
        Live points of nested sampling; it needs more of them than there are dimensions.
    termination : float, default 1e-3
        Of nested sampling: the share of the evidence that live points may hold at its end. A narrow spike in a broad
        slab needs a much smaller one, such as 1e-15.

    Raises
    ------
    SettingsError
        If a number is not whole, or too small for its sampler to run at all; if ``target_acceptance`` or
        ``termination`` is not between 0 and 1.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Budget
    >>> Budget(num_chains=16).num_samples
    400
    """

    num_chains: int = 64
    num_warmup: int = 400
    num_samples: int = 400
    num_temperatures: int = 50
    ladder_chains: int = 32
    ladder_warmup: int = 150
    ladder_samples: int = 1000
    num_reference_temperatures: int = 10
    target_acceptance: float = 0.8
    exchange: bool = False
    num_particles: int = 64
    num_replicates: int = 32
    num_live: int = 500
    termination: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("target_acceptance", "termination"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), between=(0, 1)))
        if not isinstance(self.exchange, bool):
            raise SettingsError(f"exchange must be True or False, not {self.exchange!r}")


# Draws, a ladder, fits and modes that estimators share, each made once and on demand.


class Material:
    """What the estimators of one target share.

    Parameters
    ----------
    target : Target
    budget : Budget, optional
        Of the parts, and of the runs that methods make for themselves.
    seed : int, default 0
    draws, ladder : optional
        Existing runs to use instead of new ones.
    blocks : sequence of ConjugateBlock, optional
        What Chib's method needs to know of the model.
    checkpoint : path, optional
        Prefix of the checkpoints.
    progress : bool, default False

    Attributes
    ----------
    seconds : dict of float
        What each part took to make, without the parts it was made of.
    given_draws : Draws or None
        Those that were not made here.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import Budget, Material
    >>> material = Material(bk.exact.get("beta_binomial").target(), Budget(2, 50, 20))
    >>> material.draws
    Draws(2 chains x 20 draws, dim 1, sites: p)
    >>> list(material.seconds)
    ['posterior']
    """

    def __init__(
        self,
        target: Target,
        budget: Budget | None = None,
        seed: int = 0,
        *,
        draws: Draws | None = None,
        ladder: Ladder | None = None,
        blocks: tuple[ConjugateBlock, ...] = (),
        checkpoint: str | Path | None = None,
        progress: bool = False,
    ) -> None:
        self.target, self.budget, self.seed = target, budget or Budget(), seed
        self.blocks, self.progress = blocks, progress
        self._checkpoint = checkpoint
        self._parts: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.given_draws = draws
        if draws is not None:
            self._parts["posterior"], self.seconds["posterior"] = draws, draws.seconds
        if ladder is not None:
            self._parts["ladder"], self.seconds["ladder"] = ladder, ladder.draws.seconds

    def file(self, name: str) -> str | None:
        """Return the checkpoint of the run called `name`."""
        return None if self._checkpoint is None else f"{self._checkpoint}.{name}"

    def has(self, name: str) -> bool:
        """Tell whether a part is there already."""
        return name in self._parts

    def part(self, name: str) -> Any:
        """Return the part of that name, made now if it is not there yet.

        Raises
        ------
        SettingsError
            If there is no such part.
        BayeskitError
            If it cannot be made; asked again, it says the same without another try.
        """
        name = str(name)
        if name not in MAKERS:
            raise SettingsError(f"there is no part {name!r} that methods could share; there are {', '.join(MAKERS)}")
        if name not in self._parts:
            begin, others = time.monotonic(), sum(self.seconds.values())
            try:
                self._parts[name] = MAKERS[name](self)
            except BayeskitError as error:
                self._parts[name] = error
            made_meanwhile = sum(self.seconds.values()) - others
            made = self._parts[name]
            # A resumed run has taken longer than its last part.
            earlier = (
                made.seconds if isinstance(made, Draws) else made.draws.seconds if isinstance(made, Ladder) else 0.0
            )
            self.seconds[name] = max(earlier, time.monotonic() - begin - made_meanwhile)
        if isinstance(self._parts[name], BayeskitError):
            raise self._parts[name]
        return self._parts[name]

    @cached_property
    def improper(self) -> str | None:
        """What is known to be improper of the prior; None if nothing is."""
        return improper(self.target)

    @property
    def draws(self) -> Draws:
        """Draws from the posterior."""
        return self.part("posterior")

    @property
    def ladder(self) -> Ladder:
        """Draws at every temperature."""
        return self.part("ladder")

    @property
    def draws_if_there(self) -> Draws | None:
        """Draws from the posterior, if another method has needed them."""
        return self._parts["posterior"] if isinstance(self._parts.get("posterior"), Draws) else None

    @property
    def mode(self) -> Mode:
        """The mode in unconstrained space and its curvature."""
        return self.part("mode")

    @property
    def positive_mode(self) -> PositiveMode:
        """The mode of the density of positive coordinates."""
        return self.part("positive mode")

    @property
    def mean_field(self) -> MeanField:
        """The independent normal distributions that maximise the evidence lower bound."""
        return self.part("mean field")

    @property
    def flow(self) -> FittedFlow:
        """A normalizing flow fitted to the posterior draws."""
        return self.part("flow")


def _posterior(material: Material) -> Draws:
    spend = material.budget
    draws = sample(
        material.target,
        spend.num_chains,
        spend.num_warmup,
        spend.num_samples,
        material.seed,
        target_acceptance=spend.target_acceptance,
        checkpoint=material.file("posterior"),
        progress=material.progress,
    )
    obey(draws.settings.get("ending"))
    return draws


def _ladder(material: Material) -> Ladder:
    spend = material.budget
    ladder = sample_ladder(
        material.target,
        spend.num_temperatures,
        spend.ladder_chains,
        spend.ladder_warmup,
        spend.ladder_samples,
        material.seed,
        exchange=spend.exchange,
        target_acceptance=spend.target_acceptance,
        checkpoint=material.file("ladder"),
        progress=material.progress,
    )
    obey(ladder.draws.settings.get("ending"))
    return ladder


def _mode(material: Material) -> Mode:
    from bayeskit.inference.evidence.modes import find_mode

    # Without the draws that others may have needed: what is found must not depend on who else was asked.
    return find_mode(material.target, draws=material.given_draws, seed=material.seed)


def _positive_mode(material: Material) -> PositiveMode:
    from bayeskit.inference.evidence.laplus import PositiveDensity

    return PositiveDensity(material.target).mode(seed=material.seed)


def _mean_field(material: Material) -> MeanField:
    from bayeskit.inference.evidence.variational import fit_mean_field

    return fit_mean_field(material.target, seed=material.seed)


def _flow(material: Material) -> FittedFlow:
    from bayeskit.inference.evidence.flows import fit_flow

    return fit_flow(material.target, material.draws, seed=material.seed)


MAKERS: dict[str, Callable[[Material], Any]] = {
    "posterior": _posterior,
    "ladder": _ladder,
    "mode": _mode,
    "positive mode": _positive_mode,
    "mean field": _mean_field,
    "flow": _flow,
}
