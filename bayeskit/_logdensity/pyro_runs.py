"""One run of a Pyro model with supplied latent values and recorded log probabilities."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from inspect import getclosurevars
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import (
    Delta,
    ExpandedDistribution,
    ImproperUniform,
    Independent,
    MaskedDistribution,
    Uniform,
    Unit,
)
from pyro.distributions.util import scale_and_mask
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK, effectful
from pyro.poutine.subsample_messenger import SubsampleMessenger, _Subsample
from torch import Tensor
from torch.distributions import constraints

from bayeskit._compiler import is_traced
from bayeskit._core.arguments import Frame
from bayeskit._core.functions_of_users import is_of_a_library, line_of, words_of
from bayeskit._core.inputs import as_numbers
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import defaults, global_stream, new_generator, validation_kept
from bayeskit._core.torch_internals import without_overrides
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.exact_probabilities import unclamped
from bayeskit._logdensity.pyro_distributions import (
    MISSING_ALLOWED,
    MaskedFill,
    batchable_distributions,
    draw_values,
    naming,
)
from bayeskit._logdensity.sufficient_statistics import sum_of_log_prob
from bayeskit.errors import BayeskitError, DataError, ModelError, UnsupportedSiteError

# Facts about a model beside its sites: dtype and device of its data, places of errors.


def place_of(error: Exception) -> str:
    """Return the site and distribution whose density failed, or else the user's own line."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("at site ")]
    return f" {notes[0]}" if notes else line_of(error)


@contextmanager
def globals_kept() -> Iterator[None]:
    """Restore Pyro's handlers, plates and parameters and torch's validation, however a model ends."""
    # Ctrl-C while a plate is entered or left would leave it allocated, and later plates of its name would fail.
    with validation_kept(), _empty_plates():
        store = pyro.get_param_store()
        names, handlers, plates = set(store.keys()), list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
        try:
            yield
        finally:
            _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, plates
            for name in set(store.keys()) - names:
                del store[name]


@contextmanager
def _empty_plates() -> Iterator[None]:
    """Let models have plates of size zero, as that of the censored where nobody was; Pyro refuses them."""
    begin, process = IndepMessenger.__init__, SubsampleMessenger._process_message
    exchanged = {(IndepMessenger, "__init__"): begin, (SubsampleMessenger, "_process_message"): process}

    def any_size(self: Any, name: str, size: Any, dim: int | None = None, device: str | None = None) -> None:
        begin(self, name, size or 1, dim, device)
        self.size = size

    def unscaled(self: Any, msg: Any) -> None:
        if self.size == 0:  # the scale would be the number of rows over that of a minibatch
            IndepMessenger._process_message(self, msg)
        else:
            process(self, msg)

    with process_state():
        for (kind, name), ours in zip(exchanged, (any_size, unscaled), strict=True):
            setattr(kind, name, ours)
        try:
            yield
        finally:
            for (kind, name), theirs in exchanged.items():
                setattr(kind, name, theirs)


@contextmanager
def own_words() -> Iterator[None]:
    """Remove the shapes of sites that Pyro's tracing appends to the messages of bayeskit's errors."""
    try:
        yield
    except BayeskitError as error:
        message, shapes, _ = str(error).partition("\nTrace Shapes:")
        if not shapes:
            raise
        raise type(error)(message).with_traceback(error.__traceback__) from None


