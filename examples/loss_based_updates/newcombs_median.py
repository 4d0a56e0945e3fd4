r"""Newcomb's speed of light: a posterior of the median, without a model of the data.

What you will learn: how to update beliefs by a loss, why its weight matters, and how to choose it.

Newcomb timed light in 1882; 66 deviations from 24,800 nanoseconds are left, and two of them went astray. A normal model
must explain these two, and shifts. The posterior of a loss asks for the median only,

.. math:: \pi_w(\theta \mid x) \propto \exp\Big(-w \sum_i |\theta - x_i|\Big)\, \pi(\theta),

but the loss knows no unit: with weight one the posterior is far too narrow. Matching its width to the information in
the data, or to the bootstrap, gives an honest one.
"""

import os

import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
# Newcomb (1891), as listed by Stigler (1977), Do robust estimators work with real data? Annals of Statistics 5.
TIMES = """28 26 33 24 34 -44 27 16 40 -2 29 22 24 21 25 30 23 29 31 19 24 20 36 32 36 28 25 21 28 29 37 25 28 26
30 32 36 26 30 22 36 23 27 27 28 27 31 27 26 33 26 32 32 24 39 28 24 25 32 25 29 27 28 29 16 23"""


def exact_moments(posterior: GibbsPosterior) -> tuple[float, float]:
    """Integrate over a fine grid: with one parameter, nothing is left to chance."""
    grid = torch.linspace(15.0, 40.0, 50_001, dtype=torch.float64)
    weight = posterior.log_density(grid[:, None]).softmax(0)
    mean = (weight * grid).sum()
    return float(mean), float((weight * (grid - mean).square()).sum().sqrt())


def main() -> None:
    x = torch.tensor([float(word) for word in TIMES.split()], dtype=torch.float64)
    prior = dist.Normal(torch.tensor(25.0, dtype=torch.float64), 100.0)
    median = GibbsPosterior(prior, losses.Absolute(), x)
    print(f"{len(x)} times, mean {x.mean():.4f}, median {x.median():.0f}, smallest {x.min():.0f}")

    matched = calibrate.information_matching(median)
    covering = calibrate.posterior_coverage(median, num_replicates=200 if SMALL else 1000, seed=0)
    print(f"weight by information matching {matched.weight:.3f}, by bootstrap coverage {covering.weight:.3f}")

    normal = losses.NegativeLogLikelihood(lambda mean: dist.Normal(mean, x.std()))
    robust = losses.BetaDivergence(0.1, lambda mean: dist.Normal(mean, 5.0))
    rows = {
        "normal model": GibbsPosterior(prior, normal, x),
        "absolute loss, weight 1": median,
        "absolute loss, weight .1528": median.with_weight(0.1528),
        "absolute loss, information": median.with_weight(matched.weight),
        "absolute loss, coverage": median.with_weight(covering.weight),
        "beta-divergence .1": GibbsPosterior(prior, robust, x),
    }
    for name, posterior in rows.items():
        mean, sd = exact_moments(posterior)
        print(f"{name:28s} mean {mean:.3f}, sd {sd:.3f}")

    draws = bk.sample(rows["absolute loss, coverage"], num_samples=200 if SMALL else 2000, seed=0, progress=False)
    theta = draws.to_arviz().posterior["theta"]
    print(f"the same by sampling:        mean {float(theta.mean()):.3f}, sd {float(theta.std()):.3f}")


if __name__ == "__main__":
    main()
