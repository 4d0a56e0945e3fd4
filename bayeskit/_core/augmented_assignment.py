"""Assignments such as ``x += y`` in functions of users, which batching and gradients do not allow."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AugmentedAssignment(TorchFunctionMode):
    """Replace ``x += y`` in a model by ``x = x + y``, which batching and gradients allow."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self._libraries = (*torch.__path__, *pyro.__path__)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain = _OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        if plain is not None and self._is_augmented(sys._getframe(1)):
            self.seen = True
            return plain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_augmented(self, frame: FrameType) -> bool:
        # A call of x.add_(y) has the same function as x += y; only the instruction of the calling frame differs.
        code = frame.f_code
        if code.co_filename.startswith(self._libraries):
            return False
        instruction, argument = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        return instruction == _BINARY_OPERATION and argument >= _FIRST_IN_PLACE


_BINARY_OPERATION = dis.opmap["BINARY_OP"]
_FIRST_IN_PLACE = 13  # of the operators that the instruction knows: x + y is 0 and x += y is 13
_OUT_OF_PLACE: dict[str, Callable[..., Any]] = {
    **{f"{name}_": getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "floor_divide", "pow", "remainder")},
    **{f"__i{name}__": getattr(Tensor, f"__{name}__") for name in ("or", "and", "xor", "lshift", "rshift")},
    "__imatmul__": Tensor.__matmul__,
}
