"""How many kinds of members has a karate club? Blocks of a social network, and their evidence.

What you will learn: how the evidence of the stochastic block model grows with the number of blocks, that two blocks
find the few members whom everybody knows rather than the two sides, that four blocks find both, and how sure the
posterior is about who belongs together.

Zachary (1977) watched 34 members of a club and their 78 friendships until it split in two. The model:

    proportions ~ Dirichlet(1, ..., 1),   block of a member ~ proportions,
    probability of a friendship between blocks a and b ~ Beta(1, 1).

Proportions and probabilities integrate out, so that a Gibbs sweep moves members between blocks and nothing else.
"""

import os

import torch

from bayeskit.models.discrete.block_model import (
    StochasticBlockModel,
    annealed_evidence,
    co_assignment,
    compare_num_blocks,
    karate_club,
    plot_adjacency,
    plot_co_assignment,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def most_probable_of_sweeps(model: StochasticBlockModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Sweep from draws of the prior; return the most probable assignment where chains end, and all of these."""
    generator = torch.Generator().manual_seed(0)
    draws = model.sample_prior(100 if SMALL else 1000, generator=generator)
    for _ in range(60 if SMALL else 200):
        draws = model.gibbs_sweep(draws, generator=generator)
    return draws[model.log_joint(draws).argmax()], draws


def main() -> None:
    club = karate_club()
    print(f"{len(club.adjacency)} members, {int(club.adjacency.sum()) // 2} friendships")

    # Where all assignments can be listed, annealing can be checked: the instructor's first ten members.
    few = StochasticBlockModel(club.adjacency[:10, :10], num_blocks=2)
    exact = float(few.enumerate().log_evidence)
    estimate = annealed_evidence(few, num_chains=1000, num_steps=20, seed=0)
    print(f"ten members: exact {exact:.3f}, annealed {estimate.log_evidence:.3f} +- {estimate.standard_error:.3f}")
    assert abs(estimate.log_evidence - exact) < 4 * estimate.standard_error

    comparison = compare_num_blocks(
        club.adjacency,
        (1, 2) if SMALL else (1, 2, 3, 4, 5),
        num_chains=400 if SMALL else 1000,
        num_steps=60 if SMALL else 400,
    )
    print(comparison)
    assert comparison.log_bayes_factor(2, 1)[0] > 20
    if not SMALL:
        assert comparison.log_bayes_factor(4, 2)[0] > 3

    # Two blocks: those with many friends, leaders of both sides among them, and everybody else.
    two, draws = most_probable_of_sweeps(StochasticBlockModel(club.adjacency, 2))
    degrees, popular = club.adjacency.sum(0), two == two[33]
    print(
        f"two blocks: {degrees[popular].mean():.1f} friends on average in one, {degrees[~popular].mean():.1f} outside"
    )
    assert bool(popular[0]) and bool(popular[33]) and int(popular.sum()) < 8

    # Four blocks: the leaders of each side and their followers. How many members does a block's side tell right?
    four, draws = most_probable_of_sweeps(StochasticBlockModel(club.adjacency, 4))
    sides = [club.with_instructor[four == block] for block in four.unique()]
    right = sum(max(int(side.sum()), int((~side).sum())) for side in sides)
    print(
        f"four blocks of {sorted((len(side) for side in sides), reverse=True)} members; the majority of a block tells"
    )
    print(f"the side of {right} of 34 members")
    assert right >= 32

    together = co_assignment(draws)
    print(
        f"members 33 and 34 share a block with probability {together[32, 33]:.2f}, 1 and 34 with {together[0, 33]:.2f}"
    )
    if not SMALL:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 4.2), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        plot_adjacency(club.adjacency, two, left)
        plot_adjacency(club.adjacency, four, middle)
        plot_co_assignment(together, four, right)
        figure.savefig("karate_club.png", dpi=150)


if __name__ == "__main__":
    main()
