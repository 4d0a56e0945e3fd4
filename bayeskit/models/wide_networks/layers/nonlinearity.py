"""Nonlinear functions of each feature."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.errors import AccuracyWarning, ModelError
from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.covariance import Covariance, visible
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances

ACCURACY = 1e-6  # relative errors of moments above it are worth a warning
PROBES = 8  # variances at which errors are bounded, from the smallest to the largest


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
        if state.mixed and state.ntk is not None:
            raise ModelError(
                f"layer {name!r} is a nonlinearity of what sums or averages of a LayerNorm with trainable gains have "
                "made; its tangent kernel has no limit here: give that LayerNorm elementwise_affine=False, or put a "
                "layer with weights behind it"
            )
        if pairs.first is None and isinstance(self.activation, Quadrature):
            self.activation.check_elementwise()
        a, b = pairs.variances(source, state)
        moments = self.activation.moments(state.nngp, a, b, state.gap, derivative=state.ntk is not None)
        ntk = None
        if state.ntk is not None:
            assert moments.derivative is not None
            ntk = state.ntk * moments.derivative
            if state.gain:
                gained = self.activation.gain().moments(state.nngp, a, b, state.gap, derivative=False).nngp
                ntk = ntk + gained * state.same_site
        mean = None
        if pairs.first is None:
            mean = self.activation.mean(state.variance())
            self._check_accuracy(name, state.variance(), derivative=state.ntk is not None)
        return state.with_values(moments.nngp, ntk, gap=moments.gap, mean=mean)

    def _check_accuracy(self, name: str, variance: Tensor, derivative: bool) -> None:
        """Warn if moments by quadrature may be off; those of an input with itself are the worst."""
        if not isinstance(self.activation, Quadrature):
            return
        if not visible(variance):
            return
        ordered = variance.detach().reshape(-1).sort().values
        chosen = ordered[torch.linspace(0, len(ordered) - 1, PROBES).round().long()].double()
        try:
            bounds = self.activation.error_bound(chosen, derivative=derivative)
        except ModelError as error:
            raise ModelError(f"layer {name!r}: {error}") from error
        values = self.activation.moments(chosen, chosen, chosen, derivative=derivative)
        for kind, bound, value in zip(("values", "derivatives"), bounds, values, strict=False):
            if bound is None or value is None:
                continue
            if not bool(torch.isfinite(value).all() and torch.isfinite(bound).all()):
                raise ModelError(
                    f"layer {name!r}: moments of its function's {kind} are not finite at variances of its features "
                    f"up to {float(ordered[-1]):.3g}"
                )
            # Where both are zero nothing is lost; an infinite ratio is real: the quadrature misses the whole function.
            relative = float(torch.where(bound > 0, bound / value.abs(), 0).max())
            if relative > ACCURACY:
                warnings.warn(
                    f"layer {name!r}: second moments of its function's {kind} may be off by a relative "
                    f"{relative:.0e}, for it is not smooth on the scale of its features; more terms and nodes help, "
                    "Elementwise(Quadrature(function, num_terms=512, num_nodes=2048)), or smaller variances",
                    AccuracyWarning,
                    stacklevel=2,
                )
