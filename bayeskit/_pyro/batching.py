"""Distributions that ``torch.func.vmap`` refuses as they are written, in forms that it takes.

Some densities of torch and Pyro assign in place where a batched model needs a new tensor. The values are the same
either way, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pyro.distributions import Categorical, DirichletMultinomial, OrderedLogistic, Poisson
from pyro.distributions.distribution import COERCIONS
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode

from bayeskit._tracing import UNTRACEABLE


class MaskedFill(TorchFunctionMode):
    """Carry out ``x[mask] = number``, which has no batching rule, as ``x.masked_fill_(mask, number)``.

    ``Multinomial.log_prob`` needs it, which drops impossible categories with no counts.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__setitem__:
            tensor, index, value = args
            # A mask of fewer dimensions is that of the first ones here, of the last ones in masked_fill_.
            whole = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == tensor.shape
            if whole and isinstance(value, (bool, int, float)):
                tensor.masked_fill_(index, value)
                return None
        return func(*args, **(kwargs or {}))


class NumbersFromData(TorchFunctionMode):
    """Let the model read numbers from its data while it is traced, such as ``int(counts.sum())``.

    What depends on the vector is batched, and ``vmap`` refuses to read it, so a number that can be read is a constant.
    """

    READS = (
        *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
        torch.arange,
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with disable_proxy_modes_tracing() if func in self.READS else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def batchable_distributions() -> Iterator[None]:
    """Let the model's own calls make distributions that can be batched, by Pyro's hook for such changes."""
    COERCIONS.append(_coerce)
    try:
        with nullcontext() if get_proxy_mode() is None else NumbersFromData():
            yield
    finally:
        COERCIONS.remove(_coerce)


def _coerce(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what stands in for ``cls(*args, **kwargs)``, or None to have that itself."""
    if cls is OrderedLogistic:
        return _ordered_logistic(*args, **kwargs)
    if cls in (Poisson, DirichletMultinomial) and kwargs.get("is_sparse"):
        # Sparse evaluation picks the counts above zero by their values; the dense density is the same.
        return cls(*args, **{**kwargs, "is_sparse": False})
    return None


def _ordered_logistic(predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> OrderedLogistic:
    """Make an ``OrderedLogistic`` whose probabilities are joined instead of written into zeros."""
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    made = OrderedLogistic.__new__(OrderedLogistic)
    made.predictor, made.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    shares = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    Categorical.__init__(made, shares, validate_args=validate_args)
    return made


@contextmanager
def naming(name: str, fn: Any) -> Iterator[None]:
    """Let an error of the body say at which site and in which distribution it happened."""
    try:
        yield
    except UNTRACEABLE as error:
        while "base_dist" in fn.__dict__:
            fn = fn.base_dist
        error.add_note(f"at site {name!r}, of distribution {type(fn).__name__}")
        raise