def unsteady(name: str) -> ModelError:
    """Return the error for a site that appears only in some runs."""
    return ModelError(
        f"site {name!r} appeared only in some runs of the model; the set of sites must not depend on values"
    )


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors in ``data``: in containers and modules, and referred to by functions and objects."""
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Frame):
            tensors.extend(item.tensors)
        elif isinstance(item, Tensor):
            tensors.append(item)
        elif id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, FunctionType):
            names = getclosurevars(item)
            visit(names.nonlocals)
            # Global functions are skipped, because most belong to libraries.
            visit({k: v for k, v in names.globals.items() if not isinstance(v, FunctionType)})
        elif isinstance(item, MethodType):
            visit((item.__func__, item.__self__))
        elif isinstance(item, partial):
            visit((item.func, item.args, item.keywords))
        elif isinstance(item, torch.nn.Module):
            tensors.extend(item.parameters())
            tensors.extend(item.buffers())
        elif isinstance(item, Mapping):
            for value in item.values():
                visit(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                visit(value)
        elif callable(item) and not isinstance(item, type):
            visit(getattr(item, "__dict__", None))

    visit(data)
    return tensors


def dtype_and_device(
    data: Any, dtype: torch.dtype | None = None, device: torch.device | None = None, of_lists: Any = ()
) -> tuple[torch.dtype, torch.device]:
    """Find the dtype and device of the floating tensors inside ``data`` and the functions in it.

    Where there is none, lists of numbers decide, which are given as tensors. Half precision counts as single.
    """
    tensors = tensors_in(data)
    floating = [t for t in tensors if t.is_floating_point()] or tensors_in(of_lists)
    found = dtype
    for tensor in floating:
        if tensor.is_floating_point():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            found = wide if found is None else torch.promote_types(found, wide)
    if tensors and (device is None or device.type == "cpu"):
        device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    return found or torch.float64, device or torch.device("cpu")


# One run of a Pyro model: supply the values of its latent sites, record the log probability of each site.


@dataclass
class Record:
    """One site in one run of the model."""

    name: str
    kind: str  # "latent", "observed", "enumerated" or "deterministic"
    value: Tensor
    log_prob: Tensor | None
    plates: tuple[Any, ...]
    dim_to_id: dict[int, int]
    variable: int | None


class Coordinate(NamedTuple):
    """Log Jacobian and, if known, log density of the unconstrained coordinate of a latent site."""

    jacobian: Tensor  # logarithm, of the batch shape of the site
    log_density: Tensor | None  # of the coordinate, Jacobian included; None where only that of the value is known


Supply = Callable[[str, Any], tuple[Tensor, Coordinate | None]]


@dataclass
class Constants:
    """Values that the first run of the model fixes for all later runs."""

    params: dict[str, Tensor] = field(default_factory=dict)
    observed: dict[str, Tensor] = field(default_factory=dict)  # masked NaN replaced by draws
    given: dict[str, Tensor] = field(default_factory=dict)  # data of each site in double precision, NaN where masked
    counted: dict[str, Tensor] = field(default_factory=dict)  # where a mask leaves data out, which of them count, bool
    whole: set[str] = field(default_factory=set)  # observed and summed-out sites whose values are whole numbers
    factors: dict[str, Tensor] = field(default_factory=dict)  # sum of each factor at one draw from the prior, ()
    indices: dict[str, tuple[Any, Tensor]] = field(default_factory=dict)  # of each plate, iterable in traces and plain
    looped: set[str] = field(default_factory=set)  # plates that the model loops over
    improper: set[str] = field(default_factory=set)  # sites whose prior does not integrate to one
    real: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # observed whole numbers, and as real numbers
    relaxed: set[str] = field(default_factory=set)  # discrete observed sites whose data are not whole numbers


def _innermost(fn: Any) -> Any:
    """Return the distribution inside all wrappers."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return fn


class _Indices(Tensor):
    """A plate's indices, which a Python loop over the plate reads as numbers even while it is traced."""

    numbers: list[int]
    __torch_function__ = without_overrides

    @staticmethod
    def __new__(cls, indices: Tensor) -> _Indices:
        self = indices.as_subclass(cls)
        self.numbers = indices.tolist()
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Indices:
        return _Indices(self.as_subclass(Tensor).clone())


@effectful(type="rule_out")
def rule_out(where: Tensor) -> Tensor:
    """Make the density of the model that runs zero where a condition ``()`` holds."""
    return where


class RowTerms(Enum):
    """What one run of a model records of the log probability of its observed sites."""

    EACH = auto()  # that of each row
    SUMS = auto()  # sums over some of the rows, where these need less time
    NONE = auto()


