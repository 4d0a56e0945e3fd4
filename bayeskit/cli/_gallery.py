"""``bayeskit run`` and ``list``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bayeskit._ctrl_c import give_back
from bayeskit.cli._folders import file_digest, opened, say_where
from bayeskit.cli._options import POSTERIOR, Acceptance, Force, Out, Quiet, numeric
from bayeskit.cli._tables import new_console, print_files, print_summary
from bayeskit.errors import SettingsError


def run_model_or_page(
    name: Annotated[str, typer.Argument(help="A model or a page listed by 'bayeskit list'.")],
    seed: Annotated[int | None, typer.Option(show_default="0", help="Random seed.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Run a page with a budget of seconds.")] = False,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    chains: Annotated[int | None, numeric("4", "Chains.", POSTERIOR, min=1)] = None,
    warmup: Annotated[int | None, numeric("500", "Warm-up iterations of each chain.", POSTERIOR, min=0)] = None,
    samples: Annotated[int | None, numeric("1000", "Draws of each chain.", POSTERIOR, min=4)] = None,
    target_acceptance: Acceptance = None,
) -> None:
    """Draw from the posterior of a named model, or run a page of the gallery.

    Models write summary.csv, posterior.nc and report.html; pages write their printed output and their figures. A killed
    run of a model resumes with the same command, and a finished one is not repeated.
    """
    from bayeskit.gallery import page as named_page
    from bayeskit.gallery._registry import get_model
    from bayeskit.gallery._scripts import is_page, run_page

    given = {
        "seed": seed,
        "num_chains": chains,
        "num_warmup": warmup,
        "num_samples": samples,
        "target_acceptance": target_acceptance,
    }
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if is_page(name):
        if settings:
            options = ", ".join(f"--{key.removeprefix('num_').replace('_', '-')}" for key in settings)
            raise SettingsError(f"{name!r} is a page with its own settings; it accepts --small, not {options}")
        page = named_page(name)
        page.require()
        script = {"page": name, "script": file_digest(page.path), "small": small}
        folder = opened("run", name, out, force, quiet, script)
        if folder is not None:
            say_where(folder, out, quiet)
            files = run_page(name, folder.path, small=small, quiet=quiet)
            folder.finish(page.title)
            print_files(folder.path, [file.name for file in files])
        return
    if small:
        raise SettingsError(f"--small is for pages of the gallery; {name!r} accepts --chains, --warmup and --samples")
    numbers = {"seed": 0, "num_chains": 4, "num_warmup": 500, "num_samples": 1000, "target_acceptance": 0.8} | settings
    folder = opened("run", name, out, force, quiet, {"model": name, **numbers})
    if folder is None:
        return
    from bayeskit.report import posterior_summary
    from bayeskit.workflows import posterior_in_folder

    entry = get_model(name)

    give_back()
    target = entry.build()
    say_where(folder, out, quiet)
    draws = posterior_in_folder(
        target,
        folder.path,
        title=f"Posterior of {entry.name}",
        settings={"model": entry.description},
        progress=not quiet,
        **numbers,
    )
    summary = posterior_summary(draws)
    worst = f"{summary['ess'].min():.0f} effective draws or more, r-hat at most {summary['r_hat'].max():.3f}"
    folder.finish(f"{entry.name}: {draws.num_chains} chains of {draws.num_draws} draws, {worst}")
    if quiet:
        return
    print_summary(summary, entry.name)
    print_files(folder.path, folder.files())


def list_models() -> None:
    """List the models and the pages of the gallery that can be run by name."""
    from bayeskit import gallery

    console = new_console()
    table = _plain_table("model", "log evidence", "with 'bayeskit evidence NAME' or 'bayeskit run NAME'")
    for name, known, description in gallery.listed():
        table.add_row(name, "" if known is None else f"{known:.4f}", Text(description))
    console.print(table)
    for group, heading in gallery.GROUPS.items():
        table = _plain_table("page", "", f"{heading}, with 'bayeskit run NAME [--small]'")
        for page in gallery.pages():
            if page.group == group:
                table.add_row(page.name, "", Text(page.title))
        console.print()
        console.print(table)


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0], style="bold", no_wrap=True)
    table.add_column(columns[1], justify="right")
    table.add_column(columns[2])
    return table
