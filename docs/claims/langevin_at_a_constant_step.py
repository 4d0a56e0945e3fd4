"""Stochastic-gradient Langevin dynamics draws from the posterior.

Title: Stochastic gradient Langevin dynamics (SGLD) at a constant step
Subject: Monte Carlo and calibration
Made in: abstract of {cite:t}`welling2011`, for steps that fall to zero
Verdict: holds if the step falls to zero
Number: at a constant step of 0.5, exact gradients give a standard normal the variance 1.143; a run finds 1.140 +- 0.008
Page: sampling/stochastic_gradient
"""

import math

import torch

from bayeskit.core.randomness import new_generator

step, n = 0.5, 40_000
generator = new_generator(2)
w = torch.randn(n, dtype=torch.float64, generator=generator)
for _ in range(60):  # 0.75 ** 60 is nothing
    w = w - step / 2 * w + math.sqrt(step) * torch.randn(n, dtype=torch.float64, generator=generator)
variance, error = float(w.var()), float(w.var()) * math.sqrt(2 / n)
found = step, 1 / (1 - step / 4), (variance, error)
assert abs(variance - found[1]) < 5 * error < abs(found[1] - 1)
