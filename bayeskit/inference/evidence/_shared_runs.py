"""Parts shared by estimators (draws, a ladder, fits and modes), made on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import BayeskitError, SettingsError
from bayeskit.inference.evidence._budget import Budget
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics
from bayeskit.inference.samplers import sample, sample_ladder
from bayeskit.inference.samplers._driver import obey
from bayeskit.inference.samplers._ladder import Ladder

if TYPE_CHECKING:
    from bayeskit.inference.evidence._conditionals import ConjugateBlock
    from bayeskit.inference.evidence._flows import FittedFlow
    from bayeskit.inference.evidence._laplus import PositiveMode
    from bayeskit.inference.evidence._modes import Mode
    from bayeskit.inference.evidence._variational import MeanField

# Draws, a ladder, fits and modes shared by estimators, each made once and on demand.


class SharedRuns:
    """Parts shared by the estimators of one target.

    Parameters
    ----------
    target : Target
    budget : Budget, optional
        Sizes of the parts and of the methods' own runs.
    seed : int, default 0
    draws, ladder : optional
        Existing runs to use instead of new ones.
    blocks : sequence of ConjugateBlock, optional
        Full conditionals for Chib's method.
    checkpoint : path, optional
        Prefix of the checkpoint files.
    progress : bool, default True

    Attributes
    ----------
    seconds : dict of float
        Seconds spent on each part, without the parts it depends on.
    given_draws : Draws or None
        Draws passed in by the caller.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.inference.evidence._shared_runs import SharedRuns
    >>> runs = SharedRuns(bk.exact.get("beta_binomial").target(), Budget(2, 50, 20))
    >>> runs.draws
    Draws(2 chains x 20 draws, dim 1, sites: p)
    >>> list(runs.seconds)
    ['posterior']
    """

    def __init__(
        self,
        target: Target,
        budget: Budget | None = None,
        *,
        seed: int = 0,
        draws: Draws | None = None,
        ladder: Ladder | None = None,
        blocks: tuple[ConjugateBlock, ...] = (),
        checkpoint: str | Path | None = None,
        progress: bool = True,
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
        """Return the path of the checkpoint of the run `name`."""
        return None if self._checkpoint is None else f"{self._checkpoint}.{name}"

    def has(self, name: str) -> bool:
        """Return whether the part `name` exists already."""
        return name in self._parts

    def part(self, name: str) -> Any:
        """Return the part `name`, made now if it does not exist yet.

        Raises
        ------
        SettingsError
            If there is no part of this name.
        BayeskitError
            If the part cannot be made; later calls raise the same error without another attempt.
        """
        name = str(name)
        if name not in MAKERS:
            raise SettingsError(f"there is no shared part {name!r}; the parts are {', '.join(MAKERS)}")
        if name not in self._parts:
            begin, others = time.monotonic(), sum(self.seconds.values())
            try:
                self._parts[name] = MAKERS[name](self)
            except BayeskitError as error:
                self._parts[name] = error
            made_meanwhile = sum(self.seconds.values()) - others
            made = self._parts[name]
            # The duration of a resumed run includes that of its earlier parts.
            earlier = (
                made.seconds if isinstance(made, Draws) else made.draws.seconds if isinstance(made, Ladder) else 0.0
            )
            self.seconds[name] = max(earlier, time.monotonic() - begin - made_meanwhile)
        if isinstance(self._parts[name], BayeskitError):
            raise self._parts[name]
        return self._parts[name]

    @property
    def improper(self) -> str | None:
        """Reason why the prior is improper; None if unknown or proper."""
        return Diagnostics(self.target).improper

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
        """Draws from the posterior if they exist already, else None."""
        return self._parts["posterior"] if isinstance(self._parts.get("posterior"), Draws) else None


def _posterior(runs: SharedRuns) -> Draws:
    spend = runs.budget
    draws = sample(
        runs.target,
        **asdict(spend.posterior),
        seed=runs.seed,
        target_acceptance=spend.target_acceptance,
        checkpoint=runs.file("posterior"),
        progress=runs.progress,
    )
    obey(draws.settings.get("ending"))
    return draws


def _ladder(runs: SharedRuns) -> Ladder:
    settings = asdict(runs.budget.ladder)
    del settings["num_reference_temperatures"]
    ladder = sample_ladder(
        runs.target,
        **settings,
        seed=runs.seed,
        target_acceptance=runs.budget.target_acceptance,
        checkpoint=runs.file("ladder"),
        progress=runs.progress,
    )
    obey(ladder.draws.settings.get("ending"))
    return ladder


def _mode(runs: SharedRuns) -> Mode:
    from bayeskit.inference.evidence._modes import find_mode

    # Without draws made for other methods: the result must not depend on the other methods selected.
    return find_mode(runs.target, draws=runs.given_draws, seed=runs.seed)


def _positive_mode(runs: SharedRuns) -> PositiveMode:
    from bayeskit.inference.evidence._laplus import PositiveDensity

    return PositiveDensity(runs.target).mode(seed=runs.seed)


def _mean_field(runs: SharedRuns) -> MeanField:
    from bayeskit.inference.evidence._variational import fit_mean_field

    return fit_mean_field(runs.target, seed=runs.seed)


def _flow(runs: SharedRuns) -> FittedFlow:
    from bayeskit.inference.evidence._flows import fit_flow

    return fit_flow(runs.target, runs.draws, seed=runs.seed)


MAKERS: dict[str, Callable[[SharedRuns], Any]] = {
    "posterior": _posterior,
    "ladder": _ladder,
    "mode": _mode,
    "positive mode": _positive_mode,
    "mean field": _mean_field,
    "flow": _flow,
}
