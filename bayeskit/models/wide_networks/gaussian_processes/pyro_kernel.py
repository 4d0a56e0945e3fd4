"""A network's covariance as a kernel of ``pyro.contrib.gp``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.nn import PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.gaussian_processes.parameters import (
    Parameters,
    check_covariance,
    traced_diagonal,
    traced_matrix,
)
from bayeskit.models.wide_networks.graph import INPUT
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth
from bayeskit.models.wide_networks.layers.dense import Dense


class PyroKernel(Kernel):
    """The covariance of a network of infinite width, with variances that can be learned.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the first ones.
    tied : bool, default True
        Whether all layers share one variance of weights and one of biases, or have their own.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Of one input, ``(channels, *grid)``. Pyro's models need inputs as vectors, ``(n, features)``; with this they
        are given their shape back. By default the network takes vectors.
    active_dims : list of int, optional
        Which of the features enter; by default as many as the network takes.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, stored as logarithms, in double precision; ``()`` if tied, else ``(layers,)``. Assign a
        ``pyro.nn.PyroSample`` to give them a prior. Biases whose variance is zero at first stay without one;
        ``bias_variance`` is there only if some is left.

    Raises
    ------
    SettingsError
        If a variance of weights is zero, or tied ones are not equal at first.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> kernel = PyroKernel(network, input_shape=(2,))
    >>> kernel(torch.eye(2, dtype=torch.float64)).detach()
    tensor([[0.2500, 0.0796],
            [0.0796, 0.2500]], dtype=torch.float64)
    """

    weight_variance: Any
    bias_variance: Any

    def __init__(
        self,
        network: InfiniteWidth,
        tied: bool = True,
        covariance: str = "nngp",
        input_shape: Sequence[int] | None = None,
        active_dims: list[int] | None = None,
    ) -> None:
        self.input_shape = None if input_shape is None else torch.Size(input_shape)
        shape = self.input_shape or torch.Size((first_features(network),))
        super().__init__(shape.numel(), active_dims)
        self.parameters_of_network = Parameters(network, tied)
        self.covariance = check_covariance(covariance)
        self.weight_variance = PyroParam(self.parameters_of_network.weight, constraints.positive)
        bias = self.parameters_of_network.bias
        if bias is not None:
            self.bias_variance = PyroParam(bias, constraints.positive)

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:  # noqa: N803
        """Return covariances, ``(n, m)``, or of each input with itself, ``(n,)``.

        Parameters
        ----------
        X, Z : Tensor
            Inputs, ``(n, features)`` and ``(m, features)``; by default ``Z`` is ``X``.
        diag : bool, default False
            Whether each input is paired with itself only.
        """
        network = self.current_network(X.dtype)
        first = self._shaped(X)
        if diag:
            return traced_diagonal(network, self.covariance, first)
        second = None if Z is None or Z is X else self._shaped(Z)
        return traced_matrix(network, self.covariance, first, second)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the present variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def with_log_normal_priors(self, spread: float = 1.0) -> PyroKernel:
        """Give each variance a log-normal prior whose median is its first value, and return the kernel itself.

        Parameters
        ----------
        spread : float, default 1.0
            The standard deviation of logarithms.
        """
        first = self.parameters_of_network
        self.weight_variance = PyroSample(partial(log_normal, first.weight, spread))
        if first.bias is not None:
            self.bias_variance = PyroSample(partial(log_normal, first.bias, spread))
        return self

    def _shaped(self, x: Tensor) -> Tensor:
        found = self._slice_input(x)
        return found if self.input_shape is None else found.reshape(len(found), *self.input_shape)


def log_normal(median: Tensor, spread: float, module: object) -> Any:
    """Return a log-normal law; the last argument is the module that Pyro passes on."""
    # In the default type, as numbers written into a model would be; the kernel takes the type of its inputs.
    median = median.to(torch.get_default_dtype())
    return dist.LogNormal(median.log(), spread).to_event(median.dim())


def first_features(network: InfiniteWidth) -> int:
    """Return how many features the network takes."""
    for node in network.graph.nodes:
        if INPUT in node.inputs and isinstance(node.layer, Dense):
            return node.layer.fan_in
    raise ShapeError("the network's first layer does not tell its input's shape; pass input_shape=(channels, *grid)")
