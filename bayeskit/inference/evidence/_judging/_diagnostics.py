"""Diagnostics of a target and of posterior draws, by which every estimate is judged.

The decorator of estimators adds the warnings of the target's :class:`Diagnostics` to estimates from posterior draws,
and to those that an estimator returns by :func:`from_draws`. Searches are made once for each target and once for each
set of draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import effective_sample_size
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import ConstantsWarning, SettingsError
from bayeskit.inference._known_modes import (
    MIN_MISSING,
    KnownModes,
    WeightedMode,
    check_modes,
    divided_by_valleys,
    is_missed,
    num_looks,
)
from bayeskit.inference.evidence._judging._constants import ConstantsReport, check_constants
from bayeskit.inference.evidence._judging._densities import rounding_problems
from bayeskit.inference.evidence._judging._improper_priors import improper
from bayeskit.inference.evidence._judging._missed_mass import exceeds_error, same_likelihood
from bayeskit.inference.evidence._modes import STARTS_BESIDE_DRAWS, best_of, starts_from_prior
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._starts import prior_positions
from bayeskit.inference.samplers._unseen_tails import unseen_tails

_T = TypeVar("_T")

#: Number of searches from prior draws, and from points separated by valleys.
_PRIOR_STARTS, _DIVIDED_STARTS = 6, 6
#: Number of starts from which single terms of a mixture are maximized.
_SUMMAND_STARTS = 4
#: Tails may extend beyond the draws by this share of their width in each coordinate.
_MARGIN = 0.25
#: Standard deviations of the probe distributions, in units of that of the draws, and number of probes each.
WIDER, LOOKS = (2.0, 4.0, 8.0, 16.0, 32.0), 200


@dataclass(frozen=True, repr=False)
class EvidenceFromDraws(Evidence):
    """An estimate from posterior draws, with the draws by which it is judged.

    Attributes
    ----------
    draws : Draws
        Draws behind the estimate, of any temperature.
    known_bias : float
        Nats by which the estimate is known to be too low.
    others : sequence of Draws
        Further draws that must show every mode.
    """

    draws: Draws | None = field(default=None, repr=False)
    known_bias: float = 0.0
    others: Sequence[Draws] = field(default=(), repr=False)


def from_draws(
    estimate: Evidence, draws: Draws, *, known_bias: float = 0.0, others: Sequence[Draws] = ()
) -> EvidenceFromDraws:
    """Return an estimate with the draws by which it is judged; an estimate without draws is not judged.

    Parameters
    ----------
    estimate : Evidence
    draws : Draws
        Draws behind the estimate, of any temperature.
    known_bias : float, default 0
        Nats by which the estimate is known to be too low.
    others : sequence of Draws, optional
        Further draws that must show every mode.

    Returns
    -------
    EvidenceFromDraws
    """
    return EvidenceFromDraws(**vars(estimate), draws=draws, known_bias=known_bias, others=others)


class FoundModes(NamedTuple):
    """All known modes of a target, those of the largest mass first, and the evaluations of the search from draws."""

    found: tuple[WeightedMode, ...]
    num_evaluations: int


class _Prior(NamedTuple):
    """Draws ``(n, d)`` of a target's prior, if available, and the evaluations of the searches from the prior."""

    draws: Tensor | None
    num_evaluations: int


