"""Laplus: approximations of posteriors of positive coordinates, and importance sampling from one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributions import Gamma, LogNormal

from bayeskit._core.convergence import MIN_EFFECTIVE
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._core.torch_internals import standard_gamma
from bayeskit._logdensity.own_density import ValueAndGradient
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError
from bayeskit.inference._optimize import saddle_free_inverse
from bayeskit.inference._proposals import student_log_constant
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import require_own
from bayeskit.inference.evidence._judging._densities import with_rounding
from bayeskit.inference.evidence._judging._missed_mass import missed_mass
from bayeskit.inference.evidence._judging._weights import weight_problems
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._starts import CANDIDATES, starting_points

# Modes of densities of positive coordinates, for batches of densities.

#: Coordinates below this count as zero.
SHORTEST = 1e-9
#: Multiples of a step that are tried together: small ones far from a mode, large ones on the way to zero.
_MULTIPLES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
#: Largest change of the logarithm of a coordinate in one simple step.
_LARGEST_CHANGE = 3.0


class Modes(NamedTuple):
    """Modes of several densities, with the derivatives of the log densities there."""

    position: Tensor  # (densities, dim)
    value: Tensor  # (densities,), log density
    gradient: Tensor  # (densities, dim)
    hessian: Tensor  # (densities, dim, dim)
    num_evaluations: Tensor  # (densities,), of the density or its gradient
    converged: Tensor  # (densities,), bool: no step increases the density

    @property
    def second(self) -> Tensor:
        """Second derivatives by each coordinate, `(densities, dim)`."""
        return self.hessian.diagonal(dim1=-2, dim2=-1)


def positive_modes(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    value_and_gradient: ValueAndGradient | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-12,
) -> Modes:
    """Maximize each of several densities from positive ``start (densities, dim)`` by Newton's method.

    ``log_density`` maps ``(points, densities, dim)`` to ``(points, densities)``; ``tolerance`` is relative.
    """
    evaluate = value_and_gradient or (lambda x: _value_and_gradient(log_density, x))
    x, dim = start.clamp(min=SHORTEST), start.shape[-1]
    multiples = torch.tensor(_MULTIPLES, dtype=x.dtype, device=x.device)[:, None, None]
    rows = torch.arange(len(x), device=x.device)
    converged, count = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
    for _ in range(max_iterations):
        value, gradient = (result[0] for result in evaluate(x[None]))
        hessian = _hessian(evaluate, x)
        with torch.no_grad():
            # Steps are taken in logarithms, in which a log likelihood is closer to quadratic and a coordinate can
            # approach zero; the density remains that of the coordinates themselves.
            tried = (x * (multiples * _step(x, gradient, hessian)).exp()).clamp(min=SHORTEST)
            reached = log_density(tried).nan_to_num(nan=-torch.inf)
        count = count + torch.where(converged, 0, 1 + 2 * dim + len(_MULTIPLES))
        best, which = reached.max(0)
        # A density that has converged stays, so that its mode does not depend on the others.
        converged = converged | (best - value <= tolerance * value.abs().clamp(min=1.0))
        if bool(converged.all()):
            break
        x = torch.where(((best > value) & ~converged)[:, None], tried[which, rows], x)
    return Modes(x, value, gradient, hessian, count, converged)


def _value_and_gradient(log_density: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        value = log_density(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _hessian(evaluate: ValueAndGradient, x: Tensor) -> Tensor:
    """Return the Hessian of each density, `(densities, dim, dim)`; one-sided differences near zero."""
    count, dim = x.shape
    step = torch.finfo(x.dtype).eps ** (1 / 3) * x.clamp(min=1e-2)
    offset = torch.diag_embed(step).movedim(0, 1)  # (dim, densities, dim)
    upper, lower = x + offset, (x - offset).clamp(min=SHORTEST)
    _, gradient = evaluate(torch.cat([upper, lower]))
    width = (upper - lower).diagonal(dim1=0, dim2=2)  # (densities, dim)
    hessian = (gradient[:dim] - gradient[dim:]).movedim(0, 1) / width[..., None]
    return 0.5 * (hessian + hessian.mT)


def _step(x: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    """Return an uphill step of the logarithms of the coordinates."""
    slope = gradient * x
    precision = -hessian * x[:, :, None] * x[:, None, :] - torch.diag_embed(slope)
    step = (saddle_free_inverse(precision)[0] @ slope[..., None]).squeeze(-1)
    return step.clamp(-_LARGEST_CHANGE, _LARGEST_CHANGE)


# Laplus: a distribution on the positive half line for each coordinate, matched to the density at its mode.

#: A mode below this counts as zero, unless the curvature by the logarithm of the coordinate is at least this.
_ZERO, _BENT = 1e-6, 0.1


def _is_inside(mode: Tensor, second: Tensor) -> Tensor:
    """Tell at which coordinates the mode is interior and the log density concave, shape `(*batch)`."""
    return (second < 0) & ((mode >= _ZERO) | (-second * mode.square() > _BENT))


def _slope_at_zero(first: Tensor) -> Tensor:
    """Return the rate of the exponential distribution with the same slope, `(*batch)`."""
    # With zero slope at zero no exponential distribution exists; a huge mean replaces it.
    return first.abs().clamp(min=torch.finfo(first.dtype).tiny ** 0.5)


def match_gamma(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return shape and rate of gamma distributions matched at a mode, all ``(*batch)`` (Fourment et al. 2020)."""
    # An interior mode determines mode and second derivative. At zero, or without log-concavity, an exponential
    # distribution matches the slope.
    inside, rate = _is_inside(mode, second), -second * mode
    return torch.where(inside, rate * mode + 1, 1.0), torch.where(inside, rate, _slope_at_zero(first))


