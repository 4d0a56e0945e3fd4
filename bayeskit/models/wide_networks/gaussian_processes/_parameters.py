"""Variances of a network's weights and biases as trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import ModelError, SettingsError
from bayeskit.extend import disable_current_modes, real_number
from bayeskit.models.wide_networks._covariance import Covariance
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks._layers import Convolution, Dense, Variances, cross_covariance, own_covariance
from bayeskit.models.wide_networks._reader import INPUT, Graph, check_limit

_COVARIANCES = ("nngp", "ntk")


@dataclass(frozen=True)
class Parameters:
    """Trainable variances of a network; weight variances must be positive (``SettingsError``)."""

    network: InfiniteWidth  # its variances are the initial values; bias variances of zero stay zero
    tied: bool = True  # whether all layers share one weight and one bias variance, which must be equal initially

    def __post_init__(self) -> None:
        _check_network(self.network)
        for name, value in self._weights.items():
            if not value > 0:
                raise SettingsError(
                    f"the weight variance of layer {name!r} is zero and cannot be learned; make it positive"
                )
        _start("weight_variance", self._weights, self.tied)
        _start("bias_variance", self._biases, self.tied)

    @property
    def _weights(self) -> dict[str, float]:
        return {name: _number(value) for name, value in self.network.variances.weight.items()}

    @property
    def _biases(self) -> dict[str, float]:
        """Positive bias variances, by layer."""
        bias = self.network.variances.bias
        found = {}
        for node in self.network.graph.nodes:
            layer = node.layer.dense if isinstance(node.layer, Convolution) else node.layer
            if isinstance(layer, Dense) and layer.bias and _number(bias[node.name]) > 0:
                found[node.name] = _number(bias[node.name])
        return found

    @property
    def weight(self) -> Tensor:
        """Initial weight variances, ``()`` if tied, else ``(layers,)``."""
        found = _start("weight_variance", self._weights, self.tied)
        assert found is not None
        return found

    @property
    def bias(self) -> Tensor | None:
        """Initial positive bias variances, ``()`` if tied, else ``(layers,)``; None if there are none."""
        return _start("bias_variance", self._biases, self.tied)

    def at(self, weight: Tensor, bias: Tensor | None) -> InfiniteWidth:
        """Return the network with variances of the shapes of :attr:`weight` and :attr:`bias`, unchecked for tracing."""
        weights = self._spread(weight, tuple(self._weights))
        biases: dict[str, float | Tensor] = dict(self.network.variances.bias)
        if bias is not None:
            biases |= self._spread(bias, tuple(self._biases))
        return replace(self.network, variances=Variances(weights, biases))

    def _spread(self, value: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: value if self.tied else value[i] for i, name in enumerate(names)}


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _start(name: str, values: Mapping[str, float], tied: bool) -> Tensor | None:
    if not values:
        return None
    if not tied:
        return torch.tensor(list(values.values()), dtype=torch.float64)
    if len(set(values.values())) > 1:
        raise SettingsError(f"{name} differs between layers, {dict(values)}; pass tied=False, or use a single number")
    return torch.tensor(next(iter(values.values())), dtype=torch.float64)


def _check_network(network: object) -> InfiniteWidth:
    """Return the network, or raise a ``ModelError`` unless it is an ``InfiniteWidth`` with normal output."""
    if not isinstance(network, InfiniteWidth):
        remedy = (
            "wrap it: infinite_width(module)" if isinstance(network, torch.nn.Module) else "use infinite_width(module)"
        )
        raise ModelError(f"the network must be an InfiniteWidth, not {type(network).__name__}; {remedy}")
    if not check_limit(network.graph).normal:
        raise ModelError(
            f"the network's output, layer {network.graph.nodes[-1].name!r}, is not normal in the limit, so it is not a "
            "Gaussian process; end the network with a dense layer"
        )
    return network


def positive_number(name: str, value: object) -> object:
    """Return a number as a float64 tensor ``()``, and any other value, such as a prior, unchanged.

    Numbers and tensors that are not positive raise ``SettingsError``; parameters are not checked.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and not bool((value > 0).all()):
            raise SettingsError(f"{name} must be positive, not {value!r}")
        return value
    return torch.tensor(real_number(name, value, "(0, inf)"), dtype=torch.float64)


