"""Targets in other coordinates: location-scale sites of a Pyro model, centred more or less at their parents' values.

A site ``x ~ location + scale * noise`` whose location or scale depends on other latent sites has, for each element, the
coordinate ``v`` with ``x = m + s**(1 - c) * (v - c * m)``: centred for ``c = 1``, non-centred for ``c = 0``. Under its
prior, ``v`` has location ``c * m`` and scale ``s**c`` (Gorinova, Moore and Hoffman 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as plain

from bayeskit._compiler import FailingApart
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import one_thread
from bayeskit._core.torch_internals import is_batched
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.pyro_density import Move, PyroDensity, Site
from bayeskit._logdensity.target import Target
from bayeskit.errors import SettingsError, ShapeError

#: Families whose unconstrained coordinate has a location and a scale; that of a log-normal site is its logarithm.
_FAMILIES = (
    plain.Normal,
    plain.StudentT,
    plain.Laplace,
    plain.Cauchy,
    plain.Gumbel,
    plain.LogNormal,
    dist.Logistic,
)
_WRAPPERS = (plain.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)


def _location_and_scale(fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """Return location and scale of the unconstrained coordinate of ``fn``, both of ``shape``; None if it has none."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    if not isinstance(fn, _FAMILIES):
        return None
    location, scale = torch.as_tensor(fn.loc), torch.as_tensor(fn.scale)
    try:
        # A summed-out site among the parents has a dimension of its own, which the site does not.
        return location.expand(shape), scale.expand(shape)
    except RuntimeError:
        return None


def location_scale_sites(target: Target) -> tuple[Site, ...]:
    """Return the location-scale sites of a target whose location or scale depends on other latent sites.

    Parameters
    ----------
    target : Target

    Returns
    -------
    tuple of Site
        Normal, log-normal, Student-t, Laplace, Cauchy, Gumbel and logistic sites, in model order. Empty for targets
        that are not made from a Pyro model, and for models that cannot be batched.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit._logdensity.centring import location_scale_sites
    >>> def model(y):
    ...     mean, scale = pyro.sample("mean", dist.Normal(0.0, 1.0)), pyro.sample("scale", dist.HalfNormal(1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         effect = pyro.sample("effect", dist.Normal(mean, scale))
    ...         pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> [site.name for site in location_scale_sites(bk.Target.from_pyro(model, torch.zeros(3)))]
    ['effect']
    """
    density = target.density
    if type(density) is not PyroDensity or target.loops:
        return ()
    found: set[str] = set()

    def look(name: str, fn: Any, x: Tensor) -> Tensor:
        parameters = _location_and_scale(fn, x.shape)
        # Under vmap all latent values are batched, and with them what depends on any of them.
        if parameters is not None and any(map(is_batched, parameters)):
            found.add(name)
        return x

    def run(u: Tensor) -> Tensor:
        density.run_moved(u, look)
        return u

    try:
        with process_state(), torch.no_grad():
            torch.func.vmap(run)(torch.zeros(2, target.dim, dtype=target.dtype, device=target.device))
    except UNTRACEABLE:
        return ()  # a model that fails at zero is sampled as it is
    return tuple(site for site in target.sites if site.name in found)


class Locations(NamedTuple):
    """Location and log scale of each coordinate given those of other sites; zero for coordinates that stay."""

    location: Tensor  # (*batch, d)
    log_scale: Tensor  # (*batch, d)


class Original(NamedTuple):
    """Points in the coordinates of the original target."""

    position: Tensor  # (*batch, d)
    log_jacobian: Tensor  # (*batch,), logarithm of |d original / d new|


