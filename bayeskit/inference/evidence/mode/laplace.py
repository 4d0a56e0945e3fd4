"""The Laplace approximation: a normal distribution at the mode, with all of its correlations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.draws import Draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.mode.student_t import scaled_curvature
from bayeskit.inference.evidence.modes import Mode, find_mode, posterior, require_draws
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

_UNKNOWN = "an approximation whose error is not known: use laplace_importance_sampling, which measures it"

#: What a step of one standard deviation costs where the posterior curves at all, in nats; half where it is normal.
MIN_FALL = 0.01


@estimator()
def laplace(target: Target, *, draws: Draws | None = None, mode: Mode | None = None, seed: int = 0) -> Evidence:
    r"""Integrate the normal distribution that has the posterior's mode and curvature in unconstrained space.

    :math:`\log Z = f(m) + \frac{d}{2} \log 2 \pi - \frac{1}{2} \log \det(-f''(m))` with the log of prior times
    likelihood `f` over unconstrained space and its mode `m`.

    Parameters
    ----------
    target : Target
    draws : Draws, optional
        Posterior draws; a search for the mode starts from the best of them.
    mode : Mode, optional
        Of the target, if it is known already.
    seed : int, default 0
        Of the points where searches for the mode start.

    Returns
    -------
    Evidence
        Without a standard error, and so never trusted; NaN where the curvature is not positive in all directions.

    Raises
    ------
    InitializationError
        If no search for the mode ends at a finite density.
    DrawsError, SettingsError, ShapeError
        If draws or mode are of another target.

    References
    ----------
    Tierney, L., Kadane, J. B. (1986). Accurate approximations for posterior moments and marginal densities. Journal of
    the American Statistical Association 81, 82-86.

    Examples
    --------
    Exact where the posterior is normal:

    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.mode import laplace
    >>> case = bk.exact.get("linreg10")
    >>> z = laplace(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 1e-6, z.trusted
    (True, False)
    """
    require_draws(draws, target)
    mode = mode or find_mode(target, draws=draws, seed=seed)
    spent = mode.require(target)
    problems = (_UNKNOWN, *mode.problems)
    log_evidence = math.nan
    diagonal, eigenvalues = scaled_curvature(mode.precision)
    smallest, largest = float(eigenvalues.min()), float(eigenvalues.max())
    # A curvature that differences of gradients cannot tell from zero is none.
    resolved = torch.finfo(mode.precision.dtype).eps ** (2 / 3) * largest
    bends, probes = _falls_off(target, mode, diagonal)
    if bends and smallest > resolved:
        log_determinant = float(eigenvalues.log().sum() + diagonal.log().sum())
        log_evidence = mode.value + 0.5 * (target.dim * math.log(2 * math.pi) - log_determinant)
    else:
        problems += (
            "the posterior does not curve downwards in all directions at its mode, so no normal distribution fits: use "
            "bridge_sampling or stepping_stone",
        )
    return Evidence(
        "laplace",
        log_evidence,
        math.nan,
        mode.num_evaluations + spent + probes + (0 if draws is None else draws.num_gradients),
        problems,
        {"smallest_curvature": smallest, "largest_curvature": largest},
    )


def _falls_off(target: Target, mode: Mode, diagonal: Tensor) -> tuple[bool, int]:
    """Ask whether a step as long as the curvature along a coordinate is lower, where that may be no more than rounding.

    Units differ from one coordinate to another, so that a small number alone says nothing.
    """
    if not bool((diagonal > 0).all()):
        return False, 0
    doubtful = (diagonal <= torch.finfo(diagonal.dtype).eps ** (2 / 3) * diagonal.max()).nonzero().flatten()
    if not len(doubtful):
        return True, 0
    steps = torch.diag(diagonal.rsqrt())[doubtful]
    reached = posterior(target).value(torch.cat([mode.position + steps, mode.position - steps]))
    falls = (mode.value - reached).nan_to_num(nan=-torch.inf, posinf=torch.inf) > MIN_FALL
    return bool(falls.reshape(2, -1).any(0).all()), len(reached)
