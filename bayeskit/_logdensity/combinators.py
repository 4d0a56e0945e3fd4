"""Targets derived from a target: with a reference distribution instead of the prior, or with other data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from bayeskit._compiler import Compile, Cost, Engine
from bayeskit._core.evaluation import Evaluation, Evaluator, tempered
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.density import Constrained, Density
from bayeskit._logdensity.foreign_density import origin_of
from bayeskit._logdensity.pyro_density import PyroDensity, Simulation
from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError, SettingsError

# The same posterior with a reference distribution instead of the prior, for tempering paths that start at it.


class Reference(Protocol):
    """A normalised distribution over unconstrained space."""

    @property
    def parameters(self) -> list[Tensor]:
        """Tensors that determine the distribution."""
        ...

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        ...

    def gradient(self, u: Tensor) -> Tensor:
        """Return the gradient of the log density, ``(*batch, d) -> (*batch, d)``."""
        ...

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw vectors, shape ``(num_draws, d)``."""
        ...


class _RebasedDensity:
    """A density with a reference as prior; the likelihood is the unnormalised posterior over the reference."""

    def __init__(self, density: Density, reference: Reference) -> None:
        self._density, self._reference = density, reference
        self.sites, self.dim = density.sites, density.dim
        self.dtype, self.device = density.dtype, density.device
        self.data = [*density.data, *reference.parameters]

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        log_prior, log_likelihood = self._density.joint(u)
        reference = self._reference.log_prob(u)
        return reference, log_prior + log_likelihood - reference

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return self._density.values(u, deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._density.vector(values)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        raise ModelError("a rebased target has no pointwise log likelihood; use the target that it was made from")


class _OnPath:
    """Evaluators on the path from a reference to a posterior, made of evaluators of the posterior's target."""

    def __init__(self, whole: Target, reference: Reference) -> None:
        self._whole, self._reference = whole, reference

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        evaluate = self._whole.evaluator(num_vectors, num_calls)

        def on_path(u: Tensor, beta: Tensor) -> Evaluation:
            posterior = evaluate(u, torch.ones_like(beta))
            log_reference = self._reference.log_prob(u)
            rest = posterior.log_density - log_reference
            gradient = torch.lerp(self._reference.gradient(u), posterior.gradient, beta.unsqueeze(-1))
            return Evaluation(log_reference, rest, tempered(log_reference, rest, beta), gradient)

        return on_path

    def compiled(self, num_vectors: int) -> None:
        return None

    @property
    def cost(self) -> Cost:
        return self._whole.cost


def rebased(whole: Target, reference: Reference) -> Target:
    """Return ``whole`` with ``reference`` as prior and an unchanged product of prior and likelihood."""
    return Target(
        _RebasedDensity(whole.density, reference),
        compile=whole.compile,
        batched=whole.batched,
        loops=whole.loops,
        sample_prior=reference.sample,
        # Evaluates through the graphs of ``whole``, which is not traced again.
        engine=_OnPath(whole, reference),
    )


# The same posterior with a weight on the log likelihood of each observation.

Terms = Callable[[Mapping[str, Tensor]], Tensor]


class _WeightedDensity:
    """The joint density of parameters ``(d,)`` and weights of data ``(n,)``, in one vector ``(d + n,)``."""

    def __init__(self, density: Density, terms: Terms, num_terms: int) -> None:
        self._density, self._terms, self._num_terms, self._num_unknowns = density, terms, num_terms, density.dim
        self.dim, self.sites = density.dim + num_terms, density.sites
        self.dtype, self.device, self.data = density.dtype, density.device, density.data

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        unknowns, weights = u[: self._num_unknowns], u[self._num_unknowns :]
        each = self._terms(self._density.pointwise(unknowns))
        # An observation of zero weight contributes nothing, even where its likelihood is zero.
        lowest = torch.finfo(u.dtype).min / 1e6
        # Linear in the weights: the gradient with respect to them is the log likelihood of each observation.
        return self._density.joint(unknowns)[0], (weights * each.clamp(min=lowest)).sum()

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return self._density.values(u[: self._num_unknowns], deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        unknowns = self._density.vector(values)
        return torch.cat([unknowns, unknowns.new_ones(self._num_terms)])

    def log_jacobian(self, u: Tensor) -> Tensor:
        if not isinstance(self._density, Constrained):
            raise ModelError(f"the Jacobian of {type(self._density).__name__} is not known; use Target.from_pyro")
        return self._density.log_jacobian(u[: self._num_unknowns])

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        return self._density.pointwise(u[: self._num_unknowns])


class Weighted:
    """Posteriors of a target with weighted data; ``terms`` maps log likelihoods by site to those by observation."""

    def __init__(self, target: Target, terms: Terms, num_terms: int) -> None:
        density = _WeightedDensity(target.density, terms, num_terms)
        self.joint = Target(density, compile=target.compile, loops=target.loops)  # over parameters and weights
        self._target = target

    def given(self, weights: Tensor) -> Target:
        """Return the target with data weights ``(r, n)``; consecutive vectors share one row of weights."""
        engine = _OfPart(self.joint, self._target, weights.to(self._target.dtype))
        target = self._target
        return Target(target.density, compile=target.compile, batched=target.batched, loops=target.loops, engine=engine)


class _OfPart:
    """Evaluators of a target with weighted data, made of evaluators over parameters and weights."""

    def __init__(self, joint: Target, whole: Target, weights: Tensor) -> None:
        self._joint, self._whole, self._weights = joint, whole, weights

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        weights = self._weights.repeat_interleave(num_vectors // len(self._weights), 0)
        evaluate, dim = self._joint.evaluator(num_vectors, num_calls), self._whole.dim

        def of_part(u: Tensor, beta: Tensor) -> Evaluation:
            both = evaluate(torch.cat([u, weights], 1), beta)
            return both._replace(gradient=both.gradient[:, :dim])

        return of_part

    def compiled(self, num_vectors: int) -> None:
        return None

    @property
    def cost(self) -> Cost:
        return self._whole.cost


# Targets of one Pyro model with other data, which share one traced and compiled graph.

_Layout = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Replicas:
    """Targets of one Pyro model with other data, on one graph; a target made of functions raises ``SettingsError``."""

    def __init__(self, target: Target, num_targets: int) -> None:
        # Number of planned targets, by which compile="auto" decides whether to compile.
        self._target, self._num_targets = target, num_targets
        self._density = _pyro_density(target)
        self._engines: dict[_Layout, Engine | None] = {}

    def simulate(self, generator: torch.Generator) -> Simulation:
        """Draw parameters from the prior and data from the model."""
        return self._density.simulate(generator)

    def given_observed(self, observed: Mapping[str, Tensor]) -> Target:
        """Return the target of the model with other data at its observed sites."""
        return self._target_given(observed, self._density.given_observed)

    def given_args(self, args: tuple[Any, ...]) -> Target:
        """Return the target of the model called with other arguments."""
        model, before, kwargs = self._density.model, self._density.args, self._density.kwargs
        if len(args) != len(before) or not all(map(_alike, args, before)):
            return Target.from_pyro(model, *args, compile=self._target.compile, **kwargs)
        tensors = {str(i): argument for i, argument in enumerate(args) if isinstance(argument, Tensor)}

        def given(values: Mapping[str, Tensor]) -> PyroDensity:
            return self._density.given_args(tuple(values.get(str(i), a) for i, a in enumerate(before)))

        return self._target_given(tensors, given)

    def _target_given(self, data: Mapping[str, Tensor], given: Callable[[Mapping[str, Tensor]], PyroDensity]) -> Target:
        engine, loops = None, self._target.loops
        columns = _Columns(data, self._target.dtype)
        # The data are further columns of the graph's argument, so one traced graph serves every data set.
        row = columns.pack(data)
        if not loops and columns.holds(data, row):
            if columns.layout not in self._engines:
                self._engines[columns.layout] = self._shared(columns, given, row)
            shared = self._engines[columns.layout]
            if shared is not None:
                engine = _WithData(shared, row, self._target.dim, self._num_targets)
        return Target(given(data), compile=self._target.compile, loops=loops, engine=engine)

    def _shared(
        self, columns: _Columns, given: Callable[[Mapping[str, Tensor]], PyroDensity], row: Tensor
    ) -> Engine | None:
        """Return the engine for all data of one layout, or None if the model reads values of its data."""
        dim = self._target.dim

        def joint(row: Tensor) -> tuple[Tensor, Tensor]:
            # Detached: the gradient with respect to the data is not needed.
            return given(columns.unpack(row[dim:].detach())).joint(row[:dim])

        target = self._target
        batched = torch.func.vmap(joint)
        try:
            batched(torch.cat([row.new_zeros(dim), row]).expand(2, -1))
        except UNTRACEABLE:
            return None
        return Engine(batched, dim + columns.width, target.dtype, target.device)


def _alike(new: Any, old: Any) -> bool:
    """Tell whether a graph traced with one argument serves the other."""
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        return new.shape == old.shape and new.dtype == old.dtype
    return new is old or (type(new) is type(old) and isinstance(new, (bool, int, float, str)) and new == old)


def call_of(target: Target) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the Pyro model of ``target`` and its arguments; raise ``SettingsError`` if it was made of functions."""
    density = _pyro_density(target)
    return density.model, density.args, density.kwargs


def _pyro_density(target: Target) -> PyroDensity:
    if not isinstance(target.density, PyroDensity):
        raise SettingsError(
            f"only a Pyro model can simulate data, and this target was made from {origin_of(target.density)}; write "
            "the model for Pyro, and use Target.from_pyro"
        )
    return target.density


class _Columns:
    """The layout of one data set in a row of numbers."""

    def __init__(self, data: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.layout: _Layout = tuple((name, value.shape, value.dtype) for name, value in data.items())
        self._dtype = dtype
        self.width = sum(prod(shape) for _, shape, _ in self.layout)

    def pack(self, data: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([data[name].reshape(-1).to(self._dtype) for name, _, _ in self.layout])

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        pieces = row.split([prod(shape) for _, shape, _ in self.layout])
        return {
            name: piece.reshape(shape).to(dtype)
            for (name, shape, dtype), piece in zip(self.layout, pieces, strict=True)
        }

    def holds(self, data: Mapping[str, Tensor], row: Tensor) -> bool:
        """Tell whether the dtype of the row represents the data exactly; large counts may be rounded."""
        return all(torch.equal(value, data[name]) for name, value in self.unpack(row).items())


class _WithData:
    """An engine over the shared graph, with one data set filled in."""

    def __init__(self, shared: Engine, row: Tensor, dim: int, num_targets: int) -> None:
        self._shared, self._row, self._dim, self._num_targets = shared, row, dim, num_targets
        self._evaluators: dict[Any, Evaluator] = {}

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        key = (num_vectors, num_calls, compile)
        if key not in self._evaluators:
            inner = self._shared.evaluator(num_vectors, num_calls * self._num_targets, compile)
            self._evaluators[key] = self._filled(inner, num_vectors)
        return self._evaluators[key]

    def compiled(self, num_vectors: int) -> Evaluator | None:
        inner = self._shared.compiled(num_vectors)
        return None if inner is None else self._filled(inner, num_vectors)

    @property
    def cost(self) -> Cost:
        return self._shared.cost

    def _filled(self, inner: Evaluator, num_vectors: int) -> Evaluator:
        data = self._row.expand(num_vectors, -1)

        def evaluate(u: Tensor, beta: Tensor) -> Evaluation:
            result = inner(torch.cat([u, data], 1), beta)
            return result._replace(gradient=result.gradient[:, : self._dim].contiguous())

        return evaluate
