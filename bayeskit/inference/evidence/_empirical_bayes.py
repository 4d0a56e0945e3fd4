"""Empirical Bayes: hyperparameters at the maximum of the evidence, all other sites integrated out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.inputs import unknown_name, whole_number
from bayeskit._core.page import Listed, PageTable, measured, result_html
from bayeskit._core.randomness import new_generator
from bayeskit._core.texts import with_error
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import SettingsError
from bayeskit.inference._optimize import quartile_distance, refine_mode
from bayeskit.inference.evidence._modes import ObjectiveFunction, find_modes, likelihood, posterior
from bayeskit.inference.marginal._target import MarginalTarget, marginalize
from bayeskit.inference.samplers._starts import CANDIDATES, prior_positions, starting_points

if TYPE_CHECKING:
    import pandas as pd

#: Ends of searches within this many standard errors of each other, or this many nats, are one maximum.
_SAME_PLACE, _SAME_HEIGHT = 0.1, 1e-3
#: Largest predicted gain of one more Newton step at a maximum, and gains of steps that are taken, in nats.
_MAX_GAIN, _GAINS = 1e-8, (0.0, 1.0)
#: Standard errors at which the height is looked at on both sides, and the least share of the expected fall there.
_AWAY, _LEAST_FALL = 2.0, 0.25
#: Steps of the way there on which the gradient has to explain the change of the height, and the least jump in nats.
_STEPS, _LEAST_JUMP = 5, 0.2
_JUMP = "as where Laplace's approximation goes to another mode of the other sites; remedy: sample all sites"
#: Number of times that the distance of a look is halved until the height is finite.
_MAX_HALVINGS = 40
#: Quartile distances of the prior that a standard error may have where the height is not flat, and beyond which the
#: end of a search is far away.
_WIDE, _FAR = 10.0, 5.0
#: Points and distance, in spreads of the prior, at which rounding is looked at, and a safe multiple of it.
_LOOKS, _TINY, _ROUNDINGS = 9, 1e-6, 10.0
#: Other maxima less high by at most this many nats are mentioned.
_RIVAL = 3.0


@dataclass(frozen=True, repr=False, eq=False)
class LocalMaximum:
    """A lower maximum at which some of the searches ended.

    Attributes
    ----------
    values : dict of Tensor
        Hyperparameters, ``{site: shape of the site}``.
    height : float
        As of :class:`MaximizedEvidence`, in nats.
    num_reached : int
        Searches that ended here.

    Examples
    --------
    Data that know the square of a hyperparameter, and hint at its sign; the other maximum is at ``-1 - sqrt(1 / 2)``:

    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> def model(y):
    ...     root = pyro.sample("root", dist.Normal(0.0, 3.0))
    ...     pyro.sample("y", dist.Normal(torch.stack([root**2, root]), 1.0).to_event(1), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([4.0, 2.0], dtype=torch.float64))
    >>> z = evidence.maximize(target, over="root", num_starts=20)
    >>> round(float(z.values["root"]), 6), z.other_maxima
    (2.0, (another maximum, of height -9.2987, at root = -1.707,))
    """

    values: dict[str, Tensor]
    height: float
    num_reached: int

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {_short(value)}" for name, value in self.values.items())
        return f"another maximum, of height {self.height:.4f}, at {where}"


@dataclass(frozen=True, repr=False, eq=False)
class MaximizedEvidence:
    r"""Hyperparameters at the highest evidence that several searches found; made by :func:`maximize`.

    Attributes
    ----------
    method : str
        "type-II maximum likelihood", or "type-II maximum a posteriori" with the prior of the hyperparameters.
    values : dict of Tensor
        Hyperparameters, ``{site: shape of the site}``.
    standard_errors : dict of Tensor
        Of ``values``, by the delta method from ``covariance``; NaN where the curvature gives none.
    log_evidence : float
        :math:`\log p(y \mid` ``values`` :math:`)`, in nats.
    height : float
        What was maximised, in nats: ``log_evidence``, plus the log prior of ``position`` if that was asked for.
    position : Tensor
        Unconstrained coordinates of ``values``, ``(d,)``.
    covariance : Tensor
        Of ``position``, ``(d, d)``: inverse of the negative Hessian of ``height``; NaN if that is not positive
        definite.
    integrated_out : tuple of str
        All other sites.
    num_starts, num_reached : int
        Searches, and those that ended at this maximum.
    other_maxima : tuple of LocalMaximum
        Highest first.
    num_evaluations : int
        Evaluations of the density of the hyperparameters or its gradient.
    warnings : tuple of str
        Reasons why this may be no maximum, or why standard errors do not describe it, each with its remedy.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("groups", len(y)):
    ...         effect = pyro.sample("effect", dist.Normal(mean, 3.0))
    ...         pyro.sample("y", dist.Normal(effect, 4.0), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 3.0, 6.0], dtype=torch.float64)
    >>> z = evidence.maximize(bk.Target.from_pyro(model, y), over="mean")
    >>> round(float(z.values["mean"]), 6), round(float(z.standard_errors["mean"]), 6), z.integrated_out
    (2.0, 2.5, ('effect',))
    """

    method: str
    values: dict[str, Tensor]
    standard_errors: dict[str, Tensor]
    log_evidence: float
    height: float
    position: Tensor
    covariance: Tensor
    integrated_out: tuple[str, ...]
    num_starts: int
    num_reached: int
    other_maxima: tuple[LocalMaximum, ...]
    num_evaluations: int
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if the search found no problem."""
        return not self.warnings and math.isfinite(self.height) and bool(self.covariance.isfinite().all())

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each element of a site: ``name``, ``value`` and ``standard_error``."""
        import pandas as pd

        return pd.DataFrame(self._rows(), columns=["name", "value", "standard_error"])

    def _rows(self) -> list[tuple[str, float, float]]:
        rows = []
        for site, value in self.values.items():
            for index in itertools.product(*map(range, value.shape)):
                name = f"{site}[{','.join(map(str, index))}]" if index else site
                rows.append((name, float(value[index]), float(self.standard_errors[site][index])))
        return rows

    def _headline(self) -> str:
        reached = f"reached by {self.num_reached} of {self.num_starts} searches"
        return f"{self.method}: log evidence {self.log_evidence:.4f}, {reached}"

    def _repr_html_(self) -> str:
        rows = [(name, *measured(value, error)) for name, value, error in self._rows()]
        table = PageTable("Hyperparameters", ["name", "value", "standard error"], rows, is_grey=not self.trusted)
        count = len(self.warnings)
        listed = [Listed(f"{count} warning{'s' * (count > 1)}", [(self.method, why) for why in self.warnings])]
        trust = "" if self.trusted else ", not trusted"
        return result_html(
            self._headline() + trust,
            [table],
            listed if count else [],
            notes=[f"{self.num_evaluations} evaluations", *(str(other) for other in self.other_maxima)],
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        lines = [f"  {name} = {with_error(value, error)}" for name, value, error in self._rows()]
        others = [f"  {other}" for other in self.other_maxima]
        return "\n".join([self._headline() + flag, *lines, *others])


def _short(value: Tensor) -> str:
    return f"{float(value):.4g}" if value.ndim == 0 else f"[{', '.join(f'{x:.4g}' for x in value.flatten().tolist())}]"


@takes_draws
def maximize(
    target: Target, *, over: str | Sequence[str], prior: bool = False, num_starts: int = 8, seed: int = 0
) -> MaximizedEvidence:
    r"""Estimate hyperparameters by the maximum of the evidence: type-II maximum likelihood, or empirical Bayes.

    All sites but ``over`` are integrated out by :func:`~bayeskit.marginalize`, and
    :math:`\log p(y \mid` ``over`` :math:`)` is maximised over unconstrained coordinates with exact gradients, by L-BFGS
    from draws of the prior and Newton's method at the end. Standard errors come from the Hessian, which is the
    observed information about the hyperparameters. What Laplace's approximation leaves out of the integral, where the
    other sites are not normal given the hyperparameters, is in no error; a jump to another mode of theirs is seen.

    The maximum is no evidence of a model: it has used the data to choose the hyperparameters. The posterior of the
    other sites at the maximum is that of ``pyro.condition(model, data=z.values)``.

    Parameters
    ----------
    target : Target
        Of a Pyro model. A :class:`~bayeskit.inference.marginal.MarginalTarget` over ``over``, or a target that
        has no other site, is maximised as it is.
    over : str or sequence of str
        Sites that are estimated.
    prior : bool, default False
        Add the log prior of ``over`` (type-II maximum a posteriori). It is the density of the unconstrained
        coordinates: that of a scale is zero at zero, so that the maximum is an interior one.
    num_starts : int, default 8
        Searches.
    seed : int, default 0
        Of the starting points.

    Returns
    -------
    MaximizedEvidence
        Not trusted, with the name of the hyperparameter in a warning, if there is no maximum inside, if the height is
        nearly flat on one side of it or jumps, or if another maximum is nearly as high.

    Raises
    ------
    UnknownNameError
        If a site of ``over`` does not exist.
    SettingsError
        If ``over`` is empty, or ``num_starts`` below 1.
    ModelError
        If the other sites cannot be integrated out; see :func:`~bayeskit.marginalize`.
    InitializationError
        If no search meets a finite density.

    References
    ----------
    Good, I. J. (1965). The Estimation of Probabilities. MIT Press.
    MacKay, D. J. C. (1992). Bayesian interpolation. Neural Computation 4, 415-447.
    Chung, Y., Rabe-Hesketh, S., Dorie, V., Gelman, A., Liu, J. (2013). A nondegenerate penalized likelihood estimator
    for variance parameters in multilevel models. Psychometrika 78, 685-709.

    Examples
    --------
    Means of groups with normal errors of one size, where the estimate of the scale is known:

    >>> import math, torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.HalfNormal(2.0))
    ...     with pyro.plate("groups", len(y)):
    ...         effect = pyro.sample("effect", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 3.0, 4.5, -3.0, 0.5, -4.0], dtype=torch.float64)
    >>> z = evidence.maximize(bk.Target.from_pyro(model, y), over=["scale"])
    >>> z.trusted, abs(float(z.values["scale"]) - math.sqrt(float(y.square().mean()) - 1)) < 1e-6
    (True, True)
    """
    num_starts = whole_number("num_starts", num_starts, 1)
    target, gone = _of_hyperparameters(target, over)
    objective = posterior(target) if prior else likelihood(target)
    start, usual = _starts(target, num_starts, new_generator(seed, target.device, "empirical Bayes"))
    ends, spent = find_modes(target, objective=objective, start=start)
    remedy = "give it a prior that bounds it" if prior else "prior=True"
    looks: list[tuple[_Look, int]] = []
    for end in ends:
        look = _look(target, objective, end, usual, remedy)
        spent += look.num_evaluations
        place = next((i for i, (other, _) in enumerate(looks) if _is_same(other, look)), None)
        if place is None:
            looks.append((look, 1))
        else:
            other, count = looks[place]
            looks[place] = (max(other, look, key=lambda one: one.least), count + 1)
    (best, num_reached), *rest = sorted(looks, key=lambda pair: pair[0].least, reverse=True)
    others = [
        LocalMaximum(_values(target, look.position), look.height, count) for look, count in rest if not look.problems
    ]
    warnings = [*best.problems, *best.remarks, *_about_searches(best, num_reached, num_starts, others)]
    return MaximizedEvidence(
        "type-II maximum a posteriori" if prior else "type-II maximum likelihood",
        _values(target, best.position),
        _standard_errors(target, best.position, best.covariance),
        float(target.log_likelihood(best.position)),
        best.height,
        best.position,
        best.covariance,
        gone,
        num_starts,
        num_reached,
        tuple(others),
        spent + 1 + num_starts * CANDIDATES,
        tuple(warnings),
    )


def _of_hyperparameters(target: Target, over: str | Sequence[str]) -> tuple[Target, tuple[str, ...]]:
    """Return the target over some sites alone, and the names of the others."""
    asked = {over} if isinstance(over, str) else set(over)
    gone = target.over if isinstance(target, MarginalTarget) else ()
    whole = target.whole if isinstance(target, MarginalTarget) else target
    known = [site.name for site in whole.sites]
    if not asked:
        raise SettingsError(f"over is empty; name the sites that are estimated, some of {known}")
    for name in asked:
        if name not in known:
            raise unknown_name("latent site", name, known)
    others = tuple(name for name in known if name not in asked)
    return (target if set(gone) == set(others) else marginalize(whole, others)), others


class _Usual(NamedTuple):
    """Where hyperparameters are before the data: median and quartile distance of each coordinate, ``(d,)``."""

    centre: Tensor
    spread: Tensor


def _starts(target: Target, num_starts: int, generator: torch.Generator) -> tuple[Tensor, _Usual]:
    """Return draws of the prior with a finite density, ``(num_starts, d)``, and where draws usually are."""
    points = prior_positions(target, CANDIDATES * num_starts, generator)
    start = None
    if points is not None:
        points = points.to(target.device)
        log_prior, log_likelihood = target.evaluate(points)
        start = points[(log_prior + log_likelihood).isfinite()][:num_starts]
    if points is None or start is None or len(start) < num_starts:
        one = torch.ones(num_starts, dtype=target.dtype, device=target.device)
        start = starting_points(target, num_starts, one, generator)
    points = start if points is None else points
    return start, _Usual(points.median(0).values, quartile_distance(points))


class _Look(NamedTuple):
    """What the neighbourhood of the end of a search is like."""

    position: Tensor  # (d,)
    height: float
    precision: Tensor  # (d, d), negative Hessian
    covariance: Tensor  # (d, d), NaN where it is not positive definite
    rounding: float  # of the height
    num_evaluations: int
    problems: tuple[str, ...] = ()  # why it is no maximum inside
    remarks: tuple[str, ...] = ()  # why the curvature does not describe it

    @property
    def least(self) -> float:
        """What is left of the height when rounding, by which a search may have been misled, is taken away."""
        return self.height - _ROUNDINGS * self.rounding


def _look(target: Target, objective: ObjectiveFunction, end: Tensor, usual: _Usual, remedy: str) -> _Look:
    """Go to the maximum by Newton's method and look to both sides of it."""
    unit = usual.spread
    end, height, gain, precision, spent = refine_mode(objective.value_and_gradient, end, _GAINS)
    spent *= objective.cost
    covariance, rounding = _inverse(precision), _rounding(objective, end, unit)
    spent += _LOOKS
    limit = max(_MAX_GAIN, _ROUNDINGS * rounding)
    error = torch.full_like(end, torch.inf) if covariance is None else covariance.diagonal().sqrt()
    if covariance is None or not gain <= limit or bool((error > _WIDE * unit).any()):
        why, looked = _why_no_maximum(target, objective, end, height, usual, remedy)
        nothing = torch.full_like(precision, torch.nan)
        return _Look(end, height, precision, nothing, rounding, spent + looked, why)
    problems, remarks = [], []
    # Along these directions, each coordinate changes by its standard error, and the height falls least.
    sides, looked = _sides(objective, end, height, covariance / error.unsqueeze(-1))
    for side in sides:
        expected = 0.5 * side.distance**2
        if side.fall < min(_SAME_HEIGHT, _LEAST_FALL * expected):
            problems.append(_unbounded(target, end, side, remedy))
        elif side.fall < _LEAST_FALL * expected:
            name = target.names[side.place]
            remarks.append(
                f"the standard error of {name} makes no interval: {_way(target, end, side)}, {side.distance:g} "
                f"standard errors, the height falls by {side.fall:.2f} nats and not by {expected:g}; remedy: sample "
                f"{name} with the other sites"
            )
    jumps, gradients = _jumps(objective, end, sides)
    for side, size in jumps:
        remarks.append(
            f"the height jumps by about {size:.2g} nats as {target.names[side.place]} goes {_way(target, end, side)}, "
            f"{_JUMP}"
        )
    spent += looked + gradients
    return _Look(end, height, precision, covariance, rounding, spent, tuple(problems), tuple(remarks))


