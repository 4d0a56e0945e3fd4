"""Bridge sampling after the posterior was centred, standardised and made symmetric."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.posterior.bridge_sampling import bridged, halved
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


@estimator()
def warp_bridge_sampling(target: Target, draws: Draws, *, num_proposals: int | None = None, seed: int = 0) -> Evidence:
    """Bridge between the standard normal distribution and the posterior, warped to look like it.

    With the mean and the covariance ``L L'`` of the first half of each chain, ``e = L^-1 (u - mean)`` is centred and
    standardised; the mixture of its density and that of ``-e`` in equal parts has no skewness left and still
    integrates to the evidence. Where the posterior is skewed this lies closer to a normal distribution than the
    posterior itself, so that :func:`bridge_sampling` needs more draws for the same error; each proposal and each
    draw of the second half costs one evaluation more, at its mirror image.

    The standard error is that of :func:`bridge_sampling`. A draw's ratio of densities depends on the draw alone, as
    its mirror image does, so that their autocorrelation is that of the chain; a step across the centre no longer
    counts as one.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``, at least ``4 * dim`` of them, or 200 in more than 50 dimensions.
    num_proposals : int, optional
        Draws from the standard normal, at least two; by default as many as posterior draws evaluated.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target, are too few for mean and covariance, or their covariance is singular.
    SettingsError
        If ``num_proposals`` is no whole number or less than two.

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
    >>> from bayeskit.inference.evidence.posterior import bridge_sampling, warp_bridge_sampling
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
    # The fitted normal is symmetric about its mean and has the same Jacobian, so the standard normal needs no
    # mention; and a draw's sign does not matter.
    posterior = _symmetrised(halves.log_density, _density(target, 2 * fitted.loc - x))
    proposal = _symmetrised(_density(target, y), _density(target, fitted.loc - step))
    z = bridged(
        "warp_bridge_sampling",
        halves,
        posterior - fitted.log_prob(x),
        proposal - fitted.log_prob(y),
        2 * halves.num_proposals + halves.log_density.numel(),
    )
    return with_missed_peak(z, target, draws)


def _density(target: Target, u: Tensor) -> Tensor:
    value = target.log_density(u)
    # One half of the mixture that is not a number must not spoil the other.
    return torch.where(value.isnan(), -torch.inf, value)


def _symmetrised(here: Tensor, mirrored: Tensor) -> Tensor:
    return torch.logaddexp(here, mirrored) - math.log(2)
