"""Conversion of a torch module to a graph of infinitely wide layers."""

from __future__ import annotations

import inspect
import linecache
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks._activations import (
    Activation,
    Elementwise,
    Quadrature,
    activation_of_function,
    activation_of_module,
)
from bayeskit.models.wide_networks._covariance import Covariance, Profile
from bayeskit.models.wide_networks._layers import (
    AveragePool,
    Concatenate,
    Convolution,
    Dense,
    Dropout,
    Flatten,
    GlobalAverage,
    Layer,
    LayerNormalization,
    Nonlinearity,
    Pairs,
    SumOfBranches,
    Variances,
    cross_covariance,
    own_covariance,
)

# Unsupported parts of a network, and their remedies.

_ATTENTION = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
_SOFTMAX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_EMPIRICAL = "use empirical_ntk for the module as it is"


class Refusal(ModelError):
    """Error for an unsupported part of a network: its ``place``, and the ``reason`` with a remedy."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class _Refusals:
    """Collected errors of a network, raised together."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, error: ModelError) -> None:
        """Add an error; places with the same reason are reported together."""
        if isinstance(error, Refusal):
            self._places.setdefault(error.reason, []).append(error.place)
        else:
            self._places.setdefault(str(error), [])

    def check(self) -> None:
        """Raise a ``ModelError`` with all collected errors, if any."""
        found = [f"{', '.join(places)}: {reason}" if places else reason for reason, places in self._places.items()]
        if len(found) == 1:
            raise ModelError(found[0])
        if found:
            raise ModelError("these parts of the network are not supported:\n" + "\n".join(f"- {x}" for x in found))


