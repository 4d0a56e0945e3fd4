"""One forward pass, two objectives: weigh the gradient that reaches the guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Gate:
    """A factor by which gradients are multiplied on their way to the guide's parameters.

    The loss is built first and the factor set before its backward pass, so that the factor may depend on
    everything the forward pass found. The model's parameters do not notice.

    Examples
    --------
    >>> import torch
    >>> gate, x = Gate(), torch.tensor([1.0, 2.0], requires_grad=True)
    >>> y = gate(x).square().sum()
    >>> gate.factor = torch.tensor([3.0, -1.0])
    >>> y.backward()
    >>> x.grad
    tensor([ 6., -4.])
    """

    def __init__(self) -> None:
        self._factor: Tensor | None = None
        self.parts: list[tuple[Gate, int]] = []

    @property
    def factor(self) -> Tensor | None:
        """The factor, ``(K, *batch)``; setting it also sets those of the ``parts`` that chunks of particles passed."""
        return self._factor

    @factor.setter
    def factor(self, value: Tensor) -> None:
        self._factor = value
        start = 0
        for part, size in self.parts:
            part.factor = value[start : start + size]
            start += size

    def __call__(self, value: Tensor, shape: Callable[[], tuple[int, ...]] | None = None) -> Tensor:
        """Return ``value``; its gradient will be multiplied by the factor, viewed in ``shape()``."""
        return _Gated.apply(value, self, shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, gate: Gate, shape: Callable[[], tuple[int, ...]] | None) -> Tensor:  # type: ignore[override]
        context.gate, context.shape = gate, shape
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        factor = context.gate.factor
        if factor is None:
            raise RuntimeError("the factor of a gate must be set before the backward pass")
        return gradient * (factor if context.shape is None else factor.reshape(context.shape())), None, None
