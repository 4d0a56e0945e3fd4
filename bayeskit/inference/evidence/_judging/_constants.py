"""Checks for constants missing from a prior or likelihood, which bias the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE, MIN_EFFECTIVE
from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.inputs import whole_number
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.statistics import pareto_shape, weight_effective_sample_size
from bayeskit._logdensity.foreign_density import ForeignDensity
from bayeskit._logdensity.pyro_density import PyroDensity, WitnessedSite, log_integral_of_density, parts_of
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import BayeskitError
from bayeskit.inference._optimize import negative_hessian
from bayeskit.inference._proposals import IndependentStudentT, Mixture
from bayeskit.inference._ratio import bidirectional_ratio
from bayeskit.inference.evidence._judging._improper_priors import first_five
from bayeskit.inference.evidence._modes import find_modes

# The integral of a prior, by importance sampling, by a bridge to the prior's own draws, and along rays.

_FAR = (3.0, 30.0, 1e3, 1e5, 1e8)
_HEAVY = 4.3  # width of the 99 % over the 68 % interval: 2.6 for a normal, 3.7 for a Student-t with 5 degrees
_PILOTS = 6
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Scales of the references at each mode, as multiples of the curvature-based scale."""
_MAX_MODES, _NEAR, _SEARCHES = 8, 0.5, 4
"""Largest number of modes; distance, in standard deviations, of equal modes; searches that must reproduce a result."""
_SURE, _NOTABLE = 5.0, 0.01
"""Standard errors and nats above which two integrals differ; see :meth:`Integral.differs`."""
_MISSED = 0.5
"""Largest excess of a log weight of prior draws over those of the reference's draws."""


@dataclass(frozen=True)
class Integral:
    """An estimate of the log of an integral; if ``reliable`` is false it is unusable."""

    log_value: float
    standard_error: float
    reliable: bool

    def differs(self, other: Integral, errors: float, least: float) -> bool:
        """Whether two reliable estimates are further apart than ``errors`` standard errors and ``least`` nats."""
        off = abs(self.log_value - other.log_value)
        error = math.hypot(self.standard_error, other.standard_error)
        return self.reliable and other.reliable and off > max(errors * error, least)


_UNKNOWN = Integral(math.nan, math.nan, False)
_ONE = Integral(0.0, 0.0, True)


def student_fit(draws: Tensor, degrees_of_freedom: Tensor) -> IndependentStudentT:
    """Fit by quantiles, which are robust to heavy tails; ``draws`` has shape ``(n, d)``."""
    low, middle, high = (draws.quantile(q, 0) for q in (0.16, 0.5, 0.84))
    scale = (0.5 * (high - low)).clamp(min=1e-12)
    bounded = ((draws - middle) / scale).clamp(-4.0, 4.0)
    correlation = torch.corrcoef(bounded.T).reshape(len(scale), len(scale)).nan_to_num(0.0)
    correlation = 0.98 * correlation
    correlation.fill_diagonal_(1.0)
    factor = scale.unsqueeze(-1) * torch.linalg.cholesky(correlation)
    # Coordinates with an uncertain scale have heavier tails than along a single line.
    tail = (draws.quantile(0.995, 0) - draws.quantile(0.005, 0)) / (2 * scale)
    df = torch.where(tail > _HEAVY, degrees_of_freedom.clamp(max=1.0), degrees_of_freedom)
    return IndependentStudentT(middle, factor, df)


