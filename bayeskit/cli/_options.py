"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

OUTPUT, POSTERIOR, _LADDER = "Output", "Posterior run", "Ladder of temperatures"
_OTHERS, REPEATED = "Sequential Monte Carlo and nested sampling", "Repetitions"


def numeric(default: str, help: str, panel: str, **limits: Any) -> Any:
    """Return an option whose default is that of the budget, or of the model if it has one."""
    return typer.Option(show_default=default, help=help, rich_help_panel=panel, **limits)


Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for table, draws and report.",
        show_default="results/COMMAND-NAME",
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Repeat a finished run, and replace results of another.", rich_help_panel=OUTPUT),
]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")]
Methods = Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")]
Replicates = Annotated[
    int, typer.Option(min=1, help="Number of runs, each with another seed.", rich_help_panel=REPEATED)
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of replicates run in parallel.", rich_help_panel=REPEATED)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress bars and no table.", rich_help_panel=OUTPUT)
]
Chains = Annotated[int | None, numeric("64", "Chains.", POSTERIOR, min=1)]
Warmup = Annotated[int | None, numeric("400", "Warm-up iterations of each chain.", POSTERIOR, min=20)]
Samples = Annotated[int | None, numeric("400", "Draws of each chain.", POSTERIOR, min=1)]
Acceptance = Annotated[float | None, numeric("0.8", "Target acceptance rate.", POSTERIOR, min=0.1, max=0.999)]
Temperatures = Annotated[int | None, numeric("50", "Number of steps.", _LADDER, min=2)]
LadderChains = Annotated[int | None, numeric("32", "Chains at each temperature.", _LADDER, min=1)]
LadderWarmup = Annotated[int | None, numeric("150", "Warm-up iterations.", _LADDER, min=20)]
LadderSamples = Annotated[int | None, numeric("1000", "Draws of each chain.", _LADDER, min=1)]
ReferenceTemperatures = Annotated[
    int | None,
    numeric("10", "Number of steps of the generalised stepping stone from a reference.", _LADDER, min=2),
]
Particles = Annotated[int | None, numeric("64", "Particles of each population.", _OTHERS, min=2)]
SMCReplicates = Annotated[int | None, numeric("32", "Populations of sequential Monte Carlo.", _OTHERS, min=1)]
LivePoints = Annotated[int | None, numeric("500", "Live points of nested sampling.", _OTHERS, min=4)]
AlignmentFile = Annotated[Path, typer.Option("--alignment", help="FASTA, NEXUS or PHYLIP file.")]
Substitution = Annotated[
    str | None,
    typer.Option(help="Such as JC69, HKY85, GTR+I+G4 or LG+F+R3; by default the file's MrBayes block, or JC69."),
]
BurnIn = Annotated[
    float | None,
    typer.Option(
        min=0,
        show_default="0.25 of a chain, else 0",
        help="Trees to leave out at the start of each file: a share below 1, or a number.",
    ),
]