class Reader(Messenger):
    """Supply latent values, record log probabilities."""

    def __init__(
        self,
        supply: Supply,
        constants: Constants,
        first_run: bool = False,
        admits_uniform: bool = False,
        likelihood: RowTerms = RowTerms.EACH,
    ) -> None:
        super().__init__()
        self.supply, self.constants, self._likelihood = supply, constants, likelihood
        self.first_run, self._admits_uniform = first_run, admits_uniform
        self.records: dict[str, Record] = {}
        self.coordinates: dict[str, Coordinate | None] = {}
        self.last: str | None = None
        self._seen: tuple[str, Any, Any] | None = None  # the last observed site, its distribution and data
        self.plate_sizes: dict[str, int] = {}
        self.ruled_out: list[Tensor] = []  # where the density is zero, whatever the sites say

    def _pyro_post_rule_out(self, msg: Any) -> None:
        self.ruled_out.append(msg["value"])

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
                check_plates(msg)
                self._note_data(msg)
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

    def _as_real(self, name: str, fn: Any, value: Tensor) -> Tensor:
        """Return data of whole numbers in the precision of the model, once for all runs."""
        # Functions of whole numbers, such as lgamma, have torch's default precision. Distributions of users may index
        # by their data.
        if value.is_floating_point() or not type(_innermost(fn)).__module__.startswith(("torch.", "pyro.")):
            return value
        before, real = self.constants.real.get(name, (None, value))
        if before is not value:
            real = value.to(torch.get_default_dtype())
            if not is_traced():
                self.constants.real[name] = value, real
        return real

    def outside_of_support(self) -> str:
        """Return a message on data outside the support of the last site, or ""; torch would print all of the data."""
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
                    f"index {first}; correct the data, or choose a distribution with another support"
                )
        return ""

    def _note_data(self, msg: Any) -> None:
        """Keep the data of a site as they are given, or the value of a factor."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        if isinstance(_innermost(fn), Unit):
            self.constants.factors[name] = fn.log_prob(value).detach().sum()
            return
        value = value.detach().to("cpu", torch.float64)
        masks = [torch.as_tensor(mask).cpu() for mask in (msg["mask"], getattr(fn, "_mask", None)) if mask is not None]
        if isinstance(_innermost(fn), MISSING_ALLOWED):
            known = ~value.isnan()
            masks.append(known.flatten(known.dim() - fn.event_dim).any(-1) if fn.event_dim else known)
        for kept in masks:
            value = value.masked_fill(~kept[(..., *[None] * fn.event_dim)], torch.nan)
            if not bool(kept.all()):
                batch = torch.broadcast_to(kept, value.shape[: value.dim() - fn.event_dim])
                self.constants.counted[name] = batch & self.constants.counted.get(name, batch)
        self.constants.given[name] = value

    def _hide_masked_nan(self, msg: Any) -> None:
        """Replace masked NaN by draws, because NaN times a mask of zero is NaN in the gradient."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        bad = value.isnan()
        if not bad.any() or isinstance(_innermost(fn), MISSING_ALLOWED):
            return
        event = bad.flatten(bad.dim() - fn.event_dim).any(-1) if fn.event_dim else bad
        for mask in (msg["mask"], getattr(fn, "_mask", None)):
            event = event if mask is None else event & torch.as_tensor(mask, device=value.device)
        if event.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise DataError(
                f"observed site {name!r} holds {int(bad.sum())} NaN, the first at index {first}; "
                "drop or impute missing data, mask them with poutine.mask, or give them a NanMaskedNormal"
            )
        self.constants.observed[name] = torch.where(bad, draw_values(fn).to(value.dtype), value)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.constants.looped.update(f.name for f in msg["cond_indep_stack"] if not f.vectorized)
        if isinstance(msg["fn"], _Subsample):
            if self.first_run and isinstance(msg["value"], Tensor):
                self.constants.indices[msg["name"]] = (_Indices(msg["value"]), msg["value"])
            return
        name, fn, value, infer = msg["name"], msg["fn"], msg["value"], msg["infer"]
        if name in self.records:
            raise ModelError(f"two sites are named {name!r}; give each its own name")
        plates = tuple(f for f in msg["cond_indep_stack"] if f.vectorized)
        log_prob: Tensor | None = None
        if is_deterministic(msg):
            kind = "deterministic"
        else:
            if self.first_run and not msg["is_observed"]:
                check_plates(msg)
            kind = "observed" if msg["is_observed"] else "enumerated" if is_enumerated(msg) else "latent"
            if self.first_run and kind in ("observed", "enumerated") and fn.support.is_discrete:
                relaxed = kind == "observed" and value.is_floating_point() and bool((value != value.round()).any())
                (self.constants.relaxed if relaxed else self.constants.whole).add(name)
            mask = msg["mask"]
            if kind == "enumerated" or (kind == "latent" and isinstance(mask, Tensor)):
                # Masked elements (padding, or the observed part of a partially observed site) reach no
                # likelihood. With their prior they integrate to one; without it the evidence is infinite,
                # or too large by the number of values that are summed.
                mask = None
            coordinate = self.coordinates.get(name)
            if coordinate is not None and coordinate.log_density is not None and (mask is None or mask is True):
                log_prob = coordinate.log_density
            elif kind != "observed" or self._likelihood is not RowTerms.NONE:
                with nullcontext() if self.first_run else _batchable(name, fn):
                    exact = kind == "observed" and name not in self.constants.relaxed
                    given = self._as_real(name, fn, value) if kind == "observed" else value
                    if exact and self._likelihood is RowTerms.SUMS and _counts_rows_once(msg):
                        log_prob = sum_of_log_prob(fn, given)
                    if log_prob is None:
                        log_prob = (unclamped(fn, finite=True) if exact else fn).log_prob(given)
                    log_prob = scale_and_mask(log_prob, msg["scale"], mask)
                if coordinate is not None:
                    log_prob = log_prob + coordinate.jacobian
        dim_to_id = dict(infer.get("_dim_to_id", {}))
        dim = infer.get("_enumerate_dim")
        variable = None if dim is None else dim_to_id[dim]
        self.records[name] = Record(name, kind, value, log_prob, plates, dim_to_id, variable)


