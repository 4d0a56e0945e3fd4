"""The neural tangent kernel of a network as it is: products of its gradients."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from bayeskit._progress import progress_bar
from bayeskit._settings import whole_number
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import tiles
from bayeskit.models.wide_networks.empirical.factors import (
    CHUNK,
    Gradients,
    LayerGradients,
    Outputs,
    add_products,
    squared_length,
)
from bayeskit.models.wide_networks.empirical.layers import Calls, factors
from bayeskit.models.wide_networks.empirical.plan import Plan, check_module_inputs, make_plan
from bayeskit.models.wide_networks.empirical.recording import Recording, record, run

GIB = 1 << 30


@torch.inference_mode(False)
def empirical_ntk(
    module: nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    outputs: Literal["full", "trace", "diagonal"] = "full",
    block_size: int | None = None,
    max_memory: int = GIB,
) -> Tensor:
    r"""Return the neural tangent kernel of a module at its parameters.

    The kernel is :math:`\Theta_{ij}^{ab} = \sum_p \partial_p f_a(x_i) \, \partial_p f_b(x_j)`, over all parameters
    that require gradients. For dense layers, convolutions, embeddings and normalisations it is computed from products
    of what enters a layer and of what arrives at its outputs in a backward pass, without the gradients of single
    inputs; for all else, such as shared weights, layers that are not known or that have hooks, from these. Both are
    compared with an ordinary gradient of all inputs; if they differ, as where a module sorts its inputs or sends them
    to different layers, each input is worked on by itself. Hooks on parameters themselves are not part of the module's
    function; do not rely on them.

    Parameters
    ----------
    module : torch.nn.Module
        Takes ``(n, ...)`` and returns ``(n, ...)``, each row from its own input; it is left as it was. Outputs with
        more than two dimensions are flattened to ``(n, k)``, row by row, and ``(n,)`` is one output.
    x1 : Tensor
        Inputs, ``(n1, ...)``.
    x2 : Tensor, optional
        Others, ``(n2, ...)``; by default the same, and then the matrix is exactly symmetric.
    outputs : {"full", "trace", "diagonal"}, default "full"
        Of all pairs of outputs; of each output with itself; or the latter's mean, which is the trace over outputs by
        their number (what `neural-tangents` calls ``trace_axes=(-1,)``).
    block_size : int, optional
        How many inputs are worked on at once; by default as many as ``max_memory`` allows.
    max_memory : int, default 2**30
        About how many bytes to use in addition to the result, 40 MB at least.

    Returns
    -------
    Tensor
        ``(n1, n2, k, k)``, ``(n1, n2)`` for the trace, or ``(n1, n2, k)`` for the diagonal; without a graph. Its dtype
        is that of the first parameter that requires gradients.

    Raises
    ------
    ModelError
        If outputs at one input depend on others (as with ``BatchNorm`` in training) or on chance (as with
        ``Dropout``), if no parameter requires gradients, or if the module changes a layer's inputs in place.
    ShapeError, DataError
        If inputs do not fit the module or each other, or are not finite.
    SettingsError
        If ``outputs``, ``block_size`` or ``max_memory`` lies outside its domain.

    Notes
    -----
    As ``width`` grows, the mean and each of the diagonal of ``infinite_width(module).network(width)`` go to
    ``infinite_width(module).ntk``: its weights are drawn with unit variance, and scaled in the forward pass. A torch
    module that has just been built is another network: gradients are with respect to weights as they are, and
    ``Linear`` draws weights and biases with variance ``1 / (3 fan_in)``. Its kernel grows with the width, about as

    .. code-block:: python

        linear = {name: m for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        biases = {name: 1 / (3 * m.in_features) for name, m in linear.items()}
        infinite_width(module, "standard", weight_variance=1 / 3, bias_variance=biases).ntk(x1, x2)

    which is for normal weights; those of torch are uniform, which is noticed where a layer has few inputs.

    References
    ----------
    .. [1] A. Jacot, F. Gabriel, C. Hongler. Neural tangent kernel: convergence and generalization in neural networks.
       NeurIPS 2018.
    .. [2] R. Novak, J. Sohl-Dickstein, S. Schoenholz. Fast finite width neural tangent kernel. ICML 2022.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.empirical import empirical_ntk
    >>> network = torch.nn.Linear(3, 2)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> empirical_ntk(network, x, outputs="trace")  # x @ x.T + 1
    tensor([[2., 2.],
            [2., 3.]])
    >>> empirical_ntk(network, x).shape
    torch.Size([2, 2, 2, 2])
    """
    try:
        which = Outputs(outputs)
    except ValueError:
        names = ", ".join(repr(x.value) for x in Outputs)
        raise SettingsError(f"outputs must be one of {names}, not {outputs!r}") from None
    plan = make_plan(module, x1)
    symmetric = x2 is None or x2 is x1
    x2 = x1 if x2 is None else x2
    if not symmetric:
        check_module_inputs(module, x2, "x2")
        if x1.shape[1:] != x2.shape[1:] or x1.dtype != x2.dtype:
            raise ShapeError(
                f"x1 and x2 must have inputs of one shape and dtype, not {x1.shape[1:]} and {x2.shape[1:]}"
            )
    length = _block_size(plan, which, x1, block_size, max_memory)
    try:
        result = _fill(plan, x1.detach(), x2.detach(), which, symmetric, length)
    except _Disagreement:  # the module does something with these inputs that it did not with two
        plan = plan.by_single_inputs()
        length = _block_size(plan, which, x1, block_size, max_memory)
        result = _fill(plan, x1.detach(), x2.detach(), which, symmetric, length)
    if which is Outputs.FULL:
        return result.permute(1, 3, 0, 2)
    return result.permute(1, 2, 0) if which is Outputs.DIAGONAL else result.div_(plan.num_outputs)


def _block_size(plan: Plan, outputs: Outputs, x: Tensor, block_size: int | None, max_memory: int) -> int:
    """Return how many rows and columns a block has: so many that both factors and a product of them fit."""
    if block_size is not None:
        return whole_number("block_size", block_size, least=1)
    allowed = whole_number("max_memory", max_memory, least=1) / plan.parameter.element_size()
    allowed -= min(3 * CHUNK, allowed / 2)  # for what products hold in between
    # Solve square b^2 + linear b = allowed.
    square = 1 if outputs is Outputs.TRACE else 2 * plan.num_outputs
    linear = 2 * plan.num_numbers
    return max(int((math.sqrt(linear**2 + 4 * square * allowed) - linear) / (2 * square)), 1)


def _fill(plan: Plan, x1: Tensor, x2: Tensor, outputs: Outputs, symmetric: bool, length: int) -> Tensor:
    """Compute a matrix block by block; of a symmetric one, both halves from one."""
    k, n1, n2 = plan.num_outputs, len(x1), len(x2)
    shape = {Outputs.FULL: (k, n1, k, n2), Outputs.TRACE: (n1, n2), Outputs.DIAGONAL: (k, n1, n2)}[outputs]
    result = torch.zeros(shape, dtype=plan.parameter.dtype, device=plan.parameter.device)
    blocks = list(tiles.blocks(n1, n2, symmetric, length))
    held: tuple[slice, list[LayerGradients]] | None = None
    with torch.no_grad(), progress_bar("kernel", len(blocks)) as bar:
        for i, (rows, columns, mirrored) in enumerate(blocks):
            if held is None or held[0] != rows:
                held = rows, gradient_factors(plan, x1[rows])
            on_diagonal = symmetric and not mirrored
            second = held[1] if on_diagonal else gradient_factors(plan, x2[columns])
            block = result[:, rows, :, columns] if outputs is Outputs.FULL else result[..., rows, columns]
            for one, other in zip(held[1], second, strict=True):
                add_products(block, one, other, outputs, upper=on_diagonal)
            if on_diagonal:
                _mirror(block, outputs)
            elif mirrored and outputs is Outputs.FULL:
                result[:, columns, :, rows] = block.permute(2, 3, 0, 1)
            elif mirrored:
                result[..., columns, rows] = block.mT
            bar.update(i + 1)
    return result


def _mirror(block: Tensor, outputs: Outputs) -> None:
    """Make a block on the diagonal exactly symmetric."""
    if outputs is not Outputs.FULL:
        block.copy_(block.triu() + block.triu(1).mT)
        return
    for c in range(len(block)):
        for d in range(c):
            block[c, :, d] = block[d, :, c].mT
        block[c, :, c] = block[c, :, c].triu() + block[c, :, c].triu(1).mT


def gradient_factors(plan: Plan, x: Tensor) -> list[LayerGradients]:
    """Return the factors of the gradients of all outputs at some inputs.

    Parameters
    ----------
    plan : Plan
    x : Tensor
        ``(n, ...)``.
    """
    trial = record(plan.module, plan.layers, x)
    if trial.opaque or trial.outputs.shape[1] != plan.num_outputs:
        raise _Disagreement
    calls: dict[torch.nn.Module, Calls] = {layer: [] for layer in plan.layers}
    arrived = trial.gradients() if plan.layers else []
    for call, gradient in zip(trial.calls, arrived, strict=True):
        if gradient is not None:  # else the call does not matter to the outputs
            if len(call.entered) != len(x) or gradient.shape[1] != len(x):
                raise _Disagreement
            calls[call.layer].append((call.entered, gradient))
    found = {layer: factors(layer, made) for layer, made in calls.items() if made}
    rest = _rest(plan, x)
    _check(plan, trial, found, rest)
    return [*(factor for layer in plan.layers for factor in found.get(layer, [])), *rest]


class _Disagreement(Exception):
    """Factors of gradients are not those of the module at these inputs."""


def _check(
    plan: Plan, trial: Recording, found: dict[torch.nn.Module, list[LayerGradients]], rest: list[LayerGradients]
) -> None:
    """Compare an ordinary gradient of all outputs, weighted, with that from the gradients of single inputs.

    Hooks cannot tell which row of what enters a layer belongs to which input: a module may sort them, or route them.
    """
    weights = _weights(trial.outputs)
    named = {name: p for name, p in plan.module.named_parameters() if p.requires_grad}
    total = torch.autograd.grad(trial.outputs, list(named.values()), weights, allow_unused=True, retain_graph=True)
    lengths = {id(p): 0.0 if g is None else float(g.square().sum()) for p, g in zip(named.values(), total, strict=True)}
    owned = {layer: [id(p) for p in layer.parameters() if p.requires_grad] for layer in plan.layers}
    pairs = [
        (sum(float(squared_length(f, weights)) for f in found.get(layer, [])), sum(lengths.pop(p) for p in ids))
        for layer, ids in owned.items()
    ]
    pairs.append((sum(float(squared_length(g, weights)) for g in rest), sum(lengths.values())))
    accuracy = torch.finfo(weights.dtype).eps ** 0.5
    noise = accuracy**1.5 * sum(right for _, right in pairs)
    if all(abs(value - right) <= accuracy * right + noise for value, right in pairs):
        return
    if plan.layers:
        raise _Disagreement
    raise ModelError(
        "gradients at single inputs do not add up to those of all of them, so that outputs at one input depend on "
        "others; let the module's first dimension be that of inputs"
    )


def _weights(outputs: Tensor) -> Tensor:
    """Return numbers for all outputs that look random."""
    return torch.arange(1.0, outputs.numel() + 1, dtype=torch.float64).cos().to(outputs).view_as(outputs)


def _rest(plan: Plan, x: Tensor) -> list[LayerGradients]:
    """Return gradients with respect to the parameters whose gradients have no factors."""
    if not plan.rest:
        return []
    parameters = {name: plan.module.get_parameter(name).detach() for name in plan.rest}

    def output(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return run(plan.module, values, row[None])[0]

    try:
        found = vmap(jacrev(output), (None, 0))(parameters, x)
    except (RuntimeError, UserWarning):  # a function of the module cannot be batched
        return _one_by_one(plan, x)
    if not _add_up(plan, found, x):
        return _one_by_one(plan, x)
    return [Gradients(g.flatten(2).transpose(0, 1)) for g in found.values()]


def _add_up(plan: Plan, found: dict[str, Tensor], x: Tensor) -> bool:
    """Whether batched gradients add up to ordinary ones: torch's nested batching is wrong for some functions."""
    chosen = [plan.module.get_parameter(name) for name in found]
    with torch.enable_grad():
        y = run(plan.module, {}, x)
        weights = _weights(y)
        sums = torch.autograd.grad((y * weights).sum(), chosen, materialize_grads=True)
    for total, gradients in zip(sums, found.values(), strict=True):
        wrong = (torch.tensordot(weights.detach(), gradients, 2) - total).abs().max()
        if not wrong <= torch.finfo(y.dtype).eps ** 0.5 * gradients.abs().max() * y.numel():
            return False
    return True


def _one_by_one(plan: Plan, x: Tensor) -> list[LayerGradients]:
    """Return gradients with respect to the parameters whose gradients have no factors, without torch's batching."""
    chosen = [plan.module.get_parameter(name) for name in plan.rest]
    rows = []
    for row in x.split(1):
        with torch.enable_grad():
            y = run(plan.module, {}, row)[0]
            found = [torch.autograd.grad(v, chosen, retain_graph=True, materialize_grads=True) for v in y]
        rows.append(torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in found]))
    return [Gradients(g) for g in torch.stack(rows, 1).split([p.numel() for p in chosen], 2)]
