"""Torch modules as functions: with other parameters, their derivatives, and a trial that refuses what has none."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayeskit._core.torch_internals import is_batched, is_wrapped, without_transform
from bayeskit.errors import BayeskitError, DataError, ModelError, ShapeError

# Modules with other parameters, and derivatives along vectors, torch's forward mode.

_Arguments = TypeVar("_Arguments", Tensor, dict[str, Tensor])


def along(function: Callable[[_Arguments], Tensor], at: _Arguments, change: _Arguments) -> Any:
    """Return a function's value and its derivative along ``change``."""
    _load()
    return jvp(function, (at,), (change,))


@functools.cache
def _load() -> None:
    """Trigger torch's lazy imports for forward mode once, without its deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Any:
    """Return a module's result with some parameters and buffers replaced, by name; the module keeps its own."""
    # torch puts tensors back under each name in turn, which leaves a replacement in a layer that has two names.
    held: list[dict[str, Any]] = [each for m in module.modules() for each in (m._parameters, m._buffers)]
    kept = [dict(each) for each in held]
    replaced = {id(x) for x in tensors.values()}
    try:
        return functional_call(module, dict(tensors), (x,))
    finally:
        for now, before in zip(held, kept, strict=True):
            now.update({name: x for name, x in before.items() if id(now.get(name)) in replaced})


@contextmanager
def plain_attention() -> Iterator[None]:
    """Context: compute attention by torch functions that support double, forward-mode and batched differentiation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def functional_result(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return a module's result, ``(n, ...)``, with some of its parameters replaced, and copies of its buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = x.clone()  # the module may change it in place
    with plain_attention():
        y = call_with(module, {**parameters, **buffers}, x) if parameters or buffers else module(x)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise ModelError(f"the module must return a real tensor, not {getattr(y, 'dtype', type(y).__name__)}")
    if not y.dim() or len(y) != len(x):
        raise ShapeError(f"the module must return one row per input, not {tuple(y.shape)} for {len(x)} inputs")
    return y


def functional_outputs(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return :func:`functional_result` flattened to ``(n, k)``."""
    y = functional_result(module, parameters, x)
    return y.reshape(len(y), -1)


# One run of a module, during which hooks record its layers' inputs and the graph nodes of their outputs.


@dataclass(frozen=True)
class _Call:
    """One call of a layer."""

    layer: nn.Module
    entered: Tensor  # the layer's input, detached
    left: GradientEdge  # of the output, which stays valid if the output is changed in place
    version: int  # of the input: the number of in-place changes before the call
    size: int  # number of entries of the output


@dataclass
class Recording:
    """One run of a module: its outputs, and the calls of its watched layers."""

    layers: Sequence[nn.Module]  # those that are watched
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))  # (n, k), with its graph
    calls: list[_Call] = field(default_factory=list)
    opaque: set[nn.Module] = field(default_factory=set)  # layers with a call that could not be recorded
    nodes: set[Node] = field(default_factory=set)  # of the outputs' graph
    uses: Counter[int] = field(default_factory=Counter)  # of each parameter in this graph, by its id
    mixed: set[nn.Module] = field(default_factory=set)  # layers whose first dimension is not the input

    def note(self, expected: Mapping[str, Tensor], layer: nn.Module, entered: tuple[Any, ...], left: Any) -> None:
        """Record a call; this is a forward hook."""
        known = len(entered) == 1 and isinstance(entered[0], Tensor) and isinstance(left, Tensor)
        if not known or any(layer._parameters.get(name) is not x for name, x in expected.items()):
            self.opaque.add(layer)
        elif left.requires_grad:
            self.calls.append(
                _Call(layer, entered[0].detach(), get_gradient_edge(left), entered[0]._version, left.numel())
            )

    def unchanged(self) -> None:
        """Raise a ``ModelError`` if the input of a layer was changed in place later."""
        for call in self.calls:
            if call.entered._version != call.version:
                raise ModelError(
                    f"the input of a {type(call.layer).__name__} layer is changed in place later, so gradients with "
                    "respect to its weights are lost; write x = x + h instead of x += h"
                )

    def gradients(self, extra: Sequence[Tensor] = ()) -> list[Tensor | None]:
        """Return gradients of each output at all calls, ``(k, n, ...)``; None for calls without effect."""
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


def record_calls(module: nn.Module, layers: Sequence[nn.Module], x: Tensor) -> Recording:
    """Run a module on inputs ``(n, ...)`` with hooks on ``layers``; its buffers are not changed.

    Inputs that do not fit, or outputs without one row per input, raise a ``ShapeError``.
    """
    result = Recording(layers)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for layer in layers:
            expected = {name: p for name, p in layer._parameters.items() if p is not None}
            handle = layer.register_forward_hook(partial(result.note, expected), prepend=True)
            stack.callback(handle.remove)
        try:
            result.outputs = functional_outputs(module, {}, x)
        except BayeskitError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ShapeError(f"the module cannot be applied to inputs of shape {tuple(x.shape)}: {error}") from error
    return result