def check_plates(msg: Any) -> None:
    """Raise ``ModelError`` for a batch dimension of a site that belongs to no plate, as Pyro does in its own training.

    A column ``(n, 1)`` where a vector ``(n,)`` is meant would pair each observation with each mean.
    """
    name, fn, value = msg["name"], msg["fn"], msg["value"]
    shapes = {"batch shape": tuple(fn.batch_shape)}
    if isinstance(value, Tensor) and msg["is_observed"]:
        shapes["data of shape"] = tuple(value.shape[: value.dim() - fn.event_dim])
    shapes |= {
        f"a {what} of shape": tuple(msg[what].shape) for what in ("mask", "scale") if hasattr(msg[what], "shape")
    }
    sizes = [set(sizes) - {1} for sizes in zip_longest(*map(reversed, shapes.values()), fillvalue=1)]
    whole = [max(size, default=1) for size in reversed(sizes)]  # torch.broadcast_shapes takes a second to import
    plates = {frame.dim: frame for frame in msg["cond_indep_stack"] if frame.vectorized}
    undeclared = [dim for dim in range(-len(whole), 0) if whole[dim] != 1 and dim not in plates]
    what_there_is = ", ".join(f"{what} {shape}" for what, shape in shapes.items() if shape)
    if any(len(size) > 1 for size in sizes):
        raise ModelError(f"site {name!r} has {what_there_is}, which do not fit together")
    _check_events(msg)
    if not undeclared:
        return
    inside = ", ".join(f"{frame.name!r} of size {frame.size} at dimension {dim}" for dim, frame in plates.items())
    if isinstance(_innermost(fn), Unit):
        remedy = "sum the factor over it, or put the factor inside a pyro.plate"
    elif any(whole[dim] == frame.size for dim in undeclared for frame in plates.values()):
        remedy = "give columns (n, 1), outputs of layers too, as vectors (n,), by .squeeze(-1)"
    else:
        remedy = "declare it by .to_event(1) or pyro.plate, or give columns (n, 1) as vectors (n,) by .squeeze(-1)"
    raise ModelError(
        f"site {name!r} has {what_there_is}, and is inside {f'plate {inside}' if plates else 'no plate'}, so dimension "
        f"{undeclared[-1]} of size {whole[undeclared[-1]]} is outside every plate. Remedy: {remedy}"
    )