def check_covariance(covariance: str) -> str:
    """Return the name of a kernel, or raise a ``SettingsError`` that lists the names."""
    if covariance not in _COVARIANCES:
        raise SettingsError(f'covariance must be "nngp" or "ntk", not {covariance!r}')
    return covariance


def matrix(network: InfiniteWidth, covariance: str, x1: Tensor, x2: Tensor | None = None) -> Tensor:
    """Return a kernel matrix, with checks of inputs; computed in blocks if no gradients are needed."""
    return network.nngp(x1, x2) if covariance == "nngp" else network.ntk(x1, x2)


def diagonal(network: InfiniteWidth, covariance: str, x: Tensor) -> Tensor:
    """Return the diagonal of a kernel matrix, ``(n,)``."""
    return network.nngp_diagonal(x) if covariance == "nngp" else network.ntk_diagonal(x)


def traced_matrix(network: InfiniteWidth, covariance: str, x1: Tensor, x2: Tensor | None = None) -> Tensor:
    """Return a kernel matrix as a pure function of the variances, which can be traced and batched."""
    ntk = covariance == "ntk"
    first, own = network.graph.profile(x1, network.variances, ntk)
    second = first if x2 is None else network.graph.profile(x2, network.variances, ntk)[0]
    start = _input_covariance(network.graph, x1, x1 if x2 is None else x2, ntk)
    cross = network.graph.propagate(start, (first, second), network.variances)
    found, exact = (cross.ntk, own.ntk) if ntk else (cross.nngp, own.nngp)
    assert found is not None and exact is not None
    return found.diagonal_scatter(exact) if x2 is None else found


def _input_covariance(graph: Graph, x1: Tensor, x2: Tensor, ntk: bool) -> Covariance:
    """Return the covariance of inputs ``(n1, ...)`` and ``(n2, ...)`` as a constant of the trace."""
    # The number of nearly parallel pairs depends on the data only, not on variances; compilers need it as a constant.
    all_pairs = INPUT in graph.all_pairs
    with disable_current_modes():
        a, b = (own_covariance(x, all_pairs, ntk).variance() for x in (x1, x2))
        return cross_covariance(x1, x2, (a, b), all_pairs, ntk)


def traced_diagonal(network: InfiniteWidth, covariance: str, x: Tensor) -> Tensor:
    """Return the diagonal of a kernel matrix as a pure function of the variances, ``(n,)``."""
    own = network.graph.profile(x, network.variances, covariance == "ntk")[1]
    found = own.ntk if covariance == "ntk" else own.nngp
    assert found is not None
    return found


def kernel_in_words(kernel: Any) -> str:
    """Describe a kernel for Pyro or GPyTorch in one line, with its network and variances."""
    parameters = kernel.parameters_of_network
    variances = []
    for kind, first in (("weight_variance", parameters.weight), ("bias_variance", parameters.bias)):
        if first is not None:
            fixed = kind not in getattr(kernel, "_pyro_samples", {})
            value = getattr(kernel, kind).detach() if fixed else None
            variances.append(f"{kind}={_digits(value) if value is not None else 'by its prior'}")
    module = type(parameters.network.module).__name__
    return f"{type(kernel).__name__}({module}, {', '.join(variances)}, covariance={kernel.covariance!r})"


def _digits(value: Tensor) -> str:
    numbers = [f"{float(x):.3g}" for x in value.reshape(-1)]
    return f"[{', '.join(numbers)}]" if value.dim() else numbers[0]
