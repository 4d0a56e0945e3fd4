r"""Two modes: chains that cannot cross, and temperatures that let them.

What you will learn: how plain chains say that they disagree, how exchange between temperatures weighs
the modes, and how to read round trips and the communication barrier.

The posterior has two normal modes forty widths apart with masses 0.3 and 0.7. A ladder of power posteriors
joins it to the prior, where moving is easy; after each iteration neighbouring temperatures propose to
exchange their states. Tempered sequential Monte Carlo meets both modes at the prior as well.
"""

import math
import os
import warnings

import torch

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.inference.samplers import sample_ladder, sample_smc

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
MODES, MASSES, WIDTH, PRIOR = torch.tensor([-6.0, 6.0]).double(), torch.tensor([0.3, 0.7]).double(), 0.3, 6.0


def normal(x, mean, scale):
    return -0.5 * ((x - mean) / scale).square() - math.log(scale * math.sqrt(2 * math.pi))


def two_modes() -> bk.Target:
    return bk.Target.from_functions(
        lambda u: normal(u[..., 0], 0.0, PRIOR),
        lambda u: (MASSES.log() + normal(u, MODES, WIDTH)).logsumexp(-1),
        dim=1,
        sample_prior=lambda n, g: PRIOR * torch.randn(n, 1, generator=g, dtype=torch.float64),
    )


def main() -> None:
    target = two_modes()
    # Both modes are equally far from the prior's centre, so the masses stay as they are.
    exact = float(normal(MODES[:1], 0.0, math.hypot(PRIOR, WIDTH)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = bk.sample(target, 8, 200, 300, seed=1)
    print(f"plain chains: {caught[-1].message}")
    print(f"  share at the upper mode by chain: {(plain.unconstrained[..., 0] > 0).double().mean(1).tolist()}")

    size = {"num_warmup": 100, "num_samples": 600} if SMALL else {"num_warmup": 300, "num_samples": 3000}
    ladder = sample_ladder(target, 16, num_chains=8, seed=1, exchange=True, **size)
    upper = (ladder.draws.unconstrained[-8:, :, 0] > 0).double().mean()
    trips = ladder.exchange
    print(f"with exchange: share at the upper mode {float(upper):.3f}, exact 0.7")
    print(f"  {float(trips.round_trips.sum()):.0f} round trips, {trips.round_trip_rate:.3f} an iteration "
          f"(ideal {trips.ideal_round_trip_rate:.3f}), barrier {trips.barrier:.2f}")  # fmt: skip
    assert abs(float(upper) - 0.7) < 0.15

    print(f"log evidence, exact {exact:.4f}")
    run = sample_smc(target, num_particles=32 if SMALL else 64, seed=1)
    for z in (
        evidence.stepping_stone(target, ladder),
        evidence.modified_path_sampling(target, ladder),
        evidence.smc(target, run),
    ):
        print(f"  {z}")
        assert abs(z.log_evidence - exact) < 5 * z.standard_error


if __name__ == "__main__":
    main()
