"""Which activation a function is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.piecewise_linear import PiecewiseLinear
from bayeskit.models.wide_networks.activations.polynomial import monomial
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.sign import Step
from bayeskit.models.wide_networks.activations.smooth import Erf, Exponential, Gelu, Sine

HALF_PI = 1.5707963267948966

CLOSED: dict[Any, Callable[..., Activation | None]] = {
    torch.relu: lambda: PiecewiseLinear(0.0, 1.0),
    functional.relu: lambda inplace=False: PiecewiseLinear(0.0, 1.0),
    functional.leaky_relu: lambda negative_slope=0.01, inplace=False: PiecewiseLinear(negative_slope, 1.0),
    torch.abs: lambda: PiecewiseLinear(-1.0, 1.0),
    operator.abs: lambda: PiecewiseLinear(-1.0, 1.0),
    torch.erf: Erf,
    torch.special.erf: Erf,
    torch.sin: Sine,
    torch.cos: lambda: Sine(phase=HALF_PI),
    torch.exp: Exponential,
    torch.sign: Step,
    torch.square: lambda: monomial(2),
    torch.pow: lambda exponent: _power(exponent),
    operator.pow: lambda exponent: _power(exponent),
    "pow": lambda exponent: _power(exponent),
    "relu": lambda: PiecewiseLinear(0.0, 1.0),
    "abs": lambda: PiecewiseLinear(-1.0, 1.0),
    "erf": Erf,
    "sin": Sine,
    "cos": lambda: Sine(phase=HALF_PI),
    "exp": Exponential,
    "sign": Step,
    "square": lambda: monomial(2),
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.tanh: torch.tanh,
    torch.sigmoid: torch.sigmoid,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    functional.tanh: torch.tanh,
    functional.sigmoid: torch.sigmoid,
    functional.silu: functional.silu,
    functional.softplus: functional.softplus,
    functional.elu: functional.elu,
    functional.selu: functional.selu,
    functional.celu: functional.celu,
    functional.mish: functional.mish,
    functional.hardtanh: functional.hardtanh,
    functional.relu6: functional.relu6,
    functional.softsign: functional.softsign,
    functional.logsigmoid: functional.logsigmoid,
    functional.hardswish: functional.hardswish,
    functional.hardsigmoid: functional.hardsigmoid,
    functional.tanhshrink: functional.tanhshrink,
}


def activation_of_function(target: Any, settings: tuple[Any, ...], options: dict[str, Any]) -> Activation | None:
    """Return the activation that a function or the name of a tensor's method is, or None.

    Parameters
    ----------
    target : callable or str
        The function or method.
    settings, options : tuple and dict
        What it is called with behind the tensor, by position and by name.
    """
    if target is functional.gelu:
        return Gelu() if options.get("approximate", "none") == "none" else Quadrature(_Bound(target, (), options))
    if target in CLOSED:
        return CLOSED[target](*settings, **options)
    if target in FUNCTIONS:
        function = FUNCTIONS[target]
        return Quadrature(_Bound(function, settings, options) if settings or options else function)
    return None


def _power(exponent: Any) -> Activation | None:
    """Return a monomial; other powers are not finite at zero, or no functions of negative numbers."""
    whole = isinstance(exponent, int | float) and float(exponent).is_integer() and exponent >= 0
    return monomial(int(exponent)) if whole else None


@dataclass(frozen=True)
class _Bound:
    """A function with some of its settings chosen."""

    function: Callable[..., Any]
    settings: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x, *self.settings, **self.options)
        return result
