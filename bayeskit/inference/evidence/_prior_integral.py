"""Does a prior integrate to one? Importance sampling, a bridge to the prior's own draws, and a look along rays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._statistics import pareto_shape, weight_effective_sample_size
from bayeskit._torch import new_generator
from bayeskit.errors import BayeskitError
from bayeskit.inference.evidence.checks import MAX_PARETO_SHAPE, MIN_EFFECTIVE
from bayeskit.inference.evidence.mode.modes import curvature, find_modes
from bayeskit.target import Target

FAR = (3.0, 30.0, 1e3, 1e5, 1e8)
HEAVY = 4.3  # spread of 99 % over that of 68 %: 2.6 for a normal, 3.7 for a Student-t with 5 degrees of freedom
PILOTS = 6


@dataclass(frozen=True)
class Integral:
    """An estimate of the log of an integral; ``reliable`` is false where it says nothing."""

    log_value: float
    standard_error: float
    reliable: bool

    def differs(self, other: Integral, errors: float, least: float) -> bool:
        """Whether two reliable estimates are further apart than ``errors`` standard errors and ``least`` nats."""
        off = abs(self.log_value - other.log_value)
        error = math.hypot(self.standard_error, other.standard_error)
        return self.reliable and other.reliable and off > max(errors * error, least)


UNKNOWN = Integral(math.nan, math.nan, False)
ONE = Integral(0.0, 0.0, True)


class Reference:
    """Independent Student-t variables, correlated by a factor: ``x = location + factor @ t``.

    Parameters
    ----------
    location : Tensor, shape (d,)
    factor : Tensor, shape (d, d)
        Lower triangular.
    degrees_of_freedom : Tensor, shape (d,)
    """

    def __init__(self, location: Tensor, factor: Tensor, degrees_of_freedom: Tensor) -> None:
        self.location, self.factor, self.df = location, factor, degrees_of_freedom

    @classmethod
    def fit(cls, draws: Tensor, degrees_of_freedom: Tensor) -> Reference:
        """Fit by quantiles, which heavy tails do not move; ``draws`` has shape ``(n, d)``."""
        low, middle, high = (draws.quantile(q, 0) for q in (0.16, 0.5, 0.84))
        scale = (0.5 * (high - low)).clamp(min=1e-12)
        bounded = ((draws - middle) / scale).clamp(-4.0, 4.0)
        correlation = torch.corrcoef(bounded.T).reshape(len(scale), len(scale)).nan_to_num(0.0)
        correlation = 0.98 * correlation
        correlation.fill_diagonal_(1.0)
        factor = scale.unsqueeze(-1) * torch.linalg.cholesky(correlation)
        # Coordinates whose scale is itself uncertain have heavier tails than they show along one line.
        tail = (draws.quantile(0.995, 0) - draws.quantile(0.005, 0)) / (2 * scale)
        df = torch.where(tail > HEAVY, degrees_of_freedom.clamp(max=1.0), degrees_of_freedom)
        return cls(middle, factor, df)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw, ``(num_draws, d)``."""
        half = (self.df / 2).expand(num_draws, -1).contiguous()
        normal = torch.randn(half.shape, generator=generator, dtype=torch.float64)
        gamma = torch._standard_gamma(half, generator=generator)
        return self.location + (normal * (half / gamma).sqrt()) @ self.factor.T

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        t = self.standardised(x)
        power = (self.df + 1) / 2
        constant = power.lgamma() - (self.df / 2).lgamma() - 0.5 * (self.df * math.pi).log()
        terms = constant - power * torch.log1p(t.square() / self.df)
        return terms.sum(-1) - self.factor.diagonal().log().sum()

    def standardised(self, x: Tensor) -> Tensor:
        """Return the Student-t variables behind ``x``, ``(*batch, d) -> (*batch, d)``."""
        flat = (x - self.location).reshape(-1, len(self.location))
        return torch.linalg.solve_triangular(self.factor, flat.T, upper=False).T.reshape(x.shape)


def log_prior_of(target: Target, x: Tensor) -> Tensor:
    """Return the log prior density in double precision, ``-inf`` where it is not a number."""
    value = target.log_prior(x.to(dtype=target.dtype, device=target.device)).detach().to("cpu", torch.float64)
    return torch.where(value.isnan(), -torch.inf, value)


def importance(log_weights: Tensor) -> Integral:
    """Return the mean of importance weights."""
    n, log_mean = len(log_weights), float(log_weights.logsumexp(0)) - math.log(len(log_weights))
    if not math.isfinite(log_mean):
        return UNKNOWN
    error = float((log_weights - log_mean).exp().std()) / math.sqrt(n)
    effective = float(weight_effective_sample_size(log_weights))
    return Integral(log_mean, error, pareto_shape(log_weights) <= MAX_PARETO_SHAPE and effective >= MIN_EFFECTIVE)


