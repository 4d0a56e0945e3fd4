"""Torch's own interpreter for traced graphs: the same operations in the same order, at a third of Python's cost."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule


def interpreted(graph: GraphModule, *examples: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that does what ``graph`` does, bit for bit, without Python between its operations.

    Nothing is fused or rearranged, so that the results are those of the graph. Where torch cannot take the graph over,
    or gives another answer for ``examples``, and elsewhere than on the host, the graph itself is returned.

    Parameters
    ----------
    graph : GraphModule
        Left as it is; it holds operations on tensors alone.
    *examples : Tensor
        Arguments, whose shapes are fixed from now on.

    Examples
    --------
    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> u = torch.tensor([3.0, 4.0])
    >>> graph = make_fx(lambda u: (u.square().sum(),))(u)
    >>> interpreted(graph, u)(torch.tensor([1.0, 2.0]))
    (tensor(5.),)
    """
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    if any(example.device.type != "cpu" for example in examples):
        return graph  # to compare answers would be to wait for the device
    if not all(isinstance(target, OpOverload) or target is operator.getitem for target in targets):
        return graph  # a loop would be unrolled
    try:
        with torch.no_grad():
            traced = torch._C._create_graph_by_tracing(lambda *u: graph(*u), examples, lambda _: "", True, False)[0]
            function = torch._C._create_function_from_graph("density", traced)
    except (RuntimeError, TypeError, AttributeError):
        return graph

    def call(*arguments: Tensor) -> tuple[Tensor, ...]:
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)  # it belongs to the thread
        try:
            return function(*arguments)
        finally:
            torch._C._set_graph_executor_optimize(before)

    with torch.no_grad():
        pairs = zip(call(*examples), graph(*examples), strict=True)
        same = all(a.shape == b.shape and a.dtype == b.dtype and a.allclose(b, 0, 0, equal_nan=True) for a, b in pairs)
    return call if same else graph
