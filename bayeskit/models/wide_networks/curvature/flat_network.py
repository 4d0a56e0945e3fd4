"""A network as a function of the vector of its parameters, and that function's derivatives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bayeskit.errors import DataError, ModelError, ShapeError
from bayeskit.models.wide_networks.empirical.plan import make_plan
from bayeskit.models.wide_networks.empirical.recording import plain_attention
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
        A copy.
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
        """Return gradients of single inputs' outputs weighted by columns, ``(n, k, r)``, as ``(n, r, p)``.

        Raises
        ------
        ModelError
            If they do not add up to the gradient at all inputs.
        """
        weights = torch.arange(1.0, len(x) * cotangents.shape[2] + 1, dtype=torch.float64).cos().to(cotangents)
        weights = weights.view(len(x), -1)
        total = self.pull(x, torch.einsum("nkr,nr->nk", cotangents, weights))
        found = self._batched(x, cotangents)
        if found is None or not _add_up(found, weights, total):
            found = torch.stack([self._pull_one(row, c) for row, c in zip(x.split(1), cotangents, strict=True)])
            if not _add_up(found, weights, total):
                raise ModelError(
                    "gradients at single inputs do not add up to those of all of them, so that outputs at one input "
                    "depend on others; let the module's first dimension be that of inputs"
                )
        return found

    def _batched(self, x: Tensor, cotangents: Tensor) -> Tensor | None:
        """Return gradients of all inputs at once, None where torch cannot batch a function of the module."""

        def one(row: Tensor, columns: Tensor) -> Tensor:
            back = vjp(lambda vector: self._call(vector, row.unsqueeze(0)).squeeze(0), self.vector)[1]
            return torch.vmap(lambda column: back(column)[0], in_dims=1)(columns)

        try:
            return torch.vmap(one)(x, cotangents).detach()
        except (RuntimeError, ValueError, UserWarning):
            return None

    def _pull_one(self, row: Tensor, columns: Tensor) -> Tensor:
        """Return gradients of one input's outputs, ``(1, ...)``, weighted by columns, ``(k, r)``, as ``(r, p)``."""
        back = vjp(lambda vector: self._call(vector, row), self.vector)[1]
        return torch.stack([back(column[None])[0] for column in columns.mT]).detach()

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Return the derivative of outputs along a vector of parameters, ``(n, k)``.

        It is the transpose of :meth:`pull`: where torch's forward mode is not, or does not exist, it is a gradient of
        gradients, which is linear in the weights of outputs.
        """
        if self._has_plain_forward_mode:
            try:
                result: Tensor = along(lambda vector: self._call(vector, x), self.vector, tangent)[1]
                return result
            except (RuntimeError, NotImplementedError):  # a function of the module has no forward mode
                pass
        outputs, back = vjp(lambda vector: self._call(vector, x), self.vector)[:2]
        try:
            return vjp(lambda weights: back(weights)[0], torch.zeros_like(outputs))[1](tangent)[0]
        except (RuntimeError, NotImplementedError):  # the gradient of a function of the module has none
            identity = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
            return torch.cat([(self._pull_one(row, identity) @ tangent)[None] for row in x.split(1)])

    @property
    def _has_plain_forward_mode(self) -> bool:
        """Whether no embedding has rows that get no gradient, or less of it, of which forward mode knows nothing."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        embeddings = [m for m in self.module.modules() if isinstance(m, kinds)]
        return all(m.padding_idx is None and not m.scale_grad_by_freq for m in embeddings)

    def pull(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient of outputs weighted by ``(n, k)`` numbers, ``(p,)``."""
        return vjp(lambda vector: self._call(vector, x), self.vector)[1](cotangent)[0]

    def _call(self, vector: Tensor, x: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        named = {name: piece.reshape(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        constants = {name: value.clone() for name, value in self.constants.items()}  # which the module may change
        with plain_attention():
            result: Any = functional_call(self.module, {**named, **constants}, (x,))
        if not isinstance(result, Tensor) or result.dim() not in (1, 2) or len(result) != len(x):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ShapeError(f"the module must return one row of outputs an input, ({len(x)}, k), not {found}")
        return result.unsqueeze(1) if result.dim() == 1 else result


def flat_network(module: nn.Module) -> FlatNetwork:
    """Take a module at its present parameters.

    Raises
    ------
    ModelError
        If it has no parameters that require gradients, they differ in dtype or device, its outputs are random or
        depend on other inputs of a batch, or it cannot be copied.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"a curvature is of a torch.nn.Module, not a {type(module).__name__}")
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
    try:
        module = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the module cannot be copied: {error}; let it hold no tensors with a graph, which detach() takes away"
        ) from error
    return FlatNetwork(module, vector, {name: p.shape for name, p in learned.items()}, fixed)


def check_data(network: FlatNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and the network's outputs there, or say what is wrong with them.

    Raises
    ------
    DataError, ShapeError
        If inputs or outputs are not finite, or do not fit.
    ModelError
        If outputs at one input depend on others, or on chance.
    """
    if not isinstance(x, Tensor) or x.dim() < 1 or not len(x):
        raise ShapeError(f"x must be a tensor of at least one input, (n, ...), not {getattr(x, 'shape', type(x))}")
    if x.is_floating_point() and x.dtype != network.vector.dtype:
        raise DataError(f"x is {x.dtype} but the parameters are {network.vector.dtype}; convert one of them")
    if x.device != network.vector.device:
        raise DataError(f"x is on {x.device} but the parameters are on {network.vector.device}; move one of them")
    x = x.detach()
    check_finite(x, "x")
    make_plan(network.module, x)
    outputs = network.outputs(x)
    check_finite(outputs, "the network's output")
    return x, outputs


def _add_up(rows: Tensor, weights: Tensor, total: Tensor) -> bool:
    """Whether gradients, ``(n, r, p)``, weighted by ``(n, r)``, are in all those of all inputs, ``(p,)``."""
    largest = max(float(rows.abs().max()), float(total.abs().max()))
    wrong = float((torch.tensordot(weights, rows, 2) - total).abs().max())
    return wrong <= torch.finfo(rows.dtype).eps ** 0.5 * largest * weights.numel() ** 0.5


def row_blocks(num_rows: int, length: int) -> Iterator[slice]:
    """Yield consecutive blocks of rows."""
    for first in range(0, num_rows, length):
        yield slice(first, min(first + length, num_rows))
