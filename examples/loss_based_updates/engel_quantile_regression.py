r"""Engel's law by quantile regression: what poor and rich households spend on food.

What you will learn: how to update beliefs on regression quantiles, each with its own loss and its own weight.

Engel (1857) recorded income and food expenditure of 235 Belgian households. The pinball loss at level :math:`\tau`,
:math:`\ell(\theta; x, y) = (\tau - 1[y < a + b x])(y - a - b x)`, is smallest at the line below which the share
:math:`\tau` of expenditures lies. No density of expenditure is assumed. The spread grows with income, so that the
posterior of weight one would tell nothing of how well the lines are known.
"""

import os

import pyro.distributions as dist
import torch
from statsmodels.datasets import engel

import bayeskit as bk
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses, minimize

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
REPLICATES, LENGTHS = (20, (100, 100)) if SMALL else (1000, (500, 1000))  # lengths of warm-up and of what is kept
PUBLISHED = {0.1: (110.1416, 0.4018), 0.5: (81.4823, 0.5602), 0.9: (67.3509, 0.6863)}  # by linear programming


def main() -> None:
    table = engel.load_pandas().data
    income = torch.tensor(table["income"].to_numpy(), dtype=torch.float64)
    food = torch.tensor(table["foodexp"].to_numpy(), dtype=torch.float64)
    # Thousands of francs, and a centred income: then the two coefficients are nearly independent.
    scale, centre = 1000.0, income.mean() / 1000.0
    covariates = torch.stack([torch.ones_like(income), income / scale - centre], -1)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0)

    for level, (intercept, slope) in PUBLISHED.items():
        posterior = GibbsPosterior(prior, losses.Pinball(level, predict=losses.linear), (covariates, food / scale))
        found = posterior.parameter(minimize(posterior).position)
        at_zero = float((found[0] - found[1] * centre) * scale)
        print(f"level {level}: {at_zero:.4f} + {float(found[1]):.4f} income; published {intercept} + {slope} income")
        assert abs(at_zero - intercept) < 0.01 and abs(float(found[1]) - slope) < 1e-4

        weight = calibrate.posterior_coverage(posterior, num_replicates=REPLICATES, seed=0).weight
        draws = bk.sample(posterior.with_weight(weight), 4, *LENGTHS, seed=0, progress=False)
        values = draws.to_arviz().posterior["theta"].stack(all=("chain", "draw"))[1]
        low, high = (float(values.quantile(q)) for q in (0.025, 0.975))
        print(f"    weight {weight:.1f}: slope {float(values.mean()):.4f}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
