"""A network as a function of the vector of its parameters, with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import vjp

from bayeskit._core.module_functions import along, functional_outputs
from bayeskit.errors import ModelError

PRODUCT_ROWS = 512  # largest number of inputs whose activations are held at once


@dataclass(frozen=True)
class FlatNetwork:
    """Outputs of a module, flattened to ``(n, k)``, as a function of the vector of some of its parameters."""

    module: nn.Module
    vector: Tensor  # the parameters in the module's order, (p,)
    parameters: dict[str, Tensor]  # whose shapes and dtypes the entries of the vector take

    @property
    def num_parameters(self) -> int:
        """Number of entries of the vector, ``p``."""
        return len(self.vector)

    def at(self, vector: Tensor) -> FlatNetwork:
        """Return the network with parameters ``vector``, ``(p,)``."""
        return replace(self, vector=vector)

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs, ``(n, k)``."""
        with torch.no_grad():
            return torch.cat([self._call(self.vector, x[rows]) for rows in row_blocks(len(x), PRODUCT_ROWS)])

    def jacobian(self, x: Tensor) -> Tensor:
        """Return the Jacobian of outputs with respect to parameters, ``(n, k, p)``."""
        num_outputs = self.outputs(x[:1]).shape[1]
        identity = torch.eye(num_outputs, dtype=self.vector.dtype, device=self.vector.device)
        return self.pull_each(x, identity.expand(len(x), -1, -1))

    def pull_each(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """Return per-input products ``J_i^T C_i`` with cotangents ``C``, ``(n, k, r)``, as ``(n, r, p)``.

        Raises
        ------
        ModelError
            If their sum over inputs is not the gradient at all inputs.
        """
        weights = torch.arange(1.0, len(x) * cotangents.shape[2] + 1, dtype=torch.float64).cos().to(cotangents)
        weights = weights.view(len(x), -1)
        total = self.pull(x, torch.einsum("nkr,nr->nk", cotangents, weights))
        found = self._batched(x, cotangents)
        if found is None or not _add_up(found, weights, total):
            rows = zip(x.split(1), cotangents.mT.unsqueeze(2), strict=True)
            found = torch.stack([self._gradients(row, columns) for row, columns in rows])
            if not _add_up(found, weights, total):
                raise ModelError(
                    "gradients at single inputs do not add up to the gradient at all inputs, because outputs at one "
                    "input depend on other inputs; let each row of outputs depend only on the same row of inputs"
                )
        return found

    def _batched(self, x: Tensor, cotangents: Tensor) -> Tensor | None:
        """Return the gradients at all inputs, or None if torch cannot batch a function of the module."""

        def one(row: Tensor, columns: Tensor) -> Tensor:
            back = vjp(lambda vector: self._call(vector, row.unsqueeze(0)).squeeze(0), self.vector)[1]
            return torch.vmap(lambda column: back(column)[0], in_dims=1)(columns)

        try:
            return torch.vmap(one)(x, cotangents).detach()
        except (RuntimeError, ValueError, UserWarning):
            return None

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Return the derivative of outputs along a parameter vector, ``(n, k)``.

        This is the transpose of :meth:`pull`. If torch's forward mode is missing or is not the transpose, reverse mode
        is applied twice.
        """
        if self._has_plain_forward_mode:
            try:
                result: Tensor = along(lambda vector: self._call(vector, x), self.vector, tangent)[1]
                return result.detach()
            except (RuntimeError, NotImplementedError):  # a function of the module has no forward mode
                pass
        vector = self.vector.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._call(vector, x)
            weights = torch.zeros_like(outputs, requires_grad=True)
            try:
                (gradient,) = torch.autograd.grad(outputs, vector, weights, create_graph=True, materialize_grads=True)
                # The gradient is linear in the weights, of which it may be independent.
                return torch.autograd.grad((gradient * tangent).sum() + 0 * weights.sum(), weights)[0].detach()
            except (RuntimeError, NotImplementedError):  # the gradient of a function of the module has none
                columns = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).unsqueeze(1)
                return torch.stack([self._gradients(row, columns) @ tangent for row in x.split(1)])

    @property
    def _has_plain_forward_mode(self) -> bool:
        """Whether no embedding has a padding row or scales gradients by frequency; forward mode ignores both."""
        embeddings = [m for m in self.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        return all(m.padding_idx is None and not m.scale_grad_by_freq for m in embeddings)

    def pull(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient of outputs weighted by ``cotangent``, ``(n, k)``, as ``(p,)``."""
        try:
            return vjp(lambda vector: self._call(vector, x), self.vector)[1](cotangent)[0].detach()
        except RuntimeError:  # torch cannot transform a function of the module
            return self._gradients(x, cotangent.unsqueeze(0))[0]

    def _gradients(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """Return gradients of outputs weighted by each of the cotangents, ``(r, n, k)``, one by one, as ``(r, p)``."""
        vector = self.vector.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._call(vector, x)
            if not outputs.requires_grad:
                return vector.new_zeros(len(cotangents), len(vector))
            found = [torch.autograd.grad(outputs, vector, c, True, materialize_grads=True)[0] for c in cotangents]
        return torch.stack(found)

    def _call(self, vector: Tensor, x: Tensor) -> Tensor:
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        parts = zip(self.parameters.items(), pieces, strict=True)
        named = {name: piece.reshape(p.shape).to(p.dtype) for (name, p), piece in parts}
        return functional_outputs(self.module, named, x)


def flattened(module: nn.Module, names: Collection[str] | None = None) -> FlatNetwork:
    """Return a module as a function of its parameters ``names``, by default all that require gradients, uncopied."""
    chosen = {
        name: p.detach()
        for name, p in module.named_parameters()
        if (p.requires_grad if names is None else name in names)
    }
    return FlatNetwork(module=module, vector=torch.cat([p.reshape(-1) for p in chosen.values()]), parameters=chosen)


def flat_copy(module: nn.Module) -> FlatNetwork:
    """Return a copy of a module, without effect of later changes, as a function of the parameters that it trains.

    No such parameters, mixed dtypes or devices, and BatchNorm or dropout in training mode raise ``ModelError``.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"the module must be a torch.nn.Module, not {type(module).__name__}")
    for name, layer in module.named_modules():
        if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) is in training mode, where outputs are random or depend on "
                "the other inputs; call module.eval() first"
            )
    kinds = {(p.dtype, p.device) for p in module.parameters() if p.requires_grad}
    if not kinds:
        raise ModelError("the module has no parameters that require gradients")
    if len(kinds) > 1:
        raise ModelError(f"parameters must have one dtype and device, not {sorted(map(str, kinds))}")
    try:
        return flattened(copy.deepcopy(module))
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the module cannot be copied: {error}; apply detach() to stored tensors that have an autograd graph"
        ) from error


def _add_up(rows: Tensor, weights: Tensor, total: Tensor) -> bool:
    """Whether gradients ``(n, r, p)``, weighted by ``(n, r)``, sum to the gradient at all inputs, ``(p,)``."""
    largest = max(float(rows.abs().max()), float(total.abs().max()))
    wrong = float((torch.tensordot(weights, rows, 2) - total).abs().max())
    return wrong <= torch.finfo(rows.dtype).eps ** 0.5 * largest * weights.numel() ** 0.5


def row_blocks(num_rows: int, length: int) -> Iterator[slice]:
    """Yield consecutive blocks of rows."""
    for first in range(0, num_rows, length):
        yield slice(first, min(first + length, num_rows))
