"""Run several methods on shared draws and set them side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bayeskit._settings import whole_number
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, CheckpointError, OutputError, SettingsError
from bayeskit.inference.evidence.budget import Budget
from bayeskit.inference.evidence.checks import belongs
from bayeskit.inference.evidence.comparison import EvidenceComparison
from bayeskit.inference.evidence.judgement import comparison, judge_target
from bayeskit.inference.evidence.material import Material
from bayeskit.inference.evidence.methods import Method, select
from bayeskit.inference.evidence.predictive.result import PredictiveScore
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target

if TYPE_CHECKING:
    from bayeskit.inference.evidence.conjugate.blocks import ConjugateBlock


def compare(
    target: Target,
    methods: str | Sequence[str] = "all",
    seed: int = 0,
    *,
    budget: Budget | None = None,
    draws: Draws | None = None,
    ladder: Ladder | None = None,
    blocks: ConjugateBlock | Sequence[ConjugateBlock] = (),
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> EvidenceComparison:
    """Compute the log evidence in several ways: one posterior run, one tempered ladder, one fit for all that need it.

    Parameters
    ----------
    target : Target
    methods : "all" or sequence of str
        Names of functions in :mod:`bayeskit.inference.evidence`.
    seed : int, default 0
    budget : Budget, optional
        Chains and lengths of the shared runs.
    draws, ladder : optional
        Existing runs to use instead of new ones. Methods that need no draws start their searches from these and check
        themselves against them; they never look at draws that were made here for others.
    blocks : ConjugateBlock or sequence of them, optional
        The full conditionals of the model, for :func:`~bayeskit.inference.evidence.chib`; by default those that the
        target knows.
    checkpoint : path, optional
        Prefix of the files from which an interrupted comparison resumes, such as ``PREFIX.posterior`` and
        ``PREFIX.ladder``.
    progress : bool, default True

    Returns
    -------
    EvidenceComparison
        Each row is what the method would say if it were called by itself with these settings, whoever else is asked.
        ``num_evaluations`` and ``seconds`` include its draws: what the estimate would have cost alone.
        Methods that do not apply to the target, such as those for positive coordinates, are in ``refused`` with the
        reason; predictive scores are in ``scores``.

    Raises
    ------
    UnknownNameError
        For an unknown method.
    SettingsError
        If `target` is none, or its prior is known to be improper.
    DrawsError
        If draws or ladder are of another target, or too few.
    CheckpointError
        If a checkpoint belongs to another run.
    BayeskitError
        If the shared draws cannot be made. A method that fails later is reported as failed in its row, and the others
        stand.

    Warns
    -----
    ConstantsWarning
        If the prior does not integrate to one, so that every estimate is off by that; see
        :func:`~bayeskit.inference.evidence.check_constants`.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference import evidence
    >>> case = bk.exact.get("beta_binomial")
    >>> small = evidence.Budget(4, 100, 200, num_temperatures=10, ladder_chains=4, ladder_samples=100)
    >>> table = evidence.compare(case.target(), ["bridge_sampling", "stepping_stone"], budget=small)
    >>> list(table.to_pandas()["method"])
    ['bridge_sampling', 'stepping_stone']
    >>> abs(table["bridge_sampling"].log_evidence - case.log_evidence) < 0.05, table.verdict.is_agreed
    (True, True)
    """
    if not isinstance(target, Target):
        raise SettingsError(f"compare works on a Target, not a {type(target).__name__}; make one by Target.from_pyro")
    chosen, seed = select(methods), whole_number("seed", seed)
    if not chosen:
        raise SettingsError("methods names no method; give names, or 'all'")
    for name, value, kind in (("budget", budget, Budget), ("draws", draws, Draws), ("ladder", ladder, Ladder)):
        if not isinstance(value, (kind, type(None))):
            raise SettingsError(f"{name} must be a {kind.__name__}, not a {type(value).__name__}")
    given = _as_blocks(blocks)
    if draws is not None:
        belongs(draws, target)
    if ladder is not None:
        belongs(ladder.draws, target, posterior=False)
    material = Material(
        target, budget, seed, draws=draws, ladder=ladder, blocks=given, checkpoint=checkpoint, progress=progress
    )
    constants = judge_target(target, proper=any(method.kind != "score" for method in chosen))
    refusals = {method.name: method.refusal(target, material) for method in chosen}
    refused = {name: reason for name, reason in refusals.items() if reason is not None}
    applied = [method for method in chosen if method.name not in refused]
    for part in ("posterior", "ladder"):
        # What takes longest comes first, and if it fails there is little to compare.
        if any(part in method.needs for method in applied):
            material.part(part)
    with comparison():
        answers = {method.name: _answer(method, material, seed) for method in applied}
    return EvidenceComparison(
        {name: answer for name, answer in answers.items() if isinstance(answer, Evidence)},
        material.draws_if_there,
        material.ladder if material.has("ladder") else None,
        {"seed": seed} | vars(material.budget),
        {name: answer for name, answer in answers.items() if isinstance(answer, PredictiveScore)},
        refused,
        {method.name: method.needs for method in applied},
        dict(material.seconds),
        constants.warnings + constants.notes,
    )


def _as_blocks(blocks: ConjugateBlock | Sequence[ConjugateBlock]) -> tuple[ConjugateBlock, ...]:
    from bayeskit.inference.evidence.conjugate.blocks import ConjugateBlock

    several = (blocks,) if isinstance(blocks, ConjugateBlock) else blocks
    if not isinstance(several, Sequence) or not all(isinstance(block, ConjugateBlock) for block in several):
        raise SettingsError(
            "blocks must be ConjugateBlocks, one or a sequence of them, such as blocks=[ConjugateBlock(...)]"
        )
    return tuple(several)


def _answer(method: Method, material: Material, seed: int) -> Evidence | PredictiveScore:
    begin, made = time.monotonic(), sum(material.seconds.values())
    result: Evidence | PredictiveScore
    try:
        result = method.estimate(material.target, material, seed)
    except (CheckpointError, OutputError):
        raise  # another run's files are no fault of the method, and the next ones would meet them too
    except (BayeskitError, ArithmeticError, RuntimeError, ValueError) as error:
        # Whatever one method stumbles over, the draws and the other methods' results stand.
        kind = "" if isinstance(error, BayeskitError) else f"{type(error).__name__}: "
        failure = (f"failed: {kind}{error}",)
        if method.kind == "score":
            result = PredictiveScore(method.name, math.nan, math.nan, 0, failure)
        else:
            result = Evidence(method.name, math.nan, math.nan, 0, failure)
    own = time.monotonic() - begin - (sum(material.seconds.values()) - made)
    shared = math.fsum(material.seconds.get(part, 0.0) for part in method.needs)
    return replace(result, seconds=max(0.0, own, result.seconds) + shared)