class LogPrior:
    """The log prior density of a target in double precision, with a count of evaluations."""

    def __init__(self, target: Target) -> None:
        self.target, self.count = target, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return log densities, ``(*batch, d) -> (*batch)``, ``-inf`` where they are NaN."""
        self.count += x[..., 0].numel()
        target = self.target
        value = target.log_prior(x.to(dtype=target.dtype, device=target.device)).detach().to("cpu", torch.float64)
        return torch.where(value.isnan(), -torch.inf, value)


def importance(log_weights: Tensor) -> Integral:
    """Return the mean of importance weights."""
    n, log_mean = len(log_weights), float(log_weights.logsumexp(0)) - math.log(len(log_weights))
    if not math.isfinite(log_mean):
        return _UNKNOWN
    error = float((log_weights - log_mean).exp().std()) / math.sqrt(n)
    effective = float(weight_effective_sample_size(log_weights))
    return Integral(log_mean, error, pareto_shape(log_weights) <= MAX_PARETO_SHAPE and effective >= MIN_EFFECTIVE)


def bridge(at_draws: Tensor, at_reference: Tensor) -> Integral:
    """Return the integral from log ratios of prior to reference, at equally many draws of each (Bennett 1976)."""
    log_ratio, b, a, _ = bidirectional_ratio(at_draws, at_reference)
    if not float(a.sum()) > 0 or not float(b.sum()) > 0:
        return _UNKNOWN
    variance = sum(float(c.var() / c.mean().square()) / len(c) for c in (a, b))
    effective = min(float(c.sum().square() / c.square().sum()) for c in (a, b))
    # Bounded terms always look even; the overlap of the two sets of draws is the relevant measure.
    overlap = float(a.sum() + b.sum()) / (len(a) + len(b))
    return Integral(float(log_ratio), math.sqrt(variance), effective >= MIN_EFFECTIVE and overlap > 0.02)


def _misfit(draws: Tensor, points: Tensor, log_weights: Tensor, reference: IndependentStudentT) -> float:
    """Return the largest ``|z|`` between means of bounded functions over draws and over the self-normalised density."""

    def features(x: Tensor) -> Tensor:
        t = reference.standardised(x)
        return torch.cat([t.tanh(), (t / 2).square().tanh()], -1)

    weights = torch.softmax(log_weights, 0)
    of_draws, of_points = features(draws), features(points)
    mean = weights @ of_points
    variance = weights.square() @ (of_points - mean).square() + of_draws.var(0) / len(of_draws)
    return float(((of_draws.mean(0) - mean) / variance.sqrt()).abs().max())


def _ray(prior: LogPrior, centre: Tensor, directions: Tensor) -> int | None:
    """Return the index of one of ``directions (n, d)`` along which the prior decays no faster than 1 / distance."""
    # Each direction is as long as the scale of the prior along it.
    steps = torch.tensor(_FAR, dtype=torch.float64)
    both = torch.stack([directions, -directions], 1)  # (n, 2, d)
    points = centre + steps[:, None, None, None] * both
    mass = prior(points) + steps.log()[:, None, None]
    # The full range: transforms that stop at the last floating-point number make any density flat far out.
    flat = mass.isfinite().all(0) & (mass.diff(dim=0) > -0.02).all(0)
    found = flat.any(-1).nonzero()
    return int(found[0]) if len(found) else None


def _directions_of(factor: Tensor) -> Tensor:
    """Return the axes, the principal directions of ``factor @ factor.T``, and the diagonal, ``(2 d + 1, d)``."""
    values, vectors = torch.linalg.eigh(factor @ factor.T)
    lengths = factor.norm(dim=1)
    together = lengths.min() * torch.ones(1, len(factor), dtype=factor.dtype)
    return torch.cat([torch.diag(lengths), (vectors * values.clamp(min=0).sqrt()).T, together])


def _direction_name(target: Target, index: int) -> str:
    """Name a direction of :func:`_directions_of`."""
    return target.names[index] if index < target.dim else "a combination of coordinates"


def tails(prior: LogPrior, centre: Tensor, scale: Tensor) -> Tensor:
    """Return degrees of freedom, 0.3 to 5, with tails no lighter than the prior's along each axis, ``(d,)``."""
    axes = torch.diag(scale)
    far = torch.tensor((10.0, 30.0), dtype=torch.float64)
    points = centre + far[:, None, None, None] * torch.stack([axes, -axes])
    near, further = prior(points)  # each (2, d)
    power = (near - further) / math.log(3.0)
    return (power.nan_to_num(nan=math.inf).amin(0) - 1).clamp(0.3, 5.0)


