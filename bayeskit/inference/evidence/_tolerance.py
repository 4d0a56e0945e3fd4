"""Whether an evidence depends on the tolerance of a numerical solver inside the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bayeskit._core.convergence import MAX_PARETO_SHAPE
from bayeskit._core.inputs import real_number
from bayeskit._core.page import Listed, result_html
from bayeskit._core.statistics import log_mean_exp, log_mean_exp_error, pareto_shape
from bayeskit._core.texts import with_error
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.evidence._bridge import bridge_sampling
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers import sample

#: The tighter tolerance as a share of the other; errors of a difference below which it may be noise.
_TIGHTER, _SIGNIFICANT = 1e-2, 2.0


@dataclass(frozen=True, repr=False)
class ToleranceCheck:
    """The log evidence of a model at two tolerances of its solver.

    Attributes
    ----------
    rtol, tighter_rtol : float
        The two tolerances.
    evidence, tighter_evidence : Evidence
        At each, by bridge sampling; errors of the two are dependent where both are from the same draws.
    difference : float
        Log evidence at the tighter tolerance minus the other, in nats.
    standard_error : float
        Monte Carlo standard error of ``difference``.
    warnings : tuple of str
        Problems found, each with its remedy.
    trusted : bool
        False if the evidences differ by more than the standard error of ``evidence`` and two of ``difference``, if the
        two posteriors barely overlap, if the two densities are equal to the bit, as where the tolerance is not used, or
        if one evidence is not trusted.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence
    >>> from bayeskit.inference.evidence._tolerance import ToleranceCheck
    >>> one, other = (Evidence("bridge_sampling", value, 0.01, 8000) for value in (-145.45, -145.56))
    >>> print(ToleranceCheck(1e-2, 1e-4, one, other, -0.11, 0.002))
    log evidence -145.450 +- 0.010 at rtol 0.01, -145.560 +- 0.010 at 0.0001, difference -0.1100 +- 0.0020
    """

    rtol: float
    tighter_rtol: float
    evidence: Evidence
    tighter_evidence: Evidence
    difference: float
    standard_error: float
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if no problem was found, and both evidences are trusted."""
        return not self.warnings and self.evidence.trusted and self.tighter_evidence.trusted

    def _repr_html_(self) -> str:
        count = len(self.warnings)
        title = f"{count} warning{'s' * (count > 1)}"
        listed = [Listed(title, [("tolerance", why) for why in self.warnings])] if count else []
        return result_html(self._text() + ("" if self.trusted else ", not trusted"), folded=listed, notes=[])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        problems = self.warnings or (*self.evidence.warnings, *self.tighter_evidence.warnings)
        return self._text() + ("" if self.trusted else "  NOT TRUSTED: " + "; ".join(problems))

    def _text(self) -> str:
        one, other = self.evidence, self.tighter_evidence
        return (
            f"log evidence {with_error(one.log_evidence, one.standard_error)} at rtol {self.rtol:g}, "
            f"{with_error(other.log_evidence, other.standard_error)} at {self.tighter_rtol:g}, "
            f"difference {with_error(self.difference, self.standard_error)}"
        )


