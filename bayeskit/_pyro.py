"""The one adapter that reads Pyro models; nothing outside this file sees a Pyro trace.

The model is run under one messenger that supplies every continuous latent
site's value from a slice of the unconstrained vector and records each site's
log probability. No trace is built, and the run is a pure function of the
vector, so ``torch.func.vmap`` and ``make_fx`` can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._enumeration import Factor, Label, eliminate, sum_product
from bayeskit._torch import defaults, global_stream
from bayeskit._transforms import bijection
from bayeskit.errors import DataError, ModelError, ShapeError, UnsupportedSiteError


@dataclass(frozen=True)
class Site:
    """A continuous latent site and its slice ``[start, stop)`` of the unconstrained vector."""

    name: str
    shape: torch.Size
    unconstrained_shape: torch.Size
    start: int
    stop: int


@dataclass
class Record:
    """What one run of the model says of one site."""

    name: str
    kind: str  # "latent", "observed", "enumerated" or "deterministic"
    value: Tensor
    log_prob: Tensor | None
    plates: tuple[Any, ...]
    dim_to_id: dict[int, int]
    variable: int | None


Supply = Callable[[str, Any], tuple[Tensor, Tensor | None]]


class _Reader(Messenger):
    """Supply latent values, record log probabilities."""

    def __init__(self, supply: Supply) -> None:
        super().__init__()
        self.supply = supply
        self.records: dict[str, Record] = {}
        self.jacobian: dict[str, Tensor | None] = {}
        self.last: str | None = None

    def _pyro_sample(self, msg: Any) -> None:
        self.last = msg["name"]
        if isinstance(msg["fn"], _Subsample):
            if msg["fn"].subsample_size is not None and msg["fn"].subsample_size < msg["fn"].size:
                raise ModelError(
                    f"plate {msg['name']!r} subsamples its data, so the density is random; "
                    "build the target from the full data"
                )
            return
        if _is_enumerated(msg) and not msg["fn"].has_enumerate_support:
            raise UnsupportedSiteError(
                f"site {msg['name']!r} is marked for enumeration, but its support is infinite; "
                "use a distribution with finite support"
            )
        if msg["done"] or msg["is_observed"] or _is_enumerated(msg):
            return
        msg["value"], self.jacobian[msg["name"]] = self.supply(msg["name"], msg["fn"])
        msg["done"] = True

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            return
        name, fn, value, infer = msg["name"], msg["fn"], msg["value"], msg["infer"]
        if name in self.records:
            raise ModelError(f"two sites are named {name!r}; give each its own name")
        plates = tuple(f for f in msg["cond_indep_stack"] if f.vectorized)
        log_prob: Tensor | None = None
        if infer.get("_deterministic"):
            kind = "deterministic"
        else:
            kind = (
                "observed" if msg["is_observed"] else "enumerated" if _is_enumerated(msg) else "latent"
            )
            log_prob = scale_and_mask(fn.log_prob(value), msg["scale"], msg["mask"])
            jacobian = self.jacobian.get(name)
            if jacobian is not None:
                log_prob = log_prob + jacobian
        dim_to_id = dict(infer.get("_dim_to_id", {}))
        dim = infer.get("_enumerate_dim")
        variable = None if dim is None else dim_to_id[dim]
        self.records[name] = Record(name, kind, value, log_prob, plates, dim_to_id, variable)


def _is_enumerated(msg: Any) -> bool:
    return msg["infer"].get("enumerate") == "parallel" and not msg["is_observed"]


class PyroDensity:
    """A Pyro model with its arguments, read as a density over one unconstrained vector.

    Every method takes and returns single (unbatched) vectors.
    """

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator
    ) -> None:
        if not callable(model):
            raise ModelError(
                f"a Pyro model is a callable that calls pyro.sample; got {type(model).__name__}. "
                "For plain densities use Target.from_functions"
            )
        self._model, self._args, self._kwargs = model, args, kwargs
        self.dtype, self.device = _dtype_and_device((model, args, kwargs))
        self._first_available_dim: int | None = None
        self._enumerates = False
        records, supports = self._prototype(generator)
        observed = {n: r for n, r in records.items() if r.kind == "observed"}
        dtype, device = _dtype_and_device([r.value for r in observed.values()], self.dtype, self.device)
        if (dtype, device) != (self.dtype, self.device):
            # The data are in the model's closure: now that they are seen, constants follow them too.
            self.dtype, self.device = dtype, device
            records, supports = self._prototype(generator)
        self._check(records)
        depth = max((-f.dim for r in records.values() for f in r.plates), default=0)
        self._enumerates = any(r.kind == "enumerated" for r in records.values())
        self._first_available_dim = -1 - depth
        self.observed_sites = tuple(observed)
        self.deterministic_sites = tuple(n for n, r in records.items() if r.kind == "deterministic")
        self.sites = self._layout(records, supports)
        self.dim = self.sites[-1].stop if self.sites else 0
        if self.dim == 0:
            raise ModelError("the model has no continuous latent site, so there is nothing to sample")
        self._by_name = {s.name: s for s in self.sites}

    # -- building ---------------------------------------------------------------------------

    def _prototype(self, generator: torch.Generator) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model once as the user would, validation on, so that errors can name the site."""
        supports: dict[str, Any] = {}

        def draw(name: str, fn: Any) -> tuple[Tensor, None]:
            supports[name] = fn.support
            return fn.sample(), None

        reader = _Reader(draw)
        try:
            with global_stream(generator), pyro.validation_enabled(True), self._defaults(), reader:
                self._model(*self._args, **self._kwargs)
        except ModelError:
            raise
        except (ValueError, RuntimeError, TypeError, IndexError, NotImplementedError) as error:
            if isinstance(error, DataError):
                raise
            self._explain_nan(reader.records)
            place = "before its first site" if reader.last is None else f"at or after site {reader.last!r}"
            raise ModelError(f"running the model once failed {place}: {error}") from error
        return reader.records, supports

    def _check(self, records: dict[str, Record]) -> None:
        if not records:
            raise ModelError(
                "calling the model reached no pyro.sample statement; is it a Pyro model? "
                "For plain densities use Target.from_functions"
            )
        if not self._observed_factors(records):
            raise ModelError(
                "the model has no observed site and no pyro.factor, so its likelihood is empty; "
                "pass obs=data to at least one pyro.sample"
            )
        self._explain_nan(records)
        for record in records.values():
            if record.kind == "observed" and record.log_prob is not None and record.log_prob.isnan().any():
                self._explain_nan_arguments()

    @staticmethod
    def _observed_factors(records: dict[str, Record]) -> list[Record]:
        return [r for r in records.values() if r.kind == "observed"]

    def _explain_nan(self, records: dict[str, Record]) -> None:
        for record in records.values():
            if record.kind == "observed" and record.value.is_floating_point():
                masked = record.log_prob is not None and bool(torch.isfinite(record.log_prob).all())
                bad = record.value.isnan()
                if bad.any() and not masked:
                    first = tuple(bad.nonzero()[0].tolist())
                    raise DataError(
                        f"observed site {record.name!r} holds {int(bad.sum())} NaN, the first at index {first}; "
                        "drop or impute missing data, or mask them with poutine.mask"
                    )
        self._explain_nan_arguments()

    def _explain_nan_arguments(self) -> None:
        named = [(f"argument {i}", a) for i, a in enumerate(self._args)]
        named += [(f"argument {k!r}", a) for k, a in self._kwargs.items()]
        for label, value in named:
            if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
                first = tuple(value.isnan().nonzero()[0].tolist())
                raise DataError(
                    f"{label} of the model holds {int(value.isnan().sum())} NaN, the first at index {first}; "
                    "drop or impute missing data"
                )

    def _layout(self, records: dict[str, Record], supports: dict[str, Any]) -> tuple[Site, ...]:
        sites, start = [], 0
        for record in records.values():
            if record.kind != "latent":
                continue
            support = supports[record.name]
            if support.is_discrete:
                raise UnsupportedSiteError(
                    f"site {record.name!r} is discrete; mark it with "
                    'infer={"enumerate": "parallel"} to have it summed out'
                )
            try:
                transform = bijection(support)
                unconstrained = transform.inverse_shape(record.value.shape)
                transform.inv(record.value)
            except (NotImplementedError, KeyError) as error:
                raise UnsupportedSiteError(
                    f"site {record.name!r} has support {support}, for which no bijection from "
                    "unconstrained space is known; reparameterise it (pyro.infer.reparam) or move it "
                    "into a deterministic site"
                ) from error
            stop = start + prod(unconstrained)
            sites.append(Site(record.name, record.value.shape, torch.Size(unconstrained), start, stop))
            start = stop
        return tuple(sites)

    # -- running ----------------------------------------------------------------------------

    @contextmanager
    def _defaults(self) -> Iterator[None]:
        with defaults(self.dtype, self.device):
            yield

    def _run(self, supply: Supply, enumerate_sites: bool = True) -> dict[str, Record]:
        reader = _Reader(supply)
        with pyro.validation_enabled(False), self._defaults():
            enumerating = self._enumerates and enumerate_sites
            outer = EnumMessenger(first_available_dim=self._first_available_dim) if enumerating else nullcontext()
            with outer, reader:
                self._model(*self._args, **self._kwargs)
        return reader.records

    def _from_vector(self, u: Tensor) -> Supply:
        def supply(name: str, fn: Any) -> tuple[Tensor, Tensor]:
            site = self._site(name)
            transform = bijection(fn.support)
            x = u[site.start : site.stop].reshape(site.unconstrained_shape)
            value = transform(x)
            jacobian = transform.log_abs_det_jacobian(x, value)
            excess = jacobian.dim() - (len(site.shape) - fn.event_dim)
            if excess > 0:
                jacobian = jacobian.flatten(-excess).sum(-1)
            return value, jacobian

        return supply

    def _site(self, name: str) -> Site:
        try:
            return self._by_name[name]
        except KeyError:
            raise ModelError(
                f"site {name!r} appeared only in some runs of the model; the set of sites must not depend on values"
            ) from None

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(log_prior, log_likelihood)`` at one vector ``u`` of shape ``(dim,)``."""
        records = self._run(self._from_vector(u))
        if not self._enumerates:
            zero = u.new_zeros(())
            prior = sum((r.log_prob.sum() for r in records.values() if r.kind == "latent"), zero)  # type: ignore[union-attr]
            likelihood = sum((r.log_prob.sum() for r in records.values() if r.kind == "observed"), zero)  # type: ignore[union-attr]
            return prior, likelihood
        factors, home, names = self._factors(records)
        prior_factors = [f for kind, f in factors if kind == "latent"]
        if any(f.variables for f in prior_factors):
            # A continuous site depends on a discrete one: the prior is itself a sum.
            prior = sum_product([f for kind, f in factors if kind != "observed"], home, names)
            total = sum_product([f for _, f in factors], home, names)
            return prior, total - prior
        prior = sum((f.tensor.sum() for f in prior_factors), u.new_zeros(()))
        likelihood = sum_product([f for kind, f in factors if kind != "latent"], home, names)
        return prior, likelihood

    def _factors(
        self, records: dict[str, Record]
    ) -> tuple[list[tuple[str, Factor]], dict[int, frozenset[str]], dict[int, str]]:
        home = {
            r.variable: frozenset(f.name for f in r.plates) for r in records.values() if r.variable is not None
        }
        names = {r.variable: r.name for r in records.values() if r.variable is not None}
        factors = [
            (r.kind, _pack(r, self._first_available_dim or -1))
            for r in records.values()
            if r.log_prob is not None
        ]
        return factors, home, names

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation at one vector ``u``, by observed site."""
        records = self._run(self._from_vector(u))
        if not self._enumerates:
            return {r.name: r.log_prob for r in records.values() if r.kind == "observed" and r.log_prob is not None}
        _, home, names = self._factors(records)
        packed = {
            r.name: _pack(r, self._first_available_dim or -1)
            for r in records.values()
            if r.log_prob is not None and r.kind != "latent"
        }
        result = {}
        for name in self.observed_sites:
            mine = packed[name]
            joined, others = [mine], [n for n in packed if n != name]
            variables = mine.variables
            for other in others:
                if packed[other].variables & variables:
                    joined.append(packed[other])
                    variables |= packed[other].variables
            coupled = [v for v in variables if home[v] != mine.plates]
            shared = [o for o in others if o in self.observed_sites and packed[o].variables & variables]
            if coupled or shared:
                sites = ", ".join(sorted(repr(names[v]) for v in variables))
                raise ModelError(
                    f"the observations of site {name!r} are coupled by the summed-out sites {sites}, "
                    "so they have no pointwise log likelihood"
                )
            result[name] = eliminate(joined, mine.plates, home).tensor
        return result

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return each site's constrained value at one vector ``u``."""
        records = self._run(self._from_vector(u), enumerate_sites=deterministic and self._enumerates)
        kinds = ("latent", "deterministic") if deterministic else ("latent",)
        return {r.name: r.value for r in records.values() if r.kind in kinds}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of one set of constrained values."""
        missing = [s.name for s in self.sites if s.name not in values]
        if missing:
            raise ShapeError(f"no value was given for site {missing[0]!r}; needed are {list(self._by_name)}")
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            value = torch.as_tensor(values[name], dtype=self.dtype, device=self.device)
            pieces[name] = bijection(fn.support).inv(value).reshape(-1)
            return value, None

        self._run(supply)
        return torch.cat([pieces[s.name] for s in self.sites])

    def prior_vector(self, given: Mapping[str, Tensor]) -> Tensor:
        """Draw one vector from the prior with the global stream; sites in ``given`` are taken from there."""
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            value = given[name] if name in given else fn.sample()
            pieces[name] = bijection(fn.support).inv(value).reshape(-1)
            return value, None

        self._run(supply, enumerate_sites=False)
        return torch.cat([pieces[s.name] for s in self.sites])

    def root_draws(self, num_draws: int) -> dict[str, Tensor]:
        """Draw, all at once, the sites whose prior depends on no other latent site.

        Dependence is read off functorch itself: with every latent and discrete
        value batched, a distribution that depends on one has a batched density.
        """
        base: dict[str, Tensor] = {}

        def draw(name: str, fn: Any) -> tuple[Tensor, None]:
            base[name] = fn.sample()
            return base[name], None

        self._run(draw, enumerate_sites=False)
        roots: dict[str, Any] = {}

        def probe(batched: dict[str, Tensor]) -> Tensor:
            def supply(name: str, fn: Any) -> tuple[Tensor, None]:
                if not torch._C._functorch.is_batchedtensor(fn.log_prob(base[name])):
                    roots[name] = fn
                return batched[name], None

            self._run(supply, enumerate_sites=False)
            return next(iter(batched.values())).sum()

        stacked = {name: torch.stack([value, value]) for name, value in base.items()}
        torch.func.vmap(probe, randomness="different")(stacked)
        with self._defaults():
            return {name: fn.sample((num_draws,)) for name, fn in roots.items()}


def _pack(record: Record, first_available_dim: int) -> Factor:
    """Label the dimensions of a site's log probability."""
    tensor = record.log_prob
    sizes = {f.dim: f.size for f in record.plates}
    shape = list(tensor.shape)  # type: ignore[union-attr]
    shape = [1] * max(0, -min(sizes, default=0) - len(shape)) + shape
    for dim, size in sizes.items():
        shape[dim] = size
    tensor = tensor.expand(shape)  # type: ignore[union-attr]
    plate_names = {f.dim: f.name for f in record.plates}
    labels: list[Label] = []
    drop = []
    for position in range(len(shape)):
        dim = position - len(shape)
        if dim in plate_names:
            labels.append(plate_names[dim])
        elif dim <= first_available_dim and shape[position] > 1:
            labels.append(record.dim_to_id[dim])
        elif shape[position] == 1:
            drop.append(position)
        else:
            raise ModelError(
                f"site {record.name!r} has a batch dimension ({dim}) outside every plate; "
                "declare it with pyro.plate or .to_event"
            )
    return Factor(tensor.squeeze(drop) if drop else tensor, tuple(labels), frozenset(plate_names.values()))


def _dtype_and_device(
    data: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[torch.dtype, torch.device]:
    """Find the dtype and device of the floating tensors inside ``data``."""
    tensors: list[Tensor] = []

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, torch.nn.Module):
            tensors.extend(item.parameters())
            tensors.extend(item.buffers())
        elif isinstance(item, Mapping):
            for value in item.values():
                visit(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                visit(value)

    visit(data)
    floating = [t for t in tensors if t.is_floating_point()]
    found = dtype
    for tensor in floating:
        if tensor.dtype in (torch.float32, torch.float64):
            found = tensor.dtype if found is None else torch.promote_types(found, tensor.dtype)
    if tensors and (device is None or device.type == "cpu"):
        device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    return found or torch.get_default_dtype(), device or torch.device("cpu")
