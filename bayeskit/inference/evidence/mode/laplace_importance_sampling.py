"""Importance sampling from a Laplace fit with Student-t tails."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._pareto_smoothing import pareto_smoothed
from bayeskit._settings import real_number, whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.mode.modes import Mode, curvature, find_mode, require_dimension
from bayeskit.inference.evidence.mode.student_t import StudentT, scale_factor
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

MAX_ROUNDS = 15
MIN_MISSED_MASS = 0.01


def laplace_importance_sampling(
    target: Target,
    num_draws: int = 40_000,
    *,
    degrees_of_freedom: float = 5.0,
    smoothed: bool = True,
    draws: Draws | None = None,
    mode: Mode | None = None,
    seed: int = 0,
) -> Evidence:
    """Sample by importance from a multivariate Student-t at the posterior mode.

    Scale matrix is the inverse of the negative Hessian in unconstrained space; the
    t tails cover what the Gaussian approximation misses. Short pilot rounds refit the
    t to their own weighted draws as long as that helps, which repairs a skewed
    posterior or a mode far from the mass (the scale of a hierarchical model); the
    estimate comes from the last proposal alone.

    Parameters
    ----------
    target : Target
    num_draws : int, default 40,000
        Draws of the final round.
    degrees_of_freedom : float, default 5
        Above 2.
    smoothed : bool, default True
        Replace the largest weights by quantiles of a generalised Pareto distribution fitted to them.
    draws : Draws, optional
        Posterior draws, to start the search for the mode and to see whether the
        proposal covers them.
    mode : Mode, optional
        Of the target, if it is known already.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If there are no draws, or ``degrees_of_freedom`` is not above 2.
    InitializationError
        If no search for the mode ends at a finite density.
    DrawsError, ShapeError
        If draws or mode are of another target.

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo
    integration. Econometrica 57, 1317-1339.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed
    importance sampling. Journal of Machine Learning Research 25(72).

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import laplace_importance_sampling
    >>> z = laplace_importance_sampling(exact.get("beta_binomial").target(), seed=1)
    >>> abs(z.log_evidence + 2.3978953) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=1)
    degrees_of_freedom = real_number("degrees_of_freedom", degrees_of_freedom, (2, math.inf))
    require_dimension(draws, target)
    mode = mode or find_mode(target, seed=seed, draws=draws)
    mode.require(target)
    generator = new_generator(seed, stream="laplace importance sampling")
    proposal = StudentT(mode.position, scale_factor(mode.precision), degrees_of_freedom)
    pilot = max(4000, 40 * target.dim)
    rounds, stalls, best = 0, 0, (0.0, proposal)
    while rounds < MAX_ROUNDS and stalls < 3 and best[0] < 0.5:
        rounds += 1
        x = proposal.sample(pilot, generator)
        log_weights = _log_weights(target, proposal, x)
        share = float(weight_effective_sample_size(log_weights)) / pilot
        stalls = 0 if share > 1.1 * best[0] else stalls + 1
        best = max(best, (share, proposal), key=lambda pair: pair[0])
        proposal = _refit(x, log_weights, proposal, degrees_of_freedom)
    proposal = best[1] if stalls else proposal
    # The proposal depends on the pilot rounds, so only this last round enters the estimate.
    x = proposal.sample(num_draws, generator)
    log_density, nan_problems = without_nan(target.log_density(x))
    log_weights = (log_density - proposal.log_prob(x)).unsqueeze(0)
    shape = pareto_shape(log_weights)
    effective = float(weight_effective_sample_size(log_weights[0]))
    largest = float(log_weights.max())
    counted = _smoothed(log_weights) if smoothed else log_weights
    log_z = float(log_mean_exp(counted))
    problems = nan_problems + weight_problems(shape, effective)
    problems += _missed_modes(target, proposal, mode.others, log_z, largest)
    problems += _missed_draws(proposal, draws, largest)
    return Evidence(
        "laplace_importance_sampling",
        log_z,
        with_rounding(float(independent_log_mean_exp_error(counted)), log_density),
        num_draws + rounds * pilot + mode.num_evaluations + (0 if draws is None else draws.num_gradients),
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective},
    )


