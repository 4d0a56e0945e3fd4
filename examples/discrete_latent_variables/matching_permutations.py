"""Which observation belongs to which centre: a posterior over permutations, exact and relaxed.

What you will learn: how the exact posterior of a matching says which pairs are certain, how a relaxation of
permutations becomes the guide of a Pyro model and is trained by any optimiser of torch, and how far its permutations
are from the exact ones.

The model: an unknown permutation pi, uniform a priori, and observations of known centres,

    y_i is normal with mean c_{pi(i)} and standard deviation 0.5.

There are 720 permutations of six, so that the exact posterior is at hand. It still is with 20, by dynamic programming
over sets of centres; beyond, the relaxations remain. Rounding takes normal matrices for permutations and rounds them to
the nearest one, stick-breaking fills a doubly stochastic matrix entry by entry, Gumbel-Sinkhorn scales noisy scores.
"""

import os

import pyro
import torch
from pyro.infer import TraceMeanField_ELBO

from bayeskit.models.discrete.permutations import (
    GumbelSinkhornRelaxation,
    NoisyMatching,
    Relaxation,
    RoundedPermutation,
    RoundingRelaxation,
    StickBreakingRelaxation,
    permutation_matrix,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def fit(matching: NoisyMatching, relaxation: Relaxation, num_steps: int) -> None:
    """Maximise the lower bound of the relaxed model; the relaxation is what it draws from, and its guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    optimizer = torch.optim.Adam(relaxation.parameters(), lr=0.1)
    bound = TraceMeanField_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    for _ in range(num_steps):
        loss = bound.differentiable_loss(matching.relaxed_model, relaxation, relaxation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def show(name: str, probabilities: torch.Tensor) -> None:
    print(name)
    for row in probabilities:
        print("   " + "  ".join(f"{p:.2f}" if p >= 0.005 else "   ." for p in row.tolist()))


def main() -> None:
    matching, truth = NoisyMatching.simulate(6, scale=0.5, seed=4)
    posterior = matching.posterior()
    print(f"log evidence {float(matching.log_evidence()):.4f}")
    print(f"truth {truth.tolist()}, most probable {posterior.mode.tolist()}, ", end="")
    print(f"with probability {float(posterior.log_prob(posterior.mode).exp()):.3f}")
    show("probability of each pair, exactly", posterior.marginals)

    shape, float64 = (6,), torch.float64
    relaxations = [
        RoundingRelaxation(shape, dtype=float64),
        StickBreakingRelaxation(shape, dtype=float64),
        GumbelSinkhornRelaxation(shape, temperature=1.0, prior_temperature=0.5, dtype=float64),
    ]
    furthest = []
    for relaxation in relaxations:
        fit(matching, relaxation, 150 if SMALL else 500)
        drawn = relaxation.sample_permutations(2000, seed=0)
        probabilities = permutation_matrix(drawn, float64).mean(0)
        furthest.append(float((probabilities - posterior.marginals).abs().max()))
        show(f"{type(relaxation).__name__}, at most {furthest[-1]:.2f} from that", probabilities)

    # Where the log weights of pairs are at hand, as here, noise around them needs no training, and is closer.
    torch.manual_seed(0)
    drawn = RoundedPermutation.near_gibbs(matching.log_weights).sample_permutations((2000,))
    near = permutation_matrix(drawn, float64).mean(0)
    show(
        f"RoundedPermutation.near_gibbs, at most {float((near - posterior.marginals).abs().max()):.2f} from that", near
    )

    # Draws of a relaxation weigh as much as the posterior says: here, how many distinct ones it takes for 90 %.
    ranked = posterior.log_prob(posterior.enumerate_support()).exp().sort(descending=True).values
    print(f"{int((ranked.cumsum(0) < 0.9).sum()) + 1} of {len(ranked)} permutations hold 90 % of the posterior")
    assert abs(float(ranked.sum()) - 1) < 1e-9
    assert furthest[0] < 0.35


if __name__ == "__main__":
    main()