def _outgrown(
    prior: LogPrior, near: IndependentStudentT, reference: IndependentStudentT | Mixture, log_weights: Tensor
) -> bool:
    """Whether weights far out exceed all drawn weights, because the reference has the lighter tails."""
    steps = torch.tensor((30.0, 1e3, 1e5), dtype=torch.float64)
    directions = _directions_of(near.factor)
    points = near.location + steps[:, None, None, None] * torch.stack([directions, -directions])
    weights = prior(points) - reference.log_prob(points)
    return bool((weights > log_weights.max() + 2.0).any())


@dataclass(frozen=True)
class _PriorCheck:
    """Results on the integral of a prior."""

    by_importance: Integral  # from a reference, which may be fitted to prior draws
    by_bridge: Integral  # between the prior's draws and the reference
    misfit: float  # largest |z| between the draws and the density; NaN if unknown
    flat: str | None  # a direction along which the prior does not decrease
    num_evaluations: int


def _without_draws(target: Target, num_draws: int, seed: int) -> _PriorCheck:
    """Check a prior that cannot be sampled, by references at its modes that are refitted to weighted draws."""
    d, generator, prior = target.dim, new_generator(seed, stream="prior integral"), LogPrior(target)
    index = _ray(prior, torch.zeros(d, dtype=torch.float64), _directions_of(torch.eye(d, dtype=torch.float64)))
    if index is not None:  # a mode search would diverge
        return _PriorCheck(_UNKNOWN, _UNKNOWN, math.nan, _direction_name(target, index), prior.count)
    modes = _PriorModes(target, prior)
    try:
        modes.look(seed)
    except (BayeskitError, torch.linalg.LinAlgError):
        return _PriorCheck(_UNKNOWN, _UNKNOWN, math.nan, None, prior.count + modes.count)
    best = modes.found[0]
    index = _ray(prior, best.location, _directions_of(best.factor))
    if index is not None:
        return _PriorCheck(_UNKNOWN, _UNKNOWN, math.nan, _direction_name(target, index), prior.count + modes.count)
    fitted = _refitted(prior, best, num_draws, generator)
    integral = _mixed(prior, fitted, modes.found, num_draws, generator)
    # An integral other than one has to be reproduced by searches from other starting points.
    if integral.differs(_ONE, _SURE, _NOTABLE):
        try:
            for other in range(1, _SEARCHES):
                modes.look(seed + other)
            again = _mixed(prior, fitted, modes.found, 2 * num_draws, generator)
        except (BayeskitError, torch.linalg.LinAlgError):
            again = _UNKNOWN
        integral = again if again.reliable and not integral.differs(again, _SURE, _NOTABLE) else _UNKNOWN
    return _PriorCheck(integral, _UNKNOWN, math.nan, None, prior.count + modes.count)


class _PriorModes:
    """A reference at each mode of the prior found, highest first."""

    def __init__(self, target: Target, prior: LogPrior) -> None:
        self.found: list[IndependentStudentT] = []
        self.count = 0  # of evaluations by the searches
        self._prior = prior
        self._alone = Target.from_functions(
            target.log_prior,
            lambda u: torch.zeros_like(u[..., 0]),
            target.dim,
            dtype=target.dtype,
            device=target.device,
            compile=False,
        )

    def look(self, seed: int) -> None:
        """Search from other starting points, and add references at new modes."""
        with torch.enable_grad():
            ends, spent = find_modes(self._alone, seed=seed)
        self.count += spent
        for end in ends:
            centre = end.cpu().double()
            known = any(float(mode.standardised(centre).abs().max()) < _NEAR for mode in self.found)
            if not known and len(self.found) < _MAX_MODES:
                self.found.append(self._at(end))

    def _at(self, end: Tensor) -> IndependentStudentT:
        with torch.enable_grad():
            precision, differences = negative_hessian(self._alone.value_and_grad, end)
        self.count += differences
        values, vectors = torch.linalg.eigh(precision.cpu().double())
        # Without curvature, as in a box, the first guess is one; the pilot runs correct it.
        values = torch.where(values < 1e-8, 1.0, values)
        covariance = (vectors / values) @ vectors.T
        centre = end.cpu().double()
        df = tails(self._prior, centre, covariance.diagonal().sqrt())
        return IndependentStudentT(centre, torch.linalg.cholesky(covariance), df)


