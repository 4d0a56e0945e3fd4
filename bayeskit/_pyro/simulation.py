"""Run a Pyro model forward: parameters from the prior, data from the model, and the model with those data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pyro.distributions import Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._pyro.density import PyroDensity
from bayeskit._pyro.draws import draw
from bayeskit._pyro.reader import is_deterministic, is_enumerated
from bayeskit._torch import global_stream
from bayeskit.errors import ModelError, UnsupportedSiteError


class Simulation(NamedTuple):
    """One draw of everything a model describes."""

    latent: dict[str, Tensor]  # of each continuous latent site
    observed: dict[str, Tensor]  # in place of each observed site's data


class _Simulator(Messenger):
    """Draw the observed sites as well as the latent ones."""

    def __init__(self, density: PyroDensity) -> None:
        super().__init__()
        self.density = density
        self.latent: dict[str, Tensor] = {}
        self.observed: dict[str, Tensor] = {}

    def _pyro_param(self, msg: Any) -> None:
        msg["value"], msg["done"] = self.density._constants.params[msg["name"]], True

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        if msg["is_observed"]:
            _refuse_what_is_no_distribution(msg)
            msg["value"] = self.observed[name] = _draw_like(name, fn, msg["value"])
        elif not is_enumerated(msg) and msg["value"] is None:
            msg["value"] = self.latent[name] = self.density._draw(fn)


def simulate(density: PyroDensity, generator: torch.Generator) -> Simulation:
    """Draw parameters from the prior and data from the model at these parameters.

    Raises
    ------
    UnsupportedSiteError
        If the likelihood holds a ``pyro.factor`` or a distribution that cannot be drawn from.
    ModelError
        If an observed site is scaled, so that it is no distribution of data.
    """
    simulator = _Simulator(density)
    with global_stream(generator), density._globals(validate=False), torch.no_grad(), simulator:
        density._model(*density._args, **density._kwargs)
    return Simulation(simulator.latent, simulator.observed)


def with_observed(density: PyroDensity, observed: Mapping[str, Tensor]) -> PyroDensity:
    """Return the same model with other data at its observed sites; ``density`` stays as it is."""
    other = copy.copy(density)
    other._constants = replace(density._constants, observed=density._constants.observed | dict(observed))
    other.data = [*observed.values(), *density.data[len(density.observed_sites) :]]
    return other


def with_args(density: PyroDensity, args: tuple[Any, ...]) -> PyroDensity:
    """Return the same model called with other arguments of the same shapes; ``density`` stays as it is."""
    other = copy.copy(density)
    other._args = args
    other.data = [argument for argument in args if isinstance(argument, Tensor)]
    return other


def _refuse_what_is_no_distribution(msg: Any) -> None:
    name = msg["name"]
    if isinstance(msg["fn"], Unit):
        raise UnsupportedSiteError(
            f"the factor {name!r} says how likely the data are, not how to draw them; replace it by "
            "pyro.sample(..., obs=data), or pass simulate=(values, generator) -> args"
        )
    if bool((torch.as_tensor(msg["scale"]) != 1).any()):
        raise ModelError(
            f"the observed site {name!r} is scaled by poutine.scale, so its likelihood is no distribution of data; "
            "remove the scale, or pass simulate=(values, generator) -> args"
        )


def _draw_like(name: str, fn: Any, value: Any) -> Tensor:
    """Draw as many values as were observed, a batch that no plate declares included."""
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
