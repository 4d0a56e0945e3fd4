"""Adapting chains of one target: what the driver advances when it runs Markov chain Monte Carlo."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from bayeskit._climbing import spread
from bayeskit._settings import whole_number
from bayeskit._statistics import effective_sample_size, r_hat
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.climb import Climb
from bayeskit.inference.samplers.driver import Control, Ending, Records
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.inference.samplers.pathfinder import pathfinder
from bayeskit.target import Target

NOT_RECORDED = ("proposal", "momentum")


@dataclass(frozen=True)
class Convergence:
    """End a run early, once R-hat and effective sample size are good enough for every coordinate.

    Parameters
    ----------
    r_hat : float, default 1.01
        Largest acceptable potential scale reduction.
    effective_draws : float, default 400
        Smallest acceptable effective sample size.
    check_every : int, default 100
        Draws between two looks.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.samplers import Convergence
    >>> target = bk.exact.get("linreg10").target()
    >>> draws = bk.sample(target, 16, 200, 5000, stop=Convergence(effective_draws=500))
    >>> draws.num_draws < 5000, draws.settings["ending"]
    (True, 'converged')
    """

    r_hat: float = 1.01
    effective_draws: float = 400.0
    check_every: int = 100

    def __post_init__(self) -> None:
        if not self.r_hat > 1:
            raise SettingsError(f"r_hat must be above 1, not {self.r_hat}")
        if not 0 < self.effective_draws < math.inf:
            raise SettingsError(f"effective_draws must be positive and finite, not {self.effective_draws}")
        object.__setattr__(self, "check_every", whole_number("check_every", self.check_every, 8))

    def reached(self, position: Tensor, log_density: Tensor) -> bool:
        """Look at draws ``(N, n, d)`` and their log densities ``(N, n)``."""
        x = torch.cat([position.movedim(-1, 0), log_density.unsqueeze(0)]).transpose(-1, -2)
        good = (effective_sample_size(x) >= self.effective_draws) & (r_hat(x) <= self.r_hat)
        return bool(good.all())


@dataclass(frozen=True)
class RunSettings:
    """How long and with how many chains to run.

    Parameters
    ----------
    num_chains : int
        Over all groups.
    num_warmup, num_samples : int
        Iterations.
    seed : int
    description : str
        What the bar and warnings say.
    stop : Convergence, optional
        End before ``num_samples`` once the draws are good enough.
    control : Control
        Checkpoint, time budget, progress.
    stream : str, optional
        Name of the stream of random numbers; by default ``description``.
    """

    num_chains: int
    num_warmup: int
    num_samples: int
    seed: int = 0
    description: str = "sampling"
    stop: Convergence | None = None
    control: Control = field(default_factory=Control)
    stream: str = ""

    def __post_init__(self) -> None:
        for name, least in (("num_chains", 1), ("num_warmup", 0), ("num_samples", 1), ("seed", None)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if not self.stream:
            object.__setattr__(self, "stream", self.description)
        if self.stop is not None and (self.num_chains < 2 or not isinstance(self.stop, Convergence)):
            raise SettingsError("stop takes a Convergence(...), and R-hat needs at least two chains")


@dataclass
class Chains:
    """Adapting chains of one target as an :class:`~bayeskit.inference.samplers.driver.Algorithm`."""

    target: Target
    adaptation: Adaptation
    settings: RunSettings
    initial: Tensor | Climb | None = None
    _tuned: Any = field(default=None, init=False, repr=False)  # the kernel after warm-up, which changes no more

    @property
    def description(self) -> str:
        """What the bar says."""
        return self.settings.description

    @property
    def num_steps(self) -> int:
        """Iterations, warm-up included."""
        return self.adaptation.num_warmup + self.settings.num_samples

    def start(self, generator: torch.Generator) -> AdaptationState:
        """Find starting points and a rough step size."""
        # Starting points first: an impossible start is said before minutes of compilation.
        spent, covariance = 0, None
        if isinstance(self.initial, Climb):
            points, spent = self.initial.points(self.target, self._beta(), generator)
        else:
            points = starting_points(self.target, self.settings.num_chains, self._beta(), generator, self.initial)
        if self.initial is None:
            variance = self.adaptation.initial_variance
            scale = spread(points) if variance is None else variance.to(points).sqrt()
            points, covariance, spent = pathfinder(self.target, points, self._beta(), scale, generator)
        state = self.adaptation.init(self.target, points, generator=generator, covariance=covariance)
        return state._replace(num_gradients=state.num_gradients + spent)

    def advance(
        self, state: AdaptationState, iteration: int, generator: torch.Generator
    ) -> tuple[AdaptationState, Mapping[str, Tensor]]:
        """Move all chains once; after warm-up, record them."""
        if iteration < self.adaptation.num_warmup:
            state, _ = self.adaptation.step(self.target, state, generator=generator)
            return state, {}
        self._tuned = self._tuned or self.adaptation.tuned(state)
        state, info = self.adaptation.advance(self.target, state, self._tuned, generator)
        kernel = state.kernel
        row = {"position": kernel.position, "log_prior": kernel.log_prior, "log_likelihood": kernel.log_likelihood}
        return state, row | {k: v for k, v in info._asdict().items() if k not in NOT_RECORDED}

    def ending(self, state: AdaptationState, iteration: int, records: Records) -> Ending | None:
        """End after the last iteration, or once the draws are good enough."""
        if iteration >= self.num_steps:
            return "finished"
        stop, done = self.settings.stop, iteration - self.adaptation.num_warmup
        if stop is None or done < stop.check_every or done % stop.check_every:
            return None
        density = records["log_prior"] + self._beta() * records["log_likelihood"]
        return "converged" if stop.reached(records["position"], density) else None

    def note(self, state: AdaptationState, iteration: int, records: Records) -> str:
        """Say where the run is."""
        phase = "warm-up" if iteration <= self.adaptation.num_warmup else "sampling"
        text = f"{phase}, {self.settings.num_chains} chains, step {float(state.step.step_size.median()):.2g}"
        if "num_steps" in records:
            text += f", {float(records['num_steps'][-1].double().mean()):.0f} leapfrogs"
        divergences = int(records["diverging"].sum()) if "diverging" in records else 0
        return f"{text}, divergences: {divergences}" if divergences else text

    def facts(self) -> dict[str, Any]:
        """Return everything that must agree between a checkpoint and the run that resumes it."""
        adaptation, settings = self.adaptation, self.settings
        return {
            "model": self.target.fingerprint(),
            "dimension": self.target.dim,
            "num_chains": settings.num_chains,
            "num_warmup": int(adaptation.num_warmup),
            "num_samples": settings.num_samples,
            "seed": settings.seed,
            "stop": None if settings.stop is None else describe(settings.stop),
            "num_groups": adaptation.num_groups,
            "target_acceptance": adaptation.target_acceptance,
            "max_steps": adaptation.max_steps,
            "metric": adaptation.metric,
            "trajectory": describe(adaptation.trajectory),
            "kernel": describe(adaptation.kernel),
            "initial_variance": describe(adaptation.initial_variance),
            "initial": describe(self.initial),
            "compile": str(self.target.compile),
        }

    def _beta(self) -> Tensor:
        beta = torch.as_tensor(self.adaptation.kernel.beta, dtype=self.target.dtype, device=self.target.device)
        return beta.expand(self.settings.num_chains)


def describe(x: Any) -> Any:
    """Return settings as JSON; a tensor by a digest of six leading digits, which survive another machine's rounding."""
    if isinstance(x, Tensor):
        values = [f"{v:.5e}" for v in x.flatten().tolist()]
        return hashlib.sha256(",".join(values).encode()).hexdigest()[:16]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    known = {f.name: describe(getattr(x, f.name)) for f in fields(x) if f.name != "planned_calls"}  # decides speed only
    return {"type": type(x).__name__} | known
