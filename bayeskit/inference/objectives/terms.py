"""What a site of a trace counts for: its log density, its score, and divergences that have a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from bayeskit.inference.objectives.layout import Layout, masked, reduced
from bayeskit.inference.objectives.sites import PATH, RELAXED, Site, log_density, relaxed_log_density, unwrapped
from bayeskit.inference.objectives.weighting import weight


def term_of(site: Site, layout: Layout) -> Tensor:
    """Return the log density of a site, ``(K, *batch)``, without the scale that belongs to the data's plates."""
    return reduced(site, density_of(site), layout)


def density_of(site: Site) -> Tensor:
    """Return the log density of a site at its value; the site keeps a copy, in case it is to be named in an error."""
    if site["infer"].get(RELAXED):
        term = relaxed_log_density(site["name"], site["fn"], site["value"])
    else:
        term = log_density(site["fn"], site["value"])
    site["term"] = masked(site, term.detach())  # what a mask takes out is nobody's fault
    return term


def is_path(site: Site) -> bool:
    """Whether the draw carries a gradient."""
    return bool(site["fn"].has_rsample) or PATH in site["infer"]


def score_of(site: Site) -> Tensor:
    """Return the log density of a draw as its distribution has it.

    Scales and masks say what a term counts for in the loss, not how probable the draw was. What a mask takes out may
    be padding whose density is not a number.
    """
    term = log_density(site["fn"], site["value"])
    return torch.where(masked(site, torch.ones_like(term)) > 0, term, torch.where(term.isfinite(), term, 0.0))


def weight_of_point(site: Site) -> Tensor:
    """Return what each point of an enumerated site of the guide counts for."""
    drawn = weight(site)
    return density_of(site).exp() if drawn is None else drawn


def closed_forms(model: Mapping[str, Site], guide: Mapping[str, Site]) -> list[tuple[str, Tensor]]:
    """Return the divergences of guide from model that have a closed form, by site.

    A site's divergence given what was drawn before it may stand for the difference of its log densities where the
    model conditions it on nothing that the guide draws later.
    """
    found, order = [], {name: i for i, name in enumerate(guide)}
    latent = [name for name, site in model.items() if not site["is_observed"]]
    for position, name in enumerate(latent):
        if name not in guide or any(order.get(before, len(order)) > order[name] for before in latent[:position]):
            continue
        prior, posterior = model[name], guide[name]
        same_mask = prior["mask"] is posterior["mask"]
        if not same_mask or isinstance(prior["scale"], Tensor) or prior["scale"] != posterior["scale"]:
            continue
        if {"_enumerate_dim", RELAXED} & posterior["infer"].keys() or isinstance(unwrapped(posterior["fn"])[0], Delta):
            continue  # Pyro's closed form of a Delta leaves out its log_density, the Jacobian of automatic guides
        if _is_masked(prior["fn"]) or _is_masked(posterior["fn"]):
            continue  # each by its own mask, of which torch's closed form knows one
        with suppress(NotImplementedError):
            found.append((name, kl_divergence(*_alike(posterior["fn"], prior["fn"]))))
    return found


def _is_masked(fn: Any) -> bool:
    while fn is not None:
        if getattr(fn, "_mask", None) is not None:
            return True
        fn = vars(fn).get("base_dist")
    return False


def _alike(posterior: Any, prior: Any) -> tuple[Any, Any]:
    """Give both one batch shape: some of torch's closed forms index one by a mask of the other's shape."""
    if posterior.batch_shape == prior.batch_shape or isinstance(unwrapped(prior)[0], Normal):
        return posterior, prior
    shape = torch.broadcast_shapes(posterior.batch_shape, prior.batch_shape)
    return posterior.expand(shape), prior.expand(shape)