def _why_no_maximum(
    target: Target, objective: ObjectiveFunction, end: Tensor, height: float, usual: _Usual, remedy: str
) -> tuple[tuple[str, ...], int]:
    """Return why the end of a search is no maximum, and evaluations."""
    # The curvature gives no scale. A maximum is missing on the side on which the height hardly falls or rises.
    sides, spent = _sides(objective, end, height, usual.spread.diag())
    level = sorted((side for side in sides if side.fall < _SAME_HEIGHT), key=lambda side: -side.fall)
    if level:
        worst = {side.place: side for side in level}
        return tuple(_unbounded(target, end, worst[place], remedy) for place in sorted(worst)), spent
    distance = (end - usual.centre).abs() / usual.spread
    if float(distance.max()) > _FAR:
        name, away = target.names[int(distance.argmax())], float(distance.max())
        return (
            f"there is no interior maximum by {name}: the search went {away:.0f} quartile distances of the prior away "
            f"and did not end; remedy: {remedy}, or sample {name} with the other sites",
        ), spent
    return (f"the search stopped where the height is not smooth or hardly bent, {_JUMP}",), spent


def _rounding(objective: ObjectiveFunction, end: Tensor, unit: Tensor) -> float:
    """Return the size of rounding errors of the height: its second differences over tiny steps."""
    places = torch.linspace(-_TINY, _TINY, _LOOKS, dtype=end.dtype, device=end.device)
    bends = objective.value(end + places.unsqueeze(-1) * unit).diff(n=2).abs()
    return float(bends.nan_to_num(nan=torch.inf).max())