def trial_run(module: nn.Module, x: Tensor, choose: Callable[[nn.Module], Sequence[nn.Module]]) -> Recording:
    """Run a module on the first two inputs of ``x`` ``(n, ...)``, and watch the layers that ``choose`` returns.

    It raises ``ModelError`` if outputs are random, mix inputs, or do not depend on a trainable parameter.
    """
    _check_module(module)
    check_module_inputs(module, x)
    pair = torch.cat([x[:1], x[1:2] if len(x) > 1 else x[:1]]).detach()
    if pair.is_floating_point():
        pair.requires_grad_(True)
    layers = choose(module)
    before = _random_state(x)
    trial = record_calls(module, layers, pair)
    if any(not torch.equal(a, b) for a, b in zip(before, _random_state(x), strict=True)):
        _restore(before, x)
        raise ModelError("the module draws random numbers, so its outputs are not fixed; call module.eval() first")
    trial.unchanged()
    check_finite(trial.outputs, "the network's output")
    trial.nodes, trial.uses = _uses(trial.outputs)
    if not any(p.requires_grad and id(p) in trial.uses for p in module.parameters()):
        raise ModelError("outputs do not depend on trainable parameters; do not run the module's layers under no_grad")
    trial.mixed = _rows_that_mix(trial, pair)
    return trial


def _random_state(x: Tensor) -> list[Tensor]:
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(x.device)] if x.is_cuda else state


def _restore(state: list[Tensor], x: Tensor) -> None:
    torch.set_rng_state(state[0])
    if x.is_cuda:
        torch.cuda.set_rng_state(state[1], x.device)


def _uses(outputs: Tensor) -> tuple[set[Node], Counter[int]]:
    """Return the nodes of the autograd graph, and the number of uses of each parameter."""
    start = outputs.grad_fn
    found: set[Node] = set() if start is None else {start}
    uses: Counter[int] = Counter()
    waiting = list(found)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            variable = getattr(node, "variable", None)
            if variable is not None:
                uses[id(variable)] += 1
            elif node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found, uses


def _rows_that_mix(trial: Recording, pair: Tensor) -> set[nn.Module]:
    """Return layers whose first dimension is not the input; raise ``ModelError`` if outputs mix inputs."""
    if not trial.outputs.requires_grad:
        return set()
    k = trial.outputs.shape[1]
    # Weights differ between outputs, because the sum of the outputs may be constant.
    total = trial.outputs[0] @ torch.arange(1.0, k + 1).to(trial.outputs)
    tracked = [pair] if pair.requires_grad else []
    edges: list[Any] = [*(call.left for call in trial.calls), *tracked]
    if not edges:
        return set()
    try:
        found = torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise ModelError(f"the module cannot be differentiated: {error}") from error
    wrong = [g is not None and (len(g) != 2 or bool(g[1].any())) for g in found]
    layers = {call.layer for call, mixed in zip(trial.calls, wrong, strict=False) if mixed}
    if wrong[-1] if tracked else bool(layers):
        raise ModelError(
            "outputs at one input depend on other inputs, so they have no gradients at single inputs; let each row of "
            "outputs depend only on the same row of inputs, and normalise over features, not over the batch"
        )
    return layers


# Checks of a module and its inputs.


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(f"the module must be a torch.nn.Module, not {type(module).__name__}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ModelError("the module has no trainable parameter; call requires_grad_(True) on parameters to include")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise ModelError(
                f"layer {name!r} normalises over the batch, so outputs at one input depend on all other inputs; "
                "call module.eval() first, or use LayerNorm"
            )


def check_module_inputs(module: nn.Module, x: Tensor, name: str = "x1") -> None:
    """Raise a ``DataError`` unless inputs are a finite tensor with rows, of the module's dtype and device."""
    if not isinstance(x, Tensor) or not x.dim() or not len(x):
        raise DataError(f"{name} must be a tensor with at least one input, not {getattr(x, 'shape', type(x))}")
    parameter = first_trainable(module)
    if x.device != parameter.device or (x.is_floating_point() and x.dtype != parameter.dtype):
        raise DataError(
            f"{name} is {x.dtype} on {x.device}, but the module is {parameter.dtype} on {parameter.device}; "
            f"use {name}.to(device, dtype)"
        )
    check_finite(x, name)


def check_finite(x: Tensor, name: str) -> None:
    """Raise a ``DataError`` that names the first row with a value that is not finite, if any."""
    if not visible(x):
        return
    finite = torch.isfinite(x.detach()).unsqueeze(-1).flatten(1).all(1)
    if not bool(finite.all()):
        raise DataError(f"{name} has values that are not finite, first in row {int((~finite).nonzero()[0])}")


def visible(x: Tensor) -> bool:
    """Whether a tensor's values can be read: not in a batching transform, and not while compiling."""
    while is_wrapped(x):
        if is_batched(x):
            return False
        x = without_transform(x)
    return not torch.compiler.is_compiling()


def first_trainable(module: nn.Module) -> nn.Parameter:
    """Return the first parameter that requires gradients."""
    return next(p for p in module.parameters() if p.requires_grad)
