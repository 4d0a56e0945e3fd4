"""Distributions of branch lengths, given the topology, with parameters shared among topologies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from bayeskit.extend import global_stream, real_number, whole_number, zuko

_HALF_LOG_TWO_PI = 0.9189385332046727


class Lengths(NamedTuple):
    """Branch lengths `(topologies, edges)` and their log density `(topologies,)`."""

    value: Tensor
    log_prob: Tensor


class LengthFamily(Protocol):
    """A family of distributions of branch lengths, given the features of edges; given these, edges are independent."""

    @property
    def with_pairs(self) -> bool:
        """Whether primary subsplit pairs are features."""

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the first parameters, a vector that ends with equally many numbers for each feature."""

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths that are differentiable by the parameters, features `(topologies, edges, features of one)`."""

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the log density of lengths `(topologies, edges)`, shape `(topologies,)`."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Independent log-normal branch lengths with parameters shared among topologies.

    The mean and log standard deviation of a log length are sums over the features of its edge: one pair of parameters
    for its split and, optionally, one for each primary subsplit pair (the split and the subsplit of one of its sides).

    Parameters
    ----------
    with_pairs : bool, default True
        Include primary subsplit pairs.
    location, scale : float, default -3.0 and 1.0
        Initial mean and standard deviation of the log lengths.

    Raises
    ------
    SettingsError
        If `scale` is not positive.

    References
    ----------
    Zhang, C., Matsen, F. A. (2019). Variational Bayesian phylogenetic inference. ICLR.

    Examples
    --------
    >>> family, generator = LogNormalLengths(with_pairs=False), torch.Generator().manual_seed(0)
    >>> parameters, features = family.start(7, generator), torch.zeros(2, 5, 1, dtype=torch.int64)
    >>> lengths = family.rsample(parameters, features, generator)
    >>> torch.allclose(family.log_prob(parameters, features, lengths.value), lengths.log_prob)
    True
    """

    with_pairs: bool = True
    location: float = -3.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        real_number("location", self.location)
        real_number("scale", self.scale, "(0, inf)")

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the initial parameters: all zero, relative to `location` and `scale`."""
        return torch.zeros(2 * num_features, dtype=torch.float64)

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths; see `LengthFamily`."""
        location, log_scale = self._moments(parameters, features)
        noise = torch.randn(location.shape, generator=generator, dtype=location.dtype)
        log_length = location + log_scale.exp() * noise
        density = -(log_length + log_scale).sum(-1) - _standard(noise)
        return Lengths(log_length.exp(), density)

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log densities; see `LengthFamily`."""
        location, log_scale = self._moments(parameters, features)
        log_length = lengths.log()
        noise = (log_length - location) * (-log_scale).exp()
        return -(log_length + log_scale).sum(-1) - _standard(noise)

    def _moments(self, parameters: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the logarithms, `(topologies, edges)` each."""
        sums = _sum_features(parameters.reshape(-1, 2), features)
        start = parameters.new_tensor([self.location, self.scale])
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log()


def _sum_features(table: Tensor, features: Tensor) -> Tensor:
    """Add up the rows of `table` named by each edge's features, `(..., features) -> (..., columns)`."""
    # Index one past the last row stands for a missing feature and contributes zero.
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    flat = functional.embedding_bag(features.flatten(0, -2), padded, mode="sum", padding_idx=len(table))
    return flat.reshape(*features.shape[:-1], -1)


def _standard(noise: Tensor) -> Tensor:
    """Return minus the log density of standard normal noise, `(*batch, edges) -> (*batch)`."""
    return 0.5 * noise.square().sum(-1) + noise.shape[-1] * _HALF_LOG_TWO_PI


@dataclass(frozen=True)
class FlowLengths:
    """Branch lengths from a conditional normalizing flow: a neural spline, then location and scale, of the logarithms.

    All edges share the spline. Its context vector, location and scale are sums over the features of an edge. Given the
    topology, edges are independent.

    Parameters
    ----------
    with_pairs : bool, default True
        Include primary subsplit pairs.
    location, scale : float, default -3.0 and 1.0
        As in `LogNormalLengths`.
    context : int, default 3
        Dimension of the context vector.
    bins : int, default 6
        Number of bins of the spline.
    hidden : int, default 16
        Units of the hidden layer between context and spline.

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
        real_number("scale", self.scale, "(0, inf)")
        for name, least in (("context", 1), ("bins", 2), ("hidden", 1)):
            whole_number(name, getattr(self, name), least)

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the initial parameters: zero for all features, zuko's initial values for the network."""
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
        density = -0.5 * noise.square() - _HALF_LOG_TWO_PI - log_slope - log_scale - log_length
        return Lengths(log_length.exp(), density.sum(-1))

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return log densities; see `LengthFamily`."""
        location, log_scale, transform = self._conditional(parameters, features)
        log_length = lengths.log()
        bent = (log_length - location) * (-log_scale).exp()
        noise, log_slope = transform.call_and_ladj(bent[..., None])
        density = -0.5 * noise[..., 0].square() - _HALF_LOG_TWO_PI + log_slope - log_scale - log_length
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
        sums = _sum_features(parameters[used:].reshape(-1, 2 + self.context), features)
        start = parameters.new_tensor([self.location, self.scale])
        transform = functional_call(flow, values, (sums[..., 2:],)).transform
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log(), transform
