"""Parts shared by estimators (draws, a ladder, fits and modes), made on demand, and their budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, SettingsError
from bayeskit.inference.evidence.diagnostics import Diagnostics
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

#: No sampler runs below these numbers. Each method reports runs too short for its error, so the others stand.
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
    """Sizes of the runs shared by estimators.

    Parameters
    ----------
    num_chains, num_warmup, num_samples : int, default 64, 400, 400
        Posterior run.
    num_temperatures, ladder_chains, ladder_warmup, ladder_samples : int, default 50, 32, 150, 1000
        Tempered ladder.
    num_reference_temperatures : int, default 10
        Generalised stepping stone; chains and iterations per temperature are those of the ladder.
    target_acceptance : float, default 0.8
    exchange : bool, default False
        Exchange states between neighbouring temperatures of the ladder (parallel tempering).
    num_particles, num_replicates : int, default 64 and 32
        Sequential Monte Carlo; the adaptive version uses twice the particles and half the replicates (at least 16).
    num_live : int, default 500
        Live points of nested sampling, more than the dimension.
    termination : float, default 1e-3
        Nested sampling: largest share of the evidence in the live points at the end. A narrow peak inside a broad one
        needs a much smaller value, such as 1e-15.

    Raises
    ------
    SettingsError
        If a number is not whole or too small for its sampler, or if ``target_acceptance`` or ``termination`` is not
        between 0 and 1.

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


# Draws, a ladder, fits and modes shared by estimators, each made once and on demand.


class Material:
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
            raise SettingsError(f"there is no part {name!r} that methods could share; there are {', '.join(MAKERS)}")
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
        """Reason why the prior is improper; None if there is none known."""
        return Diagnostics.of(self.target).improper

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
        """Independent normal distributions that maximise the evidence lower bound."""
        return self.part("mean field")

    @property
    def flow(self) -> FittedFlow:
        """Normalizing flow fitted to the posterior draws."""
        return self.part("flow")


def _posterior(material: Material) -> Draws:
    spend = material.budget
    draws = sample(
        material.target,
        spend.num_chains,
        spend.num_warmup,
        spend.num_samples,
        seed=material.seed,
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
        seed=material.seed,
        exchange=spend.exchange,
        target_acceptance=spend.target_acceptance,
        checkpoint=material.file("ladder"),
        progress=material.progress,
    )
    obey(ladder.draws.settings.get("ending"))
    return ladder


def _mode(material: Material) -> Mode:
    from bayeskit.inference.evidence.modes import find_mode

    # Without draws made for other methods: the result must not depend on the other methods selected.
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
