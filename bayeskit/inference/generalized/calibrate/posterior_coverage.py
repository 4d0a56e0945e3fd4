"""The learning rate whose credible regions cover as often as they say, over bootstrap replicates of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized.calibrate.assumptions import on_kinks
from bayeskit.inference.generalized.calibrate.own_weights import OwnWeights, replicate_weights
from bayeskit.inference.generalized.calibrate.resampling import resampled
from bayeskit.inference.generalized.calibrate.selection import Curve, Selection
from bayeskit.inference.generalized.coverage.functionals import as_functional
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors, replicate_posteriors
from bayeskit.inference.generalized.pooling import check_sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import information

NEAR = math.log(1.25)
REDRAWS = 6
MAX_UNTRUSTED = 0.01
TIED = 1e-6


def posterior_coverage(
    posterior: GibbsPosterior,
    level: float = 0.95,
    num_replicates: int = 1000,
    functional: Callable[[Any], Tensor] | None = None,
    *,
    num_draws: int = 1024,
    seed: int = 0,
) -> Selection:
    r"""Select the learning rate whose credible regions have their level as coverage, by the bootstrap.

    The data are resampled with replacement, the loss minimiser of the data themselves plays the truth, and the
    weight is the one at which regions of the given level cover it in that share of the replicates. Each replicate's
    own weight, above which its region no longer reaches the truth, is bracketed and then found by bisection in the
    logarithm; coverage at ``w`` is the share of replicates whose own weight is larger, so that the selected one is a
    quantile of them.

    The result does not depend on the posterior's present weight, and a loss ``c`` times as large gets a weight
    ``c`` times as small.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses that add up.
    level : float, default 0.95
        In (0, 1).
    num_replicates : int, default 1000
        Of the bootstrap: at least ``level / (1 - level)``, so that the quantile lies among their own weights.
    functional : callable, optional
        From what the loss takes as its parameter to one number, whose equal-tailed interval is to cover. By default
        the highest-posterior-density region of the whole parameter, in unconstrained coordinates.
    num_draws : int, default 1024
        From each replicate's posterior.
    seed : int, default 0

    Returns
    -------
    Selection
        Its standard error is that of the quantile, which comes from the number of replicates. With diagnostics
        ``"replicate_weights" (R,)``, ``"coverage"``, ``"level"``, ``"num_replicates"``, ``"pareto_shape"`` (the
        largest, at the replicates' own weights) and ``"share_trusted"``, of the replicates whose own weight is known,
        or at least known to be far above or below the selected one.

    Raises
    ------
    SettingsError
        If the level does not lie in (0, 1), replicates are too few for it, or ``functional`` returns more than one
        number.
    DataError
        If the data determine no minimiser, or the coverage is not reached at any weight.

    References
    ----------
    Syring, N., Martin, R. (2019). Calibrating general posterior credible regions. Biometrika 106, 479-486 (there by
    stochastic approximation).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> x = 2.0 * torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> chosen = posterior_coverage(GibbsPosterior(Flat(), losses.HalfSquared(), x), num_replicates=200)
    >>> 0.15 < chosen.weight < 0.4  # one over the variance, in the limit
    True
    """
    level = real_number("level", level, between=(0.0, 1.0))
    num_replicates = whole_number("num_replicates", num_replicates, least=20)
    _check_replicates(level, num_replicates)
    number = None if functional is None else as_functional(posterior, functional)
    if number is not None and len(number.names) != 1:
        raise SettingsError(
            f"the functional {number.names[0].partition('[')[0]!r} must return one number, whose interval is to "
            f"cover, not {len(number.names)}"
        )
    region = "highest-posterior-density regions" if number is None else f"equal-tailed intervals of {number.names[0]}"
    check_sum(posterior)
    found = information(posterior)
    counts = bootstrap_counts(posterior, num_replicates, seed)
    weight = _first_guess(found.mean_hessian, found.gradient_covariance)
    replicates = replicate_posteriors(posterior, weights=counts, weight=weight, num_draws=num_draws, seed=seed)
    for redraw in range(REDRAWS):
        each = replicate_weights(replicates, found.position, level, number, seed)
        own = each.weight
        selected = float(own.quantile(_position(level, num_replicates)))
        if not 0 < selected < math.inf:
            raise DataError(
                f"no learning rate gives {100 * level:g} % {region} that coverage over bootstrap replicates: in too "
                "many of them the region covers at none, or at all; look whether prior and data disagree, or take "
                "another level" + "".join(f"; {text}" for text in on_kinks(posterior, found.position))
            )
        if redraw == REDRAWS - 1 or abs(math.log(selected / weight)) < NEAR:
            break
        # Draws made for a weight far away say little of this one.
        weight = selected
        replicates = replicates.redrawn(weight, seed)
    each = each._replace(trusted=each.trusted | _known_to_be_beyond(own, weight, selected, replicates))
    return Selection(
        selected,
        f"The coverage of {100 * level:g} % {region}, over bootstrap replicates of the data.",
        "posterior_coverage",
        posterior,
        standard_error=_standard_error(own, level),
        diagnostics={
            "level": level,
            "coverage": float((own >= selected).double().mean()),
            "num_replicates": num_replicates,
            "replicate_weights": own,
            "pareto_shape": float(each.pareto_shape.max()),
            "share_trusted": float(each.trusted.double().mean()),
        },
        warnings=_warnings(each, level) + on_kinks(posterior, found.position),
        curve=_curve(own, selected),
    )


def _known_to_be_beyond(own: Tensor, weight: float, selected: float, replicates: ReplicatePosteriors) -> Tensor:
    """Tell which replicates' own weights lie on a known side of the selected one, wherever they are, ``(R,)``.

    They are far from it, and draws made at ``weight``, near it, can tell whether the region covers there.
    """
    low, high = sorted((weight, selected))
    far = (own.log() < math.log(low) - NEAR) | (own.log() > math.log(high) + NEAR)
    return far & replicates.trusted


def bootstrap_counts(posterior: GibbsPosterior, num_replicates: int, seed: int) -> Tensor:
    """Return how often each datum is drawn when as many as there are are drawn with replacement, ``(R, n)``."""
    counts = resampled(posterior.num_data, num_replicates, new_generator(seed, stream="posterior coverage"))
    return counts.to(dtype=posterior.dtype, device=posterior.device)


def _first_guess(mean_hessian: Tensor, gradient_covariance: Tensor) -> float:
    """Return the weight at which posterior and sampling variance agree on average, in the limit of many data."""
    mismatch = float(torch.linalg.solve(mean_hessian, gradient_covariance).trace())
    if not mismatch > 0:
        raise DataError("the data are fitted without error, so that nothing tells how far to trust them")
    return len(mean_hessian) / mismatch


def _position(level: float, num_replicates: int) -> float:
    """Return where among the replicates' own weights the selected one lies, from zero (smallest) to one.

    The ``k``-th smallest of ``R`` has in expectation the share ``k / (R + 1)`` below it, whatever their law.
    """
    rank = (1 - level) * (num_replicates + 1)
    return min(max((rank - 1) / (num_replicates - 1), 0.0), 1.0)


def _check_replicates(level: float, num_replicates: int) -> None:
    """Refuse levels whose quantile lies beyond the smallest or largest of so many replicates."""
    odds = max(level / (1 - level), (1 - level) / level)
    if num_replicates < odds * (1 - 1e-9):
        raise SettingsError(
            f"num_replicates must be at least {math.ceil(odds * (1 - 1e-9))} at level {level:g}, not {num_replicates}: "
            "level / (1 - level), or the inverse if that is larger"
        )


def _standard_error(own: Tensor, level: float) -> float:
    """Return the standard error of a quantile, from its neighbours one binomial standard error away."""
    below, above = _neighbours(own, level)
    return 0.5 * (above - below)


def _neighbours(own: Tensor, level: float) -> tuple[float, float]:
    share = math.sqrt(level * (1 - level) / len(own))
    below, above = max(1 - level - share, 0.0), min(1 - level + share, 1.0)
    return float(own.quantile(below)), float(own.quantile(above))


def _curve(own: Tensor, selected: float) -> Curve:
    """Return coverage over bootstrap replicates against the weight, about the selected one."""
    weights = selected * torch.logspace(-2, 2, 33, base=2.0, dtype=own.dtype, device=own.device)
    share = (own[:, None] >= weights).to(own).mean(0)
    return Curve(weights, share, (share * (1 - share) / len(own)).sqrt(), "coverage of the bootstrap's truth")


def _warnings(each: OwnWeights, level: float) -> tuple[str, ...]:
    found = []
    share = float((~each.trusted).double().mean())
    if share > MAX_UNTRUSTED:
        found.append(
            f"{100 * share:.1f} % of the replicates' posteriors could not be computed reliably by importance sampling; "
            "take more draws, or reparametrise the model"
        )
    below, above = _neighbours(each.weight, level)
    if above - below <= TIED * above:
        found.append(
            "many replicates have the same own weight, so that coverage jumps at the selected one and its standard "
            "error means nothing: too few distinct data for a bootstrap; take information_matching, or more data"
        )
    return tuple(found)
