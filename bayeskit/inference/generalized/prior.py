"""What is believed before the data, proper or not, and directions in which an improper prior is flat."""

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

from bayeskit.core.randomness import new_generator, one_thread, validation_kept
from bayeskit.errors import ModelError
from bayeskit.logdensity.pyro_density import PyroDensity, Site
from bayeskit.logdensity.transforms import bijection

__all__ = ["Drawn", "Flat", "Joint", "Prior", "Site", "direction_of_recession"]


# Priors: a Pyro model or a distribution, proper or improper.


class Flat(dist.TorchDistribution):  # type: ignore[misc]
    """The improper prior whose density is one everywhere on a support.

    Parameters
    ----------
    shape : tuple of int, default ()
        Of the parameter.
    support : Constraint, default real
        Of its entries, or of the whole parameter, such as ``constraints.positive`` or ``constraints.simplex``.

    Examples
    --------
    >>> import torch
    >>> Flat((2,)).log_prob(torch.tensor([3.0, -100.0])).item()
    0.0
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    is_improper: ClassVar[bool] = True  # which targets look for, as they do for masks

    def __init__(
        self, shape: tuple[int, ...] = (), support: constraints.Constraint = constraints.real, batch_shape: Any = ()
    ) -> None:
        entries = len(shape) - support.event_dim
        self._support = constraints.independent(support, entries) if entries > 0 else support
        super().__init__(torch.Size(batch_shape), torch.Size(shape), validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        """Where the density is one."""
        return self._support

    def log_prob(self, value: Tensor) -> Tensor:
        """Return zero."""
        return value.new_zeros(torch.broadcast_shapes(value.shape, self.shape())[: value.dim() - self.event_dim])

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Return values to start from: of the support, but of no law that means anything."""
        transform = bijection(self._support)
        value: Tensor = transform(torch.randn(transform.inverse_shape(self.shape(sample_shape))))
        return value

    def expand(self, batch_shape: Any, _instance: Any = None) -> Flat:
        """Return the prior of a batch of parameters."""
        return Flat(tuple(self.event_shape), self._support, batch_shape)


class _Starting(Messenger):
    """Let improper sites be drawn from somewhere."""

    def _pyro_sample(self, message: Any) -> None:
        fn = message["fn"]
        if not message["is_observed"] and isinstance(_without_shape(fn), dist.ImproperUniform):
            message["fn"] = Flat(tuple(fn.event_shape), fn.support, tuple(fn.batch_shape))