def _inverse(precision: Tensor) -> Tensor | None:
    """Return the inverse of a positive definite matrix, None for others."""
    scale = precision.diagonal().rsqrt()
    factor, failed = torch.linalg.cholesky_ex(scale[:, None] * precision * scale)
    if bool(failed) or not bool(factor.isfinite().all()):
        return None
    return scale[:, None] * torch.cholesky_inverse(factor) * scale


class _Side(NamedTuple):
    """How the height changes towards one side of a coordinate."""

    place: int
    fall: float
    distance: float  # in units of the direction
    point: Tensor  # (d,)


def _sides(objective: ObjectiveFunction, end: Tensor, height: float, ways: Tensor) -> tuple[list[_Side], int]:
    """Look along directions ``(d, d)``, one for each coordinate, to both sides; return sides and evaluations."""
    d, spent = len(end), 0
    ways = torch.cat([ways, -ways])
    distance, fall = torch.full_like(ways[:, 0], _AWAY), torch.full_like(ways[:, 0], torch.nan)
    for _ in range(_MAX_HALVINGS):
        left = (~fall.isfinite()).nonzero().flatten()
        if len(left) == 0:
            break
        found = height - objective.value(end + distance[left, None] * ways[left])
        spent += len(left)
        fall[left] = found
        distance[left[~found.isfinite()]] *= 0.5
    points = end + distance[:, None] * ways
    fall = fall.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    rows = zip(range(2 * d), fall.tolist(), distance.tolist(), points, strict=True)
    return [_Side(row % d, *facts) for row, *facts in rows], spent


