"""``bayeskit compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bayeskit.cli._names import checked_methods
from bayeskit.cli._options import POSTERIOR, Force, Out, Quiet, Seed, numeric
from bayeskit.cli._own_models import Data, compare_own
from bayeskit.cli._trees import SubstitutionByType, compare_trees
from bayeskit.errors import SettingsError

_OWN, _TREES = "Models of yours", "Topologies"
_METHOD, _MOST = "bridge_sampling", 100


def compare_models_or_trees(
    models: Annotated[list[str] | None, typer.Argument(help="Models of yours, as model.py:model.")] = None,
    data: Data = None,
    method: Annotated[str, typer.Option(help="How the evidence is estimated.", rich_help_panel=_OWN)] = _METHOD,
    jobs: Annotated[int, typer.Option(min=1, help="Models estimated in parallel.", rich_help_panel=_OWN)] = 1,
    alignment: Annotated[
        Path | None, typer.Option("--alignment", help="FASTA, NEXUS or PHYLIP file.", rich_help_panel=_TREES)
    ] = None,
    trees: Annotated[
        list[Path] | None,
        typer.Option(
            "--trees",
            help="File of trees (Newick, NEXUS, ...): hypotheses, or the sample of a run. Once for each run.",
            rich_help_panel=_TREES,
        ),
    ] = None,
    substitution: SubstitutionByType = None,
    most: Annotated[
        int,
        typer.Option(min=2, help="Compare so many topologies at most, the most frequent ones.", rich_help_panel=_TREES),
    ] = _MOST,
    draws: Annotated[
        int | None, numeric("10000", "Draws of each topology; fewer for the improbable ones.", POSTERIOR, min=1)
    ] = None,
    burn_in: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default="0",
            help="Trees to leave out at the start of each file: a share below 1, or a number.",
            rich_help_panel=_TREES,
        ),
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Compare models in files of yours, or given topologies on an alignment, by the evidence of each.

    Of models, writes models.csv. Of topologies, roots are removed and weights of trees only choose what is compared;
    writes topologies.csv, topologies.trprobs and bayes_factors.svg. With --trees for two independent runs or more, the
    mass of the compared topologies in the runs gives the evidence over all topologies with its error, in evidence.csv.
    A killed run resumes with the same command, and a finished one is not repeated.
    """
    if models:
        if alignment is not None or trees:
            raise SettingsError("pass either models of yours or --alignment with --trees, not both")
        if substitution is not None or most != _MOST or draws is not None or burn_in is not None:
            raise SettingsError("--substitution, --most, --draws and --burn-in are for topologies, not for models")
        chosen = checked_methods(method)
        if chosen == "all" or len(chosen) != 1:
            raise SettingsError("--method is the name of one method, such as bridge_sampling")
        compare_own(models, data, chosen[0], seed, out, force, quiet, jobs)
        return
    if alignment is None or not trees:
        raise SettingsError(
            "nothing to compare: pass --alignment FILE and --trees FILE, or models of yours, as a.py:model b.py:model"
        )
    if data is not None or method != _METHOD or jobs != 1:
        raise SettingsError("--data, --method and --jobs are for models of yours, not for topologies")
    compare_trees(alignment, trees, substitution, most, draws, burn_in, seed, out, force, quiet)
