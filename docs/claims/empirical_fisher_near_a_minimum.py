"""Near a minimum the empirical Fisher information is the Fisher information.

Title: Empirical Fisher information near a minimum
Subject: Neural networks and sparse priors
Made in: literature that section 4.2 of {cite:t}`kunstner2019` reviews and corrects
Verdict: holds if the model's noise is that of the data
Number: where residuals have half the model's sd, at the minimum the traces have the ratio 0.247 +- 0.003
Page: wide_networks/laplace_with_the_right_fisher
"""

import torch

from bayeskit.core.randomness import new_generator

n = 20_000
x = torch.randn(n, 3, dtype=torch.float64, generator=new_generator(0))
y = x.sum(1) + 0.5 * torch.randn(n, dtype=torch.float64, generator=new_generator(1))  # the model says sd one
w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
gradients = (x @ w - y)[:, None] * x
fisher, empirical = x.square().sum(1), gradients.square().sum(1)
ratio = float(empirical.mean() / fisher.mean())
error = float((empirical - ratio * fisher).std() / fisher.mean()) / n**0.5
found = ((ratio, error),)
assert float(gradients.sum(0).abs().max()) < 1e-6 * n and abs(ratio - 0.25) < 5 * error
