"""Activations as torch modules, and which activation a torch module is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import ModelError, SettingsError
from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.piecewise_linear import PiecewiseLinear
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.registry import activation_of_function
from bayeskit.models.wide_networks.activations.smooth import Gelu

PROBES = (-2.3, -0.4, 0.0, 0.7, 1.1, 2.6, 3.9)  # at which functions are tried out
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
    if isinstance(module, nn.ReLU) and _unchanged(module, nn.ReLU):
        return PiecewiseLinear(0.0, 1.0)
    if isinstance(module, nn.LeakyReLU) and _unchanged(module, nn.LeakyReLU):
        return PiecewiseLinear(module.negative_slope, 1.0)
    if isinstance(module, nn.GELU) and _unchanged(module, nn.GELU):
        return Gelu() if module.approximate == "none" else Quadrature(module)
    return Quadrature(module) if isinstance(module, MODULES) else None


def _unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its parent class does."""
    return type(module).forward is kind.forward


def _activation_of(function: Activation | Callable[[Tensor], Tensor]) -> Activation:
    if isinstance(function, Activation):
        return function
    known = None
    if isinstance(function, nn.Module):
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise SettingsError(
                f"{type(function).__name__} has parameters that are trained, which a fixed function of single numbers "
                "has not; freeze them with requires_grad_(False)"
            )
        known = activation_of_module(function)
    elif callable(function) and isinstance(function, Hashable):
        known = activation_of_function(function, (), {})
    if known is None:
        known = Quadrature(function)
        _check_elementwise(function)
    return known


@torch.no_grad()
def _check_elementwise(function: Callable[[Tensor], Tensor]) -> None:
    """Refuse functions that mix the entries of a tensor, or are random."""
    x = torch.tensor(PROBES, dtype=torch.float64)
    try:
        with global_stream(new_generator(0)):  # in case there is noise
            values, reversed_part = function(x.clone()), function(x[:4].flip(0))
    except RuntimeError:  # of tensors that it keeps on another device, say, where the data may be, too
        return
    alike = isinstance(values, Tensor) and values.shape == x.shape
    if not (alike and torch.allclose(reversed_part.double().flip(0), values[:4].double(), rtol=1e-9, equal_nan=True)):
        raise ModelError(
            "an activation must be elementwise, a function of each number by itself; this one mixes a tensor's "
            "entries, or is random: softmax, normalization and dropout are layers of their own"
        )
