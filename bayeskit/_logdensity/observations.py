"""The data of a target, and the log likelihood of each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._logdensity.foreign_density import ForeignDensity
from bayeskit._logdensity.pyro_density import NO_DATA, FactorTerms, PyroDensity, likelihood_parts
from bayeskit._logdensity.target import MODELS, Target
from bayeskit.errors import DataError, DataWarning, ModelError


@runtime_checkable
class LossModel(Protocol):
    """A model that knows whether its likelihood is a loss in place of a density."""

    def why_no_density(self) -> str | None:
        """Return why the likelihood is not a density of the data, with the remedy, or None if it is one."""
        ...


_PROBES = 2
SITE_REMEDY = "give every part of the likelihood its own site"


class Observations:
    """The data of a target and the log likelihood of each; ModelError unless it is a sum of known log densities.

    With a ``plate`` of a model that sums discrete sites out, the data are the elements of the plate. With
    ``keep_factors`` a factor outside of every plate is no datum beside sites with data: it stays, as part of the prior.
    """

    def __init__(self, target: Target, *, plate: str | None = None, keep_factors: bool = False) -> None:
        _refuse_loss(target)
        self._target, self._plate = target, plate
        self._factors, self._model, self.kept = _factors(target, keep_factors)
        density = target.density
        if isinstance(density, PyroDensity) and not density.observed_sites:
            raise ModelError(NO_DATA)
        if isinstance(density, ForeignDensity) and density.no_pointwise:
            raise ModelError(density.no_pointwise)
        self._all_are_factors = isinstance(density, PyroDensity) and set(density.observed_sites) == set(self._factors)
        generator = new_generator(0, stream="probes of the likelihood")
        probe = torch.randn(_PROBES, target.dim, generator=generator, dtype=torch.float64).to(target.dtype)
        probe = probe.to(target.device)
        terms, counts = self._evaluate(probe)
        #: Shape of the terms of each site, in their order.
        self.shapes = {name: x.shape[1:] for name, x in terms.items()}
        # Number of observations per term, (n,), float64: equal observations, such as sites of one alignment pattern,
        # can share a term.
        self.counts = torch.cat(list(counts.values()))
        if target.is_split:
            total = _together(terms) @ self.counts + self.log_of_kept(probe)
            check_terms_add_up(total, target.log_likelihood(probe), SITE_REMEDY)

    def log_likelihood(self, u: Tensor) -> Tensor:
        """Return the log likelihood of one observation of each term, ``(m, d) -> (m, n)``, float64."""
        return _together(self._evaluate(u)[0])

    def log_of_others(self, u: Tensor) -> Tensor:
        """Return the log density without any data, ``(m, d) -> (m,)``, float64."""
        if self._target.is_split:
            return self._target.log_prior(u).to(torch.float64) + self.log_of_kept(u)
        return self._target.log_density(u).to(torch.float64) - self.log_likelihood(u) @ self.counts

    def log_of_kept(self, u: Tensor) -> Tensor:
        """Return the sum of the factors that are no data, ``(m, d) -> (m,)``, float64."""
        each = self._target.pointwise_log_likelihood(u) if self.kept else {}
        return sum((each[name].to(torch.float64) for name in self.kept), u.new_zeros(len(u), dtype=torch.float64))

    def _evaluate(self, u: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return terms ``(m, *shape)`` and counts ``(n,)`` by site."""
        if self._plate is not None:
            each = self._target.log_likelihood_by_plate(u, self._plate)
            return {self._plate: each}, {self._plate: each.new_ones(each.shape[1], dtype=torch.float64)}
        terms, counts = {}, {}
        if self._model is not None:
            with one_thread():
                found = self._model.factor_terms(self._target.constrain(u))
            for name in self._factors:
                terms[name], counts[name] = found[name][0], found[name][1].to(u.device, torch.float64)
        others = {} if self._all_are_factors else self._target.pointwise_log_likelihood(u)
        for name, each in others.items():
            if name not in (*self._factors, *self.kept):
                terms[name] = each
                counts[name] = torch.ones(each.shape[1:].numel(), dtype=torch.float64, device=u.device)
        return terms, counts