def _jumps(objective: ObjectiveFunction, end: Tensor, sides: Sequence[_Side]) -> tuple[list[tuple[_Side, float]], int]:
    """Return sides on the way to which the height changes otherwise than its gradient, by how much, and evaluations."""
    ways = torch.stack([side.point - end for side in sides])
    places = torch.linspace(0, 1, _STEPS + 1, dtype=end.dtype, device=end.device)
    points = end + places[:, None, None] * ways  # (steps + 1, sides, d)
    value, gradient = objective.value_and_gradient(points.flatten(0, 1))
    value, slope = value.reshape(points.shape[:2]), (gradient.reshape(points.shape) * ways).sum(-1) / _STEPS
    expected, size = 0.5 * (slope[1:] + slope[:-1]), 0.5 * (slope[1:].abs() + slope[:-1].abs())
    off = value.diff(dim=0) - expected
    off = torch.where(off.abs() > _LEAST_JUMP + _LEAST_JUMP * size, off, 0.0).abs().amax(0)
    jumps = [(side, jump) for side, jump in zip(sides, off.tolist(), strict=True) if math.isfinite(jump) and jump > 0]
    return jumps, points.shape[:2].numel() * objective.cost


def _unbounded(target: Target, end: Tensor, side: _Side, remedy: str) -> str:
    name, change = target.names[side.place], "rises" if side.fall < 0 else "falls"
    return (
        f"there is no interior maximum by {name}: {_way(target, end, side)}, the height {change} by "
        f"{abs(side.fall):.1e} nats; remedy: {remedy}, or sample {name} with the other sites"
    )