def _check_events(msg: Any) -> None:
    """Raise ``ModelError`` if data and an event are both repeated, so that each number meets several of the other."""
    fn, value = msg["fn"], msg["value"]
    is_plain = not any(isinstance(layer, Independent) for layer in _layers(fn)) or isinstance(_innermost(fn), Unit)
    if not msg["is_observed"] or not isinstance(value, Tensor) or is_plain:
        return  # torch looks at events of several numbers itself
    shape, given = tuple(fn.shape()), tuple(value.shape)
    pairs = [max(a, b) for a, b in zip_longest(reversed(shape), reversed(given), fillvalue=1)]
    if math.prod(pairs) > max(math.prod(shape), math.prod(given)):
        raise ModelError(
            f"site {msg['name']!r} has shape {shape}, of which the last {fn.event_dim} are an event, and data of shape "
            f"{given}, which would make {math.prod(pairs)} pairs of numbers. Remedy: give columns (n, 1), outputs of "
            "layers too, as vectors (n,), by .squeeze(-1), or data of the shape of the site"
        )


def _counts_rows_once(msg: Any) -> bool:
    """Tell whether all rows of a site have one scale and no mask, and are not a part of those of a plate."""
    whole = all(frame.full_size in (None, frame.size) for frame in msg["cond_indep_stack"])
    return whole and (msg["mask"] is None or msg["mask"] is True) and getattr(msg["scale"], "ndim", 0) == 0


def _layers(fn: Any) -> list[Any]:
    """Return a distribution and the distributions that it wraps."""
    found = []
    while fn is not None:
        found.append(fn)
        fn = vars(fn).get("base_dist")
    return found


def is_deterministic(msg: Any) -> bool:
    """Tell whether a site only names a value: by ``pyro.deterministic``, or as the rest of a reparameterisation."""
    fn = msg["fn"]
    left = getattr(fn, "_mask", None) is False and isinstance(_layers(fn)[-1], Delta)
    return bool(msg["infer"].get("_deterministic")) or (msg["is_observed"] and left)


def _refuse_inexact_sum(msg: Any) -> None:
    """Refuse a site that is summed out but whose probabilities do not sum to one."""
    if bool((torch.as_tensor(msg["scale"]) - 1).abs().max() > 1e-6):
        raise ModelError(
            f"site {msg['name']!r} is summed out and scaled, by poutine.scale or by a plate that subsamples, so its "
            "probabilities do not sum to one; scale the observed sites only, or use the full data"
        )
    if msg["infer"].get("num_samples") is not None:
        raise UnsupportedSiteError(
            f"site {msg['name']!r} is marked for enumeration with num_samples, which draws values instead of summing "
            "over all of them; remove num_samples"
        )


