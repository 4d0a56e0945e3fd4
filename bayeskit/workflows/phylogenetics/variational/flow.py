"""Branch lengths with a normalizing flow on top."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayeskit._flows import zuko
from bayeskit._settings import real_number, whole_number
from bayeskit._torch import global_stream
from bayeskit.errors import SettingsError
from bayeskit.workflows.phylogenetics.variational.lengths import HALF_LOG_TWO_PI, Lengths, sum_features


@dataclass(frozen=True)
class FlowLengths:
    """Branch lengths whose logarithms are normal noise, bent by a neural spline and then moved and scaled.

    All edges share the spline, whose shape depends on a few numbers that belong to the features of an edge, as location
    and scale do. Given the topology, edges are independent.

    Parameters
    ----------
    with_pairs : bool, default True
        Whether primary subsplit pairs count, or splits only.
    location, scale : float, default -3.0 and 1.0
        As in `LogNormalLengths`.
    context : int, default 3
        How many numbers of each feature the spline depends on.
    bins : int, default 6
        Of the spline.
    hidden : int, default 16
        Units of the layer between them.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Zhang, C. (2020). Improved variational Bayesian phylogenetic inference with normalizing flows. NeurIPS 33.

    Durkan, C., Bekasov, A., Murray, I., Papamakarios, G. (2019). Neural spline flows. NeurIPS 32.

    Examples
    --------
    >>> family, generator = FlowLengths(), torch.Generator().manual_seed(0)
    >>> parameters, features = family.start(7, generator), torch.tensor([[[0, 1, 7], [2, 3, 4]]])
    >>> lengths = family.rsample(parameters, features, generator)
    >>> torch.allclose(family.log_prob(parameters, features, lengths.value), lengths.log_prob)
    True
    """

    with_pairs: bool = True
    location: float = -3.0
    scale: float = 1.0
    context: int = 3
    bins: int = 6
    hidden: int = 16

    def __post_init__(self) -> None:
        real_number("location", self.location)
        if not real_number("scale", self.scale) > 0:
            raise SettingsError(f"scale must be positive, not {self.scale}")
        for name, least in (("context", 1), ("bins", 2), ("hidden", 1)):
            whole_number(name, getattr(self, name), least)

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the first parameters: the numbers of features are zero, the network is as zuko starts it."""
        with global_stream(generator):
            flow = self._flow()
        weights = torch.nn.utils.parameters_to_vector(flow.parameters()).detach()
        return torch.cat([weights, weights.new_zeros(num_features * (2 + self.context))])

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths; see `LengthFamily`."""
        location, log_scale, transform = self._conditional(parameters, features)
        noise = torch.randn(location.shape, generator=generator, dtype=location.dtype)
        bent, log_slope = transform.inv.call_and_ladj(noise[..., None])
        log_length = location + log_scale.exp() * bent[..., 0]
        density = -0.5 * noise.square() - HALF_LOG_TWO_PI - log_slope - log_scale - log_length
        return Lengths(log_length.exp(), density.sum(-1))

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log densities; see `LengthFamily`."""
        location, log_scale, transform = self._conditional(parameters, features)
        log_length = lengths.log()
        bent = (log_length - location) * (-log_scale).exp()
        noise, log_slope = transform.call_and_ladj(bent[..., None])
        density = -0.5 * noise[..., 0].square() - HALF_LOG_TWO_PI + log_slope - log_scale - log_length
        return density.sum(-1)

    def _flow(self) -> nn.Module:
        hidden = (self.hidden,)
        flow = zuko.flows.NSF(1, self.context, transforms=1, bins=self.bins, hidden_features=hidden)
        return flow.double()

    @cached_property
    def _frame(self) -> nn.Module:
        """A network whose parameters are replaced by those of the family."""
        with torch.random.fork_rng(devices=[]):
            return self._flow()

    def _conditional(self, parameters: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return location and log scale of each edge, `(topologies, edges)`, and the transform to noise."""
        flow = self._frame
        values, used = {}, 0
        for name, parameter in flow.named_parameters():
            values[name] = parameters[used : used + parameter.numel()].reshape(parameter.shape)
            used += parameter.numel()
        sums = sum_features(parameters[used:].reshape(-1, 2 + self.context), features)
        start = parameters.new_tensor([self.location, self.scale])
        transform = functional_call(flow, values, (sums[..., 2:],)).transform
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log(), transform
