"""Sums over observations of the log mean of a power of their likelihood, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._pareto_smoothing import num_largest, shape_of_largest
from bayeskit._statistics import effective_sample_size, mean_error, pareto_shape
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError
from bayeskit.inference.evidence.checks import (
    MAX_PARETO_SHAPE,
    MIN_EFFECTIVE,
    belongs,
    finite_chains,
    posterior_problems,
    with_rounding,
    without_nan,
)
from bayeskit.inference.evidence.posterior.tails import largest_shape
from bayeskit.inference.evidence.predictive.observations import Observations
from bayeskit.inference.evidence.predictive.result import PredictiveScore
from bayeskit.target import Target

KEPT = 2**26  # log likelihoods, half a gigabyte; of more, they are computed a second time
AT_A_TIME = 2**21
TAILS_AT_A_TIME = 512
LEAST_LARGEST = 26
MAX_BIAS = 0.5  # standard errors
REMEDY = "run longer chains, or use generalized.cross_validation, which draws anew where an observation is left out"


class _Sums(NamedTuple):
    """What one pass over the draws leaves behind, for each term ``(n,)``."""

    log_mean: Tensor  # of the weights
    effective: Tensor  # number of weights
    shape: Tensor  # Pareto k of the weights
    farthest: Tensor  # from zero that a log weight has been


class _Terms:
    """Log weights of draws, ``sign`` times the log likelihood of each term, in chunks of draws."""

    def __init__(self, observations: Observations, u: Tensor, sign: float) -> None:
        self._observations, self._u, self._sign = observations, u, sign
        self._rows = max(1, AT_A_TIME // len(observations.counts))
        self._kept: list[Tensor] | None = [] if len(u) * len(observations.counts) <= KEPT else None
        self.problems: list[str] = []
        self.num_evaluations = 0

    def __iter__(self) -> Iterator[Tensor]:
        if self._kept:
            yield from self._kept
            return
        for rows in self._u.split(self._rows):
            each, problems = without_nan(self._observations.log_likelihood(rows))
            self.problems = self.problems or problems
            self.num_evaluations += len(rows)
            log_weights = self._sign * each
            if self._kept is not None:
                self._kept.append(log_weights)
            yield log_weights


def pointwise_score(method: str, target: Target, draws: Draws, sign: float) -> PredictiveScore:
    """Add up ``sign log mean(likelihood ** sign)`` over the observations of ``target``.

    Parameters
    ----------
    method : str
    target : Target
    draws : Draws
        From its posterior.
    sign : float
        -1 for the harmonic mean of each observation's likelihood, 1 for the mean.

    Returns
    -------
    PredictiveScore

    Raises
    ------
    DrawsError
        If the draws come from another target.
    ModelError
        If single observations have no likelihood.
    """
    belongs(draws, target)
    draws = finite_chains(draws)
    observations = Observations(target)
    counts = observations.counts
    terms = _Terms(observations, draws.unconstrained.flatten(0, 1), sign)
    sums = _summed(terms, draws.log_likelihood.numel())
    score = sign * float(counts @ sums.log_mean)
    influence = torch.cat([(chunk - sums.log_mean).exp().sub(1) @ counts for chunk in terms])
    influence = influence.reshape(draws.log_likelihood.shape)
    error = float(mean_error(influence))

    problems, diagnostics = posterior_problems(draws)
    problems += terms.problems
    # Masked observations have likelihood one wherever one looks, up to rounding where sites were summed out.
    num_observations = float(counts[sums.farthest > 8 * torch.finfo(target.dtype).eps].sum())
    heavy = float(counts[sums.shape > MAX_PARETO_SHAPE].sum())
    if heavy > 0:
        problems.append(
            f"a few draws decide the terms of {heavy:.0f} of {num_observations:.0f} observations (Pareto k up to "
            f"{float(sums.shape.max()):.2f} > {MAX_PARETO_SHAPE}): {REMEDY}"
        )
    slowness = influence.numel() / min(float(effective_sample_size(influence)), influence.numel())
    if sign < 0:
        # Reciprocals of likelihoods have no bound, and what decides the error of the sum is the tail of the sum.
        shape = pareto_shape((influence + counts.sum()).clamp(min=torch.finfo(influence.dtype).tiny).log())
        limit = largest_shape(influence.numel(), slowness)
        if not shape <= limit:
            problems.append(
                f"a few draws decide the score, whose variance may be infinite (Pareto k {shape:.2f} > {limit:.2f}, "
                f"one half less the error of the fit): {REMEDY}"
            )
        diagnostics["pareto_shape_of_sum"] = shape
    effective = float(sums.effective.min()) / slowness
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"an observation's term rests on {effective:.0f} effective draws: run longer chains")
    # The logarithm of a mean lies below that of the expectation, and all terms on the same side.
    excess = (1 / sums.effective - 1 / influence.numel()).clamp(min=0) * slowness
    bias = -sign * 0.5 * float(counts @ excess)
    rounding = 8 * torch.finfo(torch.float64).eps * max(abs(score), 1.0)
    if not abs(bias) <= MAX_BIAS * error + rounding:
        problems.append(f"the score is off by about {bias:+.2g} nats, its second-order bias: run longer chains")
    if not float(sums.log_mean.abs().max()) < torch.inf:
        problems.append("an observation has likelihood zero at draws from the posterior: look at the model's support")
    diagnostics |= {
        "num_observations": num_observations,
        "pareto_shape": float(sums.shape.max()),
        "observations_above_pareto_limit": heavy,
        "effective_weights": effective,
        "bias": bias,
    }
    return PredictiveScore(
        method,
        score,
        with_rounding(error, draws.log_likelihood),
        draws.num_gradients + terms.num_evaluations,
        tuple(problems),
        diagnostics,
    )


def _summed(terms: _Terms, num_draws: int) -> _Sums:
    """Add up weights and their squares, and keep the largest of each term for the fit of their tail."""
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    largest: Tensor | None = None
    farthest = torch.zeros(())
    for chunk in terms:
        sums = [torch.stack([*sums, chunk.logsumexp(0)]).logsumexp(0)]
        squares = [torch.stack([*squares, (2 * chunk).logsumexp(0)]).logsumexp(0)]
        farthest = torch.maximum(farthest.to(chunk), chunk.abs().amax(0))
        # A shorter tail where the tails of all terms together would not fit into memory.
        length = min(num_largest(num_draws), max(KEPT // chunk.shape[1], LEAST_LARGEST))
        together = chunk if largest is None else torch.cat([largest, chunk])
        largest = together.topk(min(length, len(together)), 0).values
    if largest is None:
        raise DrawsError("there are no draws")
    rows = largest.flip(0).T.split(TAILS_AT_A_TIME)
    shape = torch.cat([shape_of_largest(part.contiguous()) for part in rows])
    return _Sums(sums[0] - math.log(num_draws), (2 * sums[0] - squares[0]).exp(), shape, farthest)
