"""Draw particles: one run of the guide, and one of the model on its draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from bayeskit._enumeration import Enumeration
from bayeskit._pyro.draws import MendedDraws
from bayeskit.errors import GuideError, ModelError, SettingsError
from bayeskit.inference.objectives.enumeration import Enumerated
from bayeskit.inference.objectives.gate import Gate
from bayeskit.inference.objectives.layout import PARTICLES, Layout, Plate, reduced
from bayeskit.inference.objectives.particles import Particles
from bayeskit.inference.objectives.sites import (
    PATH,
    RELAXED,
    Compatibility,
    Site,
    log_density,
)
from bayeskit.inference.objectives.terms import closed_forms, density_of, is_path, score_of, term_of, weight_of_point
from bayeskit.inference.objectives.weighting import Weighting, baseline_terms, offset

SUMMED_OUT = "_summed_out"
BASELINES = "_baselines"


class _WithinNesting(Messenger):
    """Refuse plates that reach into the dimension of the particles, before shapes clash there."""

    def __init__(self, nesting: int) -> None:
        super().__init__()
        self._nesting = nesting

    def _pyro_sample(self, message: Any) -> None:
        for frame in message["cond_indep_stack"]:
            if frame.vectorized and -frame.dim > self._nesting:
                raise SettingsError(
                    f"plate {frame.name!r} takes dimension {frame.dim}, beyond the max_plate_nesting of "
                    f"{self._nesting} that this objective was given or found in its first run; use a new objective for "
                    "another model, or give max_plate_nesting"
                )


class _Values(Messenger):
    """Give the model the guide's draws."""

    def __init__(
        self, sites: Mapping[str, Site], values: Mapping[str, Tensor], compatibility: Compatibility | None = None
    ) -> None:
        super().__init__()
        self._sites, self._values, self._compatibility = sites, values, compatibility

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if name in self._values and not message["is_observed"]:
            # Plates draw their subsamples as sites, too, which have no support to compare.
            if self._compatibility is not None and isinstance(message["fn"], TorchDistributionMixin):
                site = self._sites[name]
                value = None if site["infer"].get(RELAXED) else self._values[name]
                self._compatibility.site(name, message["fn"], site["fn"], value)
            message["value"], message["done"] = self._values[name], True
            message["infer"] = self._sites[name]["infer"]


class _Detached(Messenger):
    """Let draws carry no gradient, also where later sites of the guide depend on them."""

    def _pyro_post_sample(self, message: Any) -> None:
        if not message["is_observed"] and isinstance(message["value"], Tensor):
            message["value"] = message["value"].detach()


def plate_nesting(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: Any,
    kwargs: Any,
    compatibility: Compatibility | None = None,
) -> int:
    """Return how many dimensions the plates of model and guide take, by running both once."""
    with poutine.block(), torch.random.fork_rng(devices=[]), torch.no_grad(), MendedDraws():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        sites: Mapping[str, Any] = guide_trace.nodes
        drawn = {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}
        replayed = _Values(sites, drawn, compatibility)(model)
        model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
    for trace in (guide_trace, model_trace):
        for name, site in _samples(trace).items():
            _check_batch(name, site)
    frames = [
        frame
        for trace in (guide_trace, model_trace)
        for site in trace.nodes.values()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
    ]
    _check_plate_names(frames, [])
    return max((-frame.dim for frame in frames if frame.dim is not None), default=0)


def _check_plate_names(frames: Iterable[Any], own: Iterable[int]) -> None:
    """Refuse plates named like the one that the particles stand in, unless in a dimension of its own."""
    if any(frame.name == PARTICLES and frame.dim not in own for frame in frames):
        raise ModelError(f"the name of plate {PARTICLES!r} is taken by the plate of the particles; give it another")