def _smoothed(log_weights: Tensor) -> Tensor:
    """Smooth the largest weights, without the normalisation that smoothing brings."""
    smooth = pareto_smoothed(log_weights)[0].to(log_weights.dtype)
    # Weights below the tail are only moved, all by the same.
    moved = (log_weights - smooth)[log_weights <= log_weights.median()]
    moved = moved[moved.isfinite()]
    return smooth + moved.median() if len(moved) else log_weights


def _missed_modes(target: Target, proposal: StudentT, others: Tensor, log_z: float, largest: float) -> list[str]:
    """Ask whether a mode that a search ended at lies outside the proposal and carries mass of its own."""
    for mode in others:
        height = float(target.log_density(mode))
        if not height - float(proposal.log_prob(mode.unsqueeze(0))) > largest:
            continue
        eigenvalues = torch.linalg.eigvalsh(curvature(target, mode)[0])
        if bool((eigenvalues > 0).all()):
            mass = height + 0.5 * (len(mode) * math.log(2 * math.pi) - float(eigenvalues.log().sum()))
            if mass > log_z + math.log(MIN_MISSED_MASS):
                return ["the proposal does not cover another mode of the posterior: use stepping stone"]
    return []


def _missed_draws(proposal: StudentT, draws: Draws | None, largest: float) -> list[str]:
    """Ask whether posterior draws lie where no proposal draw had as large a weight."""
    if draws is None:
        return []
    x = draws.unconstrained.flatten(0, 1)
    log_density = (draws.log_prior + draws.log_likelihood).flatten()
    share = float((log_density - proposal.log_prob(x) > largest).to(torch.float64).mean())
    if share <= MIN_MISSED_MASS:
        return []
    return [f"{100 * share:.0f} % of the posterior draws lie outside the proposal: use bridge sampling"]


def _log_weights(target: Target, proposal: StudentT, x: Tensor) -> Tensor:
    """Log importance weights; where the density is not a number it counts as zero."""
    log_weights = target.log_density(x) - proposal.log_prob(x)
    return torch.where(log_weights.isnan(), -torch.inf, log_weights)


def _refit(x: Tensor, log_weights: Tensor, current: StudentT, degrees_of_freedom: float) -> StudentT:
    """Fit location and scale to the weighted draws.

    Weights too uneven to carry a covariance are flattened by a power; what that
    misses, the next round finds.
    """
    d = x.shape[1]
    weights = _flattened(log_weights, needed=max(100.0, 10.0 * d))
    mean = weights @ x
    centred = x - mean
    covariance = (weights * centred.T) @ centred
    # A t with df degrees of freedom has covariance df / (df - 2) times its scale matrix.
    scale = covariance * (degrees_of_freedom - 2) / degrees_of_freedom
    effective = float(1 / weights.square().sum())
    trust = effective / (effective + d)
    blended = trust * scale + (1 - trust) * current.factor @ current.factor.T
    factor, failed = torch.linalg.cholesky_ex(blended)
    return current if bool(failed) else StudentT(mean, factor, degrees_of_freedom)


def _flattened(log_weights: Tensor, needed: float) -> Tensor:
    """Normalised weights, raised to the largest power up to one that leaves ``needed`` effective draws."""
    low, high = 0.0, 1.0
    if float(weight_effective_sample_size(log_weights)) < needed:
        for _ in range(30):
            middle = 0.5 * (low + high)
            enough = float(weight_effective_sample_size(middle * log_weights)) >= needed
            low, high = (middle, high) if enough else (low, middle)
        return torch.softmax(low * log_weights, 0)
    return torch.softmax(log_weights, 0)
