"""Posterior draws from minibatches."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._statistics import mean_error
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.samplers.driver import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Outcome,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.inference.samplers.stochastic_gradient.sgld import StochasticGradientInfo, settled
from bayeskit.inference.samplers.stochastic_gradient.target import MinibatchTarget
from bayeskit.target import Target

TOO_HOT = 2.0
FEWEST_DRAWS = 16  # to judge a temperature by
MOST_NAMED = 10


class StochasticGradientKernel(Protocol):
    """What :func:`sample_stochastic_gradient` needs of SGLD, PreconditionedSGLD or SGHMC."""

    @property
    def planned_calls(self) -> int:
        """Gradient calls planned in all."""
        ...

    def init(self, target: MinibatchTarget, position: Tensor, *, generator: torch.Generator) -> Any:
        """Return the state at ``position``."""
        ...

    def step(
        self, target: MinibatchTarget, state: Any, *, generator: torch.Generator
    ) -> tuple[Any, StochasticGradientInfo]:
        """Return the next state."""
        ...


def sample_stochastic_gradient(
    target: MinibatchTarget,
    kernel: StochasticGradientKernel,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    thinning: int = 1,
    seed: int = 0,
    *,
    initial: Tensor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> Draws:
    """Draw from a posterior with gradients estimated from minibatches.

    The draws carry the bias of a finite step, which no number of them removes. It is measured by
    ``sample_stats["temperature"]``: for a normal posterior and independent minibatches, its mean is the
    factor by which the variances are too large. Minibatches of an epoch partly cancel each
    other's noise, so there it errs on the safe side.

    Parameters
    ----------
    target : MinibatchTarget
    kernel : SGLD, PreconditionedSGLD or SGHMC
    num_chains : int, default 4
        Each draws its own minibatches, so that chains are independent.
    num_warmup : int, default 1000
        Steps thrown away.
    num_samples : int, default 1000
        Draws kept of each chain.
    thinning : int, default 1
        Steps from one draw to the next.
    seed : int, default 0
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``; by default each chain takes the
        best of ten prior draws, judged by a minibatch.
    checkpoint : path, optional
        File that holds the run's state; if it exists, the run resumes from it and
        ends bit for bit as if it had not been interrupted.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds after which the run ends with the draws it has; Ctrl-C ends it likewise.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    Draws
        ``log_prior`` is exact. ``log_likelihood`` is NaN, because no step sees all of the data, so no
        estimator can take a noisy value for the real one; the minibatch estimates are in
        ``sample_stats["log_likelihood_estimate"]``. Further ``sample_stats`` are ``step_size``,
        ``diverging`` (since the draw before, the chain met a density or gradient that is not finite, and
        stayed) and ``temperature``. ``num_gradients`` counts minibatch gradients.

    Raises
    ------
    BudgetError
        If the time budget ended before the first draw; Ctrl-C there raises ``KeyboardInterrupt``.
    InitializationError
        If no chain has a finite density at its start.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If there is nothing to run, or the target has no minibatches.

    Warns
    -----
    SamplingWarning
        If chains diverged, were much too hot, or the run was ended early.

    References
    ----------
    Nemeth, C., Fearnhead, P. (2021). Stochastic gradient Markov chain Monte Carlo. Journal of
    the American Statistical Association 116, 433-450.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> from bayeskit.inference.samplers import SGLD
    >>> from bayeskit.inference.samplers import sample_stochastic_gradient
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y), subsample_size=20) as rows:
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
    >>> y = torch.linspace(-1.0, 3.0, 100, dtype=torch.float64)
    >>> target = MinibatchTarget.from_pyro(model, y)
    >>> draws = sample_stochastic_gradient(target, SGLD(step_size=1e-3), num_samples=2000)
    >>> abs(float(draws.values()["mean"].mean()) - 100 / 101) < 0.05
    True
    """
    if not isinstance(target, MinibatchTarget):
        raise SettingsError(
            f"sample_stochastic_gradient takes a MinibatchTarget, not a {type(target).__name__}; make one with "
            "MinibatchTarget.from_pyro(model, data)"
        )
    num_chains = whole_number("num_chains", num_chains, 1)
    num_warmup = whole_number("num_warmup", num_warmup, 0)
    num_samples = whole_number("num_samples", num_samples, 1)
    thinning = whole_number("thinning", thinning, 1)
    seed = whole_number("seed", seed)
    kernel = replace(cast(Any, kernel), planned_calls=num_warmup + num_samples * thinning)
    kernel = settled(kernel, torch.empty((), dtype=target.dtype, device=target.device))
    run = StochasticGradientRun(target, kernel, num_chains, num_warmup, num_samples, thinning, seed, initial)
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    outcome = drive(run, control, new_generator(seed, target.device, "stochastic gradient"), target.device)
    done = outcome.records.count("position")
    if done == 0:
        raise nothing_done(outcome.ending, control, f"after {outcome.num_iterations} steps, before the first draw")
    say_early(outcome.ending, control, run.description, f"after {done} of {num_samples} draws a chain")
    draws = _as_draws(run, outcome)
    _warn(run, outcome, draws)
    return draws


class RunState(NamedTuple):
    """A kernel's state, and how often each chain diverged so far."""

    kernel: Any
    divergences: Tensor  # (n,)


