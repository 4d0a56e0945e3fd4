"""Joint density of each observation and its latent variables, for samplers over unconstrained vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import pyro
import torch
from torch import Tensor
from torch.distributions import Transform, constraints

from bayeskit._core.evaluation import Evaluation, Evaluator, tempered
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import global_stream, validation_kept
from bayeskit._logdensity.transforms import bijection, support_of
from bayeskit.errors import GuideError, SettingsError, ShapeError
from bayeskit.inference.objectives._drawing import (
    Compatibility,
    Layout,
    Particles,
    Site,
    SubsampleIndices,
    draw_log_density,
    plate_nesting,
    reduced,
    run_particles,
    site_log_density,
    supplied_sites,
)


@dataclass(frozen=True)
class _Slot:
    """Where a site's coordinates stand in a row, and how rows become its value."""

    shape: tuple[int, ...]  # shape of the value in the model
    full_shape: tuple[int, ...]  # unconstrained shape with every particle and plate dimension
    axes: tuple[int, ...]  # order: particle, data, remaining dimensions
    start: int
    stop: int

    def to_rows(self, x: Tensor) -> Tensor:
        """Return unconstrained coordinates of ``full_shape`` as ``(rows, stop - start)``."""
        return x.permute(self.axes).reshape(-1, self.stop - self.start)

    def from_rows(self, u: Tensor) -> Tensor:
        """Return columns ``(rows, stop - start)`` in ``full_shape``."""
        x = u.reshape(tuple(self.full_shape[a] for a in self.axes))
        return x.permute(tuple(self.axes.index(a) for a in range(len(self.axes))))


@dataclass(frozen=True)
class _Run:
    """A run of the model: terms of shape ``(K, *batch)`` and the values of its latent sites."""

    log_prior: Tensor
    log_likelihood: Tensor
    values: dict[str, Tensor]