def tolerance_check(
    target_factory: Callable[[float], Target],
    rtol: float = 1e-6,
    *,
    tighter_rtol: float | None = None,
    draws: Draws | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ToleranceCheck:
    r"""Compare the evidence of a model at two tolerances of its solver, such as that of :func:`bayeskit.ode.solve`.

    With draws ``u`` from the posterior at ``rtol``, the ratio of the evidences is the posterior mean of the ratio of
    the unnormalised densities :math:`p_\text{tighter}(u) / p(u)`. The draws are common to both, so its error is far
    below that of either evidence. Where it is not, as for posteriors that barely overlap, each has draws of its own.

    Parameters
    ----------
    target_factory : callable
        ``rtol -> Target``: the same model and data, at a tolerance. The step size of a solver with fixed steps will do.
        An absolute tolerance must fall in proportion; that of :func:`bayeskit.ode.solve` does so by default.
    rtol : float, default 1e-6
        The tolerance in question.
    tighter_rtol : float, optional
        The tolerance to compare with, by default a hundredth of ``rtol``.
    draws : Draws, optional
        Posterior draws at ``rtol``; by default from :func:`~bayeskit.sample`.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    ToleranceCheck

    Raises
    ------
    SettingsError
        If a tolerance is not positive, ``tighter_rtol`` is not below ``rtol``, or the factory returns no target.
    ShapeError
        If the targets differ in their number of coordinates.

    Examples
    --------
    The decay of a quantity by steps of Euler's method, of length 1/8 and 1/800:

    >>> import pyro, pyro.distributions as dist, torch, bayeskit as bk
    >>> def model(h, y):
    ...     rate = pyro.sample("rate", dist.LogNormal(torch.zeros_like(y), 0.5))
    ...     pyro.sample("y", dist.Normal((1 - h * rate) ** round(1 / h), 0.02), obs=y)
    >>> y = torch.tensor(0.1, dtype=torch.float64)
    >>> check = bk.evidence.tolerance_check(lambda h: bk.Target.from_pyro(model, h, y), 1 / 8, progress=False)
    >>> check.trusted, 0 < -check.difference < 1
    (False, True)
    """
    rtol = real_number("rtol", rtol, "(0, inf)")
    tighter = rtol * _TIGHTER if tighter_rtol is None else real_number("tighter_rtol", tighter_rtol, f"(0, {rtol!r})")
    target, other = (_made(target_factory, tolerance) for tolerance in (rtol, tighter))
    if target.dim != other.dim:
        raise ShapeError(
            f"the target has {target.dim} coordinates at rtol {rtol:g} and {other.dim} at {tighter:g}; the factory "
            "must return the same model"
        )
    draws = sample(target, seed=seed, progress=progress) if draws is None else draws
    found = bridge_sampling(target, draws, seed=seed)
    log_ratio = other.log_density(draws.unconstrained) - target.log_density(draws.unconstrained)
    shape, problems = pareto_shape(log_ratio.flatten()), list[str]()
    difference, error = float(log_mean_exp(log_ratio)), float(log_mean_exp_error(log_ratio))
    if bool((log_ratio == 0).all()):
        problems.append(
            f"the densities at rtol {rtol:g} and {tighter:g} are equal to the bit, so that nothing is compared: "
            "target_factory does not hand its tolerance to the solver, or the model has none"
        )
    overlaps = bool((log_ratio < math.inf).all()) and shape <= MAX_PARETO_SHAPE
    if overlaps and error <= found.standard_error:
        value, own = found.log_evidence + difference, math.hypot(found.standard_error, error)
        again = replace(found, log_evidence=value, standard_error=own, diagnostics={})
    else:
        again = bridge_sampling(other, sample(other, seed=seed, progress=progress), seed=seed)
        difference = again.log_evidence - found.log_evidence
        error = math.hypot(found.standard_error, again.standard_error)
    if not overlaps:
        problems.append(
            f"the posteriors at rtol {rtol:g} and {tighter:g} barely overlap (Pareto k {shape:.2f}): the error of the "
            "solver changes the posterior; use the smaller rtol, and check again"
        )
    if not abs(difference) <= max(found.standard_error, _SIGNIFICANT * error):
        problems.append(
            f"the evidence at rtol {rtol:g} and {tighter:g} differs by {with_error(difference, error)}, more than its "
            f"standard error {found.standard_error:.2g}; use the smaller rtol, and check again"
        )
    return ToleranceCheck(rtol, tighter, found, again, difference, error, tuple(problems))


def _made(target_factory: Callable[[float], Target], rtol: float) -> Target:
    target = target_factory(rtol)
    if not isinstance(target, Target):
        raise SettingsError(f"target_factory must return a Target, not a {type(target).__name__}")
    return target
