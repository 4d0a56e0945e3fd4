"""The choice, made once, of how inner coordinates are integrated out, and of the mode from which others are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit._compiler import FailingApart
from bayeskit._core.randomness import new_generator
from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit._core.untraceable import UNTRACEABLE, first_line, raise_if_forked
from bayeskit.errors import BayeskitError, InitializationError, ModelError
from bayeskit.inference._optimize import scipy_lbfgs
from bayeskit.inference.marginal._conjugate import find_conjugate
from bayeskit.inference.marginal._evaluation import evaluate_untraced
from bayeskit.inference.marginal._field import FieldIntegral, is_field
from bayeskit.inference.marginal._hessian import Hessian, HessianSamples, find_hessian
from bayeskit.inference.marginal._inner_density import InnerDensity
from bayeskit.inference.marginal._integral import InnerIntegral, ModePrediction
from bayeskit.inference.marginal._laplace import LaplaceIntegral
from bayeskit.inference.marginal._modes import find_inner_modes
from bayeskit.inference.marginal._quadratic import QuadraticIntegral

#: Draws from the prior at which structure is tested, and vectors from which the mode of the marginal is looked for.
_PRIOR_DRAWS, _CANDIDATES = 64, 5
#: Iterations to the mode of the marginal, and step of the differences for the derivative of the inner mode there.
_MAX_ITERATIONS, _TANGENT_STEP = 30, 0.1
#: Number of starts of the search for other modes; largest number of entries of their Hessians together; squared
#: distance in standard deviations, below which two modes count as one.
_NUM_STARTS, _MAX_ENTRIES, _SAME_MODE = 16, 2**17, 1e-2

_Searched = LaplaceIntegral | QuadraticIntegral | FieldIntegral


class IntegralSelection(NamedTuple):
    """How inner coordinates are integrated out."""

    integral: InnerIntegral
    start: Tensor  # (p,), near the mode of the marginal
    independent_sites: frozenset[str]  # whose values do not depend on inner coordinates, deterministic ones included
    problems: tuple[str, ...]  # why the approximation cannot be trusted


def select_integral(density: InnerDensity) -> IntegralSelection:
    """Return the integral that the density allows at draws from the prior: in closed form, or else by a search.

    Raises ``ModelError`` where a remaining site depends on inner ones or derivatives are missing, and
    ``InitializationError`` where no mode is found.
    """
    points = density.whole.prior_vectors(_PRIOR_DRAWS, new_generator(0, stream="marginalization"), True)
    with _needing("second", density), torch.no_grad(), FailingApart():
        samples = _finite_samples(density, points)
        r, z = samples.r, samples.z
        _refuse_dependence(density, r[:_CANDIDATES], z[:_CANDIDATES])
        candidates = torch.cat([r.median(0).values.unsqueeze(0), torch.zeros_like(r[:1]), r])[:_CANDIDATES]
        independent = _independent_sites(density, candidates[0], z)
        if (conjugate := find_conjugate(samples)) is not None:
            start = candidates[_best_of(conjugate, candidates)]
            return IntegralSelection(integral=conjugate, start=start, independent_sites=independent, problems=())
        hessian = find_hessian(samples)
        kind = _kind_of(hessian, samples)
    integral = _started(kind, hessian, candidates)
    start = integral.prediction.reference
    problems: tuple[str, ...] = ()
    if isinstance(integral, LaplaceIntegral):
        problems = _several_modes(integral, torch.cat([start.unsqueeze(0), candidates[1:]]), z)
    return IntegralSelection(integral=integral, start=start, independent_sites=independent, problems=problems)


@contextmanager
def _needing(order: str, density: InnerDensity) -> Iterator[None]:
    """Raise ``ModelError`` if derivatives of an order by the inner coordinates cannot be computed."""
    try:
        yield
    except UNTRACEABLE as error:
        if isinstance(error, BayeskitError):
            raise
        raise_if_forked(error)
        names = ", ".join(map(repr, density.over))
        raise ModelError(f"the model's density has no {order} derivatives by {names}: {first_line(error)}") from error


def _finite_samples(density: InnerDensity, points: Tensor) -> HessianSamples:
    """Return those of draws from the prior ``(k, d)`` at which the density is finite."""
    r, z = points[:, density.remaining], points[:, density.inner]
    fine = density.value(r, z).isfinite()
    if not bool(fine.any()):
        raise InitializationError(
            f"the density is zero or infinite at all {len(points)} draws from the prior; look at the data"
        )
    density.filler = z[fine].median(0).values
    return HessianSamples(density, r[fine], z[fine])


def _kind_of(hessian: Hessian, samples: HessianSamples) -> type[_Searched]:
    """Return the integral that is exact or fastest for a Hessian."""
    if hessian.is_quadratic:
        return QuadraticIntegral
    return FieldIntegral if is_field(hessian, samples) else LaplaceIntegral


def _started(kind: type[_Searched], hessian: Hessian, candidates: Tensor) -> _Searched:
    """Return an integral whose modes are predicted from the mode of the marginal near the best candidate."""
    density = hessian.density
    names = ", ".join(map(repr, density.over))
    modes = find_inner_modes(hessian, candidates, density.filler.expand(len(candidates), -1))
    if not bool(modes.found.any()):
        raise InitializationError(
            f"Newton's method finds no mode of {names} at {len(candidates)} vectors of the other sites: the "
            "density may have no maximum, one at infinity, or no negative definite Hessian. Remedy: give these "
            "sites a proper prior, a likelihood that is log-concave in them, or sample them with the others"
        )
    tangent = torch.zeros(density.dim, density.num_inner, dtype=density.dtype, device=density.device)
    first = int(modes.found.int().argmax())
    prediction = ModePrediction(reference=candidates[first], mode=modes.z[first], tangent=tangent)
    with _needing("third", density):
        integral = kind(density, hessian, prediction)
        best = _best_of(integral, candidates)
        prediction = prediction._replace(reference=candidates[best], mode=modes.z[best])
        return _near_the_mode(replace(integral, prediction=prediction))


def _refuse_dependence(density: InnerDensity, r: Tensor, z: Tensor) -> None:
    """Raise ``ModelError`` for a remaining site whose prior depends on a site that is integrated out."""
    for name in (site.name for site in density.sites):

        def term(z: Tensor, r: Tensor, name: str = name) -> tuple[Tensor, tuple[Tensor, ...]]:
            def one(r: Tensor, z: Tensor) -> Tensor:
                terms = density.prior_terms(r, z)
                if name not in terms:
                    raise ModelError(
                        f"the prior of site {name!r} depends on a summed-out site, so the prior of the sites that "
                        "are left has no density of its own; integrate that site out, too"
                    )
                return terms[name]

            return torch.func.vmap(one)(r, z).sum(), ()

        if bool((gradient_and_rest(term, z, r)[0] != 0).any()):
            raise ModelError(
                f"the prior of site {name!r} depends on the sites to be integrated out, {sorted(density.over)}; "
                f"integrate {name!r} out, too, or write the model so that {name!r} comes first"
            )


def _independent_sites(density: InnerDensity, r: Tensor, z: Tensor) -> frozenset[str]:
    """Return the sites whose values are the same at some inner coordinates ``(k, m)``."""
    first, *others = (density.whole.values(density.merged(r, one), True) for one in z[:_CANDIDATES])
    same = {name for name, value in first.items() if all(torch.equal(value, other[name]) for other in others)}
    return frozenset(same - density.over) | {site.name for site in density.sites}


def _best_of(integral: InnerIntegral, r: Tensor) -> int:
    """Return the row of highest density."""
    found = evaluate_untraced(integral, r).zero_where_lost()
    return int(found.log_density(torch.ones_like(r[:, 0])).argmax())


def _near_the_mode(integral: _Searched) -> _Searched:
    """Return the integral with modes predicted from the mode of the marginal; as it is where none is found there."""
    density, prediction = integral.density, integral.prediction

    def log_density(x: np.ndarray) -> tuple[float, np.ndarray]:
        r = torch.as_tensor(x, dtype=density.dtype, device=density.device).unsqueeze(0)
        found = evaluate_untraced(integral, r).zero_where_lost()
        return float(found.log_density(torch.ones_like(r[:, 0]))), found.gradient[0].double().cpu().numpy()

    start = prediction.reference.double().cpu().numpy()
    best = scipy_lbfgs(log_density, start, maxiter=_MAX_ITERATIONS, gtol=0.3)
    reference = torch.as_tensor(best.position, dtype=density.dtype, device=density.device)
    step = _TANGENT_STEP * torch.eye(density.dim, dtype=density.dtype, device=density.device)
    around = torch.cat([reference.unsqueeze(0), reference + step, reference - step])
    modes = find_inner_modes(integral.hessian, around, prediction.mode.expand(len(around), -1))
    if not bool(modes.found.all()):
        return integral
    mode, (up, down) = modes.z[0], modes.z[1:].split(density.dim)
    tangent = (up - down) / (2 * _TANGENT_STEP)
    return replace(integral, prediction=ModePrediction(reference=reference, mode=mode, tangent=tangent))


def _several_modes(integral: LaplaceIntegral, r: Tensor, starts: Tensor) -> tuple[str, ...]:
    """Return a warning if at some of ``(k, p)`` searches from prior draws ``(l, m)`` end at other modes than usual."""
    density, hessian = integral.density, integral.hessian
    size = density.num_inner * (density.num_inner if hessian.structure.is_dense else 1)
    starts = starts[: max(1, min(_NUM_STARTS, _MAX_ENTRIES // (size * len(r))))]
    at = r.repeat_interleave(len(starts), 0)
    with torch.no_grad(), FailingApart():
        usual = integral.guarded_modes(r)
        others = find_inner_modes(hessian, at, starts.repeat(len(r), 1))
        found = others.found & usual.found.repeat_interleave(len(starts))
        top = usual.z.repeat_interleave(len(starts), 0)
        apart = others.z - top
        minus, _, value = hessian.curve(at, top, hessian.constant(at, top))
        gain = density.value(at, others.z) - value
        distance = (apart * hessian.structure.times(minus, apart)).sum(-1)
    other = found & (distance > _SAME_MODE)
    if not bool(other.any()):
        return ()
    names = " and ".join(map(repr, sorted(density.over)))
    return (
        f"the density of {names} has several modes given the other sites: {int(other.sum())} of {int(found.sum())} "
        "searches from draws of the prior end at another one than that of the approximation, by "
        f"{float(gain[other].amax()):+.2f} nats; sample these sites with the others",
    )