def _check_plain(place: str, module: nn.Module) -> None:
    """Raise ``Refusal`` for a module whose computation differs from that of its class."""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise Refusal(place, "its number of inputs is not yet known; run the module once on data")
    if nn.utils.parametrize.is_parametrized(module):
        raise Refusal(
            place,
            "its weights are functions of other parameters, as with spectral_norm or weight_norm, so they do not have "
            "the distribution of random weights; use the layer without parametrization",
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refusal(place, "hooks change its computation and cannot be read; write the layer without hooks")


def _reason_against(module: nn.Module) -> str:
    """Return the reason why a module is not supported, with a remedy."""
    kind = type(module).__name__
    if "MaxPool" in kind:
        return "the maximum of correlated normal variables has no closed form; use AvgPool"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _against_batch_normalization(module)
    if "InstanceNorm" in kind:
        return (
            "it normalizes each channel separately, and normalized channels do not have a normal distribution; "
            f"use {_replacements(getattr(module, 'num_features', 'C'), 1 if '1d' in kind else 2)}"
        )
    if isinstance(module, nn.GroupNorm):
        return f"only a single group of all channels is supported; use nn.GroupNorm(1, {module.num_channels})"
    if isinstance(module, nn.PReLU):
        return "its slope is trained; use LeakyReLU"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"a recurrent network shares its weights over time, which is not supported; {_EMPIRICAL}"
    if isinstance(module, _ATTENTION):
        return f"attention multiplies features by one another, which is not supported; {_EMPIRICAL}"
    if isinstance(module, _SOFTMAX):
        return _SOFTMAX_REASON
    return (
        "its infinite-width limit is not implemented; the nearest supported layers are Linear, Conv1d, Conv2d, "
        "AvgPool, LayerNorm and Flatten; for an elementwise function use Elementwise(function), which uses quadrature; "
        f"otherwise {_EMPIRICAL}"
    )


_SOFTMAX_REASON = (
    "a softmax divides by a sum over channels, which is not supported; move a softmax at the network's end to the "
    f"likelihood, as in ClassificationModel; otherwise {_EMPIRICAL}"
)


def _against_batch_normalization(module: nn.Module) -> str:
    channels = getattr(module, "num_features", "C")
    axes = {"BatchNorm1d": 0, "BatchNorm3d": 3}.get(type(module).__name__, 2)
    if module.training:
        reason = "it couples the inputs of a batch, so the kernel of a pair of inputs is undefined"
    else:
        reason = (
            "in eval mode it scales channels by statistics of past data, which have no distribution at initialization"
        )
    return f"{reason}; use {_replacements(channels, axes)}"


def _replacements(channels: Any, num_axes: int) -> str:
    if not num_axes:
        return f"nn.LayerNorm({channels})"
    sizes = {1: "length", 2: "height, width", 3: "depth, height, width"}[num_axes]
    return f"nn.LayerNorm([{channels}, {sizes}]) or nn.GroupNorm(1, {channels})"


def _reason_against_function(target: Any) -> str:
    """Return the reason why a function is not supported, with a remedy."""
    called = _called_as(target)
    if "softmax" in called:
        return _SOFTMAX_REASON
    if "scaled_dot_product" in called:
        return f"attention multiplies features by one another, which is not supported; {_EMPIRICAL}"
    if "max_pool" in called:
        return "the maximum of correlated normal variables has no closed form; use an average"
    if called in ("detach", "detach_"):
        return "it blocks gradients to the preceding layers; freeze these layers with requires_grad_(False)"
    if called in ("sum", "amax", "amin", "max", "min"):
        return f"the mean is the only supported reduction over a grid; otherwise {_EMPIRICAL}"
    if called in ("clamp", "clip", "maximum", "minimum", "where", "threshold", "hardshrink", "softshrink"):
        return "write it as Elementwise(function), which uses quadrature"
    return (
        "its infinite-width limit is not implemented; for an elementwise function use Elementwise(function), which "
        f"uses quadrature; otherwise {_EMPIRICAL}"
    )


def _called_as(target: Any) -> str:
    """Return the name of a function or method."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


# A network as a list of layers, each with the names of the layers that feed it.

INPUT = ".input"  # not a valid name of a layer


@dataclass(frozen=True)
class Node:
    """One layer of a network."""

    name: str  # of the torch module or operation, with a suffix if it has several nodes
    layer: Layer
    inputs: tuple[str, ...]  # names of the nodes that feed it
    place: str = field(default="", compare=False)  # in the user's code, for messages


@dataclass(frozen=True)
class Graph:
    """A network: nodes in topological order, of which the last is the output."""

    nodes: tuple[Node, ...]
    num_axes: int | None  # of the grid of the inputs; None if the layers do not determine it

    @property
    def all_pairs(self) -> frozenset[str]:
        """Names of the nodes whose covariances between different sites are needed."""
        wanted: set[str] = set()
        for node in reversed(self.nodes):
            if node.layer.needs_all_pairs(node.name in wanted):
                wanted.update(node.inputs)
        return frozenset(wanted)

    def profile(self, x: Tensor, variances: Variances, ntk: bool) -> tuple[Profile, Covariance]:
        """Return the profile of single inputs, and the covariance of the output with itself at each input."""
        state = own_covariance(x, INPUT in self.all_pairs, ntk)
        states = self._run(state, Pairs(None, None, outer=False), variances)
        return (
            Profile(
                {name: state.variance() for name, state in states.items()},
                {name: state.mean for name, state in states.items() if state.mean is not None},
            ),
            states[self.nodes[-1].name],
        )

    def cross(
        self, x1: Tensor, x2: Tensor, profiles: tuple[Profile, Profile], variances: Variances, ntk: bool
    ) -> Covariance:
        """Return the covariances of the network's output between all inputs of two sets."""
        own = profiles[0].variance[INPUT], profiles[1].variance[INPUT]
        return self.propagate(cross_covariance(x1, x2, own, INPUT in self.all_pairs, ntk), profiles, variances)

    def propagate(self, state: Covariance, profiles: tuple[Profile, Profile], variances: Variances) -> Covariance:
        """Return the covariances of the network's output, given those of all inputs of two sets."""
        return self._run(state, Pairs(*profiles, outer=True), variances)[self.nodes[-1].name]

    def _run(self, state: Covariance, pairs: Pairs, variances: Variances) -> dict[str, Covariance]:
        states = {INPUT: state}
        keep, all_pairs = pairs.first is None, self.all_pairs
        last = {name: i for i, node in enumerate(self.nodes) for name in node.inputs}
        for i, node in enumerate(self.nodes):
            wide = node.layer.needs_all_pairs(node.name in all_pairs)
            inputs = [(name, states[name] if wide else states[name].same_sites()) for name in node.inputs]
            states[node.name] = node.layer.propagate(node.name, inputs, pairs, variances)
            if not keep:
                for name in node.inputs:
                    if last[name] == i and name in states:
                        del states[name]
        output = states[self.nodes[-1].name]
        if output.num_axes:
            raise ShapeError(
                f"the network ends in features on a grid {tuple(output.sites)}; end it with Flatten or an average over "
                "the grid, and a dense layer"
            )
        return states


def _axes_before(layer: Layer) -> int | None:
    """Return the number of grid axes of a layer's inputs, or None if the layer does not determine it."""
    match layer:
        case Dense():
            return 0
        case Convolution() | AveragePool():
            return len(layer.window)
        case GlobalAverage():
            return layer.num_axes
        case LayerNormalization(any_sites=False):
            return len(layer.shape) - 1
    return None


def _axes_behind(name: str, nodes: Mapping[str, Node], of_input: int | None) -> int | None:
    """Return the number of grid axes of a node's features, or None if neither it nor its inputs determine it."""
    if name == INPUT:
        return of_input
    layer = nodes[name].layer
    if isinstance(layer, Flatten) or (isinstance(layer, GlobalAverage) and not layer.keeps_grid):
        return 0
    wanted = _axes_before(layer)
    if wanted is not None:
        return wanted
    known = (_axes_behind(source, nodes, of_input) for source in nodes[name].inputs)
    return next((axes for axes in known if axes is not None), None)


# Conversion of a torch module to a list of the operations in its forward method.

_LONGEST = 70  # characters of a line of code in a message
_LINE = "line"  # key of the line of the user's code in a node's metadata


class _Tracer(fx.Tracer):
    """Traces a module down to torch's own layers, and records the lines of code that call them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Treat torch's modules, except containers, and elementwise functions as leaves."""
        return isinstance(m, Elementwise) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, kind: str, *arguments: Any, **options: Any) -> fx.Node:
        """Return a node that stores its line of code."""
        if kind.startswith("call") and not torch.is_grad_enabled():
            raise ModelError(
                "a part of the forward method runs without gradients, under torch.no_grad(); instead freeze its layers "
                "with requires_grad_(False), which excludes them from the tangent kernel"
            )
        node = super().create_node(kind, *arguments, **options)
        node.meta[_LINE] = _line_of_code()
        return node


