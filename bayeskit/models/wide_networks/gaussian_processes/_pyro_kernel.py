"""Kernel of an infinitely wide network for Pyro."""

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

from bayeskit.errors import DataError, ShapeError
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks._layers import Dense, check_inputs
from bayeskit.models.wide_networks._reader import INPUT
from bayeskit.models.wide_networks.gaussian_processes._parameters import (
    Parameters,
    check_covariance,
    kernel_in_words,
    positive_number,
    traced_diagonal,
    traced_matrix,
)


class PyroKernel(Kernel):
    """Pyro kernel of an infinitely wide network, with trainable variances.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the initial values.
    tied : bool, default True
        Whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Shape of one input, ``(channels, *grid)``, for networks of images in Pyro's own models. These models pass inputs
        as vectors, ``(n, features)``, which are reshaped to it.
    active_dims : list of int, optional
        Indices of the features used; by default as many as the network takes.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, stored as logarithms, in double precision; ``()`` if tied, else ``(layers,)``. Assign a
        ``pyro.nn.PyroSample`` to give them a prior, or a number to fix them. Bias variances that are initially zero
        stay zero; without any other, there is no ``bias_variance``.

    Raises
    ------
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a weight variance is zero, or tied variances are initially not equal.
    ShapeError, DataError
        When called, if inputs do not fit the network or are not finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> kernel = PyroKernel(network)
    >>> kernel
    PyroKernel(Sequential, weight_variance=1, covariance='nngp')
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
        parameters = Parameters(network, tied)
        shape = _first_features(network) if input_shape is None else torch.Size(input_shape)
        # If the number of features is unknown, active_dims are unused: vectors are refused, images passed unchanged.
        super().__init__(
            1 if shape is None else shape.numel() if active_dims is None else len(active_dims), active_dims
        )
        self.input_shape, self._chosen = shape, active_dims is not None
        self.parameters_of_network = parameters
        self.covariance = check_covariance(covariance)
        self.weight_variance = PyroParam(self.parameters_of_network.weight, constraints.positive)
        bias = self.parameters_of_network.bias
        if bias is not None:
            self.bias_variance = PyroParam(bias, constraints.positive)

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:  # noqa: N803
        """Return the covariance matrix, ``(n, m)``, or with ``diag`` the variances of single inputs, ``(n,)``.

        Parameters
        ----------
        X, Z : Tensor
            Inputs, ``(n, features)`` and ``(m, features)``, or ``(n, channels, *grid)``; by default ``Z`` is ``X``.
        diag : bool, default False
            Whether to return variances only.
        """
        network = self.current_network(X.dtype)
        first = self.shaped(X)
        if diag:
            return traced_diagonal(network, self.covariance, first)
        second = None if Z is None or Z is X else self.shaped(Z)
        return traced_matrix(network, self.covariance, first, second)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the current variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def with_log_normal_priors(self, spread: float = 1.0) -> PyroKernel:
        """Give each variance a log-normal prior with its initial value as median, and return the kernel itself.

        Parameters
        ----------
        spread : float, default 1.0
            Standard deviation of the log variances.
        """
        first = self.parameters_of_network
        self.weight_variance = PyroSample(partial(log_normal, first.weight, spread))
        if first.bias is not None:
            self.bias_variance = PyroSample(partial(log_normal, first.bias, spread))
        return self

    def shaped(self, x: Tensor, name: str = "x") -> Tensor:
        """Return inputs in the network's shape, or raise an error if they do not fit."""
        if not isinstance(x, Tensor):
            raise DataError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dim() <= 2:
            x = self._vectors(x, name)
        elif self.input_shape is not None and x.shape[1:] != self.input_shape:
            raise ShapeError(f"inputs of {name} must be {tuple(self.input_shape)}, not {tuple(x.shape[1:])}")
        return check_inputs(x, name, self.parameters_of_network.network.graph.num_axes)

    def _vectors(self, x: Tensor, name: str) -> Tensor:
        """Return vectors in the shape of the network's inputs."""
        if self.input_shape is None:
            raise ShapeError(
                f"{name} must be images, (n, channels, ...), not {tuple(x.shape)}; for flattened images set "
                "input_shape=(channels, *grid)"
            )
        features = x.shape[1] if x.dim() == 2 else 1
        least = max(self.active_dims) + 1
        if features < least or (features > least and not self._chosen):
            raise ShapeError(
                f"{name} must have {'at least ' if self._chosen else ''}{least} features, not {features}"
                + ("; active_dims selects features" if features > least else "")
            )
        return self._slice_input(x).reshape(len(x), *self.input_shape)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a variance may be given a prior, or a number that fixes it."""
        if name in ("weight_variance", "bias_variance"):
            value = positive_number(name, value)
            if isinstance(value, Tensor):
                first = getattr(self.parameters_of_network, name.removesuffix("_variance"))
                if first is None or value.dim() and value.shape != first.shape:
                    wanted = (
                        "be absent for a network without biases"
                        if first is None
                        else f"have shape {tuple(first.shape)}"
                    )
                    raise ShapeError(f"{name} must {wanted}, not {tuple(value.shape)}")
                value = value.expand(first.shape)
                if name in self._pyro_samples:
                    delattr(self, name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return kernel_in_words(self)


def log_normal(median: Tensor, spread: float, module: object) -> Any:
    """Return a log-normal distribution; Pyro passes the module as the last argument."""
    # Priors have torch's default dtype, like numbers in a model; the kernel uses the dtype of its inputs.
    median = median.to(torch.get_default_dtype())
    return dist.LogNormal(median.log(), spread).to_event(median.dim())


def _first_features(network: InfiniteWidth) -> torch.Size | None:
    """Return the shape of the network's inputs if they are vectors whose length its layers determine."""
    for node in network.graph.nodes:
        if INPUT in node.inputs and isinstance(node.layer, Dense):
            return torch.Size((node.layer.fan_in,))
    return None
