"""Was a constant dropped? A wrong constant in prior or likelihood is a wrong evidence with a right-looking error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bayeskit._pyro import PyroDensity
from bayeskit._pyro.witness import Part, log_normaliser, parts_of
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import BayeskitError
from bayeskit.inference.evidence._prior_integral import NOTABLE, ONE, SURE, UNKNOWN, Integral, with_draws, without_draws
from bayeskit.inference.evidence.improper_priors import listed
from bayeskit.target import Target

LEAST_DRAWS = 500


@dataclass(frozen=True)
class ConstantsReport:
    """What is known of the constants in a target's prior and likelihood.

    Attributes
    ----------
    log_prior_integral : float
        Log of the integral of the prior over unconstrained space; zero if it is normalised, NaN if not known.
    standard_error : float
        Of ``log_prior_integral``.
    warnings : tuple of str
        What is wrong: the evidence is off by what they say.
    notes : tuple of str
        What no check can see, or what the evidence is then the evidence of.
    num_evaluations : int
        Evaluations of the density.
    improper : bool
        Whether the prior has no end along some direction, so that there is no evidence.

    Examples
    --------
    >>> from bayeskit.inference.evidence.constants import ConstantsReport
    >>> ConstantsReport(0.0, 0.001, (), (), 8000).fine
    True
    """

    log_prior_integral: float
    standard_error: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    num_evaluations: int
    improper: bool = False

    @property
    def fine(self) -> bool:
        """Whether nothing was found to be wrong."""
        return not self.warnings

    def __str__(self) -> str:
        lines = [f"warning: {text}" for text in self.warnings] + [f"note: {text}" for text in self.notes]
        return "\n".join(lines) or "no constant is missing"


def check_constants(target: Target, *, num_draws: int = 4000, thorough: bool = False, seed: int = 0) -> ConstantsReport:
    r"""Look for constants that were dropped from prior or likelihood.

    **The prior** must integrate to one. Its integral is estimated twice: by importance sampling from Student-t
    variables fitted to draws from the prior, or, where it cannot be drawn from, placed at its mode; and by a bridge
    between those draws and the reference, which also asks whether the draws follow the density. A prior that does not
    fall off along some direction is improper. Where tails or shape are beyond both, the integral is unknown, which is
    a note and not a warning. A Pyro model whose latent sites all have distributions of torch or Pyro itself has a
    normalised prior by construction, and is not integrated unless ``thorough``.

    **The likelihood** of observed sites with distributions of torch, Pyro or this library is normalised by
    construction. Distributions of the user's own over one variable are summed or integrated numerically. A
    ``pyro.factor`` or a function carries whatever constants were put into it: **no check can find one that was left
    out**, since a likelihood as a function of the parameter alone has no scale, and the evidence is relative to it.
    A note names those parts, but for factors that the model itself names in an attribute ``normalised_factors``, as
    those of this library do whose factor is the log probability of data, constants and all.

    Parameters
    ----------
    target : Target
    num_draws : int, default 4000
        Points at which the prior is compared with its reference, at least 500.
    thorough : bool, default False
        Integrate the prior in any case.
    seed : int, default 0

    Returns
    -------
    ConstantsReport

    Raises
    ------
    SettingsError
        If ``num_draws`` is no whole number of at least 500.

    References
    ----------
    Bennett, C. H. (1976). Efficient estimation of free energy differences from Monte Carlo data. Journal of
    Computational Physics 22, 245-268.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.evidence.constants import check_constants
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1),
    ...     lambda u: -0.5 * (u - 1).square().sum(-1),
    ...     2,
    ...     sample_prior=lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64),
    ... )
    >>> found = check_constants(target)
    >>> found.fine, abs(found.log_prior_integral - 1.837877) < 5 * found.standard_error  # 2 pi was dropped
    (False, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=LEAST_DRAWS)
    density = target._density
    parts = parts_of(density, new_generator(seed, stream="constants")) if isinstance(density, PyroDensity) else None
    warnings, notes = _of_parts(parts) if parts is not None else ([], [_FUNCTIONS])
    if parts is not None and not thorough and all(p.normalised for p in parts if not p.observed):
        return ConstantsReport(0.0, 0.0, tuple(warnings), tuple(notes), 1)
    with one_thread(), torch.no_grad():
        integral, of_prior, unknown, count, improper = _of_prior(target, num_draws, seed, parts)
    return ConstantsReport(
        integral.log_value, integral.standard_error, (*of_prior, *warnings), (*notes, *unknown), count, improper
    )


_FAILURES = (BayeskitError, ArithmeticError, RuntimeError, ValueError, TypeError)
_FUNCTIONS = (
    "the likelihood is a function, so the evidence is relative to the constants in it; nothing can show one that was "
    "left out"
)


