"""Predictive scores: sums of log predictive densities of single observations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE, MIN_EFFECTIVE
from bayeskit._core.statistics import effective_sample_size, mean_error, num_largest, pareto_shape, shape_of_largest
from bayeskit._draws import Draws
from bayeskit._logdensity.observations import Observations
from bayeskit._logdensity.target import Target
from bayeskit.errors import DrawsError, ModelError
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import with_rounding, without_nan
from bayeskit.inference.evidence._judging._weights import largest_shape
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import PredictiveScore

# Sums over observations of the log mean of a power of their likelihood, in bounded memory.

KEPT = 2**26  # log likelihoods, half a gigabyte; more are computed a second time
AT_A_TIME = 2**24
_COMPARED, _LEAST_COMPARED = 2**24, 500  # log likelihoods in a comparison, of no fewer draws
TAILS_AT_A_TIME = 512
_LEAST_LARGEST = 26
_MAX_BIAS = 0.5  # standard errors
_REMEDY = "run longer chains, or use held_out.cross_validation_evidence, which samples again without the observation"


def scores_refusal(target: Target) -> str | None:
    """Return the reason why the observations of ``target`` cannot be scored one by one, or None."""
    try:
        Observations(target)
    except ModelError as error:
        return str(error)
    return None


class _Sums(NamedTuple):
    """Results of one pass over the draws, for each term ``(n,)``."""

    log_mean: Tensor  # of the weights
    effective: Tensor  # number of weights
    shape: Tensor  # Pareto k of the weights
    farthest: Tensor  # largest absolute log weight


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


def _fewer_draws(target: Target, parts: Parts) -> Draws:
    """Return draws for a score in a comparison, fewer where there are many observations, but not too few."""
    draws: Draws = parts.part(Part.POSTERIOR)
    wanted = max(_LEAST_COMPARED, _COMPARED // len(Observations(target).counts))
    return draws.thin(max(1, draws.log_likelihood.numel() // wanted))


def _pointwise_score(method: str, target: Target, draws: Draws, sign: float) -> PredictiveScore:
    """Return the score that sums ``sign log mean(likelihood ** sign)``, ``sign`` 1 or -1, over observations."""
    observations = Observations(target)
    counts = observations.counts
    terms = _Terms(observations, draws.unconstrained.flatten(0, 1), sign)
    sums = _summed(terms, draws.log_likelihood.numel())
    score = sign * float(counts @ sums.log_mean)
    influence = torch.cat([(chunk - sums.log_mean).exp().sub(1) @ counts for chunk in terms])
    influence = influence.reshape(draws.log_likelihood.shape)
    error = float(mean_error(influence))

    problems, diagnostics = list(terms.problems), dict[str, float]()
    # Masked observations have likelihood one everywhere, up to rounding if sites were summed out.
    num_observations = float(counts[sums.farthest > 8 * torch.finfo(target.dtype).eps].sum())
    heavy = float(counts[sums.shape > MAX_PARETO_SHAPE].sum())
    if heavy > 0:
        problems.append(
            f"a few draws dominate the terms of {heavy:.0f} of {num_observations:.0f} observations (Pareto k up to "
            f"{float(sums.shape.max()):.2f} > {MAX_PARETO_SHAPE}): {_REMEDY}"
        )
    slowness = influence.numel() / min(float(effective_sample_size(influence)), influence.numel())
    if sign < 0:
        # Reciprocals of likelihoods are unbounded; the tail of the sum determines its error.
        shape = pareto_shape((influence + counts.sum()).clamp(min=torch.finfo(influence.dtype).tiny).log())
        limit = largest_shape(influence.numel(), slowness)
        if not shape <= limit:
            problems.append(
                f"a few draws dominate the score, whose variance may be infinite (Pareto k {shape:.2f} > {limit:.2f}, "
                f"the threshold 0.5 minus its fitting error): {_REMEDY}"
            )
        diagnostics["pareto_shape_of_sum"] = shape
    effective = float(sums.effective.min()) / slowness
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"the term of an observation has only {effective:.0f} effective draws: run longer chains")
    # The log of a mean is biased downward, in the same direction for all terms.
    excess = (1 / sums.effective - 1 / influence.numel()).clamp(min=0) * slowness
    bias = -sign * 0.5 * float(counts @ excess)
    rounding = 8 * torch.finfo(torch.float64).eps * max(abs(score), 1.0)
    if not abs(bias) <= _MAX_BIAS * error + rounding:
        problems.append(f"the score has a second-order bias of about {bias:+.2g} nats: run longer chains")
    if not float(sums.log_mean.abs().max()) < torch.inf:
        problems.append("an observation has likelihood zero at posterior draws: check the support of the model")
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
    """Sum weights and their squares, and keep the largest weights of each term for the fit of the tail."""
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    largest: Tensor | None = None
    farthest = torch.zeros(())
    for chunk in terms:
        low, high = chunk.aminmax(dim=0)
        farthest = torch.maximum(farthest.to(chunk), torch.maximum(low.abs(), high.abs()))
        # One exponential of each weight serves both sums.
        limits = torch.finfo(high.dtype)
        scale = high.clamp(limits.min, limits.max)
        weights = (chunk - scale).exp_()
        sums = [torch.stack([*sums, scale + weights.sum(0).log()]).logsumexp(0)]
        squares = [torch.stack([*squares, 2 * scale + weights.square_().sum(0).log()]).logsumexp(0)]
        # A shorter tail if the tails of all terms together exceed the memory limit.
        length = min(num_largest(num_draws), max(KEPT // chunk.shape[1], _LEAST_LARGEST))
        together = chunk if largest is None else torch.cat([largest, chunk])
        largest = together.topk(min(length, len(together)), 0).values
    if largest is None:
        raise DrawsError("there are no draws")
    rows = largest.flip(0).T.split(TAILS_AT_A_TIME)
    shape = torch.cat([shape_of_largest(part.contiguous()) for part in rows])
    return _Sums(sums[0] - math.log(num_draws), (2 * sums[0] - squares[0]).exp(), shape, farthest)


# Conditional predictive ordinates: each observation given all others, from one set of posterior draws.


def _ordinates_of_fewer(target: Target, parts: Parts, seed: int) -> PredictiveScore:
    return conditional_predictive_ordinates(target, _fewer_draws(target, parts), seed=seed)


@estimator(
    Part.POSTERIOR,
    kind="score",
    refuses=lambda target, parts: scores_refusal(target),
    by=_ordinates_of_fewer,
)
def conditional_predictive_ordinates(target: Target, draws: Draws, *, seed: int = 0) -> PredictiveScore:
    """Return the log pseudo-marginal likelihood: the sum of log densities of each observation given all others.

    The conditional predictive ordinate of an observation is the harmonic mean of its likelihood over posterior draws.
    The sum of their logs is a leave-one-out score, not the log evidence.
    :func:`bayeskit.inference.held_out.cross_validation_evidence` has scores for larger held-out sets, which add up
    to the log evidence.

    Parameters
    ----------
    target : Target
        The likelihood has to be a sum over observations: a Pyro model with observed sites, or a
        :class:`~bayeskit.models.phylogenetics.TreeModel`, with alignment sites as observations.
    draws : Draws
    seed : int, default 0
        Not used.

    Returns
    -------
    PredictiveScore
        The standard error is that of the sum, including the correlation of terms on the same draws. The Pareto ``k`` of
        each observation checks its harmonic mean; that of the sums over observations checks the standard error, and
        has to be below 0.5 by its fitting error.

    Raises
    ------
    DrawsError
        If the draws come from another target.
    ModelError
        If there is no pointwise log likelihood, or the target's loss is not a log density.

    References
    ----------
    Geisser, S., Eddy, W. F. (1979). A predictive approach to model selection. Journal of the American Statistical
    Association 74, 153-160.
    Gelfand, A. E., Dey, D. K. (1994). Bayesian model choice: asymptotics and exact calculations. Journal of the Royal
    Statistical Society B 56, 501-514.

    Examples
    --------
    Of ten successes each is predicted with the density that nine others give it, 10/11:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence._predictive import conditional_predictive_ordinates
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.ones(10, dtype=torch.float64))
    >>> draws = bk.sample(target, num_warmup=200, num_samples=500, progress=False)
    >>> score = conditional_predictive_ordinates(target, draws)
    >>> abs(score.predictive_score - 10 * math.log(10 / 11)) < 4 * score.standard_error
    True
    """
    return _pointwise_score("conditional_predictive_ordinates", target, draws, -1.0)


# Pointwise predictive density: each observation given all observations, including itself.


def _density_of_fewer(target: Target, parts: Parts, seed: int) -> PredictiveScore:
    return pointwise_predictive_density(target, _fewer_draws(target, parts), seed=seed)


@estimator(
    Part.POSTERIOR,
    kind="score",
    refuses=lambda target, parts: scores_refusal(target),
    by=_density_of_fewer,
)
def pointwise_predictive_density(target: Target, draws: Draws, *, seed: int = 0) -> PredictiveScore:
    """Return the log pointwise predictive density: the sum of log posterior means of each observation's likelihood.

    Each observation contributes to its own prediction, so the score exceeds the leave-one-out score of
    :func:`conditional_predictive_ordinates` by about the effective number of parameters. It does not estimate the log
    evidence.

    Parameters
    ----------
    target : Target
        The likelihood has to be a sum over observations: a Pyro model with observed sites, or a
        :class:`~bayeskit.models.phylogenetics.TreeModel`, with alignment sites as observations.
    draws : Draws
    seed : int, default 0
        Not used.

    Returns
    -------
    PredictiveScore
        The standard error is that of the sum, including the correlation of terms on the same draws.

    Raises
    ------
    DrawsError
        If the draws come from another target.
    ModelError
        If there is no pointwise log likelihood, or the target's loss is not a log density.

    References
    ----------
    Gelman, A., Hwang, J., Vehtari, A. (2014). Understanding predictive information criteria for Bayesian models.
    Statistics and Computing 24, 997-1016.
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    Ten successes, each predicted from all ten with probability 11/12:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence._predictive import pointwise_predictive_density
    >>> def model(y):
    ...     share = pyro.sample("share", dist.Beta(1.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Bernoulli(share), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.ones(10, dtype=torch.float64))
    >>> draws = bk.sample(target, num_warmup=200, num_samples=500, progress=False)
    >>> score = pointwise_predictive_density(target, draws)
    >>> abs(score.predictive_score - 10 * math.log(11 / 12)) < 4 * score.standard_error
    True
    """
    return _pointwise_score("pointwise_predictive_density", target, draws, 1.0)
