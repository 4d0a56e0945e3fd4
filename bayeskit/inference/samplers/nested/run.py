"""Nested sampling: the prior is compressed, by steps of known size, towards the largest likelihoods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, InitializationError, SettingsError
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
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.nested.rejection import draw_above
from bayeskit.inference.samplers.nested.result import NestedRun, log_difference
from bayeskit.inference.samplers.nested.slice import ConstrainedSlice, SliceState
from bayeskit.target import Target

EXPECTED_BLOCKS = 50
EVALUATIONS_PER_UPDATE = 5
MIN_SLICE_STEPS = 20
PRIOR_DRAWS_PER_EVALUATION = 1.0  # that slice sampling makes: so many are worth it, for they remember nothing


class NestedState(NamedTuple):
    """The live points and what the dead ones add up to."""

    live: SliceState
    log_volume: Tensor  # (), expected log prior mass above the last threshold
    log_evidence: Tensor  # (), of the dead points
    num_evaluations: Tensor  # ()
    num_nan: Tensor  # ()
    num_stuck: Tensor  # ()


@dataclass(frozen=True)
class NestedSampler:
    """The steps of nested sampling, for :func:`~bayeskit.inference.samplers.driver.drive`.

    Parameters
    ----------
    target : Target
    num_live, num_delete, num_slice_steps : int
    termination : float
    max_blocks : int
    seed : int
        As in :func:`sample_nested`.
    """

    target: Target
    num_live: int
    num_delete: int
    num_slice_steps: int
    termination: float
    max_blocks: int
    seed: int

    def __post_init__(self) -> None:
        for name, minimum in (("num_live", None), ("num_delete", None), ("num_slice_steps", 1), ("max_blocks", 1),
                              ("seed", None)):  # fmt: skip
            object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum))
        least = max(4, self.target.dim + 1)
        if self.num_live < least:
            raise SettingsError(
                f"num_live must be at least {least} in {self.target.dim} dimensions, not {self.num_live}"
            )
        if not 2 <= self.num_delete < self.num_live:
            raise SettingsError(
                f"num_delete must be at least 2 and below num_live={self.num_live}, not {self.num_delete}"
            )
        if not 0 < self.termination < 1:
            raise SettingsError(f"termination must lie between 0 and 1, not {self.termination}")

    @property
    def description(self) -> str:
        """What the bar says."""
        return "nested sampling"

    @property
    def num_steps(self) -> int | None:
        """Unknown: the evidence decides."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return what a resumed run must agree on; when to end may change."""
        return {
            "model": self.target.fingerprint(),
            "algorithm": "nested sampling, from the prior while that is cheap",
            "num_live": self.num_live,
            "num_delete": self.num_delete,
            "num_slice_steps": self.num_slice_steps,
            "seed": self.seed,
            "compile": str(self.target.compile),
        }

    def start(self, generator: torch.Generator) -> NestedState:
        """Draw the live points from the prior."""
        position = self.target.sample_prior(self.num_live, generator).to(self.target.device)
        log_prior, log_likelihood = self.target.evaluate(position, compiled=False)
        _check_start(log_prior, log_likelihood)
        nan = log_likelihood.isnan()
        label = torch.rand(self.num_live, dtype=torch.float64, device=generator.device, generator=generator)
        live = SliceState(position, log_prior, torch.where(nan, -torch.inf, log_likelihood), label)
        zero = torch.zeros((), dtype=torch.float64, device=position.device)
        count = torch.zeros((), dtype=torch.int64, device=position.device)
        return NestedState(live, zero, zero - torch.inf, count + self.num_live, count + nan.sum(), count)

    def advance(
        self, state: NestedState, iteration: int, generator: torch.Generator
    ) -> tuple[NestedState, Mapping[str, Tensor]]:
        """Remove the worst block and put new points above it in its place."""
        k, kept = self.num_delete, self.num_live - self.num_delete
        ordered = _take(state.live, ascending(state.live))
        dead, survivors = _take(ordered, slice(0, k)), _take(ordered, slice(k, None))
        log_volume = state.log_volume + (-1 / self.block_counts).cumsum(0)
        parent = torch.randint(kept, (k,), generator=generator, device=generator.device)
        born, drawn, spent, num_nan, num_stuck = self._born(
            dead, _take(survivors, parent), float(log_volume[-1]), generator
        )
        uniform = torch.rand(k, dtype=torch.float64, device=generator.device, generator=generator)
        rank = num_below(born, survivors)
        row = {
            "position": dead.position,
            "log_prior": dead.log_prior,
            "log_likelihood": dead.log_likelihood,
            "insertion": insertion_quantiles(born, survivors, uniform),
            "start": (parent.to(torch.float64) / kept).index_fill(
                0, torch.arange(drawn, device=rank.device), torch.nan
            ),
            "end": rank.to(torch.float64) / kept,
        }
        outer = torch.cat([state.log_volume.unsqueeze(0), log_volume[:-1]])
        mass = log_difference(outer, log_volume) + dead.log_likelihood
        state = NestedState(
            SliceState(*(torch.cat([old, new]) for old, new in zip(survivors, born, strict=True))),
            log_volume[-1],
            torch.logaddexp(state.log_evidence, mass.logsumexp(0)),
            state.num_evaluations + spent,
            state.num_nan + num_nan,
            state.num_stuck + num_stuck,
        )
        return state, row

    def _born(
        self, dead: SliceState, copies: SliceState, log_share: float, generator: torch.Generator
    ) -> tuple[SliceState, int, Tensor | int, Tensor, Tensor | int]:
        """Return new points above the last death, and how many of them, the first ones, are draws from the prior.

        Then come evaluations spent, how many were NaN, and how many moves stuck. Where fewer prior draws are expected
        to be needed than slice sampling takes evaluations, they are tried first.
        """
        kernel, k = self._kernel(dead), self.num_delete
        found, spent, num_nan = _take(dead, slice(0, 0)), 0, torch.zeros_like(dead.label[0], dtype=torch.int64)
        # A share may be too small for its reciprocal to be a number.
        share = math.exp(log_share)
        if 1 <= share * PRIOR_DRAWS_PER_EVALUATION * self.num_slice_steps * EVALUATIONS_PER_UPDATE:
            found, spent, num_nan = draw_above(self.target, kernel, k, share, generator)
        drawn = len(found.label)
        if drawn == k:
            return found, drawn, spent, num_nan, 0
        moved, info = kernel.step(self.target, copies, generator=generator)
        missing = _take(moved, slice(drawn, None))
        born = SliceState(*(torch.cat(both) for both in zip(found, missing, strict=True)))
        return born, drawn, spent + k * info.num_batches, num_nan + info.num_nan.sum(), info.num_stuck[drawn:].sum()

    def ending(self, state: NestedState, iteration: int, records: Records) -> Ending | None:
        """End when the live points can add only a small share to the evidence."""
        highest = state.live.log_likelihood.max()
        best = state.log_volume + highest
        share = float(best - torch.logaddexp(best, state.log_evidence))
        if math.isnan(share):
            raise DataError(
                f"the log likelihood is {float(highest)} at a live point, so the evidence is infinite; look for a "
                "scale that can become zero"
            )
        if share < math.log(self.termination):
            return "converged"
        return "finished" if iteration >= self.max_blocks else None

    def note(self, state: NestedState, iteration: int, records: Records) -> str:
        """Say how far the prior is compressed."""
        return f"log evidence {float(state.log_evidence):.2f}, log volume {float(state.log_volume):.1f}"

    @property
    def block_counts(self) -> Tensor:
        """How many points are alive at each death of a block, ``(k,)``: ``n``, ``n - 1``, ..."""
        least = self.num_live - self.num_delete
        return torch.arange(self.num_live, least, -1, dtype=torch.float64, device=self.target.device)

    def _kernel(self, dead: SliceState) -> ConstrainedSlice:
        # Given the threshold, the dead are independent of the survivors. A metric of the survivors would know
        # the very points that it moves, and let them drift inwards: in ten dimensions and with 200 live points
        # that costs the evidence two standard errors.
        return ConstrainedSlice(
            threshold=dead.log_likelihood[-1],
            threshold_label=dead.label[-1],
            metric=metric_of(dead.position),
            ensemble=dead.position,
            num_steps=self.num_slice_steps,
            planned_calls=EXPECTED_BLOCKS * self.num_slice_steps * EVALUATIONS_PER_UPDATE,
        )


