"""What every layer does: move covariances of its inputs to covariances of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bayeskit.models.wide_networks.covariance import Covariance, Profile


@dataclass(frozen=True)
class Pairs:
    """Which inputs are paired: all of one set with all of another, or one by one.

    Attributes
    ----------
    first, second : Profile or None
        Of the two sets; None while each input is paired with itself and its profile is being made.
    outer : bool
        Whether all are paired with all, so that covariances begin with two dimensions.
    """

    first: Profile | None
    second: Profile | None
    outer: bool

    def variances(self, name: str, state: Covariance) -> tuple[Tensor, Tensor]:
        """Return the second moments of one layer's features, to be broadcast against its covariances."""
        if self.first is None or self.second is None:
            own = state.variance()
            return self.spread(own, own, state)
        return self.spread(self.first.variance[name], self.second.variance[name], state)

    def means(self, name: str, state: Covariance) -> tuple[Tensor, Tensor] | None:
        """Return the first moments likewise, where they are not zero."""
        if self.first is None or self.second is None:
            return None if state.mean is None else self.spread(state.mean, state.mean, state)
        if name not in self.first.mean:
            return None
        return self.spread(self.first.mean[name], self.second.mean[name], state)

    def spread(self, first: Tensor, second: Tensor, state: Covariance) -> tuple[Tensor, Tensor]:
        """Return two sets of numbers, one a site, such that they broadcast against covariances."""
        if state.all_pairs:
            ones = (1,) * state.num_axes
            batch = first.dim() - state.num_axes
            first = first.reshape(*first.shape, *ones)
            second = second.reshape(*second.shape[:batch], *ones, *second.shape[batch:])
        return (first[:, None], second[None]) if self.outer else (first, second)


@dataclass(frozen=True)
class Variances:
    """Variances of weights and biases, by the name of their layer."""

    weight: Mapping[str, Tensor | float]
    bias: Mapping[str, Tensor | float]


class Layer(Protocol):
    """A layer of a network, in the limit of infinite width."""

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Return whether covariances between different sites of its input are needed, if those of its output are."""
        ...

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Return the covariances of its output; inputs come with the names of the layers that made them."""
        ...
