r"""The Nile in 1898: whether its flow changed, when, and how often.

What you will learn: how to compare models with and without change points, and to see all places that are plausible.

The flow of the Nile at Aswan was measured each year from 1871 to 1970. Within a segment it is normal, with a mean and a
variance that are integrated out,

.. math:: \sigma^2 \sim \mathrm{InverseGamma}(2, 20000), \qquad \mu \mid \sigma^2 \sim N(1000, \sigma^2 / 0.01).

A dynamic programme sums over all places of the changes, so nothing is sampled and nothing is approximate.
"""

import os

import torch

from bayeskit.models.discrete.sequences import (
    ChangePoints,
    NegativeBinomialLengths,
    NormalSegments,
    NumberOfChanges,
    load_nile,
    plot_change_points,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def main() -> None:
    years, flow = load_nile()
    normal = NormalSegments(mean=1000.0, precision=0.01, shape=2.0, rate=20_000.0)

    none = ChangePoints(flow, normal, NumberOfChanges.exactly(0))
    one = ChangePoints(flow, normal, NumberOfChanges.exactly(1))
    factor = float(one.log_evidence - none.log_evidence)
    print(f"log evidence without a change {float(none.log_evidence):.4f}, with one {float(one.log_evidence):.4f}")
    print(f"log Bayes factor for one change: {factor:.4f}")
    places = one.place_probabilities()
    for place in places.topk(3).indices.tolist():
        print(f"last year before it {int(years[place])}: probability {float(places[place]):.4f}")
    assert abs(factor - 20.0875) < 1e-4

    several = ChangePoints(flow, normal, NumberOfChanges.up_to(5))
    lengths = ChangePoints(flow, normal, NegativeBinomialLengths(probability=0.02, successes=2, most=10))
    print("\nnumber of changes                  " + "".join(f"{k:8d}" for k in range(6)))
    for name, posterior in (("all numbers equally probable", several), ("negative binomial lengths", lengths)):
        print(f"{name:35s}" + "".join(f"{float(p):8.4f}" for p in posterior.number_probabilities[:6]))
        print(f"{'':4s}most probable: after {years[:-1][posterior.most_probable()].tolist()}")

    draws = several.sample(500 if SMALL else 5000, seed=0)
    second = draws[draws.sum(1) == 2]
    pairs, counts = torch.unique(second, dim=0, return_counts=True)
    print(f"\n{len(second)} of {len(draws)} draws have two changes, most often after", end=" ")
    print(years[:-1][pairs[counts.argmax()]].tolist())
    level = several.levels()
    print(f"mean flow, averaged over all segmentations: {float(level[0]):.1f} in 1871, {float(level[-1]):.1f} in 1970")

    figure = plot_change_points(several, years, name="flow (10^8 cubic metres)")
    if not SMALL:
        figure.savefig("nile_change_point.png", dpi=100)


if __name__ == "__main__":
    main()
