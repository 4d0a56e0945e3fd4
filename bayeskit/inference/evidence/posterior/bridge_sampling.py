"""Bridge sampling with the iterative optimal bridge and a normal proposal."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayeskit._settings import whole_number
from bayeskit._statistics import effective_sample_size
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError
from bayeskit.inference.evidence.checks import MIN_EFFECTIVE, belongs, finite_chains, posterior_problems, with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.posterior.normal_fit import FEW_DIMENSIONS, normal_fit
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

MAX_ITERATIONS = 1000
TOLERANCE = 1e-10


@estimator()
def bridge_sampling(target: Target, draws: Draws, *, num_proposals: int | None = None, seed: int = 0) -> Evidence:
    """Bridge between the posterior and a normal distribution fitted to it.

    The proposal is fitted, in unconstrained space, to the first half of each chain
    and the bridge evaluated on the second half. In more than 50 dimensions, of which
    the draws know no covariance, it takes that of the curvature at their mean. The standard error is that of Micaletto
    and Vehtari: on the log scale, the variance of the numerator's independent terms
    plus the variance of the denominator's terms over their effective sample size.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``, at least ``4 * dim`` of them, or 200 in more than 50 dimensions.
    num_proposals : int, optional
        Draws from the proposal, at least two; by default as many as posterior draws evaluated.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to fit the proposal.
    SettingsError
        If ``num_proposals`` is no whole number or less than two.

    References
    ----------
    Meng, X.-L., Wong, W. H. (1996). Simulating ratios of normalizing constants via a
    simple identity. Statistica Sinica 6, 831-860.
    Gronau, Q. F. et al. (2017). A tutorial on bridge sampling. Journal of Mathematical
    Psychology 81, 80-97.
    Micaletto, G., Vehtari, A. (2025). Monte Carlo standard error for bridge sampling.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import bridge_sampling
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = bridge_sampling(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.02
    (True, True)
    """
    halves = halved(target, draws, num_proposals)
    proposal, x = halves.fitted, halves.unconstrained
    generator = new_generator(seed, stream="bridge sampling")
    noise = torch.randn(halves.num_proposals, target.dim, generator=generator, dtype=x.dtype).to(x.device)
    y = proposal.loc + noise @ proposal.scale_tril.T
    posterior_ratio = halves.log_density - proposal.log_prob(x)
    proposal_ratio = target.log_density(y) - proposal.log_prob(y)
    z = bridged("bridge_sampling", halves, posterior_ratio, proposal_ratio, halves.num_proposals)
    return with_missed_peak(z, target, draws)


class Halves(NamedTuple):
    """Posterior draws, the first half of each chain fitted and the second to be bridged.

    Attributes
    ----------
    draws : Draws
        Both halves of the chains that have a finite density.
    fitted : MultivariateNormal
        To the first half.
    unconstrained : Tensor
        The second half, ``(chains, draws, d)``.
    log_density : Tensor
        Of the second half, ``(chains, draws)``.
    num_proposals : int
    num_evaluations : int
        Spent on the fit.
    """

    draws: Draws
    fitted: MultivariateNormal
    unconstrained: Tensor
    log_density: Tensor
    num_proposals: int
    num_evaluations: int


def halved(target: Target, draws: Draws, num_proposals: int | None) -> Halves:
    """Split each chain in two and fit a normal distribution to the first half.

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few for the fit, or their covariance is singular.
    SettingsError
        If ``num_proposals`` is no whole number or less than two.
    """
    belongs(draws, target)
    if num_proposals is not None:
        num_proposals = whole_number("num_proposals", num_proposals, least=2)
    draws = finite_chains(draws)
    half = draws.num_draws // 2
    d = target.dim
    # Where they are many, curvature stands in for the draws.
    least = 2 * min(d, FEW_DIMENSIONS)
    if half < 8 or half * draws.num_chains < least:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a {d}-dimensional proposal; "
            f"give at least 16 draws a chain and {2 * least} in all"
        )
    log_density = draws.log_prior[:, half:] + draws.log_likelihood[:, half:]
    count = num_proposals or log_density.numel()
    fitted, spent = normal_fit(target, draws.unconstrained[:, :half])
    return Halves(draws, fitted, draws.unconstrained[:, half:], log_density, count, spent)


def bridged(
    method: str, halves: Halves, posterior_ratio: Tensor, proposal_ratio: Tensor, num_evaluations: int
) -> Evidence:
    """Find the evidence of the bridge, its error and what is wrong with it.

    Parameters
    ----------
    method : str
    halves : Halves
    posterior_ratio, proposal_ratio : Tensor
        Log unnormalised posterior minus log proposal at draws from the posterior, ``(chains, draws)``, and at draws
        from the proposal, ``(count,)``.
    num_evaluations : int
        Evaluations of the density beside those of the draws and of the fit.
    """
    # In double precision, where the iteration can converge whatever the model's own precision.
    posterior_ratio, proposal_ratio = posterior_ratio.to(torch.float64), proposal_ratio.to(torch.float64)
    proposal_ratio = torch.where(proposal_ratio.isnan(), -torch.inf, proposal_ratio)
    effective = min(float(effective_sample_size(posterior_ratio)), posterior_ratio.numel())
    log_z, converged, iterations = iterate(posterior_ratio, proposal_ratio, effective)
    numerator, denominator = terms(posterior_ratio, proposal_ratio, log_z, effective)
    variance = _relative_variance(numerator, numerator.numel())
    variance += _relative_variance(denominator, min(float(effective_sample_size(denominator)), denominator.numel()))

    problems, diagnostics = posterior_problems(halves.draws)
    if not converged:
        problems.append(f"the bridge did not converge in {MAX_ITERATIONS} iterations: use more draws")
    overlap = float(numerator.sum().square() / numerator.square().sum())
    if overlap < MIN_EFFECTIVE:
        problems.append(
            f"posterior and proposal hardly overlap ({overlap:.0f} effective proposals): use stepping stone"
        )
    diagnostics |= {"iterations": float(iterations), "effective_proposals": overlap}
    return Evidence(
        method,
        log_z,
        with_rounding(math.sqrt(variance), halves.log_density),
        halves.draws.num_gradients + halves.num_evaluations + num_evaluations,
        tuple(problems),
        diagnostics,
    )


def _relative_variance(terms: Tensor, effective: float) -> float:
    """Return the relative variance of the mean of terms that are worth ``effective`` independent ones.

    Its own standard error is added: short chains that hardly saw where the proposal falls short have an estimate and an
    error that are too small together.
    """
    squares = (terms - terms.mean()).square()
    kurtosis = float(squares.square().mean() / squares.mean().square().clamp(min=torch.finfo(terms.dtype).tiny))
    own_error = math.sqrt(max(kurtosis - 1, 0.0) / effective)
    return float(terms.var() / terms.mean().square()) / effective * (1 + own_error)


def terms(posterior: Tensor, proposal: Tensor, log_z: float, effective: float) -> tuple[Tensor, Tensor]:
    """Terms of numerator ``(count,)`` and denominator ``(chains, draws)``, both divided by the current estimate."""
    count = proposal.numel()
    log_s1 = math.log(effective / (effective + count))
    log_s2 = math.log(count / (effective + count))
    a, b = proposal - log_z, posterior - log_z
    numerator = (a - torch.logaddexp(a + log_s1, torch.full_like(a, log_s2))).exp()
    denominator = (-torch.logaddexp(b + log_s1, torch.full_like(b, log_s2))).exp()
    return numerator, denominator


def iterate(posterior: Tensor, proposal: Tensor, effective: float) -> tuple[float, bool, int]:
    """Return the fixed point of the bridge, whether it was reached, and after how many iterations."""
    log_z = float(posterior.median())
    for iteration in range(1, MAX_ITERATIONS + 1):
        numerator, denominator = terms(posterior, proposal, log_z, effective)
        change = float(numerator.mean().log() - denominator.mean().log())
        log_z += change
        if not math.isfinite(log_z):
            return log_z, False, iteration
        if abs(change) < TOLERANCE * max(1.0, abs(log_z)):
            return log_z, True, iteration
    return log_z, False, MAX_ITERATIONS
