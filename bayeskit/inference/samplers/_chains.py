"""Adaptive chains of one target, parallel tempering, and the function that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.convergence import stands_still
from bayeskit._core.inputs import affordable, real_number, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size, r_hat
from bayeskit._core.texts import short_repr
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError
from bayeskit.inference._known_modes import KnownModes
from bayeskit.inference.samplers._adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers._centring import Centring
from bayeskit.inference.samplers._driver import (
    Algorithm,
    Control,
    Ending,
    Place,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers._hmc import choose
from bayeskit.inference.samplers._starts import (
    TemperedStarts,
    local_scale,
    pathfinder,
    scaled_starting_points,
    starting_points,
)

# Adaptive chains of one target, as an algorithm for the driver.

_NOT_RECORDED = ("proposal", "momentum")
_MOST_RESTARTS = 2
_MOST_MEASURED = 200  # coordinates whose scales are measured at given starting points


@dataclass(frozen=True)
class Convergence:
    """Early stopping rule: R-hat and effective sample size of every coordinate reach their thresholds.

    Parameters
    ----------
    r_hat : float, default 1.01
        Largest acceptable R-hat.
    effective_draws : float, default 400
        Smallest acceptable effective sample size.
    check_every : int, default 100
        Number of draws between checks.

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
        real_number("effective_draws", self.effective_draws, "(0, inf)")
        object.__setattr__(self, "check_every", whole_number("check_every", self.check_every, 8))

    def reached(self, position: Tensor, log_density: Tensor) -> bool:
        """Return whether draws ``(N, n, d)`` with log densities ``(N, n)`` satisfy the rule."""
        x = torch.cat([position.movedim(-1, 0), log_density.unsqueeze(0)]).transpose(-1, -2)
        good = (effective_sample_size(x) >= self.effective_draws) & (r_hat(x) <= self.r_hat)
        return bool(good.all()) and not bool(stands_still(position.movedim(0, 1)).any())


@dataclass(frozen=True)
class RunSettings:
    """Number of chains, length of the run, seed and stopping rules.

    Parameters
    ----------
    num_chains : int
        Total over all groups.
    num_warmup, num_samples : int
        Iterations of each chain.
    seed : int
    description : str
        Text of the progress bar and of warnings.
    stop : Convergence, optional
        Early stopping rule.
    control : Control
        Checkpoint, time budget and progress bar.
    stream : str, optional
        Name of the random stream; ``description`` by default.
    thinning : int, default 1
        Transitions for each draw that is kept, after warm-up.
    reparameterize : bool, default False
        Whether location-scale sites are centred as the draws of the warm-up suggest.
    """

    num_chains: int
    num_warmup: int
    num_samples: int
    seed: int = field(default=0, kw_only=True)
    description: str = "sampling"
    stop: Convergence | None = None
    control: Control = field(default_factory=Control)
    stream: str = ""
    thinning: int = field(default=1, kw_only=True)
    reparameterize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        least_of = (("num_chains", 1), ("num_warmup", 0), ("num_samples", 1), ("thinning", 1), ("seed", None))
        for name, least in least_of:
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if not self.stream:
            object.__setattr__(self, "stream", self.description)
        if self.stop is not None and (self.num_chains < 2 or not isinstance(self.stop, Convergence)):
            raise SettingsError("stop must be a Convergence(...), and its R-hat needs at least two chains")


