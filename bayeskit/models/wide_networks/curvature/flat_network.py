"""A network as a function of the vector of its parameters, and that function's derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bayeskit.errors import DataError, ModelError, ShapeError
from bayeskit.models.wide_networks.forward_mode import along
from bayeskit.models.wide_networks.inputs import check_finite

BLOCK_SIZE = 1 << 22  # numbers of Jacobians or of curvatures in outputs held at once
PRODUCT_ROWS = 512  # inputs whose activations are held at once


@dataclass(frozen=True)
class FlatNetwork:
    """A module at some parameters; later changes of the module do not reach it.

    Attributes
    ----------
    module : torch.nn.Module
    vector : Tensor
        Parameters that require gradients, flat, in the module's own order, ``(p,)``.
    shapes : dict
        Of these parameters, by name.
    constants : dict
        Buffers and parameters that require no gradients.
    """

    module: nn.Module
    vector: Tensor
    shapes: dict[str, torch.Size]
    constants: dict[str, Tensor]

    @property
    def num_parameters(self) -> int:
        """How many numbers can be learned."""
        return len(self.vector)

    def at(self, vector: Tensor) -> FlatNetwork:
        """Return the same network at other parameters, ``(p,)``."""
        return replace(self, vector=vector)

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs, ``(n, k)``."""
        with torch.no_grad():
            return torch.cat([self._call(self.vector, x[rows]) for rows in row_blocks(len(x), PRODUCT_ROWS)])

    def jacobian(self, x: Tensor) -> Tensor:
        """Return derivatives of outputs, all at once, ``(n, k, p)``."""
        num_outputs = self.outputs(x[:1]).shape[1]
        identity = torch.eye(num_outputs, dtype=self.vector.dtype, device=self.vector.device)
        return self.pull_each(x, identity.expand(len(x), -1, -1))

    def pull_each(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """Return gradients of single inputs' outputs weighted by columns, ``(n, k, r)``, as ``(n, r, p)``."""

        def one(row: Tensor, columns: Tensor) -> Tensor:
            back = vjp(lambda vector: self._call(vector, row.unsqueeze(0)).squeeze(0), self.vector)[1]
            return torch.vmap(lambda column: back(column)[0], in_dims=1)(columns)

        return torch.vmap(one)(x, cotangents).detach()

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Return the derivative of outputs along a vector of parameters, ``(n, k)``."""
        return along(lambda vector: self._call(vector, x), self.vector, tangent)[1]  # type: ignore[no-any-return]

    def pull(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient of outputs weighted by ``(n, k)`` numbers, ``(p,)``."""
        return vjp(lambda vector: self._call(vector, x), self.vector)[1](cotangent)[0]

    def _call(self, vector: Tensor, x: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        named = {name: piece.reshape(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        result: Any = functional_call(self.module, {**named, **self.constants}, (x,))
        if not isinstance(result, Tensor) or result.dim() not in (1, 2) or len(result) != len(x):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ShapeError(f"the module must return one row of outputs an input, ({len(x)}, k), not {found}")
        return result.unsqueeze(1) if result.dim() == 1 else result


def flat_network(module: nn.Module) -> FlatNetwork:
    """Take a module at its present parameters.

    Raises
    ------
    ModelError
        If it has no parameters that require gradients, they differ in dtype or device, or its outputs are random or
        depend on other inputs of a batch.
    """
    for name, layer in module.named_modules():
        if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) is in training mode, where outputs are random or depend on "
                "the other inputs; call module.eval() first"
            )
    learned = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if not learned:
        raise ModelError("the module has no parameters that require gradients")
    kinds = {(p.dtype, p.device) for p in learned.values()}
    if len(kinds) > 1:
        raise ModelError(f"parameters must have one dtype and device, not {sorted(map(str, kinds))}")
    fixed = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    fixed |= {name: b.detach().clone() for name, b in module.named_buffers()}
    vector = torch.cat([p.reshape(-1) for p in learned.values()])
    return FlatNetwork(module, vector, {name: p.shape for name, p in learned.items()}, fixed)


def check_data(network: FlatNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and the network's outputs there, or say what is wrong with them.

    Raises
    ------
    DataError, ShapeError
    """
    if not isinstance(x, Tensor) or x.dim() < 1 or not len(x):
        raise ShapeError(f"x must be a tensor of at least one input, (n, ...), not {getattr(x, 'shape', type(x))}")
    if x.is_floating_point() and x.dtype != network.vector.dtype:
        raise DataError(f"x is {x.dtype} but the parameters are {network.vector.dtype}; convert one of them")
    if x.device != network.vector.device:
        raise DataError(f"x is on {x.device} but the parameters are on {network.vector.device}; move one of them")
    x = x.detach()
    check_finite(x, "x")
    outputs = network.outputs(x)
    check_finite(outputs, "the network's output")
    return x, outputs


def row_blocks(num_rows: int, length: int) -> Iterator[slice]:
    """Yield consecutive blocks of rows."""
    for first in range(0, num_rows, length):
        yield slice(first, min(first + length, num_rows))
