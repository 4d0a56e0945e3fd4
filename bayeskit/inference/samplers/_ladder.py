"""Tempered ladders: chains at a sequence of temperatures from the prior to the posterior."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from bayeskit._core.compatibility import as_inference_data
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._draws import Draws, as_numpy
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers._adaptation import Adaptation, LongestAxis
from bayeskit.inference.samplers._chains import PriorBlock, PriorDraws, RunSettings, run
from bayeskit.inference.samplers._driver import CHECKPOINT_SECONDS, Control
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._sampling import (
    Group,
    as_draws,
    join_groups,
    prior_variance,
    require_groups,
    run_groups,
)
from bayeskit.inference.samplers._starts import TemperedStarts

_MAX_DENSE = 128  # dimensions, beyond which the matrices of all temperatures cost more than they save


@dataclass(frozen=True)
class Exchange:
    """Exchange rates and round trips of parallel tempering.

    Attributes
    ----------
    rejection : Tensor
        Mean rejection probability of each pair of neighbouring temperatures, shape ``(T - 1,)``.
    round_trips : Tensor
        Round trips between prior and posterior per independent ladder, shape ``(chains,)``.
    num_iterations : int
        Number of iterations of the counts.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Exchange
    >>> Exchange(torch.tensor([0.25, 0.5]), torch.tensor([10, 20]), num_iterations=100).round_trip_rate
    0.15
    """

    rejection: Tensor
    round_trips: Tensor
    num_iterations: int

    @property
    def barrier(self) -> float:
        """Global communication barrier: the sum of rejection rates, independent of the ladder if it is fine."""
        return float(self.rejection.sum())

    @property
    def round_trip_rate(self) -> float:
        """Round trips per iteration and ladder; 0 without iterations."""
        return float(self.round_trips.double().mean()) / max(1, self.num_iterations)

    @property
    def ideal_round_trip_rate(self) -> float:
        """Round trip rate under independent exchanges, ``1 / (2 + 2 sum r / (1 - r))``."""
        return 1 / (2 + 2 * float((self.rejection / (1 - self.rejection).clamp(min=1e-6)).sum()))

    def temperatures(self, beta: Tensor, num_temperatures: int) -> Tensor:
        """Return a ladder of ``num_temperatures`` steps with equal estimated rejection rates.

        Parameters
        ----------
        beta : Tensor
            Ladder of the measured rejection rates, ``(T,)``.
        num_temperatures : int
            Number of steps of the new ladder.
        """
        travelled = torch.cat([self.rejection.new_zeros(1), self.rejection.clamp(min=1e-6).cumsum(0)])
        wanted = torch.linspace(0, float(travelled[-1]), num_temperatures + 1, dtype=torch.float64)
        levels = np.interp(wanted.numpy(), as_numpy(travelled), as_numpy(beta))
        levels[0], levels[-1] = 0.0, 1.0
        return torch.as_tensor(levels)

    def __repr__(self) -> str:
        trips = int(self.round_trips.sum())
        return f"Exchange({len(self.rejection)} pairs, barrier {self.barrier:.3g}, {trips} round trips)"


@dataclass(frozen=True)
class Ladder:
    """Draws at increasing inverse temperatures, from the prior to the posterior.

    Attributes
    ----------
    beta : Tensor
        Shape ``(T,)``, from 0 to 1.
    draws : Draws
        Draws of all chains; chains of one temperature are adjacent.
    exchange : Exchange or None
        Exchange statistics under parallel tempering.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> ladder = sample_ladder(exact.get("beta_binomial").target(), 8, 4, 50, 20, progress=False)
    >>> ladder
    Ladder(9 temperatures x 4 chains x 20 draws, dim 1, sites: p)
    >>> ladder.posterior
    Draws(4 chains x 20 draws, dim 1, sites: p)
    """

    beta: Tensor
    draws: Draws
    exchange: Exchange | None = None

    @property
    def posterior(self) -> Draws:
        """Draws of the chains at ``beta = 1``; cost and settings are those of the whole ladder."""
        return self.draws.select(self.draws.beta == 1)

    @property
    def prior(self) -> Draws:
        """Independent prior draws at ``beta = 0``."""
        return self.draws.select(self.draws.beta == 0)

    def to_arviz(self) -> Any:
        """Return prior and posterior draws as ``InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (ArviZ 1.x).

        Groups are those of :meth:`Draws.to_arviz` at ``beta = 1``, and ``prior`` with the draws at ``beta = 0``.
        """
        return as_inference_data(self.posterior.to_datasets(prior=self.prior))

    @property
    def log_likelihood(self) -> Tensor:
        """Untempered log likelihood of every draw, ``(T, chains, draws)``."""
        return self.draws.log_likelihood.reshape(len(self.beta), -1, self.draws.num_draws)

    @property
    def num_evaluations(self) -> int:
        """Gradient evaluations, warm-up included."""
        return self.draws.num_gradients

    def __repr__(self) -> str:
        draws, levels = self.draws, len(self.beta)
        size = f"{levels} temperatures x {draws.num_chains // levels} chains x {draws.num_draws} draws"
        end = ")" if self.exchange is None else f", {self.exchange!r})"
        return f"Ladder({size}, {draws.space()}{end}"


@takes_draws
def sample_ladder(
    target: Target,
    num_temperatures: int = 50,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    *,
    seed: int = 0,
    beta: Sequence[float] | Tensor | None = None,
    exchange: bool = False,
    target_acceptance: float = 0.8,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    num_groups: int | None = None,
    num_jobs: int = 1,
    progress: bool = True,
) -> Ladder:
    """Draw from the power posteriors ``prior * likelihood ** beta``, all temperatures in one batch.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior.
    num_temperatures : int, default 50
        Number of steps of the ladder; ``beta`` has ``num_temperatures + 1`` values, the quantiles of a Beta(0.3, 1)
        distribution, which are dense near the prior.
    num_chains : int, default 8
        Chains per temperature.
    num_warmup, num_samples : int, default 200 and 500
    seed : int, default 0
    beta : sequence of float, optional
        Custom ladder, increasing from 0 to 1.
    exchange : bool, default False
        Parallel tempering: after each iteration neighbouring temperatures propose to exchange states, which improves
        mixing between modes. Costs one more gradient per iteration.
    num_groups, num_jobs : int, default None and 1
        Number of groups of neighbouring temperatures, and number run in parallel, as in :func:`sample`.
    target_acceptance, checkpoint, checkpoint_seconds, time_budget, progress
        As in :func:`sample`.

    Returns
    -------
    Ladder
        The draws at ``beta = 0`` are independent draws from the prior. Groups that end after different numbers of draws
        are truncated to a common length. Ctrl-C before the last group raises ``KeyboardInterrupt``, because a ladder
        needs all temperatures.

    Raises
    ------
    SettingsError
        If the ladder does not increase from 0 to 1, there are more groups than temperatures above the prior, or
        ``exchange`` is combined with several groups.
    BudgetError
        If the time budget ends before the first draw at every temperature.

    Warns
    -----
    SamplingWarning
        If the run ends early.

    References
    ----------
    Xie, W., Lewis, P. O., Fan, Y., Kuo, L., Chen, M.-H. (2011). Improving marginal
    likelihood estimation for Bayesian phylogenetic model selection. Systematic
    Biology 60, 150-160.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> ladder = sample_ladder(exact.get("beta_binomial").target(), 8, num_warmup=50, num_samples=20)
    >>> ladder.log_likelihood.shape
    torch.Size([9, 8, 20])
    """
    levels = _levels(num_temperatures, beta).to(target.dtype).to(target.device)
    num_chains, num_warmup = whole_number("num_chains", num_chains, 1), whole_number("num_warmup", num_warmup, 0)
    num_samples, seed = whole_number("num_samples", num_samples, 1), whole_number("seed", seed)
    target_acceptance = real_number("target_acceptance", target_acceptance, "(0, 1)")
    wanted = 1 if exchange and num_groups is None else num_groups
    num_groups, num_jobs = require_groups(wanted, num_jobs, len(levels) - 1, "temperatures")
    if exchange and num_groups > 1:
        raise SettingsError(
            "temperatures in different groups cannot exchange their states; leave num_groups=1 with exchange=True, or "
            "run several ladders with different seeds in separate processes"
        )
    control = Control(checkpoint, checkpoint_seconds, time_budget, progress)
    chains = num_chains * (len(levels) - 1)
    settings = RunSettings(
        chains, num_warmup, num_samples, "tempered ladder", None, control, "tempered ladder", seed=seed
    )
    prior = PriorDraws(target, num_chains, seed)
    prior[0]  # raises before the run if the prior cannot be sampled
    variance = prior_variance(target, seed)
    betas = [warm.repeat_interleave(num_chains) for warm in levels[1:].tensor_split(num_groups)]
    starts = TemperedStarts(levels[1:], variance)
    adaptations = [_adaptation(beta, target.dim, num_chains, num_warmup, target_acceptance, variance) for beta in betas]
    facts: dict[str, object] = {
        "num_warmup": num_warmup,
        "seed": seed,
        "target_acceptance": target_acceptance,
        "exchange": exchange,
    }
    travel, skipped = None, num_warmup if exchange else 0
    if num_groups == 1:
        result = run(target, adaptations[0], settings, initial=starts, prior=prior if exchange else None)
        draws = as_draws(target, result, betas[0], HMC(), facts)
        if result.exchange is not None:
            probability, trips = result.exchange
            travel = Exchange(1 - probability.mean((0, 2)), trips, draws.num_draws)
    else:
        groups = [Group(one, len(beta), starts) for one, beta in zip(adaptations, betas, strict=True)]
        done = run_groups(target, groups, settings, num_jobs=num_jobs, all_needed=True)
        draws = join_groups(target, done, betas, HMC(), facts | {"num_groups": num_groups})
    begin = time.monotonic()
    kept = prior.between(skipped, skipped + draws.num_draws)
    draws = _with_prior(target, draws, kept, num_chains * (skipped + draws.num_draws))
    return Ladder(levels, replace(draws, seconds=draws.seconds + time.monotonic() - begin), travel)


def _adaptation(
    beta: Tensor, dim: int, num_chains: int, num_warmup: int, target_acceptance: float, variance: Tensor | None
) -> Adaptation:
    return Adaptation(
        HMC(beta=beta),
        num_warmup,
        num_groups=len(beta) // num_chains,
        target_acceptance=target_acceptance,
        initial_variance=variance,
        metric="auto" if dim <= _MAX_DENSE else "diagonal",
        trajectory=LongestAxis(),
        least_length=0.0,  # the rule has a least length of its own
    )


def _levels(num_temperatures: int, beta: Sequence[float] | Tensor | None) -> Tensor:
    if beta is None:
        num_temperatures = whole_number("num_temperatures", num_temperatures, 2)
        grid = torch.linspace(0, 1, num_temperatures + 1, dtype=torch.float64)
        return torch.as_tensor(scipy.special.betaincinv(0.3, 1.0, grid.numpy()))
    try:
        levels = torch.as_tensor(beta, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(f"beta must be numbers that increase strictly from 0 to 1, not {beta!r}") from error
    if (
        levels.dim() != 1
        or len(levels) < 3
        or bool(levels.isnan().any())
        or levels[0] != 0
        or levels[-1] != 1
        or bool((levels.diff() <= 0).any())
    ):
        raise SettingsError("beta must increase strictly from 0 to 1 in at least two steps")
    return levels


def _with_prior(target: Target, draws: Draws, prior: PriorBlock, prior_evaluations: int) -> Draws:
    """Put exact prior draws, as ``beta = 0``, in front of the ladder's chains."""
    shape = (prior.position.shape[1], draws.num_draws)
    position, log_prior, log_likelihood = (x.movedim(0, 1) for x in prior)
    stats = {
        k: torch.cat([torch.full(shape, _NEUTRAL.get(k, 0), dtype=v.dtype, device=v.device), v])
        for k, v in draws.sample_stats.items()
    }
    return Draws(
        torch.cat([position, draws.unconstrained]),
        torch.cat([log_prior, draws.log_prior]),
        torch.cat([log_likelihood, draws.log_likelihood]),
        torch.cat([draws.beta.new_zeros(len(position)), draws.beta]),
        stats,
        draws.num_gradients + prior_evaluations,
        draws.seconds,
        draws.settings,
        target,
    )


_NEUTRAL = {"acceptance_rate": 1}
