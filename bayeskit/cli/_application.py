"""The application: its commands, and their errors and warnings as one message each."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from bayeskit._core.documentation import place_of_page
from bayeskit._core.folders import RunFolder
from bayeskit._core.inputs import unknown_name
from bayeskit._core.progress import without_bars
from bayeskit.errors import (
    AlignmentError,
    BayeskitError,
    BayeskitWarning,
    DataError,
    ModelError,
    SettingsError,
    TreeError,
    UnknownNameError,
)

_PAGE = place_of_page("how_to/command_line")
# depending on its version, typer contains click or imports it
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Print a usage error as one line."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        message = error.format_message().removesuffix(".")
        if (option := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
            known = [name for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts]
            message = str(unknown_name("option", option, [name for name in known if name.startswith("--")]))
        _print_error(f"{message} (See {_PAGE})")
        raise typer.Exit(BAD_INPUT) from error
    except UnknownNameError as error:
        _print_error(f"{error} (See {_PAGE})")
        raise typer.Exit(BAD_INPUT) from error


def _print_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"error: {message}", style="bold red"), soft_wrap=True)


#: The folder that the command writes to.
OPENED: ContextVar[RunFolder | None] = ContextVar("opened", default=None)
#: What was typed behind the program's name, for reports.
TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


class _Commands(TyperGroup):
    """Commands whose usage errors are one line."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **kwargs: Any) -> Any:
        TYPED.set(tuple(args))
        OPENED.set(None)
        with _said_plainly():
            return super().make_context(info_name, args, *rest, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _said_plainly():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown_name("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


# Torch and Pyro are imported inside the commands, so that help and refusals do not wait for them.
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
BAD_INPUT, FALSE_COMFORT_FOUND, _INTERRUPTED = 2, 1, 130
#: Errors of what was given, which leave no folder behind.
_BAD_INPUT = (AlignmentError, DataError, ModelError, SettingsError, TreeError, UnknownNameError)
#: Settings of the library whose option is called neither as they are nor so without `num_`.
_CALLED = {"num_replicates": "smc_replicates", "num_live": "live_points"}
#: The options of the command.
_OPTIONS: ContextVar[frozenset[str]] = ContextVar("options", default=frozenset())


def by_option(message: str) -> str:
    """Return a message of the library with the command's options in place of settings, as `--samples` for num_samples.

    A setting is known by its `num_` or an equals sign; other words stay as they are.
    """

    def option(found: re.Match[str]) -> str:
        name, equals = found[1], found[2]
        called = _CALLED.get(name, name.removeprefix("num_"))
        if called not in _OPTIONS.get() or (name == called and not equals):
            return found[0]
        return f"--{called.replace('_', '-')}" + (
            " " if equals and not message[found.end() :].startswith((" ", ",", ")")) else ""
        )

    return re.sub(r"(?<![\w-])([a-z]\w*)(=?)", option, message)


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Print the package's errors and warnings as one message each, without traceback or source line."""
    console = Console(stderr=True, highlight=False)
    show_as_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, BayeskitWarning):
            console.print(Text(f"warning: {by_option(str(message))}", style="yellow"), soft_wrap=True)
        else:
            show_as_before(message, category, *rest, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("default", BayeskitWarning)
        # ArviZ 0.23 announces 1.x when it is imported; users of the command line cannot act on it.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        warnings.showwarning = show
        try:
            yield
        except BayeskitError as error:
            if isinstance(error, _BAD_INPUT) and (folder := OPENED.get()):
                folder.leave_if_empty()
            pages = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            _print_error(f"{by_option(str(error))}{pages}")
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as interrupt:
            message = (
                "interrupted; the same command resumes the run of a model, 'bayeskit trees', 'bayeskit compare' and "
                "'bayeskit vi', and begins anything else anew"
            )
            console.print(Text(message, style="yellow"), soft_wrap=True)
            raise typer.Exit(_INTERRUPTED) from interrupt


def add_command(name: str, function: Callable[..., None]) -> None:
    """Add a command whose errors are printed plainly."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        _OPTIONS.set(frozenset(kwargs))
        with _plain_messages(), without_bars(bool(kwargs.get("quiet"))):
            function(*args, **kwargs)

    app.command(name)(guarded)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bayeskit {version('bayeskit')}")
        raise typer.Exit


@app.callback()
def _bayeskit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Posterior draws and marginal likelihoods with standard errors."""
