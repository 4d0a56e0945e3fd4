"""Networks that are compiled, or run in mixed precision, while a block runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from bayeskit._core.compiler_cache import compiler_cache
from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import global_stream, new_generator, validation_kept
from bayeskit.errors import CompilationWarning
from bayeskit.inference.training._learner import Learner
from bayeskit.inference.training._minibatches import Batch


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward method of each module by ``wrap(module)`` inside the context."""
    before = [vars(module).get("forward") for module in modules]
    with validation_kept():
        try:
            for module in modules:
                module.forward = wrap(module)  # type: ignore[method-assign]
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward  # type: ignore[method-assign]


def in_mixed_precision(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the module's computation under autocast to ``dtype``, with results in the parameters' dtype."""
    # Log densities are computed outside autocast, in full precision.
    forward = module.forward
    parameter = next(module.parameters())

    def full(x: Any) -> Any:
        return x.to(parameter.dtype) if isinstance(x, Tensor) and x.dtype == dtype else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(parameter.device.type, dtype=dtype):
            result = forward(*args, **kwargs)
        return _pytree.tree_map(full, result)

    return run


def _compiled(module: nn.Module, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Return the module's computation, compiled on first call with options of torch's compiler."""
    return torch.compile(module.forward, options=options or None)


def compiled_networks(learner: Learner, modules: list[nn.Module], first: Batch, seed: int) -> ExitStack:
    """Compile ``modules`` and run them once; if that fails, warn and leave them unchanged."""
    stack = ExitStack()
    if not modules:
        warn_user(
            "model and guide contain no networks to compile; name the networks, compile=[encoder, decoder]",
            CompilationWarning,
        )
        return stack
    before, learnt = learner.copied_buffers(), learner.learnt()
    try:
        stream = global_stream(new_generator(seed, stream="compilation"))
        with warnings.catch_warnings(), stream, validation_kept():
            warnings.simplefilter("ignore")  # deprecation warnings of the compiler itself
            # Until training ends: a network is compiled again whenever the shapes of its arguments change.
            cache = stack.enter_context(compiler_cache())
            stack.enter_context(replaced_forward(modules, partial(_compiled, options=cache.options)))
            learner(*first.args, **first.kwargs).backward()
    except Exception as error:  # the compiler may raise any exception
        stack.close()
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warn_user(
            f"the networks could not be compiled ({reason[0]}); training continues without compilation",
            CompilationWarning,
        )
    else:
        if cache.problem is not None:
            warn_user(cache.problem, CompilationWarning)
    for parameter in learner.trained().values():
        parameter.grad = None
    learner.load_buffers(before)
    learner.load_learnt(learnt)
    return stack