def trace_module(module: nn.Module) -> fx.Graph:
    """Return the operations of a module's forward method, or raise a ``ModelError`` if it cannot be traced."""
    _check_plain(f"{type(module).__name__}, the whole network", module)
    try:
        # The caller's gradient mode is not a property of the network.
        with torch.enable_grad(), _recorded_lengths(module):
            return _Tracer().trace(module)
    except ModelError:
        raise
    except Exception as error:  # the module's own code may raise any error on symbolic values
        _check_layers(module)
        raise ModelError(
            f"{type(module).__name__} cannot be traced: {error}. Remedy: build it with nn.Sequential, or write a "
            "forward method without branches on values"
        ) from error


def _place_of(node: fx.Node) -> str:
    """Return the module and the line of code of an operation, for messages."""
    modules = [path for path in node.meta.get("nn_module_stack") or {} if path]
    inside = f"in module {modules[-1]!r}" if modules and node.op != "call_module" else ""
    known = [x for x in (inside, node.meta.get(_LINE, "")) if x]
    return f" ({', '.join(known)})" if known else ""


def _check_layers(module: nn.Module) -> None:
    """Raise a ``ModelError`` that names layers with several results, after which tracing often fails."""
    refusals = _Refusals()
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith("torch.nn") and _returns_several(layer):
            refusals.add(ModelError(f"layer {name!r} ({type(layer).__name__}): {_reason_against(layer)}"))
    refusals.check()


def _returns_several(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention)


@contextmanager
def _recorded_lengths(module: nn.Module) -> Iterator[None]:
    """Replace ``len`` in forward methods by a traceable function, because Python's ``len`` must return a number."""
    scopes = [getattr(type(layer).forward, "__globals__", {}) for layer in module.modules()]
    borrowed = {id(x): x for x in scopes if "len" not in x and not str(x.get("__name__", "torch")).startswith("torch")}
    for scope in borrowed.values():
        scope["len"] = _length
    try:
        yield
    finally:
        for scope in borrowed.values():
            del scope["len"]


def _length(x: Any) -> Any:
    return x.tracer.create_proxy("call_function", len, (x,), {}) if isinstance(x, fx.Proxy) else len(x)