def _refitted(
    prior: LogPrior, reference: IndependentStudentT, num_draws: int, generator: torch.Generator
) -> IndependentStudentT:
    """Return the reference after rounds of fits to its own weighted draws."""
    df = reference.df
    for _ in range(_PILOTS):
        points = reference.sample(num_draws, generator)
        log_weights = prior(points) - reference.log_prob(points)
        share = float(weight_effective_sample_size(log_weights)) / num_draws
        if not math.isfinite(share) or share > 0.5:
            break
        chosen = torch.multinomial(torch.softmax(log_weights, 0), num_draws, True, generator=generator)
        try:
            reference = student_fit(points[chosen], df)
        except torch.linalg.LinAlgError:
            break
    return reference


def _mixed(
    prior: LogPrior,
    fitted: IndependentStudentT,
    modes: list[IndependentStudentT],
    num_draws: int,
    generator: torch.Generator,
) -> Integral:
    """Return the integral by a mixture of the fit and, for missed mass, wide references at all modes."""
    wider = [IndependentStudentT(p.location, width * p.factor, p.df) for p in modes for width in WIDTHS]
    mixture = Mixture([fitted, *wider], [0.5, *[0.5 / len(wider)] * len(wider)])
    points = mixture.sample(num_draws, generator)
    log_weights = prior(points) - mixture.log_prob(points)
    return _UNKNOWN if _outgrown(prior, fitted, mixture, log_weights) else importance(log_weights)


def _with_draws(target: Target, draws: Tensor, seed: int) -> _PriorCheck:
    """Check a prior against its supposed draws ``(2 n, d)``: half for the fit, half for the comparison."""
    n, prior = len(draws) // 2, LogPrior(target)
    generator = new_generator(seed, stream="prior integral")
    fitted, held_out = draws[:n], draws[n : 2 * n]
    low, centre, high = (fitted.quantile(q, 0) for q in (0.16, 0.5, 0.84))
    try:
        reference = student_fit(fitted, tails(prior, centre, (0.5 * (high - low)).clamp(min=1e-12)))
    except torch.linalg.LinAlgError:
        return _PriorCheck(_UNKNOWN, _UNKNOWN, math.nan, None, prior.count)
    index = _ray(prior, reference.location, _directions_of(reference.factor))
    points = reference.sample(n, generator)
    at_points = prior(points) - reference.log_prob(points)
    at_draws = prior(held_out) - reference.log_prob(held_out)
    by_importance = importance(at_points)
    # Prior draws with larger weights than any draw of the reference reveal a region that the reference does not cover.
    missed = bool((at_draws > at_points.max() + _MISSED).any())
    if missed or _outgrown(prior, reference, reference, at_points):
        by_importance = _UNKNOWN
    worst = _misfit(held_out, points, at_points, reference) if by_importance.reliable else math.nan
    flat = None if index is None else _direction_name(target, index)
    return _PriorCheck(by_importance, bridge(at_draws, at_points), worst, flat, prior.count)


# Constants missing from a prior or a likelihood.

_LEAST_DRAWS = 500


