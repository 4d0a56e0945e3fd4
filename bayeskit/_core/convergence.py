"""What chains and weights have to satisfy for estimates from them to be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit._core.statistics import effective_sample_size, effective_within_chains, r_hat

MAX_R_HAT = 1.05
MAX_PARETO_SHAPE = 0.7
MIN_EFFECTIVE = 100
MIN_EFFECTIVE_WITHIN = 8.0
_MAX_DIVERGING = 0.01
_MAX_UNREACHED = 0.05  # share of the mass behind divergences
_DIRECTIONS = 16  # longest and shortest principal directions that are looked at, each
_DRAWS_PER_DIMENSION = 10  # from which they are known


def stands_still(x: Tensor) -> Tensor:
    """Tell which coordinates never move in which chain, ``(chains, draws, d) -> (chains, d)``; a chain has two draws.

    R-hat is one for equal constants, and their effective size is their number: neither tells stillness.
    """
    if x.shape[1] < 2:
        return torch.zeros_like(x[:, 0], dtype=torch.bool)
    return (x == x[:, :1]).all(1)


def principal_directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return draws along the longest and shortest principal directions, ``(k, chains, draws)``, and these ``(k, d)``.

    Directions are in units of the standard deviations of ``x (chains, draws, d)``. Chains may agree in each coordinate
    and stand still, or disagree, in a narrow direction. ``k`` is zero for one coordinate, and for fewer than ten draws
    a dimension.
    """
    flat = x.flatten(0, 1).double()
    n, d = flat.shape
    deviation = flat.std(0)
    if d == 1 or n < _DRAWS_PER_DIMENSION * d or not bool(((deviation > 0) & deviation.isfinite()).all()):
        return x.new_zeros(0, *x.shape[:2]), x.new_zeros(0, d)
    unit = (flat - flat.mean(0)) / deviation
    _, vectors = torch.linalg.eigh(unit.mT @ unit)
    if d > 2 * _DIRECTIONS:
        vectors = torch.cat([vectors[:, :_DIRECTIONS], vectors[:, -_DIRECTIONS:]], 1)
    return (unit @ vectors).T.reshape(-1, *x.shape[:2]).to(x), vectors.T.to(x)


def chain_problems(
    unconstrained: Tensor,
    log_density: Tensor,
    diverging: Tensor | None,
    lost: int = 0,
    names: Sequence[str] = (),
) -> tuple[list[str], dict[str, float]]:
    """Check chains ``(chains, draws, d)`` for stillness, disagreement, too few effective draws, and divergences.

    ``log_density`` and ``diverging`` are ``(chains, draws)``; ``lost`` chains were left out; ``names`` are those of the
    coordinates.
    """
    directions, _ = principal_directions(unconstrained)
    x = torch.cat([unconstrained.movedim(-1, 0), log_density.unsqueeze(0), directions])
    ratio = r_hat(x)
    worst = float(ratio.max())
    effective = float(effective_sample_size(x).min())
    share = 0.0 if diverging is None else float(diverging.to(torch.float64).mean())
    if problems := stillness_problems(unconstrained, names):
        return problems, {"r_hat": math.nan, "effective_draws": 0.0, "diverging": share}
    # The difference of half chains depends on their effective sample size, however many chains there are.
    chance = 1 / effective_within_chains(x).clamp(min=MIN_EFFECTIVE_WITHIN)
    if not bool((ratio.square() <= MAX_R_HAT**2 + chance).all()):
        problems.append(f"chains disagree (R-hat {worst:.3f} > {MAX_R_HAT}): run longer chains or more warm-up")
    if lost:
        problems.append(
            f"{lost} chains were left out, because the density is infinite or NaN at some of their draws: check the "
            "model there"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective draws: run longer chains")
    problems += divergence_problems(share, x[0].numel() * share / max(effective, 1.0))
    return problems, {"r_hat": worst, "effective_draws": effective, "diverging": share}


def stillness_problems(unconstrained: Tensor, names: Sequence[str] = ()) -> list[str]:
    """Return a warning if a coordinate of ``(chains, draws, d)`` stands still in a chain."""
    still = stands_still(unconstrained)
    if not bool(still.any()):
        return []
    place = int(still.sum(0).argmax())
    name = repr(names[place]) if place < len(names) else f"coordinate {place}"
    return [
        f"{name} stands still in {int(still[:, place].sum())} of {len(still)} chains, which is no convergence: "
        "bring its scale near one, narrow its prior, or pass initial="
    ]


def divergence_problems(share: float, unreached: float) -> list[str]:
    """Return a warning on the share of transitions that diverged, or on the mass that they may not have reached."""
    if share > _MAX_DIVERGING:
        return [f"{100 * share:.1f} % of transitions diverged: raise target_acceptance or reparameterise"]
    # Diverging chains turn back. If admitted, they would stay for about one autocorrelation time, so the mass beyond is
    # about the share of such transitions times this time.
    if unreached > _MAX_UNREACHED:
        return [
            f"{100 * share:.2g} % of transitions diverged and chains move slowly, so up to "
            f"{100 * min(unreached, 1):.0f} % of the mass may not have been reached: raise target_acceptance or "
            "reparameterise"
        ]
    return []
