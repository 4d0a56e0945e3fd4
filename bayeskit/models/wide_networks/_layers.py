"""Layers of an infinitely wide network, as maps of covariances."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeskit.errors import AccuracyWarning, DataError, ModelError, ShapeError
from bayeskit.extend import check_finite, visible, warn_user
from bayeskit.models.wide_networks._activations import Activation, Quadrature
from bayeskit.models.wide_networks._covariance import Covariance, Joint, Profile, excess, root

# Interface of layers: from covariances of inputs to covariances of outputs.


@dataclass(frozen=True)
class Pairs:
    """Pairing of inputs: all of one set with all of another, or one by one."""

    first: Profile | None  # None while each input is paired with itself to compute its profile
    second: Profile | None
    outer: bool  # whether all pairs of inputs are present, so that covariances begin with two dimensions

    def variances(self, name: str, state: Covariance) -> tuple[Tensor, Tensor]:
        """Return the second moments of one layer's features, shaped to broadcast against its covariances."""
        if self.first is None or self.second is None:
            own = state.variance()
            return self.spread(own, own, state)
        return self.spread(self.first.variance[name], self.second.variance[name], state)

    def means(self, name: str, state: Covariance) -> tuple[Tensor, Tensor] | None:
        """Return the first moments in the same shapes, or None if they are zero."""
        if self.first is None or self.second is None:
            return None if state.mean is None else self.spread(state.mean, state.mean, state)
        if name not in self.first.mean:
            return None
        return self.spread(self.first.mean[name], self.second.mean[name], state)

    def spread(self, first: Tensor, second: Tensor, state: Covariance) -> tuple[Tensor, Tensor]:
        """Reshape values per input and site such that they broadcast against covariances."""
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


Inputs = Sequence[tuple[str, Covariance]]
"""Covariances of a layer's inputs, with the names of the layers that they come from."""


class Layer(ABC):
    """A layer of a network in the limit of infinite width."""

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Whether covariances between sites of the input are needed; by default if those of the output are."""
        return wanted

    @abstractmethod
    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Return the covariances of the output."""


# Layers that add, join or scale the outputs of others.


@dataclass(frozen=True)
class SumOfBranches(Layer):
    """A weighted sum of uncorrelated features, such as a residual connection."""

    scale: tuple[float, ...]  # one factor per input

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Add covariances."""
        states = [state if len(inputs) == 1 else state.settled() for _, state in inputs]
        layouts = {(state.channels, state.num_axes, tuple(state.sites)) for state in states}
        if len(layouts) > 1:
            raise ShapeError(f"layer {name!r} adds features of different shapes: {sorted(layouts)}")
        squares = [scale * scale for scale in self.scale]
        return replace(
            states[0],
            nngp=_combined([state.nngp for state in states], squares),
            ntk=_combined_tangents([state.ntk for state in states], squares),
            mean=_combined_tangents([state.mean for state in states], self.scale),
            gap=_gap(inputs, pairs, squares),
            mixed=any(state.mixed for state in states),
        )


@dataclass(frozen=True)
class Concatenate(Layer):
    """Concatenation of the channels of several layers."""

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Average covariances, weighted by the numbers of channels."""
        states = [state.settled() for _, state in inputs]
        layouts = {(state.num_axes, tuple(state.sites)) for state in states}
        if len(layouts) > 1:
            raise ShapeError(f"layer {name!r} concatenates features on different grids: {sorted(layouts)}")
        channels = sum(state.channels for state in states)
        shares = [state.channels / channels for state in states]
        return replace(
            states[0],
            nngp=_combined([state.nngp for state in states], shares),
            ntk=_combined_tangents([state.ntk for state in states], shares),
            mean=_combined_tangents([state.mean for state in states], shares),
            channels=channels,
            gap=_gap(inputs, pairs, shares),
            mixed=any(state.mixed for state in states),
        )