class LatentDensity:
    """Joint density of each observation and its latent variables, as a function of unconstrained rows.

    A row is one particle of one observation, or of the whole data set if no plate contains all latent sites. Rows are
    independent, so each row can run a chain with its own step size. The class has the interface of
    :class:`~bayeskit.Target` that kernels use. It uses the current parameter values, and evaluations for kernels do
    not accumulate gradients in them. Supports are mapped to the real line, including the Jacobian.

    Parameters
    ----------
    model, guide, args, kwargs
        Model and guide, and their arguments.
    particles : Particles
        Particles from one run of the guide, which determine plates and shapes.
    indices : mapping of Tensor
        Subsample indices of each plate in that run, by name; see :class:`SubsampleIndices`.
    initial : {"prior", "guide"}, default "prior"
        Initial density of tempering.

    Attributes
    ----------
    num_rows, dim : int
        Number of rows and their length.
    dtype, device
    layout : Layout
        Dimensions of particles and data in a trace.
    position : Tensor
        Rows of ``particles``, ``(rows, dim)``.

    Raises
    ------
    GuideError
        If a latent site is discrete, has a support without a bijection to the real line, or is not in the guide.
    SettingsError
        If ``initial`` is neither ``"prior"`` nor ``"guide"``.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
    >>> density = LatentDensity.from_pyro(model, guide, (torch.tensor([1.0, -0.5, 2.0]),), num_particles=10)
    >>> density.num_rows, density.dim, density.log_joint(density.position).shape
    (30, 1, torch.Size([30]))
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        particles: Particles,
        indices: Mapping[str, Tensor],
        *,
        initial: Literal["prior", "guide"] = "prior",
    ) -> None:
        if initial not in ("prior", "guide"):
            raise SettingsError(f'initial must be "prior" or "guide", not {initial!r}')
        self._model, self._guide, self._args, self._kwargs = model, guide, args, dict(kwargs)
        self._indices, self.initial = dict(indices), initial
        self.layout: Layout = particles.layout
        latent = {n: s for n, s in particles.model_sites.items() if not s["is_observed"]}
        self._guide_sites = {n: s for n, s in particles.guide_sites.items() if not s["is_observed"]}
        transforms = {name: _transform(name, site["fn"]) for name, site in latent.items()}
        if unknown := [name for name in latent if name not in self._guide_sites]:
            raise GuideError(
                f"the guide has no site for the latent {unknown[0]!r} of the model; add pyro.sample for it"
            )
        self._slots = self._assign(latent, transforms)
        self._unbounded = all(transform is None for transform in transforms.values())
        self.num_rows = prod(self.layout.shape)
        self.dim = max((slot.stop for slot in self._slots.values()), default=0)
        self.position = self.flatten({name: latent[name]["value"].detach() for name in latent})
        self.dtype, self.device = self.position.dtype, self.position.device

    @classmethod
    def from_pyro(
        cls,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_particles: int = 1,
        nesting: int | None = None,
        data_plate: str | None = None,
        initial: Literal["prior", "guide"] = "prior",
    ) -> LatentDensity:
        """Run guide and model once, with torch's global random stream, and return the density.

        ``num_particles`` are rows per observation, ``nesting`` is the number of plate dimensions, by default found by
        another run, ``data_plate`` the plate over observations, by default every plate that contains all sites.
        """
        arguments, compatibility = dict(kwargs or {}), Compatibility()
        if nesting is None:
            nesting = plate_nesting(model, guide, args, arguments, compatibility)
        with process_state(), SubsampleIndices() as indices:
            particles = run_particles(
                model,
                guide,
                args,
                arguments,
                num_particles=num_particles,
                nesting=nesting,
                data_plate=data_plate,
                compatibility=compatibility,
            )
        return cls(model, guide, args, arguments, particles, indices.values, initial=initial)

    # -- rows and values --------------------------------------------------------------------

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return values shaped as in a trace as rows ``(rows, d)``."""
        transforms = {} if self._unbounded else self._transforms_at(values)
        pieces = []
        for name, slot in self._slots.items():
            transform = transforms.get(name)
            x = values[name] if transform is None else transform.inv(values[name])
            pieces.append(slot.to_rows(x.reshape(slot.full_shape)))
        return torch.cat(pieces, -1) if pieces else torch.empty(self.num_rows, 0)

    def unflatten(self, u: Tensor) -> dict[str, Tensor]:
        """Return the latent values of rows ``(rows, d)``, shaped as in the model."""
        if not self._unbounded:
            return self._run(u).values
        self._check(u)
        return {
            name: slot.from_rows(u[:, slot.start : slot.stop]).reshape(slot.shape) for name, slot in self._slots.items()
        }

    def by_datum(self, rows: Tensor) -> Tensor:
        """Reshape a tensor ``(rows, *event)`` to ``(K, *batch, *event)``."""
        return rows.reshape(*self.layout.shape, *rows.shape[1:])

    # -- densities --------------------------------------------------------------------------

    def log_prior(self, u: Tensor) -> Tensor:
        """Return the log density of the latent sites under the model: ``(rows, d) -> (rows,)``."""
        return self._run(u).log_prior.reshape(-1)

    def log_likelihood(self, u: Tensor) -> Tensor:
        """Return the log density of the observed sites: ``(rows, d) -> (rows,)``."""
        return self._run(u).log_likelihood.reshape(-1)

    def log_joint(self, u: Tensor) -> Tensor:
        """Return the log joint density, ``(rows, d) -> (rows,)``, differentiable in rows and parameters."""
        run = self._run(u)
        return (run.log_prior + run.log_likelihood).reshape(-1)

    def log_guide(self, u: Tensor) -> Tensor:
        """Return the log guide density, ``(rows, d) -> (rows,)``, differentiable in rows and parameters.

        GuideError if the guide has auxiliary sites, because its marginal density is then an integral.
        """
        if self._unbounded:
            return self._log_guide(self.unflatten(u)).reshape(-1)
        jacobian: list[Tensor] = []
        run = self._run(u, jacobian)
        return sum(jacobian, self._log_guide(run.values)).reshape(-1)

    def log_score(self, u: Tensor) -> Tensor:
        """Return :meth:`log_guide` without scales and masks: the log density of drawing, up to a constant."""
        values = {name: value.detach() for name, value in self.unflatten(u).items()}
        return self._log_guide(values, score=True).reshape(-1)

    def log_density(self, u: Tensor, beta: float | Tensor = 1.0) -> Tensor:
        """Return ``(1 - beta) log_initial + beta log_joint``: ``(rows, d) -> (rows,)``; ``beta`` broadcasts."""
        first, rest = self.joint(u)
        return tempered(first, rest, torch.as_tensor(beta, dtype=first.dtype, device=first.device))

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the initial log density and the tempered term, ``(rows,)`` each, which sum to :meth:`log_joint`."""
        if self.initial == "prior":
            run = self._run(u)
            return run.log_prior.reshape(-1), run.log_likelihood.reshape(-1)
        jacobian: list[Tensor] = []
        run = self._run(u, jacobian)
        guide = sum(jacobian, self._log_guide(run.values))
        return guide.reshape(-1), (run.log_prior + run.log_likelihood - guide).reshape(-1)

    def evaluator(self, num_vectors: int, planned_calls: int = 1) -> Evaluator:
        """Return an evaluator for kernels, without parameter gradients; ShapeError for another number of rows."""
        if num_vectors != self.num_rows:
            raise ShapeError(
                f"this density has {self.num_rows} rows, one for each particle of each datum, not {num_vectors}"
            )
        return self._evaluate

    def value_and_grad(self, u: Tensor, beta: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """Return the tempered log density ``(rows,)`` and its gradient ``(rows, d)``."""
        evaluation = self._evaluate(u, torch.as_tensor(beta, dtype=u.dtype, device=u.device).expand(len(u)))
        return evaluation.log_density, evaluation.gradient

    def _evaluate(self, u: Tensor, beta: Tensor) -> Evaluation:
        with torch.enable_grad():
            leaf = u.detach().requires_grad_(True)
            first, rest = self.joint(leaf)
            density = tempered(first, rest, beta)
            (gradient,) = torch.autograd.grad(density.sum(), leaf)
        return Evaluation(first.detach(), rest.detach(), density.detach(), gradient)

    # -- draws ------------------------------------------------------------------------------

    def sample_prior(self, generator: torch.Generator) -> Tensor:
        """Draw every row from the prior, ignoring observations: ``(rows, d)``."""
        return self._drawn(self._model, generator)

    def sample_guide(self, generator: torch.Generator) -> Tensor:
        """Draw every row from the guide: ``(rows, d)``."""
        return self._drawn(self._guide, generator)

    def sample_initial(self, generator: torch.Generator) -> Tensor:
        """Draw every row from the initial density of tempering: ``(rows, d)``."""
        return self.sample_prior(generator) if self.initial == "prior" else self.sample_guide(generator)

    def _drawn(self, function: Callable[..., Any], generator: torch.Generator) -> Tensor:
        with torch.no_grad(), global_stream(generator):
            sites = self._traced(function, lambda name, fn: None)
        return self.flatten({name: sites[name]["value"] for name in self._slots})

    # -- runs -------------------------------------------------------------------------------

    def _assign(self, latent: Mapping[str, Site], transforms: Mapping[str, Transform | None]) -> dict[str, _Slot]:
        nesting, start, slots = self.layout.nesting, 0, {}
        data = sorted(nesting + 1 + plate.dim for plate in self.layout.plates.values())
        for name, site in latent.items():
            value, transform = site["value"], transforms[name]
            shape = tuple(value.shape) if transform is None else tuple(transform.inverse_shape(value.shape))
            full = (1,) * (nesting + 1 + site["fn"].event_dim - value.dim()) + shape
            rest = [axis for axis in range(1, len(full)) if axis not in data]
            stop = start + prod(full[axis] for axis in rest)
            slots[name] = _Slot(tuple(value.shape), full, (0, *data, *rest), start, stop)
            start = stop
        return slots

    def _transforms_at(self, values: Mapping[str, Tensor]) -> dict[str, Transform | None]:
        sites = self._traced(self._model, lambda name, fn: values.get(name))
        return {name: _transform(name, sites[name]["fn"]) for name in self._slots}

    def _run(self, u: Tensor, jacobian: list[Tensor] | None = None) -> _Run:
        """Run the model at rows ``u``; supports that depend on other sites' values follow them."""
        self._check(u)
        corrections: list[Tensor] = []

        def value_of(name: str, fn: Any) -> Tensor | None:
            if name not in self._slots:
                return None
            slot = self._slots[name]
            x = slot.from_rows(u[:, slot.start : slot.stop])
            transform = None if self._unbounded else _transform(name, fn)
            if transform is None:
                return x.reshape(slot.shape)
            x = x.reshape((*slot.shape[: len(slot.shape) - fn.event_dim], *slot.full_shape[self.layout.nesting + 1 :]))
            value = transform(x)
            correction = transform.log_abs_det_jacobian(x, value)
            excess = correction.dim() - (len(slot.shape) - fn.event_dim)
            corrections.append(self.layout.reduce(correction.flatten(-excess).sum(-1) if excess > 0 else correction))
            return value

        sites = self._traced(self._model, value_of)
        prior, likelihood = self._sum(sites, observed=False), self._sum(sites, observed=True)
        if jacobian is not None:
            jacobian += corrections
        return _Run(sum(corrections, prior), likelihood, {name: sites[name]["value"] for name in self._slots})

    def _log_guide(self, values: Mapping[str, Tensor], score: bool = False) -> Tensor:
        if auxiliary := [name for name in self._guide_sites if name not in self._slots]:
            raise GuideError(
                f"the guide's site {auxiliary[0]!r} is not in the model, so the guide has no density at given latent "
                "values; write the guide without it, for example with a TransformedDistribution"
            )
        if len(self._guide_sites) == 1:  # a single site depends on no other, so its distribution is known
            ((name, site),) = self._guide_sites.items()
            sites = {name: site | {"value": values[name]}}
        else:
            sites = self._traced(self._guide, lambda name, fn: values.get(name))
        if not score:
            return self._sum(sites, observed=False)
        terms = [self.layout.reduce(draw_log_density(site)) for site in sites.values() if not site["is_observed"]]
        return sum(terms[1:], terms[0])

    def _sum(self, sites: Mapping[str, Site], observed: bool) -> Tensor:
        terms = [
            reduced(site, site_log_density(site["fn"], site["value"]), self.layout)
            for site in sites.values()
            if bool(site["is_observed"]) is observed
        ]
        return sum(terms[1:], terms[0]) if terms else self.position.new_zeros(self.layout.shape)

    def _traced(self, function: Callable[..., Any], value_of: Callable[[str, Any], Tensor | None]) -> dict[str, Site]:
        # A divergent chain is rejected without ending the run.
        with validation_kept(), pyro.validation_enabled(False):
            return supplied_sites(function, self._args, self._kwargs, self.layout, self._indices, value_of)

    def _check(self, u: Tensor) -> None:
        if u.shape != (self.num_rows, self.dim):
            raise ShapeError(
                f"rows of this density have shape {(self.num_rows, self.dim)}, one for each particle of each datum; "
                f"got {tuple(u.shape)}"
            )


def _transform(name: str, fn: Any) -> Transform | None:
    """Return the bijection to a distribution's support, or None where it is the real line."""
    try:
        support = support_of(fn)
        if support.is_discrete:
            raise GuideError(
                f"site {name!r} is discrete, and so has no unconstrained coordinates to run chains in; sum it out by "
                "hand, or use an objective for discrete guides such as IWAE"
            )
        bare = support
        while isinstance(bare, constraints.independent):
            bare = bare.base_constraint
        return None if bare is constraints.real or bare is constraints.real_vector else bijection(support)
    except NotImplementedError as error:
        raise GuideError(
            f"site {name!r} has support {fn.support}, for which no bijection from the real line is known; "
            "reparameterise it"
        ) from error
