r"""Particles that find every mode.

What you will learn: how sequential Monte Carlo weighs modes between which no chain can move, and how it estimates the
evidence without bias.

A mean has a wide normal prior; the data know only its absolute value, and that with two instruments that do not
agree on how likely each sign is. Particles start in the prior and are carried to the posterior through a sequence of
temperatures: reweighted, resampled, moved. A pilot learns the sequence; then independent replicates follow it, each
of which estimates the evidence :math:`Z` without bias,

.. math:: E[\hat Z_r] = Z, \qquad \hat Z_r = \prod_k \sum_i W^{(k-1)}_i L(u_i)^{\beta_k - \beta_{k-1}},

so that the spread over replicates is its standard error.
"""

import math
import os

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit.inference.evidence import smc
from bayeskit.inference.samplers import sample_smc

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
CENTRES, SHARES, WIDTH, PRIOR = (-4.0, 4.0), (0.3, 0.7), 0.3, 5.0


def model(centres: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(torch.zeros_like(centres), PRIOR).to_event(1))
    left, right = (dist.Normal(c, WIDTH).log_prob(mean).sum() for c in centres)
    pyro.factor("instruments", torch.logaddexp(left + math.log(SHARES[0]), right + math.log(SHARES[1])))


def main() -> None:
    target = bk.Target.from_pyro(model, torch.tensor(CENTRES, dtype=torch.float64))
    size = {"num_particles": 32, "num_pilot_particles": 256, "ess_threshold": 0.9} if SMALL else {}
    run = sample_smc(target, seed=1, **size)
    print("  beta   log evidence so far   effective share   acceptance")
    path = run.log_evidence_increments.cumsum(1).mean(0)
    rows = zip(run.beta, path, run.info.effective_share.mean(0), run.info.acceptance_rate.mean(0), strict=True)
    for beta, reached, share, acceptance in list(rows)[:: max(1, len(path) // 8)]:
        print(f"{float(beta):6.4f} {float(reached):21.3f} {float(share):17.2f} {float(acceptance):12.2f}")

    right = (run.draws.values()["mean"][..., 0] > 0).double().mean(1)
    error = float(right.std()) / math.sqrt(len(right))
    print(f"share of the right mode: {float(right.mean()):.3f} +- {error:.3f}, exactly {SHARES[1]}")
    assert abs(float(right.mean()) - SHARES[1]) < 5 * error

    exact = 2 * float(dist.Normal(0.0, math.hypot(PRIOR, WIDTH)).log_prob(torch.tensor(CENTRES[1])))
    estimate = smc(target, run)
    print(f"{estimate}; exactly {exact:.4f}")
    assert abs(estimate.log_evidence - exact) < 5 * estimate.standard_error


if __name__ == "__main__":
    main()
