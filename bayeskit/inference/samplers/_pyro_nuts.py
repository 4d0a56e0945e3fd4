"""Pyro's No-U-Turn sampler on a Target, one chain after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer.mcmc import NUTS as PyroNUTS
from torch import Tensor

from bayeskit._core.evaluation import Evaluation
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.progress import Bar, look, progress_bar
from bayeskit._core.randomness import global_stream, new_generator, validation_kept
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.inference.samplers._chains import describe
from bayeskit.inference.samplers._driver import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Outcome,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers._starts import starting_points


@takes_draws
def sample_with_pyro(
    target: Target,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    *,
    seed: int = 0,
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    initial: Tensor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> Draws:
    """Draw from the posterior with Pyro's own NUTS, one chain after another.

    For models that cannot be batched, on which :func:`bayeskit.sample` has no advantage. Each chain adapts its own step
    size and diagonal metric.

    A run that ends early, by ``time_budget`` or Ctrl-C, returns the complete chains, or the draws of the first chain if
    none is complete. A checkpoint holds complete chains; a resumed run restarts the incomplete chain.

    Parameters
    ----------
    target : Target
        For example, of a model with control flow on sampled values.
    num_chains : int, default 4
    num_warmup, num_samples : int, default 500 and 1000
        Iterations of each chain: adaptation (discarded), then draws (kept).
    seed : int, default 0
    target_acceptance : float in (0, 1), default 0.8
    max_depth : int, default 10
        At most ``2 ** max_depth - 1`` leapfrog steps per iteration.
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``; by default the best of ten prior draws per
        chain.
    checkpoint : path, optional
        File with the complete chains. If it exists, the run resumes from it; the draws are bitwise identical to those
        of an uninterrupted run.
    checkpoint_seconds : float, default 10
        Least number of seconds between checkpoints, which are written after complete chains.
    time_budget : float, optional
        Seconds, compilation included, after which the draws made so far are returned.
    progress : bool, default True
        Show a progress bar for runs longer than two seconds.

    Returns
    -------
    Draws
        ``sample_stats`` has ``acceptance_rate``, ``diverging``, ``n_steps``, ``tree_depth`` and ``step_size``;
        ``settings["ending"]`` is the reason for the end of the run.

    Raises
    ------
    BudgetError
        If the time budget ends before the first draw; Ctrl-C there raises ``KeyboardInterrupt``.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    SettingsError
        If a setting lies outside its domain.
    InitializationError
        If no chain has a finite density at its start.

    Warns
    -----
    SamplingWarning
        If the run ends early.

    References
    ----------
    Bingham, E. et al. (2019). Pyro: deep universal probabilistic programming. JMLR 20, 1-6.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import sample_with_pyro
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=2)
    >>> draws = sample_with_pyro(target, num_chains=2, num_warmup=30, num_samples=20)
    >>> draws.unconstrained.shape
    torch.Size([2, 20, 2])
    """
    chains = _PyroChains(
        target,
        whole_number("num_chains", num_chains, 1),
        whole_number("num_warmup", num_warmup, 0),
        whole_number("num_samples", num_samples, 1),
        whole_number("seed", seed),
        real_number("target_acceptance", target_acceptance, "(0, 1)"),
        whole_number("max_depth", max_depth, 1),
        initial,
    )
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress=False)
    generator = new_generator(chains.seed, target.device, "pyro")
    with validation_kept(), progress_bar(chains.description, chains.num_chains * chains.length, progress) as bar:
        chains.bar = bar
        outcome = drive(chains, control, generator, target.device)
    rows = chains.results(outcome)
    if rows is None:
        raise nothing_done(outcome.ending, control, f"in the warm-up of the first of {chains.num_chains} chains")
    count, length = rows["position"].shape[:2]
    done = f"after {length} of {num_samples} draws of {count} of {chains.num_chains} chains"
    say_early(outcome.ending, control, chains.description, done)
    return _as_draws(chains, outcome, rows)


class _PyroState(NamedTuple):
    """State shared by sequential chains."""

    start: Tensor  # (n, d)
    num_gradients: Tensor  # of the complete chains


@dataclass
class _PyroChains:
    """Algorithm for :func:`~bayeskit.inference.samplers.drive`; each step is a complete chain."""

    target: Target
    num_chains: int
    num_warmup: int
    num_samples: int
    seed: int
    target_acceptance: float
    max_depth: int
    initial: Tensor | None = None
    description: str = "Pyro's NUTS"
    bar: Bar | None = field(default=None, repr=False)
    _current: _Chain | None = field(default=None, init=False, repr=False)

    @property
    def num_steps(self) -> int:
        """Number of chains."""
        return self.num_chains

    @property
    def length(self) -> int:
        """Iterations of a chain."""
        return self.num_warmup + self.num_samples

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
        return {
            "model": self.target.fingerprint(),
            "algorithm": self.description,
            "pyro": pyro.__version__,
            "num_chains": self.num_chains,
            "num_warmup": self.num_warmup,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "target_acceptance": self.target_acceptance,
            "max_depth": self.max_depth,
            "initial": describe(self.initial),
            "compile": str(self.target.compile),
        }

    def start(self, generator: torch.Generator) -> _PyroState:
        """Find starting points."""
        target = self.target
        beta = torch.ones(self.num_chains, dtype=target.dtype, device=target.device)
        points = starting_points(target, self.num_chains, beta, generator, self.initial)
        return _PyroState(points, torch.zeros((), dtype=torch.int64))

    def advance(
        self, state: _PyroState, iteration: int, generator: torch.Generator
    ) -> tuple[_PyroState, Mapping[str, Tensor]]:
        """Run one chain."""
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        potential = _Potential(self.target, planned_calls=8 * self.length * self.num_chains)
        chain = self._current = _Chain(self, potential, state.start[iteration])
        with global_stream(new_generator(seed)), torch.enable_grad():
            chain.run(self.bar, iteration * self.length)
        return state._replace(num_gradients=state.num_gradients + potential.num_calls), chain.rows()

    def ending(self, state: _PyroState, iteration: int, records: Records) -> Ending | None:
        """End after the last chain."""
        return "finished" if iteration >= self.num_chains else None

    def note(self, state: _PyroState, iteration: int, records: Records) -> str:
        """Return an empty text; chains report their iterations to the bar."""
        return ""

    def results(self, outcome: Outcome) -> dict[str, Tensor] | None:
        """Return the rows of the complete chains, or of the incomplete first chain, ``(n, N, ...)`` each."""
        if outcome.num_iterations:
            return outcome.records.as_dict()
        if self._current is None or not self._current.positions:
            return None
        return {name: value.unsqueeze(0) for name, value in self._current.rows().items()}

    def num_gradients(self, outcome: Outcome) -> int:
        """Return the number of gradient evaluations of the results."""
        if outcome.num_iterations or self._current is None:
            return int(outcome.state.num_gradients)
        return self._current.potential.num_calls


class _Chain:
    """One chain: Pyro's kernel, the draws so far and their statistics."""

    def __init__(self, settings: _PyroChains, potential: _Potential, start: Tensor) -> None:
        self._settings, self.potential = settings, potential
        self._like: dict[str, Any] = {"dtype": start.dtype, "device": start.device}
        self._kernel: Any = PyroNUTS(
            potential_fn=potential,
            step_size=0.1,
            target_accept_prob=settings.target_acceptance,
            max_tree_depth=settings.max_depth,
        )
        self._kernel.initial_params = {"u": start}
        self.positions: list[Tensor] = []
        self._stats: list[tuple[float, int, float]] = []

    def run(self, bar: Bar | None, done: int) -> None:
        """Warm up and sample; Ctrl-C and the time budget are checked before each iteration."""
        kernel, mean_before = self._kernel, 0.0
        kernel.setup(self._settings.num_warmup)
        params = kernel.initial_params
        for iteration in range(self._settings.length):
            look()
            calls_before = self.potential.num_calls
            params = kernel.sample(params)
            if bar is not None and bar.due(done + iteration + 1):
                bar.update(done + iteration + 1, f"step {kernel.step_size:.2g}")
            if iteration < self._settings.num_warmup:
                continue
            kept = len(self.positions) + 1
            # Pyro keeps the running mean of the acceptance probability; differences give the last probability.
            mean = float(kernel._mean_accept_prob)
            num_steps = self.potential.num_calls - calls_before
            self._stats.append((kept * mean - (kept - 1) * mean_before, num_steps, float(kernel.step_size)))
            self.positions.append(params["u"].detach().clone())
            mean_before = mean

    def rows(self) -> dict[str, Tensor]:
        """Return draws, their densities and statistics, ``(N, ...)`` each."""
        position = torch.stack(self.positions)
        # Without a compiled graph, even if there is one: a resumed run may not have it.
        log_prior, log_likelihood = self._settings.target.evaluate(position, compiled=False)
        rates, steps, step_sizes = zip(*self._stats, strict=True)
        device = self._like["device"]
        diverging = torch.zeros(len(self.positions), dtype=torch.bool)
        diverging[self._kernel.diagnostics()["divergences"]] = True
        return {
            "position": position,
            "log_prior": log_prior,
            "log_likelihood": log_likelihood,
            "acceptance_rate": torch.tensor(rates, **self._like).clamp(0, 1),
            "diverging": diverging.to(device),
            "n_steps": torch.tensor(steps, device=device),
            "tree_depth": torch.tensor([math.ceil(math.log2(n + 1)) for n in steps], device=device),
            "step_size": torch.tensor(step_sizes, **self._like),
        }


