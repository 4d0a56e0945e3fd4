"""Normalisation of each input's features, and noise on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bayeskit.errors import ModelError, ShapeError
from bayeskit.models.wide_networks.covariance import Covariance
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances


@dataclass(frozen=True)
class LayerNormalization:
    """Features minus their mean, by their standard deviation, over channels and sites.

    Attributes
    ----------
    shape : tuple of int
        Of channels and sites of the finite layer.
    epsilon : float
        Added to the variance.
    trains_gain, trains_shift : bool
        Whether a gain and a shift for each channel and site, one and zero at first, take part in gradients.
    any_sites : bool
        Whether ``shape`` is of channels only; sites are as they come, and share their gains and shifts.
    """

    shape: tuple[int, ...]
    epsilon: float
    trains_gain: bool = False
    trains_shift: bool = False
    any_sites: bool = False

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each input has one mean and one variance."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Centre and scale."""
        ((source, state),) = inputs
        state = state.settled()
        sites = () if self.any_sites else state.sites
        if self.shape != (state.channels, *sites):
            raise ShapeError(
                f"layer {name!r} normalizes {self.shape} and receives {(state.channels, *sites)}; the limit is "
                "known of a LayerNorm over all channels and sites"
            )
        if self.any_sites and state.num_axes and state.ntk is not None and (self.trains_gain or self.trains_shift):
            raise ModelError(
                f"layer {name!r} (GroupNorm) trains gains or shifts that all sites share; its tangent kernel has no "
                "limit here: give it affine=False, or take LayerNorm over channels and sites"
            )
        a, b = pairs.variances(source, state)
        means = pairs.means(source, state)
        axes = tuple(range(-state.num_axes * (2 if state.all_pairs else 1), 0))
        if axes:
            a, b = a.mean(axes, keepdim=True), b.mean(axes, keepdim=True)
        nngp, gap = state.nngp, state.gap
        if means is not None:
            first, second = (x.mean(axes, keepdim=True) for x in means) if axes else means
            centred = means[0] - first, means[1] - second
            nngp = nngp - means[0] * means[1] + centred[0] * centred[1]
            a, b, gap = a - first.square(), b - second.square(), None
        scale = ((a + self.epsilon) * (b + self.epsilon)).rsqrt()
        ntk = state.ntk
        nngp = nngp * scale
        if ntk is not None:
            ntk = ntk * scale
            if self.trains_shift:
                ntk = ntk + state.same_site
        mean = None if state.mean is None or not state.num_axes else self._centred(state)
        return state.with_values(
            nngp, ntk, gap=None if gap is None else gap * scale.square(), mean=mean, gain=self.trains_gain
        )

    def _centred(self, state: Covariance) -> Tensor:
        """Return what is left of the mean at each site once the mean over sites is gone."""
        assert state.mean is not None
        axes = tuple(range(-state.num_axes, 0))
        centre = state.mean.mean(axes, keepdim=True)
        spread = state.variance().mean(axes, keepdim=True) - centre.square()
        return (state.mean - centre) * (spread + self.epsilon).rsqrt()


@dataclass(frozen=True)
class Dropout:
    """Features set to zero at random, each input with a mask of its own, and the rest scaled up.

    Attributes
    ----------
    rate : float
        The probability of zero.
    """

    rate: float

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each pair of sites goes by itself."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Scale the variance of an input's own features up; covariances stay."""
        ((_, state),) = inputs
        state = state.settled()
        if pairs.first is not None:
            return replace(state, gap=None)
        more = 1 + (1 / (1 - self.rate) - 1) * state.same_site
        return replace(state, nngp=state.nngp * more, ntk=None if state.ntk is None else state.ntk * more, gap=None)
