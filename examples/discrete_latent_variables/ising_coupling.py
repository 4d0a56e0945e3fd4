"""How strongly do neighbours pull? The coupling of an Ising grid, exactly and by pseudo-likelihood.

What you will learn: how a partition function that sums over 2**64 states is computed exactly, how it makes the
posterior of a coupling exact, and what it costs to replace the likelihood by the product of each spin's probability
given its neighbours: intervals that are too short.

The model: spins of -1 and 1 on a free grid of 8 by 8,

    coupling ~ Uniform(0, 0.8),   p(spins | coupling) = exp(coupling * sum of products of neighbours) / Z(coupling).
"""

import os

import torch

from bayeskit.models.discrete.ising import CRITICAL_COUPLING, IsingGrid, kaufman_log_partition

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
SIDE, LARGEST = 8, 0.8


def covers(log_likelihood: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Return how often the central 90 % of posteriors hold the truth, and their mean length.

    Likelihoods have the shape ``(replicates, cells)``, of cells that divide the flat prior's range.
    """
    cells = log_likelihood.shape[-1]
    mass = log_likelihood.softmax(-1)
    place = truth * cells / LARGEST
    cell = place.long().unsqueeze(-1)
    below = mass.cumsum(-1).gather(-1, cell) - mass.gather(-1, cell) * (1 - place.unsqueeze(-1) + cell)
    inside = (mass.cumsum(-1) > 0.05) & (mass.cumsum(-1) < 0.95)
    return float(((below > 0.05) & (below < 0.95)).double().mean()), float(inside.double().mean()) * LARGEST


def main() -> None:
    # A torus without a field has a closed form, for every size: the transfer matrix agrees with it.
    torus = IsingGrid.homogeneous(SIDE, SIDE, torch.tensor(CRITICAL_COUPLING, dtype=torch.float64), periodic=True)
    exact = float(kaufman_log_partition(SIDE, SIDE, CRITICAL_COUPLING))
    print(f"log partition function of a critical torus: {float(torus.log_partition):.12f}, Kaufman's {exact:.12f}")
    assert abs(float(torus.log_partition) - exact) < 1e-10

    # Couplings from the prior, and an exact draw of spins for each.
    replicates = 200 if SMALL else 2000
    torch.manual_seed(1)
    truth = LARGEST * torch.rand(replicates, dtype=torch.float64)
    spins = IsingGrid.homogeneous(SIDE, SIDE, truth).sample()

    couplings = LARGEST * (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    grid = IsingGrid.homogeneous(SIDE, SIDE, couplings)
    table = {
        "likelihood": grid.log_prob(spins.unsqueeze(1)),
        "pseudo-likelihood": grid.log_pseudolikelihood(spins.unsqueeze(1)),
    }
    error = (0.9 * 0.1 / replicates) ** 0.5
    covered = {}
    for name, log_likelihood in table.items():
        covered[name], length = covers(log_likelihood, truth)
        print(f"90 % intervals by {name}: {100 * covered[name]:.1f} % hold the truth, mean length {length:.3f}")
    print(f"(standard error of the percentages where 90 % is true: {100 * error:.1f})")
    assert abs(covered["likelihood"] - 0.9) < 4 * error
    assert SMALL or covered["pseudo-likelihood"] < 0.9 - 4 * error

    # What the coupling means: the chance that two neighbours agree, in the middle of the grid.
    for coupling in (0.2, CRITICAL_COUPLING, 0.8):
        expected = IsingGrid.homogeneous(SIDE, SIDE, torch.tensor(coupling, dtype=torch.float64)).expectations()
        agree = 0.5 + 0.5 * float(expected.horizontal[SIDE // 2, SIDE // 2 - 1])
        print(f"coupling {coupling:.3f}: neighbours agree with probability {agree:.3f}")


if __name__ == "__main__":
    main()
