"""Layers that average over sites, or turn sites into channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.covariance import Covariance
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances

NO_WEIGHTS = Dense(1, 1, bias=False, standard=False)


@dataclass(frozen=True)
class Flatten:
    """Each site's channels become channels of their own."""

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Pair each site with itself only."""
        return False

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Average over sites."""
        ((_, state),) = inputs
        if not state.num_axes:
            return state
        channels = state.channels * state.sites.numel()
        state = state.settled().same_sites()
        axes = tuple(range(-state.num_axes, 0))
        return replace(
            state,
            nngp=state.nngp.mean(axes),
            ntk=_apply(lambda x: x.mean(axes), state.ntk),
            mean=_apply(lambda x: x.mean(axes), state.mean),
            channels=channels,
            num_axes=0,
            gap=None,
        )


@dataclass(frozen=True)
class GlobalAverage:
    """The average over all sites.

    Attributes
    ----------
    num_axes : int
        Of the grid.
    keeps_grid : bool
        Whether a grid of one site is left, instead of a vector.
    """

    num_axes: int
    keeps_grid: bool = False

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Averages are correlated through all pairs of sites."""
        return True

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Average over all pairs of sites."""
        ((_, state),) = inputs
        _check_axes(name, self.num_axes, state)
        state = state.settled()
        axes = tuple(range(-2 * state.num_axes, 0))
        keep = self.keeps_grid
        return replace(
            state,
            nngp=state.nngp.mean(axes, keepdim=keep),
            ntk=_apply(lambda x: x.mean(axes, keepdim=keep), state.ntk),
            mean=_apply(lambda x: x.mean(tuple(range(-state.num_axes, 0)), keepdim=keep), state.mean),
            num_axes=state.num_axes if keep else 0,
            all_pairs=keep,
            gap=None,
        )


@dataclass(frozen=True)
class AveragePool:
    """Averages over windows.

    Attributes
    ----------
    window, stride : tuple of int
        An entry an axis.
    padding : tuple of tuple of int
        Zeros added before and after, which count in the average.
    """

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Averages are correlated through all pairs of sites."""
        return True

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Average over the windows of both sites of each pair."""
        ((_, state),) = inputs
        _check_axes(name, len(self.window), state)
        state = state.settled()
        pooled = self._pool(state, state.nngp, name)
        mean = state.mean
        if mean is not None:
            mean = self._axes(mean, mean.dim() - state.num_axes, name)
        return replace(
            state, nngp=pooled, ntk=_apply(lambda x: self._pool(state, x, name), state.ntk), mean=mean, gap=None
        )

    def _pool(self, state: Covariance, x: Tensor, name: str) -> Tensor:
        first = x.dim() - 2 * state.num_axes
        return self._axes(self._axes(x, first, name), first + state.num_axes, name)

    def _axes(self, x: Tensor, first: int, name: str) -> Tensor:
        """Average over windows along the axes from ``first`` on."""
        for axis, (window, stride, padding) in enumerate(zip(self.window, self.stride, self.padding, strict=True)):
            one = Convolution(NO_WEIGHTS, (window,), (stride,), (1,), (padding,))
            moved = x.movedim(first + axis, -1)
            layout = Covariance(moved, None, 1, num_axes=1)
            x = one.average(layout, moved, name).movedim(-1, first + axis)
        return x


def _check_axes(name: str, num_axes: int, state: Covariance) -> None:
    if state.num_axes != num_axes:
        raise ShapeError(f"layer {name!r} averages over {num_axes} axes, and its input has {state.num_axes}")


def _apply(function: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    return None if x is None else function(x)
