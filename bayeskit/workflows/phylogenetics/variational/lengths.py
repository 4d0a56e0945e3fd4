"""Distributions of branch lengths whose parameters topologies share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bayeskit._settings import real_number
from bayeskit.errors import SettingsError

HALF_LOG_TWO_PI = 0.9189385332046727


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
        """Return the first parameters, a vector."""

    def rsample(self, parameters: Tensor, features: Tensor, generator: torch.Generator) -> Lengths:
        """Draw lengths that are differentiable by the parameters, features `(topologies, edges, features of one)`."""

    def log_prob(self, parameters: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the log density of lengths `(topologies, edges)`, shape `(topologies,)`."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Independent log-normal branch lengths.

    Mean and log standard deviation of the logarithm of a length are sums over the features of its edge: a pair of
    parameters for its split and, on request, one for each primary subsplit pair, the split together with how one side
    of it is split further. Topologies that are alike around an edge share its parameters.

    Parameters
    ----------
    with_pairs : bool, default True
        Whether primary subsplit pairs count, or splits only.
    location, scale : float, default -3.0 and 1.0
        Mean and standard deviation of the logarithm at the start.

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
        if not real_number("scale", self.scale) > 0:
            raise SettingsError(f"scale must be positive, not {self.scale}")

    def start(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Return the first parameters: all zero, relative to `location` and `scale`."""
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
        sums = sum_features(parameters.reshape(-1, 2), features)
        start = parameters.new_tensor([self.location, self.scale])
        return sums[..., 0] + start[0], sums[..., 1] + start[1].log()


def sum_features(table: Tensor, features: Tensor) -> Tensor:
    """Add up the rows of each edge's features; one past the last row counts as zero.

    Examples
    --------
    >>> sum_features(torch.tensor([[1.0], [2.0]]), torch.tensor([[[0, 1], [1, 2]]]))
    tensor([[[3.],
             [2.]]])
    """
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    flat = functional.embedding_bag(features.flatten(0, -2), padded, mode="sum", padding_idx=len(table))
    return flat.reshape(*features.shape[:-1], -1)


def _standard(noise: Tensor) -> Tensor:
    """Return minus the log density of standard normal noise, `(*batch, edges) -> (*batch)`."""
    return 0.5 * noise.square().sum(-1) + noise.shape[-1] * HALF_LOG_TWO_PI