class PartlyCentred:
    """The density of a Pyro model in coordinates of which some are partly centred.

    Parameters
    ----------
    density : PyroDensity
    centredness : Tensor
        ``c`` of each coordinate, ``(d,)``, one for those that stay.
    """

    def __init__(self, density: PyroDensity, centredness: Tensor) -> None:
        self.original, self.centredness = density, centredness
        self.sites, self.dim = density.sites, density.dim
        self.dtype, self.device = density.dtype, density.device
        self.data = [*density.data, centredness]
        self._moved = {
            site.name: centredness[site.start : site.stop].reshape(site.unconstrained_shape)
            for site in density.sites
            if bool((centredness[site.start : site.stop] != 1).any())
        }

    def _move(self, log_jacobian: list[Tensor], places: list[Tensor] | None = None) -> Move:
        """Return the move to original coordinates, which notes its Jacobian and where it arrives."""

        def move(name: str, fn: Any, v: Tensor) -> Tensor:
            x = v
            if name in self._moved:
                centred = self._moved[name]
                parameters = _location_and_scale(fn, v.shape)
                if parameters is None:
                    raise ShapeError(f"site {name!r} is no location-scale site of shape {tuple(v.shape)} in this run")
                location, scale = parameters
                log_stretch = (1 - centred) * scale.log()
                x = location + log_stretch.exp() * (v - centred * location)
                log_jacobian.append(log_stretch.sum())
            if places is not None:
                places.append(x.reshape(-1))
            return x

        return move

    def to_original(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the original coordinates ``(d,)`` of ``v`` ``(d,)`` and the log Jacobian ``()``."""
        log_jacobian, places = [v.new_zeros(())], list[Tensor]()
        self.original.run_moved(v, self._move(log_jacobian, places))
        return torch.cat(places), torch.stack(log_jacobian).sum()

    def joint(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior, Jacobian included, and log likelihood at one vector ``v`` ``(d,)``."""
        log_jacobian = [v.new_zeros(())]
        log_prior, log_likelihood = self.original.joint_moved(v, self._move(log_jacobian))
        return log_prior + sum(log_jacobian[1:], log_jacobian[0]), log_likelihood

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites at ``u`` in the new coordinates, ``(d,)``."""
        return self.original.values(self.to_original(u)[0], deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the new coordinates of the values of the sites."""
        u = self.original.vector(values)
        return _to_new(u, _locations(self.original, u), self.centredness)

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d new| at one vector ``u`` in the new coordinates."""
        original, log_jacobian = self.to_original(u)
        return self.original.log_jacobian(original) + log_jacobian

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation at one vector ``u`` in the new coordinates."""
        return self.original.pointwise(self.to_original(u)[0])


def _locations(density: PyroDensity, u: Tensor) -> Locations:
    """Return location and log scale of all location-scale coordinates at one vector ``u`` ``(d,)``."""
    locations, scales = list[Tensor](), list[Tensor]()

    def look(name: str, fn: Any, x: Tensor) -> Tensor:
        parameters = _location_and_scale(fn, x.shape)
        location, scale = (torch.zeros_like(x), torch.ones_like(x)) if parameters is None else parameters
        locations.append(location.reshape(-1).to(x))
        scales.append(scale.reshape(-1).to(x))
        return x

    density.run_moved(u, look)
    return Locations(torch.cat(locations), torch.cat(scales).log())


def _to_new(u: Tensor, at: Locations, centredness: Tensor) -> Tensor:
    # With c = 1 exactly u, whatever the scale.
    moved = centredness * at.location + (u - at.location) * ((centredness - 1) * at.log_scale).exp()
    return torch.where(centredness == 1, u, moved)


class Recentred:
    """A target in coordinates that are centred by ``centredness``, and the maps between both.

    Parameters
    ----------
    target : Target
        Made from a Pyro model.
    centredness : Tensor
        Numbers in [0, 1], ``(d,)``: one for coordinates that stay. Others than one are possible in the slices of
        :func:`location_scale_sites`.

    Attributes
    ----------
    target : Target
        The density over the new coordinates; its log prior has the Jacobian of the change.
    centredness : Tensor

    References
    ----------
    Gorinova, M. I., Moore, D., Hoffman, M. D. (2020). Automatic reparameterisation of probabilistic programs. ICML,
    PMLR 119, 3648-3657.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit._logdensity.centring import Recentred
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     effect = pyro.sample("effect", dist.Normal(0.0, scale))
    ...     pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor(0.5, dtype=torch.float64))
    >>> recentred = Recentred(target, torch.tensor([1.0, 0.0], dtype=torch.float64))
    >>> u = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    >>> v = recentred.from_original(u)
    >>> v
    tensor([[2.0000, 0.4060]], dtype=torch.float64)
    >>> original, log_jacobian = recentred.to_original(v)
    >>> bool(torch.allclose(recentred.target.log_density(v), target.log_density(original) + log_jacobian))
    True
    """

    def __init__(self, target: Target, centredness: Tensor) -> None:
        if centredness.shape != (target.dim,):
            raise ShapeError(f"centredness must have shape ({target.dim},), not {tuple(centredness.shape)}")
        self._original = target
        self.centredness = centredness.to(target.device, target.dtype)
        self._density = PartlyCentred(_pyro_density(target), self.centredness)
        sample = self._sample_prior if target.can_sample_prior else None
        self.target = Target(self._density, compile=target.compile, sample_prior=sample)

    def _sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        return self.from_original(self._original.sample_prior(num_draws, seed=generator))

    def to_original(self, v: Tensor) -> Original:
        """Return the original coordinates of points, ``(*batch, d)``, and the log Jacobian of the map."""
        return Original(*_mapped(self._density.to_original, v, self._original))

    def from_original(self, u: Tensor) -> Tensor:
        """Return the new coordinates of points, ``(*batch, d) -> (*batch, d)``."""
        return _to_new(u, locations(self._original, u), self.centredness)


def locations(target: Target, u: Tensor) -> Locations:
    """Return location and log scale of the location-scale coordinates of a target at points ``(*batch, d)``."""
    density = _pyro_density(target)
    return Locations(*_mapped(lambda row: tuple(_locations(density, row)), u, target))


def _pyro_density(target: Target) -> PyroDensity:
    if not isinstance(target.density, PyroDensity):
        raise SettingsError("only a target from a Pyro model has location-scale sites; use Target.from_pyro")
    return target.density


def _mapped(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, target: Target) -> tuple[Tensor, ...]:
    """Apply a function of one vector to all vectors ``(*batch, d)``, in chunks of bounded memory."""
    flat = x.reshape(-1, target.dim)
    chunk = max(1, min(len(flat), target.cost.chunk_size(len(flat))))
    with process_state(), one_thread(), torch.no_grad():
        parts = [_batched(function, rows) for rows in flat.split(chunk)]
    return tuple(torch.cat(part).reshape(x.shape[:-1] + part[0].shape[1:]) for part in zip(*parts, strict=True))


def _batched(function: Callable[[Tensor], tuple[Tensor, ...]], rows: Tensor) -> tuple[Tensor, ...]:
    try:
        return torch.func.vmap(function)(rows)  # type: ignore[no-any-return]
    except torch.linalg.LinAlgError:
        with FailingApart():  # one matrix that cannot be factorised leaves the others as they are
            return torch.func.vmap(function)(rows)  # type: ignore[no-any-return]