def _of_prior(
    target: Target, num_draws: int, seed: int, parts: list[Part] | None
) -> tuple[Integral, list[str], list[str], int, bool]:
    """Return the prior's integral, warnings, notes, evaluations spent, and whether it is known to be improper."""
    draws = None
    if target.can_sample_prior:
        try:
            draws = target.sample_prior(2 * num_draws, seed).detach().to("cpu", torch.float64)
        except _FAILURES:
            draws = None  # an improper prior has none; whatever else went wrong, those who need draws will meet it
    if draws is not None:
        draws = draws[draws.isfinite().all(-1)]
        if len(draws) < num_draws:
            return UNKNOWN, [], [_unknown(parts)], 0, False
        check = with_draws(target, draws, seed)
    else:
        check = without_draws(target, 2 * num_draws, seed)
    if check.flat is not None:
        return UNKNOWN, [_improper(check.flat)], [], check.num_evaluations, True
    sure, bridged = check.by_importance, check.by_bridge
    found = []
    if sure.differs(ONE, SURE, NOTABLE):
        found.append(_off(sure, parts))
    if check.misfit > SURE + 1 or sure.differs(bridged, SURE, NOTABLE):
        names = "sample_prior do not follow log_prior" if parts is None else "the prior do not follow its density"
        found.append(f"the draws of {names}: methods that start from the prior are wrong; make the two agree")
    if not sure.reliable and bridged.differs(ONE, SURE, NOTABLE):
        found.append(_off(bridged, parts) + ", unless the prior's draws do not follow its density")
    # With draws from elsewhere the bridge leads elsewhere, so importance sampling comes first.
    best = sure if sure.reliable else bridged if bridged.reliable else UNKNOWN
    return best, found, [] if best.reliable else [_unknown(parts)], check.num_evaluations, False


def _off(integral: Integral, parts: list[Part] | None) -> str:
    log_value, error = integral.log_value, integral.standard_error
    size = f"{math.exp(log_value):.3g}" if abs(log_value) < 25 else f"exp({log_value:.1f})"
    own = [f"{p.name!r} ({p.own})" for p in parts or () if not p.observed and p.own]
    place = "log_prior" if parts is None else f"the log_prob of {', '.join(own)}" if own else "the prior"
    return (
        f"the prior integrates to {size} and not to one: a constant was dropped; add {-log_value:+.3f} to {place}, "
        f"where {error:.1g} is the error of that number"
    )


def _improper(direction: str) -> str:
    return f"the prior is improper, without end along {direction}: no marginal likelihood exists; give it a proper one"


def _unknown(parts: list[Part] | None) -> str:
    own = [repr(p.name) for p in parts or () if not p.observed and p.own]
    where = f" with the sites {', '.join(own)}" if own else ""
    return f"whether the prior{where} integrates to one could not be checked: its shape or its tails defeat the check"


def _of_parts(parts: list[Part]) -> tuple[list[str], list[str]]:
    """Return warnings and notes on the sites of a Pyro model."""
    warnings, notes = [], []
    observed = [p for p in parts if p.observed]
    factors = [repr(p.name) for p in observed if p.factor]
    if factors:
        many = len(factors) > 1
        notes.append(
            f"the likelihood has the factor{'s' if many else ''} {listed(factors)}: the evidence is relative to the "
            f"constants in {'them' if many else 'it'}; nothing can show one that was left out (if none was, name "
            f"{'them' if many else 'it'} in an attribute normalised_factors of the model)"
        )
    for part in observed:
        if not bool((part.scale == 1).all()):
            amount = f"{float(part.scale):.3g}" if part.scale.numel() == 1 else "several numbers"
            notes.append(
                f"the observed site {part.name!r} is scaled by {amount}: its likelihood is tempered, and the evidence "
                "is not the probability of the data"
            )
        if part.masked > 0:
            notes.append(
                f"{100 * part.masked:.3g} % of the observed site {part.name!r} is masked: the evidence is that of the "
                "rest"
            )
    for part in parts:
        if part.own is None or part.factor:
            continue
        problem = _own_distribution(part)
        if problem is None and part.observed:
            notes.append(f"whether {part.own} of the observed site {part.name!r} is normalised could not be checked")
        elif problem:
            warnings.append(problem)
    return warnings, notes


def _own_distribution(part: Part) -> str | None:
    """Return what is wrong with the user's own distribution, an empty string if nothing is, None if not known."""
    try:
        with torch.no_grad():
            total = log_normaliser(part.distribution, part.value)
    # Anything can go wrong in a class that was never written for a grid of values; then it is just not known.
    except Exception:
        return None
    if total is None or not bool(total.isfinite().all()):
        return None
    worst = float(total[total.abs().argmax()])
    if abs(worst) <= NOTABLE:
        return ""
    return (
        f"{part.own} of the {'observed' if part.observed else 'latent'} site {part.name!r} is not normalised: it "
        f"{'sums' if part.distribution.support.is_discrete else 'integrates'} to {math.exp(min(worst, 700.0)):.3g}"
        f"; add {-worst:+.3f} to its log_prob"
    )