@dataclass
class Chains:
    """Adaptive chains of one target as an :class:`~bayeskit.inference.samplers.Algorithm`."""

    target: Target
    adaptation: Adaptation
    settings: RunSettings
    initial: Tensor | TemperedStarts | None = None
    _tuned: Any = field(default=None, init=False, repr=False)  # the kernel after warm-up, constant from then on

    __repr__ = short_repr

    @property
    def description(self) -> str:
        """Text of the progress bar."""
        return self.settings.description

    @property
    def num_steps(self) -> int:
        """Iterations, warm-up included."""
        return self.adaptation.num_warmup + self.settings.num_samples

    def start(self, generator: torch.Generator, again: bool = False) -> AdaptationState:
        """Find starting points and a rough step size."""
        # Starting points first: an invalid start raises before minutes of compilation.
        spent, covariance = 0, None
        if isinstance(self.initial, TemperedStarts):
            points, spent = self.initial.points(self.target, self._beta(), generator)
        elif self.initial is not None:
            points = starting_points(self.target, self.settings.num_chains, self._beta(), generator, self.initial)
            if self.adaptation.initial_variance is None and points.shape[1] <= _MOST_MEASURED:
                everywhere = torch.arange(points.shape[1], device=points.device)
                scales, spent = local_scale(self.target, points, self._beta(), everywhere)
                covariance = scales.log().median(0).values.exp().square()
        else:
            points, scale, looked = scaled_starting_points(
                self.target, self.settings.num_chains, self._beta(), generator, centre=not again
            )
            points, covariance, spent, ends = pathfinder(self.target, points, self._beta(), scale, generator)
            covariance, spent = scale.square() if covariance is None else covariance, looked + spent
            known = KnownModes.of(self.target)
            known.note(ends, "starts", independent=True)
            # Chains start in modes that an earlier run has missed, as far as there are chains.
            for chain, mode in enumerate(known.unvisited[: len(points) - 1]):
                points[chain] = mode.position
        state = self.adaptation.init(self.target, points, generator=generator, covariance=covariance)
        return state._replace(num_gradients=state.num_gradients + spent)

    def advance(
        self, state: AdaptationState, iteration: int, generator: torch.Generator
    ) -> tuple[AdaptationState, Mapping[str, Tensor]]:
        """Run one iteration of all chains; after warm-up, also return their records."""
        if iteration < self._begin(state):
            state, _ = self.adaptation.step(self.target, state, generator=generator)
            return self._again(state, generator) if self.begins_again(state, iteration + 1) else state, {}
        if iteration == self._begin(state) and self.settings.reparameterize:
            state = self.adaptation.with_jumps(self.target, state, generator)
        self._tuned = self._tuned or self.adaptation.tuned(state)
        state, info = self.adaptation.advance(self.target, state, self._tuned, generator)
        for _ in range(self.settings.thinning - 1):
            diverging = info.diverging
            state, info = self.adaptation.advance(self.target, state, self._tuned, generator)
            info = info._replace(diverging=info.diverging | diverging)  # a divergence between draws counts
        kernel = state.kernel
        row = {"position": kernel.position, "log_prior": kernel.log_prior, "log_likelihood": kernel.log_likelihood}
        return state, row | {k: v for k, v in info._asdict().items() if k not in _NOT_RECORDED}

    def _begin(self, state: AdaptationState) -> int:
        """Return the iteration of the first draw: after the warm-up, and after those that it repeats."""
        return self.adaptation.num_warmup * (1 + int(state.restarts))

    def begins_again(self, state: AdaptationState, iteration: int) -> bool:
        """Tell whether the warm-up, which ends before ``iteration``, leaves a coordinate of a chain standing still."""
        if iteration != self._begin(state) or self.initial is not None or int(state.restarts) == _MOST_RESTARTS:
            return False
        return bool(self.adaptation.stands_still(state).any())

    def _again(self, state: AdaptationState, generator: torch.Generator) -> AdaptationState:
        """Begin the warm-up again, from other candidates."""
        fresh = self.start(generator, again=True)
        return fresh._replace(
            restarts=state.restarts + 1,
            num_gradients=fresh.num_gradients + state.num_gradients,
            planned_calls=state.planned_calls,
        )

    def ending(self, state: AdaptationState, iteration: int, records: Records) -> Ending | None:
        """Return how the run ends after the last iteration or by the stopping rule; None to continue."""
        done = iteration - self._begin(state)
        if done >= self.settings.num_samples:
            return "finished"
        stop = self.settings.stop
        if stop is None or done < stop.check_every or done % stop.check_every:
            return None
        density = records["log_prior"] + self._beta() * records["log_likelihood"]
        return "converged" if stop.reached(records["position"], density) else None

    def note(self, state: AdaptationState, iteration: int, records: Records) -> str:
        """Return the text on the state of the run for the progress bar."""
        phase = "sampling" if iteration > self._begin(state) else "warm-up, again" if state.restarts else "warm-up"
        text = f"{phase}, {self.settings.num_chains} chains, step {float(state.step.step_size.median()):.2g}"
        if "num_steps" in records:
            text += f", {float(records.blocks('num_steps')[-1][-1].double().mean()):.0f} leapfrogs"
        divergences = sum(int(x.sum()) for x in records.blocks("diverging")) if "diverging" in records else 0
        return f"{text}, divergences: {divergences}" if divergences else text

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
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
            **({} if settings.thinning == 1 else {"thinning": settings.thinning}),
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
    """Return settings as JSON; tensors as digests of six leading digits, which are equal on all machines."""
    if isinstance(x, Tensor):
        values = [f"{v:.5e}" for v in x.flatten().tolist()]
        return hashlib.sha256(",".join(values).encode()).hexdigest()[:16]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    known = {f.name: describe(getattr(x, f.name)) for f in fields(x) if f.name != "planned_calls"}  # decides speed only
    return {"type": type(x).__name__} | known


