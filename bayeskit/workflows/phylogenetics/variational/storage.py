"""What a fitted approximation is made of, as data of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._files import load_tensors, save_tensors
from bayeskit._tasks import decode, encode, qualified_name
from bayeskit.errors import BayeskitError, CheckpointError, SettingsError
from bayeskit.inference.samplers.driver import Ending
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    K80,
    Alignment,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    SubsplitBayesianNetwork,
)
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.workflows.phylogenetics.variational.family import TreeFamily, TreeTarget
from bayeskit.workflows.phylogenetics.variational.flow import FlowLengths
from bayeskit.workflows.phylogenetics.variational.lengths import LogNormalLengths

KIND, VERSION = "VariationalPosterior", 1
#: Priors of one branch length, or of several that are independent, and of all together.
_PRIORS = (
    *(dist.Exponential, dist.Gamma, dist.InverseGamma, dist.LogNormal, dist.Weibull),
    *(dist.HalfNormal, dist.HalfCauchy, dist.Uniform, GammaDirichlet),
)


class Prior(NamedTuple):
    """A distribution by the name of its class.

    Attributes
    ----------
    name : str
    parameters : dict of str to Tensor
    event_dims : int
        How many of its batch dimensions are one event.
    """

    name: str
    parameters: dict[str, Any]
    event_dims: int


_STORED = (
    *(Alignment, SubsplitGraph, Prior, JC69, K80, HKY85, GTR),
    *(GammaRates, InvariantSites, LogNormalLengths, FlowLengths),
)
_TYPES = {qualified_name(kind): kind for kind in _STORED}


class Contents(NamedTuple):
    """What a file holds.

    Attributes
    ----------
    family : TreeFamily
    target : TreeTarget
    parameters, bounds : Tensor
    ending : Ending
    seconds : float
    settings : dict
    """

    family: TreeFamily
    target: TreeTarget
    parameters: Tensor
    bounds: Tensor
    ending: Ending
    seconds: float
    settings: dict[str, Any]


def write(path: str | Path, contents: Contents) -> None:
    """Write a file, whole or not at all.

    Raises
    ------
    SettingsError
        If the model or the family is of a class that a file cannot name.
    OutputError
        If the file cannot be written.
    """
    network, likelihood = contents.family.network, contents.target.likelihood
    data = {
        "alignment": likelihood.alignment,
        "substitution": likelihood.substitution,
        "site_rates": likelihood.site_rates,
        "prior": _stored_prior(contents.target.branch_length_prior),
        "graph": network.graph,
        "logits": network.logits.detach(),
        "lengths": contents.family.lengths,
        **{name: getattr(contents, name) for name in ("parameters", "bounds", "ending", "seconds", "settings")},
    }
    tensors: dict[str, Tensor] = {}
    try:
        coded = encode(data, tensors, _TYPES, "the approximation")
    except CheckpointError as error:
        raise SettingsError(
            f"{path}: the approximation cannot be saved, as it holds something that is not of bayeskit ({error}). "
            "Remedy: fit with `checkpoint`, with which the same call returns the same approximation again."
        ) from error
    save_tensors(path, tensors, {"kind": KIND, "version": VERSION, "data": coded})


def read(path: str | Path) -> Contents:
    """Read a file; reading runs no code.

    Raises
    ------
    CheckpointError
        If the file is missing, truncated, or holds something else.
    """
    tensors, facts = load_tensors(path)
    if facts.get("kind") != KIND or facts.get("version") != VERSION:
        raise CheckpointError(f"{path} holds {facts.get('kind')}, not a {KIND} of this version; load it as what it is")
    try:
        return _restored(decode(facts["data"], tensors, _TYPES))
    except (BayeskitError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its contents do not fit together ({error}); write it again") from error


def prior_parameters(prior: dist.TorchDistribution) -> dict[str, Any]:
    """Return what tells a distribution from others of its class: its parameters, or those of what it is made of.

    Examples
    --------
    >>> prior_parameters(dist.LogNormal(torch.tensor([-2.0, -3.0]), 1.0).to_event(1))["base_dist"]
    ['LogNormal', {'loc': tensor([-2., -3.]), 'scale': tensor([1., 1.])}]
    """
    if isinstance(prior, torch.distributions.Independent):
        base = prior.base_dist
        return {
            "base_dist": [type(base).__name__, prior_parameters(base)],
            "event_dims": prior.reinterpreted_batch_ndims,
        }
    # Some parameters follow from others, and are kept once they were asked for.
    given = (name for name in sorted(prior.arg_constraints) if name in vars(prior) or _is_property(prior, name))
    return {name: getattr(prior, name) for name in given}


def _is_property(item: object, name: str) -> bool:
    return isinstance(getattr(type(item), name, None), property)


def _stored_prior(prior: dist.TorchDistribution) -> Prior:
    event_dims = 0
    while isinstance(prior, torch.distributions.Independent):
        event_dims, prior = event_dims + prior.reinterpreted_batch_ndims, prior.base_dist
    name = type(prior).__name__
    # A distribution of torch itself is as good as Pyro's.
    if not any(kind.__name__ == name and issubclass(kind, type(prior)) for kind in _PRIORS):
        raise SettingsError(
            f"branch_length_prior: {name} cannot be saved. Remedy: use one of "
            f"{', '.join(kind.__name__ for kind in _PRIORS)}."
        )
    return Prior(name, prior_parameters(prior), event_dims)


def _restored_prior(stored: Prior) -> dist.TorchDistribution:
    kind = next((kind for kind in _PRIORS if kind.__name__ == stored.name), None)
    if kind is None:
        raise CheckpointError(f"there is no prior {stored.name}")
    prior = kind(**stored.parameters)
    return prior.to_event(stored.event_dims) if stored.event_dims else prior


def _restored(data: dict[str, Any]) -> Contents:
    likelihood = ForestLikelihood(data["alignment"], data["substitution"], site_rates=data["site_rates"])
    network = SubsplitBayesianNetwork(data["graph"], data["logits"])
    family = TreeFamily(network, data["lengths"])
    parameters, bounds, ending = data["parameters"], data["bounds"], data["ending"]
    expected = family.start(torch.Generator().manual_seed(0)).shape
    if parameters.shape != expected or parameters.dtype != torch.float64 or bounds.dim() != 1:
        raise CheckpointError(f"parameters of shape {tuple(parameters.shape)} for a family with {tuple(expected)}")
    if ending not in get_args(Ending):
        raise CheckpointError(f"a run does not end as {ending!r}")
    target = TreeTarget(likelihood, _restored_prior(data["prior"]))
    return Contents(family, target, parameters, bounds, ending, float(data["seconds"]), dict(data["settings"]))
