"""The file of a fitted variational posterior of trees, which is read without running code."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.extend import Ending, Schema, decode, encode, loaded_tensors, qualified_name, save_tensors
from bayeskit.models.phylogenetics import (
    Alignment,
    DataType,
    FreeRates,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Partition,
    SubsplitBayesianNetwork,
)
from bayeskit.models.phylogenetics._distributions._graphs import SubsplitGraph
from bayeskit.models.phylogenetics._model_names import SUBSTITUTION_MODELS
from bayeskit.models.phylogenetics._partitions import forest_likelihood
from bayeskit.models.phylogenetics._substitution import Parameterized
from bayeskit.models.phylogenetics.workflows._variational._family import TreeFamily
from bayeskit.models.phylogenetics.workflows._variational._length_families import FlowLengths, LogNormalLengths
from bayeskit.models.phylogenetics.workflows._variational._target import TreeTarget

_SCHEMA = Schema("a variational posterior of trees", 4)
#: Supported priors of one branch length, of independent ones, of all jointly, and of parameters.
_PRIORS = (
    *(dist.Exponential, dist.Gamma, dist.InverseGamma, dist.LogNormal, dist.Weibull),
    *(dist.HalfNormal, dist.HalfCauchy, dist.Uniform, GammaDirichlet, dist.Beta, dist.Dirichlet),
)


class _Prior(NamedTuple):
    """A distribution by the name of its class."""

    name: str
    parameters: dict[str, Any]
    event_dims: int  # number of its batch dimensions that are one event


_STORED = (
    *(Alignment, DataType, SubsplitGraph, _Prior),
    *SUBSTITUTION_MODELS.values(),
    *(FreeRates, GammaRates, InvariantSites, LogNormalLengths, FlowLengths),
)
_TYPES = {qualified_name(kind): kind for kind in _STORED}


class PosteriorContents(NamedTuple):
    """The contents of a file."""

    family: TreeFamily
    target: TreeTarget
    parameters: Tensor
    bounds: Tensor
    positions: Tensor
    ending: Ending
    seconds: float
    settings: dict[str, Any]


def write_posterior(path: str | Path, contents: PosteriorContents) -> None:
    """Write a file atomically; SettingsError for classes that cannot be stored, OutputError if it fails."""
    network, (substitution, site_rates) = contents.family.network, contents.target.models
    data = {
        "alignment": _stored_data(contents.target.data),
        "substitution": _without_priors(substitution),
        "site_rates": _without_priors(site_rates),
        "constraints": contents.target.constraints,
        "prior": _stored_prior("branch_length_prior", contents.target.branch_length_prior),
        "priors": {name: _stored_prior(name, prior) for name, prior in contents.target.priors.items()},
        "graph": network.graph,
        "logits": network.logits.detach(),
        "lengths": contents.family.lengths,
        **{name: getattr(contents, name) for name in PosteriorContents._fields[2:]},
    }
    tensors: dict[str, Tensor] = {}
    try:
        coded = encode(data, tensors, _TYPES, "the approximation")
    except CheckpointError as error:
        raise SettingsError(
            f"{path}: the approximation cannot be saved, because it contains an object from outside bayeskit "
            f"({error}). Remedy: fit with `checkpoint`; the same call then returns the same approximation again."
        ) from error
    save_tensors(path, tensors, {"data": coded}, _SCHEMA)


def read_posterior(path: str | Path) -> PosteriorContents:
    """Read a file without running its code; CheckpointError if it is missing, damaged or has other contents."""
    with loaded_tensors(path, _SCHEMA) as (tensors, facts):
        return _restored(decode(facts["data"], tensors, _TYPES))


def _prior_parameters(prior: dist.TorchDistribution) -> dict[str, Any]:
    """Return the parameters of a distribution, or of its base distribution if it is `Independent`."""
    if isinstance(prior, torch.distributions.Independent):
        base = prior.base_dist
        return {
            "base_dist": [type(base).__name__, _prior_parameters(base)],
            "event_dims": prior.reinterpreted_batch_ndims,
        }
    # Derived parameters are cached as attributes and left out.
    given = (name for name in sorted(prior.arg_constraints) if name in vars(prior) or _is_property(prior, name))
    return {name: getattr(prior, name) for name in given}


def _is_property(item: object, name: str) -> bool:
    return isinstance(getattr(type(item), name, None), property)


def _without_priors(model: Any) -> Any:
    """Return a model with the default priors in place of given ones, which are stored beside it."""
    if not isinstance(model, Parameterized):
        return model
    fields = {item.name: getattr(model, item.name) for item in dataclass_fields(model)}  # type: ignore[arg-type]
    given = {name: None for name, value in fields.items() if isinstance(value, torch.distributions.Distribution)}
    inner = {name: _without_priors(value) for name, value in fields.items() if isinstance(value, Parameterized)}
    return replace(model, **given, **inner) if given or inner else model  # type: ignore[type-var]


def _stored_data(data: Alignment | Partition) -> Any:
    """Return an alignment, or the arguments of a partition, without priors."""
    if isinstance(data, Alignment):
        return data
    parts = (
        {name: _without_priors(model) for name, model in by_subset.items()}
        for by_subset in (data.substitution, data.site_rates)
    )
    return [data.subsets, *parts, data.linked, data.relative_rates if isinstance(data.relative_rates, Tensor) else None]


def _restored_data(stored: Any, shares: dist.TorchDistribution | None) -> Alignment | Partition:
    """Return the data; `shares` is the prior of the shares of subsets with unknown rates."""
    if isinstance(stored, Alignment):
        return stored
    subsets, substitution, site_rates, linked, rates = stored
    return Partition(
        subsets, substitution, site_rates, linked=linked, relative_rates=rates if shares is None else shares
    )


def _stored_prior(site: str, prior: dist.TorchDistribution) -> _Prior:
    event_dims = 0
    while isinstance(prior, torch.distributions.Independent):
        event_dims, prior = event_dims + prior.reinterpreted_batch_ndims, prior.base_dist
    name = type(prior).__name__
    # A torch distribution is equivalent to Pyro's of the same name.
    if not any(kind.__name__ == name and issubclass(kind, type(prior)) for kind in _PRIORS):
        raise SettingsError(
            f"{site}: {name} cannot be saved. Remedy: use one of {', '.join(kind.__name__ for kind in _PRIORS)}."
        )
    return _Prior(name, _prior_parameters(prior), event_dims)


def _restored_prior(stored: _Prior) -> dist.TorchDistribution:
    kind = next((kind for kind in _PRIORS if kind.__name__ == stored.name), None)
    if kind is None:
        raise CheckpointError(f"the prior {stored.name} is unknown")
    prior = kind(**stored.parameters)
    return prior.to_event(stored.event_dims) if stored.event_dims else prior


def _restored(data: dict[str, Any]) -> PosteriorContents:
    network = SubsplitBayesianNetwork(data["graph"], data["logits"])
    priors = {name: _restored_prior(stored) for name, stored in data["priors"].items()}
    restored = _restored_data(data["alignment"], priors.get("rate_shares"))
    likelihood = forest_likelihood(restored, data["substitution"], data["site_rates"])
    target = TreeTarget(likelihood, _restored_prior(data["prior"]), priors, data["constraints"])
    family = TreeFamily(network, data["lengths"], target.guide)
    parameters, bounds, positions, ending = (data[name] for name in ("parameters", "bounds", "positions", "ending"))
    expected = family.start(torch.Generator().manual_seed(0)).shape
    if (
        parameters.shape != expected
        or parameters.dtype != torch.float64
        or bounds.dim() != 1
        or positions.shape != bounds.shape
    ):
        raise CheckpointError(f"the shape of the parameters is {tuple(parameters.shape)}, not {tuple(expected)}")
    if ending not in get_args(Ending):
        raise CheckpointError(f"the ending {ending!r} is unknown")
    return PosteriorContents(
        family=family,
        target=target,
        parameters=parameters,
        bounds=bounds,
        positions=positions,
        ending=ending,
        seconds=float(data["seconds"]),
        settings=dict(data["settings"]),
    )
