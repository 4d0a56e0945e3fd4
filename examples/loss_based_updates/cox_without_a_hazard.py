r"""Rearrests of released prisoners: a Cox model without a model of the hazard.

What you will learn: how to be Bayesian about a partial likelihood, which is a loss and no likelihood.

Rossi followed 432 men for a year after their release; half of them got financial aid. The hazard of arrest is
:math:`\lambda_0(t) \exp(x^\top \theta)`. The full model needs a prior on the function :math:`\lambda_0`; the partial
likelihood does not. It couples data through risk sets, yet with weight one its posterior has the width that repeated
sampling asks for, so that a prior on the coefficients is all there is to choose.
"""

import os

import pyro.distributions as dist
import torch
from lifelines.datasets import load_rossi

import bayeskit as bk
from bayeskit.inference.generalized import GibbsPosterior, information, losses, minimize

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
LENGTHS = (100, 100) if SMALL else (500, 2000)  # of warm-up and of what is kept
COVARIATES = ["fin", "age", "race", "wexp", "mar", "paro", "prio"]
# The maximum of the partial likelihood with Efron's ties, from the R package survival (Fox and Weisberg 2011).
PUBLISHED = [-0.37942, -0.05744, 0.31390, -0.14980, -0.43370, -0.08487, 0.09150]


def main() -> None:
    table = load_rossi()
    x = torch.tensor(table[COVARIATES].to_numpy(float))
    time, event = (torch.tensor(table[name].to_numpy(float)) for name in ("week", "arrest"))
    prior = dist.Normal(torch.zeros(len(COVARIATES), dtype=torch.float64), 2.0)
    posterior = GibbsPosterior(prior, losses.CoxPartialLikelihood(), (x - x.mean(0), time, event))

    best = minimize(posterior).position
    worst = max(abs(float(a) - b) for a, b in zip(best, PUBLISHED, strict=True))
    print(f"largest difference from the published maximum: {worst:.1e}")
    assert worst < 1e-4

    found = information(posterior)
    ratio = torch.linalg.eigvals(torch.linalg.solve(found.sandwich, found.posterior_covariance)).real
    print(f"posterior variance over sandwich variance, all directions: {ratio.min():.2f} to {ratio.max():.2f}")

    draws = bk.sample(posterior, 4, *LENGTHS, seed=0, progress=False)
    theta = draws.to_arviz().posterior["theta"].stack(all=("chain", "draw"))
    for name, values in zip(COVARIATES, theta, strict=True):
        mean, low, high = (float(x) for x in (values.mean(), values.quantile(0.025), values.quantile(0.975)))
        raises = float((values > 0).mean())
        print(f"{name:5s} {mean:+.3f}  95 % {low:+.3f} to {high:+.3f}  raises the hazard with probability {raises:.3f}")


if __name__ == "__main__":
    main()