def check_same_data(targets: Mapping[str, Target]) -> None:
    """Raise ``DataError`` if models have different data; the names of sites and the order of values are free.

    Data in other units, such as logarithms, are the same where the log Jacobian of the transformation stands beside
    them, as a factor that depends on no parameter. Models whose likelihood has factors only are not looked at.
    """
    foreign = {n: t.density for n, t in targets.items() if isinstance(t.density, ForeignDensity)}
    if unseen := [n for n, x in foreign.items() if x.has_likelihood and not x.observed_sites and not x.factor_sites]:
        warn_user(
            f"the data of {', '.join(map(repr, unseen))} are not compared: a {foreign[unseen[0]].package} program does "
            "not say which of its data are observed; see to it that all models have the same",
            DataWarning,
        )
    known = [(name, values, target) for name, target in targets.items() if len(values := observed_values(target))]
    for name, values, target in known[1:]:
        first, expected, other = known[0]
        what = f"models {first!r} and {name!r}"
        try:
            check_values(what, expected.sort().values, values.sort().values)
        except DataError:
            given = _constant_factors(other) - _constant_factors(target)
            if len(values) != len(expected) or given == 0:
                raise
            there, here = _different(other, target)
            back = {f"inverse of {name}": -value for name, value in _log_jacobians(here, there).items()}
            found = _log_jacobians(there, here) | back
            if not any(abs(one - given) < 1e-5 * (1 + abs(one)) for one in found.values()):
                raise DataError(
                    f"{what} have different data, and their constant factors differ by {given:.6g}, which is not the "
                    f"log Jacobian of a usual transformation{_of_those(found)}; mend the factor, or pass "
                    "same_data=True if they are the same data all the same"
                ) from None


def _of_those(found: Mapping[str, float]) -> str:
    return "".join(f" ({name}: {value:.6g})" for name, value in list(found.items())[:1])


def _different(first: Target, second: Target) -> tuple[Tensor, Tensor]:
    """Return the observed values of two models, ``(n,)`` each, without sites of one name and the same values."""
    one, other = (dict(t.density.data_as_given()) if isinstance(t.density, MODELS) else {} for t in (first, second))
    for name in [*one]:
        if name in other and one[name].shape == other[name].shape and one[name].equal(other[name]):
            del one[name], other[name]
    parts = (torch.cat([torch.zeros(0, dtype=torch.float64), *(x.flatten() for x in y.values())]) for y in (one, other))
    values = tuple(x[~x.isnan()] for x in parts)
    return values[0], values[1]


_Function = Callable[[Tensor], Tensor]
#: Transformations of data ``y`` that people use, up to shift and scale, and the logarithms of their derivatives.
_TRANSFORMATIONS: dict[str, tuple[_Function, _Function]] = {
    "shift and scale": (lambda y: y, torch.zeros_like),
    "logarithm": (torch.log, lambda y: -y.log()),
    "exponential": (torch.exp, lambda y: y),
    "square root": (torch.sqrt, lambda y: -0.5 * y.log() - math.log(2)),
    "square": (lambda y: torch.where(y >= 0, y.square(), torch.nan), lambda y: (2 * y).log()),
    "reciprocal": (lambda y: torch.where(y > 0, 1 / y, torch.nan), lambda y: -2 * y.log()),
    "logarithm of one more": (torch.log1p, lambda y: -y.log1p()),
    "exponential less one": (torch.expm1, lambda y: y),
    "logit": (torch.logit, lambda y: -y.log() - (-y).log1p()),
    "inverse logit": (torch.sigmoid, lambda y: y - 2 * torch.nn.functional.softplus(y)),
}


def _log_jacobians(first: Tensor, second: Tensor) -> dict[str, float]:
    """Return the log Jacobian of each transformation that takes the second data to the first, ``(n,)`` each."""
    found: dict[str, float] = {}
    if len(first) != len(second) or len(first) < 3:
        return found
    goal = first.sort().values
    for name, (transform, log_derivative) in _TRANSFORMATIONS.items():
        for sign in (1, -1):
            x = (sign * transform(second)).sort().values
            scale = (goal[-1] - goal[0]) / (x[-1] - x[0])
            if not bool(x.isfinite().all()) or not 0 < float(scale) < math.inf:
                continue
            moved = goal[0] + scale * (x - x[0])
            if bool((moved - goal).abs().max() < 1e-6 * (goal[-1] - goal[0])):
                found.setdefault(name, float(log_derivative(second).sum() + len(x) * scale.log()))
    return found


