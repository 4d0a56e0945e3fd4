"""Peaks that no draw has found: the mass about the highest mode, against an estimate of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import InitializationError
from bayeskit.inference.evidence.mode.modes import curvature, find_modes
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

PEAK_DRAWS = 1000
MIN_PEAK_SHARE = 0.1
MAX_PEAK_EXCESS = math.log(1.5)


@dataclass(frozen=True)
class Peak:
    """The highest peak of a posterior, as far as a normal approximation describes it.

    Attributes
    ----------
    log_mass : float
        Log of prior times likelihood integrated over it; minus infinity where a normal distribution does not fit.
    num_evaluations : int
        Spent on finding and weighing it.
    """

    log_mass: float
    num_evaluations: int


# One search serves all estimators on the same draws.
_KNOWN: WeakKeyDictionary[Draws, Peak] = WeakKeyDictionary()


def highest_peak(target: Target, draws: Draws, *, seed: int = 0) -> Peak:
    """Climb from the best of the draws, and from the prior, and weigh the highest mode by importance.

    Parameters
    ----------
    target : Target
    draws : Draws
        Of any temperature. What was found from them once is kept as long as they are.
    seed : int, default 0

    Returns
    -------
    Peak

    Examples
    --------
    The slab of this problem holds its chains; the spike holds a hundred times more:

    >>> import bayeskit as bk
    >>> case = bk.exact.spike_and_slab(5)
    >>> draws = bk.sample(case.target(), 2, 20, 20, progress=False)
    >>> abs(highest_peak(draws.target, draws).log_mass - case.log_evidence) < 0.2
    True
    """
    if draws not in _KNOWN:
        _KNOWN[draws] = _search(target, draws, seed)
    return _KNOWN[draws]


def with_missed_peak(estimate: Evidence, target: Target, draws: Draws, *, seed: int = 0) -> Evidence:
    """Return the estimate, with a warning if a peak that the draws passed over holds more than it.

    A peak that is much narrower than what surrounds it draws no chain before the temperature at which it suddenly holds
    most of the mass, and no diagnostic of the chains notices.

    Parameters
    ----------
    estimate : Evidence
        From `draws`.
    target : Target
    draws : Draws
    seed : int, default 0

    Returns
    -------
    Evidence
        The search is counted in `num_evaluations`; `peak_excess` joins the diagnostics.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import Evidence
    >>> case = bk.exact.spike_and_slab(5)
    >>> draws = bk.sample(case.target(), 2, 20, 20, progress=False)
    >>> with_missed_peak(Evidence("of the slab", 0.0, 0.01, 40), draws.target, draws).trusted
    False
    """
    peak = highest_peak(target, draws, seed=seed)
    excess = peak.log_mass - estimate.log_evidence
    problems: tuple[str, ...] = ()
    # An estimate that is NaN has said so, and exceeds nothing.
    if excess > max(MAX_PEAK_EXCESS, 5 * estimate.standard_error):
        problems = (
            f"a narrow peak that no draw found holds {excess:.1f} nats more than the estimate: use nested_sampling or "
            "laplace_importance_sampling",
        )
    return replace(
        estimate,
        num_evaluations=estimate.num_evaluations + peak.num_evaluations,
        warnings=estimate.warnings + problems,
        diagnostics=estimate.diagnostics | {"peak_excess": excess},
    )


def _search(target: Target, draws: Draws, seed: int) -> Peak:
    try:
        modes, search = find_modes(target, seed=seed, draws=draws)
    except InitializationError:
        return Peak(-math.inf, 0)
    precision, differences = curvature(target, modes[0])
    factor, failed = torch.linalg.cholesky_ex(precision)
    spent = search + differences
    if bool(failed) or not bool(factor.isfinite().all()):
        return Peak(-math.inf, spent)
    generator = new_generator(seed, factor.device, stream="mass of the highest peak")
    like = {"dtype": factor.dtype, "device": factor.device, "generator": generator}
    noise = torch.randn(PEAK_DRAWS, target.dim, **like)  # type: ignore[call-overload]
    x = modes[0] + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
    constant = factor.diagonal().log().sum() - 0.5 * target.dim * math.log(2 * math.pi)
    log_weight = target.log_density(x) + 0.5 * noise.square().sum(-1) - constant
    log_weight = log_weight.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    total = log_weight.logsumexp(0)
    share = (2 * total - (2 * log_weight).logsumexp(0)).exp() / PEAK_DRAWS
    fits = bool(share > MIN_PEAK_SHARE)
    return Peak(float(total) - math.log(PEAK_DRAWS) if fits else -math.inf, spent + PEAK_DRAWS)
