"""The one loop: warm-up, sampling, progress, checkpoint and resume."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.checkpoint import load_checkpoint, save_checkpoint
from bayeskit.inference.samplers.hmc import HMC, HMCState
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.target import Target

EXPECTED_STEPS = 8
CHECKPOINT_SECONDS = 10.0


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
    checkpoint : path, optional
        File to write the state to and, if it exists, to resume from.
    checkpoint_seconds : float, default 10
        Seconds between two checkpoints; 0 writes one after every iteration.
    progress : bool, default True
        Show a bar on anything over two seconds.
    description : str
        What the bar says.
    """

    num_chains: int
    num_warmup: int
    num_samples: int
    seed: int = 0
    checkpoint: str | Path | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    progress: bool = True
    description: str = "sampling"

    def __post_init__(self) -> None:
        if self.num_chains < 1:
            raise SettingsError(f"num_chains must be at least 1, not {self.num_chains}")
        if self.num_samples < 1:
            raise SettingsError(f"num_samples must be at least 1, not {self.num_samples}")


class RunResult(NamedTuple):
    """What a run leaves behind; ``N`` draws of ``n`` chains."""

    position: Tensor  # (N, n, d)
    records: dict[str, Tensor]  # (N, n) each
    state: AdaptationState
    num_gradients: int  # over all chains, warm-up included
    seconds: float


RECORDED = ("log_prior", "log_likelihood", "acceptance_rate", "diverging", "energy", "num_steps")


def run(target: Target, adaptation: Adaptation, settings: RunSettings, *, initial: Tensor | None = None) -> RunResult:
    """Warm up, sample and record.

    Parameters
    ----------
    target : Target
    adaptation : Adaptation
        The kernel and how it is tuned; its ``kernel.beta`` has one entry per chain.
    settings : RunSettings
    initial : Tensor, optional
        Starting points as in :func:`starting_points`.

    Returns
    -------
    RunResult

    Raises
    ------
    CheckpointError
        If a checkpoint exists that belongs to another run.
    InitializationError
        If no chain can start.
    """
    begin = time.monotonic()
    generator = new_generator(settings.seed, target.device, settings.description)
    total = adaptation.num_warmup + settings.num_samples
    kernel = replace(adaptation.kernel, planned_calls=EXPECTED_STEPS * total)
    adaptation = replace(adaptation, kernel=kernel)
    beta = torch.as_tensor(kernel.beta, dtype=target.dtype, device=target.device).expand(settings.num_chains)
    with one_thread(), torch.no_grad():
        # Starting points first: an impossible start is said before minutes of compilation.
        start = starting_points(target, settings.num_chains, beta, generator, initial)
        state = adaptation.init(target, start, generator=generator)
        records = _allocate(settings, target)
        facts = _facts(target, adaptation, settings, beta) | {"start": _digest(start)}
        iteration = 0
        if settings.checkpoint is not None and Path(settings.checkpoint).exists():
            state, saved, iteration = load_checkpoint(settings.checkpoint, state, generator, facts)
            for name, tensor in saved.items():
                records[name][: tensor.shape[0]] = tensor.to(target.device)
        loop = _Loop(target, adaptation, settings, generator, facts, records, state, iteration)
        state = loop.run(total)
    position = records.pop("position")
    gradients = int(records["gradients"].sum())
    del records["gradients"]
    return RunResult(position, records, state, gradients, time.monotonic() - begin)


