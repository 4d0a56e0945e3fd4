"""One run of a Pyro model: supply the values of its latent sites, record what each site says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pyro.distributions import Delta, ExpandedDistribution, ImproperUniform, Independent, MaskedDistribution, Uniform
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._pyro.batching import MaskedFill, naming
from bayeskit._pyro.draws import draw
from bayeskit._pyro.unclamped import unclamped
from bayeskit._tracing import UNTRACEABLE
from bayeskit.errors import DataError, ModelError, UnsupportedSiteError


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


class Coordinate(NamedTuple):
    """What the unconstrained coordinate of a latent site adds to the density of its value."""

    jacobian: Tensor  # logarithm, of the batch shape of the site
    log_density: Tensor | None  # of the coordinate, Jacobian included; None where only that of the value is known


Supply = Callable[[str, Any], tuple[Tensor, Coordinate | None]]


@dataclass
class Constants:
    """What the first run of the model fixes for all later ones."""

    params: dict[str, Tensor] = field(default_factory=dict)
    observed: dict[str, Tensor] = field(default_factory=dict)  # masked NaN replaced by draws
    indices: dict[str, tuple[Any, Tensor]] = field(default_factory=dict)  # of each plate, readable in a loop and plain
    looped: set[str] = field(default_factory=set)  # plates that the model loops over
    improper: set[str] = field(default_factory=set)  # sites whose prior does not integrate to one
    relaxed: set[str] = field(default_factory=set)  # observed sites of zeros and ones, whose data are in between


def _innermost(fn: Any) -> Any:
    """Return the distribution that others have wrapped."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return fn


