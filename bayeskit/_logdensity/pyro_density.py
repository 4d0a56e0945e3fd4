"""A Pyro model as a density over one unconstrained vector, on all data or on minibatches, and as a simulator."""

from __future__ import annotations

import copy
import datetime
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from inspect import signature
from itertools import combinations, takewhile
from math import prod
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import pyro
import torch
from pyro.distributions import Delta, ImproperUniform, Unit
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._core.arguments import (
    Categories,
    Frame,
    arrays_as_tensors,
    bare,
    categories_in,
    in_precision,
    lists_as_tensors,
)
from bayeskit._core.augmented_assignment import AugmentedAssignment
from bayeskit._core.functions_of_users import depth_of, line_of, words_of
from bayeskit._core.inputs import as_numbers, remedy_for_model, warn_user
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import defaults, global_stream
from bayeskit._core.torch_internals import is_batched
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.enumeration import (
    EnumeratedDimensions,
    Factor,
    align,
    conditioned,
    couplings,
    eliminate,
    marginal,
    pack,
    sum_product,
)
from bayeskit._logdensity.pyro_distributions import (
    DoublePrecision,
    batchable_distributions,
    draw_reparameterized,
    draw_values,
)
from bayeskit._logdensity.pyro_runs import (
    Constants,
    Coordinate,
    DomainCheck,
    Reader,
    Record,
    RowTerms,
    Supply,
    dtype_and_device,
    globals_kept,
    is_deterministic,
    is_enumerated,
    tensors_in,
    unsteady,
)
from bayeskit._logdensity.sufficient_statistics import originals_kept
from bayeskit._logdensity.supports import coordinate_log_density
from bayeskit._logdensity.supports import draw_coordinates as draw_coordinate
from bayeskit._logdensity.transforms import bijection, inside, is_misdeclared, support_of
from bayeskit.errors import (
    BayeskitError,
    DataError,
    DataWarning,
    ModelError,
    PrecisionWarning,
    SettingsError,
    ShapeError,
    UnsupportedSiteError,
)

# A Pyro model as a density over one unconstrained vector.
#
# The model is run under one messenger that supplies every continuous latent site's value from a slice of the
# unconstrained vector and records each site's log probability. No trace is built, and the run is a pure function of the
# vector, so ``torch.func.vmap`` and ``make_fx`` can take it.

NO_DATA = "the model has no observed site, so that no observation has a log likelihood"
_PROTOTYPE_DRAWS = 20
_SURE = 5  # draws at which an infinite argument leaves no density
_SELDOM = 0.1  # share of these that may leave bounds which are no domain
#: Maximal number of prior draws in a batch, and its limits in memory; each draw runs the model on all of its data.
_PRIOR_DRAWS_AT_ONCE, _COPIES_OF_DATA, _BYTES_AT_ONCE = 256, 10, 2**28


