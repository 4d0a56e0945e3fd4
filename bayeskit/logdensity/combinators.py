"""Targets made of a target: with another distribution in the prior's place, or with other data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from bayeskit.errors import ModelError, SettingsError
from bayeskit.logdensity.compiling import Cost, Evaluation, Evaluator, tempered
from bayeskit.logdensity.density import Density
from bayeskit.logdensity.engine import Compile, Engine
from bayeskit.logdensity.pyro_density import PyroDensity, Simulation, simulate, with_args, with_observed
from bayeskit.logdensity.target import Target
from bayeskit.logdensity.tracing import UNTRACEABLE

__all__ = ["RebasedTarget", "Reference", "Replicas", "call_of"]

# --------------------------------------------------------------------------------------------------
# The same posterior with another distribution in the prior's place, for paths that start there.
# --------------------------------------------------------------------------------------------------


class Reference(Protocol):
    """A normalised distribution over unconstrained space."""

    @property
    def parameters(self) -> list[Tensor]:
        """What tells it from another of its kind."""
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
    """A density whose prior is a reference; the likelihood is what is left of the posterior."""

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
        raise ModelError("the likelihood of a rebased target is no product over observations; ask the target itself")


class RebasedTarget(Target):
    """The posterior of ``whole`` on a path from ``reference``, whose gradients come from the graphs of ``whole``.

    Parameters
    ----------
    whole : Target
    reference : Reference
        Takes the prior's place; the product of prior and likelihood stays what it was.
    """

    def __init__(self, whole: Target, reference: Reference) -> None:
        density = _RebasedDensity(whole._density, reference)
        super().__init__(density, batched=whole._batched, sample_prior=reference.sample, compile=whole.compile)
        self._whole, self._reference, self._loops = whole, reference, whole._loops

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        """Return the evaluation of ``num_vectors`` rows; nothing that ``whole`` has traced is traced again."""
        evaluate = self._whole.evaluator(num_vectors, num_calls)

        def on_path(u: Tensor, beta: Tensor) -> Evaluation:
            posterior = evaluate(u, torch.ones_like(beta))
            log_reference = self._reference.log_prob(u)
            rest = posterior.log_density - log_reference
            gradient = torch.lerp(self._reference.gradient(u), posterior.gradient, beta.unsqueeze(-1))
            return Evaluation(log_reference, rest, tempered(log_reference, rest, beta), gradient)

        return on_path

    @property
    def cost(self) -> Cost:
        """That of ``whole``."""
        return self._whole.cost


# --------------------------------------------------------------------------------------------------
# Targets of one Pyro model with other data, which share one traced and compiled graph.
# --------------------------------------------------------------------------------------------------

_Layout = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Replicas:
    """Data sets simulated from a model, and the targets of the model given them.

    The graph takes the data as further columns of its argument, so that it is traced and compiled once and
    serves every data set.

    Parameters
    ----------
    target : Target
        Made by ``Target.from_pyro``; its data give the shapes.
    num_targets : int
        How many targets are planned, from which "auto" decides whether to compile.

    Raises
    ------
    SettingsError
        If the target was made from functions.
    """

    def __init__(self, target: Target, num_targets: int) -> None:
        self._target, self._num_targets = target, num_targets
        self._density = _pyro_density(target)
        self._engines: dict[_Layout, Engine | None] = {}

    def simulate(self, generator: torch.Generator) -> Simulation:
        """Draw parameters from the prior and data from the model."""
        return simulate(self._density, generator)

    def given_observed(self, observed: Mapping[str, Tensor]) -> Target:
        """Return the target of the model with other data at its observed sites."""
        return self._target_given(observed, lambda values: with_observed(self._density, values))

    def given_args(self, args: tuple[Any, ...]) -> Target:
        """Return the target of the model called with other arguments."""
        model, before, kwargs = self._density._model, self._density._args, self._density._kwargs
        if len(args) != len(before) or not all(map(_alike, args, before)):
            return Target.from_pyro(model, *args, compile=self._target.compile, **kwargs)
        tensors = {str(i): argument for i, argument in enumerate(args) if isinstance(argument, Tensor)}

        def given(values: Mapping[str, Tensor]) -> PyroDensity:
            return with_args(self._density, tuple(values.get(str(i), a) for i, a in enumerate(before)))

        return self._target_given(tensors, given)

    def _target_given(self, data: Mapping[str, Tensor], given: Callable[[Mapping[str, Tensor]], PyroDensity]) -> Target:
        target = Target(given(data), batched=False, sample_prior=None, compile=self._target.compile)
        target._loops = self._target._loops
        columns = _Columns(data, self._target.dtype)
        row = columns.pack(data)
        if not target._loops and columns.holds(data, row):
            if columns.layout not in self._engines:
                self._engines[columns.layout] = self._shared(columns, given, row)
            engine = self._engines[columns.layout]
            if engine is not None:
                target._engine = _WithData(engine, row, target.dim, self._num_targets)  # type: ignore[assignment]
        return target

    def _shared(
        self, columns: _Columns, given: Callable[[Mapping[str, Tensor]], PyroDensity], row: Tensor
    ) -> Engine | None:
        """Return the engine for all data of one layout, or None where the model reads numbers from its data."""
        dim = self._target.dim

        def joint(row: Tensor) -> tuple[Tensor, Tensor]:
            # Detached, because nobody asks for the gradient with respect to the data.
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
    """Return the Pyro model that a target was made of, and what it is called with.

    Raises
    ------
    SettingsError
        If the target was made from functions.
    """
    density = _pyro_density(target)
    return density._model, density._args, density._kwargs


def _pyro_density(target: Target) -> PyroDensity:
    if not isinstance(target._density, PyroDensity):
        raise SettingsError("only a Pyro model can be simulated from; this target was made from functions")
    return target._density


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
        """Tell whether the row's precision suffices, as it may not for large counts."""
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
