"""Models of NumPyro as densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property, partial
from inspect import signature
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from bayeskit._core.functions_of_users import words_of
from bayeskit._core.inputs import warn_user
from bayeskit._logdensity.foreign_density import ForeignDensity, kept_inside
from bayeskit._logdensity.jax_functions import JaxDensity, JaxFunction, double_precision, seeds
from bayeskit._logdensity.pyro_density import Site
from bayeskit.errors import (
    BayeskitError,
    DataError,
    DataWarning,
    ModelError,
    PrecisionWarning,
    ShapeError,
    UnsupportedSiteError,
)

#: What funsor puts before the names of the first sites of a loop.
_BEFORE = "_PREV_"


class NumPyroDensity(ForeignDensity):
    """A NumPyro model with its arguments, run by NumPyro's own handlers and compiled by JAX."""

    package = "NumPyro"

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> None:
        self.model = model
        self.args, self.kwargs = (_converted(x) for x in (args, dict(kwargs)))
        with double_precision():
            trace = self._run(seed)
            sites = [x for x in trace.values() if x["type"] == "sample"]
            _refuse(trace)
            latent = [x for x in sites if not x["is_observed"] and not _is_discrete(x["fn"])]
            #: Discrete sites, which are summed out.
            self.summed_sites = tuple(x["name"] for x in sites if not x["is_observed"] and _is_discrete(x["fn"]))
            if not latent:
                raise ModelError("the model has no continuous latent site, so there is nothing to sample")
            observed = [x for x in sites if x["is_observed"]]
            factors = tuple(x["name"] for x in observed if _is_factor(x))
            data = {x["name"]: _tensor(x["value"]) for x in observed if not _is_factor(x)}
            self._deterministic = tuple(x["name"] for x in trace.values() if x["type"] == "deterministic")
            layout, start = [], 0
            for x in latent:
                shape, flat = _shapes(x)
                layout.append(Site(x["name"], shape, flat, start, start + flat.numel()))
                start += flat.numel()
            counted = {x["name"]: _counted(x) for x in observed if not _is_factor(x)}
            improper = tuple(x["name"] for x in latent if type(_base(x["fn"])).__name__ == "ImproperUniform")
            dimensions = {x["name"]: _plates(x) for x in trace.values() if x["type"] in ("sample", "deterministic")}
        _check_data(data)
        constant = {name: x for name, x in self._arguments().items() if name not in data}
        dimensions |= {name: (None,) * x.dim() for name, x in constant.items()}
        super().__init__(tuple(layout), data, constant, dimensions, {}, improper)
        self.factor_sites = factors
        if scaled := [x["name"] for x in observed if x["scale"] is not None and not _is_factor(x)]:
            self.no_pointwise = (
                f"{', '.join(map(repr, scaled))} is scaled, so its terms are powers of predictive densities; repeat "
                "observations that occur more than once"
            )
        if not data and not factors and (given := [name for name, x in constant.items() if x.is_floating_point()]):
            warn_user(
                f"the model has no observed site, so its posterior is its prior; if {', '.join(map(repr, given))} are "
                "data, pass them as the argument that obs= takes",
                DataWarning,
            )
        if any(x.dtype == torch.float32 for x in data.values()):
            warn_user(_SINGLE, PrecisionWarning)
        self.counted = {name: x for name, x in counted.items() if x is not None}
        self._max_plate_nesting = max((-f.dim for x in sites for f in x["cond_indep_stack"]), default=0)
        if self.summed_sites:
            self._refuse_dependent_sites()

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays of JAX in the model would be read again in single precision elsewhere.
        return _restored, (cloudpickle.dumps(self.__getstate__()),)

    # -- the model --------------------------------------------------------------------------

    def _run(self, seed: int) -> dict[str, Any]:
        """Return a trace of the model at a fixed unconstrained vector, and at draws of discrete sites."""
        import jax
        from numpyro import handlers

        drawn = handlers.substitute(self.model, substitute_fn=_at_a_fixed_point)

        def run() -> dict[str, Any]:
            trace = handlers.trace(handlers.seed(drawn, jax.random.PRNGKey(seed)))
            return dict(trace.get_trace(*self.args, **self.kwargs))

        try:
            return run()
        except BayeskitError:
            raise
        except Exception as error:
            remedy = ""
            with suppress(Exception), jax.enable_x64(False):
                run()
                remedy = (
                    ". It runs in single precision, but not in double, in which densities are computed: write "
                    "dtype=int and dtype=float for numbers of 32 bits, such as jnp.int32"
                )
            raise ModelError(f"running the NumPyro model once failed: {words_of(error)}{remedy}") from error

    def _parts(self, u: Any) -> dict[str, Any]:
        return {s.name: u[s.start : s.stop].reshape(s.unconstrained_shape) for s in self.sites}

    def _at(self, u: Any, seed: int = 0) -> Callable[..., Any]:
        """Return the model at an unconstrained vector ``(d,)``; what is drawn there depends on a seed."""
        from numpyro import handlers

        return handlers.seed(handlers.substitute(self.model, substitute_fn=partial(_constrained, self._parts(u))), seed)

    def _trace(self, u: Any, seed: int = 0) -> dict[str, Any]:
        from numpyro import handlers

        return handlers.trace(self._at(u, seed)).get_trace(*self.args, **self.kwargs)

    def _joint(self, u: Any) -> tuple[Any, Any]:
        """Return log prior and log likelihood of one vector, within JAX."""
        trace = self._trace(u)
        of_values, jacobian = self._of_values(trace), _log_jacobian(trace, self._parts(u))
        if self.summed_sites:
            return of_values + jacobian, self._summed(u) - of_values
        observed = (_log_prob(trace[n]).sum() for n in (*self.observed_sites, *self.factor_sites))
        return of_values + jacobian, sum(observed, 0.0)

    def _of_values(self, trace: Mapping[str, Any]) -> Any:
        """Return the log prior density of the values of the sites."""
        return sum(_log_prob(_without_obs_mask(trace, site.name)).sum() for site in self.sites)

    def _summed(self, u: Any) -> Any:
        """Return the log density of values and data, with discrete sites summed out by funsor."""
        from numpyro.contrib.funsor import config_enumerate, enum
        from numpyro.contrib.funsor.infer_util import log_density

        model = enum(config_enumerate(self._at(u)), -self._max_plate_nesting - 1)
        return log_density(model, self.args, self.kwargs, {})[0]

    def _refuse_dependent_sites(self) -> None:
        """Raise ``UnsupportedSiteError`` if a latent site depends on one that is summed out."""
        from jax import numpy as jnp
        from numpyro.contrib.funsor import config_enumerate, enum
        from numpyro.contrib.funsor.infer_util import log_density

        with double_precision():
            model = enum(config_enumerate(self._at(jnp.zeros(self.dim))), -self._max_plate_nesting - 1)
            _, trace = log_density(model, self.args, self.kwargs, {})
            own = {n: x for n, x in trace.items() if n.replace(_BEFORE, "") in {site.name for site in self.sites}}
            sizes = {name: np.size(site["fn"].log_prob(site["value"])) for name, site in own.items()}
        for name, site in own.items():
            batch = np.shape(site["value"])[: np.ndim(site["value"]) - site["fn"].event_dim]
            if sizes[name] > math.prod(batch):  # a density for each value of the discrete site
                raise UnsupportedSiteError(
                    f"site {name.replace(_BEFORE, '')!r} depends on {', '.join(map(repr, self.summed_sites))}, which "
                    "is summed out, so that it has no prior of its own; let data alone depend on discrete sites"
                )

    @cached_property
    def functions(self) -> JaxDensity:
        """The density, compiled by JAX."""
        return JaxDensity(self._joint)

    @cached_property
    def _values(self) -> JaxFunction:
        names = [site.name for site in self.sites]

        def of_one(u: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            trace = self._trace(u)
            return {n: trace[n]["value"] for n in names}, {n: trace[n]["value"] for n in self._deterministic}

        return JaxFunction(of_one)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites, ``(n, *shape)``, and of deterministic ones."""
        latent, more = self._values(u)
        return latent | more if deterministic and not self.summed_sites else latent

    @cached_property
    def _log_jacobian(self) -> JaxFunction:
        return JaxFunction(lambda u: _log_jacobian(self._trace(u), self._parts(u)))

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained|, ``(n,)``."""
        return self._log_jacobian(u)

    @cached_property
    def _pointwise(self) -> JaxFunction:
        def of_one(u: Any) -> dict[str, Any]:
            trace = self._trace(u)
            return {name: _log_prob(trace[name]) for name in (*self.observed_sites, *self.factor_sites)}

        return JaxFunction(of_one)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation, ``(n, *shape)`` by observed site."""
        if self.summed_sites:
            raise ModelError(
                f"{self.summed_sites[0]!r} is summed out by funsor, which gives no terms of single observations; write "
                "the sum as a mixture distribution"
            )
        return self._pointwise(u)

    # -- drawing ----------------------------------------------------------------------------

    @cached_property
    def _prior(self) -> JaxFunction:
        from jax import numpy as jnp
        from jax.random import PRNGKey
        from numpyro import handlers
        from numpyro.distributions import biject_to

        def of_one(seed: Any) -> Any:
            trace = handlers.trace(handlers.seed(self.model, PRNGKey(seed))).get_trace(*self.args, **self.kwargs)
            parts = (biject_to(trace[s.name]["fn"].support).inv(trace[s.name]["value"]) for s in self.sites)
            return jnp.concatenate([part.reshape(-1) for part in parts])

        return JaxFunction(of_one, is_rare=True)

    def prior_draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Return vectors drawn from the prior, ``(num_draws, d)``."""
        self.require_prior_draws()
        return kept_inside(self._prior(seeds(num_draws, generator)))

    def predictive(
        self,
        u: Tensor,
        generator: torch.Generator,
        redraw: Collection[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Draw data at each vector, ``(n, *shape)`` by site, for other arguments where there are any."""
        import jax
        from jax.random import PRNGKey
        from numpyro import handlers

        other = bool(args or kwargs)
        args, kwargs = (_converted(args), _converted(dict(kwargs))) if other else (self.args, self.kwargs)
        given = {name: x for name, x in self.values(u).items() if name not in redraw}

        def run(seed: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            model = handlers.seed(_Unobserved(handlers.substitute(self.model, data=given)), PRNGKey(seed))
            return handlers.trace(model).get_trace(*args, **kwargs)

        def of_one(seed: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            trace = run(seed, given)
            drawn = ("sample", "deterministic") if other else ("sample",)
            return {
                name: x["value"]
                for name, x in trace.items()
                if x["type"] in drawn and name not in given and not (x["type"] == "sample" and _is_factor(x))
            }

        names = list(given)

        def shapes(seed: Any) -> dict[str, Any]:
            return {name: x["value"] for name, x in run(seed, {}).items() if name in given}

        def of_rows(seed: Any, *each: Any) -> dict[str, Any]:
            return of_one(seed, dict(zip(names, each, strict=True)))

        try:
            with double_precision():
                found = {name: x.shape for name, x in jax.eval_shape(shapes, 0).items()} if other else {}
            for site in self.sites:
                if (shape := found.get(site.name, site.shape)) != site.shape:
                    raise ShapeError(
                        f"with these arguments site {site.name!r} has shape {tuple(shape)}, and its draws have "
                        f"{tuple(site.shape)}; pass redraw=[{site.name!r}] to draw it anew"
                    )
            return JaxFunction(of_rows, is_rare=True)(seeds(len(u), generator), *given.values())
        except BayeskitError:
            raise
        except Exception as error:
            raise ModelError(f"the model fails with these arguments: {words_of(error)}") from error

    def vectors(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of values ``(n, *shape)``; DataError for values outside the support."""
        names = [site.name for site in self.sites]
        found, inside = self._vectors(*(values[name].to(torch.float64) for name in names))
        for name, fine in zip(names, inside.unbind(-1), strict=True):
            if not bool(fine.all()):
                raise DataError(f"{int((~fine).sum())} values of site {name!r} lie outside of its support")
        self.require_inside(values, found)
        return found

    @cached_property
    def _vectors(self) -> JaxFunction:
        from jax import numpy as jnp
        from numpyro import handlers
        from numpyro.distributions import biject_to

        names = [site.name for site in self.sites]

        def of_one(*each: Any) -> tuple[Any, Any]:
            given = dict(zip(names, each, strict=True))
            model = handlers.seed(handlers.substitute(self.model, data=given), 0)
            trace = handlers.trace(model).get_trace(*self.args, **self.kwargs)
            parts = [biject_to(trace[n]["fn"].support).inv(given[n]).reshape(-1) for n in names]
            inside = [jnp.all(trace[n]["fn"].support(given[n])) for n in names]
            return jnp.concatenate(parts), jnp.stack(inside)

        return JaxFunction(of_one)

    def _arguments(self) -> dict[str, Tensor]:
        """Return the arrays of numbers among the arguments, by name."""
        try:
            given = signature(self.model).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            given = {f"argument_{i}": x for i, x in enumerate(self.args)} | dict(self.kwargs)
        return {name: _tensor(x) for name, x in given.items() if hasattr(x, "shape") and hasattr(x, "dtype")}


def _restored(state: bytes) -> NumPyroDensity:
    """Return a density in another process."""
    density = object.__new__(NumPyroDensity)
    with double_precision():
        density.__dict__ |= cloudpickle.loads(state)
    return density


# Sites of NumPyro.


def _constrained(parts: Mapping[str, Any], site: Mapping[str, Any]) -> Any:
    """Return the value of a latent site at its unconstrained part."""
    from numpyro.distributions import biject_to

    if site["type"] != "sample" or site["name"] not in parts:
        return None
    part, fn = parts[site["name"]], site["fn"]
    transform = biject_to(fn.support)
    step = site["infer"].get("_scan_current_index")
    if step is not None and part.ndim > len(fn.shape()) - transform.codomain.event_dim + transform.domain.event_dim:
        part = part[step]  # of a loop over time, which takes its elements one by one
    return transform(part)


def _at_a_fixed_point(site: Mapping[str, Any]) -> Any:
    """Return a value of a continuous latent site, which takes less than a draw of it.

    No coordinate is zero, because the model may use it as a scale.
    """
    from jax import numpy as jnp
    from numpyro.distributions import biject_to

    if site["type"] != "sample" or site["is_observed"] or _is_discrete(site["fn"]):
        return None
    try:
        transform = biject_to(site["fn"].support)
    except NotImplementedError as error:
        raise UnsupportedSiteError(
            f"site {site['name']!r} has the support {site['fn'].support}, for which NumPyro has no bijection"
        ) from error
    return transform(jnp.full(transform.inverse_shape(site["fn"].shape()), 0.5))


def _log_jacobian(trace: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the sum of the log Jacobians of the latent sites."""
    from numpyro.distributions import biject_to

    return sum(
        biject_to(trace[name]["fn"].support).log_abs_det_jacobian(part, trace[name]["value"]).sum()
        for name, part in parts.items()
    )


def _without_obs_mask(trace: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a site, without its mask if NumPyro has made it for data that are missing by ``obs_mask``.

    It masks the rows that are observed, so that their values here would have no density.
    """
    site = trace[name]
    stem = name.removesuffix("_unobserved")
    if stem == name or f"{stem}_observed" not in trace or type(site["fn"]).__name__ != "MaskedDistribution":
        return site
    return {**site, "fn": site["fn"].base_dist}


def _log_prob(site: Mapping[str, Any]) -> Any:
    """Return the log density of a site, ``(*batch)``, as its scale counts it."""
    more = (site["intermediates"],) if site["intermediates"] else ()
    found = site["fn"].log_prob(site["value"], *more)
    return found if site["scale"] is None else site["scale"] * found


def _base(fn: Any) -> Any:
    """Return the distribution without its expansions, masks and event dimensions."""
    while hasattr(fn, "base_dist") and type(fn).__name__ in (
        "ExpandedDistribution",
        "Independent",
        "MaskedDistribution",
    ):
        fn = fn.base_dist
    return fn


def _is_factor(site: Mapping[str, Any]) -> bool:
    return type(_base(site["fn"])).__name__ == "Unit"


def _is_discrete(fn: Any) -> bool:
    return bool(fn.support.is_discrete)


def _refuse(trace: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedSiteError`` for sites that a target cannot have."""
    for name, site in trace.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise UnsupportedSiteError(
                f"plate {name!r} draws {site['args'][1]} of {site['args'][0]} rows anew in each run; give it all rows, "
                "without subsample_size"
            )
        if site["type"] == "param":
            raise UnsupportedSiteError(
                f"{name!r} is a parameter to be optimised; write its value in its place, or a prior"
            )
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if site["scale"] is not None:
            raise UnsupportedSiteError(
                f"site {name!r} is scaled, so that its prior does not integrate to one; take it out of handlers.scale"
            )
        if _counted(_without_obs_mask(trace, name)) is not None:
            raise UnsupportedSiteError(
                f"site {name!r} is not observed, and masked, so that it has no prior; for missing data pass the mask "
                "of those that are there to the site of the data, as obs_mask, which makes the others latent; for a "
                "flat prior write ImproperUniform; else leave out its rows, or mask the data alone"
            )
        if not _is_discrete(site["fn"]):
            continue
        if not site["fn"].has_enumerate_support:
            raise UnsupportedSiteError(
                f"site {name!r} is discrete, and its support is infinite; sum it out by hand, or truncate it"
            )
        try:
            import funsor  # noqa: F401
        except ImportError as error:
            raise UnsupportedSiteError(
                f"site {name!r} is discrete, and NumPyro sums it out by funsor: pip install funsor"
            ) from error


def _shapes(site: Mapping[str, Any]) -> tuple[torch.Size, torch.Size]:
    """Return the shape of a latent site, and of its unconstrained part."""
    from numpyro.distributions import biject_to

    shape = np.shape(site["value"])
    return torch.Size(shape), torch.Size(biject_to(site["fn"].support).inverse_shape(shape))


def _counted(site: Mapping[str, Any]) -> Tensor | None:
    """Return which data of a site a mask keeps, ``(*batch)``; None if it keeps all."""
    fn = site["fn"]
    mask = np.ones(fn.batch_shape, dtype=bool)
    while hasattr(fn, "base_dist"):
        if type(fn).__name__ == "MaskedDistribution":
            mask = mask & np.asarray(fn._mask, dtype=bool)
        fn = fn.base_dist
    return None if mask.all() else torch.from_numpy(np.asarray(mask))


def _plates(site: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the plate along each dimension of a site's value."""
    event = site["fn"].event_dim if site["type"] == "sample" else 0
    names: list[str | None] = [None] * np.ndim(site["value"])
    for frame in site.get("cond_indep_stack", ()):
        place = len(names) - event + frame.dim
        if 0 <= place < len(names) and names[place] is None:
            names[place] = frame.name
    return tuple(names)


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x))


_SINGLE = (
    "a number among the data has single precision, and is computed with in double precision; what rounding has taken "
    "from it is lost: pass arrays of float64"
)


def _converted(data: Any) -> Any:
    """Return arguments with tensors as arrays, and real numbers in double precision."""
    import jax
    from jax import numpy as jnp

    single = False

    def of(x: Any) -> Any:
        nonlocal single
        x = x.numpy(force=True) if isinstance(x, Tensor) else x
        if np.ma.is_masked(x):
            raise DataError("an array among the arguments is masked; pass its data, and the mask as obs_mask")
        if not isinstance(x, np.ndarray | jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        single = single or x.dtype == np.float32
        dtype = {"f": np.float64, "i": np.int64}.get(x.dtype.kind, x.dtype)
        return x.astype(dtype) if isinstance(x, np.ndarray) else jnp.asarray(x, dtype)

    with double_precision():
        found = jax.tree.map(of, data)
    if single:
        warn_user(_SINGLE, PrecisionWarning)
    return found


def _check_data(data: Mapping[str, Tensor]) -> None:
    for name, x in data.items():
        if x.is_floating_point() and bool(x.isnan().any()):
            raise DataError(f"observed site {name!r} holds {int(x.isnan().sum())} NaN; leave them out by obs_mask")


def _Unobserved(model: Callable[..., Any]) -> Any:
    """Return the model with its data drawn anew."""
    from numpyro.primitives import Messenger

    class Unobserved(Messenger):
        def process_message(self, msg: Any) -> None:
            if msg["type"] == "sample" and msg["is_observed"] and not _is_factor(msg):
                msg["value"], msg["is_observed"] = None, False

    return Unobserved(model)