def _gap(inputs: Inputs, pairs: Pairs, weights: Sequence[float]) -> Tensor | None:
    """Return the gap of a weighted sum of covariances, or None if a gap is unknown."""
    total: Joint | None = None
    for (source, state), weight in zip(inputs, weights, strict=True):
        if state.gap is None:
            return None
        term = Joint(state.nngp, *pairs.variances(source, state), state.gap).scaled(weight)
        total = term if total is None else total.plus(term)
    return None if total is None else total.gap


def _combined(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = weights[0] * tensors[0]
    for weight, x in zip(weights[1:], tensors[1:], strict=True):
        total = total + weight * x
    return total


def _combined_tangents(tensors: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    found = [(x, weight) for x, weight in zip(tensors, weights, strict=True) if x is not None]
    return _combined([x for x, _ in found], [weight for _, weight in found]) if found else None


# Layers with random weights: dense ones, and convolutions.


@dataclass(frozen=True)
class Dense(Layer):
    """A dense layer."""

    fan_in: int  # of the finite layer, as channels
    channels: int
    bias: bool
    standard: bool  # whether gradients are those of the weights themselves, or of weights with unit variance (NTK)
    trains_weight: bool = True
    trains_bias: bool = True

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Multiply by the weight variance and add the bias variance."""
        ((source, state),) = inputs
        if state.num_axes:
            raise ShapeError(
                f"layer {name!r}: a dense layer needs vectors, not features on a grid with {state.num_axes} axes; add "
                "Flatten or an average over the grid before it"
            )
        state = state.settled()
        if state.channels != self.fan_in:
            raise ShapeError(f"layer {name!r} expects {self.fan_in} features and receives {state.channels}")
        gap = None
        weight, bias = variances.weight[name], variances.bias[name] if self.bias else 0.0
        if state.gap is not None:
            gap = _padding_gap(state, *pairs.variances(source, state), weight, bias)
        return self.weigh(state, state.nngp, state.ntk, weight, bias, gap)

    def weigh(
        self,
        state: Covariance,
        nngp: Tensor,
        ntk: Tensor | None,
        weight: Tensor | float,
        bias: Tensor | float,
        gap: Tensor | None,
    ) -> Covariance:
        """Return the covariances after random weights, given averages over the inputs of an output."""
        result = weight * nngp
        tangent: Tensor | None = None
        if ntk is not None:
            if self.trains_weight:
                tangent = _plus(self.fan_in * nngp if self.standard else result, ntk, weight)
            else:
                tangent = weight * ntk
        if self.bias:
            result = result + bias
            if tangent is not None and self.trains_bias:
                tangent = tangent + (1.0 if self.standard else bias)
        return replace(state, nngp=result, ntk=tangent, channels=self.channels, gap=gap, mean=None, mixed=False)


def _padding_gap(state: Covariance, a: Tensor, b: Tensor, weight: Tensor | float, bias: Tensor | float) -> Tensor:
    """Return the gap of ``weight * k + bias``."""
    assert state.gap is not None
    gap = weight * weight * state.gap
    if isinstance(bias, float) and bias == 0:
        return gap
    apart = torch.add((root(a) - root(b)).square(), excess(state.nngp, state.gap, a, b), alpha=2)
    return _plus(gap, apart, weight * bias)


def _plus(x: Tensor, y: Tensor, factor: Tensor | float) -> Tensor:
    """Return ``x + factor * y``, in one operation if possible."""
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


@dataclass(frozen=True)
class Convolution(Layer):
    """A convolution over one or two axes."""

    dense: Dense  # its inputs are all entries in the window
    window: tuple[int, ...]  # one entry per axis, as in the following fields
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # sites added before and after
    mode: str = "zeros"  # of the padding: "zeros", "circular", "reflect" or "replicate"

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Average covariances over the window, scale and shift."""
        ((_, state),) = inputs
        state = state.settled()
        if state.num_axes != len(self.window):
            raise ShapeError(f"layer {name!r} convolves {len(self.window)} axes, but its input has {state.num_axes}")
        entering = state.channels * math.prod(self.window)
        if entering != self.dense.fan_in:
            raise ShapeError(
                f"layer {name!r} expects {self.dense.fan_in // math.prod(self.window)} channels and receives "
                f"{state.channels}"
            )
        nngp = self.average(state, state.nngp, name)
        ntk = None if state.ntk is None else self.average(state, state.ntk, name)
        bias = variances.bias[name] if self.dense.bias else 0.0
        return self.dense.weigh(state, nngp, ntk, variances.weight[name], bias, None)

    def average(self, state: Covariance, x: Tensor, name: str = "") -> Tensor:
        """Return averages over the window at each site, or at both sites of each pair."""
        first = x.dim() - state.num_axes * (2 if state.all_pairs else 1)
        for axis in range(state.num_axes):
            axes = (first + axis, first + state.num_axes + axis) if state.all_pairs else (first + axis,)
            width = self.padding[axis]
            if self.mode != "zeros":
                most = x.shape[axes[0]] - (self.mode == "reflect")
                if self.mode != "replicate" and max(width) > most:
                    raise ShapeError(
                        f"layer {name!r} adds {max(width)} sites to {x.shape[axes[0]]} as padding; {self.mode} padding "
                        f"can add {most} at most"
                    )
                for one in axes:
                    x = padded(x, one, width, self.mode)
                width = (0, 0)
            x = self._slide(x, axes, axis, width, name)
        return x.div_(math.prod(self.window))

    def _slide(self, x: Tensor, axes: tuple[int, ...], axis: int, width: tuple[int, int], name: str) -> Tensor:
        """Return sums over one axis of the window, along this axis of each site of a pair."""
        window, stride, dilation = self.window[axis], self.stride[axis], self.dilation[axis]
        entering = x.shape[axes[0]]
        size = (entering + sum(width) - dilation * (window - 1) - 1) // stride + 1
        if size < 1:
            raise ShapeError(
                f"layer {name!r}: the window is larger than the input, which has {entering + sum(width)} sites with "
                "padding"
            )
        total = _zeros_like(x, [size if i in axes else length for i, length in enumerate(x.shape)])
        for step in range(window):
            # Padding zeros contribute nothing: add only at sites whose window has this position inside the input.
            shift = step * dilation - width[0]
            first = max(-(shift // stride), 0)
            count = min((entering - 1 - shift) // stride + 1, size) - first
            if count < 1:
                continue
            part, gains = x, total
            for one in axes:
                part = part.narrow(one, first * stride + shift, (count - 1) * stride + 1)
                part = part if stride == 1 else part[(slice(None),) * one + (slice(None, None, stride),)]
                gains = gains.narrow(one, first, count)
            gains.add_(part)
        return total


def padded(x: Tensor, axis: int, width: tuple[int, int], mode: str) -> Tensor:
    """Return a tensor with copies of its sites added along one axis."""
    before, after = width
    if not (before or after):
        return x
    size = x.shape[axis]
    index = torch.arange(-before, size + after, device=x.device)
    if mode == "circular":
        index = index.remainder(size)
    elif mode == "replicate":
        index = index.clamp(0, size - 1)
    else:
        index = size - 1 - (size - 1 - index.abs()).abs()
    return x.index_select(axis, index)


def _zeros_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros with the memory order of the dimensions of ``x``."""
    order = sorted(range(x.dim()), key=lambda i: -x.stride()[i])
    zeros = x.new_zeros([shape[i] for i in order])
    return zeros.permute(sorted(range(x.dim()), key=order.__getitem__))


# Layers that average over sites, or turn sites into channels.

_NO_WEIGHTS = Dense(1, 1, bias=False, standard=False)


@dataclass(frozen=True)
class Flatten(Layer):
    """Flattening of channels and sites to channels."""

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Return False: only covariances of each site with itself are needed."""
        return False

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
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
class GlobalAverage(Layer):
    """The average over all sites."""

    num_axes: int
    keeps_grid: bool = False  # whether the output lies on a grid of one site, instead of being a vector

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Return True: the covariance of averages involves all pairs of sites."""
        return True

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
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
class AveragePool(Layer):
    """Averages over windows."""

    window: tuple[int, ...]  # one entry per axis, as in the following fields
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros added before and after, included in the average

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Return True: the covariance of averages involves all pairs of sites."""
        return True

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
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
            one = Convolution(_NO_WEIGHTS, (window,), (stride,), (1,), (padding,))
            moved = x.movedim(first + axis, -1)
            layout = Covariance(moved, None, 1, num_axes=1)
            x = one.average(layout, moved, name).movedim(-1, first + axis)
        return x


def _check_axes(name: str, num_axes: int, state: Covariance) -> None:
    if state.num_axes != num_axes:
        raise ShapeError(f"layer {name!r} averages over {num_axes} axes, but its input has {state.num_axes}")


def _apply(function: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    return None if x is None else function(x)


# Nonlinear functions of each feature.

_ACCURACY = 1e-6  # relative error of moments above which to warn
_PROBES = 8  # variances at which errors are bounded, from the smallest to the largest


@dataclass(frozen=True)
class Nonlinearity(Layer):
    """A function applied to every feature; the features are normal in the limit."""

    activation: Activation

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Return moments of the function of jointly normal features."""
        ((source, state),) = inputs
        if state.mixed and state.ntk is not None:
            raise ModelError(
                f"layer {name!r} applies a nonlinearity to a sum or average of outputs of a LayerNorm with trainable "
                "gains; this limit of the tangent kernel is not implemented. Remedy: set elementwise_affine=False in "
                "the LayerNorm, or add a layer with weights after it"
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
        """Warn if moments by quadrature may be inaccurate; errors are largest for an input with itself."""
        if not isinstance(self.activation, Quadrature):
            return
        if not visible(variance):
            return
        ordered = variance.detach().reshape(-1).sort().values
        chosen = ordered[torch.linspace(0, len(ordered) - 1, _PROBES).round().long()].double()
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
                    f"layer {name!r}: moments of the {kind} of its function are not finite for features with variances "
                    f"up to {float(ordered[-1]):.3g}"
                )
            # 0 / 0 counts as no error; an infinite ratio is real: the quadrature misses the whole function.
            relative = float(torch.where(bound > 0, bound / value.abs(), 0).max())
            if relative > _ACCURACY:
                warn_user(
                    f"layer {name!r}: second moments of the {kind} of its function may have a relative error of "
                    f"{relative:.0e}, because the function is not smooth on the scale of its features; use more terms "
                    "and nodes, Elementwise(Quadrature(function, num_terms=512, num_nodes=2048)), or smaller variances",
                    AccuracyWarning,
                )


# Normalisation of each input's features, and noise on them.


@dataclass(frozen=True)
class LayerNormalization(Layer):
    """Features minus their mean, divided by their standard deviation, over channels and sites."""

    shape: tuple[int, ...]  # channels and sites of the finite layer
    epsilon: float  # added to the variance
    trains_gain: bool = False  # whether gains for each channel and site, initially one, are trained
    trains_shift: bool = False  # whether shifts for each channel and site, initially zero, are trained
    any_sites: bool = False  # whether ``shape`` has channels only, and all sites share gains and shifts

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Centre and scale."""
        ((source, state),) = inputs
        state = state.settled()
        sites = () if self.any_sites else state.sites
        if self.shape != (state.channels, *sites):
            raise ShapeError(
                f"layer {name!r} normalizes {self.shape} and receives {(state.channels, *sites)}; the limit is "
                "implemented only for a LayerNorm over all channels and sites"
            )
        if self.any_sites and state.num_axes and state.ntk is not None and (self.trains_gain or self.trains_shift):
            raise ModelError(
                f"layer {name!r} (GroupNorm) trains gains or shifts that all sites share; this limit of the tangent "
                "kernel is not implemented. Remedy: set affine=False, or use LayerNorm over channels and sites"
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
        """Return the mean at each site after normalisation over sites."""
        assert state.mean is not None
        axes = tuple(range(-state.num_axes, 0))
        centre = state.mean.mean(axes, keepdim=True)
        spread = state.variance().mean(axes, keepdim=True) - centre.square()
        return (state.mean - centre) * (spread + self.epsilon).rsqrt()


@dataclass(frozen=True)
class Dropout(Layer):
    """Features set to zero at random, with a mask per input, and the rest scaled up."""

    rate: float  # probability of zero

    def propagate(self, name: str, inputs: Inputs, pairs: Pairs, variances: Variances) -> Covariance:
        """Scale up the variances of each input's features; covariances between inputs are unchanged."""
        ((_, state),) = inputs
        state = state.settled()
        if pairs.first is not None:
            return replace(state, gap=None)
        more = 1 + (1 / (1 - self.rate) - 1) * state.same_site
        return replace(state, nngp=state.nngp * more, ntk=None if state.ntk is None else state.ntk * more, gap=None)


# Covariances of data: products of inputs, averaged over channels.

CHUNK = 1 << 22  # largest number of entries held at once for the exact computation of nearly parallel pairs


def check_inputs(x: Tensor, name: str, num_axes: int | None) -> Tensor:
    """Return the inputs unchanged, or raise a ``DataError`` or ``ShapeError``."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(f"{name} must be a tensor of floating-point numbers, not {_kind(x)}")
    if x.dim() < 2 or (num_axes is not None and x.dim() != 2 + num_axes):
        wanted = {0: "(n, features)", 1: "(n, channels, length)", 2: "(n, channels, height, width)"}
        raise ShapeError(f"{name} must be {wanted.get(num_axes or 0, '(n, channels, ...)')}, not {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"{name} has dtype {x.dtype}, whose range is too small for products of variances; pass {name}.float()"
        )
    check_finite(x, name)
    return x


def check_vectors(x: Tensor, name: str) -> Tensor:
    """Return inputs of Pyro's and GPyTorch's kernels unchanged, ``(n, features)``, or raise an error."""
    if isinstance(x, Tensor) and x.dim() != 2:
        raise ShapeError(f"{name} must be (n, features), not {tuple(x.shape)}; flatten images, and pass input_shape")
    return check_inputs(x, name, 0)


def check_targets(x: Tensor, y: Tensor, one_output: bool = False) -> Tensor:
    """Return the targets ``(n, *outputs)``, with ``one_output`` as a vector ``(n,)``, or raise an error."""
    if one_output and isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise DataError(f"y must be a tensor of floating-point numbers, not {_kind(y)}")
    if y.dim() < 1 or len(y) != len(x) or not len(y):
        raise ShapeError(f"y must have one row for each of the {len(x)} training inputs, not shape {tuple(y.shape)}")
    if one_output and y.dim() > 1:
        raise ShapeError(f"y must have one value per input, ({len(x)},), not {tuple(y.shape)}")
    if x.is_floating_point() and (x.dtype != y.dtype or x.device != y.device):
        raise DataError(f"x is {x.dtype} on {x.device}, but y is {y.dtype} on {y.device}; convert one of them")
    check_finite(y, "y")
    return y


def _kind(x: object) -> str:
    """Describe the type of a value that is not a floating-point tensor, with a remedy."""
    if isinstance(x, Tensor):
        return str(x.dtype)
    kind = type(x)
    module = kind.__module__.partition(".")[0]
    called = kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
    return called + ("; use torch.from_numpy(...)" if called == "numpy.ndarray" else "; use torch.tensor(...)")


def own_covariance(x: Tensor, all_pairs: bool, ntk: bool) -> Covariance:
    """Return the covariances of each input with itself."""
    num_axes = x.dim() - 2
    if all_pairs:
        flat = x.flatten(2)
        sites = x.shape[2:]
        nngp = (flat.mT @ flat / x.shape[1]).reshape(len(x), *sites, *sites)
    else:
        nngp = x.square().mean(1)
    gap = torch.zeros_like(nngp) if not num_axes else None
    ntk_matrix = torch.zeros_like(nngp) if ntk else None
    return Covariance(nngp, ntk_matrix, x.shape[1], num_axes, all_pairs and num_axes > 0, gap, x.mean(1))


def cross_covariance(
    x1: Tensor, x2: Tensor, variances: tuple[Tensor, Tensor], all_pairs: bool, ntk: bool
) -> Covariance:
    """Return the covariances of inputs ``(n1, channels, *sites)`` and ``(n2, channels, *sites)``.

    They are ``(n1, n2, *sites)``, or ``(n1, n2, *sites, *sites)`` with ``all_pairs``; ``variances`` are of each set.
    """
    # On a grid the inputs of the second set are contiguous in memory, so slices of the grid are contiguous too.
    num_axes, channels = x1.dim() - 2, x1.shape[1]
    gap = None
    if not num_axes:
        nngp = x1 @ x2.mT / channels
        gap = _vector_gap(x1, x2, nngp, *variances)
    elif all_pairs:
        sites = x1.shape[2:]
        rows, columns = (x.flatten(2).permute(2, 0, 1).reshape(-1, channels) for x in (x1, x2))
        product = (rows @ columns.mT).div_(channels).reshape(*sites, len(x1), *sites, len(x2))
        first, second = range(num_axes), range(num_axes + 1, 2 * num_axes + 1)
        nngp = product.permute(num_axes, 2 * num_axes + 1, *first, *second)
    else:
        sites = x1.shape[2:]
        product = (x1.flatten(2).permute(2, 0, 1) @ x2.flatten(2).permute(2, 1, 0)).div_(channels)
        nngp = product.reshape(*sites, len(x1), len(x2)).permute(-2, -1, *range(num_axes))
    ntk_matrix = torch.zeros_like(nngp) if ntk else None
    return Covariance(nngp, ntk_matrix, channels, num_axes, all_pairs and num_axes > 0, gap)


def _vector_gap(x1: Tensor, x2: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b - k**2`` accurately where vectors are nearly parallel, ``x1`` ``(n1, channels)`` -> ``(n1, n2)``."""
    # For nearly parallel vectors the difference cancels; the residual of the projection is computed instead.
    channels = x1.shape[1]
    product = a[:, None] * b
    gap = torch.addcmul(product, k, k, value=-1)
    limit = (1e-5 if k.dtype == torch.float64 else 4e-3) * product
    if not visible(gap):
        rows, columns = (i.reshape(-1) for i in torch.meshgrid(*map(_places, (x1, x2)), indexing="ij"))
        exact = (_residual(x1[rows], x2[columns]) / channels).reshape(gap.shape) * a[:, None]
        return torch.where(gap > limit, gap, exact)
    if not gap.numel() or bool((gap.detach() - limit).amin() > 0):
        return gap
    near = (gap <= limit).nonzero()
    if not len(near):
        return gap
    found = [
        _residual(x1[pair[:, 0]], x2[pair[:, 1]]) / channels * a[pair[:, 0]]
        for pair in near.split(max(CHUNK // channels, 1))
    ]
    return gap.index_put((near[:, 0], near[:, 1]), torch.cat(found))


def _places(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _residual(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared norm of the component of each ``y`` orthogonal to ``x``."""
    size = x.square().sum(1)
    along = (x * y).sum(1) / torch.where(size > 0, size, 1)
    left = y - along[:, None] * x
    # A second projection removes the rounding error along x.
    left = left - ((x * left).sum(1) / torch.where(size > 0, size, 1))[:, None] * x
    result = left.square().sum(1)
    noise = 4 * torch.finfo(x.dtype).eps * y.square().sum(1).sqrt()
    return torch.where(result > noise.square(), result, 0)
