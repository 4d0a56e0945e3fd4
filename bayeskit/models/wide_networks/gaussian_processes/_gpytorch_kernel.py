"""Kernel of an infinitely wide network for GPyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import MissingPackageError, ShapeError
from bayeskit.models.wide_networks._kernels import InfiniteWidth
from bayeskit.models.wide_networks.gaussian_processes._parameters import (
    Parameters,
    check_covariance,
    diagonal,
    kernel_in_words,
    matrix,
)
from bayeskit.models.wide_networks.gaussian_processes._wide_kernels import kernel_diagonal

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from torch.jit.script, on import
        from gpytorch.constraints import Positive
        from gpytorch.kernels import Kernel
except ImportError as error:
    raise MissingPackageError(
        "kernels for GPyTorch and large_regression need gpytorch, which is not installed; install it with "
        "pip install 'bayeskit[gaussian_processes]' or pip install gpytorch"
    ) from error


class GPyTorchKernel(Kernel):
    """GPyTorch kernel of an infinitely wide network, with trainable variances.

    GPyTorch copies inputs, so two sets with equal values are treated as the same set. With ``Dropout`` their covariance
    is then that of a single forward pass.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the initial values.
    tied : bool, default True
        Whether all layers share one weight variance and one bias variance.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Shape of one input, ``(channels, *grid)``. GPyTorch passes inputs as vectors, ``(n, features)``, which are
        reshaped to it.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, in double precision; ``()`` if tied, else ``(layers,)``. Their logarithms are the parameters
        ``raw_weight_variance`` and ``raw_bias_variance``. Bias variances that are initially zero stay zero; without
        any other, there is no ``bias_variance``.

    Raises
    ------
    MissingPackageError
        On import, if GPyTorch is not installed.
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a weight variance is zero, or tied variances are initially not equal.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> network = infinite_width(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> GPyTorchKernel(network)(torch.eye(2, dtype=torch.float64)).to_dense().detach()
    tensor([[0.2500, 0.0796],
            [0.0796, 0.2500]], dtype=torch.float64)
    """

    has_lengthscale = False

    def __init__(
        self,
        network: InfiniteWidth,
        tied: bool = True,
        covariance: str = "nngp",
        input_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.parameters_of_network = Parameters(network, tied)
        self.covariance = check_covariance(covariance)
        self.input_shape = None if input_shape is None else torch.Size(input_shape)
        self._register("weight_variance", self.parameters_of_network.weight)
        bias = self.parameters_of_network.bias
        if bias is not None:
            self._register("bias_variance", bias)

    @property
    def weight_variance(self) -> Tensor:
        """Weight variance of all layers, ``()`` or ``(layers,)``."""
        return self.raw_weight_variance_constraint.transform(self.raw_weight_variance)

    @property
    def bias_variance(self) -> Tensor:
        """Bias variance of all layers that have a bias, ``()`` or ``(layers,)``."""
        return self.raw_bias_variance_constraint.transform(self.raw_bias_variance)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the current variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """Return the covariance matrix, ``(*batch, n, m)``, or with ``diag`` its diagonal, ``(*batch, n)``."""
        if last_dim_is_batch:
            raise ShapeError("last_dim_is_batch is not supported, because a network takes all features at once")
        network = self.current_network(x1.dtype)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        first, second = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (x1, x2))
        same = x1.shape == x2.shape and torch.equal(x1, x2)
        found = [self._one(network, a, None if same else b, diag) for a, b in zip(first, second, strict=True)]
        return torch.stack(found).reshape(*batch, *found[0].shape)

    def _one(self, network: InfiniteWidth, x1: Tensor, x2: Tensor | None, diag: bool) -> Tensor:
        x1 = self._shaped(x1)
        if x2 is None:
            return diagonal(network, self.covariance, x1) if diag else matrix(network, self.covariance, x1)
        kernel = partial(matrix, network, self.covariance)
        return kernel_diagonal(kernel, x1, self._shaped(x2)) if diag else kernel(x1, self._shaped(x2))

    def _shaped(self, x: Tensor) -> Tensor:
        if self.input_shape is None:
            return x
        if x.shape[1] != self.input_shape.numel():
            raise ShapeError(f"inputs must have {self.input_shape.numel()} features, not {x.shape[1]}")
        return x.reshape(len(x), *self.input_shape)

    def __repr__(self) -> str:
        return kernel_in_words(self)

    def _register(self, name: str, value: Tensor) -> None:
        self.register_parameter(f"raw_{name}", torch.nn.Parameter(value.log()))
        # GPyTorch's default is the softplus; with logarithms, optimiser steps are relative.
        self.register_constraint(f"raw_{name}", Positive(transform=torch.exp, inv_transform=torch.log))