class Diagnostics:
    """Diagnostics of one target, each computed on first use and stored with the target.

    Parameters
    ----------
    target : Target
    seed : int, default 0
        Seed of the random points. Estimators use ``seed=0``, so that a judgement does not depend on the order of calls.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import Diagnostics
    >>> diagnostics = Diagnostics(exact.get("linreg10").target())
    >>> diagnostics.improper is None, diagnostics.constants.fine
    (True, True)
    """

    def __init__(self, target: Target, *, seed: int = 0) -> None:
        self.target, self.seed = require_target(target), seed

    def _once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return a stored result, or compute and store it."""
        key = f"{name} {self.seed}"
        if key not in self.target.findings:
            self.target.findings[key] = make()
        found: _T = self.target.findings[key]
        return found

    @property
    def improper(self) -> str | None:
        """Reason why the prior is improper; None if unknown or proper."""
        return self._once("improper prior", lambda: improper(self.target))

    @property
    def constants(self) -> ConstantsReport:
        """Report on the normalising constants of prior and likelihood."""
        return self._once("constants", lambda: check_constants(self.target, seed=self.seed))

    def check_target(self, *, proper: bool = True) -> ConstantsReport:
        """Warn of the problems of the constants, and return their report.

        Raises
        ------
        SettingsError
            If the prior has to be ``proper`` and is not.
        """
        if proper and self.improper is not None:
            raise SettingsError(self.improper)
        if proper and self.constants.improper:
            raise SettingsError(self.constants.warnings[0])
        for problem in self.constants.warnings:
            warn_user(problem, ConstantsWarning)
        return self.constants

    def modes(self, draws: Draws) -> FoundModes:
        """Return all known modes, after a search from draws, of any temperature, and from the prior."""
        searched: WeakKeyDictionary[Draws, int] = self._once("searched draws", WeakKeyDictionary)
        if draws not in searched:
            searched[draws] = self._search(draws)
        return FoundModes(tuple(KnownModes.of(self.target).weighted), searched[draws])

    def judge(self, estimate: EvidenceFromDraws) -> Evidence:
        """Return the estimate with a warning if the draws miss a part of the posterior."""
        # No chain may visit a narrow or distant mode, and no chain diagnostic detects that. If the estimate is right,
        # the mass of a mode over it is the share of draws there.
        draws, z = estimate.draws, Evidence(**{f.name: getattr(estimate, f.name) for f in fields(Evidence)})
        if draws is None:
            return z
        # A known error of a quadrature rule does not make a missed part smaller.
        by_draws = replace(z, standard_error=z.diagnostics.get("monte_carlo_error", z.standard_error))
        modes, least = self.modes(draws), by_draws.standard_error
        last = draws if bool((draws.beta == 1).all()) else draws.select(draws.beta == 1)
        rounded, share_rounded = rounding_problems(self.target, last.unconstrained, None, least)
        problems = (*z.warnings, *same_likelihood(self.target, draws.log_likelihood), *rounded)
        worst, spent = math.nan, modes.num_evaluations
        if math.isfinite(z.log_evidence):
            outside, looks = self._mass_outside(last, by_draws)
            spent += looks

            def check(modes: Sequence[WeightedMode]) -> list[str]:
                nonlocal worst
                missed = []
                for mode, looked in product(modes, (last, *estimate.others)):
                    expected, share, chance, relative_error = _in_mode(mode, by_draws, looked, estimate.known_bias)
                    worst = expected - share if math.isnan(worst) else max(worst, expected - share)
                    if is_missed(expected, share, chance, relative_error, least):
                        missed.append(
                            f"a mode with a mass of {expected:.3g} times the estimate has {100 * share:.2g} % of the "
                            "draws: they miss a part of the posterior; use nested_sampling or "
                            "laplace_importance_sampling"
                        )
                return missed[:1]

            missed = check_modes(check, modes.found)
            tails = unseen_tails(last)
            spent += tails.num_gradients
            seen = [tail.warning for tail in tails.found if tail.share > least]
            problems = (*problems, *outside, *missed, *seen)
        return replace(
            z,
            num_evaluations=z.num_evaluations + spent,
            warnings=problems,
            diagnostics=z.diagnostics | {"rounded_share": share_rounded, "missed_share": worst},
        )

    def _look_at_prior(self) -> _Prior:
        start, spent = starts_from_prior(self.target, self.seed, needed=False)
        start = start[:STARTS_BESIDE_DRAWS]
        draws = prior_positions(self.target, num_looks(self.target), new_generator(self.seed, stream="peaks"))
        if draws is not None:
            start = torch.cat([start, draws[:_PRIOR_STARTS].to(start)])
        known = KnownModes.of(self.target)
        return _Prior(draws, spent + known.search(self.target, start, "prior draws", independent=True))

    def _search(self, draws: Draws) -> int:
        """Search for modes from draws and from the prior, and return evaluations."""
        known, spent = KnownModes.of(self.target), 0
        with density_may_fail():  # draws and estimate remain valid; only this check is not available
            prior = self._once("prior", self._look_at_prior)
            spent += prior.num_evaluations
            # The best of many draws may all belong to one mode, so one point per mode seen by posterior or prior draws
            # is added.
            x, count = draws.unconstrained.flatten(0, 1), num_looks(self.target)
            seen = x[torch.linspace(0, len(x) - 1, min(count, len(x)), device=x.device).round().long()]
            if prior.draws is not None:
                seen = torch.cat([seen, prior.draws.to(seen)])
            divided, looks = divided_by_valleys(self.target, seen, _DIVIDED_STARTS)
            starts = torch.cat([best_of(draws).to(divided), divided])
            spent += looks + known.search(self.target, starts, "draws")
            spent += known.search_summands(self.target, starts[:_SUMMAND_STARTS])
            spent += known.weigh(self.target, seed=self.seed)
        return spent

    def _mass_outside(self, draws: Draws, estimate: Evidence) -> tuple[list[str], int]:
        """Return a warning if wider normal draws find mass outside the box of the posterior draws, and evaluations."""
        # Chains that all start in a narrow peak never leave it; no mode search ends in the broad part around it.
        x = draws.unconstrained.reshape(-1, self.target.dim)
        low, high, deviation = x.amin(0), x.amax(0), x.std(0)
        if not bool((deviation > 0).all()):
            return [], 0
        margin = _MARGIN * (high - low)
        generator = new_generator(self.seed, self.target.device, "mass outside of draws")
        wider = torch.tensor(WIDER, dtype=x.dtype, device=x.device).repeat_interleave(LOOKS)
        scale = wider.unsqueeze(-1) * deviation
        noise = torch.randn(scale.shape, generator=generator, dtype=x.dtype, device=x.device)
        at = x.mean(0) + scale * noise
        log_density = None
        with density_may_fail():
            log_density = self.target.log_density(at)
        if log_density is None:
            return [], 0
        log_proposal = torch.distributions.Normal(x.mean(0), scale).log_prob(at).sum(-1)
        log_terms = (log_density - log_proposal).nan_to_num(nan=-torch.inf) - estimate.log_evidence
        outside = ((at < low - margin) | (at > high + margin)).any(-1)
        log_terms = torch.where(outside, log_terms, -torch.inf).reshape(len(WIDER), LOOKS)
        least = max(estimate.standard_error, MIN_MISSING)
        if not any(exceeds_error(terms, LOOKS, least) for terms in log_terms):
            return [], len(at)
        return [
            "there is mass around the posterior draws, outside their range, so they miss a part of the posterior; "
            "use nested_sampling, stepping_stone or smc"
        ], len(at)


def _in_mode(
    mode: WeightedMode, estimate: Evidence, draws: Draws, known_bias: float
) -> tuple[float, float, float, float]:
    """Return the expected share of a mode, the share of draws in it, its standard error, and the relative error."""
    inside = mode.holds(draws.unconstrained).to(torch.float64)
    share = float(inside.mean())
    effective = min(float(effective_sample_size(inside)), inside.numel()) if draws.num_draws >= 8 else draws.num_chains
    expected = math.exp(min(mode.log_mass - estimate.log_evidence - known_bias, 700.0))
    # The binomial error of the expected share; that of a share of zero would be zero.
    likely = min(max(share, min(expected, 1.0)), 1.0)
    binomial = math.sqrt(max(likely * (1 - likely), 1 / effective) / effective)
    known = estimate.standard_error if math.isfinite(estimate.standard_error) else 0.0
    return expected, share, binomial, math.hypot(mode.relative_error, known)
