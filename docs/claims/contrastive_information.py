"""The contrastive bound estimates the mutual information.

Title: InfoNCE: contrastive estimates of mutual information
Subject: Information and generalisation
Made in: title of section 2.3 of {cite:t}`oord2018`, whose text says that it is a lower bound
Verdict: holds if the log of the batch is far above the information
Number: two normals of information 0.8304 have the bound 0.335 +- 0.003 at a batch of 2, 0.745 +- 0.003 at 16, and
    0.821 +- 0.004 at 256
Page: sampling/which_experiment
"""

import math

import torch
from torch.distributions import Normal

from bayeskit.extend import new_generator


def bound(batch, repeats, rho=0.9):
    """Return the bound and its standard error for the true density ratio, the best critic."""
    x, e = torch.randn(2, repeats, batch, dtype=torch.float64, generator=new_generator(1))
    y = rho * x + math.sqrt(1 - rho**2) * e
    critic = Normal(rho * x[:, None, :], math.sqrt(1 - rho**2)).log_prob(y[:, :, None])
    values = (critic.diagonal(dim1=1, dim2=2) - critic.logsumexp(2) + math.log(batch)).mean(1)
    return float(values.mean()), float(values.std()) / math.sqrt(repeats)


information = -0.5 * math.log(1 - 0.9**2)
found = information, bound(2, 20_000), 2, bound(16, 4000), 16, bound(256, 200), 256
(two, _), (sixteen, _), (many, error) = found[1], found[3], found[5]
assert two < 0.6 * information and 0.8 * information < sixteen < 0.95 * information
assert abs(many - information) < 0.02 * information + 4.5 * error and error < 0.01 * information