def _refuse_improper(msg: Any) -> None:
    """Refuse sites without density and scaled priors; a flat prior is allowed, as its posterior may be proper."""
    if isinstance(_layers(msg["fn"])[-1], Delta):
        raise UnsupportedSiteError(
            f"latent site {msg['name']!r} is a Delta, which has no density; replace it by pyro.deterministic"
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
    """Whether a site is summed out."""
    return msg["infer"].get("enumerate") == "parallel" and not msg["is_observed"]


# Run a Pyro model with given values at its discrete latent sites, and record the log probability.

UNIT_MASS = {torch.float64: 1e-10}
_ROUNDED_MASS = 1e-4


class DiscreteValues(NamedTuple):
    """The values of a discrete site: each of its elements takes one of ``K`` values."""

    name: str
    values: Tensor  # (K, *event)
    elements: torch.Size
    possible: Tensor  # (K, *elements), bool: whether the value has positive prior probability there

    @property
    def num_assignments(self) -> int:
        """Number of values of the whole site, the impossible ones included."""
        return len(self.values) ** self.elements.numel()


SupplyDiscrete = Callable[[str, Any], Tensor]


class Replay(Messenger):
    """Supply values of the latent sites and add up log prior and log likelihood."""

    def __init__(self, supply: SupplyDiscrete, *, eager: bool) -> None:
        super().__init__()
        self.supply, self.eager = supply, eager
        self.values: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.log_prior = torch.zeros((), dtype=torch.float64)
        self.log_likelihood = torch.zeros((), dtype=torch.float64)
        self.last: str | None = None

    def _pyro_sample(self, msg: Any) -> None:
        self.last = name = msg["name"]
        fn = msg["fn"]
        if isinstance(fn, _Subsample):
            if fn.subsample_size is not None and fn.subsample_size < fn.size:
                raise ModelError(f"plate {name!r} subsamples its data, so the evidence is random; use the full data")
        elif not msg["is_observed"] and not msg["done"]:
            scale = msg["scale"]
            if not (isinstance(scale, (int, float)) and scale == 1) and bool((torch.as_tensor(scale) != 1).any()):
                raise ModelError(
                    f"the latent site {name!r} is scaled by poutine.scale, so its prior does not add up to one; "
                    "scale the observed sites only"
                )
            fixed = isinstance(base_of(fn), Delta)
            msg["value"], msg["done"] = fn.sample() if fixed else self.supply(name, fn), True

    def _pyro_post_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        if name in self.names:
            raise ModelError(f"two sites are named {name!r}; give each its own name")
        self.names.add(name)
        if self.eager:
            check_plates(msg)
        if msg["is_observed"] or isinstance(base_of(fn), Delta):
            log_prob = unclamped(fn).log_prob(msg["value"])
            log_prob = scale_and_mask(log_prob, msg["scale"], msg["mask"]).sum().to(torch.float64)
            self._refuse_undefined(name, log_prob)
            self.log_likelihood = self.log_likelihood.to(log_prob.device) + log_prob
        else:
            # Without its mask: masked elements reach no likelihood and integrate to one.
            self.values[name] = msg["value"]
            log_prob = unclamped(base_of(fn).expand(_elements_of(fn))).log_prob(msg["value"])
            self.log_prior = self.log_prior.to(log_prob.device) + log_prob.sum().to(torch.float64)

    def _refuse_undefined(self, name: str, log_prob: Tensor) -> None:
        if self.eager and (bool(log_prob.isnan()) or float(log_prob) == math.inf):
            given = ", ".join(f"{site} = {value.tolist()}" for site, value in self.values.items())
            raise ModelError(
                f"the log probability of site {name!r} is {float(log_prob)} at {given or 'its only value'}; "
                "check its parameters and data at these values"
            )


def base_of(fn: Any) -> Any:
    """Return the distribution of one element, without expansion, mask and event dimensions of its wrappers."""
    while "base_dist" in vars(fn) and not hasattr(fn, "transforms"):
        fn = fn.base_dist
    return fn


def _elements_of(fn: Any) -> torch.Size:
    """Return the shape of a site's value without that of one element."""
    whole = fn.batch_shape + fn.event_shape
    return whole[: len(whole) - len(base_of(fn).event_shape)]


def choices_of(name: str, fn: Any) -> DiscreteValues:
    """List the values of a discrete site; raise ``ModelError`` if it is continuous, infinite or not normalised."""
    base, elements = base_of(fn), _elements_of(fn)
    values = values_of_element(name, base)
    ones = (1,) * len(elements)
    spread = values.reshape(len(values), *ones, *base.event_shape).expand(len(values), *elements, *base.event_shape)
    log_prob = unclamped(base.expand(elements)).log_prob(spread)
    mass = log_prob.logsumexp(0)
    if not bool((mass.abs() <= UNIT_MASS.get(mass.dtype, _ROUNDED_MASS)).all()):
        wrong = float(mass.reshape(-1)[int(mass.abs().nan_to_num(nan=math.inf).argmax())].exp())
        raise ModelError(
            f"the probabilities of site {name!r} add up to {wrong:.6g} instead of one; correct its parameters"
        )
    return DiscreteValues(name, values, elements, log_prob > -torch.inf)


def values_of_element(name: str, base: Any) -> Tensor:
    """Return the values of one element of a discrete site, ``(K, *event)``."""
    if base.has_enumerate_support:
        try:
            return base.enumerate_support(expand=False).reshape(-1, *base.event_shape)
        except NotImplementedError as error:
            raise UnsupportedSiteError(
                f"the elements of site {name!r} have different supports ({error}); replace its plate by a Python loop"
            ) from error
    if base.support.is_discrete:
        raise UnsupportedSiteError(
            f"site {name!r} is a {type(base).__name__}, whose values cannot be enumerated; truncate it to a "
            "Categorical, or sum it out by hand"
        )
    raise UnsupportedSiteError(
        f"site {name!r} is continuous ({type(base).__name__}), and only discrete sites can be enumerated; fix it with "
        f"pyro.condition(model, {{{name!r}: value}}), or estimate the evidence with Target.from_pyro and bayeskit."
        "inference.evidence"
    )


class ReplayedModel:
    """A model with its arguments, to be run with values for its latent sites; no global is left changed."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not callable(model):
            raise ModelError(f"a Pyro model is a callable that calls pyro.sample; got {type(model).__name__}")
        self._model, self._args, self._kwargs = model, args, kwargs
        self.device = dtype_and_device((model, args, kwargs))[1]

    def run(self, supply: SupplyDiscrete) -> Replay:
        """Run the model once; raise ``ModelError``, with the name of the site, if it fails."""
        replay = Replay(supply, eager=True)
        try:
            with self._globals(), replay:
                self._model(*self._args, **self._kwargs)
        except BayeskitError:
            raise
        except Exception as error:
            place = "before its first site" if replay.last is None else f"at or after site {replay.last!r}"
            raise ModelError(f"running the model failed {place}{line_of(error)}: {words_of(error)}") from error
        return replay

    def run_batch(self, values: Mapping[str, Tensor], choices: Mapping[str, DiscreteValues]) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of assignments, ``(B,)``; raise ``UNTRACEABLE`` if ``vmap`` cannot."""

        def one(assignment: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            def supply(name: str, fn: Any) -> Tensor:
                # Listing the values again fails where they depend on batched ones.
                if values_of_element(name, base_of(fn)).shape != choices[name].values.shape:
                    raise RuntimeError(f"the values of site {name!r} change")
                return assignment[name]

            replay = Replay(supply, eager=False)
            with replay:
                self._model(*self._args, **self._kwargs)
            if replay.values.keys() != choices.keys():
                raise RuntimeError("the set of sites changes")
            return replay.log_prior, replay.log_likelihood

        with self._globals(), pyro.validation_enabled(False), batchable_distributions():
            return torch.func.vmap(one)(dict(values))

    @contextmanager
    def _globals(self) -> Iterator[None]:
        """Compute in double precision without gradients; leave parameters, validation and random state as they were."""
        with globals_kept(), torch.no_grad(), defaults(torch.float64, self.device), global_stream(new_generator(0)):
            yield


# Parameters of distributions that leave their domain at some draws from the prior.

_TOLERANCE = 1e-4  # by which a probability may lie outside of [0, 1] by rounding


class DomainCheck(Messenger):
    """Record for every site how far each parameter lies outside its bounds, at one value of the latent sites."""

    def __init__(self) -> None:
        super().__init__()
        self.excess: dict[tuple[str, str], Tensor] = {}
        self.values: dict[tuple[str, str], Tensor] = {}
        self.places: dict[str, str] = {}
        self.advice: dict[tuple[str, str], str] = {}  # of bounds that may be left, what to say

    def _pyro_post_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if not isinstance(fn, _Subsample) and not is_deterministic(msg):
            self.look(name, fn)

    def look(self, name: str, fn: Any) -> None:
        """Record how far the parameters of a distribution lie outside their bounds."""
        while "base_dist" in vars(fn) and not hasattr(fn, "transforms"):
            fn = fn.base_dist
        for parameter, constraint in fn.arg_constraints.items():
            value = vars(fn).get(parameter)
            lower, upper = getattr(constraint, "lower_bound", None), getattr(constraint, "upper_bound", None)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if isinstance(constraint, constraints.dependent_property) or (lower is None and upper is None):
                continue
            low = -torch.inf if lower is None else lower
            high = torch.inf if upper is None else upper
            outside = torch.maximum(low - value, value - high)
            key = (name, parameter)
            if advice := getattr(constraint, "advice", ""):
                self.advice[key] = advice
            if outside.numel():
                farthest = outside.reshape(-1).argmax(0, keepdim=True)
                self.excess[key] = (outside - _TOLERANCE).amax()
                # An index that is batched, as in value[farthest], is more than vmap of torch 2.6 admits.
                self.values[key] = value.reshape(-1).gather(0, farthest)[0]
            else:
                self.excess[key] = self.values[key] = outside.sum()
            self.places.setdefault(name, _place())


def _place() -> str:
    """Return the line of the model that a messenger is called from."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    code = None if frame is None else frame.f_code
    return "" if code is None else f" in {code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
