"""What one run of a model shows of its sites: distributions, values, scales and masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import Delta, ImproperUniform, Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._pyro.density import PyroDensity
from bayeskit._pyro.reader import is_deterministic
from bayeskit._transforms import bijection, support_of

KNOWN = ("torch", "pyro", "bayeskit")
"""Packages whose distributions are normalised and have been tested to be."""


@dataclass(frozen=True)
class Part:
    """One site as a run of the model saw it.

    ``own`` names the class if the distribution is the user's own; ``factor`` is true where nothing was sampled, unless
    the model names it among its ``normalised_factors``; ``masked`` is the share of elements that a mask left out.
    """

    name: str
    observed: bool
    distribution: Any
    value: Tensor
    factor: bool
    own: str | None
    scale: Tensor
    masked: float

    @property
    def normalised(self) -> bool:
        """Whether density and draws are right by construction: torch's and Pyro's own distributions, unmasked."""
        return not self.factor and self.masked == 0 and set(_packages(self.distribution)) <= {"torch", "pyro"}


class _Witness(Messenger):
    """Note every site; outside of the reader, so that it sees what the model's own handlers have done."""

    def __init__(self, complete: Collection[str]) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self._complete = complete

    def _pyro_post_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        self.parts.append(
            Part(
                msg["name"],
                bool(msg["is_observed"]),
                fn,
                msg["value"].detach(),
                isinstance(_innermost(fn), (Unit, Delta, ImproperUniform)) and msg["name"] not in self._complete,
                _own_class(fn),
                torch.as_tensor(msg["scale"]).detach(),
                _masked_share(msg["mask"], fn),
            )
        )


def parts_of(density: PyroDensity, generator: torch.Generator) -> list[Part]:
    """Run the model once at a draw from its prior and return its sites, latent and observed."""
    owner = getattr(density._model, "__self__", density._model)  # of a bound method
    complete = getattr(owner, "normalised_factors", ())
    with _Witness([complete] if isinstance(complete, str) else complete) as witness:
        density.probe(generator)
    return list({part.name: part for part in witness.parts}.values())  # of the last draw


def log_normaliser(fn: Any, value: Tensor, at_most: int = 20_000_000) -> Tensor | None:
    """Integrate or sum the density of a distribution over one variable, for every element of its batch.

    Finite supports are enumerated, counts are summed up, a real variable is integrated by the trapezoidal rule on
    nodes that crowd about ``value``.

    Returns
    -------
    Tensor, shape (elements,), or None
        Zero where the distribution is normalised; None if it has more than one variable, is too large a batch, or
        the sum has not converged.
    """
    fn = getattr(fn, "base_dist", fn) if type(fn).__name__ == "Independent" else fn
    if fn.event_shape != torch.Size(()):
        return None
    if fn.has_enumerate_support:
        values = fn.enumerate_support(expand=True)
        return fn.log_prob(values).logsumexp(0).reshape(-1) if values.numel() <= at_most else None
    support = support_of(fn)
    size = max(int(fn.batch_shape.numel()), int(value.numel()), 1)
    shape = (-1,) + (1,) * max(len(fn.batch_shape), value.dim())
    if getattr(support, "is_discrete", False):
        if size * 20_001 > at_most:
            return None
        low = getattr(support, "lower_bound", 0)
        low = low if isinstance(low, (int, float)) else 0
        counts = torch.arange(20_001, dtype=torch.float64, device=value.device) + low
        log_prob = fn.log_prob(counts.reshape(shape))
        whole, half = log_prob.logsumexp(0), log_prob[:10_001].logsumexp(0)
        return whole.reshape(-1) if bool(((whole - half).abs() < 1e-3).all()) else None
    if size * 8_001 > at_most:
        return None
    transform = bijection(support)
    centre = transform.inv(value.to(torch.float64))
    # Spacing in proportion to the distance from the value: narrow peaks near it are seen, and far tails too.
    t = torch.linspace(-25.0, 25.0, 8_001, dtype=torch.float64, device=value.device).reshape(shape)
    u = centre + 1e-3 * t.sinh()
    x = transform(u)
    log_mass = fn.log_prob(x) + transform.log_abs_det_jacobian(u, x) + (1e-3 * t.cosh()).log()
    log_mass = torch.where(log_mass.isnan(), -torch.inf, log_mass)
    fine = log_mass.logsumexp(0) + math.log(50.0 / 8_000)
    coarse = log_mass[::2].logsumexp(0) + math.log(50.0 / 4_000)
    return fine.reshape(-1) if bool(((fine - coarse).abs() < 1e-3).all()) else None


def _innermost(fn: Any) -> Any:
    while "base_dist" in getattr(fn, "__dict__", {}) and not hasattr(fn, "transforms"):
        fn = fn.base_dist
    return fn


def _packages(fn: Any) -> list[str]:
    """Return the packages of a distribution, of what it wraps, and of their transforms."""
    return [type(part).__module__.partition(".")[0] for part in _layers(fn)]


def _layers(fn: Any) -> Iterator[Any]:
    while fn is not None:
        yield fn
        yield from getattr(fn, "transforms", ())
        fn = getattr(fn, "__dict__", {}).get("base_dist")


def _own_class(fn: Any) -> str | None:
    """Return the name of the first class of the user's own among a distribution, what it wraps and its transforms."""
    layers = zip(_layers(fn), _packages(fn), strict=True)
    return next((type(layer).__name__ for layer, package in layers if package not in KNOWN), None)


def _masked_share(mask: Any, fn: Any) -> float:
    masks = [mask, *(getattr(layer, "_mask", None) for layer in _layers(fn))]
    kept = [torch.as_tensor(one).to(torch.float64).mean() for one in masks if one is not None]
    return max((1.0 - float(share) for share in kept), default=0.0)
