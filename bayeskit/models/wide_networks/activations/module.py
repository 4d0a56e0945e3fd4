"""An activation as a torch module, so that it can stand in a network."""

from __future__ import annotations

from torch import Tensor, nn

from bayeskit.models.wide_networks.activations.activation import Activation
from bayeskit.models.wide_networks.activations.quadrature import Quadrature


class Elementwise(nn.Module):
    """An activation, or any elementwise function, as a module.

    Parameters
    ----------
    activation : Activation or callable
        A function without a closed form goes by quadrature.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 8), Elementwise(torch.tanh), nn.Linear(8, 1))
    """

    def __init__(self, activation: object):
        super().__init__()
        self.activation = activation if isinstance(activation, Activation) else Quadrature(activation)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.activation(x)
