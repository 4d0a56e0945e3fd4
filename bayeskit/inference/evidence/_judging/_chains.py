"""Diagnostics of chains: of the posterior, and of a ladder of temperatures."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._core.convergence import (
    MAX_R_HAT,
    MIN_EFFECTIVE,
    MIN_EFFECTIVE_WITHIN,
    chain_problems,
    divergence_problems,
    stands_still,
)
from bayeskit._core.statistics import effective_sample_size, effective_within_chains, r_hat
from bayeskit._draws import Draws
from bayeskit.inference.evidence._judging._belonging import LOST_CHAINS
from bayeskit.inference.samplers._ladder import Ladder

_MIN_ROUND_TRIPS = 10
#: Draws at a temperature from which quartiles are taken.
_QUARTILES_OF = 1000


def posterior_problems(draws: Draws) -> tuple[list[str], dict[str, float]]:
    """Check chains for stillness, disagreement, too few effective draws, and divergences."""
    lost = int(draws.settings.get(LOST_CHAINS, 0))
    names = draws.target.names
    return chain_problems(draws.unconstrained, draws.log_density, draws.sample_stats.get("diverging"), lost, names)


def ladder_problems(ladder: Ladder) -> tuple[list[str], dict[str, float]]:
    """Check that the chains at every temperature agree on position and likelihood."""
    log_likelihood, diverging = ladder.log_likelihood, ladder.draws.sample_stats.get("diverging")
    levels, chains, count = log_likelihood.shape
    position = ladder.draws.unconstrained.reshape(levels, chains, count, -1).movedim(-1, 1)
    location, spread = _centre(position)

    def at(level: int) -> Tensor:
        """Return positions and log likelihoods at a temperature, ``(d + 1, chains, draws)``."""
        # Bounded, so that a heavy-tailed prior does not count as disagreement.
        bounded = ((position[level] - location[level]) / spread[level]).tanh()
        return torch.cat([bounded, log_likelihood[level].unsqueeze(0)])

    # One temperature after the other: the draws of all together fill the memory, and each pass over it costs seconds.
    ranks = torch.stack([r_hat(at(level)) for level in range(1, levels)])
    worst = float(ranks.max())
    problems = []
    still = stands_still(ladder.draws.unconstrained).unflatten(0, (levels, chains))[1:]
    if bool(still.any()):
        level, _, place = still.nonzero()[0].tolist()
        problems.append(
            f"{_coordinate(ladder.draws, place)} stands still in chains at temperature {level + 1}, which is no "
            "convergence: narrow its prior, or bring its scale near one"
        )
    # As for the posterior: the difference of half chains depends on their effective sample size, which takes long and
    # is asked only where it matters.
    least = (2 * MAX_R_HAT - 1) ** 2
    apart = ~(ranks.square() <= least)
    if bool(apart.any()):
        suspects = [at(int(level) + 1)[apart[level]] for level in apart.any(1).nonzero().flatten()]
        chance = 1 / effective_within_chains(torch.cat(suspects)).clamp(min=MIN_EFFECTIVE_WITHIN)
        apart[apart.clone()] = ~(ranks[apart].square() <= least + chance)
    if bool(apart.any()):
        problems.append(
            f"chains at temperature {int(ranks.amax(1).argmax()) + 1} disagree (R-hat {worst:.3f}): give the ladder "
            "more warm-up and samples; if the posterior has several modes, chains cannot estimate their relative masses"
        )
    effective = effective_sample_size(log_likelihood[1:])
    if not bool((effective >= MIN_EFFECTIVE).all()):
        fewest = float(effective.min())
        problems.append(f"a temperature has only {fewest:.0f} effective draws: give the ladder more samples")
    share = 0.0
    if diverging is not None:
        shares = diverging.to(torch.float64).reshape(levels, -1).mean(1)
        share = float(shares.mean())
        problems += divergence_problems(share, float((shares[1:] * chains * count / effective.clamp(min=1.0)).max()))
    facts = {"r_hat": worst, "diverging": share}
    if ladder.exchange is not None:
        trips = float(ladder.exchange.round_trips.sum())
        facts["round_trips"] = trips
        if trips < _MIN_ROUND_TRIPS:
            problems.append(
                f"only {trips:.0f} round trips between prior and posterior: give the ladder more samples, more "
                "temperatures, or the temperatures of ladder.exchange.temperatures"
            )
    return problems, facts


def _coordinate(draws: Draws, place: int) -> str:
    names = draws.target.names
    return repr(names[place]) if place < len(names) else f"coordinate {place}"


def _centre(position: Tensor) -> tuple[Tensor, Tensor]:
    """Median and quartile spread of each coordinate at each temperature, ``(T, d, 1, 1)``."""
    flat = position.flatten(-2)
    flat = flat[..., :: max(1, flat.shape[-1] // _QUARTILES_OF)]
    low, middle, high = flat.quantile(flat.new_tensor([0.25, 0.5, 0.75]), -1)[..., None, None]
    return middle, (high - low).clamp(min=torch.finfo(flat.dtype).tiny)