def _match_beta_prime(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return shapes ``a`` and ``b`` of beta prime distributions, matched as in :func:`match_gamma`, ``(*batch)``."""
    # Without an interior mode, ``a`` is one and the slope at zero is matched; ``b`` may be negative if tails are too
    # heavy for the family.
    inside, bent = _is_inside(mode, second), -second * mode * (mode + 1)
    return torch.where(inside, bent * mode + 1, 1.0), torch.where(inside, bent - 1, _slope_at_zero(first) - 1)


def _match_lognormal(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and scale of lognormal distributions, matched as in :func:`match_gamma`, ``(*batch)``."""
    # No lognormal distribution has its mode at zero: there it matches mean and variance of the exponential distribution
    # of the same slope.
    inside, half = _is_inside(mode, second), torch.tensor(2.0, dtype=mode.dtype).log()
    variance = torch.where(inside, -1 / (second * mode.square()), half)
    location = torch.where(inside, mode.log() + variance, -_slope_at_zero(first).log() - half / 2)
    return location, variance.sqrt()


# A target as a density of positive coordinates, and its mode.

_PROBES, _STARTS = 3, 4
#: Modes below this are small compared with the steps of :func:`positive_modes`.
_SMALL = 1e-3


class PositiveMode(NamedTuple):
    """A mode of a density of positive coordinates, with the derivatives of the log density there."""

    position: Tensor  # (d,), positive
    value: float  # log of prior times likelihood, as a density of the positive coordinates
    first: Tensor  # (d,), derivatives by each coordinate
    second: Tensor  # (d,)
    num_evaluations: int  # of the search
    problems: tuple[str, ...]


class PositiveDensity:
    """Prior times likelihood as a density of ``exp(u)``; SettingsError, naming it, if a site is not positive."""

    def __init__(self, target: Target) -> None:
        self.target = target
        _require_positive(target)

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density, `(*batch, d) -> (*batch)`; a NaN density counts as zero."""
        u = x.log()
        found = self.target.log_density(u.reshape(-1, u.shape[-1])).reshape(u.shape[:-1]) - u.sum(-1)
        return found.nan_to_num(nan=-torch.inf)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log density and gradient by the positive coordinates, `(*batch, d) -> (*batch), (*batch, d)`."""
        u = x.log()
        value, gradient = self.target.value_and_grad(u.reshape(-1, u.shape[-1]))
        return value.reshape(u.shape[:-1]) - u.sum(-1), (gradient.reshape(u.shape) - 1) / x

    def log_slope(self, x: Tensor) -> Tensor:
        """Return the derivative of the log density by the logarithm of each coordinate, of the shape of ``x``."""
        # Unlike the derivative by ``x``, it stays accurate for small ``x``.
        u = x.log()
        return self.target.value_and_grad(u.reshape(-1, u.shape[-1]))[1].reshape(u.shape) - 1

    def own(self, mode: PositiveMode | None, *, seed: int = 0) -> tuple[PositiveMode, int]:
        """Return the mode, searched for if None, and evaluations of its check; SettingsError if not the target's."""
        if mode is None:
            return self.mode(seed=seed), 0
        if not isinstance(mode, PositiveMode):
            raise SettingsError(
                f"mode must be a PositiveMode from PositiveDensity(target).mode(), or None, not a {type(mode).__name__}"
            )
        return mode, require_own("mode", mode.position, mode.value, self.target, self.log_density)

    def mode(self, *, seed: int = 0) -> PositiveMode:
        """Return the highest mode found by searches from a few random starting points."""
        one = torch.ones(_STARTS, dtype=self.target.dtype, device=self.target.device)
        generator = new_generator(seed, self.target.device, stream="positive mode")
        start = starting_points(self.target, _STARTS, one, generator).exp()
        with one_thread():
            found: Modes = positive_modes(self.log_density, start, value_and_gradient=self.value_and_gradient)
        best = int(found.value.argmax())
        problems = () if bool(found.converged[best]) else ("the search for the mode did not converge",)
        position = found.position[best]
        second, count = self._second_of_small(position, found.second[best])
        return PositiveMode(
            position,
            float(found.value[best]),
            found.gradient[best],
            second,
            int(found.num_evaluations.sum()) + CANDIDATES * _STARTS + count,
            problems,
        )

    def _second_of_small(self, x: Tensor, second: Tensor) -> tuple[Tensor, int]:
        """Return second derivatives, by differences of logarithms for small coordinates with an interior mode."""
        small = (x < _SMALL).nonzero().flatten()
        if not len(small):
            return second, 0
        step = torch.finfo(x.dtype).eps ** (1 / 3)
        u = x.log().repeat(2, len(small), 1)
        row = torch.arange(len(small), device=x.device)
        u[0, row, small] += step
        u[1, row, small] -= step
        upper, lower = self.log_slope(u.exp())[:, row, small]
        middle = self.log_slope(x.unsqueeze(0))[0, small]
        # The second derivative by the logarithm is x times the first derivative plus x squared times the second.
        bent = (upper - lower) / (2 * step) - middle
        found = second.clone()
        found[small] = torch.where(-bent > _BENT, bent / x[small].square(), second[small])
        return found, 2 * len(small) + 1


def _require_positive(target: Target) -> None:
    """Raise SettingsError if a coordinate is not the exponential of its unconstrained coordinate."""
    u = torch.linspace(-1.0, 1.5, _PROBES * target.dim, dtype=target.dtype, device=target.device)
    u = u.reshape(_PROBES, target.dim)
    values = target.constrain(u)
    for site in target.sites:
        wanted = u[:, site.start : site.stop].exp()
        value = values[site.name].reshape(_PROBES, -1)
        if value.shape != wanted.shape or not torch.allclose(value, wanted, rtol=1e-5, atol=0):
            raise SettingsError(
                f"site {site.name!r} is not a positive number, or its entries are not separate positive numbers; this "
                "estimator needs positive coordinates, such as branch lengths and rates: use "
                "laplace_importance_sampling"
            )


# Independent distributions that approximate a posterior of positive coordinates.

#: Powers of x at zero at least this far from none count as a pole.
_MIN_POWER = 0.01
#: Upper end of the search for the mode of a logarithm, and number of bisections.
_LARGEST, _BISECTIONS = 1e9, 60
#: An interior mode with less curvature than this, by the logarithm of the coordinate, counts as zero.
_STRAIGHT = 1e-6
#: Slope at zero at which the exponential distribution would extend a hundred times further than the density.
_FLAT = 0.01
#: If the slope at zero has too few digits, it is evaluated at this quantile of the exponential distribution.
_NEAR, _DIGITS = 3e-3, 1e3


class _Family(Protocol):
    """Independent distributions of positive coordinates."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the coordinates, of the shape of `x`."""
        ...


F = TypeVar("F", bound=_Family)


@dataclass(frozen=True)
class BetaPrime:
    """Ratios of gamma variables, with densities in proportion to ``x^(a - 1) (1 + x)^(-a - b)``."""

    first_shape: Tensor  # a
    second_shape: Tensor  # b

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities, of the shape of `x`; NaN where `b` is not positive."""
        a, b = self.first_shape, torch.where(self.second_shape > 0, self.second_shape, torch.nan)
        constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
        return constant + (a - 1) * x.log() - (a + b) * x.log1p()


class _AtZero(NamedTuple):
    """Exponential or gamma distributions in place of coordinates whose mode is at zero."""

    inside: Tensor  # (d,), bool: coordinates with an interior mode, not at zero
    # (d,): one if the density is finite at zero; at a pole, its power plus one, at least 0.001; NaN without a fit.
    shape: Tensor
    rate: Tensor  # (d,)
    # (d,), bool: no slope at zero; shape and rate then match mode and curvature of the coordinate's logarithm.
    flat: Tensor
    centre: Tensor  # (d,), mode of the density of the coordinate's logarithm, as a coordinate
    problems: tuple[str, ...]  # coordinates without a fit
    num_evaluations: int


class _Fit(NamedTuple, Generic[F]):
    """Independent distributions, and the point at which their density is compared with the target's."""

    distribution: F
    point: Tensor  # (d,)
    problems: tuple[str, ...]
    num_evaluations: int


def _gamma_family(density: PositiveDensity, mode: PositiveMode) -> _Fit[Gamma]:
    """Fit gamma distributions."""
    mode = _in_double(mode)
    shape, rate = match_gamma(mode.position, mode.first, mode.second)
    other = _at_zero(density, mode)
    gamma = Gamma(
        torch.where(other.inside, shape, other.shape),
        torch.where(other.inside, rate, other.rate),
        validate_args=False,
    )
    return _fit(gamma, torch.where(other.flat, other.centre, mode.position), other)


def _beta_prime_family(density: PositiveDensity, mode: PositiveMode) -> _Fit[BetaPrime]:
    """Fit beta prime distributions."""
    mode = _in_double(mode)
    first, second = _match_beta_prime(mode.position, mode.first, mode.second)
    other = _at_zero(density, mode)
    # The slope at zero, apart from the pole, is minus the sum of both shapes; or the curvature of the gamma
    # distribution.
    head = torch.where(other.flat, other.shape * (1 + other.centre), other.shape)
    tail = torch.where(other.flat, head / other.centre, other.rate - other.shape)
    prime = BetaPrime(torch.where(other.inside, first, head), torch.where(other.inside, second, tail))
    return _fit(prime, torch.where(other.flat, other.centre, mode.position), other)


def _lognormal_family(density: PositiveDensity, mode: PositiveMode) -> _Fit[LogNormal]:
    """Fit lognormal distributions, matched at each mode, or to the gamma distribution where the mode is at zero."""
    mode = _in_double(mode)
    location, scale = _match_lognormal(mode.position, mode.first, mode.second)
    other = _at_zero(density, mode)
    # At zero they match mean and variance of the gamma distribution, or, without a slope there, mode and curvature of
    # the logarithm.
    variance = torch.where(other.flat, 1 / other.shape, (1 / other.shape).log1p())
    centre = torch.where(other.flat, other.centre.log(), (other.shape / other.rate).log() - variance / 2)
    lognormal = LogNormal(
        torch.where(other.inside, location, centre),
        torch.where(other.inside, scale, variance.sqrt()),
        validate_args=False,
    )
    # A lognormal density vanishes at zero, so for a mode there densities are compared at its mean, or, without a slope
    # at zero, at the mode of the logarithm.
    return _fit(
        lognormal,
        torch.where(other.inside, mode.position, torch.where(other.flat, other.centre, lognormal.mean)),
        other,
    )


def _fit(distribution: F, point: Tensor, other: _AtZero) -> _Fit[F]:
    return _Fit(distribution, point, other.problems, other.num_evaluations)


def _in_double(mode: PositiveMode) -> PositiveMode:
    """Return the mode in double precision: constants of distributions with large shapes cancel in single."""
    return mode._replace(position=mode.position.double(), first=mode.first.double(), second=mode.second.double())


def _at_zero(density: PositiveDensity, mode: PositiveMode) -> _AtZero:
    """Examine each coordinate with a mode at zero, with the others fixed."""
    x, dtype = mode.position, density.target.dtype
    # Second derivatives are differences of gradients.
    straight = max(_STRAIGHT, 10 * torch.finfo(dtype).eps ** (2 / 3))
    inside = _is_inside(x, mode.second) & (-mode.second * x.square() > straight)
    # A search that stopped early has a remaining slope.
    inside &= (x >= _ZERO) | ((mode.first * x).abs() < _BENT)
    outside = (~inside).nonzero().flatten()
    shape, rate, flat, centre = torch.ones_like(x), torch.ones_like(x), torch.zeros_like(inside), x.clone()
    if not len(outside):
        return _AtZero(inside, shape, rate, flat, centre, (), 0)
    count, row = 0, torch.arange(len(outside), device=x.device)

    def log_slope(at: Tensor) -> Tensor:
        """Return the coordinate times the first derivative, along each such coordinate, `(outside,)`."""
        nonlocal count
        count += len(outside)
        points = x.expand(len(outside), -1).clone()
        points[row, outside] = at
        return density.log_slope(points.to(dtype))[row, outside].double()

    near = torch.full_like(x[outside], SHORTEST)
    # For a density proportional to a power of x times a finite factor, x times the derivative tends to the power.
    power = log_slope(near).nan_to_num(nan=0.0)
    pole = power < -_MIN_POWER
    low, high = near.log(), torch.full_like(near, _LARGEST).log()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rising = log_slope(middle.exp()) > -1
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    top = low.exp()
    # In single precision, or in large units, the slope at the mode has no accurate digits: evaluate it further out.
    digits = power.abs() > _DIGITS * torch.finfo(dtype).eps
    later = (_NEAR * top).clamp(min=SHORTEST)
    slope = torch.where(digits, mode.first[outside].abs(), (log_slope(later) / later).abs())
    level = ~pole & ~(slope * top > _FLAT)
    step = torch.finfo(dtype).eps ** (1 / 3)
    bent = -(log_slope((low + step).exp()) - log_slope((low - step).exp())) / (2 * step)
    # There the slope is not informative about the tail: match the logarithm of the coordinate at its own mode instead.
    own = torch.where(pole, (1 + power).clamp(min=0.001), torch.where(level, bent, 1.0))
    known = (power > -1) & (own > 0) & ((low < math.log(_LARGEST) - 1) | ~(pole | level))
    own = torch.where(known, own, torch.nan)
    shape[outside], centre[outside], flat[outside] = own, top, level
    rate[outside] = torch.where(pole | level, own / top, slope)
    problems = tuple(
        f"{density.target.names[int(i)]} has neither an interior mode nor the slope or pole at zero of a proper "
        "distribution: rescale it, or use laplace_importance_sampling"
        for i in outside[~known]
    )
    return _AtZero(inside, shape, rate, flat, centre, problems, count)


# Laplus approximations of the evidence: the density over that of its approximation, at the mode.

_UNKNOWN = "an approximation of unknown error: use gamma_laplus_importance_sampling, which estimates it"


def _not_positive(target: Target, parts: Parts) -> str | None:
    try:
        PositiveDensity(target)
    except SettingsError as error:
        return str(error)
    return None


@estimator(Part.POSITIVE_MODE, kind="approximation", refuses=_not_positive)
def gamma_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    r"""Estimate the log evidence with independent gamma distributions at the mode of positive coordinates.

    :math:`\log Z = f(m) - \sum_i \log q_i(m_i)`, where `f` is the log of prior times likelihood as a density of the
    positive coordinates, `m` its mode, and :math:`q_i` are gamma distributions with the same modes and second
    derivatives. For a mode at zero or without concavity, the shape is one and the rate the slope there. For a pole at
    zero, the shape, from .001 to 1, is that of the pole, and the rate matches the mode of the density of the logarithm.

    Parameters
    ----------
    target : Target
        All sites have to be positive.
    mode : PositiveMode, optional
        Known mode of the target.
    seed : int, default 0
        Seed of the starting points of the mode search.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error.

    Raises
    ------
    SettingsError
        If a site is not positive (the message names it), or the mode is not a :class:`PositiveMode` of the target.
    ShapeError
        If the mode has another dimension.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    Exact where the posterior is such a product:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import gamma_laplus
    >>> def model(count):
    ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     pyro.sample("count", dist.Poisson(rate), obs=count)
    >>> target = bk.Target.from_pyro(model, torch.tensor(3.0, dtype=torch.float64))
    >>> z = gamma_laplus(target)
    >>> abs(z.log_evidence - math.log(math.comb(4, 3) * 0.5**5)) < 1e-6, z.trusted  # negative binomial
    (True, False)
    """
    return _approximated("gamma_laplus", target, _gamma_family, mode, seed)


@estimator(Part.POSITIVE_MODE, kind="approximation", refuses=_not_positive)
def beta_prime_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    """Estimate the log evidence with independent beta prime distributions at the mode of positive coordinates.

    Parameters
    ----------
    target, mode, seed
        As for :func:`gamma_laplus`.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error; NaN if the tails are too heavy for a beta prime distribution.

    Raises
    ------
    SettingsError
        If a site is not positive.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import beta_prime_laplus
    >>> def model(rate):
    ...     x = pyro.sample("x", dist.Exponential(rate))
    ...     pyro.factor("likelihood", x + 2 * x.log() - 7 * x.log1p())
    >>> z = beta_prime_laplus(bk.Target.from_pyro(model, torch.ones(()).double()))
    >>> abs(z.log_evidence - torch.tensor(1 / 60).log()) < 1e-6  # the beta function at 3 and 4
    tensor(True)
    """
    return _approximated("beta_prime_laplus", target, _beta_prime_family, mode, seed)


@estimator(Part.POSITIVE_MODE, kind="approximation", refuses=_not_positive)
def lognormal_laplus(target: Target, *, mode: PositiveMode | None = None, seed: int = 0) -> Evidence:
    """Estimate the log evidence with independent lognormal distributions at the mode of positive coordinates.

    Parameters
    ----------
    target, mode, seed
        As for :func:`gamma_laplus`. For a mode at zero, the lognormal distribution matches mean and variance of the
        exponential distribution with the same slope.

    Returns
    -------
    Evidence
        Never trusted, because it has no standard error.

    Raises
    ------
    SettingsError
        If a site is not positive.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference.evidence import lognormal_laplus
    >>> def model(y):
    ...     x = pyro.sample("x", dist.LogNormal(torch.zeros(()).double(), 1.0))
    ...     pyro.sample("y", dist.Normal(x.log(), 1.0), obs=y)
    >>> z = lognormal_laplus(bk.Target.from_pyro(model, torch.tensor(0.5).double()))
    >>> abs(z.log_evidence - dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(0.5))) < 1e-6
    tensor(True)
    """
    return _approximated("lognormal_laplus", target, _lognormal_family, mode, seed)


def _approximated(
    name: str,
    target: Target,
    family: Callable[[PositiveDensity, PositiveMode], _Fit[Any]],
    mode: PositiveMode | None,
    seed: int,
) -> Evidence:
    density = PositiveDensity(target)
    mode, looked = density.own(mode, seed=seed)
    fit, value, count = family(density, mode), mode.value, mode.num_evaluations + looked
    if not bool((fit.point == mode.position).all()):
        value, count = float(density.log_density(fit.point.to(target.dtype).unsqueeze(0))), count + 1
    log_evidence = value - float(fit.distribution.log_prob(fit.point).sum())
    problems = (_UNKNOWN, *mode.problems, *fit.problems)
    if not math.isfinite(log_evidence):
        log_evidence = math.nan
        if not fit.problems:
            problems += ("no distribution of this family has the mode and curvature of the posterior",)
    return Evidence(name, log_evidence, math.nan, count + fit.num_evaluations, problems)


# Gamma distributions, each mixed with a wider component whose tail decays more slowly than any power.

#: Degrees of freedom of the logarithm in the wide component, and its scale relative to the gamma distribution's.
_DF, _WIDTH = 4.0, 1.5
#: Probability of the wide component for each coordinate, in the draws with many wide coordinates.
_MANY = 0.5
#: Number of points along each coordinate, and their range in scales of the logarithm; denser near the centre.
_POINTS, _REACH = 41, 50.0
#: Weights that exceed the largest drawn by less than this, on the log scale, are not new.
_MARGIN = 0.1


class DefensiveGamma:
    """Independent gamma distributions of ``d`` coordinates, of which a share comes from log-Student-t distributions."""

    def __init__(self, gamma: Gamma, tail_share: float) -> None:
        # A gamma density decays faster than any power of the coordinate, unlike most posteriors of scales and
        # variances; a log-Student-t density decays more slowly than every power.
        shape, rate = gamma.concentration.double(), gamma.rate.double()
        self.gamma = Gamma(shape, rate, validate_args=False)
        # Mode and curvature of the density of the logarithm.
        self.centre, self.scale = (shape / rate).log(), _WIDTH / shape.sqrt()
        # Weight of each component, and its probability of a wide coordinate: one half in a share ``tail_share`` of the
        # draws, and in the others so that on average this share of one coordinate is wide.
        rest = 1 - tail_share
        self.parts = [(1.0, 0.0)] if not tail_share else [(rest, tail_share / len(shape)), (tail_share, _MANY)]

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw, in double precision, shape `(num_draws, d)`."""
        shape = self.gamma.concentration.expand(num_draws, -1)
        x = standard_gamma(shape, generator=generator) / self.gamma.rate
        if len(self.parts) > 1:
            half = torch.full_like(shape, _DF / 2)
            normal = torch.empty_like(x).normal_(generator=generator)
            t = normal * (half / standard_gamma(half, generator=generator)).sqrt()
            (_, few), (weight, many) = self.parts
            chance = torch.where(torch.empty_like(x[:, :1]).uniform_(generator=generator) < weight, many, few)
            wide = torch.empty_like(x).uniform_(generator=generator) < chance
            x = torch.where(wide, (self.centre + self.scale * t).exp(), x)
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the positive coordinates, `(*batch, d) -> (*batch)`."""
        x = x.double()
        narrow = self.gamma.log_prob(x)
        if len(self.parts) == 1:
            return narrow.sum(-1)
        u = x.log()
        kernel = ((u - self.centre) / self.scale).square().div(_DF).log1p()
        wide = student_log_constant(_DF, 1) - (_DF + 1) / 2 * kernel - self.scale.log() - u
        few, many = (
            math.log(weight) + torch.logaddexp(narrow + math.log1p(-share), wide + math.log(share)).sum(-1)
            for weight, share in self.parts
        )
        return torch.logaddexp(few, many)


def beyond_reach(density: PositiveDensity, proposal: DefensiveGamma, largest: float) -> tuple[float, int]:
    """Return the largest ratio, over coordinates, of squared weights above ``largest`` to others, and evaluations."""
    d = len(proposal.centre)
    t = torch.linspace(-1.0, 1.0, _POINTS, dtype=torch.float64, device=proposal.centre.device) * math.asinh(_REACH)
    u = proposal.centre.repeat(d, _POINTS, 1)
    u.diagonal(dim1=0, dim2=2).add_(t.sinh().unsqueeze(-1) * proposal.scale / _WIDTH)
    x = _within(u.exp(), density.target.dtype)
    log_density = density.log_density(x).double()
    log_weights = log_density - proposal.log_prob(x)
    # Line integral of weight times density, over the logarithm.
    terms = log_weights + log_density + u.diagonal(dim1=0, dim2=2).T + t.cosh().log()
    new = log_weights > largest + _MARGIN
    unseen, seen = (torch.where(kept, terms, -torch.inf).logsumexp(1) for kept in (new, ~new))
    ratio = torch.where(new.any(1), (unseen - seen).clamp(max=700.0).exp(), 0.0)
    return float(ratio.nan_to_num(nan=math.inf).max()), d * _POINTS


def _within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest positive numbers of the target's dtype, whose logarithms are finite."""
    info = torch.finfo(dtype)
    return x.clamp(min=info.tiny, max=info.max).to(dtype)


# Importance sampling from the gamma distributions of Laplus.

#: Largest share of the squared weights along a line in weights larger than any drawn.
_MAX_BEYOND = 0.05
#: With fewer effective draws, the mass of many coordinates far out together rests on a few draws.
_FEW = 200


@estimator(Part.POSITIVE_MODE, refuses=_not_positive)
def gamma_laplus_importance_sampling(
    target: Target,
    num_draws: int = 10_000,
    *,
    tail_share: float = 0.3,
    mode: PositiveMode | None = None,
    seed: int = 0,
) -> Evidence:
    """Estimate the log evidence by importance sampling from independent gamma distributions at the mode.

    Gamma tails are lighter than those of most posteriors of scales and variances. In a share of the draws half of the
    coordinates therefore come from log-Student-t distributions, whose tails decay more slowly than every power; in the
    other draws at most one coordinate does. Searches along each coordinate, and mode searches from prior draws and from
    the draws of largest weight, check for missed mass.

    Parameters
    ----------
    target : Target
        All sites have to be positive.
    num_draws : int, default 10,000
    tail_share : float, default 0.3
        Share of the draws in which half of the coordinates come from the wide distributions, in [0, 1); zero uses the
        gamma distributions alone, as in the paper.
    mode : PositiveMode, optional
        Known mode of the target.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If a site is not positive (the message names it), the mode is of another target, there are no draws, or
        ``tail_share`` is not in [0, 1).
    ShapeError
        If the mode has another dimension.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
    185-194.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import gamma_laplus_importance_sampling
    >>> case = bk.exact.get("three_taxon_tree")
    >>> z = gamma_laplus_importance_sampling(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    num_draws, tail_share = whole_number("num_draws", num_draws, least=2), real_number("tail_share", tail_share)
    tail_share = real_number("tail_share", tail_share, "[0, 1)")
    density = PositiveDensity(target)
    mode, looked = density.own(mode, seed=seed)
    fit = _gamma_family(density, mode)
    count = mode.num_evaluations + looked + fit.num_evaluations
    if fit.problems:
        return Evidence("gamma_laplus_importance_sampling", math.nan, math.nan, count, (*mode.problems, *fit.problems))
    proposal = DefensiveGamma(fit.distribution, tail_share)
    generator = new_generator(seed, target.device, stream="gamma Laplus importance sampling")
    # A draw that rounds to zero has no logarithm; the smallest positive number replaces it.
    x = _within(proposal.sample(num_draws, generator), target.dtype)
    with one_thread():
        log_density = density.log_density(x)
        log_weights = (log_density.double() - proposal.log_prob(x)).unsqueeze(0)
        beyond, probes = beyond_reach(density, proposal, float(log_weights.max()))
    tail, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights[0]))
    problems = [*mode.problems, *weight_problems(tail, effective)]
    if MIN_EFFECTIVE <= effective < _FEW:
        problems.append(f"only {effective:.0f} effective weights, too few for a heavy tail: use more draws")
    if beyond > _MAX_BEYOND:
        problems.append(
            "the posterior has heavier tails than the proposal, or another mode, because weights along a coordinate "
            "are larger than all drawn weights: use bridge sampling"
        )
    log_z = float(log_mean_exp(log_weights))
    error = with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density)
    missed, looks = missed_mass(
        target,
        x.log(),
        log_weights[0],
        log_z,
        error,
        # The density of logarithms, which are the unconstrained coordinates.
        log_prob=lambda u: proposal.log_prob(_within(u.exp(), target.dtype)) + u.sum(-1),
        seed=seed,
    )
    return Evidence(
        "gamma_laplus_importance_sampling",
        log_z,
        error,
        num_draws + probes + count + looks,
        (*problems, *missed),
        {"pareto_shape": tail, "effective_draws": effective, "beyond_reach": beyond},
    )