# Parallel tempering: non-reversible exchanges between neighbouring temperatures of a ladder.

BLOCK = 64


class PriorBlock(NamedTuple):
    """Independent prior draws, ``m`` for each of ``N`` iterations."""

    position: Tensor  # (N, m, d)
    log_prior: Tensor  # (N, m)
    log_likelihood: Tensor  # (N, m)


class PriorDraws:
    """Independent prior draws, ``num_chains`` for each iteration, made in blocks on demand."""

    # Each block has its own random stream, so a resumed run makes the same draws without storing them.

    def __init__(self, target: Target, num_chains: int, seed: int) -> None:
        self._target, self.num_chains, self._seed = target, num_chains, seed
        self._blocks: dict[int, PriorBlock] = {}

    def __getitem__(self, iteration: int) -> PriorBlock:
        """Return the draws of one iteration: ``(m, d)``, ``(m,)`` and ``(m,)``."""
        block = self._block(iteration // BLOCK)
        return PriorBlock(*(x[iteration % BLOCK] for x in block))

    def between(self, start: int, stop: int) -> PriorBlock:
        """Return the draws of the iterations from ``start`` to before ``stop``."""
        blocks = [self._block(i) for i in range(start // BLOCK, -(-stop // BLOCK))]
        cut = slice(start % BLOCK, start % BLOCK + stop - start)
        return PriorBlock(*(torch.cat(column)[cut] for column in zip(*blocks, strict=True)))

    def _block(self, index: int) -> PriorBlock:
        if index not in self._blocks:
            target, m = self._target, self.num_chains
            position = target.sample_prior(
                BLOCK * m, seed=new_generator(self._seed, stream=f"ladder prior, block {index}")
            )
            position = position.to(target.device)
            log_prior, log_likelihood = target.evaluate(position, compiled=False)
            shape = (BLOCK, m)
            self._blocks[index] = PriorBlock(
                position.reshape(*shape, -1), log_prior.reshape(shape), log_likelihood.reshape(shape)
            )
        return self._blocks[index]


class TemperingState(NamedTuple):
    """State of ``m`` independent ladders of ``T`` temperatures above the prior."""

    chains: AdaptationState
    replica: Tensor  # (T + 1, m), int64: the replica at each temperature, the prior's first
    # (T + 1, m), int64, per replica: 1 if its last end visited is the prior, 0 if the posterior or neither.
    heading: Tensor
    round_trips: Tensor  # (m,), int64, since warm-up


@dataclass(frozen=True)
class Tempering:
    """Chains of a temperature ladder with an exchange of neighbours after each step, as a driver's algorithm."""

    chains: Chains  # in groups of m neighbouring chains, whose ``beta`` increases from group to group
    prior: PriorDraws  # a new draw in each iteration at inverse temperature zero

    @property
    def description(self) -> str:
        """Text of the progress bar."""
        return self.chains.description

    @property
    def num_steps(self) -> int:
        """Iterations, warm-up included."""
        return self.chains.num_steps

    def start(self, generator: torch.Generator) -> TemperingState:
        """Start the chains, with each replica at its own temperature."""
        state = self.chains.start(generator)
        levels, m = self.chains.adaptation.num_groups + 1, self.prior.num_chains
        place = torch.arange(levels * m, device=self.chains.target.device).reshape(levels, m)
        heading = torch.zeros_like(place)
        return TemperingState(state, place, heading, torch.zeros_like(heading[0]))

    def advance(
        self, state: TemperingState, iteration: int, generator: torch.Generator
    ) -> tuple[TemperingState, Mapping[str, Tensor]]:
        """Move all chains once, then exchange every second pair of neighbours."""
        chains, row = self.chains.advance(state.chains, iteration, generator)
        state = state._replace(chains=chains)
        accept, probability = self._decide(state, iteration, generator)
        state = self._exchange(state, accept, iteration)
        if row:
            row = {**row, "exchange_probability": probability}
        return self._count(state, iteration >= self.chains.adaptation.num_warmup), row

    def _decide(self, state: TemperingState, iteration: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return which pairs exchange, ``(T, m)`` bool, and the exchange probability of every pair, ``(T, m)``."""
        kernel = state.chains.kernel
        m = self.prior.num_chains
        log_likelihood = torch.cat([self.prior[iteration].log_likelihood, kernel.log_likelihood]).reshape(-1, m)
        beta = torch.as_tensor(self.chains.adaptation.kernel.beta).to(log_likelihood)[::m]
        width = torch.diff(beta, prepend=beta.new_zeros(1)).unsqueeze(-1)
        # A prior draw of likelihood zero never moves up; NaN compares as false.
        probability = (width * (log_likelihood[:-1] - log_likelihood[1:])).exp().clamp(max=1.0)
        uniform = torch.rand(probability.shape, generator=generator, device=probability.device).to(probability)
        # Alternating even and odd pairs deterministically makes replicas travel instead of diffuse (Okabe et al. 2001;
        # Syed et al. 2022).
        turn = (torch.arange(len(probability), device=probability.device) + iteration) % 2 == 0
        return (uniform < probability) & turn.unsqueeze(-1), probability.nan_to_num(nan=0.0)

    def _exchange(self, state: TemperingState, accept: Tensor, iteration: int) -> TemperingState:
        levels, m = state.replica.shape
        up = torch.zeros_like(state.replica)
        up[:-1] += accept.to(up)
        up[1:] -= accept.to(up)
        source = torch.arange(levels, device=up.device).unsqueeze(-1) + up  # (T + 1, m)
        kernel = state.chains.kernel
        position = torch.cat([self.prior[iteration].position, kernel.position]).reshape(levels, m, -1)
        position = position.gather(0, source.unsqueeze(-1).expand_as(position))[1:].reshape(kernel.position.shape)
        # Densities could be exchanged with the positions, but the gradient depends on the temperature.
        inner = self.chains.adaptation.planned(state.chains)
        fresh = inner.evaluate(self.chains.target, position)
        moved = (up[1:] != 0).reshape(-1)
        kernel = choose(moved, fresh, kernel)._replace(iteration=kernel.iteration)
        chains = state.chains._replace(
            kernel=kernel, num_gradients=state.chains.num_gradients + kernel.position.shape[0]
        )
        return state._replace(chains=chains, replica=state.replica.gather(0, source))

    def _count(self, state: TemperingState, counting: bool) -> TemperingState:
        """Count round trips of replicas, from the prior to the posterior and back."""
        heading = state.heading.flatten()
        top, bottom = state.replica[-1], state.replica[0]
        arrived = heading[top] == 1
        heading = heading.index_fill(0, top, 0).index_fill(0, bottom, 1)
        trips = state.round_trips + arrived.to(torch.int64) if counting else state.round_trips
        return state._replace(heading=heading.reshape(state.heading.shape), round_trips=trips)

    def ending(self, state: TemperingState, iteration: int, records: Records) -> Ending | None:
        """Return the ending of the chains."""
        return self.chains.ending(state.chains, iteration, records)

    def note(self, state: TemperingState, iteration: int, records: Records) -> str:
        """Return the text behind the progress bar."""
        trips = float(state.round_trips.double().mean())
        return f"{self.chains.note(state.chains, iteration, records)}, {trips:.0f} round trips"

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
        return self.chains.facts() | {"exchange": True, "prior_block": BLOCK}


# Complete runs, with or without exchanges between temperatures.


class RunResult(NamedTuple):
    """Result of a run: ``N`` draws of ``n`` chains."""

    position: Tensor  # (N, n, d)
    records: dict[str, Tensor]  # (N, n) each
    state: AdaptationState
    num_gradients: int  # over all chains, warm-up included
    seconds: float
    ending: Ending
    place: Place  # from where a longer run goes on
    exchange: tuple[Tensor, Tensor] | None = None  # probabilities (N, T, m) and round trips (m,)


def run(
    target: Target,
    adaptation: Adaptation,
    settings: RunSettings,
    *,
    initial: Tensor | TemperedStarts | None = None,
    prior: PriorDraws | None = None,
    place: Place | None = None,
) -> RunResult:
    """Run warm-up and sampling and return the recorded draws.

    Parameters
    ----------
    target : Target
    adaptation : Adaptation
        Kernel and its tuning; ``kernel.beta`` has one entry per chain.
    settings : RunSettings
    initial : Tensor or TemperedStarts, optional
        Starting points as in :func:`starting_points`, or a tempering path to find them.
    prior : PriorDraws, optional
        Prior draws for every iteration; if given, neighbouring temperatures exchange states.
    place : Place, optional
        Where a shorter run ended that this one continues.

    Returns
    -------
    RunResult
        With the draws after ``place``. An early end leaves fewer draws; ``ending`` is the reason.

    Raises
    ------
    BudgetError
        If the time budget ends before the first draw.
    CheckpointError
        If the checkpoint belongs to another run.
    InitializationError
        If no chain has a finite density at its start.
    KeyboardInterrupt
        On Ctrl-C before the first draw.

    Warns
    -----
    SamplingWarning
        If the time budget or Ctrl-C ends the run after the first draw.
    """
    transitions = affordable("num_samples * thinning", settings.num_samples * settings.thinning)
    chains = Chains(target, replace(adaptation, num_samples=transitions), settings, initial)
    centring = Centring.of(chains) if settings.reparameterize and prior is None else None
    algorithm: Algorithm = centring or (chains if prior is None else Tempering(chains, prior))
    generator = new_generator(settings.seed, target.device, settings.stream)
    outcome = drive(algorithm, settings.control, generator, target.device, place)
    done = outcome.records.count("position")
    if done == 0:
        raise nothing_done(outcome.ending, settings.control, _phase(outcome.num_iterations, adaptation.num_warmup))
    after = f"after {done} {'more' if place else f'of {settings.num_samples}'} draws a chain"
    say_early(outcome.ending, settings.control, settings.description, after)
    records = outcome.records.as_dict()
    state, exchange = outcome.state, None
    if prior is not None:
        exchange = (records.pop("exchange_probability"), state.round_trips)
        state = state.chains
    position = records.pop("position")
    if centring is not None:
        position, records["log_prior"] = centring.original(state, position, records["log_prior"])
        state = state.chains
    gradients = int(state.num_gradients)
    return RunResult(position, records, state, gradients, outcome.seconds, outcome.ending, outcome.place, exchange)


def _phase(num_iterations: int, num_warmup: int) -> str:
    if num_iterations < num_warmup:
        return f"in iteration {num_iterations + 1} of the {num_warmup} of the warm-up"
    return "before the first draw"