def check_values(what: str, first: Tensor, second: Tensor) -> None:
    """Raise ``DataError`` if observed values ``(n,)`` of two models are not the same, up to single precision."""
    if len(first) != len(second):
        raise DataError(
            f"{what} have different data: {len(first)} and {len(second)} observed values; fit both to the same rows, "
            "or pass same_data=True if they are the same data all the same"
        )
    if not first.allclose(second, rtol=1e-6, atol=0.0):
        place = int((first - second).abs().argmax())
        raise DataError(
            f"{what} have different data: value {place + 1} of {len(first)} is {float(first[place]):.6g} and "
            f"{float(second[place]):.6g}. If one has transformed data, add the log Jacobian of the transformation, "
            "such as pyro.factor('jacobian', -log_y.sum()) beside data log_y; or pass same_data=True if they are "
            "the same data all the same"
        )


def observed_values(target: Target) -> Tensor:
    """Return all observed values, ``(n,)``, in double precision; none where only factors are known."""
    density = target.density
    given = density.data_as_given().values() if isinstance(density, MODELS) else ()
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *(x.flatten() for x in given)])
    return values[~values.isnan()]


def _constant_factors(target: Target) -> float:
    density = target.density
    generator = new_generator(1, stream="value of a factor")
    return sum(density.constant_factors(generator).values()) if isinstance(density, PyroDensity) else 0.0


def _together(terms: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.reshape(len(x), -1) for x in terms.values()], -1).to(torch.float64)


_ONE_TERM = (
    "the factor {} is one term for all data, so single observations cannot be scored; replace it by sites with "
    "observations"
)


def _factors(target: Target, keep: bool) -> tuple[tuple[str, ...], FactorTerms | None, tuple[str, ...]]:
    """Return the factors of a Pyro model, the model with their terms, and those to ``keep``, which are no data.

    Raise ModelError if a part is not pointwise.
    """
    if isinstance(target.density, ForeignDensity) and (factors := target.density.factor_sites):
        if keep and target.density.observed_sites:
            return (), None, factors
        raise ModelError(_ONE_TERM.format(_quoted(factors)))
    if not isinstance(target.density, PyroDensity):
        return (), None, ()
    parts = likelihood_parts(target.density)
    if parts.scaled:
        raise ModelError(
            f"{_quoted(parts.scaled)} is scaled by poutine.scale, so its terms are powers of predictive densities; "
            "remove the scale, and repeat observations that occur more than once"
        )
    if parts.factors and parts.model is None and keep and set(target.density.observed_sites) > set(parts.factors):
        return (), None, parts.factors
    if parts.factors and parts.model is None:
        raise ModelError(_ONE_TERM.format(_quoted(parts.factors)) + ", or give the model a method factor_terms")
    return parts.factors, parts.model if parts.factors else None, ()


def _refuse_loss(target: Target) -> None:
    model = target.density.model if isinstance(target.density, PyroDensity) else None
    if isinstance(model, LossModel) and (reason := model.why_no_density()) is not None:
        raise ModelError(reason)


def check_terms_add_up(total: Tensor, expected: Tensor, remedy: str, names: Iterable[str] = ()) -> None:
    """Raise ModelError if sums of likelihood terms and log likelihoods, ``(m,)``, are finite and differ."""
    comparable = total.isfinite() & expected.isfinite()
    tolerance = 1e-3 if torch.float32 in (total.dtype, expected.dtype) else 1e-8
    off = (total - expected).abs() > tolerance * (1 + expected.abs())
    if bool((off & comparable).any()):
        of = _quoted(names)
        raise ModelError(
            f"the log likelihoods of the observations{' of ' + of if of else ''} do not add up to the log likelihood, "
            f"so observations cannot be used one by one; {remedy}"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