@dataclass(frozen=True)
class StochasticGradientRun:
    """The algorithm that :func:`~bayeskit.inference.samplers.driver.drive` advances."""

    target: MinibatchTarget
    kernel: StochasticGradientKernel
    num_chains: int
    num_warmup: int
    num_samples: int
    thinning: int
    seed: int
    initial: Tensor | None = None
    description: str = "stochastic gradient"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.num_warmup + self.num_samples * self.thinning

    def facts(self) -> dict[str, Any]:
        """Return everything that must agree between a checkpoint and the run that resumes it."""
        return {
            "model": self.target.fingerprint(),
            "kernel": describe(replace(cast(Any, self.kernel), planned_calls=1)),
            "num_chains": self.num_chains,
            "num_warmup": self.num_warmup,
            "num_samples": self.num_samples,
            "thinning": self.thinning,
            "seed": self.seed,
            "batch_size": self.target.batch_size,
            "num_data": self.target.num_data,
            "row_order": describe(self.target.row_order),
            "compile": str(self.target.compile),
            "initial": describe(self.initial),
        }

    def start(self, generator: torch.Generator) -> RunState:
        """Find starting points on one random minibatch, and begin there."""
        target, n = self.target, self.num_chains
        _, rows = target.next_rows(target.start_rows(1, generator), generator)
        beta = torch.ones(n, dtype=target.dtype, device=target.device)
        position = starting_points(target.on_rows(rows[0]), n, beta, generator, self.initial)
        state = self.kernel.init(target, position, generator=generator)
        return RunState(state, torch.zeros(n, dtype=torch.int64, device=target.device))

    def advance(
        self, state: RunState, iteration: int, generator: torch.Generator
    ) -> tuple[RunState, Mapping[str, Tensor]]:
        """Take one step of every chain; record it if it is one to keep."""
        kernel_state, info = self.kernel.step(self.target, state.kernel, generator=generator)
        state = RunState(kernel_state, state.divergences + info.diverging)
        done = iteration + 1 - self.num_warmup
        if done <= 0 or done % self.thinning:
            return state, {"divergences": state.divergences} if done == 0 else {}
        return state, {
            "position": kernel_state.position,
            "log_prior": kernel_state.log_prior,
            "log_likelihood_estimate": kernel_state.log_likelihood,
            "step_size": info.step_size,
            "temperature": info.temperature,
            "divergences": state.divergences,
        }

    def ending(self, state: RunState, iteration: int, records: Records) -> Ending | None:
        """End after the last step."""
        return "finished" if iteration >= self.num_steps else None

    def note(self, state: RunState, iteration: int, records: Records) -> str:
        """Return phase, chains and divergences."""
        phase = "warm-up" if iteration <= self.num_warmup else "sampling"
        divergences = int(state.divergences.sum())
        text = f"{phase}, {self.num_chains} chains"
        return f"{text}, divergences: {divergences}" if divergences else text


def describe(settings: Any) -> str:
    """Write settings down so that equal ones read alike; tensors as digests."""
    if isinstance(settings, Tensor):
        values = ",".join(f"{float(v):.12e}" for v in settings.flatten().tolist())
        return f"{tuple(settings.shape)} {hashlib.sha256(values.encode()).hexdigest()[:16]}"
    if is_dataclass(settings):
        parts = (f"{f.name}={describe(getattr(settings, f.name))}" for f in fields(settings))
        return f"{type(settings).__name__}({', '.join(parts)})"
    return repr(settings)


def _as_draws(run: StochasticGradientRun, outcome: Outcome) -> Draws:
    target, n = run.target, run.num_chains
    per_chain = {
        name: outcome.records[name].movedim(0, 1).contiguous()
        for name in ("position", "log_prior", "log_likelihood_estimate", "step_size", "temperature")
    }
    position, log_prior = per_chain.pop("position"), per_chain.pop("log_prior")
    # The row before the first draw, where there was a warm-up, is the count at its end.
    counts = outcome.records["divergences"]
    if run.num_warmup == 0:
        counts = torch.cat([counts.new_zeros(1, n), counts])
    diverging = (counts.diff(dim=0) > 0).movedim(0, 1).contiguous()
    settings = {
        "sampler": type(run.kernel).__name__,
        "kernel": describe(replace(cast(Any, run.kernel), planned_calls=1)),
        "num_warmup": run.num_warmup,
        "thinning": run.thinning,
        "seed": run.seed,
        "batch_size": target.batch_size,
        "ending": outcome.ending,
    }
    return Draws(
        position,
        log_prior,
        torch.full_like(log_prior, torch.nan),
        torch.ones(n, dtype=target.dtype, device=target.device),
        per_chain | {"diverging": diverging},
        n * (outcome.num_iterations + 1),
        outcome.seconds,
        settings,
        cast(Target, target),  # it has the part of Target that draws use
    )


def _warn(run: StochasticGradientRun, outcome: Outcome, draws: Draws) -> None:
    divergences = outcome.state.divergences
    lost = divergences.nonzero().flatten().tolist()
    if lost:
        _say(
            f"chains {_named(lost)} diverged, {int(divergences.sum())} times in all: their density or gradient was not "
            "finite, and they stayed where they were; lower the step size, or start them closer to the posterior. "
            "The draws of the other chains are not touched"
        )
    if draws.num_draws < FEWEST_DRAWS:
        return
    temperature = draws.sample_stats["temperature"]
    mean, error = temperature.mean(1), mean_error(temperature.unsqueeze(1))
    hot = [chain for chain in (mean - 4 * error > TOO_HOT).nonzero().flatten().tolist() if chain not in lost]
    if hot:
        _say(
            f"chains {_named(hot)} have a mean temperature up to {float(mean[hot].max()):.3g} instead of 1: drift or "
            "gradient noise outweighs the noise added, so the draws spread far too widely or have not converged yet; "
            "lower the step size, take larger minibatches, or warm up for longer"
        )


def _named(chains: list[int]) -> str:
    if len(chains) <= MOST_NAMED:
        return str(chains)
    return f"{chains[:MOST_NAMED]} and {len(chains) - MOST_NAMED} more"


def _say(message: str) -> None:
    warnings.warn(message, SamplingWarning, stacklevel=4)
