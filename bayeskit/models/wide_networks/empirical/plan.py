"""Which of a module's layers have gradients in factors, and what a kernel of it costs to hold."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bayeskit.errors import DataError, ModelError
from bayeskit.models.wide_networks.empirical.layers import has_factors
from bayeskit.models.wide_networks.empirical.recording import Recording, record
from bayeskit.models.wide_networks.inputs import check_finite

BATCH_NORM = nn.modules.batchnorm._BatchNorm
COPIES = 4  # of gradients that are computed for single inputs: torch's, both in another order, and a product's


@dataclass(frozen=True)
class Plan:
    """How the gradients of a module are found.

    Attributes
    ----------
    module : torch.nn.Module
    layers : tuple of torch.nn.Module
        Those whose gradients have factors.
    rest : tuple of str
        The names of all other parameters.
    num_outputs : int
    num_numbers : int
        That are held for each input.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    rest: tuple[str, ...]
    num_outputs: int
    num_numbers: int

    @property
    def parameter(self) -> nn.Parameter:
        """The first one that is trained, whose dtype and device are those of a kernel."""
        return first_trainable(self.module)

    def by_single_inputs(self) -> Plan:
        """Return a plan that trusts nothing but gradients of single inputs."""
        names = {name: p.numel() for name, p in self.module.named_parameters() if p.requires_grad}
        numbers = self.num_numbers + COPIES * self.num_outputs * sum(names.values())
        return Plan(self.module, (), tuple(names), self.num_outputs, numbers)


def first_trainable(module: nn.Module) -> nn.Parameter:
    """Return the first parameter that requires gradients."""
    return next(p for p in module.parameters() if p.requires_grad)


def make_plan(module: nn.Module, x: Tensor) -> Plan:
    """Try a module on two inputs.

    Parameters
    ----------
    module : torch.nn.Module
    x : Tensor
        ``(n, ...)``, of which the first two are used.

    Returns
    -------
    Plan

    Raises
    ------
    ModelError
        If outputs at one input depend on another or on chance, or no parameter is trainable.
    DataError, ShapeError
        If inputs do not fit the module.
    """
    _check_module(module)
    check_module_inputs(module, x)
    pair = torch.cat([x[:1], x[1:2] if len(x) > 1 else x[:1]]).detach()
    if pair.is_floating_point():
        pair.requires_grad_(True)
    candidates = _candidates(module)
    before = _random_state(x)
    trial = record(module, candidates, pair)
    if any(not torch.equal(a, b) for a, b in zip(before, _random_state(x), strict=True)):
        _restore(before, x)
        raise ModelError("the module draws random numbers, so that it has no fixed kernel; call module.eval() first")
    trial.unchanged()
    check_finite(trial.outputs, "the network's output")
    used, uses = _uses(trial.outputs)
    if not any(p.requires_grad and id(p) in uses for p in module.parameters()):
        raise ModelError("outputs do not depend on trainable parameters; do not run the module's layers under no_grad")
    rows = _rows_that_mix(trial, pair)
    layers = tuple(
        m
        for m in candidates
        if m not in trial.opaque
        and m not in rows
        and all(uses[id(p)] == sum(c.left.node in used for c in trial.calls if c.layer is m) for p in _trainable(m))
    )
    known = {id(p) for m in layers for p in m.parameters()}
    rest = [name for name, p in module.named_parameters() if p.requires_grad and id(p) in uses and id(p) not in known]
    sizes = dict(module.named_parameters())
    k = trial.outputs.shape[1]
    numbers = COPIES * k * sum(sizes[name].numel() for name in rest) + x[:1].numel()
    for call in trial.calls:
        # Convolutions unfold what enters, and scale it; gradients are held, and twice more while they are computed.
        numbers += call.entered.numel() // 2 * (1 + 2 * _patch(call.layer)) + call.size // 2 * (1 + 3 * k)
    return Plan(module, layers, tuple(rest), k, numbers)


def check_module_inputs(module: nn.Module, x: Tensor, name: str = "x1") -> None:
    """Refuse inputs that no kernel is of.

    Raises
    ------
    DataError
        If they are not finite, not a tensor, or of another dtype or device than the module.
    """
    if not isinstance(x, Tensor) or not x.dim() or not len(x):
        raise DataError(f"{name} must be a tensor with at least one input, not {getattr(x, 'shape', type(x))}")
    parameter = first_trainable(module)
    if x.device != parameter.device or (x.is_floating_point() and x.dtype != parameter.dtype):
        raise DataError(
            f"{name} is {x.dtype} on {x.device}, the module {parameter.dtype} on {parameter.device}; "
            f"use {name}.to(device, dtype)"
        )
    check_finite(x, name)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(f"an empirical kernel is of a torch.nn.Module, not a {type(module).__name__}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ModelError("the module has no trainable parameter; call requires_grad_(True) on those that matter")
    for name, layer in module.named_modules():
        if isinstance(layer, BATCH_NORM) and (layer.training or layer.running_mean is None):
            raise ModelError(
                f"layer {name!r} normalises over the batch, so that outputs at one input depend on all others; "
                "call module.eval() first, or use LayerNorm"
            )


def _candidates(module: nn.Module) -> list[nn.Module]:
    """Return layers of known kinds that share their parameters with no other."""
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    return [
        m
        for m in module.modules()
        if has_factors(m) and _trainable(m) and all(owners[id(p)] == 1 for p in m.parameters())
    ]


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None and p.requires_grad]


def _random_state(x: Tensor) -> list[Tensor]:
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(x.device)] if x.is_cuda else state


def _restore(state: list[Tensor], x: Tensor) -> None:
    torch.set_rng_state(state[0])
    if x.is_cuda:
        torch.cuda.set_rng_state(state[1], x.device)


def _uses(outputs: Tensor) -> tuple[set[Node], Counter[int]]:
    """Return the nodes of a graph, and how often it uses each parameter itself."""
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
    """Return layers whose first dimension is not that of inputs; refuse modules that mix inputs themselves."""
    if not trial.outputs.requires_grad:
        return set()
    k = trial.outputs.shape[1]
    # Weights that differ, for outputs may add up to a constant.
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
            "outputs at one input depend on other inputs, so that the module has no kernel of pairs; let its first "
            "dimension be that of inputs, and normalise features, not batches"
        )
    return layers


def _patch(layer: nn.Module) -> int:
    """Return at how many sites at most a convolution sees each number that enters it."""
    return math.prod(getattr(layer, "kernel_size", (0,)))
