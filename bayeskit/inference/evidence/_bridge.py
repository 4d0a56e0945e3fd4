"""Bridge sampling and warp bridge sampling with a normal proposal."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayeskit._core.convergence import MIN_EFFECTIVE
from bayeskit._core.inputs import whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size
from bayeskit._core.torch_internals import normal_of_factor
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import DrawsError
from bayeskit.inference._optimize import negative_hessian
from bayeskit.inference._ratio import LEAST_OVERLAP, bidirectional_ratio
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import with_rounding
from bayeskit.inference.evidence._methods import Part
from bayeskit.inference.evidence._result import Evidence

# Normal approximation from draws and, in many dimensions, from the curvature of the log density.

#: Above this dimension the curvature is used if noise in the sample covariance costs more than so many nats.
_FEW_DIMENSIONS, _MAX_LOSS = 50, 0.25
#: Number of directions checked at each end of the spectrum; smallest log variance ratio that is corrected.
_NUM_DIRECTIONS, _NOTABLE = 16, 0.25


def normal_fit(target: Target, x: Tensor) -> tuple[MultivariateNormal, int]:
    """Fit a normal distribution to draws ``(chains, draws, d)``, or raise DrawsError; also return evaluations spent."""
    d, flat = x.shape[-1], x.flatten(0, 1)
    spent = 0
    # A covariance from ``n`` draws puts the fit about ``d (d + 3) / 4 n`` nats from the posterior, for any number of
    # proposals. The curvature at the mean has no such noise. The draws correct it if the posterior is skewed,
    # heavy-tailed, or not log-concave at its mean.
    if d > _FEW_DIMENSIONS and d * (d + 3) > 4 * _MAX_LOSS * len(flat):
        centre = flat.mean(0)
        precision, spent = negative_hessian(target.value_and_grad, centre)
        if bool(precision.isfinite().all() & (flat.var(0) > 0).all()):
            factor, failed = torch.linalg.cholesky_ex(_corrected(flat - centre, precision))
            if not bool(failed) and bool(factor.isfinite().all()):
                return normal_of_factor(centre, factor), spent
    covariance = torch.cov(flat.T).reshape(d, d)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate is constant, or two are perfectly correlated; "
            "check the chains and the model"
        )
    return normal_of_factor(flat.mean(0), factor), spent


def _corrected(x: Tensor, precision: Tensor) -> Tensor:
    """Return a covariance ``(d, d)`` from the negative Hessian at the draws' mean and the centred draws ``(n, d)``."""
    scale = x.square().mean(0).sqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    # The sample variance along each eigenvector is accurate, so it replaces the curvature if the two differ.
    along = (x / scale) @ vectors
    spread = along.square().mean(0)
    differs = ~((values * spread).log().abs() <= _NOTABLE)
    variance = torch.where(differs, spread, 1 / values)
    # The directions in which half of the whitened draws vary most and least are mostly noise, so the variances along
    # them come from the other half.
    white, basis = along / variance.sqrt(), scale[:, None] * vectors * variance.sqrt()
    seen, other = white.tensor_split(2)
    vectors = torch.linalg.eigh(seen.T @ seen)[1]
    ends = torch.cat([vectors[:, :_NUM_DIRECTIONS], vectors[:, -_NUM_DIRECTIONS:]], 1)
    more = (other @ ends).square().mean(0)
    ends, more = (part[..., more.log().abs() > _NOTABLE] for part in (ends, more))
    ends = basis @ ends
    return basis @ basis.mT + (ends * (more - 1)) @ ends.mT


# Bridge sampling with the iterative optimal bridge and a normal proposal.