class Indices(Tensor):
    """A plate's indices, which a Python loop over the plate reads as numbers even while it is traced."""

    numbers: list[int]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, indices: Tensor) -> Indices:
        self = indices.as_subclass(cls)
        self.numbers = indices.tolist()
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Reader(Messenger):
    """Supply latent values, record log probabilities."""

    def __init__(
        self, supply: Supply, constants: Constants, first_run: bool = False, admits_uniform: bool = False
    ) -> None:
        super().__init__()
        self.supply, self.constants = supply, constants
        self.first_run, self._admits_uniform = first_run, admits_uniform
        self.records: dict[str, Record] = {}
        self.coordinates: dict[str, Coordinate | None] = {}
        self.last: str | None = None
        self._seen: tuple[str, Any, Any] | None = None  # the last observed site, its distribution and data
        self.plate_sizes: dict[str, int] = {}

    def _pyro_param(self, msg: Any) -> None:
        params = self.constants.params
        if msg["name"] not in params:
            params[msg["name"]] = msg["fn"](*msg["args"], **msg["kwargs"]).detach().clone()
        msg["value"], msg["done"] = params[msg["name"]], True

    def _pyro_sample(self, msg: Any) -> None:
        self.last = name = msg["name"]
        if isinstance(msg["fn"], _Subsample):
            if self.first_run and self.plate_sizes.setdefault(name, msg["fn"].size) != msg["fn"].size:
                raise ModelError(
                    f"two plates are named {name!r}, of sizes {self.plate_sizes[name]} and {msg['fn'].size}; give each "
                    "its own name"
                )
            if msg["fn"].subsample_size is not None and msg["fn"].subsample_size < msg["fn"].size:
                raise ModelError(
                    f"plate {name!r} subsamples its data, so the density is random; build the target from the full data"
                )
            if msg["value"] is None and name in self.constants.indices:
                looped, plain = self.constants.indices[name]
                msg["value"] = looped if name in self.constants.looped else plain
            return
        if is_enumerated(msg) and not msg["fn"].has_enumerate_support:
            raise UnsupportedSiteError(
                f"site {name!r} is marked for enumeration, but its support is infinite; "
                "use a distribution with finite support"
            )
        if msg["is_observed"]:
            if not isinstance(msg["value"], Tensor) and not is_deterministic(msg):
                msg["value"] = as_numbers(f"the data of observed site {name!r}", msg["value"])
            if self.first_run and not is_deterministic(msg):
                self._hide_masked_nan(msg)
            msg["value"] = self.constants.observed.get(name, msg["value"])
            self._seen = name, msg["fn"], msg["value"]
            fn = _innermost(msg["fn"])
            if self._admits_uniform and isinstance(fn, Uniform):
                fn._validate_args = msg["fn"]._validate_args = False
        elif not msg["done"]:
            if self.first_run:
                self._note_improper(msg)
            if is_enumerated(msg):
                if self.first_run:
                    _refuse_inexact_sum(msg)
                return
            if self.first_run:
                _refuse_improper(msg)
            # Not marked as done: the enumeration around this still has to note the site's dimensions.
            msg["value"], self.coordinates[name] = self.supply(name, msg["fn"])

    def _note_improper(self, msg: Any) -> None:
        name, layers = msg["name"], _layers(msg["fn"])
        flat = any(isinstance(fn, ImproperUniform) or getattr(fn, "is_improper", False) for fn in layers)
        masks = [mask for fn in layers if (mask := vars(fn).get("_mask")) is not None]
        left_out = any(not bool(torch.as_tensor(mask).all()) for mask in masks)
        if flat or left_out or (msg["mask"] is False and not is_enumerated(msg)):
            self.constants.improper.add(name)

    def _refuse_outer_product(self, name: str, fn: Any, value: Any, log_prob: Tensor) -> None:
        """Refuse data of shape (n, 1) where (n,) is meant: every observation would meet every mean."""
        if any(record.kind == "enumerated" for record in self.records.values()):
            return  # there values of a site meet all observations on purpose
        data = tuple(value.shape[: value.dim() - fn.event_dim])
        if log_prob.numel() > max(math.prod(data), math.prod(fn.batch_shape)):
            raise DataError(
                f"observed site {name!r} has data of shape {data} where its distribution has batch shape "
                f"{tuple(fn.batch_shape)}: together they make {tuple(log_prob.shape)}; reshape the data, perhaps "
                "by squeeze(-1)"
            )

    def outside_of_support(self) -> str:
        """Name the data that the last site cannot have, if there are any, in place of torch's print of all of them."""
        if self._seen is None or self._seen[0] != self.last:
            return ""
        _, fn, value = self._seen
        fn = _innermost(fn)
        with suppress(*UNTRACEABLE):
            inside = torch.broadcast_to(fn.support.check(value), value.shape[: value.dim() - fn.event_dim])
            if not inside.all():
                first = tuple((~inside).nonzero()[0].tolist())
                return (
                    f"{int((~inside).sum())} of its {inside.numel()} observed values lie outside of the support of "
                    f"{type(fn).__name__.lstrip('_')}, which is {fn.support}; the first is {value[first].tolist()}, at "
                    f"index {first}; correct the data, or choose a distribution that can give them"
                )
        return ""

    def _hide_masked_nan(self, msg: Any) -> None:
        """Put a draw where data are missing and masked: NaN times a mask of zero is NaN in the gradient."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        bad = value.isnan()
        if not bad.any():
            return
        event = bad.flatten(bad.dim() - fn.event_dim).any(-1) if fn.event_dim else bad
        for mask in (msg["mask"], getattr(fn, "_mask", None)):
            event = event if mask is None else event & torch.as_tensor(mask, device=value.device)
        if event.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise DataError(
                f"observed site {name!r} holds {int(bad.sum())} NaN, the first at index {first}; "
                "drop or impute missing data, or mask them with poutine.mask"
            )
        self.constants.observed[name] = torch.where(bad, draw(fn).to(value.dtype), value)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.constants.looped.update(f.name for f in msg["cond_indep_stack"] if not f.vectorized)
        if isinstance(msg["fn"], _Subsample):
            if self.first_run and isinstance(msg["value"], Tensor):
                self.constants.indices[msg["name"]] = (Indices(msg["value"]), msg["value"])
            return
        name, fn, value, infer = msg["name"], msg["fn"], msg["value"], msg["infer"]
        if name in self.records:
            raise ModelError(f"two sites are named {name!r}; give each its own name")
        plates = tuple(f for f in msg["cond_indep_stack"] if f.vectorized)
        log_prob: Tensor | None = None
        if is_deterministic(msg):
            kind = "deterministic"
        else:
            kind = "observed" if msg["is_observed"] else "enumerated" if is_enumerated(msg) else "latent"
            if (
                self.first_run
                and kind == "observed"
                and fn.support.is_discrete
                and bool((value != value.round()).any())
            ):
                self.constants.relaxed.add(name)
            mask = msg["mask"]
            if kind == "enumerated" or (kind == "latent" and isinstance(mask, Tensor)):
                # Masked elements (padding, or the observed part of a partially observed site) reach no
                # likelihood. With their prior they integrate to one; without it the evidence is infinite,
                # or too large by the number of values that are summed.
                mask = None
            coordinate = self.coordinates.get(name)
            if coordinate is not None and coordinate.log_density is not None and (mask is None or mask is True):
                log_prob = coordinate.log_density
            else:
                with nullcontext() if self.first_run else _batchable(name, fn):
                    exact = kind == "observed" and name not in self.constants.relaxed
                    seen = unclamped(fn, finite=True) if exact else fn
                    log_prob = scale_and_mask(seen.log_prob(value), msg["scale"], mask)
                if coordinate is not None:
                    log_prob = log_prob + coordinate.jacobian
            if self.first_run and kind == "observed":
                self._refuse_outer_product(name, fn, value, log_prob)
        dim_to_id = dict(infer.get("_dim_to_id", {}))
        dim = infer.get("_enumerate_dim")
        variable = None if dim is None else dim_to_id[dim]
        self.records[name] = Record(name, kind, value, log_prob, plates, dim_to_id, variable)


def _layers(fn: Any) -> list[Any]:
    """Return a distribution and those that it was made of."""
    found = []
    while fn is not None:
        found.append(fn)
        fn = vars(fn).get("base_dist")
    return found


def is_deterministic(msg: Any) -> bool:
    """Tell whether a site only names a value: by `pyro.deterministic`, or as what a reparameterisation left."""
    fn = msg["fn"]
    left = getattr(fn, "_mask", None) is False and isinstance(_layers(fn)[-1], Delta)
    return bool(msg["infer"].get("_deterministic")) or (msg["is_observed"] and left)


def _refuse_inexact_sum(msg: Any) -> None:
    """Refuse a site that is summed out but whose probabilities do not sum to one."""
    if bool((torch.as_tensor(msg["scale"]) - 1).abs().max() > 1e-6):
        raise ModelError(
            f"site {msg['name']!r} is summed out and scaled, by poutine.scale or by a plate that subsamples, so its "
            "probabilities do not sum to one; scale the observed sites only, or give all of the data"
        )
    if msg["infer"].get("num_samples") is not None:
        raise UnsupportedSiteError(
            f"site {msg['name']!r} is marked for enumeration with num_samples, which draws values instead of summing "
            "over all; leave num_samples out"
        )


def _refuse_improper(msg: Any) -> None:
    """Refuse what has no density, and priors that are scaled on purpose; a flat one may have a posterior."""
    if isinstance(_layers(msg["fn"])[-1], Delta):
        raise UnsupportedSiteError(
            f"latent site {msg['name']!r} is a Delta, which has no density; name its value by pyro.deterministic"
        )
    scale = msg["scale"]
    if not (isinstance(scale, (int, float)) and scale == 1) and bool((torch.as_tensor(scale) != 1).any()):
        raise ModelError(
            f"the latent site {msg['name']!r} is scaled by poutine.scale, so its prior does not integrate to one; "
            "scale the observed sites only"
        )


@contextmanager
def _batchable(name: str, fn: Any) -> Iterator[None]:
    with naming(name, fn), _unvalidated(fn), MaskedFill():
        yield


@contextmanager
def _unvalidated(fn: Any) -> Iterator[None]:
    """Keep a distribution made with validation on, such as a module's prior, from branching on values."""
    validating = []
    while fn is not None:
        if fn.__dict__.get("_validate_args"):
            validating.append(fn)
            fn._validate_args = False
        fn = fn.__dict__.get("base_dist")
    try:
        yield
    finally:
        for distribution in validating:
            distribution._validate_args = True


def is_enumerated(msg: Any) -> bool:
    return msg["infer"].get("enumerate") == "parallel" and not msg["is_observed"]
