"""Near a minimum the empirical Fisher information is the Fisher information.

Title: Empirical Fisher information near a minimum
Subject: Neural networks and sparse priors
Made in: literature that section 4.2 of {cite:t}`kunstner2019` reviews and corrects
Verdict: holds if the model's noise is that of the data
Number: at the minimum the traces have the ratio 0.99 +- 0.01 where residuals have the model's sd, and 0.247 +- 0.003
    where they have half of it
Page: wide_networks/laplace_with_the_right_fisher
"""

import torch

from bayeskit.extend import new_generator

n = 20_000
x = torch.randn(n, 3, dtype=torch.float64, generator=new_generator(0))


def ratio(sd):
    """Return the empirical over the true trace at the minimum, for residuals of an sd that the model takes for one."""
    y = x.sum(1) + sd * torch.randn(n, dtype=torch.float64, generator=new_generator(1))
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    gradients = (x @ w - y)[:, None] * x
    assert float(gradients.mean(0).abs().max()) < 1e-6  # a minimum
    fisher, empirical = x.square().sum(1), gradients.square().sum(1)
    value = float(empirical.mean() / fisher.mean())
    return value, float((empirical - value * fisher).std() / fisher.mean()) / n**0.5


found = ratio(1.0), ratio(0.5)
assert abs(found[0][0] - 1) < 5 * found[0][1] < 0.1
assert abs(found[1][0] - 0.25) < 5 * found[1][1] < 0.1