def _check_batch(name: str, site: Site) -> None:
    """Refuse dimensions that no plate declares: beside several particles they would be taken for these."""
    declared = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    shapes = {"batch": tuple(site["fn"].batch_shape)}
    shapes |= {what: tuple(site[what].shape) for what in ("mask", "scale") if isinstance(site[what], Tensor)}
    for what, shape in shapes.items():
        if loose := [dim for dim in range(-len(shape), 0) if shape[dim] > 1 and dim not in declared]:
            of = "a batch dimension" if what == "batch" else f"a {what} with a dimension"
            raise ModelError(
                f"site {name!r} has {of} ({loose[-1]}, of size {shape[loose[-1]]}) outside every plate; "
                "declare it with pyro.plate" + (" or .to_event" if what == "batch" else "")
            )


def run_particles(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_particles: int,
    nesting: int,
    detached: bool = False,
    path_only: bool = False,
    analytic_kl: bool = False,
    gate: Gate | None = None,
    data_plate: str | None = None,
    compatibility: Compatibility | None = None,
) -> Particles:
    """Run the guide and, on its draws, the model.

    Parameters
    ----------
    model, guide : callable
    args, kwargs
        What both are called with.
    num_particles : int
        All in one run, in a plate left of the model's own.
    nesting : int
        Dimensions of the plates of model and guide.
    detached : bool, default False
        Cut the gradient through the guide's draws: what is left are scores.
    path_only : bool, default False
        Cut the other part: the gradient reaches the guide's parameters through its draws alone.
    analytic_kl : bool, default False
        Compute divergences in closed form where there are any.
    gate : Gate, optional
        Everything through which gradients reach the guide passes this; its factor has shape ``(K, *batch)``.
    data_plate : str, optional
        The plate whose items are the data.
    compatibility : Compatibility, optional
        Checks whether guide and model fit together, before anything is computed of their sites.

    Returns
    -------
    Particles

    Raises
    ------
    GuideError
        If a site stands outside ``data_plate``.
    """
    run = _Run(num_particles, nesting, args, kwargs, data_plate)
    with _Detached() if detached else nullcontext():  # outermost, so that the trace, too, sees what it did
        guide_trace = run.trace(guide, first=True)
    values = {name: site["value"] for name, site in guide_trace.nodes.items() if site["type"] == "sample"}
    guide_sites = _samples(guide_trace)
    layouts: list[Layout] = []  # known once the model has run, needed in the backward pass
    if gate is not None:
        for name, site in guide_sites.items():
            if site["value"].requires_grad:
                values[name] = gate(site["value"], _later(layouts, site["fn"].event_dim))
    model_sites = _samples(run.trace(_Values(guide_trace.nodes, values, compatibility)(model)))
    if compatibility is not None:
        compatibility(model_sites, guide_sites)
    layouts.append(layout := run.layout(guide_sites, model_sites))
    enumerated = Enumerated.of(model_sites, guide_sites)
    if enumerated is not None:
        particles = _summed_out(enumerated, model_sites, guide_sites, layout, analytic_kl)
        if path_only and not enumerated.in_guide:
            _leave_path(particles.log_guide, _scores(run, guide, guide_trace, guide_sites, layout))
        if gate is not None:
            particles.log_guide = {name: gate(term) for name, term in particles.log_guide.items()}
            particles.kl = {name: gate(term) for name, term in particles.kl.items()}
        return particles
    closed = closed_forms(model_sites, guide_sites) if analytic_kl else []
    kl = {name: reduced(model_sites[name], term, layout) for name, term in closed}
    # A closed form stands for both log densities, unless the draw's own is needed as its score.
    spared = {name for name in kl if not detached and guide_sites[name]["fn"].has_rsample}
    log_guide = {
        name: term_of(site, layout)
        for name, site in guide_sites.items()
        if name not in spared  # factors, too
    }
    scores = [
        layout.reduce(score_of(guide_sites[name])) for name in log_guide if detached or not is_path(guide_sites[name])
    ]
    if path_only:
        _leave_path(log_guide, _scores(run, guide, guide_trace, guide_sites, layout))
    if gate is not None:
        log_guide = {name: gate(term) for name, term in log_guide.items()}
        kl = {name: gate(term) for name, term in kl.items()}
    terms = {name: term_of(site, layout) for name, site in model_sites.items() if name not in spared}
    return _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites)


