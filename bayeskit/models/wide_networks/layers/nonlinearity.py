"""Nonlinear functions of each feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.covariance import Covariance
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances


@dataclass(frozen=True)
class Nonlinearity:
    """A function applied to every feature, whose inputs are normal in the limit."""

    activation: Activation

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each pair of sites goes by itself."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Return moments of the function of jointly normal features."""
        ((source, state),) = inputs
        a, b = pairs.variances(source, state)
        moments = self.activation.moments(state.nngp, a, b, state.gap, derivative=state.ntk is not None)
        ntk = None
        if state.ntk is not None:
            assert moments.derivative is not None
            ntk = state.ntk * moments.derivative
            if state.gain:
                ntk = ntk + self.activation.gain().moments(state.nngp, a, b, state.gap, derivative=False).nngp
        mean = self.activation.mean(state.variance()) if pairs.first is None else None
        return state.with_values(moments.nngp, ntk, gap=moments.gap, mean=mean)
