"""Importance sampling from a Laplace fit with Student-t tails."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import InitializationError, SettingsError
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.target import Target

MAX_ROUNDS = 15


def find_modes(target: Target, *, seed: int = 0, draws: Draws | None = None) -> tuple[Tensor, int]:
    """Find the modes reachable from a few starting points by L-BFGS.

    Parameters
    ----------
    target : Target
    seed : int, default 0
    draws : Draws, optional
        Posterior draws; the best of them becomes a starting point.

    Returns
    -------
    modes : Tensor
        Ends of all searches, the highest first, shape ``(searches, d)``, unconstrained.
    num_evaluations : int

    Raises
    ------
    InitializationError
        If no search ends at a finite density.
    """
    one = torch.ones(1, dtype=target.dtype, device=target.device)
    start = starting_points(target, 4, one.expand(4), new_generator(seed, target.device, "mode"))
    if draws is not None:
        best = draws.log_density.flatten().argmax()
        start = torch.cat([draws.unconstrained.flatten(0, 1)[best].unsqueeze(0), start[:2]])
    count = 0

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count
        count += 1
        u = torch.as_tensor(x, dtype=target.dtype, device=target.device).unsqueeze(0)
        value, gradient = target.value_and_grad(u, one)
        result = -float(value)
        if not math.isfinite(result):
            return 1e300, np.zeros_like(x)
        return result, -gradient[0].double().cpu().numpy()

    found: list[tuple[float, np.ndarray]] = []
    with one_thread():
        for point in start:
            outcome = minimize(
                loss,
                point.double().cpu().numpy(),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": 2000, "maxls": 50},
            )
            found.append((float(outcome.fun), outcome.x))
    ends = [x for value, x in sorted(found, key=lambda pair: pair[0]) if value < 1e299]
    if not ends:
        raise InitializationError("the search for the mode met no finite density; pass posterior draws to start from")
    return torch.as_tensor(np.stack(ends), dtype=target.dtype, device=target.device), count


def curvature(target: Target, mode: Tensor) -> tuple[Tensor, int]:
    """Negative Hessian of the log density at ``mode``, ``(d, d)``, by central differences of the exact gradient."""
    d = target.dim
    step = torch.finfo(target.dtype).eps ** (1 / 3) * mode.abs().clamp(min=1.0)
    offsets = torch.diag(step)
    _, gradient = target.value_and_grad(torch.cat([mode + offsets, mode - offsets]))
    hessian = (gradient[:d] - gradient[d:]) / (2 * step.unsqueeze(-1))
    return -0.5 * (hessian + hessian.T), 2 * d


def laplace_importance_sampling(
    target: Target,
    num_draws: int = 40_000,
    *,
    degrees_of_freedom: float = 5.0,
    draws: Draws | None = None,
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
    draws : Draws, optional
        Posterior draws, to start the search for the mode and to see whether the
        proposal covers them.
    seed : int, default 0

    Returns
    -------
    Evidence

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo
    integration. Econometrica 57, 1317-1339.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import laplace_importance_sampling
    >>> z = laplace_importance_sampling(exact.get("beta_binomial").target(), seed=1)
    >>> abs(z.log_evidence + 2.3978953) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    if num_draws < 1:
        raise SettingsError(f"num_draws must be at least 1, not {num_draws}")
    generator = new_generator(seed, stream="laplace importance sampling")
    modes, search = find_modes(target, seed=seed, draws=draws)
    precision, differences = curvature(target, modes[0])
    proposal = _StudentT(modes[0], _scale_factor(precision), degrees_of_freedom)
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
    log_z, largest = float(log_mean_exp(log_weights)), float(log_weights.max())
    problems = nan_problems + weight_problems(shape, effective)
    problems += _missed_modes(target, proposal, modes[1:], log_z, largest)
    problems += _missed_draws(proposal, draws, largest)
    return Evidence(
        "laplace_importance_sampling",
        log_z,
        with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density),
        num_draws + rounds * pilot + search + differences + (0 if draws is None else draws.num_gradients),
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective},
    )


MIN_MISSED_MASS = 0.01


def _missed_modes(target: Target, proposal: _StudentT, others: Tensor, log_z: float, largest: float) -> list[str]:
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


def _missed_draws(proposal: _StudentT, draws: Draws | None, largest: float) -> list[str]:
    """Ask whether posterior draws lie where no proposal draw had as large a weight."""
    if draws is None:
        return []
    x = draws.unconstrained.flatten(0, 1)
    log_density = (draws.log_prior + draws.log_likelihood).flatten()
    share = float((log_density - proposal.log_prob(x) > largest).to(torch.float64).mean())
    if share <= MIN_MISSED_MASS:
        return []
    return [f"{100 * share:.0f} % of the posterior draws lie outside the proposal: use bridge sampling"]


def _log_weights(target: Target, proposal: _StudentT, x: Tensor) -> Tensor:
    """Log importance weights; where the density is not a number it counts as zero."""
    log_weights = target.log_density(x) - proposal.log_prob(x)
    return torch.where(log_weights.isnan(), -torch.inf, log_weights)


class _StudentT:
    """Multivariate Student-t with location ``(d,)`` and scale factor ``(d, d)``."""

    def __init__(self, location: Tensor, factor: Tensor, degrees_of_freedom: float) -> None:
        self.location, self.factor, self.df = location, factor, degrees_of_freedom

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        d = len(self.location)
        normal = torch.randn(num_draws, d, generator=generator, dtype=self.location.dtype)
        # A chi-squared variable with real degrees of freedom; torch's gamma sampler takes the generator.
        concentration = torch.full((num_draws, 1), self.df / 2, dtype=self.location.dtype)
        chi_squared = 2 * torch._standard_gamma(concentration, generator=generator)
        scaled = (normal * (self.df / chi_squared).sqrt()).to(self.location.device)
        return self.location + scaled @ self.factor.T

    def log_prob(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        z = torch.linalg.solve_triangular(self.factor, (x - self.location).T, upper=False)
        constant = math.lgamma((self.df + d) / 2) - math.lgamma(self.df / 2) - d / 2 * math.log(self.df * math.pi)
        log_determinant = self.factor.diagonal().log().sum()
        return constant - log_determinant - (self.df + d) / 2 * torch.log1p(z.square().sum(0) / self.df)


def _scale_factor(precision: Tensor) -> Tensor:
    """Cholesky factor of the inverse of ``precision``; directions without curvature get a finite width."""
    values, vectors = torch.linalg.eigh(precision)
    floor = 1e-8 * values.abs().max()
    covariance = (vectors / values.clamp(min=floor)) @ vectors.T
    return torch.linalg.cholesky(covariance)


def _refit(x: Tensor, log_weights: Tensor, current: _StudentT, degrees_of_freedom: float) -> _StudentT:
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
    return current if bool(failed) else _StudentT(mean, factor, degrees_of_freedom)


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