def _way(target: Target, end: Tensor, side: _Side) -> str:
    """Return the values of a coordinate from the end of a search to one side, constrained if they are one number."""
    site = next(site for site in target.sites if site.start <= side.place < site.stop)
    here, there = (target.constrain(u)[site.name].flatten() for u in (end, side.point))
    place, scale = side.place - site.start, ""
    if len(here) != site.stop - site.start:
        here, there, place, scale = end, side.point, side.place, " (unconstrained)"
    return f"from {float(here[place]):.4g} to {float(there[place]):.4g}{scale}"


def _is_same(one: _Look, other: _Look) -> bool:
    """Tell whether two ends are one maximum."""
    level = abs(one.height - other.height) < _SAME_HEIGHT + _ROUNDINGS * (one.rounding + other.rounding)
    if one.problems or other.problems:
        return level and bool(one.problems) == bool(other.problems)
    step = other.position - one.position
    return level and float(step @ one.precision @ step) < _SAME_PLACE**2


def _about_searches(best: _Look, num_reached: int, num_starts: int, others: Sequence[LocalMaximum]) -> list[str]:
    """Return warnings about searches that ended elsewhere."""
    found = []
    if others and best.height - others[0].height < _RIVAL:
        found.append(
            f"{others[0]}, is lower by {best.height - others[0].height:.2f} nats only, and the standard errors "
            "know nothing of it; remedy: sample the hyperparameters with the other sites"
        )
    if num_reached == 1 and num_starts > 1 and not best.problems:
        found.append(
            f"one of {num_starts} searches ended at this maximum, so that there may be a higher one; remedy: raise "
            "num_starts"
        )
    return found


def _values(target: Target, u: Tensor) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in target.constrain(u).items()}


def _standard_errors(target: Target, u: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    """Return the standard errors of values by the delta method, ``{site: shape of the site}``."""

    def flat(u: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.reshape(-1) for value in target.constrain(u).values())

    slopes = torch.autograd.functional.jacobian(flat, u)
    values: Mapping[str, Tensor] = target.constrain(u)
    errors = [((slope @ covariance) * slope).sum(-1).clamp(min=0.0).sqrt() for slope in slopes]
    return {name: error.reshape(value.shape) for (name, value), error in zip(values.items(), errors, strict=True)}
