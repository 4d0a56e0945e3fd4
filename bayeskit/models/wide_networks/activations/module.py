"""Activations as torch modules, and which activation a torch module is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor, nn

from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.piecewise_linear import PiecewiseLinear
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.registry import activation_of_function
from bayeskit.models.wide_networks.activations.smooth import Gelu

MODULES: tuple[type[nn.Module], ...] = (
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Mish,
    nn.Hardtanh,
    nn.ReLU6,
    nn.Softsign,
    nn.LogSigmoid,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Tanhshrink,
)


class Elementwise(nn.Module):
    """An activation, or any elementwise function, as a module.

    Parameters
    ----------
    activation : Activation or callable
        Torch's own functions have their closed form if there is one; other functions go by quadrature.

    Attributes
    ----------
    activation : Activation

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 8), Elementwise(torch.tanh), nn.Linear(8, 1))
    >>> Elementwise(torch.erf).activation
    Erf()
    """

    def __init__(self, activation: Activation | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = _activation_of(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.activation(x)


def activation_of_module(module: nn.Module) -> Activation | None:
    """Return the activation that a module is, or None."""
    if isinstance(module, Elementwise):
        return module.activation
    if isinstance(module, nn.ReLU):
        return PiecewiseLinear(0.0, 1.0)
    if isinstance(module, nn.LeakyReLU):
        return PiecewiseLinear(module.negative_slope, 1.0)
    if isinstance(module, nn.GELU):
        return Gelu() if module.approximate == "none" else Quadrature(module)
    return Quadrature(module) if isinstance(module, MODULES) else None


def _activation_of(function: Activation | Callable[[Tensor], Tensor]) -> Activation:
    if isinstance(function, Activation):
        return function
    known = None
    if isinstance(function, nn.Module):
        known = activation_of_module(function)
    elif callable(function) and isinstance(function, Hashable):
        known = activation_of_function(function, (), {})
    return Quadrature(function) if known is None else known