def _particles(
    terms: Mapping[str, Tensor],
    log_guide: dict[str, Tensor],
    scores: list[Tensor],
    kl: dict[str, Tensor],
    layout: Layout,
    model_sites: dict[str, Site],
    guide_sites: dict[str, Site],
    in_expectation: str | None = None,
) -> Particles:
    """Gather the terms of all sites."""
    observed = [t for n, t in terms.items() if n not in model_sites or model_sites[n]["is_observed"]]
    log_prior = {n: t for n, t in terms.items() if n in model_sites and not model_sites[n]["is_observed"]}
    any_term = next(iter([*terms.values(), *log_guide.values(), *kl.values()]))
    in_expectation = in_expectation or next((n for n, s in guide_sites.items() if PATH in s["infer"]), None)
    return Particles(
        sum(observed[1:], observed[0]) if observed else torch.zeros_like(any_term),
        log_prior,
        log_guide,
        sum(scores[1:], scores[0]) if scores else None,
        kl,
        layout.scale,
        layout,
        model_sites,
        guide_sites,
        in_expectation,
    )


def _summed_out(
    enumerated: Enumerated,
    model_sites: dict[str, Site],
    guide_sites: dict[str, Site],
    layout: Layout,
    analytic_kl: bool,
) -> Particles:
    """Gather the terms where sites are enumerated."""
    factors = {name: enumerated.factor(site, density_of(site), layout) for name, site in model_sites.items()}
    own = {name: enumerated.factor(site, density_of(site), layout) for name, site in guide_sites.items()}
    drawn = [name for name, site in guide_sites.items() if "_enumerate_dim" not in site["infer"]]
    scored = [name for name in drawn if not is_path(guide_sites[name])]
    for name in scored:
        if own[name].variables:
            raise GuideError(
                f"site {name!r} of the guide draws without a gradient and depends on an enumerated site; enumerate "
                "it too, give it an infer['gradient'] as well, or mark none"
            )
    if enumerated.in_guide:
        weights = {
            number: enumerated.factor(guide_sites[name], weight_of_point(guide_sites[name]), layout, bare=True)
            for number, name in enumerated.variables.items()
        }
        closed = closed_forms(model_sites, guide_sites) if analytic_kl else []
        costs = {name: enumerated.factor(model_sites[name], term, layout) for name, term in closed}
        terms, log_guide, kl = (
            {name: enumerated.expected(factor, weights, layout) for name, factor in part.items()}
            for part in (factors, own, costs)
        )
        baselines = [
            enumerated.added_up(enumerated.factor(guide_sites[name], term, layout, bare=True), layout)
            for name, term in baseline_terms(guide_sites, terms, log_guide, kl).items()
        ]
        baselines += [
            enumerated.expected(enumerated.factor(site, term, layout), weights, layout)
            for site in guide_sites.values()
            if (term := offset(site)) is not None
        ]
        if baselines:
            terms[BASELINES] = sum(baselines[1:], baselines[0])
        scores = [
            enumerated.added_up(enumerated.factor(site, score_of(site), layout, bare=True), layout)
            for site in (guide_sites[name] for name in scored)
        ]
        first = next(iter(enumerated.variables.values()))
        return _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites, first)
    summed = {name: factor for name, factor in factors.items() if factor.variables}
    any_term = next(iter(summed.values())).tensor
    terms = {n: enumerated.expected(f, {}, layout) for n, f in factors.items() if n not in summed}
    # Draws whose prior depends on a summed-out site have no prior of their own: it is part of the sum.
    terms |= {name: any_term.new_zeros(()).expand(layout.shape) for name in summed if name in guide_sites}
    terms[SUMMED_OUT] = enumerated.summed(summed, model_sites, layout)
    log_guide = {name: enumerated.expected(factor, {}, layout) for name, factor in own.items()}
    free = [(n, t) for n, t in closed_forms(model_sites, guide_sites) if n not in summed] if analytic_kl else []
    kl = {name: reduced(model_sites[name], term, layout) for name, term in free}
    scores = [layout.reduce(score_of(guide_sites[name])) for name in scored]
    found = _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites)
    return replace(found, in_sum=next((name for name in summed if name in guide_sites), None))


