"""A lower bound of log q is exploited where the entropy of q is maximised, and an unbiased estimate is not.

Title: Reverse divergence and entropy by IWAE and SUMO
Subject: Variational inference and discrete choices
Made in: {cite:t}`luo2020`
Verdict: holds
Number: a q that equals its target, through codes of noise sd 0.5, seems to diverge from it by -2.31 nats by the bound
    of 1 draw, and with sd 0.1 by -96.70; for sd 0.5, 5 draws say -0.314 +- 0.009 and SUMO 0.00 +- 0.04
Page: variational_autoencoders/sumo_entropy_maximisation
"""

import math

import torch
from torch.distributions import Normal

from bayeskit.extend import new_generator


def of_one_draw(noise):
    """Return E log q(x | z) - E log p(x) for z ~ N(0, 1) apart from x, both marginals N(0, 1): without an end."""
    return -math.log(noise) - (2 - noise**2) / (2 * noise**2) + 0.5


n, cap, noise = 20_000, 200, 0.5
x, u = torch.randn(n, generator=new_generator(0)).double(), torch.rand(n, generator=new_generator(1)).double()
codes = torch.randn(cap + 1, n, generator=new_generator(2)).double()  # the prior proposes
log_weight = Normal(math.sqrt(1 - noise**2) * codes, noise).log_prob(x)
k = torch.arange(1, cap + 2)[:, None]
bounds = log_weight.logcumsumexp(0) - k.log() - Normal(0.0, 1.0).log_prob(x)
reached = k[:-1] <= 1 / (1 - u)  # with the chance 1 / k
unbiased = bounds[0] + (bounds.diff(dim=0) * k[:-1] * reached).sum(0)
five, sumo = ((float(v.mean()), float(v.std()) / math.sqrt(n)) for v in (bounds[4], unbiased))
found = 0.5, of_one_draw(0.5), 1, 0.1, of_one_draw(0.1), 0.5, 5, five, sumo
assert of_one_draw(0.1) < of_one_draw(0.5) < five[0] < -0.1 and abs(sumo[0]) < 5 * sumo[1] + 0.01
