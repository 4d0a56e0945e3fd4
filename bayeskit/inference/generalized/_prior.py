"""Proper and improper priors, and directions in which a posterior under an improper prior has infinite mass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import ModelError
from bayeskit.extend import PyroDensity, Site, bijection, new_generator, one_thread, process_state
from bayeskit.inference.generalized.losses._loss import unvalidated

# Priors: a Pyro model or a distribution, proper or improper.


class Flat(dist.TorchDistribution):  # type: ignore[misc]
    """Improper prior with density one on its support.

    Parameters
    ----------
    shape : tuple of int, default ()
        Shape of the parameter.
    support : Constraint, default real
        Support of the entries, such as ``constraints.positive``, or of the parameter, such as ``constraints.simplex``.

    Examples
    --------
    >>> import torch
    >>> Flat((2,)).log_prob(torch.tensor([3.0, -100.0])).item()
    0.0
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    is_improper: ClassVar[bool] = True  # read by targets

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        support: constraints.Constraint = constraints.real,
        batch_shape: tuple[int, ...] = (),
    ) -> None:
        entries = len(shape) - support.event_dim
        self._support = constraints.independent(support, entries) if entries > 0 else support
        super().__init__(torch.Size(batch_shape), torch.Size(shape), validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        """Support of the prior."""
        return self._support

    def log_prob(self, value: Tensor) -> Tensor:
        """Return zero."""
        return value.new_zeros(torch.broadcast_shapes(value.shape, self.shape())[: value.dim() - self.event_dim])

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Return starting points in the support; their distribution has no meaning."""
        transform = bijection(self._support)
        value: Tensor = transform(torch.randn(transform.inverse_shape(self.shape(sample_shape))))
        return value

    def expand(self, batch_shape: Any, _instance: Any = None) -> Flat:
        """Return the prior with another batch shape."""
        return Flat(tuple(self.event_shape), self._support, batch_shape)


class _Starting(Messenger):
    """Replace ``ImproperUniform`` sites by ``Flat``, which has starting points."""

    def _pyro_sample(self, message: Any) -> None:
        fn = message["fn"]
        if not message["is_observed"] and isinstance(_without_shape(fn), dist.ImproperUniform):
            message["fn"] = Flat(tuple(fn.event_shape), fn.support, tuple(fn.batch_shape))


def _without_shape(fn: Any) -> Any:
    """Return the base distribution without ``Independent``, expansion or mask."""
    while isinstance(fn, (torch.distributions.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


class Prior:
    """Prior of the parameter of a loss over ``dim`` unconstrained coordinates; sites in ``improper`` are not proper.

    ``prior`` is a distribution of the parameter, then of site ``name``, or a model whose latent sites are the unknowns.
    The parameter is the return value of the model or, if that is None, the value of its only site, or a dict of the
    values of its sites; it has dtype and device of ``like``. ModelError if ``prior`` is neither, or has an observed
    site; UnsupportedSiteError for discrete sites.
    """

    def __init__(self, prior: Any, *, like: Tensor, name: str = "theta", seed: int = 0) -> None:
        self._starting, self._dtype = _Starting(), like.dtype
        self._run = self._starting(_as_model(prior, name, like))
        density = PyroDensity(self._only, (like,), {}, new_generator(seed))
        if density.observed_sites != (_NOTHING,):
            raise ModelError(f"the prior observes site {density.observed_sites[0]!r}; observations belong in the loss")
        self._density = density
        self.dim, self.sites = density.dim, density.sites
        self.improper = density.improper_sites

    @property
    def is_proper(self) -> bool:
        """Whether no site has an improper prior."""
        return not self.improper

    def model(self) -> tuple[Any, Drawn]:
        """Run the prior as a Pyro model; return the parameter and the values of latent sites."""
        found = _Found()
        with found:
            parameter = self._run()
        return self._parameter(parameter, found.drawn.values), found.drawn

    def of_values(self, values: dict[str, Tensor]) -> Any:
        """Return the parameter for given values of sites, hidden from enclosing effect handlers."""
        with process_state(), pyro.poutine.block():
            return self._parameter(pyro.poutine.condition(self._run, data=values)(), values)

    def _parameter(self, returned: Any, values: dict[str, Any]) -> Any:
        if returned is None:
            returned = next(iter(values.values())) if len(values) == 1 else values
        return _cast(returned, self._dtype)

    def _only(self, like: Tensor) -> Any:
        parameter, _ = self.model()
        # A density needs an observed site; this factor is zero.
        pyro.factor(_NOTHING, like.new_zeros(()))
        return parameter

    def parameter(self, u: Tensor) -> Any:
        """Return the parameter of the loss at one unconstrained vector ``(d,)``."""
        return self._density.returned(u)

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """Return the value of each site at one unconstrained vector ``(d,)``."""
        return self._density.values(u)

    def curved(self, u: Tensor) -> Tensor:
        """Return which coordinates have a transform other than the identity, judged at one vector, ``(d,)``."""
        values, found = self.values(u), torch.ones_like(u, dtype=torch.bool)
        for site in self.sites:
            own = slice(site.start, site.stop)
            found[own] = not torch.equal(values[site.name].reshape(-1), u[own])
        return found

    def log_density(self, u: Tensor) -> Tensor:
        """Return the log density over unconstrained space at one vector ``(d,)``, Jacobian included."""
        return self._density.joint(u)[0]

    def start(self, num_vectors: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return unconstrained starting points, ``(n, d)``; draws from the prior if it is proper."""
        return self._density.prior_vectors(num_vectors, new_generator(seed, stream="starting points"), batched=False)


_NOTHING = "_nothing"


class Drawn(NamedTuple):
    """Values of the latent sites of one run of a prior, and the event dimension of each."""

    values: dict[str, Tensor]
    event_dims: dict[str, int]

    def particles(self, sites: tuple[Site, ...]) -> tuple[torch.Size, dict[str, Tensor]] | None:
        """Return the batch shape of vectorised particles and the sites' values, ``(P, ...)``; None for a single run."""
        outer = {}
        for site in sites:
            plates = len(site.shape) - self.event_dims[site.name]
            value = self.values[site.name]
            outer[site.name] = (torch.Size((*value.shape[: value.dim() - len(site.shape)], *[1] * plates)), plates)
        if all(self.values[site.name].dim() == len(site.shape) for site in sites):
            return None
        batch = torch.broadcast_shapes(*(shape for shape, _ in outer.values()))
        return batch, {s.name: _rows(self.values[s.name], s.shape, batch, outer[s.name][1]) for s in sites}


def _rows(value: Tensor, shape: torch.Size, batch: torch.Size, plates: int) -> Tensor:
    """Return the value of each run, ``(P, *shape)``; the site's own plates are the last batch dimensions."""
    left = batch[: len(batch) - plates]
    value = value.reshape(*[1] * (len(left) + len(shape) - value.dim()), *value.shape)
    return value.expand(*left, *shape).reshape(-1, *shape)


class _Found(Messenger):
    """Record the values of latent sites."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = Drawn({}, {})

    def _pyro_post_sample(self, message: Any) -> None:
        infer = message["infer"]
        if infer.get("_deterministic") or infer.get("enumerate") == "parallel":
            return  # enumerated sites have no single value
        if isinstance(message["fn"], dist.torch_distribution.TorchDistributionMixin):
            self.drawn.values[message["name"]] = message["value"]
            self.drawn.event_dims[message["name"]] = message["fn"].event_dim


def _cast(parameter: Any, dtype: torch.dtype) -> Any:
    """Cast a parameter to the dtype of the data, which may differ from that of a guide."""
    if isinstance(parameter, Tensor):
        return parameter.to(dtype) if parameter.is_floating_point() else parameter
    return {k: _cast(v, dtype) for k, v in parameter.items()} if isinstance(parameter, dict) else parameter


def _as_model(prior: Any, name: str, like: Tensor) -> Callable[[], Any]:
    if isinstance(prior, torch.distributions.Distribution):
        if not isinstance(prior, dist.torch_distribution.TorchDistributionMixin):
            raise ModelError(
                f"the prior {type(prior).__name__} is torch's own class; use that of pyro.distributions, or a model"
            )
        joint = prior.to_event(len(prior.batch_shape)) if prior.batch_shape else prior
        return partial(pyro.sample, name, _in_precision(joint, like.dtype))
    if not callable(prior):
        raise ModelError(f"the prior must be a distribution or a Pyro model without arguments, not {prior!r:.80}")
    return prior  # type: ignore[no-any-return]


def _in_precision(distribution: Any, dtype: torch.dtype) -> Any:
    """Return a distribution with parameters of another dtype, since some cast values to the dtype of parameters."""
    if isinstance(distribution, Flat):
        return distribution
    result = copy.copy(distribution)
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            vars(result)[name] = value.to(dtype)
        elif isinstance(value, torch.distributions.Distribution):
            vars(result)[name] = _in_precision(value, dtype)
    return result


# Directions of recession: the improper prior is flat and the loss does not grow.

_STARTS = 3
_RANDOM = 16  # random directions
_AXES = 32  # largest number of coordinate axes
_MOST_COEFFICIENTS = 64  # largest number of coefficients for the search of a null space
_SLOWEST = 0.5  # mass along a ray is finite only if the density decreases faster than distance ** -1

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``(m, d)`` -> log prior and minus the weighted loss, ``(m,)`` each."""


def direction_of_recession(joint: Joint, prior: Prior, largest: float, seed: int) -> Tensor | None:
    """Return a direction ``(d,)`` of improper coordinates in which the posterior has infinite mass, if one is found."""
    # ``largest`` is the largest absolute value of the data, the unit of distance.
    search = _Search(joint, prior, max(1.0, largest), seed)
    with one_thread(), unvalidated(), torch.inference_mode(False), torch.no_grad():
        try:
            # Either the density does not decrease along a ray (bounded loss or pooling), or the loss does not depend
            # on a linear combination of coefficients (collinear covariates). Both hold in a neighbourhood of the
            # points, so the mass is infinite. propriety_check also finds narrower regions.
            found = search.bounded_ray()
            found = search.without_effect() if found is None else found
        except (RuntimeError, ValueError, ArithmeticError):
            return None  # the loss cannot be evaluated at distant points
    return None if found is None else found / found.norm()


class _Search:
    """Starting points, and the distance of far points in each coordinate."""

    def __init__(self, joint: Joint, prior: Prior, largest: float, seed: int) -> None:
        self.joint, self.largest = joint, largest
        self.points = prior.start(_STARTS + min(prior.dim, _MOST_COEFFICIENTS) + 8, seed)
        self.generator = new_generator(seed, stream="recession")
        improper = torch.zeros_like(self.points[0], dtype=torch.bool)
        curved = prior.curved(self.points[0])
        for site in prior.sites:
            improper[site.start : site.stop] = site.name in prior.improper
        self.free, self.curved = improper.nonzero()[:, 0], curved
        numbers = torch.finfo(self.points.dtype)
        self.precision = numbers.eps
        bend = math.log(numbers.max) / 2.4  # squares of its exponential do not overflow
        self.far = torch.full_like(self.points[0], largest * numbers.eps**-0.75).masked_fill(curved, bend / 2)
        self.farther = torch.full_like(self.points[0], largest * numbers.eps**-1.5).masked_fill(curved, bend)

    def bounded_ray(self) -> Tensor | None:
        """Return a direction along which the density does not decrease from any starting point."""
        directions = self._directions()
        near = (self.points[:_STARTS, None] + directions * self.far).flatten(0, 1)
        far = (self.points[:_STARTS, None] + directions * self.farther).flatten(0, 1)
        before, after = (sum(self.joint(u)).reshape(_STARTS, -1) for u in (near, far))  # type: ignore[union-attr]
        bent = (directions[:, self.curved] != 0).any(-1)
        doublings = torch.where(bent, math.log(2.0), math.log(self.precision**-0.75)).to(before)
        endless = before.isfinite() & after.isfinite() & (after - before > -_SLOWEST * doublings)
        found = endless.all(0).nonzero()[:, 0]
        return directions[found[0]] if len(found) else None

    def _directions(self) -> Tensor:
        """Return axes and random directions of the improper coordinates, with both signs, ``(m, d)``."""
        axes = torch.eye(len(self.curved)).to(self.points)[self.free[:_AXES]]
        shape = (_RANDOM if len(self.free) > 1 else 0, len(self.free))
        random = axes.new_zeros(shape[0], len(self.curved))
        random[:, self.free] = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(random)
        both = torch.cat([axes, random / random.abs().amax(-1, keepdim=True)])
        return torch.cat([both, -both])

    def without_effect(self) -> Tensor | None:
        """Return a linear combination of unconstrained coefficients on which the loss does not depend."""
        free = self.free[~self.curved[self.free]]
        if not 1 < len(free) <= _MOST_COEFFICIENTS:
            return None
        null = self._null_space(free)
        if not len(null):
            return None
        candidates = null.new_zeros(len(null), len(self.curved))
        candidates[:, free] = null
        generic = self._directions()[-_RANDOM:]
        start = self.points[:_STARTS, None]
        here = self.joint(start[:, 0])[1][:, None]
        changed, usual = (
            (self.joint((start + u * self.far).flatten(0, 1))[1].reshape(_STARTS, -1) - here).abs()
            for u in (candidates, generic)
        )
        # A combination without effect changes the loss by rounding error only, relative to random directions.
        limit = math.sqrt(self.precision) * usual.median(-1, keepdim=True).values
        found = ((changed <= limit) & limit.isfinite()).all(0).nonzero()[:, 0]
        return candidates[found[0]] if len(found) else None

    def _null_space(self, free: Tensor) -> Tensor:
        """Return vectors ``(k, len(free))`` orthogonal to the loss's gradients at all points."""
        points = self.points.clone()
        points[::2, free] *= self.largest  # on the scale of the data, so that absolute errors have both signs
        with torch.enable_grad():
            points.requires_grad_()
            (slopes,) = torch.autograd.grad(self.joint(points)[1].sum(), points)
        slopes = slopes[:, free]
        slopes = slopes[slopes.isfinite().all(-1)]
        tiny = torch.finfo(slopes.dtype).tiny
        slopes = slopes / slopes.norm(dim=-1, keepdim=True).clamp_min(tiny)
        # Normalise by the scale of each covariate.
        scale = slopes.norm(dim=0)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        padded = torch.cat([slopes / scale, torch.zeros(len(free), len(free)).to(slopes)])
        _, size, rows = torch.linalg.svd(padded, full_matrices=False)
        null = rows[size <= self.precision**0.6 * size[0]] / scale
        return null / null.abs().amax(-1, keepdim=True)