@dataclass(frozen=True)
class _Run:
    num_particles: int
    nesting: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    data_plate: str | None

    def trace(self, function: Callable[..., Any], *, first: bool = False) -> Any:
        """Trace a run; the ``first`` one opens the dimensions left of the particles to enumerated sites."""
        function = _WithinNesting(self.nesting)(function)
        if self.num_particles > 1:
            function = pyro.plate(PARTICLES, self.num_particles, dim=-self.nesting - 1)(function)
        enumeration = Enumeration(first_available_dim=-self.nesting - 2 if first else None)
        weighting = Weighting() if first else nullcontext()  # the model has no weights: its sites are given
        with enumeration, MendedDraws(), weighting:
            return poutine.trace(function).get_trace(*self.args, **self.kwargs)

    def layout(self, *traces: Mapping[str, Site]) -> Layout:
        """Find the plates that hold every site of the traces, or just the one that was asked for."""
        common: dict[str, Plate] | None = None
        for name, site in ((n, s) for trace in traces for n, s in trace.items()):
            _check_plate_names(site["cond_indep_stack"], [-self.nesting - 1])
            frames = {
                f.name: Plate(f.dim, f.size, f.full_size or f.size)
                for f in site["cond_indep_stack"]
                if f.vectorized and f.name != PARTICLES
            }
            if self.data_plate is not None and self.data_plate not in frames:
                raise GuideError(
                    f"site {name!r} stands outside the plate {self.data_plate!r}, so there are no weights for each "
                    "datum; put it into the plate, or leave data_plate out to weigh the whole data at once"
                )
            common = frames if common is None else {n: p for n, p in common.items() if n in frames}
        plates = common or {}
        if self.data_plate is not None:
            plates = {self.data_plate: plates[self.data_plate]}
        return Layout(self.num_particles, self.nesting, plates)


def _later(layouts: list[Layout], events: int) -> Callable[[], tuple[int, ...]]:
    return lambda: layouts[0].spread(events)


def _samples(trace: Any) -> dict[str, Site]:
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {n: s for n, s in nodes.items() if s["type"] == "sample" and not s["infer"].get("_deterministic")}


def _leave_path(log_guide: dict[str, Tensor], direct: Mapping[str, Tensor]) -> None:
    """Take the gradient that is not along the draws out of the guide's log densities."""
    for name, term in direct.items():
        log_guide[name] = log_guide[name] - term + term.detach()


def _scores(
    run: _Run, guide: Callable[..., Any], trace: Any, sites: Mapping[str, Site], layout: Layout
) -> dict[str, Tensor]:
    """Return the log density of each draw, held fixed, as a function of the guide's parameters alone.

    Subtracted from the full log density it leaves the gradient along the path. A guide of one site needs no
    second run: its distribution cannot depend on draws.
    """
    free = {name: site for name, site in sites.items() if not site["is_observed"]}
    if len(sites) > 1:
        fixed = {
            n: (s["value"].detach() if isinstance(s["value"], Tensor) else s["value"])
            for n, s in trace.nodes.items()
            if s["type"] == "sample"
        }
        with poutine.block():
            again = _samples(run.trace(_Values(trace.nodes, fixed)(guide)))
        return {name: term_of(again[name], layout) for name in free}
    return {name: reduced(site, log_density(site["fn"], site["value"].detach()), layout) for name, site in free.items()}
