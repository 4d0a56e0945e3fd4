"""Run chains to their end, alone or exchanging states between temperatures."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.chains import Chains, RunSettings
from bayeskit.inference.samplers.climb import Climb
from bayeskit.inference.samplers.driver import Algorithm, Ending, drive, nothing_done, say_early
from bayeskit.inference.samplers.tempering import PriorDraws, Tempering
from bayeskit.target import Target


class RunResult(NamedTuple):
    """What a run leaves behind; ``N`` draws of ``n`` chains."""

    position: Tensor  # (N, n, d)
    records: dict[str, Tensor]  # (N, n) each
    state: AdaptationState
    num_gradients: int  # over all chains, warm-up included
    seconds: float
    ending: Ending
    exchange: tuple[Tensor, Tensor] | None = None  # probabilities (N, T, m) and round trips (m,)


def run(
    target: Target,
    adaptation: Adaptation,
    settings: RunSettings,
    *,
    initial: Tensor | Climb | None = None,
    prior: PriorDraws | None = None,
) -> RunResult:
    """Warm up, sample and record.

    Parameters
    ----------
    target : Target
    adaptation : Adaptation
        The kernel and how it is tuned; its ``kernel.beta`` has one entry per chain.
    settings : RunSettings
    initial : Tensor or Climb, optional
        Starting points as in :func:`starting_points`, or a ladder to climb to them.
    prior : PriorDraws, optional
        Prior draws for every iteration; given them, the temperatures exchange their states.

    Returns
    -------
    RunResult
        Fewer draws than asked for where the run was ended; ``ending`` says by what.

    Raises
    ------
    BudgetError
        If the time budget ended before the first draw.
    CheckpointError
        If a checkpoint exists that belongs to another run.
    InitializationError
        If no chain can start.
    KeyboardInterrupt
        If Ctrl-C came before the first draw.

    Warns
    -----
    SamplingWarning
        If the run was ended after that, by the time budget or by Ctrl-C.
    """
    chains = Chains(target, replace(adaptation, num_samples=settings.num_samples), settings, initial)
    algorithm: Algorithm = chains if prior is None else Tempering(chains, prior)
    generator = new_generator(settings.seed, target.device, settings.stream)
    outcome = drive(algorithm, settings.control, generator, target.device)
    done = outcome.records.count("position")
    if done == 0:
        raise nothing_done(outcome.ending, settings.control, _phase(outcome.num_iterations, adaptation.num_warmup))
    after = f"after {done} of {settings.num_samples} draws a chain"
    say_early(outcome.ending, settings.control, settings.description, after, stacklevel=4)
    records = outcome.records.as_dict()
    state, exchange = outcome.state, None
    if prior is not None:
        exchange = (records.pop("exchange_probability"), state.round_trips)
        state = state.chains
    position = records.pop("position")
    gradients = int(state.num_gradients)
    return RunResult(position, records, state, gradients, outcome.seconds, outcome.ending, exchange)


def _phase(num_iterations: int, num_warmup: int) -> str:
    if num_iterations < num_warmup:
        return f"in iteration {num_iterations + 1} of the {num_warmup} of the warm-up"
    return "before the first draw"