@estimator(Part.POSTERIOR)
def bridge_sampling(target: Target, draws: Draws, *, num_proposals: int | None = None, seed: int = 0) -> Evidence:
    """Estimate the log evidence by bridge sampling between the posterior and a fitted normal distribution.

    The proposal is fitted in unconstrained space to the first half of each chain; the bridge uses the second half. In
    more than 50 dimensions with too few draws for the covariance, the proposal has the curvature at the draws' mean,
    corrected by the draws. The standard error follows Micaletto and Vehtari (2025), on the log scale: the variance of
    the numerator's independent terms plus that of the denominator's terms over their effective sample size.

    Parameters
    ----------
    target : Target
    draws : Draws
        Posterior draws: 16 or more per chain, ``4 * dim`` or more in all (200 suffice above 50 dimensions).
    num_proposals : int, optional
        Number of proposal draws, at least two; by default the number of posterior draws in the second halves.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target, are too few to fit the proposal, or have a singular covariance.
    SettingsError
        If ``num_proposals`` is not a whole number of at least two.

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
    return _bridged("bridge_sampling", halves, posterior_ratio, proposal_ratio, halves.num_proposals)


class Halves(NamedTuple):
    """Posterior draws, with a normal fit to the first half of each chain and the second half for the estimate."""

    draws: Draws  # both halves
    fitted: MultivariateNormal  # to the first half
    unconstrained: Tensor  # (chains, draws, d), second half
    log_density: Tensor  # (chains, draws), second half
    num_proposals: int
    num_evaluations: int  # of the fit


def halved(target: Target, draws: Draws, num_proposals: int | None) -> Halves:
    """Fit a normal to the first half of each chain; DrawsError for too few or singular draws."""
    if num_proposals is not None:
        num_proposals = whole_number("num_proposals", num_proposals, least=2)
    half = draws.num_draws // 2
    d = target.dim
    # In many dimensions the curvature replaces the sample covariance.
    least = 2 * min(d, _FEW_DIMENSIONS)
    if half < 8 or half * draws.num_chains < least:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a {d}-dimensional proposal; "
            f"give at least 16 draws a chain and {2 * least} in all"
        )
    log_density = draws.log_prior[:, half:] + draws.log_likelihood[:, half:]
    count = num_proposals or log_density.numel()
    fitted, spent = normal_fit(target, draws.unconstrained[:, :half])
    return Halves(draws, fitted, draws.unconstrained[:, half:], log_density, count, spent)


def _bridged(
    method: str, halves: Halves, posterior_ratio: Tensor, proposal_ratio: Tensor, num_evaluations: int
) -> Evidence:
    """Return the estimate from log posterior over proposal at draws ``(chains, draws)`` and proposals ``(count,)``."""
    posterior_ratio, proposal_ratio = posterior_ratio.to(torch.float64), proposal_ratio.to(torch.float64)
    proposal_ratio = torch.where(proposal_ratio.isnan(), -torch.inf, proposal_ratio)
    effective = min(float(effective_sample_size(posterior_ratio)), posterior_ratio.numel())
    ratio = bidirectional_ratio(posterior_ratio.flatten(), proposal_ratio, effective)
    numerator, denominator = ratio.of_denominator, ratio.of_numerator.reshape(posterior_ratio.shape)
    variance = _relative_variance(numerator, numerator.numel())
    variance += _relative_variance(denominator, min(float(effective_sample_size(denominator)), denominator.numel()))
    problems = []
    overlap = float(numerator.sum().square() / numerator.square().sum())
    if not (overlap >= MIN_EFFECTIVE and float(ratio.overlap) >= LEAST_OVERLAP):
        problems.append(
            f"posterior and proposal hardly overlap ({overlap:.0f} effective proposals): use stepping stone"
        )
    return Evidence(
        method,
        float(ratio.log_ratio),
        with_rounding(math.sqrt(variance), halves.log_density),
        halves.draws.num_gradients + halves.num_evaluations + num_evaluations,
        tuple(problems),
        {"effective_proposals": overlap},
    )


def _relative_variance(terms: Tensor, effective: float) -> float:
    """Return the relative variance of a mean of terms worth ``effective`` independent ones, plus its own error."""
    squares = (terms - terms.mean()).square()
    kurtosis = float(squares.square().mean() / squares.mean().square().clamp(min=torch.finfo(terms.dtype).tiny))
    # Short chains that hardly visit the region where the proposal is too small underestimate both value and error.
    own_error = math.sqrt(max(kurtosis - 1, 0.0) / effective)
    return float(terms.var() / terms.mean().square()) / effective * (1 + own_error)


# Bridge sampling after centring, standardising and symmetrising the posterior.


@estimator(Part.POSTERIOR)
def warp_bridge_sampling(target: Target, draws: Draws, *, num_proposals: int | None = None, seed: int = 0) -> Evidence:
    """Estimate the log evidence by bridge sampling with a warped, symmetric posterior (Warp-III).

    With the mean and covariance ``L L'`` of the first half of each chain, ``e = L^-1 (u - mean)`` is standardised. The
    equal mixture of the densities of ``e`` and ``-e`` has no skewness and the same normalising constant. For a skewed
    posterior the standard error is smaller than that of :func:`bridge_sampling` with equally many draws. Each proposal
    and each draw of the second half costs one more evaluation, at its mirror image.

    The standard error is that of :func:`bridge_sampling`. The density ratios are the same for a draw and its mirror
    image, so their autocorrelation ignores moves across the centre.

    Parameters
    ----------
    target : Target
    draws : Draws
        Posterior draws: 16 or more per chain, ``4 * dim`` or more in all (200 suffice above 50 dimensions).
    num_proposals : int, optional
        Number of proposal draws, at least two; by default the number of posterior draws in the second halves.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target, are too few to fit the proposal, or have a singular covariance.
    SettingsError
        If ``num_proposals`` is not a whole number of at least two.

    References
    ----------
    Meng, X.-L., Schilling, S. (2002). Warp bridge sampling. Journal of Computational and Graphical Statistics 11,
    552-586.
    Gronau, Q. F., Wagenmakers, E.-J., Heck, D. W., Matzke, D. (2019). A simple method for comparing complex models:
    Bayesian model comparison for hierarchical multinomial processing tree models using warp-III bridge sampling.
    Psychometrika 84, 261-284.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._bridge import bridge_sampling, warp_bridge_sampling
    >>> case = bk.exact.get("eight_schools")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = warp_bridge_sampling(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    >>> z.standard_error < bridge_sampling(draws.target, draws).standard_error
    True
    """
    halves = halved(target, draws, num_proposals)
    fitted, x = halves.fitted, halves.unconstrained
    generator = new_generator(seed, stream="warp bridge sampling")
    noise = torch.randn(halves.num_proposals, target.dim, generator=generator, dtype=x.dtype).to(x.device)
    step = noise @ fitted.scale_tril.T
    y = fitted.loc + step
    # The fitted normal is symmetric about its mean and has the same Jacobian as the warp, which therefore cancels.
    # The sign of a draw is irrelevant.
    posterior = _symmetrised(halves.log_density, _density(target, 2 * fitted.loc - x))
    proposal = _symmetrised(_density(target, y), _density(target, fitted.loc - step))
    return _bridged(
        "warp_bridge_sampling",
        halves,
        posterior - fitted.log_prob(x),
        proposal - fitted.log_prob(y),
        2 * halves.num_proposals + halves.log_density.numel(),
    )


def _density(target: Target, u: Tensor) -> Tensor:
    value = target.log_density(u)
    # NaN in one half of the mixture must not make the whole NaN.
    return torch.where(value.isnan(), -torch.inf, value)


def _symmetrised(here: Tensor, mirrored: Tensor) -> Tensor:
    return torch.logaddexp(here, mirrored) - math.log(2)
