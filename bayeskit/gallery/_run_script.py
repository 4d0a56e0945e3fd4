"""Run a page as a script and keep its figures: ``python -m bayeskit.gallery._run_script SCRIPT FOLDER``.

A page keeps its figures in variables; it opens no windows and names no files.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def set_style() -> None:
    """Set colours of lines and bars that are distinguishable with any colour vision."""
    import matplotlib
    from cycler import cycler

    from bayeskit._core.plots import CHAIN_COLOURS

    matplotlib.use("agg")
    matplotlib.rcParams["axes.prop_cycle"] = cycler(color=list(CHAIN_COLOURS))
    matplotlib.rcParams["image.cmap"] = "cividis"


def figures_in(variables: Mapping[str, Any]) -> list[Figure]:
    """Return the figures among a script's variables, each once, in the order in which they were made."""
    from matplotlib.figure import Figure

    return list({id(value): value for value in variables.values() if isinstance(value, Figure)}.values())


def run_and_save(script: str, folder: str) -> None:
    """Run ``script`` and save its figures in ``folder``, replacing the figures of an earlier run."""
    set_style()
    Path(folder).mkdir(parents=True, exist_ok=True)
    sys.argv = [script]
    variables = runpy.run_path(script, run_name="__main__")
    name = Path(script).stem
    for old in Path(folder).glob(f"{name}_[0-9]*.png"):
        old.unlink()
    for number, figure in enumerate(figures_in(variables), 1):
        figure.savefig(Path(folder) / f"{name}_{number}.png", dpi=150)


if __name__ == "__main__":
    run_and_save(*sys.argv[1:])
