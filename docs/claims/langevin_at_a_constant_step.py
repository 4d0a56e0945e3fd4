"""Stochastic-gradient Langevin dynamics draws from the posterior.

Title: Stochastic gradient Langevin dynamics (SGLD) at a constant step
Subject: Monte Carlo and calibration
Made in: abstract of {cite:t}`welling2011`, for steps that fall to zero
Verdict: holds if the step falls to zero
Number: at a constant step of 0.5, exact gradients give a standard normal the variance 1.143, and 2,000 steps that fall
    as the inverse root of their number 1.003; runs find 1.161 +- 0.009 and 1.006 +- 0.008
Page: sampling/stochastic_gradient
"""

import math

import torch

from bayeskit.extend import new_generator

step, n = 0.5, 30_000


def run(steps):
    """Return the exact variance after these steps on a standard normal, and that of a run with its standard error."""
    generator = new_generator(2)
    w, variance = torch.randn(n, dtype=torch.float64, generator=generator), 1.0
    for e in steps:
        w = w - e / 2 * w + math.sqrt(e) * torch.randn(n, dtype=torch.float64, generator=generator)
        variance = (1 - e / 2) ** 2 * variance + e
    return variance, (float(w.var()), float(w.var()) * math.sqrt(2 / n))


(constant, of_constant), (falling, of_falling) = run([step] * 60), run([step / k**0.5 for k in range(1, 2001)])
found = step, constant, 2000, falling, of_constant, of_falling
assert abs(constant - 1 / (1 - step / 4)) < 1e-9 and abs(of_constant[0] - constant) < 5 * of_constant[1] < constant - 1
assert abs(falling - 1) < 0.005 and abs(of_falling[0] - falling) < 5 * of_falling[1]