#: From the coordinates that a chain has for a site, its name and its distribution, to its unconstrained coordinates.
Move = Callable[[str, Any, Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """A continuous latent site and its slice ``[start, stop)`` of the unconstrained vector."""

    name: str
    shape: torch.Size
    unconstrained_shape: torch.Size
    start: int
    stop: int


def _refuse_discrete(name: str, fn: Any, place: str = "") -> None:
    """Raise ``UnsupportedSiteError`` for a discrete latent site that is not marked for enumeration."""
    if not fn.support.is_discrete:
        return
    raise UnsupportedSiteError(
        f"site {name!r} is discrete{place}; "
        + (
            'mark it with infer={"enumerate": "parallel"} to sum it out'
            if fn.has_enumerate_support
            else "its support is infinite; sum it out by hand, or truncate it"
        )
    )


class _OutsideOfDomain(ModelError):
    """Raised for a parameter of a site that a draw from the prior takes out of its domain."""


class _Looked(NamedTuple):
    """How far parameters lie outside their bounds at each draw, their values, by site and parameter, and lines."""

    excess: dict[tuple[str, str], Tensor]
    values: dict[tuple[str, str], Tensor]
    places: dict[str, str]
    advice: dict[tuple[str, str], str]


def _outside_of_domain(name: str, parameter: str, where: str) -> _OutsideOfDomain:
    return _OutsideOfDomain(
        f"the {parameter} of site {name!r} leaves its domain{where} from the prior; give the sites that it depends on "
        "a prior with the right support, such as HalfNormal or LogNormal for a scale, or transform it by exp() or "
        "sigmoid()"
    )


def _refuse_parameters(name: str, fn: Any) -> None:
    """Raise ``ModelError`` if a distribution cannot be drawn from because a parameter lies outside its bounds."""
    check = DomainCheck()
    check.look(name, fn)
    for (_, parameter), far in check.excess.items():
        if bool(far > 0) and (name, parameter) not in check.advice:
            value = float(check.values[name, parameter])
            raise _outside_of_domain(name, parameter, f"{check.places[name]}: it is {value:.4g} at a draw")


def _lists_as_tensors(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model with lists of numbers as tensors."""
    return (
        tuple(lists_as_tensors(value, dtype, device) for value in args),
        {name: lists_as_tensors(value, dtype, device) for name, value in kwargs.items()},
    )


def _names_of_arguments(model: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return what to call the positional arguments of a model in messages."""
    try:
        parameters = [
            p for p in signature(model).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    return [
        f"argument {parameters[place].name!r}" if place < len(parameters) else f"argument {place}"
        for place in range(len(args))
    ]


def _warn_of_codes_apart(categories: Categories) -> None:
    """Warn of arguments that have a category in common, but several codes for it."""
    for (one, labels), (other, others) in combinations(categories.items(), 2):
        common = next((x for x in labels if x in others and labels.index(x) != others.index(x)), None)
        if common is not None:
            warn_user(
                f"{one!r} and {other!r} have the category {common!r} in common, and other codes for it: "
                f"{labels.index(common)} and {others.index(common)}; where they index the same plate, give both the "
                "same categories, by .cat.set_categories(...)",
                DataWarning,
            )
            return


def _where(bad: Tensor, what: str) -> str:
    """Return how many elements of data ``(rows, columns)`` or ``(rows,)`` are bad, and the place of the first."""
    first = bad.nonzero()[0].tolist()
    place = " and ".join(f"{axis} {number}" for axis, number in zip(("row", "column"), first, strict=False))
    if len(first) > 2:
        place = f"index {tuple(first)}"
    return f"holds {int(bad.sum())} {what}, the first in {place}" if first else f"is {what}"


def _breaks(x: Tensor, log_prob: Tensor) -> bool:
    """Tell whether a row of data that is infinite has a log density that is not finite."""
    if x.dim() == 0 or log_prob.dim() == 0 or len(x) != log_prob.shape[-1]:
        return False
    rows = x.isinf().reshape(len(x), -1).any(-1)
    return bool((~log_prob.isfinite()).reshape(-1, len(x)).any(0)[rows].any())


class PyroDensity:
    """A Pyro model with its arguments as a density over one unconstrained vector ``(d,)``."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        if not callable(model):
            raise ModelError(
                f"a Pyro model is a callable that calls pyro.sample; got {type(model).__name__}. For plain densities "
                f"use Target.from_functions; {remedy_for_model(model)}"
            )
        # Those behind a block neither see nor change the sites.
        around = takewhile(lambda handler: not isinstance(handler, BlockMessenger), reversed(_PYRO_STACK))
        if handlers := [type(handler).__name__ for handler in around]:
            raise ModelError(
                f"a model is read inside of Pyro's {', '.join(handlers)}, which would change or record its sites; "
                "apply handlers to the model, as in pyro.condition(model, data=values)"
            )
        self.model = model
        names = _names_of_arguments(model, args)
        given = tuple(arrays_as_tensors(value, name) for name, value in zip(names, args, strict=True))
        named = {name: arrays_as_tensors(value, f"argument {name!r}") for name, value in kwargs.items()}
        by_name = dict(zip(map(bare, names), args, strict=True))
        self.categories = categories_in(by_name | kwargs)
        _warn_of_codes_apart(self.categories)
        self.dtype, self.device = dtype_and_device((model, given, named), of_lists=_lists_as_tensors(given, named))
        self.args, self.kwargs = in_precision(given, self.dtype), in_precision(named, self.dtype)
        self._first_available_dim = -1
        self._enumerates = self._augments = self._widens = False
        records, drawn = self._first_prototype(generator)
        observed = {n: r for n, r in records.items() if r.kind == "observed"}
        seen = [r.value for r in observed.values()] + [r.log_prob for r in records.values() if r.kind == "latent"]
        dtype, device = dtype_and_device(seen, self.dtype, self.device)
        if (dtype, device) != (self.dtype, self.device):
            # Data or prior parameters inside the model set dtype and device of its constants; the model runs again.
            self.dtype, self.device = dtype, device
            self.args, self.kwargs = in_precision(self.args, dtype), in_precision(self.kwargs, dtype)
            records, drawn = self._prototype(generator)
        if self.dtype != torch.float64:
            warn_user(
                "the model is computed in single precision, as its data are; pass them in double precision, for "
                "example by .double(), if rounding matters",
                PrecisionWarning,
            )
        self._check(records)
        self._explain_infinite_arguments(records, lambda: self._prototype(generator))
        depth = max((-f.dim for r in records.values() for f in r.plates), default=0)
        self._enumerates = any(r.kind == "enumerated" for r in records.values())
        self._first_available_dim = -1 - depth
        self.observed_sites = tuple(observed)
        self.summed_sites = tuple(n for n, r in records.items() if r.kind == "enumerated")
        arguments = (model, *_lists_as_tensors(self.args, self.kwargs, self.dtype, self.device))
        self.data = [r.value for r in records.values() if r.kind == "observed"] + tensors_in(arguments)
        self._deterministic_shapes = {n: r.value.shape for n, r in records.items() if r.kind == "deterministic"}
        self.sites = self._layout(records, drawn)
        self._dimensions = {name: _plates_of(record, drawn.get(name)) for name, record in records.items()}
        self.dim = self.sites[-1].stop if self.sites else 0
        if self.dim == 0:
            raise ModelError("the model has no continuous latent site, so there is nothing to sample")
        self._by_name = {site.name: place for place, site in enumerate(self.sites)}

    # -- other data -------------------------------------------------------------------------

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return other arguments as tensors in the model's precision, categories with the codes of the model's own."""
        names = _names_of_arguments(self.model, args)
        given = tuple(arrays_as_tensors(x, name, self.categories) for name, x in zip(names, args, strict=True))
        named = {name: arrays_as_tensors(x, f"argument {name!r}", self.categories) for name, x in kwargs.items()}
        return in_precision(given, self.dtype), in_precision(named, self.dtype)

    def simulate(self, generator: torch.Generator) -> Simulation:
        """Draw parameters from the prior and data given them; raise ``ModelError`` if the data cannot be drawn."""
        simulator = _Simulator(self._constants.params, self._draw)
        with global_stream(generator), self._globals(validate=False), torch.no_grad(), simulator:
            self.model(*self.args, **self.kwargs)
        return Simulation(simulator.latent, simulator.observed)

    def predict(
        self,
        values: Mapping[str, Tensor],
        redrawn: Collection[str],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        reparameterized: bool = False,
    ) -> dict[str, Tensor]:
        """Run the model at values of its latent sites, and draw all else: data, discrete and deterministic sites.

        With ``args`` the model is called with these; ShapeError if a latent site has another shape then. Data that are
        ``reparameterized`` have gradients by the arguments; UnsupportedSiteError if a distribution has no such draws.
        """
        draw_data = draw_reparameterized if reparameterized else draw_values
        simulator = _Simulator(self._constants.params, self._draw, values, redrawn, draw_data)
        gradients = torch.set_grad_enabled(reparameterized and torch.is_grad_enabled())
        with self._globals(validate=False), gradients, batchable_distributions(), simulator:
            if args is None:
                self.model(*self.args, **self.kwargs)
            else:
                self.model(*args, **(kwargs or {}))
        again = {} if args is None else simulator.deterministic
        return simulator.observed | simulator.discrete | simulator.latent | again

    def dimensions(self) -> dict[str, tuple[str | None, ...]]:
        """Return the plate along each dimension of each site's value, None where there is none."""
        return self._dimensions

    @property
    def counted(self) -> dict[str, Tensor]:
        """Which data of a site count, bool ``(*plates)``, of the sites of which a mask leaves some out."""
        return self._constants.counted

    @property
    def whole_numbers(self) -> set[str]:
        """The observed and summed-out sites whose values are whole numbers."""
        return self._constants.whole

    def data_as_given(self) -> dict[str, Tensor]:
        """Return the data of each observed site that is no factor, in double precision, NaN where masked or missing."""
        return self._constants.given

    def constant_factors(self, generator: torch.Generator) -> dict[str, float]:
        """Return the factors that have one value at two draws from the prior, such as the Jacobian of the data."""
        first, again = self._constants.factors, copy.copy(self)
        again._prototype(generator)
        return {name: float(x) for name, x in again._constants.factors.items() if bool(x == first.get(name))}

    def named_data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the data of the observed sites, and the tensors among the arguments that are not these data."""
        observed = dict(zip(self.observed_sites, self.data, strict=False))
        try:
            given = signature(self.model).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            given = {f"argument_{number}": value for number, value in enumerate(self.args)} | dict(self.kwargs)
        seen = {id(value) for value in observed.values()}
        columns = {name: x for v in given.values() if isinstance(v, Frame) for name, x in v.columns.items()}
        single = {name: v for name, v in given.items() if not isinstance(v, Frame)}
        # An argument with the name of a site is its data also where masked NaN has been replaced there. A column that
        # cannot be read is an error in place of a tensor.
        every = (columns | single).items()
        return observed, {k: v for k, v in every if isinstance(v, Tensor) and id(v) not in seen and k not in observed}

    def warn_without_data(self) -> None:
        """Warn if a model that was given tensors observes nothing, and has no factor."""
        if not self.observed_sites and (given := self.named_data()[1]):
            warn_user(
                f"the model has no observed site, so its posterior is its prior; if "
                f"{', '.join(map(repr, given))} are data, pass them as obs=... to pyro.sample",
                DataWarning,
            )

    def given_observed(self, observed: Mapping[str, Tensor]) -> PyroDensity:
        """Return the same model with other data at its observed sites."""
        other = copy.copy(self)
        other._constants = replace(self._constants, observed=self._constants.observed | dict(observed))
        other.data = [*observed.values(), *self.data[len(self.observed_sites) :]]
        return other

    def given_args(self, args: tuple[Any, ...]) -> PyroDensity:
        """Return the same model called with other arguments of the same shapes."""
        other = copy.copy(self)
        other.args = args
        other.data = [argument for argument in args if isinstance(argument, Tensor)]
        return other

    # -- building ---------------------------------------------------------------------------

    def _first_prototype(self, generator: torch.Generator) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model with its arguments as they are, or else with lists of numbers as tensors."""
        try:
            return self._prototype(generator)
        except ModelError as error:
            first = error
            args, kwargs = _lists_as_tensors(self.args, self.kwargs, self.dtype, self.device)
            pairs = zip((*args, *kwargs.values()), (*self.args, *self.kwargs.values()), strict=True)
            if all(new is old for new, old in pairs):
                raise
            given = self.args, self.kwargs
            self.args, self.kwargs = args, kwargs
            try:
                return self._prototype(generator)
            except ModelError as later:
                self.args, self.kwargs = given
                # The mistake is where the run that got further has ended.
                if depth_of(later.__cause__ or later) >= depth_of(first.__cause__ or first):
                    raise
                raise first from first.__cause__

    def _prototype(self, generator: torch.Generator) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model until a prior draw admits the data; return the records of its sites and the drawn values."""
        first: ModelError | None = None
        complaints = set()
        for _ in range(_PROTOTYPE_DRAWS):
            try:
                return self._validated_run(generator)
            except UnsupportedSiteError:
                raise
            except ModelError as error:
                if not isinstance(error.__cause__, ValueError | torch.linalg.LinAlgError):
                    raise
                first = first or error
                complaints.add(str(error))
        # Errors that differ between draws suggest uniform distributions without density at the data.
        if len(complaints) > 1:
            with suppress(ModelError):
                return self._validated_run(generator, admits_uniform=True)
        raise first or ModelError("the model could not be run")

    def _validated_run(
        self, generator: torch.Generator, admits_uniform: bool = False
    ) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model once as the user would, validation on, so that errors can name the site."""
        drawn: dict[str, Any] = {}

        def draw(name: str, fn: Any) -> tuple[Tensor, None]:
            drawn[name] = fn
            return self._draw(fn), None

        self._constants = Constants()
        reader, augmented = Reader(draw, self._constants, True, admits_uniform), AugmentedAssignment()
        widened = DoublePrecision()
        in_double = widened if self.dtype == torch.float64 else nullcontext()
        try:
            with global_stream(generator), self._globals(validate=True), reader, in_double, augmented:
                self.model(*self.args, **self.kwargs)
        except BayeskitError:
            raise
        except Exception as error:
            for name, fn in drawn.items():
                _refuse_discrete(name, fn, line_of(error))
            if isinstance(error, (ValueError, RuntimeError)):
                self._explain_nan_arguments()
            if reader.last is None and isinstance(error, TypeError):
                self._explain_call()
            place = "before its first site" if reader.last is None else f"at or after site {reader.last!r}"
            what = reader.outside_of_support() or words_of(error)
            if isinstance(error, NotImplementedError) and not str(error):
                what = "the model calls a function that is not implemented, such as the density of a distribution"
            raise ModelError(
                f"running the model once failed {place}{line_of(error)}: {what}{self._texts_among_arguments()}"
            ) from error
        self._augments |= augmented.seen
        self._widens = widened.seen
        return reader.records, drawn

    def _check(self, records: dict[str, Record]) -> None:
        if not records:
            raise ModelError(
                "calling the model reached no pyro.sample statement; is it a Pyro model? "
                "For plain densities use Target.from_functions"
            )
        observed = [r for r in records.values() if r.kind == "observed"]
        if observed and all(r.log_prob is not None and not r.log_prob.numel() for r in observed):
            raise DataError("all plates of the observed sites have size zero; give at least one observation")
        if any(r.log_prob.isnan().any() for r in observed if r.log_prob is not None):
            self._explain_nan_arguments()
        if any(r.kind == "enumerated" for r in records.values()):
            # Enumeration gives the dimensions left of the plates a meaning, so none may be undeclared.
            for record in records.values():
                if record.log_prob is not None:
                    self._pack(record)

    def _texts_among_arguments(self) -> str:
        """Return a hint at an argument that is a column of texts or dates, or ""."""
        named = zip(_names_of_arguments(self.model, self.args), self.args, strict=True)
        for name, value in (*named, *((f"argument {name!r}", value) for name, value in self.kwargs.items())):
            if isinstance(value, (list, tuple)) or (hasattr(value, "__array__") and not isinstance(value, Tensor)):
                first = next(iter(value), None) if len(value) else None
                if isinstance(first, (str, datetime.date, datetime.timedelta)):
                    try:
                        as_numbers(name, value)
                    except DataError as error:
                        return f". Note that {error.args[0]}"
        return ""

    def _explain_call(self) -> None:
        """Raise ``ModelError`` if the model cannot be called with its arguments."""
        try:
            signature(self.model).bind(*self.args, **self.kwargs)
        except TypeError as error:
            kinds = [type(x).__name__ for x in self.args] + [f"{k}={type(x).__name__}" for k, x in self.kwargs.items()]
            raise ModelError(
                f"the model cannot be called with ({', '.join(kinds)}): {error}; pass its arguments one by one, "
                "as in Target.from_pyro(model, x, y), not in a tuple or as args="
            ) from error
        except ValueError:
            return  # it has no signature, as functions in C

    def _explain_nan_arguments(self) -> None:
        if self._constants.observed:
            return  # NaN in the arguments is then masked as missing, and not the cause of the error
        for label, value in self._named_tensors():
            if value.isnan().any():
                raise DataError(f"{label} of the model {_where(value.isnan(), 'NaN')}; drop or impute missing data")

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the arguments, and of columns of data frames, that are tensors of real numbers."""
        pairs = [
            *zip(_names_of_arguments(self.model, self.args), self.args, strict=True),
            *((f"argument {name!r}", value) for name, value in self.kwargs.items()),
        ]
        for label, value in pairs:
            columns = value.columns.items() if isinstance(value, Frame) else [("", value)]
            for column, x in columns:
                if isinstance(x, Tensor) and x.is_floating_point():
                    yield f"column {column!r} of {label}" if column else label, x

    def _explain_infinite_arguments(self, records: Mapping[str, Record], again: Callable[[], Any]) -> None:
        """Raise ``DataError`` if rows of an infinite argument have no density at several draws from the prior."""
        infinite = [(label, x) for label, x in self._named_tensors() if x.isinf().any()]
        for _ in range(_SURE if infinite else 0):
            broken = [r.log_prob for r in records.values() if r.kind == "observed" and r.log_prob is not None]
            infinite = [(label, x) for label, x in infinite if any(_breaks(x, log_prob) for log_prob in broken)]
            if infinite:
                records = again()[0]
        for label, x in infinite:
            raise DataError(
                f"{label} of the model {_where(x.isinf(), 'infinite values')}, and the likelihood is zero or undefined "
                "there; correct these rows, or leave them out"
            )

    def _layout(self, records: dict[str, Record], drawn: dict[str, Any]) -> tuple[Site, ...]:
        sites, start = [], 0
        for record in records.values():
            if record.kind != "latent":
                continue
            fn = drawn[record.name]
            try:
                _refuse_discrete(record.name, fn)
                transform = bijection(support_of(fn))
                unconstrained = transform.inv(record.value).shape
                if not transform(record.value.new_zeros(unconstrained)).isfinite().all():
                    raise NotImplementedError("an interval of infinite length")  # torch: GeneralizedPareto
            except (NotImplementedError, KeyError) as error:
                why = "for which no bijection from unconstrained space is known"
                if is_misdeclared(fn):
                    why = "but its transforms reach a part of that support only"
                raise UnsupportedSiteError(
                    f"site {record.name!r} has support {fn.support}, {why}; reparameterise it (pyro.infer.reparam), or "
                    "draw the base variable and make the rest a deterministic site"
                ) from error
            stop = start + prod(unconstrained)
            sites.append(Site(record.name, record.value.shape, torch.Size(unconstrained), start, stop))
            start = stop
        return tuple(sites)

    # -- running ----------------------------------------------------------------------------

    @contextmanager
    def _globals(self, validate: bool) -> Iterator[None]:
        """Set dtype, device and validation for a run of the model, and leave every global as it was."""
        widened = DoublePrecision() if self._widens else nullcontext()
        with globals_kept(), pyro.validation_enabled(validate), defaults(self.dtype, self.device), widened:
            yield

    def _run(
        self, supply: Supply, enumerate_sites: bool = True, likelihood: RowTerms = RowTerms.EACH
    ) -> dict[str, Record]:
        return self._call(supply, enumerate_sites, likelihood)[0].records

    def _call(
        self, supply: Supply, enumerate_sites: bool = True, likelihood: RowTerms = RowTerms.EACH
    ) -> tuple[Reader, Any]:
        reader = Reader(supply, self._constants, likelihood=likelihood)
        enumerating = self._enumerates and enumerate_sites
        outer = EnumeratedDimensions(first_available_dim=self._first_available_dim) if enumerating else nullcontext()
        augmented = AugmentedAssignment() if self._augments else nullcontext()
        kept = originals_kept() if likelihood is RowTerms.SUMS else nullcontext()
        with self._globals(validate=False), batchable_distributions(), kept, outer, reader, augmented:
            returned = self.model(*self.args, **self.kwargs)
        return reader, returned

    def _from_vector(self, u: Tensor, move: Move | None = None) -> Supply:
        # In one operation: the gradient of each separate slice would be a whole vector, mostly of zeros.
        return self._from_parts(u.split([site.stop - site.start for site in self.sites]), move)

    def _from_parts(self, parts: Sequence[Tensor], move: Move | None = None) -> Supply:
        def supply(name: str, fn: Any) -> tuple[Tensor, Coordinate]:
            place = self._place(name)
            site = self.sites[place]
            transform = bijection(support_of(fn))
            x = parts[place].reshape(site.unconstrained_shape)
            if move is not None:
                x = move(name, fn, x)
            value = transform(x)
            if value.shape != site.shape:
                raise UnsupportedSiteError(
                    f"site {name!r} had shape {tuple(site.shape)} and now has {tuple(value.shape)}; "
                    "the shape must not change between runs, and the support must not depend on a summed-out site"
                )
            jacobian = transform.log_abs_det_jacobian(x, value)
            excess = jacobian.dim() - (len(site.shape) - fn.event_dim)
            if excess > 0:
                jacobian = jacobian.flatten(-excess).sum(-1)
            return value, Coordinate(jacobian, coordinate_log_density(fn, x))

        return supply

    def _place(self, name: str) -> int:
        if name not in self._by_name:
            raise unsteady(name)
        return self._by_name[name]

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(log_prior, log_likelihood)`` at one vector ``u`` of shape ``(dim,)``."""
        return self._joint_of(u, self._from_vector(u))

    def joint_of_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what ``joint`` does, from the coordinates of each site: derivatives by some leave the others out."""
        return self._joint_of(parts[0], self._from_parts(parts))

    def joint_moved(self, v: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """Return what ``joint`` does at the vector to which ``move`` takes the coordinates ``v`` ``(dim,)``."""
        return self._joint_of(v, self._from_vector(v, move))

    def run_moved(self, v: Tensor, move: Move, enumerate_sites: bool = True) -> None:
        """Run the model only, for what ``move`` sees of the distributions of its latent sites, in model order."""
        self._run(self._from_vector(v, move), enumerate_sites)

    def rounding(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of log density ``()`` if rounded values move inside, and the moved sites ``(sites,)``."""
        # A prior density in its unconstrained coordinate does not change; a hierarchical or user-defined prior may.
        supply, moved = self._from_vector(u), {}

        def nudged(name: str, fn: Any) -> tuple[Tensor, Coordinate | None]:
            value, coordinate = supply(name, fn)
            new = inside(support_of(fn), value)
            moved[name] = (new != value).any()
            return new, coordinate

        there, here = (torch.stack(parts) for parts in (self._joint_of(u, nudged), self.joint(u)))
        change = torch.where(there == here, 0.0, there - here).sum()  # an unchanged infinity is no change
        return change, torch.stack([moved[site.name] for site in self.sites])

    def _joint_of(self, u: Tensor, supply: Supply) -> tuple[Tensor, Tensor]:
        # Summed-out sites belong to rows.
        reader = self._call(supply, likelihood=RowTerms.EACH if self._enumerates else RowTerms.SUMS)[0]
        prior, likelihood = self._joint_of_records(u, reader.records)
        for where in reader.ruled_out:
            likelihood = torch.where(where, -torch.inf, likelihood)
        return prior, likelihood

    def _joint_of_records(self, u: Tensor, records: dict[str, Record]) -> tuple[Tensor, Tensor]:
        absent = [s.name for s in self.sites if s.name not in records]
        if absent:
            raise unsteady(absent[0])
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

    def prior_terms(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log prior ``()`` of each latent site at one vector ``u``, if no summed-out site determines it."""
        latent = [r for r in self._run(self._from_vector(u)).values() if r.kind == "latent" and r.log_prob is not None]
        if not self._enumerates:
            return {r.name: cast(Tensor, r.log_prob).sum() for r in latent}
        factors = {r.name: self._pack(r) for r in latent}
        return {name: factor.tensor.sum() for name, factor in factors.items() if not factor.variables}

    def normal_prior(self, name: str, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return mean ``(m,)`` and covariance ``(m, m)`` of a site whose prior is multivariate normal, else raise."""
        supply, found = self._from_parts(parts), dict[str, Any]()

        def noted(site: str, fn: Any) -> tuple[Tensor, Coordinate | None]:
            found[site] = fn
            return supply(site, fn)

        self._run(noted)
        fn = found[name]
        if not isinstance(fn, torch.distributions.MultivariateNormal) or fn.batch_shape:
            raise ModelError(f"the prior of site {name!r} is no multivariate normal distribution")
        return fn.loc, fn.covariance_matrix

    def check_repeatable(self, u: Tensor, generator: torch.Generator) -> None:
        """Refuse a model whose density at one vector ``u`` differs from call to call."""
        with global_stream(generator), torch.no_grad():
            try:
                first, second = torch.stack(self.joint(u)), torch.stack(self.joint(u))
            except UNTRACEABLE:
                return  # reported where the model is batched
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ModelError(
                f"the model's log density differs between two calls at one vector: {float(first.sum()):.6g} and "
                f"{float(second.sum()):.6g}; something random is left in it, such as a site behind poutine.block, "
                "dropout, or torch.rand. Remedy: make it a site, or fix its value"
            )

    def check_parameters(self, generator: torch.Generator, batched: bool) -> None:
        """Refuse a model in which a draw from the prior takes a parameter, such as a scale, out of its domain."""
        found = self._parameters_at_once(generator) if batched else None
        excess, values, places, advice = found or self._parameters_one_by_one(generator)
        for (name, parameter), far in excess.items():
            bad = far > 0
            if (name, parameter) in advice:
                if float(bad.double().mean()) > _SELDOM:
                    drawn = f"at {int(bad.sum())} of {len(bad)} draws from the prior"
                    warn_user(f"the {parameter} of site {name!r} are {drawn} {advice[name, parameter]}", DataWarning)
            elif bool(bad.any()):
                value = float(values[name, parameter][bad][0])
                where = f"{places[name]}: it is {value:.4g} at {int(bad.sum())} of {len(bad)} draws"
                raise _outside_of_domain(name, parameter, where)

    def _parameters_at_once(self, generator: torch.Generator) -> _Looked | None:
        """Return what the check finds at draws from the prior; None if the model cannot be batched there."""
        check = DomainCheck()

        def outside(u: Tensor) -> tuple[dict[tuple[str, str], Tensor], dict[tuple[str, str], Tensor]]:
            nonlocal check
            with DomainCheck() as check:
                self._run(self._from_vector(u))
            return check.excess, check.values

        try:
            vectors = self.prior_vectors(_PROTOTYPE_DRAWS, generator, True)
            excess, values = torch.func.vmap(outside, chunk_size=self._prior_draws_at_once())(vectors)
        except _OutsideOfDomain:
            raise
        except UNTRACEABLE:
            return None
        return _Looked(excess, values, check.places, check.advice)

    def _parameters_one_by_one(self, generator: torch.Generator) -> _Looked:
        """Return what the check finds at single draws from the prior; a run that fails tells of the sites before."""
        checks = [DomainCheck() for _ in range(_PROTOTYPE_DRAWS)]
        for check in checks:
            try:
                with global_stream(generator), torch.no_grad(), check:
                    self.prior_vector({})
            except _OutsideOfDomain:
                raise
            except UNTRACEABLE:
                continue  # reported elsewhere
        keys = dict.fromkeys(key for check in checks for key in check.excess)
        return _Looked(
            {key: torch.stack([check.excess[key] for check in checks if key in check.excess]) for key in keys},
            {key: torch.stack([check.values[key] for check in checks if key in check.values]) for key in keys},
            {name: place for check in checks for name, place in check.places.items()},
            {key: advice for check in checks for key, advice in check.advice.items()},
        )

    def _factors(
        self, records: dict[str, Record]
    ) -> tuple[list[tuple[str, Factor]], dict[int, frozenset[str]], dict[int, str]]:
        home = {r.variable: frozenset(f.name for f in r.plates) for r in records.values() if r.variable is not None}
        names = {r.variable: r.name for r in records.values() if r.variable is not None}
        factors = [(r.kind, self._pack(r)) for r in records.values() if r.log_prob is not None]
        return factors, home, names

    def _pack(self, record: Record) -> Factor:
        plates = {f.dim: (f.name, f.size) for f in record.plates}
        return pack(record.name, cast(Tensor, record.log_prob), plates, record.dim_to_id, self._first_available_dim)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation at one vector ``u``, by observed site."""
        if not self.observed_sites:
            raise ModelError(NO_DATA)
        records = self._run(self._from_vector(u))
        if not self._enumerates:
            return {n: records[n].log_prob for n in self.observed_sites}  # type: ignore[misc]
        _, home, names = self._factors(records)
        packed = {r.name: self._pack(r) for r in records.values() if r.log_prob is not None}
        result = {}
        for name in self.observed_sites:
            mine = packed[name]
            joined, variables, coupled = couplings(packed, name, self.observed_sites, home)
            if coupled or any(factor.plates != mine.plates for factor in joined):
                sites = ", ".join(sorted(repr(names[v]) for v in variables))
                plates = dict.fromkeys(frame.name for v in variables for frame in records[names[v]].plates)
                remedy = f"; leave out groups of them, as by={next(iter(plates))!r}" if plates else ""
                raise ModelError(
                    f"the observations of site {name!r} are coupled by the summed-out sites {sites}, "
                    f"so they have no pointwise log likelihood{remedy}"
                )
            order = tuple(f.name for f in sorted(records[name].plates, key=lambda f: f.dim))
            result[name] = align(eliminate(joined, mine.plates, home), order)
            if len(joined) > 1:
                # Summed-out sites have their probability given the continuous sites that depend on them.
                result[name] = result[name] - align(eliminate(joined[1:], mine.plates, home), order)
        return result

    def by_plate(self, u: Tensor, plate: str) -> Tensor:
        """Return the log likelihood of all observations in each element of a plate ``(size,)``, at one vector ``u``."""
        records = self._run(self._from_vector(u))
        for record in records.values():
            concerned = record.kind in ("observed", "enumerated") and record.log_prob is not None
            if concerned and all(frame.name != plate for frame in record.plates):
                raise ModelError(
                    f"site {record.name!r} is outside of plate {plate!r}, so that the elements of the plate are "
                    "coupled or leave observations out; move the site into the plate, or leave out by another plate"
                )
        labelled, home, names = self._factors(records)
        inside = [(kind, factor) for kind, factor in labelled if kind != "latent" or factor.variables]
        result = sum_product([factor for _, factor in inside], home, names, keep=(plate,))
        if any(kind == "latent" for kind, _ in inside):
            # Continuous sites that depend on summed-out ones belong to the prior, with the sum over these.
            prior = [factor for kind, factor in inside if kind != "observed"]
            result = result - sum_product(prior, home, names, keep=(plate,))
        return result

    @property
    def sums_out(self) -> bool:
        """Whether the model has discrete sites that are summed out."""
        return self._enumerates

    def discrete(self, u: Tensor, draw: bool) -> dict[str, Tensor]:
        """Draw the summed-out sites given ``u`` ``(d,)`` and the data, or return the probabilities of their values."""
        records = self._run(self._from_vector(u))
        labelled, home, names = self._factors(records)
        factors = [factor for _, factor in labelled]
        # Sites outside of plates come first: given these, the elements of a plate are independent.
        summed = sorted((r for r in records.values() if r.variable is not None), key=lambda r: len(r.plates))
        found = {}
        for record in summed:
            variable = cast(int, record.variable)
            plates = sorted(record.plates, key=lambda frame: frame.dim)
            depth = next(-dim for dim, v in record.dim_to_id.items() if v == variable)
            values = record.value.reshape(-1, *record.value.shape[depth:])
            zeros = u.new_zeros([frame.size for frame in plates] + [len(values)])
            weights = Factor(zeros, (*(frame.name for frame in plates), variable), home[variable])
            probabilities = marginal(factors, home, names, variable, weights)
            sizes = {frame.dim: frame.size for frame in plates}
            shape = [sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)]
            if draw:
                # The first of independent exponential waiting times with these rates.
                index = (probabilities / -torch.rand(zeros.shape, dtype=u.dtype, device=u.device).log()).argmax(-1)
                chosen = Factor(index, weights.labels[:-1], home[variable])
                factors = [conditioned(factor, variable, chosen) for factor in factors]
                found[record.name] = values[index].reshape([*shape, *values.shape[1:]])
            else:
                found[record.name] = probabilities.reshape([*shape, len(values)])
        return {name: found[name] for name in records if name in found}

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the constrained values of the sites at ``u`` ``(d,)``, except those that need a summed-out site."""
        records = self._run(self._from_vector(u), likelihood=RowTerms.NONE)
        shapes = self._deterministic_shapes if deterministic else {}
        return {
            r.name: r.value
            for r in records.values()
            if r.kind == "latent" or (r.kind == "deterministic" and shapes.get(r.name) == r.value.shape)
        }

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained| at one vector ``u``, masked entries included."""
        supply, parts = self._from_vector(u), [u.new_zeros(())]

        def noted(name: str, fn: Any) -> tuple[Tensor, Coordinate | None]:
            value, coordinate = supply(name, fn)
            if coordinate is not None:
                parts.append(coordinate.jacobian.sum())
            return value, coordinate

        self._run(noted, likelihood=RowTerms.NONE)
        return torch.stack(parts).sum()

    @property
    def improper_sites(self) -> tuple[str, ...]:
        """Sites whose prior is flat or masked: their draws do not follow their density."""
        return tuple(sorted(self._constants.improper))

    def returned(self, u: Tensor) -> Any:
        """Return the return value of the model at one vector ``u``."""
        return self._call(self._from_vector(u), enumerate_sites=False)[1]

    def vector(self, values: Mapping[str, Tensor], otherwise: Tensor | None = None, *, check: bool = True) -> Tensor:
        """Return the unconstrained vector of one set of values; sites without a value keep theirs in ``otherwise``.

        Without ``check``, the vector of a value outside of its support is arbitrary; under vmap nothing can be checked.
        """
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            if otherwise is not None and name not in values:
                site = self.sites[self._place(name)]
                pieces[name] = otherwise[site.start : site.stop]
                return self._from_vector(otherwise)(name, fn)[0], None
            value, support = values[name], support_of(fn)
            if check and not support.check(value).all():
                raise DataError(f"the value of site {name!r} lies outside its support {support}: {value}")
            pieces[name] = bijection(support).inv(value).reshape(-1)
            return value, None

        self._run(supply, likelihood=RowTerms.NONE)
        return torch.cat([pieces[s.name] for s in self.sites])

    def _draw(self, fn: Any, shape: tuple[int, ...] = ()) -> Tensor:
        # A module may hold priors made before the dtype of the data was known.
        return draw_values(fn, shape).to(self.dtype)

    def _draw_with_coordinate(self, fn: Any, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draw values and their unconstrained coordinates, which are not rounded to an end of the support."""
        transform = bijection(support_of(fn))
        x = draw_coordinate(fn, torch.Size(shape))
        if x is None:
            value = self._draw(fn, shape)
            return value, transform.inv(value)
        x = x.to(self.dtype)
        return transform(x), x

    def probe(self, generator: torch.Generator) -> Tensor:
        """Draw a prior vector ``(d,)``, if possible one at which the model can factorise its matrices."""
        with global_stream(generator), torch.no_grad():
            for _ in range(_PROTOTYPE_DRAWS):
                with suppress(torch.linalg.LinAlgError):
                    return self.prior_vector({}, whole=True).to(self.dtype)
        # Raises ModelError where a latent site needs the matrix.
        return self.prior_vectors(1, generator, batched=False)[0]

    def prior_vector(self, given: Mapping[str, tuple[Tensor, Tensor]], whole: bool = False) -> Tensor:
        """Draw a prior vector ``(d,)`` by the global stream, except the values and coordinates ``given``."""
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            try:
                value, x = given[name] if name in given else self._draw_with_coordinate(fn)
            except RuntimeError:
                _refuse_parameters(name, fn)
                raise
            pieces[name] = x.reshape(-1)
            return value, None

        try:
            self._run(supply, False, RowTerms.EACH if whole else RowTerms.NONE)
        except torch.linalg.LinAlgError:
            # If only the likelihood cannot factorise a matrix, the prior draw is still valid.
            if whole or any(site.name not in pieces for site in self.sites):
                raise
        if odd := pieces.keys() ^ self._by_name.keys():
            raise unsteady(min(odd))
        return torch.cat([pieces[s.name].to(self.device) for s in self.sites])

    def prior_draws(self, num_draws: int, generator: torch.Generator, batched: bool) -> Tensor:
        """Draw vectors from a prior that is proper, shape ``(num_draws, dim)``."""
        if improper := self.improper_sites:
            raise SettingsError(
                f"the prior of site {improper[0]!r} is improper and cannot be drawn from; choose a proper prior, or "
                "call bayeskit.sample, which draws from the posterior only"
            )
        return self.prior_vectors(num_draws, generator, batched)

    def prior_vectors(self, num_draws: int, generator: torch.Generator, batched: bool) -> Tensor:
        """Draw vectors by the sampling methods of the sites, ``(num_draws, dim)``: from the prior if it is proper."""
        with global_stream(generator):
            if batched:
                # Some of torch's samplers do not support vmap; the loop below is slower and always works.
                with suppress(*UNTRACEABLE):
                    given = self.root_draws(num_draws)
                    dummy = torch.zeros(num_draws, device=self.device)
                    draw = torch.func.vmap(
                        lambda values, _: self.prior_vector(values),
                        randomness="different",
                        chunk_size=self._prior_draws_at_once(),
                    )
                    return draw(given, dummy).to(self.dtype).detach()
            try:
                rows = [self.prior_vector({}) for _ in range(num_draws)]
            except torch.linalg.LinAlgError as error:
                raise ModelError(
                    f"a draw from the prior gives a matrix that cannot be factorised{line_of(error)}, and a later site "
                    "needs it; choose a prior with less mass near singular matrices, or add a small number to the "
                    "diagonal"
                ) from error
            return torch.stack(rows).to(self.dtype).detach()

    def _prior_draws_at_once(self) -> int:
        size = _COPIES_OF_DATA * sum(x.numel() * x.element_size() for x in self.data)
        return max(1, min(_PRIOR_DRAWS_AT_ONCE, _BYTES_AT_ONCE // max(size, 1)))

    def root_draws(self, num_draws: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Draw values and coordinates ``(num_draws, ...)`` of the sites whose prior depends on no other latent site."""
        base: dict[str, Tensor] = {}

        def draw(name: str, fn: Any) -> tuple[Tensor, None]:
            base[name] = self._draw(fn)
            return base[name], None

        self._run(draw, False, RowTerms.NONE)
        roots: dict[str, Any] = {}

        # With every latent and discrete value batched, a distribution that depends on any has a batched density.
        def probe(batched: dict[str, Tensor]) -> Tensor:
            def supply(name: str, fn: Any) -> tuple[Tensor, None]:
                if not is_batched(fn.log_prob(base[name])):
                    roots[name] = fn
                return batched[name], None

            self._run(supply, False, RowTerms.NONE)
            return next(iter(batched.values())).sum()

        stacked = {name: torch.stack([value, value]) for name, value in base.items()}
        torch.func.vmap(probe, randomness="different")(stacked)
        with self._globals(validate=False):
            return {name: self._draw_with_coordinate(fn, (num_draws,)) for name, fn in roots.items()}


# Terms of a model's likelihood that are densities of single observations.


@runtime_checkable
class FactorTerms(Protocol):
    """A model that knows the terms of its factors."""

    def factor_terms(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return log likelihoods ``(*batch, n)`` of distinct data and their counts ``(n,)``, by ``pyro.factor``."""
        ...


class LikelihoodParts(NamedTuple):
    """Names of the observed sites of a model that are factors or scaled."""

    factors: tuple[str, ...]  # pyro.factor outside of every plate
    scaled: tuple[str, ...]  # under poutine.scale
    model: FactorTerms | None  # that knows the terms of its factors


class _Looker(Messenger):
    def __init__(self) -> None:
        super().__init__()
        self.factors: list[str] = []
        self.scaled: list[str] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample) or is_deterministic(msg) or not msg["is_observed"]:
            return
        if isinstance(msg["fn"], Unit) and not any(f.vectorized for f in msg["cond_indep_stack"]):
            self.factors.append(msg["name"])
        if bool((torch.as_tensor(msg["scale"]) != 1).any()):
            self.scaled.append(msg["name"])


def likelihood_parts(density: PyroDensity) -> LikelihoodParts:
    """Run the model once and return its factors and its scaled sites."""
    looker = _Looker()
    start = torch.zeros(density.dim, dtype=density.dtype, device=density.device)
    with process_state(), torch.no_grad(), looker:
        density.joint(start)
    model = density.model if isinstance(density.model, FactorTerms) else None
    return LikelihoodParts(tuple(looker.factors), tuple(looker.scaled), model)


# A Pyro model whose likelihood is estimated from chosen rows of one plate.

_REMEDY = 'write "with pyro.plate(name, size, subsample_size=...) as rows" and index every observation with rows'


class _Rows(Messenger):
    """Supply the rows of one plate, and record the sites inside and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        # Entered inside the density's own messenger, this one processes each site first.
        self.plate: str | None = None
        self.indices: Tensor | None = None
        self.weights: Tensor | None = None  # of the rows, in place of N / B
        self.device = torch.device("cpu")
        self.sizes: dict[str, tuple[int, int | None]] = {}  # by plate: size, and the model's subsample_size
        self.local: set[str] = set()  # deterministic sites inside the plate
        self.enumerated: set[str] = set()
        self.outside: set[str] = set()  # enumerated and observed sites that the plate does not scale

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], _Subsample):
            self._supply(msg)
            return
        name = msg["name"]
        frame = next((f for f in msg["cond_indep_stack"] if self._is_subsampled(f)), None)
        deterministic = is_deterministic(msg)
        if frame is None:
            if is_enumerated(msg) or (msg["is_observed"] and not deterministic):
                self.outside.add(name)
        elif deterministic:
            self.local.add(name)
        elif not msg["is_observed"] and not is_enumerated(msg):
            raise UnsupportedSiteError(
                f"latent site {name!r} is inside the subsampled plate {frame.name!r}, so a minibatch would see "
                "only some of its values; move it out of the plate, integrate it out, or sample with the full data"
            )
        if is_enumerated(msg):
            self.enumerated.add(name)
        if frame is not None and self.enumerated:
            # A sum over a discrete site must see plain probabilities; the estimate is scaled after the sum.
            msg["scale"] = msg["scale"] * frame.size / frame.full_size
        elif frame is not None and self.weights is not None and not deterministic:
            weights = self.weights.reshape(-1, *[1] * (-1 - frame.dim))
            msg["scale"] = msg["scale"] * frame.size / frame.full_size * weights

    def _is_subsampled(self, frame: Any) -> bool:
        if frame.name == self.plate:
            return True
        return frame.full_size is not None and frame.full_size > frame.size

    def _supply(self, msg: Any) -> None:
        name, size, fixed = msg["name"], int(msg["fn"].size), msg["fn"].subsample_size
        if msg["value"] is not None:
            raise ModelError(
                f"plate {name!r} has its own subsample=, so no other rows can be supplied; pass subsample_size= instead"
            )
        if fixed is not None and fixed > size:
            raise ModelError(f"plate {name!r} has subsample_size={fixed}, but only {size} rows; take at most {size}")
        self.sizes[name] = (size, fixed)
        if name == self.plate:
            msg["value"], msg["stop"] = self.indices, True
        elif fixed is not None and fixed < size:
            msg["value"], msg["stop"] = torch.arange(fixed, device=self.device), True


def _on_rows(rows: _Rows, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with rows:
        model(*args, **kwargs)


class SubsampledDensity:
    """A Pyro model as a density of single vectors, with the likelihood estimated from rows of one plate."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plate: str | None,
        batch_size: int | None,
        generator: torch.Generator,
    ) -> None:
        self._rows = rows = _Rows()
        # Not a closure: a copy of the density has rows of its own.
        on_rows = functools.partial(_on_rows, rows, model)
        self._density = PyroDensity(on_rows if callable(model) else model, args, kwargs, generator)
        self.sites, self.dim = self._density.sites, self._density.dim
        self.dtype, self.device, self.data = self._density.dtype, self._density.device, self._density.data
        rows.device = self.device
        rows.plate = _choose_plate(rows.sizes, plate, batch_size)
        self.num_data, fixed = rows.sizes[rows.plate]  # N
        self.fixed = fixed is not None and fixed < self.num_data  # the model fixes B
        self.batch_size = _choose_batch_size(rows.plate, self.num_data, fixed, batch_size)  # B
        self._check_data()
        self._try_rows(generator)

    def _check_data(self) -> None:
        for tensor in self.data:
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise DataError(
                    f"a tensor of shape {tuple(tensor.shape)} in the model holds NaN; with minibatches, "
                    "drop the rows with missing data or impute them"
                )

    def _try_rows(self, generator: torch.Generator) -> None:
        """Run the model on the first rows, so that a model that ignores the rows fails here."""
        self._rows.outside.clear()
        try:
            with self._at(self._first_rows()):
                self._density.joint(self._density.probe(generator))
        except ModelError:
            raise
        except UNTRACEABLE as error:
            raise ModelError(
                f"the model cannot be evaluated on {self.batch_size} rows of plate {self._rows.plate!r}: {error}; "
                f"{_REMEDY}"
            ) from error
        if self._rows.enumerated and self._rows.outside:
            names = ", ".join(sorted(map(repr, self._rows.outside)))
            raise UnsupportedSiteError(
                f"the model sums out {sorted(self._rows.enumerated)}, but {names} are outside the subsampled plate "
                f"{self._rows.plate!r}; move all summed-out sites and all observed sites into the plate"
            )

    def _first_rows(self) -> Tensor:
        return torch.arange(self.batch_size, device=self.device)

    @contextmanager
    def _at(self, indices: Tensor, weights: Tensor | None = None) -> Iterator[None]:
        self._rows.indices, self._rows.weights = indices, weights
        try:
            yield
        finally:
            self._rows.indices = self._rows.weights = None

    def joint(self, u: Tensor, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the log prior and the estimated log likelihood at ``u`` ``(dim,)`` from rows ``(B,)``.

        A row counts ``N / B`` times, or as often as its weight ``(B,)``.
        """
        if weights is not None and self._rows.enumerated:
            raise UnsupportedSiteError(
                f"the model sums out {sorted(self._rows.enumerated)}, so its rows cannot be weighted; leave weights at "
                "None, and take control= alone"
            )
        with self._at(rows, weights):
            log_prior, log_likelihood = self._density.joint(u)
        if self._rows.enumerated:
            log_likelihood = log_likelihood * (self.num_data / rows.shape[0])
        return log_prior, log_likelihood

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return each site's constrained value; deterministic sites inside the plate are left out."""
        with self._at(self._first_rows()):
            values = self._density.values(u, deterministic)
        return {name: value for name, value in values.items() if name not in self._rows.local}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of one set of constrained values."""
        with self._at(self._first_rows()):
            return self._density.vector(values)

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained| at one vector ``u``, the same for all rows."""
        with self._at(self._first_rows()):
            return self._density.log_jacobian(u)

    @property
    def improper_sites(self) -> tuple[str, ...]:
        """Sites whose prior is flat or masked."""
        return self._density.improper_sites

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw vectors from the prior, shape ``(num_draws, dim)``."""
        with self._at(self._first_rows()):
            return self._density.prior_draws(num_draws, generator, batched=True)


def _choose_plate(sizes: dict[str, tuple[int, int | None]], plate: str | None, batch_size: int | None) -> str:
    subsampled = [name for name, (size, fixed) in sizes.items() if fixed is not None and fixed < size]
    known = ", ".join(map(repr, sizes)) or "none"
    if len(subsampled) > 1:
        raise ModelError(f"plates {subsampled} all subsample their data; only one may do so")
    if plate is not None:
        if plate not in sizes:
            raise ModelError(f"the model has no plate {plate!r}; it has {known}")
        if subsampled and plate != subsampled[0]:
            raise ModelError(
                f"plate {subsampled[0]!r} subsamples its data, so minibatches cannot be taken from {plate!r}"
            )
        return plate
    said = subsampled or [name for name, (_, fixed) in sizes.items() if fixed is not None]
    if len(said) == 1:
        return said[0]
    if not sizes:
        raise ModelError(f"the model has no plate to take minibatches from; {_REMEDY}")
    if batch_size is None:
        raise ModelError(f"no plate of the model subsamples its data (plates: {known}); {_REMEDY}, or give batch_size")
    if len(sizes) > 1:
        raise ModelError(f"the model has the plates {known}; name the plate of the minibatches by plate=...")
    return next(iter(sizes))


def _choose_batch_size(plate: str, num_data: int, fixed: int | None, batch_size: int | None) -> int:
    if fixed is not None and batch_size is not None and fixed != batch_size:
        raise SettingsError(
            f"plate {plate!r} has subsample_size={fixed}, but batch_size={batch_size}; "
            "make them equal, or call the model with subsample_size=None"
        )
    chosen = batch_size if fixed is None else fixed
    if chosen is None:
        raise ModelError(f"plate {plate!r} does not subsample its data; give batch_size")
    if not 1 <= chosen <= num_data:
        raise SettingsError(f"batch_size must lie between 1 and the {num_data} rows of plate {plate!r}, not {chosen}")
    return chosen


# Run a Pyro model forward: parameters from the prior, data from the model, and the model with those data.


class Simulation(NamedTuple):
    """One joint draw of the latent sites and the data of a model."""

    latent: dict[str, Tensor]  # of each continuous latent site
    observed: dict[str, Tensor]  # in place of each observed site's data


def _plates_of(record: Record, fn: Any) -> tuple[str | None, ...]:
    """Return the plate along each dimension of a site's value."""
    shape = record.value.shape
    names = {frame.dim: frame.name for frame in record.plates if frame.dim is not None}
    sizes = {frame.dim: frame.size for frame in record.plates}
    if fn is not None:
        batch = len(shape) - fn.event_dim
    elif record.log_prob is not None:
        batch = min(record.log_prob.dim(), len(shape))
    else:  # of a deterministic site it is not known how many dimensions follow those of the plates
        parts = [shape[: len(shape) - n] for n in range(len(shape))]
        fitting = [len(x) for x in parts if all(len(x) >= -dim and x[dim] == sizes[dim] for dim in names)]
        batch = fitting[0] if len(fitting) == 1 and names else 0
    own = [names.get(i - batch) if sizes.get(i - batch) == shape[i] else None for i in range(batch)]
    return (*own, *[None] * (len(shape) - batch))


class _Simulator(Messenger):
    """Draw the observed sites as well as the latent ones that are not given."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        draw: Callable[[Any], Tensor],
        given: Mapping[str, Tensor] | None = None,
        redrawn: Collection[str] = (),
        draw_data: Callable[[Any], Tensor] = draw_values,
    ) -> None:
        super().__init__()
        self.params, self.draw, self.draw_data = params, draw, draw_data
        self.given = {name: value for name, value in (given or {}).items() if name not in redrawn}
        self.latent: dict[str, Tensor] = {}
        self.observed: dict[str, Tensor] = {}
        self.deterministic: dict[str, Tensor] = {}
        self.discrete: dict[str, Tensor] = {}

    def _pyro_param(self, msg: Any) -> None:
        msg["value"], msg["done"] = self.params[msg["name"]], True

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample):
            return
        if is_deterministic(msg):
            self.deterministic[name] = msg["value"]
        elif name in self.given:
            needed = fn.batch_shape + fn.event_shape
            if self.given[name].shape != needed:
                raise ShapeError(
                    f"site {name!r} has shape {tuple(needed)} with these arguments and {tuple(self.given[name].shape)} "
                    f"in the draws; redraw=[{name!r}] draws it anew from its distribution"
                )
            msg["value"] = self.given[name]
        elif msg["is_observed"]:
            _refuse_what_is_no_distribution(msg)
            msg["value"] = self.observed[name] = _draw_like(name, fn, msg["value"], self.draw_data)
        elif not is_enumerated(msg) and msg["value"] is None:
            msg["value"] = self.latent[name] = self.draw(fn)

    def _pyro_post_sample(self, msg: Any) -> None:
        if is_enumerated(msg):
            self.discrete[msg["name"]] = msg["value"]


def _refuse_what_is_no_distribution(msg: Any) -> None:
    name = msg["name"]
    if isinstance(msg["fn"], Unit):
        raise UnsupportedSiteError(
            f"the factor {name!r} defines a likelihood, but no distribution to draw data from; replace it by "
            "pyro.sample(..., obs=data), or pass simulate=(values, generator) -> args"
        )
    if bool((torch.as_tensor(msg["scale"]) != 1).any()):
        raise ModelError(
            f"the observed site {name!r} is scaled by poutine.scale, so its likelihood is not a distribution of data; "
            "remove the scale, or pass simulate=(values, generator) -> args"
        )


def _draw_like(name: str, fn: Any, value: Any, draw: Callable[[Any], Tensor]) -> Tensor:
    """Draw data of the observed shape, including batch dimensions without a plate."""
    value = torch.as_tensor(value)
    batch = torch.broadcast_shapes(fn.batch_shape, value.shape[: value.dim() - fn.event_dim])
    try:
        drawn = draw(fn if batch == fn.batch_shape else fn.expand(batch))
    except NotImplementedError as error:
        raise UnsupportedSiteError(
            f"the distribution {type(fn).__name__} of the observed site {name!r} cannot be drawn from; "
            "pass simulate=(values, generator) -> args"
        ) from error
    return drawn.to(value.dtype) if value.is_floating_point() and drawn.is_floating_point() else drawn


# Distributions, values, scales and masks of sites in one run of the model.

_KNOWN = ("torch", "pyro", "bayeskit")
"""Packages whose distributions have been tested to be normalised."""


@dataclass(frozen=True)
class WitnessedSite:
    """The distribution, value, scale and mask of one site in a run of the model."""

    name: str
    observed: bool
    distribution: Any
    value: Tensor
    factor: bool  # nothing was sampled, and the model does not name it among its normalised_factors
    own: str | None  # class of the distribution if it is the user's
    scale: Tensor
    masked: float  # share of elements that a mask left out

    @property
    def normalised(self) -> bool:
        """Whether density and draws are right by construction: torch's and Pyro's own distributions, unmasked."""
        return not self.factor and self.masked == 0 and set(_packages(self.distribution)) <= {"torch", "pyro"}


class _Witness(Messenger):
    """Record every site; entered outside the reader, so that it sees the effects of the model's own handlers."""

    def __init__(self, complete: Collection[str]) -> None:
        super().__init__()
        self.parts: list[WitnessedSite] = []
        self._complete = complete

    def _pyro_post_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        self.parts.append(
            WitnessedSite(
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


def parts_of(density: PyroDensity, generator: torch.Generator) -> list[WitnessedSite]:
    """Run the model once at a draw from its prior and return its sites, latent and observed."""
    owner = getattr(density.model, "__self__", density.model)  # of a bound method
    complete = getattr(owner, "normalised_factors", ())
    with process_state(), _Witness([complete] if isinstance(complete, str) else complete) as witness:
        density.probe(generator)
    return list({part.name: part for part in witness.parts}.values())  # of the last draw


def log_integral_of_density(fn: Any, value: Tensor, at_most: int = 20_000_000) -> Tensor | None:
    """Return the log integral of a distribution's density for each element, ``(elements,)``: zero if it is normalised.

    None for several variables, for more than ``at_most`` evaluations, and where the sum has not converged.
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
    """Return the packages of a distribution, of the distributions that it wraps, and of their transforms."""
    return [type(part).__module__.partition(".")[0] for part in _layers(fn)]


def _layers(fn: Any) -> Iterator[Any]:
    while fn is not None:
        yield fn
        yield from getattr(fn, "transforms", ())
        fn = getattr(fn, "__dict__", {}).get("base_dist")


def _own_class(fn: Any) -> str | None:
    """Return the name of the first user-defined class of a distribution, its wrapped distributions and transforms."""
    layers = zip(_layers(fn), _packages(fn), strict=True)
    return next((type(layer).__name__ for layer, package in layers if package not in _KNOWN), None)


def _masked_share(mask: Any, fn: Any) -> float:
    masks = [mask, *(getattr(layer, "_mask", None) for layer in _layers(fn))]
    kept = [torch.as_tensor(one).to(torch.float64).mean() for one in masks if one is not None]
    return max((1.0 - float(share) for share in kept), default=0.0)
