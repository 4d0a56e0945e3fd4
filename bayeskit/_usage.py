"""What is said of misspelt options and commands ends with the page that explains them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from bayeskit.errors import _place_of

PAGE = _place_of("how_to/command_line")
# typer has click within it or beside it, by its version
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


@contextmanager
def _explained() -> Iterator[None]:
    """Let what is said of misspelt options end with the page that explains them."""
    try:
        yield
    except _UsageError as error:
        if PAGE not in error.message:
            before = error.message and error.message + ("" if error.message.endswith((".", "?")) else ".")
            error.message = f"{before} See {PAGE}.".lstrip()
        raise


class ExplainedCommands(TyperGroup):
    """Commands whose usage errors name the page on the command line."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _explained():
            return super().invoke(ctx)
