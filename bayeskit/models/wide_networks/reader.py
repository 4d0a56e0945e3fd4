"""From a torch module to a graph of layers of infinite width."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.module import Elementwise, activation_of_module
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.registry import activation_of_function
from bayeskit.models.wide_networks.checks import check_limit
from bayeskit.models.wide_networks.graph import INPUT, Graph, Node
from bayeskit.models.wide_networks.layers.combine import Concatenate, Sum
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.grid import AveragePool, Flatten, GlobalAverage
from bayeskit.models.wide_networks.layers.layer import Layer
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity
from bayeskit.models.wide_networks.layers.normalization import Dropout, LayerNormalization

IDENTITY = Sum((1.0,))
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)
ADDITIONS = (
    *(operator.add, operator.iadd, torch.add, "add", "add_"),
    *(operator.sub, operator.isub, torch.sub, "sub", "sub_"),
)


class Tracer(fx.Tracer):
    """Traces a module down to torch's own layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Take torch's modules, except containers, and elementwise functions as they are."""
        return isinstance(m, Elementwise) or super().is_leaf_module(m, module_qualified_name)


def read(module: nn.Module, standard: bool) -> Graph:
    """Return the graph of a module.

    Raises
    ------
    ModelError
        If it cannot be traced, or has a layer without a limit that is known here.
    """
    try:
        traced = Tracer().trace(module)
    except Exception as error:  # fx raises whatever the module's own code raises on symbols
        raise ModelError(
            f"{type(module).__name__} cannot be traced: {error}. Build it from nn.Sequential, or write a forward "
            "method without branches on values"
        ) from error
    modules = dict(module.named_modules())
    reading = _Reading(modules, standard)
    for node in traced.nodes:
        reading.add(node)
    return reading.graph()


@dataclass
class _Reading:
    """What has been read so far."""

    modules: dict[str, nn.Module]
    standard: bool
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # from fx's names to nodes'
    uses: dict[str, int] = field(default_factory=dict)
    owners: dict[nn.Parameter, str] = field(default_factory=dict)  # the names of layers, by their weights
    num_axes: int | None = None
    output: str = ""

    def add(self, node: fx.Node) -> None:
        """Read one node of a trace."""
        if node.op == "placeholder":
            if self.names:
                raise ModelError(f"the network takes a second input, {node.name!r}; kernels are of one input")
            self.names[node.name] = INPUT
        elif node.op == "output":
            (result,) = node.args
            if not isinstance(result, fx.Node):
                raise ModelError("the network must return one tensor")
            self.output = self.names[result.name]
        elif node.op == "get_attr":
            raise ModelError(f"the network uses a tensor of its own, {node.target!r}, in a way that has no limit here")
        elif node.op == "call_module":
            self._module(node, str(node.target), self.modules[str(node.target)])
        else:
            self._function(node)

    def graph(self) -> Graph:
        """Return the graph, once all nodes are read."""
        if self.output == INPUT:
            raise ModelError("the network has no layers")
        graph = Graph(self._needed(), self.num_axes)
        check_limit(graph)
        return graph

    def _needed(self) -> tuple[Node, ...]:
        """Return the nodes that the output depends on."""
        wanted, kept = {self.output}, []
        for node in reversed(self.nodes):
            if node.name in wanted:
                wanted.update(node.inputs)
                kept.append(node)
        return tuple(reversed(kept))

    def put(self, node: fx.Node, name: str, layer: Layer, inputs: Sequence[str] | None = None) -> None:
        """Append a layer."""
        self.names[node.name] = self._append(name, layer, self._sources(node) if inputs is None else inputs)

    def _append(self, name: str, layer: Layer, inputs: Sequence[str]) -> str:
        """Append a layer; one without weights may be used more than once, and gets a number each time."""
        uses = self.uses[name] = self.uses.get(name, 0) + 1
        name = name if uses == 1 else f"{name} ({uses})"
        self.nodes.append(Node(name, layer, tuple(inputs)))
        return name

    def _check_weights(self, name: str, module: nn.Module) -> None:
        """Refuse weights that another layer has, or the same layer in another place."""
        for parameter in module.parameters():
            if self.owners.setdefault(parameter, f"{name!r}") != f"{name!r}" or name in self.uses:
                raise ModelError(
                    f"layer {name!r} is used twice, or has the weights of layer {self.owners[parameter]}; networks "
                    "with shared weights have no limit here"
                )

    def _sources(self, node: fx.Node) -> list[str]:
        return [self.names[x.name] for x in node.all_input_nodes]

    def _module(self, node: fx.Node, name: str, module: nn.Module) -> None:
        activation = activation_of_module(module)
        if isinstance(module, WEIGHTED):
            self._check_weights(name, module)
        if activation is not None:
            self._activation(node, name, activation)
        elif isinstance(module, nn.Linear):
            self._axes(node, 0)
            self.put(node, name, _dense(module, module.in_features, module.out_features, self.standard))
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            self._axes(node, len(module.kernel_size))
            self.put(node, name, _convolution(name, module, self.standard))
        elif isinstance(module, nn.Flatten):
            if module.start_dim != 1 or module.end_dim != -1:
                raise ModelError(f"layer {name!r}: only a Flatten of all but the first dimension has a limit here")
            self.put(node, name, Flatten())
        elif isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
            self._axes(node, 1 if isinstance(module, nn.AvgPool1d) else 2)
            self.put(node, name, _average_pool(name, module))
        elif isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
            axes = 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2
            self._axes(node, axes)
            _check_global(name, module.output_size)
            self.put(node, name, GlobalAverage(axes, keeps_grid=True))
        elif isinstance(module, nn.LayerNorm):
            affine = module.weight is not None
            bias = getattr(module, "bias", None)
            self.put(
                node,
                name,
                LayerNormalization(
                    tuple(module.normalized_shape),
                    module.eps,
                    affine and module.weight.requires_grad,
                    bias is not None and bias.requires_grad,
                ),
            )
        elif isinstance(module, nn.Dropout):
            if module.training and module.p == 1:
                raise ModelError(f"layer {name!r} drops everything; give it a rate below one")
            self.put(node, name, Dropout(module.p) if module.training and module.p else IDENTITY)
        elif isinstance(module, nn.Identity):
            self.put(node, name, IDENTITY)
        else:
            raise ModelError(_unsupported(name, module))

    def _axes(self, node: fx.Node, num_axes: int) -> None:
        """Note on what grid the network's inputs lie, where a layer tells."""
        if self.num_axes is None and self._sources(node) == [INPUT]:
            self.num_axes = num_axes

    def _activation(self, node: fx.Node, name: str, activation: Activation) -> None:
        """Append a nonlinearity."""
        (source,) = self._sources(node)
        self.names[node.name] = self._apply(name, activation, source)

    def _apply(self, name: str, activation: Activation, source: str) -> str:
        """Append a nonlinearity, on each part of what a concatenation joins, or joined with one before."""
        made = next((x for x in self.nodes if x.name == source), None)
        if made is not None and made.layer == IDENTITY:
            return self._apply(name, activation, *made.inputs)
        if made is not None and isinstance(made.layer, Concatenate | Flatten):
            # Channels that are not alike are left to be joined until the function has been applied to each.
            parts = [self._apply(f"{name}[{i}]", activation, part) for i, part in enumerate(made.inputs)]
            return self._append(name, made.layer, parts)
        if made is not None and isinstance(made.layer, Nonlinearity):
            joined = Nonlinearity(Quadrature(_Composed(made.layer.activation, activation)))
            return self._append(name, joined, made.inputs)
        return self._append(name, Nonlinearity(activation), (source,))

    def _function(self, node: fx.Node) -> None:
        target, inputs = node.target, node.all_input_nodes
        name = node.name
        if target in ADDITIONS:
            self._sum(node, -1.0 if target in (operator.sub, operator.isub, torch.sub, "sub", "sub_") else 1.0)
        elif target in (operator.mul, torch.mul, "mul", operator.truediv, torch.div, "div"):
            self._scale(node, target in (operator.truediv, torch.div, "div"))
        elif target in (operator.neg, torch.neg, "neg"):
            self.put(node, name, Sum((-1.0,)))
        elif target in (torch.cat, torch.concat):
            dim = _given(node, dim=0)["dim"]
            if dim != 1:
                raise ModelError(f"{name!r}: only a concatenation of channels (dim=1) has a limit here, not dim={dim}")
            parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
            self.put(node, name, Concatenate(), [self.names[x.name] for x in parts])
        elif target in (torch.flatten, "flatten"):
            given = _given(node, start_dim=0, end_dim=-1)
            if (given["start_dim"], given["end_dim"]) != (1, -1):
                raise ModelError(f"{name!r}: only a flattening of all but the first dimension has a limit here")
            self.put(node, name, Flatten())
        elif target in (torch.mean, "mean"):
            given = _given(node, dim=None, keepdim=False)
            dims = given["dim"]
            wanted = sorted(_tuple(dims, 1)) if dims is not None else []
            if wanted not in ([2], [-1], [2, 3], [-2, -1]):
                raise ModelError(f"{name!r}: only a mean over the whole grid has a limit here, not over dim={dims}")
            self.put(node, name, GlobalAverage(len(wanted), keeps_grid=bool(given["keepdim"])))
        elif target in (functional.avg_pool1d, functional.avg_pool2d):
            self.put(node, name, _average_pool(name, _pool_of(node)))
        elif target in (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d):
            _check_global(name, _given(node, output_size=None)["output_size"])
            axes = 1 if target is functional.adaptive_avg_pool1d else 2
            self.put(node, name, GlobalAverage(axes, keeps_grid=True))
        elif target is functional.dropout:
            raise ModelError(f"{name!r}: use nn.Dropout, whose mode says whether there is noise")
        else:
            # Torch's functions of numbers by position begin with the tensor.
            first = len(inputs) == 1 and node.args[:1] == (inputs[0],)
            options = {key: value for key, value in node.kwargs.items() if key != "inplace"}
            activation = activation_of_function(target, node.args[1:], options) if first else None
            if activation is None:
                raise ModelError(_unsupported_function(name, target))
            self._activation(node, name, activation)

    def _sum(self, node: fx.Node, sign: float) -> None:
        left, right = (*node.args, node.kwargs.get("other"))[:2]
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise ModelError(f"{node.name!r} adds a constant, whose limit is not normal; give the layer before a bias")
        scale: Any = node.kwargs.get("alpha", 1.0)
        self.put(node, node.name, Sum((1.0, sign * float(scale))), [self.names[left.name], self.names[right.name]])

    def _scale(self, node: fx.Node, inverse: bool) -> None:
        numbers = [x for x in node.args if not isinstance(x, fx.Node)]
        if len(numbers) != 1 or not isinstance(numbers[0], int | float):
            raise ModelError(f"{node.name!r} multiplies features by one another, which has no limit here")
        if inverse and not (isinstance(node.args[0], fx.Node) and numbers[0]):
            raise ModelError(f"{node.name!r} divides by features or by zero, which has no limit here")
        self.put(node, node.name, Sum((1 / float(numbers[0]) if inverse else float(numbers[0]),)))