@dataclass(frozen=True)
class ConstantsReport:
    """Result of :func:`check_constants`.

    Attributes
    ----------
    log_prior_integral : float
        Log of the integral of the prior over unconstrained space; zero if normalised, NaN if unknown.
    standard_error : float
        Standard error of ``log_prior_integral``.
    warnings : tuple of str
        Errors found, each with its effect on the evidence.
    notes : tuple of str
        Parts that no check covers, and their effect on the meaning of the evidence.
    num_evaluations : int
        Evaluations of the density.
    improper : bool
        True if the prior does not decrease along some direction, so that the evidence does not exist.

    Examples
    --------
    >>> from bayeskit.inference.evidence._judging._constants import ConstantsReport
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
        """True if no error was found."""
        return not self.warnings

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"warning: {text}" for text in self.warnings] + [f"note: {text}" for text in self.notes]
        return "\n".join(lines) or "no constant is missing"


@takes_draws
def check_constants(target: Target, *, num_draws: int = 4000, thorough: bool = False, seed: int = 0) -> ConstantsReport:
    r"""Check the prior and the likelihood for missing constants.

    **The prior** has to integrate to one. Two estimates of its integral are compared: importance sampling from a
    Student-t reference, fitted to prior draws or placed at the prior's mode; and a bridge between prior draws and the
    reference, which also checks that the draws follow the density. A prior that does not decrease along some direction
    is improper. If neither estimate is reliable, the integral is unknown, and a note says so. A Pyro model whose latent
    sites all have distributions of torch or Pyro has a normalised prior by construction; it is integrated only if
    ``thorough``.

    **The likelihood** of observed sites with distributions of torch, Pyro or this library is normalised by
    construction. User-defined univariate distributions are summed or integrated numerically. **No check can find a
    constant missing from a** ``pyro.factor`` **or a function**, since the likelihood as a function of the parameters
    has no scale; the evidence is then relative to that constant. A note names these parts, except for factors listed in
    the model's attribute ``normalised_factors``, such as those of this library that are the log probability of data
    including all constants.

    Parameters
    ----------
    target : Target
    num_draws : int, default 4000
        Number of points for the comparison of prior and reference, at least 500.
    thorough : bool, default False
        Integrate the prior in every case.
    seed : int, default 0

    Returns
    -------
    ConstantsReport

    Raises
    ------
    SettingsError
        If ``num_draws`` is not a whole number of at least 500.

    References
    ----------
    Bennett, C. H. (1976). Efficient estimation of free energy differences from Monte Carlo data. Journal of
    Computational Physics 22, 245-268.

    Examples
    --------
    >>> import torch, bayeskit as bk
        >>> from bayeskit.inference.evidence import check_constants
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
    num_draws = whole_number("num_draws", num_draws, least=_LEAST_DRAWS)
    if not target.is_split:
        return ConstantsReport(math.nan, math.nan, (), (_ONE_DENSITY,), 0)
    density = target.density
    parts = parts_of(density, new_generator(seed, stream="constants")) if isinstance(density, PyroDensity) else None
    warnings, notes = _of_parts(parts) if parts is not None else ([], _of_other_densities(density))
    if parts is not None and not thorough and all(p.normalised for p in parts if not p.observed):
        return ConstantsReport(0.0, 0.0, tuple(warnings), tuple(notes), 1)
    with one_thread(), torch.no_grad():
        integral, of_prior, unknown, count, improper = _of_prior(target, num_draws, seed, parts)
    return ConstantsReport(
        integral.log_value, integral.standard_error, (*of_prior, *warnings), (*notes, *unknown), count, improper
    )


_ONE_DENSITY = (
    "prior and likelihood are one function, so the evidence is its integral: it means nothing if the prior is "
    "improper, and a missing constant or Jacobian cannot be detected"
)
_FUNCTIONS = (
    "the likelihood is a function, so the evidence is relative to the constants in it; a missing constant cannot be "
    "detected"
)


def _of_other_densities(density: Any) -> list[str]:
    """Return what is not known of the constants of a density that is not made of a Pyro model."""
    if not isinstance(density, ForeignDensity):
        return [_FUNCTIONS]
    factors = [repr(name) for name in density.factor_sites]
    return [f"the likelihood has {first_five(factors)}: the evidence is relative to its constants"] if factors else []


