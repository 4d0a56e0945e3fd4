"""A Pyro model as a density over one unconstrained vector.

The model is run under one messenger that supplies every continuous latent
site's value from a slice of the unconstrained vector and records each site's
log probability. No trace is built, and the run is a pure function of the
vector, so ``torch.func.vmap`` and ``make_fx`` can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any, cast

import pyro
import torch
from torch import Tensor

from bayeskit._enumeration import Enumeration, Factor, align, couplings, eliminate, pack, sum_product
from bayeskit._inputs import arrays_as_tensors, lists_as_tensors
from bayeskit._pyro.batching import AugmentedAssignment, batchable_distributions
from bayeskit._pyro.draws import draw
from bayeskit._pyro.inspection import culprit, dtype_and_device, globals_kept, tensors_in, unsteady
from bayeskit._pyro.parameters import DomainCheck
from bayeskit._pyro.reader import Constants, Coordinate, Reader, Record, Supply
from bayeskit._torch import defaults, global_stream
from bayeskit._tracing import UNTRACEABLE
from bayeskit._transforms import bijection, inside, is_misdeclared, support_of
from bayeskit._unconstrained import draw as draw_coordinate
from bayeskit._unconstrained import log_density
from bayeskit.errors import DataError, ModelError, SettingsError, UnsupportedSiteError

PROTOTYPE_DRAWS = 20
#: Prior draws that are made at once; for each of them the whole model runs, with all of its data.
PRIOR_DRAWS_AT_ONCE, COPIES_OF_DATA, BYTES_AT_ONCE = 256, 10, 2**28


@dataclass(frozen=True)
class Site:
    """A continuous latent site and its slice ``[start, stop)`` of the unconstrained vector."""

    name: str
    shape: torch.Size
    unconstrained_shape: torch.Size
    start: int
    stop: int


def refuse_discrete(name: str, fn: Any, place: str = "") -> None:
    """Refuse a latent site that has to be summed out, and nobody has said so.

    Raises
    ------
    UnsupportedSiteError
        With what to write instead.
    """
    if not fn.support.is_discrete:
        return
    raise UnsupportedSiteError(
        f"site {name!r} is discrete{place}; "
        + (
            'mark it with infer={"enumerate": "parallel"} to have it summed out'
            if fn.has_enumerate_support
            else "its support is infinite, so integrate it out by hand or truncate it"
        )
    )


class PyroDensity:
    """A Pyro model with its arguments, read as a density over one unconstrained vector.

    Every method takes and returns single (unbatched) vectors.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        if not callable(model):
            raise ModelError(
                f"a Pyro model is a callable that calls pyro.sample; got {type(model).__name__}. "
                "For plain densities use Target.from_functions"
            )
        self._model = model
        self._args, self._kwargs = arrays_as_tensors(args), arrays_as_tensors(kwargs)
        self.dtype, self.device = dtype_and_device((model, self._args, self._kwargs))
        self._first_available_dim = -1
        self._enumerates = self._augments = False
        records, drawn = self._first_prototype(generator)
        observed = {n: r for n, r in records.items() if r.kind == "observed"}
        seen = [r.value for r in observed.values()] + [r.log_prob for r in records.values() if r.kind == "latent"]
        dtype, device = dtype_and_device(seen, self.dtype, self.device)
        if (dtype, device) != (self.dtype, self.device):
            # The data, or a prior's parameters, are the model's own: now that they are seen, constants follow them too.
            self.dtype, self.device = dtype, device
            records, drawn = self._prototype(generator)
        self._check(records)
        depth = max((-f.dim for r in records.values() for f in r.plates), default=0)
        self._enumerates = any(r.kind == "enumerated" for r in records.values())
        self._first_available_dim = -1 - depth
        self.observed_sites = tuple(observed)
        arguments = (model, self._args, self._kwargs)
        self.data = [r.value for r in records.values() if r.kind == "observed"] + tensors_in(arguments)
        self._deterministic_shapes = {n: r.value.shape for n, r in records.items() if r.kind == "deterministic"}
        self.sites = self._layout(records, drawn)
        self.dim = self.sites[-1].stop if self.sites else 0
        if self.dim == 0:
            raise ModelError("the model has no continuous latent site, so there is nothing to sample")
        self._by_name = {site.name: place for place, site in enumerate(self.sites)}

    # -- building ---------------------------------------------------------------------------

    def _first_prototype(self, generator: torch.Generator) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model with its arguments as they are, or else with lists of numbers as tensors."""
        try:
            return self._prototype(generator)
        except ModelError:
            args = tuple(lists_as_tensors(value) for value in self._args)
            kwargs = {name: lists_as_tensors(value) for name, value in self._kwargs.items()}
            pairs = zip((*args, *kwargs.values()), (*self._args, *self._kwargs.values()), strict=True)
            if all(new is old for new, old in pairs):
                raise
            given = self._args, self._kwargs, self.dtype, self.device
            self._args, self._kwargs = args, kwargs
            self.dtype, self.device = dtype_and_device((self._model, args, kwargs))
            try:
                return self._prototype(generator)
            except ModelError:
                self._args, self._kwargs, self.dtype, self.device = given
            raise

    def _prototype(self, generator: torch.Generator) -> tuple[dict[str, Record], dict[str, Any]]:
        """Run the model until a prior draw admits the data, whose support may depend on it.

        Where none does, and the complaint is another each time, uniform distributions may have no density at the data.
        """
        first: ModelError | None = None
        complaints = set()
        for _ in range(PROTOTYPE_DRAWS):
            try:
                return self._validated_run(generator)
            except UnsupportedSiteError:
                raise
            except ModelError as error:
                if not isinstance(error.__cause__, ValueError | torch.linalg.LinAlgError):
                    raise
                first = first or error
                complaints.add(str(error))
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
        try:
            with global_stream(generator), self._globals(validate=True), reader, augmented:
                self._model(*self._args, **self._kwargs)
        except ModelError:
            raise
        except UNTRACEABLE as error:
            if isinstance(error, DataError):
                raise
            for name, fn in drawn.items():
                refuse_discrete(name, fn, culprit(error))
            self._explain_nan_arguments()
            if reader.last is None and isinstance(error, TypeError):
                self._explain_call()
            place = "before its first site" if reader.last is None else f"at or after site {reader.last!r}"
            what = (
                reader.outside_of_support()
                or str(error)
                or "something that it calls is not implemented, such as the density of a distribution"
            )
            raise ModelError(f"running the model once failed {place}{culprit(error)}: {what}") from error
        self._augments |= augmented.seen
        return reader.records, drawn

    def _check(self, records: dict[str, Record]) -> None:
        if not records:
            raise ModelError(
                "calling the model reached no pyro.sample statement; is it a Pyro model? "
                "For plain densities use Target.from_functions"
            )
        observed = [r for r in records.values() if r.kind == "observed"]
        if not observed:
            raise ModelError(
                "the model has no observed site and no pyro.factor, so its likelihood is empty; "
                "pass obs=data to at least one pyro.sample"
            )
        if any(r.log_prob.isnan().any() for r in observed if r.log_prob is not None):
            self._explain_nan_arguments()
        if any(r.kind == "enumerated" for r in records.values()):
            # Enumeration gives the dimensions left of the plates a meaning, so none may be undeclared.
            for record in records.values():
                if record.log_prob is not None:
                    self._pack(record)

    def _explain_call(self) -> None:
        """Say how a model's arguments are given, where it cannot be called with these."""
        try:
            signature(self._model).bind(*self._args, **self._kwargs)
        except TypeError as error:
            kinds = [type(x).__name__ for x in self._args] + [
                f"{k}={type(x).__name__}" for k, x in self._kwargs.items()
            ]
            raise ModelError(
                f"the model cannot be called with ({', '.join(kinds)}): {error}; its arguments follow it one by one, "
                "as in Target.from_pyro(model, x, y), not in a tuple or as args="
            ) from error
        except ValueError:
            return  # it has no signature, as functions in C

    def _explain_nan_arguments(self) -> None:
        if self._constants.observed:
            return  # NaN in the arguments is then declared missing by a mask, and not what went wrong
        named = [(f"argument {i}", a) for i, a in enumerate(self._args)]
        named += [(f"argument {k!r}", a) for k, a in self._kwargs.items()]
        for label, value in named:
            if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
                first = tuple(value.isnan().nonzero()[0].tolist())
                raise DataError(
                    f"{label} of the model holds {int(value.isnan().sum())} NaN, the first at index {first}; "
                    "drop or impute missing data"
                )

    def _layout(self, records: dict[str, Record], drawn: dict[str, Any]) -> tuple[Site, ...]:
        sites, start = [], 0
        for record in records.values():
            if record.kind != "latent":
                continue
            fn = drawn[record.name]
            try:
                refuse_discrete(record.name, fn)
                transform = bijection(support_of(fn))
                unconstrained = transform.inverse_shape(record.value.shape)
                transform.inv(record.value)
                if not transform(record.value.new_zeros(unconstrained)).isfinite().all():
                    raise NotImplementedError("an interval of infinite length")  # torch: GeneralizedPareto
            except (NotImplementedError, KeyError) as error:
                why = "for which no bijection from unconstrained space is known"
                if is_misdeclared(fn):
                    why = "which torch declares for its transforms although they reach a part of it only"
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
        with globals_kept(), pyro.validation_enabled(validate), defaults(self.dtype, self.device):
            yield

    def _run(self, supply: Supply, enumerate_sites: bool = True) -> dict[str, Record]:
        return self._call(supply, enumerate_sites)[0]

    def _call(self, supply: Supply, enumerate_sites: bool = True) -> tuple[dict[str, Record], Any]:
        reader = Reader(supply, self._constants)
        enumerating = self._enumerates and enumerate_sites
        outer = Enumeration(first_available_dim=self._first_available_dim) if enumerating else nullcontext()
        augmented = AugmentedAssignment() if self._augments else nullcontext()
        with self._globals(validate=False), batchable_distributions(), outer, reader, augmented:
            returned = self._model(*self._args, **self._kwargs)
        return reader.records, returned

    def _from_vector(self, u: Tensor) -> Supply:
        # In one operation, for the gradient of each slice by itself would be a vector of zeros with a few entries.
        parts = u.split([site.stop - site.start for site in self.sites])

        def supply(name: str, fn: Any) -> tuple[Tensor, Coordinate]:
            place = self._place(name)
            site = self.sites[place]
            transform = bijection(support_of(fn))
            x = parts[place].reshape(site.unconstrained_shape)
            value = transform(x)
            if value.shape != site.shape:
                raise UnsupportedSiteError(
                    f"site {name!r} had shape {tuple(site.shape)} and now has {tuple(value.shape)}; "
                    "its shape may not change from run to run, nor its support depend on a summed-out site"
                )
            jacobian = transform.log_abs_det_jacobian(x, value)
            excess = jacobian.dim() - (len(site.shape) - fn.event_dim)
            if excess > 0:
                jacobian = jacobian.flatten(-excess).sum(-1)
            return value, Coordinate(jacobian, log_density(fn, x))

        return supply

    def _place(self, name: str) -> int:
        if name not in self._by_name:
            raise unsteady(name)
        return self._by_name[name]

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(log_prior, log_likelihood)`` at one vector ``u`` of shape ``(dim,)``."""
        return self._joint_of(u, self._from_vector(u))

    def rounding(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return how the log density changes if rounded values move one unit inside, and which sites have any.

        That of a prior in its coordinate does not; those of hierarchies, and of a user's own, may.

        Shapes ``()`` and ``(len(sites),)``, bool.
        """
        supply, moved = self._from_vector(u), {}

        def nudged(name: str, fn: Any) -> tuple[Tensor, Coordinate | None]:
            value, coordinate = supply(name, fn)
            new = inside(support_of(fn), value)
            moved[name] = (new != value).any()
            return new, coordinate

        there, here = (torch.stack(parts) for parts in (self._joint_of(u, nudged), self.joint(u)))
        change = torch.where(there == here, 0.0, there - here).sum()  # infinities that stay are no change
        return change, torch.stack([moved[site.name] for site in self.sites])

    def _joint_of(self, u: Tensor, supply: Supply) -> tuple[Tensor, Tensor]:
        records = self._run(supply)
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

    def check_repeatable(self, u: Tensor, generator: torch.Generator) -> None:
        """Refuse a model whose density at one vector ``u`` differs from call to call."""
        with global_stream(generator), torch.no_grad():
            try:
                first, second = torch.stack(self.joint(u)), torch.stack(self.joint(u))
            except UNTRACEABLE:
                return  # which is told where the model is made a batch
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ModelError(
                f"the model's log density at one vector is {float(first.sum()):.6g}, and then "
                f"{float(second.sum()):.6g}: something random is left in it, such as a site behind poutine.block, "
                "dropout, or torch.rand; make it a site, or fix it"
            )

    def check_parameters(self, generator: torch.Generator) -> None:
        """Refuse a model in which a draw from the prior takes a parameter, such as a scale, out of its domain."""
        try:
            vectors = self.prior_vectors(PROTOTYPE_DRAWS, generator, True)
            check = DomainCheck()

            def outside(u: Tensor) -> tuple[list[Tensor], list[Tensor]]:
                nonlocal check
                with DomainCheck() as check:
                    self._run(self._from_vector(u))
                return list(check.excess.values()), list(check.values.values())

            excess, values = torch.func.vmap(outside, chunk_size=self._prior_draws_at_once())(vectors)
        except UNTRACEABLE:
            return  # a model that cannot be batched is told elsewhere
        for (name, parameter), far, value in zip(check.excess, excess, values, strict=True):
            bad = far > 0
            if bool(bad.any()):
                raise ModelError(
                    f"the {parameter} of site {name!r} leaves its domain{check.places[name]}: it is "
                    f"{float(value[bad][0]):.4g} at {int(bad.sum())} of {len(bad)} draws from the prior; give what it "
                    "depends on a prior of the right sign, such as HalfNormal or LogNormal for a scale, or transform "
                    "it by exp() or sigmoid()"
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
                raise ModelError(
                    f"the observations of site {name!r} are coupled by the summed-out sites {sites}, "
                    "so they have no pointwise log likelihood"
                )
            order = tuple(f.name for f in sorted(records[name].plates, key=lambda f: f.dim))
            result[name] = align(eliminate(joined, mine.plates, home), order)
            if len(joined) > 1:
                # What is summed out has its probability given the continuous sites that depend on it.
                result[name] = result[name] - align(eliminate(joined[1:], mine.plates, home), order)
        return result

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return each site's constrained value at one vector ``u``.

        Deterministic sites that depend on a summed-out site have no single value and are left out.
        """
        records = self._run(self._from_vector(u))
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

        self._run(noted)
        return torch.stack(parts).sum()

    @property
    def improper_sites(self) -> tuple[str, ...]:
        """Sites whose prior is flat or masked: what they draw does not follow their density."""
        return tuple(sorted(self._constants.improper))

    def returned(self, u: Tensor) -> Any:
        """Return what the model itself returns at one vector ``u``."""
        return self._call(self._from_vector(u), enumerate_sites=False)[1]

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of one set of constrained values."""
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            value, support = values[name], support_of(fn)
            if not support.check(value).all():
                raise DataError(f"the value of site {name!r} lies outside its support {support}: {value}")
            pieces[name] = bijection(support).inv(value).reshape(-1)
            return value, None

        self._run(supply)
        return torch.cat([pieces[s.name] for s in self.sites])

    def _draw(self, fn: Any, shape: tuple[int, ...] = ()) -> Tensor:
        # A module may hold priors made before the dtype of the data was known.
        return draw(fn, shape).to(self.dtype)

    def _draw_with_coordinate(self, fn: Any, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draw values and their unconstrained coordinates, in which none is rounded to an end of the support."""
        transform = bijection(support_of(fn))
        x = draw_coordinate(fn, torch.Size(shape))
        if x is None:
            value = self._draw(fn, shape)
            return value, transform.inv(value)
        x = x.to(self.dtype)
        return transform(x), x

    def probe(self, generator: torch.Generator) -> Tensor:
        """Draw one vector from the prior to try the model at, where one of a few draws lets it factorise its matrices.

        Raises
        ------
        ModelError
            If none does, because of a matrix that a latent site needs.
        """
        with global_stream(generator), torch.no_grad():
            for _ in range(PROTOTYPE_DRAWS):
                with suppress(torch.linalg.LinAlgError):
                    return self.prior_vector({}, whole=True).to(self.dtype)
        return self.prior_vectors(1, generator, batched=False)[0]

    def prior_vector(self, given: Mapping[str, tuple[Tensor, Tensor]], whole: bool = False) -> Tensor:
        """Draw one vector from the prior with the global stream; values and coordinates in ``given`` are not drawn.

        ``whole``: the likelihood, too, has to run.
        """
        pieces: dict[str, Tensor] = {}

        def supply(name: str, fn: Any) -> tuple[Tensor, None]:
            value, x = given[name] if name in given else self._draw_with_coordinate(fn)
            pieces[name] = x.reshape(-1)
            return value, None

        try:
            self._run(supply, enumerate_sites=False)
        except torch.linalg.LinAlgError:
            # Where a likelihood cannot factorise the matrix that was drawn, the draw is still one of the prior.
            if whole or any(site.name not in pieces for site in self.sites):
                raise
        return torch.cat([pieces[s.name] for s in self.sites])

    def prior_draws(self, num_draws: int, generator: torch.Generator, batched: bool) -> Tensor:
        """Draw vectors from a prior that is proper, shape ``(num_draws, dim)``."""
        if improper := self.improper_sites:
            raise SettingsError(
                f"the prior of site {improper[0]!r} is improper and cannot be drawn from; take a proper one, "
                "or bayeskit.sample, which draws from the posterior alone"
            )
        return self.prior_vectors(num_draws, generator, batched)

    def prior_vectors(self, num_draws: int, generator: torch.Generator, batched: bool) -> Tensor:
        """Draw vectors from where the sites draw, shape ``(num_draws, dim)``, the prior if that is proper."""
        with global_stream(generator):
            if batched:
                # Some of torch's samplers do not know vmap; the loop below is slower and always right.
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
                    f"a draw from the prior gives a matrix that cannot be factorised{culprit(error)}, and a later site "
                    "needs it; choose a prior with less mass near singular matrices, or add a small number to the "
                    "diagonal"
                ) from error
            return torch.stack(rows).to(self.dtype).detach()

    def _prior_draws_at_once(self) -> int:
        size = COPIES_OF_DATA * sum(x.numel() * x.element_size() for x in self.data)
        return max(1, min(PRIOR_DRAWS_AT_ONCE, BYTES_AT_ONCE // max(size, 1)))

    def root_draws(self, num_draws: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Draw, all at once, the sites whose prior depends on no other latent site.

        Dependence is read off functorch itself: with every latent and discrete
        value batched, a distribution that depends on one has a batched density.
        """
        base: dict[str, Tensor] = {}

        def draw(name: str, fn: Any) -> tuple[Tensor, None]:
            base[name] = self._draw(fn)
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
        with self._globals(validate=False):
            return {name: self._draw_with_coordinate(fn, (num_draws,)) for name, fn in roots.items()}
