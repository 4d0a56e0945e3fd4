"""What estimators share: draws, a ladder, fits and modes, each made once and only if somebody asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, SettingsError
from bayeskit.inference.evidence.budget import Budget
from bayeskit.inference.evidence.improper_priors import improper
from bayeskit.inference.samplers import Ladder, sample, sample_ladder
from bayeskit.inference.samplers.driver import obey
from bayeskit.target import Target

if TYPE_CHECKING:
    from bayeskit.inference.evidence.conjugate.blocks import ConjugateBlock
    from bayeskit.inference.evidence.flows.fitted_flow import FittedFlow
    from bayeskit.inference.evidence.laplus.positive import PositiveMode
    from bayeskit.inference.evidence.modes import Mode
    from bayeskit.inference.evidence.variational.mean_field import MeanField


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
    from bayeskit.inference.evidence.laplus.positive import PositiveDensity

    return PositiveDensity(material.target).mode(seed=material.seed)


def _mean_field(material: Material) -> MeanField:
    from bayeskit.inference.evidence.variational.mean_field import fit_mean_field

    return fit_mean_field(material.target, seed=material.seed)


def _flow(material: Material) -> FittedFlow:
    from bayeskit.inference.evidence.flows.fitted_flow import fit_flow

    return fit_flow(material.target, material.draws, seed=material.seed)


MAKERS: dict[str, Callable[[Material], Any]] = {
    "posterior": _posterior,
    "ladder": _ladder,
    "mode": _mode,
    "positive mode": _positive_mode,
    "mean field": _mean_field,
    "flow": _flow,
}
