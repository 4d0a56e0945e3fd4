"""From a torch module to a graph of layers of infinite width."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from bayeskit.errors import ModelError, SettingsError
from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.module import activation_of_module
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.registry import activation_of_function
from bayeskit.models.wide_networks.calls import given, is_in_place, operands, place_of_call, pool_of
from bayeskit.models.wide_networks.checks import check_limit
from bayeskit.models.wide_networks.graph import INPUT, Graph, Node, axes_before, axes_behind
from bayeskit.models.wide_networks.layers.combine import Concatenate, Sum
from bayeskit.models.wide_networks.layers.grid import Flatten, GlobalAverage
from bayeskit.models.wide_networks.layers.layer import Layer
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity
from bayeskit.models.wide_networks.module_layers import (
    IDENTITY,
    WEIGHTED,
    average_pool,
    global_average,
    layer_of,
    place_of_module,
    whole_tuple,
)
from bayeskit.models.wide_networks.refusals import Refusal, Refusals, check_plain, reason_against_function
from bayeskit.models.wide_networks.tracing import Tracer, place_of, trace

SUBTRACTIONS = (operator.sub, operator.isub, torch.sub, "sub", "sub_")
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_", *SUBTRACTIONS)
DIVISIONS = (operator.truediv, operator.itruediv, torch.div, "div", "div_")
PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_", *DIVISIONS)
RESHAPES = (torch.reshape, "reshape", "view")
POOLS = (functional.avg_pool1d, functional.avg_pool2d)
ADAPTIVE_POOLS = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d)


def readable(module: nn.Module) -> nn.Module:
    """Return a module whose layers have names: a single layer of torch's becomes a ``Sequential``.

    Raises
    ------
    SettingsError
        If it is no module.
    """
    if not isinstance(module, nn.Module):
        raise SettingsError(
            f"infinite_width takes a torch.nn.Module, not {type(module).__name__}; Elementwise makes one of a function "
            "of single numbers, and a class with a forward method of anything else"
        )
    return nn.Sequential(module) if Tracer().is_leaf_module(module, "") else module


def read(module: nn.Module, standard: bool) -> Graph:
    """Return the graph of a module.

    Raises
    ------
    ModelError
        If it cannot be traced, or has layers without a limit that is known here, all of which are named.
    """
    reading = _Reading(dict(module.named_modules()), standard)
    for node in trace(module).nodes:
        reading.add(node)
    return reading.graph()


@dataclass
class _Reading:
    """What has been read so far."""

    modules: dict[str, nn.Module]
    standard: bool
    nodes: dict[str, Node] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # from fx's names to nodes'
    uses: dict[str, int] = field(default_factory=dict)
    owners: dict[nn.Parameter, str] = field(default_factory=dict)  # the names of layers, by their weights
    sizes: dict[str, int | None] = field(default_factory=dict)  # of tensors: by fx's names, which dimension, or all
    memory: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the tensor that one shares its numbers with
    refusals: Refusals = field(default_factory=Refusals)
    refused: set[str] = field(default_factory=set)  # fx's names
    lost: set[str] = field(default_factory=set)  # fx's names of what is not made of the input alone
    num_axes: int | None = None
    output: str = ""

    def add(self, node: fx.Node) -> None:
        """Read one node of a trace."""
        if any(x.name in self.lost for x in node.all_input_nodes):
            self._skip(node)  # a consequence of what has been refused before
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
                raise ModelError(f"the network takes a second input, {node.name!r}; kernels are of one input")
            self.names[node.name] = INPUT
        elif node.op == "output":
            (result,) = node.args
            if not isinstance(result, fx.Node) or result.name in self.sizes:
                raise ModelError("the network must return one tensor")
            self.output = self.names[result.name]
        elif node.op == "get_attr":
            raise ModelError(f"the network uses a tensor of its own, {node.target!r}, in a way that has no limit here")
        elif node.op == "call_module":
            module = self.modules[str(node.target)]
            self._module(node, str(node.target), module)
            if getattr(module, "inplace", False):
                self._overwrite(node)
        elif not self._size(node):
            self._function(node)
            if is_in_place(node):
                self._overwrite(node)

    def _skip(self, node: fx.Node) -> None:
        """Read on behind what has been refused, as if it were not there."""
        sources = [self.names[x.name] for x in node.all_input_nodes if x.name in self.names]
        if sources:
            self.names[node.name] = sources[0]
        else:
            self.lost.add(node.name)

    def graph(self) -> Graph:
        """Return the graph, once all nodes are read."""
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
            self.num_axes = axes_before(layer)
        self.names[node.name] = self._append(name, layer, sources, place_of(node))
        if layer == IDENTITY or isinstance(layer, Flatten):
            self.memory[node] = self._memory(node.all_input_nodes[0])

    def _append(self, name: str, layer: Layer, inputs: Sequence[str], place: str) -> str:
        """Append a layer; one without weights may be used more than once, and gets a number each time."""
        uses = self.uses[name] = self.uses.get(name, 0) + 1
        name = name if uses == 1 else f"{name} ({uses})"
        self.nodes[name] = Node(name, layer, tuple(inputs), place)
        return name

    def _check_weights(self, name: str, module: nn.Module) -> None:
        """Refuse weights that another layer has, or the same layer in another place."""
        for parameter in module.parameters():
            if self.owners.setdefault(parameter, f"{name!r}") != f"{name!r}" or name in self.uses:
                raise ModelError(
                    f"layer {name!r} is used twice, or has the weights of layer {self.owners[parameter]}; networks "
                    "with shared weights have no limit here"
                )

    def _module(self, node: fx.Node, name: str, module: nn.Module) -> None:
        activation = activation_of_module(module)
        if activation is not None:
            check_plain(place_of_module(name, module), module)
            self._activation(node, name, activation)
            return
        layer = layer_of(name, module, self.standard)
        if isinstance(module, WEIGHTED):
            self._check_weights(name, module)
        self.put(node, name, layer)

    def _activation(self, node: fx.Node, name: str, activation: Activation) -> None:
        """Append a nonlinearity."""
        (source,) = (self.names[x.name] for x in node.all_input_nodes)
        self.names[node.name] = self._apply(name, activation, source, place_of(node))

    def _apply(self, name: str, activation: Activation, source: str, place: str) -> str:
        """Append a nonlinearity, on each part of what a concatenation joins, or joined with one before."""
        made = self.nodes.get(source)
        if made is not None and made.layer == IDENTITY:
            return self._apply(name, activation, made.inputs[0], place)
        if made is not None and isinstance(made.layer, Concatenate | Flatten):
            # Channels that are not alike are left to be joined until the function has been applied to each.
            parts = [self._apply(f"{name}[{i}]", activation, part, place) for i, part in enumerate(made.inputs)]
            return self._append(name, made.layer, parts, place)
        if made is not None and isinstance(made.layer, Nonlinearity):
            joined = Nonlinearity(Quadrature(_Composed(made.layer.activation, activation)))
            return self._append(name, joined, made.inputs, place)
        return self._append(name, Nonlinearity(activation), (source,), place)

    def _size(self, node: fx.Node) -> bool:
        """Note which dimension's size a node asks for, if it does; what reshapes needs to know."""
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
        if target in RESHAPES:
            self._reshape(node)
            return
        if any(x.name in self.sizes for x in node.all_input_nodes):
            raise Refusal(place_of_call(node), f"it computes with the size of a tensor; {WRITE_FLATTEN}")
        if target is operator.getitem:
            self._item(node)
        elif target in ADDITIONS:
            self._sum(node, -1.0 if target in SUBTRACTIONS else 1.0)
        elif target in PRODUCTS:
            self._scale(node, target in DIVISIONS)
        elif target in (operator.neg, torch.neg, "neg"):
            self.put(node, node.name, Sum((-1.0,)))
        elif target in (torch.cat, torch.concat, torch.concatenate):
            self._concatenate(node)
        elif target in (torch.flatten, "flatten"):
            self._flatten(node)
        elif target in (torch.squeeze, "squeeze"):
            self._squeeze(node)
        elif target in (torch.mean, "mean"):
            self._mean(node)
        elif target in POOLS:
            self.put(node, node.name, average_pool(place_of_call(node), pool_of(node)))
        elif target in ADAPTIVE_POOLS:
            size = given(node, output_size=None)["output_size"]
            self.put(node, node.name, global_average(place_of_call(node), 1 + ADAPTIVE_POOLS.index(target), size))
        elif target is functional.dropout:
            raise Refusal(place_of_call(node), "use nn.Dropout, whose mode says whether there is noise")
        else:
            self._function_of_features(node)

    def _function_of_features(self, node: fx.Node) -> None:
        # Torch's functions of numbers by position begin with the tensor.
        source = given(node, input=None)["input"] if not node.args else node.args[0]
        options = {key: value for key, value in node.kwargs.items() if key not in ("inplace", "input", "out")}
        if node.kwargs.get("out") is not None:
            raise Refusal(place_of_call(node), "it writes to a tensor of its own; leave out= out")
        target = node.target.rstrip("_") if isinstance(node.target, str) else node.target
        activation = None
        if [source] == node.all_input_nodes:
            activation = activation_of_function(target, node.args[1:], options)
        if activation is None:
            raise Refusal(place_of_call(node), reason_against_function(node.target))
        self._activation(node, node.name, activation)

    def _reshape(self, node: fx.Node) -> None:
        """Read a reshaping, if it is a flattening."""
        source: Any = node.args[0]
        sizes: Any = node.args[1:] or (node.kwargs.get("shape", ()),)
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
        whole = len(sizes) == 2 and sizes[1] == -1 and isinstance(sizes[0], fx.Node)
        if not (whole and self.sizes.get(sizes[0].name) == 0):
            raise Refusal(place_of_call(node), f"of reshapings only a flattening has a limit here; {WRITE_FLATTEN}")
        self.put(node, node.name, Flatten(), [self.names[source.name]])

    def _flatten(self, node: fx.Node) -> None:
        chosen = given(node, start_dim=0, end_dim=-1)
        first, last = self._dimensions(node, (chosen["start_dim"], chosen["end_dim"]))
        axes = self._axes_of(node)
        if first != 1 or last not in (-1, None if axes is None else axes + 1):
            raise Refusal(
                place_of_call(node),
                f"only a flattening of all but the first dimension has a limit here; {WRITE_FLATTEN}",
            )
        self.put(node, node.name, Flatten())

    def _squeeze(self, node: fx.Node) -> None:
        """Read a squeeze of the only channel of outputs, which leaves their kernel as it is."""
        (dim,) = self._dimensions(node, (given(node, dim=None)["dim"],))
        ends = all(user.op == "output" for user in node.users)
        if self._axes_of(node) != 0 or dim != 1 or not ends:
            raise Refusal(
                place_of_call(node),
                "only squeeze(-1) of vectors at the network's end has a limit here; leave it out, or write "
                "x.flatten(1) behind an average over the grid",
            )
        self.put(node, node.name, IDENTITY)

    def _concatenate(self, node: fx.Node) -> None:
        chosen = given(node, dim=0)["dim"]
        parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
        (dim,) = self._dimensions(node, (chosen,))
        if dim != 1:
            raise ModelError(
                f"{place_of_call(node)}: only a concatenation of channels (dim=1) has a limit here, not dim={chosen}"
            )
        self.put(node, node.name, Concatenate(), [self.names[x.name] for x in parts])

    def _mean(self, node: fx.Node) -> None:
        chosen = given(node, dim=None, keepdim=False)
        dims = chosen["dim"]
        wanted = sorted(self._dimensions(node, whole_tuple(dims, 1))) if dims is not None else []
        if wanted not in ([2], [-1], [2, 3], [-2, -1]):
            raise Refusal(place_of_call(node), f"only a mean over the whole grid has a limit here, not over dim={dims}")
        self.put(node, node.name, GlobalAverage(len(wanted), keeps_grid=bool(chosen["keepdim"])))

    def _dimensions(self, node: fx.Node, dims: Sequence[Any]) -> list[Any]:
        """Return dimensions counted from the first, where their number is known."""
        axes = self._axes_of(node)
        return [
            dim + axes + 2 if axes is not None and isinstance(dim, int) and -axes - 2 <= dim < 0 else dim
            for dim in dims
        ]

    def _axes_of(self, node: fx.Node) -> int | None:
        """Return on what grid the first of a node's inputs lie that is known to lie on one."""
        known = (axes_behind(self.names[x.name], self.nodes, self.num_axes) for x in node.all_input_nodes)
        return next((axes for axes in known if axes is not None), None)

    def _item(self, node: fx.Node) -> None:
        """Read a part of something, which may be a part of what a refused layer returns."""
        source = node.args[0]
        if isinstance(source, fx.Node) and source.name in self.refused:
            self._skip(node)
            self.refused.add(node.name)
            return
        raise Refusal(
            place_of_call(node),
            "it takes a part of the features, which has no limit here; leave it out at the network's end, for all "
            "outputs have the same kernel",
        )

    def _sum(self, node: fx.Node, sign: float) -> None:
        left, right = operands(node)
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise Refusal(
                place_of_call(node), "it adds a constant, whose limit is not normal; give the layer before a bias"
            )
        scale: Any = node.kwargs.get("alpha", 1.0)
        self.put(node, node.name, Sum((1.0, sign * float(scale))), [self.names[left.name], self.names[right.name]])

    def _scale(self, node: fx.Node, inverse: bool) -> None:
        left, right = operands(node)
        if node.kwargs.get("rounding_mode") is not None:
            raise Refusal(place_of_call(node), "it rounds; write it as Elementwise(function), which goes by quadrature")
        numbers = [x for x in (left, right) if not isinstance(x, fx.Node)]
        if inverse and (isinstance(right, fx.Node) or right == 0):
            raise Refusal(place_of_call(node), "it divides by features or by zero, which has no limit here")
        if len(numbers) != 1 or not isinstance(numbers[0], int | float):
            raise Refusal(
                place_of_call(node),
                "it multiplies features by one another, which has no limit here; a product such as h * sigmoid(h) is "
                "one function of h: write nn.SiLU, or Elementwise(lambda h: h * torch.sigmoid(h)) and the like",
            )
        self.put(node, node.name, Sum((1 / float(numbers[0]) if inverse else float(numbers[0]),)))

    def _overwrite(self, node: fx.Node) -> None:
        """Let all who know the memory that a node writes to read what it has written."""
        source = node.all_input_nodes[0]
        home = self._memory(source)
        before, after = self.names[source.name], self.names[node.name]
        seen = self.names.keys() | self.sizes.keys()
        for alias in [x for x in self.memory if self.memory[x] is home] + [home]:
            if self.names[alias.name] == before:
                self.names[alias.name] = after
            elif any(user.name not in seen for user in alias.users):
                raise Refusal(
                    place_of_call(node), "it overwrites features that are used later in another shape; not in place"
                )
        self.memory[node] = home

    def _memory(self, node: fx.Node) -> fx.Node:
        return self.memory.get(node, node)


WRITE_FLATTEN = "write x.flatten(1) to make vectors of images, and nothing at a network's end"


@dataclass(frozen=True)
class _Composed:
    """One function after another."""

    first: Activation
    second: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))