@dataclass
class _Loop:
    target: Target
    adaptation: Adaptation
    settings: RunSettings
    generator: torch.Generator
    facts: dict[str, Any]
    records: dict[str, Tensor]
    state: AdaptationState
    iteration: int

    def run(self, total: int) -> AdaptationState:
        warmup = self.adaptation.num_warmup
        tuned: HMC | None = None
        last_save = time.monotonic()
        with progress_bar(self.settings.description, total, self.settings.progress) as bar:
            while self.iteration < total:
                if self.iteration < warmup:
                    self.state, info = self.adaptation.step(self.target, self.state, generator=self.generator)
                else:
                    tuned = tuned or self.adaptation.tuned(self.state)
                    kernel_state, info = tuned.step(self.target, self.state.kernel, generator=self.generator)
                    self.state = self.state._replace(kernel=kernel_state, iteration=self.state.iteration + 1)
                    self._record(self.iteration - warmup, kernel_state, info)
                self.records["gradients"][self.iteration] = int(info.num_steps[0]) * len(info.num_steps)
                self.iteration += 1
                if bar.due(self.iteration):
                    bar.update(self.iteration, self._note(warmup))
                if self._due(last_save) or (self.settings.checkpoint is not None and self.iteration == total):
                    self._save()
                    last_save = time.monotonic()
        return self.state

    def _record(self, row: int, state: HMCState, info: Any) -> None:
        self.records["position"][row] = state.position
        for name in RECORDED:
            value = getattr(state, name) if name in HMCState._fields else getattr(info, name)
            self.records[name][row] = value

    def _note(self, warmup: int) -> str:
        divergences = int(self.records["diverging"][: max(0, self.iteration - warmup)].sum())
        phase = "warm-up" if self.iteration <= warmup else "sampling"
        step = float(self.state.step_size.median())
        text = (
            f"{phase}, {self.settings.num_chains} chains, step {step:.2g}, {float(self.state.num_steps):.0f} leapfrogs"
        )
        return f"{text}, divergences: {divergences}" if divergences else text

    def _due(self, last_save: float) -> bool:
        return self.settings.checkpoint is not None and time.monotonic() - last_save >= self.settings.checkpoint_seconds

    def _save(self) -> None:
        done = max(0, self.iteration - self.adaptation.num_warmup)
        records = {k: v[: self.iteration if k == "gradients" else done] for k, v in self.records.items()}
        path = self.settings.checkpoint
        if path is not None:
            save_checkpoint(path, self.state, records, self.generator, self.facts, self.iteration)


def _allocate(settings: RunSettings, target: Target) -> dict[str, Tensor]:
    n, count = settings.num_chains, settings.num_samples
    like = {"dtype": target.dtype, "device": target.device}
    records = {"position": torch.zeros(count, n, target.dim, **like)}  # type: ignore[call-overload]
    for name in RECORDED:
        records[name] = torch.zeros(count, n, **like)  # type: ignore[call-overload]
    records["diverging"] = torch.zeros(count, n, dtype=torch.bool, device=target.device)
    records["num_steps"] = torch.zeros(count, n, dtype=torch.int64, device=target.device)
    records["gradients"] = torch.zeros(settings.num_warmup + count, dtype=torch.int64, device=target.device)
    return records


def _digest(x: Tensor | None) -> str:
    """Identify a tensor by its six leading digits, which survive another machine's rounding."""
    values = [] if x is None else [f"{v:.5e}" for v in x.flatten().tolist()]
    return hashlib.sha256(",".join(values).encode()).hexdigest()[:16]


def _facts(target: Target, adaptation: Adaptation, settings: RunSettings, beta: Tensor) -> dict[str, Any]:
    """Everything that must agree between a checkpoint and the run that resumes it."""
    kernel = adaptation.kernel
    return {
        "model": target.fingerprint(),
        "num_chains": settings.num_chains,
        "num_warmup": settings.num_warmup,
        "num_samples": settings.num_samples,
        "seed": settings.seed,
        "num_groups": adaptation.num_groups,
        "beta": [float(b) for b in beta.reshape(adaptation.num_groups, -1)[:, 0]],
        "target_acceptance": adaptation.target_acceptance,
        "max_steps": adaptation.max_steps,
        "step_size": _digest(torch.as_tensor(kernel.step_size)),
        "step_size_jitter": kernel.step_size_jitter,
        "num_steps_jitter": kernel.num_steps_jitter,
        "max_energy_error": kernel.max_energy_error,
        "initial_inverse_mass": _digest(adaptation.initial_inverse_mass),
        "compile": str(target.compile),
        "torch": torch.__version__,
    }
