"""Functions with ``pyro.param`` statements and parameter values of their own, outside of Pyro's global store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro

from bayeskit._core.process_state import process_state


@contextmanager
def parameters_in_store(state: Any) -> Iterator[None]:
    """Let parameters be read from ``state`` and stored in it; other threads wait."""
    with process_state(), pyro.get_param_store().scope(state):
        yield


class FunctionWithParameters:
    """A function with ``pyro.param`` statements and its own parameter values, outside Pyro's global store."""

    def __init__(self, function: Callable[..., Any], state: Any) -> None:
        self.function, self.state = function, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on its own parameters."""
        with parameters_in_store(self.state):
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"InStore({getattr(self.function, '__name__', self.function)}: {', '.join(self.state['params'])})"


def without_parameters(*functions: Callable[..., Any]) -> tuple[list[Callable[..., Any]], Any]:
    """Separate functions returned by an earlier fit from their parameters."""
    state: dict[str, dict[str, Any]] = {"params": {}, "constraints": {}}
    for function in functions:
        if isinstance(function, FunctionWithParameters):
            for name, values in state.items():
                values.update(function.state[name])
    return [f.function if isinstance(f, FunctionWithParameters) else f for f in functions], state