def _without_shape(fn: Any) -> Any:
    """Return the distribution that others give a shape or a mask."""
    while isinstance(fn, (torch.distributions.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


class Prior:
    """A prior over what a loss takes as its parameter.

    Parameters
    ----------
    prior : distribution or Pyro model
        A model's latent sites are the unknowns. The parameter is what it returns or, where it returns nothing,
        the value of its only site, or the values of its sites by name.
    name : str, default "theta"
        Of the site, where a distribution is given.
    like : Tensor
        Whose dtype and device the parameter takes.
    seed : int, default 0
        For the run that reads the model's structure.

    Attributes
    ----------
    dim : int
        Of the unconstrained vector.
    sites : tuple of Site
    improper : tuple of str
        Sites whose prior does not integrate to one: flat, or masked.

    Raises
    ------
    ModelError
        If it is neither a distribution nor a model, or has a site that cannot be dealt with.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> prior = Prior(dist.Gamma(2.0, 1.0), like=torch.zeros((), dtype=torch.float64))
    >>> prior.parameter(torch.zeros(1, dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """

    def __init__(self, prior: Any, *, like: Tensor, name: str = "theta", seed: int = 0) -> None:
        self._starting, self._dtype = _Starting(), like.dtype
        self._run = self._starting(_as_model(prior, name, like))
        density = PyroDensity(self._only, (like,), {}, new_generator(seed))
        if density.observed_sites != (_NOTHING,):
            raise ModelError(
                f"the prior observes site {density.observed_sites[0]!r}; what is learnt from data belongs into the loss"
            )
        self._density = density
        self.dim, self.sites = density.dim, density.sites
        self.improper = density.improper_sites

    @property
    def is_proper(self) -> bool:
        """Whether the density integrates to one."""
        return not self.improper

    def model(self) -> tuple[Any, Drawn]:
        """Run the prior as a Pyro model; return the parameter, and the values of latent sites that made it."""
        found = _Found()
        with found:
            parameter = self._run()
        return self._parameter(parameter, found.drawn.values), found.drawn

    def of_values(self, values: dict[str, Tensor]) -> Any:
        """Return the parameter that these values of sites make, out of sight of the handlers around."""
        with pyro.poutine.block():
            return self._parameter(pyro.poutine.condition(self._run, data=values)(), values)

    def _parameter(self, returned: Any, values: dict[str, Any]) -> Any:
        if returned is None:
            returned = next(iter(values.values())) if len(values) == 1 else values
        return _cast(returned, self._dtype)

    def _only(self, like: Tensor) -> Any:
        parameter, _ = self.model()
        # A density needs something observed; this is certain.
        pyro.factor(_NOTHING, like.new_zeros(()))
        return parameter

    def parameter(self, u: Tensor) -> Any:
        """Return what the loss takes at one unconstrained vector ``(d,)``."""
        return self._density.returned(u)

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """Return the value of each site at one unconstrained vector ``(d,)``."""
        return self._density.values(u)

    def log_density(self, u: Tensor) -> Tensor:
        """Return the log density over unconstrained space at one vector ``(d,)``, Jacobian included."""
        return self._density.joint(u)[0]

    def start(self, num_vectors: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return unconstrained vectors ``(n, d)`` to start from: draws, where the prior is proper."""
        return self._density.prior_vectors(num_vectors, new_generator(seed, stream="starting points"), batched=False)


_NOTHING = "_nothing"


class Drawn(NamedTuple):
    """Values of the latent sites of one run of a prior, and how many of its own plates each stands in."""

    values: dict[str, Tensor]
    event_dims: dict[str, int]

    def particles(self, sites: tuple[Site, ...]) -> tuple[torch.Size, dict[str, Tensor]] | None:
        """Return the shape of a batch of runs that objectives make in one, and each site's values, ``(P, ...)``.

        Nothing, where this is a single run.
        """
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
    """Return the value of each run, ``(P, *shape)``; a site's own plates stand at the right end of the batch."""
    left = batch[: len(batch) - plates]
    value = value.reshape(*[1] * (len(left) + len(shape) - value.dim()), *value.shape)
    return value.expand(*left, *shape).reshape(-1, *shape)


class _Found(Messenger):
    """Note the values of latent sites."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = Drawn({}, {})

    def _pyro_post_sample(self, message: Any) -> None:
        infer = message["infer"]
        if infer.get("_deterministic") or infer.get("enumerate") == "parallel":
            return  # what is summed out has no value that a loss could take
        if isinstance(message["fn"], dist.torch_distribution.TorchDistributionMixin):
            self.drawn.values[message["name"]] = message["value"]
            self.drawn.event_dims[message["name"]] = message["fn"].event_dim


def _cast(parameter: Any, dtype: torch.dtype) -> Any:
    """Give a parameter the dtype of the data: guides that were made before them may have another."""
    if isinstance(parameter, Tensor):
        return parameter.to(dtype) if parameter.is_floating_point() else parameter
    return {k: _cast(v, dtype) for k, v in parameter.items()} if isinstance(parameter, dict) else parameter


def _as_model(prior: Any, name: str, like: Tensor) -> Callable[[], Any]:
    if isinstance(prior, torch.distributions.Distribution):
        if not isinstance(prior, dist.torch_distribution.TorchDistributionMixin):
            raise ModelError(
                f"the prior {type(prior).__name__} is torch's own; take the one of pyro.distributions, or write a model"
            )
        joint = prior.to_event(len(prior.batch_shape)) if prior.batch_shape else prior
        return partial(pyro.sample, name, _in_precision(joint, like.dtype))
    if not callable(prior):
        raise ModelError(f"the prior must be a distribution or a Pyro model without arguments, not {prior!r:.80}")
    return prior  # type: ignore[no-any-return]


def _in_precision(distribution: Any, dtype: torch.dtype) -> Any:
    """Return a distribution with parameters of another dtype: some of torch's cast values to that of theirs."""
    if isinstance(distribution, Flat):
        return distribution
    result = copy.copy(distribution)
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            vars(result)[name] = value.to(dtype)
        elif isinstance(value, torch.distributions.Distribution):
            vars(result)[name] = _in_precision(value, dtype)
    return result


# Directions in which an improper prior is flat and the loss does not grow.

_STARTS = 3
_RANDOM = 16  # random directions
_AXES = 32  # at most so many coordinates are followed
_MOST_COEFFICIENTS = 64  # of which a combination without any effect is looked for
_SLOWEST = 0.5  # mass along a ray is finite only where the density falls faster than distance ** -1

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``(m, d)`` -> log prior and minus the weighted loss, ``(m,)`` each."""


def direction_of_recession(joint: Joint, prior: Prior, largest: float, seed: int) -> Tensor | None:
    """Return a direction ``(d,)`` of improper coordinates in which the posterior has infinite mass, if one is found."""
    # ``largest`` is the largest absolute value among the data, in units of which far points are far.
    search = _Search(joint, prior, max(1.0, largest), seed)
    with one_thread(), validation_kept(), torch.inference_mode(False), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)  # far away, nothing is valid
        try:
            # Either the density does not fall along a ray, as where a pooling bounds the loss; or the loss does not
            # depend on a combination of coefficients, as of collinear covariates. Both hold in a neighbourhood of
            # the points, so the mass is infinite. Narrower regions are left to propriety_check.
            found = search.bounded_ray()
            found = search.without_effect() if found is None else found
        except (RuntimeError, ValueError, ArithmeticError):
            return None  # a loss that fails so far away tells nothing
    return None if found is None else found / found.norm()


class _Search:
    """Points to start from, and how far is far in each coordinate."""

    def __init__(self, joint: Joint, prior: Prior, largest: float, seed: int) -> None:
        self.joint, self.largest = joint, largest
        self.points = prior.start(_STARTS + min(prior.dim, _MOST_COEFFICIENTS) + 8, seed)
        self.generator = new_generator(seed, stream="recession")
        improper = torch.zeros_like(self.points[0], dtype=torch.bool)
        curved = torch.zeros_like(improper)
        values = prior.values(self.points[0])
        for site in prior.sites:
            own = slice(site.start, site.stop)
            improper[own] = site.name in prior.improper
            curved[own] = not torch.equal(values[site.name].reshape(-1), self.points[0, own])
        self.free, self.curved = improper.nonzero()[:, 0], curved
        numbers = torch.finfo(self.points.dtype)
        self.precision = numbers.eps
        bend = math.log(numbers.max) / 2.4  # squares of its exponential do not overflow
        self.far = torch.full_like(self.points[0], largest * numbers.eps**-0.75).masked_fill(curved, bend / 2)
        self.farther = torch.full_like(self.points[0], largest * numbers.eps**-1.5).masked_fill(curved, bend)

    def bounded_ray(self) -> Tensor | None:
        """Return a direction along which the density does not fall, whatever the start."""
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
        """Return axes and random directions of the improper coordinates, each both ways, ``(m, d)``."""
        axes = torch.eye(len(self.curved)).to(self.points)[self.free[:_AXES]]
        shape = (_RANDOM if len(self.free) > 1 else 0, len(self.free))
        random = axes.new_zeros(shape[0], len(self.curved))
        random[:, self.free] = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(random)
        both = torch.cat([axes, random / random.abs().amax(-1, keepdim=True)])
        return torch.cat([both, -both])

    def without_effect(self) -> Tensor | None:
        """Return a combination of unconstrained coefficients that changes nothing."""
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
        # What is left of a combination that cancels is rounding, out of what others change.
        limit = math.sqrt(self.precision) * usual.median(-1, keepdim=True).values
        found = ((changed <= limit) & limit.isfinite()).all(0).nonzero()[:, 0]
        return candidates[found[0]] if len(found) else None

    def _null_space(self, free: Tensor) -> Tensor:
        """Return vectors ``(k, len(free))`` orthogonal to the loss's gradients at all points."""
        points = self.points.clone()
        points[::2, free] *= self.largest  # among the data, too, so that absolute errors have both signs
        with torch.enable_grad():
            points.requires_grad_()
            (slopes,) = torch.autograd.grad(self.joint(points)[1].sum(), points)
        slopes = slopes[:, free]
        slopes = slopes[slopes.isfinite().all(-1)]
        tiny = torch.finfo(slopes.dtype).tiny
        slopes = slopes / slopes.norm(dim=-1, keepdim=True).clamp_min(tiny)
        # The scale of a covariate is no sign of collinearity.
        scale = slopes.norm(dim=0)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        padded = torch.cat([slopes / scale, torch.zeros(len(free), len(free)).to(slopes)])
        _, size, rows = torch.linalg.svd(padded, full_matrices=False)
        null = rows[size <= self.precision**0.6 * size[0]] / scale
        return null / null.abs().amax(-1, keepdim=True)
