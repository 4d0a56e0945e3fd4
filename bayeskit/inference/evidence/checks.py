"""Diagnostics shared by estimators; each returns the warnings a user should read."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.draws import Draws
from bayeskit.errors import DrawsError
from bayeskit.inference.evidence.statistics import effective_sample_size, r_hat
from bayeskit.target import Target

MAX_R_HAT = 1.05
MAX_PARETO_SHAPE = 0.7
MIN_EFFECTIVE = 100
MAX_DIVERGING = 0.01


def belongs(draws: Draws, target: Target) -> None:
    """Refuse draws that were not made from ``target``.

    Raises
    ------
    DrawsError
        If the dimension differs, or the recorded density is not that of ``target``.
    """
    if draws.unconstrained.shape[-1] != target.dim:
        raise DrawsError(
            f"the draws have dimension {draws.unconstrained.shape[-1]}, the target {target.dim}; "
            "pass the target that they were drawn from"
        )
    if draws.target is target:
        return
    probe = draws.unconstrained[:, -1]
    log_prior, log_likelihood = target.evaluate(probe)
    tolerance = 1e-3 if target.dtype == torch.float32 else 1e-6
    scale = 1 + draws.log_likelihood[:, -1].abs() + draws.log_prior[:, -1].abs()
    difference = (log_prior - draws.log_prior[:, -1]).abs() + (log_likelihood - draws.log_likelihood[:, -1]).abs()
    if bool((difference > tolerance * scale).any()):
        raise DrawsError("the draws come from another target: their recorded densities differ from this one's")


def posterior_problems(draws: Draws) -> tuple[list[str], dict[str, float]]:
    """Check chains for disagreement, too few effective draws, and divergences."""
    x = torch.cat([draws.unconstrained.movedim(-1, 0), draws.log_density.unsqueeze(0)])
    worst = float(r_hat(x).max())
    effective = float(effective_sample_size(x).min())
    diverging = draws.sample_stats.get("diverging")
    share = 0.0 if diverging is None else float(diverging.to(torch.float64).mean())
    problems = []
    if not worst <= MAX_R_HAT:
        problems.append(f"chains disagree (R-hat {worst:.3f} > {MAX_R_HAT}): run longer chains or more warm-up")
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective draws: run longer chains")
    if share > MAX_DIVERGING:
        problems.append(f"{100 * share:.1f} % of transitions diverged: raise target_acceptance or reparameterise")
    return problems, {"r_hat": worst, "effective_draws": effective, "diverging": share}


def weight_problems(shape: float, effective: float) -> list[str]:
    """Check importance weights by their Pareto shape and effective number."""
    problems = []
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): "
            "use bridge sampling or stepping stone"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: use more draws or a closer proposal")
    return problems


def ladder_problems(log_likelihood: Tensor, diverging: Tensor | None) -> tuple[list[str], dict[str, float]]:
    """Check that the chains of every temperature agree; ``log_likelihood`` is ``(T, chains, draws)``."""
    ranks = r_hat(log_likelihood[1:])
    worst = float(ranks.max())
    problems = []
    if not worst <= 2 * MAX_R_HAT - 1:
        problems.append(
            f"chains at temperature {int(ranks.argmax()) + 1} disagree (R-hat {worst:.3f}): "
            "give the ladder more warm-up and samples"
        )
    share = 0.0 if diverging is None else float(diverging.to(torch.float64).mean())
    if share > MAX_DIVERGING:
        problems.append(f"{100 * share:.1f} % of transitions diverged: raise target_acceptance or reparameterise")
    return problems, {"r_hat": worst, "diverging": share}
