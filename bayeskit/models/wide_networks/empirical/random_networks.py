"""Many random networks of one width at once, and the kernels of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.finite import finite_network
from bayeskit.models.wide_networks.graph import INPUT
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth, infinite_width, weighted_layers
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.layer import Variances
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity
from bayeskit.models.wide_networks.layers.normalization import Dropout, LayerNormalization

CHUNK = 1 << 22  # numbers that gradients of a chunk of networks hold: more, and they leave the cache for nothing

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class RandomNetworks:
    """The law of a finite network's weights, and what its kernels need; made by :func:`random_networks`.

    Attributes
    ----------
    template : torch.nn.Module
        One network, whose own weights do not matter.
    limit : InfiniteWidth
        What its kernels tend to.
    spread : mapping of str to float
        Standard deviation of each random parameter, by name.
    trained : tuple of str
        The parameters that take part in the tangent kernel.
    last : tuple of str
        Random parameters in which outputs are linear.
    alike : bool
        Whether all outputs have the same law, so that one stands for all.
    """

    template: nn.Module
    limit: InfiniteWidth
    spread: Mapping[str, float]
    trained: tuple[str, ...]
    last: tuple[str, ...]
    alike: bool

    def draw(self, num_networks: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parameters of independent networks, ``{name: (num_networks, *shape)}``."""
        result = {}
        for name, parameter in self.template.named_parameters():
            value = parameter.detach()
            if name in self.spread:
                value = value.new_empty(num_networks, *value.shape).normal_(generator=generator)
                result[name] = value if self.spread[name] == 1 else value.mul_(self.spread[name])
            else:
                result[name] = value.expand(num_networks, *value.shape)
        return result

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return what each network makes of inputs, ``(networks, n, outputs)``."""
        return vmap(lambda p: functional_call(self.template, p, (x,)).flatten(1))(dict(parameters))

    def nngp(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return covariances of an output given all but the last layer, ``(networks, n, n)``.

        Outputs are linear in the last layer, so that its weights are integrated out and not sampled.
        """
        return self._products(parameters, x, {name: self.spread[name] for name in self.last})

    def ntk(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return products of an output's gradients with respect to all parameters, ``(networks, n, n)``."""
        return self._products(parameters, x, dict.fromkeys(self.trained, 1.0))

    def full_ntk(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Return products of all outputs' gradients, output by output, ``(networks, outputs n, outputs n)``."""
        rows = self._gradients(parameters, x, self.trained, self._num_outputs(x, all_outputs=True))
        first, *others = (values.flatten(1, 2) for values in rows)
        total = first @ first.mT
        for other in others:
            total += other @ other.mT
        return total

    def chunk(self, x: Tensor, all_outputs: bool = False) -> int:
        """Return for how many networks gradients are to be held at once."""
        numbers = sum(p.numel() for p in self.template.parameters())
        return max(CHUNK // (numbers * len(x) * self._num_outputs(x, all_outputs)), 1)

    def _num_outputs(self, x: Tensor, all_outputs: bool = False) -> int:
        """Return how many outputs there are, or over how many kernels are averaged."""
        if self.alike and not all_outputs:
            return 1
        with torch.no_grad():
            return self.template(x[:1]).numel()

    def _products(self, parameters: Parameters, x: Tensor, scales: Mapping[str, float]) -> Tensor:
        found = self._gradients(parameters, x, tuple(scales), self._num_outputs(x))
        total: Tensor | None = None
        for rows, scale in zip(found, scales.values(), strict=True):
            rows = rows * scale
            product = (rows @ rows.mT).mean(1)
            total = product if total is None else total + product
        assert total is not None
        return total

    def _gradients(self, parameters: Parameters, x: Tensor, names: Sequence[str], num_outputs: int) -> Iterator[Tensor]:
        """Yield the gradients with respect to one parameter after another, ``(networks, outputs, n, numbers)``."""
        chosen = {name: parameters[name] for name in names}
        others = {name: value for name, value in parameters.items() if name not in names}

        def output(chosen: Parameters, others: Parameters, one: Tensor, index: Tensor) -> Tensor:
            return functional_call(self.template, {**chosen, **others}, (one[None],)).flatten().gather(0, index)[0]

        gradient = vmap(vmap(grad(output), (None, None, None, 0)), (None, None, 0, None))
        index = torch.arange(num_outputs, device=x.device)[:, None]
        found = vmap(gradient, (0, 0, None, None))(chosen, others, x, index)
        for name in names:
            yield found[name].flatten(3).permute(0, 2, 1, 3)


def random_networks(kernel: InfiniteWidth, width: int | None, dtype: torch.dtype) -> RandomNetworks:
    """Return the law of ``kernel.network(width)``.

    Raises
    ------
    ModelError
        If the network does not end in layers with weights, or draws noise of its own.
    """
    last = _last_layers(kernel)
    standard = kernel.parameterization == "standard"
    template = kernel.network(width).to(dtype)
    # The same network of torch's own layers, which can be read again: sums of gradients know its widths.
    plain = finite_network(kernel.module, kernel.graph, kernel.variances, True, width, 0)
    variances = kernel.variances
    limit = infinite_width(plain, kernel.parameterization, dict(variances.weight), dict(variances.bias))
    spread = {}
    for layer in weighted_layers(kernel.graph):
        for name, deviation in _deviations(layer, template.get_submodule(layer), variances).items():
            spread[name] = deviation if standard else 1.0
    return RandomNetworks(
        template,
        limit,
        spread,
        tuple(name for name, parameter in template.named_parameters() if parameter.requires_grad),
        tuple(name for name in spread if name.rpartition(".")[0] in last),
        isinstance(kernel.graph.nodes[-1].layer, Dense),
    )


def _last_layers(kernel: InfiniteWidth) -> frozenset[str]:
    """Return the layers in whose weights outputs are linear."""
    nodes = kernel.graph.nodes
    behind, last = {nodes[-1].name}, set()
    for node in reversed(nodes):
        if isinstance(node.layer, Dropout):
            raise ModelError(f"layer {node.name!r} draws noise of its own; put the module into evaluation mode")
        if node.name not in behind:
            continue
        if isinstance(node.layer, Dense | Convolution):
            last.add(node.name)
        elif isinstance(node.layer, Nonlinearity | LayerNormalization) or INPUT in node.inputs:
            raise ModelError(
                f"outputs depend on {node.name!r} by no layer with weights; end the network with a dense layer, so "
                "that outputs are normal given the layers before"
            )
        else:
            behind.update(node.inputs)
    return frozenset(last)


def _deviations(layer: str, module: nn.Module, variances: Variances) -> dict[str, float]:
    """Return the standard deviations of a layer's weights and biases in the standard parametrisation."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    result = {f"{layer}.weight": math.sqrt(float(variances.weight[layer]) / weight[0].numel())}
    if module.bias is not None:
        result[f"{layer}.bias"] = math.sqrt(float(variances.bias[layer]))
    return result