def _of_prior(
    target: Target, num_draws: int, seed: int, parts: list[WitnessedSite] | None
) -> tuple[Integral, list[str], list[str], int, bool]:
    """Return the prior's integral, warnings, notes, evaluations spent, and whether it is known to be improper."""
    draws = None
    if target.can_sample_prior:
        with density_may_fail():  # an improper prior has no draws; other errors recur in the methods that need draws
            draws = target.sample_prior(2 * num_draws, seed=seed).detach().to("cpu", torch.float64)
    if draws is not None:
        draws = draws[draws.isfinite().all(-1)]
        if len(draws) < num_draws:
            return _UNKNOWN, [], [_unknown(parts)], 0, False
        check = _with_draws(target, draws, seed)
    else:
        check = _without_draws(target, 2 * num_draws, seed)
    if check.flat is not None:
        return _UNKNOWN, [_improper(check.flat)], [], check.num_evaluations, True
    sure, bridged = check.by_importance, check.by_bridge
    found = []
    if sure.differs(_ONE, _SURE, _NOTABLE):
        found.append(_off(sure, parts))
    if check.misfit > _SURE + 1 or sure.differs(bridged, _SURE, _NOTABLE):
        names = "sample_prior do not follow log_prior" if parts is None else "the prior do not follow its density"
        found.append(f"the draws of {names}: methods that start from the prior are wrong; make the two agree")
    if not sure.reliable and bridged.differs(_ONE, _SURE, _NOTABLE):
        found.append(_off(bridged, parts) + ", unless the prior's draws do not follow its density")
    # A bridge to draws from another distribution is wrong, so importance sampling comes first.
    best = sure if sure.reliable else bridged if bridged.reliable else _UNKNOWN
    return best, found, [] if best.reliable else [_unknown(parts)], check.num_evaluations, False


def _off(integral: Integral, parts: list[WitnessedSite] | None) -> str:
    log_value, error = integral.log_value, integral.standard_error
    size = f"{math.exp(log_value):.3g}" if abs(log_value) < 25 else f"exp({log_value:.1f})"
    own = [f"{p.name!r} ({p.own})" for p in parts or () if not p.observed and p.own]
    place = "log_prior" if parts is None else f"the log_prob of {', '.join(own)}" if own else "the prior"
    return (
        f"the prior integrates to {size} and not to one: a constant is missing; add {-log_value:+.3f} "
        f"(standard error {error:.1g}) to {place}"
    )


def _improper(direction: str) -> str:
    return f"the prior is improper along {direction}: no marginal likelihood exists; give a proper prior"


def _unknown(parts: list[WitnessedSite] | None) -> str:
    own = [repr(p.name) for p in parts or () if not p.observed and p.own]
    where = f" with the sites {', '.join(own)}" if own else ""
    return f"the integral of the prior{where} could not be checked, because of its shape or its tails"


def _of_parts(parts: list[WitnessedSite]) -> tuple[list[str], list[str]]:
    """Return warnings and notes on the sites of a Pyro model."""
    warnings, notes = [], []
    observed = [p for p in parts if p.observed]
    factors = [repr(p.name) for p in observed if p.factor]
    if factors:
        many = len(factors) > 1
        notes.append(
            f"the likelihood has the factor{'s' if many else ''} {first_five(factors)}: the evidence is relative to "
            f"the constants in {'them' if many else 'it'}; a missing constant cannot be detected (if none is missing, "
            f"name {'them' if many else 'it'} in an attribute normalised_factors of the model)"
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
                "other observations"
            )
    for part in parts:
        if part.own is None or part.factor:
            continue
        problem = _own_distribution(part)
        if problem is None and part.observed:
            notes.append(f"the normalisation of {part.own} of the observed site {part.name!r} could not be checked")
        elif problem:
            warnings.append(problem)
    return warnings, notes


def _own_distribution(part: WitnessedSite) -> str | None:
    """Return the problem of a user-defined distribution, an empty string if there is none, None if unknown."""
    try:
        with torch.no_grad():
            total = log_integral_of_density(part.distribution, part.value)
    # A user-defined class may raise any error on a grid of values; its integral is then unknown.
    except Exception:
        return None
    if total is None or not bool(total.isfinite().all()):
        return None
    worst = float(total[total.abs().argmax()])
    if abs(worst) <= _NOTABLE:
        return ""
    return (
        f"{part.own} of the {'observed' if part.observed else 'latent'} site {part.name!r} is not normalised: it "
        f"{'sums' if part.distribution.support.is_discrete else 'integrates'} to {math.exp(min(worst, 700.0)):.3g}"
        f"; add {-worst:+.3f} to its log_prob"
    )