def _as_draws(chains: _PyroChains, outcome: Outcome, rows: dict[str, Tensor]) -> Draws:
    position, log_prior, log_likelihood = (rows.pop(name) for name in ("position", "log_prior", "log_likelihood"))
    beta = torch.ones(len(position), dtype=position.dtype, device=position.device)
    settings = {
        "sampler": "Pyro NUTS",
        "num_warmup": chains.num_warmup,
        "seed": chains.seed,
        "target_acceptance": chains.target_acceptance,
        "ending": outcome.ending,
    }
    return Draws(
        position,
        log_prior,
        log_likelihood,
        beta,
        rows,
        chains.num_gradients(outcome),
        outcome.seconds,
        settings,
        chains.target,
    )


class _Potential:
    """Potential energy for Pyro, minus the log density of ``{"u": (d,)}``, from the traced or compiled graph."""

    def __init__(self, target: Target, planned_calls: int) -> None:
        self._evaluate = target.evaluator(1, planned_calls)
        self._beta = torch.ones(1, dtype=target.dtype, device=target.device)
        self.num_calls = 0

    def __call__(self, params: dict[str, Tensor]) -> Tensor:
        return _MinusLogDensity.apply(params["u"], self)

    def evaluate(self, u: Tensor) -> Evaluation:
        self.num_calls += 1
        return self._evaluate(u.detach().unsqueeze(0), self._beta)


class _MinusLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, u: Tensor, potential: _Potential) -> Tensor:  # type: ignore[override]
        evaluation = potential.evaluate(u)
        context.save_for_backward(evaluation.gradient[0])
        return -evaluation.log_density[0]

    @staticmethod
    def backward(context: Any, weight: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = context.saved_tensors
        return -weight * gradient, None
