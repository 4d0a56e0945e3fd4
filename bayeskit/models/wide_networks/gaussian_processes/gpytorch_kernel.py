"""A network's covariance as a kernel of GPyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import MissingPackageError, ShapeError
from bayeskit.models.wide_networks.gaussian_processes.models import kernel_in_words
from bayeskit.models.wide_networks.gaussian_processes.parameters import (
    Parameters,
    check_covariance,
    diagonal,
    matrix,
)
from bayeskit.models.wide_networks.kernels import InfiniteWidth

__all__ = ["CHUNK", "GPyTorchKernel"]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, once, while it is imported
        from gpytorch.constraints import Positive
        from gpytorch.kernels import Kernel
except ImportError as error:
    raise MissingPackageError(
        "kernels for GPyTorch and large_regression need gpytorch, which is not installed; install it with "
        "pip install 'bayeskit[gaussian_processes]' or pip install gpytorch"
    ) from error

CHUNK = 32  # pairs of inputs whose small square of covariances is computed for its diagonal


class GPyTorchKernel(Kernel):
    """The covariance of a network of infinite width, with variances that can be learned.

    GPyTorch copies inputs on the way, so that two sets with the same numbers are taken for one: with ``Dropout``,
    their covariance is that of one forward pass with itself.

    Parameters
    ----------
    network : InfiniteWidth
        Its variances are the first ones.
    tied : bool, default True
        Whether all layers share one variance of weights and one of biases, or have their own.
    covariance : {"nngp", "ntk"}, default "nngp"
    input_shape : sequence of int, optional
        Of one input, ``(channels, *grid)``. GPyTorch's models need inputs as vectors, ``(n, features)``; with this
        they are given their shape back.

    Attributes
    ----------
    weight_variance, bias_variance : Tensor
        Positive, in double precision; ``()`` if tied, else ``(layers,)``. Their logarithms are the parameters
        ``raw_weight_variance`` and ``raw_bias_variance``. Biases whose variance is zero at first stay without one;
        ``bias_variance`` is there only if some is left.

    Raises
    ------
    MissingPackageError
        On import, if GPyTorch is not installed.
    ModelError
        If the network is a torch module, or its output is not normal.
    SettingsError
        If a variance of weights is zero, or tied ones are not equal at first.

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
        """Of all layers, ``()`` or ``(layers,)``."""
        return self.raw_weight_variance_constraint.transform(self.raw_weight_variance)

    @property
    def bias_variance(self) -> Tensor:
        """Of all layers that have a bias, ``()`` or ``(layers,)``."""
        return self.raw_bias_variance_constraint.transform(self.raw_bias_variance)

    def current_network(self, dtype: torch.dtype = torch.float64) -> InfiniteWidth:
        """Return the network with the present variances."""
        bias = self.bias_variance.to(dtype) if self.parameters_of_network.bias is not None else None
        return self.parameters_of_network.at(self.weight_variance.to(dtype), bias)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """Return covariances, ``(*batch, n, m)``, or of pairs one by one, ``(*batch, n)``."""
        if last_dim_is_batch:
            raise ShapeError("a network takes all features at once; last_dim_is_batch has no meaning for its kernel")
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
        x2 = self._shaped(x2)
        if not diag:
            return matrix(network, self.covariance, x1, x2)
        parts = zip(x1.split(CHUNK), x2.split(CHUNK), strict=True)
        return torch.cat([matrix(network, self.covariance, a, b).diagonal() for a, b in parts])

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
        # GPyTorch's own choice is the softplus; logarithms make steps relative.
        self.register_constraint(f"raw_{name}", Positive(transform=torch.exp, inv_transform=torch.log))