def sample_nested(
    target: Target,
    num_live: int = 500,
    seed: int = 0,
    *,
    num_delete: int | None = None,
    num_slice_steps: int | None = None,
    termination: float = 1e-3,
    max_blocks: int = 10_000,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> NestedRun:
    """Run nested sampling in the unconstrained space, for any target that can draw from its prior.

    Live points start as prior draws. Again and again the worst block of them dies, which
    compresses the prior by a factor whose distribution is known. As many new points are drawn from the prior above the
    likelihood of the last death: by rejection as long as that takes fewer evaluations, then from copies of survivors
    that are moved by slice sampling.

    Parameters
    ----------
    target : Target
    num_live : int, default 500
        Live points ``n``, more than the dimension; the standard error falls with its square root. Several modes
        need many points each.
    seed : int, default 0
    num_delete : int, optional
        Points ``k`` that die together, below ``num_live``; by default half of them. The metric is that of the dead
        block, and diagonal where the block is not larger than the dimension.
    num_slice_steps : int, optional
        Slice updates of each copy; by default twice the dimension, and at least 20.
    termination : float, default 1e-3
        End when the live points can add no more than this share to the evidence. A smaller one goes on towards
        narrow peaks within broad ones; each factor of two costs about half of ``num_live`` new points.
    max_blocks : int, default 10,000
        End after this many blocks in any case.
    checkpoint, checkpoint_seconds, time_budget, progress
        As in :class:`~bayeskit.inference.samplers.driver.Control`.

    Returns
    -------
    NestedRun

    Raises
    ------
    BudgetError
        If the time budget ended in the first block; Ctrl-C there raises ``KeyboardInterrupt``.
    SettingsError
        If a setting lies outside its domain, or the target cannot draw from its prior.
    InitializationError
        If the likelihood is zero at every prior draw.
    DataError
        If the likelihood is NaN at every prior draw, or infinite.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run was ended early, by the time budget or by Ctrl-C; ``ending`` says by which.

    References
    ----------
    Skilling, J. (2006). Nested sampling for general Bayesian computation. Bayesian
    Analysis 1, 833-859.
    Henderson, R. W., Goggans, P. M. (2014). Parallelized nested sampling. AIP Conference
    Proceedings 1636, 100-105.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_nested
    >>> case = exact.get("beta_binomial")
    >>> run = sample_nested(case.target(), num_live=200, progress=False)
    >>> abs(run.log_evidence - case.log_evidence) < 0.3, run.ending
    (True, 'converged')
    """
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    num_live = whole_number("num_live", num_live)
    sampler = NestedSampler(
        target,
        num_live,
        num_live // 2 if num_delete is None else num_delete,
        max(MIN_SLICE_STEPS, 2 * target.dim) if num_slice_steps is None else num_slice_steps,
        termination,
        max_blocks,
        seed,
    )
    generator = new_generator(seed, target.device, stream="nested sampling")
    outcome = drive(sampler, control, generator, target.device)
    if outcome.num_iterations == 0 and outcome.ending != "converged":
        raise nothing_done(outcome.ending, control, "in the first block")
    say_early(outcome.ending, control, sampler.description, f"after {outcome.num_iterations} blocks")
    return _as_run(sampler, outcome)


def _as_run(sampler: NestedSampler, outcome: Outcome) -> NestedRun:
    """Put the dead points of all blocks and the last live points in a row."""
    state, blocks = outcome.state, outcome.records.as_dict()
    live = _take(state.live, ascending(state.live))

    def column(name: str, last: Tensor) -> Tensor:
        return torch.cat([blocks[name].flatten(0, 1), last]) if blocks else last

    last_counts = torch.arange(len(live.label), 0, -1, dtype=torch.float64, device=live.label.device)
    none = last_counts[:0]
    return NestedRun(
        position=column("position", live.position),
        log_prior=column("log_prior", live.log_prior),
        log_likelihood=column("log_likelihood", live.log_likelihood),
        live_counts=torch.cat([sampler.block_counts.repeat(outcome.num_iterations), last_counts]),
        insertion=column("insertion", none),
        start=column("start", none),
        end=column("end", none),
        num_live=sampler.num_live,
        num_evaluations=int(state.num_evaluations),
        num_nan=int(state.num_nan),
        num_stuck=int(state.num_stuck),
        ending=outcome.ending,
        seconds=outcome.seconds,
        settings={"sampler": "nested sampling"} | {k: v for k, v in sampler.facts().items() if k != "model"},
        target=sampler.target,
    )


def _take(state: SliceState, index: Any) -> SliceState:
    return SliceState(*(tensor[index] for tensor in state))


def ascending(state: SliceState) -> Tensor:
    """Return the order of increasing likelihood, labels deciding between equal ones, ``(n,)``."""
    by_label = state.label.argsort()
    return by_label[state.log_likelihood[by_label].argsort(stable=True)]


def metric_of(position: Tensor) -> Metric:
    """Return the metric of the points' covariance, diagonal where they do not span the space."""
    centred = position - position.mean(0)
    covariance = centred.mT @ centred / (len(position) - 1)  # torch's own cov looks at its weights on the host
    variance = covariance.diagonal().clamp(min=torch.finfo(position.dtype).tiny)
    correlation = covariance * variance.rsqrt() * variance.rsqrt().unsqueeze(-1)
    # A choice by torch.where, because an exception would have to wait for the device.
    factor, failed = torch.linalg.cholesky_ex(correlation)
    flat = (failed != 0) | (factor.diagonal().min() < math.sqrt(torch.finfo(position.dtype).eps))
    factor = torch.where(flat, torch.eye(len(variance), dtype=position.dtype, device=position.device), factor)
    return Metric(variance.sqrt().unsqueeze(-1) * factor, True)


def num_below(born: SliceState, others: SliceState) -> Tensor:
    """Return how many of ``others`` lie below each new point, ``(k,)``."""
    return _is_below(born, others).sum(1)


def insertion_quantiles(born: SliceState, survivors: SliceState, uniform: Tensor) -> Tensor:
    """Return each new point's rank among those it joins, spread over the unit interval, ``(k,)``.

    Points join one after another, so that under correct sampling their ranks are
    independent; ``uniform`` spreads each over its share of the interval.
    """
    earlier = _is_below(born, born).tril(-1).sum(1)
    size = survivors.label.shape[0] + torch.arange(len(uniform), device=uniform.device)
    return (num_below(born, survivors) + earlier + uniform) / (size + 1)


def _is_below(first: SliceState, second: SliceState) -> Tensor:
    """Tell which points of ``second`` lie below those of ``first``, ``(len(first), len(second))``."""
    a, b = first.log_likelihood.unsqueeze(1), second.log_likelihood
    return (b < a) | ((b == a) & (second.label < first.label.unsqueeze(1)))


def _check_start(log_prior: Tensor, log_likelihood: Tensor) -> None:
    if bool(log_likelihood.isnan().all()):
        raise DataError("the log likelihood is NaN at every prior draw; look for NaN or infinite values in the data")
    if bool((log_likelihood == torch.inf).any()):
        raise DataError("the log likelihood is infinite at a prior draw; look for a scale that can become zero")
    if not bool(log_prior.isfinite().all()):
        raise InitializationError(
            "the log prior is not finite at some of its own draws; check that sample_prior draws from log_prior"
        )
    if not bool((log_likelihood > -torch.inf).any()):
        raise InitializationError(
            f"the likelihood is zero at all {len(log_likelihood)} prior draws, so there is no way up; use more live "
            "points, or check that data and likelihood fit"
        )