def bridge(at_draws: Tensor, at_reference: Tensor) -> Integral:
    """Return the integral from log ratios of prior to reference, at as many draws of each (Bennett 1976)."""
    low, high = -1e5, 1e5
    for _ in range(100):
        middle = 0.5 * (low + high)
        more = float(torch.sigmoid(at_reference - middle).sum() - torch.sigmoid(middle - at_draws).sum()) > 0
        low, high = (middle, high) if more else (low, middle)
    a, b = torch.sigmoid(at_reference - low), torch.sigmoid(low - at_draws)
    if not float(a.sum()) > 0 or not float(b.sum()) > 0:
        return UNKNOWN
    variance = sum(float(c.var() / c.mean().square()) / len(c) for c in (a, b))
    effective = min(float(c.sum().square() / c.square().sum()) for c in (a, b))
    # Bounded terms always look even; what counts is how far the two sets of draws overlap.
    overlap = float(a.sum() + b.sum()) / (len(a) + len(b))
    return Integral(low, math.sqrt(variance), effective >= MIN_EFFECTIVE and overlap > 0.02)


def misfit(draws: Tensor, points: Tensor, log_weights: Tensor, reference: Reference) -> float:
    """Return the largest ``|z|`` between the draws' and the density's means of bounded functions of each coordinate.

    Needs no constant: the density enters by self-normalised weights.
    """

    def features(x: Tensor) -> Tensor:
        t = reference.standardised(x)
        return torch.cat([t.tanh(), (t / 2).square().tanh()], -1)

    weights = torch.softmax(log_weights, 0)
    of_draws, of_points = features(draws), features(points)
    mean = weights @ of_points
    variance = weights.square() @ (of_points - mean).square() + of_draws.var(0) / len(of_draws)
    return float(((of_draws.mean(0) - mean) / variance.sqrt()).abs().max())


def ray(target: Target, centre: Tensor, directions: Tensor) -> int | None:
    """Return a direction along which the prior does not fall off faster than the inverse of the distance.

    Parameters
    ----------
    centre : Tensor, shape (d,)
    directions : Tensor, shape (n, d)
        Each as long as the scale of the prior along it.

    Returns
    -------
    int or None
        Index into ``directions``.
    """
    steps = torch.tensor(FAR, dtype=torch.float64)
    both = torch.stack([directions, -directions], 1)  # (n, 2, d)
    points = centre + steps[:, None, None, None] * both
    mass = log_prior_of(target, points) + steps.log()[:, None, None]
    # All the way: transforms that stop at the last floating-point number make any density flat far out.
    flat = mass.isfinite().all(0) & (mass.diff(dim=0) > -0.02).all(0)
    found = flat.any(-1).nonzero()
    return int(found[0]) if len(found) else None


def directions_of(factor: Tensor) -> Tensor:
    """Return the axes, the principal directions of ``factor @ factor.T``, and that of all alike, ``(2 d + 1, d)``."""
    values, vectors = torch.linalg.eigh(factor @ factor.T)
    lengths = factor.norm(dim=1)
    together = lengths.min() * torch.ones(1, len(factor), dtype=factor.dtype)
    return torch.cat([torch.diag(lengths), (vectors * values.clamp(min=0).sqrt()).T, together])


def direction_name(target: Target, index: int) -> str:
    """Name a direction of :func:`directions_of`."""
    return target.names[index] if index < target.dim else "a combination of coordinates"


def tails(target: Target, centre: Tensor, scale: Tensor) -> Tensor:
    """Return degrees of freedom, 0.3 to 5, with tails no lighter than the prior's along each axis, ``(d,)``."""
    axes = torch.diag(scale)
    far = torch.tensor((10.0, 30.0), dtype=torch.float64)
    points = centre + far[:, None, None, None] * torch.stack([axes, -axes])
    near, further = log_prior_of(target, points)  # each (2, d)
    power = (near - further) / math.log(3.0)
    return (power.nan_to_num(nan=math.inf).amin(0) - 1).clamp(0.3, 5.0)


def outgrown(target: Target, reference: Reference, log_weights: Tensor) -> bool:
    """Whether weights grow beyond any that was seen on the way out: the reference has the lighter tails."""
    steps = torch.tensor((30.0, 1e3, 1e5), dtype=torch.float64)
    directions = directions_of(reference.factor)
    points = reference.location + steps[:, None, None, None] * torch.stack([directions, -directions])
    weights = log_prior_of(target, points) - reference.log_prob(points)
    return bool((weights > log_weights.max() + 2.0).any())


