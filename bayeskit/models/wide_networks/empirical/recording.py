"""One run of a module, during which hooks note what enters its layers and where their outputs lie in the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayeskit.errors import BayeskitError, ModelError, ShapeError


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes
    ----------
    layer : torch.nn.Module
    entered : Tensor
    left : GradientEdge
        Where its output lies in the graph, even if it is changed in place afterwards.
    version : int
        How often what entered had been changed in place.
    size : int
        How many numbers left the layer.
    """

    layer: nn.Module
    entered: Tensor
    left: GradientEdge
    version: int
    size: int


@dataclass
class Recording:
    """What a run has left behind.

    Attributes
    ----------
    outputs : Tensor
        ``(n, k)``, with its graph.
    calls : list of Call
        Of layers that were watched.
    opaque : set of torch.nn.Module
        Layers called in a way that could not be noted.
    """

    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[Call] = field(default_factory=list)
    opaque: set[nn.Module] = field(default_factory=set)

    def note(self, expected: Mapping[str, Tensor], layer: nn.Module, entered: tuple[Any, ...], left: Any) -> None:
        """Note a call; a hook."""
        known = len(entered) == 1 and isinstance(entered[0], Tensor) and isinstance(left, Tensor)
        if not known or any(layer._parameters.get(name) is not x for name, x in expected.items()):
            self.opaque.add(layer)
        elif left.requires_grad:
            self.calls.append(
                Call(layer, entered[0].detach(), get_gradient_edge(left), entered[0]._version, left.numel())
            )

    def unchanged(self) -> None:
        """Refuse layers whose inputs were changed in place later."""
        for call in self.calls:
            if call.entered._version != call.version:
                raise ModelError(
                    f"what enters a {type(call.layer).__name__} is changed in place later, so that gradients with "
                    "respect to its weights are lost; write x = x + h instead of x += h"
                )

    def gradients(self, extra: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """Return gradients of each output at all calls, ``(k, n, ...)``, None where there are none."""
        n, k = self.outputs.shape
        edges: list[Any] = [*(call.left for call in self.calls), *extra]
        if not edges or not self.outputs.requires_grad:
            return [None] * len(edges)
        units = torch.eye(k, dtype=self.outputs.dtype, device=self.outputs.device)[:, None].expand(k, n, k)
        graph: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        try:
            return list(torch.autograd.grad(self.outputs, edges, units, is_grads_batched=True, **graph))
        except (RuntimeError, UserWarning):  # a function of the module cannot be batched
            parts = [torch.autograd.grad(self.outputs, edges, unit, **graph) for unit in units]
            return [None if x[0] is None else torch.stack(list(x)) for x in zip(*parts, strict=True)]


def record(module: nn.Module, layers: Sequence[nn.Module], x: Tensor) -> Recording:
    """Run a module with hooks on some of its layers.

    Parameters
    ----------
    module : torch.nn.Module
        Left as it is, buffers included.
    layers : sequence of torch.nn.Module
        The layers to watch.
    x : Tensor
        Inputs, ``(n, ...)``.

    Returns
    -------
    Recording

    Raises
    ------
    ShapeError
        If the module does not take ``x``, or does not return one row an input.
    """
    result = Recording()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for layer in layers:
            expected = {name: p for name, p in layer._parameters.items() if p is not None}
            handle = layer.register_forward_hook(partial(result.note, expected), prepend=True)
            stack.callback(handle.remove)
        try:
            result.outputs = run(module, {}, x)
        except BayeskitError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ShapeError(f"the module cannot be applied to inputs of shape {tuple(x.shape)}: {error}") from error
    return result


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let torch compute attention from functions that it can differentiate twice, along vectors, and in batches."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def run(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return a module's outputs, ``(n, k)``, with some of its parameters replaced, and copies of its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = x.clone()  # which the module may change in place
    with plain_attention():
        y = functional_call(module, {**parameters, **buffers}, (x,)) if parameters or buffers else module(x)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise ModelError(f"the module must return a real tensor, not {getattr(y, 'dtype', type(y).__name__)}")
    if not y.dim() or len(y) != len(x):
        raise ShapeError(f"the module must return one row an input, not {tuple(y.shape)} for {len(x)} inputs")
    return y.reshape(len(y), -1)
