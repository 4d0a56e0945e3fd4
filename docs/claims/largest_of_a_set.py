"""Any pooling that does not depend on the order, such as the largest, can stand for the sum in a network on sets.

Title: Max pooling in deep sets, and the number of data
Subject: Neural networks and sparse priors
Made in: introductions to {cite:t}`zaheer2017`, whose theorem has the sum
Verdict: fails
Number: two data and the same data four times have codes that differ by 0.0000 if pooled by the largest; the
    posteriors of a normal mean have the sd 0.577 and 0.333, a divergence of 0.216 nats, and one answer for both
    is on average 0.063 nats from them at best
Page: sampling/one_network_for_all_sizes
"""

import torch
from torch.distributions import Normal, kl_divergence

from bayeskit.extend import new_generator

few = torch.tensor([[0.7], [-0.7]], dtype=torch.float64)  # y ~ N(theta, 1), theta ~ N(0, 1)
many = few.repeat(4, 1)
weight, offset = torch.randn(2, 1, 64, dtype=torch.float64, generator=new_generator(0))
codes = [torch.tanh(y @ weight + offset) for y in (few, many)]
by_largest = float((codes[0].amax(0) - codes[1].amax(0)).abs().max())
by_sum = float((codes[0].sum(0) - codes[1].sum(0)).abs().max())
posteriors = [Normal(float(y.sum()) / (1 + len(y)), (1 + len(y)) ** -0.5) for y in (few, many)]
sds = [float(p.scale) for p in posteriors]
divergence = float(kl_divergence(posteriors[1], posteriors[0]))
# One answer for both codes is an answer for neither: the best is the average posterior's, and it costs this on average.
grid = torch.linspace(-6, 6, 4801, dtype=torch.float64)
densities = torch.stack([p.log_prob(grid).exp() for p in posteriors])
cost = float((densities * (densities / densities.mean(0)).log()).sum() * (grid[1] - grid[0]) / 2)
found = by_largest, *sds, divergence, cost
assert by_largest < 1e-12 and by_sum > 1 and cost > 0.03
