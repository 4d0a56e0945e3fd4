"""Thermodynamic integration that adds temperatures until the discretisation gap is small enough."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.ladder._integration import Curve, curve
from bayeskit.inference.evidence.ladder.placement import temperatures
from bayeskit.inference.evidence.ladder.stepping_stone import stepping_stone
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder, sample_ladder
from bayeskit.target import Target

MAX_ROUNDS = 4
MARGIN = 0.25  # of the tolerance is aimed at, since a pilot's estimate of the gap is rough


@estimator()
def thermodynamic_integration(
    target: Target,
    *,
    ladder: Ladder | None = None,
    tolerance: float = 0.01,
    num_temperatures: int = 20,
    max_temperatures: int = 200,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    seed: int = 0,
    progress: bool = False,
    checkpoint: str | Path | None = None,
) -> Evidence:
    """Integrate the mean log likelihood over temperatures placed until the rule's error is below a tolerance.

    The rule is that of :func:`modified_path_sampling`. What it misses in each interval is estimated
    from the third cumulants of the log likelihood; a short pilot ladder decides how many
    temperatures are needed and where, and the ladder drawn there is measured again, up to four
    times. Only the last ladder enters the estimate; its remaining gap is part of the standard error.

    Parameters
    ----------
    target : Target
        Its prior must be one it can draw from.
    ladder : Ladder, optional
        Used instead of the pilot, and for the estimate itself if its gap is small enough already.
    tolerance : float, default 0.01
        Largest discretisation gap, in nats.
    num_temperatures : int, default 20
        Steps of the pilot.
    max_temperatures : int, default 200
        Steps that no ladder may exceed.
    num_chains : int, default 8
        Chains at each temperature.
    num_warmup, num_samples : int, default 200 and 500
        Iterations of each chain; the pilot makes half and a quarter of them.
    seed : int, default 0
    progress : bool, default False
    checkpoint : path, optional
        Prefix of the files from which interrupted ladders resume.

    Returns
    -------
    Evidence
        Not trusted if the gap stayed above the tolerance, or the first step rests on too few of the prior's draws.

    Raises
    ------
    DrawsError
        If ``ladder`` comes from another target.
    SettingsError
        If a setting lies outside its domain, or ``ladder`` is no ladder.

    References
    ----------
    Lartillot, N., Philippe, H. (2006). Computing Bayes factors using thermodynamic
    integration. Systematic Biology 55, 195-207.
    Friel, N., Hurn, M., Wyse, J. (2014). Improving power posterior estimation of
    statistical evidence. Statistics and Computing 24, 709-723.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import thermodynamic_integration
    >>> case = exact.get("beta_binomial")
    >>> z = thermodynamic_integration(case.target(), num_samples=200)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, abs(z.diagnostics["gap"]) < 0.01
    (True, True)
    """
    tolerance = real_number("tolerance", tolerance, between=(0, math.inf))
    num_temperatures = whole_number("num_temperatures", num_temperatures, 4)
    max_temperatures = whole_number("max_temperatures", max_temperatures, num_temperatures)
    num_warmup, num_samples = whole_number("num_warmup", num_warmup, 0), whole_number("num_samples", num_samples, 8)
    generator = new_generator(seed, stream="thermodynamic integration")
    seeds = torch.randint(2**31, (MAX_ROUNDS + 1,), generator=generator).tolist()

    def draw(number: int, levels: torch.Tensor | None) -> Ladder:
        warmup, samples = (num_warmup, num_samples) if number else (num_warmup // 2, max(num_samples // 4, 8))
        return sample_ladder(
            target,
            num_temperatures,
            num_chains,
            warmup,
            samples,
            seeds[number],
            beta=levels,
            checkpoint=None if checkpoint is None else f"{checkpoint}.{number}",
            progress=progress,
        )

    given = ladder is not None
    current = draw(0, None) if ladder is None else ladder
    path, spent, rounds = curve(target, current), current.num_evaluations, 0
    factor = MARGIN
    while rounds < MAX_ROUNDS and not (_settled(path, tolerance) and (rounds or given)):
        levels = temperatures(path, current, factor * tolerance, max_temperatures)
        if rounds and len(levels) == len(current.beta) == max_temperatures + 1:
            break  # better than this it will not become
        rounds += 1
        factor /= 2
        current = draw(rounds, levels)
        spent += current.num_evaluations
        path = curve(target, current)
    z = _estimate(target, current, path, tolerance, spent, rounds)
    return with_missed_peak(z, target, current.draws)


def _settled(path: Curve, tolerance: float) -> bool:
    return path.first_step_holds and path.has_enough_intervals and _gap(path) <= tolerance


def _gap(path: Curve) -> float:
    return abs(float(path.gaps.sum()))


def _estimate(target: Target, ladder: Ladder, path: Curve, tolerance: float, spent: int, rounds: int) -> Evidence:
    monte_carlo = path.error(ladder, corrected=True)
    gap = float(path.gaps.sum())
    value = path.trapezoid + float(path.corrections.sum())
    error = math.hypot(monte_carlo, gap)
    problems = path.problems
    if not _gap(path) <= tolerance:
        problems += (
            f"the discretisation gap is still about {abs(gap):.3f}, above the tolerance {tolerance:g}, with "
            f"{len(ladder.beta) - 1} temperatures: raise max_temperatures or num_samples",
        )
    # The same draws in a product of ratios have no discretisation, so they show what cumulants cannot.
    difference = value - stepping_stone(target, ladder).log_evidence
    if not abs(difference) <= tolerance + 2 * error:
        problems += (
            f"the same draws give {-difference:+.3f} more by stepping stone: the mean log likelihood jumps between "
            "temperatures; use a ladder with exchange",
        )
    diagnostics = path.diagnostics | {
        "gap": gap,
        "monte_carlo_error": monte_carlo,
        "stepping_stone_difference": difference,
        "num_temperatures": float(len(ladder.beta) - 1),
        "rounds": float(rounds),
    }
    return Evidence("thermodynamic_integration", value, error, spent, problems, diagnostics)