def _line_of_code() -> str:
    """Return the line of the forward method being traced, or an empty text if it is torch's own."""
    frame = sys._getframe(1)
    while frame is not None:
        scope = frame.f_globals.get("__name__", "")
        if scope == __name__ and frame.f_code is inspect.unwrap(trace_module).__code__:
            break
        if scope != __name__ and not scope.startswith("torch.") and scope != "contextlib":
            path, number = frame.f_code.co_filename, frame.f_lineno
            text = shorten(linecache.getline(path, number).strip(), _LONGEST, placeholder=" ...")
            return f"line {number} of {Path(path).name}" + (f", `{text}`" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# Arguments of function calls in a trace.

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def _place_of_call(node: fx.Node) -> str:
    """Return the description of a function call in messages."""
    called = _called_as(node.target)
    return f"{node.name!r}" + (f" ({called})" if called != node.name else "") + _place_of(node)


def _is_in_place(node: fx.Node) -> bool:
    """Whether a function writes its result over its first input."""
    target = node.target
    if isinstance(target, str):
        return target.endswith("_")
    if isinstance(target, FunctionType):
        signature = inspect.signature(target)
        if "inplace" in signature.parameters:
            return signature.bind(*node.args, **node.kwargs).arguments.get("inplace") is True
    return target in _IN_PLACE


def _operands(node: fx.Node) -> tuple[Any, Any]:
    """Return the two operands of a function, given by position or by name."""
    named = [node.kwargs[key] for key in ("input", "other") if key in node.kwargs]
    found: list[Any] = [*node.args, *named, None]
    return found[0], found[1]


def _pool_of(node: fx.Node) -> nn.AvgPool1d | nn.AvgPool2d:
    """Return the pooling module equivalent to a function call."""
    settings = {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
    if node.target is functional.avg_pool1d:
        return nn.AvgPool1d(**given(node, **settings))
    return nn.AvgPool2d(**given(node, **settings, divisor_override=None))


def given(node: fx.Node, **settings: Any) -> dict[str, Any]:
    """Return the arguments after the tensor, given by position or by name; ``settings`` are the defaults."""
    by_position = dict(zip(settings, node.args[1:], strict=False))
    named = {"dim" if key == "axis" else key: value for key, value in node.kwargs.items()}
    return settings | by_position | {key: value for key, value in named.items() if key in settings}


# The layer of infinite width of a torch module.

_IDENTITY = SumOfBranches((1.0,))
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.GroupNorm)


def _layer_of(name: str, module: nn.Module, standard: bool) -> Layer:
    """Return the infinite-width layer of a module other than a nonlinearity, or raise a ``ModelError``."""
    place = _place_of_module(name, module)
    _check_plain(place, module)
    if isinstance(module, nn.Linear):
        return _dense(module, module.in_features, module.out_features, standard)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _convolution(place, module, standard)
    if isinstance(module, nn.Flatten):
        if module.start_dim != 1 or module.end_dim != -1:
            raise Refusal(place, "only a Flatten of all dimensions except the first is supported")
        return Flatten()
    if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
        return _average_pool(place, module)
    if isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
        return _global_average(place, 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2, module.output_size)
    if isinstance(module, nn.LayerNorm):
        return LayerNormalization(tuple(module.normalized_shape), module.eps, *_trained(module))
    if isinstance(module, nn.GroupNorm) and module.num_groups == 1:
        return LayerNormalization((module.num_channels,), module.eps, *_trained(module), any_sites=True)
    if isinstance(module, nn.Dropout):
        if module.training and module.p == 1:
            raise Refusal(place, "it sets all features to zero; use a rate below one")
        return Dropout(module.p) if module.training and module.p else _IDENTITY
    if isinstance(module, nn.Identity):
        return _IDENTITY
    raise Refusal(place, _reason_against(module))


def _place_of_module(name: str, module: nn.Module) -> str:
    """Return the description of a module in messages."""
    return f"layer {name!r} ({type(module).__name__})"


def _average_pool(place: str, module: nn.AvgPool1d | nn.AvgPool2d) -> AveragePool:
    """Return averages over windows."""
    axes = 1 if isinstance(module, nn.AvgPool1d) else 2
    padding = _whole_tuple(module.padding, axes)
    if getattr(module, "divisor_override", None) is not None:
        raise Refusal(place, "averages with divisor_override are not supported; scale the output")
    if module.ceil_mode:
        raise Refusal(place, "averages with ceil_mode=True are not supported")
    if any(padding) and not module.count_include_pad:
        raise Refusal(place, "padded averages with count_include_pad=False are not supported")
    stride = module.stride if module.stride is not None else module.kernel_size
    return AveragePool(
        _whole_tuple(module.kernel_size, axes), _whole_tuple(stride, axes), tuple((size, size) for size in padding)
    )


def _global_average(place: str, num_axes: int, output_size: Any) -> GlobalAverage:
    """Return an adaptive average, which must be over the whole grid."""
    if any(size != 1 for size in (output_size if isinstance(output_size, list | tuple) else (output_size,))):
        raise Refusal(place, "only adaptive averages over the whole grid are supported")
    return GlobalAverage(num_axes, keeps_grid=True)


def _whole_tuple(x: Any, axes: int) -> tuple[int, ...]:
    """Return one whole number per axis."""
    return tuple(int(y) for y in x) if isinstance(x, list | tuple) else (int(x),) * axes


def _trained(module: nn.LayerNorm | nn.GroupNorm) -> tuple[bool, bool]:
    """Return whether gains and shifts are trained."""
    gain, shift = module.weight, getattr(module, "bias", None)
    return gain is not None and gain.requires_grad, shift is not None and shift.requires_grad


def _dense(module: nn.Linear | nn.Conv1d | nn.Conv2d, fan_in: int, channels: int, standard: bool) -> Dense:
    weight, bias = module.weight, module.bias
    return Dense(
        fan_in,
        channels,
        bias is not None,
        standard,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
    )


def _convolution(place: str, module: nn.Conv1d | nn.Conv2d, standard: bool) -> Convolution:
    if module.groups != 1:
        raise Refusal(place, "convolutions with groups are not supported; use groups=1")
    window = tuple(module.kernel_size)
    if isinstance(module.padding, str):
        total = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(module.dilation, window, strict=True)]
        padding = tuple((size // 2, size - size // 2) for size in total)
    else:
        padding = tuple((size, size) for size in module.padding)
    dense = _dense(module, module.in_channels * math.prod(window), module.out_channels, standard)
    return Convolution(dense, window, tuple(module.stride), tuple(module.dilation), padding, module.padding_mode)


# Checks that a network's layers fit together and satisfy the assumptions of their kernels.


@dataclass(frozen=True)
class Features:
    """Properties of features that the layers before determine."""

    normal: bool  # whether they are jointly normal, given the input
    alike: bool  # whether all channels have the same distribution
    terms: frozenset[str | None]  # layers with weights in which they are linear, one per term; None for any other term
    ancestors: frozenset[str]  # all layers with weights on which they depend
    channels: int | None = None  # None if the layers before do not determine it
    num_axes: int | None = None  # of the grid; None if the layers before do not determine it


def check_limit(graph: Graph) -> Features:
    """Return the output's features; layers that do not fit or have no limit raise ``ShapeError`` or ``ModelError``."""
    start = Features(normal=False, alike=True, terms=frozenset({None}), ancestors=frozenset(), num_axes=graph.num_axes)
    found = {INPUT: start}
    for node in graph.nodes:
        inputs = [found[name] for name in node.inputs]
        channels, num_axes = _shape(node, inputs)
        found[node.name] = replace(_features(node, inputs), channels=channels, num_axes=num_axes)
    return found[graph.nodes[-1].name]


def _shape(node: Node, inputs: list[Features]) -> tuple[int | None, int | None]:
    """Return the numbers of channels and axes of a layer's output; inputs that do not fit raise a ``ShapeError``."""
    layer, first = node.layer, inputs[0]
    channels, wanted = first.channels, _axes_before(layer)
    match layer:
        case Dense():
            _check_channels(node, layer.fan_in, first)
            channels = layer.channels
        case Convolution():
            _check_channels(node, layer.dense.fan_in // math.prod(layer.window), first)
            channels = layer.dense.channels
        case LayerNormalization():
            _check_channels(node, layer.shape[0], first)
            channels = layer.shape[0]
        case Flatten():
            return channels if first.num_axes == 0 else None, 0
        case SumOfBranches() | Concatenate():
            return _joined_shape(node, inputs)
    if wanted is None:
        return channels, first.num_axes
    if first.num_axes is not None and first.num_axes != wanted:
        raise ShapeError(
            f"layer {node.name!r}{node.place} needs {_grid(wanted)} and receives {_grid(first.num_axes)} from "
            f"{_called(node.inputs[0])}" + ("; add Flatten or an average over the grid before it" if not wanted else "")
        )
    return channels, 0 if isinstance(layer, GlobalAverage) and not layer.keeps_grid else wanted


def _joined_shape(node: Node, inputs: list[Features]) -> tuple[int | None, int | None]:
    axes = {x.num_axes for x in inputs if x.num_axes is not None}
    if len(axes) > 1:
        raise ShapeError(f"layer {node.name!r}{node.place} joins {' and '.join(_grid(x) for x in sorted(axes))}")
    channels = [x.channels for x in inputs if x.channels is not None]
    if isinstance(node.layer, SumOfBranches):
        if len(set(channels)) > 1:
            raise ShapeError(
                f"layer {node.name!r}{node.place} adds features of different numbers of channels: {channels}"
            )
        total = channels[0] if channels else None
    else:
        total = sum(channels) if len(channels) == len(inputs) else None
    return total, axes.pop() if axes else None


def _check_channels(node: Node, wanted: int, features: Features) -> None:
    if features.channels is not None and features.channels != wanted:
        raise ShapeError(
            f"layer {node.name!r} expects {wanted} channels and receives {features.channels} from "
            f"{_called(node.inputs[0])}"
        )


def _called(name: str) -> str:
    return "the input" if name == INPUT else repr(name)


def _grid(num_axes: int) -> str:
    return {0: "vectors", 1: "features along a line", 2: "images"}[num_axes]


def _features(node: Node, inputs: list[Features]) -> Features:
    ancestors = frozenset[str]().union(*(x.ancestors for x in inputs))
    first = inputs[0]
    if isinstance(node.layer, Dense | Convolution):
        return Features(True, True, frozenset({node.name}), ancestors | {node.name})
    if isinstance(node.layer, Nonlinearity):
        _check_nonlinearity(node, first)
        return Features(False, True, frozenset({None}), ancestors)
    if isinstance(node.layer, SumOfBranches | Concatenate):
        if isinstance(node.layer, SumOfBranches):
            _check_sum(node, inputs)
        joined = isinstance(node.layer, Concatenate)
        return Features(
            all(x.normal for x in inputs),
            not joined and all(x.alike for x in inputs),
            frozenset[str | None]().union(*(x.terms for x in inputs)),
            ancestors,
        )
    normal = first.normal and not isinstance(node.layer, Dropout)
    alike = first.alike and not isinstance(node.layer, Flatten)
    return Features(normal, alike, first.terms, ancestors)


def _check_nonlinearity(node: Node, features: Features) -> None:
    if not features.normal:
        raise ModelError(
            f"layer {node.name!r}{node.place} applies a nonlinearity to features that are not normal in the limit. "
            "Remedy: add a layer with weights before it, or apply it to the data; after a residual sum, x + f(x), add "
            "a layer with weights to the shortcut too, or start the block with the nonlinearity, x + Conv2d(relu(x))"
        )
    if not features.alike:
        raise ModelError(
            f"layer {node.name!r}{node.place} applies a nonlinearity to channels with different distributions; apply "
            "it before the channels are concatenated or flattened"
        )


def _check_sum(node: Node, inputs: list[Features]) -> None:
    """Raise a ``ModelError`` for a sum of correlated features."""
    for i, one in enumerate(inputs):
        for other in inputs[:i]:
            # A product of terms has mean zero if one is linear in weights on which the other does not depend.
            free = all(
                (x is not None and x not in other.ancestors) or (y is not None and y not in one.ancestors)
                for x in one.terms
                for y in other.terms
            )
            if not free:
                raise ModelError(
                    f"layer {node.name!r}{node.place} adds correlated features, such as h + f(h); add a layer with "
                    "weights at the end of one branch, h + Linear(f(h))"
                )


_SUBTRACTIONS = (operator.sub, operator.isub, torch.sub, "sub", "sub_")
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_", *_SUBTRACTIONS)
_DIVISIONS = (operator.truediv, operator.itruediv, torch.div, "div", "div_")
_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_", *_DIVISIONS)
_RESHAPES = (torch.reshape, "reshape", "view")
_POOLS = (functional.avg_pool1d, functional.avg_pool2d)
_ADAPTIVE_POOLS = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d)


def readable(module: nn.Module) -> nn.Module:
    """Return a module whose layers have names: a single layer of torch becomes a ``Sequential``."""
    if not isinstance(module, nn.Module):
        raise SettingsError(
            f"infinite_width takes a torch.nn.Module, not {type(module).__name__}; wrap an elementwise function in "
            "Elementwise, and any other function in a module with a forward method"
        )
    return nn.Sequential(module) if _Tracer().is_leaf_module(module, "") else module


def read(module: nn.Module, standard: bool) -> Graph:
    """Return the graph of a module; unsupported layers raise a ``ModelError``, mismatched shapes a ``ShapeError``."""
    reading = _Reading(dict(module.named_modules()), standard)
    for node in trace_module(module).nodes:
        reading.add(node)
    return reading.graph()


@dataclass
class _Reading:
    """State of the conversion of a traced module."""

    modules: dict[str, nn.Module]
    standard: bool
    nodes: dict[str, Node] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # from fx's names to nodes'
    uses: dict[str, int] = field(default_factory=dict)
    owners: dict[nn.Parameter, str] = field(default_factory=dict)  # the names of layers, by their weights
    sizes: dict[str, int | None] = field(default_factory=dict)  # dimension of a tensor, or None for all, by fx's names
    memory: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the tensor whose memory it shares
    refusals: _Refusals = field(default_factory=_Refusals)
    refused: set[str] = field(default_factory=set)  # fx's names
    lost: set[str] = field(default_factory=set)  # fx's names of values that do not depend on the input alone
    num_axes: int | None = None
    output: str = ""

    def add(self, node: fx.Node) -> None:
        """Convert one node of a trace."""
        if any(x.name in self.lost for x in node.all_input_nodes):
            self._skip(node)  # its input was refused before
            return
        try:
            self._read(node)
        except ModelError as error:
            self.refusals.add(error)
            self.refused.add(node.name)
            self._skip(node)

    def _read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self.names:
                raise ModelError(f"the network takes a second input, {node.name!r}; kernels support one input")
            self.names[node.name] = INPUT
        elif node.op == "output":
            (result,) = node.args
            if not isinstance(result, fx.Node) or result.name in self.sizes:
                raise ModelError("the network must return one tensor")
            self.output = self.names[result.name]
        elif node.op == "get_attr":
            raise ModelError(f"the network uses the tensor {node.target!r} outside of a layer, which is not supported")
        elif node.op == "call_module":
            module = self.modules[str(node.target)]
            self._module(node, str(node.target), module)
            if getattr(module, "inplace", False):
                self._overwrite(node)
        elif not self._size(node):
            self._function(node)
            if _is_in_place(node):
                self._overwrite(node)

    def _skip(self, node: fx.Node) -> None:
        """Continue after an unsupported node as if it were absent."""
        sources = [self.names[x.name] for x in node.all_input_nodes if x.name in self.names]
        if sources:
            self.names[node.name] = sources[0]
        else:
            self.lost.add(node.name)

    def graph(self) -> Graph:
        """Return the graph after all nodes are converted."""
        self.refusals.check()
        if self.output == INPUT:
            raise ModelError("the network has no layers")
        graph = Graph(self._needed(), self.num_axes)
        check_limit(graph)
        return graph

    def _needed(self) -> tuple[Node, ...]:
        """Return the nodes that the output depends on."""
        wanted, kept = {self.output}, []
        for node in reversed(self.nodes.values()):
            if node.name in wanted:
                wanted.update(node.inputs)
                kept.append(node)
        return tuple(reversed(kept))

    def put(self, node: fx.Node, name: str, layer: Layer, inputs: Sequence[str] | None = None) -> None:
        """Append a layer."""
        sources = [self.names[x.name] for x in node.all_input_nodes] if inputs is None else inputs
        if self.num_axes is None and INPUT in sources:
            self.num_axes = _axes_before(layer)
        self.names[node.name] = self._append(name, layer, sources, _place_of(node))
        if layer == _IDENTITY or isinstance(layer, Flatten):
            self.memory[node] = self._memory(node.all_input_nodes[0])

    def _append(self, name: str, layer: Layer, inputs: Sequence[str], place: str) -> str:
        """Append a layer; repeated calls of a layer without weights are numbered."""
        uses = self.uses[name] = self.uses.get(name, 0) + 1
        name = name if uses == 1 else f"{name} ({uses})"
        self.nodes[name] = Node(name, layer, tuple(inputs), place)
        return name

    def _check_weights(self, name: str, module: nn.Module) -> None:
        """Raise a ``ModelError`` if a layer shares weights with another layer or is called twice."""
        for parameter in module.parameters():
            if self.owners.setdefault(parameter, f"{name!r}") != f"{name!r}" or name in self.uses:
                raise ModelError(
                    f"layer {name!r} is used twice, or has the weights of layer {self.owners[parameter]}; shared "
                    "weights are not supported"
                )

    def _module(self, node: fx.Node, name: str, module: nn.Module) -> None:
        activation = activation_of_module(module)
        if activation is not None:
            _check_plain(_place_of_module(name, module), module)
            self._activation(node, name, activation)
            return
        layer = _layer_of(name, module, self.standard)
        if isinstance(module, _WEIGHTED):
            self._check_weights(name, module)
        self.put(node, name, layer)

    def _activation(self, node: fx.Node, name: str, activation: Activation) -> None:
        """Append a nonlinearity."""
        (source,) = (self.names[x.name] for x in node.all_input_nodes)
        self.names[node.name] = self._apply(name, activation, source, _place_of(node))

    def _apply(self, name: str, activation: Activation, source: str, place: str) -> str:
        """Append a nonlinearity: to each part of a concatenation, or composed with a preceding nonlinearity."""
        made = self.nodes.get(source)
        if made is not None and made.layer == _IDENTITY:
            return self._apply(name, activation, made.inputs[0], place)
        if made is not None and isinstance(made.layer, Concatenate | Flatten):
            # Channels of different distributions are concatenated after the function has been applied to each part.
            parts = [self._apply(f"{name}[{i}]", activation, part, place) for i, part in enumerate(made.inputs)]
            return self._append(name, made.layer, parts, place)
        if made is not None and isinstance(made.layer, Nonlinearity):
            joined = Nonlinearity(Quadrature(_Composed(made.layer.activation, activation)))
            return self._append(name, joined, made.inputs, place)
        return self._append(name, Nonlinearity(activation), (source,), place)

    def _size(self, node: fx.Node) -> bool:
        """Record which dimension's size a node returns, for reshapes; return False for any other node."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        of_tensor = source.name in self.names
        if node.target is len and of_tensor:
            self.sizes[node.name] = 0
        elif (node.target == "size" or node.target is getattr) and of_tensor:
            asked = given(node, dim=None)["dim"]
            self.sizes[node.name] = asked if isinstance(asked, int) else None
        elif node.target is operator.getitem and source.name in self.sizes:
            chosen = node.args[1]
            self.sizes[node.name] = chosen if isinstance(chosen, int) and self.sizes[source.name] is None else None
        else:
            return False
        return True

    def _function(self, node: fx.Node) -> None:
        target = node.target
        if target in _RESHAPES:
            self._reshape(node)
            return
        if any(x.name in self.sizes for x in node.all_input_nodes):
            raise Refusal(_place_of_call(node), f"it computes with the size of a tensor; {_WRITE_FLATTEN}")
        if target is operator.getitem:
            self._item(node)
        elif target in _ADDITIONS:
            self._sum(node, -1.0 if target in _SUBTRACTIONS else 1.0)
        elif target in _PRODUCTS:
            self._scale(node, target in _DIVISIONS)
        elif target in (operator.neg, torch.neg, "neg"):
            self.put(node, node.name, SumOfBranches((-1.0,)))
        elif target in (torch.cat, torch.concat, torch.concatenate):
            self._concatenate(node)
        elif target in (torch.flatten, "flatten"):
            self._flatten(node)
        elif target in (torch.squeeze, "squeeze"):
            self._squeeze(node)
        elif target in (torch.mean, "mean"):
            self._mean(node)
        elif target in _POOLS:
            self.put(node, node.name, _average_pool(_place_of_call(node), _pool_of(node)))
        elif target in _ADAPTIVE_POOLS:
            size = given(node, output_size=None)["output_size"]
            self.put(node, node.name, _global_average(_place_of_call(node), 1 + _ADAPTIVE_POOLS.index(target), size))
        elif target is functional.dropout:
            raise Refusal(_place_of_call(node), "use nn.Dropout, whose training mode determines whether there is noise")
        else:
            self._function_of_features(node)

    def _function_of_features(self, node: fx.Node) -> None:
        # The first positional argument of torch's elementwise functions is the tensor.
        source = given(node, input=None)["input"] if not node.args else node.args[0]
        options = {key: value for key, value in node.kwargs.items() if key not in ("inplace", "input", "out")}
        if node.kwargs.get("out") is not None:
            raise Refusal(_place_of_call(node), "it writes to another tensor; remove the argument out=")
        target = node.target.rstrip("_") if isinstance(node.target, str) else node.target
        activation = None
        if [source] == node.all_input_nodes:
            activation = activation_of_function(target, node.args[1:], options)
        if activation is None:
            raise Refusal(_place_of_call(node), _reason_against_function(node.target))
        self._activation(node, node.name, activation)

    def _reshape(self, node: fx.Node) -> None:
        """Convert a reshape that is a flattening; raise ``Refusal`` for any other."""
        source: Any = node.args[0]
        sizes: Any = node.args[1:] or (node.kwargs.get("shape", ()),)
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
        whole = len(sizes) == 2 and sizes[1] == -1 and isinstance(sizes[0], fx.Node)
        if not (whole and self.sizes.get(sizes[0].name) == 0):
            raise Refusal(_place_of_call(node), f"flattening is the only supported reshaping; {_WRITE_FLATTEN}")
        self.put(node, node.name, Flatten(), [self.names[source.name]])

    def _flatten(self, node: fx.Node) -> None:
        chosen = given(node, start_dim=0, end_dim=-1)
        first, last = self._dimensions(node, (chosen["start_dim"], chosen["end_dim"]))
        axes = self._axes_of(node)
        if first != 1 or last not in (-1, None if axes is None else axes + 1):
            raise Refusal(
                _place_of_call(node),
                f"only flattening of all dimensions except the first is supported; {_WRITE_FLATTEN}",
            )
        self.put(node, node.name, Flatten())

    def _squeeze(self, node: fx.Node) -> None:
        """Convert a squeeze of single-channel outputs, which does not change their kernel."""
        (dim,) = self._dimensions(node, (given(node, dim=None)["dim"],))
        ends = all(user.op == "output" for user in node.users)
        if self._axes_of(node) != 0 or dim != 1 or not ends:
            raise Refusal(
                _place_of_call(node),
                "only squeeze(-1) of vectors at the network's end is supported; remove it, or write x.flatten(1) after "
                "an average over the grid",
            )
        self.put(node, node.name, _IDENTITY)

    def _concatenate(self, node: fx.Node) -> None:
        chosen = given(node, dim=0)["dim"]
        parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
        (dim,) = self._dimensions(node, (chosen,))
        if dim != 1:
            raise ModelError(
                f"{_place_of_call(node)}: only concatenation of channels (dim=1) is supported, not dim={chosen}"
            )
        self.put(node, node.name, Concatenate(), [self.names[x.name] for x in parts])

    def _mean(self, node: fx.Node) -> None:
        chosen = given(node, dim=None, keepdim=False)
        dims = chosen["dim"]
        wanted = sorted(self._dimensions(node, _whole_tuple(dims, 1))) if dims is not None else []
        if wanted not in ([2], [-1], [2, 3], [-2, -1]):
            raise Refusal(_place_of_call(node), f"only a mean over the whole grid is supported, not over dim={dims}")
        self.put(node, node.name, GlobalAverage(len(wanted), keeps_grid=bool(chosen["keepdim"])))

    def _dimensions(self, node: fx.Node, dims: Sequence[Any]) -> list[Any]:
        """Return non-negative dimension indices, if the number of dimensions is known."""
        axes = self._axes_of(node)
        return [
            dim + axes + 2 if axes is not None and isinstance(dim, int) and -axes - 2 <= dim < 0 else dim
            for dim in dims
        ]

    def _axes_of(self, node: fx.Node) -> int | None:
        """Return the number of grid axes of the first of a node's inputs for which it is known, or None."""
        known = (_axes_behind(self.names[x.name], self.nodes, self.num_axes) for x in node.all_input_nodes)
        return next((axes for axes in known if axes is not None), None)

    def _item(self, node: fx.Node) -> None:
        """Skip an item of the result of an unsupported layer; raise ``Refusal`` for other indexing."""
        source = node.args[0]
        if isinstance(source, fx.Node) and source.name in self.refused:
            self._skip(node)
            self.refused.add(node.name)
            return
        raise Refusal(
            _place_of_call(node),
            "it selects a part of the features, which is not supported; leave it out at the network's end, because all "
            "outputs have the same kernel",
        )

    def _sum(self, node: fx.Node, sign: float) -> None:
        left, right = _operands(node)
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise Refusal(
                _place_of_call(node),
                "it adds a constant, which is not normal in the limit; use a bias in the preceding layer",
            )
        scale: Any = node.kwargs.get("alpha", 1.0)
        self.put(
            node, node.name, SumOfBranches((1.0, sign * float(scale))), [self.names[left.name], self.names[right.name]]
        )

    def _scale(self, node: fx.Node, inverse: bool) -> None:
        left, right = _operands(node)
        if node.kwargs.get("rounding_mode") is not None:
            raise Refusal(_place_of_call(node), "it rounds; write it as Elementwise(function), which uses quadrature")
        numbers = [x for x in (left, right) if not isinstance(x, fx.Node)]
        if inverse and (isinstance(right, fx.Node) or right == 0):
            raise Refusal(_place_of_call(node), "it divides by features or by zero, which is not supported")
        if len(numbers) != 1 or not isinstance(numbers[0], int | float):
            raise Refusal(
                _place_of_call(node),
                "it multiplies features by one another, which is not supported; write a product such as h * sigmoid(h) "
                "as a single function of h: nn.SiLU, or Elementwise(lambda h: h * torch.sigmoid(h))",
            )
        self.put(node, node.name, SumOfBranches((1 / float(numbers[0]) if inverse else float(numbers[0]),)))

    def _overwrite(self, node: fx.Node) -> None:
        """Let all aliases of the memory to which an in-place node writes refer to its result."""
        source = node.all_input_nodes[0]
        home = self._memory(source)
        before, after = self.names[source.name], self.names[node.name]
        seen = self.names.keys() | self.sizes.keys()
        for alias in [x for x in self.memory if self.memory[x] is home] + [home]:
            if self.names[alias.name] == before:
                self.names[alias.name] = after
            elif any(user.name not in seen for user in alias.users):
                raise Refusal(
                    _place_of_call(node),
                    "it overwrites features that are used later in another shape; do not write in place",
                )
        self.memory[node] = home

    def _memory(self, node: fx.Node) -> fx.Node:
        return self.memory.get(node, node)


_WRITE_FLATTEN = "write x.flatten(1) to convert images to vectors, and no reshaping at the network's end"


@dataclass(frozen=True)
class _Composed:
    """Composition of two activations."""

    first: Activation
    second: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))