@dataclass(frozen=True)
class PriorCheck:
    """What is known of a prior's integral."""

    by_importance: Integral  # from a reference alone; draws of the prior serve for its fit
    by_bridge: Integral  # between the prior's draws and the reference
    misfit: float  # largest |z| between the draws and the density; NaN if not known
    flat: str | None  # a direction along which the prior has no end
    num_evaluations: int


def without_draws(target: Target, num_draws: int, seed: int) -> PriorCheck:
    """Check a prior that cannot be drawn from, by a reference placed at its mode and refitted to weighted draws."""
    d, generator = target.dim, new_generator(seed, stream="prior integral")
    centre, factor = torch.zeros(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64)
    count = 2 * len(FAR) * (2 * d + 1)
    index = ray(target, centre, directions_of(factor))
    if index is not None:  # a search would climb for ever
        return PriorCheck(UNKNOWN, UNKNOWN, math.nan, direction_name(target, index), count)
    alone = Target.from_functions(
        target.log_prior,
        lambda u: torch.zeros_like(u[..., 0]),
        d,
        dtype=target.dtype,
        device=target.device,
        compile=False,
    )
    try:
        with torch.enable_grad():
            modes, climbing = find_modes(alone, seed=seed)
            precision, differences = curvature(alone, modes[0])
    except BayeskitError:
        return PriorCheck(UNKNOWN, UNKNOWN, math.nan, None, count)
    centre = modes[0].cpu().double()
    values, vectors = torch.linalg.eigh(precision.cpu().double())
    covariance = (vectors / values.clamp(min=1e-8)) @ vectors.T
    # Where there is no curvature, as in a box, the first guess is a unit; the pilots find the rest.
    flat_there = values < 1e-8
    if bool(flat_there.any()):
        covariance = (vectors / torch.where(flat_there, 1.0, values)) @ vectors.T
    candidates = directions_of(torch.linalg.cholesky(covariance))
    index = ray(target, centre, candidates)
    count += climbing + differences + 2 * len(FAR) * len(candidates)
    if index is not None:
        return PriorCheck(UNKNOWN, UNKNOWN, math.nan, direction_name(target, index), count)
    df = tails(target, centre, covariance.diagonal().sqrt())
    reference = Reference(centre, torch.linalg.cholesky(covariance), df)
    for pilot in range(PILOTS + 1):
        points = reference.sample(num_draws, generator)
        log_weights = log_prior_of(target, points) - reference.log_prob(points)
        count += num_draws
        share = float(weight_effective_sample_size(log_weights)) / num_draws
        if pilot == PILOTS or not math.isfinite(share):
            break
        # The reference depends on the pilots, so only the last round enters the estimate.
        chosen = torch.multinomial(torch.softmax(log_weights, 0), num_draws, True, generator=generator)
        try:
            refitted = Reference.fit(points[chosen], df)
        except torch.linalg.LinAlgError:
            break
        if share > 0.5:
            break
        reference = refitted
    integral = importance(log_weights)
    if outgrown(target, reference, log_weights):
        integral = UNKNOWN
    return PriorCheck(integral, UNKNOWN, math.nan, None, count)


def with_draws(target: Target, draws: Tensor, seed: int) -> PriorCheck:
    """Check a prior against draws that are said to be its own, ``(2 n, d)``: half to fit, half to compare."""
    n = len(draws) // 2
    generator = new_generator(seed, stream="prior integral")
    fitted, held_out = draws[:n], draws[n : 2 * n]
    low, centre, high = (fitted.quantile(q, 0) for q in (0.16, 0.5, 0.84))
    try:
        reference = Reference.fit(fitted, tails(target, centre, (0.5 * (high - low)).clamp(min=1e-12)))
    except torch.linalg.LinAlgError:
        return PriorCheck(UNKNOWN, UNKNOWN, math.nan, None, 0)
    candidates = directions_of(reference.factor)
    index = ray(target, reference.location, candidates)
    points = reference.sample(n, generator)
    at_points = log_prior_of(target, points) - reference.log_prob(points)
    at_draws = log_prior_of(target, held_out) - reference.log_prob(held_out)
    by_importance = importance(at_points)
    if outgrown(target, reference, at_points):
        by_importance = UNKNOWN
    worst = misfit(held_out, points, at_points, reference) if by_importance.reliable else math.nan
    flat = None if index is None else direction_name(target, index)
    count = 2 * n + 4 * len(FAR) * len(candidates)
    return PriorCheck(by_importance, bridge(at_draws, at_points), worst, flat, count)