@dataclass(frozen=True)
class _Composed:
    """One function after another."""

    first: Activation
    second: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _dense(module: nn.Module, fan_in: int, channels: int, standard: bool) -> Dense:
    bias = getattr(module, "bias", None)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return Dense(
        fan_in,
        channels,
        bias is not None,
        standard,
        weight.requires_grad,
        isinstance(bias, torch.Tensor) and bias.requires_grad,
    )


def _convolution(name: str, module: nn.Conv1d | nn.Conv2d, standard: bool) -> Convolution:
    if module.groups != 1:
        raise ModelError(f"layer {name!r}: convolutions in groups have no limit here; use groups=1")
    window = tuple(module.kernel_size)
    if isinstance(module.padding, str):
        total = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(module.dilation, window, strict=True)]
        padding = tuple((size // 2, size - size // 2) for size in total)
    else:
        padding = tuple((size, size) for size in module.padding)
    dense = _dense(module, module.in_channels * math.prod(window), module.out_channels, standard)
    return Convolution(dense, window, tuple(module.stride), tuple(module.dilation), padding, module.padding_mode)


def _average_pool(name: str, module: nn.AvgPool1d | nn.AvgPool2d) -> AveragePool:
    axes = 1 if isinstance(module, nn.AvgPool1d) else 2
    padding = _tuple(module.padding, axes)
    if getattr(module, "divisor_override", None) is not None:
        raise ModelError(f"layer {name!r}: averages with a divisor of their own have no limit here; scale the output")
    if module.ceil_mode:
        raise ModelError(f"layer {name!r}: averages with ceil_mode=True have no limit here")
    if any(padding) and not module.count_include_pad:
        raise ModelError(f"layer {name!r}: averages whose padding does not count have no limit here")
    stride = module.stride if module.stride is not None else module.kernel_size
    return AveragePool(_tuple(module.kernel_size, axes), _tuple(stride, axes), tuple((size, size) for size in padding))


def _pool_of(node: fx.Node) -> nn.AvgPool1d | nn.AvgPool2d:
    settings = {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
    if node.target is functional.avg_pool1d:
        return nn.AvgPool1d(**_given(node, **settings))
    return nn.AvgPool2d(**_given(node, **settings, divisor_override=None))


def _given(node: fx.Node, **settings: Any) -> dict[str, Any]:
    """Return what a function is called with behind the tensor, by position or by name."""
    by_position = dict(zip(settings, node.args[1:], strict=False))
    return settings | by_position | {key: value for key, value in node.kwargs.items() if key in settings}


def _check_global(name: str, output_size: Any) -> None:
    if any(size != 1 for size in (output_size if isinstance(output_size, list | tuple) else (output_size,))):
        raise ModelError(f"layer {name!r}: of adaptive averages only those over the whole grid have a limit here")


def _tuple(x: Any, axes: int) -> tuple[int, ...]:
    return tuple(int(y) for y in x) if isinstance(x, list | tuple) else (int(x),) * axes


def _unsupported(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    place = f"layer {name!r} ({kind})"
    if "MaxPool" in kind:
        return f"{place}: the maximum of correlated normal numbers has no closed limit; use AvgPool"
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        return (
            f"{place}: it couples the inputs of a batch, so that there is no kernel between two of them; use LayerNorm"
        )
    if isinstance(module, nn.PReLU):
        return f"{place}: its slope is trained; use LeakyReLU"
    return (
        f"{place} has no limit of infinite width here; the nearest are Linear, Conv1d, Conv2d, AvgPool, LayerNorm and "
        "Flatten; for an elementwise function use Elementwise(function), which goes by quadrature; for anything else "
        "take empirical_ntk of the module as it is"
    )


def _unsupported_function(name: str, target: Any) -> str:
    called = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return (
        f"{name!r} ({called}) has no limit of infinite width here; for an elementwise function use "
        "Elementwise(function), which goes by quadrature; for anything else take empirical_ntk of the module as it is"
    )
