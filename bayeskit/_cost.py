"""Count the operations behind a result while they run once, a tenth of the time that tracing them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit._operations import num_operations
from bayeskit._tracing import safe


def recorded(function: Callable[..., Iterable[Tensor]], *arguments: Tensor) -> tuple[int, int, int]:
    """Return the number of operations that make the results of a function, and the bytes that they write.

    Counted is what a traced graph without its dead code would hold; the two differ where tracing rewrites a graph, by
    a few operations. A view of what was there before, such as a transposed matrix of data, writes nothing.

    Parameters
    ----------
    function : callable
        ``(*arguments) -> tensors``
    *arguments : Tensor

    Returns
    -------
    num_operations, num_bytes, num_repeated : int
        The last are the operations of loops in Python, each of which is one operation otherwise.

    Examples
    --------
    >>> def squares(x):
    ...     x.exp()  # of which nothing is made
    ...     return (x * x + 1,)
    >>> recorded(squares, torch.zeros(5, dtype=torch.float64))
    (2, 80, 0)
    """
    with _Recorder() as recorder:
        results = function(*arguments)
        return recorder.behind(results)


def is_view(operation: Any) -> bool:
    """Whether the result of an operation shares the memory of what it was made of, and neither is changed."""
    returns, lifted = operation._schema.returns, operation is torch.ops.aten.lift_fresh.default  # which tracing copies
    return bool(returns) and returns[0].alias_info is not None and not operation._schema.is_mutable and not lifted


class _Recorder(TorchDispatchMode):
    """What each operation was made of and what it wrote, below gradients and batching."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[list[int]] = []
        self._bytes: list[int] = []
        self._repeated: list[int] = []
        self._views: set[int] = set()  # of what was there before
        self._kept: list[int] = []  # what graphs keep although nothing seems made of it
        self._made_by = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operation = safe(operation)
        result = operation(*args, **(kwargs or {}))
        sources = self._makers(tree_leaves((args, kwargs)))
        if isinstance(result, Tensor):
            number = self._note(sources, result)
            if is_view(operation) and self._views.issuperset(sources):
                self._views.add(number)
        else:
            number = self._note(sources)
            self._repeated[number] = num_operations(operation, args)
            for part in tree_leaves(result):
                if isinstance(part, Tensor):  # taken out of a tuple, which is an operation, too
                    self._note([number], part)
        if operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
            self._kept.append(number)
        return result

    def behind(self, results: Iterable[Tensor]) -> tuple[int, int, int]:
        """Return the number of operations that ``results`` were made by, the bytes they wrote, and those in loops."""
        found, waiting = set[int](), self._makers(results) + self._kept
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._sources[number]
        num_bytes = sum(self._bytes[number] for number in found - self._views)
        return len(found), num_bytes, sum(self._repeated[number] for number in found)

    def _makers(self, values: Iterable[Any]) -> list[int]:
        return [self._made_by[x] for x in values if isinstance(x, Tensor) and x in self._made_by]

    def _note(self, sources: list[int], result: Tensor | None = None) -> int:
        number = len(self._sources)
        self._sources.append(sources)
        self._repeated.append(0)
        self._bytes.append(0 if result is None else result.numel() * result.dtype.itemsize)
        if result is not None:
            self._made_by[result] = number
        return number
